"""The autotuner: `python -m pagedkern.autotune` or `tune` measures, `store.lookup` is what kernels read at run time.

Where things are:

- what is measured: `space` (problems and candidates), `workloads` (what is served, and models), `edge_cases`;
- how: `measure` (tensors, check, clock), `runner` (what a search sees of them), `isolate`, `process`, `compiling` and
`worker` (the same in processes of their own), `search` (which candidate runs next), `log` and `records` (its results);
- what it supports: `decision` (kernels), `rating` and `profile` (rates), `objective`, `advice` and `scheduling` (block
size, limits of a scheduler), `recommend`, `replay`;
- `store`: what is kept, for which device and code. `report`: how it is shown. `runs`: one run from end to end, `api`:
the same as a call, `cli`: as commands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["TuneResult", "TunedChoice", "tune"]

if TYPE_CHECKING:
    from pagedkern.autotune.api import TunedChoice, TuneResult, tune
else:  # loaded on first use: the kernels look things up in `store` and need nothing else

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'pagedkern.autotune' has no attribute {name!r}")
        from pagedkern.autotune import api

        value = getattr(api, name)
        globals()[name] = value
        return value
