"""`workloads`: the presets, or one of them to start from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

from pagedkern.autotune import workloads
from pagedkern.autotune.cli import options
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
            raise InvalidArgument(f"got {given.name!r}, accepted is one of {', '.join(workloads.names())}")
        sys.stdout.write((workloads.FOLDER / f"{given.name}.toml").read_text(encoding="utf-8"))
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
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    out = Console()

    def say(line: str) -> None:
        out.print(Padding(Text(line), (0, 0, 0, 2), expand=False))

    for preset in presets:
        out.print(preset.name, style="bold", highlight=False)
        for line in (preset.about, f"{preset}.", f"{preset.source} ({preset.licence})."):
            say(line)
    out.print("\nModels", style="bold", highlight=False)
    for model in models:
        say(str(model))
    return 0
