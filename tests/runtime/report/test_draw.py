"""The picture of a graph: well-formed, self-contained, complete, and nothing overlaps."""

from __future__ import annotations

import itertools
import random
import re
import xml.etree.ElementTree as ET

import pytest
import sympy

from fusegrad.ir import Graph, Program, TensorType, Value, ValueRef, building, emit, provenance
from fusegrad.ir.graph import Origin
from fusegrad.runtime.report.page.graph_svg import CHAR, svg

SVG = "{http://www.w3.org/2000/svg}"
S0 = sympy.Symbol("s0", integer=True, positive=True)
ROWS = TensorType((S0, 128), "f32")


def chain() -> Graph:
    """exp(x) * 0.5, with a source line on every node."""
    graph = Graph("chain")
    x = graph.input(ROWS, "x")
    with building(graph), provenance(Origin(where="user.py:3", line="return x.exp() * 0.5  # a < b")):
        half = emit("full", value=0.5, shape=ROWS.shape, dtype="f32")
        y = emit("mul", emit("exp", x), half)
    return graph.returning([y])


def program() -> Program:
    forward, backward = chain(), Graph("chain.backward")
    forward.returning([*forward.outputs, forward.order()[0]])
    y, g = backward.input(ROWS, "y"), backward.input(ROWS, "grad_output")
    with building(backward):
        backward.returning([emit("mul", y, g)])
    return Program("Chain", forward, (ValueRef("hidden", 0),), 1, {(True,): backward})


def tangle(seed: int, nodes: int = 60) -> Graph:
    """A random graph of elementwise nodes and reductions."""
    draw = random.Random(seed)
    graph = Graph(f"tangle {seed}")
    values = [graph.input(ROWS, f"x{i}") for i in range(4)]
    with building(graph):
        while len(graph) < nodes:
            a, b = draw.choices(values[-8:], k=2)
            values.append(emit(draw.choice(["add", "mul", "max"]), a, b))
            if draw.random() < 0.2:
                values.append(emit("broadcast", emit("sum", a, axes=(1,)), shape=ROWS.shape, axes=(0,)))
    return graph.returning([v for v in graph if not v.users and v.prim != "input"])


def boxes(picture: str) -> list[tuple[float, float, float, float]]:
    """left, top, right, bottom of every node's box."""
    rects = [g.find(f"{SVG}rect") for g in ET.fromstring(picture).iter(f"{SVG}g") if g.find(f"{SVG}title") is not None]
    numbers = [[float(r.attrib[key]) for key in ("x", "y", "width", "height")] for r in rects if r is not None]
    return [(x, y, x + w, y + h) for x, y, w, h in numbers]


@pytest.mark.parametrize("seed", range(3))
def test_boxes_do_not_overlap(seed: int) -> None:
    for a, b in itertools.combinations(boxes(svg(tangle(seed))), 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_everything_lies_on_the_page() -> None:
    picture = svg(tangle(5))
    _, _, width, height = map(float, ET.fromstring(picture).attrib["viewBox"].split())
    assert all(0 <= x0 and 0 <= y0 and x1 <= width and y1 <= height for x0, y0, x1, y1 in boxes(picture))


def test_text_fits_its_box() -> None:
    for group in ET.fromstring(svg(tangle(1))).iter(f"{SVG}g"):
        rect = group.find(f"{SVG}rect")
        if group.find(f"{SVG}title") is None or rect is None:
            continue
        longest = max(len(text.text or "") for text in group.iter(f"{SVG}text"))
        assert longest * CHAR <= float(rect.attrib["width"])


def test_every_live_node_is_drawn() -> None:
    graph = tangle(2)
    picture = svg(graph)
    assert all(f"%{value.id} = {value.prim}(" in picture for value in graph.order())


def test_constants_are_written_into_their_users() -> None:
    picture = svg(chain())
    assert "mul(·, 0.5)" in picture
    assert "= full" not in picture


def test_tooltip_has_the_source_line_escaped() -> None:
    assert "user.py:3 return x.exp() * 0.5  # a &lt; b" in svg(chain())


def test_program_shows_residuals() -> None:
    picture = svg(program())
    assert picture.count("url(#residual-tip)") == 1
    assert ">hidden 0<" in picture
    assert ">forward<" in picture and ">backward<" in picture


def test_groups_are_shaded() -> None:
    graph = tangle(3)
    order = graph.order()
    picture = svg(graph, [order[:10], order[20:30]])
    assert len(re.findall(r'stroke-linejoin="round"', picture)) == 2


def test_picture_needs_nothing_from_outside() -> None:
    assert "http" not in svg(program()).replace("http://www.w3.org/2000/svg", "")


def test_same_graph_same_picture() -> None:
    assert svg(tangle(4)) == svg(tangle(4))


def returned_input() -> Graph:
    graph = Graph("identity")
    return graph.returning([graph.input(ROWS, "x"), None])


def written_input() -> Graph:
    graph = Graph("in place")
    x = graph.input(ROWS, "x")
    with building(graph):
        graph.mutations[0] = emit("exp", x)
    return graph


def constant_output() -> Graph:
    graph = Graph("constant")
    with building(graph):
        return graph.returning([emit("full", value=1.0, shape=(), dtype="f32")])


ODD = [Graph("empty"), returned_input(), written_input(), constant_output()]


@pytest.mark.parametrize("graph", ODD, ids=lambda g: g.name)
def test_odd_graphs_are_drawn(graph: Graph) -> None:
    ET.fromstring(svg(graph))


def test_unused_values_are_left_out() -> None:
    graph = chain()
    with building(graph):
        dead: Value = emit("neg", graph.inputs[0])
    assert f"%{dead.id} = neg" not in svg(graph)
