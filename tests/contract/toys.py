"""Backends made from the judge itself: one that is right, and many that each break one rule. See test_judge.py."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from pagedkern.backends.base import AttentionCall, Config, CopyCall, Probe, Problem, WriteCall
from pagedkern.errors import InvalidArgument
from reference import oracle


@dataclass(frozen=True)
class ToyConfig(Config):
    """Nothing to choose."""


class RightBackend:
    """Computes everything by the oracle: slow, and right by definition."""

    name: ClassVar[str] = "toy"

    def probe(self) -> Probe:
        return Probe(True, "runs the oracle")

    def supports(self, problem: Problem) -> str | None:
        return None

    def configs(self, problem: Problem) -> Iterable[Config]:
        return [ToyConfig()]

    def default_config(self, problem: Problem) -> Config:
        return ToyConfig()

    def make_config(self, fields: Mapping[str, object]) -> Config:
        if fields:
            raise InvalidArgument(f"config: got {sorted(fields)}, expected no field")
        return ToyConfig()

    def attention(self, call: AttentionCall, config: Config) -> None:
        out, lse = self.compute(call)
        call.out.copy_(out)
        if call.lse is not None:
            call.lse.copy_(lse)

    def compute(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        return oracle.paged_attention(**arguments(call))

    def write_kv(self, call: WriteCall) -> None:
        k, v = oracle.write_kv(
            call.k, call.v, call.k_cache, call.v_cache, call.slot_mapping, k_scale=call.k_scale, v_scale=call.v_scale
        )
        call.k_cache.copy_(k)
        call.v_cache.copy_(v)

    def copy_blocks(self, call: CopyCall) -> None:
        for cache, after in zip(
            call.caches, oracle.copy_blocks(call.caches, call.src_blocks, call.dst_blocks), strict=True
        ):
            cache.copy_(after)


def arguments(call: AttentionCall) -> dict[str, Any]:
    """The arguments of the oracle."""
    left_out = ("out", "lse", "max_seqlen_q")
    return {name: getattr(call, name) for name in AttentionCall.__slots__ if name not in left_out}


class MultipliesByZero(RightBackend):
    """Reads whole blocks and gives unseen tokens the weight 0, which NaN survives."""

    def compute(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        out, lse = super().compute(call)
        size, starts = call.k_cache.shape[1], _starts(call)
        for i, n in enumerate(call.seq_lens.tolist()):
            if n % size and starts[i + 1] > starts[i]:
                slots = call.v_cache[int(call.block_table[i, n // size]), n % size :].double()
                out[starts[i] : starts[i + 1]] += (0 * slots).sum()
        return out, lse


class FollowsTheTail(RightBackend):
    """Follows table entries past the sequence, where they are in range (so that it does not crash)."""

    def compute(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        out, lse = super().compute(call)
        tail = call.block_table[:, -1]
        valid = tail[(tail >= 0) & (tail < len(call.k_cache))]
        return out + 1e-3 * valid.sum(), lse


class MasksOnlyQueriesOfTheSequence(RightBackend):
    """Multiplies the V of tokens behind the causal line by 0."""

    def compute(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        out, lse = super().compute(call)
        starts = _starts(call)
        for first, last in pairwise(starts):
            if last > first:
                out[first:last] += 0 * out[last - 1]
        return out, lse


class HidesNaN(RightBackend):
    """Cleans its inputs instead of masking them."""

    def compute(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        out, lse = super().compute(call)
        return out.nan_to_num(), lse.nan_to_num(neginf=-math.inf)


class IgnoresVScale(RightBackend):
    def compute(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        return super().compute(replace(call, v_scale=None))


class IgnoresKScale(RightBackend):
    def compute(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        return super().compute(replace(call, k_scale=None))


class FirstScaleForAll(RightBackend):
    def compute(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        v_scale = None if call.v_scale is None else call.v_scale[:1].expand_as(call.v_scale)
        return super().compute(replace(call, v_scale=v_scale))


class WindowOneMore(RightBackend):
    def compute(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        window = None if call.sliding_window is None else call.sliding_window + 1
        return super().compute(replace(call, sliding_window=window))


class WindowOneLess(RightBackend):
    def compute(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        window = None if call.sliding_window is None else max(1, call.sliding_window - 1)
        return super().compute(replace(call, sliding_window=window))


class BaseTwoLse(RightBackend):
    def compute(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        out, lse = super().compute(call)
        return out, lse / math.log(2)


class ForgetsSinkInLse(RightBackend):
    def compute(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        out, _ = super().compute(call)
        _, lse = super().compute(replace(call, sinks=None))
        return out, lse


class CapsAfterAlibi(RightBackend):
    """Applies softcap and ALiBi in the wrong order, which only both together show."""

    def compute(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        if call.softcap is None or call.alibi_slopes is None:
            return super().compute(call)
        return super().compute(replace(call, alibi_slopes=call.alibi_slopes * 0.9))


class QueriesStandFirst(RightBackend):
    """Takes the queries of a chunk to stand at the first positions of the sequence."""

    def compute(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        starts = torch.tensor(_starts(call))
        return super().compute(replace(call, seq_lens=torch.minimum(call.seq_lens, starts.diff().int())))


class WrongGroup(RightBackend):
    """Maps query head h to KV head h % G instead of h // (H / G)."""

    def compute(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        heads, kv_heads = call.q.shape[1], call.k_cache.shape[2]
        order = torch.arange(heads).view(-1, kv_heads).t().reshape(-1)
        back = order.argsort()
        slopes, sinks = (None if x is None else x[order] for x in (call.alibi_slopes, call.sinks))
        out, lse = super().compute(replace(call, q=call.q[:, order], alibi_slopes=slopes, sinks=sinks))
        return out[:, back], lse[:, back]


class ForgetsSpareRows(RightBackend):
    """Writes the rows of sequences only, not those past `cu_seqlens_q[-1]`."""

    def attention(self, call: AttentionCall, config: Config) -> None:
        out, lse = self.compute(call)
        rows = slice(0, _starts(call)[-1])
        call.out[rows] = out[rows].to(call.out.dtype)
        if call.lse is not None:
            call.lse[rows] = lse[rows].float()


class ForgetsPaddingLse(RightBackend):
    """Leaves a padding row's lse as it was."""

    def attention(self, call: AttentionCall, config: Config) -> None:
        out, lse = self.compute(call)
        call.out.copy_(out)
        if call.lse is not None:
            call.lse.copy_(torch.where(lse.isinf(), call.lse, lse))


class WritesPastOut(RightBackend):
    """Writes out in chunks of 16 bytes more than there are."""

    def attention(self, call: AttentionCall, config: Config) -> None:
        super().attention(call, config)
        memory = torch.empty(0, dtype=call.out.dtype).set_(call.out.untyped_storage())
        last = call.out.storage_offset() + sum(
            (n - 1) * s for n, s in zip(call.out.shape, call.out.stride(), strict=True)
        )
        memory[last + 1 : last + 5] = 0


class WritesTheCache(RightBackend):
    def attention(self, call: AttentionCall, config: Config) -> None:
        super().attention(call, config)
        call.v_cache[0, 0] = 0


class DependsOnTheBatch(RightBackend):
    """Rounds as a sum split by the number of sequences does."""

    def compute(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        out, lse = super().compute(call)
        return out * (1 + 2e-7 * (len(call.seq_lens) % 3)), lse


class DependsOnTheOrder(RightBackend):
    """Rounds as a sum in the order of physical blocks does."""

    def compute(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        out, lse = super().compute(call)
        return out * (1 + 2e-7 * (int(call.block_table[0, 0]) % 3)), lse


class DependsOnStrides(RightBackend):
    def compute(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        out, lse = super().compute(call)
        return out * (1 + 2e-7 * (call.k_cache.stride(1) % 5)), lse


class RefusesSilently(RightBackend):
    def supports(self, problem: Problem) -> str | None:
        return None if problem.head_dim % 16 == 0 else "head_dim is not a multiple of 16"


class RoundsScores(RightBackend):
    """Keeps float32 scores in bfloat16."""

    def compute(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        out, lse = oracle.torch_attention(**arguments(call), compute_dtype=torch.bfloat16)
        return out.double(), lse.double()


class OverflowsInTanh(RightBackend):
    """tanh by exponentials, inf / inf for large scores."""

    def compute(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        out, lse = super().compute(call)
        return (out * math.nan if call.softcap is not None and call.softcap < 0.1 else out), lse


class WritesNegativeSlots(RightBackend):
    """Counts -1 from the end, as Python does."""

    def write_kv(self, call: WriteCall) -> None:
        num_slots = call.k_cache.shape[0] * call.k_cache.shape[1]
        super().write_kv(replace(call, slot_mapping=call.slot_mapping % num_slots))


class Truncates(RightBackend):
    """Quantizes to int8 towards zero."""

    def write_kv(self, call: WriteCall) -> None:
        if call.k_scale is not None and call.k_cache.dtype == torch.int8:
            k = (call.k.double() / call.k_scale.double()[:, None]).trunc() * call.k_scale.double()[:, None]
            call = replace(call, k=k.float())
        super().write_kv(call)


class WrapsAround(RightBackend):
    """Does not saturate."""

    def write_kv(self, call: WriteCall) -> None:
        super().write_kv(call)
        if call.k_cache.dtype == torch.int8:
            call.k_cache.copy_(torch.where(call.k_cache == 127, -127, call.k_cache))


class CopiesOneByOne(RightBackend):
    """Copies block after block, so that a source may have been overwritten."""

    def copy_blocks(self, call: CopyCall) -> None:
        for cache in call.caches:
            for src, dst in zip(call.src_blocks.tolist(), call.dst_blocks.tolist(), strict=True):
                cache[dst] = cache[src]


class OffsetsIn32Bits(RightBackend):
    """Keeps byte offsets in 32 bits: reads block ids beyond them as others."""

    def compute(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        most = 2**31 // call.k_cache.stride(0)
        return super().compute(replace(call, block_table=call.block_table % most))


class IgnoresNaNSinks(RightBackend):
    """Compares the sink with the maximum, which is false for a NaN."""

    def compute(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        sinks = None if call.sinks is None else call.sinks.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        return super().compute(replace(call, sinks=sinks))


class WritesZeroWhereNothingIsSeen(RightBackend):
    """Fills the rows that see nothing with 0, whatever the sink is."""

    def compute(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        out, lse = super().compute(call)
        _, without = super().compute(replace(call, sinks=None))
        return torch.where((without == -math.inf)[..., None], 0.0, out), lse


class SubtractsInfinity(RightBackend):
    """exp(sink - maximum) of a sink that is the maximum and infinite."""

    def compute(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        out, lse = super().compute(call)
        return torch.where((lse == math.inf)[..., None], math.nan, out), torch.where(lse == math.inf, math.nan, lse)


def _starts(call: AttentionCall) -> list[int]:
    """Prefix sums of the query lengths."""
    if call.cu_seqlens_q is None:
        return list(range(len(call.seq_lens) + 1))
    return [int(x) for x in call.cu_seqlens_q.tolist()]
