"""The rules of ir/sharding/rules.py one primitive at a time: computed in parts by numpy, put together, compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import sympy

from fusegrad.ir import Graph, TensorType, Value, building, emit
from fusegrad.ir.evaluate import evaluate
from fusegrad.ir.loops.body import Body
from fusegrad.ir.loops.loop import results_of
from fusegrad.ir.prims import PRIMS
from fusegrad.ir.sharding.rules import PARTIAL, WHOLE, ZERO, divide, sharding_rules
from fusegrad.ir.sharding.scaling import NotDivisible, degree_rules

N, M = sympy.Symbol("n", positive=True, integer=True), sympy.Symbol("m", positive=True, integer=True)
SIZES = {N: 7, M: 4}
PARTS = ((0, 3), (3, 5), (5, 7))
Build = Callable[..., "Value | Sequence[Value]"]


def graph(build: Build, *types: tuple[Any, ...], dtypes: Sequence[str] = ()) -> Graph:
    made = Graph()
    names = dtypes or ["f64"] * len(types)
    inputs = [made.input(TensorType(t, d), f"x{i}") for i, (t, d) in enumerate(zip(types, names, strict=True))]
    with building(made):
        outputs = build(*inputs)
    return made.returning([outputs] if isinstance(outputs, Value) else outputs)


def values(of: Graph, seed: int = 0) -> list[Any]:
    draw = np.random.default_rng(seed)
    shapes = [[SIZES.get(n, n) for n in v.shape] for v in of.inputs]
    made = zip(of.inputs, shapes, strict=True)
    return [draw.integers(0, 3, s) if v.dtype == "i64" else draw.standard_normal(s) for v, s in made]


def in_parts(of: Graph, given: dict[int, Any] | None = None) -> tuple[list[Any], list[Any]]:
    """(the outputs put together from parts, those of the whole)"""
    found, whole = divide(of, N, given), values(of)
    per_rank = []
    for rank, (low, high) in enumerate(PARTS):
        local = [_part(x, s, low, high, rank) for x, s in zip(whole, found.inputs, strict=True)]
        results = evaluate(of, local, {**SIZES, N: high - low})
        per_rank.append(_scaled(results, found.degrees, low, high))
    merged = [_merged([r[i] for r in per_rank], s) for i, s in enumerate(found.outputs)]
    return merged, evaluate(of, whole, SIZES)


def _part(x: Any, state: Any, low: int, high: int, rank: int) -> Any:
    if isinstance(state, int):
        unit = x.shape[state] // SIZES[N]
        return np.take(x, range(low * unit, high * unit), state)
    return x * (0.5, 0.2, 0.3)[rank] if state == PARTIAL else x


def _scaled(results: Sequence[Any], degrees: Sequence[Fraction], low: int, high: int) -> list[Any]:
    return [r * ((high - low) / SIZES[N]) ** float(d) if d else r for r, d in zip(results, degrees, strict=True)]


def _merged(parts: Sequence[Any], state: Any) -> Any:
    if isinstance(state, int):
        return np.concatenate(parts, state)
    if state == PARTIAL:
        return sum(parts[1:], parts[0])
    np.testing.assert_allclose(parts, [parts[0]] * len(parts), rtol=1e-14)
    return parts[0]


def rows_of(x: Value, index: Value) -> Value:
    """torch.gather(x, 1, index): each row looks up its own."""
    at = emit("broadcast", emit("iota", size=N, dtype="i64"), shape=(N, 2), axes=(0,))
    return emit("gather", x, at, index, axes=(0, 1))


def spread(x: Value) -> Value:
    return emit("broadcast", x, shape=(N, M), axes=(1,))


def added(source: Value, index: Value) -> Value:
    base = emit("full", value=0.0, shape=(5, M), dtype="f64")
    return emit("scatter", base, source, index, axes=(0,), mode="add")


def sized(value: Any) -> Value:
    return emit("full", value=value, shape=(), dtype="f64")


def over(x: Value, size: Any) -> Value:
    """The sum of all elements over a number."""
    return emit("div", emit("sum", x, axes=(0, 1)), sized(size))


def loop(step: Callable[..., Sequence[Value]], size: Any) -> Build:
    """step(carry, step of x) along axis 0 of x, which has `size` steps."""

    def build(h: Value, x: Value) -> list[Value]:
        body = Graph("step")
        inputs = [body.input(h.aval, "h"), body.input(x.aval.with_shape(x.shape[1:]), "x")]
        with building(body):
            body.returning(step(*inputs))
        params = {"carries": 1, "steps": 1, "length": size, "reverse": False}
        return results_of(emit("scan", h, x, body=Body(body), **params))

    return build


def decayed(h: Value, x: Value) -> list[Value]:
    new = emit("add", emit("mul", h, x), x)
    return [new, emit("amax", new, axes=(1,))]


DIVISIBLE: dict[str, tuple[Build, tuple[tuple[Any, ...], ...], tuple[Any, ...], Sequence[str]]] = {
    "elementwise": (lambda x, y: emit("mul", emit("exp", x), spread(y)), ((N, M), (M,)), (0,), ()),
    "sum": (lambda x: emit("sum", x, axes=(0,)), ((N, M),), (PARTIAL,), ()),
    "sum of another axis": (lambda x: emit("sum", x, axes=(1,)), ((M, M, N),), (1,), ()),
    "amax of another axis": (lambda x: emit("amax", x, axes=(1,)), ((N, M),), (0,), ()),
    "a sum times what is whole": (
        lambda x, y: emit("neg", emit("mul", emit("sum", x, axes=(0,)), y)), ((N, M), (M,)), (PARTIAL,), (),
    ),
    "two sums": (
        lambda x: emit("sub", emit("sum", emit("exp", x), axes=(0,)), emit("sum", x, axes=(0,))),
        ((N, M),), (PARTIAL,), (),
    ),
    "permute": (lambda x: emit("permute", x, perm=(2, 0, 1)), ((M, N, 3),), (2,), ()),
    "reshape behind": (lambda x: emit("reshape", x, shape=(3, N * 4)), ((3, N, 4),), (1,), ()),
    "reshape in front": (lambda x: emit("reshape", x, shape=(6, N, 4)), ((2, 3, N, 4),), (1,), ()),
    "slice of another axis": (lambda x: emit("slice", x, start=(0, 1), stop=(N, 3), step=(1, 1)), ((N, 4),), (0,), ()),
    "pad of another axis": (lambda x: emit("pad", x, lo=(0, 1), hi=(0, 0), inner=(0, 1)), ((N, 4),), (0,), ()),
    "flip of another axis": (lambda x: emit("flip", x, axes=(1,)), ((N, M),), (0,), ()),
    "cat of another axis": (lambda x, y: emit("cat", x, y, axis=1), ((N, 2), (N, 3)), (0,), ()),
    "cumsum of another axis": (lambda x: emit("cumsum", x, axis=1, reverse=True), ((N, M),), (0,), ()),
    "a loop over time": (loop(decayed, M), ((N, 3), (M, N, 3)), (0, 1), ()),
    "a product's rows": (
        lambda x, y: emit("dot", x, y, x_axes=(0, 1), y_axes=(1, 2), out_axes=(2, 0)), ((N, M), (M, 3)), (1,), (),
    ),
    "a product's contracted dim": (
        lambda x, y: emit("dot", x, y, x_axes=(0, 1), y_axes=(1, 2), out_axes=(0, 2)), ((M, N), (N, 3)), (PARTIAL,), (),
    ),
    "rows looked up by a divided index": (
        lambda x, i: emit("gather", x, i, axes=(0,)), ((5, M), (N,)), (0,), ("f64", "i64"),
    ),
    "columns of divided rows": (lambda x, i: emit("gather", x, i, axes=(1,)), ((N, 5), (3,)), (1,), ("f64", "i64")),
    "each row looks up its own": (rows_of, ((N, 5), (N, 2)), (0,), ("f64", "i64")),
    "rows added where they belong": (added, ((N, M), (N,)), (PARTIAL,), ("f64", "i64")),
    "constants": (lambda x: emit("add", x, emit("full", value=2.0, shape=(N,), dtype="f64")), ((N,),), (0,), ()),
    "a mean": (lambda x: over(x, N * M), ((N, M),), (PARTIAL,), ()),
    "a sum over the root of the number of rows": (lambda x: over(x, sympy.sqrt(N)), ((N, M),), (PARTIAL,), ()),
    "a mean by a product": (
        lambda x: emit("mul", emit("sum", x, axes=(0, 1)), emit("rsqrt", sized(N * N))), ((N, M),), (PARTIAL,), (),
    ),
    "what is compared with it": (
        lambda x: emit("where", emit("lt", sized(N), emit("mul", sized(N), sized(3))), emit("sum", x, axes=(0, 1)),
                       sized(0.0)), ((N, M),), (PARTIAL,), (),
    ),
    "a power of the number of rows": (
        lambda x: [emit("neg", x), emit("pow", sized(3 * N), sized(-1.5)), emit("sqrt", emit("reciprocal", sized(N)))],
        ((N, M),), (0, WHOLE, WHOLE), (),
    ),
    "every row over the number of rows": (
        lambda x: emit("div", emit("amax", x, axes=(1,)), emit("broadcast", sized(N), shape=(N,), axes=())),
        ((N, M),), (0,), (),
    ),
    "means that are added": (
        lambda x: emit("sub", over(x, N), over(emit("exp", x), 2 * N)),
        ((N, M),), (PARTIAL,), (),
    ),
    "zeros": (lambda x: [emit("full", value=0.0, shape=(M,), dtype="f64"), emit("neg", x)], ((N,),), (ZERO, 0), ()),
    "several results": (lambda x: [emit("neg", x), emit("sum", x, axes=(0, 1))], ((N, M),), (0, PARTIAL), ()),
}  # fmt: skip


@pytest.mark.parametrize("name", DIVISIBLE)
def test_parts_make_the_whole(name: str) -> None:
    build, types, states, dtypes = DIVISIBLE[name]
    made = graph(build, *types, dtypes=dtypes)
    assert divide(made, N).outputs == states
    for mine, whole in zip(*in_parts(made), strict=True):
        np.testing.assert_allclose(mine, whole, rtol=1e-12, atol=1e-12)


def test_a_partial_input_stays_a_sum_through_what_is_linear() -> None:
    made = graph(lambda x, w: emit("div", emit("sum", x, axes=(0,)), w), (M, 3), (3,))
    assert divide(made, N, {0: PARTIAL}).outputs == (PARTIAL,)
    for mine, whole in zip(*in_parts(made, {0: PARTIAL}), strict=True):
        np.testing.assert_allclose(mine, whole, rtol=1e-12)


def softmax(x: Value) -> Value:
    e = emit("exp", x)
    return emit("div", e, emit("broadcast", emit("sum", e, axes=(0,)), shape=(N, M), axes=(1,)))


def pairs(x: Value) -> Value:
    row, column = (emit("broadcast", x, shape=(N, N), axes=(a,)) for a in (0, 1))
    return emit("sub", row, column)


def variance(x: Value) -> Value:
    apart = emit("sub", x, emit("broadcast", over(x, N * M), shape=(N, M), axes=()))
    return over(emit("mul", apart, apart), N * M)


REFUSED: dict[str, tuple[Build, tuple[tuple[Any, ...], ...], str]] = {
    "amax": (lambda x: emit("amax", x, axes=(0,)), ((N, M),), "reduces it by amax"),
    "prod": (lambda x: emit("prod", x, axes=(0,)), ((N, M),), "reduces it by prod"),
    "argmax": (lambda x: emit("argmax", x, axis=0), ((N, M),), "reduces it by argmax"),
    "cumsum": (lambda x: emit("cumsum", x, axis=0, reverse=False), ((N, M),), "runs along it"),
    "a loop along it": (loop(decayed, N), ((M, 3), (N, M, 3)), "runs along it"),
    "a sum over it in each step": (
        loop(lambda h, x: [emit("add", h, emit("sum", x, axes=(0,)))], M), ((3,), (M, N, 3)), "not linear",
    ),
    "sums over it of all steps": (
        loop(lambda h, x: [h, emit("sum", x, axes=(0,))], M), ((3,), (M, N, 3)), "in each step",
    ),
    "a mean in each step": (
        loop(lambda h, x: [emit("mul", h, emit("full", value=1 / N, shape=(N, 3), dtype="f64")), x], M),
        ((N, 3), (M, N, 3)), "in each step",
    ),
    "a loop over a sum": (
        lambda h, x: loop(decayed, M)(emit("broadcast", emit("sum", h, axes=(0,)), shape=(2, 3), axes=(1,)), x),
        ((N, 3), (M, 2, 3)), "not linear",
    ),
    "a sum that is not only added": (lambda x: emit("exp", emit("sum", x, axes=(0,))), ((N, M),), "not linear"),
    "a sum beside what is none": (lambda x, y: emit("add", emit("sum", x, axes=(0,)), y), ((N, M), (M,)), "not linear"),
    "a softmax": (softmax, ((N, M),), "spreads over it"),
    "a variance": (variance, ((N, M),), "spreads over it what is a sum"),
    "one less than the number of rows": (lambda x: over(x, N - 1), ((N, M),), "computes with its size"),
    "an exponential of the number of rows": (
        lambda x: emit("exp", sized(N)), ((N,),), "computes with its size",
    ),
    "the number of rows, rounded": (
        lambda x: emit("cast", sized(N / 2), dtype="i64"), ((N,),), "with its size",
    ),
    "the number of rows, returned": (lambda x: emit("full", value=N, shape=(), dtype="i64"), ((N,),), "with its size"),
    "a mean beside a sum": (
        lambda x: emit("add", over(x, N), emit("sum", x, axes=(0, 1))), ((N, M),), "beside what is not",
    ),
    "pairs": (pairs, ((N,),), "pairs its elements"),
    "a part": (lambda x: emit("slice", x, start=(1,), stop=(N,), step=(1,)), ((N,),), "takes a part"),
    "more": (lambda x: emit("pad", x, lo=(1,), hi=(0,), inner=(0,)), ((N,),), "makes a dim|adds to it"),
    "reversed": (lambda x: emit("flip", x, axes=(0,)), ((N, M),), "reverses it"),
    "joined": (lambda x: emit("cat", x, x, axis=0), ((N, M),), "adds to it"),
    "mixed": (lambda x: emit("reshape", x, shape=(N * 4,)), ((4, N),), "mixes it"),
    "unmixed": (lambda x: emit("reshape", x, shape=(N, 4)), ((4, N),), "mixes it"),
    "positions": (
        lambda x: emit("mul", x, emit("cast", emit("iota", size=N, dtype="i64"), dtype="f64")), ((N,),), "position",
    ),
    "positions that are returned": (lambda x: emit("iota", size=N, dtype="i64"), ((N,),), "counts along it"),
    "an index for a divided axis": (
        lambda x, i: emit("check_index", emit("cast", i, dtype="i64"),
                          emit("full", value=N, shape=i.shape, dtype="i64")),
        ((N,), (M,)), "looks rows",
    ),
    "rows of others": (
        lambda x: emit("gather", x, emit("full", value=1, shape=(2,), dtype="i64"), axes=(0,)), ((N, M),), "looks rows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_all_of_a_dim_is_refused_by_name(name: str) -> None:
    build, types, why = REFUSED[name]
    with pytest.raises(NotDivisible, match=why):
        divide(graph(build, *types), N)


ELEMENTWISE = [n for n in degree_rules if PRIMS[n].family == "elementwise" and n not in ("cast", "where", "pow")]


@pytest.mark.parametrize("power", [-1, 2])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_primitive_keeps_changes_or_loses_the_degree_as_its_rule_says(name: str, power: int) -> None:
    def build(x: Value, *others: Value) -> Sequence[Value]:
        scaled = [emit("mul", emit("abs", o), emit("broadcast", sized(N**power), shape=(M,), axes=())) for o in others]
        made = emit(name, *scaled[: PRIMS[name].arity])
        return [emit("neg", x), made if made.dtype != "bool" else emit("cast", made, dtype="f64")]

    made = graph(build, (N,), (M,), (M,))
    for mine, whole in zip(*in_parts(made), strict=True):
        np.testing.assert_allclose(mine, whole, rtol=1e-12)


def test_every_primitive_has_a_rule() -> None:
    assert set(PRIMS) - set(sharding_rules) == {"input"}


def test_what_does_not_mention_the_dim_is_whole() -> None:
    made = graph(lambda x, y: [emit("exp", y), emit("neg", x)], (N,), (M,))
    assert divide(made, N).outputs == (WHOLE, 0)
