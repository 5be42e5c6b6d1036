"""The state of an allocator as a JSON object, and back."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pagedkern.allocator import retention, spans
from pagedkern.allocator.arguments import MAX_TOKENS, PRIORITIES, integer, tenant
from pagedkern.allocator.handles import STORED, Sequence, State
from pagedkern.allocator.ledger import Ledger
from pagedkern.allocator.pool import BlockPool
from pagedkern.errors import InvalidArgument

VERSION = 2
_FLAGS = ("_arriving", "_whole", "_apart", "_dear")
_MOST = {"_priority": PRIORITIES - 1, "_root": 2**63, "_question": 2**63}
"""The largest value of each field that does not count tokens or blocks."""


def take(ledger: Ledger, reserve: int) -> dict[str, Any]:
    """The state. O(blocks + tokens)."""
    if ledger.in_flight:
        raise InvalidArgument(f"snapshot: {len(ledger.in_flight)} plans are in flight, commit or abort them first")
    if ledger.in_transaction:
        raise InvalidArgument("snapshot: a transaction is open, leave it first")
    for seq in ledger.live.values():
        ledger.detach(seq)
    ledger.deadlines.reading = None
    return {
        "pagedkern_allocator": VERSION,
        "num_blocks": ledger.pool.num_blocks,
        "num_host_blocks": ledger.host.num_blocks,
        "block_size": ledger.block_size,
        "prefix_caching": ledger.caching,
        "reserve": reserve,
        "last_seq": ledger.last_seq,
        "last_plan": ledger.last_plan,
        "roots": [[_encode(salt), node] for salt, node in ledger.roots.items()],
        "sequences": [_sequence(ledger, seq) for _, seq in sorted(ledger.live.items())],
        "device": _pool(ledger.pool),
        "host": _pool(ledger.host),
        "twins": list(map(list, ledger.pool.twins.items())),
        "incoming": list(map(list, ledger.pool.incoming.items())),
        "ending": [_ending(ledger, lease) for lease in ledger.deadlines.pending()],
        "counts": dict(ledger.counts.numbers),
        "questions": {"last": ledger.counts.last_question, "sharing": list(map(list, ledger.counts.sharing.items()))},
    }


def _encode(salt: Any) -> Any:
    return {"bytes": salt.hex()} if isinstance(salt, bytes) else salt


def _decode(salt: Any) -> Any:
    return bytes.fromhex(salt["bytes"]) if isinstance(salt, dict) else salt


def _sequence(ledger: Ledger, seq: Sequence) -> dict[str, Any]:
    return {
        "id": seq.id,
        "state": seq.state,
        "blocks": seq._blocks[:],
        "tokens": seq._tokens.tolist(),
        "salt": _encode(seq._salt),
        "keys": spans.to_json(seq._keys),
        "retention": [list(kept) for kept in seq._retention],
        "leases": [_leased(ledger, lease) for lease in seq._leases if lease is not None],
        **{name[1:]: getattr(seq, name) for name in _FLAGS},
        **{name[1:]: getattr(seq, name) for name in STORED},
    }


def _leased(ledger: Ledger, lease: retention.Lease) -> list[list[int]]:
    """The blocks of a lease: of the device, of the host."""
    return [sorted(b for ranks, b in lease.blocks if ranks is pool.idle) for pool in (ledger.pool, ledger.host)]


def _ending(ledger: Ledger, lease: retention.Lease) -> list[Any]:
    """Priority, seconds that are left, blocks of a lease whose sequence has been freed."""
    assert lease.until is not None
    return [lease.priority, max(0.0, lease.until - ledger.deadlines.now()), *_leased(ledger, lease)]


def _pool(pool: BlockPool) -> dict[str, Any]:
    blank, idle = pool.free_blocks()
    return {"blank": blank, "idle": idle, "levels": pool.idle.levels(), "index": pool.prefix.state(), **_marks(pool)}


def _marks(pool: BlockPool) -> dict[str, int]:
    return {"num_evicted": pool.num_evicted, "least_free": pool.least_free}


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Whatever is wrong with this part of a snapshot is `InvalidArgument` with its name."""
    try:
        yield
    except InvalidArgument as error:
        raise InvalidArgument(f"state: {name}: {error}") from None
    except KeyError as error:
        raise InvalidArgument(f"state: {name}: {error} is missing") from None
    except (AttributeError, IndexError, OverflowError, TypeError, ValueError) as error:
        raise InvalidArgument(f"state: {name}: not what a snapshot has there ({error})") from None


