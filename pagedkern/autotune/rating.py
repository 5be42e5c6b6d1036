"""The rates of a machine from the times of its runs, each with an error bar.

Block sizes are compared by the ratios of times within a round, so that is what has an error: the interval of the median
ratio to what was picked at the usual block size, see `decision.interval`, with 95 % confidence for all block sizes of a
problem together. What all of them share (the time at the usual block size itself, the plain read of memory) moves all
alike, and is no part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from pagedkern.autotune.decision import ERROR_RATE, interval
from pagedkern.autotune.log import Log
from pagedkern.autotune.objective import unusual
from pagedkern.autotune.rates import Rates, Speed
from pagedkern.autotune.space import Candidate, Space

LINK = 25e9  # bytes per second between a GPU and its host: what PCIe 4.0 x16 carries in practice, of 32e9
NOT_MEASURED = 0.25  # error of a rate that is that of another block size, or was not timed in rounds

Picks = Mapping[int, Candidate]  # by block size


def rates_of(spaces: Sequence[Space], logs: Sequence[Log], picks: Sequence[Picks]) -> Rates | None:
    """The rates of a machine from the times of what was picked at each block size of each problem.

    Of several decode problems, for layers with and without a window, the first counts, and so of prefill: the rates are
    those of bytes and operations, of which a window leaves fewer. A block size at which prefill was not measured, for
    want of time, gets the rate of the nearest one at which it was, with an error of `NOT_MEASURED`.

    None without a decode problem, without a plain read, or if nothing was picked.
    """
    decode, prefill = (
        next((i for i, space in enumerate(spaces) if space.workload.kind == kind), None)
        for kind in ("decode", "prefill")
    )
    reads = [value for log in logs for value in log.reads]
    if decode is None or not reads:
        return None
    workload, call = spaces[decode].workload, _call_seconds(spaces[decode], logs[decode])
    flops = {} if prefill is None else _prefill(spaces[prefill], logs[prefill], picks[prefill])
    speeds = {}
    for block_size, (pick, seconds, error) in _times(spaces[decode], logs[decode], picks[decode]).items():
        rate = workload.kv_bytes / max(seconds - call, seconds / 2)
        slower = workload.kv_bytes / max(seconds * (1 + error) - call, seconds / 2)
        other, per_second, prefill_error = _nearest(flops, block_size)
        chosen = (other.backend, other.config) if other is not None else ("", "{}")
        errors = max(error, 1 - slower / rate), prefill_error
        speeds[block_size] = Speed(rate, call, per_second, pick.backend, pick.config, *chosen, *errors)
    if not speeds:
        return None
    read = median(reads)
    products = [value for log in logs for value in log.products]
    compute = median(products) if products else max(s.prefill_flops for s in speeds.values()) or read
    return Rates(read, compute, read / 2 if workload.device == "cpu" else LINK, speeds)


def _times(space: Space, log: Log, picks: Picks) -> dict[int, tuple[Candidate, float, float]]:
    """What was picked at each block size, its seconds, and their error as a share."""
    found = {}
    for block_size, pick in sorted(picks.items()):
        seconds = log.paired_seconds(pick, space.baseline)
        if seconds is not None:
            found[block_size] = pick, seconds, _error(log, pick, picks[min(picks, key=unusual)], len(picks))
    return found


def _error(log: Log, pick: Candidate, usual: Candidate, count: int) -> float:
    """Error of a pick's time as a share: half the interval of its ratio to that at the usual block size within a round,
    the larger half. `count`: the block sizes that are to be right together."""
    ratios = [times[pick] / times[usual] for times in log.finals if {pick, usual} <= times.keys()]
    if len(ratios) < 2:
        return NOT_MEASURED
    low, high = interval(ratios, ERROR_RATE / max(1, count - 1))
    middle = median(ratios)
    return min(NOT_MEASURED, max(high / middle - 1, 1 - low / middle))


def _prefill(space: Space, log: Log, picks: Picks) -> dict[int, tuple[Candidate, float, float]]:
    """What was picked at each block size, its floating-point operations per second, and their error."""
    times = _times(space, log, picks)
    return {b: (pick, space.workload.flops / seconds, error) for b, (pick, seconds, error) in times.items()}


def _nearest(
    measured: Mapping[int, tuple[Candidate, float, float]], block_size: int
) -> tuple[Candidate | None, float, float]:
    """What was measured at a block size, or else at the nearest; (None, 0.0, 0.0) if nothing was."""
    if block_size in measured:
        return measured[block_size]
    near = min(measured, key=lambda b: (max(b, block_size) / min(b, block_size), b), default=None)
    return (None, 0.0, 0.0) if near is None else (*measured[near][:2], NOT_MEASURED)


def _call_seconds(space: Space, log: Log) -> float:
    """What a call costs however little it reads: where the line through the times at two lengths meets nothing."""
    found = []
    for contexts in log.lengths.values():
        full, part = max(contexts), min(contexts)
        if full > part:
            read, lens = space.workload.tokens_read, space.workload.seq_lens
            tokens = [sum(read(min(n, context)) for n in lens) for context in (part, full)]
            times = [median(contexts[context]) for context in (part, full)]
            if tokens[1] > tokens[0]:  # a short window reads as much of both
                found.append(times[0] - tokens[0] * (times[1] - times[0]) / (tokens[1] - tokens[0]))
    return max(0.0, min(found, default=0.0))
