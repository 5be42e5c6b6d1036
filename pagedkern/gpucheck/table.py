"""The result as a short table for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def render(result: dict[str, Any]) -> str:
    return "\n".join(_lines(result))


def _lines(result: dict[str, Any]) -> Iterator[str]:
    yield f"{result['machine']['device']['name']}, {result['machine']['date']}"
    if result["emulated"]:
        emulated = any(backend["emulated"] for backend in result["backends"])
        yield f"{'Emulated on a CPU' if emulated else 'No GPU'}: what is computed is checked, no speed is measured."
    yield ""
    for backend in result["backends"]:
        yield f"{backend['name']:<12} {'yes' if backend['available'] else 'no':<4} {backend['reason'][:62]}"
    parts = result["parts"]
    yield ""
    for name in ("agreement", "graphs", "compile", "contract", "sanitizer"):
        if name in parts:
            yield from _checks(name, parts[name])
    if "limits" in parts and "copy_gb_per_s" in parts["limits"]:
        limits = parts["limits"]
        yield ""
        yield (
            f"copy {limits['copy_gb_per_s']:.0f} GB/s, matrix products bfloat16 "
            f"{limits['bfloat16_tflop_per_s']:.0f} and float32 {limits['float32_tflop_per_s']:.0f} TFLOP/s"
        )
    rows = [row for name in ("decode", "prefill", "operations", "swap") for row in _rows(parts.get(name))]
    if rows:
        yield ""
        yield from _speeds(rows, parts)
    left_out: dict[str, list[str]] = {}
    for name, part in parts.items():
        if isinstance(part, dict) and "left_out" in part:
            left_out.setdefault(part["left_out"], []).append(name)
    for reason, names in left_out.items():
        yield f"left out, {reason}: {', '.join(names)}"[:79]
    yield ""
    yield f"{len(result['problems']) or 'no'} problem{'s' * (len(result['problems']) != 1)}"
    for problem in result["problems"][:20]:
        yield f"  {problem}"[:79]


def _rows(part: Any) -> list[dict[str, Any]]:
    return part if isinstance(part, list) else []


def _checks(name: str, part: dict[str, Any]) -> Iterator[str]:
    for backend, found in part.items():
        if isinstance(found, dict):
            if "skipped" in found:
                yield f"{name:<10} {backend:<12} skipped: {found['skipped']}"
            elif "clean" in found:
                yield f"{name:<10} {backend:<12} {'clean' if found['clean'] else 'NOT CLEAN'}"
            else:
                count = found.get("checked", found.get("run", 0))
                yield f"{name:<10} {backend:<12} {count} checked, {len(found['failed'])} failed"
        elif backend not in ("error", "left_out"):
            yield f"{name:<10} {backend:<12} {found or 'right'}"[:79]


def _speeds(rows: list[dict[str, Any]], parts: dict[str, Any]) -> Iterator[str]:
    """Times; what is bound by memory as a share of the copy, prefill as a share of the matrix rate."""
    limits = parts.get("limits", {})
    yield f"{'':<28} {'backend':<11} {'time':>9} {'graph':>9} {'GB/s':>6} {'share':>6}"
    label = ""
    for row in rows:
        title = f"{row['kind']} {row.get('shape', '')}".strip()
        first, label = ("" if title == label else title), title
        if "seconds" not in row:
            yield f"{first[:28]:<28} {row['backend']:<11} failed: {row.get('failed', '')[:28]}"
            continue
        graph = f"{row['graph_seconds'] * 1e3:.3f}" if row.get("graph_seconds") else ""
        peak = limits.get("bfloat16_tflop_per_s" if row["kind"] == "prefill" else "copy_gb_per_s")
        rate = row["tflop_per_s" if row["kind"] == "prefill" else "gb_per_s"]
        share = f"{rate / peak:.0%}" if peak and not row["kind"].startswith("swap") else ""
        yield (
            f"{first[:28]:<28} {row['backend']:<11} {row['seconds'] * 1e3:>6.3f} ms {graph:>9} "
            f"{row['gb_per_s']:>6.0f} {share:>6}"
        )
