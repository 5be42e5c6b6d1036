"""KVCache: layout, sizes, plans carried out in order on every layer, an engine's own tensors."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedkern import BlockAllocator, BlockIndexError, InvalidArgument, InvalidType, KVCache
from pagedkern.cache import StepInputs
from pagedkern.scheduler import Batch, Scheduler


@dataclass
class Plan:
    """A plan as the allocator makes them, by hand."""

    moves: list[tuple[str, array[int], array[int]]] = field(default_factory=list)

    def add(self, kind: str, *pairs: tuple[int, int]) -> Plan:
        self.moves.append((kind, array("q", [s for s, _ in pairs]), array("q", [d for _, d in pairs])))
        return self


def make(layout: str = "HND", **options: int) -> KVCache:
    return KVCache(2, 6, 4, 3, 8, dtype=torch.float32, device="cpu", layout=layout, num_host_blocks=3, **options)


def fill(cache: KVCache) -> list[torch.Tensor]:
    """Random contents; returns a copy of every K and V, layer by layer."""
    generator = torch.Generator().manual_seed(0)
    pools = [x for i in range(cache.num_layers) for x in cache.layer(i)]
    for pool in pools:
        pool.copy_(torch.randn(pool.shape, generator=generator))
    return [pool.clone() for pool in pools]


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_layout(layout: str) -> None:
    cache = make(layout, head_dim_v=16)
    k, v = cache.layer(1)
    assert k.shape == (6, 4, 3, 8)
    assert v.shape == (6, 4, 3, 16)
    assert k.stride() == ((96, 8, 32, 1) if layout == "HND" else (96, 24, 8, 1))
    assert cache.bytes_per_block == 2 * 4 * 3 * (8 + 16) * 4
    assert (cache.num_layers, cache.num_blocks, cache.block_size, cache.num_host_blocks) == (2, 6, 4, 3)
    assert cache.dtype == torch.float32
    assert cache.device == torch.device("cpu")


def test_layers_do_not_share_memory() -> None:
    cache = make()
    for i in range(2):
        for j, pool in enumerate(cache.layer(i)):
            pool.fill_(10 * i + j)
    assert [float(pool.unique()) for i in range(2) for pool in cache.layer(i)] == [0, 1, 10, 11]


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_moves_run_in_order_on_every_layer(layout: str) -> None:
    cache = make(layout)
    before = fill(cache)
    plan = Plan().add("copy", (0, 1), (2, 3)).add("swap_out", (1, 2), (4, 0)).add("copy", (3, 1)).add("swap_in", (2, 5))
    cache.apply(plan)
    after = [pool for i in range(2) for pool in cache.layer(i)]
    for old, new in zip(before, after, strict=True):
        origin = [
            0,
            2,
            2,
            2,
            4,
            0,
        ]  # of each block's contents: block 1 was copied from 0, swapped out, then overwritten
        assert torch.equal(new, old[origin])


def test_one_move_reads_before_it_writes() -> None:
    cache = make()
    before = fill(cache)
    cache.apply(Plan().add("copy", (0, 1), (1, 0), (1, 2)))
    for old, new in zip(before, [pool for i in range(2) for pool in cache.layer(i)], strict=True):
        assert torch.equal(new, old[[1, 0, 1, 3, 4, 5]])


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan().add("copy", (0, 1)).add("copy", (0, 6)), r"destination block 6 at place 0 of a copy move.* 0 to 5"),
        (Plan().add("copy", (0, 1)).add("copy", (-1, 2)), r"source block -1 at place 0"),
        (Plan().add("copy", (0, 1)).add("swap_out", (0, 0), (1, 3)), r"destination block 3 at place 1 .* 0 to 2"),
        (Plan().add("copy", (0, 1)).add("swap_in", (3, 1)), r"source block 3 .* 0 to 2"),
        (Plan().add("copy", (0, 1)).add("rotate", (0, 1)), r"'rotate', expected 'copy' or 'swap_out' or 'swap_in'"),
        (Plan([("copy", array("q", [0]), array("q", [1, 2]))]), r"1 sources and 2 destinations"),
        (
            Plan([("copy", array("i", [0]), array("i", [1]))]),
            r"src of a copy move: got a buffer of format 'i', 1 dimensions, expected a contiguous buffer of int64",
        ),
        (Plan().add("copy", (0, 1)).add("copy", (2, 4), (3, 4)), "a copy move that names a destination twice"),
        (Plan().add("copy", (0, 1)).add("swap_in", (0, 4), (1, 4)), "a swap_in move that names a destination twice"),
        (
            Plan([("swap_out", torch.tensor([[0]]), torch.tensor([[1]]))]).add("copy", (0, 1)),
            "src has 2 dimensions, expected an int64 vector",
        ),
    ],
)
def test_a_wrong_plan_changes_nothing(plan: Plan, words: str) -> None:
    cache = make()
    before = fill(cache)
    with pytest.raises(InvalidArgument, match=words) as caught:
        cache.apply(plan)
    assert isinstance(caught.value, BlockIndexError) == ("block " in words)
    for old, new in zip(before, [pool for i in range(2) for pool in cache.layer(i)], strict=True):
        assert torch.equal(new, old)


def test_over_an_engines_own_tensors() -> None:
    fused = torch.arange(2 * 5 * 2 * 4 * 3 * 8, dtype=torch.float32).view(
        2, 5, 2, 4, 3, 8
    )  # K and V of a block side by side
    expected = fused.clone()
    expected[:, 4] = expected[:, 1]
    cache = KVCache.from_layers([(layer[:, 0], layer[:, 1]) for layer in fused])
    assert cache.layer(0)[1].data_ptr() == fused[0, :, 1].data_ptr()
    assert cache.bytes_per_block == 2 * 2 * 4 * 3 * 8 * 4
    cache.apply(Plan().add("copy", (1, 4)))
    assert torch.equal(fused, expected)
    assert cache.num_host_blocks == 0


def test_layers_must_agree() -> None:
    k = torch.zeros(5, 4, 3, 8)
    other = torch.zeros(6, 4, 3, 8)
    with pytest.raises(
        InvalidArgument, match=r"layers\[1\]: got \[6, 4\] blocks and block size.*expected those of layer 0"
    ):
        KVCache.from_layers([(k, k.clone()), (other, other.clone())])
    with pytest.raises(InvalidArgument, match="layers: got no layer"):
        KVCache.from_layers([])


def test_no_layer_of_that_index() -> None:
    with pytest.raises(InvalidArgument, match=r"index: got 2, expected an integer from 0 to 1"):
        make().layer(2)
    with pytest.raises(InvalidArgument, match="index: got -1"):
        make().layer(-1)


def test_inputs_of_a_step() -> None:
    """Tensors over the step's own buffers, in the shapes that the operations take; also of a step of nothing."""
    allocator = BlockAllocator(6, 4)
    cache = make()
    one, two = allocator.create([1, 2, 3, 4, 5]), allocator.create([9])
    step = allocator.prefill([one, two])
    inputs = cache.inputs(step)
    assert inputs.block_table.tolist() == [one.block_ids, [*two.block_ids, -1]]
    assert inputs.block_table.dtype == inputs.seq_lens.dtype == inputs.cu_seqlens_q.dtype == torch.int32
    assert inputs.seq_lens.tolist() == [5, 1]
    assert inputs.cu_seqlens_q.tolist() == [0, 5, 6]
    assert inputs.max_seqlen_q == 5
    first, last = one.block_ids
    assert inputs.slot_mapping.tolist() == [*range(4 * first, 4 * first + 4), 4 * last, 4 * two.block_ids[0]]
    allocator.commit(step)
    assert inputs.positions.tolist() == [0, 1, 2, 3, 4, 0]
    assert (inputs.token_ids, inputs.logits_rows) == (None, None), "which a step does not know"
    nothing = cache.inputs(allocator.append([]))
    assert [tuple(x.shape) for x in nothing[:5] if isinstance(x, torch.Tensor)] == [(0, 0), (0,), (1,), (0,)]
    assert (nothing.positions.dtype, nothing.positions.shape) == (torch.int64, (0,))


