"""`workloads`: the presets, or one of them to start from."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from pagedkern.autotune import workloads
from pagedkern.autotune.cli import options
from pagedkern.autotune.report import console
from pagedkern.errors import InvalidArgument

HELP = """\
List the workloads and models that have names; or print the file of one
workload, to be changed and given to --workload. A CSV or JSONL trace of your
own will do too: a request a line, with columns or keys prompt and output
(tokens), and shared if prompts begin alike.
"""
EXAMPLES = """\
examples:
  python -m pagedkern.autotune workloads
  python -m pagedkern.autotune workloads chat > mine.toml
  python -m pagedkern.autotune --workload mine.toml
"""


def run(argv: Sequence[str]) -> int:
    parser = options.parser("workloads", HELP, EXAMPLES, arguments=" [NAME]")
    parser.add_argument("name", nargs="?", help="of a workload to print")
    options.add_json(parser.add_argument)
    given = parser.parse_args(argv)
    if given.name is not None:
        if given.name not in workloads.names():
            raise InvalidArgument(f"got {given.name!r}, expected one of {', '.join(workloads.names())}")
        console.write((workloads.FOLDER / f"{given.name}.toml").read_text(encoding="utf-8"))
        return 0
    presets = [workloads.load(name) for name in workloads.names()]
    models = [workloads.model(name) for name in workloads.model_names()]
    if given.json:
        fields = ("name", "about", "source", "url", "licence", "limit", "samples", "beam", "concurrency")
        options.write_json(
            {
                "workloads": [{key: getattr(preset, key) for key in fields} for preset in presets],
                "models": [asdict(model) for model in models],
            }
        )
        return 0
    out = console.console()

    def say(line: str) -> None:
        for part in textwrap.wrap(line, max(4, out.width), initial_indent="  ", subsequent_indent="  "):
            console.say(out, part)

    for preset in presets:
        console.say(out, preset.name, "bold")
        for line in (preset.about, f"{preset}.", f"{preset.source} ({preset.licence})."):
            say(line)
    console.say(out, "\nModels", "bold")
    for model in models:
        say(str(model))
    return 0
