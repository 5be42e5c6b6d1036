"""The operations: each validates its arguments once, chooses a backend and a configuration, and launches.

They are custom operators of torch (`torch.ops.pagedkern.*`), so `torch.compile(fullgraph=True)` takes them whole.
Letters in
the docstrings: S sequences, T tokens, H query heads, G KV heads, D head_dim, E head_dim of V, N blocks, B tokens a
block, W columns of the block table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from pagedkern import _checks as check
from pagedkern import _torch_ops
from pagedkern._checks import ArrayLike
from pagedkern._selection import Choice, choose, encode_config
from pagedkern.backends.base import Config
from pagedkern.backends.forked import new_empty
from pagedkern.errors import InvalidType

__all__ = ["Choice", "copy_blocks", "explain", "merge_states", "paged_attention", "write_kv"]


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments of `paged_attention` that say what is computed and by whom; `explain` takes the same."""

    cu_seqlens_q: ArrayLike | None
    max_seqlen_q: int | None
    scale: float | None
    causal: bool
    sliding_window: int | None
    softcap: float | None
    alibi_slopes: ArrayLike | None
    sinks: ArrayLike | None
    k_scale: ArrayLike | float | None
    v_scale: ArrayLike | float | None
    backend: str
    config: Config | Mapping[str, object] | None


