"""Damaged snapshots: whatever is replaced or lacking, `restore` says which field."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from pagedkern.allocator import BlockAllocator, Sequence
from pagedkern.errors import InvalidArgument


def computed(allocator: BlockAllocator, tokens: list[int], **options: Any) -> Sequence:
    seq = allocator.create(tokens, **options)
    allocator.commit(allocator.prefill([seq]))
    return seq


def snapshot() -> dict[str, Any]:
    """With something in every field."""
    a = BlockAllocator(16, 2, num_host_blocks=8, watermark=0.25)
    computed(a, [1, 2, 3, 4, 5], salt=b"x")
    away = computed(a, [7, 8, 9, 10, 11], salt="y")
    twin = a.fork(away)[0]
    a.commit(a.swap_out([away]))
    a.free(twin)
    a.free(computed(a, [20, 21, 22], priority=2))
    keep = computed(a, [30, 31, 32])
    other = a.fork(keep)[0]
    a.commit(a.swap_out([other]))
    a.clear_cache()
    gone = computed(a, [40, 41, 42, 43])
    a.commit(a.swap_out([gone]))
    a.free(a.create(16))
    fill = a.create(2 * a.num_free_blocks)
    a.free(fill)
    a.create([40, 41, 42, 43, 44])
    a.free(computed(a, [50, 51, 52], priority=1))
    state = a.snapshot()
    assert all(state[name] for name in ("roots", "sequences", "twins", "incoming"))
    assert all(state["device"][name] for name in ("blank", "levels", "index"))
    assert state["device"]["index"]["cached"]
    assert state["host"]["index"]["cached"]
    return json.loads(json.dumps(state))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to everything inside, but not to token ids, of which any will do."""
    if "tokens" in path[-2:-1]:
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(item, (dict, list)):
            yield from places(item, (*path, key))


def test_it_is_restored() -> None:
    assert BlockAllocator.restore(snapshot()).snapshot() == snapshot()


@pytest.mark.parametrize("damage", ["x", None, -7, 2**70, 1.5, [], {}, "gone"], ids=str)
def test_damage_of_each_field(damage: object) -> None:
    original = snapshot()
    refused = 0
    for path in places(original):
        state = copy.deepcopy(original)
        part = state
        for key in path[:-1]:
            part = part[key]
        if damage == "gone":
            del part[path[-1]]
        else:
            part[path[-1]] = damage
        try:
            BlockAllocator.restore(state).check()  # a few are as good as what was there: a salt, a count
        except InvalidArgument:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{path}: {damage!r} gives {error!r}") from error
    assert refused > 0.5 * len(list(places(original)))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["reserve"], "x", "reserve: got 'x'"),
        (["reserve"], 17, "reserve: got 17"),
        (["last_seq"], 0, "sequences: sequence 1: id: got 1"),
        (["num_blocks"], 0, "num_blocks: got 0"),
        (["device", "idle"], [], "device: idle: got"),
        (["host", "idle"], [[], [], [], [99]], r"host: idle\[3\]\[0\]: got 99"),
        (["device", "levels"], [[0, 4]], "device: levels: got 4"),
        (["device", "blank"], [], "do not fit together: device"),
        (["host", "index", "next_node"], 1, "host: index.next_node: got 1"),
        (["sequences", 0, "computed"], 10**6, "do not fit together: sequence 1"),
        (["sequences", 0, "state"], "asleep", "sequences: .*asleep"),
        (["counts", "forks"], -1, "counts.forks: got -1"),
        (["twins"], [[0, 99]], "twins: .*99"),
        (["roots"], [["a", 1], ["b", 1]], "roots: two salts"),
        (["roots"], [[True, 1]], "roots: .*bool"),
    ],
)
def test_the_field_at_fault_is_named(path: list[Any], value: object, message: str) -> None:
    state: Any = snapshot()
    part = state
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    with pytest.raises(InvalidArgument, match=message):
        BlockAllocator.restore(state)


def test_a_missing_field_is_named() -> None:
    for name in snapshot():
        if name != "pagedkern_allocator":
            state = snapshot()
            del state[name]
            with pytest.raises(InvalidArgument, match=f"'{name}' is missing"):
                BlockAllocator.restore(state)
