"""What was before paging: each sequence in one contiguous stretch of memory, reserved when it is admitted.

The rival that Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (SOSP
2023, arXiv:2309.06180), compare with. Standard library only; nothing of pagedkern.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


class ContiguousPool:
    """Token slots `0 .. num_slots-1`, handed out in stretches: the lowest hole that is large enough (first fit).

    Holes are kept sorted and joined when they touch. O(holes) for each call.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.holes = [(0, num_slots)] if num_slots else []  # (start, length), ascending, no two touching
        self.stretches: dict[int, int] = {}  # start: length, of what is handed out

    @property
    def num_free(self) -> int:
        """Slots in all holes together."""
        return sum(length for _, length in self.holes)

    def reserve(self, length: int) -> int | None:
        """The start of a stretch of so many slots (at least one), or None if no hole is large enough."""
        for i, (start, room) in enumerate(self.holes):
            if room >= length:
                self.holes[i : i + 1] = [(start + length, room - length)] if room > length else []
                self.stretches[start] = length
                return start
        return None

    def release(self, start: int) -> None:
        """Give a stretch back. `KeyError` if none begins there."""
        length = self.stretches.pop(start)
        i = bisect_left(self.holes, (start, 0))
        if i < len(self.holes) and self.holes[i][0] == start + length:
            length += self.holes.pop(i)[1]
        if i and sum(self.holes[i - 1]) == start:
            before = self.holes.pop(i - 1)
            start, length = before[0], before[1] + length
        insort(self.holes, (start, length))


def reservation(policy: str, prompt: int, output: int, limit: int) -> int:
    """The slots reserved for a request of `prompt + output` tokens in a model with contexts of up to `limit`.

    "max": the limit, whatever comes; "pow2": the prompt and the next power of two above the output; "oracle": what will
    be needed, as if it were known. (Orca Max, Pow2 and Oracle in the paper.)
    """
    if policy == "max":
        return limit
    if policy == "pow2":
        return min(limit, prompt + (1 << (output - 1).bit_length()))
    if policy == "oracle":
        return prompt + output
    raise ValueError(f"policy: got {policy!r}, expected 'max', 'pow2' or 'oracle'")


@dataclass
class Usage:
    """Slots by what they are used for, summed over the steps looked at.

    Those are the steps in which somebody waits, from the first on in which it is memory that they wait for, not tokens.
    """

    num_slots: int
    steps: int = 0
    resident: int = 0  # requests, summed over steps
    tokens: int = 0  # hold the state of a token
    later: int = 0  # reserved, will hold one
    never: int = 0  # reserved, will not: internal fragmentation
    holes: int = 0  # not reserved, though somebody waits: external fragmentation

    def share(self, slots: int) -> float:
        """Of all the memory."""
        return slots / (self.num_slots * self.steps)

    @property
    def waste(self) -> float:
        """Share of the reserved slots that hold no token."""
        return (self.later + self.never) / (self.tokens + self.later + self.never)

    @property
    def mean_resident(self) -> float:
        return self.resident / self.steps


@dataclass
class Resident:
    start: int
    reserved: int
    prompt: int
    output: int
    prefilled: int = 0
    generated: int = 0

    @property
    def tokens(self) -> int:
        """In the cache; the token sampled last is not."""
        return self.prefilled + max(0, self.generated - 1)


@dataclass
class ContiguousServer:
    """First come first served continuous batching over a `ContiguousPool`, with chunked prefill.

    Each step computes one token for every request that decodes, then prompts with what is left of the token budget.
    """

    num_slots: int
    policy: str
    limit: int
    token_budget: int
    pool: ContiguousPool = field(init=False)
    resident: list[Resident] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.pool = ContiguousPool(self.num_slots)

    def serve(self, requests: Iterable[tuple[int, int]]) -> Usage:
        """All requests, (prompt, output) tokens, are there from the beginning."""
        waiting, usage, full = deque(requests), Usage(self.num_slots), False
        while waiting or self.resident:
            left = self._step(waiting)
            full = full or (left > 0 and len(waiting) > 0)
            for request in [r for r in self.resident if r.generated == r.output]:
                self.pool.release(request.start)
                self.resident.remove(request)
            if full and waiting:
                self._look(usage)
        return usage

    def _step(self, waiting: deque[tuple[int, int]]) -> int:
        """Returns the tokens of the budget that are left over."""
        budget = self.token_budget
        for request in self.resident:
            if request.prefilled == request.prompt and budget:
                request.generated += 1
                budget -= 1
        prefills = [r for r in self.resident if r.prefilled < r.prompt]
        while budget > 0:
            if not prefills:
                if not waiting or (admitted := self._admit(*waiting[0])) is None:
                    break
                waiting.popleft()
                prefills.append(admitted)
            request = prefills[0]
            count = min(budget, request.prompt - request.prefilled)
            request.prefilled += count
            budget -= count
            if request.prefilled == request.prompt:
                request.generated = 1
                prefills.pop(0)
        return budget

    def _admit(self, prompt: int, output: int) -> Resident | None:
        length = reservation(self.policy, prompt, output, self.limit)
        if not prompt + output <= length <= self.num_slots:
            raise ValueError(f"requests: {prompt} + {output} tokens do not fit into {length} of {self.num_slots} slots")
        start = self.pool.reserve(length)
        if start is None:
            return None
        self.resident.append(Resident(start, length, prompt, output))
        return self.resident[-1]

    def _look(self, usage: Usage) -> None:
        usage.steps += 1
        usage.resident += len(self.resident)
        usage.holes += self.pool.num_free
        for request in self.resident:
            usage.tokens += request.tokens
            usage.later += request.prompt + request.output - request.tokens
            usage.never += request.reserved - request.prompt - request.output
