"""Any legal sequence of operations, and never a value that is not a sequence's own: see `oracle` and `actions`.

A seeded driver: each run of a world has a theme, which says what is frequent in it, and does without some of the
actions. Rare chains, such as a swap out and back that are both taken back after a fork, need runs in which hardly
anything is committed; uniform actions do not get there. A run that fails is cut down to the actions that it takes.

By default 24,000 operations, the same ones in every run. With HYPOTHESIS_PROFILE=fuzz they differ from run to run, and
there are 50 times FUZZ_EXAMPLES of them.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from pagedkern.allocator import BlockAllocator
from tests.allocator.actions import ACTIONS, World

LENGTH = 120
FUZZ = os.environ.get("HYPOTHESIS_PROFILE") == "fuzz"
STEPS = 50 * int(os.environ.get("FUZZ_EXAMPLES", "2000")) if FUZZ else 24_000
FIRST_SEED = random.randrange(10**9) if FUZZ else 0

WEIGHTS = {
    "create": 6,
    "prefill_all": 6,
    "prefill": 4,
    "drain": 6,
    "commit": 4,
    "append": 4,
    "append_known": 4,
    "append_block": 4,
    "append_again": 3,
    "append_ahead": 3,
    "mixed": 4,
    "fork": 4,
    "pin": 2,
    "truncate": 3,
    "free": 4,
    "release_window": 2,
    "swap_out": 3,
    "swap_in": 4,
    "abort": 2,
    "end_transaction": 2,
}
"""How frequent an action is; 1 if it is not listed."""
NOTHING = dict.fromkeys(ACTIONS, 0)
THEMES: dict[str, dict[str, int]] = {
    "as an engine": {},
    "much in flight": {
        "drain": 1, "commit": 1, "abort": 6, "abort_all": 6, "swap_out": 9, "swap_in": 14, "fork": 9, "append_block": 8,
        "create": 4, "prefill": 2, "mixed": 2, "append_ahead": 1, "append_again": 1, "pin": 1, "release_window": 1,
        "create_long": 0, "clear_cache": 0, "free_all": 0, "snapshot": 0, "begin_transaction": 0,
    },
    "out and back": {
        **NOTHING, "create": 3, "prefill_all": 3, "append": 6, "append_block": 6, "append_again": 4, "fork": 9,
        "truncate": 1, "free": 4, "swap_out": 9, "swap_in": 14, "drain": 1, "commit": 1, "abort": 6, "abort_all": 6,
    },
    "tentative": {
        **NOTHING, "create": 3, "prefill_all": 3, "append": 9, "fork": 9, "truncate": 14, "free": 1,
        "swap_out": 1, "swap_in": 1, "drain": 1, "commit": 1, "abort": 6, "abort_all": 2, "branch": 8,
    },
    "from the host": {
        **NOTHING, "create": 9, "prefill_all": 6, "append": 6, "fork": 6, "truncate": 6, "free": 5,
        "create_long": 6, "come_back": 8, "swap_out": 6, "swap_in": 1, "drain": 6, "commit": 2, "abort": 3,
    },
    "much shared": {"fork": 12, "truncate": 6, "append": 8, "append_block": 8, "pin": 4, "swap_out": 1, "swap_in": 2},
    "little room": {"create": 12, "create_long": 4, "free": 8, "append_block": 8},
    "transactions": {"begin_transaction": 6, "end_transaction": 8, "undo_transaction": 4, "snapshot": 2},
}  # fmt: skip
Action = tuple[str, int, int, int]


def a_run(theme: str, seed: int) -> tuple[dict[str, Any], list[Action]]:
    """The shape of a world, and what is done in it."""
    generator = random.Random(f"{theme} {seed}")
    weights = {**dict.fromkeys(ACTIONS, 1), **WEIGHTS, **THEMES[theme]}
    names = [n for n in ACTIONS if n == "create" or generator.random() < 0.75 for _ in range(weights[n])]
    roomy = theme in ("much in flight", "out and back", "much shared", "tentative", "transactions")
    shape = {
        "mode": generator.choice(["late", "eager", "mixed"]),
        "num_blocks": generator.choice([24, 40] if roomy else [6, 10, 16, 24]),
        "block_size": generator.choice([1, 2, 3, 4]),
        "num_host_blocks": generator.choice([12, 24, 40] if roomy or theme == "from the host" else [0, 3, 6, 12, 24]),
        "most": 5 if theme == "tentative" else 4 if theme in ("out and back", "from the host") else 8,
        "alike": theme == "from the host",
        "prefix_caching": generator.random() < 0.9,
        "watermark": generator.choice([0.0, 0.0, 0.2]),
    }
    numbers = range(3)
    return shape, [(generator.choice(names), *(generator.randrange(4096) for _ in numbers)) for _ in range(LENGTH)]  # type: ignore[misc]


def failure(make: Any, actions: list[Action]) -> tuple[type[BaseException], int] | None:
    """What goes wrong, and at which action."""
    world = make()
    for number, action in enumerate(actions):
        try:
            world.perform(*action)
        except Exception as error:
            return type(error), number
    return None


def cut_down(make: Any, actions: list[Action]) -> list[Action]:
    """As few of the actions as fail in the same way."""
    fails = failure(make, actions)
    assert fails is not None
    actions = actions[: fails[1] + 1]
    size = len(actions) // 2
    while size:
        start = 0
        while start < len(actions):
            shorter = actions[:start] + actions[start + size :]
            found = failure(make, shorter)
            if found and found[0] is fails[0]:
                actions = shorter[: found[1] + 1]
            else:
                start += size
        size //= 2
    return actions


def play(make: Any, actions: list[Action], name: str) -> None:
    """Do it; if it fails, say what the shortest way there is."""
    world = make()
    try:
        for action in actions:
            world.perform(*action)
    except BaseException as error:
        if isinstance(error, Exception):
            error.add_note(f"{name}, cut down to: {cut_down(make, actions)}")
        raise


@pytest.mark.timeout(0 if FUZZ else 180)
@pytest.mark.parametrize("theme", THEMES)
def test_machine_of_any_operations(theme: str) -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + STEPS // LENGTH // len(THEMES)):
        shape, actions = a_run(theme, seed)
        play(lambda: World(**shape), actions, f"seed {seed}, World(**{shape})")  # noqa: B023


def test_what_is_swapped_back_by_two_aborts_is_nobody_elses() -> None:
    """Two sequences held one list as block table: the next token of one got the slot of the other's."""
    allocator = BlockAllocator(8, 4, num_host_blocks=8)
    seq = allocator.create([1, 2, 3, 4])
    allocator.commit(allocator.prefill([seq]))
    out = allocator.swap_out([seq])
    back = allocator.swap_in([seq])
    (fork,) = allocator.fork(seq)
    allocator.abort(back)
    allocator.abort(out)
    step = allocator.append([fork], [5])
    allocator.commit(step)
    allocator.check()
    assert (seq.block_ids, fork.block_ids, list(step.slot_mapping)) == ([0], [0, 1], [4])
    step = allocator.append([seq], [6])
    assert list(step.slot_mapping) == [8]
    allocator.commit(step)
    allocator.free(seq)
    allocator.free(fork)
    allocator.check()
    assert allocator.num_free_blocks == 8


