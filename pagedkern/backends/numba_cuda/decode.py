"""Decode: few queries, many keys. The keys of a sequence are split among blocks, whose results a second kernel merges.

Split s of P takes the spans s, s+P, s+2P ... of a fixed number of tokens, counted from token 0 of the sequence. So the
split of a key depends on its position alone, and the result of a sequence on nothing but that sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from numba import cuda, float32, int32, int64

from pagedkern.backends.numba_cuda.config import Constants
from pagedkern.backends.numba_cuda.device import inlined
from pagedkern.backends.numba_cuda.dtypes import FORMATS
from pagedkern.backends.numba_cuda.tile import INF, finish_rows, first_query, tile_steps


def decode_kernel(c: Constants) -> Callable[..., None]:
    """Attention of one tile of query rows over one split of the keys, as a partial result.

    Grid: (sequence * tiles + tile, split, KV head). Of sequences with at most `decode_tokens` query tokens it writes
    acc to `sums` float32 [S * tiles, G, P, M, E] and (top, total) to `state` float32 [S * tiles, G, P, M, 2].
    """
    steps = tile_steps(c)
    stage_queries, attend, collect, ACC = steps.stage_queries, steps.attend, steps.collect, steps.acc_size
    M, N, T, E, GROUP, SPAN, SPLITS = c.rows, c.keys, c.threads, c.head_dim_v, c.group, c.span, c.splits
    CAUSAL, WINDOW, RAGGED, QUANTIZED, DECODE_TOKENS = c.causal, c.window, c.ragged, c.quantized, c.decode_tokens
    Q_STRIDE, CODE = c.q_stride, FORMATS[c.kv_dtype].code
    Q_SIZE, K_SIZE, V_SIZE, P_SIZE = M * c.q_stride, N * c.k_stride, N * c.v_stride, c.state_rows * c.p_stride
    STATE, IDS = c.state_rows, 2 * N

    def decode(
        q, q_token, q_head, k, k_block, k_slot, k_head, v, v_block, v_slot, v_head, table, table_row, seq_lens, starts,
        k_scale, slopes, scale, softcap, window, tiles, sums, state,
    ):  # fmt: skip
        q_tile = cuda.shared.array(Q_SIZE, float32, alignment=16)
        p = cuda.shared.array(P_SIZE, float32, alignment=16)
        k_tile = cuda.shared.array(K_SIZE, CODE, alignment=16)
        v_tile = cuda.shared.array(V_SIZE, CODE, alignment=16)
        blocks = cuda.shared.array(IDS, int32)
        top = cuda.shared.array(STATE, float32)
        total = cuda.shared.array(STATE, float32)
        decay = cuda.shared.array(STATE, float32)
        acc = cuda.local.array(ACC, float32)

        sequence, first_row = int64(cuda.blockIdx.x) // tiles, int64(cuda.blockIdx.x) % tiles * M
        split, kv_head = int64(cuda.blockIdx.y), int64(cuda.blockIdx.z)
        first_token = first_query(sequence, starts, RAGGED)
        tokens = first_query(sequence + 1, starts, RAGGED) - first_token
        num_rows = tokens * GROUP
        if tokens > DECODE_TOKENS or first_row >= num_rows:
            return  # the whole block: the prefill kernel computes this sequence, or it has no such tile

        seq_len = int64(seq_lens[sequence])
        position = seq_len - tokens  # of the first query
        rows = min(num_rows - first_row, M)
        last_position = position + (first_row + rows - 1) // GROUP
        begin, end = int64(0), seq_len
        if CAUSAL:
            end = min(end, last_position + 1)
        if WINDOW:
            begin = max(begin, position + first_row // GROUP - window + 1)
        first_span = begin // SPAN
        span = first_span + (split - first_span) % SPLITS  # the first of this split that holds a key to see
        start = max(span * SPAN, begin // N * N)
        place = (int64(cuda.blockIdx.x) * cuda.gridDim.z + kv_head) * cuda.gridDim.y + split
        if start >= end:  # no key for this split
            for row in range(cuda.threadIdx.x, M, T):
                state[(place * M + row) * 2] = -INF
                state[(place * M + row) * 2 + 1] = 0.0
            return
        if QUANTIZED:
            scale *= k_scale[kv_head]

        stage_queries(q_tile, q, q_token, q_head, first_token, first_row, num_rows, kv_head)
        attend(
            acc, q_tile, k_tile, v_tile, p, blocks, top, total, decay,
            k, k_block, k_slot, kv_head * k_head, v, v_block, v_slot, kv_head * v_head,
            table, sequence * table_row, slopes, scale, softcap, window,
            begin, end, start, (SPLITS - 1) * SPAN, position, last_position, first_row, rows, kv_head,
        )  # fmt: skip
        collect(q_tile, acc)
        for i in range(cuda.threadIdx.x, M * E, T):
            sums[place * (M * E) + i] = q_tile[i // E * Q_STRIDE + i % E]
        for row in range(cuda.threadIdx.x, M, T):
            state[(place * M + row) * 2] = top[row]
            state[(place * M + row) * 2 + 1] = total[row]

    return decode


def merge_kernel(c: Constants) -> Callable[..., None]:
    """The splits of each decoded row, added in their order; and the rows of q that belong to no sequence.

    Grid: (S * tiles + 1, KV head). The last block of a KV head fills the rows past the last sequence.
    """
    finish_row = finish_rows(c)
    M, T, E, GROUP, RAGGED, QUANTIZED = c.rows, c.threads, c.head_dim_v, c.group, c.ragged, c.quantized
    DECODE_TOKENS = c.decode_tokens

    @inlined
    def merge_element(place, splits, row, e, sums, state):
        """top, total and element e of acc of one row over all splits. A split with total 0 has seen nothing."""
        top = float32(-INF)
        for split in range(splits):
            at = ((place + split) * M + row) * 2
            if state[at + 1] != 0:
                top = max(top, state[at])
        shift = top if top > -INF else float32(0.0)
        total, x = float32(0.0), float32(0.0)
        for split in range(splits):
            at = ((place + split) * M + row) * 2
            if state[at + 1] != 0:
                weight = math.exp(state[at] - shift)
                total += state[at + 1] * weight
                x += sums[((place + split) * M + row) * E + e] * weight
        return top, total, x

    def merge(
        sums, state, splits, tiles, num_seqs, num_tokens, starts, v_scale, sinks,
        out, out_token, out_head, lse, lse_token, lse_head,
    ):  # fmt: skip
        sequence, first_row = int64(cuda.blockIdx.x) // tiles, int64(cuda.blockIdx.x) % tiles * M
        kv_head = int64(cuda.blockIdx.y)
        if cuda.blockIdx.x == cuda.gridDim.x - 1:
            past = first_query(num_seqs, starts, RAGGED)
            for i in range(cuda.threadIdx.x, (num_tokens - past) * GROUP * E, T):
                token, head = past + i // (GROUP * E), kv_head * GROUP + i // E % GROUP
                finish_row(
                    float32(-INF), float32(0.0), float32(0.0), token, head, i % E, float32(1.0), sinks,
                    out, out_token, out_head, lse, lse_token, lse_head,
                )  # fmt: skip
            return
        first_token = first_query(sequence, starts, RAGGED)
        tokens = first_query(sequence + 1, starts, RAGGED) - first_token
        rows = min(tokens * GROUP - first_row, M)
        if tokens > DECODE_TOKENS:
            return
        place = (int64(cuda.blockIdx.x) * cuda.gridDim.y + kv_head) * splits
        unit = float32(1.0)
        if QUANTIZED:
            unit = v_scale[kv_head]
        for i in range(cuda.threadIdx.x, rows * E, T):
            row, e = i // E, i % E
            top, total, x = merge_element(place, splits, row, e, sums, state)
            token, head = first_token + (first_row + row) // GROUP, kv_head * GROUP + (first_row + row) % GROUP
            finish_row(top, total, x, token, head, e, unit, sinks, out, out_token, out_head, lse, lse_token, lse_head)

    return merge