LONG = ("slot_mapping", "token_ids", "positions", "logits_rows")  # int64, whether or not they are empty
SHORT = ("block_table", "seq_lens", "cu_seqlens_q")  # int32


def check_inputs(inputs: StepInputs[Any], batch: Batch) -> None:
    """Everything that a batch says, as tensors of the right dtype."""
    for name in (*LONG, *SHORT):
        array = getattr(inputs, name)
        assert array.dtype == (torch.int64 if name in LONG else torch.int32), name
        assert array.tolist() == getattr(batch, name).tolist(), name
    assert inputs.max_seqlen_q == batch.max_seqlen_q
    embedding, logits = torch.arange(100.0), torch.randn(batch.num_tokens, 7)
    assert embedding[inputs.token_ids].tolist() == list(batch.token_ids)
    assert logits[inputs.logits_rows].shape == (len(batch.outputs), 7)


def test_inputs_of_a_batch_without_tokens_or_outputs() -> None:
    """A chunk of a prompt, after which nothing is drawn; a batch that only moves blocks; and none at all."""
    cache = make()
    scheduler = Scheduler(BlockAllocator(6, 4), token_budget=4)
    nothing = scheduler.schedule()
    check_inputs(cache.inputs(nothing), nothing)
    assert nothing.num_seqs == 0
    scheduler.complete(nothing, [])
    scheduler.add(range(10, 20), max_tokens=2)
    chunk = scheduler.schedule()
    assert (chunk.num_tokens, len(chunk.outputs)) == (4, 0)
    inputs = cache.inputs(chunk)
    check_inputs(inputs, chunk)
    assert inputs.token_ids.tolist() == [10, 11, 12, 13]
    assert inputs.logits_rows.tolist() == []
    scheduler.complete(chunk, [])
    second = scheduler.schedule()
    assert cache.inputs(second).positions.tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_inputs_of_random_batches(seed: int, policy: str) -> None:
    """Mixed ones, chunks, samples of one prompt, preempted and resumed ones, and those that only move."""
    rng = random.Random(seed)
    cache = KVCache(1, 12, 4, 1, 8, dtype=torch.float32, device="cpu", num_host_blocks=14)
    allocator = BlockAllocator(12, 4, num_host_blocks=14)
    scheduler = Scheduler(allocator, policy=policy, token_budget=rng.choice([3, 9, 20]))
    for i in range(8):
        prompt = [rng.randrange(100) for _ in range(rng.randint(2, 12))]
        scheduler.add(prompt, max_tokens=rng.randint(6, 14), n=1 + i % 2)
    while scheduler.has_work:
        batch = scheduler.schedule()
        cache.apply(batch)
        inputs = cache.inputs(batch)
        check_inputs(inputs, batch)
        for step in batch.steps:
            whole = cache.inputs(step)
            assert whole.positions.tolist() in (
                inputs.positions[: step.num_tokens].tolist(),
                inputs.positions[batch.num_tokens - step.num_tokens :].tolist(),
            )
        scheduler.complete(batch, [rng.randrange(100) for _ in batch.outputs])


