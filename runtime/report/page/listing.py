"""The compiled graphs as drawings: as boxes and arrows, and as a listing.

The listing has a row for each node in the order of computation. On the left each value is a line from the row that
makes it to the rows that read it; behind the rows, a band for each kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from .explained import Explained
from .graph_facts import facts
from .graph_svg import group_members, shorten_middle, svg
from .html import GREY, INK, WIDTH

ROW, CHARACTER, FONT = 22, 7.25, 12
LANE, MARGIN, GAP = 9, 16, 18
ROOM = WIDTH - 18  # what a picture's frame leaves of a page
LEAST = 12  # characters that a column keeps
LINES = ("#3b6fb6", "#c2571a", "#3d8b47", "#8d4fa8", "#a8882b", "#2a8c9c", "#b23a5e", "#5d6b7a")
BANDS = ("#eef4fb", "#fdf3ea", "#eef7ef", "#f6eff9", "#faf6e6", "#e9f6f8")
COLUMNS = ("value", "operation", "type", "kernel", "source")
MIDDLE = (0, 3)  # columns of names: what tells two of them apart is often at the end


TOLD = ("value", "axis", "axes", "perm", "start", "stop", "step", "lo", "hi", "mode", "reverse")
"""Parameters that a row shows; the rest is in its type."""


@dataclass(frozen=True)
class Lane:
    """The line of one value: its column, the row that makes it, the rows that read it."""

    column: int
    row: int
    read: tuple[int, ...]


def as_svg(explanation: Explained) -> str:
    """The graph as boxes and arrows, forward above backward, residuals between them."""
    shades = [nodes for report in explanation.directions.values() for nodes in group_members(report.steps)]
    return svg(explanation.program, shades, size_text(explanation), explanation.size_names)


def size_text(explanation: Explained) -> str:
    """M = 8192, N = 4096: the sizes that may vary, as they are for these arguments."""
    names = explanation.size_names
    return ", ".join(f"{names.get(symbol, symbol)} = {size}" for symbol, size in explanation.sizes.items())


def kernel_listing(explanation: Explained) -> str:
    """One SVG: forward's rows above backward's."""
    pictures = [_Table(name, part) for name, part in facts(explanation)["directions"].items()]
    width = max((p.width for p in pictures), default=200)
    height, parts = 0.0, []
    for part in pictures:
        parts.append(f'<g transform="translate(0,{height:g})">{part.svg(width)}</g>')
        height += part.height
    title = f"{escape(explanation.name)} on {escape(explanation.target)}"
    return SVG.format(width=width, height=height, size=FONT, title=title, parts="".join(parts))


class _Table:
    """The listing of one direction."""

    def __init__(self, title: str, part: dict[str, Any]) -> None:
        self.title, self.part = title, part
        self.nodes: list[dict[str, Any]] = part["nodes"]
        self.cells = [self._cells(n) for n in self.nodes]
        self.lanes = lanes(self.nodes)
        self.left_edge = MARGIN + LANE * (1 + max((lane.column for lane in self.lanes.values()), default=0)) + 12
        room = (ROOM - self.left_edge - MARGIN - GAP * (len(COLUMNS) - 1)) / CHARACTER
        longest = [max([len(head), *(len(cells[i]) for cells in self.cells)]) for i, head in enumerate(COLUMNS)]
        self.letters = column_widths(longest, int(room))
        steps = range(len(COLUMNS) + 1)  # the left edges of columns, and the right edge of the last
        self.columns = [self.left_edge + sum(self.letters[:i]) * CHARACTER + GAP * i for i in steps]
        self.width = self.columns[-1] - GAP + MARGIN
        self.height = ROW * (len(self.nodes) + 2) + GAP

    def _cells(self, node: dict[str, Any]) -> tuple[str, ...]:
        words = [*node["operands"], *(f"{k}={_short(v)}" for k, v in node["parameters"].items() if k in TOLD)]
        operation = "input" if node["operation"] == "input" else f"{node['operation']}({', '.join(words)})"
        kernels = ", ".join(self.part["steps"][at]["name"] for at in node["steps"])
        place = f"{_file(node['where'])}  {(node['line'] or '').strip()}".strip()
        name = node["name"] + " ▸ saved" * node["residual"] + " ▸ out" * (node["name"] in self.part["outputs"])
        return name, operation, node["type"], kernels, place

    def svg(self, width: float) -> str:
        return "".join([*self._bands(width), *self._heads(), *self._lines(), *self._texts()])

    def _y(self, row: int) -> float:
        return ROW * (row + 2) + ROW / 2

    def _bands(self, width: float) -> Iterator[str]:
        x, length = self.left_edge - 6, width - self.left_edge - MARGIN + 12
        for row, node in enumerate(self.nodes):
            if node["steps"]:
                fill = BANDS[node["steps"][0] % len(BANDS)]
                yield f'<rect x="{x:g}" y="{ROW * (row + 2)}" width="{length:g}" height="{ROW}" fill="{fill}"/>'

    def _heads(self) -> Iterator[str]:
        launches = len(self.part["launches"])
        yield _text(MARGIN, ROW * 0.8, f"{self.title}: {launches} launch{'es' * (launches != 1)}", weight="bold")
        for x, head in zip(self.columns, COLUMNS, strict=False):
            yield _text(x, ROW * 1.75, head, color=GREY)

    def _texts(self) -> Iterator[str]:
        for row, (node, cells) in enumerate(zip(self.nodes, self.cells, strict=True)):
            for column, (x, text) in enumerate(zip(self.columns, cells, strict=False)):
                weight = "bold" if column == 0 and (node["residual"] or node["name"] in self.part["outputs"]) else ""
                visible = _cut(text, self.letters[column], column in MIDDLE)
                color = GREY if column >= 3 else INK
                yield _text(x, self._y(row) + 4, visible, color, weight, uncut=text)

    def _lines(self) -> Iterator[str]:
        for number, (name, lane) in enumerate(self.lanes.items()):
            color, x = LINES[number % len(LINES)], self.left_edge - 10 - LANE * lane.column
            last = max((lane.row, *lane.read))
            start, edge = self._y(lane.row), self.left_edge - 6
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
    by_name: dict[str, Lane] = {}
    for name in sorted(read, key=lambda n: (row_of[n], read[n][-1])):
        row, rows = row_of[name], read[name]
        column = next((c for c, until in enumerate(busy) if until < row), len(busy))
        busy[column:] = [*([rows[-1]] if column == len(busy) else []), *busy[column:]]
        busy[column] = rows[-1]
        by_name[name] = Lane(column, row, tuple(rows))
    return by_name


def _short(value: Any) -> str:
    return f"({', '.join(map(str, value))})" if isinstance(value, list) else str(value)


def column_widths(longest: Sequence[int], room: int) -> list[int]:
    """Characters for each column: what its longest cell needs, while the widest ones give up what is not there."""
    letters = list(longest)
    while sum(letters) > room and max(letters) > LEAST:
        letters[letters.index(max(letters))] -= 1
    return letters


def _cut(text: str, letters: int, middle: bool) -> str:
    if len(text) <= letters or (middle and ", " not in text):
        return shorten_middle(text, letters)
    return text[: letters - 1] + "…"


def _file(place: str | None) -> str:
    return (place or "").rsplit("/", 1)[-1]


def _text(x: float, y: float, text: str, color: str = INK, weight: str = "", uncut: str = "") -> str:
    """A line of text; what was cut of it is its tooltip."""
    bold = f' font-weight="{weight}"' if weight else ""
    tooltip = f"<title>{escape(uncut)}</title>" if uncut not in ("", text) else ""
    return f'<text x="{x:g}" y="{y:g}" fill="{color}"{bold} xml:space="preserve">{tooltip}{escape(text)}</text>'


SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}" '
    'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="{size}"><title>{title}</title>'
    '<rect width="100%" height="100%" fill="#ffffff"/>{parts}</svg>\n'
)
