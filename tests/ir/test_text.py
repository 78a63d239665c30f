"""The text of a graph: what it looks like, that it comes back the same, and that it evaluates nothing."""

import re
from pathlib import Path

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from fusegrad.ir import Graph, TensorType, building, emit, parse, provenance, show, verify
from fusegrad.ir.errors import ParseError
from fusegrad.ir.graph import Origin
from fusegrad.ir.prims import Arg
from fusegrad.ir.text.text import Opaque, key

s0 = sympy.Symbol("s0", integer=True, positive=True)
s1 = sympy.Symbol("s1", integer=True)


def scale() -> Graph:
    graph = Graph("scale")
    x = graph.input(TensorType((s0, 4096), "bf16"), "x")
    with building(graph), provenance(Origin("y", "aten.mul", "scale.py:12", "y = x * 2")):
        two = emit("full", value=2.0, shape=(s0, 4096), dtype="bf16")
        return graph.returning([emit("mul", x, two), None])


def test_looks_like_this() -> None:
    assert show(scale(), origins=True) == (
        'graph "scale"\n'
        "symbols s0: positive\n"
        '  %0 = input(name="x") : bf16[s0, 4096]\n'
        '  %1 = full(dtype="bf16", shape=(s0, 4096), value=2.0) : bf16[s0, 4096]    # scale.py:12 y = x * 2\n'
        "  %2 = mul(%0, %1) : bf16[s0, 4096]    # scale.py:12 y = x * 2\n"
        "  return %2, None\n"
    ).replace('"x") : bf16[s0, 4096]\n', '"x") : bf16[s0, 4096]    # x\n')


def test_comments_are_not_part_of_the_graph() -> None:
    assert show(parse(show(scale(), origins=True))) == show(scale())
    assert key(parse(show(scale(), origins=True))) == key(scale())


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_round_trip_of_random_graphs(grow, seed: int) -> None:
    text = show(grow(seed))
    assert show(verify(parse(text))) == text


NUMBERS = [0, 1, -1, True, False, 0.0, -0.0, 1e-30, 1e22, 0.1, -2.5, float("inf"), -float("inf"), 3 + 4j, -0j]


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_numbers_come_back_exactly(number: complex) -> None:
    (value,) = parse(show(_full(number))).outputs
    assert repr(value.params["value"]) == repr(number)


def test_nan_comes_back() -> None:
    (value,) = parse(show(_full(float("nan")))).outputs
    assert value.params["value"] != value.params["value"]


def _full(number: object) -> Graph:
    graph = Graph("number")
    with building(graph):
        return graph.returning([emit("full", value=number, shape=(), dtype="c64")])


