"""Where prefixes begin: a node for each salt, the same in both memories."""

from __future__ import annotations

from pagedkern.allocator.arguments import Salt
from pagedkern.allocator.undo import UndoLog


class Nodes:
    """Hands out numbers of nodes, none of them twice."""

    __slots__ = ("next",)

    def __init__(self, first: int = 1) -> None:
        self.next = first

    def take(self, count: int = 1) -> int:
        """The first of so many consecutive numbers."""
        first = self.next
        self.next += count
        return first


class Roots:
    """The node of the empty prefix under each salt: tenants with different salts share nothing."""

    __slots__ = ("_least", "_nodes", "_number", "_salts", "_undo", "limit")

    def __init__(self, number: Nodes, undo: UndoLog, least: int) -> None:
        self._nodes: dict[Salt | tuple[bytes], int] = {}  # under (salt,) if that is bytes: never compared with a str
        self._salts: dict[int, Salt] = {}
        self._number = number
        self._undo = undo
        self._least = self.limit = least  # so many salts before those that nobody uses are forgotten

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: int) -> bool:
        """Whether a node stands for the empty prefix under a salt."""
        return node in self._salts

    def peek(self, salt: Salt) -> int:
        """The node of a salt, 0 if it has none: nothing is cached under it then."""
        return self._nodes.get((salt,) if type(salt) is bytes else salt, 0)

    def add(self, salt: Salt) -> int:
        """The node of a salt that has none yet."""
        node = self._number.take()
        self._undo.append((self._drop, (node, salt)))
        self._nodes[(salt,) if type(salt) is bytes else salt] = node
        self._salts[node] = salt
        return node

    def _drop(self, node: int, salt: Salt) -> None:
        self._nodes.pop((salt,) if type(salt) is bytes else salt, None)
        self._salts.pop(node, None)

    def keep(self, used: set[int]) -> None:
        """Forget all salts but those of these nodes. O(salts)."""
        self._undo.append((self._put, (self._nodes, self._salts, self.limit)))
        self._salts = {node: salt for node, salt in self._salts.items() if node in used}
        self._nodes = {salt: node for salt, node in self._nodes.items() if node in used}
        self.limit = max(self._least, 2 * len(self._nodes))

    def _put(self, nodes: dict[Salt | tuple[bytes], int], salts: dict[int, Salt], limit: int) -> None:
        self._nodes, self._salts, self.limit = nodes, salts, limit

    def salt_of(self, node: int) -> Salt:
        """The salt of a node that is in here."""
        return self._salts[node]

    def items(self) -> list[tuple[Salt, int]]:
        """Each salt with its node."""
        return [(salt, node) for node, salt in self._salts.items()]

    def put(self, salts: list[tuple[Salt, int]]) -> None:
        """Fill in a snapshot's salts."""
        for salt, node in salts:
            self._nodes[(salt,) if type(salt) is bytes else salt] = node
            self._salts[node] = salt
        self.limit = max(self._least, 2 * len(self._nodes))
