"""`python -m tests.backends.triton.launched`: calls the backend and prints what reaches the CUDA driver, as JSON.

Kernels are compiled for compute capability 9.0, and Triton's own launcher launches them on `libcuda.c`, which is found
by TRITON_LIBCUDA_PATH and LD_LIBRARY_PATH. A driver is given an array of pointers to a kernel's parameters; how many
there are, and of which type, is read from the kernel's PTX.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pagedkern.backends.base import AttentionCall, CopyCall, WriteCall
from pagedkern.backends.triton import TritonConfig, launch

STREAM = 0x5EED
C_TYPES = {"u64": ctypes.c_uint64, "u32": ctypes.c_uint32, "f32": ctypes.c_float}


@dataclass
class Launched:
    """One launch: what the backend wanted, and what the driver and Triton's launch hooks were given."""

    kernel: str
    grid: tuple[int, ...]
    warps: int
    arguments: list[float]  # addresses of tensors, and numbers
    looked_up: bool = False  # whether Triton looked at every argument
    hooks: list[tuple[str, int]] = field(default_factory=list)  # names and streams
    got_kernel: str = ""
    got_grid: tuple[int, ...] = ()
    got_block: tuple[int, ...] = ()
    got_stream: int = 0
    shared_fits: bool = False  # it was given as much shared memory as it was compiled for
    parameters: list[float] = field(default_factory=list)
    multiples: dict[int, int] = field(default_factory=dict)  # of what each parameter is one, as the kernel believes


