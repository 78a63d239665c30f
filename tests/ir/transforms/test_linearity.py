"""What is linear, what is affine or worse, and that a refusal names the user's operation and its line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transform_samples import M, N, Rules, call, constant, f64, split_op

from fusegrad.ir import Graph, Value, building, emit, provenance
from fusegrad.ir.graph import Origin
from fusegrad.ir.transforms.linearity import NonLinearError, why_not_linear
from fusegrad.ir.transforms.transpose import transpose

Build = Callable[[Value, Value], "Value | list[Value]"]


def graph_of(build: Build, dtype: str = "f64") -> Graph:
    """A backward of a gradient g and a residual x."""
    graph = Graph("Clip_backward")
    g, x = (graph.input(f64(M, N).with_dtype(dtype), name) for name in "gx")
    with building(graph):
        found = build(g, x)
    return graph.returning(found if isinstance(found, list) else [found])


def user(op: str, line: int) -> Origin:
    return Origin(op=op, where=f"clip.py:{line}", line=f"g = {op}")


def clamp(g: Value, x: Value) -> Value:
    with provenance(user("aten.clamp.default", 7)):
        low = constant(-1.0, g)
        return emit("where", emit("lt", g, low), low, g)


def norm_clipping(g: Value, x: Value) -> Value:
    with provenance(user("aten.linalg_vector_norm.default", 3)):
        norm = emit("sqrt", emit("sum", emit("mul", g, g), axes=(0, 1)))
    with provenance(user("aten.div.Tensor", 4)):
        return emit("div", g, emit("broadcast", norm, shape=g.shape, axes=()))


def sort(g: Value, x: Value) -> Value:
    with provenance(user("aten.sort.default", 9)):
        node = emit("aten", g, op="aten.sort.default", spec=(), avals=(g.aval, g.aval.with_dtype("i64")))
        return emit("pick", node, index=0)


REFUSED: list[tuple[str, Build, str, str]] = [
    ("affine", lambda g, x: emit("add", g, x), "affine", "`add` adds a term"),
    ("affine in one branch", lambda g, x: emit("where", emit("lt", x, constant(0.0, x)), g, constant(1.0, g)), "affine",
     "`where` adds a term"),
    ("beside a constant", lambda g, x: emit("cat", g, x, axis=0), "affine", "`cat` adds a term"),
    ("constant", lambda g, x: [g, emit("sin", x)], "affine", "`sin` gives a result that does not depend"),
    ("square", lambda g, x: emit("mul", g, g), "non-linear", "`mul` multiplies it by itself"),
    ("divides by it", lambda g, x: emit("div", x, g), "non-linear", "`div` is not linear"),
    ("clamp", clamp, "non-linear", "`clamp` is not linear"),
    ("sign", lambda g, x: emit("mul", emit("sign", g), x), "non-linear", "`sign` is not linear"),
    ("abs", lambda g, x: emit("abs", g), "non-linear", "`abs` is not linear"),
    ("its integers", lambda g, x: emit("cast", emit("cast", g, dtype="i64"), dtype="f64"), "non-linear", "`cast`"),
    ("its sign as a mask", lambda g, x: emit("where", emit("ge", g, constant(0.0, g)), x, constant(0.0, x)),
     "non-linear", "`ge` is not linear"),
    ("norm clipping", norm_clipping, "non-linear", "`linalg_vector_norm` multiplies it by itself"),
    ("sort", sort, "unknown", "`sort` is not known to be linear"),
    ("a nested Function", lambda g, x: call("inner", g, x), "unknown", "`inner` is not known"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "kind", "why"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_what_is_not_linear_is_refused(build: Build, kind: str, why: str) -> None:
    graph = graph_of(build)
    refusal = why_not_linear(graph, [0])
    assert refusal is not None and refusal.kind == kind and why in str(refusal)
    with pytest.raises(NonLinearError, match="Clip_backward is not linear in `g`") as raised:
        transpose(graph, [0])
    assert raised.value.refusal == refusal and why in str(raised.value)


def test_the_users_operation_and_line_are_named() -> None:
    refusal = why_not_linear(graph_of(clamp), [0])
    assert refusal is not None and (refusal.op, refusal.where) == ("clamp", "clip.py:7: g = aten.clamp.default")
    with pytest.raises(NonLinearError, match=r"at:   clip.py:3: g = aten.linalg_vector_norm"):
        transpose(graph_of(norm_clipping), [0])


PASSES: list[tuple[str, Build]] = [
    ("not read", lambda g, x: [emit("full", value=0.0, shape=(M,), dtype="f64")]),
    ("integer result beside", lambda g, x: [g, emit("argmax", x, axis=0)]),
    ("non-linear but unused", lambda g, x: [emit("sign", g), g][1]),
    ("zeros by construction", lambda g, x: emit("add", g, emit("reshape", emit("pad", constant(0.0, x),
     lo=(0, 0), hi=(0, 0), inner=(0, 0)), shape=x.shape))),
    ("plus nothing", lambda g, x: emit("add", g, emit("mul", x, constant(0.0, x)))),
    ("zeros over something", lambda g, x: emit("add", g, emit("div", constant(0.0, x), emit("exp", x)))),
    ("residuals do what they like", lambda g, x: emit("mul", emit("exp", emit("mul", x, x)), g)),
    ("its shape", lambda g, x: emit("mul", g, emit("full", value=N, shape=g.shape, dtype="f64"))),
    ("minus itself", lambda g, x: emit("sub", g, emit("mul", x, g))),
]  # fmt: skip


@pytest.mark.parametrize("build", [p[1] for p in PASSES], ids=[p[0] for p in PASSES])
def test_what_is_linear_passes(build: Build) -> None:
    assert why_not_linear(graph_of(build), [0]) is None


def test_low_floats_and_complex_numbers_are_no_obstacle() -> None:
    for dtype in ("bf16", "c64"):
        assert why_not_linear(graph_of(lambda g, x: emit("mul", g, x), dtype), [0]) is None


def test_together_is_not_each() -> None:
    product = graph_of(lambda g, x: emit("mul", g, x))
    assert why_not_linear(product, [0]) is None and why_not_linear(product, [1]) is None
    assert why_not_linear(product, [0, 1]) is not None
    total = graph_of(lambda g, x: emit("add", g, x))
    assert why_not_linear(total, [0, 1]) is None


def test_the_rules_speak_for_what_is_not_a_primitive() -> None:
    graph = graph_of(lambda g, x: split_op(g))
    assert why_not_linear(graph, [0]).kind == "unknown"
    assert why_not_linear(graph, [0], Rules()) is None
    cumprod = lambda g, x: emit("aten", g, op="aten.cumprod.default", spec=(), avals=(g.aval,))  # noqa: E731
    assert why_not_linear(graph_of(cumprod), [0], Rules()).kind == "non-linear"
