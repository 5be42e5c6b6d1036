"""The inner loops of attention, register-blocked, emitted as LLVM IR.

R rows (query tokens times the query heads of one KV head) meet a tile of TILE tokens. Tokens are named by a list of
addresses, one for each token of the tile, so that block size, layout and placement are nobody's concern here; a token
that no row sees stands in the list as the address of a row of zeros. Rows of Q and O are float32 in kernel order
(`convert`), padded with zeros to whole chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core.types import float32, int64, void

from pagedkern.backends.base import ITEMSIZE
from pagedkern.backends.cpu import simd
from pagedkern.backends.cpu.convert import bytes_to_pairs, chunk, narrow, unit, units, weave, weave_bytes, widen_cache
from pagedkern.backends.cpu.jit import LITERAL, TARGET, TargetKey, emitter
from pagedkern.backends.cpu.simd import F32, I8, I16, I32, I64, NEG_INF, Builder, Value, const, i64

TILE = 64  # tokens
LINE = 64  # bytes of a cache line


@emitter(void, LITERAL, int64, int64)
def prefetch_rows(b: Builder, tokens: int, ahead: Value, lines: Value) -> None:
    """Ask for the first `lines` cache lines of K and V of a few tokens.

    ahead: int64 [tokens] addresses of K, and TILE entries behind them those of V. Two streams at a time come in faster
    than one.
    """
    at = [simd.load(b, I64, b.add(ahead, i64(8 * (t + v * TILE)))) for t in range(tokens) for v in (0, 1)]

    def body(i: Value, _: list[Value]) -> list[Value]:
        for a in at:
            simd.prefetch(b, b.add(a, b.mul(i, i64(LINE))))
        return []

    simd.loop(b, lines, [], body)


@emitter(void, int64, int64, int64, int64)
def shift_addresses(b: Builder, addresses: Value, ahead: Value, k_step: Value, v_step: Value) -> None:
    """ahead = addresses moved by k_step bytes, those of V, TILE behind those of K, by v_step."""
    kind = ir.VectorType(I64, 8)
    for first, step in ((0, k_step), (TILE, v_step)):
        step = simd.splat(b, step, 8)
        for t in range(first, first + TILE, 8):
            simd.store(b, b.add(simd.load(b, kind, b.add(addresses, i64(8 * t))), step), b.add(ahead, i64(8 * t)))


@emitter(void, TARGET, LITERAL, LITERAL, int64, int64, int64, int64, int64, int64)
def scores(
    b: Builder,
    key: TargetKey,
    rows: int,
    tokens: int,
    q: Value,
    q_row: Value,
    keys: Value,
    d: Value,
    s: Value,
    s_row: Value,
) -> None:
    """s[r, t] = <q[r], k[t]> for `rows` rows and `tokens` tokens.

    q: float32, or for `key.dot` bfloat16, in natural order or, for `key.tables`, that of `weave_bytes`; [rows, padded
    d], row stride q_row bytes; keys: int64 [tokens] addresses of cache rows of d elements; s: float32 [rows, tokens],
    row stride s_row bytes. One accumulator for each pair, folded at the end.
    """
    kind = ir.VectorType(F32, key.lanes)
    words = ir.VectorType(I32, key.lanes)
    k_at = [simd.load(b, I64, b.add(keys, i64(8 * t))) for t in range(tokens)]
    q_at = [b.add(q, b.mul(q_row, i64(r))) for r in range(rows)]
    step, size = chunk(key), ITEMSIZE[key.kv_dtype]

    def add_words(i: Value, acc: list[Value], rest: Value | None) -> list[Value]:
        acc = list(acc)
        offset = b.mul(i, i64(step * size))
        tile = [simd.load(b, ir.VectorType(I16, step), b.add(k_at[t], offset), rest) for t in range(tokens)]
        for r in range(rows):
            x = simd.load(b, words, b.add(q_at[r], offset))
            for t in range(tokens):
                acc[r * tokens + t] = simd.dot_pairs(b, acc[r * tokens + t], b.bitcast(tile[t], words), x)
        return acc

    def add_bytes(i: Value, acc: list[Value], rest: Value | None) -> list[Value]:
        acc = list(acc)
        offset = b.mul(i, i64(step))
        tile = [simd.load(b, ir.VectorType(I8, step), b.add(k_at[t], offset), rest) for t in range(tokens)]
        tile = [bytes_to_pairs(b, key, x) for x in tile]  # all at once, and rows after that: so they fit into registers
        for r in range(rows):
            for h in (0, 1):
                x = simd.load(b, words, b.add(q_at[r], b.add(b.shl(offset, i64(1)), i64(h * step))))
                for t in range(tokens):
                    acc[r * tokens + t] = simd.dot_pairs(b, acc[r * tokens + t], b.bitcast(tile[t][h], words), x)
        return acc

    def add_chunk(i: Value, acc: list[Value], rest: Value | None) -> list[Value]:
        if key.tables:
            return add_bytes(i, acc, rest)
        if key.dot:
            return add_words(i, acc, rest)
        acc = list(acc)
        offset = b.mul(i, i64(step * size))
        tile = [widen_cache(b, key, b.add(k_at[t], offset), rest) for t in range(tokens)]
        for u in range(units(key)):
            o_q = b.add(b.mul(i, i64(4 * step)), i64(4 * u * key.lanes))
            for r in range(rows):
                x = simd.load(b, kind, b.add(q_at[r], o_q))
                for t in range(tokens):
                    acc[r * tokens + t] = simd.fma(b, tile[t][u], x, acc[r * tokens + t])
        return acc

    whole = b.sdiv(d, i64(step))
    rest = b.sub(d, b.mul(whole, i64(step)))
    acc = [const(kind, 0.0)] * (rows * tokens)
    acc = simd.loop(b, whole, acc, lambda i, a: add_chunk(i, a, None))
    some = b.zext(b.icmp_signed(">", rest, i64(0)), I64)
    acc = simd.loop(b, some, acc, lambda i, a: add_chunk(whole, a, rest))
    for start in range(0, len(acc), key.lanes):
        group = acc[start : start + key.lanes]
        total, owner = simd.sum_lanes(b, group)
        if unit(key) != 1.0:
            total = b.fmul(total, const(kind, unit(key)))
        for first in range(0, len(group), tokens):  # the scores of one row lie side by side
            r = (start + first) // tokens
            at = [owner.index(first + t) for t in range(tokens)]
            simd.store(b, simd.pick(b, total, total, at), b.add(s, b.mul(s_row, i64(r))))


@emitter(void, TARGET, LITERAL, LITERAL, int64, int64, int64, int64, int64, int64, int64, int64, int64)
def accumulate(
    b: Builder,
    key: TargetKey,
    rows: int,
    source: str,
    tokens: Value,
    p: Value,
    values: Value,
    offset: Value,
    o: Value,
    o_row: Value,
    alpha: Value,
    count: Value,
    ahead: Value,
) -> None:
    """o[r] = o[r] * alpha[r] + sum over some tokens of p[r, t] * v[t], for some columns of `rows` rows.

    tokens: an even number of them; p: float32 [rows, TILE], but bfloat16 for "wide" of `key.dot`, and for "chunk" of
    `key.tables`; values: int64 [tokens] addresses, columns starting `offset` bytes behind them; o: float32, row stride
    o_row bytes; alpha: float32 [rows]; ahead: as in `prefetch_rows`, of which the same columns of half as many tokens
    are prefetched. `source` says what `values` lead to: "wide" and "chunk" cache rows, of which four vectors, or one
    chunk of `count` elements, are taken; "packed" float32 rows in kernel order.
    """
    n, size = key.lanes, ITEMSIZE[key.kv_dtype]
    kind = ir.VectorType(F32, n)
    vectors = 4 if source == "wide" else units(key)
    o_at = [[b.add(b.add(o, b.mul(o_row, i64(r))), i64(4 * n * u)) for u in range(vectors)] for r in range(rows)]
    acc = []
    for r in range(rows):
        factor = simd.splat(b, simd.load(b, F32, b.add(alpha, i64(4 * r))), n)
        acc += [b.fmul(simd.load(b, kind, a), factor) for a in o_at[r]]

    def read(address: Value) -> list[Value]:
        if source == "packed":
            return [simd.load(b, kind, b.add(address, i64(4 * n * u))) for u in range(vectors)]
        if source == "chunk":
            return widen_cache(b, key, address, count)
        parts = range(0, vectors, units(key))
        return [x for u in parts for x in widen_cache(b, key, b.add(address, i64(u * n * size)))]

    def prefetch(t: Value) -> None:  # these columns of K and V in turn, two tokens' worth of steps for each token
        token = b.add(b.ashr(t, i64(1)), b.mul(b.and_(t, i64(1)), i64(TILE)))
        address = b.add(simd.load(b, I64, b.add(ahead, b.mul(token, i64(8)))), offset)
        for line in range(-(-vectors * n * size // LINE)):
            simd.prefetch(b, b.add(address, i64(LINE * line)))

    def read_pair(t: Value) -> list[Value]:  # of tokens, woven
        addresses = b.add(values, b.mul(t, i64(8)))
        at = [b.add(simd.load(b, I64, b.add(addresses, i64(8 * x))), offset) for x in (0, 1)]
        step, v = chunk(key), []
        if key.tables:
            two = [simd.load(b, ir.VectorType(I8, step), a, count if source == "chunk" else None) for a in at]
            found = [x for half in weave_bytes(b, *two) for x in bytes_to_pairs(b, key, half)]
            return [b.bitcast(x, ir.VectorType(I32, n)) for x in found]
        for u in range(0, vectors * n, step):
            two = [simd.load(b, ir.VectorType(I16, step), b.add(a, i64(u * size))) for a in at]
            v += weave(b, *two)
        return v

    def add_pair(i: Value, carried: list[Value]) -> list[Value]:
        carried = list(carried)
        t = b.shl(i, i64(1))
        if source == "wide":
            for x in (0, 1):
                prefetch(b.add(t, i64(x)))
        v = read_pair(t)
        for r in range(rows):
            weights = simd.load(b, I32, b.add(b.add(p, i64(2 * TILE * r)), b.mul(t, i64(2))))
            weights = simd.splat(b, weights, n)
            for u in range(vectors):
                carried[r * vectors + u] = simd.dot_pairs(b, carried[r * vectors + u], v[u], weights)
        return carried

    def add_token(t: Value, carried: list[Value]) -> list[Value]:
        carried = list(carried)
        if source == "wide":
            prefetch(t)
        v = read(b.add(simd.load(b, I64, b.add(values, b.mul(t, i64(8)))), offset))
        for r in range(rows):
            at = b.add(b.add(p, i64(4 * TILE * r)), b.mul(t, i64(4)))
            x = simd.splat(b, simd.load(b, F32, at), n)
            for u in range(vectors):
                carried[r * vectors + u] = simd.fma(b, v[u], x, carried[r * vectors + u])
        return carried

    if (key.dot and source == "wide") or (key.tables and source == "chunk"):
        acc = simd.loop(b, b.lshr(tokens, i64(1)), acc, add_pair)
    else:
        acc = simd.loop(b, tokens, acc, add_token)
    for r in range(rows):
        for u in range(vectors):
            simd.store(b, acc[r * vectors + u], o_at[r][u])


@emitter(float32, TARGET, int64, int64, int64, int64, float32, int64, float32, int64, int64, int64)
def softmax_row(
    b: Builder,
    key: TargetKey,
    s: Value,
    p: Value,
    first: Value,
    last: Value,
    slope: Value,
    distance: Value,
    scale: Value,
    m: Value,
    l: Value,  # noqa: E741
    exact: Value,
) -> Value:
    """Turn one row of scores into weights, and carry maximum and sum on; returns the factor for what was summed before.

    s: float32 [TILE], scores in, exp(score - new maximum) out; tokens outside [first, last) of the tile are not seen.
    p: bfloat16 [TILE], the weights once more, for `key.dot` only; s then holds the rounded ones.
    slope, distance: ALiBi slope and position of the tile's first token less the query's. m, l: running maximum and sum,
    float32; exact: for `key.dot`, the sum of the weights before they are rounded. Where nothing was seen yet the
    maximum is -inf, and 0 stands in for it, so that no -inf - -inf occurs.
    """
    n = key.lanes
    kind = ir.VectorType(F32, n)
    lo, hi, away = (simd.splat(b, b.trunc(x, I32), n) for x in (first, last, distance))
    slope, scale = simd.splat(b, slope, n), simd.splat(b, scale, n)
    unroll = min(4, TILE // n)
    turns = i64(TILE // n // unroll)
    old = simd.load(b, F32, m)

    def find_top(i: Value, tops: list[Value]) -> list[Value]:
        tops = list(tops)
        for u in range(unroll):
            start = b.mul(b.add(b.mul(i, i64(unroll)), i64(u)), i64(n))
            at = b.add(simd.splat(b, b.trunc(start, I32), n), simd.iota(n))
            address = b.add(s, b.mul(start, i64(4)))
            x = b.fmul(simd.load(b, kind, address), scale)
            x = simd.fma(b, slope, b.sitofp(b.add(at, away), kind), x)
            seen = b.and_(b.icmp_signed(">=", at, lo), b.icmp_signed("<", at, hi))
            x = b.select(seen, x, const(kind, NEG_INF))
            simd.store(b, x, address)
            tops[u] = simd.vmax(b, x, tops[u])
        return tops

    tops = simd.loop(b, turns, [simd.splat(b, old, n)] * unroll, find_top)
    top = simd.fold(b, _pairwise(tops, lambda x, y: simd.vmax(b, x, y)), lambda x, y: simd.vmax(b, x, y))
    safe = b.select(b.fcmp_ordered("==", top, const(F32, NEG_INF)), const(F32, 0.0), top)
    base = simd.splat(b, safe, n)

    def weigh(i: Value, sums: list[Value]) -> list[Value]:  # of what is multiplied; for `key.dot`, then of what was not
        sums = list(sums)
        for u in range(unroll):
            address = b.add(s, b.mul(b.add(b.mul(i, i64(unroll)), i64(u)), i64(4 * n)))
            x = simd.exp(b, b.fsub(simd.load(b, kind, address), base))
            if key.dot:
                sums[unroll + u] = b.fadd(sums[unroll + u], x)
                short = narrow(b, key, "bfloat16", x)
                simd.store(b, short, b.add(p, b.mul(b.add(b.mul(i, i64(unroll)), i64(u)), i64(2 * n))))
                x = b.bitcast(b.shl(b.zext(short, ir.VectorType(I32, n)), const(ir.VectorType(I32, n), 16)), kind)
            simd.store(b, x, address)
            sums[u] = b.fadd(sums[u], x)
        return sums

    sums = simd.loop(b, turns, [const(kind, 0.0)] * (unroll * (2 if key.dot else 1)), weigh)
    alpha = b.extract_element(simd.exp(b, b.fsub(simd.splat(b, old, n), base)), ir.Constant(I32, 0))
    for k, at in enumerate((l, exact) if key.dot else (l,)):
        total = simd.fold(b, _pairwise(sums[k * unroll : (k + 1) * unroll], b.fadd), b.fadd)
        simd.store(b, simd.fma(b, simd.load(b, F32, at), alpha, total), at)
    simd.store(b, top, m)
    return alpha


def _pairwise(xs: Sequence[Value], combine: Callable[[Value, Value], Value]) -> Value:
    while len(xs) > 1:
        xs = [combine(xs[k], xs[k + 1]) for k in range(0, len(xs), 2)]
    return xs[0]


@emitter(void, TARGET, int64, float32, float32)
def softcap_row(b: Builder, key: TargetKey, s: Value, scale: Value, cap: Value) -> None:
    """s[:TILE] = cap * tanh(s * scale / cap), float32 in place."""
    n = key.lanes
    kind = ir.VectorType(F32, n)
    scale, cap = simd.splat(b, scale, n), simd.splat(b, cap, n)

    def body(i: Value, _: list[Value]) -> list[Value]:
        address = b.add(s, b.mul(i, i64(4 * n)))
        x = b.fdiv(b.fmul(simd.load(b, kind, address), scale), cap)
        simd.store(b, b.fmul(cap, simd.tanh(b, x)), address)
        return []

    simd.loop(b, i64(TILE // n), [], body)


@emitter(int64, TARGET, int64, int64, int64)
def pack_row(b: Builder, key: TargetKey, src: Value, dst: Value, n: Value) -> Value:
    """dst = a cache row of n elements as float32 in kernel order, padded; NaN and Inf as 0. Returns whether any was."""
    kind, ints = ir.VectorType(F32, key.lanes), ir.VectorType(I32, key.lanes)

    def body(address: Value, out: Value, rest: Value | None, found: Value) -> Value:
        for u, x in enumerate(widen_cache(b, key, address, rest)):
            special = _is_special(b, x)
            simd.store(b, b.select(special, const(kind, 0.0), x), b.add(out, i64(4 * key.lanes * u)))
            found = b.or_(found, b.sext(special, ints))
        return found

    found = _for_row(b, key, n, src, dst, const(ints, 0), body)
    return b.zext(simd.fold(b, found, b.or_), I64)


@emitter(void, TARGET, int64, int64, int64, float32)
def add_special(b: Builder, key: TargetKey, src: Value, o: Value, n: Value, p: Value) -> None:
    """o += p * v for those of the n elements of a cache row that are NaN or Inf: what `pack_row` left out."""
    kind = ir.VectorType(F32, key.lanes)
    p = simd.splat(b, p, key.lanes)

    def body(address: Value, out: Value, rest: Value | None, _: Value) -> Value:
        for u, x in enumerate(widen_cache(b, key, address, rest)):
            at = b.add(out, i64(4 * key.lanes * u))
            old = simd.load(b, kind, at)
            simd.store(b, b.select(_is_special(b, x), simd.fma(b, x, p, old), old), at)
        return _

    _for_row(b, key, n, src, o, i64(0), body)


def _is_special(b: Builder, x: Value) -> Value:
    return b.fcmp_unordered("uno", b.fsub(x, x), const(x.type, 0.0))  # Inf - Inf and NaN - NaN are NaN


def _for_row(b: Builder, key: TargetKey, n: Value, src: Value, dst: Value, carried: Value, body: Any) -> Value:
    """Run `body(source, destination, rest, carried)` over the chunks of one cache row and its float32 counterpart."""
    step, size = chunk(key), ITEMSIZE[key.kv_dtype]
    whole = b.sdiv(n, i64(step))
    rest = b.sub(n, b.mul(whole, i64(step)))

    def at(i: Value) -> tuple[Value, Value]:
        return b.add(src, b.mul(i, i64(step * size))), b.add(dst, b.mul(i, i64(step * 4)))

    [carried] = simd.loop(b, whole, [carried], lambda i, c: [body(*at(i), None, c[0])])
    some = b.zext(b.icmp_signed(">", rest, i64(0)), I64)
    [carried] = simd.loop(b, some, [carried], lambda _, c: [body(*at(whole), rest, c[0])])
    return carried


@emitter(void, TARGET, int64, int64, int64, float32)
def axpy_row(b: Builder, key: TargetKey, y: Value, x: Value, vectors: Value, factor: Value) -> None:
    """y += factor * x for float32 rows of whole vectors."""
    n = key.lanes
    kind = ir.VectorType(F32, n)
    factor = simd.splat(b, factor, n)

    def body(i: Value, _: list[Value]) -> list[Value]:
        offset = b.mul(i, i64(4 * n))
        at = b.add(y, offset)
        simd.store(b, simd.fma(b, simd.load(b, kind, b.add(x, offset)), factor, simd.load(b, kind, at)), at)
        return []

    simd.loop(b, vectors, [], body)
