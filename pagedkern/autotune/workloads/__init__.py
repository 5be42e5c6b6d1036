"""What an engine is asked to serve, and the models it serves it with.

`traffic`: lengths, sharing and forks of requests. `models`: the shapes that matter to a cache, `configs`: those of
models on the disk. `files`: reading workloads.
The presets are the TOML files beside this one: their quantiles are those of public traces, each with its source and
licence. A copy of one is a start for a workload of your own. Standard library only.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pagedkern.autotune.workloads.files import load_file
from pagedkern.autotune.workloads.models import Model, causal_pairs, default_model, model, model_names
from pagedkern.autotune.workloads.traffic import Quantiles, Request, Traffic
from pagedkern.errors import InvalidArgument, InvalidType

__all__ = [
    "Model",
    "Quantiles",
    "Request",
    "Traffic",
    "causal_pairs",
    "default_model",
    "load",
    "model",
    "model_names",
    "names",
]

FOLDER = Path(__file__).parent
ORDER = ("chat", "code", "long-context", "retrieval", "parallel-sampling", "beam")


def names() -> tuple[str, ...]:
    """The presets, the default first."""
    return ORDER


def load(workload: str | Path | Traffic) -> Traffic:
    """A preset by its name, or a workload by its file: TOML as the presets are, or a CSV or JSONL trace.

    Raises:
        InvalidArgument: no preset and no file of that name, or the file is malformed: says where.
    """
    if isinstance(workload, Traffic):
        return workload
    if not isinstance(workload, str | Path):
        raise InvalidType(f"workload: got {type(workload).__name__}, expected a name, a path or a Traffic")
    if str(workload) in ORDER:
        return preset(str(workload))
    path = Path(workload)
    if not path.suffix and not path.exists():
        raise InvalidArgument(
            f"workload: got {str(workload)!r}, expected one of {', '.join(ORDER)}, or a .toml, .csv or .jsonl file"
        )
    return load_file(path)


@cache
def preset(name: str) -> Traffic:
    return load_file(FOLDER / f"{name}.toml")
