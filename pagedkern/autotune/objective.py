"""Output tokens per second of a workload at each block size, from rates that were measured. `docs/objective.md` has a
worked example; `tests/autotune/simulation.py` plays the same out with the real scheduler and allocator.

A larger block wastes more of the memory and shares less of a prefix, a smaller one may be slower to read. The three
terms are computed apart. With block size b, memory for B blocks, and requests of prompt p, output o, n samples:

1. **Concurrency.** A sequence that holds l tokens takes `ceil(l / b)` blocks, and a request on average over its steps
   `u` blocks that nobody else has; then `G` requests fit, `G * u + shared(G) = B - idle`. The full blocks of a prompt
   are shared by its samples, and whole blocks of a shared beginning by the requests of a family. Idle are the watermark
   and what waits to be enough for the next prompt: it is the long ones that wait, and the room grows from nothing to
   theirs, `mean(p^2) / (2 mean(p))` blocks on average.
2. **Step time.** `T = weights + n D tokens + layers * attention(n D mean context)`, linear as in `Rates`. D of the G
   requests decode: the first token of each comes with its prompt.
3. **Cost of a request.** Its prompt is computed but for what is cached, `b * floor(s / b)` of a shared beginning s at
   the most; forks copy the block they part in; sometimes a request is swapped out and in, in whole blocks: if those
   that run grow by more than the room that is left until the next one ends.

A request stays for o steps, so in a step `G / o` requests end and as many begin, and each resident gives n tokens:

    tokens per second = n G / (T + G / o * cost)

Its error bar is what the errors of the two attention rates make of it, see `rating`: both slower, both faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, sqrt
from statistics import NormalDist

from pagedkern.autotune.rates import Rates
from pagedkern.autotune.workloads import Model, Request, Traffic

DRAWN = 1000  # requests that stand for a workload
SEED = 1
WATERMARK = 0.01  # share of the blocks that an engine keeps free when it admits: the scheduler's advice
USUAL_BLOCK_SIZE = 16  # what engines take who do not tune


@dataclass(frozen=True, slots=True)
class Score:
    """What an engine gets out of a GPU's memory and time with one block size."""

    block_size: int  # tokens
    num_blocks: int  # blocks that the memory holds
    blocks: float  # blocks that a request alone holds, mean over its steps
    concurrency: float  # sequences in memory at the same time (a request with n outputs counts n)
    step_seconds: float  # one step that only decodes
    attention_seconds: float  # attention's part of step_seconds
    request_seconds: float  # what one request costs besides decoding: its prompt, copies and swaps
    prefill_seconds: float  # the prompt's part of request_seconds
    copy_seconds: float  # the part of request_seconds that copies blocks
    swap_seconds: float  # the part of request_seconds that moves blocks to the host and back
    cached_tokens: float  # tokens of a prompt that are found in the cache, mean
    waste: float  # share of the slots held that hold no token
    tokens_per_second: float  # output tokens
    low: float  # tokens_per_second with rates as low as the measurements allow (relative to other block sizes)
    high: float  # tokens_per_second with rates as high as the measurements allow (relative to other block sizes)

    @property
    def error(self) -> float:
        """Half the error bar of tokens per second, as a share."""
        return (self.high - self.low) / 2 / self.tokens_per_second


def score(
    traffic: Traffic, model: Model, rates: Rates, memory: int, block_sizes: Iterable[int] = (), seed: int = SEED
) -> list[Score]:
    """The scores of block sizes for which there are rates, all of them by default, for a cache of `memory` bytes.

    A block size at which the longest request does not fit is left out.
    """
    requests = traffic.draw(DRAWN, seed)
    found = []
    for block_size in block_sizes or sorted(rates.speeds):
        num_blocks = memory // (block_size * model.token_bytes)
        if num_blocks >= _most_blocks(traffic, requests, block_size):
            found.append(_score(traffic, model, rates, num_blocks, block_size, requests))
    return found