def test_inputs_of_batches_that_only_move() -> None:
    cache = make()
    scheduler = Scheduler(BlockAllocator(6, 4, num_host_blocks=3), policy="swap")
    for start in (10, 50):
        scheduler.add(range(start, start + 10), max_tokens=12)
    only_moves = 0
    while scheduler.has_work:
        batch = scheduler.schedule()
        cache.apply(batch)
        check_inputs(cache.inputs(batch), batch)
        only_moves += bool(batch.moves) and not batch.num_tokens
        scheduler.complete(batch, [7] * len(batch.outputs))
    assert only_moves == 2


def test_inputs_go_to_the_device_of_the_cache() -> None:
    cache = KVCache(1, 6, 4, 1, 8, dtype=torch.float32, device="meta")
    scheduler = Scheduler(BlockAllocator(6, 4), token_budget=9)
    scheduler.add(range(7), max_tokens=2)
    for batch in (Scheduler(BlockAllocator(6, 4)).schedule(), scheduler.schedule()):
        inputs = cache.inputs(batch)
        for name in (*LONG, *SHORT):
            array = getattr(inputs, name)
            assert array.device.type == "meta"
            assert array.dtype == (torch.int64 if name in LONG else torch.int32)
        assert inputs.token_ids.shape == inputs.positions.shape == inputs.slot_mapping.shape == (batch.num_tokens,)


def test_made_in_inference_mode_and_written_outside() -> None:
    with torch.inference_mode():
        cache = make()
    for pool in cache.layer(0):
        pool.zero_()
    cache.apply(Plan().add("copy", (0, 1)))


