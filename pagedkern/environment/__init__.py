"""What this machine and this process offer: folders, locks, threads, limits, compilers. Standard library only.

Everything here may be missing: a home, a lock, a disk, a thread. Nothing of that stops a computation: what cannot be
had is done without, and a warning says so once.

`folders` finds the cache folder, `trusted` opens folders that nobody else can write, `code_cache` keeps compiled code
in them, `locks` excludes other processes, `threads` starts threads, `limits` counts the processors and the memory that
containers and `ulimit` leave, `cgroups` reads the limits of containers, `compiler` tells what Numba is set to,
`notices` warns.
"""
