"""The state of an allocator as a JSON object, and back."""

from __future__ import annotations

from array import array
from typing import Any

from pagedkern.allocator.core import Core
from pagedkern.allocator.pool import BlockPool
from pagedkern.allocator.sequence import Sequence, State
from pagedkern.errors import InvalidArgument

VERSION = 1
_FIELDS = (
    "_length",
    "_cached",
    "_present",
    "_computed",
    "_scheduled",
    "_private",
    "_registered",
    "_root",
    "_priority",
    "_arriving",
)


def take(core: Core, reserve: int) -> dict[str, Any]:
    """The state. O(blocks + tokens)."""
    if core.in_flight:
        raise InvalidArgument(f"snapshot: {len(core.in_flight)} plans are in flight, commit or abort them first")
    if core.in_transaction:
        raise InvalidArgument("snapshot: a transaction is open, leave it first")
    for seq in core.live.values():
        core.detach(seq)
    return {
        "pagedkern_allocator": VERSION,
        "num_blocks": core.pool.num_blocks,
        "num_host_blocks": core.host.num_blocks,
        "block_size": core.block_size,
        "prefix_caching": core.caching,
        "reserve": reserve,
        "last_seq": core.last_seq,
        "last_plan": core.last_plan,
        "roots": [[_encode(salt), node] for salt, node in core.prefix.salts()],
        "sequences": [_sequence(seq) for _, seq in sorted(core.live.items())],
        "device": _pool(core.pool),
        "host": _pool(core.host),
        "twins": list(map(list, core.pool.twins.items())),
        "incoming": list(map(list, core.pool.incoming.items())),
        "counts": dict(core.counts),
    }


def _encode(salt: Any) -> Any:
    return {"bytes": salt.hex()} if isinstance(salt, bytes) else salt


def _decode(salt: Any) -> Any:
    return bytes.fromhex(salt["bytes"]) if isinstance(salt, dict) else salt


def _sequence(seq: Sequence) -> dict[str, Any]:
    return {
        "id": seq.id,
        "state": seq.state,
        "blocks": seq._blocks[:],
        "tokens": seq._tokens.tolist(),
        "salt": _encode(seq._salt),
        **{name[1:]: getattr(seq, name) for name in _FIELDS},
    }


def _pool(pool: BlockPool) -> dict[str, Any]:
    blank, idle = pool.free_blocks()
    return {"blank": blank, "idle": idle, "levels": pool.levels(), "index": pool.prefix.state(), **_marks(pool)}


def _marks(pool: BlockPool) -> dict[str, int]:
    return {"num_evicted": pool.num_evicted, "least_free": pool.least_free}


def shape(state: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the constructor."""
    if not isinstance(state, dict) or state.get("pagedkern_allocator") != VERSION:
        raise InvalidArgument(f"state: not a snapshot of version {VERSION} of this allocator")
    names = ("num_blocks", "block_size", "num_host_blocks", "prefix_caching")
    return {name: state[name] for name in names}


def put(core: Core, state: dict[str, Any]) -> None:
    """Fill a new allocator's core. O(blocks + tokens)."""
    core.last_seq, core.last_plan = state["last_seq"], state["last_plan"]
    salts = [(_decode(salt), node) for salt, node in state["roots"]]
    for pool, part in ((core.pool, state["device"]), (core.host, state["host"])):
        pool.prefix.put(part["index"], salts if pool is core.pool else [])
        pool.num_evicted, pool.least_free = part["num_evicted"], part["least_free"]
        pool.put(part["blank"], part["idle"], [(b, level) for b, level in part["levels"]])
    for item in state["sequences"]:
        blocks, tokens = list(item["blocks"]), array("q", item["tokens"])
        seq = Sequence(core.owner, item["id"], blocks, tokens, item["length"])
        for name in _FIELDS:
            setattr(seq, name, item[name[1:]])
        seq._state, seq._salt = State(item["state"]), _decode(item["salt"])
        core.live[seq.id] = seq
        for b in blocks:
            if b >= 0:
                core.pool_of(seq).refs[b] += 1
    for b, other in state["twins"]:
        core.pool.twin(b, other)
    for b, other in state["incoming"]:
        core.pool.incoming[b] = other
        core.host.refs[other] += 1
    core.counts.update(state["counts"])
    core.undo.clear()