def test_a_block_that_two_cut_sequences_do_not_get_back_stays_with_the_step_that_writes_it() -> None:
    """Both copied it on write; they were cut and the copies aborted, but the step of the prompt still writes it."""
    allocator = BlockAllocator(8, 4)
    seq = allocator.create([1, 2, 3, 4, 5, 6])
    prompt = allocator.prefill([seq])
    (fork,) = allocator.fork(seq)
    first = allocator.append([fork], [7])
    allocator.truncate(seq, 5)
    second = allocator.append([seq], [7])
    assert [list(step.copies) for step in (first, second)] == [[(1, 2)], [(1, 3)]]
    for each, step in ((seq, second), (fork, first)):
        allocator.truncate(each, 4)
        allocator.abort(step)
    others = allocator.create(allocator.num_free_blocks * 4)
    assert 1 not in others.block_ids, "the step of the prompt writes it"
    allocator.commit(prompt)
    allocator.check()
    allocator.free(others)
    assert allocator.num_free_blocks == 7


def test_an_empty_table_is_nobody_elses_either() -> None:
    allocator = BlockAllocator(8, 4, num_host_blocks=8)
    seq = allocator.create([])
    out, back = allocator.swap_out([seq]), allocator.swap_in([seq])
    (fork,) = allocator.fork(seq)
    allocator.abort(back)
    allocator.abort(out)
    allocator.commit(allocator.append([fork], [5]))
    allocator.check()
    assert (seq.block_ids, fork.block_ids) == ([], [0])


def test_only_what_a_plan_has_moved_is_cached_on_the_host() -> None:
    """The sequence came back and went out again: the commit of the first plan is not that of the last."""
    allocator = BlockAllocator(12, 4, num_host_blocks=8)
    allocator.record_events()
    seq = allocator.create([1, 2, 3, 4])
    allocator.commit(allocator.prefill([seq]))
    plans = allocator.swap_out([seq]), allocator.swap_in([seq]), allocator.swap_out([seq])
    assert [list(plan.moves[0][2]) for plan in plans] == [[0], [1], [1]]
    allocator.commit(plans[0])
    stored = [(event.memory, event.block) for event in allocator.events]
    assert ("host", 1) not in stored, "its contents have not come"
    allocator.abort(plans[2])
    allocator.abort(plans[1])
    allocator.free(allocator.create(48))  # nothing is cached on the device any more
    again = allocator.create([1, 2, 3, 4, 5])
    step = allocator.prefill([again])
    assert not [move for move in step.moves if move[0] == "swap_in" and list(move[1]) == [1]]
    allocator.check()
