"""`explain`: which block size and kernels for a workload, and why."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module

from pagedkern._choice import Choice, choose
from pagedkern.autotune.cli import options
from pagedkern.autotune.recommend import Recommendation, default_device, recommend
from pagedkern.autotune.store import device as machine
from pagedkern.autotune.workloads import Model, model, model_names
from pagedkern.backends.base import Problem
from pagedkern.errors import Unsupported

HELP = """\
Say which block size to lay out a cache with for a workload, how many output
tokens a second each block size gives, and which kernels "auto" would run; and
on what all of that rests: measurements of this machine, of one like it, or
nothing. Measures nothing.
"""
EXAMPLES = """\
examples:
  python -m pagedkern.autotune explain --workload retrieval --memory 24GB
  python -m pagedkern.autotune explain --model qwen2.5-7b --memory 40GB --json
"""


def run(argv: Sequence[str]) -> int:
    parser = options.parser("explain", HELP, EXAMPLES)
    options.add_serving(parser.add_argument)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    options.add_json(parser.add_argument)
    given = parser.parse_args(argv)
    traffic = given.workload
    of = given.model or traffic.model or model(model_names()[0])
    with suppress(ImportError):
        import_module("torch")  # so that a GPU is found
    device = given.device or default_device()
    if not machine.present(device):
        parser.error(f"--device {device}: torch finds no GPU")
    found = recommend(traffic, given.memory or machine.free_memory(device) // 2, model=of, device=device)
    kernels = {kind: _kernel(of, device, found.block_size, kind) for kind in ("decode", "prefill")}
    if given.json:
        options.write_json(
            {
                "block_size": found.block_size, "num_blocks": found.num_blocks, "tier": found.tier,
                "reason": found.reason, "tokens_per_second": found.tokens_per_second,
                "concurrency": found.concurrency, "scores": [asdict(s) for s in found.scores],
                "kernels": {
                    kind: {"backend": c.backend, "config": c.config.to_dict(), "tier": c.tier, "reason": c.reason}
                    if isinstance(c, Choice) else {"error": c} for kind, c in kernels.items()
                },
            }
        )  # fmt: skip
        return 0
    _show(found, kernels, str(traffic), of)
    return 0


def _show(found: Recommendation, kernels: dict[str, Choice | str], traffic: str, of: Model) -> None:
    from rich.console import Console

    from pagedkern.autotune.report.serving import show_terms

    out = Console()

    def say(text: str, style: str | None = None) -> None:
        out.print(text, style=style, highlight=False, markup=False)

    say(f"Workload: {traffic}.\n{of}.")
    if found.scores:
        show_terms(out, found.scores)
    say(f"Take block size {found.block_size}: {found.num_blocks:,} blocks.", "bold")
    say(f"Tier {found.tier}: {found.reason}.")
    for kind, choice in kernels.items():
        say(f"{kind.capitalize()}: {choice}.")


def _kernel(of: Model, device: str, block_size: int, kind: str) -> Choice | str:
    decode = kind == "decode"
    problem = Problem(
        device=device, q_dtype=of.dtype, kv_dtype=of.cache_dtype, num_heads=of.num_heads,
        num_kv_heads=of.num_kv_heads, head_dim=of.head_dim, head_dim_v=of.head_dim, block_size=block_size,
        num_seqs=1, num_tokens=1 if decode else 512, max_seqlen_q=1 if decode else 512, max_seqlen_k=4096,
        sliding_window=of.sliding_window if of.window_layers == of.num_layers else None, softcap=of.softcap is not None,
    )  # fmt: skip
    try:
        return choose(problem, "auto", "")
    except Unsupported as error:
        return str(error)
