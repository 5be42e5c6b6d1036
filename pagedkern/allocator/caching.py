"""How sequences enter the prefix cache, and what of it counts as used when they are."""

from __future__ import annotations

from pagedkern.allocator import spans
from pagedkern.allocator.handles import Fill, Sequence, State
from pagedkern.allocator.ledger import Ledger


def fill(ledger: Ledger, fills: list[Fill]) -> None:
    """Enter blocks that a batch on the fast path has filled. O(blocks)."""
    for seq, _, _, block in ledger.prefix.insert_each(fills):
        ledger.undo.append((seq._restore, seq._saved()))
        enter(ledger, seq, seq._blocks.index(block, seq._registered) + 1)


def enter_computed(ledger: Ledger, seq: Sequence) -> None:
    """Enter what an `own`ed live sequence has computed and the cache does not know, if its contents are there."""
    full = min(seq._computed, len(seq._tokens)) // ledger.block_size
    if full > seq._registered and not seq._arriving:
        enter(ledger, seq, full)


def enter(ledger: Ledger, seq: Sequence, full: int) -> None:
    """Enter full, computed blocks of an `own`ed sequence up to a number, those that the cache does not know yet.

    If those that it does know cannot be found any more, from the first.
    A sequence that has given its first blocks back cannot begin again: nothing of it is cached any more.
    """
    if not seq._root:
        return
    start, size, blocks = seq._registered, ledger.block_size, seq._blocks
    parent = ledger.prefix.node_of(blocks[start - 1]) if start and not seq._apart else 0
    if not parent:
        last = blocks[start - 1] if start else -1
        parent = ledger.prefix.reached(last) if last >= 0 else 0
        if not parent:
            start, parent = 0, seq._root
            if blocks[0] < 0:
                seq._root, seq._apart = 0, True
                return
    data = seq._tokens[start * size : full * size].tobytes()
    special = spans.special(seq._keys, data, ledger.prefix.stride, start)
    whole, shared = ledger.prefix.insert(parent, data, blocks[start:full], start >= seq._private, special)
    seq._registered = full
    if seq._private < full:
        seq._private = full
    if not start:
        seq._whole = whole
        seq._apart = not whole or seq._dear or bool(seq._keys)
    elif not whole:
        seq._whole, seq._apart = False, True
    for b in shared:
        ledger.pool.inherit(b)
    if seq._apart:
        use(ledger, seq)


def cache_on_host(ledger: Ledger, seq: Sequence) -> None:
    """Enter the full, computed blocks of a sequence that has been swapped out into the host's index."""
    full = min(seq._computed, len(seq._tokens)) // ledger.block_size
    if not full or not seq._root or seq._blocks[0] < 0:
        return
    data = seq._tokens[: full * ledger.block_size].tobytes()
    special = spans.special(seq._keys, data, ledger.prefix.stride)
    _, shared = ledger.host.prefix.insert(seq._root, data, seq._blocks[:full], special=special)
    for b in shared:
        ledger.host.inherit(b)
    use(ledger, seq)


def enter_again(ledger: Ledger, seq: Sequence) -> None:
    """Before an `own`ed sequence gives up its blocks: if those that it was cached with have gone, enter its own.

    What a block needs, all that is before it, may be others' blocks: those that computed the same at the same time.
    """
    if not seq._apart or not seq._root or seq._arriving or seq._blocks[:1] == [-1]:
        return
    if seq._state is State.SWAPPED:
        full = min(seq._computed, len(seq._tokens)) // ledger.block_size
        if full and not seq._pending and not ledger.host.prefix.reached(seq._blocks[full - 1]):
            cache_on_host(ledger, seq)
    elif seq._registered and not ledger.prefix.reached(seq._blocks[seq._registered - 1]):
        enter(ledger, seq, seq._registered)


def own_cached(ledger: Ledger, seq: Sequence) -> None:
    """Let a sequence that is never written to own the very blocks that are cached with its contents."""
    full = seq._registered
    if not full or not seq._root or seq._passed or seq._arriving:
        return
    seq._registered = 0
    enter(ledger, seq, full)
    if seq._whole:
        return
    prefix = ledger.prefix
    cached = {b: c for b in seq._blocks if prefix.keys[b] is None and (c := prefix.at(prefix.node_of(b))) is not None}
    ledger.pool.retain(cached.values())
    ledger.release(seq, list(cached))
    seq._blocks = [cached.get(b, b) for b in seq._blocks]
    seq._whole, seq._dirty = True, True
    use(ledger, seq)


def use(ledger: Ledger, seq: Sequence) -> None:
    """The cached blocks of a sequence are used, and with them what is before them, which others may have owned.

    To be called for a sequence that is `_apart`, whenever it has got blocks or more of it is cached.
    """
    pool = ledger.pool_of(seq)
    last = pool.last_cached(seq._blocks)
    if last < 0:
        return
    if seq._dear:
        ledger.lift(seq, seq._blocks)
    if not seq._owns_all:
        first = seq._blocks[seq._passed] if seq._passed < len(seq._blocks) else -1
        if seq._whole and not seq._arriving and first >= 0 and pool.prefix.keys[first] is not None:
            last = first  # what is between is its own
        pool.use(last)
