"""Making room and taking it again: preempting the last that runs, starting and resuming the first that does not."""

from __future__ import annotations

from pagedkern.allocator import Verdict
from pagedkern.errors import OutOfBlocks
from pagedkern.scheduler.batch import Batch
from pagedkern.scheduler.request import Request, Stage
from pagedkern.scheduler.state import State


def preempt(state: State, batch: Batch) -> int:
    """The last that runs goes. Returns the blocks that are free once the batch has run, but not before: those on their
    way to the host. O(blocks of what runs).
    """
    request = state.running[-1]
    state.journal.set(request, "num_preemptions", request.num_preemptions + 1)
    coming = swap_out(state, batch, request) if prefers_swap(state, request) else 0
    if not coming:
        drop(state, batch, request)
    return coming


def swap_out(state: State, batch: Batch, request: Request) -> int:
    """Its blocks go to the host, by a plan of the batch. Returns how many, 0 if the host has no room."""
    seqs = [sample.seq for sample in request.samples if sample.seq is not None]
    num_blocks = len({b for seq in seqs for b in seq.block_ids})
    try:
        plan = state.allocator.swap_out(seqs)
    except OutOfBlocks:
        return 0
    batch.plans += (plan,)
    batch.swapped_out.append(request)
    state.enter(request, Stage.SWAPPED)
    state.counts["preempted_by_swap"] += 1
    return num_blocks


def drop(state: State, batch: Batch, request: Request) -> None:
    """Its blocks are given up, at once. What the prefix cache keeps of them may be found again."""
    state.give_up(request)
    state.enter(request, Stage.DROPPED)
    batch.dropped.append(request)
    state.counts["preempted_by_recomputation"] += 1


def prefers_swap(state: State, request: Request) -> bool:
    """By the policy, and for "auto" by estimated cost."""
    if state.policy == "recompute" or not state.allocator.num_host_blocks:
        return False
    if state.policy == "swap":
        return True
    size = state.allocator.block_size
    computed = [sample for sample in request.samples if sample.seq is not None]
    tables = [s.seq.block_ids[: state.blocks_for(s._computed)] for s in computed if s.seq is not None]
    num_tokens = computed[0]._computed + sum(s._computed - len(request.prompt) for s in computed[1:])
    others = {b for r in state.running if r is not request for s in r.samples if s.seq for b in s.seq.block_ids}
    kept = 0  # leading blocks that another request holds: these the prefix cache is sure to have
    while (kept + 1) * size < computed[0]._computed and tables[0][kept] in others:
        kept += 1
    num_blocks = len({b for table in tables for b in table})
    swapping = state.costs.swap_seconds(len(tables), num_blocks, size)
    return swapping < state.costs.recompute_seconds(num_tokens - kept * size)


def can_start(state: State, request: Request) -> bool:
    """Whether the first that does not run may run now: the watermark is kept, and what is promised to others, unless
    nothing runs that could grow.

    O(requests that run) if no block has become free and no prompt been computed since it was refused, else O(tokens)
    more.
    """
    if not state.running:
        return True
    if state.num_seqs + len(request._unfinished) > state.max_num_seqs:
        return False
    refused, room_then = state.refusal
    promised = state.num_promised
    room = state.allocator.num_free_blocks - promised
    if refused == request.id and room <= room_then:
        return False
    samples, prompt = request._unfinished, len(request.prompt)
    if request._stage is not Stage.SWAPPED and (len(samples) == 1 or request._stage is Stage.WAITING):
        ids = samples[0]._text(0, samples[0]._known)
        spare = promised + len(samples) - 1
        verdict = state.allocator.can_allocate(ids, salt=request.salt, spare_blocks=spare)
    else:  # more is shared than this counts, if others have the same prompt
        num_blocks = state.blocks_of(prompt, [sample._known for sample in samples])
        verdict = state.allocator.can_allocate(num_blocks * state.allocator.block_size, spare_blocks=promised)
    if verdict is not Verdict.OK:
        state.refusal = (request.id, room)
    return verdict is Verdict.OK


def start(state: State, batch: Batch, request: Request) -> None:
    """Create the sequence of the first sample that is not finished; the others are forked once it is computed."""
    leader = request._unfinished[0]
    seq = state.allocator.create(leader._text(0, leader._known), salt=request.salt, priority=request.priority)
    state.journal.set(leader, "seq", seq)
    state.journal.set(leader, "_computed", seq.num_cached_tokens)
    state.journal.set(request, "_prefilling", True)
    if request._stage is Stage.WAITING:
        state.journal.set(request, "num_cached_tokens", seq.num_cached_tokens)
    batch._admitted.append((request, request._stage))
    state.enter(request, Stage.RUNNING)


def swap_in(state: State, batch: Batch, request: Request) -> None:
    """Its blocks come back, by a plan of the batch."""
    batch.plans += (state.allocator.swap_in([s.seq for s in request.samples if s.seq is not None]),)
    batch.resumed.append(request)
    state.enter(request, Stage.RUNNING)
