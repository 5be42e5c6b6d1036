"""An engine in C with a block table of its own, which calls pagedkern's attention through the ABI, without a copy.

engine_in_c.c includes pagedkern_abi.h and nothing else of pagedkern. It runs the loop: it hands out blocks, keeps the
table, writes keys and values in a layout of its own, fills the struct `pagedkern_batch`, and calls the function that
it was given. That is `attend` below, which sees the engine's memory as tensors and has the kernel write into it. The
engine compares what it got with attention that it computes itself.

Prints the block tables of each step and the largest error. Needs a C compiler (cc, or what the variable CC names):

    pip install 'pagedkern[cpu]'
    python examples/engine_in_c.py
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagedkern import abi, paged_attention

SOURCE = Path(__file__).with_suffix(".c")
ATTENTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(abi.BatchStruct), ctypes.POINTER(abi.AttentionParamsStruct))
DTYPES = {code: getattr(torch, name) for name, code in abi.DTYPE_CODES.items()}


def compiled(folder: Path) -> ctypes.CDLL:
    """The engine as a shared library."""
    library = folder / "engine.so"
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-std=c99", "-O2", "-shared", "-fPIC", f"-I{abi.include_dir()}"]
    try:
        subprocess.run([*command, str(SOURCE), "-o", str(library), "-lm"], check=True)
    except FileNotFoundError:
        raise SystemExit(f"This example needs a C compiler; there is no {compiler!r} on the PATH") from None
    return ctypes.CDLL(str(library))


def view(address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """A tensor over the engine's memory."""
    elements = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def attend(batch: Any, params: Any) -> int:
    """pagedkern's attention over the batch that the structs describe. Called from C; 0 if it has been computed."""
    b, p = batch.contents, params.contents
    cache_shape = (b.num_blocks, b.block_size, b.num_kv_heads)
    k_strides = (b.k_stride_block, b.k_stride_token, b.k_stride_head, 1)
    v_strides = (b.v_stride_block, b.v_stride_token, b.v_stride_head, 1)
    queries, kv = DTYPES[b.q_dtype], DTYPES[b.kv_dtype]
    try:
        paged_attention(
            view(b.q, queries, (b.num_tokens, b.num_heads, b.head_dim), (b.q_stride_token, b.q_stride_head, 1)),
            view(b.k_cache, kv, (*cache_shape, b.head_dim), k_strides),
            view(b.v_cache, kv, (*cache_shape, b.head_dim_v), v_strides),
            view(b.block_table, torch.int32, (b.num_seqs, b.table_width), (b.block_table_stride, 1)),
            view(b.seq_lens, torch.int32, (b.num_seqs,), (1,)),
            cu_seqlens_q=view(b.cu_seqlens_q, torch.int32, (b.num_seqs + 1,), (1,)),
            scale=p.scale,
            causal=bool(p.causal),
            out=view(
                b.out, queries, (b.num_tokens, b.num_heads, b.head_dim_v), (b.out_stride_token, b.out_stride_head, 1)
            ),
        )
    except Exception:  # it cannot pass through C
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine = compiled(Path(folder))
        engine.engine_run.restype = ctypes.c_double
        error = float(engine.engine_run(ATTENTION(attend)))
    print(f"largest error of the attention that the engine got: {error:.1e}")
    if not 0 <= error < 1e-5:
        raise SystemExit("WRONG: the engine computes something else")
    print("checked: it is the attention that the engine computes itself")


if __name__ == "__main__":
    main()