def test_layers_that_share_a_cache_are_copied_once() -> None:
    k, v = torch.arange(3.0).repeat_interleave(64).view(2, 3, 4, 2, 4).unbind(0)
    cache = KVCache.from_layers([(k, v), (k, v)])
    assert cache.num_layers == 2
    assert cache.bytes_per_block == 2 * 4 * 2 * 4 * 4
    before = k.clone()
    cache.apply(Plan().add("copy", (0, 1), (1, 0)))
    assert torch.equal(k, before[[1, 0, 2]])


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (None, "plan: got NoneType, expected a Step or Plan"),
        (Plan([("copy", [0], [1])]), "src of a copy move: got list, expected a contiguous buffer of int64"),
        (Plan([("copy", torch.tensor([0.5]), torch.tensor([1.0]))]), r"src of a copy move: got dtype torch.float32"),
        (
            Plan([("copy", memoryview(array("q", [0, 1, 2]))[::2], array("q", [1, 2]))]),
            "got a strided buffer, expected a contiguous",
        ),
        (Plan([("copy",)]), r"plan: moves: expected tuples \(kind, src, dst\)"),  # type: ignore[list-item]
        (Plan(None), "plan: moves: expected tuples"),  # type: ignore[arg-type]
        (Plan([(["copy"], array("q", [0]), array("q", [1]))]), r"a move of kind \['copy'\]"),
    ],
)
def test_what_is_no_plan(plan: object, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        make().apply(plan)


def handmade(**fields: object) -> SimpleNamespace:
    """A step that no allocator made."""
    table = memoryview(array("i", [0, 1])).cast("B").cast("i", (1, 2))
    step = {"moves": (), "block_table": table, "seq_lens": array("i", [5]), "cu_seqlens_q": array("i", [0, 1])}
    return SimpleNamespace(**{**step, "max_seqlen_q": 1, "slot_mapping": array("q", [4]), **fields})


def test_positions_of_a_handmade_step() -> None:
    """Padding rows, more queries than tokens, and tokens of no sequence stand at 0; other orders do not matter."""
    table = array("i", [0, 1, 2, 3])
    step = handmade(
        block_table=table,
        seq_lens=array("i", [0, 9, 2, 5]),
        cu_seqlens_q=array("i", [0, 1, 4, 8, 8]),
        max_seqlen_q=4,
        slot_mapping=array("q", [-1, 4, 5, 6, -1, -1, 7, 8, -1, -1]),
        token_ids=array("q", range(10)),
        logits_rows=array("q", [7, 3]),
    )
    inputs = make().inputs(step)
    assert inputs.positions.tolist() == [0, 6, 7, 8, 0, 0, 0, 1, 0, 0]
    assert (inputs.token_ids.tolist(), inputs.logits_rows.tolist()) == ([*range(10)], [7, 3])
    padded = handmade(seq_lens=array("i", [0]), slot_mapping=array("q", [-1]))
    assert make().inputs(padded).positions.tolist() == [0]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("block_table", [[0, 1]], "step: block_table: got list, expected a contiguous buffer of int32"),
        ("block_table", torch.tensor([[0, 1]]), "step: block_table: got Tensor"),
        ("block_table", array("q", [0, 1]), "step: block_table: got a buffer of format 'q'"),
        ("block_table", array("f", [0, 1]), "step: block_table: got a buffer of format 'f'"),
        ("seq_lens", array("i", [5, 5, 5]), "step: block_table: got 2 entries for 3 sequences"),
        ("seq_lens", array("i"), "step: block_table: got 2 entries for 0 sequences"),
        ("seq_lens", [5], "step: seq_lens: got list"),
        ("cu_seqlens_q", None, "step: cu_seqlens_q: got NoneType"),
        ("slot_mapping", array("i", [4]), "step: slot_mapping: got a buffer of format 'i'.* of int64"),
        ("slot_mapping", memoryview(array("q", [4, 5, 6]))[::2], "step: slot_mapping: got a strided buffer"),
        ("cu_seqlens_q", array("i", [0, 1, 1]), "step: cu_seqlens_q: got 3 entries for 1 sequences, expected 2"),
        ("cu_seqlens_q", array("i", [1, 1]), r"step: cu_seqlens_q: got \[1, 1\], expected prefix sums from 0"),
        ("cu_seqlens_q", array("i", [0, -1]), r"step: cu_seqlens_q: got \[0, -1\], expected prefix sums from 0"),
        ("cu_seqlens_q", array("i", [0, 2]), r"step: cu_seqlens_q: got \[0, 2\], expected .* at most 1, the slots"),
        ("token_ids", array("q", [1, 2]), "step: token_ids: got 2, expected one for each of 1 slots"),
        ("token_ids", [1], "step: token_ids: got list"),
        ("token_ids", array("i", [1]), "step: token_ids: got a buffer of format 'i'.* of int64"),
        ("logits_rows", torch.tensor([0]), "step: logits_rows: got Tensor"),
    ],
)
def test_a_handmade_step_of_other_arrays(field: str, value: object, words: str) -> None:
    assert make().inputs(handmade()).block_table.tolist() == [[0, 1]]
    with pytest.raises(InvalidArgument, match=words):
        make().inputs(handmade(**{field: value}))


