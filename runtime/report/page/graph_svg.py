"""A picture of a graph, or of a Program (forward above, backward below), as SVG without outside resources.

One box per node: name, primitive, type; the user's source line is its tooltip. Constants are written into the box that
uses them. Fusion groups are shaded, residuals are the coloured edges from forward to backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import pairwise
from typing import Any, TypeAlias

import networkx as nx
import sympy

from ....ir import Graph, Program, Value, ValueRef, show
from ....ir.loops.body import bodies_of
from ....ir.passes.fuse import Group, Step
from ....ir.prims import PRIMS
from ..size_names import renamed
from .layered_layout import Layout, Node, arrange, ranks

Point: TypeAlias = tuple[float, float]

FONT = 12
CHAR = 7.4  # a little more than the advance of any common monospace face at this size
TITLE_CHAR = 10.2  # the same of the title
BOX_HEIGHT = 38.0
LAYER_STEP = 72.0
MARGIN = 28.0
TOP = 66.0
LONGEST = 40  # characters of a label
SHORTEST = 16  # characters that are left of a long name

# family -> fill and outline
COLOURS = {
    "input": ("#e7f0fb", "#3b6fb6"),
    "output": ("#e7f0fb", "#3b6fb6"),
    "elementwise": ("#ffffff", "#6b7280"),
    "reduce": ("#fff1d6", "#b7791f"),
    "cumulative": ("#fff1d6", "#b7791f"),
    "layout": ("#f3f4f6", "#9ca3af"),
    "source": ("#f3f4f6", "#9ca3af"),
    "contract": ("#e6f6ea", "#2f855a"),
    "scan": ("#e3f4f4", "#2c7a7b"),
    "gather": ("#efe9fb", "#6b46c1"),
    "scatter": ("#efe9fb", "#6b46c1"),
    "random": ("#efe9fb", "#6b46c1"),
    "extern": ("#fde8e8", "#b83232"),
    "pick": ("#fde8e8", "#b83232"),
}
LEGEND = {
    "input": "input / output",
    "elementwise": "elementwise",
    "reduce": "reduce, cumulative",
    "layout": "layout",
    "contract": "contract",
    "scan": "loop over time",
    "gather": "gather, scatter, random",
    "extern": "called as it is",
}
SHADES = ("#d9ead3", "#d0e3f5", "#f9e3c8", "#e5daf3", "#d5efec", "#f5d9e2", "#ecebc9", "#dde0e6")
RESIDUAL = "#d6336c"
EDGE = "#9ca3af"
SHOWN_PARAMS = ("axes", "axis", "perm", "index", "kind", "mode", "length")
PREFIX = {"input": "f:in", "output": "f:out", "hidden": "f:out"}


@dataclass(frozen=True)
class Box:
    """The texts of one drawn node."""

    family: str
    label: str
    detail: str
    tooltip: str

    @property
    def width(self) -> float:
        return CHAR * max(len(self.label), len(self.detail)) + 18


@dataclass
class Picture:
    """The boxes and edges of one or more panels, before layout. A panel is a title and the layers it covers."""

    title: str
    note: str = ""
    boxes: dict[Node, Box] = field(default_factory=dict)
    graph: nx.DiGraph = field(default_factory=nx.DiGraph)
    rank: dict[Node, int] = field(default_factory=dict)
    cluster: dict[Node, int] = field(default_factory=dict)
    residuals: set[tuple[Node, Node]] = field(default_factory=set)
    panels: list[tuple[str, int, int]] = field(default_factory=list)
    size_names: Mapping[sympy.Symbol, str] = field(default_factory=dict)

    def types(self, value: Value) -> str:
        """f32[M, 4096]"""
        return renamed(", ".join(map(str, value.avals)), self.size_names)


def svg(
    drawn: Graph | Program,
    groups: Sequence[Collection[Value]] | None = None,
    note: str = "",
    size_names: Mapping[sympy.Symbol, str] | None = None,
) -> str:
    """The picture of a graph or program as the text of an SVG file; `groups` (of values) are shaded."""
    home = {value: index for index, group in enumerate(groups or ()) for value in group}
    picture = Picture(drawn.name, note, size_names=size_names or {})
    if isinstance(drawn, Graph):
        add_panel(picture, drawn, "f", "graph", home)
    else:
        add_program(picture, drawn, home)
    return render(picture, arrange(picture.graph, picture.rank, widths(picture), picture.cluster))


def group_members(steps: Iterable[Step]) -> list[list[Value]]:
    """The values of the graph that each fused group of `Fuse()(graph)` computes: the `groups` of a picture."""
    return [members(step) for step in steps if isinstance(step, Group)]


def members(group: Group) -> list[Value]:
    """The values between the group's outputs and its inputs."""
    inside: dict[Value, None] = {}
    todo = [*group.outputs]
    while todo:
        value = todo.pop()
        if value not in group.inputs and value not in inside:
            inside[value] = None
            todo.extend(value.args)
    return list(inside)


