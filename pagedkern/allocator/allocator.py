"""`BlockAllocator`: the public face of the bookkeeping."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as List
from contextlib import contextmanager
from time import monotonic
from typing import Any, TextIO

from pagedkern.allocator import lifecycle, snapshot, spans, steps, swap
from pagedkern.allocator.arguments import (
    EVERYBODY,
    MAX_TOKENS,
    Everybody,
    Salt,
    Tokens,
    integer,
    new_tokens,
    single_ids,
    tenant,
    token_ids,
)
from pagedkern.allocator.atomic import Atomic, operation, transaction
from pagedkern.allocator.events import LIMIT
from pagedkern.allocator.facts import Facts
from pagedkern.allocator.handles import Phase, Plan, Sequence, State, Step, Verdict
from pagedkern.allocator.ledger import Ledger
from pagedkern.allocator.lockstep import LockstepBatch
from pagedkern.allocator.log import OperationLog
from pagedkern.allocator.retention import Retention
from pagedkern.allocator.retention import read as read_retention
from pagedkern.allocator.spans import Keys
from pagedkern.errors import AuditError, InvalidArgument, InvalidType


class BlockAllocator(Atomic, Facts):
    """Which blocks of a paged KV cache belong to which sequence. It moves no memory: it says what to move and where
    to write.

    An engine's loop:

        seq = allocator.create(prompt)           # reuses the cached prefix
        step = allocator.prefill([seq])          # the prompt's tokens that are left to compute
        cache.apply(step)                        # carry out step.moves
        ...                                      # run the model: K and V go to step.slot_mapping
        allocator.commit(step)                   # now they count, and others may share them
        step = allocator.append([seq], [token])  # next token: the same again
        allocator.free(seq)

    **Order.** Steps may be made before earlier ones are committed, as engines do that prepare the next step while the
    GPU works. They are carried out in the order in which they were made; for each sequence they are committed oldest
    first and aborted newest first. A fork made while a step of its parent is in flight takes part in that step.

    **All or nothing.** A call that raises changes nothing. `OutOfBlocks` if blocks are lacking, `StaleSequence` for a
    handle that is freed, swapped out or of another allocator, `InvalidArgument` (a `ValueError`) and `InvalidType`
    (also a `TypeError`) for the rest; the same if something raises that the call uses, as an argument that iterates.
    An asynchronous exception, as `KeyboardInterrupt`, can leave damage: the
    next call audits the state first, once, and is `AuditError` if it is not whole. `restore` a snapshot then.

    **One call at a time.** A lazy list of sequences or tokens is walked through before the call begins, and may use the
    allocator. Whatever else a call runs (`__index__`, a signal handler, ids that are lazy in a list) may not:
    `InvalidArgument`.

    **Threads.** No locks: one thread owns the allocator, the first that uses it. A call from any other thread raises
    `WrongThread`; `adopt` hands the allocator over.

    **Cost.** No operation depends on the size of the pool; a decode step of an unchanged batch costs some Python for
    each block begun or filled, and nothing in Python for the other sequences.

    Args:
        num_blocks: blocks on the device, ids `0 .. num_blocks-1`, all for the allocator to hand out.
        block_size: B, tokens a block.
        num_host_blocks: blocks in host memory, for swapping.
        prefix_caching: whether prompts share the full blocks of equal prefixes.
        watermark: share of `num_blocks` that `can_allocate` wants to remain free, so that what runs already can grow.
        clock: tells the time in seconds, which matters to `Retention` only. A snapshot has how much is left.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_host_blocks: int = 0,
        prefix_caching: bool = True,
        watermark: float = 0.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        num_blocks = integer("num_blocks", num_blocks, 1, 2**31 - 1)
        block_size = integer("block_size", block_size, 1, 2**31 - 1)
        num_host_blocks = integer("num_host_blocks", num_host_blocks, 0, 2**31 - 1)
        if not isinstance(prefix_caching, bool):
            raise InvalidType(f"prefix_caching: got {prefix_caching!r}, expected True or False")
        if isinstance(watermark, bool) or not isinstance(watermark, (int, float)):
            raise InvalidType(f"watermark: got {watermark!r}, expected a number from 0 to below 1")
        if not 0 <= watermark < 1:
            raise InvalidArgument(f"watermark: got {watermark}, expected a number from 0 to below 1")
        if not callable(clock):
            raise InvalidType(f"clock: got {clock!r}, expected a function that gives seconds")
        super().__init__(Ledger(num_blocks, num_host_blocks, block_size, prefix_caching, clock))
        self._reserve = int(watermark * num_blocks)

    @property
    def watermark_blocks(self) -> int:
        """Blocks that `can_allocate` wants to remain free: the watermark's share of the pool."""
        return self._reserve

    # Sequences.

    @operation
    def can_allocate(
        self, tokens: int | Tokens, *, salt: Salt = None, spare_blocks: int = 0, keys: Keys = ()
    ) -> Verdict:
        """Whether `create` would succeed and leave the watermark free: `OK`, `LATER`, or `NEVER`. Changes nothing.

        `NEVER` when the prompt needs more blocks than the pool has above the watermark, cached or not. O(tokens).

        Args:
            tokens, salt, keys: as in `create`.
            spare_blocks: so many blocks are to remain free, too.
        """
        ledger = self._ledger
        kept = self._reserve + integer("spare_blocks", spare_blocks, 0)
        ids, length, shares = self._prompt(tokens)
        marks = spans.read(keys, length) if keys != () else ()
        need = ledger.num_blocks_for(length)
        if need > self.num_blocks - self._reserve:
            return Verdict.NEVER
        root = ledger.roots.peek(tenant(salt))
        hits: list[int] = []
        if shares and root:
            data = ids.tobytes()
            special = spans.special(marks, data, ledger.prefix.stride)
            hits = [b for b in ledger.prefix.match(root, data, special) if b >= 0]
        free = ledger.pool.num_free - ledger.pool.num_idle_of(hits)
        return Verdict.OK if need - len(hits) + kept <= free else Verdict.LATER

    @operation
    def create(
        self,
        tokens: int | Tokens,
        *,
        salt: Salt = None,
        priority: int = 0,
        keys: Keys = (),
        retention: List[Retention] = (),
        again: bool = False,
    ) -> Sequence:
        """A new sequence with this prompt: token ids, or a count when there is nothing to share.

        The longest prefix of full blocks that is cached under the same salt is shared, not computed again
        (`num_cached_tokens`). At least one token is left to compute: when all are cached, the last one, whose K and V
        need not be written again (its slot is -1). A prompt of no tokens is legal; it owns no block until `append`.

        Args:
            tokens: ids of up to 64 bits with a sign, or their number.
            salt: a string, bytes, an int of at most 4096 bits, or None. Sequences with different salts share nothing.
            priority: 0 to 3. When blocks are lacking, cached blocks of freed sequences of lower priority go first.
            keys: what tokens stand for that their ids do not tell, as placeholders of images do: a list of
                (start, end, digest), positions `start .. end-1`, in order and none overlapping another; the digest is
                a string, bytes or an int of at most 4096 bits. Such a token is shared only with the same token of the
                same digest at the same offset in its span. Forks have them too.
            retention: priorities of parts of the prompt and of what is to follow it: see `Retention`. Forks have them
                too, each until it is freed.
            again: the prompt has been counted in `stats` before, as that of a request which is computed again after a
                preemption: what is asked and found is not counted once more.

        Raises `OutOfBlocks`, whose message says how many blocks are needed and free. O(tokens).
        """
        ids, length, shares = self._prompt(tokens)
        marks = spans.read(keys, length) if keys != () else ()
        kept = read_retention(retention) if retention != () else ()
        return lifecycle.create(self._ledger, ids, length, shares, tenant(salt), priority, marks, kept, again)

    @operation
    def _create_many(self, prompts: List[Tokens], salts: List[Salt]) -> list[Sequence]:
        """`create` for each prompt under its salt, in this order, all or nothing: cheaper for many. O(tokens)."""
        ids = [token_ids("prompts", prompt) for prompt in prompts]
        lengths = list(map(len, ids))
        kept = ids if self._ledger.caching else [array("q") for _ in ids]
        return lifecycle.create_many(self._ledger, list(zip(kept, lengths, map(tenant, salts), strict=True)))

    @operation
    def fork(self, seq: Sequence, n: int = 1) -> list[Sequence]:
        """`n` new sequences with the tokens of `seq`, sharing every block until somebody writes. O(blocks) each.

        Tokens that are still to be computed are so in the fork too: fork after the prefill, else each computes the
        prompt.
        """
        return lifecycle.fork(self._ledger, self._ledger.own(seq), integer("n", n, 0))

    @operation
    def pin(self, seq: Sequence) -> Sequence:
        """Keep the cached blocks of a sequence from being evicted: a new sequence that owns them, until it is freed.

        O(blocks).
        """
        return lifecycle.pin(self._ledger, self._ledger.own(seq))

    @operation
    def truncate(self, seq: Sequence, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens: rejected speculative tokens go, with the blocks that held nothing else.

        Also tokens that a step in flight is computing: the step then counts for the ones that are left. O(blocks).
        """
        seq = self._ledger.own(seq)
        lifecycle.truncate(self._ledger, seq, integer("num_tokens", num_tokens, 0, seq._length))

    @operation
    def free(self, seq: Sequence) -> None:
        """Give the sequence's blocks back; the handle is stale from now on. O(blocks).

        Cached blocks stay to be reused until they are the least recently used, the tail of a sequence before its head.
        Blocks that a step in flight reads or writes are handed out again only after its commit or abort.
        """
        lifecycle.free(self._ledger, self._ledger.own(seq, (State.LIVE, State.SWAPPED)))

    @operation
    def release_window(self, seq: Sequence, first_needed: int) -> None:
        """Give back the blocks behind a sliding window: those that hold only tokens before `first_needed`.

        Their entries in the block table become -1. The tokens must have been computed. O(blocks of the sequence).
        """
        seq = self._ledger.own(seq)
        lifecycle.release_window(self._ledger, seq, integer("first_needed", first_needed, 0, seq._computed))

    # Swapping.

    @operation
    def swap_out(self, seqs: Iterable[Sequence]) -> Plan:
        """The plan that moves sequences to host memory. Until `swap_in` their handles are stale, but for `free`.

        A block that several of them share is moved once, and not at all if the host has it already; it stays shared.
        Their blocks are free when the plan and the steps before it have been committed. What was not computed needs no
        host block. Raises `OutOfBlocks` for lack of host blocks. O(blocks).
        """
        return swap.swap_out(self._ledger, self._ledger.own_all(seqs))

    @operation
    def swap_in(self, seqs: Iterable[Sequence]) -> Plan:
        """The plan that brings swapped-out sequences back; they can be used at once, in steps made after it.

        A block that several of them share is moved once, and not at all if the device still has it. Raises
        `OutOfBlocks` for lack of device blocks, `StaleSequence` for a sequence that is not swapped out. O(blocks).
        """
        return swap.swap_in(self._ledger, self._ledger.own_all(seqs, State.SWAPPED))

    # Steps.

    @operation
    def prefill(self, seqs: Iterable[Sequence], max_tokens: int | None = None) -> Step:
        """The step that computes the next prompt tokens that are neither computed nor in flight.

        With `max_tokens`, the step computes that many at most in all, first come first served: its `seqs` are the
        leading ones that get any. `InvalidArgument` for a sequence that has nothing left to compute. O(tokens).
        """
        budget = None if max_tokens is None else integer("max_tokens", max_tokens, 1)
        batch = self._ledger.own_all(seqs, saved=0)
        ends = steps.prompt_ends(batch, budget)
        return steps.make_step(self._ledger, batch[: len(ends)], ends, growing=0)

    @operation
    def append(
        self,
        seqs: Iterable[Sequence],
        tokens: Iterable[int | Tokens] | None = None,
        *,
        num_tokens: int = 1,
        lookahead: int = 0,
    ) -> Step:
        """The step that computes new tokens, for which each sequence grows; a last block that is shared is copied
        first.

        The same list of sequences, step after step, is the fast case (see `Step` for what its buffers share).

        Args:
            seqs: sequences whose earlier tokens are all computed or in flight; `InvalidArgument` if `prefill` has not
                come.
            tokens: for each sequence one token id, or a list of ids. None: their ids do not matter (nothing is cached).
            num_tokens: how many for each sequence, when `tokens` is None.
            lookahead: reserve blocks for so many tokens more, that a draft model may write ahead of the sequence.

        O(tokens + blocks begun).
        """
        if lookahead == 0 and num_tokens == 1 and type(seqs) is list and seqs:
            lockstep: LockstepBatch | None = getattr(seqs[0], "_lockstep", None)
            if lockstep is not None and lockstep.active and lockstep.seqs == seqs and lockstep.belongs_to(self._ledger):
                ids = single_ids(tokens, len(seqs)) if tokens is not None else None
                if (ids is not None) if lockstep.logs else (ids is not None or tokens is None):
                    return lockstep.advance(ids if lockstep.logs else None)
        return self._append(seqs, tokens, num_tokens, lookahead)

    def _append(
        self, seqs: Iterable[Sequence], tokens: Iterable[int | Tokens] | None, num_tokens: int, lookahead: int
    ) -> Step:
        given = self._ledger.each(seqs)
        ahead = integer("lookahead", lookahead, 0, MAX_TOKENS)
        counts, ids = new_tokens(len(given), tokens, num_tokens)
        batch = self._ledger.own_all(given)
        ends = steps.grow(batch, counts, ids)
        return steps.make_step(self._ledger, batch, ends, len(batch), ahead)

    @operation
    def mixed(
        self,
        appending: Iterable[Sequence],
        tokens: Iterable[int | Tokens] | None,
        prefilling: Iterable[Sequence],
        max_tokens: int | None = None,
        *,
        lookahead: int = 0,
    ) -> Step:
        """`append` and `prefill` in one step, as chunked prefill has it: first the rows that grow, then the prompts.

        O(tokens + blocks begun).

        Args:
            appending, tokens, lookahead: sequences that grow, and what by: as in `append`, one token each if `tokens`
                is None.
            prefilling: sequences whose prompts are to be computed, as in `prefill`.
            max_tokens: most tokens of the whole step, at least those of `appending`; the prompts get what these leave,
                first come first served, and those that get none are left out.
        """
        ledger = self._ledger
        growing, prompts = ledger.each(appending, "appending"), ledger.each(prefilling, "prefilling")
        ahead = integer("lookahead", lookahead, 0, MAX_TOKENS)
        counts, ids = new_tokens(len(growing), tokens, 1)
        budget = None
        if max_tokens is not None:
            budget = integer("max_tokens", max_tokens, max(1, sum(counts))) - sum(counts)
        batch = ledger.own_all(growing + prompts, saved=len(growing))
        ends = steps.prompt_ends(batch[len(growing) :], budget, "prefilling")
        ends = steps.grow(batch[: len(growing)], counts, ids, "appending") + ends
        return steps.make_step(ledger, batch[: len(ends)], ends, len(growing), ahead)

    @operation
    def commit(self, plan: Plan) -> None:
        """The step or plan has been carried out: its tokens are computed, its copies are done, its fences fall.

        Full blocks enter the prefix cache now, not earlier. `InvalidArgument` if an earlier step of one of its
        sequences is not committed. Sequences freed since are passed over. O(sequences + blocks filled).
        """
        plan = self._flying(plan)
        if isinstance(plan, Step) and plan._lockstep is not None:
            plan._lockstep.commit(plan)
        else:
            steps.commit(self._ledger, plan)

    @operation
    def abort(self, plan: Plan) -> None:
        """The step or plan has not run and will not: what it was going to do is undone.

        Tokens that `append` added for it are gone, blocks that it copied on write are shared again. Prompt tokens
        remain, to be computed by another `prefill`. `InvalidArgument` if a later step of one of its sequences is in
        flight. O(blocks).
        """
        plan = self._flying(plan)
        if isinstance(plan, Step) and plan._lockstep is not None:
            plan._lockstep.stop()
        steps.abort(self._ledger, plan)

    def _flying(self, plan: object) -> Plan:
        if not isinstance(plan, Plan):
            raise InvalidType(f"plan: got {type(plan).__name__}, expected a Step or Plan")
        if plan._owner is not self._ledger.origin:
            if plan._owner is None or plan._owner.is_copy:
                raise InvalidArgument(f"plan: {plan.id} is a copy, which belongs to no allocator")
            raise InvalidArgument(f"plan: {plan.id} was made by another allocator")
        if plan._phase is not Phase.IN_FLIGHT:
            raise InvalidArgument(f"plan: {plan.id} is {plan.state} already")
        return plan

    @contextmanager
    def transaction(self) -> Iterator[BlockAllocator]:
        """A context: if an exception leaves it, everything done inside is undone, to the order in which blocks are
        evicted.

        Sequences made inside are then freed, steps made inside are aborted: carry none out before the end.
        Transactions nest. One that is left before those inside it is `InvalidArgument`, and all of them are taken back:
        as tasks of an event loop do that each open one. Steps inside take the general path, not the fast one. Entering
        is O(live sequences) if a batch was on the fast path.
        """
        with transaction(self):
            yield self

    # The prefix cache.

    def record_events(self, *, limit: int = LIMIT) -> None:
        """From now on `events` tells which blocks can be found in the prefix cache, and which no more.

        What is cached already is told by `cached_events`. A second call begins anew. O(cached).

        Args:
            limit: so many changes are kept until somebody looks. If there are more, the next look at `events` begins
                with one of kind "lost", and tells all that is cached then.
        """
        self._idle("record_events")
        self._ledger.record(integer("limit", limit, 1))

    @operation
    def clear_cache(self, *, salt: Salt | Everybody = EVERYBODY) -> None:
        """Forget every cached prefix, as after a change of the model's weights. Sequences keep their blocks, but what
        they have computed is not found any more. O(cached + sequences).

        Args:
            salt: only the prefixes under this salt, which may be None. By default all.
        """
        roots = self._ledger.roots
        nodes = {node for _, node in roots.items()} if isinstance(salt, Everybody) else {roots.peek(tenant(salt))}
        lifecycle.clear_cache(self._ledger, nodes - {0})

    # Keeping.

    def snapshot(self) -> dict[str, Any]:
        """The whole state as a JSON object, for `restore`. `InvalidArgument` while steps or plans are in flight.

        O(blocks + tokens).
        """
        self._idle("snapshot")
        return snapshot.take(self._ledger, self._reserve)

    @classmethod
    def restore(cls, state: dict[str, Any], *, clock: Callable[[], float] = monotonic) -> BlockAllocator:
        """The allocator of a `snapshot`, `state`; its sequences, with the same ids, are in `sequences`.

        A snapshot says in which blocks keys and values are, not what they are: restore it only where the memory of the
        blocks is as it was. `clock`: as in the constructor; what is left of a `Retention` runs from now on.

        `InvalidArgument` for what is not a snapshot of this version, with the field at fault if it is damaged.
        """
        allocator = cls(**snapshot.shape(state), clock=clock)
        allocator._reserve = snapshot.put(allocator._ledger, state)
        try:
            allocator.check()
        except (AuditError, LookupError) as error:
            raise InvalidArgument(f"state: its parts do not fit together: {error}") from None
        return allocator

    def log_to(self, file: TextIO | None) -> None:
        """Write each operation and its outcome to a text file, one JSON object a line, until `log_to(None)`.

        `python -m pagedkern.allocator.replay FILE` does them again and says where the outcome differs, so that a bug
        report is one file. The log starts with a snapshot: nothing may be in flight. If the file cannot be written
        later on, the log ends with a `RuntimeWarning`. Slow: for finding faults.
        """
        self._log = None if file is None else OperationLog(file, self.snapshot(), self._ledger.deadlines.reading)

    def _prompt(self, tokens: int | Tokens) -> tuple[array[int], int, bool]:
        """The ids worth keeping, the length of the prompt, whether it takes part in the prefix cache."""
        if not hasattr(tokens, "__iter__"):
            return array("q"), integer("tokens", tokens, 0, MAX_TOKENS), False
        ids = token_ids("tokens", tokens)
        return (ids, len(ids), True) if self._ledger.caching else (array("q"), len(ids), False)