def test_an_allocator_of_other_blocks() -> None:
    cache, allocator = make(), BlockAllocator(6, 8, num_host_blocks=3)
    scheduler = Scheduler(BlockAllocator(6, 8), token_budget=8)
    seq = allocator.create([1, 2, 3])
    step = allocator.prefill([seq])
    empty = scheduler.schedule()
    assert empty.block_size is None
    scheduler.complete(empty, [])
    scheduler.add([1, 2, 3], max_tokens=1)
    before = fill(cache)
    for made in (step, scheduler.schedule()):
        assert made.block_size == 8
        with pytest.raises(InvalidArgument, match=r"step: got one for blocks of 8 tokens, expected .* 4, as the cache"):
            cache.inputs(made)
    allocator.commit(step)
    out = allocator.swap_out([seq])
    with pytest.raises(InvalidArgument, match=r"plan: got one for blocks of 8 tokens, expected .* 4, as the cache"):
        cache.apply(Plan().add("copy", (0, 1)), out)
    assert all(
        torch.equal(old, new) for old, new in zip(before, [x for i in range(2) for x in cache.layer(i)], strict=True)
    )


def test_an_allocator_of_more_blocks() -> None:
    cache, allocator = make(), BlockAllocator(7, 4)
    step = allocator.prefill([allocator.create([1, 2, 3])])
    scheduler = Scheduler(BlockAllocator(7, 4), token_budget=8)
    assert scheduler.schedule().num_blocks is None
    scheduler = Scheduler(BlockAllocator(7, 4), token_budget=8)
    scheduler.add([1, 2, 3], max_tokens=1)
    for made in (step, scheduler.schedule()):
        assert made.num_blocks == 7
        with pytest.raises(InvalidArgument, match=r"step: got one for a pool of 7 blocks, expected .* at most 6"):
            cache.inputs(made)
        with pytest.raises(InvalidArgument, match=r"plan: got one for a pool of 7 blocks, expected .* at most 6"):
            cache.apply(made)
    fewer = BlockAllocator(5, 4)
    step = fewer.prefill([fewer.create([1, 2, 3])])
    cache.apply(step)
    assert cache.inputs(step).seq_lens.tolist() == [3]


def test_what_is_no_step() -> None:
    with pytest.raises(InvalidType, match="step: got NoneType, expected a Step or Batch"):
        make().inputs(None)


@pytest.mark.parametrize(
    "table", [[[0, 1]], torch.tensor([[0, 1]]), array("q", [0, 1])], ids=["list", "tensor", "int64"]
)
def test_a_handmade_table_is_checked_before_anything_is_moved(table: object) -> None:
    cache = make()
    before = fill(cache)
    moves = (("copy", array("q", [0]), array("q", [1])), ("swap_in", array("q", [0]), array("q", [2])))
    with pytest.raises(InvalidArgument, match="plan: block_table: got "):
        cache.apply(handmade(moves=moves, block_table=table))
    for old, new in zip(before, [pool for i in range(2) for pool in cache.layer(i)], strict=True):
        assert torch.equal(new, old)


def test_what_is_no_layer() -> None:
    k = torch.zeros(2, 4, 1, 8)
    with pytest.raises(InvalidArgument, match="layers: got NoneType"):
        KVCache.from_layers(None)
    with pytest.raises(InvalidArgument, match=r"layers\[0\]: got Tensor, expected a pair"):
        KVCache.from_layers([k, k])
    with pytest.raises(InvalidArgument, match=r"layers\[0\]: v_cache: got dtype"):
        KVCache.from_layers([(k, k.half())])


def test_sizes_beyond_block_ids() -> None:
    with pytest.raises(
        InvalidArgument, match="num_blocks: got 1180591620717411303424, expected an integer >= 1, at most"
    ):
        KVCache(1, 2**70, 4, 1, 8, dtype=torch.float32, device="cpu")
    with pytest.raises(InvalidArgument, match="device: got 'xpu', expected a torch device of this machine"):
        KVCache(1, 2, 4, 1, 8, dtype=torch.float32, device="xpu")
    with pytest.raises(InvalidArgument, match=r"destination block 0 .* expected none: the host pool is empty"):
        KVCache(1, 2, 4, 1, 8, dtype=torch.float32, device="cpu").apply(Plan().add("swap_out", (0, 0)))
