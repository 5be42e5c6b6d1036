"""A naive model of a paged KV cache's bookkeeping: what the block allocator must do, as plainly as it can be said.

Blocks are objects, owners are counted, the prefix cache is a tree that is searched from the root, the least recently
used block is the first of a list. Everything is O(n) and nothing is shared with the allocator that it judges: this
file imports nothing of it. It predicts counts, sharing, copies, cache hits, evictions and refusals exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace


class NoRoom(Exception):
    """Too few free blocks. Nothing has been changed."""


@dataclass(eq=False)
class Node:
    """One exact prefix that ends with a full block; without a parent, the empty prefix under a salt."""

    parent: Node | None = None
    tokens: tuple[int, ...] = ()
    blocks: dict[str, Block] = field(default_factory=dict)  # by memory: "device", "host"
    children: list[Node] = field(default_factory=list)

    @property
    def reached(self) -> bool:
        """Whether it can be found: what loses its last block takes with it all that is behind it."""
        return self.parent is None or bool(self.blocks)

    def before(self) -> list[Node]:
        """The prefixes that end before it, nearest first, but for the empty one."""
        node, nodes = self.parent, []
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes


@dataclass(eq=False)
class Block:
    """The contents of one physical block, from the time it is handed out until somebody else gets it."""

    pool: Pool
    owners: int = 1
    fences: int = 0
    seals: list[int] = field(default_factory=list)  # leading tokens that must stay
    node: Node | None = None  # the prefix that its contents complete
    level: int = 0
    twin: Block | None = None  # in the other memory, with the same contents
    incoming: Block | None = None  # the host's block that the next step moves here
    arriving: Plan | None = None  # the plan in flight that moves the contents here

    @property
    def cached(self) -> bool:
        return self.node is not None and self.node.blocks.get(self.pool.name) is self

    @property
    def idle(self) -> bool:
        return self in self.pool.idle

    @property
    def reached(self) -> bool:
        return self.node is not None and self.node.reached

    def forget(self) -> None:
        """It is not cached any more, nor is what cannot be found without it."""
        if self.cached:
            assert self.node is not None
            assert self.node.parent is not None
            node = self.node
            self.leave()
            if not node.blocks:
                node.parent.children.remove(node)
                forget_behind(node)
        self.node = None

    def leave(self) -> None:
        """It alone is not cached any more."""
        assert self.node is not None
        del self.node.blocks[self.pool.name]
        self.pool.cached.remove(self)
        self.level = 0
        if self.idle:
            self.pool.idle.remove(self)
            self.pool.num_blank += 1

    def untwin(self) -> None:
        if self.twin is not None:
            self.twin.twin = None
            self.twin = None

    def use(self) -> None:
        """It is used, and with it what is before it: in its own memory, and in the other one from the nearest block
        on that is only there.
        """
        assert self.node is not None
        memories = {self.pool.name}
        for node in self.node.before():
            memories |= node.blocks.keys() if self.pool.name not in node.blocks else set()
            for block in [b for memory, b in node.blocks.items() if memory in memories and b.idle]:
                block.pool.idle.remove(block)
                block.pool.idle.append(block)

    def lift(self, level: int) -> None:
        """It has this level at least, and so has what is before it."""
        assert self.node is not None
        before = [b for n in self.node.before() for _, b in sorted(n.blocks.items(), key=self.own_first)]
        moved: dict[str, Block] = {}
        for block in [self, *before]:
            if block.level < level:
                block.level = level
                if block.idle:
                    block.pool.idle.remove(block)
                    block.pool.idle.append(block)
                    moved.setdefault(block.pool.name, block)
        for block in moved.values():
            block.use()

    def own_first(self, item: tuple[str, Block]) -> bool:
        return item[0] != self.pool.name


def forget_behind(node: Node) -> None:
    """Nothing behind a node is cached any more."""
    for child in node.children:
        forget_behind(child)
        for block in list(child.blocks.values()):
            block.leave()
    node.children.clear()


class Pool:
    """One memory: so many blank blocks, and the free ones that are cached, least recently used first."""

    def __init__(self, name: str, num_blocks: int) -> None:
        self.name = name
        self.num_blank = num_blocks
        self.num_evicted = 0
        self.cached: list[Block] = []
        self.idle: list[Block] = []

    @property
    def num_free(self) -> int:
        return self.num_blank + len(self.idle)

    def num_idle_of(self, blocks: list[Block]) -> int:
        return sum(b.idle for b in blocks)

    def order(self) -> list[Block]:
        """The idle blocks in the order of eviction: the least recently used of the lowest level first."""
        return sorted(self.idle, key=lambda b: b.level)

    def take(self, count: int) -> list[Block]:
        if count > self.num_free:
            raise NoRoom
        for _ in range(count):
            if self.num_blank:
                self.num_blank -= 1
            else:
                victim = self.order()[0]
                self.idle.remove(victim)
                self.num_evicted += 1
                victim.forget()
        return [Block(self) for _ in range(count)]

    def settle(self, block: Block) -> None:
        """A block lost an owner or a fence: it may be free now."""
        if block.owners == 0 and block.fences == 0:
            if block.cached:
                self.idle.append(block)
                block.use()
            else:
                self.num_blank += 1

    def retain(self, block: Block) -> None:
        if block in self.idle:
            self.idle.remove(block)
        block.owners += 1


def release(blocks: list[Block | None], level: int = 0) -> None:
    """One owner of this level less, tails before heads."""
    owned = [b for b in reversed(blocks) if b is not None]
    for block in [b for b in owned if b.cached][:1]:
        block.lift(level)
    for block in owned:
        block.owners -= 1
        block.pool.settle(block)
        if block.cached:
            block.use()
    for block in owned:
        if block.owners == 0:
            block.untwin()
            if block.incoming is not None:
                expected, block.incoming = block.incoming, None
                release([expected])


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
    state: str = "live"
    arriving: bool = False
    pending: list[Plan] = field(default_factory=list)

    @property
    def exists(self) -> bool:
        return self.state != "freed"


@dataclass(eq=False)
class Row:
    """What a plan does for one sequence."""

    seq: Seq
    start: int = 0
    end: int = 0
    base: int = 0
    num_blocks: int = 0
    replaced: list[tuple[int, Block, Block]] = field(default_factory=list)
    before: tuple[str, list[Block | None]] | None = None  # of a swap
    moved: list[Block | None] | None = None  # of a swap: the table that it gave the sequence
    rides: bool = False  # only waits for it


@dataclass(eq=False)
class Plan:
    number: int
    rows: list[Row] = field(default_factory=list)
    moves: list[tuple[str, Block, Block]] = field(default_factory=list)
    held: list[Block] = field(default_factory=list)
    seals: list[tuple[Block, int]] = field(default_factory=list)
    arrivals: list[tuple[Block, Block]] = field(default_factory=list)
    brings: bool = False


class Model:
    """See the module."""

    def __init__(
        self, num_blocks: int, block_size: int, caching: bool = True, reserve: int = 0, num_host_blocks: int = 0
    ) -> None:
        self.num_blocks = num_blocks
        self.size = block_size
        self.caching = caching
        self.reserve = reserve  # blocks that admission leaves free
        self.device, self.host = Pool("device", num_blocks), Pool("host", num_host_blocks)
        self.roots: dict[object, Node] = {}
        self.seqs: list[Seq] = []
        self.num_plans = 0
        self.in_flight: list[Plan] = []

    def blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self.size - 1) // self.size

    # Prefix cache.

    def match(self, tokens: list[int], salt: object) -> list[Block]:
        node = self.roots.get(salt)
        hits: list[Block] = []
        for i in range(0, len(tokens) - self.size + 1, self.size):
            wanted = tuple(tokens[i : i + self.size])
            node = next((c for c in node.children if c.tokens == wanted), None) if node else None
            if node is None:
                break
            hits.append(node.blocks.get("device") or node.blocks["host"])
        return hits

    def full(self, seq: Seq) -> int:
        """How many leading blocks are full of tokens that are known and computed."""
        known = next((i for i, t in enumerate(seq.tokens) if t is None), len(seq.tokens))
        return min(seq.computed, known) // self.size

    def cache(self, seq: Seq) -> None:
        if self.full(seq) > seq.registered and not seq.arriving:
            self.enter(seq, self.full(seq))

    def enter(self, seq: Seq, full: int) -> None:
        """Cache blocks up to a number: from the last that can be found, or from the first."""
        if seq.root is None:
            return
        start = seq.registered
        last = seq.blocks[start - 1] if start else None
        if last is None or not last.reached:
            start, last = 0, None
            if seq.blocks[0] is None:
                seq.root = None
                return
        self.insert(seq, last.node if last is not None else seq.root, start, full)
        seq.registered = full
        self.use(seq)

    def enter_on_host(self, seq: Seq) -> None:
        if self.full(seq) and seq.root is not None and seq.blocks[0] is not None:
            self.insert(seq, seq.root, 0, self.full(seq))
            self.use(seq)

    def insert(self, seq: Seq, parent: Node | None, start: int, full: int) -> None:
        shared = []
        for i in range(start, full):
            block, tokens = seq.blocks[i], tuple(seq.tokens[i * self.size : (i + 1) * self.size])
            assert block is not None
            assert parent is not None
            if not block.cached:
                node = next((c for c in parent.children if c.tokens == tokens), None)
                if node is None:
                    node = Node(parent, tokens)  # type: ignore[arg-type]
                    parent.children.append(node)
                block.node = node
                if block.pool.name not in node.blocks:
                    if node.blocks:
                        shared.append(block)
                    node.blocks[block.pool.name] = block
                    block.pool.cached.append(block)
            parent = block.node
        for block in shared:  # another memory had it: it is as dear as what is behind it
            assert block.node is not None
            block.lift(max((b.level for n in block.node.children for b in n.blocks.values()), default=0))

    def enter_again(self, seq: Seq) -> None:
        """Before it is freed: if the blocks that it was cached with have gone, its own take their place."""
        if seq.root is None or seq.arriving or not seq.blocks or seq.blocks[0] is None:
            return
        if seq.state == "live":
            last = seq.blocks[seq.registered - 1] if seq.registered else None
            if last is not None and not last.reached:
                self.enter(seq, seq.registered)
        elif self.full(seq) and not seq.pending:
            last = seq.blocks[self.full(seq) - 1]
            assert last is not None
            if not last.reached:
                self.enter_on_host(seq)

    def use(self, seq: Seq) -> None:
        """It has got blocks, or more of it is cached."""
        for block in [b for b in reversed(seq.blocks) if b is not None and b.cached][:1]:
            block.lift(seq.level)
            block.use()

    # Operations.

    def verdict(self, tokens: list[int] | int, salt: object = None) -> str:
        count = tokens if isinstance(tokens, int) else len(tokens)
        hits = self.match(tokens, salt) if self.caching and not isinstance(tokens, int) else []
        here = [b for b in hits if b.pool is self.device]
        if self.blocks_for(count) > self.num_blocks - self.reserve:
            return "never"
        free = self.device.num_free - self.device.num_idle_of(here)
        return "ok" if self.blocks_for(count) - len(here) + self.reserve <= free else "later"

    def create(self, tokens: list[int] | int, salt: object = None, level: int = 0) -> Seq:
        shares = self.caching and not isinstance(tokens, int)
        ids: list[int | None] = [None] * tokens if isinstance(tokens, int) else list(tokens)
        hits = self.match(tokens, salt) if shares else []  # type: ignore[arg-type]
        here = [b for b in hits if b.pool is self.device]
        missing = self.blocks_for(len(ids)) - len(here)
        if missing > self.device.num_free - self.device.num_idle_of(here):
            raise NoRoom
        for block in here:
            self.device.retain(block)
        fresh = self.device.take(missing)
        blocks: list[Block | None] = []
        for block in hits:
            if block.pool is self.host:
                self.host.retain(block)
                blocks.append(fresh.pop(0))
                blocks[-1].incoming = block  # type: ignore[union-attr]
            else:
                blocks.append(block)
        seq = Seq(ids, [*blocks, *fresh], level=level)
        if shares:
            seq.root = self.roots.setdefault(salt, Node())
        seq.present = len(hits) * self.size
        seq.cached = seq.computed = seq.scheduled = max(0, min(seq.present, len(ids) - 1))
        seq.registered = next((i for i, b in enumerate(hits) if b.pool is self.host), len(hits))
        seq.arriving = len(here) < len(hits)
        self.seqs.append(seq)
        for block in [b for b in reversed(hits) if b.pool is self.host][:1]:
            block.use()
        self.use(seq)
        return seq

    def step(self, seqs: list[Seq], ends: list[int], growing: int, lookahead: int) -> Plan:
        """The step that computes each sequence up to `ends`; tokens beyond its length are new and must be set after.

        The first `growing` get blocks for `lookahead` tokens more.
        """
        reach = {s: e + lookahead * (i < growing) for i, (s, e) in enumerate(zip(seqs, ends, strict=True))}
        rows = [Row(s, s.scheduled, e, len(s.tokens), len(s.blocks)) for s, e in zip(seqs, ends, strict=True)]
        writes: list[tuple[Row, int, int]] = []
        lost: dict[Block, list[int]] = {}
        rewritten: list[Block] = []
        grown = 0
        for row in rows:
            grown += max(0, self.blocks_for(reach[row.seq]) - len(row.seq.blocks))
            start = max(row.start, row.seq.present)
            for i in range(start // self.size, min(self.blocks_for(row.end), len(row.seq.blocks))):
                block, kept = row.seq.blocks[i], max(0, start - i * self.size)
                assert block is not None
                left = lost.get(block, [])
                if block.owners - len(left) > 1 or any(kept < n for n in left + block.seals):
                    lost.setdefault(block, []).append(kept)
                    writes.append((row, i, kept))
                else:
                    rewritten.append(block)
        fresh = self.device.take(len(writes) + grown)
        plan = self.plan()
        plan.rows = rows
        self.move_in(plan, seqs)
        for block in reversed(rewritten):
            block.forget()
            block.untwin()
        for row, i, kept in writes:
            old, new = row.seq.blocks[i], fresh.pop(0)
            assert old is not None
            row.seq.blocks[i] = new
            row.replaced.append((i, old, new))
            for other in (*row.seq.pending, plan):
                self.fence(other, [old])
            release([old], row.seq.level)
            if kept:
                self.seal(plan, old, kept)
                plan.moves.append(("copy", old, new))
        for row in [r for r in rows if not r.rides]:
            while len(row.seq.blocks) < self.blocks_for(reach[row.seq]):
                row.seq.blocks.append(fresh.pop(0))
            row.seq.scheduled = row.end
            row.seq.pending.append(plan)
        return plan

    def move_in(self, plan: Plan, seqs: list[Seq]) -> None:
        """Prefixes that were found on the host."""
        wanted: list[Block] = []
        for block in (b for s in seqs for b in s.blocks):
            if block is not None and block.incoming is not None and block not in wanted:
                wanted.append(block)
        if not wanted:
            return
        plan.brings = True
        plan.arrivals = [(b, b.incoming) for b in wanted if b.incoming is not None]
        self.fence(plan, [h for _, h in plan.arrivals])
        for b, h in plan.arrivals:
            b.incoming = None
            release([h])
            plan.moves.append(("swap_in", h, b))
        for seq in self.seqs:
            if seq.exists and seq not in seqs and any(b in wanted for b in seq.blocks):
                self.ride(plan, seq)

    def plan(self) -> Plan:
        self.num_plans += 1
        self.in_flight.append(Plan(self.num_plans))
        return self.in_flight[-1]

    def ride(self, plan: Plan, seq: Seq, row: Row | None = None) -> None:
        if plan not in seq.pending:
            plan.rows.append(row or Row(seq, rides=True))
            seq.pending = sorted([*seq.pending, plan], key=lambda p: p.number)

    def fence(self, plan: Plan, blocks: list[Block]) -> None:
        for block in blocks:
            block.fences += 1
            plan.held.append(block)

    def seal(self, plan: Plan, block: Block, num_tokens: int) -> None:
        block.seals.append(num_tokens)
        plan.seals.append((block, num_tokens))

    def give_up(self, seq: Seq, blocks: list[Block | None], *plans: Plan) -> None:
        for plan in (*seq.pending, *plans):
            self.fence(plan, [b for b in reversed(blocks) if b is not None])
        release(blocks, seq.level)

    def land(self, plan: Plan) -> None:
        self.in_flight.remove(plan)
        for block, num_tokens in plan.seals:
            block.seals.remove(num_tokens)
        for pool in (self.device, self.host):
            for block in plan.held:
                if block.pool is pool:
                    block.fences -= 1
                    pool.settle(block)
        for kind, _, block in plan.moves:
            if kind != "copy":
                block.arriving = None

    def append(self, seqs: list[Seq], tokens: list[list[int | None]], lookahead: int = 0) -> Plan:
        return self.mixed(seqs, tokens, [], lookahead=lookahead)

    def prefill(self, seqs: list[Seq], budget: int | None = None) -> Plan:
        return self.mixed([], [], seqs, budget)

    def mixed(
        self,
        growing: list[Seq],
        tokens: list[list[int | None]],
        prompts: list[Seq],
        budget: int | None = None,
        lookahead: int = 0,
    ) -> Plan:
        """Sequences that grow by tokens, then prompts as far as the budget of tokens goes."""
        ends = [len(s.tokens) + len(t) for s, t in zip(growing, tokens, strict=True)]
        left = None if budget is None else budget - sum(map(len, tokens))
        for seq in prompts:
            count = len(seq.tokens) - seq.scheduled
            if left is not None:
                count = min(count, left)
                left -= count
            if count:
                ends.append(seq.scheduled + count)
        plan = self.step([*growing, *prompts][: len(ends)], ends, len(growing), lookahead)
        for seq, new in zip(growing, tokens, strict=True):
            seq.tokens += new
        return plan

    def fork(self, seq: Seq) -> Seq:
        blocks = seq.blocks[: self.blocks_for(len(seq.tokens))]
        for block in blocks:
            if block is not None:
                block.pool.retain(block)
        twin = replace(seq, tokens=list(seq.tokens), blocks=blocks, pending=[])
        for plan in seq.pending:
            row = next(r for r in plan.rows if r.seq is seq)
            self.ride(plan, twin, replace(row, seq=twin, replaced=list(row.replaced)))
        self.use(twin)
        self.seqs.append(twin)
        return twin

    def truncate(self, seq: Seq, length: int) -> None:
        kept = self.blocks_for(length)
        self.give_up(seq, seq.blocks[kept:])
        del seq.blocks[kept:]
        del seq.tokens[length:]
        seq.cached, seq.present = min(seq.cached, length), min(seq.present, length)
        seq.computed, seq.scheduled = min(seq.computed, length), min(seq.scheduled, length)
        seq.registered = min(seq.registered, length // self.size)
        for plan in seq.pending:
            for row in plan.rows:
                if row.seq is seq:
                    row.start, row.end, row.base = (min(x, length) for x in (row.start, row.end, row.base))

    def free(self, seq: Seq) -> None:
        self.enter_again(seq)
        self.give_up(seq, seq.blocks)
        seq.state = "freed"
        self.seqs.remove(seq)

    def release_window(self, seq: Seq, first_needed: int) -> None:
        count = first_needed // self.size
        behind = seq.blocks[:count]
        if any(b is not None for b in behind):
            self.give_up(seq, behind)
            seq.blocks[:count] = [None] * count

    def pin(self, seq: Seq) -> Seq:
        twin = self.fork(seq)
        self.truncate(twin, twin.registered * self.size)
        full = twin.registered
        if full and twin.root is not None and twin.blocks[0] is not None and not twin.arriving:
            twin.registered = 0
            self.enter(twin, full)  # so that each block is cached, or another one in its place
            for i, block in enumerate(twin.blocks):
                assert block is not None
                assert block.node is not None
                cached = block.node.blocks["device"]
                if cached is not block:
                    self.device.retain(cached)
                    release([block], twin.level)
                    twin.blocks[i] = cached
            self.use(twin)
        return twin

    def clear_cache(self, *salts: object) -> None:
        """Forget what is under these salts; without any, all."""
        for salt in salts or list(self.roots):
            root = self.roots.pop(salt, None)
            if root is not None:
                forget_behind(root)
                for seq in self.seqs:
                    if seq.root is root:
                        seq.root = None

    def swap_out(self, seqs: list[Seq]) -> Plan:
        tables = [s.blocks[: self.blocks_for(s.scheduled)] for s in seqs]
        plan, places = self.swap(self.device, self.host, "swap_out", seqs, tables, 0)
        for seq, table in zip(seqs, tables, strict=True):
            for i, block in enumerate(table):
                if block is not None:
                    self.seal(plan, block, min(self.size, seq.scheduled - i * self.size))
                    if block.incoming is not None and (block, block.incoming) not in plan.arrivals:
                        plan.arrivals.append((block, block.incoming))
            self.change_place(plan, seq, [places[b] if b else None for b in table], "swapped out")
            seq.arriving = False
            seq.present = min(seq.present, seq.scheduled)
            seq.registered = min(seq.registered, seq.scheduled // self.size)
        for block, place in places.items():
            if block.owners and block.incoming is None:
                self.pair(block, place)
        return plan

    def swap_in(self, seqs: list[Seq]) -> Plan:
        tables = [list(s.blocks) for s in seqs]
        rest = [self.blocks_for(len(s.tokens)) - len(s.blocks) for s in seqs]
        plan, places = self.swap(self.host, self.device, "swap_in", seqs, tables, sum(rest))
        plan.brings = True
        for seq, table, count in zip(seqs, tables, rest, strict=True):
            blocks = [places[b] if b else None for b in table]
            self.change_place(plan, seq, [*blocks, *self.device.take(count)], "live")
            seq.registered = 0
            seq.arriving = True
        for block, place in places.items():
            if block.owners:
                self.pair(place, block)
        return plan

    def pair(self, block: Block, other: Block) -> None:
        if block.twin is None and other.twin is None:
            block.twin, other.twin = other, block

    def swap(
        self, source: Pool, target: Pool, kind: str, seqs: list[Seq], tables: list[list[Block | None]], rest: int
    ) -> tuple[Plan, dict[Block, Block]]:
        places: dict[Block, Block] = {}
        order = [b for table in tables for b in table if b is not None]
        for block in order:
            known = block.twin or block.incoming
            if known is None and block.cached and block.node is not None:
                known = block.node.blocks.get(target.name)
            if known is not None:
                places[block] = known
        missing = [b for b in dict.fromkeys(order) if b not in places]
        if len(missing) + rest > target.num_free - target.num_idle_of(list(places.values())):
            raise NoRoom
        plan = self.plan()
        for place in places.values():
            target.retain(place)
        for block, place in zip(missing, target.take(len(missing)), strict=True):
            places[block] = place
        counted: list[Block] = []
        for seq, table in zip(seqs, tables, strict=True):
            for block in [b for b in table if b is not None]:
                if block in counted:
                    target.retain(places[block])
                counted.append(block)
                arriving = places[block].arriving
                if arriving is not None:
                    self.ride(arriving, seq)
        for block in missing:
            plan.moves.append((kind, block, places[block]))
            places[block].arriving = plan
        return plan, places

    def change_place(self, plan: Plan, seq: Seq, blocks: list[Block | None], state: str) -> None:
        row = Row(seq, before=(seq.state, seq.blocks), moved=blocks)
        self.give_up(seq, seq.blocks, plan)
        seq.blocks, seq.state = blocks, state
        self.ride(plan, seq, row)
        self.use(seq)

    def commit(self, plan: Plan) -> None:
        for row in plan.rows:
            seq = row.seq
            if seq.exists:
                assert seq.pending.pop(0) is plan
                seq.computed = max(seq.computed, row.end)
                if seq.arriving:
                    seq.arriving = self.awaits(seq)
                if seq.state == "live":
                    self.cache(seq)
                elif row.moved is seq.blocks:
                    self.enter_on_host(seq)
        self.land(plan)

    def abort(self, plan: Plan) -> None:
        for row in plan.rows:
            seq = row.seq
            if not seq.exists:
                continue
            assert seq.pending.pop() is plan
            if row.before is not None:
                self.unswap(plan, row)
            elif not row.rides:
                self.take_back(row)
        if plan.brings:
            for b, h in plan.arrivals:
                if b.owners:
                    self.expect_again(b, h)
        self.land(plan)

    def awaits(self, seq: Seq) -> bool:
        return any(p.brings for p in seq.pending) or any(b.incoming for b in seq.blocks if b is not None)

    def expect_again(self, block: Block, expected: Block) -> None:
        if block.incoming is None:
            self.host.retain(expected)
            block.incoming = expected

    def take_back(self, row: Row) -> None:
        seq = row.seq
        surplus = seq.blocks[row.num_blocks :]
        del seq.blocks[row.num_blocks :]
        for i, old, new in row.replaced:
            if i < len(seq.blocks) and seq.blocks[i] is new:
                seq.blocks[i] = old
                self.device.retain(old)
                surplus.append(new)
        seq.scheduled = min(seq.scheduled, row.start)
        del seq.tokens[row.base :]
        release(surplus, seq.level)
        if row.replaced:
            self.use(seq)

    def unswap(self, plan: Plan, row: Row) -> None:
        seq, now = row.seq, row.seq.blocks
        assert row.before is not None
        state, table = row.before
        if state == "swapped out":
            table = table[: self.blocks_for(seq.scheduled)]
        lost = [b for b, _ in plan.arrivals if not b.owners and not b.cached]
        for block in table:
            if block is not None:
                block.pool.retain(block)
        for b, h in plan.arrivals:
            bringing = [p for p in self.in_flight if p.brings and (b, h) in p.arrivals]
            if b in table and bringing:  # what a step has moved in since it swapped out comes with that step
                self.ride(bringing[-1], seq)
            elif b in table and b in lost:
                self.expect_again(b, h)
        release(now, seq.level)
        seq.blocks, seq.state = list(table), state
        seq.arriving = state == "live" and self.awaits(seq)
        self.use(seq)
        if state == "live":
            self.cache(seq)
