"""Too little memory: requests take turns, and none of them notices.

Six requests run in a pool that has room for about three. When blocks are lacking, the scheduler preempts the one that
came last: its blocks go to host memory and come back later (swap), or they are given up and computed again
(recompute). `KVCache.apply` moves the blocks; on a GPU that happens beside the kernels.

Prints what was preempted under each policy. All texts must be those of a pool with room for everybody, and these
those of the model without a cache.

    pip install 'pagedkern[cpu]'
    python examples/swap_under_pressure.py
"""

from __future__ import annotations

from engine import Engine, expected
from tiny_model import TinyModel, check, decode

from pagedkern.scheduler import Sample

PROMPTS = ("ba na na", "ko li bi", "ta le no so mi", "re do va", "fa ze ga hi", "ke pu ro bu")
MAX_TOKENS, ROOMY, TIGHT = 16, 64, 14


def serve(model: TinyModel, num_blocks: int, policy: str) -> tuple[list[Sample], dict[str, int]]:
    """What became of every request, and the scheduler's counts."""
    engine = Engine(model, num_blocks, num_host_blocks=ROOMY, policy=policy)
    requests = [engine.submit(prompt, MAX_TOKENS) for prompt in PROMPTS]
    while engine.scheduler.has_work:
        engine.step()
    engine.scheduler.check()
    return [request.samples[0] for request in requests], engine.scheduler.stats


def main() -> None:
    model = TinyModel()
    samples, stats = serve(model, ROOMY, "auto")
    texts = [sample.tokens for sample in samples]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        print(f"{prompt.replace(' ', '')} > {decode(text)}")
    print(f"with {ROOMY} blocks: {preemptions(stats)} preemptions")
    check(preemptions(stats) == 0, "there is room for everybody")
    check(texts == [expected(model, sample) for sample in samples], "the tokens are those of the model without a cache")

    for policy in ("swap", "recompute"):
        samples, stats = serve(model, TIGHT, policy)
        again = stats["tokens_recomputed"]
        print(f"with {TIGHT} blocks, {policy}: {preemptions(stats)} preemptions, {again} tokens computed again")
        check(preemptions(stats) > 0 and (again > 0) == (policy == "recompute"), f"requests are preempted by {policy}")
        check([sample.tokens for sample in samples] == texts, "the tokens are the same")


def preemptions(stats: dict[str, int]) -> int:
    return stats["preempted_by_swap"] + stats["preempted_by_recomputation"]


if __name__ == "__main__":
    main()
