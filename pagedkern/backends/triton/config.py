"""The parameters of the attention kernels: what may be tuned, the default by rule, and a space that compiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pagedkern.backends.base import ITEMSIZE, Config, Problem
from pagedkern.errors import InvalidArgument

BYTES_IN_FLIGHT = 32 * 1024  # of K and V in one tile of the split kernel
SHARED_MEMORY = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
"""KiB of shared memory that a program may have, by compute capability; 99 where it is not listed (CUDA C++ Programming
Guide, technical specifications per compute capability)."""


def _power(low: int, high: int) -> tuple[int, ...]:
    return tuple(2**i for i in range(low.bit_length() - 1, high.bit_length()))


_ACCEPTED: dict[str, tuple[int, ...]] = {
    "tile": _power(16, 256),
    "span": _power(16, 2**20),
    "num_splits": tuple(range(1, 257)),
    "rows": _power(1, 128),
    "warps": _power(1, 8),
    "stages": tuple(range(1, 9)),
    "split_queries": tuple(range(1, 65)),
    "prefill_rows": _power(16, 256),
    "prefill_tile": _power(16, 256),
    "prefill_warps": _power(1, 16),
    "prefill_stages": tuple(range(1, 9)),
}


@dataclass(frozen=True)
class TritonConfig(Config):
    """What pays to tune. Under one configuration the result of a sequence depends on that sequence alone."""

    tile: int = 64  # keys read at a time where keys are split
    span: int = 512  # keys that a split takes in one piece, a multiple of `tile`
    num_splits: int = 32  # splits of a sequence's keys, at most
    rows: int = 16  # query rows (tokens x heads of the group) of a program where keys are split
    warps: int = 4
    stages: int = 3  # tiles in flight, the one in use included
    split_queries: int = 8  # sequences of more query tokens than this are left to the prefill kernel
    prefill_rows: int = 128
    prefill_tile: int = 64
    prefill_warps: int = 8
    prefill_stages: int = 2
    allow_tf32: bool = False  # round float32 operands to 10 bits of mantissa for the tensor cores

    def __post_init__(self) -> None:
        for name, accepted in _ACCEPTED.items():
            value = getattr(self, name)
            if type(value) is not int or value not in accepted:
                some = ", ".join(map(str, accepted)) if len(accepted) < 12 else f"{accepted[0]} to {accepted[-1]}"
                powers = ", a power of two" if len(accepted) >= 12 and accepted[2] != accepted[1] + 1 else ""
                raise InvalidArgument(f"config.{name}: got {value!r}, expected {some}{powers}")
        if self.span < self.tile:
            raise InvalidArgument(f"config.span: got {self.span}, expected at least the tile, {self.tile}")
        if type(self.allow_tf32) is not bool:
            raise InvalidArgument(f"config.allow_tf32: got {self.allow_tf32!r}, expected True or False")


def operand(problem: Problem) -> str:
    """The dtype of the products: q's where the cache converts to it exactly, else float32."""
    exact = problem.kv_dtype == problem.q_dtype or ITEMSIZE[problem.kv_dtype] == 1
    return problem.q_dtype if exact else "float32"