def widths(picture: Picture) -> dict[Node, float]:
    return {node: box.width for node, box in picture.boxes.items()}


# ---------------------------------------------------------------------- what to draw
def add_program(picture: Picture, program: Program, home: dict[Value, int]) -> None:
    """Forward, then the backward that the most gradients reach, and the residuals between them."""
    add_panel(picture, program.forward, "f", "forward", home, program.user_outputs)
    if not program.backward:
        return
    mask = max(program.backward, key=sum)
    add_panel(picture, program.backward[mask], "b", "backward", home)
    for index, place in enumerate(program.residuals[: len(program.backward[mask].inputs)]):
        if place is not None:
            add_residual(picture, residual_source(place, program.user_outputs), f"b:in{index}")


def residual_source(place: ValueRef, user_outputs: int) -> Node:
    return f"{PREFIX[place.kind]}{place.index + (user_outputs if place.kind == 'hidden' else 0)}"


def add_residual(picture: Picture, source: Node, target: Node) -> None:
    if source in picture.boxes and target in picture.boxes:
        picture.graph.add_edge(source, target)
        picture.residuals.add((source, target))


def add_panel(
    picture: Picture, graph: Graph, prefix: str, title: str, home: dict[Value, int], visible: int | None = None
) -> None:
    """Add a graph below what is there: inputs in its first layer, `visible` outputs and the hidden ones in its last."""
    # Constants have no node of their own, unless they are results.
    names = {value: f"{prefix}:in{value.params['index']}" for value in graph.inputs}
    body = [value for value in graph.order() if not is_constant(value) or value in graph.results]
    names |= {value: f"{prefix}:{value.id}" for value in body}
    panel = nx.DiGraph()
    panel.add_nodes_from(names.values())
    panel.add_edges_from((names[a], names[v]) for v in body for a in v.args if a in names)
    results = list(result_edges(graph, prefix, len(graph.outputs) if visible is None else visible))
    panel.add_edges_from((names[value], node) for value, node, _ in results)
    # The boxes, then the layers below those of the panels before.
    boxes = {names[value]: box_of(value, picture.types(value)) for value in names}
    boxes |= {node: output_box(value, label, picture.types(value)) for value, node, label in results}
    picture.boxes |= {n: replace(box, tooltip=renamed(box.tooltip, picture.size_names)) for n, box in boxes.items()}
    picture.cluster |= {names[value]: home[value] for value in names if value in home}
    picture.graph.update(panel)
    stack(picture, panel, title)


def stack(picture: Picture, panel: nx.DiGraph, title: str) -> None:
    """Give the panel the layers below those taken: inputs alone in its first one, outputs alone in its last."""
    first = 1 + max((last for _, _, last in picture.panels), default=-1)
    depth = ranks(panel)
    crowded = any(depth[node] == 0 and ":in" not in node for node in panel)
    last = max([*depth.values(), 1]) + crowded
    pinned = {node: 0 if ":in" in node else last for node in panel if ":in" in node or ":out" in node}
    picture.rank |= {node: first + pinned.get(node, depth[node] + crowded) for node in panel}
    picture.panels.append((title, first, first + last))


