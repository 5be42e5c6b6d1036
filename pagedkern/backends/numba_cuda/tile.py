"""The steps of attention on one tile of queries, as device functions: what the kernels of decode.py and prefill.py do.

A block of T threads owns a *tile* of M query rows that read the same KV head. A row is one query token with one of the
`group` query heads of that KV head: row r of a sequence is token r // group, head r % group. So K and V are read once
for the whole group. The block walks over the keys in tiles of N tokens, and carries three things along (the running
softmax of Milakov and Gimelshein, arXiv:1805.02867; tiles as in FlashAttention, arXiv:2205.14135):

    top[M]     the largest score of each row so far
    total[M]   the sum of exp(score - top)
    acc[M, E]  the sum of exp(score - top) * v, in the registers of the threads

Order is part of the contract: every sum below is taken in an order that depends on the constants only, never on where a
token lies or what else is in the batch. All threads of a block take the same way through every branch that holds a
barrier.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from numba import cuda, float32, int64

from pagedkern.backends.numba_cuda.config import Constants
from pagedkern.backends.numba_cuda.device import (
    commit_copies,
    copy_async,
    inlined,
    load_vector,
    wait_copies,
    wait_copies_but_last,
)
from pagedkern.backends.numba_cuda.dtypes import FORMATS, loading

INF = math.inf
LANES = 8  # threads that share a row of the softmax
ALL = 0xFFFFFFFF  # all 32 threads of a warp
COLUMNS = 4  # columns of acc that a thread holds


@inlined
def first_query(sequence, starts, ragged):
    """The row of q at which a sequence begins: starts is cu_seqlens_q, without which (`ragged` false) it has one."""
    if ragged:
        return int64(starts[sequence])
    return int64(sequence)


class Steps(NamedTuple):
    """Device functions of one set of constants, and the size of each thread's share of acc."""

    stage_queries: Callable[..., Any]
    attend: Callable[..., Any]
    collect: Callable[..., Any]
    acc_size: int


