"""Clause 8: torch.compile takes the calls whole, the operators pass opcheck, and arrays of other libraries come in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import pagedkern
from tests.contract import wrong_calls, wrong_scales
from tests.contract.problems import Call, Spec, bits, build, contents
from tests.contract.targets import Target

SPECS = {
    "decode": Spec(seq_lens=(1, 0, 17, 40)),
    "mixed": Spec(seq_lens=(20, 5, 40), query_lens=(3, 9, 1), window=9, softcap=2.0, alibi=True, sinks=0.5),
    "int8": Spec(kv_dtype="int8", seq_lens=(20, 40), q_dtype="bfloat16"),
    "fp8_number": Spec(kv_dtype="float8_e4m3fn", seq_lens=(20, 40), query_lens=(2, 3), scale_kind="number"),
}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def built(target: Target, spec: Spec) -> Call:
    """The call, if the target can do it."""
    call = build(spec, device=target.device)
    target.check_support(call)
    return call


@each_spec
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_attention(target: Target, spec: Spec, dynamic: bool) -> None:
    """One graph, without a break, and the bits of the eager call; with static and with dynamic shapes."""
    torch._dynamo.reset()

    def step(**args: Any) -> tuple[Tensor, Tensor]:
        out, lse = pagedkern.paged_attention(**args, return_lse=True, backend=target.name)
        return out * 2, lse

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for seed in (0, 1):
        call = built(target, Spec(**{**vars(spec), "seed": seed}))
        want, got = step(**call.args), compiled(**call.args)
        assert torch.equal(bits(got[0]), bits(want[0]))
        assert torch.equal(bits(got[1]), bits(want[1]))


def test_compiled_with_other_batch_sizes(target: Target) -> None:
    """With dynamic shapes one compilation serves every number of sequences and every width of the table."""
    torch._dynamo.reset()
    compilations = []

    def count(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        compilations.append(module)
        return module.forward

    def step(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        out: Tensor = pagedkern.paged_attention(q, k, v, table, lens, backend=target.name)
        return out

    compiled = torch.compile(step, fullgraph=True, backend=count, dynamic=True)
    for n in (7, 9, 10, 20):  # none equal to another size of the first call, which would tie the two together
        call = built(target, Spec(seq_lens=tuple(range(7, 7 + n))))
        args = [call.args[name] for name in ("q", "k_cache", "v_cache", "block_table", "seq_lens")]
        assert torch.equal(compiled(*args), step(*args))
    assert len(compilations) == 1


@pytest.mark.parametrize("kind", ["none", "object", "mapping"])
def test_compiled_into_out(target: Target, kind: str) -> None:
    """`out` is written in place, also by compiled code and under a pinned configuration, and is what comes back."""
    torch._dynamo.reset()
    call = built(target, SPECS["mixed"])
    chosen = pagedkern.explain(**call.args, backend=target.name).config
    config = {"none": None, "object": chosen, "mapping": chosen.to_dict()}[kind]
    out = torch.full((call.num_tokens, 4, 32), torch.nan, device=target.device)

    def step(out: Tensor) -> Tensor:
        result: Tensor = pagedkern.paged_attention(**call.args, out=out, backend=target.name, config=config)
        return result + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    got = compiled(out)
    want = pagedkern.paged_attention(**call.args, backend=target.name)
    assert torch.equal(out, want)
    assert torch.equal(got, want + 1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_layer(target: Target, dynamic: bool) -> None:
    """Write, copy, attend and merge in one graph: what is written is seen, in order."""
    torch._dynamo.reset()
    spec = Spec(seq_lens=(20, 40))
    call = built(target, spec)

    def layer(
        q: Tensor, k: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, slots: Tensor
    ) -> Tensor:
        pagedkern.write_kv(k, k, k_cache, v_cache, slots, backend=target.name)
        out, lse = pagedkern.paged_attention(q, k_cache, v_cache, table, lens, return_lse=True, backend=target.name)
        pagedkern.copy_blocks([k_cache, v_cache], slots[1:] // 16, slots[:1] // 16, backend=target.name)
        again, lse_again = pagedkern.paged_attention(
            q, k_cache, v_cache, table, lens, return_lse=True, backend=target.name
        )
        merged, _ = pagedkern.merge_states(out, lse, again, lse_again)
        return merged

    ids = call.block_ids
    slots = torch.tensor([16 * ids[0][1] + 3, 16 * ids[1][2] + 7], device=target.device)
    k = torch.randn(2, 2, 32, device=target.device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    results = []
    for run in (layer, compiled):
        k_cache, v_cache = (call.args[name].clone() for name in ("k_cache", "v_cache"))
        result = run(call.args["q"], k, k_cache, v_cache, call.args["block_table"], call.args["seq_lens"], slots)
        results.append((result, k_cache, v_cache))
    for eager, traced in zip(*results, strict=True):
        assert torch.equal(bits(eager), bits(traced))
    assert not results[0][0].isnan().any()


def operator_calls(target: Target) -> dict[str, list[tuple[Any, ...]]]:
    """What the public functions hand to each operator, recorded."""
    from torch.utils._python_dispatch import TorchDispatchMode

    recorded: dict[str, list[tuple[Any, ...]]] = {}

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "pagedkern":
                recorded.setdefault(func._opname, []).append(args)
            return func(*args, **(kwargs or {}))

    with Record(), torch.device(target.device):  # type: ignore[no-untyped-call]
        for name in ("decode", "mixed", "int8"):  # opcheck compares what is written, which torch cannot do in float8
            spec = SPECS[name]
            call = build(spec, device=target.device)
            pagedkern.paged_attention(**call.args, return_lse=True, backend=target.name)
            pagedkern.paged_attention(**call.args, backend=target.name)
        pagedkern.write_kv(**wrong_calls.right_write(), backend=target.name)
        quantized = {**wrong_calls.right_write(), **wrong_scales.quantized_caches()}
        pagedkern.write_kv(**quantized, k_scale=torch.ones(2), v_scale=0.5, backend=target.name)
        pagedkern.copy_blocks(**wrong_calls.right_copy(), backend=target.name)
        pagedkern.merge_states(**wrong_calls.right_merge())
    return recorded


@pytest.mark.parametrize("name", ["attention", "write_kv", "copy_blocks", "merge_states"])
def test_opcheck(target: Target, name: str) -> None:
    """torch's own examination of a custom operator: schema, aliasing, fake kernel, autograd, dynamic shapes."""
    calls = operator_calls(target)[name]
    assert calls
    for args in calls:
        operator = getattr(torch.ops.pagedkern, name).default
        checked = torch.library.opcheck(operator, _without_nan(args))
        assert set(checked.values()) == {"SUCCESS"}, checked