def result_edges(graph: Graph, prefix: str, visible: int) -> Iterator[tuple[Value, Node, str]]:
    """(value, name of the output's box, label) of each output, then of each write into an input."""
    for index, value in enumerate(graph.outputs):
        if value is not None:
            label = f"output {index}" if index < visible else f"hidden {index - visible}"
            yield value, f"{prefix}:out{index}", label
    for index, value in graph.mutations.items():
        yield value, f"{prefix}:out-into{index}", f"written into {graph.inputs[index].params['name']}"


def is_constant(value: Value) -> bool:
    """A number, or a number spread over a shape."""
    if value.prim in ("broadcast", "cast", "reshape"):
        return is_constant(value.args[0])
    return value.prim == "full"


def number(value: Value) -> str:
    """The number behind a constant."""
    while value.prim != "full":
        (value,) = value.args
    constant = value.params["value"]
    return f"{constant:.6g}" if isinstance(constant, float) else str(constant)


def box_of(value: Value, types: str) -> Box:
    if value.prim == "input":
        return Box("input", shorten_middle(value.params["name"], LONGEST), clip(types), tooltip(value, types))
    return Box(PRIMS[value.prim].family, label_of(value), clip(types), tooltip(value, types))


def label_of(value: Value) -> str:
    """h = mul(·, 2); of a long name the middle goes, and the operation stays."""
    text = f" = {operation(value)}"
    name = value.origin.name or f"%{value.id}"
    return clip(f"{shorten_middle(name, max(LONGEST - len(text), SHORTEST))}{text}")


def output_box(value: Value, label: str, types: str) -> Box:
    return Box("output", label, clip(types), f"{label}: %{value.id}")


def operation(value: Value) -> str:
    """mul(·, 0.5): the primitive, with the constants among its operands and the parameters that shapes do not tell."""
    name = str(value.params.get("op") or value.params.get("target") or value.prim)
    name = name.removeprefix("aten.").removesuffix(".default")
    operands = [number(a) if is_constant(a) else "·" for a in value.args]
    parameters = [f"{key}={compact(value.params[key])}" for key in SHOWN_PARAMS if key in value.params]
    inner = (operands if set(operands) - {"·"} else []) + parameters
    return f"{name}({', '.join(inner)})" if inner else name


def compact(parameter: Any) -> str:
    """(1,) -> 1, (0, 1) -> 0,1 and () -> ()"""
    return ",".join(map(str, parameter)) if isinstance(parameter, tuple) and parameter else str(parameter)


def shorten_middle(text: str, longest: int) -> str:
    """gradient_of_the_output -> gradie…_output"""
    half = (longest - 1) // 2
    return text if len(text) <= longest else f"{text[: longest - 1 - half]}…{text[len(text) - half :]}"