def tile_steps(c: Constants) -> Steps:
    """The steps for these constants."""
    M, N, T, D, E = c.rows, c.keys, c.threads, c.head_dim, c.head_dim_v
    GROUP, BLOCK, SPAN = c.group, c.block_size, c.span
    CAUSAL, WINDOW, SOFTCAP, ALIBI = c.causal, c.window, c.softcap, c.alibi
    K_STRIDE, V_STRIDE, Q_STRIDE, P_STRIDE = c.k_stride, c.v_stride, c.q_stride, c.p_stride

    # -- Queries ------------------------------------------------------------------------------------------------------
    Q_VECTOR = c.q_vector
    Q_VECTORS = D // Q_VECTOR
    load_query = loading(c.q_dtype, Q_VECTOR)

    @inlined
    def stage_queries(q_tile, q, q_token, q_head, first_token, first_row, num_rows, kv_head):
        """Rows first_row .. first_row+M-1 of a sequence into q_tile [M, D], as float32; zeros past its last row."""
        numbers = cuda.local.array(Q_VECTOR, float32)
        for i in range(cuda.threadIdx.x, M * Q_VECTORS, T):
            row, d = i // Q_VECTORS, i % Q_VECTORS * Q_VECTOR
            packed = first_row + row
            token, head = first_token + packed // GROUP, kv_head * GROUP + packed % GROUP
            for n in range(Q_VECTOR):
                numbers[n] = 0.0
            if packed < num_rows:
                load_query(numbers, 0, q, token * q_token + head * q_head + d)
            for n in range(Q_VECTOR):
                q_tile[row * Q_STRIDE + d + n] = numbers[n]

    # -- The block table ----------------------------------------------------------------------------------------------
    @inlined
    def find_blocks(blocks, half, table, table_start, start, begin, end):
        """blocks[half + n] = the physical block of token start + n; -1 outside of begin .. end-1: not looked up.

        The sequence's row of the table begins at table[table_start].
        """
        for n in range(cuda.threadIdx.x, N, T):
            token = start + n
            blocks[half + n] = -1
            if begin <= token and token < end:
                blocks[half + n] = table[table_start + token // BLOCK]

    # -- K and V into shared memory -----------------------------------------------------------------------------------
    def staging(DIM: int, STRIDE: int, VECTOR: int) -> Callable[..., Any]:
        VECTORS = DIM // VECTOR

        @inlined
        def stage(tile, blocks, half, cache, block_stride, slot_stride, head_start, start):
            """Begin to copy tokens start .. start+N-1 of one KV head into tile [N, DIM]; zeros where there is no block.

            Neighbouring threads read neighbouring vectors of a token. The id is widened before it is multiplied: a
            cache may hold more than 2**31 elements.
            """
            for i in range(cuda.threadIdx.x, N * VECTORS, T):
                n, d = i // VECTORS, i % VECTORS * VECTOR
                block, slot = int64(blocks[half + n]), (start + n) % BLOCK
                if block >= 0:
                    at = block * block_stride + slot * slot_stride + head_start + d
                    copy_async(tile, n * STRIDE + d, cache, at, VECTOR)
                else:
                    for m in range(VECTOR):
                        tile[n * STRIDE + d + m] = 0
            commit_copies()

        return stage

    stage_keys, stage_values = staging(D, K_STRIDE, c.k_vector), staging(E, V_STRIDE, c.v_vector)

    # -- Scores -------------------------------------------------------------------------------------------------------
    ROWS = min(M, 4)  # of a thread
    KEYS = max(1, min(4, M * N // (ROWS * T)))
    KEY_THREADS = N // KEYS
    CHUNK = 4 if c.kv_dtype == "float32" else 8  # elements of a row at a time
    SLICE = 64 if c.q_dtype == "float32" else D  # elements of D whose products are summed in registers
    SCORES, K_SIZE = ROWS * KEYS, KEYS * CHUNK
    load_chunk = loading(c.kv_dtype, CHUNK)

    @inlined
    def multiply(sums, x, k, q_tile, k_tile, first_row, first_key, begin, end):
        """sums = products of elements begin .. end-1 of ROWS rows and KEYS keys. x, k: room for CHUNK of each."""
        for m in range(SCORES):
            sums[m] = 0.0
        for d in range(begin, end, CHUNK):
            for n in range(KEYS):
                load_chunk(k, n * CHUNK, k_tile, (first_key + n * KEY_THREADS) * K_STRIDE + d)
            for r in range(ROWS):
                for e in range(0, CHUNK, 4):
                    load_vector(x, e, q_tile, (first_row + r) * Q_STRIDE + d + e, 4)
                for n in range(KEYS):
                    part, at = float32(0.0), n * CHUNK  # its roundings are small beside those of the whole sum
                    for e in range(CHUNK):
                        part += x[e] * k[at + e]
                    sums[r * KEYS + n] += part

    @inlined
    def score(p, q_tile, k_tile, rows):
        """p = Q K' for the first `rows` of M rows.

        Each thread computes ROWS x KEYS products in registers, CHUNK elements of D at a time. Its keys are KEY_THREADS
        apart, so that neighbouring threads read neighbouring rows of the tile, whose stride spreads them over the banks
        of shared memory; the query is the same for all of them. Sums of SLICE elements are added up in p, which costs
        no registers: in float32, sums of sums of sums err little, however long the sum.
        """
        sums = cuda.local.array(SCORES, float32)
        x = cuda.local.array(CHUNK, float32)
        k = cuda.local.array(K_SIZE, float32)
        for i in range(cuda.threadIdx.x, (rows + ROWS - 1) // ROWS * KEY_THREADS, T):
            first_row, first_key = i // KEY_THREADS * ROWS, i % KEY_THREADS
            multiply(sums, x, k, q_tile, k_tile, first_row, first_key, 0, min(SLICE, D))
            for r in range(ROWS):
                for n in range(KEYS):
                    p[(first_row + r) * P_STRIDE + first_key + n * KEY_THREADS] = sums[r * KEYS + n]
            if SLICE < D:
                for begin in range(SLICE, D, SLICE):
                    multiply(sums, x, k, q_tile, k_tile, first_row, first_key, begin, min(begin + SLICE, D))
                    for r in range(ROWS):
                        for n in range(KEYS):
                            p[(first_row + r) * P_STRIDE + first_key + n * KEY_THREADS] += sums[r * KEYS + n]

    # -- Softmax ------------------------------------------------------------------------------------------------------
    SCALED_LATE = c.q_dtype == "float32" and not SOFTCAP and not ALIBI

    @inlined
    def soften(
        p, rows, top, total, decay, start, end, position, first_row, scale, softcap, window, slopes, kv_head, ragged
    ):
        """Scores into weights exp(score - top), in place; brings top and total up to date, decay = exp(old - new top).

        LANES threads share a row, so a warp does 4 rows, whether they exist or not. `position` is that of the
        sequence's first query. A key that a row does not see weighs 0, or, where rows of the tile see different keys
        (`ragged`), -1, which `weigh` passes over: 0 times a NaN that only other rows see would be NaN.
        """
        lane = cuda.threadIdx.x % LANES
        for row in range(cuda.threadIdx.x // LANES, (rows + 3) // 4 * 4, T // LANES):
            here = position + (first_row + row) // GROUP
            seen_from, seen_to = int64(0), int64(end)
            if CAUSAL:
                seen_to = min(seen_to, here + 1)
            if WINDOW:
                seen_from = max(seen_from, here - window + 1)
            slope = float32(0.0)
            if ALIBI:
                slope = slopes[kv_head * GROUP + (first_row + row) % GROUP]
            best = float32(-INF)
            for n in range(lane, N, LANES):
                s = p[row * P_STRIDE + n] * scale
                if SOFTCAP:
                    s = softcap * math.tanh(s / softcap)
                if ALIBI:
                    s += slope * float32(start + n - here)
                if not SCALED_LATE:
                    p[row * P_STRIDE + n] = s
                if seen_from <= start + n and start + n < seen_to and s > best:
                    best = s
            best = max(best, cuda.shfl_xor_sync(ALL, best, 4))
            best = max(best, cuda.shfl_xor_sync(ALL, best, 2))
            best = max(best, cuda.shfl_xor_sync(ALL, best, 1))
            old = top[row]
            new = max(old, best)
            shift = new if new > -INF else float32(0.0)  # (-inf) - (-inf) is NaN
            weights = float32(0.0)
            for n in range(lane, N, LANES):
                weight = float32(-1.0) if ragged else float32(0.0)
                if seen_from <= start + n and start + n < seen_to:
                    s = p[row * P_STRIDE + n]
                    above = s - shift
                    if SCALED_LATE:  # not rounded before the difference is taken, unless the product overflows
                        above = cuda.fma(s, scale, -shift) if abs(s * scale) < INF else s * scale - shift
                    weight = math.exp(above)
                    weights += weight
                p[row * P_STRIDE + n] = weight
            weights += cuda.shfl_xor_sync(ALL, weights, 4)
            weights += cuda.shfl_xor_sync(ALL, weights, 2)
            weights += cuda.shfl_xor_sync(ALL, weights, 1)
            if lane == 0:
                decay[row] = math.exp(old - shift)
                total[row] = total[row] * decay[row] + weights
                top[row] = new

    # -- The weighted sum of V ----------------------------------------------------------------------------------------
    COLUMN_THREADS = E // COLUMNS
    SHARE = min(M, 8)  # rows of acc that a thread holds
    UNITS = M // SHARE * COLUMN_THREADS  # pieces of SHARE x COLUMNS that acc consists of
    SLICES = max(1, T // UNITS)  # threads that share a piece, each with a part of the keys
    ROUNDS = -(-UNITS // T)  # pieces of one thread, where there are more than threads
    PIECE = SHARE * COLUMNS
    load_columns = loading(c.kv_dtype, COLUMNS)

    @inlined
    def weigh(acc, p, v_tile, decay, rows, ragged):
        """acc = acc * decay + P V: each thread for its rows and columns, four keys at a time."""
        v = cuda.local.array(16, float32)
        w = cuda.local.array(4, float32)
        for r in range(ROUNDS):
            unit = (cuda.threadIdx.x + r * T) % UNITS
            part = (cuda.threadIdx.x + r * T) // UNITS
            first_row, column = unit // COLUMN_THREADS * SHARE, unit % COLUMN_THREADS * COLUMNS
            if part < SLICES and first_row < rows:
                for m in range(SHARE):
                    for e in range(COLUMNS):
                        acc[r * PIECE + m * COLUMNS + e] *= decay[first_row + m]
                for n in range(4 * part, N, 4 * SLICES):
                    for j in range(4):
                        load_columns(v, j * COLUMNS, v_tile, (n + j) * V_STRIDE + column)
                    for m in range(SHARE):
                        load_vector(w, 0, p, (first_row + m) * P_STRIDE + n, 4)
                        at = r * PIECE + m * COLUMNS
                        if ragged:
                            for j in range(4):
                                if not w[j] < 0:
                                    for e in range(COLUMNS):
                                        acc[at + e] += w[j] * v[j * COLUMNS + e]
                        else:
                            w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
                            for e in range(COLUMNS):
                                acc[at + e] = acc[at + e] + w0 * v[e] + w1 * v[4 + e] + w2 * v[8 + e] + w3 * v[12 + e]

    # -- All keys of a tile of queries --------------------------------------------------------------------------------
    @inlined
    def attend(
        acc, q_tile, k_tile, v_tile, p, blocks, top, total, decay,
        k, k_block, k_slot, k_head, v, v_block, v_slot, v_head, table, table_start, slopes, scale, softcap, window,
        begin, end, start, skip, position, last_position, first_row, rows, kv_head,
    ):  # fmt: skip
        """Walk over the tiles of keys from `start` to `end`; `skip` tokens are left out after each span.

        begin .. end-1 are the tokens that any row of the tile sees; nothing else is read. Rows `position` (of the
        sequence's first query) and `last_position` (of the tile's last row) tell where rows see different tokens.
        V of a tile arrives while its scores are computed, K of the next one while V is summed.
        """
        for r in range(ROUNDS * PIECE):
            acc[r] = 0.0
        for row in range(cuda.threadIdx.x, M, T):
            top[row] = -INF
            total[row] = 0.0
        first_position = position + first_row // GROUP
        half = 0  # of `blocks`: the one holds the ids of this tile, the other those of the next
        find_blocks(blocks, half, table, table_start, start, begin, end)
        cuda.syncthreads()  # the block ids are there
        stage_keys(k_tile, blocks, half, k, k_block, k_slot, k_head, start)
        while start < end:
            after = start + N
            if after % SPAN == 0:
                after += skip
            ragged = False
            if CAUSAL:
                ragged = min(start + N, end) > first_position + 1
            if WINDOW:
                ragged = ragged or max(start, begin) < last_position - window + 1

            wait_copies()
            cuda.syncthreads()  # K is there, and nobody needs the last tile of V and its weights any more
            stage_values(v_tile, blocks, half, v, v_block, v_slot, v_head, start)
            find_blocks(blocks, N - half, table, table_start, after, begin, end)
            score(p, q_tile, k_tile, rows)
            cuda.syncthreads()  # the scores and the next block ids are there, and nobody needs K any more
            stage_keys(k_tile, blocks, N - half, k, k_block, k_slot, k_head, after)
            soften(
                p, rows, top, total, decay, start, end, position, first_row, scale, softcap, window, slopes, kv_head,
                ragged,
            )  # fmt: skip
            wait_copies_but_last()
            cuda.syncthreads()  # the weights and V are there
            if ragged:
                weigh(acc, p, v_tile, decay, rows, True)
            else:
                weigh(acc, p, v_tile, decay, rows, False)
            start, half = after, N - half
        wait_copies()

    @inlined
    def collect(result, acc):
        """acc from the registers of all threads into result [M, E] in shared memory; parts are added in their order."""
        for turn in range(SLICES):
            for r in range(ROUNDS):
                unit = (cuda.threadIdx.x + r * T) % UNITS
                part = (cuda.threadIdx.x + r * T) // UNITS
                if part == turn:
                    first_row, column = unit // COLUMN_THREADS * SHARE, unit % COLUMN_THREADS * COLUMNS
                    for m in range(SHARE):
                        for e in range(COLUMNS):
                            at = (first_row + m) * Q_STRIDE + column + e
                            x = acc[r * PIECE + m * COLUMNS + e]
                            result[at] = x if turn == 0 else result[at] + x
            cuda.syncthreads()

    return Steps(stage_queries, attend, collect, ROUNDS * PIECE)


def finish_rows(c: Constants) -> Callable[..., Any]:
    """The device function that turns sums into results."""
    SINKS, LSE, narrow = c.sinks, c.lse, FORMATS[c.q_dtype].narrow

    @inlined
    def finish_row(top, total, x, token, head, e, unit, sinks, out, out_token, out_head, lse, lse_token, lse_head):
        """Element e of a row: x / total into out, times `unit`; with element 0 also lse. The sink joins here.

        A row that has seen nothing has total 0: out is 0 and lse is -inf, or the sink. A sink that is NaN makes both
        NaN, one of +inf takes all.
        """
        if SINKS:
            sink = sinks[head]
            if sink != -INF:
                higher = max(top, sink)
                fade = math.exp(top - higher)
                weight = float32(1.0) if sink == INF else math.exp(sink - higher)
                x, total, top = x * fade, total * fade + weight, higher
        result, log = float32(0.0), float32(-INF)
        if total != 0:
            result, log = x / total * unit, top + math.log(total)
        out[token * out_token + head * out_head + e] = narrow(result)
        if LSE and e == 0:
            lse[token * lse_token + head * lse_head] = log

    return finish_row
