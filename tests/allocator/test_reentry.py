"""Arguments that run code of the caller's: lazy lists, `__index__`, `__eq__`. None of it comes between two changes."""

from __future__ import annotations

import enum
import io
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from pagedkern.allocator import BlockAllocator, Sequence, Verdict
from pagedkern.allocator.replay import replay
from pagedkern.errors import InvalidArgument, InvalidType, OutOfBlocks, PagedKernError, StaleSequence
from tests.allocator.world import fingerprint


class Scene:
    """Two computed prompts."""

    def __init__(self) -> None:
        self.a = BlockAllocator(7, 4, num_host_blocks=4)
        self.s, self.t = self.a.create([1, 2, 3, 4, 5]), self.a.create([9, 8, 7, 6, 5])
        self.a.commit(self.a.prefill([self.s, self.t]))

    def looks(self, *seqs: Sequence) -> Iterator[Sequence]:
        """Sequences, with a call of the allocator for each."""
        for seq in seqs:
            assert self.a.can_allocate(1) is Verdict.OK
            yield seq


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_lazy_batch_that_calls_the_allocator_is_all_or_nothing(scene: Scene) -> None:
    a, s, t = scene.a, scene.s, scene.t
    before = fingerprint(a)
    with pytest.raises(OutOfBlocks):
        a.append(scene.looks(s, t), [[1] * 4, [2] * 20])
    assert fingerprint(a) == before
    a.check()
    a.commit(a.append([s], [[70, 71, 72, 73]]))
    other = a.create([1, 2, 3, 4, 5, 1, 1, 1, 0])
    assert other.num_cached_tokens == 4, "the second block holds 5 70 71 72"
    a.free(other)
    assert a.append(scene.looks(s), iter([74])).num_tokens == 1, "and one that fits is served"
    a.check()


def test_lazy_tokens_that_free_a_sequence_of_the_batch(scene: Scene) -> None:
    a, s, t = scene.a, scene.s, scene.t

    def sample() -> Iterator[int]:
        yield 1
        a.free(t)
        yield 2

    with pytest.raises(StaleSequence):
        a.append([s, t], sample())
    a.check()
    assert (s.num_tokens, a.num_free_blocks) == (5, 5), "only the free has happened"


class Calls:
    """An argument that does something when it is looked at."""

    def __init__(self, do: Callable[[], object]) -> None:
        self.do = do

    def __index__(self) -> int:
        self.do()
        return 1

    def lazily(self) -> Iterator[int]:
        yield self.__index__()


class Salt(str):
    """A salt that does something when it is compared."""

    do: Callable[[], object]
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        self.do()
        return str.__eq__(self, other)


class Number(enum.IntEnum):
    ONE = 1


class Raw(bytes):
    pass


INSIDE: dict[str, Callable[[Scene, Calls], object]] = {
    "a token": lambda s, c: s.a.append([s.s, s.t], [1, c]),
    "ids in a list": lambda s, c: s.a.append([s.s, s.t], [[1], c.lazily()]),
    "num_tokens": lambda s, c: s.a.append([s.s], num_tokens=c),
    "lookahead": lambda s, c: s.a.append([s.s], [1], lookahead=c),
    "fork": lambda s, c: s.a.fork(s.s, c),
    "truncate": lambda s, c: s.a.truncate(s.s, c),
    "release_window": lambda s, c: s.a.release_window(s.s, c),
    "create": lambda s, c: s.a.create([1, c]),
    "priority": lambda s, c: s.a.create(1, priority=c),
    "max_tokens": lambda s, c: s.a.mixed([s.s], [1], [], c),
}
WITHIN: dict[str, Callable[[Scene], object]] = {
    "can_allocate": lambda s: s.a.can_allocate(1),
    "free": lambda s: s.a.free(s.t),
    "snapshot": lambda s: s.a.snapshot(),
    "log": lambda s: s.a.log_to(io.StringIO()),
    "record_events": lambda s: s.a.record_events(),
    "transaction": lambda s: s.a.transaction().__enter__(),
}


@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("fast", [False, True])
def test_a_call_within_a_call_is_refused(scene: Scene, name: str, within: str, fast: bool) -> None:
    if fast:
        for _ in range(2):
            scene.a.commit(scene.a.append([scene.s, scene.t], [1, 2]))
    before = fingerprint(scene.a) if not fast else None
    with pytest.raises(InvalidArgument, match="another operation of this allocator is running"):
        INSIDE[name](scene, Calls(lambda: WITHIN[within](scene)))
    assert before is None or fingerprint(scene.a) == before
    scene.a.check()
    scene.a.free(scene.t)
    scene.a.check()


def test_a_call_within_a_call_that_swallows_the_refusal_changes_nothing_else(scene: Scene) -> None:
    refused: list[PagedKernError] = []

    def do() -> None:
        try:
            scene.a.free(scene.t)
        except PagedKernError as error:
            refused.append(error)

    step = scene.a.append([scene.s, scene.t], [1, Calls(do)])  # type: ignore[list-item]
    assert refused
    assert step.num_tokens == 2
    assert scene.t.state == "live"
    scene.a.check()


def test_salts_are_taken_as_plain_values(scene: Scene) -> None:
    salt = Salt("x")
    salt.do = lambda: scene.a.free(scene.t)
    a = scene.a
    a.create([1, 2, 3], salt="x")
    seq = a.create([1, 2, 3], salt=salt)
    assert type(seq._salt) is str
    assert [type(a.create([], salt=given)._salt) for given in (Number.ONE, Raw(b"x"))] == [int, bytes]
    assert a.digests([1, 2, 3, 4], salt=Number.ONE) == a.digests([1, 2, 3, 4], salt=1)
    assert scene.t.state == "live"


def test_check_within_a_call_says_so(scene: Scene) -> None:
    with pytest.raises(AssertionError, match="an operation is running"):
        scene.a.fork(scene.s, Calls(scene.a.check))  # type: ignore[arg-type]
    scene.a.check()


@pytest.mark.parametrize("logged", [False, True])
def test_lazy_arguments_by_name(scene: Scene, logged: bool) -> None:
    a, file = scene.a, io.StringIO()
    if logged:
        a.log_to(file)
    new = a.create(tokens=iter([1, 2, 3]))
    assert new.num_tokens == 3
    assert a.prefill(seqs=iter([new])).seqs == (new,)
    step = a.append(seqs=iter([scene.s, scene.t]), tokens=iter([iter([1, 2]), 3]))
    assert list(step.cu_seqlens_q) == [0, 2, 3]
    step = a.mixed(appending=scene.looks(scene.s), tokens=iter([4]), prefilling=iter([]))
    assert step.num_tokens == 1
    assert not logged or replay(file.getvalue().splitlines()) is None


def test_mappings_are_no_list_of_ids(scene: Scene) -> None:
    for call in (scene.a.create, scene.a.can_allocate, lambda ids: scene.a.append([scene.s], [ids])):
        with pytest.raises(InvalidType, match="dict"):
            call({1: 2})


def test_salts_of_text_and_of_bytes_are_never_compared() -> None:
    code = (
        "from pagedkern.allocator import BlockAllocator as B; a = B(8, 1)\n"
        "for salt in ('1', b'1', 1): a.create([1, 2], salt=salt)\n"
        "assert B.restore(a.snapshot()).check() is None and len({n for _, n in a._ledger.roots.items()}) == 3"
    )
    subprocess.run([sys.executable, "-bb", "-c", code], check=True, timeout=60)
