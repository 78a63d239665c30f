"""An explanation as HTML for notebooks: tables take their colours from the page, so that light and dark read alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Protocol

from ...ir.codes import fix_of
from ..fallback.records import Record, needs_a_fix
from .html_page import TableStyle, table

RULE = "border-bottom:1px solid color-mix(in srgb, currentColor 25%, transparent)"
CELL = f"padding:2px 14px 2px 0;vertical-align:top;{RULE}"
TABLE = "border-collapse:collapse;margin:4px 0 10px;font-size:13px;color:inherit;background:transparent"
STYLE = TableStyle(f' style="{TABLE}"', f' style="{CELL};text-align:left"', f' style="{CELL};text-align:right"')


class Explained(Protocol):
    """The facts of an explanation that its HTML shows."""

    name: str
    target: str
    methods: dict[str, Record]
    directions: Any
    kept: Any
    variants: Any

    @property
    def saved_bytes(self) -> int:
        """Of what is saved for backward."""


def as_html(explained: Explained) -> str:
    """One `<div>` without scripts, requests or colours of its own; kernels fold out."""
    heading = f"<b>{escape(explained.name)}</b> on {escape(explained.target)}"
    parts = [heading, _methods(explained), *_directions(explained), _residuals(explained), _variants(explained)]
    return f'<div style="color:inherit;background:transparent">{"".join(parts)}</div>'


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Whole numbers with commas."""
    return table(head, [[f"{v:,}" if isinstance(v, int) else str(v or "") for v in row] for row in rows], STYLE)


def _details(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def _methods(explained: Explained) -> str:
    rows = [
        (name, r.status, r.reason, r.where if r.reason else "", *((r.code, fix_of(r.reason)) if needs_a_fix(r) else ()))
        for name, r in explained.methods.items()
    ]
    return _table(("method", "", "why", "where", "code", "fix"), rows)


def _directions(explained: Explained) -> Iterable[str]:
    for direction, report in explained.directions.items():
        yield f"<b>{direction}</b>: {report.summary}"
        rows = [(k.name, k.kind, k.bytes_read, k.bytes_written, k.bytes_cached or "") for k in report.launches]
        yield _table(("launch", "", "bytes read", "written", "again from L2"), rows)
        cuts = [(f"{c.before} | {c.after}", c.reason, c.where, c.code) for c in report.cuts]
        yield _table(("fusion break", "why", "where", "code"), cuts) if cuts else ""
        yield from (_details(k.name, k.source) for k in report.launches if k.source)


def _residuals(explained: Explained) -> str:
    total = f"<b>saved tensors</b>: {explained.saved_bytes:,} bytes"
    rows = [(k.name, k.type, k.bytes, k.how) for k in explained.kept]
    return total + (_table(("value", "type", "bytes", ""), rows) if rows else "")


def _variants(explained: Explained) -> str:
    if not explained.variants:
        return ""
    rows = [
        (str(n), v.difference or "; ".join(f"{k}: {f}" for k, f in v.facts.items()), "; ".join(v.conditions),
         "; ".join(v.kernels)) for n, v in enumerate(explained.variants, 1)
    ]  # fmt: skip
    return "<b>specializations</b>" + _table(("", "what differs", "if", "kernels"), rows)
