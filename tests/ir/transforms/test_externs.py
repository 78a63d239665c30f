"""Nodes that are no primitives: whose rules are asked, effects, random numbers, and what is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from transform_samples import SIZES, B, M, N, Rules, call, f64, i64, run, split_op

from fusegrad.ir import FusegradError, Graph, Value, building, emit, provenance, show, verify
from fusegrad.ir.graph import Origin
from fusegrad.ir.transforms.batch import batch
from fusegrad.ir.transforms.extern import NoRuleError
from fusegrad.ir.transforms.linearize import linearize
from fusegrad.ir.transforms.transpose import transpose, vjp

SOME = SIZES[0]


def graph_of(build, *types) -> Graph:
    graph = Graph("g")
    xs = [graph.input(t, f"x{i}") for i, t in enumerate(types or (f64(M, N), f64(M, N)))]
    with building(graph):
        found = build(*xs)
    return graph.returning(found if isinstance(found, list) else [found])


def noise(x: Value) -> Value:
    return emit("aten_effect", x, op="aten.noise.default", spec=(), avals=(x.aval,))


def prims(graph: Graph) -> list[str]:
    return [v.prim for v in graph.order()]


# ---------------------------------------------------------------------------------------------- nested Functions
def test_a_nested_function_keeps_its_own_gradient() -> None:
    rules = Rules()
    graph = graph_of(lambda x, y: emit("sin", call("halved_product", x, y)))
    x, y, c = np.random.default_rng(0).normal(size=(3, 3, 4))
    pulled = verify(vjp(graph, (0, 1), rules=rules))
    back = run(pulled, [x, y, c], SOME)
    np.testing.assert_allclose(back[0], 3.5 * y * np.cos(x * y / 2) * c)
    assert pulled.outputs[1] is None
    assert rules.asked == [("vjp", "halved_product", (0, 1), (0,))]


def test_its_rules_survive_a_second_derivative() -> None:
    """The derivative of 3.5*y*c by y is 3.5*c, whatever the Function computes."""
    first = vjp(graph_of(lambda x, y: call("halved_product", x, y)), (0,), rules=Rules())
    second = verify(linearize(first, (1,), Rules()))
    x, y, c, t = np.random.default_rng(0).normal(size=(4, 3, 4))
    np.testing.assert_allclose(run(second, [x, y, c, t], SOME)[0], 3.5 * t * c)
    assert "call" not in prims(second)


def test_a_call_that_a_derivative_needs_is_made_again_and_no_other() -> None:
    needed = vjp(graph_of(lambda x, y: emit("exp", call("halved_product", x, y))), (0,), rules=Rules())
    assert prims(needed).count("call") == 1
    spare = vjp(graph_of(lambda x, y: call("halved_product", x, y)), (0,), rules=Rules())
    assert prims(spare).count("call") == 0


def test_only_the_cotangents_that_there_are_reach_a_rule() -> None:
    rules = Rules()
    vjp(graph_of(lambda x: split_op(x)[1], f64(M, N)), (0,), rules=rules)
    assert rules.asked == [("vjp", "aten.two_results.default", (0,), (1,))]


def test_what_is_not_mapped_is_called_once() -> None:
    rules = Rules()
    graph = graph_of(lambda x, y: [call("halved_product", x, x), call("halved_product", x, y)])
    over, mapped = batch(graph, (False, True), B, rules)
    assert mapped == (False, True)
    assert rules.asked == [("batch", "halved_product", (False, True), "error")]
    assert over.outputs[0].shape == (M, N)


# ---------------------------------------------------------------------------------------------- nobody's rules
def test_without_rules_each_transform_names_the_operation() -> None:
    def build(x: Value) -> Value:
        with provenance(Origin(op="aten.sort.default", where="mine.py:4", line="y = x.sort()")):
            return emit("aten", x, op="aten.sort.default", spec=(), avals=(x.aval,))

    graph = graph_of(build, f64(M))
    for derive in (lambda: linearize(graph, (0,)), lambda: vjp(graph, (0,)), lambda: batch(graph, (True,), B)):
        with pytest.raises(NoRuleError, match="`sort` is not a primitive") as raised:
            derive()
        assert "mine.py:4: y = x.sort()" in str(raised.value)
    with pytest.raises(FusegradError, match="`sort` is not known to be linear"):
        transpose(graph, (0,))


# ---------------------------------------------------------------------------------------------- random numbers
def test_random_numbers_are_drawn_with_the_primal_or_not_at_all() -> None:
    graph = graph_of(lambda x: emit("mul", x, noise(x)), f64(M, N))
    both = verify(linearize(graph, (0,), Silent(), with_primal=True))
    x, t = np.random.default_rng(0).normal(size=(2, 3, 4))
    y, y_dot = run(both, [x, t], SOME)
    np.testing.assert_allclose(y_dot * x, y * t)
    for derive in (lambda: linearize(graph, (0,), Silent()), lambda: vjp(graph, (0,), rules=Silent())):
        with pytest.raises(NoRuleError, match="`noise` draws random numbers"):
            derive()


def test_tangents_that_do_not_need_the_random_numbers_do_not_draw_them() -> None:
    graph = graph_of(lambda x: emit("add", emit("sin", x), noise(x)), f64(M, N))
    assert "aten_effect" in prims(linearize(graph, (0,), Silent(), with_primal=True))
    assert "aten_effect" not in prims(linearize(graph, (0,), Silent()))
    assert "aten_effect" not in prims(vjp(graph, (0,), rules=Silent()))


class Silent(Rules):
    """Noise has no derivative."""

    def jvp(self, node: Value, wrt: tuple[int, ...]) -> Graph:
        rule = Graph("rule")
        for t in [*(a.aval for a in node.args), *node.avals, *(node.args[i].aval for i in wrt)]:
            rule.input(t, "x")
        return rule.returning([None] * len(node.avals))

    def vjp(self, node: Value, wrt: tuple[int, ...], given: tuple[int, ...]) -> Graph:
        rule = Graph("rule")
        for t in [*(a.aval for a in node.args), *node.avals, *(node.avals[i] for i in given)]:
            rule.input(t, "x")
        return rule.returning([None] * len(wrt))


def test_randomness_says_what_a_draw_beside_the_batch_does() -> None:
    graph = graph_of(lambda x, y: [noise(y), emit("sin", x)])
    with pytest.raises(NoRuleError, match="randomness is 'error'"):
        batch(graph, (True, False), B, Rules())
    assert batch(graph, (True, False), B, Rules(), randomness="same").mapped == (False, True)
    over, mapped = batch(graph, (True, False), B, Rules(), randomness="different")
    assert mapped == (True, True) and verify(over).outputs[0].shape == (B, M, N)


def test_a_draw_of_what_is_mapped_asks_the_rules() -> None:
    rules = Rules()
    batch(graph_of(noise, f64(M, N)), (True,), B, rules, randomness="same")
    assert rules.asked == [("batch", "aten.noise.default", (True,), "same")]


def test_the_random_primitive_is_a_function_of_its_seed() -> None:
    def drawn(seed: Value, x: Value) -> Value:
        return emit("mul", x, emit("random", seed, seed, shape=x.shape, dtype=x.dtype, kind="uniform"))

    graph = graph_of(drawn, i64(), f64(M, N))
    over, _ = batch(graph, (False, True), 2)
    xs = np.random.default_rng(0).normal(size=(2, 3, 4))
    each = [run(graph, [np.int64(5), x], SOME)[0] for x in xs]
    np.testing.assert_allclose(run(over, [np.int64(5), xs], SOME)[0], each)
    np.testing.assert_allclose(run(linearize(graph, (1,)), [np.int64(5), *xs], SOME)[0] * xs[0], each[0] * xs[1])
    with pytest.raises(NoRuleError, match="differs over the batch"):
        batch(graph, (True, True), B)


# ---------------------------------------------------------------------------------------------- writes and names
def written(x: Value, y: Value) -> Value:
    return emit("mul", x, y)


def test_what_is_written_into_an_input_has_its_tangent_written() -> None:
    graph = graph_of(written)
    graph.mutations = {0: graph.outputs[0]}
    moved = verify(linearize(graph, (0, 1), with_primal=True))
    assert moved.mutations == {0: moved.outputs[0], 2: moved.outputs[1]}
    with pytest.raises(NoRuleError, match="written into `x0`, which has no tangent"):
        linearize(graph, (1,), with_primal=True)
    with pytest.raises(FusegradError, match="writes into its inputs"):
        linearize(graph, (0, 1))


def test_what_is_written_into_an_input_needs_room_for_the_batch() -> None:
    graph = graph_of(written)
    graph.mutations = {0: graph.outputs[0]}
    assert verify(batch(graph, (True, False), B).graph).mutations.keys() == {0}
    with pytest.raises(NoRuleError, match="written into `x0`, which is not mapped"):
        batch(graph, (False, True), B)


def test_a_graph_that_writes_has_no_transpose() -> None:
    graph = graph_of(lambda x, y: emit("neg", x))
    graph.mutations = {1: graph.outputs[0]}
    with pytest.raises(FusegradError, match="writes into its inputs"):
        transpose(graph, (0,))


def test_what_is_derived_has_the_lines_and_names_of_the_user() -> None:
    def build(x: Value) -> Value:
        with provenance(Origin(name="y", op="aten.sin.default", where="mine.py:3", line="y = x.sin()")):
            return emit("sin", x)

    graph = graph_of(build, f64(M, N))
    for derived in (linearize(graph, (0,)), vjp(graph, (0,)), batch(graph, (True,), B).graph):
        assert show(derived, origins=True).count("# mine.py:3 y = x.sin()") == len(derived.order())
    moved = linearize(graph, (0,))
    assert [v.params["name"] for v in moved.inputs] == ["x0", "x0_dot"] and moved.outputs[0].origin.name == "y_dot"
    assert [v.params["name"] for v in vjp(graph, (0,)).inputs] == ["x0", "y_bar"]


def test_a_complex_kink_has_no_rule() -> None:
    with pytest.raises(NoRuleError, match="`abs` of complex numbers"):
        linearize(graph_of(lambda x: emit("abs", x), f64(M).with_dtype("c128")), (0,))
