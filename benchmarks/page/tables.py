"""Results as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.page.results import Result, Row
from pagedkern.autotune.report.formats import digits, time_text
from pagedkern.backends import names

OWN = (*names(), "pagedkern", "paged")


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """The first two columns are text, the others numbers; an empty cell repeats the one above. "" without a line."""
    rules = ["---"] * 2 + ["---:"] * (len(head) - 2)
    found = list(lines)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rules, *found)) if found else ""


def is_own(row: Row) -> bool:
    """Whether pagedkern is what was measured: a backend, with or without a configuration."""
    return row.name.split(" ")[0] in OWN


def timed(result: Result, *beginnings: str, rate: str = "gb_per_s") -> str:
    """Groups of rows: time, rate, share of a plain read, and the time against pagedkern's best."""
    unit = {"gb_per_s": "GB/s", "gflop_per_s": "GFLOP/s"}[rate]
    head = ["problem", "who", "time", "spread", unit, *(["of a read"] if rate == "gb_per_s" else []), "time ÷ ours"]
    lines = []
    for group, rows in result.starting(*beginnings):
        best = min((row.seconds for row in rows if is_own(row)), default=None)
        label = group.removeprefix("decode ").removeprefix("prefill ")
        for row in sorted(rows, key=lambda row: row.seconds):
            cells = [label, row.name, time_text(row.seconds), f"{row.spread:.0%}"]
            cells.append(digits(row.info[rate]) if rate in row.info else "")
            if rate == "gb_per_s":
                cells.append(f"{row.info['of_read']:.0%}" if "of_read" in row.info else "")
            lines.append([*cells, f"{digits(row.seconds / best)} ×" if best else ""])
            label = ""
    return table(head, lines)


def block_sizes(result: Result) -> str:
    """A line for each block size, the share of a plain read for each backend."""
    groups = dict(result.starting("block size"))
    sizes = sorted({row.info["block_size"] for rows in groups.values() for row in rows})
    head = ["block size", *(group.split(", ")[1] for group in groups)]

    def cell(rows: list[Row], size: int) -> str:
        found = [row for row in rows if row.info["block_size"] == size]
        return f"{time_text(found[0].seconds)}, {found[0].info['of_read']:.0%} of a read" if found else ""

    return table(head, ([str(size), *(cell(rows, size) for rows in groups.values())] for size in sizes))


def allocator(result: Result) -> str:
    """Microseconds for each unit, ours and vLLM's."""
    lines = []
    for group, rows in result.starting("allocator"):
        _, _, rest = group.partition(", ")
        case, _, unit = rest.rpartition(", for each ")
        own, peers = ([row.seconds * 1e6 for row in rows if is_own(row) is ours] for ours in (True, False))
        ours = [f"{own[0]:.3f}"] if own else [""]
        theirs = [f"{peers[0]:.2f}", f"{digits(peers[0] / own[0])} ×"] if peers and own else ["", ""]
        lines.append([case, unit, *ours, *theirs])
    return table(["what", "for each", "pagedkern, µs", "vLLM, µs", "ratio"], lines)


def memory(result: Result) -> str:
    """Requests in memory and what the memory is used for."""
    lines = []
    for _, rows in result.starting("memory"):
        for row in rows:
            label, paged = row.name, row.info["usage"]["paged"]["resident"]
            for name, usage in row.info["usage"].items():
                shares = [f"{usage[part]:.1%}" for part in ("tokens", "later", "never", "holes")]
                lines.append([label, name, f"{usage['resident']:.1f}", f"{paged / usage['resident']:.1f} ×", *shares])
                label = ""
    head = ["workload", "memory is", "requests in it", "paged, to this", "tokens", "later", "never", "free"]
    return table(head, lines)


def compared(records: list[dict[str, str]]) -> str:
    """Records of one kind, a column for each figure."""
    keys = list(dict.fromkeys(key for record in records for key in record))
    return table([key.replace("_", " ") for key in keys], ([record.get(key, "") for key in keys] for record in records))
