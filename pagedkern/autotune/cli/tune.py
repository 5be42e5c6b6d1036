"""`tune`: measure and store."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from pagedkern.autotune import space as spaces
from pagedkern.autotune import workloads
from pagedkern.autotune.cli import COMMANDS, options
from pagedkern.autotune.store import device as machine
from pagedkern.autotune.store import files
from pagedkern.autotune.workloads import Model
from pagedkern.backends.base import ITEMSIZE

if TYPE_CHECKING:
    from rich.console import Console

    from pagedkern.autotune.search import Runner
    from pagedkern.autotune.space import Workload
    from pagedkern.autotune.tune import Order

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

Then it foretells for each workload how many output tokens a second each block
size gives: a larger block wastes more memory and shares less of a prefix, a
smaller one may be slower to read. pagedkern.recommend(workload, memory) tells
an engine the same.
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

The budget is time to measure: laying out the caches and compiling the kernels
come first, for each of the two problems, and are not counted in it. The
kernels that a CPU backend compiled are kept on disk, so later runs are
shorter. Every measurement is written down as it is made: a run that was killed
is gone on with by --resume, and what it had decided is stored already.

exit status:
  0    decided and stored; or the time was too short to prove anything faster,
       but the finals had begun with the untuned choice: that stays in use, the
       report says so, and nothing is stored
  1    nothing could be decided: the untuned choice never reached the finals,
       is wrong, or is not there; or a package is missing
  2    wrong usage, and problems that do not fit the free memory
  3    decided, but it could not be stored
  130  interrupted by Ctrl-C: the best so far was kept

environment:
  PAGEDKERN_CACHE_DIR  where choices are stored (default: user's cache)
"""


def run(argv: Sequence[str]) -> int:
    parser = _parser()
    given = parser.parse_args(argv)
    if given.heads and given.kv_heads and given.heads % given.kv_heads:
        parser.error(f"--heads {given.heads} is no multiple of --kv-heads {given.kv_heads}")
    from rich.console import Console

    out, err = Console(), Console(stderr=True)
    import torch

    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    model = _model(parser, given)
    problems = _problems(given, model, device)
    for problem in problems:
        needed, free = spaces.memory(problem, given.block_sizes), machine.free_memory(device)
        if needed > free:
            parser.error(
                f"{problem.kind}: {problem.num_seqs:,} sequences of up to {problem.context:,} tokens, laid out at "
                f"{len(given.block_sizes)} block sizes, need {options.gigabytes(needed)} of memory, "
                f"{options.gigabytes(free)} are free: give a smaller "
                f"{'--prompt' if problem.kind == 'prefill' else '--context'} or --seqs, or fewer --block-sizes"
            )
    if given.dry_run:
        return _plan(out, given, problems)
    import_module("filelock")  # without it nothing could be stored: said before anything is measured
    return _tune(given, problems, model, out, err)


def _tune(given: argparse.Namespace, problems: list[Workload], model: Model, out: Console, err: Console) -> int:
    from pagedkern.autotune.isolate import WorkerFailed
    from pagedkern.autotune.report import document, progress, terminal
    from pagedkern.autotune.tune import Order, serve, tune

    order = Order(problems, given.block_sizes, given.backends, given.budget, given.seed, given.exhaustive)
    with progress.Progress(err, given.budget) as bar:
        try:
            done = tune(
                order,
                journal=given.records or _journal(order),
                resume=given.resume,
                tell=bar.tell,
                make_runner=_here if given.in_process else None,
            )
        except WorkerFailed as failure:
            err.print(f"{failure}", style="bold red", highlight=False, markup=False)
            return 1
    traffics = given.workload or [workloads.load(name) for name in workloads.names()]
    base = _base(given)  # served as it is measured; with --model, whatever a file says
    traffics = [replace(t, model=None) if given.model or t.model == base else t for t in traffics]
    serve(done, traffics, model, lambda of: given.memory or options.cache_memory(of, problems[0].device))
    if given.json:
        options.write_json(document.document(done))
    else:
        terminal.show_run(out, done, every=given.all)
    return done.exit_code


def _here(space: spaces.Space, seed: int) -> Runner:
    from pagedkern.autotune.measure import Bench

    return Bench(space, seed)


def _journal(order: Order) -> Path | None:
    """Where a run of this order is written down: a rerun finds it there."""
    folder = files.runs()
    if folder is None:
        return None
    problems = [asdict(w) for w in order.workloads]
    text = json.dumps([problems, list(order.block_sizes), list(order.backends), order.exhaustive])
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    device = machine.slug_of(machine.identity(order.workloads[0].device))
    return folder / f"{device}-{digest}.jsonl"


def _base(given: argparse.Namespace) -> Model:
    """The model that is named, by the options or else by a workload's file."""
    named = (traffic.model for traffic in given.workload or () if traffic.model)
    model: Model = given.model or next(named, None) or workloads.model(workloads.model_names()[0])
    return model


def _model(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Model:
    """The model to serve, in the dtype and with the heads that are measured."""
    base = _base(given)
    dtype = given.dtype or base.dtype
    heads = given.heads or base.num_heads, given.kv_heads or base.num_kv_heads, given.head_dim or base.head_dim
    if heads[0] % heads[1]:
        parser.error(f"--heads {heads[0]} is no multiple of --kv-heads {heads[1]}")
    return replace(
        base, num_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2], dtype=dtype,
        kv_dtype=given.kv_dtype or base.kv_dtype, weight_bytes=base.num_weights * ITEMSIZE[dtype],
    )  # fmt: skip


def _plan(out: Console, given: argparse.Namespace, problems: list[Workload]) -> int:
    from pagedkern.autotune.report import document, terminal

    usable, unusable = spaces.usable_backends(problems[0].device, given.backends)
    plan = [spaces.candidates(problem, given.block_sizes, usable) for problem in problems]
    if given.json:
        options.write_json(document.plan_document(plan, unusable))
    else:
        terminal.show_plan(out, plan, unusable)
    return 0


def _problems(given: argparse.Namespace, model: Model, device: str) -> list[Workload]:
    sizes = {"num_seqs": given.seqs, "context": given.context, "prompt": given.prompt}
    return spaces.problems_of(model, device, num_block_sizes=len(given.block_sizes), **sizes)


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:10} {what}" for name, (_, what) in COMMANDS.items())
    parser = options.parser("[tune]", f"{HELP}\ncommands (each has a --help):\n{listed}\n", EXAMPLES)
    add = parser.add_argument_group("what is measured").add_argument
    add(
        "--budget",
        type=options.seconds,
        default=60.0,
        metavar="TIME",
        help="time to measure, such as 30s or 5m (default 60s)",
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
    add("--exhaustive", action="store_true", help="let all into the finals that are not hopeless: to record a machine")
    add("--resume", action="store_true", help="go on with what the last run of the same problems had measured")
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
    add("--all", action="store_true", help="also list the candidates that left early")
    options.add_json(add, "a JSON document with every measurement instead of tables")
    add("--dry-run", action="store_true", help="say what would be measured; measure and store nothing")
    return parser
