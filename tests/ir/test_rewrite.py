"""The rewriter: patterns, rules, what a rebuilt graph keeps, and what extraction gives."""

import pytest

from fusegrad.ir import Graph, InvalidGraphError, TensorType, Value, building, emit, provenance, show, verify
from fusegrad.ir.graph import Origin
from fusegrad.ir.prims import Arg
from fusegrad.ir.rewrite import (
    Number,
    Op,
    X,
    Y,
    copy_into,
    extract,
    join_rules,
    make,
    nodes_between,
    rebuild,
    rules,
    unique_names,
)

F32 = TensorType((4,), "f32")


def one_input(strides: tuple[int, ...] | None = None) -> tuple[Graph, Value]:
    graph = Graph("g")
    return graph, graph.input(F32, "x", strides)


def test_patterns_bind_in_order_and_repeat() -> None:
    table = rules(
        (Op("sub", (X, X)), lambda x: make("abs", x)),
        (Op("sub", (X, Y)), lambda x, y: make("add", y, x)),
    )
    graph, x = one_input()
    with building(graph):
        y = emit("neg", x)
        graph.returning([emit("sub", x, x), emit("sub", x, y)])
    first, second = rebuild(graph, table).outputs
    assert (first.prim, [a.prim for a in second.args]) == ("abs", ["neg", "input"])


def test_a_rule_sees_rewritten_operands_and_builds_in_normal_form() -> None:
    """abs -> neg(neg), and neg(neg(x)) -> x: the second rule applies to what the first one builds."""
    table = join_rules(
        rules((Op("neg", (Op("neg", (X,)),)), lambda x: x)),
        rules((Op("abs", (X,)), lambda x: make("neg", make("neg", x)))),
    )
    graph, x = one_input()
    with building(graph):
        graph.returning([emit("abs", emit("abs", x))])
    assert rebuild(graph, table).outputs[0].prim == "input"


def test_earlier_tables_win_and_none_means_does_not_apply() -> None:
    never = {"abs": (lambda v: None,)}
    table = join_rules(never, rules((Op("abs", (X,)), lambda x: x)), rules((Op("abs", (X,)), lambda x: make("neg", x))))
    graph, x = one_input()
    with building(graph):
        graph.returning([emit("abs", x)])
    assert rebuild(graph, table).outputs[0].prim == "input"


@pytest.mark.parametrize(
    ("number", "found", "matches"),
    [(1, 1.0, True), (1, True, True), (0, 0.0, True), (0, -0.0, False), (-0.0, -0.0, True), (1, float("nan"), False)],
)
def test_numbers_match_by_value_and_sign(number: float, found: float, matches: bool) -> None:
    graph = Graph("g")
    with building(graph):
        value = emit("full", value=found, shape=(), dtype="f32")
    assert Number(number).match(value, {}) is matches


def test_a_rebuilt_graph_keeps_everything_but_the_dead() -> None:
    graph, x = one_input(strides=(2,))
    with building(graph):
        with provenance(Origin("y", "aten.neg", "f.py:3", "y = -x")):
            y = emit("neg", x)
        emit("aten_effect", x, op="aten.first", spec=((Arg(0),),), avals=())
        emit("aten_effect", y, op="aten.second", spec=((Arg(0),),), avals=())
        emit("exp", x)
    graph.returning([y, None, x], [(3,), None, (2,)])
    graph.mutations[0] = y
    again = verify(rebuild(graph, {}))
    assert show(again) == show(graph)
    assert again.outputs[0].origin == y.origin
    assert [v.params["op"] for v in again if v.prim == "aten_effect"] == ["aten.first", "aten.second"]
    assert not [v for v in again if v.prim == "exp"]


def test_single_nodes_can_be_replaced() -> None:
    graph, x = one_input()
    with building(graph):
        y = emit("neg", x)
        graph.returning([emit("exp", y)])
    again = rebuild(graph, {}, {y.id: lambda env: make("abs", env[x.id])})
    assert again.outputs[0].args[0].prim == "abs"


def test_copy_into_continues_from_what_is_there() -> None:
    graph, x = one_input()
    with building(graph):
        y = emit("neg", x)
        z = emit("exp", y)
    other = Graph("other")
    given = other.input(F32, "y")
    env = {y.id: given}
    with building(other):
        copy_into(nodes_between([z], env), env)
    assert env[z.id].args == (given,)


def test_extraction_stands_alone() -> None:
    graph, x = one_input(strides=(2,))
    with building(graph):
        with provenance(Origin("h")):
            h = emit("neg", x)
        z = emit("add", emit("exp", h), x)
    part = verify(extract([z, None], [x, h], name="part", strides=[(5,), None]))
    assert show(part) == (
        'graph "part"\n'
        '  %0 = input(name="x", strides=(2,)) : f32[4]\n'
        '  %1 = input(name="h") : f32[4]\n'
        "  %2 = exp(%1) : f32[4]\n"
        "  %3 = add(%2, %0) : f32[4]\n"
        "  return %3 strides (5,), None\n"
    )


def test_extraction_names_the_input_that_is_missing() -> None:
    graph, x = one_input()
    with building(graph):
        y = emit("neg", x)
    with pytest.raises(InvalidGraphError, match="'x' is needed"):
        extract([y], [], name="part")


def test_names_are_identifiers_and_unique() -> None:
    graph, x = one_input()
    with building(graph):
        values = [x]
        for name, prim in (("x", "neg"), ("x", "exp"), ("2*x!", "sin"), (None, "cos")):
            with provenance(Origin(name)):
                values.append(emit(prim, x))
    assert unique_names(values) == ["x", "x_2", "x_3", "_2_x_", f"cos_{values[-1].id}"]
