"""From tensors to compiled kernels: records of addresses, scratch memory, threads, and errors with names in them."""

from __future__ import annotations

import torch
from numba.core import config
from numba.core.types import int64
from torch import Tensor

from pagedkern.backends.base import ITEMSIZE, AttentionCall, CopyCall, WriteCall
from pagedkern.backends.checked import check_copy
from pagedkern.backends.cpu import convert, kernels, plan, store
from pagedkern.backends.cpu.jit import Entry, TargetValue, record, target
from pagedkern.backends.cpu.micro import LINE, TILE
from pagedkern.backends.cpu.pool import POOL
from pagedkern.backends.cpu.scratch import HEAD, NAMES, Work
from pagedkern.environment import limits
from pagedkern.errors import BlockIndexError

PLAN = Entry(plan.plan, "planner", record(plan.Args), int64, int64, int64)
FIND_BAD_BLOCK = Entry(plan.find_bad_block, "block table check", record(plan.Args))
ATTEND = Entry(kernels.attend, "attention kernel", record(plan.Args), record(Work))
FIND_BAD_SLOT = Entry(store.find_bad_slot, "slot check", record(store.Write))
WRITE = Entry(store.write, "write kernel", record(store.Write), record(store.Rows), record(store.Rows))

WORTH_A_THREAD = 1 << 18  # bytes of K and V; waking a helper takes about as long as reading them
PIECE = 1 << 14  # elements; torch takes threads for twice as many
ITEMS = 4  # for each thread, at the least: what is more is taken together, several KV heads in one


def threads() -> int:
    """How many threads a call may use: torch's number, bounded by NUMBA_NUM_THREADS and by the processors that a
    container may use at a time, which torch does not look at."""
    bound = int(config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    return max(1, min(torch.get_num_threads(), bound, limits.quota() or bound))


def attention(call: AttentionCall, span: int, isa: str = "native") -> None:
    """See `base.AttentionCall`. `isa` is for tests: "portable" leaves out what only some processors have."""
    tg = target(_name(call.k_cache.dtype), isa, _name(call.q.dtype))
    neutral = target("float32", isa)
    args, keep = _args(call, span)
    n_groups, n_items, n_partial, read, status, where, value = PLAN.get(neutral)(args, 1, 0, 0, neutral)
    if status == plan.BAD_LENGTH:
        most = f"{args.width} blocks * {args.block_size} tokens"
        raise BlockIndexError(f"seq_lens[{where}] is {value}, accepted is 0 to {args.width * args.block_size} ({most})")
    if status == plan.BAD_START:
        raise BlockIndexError(
            f"cu_seqlens_q[{where}] is {value}, accepted are prefix sums from 0 to at most {args.tokens} (rows of q)"
        )
    records = torch.empty(n_groups * plan.GROUP_SIZE + n_items * plan.ITEM_SIZE, dtype=torch.uint8)
    groups = records.data_ptr()
    items = groups + n_groups * plan.GROUP_SIZE
    together = max(1, n_items // (ITEMS * threads()))  # makes fewer groups and items, the same results
    n_groups, n_items, *_ = PLAN.get(neutral)(args, together, groups, items, neutral)
    size = read * (args.d + args.e) * call.k_cache.element_size()
    n_threads = max(1, min(threads(), n_items, size // WORTH_A_THREAD))
    work, memory = _work(args, tg, groups, items, n_items, n_partial, n_threads)
    attend = ATTEND.get(tg)
    POOL.run(lambda: attend(args, work, tg), n_threads)
    if memory[0][2]:  # the counter C_BAD
        i, j, block = FIND_BAD_BLOCK.get(neutral)(args, neutral)
        if i < 0:
            raise BlockIndexError("block_table was written during the call, and held a block id out of range meanwhile")
        raise BlockIndexError(
            f"block_table[{i}, {j}] is {block} (sequence {i}, tokens from {j * args.block_size}), "
            f"accepted is 0 to {args.blocks - 1}"
        )
    del keep


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
) -> tuple[Work, list[Tensor]]:
    """The scratch memory of a call, and the tensors that hold it, the counters first."""
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
        "at_names": 2 * NAMES,
        "at_packed": 8 * TILE,
        "at_zero": max(args.d, args.e) * item,
        "at_pack": TILE * o_row,
    }.items():
        sizes[name] = at
        at += _ceil(size, LINE)
    del sizes["q"]  # begins at 0
    if not tg.key.dot:
        sizes["at_exact"] = sizes["at_l"]
    counters = torch.zeros(plan.COUNTERS_SIZE // 8, dtype=torch.int64)
    partials = torch.empty(n_partial * (HEAD + o_row) + LINE, dtype=torch.uint8)
    scratch = torch.empty(n_threads * at + LINE, dtype=torch.uint8)
    work = Work(
        groups=groups, items=items, n_items=n_items, counters=counters.data_ptr(),
        partials=_ceil(partials.data_ptr(), LINE), scratch=_ceil(scratch.data_ptr(), LINE), scratch_size=at,
        chunk=chunk, lanes=lanes,
        lines=-(-max(args.d, args.e) * item // LINE), item=item,
        pairs=int(tg.key.dot), tables=int(tg.key.tables),
        q_row=q_row, o_row=o_row, **sizes,
    )  # fmt: skip
    return work, [counters, partials, scratch]


def write_kv(call: WriteCall, isa: str = "native") -> None:
    """See `base.WriteCall`."""
    tg = target(_name(call.k_cache.dtype), isa)
    slots = _copy(call.slot_mapping)
    counter = torch.zeros(1, dtype=torch.int64)
    n, block_size = call.k_cache.shape[:2]
    args = store.Write(
        slots=slots.data_ptr(), tokens=slots.shape[0], kv_heads=call.k_cache.shape[2], blocks=n, block_size=block_size,
        src_code=convert.CODES[_name(call.k.dtype)], counter=counter.data_ptr(),
    )  # fmt: skip
    bad = FIND_BAD_SLOT.get(tg)(args, tg)
    if bad >= 0:
        raise BlockIndexError(
            f"slot_mapping[{bad}] is {int(slots[bad])}, accepted is -1 (write nothing) or 0 to {n * block_size - 1} "
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
    """See `base.CopyCall`."""
    src, dst = _copy(call.src_blocks), _copy(call.dst_blocks)
    check_copy(CopyCall(call.caches, src, dst))
    pairs = list(zip(src.tolist(), dst.tolist(), strict=True))
    apart = {s for s, _ in pairs}.isdisjoint(d for _, d in pairs)
    for cache in call.caches:
        size = cache.element_size()
        bits = cache.view(_BITS[size]) if size in _BITS else cache  # a dtype that every copy knows; complex128 is one
        if apart:
            for s, d in pairs:
                bits[d].copy_(bits[s])
        else:  # all are read before any is written
            bits.index_copy_(0, dst, bits.index_select(0, src))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _copy(x: Tensor) -> Tensor:
    """Numbers that are checked first and used later: between the two another thread may write the caller's tensor.

    In pieces that torch copies without its own threads: after a fork() the child would wait for them for ever.
    """
    if x.shape[0] <= PIECE:
        return x.clone(memory_format=torch.contiguous_format)
    made = torch.empty(x.shape, dtype=x.dtype)
    for start in range(0, x.shape[0], PIECE):
        made[start : start + PIECE].copy_(x[start : start + PIECE])
    return made


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ceil(n: int, step: int) -> int:
    return -(-n // step) * step
