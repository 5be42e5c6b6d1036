"""The command line: `python -m pagedkern.autotune`. Parses, calls, prints; `tune` does the work."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pagedkern.backends as registry
from pagedkern.autotune import space as spaces
from pagedkern.autotune import store
from pagedkern.autotune.store import device as machine
from pagedkern.backends.base import ITEMSIZE

if TYPE_CHECKING:
    from rich.console import Console

    from pagedkern.autotune.space import Workload

PROG = "python -m pagedkern.autotune"
FLOATS = ("float32", "float16", "bfloat16")

TUNE_HELP = """\
Find the fastest block size, backend and kernel configuration for this machine.

Measures every configuration of every backend that this machine has, over block
sizes, on one decode and one prefill problem; checks each for correctness before
it is timed; and stores the best for each block size. From then on
backend="auto" uses it for models of the same shape and dtypes.
pagedkern.explain(...) says what would be used for a call, and why.

The default is left only for a gain of at least 2 % that the measurements prove
with 95 % confidence: the finalists run in turn, round by round, on caches that
are not in the processor's cache, and are compared within each round.

commands:
  tune     measure and store (this is what happens without a command)
  show     list what is stored, and what of it is used on this machine

The budget is time to measure: laying out the caches and compiling the kernels
come first, for each of the two problems, and are not counted in it. The kernels
that a CPU backend compiled are kept on disk, so later runs are shorter.
"""
TUNE_EXAMPLES = """\
examples:
  python -m pagedkern.autotune
  python -m pagedkern.autotune --heads 9 --kv-heads 3 --head-dim 64
  python -m pagedkern.autotune --dtype bfloat16 --seqs 64 --context 8000 --budget 5m
  python -m pagedkern.autotune --block-sizes 16,32 --json > tuned.json
  python -m pagedkern.autotune --dry-run
  python -m pagedkern.autotune show

exit status:
  0    decided and stored; or the time was too short to prove anything faster,
       but the finals had begun with the untuned choice: that stays in use, the
       report says so, and nothing is stored
  1    nothing could be decided: the untuned choice never reached the finals, is
       wrong, or is not there
  2    wrong usage, and problems that do not fit the free memory
  3    decided, but it could not be stored
  130  interrupted by Ctrl-C: the best so far was kept

environment:
  PAGEDKERN_CACHE_DIR  where choices are stored; by default the user's cache folder
"""
SHOW_HELP = """\
List what is stored: for each problem the choice, its gain when it was measured,
and whether it is used on this machine now. Choices for other machines, and those
made with other kernels or library versions, are listed but not used.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    command = given.pop(0) if given and not given[0].startswith("-") else "tune"
    if command not in COMMANDS:
        sys.stderr.write(f"{PROG}: no command {command!r}: there are {', '.join(COMMANDS)}; see --help\n")
        return 2
    try:
        return COMMANDS[command](given)
    except KeyboardInterrupt:
        return 130
    except ImportError as error:
        sys.stderr.write(f"{PROG}: {error}: pip install 'pagedkern[cpu]', or the extra of your GPU\n")
        return 1


def tune_command(argv: Sequence[str]) -> int:
    """Measure and store."""
    parser = _tune_parser()
    options = parser.parse_args(argv)
    if options.heads % options.kv_heads:
        parser.error(f"--heads {options.heads} is no multiple of --kv-heads {options.kv_heads}")
    from rich.console import Console

    out, err = Console(), Console(stderr=True)
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    workloads = _workloads(options, device)
    for workload in workloads:
        needed, free = spaces.memory(workload, options.block_sizes), machine.free_memory(device)
        if needed > free:
            parser.error(
                f"{workload.kind}: {workload.num_seqs:,} sequences of up to {workload.context:,} tokens, laid out at "
                f"{len(options.block_sizes)} block sizes, need {_gigabytes(needed)} of memory, {_gigabytes(free)} are "
                f"free: give a smaller {'--prompt' if workload.kind == 'prefill' else '--context'} or --seqs, or fewer "
                "--block-sizes"
            )
    if options.dry_run:
        return _plan(out, options, workloads)

    from pagedkern.autotune import report
    from pagedkern.autotune.tune import tune

    with report.Progress(err, options.budget) as progress:
        run = tune(
            workloads, options.block_sizes, options.backends, options.budget, seed=options.seed, tell=progress.tell
        )
    if options.json:
        _write_json(report.document(run))
    else:
        report.show_run(out, run, every=options.all)
    return run.exit_code