@overload
def paged_attention(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    *,
    out: ArrayLike | None = None,
    return_lse: Literal[False] = False,
    debug: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...


@overload
def paged_attention(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    *,
    out: ArrayLike | None = None,
    return_lse: Literal[True],
    debug: bool = False,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...


def paged_attention(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    *,
    cu_seqlens_q: ArrayLike | None = None,
    max_seqlen_q: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    k_scale: ArrayLike | float | None = None,
    v_scale: ArrayLike | float | None = None,
    out: ArrayLike | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    config: Config | Mapping[str, object] | None = None,
    debug: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of T query tokens over the keys and values that a block table points to.

    The queries of sequence i are rows `cu_seqlens_q[i] .. cu_seqlens_q[i+1]-1` of q and stand at the last positions of
    its `seq_lens[i]` tokens, whose K and V are already in the cache. Decode, chunked prefill and speculative
    verification may be mixed in one call. A row that sees no key gives out = 0 and lse = -inf (the sink, if there is
    one).

    Args:
        q: [T, H, D], float32, float16 or bfloat16, last dimension contiguous.
        k_cache, v_cache: [N, B, G, D] and [N, B, G, E], equal dtype (a float dtype, float8_e4m3fn, float8_e5m2 or
            int8); any strides but for the last dimension, so NHD, HND and fused tensors are views of this shape.
        block_table: int32 [S, W], any row stride: entry [i, j] is the block of sequence i's tokens `j*B .. j*B+B-1`.
            Entries past the sequence, or wholly behind its sliding window, are never followed and may hold anything.
        seq_lens: int32 [S], tokens in the cache with this step's own; 0 is a padding row.
        cu_seqlens_q: int32 [S+1], prefix sums of query lengths, from 0. None: one query a sequence, T == S.
        max_seqlen_q: an upper bound of the query length of every sequence; only saves work. None: T.
        scale: factor of the scores; None is D ** -0.5.
        causal: a query at position p sees the keys at positions <= p.
        sliding_window: number of tokens seen, the query's own included, >= 1.
        softcap: scores become `softcap * tanh(score / softcap)`, > 0 (Gemma 2, arXiv:2408.00118).
        alibi_slopes: float32 [H], adds `slope * (key position - query position)` (ALiBi, arXiv:2108.12409).
        sinks: float32 [H], a score without a value that joins each softmax (gpt-oss, arXiv:2508.10925). -inf is as
            no sink, +inf gives out = 0 and lse = +inf, NaN gives NaN in every row of that head.
        k_scale, v_scale: of a quantized cache: a positive number (of Python or NumPy, or a tensor without dimensions),
            or float32 [G] or [1]; None is 1. Numbers in a tensor are checked on a CPU, elsewhere with `debug`.
        out: [T, H, E] in q's dtype to write into; None allocates it.
        return_lse: also return the natural logarithm of the softmax denominator, float32 [T, H].
        backend: a name from `pagedkern.backends()`, or "auto": the tuned choice, else the first that supports the
            problem.
        config: the backend's parameters, a config object or a mapping of its fields; None is tuned or default.
        debug: also check block ids, lengths, offsets and scales on the device (synchronises): the error names the
            place.

    Returns:
        out, or (out, lse). If `out` was given it is returned as a tensor over the same memory.

    Raises:
        InvalidArgument (InvalidType): an argument that is not accepted; nothing was written.
        Unsupported, BackendUnavailable: the named backend cannot compute this, or cannot run here.
        BlockIndexError: an id, length or offset is out of range (with `debug`, or where checking is free).
    """
    arguments = _attention_arguments(
        q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, scale, causal, sliding_window, softcap,
        alibi_slopes, sinks, k_scale, v_scale, backend, config,
    )  # fmt: skip
    check.flag("return_lse", return_lse)
    check.flag("debug", debug)
    query, values = arguments[0], arguments[2]
    expected = (query.shape[0], query.shape[1], values.shape[3])
    if out is None:
        result = new_empty(query, expected, query.dtype)
    else:
        result = check.output("out", out, expected, "[num_tokens, num_heads, head_dim_v]", query.dtype, query)
    lse = new_empty(query, expected[:2], torch.float32) if return_lse else None
    torch.ops.pagedkern.attention.default(*arguments, debug, result, lse)
    return result if lse is None else (result, lse)


def explain(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    **options: Unpack[AttentionOptions],
) -> Choice:
    """Which backend and configuration `paged_attention` would use for these arguments, and why. Computes nothing.

    Args:
        q, k_cache, v_cache, block_table, seq_lens: as in `paged_attention`; only shapes and dtypes matter.
        options: the other arguments of `paged_attention`, but for `out`, `return_lse` and `debug`.

    Raises:
        InvalidArgument (InvalidType), Unsupported, BackendUnavailable: as `paged_attention` would.
    """
    arguments = _attention_arguments(q, k_cache, v_cache, block_table, seq_lens, **options)
    return choose(_torch_ops.attention_problem(*arguments), arguments[-2], arguments[-1], arguments[0].device.index)


def _attention_arguments(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    cu_seqlens_q: ArrayLike | None = None,
    max_seqlen_q: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    k_scale: ArrayLike | float | None = None,
    v_scale: ArrayLike | float | None = None,
    backend: str = "auto",
    config: Config | Mapping[str, object] | None = None,
) -> _torch_ops.AttentionArguments:
    """Check everything and put it in the order of the operator's schema, up to `debug`."""
    query = check.tensor("q", q, 3, "[num_tokens, num_heads, head_dim]")
    check.dtype("q", query, *check.FLOATS)
    check.last_contiguous("q", query)
    tokens, heads, head_dim = query.shape
    keys, values = check.caches(k_cache, v_cache)
    check.device("k_cache", keys, query.device, "q")
    if head_dim != keys.shape[3]:
        check.refuse("q", f"head_dim {head_dim}", f"that of k_cache, {keys.shape[3]}")
    if heads == 0 or heads % keys.shape[2]:
        shape = "[num_blocks, block_size, num_kv_heads, head_dim]"
        check.refuse("q", f"{heads} query heads", f"a multiple of the {keys.shape[2]} KV heads of k_cache, {shape}")

    table = check.tensor("block_table", block_table, 2, "[num_seqs, width]")
    check.dtype("block_table", table, torch.int32)
    check.device("block_table", table, query.device, "q")
    check.last_contiguous("block_table", table)
    num_seqs = table.shape[0]
    lens = check.index_vector("seq_lens", seq_lens, num_seqs, "[num_seqs]", query, "q", torch.int32)
    starts = None
    if cu_seqlens_q is not None:
        starts = check.index_vector(
            "cu_seqlens_q", cu_seqlens_q, num_seqs + 1, "[num_seqs + 1]", query, "q", torch.int32
        )
    elif tokens != num_seqs:
        check.refuse(
            "q",
            f"{tokens} rows for {num_seqs} sequences",
            "one row a sequence when cu_seqlens_q is None: pass cu_seqlens_q",
        )
    bound = tokens if starts is not None else 1
    if max_seqlen_q is not None:
        given = check.integer("max_seqlen_q", max_seqlen_q, 0, "an integer >= 0, or None")
        if starts is None and given < 1:
            check.refuse("max_seqlen_q", given, "at least 1 when cu_seqlens_q is None, or None")
        bound = min(bound, given)
    if sliding_window is not None:
        sliding_window = check.integer(
            "sliding_window",
            sliding_window,
            1,
            "an integer >= 1 (tokens seen, the query's own included), or None for no window",
        )
    if softcap is not None:
        softcap = check.number("softcap", softcap, "a positive finite number, or None for no cap")
        if softcap <= 0:
            check.refuse("softcap", softcap, "a positive finite number, or None for no cap")
        softcap = min(max(softcap, 2.0**-100), 2.0**100)  # float32 holds that, and no score that matters is changed
    k_scales, k_number = check.scale("k_scale", k_scale, keys)
    v_scales, v_number = check.scale("v_scale", v_scale, values)
    return (
        query,
        keys,
        values,
        table,
        lens,
        starts,
        bound,
        head_dim**-0.5 if scale is None else check.float32_number("scale", scale, "head_dim ** -0.5"),
        check.flag("causal", causal),
        sliding_window,
        softcap,
        None if alibi_slopes is None else check.head_vector("alibi_slopes", alibi_slopes, heads, "[num_heads]", query),
        None if sinks is None else check.head_vector("sinks", sinks, heads, "[num_heads]", query),
        k_scales,
        v_scales,
        k_number,
        v_number,
        check.backend_name(backend),
        encode_config(config, backend),
    )


def write_kv(
    k: ArrayLike,
    v: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    slot_mapping: ArrayLike,
    *,
    k_scale: ArrayLike | float | None = None,
    v_scale: ArrayLike | float | None = None,
    backend: str = "auto",
    debug: bool = False,
) -> None:
    """Write the K and V of T new tokens into their slots of the cache.

    A quantized cache stores `x / scale` rounded to nearest even and saturated to its largest finite value (NaN stays
    NaN in float8 and becomes 0 in int8); a float cache stores x rounded to its dtype. If a slot occurs twice, one of
    the two tokens is stored.

    Args:
        k, v: [T, G, D] and [T, G, E], float32, float16 or bfloat16 (both the same), last dimension contiguous.
        k_cache, v_cache: [N, B, G, D] and [N, B, G, E], as in `paged_attention`; written in place.
        slot_mapping: int64 or int32 [T], `block * B + offset` of each token; -1 writes nothing.
        k_scale, v_scale: of a quantized cache, as in `paged_attention`.
        backend: a name from `pagedkern.backends()`, or "auto".
        debug: also check slots and scales on the device (synchronises).

    Raises:
        InvalidArgument (InvalidType): an argument that is not accepted; nothing was written.
        Unsupported, BackendUnavailable: the named backend cannot do this, or cannot run here.
        BlockIndexError: a slot out of range (with `debug`, or where checking is free); nothing was written.
    """
    keys, values = check.caches(k_cache, v_cache, write=True)
    new_k = check.tensor("k", k, 3, "[num_tokens, num_kv_heads, head_dim]")
    new_v = check.tensor("v", v, 3, "[num_tokens, num_kv_heads, head_dim_v]")
    check.dtype("k", new_k, *check.FLOATS)
    check.dtype("v", new_v, new_k.dtype)
    tokens = new_k.shape[0]
    for name, new, cache, last in (("k", new_k, keys, "head_dim"), ("v", new_v, values, "head_dim_v")):
        check.device(name, new, keys.device, "k_cache")
        check.shape(name, new, (tokens, cache.shape[2], cache.shape[3]), f"[num_tokens, num_kv_heads, {last}]")
        check.last_contiguous(name, new)
    slots = check.index_vector("slot_mapping", slot_mapping, tokens, "[num_tokens]", keys, "k_cache", *check.INDICES)
    k_scales, k_number = check.scale("k_scale", k_scale, keys)
    v_scales, v_number = check.scale("v_scale", v_scale, values)
    check.flag("debug", debug)
    torch.ops.pagedkern.write_kv.default(
        new_k, new_v, keys, values, slots, k_scales, v_scales, k_number, v_number, check.backend_name(backend), debug
    )


def copy_blocks(
    caches: Sequence[ArrayLike],
    src_blocks: ArrayLike,
    dst_blocks: ArrayLike,
    *,
    backend: str = "auto",
    debug: bool = False,
) -> None:
    """Copy block `src_blocks[i]` to block `dst_blocks[i]` in every cache, as if all were read before any is written.

    Args:
        caches: tensors of any dtype with blocks in the first dimension, such as the k_cache and v_cache of every
            layer; any strides; written in place.
        src_blocks, dst_blocks: int64 or int32 [n] on the caches' device. A destination may not occur twice.
        backend: a name from `pagedkern.backends()`, or "auto".
        debug: also check the ids on the device (synchronises).

    Raises:
        InvalidArgument (InvalidType): an argument that is not accepted; nothing was written.
        BackendUnavailable: the named backend cannot run here.
        BlockIndexError: an id out of range or a destination given twice (with `debug`, or where checking is free);
            nothing was written.
    """
    if isinstance(caches, Tensor) or not isinstance(caches, Sequence):
        raise InvalidType(f"caches: got {type(caches).__name__}, expected a list or tuple of tensors")
    checked: list[Tensor] = []
    for i, cache in enumerate(caches):
        checked.append(check.tensor(f"caches[{i}]", cache, None, "[num_blocks, ...]", write=True))
        check.device(f"caches[{i}]", checked[i], checked[0].device, "caches[0]")
    like = checked[0] if checked else check.tensor("src_blocks", src_blocks, 1, "[n]")
    src = check.index_vector("src_blocks", src_blocks, None, "[n]", like, "caches[0]", *check.INDICES)
    dst = check.index_vector("dst_blocks", dst_blocks, src.shape[0], "[n]", like, "caches[0]", *check.INDICES)
    check.flag("debug", debug)
    name = check.backend_name(backend)
    if checked:
        torch.ops.pagedkern.copy_blocks.default(checked, src, dst, name, debug)


def merge_states(
    out_a: ArrayLike, lse_a: ArrayLike, out_b: ArrayLike, lse_b: ArrayLike, *, debug: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from the attention over each: exact, also where one or both saw nothing.

    With weights `exp(lse - log(exp(lse_a) + exp(lse_b)))` the merged output is the weighted sum of the two (as in
    cascade inference and flash-decoding). If a sink was given, give it to one side only.

    A side whose lse is -inf has seen nothing: the result is the other side, to the bit, whatever the output of the
    empty one holds. If both are empty, out is 0 and lse -inf. FlashAttention 2 marks such rows with +inf, which is
    taken for the same (so what a sink of +inf gave cannot be merged), and refused with `debug`. A NaN in an lse gives
    NaN.

    Args:
        out_a, out_b: [T, H, E], the same float dtype.
        lse_a, lse_b: float32 [T, H], natural logarithms; -inf or +inf where nothing was seen.
        debug: refuse an lse of +inf (synchronises): if it is not another library's mark, it is a sum that overflowed.

    Returns:
        (out, lse): [T, H, E] in the dtype of out_a, float32 [T, H].

    Raises:
        InvalidArgument (InvalidType): an argument that is not accepted.
    """
    first = check.tensor("out_a", out_a, 3, "[num_tokens, num_heads, head_dim_v]")
    check.dtype("out_a", first, *check.FLOATS)
    second = check.tensor("out_b", out_b, 3, "[num_tokens, num_heads, head_dim_v]")
    check.dtype("out_b", second, first.dtype)
    check.device("out_b", second, first.device, "out_a")
    check.shape("out_b", second, tuple(first.shape), "that of out_a")
    logs = []
    for name, value in (("lse_a", lse_a), ("lse_b", lse_b)):
        lse = check.tensor(name, value, 2, "[num_tokens, num_heads]")
        check.dtype(name, lse, torch.float32)
        check.device(name, lse, first.device, "out_a")
        check.shape(name, lse, tuple(first.shape[:2]), "[num_tokens, num_heads]")
        logs.append(lse)
    out, lse = torch.ops.pagedkern.merge_states.default(first, logs[0], second, logs[1], check.flag("debug", debug))
    return out, lse
