"""An explanation as a page of its own, and the same facts as a fragment that a notebook shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ....codegen.devices import device_of
from ....ir.codes import fix_of
from ...fallback.records import needs_a_fix
from ..roofline import model_launches
from .charts import roofline
from .explained import Explained
from .html import document, fragment, note, picture, render, safe, table
from .listing import as_svg, kernel_listing, size_text

HEADINGS = ("What it costs", "Methods", "What runs", "Saved tensors", "Kernels", "Graphs after the passes")
MOST_NODES = 400
"""Nodes that a page draws: the layout of larger graphs takes seconds, and nobody can read them."""


def as_page(explained: Explained) -> str:
    """A whole document: costs, methods, launches, saved tensors, kernels, drawings."""
    return document(f"{explained.name} on {explained.target}", _body(explained, whole=True))


def as_fragment(explained: Explained) -> str:
    """One `<div>` with the same facts; kernels and drawings are folded."""
    return fragment(_body(explained, whole=False))


def _body(explained: Explained, whole: bool) -> str:
    rounding = [] if explained.numerics == "eager" else [f'numerics="{explained.numerics}"']
    sizes = [f"sizes that may vary, as they are here: {size_text(explained)}"] if explained.sizes else []
    parts = {
        "costs": _costs(explained), "roofline": _roofline(explained), "methods": _methods(explained),
        "launches": _launches(explained), "walks": _walks(explained), "breaks": _breaks(explained),
        "saved": _saved(explained), "specializations": _specializations(explained),
    }  # fmt: skip
    drawings = [(title, safe({"svg": picture(svg)})["svg"]) for title, svg in _drawings(explained)]
    facts: dict[str, Any] = {
        "explained": explained, "whole": whole, "notes": rounding + sizes, "kernels": _sources(explained),
        "drawings": drawings, "headings": HEADINGS if drawings else HEADINGS[:-1],
    }  # fmt: skip
    return render("explanation.html", facts | safe(parts))


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Whole numbers with commas."""
    return table(head, [[f"{v:,}" if isinstance(v, int) else str(v or "") for v in row] for row in rows])


# ------------------------------------------------------------------ sections
def _costs(explained: Explained) -> str:
    rows = []
    for direction, report in explained.directions.items():
        own, of_eager = (report.memory.own, report.memory.eager) if report.memory is not None else (None, None)
        moved = report.moved, _ratio(report.moved, report.minimal)
        rows.append([direction, "fusegrad", report.launch_count, *moved, own])
        if (eager := report.eager) is not None:
            moved = eager.bytes, _ratio(eager.bytes, report.minimal)
            rows.append([direction, "eager", eager.launches, *moved, of_eager])
    head = ("direction", "", "launches", "bytes moved", "x the minimum traffic", "peak memory")
    explanation = (
        "Counted from the kernels and from the operations of the methods as written, not measured. Peak memory: bytes "
        "held at a time beside the arguments; in eager at least, each value until its last use."
    )
    return _table(head, rows) + note(explanation) if rows else note("Nothing is compiled.")


def _roofline(explained: Explained) -> str:
    """Each launch on the roof of the device: operations per byte, and what it could do of them per second."""
    device = device_of(explained.device or explained.target)
    launches = model_launches(explained, device, explained.sizes) if device is not None else []
    if device is None or not any(m.operations for m in launches):
        return ""
    numbers = "; ".join(f"{at} {m.name}" for at, m in enumerate(launches, 1))
    text = f"Where the roof of {device.name} stands for each launch, by its data sheet, not measured: {numbers}."
    return picture(roofline(device, launches)) + note(text)


def _ratio(moved: int, minimal: int) -> str:
    return f"{moved / minimal:.2f}" if minimal else ""


def _methods(explained: Explained) -> str:
    rows = [
        (name, r.status, r.reason, r.where if r.reason else "", *((r.code, fix_of(r.reason)) if needs_a_fix(r) else ()))
        for name, r in explained.methods.items()
    ]
    return _table(("method", "status", "why", "where", "code", "fix"), rows)


def _launches(explained: Explained) -> str:
    rows = [
        (k.direction, k.name, k.kind, k.bytes_read, k.bytes_written, k.bytes_cached or "") for k in explained.kernels
    ]
    head = ("direction", "launch", "kind", "bytes read", "written", "again from L2")
    return _table(head, rows) if rows else note("Nothing is launched.")


def _walks(explained: Explained) -> str:
    """How kernels walk time and what is never in memory, what is made again, and what decided."""
    rows = [(k.name, k.walk) for k in explained.kernels if k.walk]
    lines = [line for d, r in explained.directions.items() for line in (*r.products, *explained.made_again(d))]
    walks = _table(("launch", "walks time, or a matrix that is never in memory"), rows) if rows else ""
    return walks + "".join(map(note, lines))


def _breaks(explained: Explained) -> str:
    rows = [
        (f"{c.before} | {c.after}", c.reason, c.where, c.code) for r in explained.directions.values() for c in r.cuts
    ]
    return _table(("fusion break", "why", "where", "code"), rows) if rows else ""


def _saved(explained: Explained) -> str:
    rows = [(k.name, k.type, k.bytes, k.how) for k in explained.kept]
    total = note(f"{explained.saved_bytes:,} bytes that forward keeps for backward, inputs and weights among them.")
    return total + (_table(("value", "type", "bytes", ""), rows) if rows else "")


def _sources(explained: Explained) -> list[Any]:
    return [k for k in explained.kernels if k.source]


def _specializations(explained: Explained) -> str:
    rows = [
        (str(n), v.difference or "; ".join(f"{k}: {f}" for k, f in v.facts.items()), "; ".join(v.conditions),
         "; ".join(v.kernels)) for n, v in enumerate(explained.variants, 1)
    ]  # fmt: skip
    return _table(("", "what differs", "if", "kernels"), rows) if rows else ""


def _drawings(explained: Explained) -> Iterator[tuple[str, str]]:
    """(title, SVG); none where forward is not compiled, or a graph is too large to be read."""
    graphs = [report.graph for report in explained.directions.values()]
    if "forward" in explained.directions and sum(map(len, graphs)) <= MOST_NODES:
        yield "as boxes and arrows", as_svg(explained)
        yield "as a listing, a row for each operation", kernel_listing(explained)
