"""The primitive `scan`: its types, its meaning, its legality, and its text."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from loop_samples import LENGTHS, Loop, N, T, f64, loops, numbers

from fusegrad.ir import Graph, InvalidGraphError, TensorType, building, emit, parse, show, verify
from fusegrad.ir.errors import ParseError, TypeRuleError
from fusegrad.ir.evaluate import evaluate
from fusegrad.ir.infer import infer
from fusegrad.ir.loops.body import Body
from fusegrad.ir.text.document import document, graph_from
from fusegrad.ir.text.text import key

GATED = loops[0]


def name(loop: Loop) -> str:
    return loop.name


# ---------------------------------------------------------------------------------------------- meaning
@pytest.mark.parametrize("loop", loops, ids=name)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_scan_is_the_loop(loop: Loop, reverse: bool, length: int) -> None:
    graph, sizes = verify(loop.graph(reverse)), {T: length, N: 4}
    inputs = numbers(loop.types, sizes)
    found = evaluate(graph, inputs, sizes)
    for a, b in zip(found, loop.expected(inputs, reverse), strict=length > 0):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    if not length:
        assert [a.shape[0] for a in found[len(loop.init) :]] == [0] * (len(found) - len(loop.init))


def test_a_scan_without_operands_counts() -> None:
    body = Graph("count")
    before = body.input(TensorType((), "i64"), "n")
    with building(body):
        body.returning([emit("add", before, emit("full", value=1, shape=(), dtype="i64")), before])
    graph = Graph("counting")
    start = graph.input(TensorType((), "i64"), "start")
    with building(graph):
        node = emit("scan", start, body=Body(body), carries=1, steps=0, length=2 * T, reverse=True)
        graph.returning([emit("pick", node, index=i) for i in (0, 1)])
    last, seen = evaluate(verify(graph), [5], {T: 2})
    assert last == 9 and list(seen) == [8, 7, 6, 5]


# ---------------------------------------------------------------------------------------------- types
def test_the_types_of_a_scan_are_the_carries_and_the_stacks() -> None:
    for loop in loops:
        avals = [o.aval for o in loop.graph().outputs]
        assert tuple(avals[: len(loop.init)]) == loop.init
        assert all(t.shape[0] == T for t in avals[len(loop.init) :])


REFUSED: list[tuple[dict[str, Any], list[TensorType], str]] = [
    ({"length": T + 1}, GATED.types, "is not of T \\+ 1 steps"),
    ({"carries": 2}, GATED.types, "operands of"),
    ({"steps": 3}, GATED.types, "operands of"),
    ({"steps": 1}, GATED.types, "the body takes"),
    ({}, [f64(3, N + 1), *GATED.types[1:]], "the body takes"),
    ({}, [GATED.types[0].with_dtype("f32"), *GATED.types[1:]], "the body takes"),
    ({}, [*GATED.types, f64(3)], "the body takes"),
    ({}, [GATED.types[0], f64(), f64()], "axis 0 of"),
]


@pytest.mark.parametrize(("wrong", "types", "reason"), REFUSED)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], types: list[TensorType], reason: str) -> None:
    params = {"body": Body(GATED.body()), "carries": 1, "steps": 2, "length": T, "reverse": False} | wrong
    with pytest.raises(TypeRuleError, match=reason):
        infer("scan", [(t,) for t in types], params)


def test_a_carry_keeps_its_type() -> None:
    body = GATED.body()
    body.returning([body.emit("cast", (body.outputs[0],), {"dtype": "f32"}), body.outputs[1]])
    params = {"body": Body(body), "carries": 1, "steps": 2, "length": T, "reverse": False}
    with pytest.raises(TypeRuleError, match="the body gives"):
        infer("scan", [(t,) for t in GATED.types], params)


# ---------------------------------------------------------------------------------------------- legality
def _writes(body: Graph) -> None:
    body.mutations[0] = body.outputs[0]


def _draws(body: Graph) -> None:
    spec: Any = ((), ())
    body.emit("aten_effect", (), {"op": "aten.rand.default", "spec": spec, "avals": (TensorType((), "f32"),)})


def _is_illegal(body: Graph) -> None:
    body.inputs[0].attrs["avals"] = (f64(3, N),)
    body.outputs[0].attrs["prim"] = "add_"


@pytest.mark.parametrize(("breaks", "reason"), [(_writes, "effects"), (_draws, "effects"), (_is_illegal, "primitive")])
def test_a_body_is_legal_and_without_effects(breaks: Any, reason: str) -> None:
    graph = GATED.graph()
    scan = graph.outputs[0].args[0]
    body = scan.params["body"].graph
    breaks(body)
    scan.attrs["params"] = scan.params | {"body": Body(body)}
    with pytest.raises(InvalidGraphError, match=reason):
        verify(graph)


# ---------------------------------------------------------------------------------------------- text
@pytest.mark.parametrize("loop", loops, ids=name)
def test_text_and_documents_come_back(loop: Loop) -> None:
    graph = loop.graph(True)
    back = verify(parse(show(graph)))
    assert show(back) == show(graph)
    stored = json.loads(json.dumps(document(graph), allow_nan=False))
    assert key(verify(graph_from(stored))) == key(graph)


def test_the_body_stands_before_the_nodes() -> None:
    assert show(loops[1].graph()) == (
        'graph "carries_alone"\n'
        "symbols N: positive, T: nonnegative\n"
        '  body @0 "step"\n'
        '    %0 = input(name="h0") : f64[3, N]\n'
        '    %1 = input(name="x0") : f64[3, N]\n'
        "    %2 = mul(%0, %1) : f64[3, N]\n"
        "    return %2\n"
        '  %0 = input(name="x0") : f64[3, N]\n'
        '  %1 = input(name="x1") : f64[T, 3, N]\n'
        "  %2 = scan(%0, %1, body=@0, carries=1, length=T, reverse=False, steps=1) : f64[3, N]\n"
        "  return %2\n"
    )


def test_equal_bodies_are_one() -> None:
    one, other = Body(GATED.body()), Body(GATED.body())
    assert one == other and hash(one) == hash(other) and one != Body(loops[1].body())
    graph = Graph("twice")
    inputs = [graph.input(t, f"x{i}") for i, t in enumerate(GATED.types)]
    with building(graph):
        assert GATED.emit(inputs) == GATED.emit(inputs)
        assert GATED.emit(inputs) != GATED.emit(inputs, reverse=True)
        graph.returning([emit("pick", GATED.emit(inputs, r), index=0) for r in (False, True)])
    assert show(graph).count("body @") == 1


def nested() -> Graph:
    """A loop within each step of a loop."""
    body = Graph("outer")
    h, x = body.input(f64(N), "h"), body.input(f64(3, N), "x")
    inner = Graph("inner")
    a, b = inner.input(f64(N), "a"), inner.input(f64(N), "b")
    with building(inner):
        inner.returning([emit("add", emit("mul", a, b), b)])
    with building(body):
        body.returning([emit("scan", h, x, body=Body(inner), carries=1, steps=1, length=3, reverse=False)])
    graph = Graph("nested")
    start, xs = graph.input(f64(N), "start"), graph.input(f64(T, 3, N), "xs")
    with building(graph):
        return graph.returning(
            [emit("scan", start, xs, body=Body(body), carries=1, steps=1, length=T, reverse=False)]
        )


def test_a_loop_within_a_loop() -> None:
    graph = verify(nested())
    rng = np.random.default_rng(0)
    start, xs = rng.normal(size=4), rng.normal(size=(5, 3, 4))
    h = start
    for x in xs.reshape(15, 4):
        h = h * x + x
    for same in (graph, parse(show(graph)), graph_from(document(graph))):
        np.testing.assert_allclose(evaluate(same, [start, xs], {T: 5, N: 4})[0], h)


def _deep(depth: int) -> Graph:
    body = Graph("step")
    with building(body):
        body.returning([body.input(f64(), "h")])
    for _ in range(depth):
        outer = Graph("step")
        with building(outer):
            h = outer.input(f64(), "h")
            outer.returning([emit("scan", h, body=Body(body), carries=1, steps=0, length=1, reverse=False)])
        body = outer
    return body


def test_a_file_nests_loops_only_so_deep() -> None:
    assert key(graph_from(document(_deep(4)))) == key(_deep(4))
    with pytest.raises(ParseError, match="loops within loops"):
        graph_from(document(_deep(5)))


def test_a_file_has_no_body_with_effects() -> None:
    graph = GATED.graph()
    stored = document(graph)
    (scan,) = (n for n in stored["nodes"] if n["prim"] == "scan")
    scan["parameters"]["body"]["body"]["mutations"] = [[0, 3]]
    with pytest.raises(ParseError):
        graph_from(stored)
