"""What callers hold: a request and its samples."""

from __future__ import annotations

import enum
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedkern.allocator import Sequence
    from pagedkern.allocator.arguments import Salt
    from pagedkern.allocator.retention import Retention
    from pagedkern.allocator.spans import Span


class Stage(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"  # has never run
    RUNNING = "running"
    SWAPPED = "swapped out"  # preempted; its blocks are in host memory
    DROPPED = "preempted"  # its blocks are given up, to be computed again
    FINISHED = "finished"
    CANCELLED = "cancelled"


WAITING, RUNNING, SWAPPED, DROPPED, FINISHED, CANCELLED = Stage  # looking into an enum takes longer


class Sample:
    """One completion of a request's prompt. All attributes are read-only."""

    __slots__ = ("_computed", "_reached", "finish_reason", "index", "request", "seq", "tokens")

    def __init__(self, request: Request, index: int) -> None:
        self.request = request  # of which this is a completion
        self.index = index  # 0 .. n-1
        self.tokens: list[int] = []  # ids of the new tokens, the one that ended it included
        self.finish_reason: str | None = None  # "stop" (an eos token, or `stopped`), "length" (max_tokens)
        self.seq: Sequence | None = None  # of the allocator; None before it runs, while preempted, after its end
        self._computed = 0  # tokens of `seq` whose K and V are in the cache
        self._reached = 0  # the most that were, before and after preemptions

    def _text(self, start: int, end: int) -> array[int]:
        """The ids at positions `start .. end-1` of prompt and completion. O(end - start)."""
        prompt = self.request.prompt
        ids = prompt[start:end]
        if end > len(prompt):
            ids.extend(self.tokens[max(0, start - len(prompt)) : end - len(prompt)])
        return ids

    @property
    def _known(self) -> int:
        """Tokens of prompt and completion, computed or not."""
        return len(self.request.prompt) + len(self.tokens)

    def __repr__(self) -> str:
        return (
            f"<Sample {self.index} of request {self.request.id}: {len(self.tokens)} new tokens, {self.finish_reason}>"
        )


class Request:
    """A prompt to complete. Made by `Scheduler.add`; all attributes are read-only."""

    __slots__ = (
        "_ahead",
        "_beside",
        "_plain",
        "_prefilling",
        "_stage",
        "_unfinished",
        "eos",
        "id",
        "keys",
        "max_tokens",
        "num_cached_tokens",
        "num_preemptions",
        "priority",
        "prompt",
        "retention",
        "salt",
        "samples",
    )

    def __init__(
        self,
        ident: int,
        prompt: array[int],
        max_tokens: int,
        n: int,
        eos: frozenset[int],
        salt: Salt,
        priority: int,
        keys: tuple[Span, ...],
        retention: tuple[Retention, ...],
    ) -> None:
        self.id = ident  # 1, 2, ... in the order of arrival
        self.prompt = prompt  # int64, token ids
        self.max_tokens = max_tokens  # of each sample
        self.eos = eos  # tokens that end a sample
        self.salt = salt  # as in `BlockAllocator.create`
        self.priority = priority  # of its cached blocks, as in `BlockAllocator.create`
        self.keys = keys  # what tokens of the prompt stand for, as in `BlockAllocator.create`
        self.retention = retention  # priorities of parts of it, as in `BlockAllocator.create`
        self.samples = tuple(Sample(self, i) for i in range(n))  # its completions
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache when it was first admitted
        self.num_preemptions = 0  # how often it had to make room
        self._stage = WAITING
        self._unfinished = list(self.samples)  # replaced when some end, never changed in place
        self._plain = n == 1 and not (priority or keys or retention)  # starts in one call with others like it
        self._prefilling = False  # the first unfinished sample has a sequence that is not computed to its end
        # Was ahead when the others were forked: shares the prompt's last block, and never has to copy it.
        self._ahead: Sample | None = None
        # If it was ever set aside: the blocks that foreign sequences held the last time.
        self._beside: int | None = None

    @property
    def state(self) -> str:
        """ "waiting", "running", "swapped out", "preempted" (to be recomputed), "finished" or "cancelled"."""
        return self._stage.value

    @property
    def ended(self) -> bool:
        """Finished or cancelled."""
        return self._stage is FINISHED or self._stage is CANCELLED

    def __repr__(self) -> str:
        return f"<Request {self.id} {self.state}: {len(self.prompt)} prompt tokens, {len(self.samples)} samples>"
