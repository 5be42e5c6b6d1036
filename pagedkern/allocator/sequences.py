"""What is done to one sequence: create, fork, pin, truncate, release behind the window; and clearing the cache."""

from __future__ import annotations

from array import array

from pagedkern.allocator import caching, retention, spans
from pagedkern.allocator.arguments import PRIORITIES, Salt, integer
from pagedkern.allocator.core import Core
from pagedkern.allocator.handles import INHERITED, Sequence
from pagedkern.errors import InvalidArgument, InvalidType, OutOfBlocks


def create(
    core: Core,
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
    pool, prefix = core.pool, core.prefix
    root = (core.roots.peek(salt) or core.new_root(salt)) if shares else 0
    if root:
        data = ids.tobytes()
        found = prefix.match(root, data, spans.special(keys, data, prefix.stride) if keys else spans.PLAIN)
    else:
        found = []
    hits = [b for b in found if b >= 0] if found else []
    missing = -(-length // core.block_size) - len(hits)
    free = pool.num_free - (pool.num_idle_of(hits) if hits else 0)
    if missing > free:
        raise OutOfBlocks(f"create: {missing} blocks needed beside {len(hits)} cached ones, {free} free{pool.held}")
    if hits:
        pool.retain(hits)
    fresh = pool.take(missing)
    if len(hits) == len(found):
        blocks, registered = hits + fresh, len(hits)
    else:
        blocks, registered = _expect(core, found, fresh)
    asked = length if root and not again else 0
    seq = core.add(blocks, ids, length, root, salt, asked)
    seq._priority = level
    seq._present = len(found) * core.block_size
    seq._cached = seq._computed = seq._scheduled = max(0, min(seq._present, length - 1))
    seq._private, seq._registered = len(found), registered
    seq._arriving = len(hits) < len(found)
    if keys or kept:
        seq._keys, seq._retention, seq._leases = keys if root else (), kept, retention.leases(kept)
    seq._dear = level > 0 or len(kept) > 0
    if seq._dear or seq._arriving or seq._keys:
        seq._apart = True
        caching.use(core, seq)
    counts = core.counts.numbers
    counts["sequences_created"] += 1
    if asked:
        seq._found = seq._cached
        counts["prefix_tokens_asked"] += asked
        counts["prefix_tokens_found"] += seq._found
    return seq


def create_many(core: Core, prompts: list[tuple[array[int], int, Salt]]) -> list[Sequence]:
    """`create` for each prompt (ids, length, salt) in this order, without priority, keys and retention. O(tokens).

    Those of which nothing is cached, not even the first block, are created in bulk until one comes that is different.
    """
    peek, is_new, size, counts = core.roots.peek, core.prefix.is_new, core.block_size, core.counts.numbers
    core.undo.append((counts.update, (dict(counts),)))
    if not len(core.prefix) and not len(core.host.prefix):
        return _create_plain(core, prompts)
    seqs: list[Sequence] = []
    plain: list[tuple[array[int], int, Salt]] = []
    for prompt in prompts:
        ids, length, salt = prompt
        root = peek(salt)
        if not root or is_new(root, ids[:size].tobytes()):
            plain.append(prompt)
            continue
        seqs += _create_plain(core, plain)
        seqs.append(create(core, ids, length, core.caching, salt, 0, (), (), False))
        plain = []
    return seqs + _create_plain(core, plain)


def _create_plain(core: Core, prompts: list[tuple[array[int], int, Salt]]) -> list[Sequence]:
    """`create` for prompts of which nothing is cached, all together."""
    size = core.block_size
    seqs = core.add_all(prompts, core.pool.take(sum([-(-length // size) for _, length, _ in prompts])))
    core.counts.numbers["sequences_created"] += len(seqs)
    core.counts.numbers["prefix_tokens_asked"] += sum([seq._asked for seq in seqs])
    return seqs


def _expect(core: Core, found: list[int], fresh: list[int]) -> tuple[list[int], int]:
    """Blocks for a prefix that is partly on the host, and how many at its start are not."""
    blocks, rest = [], iter(fresh)
    for b in found:
        if b < 0:
            core.pool.expect(block := next(rest), ~b)
        else:
            block = b
        blocks.append(block)
    core.host.use(~next(b for b in reversed(found) if b < 0))
    return [*blocks, *rest], next(i for i, b in enumerate(found) if b < 0)


def fork(core: Core, seq: Sequence, count: int) -> list[Sequence]:
    """New sequences that share the blocks of an `own`ed one. O(blocks) each."""
    blocks = seq._blocks[: core.num_blocks_for(seq._length)]
    owned = [b for b in blocks if b >= 0]
    if count and seq._asked:
        core.counts.fork(seq, count)
    forks = []
    for _ in range(count):
        core.pool.retain(owned)
        new = core.add(blocks[:], seq._tokens[:], seq._length)
        for name in INHERITED:
            setattr(new, name, getattr(seq, name))
        new._private = len(blocks)
        if new._retention:
            new._leases = retention.leases(new._retention)
        for plan in seq._pending:  # it takes part in what is in flight
            row = next(row for row in plan._rows or () if row.seq is seq)
            core.ride(plan, new, row.copy(new))
        if new._apart:
            caching.use(core, new)
        forks.append(new)
    if count:
        seq._private = max(seq._private, len(blocks))
    core.counts.numbers["forks"] += count
    return forks


def pin(core: Core, seq: Sequence) -> Sequence:
    """A fork of the cached part of an `own`ed sequence. O(blocks)."""
    (pinned,) = fork(core, seq, 1)
    truncate(core, pinned, pinned._registered * core.block_size)
    if pinned._apart:
        caching.own_cached(core, pinned)
    return pinned


def free(core: Core, seq: Sequence) -> None:
    """Give up all blocks of an `own`ed sequence. O(blocks)."""
    if seq._apart:
        caching.enter_again(core, seq)
    core.give_up(seq, seq._blocks)
    if seq._leases:
        core.deadlines.begin(seq._leases)
    core.remove(seq)
    if seq._asked:
        core.counts.take_back(seq)


def truncate(core: Core, seq: Sequence, length: int) -> None:
    """Keep the first tokens of an `own`ed sequence. O(blocks)."""
    kept = core.num_blocks_for(length)
    if length % core.block_size and seq._blocks[kept - 1] < 0:
        raise InvalidArgument(f"num_tokens: got {length}, but the block of token {length - 1} was given back")
    core.give_up(seq, seq._blocks[kept:])
    seq._blocks, seq._tokens = seq._blocks[:kept], seq._tokens[:length]
    seq._dirty = True
    seq._length = length
    for name in ("_cached", "_present", "_computed", "_scheduled"):
        setattr(seq, name, min(getattr(seq, name), length))
    seq._registered = min(seq._registered, length // core.block_size)
    seq._private = min(seq._private, kept)
    seq._passed = min(seq._passed, kept)
    if seq._keys:
        seq._keys = spans.cut(seq._keys, length)
    for plan in seq._pending:
        for row in plan._rows or ():
            if row.seq is seq:
                core.undo.append((row.restore, (row.start, row.end, row.base)))
                row.clamp(length)


def release_window(core: Core, seq: Sequence, first_needed: int) -> None:
    """Give up the blocks of an `own`ed sequence that hold only tokens before the given one. O(its blocks)."""
    count = first_needed // core.block_size
    behind = seq._blocks[:count]
    if max(behind, default=-1) < 0:
        return
    core.give_up(seq, behind)
    seq._blocks = [-1] * count + seq._blocks[count:]
    seq._private = max(seq._private, count)
    seq._passed, seq._apart = count, True
    seq._dirty = True


def clear_cache(core: Core, nodes: set[int]) -> None:
    """Forget every cached prefix behind these nodes of salts, on both memories. O(cached behind them + sequences).

    Sequences that live go on, but nothing of theirs is found.
    """
    for node in nodes:
        core.pool.abandon(core.prefix.clear(node))
    core.roots.keep({node for _, node in core.roots.items() if node not in nodes})
    for seq in core.live.values():
        if seq._root in nodes:
            core.detach(seq)
            core.undo.append((seq._restore, seq._saved()))
            seq._root, seq._apart = 0, True
