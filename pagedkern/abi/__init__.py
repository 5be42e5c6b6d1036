"""The block-table ABI: how a batch over a paged KV cache is described, for kernels and engines in any language.

The normative text is the C header beside this file, `pagedkern_abi.h`: `header_path()` names it, `include_dir()` is for
a compiler's `-I`. Everything here needs the standard library only.

A batch has S sequences, T query tokens, N blocks of B tokens, a block table W entries wide, H query heads, G KV heads,
and heads of D (q, K) or E (V, out) elements. All its arrays live on one device:

| field          | dtype           | shape        |                                                                    |
| -------------- | --------------- | ------------ | ------------------------------------------------------------------ |
| `block_table`  | int32           | [S, W]       | entry [i, j]: block of tokens j*B .. j*B+B-1 of sequence i         |
| `seq_lens`     | int32           | [S]          | tokens in the cache, this step's included; 0 = padding row         |
| `cu_seqlens_q` | int32           | [S+1]        | prefix sums of query lengths; None = one query a sequence          |
| `slot_mapping` | int64           | [T]          | block*B + offset that receives a new token's K/V; -1 = write none  |
| `k_cache`      | see below       | [N, B, G, D] | any strides but in the last dimension: NHD, HND, fused tensors     |
| `v_cache`      | of `k_cache`    | [N, B, G, E] | likewise, with strides of its own                                  |
| `q`            | see below       | [T, H, D]    | sequence i's rows are cu[i] .. cu[i+1]-1, its last positions       |
| `out`          | of `q`          | [T, H, E]    | every element is written                                           |
| `lse`          | float32         | [T, H]       | natural logarithm of the softmax denominator                       |

`q` is float32, float16 or bfloat16; the caches are one of these, or float8_e4m3fn, float8_e5m2 or int8 with a scale
for each KV head. The last dimension of every array is contiguous and the other strides are free, but no two elements
of `out` or of `lse` share memory. Table entries at `j >= ceil(seq_lens[i] / B)` may hold anything and are never
followed. Offsets into a cache are computed in 64 bits: widen a block id before multiplying it by a stride.

From arrays of any library to the struct that a kernel takes, without a copy:

>>> from array import array
>>> table = memoryview(array("i", [7, 2, 5, -1])).cast("B").cast("i", (2, 2))  # a torch tensor would do as well
>>> batch = validate(block_table=table, seq_lens=array("i", [20, 3]), slot_mapping=array("q", [35, 82]),
...                  block_size=16, num_blocks=8)
>>> validate_contents(batch)  # reads the arrays; sequence 1's second entry is unused, so its -1 is fine
>>> struct = to_struct(batch)  # `pagedkern_batch`; keeps the arrays alive
>>> struct.num_seqs, struct.table_width, struct.block_size, struct.block_table_stride
(2, 2, 16, 2)
>>> to_csr(table, array("i", [20, 3]), 16)
CSR(indptr=array('i', [0, 2, 3]), indices=array('i', [7, 2, 5]), last_page_len=array('i', [4, 3]))

`validate` checks what descriptors tell and never waits for a device; `validate_contents` reads arrays on the host.
A change in a field's meaning raises the major version; minor versions append fields.
"""

from __future__ import annotations

from pathlib import Path

from pagedkern.abi.arrayview import ArrayView
from pagedkern.abi.batch import Batch, validate
from pagedkern.abi.codes import (
    ABI_VERSION,
    ABI_VERSION_MAJOR,
    ABI_VERSION_MINOR,
    DEVICE_CPU,
    DEVICE_CUDA,
    DEVICE_CUDA_HOST,
    DEVICE_CUDA_MANAGED,
    DEVICE_ROCM,
    DEVICE_ROCM_HOST,
    DTYPE_CODES,
    ITEMSIZE,
)
from pagedkern.abi.contents import validate_contents
from pagedkern.abi.csr import CSR, Table, from_csr, to_csr
from pagedkern.abi.exporters import describe
from pagedkern.abi.structs import AttentionParamsStruct, BatchStruct, to_params, to_struct

__all__ = [
    "ABI_VERSION",
    "ABI_VERSION_MAJOR",
    "ABI_VERSION_MINOR",
    "CSR",
    "DEVICE_CPU",
    "DEVICE_CUDA",
    "DEVICE_CUDA_HOST",
    "DEVICE_CUDA_MANAGED",
    "DEVICE_ROCM",
    "DEVICE_ROCM_HOST",
    "DTYPE_CODES",
    "ITEMSIZE",
    "ArrayView",
    "AttentionParamsStruct",
    "Batch",
    "BatchStruct",
    "Table",
    "describe",
    "from_csr",
    "header_path",
    "include_dir",
    "to_csr",
    "to_params",
    "to_struct",
    "validate",
    "validate_contents",
]


def include_dir() -> Path:
    """The directory that holds `pagedkern_abi.h`, for a compiler's `-I`."""
    return Path(__file__).resolve().parent


def header_path() -> Path:
    """The C header, for a program that reads it itself (as a compiler at run time does)."""
    return include_dir() / "pagedkern_abi.h"
