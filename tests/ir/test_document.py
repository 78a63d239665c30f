"""Graphs as JSON: they come back the same, nothing in them is evaluated, and a stranger's file cannot keep us busy."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from fusegrad.ir import Graph, TensorType, building, emit, provenance, verify
from fusegrad.ir.errors import ParseError
from fusegrad.ir.graph import Origin
from fusegrad.ir.prims import Arg
from fusegrad.ir.rewrite import rebuild
from fusegrad.ir.text.document import document, graph_from, size_from_document
from fusegrad.ir.text.text import key, parse, show, size_text

s0 = sympy.Symbol("s0", integer=True, positive=True)
s1 = sympy.Symbol("s1", integer=True)
SYMBOLS = {"s0": s0, "s1": s1}


def again(graph: Graph) -> Graph:
    return graph_from(json.loads(json.dumps(document(graph), allow_nan=False)))


def scale() -> Graph:
    graph = Graph("scale")
    x = graph.input(TensorType((s0, 4096), "bf16"), "x", (1, s0))
    with building(graph), provenance(Origin("y", "aten.mul", "scale.py:12", "y = x * 2")):
        two = emit("full", value=2.0, shape=(s0, 4096), dtype="bf16")
        y = emit("mul", x, two)
        spec = ((Arg(0), (1, -2.5, None, True), "a"), (("dim", -1),))
        sort = emit("aten", y, op="aten.sort.default", spec=spec, avals=(y.aval, y.aval.with_dtype("i64")))
        graph.returning([y, emit("pick", sort, index=1), None], [(1, s0), (4096, 1), None])
    graph.mutations[0] = y
    return graph


def full(number: object) -> Graph:
    graph = Graph("number")
    with building(graph):
        return graph.returning([emit("full", value=number, shape=(), dtype="c64")])


def test_a_graph_comes_back_with_strides_mutations_results_and_origins() -> None:
    back = verify(again(scale()))
    assert show(back, origins=True) == show(scale(), origins=True) and document(back) == document(scale())
    assert back.outputs[0] is not None and back.outputs[0].origin == Origin("y", "aten.mul", "scale.py:12", "y = x * 2")


def test_what_is_known_of_an_input_comes_back() -> None:
    """Both forms have it, graphs that differ in it are told apart, and rewriting keeps it."""
    graphs = []
    for is_top in (True, False):
        graph = Graph("rows")
        graphs.append(graph.returning([graph.input(TensorType((s0,), "f32"), "top", is_top=is_top)]))
    top, other = graphs
    for back in (again(top), parse(show(top)), rebuild(top, {})):
        assert back.inputs[0].params["is_top"] and show(back) == show(top)
    assert key(top) != key(other) and "is_top" not in show(other)


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_random_graphs_come_back(grow: Any, seed: int) -> None:
    assert key(verify(again(grow(seed)))) == key(grow(seed))


@pytest.mark.parametrize("number", [0, -1, True, 0.0, -0.0, 1e-30, 0.1, float("inf"), -float("inf"), 3 + 4j, s0 / 3])
def test_numbers_come_back_exactly(number: Any) -> None:
    (value,) = again(full(number)).outputs
    assert value is not None and repr(value.params["value"]) == repr(number)


@pytest.mark.parametrize("size", [
    s0 * 2, 1 / s0, sympy.Rational(1, 3) * s0 * (s0 + 1), (s0 + 1) * (s1 - 2) * 4, sympy.floor((s0 - 1) / 2) + 1,
    sympy.Mod(s0, 3), sympy.Max(s0, s1, 7), sympy.ceiling(s0 / 8) * 8, 0.25 * s0, 1 / sympy.sqrt(s0), s0**2,
], ids=str)  # fmt: skip
def test_sizes_come_back_exactly(size: sympy.Expr) -> None:
    assert size_from_document(size_text(size), SYMBOLS, "here") == size


def test_what_has_no_form_is_refused_when_written() -> None:
    with pytest.raises(ValueError, match="a type among the parameters"):
        document(full(Graph))


HOSTILE_SIZES = [
    "__import__('os')", "s0.__class__", "s0**s0", "9**9**9**9", "9**999999999", "2**(9**9)", "s7", "lambda: 0", "s0;s1",
    "exp(s0)", "factorial(99999)", "gamma(9)", "oo", "zoo", "1/0", "s0/0", "(" * 200, "s0" * 500, "9" * 40, "1e999",
    "*".join(["(s0+s1+1)**4"] * 12), "Mod(" * 30, "I", "s0 if s1 else 2", "[s0]", "s0\n", "sympify(1)", "Max()",
    "sqrt(-1)", "floor(" * 11 + "s0/2" + ")/2" * 11, "Mod(s0, 0)", "((s0**4)**4)**4",
    -1, 1 << 70, 1.5, None, True, ["s0"], {"size": "s0"},
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE_SIZES, ids=lambda t: str(t)[:24])
def test_hostile_sizes_are_refused_at_once(text: Any) -> None:
    began = time.perf_counter()
    with pytest.raises(ParseError):
        size_from_document(text, SYMBOLS, "here")
    assert time.perf_counter() - began < 1


def changed(path: list[Any], value: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        inner: Any = data
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = value

    return change


FOREVER: list[Any] = []
for _ in range(90):
    FOREVER = [FOREVER]
MISTAKES = [
    changed(["nodes", 2, "prim"], "call"), changed(["nodes", 2, "prim"], "eval"), changed(["nodes", 2, "prim"], 3),
    changed(["nodes", 2, "operands"], [0, 2]), changed(["nodes", 2, "operands"], [0, -1]),
    changed(["nodes", 2, "operands"], [0, True]), changed(["nodes", 2, "operands"], [0]),
    changed(["nodes", 2, "types", 0, 0], "f31"), changed(["nodes", 2, "types", 0, 1, 1], 4095),
    changed(["nodes", 2, "types"], []), changed(["nodes", 2, "parameters"], {"axes": [0]}),
    changed(["nodes", 3, "parameters", "spec"], FOREVER), changed(["nodes", 3, "parameters", "spec"], {"operand": -1}),
    changed(["nodes", 3, "parameters", "spec"], {"code": "1"}), changed(["nodes", 3, "parameters", "avals"], []),
    changed(["nodes", 0, "parameters", "name"], "x = 1; y"), changed(["nodes", 0, "parameters", "name"], "x\ny"),
    changed(["nodes", 0, "parameters", "strides"], [1]), changed(["nodes", 1, "origin", "line"], "a\nimport os"),
    changed(["nodes", 1, "origin", "name"], "y)(z"), changed(["nodes", 1, "origin", "code"], "y"),
    changed(["outputs", 0, "node"], 99), changed(["outputs", 0, "strides"], [1]), changed(["outputs", 0], 3),
    changed(["mutations"], [[1, 2]]), changed(["mutations"], [[0, 4]]), changed(["mutations"], {"0": 2}),
    changed(["symbols", "s0"], "prime"), changed(["symbols"], {}), changed(["symbols", "floor"], "positive"),
    changed(["symbols", "__import__('os')"], "positive"), changed(["name"], 5), changed(["more"], 5),
    changed(["nodes"], [{}] * 20_001), changed(["nodes", 4, "parameters", "index"], 7),
]  # fmt: skip


@pytest.mark.parametrize("change", MISTAKES)
def test_a_mistake_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    data = copy.deepcopy(document(scale()))
    change(data)
    with pytest.raises(ParseError):
        graph_from(data)
