"""`python -m tests.environment.program FOLDER [write]`: the three operations of the CPU backend, or all but attention,
whose kernel takes by far the longest to compile, on a problem that `problem` has left in a folder, beside what the
reference backend made of it. Prints JSON: whether they are right, and every warning.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from pathlib import Path

import torch
from torch import Tensor

import pagedkern

INPUTS = ("q", "k", "v", "table", "lens", "new_k", "new_v", "slots", "src", "dst")


def make(kv_dtype: str = "float32", q_dtype: str = "float32") -> dict[str, Tensor]:
    """A problem large enough for two threads, and what the reference backend makes of it."""
    generator = torch.Generator().manual_seed(15)

    def random(*shape: int, dtype: str = q_dtype) -> Tensor:
        x = torch.randn(*shape, generator=generator)
        return ((x * 20).clamp(-127, 127) if dtype == "int8" else x).to(getattr(torch, dtype))

    problem = {
        "q": random(2, 4, 32),
        "k": random(200, 16, 2, 32, dtype=kv_dtype),
        "v": random(200, 16, 2, 32, dtype=kv_dtype),
        "table": torch.randperm(380, generator=generator).remainder(190).view(2, 190).int(),
        "lens": torch.tensor([3000, 19], dtype=torch.int32),
        "new_k": random(3, 2, 32),
        "new_v": random(3, 2, 32),
        "slots": torch.tensor([17, -1, 190 * 16 + 3]),
        "src": torch.tensor([1, 5]),
        "dst": torch.tensor([191, 192]),
    }
    return problem | compute(problem, "reference")


def compute(problem: dict[str, Tensor], backend: str, attends: bool = True) -> dict[str, Tensor]:
    """New K and V written, blocks copied, attention computed."""
    q, k, v, table, lens, new_k, new_v, slots, src, dst = (problem[name] for name in INPUTS)
    k, v = _copy(k), _copy(v)
    scales = {"k_scale": 0.05, "v_scale": 0.05} if k.dtype.itemsize == 1 else {}
    pagedkern.write_kv(new_k, new_v, k, v, slots, backend=backend, **scales)
    pagedkern.copy_blocks([k, v], src, dst, backend=backend)
    if not attends:
        return {"k after": k, "v after": v}
    out, lse = pagedkern.paged_attention(q, k, v, table, lens, return_lse=True, backend=backend, **scales)
    return {"out": out, "lse": lse, "k after": k, "v after": v}


def agree(found: dict[str, Tensor], problem: dict[str, Tensor]) -> bool:
    near = 1e-5 if problem["q"].dtype == torch.float32 else 3e-2
    copied = all(_bytes(found[name]) == _bytes(problem[name]) for name in ("k after", "v after"))
    return copied and all(
        torch.allclose(found[name].float(), problem[name].float(), atol=near, rtol=near)
        for name in ("out", "lse")
        if name in found
    )


def _bytes(x: Tensor) -> bytes:
    """Without torch: where no thread can be started, its own operations on large tensors end the process."""
    return bytes(x.view(torch.uint8).numpy().data)


def _copy(x: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(_bytes(x)), dtype=x.dtype).view(x.shape)


def compiled() -> list[str]:
    """The kernels that were not found on disk."""
    from pagedkern.backends.cpu import launch

    dispatchers = [entry.dispatcher for entry in (launch.PLAN, launch.FIND_BAD_SLOT, launch.WRITE, launch.ATTEND)]
    return [each.__name__ for each in dispatchers if sum(each.stats.cache_misses.values())]


class Listener(logging.Handler):
    """Every warning but the notes that something is compiled, which come or not as the clock wants."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not re.match(r"pagedkern: compil(ing|ed) the CPU", message := record.getMessage()):
            self.messages.append(message)


def main() -> None:
    heard = Listener()
    logging.getLogger().addHandler(heard)
    torch.set_num_threads(2)
    problem = torch.load(Path(sys.argv[1]) / "problem.pt", weights_only=True)
    for _ in range(2):
        right = agree(compute(problem, "cpu", attends=sys.argv[2:] != ["write"]), problem)
    helpers = sum(thread.name.startswith("pagedkern-cpu") for thread in threading.enumerate())
    outcome = {"right": right, "warnings": heard.messages, "helpers": helpers, "compiled": compiled()}
    sys.stdout.write(json.dumps(outcome))


if __name__ == "__main__":
    main()
