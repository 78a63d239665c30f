"""The compiled graphs as a page of HTML that needs nothing else: as boxes (`draw.py`), and as a listing.

The listing has a row for each node in the order of computation. On the left each value is a line from the row that
makes it to the rows that read it; behind the rows, a band for each kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ..draw import shaded, svg
from ..explain import Explanation
from .graphs import facts

ROW, CHARACTER, FONT = 22, 7.25, 12
LANE, MARGIN, GAP = 9, 16, 18
WIDEST = 60  # characters of a cell; a longer one ends in an ellipsis
LINES = ("#3b6fb6", "#c2571a", "#3d8b47", "#8d4fa8", "#a8882b", "#2a8c9c", "#b23a5e", "#5d6b7a")
BANDS = ("#eef4fb", "#fdf3ea", "#eef7ef", "#f6eff9", "#faf6e6", "#e9f6f8")
COLUMNS = ("value", "operation", "type", "kernel", "source")


TOLD = ("value", "axis", "axes", "perm", "start", "stop", "step", "lo", "hi", "mode", "reverse")
"""Parameters that a row shows; the rest is in its type."""


@dataclass(frozen=True)
class Lane:
    """The line of one value: its column, the row that makes it, the rows that read it."""

    column: int
    made: int
    read: tuple[int, ...]


def as_svg(found: Explanation) -> str:
    """The graph as boxes and arrows, forward above backward, residuals between them."""
    shades = [nodes for report in found.directions.values() for nodes in shaded(report.steps)]
    return svg(found.program, shades)


def listing(found: Explanation) -> str:
    """One SVG: forward's rows above backward's."""
    pictures = [_Table(name, part) for name, part in facts(found)["directions"].items()]
    width = max((p.width for p in pictures), default=200)
    height, parts = 0.0, []
    for picture in pictures:
        parts.append(f'<g transform="translate(0,{height:g})">{picture.svg(width)}</g>')
        height += picture.height
    title = f"{escape(found.name)} on {escape(found.target)}"
    return SVG.format(width=width, height=height, size=FONT, title=title, parts="".join(parts))


class _Table:
    """One direction."""

    def __init__(self, title: str, part: dict[str, Any]) -> None:
        self.title, self.part = title, part
        self.nodes: list[dict[str, Any]] = part["nodes"]
        self.cells = [self._cells(n) for n in self.nodes]
        self.lanes = lanes(self.nodes)
        self.left = MARGIN + LANE * (1 + max((lane.column for lane in self.lanes.values()), default=0)) + 8
        self.columns = self._columns()
        self.width = self.columns[-1] + MARGIN
        self.height = ROW * (len(self.nodes) + 2) + GAP

    def _cells(self, node: dict[str, Any]) -> tuple[str, ...]:
        words = [*node["operands"], *(f"{k}={_short(v)}" for k, v in node["parameters"].items() if k in TOLD)]
        operation = "input" if node["operation"] == "input" else f"{node['operation']}({', '.join(words)})"
        kernels = ", ".join(self.part["steps"][at]["name"] for at in node["steps"])
        place = f"{_file(node['where'])}  {(node['line'] or '').strip()}".strip()
        name = node["name"] + " ▸ saved" * node["residual"] + " ▸ out" * (node["name"] in self.part["outputs"])
        return tuple(map(_cut, (name, operation, node["type"], kernels, place)))

    def _columns(self) -> list[float]:
        """Where each column begins, and where the last one ends."""
        at, found = float(self.left), []
        for i, head in enumerate(COLUMNS):
            found.append(at)
            longest = max([len(head), *(len(cells[i]) for cells in self.cells)])
            at += longest * CHARACTER + GAP
        return [*found, at]

    def svg(self, width: float) -> str:
        return "".join([*self._bands(width), *self._heads(), *self._lines(), *self._texts()])

    def _y(self, row: int) -> float:
        return ROW * (row + 2) + ROW / 2

    def _bands(self, width: float) -> Iterator[str]:
        x, length = self.left - 4, width - self.left - MARGIN + 8
        for row, node in enumerate(self.nodes):
            if node["steps"]:
                fill = BANDS[node["steps"][0] % len(BANDS)]
                yield f'<rect x="{x:g}" y="{ROW * (row + 2)}" width="{length:g}" height="{ROW}" fill="{fill}"/>'

    def _heads(self) -> Iterator[str]:
        launches = len(self.part["launches"])
        yield _text(MARGIN, ROW * 0.8, f"{self.title}: {launches} launch{'es' * (launches != 1)}", weight="bold")
        for x, head in zip(self.columns, COLUMNS, strict=False):
            yield _text(x, ROW * 1.75, head, color="#6b7280")

    def _texts(self) -> Iterator[str]:
        for row, (node, cells) in enumerate(zip(self.nodes, self.cells, strict=True)):
            for column, (x, text) in enumerate(zip(self.columns, cells, strict=False)):
                weight = "bold" if column == 0 and (node["residual"] or node["name"] in self.part["outputs"]) else ""
                color = "#6b7280" if column >= 3 else "#111827"
                yield _text(x, self._y(row) + 4, text, color=color, weight=weight)

    def _lines(self) -> Iterator[str]:
        for number, (name, lane) in enumerate(self.lanes.items()):
            color, x = LINES[number % len(LINES)], self.left - 10 - LANE * lane.column
            last = max((lane.made, *lane.read))
            start, edge = self._y(lane.made), self.left - 4
            arrows = "".join(f"M{x:g} {self._y(row):g}H{edge:g}m-4 -3l4 3l-4 3" for row in lane.read)
            path = f"M{edge:g} {start:g}H{x:g}V{self._y(last):g}{arrows}"
            yield f"<g><title>{escape(name)}</title>"
            yield f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.4"/>'
            yield f'<circle cx="{edge:g}" cy="{start:g}" r="2.6" fill="{color}"/></g>'


def lanes(nodes: Sequence[dict[str, Any]]) -> dict[str, Lane]:
    """A column for each value that something reads: the first that is free from its making to its last reading."""
    row_of = {n["name"]: i for i, n in enumerate(nodes)}
    read: dict[str, list[int]] = {}
    for i, node in enumerate(nodes):
        for operand in dict.fromkeys(node["operands"]):
            read.setdefault(operand, []).append(i)
    busy: list[int] = []  # per column, the last row that it is used in
    found: dict[str, Lane] = {}
    for name in sorted(read, key=lambda n: (row_of[n], read[n][-1])):
        made, rows = row_of[name], read[name]
        column = next((c for c, until in enumerate(busy) if until < made), len(busy))
        busy[column:] = [*([rows[-1]] if column == len(busy) else []), *busy[column:]]
        busy[column] = rows[-1]
        found[name] = Lane(column, made, tuple(rows))
    return found


def _short(value: Any) -> str:
    return f"({', '.join(map(str, value))})" if isinstance(value, list) else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"


def _file(where: str | None) -> str:
    return (where or "").rsplit("/", 1)[-1]


def _text(x: float, y: float, text: str, color: str = "#111827", weight: str = "") -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    return f'<text x="{x:g}" y="{y:g}" fill="{color}"{bold} xml:space="preserve">{escape(text)}</text>'


# ------------------------------------------------------------------ a page
def as_html(found: Explanation) -> str:
    """The picture, what runs, and the kernels' text, on one page without scripts or requests."""
    rows = [
        f"<tr><td>{escape(k.direction)}</td><td>{escape(k.name)}</td><td>{escape(k.kind)}</td>"
        f"<td>{k.bytes_read:,}</td><td>{k.bytes_written:,}</td></tr>"
        for k in found.kernels
    ]
    methods = [
        f"<tr><td>{escape(name)}</td><td>{escape(r.status)}</td><td>{escape(r.reason or '')}</td>"
        f"<td>{escape(_file(r.where))}</td></tr>"
        for name, r in found.methods.items()
    ]
    text = escape(found.module) if found.kernel_records else "no kernels are generated"
    return PAGE.format(
        title=f"{escape(found.name)} on {escape(found.target)}", picture=as_svg(found), listing=listing(found),
        launches="".join(rows), methods="".join(methods), saved=f"{found.saved_bytes:,}", text=text,
    )  # fmt: skip


SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}" '
    'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="{size}"><title>{title}</title>'
    '<rect width="100%" height="100%" fill="#ffffff"/>{parts}</svg>\n'
)

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ margin: 24px auto; max-width: 1240px; font: 14px/1.5 system-ui, sans-serif; color: #111827; background: #fff; }}
h1 {{ font-size: 22px; }} h2 {{ font-size: 17px; margin-top: 32px; }}
table {{ border-collapse: collapse; }}
td, th {{ padding: 3px 14px 3px 0; text-align: left; border-bottom: 1px solid #e5e7eb; }}
.picture {{ overflow: auto; max-height: 1400px; border: 1px solid #e5e7eb; border-radius: 6px; padding: 8px; }}
pre {{ overflow-x: auto; padding: 12px; background: #f8fafc; border: 1px solid #e5e7eb; border-radius: 6px; }}
</style>
</head>
<body>
<h1>{title}</h1>
<table><tr><th>method</th><th>status</th><th>why</th><th>where</th></tr>{methods}</table>
<h2>Graphs after the passes</h2>
<div class="picture">{picture}</div>
<h2>Listing</h2>
<div class="picture">{listing}</div>
<h2>What runs</h2>
<table>
<tr><th>direction</th><th>launch</th><th>kind</th><th>bytes read</th><th>bytes written</th></tr>
{launches}
</table>
<p>Saved for backward: {saved} bytes.</p>
<h2>Kernels</h2>
<pre>{text}</pre>
</body>
</html>
"""