def _without_nan(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """opcheck compares with ==: NaN that no query sees would count as a difference."""

    def clean(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point() and x.element_size() > 1:
            return x.nan_to_num()
        return [clean(y) for y in x] if isinstance(x, list) else x

    return tuple(clean(x) for x in args)


@each_spec
def test_fake_tensors(target: Target, spec: Spec) -> None:
    """Shapes, dtypes and devices without memory, as engines that plan memory or export graphs ask for them."""
    call = built(target, spec)
    want = target.attend(call)
    with FakeTensorMode() as mode:
        fake: dict[str, Any] = {n: mode.from_tensor(x) if isinstance(x, Tensor) else x for n, x in call.args.items()}
        out, lse = pagedkern.paged_attention(**fake, return_lse=True, backend=target.name)
        for got, real in ((out, want.out), (lse, want.lse)):
            assert (got.shape, got.dtype, got.device) == (real.shape, real.dtype, real.device)
            assert got.stride() == real.stride()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes(target: Target, mode: Any) -> None:
    """Results carry no graph; tensors of inference mode are fine."""
    call = built(target, SPECS["mixed"])
    want = target.attend(call)
    with mode():
        args: dict[str, Any] = {n: x.clone() if isinstance(x, Tensor) else x for n, x in call.args.items()}
        out = pagedkern.paged_attention(**args, backend=target.name, config=target.config)
    assert not out.requires_grad
    assert torch.equal(bits(out), bits(want.out))


def test_parameters_under_no_grad(target: Target) -> None:
    """A query that requires grad is refused while grad is enabled, and taken without it."""
    call = built(target, SPECS["decode"])
    want = target.attend(call)
    call.args["q"].requires_grad_()
    with torch.no_grad():
        assert torch.equal(target.attend(call).out, want.out)


class Exporter:
    """An array of some other library: nothing but DLPack."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


def test_dlpack_exporters(target: Target) -> None:
    """Every array of a call may be one, the output too: it is written without a copy."""
    spec = Spec(seq_lens=(20, 5, 40), query_lens=(3, 9, 1), alibi=True, sinks=0.5, layout="HND", q_layout="fused")
    call = built(target, spec)
    want = target.attend(call)
    foreign: dict[str, Any] = {n: Exporter(x) if isinstance(x, Tensor) else x for n, x in call.args.items()}
    out = torch.full_like(want.out, torch.nan)
    options: dict[str, Any] = {"backend": target.name, "config": target.config}
    got, lse = pagedkern.paged_attention(**foreign, out=Exporter(out), return_lse=True, **options)
    assert torch.equal(bits(out), bits(want.out))
    assert (type(got), type(lse)) == (Tensor, Tensor)
    assert got.data_ptr() == out.data_ptr()
    assert torch.equal(bits(lse), bits(want.lse))


def test_dlpack_writes(target: Target) -> None:
    caches = [torch.zeros(3, 4, 2, 8, device=target.device) for _ in range(2)]
    k = torch.randn(2, 2, 8, device=target.device)
    slots = torch.tensor([5, 0], device=target.device)
    pagedkern.write_kv(*map(Exporter, (k, k, *caches, slots)), backend=target.name)
    pagedkern.copy_blocks(
        [Exporter(c) for c in caches], Exporter(slots // 4), Exporter(slots // 4 + 1), backend=target.name
    )
    want = torch.zeros(3, 4, 2, 8, device=target.device)
    want[0, 0] = want[1, 0] = k[1]  # slot 0, and block 0 copied to 1
    want[2, 1] = k[0]  # slot 5, and block 1 copied to 2
    for cache in caches:
        assert torch.equal(cache, want)
    lse = torch.zeros(2, 2, device=target.device)
    merged = pagedkern.merge_states(*map(Exporter, (k, lse, k, lse)))
    assert torch.equal(merged[0], k)


def test_numpy_arrays(target: Target) -> None:
    """NumPy exports DLPack for memory of the host."""
    if target.device != "cpu":
        pytest.skip(f"NumPy has no memory on {target.device}")
    call = built(target, Spec(seq_lens=(20, 5, 40), layout="HND"))
    want = target.attend(call)
    arrays: dict[str, Any] = {n: x.numpy() if isinstance(x, Tensor) else x for n, x in call.args.items()}
    out = np.full(want.out.shape, np.nan, dtype=np.float32)
    got = pagedkern.paged_attention(**arrays, out=out, backend=target.name, config=target.config)
    assert isinstance(got, Tensor)
    assert torch.equal(torch.from_numpy(out), want.out)


class CudaArray:
    """An array that has `__cuda_array_interface__` only, as those of Numba."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__


def test_cuda_array_interface(target: Target) -> None:
    if target.device != "cuda":
        pytest.skip("arrays with __cuda_array_interface__ live on a CUDA device")
    call = built(target, Spec(seq_lens=(20, 5, 40), query_lens=(3, 9, 1)))
    want = target.attend(call)
    arrays: dict[str, Any] = {n: CudaArray(x) if isinstance(x, Tensor) else x for n, x in call.args.items()}
    got = pagedkern.paged_attention(**arrays, backend=target.name, config=target.config)
    assert torch.equal(bits(got), bits(want.out))


def test_return_types(target: Target) -> None:
    call = built(target, SPECS["decode"])
    out = pagedkern.paged_attention(**call.args, backend=target.name)
    pair = pagedkern.paged_attention(**call.args, return_lse=True, backend=target.name)
    assert type(out) is Tensor
    assert type(pair) is tuple
    assert [type(x) for x in pair] == [Tensor, Tensor]
    assert (out.device, out.dtype, tuple(out.shape)) == (call.args["q"].device, torch.float32, (4, 4, 32))
    assert out.is_contiguous()
    given = torch.empty(4, 4, 32, device=target.device)
    assert pagedkern.paged_attention(**call.args, out=given, backend=target.name).data_ptr() == given.data_ptr()


def test_explain(target: Target) -> None:
    """It names the backend and the configuration that the call then takes, and gives the same bits when pinned."""
    call = built(target, SPECS["mixed"])
    choice = pagedkern.explain(**call.args, backend=target.name)
    assert choice.backend == target.name
    assert str(choice)
    assert choice.reason
    want = pagedkern.paged_attention(**call.args, backend=target.name)
    assert torch.equal(target.attend(call, config=choice.config).out, want)
    auto = pagedkern.explain(**call.args)
    chosen = pagedkern.paged_attention(**call.args, backend=auto.backend, config=auto.config)
    assert torch.equal(pagedkern.paged_attention(**call.args), chosen)


def test_mla_latent_cache(target: Target) -> None:
    """V is the first part of K (DeepSeek-V2, absorbed MLA): two views of the same memory, read at once."""
    spec = Spec(heads=16, kv_heads=1, head_dim=72, head_dim_v=64, seq_lens=(20, 41), query_lens=(1, 2))
    tokens = contents(spec)
    for t in tokens:
        t.v[...] = t.k[..., :64]
    call = built(target, spec)
    call = build(spec, tokens, device=target.device)
    want = target.attend(call)
    call.args["v_cache"] = call.args["k_cache"][..., :64]
    got = target.attend(call)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)
