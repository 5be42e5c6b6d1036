"""What a backend is: the protocol that each one implements and the records that `pagedkern.ops` hands to it.

`ops` has validated every field before a backend sees it: dtypes, devices, shapes, strides and ranges of host numbers
are as documented here, and a launcher trusts them. What it cannot trust are numbers that live on the device (block ids,
lengths, slots): entries that the ABI calls unused may hold anything and are never followed.

Shapes: S sequences, T query tokens, H query heads, G KV heads, D head_dim of Q and K, E head_dim of V, N blocks,
B tokens a block, W width of the block table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, Self

from pagedkern.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Problem:
    """What a call asks for, as far as shapes, dtypes and flags tell: the key of support, configuration and tuning.

    It holds nothing that would have to be read from the device, so two calls with equal shapes are equal problems.
    A `write_kv` problem has H = G and the dtype of the new K in `q_dtype`; of a `copy_blocks` problem only `device` is
    set.
    """

    device: str  # torch device type: "cpu", "cuda"
    q_dtype: str  # "float32", "float16", "bfloat16"
    kv_dtype: str  # the same, or "float8_e4m3fn", "float8_e5m2", "int8"
    num_heads: int  # H
    num_kv_heads: int  # G, divides H
    head_dim: int  # D
    head_dim_v: int  # E
    block_size: int  # B, tokens
    num_seqs: int  # S
    num_tokens: int  # T
    max_seqlen_q: int  # upper bound of the query tokens of one sequence; 1 is decode
    max_seqlen_k: int  # upper bound of the context: W * B
    op: Literal["attention", "write_kv", "copy_blocks"] = "attention"
    causal: bool = True
    sliding_window: int | None = None  # tokens seen, the query's own included
    softcap: bool = False  # whether there is one, as with the two below
    alibi: bool = False
    sinks: bool = False

    @property
    def group(self) -> int:
        """Query heads for each KV head, H / G."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return self.num_kv_heads * (self.head_dim + self.head_dim_v) * ITEMSIZE[self.kv_dtype]


ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}
"""Bytes of one element, for each dtype that a cache may have."""

SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""What the scale of a quantized cache may be: the positive normal numbers of float32."""


@dataclass(frozen=True)
class Config:
    """Base of a backend's tunable parameters. Subclasses are frozen dataclasses of plain numbers, names and flags."""

    def to_dict(self) -> dict[str, int | float | str | bool]:
        """The fields as a JSON object; `from_dict` gives the config back."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """The config with these `values`, others at their defaults; `InvalidArgument` names an unknown one."""
        accepted = [field.name for field in fields(cls)]
        for name in values:
            if name not in accepted:
                raise InvalidArgument(f"config: got an unknown field {name!r}, expected {', '.join(accepted)}")
        return cls(**values)

    @classmethod
    def expect(cls, config: Config) -> Self:
        """`config` itself if it is of this class, else `InvalidArgument`."""
        if not isinstance(config, cls):
            raise InvalidArgument(f"config: got {type(config).__name__}, expected {cls.__name__}")
        return config


def foreign(problem: Problem, device: str) -> str | None:
    """Why a backend that computes on `device`, in every dtype, cannot do a problem; None if it can."""
    if problem.device != device:
        return f"the tensors are on {problem.device!r}; this backend computes on {device!r} here"
    if problem.op == "copy_blocks":
        return None
    if problem.q_dtype not in ("float32", "float16", "bfloat16"):
        return f"q is {problem.q_dtype}; this backend computes float32, float16 and bfloat16"
    if problem.kv_dtype not in ITEMSIZE:
        return f"the caches are {problem.kv_dtype}; this backend reads {', '.join(ITEMSIZE)}"
    return None


@dataclass(slots=True)
class AttentionCall:
    """One attention call. Every element of `out` and `lse` must be written, also rows that belong to no sequence
    (rows at or past `cu_seqlens_q[-1]`): those see nothing, so out = 0 and lse = -inf, or the sink if there is one."""

    q: Tensor  # [T, H, D], last dimension contiguous
    k_cache: Tensor  # [N, B, G, D], strides free but for the last dimension
    v_cache: Tensor  # [N, B, G, E]
    block_table: (
        Tensor  # int32 [S, W], row stride free; an entry wholly past seq_len or behind the window may be garbage
    )
    seq_lens: Tensor  # int32 [S], tokens in the cache, this step's included; 0 = padding row
    cu_seqlens_q: Tensor | None  # int32 [S+1]; None: T == S, one query a sequence
    max_seqlen_q: int  # upper bound of query tokens of one sequence
    scale: float
    causal: bool
    sliding_window: int | None  # tokens seen, the query's own included; >= 1
    softcap: float | None  # > 0
    alibi_slopes: Tensor | None  # float32 [H]
    sinks: Tensor | None  # float32 [H]: +inf takes all, -inf is as none, NaN makes every row of the head NaN
    k_scale: Tensor | None  # float32 [G]; given exactly when the cache is quantized
    v_scale: Tensor | None  # float32 [G]
    out: Tensor  # [T, H, E], dtype of q, last dimension contiguous
    lse: Tensor | None  # float32 [T, H], natural logarithm


@dataclass(slots=True)
class WriteCall:
    """Store the K and V of new tokens. A quantized cache stores `round(x / scale)`, rounded to nearest even and
    saturated to the largest finite value; NaN stays NaN in float8 and becomes 0 in int8."""

    k: Tensor  # [T, G, D], float32, float16 or bfloat16, last dimension contiguous
    v: Tensor  # [T, G, E]
    k_cache: Tensor  # [N, B, G, D]
    v_cache: Tensor  # [N, B, G, E]
    slot_mapping: Tensor  # int64 [T], block * B + offset; -1 = write nothing
    k_scale: Tensor | None  # float32 [G]; given exactly when the cache is quantized
    v_scale: Tensor | None  # float32 [G]


@dataclass(slots=True)
class CopyCall:
    """Copy whole blocks inside each cache, every pair as if all sources were read before any destination is written.
    `ops` refuses nothing about overlap: callers with dependent pairs split them (as `KVCache.apply` does)."""

    caches: list[Tensor]  # each [N, ...], blocks in the first dimension, any strides
    src_blocks: Tensor  # int64 [n], on the caches' device
    dst_blocks: Tensor  # int64 [n], no id twice


@dataclass(slots=True)
class MergeCall:
    """Attention over two disjoint sets of keys, to be joined. A side whose lse is -inf or +inf has seen nothing, and
    whatever its output holds does not count; of two such sides out is 0 and lse -inf. NaN in an lse gives NaN."""

    out_a: Tensor  # [T, H, E], float32, float16 or bfloat16, any strides
    lse_a: Tensor  # float32 [T, H], natural logarithm
    out_b: Tensor  # as out_a
    lse_b: Tensor  # as lse_a
    out: Tensor  # [T, H, E], dtype of out_a, contiguous
    lse: Tensor  # float32 [T, H], contiguous


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a backend can run on this machine."""

    available: bool
    reason: str  # why not (the exact missing package or driver and the command that brings it), or what it runs on
    emulated: bool = False  # runs GPU kernels on the CPU by an interpreter or simulator


class MergesStates(Protocol):
    """A backend with a kernel of its own for `merge_states`, which torch computes elsewhere."""

    def merge_states(self, call: MergeCall) -> None:
        """Compute what `merge_states` documents into `call.out` and `call.lse`, every element of both."""


class Backend(Protocol):
    """One implementation of the three operations. Instances hold no tensors and may be used from several threads."""

    name: ClassVar[str]

    def probe(self) -> Probe:
        """Look for what the backend needs, without side effects; cheap enough for `backends()`."""

    def supports(self, problem: Problem) -> str | None:
        """None if the backend computes this problem exactly, else the reason why not. Never a wrong answer."""

    def configs(self, problem: Problem) -> Iterable[Config]:
        """The sensible configurations for a tuner to try, the default among them."""

    def default_config(self, problem: Problem) -> Config:
        """The configuration used when nothing was tuned. Depends on the model's shape, not on the batch."""

    def make_config(self, fields: Mapping[str, object]) -> Config:
        """The config with these fields; raises `InvalidArgument` naming the field that is unknown or out of range."""

    def attention(self, call: AttentionCall, config: Config) -> None:
        """Compute what `paged_attention` documents into `call.out` and `call.lse`, every element of both."""

    def write_kv(self, call: WriteCall) -> None:
        """Scatter K and V into their slots."""

    def copy_blocks(self, call: CopyCall) -> None:
        """Copy blocks in every cache."""
