"""The numpy evaluator agrees with the reference executor, which calls torch, on the same graphs in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sympy
import torch

from fusegrad.ir import Graph, TensorType, Value, building, emit
from fusegrad.ir.errors import InvalidGraphError
from fusegrad.ir.evaluate import evaluate, philox
from fusegrad.ir.loops.body import Body
from fusegrad.ir.prims import PRIMS
from fusegrad.runtime.execution.aten.reference import run

n = sympy.Symbol("n", integer=True, positive=True)
SIZES = {n: 4}


def graph_of(build: Any, *types: TensorType) -> Graph:
    graph = Graph("case")
    inputs = [graph.input(t, f"x{i}") for i, t in enumerate(types)]
    with building(graph):
        return graph.returning([build(*inputs)])


def f64(*shape: Any) -> TensorType:
    return TensorType(shape, "f64")


def b1(*shape: Any) -> TensorType:
    return TensorType(shape, "b1")


def i64(*shape: Any) -> TensorType:
    return TensorType(shape, "i64")


def sample(aval: TensorType, positive: bool) -> torch.Tensor:
    shape = [int(sympy.sympify(d).subs(SIZES)) for d in aval.shape]
    generator = torch.Generator().manual_seed(len(shape))
    if aval.dtype == "i64":
        return torch.randint(0, 3, shape, generator=generator)
    numbers = torch.rand(shape, generator=generator, dtype=torch.float64) * (0.8 if positive else 4) - (
        0 if positive else 2
    )
    return numbers > 0 if aval.dtype == "b1" else numbers + (0.1 if positive else 0)


def e(prim: str, **params: Any) -> Any:
    return lambda *xs: emit(prim, *xs, **params)


def _scan(h: Value, x: Value, results: int, reverse: bool = False) -> Value:
    """The last result of a loop over the rows of x, by its number."""
    body = Graph("step")
    before, row = body.input(h.aval, "before"), body.input(h.aval, "row")
    with building(body):
        after = emit("add", emit("sin", before), row)
        body.returning([after, emit("mul", before, row)][:results])
    params = {"carries": 1, "steps": 1, "length": x.shape[0], "reverse": reverse}
    node = emit("scan", h, x, body=Body(body), **params)
    return node if results == 1 else emit("pick", node, index=1)


FLOAT_UNARY = (
    "neg abs sign exp exp2 expm1 sin cos tan atan sinh cosh tanh asinh sigmoid erf floor ceil round trunc reciprocal "
    "isnan isinf signbit"
).split()
POSITIVE_UNARY = "log log2 log10 log1p sqrt rsqrt asin acos atanh lgamma".split()
FLOAT_BINARY = "add sub mul div max min rem fmod floordiv atan2 hypot eq ne lt le gt ge".split()
INT_BINARY = "add sub mul max min and or xor shl shr eq lt".split()

CASES: list[tuple[str, Any, list[TensorType]]] = [
    *((p, e(p), [f64(n, 5)]) for p in FLOAT_UNARY),
    *((f"positive {p}", e(p), [f64(n, 5)]) for p in POSITIVE_UNARY),
    ("positive pow", e("pow"), [f64(n, 5), f64(n, 5)]),
    *((p, e(p), [f64(n, 5), f64(n, 5)]) for p in FLOAT_BINARY),
    *((f"{p} i64", e(p), [i64(n, 5), i64(n, 5)]) for p in INT_BINARY),
    *((f"{p} b1", e(p), [b1(n), b1(n)]) for p in ("and", "or", "xor")),
    ("not b1", e("not"), [b1(n)]),
    ("not i64", e("not"), [i64(n)]),
    ("where", e("where"), [b1(n, 5), f64(n, 5), f64(n, 5)]),
    ("cast to i64", e("cast", dtype="i64"), [f64(n, 5)]),
    ("cast to b1", e("cast", dtype="b1"), [i64(n, 5)]),
    ("full", e("full", value=n / 2 + 1, shape=(n, 2), dtype="f64"), []),
    ("iota", e("iota", size=2 * n - 1, dtype="i64"), []),
    ("check_index", lambda i: emit("check_index", i, emit("full", value=n, shape=i.shape, dtype="i64")), [i64(n, 5)]),
    ("broadcast", e("broadcast", shape=(3, n, 7, 5), axes=(1, 3)), [f64(n, 5)]),
    ("reshape", e("reshape", shape=(2, n / 2, 5)), [f64(n, 5)]),
    ("permute", e("permute", perm=(2, 0, 1)), [f64(n, 5, 3)]),
    ("slice", e("slice", start=(1, 0), stop=(n, 5), step=(1, 2)), [f64(n, 5)]),
    ("pad", e("pad", lo=(1, 0), hi=(0, n), inner=(0, 2)), [f64(n, 5)]),
    ("flip", e("flip", axes=(0,)), [f64(n, 5)]),
    ("cat", e("cat", axis=1), [f64(n, 5), f64(n, 2)]),
    ("sum", e("sum", axes=(0, 2)), [f64(n, 5, 3)]),
    ("prod", e("prod", axes=(1,)), [f64(n, 5)]),
    ("amax", e("amax", axes=(0,)), [f64(n, 5)]),
    ("amin", e("amin", axes=(0, 1)), [f64(n, 5)]),
    ("argmax", e("argmax", axis=1), [f64(n, 5)]),
    ("argmin", e("argmin", axis=0), [f64(n, 5)]),
    ("scan", lambda h, x: _scan(h, x, 1), [f64(5), f64(n, 5)]),
    ("scan of two results", lambda h, x: _scan(h, x, 2), [f64(5), f64(n, 5)]),
    ("scan reverse", lambda h, x: _scan(h, x, 2, True), [f64(5), f64(n, 5)]),
    ("scan of no steps", lambda h, x: _scan(h, x, 1), [f64(5), f64(0, 5)]),
    ("cumsum", e("cumsum", axis=1, reverse=False), [f64(n, 5)]),
    ("cumsum reverse", e("cumsum", axis=0, reverse=True), [f64(n, 5)]),
    ("dot", e("dot", x_axes=(0, 1, 2), y_axes=(0, 2, 3), out_axes=(3, 0, 1)), [f64(2, n, 5), f64(2, 5, 3)]),
    ("gather", e("gather", axes=(1,)), [f64(n, 5), i64(2, 3)]),
    ("gather two", e("gather", axes=(0, 2)), [f64(n, 5, 3), i64(7), i64(7)]),
    ("scatter add", e("scatter", axes=(0,), mode="add"), [f64(n, 5), f64(6, 5), i64(6)]),
    ("scatter set", e("scatter", axes=(1,), mode="set"), [f64(n, 5), f64(1, n), i64(1)]),
    ("uniform", e("random", shape=(n, 5), dtype="f32", kind="uniform"), [i64(), i64()]),
    ("normal", e("random", shape=(n, 5), dtype="f32", kind="normal"), [i64(), i64()]),
]


@pytest.mark.parametrize(("name", "build", "types"), CASES, ids=[c[0] for c in CASES])
def test_agrees_with_torch(name: str, build: Any, types: list[TensorType]) -> None:
    graph = graph_of(build, *types)
    inputs = [sample(t, name.startswith("positive")) for t in types]
    (want,) = run(graph, inputs, SIZES)
    (got,) = evaluate(graph, [t.numpy() for t in inputs], SIZES)
    assert want is not None and got is not None
    tolerance = 1e-5 if want.dtype == torch.float32 else 1e-12
    np.testing.assert_allclose(got, want.numpy(), rtol=tolerance, atol=tolerance)


def test_every_primitive_is_covered() -> None:
    used = {v.prim for _, build, types in CASES for v in graph_of(build, *types)}
    assert set(PRIMS) - used == {"conj", "acosh", "aten", "aten_effect", "call"}


def test_philox_known_answers() -> None:
    """The vectors of Random123 for counter 0 and key 0, and for all bits set."""
    assert [hex(int(w[0])) for w in philox(0, np.zeros(1, np.int64))] == [
        "0x6627e8d5",
        "0xe169c58d",
        "0xbc57ac4c",
        "0x9b00dbd8",
    ]


def test_low_floats_are_evaluated_without_rounding() -> None:
    graph = graph_of(lambda x: emit("cast", x, dtype="bf16"), f64(n))
    (got,) = evaluate(graph, [np.full(4, 0.1)], SIZES)
    assert got is not None and got[0] == 0.1


def test_extern_nodes_are_handed_out() -> None:
    types = (TensorType((n,), "f64"), TensorType((n,), "i64"))
    graph = graph_of(
        lambda x: emit("pick", emit("aten", x, op="aten.sort.default", spec=((), ()), avals=types), index=1), f64(n)
    )
    with pytest.raises(InvalidGraphError, match="no `extern` to call"):
        evaluate(graph, [np.arange(4.0)], SIZES)
    (got,) = evaluate(
        graph, [-np.arange(4.0)], SIZES, extern=lambda value, xs, sizes: [np.sort(xs[0]), np.argsort(xs[0])]
    )
    assert got is not None and got.tolist() == [3, 2, 1, 0]
