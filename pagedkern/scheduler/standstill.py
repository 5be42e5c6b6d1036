"""Requests that have no room even alone, since sequences that are not the scheduler's hold the blocks.

`add` refuses what could not run alone in the whole pool, so a request of the scheduler that does not fit beside nobody
else's can only be kept from running by foreign sequences. These may be freed at any time: it is set aside, the others
pass it, and it is back at its place in line as soon as foreign sequences hold fewer blocks than then.
"""

from __future__ import annotations

from pagedkern.errors import OutOfBlocks
from pagedkern.scheduler.request import DROPPED, RUNNING, Request
from pagedkern.scheduler.room import free_all
from pagedkern.scheduler.state import SchedulerState


class Standstill(Exception):
    """The request has no room although nobody else runs. What was tried is to be taken back."""

    def __init__(self, request: Request, num_free: int) -> None:
        super().__init__(request, num_free)
        self.request = request
        self.num_free = num_free  # blocks that were free when it was alone


def resolve(state: SchedulerState, found: Standstill) -> OutOfBlocks:
    """Set the request aside, if that is of use to others. Returns what to tell the caller. O(its blocks), and O(blocks)
    of foreign sequences.

    One that runs gives up its blocks for it; it keeps them as long as there is nobody else.
    """
    request, allocator = found.request, state.allocator
    foreign = foreign_blocks(state)
    needed = state.blocks_of(len(request.prompt), [sample._known for sample in request._unfinished])
    if request._stage is not RUNNING:
        _set_aside(state, request, foreign)
    elif len(state.running) > 1 or state.line or state.aside:
        with allocator.transaction():
            free_all(state, request)
        # Nothing below raises.
        state.lose(request)
        state.enter(request, DROPPED)
        _set_aside(state, request, foreign)
    return OutOfBlocks(
        f"schedule: {found.num_free} of {allocator.num_blocks} blocks are free, too few for request {request.id} even "
        f"alone: its next step needs {needed}, what it shares included; sequences that are not the scheduler's hold "
        f"{foreign}. Free some of them, or cancel it (`request` of this error); others go on without it",
        request=request,
    )


def _set_aside(state: SchedulerState, request: Request, foreign: int) -> None:
    if request in state.line:
        state.line.remove(request)
        state.aside.add(request)
        request._beside = foreign
        state.most_beside = max(state.most_beside, foreign)


def recall(state: SchedulerState) -> None:
    """Put those back in line that foreign sequences leave more room now. O(sequences + foreign blocks), and O(requests
    set aside) if there are any.
    """
    back = returning(state)
    for request in back:
        state.leave(request)
        state.enter(request, request._stage)
    if back:
        state.most_beside = max((r._beside for r in state.aside if r._beside is not None), default=0)


def returning(state: SchedulerState) -> list[Request]:
    """Those set aside that foreign sequences leave more room now than the last time, the latest arrival first."""
    if not state.aside or (foreign := foreign_blocks(state)) >= state.most_beside:
        return []
    return [r for r in reversed(state.aside) if r._beside is not None and foreign < r._beside]


def foreign_blocks(state: SchedulerState) -> int:
    """Blocks that sequences and steps outside the scheduler hold, none of its own being in flight.

    O(sequences + foreign blocks).
    """
    own = {s.seq for request in state.running for s in request._unfinished if s.seq is not None}
    held: set[int] = set()
    for seq in state.allocator.sequences:
        if seq not in own and seq.state == "live":
            held.update(seq.block_ids)
    held.discard(-1)
    return len(held) + state.allocator.stats["blocks_fenced"]
