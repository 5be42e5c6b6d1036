"""`Rates`: how fast a machine does what a step is made of. The objective and its simulation reckon with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagedkern.autotune.workloads import Model


@dataclass(frozen=True, slots=True)
class Speed:
    """What the chosen backend and configuration reach at one block size."""

    kv_bytes_per_second: float  # K and V that decode attention reads
    call_seconds: float = 0.0  # what a decode call takes however little it reads
    prefill_flops: float = 0.0  # per second, of the two matrix products of causal prefill; 0: as fast as `compute`
    backend: str = ""
    config: str = "{}"  # of decode, the fields as JSON
    prefill_backend: str = ""
    prefill_config: str = "{}"
    kv_error: float = 0.0  # of `kv_bytes_per_second` against that of other block sizes: half an interval, as a share
    prefill_error: float = 0.0  # of `prefill_flops`, likewise


@dataclass(frozen=True, slots=True)
class Rates:
    """A machine, for models whose attention has the shape that was measured."""

    read: float  # bytes per second of a plain read of memory
    compute: float  # floating-point operations per second of a matrix product
    link: float  # bytes per second between the cache and where blocks are swapped to
    speeds: Mapping[int, Speed]  # for each block size

    # The costs of one step. Time is linear in them: weights, tokens, attention and copies one after the other.

    def weights_seconds(self, model: Model) -> float:
        """Reading all weights once: what a step costs however few tokens it computes."""
        return model.weight_bytes / self.read

    def token_seconds(self, model: Model) -> float:
        """The matrix products of one token: two operations for each weight."""
        return 2 * model.num_weights / self.compute

    def attention_seconds(self, model: Model, block_size: int, tokens_read: float) -> float:
        """Decode attention of all layers, over sequences that together read so many tokens of K and V."""
        speed = self.speeds[block_size]
        return model.num_layers * (speed.call_seconds + tokens_read * model.layer_bytes / speed.kv_bytes_per_second)

    def prefill_seconds(self, model: Model, block_size: int, pairs: float) -> float:
        """Prefill attention of all layers, for so many pairs of a query token and a key that it sees."""
        flops = self.speeds[block_size].prefill_flops or self.compute
        return model.num_layers * 4 * model.num_heads * model.head_dim * pairs / flops

    def copy_seconds(self, model: Model, block_size: int) -> float:
        """Copying one block in all layers: it is read and written."""
        return 2 * block_size * model.token_bytes / self.read

    def swap_seconds(self, model: Model, block_size: int) -> float:
        """Moving one block out and in again."""
        return 2 * block_size * model.token_bytes / self.link
