"""Any sequence of operations, on the allocator and on the naive model: no difference, and no content ever wrong.

Three drivers: hypothesis finds the short, odd sequences and shrinks them; one seeded driver keeps a plausible engine
running, the other one draws for each run which operations are frequent, rare or left out: without commits in between,
say, plans pile up and are taken back in long rows. Each does 20,000 operations, the same ones in every run. With
HYPOTHESIS_PROFILE=fuzz they differ from run to run, and there are 50 times FUZZ_EXAMPLES of them.
"""

from __future__ import annotations

import os
import random
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.allocator.world import ACTIONS, World

LENGTH = 50
FUZZ = os.environ.get("HYPOTHESIS_PROFILE") == "fuzz"
STEPS = LENGTH * int(os.environ.get("FUZZ_EXAMPLES", "2000")) if FUZZ else 20_000
FIRST_SEED = random.randrange(10**9) if FUZZ else 0
LIMIT = pytest.mark.timeout(0 if FUZZ else 180)
NUMBER = st.integers(0, 4095)


class Machine(RuleBasedStateMachine):
    """One rule for each action of the world."""

    world = World()

    @initialize(
        num_blocks=st.integers(4, 32),
        block_size=st.sampled_from([1, 2, 3, 4, 8]),
        num_host_blocks=st.integers(0, 20),
        caching=st.sampled_from([True, True, True, False]),
        watermark=st.sampled_from([0.0, 0.0, 0.2]),
    )
    def start(self, **shape: Any) -> None:
        self.world = World(**shape)

    @invariant()
    def nothing_differs(self) -> None:
        self.world.compare()


def _rule(name: str) -> object:
    def act(self: Machine, a: int, b: int, c: int) -> None:
        getattr(self.world, name)(a, b, c)

    act.__name__ = name
    return rule(a=NUMBER, b=NUMBER, c=NUMBER)(act)


for _name in ACTIONS:
    setattr(Machine, f"do_{_name}", _rule(_name))

TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=max(1, STEPS // LENGTH),
    stateful_step_count=LENGTH,
    deadline=None,
    derandomize=not FUZZ,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestMachine = pytest.mark.timeout(0 if STEPS > 20000 else 180)(TestMachine)

WEIGHTS = {
    "create": 6,
    "prefill": 8,
    "append": 6,
    "append_known": 4,
    "append_again": 6,
    "drain": 8,
    "free": 6,
    "commit": 5,
}


@LIMIT
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("driver", ["engine", "swarm"])
def test_fuzz(driver: str, part: int) -> None:
    done = 0
    for seed in count(FIRST_SEED + part * 1_000_000):
        if done >= STEPS // 10:
            break
        generator = random.Random(seed)
        if driver == "engine":
            weights = [WEIGHTS.get(name, 2) for name in ACTIONS]
        else:
            weights = [generator.choice([0, 0, 1, 1, 4, 12]) + (name == "create") for name in ACTIONS]
        world = World(
            generator.choice([6, 12, 24, 40]),
            generator.choice([1, 2, 3, 4, 5, 16]),
            generator.choice([0, 5, 20, 50]),
            generator.random() < 0.85,
            generator.choice([0.0, 0.0, 0.2]),
        )
        history = []
        for action in generator.choices(ACTIONS, weights, k=250 if driver == "engine" else 120):
            numbers = [generator.randrange(4096) for _ in range(3)]
            history.append((action, *numbers))
            try:
                getattr(world, action)(*numbers)
                world.compare()
            except BaseException as error:
                error.add_note(f"{driver}, seed {seed}, after {len(history)} actions, the last ones: {history[-8:]}")
                raise
            done += 1
