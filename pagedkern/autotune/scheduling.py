"""Advice for a scheduler: how many tokens a step may compute, and how many sequences may run at a time.

Both trade throughput for the time of a step, which is what a reader waits for between two tokens. Beyond some value
more of either gives no more tokens per second: the advice is the least that gives all but `LOSS` of them, each. The
formula is that of `objective`, with two things that it takes for granted put in:

- With at most M sequences the residents are `min(M, what fits)`, in the mean.
- With K tokens a step, D of which are those that decode, a prompt with p tokens to be computed takes p / (K - D) steps
  instead of one, in which its request holds memory and gives no token. So requests end at the rate

      r = min(G / (o - 1 + mean(max(1, p / (K - D)))), (K - D) / mean(p))    with D = n r (o - 1)

  a step, the second where prompts are what everything waits for, and a step takes T(D) + r * cost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from pagedkern.autotune.objective import DRAWN, SEED, Held, Score, sum_reads
from pagedkern.autotune.rates import Rates
from pagedkern.autotune.workloads import Model, Request, Traffic

LOSS = 0.01  # share of the tokens per second that each of the two may cost
TOKEN_BUDGETS = tuple(1 << i for i in range(8, 16))  # of fewer rows matrix products are slower than was measured
MOST_SEQS = tuple(sorted({1, 2, *(3 << i for i in range(10)), *(4 << i for i in range(10))}))
STEPS = 24  # of the iteration for the sequences that decode


@dataclass(frozen=True, slots=True)
class SchedulerAdvice:
    """What to tell a scheduler, see `pagedkern.scheduler.Scheduler`."""

    token_budget: int  # tokens of a step
    max_num_seqs: int  # sequences at a time
    step_seconds: float  # of a step that computes as many tokens as it may


def advise_scheduler(traffic: Traffic, model: Model, rates: Rates, score: Score) -> SchedulerAdvice:
    """The least token budget and number of sequences that give all but 2 % of the tokens per second of a block size."""
    load = _Load(traffic, model, rates, score)
    limit = max(traffic.concurrency // traffic.samples, 1) * traffic.samples
    choices = sorted({min(_multiple(most, traffic.samples), limit) for most in MOST_SEQS} | {limit})
    speeds = [load.tokens_per_second(most, None) for most in choices]
    seqs = next(m for m, speed in zip(choices, speeds, strict=True) if speed >= (1 - LOSS) * max(speeds))
    budgets = [k for k in TOKEN_BUDGETS if k >= seqs] or [_multiple(seqs, 256)]
    speeds = [load.tokens_per_second(seqs, budget) for budget in budgets]
    tokens = next(k for k, speed in zip(budgets, speeds, strict=True) if speed >= (1 - LOSS) * max(speeds))
    return SchedulerAdvice(tokens, seqs, load.step_seconds(seqs, tokens))


def tokens_per_second(
    traffic: Traffic, model: Model, rates: Rates, score: Score, token_budget: int, max_num_seqs: int
) -> float:
    """Output tokens per second at the block size of a score with a scheduler's two limits."""
    return _Load(traffic, model, rates, score).tokens_per_second(max_num_seqs, token_budget)


def _multiple(count: int, unit: int) -> int:
    """The least multiple of `of` that is no less than `count`."""
    return -(-count // unit) * unit


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Those of a workload, given what is in the cache of them."""

    tokens: Sequence[float]  # to be computed of each, ascending
    beyond: Sequence[float]  # the sum of these from each on
    seconds: float  # of a request's prompt, copies and swaps, mean

    @property
    def mean(self) -> float:
        return self.beyond[0] / DRAWN

    def steps(self, tokens: float) -> float:
        """Steps that a prompt takes with so many tokens in each, mean; one at least."""
        i = bisect_left(self.tokens, tokens)
        return (i + self.beyond[i] / tokens) / DRAWN


class _Load:
    """A workload on a machine at one block size."""

    def __init__(self, traffic: Traffic, model: Model, rates: Rates, score: Score) -> None:
        self._traffic, self._model, self._rates, self._score = traffic, model, rates, score
        self._requests: Sequence[Request] = traffic.draw(DRAWN, SEED)
        self._held = Held(traffic, self._requests, score.block_size)
        self._output = sum(r.output for r in self._requests) / DRAWN
        self._context = sum(sum_reads(model, r) for r in self._requests) / (DRAWN * self._output)
        self._known: dict[float, _Prompts] = {}

    def tokens_per_second(self, max_num_seqs: int, token_budget: int | None) -> float:
        """None: all prompt tokens that wait are computed in one step."""
        rate, n, o = self._requests_a_step(max_num_seqs, token_budget), self._traffic.samples, self._output
        seconds = self._decode_seconds(n * rate * (o - 1)) + rate * self._prompts(max_num_seqs).seconds
        return rate * n * o / seconds

    def step_seconds(self, max_num_seqs: int, token_budget: int) -> float:
        """Time of a step that computes as many tokens as it may, prompts where nobody decodes."""
        rate, prompts = self._requests_a_step(max_num_seqs, token_budget), self._prompts(max_num_seqs)
        decoding = self._traffic.samples * rate * (self._output - 1)
        return self._decode_seconds(decoding) + max(0.0, token_budget - decoding) / prompts.mean * prompts.seconds

    def _requests_a_step(self, max_num_seqs: int, token_budget: int | None) -> float:
        """How many requests end in a step."""
        n, o = self._traffic.samples, self._output
        residents, prompts = self._residents(max_num_seqs), self._prompts(max_num_seqs)
        rate = residents / o
        for _ in range(STEPS if token_budget is not None else 0):
            assert token_budget is not None
            left = max(token_budget - n * rate * (o - 1), token_budget / 16)  # the iteration comes from both sides
            rate = (rate + min(residents / (o - 1 + prompts.steps(left)), left / prompts.mean)) / 2
        return rate

    def _residents(self, max_num_seqs: int) -> float:
        return self._held.residents_below(max_num_seqs / self._traffic.samples, self._score.num_blocks)

    def _prompts(self, max_num_seqs: int) -> _Prompts:
        residents = self._residents(max_num_seqs)
        if residents not in self._known:
            self._known[residents] = self._computed(residents)
        return self._known[residents]

    def _computed(self, residents: float) -> _Prompts:
        b, model, rates, requests = self._score.block_size, self._model, self._rates, self._requests
        hits = self._held.cached(requests, residents)
        pairs = sum(model.pairs(int(hit), r.prompt) for r, hit in zip(requests, hits, strict=True)) / DRAWN
        tokens = sorted(r.prompt - hit for r, hit in zip(requests, hits, strict=True))
        beyond = [*accumulate(reversed(tokens), initial=0.0)][::-1]
        seconds = beyond[0] / DRAWN * rates.token_seconds(model) + rates.prefill_seconds(model, b, pairs)
        return _Prompts(tokens, beyond, seconds + self._score.copy_seconds + self._score.swap_seconds)

    def _decode_seconds(self, decoding: float) -> float:
        rates, model = self._rates, self._model
        attention = rates.attention_seconds(model, self._score.block_size, decoding * self._context)
        return rates.weights_seconds(model) + decoding * rates.token_seconds(model) + attention
