"""What a call's threads share, the scratch memory of one of them, and which row of it belongs to whom."""

from __future__ import annotations

from typing import NamedTuple

from pagedkern.backends.cpu.jit import inlined
from pagedkern.backends.cpu.memory import get_i64
from pagedkern.backends.cpu.micro import TILE
from pagedkern.backends.cpu.plan import G_COUNT, G_HEAD, G_TOKEN, Args

S_ROW = 4 * TILE  # bytes of one row of scores
P_ROW = 2 * TILE  # bytes of one row of weights as bfloat16
ADDRESSES = 16 * TILE  # bytes of the addresses of one tile
HEAD = 64  # bytes before O in a row of partial results: maximum, sum, exact sum
NOTHING = float("-inf")


class Work(NamedTuple):
    """The plan of a call, the memory of its threads, and where what lies in the scratch of one: offsets in bytes."""

    groups: int
    items: int
    n_items: int
    counters: int
    partials: int
    scratch: int
    scratch_size: int  # bytes for each thread
    chunk: int  # elements of one chunk of a cache row
    lanes: int  # elements of one vector
    item: int  # bytes of one element of a cache
    pairs: int  # whether pairs of bfloat16 are multiplied: `TargetKey.dot`
    tables: int  # whether they come from tables: `TargetKey.tables`
    q_row: int  # bytes of a row of Q, whole chunks
    o_row: int  # bytes of a row of O, whole chunks
    lines: int  # cache lines of a cache row
    at_o: int  # float32 [rows, padded E]
    at_s: int  # float32 [rows, TILE]
    at_p: int  # bfloat16 [rows, TILE]: weights
    at_m: int  # float32 [rows]: running maximum
    at_l: int  # float32 [rows]: running sum of the weights, as they are multiplied
    at_exact: int  # float32 [rows]: that of the weights before they are rounded for `pairs`; otherwise at_l
    at_alpha: int  # float32 [rows]: factor for what was summed before this tile
    at_addresses: int  # int64 [2, 2, TILE]: for this tile and the next, address of each token's K, then of its V
    at_packed: int  # int64 [TILE]: address of each token's packed V
    at_zero: int  # a cache row of zeros
    at_pack: int  # float32 [TILE, padded E]


@inlined
def count_rows(c: Args, group: int) -> int:
    """Rows of one KV head of a group."""
    tokens: int = get_i64(group + G_COUNT)
    return tokens * (c.heads // c.kv_heads)


@inlined
def find_row(c: Args, group: int, r: int) -> tuple[int, int]:
    """Query token and query head of a group's row: for each KV head each token, for each token each query head."""
    per_kv, rows = c.heads // c.kv_heads, count_rows(c, group)
    head = (get_i64(group + G_HEAD) + r // rows) * per_kv + r % per_kv
    return get_i64(group + G_TOKEN) + r % rows // per_kv, head
