"""From tensors to compiled kernels: records of addresses, scratch memory, threads, and errors with names in them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

import torch
from numba.core import config
from numba.core.types import int64
from torch import Tensor

from pagedkern.backends import forked
from pagedkern.backends.base import ITEMSIZE, AttentionCall, CopyCall, MergeCall, WriteCall
from pagedkern.backends.checked import check_copy
from pagedkern.backends.cpu import convert, kernels, plan, states, store
from pagedkern.backends.cpu.jit import Entry, TargetValue, record, target
from pagedkern.backends.cpu.micro import LINE, TILE
from pagedkern.backends.cpu.pool import POOL
from pagedkern.backends.cpu.scratch import ADDRESSES, HEAD, Work
from pagedkern.environment import limits
from pagedkern.errors import BlockIndexError

PLAN = Entry(plan.plan, "planner", record(plan.Args), int64, int64, int64)
FIND_BAD_BLOCK = Entry(plan.find_bad_block, "block table check", record(plan.Args))
ATTEND = Entry(kernels.attend, "attention kernel", record(plan.Args), record(Work))
FIND_BAD_SLOT = Entry(store.find_bad_slot, "slot check", record(store.Write))
WRITE = Entry(store.write, "write kernel", record(store.Write), record(store.Rows), record(store.Rows))

COPY = Entry(store.copy_blocks, "copy kernel", record(store.Copies))
MERGE = Entry(states.merge, "merge kernel", record(states.Merge), record(states.Side), record(states.Side))

CPU = torch.device("cpu")  # said for each tensor made here: what torch has for a default is the caller's
WORTH_A_THREAD = 1 << 18  # bytes of K and V; waking a helper takes about as long as reading them
PIECE = 1 << 14  # elements; torch takes threads for twice as many
ITEMS = 4  # for each thread, at the least: what is more is taken together, several KV heads in one


def threads() -> int:
    """How many threads a call may use: torch's number, bounded by NUMBA_NUM_THREADS and by the processors that a
    container may use at a time, which torch does not look at."""
    bound = int(config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    return max(1, min(forked.num_threads(), bound, limits.quota() or bound))


def attention(call: AttentionCall, span: int, isa: str = "native") -> None:
    """See `base.AttentionCall`. `isa` is for tests: "portable" leaves out what only some processors have."""
    tg = target(_name(call.k_cache.dtype), isa, _name(call.q.dtype))
    neutral = target("float32", isa)
    args, keep = _args(call, span)
    n_groups, n_items, n_partial, read, status, where, value = PLAN.get(neutral)(args, 1, 0, 0, neutral)
    if status == plan.BAD_LENGTH:
        most = f"{args.width} blocks * {args.block_size} tokens"
        raise BlockIndexError(f"seq_lens[{where}] is {value}, expected 0 to {args.width * args.block_size} ({most})")
    if status == plan.BAD_START:
        raise BlockIndexError(
            f"cu_seqlens_q[{where}] is {value}, expected prefix sums from 0 to at most {args.tokens} (rows of q)"
        )
    records = torch.empty(n_groups * plan.GROUP_SIZE + n_items * plan.ITEM_SIZE, dtype=torch.uint8, device=CPU)
    groups = records.data_ptr()
    items = groups + n_groups * plan.GROUP_SIZE
    together = max(1, n_items // (ITEMS * threads()))  # makes fewer groups and items, the same results
    n_groups, n_items, *_ = PLAN.get(neutral)(args, together, groups, items, neutral)
    size = read * (args.d + args.e) * call.k_cache.element_size()
    n_threads = max(1, min(threads(), n_items, size // WORTH_A_THREAD))
    work, counters, memory = _work(args, tg, groups, items, n_items, n_partial, n_threads)
    attend = ATTEND.get(tg)
    POOL.run(lambda: attend(args, work, tg), n_threads)
    if counters[2]:  # C_BAD
        i, j, block = FIND_BAD_BLOCK.get(neutral)(args, neutral)
        if i < 0:
            raise BlockIndexError("block_table was written during the call, and held a block id out of range meanwhile")
        raise BlockIndexError(
            f"block_table[{i}, {j}] is {block} (sequence {i}, tokens from {j * args.block_size}), "
            f"expected 0 to {args.blocks - 1}"
        )
    del keep, memory


def _args(call: AttentionCall, span: int) -> tuple[plan.Args, list[Tensor]]:
    """The record of a call, and the tensors that its addresses point into."""
    keep: list[Tensor] = []

    def held(x: Tensor) -> int:
        keep.append(x)
        return x.data_ptr()

    def flat(x: Tensor | None) -> int:
        return 0 if x is None else held(x.contiguous())

    def copied(x: Tensor | None) -> int:
        return 0 if x is None else held(_copy(x))

    q, k, v, out, lse = call.q, call.k_cache, call.v_cache, call.out, call.lse
    item, size = q.element_size(), k.element_size()
    k_stride, v_stride = k.stride(), v.stride()
    args = plan.Args(
        q=q.data_ptr(), q_token=q.stride(0) * item, q_head=q.stride(1) * item, q_code=convert.CODES[_name(q.dtype)],
        k=k.data_ptr(), k_block=k_stride[0] * size, k_slot=k_stride[1] * size, k_head=k_stride[2] * size,
        v=v.data_ptr(), v_block=v_stride[0] * size, v_slot=v_stride[1] * size, v_head=v_stride[2] * size,
        table=call.block_table.data_ptr(), table_row=call.block_table.stride(0) * 4, width=call.block_table.shape[1],
        seq_lens=copied(call.seq_lens), cu=copied(call.cu_seqlens_q),
        out=out.data_ptr(), out_token=out.stride(0) * item, out_head=out.stride(1) * item,
        lse=0 if lse is None else lse.data_ptr(),
        lse_token=0 if lse is None else lse.stride(0) * 4, lse_head=0 if lse is None else lse.stride(1) * 4,
        alibi=flat(call.alibi_slopes), sinks=flat(call.sinks), k_scale=flat(call.k_scale), v_scale=flat(call.v_scale),
        seqs=call.seq_lens.shape[0], tokens=q.shape[0], heads=q.shape[1], kv_heads=k.shape[2],
        d=q.shape[2], e=v.shape[3],
        blocks=k.shape[0], block_size=k.shape[1], causal=int(call.causal), window=call.sliding_window or 0, span=span,
        scale=float(call.scale), cap=float(call.softcap or 0.0),
    )  # fmt: skip
    return args, keep


def _work(
    args: plan.Args, tg: TargetValue, groups: int, items: int, n_items: int, n_partial: int, n_threads: int
) -> tuple[Work, array[int], list[Tensor]]:
    """The scratch memory of a call, its counters, and the tensors that hold the rest."""
    chunk, lanes = convert.chunk(tg.key), tg.key.lanes
    q_row, o_row = (2 if tg.key.dot else 4) * _ceil(args.d, chunk), 4 * _ceil(args.e, max(chunk, LINE // 4))
    per_kv = args.heads // args.kv_heads
    rows = max(1, plan.ROWS // per_kv) * per_kv
    item = ITEMSIZE[tg.key.kv_dtype]
    at, sizes = 0, {}
    for name, size in {
        "q": rows * q_row,
        "at_o": rows * o_row,
        "at_s": rows * 4 * TILE,
        "at_p": rows * 2 * TILE,
        "at_m": rows * 4,
        "at_l": rows * 4,
        "at_exact": rows * 4 if tg.key.dot else 0,
        "at_alpha": rows * 4,
        "at_addresses": 2 * ADDRESSES,
        "at_packed": 8 * TILE,
        "at_zero": max(args.d, args.e) * item,
        "at_pack": TILE * o_row,
    }.items():
        sizes[name] = at
        at += _ceil(size, LINE)
    del sizes["q"]  # begins at 0
    if not tg.key.dot:
        sizes["at_exact"] = sizes["at_l"]
    counters = array("q", bytes(plan.COUNTERS_SIZE))
    partials = torch.empty(n_partial * (HEAD + o_row) + LINE, dtype=torch.uint8, device=CPU)
    scratch = torch.empty(n_threads * at + LINE, dtype=torch.uint8, device=CPU)
    work = Work(
        groups=groups, items=items, n_items=n_items, counters=_address(counters),
        partials=_ceil(partials.data_ptr(), LINE), scratch=_ceil(scratch.data_ptr(), LINE), scratch_size=at,
        chunk=chunk, lanes=lanes,
        lines=-(-max(args.d, args.e) * item // LINE), item=item,
        pairs=int(tg.key.dot), tables=int(tg.key.tables),
        q_row=q_row, o_row=o_row, **sizes,
    )  # fmt: skip
    return work, counters, [partials, scratch]


def write_kv(call: WriteCall, isa: str = "native") -> None:
    """See `base.WriteCall`."""
    tg = target(_name(call.k_cache.dtype), isa)
    slots = _copy(call.slot_mapping)
    counter = array("q", [0])
    n, block_size = call.k_cache.shape[:2]
    args = store.Write(
        slots=slots.data_ptr(), tokens=slots.shape[0], kv_heads=call.k_cache.shape[2], blocks=n, block_size=block_size,
        src_code=convert.CODES[_name(call.k.dtype)], counter=_address(counter),
    )  # fmt: skip
    bad = FIND_BAD_SLOT.get(tg)(args, tg)
    if bad >= 0:
        raise BlockIndexError(
            f"slot_mapping[{bad}] is {int(slots[bad])}, expected -1 (write nothing) or 0 to {n * block_size - 1} "
            f"({n} blocks * {block_size} tokens)"
        )
    k, k_scale = _rows(call.k, call.k_cache, call.k_scale)
    v, v_scale = _rows(call.v, call.v_cache, call.v_scale)
    write = WRITE.get(tg)
    size = slots.shape[0] * args.kv_heads * (k.width + v.width) * call.k.element_size()
    n_threads = max(1, min(threads(), -(-args.tokens // store.RUN), size // WORTH_A_THREAD))
    POOL.run(lambda: write(args, k, v, tg), n_threads)
    del k_scale, v_scale


def _rows(new: Tensor, cache: Tensor, scale: Tensor | None) -> tuple[store.Rows, Tensor | None]:
    scale = None if scale is None else scale.contiguous()
    item, size = new.element_size(), cache.element_size()
    block, slot, head, _ = cache.stride()
    same = new.dtype == cache.dtype
    return store.Rows(
        src=new.data_ptr(), src_token=new.stride(0) * item, src_head=new.stride(1) * item,
        dst=cache.data_ptr(), dst_block=block * size, dst_slot=slot * size, dst_head=head * size,
        scale=0 if scale is None else scale.data_ptr(), width=new.shape[2], bytes=new.shape[2] * item if same else 0,
    ), scale  # fmt: skip


def copy_blocks(call: CopyCall) -> None:
    """See `base.CopyCall`. Blocks that are copied over are put aside first, cache by cache."""
    src, dst = call.src_blocks.tolist(), call.dst_blocks.tolist()  # of our own: another thread may write the caller's
    _check_copy(call.caches, src, dst)
    layouts, records = [], array("q")
    for cache in call.caches:
        run, rows, dims = layout = _block(cache.shape, cache.stride(), cache.element_size())
        layouts.append(layout)
        block = cache.stride(0) * cache.element_size()
        records.extend((cache.data_ptr(), block, run, rows, _address(dims), len(dims) // 2))
    written = set(dst)
    pairs = list(zip(src, dst, strict=True))
    waiting = [pair for pair in pairs if pair[0] in written]
    if waiting:
        pairs = [pair for pair in pairs if pair[0] not in written]
        for i, (run, rows, _) in enumerate(layouts):
            staged = torch.empty(len(waiting) * rows * run, dtype=torch.uint8, device=CPU)
            for out in (1, 0):
                record = records[i * FIELDS : (i + 1) * FIELDS]
                _copy_pairs(record, waiting, rows * run, staged.data_ptr(), out)
    _copy_pairs(records, pairs, sum(run * rows for run, rows, _ in layouts))


FIELDS = store.RECORD // 8


def _check_copy(caches: Sequence[Tensor], src: list[int], dst: list[int]) -> None:
    """What `checked.check_copy` does, which is called to say what is wrong if something is."""
    num_blocks = min((len(cache) for cache in caches), default=0)
    ids = src + dst
    if ids and (min(ids) < 0 or max(ids) >= num_blocks or len(set(dst)) < len(dst)):
        check_copy(CopyCall(list(caches), *(torch.tensor(x, dtype=torch.int64, device=CPU) for x in (src, dst))))


def _copy_pairs(
    records: array[int], pairs: Sequence[tuple[int, int]], size: int, staged: int = 0, out: int = 0
) -> None:
    """Copy blocks of `size` bytes in all caches together: to or from `staged`, or from cache to cache."""
    if not size or not pairs:
        return
    src, dst = (array("q", ids) for ids in zip(*pairs, strict=True))
    counter = array("q", [0])
    args = store.Copies(
        records=_address(records), caches=len(records) // FIELDS, src=_address(src), dst=_address(dst),
        pairs=len(pairs), staged=staged, out=out, counter=_address(counter),
    )  # fmt: skip
    tg = target("float32")
    copy = COPY.get(tg)
    POOL.run(lambda: copy(args, tg), max(1, min(threads(), len(pairs) * size // WORTH_A_THREAD)))


@lru_cache(maxsize=1024)
def _block(shape: Sequence[int], stride: Sequence[int], item: int) -> tuple[int, int, array[int]]:
    """A block of a cache as runs of bytes: their size, their number, and the dimensions that say where they lie: size
    and stride in bytes of each, innermost first."""
    run, rows, dims = item, 1, array("q")
    for step, size in sorted((step * item, size) for size, step in zip(shape[1:], stride[1:], strict=True)):
        if size == 1:
            continue
        if step == run and not dims:
            run *= size
            continue
        rows *= size
        if dims and dims[-1] * dims[-2] == step:
            dims[-2] *= size
        else:
            dims.extend((size, step))
    return run, rows, dims


def _address(numbers: array[int]) -> int:
    """Where an array lies, for as long as it is kept and does not grow."""
    return numbers.buffer_info()[0]


def merge_states(call: MergeCall) -> None:
    """See `base.MergeCall`."""
    tokens, heads, width = call.out.shape
    a, keep_a = _side(call.out_a, call.lse_a)
    b, keep_b = _side(call.out_b, call.lse_b)
    counter = array("q", [0])
    size = width * call.out.element_size()
    args = states.Merge(
        out=call.out.data_ptr(), lse=call.lse.data_ptr(), rows=tokens * heads, heads=heads, width=width, bytes=size,
        counter=_address(counter),
    )  # fmt: skip
    tg = target(_name(call.out.dtype))
    merge = MERGE.get(tg)
    n_threads = max(1, min(threads(), -(-args.rows // states.RUN), args.rows * size // WORTH_A_THREAD))
    POOL.run(lambda: merge(args, a, b, tg), n_threads)
    del keep_a, keep_b


def _side(out: Tensor, lse: Tensor) -> tuple[states.Side, Tensor]:
    """One of two partial results, and the tensor that holds it."""
    if out.stride(2) != 1:
        out = out.contiguous()
    item = out.element_size()
    return states.Side(
        out=out.data_ptr(), out_token=out.stride(0) * item, out_head=out.stride(1) * item,
        lse=lse.data_ptr(), lse_token=lse.stride(0) * 4, lse_head=lse.stride(1) * 4,
    ), out  # fmt: skip


def _copy(x: Tensor) -> Tensor:
    """Numbers that are checked first and used later: between the two another thread may write the caller's tensor.

    In pieces that torch copies without its own threads: after a fork() the child would wait for them for ever.
    """
    if x.shape[0] <= PIECE:
        return x.clone(memory_format=torch.contiguous_format)
    made = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for start in range(0, x.shape[0], PIECE):
        made[start : start + PIECE].copy_(x[start : start + PIECE])
    return made


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ceil(n: int, step: int) -> int:
    return -(-n // step) * step
