"""Prefill: many queries. One block computes a tile of query rows over all the keys that they see."""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, float32, int32, int64

from pagedkern.backends.numba_cuda.config import Constants
from pagedkern.backends.numba_cuda.device import inlined
from pagedkern.backends.numba_cuda.dtypes import FORMATS
from pagedkern.backends.numba_cuda.tile import finish_rows, first_query, tile_steps


def prefill_kernel(c: Constants) -> Callable[..., None]:
    """Attention of one tile of query rows, of sequences with more than `decode_tokens` query tokens.

    Grid: (tile, KV head). Lengths are known on the device only, so the grid is an upper bound: sequence i begins at
    tile `starts[i] * group // M + i`, which leaves room for all its tiles wherever its neighbours end.
    """
    steps = tile_steps(c)
    finish_row = finish_rows(c)
    stage_queries, attend, collect, ACC = steps.stage_queries, steps.attend, steps.collect, steps.acc_size
    M, N, T, E, GROUP = c.rows, c.keys, c.threads, c.head_dim_v, c.group
    CAUSAL, WINDOW, RAGGED, QUANTIZED, DECODE_TOKENS = c.causal, c.window, c.ragged, c.quantized, c.decode_tokens
    Q_STRIDE, CODE = c.q_stride, FORMATS[c.kv_dtype].code
    Q_SIZE, K_SIZE, V_SIZE, P_SIZE = M * c.q_stride, N * c.k_stride, N * c.v_stride, c.state_rows * c.p_stride
    STATE, IDS = c.state_rows, 2 * N

    @inlined
    def sequence_of(tile, starts, num_seqs):
        """The last sequence that begins at or before this tile, by bisection."""
        low, high = int64(0), int64(num_seqs)
        while high - low > 1:
            middle = (low + high) // 2
            if starts[middle] * int64(GROUP) // M + middle <= tile:
                low = middle
            else:
                high = middle
        return low

    def prefill(
        q, q_token, q_head, k, k_block, k_slot, k_head, v, v_block, v_slot, v_head, table, table_row, seq_lens, starts,
        k_scale, slopes, scale, softcap, window, num_seqs, v_scale, sinks,
        out, out_token, out_head, lse, lse_token, lse_head,
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

        sequence, kv_head = sequence_of(int64(cuda.blockIdx.x), starts, num_seqs), int64(cuda.blockIdx.y)
        first_token = first_query(sequence, starts, RAGGED)
        tokens = first_query(sequence + 1, starts, RAGGED) - first_token
        first_row = (int64(cuda.blockIdx.x) - (first_token * GROUP // M + sequence)) * M
        num_rows = tokens * GROUP
        if tokens <= DECODE_TOKENS or first_row >= num_rows:
            return

        seq_len = int64(seq_lens[sequence])
        position = seq_len - tokens  # of the first query
        rows = min(num_rows - first_row, M)
        last_position = position + (first_row + rows - 1) // GROUP
        begin, end = int64(0), seq_len
        if CAUSAL:
            end = min(end, last_position + 1)
        if WINDOW:
            begin = max(begin, position + first_row // GROUP - window + 1)
        if QUANTIZED:
            scale *= k_scale[kv_head]

        stage_queries(q_tile, q, q_token, q_head, first_token, first_row, num_rows, kv_head)
        attend(
            acc, q_tile, k_tile, v_tile, p, blocks, top, total, decay,
            k, k_block, k_slot, kv_head * k_head, v, v_block, v_slot, kv_head * v_head,
            table, sequence * table_row, slopes, scale, softcap, window,
            begin, end, begin // N * N, 0, position, last_position, first_row, rows, kv_head,
        )  # fmt: skip
        collect(q_tile, acc)

        unit = float32(1.0)
        if QUANTIZED:
            unit = v_scale[kv_head]
        for i in range(cuda.threadIdx.x, rows * E, T):
            row, e = i // E, i % E
            token, head = first_token + (first_row + row) // GROUP, kv_head * GROUP + (first_row + row) % GROUP
            finish_row(
                top[row], total[row], q_tile[row * Q_STRIDE + e], token, head, e, unit, sinks,
                out, out_token, out_head, lse, lse_token, lse_head,
            )  # fmt: skip

    return prefill
