"""Random specs for hypothesis: everything that every backend accepts, sizes kept small."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from tests.contract.problems import LAYOUTS, Q_LAYOUTS, QUANTIZED, Spec
from tests.contract.targets import SAMPLED, Target

FLOATS = ("float32", "float16", "bfloat16")
lengths = st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 700]))


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    kv_heads = draw(st.integers(1, 4))
    group = draw(st.one_of(st.integers(1, 9), st.sampled_from([16, 17, 20, 32])))
    head_dim = 8 * draw(st.integers(2, 12))
    block_size = draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 128, 256])))
    seq_lens = tuple(draw(st.lists(lengths, min_size=0, max_size=5)))
    query_lens: tuple[int, ...] | None = None
    if draw(st.booleans()):
        query_lens = tuple(
            draw(st.one_of(st.integers(0, 3), st.integers(0, n + 2).map(lambda x: min(x, 70)))) for n in seq_lens
        )
    q_dtype = draw(st.sampled_from(FLOATS))
    return Spec(
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=draw(st.one_of(st.none(), st.integers(2, 12).map(lambda x: 8 * x))),
        q_dtype=q_dtype,
        kv_dtype=draw(st.one_of(st.none(), st.sampled_from(FLOATS + QUANTIZED))),
        block_size=block_size,
        seq_lens=seq_lens,
        query_lens=query_lens,
        spare_rows=0 if query_lens is None else draw(st.integers(0, 3)),
        causal=draw(st.booleans()),
        window=draw(st.one_of(st.none(), st.integers(1, 3 * block_size), st.integers(1, 800))),
        softcap=draw(st.one_of(st.none(), st.floats(0.5, 50, width=32))),
        alibi=draw(st.booleans()),
        sinks=draw(st.one_of(st.none(), st.floats(-5, 5, width=32))),
        scale=draw(st.one_of(st.none(), st.floats(-0.5, 0.5, width=32))),
        scale_kind=draw(st.sampled_from(["heads", "number"])),
        layout=draw(st.sampled_from(LAYOUTS)),
        q_layout=draw(st.sampled_from(Q_LAYOUTS)),
        seed=draw(st.integers(0, 1000)),
    )


@st.composite
def small_specs(draw: st.DrawFn) -> Spec:
    """For the checks that run each spec many times."""
    spec = draw(specs())
    count = min(len(spec.seq_lens), 3)
    query_lens = None if spec.query_lens is None else spec.query_lens[:count]
    return replace(spec, seq_lens=spec.seq_lens[:count], query_lens=query_lens)


def shortened(spec: Spec) -> Spec:
    """The same with fewer heads, tokens and queries, for emulated backends that are slow even for those."""
    group = min(spec.heads // spec.kv_heads, 5)
    kv_heads = min(spec.kv_heads, 2)
    seq_lens = tuple(n if n < 80 else 80 + n % 80 for n in spec.seq_lens[:3])
    query_lens = None if spec.query_lens is None else tuple(q if q < 8 else 8 + q % 8 for q in spec.query_lens[:3])
    return replace(spec, heads=group * kv_heads, kv_heads=kv_heads, seq_lens=seq_lens, query_lens=query_lens)


def fitted(target: Target, spec: Spec, most: int = 1_000_000) -> Spec:
    """What a target is given instead of a random spec: shorter where it runs a sample, `limited` where it is slow."""
    sampled = target.emulated and target.name in SAMPLED
    return limited(target, shortened(spec) if sampled else spec, most)


def limited(target: Target, spec: Spec, most: int) -> Spec:
    """The same with fewer queries, heads and tokens, where a slow target would multiply more than `most` times."""
    while target.slow and _work(spec) > most:
        queries = spec.query_lens or (1,) * len(spec.seq_lens)
        if max(queries) > 3:
            spec = replace(spec, query_lens=tuple(-(-q // 2) for q in queries))
        elif spec.kv_heads > 1:
            spec = replace(spec, kv_heads=1, heads=spec.heads // spec.kv_heads)
        elif max(spec.seq_lens) > 40:
            spec = replace(spec, seq_lens=tuple(n - n // 2 for n in spec.seq_lens))
        else:
            break
    return spec


def _work(spec: Spec) -> int:
    """Multiplications: of every query with every key, and of every weight with every value."""
    queries = spec.query_lens or (1,) * len(spec.seq_lens)
    pairs = sum(q * n for q, n in zip(queries, spec.seq_lens, strict=True))
    return spec.heads * pairs * (spec.head_dim + spec.dim_v)
