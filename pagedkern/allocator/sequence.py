"""The handle of one sequence: its tokens, its blocks, and how far they have been computed."""

from __future__ import annotations

import enum
from array import array
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedkern.allocator.cohort import Cohort
    from pagedkern.allocator.step import Plan


class State(enum.Enum):
    """Where a sequence's blocks are."""

    LIVE = "live"  # on the device
    SWAPPED = "swapped out"  # in host memory
    FREED = "freed"


class Sequence:
    """A sequence of an allocator. Made by `create` and `fork`, of use until `free`; all attributes are read-only.

    The positions of its tokens are cut into three parts: `[0, num_computed_tokens)` have their K and V in the cache,
    those up to the end of the last step in flight will have once it has run, the others are still to be computed by
    `prefill`.
    """

    __slots__ = (
        "__weakref__",
        "_arriving",
        "_blocks",
        "_cached",
        "_cohort",
        "_computed",
        "_dirty",
        "_length",
        "_owner",
        "_pending",
        "_present",
        "_priority",
        "_private",
        "_registered",
        "_root",
        "_row",
        "_salt",
        "_scheduled",
        "_state",
        "_tokens",
        "id",
    )

    def __init__(self, owner: object, ident: int, blocks: list[int], tokens: array[int], length: int) -> None:
        self.id = ident  # unique in its allocator, never used again
        self._owner = owner
        self._state = State.LIVE
        self._blocks = blocks  # -1 where a block behind the window was given back
        self._tokens = tokens  # int64; the ids that are known, a prefix of the sequence
        self._length = length
        self._cached = 0  # tokens that need no computing because the prefix cache had them
        self._present = 0  # tokens that the prefix cache had, one more if it had all of them
        self._computed = 0
        self._scheduled = 0  # computed, or computed by a step in flight
        self._private = 0  # from this block on, blocks have no other owner and are not cached; before, look
        self._registered = 0  # leading full blocks that the prefix cache has been told of
        self._root = 0  # node of the empty prefix under the salt; 0: nothing of this sequence is cached
        self._salt: Any = None
        self._priority = 0
        self._pending: tuple[Plan, ...] = ()  # steps and plans in flight that concern this sequence, oldest first
        self._arriving = False  # some blocks get their contents from the host, by a move that is not committed
        self._dirty = True  # the row in the last block table of `append` is not up to date
        self._cohort: Cohort | None = None  # the batch whose steps move this sequence, see cohort.py
        self._row = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence: the prompt and everything appended."""
        cohort = self._cohort
        return self._length if cohort is None else cohort.length(self._row)

    @property
    def num_computed_tokens(self) -> int:
        """Leading tokens whose K and V are in the cache: found there by `create`, or computed by a committed step."""
        cohort = self._cohort
        return self._computed if cohort is None else cohort.computed(self._row, self._computed)

    @property
    def num_cached_tokens(self) -> int:
        """Leading tokens that `create` found in the prefix cache and that nobody computes again."""
        return self._cached

    @property
    def block_ids(self) -> list[int]:
        """The physical blocks, in order: block j holds the tokens `j*B .. j*B+B-1`. -1: given back behind the window.

        Blocks of the device, or of the host while the sequence is swapped out. A copy. O(blocks).
        """
        return self._blocks[:]

    @property
    def state(self) -> str:
        """ "live", "swapped out" or "freed"."""
        return self._state.value

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.id} {self.state}: {self.num_tokens} tokens, {self.num_computed_tokens} computed, "
            f"{len(self._blocks)} blocks>"
        )

    # What the allocator does with it.

    def _sync(self) -> None:
        """Take over what happened to this sequence in its cohort, and leave the cohort. O(1) in the number of steps."""
        cohort = self._cohort
        if cohort is not None:
            cohort.settle(self, self._row)
            self._cohort = None

    def _saved(self) -> tuple[Any, ...]:
        """What `_restore` needs to undo changes made from now on.

        `_blocks` and `_tokens` may grow in place afterwards; any other change to them must be made to a copy.
        """
        return (
            self._blocks,
            len(self._blocks),
            self._tokens,
            len(self._tokens),
            self._state,
            self._length,
            self._cached,
            self._present,
            self._computed,
            self._scheduled,
            self._private,
            self._registered,
            self._pending,
            self._root,
            self._arriving,
        )

    def _restore(self, *saved: Any) -> None:
        (
            self._blocks,
            num_blocks,
            self._tokens,
            num_tokens,
            self._state,
            self._length,
            self._cached,
            self._present,
            self._computed,
            self._scheduled,
            self._private,
            self._registered,
            self._pending,
            self._root,
            self._arriving,
        ) = saved
        del self._blocks[num_blocks:]
        del self._tokens[num_tokens:]
        self._dirty = True
