"""`Scheduler`: first come first served continuous batching."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as List

from pagedkern.allocator import BlockAllocator, Retention, Verdict
from pagedkern.allocator.arguments import MAX_TOKENS, Salt, Tokens, integer, tenant, token_ids
from pagedkern.allocator.retention import read as read_retention
from pagedkern.allocator.spans import Keys
from pagedkern.allocator.spans import read as read_keys
from pagedkern.errors import InvalidArgument, InvalidType
from pagedkern.scheduler import audit, outcome, planner
from pagedkern.scheduler.batch import Batch, BatchCopy
from pagedkern.scheduler.costs import Costs
from pagedkern.scheduler.request import WAITING, Request, Sample
from pagedkern.scheduler.standstill import returning
from pagedkern.scheduler.state import SchedulerState

POLICIES = ("swap", "recompute", "auto")


class Scheduler:
    """First come first served continuous batching with a token budget, chunked prefill and preemption.

    An engine's loop:

        scheduler.add(prompt, max_tokens=256, eos=2)
        while scheduler.has_work:
            batch = scheduler.schedule()
            cache.apply(batch)                         # swaps and copies, in order
            logits = model(batch.token_ids, ...)       # K, V to batch.slot_mapping; attention over batch.block_table
            tokens = sample(logits[batch.logits_rows])
            for sample in scheduler.complete(batch, tokens):
                ...                                    # sample.tokens, sample.finish_reason

    **Who runs.** Every batch computes one token for each sample that decodes, as far as the token budget reaches, and
    fills the rest of it with prompts, in chunks if need be, all in the order of arrival. A waiting request is admitted
    when there are blocks for its prompt and one for each further sample, the allocator's watermark kept; nobody
    overtakes. First tokens therefore come in the order of arrival.

    **Who makes room.** When blocks are lacking, the request that arrived last is preempted, by swapping its blocks to
    the host or by giving them up and computing them again. It is resumed before anybody is admitted. Swaps never hold
    up the kernels: blocks on their way to the host are used from the next batch on, and a request that comes back
    decodes from the next batch on.

    **Everybody finishes.** `add` refuses what could not finish alone in the whole pool. So the first that runs can
    always go on once the others are preempted, and everything else follows by induction.

    **Beside other sequences.** Sequences that are not the scheduler's (a pinned system prompt, say) may leave a request
    too few blocks even when all others are preempted. `schedule` then raises `OutOfBlocks` with this request as its
    attribute `request`, and sets it aside (`stuck`): the next call goes on with the others. The request is back at its
    place in line as soon as foreign sequences hold fewer blocks than then, and it is tried whenever nobody else could
    run. If all that is left is set aside, every call raises, for the first of them: free blocks, or cancel it.

    **All or nothing.** A call that raises changes nothing, here or in the allocator, but that it sets a request aside.
    One batch is in flight at a time. The scheduler is deterministic and moves no memory. It belongs to the thread of
    its allocator: calls from another raise `WrongThread`.

    **Thrashing.** A watermark of the allocator of 1 % or so keeps a request from being taken up only to be preempted
    when those before it grow.

    Args:
        allocator: may be used beside the scheduler (`pin` a system prompt, say), but its sequences are not to be
            touched.
        token_budget: most tokens that a batch computes.
        max_num_seqs: most sequences that run at a time, a request of n samples counting n.
        policy: "swap" (recomputes where the host has no room), "recompute", or "auto": the cheaper by `costs`.
        costs: what "auto" reckons with.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        token_budget: int = 2048,
        max_num_seqs: int = 256,
        policy: str = "auto",
        costs: Costs | None = None,
    ) -> None:
        if not isinstance(allocator, BlockAllocator):
            raise InvalidType(f"allocator: got {type(allocator).__name__}, expected a BlockAllocator")
        if policy not in POLICIES:
            raise InvalidArgument(f"policy: got {policy!r}, expected one of {', '.join(map(repr, POLICIES))}")
        if costs is not None and not isinstance(costs, Costs):
            raise InvalidType(f"costs: got {type(costs).__name__}, expected a Costs")
        self._state = SchedulerState(
            allocator,
            integer("token_budget", token_budget, 1),
            integer("max_num_seqs", max_num_seqs, 1),
            policy,
            costs if costs is not None else Costs(),
        )

    # Requests.

    def can_add(self, num_tokens: int, *, max_tokens: int, n: int = 1) -> Verdict:
        """Whether a request could run: `NEVER` if `add` would refuse it, `OK` if it would be the next to start and
        there is room (what the prefix cache has is not counted), else `LATER`. The next batch takes it up then, if its
        token budget reaches. O(1); O(sequences + blocks that are not the scheduler's) while requests are set aside.

        Args:
            num_tokens: of the prompt.
            max_tokens, n: as in `add`.
        """
        state = self._state
        state.allocator.check_thread()
        prompt, last = integer("num_tokens", num_tokens, 1, MAX_TOKENS), integer("max_tokens", max_tokens, 1)
        count, allocator = integer("n", n, 1), state.allocator
        verdict = allocator.can_allocate(prompt, spare_blocks=state.num_promised + count - 1)
        if self.most_blocks(prompt, max_tokens=last, n=count) > allocator.num_blocks or count > state.max_num_seqs:
            return Verdict.NEVER
        if verdict is Verdict.OK and (state.line or state.num_seqs + count > state.max_num_seqs or returning(state)):
            return Verdict.LATER
        return verdict

    def most_blocks(self, num_tokens: int, *, max_tokens: int, n: int = 1) -> int:
        """Blocks that a request can need, alone and to its end: the smallest pool that it can run in, watermark aside.
        The last token is sampled, but never written. O(1).

        Args:
            num_tokens: of the prompt.
            max_tokens, n: as in `add`.
        """
        prompt, last = integer("num_tokens", num_tokens, 1), integer("max_tokens", max_tokens, 1)
        shared = prompt // self.allocator.block_size  # as in `State.blocks_of`
        return shared + integer("n", n, 1) * (self._state.blocks_for(prompt + last - 1) - shared)

    def add(
        self,
        prompt: Tokens,
        *,
        max_tokens: int,
        n: int = 1,
        eos: int | Iterable[int] = (),
        salt: Salt = None,
        priority: int = 0,
        keys: Keys = (),
        retention: List[Retention] = (),
    ) -> Request:
        """A new request at the end of the queue.

        Args:
            prompt: token ids, at least one.
            max_tokens: new tokens, for each sample, at the most.
            n: samples of the prompt, which is computed once for all of them.
            eos: tokens that end a sample.
            salt, priority, keys, retention: as in `BlockAllocator.create`.

        Raises `InvalidArgument` for what can never run, when `can_add` gives `NEVER`: the pool has fewer blocks than it
        could need, alone and to its end, or fewer than its prompt and the watermark. O(tokens).
        """
        state = self._state
        state.allocator.check_thread()
        ids = token_ids("prompt", prompt)
        if not ids:
            raise InvalidArgument("prompt: got no token, expected at least one")
        last, count = integer("max_tokens", max_tokens, 1), integer("n", n, 1)
        ends = frozenset(token_ids("eos", eos if isinstance(eos, Iterable) else [eos]))
        if count > state.max_num_seqs:
            raise InvalidArgument(f"n: got {count}, expected at most max_num_seqs, {state.max_num_seqs}")
        if self.can_add(len(ids), max_tokens=last, n=count) is Verdict.NEVER:
            raise InvalidArgument(
                f"prompt: {len(ids)} tokens and max_tokens={last} for n={count} need up to "
                f"{self.most_blocks(len(ids), max_tokens=last, n=count)} blocks, the pool has "
                f"{state.allocator.num_blocks}, from which the prompt must leave the watermark free: it can never run"
            )
        level, owner = integer("priority", priority, 0, 3), tenant(salt)
        marks, kept = read_keys(keys, len(ids)), read_retention(retention)
        request = Request(state.num_requests + 1, ids, last, count, ends, owner, level, marks, kept)
        state.num_requests += 1
        state.enter(request, WAITING)
        state.counts["requests_added"] += 1
        return request

    def cancel(self, request: Request) -> bool:
        """End a request now, wherever it is, also while a batch computes it: its rows then go on, and what they give is
        passed over; its blocks are handed out again after `complete`. False if it had ended before. O(its blocks); O(1)
        for one that waits.
        """
        state = self._state
        state.allocator.check_thread()
        if not isinstance(request, Request):
            raise InvalidType(f"request: got {type(request).__name__}, expected a Request")
        if request.ended:
            return False
        queue = state.queue_of(request)
        if queue is None:
            raise InvalidArgument(f"request: {request.id} was made by another scheduler")
        outcome.cancel(state, request, queue)
        return True

    # Batches.

    def schedule(self) -> Batch:
        """The next batch. To be followed by `complete`, or by `abort` if it could not run.

        Without a request it is empty. O(samples that run), sorted within each request, and for what is

        - admitted or resumed: O(tokens), O(blocks);
        - preempted: O(blocks); once for each batch O(blocks of what runs) if "auto" has to compare costs;
        - set aside: O(sequences + blocks that are not the scheduler's) for each batch.

        Raises `InvalidArgument` while another batch is in flight, `OutOfBlocks` if a request (its attribute `request`)
        has no room even alone: it is set aside, the next call goes on with the others.
        """
        state = self._state
        state.allocator.check_thread()
        if state.batch is not None:
            raise InvalidArgument(f"schedule: batch {state.batch.id} is in flight, complete or abort it first")
        return planner.make(state, state.num_batches + 1)

    def complete(self, batch: Batch, tokens: Iterable[int], *, stopped: Collection[int] = ()) -> list[Sample]:
        """The batch has run: its tokens count as computed, its outputs get their next tokens.

        Args:
            batch: the one in flight.
            tokens: one id for each of `batch.outputs`.
            stopped: indices into `batch.outputs` of samples that end with this token for a reason of the engine's own,
                a stop string for example.

        Returns the samples that have ended, those of cancelled requests left out. Their blocks are free.

        O(rows + outputs), O(blocks) for each sample that ends or is forked, O(samples) of requests of which any ends.
        """
        self._state.allocator.check_thread()
        self._flying(batch)
        ids = token_ids("tokens", tokens)
        if len(ids) != len(batch.outputs):
            raise InvalidArgument(f"tokens: got {len(ids)} ids, expected {len(batch.outputs)}, one for each output")
        if not isinstance(stopped, Iterable):
            raise InvalidType(f"stopped: got {type(stopped).__name__}, expected a list of indices into batch.outputs")
        stops = {batch.outputs[integer("stopped", i, 0, len(ids) - 1)] for i in stopped}
        self._flying(batch)  # what iterates may have called the scheduler
        return outcome.complete(self._state, batch, ids.tolist(), stops)

    def abort(self, batch: Batch) -> None:
        """The batch has not run: what it was going to do is undone, as if it had not been made; but requests whose
        blocks it gave up stay preempted. O(rows), O(blocks) of what was admitted, resumed or preempted.
        """
        self._state.allocator.check_thread()
        self._flying(batch)
        outcome.abort(self._state, batch)

    # Observing.

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended. O(1)."""
        return any(self._state.queues)

    @property
    def allocator(self) -> BlockAllocator:
        """The allocator of the blocks."""
        return self._state.allocator

    @property
    def running(self) -> list[Request]:
        """Requests that run, in the order of arrival."""
        return list(self._state.running)

    @property
    def preempted(self) -> list[Request]:
        """Requests that ran and have to wait, in the order of arrival. O(requests that do not run)."""
        return [request for request in self._not_running() if request._stage is not WAITING]

    @property
    def waiting(self) -> list[Request]:
        """Requests that have not run, in the order of arrival. O(requests that do not run)."""
        return [request for request in self._not_running() if request._stage is WAITING]

    @property
    def stuck(self) -> list[Request]:
        """Those of `preempted` and `waiting` that are set aside, in the order of arrival: sequences that are not the
        scheduler's leave them too few blocks, others pass them.
        """
        return list(self._state.aside)

    @property
    def stats(self) -> dict[str, int]:
        """Counts of what has been done. What an aborted batch was going to do is not counted.

        `tokens_scheduled`: that completed batches have computed; `tokens_recomputed`: those of them that had been
        computed before, and were given up.
        """
        return dict(self._state.counts)

    def check(self) -> None:
        """Audit every invariant, the allocator's too. Raises `AuditError` with what is wrong. O(blocks + tokens)."""
        self._state.allocator.check_thread()
        audit.check(self._state)

    def _not_running(self) -> list[Request]:
        state = self._state
        if not state.aside:
            return list(state.line)
        return sorted((*state.line, *state.aside), key=lambda request: request.id)

    def _flying(self, batch: object) -> None:
        if not isinstance(batch, Batch):
            raise InvalidType(f"batch: got {type(batch).__name__}, expected a Batch")
        if isinstance(batch, BatchCopy):
            raise InvalidArgument(f"batch: got a copy of batch {batch.id}, expected the one that `schedule` returned")
        if batch is not self._state.batch:
            raise InvalidArgument(f"batch: {batch.id} is not in flight in this scheduler")

    def __repr__(self) -> str:
        return (
            f"<Scheduler: {len(self._state.running)} running, {len(self.preempted)} preempted, "
            f"{len(self.waiting)} waiting>"
        )
