"""What a program has set in torch (default device and dtype, modes, determinism) changes no result of any call.

The device "meta", on which nothing can be computed, stands for a GPU that is the default.
"""

from __future__ import annotations

import ast
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import pagedkern
from pagedkern import BlockAllocator, KVCache
from pagedkern.scheduler import Scheduler
from tests.contract.problems import Spec, bits, build
from tests.contract.targets import torch_settings

PACKAGE = Path(pagedkern.__file__).parent


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SETTINGS: dict[str, Callable[[], Any]] = {
    "default device meta": lambda: torch_settings("default_device", "meta"),
    "in the context of a device": lambda: torch.device("meta"),
    "default dtype float64": lambda: torch_settings("default_dtype", torch.float64),
    "default dtype bfloat16": lambda: torch_settings("default_dtype", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "deterministic": deterministic,
}


def attend(backend: str, **options: Any) -> Callable[[], Sequence[Tensor]]:
    calls = [
        build(Spec(seq_lens=(70, 5, 0), sinks=0.5, alibi=True)),
        build(Spec(seq_lens=(70, 5), query_lens=(20, 5), kv_dtype="int8", scale_kind="number", window=9, softcap=5.0)),
        build(Spec(seq_lens=(70, 5), query_lens=(20, 5), kv_dtype="float8_e4m3fn")),
    ]
    calls[1].args |= {"k_scale": torch.tensor(0.02), "v_scale": torch.tensor([0.03])}

    def run() -> Sequence[Tensor]:
        results: list[Tensor] = []
        for call in calls:
            results += pagedkern.paged_attention(**call.args, backend=backend, return_lse=True, **options)
            assert pagedkern.explain(**call.args, backend=backend).backend == backend
        return results

    return run


def store(backend: str) -> Callable[[], Sequence[Tensor]]:
    k = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor([0.03])
    slots, src, dst = torch.tensor([0, -1, 9], dtype=torch.int32), torch.tensor([0, 1]), torch.tensor([1, 3])

    def run() -> Sequence[Tensor]:
        pools = [torch.zeros(4, 8, 2, 16, dtype=torch.int8, device="cpu") for _ in range(2)]
        options: dict[str, Any] = {"backend": backend, "debug": True}
        pagedkern.write_kv(k, k, *pools, slots, k_scale=0.02, v_scale=scale, **options)
        pagedkern.copy_blocks(pools, src, dst, **options)
        return pools

    return run


def merge() -> Callable[[], Sequence[Tensor]]:
    outs = [torch.randn(5, 4, 16, generator=torch.Generator().manual_seed(i)).half() for i in (1, 2)]
    logs = [torch.randn(5, 4, generator=torch.Generator().manual_seed(i)) for i in (3, 4)]
    logs[0][:2], logs[1][1:3] = -torch.inf, torch.inf
    return lambda: pagedkern.merge_states(outs[0], logs[0], outs[1], logs[1])


def cache() -> Sequence[Tensor]:
    """Made, filled by plans, and described to the kernels, all under the setting."""
    kv = KVCache(2, 16, 4, 1, 8, dtype=torch.float16, device="cpu", num_host_blocks=4)
    pools = [pool for i in range(2) for pool in kv.layer(i)]
    for i, pool in enumerate(pools):
        pool.copy_(torch.arange(pool.numel(), device="cpu").view(pool.shape) % 61 + i)
    moves = [("copy", [0, 1], [4, 0]), ("swap_out", [4, 1], [0, 3]), ("swap_in", [3, 0], [2, 7])]
    table = memoryview(array("i", range(8)))
    kv.apply(SimpleNamespace(moves=[(k, array("q", s), array("q", d)) for k, s, d in moves], block_table=table))
    scheduler = Scheduler(BlockAllocator(16, 4), token_budget=9)
    scheduler.add(range(20, 33), max_tokens=2)
    batch = scheduler.schedule()
    step = BlockAllocator(16, 4).append([])
    found = [x for x in (*kv.inputs(batch), *kv.inputs(step)) if isinstance(x, Tensor)]
    assert [x.device.type for x in found] == ["cpu"] * len(found)
    own = KVCache.from_layers([kv.layer(0)])
    own.apply(SimpleNamespace(moves=[("copy", array("q", [7]), array("q", [8]))]))
    return [*(pool.contiguous() for pool in pools), *found]


CALLS: dict[str, Callable[[], Callable[[], Sequence[Tensor]]]] = {
    **{f"attention on {b}": lambda b=b: attend(b) for b in ("cpu", "reference")},
    **{f"attention on {b}, debug": lambda b=b: attend(b, debug=True) for b in ("cpu", "reference")},
    **{f"writes and copies on {b}": lambda b=b: store(b) for b in ("cpu", "reference")},
    "merge_states": merge,
    "KVCache": lambda: cache,
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("call", CALLS)
def test_a_setting_changes_nothing(call: str, setting: str) -> None:
    run = CALLS[call]()
    want = [bits(x).clone() for x in run()]
    with ExitStack() as stack:
        stack.enter_context(SETTINGS[setting]())
        got = run()
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert x.device.type == "cpu"
        assert torch.equal(bits(x), y)


def test_what_was_kept_in_inference_mode_serves_outside_of_it() -> None:
    """The scales of a number are kept from call to call."""
    call = build(Spec(kv_heads=1, heads=3, kv_dtype="int8", seq_lens=(5,)))
    call.args |= {"k_scale": 0.01234, "v_scale": 0.04321}
    with torch.inference_mode():
        want = pagedkern.paged_attention(**call.args, backend="cpu")
    assert torch.equal(pagedkern.paged_attention(**call.args, backend="cpu"), want)


FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_tensor_that_the_library_makes_says_where(path: Path) -> None:
    """Else it would be on the default device of whoever calls."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and node.func.attr in FACTORIES
        ):
            assert "device" in {keyword.arg for keyword in node.keywords}, (
                f"{path}:{node.lineno}: torch.{node.func.attr}"
            )
