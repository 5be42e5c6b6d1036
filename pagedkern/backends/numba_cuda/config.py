"""What a tuner may choose, and the constants that kernels are compiled for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagedkern.backends.base import ITEMSIZE, Config
from pagedkern.errors import InvalidArgument

SHARED_BYTES = 48 * 1024  # shared memory that every GPU gives a block without asking


@dataclass(frozen=True)
class NumbaCudaConfig(Config):
    """What pays to tune. Tiles that do not fit into shared memory are halved until they do."""

    threads: int = 128  # threads of a block
    keys: int = 64  # tokens of K or V in shared memory at a time
    decode_rows: int = 0  # query rows of a decode tile; 0: the group, rounded up to a power of two, at most 16
    prefill_rows: int = 32  # query rows of a prefill tile
    span: int = 256  # tokens in a row that one split reads before the next split's turn comes
    splits: int = 32  # blocks that share the keys of one decode tile

    def __post_init__(self) -> None:
        powers = {
            "threads": (32, 256),
            "keys": (16, 128),
            "decode_rows": (1, 32),
            "prefill_rows": (4, 64),
            "span": (16, 1 << 20),
        }
        for name, (low, high) in powers.items():
            value = getattr(self, name)
            if name == "decode_rows" and value == 0 and type(value) is int:
                continue
            if type(value) is not int or not low <= value <= high or value & (value - 1):
                or_zero = "0 or " if name == "decode_rows" else ""
                raise InvalidArgument(
                    f"config.{name}: got {value!r}, expected {or_zero}a power of two from {low} to {high}"
                )
        if type(self.splits) is not int or not 1 <= self.splits <= 256:
            raise InvalidArgument(f"config.splits: got {self.splits!r}, expected an integer from 1 to 256")
        if self.span < self.keys:
            raise InvalidArgument(f"config.span: got {self.span}, expected at least config.keys, {self.keys}")


@dataclass(frozen=True)
class Constants:
    """All that a compiled attention kernel is specialised for. Everything else is a parameter of the kernel."""

    q_dtype: str
    kv_dtype: str
    head_dim: int  # D
    head_dim_v: int  # E
    group: int  # query heads of a KV head
    block_size: int  # B, tokens
    causal: bool
    window: bool  # whether there is one; its length is a parameter
    softcap: bool
    alibi: bool
    sinks: bool
    lse: bool  # whether it is asked for
    ragged: bool  # whether cu_seqlens_q is given; without it each sequence has one query
    q_vector: int  # elements of one load; 1 where addresses are not multiples of 16 bytes
    k_vector: int
    v_vector: int
    threads: int
    keys: int
    rows: int  # query rows of a tile
    decode_tokens: int  # a sequence with more query tokens is computed by the prefill kernel
    span: int
    splits: int

    @property
    def quantized(self) -> bool:
        return ITEMSIZE[self.kv_dtype] == 1

    @property
    def k_stride(self) -> int:
        """Elements from one token of the K tile to the next: 16 bytes more than needed spread over the banks."""
        return self.head_dim + 16 // ITEMSIZE[self.kv_dtype]

    @property
    def v_stride(self) -> int:
        """Elements from one token of the V tile to the next."""
        return self.head_dim_v + 16 // ITEMSIZE[self.kv_dtype]

    @property
    def q_stride(self) -> int:
        """Floats from one row of the query tile to the next; the tile holds the result in the end."""
        return max(self.head_dim, self.head_dim_v) + 4

    @property
    def p_stride(self) -> int:
        """Floats from one row of the score tile to the next."""
        return self.keys + 4

    @property
    def state_rows(self) -> int:
        """Rows of the score tile and of the state of the softmax: a warp works on 4 of them."""
        return max(4, self.rows)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        floats = self.rows * self.q_stride + self.state_rows * (self.p_stride + 3)
        return 4 * (floats + 2 * self.keys) + self.keys * (self.k_stride + self.v_stride) * ITEMSIZE[self.kv_dtype]

    def fitted(self) -> Constants:
        """The same with the larger of the two tile sizes halved until the tiles fit into shared memory."""
        fit = self
        while fit.shared_bytes > SHARED_BYTES:
            fit = replace(fit, keys=fit.keys // 2) if fit.keys > fit.rows else replace(fit, rows=fit.rows // 2)
        return fit


def decode_rows(config: NumbaCudaConfig, group: int) -> int:
    """Query rows of a decode tile."""
    return config.decode_rows or min(16, 1 << (group - 1).bit_length())