def clip(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def tooltip(value: Value, types: str) -> str:
    """Everything that is known about a node, the user's source line first."""
    origin = value.origin
    source = f"{origin.where or ''} {origin.line or ''}".strip()
    params = ", ".join(f"{key}={item}" for key, item in value.params.items())
    bodies = [show(body.graph).rstrip() for body in bodies_of(value.params)]
    return "\n".join(filter(None, [source, origin.op, f"%{value.id} = {value.prim}({params}) : {types}", *bodies]))


# ---------------------------------------------------------------------- SVG
def render(picture: Picture, layout: Layout) -> str:
    # The drawing in the middle of a page that is wide enough for its heading, too.
    left, right = extent(picture, layout)
    width = max(right - left + MARGIN * 4, legend_width(picture), heading_width(picture))
    height = TOP + len(layout.layers) * LAYER_STEP + MARGIN
    shift = (width - left - right) / 2
    centre = {n: (layout.x[n] + shift, top_of(index)) for index, layer in enumerate(layout.layers) for n in layer}
    parts = [
        *header(picture, width, height),
        *legend(picture),
        *(panel(title, first, last, width) for title, first, last in picture.panels),
        *shading(picture, layout, centre),
        *edges(picture, layout, centre),
        *(draw_box(box, *centre[node]) for node, box in picture.boxes.items()),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def top_of(layer: int) -> float:
    return TOP + MARGIN + layer * LAYER_STEP


def extent(picture: Picture, layout: Layout) -> tuple[float, float]:
    """The leftmost and the rightmost end of a box or dummy."""
    half = {node: box.width / 2 for node, box in picture.boxes.items()}
    left = min((x - half.get(node, 0.0) for node, x in layout.x.items()), default=0.0)
    return left, max((x + half.get(node, 0.0) for node, x in layout.x.items()), default=0.0)


def heading_width(picture: Picture) -> float:
    return 3 * MARGIN + TITLE_CHAR * len(picture.title) + CHAR * len(picture.note)


def header(picture: Picture, width: float, height: float) -> list[str]:
    title, note_x = picture.title, 2 * MARGIN + TITLE_CHAR * len(picture.title)
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" '
        f'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="{FONT}">',
        f"<title>{escape(title)}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f"<defs>{marker('tip', EDGE)}{marker('residual-tip', RESIDUAL)}</defs>",
        f'<text x="{MARGIN}" y="26" font-size="16" font-weight="bold" fill="#111827">{escape(title)}</text>',
        f'<text x="{note_x:.1f}" y="26" fill="#6b7280">{escape(picture.note)}</text>',
    ]


def marker(name: str, fill: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 8 4 0 8z" fill="{fill}"/></marker>'
    )


def legend_entries(picture: Picture) -> list[tuple[str, str, str]]:
    """(fill, outline, text) of what the picture uses."""
    drawn = {COLOURS[box.family] for box in picture.boxes.values()}
    entries = [(*COLOURS[family], text) for family, text in LEGEND.items() if COLOURS[family] in drawn]
    entries += [(RESIDUAL, RESIDUAL, "residual")] if picture.residuals else []
    return entries + ([(SHADES[0], SHADES[0], "fusion group (one shade each)")] if picture.cluster else [])


def legend_width(picture: Picture) -> float:
    return 2 * MARGIN + sum(CHAR * len(text) + 36 for _, _, text in legend_entries(picture))


def legend(picture: Picture) -> Iterator[str]:
    x = MARGIN
    for fill, outline, text in legend_entries(picture):
        yield f'<rect x="{x:.1f}" y="40" width="14" height="14" rx="3" fill="{fill}" stroke="{outline}"/>'
        yield f'<text x="{x + 20:.1f}" y="51" fill="#374151">{escape(text)}</text>'
        x += CHAR * len(text) + 36


def panel(title: str, first: int, last: int, width: float) -> str:
    y = top_of(first) - LAYER_STEP * 0.25
    height = (last - first) * LAYER_STEP + BOX_HEIGHT + LAYER_STEP * 0.36
    return (
        f'<rect x="{MARGIN / 2}" y="{y:.1f}" width="{width - MARGIN:.1f}" height="{height:.1f}" rx="10" fill="#fcfcfd" '
        f'stroke="#d1d5db"/>'
        f'<text x="{MARGIN / 2 + 10}" y="{y + 14:.1f}" fill="#6b7280" font-size="11">{escape(title)}</text>'
    )


def shading(picture: Picture, layout: Layout, centre: dict[Node, Point]) -> Iterator[str]:
    """Each fusion group as one area: a slab per layer, joined to the next one."""
    for index in sorted(set(picture.cluster.values())):
        members = {node for node, home in picture.cluster.items() if home == index}
        members |= {dummy for (a, b), route in layout.routes.items() if {a, b} <= members for dummy in route}
        slabs = [slab(picture, layer, members, centre) for layer in layout.layers]
        shade = SHADES[index % len(SHADES)]
        yield f'<g fill="{shade}" stroke="{shade}" stroke-width="6" stroke-linejoin="round">'
        yield from (polygon(*area) for area in filter(None, slabs))
        yield from (bridge(a, b) for a, b in pairwise(slabs) if a and b)
        yield "</g>"


Slab: TypeAlias = tuple[float, float, float]  # left, right, top


def slab(picture: Picture, layer: Sequence[Node], members: set[Node], centre: dict[Node, Point]) -> Slab | None:
    """The part of one layer that a group covers."""
    inside = [node for node in layer if node in members]
    if not inside:
        return None
    half = {node: picture.boxes[node].width / 2 if node in picture.boxes else 4.0 for node in inside}
    left = min(centre[node][0] - half[node] for node in inside)
    return left - 5, max(centre[node][0] + half[node] for node in inside) + 5, centre[inside[0]][1]


def polygon(left: float, right: float, top: float) -> str:
    return f'<rect x="{left:.1f}" y="{top - 4:.1f}" width="{right - left:.1f}" height="{BOX_HEIGHT + 8:.1f}"/>'


def bridge(a: Slab, b: Slab) -> str:
    """The area between a slab and the one in the layer below."""
    low, high = a[2] + BOX_HEIGHT, b[2]
    corners = ((a[0], low), (a[1], low), (b[1], high), (b[0], high))
    return f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in corners)}"/>'


