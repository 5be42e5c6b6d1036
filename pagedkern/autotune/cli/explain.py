"""`explain`: which block size and kernels for a workload, and why."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from pagedkern._selection import Choice, choose
from pagedkern.autotune import space as spaces
from pagedkern.autotune.api import cache_memory
from pagedkern.autotune.cli import options
from pagedkern.autotune.recommend import Recommendation, default_device, recommend
from pagedkern.autotune.report import console
from pagedkern.autotune.report.document import advice_document
from pagedkern.autotune.report.serving import show_terms
from pagedkern.autotune.space import Workload
from pagedkern.autotune.store import device as machine
from pagedkern.autotune.workloads import Model, default_model
from pagedkern.errors import Unsupported

Kernels = list[tuple[Workload, Choice | str]]
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
    served = given.model or traffic.model or default_model()
    with suppress(ImportError):
        import_module("torch")  # so that a GPU is found
    device = given.device or default_device()
    if not machine.present(device):
        parser.error(f"--device {device}: torch finds no GPU")
    found = recommend(traffic, given.memory or cache_memory(served, device), model=served, device=device)
    problems = spaces.problems_of(served, device)
    kernels = [(problem, _kernel(problem, found.block_size)) for problem in problems]
    if given.json:
        options.write_json(
            {
                **advice_document(found),
                "kernels": [
                    {"kind": w.kind, "sliding_window": w.sliding_window, **_fields(c)} for w, c in kernels
                ],
            }
        )  # fmt: skip
        return 0
    _show(found, kernels, str(traffic), served)
    return 0


def _fields(choice: Choice | str) -> dict[str, object]:
    if isinstance(choice, str):
        return {"error": choice}
    config = choice.config.to_dict()
    return {"backend": choice.backend, "config": config, "tier": choice.tier, "reason": choice.reason}


def _show(found: Recommendation, kernels: Kernels, traffic: str, served: Model) -> None:
    out = console.console()

    def say(text: str, style: str = "") -> None:
        console.say(out, text, style)

    say(f"Workload: {traffic}.\n{served}.")
    if found.scores:
        show_terms(out, found.scores, found.block_size)
    say(f"Take block size {found.block_size}: {found.num_blocks:,} blocks.", "bold")
    if found.advice:
        say(f"{found.advice[:1].upper()}{found.advice[1:]}.")
    say(f"Tier {found.tier}: {found.basis}.")
    if found.token_budget is not None:
        say(f"For the scheduler: token_budget={found.token_budget}, max_num_seqs={found.max_num_seqs}.")
    said: dict[str, list[str]] = {}  # what is equal is said once
    for problem, choice in kernels:
        layers = (
            "" if len(served.windows) == 1 else f" (window {w:,})" if (w := problem.sliding_window) else " (no window)"
        )
        said.setdefault(str(choice), []).append(f"{problem.kind}{layers}")
    for text, names in said.items():
        say(f"{', '.join(names).capitalize()}: {text}.")


def _kernel(workload: Workload, block_size: int) -> Choice | str:
    """What "auto" takes for a problem as `tune` measures it."""
    try:
        return choose(workload.problem(block_size), "auto", "")
    except Unsupported as error:
        return str(error)