class Config(ctypes.Structure):
    """The head of CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
    )


CALLBACK = ctypes.CFUNCTYPE(None, ctypes.POINTER(Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
launches: list[Launched] = []
loaded: dict[int, CompiledKernel] = {}  # by handle of the function


@CALLBACK
def on_launch(config: Any, function: int, parameters: Any) -> None:
    kernel, launched = loaded[function], launches[-1]
    types = re.findall(r"\.param \.(\w+)", kernel.asm["ptx"].partition(".entry")[2].partition("{")[0])
    launched.got_kernel = kernel.name
    launched.got_grid, launched.got_block = tuple(config.contents.grid), tuple(config.contents.block)
    launched.shared_fits = config.contents.shared == kernel.metadata.shared
    launched.got_stream = config.contents.stream
    launched.parameters = [
        C_TYPES[types[i].replace("b", "u")].from_address(parameters[i]).value for i in range(len(types))
    ]
    passed = [i for i, type in enumerate(kernel.src.signature.values()) if type != "constexpr"]
    for (i,), attributes in kernel.src.attrs.items():
        launched.multiples |= {passed.index(i): n for what, n in attributes if what == "tt.divisibility"}


def watch() -> None:
    """Set Triton up to launch on what is no GPU, and to be watched."""
    stub = ctypes.CDLL("libcuda.so.1")
    ctypes.c_void_p.in_dll(stub, "on_launch").value = ctypes.cast(on_launch, ctypes.c_void_p).value
    driver.set_active(
        SimpleNamespace(
            utils=CudaUtils(),
            launcher_cls=CudaLauncher,
            get_current_device=lambda: 0,
            get_current_stream=lambda device: STREAM,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
        )
    )
    load, look_up, run = CompiledKernel._init_handles, JITFunction.run, launch.Launch.run

    def remembered(self: CompiledKernel) -> None:
        load(self)
        loaded[self.function] = self

    def looked_up(self: JITFunction[Any], *args: Any, **kwargs: Any) -> Any:
        launches[-1].looked_up = True
        return look_up(self, *args, **kwargs)

    def watched(self: launch.Launch) -> None:
        addresses = [x.data_ptr() for x in self.tensors if x is not None]
        numbers = [x for x in self.numbers if x is not None]
        launches.append(Launched(self.kernel.fn.__name__, self.grid, self.warps, addresses + numbers))
        run(self)

    def hook(metadata: Any) -> None:
        values = metadata.get()
        launches[-1].hooks.append((values["name"], values["stream"]))

    CompiledKernel._init_handles = remembered
    JITFunction.run = looked_up
    launch.Launch.run = watched  # type: ignore[method-assign]
    launch.native_fp8 = lambda device: True  # type: ignore[assignment]
    triton.knobs.runtime.launch_enter_hook.add(hook)
    triton.knobs.runtime.launch_exit_hook.add(hook)


def zeros(*shape: int, dtype: torch.dtype = torch.float32, shift: int = 0) -> Tensor:
    """Zeros whose address is `shift` elements off a multiple of 16 bytes."""
    count = 1
    for size in shape:
        count *= size
    return torch.zeros(count + shift, dtype=dtype)[shift:].view(shape)


def attention(seqs: int, width: int, shift: tuple[str, ...] = (), full: bool = False, **config: Any) -> None:
    """Decode, or all there is if `full`; the tensors named in `shift` are not aligned."""

    def make(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return zeros(*shape, dtype=dtype, shift=int(name in shift))

    rows, cache = (seqs * 4, torch.int8) if full else (seqs, torch.float32)
    window = config.pop("window", None)
    call = AttentionCall(
        q=make("q", rows, 4, 16),
        k_cache=make("k_cache", 2, 2, 16, 16, dtype=cache).transpose(1, 2),
        v_cache=make("v_cache", 2, 2, 16, 16, dtype=cache).transpose(1, 2),
        block_table=make("block_table", seqs, width, dtype=torch.int32),
        seq_lens=make("seq_lens", seqs, dtype=torch.int32),
        cu_seqlens_q=torch.arange(0, rows + 1, 4, dtype=torch.int32) if full else None,
        max_seqlen_q=4 if full else 1,
        scale=0.375,
        causal=True,
        sliding_window=window,
        softcap=7.25 if full else None,
        alibi_slopes=make("alibi_slopes", 4) if full else None,
        sinks=make("sinks", 4) if full else None,
        k_scale=make("k_scale", 2) if full else None,
        v_scale=make("v_scale", 2) if full else None,
        out=make("out", rows, 4, 16),
        lse=make("lse", rows, 4) if full else None,
    )
    fields = {"tile": 16, "span": 32, "num_splits": 4, "rows": 2, "split_queries": 2} | config
    launch.attention(call, TritonConfig(**fields))


def write(tokens: int, quantized: bool) -> None:
    new = zeros(tokens, 2, 16)
    cache = zeros(4, 8, 2, 16, dtype=torch.int8 if quantized else torch.float32)
    scale = torch.ones(2) if quantized else None
    launch.write_kv(WriteCall(new, new, cache, cache, zeros(tokens, dtype=torch.int64), scale, scale))


def copy(caches: int, pairs: int) -> None:
    blocks = zeros(pairs, dtype=torch.int64)
    launch.copy_blocks(CopyCall([zeros(4, 8, 2, 16) for _ in range(caches)], blocks, blocks))


CALLS: dict[str, Any] = {
    "first": lambda: attention(3, 8),
    "again": lambda: attention(3, 8),
    "one column": lambda: attention(16, 1),
    "wide": lambda: attention(5, 1000),
    "k shifted": lambda: attention(3, 8, shift=("k_cache",)),
    "lens shifted": lambda: attention(3, 8, shift=("seq_lens",)),
    "not shifted": lambda: attention(3, 8),
    "window": lambda: attention(3, 8, window=7),
    "other window": lambda: attention(3, 8, window=9),
    "warps": lambda: attention(3, 8, warps=2),
    "full": lambda: attention(3, 8, full=True, window=50),
    "full again": lambda: attention(2, 9, full=True, window=1),
    "write": lambda: write(5, False),
    "write again": lambda: write(1, False),
    "write quantized": lambda: write(1, True),
    "copy": lambda: copy(3, 2),
    "copy again": lambda: copy(8, 3),
    "copy many": lambda: copy(2, 65),
}


def main() -> None:
    watch()
    found = {}
    for name, call in CALLS.items():
        launches.clear()
        call()
        found[name] = [asdict(each) for each in launches]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
