"""`python -m pagedkern.gpucheck`: what the GPU backends do on the GPU at hand, in one JSON file and a short table.

Needs nothing but the library and runs without a network. Each part is tried by itself: what fails is named in the
result, and the rest is still reported. On a machine without a GPU `make gpu-check`, in a checkout, checks the emulated
backends on small shapes, and no speed is measured.
"""

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ModuleNotFoundError(
        "pagedkern.gpucheck: No module named 'torch': pip install 'pagedkern[cuda12]', or [cuda13], or [triton]",
        name="torch",
    )
