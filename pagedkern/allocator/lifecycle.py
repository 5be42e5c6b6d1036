"""What is done to one sequence: create, fork, pin, truncate, release behind the window; and clearing the cache."""

from __future__ import annotations

from array import array

from pagedkern.allocator import caching, retention, spans
from pagedkern.allocator.arguments import PRIORITIES, Salt, integer
from pagedkern.allocator.handles import INHERITED, Sequence
from pagedkern.allocator.ledger import Ledger
from pagedkern.errors import InvalidArgument, InvalidType, OutOfBlocks


def create(
    ledger: Ledger,
    ids: array[int],
    length: int,
    shares: bool,
    salt: Salt,
    priority: int,
    keys: tuple[spans.Span, ...],
    kept: tuple[retention.Retention, ...],
    again: bool,
) -> Sequence:
    """A new sequence; `shares`: its ids are known and prefixes are cached. O(tokens)."""
    level = integer("priority", priority, 0, PRIORITIES - 1)
    if not isinstance(again, bool):
        raise InvalidType(f"again: got {again!r} of type {type(again).__name__}, expected True or False")
    pool, prefix = ledger.pool, ledger.prefix
    root = (ledger.roots.peek(salt) or ledger.new_root(salt)) if shares else 0
    if root:
        data = ids.tobytes()
        found = prefix.match(root, data, spans.special(keys, data, prefix.stride) if keys else spans.PLAIN)
    else:
        found = []
    hits = [b for b in found if b >= 0] if found else []
    missing = -(-length // ledger.block_size) - len(hits)
    free = pool.num_free - (pool.num_idle_of(hits) if hits else 0)
    if missing > free:
        raise OutOfBlocks(f"create: {missing} blocks needed beside {len(hits)} cached ones, {free} free{pool.held}")
    if hits:
        pool.retain(hits)
    fresh = pool.take(missing)
    if len(hits) == len(found):
        blocks, registered = hits + fresh, len(hits)
    else:
        blocks, registered = _expect(ledger, found, fresh)
    asked = length if root and not again else 0
    seq = ledger.add(blocks, ids, length, root, salt, asked)
    seq._priority = level
    seq._present = len(found) * ledger.block_size
    seq._cached = seq._computed = seq._scheduled = max(0, min(seq._present, length - 1))
    seq._private, seq._registered = len(found), registered
    seq._arriving = len(hits) < len(found)
    if keys or kept:
        seq._keys, seq._retention, seq._leases = keys if root else (), kept, retention.leases(kept)
    seq._dear = level > 0 or len(kept) > 0
    if seq._dear or seq._arriving or seq._keys:
        seq._apart = True
        caching.use(ledger, seq)
    counts = ledger.counts.numbers
    counts["sequences_created"] += 1
    if asked:
        seq._found = seq._cached
        counts["prefix_tokens_asked"] += asked
        counts["prefix_tokens_found"] += seq._found
    return seq


def create_many(ledger: Ledger, prompts: list[tuple[array[int], int, Salt]]) -> list[Sequence]:
    """`create` for each prompt (ids, length, salt) in this order, without priority, keys and retention. O(tokens).

    Those of which nothing is cached, not even the first block, are created in bulk until one comes that is different.
    """
    peek, is_new, size, counts = ledger.roots.peek, ledger.prefix.is_new, ledger.block_size, ledger.counts.numbers
    ledger.undo.append((counts.update, (dict(counts),)))
    if not len(ledger.prefix) and not len(ledger.host.prefix):
        return _create_plain(ledger, prompts)
    seqs: list[Sequence] = []
    plain: list[tuple[array[int], int, Salt]] = []
    for prompt in prompts:
        ids, length, salt = prompt
        root = peek(salt)
        if not root or is_new(root, ids[:size].tobytes()):
            plain.append(prompt)
            continue
        seqs += _create_plain(ledger, plain)
        seqs.append(create(ledger, ids, length, ledger.caching, salt, 0, (), (), False))
        plain = []
    return seqs + _create_plain(ledger, plain)


def _create_plain(ledger: Ledger, prompts: list[tuple[array[int], int, Salt]]) -> list[Sequence]:
    """`create` for prompts of which nothing is cached, all together."""
    size = ledger.block_size
    seqs = ledger.add_all(prompts, ledger.pool.take(sum([-(-length // size) for _, length, _ in prompts])))
    ledger.counts.numbers["sequences_created"] += len(seqs)
    ledger.counts.numbers["prefix_tokens_asked"] += sum([seq._asked for seq in seqs])
    return seqs


def _expect(ledger: Ledger, found: list[int], fresh: list[int]) -> tuple[list[int], int]:
    """Blocks for a prefix that is partly on the host, and how many at its start are not."""
    blocks, rest = [], iter(fresh)
    for b in found:
        if b < 0:
            ledger.pool.expect(block := next(rest), ~b)
        else:
            block = b
        blocks.append(block)
    ledger.host.use(~next(b for b in reversed(found) if b < 0))
    return [*blocks, *rest], next(i for i, b in enumerate(found) if b < 0)


def fork(ledger: Ledger, seq: Sequence, count: int) -> list[Sequence]:
    """New sequences that share the blocks of an `own`ed one. O(blocks) each."""
    blocks = seq._blocks[: ledger.num_blocks_for(seq._length)]
    owned = [b for b in blocks if b >= 0]
    if count and seq._asked:
        ledger.counts.fork(seq, count)
    forks = []
    for _ in range(count):
        ledger.pool.retain(owned)
        new = ledger.add(blocks[:], seq._tokens[:], seq._length)
        for name in INHERITED:
            setattr(new, name, getattr(seq, name))
        new._private = len(blocks)
        if new._retention:
            new._leases = retention.leases(new._retention)
        for plan in seq._pending:  # it takes part in what is in flight
            row = next(row for row in plan._rows or () if row.seq is seq)
            ledger.ride(plan, new, row.copy(new))
        if new._apart:
            caching.use(ledger, new)
        forks.append(new)
    if count:
        seq._private = max(seq._private, len(blocks))
    ledger.counts.numbers["forks"] += count
    return forks


def pin(ledger: Ledger, seq: Sequence) -> Sequence:
    """A fork of the cached part of an `own`ed sequence. O(blocks)."""
    (pinned,) = fork(ledger, seq, 1)
    truncate(ledger, pinned, pinned._registered * ledger.block_size)
    if pinned._apart:
        caching.own_cached(ledger, pinned)
    return pinned


def free(ledger: Ledger, seq: Sequence) -> None:
    """Give up all blocks of an `own`ed sequence. O(blocks)."""
    if seq._apart:
        caching.enter_again(ledger, seq)
    ledger.give_up(seq, seq._blocks)
    if seq._leases:
        ledger.deadlines.begin(seq._leases)
    ledger.remove(seq)
    if seq._asked:
        ledger.counts.take_back(seq)


def truncate(ledger: Ledger, seq: Sequence, length: int) -> None:
    """Keep the first tokens of an `own`ed sequence. O(blocks)."""
    kept = ledger.num_blocks_for(length)
    if length % ledger.block_size and seq._blocks[kept - 1] < 0:
        raise InvalidArgument(f"num_tokens: got {length}, but the block of token {length - 1} was given back")
    ledger.give_up(seq, seq._blocks[kept:])
    seq._blocks, seq._tokens = seq._blocks[:kept], seq._tokens[:length]
    seq._dirty = True
    seq._length = length
    for name in ("_cached", "_present", "_computed", "_scheduled"):
        setattr(seq, name, min(getattr(seq, name), length))
    seq._registered = min(seq._registered, length // ledger.block_size)
    seq._private = min(seq._private, kept)
    seq._passed = min(seq._passed, kept)
    if seq._keys:
        seq._keys = spans.cut(seq._keys, length)
    for plan in seq._pending:
        for row in plan._rows or ():
            if row.seq is seq:
                ledger.undo.append((row.restore, (row.start, row.end, row.base)))
                row.clamp(length)


def release_window(ledger: Ledger, seq: Sequence, first_needed: int) -> None:
    """Give up the blocks of an `own`ed sequence that hold only tokens before the given one. O(its blocks)."""
    count = first_needed // ledger.block_size
    behind = seq._blocks[:count]
    if max(behind, default=-1) < 0:
        return
    ledger.give_up(seq, behind)
    seq._blocks = [-1] * count + seq._blocks[count:]
    seq._private = max(seq._private, count)
    seq._passed, seq._apart = count, True
    seq._dirty = True


def clear_cache(ledger: Ledger, nodes: set[int]) -> None:
    """Forget every cached prefix behind these nodes of salts, on both memories. O(cached behind them + sequences).

    Sequences that live go on, but nothing of theirs is found.
    """
    for node in nodes:
        ledger.pool.abandon(ledger.prefix.clear(node))
    ledger.roots.keep({node for _, node in ledger.roots.items() if node not in nodes})
    for seq in ledger.live.values():
        if seq._root in nodes:
            ledger.detach(seq)
            ledger.undo.append((seq._restore, seq._saved()))
            seq._root, seq._apart = 0, True
