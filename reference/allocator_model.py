"""A naive model of a paged KV cache's bookkeeping: what the block allocator must do, as plainly as it can be said.

Blocks are objects, owners are counted, the prefix cache is a tree that is searched from the root, the least recently
used block is the first of a list. Everything is O(n) and nothing is shared with the allocator that it judges: this
file imports nothing of it. It predicts counts, sharing, copies, cache hits, evictions and refusals exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field


class NoRoom(Exception):
    """Too few free blocks. Nothing has been changed."""


@dataclass(eq=False)
class Node:
    """One exact prefix that ends with a full block. Its block may be gone; then it is found no more, nor what
    follows.
    """

    parent: Node | None = None
    tokens: tuple[int, ...] = ()
    block: Block | None = None
    children: list[Node] = field(default_factory=list)


@dataclass(eq=False)
class Block:
    """The contents of one physical block, from the time it is handed out until somebody else gets it."""

    owners: int = 1
    fences: int = 0
    node: Node | None = None  # the prefix that its contents complete
    level: int = 0

    @property
    def cached(self) -> bool:
        return self.node is not None and self.node.block is self


@dataclass(eq=False)
class Seq:
    """One sequence. Token ids are None where the caller did not tell."""

    tokens: list[int | None]
    blocks: list[Block | None]
    root: Node | None = None  # of the prefix tree under its salt; None: never cached
    cached: int = 0
    present: int = 0
    computed: int = 0
    scheduled: int = 0
    registered: int = 0
    level: int = 0
    live: bool = True
    pending: list[Plan] = field(default_factory=list)


@dataclass(eq=False)
class Row:
    seq: Seq
    start: int
    end: int
    base: int
    num_blocks: int
    replaced: list[tuple[int, Block, Block]] = field(default_factory=list)


@dataclass(eq=False)
class Plan:
    rows: list[Row]
    copies: list[tuple[Block, Block]] = field(default_factory=list)
    held: list[Block] = field(default_factory=list)


class Model:
    """See the module."""

    def __init__(self, num_blocks: int, block_size: int, caching: bool = True, reserve: int = 0) -> None:
        self.num_blocks = num_blocks
        self.size = block_size
        self.caching = caching
        self.reserve = reserve  # blocks that admission leaves free
        self.num_blank = num_blocks
        self.idle: list[Block] = []  # free but cached, least recently used first
        self.roots: dict[object, Node] = {}
        self.num_cached = 0

    # Blocks.

    @property
    def num_free(self) -> int:
        return self.num_blank + len(self.idle)

    def blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self.size - 1) // self.size

    def take(self, count: int) -> list[Block]:
        if count > self.num_free:
            raise NoRoom
        for _ in range(count):
            if self.num_blank:
                self.num_blank -= 1
            else:
                victim = min(self.idle, key=lambda b: b.level)  # the first of the lowest level
                self.idle.remove(victim)
                self.forget(victim)
        return [Block() for _ in range(count)]

    def forget(self, block: Block) -> None:
        """The block is not cached any more."""
        assert block.node is not None
        assert block.node.parent is not None
        block.node.parent.children.remove(block.node)
        block.node.block = None
        block.node = None
        self.num_cached -= 1

    def settle(self, block: Block) -> None:
        """A block lost an owner or a fence: it may be free now."""
        if block.owners == 0 and block.fences == 0:
            if block.cached:
                self.idle.append(block)
            else:
                self.num_blank += 1

    def release(self, blocks: list[Block | None], level: int = 0) -> None:
        """Tails before heads."""
        for block in reversed(blocks):
            if block is not None:
                block.owners -= 1
                if block.owners == 0:
                    block.level = level
                self.settle(block)

    def retain(self, block: Block) -> None:
        if block in self.idle:
            self.idle.remove(block)
        block.owners += 1

    def give_up(self, seq: Seq, blocks: list[Block | None]) -> None:
        for plan in seq.pending:
            for block in reversed(blocks):
                if block is not None:
                    block.fences += 1
                    plan.held.append(block)
        self.release(blocks, seq.level)

    def land(self, plan: Plan) -> None:
        for block in plan.held:
            block.fences -= 1
            self.settle(block)

    # Prefix cache.

    def match(self, tokens: list[int], salt: object) -> list[Block]:
        node = self.roots.get(salt)
        hits: list[Block] = []
        for i in range(0, len(tokens) - self.size + 1, self.size):
            wanted = tuple(tokens[i : i + self.size])
            node = next((c for c in node.children if c.tokens == wanted), None) if node else None
            if node is None:
                break
            assert node.block is not None
            hits.append(node.block)
        return hits

    def enter(self, seq: Seq) -> None:
        """Cache what has been computed."""
        while seq.root is not None and (seq.registered + 1) * self.size <= seq.computed:
            i = seq.registered
            tokens = seq.tokens[i * self.size : (i + 1) * self.size]
            if None in seq.tokens[: (i + 1) * self.size]:
                return
            block, before = seq.blocks[i], seq.blocks[i - 1] if i else None
            if block is None or (i and before is None):
                seq.root = None
                return
            parent = before.node if before is not None else seq.root
            assert parent is not None
            twin = next((c for c in parent.children if c.tokens == tuple(tokens)), None)
            if twin is None:
                twin = Node(parent, tuple(tokens), block)  # type: ignore[arg-type]
                parent.children.append(twin)
                self.num_cached += 1
            block.node = twin
            seq.registered += 1

    # Operations.

    def verdict(self, tokens: list[int] | int, salt: object = None) -> str:
        count = tokens if isinstance(tokens, int) else len(tokens)
        hits = self.match(tokens, salt) if self.caching and not isinstance(tokens, int) else []
        if self.blocks_for(count) > self.num_blocks - self.reserve:
            return "never"
        free = self.num_free - sum(b in self.idle for b in hits)
        return "ok" if self.blocks_for(count) - len(hits) + self.reserve <= free else "later"

    def create(self, tokens: list[int] | int, salt: object = None, level: int = 0) -> Seq:
        shares = self.caching and not isinstance(tokens, int)
        ids: list[int | None] = [None] * tokens if isinstance(tokens, int) else list(tokens)
        hits = self.match(tokens, salt) if shares else []  # type: ignore[arg-type]
        missing = self.blocks_for(len(ids)) - len(hits)
        if missing > self.num_free - sum(b in self.idle for b in hits):
            raise NoRoom
        for block in hits:
            self.retain(block)
        seq = Seq(ids, [*hits, *self.take(missing)], level=level)
        if shares:
            seq.root = self.roots.setdefault(salt, Node())
        seq.present = len(hits) * self.size
        seq.cached = seq.computed = seq.scheduled = max(0, min(seq.present, len(ids) - 1))
        seq.registered = len(hits)
        return seq

    def step(self, seqs: list[Seq], ends: list[int], lookahead: int = 0) -> Plan:
        """The step that computes each sequence up to `ends`; tokens beyond its length are new and must be set after."""
        rows = [Row(s, s.scheduled, e, len(s.tokens), len(s.blocks)) for s, e in zip(seqs, ends, strict=True)]
        writes: list[tuple[Row, int]] = []
        lost: dict[Block, int] = {}
        rewritten: list[Block] = []
        grown = 0
        for row in rows:
            grown += max(0, self.blocks_for(row.end + lookahead) - len(row.seq.blocks))
            start = max(row.start, row.seq.present)
            for i in range(start // self.size, min(self.blocks_for(row.end), len(row.seq.blocks))):
                block = row.seq.blocks[i]
                assert block is not None
                if block.owners - lost.get(block, 0) > 1:
                    lost[block] = lost.get(block, 0) + 1
                    writes.append((row, i))
                elif block.cached:
                    rewritten.append(block)
        fresh = self.take(len(writes) + grown)
        plan = Plan(rows)
        for block in rewritten:
            self.forget(block)
        for row, i in writes:
            old, new = row.seq.blocks[i], fresh.pop(0)
            assert old is not None
            row.seq.blocks[i] = new
            row.replaced.append((i, old, new))
            old.fences += 1
            plan.held.append(old)
            self.release([old], row.seq.level)
            if i * self.size < max(row.start, row.seq.present):
                plan.copies.append((old, new))
        for row in rows:
            while len(row.seq.blocks) < self.blocks_for(row.end + lookahead):
                row.seq.blocks.append(fresh.pop(0))
            row.seq.scheduled = row.end
            row.seq.pending.append(plan)
        return plan

    def append(self, seqs: list[Seq], tokens: list[list[int | None]], lookahead: int = 0) -> Plan:
        plan = self.step(seqs, [len(s.tokens) + len(t) for s, t in zip(seqs, tokens, strict=True)], lookahead)
        for seq, new in zip(seqs, tokens, strict=True):
            seq.tokens += new
        return plan

    def prefill(self, seqs: list[Seq], budget: int | None = None) -> Plan:
        ends = []
        for seq in seqs:
            left = len(seq.tokens) - seq.scheduled
            if budget is not None:
                left = min(left, budget)
                budget -= left
            if left:
                ends.append(seq.scheduled + left)
        return self.step(seqs[: len(ends)], ends)

    def fork(self, seq: Seq) -> Seq:
        blocks = seq.blocks[: self.blocks_for(len(seq.tokens))]
        for block in blocks:
            if block is not None:
                self.retain(block)
        twin = Seq(
            list(seq.tokens),
            blocks,
            seq.root,
            seq.cached,
            seq.present,
            seq.computed,
            seq.scheduled,
            seq.registered,
            seq.level,
            True,
            list(seq.pending),
        )
        for plan in seq.pending:
            row = next(r for r in plan.rows if r.seq is seq)
            plan.rows.append(Row(twin, row.start, row.end, row.base, row.num_blocks, list(row.replaced)))
        return twin

    def truncate(self, seq: Seq, length: int) -> None:
        kept = self.blocks_for(length)
        self.give_up(seq, seq.blocks[kept:])
        del seq.blocks[kept:]
        self.cut(seq, length)
        for plan in seq.pending:
            for row in plan.rows:
                if row.seq is seq:
                    row.start, row.end, row.base = (min(x, length) for x in (row.start, row.end, row.base))

    def cut(self, seq: Seq, length: int) -> None:
        del seq.tokens[length:]
        seq.cached, seq.present = min(seq.cached, length), min(seq.present, length)
        seq.computed, seq.scheduled = min(seq.computed, length), min(seq.scheduled, length)
        seq.registered = min(seq.registered, length // self.size)

    def free(self, seq: Seq) -> None:
        self.give_up(seq, seq.blocks)
        seq.live = False

    def commit(self, plan: Plan) -> None:
        for row in plan.rows:
            if row.seq.live:
                assert row.seq.pending.pop(0) is plan
                row.seq.computed = max(row.seq.computed, row.end)
                self.enter(row.seq)
        self.land(plan)

    def abort(self, plan: Plan) -> None:
        for row in plan.rows:
            seq = row.seq
            if not seq.live:
                continue
            assert seq.pending.pop() is plan
            surplus = seq.blocks[row.num_blocks :]
            del seq.blocks[row.num_blocks :]
            for i, old, new in row.replaced:
                if i < len(seq.blocks) and seq.blocks[i] is new:
                    seq.blocks[i] = old
                    self.retain(old)
                    surplus.append(new)
            seq.scheduled = min(seq.scheduled, row.start)
            del seq.tokens[row.base :]
            self.release(surplus, seq.level)
        self.land(plan)
