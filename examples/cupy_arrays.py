"""CuPy arrays from beginning to end: an engine without torch in its own code, and without a copy of any array.

Queries, caches, block table and output are CuPy arrays; every call takes them as they are, by DLPack. The cache is the
engine's own memory, in a layout of its own choice. Three sequences are computed, two of which share their prompt.

Prints the shape and the kind of what came out, and the largest difference from dense attention, written with CuPy.

    pip install 'pagedkern[cuda12]'   # or [cuda13]
    python examples/cupy_arrays.py

Without a GPU, the same lines run with NumPy's arrays on the CPU:

    pip install 'pagedkern[cpu]'
    python examples/cupy_arrays.py --numpy
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from pagedkern import BlockAllocator, Step, copy_blocks, paged_attention, write_kv

NUM_BLOCKS, BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM = 32, 8, 8, 2, 64
Array = Any  # of CuPy or NumPy, which agree on all that is used here


class Engine:
    """Attention of one layer, over random numbers. `xp` is the module cupy, or numpy."""

    def __init__(self, xp: Any, backend: str) -> None:
        self.xp, self.backend = xp, backend
        self.random = xp.random.RandomState(0)
        # In memory the tokens of a block are together for each KV head; seen as [blocks, tokens, KV heads, head_dim].
        memory = xp.zeros((2, NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM), xp.float32)
        self.k_cache, self.v_cache = memory.transpose(0, 1, 3, 2, 4)
        self.past: dict[int, list[Array]] = {}  # keys and values of each sequence, in order: for the check

    def run(self, step: Step) -> Array:
        """Attention of all tokens of the step; what comes out is compared with dense attention."""
        xp, caches = self.xp, (self.k_cache, self.v_cache)
        if step.copies:
            source, target = xp.asarray(step.copies.src), xp.asarray(step.copies.dst)
            copy_blocks(caches, source, target, backend=self.backend)
        q, k, v = (self.normal(step.num_tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        write_kv(k, v, *caches, xp.asarray(step.slot_mapping), backend=self.backend)
        out = xp.empty_like(q)
        paged_attention(
            q,
            *caches,
            xp.asarray(step.block_table),
            xp.asarray(step.seq_lens),
            cu_seqlens_q=xp.asarray(step.cu_seqlens_q),
            max_seqlen_q=step.max_seqlen_q,
            out=out,
            backend=self.backend,
        )
        self.compare(step, q, k, v, out)
        return out

    def normal(self, *shape: int) -> Array:
        return self.random.standard_normal(shape).astype(self.xp.float32)

    def compare(self, step: Step, q: Array, k: Array, v: Array, out: Array) -> None:
        """The output, row by row, against dense attention over the past of each sequence."""
        largest = 0.0
        for row, sequence in enumerate(step.seqs):
            new = slice(step.cu_seqlens_q[row], step.cu_seqlens_q[row + 1])
            past = self.past.get(sequence.id, [k[:0], v[:0]])
            past = [self.xp.concatenate([old, more[new]]) for old, more in zip(past, (k, v), strict=True)]
            self.past[sequence.id] = past
            difference = abs(out[new] - dense(self.xp, q[new], *past)).max()
            largest = max(largest, float(difference))
        kind = f"{type(out).__module__}.{type(out).__name__}"
        print(f"{len(step.seqs)} sequences, {kind} {out.shape}, largest difference {largest:.1e}")
        if not largest < 1e-4:
            raise SystemExit("WRONG: that is not attention over the tokens of the sequence")


def dense(xp: Any, q: Array, k: Array, v: Array) -> Array:
    """Causal attention. q [n, HEADS, HEAD_DIM] stands at the end of k and v [m, KV_HEADS, HEAD_DIM]."""
    k, v = (xp.repeat(x, HEADS // KV_HEADS, axis=1) for x in (k, v))
    scores = xp.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
    hidden = xp.arange(len(k)) > xp.arange(len(k) - len(q), len(k))[:, None]
    weights = xp.exp(xp.where(hidden, -xp.inf, scores))
    return xp.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numpy", action="store_true", help="NumPy's arrays instead of CuPy's")
    parser.add_argument("--backend", default="auto", help="a backend of pagedkern (%(default)s)")
    options = parser.parse_args(arguments)
    engine = Engine(import_module("numpy") if options.numpy else find_cupy(), options.backend)

    allocator = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)
    sequences = [allocator.create(50), allocator.create(13)]
    step = allocator.prefill(sequences)
    engine.run(step)
    allocator.commit(step)

    (sample,) = allocator.fork(sequences[1])
    engine.past[sample.id] = engine.past[sequences[1].id]
    sequences.append(sample)
    for _ in range(5):
        step = allocator.append(sequences)
        engine.run(step)
        allocator.commit(step)
    print("checked: every row is what dense attention gives")


def find_cupy() -> Any:
    """CuPy, if it is there and finds a GPU."""
    try:
        cupy = import_module("cupy")
    except ImportError as error:
        raise SystemExit(f"CuPy is missing ({error}): pip install 'pagedkern[cuda12]', or try --numpy") from None
    if not cupy.cuda.is_available():
        raise SystemExit("CuPy finds no GPU here. To run the same lines on the CPU: --numpy")
    return cupy


if __name__ == "__main__":
    main()