SIZES = [
    s0 * 2, s0 + 1, -s0 - 1, s0**2, 1 / s0, s0 / 3, sympy.Rational(1, 3) * s0 * (s0 + 1), (s0 + 1) * (s1 - 2) * 4,
    1 - (s0 + 1) * (s1 + 1), sympy.floor(s0 / 2), sympy.Mod(s0, 3), sympy.Max(s0, s1, 7), sympy.Min(4, s0),
    sympy.ceiling(s0 / 8) * 8, 0.25 * s0, sympy.sqrt(s0), -(s0**2), sympy.floor((s0 + s1) / 2) ** 2,
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes_come_back_exactly(size: sympy.Expr) -> None:
    (value,) = parse(show(_full(size))).outputs
    assert value.params["value"] == size


def test_symbols_keep_their_assumptions() -> None:
    symbols = [sympy.Symbol(n, integer=True, **{k: True}) for n, k in (("a", "positive"), ("b", "nonnegative"))]
    graph = _full(sympy.Add(*symbols, sympy.Symbol("c", integer=True), sympy.Symbol("d", real=True), sympy.Symbol("e")))
    assert "symbols a: positive, b: nonnegative, c: integer, d: real, e: any\n" in show(graph)
    (value,) = parse(show(graph)).outputs
    assert value.params["value"] == graph.outputs[0].params["value"]


def test_functions_of_torch_become_plain() -> None:
    class FloorDiv(sympy.Function):
        """Stands for the class of that name in torch.utils._sympy."""

    FloorDiv.__module__ = "torch.utils._sympy.functions"
    assert "value=floor(s0/2)" in show(_full(FloorDiv(s0, 2)))
    assert "value=floor(s0/2) + 1" in show(_full(FloorDiv(s0, 2) + 1))


def test_strides_mutations_and_several_results() -> None:
    graph = Graph('odd "name"')
    x = graph.input(TensorType((s0, 8), "f32"), "x", (1, s0))
    scalar = graph.input(TensorType((), "i64"), "seed")
    spec = ((Arg(0), (1, -2.5, None, True), "a#b\\", len), (("dim", -1),))
    with building(graph):
        avals = (TensorType((s0, 8), "f32"), TensorType((s0, 8), "i64"))
        sort = emit("aten", x, op="aten.sort.default", spec=spec, avals=avals)
        first = emit("pick", sort, index=1)
        noise = emit("random", scalar, scalar, shape=(s0,), dtype="f32", kind="uniform")
        nothing = emit("call", noise, target=Graph, spec=(), avals=())
    graph.returning([x, first, noise, None], [(1, s0), (8, 1), (2,), None])
    graph.mutations[0] = x
    back = verify(parse(show(graph)))
    assert show(back) == show(graph)
    assert back.inputs[0].params["strides"] == (1, s0)
    assert back.output_strides == [(1, s0), (8, 1), (2,), None]
    assert back.mutations == {0: back.inputs[0]}
    assert [v.params["target"] for v in back if v.prim == "call"] == [Opaque("Graph")]
    assert nothing.avals == () and sort.avals == avals


def test_dead_nodes_are_left_out_and_effects_are_not() -> None:
    graph = scale()
    with building(graph):
        emit("neg", graph.inputs[0])
        emit("aten_effect", graph.inputs[0], op="aten._assert_async.default", spec=((Arg(0),), ()), avals=())
    assert "neg" not in show(graph)
    assert "aten_effect" in show(graph)


def test_key_tells_graphs_apart() -> None:
    assert key(_full(0.0)) != key(_full(-0.0)) != key(_full(0))
    assert len(key(scale())) == 64


WRONG = [
    ("= mul(%0, %1)", "= mul(%0, %7)", 5),
    ("= mul(%0, %1)", "= mal(%0, %1)", 5),
    ("= mul(%0, %1)", "= mul(%0, %1, axes=(0,))", 5),
    (": bf16[s0, 4096]\n  return", ": bf16[s0, 4095]\n  return", 5),
    ("return %2", "return %2 %0", 6),
    ("value=2.0", "value=__import__(2)(", 4),
    ("value=2.0", "value=zz", 4),
    ("symbols s0: positive", "symbols s0: prime", 2),
    ('graph "scale"', "grph", 1),
    ("  return %2, None\n", "", 5),
    ("%2 = mul", "%1 = mul", 5),
]


@pytest.mark.parametrize(("old", "new", "line"), WRONG)
def test_a_mistake_is_named_by_its_line(old: str, new: str, line: int) -> None:
    text = show(scale())
    assert old in text
    with pytest.raises(ParseError, match=re.escape(f"line {line}:")):
        parse(text.replace(old, new))


ATTACKS = ['f("{}")', '"{}" + 1', '1 - "{}"', '-"{}"', '2 * "{}"', '1 / "{}"', '2 ** "{}"', '"{}" ** 2', 'Max("{}", 1)']


@pytest.mark.parametrize("attack", ATTACKS)
def test_strings_never_reach_the_evaluator_of_sympy(attack: str, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    code = attack.format(f"__import__('pathlib').Path('{touched}').touch()")
    with pytest.raises(ParseError, match="not a number"):
        parse(show(scale()).replace("value=2.0", f"value={code}"))
    assert not touched.exists()
