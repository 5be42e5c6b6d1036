"""Taking room: the first in line starts, or is resumed."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from pagedkern.allocator import Plan, Sequence, Verdict
from pagedkern.errors import OutOfBlocks
from pagedkern.scheduler.batch import Row
from pagedkern.scheduler.draft import Draft
from pagedkern.scheduler.growth import blocks_needed
from pagedkern.scheduler.request import SWAPPED, WAITING, Request
from pagedkern.scheduler.room import free_all
from pagedkern.scheduler.standstill import Standstill
from pagedkern.scheduler.state import SchedulerState


def start_more(draft: Draft, budget: int) -> None:
    """Start and resume the first in line, as long as there is room for them and a budget of tokens for their prompts.

    What comes back from the host can be computed by this very batch if it is a prompt, and decodes from the next on.
    Whoever is alone has all the room that there is: `Standstill` if that is not enough. O(tokens) of what starts.
    """
    state = draft.state
    draft.room = 0  # not known any more: others have grown
    line = iter(state.line)
    request = next(line, None)
    while request is not None:
        if draft.num_left >= budget:
            return
        if not draft.num_running:
            if not _start_alone(draft, request):
                raise Standstill(request, state.allocator.num_free_blocks)
            request = next(line, None)
        elif not can_start(draft, request):
            return
        else:
            try:
                request = _start(draft, request, line, budget)
            except OutOfBlocks:
                return
    if not draft.num_running and state.aside and not any(_start_alone(draft, request) for request in state.aside):
        raise Standstill(next(iter(state.aside)), state.allocator.num_free_blocks)


def can_start(draft: Draft, request: Request) -> bool:
    """Whether the first in line may run beside others: the watermark is kept, and what is promised to them.

    O(its samples); O(tokens) more if that depends on what the prefix cache has, and blocks have become free or a prompt
    has been computed since it was refused.
    """
    state, samples = draft.state, request._unfinished
    if draft.num_seqs + len(samples) > state.max_num_seqs:
        return False
    needed = _uncached(state, request)
    if needed > draft.room:
        draft.room = state.allocator.num_free_blocks - draft.num_promised - state.allocator.watermark_blocks
    if needed <= draft.room:
        draft.room -= needed
        return True
    draft.room = 0
    return _fits_beside_cached(draft, request)


def _fits_beside_cached(draft: Draft, request: Request) -> bool:
    """Whether there is room if what the prefix cache has is counted, too. That is not known of what is on the host, and
    of samples that have gone different ways.
    """
    state, samples = draft.state, request._unfinished
    room = state.allocator.num_free_blocks - draft.num_promised
    refused, room_then = state.refusal
    if refused == request.id and room <= room_then:
        return False
    if request._stage is not SWAPPED and (len(samples) == 1 or not samples[0].tokens):
        spare = draft.num_promised + len(samples) - 1
        ids, keys = _text(request), request.keys
        if state.allocator.can_allocate(ids, salt=request.salt, spare_blocks=spare, keys=keys) is Verdict.OK:
            return True
    state.refusal = (request.id, room)
    return False


def _uncached(state: SchedulerState, request: Request) -> int:
    """The blocks that a request needs if the prefix cache has nothing of it: those of the prompt and one for each
    further sample, or those of all samples if they go on. O(its samples).
    """
    samples, prompt = request._unfinished, len(request.prompt)
    if not samples[0].tokens:
        return state.blocks_for(prompt) + len(samples) - 1
    return state.blocks_of(prompt, [sample._known for sample in samples])


def _start(draft: Draft, request: Request, line: Iterator[Request], budget: int) -> Request | None:
    """Run beside others, and with it those right behind it for whom nothing needs a closer look. Returns the next in
    line. Raises `OutOfBlocks`, and nothing has changed, if there is no room after all.
    """
    if not request._plain or request._stage is not WAITING:
        _started(draft, request, _take(draft.state, request))
        return next(line, None)
    run, behind = _run(draft, request, line, budget)
    seqs = draft.state.allocator._create_many([r.prompt for r in run], [r.salt for r in run])
    draft.starts(run, seqs)
    return behind


def _run(draft: Draft, first: Request, line: Iterator[Request], budget: int) -> tuple[list[Request], Request | None]:
    """A plain request that can start and those behind it that are like it, and can start whatever the prefix cache has
    of them; and the next in line. O(their number).
    """
    run, size = [first], draft.state.block_size
    room, tokens = draft.room, budget - draft.num_left - len(first.prompt)
    seats = draft.state.max_num_seqs - draft.num_seqs - 1
    behind: Request | None = None
    for behind in line:
        length = len(behind.prompt)
        needed = -(-length // size)
        if tokens <= 0 or not seats or needed > room or not behind._plain or behind._stage is not WAITING:
            break
        run.append(behind)
        room, tokens, seats = room - needed, tokens - length, seats - 1
    else:
        behind = None
    draft.room = room
    return run, behind


def _start_alone(draft: Draft, request: Request) -> bool:
    """Run if there is room for the next step of all samples, watermark aside: then it is certain that it gets on."""
    state = draft.state
    try:
        with state.allocator.transaction():
            taken = _take(state, request, rest=_further(state, request))
    except OutOfBlocks:
        return False
    _started(draft, request, taken)
    return True


def fits_again(state: SchedulerState, request: Request) -> bool:
    """Whether a request that runs would have room for its next step if it were computed again, alone. Changes nothing.

    O(blocks of what runs).
    """
    try:
        with state.allocator.transaction():
            for other in state.running:
                free_all(state, other)
            _take(state, request, rest=_further(state, request))
            raise _TakenBack
    except OutOfBlocks:
        return False
    except _TakenBack:
        return True


class _TakenBack(Exception):
    """It was but a trial."""


def _take(state: SchedulerState, request: Request, rest: int = 0) -> Sequence | Plan:
    """The sequence of the first sample (the others are forked once it is computed), or the plan that brings all of them
    back from the host. Raises `OutOfBlocks`, also if fewer than `rest` blocks are free then.
    """
    taken: Sequence | Plan
    if request._stage is SWAPPED:
        taken = state.allocator.swap_in([s.seq for s in request._unfinished if s.seq is not None])
    else:
        again = request._stage is not WAITING  # its prompt has been counted then
        salt, keys, kept = request.salt, request.keys, request.retention
        level = request.priority
        taken = state.allocator.create(
            _text(request), salt=salt, priority=level, keys=keys, retention=kept, again=again
        )
    if rest and rest > state.allocator.num_free_blocks:
        raise OutOfBlocks
    return taken


def _started(draft: Draft, request: Request, taken: Sequence | Plan) -> None:
    if isinstance(taken, Plan):
        draft.resumes(request, taken)
    else:
        draft.starts([request], [taken])


def _further(state: SchedulerState, request: Request) -> int:
    """The blocks that its samples begin in their next step, beside those that starting takes. O(its samples)."""
    samples = request._unfinished
    if not samples[0].tokens:  # the next step computes the prompt
        return 0
    if request._stage is SWAPPED and not request._prefilling:
        return sum(blocks_needed(state, [Row(s, s._computed, s._known) for s in samples]))
    needed = state.blocks_of(len(request.prompt), [sample._known for sample in samples])
    return needed - state.blocks_for(samples[0]._known)


def _text(request: Request) -> array[int]:
    """What the first sample's sequence is made of: prompt and completion, as far as it is known."""
    leader = request._unfinished[0]
    return leader._text(0, leader._known) if leader.tokens else request.prompt
