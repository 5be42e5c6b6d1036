"""Too little memory: requests take turns, and none of them notices.

Six requests run in a pool that has room for about three. When blocks are lacking, the scheduler preempts the one that
came last: its blocks go to host memory and come back later (swap), or they are given up and computed again
(recompute). `KVCache.apply` moves the blocks; on a GPU that happens beside the kernels.

Prints what was preempted under each policy. All texts must be those of a pool with room for everybody.

    pip install 'pagedkern[cpu]'
    python examples/swap_under_pressure.py
"""

from __future__ import annotations

from engine import Engine
from tiny_model import TinyModel, check, decode

PROMPTS = ("ba na na", "ko li bi", "ta le no so mi", "re do va", "fa ze ga hi", "ke pu ro bu")
MAX_TOKENS, ROOMY, TIGHT = 16, 64, 14


def serve(num_blocks: int, policy: str) -> tuple[list[list[int]], dict[str, int]]:
    """The tokens of every request, and the scheduler's counts."""
    engine = Engine(TinyModel(), num_blocks, num_host_blocks=ROOMY, policy=policy)
    requests = [engine.submit(prompt, MAX_TOKENS) for prompt in PROMPTS]
    while engine.scheduler.has_work:
        engine.step()
    engine.scheduler.check()
    return [request.samples[0].tokens for request in requests], engine.scheduler.stats


def main() -> None:
    expected, stats = serve(ROOMY, "auto")
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        print(f"{prompt.replace(' ', '')} > {decode(tokens)}")
    print(f"with {ROOMY} blocks: {preemptions(stats)} preemptions")
    check(preemptions(stats) == 0, "there is room for everybody")

    for policy in ("swap", "recompute"):
        texts, stats = serve(TIGHT, policy)
        again = stats["tokens_recomputed"]
        print(f"with {TIGHT} blocks, {policy}: {preemptions(stats)} preemptions, {again} tokens computed again")
        check(preemptions(stats) > 0 and (again > 0) == (policy == "recompute"), f"requests are preempted by {policy}")
        check(texts == expected, "the tokens are the same")


def preemptions(stats: dict[str, int]) -> int:
    return stats["preempted_by_swap"] + stats["preempted_by_recomputation"]


if __name__ == "__main__":
    main()
