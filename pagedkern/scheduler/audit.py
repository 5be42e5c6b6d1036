"""`check()`: every invariant of the scheduler, looked at in full."""

from __future__ import annotations

from pagedkern.errors import AuditError
from pagedkern.scheduler.request import DROPPED, RUNNING, SWAPPED, WAITING, Request
from pagedkern.scheduler.state import SchedulerState


def check(state: SchedulerState) -> None:
    """Raise `AuditError` with the first invariant found broken. O(requests + blocks + tokens)."""
    state.allocator.check()
    queues = (
        (state.running, (RUNNING,)),
        (state.line, (WAITING, SWAPPED, DROPPED)),
        (state.aside, (WAITING, SWAPPED, DROPPED)),
    )
    for queue, stages in queues:
        ids = [request.id for request in queue]
        _expect(ids == sorted(set(ids)), f"queues: {ids} is not the order of arrival, each request once")
        for request in queue:
            _expect(request._stage in stages, f"{request}: in the wrong queue")
            _check_request(state, request)
    requests = [request for queue in state.queues for request in queue]
    _expect(len({request.id for request in requests}) == len(requests), "queues: a request is in two of them")
    passed = [request.id for request in (*state.running, *state.line) if request._beside is None]
    _expect(passed == sorted(passed), f"queues: {passed}: one in line has been overtaken")
    _expect(all(request._beside is not None for request in state.aside), "a request is set aside for no reason")
    _check_sums(state)
    plans = state.batch.plans if state.batch is not None else ()
    _expect(all(plan.state == "in flight" for plan in plans), "the batch in flight has a plan that is not")


def _check_sums(state: SchedulerState) -> None:
    """The sums over those who run."""
    running = list(state.running)
    prefilling = [request for request in running if request._prefilling]
    sums = (
        sum(len(request._unfinished) for request in running),
        len(prefilling),
        sum(len(request._unfinished) - 1 for request in prefilling),
    )
    kept = state.num_seqs, state.num_prefilling, state.num_promised
    _expect(kept == sums, f"sequences, prompts and promised blocks of what runs: {kept} kept, {sums} counted")
    _expect(state.num_seqs <= state.max_num_seqs, f"{state.num_seqs} sequences run, {state.max_num_seqs} may")


def _check_request(state: SchedulerState, request: Request) -> None:
    prompt, unfinished = len(request.prompt), request._unfinished
    _expect(bool(unfinished), f"{request}: not ended, though all samples are")
    going_on = [sample for sample in request.samples if sample.finish_reason is None]
    _expect(going_on == unfinished, f"{request}: {going_on} go on, {unfinished} listed")
    holds = [sample for sample in request.samples if sample.seq is not None]
    if request._stage is WAITING or request._stage is DROPPED:
        _expect(not holds, f"{request}: has sequences")
        return
    _expect(holds == (unfinished[:1] if request._prefilling else unfinished), f"{request}: has sequences of {holds}")
    rows = {row.sample: row for row in state.batch.rows} if state.batch is not None else {}
    place = "swapped out" if request._stage is SWAPPED else "live"
    for sample in holds:
        seq = sample.seq
        assert seq is not None
        _expect(seq.state == place, f"{sample}: its sequence is {seq.state}")
        _expect(len(sample.tokens) < request.max_tokens, f"{sample}: goes on after max_tokens")
        _expect(seq.num_computed_tokens == sample._computed, f"{sample}: {seq} should have {sample._computed} computed")
        grown = rows[sample].end if sample in rows else sample._computed
        length = sample._known if request._prefilling else grown
        _expect(seq.num_tokens == length, f"{sample}: {seq} should have {length} tokens")
        least = 0 if request._prefilling else prompt
        _expect(least <= sample._computed < sample._known, f"{sample}: {sample._computed} computed of {sample._known}")


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise AuditError(message)
