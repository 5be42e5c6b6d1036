"""What the two memories know of each other's blocks: equal contents, contents to come, tokens that must stay."""

from __future__ import annotations

from collections.abc import Collection

from pagedkern.allocator.undo import UndoLog


class Links:
    """The part of a `BlockPool` that is about the other memory, its peer."""

    __slots__ = ("_undo", "arriving", "incoming", "peer", "seals", "twins")

    def __init__(self, undo: UndoLog) -> None:
        self._undo = undo
        self.peer: Links
        self.twins: dict[int, int] = {}  # owned block: owned block of the peer with the same contents
        self.incoming: dict[int, int] = {}  # owned block: the peer's block whose contents the next step moves into it
        self.arriving: dict[int, int] = {}  # block: number of the plan in flight that moves the peer's contents into it
        self.seals: dict[int, tuple[int, ...]] = {}  # leading tokens of a fenced block that nobody may overwrite

    def retain(self, blocks: Collection[int]) -> None:
        """Add one owner to each block."""
        raise NotImplementedError

    def release(self, blocks: list[int], whole: bool) -> None:
        """Take one owner from each block."""
        raise NotImplementedError

    def part(self, blocks: list[int]) -> None:
        """Blocks that nobody owns any more have no twin, and need no contents."""
        for b in blocks:
            if b in self.twins:
                self.untwin(b)
            if b in self.incoming:
                other = self.incoming[b]
                self._undo.append((self.incoming.__setitem__, (b, other)))
                del self.incoming[b]
                self.peer.release([other], whole=False)

    def expect(self, b: int, other: int) -> None:
        """The next step that uses block b moves the peer's block into it, which has an owner more until then."""
        self.peer.retain([other])
        self._undo.append((self.incoming.pop, (b, None)))
        self.incoming[b] = other

    def receive(self, b: int, other: int) -> None:
        """The move that `expect` announced is part of a plan now, which fences the peer's block."""
        self._undo.append((self.incoming.__setitem__, (b, other)))
        del self.incoming[b]
        self.peer.release([other], whole=False)

    def twin(self, b: int, other: int) -> None:
        """Both blocks are owned and hold the same, unless they have twins already."""
        if b not in self.twins and other not in self.peer.twins:
            self._undo.append((self._drop_twin, (b, other)))
            self._put_twin(b, other)

    def untwin(self, b: int) -> None:
        """The block is given up or about to be written: it has no twin any more."""
        other = self.twins[b]
        self._undo.append((self._put_twin, (b, other)))
        self._drop_twin(b, other)

    def _put_twin(self, b: int, other: int) -> None:
        self.twins[b] = other
        self.peer.twins[other] = b

    def _drop_twin(self, b: int, other: int) -> None:
        self.twins.pop(b, None)
        self.peer.twins.pop(other, None)

    def seal(self, b: int, num_tokens: int) -> None:
        """Nobody may write the first tokens of a fenced block: `abort` or a move in flight needs them."""
        self.seals[b] = (*self.seals.get(b, ()), num_tokens)
        self._undo.append((self._unseal, (b, num_tokens)))

    def unseal(self, b: int, num_tokens: int) -> None:
        """Take back a `seal`."""
        self._unseal(b, num_tokens)
        self._undo.append((self._reseal, (b, num_tokens)))

    def _unseal(self, b: int, num_tokens: int) -> None:
        levels = list(self.seals.pop(b))
        levels.remove(num_tokens)
        if levels:
            self.seals[b] = tuple(levels)

    def _reseal(self, b: int, num_tokens: int) -> None:
        self.seals[b] = (*self.seals.get(b, ()), num_tokens)
