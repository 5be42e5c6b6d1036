"""`tune`: measure and store."""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from pagedkern.autotune import space as spaces
from pagedkern.autotune.cli import COMMANDS, options
from pagedkern.autotune.report import console
from pagedkern.backends.base import ITEMSIZE
from pagedkern.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedkern.autotune.api import TunePlan
    from pagedkern.autotune.runner import Runner

FLOATS = ("float32", "float16", "bfloat16")
HELP = """\
Find the best block size, backend and kernel configuration for this machine.

Measures every configuration of every backend that this machine has, over
block sizes, on one decode and one prefill problem (two each for a model with
a window in some of its layers); checks each for correctness before it is
timed; and stores the best for each block size. From then on backend="auto"
uses it for models of the same shape, dtypes, window and softcap.
pagedkern.explain(...) says what would be used for a call, and why.

Candidates run in a process of their own: what crashes, hangs or eats memory
costs one candidate. The default is left only for a gain of at least 2 % that
the measurements prove with 95 % confidence: the finalists run in turn, round
by round, on caches that are not in the processor's cache, and are compared
within each round.

Then it predicts for each workload how many output tokens a second each block
size gives: a larger block wastes more memory and shares less of a prefix, a
smaller one may be slower to read. The advice is 16, unless another is proven
better, with the least token budget and number of sequences for a scheduler
that cost no throughput. pagedkern.recommend(workload, memory) tells an engine
the same, and pagedkern.tune() does all of this from Python.
"""
EXAMPLES = """\
examples:
  python -m pagedkern.autotune
  python -m pagedkern.autotune --model smollm2-135m --memory 4GB
  python -m pagedkern.autotune --workload my_requests.csv
  python -m pagedkern.autotune --dtype float32 --context 8000 --budget 5m
  python -m pagedkern.autotune --block-sizes 16,32 --json > tuned.json
  python -m pagedkern.autotune --dry-run
  python -m pagedkern.autotune --resume
  python -m pagedkern.autotune show

The budget is wall time for all of it, from the start of the program to the
tables: importing torch, laying out the caches, compiling the kernels. The usual
block size comes first, and what is decided is stored at once. Nothing is begun
that is expected to end too late, and what takes longer is cut short a second
later (--in-process cannot).
Compiled kernels are kept on disk, so that later runs get further. Every
measurement is written down as it is made: --resume goes on with a run that was
ended or killed, or that had too little time.

exit status:
  0    decided and stored; or the time was too short to prove anything faster,
       but the finals had begun with the untuned choice: that stays in use, the
       report says so, and nothing is stored
  1    not everything could be decided: in one of the problems the untuned
       choice never reached the finals, is wrong, or is not there, or the
       process that measures failed; what was decided is stored all the same.
       Or a package is missing
  2    wrong usage, and problems that do not fit the free memory
  3    decided, but it could not be stored
  130  interrupted by Ctrl-C: the best so far was kept; so after SIGTERM (143)
       and SIGHUP (129)

environment:
  PAGEDKERN_CACHE_DIR  where choices are stored (default: user's cache)
"""


def run(argv: Sequence[str]) -> int:
    begun = time.monotonic()  # of the budget: what is imported from here on takes seconds, too
    parser = _parser()
    given = parser.parse_args(argv)
    import_module("rich")
    from pagedkern.autotune import api

    shape = {"num_heads": given.heads, "num_kv_heads": given.kv_heads, "head_dim": given.head_dim}
    try:
        planned = api.plan(
            given.workload, model=given.model, memory=given.memory, device=given.device,
            backends=given.backends or None, block_sizes=given.block_sizes, budget=given.budget, seed=given.seed,
            resume=given.resume, records=given.records, exhaustive=given.exhaustive,
            shape={**shape, "dtype": given.dtype, "kv_dtype": given.kv_dtype},
            batch={"num_seqs": given.seqs, "context": given.context, "prompt": given.prompt}, begun=begun,
        )  # fmt: skip
    except api.DoesNotFit as error:
        length = "--prompt" if error.problem.kind == "prefill" else "--context"
        parser.error(f"{error.what}: give a smaller {length} or --seqs, or fewer --block-sizes")
    except InvalidArgument as error:
        parser.error(str(error))
    if given.dry_run:
        return console.printed(lambda: _show_plan(given, planned), 0)
    return _tune(given, planned)