def unusual(block_size: int) -> tuple[float, int]:
    """How far a block size is from the usual one; a key to sort by."""
    return max(block_size, USUAL_BLOCK_SIZE) / min(block_size, USUAL_BLOCK_SIZE), block_size


def best(scores: Sequence[Score]) -> Score | None:
    """The score with the most tokens per second; of equals the smallest block."""
    return max(scores, key=lambda s: (s.tokens_per_second, -s.block_size), default=None)


def _score(traffic: Traffic, model: Model, rates: Rates, num_blocks: int, b: int, requests: Sequence[Request]) -> Score:
    n, count = traffic.samples, len(requests)
    output = sum(r.output for r in requests) / count
    held = Held(traffic, requests, b)
    residents, blocks = held.residents(num_blocks)
    decoding = residents * (1 - 1 / output)
    context = sum(sum_reads(model, r) for r in requests) / (count * output)
    attention = rates.attention_seconds(model, b, n * decoding * context)
    step = rates.weights_seconds(model) + n * decoding * rates.token_seconds(model) + attention
    cached = held.cached(requests, residents)
    tokens = sum(r.prompt - hit for r, hit in zip(requests, cached, strict=True)) / count
    pairs = sum(model.pairs(int(hit), r.prompt) for r, hit in zip(requests, cached, strict=True)) / count
    seen = rates.prefill_seconds(model, b, pairs)
    prefill = tokens * rates.token_seconds(model) + seen
    copy = sum(_copies(traffic, r, b) for r in requests) / count * rates.copy_seconds(model, b)
    swap = held.swapped_blocks(num_blocks) * rates.swap_seconds(model, b)
    cost = prefill + copy + swap
    speed = rates.speeds[b]
    reading = attention - model.num_layers * speed.call_seconds

    def tokens_per_second(side: int) -> float:
        """-1: with rates that are lower by their errors, 1: higher."""
        read = reading / (1 + side * speed.kv_error) - reading
        multiplied = seen / (1 + side * speed.prefill_error) - seen
        return n * residents / (step + read + residents / output * (cost + multiplied))

    return Score(
        block_size=b, num_blocks=num_blocks, blocks=blocks, concurrency=n * residents, step_seconds=step,
        attention_seconds=attention, request_seconds=cost, prefill_seconds=prefill, copy_seconds=copy,
        swap_seconds=swap, cached_tokens=sum(cached) / count, waste=held.waste,
        tokens_per_second=tokens_per_second(0), low=tokens_per_second(-1), high=tokens_per_second(1),
    )  # fmt: skip


