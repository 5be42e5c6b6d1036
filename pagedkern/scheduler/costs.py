"""Is a preempted request cheaper to swap out and in, or to compute again?"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from pagedkern.errors import InvalidArgument, InvalidType


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What `policy="auto"` reckons with. The defaults are round figures for an 8B model on one data-centre GPU: measure
    your own, and give at least `bytes_per_block`.

    Attributes:
        bytes_per_block: bytes of K and V in one block, all layers together (`KVCache.bytes_per_block`). None: 131,072
            for each token (32 layers, 8 KV heads, head_dim 128, 16 bits).
        link_bytes_per_second: between device and host, each way. 25e9: what PCIe 4.0 x16 carries in practice, of 32e9.
        transfer_seconds: the fixed cost of moving one sequence, each way.
        prefill_tokens_per_second: how fast the model computes prompts.
    """

    bytes_per_block: int | None = None
    link_bytes_per_second: float = 25e9
    transfer_seconds: float = 100e-6
    prefill_tokens_per_second: float = 10_000.0

    def __post_init__(self) -> None:
        for name, lowest in (
            ("bytes_per_block", 1),
            ("link_bytes_per_second", 0),
            ("transfer_seconds", 0),
            ("prefill_tokens_per_second", 0),
        ):
            value = getattr(self, name)
            if value is None and name == "bytes_per_block":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise InvalidType(f"{name}: got {value!r}, expected a number")
            if not lowest <= value < inf or (value == 0 and name != "transfer_seconds"):
                expected = "0 or more" if name == "transfer_seconds" else "more than 0"
                raise InvalidArgument(f"{name}: got {value!r}, expected a finite number, {expected}")

    def swap_seconds(self, num_seqs: int, num_blocks: int, block_size: int) -> float:
        """Seconds for `num_seqs` sequences out and in again: `num_blocks` whole blocks of `block_size` tokens, however
        few tokens are in them.
        """
        size = self.bytes_per_block if self.bytes_per_block is not None else 131_072 * block_size
        return 2 * (num_seqs * self.transfer_seconds + num_blocks * size / self.link_bytes_per_second)

    def recompute_seconds(self, num_tokens: int) -> float:
        """Seconds for the prefill of `num_tokens`. Linear: the part of attention that is quadratic is not counted."""
        return num_tokens / self.prefill_tokens_per_second
