"""What has been done so far, counted once: what is taken back or aborted does not count."""

from __future__ import annotations

from pagedkern.allocator.handles import Plan, Sequence
from pagedkern.allocator.undo import UndoLog

COUNTS = (
    "sequences_created",
    "forks",
    "prefix_tokens_asked",
    "prefix_tokens_found",
    "blocks_copied",
    "blocks_swapped_out",
    "blocks_swapped_in",
    "out_of_blocks",
)
_MOVED = {"copy": "blocks_copied", "swap_out": "blocks_swapped_out", "swap_in": "blocks_swapped_in"}


class Counts:
    """The counts by name, `numbers`. A transaction that fails puts them back as a whole; within an operation most of
    them change last, when nothing can fail any more.

    What a new sequence asked of the prefix cache is counted at once and taken back if the sequence is freed before a
    step of it is committed. Forks of such a sequence have asked the same question, all together once.
    """

    __slots__ = ("_undo", "last_question", "numbers", "sharing")

    def __init__(self, undo: UndoLog) -> None:
        self.numbers = dict.fromkeys(COUNTS, 0)
        self.sharing: dict[int, int] = {}  # question: how many sequences share it; without an entry it is answered
        self.last_question = 0
        self._undo = undo

    def moves(self, plan: Plan, swap: bool, sign: int = 1) -> None:
        """The plan's moves are made, or (-1) will not be carried out. `swap`: it is no step.

        What a step brings in from the host for a prefix is no swap.
        """
        self._undo.append((self.numbers.update, (dict(self.numbers),)))
        for kind, blocks, _ in plan.moves:
            if swap or kind == "copy":
                self.numbers[_MOVED[kind]] += sign * len(blocks)

    def answer(self, seq: Sequence) -> None:
        """Something of an `own`ed sequence is committed that shares a question: what it asked remains counted."""
        self._share(seq._question, 0)
        seq._question = 0

    def fork(self, seq: Sequence, number: int) -> None:
        """So many forks of an `own`ed sequence are about to inherit its question."""
        if seq._question:
            if seq._question in self.sharing:
                self._share(seq._question, self.sharing[seq._question] + number)
        else:
            self.last_question += 1
            seq._question = self.last_question
            self._share(seq._question, 1 + number)

    def take_back(self, seq: Sequence) -> None:
        """A sequence has been freed, and nothing of it was ever committed."""
        if seq._question:
            sharers = self.sharing.get(seq._question, 0)
            if sharers:
                self._share(seq._question, sharers - 1)
            if sharers != 1:
                return
        self.numbers["prefix_tokens_asked"] -= seq._asked
        self.numbers["prefix_tokens_found"] -= seq._found

    def _share(self, question: int, sharers: int) -> None:
        self._undo.append((self._put, (question, self.sharing.get(question, 0))))
        self._put(question, sharers)

    def _put(self, question: int, sharers: int) -> None:
        if sharers:
            self.sharing[question] = sharers
        else:
            self.sharing.pop(question, None)