def show_command(argv: Sequence[str]) -> int:
    """List the store."""
    parser = _parser("show", SHOW_HELP, "")
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    options = parser.parse_args(argv)
    from rich.console import Console

    from pagedkern.autotune import report

    stored = list(store.contents())
    if options.json:
        _write_json(report.stored_document(stored))
    elif stored:
        report.show_stored(Console(), stored)
    else:
        sys.stdout.write(f"Nothing is stored in {files.directory()}. Run {PROG} to change that.\n")
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"tune": tune_command, "show": show_command}


def _plan(out: Console, options: argparse.Namespace, workloads: list[Workload]) -> int:
    from pagedkern.autotune import report

    usable, unusable = spaces.usable_backends(workloads[0].device, options.backends)
    plan = [spaces.candidates(workload, options.block_sizes, usable) for workload in workloads]
    if options.json:
        _write_json(report.plan_document(plan, unusable))
    else:
        report.show_plan(out, plan, unusable)
    return 0


def _workloads(options: argparse.Namespace, device: str) -> list[Workload]:
    return spaces.workloads(
        device,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        heads=(options.heads, options.kv_heads, options.head_dim),
        num_seqs=options.seqs,
        context=options.context,
        prompt=options.prompt,
        num_block_sizes=len(options.block_sizes),
    )


def _tune_parser() -> argparse.ArgumentParser:
    parser = _parser("[tune]", TUNE_HELP, TUNE_EXAMPLES)
    add = parser.add_argument_group("what is measured").add_argument
    add(
        "--budget", type=_seconds, default=60.0, metavar="TIME", help="time to measure, such as 30s or 5m (default 60s)"
    )
    add(
        "--backends",
        type=_backends,
        default=[],
        metavar="NAMES",
        help=f"of {', '.join(registry.names())} (default all)",
    )
    sizes = ",".join(map(str, spaces.BLOCK_SIZES))
    add(
        "--block-sizes", type=_block_sizes, default=list(spaces.BLOCK_SIZES), metavar="SIZES",
        help=f"tokens in a block (default {sizes})",
    )  # fmt: skip
    add("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    add("--seed", type=int, default=0, metavar="N", help="of the data and of the order of runs (default 0)")
    add = parser.add_argument_group("the model").add_argument
    add("--heads", type=_count, default=32, metavar="N", help="query heads (default 32)")
    add("--kv-heads", type=_count, default=8, metavar="N", help="KV heads, a divisor of the query heads (default 8)")
    add("--head-dim", type=_count, default=128, metavar="N", help="default 128")
    add("--dtype", choices=FLOATS, help="of activations (default float32 on a CPU, bfloat16 on a GPU)")
    add("--kv-dtype", choices=tuple(ITEMSIZE), metavar="DTYPE", help="of the cache (default as --dtype)")
    add = parser.add_argument_group("the batch (default: sized for the device)").add_argument
    add("--seqs", type=_count, metavar="N", help="sequences in a batch")
    add("--context", type=_count, metavar="N", help="tokens of the longest sequence in decode")
    add("--prompt", type=_count, metavar="N", help="tokens of a prompt in prefill")
    add = parser.add_argument_group("output").add_argument
    add("--all", action="store_true", help="also list the candidates that left early")
    add("--json", action="store_true", help="print a JSON document with every measurement instead of tables")
    add("--dry-run", action="store_true", help="say what would be measured; measure and store nothing")
    return parser


def _parser(command: str, description: str, epilog: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"{PROG} {command}",
        usage="%(prog)s [options]",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _seconds(text: str) -> float:
    units = {"": 1, "s": 1, "m": 60, "h": 3600}
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    seconds = float(found[1]) * units[found[2]] if found else math.nan
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"got {text!r}, accepted is a time such as 90, 30s, 1.5m or 1h")
    return seconds


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"got {text!r}, accepted is a whole number from 1")
    return int(text)


def _block_sizes(text: str) -> list[int]:
    return sorted({_count(part.strip()) for part in text.split(",")})


def _backends(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in registry.names():
            raise argparse.ArgumentTypeError(f"got {name!r}, accepted are {', '.join(registry.names())}")
    return names


def _write_json(document: object) -> None:
    json.dump(document, sys.stdout, indent=1, allow_nan=False)
    sys.stdout.write("\n")


if __name__ == "__main__":
    sys.exit(main())