def _tune(given: argparse.Namespace, planned: TunePlan) -> int:
    from pagedkern.autotune import api
    from pagedkern.autotune.report import document, progress, terminal

    with ExitStack() as stack:
        tell = None
        if not given.quiet:
            bar = progress.Progress(console.console(error=True), given.budget, begun=planned.begun)
            tell = stack.enter_context(bar).tell
        done = api.measure(planned, tell, make_runner=_here if given.in_process else None)
    for failure in done.failures:
        again = "; run again with --resume to measure the rest" if done.records else ""
        console.complain(f"Ended early: {failure}. What was decided until then was kept{again}.")

    def show() -> None:
        if given.json:
            options.write_json(document.document(done))
        else:
            terminal.show_run(console.console(), done, every=given.all)

    return console.printed(show, done.exit_code)


def _here(space: spaces.Space, seed: int) -> Runner:
    from pagedkern.autotune.measure import Bench

    return Bench(space, seed)


def _show_plan(given: argparse.Namespace, planned: TunePlan) -> None:
    from pagedkern.autotune.report import document, terminal

    problems = planned.order.workloads
    usable, unusable = spaces.usable_backends(problems[0].device, given.backends)
    plan = [spaces.candidates(problem, planned.order.block_sizes, usable) for problem in problems]
    if given.json:
        options.write_json(document.plan_document(plan, unusable))
    else:
        terminal.show_plan(console.console(), plan, unusable)


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:10} {what}" for name, (_, what) in COMMANDS.items())
    parser = options.parser("[tune]", f"{HELP}\ncommands (each has a --help):\n{listed}\n", EXAMPLES)
    add = parser.add_argument_group("what is measured").add_argument
    add(
        "--budget",
        type=options.seconds,
        default=60.0,
        metavar="TIME",
        help="wall time for all of it, such as 30s or 5m (default 60s)",
    )
    add(
        "--backends",
        type=options.backends,
        default=[],
        metavar="NAMES",
        help="names as pagedkern.backends() lists them, joined by commas (default all)",
    )
    sizes = ",".join(map(str, spaces.BLOCK_SIZES))
    add(
        "--block-sizes",
        type=options.block_sizes,
        default=list(spaces.BLOCK_SIZES),
        metavar="SIZES",
        help=f"tokens in a block (default {sizes})",
    )
    add("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    add("--seed", type=int, default=0, metavar="N", help="of the data and of the order of runs (default 0)")
    add(
        "--exhaustive",
        action="store_true",
        help="let all into the finals that are not far too slow: to record a machine",
    )
    add("--resume", action="store_true", help="go on with what the last run of the same problems measured")
    add("--records", type=Path, metavar="FILE", help="where to write the measurements (default: the cache folder)")
    add("--in-process", action="store_true", help="measure in this process: for debugging a kernel that crashes")
    add = parser.add_argument_group("what is served").add_argument
    options.add_serving(add, several=True)
    add = parser.add_argument_group("the shape of attention (default: the model's)").add_argument
    add("--heads", type=options.count, metavar="N", help="query heads")
    add("--kv-heads", type=options.count, metavar="N", help="KV heads, a divisor of the query heads")
    add("--head-dim", type=options.count, metavar="N")
    add("--dtype", choices=FLOATS, help="of activations and, without --kv-dtype, of the cache")
    add("--kv-dtype", choices=tuple(ITEMSIZE), metavar="DTYPE", help="of the cache (default as --dtype)")
    add = parser.add_argument_group("the batch (default: sized for the device)").add_argument
    add("--seqs", type=options.count, metavar="N", help="sequences in a batch")
    add("--context", type=options.count, metavar="N", help="tokens of the longest sequence in decode")
    add("--prompt", type=options.count, metavar="N", help="tokens of a prompt in prefill")
    add = parser.add_argument_group("output").add_argument
    add("--quiet", action="store_true", help="no progress")
    add("--all", action="store_true", help="also list the candidates that left early")
    options.add_json(add, "a JSON document with every measurement instead of tables")
    add("--dry-run", action="store_true", help="say what would be measured; measure and store nothing")
    return parser
