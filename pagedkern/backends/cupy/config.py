"""What can be tuned of the CUDA kernels, the default by rule, and the instances that a configuration asks for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from pagedkern.backends.base import Config, Problem
from pagedkern.backends.cupy.instance import FEATURE_ALIBI, FEATURE_SOFTCAP, MAX_KEYS, MAX_STAGES, Instance, pitch
from pagedkern.errors import InvalidArgument

POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
HALF = ("float16", "bfloat16")
NARROW = ("float8_e4m3fn", "float8_e5m2", "int8")
STAGE_BYTES, SHARED_BYTES = 36 << 10, 72 << 10  # so that two or three blocks of threads fit a multiprocessor
SMALL_GPU = 99 << 10  # bytes of shared memory that a block may have on compute capability 8.6 and 8.9
PREFILL_SPAN = 1 << 30  # tokens: prefill does not split keys


@dataclass(frozen=True)
class CupyConfig(Config):
    """Results for one configuration do not depend on `stages` and `copy`, to the bit."""

    tile: int = 64  # decode: keys of a tile in shared memory: 16, 32, 64, 128 or 256
    warps: int = 4  # decode: warps of a block of threads, a power of two; tile / warps is 8 to 32, at least 16 for mma
    stages: int = 3  # decode: tiles in shared memory, 2 to 8
    span: int = 256  # decode: keys that a split reads in a row, a multiple of `tile`
    num_splits: int = 16  # decode: parts that the spans of a sequence are dealt to, 1 to 128
    decode_tokens: int = 1  # a sequence of more query tokens than this is served by the prefill kernel, 1 to 128
    prefill_tile: int = 64  # prefill: keys of a tile, 16, 32 or 64
    prefill_warps: int = 4  # prefill: warps of a block of threads, 16 query rows each (8 in float32): 1, 2, 4 or 8
    prefill_stages: int = 2  # 2 to 8
    copy: str = "auto"  # to shared memory: "bulk" (sm_90), "async", "plain"; what alignment forbids falls back

    def __post_init__(self) -> None:
        self._check("tile", POWERS[4:])
        self._check("warps", POWERS[:5])
        self._check("prefill_tile", POWERS[4:7])
        self._check("prefill_warps", POWERS[:4])
        self._check("stages", range(2, MAX_STAGES + 1))
        self._check("prefill_stages", range(2, MAX_STAGES + 1))
        self._check("num_splits", range(1, 129))
        self._check("decode_tokens", range(1, 129))
        if type(self.span) is not int or not self.tile <= self.span <= PREFILL_SPAN or self.span % self.tile:
            accepted = f"a multiple of tile ({self.tile}) up to {PREFILL_SPAN}"
            raise InvalidArgument(f"config.span: got {self.span!r}, expected {accepted}")
        if not 8 <= self.tile // self.warps <= 32:
            raise InvalidArgument(
                f"config.warps: got {self.warps} for a tile of {self.tile} keys, expected 8 to 32 keys for each"
            )
        if self.prefill_tile // self.prefill_warps > 32 or self.prefill_tile < self.prefill_warps:
            raise InvalidArgument(f"config.prefill_warps: got {self.prefill_warps}, expected 1 for at most 32 keys")
        if self.copy not in ("auto", "bulk", "async", "plain"):
            raise InvalidArgument(f"config.copy: got {self.copy!r}, expected 'auto', 'bulk', 'async', 'plain'")

    def _check(self, name: str, accepted: range | tuple[int, ...]) -> None:
        value = getattr(self, name)
        if type(value) is not int or value not in accepted:
            some = f"{accepted[0]} to {accepted[-1]}" if isinstance(accepted, range) else ", ".join(map(str, accepted))
            raise InvalidArgument(f"config.{name}: got {value!r}, expected {some}")


class KernelKey(NamedTuple):
    """The part of a problem that decides what is compiled."""

    q_dtype: str
    kv_dtype: str
    group: int  # query heads of a KV head
    head_dim: int
    head_dim_v: int
    softcap: bool
    alibi: bool

    @property
    def tensor_cores(self) -> bool:
        """16-bit queries over a cache of the same dtype, or of numbers that they hold exactly; all else is float32."""
        return self.q_dtype in HALF and (self.kv_dtype == self.q_dtype or self.kv_dtype in NARROW)

    @property
    def padded_dims(self) -> tuple[int, int]:
        """head_dim of K and V as the kernels see them; a product with an 8-bit V takes 32 elements at a time."""
        step = 32 if self.kv_dtype in NARROW else 16
        return -(-self.head_dim // 16) * 16, -(-self.head_dim_v // step) * step


def model_of(problem: Problem) -> KernelKey:
    p = problem
    return KernelKey(p.q_dtype, p.kv_dtype, p.group, p.head_dim, p.head_dim_v, p.softcap, p.alibi)


def default_config(problem: Problem) -> CupyConfig:
    """The default: two or three stages that leave room for several blocks, as many splits as fill a GPU."""
    if problem.op != "attention":  # nothing to tune
        return CupyConfig()
    model = model_of(problem)
    row = sum(pitch(dim, model.kv_dtype) for dim in model.padded_dims)  # bytes of a token in a stage
    tile = 64
    while tile > 16 and tile * row > STAGE_BYTES:
        tile //= 2
    made = CupyConfig(
        tile=tile,
        warps=min(4, tile // (16 if model.tensor_cores else 8)),
        stages=max(2, min(4, SHARED_BYTES // (tile * row))),
        num_splits=max(4, min(64, 128 // problem.num_kv_heads)),
        decode_tokens=max(1, 32 // problem.group),
        prefill_tile=min(tile, 64 if sum(model.padded_dims) <= 384 else 32),  # what registers hold
    )
    while instance(model, made, "async", False).shared_bytes > SMALL_GPU:  # the queries of many heads take room too
        if made.stages > 2:
            made = replace(made, stages=made.stages - 1)
        else:
            made = replace(made, tile=made.tile // 2, warps=max(1, made.warps // 2))
    return made


def configs(problem: Problem) -> list[CupyConfig]:
    """The default and what lies around it: other spans, more splits, deeper or shallower pipelines, another copy."""
    base = default_config(problem).to_dict()
    if problem.op != "attention":
        return [default_config(problem)]
    changes: list[dict[str, object]] = [{}, {"span": 512}, {"span": 1024}, {"num_splits": 32}, {"num_splits": 8}]
    if problem.max_seqlen_q > 1:
        changes = [{}, {"prefill_warps": 8}, {"prefill_stages": 3}, {"prefill_tile": 32}, {"decode_tokens": 128}]
    changes += [{"stages": 2}, {"stages": 4}, {"copy": "async"}, {"copy": "bulk"}]
    made = (CupyConfig.from_dict({**base, **change}) for change in changes)
    return list(dict.fromkeys(made))


@lru_cache(maxsize=4096)
def instance(model: KernelKey, config: CupyConfig, copy: str, prefill: bool) -> Instance:
    """What the decode or the prefill kernel is compiled for; `copy` is the path that the caches allow."""
    rows = 16 if model.tensor_cores else 8 if prefill else min(8, 1 << (model.group - 1).bit_length())
    if prefill:
        row_warps, key_warps, tile = config.prefill_warps, 1, config.prefill_tile
    else:  # of a large group the warps share keys rather than rows
        row_warps = min(config.warps, 1 << (-(-model.group // rows) - 1).bit_length())
        key_warps, tile = config.warps // row_warps, config.tile
    tile = min(tile, (MAX_KEYS if model.tensor_cores else 32) * key_warps)
    if model.tensor_cores:
        key_warps = min(key_warps, tile // 16)
    return Instance(
        model.q_dtype, model.kv_dtype, *model.padded_dims, model.tensor_cores, rows, row_warps, key_warps, tile,
        config.prefill_stages if prefill else config.stages, PREFILL_SPAN if prefill else config.span, copy, prefill,
        FEATURE_SOFTCAP * model.softcap + FEATURE_ALIBI * model.alibi,
    )  # fmt: skip
