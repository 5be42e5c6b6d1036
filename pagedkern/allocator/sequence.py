"""The handle of one sequence: its tokens, its blocks, and how far they have been computed."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from pagedkern.allocator.arguments import Salt
from pagedkern.allocator.retention import Lease, Retention
from pagedkern.allocator.spans import Span

if TYPE_CHECKING:
    from pagedkern.allocator.cohort import Cohort
    from pagedkern.allocator.step import Plan


class State(enum.Enum):
    """Where a sequence's blocks are."""

    LIVE = "live"  # on the device
    SWAPPED = "swapped out"  # in host memory
    FREED = "freed"


LIVE = State.LIVE  # looking into an enum takes longer


class Sequence:
    """A sequence of an allocator. Made by `create` and `fork`, of use until `free`; all attributes are read-only.

    The positions of its tokens are cut into three parts: `[0, num_computed_tokens)` have their K and V in the cache,
    those up to the end of the last step in flight will have once it has run, the others are still to be computed by
    `prefill`.
    """

    __slots__ = (
        "__weakref__",
        "_apart",
        "_arriving",
        "_asked",
        "_blocks",
        "_cached",
        "_cohort",
        "_computed",
        "_dear",
        "_dirty",
        "_found",
        "_keys",
        "_leases",
        "_length",
        "_owner",
        "_passed",
        "_pending",
        "_present",
        "_priority",
        "_private",
        "_question",
        "_registered",
        "_retention",
        "_root",
        "_row",
        "_salt",
        "_scheduled",
        "_state",
        "_tokens",
        "_whole",
        "id",
    )

    def __init__(
        self,
        owner: object,
        ident: int,
        blocks: list[int],
        tokens: array[int],
        length: int,
        root: int = 0,
        salt: Salt = None,
        asked: int = 0,
    ) -> None:
        self.id = ident  # unique in its allocator, never used again
        self._owner = owner
        self._state = LIVE
        self._blocks = blocks  # -1 where a block behind the window was given back
        self._tokens = tokens  # int64; the ids that are known, a prefix of the sequence
        self._length = length
        self._cached = 0  # tokens that need no computing because the prefix cache had them
        self._present = 0  # tokens that the prefix cache had, one more if it had all of them
        self._computed = 0
        self._scheduled = 0  # computed, or computed by a step in flight
        self._private = 0  # from this block on, blocks have no other owner and are not cached; before, look
        self._registered = 0  # leading full blocks that the prefix cache has been told of
        self._root = root  # node of the empty prefix under the salt; 0: nothing of this sequence is cached
        self._salt = salt
        self._priority = 0
        self._keys: tuple[Span, ...] = ()  # what tokens of the prompt stand for beside their ids
        self._retention: tuple[Retention, ...] = ()
        self._leases: tuple[Lease | None, ...] = ()  # of each retention that is for some time only
        self._dear = False  # it has a priority or retention: its cached blocks have levels
        self._passed = 0  # leading blocks that were given back behind the window
        self._whole = True  # each registered block that it still has is cached itself, not another one in its place
        # Not whole, or with passed blocks, blocks to come, a priority, retention or keys: needs a closer look.
        self._apart = False
        self._asked = asked  # tokens that `create` has counted, until a step of this sequence is committed
        self._found = 0  # those of them that the prefix cache had
        self._question = 0  # shared with forks made since; see counts.py
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

    @property
    def _owns_all(self) -> bool:
        """Whether all that is before a cached block of this sequence is its own, too."""
        return self._whole and not self._passed and not self._arriving and self._root != 0

    def _sync(self) -> None:
        """Take over what happened to this sequence in its cohort, and leave the cohort. O(1) in the number of steps."""
        cohort = self._cohort
        if cohort is not None:
            cohort.settle(self, self._row)
            self._cohort = None

    _saved: Callable[[], tuple[Any, ...]]
    """What `_restore` needs to undo changes made from now on.

    `_blocks` and `_tokens` may grow in place afterwards; any other change to them must be made to a copy.
    """

    def _restore(self, blocks: list[int], num_blocks: int, tokens: array[int], num_tokens: int, *values: Any) -> None:
        self._blocks, self._tokens = blocks, tokens
        for name, value in zip(UNDONE, values, strict=True):
            setattr(self, name, value)
        del blocks[num_blocks:]
        del tokens[num_tokens:]
        self._dirty = True

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled handle tells what the sequence was, and belongs to no allocator."""
        blocks = array("q", self._blocks)
        return _copied, (self.id, self._state, blocks, self.num_tokens, self.num_computed_tokens, self._cached)


def _copied(ident: int, state: State, blocks: array[int], length: int, computed: int, cached: int) -> Sequence:
    """The handle that a pickle gives."""
    seq = Sequence(None, ident, blocks.tolist(), array("q"), length)
    seq._state, seq._computed, seq._scheduled, seq._cached = state, computed, computed, cached
    return seq


class _Use(NamedTuple):
    """What happens to one field of a sequence, beside `_blocks` and `_tokens`."""

    undone: bool = True  # it may change, and the undo log puts it back
    forked: bool = True  # forks inherit it
    stored: bool = True  # snapshots have it as a number


_FIELDS = {
    "_state": _Use(forked=False, stored=False),
    "_length": _Use(forked=False),
    "_cached": _Use(),
    "_present": _Use(),
    "_computed": _Use(),
    "_scheduled": _Use(),
    "_private": _Use(forked=False),
    "_registered": _Use(),
    "_root": _Use(),
    "_passed": _Use(),
    "_whole": _Use(stored=False),
    "_apart": _Use(stored=False),
    "_arriving": _Use(stored=False),
    "_pending": _Use(forked=False, stored=False),
    "_asked": _Use(),
    "_found": _Use(),
    "_question": _Use(),
    "_salt": _Use(undone=False, stored=False),
    "_priority": _Use(undone=False),
    "_keys": _Use(stored=False),
    "_retention": _Use(undone=False, stored=False),
    "_dear": _Use(undone=False, stored=False),
}
UNDONE, INHERITED, STORED = (tuple(n for n, use in _FIELDS.items() if use[i]) for i in range(3))
_SAVED = ("_blocks", "_blocks.__len__()", "_tokens", "_tokens.__len__()", *UNDONE)
# As if it were written out: `operator.attrgetter` takes three times as long, and every operation saves its sequences.
Sequence._saved = eval(f"lambda self: ({', '.join(f'self.{name}' for name in _SAVED)})")