def default_config(problem: Problem, capability: tuple[int, int]) -> TritonConfig:
    """The default by head_dim, dtype, group and compute capability.

    - `tile`: 32 KiB of K and V, but no more than 8192 numbers of either, which is what registers bear where they must
      be converted; 16 to 128 keys, 64 of a quantized cache. `stages` keep two tiles in flight (three of a quantized
      cache) where shared memory is 163 KiB or more, else one: a multiprocessor of an H100 needs some 20 KiB in flight
      to be busy (bandwidth times latency).
    - `span`: so long that the partial results of a span are 1/32 of its K and V or less, from 256 to 2048 keys.
    - `rows`: the group, in tiles of 16 to 64 rows for the tensor cores; of 4 at most for float32, which runs without
      them. 8 `warps` where 4 have no registers for that: above 8192 numbers of the rows' q or sum, or 4096 where
      tensor cores take their operands from registers.
    - Prefill: see `_prefill`.
    """
    size, narrow = ITEMSIZE[problem.kv_dtype], operand(problem) != "float32"
    d, e = sum(split_columns(problem.head_dim, not narrow)), padded(problem.head_dim_v)
    tile = min(64 if size == 1 else 128, BYTES_IN_FLIGHT // ((d + e) * size), 8192 // max(d, e))
    tile = max(16, floor_power(tile))
    roomy = SHARED_MEMORY.get(capability, 99) > 99
    rows = min(64, max(16, ceil_power(problem.group))) if narrow else min(4, ceil_power(problem.group))
    prefill_rows, prefill_tile, prefill_warps = _prefill(problem, capability)
    return TritonConfig(
        tile=tile,
        span=min(2048, max(256, ceil_power(problem.group * 128 // size))),
        rows=rows,
        warps=8 if rows * max(d, e) > (4096 if _from_registers(capability) else 8192) else 4,
        stages=(4 if size == 1 else 3) if roomy else 2,
        prefill_rows=prefill_rows,
        prefill_tile=prefill_tile,
        prefill_warps=prefill_warps,
    )


def _prefill(problem: Problem, capability: tuple[int, int]) -> tuple[int, int, int]:
    """Rows, keys and warps of the prefill kernel: what fits into registers without spills, as compiled.

    Where tensor cores take K and V from registers the quantized are converted there, too, by every warp for itself: few
    rows and many keys, which also leave each thread 16 bytes to load. Softcap, ALiBi and a q of two parts take
    registers everywhere.
    """
    if operand(problem) == "float32":  # no tensor cores
        return 16, 16, 8
    narrow = ITEMSIZE[problem.kv_dtype] == 1
    columns = max(padded(problem.head_dim), padded(problem.head_dim_v))
    if narrow and _from_registers(capability):
        return 32, 32 if columns > 128 else 64, 8
    if columns > 128:
        return 64, 16 if _from_registers(capability) else 32, 8
    in_parts, featured = split_columns(problem.head_dim, wide=False)[1] > 0, problem.softcap or problem.alibi
    if _from_registers(capability):
        return (64, 32, 8) if in_parts or featured else (64 if columns > 64 else 128, 64, 8)
    return (128, 32, 8) if in_parts and featured and not narrow else (128, 64, 8)


def _from_registers(capability: tuple[int, int]) -> bool:
    """Whether tensor cores multiply what is in registers; others read K and V from shared memory, and since compute
    capability 10.0 leave the sums in memory of their own."""
    return not (9, 0) <= capability < (12, 0)


def configs(problem: Problem, capability: tuple[int, int]) -> Iterator[TritonConfig]:
    """The default and its neighbours, one or two fields away, as far as they fit into shared memory."""
    base = default_config(problem, capability)
    seen = set()
    for changes in _decode_changes(base) if problem.max_seqlen_q <= base.split_queries else _prefill_changes(base):
        try:
            config = replace(base, **changes)
        except InvalidArgument:
            continue
        if config not in seen and (config == base or _fits(config, problem, capability)):
            seen.add(config)
            yield config


def _decode_changes(base: TritonConfig) -> Iterator[dict[str, Any]]:
    yield {}
    for tile in (base.tile // 2, base.tile, base.tile * 2):
        for stages in (2, 3, 4):
            yield {"tile": tile, "stages": stages}
    for warps in (2, 8):
        yield {"warps": warps}
        yield {"warps": warps, "tile": base.tile * warps // 4}
    for splits in (8, 16, 64, 128):
        yield {"num_splits": splits}
    for span in (base.span // 2, base.span * 2, base.span * 4):
        yield {"span": span}
    yield {"rows": base.rows * 2}


def _prefill_changes(base: TritonConfig) -> Iterator[dict[str, Any]]:
    yield {}
    for rows in (base.prefill_rows // 2, base.prefill_rows):
        for tile in (base.prefill_tile // 2, base.prefill_tile, base.prefill_tile * 2):
            for warps in (4, 8):
                for stages in (2, 3):
                    change = {"prefill_rows": rows, "prefill_tile": tile}
                    yield change | {"prefill_warps": warps, "prefill_stages": stages}


def _fits(config: TritonConfig, problem: Problem, capability: tuple[int, int]) -> bool:
    """Whether both kernels have enough shared memory and registers, by an estimate that errs on the safe side."""
    size, wide = ITEMSIZE[problem.kv_dtype], ITEMSIZE[operand(problem)]
    d, e = sum(split_columns(problem.head_dim, wide == 4)), padded(problem.head_dim_v)
    for rows, tile, warps, stages in (
        (config.rows, config.tile, config.warps, config.stages),
        (config.prefill_rows, config.prefill_tile, config.prefill_warps, config.prefill_stages),
    ):
        in_flight = max(1, stages - 1) * tile * (d + e) * size
        in_use = tile * max(d, e) * max(size, wide) + rows * (d + tile) * wide
        if in_flight + in_use > SHARED_MEMORY.get(capability, 99) * 1024:
            return False
        if rows * (e + 2 * tile) > 128 * 32 * warps:  # accumulator, scores and weights, of 255 registers a thread
            return False
    return True


def padded(head_dim: int) -> int:
    """Columns of a tile: the power of two that holds head_dim, at least the 16 of a tensor core."""
    return max(16, ceil_power(head_dim))


def split_columns(head_dim: int, wide: bool) -> tuple[int, int]:
    """The columns of q and k in one or two powers of two (the second is 0 if there is one): 192 is 128 and 64.

    A `wide` (float32) product runs without tensor cores, and takes registers for all the columns it is given: 128.
    """
    whole = padded(head_dim)
    first = floor_power(max(head_dim, 16))
    rest = padded(head_dim - first)
    if head_dim > first and first + rest < whole:
        return first, rest
    return (128, whole - 128) if wide and whole > 128 else (whole, 0)


def floor_power(x: int) -> int:
    """The largest power of two that is not above x >= 1."""
    return 1 << x.bit_length() - 1


def ceil_power(x: int) -> int:
    """The smallest power of two that is not below x."""
    return 1 << max(0, x - 1).bit_length()
