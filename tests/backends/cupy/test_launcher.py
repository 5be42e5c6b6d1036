"""What the launcher hands to CuPy and the driver, with both replaced: there need be no GPU. NVRTC is real."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cupy", reason="no module named 'cupy': pip install 'pagedkern[cuda12]'")
from cupy.cuda import function
from cupy_backends.cuda.api import driver, runtime

from pagedkern.backends.base import AttentionCall, CopyCall, WriteCall
from pagedkern.backends.cupy import launch
from pagedkern.backends.cupy.config import CupyConfig
from pagedkern.backends.cupy.instance import AttentionPlan, CopyPlan, WritePlan
from pagedkern.backends.cupy.launcher import MAX_DYNAMIC_SHARED, CupyLauncher

STREAM, LIMIT = 4711, 232_448


class Machine:
    """Stands for a GPU of compute capability 9.0: keeps what was loaded and launched."""

    def __init__(self) -> None:
        self.loaded: list[str] = []  # the kernels, in order; a function's handle is its number
        self.settings: list[tuple[int, int, int]] = []
        self.launches: list[tuple[Any, ...]] = []
        self.context = 1
        self.set_devices: list[int] = []

    def module(self) -> Any:
        codes: list[bytes] = []

        def get_function(name: str) -> Any:
            assert name.encode() in codes[0]
            self.loaded.append(name)
            return SimpleNamespace(ptr=len(self.loaded) - 1)

        return SimpleNamespace(load=codes.append, get_function=get_function)

    def set_device(self, index: int) -> None:
        self.set_devices.append(index)
        self.context = 1

    def launch(self, kernel: int, *numbers: int) -> None:
        assert self.context, "the driver has no context here"
        *shape, stream, parameters, extra = numbers
        assert (stream, extra) == (STREAM, 0)
        self.launches.append((self.loaded[kernel], *shape, parameters))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled kernels are kept."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Machine:
    made, run = Machine(), CupyLauncher()
    monkeypatch.setenv("PAGEDKERN_CACHE_DIR", str(folder))
    monkeypatch.setattr(launch, "current_launcher", lambda: run)
    monkeypatch.setattr("pagedkern.backends.cupy.launcher._properties", lambda index: (90, LIMIT))
    monkeypatch.setattr(function, "Module", made.module)
    monkeypatch.setattr(driver, "funcSetAttribute", lambda *setting: made.settings.append(setting))
    monkeypatch.setattr(driver, "launchKernel", made.launch)
    monkeypatch.setattr(driver, "ctxGetCurrent", lambda: made.context)
    monkeypatch.setattr(runtime, "setDevice", made.set_device)
    monkeypatch.setattr(torch.cuda, "device", lambda on: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda on: SimpleNamespace(cuda_stream=STREAM))
    return made


def attend(max_seqlen_q: int = 20) -> None:
    starts = torch.tensor([0, 20, 21, 22], dtype=torch.int32)
    q, out = torch.zeros(2, 25, 4, 32).half()
    cache = torch.zeros(2, 6, 16, 2, 32, dtype=torch.float16)
    lens, table = torch.tensor([20, 5, 400], dtype=torch.int32), torch.zeros(3, 25, dtype=torch.int32)
    call = AttentionCall(
        q=q, k_cache=cache[0], v_cache=cache[1], block_table=table, seq_lens=lens, cu_seqlens_q=starts,
        max_seqlen_q=max_seqlen_q, scale=0.5, causal=True, sliding_window=9, softcap=None, alibi_slopes=None,
        sinks=None, k_scale=None, v_scale=None, out=out, lse=torch.zeros(25, 4),
    )  # fmt: skip
    launch.attention(call, CupyConfig(decode_tokens=2))


def write() -> None:
    k = torch.zeros(7, 2, 32)
    cache = torch.zeros(6, 16, 2, 32, dtype=torch.int8)
    launch.write_kv(WriteCall(k, k, cache, cache.clone(), torch.zeros(7, dtype=torch.int64), torch.ones(2), k[0, 0]))


def copy() -> None:
    ids = torch.arange(3)
    launch.copy_blocks(CopyCall([torch.zeros(8, 64)], ids, ids + 3))


def seen(machine: Machine, monkeypatch: pytest.MonkeyPatch, *structs: type[ctypes.Structure]) -> list[Any]:
    """Have the driver read the arguments of the next launch, as it does on a GPU before the call returns."""
    got: list[Any] = []

    def read(kernel: int, *numbers: int) -> None:
        addresses = (ctypes.c_void_p * len(structs)).from_address(numbers[-2])
        got.extend(struct.from_buffer_copy(ctypes.string_at(a, ctypes.sizeof(struct)))
                   for a, struct in zip(addresses, structs, strict=True))  # fmt: skip
        machine.launch(kernel, *numbers)

    monkeypatch.setattr(driver, "launchKernel", read)
    return got


def test_every_kernel_is_loaded_once_and_launched(machine: Machine) -> None:
    for operation in (attend, write, copy, attend, write, copy):
        operation()
    names = ["attention", "merge", "attention", "write_kv", "copy_blocks"]  # decode, its merge, prefill
    assert machine.loaded == names
    assert [name for name, *_ in machine.launches] == names * 2
    assert machine.settings == [(n, MAX_DYNAMIC_SHARED, LIMIT) for n in range(len(names))]


def test_grids_and_blocks(machine: Machine) -> None:
    attend()
    (decode, merge, prefill), config = machine.launches, CupyConfig()
    assert decode[1:7] == (3, 2, 2, 32 * config.warps, 1, 1)  # sequences, KV heads, splits: 400 tokens are two spans
    assert merge[1:8] == (3 * 2, 1, 1, 128, 1, 1, 0)  # two tokens of each sequence; four heads
    assert prefill[1:7] == (1 + 3, 2, 1, 32 * config.prefill_warps, 1, 1)
    assert 0 < decode[7] <= LIMIT


def test_structs_arrive_whole(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedkern.abi.structs import AttentionParamsStruct, BatchStruct

    got = seen(machine, monkeypatch, BatchStruct, AttentionParamsStruct, AttentionPlan)
    attend(max_seqlen_q=1)
    batch, params, plan = got[:3]
    assert (batch.num_seqs, batch.num_tokens, batch.table_width, batch.block_size) == (3, 25, 25, 16)
    assert (params.scale, params.sliding_window, params.causal) == (0.5, 9, 1)
    assert (plan.splits, plan.decode_tokens, plan.partial_tokens) == (2, 2, 1)
    got = seen(machine, monkeypatch, BatchStruct, WritePlan)
    write()
    assert (got[0].num_tokens, got[1].k_stride_token, got[1].unit) == (7, 64, 16)
    got = seen(machine, monkeypatch, CopyPlan)
    copy()
    assert (got[0].pairs, got[0].stride_block, got[0].run_bytes) == (3, 256, 256)


@pytest.mark.parametrize("operation", [attend, write, copy])
def test_a_thread_that_has_not_used_cuda_yet(machine: Machine, operation: Callable[[], None]) -> None:
    """torch makes the device current only if it is another one: the driver may know of no context in this thread."""
    machine.context = 0
    operation()
    assert machine.set_devices == [None]  # the index of these tensors, which are on the CPU
    operation()
    assert machine.set_devices == [None]


class Refused(driver.CUDADriverError):
    """Made without the driver's own text for it: there is none where there is no driver."""

    def __init__(self) -> None:
        RuntimeError.__init__(self, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION")


@pytest.mark.parametrize(
    ("cuda", "why"), [(11080, ": the driver knows CUDA up to 11.8, expected an NVRTC "), (99000, "$")]
)
def test_code_that_the_driver_refuses(machine: Machine, monkeypatch: pytest.MonkeyPatch, cuda: int, why: str) -> None:
    """As a driver for CUDA 12 refuses what NVRTC of CUDA 13 compiled: the message has both versions."""

    def refuse(code: bytes) -> None:
        raise Refused

    monkeypatch.setattr(function, "Module", lambda: SimpleNamespace(load=refuse))
    monkeypatch.setattr(runtime, "driverGetVersion", lambda: cuda)
    with pytest.raises(RuntimeError, match=rf"copy_blocks\.cu: the CUDA driver .* NVRTC 1\d\.\d+ compiled{why}"):
        copy()
