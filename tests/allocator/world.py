"""An allocator and its naive model side by side, with a shadow cache that holds what a real cache would.

Every action is done to both, then everything that can be seen is compared, `check()` is run, and every sequence's
tokens are read back through its block table. Actions take plain numbers, so that hypothesis or a seeded generator can
drive them.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from pagedkern.allocator import BlockAllocator, Plan, Sequence, Step
from pagedkern.errors import InvalidArgument, OutOfBlocks, StaleSequence
from reference import allocator_model as naive

PROMPTS = [[(t * i * i + i // 3) % 3 for i in range(64)] for t in range(3)]  # with common beginnings and different ends
SALTS = [None, "tenant", b"tenant", 7]


class Undo(Exception):
    """Leaves a transaction."""


@dataclass(eq=False)
class Pair:
    """One sequence in the allocator and in the model."""

    real: Sequence
    model: naive.Seq
    tokens: list[int]  # the true ids, whether or not the allocator was told

    def values(self) -> list[int]:
        """What the cache must hold at each position: it depends on all tokens up to there."""
        value, values = 0, []
        for token in self.tokens:
            value = hash((value, token))
            values.append(value)
        return values


@dataclass(eq=False)
class Flight:
    """A step in flight. `work` says what it computes: for each row (pair, values when it was made, start, end)."""

    real: Plan
    model: naive.Plan
    work: list[tuple[Pair, list[int], int, int]]
    executed: bool = False


def plain(value: object) -> object:
    """Plans by their numbers."""
    return [plan.id for plan in value] if isinstance(value, tuple) else value


def fingerprint(allocator: BlockAllocator) -> object:
    """All that an operation may change, to see that a failed one has changed nothing."""
    core = allocator._ledger
    for seq in core.live.values():
        core.detach(seq)  # on the fast path, records are derived: settle them to compare
    return (
        [
            (
                list(pool.refs),
                dict(pool.holds),
                {b: sorted(levels) for b, levels in pool.seals.items()},
                pool.free_blocks(),
                dict(pool.twins),
                dict(pool.incoming),
                dict(pool.arriving),
                sorted(pool.prefix.items()),
            )
            for pool in (core.pool, core.host)
        ],
        [
            (s.id, s.state, s._blocks[:], s._tokens[:], *map(plain, s._saved()[4:]), s._salt)
            for s in allocator.sequences
        ],
        sorted(core.in_flight),
        sorted((p.id, p.state, p._held[:], p._held_host[:], p._seals[:]) for p in core.in_flight.values()),
    )


@dataclass
class World:
    num_blocks: int = 24
    block_size: int = 4
    num_host_blocks: int = 12
    caching: bool = True
    watermark: float = 0.0
    transactions: bool = True
    pairs: list[Pair] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    dead: list[Sequence] = field(default_factory=list)
    cache: dict[int, int] = field(default_factory=dict)  # slot: value
    host: dict[int, int] = field(default_factory=dict)
    tables: dict[int, list[list[int]]] = field(
        default_factory=dict
    )  # the last block table of append, as a device has it
    last_batch: list[Pair] = field(default_factory=list)
    broken: set[Pair] = field(
        default_factory=set
    )  # freed, and then one of its steps was aborted: later ones read garbage
    inside: bool = False  # a transaction

    def __post_init__(self) -> None:
        self.real = BlockAllocator(
            self.num_blocks,
            self.block_size,
            num_host_blocks=self.num_host_blocks,
            prefix_caching=self.caching,
            watermark=self.watermark,
        )
        reserve = int(self.watermark * self.num_blocks)
        self.model = naive.Model(self.num_blocks, self.block_size, self.caching, reserve, self.num_host_blocks)

    # Choosing.

    def prompt(self, a: int, b: int) -> list[int]:
        base = PROMPTS[a % 3]
        length = b % 40
        tail = [] if a % 5 else [b % 7, a % 7]
        if a % 4 == 1:  # whole blocks: nobody copies the last one before writing, and all can be cached
            return base[: max(1, length // self.block_size) * self.block_size]
        return (base[:length] + tail)[:40]

    def live(self) -> list[Pair]:
        return [p for p in self.pairs if p.model.state == "live"]

    def pick(self, a: int) -> Pair | None:
        live = self.live()
        return live[a % len(live)] if live else None

    def ready(self, a: int) -> list[Pair]:
        """Some sequences that may be appended to, in some order."""
        able = [p for p in self.live() if p.model.scheduled == len(p.model.tokens)]
        chosen = [p for i, p in enumerate(able) if a >> i & 1]
        return chosen[::-1] if a & 1 else chosen

    # Doing.

    def attempt(self, model: Callable[[], object], real: Callable[[], object]) -> tuple[object, object] | None:
        """Do it to both. They must agree on whether there is room; without room nothing may change."""
        try:
            expected = model()
        except naive.NoRoom:
            before = fingerprint(self.real)
            with pytest.raises(OutOfBlocks):
                real()
            assert fingerprint(self.real) == before
            return None
        return expected, real()

    def refused(self, error: type[Exception], real: Callable[[], object]) -> None:
        before = fingerprint(self.real)
        with pytest.raises(error):
            real()
        assert fingerprint(self.real) == before

    def create(self, a: int, b: int, c: int) -> None:
        tokens, salt, level = self.prompt(a, b), SALTS[c % 8 // 4 * (c % 4)], c // 8 % 4
        verdict = self.model.verdict(tokens, salt)
        assert self.real.can_allocate(tokens, salt=salt).value == verdict
        done = self.attempt(
            lambda: self.model.create(tokens, salt, level),
            lambda: self.real.create(tokens, salt=salt, priority=level),
        )
        if done:
            self.pairs.append(Pair(done[1], done[0], list(tokens)))  # type: ignore[arg-type]
        else:
            assert verdict != "ok"

    def create_count(self, a: int, b: int, c: int) -> None:
        count = a % 30
        assert self.real.can_allocate(count).value == self.model.verdict(count)
        done = self.attempt(lambda: self.model.create(count), lambda: self.real.create(count))
        if done:
            self.pairs.append(Pair(done[1], done[0], [b % 5] * count))  # type: ignore[arg-type]

    def prefill(self, a: int, b: int, c: int) -> None:
        able = [p for p in self.live() if p.model.scheduled < len(p.model.tokens)]
        chosen = [p for i, p in enumerate(able) if a >> i & 1]
        budget = b % 20 + 1 if c & 1 else None
        done = self.attempt(
            lambda: self.model.prefill([p.model for p in chosen], budget),
            lambda: self.real.prefill([p.real for p in chosen], budget),
        )
        if done:
            self.launched(*done, self.batch_of(done[0]), growing=False)  # type: ignore[arg-type]

    def mixed(self, a: int, b: int, c: int) -> None:
        """Some sequences grow, some prompts are computed, in one step."""
        growing = self.ready(a)
        prompts = [
            p for i, p in enumerate(p for p in self.live() if p.model.scheduled < len(p.model.tokens)) if b >> i & 1
        ]
        tokens = [[(c + i) % 3] * (1 + (c >> i) % 2) for i in range(len(growing))]
        budget = sum(map(len, tokens)) + c % 9 if c & 1 else None
        if budget == 0:
            self.refused(InvalidArgument, lambda: self.real.mixed([], [], [p.real for p in prompts], 0))
            return
        done = self.attempt(
            lambda: self.model.mixed(
                [p.model for p in growing], [list(t) for t in tokens], [p.model for p in prompts], budget
            ),
            lambda: self.real.mixed([p.real for p in growing], tokens, [p.real for p in prompts], budget),
        )
        if done:
            for pair, new in zip(growing, tokens, strict=True):
                pair.tokens += new
            self.launched(*done, self.batch_of(done[0]), growing=bool(growing))  # type: ignore[arg-type]

    def append(self, a: int, b: int, c: int) -> None:
        self._append(self.ready(a), [[(b + i) % 3] for i in range(len(self.pairs))])

    def append_known(self, a: int, b: int, c: int) -> None:
        """Continue as one of the prompts does, so that what is generated can be found later."""
        chosen = self.ready(a)
        self._append(chosen, [[PROMPTS[b % 3][len(p.tokens) % 64]] for p in chosen])

    def append_again(self, a: int, b: int, c: int) -> None:
        """The same batch as before, several times: the fast path."""
        for i in range(a % 12):
            batch = self.last_batch
            if any(p not in self.live() or p.model.scheduled < len(p.model.tokens) for p in batch):
                return
            self._append(batch, [[(b + i + j) % 3] for j in range(len(batch))])
            if c >> i & 1:
                self.drain(0, b, 0)
            self.compare()

    def append_many(self, a: int, b: int, c: int) -> None:
        chosen = self.ready(a)
        self._append(chosen, [[(b >> i) % 3] * ((c >> i) % 6 + 1) for i in range(len(chosen))])

    def append_unknown(self, a: int, b: int, c: int) -> None:
        chosen = self.ready(a)
        count = b % 3 + 1
        self._append(chosen, [[c % 5] * count] * len(chosen), told=False, count=count)

    def append_ahead(self, a: int, b: int, c: int) -> None:
        chosen = self.ready(a)
        self._append(chosen, [[c % 3]] * len(chosen), lookahead=b % 9)

    def _append(
        self, chosen: list[Pair], tokens: list[list[int]], told: bool = True, count: int = 1, lookahead: int = 0
    ) -> None:
        tokens = tokens[: len(chosen)]
        given = (tokens if any(len(t) != 1 for t in tokens) else [t[0] for t in tokens]) if told else None
        done = self.attempt(
            lambda: self.model.append(
                [p.model for p in chosen], [list(t) if told else [None] * len(t) for t in tokens], lookahead
            ),
            lambda: self.real.append([p.real for p in chosen], given, num_tokens=count, lookahead=lookahead),
        )
        if done:
            for pair, new in zip(chosen, tokens, strict=True):
                pair.tokens += new
            self.last_batch = chosen
            self.launched(*done, chosen, growing=True)  # type: ignore[arg-type]

    def fork(self, a: int, b: int, c: int) -> None:
        pair = self.pick(a)
        if pair:
            self.fork_of(pair, b % 3)

    def fork_of(self, pair: Pair, count: int = 1) -> list[Pair]:
        forks = self.real.fork(pair.real, count)
        pairs = [Pair(real, self.model.fork(pair.model), list(pair.tokens)) for real in forks]
        self.pairs += pairs
        return pairs

    def truncate(self, a: int, b: int, c: int) -> None:
        pair = self.pick(a)
        if pair:
            length = max(0, len(pair.tokens) - b % 7) if c % 4 else b % (len(pair.tokens) + 1)
            kept = self.model.blocks_for(length)
            if length % self.block_size and pair.model.blocks[kept - 1] is None:
                self.refused(InvalidArgument, lambda: self.real.truncate(pair.real, length))
                return
            self.real.truncate(pair.real, length)
            self.model.truncate(pair.model, length)
            del pair.tokens[length:]

    def release_window(self, a: int, b: int, c: int) -> None:
        pair = self.pick(a)
        if pair:
            first = b % (pair.model.computed + 1)
            self.real.release_window(pair.real, first)
            self.model.release_window(pair.model, first)

    def pin(self, a: int, b: int, c: int) -> None:
        pair = self.pick(a)
        if pair:
            pinned = self.real.pin(pair.real)
            self.pairs.append(Pair(pinned, self.model.pin(pair.model), pair.tokens[: pinned.num_tokens]))

    def clear_cache(self, a: int, b: int, c: int) -> None:
        if a % 4 == 0:
            self.real.clear_cache()
            self.model.clear_cache()
        elif a % 4 == 1:
            salt = SALTS[b % 4]
            self.real.clear_cache(salt=salt)
            self.model.clear_cache(salt)

    def snapshot(self, a: int, b: int, c: int) -> None:
        """Go on with an allocator made from the state of this one."""
        if self.inside:
            return
        if self.flights:
            self.refused(InvalidArgument, self.real.snapshot)
            return
        state = json.loads(json.dumps(self.real.snapshot()))
        restored = BlockAllocator.restore(state)
        assert fingerprint(restored) == fingerprint(self.real)
        assert restored.stats == self.real.stats
        handles = {seq.id: seq for seq in restored.sequences}
        for pair in self.pairs:
            self.dead.append(pair.real)  # a handle of another allocator now
            pair.real = handles[pair.real.id]
        self.real = restored

    def swap_out(self, a: int, b: int, c: int) -> None:
        self.swap([p for i, p in enumerate(self.live()) if a >> i & 1], "swap_out")

    def swap_in(self, a: int, b: int, c: int) -> None:
        self.swap([p for i, p in enumerate(p for p in self.pairs if p not in self.live()) if a >> i & 1], "swap_in")

    def swap(self, chosen: list[Pair], name: str) -> None:
        done = self.attempt(
            lambda: getattr(self.model, name)([p.model for p in chosen]),
            lambda: getattr(self.real, name)([p.real for p in chosen]),
        )
        if done:
            self.flights.append(Flight(done[1], done[0], []))  # type: ignore[arg-type]
            self.same_moves(*done)  # type: ignore[arg-type]

    def entangle(self, a: int, b: int, c: int) -> None:
        """Swaps there and back, forks and appends of one family, and no commit between: they are taken back in long
        rows. What plans keep in order to give it back meets what has been forked and written since.
        """
        if not self.inside:
            self.prefill(4095, 0, 0)
            self.drain(0, 0, 0)
        pair = self.pick(a)
        if pair is None or pair.model.pending or len(self.pairs) > 12:
            return
        generator = random.Random(b * 4096 + c)
        family = [pair]
        for _ in range(4 + c % 8):
            some = [p for p in family if p in self.pairs and generator.random() < 0.8]
            away = [p for p in some if p.model.state != "live"]
            able = [p for p in some if p not in away and p.model.scheduled == len(p.model.tokens)]
            kind = generator.choices(["swap", "fork", "abort", "append", "free"], [8, 5, 8, 4, 1])[0]
            if kind == "swap":
                self.swap(away or some, "swap_in" if away else "swap_out")
            elif kind == "fork" and some[:1] and not away:
                family += self.fork_of(some[0])
            elif kind == "abort" and self.flights:
                self.abort(0, 1, 0)
            elif kind == "append" and able:
                self._append(able[:1], [[generator.randrange(3)] * generator.randint(1, 2 * self.block_size)])
            elif kind == "free" and len(some) > 1:
                self.drop(some[0])
            self.compare()

    def same_moves(self, plan: naive.Plan, real: Plan) -> None:
        moves = [kind for kind, src, dst in real.moves for _ in zip(src, dst, strict=True)]
        assert moves == [kind for kind, _, _ in plan.moves]

    def free(self, a: int, b: int, c: int) -> None:
        pair = self.pairs[a % len(self.pairs)] if self.pairs else None
        if pair:
            self.drop(pair)

    def drop(self, pair: Pair) -> None:
        self.real.free(pair.real)
        self.model.free(pair.model)
        self.pairs.remove(pair)
        self.dead.append(pair.real)

    def commit(self, a: int, b: int, c: int) -> None:
        if not self.flights:
            return
        flight = self.flights[a % len(self.flights) if b % 4 == 0 else 0]
        if self.inside and not flight.executed:
            return
        if any(row.seq.exists and row.seq.pending[0] is not flight.model for row in flight.model.rows):
            self.refused(InvalidArgument, lambda: self.real.commit(flight.real))
            return
        self.execute(flight)
        self.real.commit(flight.real)
        self.model.commit(flight.model)
        self.flights.remove(flight)
        with pytest.raises(InvalidArgument):
            self.real.commit(flight.real)

    def drain(self, a: int, b: int, c: int) -> None:
        """Commit all that is in flight, or all but the last, oldest first."""
        for flight in self.flights[: len(self.flights) - b % 2]:
            self.commit(self.flights.index(flight), 0, 0)

    def abort(self, a: int, b: int, c: int) -> None:
        if not self.flights:
            return
        flight = self.flights[a % len(self.flights) if b % 3 == 0 else -1]
        if any(row.seq.exists and row.seq.pending[-1] is not flight.model for row in flight.model.rows):
            self.refused(InvalidArgument, lambda: self.real.abort(flight.real))
            return
        if c % 2 and not self.inside:
            self.execute(flight)  # it did run, and its results are thrown away
        self.broken |= {pair for pair, *_ in flight.work if not pair.model.exists}
        self.real.abort(flight.real)
        self.model.abort(flight.model)
        self.flights.remove(flight)
        for pair in self.pairs:
            del pair.tokens[len(pair.model.tokens) :]

    def stale(self, a: int, b: int, c: int) -> None:
        other = BlockAllocator(4, 4)
        foreign = other.create(3)
        dead = self.dead + [p.real for p in self.pairs if p not in self.live()]
        old = dead[a % len(dead)] if dead and b % 3 else foreign
        if old.state != "swapped out":
            self.refused(StaleSequence, lambda: self.real.free(old))
            self.refused(StaleSequence, lambda: self.real.swap_in([old]))
        for call in (
            lambda: self.real.swap_out([old]),
            lambda: self.real.release_window(old, 0),
            lambda: self.real.fork(old),
            lambda: self.real.truncate(old, 0),
            lambda: self.real.append([*(p.real for p in self.ready(c)), old]),
            lambda: self.real.prefill([old]),
        ):
            self.refused(StaleSequence, call)

    def transaction(self, a: int, b: int, c: int) -> None:
        """Some actions that are then all undone."""
        if self.inside or not self.transactions:
            return
        kept = copy.deepcopy((self.model, [p.model for p in self.pairs], [f.model for f in self.flights]))
        pairs = [(p, list(p.tokens)) for p in self.pairs]
        others = list(self.flights), list(self.dead), list(self.last_batch), dict(self.tables)
        before = fingerprint(self.real)
        actions = tuple(name for name in ACTIONS if name not in ("stale", "transaction", "append_again"))
        self.inside = True
        with pytest.raises(Undo), self.real.transaction():
            self.some_of(actions, a, b, c)
        self.inside = False
        assert fingerprint(self.real) == before
        for pair in self.pairs:
            if pair not in [p for p, _ in pairs]:
                assert pair.real.state == "freed"
        self.flights, self.dead, self.last_batch, self.tables = others
        self.model, models, plans = kept
        self.pairs = [p for p, _ in pairs]
        for (pair, tokens), model in zip(pairs, models, strict=True):
            pair.tokens, pair.model = tokens, model
        for flight, plan in zip(self.flights, plans, strict=True):
            flight.model = plan

    def some_of(self, actions: tuple[str, ...], a: int, b: int, c: int) -> None:
        for i in range(b % 5):
            getattr(self, actions[(a + i * c) % len(actions)])(a + i, b + i, c + i)
            self.compare()
        raise Undo

    # Steps.

    def batch_of(self, plan: naive.Plan) -> list[Pair]:
        return [next(p for p in self.pairs if p.model is row.seq) for row in plan.rows if not row.rides]

    def launched(self, plan: naive.Plan, step: Step, batch: list[Pair], growing: bool) -> None:
        """Check every buffer of a new step against the model."""
        size = self.block_size
        rows = [row for row in plan.rows if not row.rides]
        assert list(step.seqs) == [p.real for p in batch]
        assert list(step.seq_lens) == [row.end for row in rows]
        counts = [row.end - row.start for row in rows]
        assert list(step.cu_seqlens_q) == [sum(counts[:i]) for i in range(len(counts) + 1)]
        assert step.max_seqlen_q == max(counts, default=0)
        assert step.num_tokens == sum(counts)
        self.same_moves(plan, step)
        assert len(step.copies) == sum(kind == "copy" for kind, _, _ in plan.moves)
        table = step.block_table.tolist() if batch else []
        for pair, entries in zip(batch, table, strict=True):
            ids = pair.real.block_ids
            assert entries == ids + [-1] * (len(entries) - len(ids))
        if growing:
            if step.base is None:
                assert list(step.changed_rows) == list(range(len(batch)))
            device = [list(entries) for entries in self.tables[step.base]] if step.base is not None else table
            for row in step.changed_rows:
                device[row] = table[row]
            assert device == table
            self.tables = {step.id: table, **self.tables}
        slots = []
        for pair, row, entries in zip(batch, rows, table, strict=True):
            for position in range(row.start, row.end):
                there = position < pair.model.present
                slots.append(-1 if there else entries[position // size] * size + position % size)
        work = [(p, p.values(), row.start, row.end) for p, row in zip(batch, rows, strict=True)]
        if sum(slots) % 2:  # otherwise they are made when the step runs
            assert list(step.slot_mapping) == slots
        self.flights.append(Flight(step, plan, work))

    def execute(self, flight: Flight) -> None:
        """Carry out the plans up to this one, in the order in which they were made."""
        for other in self.flights:
            if not other.executed:
                self.run(other)
                other.executed = True
            if other is flight:
                return

    def run(self, flight: Flight) -> None:
        step, size = flight.real, self.block_size
        where = {
            "copy": (self.cache, self.cache),
            "swap_out": (self.cache, self.host),
            "swap_in": (self.host, self.cache),
        }
        for kind, src, dst in step.moves:
            source, target = where[kind]
            assert len(set(dst)) == len(dst)
            contents = [[source.get(s * size + i) for i in range(size)] for s in src]
            for d, values in zip(dst, contents, strict=True):
                for i, value in enumerate(values):
                    self.put(target, d * size + i, value)
        if not isinstance(step, Step):
            return
        slots = iter(step.slot_mapping)
        for _, values, start, end in flight.work:
            for position in range(start, end):
                slot = next(slots)
                if slot >= 0:
                    self.put(self.cache, slot, values[position])
        for i, (pair, values, _, end) in enumerate(flight.work):
            for position in range(0 if pair not in self.broken else end, end):
                block = step.block_table[i, position // size]
                assert block < 0 or self.cache.get(block * size + position % size) == values[position], (
                    f"step {step.id}, row {i}, position {position}: reads what is not its own"
                )

    def put(self, memory: dict[int, int], slot: int, value: int | None) -> None:
        if value is None:
            memory.pop(slot, None)
        else:
            memory[slot] = value

    # Comparing.

    def compare(self) -> None:
        self.real.check()
        assert self.real.num_free_blocks == self.model.device.num_free
        assert self.real.num_free_host_blocks == self.model.host.num_free
        assert self.real.num_cached_blocks == len(self.model.device.cached)
        assert self.real.stats["host_blocks_cached"] == len(self.model.host.cached)
        assert self.real.stats["blocks_evicted"] == self.model.device.num_evicted
        assert self.real.stats["host_blocks_evicted"] == self.model.host.num_evicted
        self.compare_cache()
        ids: dict[naive.Block, int] = {}
        for pair in self.pairs:
            real, model = pair.real, pair.model
            assert real.state == model.state
            assert real.num_tokens == len(model.tokens) == len(pair.tokens)
            assert real.num_computed_tokens == model.computed
            assert real.num_cached_tokens == model.cached
            table = real.block_ids
            assert len(table) == len(model.blocks)
            for b, block in zip(table, model.blocks, strict=True):
                assert (b < 0) == (block is None)
                if block is not None:
                    assert ids.setdefault(block, b) == b
            self.read_back(pair, table)
        assert len({(block.pool.name, b) for block, b in ids.items()}) == len(ids)

    def compare_cache(self) -> None:
        """The same prefixes are cached, of the same levels, and will be evicted in the same order."""
        digests: dict[naive.Block, bytes] = {}
        for salt, root in self.model.roots.items():
            self.note_digests(root, [], salt, digests)
        expected = {(block.pool.name, digest): block for block, digest in digests.items()}
        found = {(e.memory, e.digest): e.block for e in self.real.cached_events()}
        assert found.keys() == expected.keys()
        for name, pool in (("device", self.real._ledger.pool), ("host", self.real._ledger.host)):
            names = {b: digest for (memory, digest), b in found.items() if memory == name}
            order = [names[b] for level in pool.idle.lists() for b in level]
            assert order == [digests[block] for block in getattr(self.model, name).order()]
            assert [pool.idle.level(found[name, digest]) for memory, digest in expected if memory == name] == [
                block.level for (memory, _), block in expected.items() if memory == name
            ]

    def note_digests(
        self, node: naive.Node, tokens: list[int], salt: object, digests: dict[naive.Block, bytes]
    ) -> None:
        for child in node.children:
            path = [*tokens, *child.tokens]
            digest = self.real.digests(path, salt=salt)[-1]  # type: ignore[arg-type]
            digests |= dict.fromkeys(child.blocks.values(), digest)
            self.note_digests(child, path, salt, digests)

    def read_back(self, pair: Pair, table: list[int]) -> None:
        waiting = [f for f in self.flights if not f.executed and f.model in pair.model.pending]
        if waiting or any(block and block.incoming for block in pair.model.blocks):
            return
        memory = self.cache if pair.model.state == "live" else self.host
        values, size = pair.values(), self.block_size
        for position in range(pair.model.computed):
            b = table[position // size]
            assert b < 0 or memory.get(b * size + position % size) == values[position]


ACTIONS = (
    "create",
    "create_count",
    "prefill",
    "mixed",
    "append",
    "append_known",
    "append_again",
    "append_many",
    "append_unknown",
    "append_ahead",
    "fork",
    "truncate",
    "release_window",
    "pin",
    "clear_cache",
    "snapshot",
    "swap_out",
    "swap_in",
    "entangle",
    "free",
    "commit",
    "drain",
    "abort",
    "stale",
    "transaction",
)