class Held:
    """Blocks that requests of a workload hold at one block size, means over steps: long outputs count for more."""

    def __init__(self, traffic: Traffic, requests: Sequence[Request], b: int) -> None:
        self._traffic, self._b = traffic, b
        self._fit: dict[int, tuple[float, float]] = {}
        n, count = traffic.samples, len(requests)
        self._steps = sum(r.output for r in requests)
        private = _beam_blocks(traffic, b) if traffic.beam else _sample_blocks(n, b)
        self._blocks = sum(private(r) for r in requests) / self._steps
        tokens = sum(_sum_tokens(traffic, r) for r in requests) / self._steps
        self.waste = 1 - min(1.0, tokens / (b * self._blocks))
        prompts = [-(-r.prompt // b) for r in requests]
        self._idle = sum(p * p for p in prompts) / (2 * sum(prompts))
        sizes = [(r.prompt + r.output / 2, r.output) for r in requests]  # while it decodes, and for how many steps
        mean = sum(size * steps for size, steps in sizes) / self._steps
        self._variance = sum(size * size * steps for size, steps in sizes) / self._steps / mean**2 - 1
        self._growth = n * self._steps / count / b
        self._newcomer = sum(r.prompt // b + n * (1 if r.prompt % b or n > 1 else 0) for r in requests) / count
        by_length = sorted((r.shared // b, r.output) for r in requests if r.shared >= b)
        self._beyond: list[tuple[int, int, float]] = []  # first, last, share: of shared blocks first .. last-1
        left, start = float(sum(o for _, o in by_length)), 0
        for end, weight in by_length:
            if end > start:
                self._beyond.append((start, end, left / self._steps))
                start = end
            left -= weight
        self._shared = sum((end - start) * share for start, end, share in self._beyond)  # counted in each request

    def residents(self, num_blocks: int) -> tuple[float, float]:
        """Requests that fit, and blocks that each adds: the root of G * u + shared(G) = room, by bisection.

        One at least: it is let in when nobody else runs, whatever is idle.
        """
        if num_blocks not in self._fit:
            self._fit[num_blocks] = self._residents(num_blocks)
        return self._fit[num_blocks]

    def _residents(self, num_blocks: int) -> tuple[float, float]:
        room, high = self._room(num_blocks), self._limit
        low = min(1.0, high)
        for _ in range(60 if self._total(high) > room else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if self._total(middle) <= room else (low, middle)
        return high, self._total(high) / high

    def residents_below(self, most: float, num_blocks: int) -> float:
        """Requests that are resident on average if no more than `most` may be, as a scheduler is told.

        How many fit comes and goes with their sizes: taken as normal around the mean, with the variance of a sum of as
        many independent sizes. The mean of the lesser of the two is what remains.
        """
        fit, _ = self.residents(num_blocks)
        spread = sqrt(fit * max(0.0, self._variance))
        if self._total(self._limit) <= self._room(num_blocks) or spread == 0:  # memory is not what bounds them
            return min(most, fit)
        normal = NormalDist(fit, spread)
        return max(min(1.0, most), fit - spread * spread * normal.pdf(most) + (most - fit) * (1 - normal.cdf(most)))

    def swapped_blocks(self, num_blocks: int) -> float:
        """Blocks that are swapped out and in again for each request that ends.

        Until the next one ends, the others grow by `growth` blocks on average, exponentially distributed; there are the
        watermark and a room that is anything from none to that of a prompt. If it is not enough, who came last goes.
        """
        if self._traffic.beam:  # a block a beam is kept in reserve
            return 0.0
        growth, room = self._growth, 2 * self._idle
        short = exp(-WATERMARK * num_blocks / growth) * growth / room * (1 - exp(-room / growth))
        return short * self._newcomer

    def cached(self, requests: Sequence[Request], residents: float) -> list[float]:
        """Tokens of the beginning of each prompt that are in the cache when it comes, at most all but one.

        Block j of a family is there if another resident of the family reaches so far. Residents of a family are
        Poisson: `G / families` of them on average, of which a share reaches block j.
        """
        per_family, hit = residents / self._traffic.families, 0.0
        hits = {0: 0.0}  # by blocks of a shared beginning
        for start, end, share in self._beyond:
            hit += (end - start) * (1 - exp(-per_family * share))
            hits[end] = hit * self._b
        return [min(hits[r.shared // self._b], r.prompt - 1) for r in requests]

    def _room(self, num_blocks: int) -> float:
        return num_blocks * (1 - WATERMARK) - self._idle

    @property
    def _limit(self) -> float:
        """Requests that the workload runs at a time at the most."""
        return self._traffic.concurrency / self._traffic.samples

    def _total(self, residents: float) -> float:
        families = self._traffic.families
        union = sum((end - start) * (1 - exp(-residents / families * share)) for start, end, share in self._beyond)
        return residents * (self._blocks - self._shared) + families * union


def _sample_blocks(n: int, b: int) -> Callable[[Request], float]:
    """Blocks of n independent samples, summed over the steps of their output."""

    def blocks(r: Request) -> float:
        whole = r.prompt // b if n > 1 else 0  # shared by the samples
        held = _sum_blocks(r.prompt + r.output - 1, b) - _sum_blocks(r.prompt - 1, b)
        return n * held - (n - 1) * whole * r.output

    return blocks


def _beam_blocks(traffic: Traffic, b: int) -> Callable[[Request], float]:
    """Blocks of a beam search, summed over steps: one line of blocks, the last one of each beam, and in between as
    many copies of a block as the beams of now had ancestors when it was filled. A block a beam is kept in reserve."""
    n = traffic.samples
    lineages = _lineages(n, round(n * (1 - traffic.survival)))

    @cache
    def excess(filled: int) -> float:
        """Copies beyond the one line when a step has just ended in forks: of the last block, which has `filled` tokens
        and is copied when the forks write to it, and of those before."""
        return sum(lineages(age) - 1 for age in (1, *range(filled + 1, filled + 64 * b, b)))

    mean_excess = sum(excess(filled) for filled in range(1, b + 1)) / b

    def blocks(r: Request) -> float:
        held = _sum_blocks(r.prompt + r.output - 1, b) - _sum_blocks(r.prompt - 1, b)
        return held + r.output * (min(mean_excess, (n - 1) * (1 + r.output / b)) + n)

    return blocks


@cache
def _lineages(width: int, forked: int) -> Callable[[int], float]:
    """How many ancestors the beams of now had so many steps ago, on average.

    In a step, `forked` of the beams are put in the place of others, each with a parent among those that stay; two
    lines meet if one of the two was forked from the other's parent.
    """
    alive = width - forked
    meet = 1.0 - _distinct_parents(width, alive) if alive < width else 0.0
    chances = [0.0] * (width + 1)
    chances[width] = 1.0
    means = [float(width)]
    for _ in range(4096):
        for k in range(2, width + 1):
            rate = min(1.0, meet * k * (k - 1) / 2)
            chances[k - 1] += chances[k] * rate
            chances[k] *= 1 - rate
        means.append(sum(k * p for k, p in enumerate(chances)))
        if means[-1] < 1.0001:
            break
    return lambda age: means[age] if age < len(means) else (1.0 if meet else float(width))


def _distinct_parents(width: int, alive: int) -> float:
    """The chance that two beams drawn of `width` have different parents, `alive` keeping their own."""
    pairs = width * (width - 1) / 2
    forked = width - alive
    same = forked / alive * alive  # each forked beam and the survivor that it comes from
    same += forked * (forked - 1) / 2 / alive  # two forked from the same
    return 1 - same / pairs


def _copies(traffic: Traffic, r: Request, b: int) -> float:
    """Blocks copied for one request: forks write into a block that is begun and shared."""
    n = traffic.samples
    if not traffic.beam:
        return n - 1 if r.prompt % b else 0
    return (r.output - 1) * round(n * (1 - traffic.survival)) * (1 - 1 / b) + n - 1


def _sum_tokens(traffic: Traffic, r: Request) -> float:
    """Tokens that a request holds, summed over its steps; what its samples share counted once."""
    own = r.output * (r.output - 1) / 2
    return (1 if traffic.beam else traffic.samples) * own + r.output * r.prompt


def sum_reads(model: Model, r: Request) -> float:
    """Tokens that one sequence of the request reads, summed over its steps."""
    if model.sliding_window is None or r.prompt + r.output <= model.sliding_window:
        return r.output * (r.prompt + (r.output - 1) / 2)
    return sum(model.read_tokens(length) for length in range(r.prompt, r.prompt + r.output))


def _sum_blocks(tokens: int, b: int) -> int:
    """ceil(1/b) + ceil(2/b) + ... + ceil(tokens/b)."""
    full, rest = divmod(tokens, b)
    return b * full * (full + 1) // 2 + rest * (full + 1)


def _most_blocks(traffic: Traffic, requests: Sequence[Request], b: int) -> int:
    """Blocks of the largest request alone."""
    n = traffic.samples
    return max(r.prompt // b + n * (-(-(r.prompt + r.output) // b) - r.prompt // b) for r in requests)