def _listed(name: str, value: object, length: int | None = None) -> list[Any]:
    """A list, of that many items."""
    if not isinstance(value, list) or (length is not None and len(value) != length):
        wanted = "a list" if length is None else f"a list of {length} items"
        raise InvalidArgument(f"{name}: got {str(value)[:40]}, expected {wanted}")
    return value


def _ids(name: str, value: object, low: int, high: int, length: int | None = None) -> list[int]:
    """A list of integers within `low .. high`."""
    return [integer(f"{name}[{i}]", item, low, high) for i, item in enumerate(_listed(name, value, length))]


def _pairs(name: str, value: object, *bounds: tuple[int, int]) -> list[list[int]]:
    """A list of lists, of integers within the bounds of each place."""
    rows = [_listed(f"{name}[{i}]", row, len(bounds)) for i, row in enumerate(_listed(name, value))]
    return [[integer(name, x, *bound) for x, bound in zip(row, bounds, strict=True)] for row in rows]


def shape(state: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the constructor."""
    if not isinstance(state, dict) or state.get("pagedkern_allocator") != VERSION:
        raise InvalidArgument(f"state: not a snapshot of version {VERSION} of this allocator")
    with _reading("shape"):
        return {name: state[name] for name in ("num_blocks", "block_size", "num_host_blocks", "prefix_caching")}


def put(ledger: Ledger, state: dict[str, Any]) -> int:
    """Fill a new allocator's ledger. Returns the reserve. O(blocks + tokens).

    Each field is checked by itself; whether they fit together, `audit.check` tells.
    """
    with _reading("counters"):
        reserve = integer("reserve", state["reserve"], 0, ledger.pool.num_blocks)
        ledger.last_seq = integer("last_seq", state["last_seq"], 0)
        ledger.last_plan = integer("last_plan", state["last_plan"], 0)
        for name in ledger.counts.numbers:
            ledger.counts.numbers[name] = integer(f"counts.{name}", state["counts"][name], 0)
        questions = state["questions"]
        ledger.counts.last_question = integer("questions.last", questions["last"], 0)
        rows = _pairs("questions.sharing", questions["sharing"], (1, ledger.counts.last_question), (1, 2**63))
        for question, sharers in rows:
            ledger.counts.sharing[question] = sharers
        next_node = integer("device.index.next_node", state["device"]["index"]["next_node"], 1)
    with _reading("roots"):
        salts = [(tenant(_decode(salt)), integer("node", node, 1, next_node - 1)) for salt, node in state["roots"]]
        if len({node for _, node in salts}) < len(salts):
            raise InvalidArgument("two salts have the same node")
    for pool in (ledger.pool, ledger.host):
        with _reading(pool.name):
            _put_pool(pool, state[pool.name], next_node)
    ledger.roots.put(salts)
    with _reading("sequences"):
        for item in _listed("sequences", state["sequences"]):
            _put_sequence(ledger, item, next_node)
    device, host = (0, ledger.pool.num_blocks - 1), (0, ledger.host.num_blocks - 1)
    with _reading("twins"):
        for b, other in _pairs("twins", state["twins"], device, host):
            ledger.pool.twin(b, other)
    with _reading("incoming"):
        for b, other in _pairs("incoming", state["incoming"], device, host):
            ledger.pool.incoming[b] = other
            ledger.host.refs[other] += 1
    with _reading("ending"):
        for priority, left, *blocks in _listed("ending", state["ending"]):
            lease = retention.Lease(integer("priority", priority, 0, PRIORITIES - 1), 0.0)
            lease.until = ledger.deadlines.now() + (retention.seconds("seconds", left) or 0.0)
            _put_leased(ledger, lease, blocks)
            ledger.deadlines.add(lease)
    ledger.undo.clear()
    return reserve


def _put_leased(ledger: Ledger, lease: retention.Lease, blocks: Any) -> None:
    for pool, ids in zip((ledger.pool, ledger.host), _listed("blocks", blocks, 2), strict=True):
        for b in _ids("blocks", ids, 0, pool.num_blocks - 1):
            pool.idle.put_lease(b, lease)


def _put_pool(pool: BlockPool, part: dict[str, Any], next_node: int) -> None:
    last = pool.num_blocks - 1
    pool.num_evicted = integer("num_evicted", part["num_evicted"], 0)
    pool.least_free = integer("least_free", part["least_free"], 0, pool.num_blocks)
    levels = _pairs("levels", part["levels"], (0, last), (1, PRIORITIES - 1))
    idle = [_ids(f"idle[{i}]", q, 0, last) for i, q in enumerate(_listed("idle", part["idle"], PRIORITIES))]
    pool.put(_ids("blank", part["blank"], 0, last))
    pool.idle.put(idle, [(b, level) for b, level in levels])
    index = part["index"]
    if index["next_node"] != next_node:
        raise InvalidArgument(f"index.next_node: got {index['next_node']!r}, the device has {next_node}")
    cached = []
    for b, parent, ids, node, special in _listed("index.cached", index["cached"]):
        chunk = array("q", _listed("index.cached", ids)).tobytes()
        if len(chunk) != pool.prefix.stride:
            raise InvalidArgument(f"index.cached: block {b} has {len(ids)} tokens, expected a full block")
        block = integer("index.cached", b, 0, last)
        behind = integer("index.cached", parent, 1, next_node - 1)
        chunk += bytes.fromhex(special)
        cached.append((block, behind, chunk, integer("index.cached", node, 1, next_node - 1)))
    nodes = _ids("index.nodes", index["nodes"], 0, next_node - 1, pool.num_blocks)
    pool.prefix.put(next_node, nodes, cached)


def _put_sequence(ledger: Ledger, item: dict[str, Any], next_node: int) -> None:
    state = State(item["state"])
    pool = ledger.host if state is State.SWAPPED else ledger.pool
    name = f"sequence {item['id']!r}"
    ident = integer(f"{name}: id", item["id"], 1, ledger.last_seq)
    if ident in ledger.live:
        raise InvalidArgument(f"{name}: listed twice")
    blocks = _ids(f"{name}: blocks", item["blocks"], -1, pool.num_blocks - 1)
    tokens = array("q", _listed(f"{name}: tokens", item["tokens"]))
    seq = Sequence(ledger.origin, ident, blocks, tokens, 0)
    for field in STORED:
        setattr(seq, field, integer(f"{name}: {field[1:]}", item[field[1:]], 0, _MOST.get(field, MAX_TOKENS)))
    if seq._root >= next_node:
        raise InvalidArgument(f"{name}: root: got {seq._root}, expected below {next_node}")
    for flag in _FLAGS:
        value = item[flag[1:]]
        if not isinstance(value, bool):
            raise InvalidArgument(f"{name}: {flag[1:]}: got {value!r}, expected True or False")
        setattr(seq, flag, value)
    seq._state, seq._salt = state, tenant(_decode(item["salt"]))
    seq._keys = spans.from_json(item["keys"], seq._length)
    seq._retention = retention.read(item["retention"])
    seq._leases = retention.leases(seq._retention)
    timed = [lease for lease in seq._leases if lease is not None]
    for lease, leased in zip(timed, _listed("leases", item["leases"], len(timed)), strict=True):
        _put_leased(ledger, lease, leased)
    ledger.live[ident] = seq
    for b in blocks:
        if b >= 0:
            pool.refs[b] += 1
