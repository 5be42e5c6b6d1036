"""Making room: the last that runs is preempted, by swapping or by recomputation."""

from __future__ import annotations

from pagedkern.errors import OutOfBlocks
from pagedkern.scheduler.draft import Draft, blocks_of
from pagedkern.scheduler.request import Request
from pagedkern.scheduler.state import SchedulerState


def preempt(draft: Draft, request: Request) -> int:
    """The last that runs goes. Returns the blocks that are free once the batch has run, but not before: those on their
    way to the host. O(its blocks), and O(blocks of what runs) once for each batch if costs are to be compared.
    """
    swaps = prefers_swap(draft, request)
    draft.stops(request)
    coming = swap_out(draft, request) if swaps else 0
    if not coming:
        free_all(draft.state, request)
        draft.batch.dropped.append(request)
    return coming


def swap_out(draft: Draft, request: Request) -> int:
    """Its blocks go to the host, by a plan of the batch. Returns how many, 0 if the host has no room."""
    num_blocks, allocator = len(blocks_of(request)), draft.state.allocator
    try:
        with allocator.transaction():  # a mere trial leaves no trace in the allocator's counts
            plan = allocator.swap_out([s.seq for s in request._unfinished if s.seq is not None])
    except OutOfBlocks:
        return 0
    draft.batch._add(plan)
    draft.batch.swapped_out.append(request)
    return num_blocks


def free_all(state: SchedulerState, request: Request) -> None:
    """Give its blocks up, at once. What the prefix cache keeps of them may be found again. O(its blocks)."""
    for sample in request._unfinished:
        if sample.seq is not None:
            state.allocator.free(sample.seq)


def prefers_swap(draft: Draft, request: Request) -> bool:
    """Whether a request is swapped rather than recomputed: by the policy, and for "auto" by estimated cost."""
    state = draft.state
    if state.policy == "recompute" or not state.allocator.num_host_blocks:
        return False
    if state.policy == "swap":
        return True
    size, costs = state.allocator.block_size, state.costs
    computed = [(s, s.seq.block_ids[: state.blocks_for(s._computed)]) for s in request._unfinished if s.seq is not None]
    (leader, table), prompt = computed[0], len(request.prompt)
    num_tokens = leader._computed + sum(s._computed - prompt for s, _ in computed[1:])
    num_blocks = len({b for _, blocks in computed for b in blocks})
    swapping = costs.swap_seconds(len(computed), num_blocks, size)
    if swapping >= costs.recompute_seconds(num_tokens):
        return False
    kept, owners = 0, draft.owners  # leading blocks that another request holds: these the prefix cache is sure to have
    while (kept + 1) * size < leader._computed and owners[table[kept]] > 1:
        kept += 1
    return swapping < costs.recompute_seconds(num_tokens - kept * size)