def edges(picture: Picture, layout: Layout, centre: dict[Node, Point]) -> Iterator[str]:
    starts = ports(picture, layout, centre, source=True)
    ends = ports(picture, layout, centre, source=False)
    for edge, route in layout.routes.items():
        stroke, width, tip = (RESIDUAL, 2, "residual-tip") if edge in picture.residuals else (EDGE, 1.2, "tip")
        stations = [centre[node] for node in route[1:-1]]
        path = curve((starts[edge], centre[edge[0]][1] + BOX_HEIGHT), stations, (ends[edge], centre[edge[1]][1]))
        yield f'<path d="{path}" fill="none" stroke="{stroke}" stroke-width="{width}" marker-end="url(#{tip})"/>'


def ports(picture: Picture, layout: Layout, centre: dict[Node, Point], source: bool) -> dict[tuple[Node, Node], float]:
    """The points at which edges leave (or meet) their boxes, along the side in the order of the other ends."""
    sides: dict[Node, list[tuple[float, tuple[Node, Node]]]] = {}
    for edge, route in layout.routes.items():
        neighbour = route[1] if source else route[-2]
        sides.setdefault(edge[0] if source else edge[1], []).append((centre[neighbour][0], edge))
    return {edge: x for node, side in sides.items() for edge, x in spread(picture.boxes[node], centre[node][0], side)}


def spread(
    box: Box, middle: float, side: list[tuple[float, tuple[Node, Node]]]
) -> Iterable[tuple[tuple[Node, Node], float]]:
    step = min(24.0, (box.width - 16) / len(side))
    first = middle - step * (len(side) - 1) / 2
    return ((edge, first + i * step) for i, (_, edge) in enumerate(sorted(side)))


def curve(start: Point, stations: list[Point], end: Point) -> str:
    """A smooth line that passes straight down beside the boxes of each layer between."""
    path, (x, y) = f"M{start[0]:.1f} {start[1]:.1f}", start
    for sx, sy in stations:
        path += f" {bend(x, y, sx, sy)} V{sy + BOX_HEIGHT:.1f}"
        x, y = sx, sy + BOX_HEIGHT
    return f"{path} {bend(x, y, *end)}"


def bend(x: float, y: float, to_x: float, to_y: float) -> str:
    middle = (y + to_y) / 2
    return f"C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}"


def draw_box(box: Box, x: float, top: float) -> str:
    fill, outline = COLOURS[box.family]
    radius = 14 if box.family in ("input", "output") else 4
    return (
        f"<g><title>{escape(box.tooltip)}</title>"
        f'<rect x="{x - box.width / 2:.1f}" y="{top:.1f}" width="{box.width:.1f}" height="{BOX_HEIGHT}" rx="{radius}" '
        f'fill="{fill}" stroke="{outline}"/>'
        f'<text x="{x:.1f}" y="{top + 16:.1f}" text-anchor="middle" fill="#111827">{escape(box.label)}</text>'
        f'<text x="{x:.1f}" y="{top + 31:.1f}" text-anchor="middle" fill="#6b7280" font-size="11">'
        f"{escape(box.detail)}</text></g>"
    )
