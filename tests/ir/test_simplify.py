"""Simplify: what becomes of what, what must stay, and that random graphs compute the same bits."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusegrad.ir import Graph, TensorType, Value, building, emit, show, verify
from fusegrad.ir.passes.identities.constants import rounded
from fusegrad.ir.passes.layout import segments
from fusegrad.ir.passes.simplify import HOLDERS, Simplify

M = sympy.Symbol("M", integer=True, positive=True)
N = sympy.Symbol("N", integer=True, positive=True)
Build = Callable[[Value], Value]


@given(st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_random_graphs_compute_the_same_bits(grow, same, seed: int) -> None:
    graph = grow(seed, 45)
    same(graph, verify(Simplify()(graph)), seed)


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_simplify_is_done_when_it_is_done(grow, seed: int) -> None:
    once = Simplify()(grow(seed, 30))
    assert show(Simplify()(once)) == show(once)


def body(build: Build, aval: TensorType) -> list[str]:
    """The lines that `build` comes to, applied to an input of this type."""
    graph = Graph("g")
    x = graph.input(aval, "x")
    with building(graph):
        graph.returning([build(x)])
    return [line.strip() for line in show(verify(Simplify()(graph))).splitlines() if " = " in line][1:]


def prims(build: Build, aval: TensorType) -> list[str]:
    return [line.split(" = ")[1].split("(")[0] for line in body(build, aval)]


def full(number: object, x: Value) -> Value:
    return emit("full", value=number, shape=x.shape, dtype=x.dtype)


F32 = TensorType((M, 4), "f32")
BF16 = TensorType((M, 4), "bf16")
I32 = TensorType((M, 4), "i32")
B1 = TensorType((M, 4), "b1")
INF, NAN = float("inf"), float("nan")

TO_NOTHING: list[tuple[str, Build, TensorType]] = [
    ("x * 1", lambda x: emit("mul", x, full(1.0, x)), F32),
    ("1 * x", lambda x: emit("mul", full(1, x), x), BF16),
    ("x / 1", lambda x: emit("div", x, full(1, x)), F32),
    ("x - 0", lambda x: emit("sub", x, full(0.0, x)), F32),
    ("x + -0", lambda x: emit("add", x, full(-0.0, x)), F32),
    ("i + 0", lambda x: emit("add", x, full(0, x)), I32),
    ("--x", lambda x: emit("neg", emit("neg", x)), F32),
    ("not not b", lambda x: emit("not", emit("not", x)), B1),
    ("b and True", lambda x: emit("and", x, full(True, x)), B1),
    ("b or False", lambda x: emit("or", full(False, x), x), B1),
    ("max(x, x)", lambda x: emit("max", x, x), F32),
    ("pow 1", lambda x: emit("pow", x, full(1.0, x)), F32),
    ("pow 1 in a low float", lambda x: emit("pow", x, full(1.0, x)), BF16),
    ("pow 1 of integers", lambda x: emit("pow", x, full(1, x)), I32),
    ("where True", lambda x: emit("where", emit("full", value=True, shape=x.shape, dtype="b1"), x, full(NAN, x)), F32),
    ("same dtype", lambda x: emit("cast", x, dtype="bf16"), BF16),
    ("up and down", lambda x: emit("cast", emit("cast", x, dtype="f32"), dtype="bf16"), BF16),
    (
        "bool and back",
        lambda x: emit("ne", emit("cast", x, dtype="f32"), emit("cast", full(False, x), dtype="f32")),
        B1,
    ),
    ("floor(i)", lambda x: emit("floor", x), I32),
    ("conj", lambda x: emit("conj", x), F32),
    ("reshape there and back", lambda x: emit("reshape", emit("reshape", x, shape=(4 * M,)), shape=(M, 4)), F32),
    ("transposed twice", lambda x: emit("permute", emit("permute", x, perm=(1, 0)), perm=(1, 0)), F32),
    ("flipped twice", lambda x: emit("flip", emit("flip", x, axes=(0, 1)), axes=(0, 1)), F32),
    ("whole slice", lambda x: emit("slice", x, start=(0, 0), stop=(M, 4), step=(1, 1)), F32),
    ("no padding", lambda x: emit("pad", x, lo=(0, 0), hi=(0, 0), inner=(0, 0)), F32),
    ("cat of one", lambda x: emit("cat", x, axis=0), F32),
    ("unsqueeze, squeeze", lambda x: emit("reshape", emit("reshape", x, shape=(M, 1, 4)), shape=(M, 4)), F32),
    ("amax of nothing", lambda x: emit("amax", x, axes=()), F32),
]


@pytest.mark.parametrize(("name", "build", "aval"), TO_NOTHING, ids=[n for n, _, _ in TO_NOTHING])
def test_vanishes(name: str, build: Build, aval: TensorType) -> None:
    assert body(build, aval) == []


STAYS: list[tuple[str, Build, TensorType, list[str]]] = [
    ("x + 0.0", lambda x: emit("add", x, full(0.0, x)), F32, ["full", "add"]),
    ("x - -0.0", lambda x: emit("sub", x, full(-0.0, x)), F32, ["full", "sub"]),
    ("0 * x", lambda x: emit("mul", x, full(0.0, x)), F32, ["full", "mul"]),
    ("x - x", lambda x: emit("sub", x, x), F32, ["sub"]),
    ("x / x", lambda x: emit("div", x, x), F32, ["div"]),
    ("x == x", lambda x: emit("eq", x, x), F32, ["eq"]),
    ("x ** 3 in a low float", lambda x: emit("pow", x, full(3.0, x)), BF16, ["full", "pow"]),
    ("amax over what may be empty", lambda x: emit("amax", bc(x, (M - 1, M, 4, 3), 1, 2), axes=(0, 3)), F32,
     ["broadcast", "amax"]),
    ("cat of different constants", lambda x: emit("cat", full(1.0, x), full(2.0, x), axis=0), F32,
     ["full", "full", "cat"]),
    ("not x < y", lambda x: emit("not", emit("lt", x, full(1.0, x))), F32, ["full", "lt", "not"]),
    ("down and up", lambda x: emit("cast", emit("cast", x, dtype="bf16"), dtype="f32"), F32, ["cast", "cast"]),
    ("f16 and bf16", lambda x: emit("cast", emit("cast", x, dtype="f16"), dtype="bf16"), BF16, ["cast", "cast"]),
    ("a low float to a byte", lambda x: emit("cast", emit("cast", x, dtype="f32"), dtype="u8"), BF16, ["cast", "cast"]),
    ("low float sums", lambda x: emit("sum", emit("sum", x, axes=(1,)), axes=(0,)), BF16, ["sum", "sum"]),
    ("x / 3", lambda x: emit("div", x, full(3.0, x)), F32, ["full", "div"]),
    ("log(exp(x))", lambda x: emit("log", emit("exp", x)), F32, ["exp", "log"]),
]


@pytest.mark.parametrize(("name", "build", "aval", "left"), STAYS, ids=[n for n, *_ in STAYS])
def test_stays(name: str, build: Build, aval: TensorType, left: list[str]) -> None:
    assert prims(build, aval) == left


def bc(x: Value, shape: tuple[object, ...], *axes: int) -> Value:
    return emit("broadcast", x, shape=shape, axes=axes)


def one(x: Value) -> Value:
    """A mask as numbers."""
    return emit("cast", x, dtype="f32")


BECOMES: list[tuple[str, Build, TensorType, list[str]]] = [
    ("0 * i", lambda x: emit("mul", x, full(0, x)), I32,
     ["%1 = full(dtype=\"i32\", shape=(M, 4), value=0) : i32[M, 4]"]),
    ("x ** 2", lambda x: emit("pow", x, full(2, x)), BF16, ["%1 = mul(%0, %0) : bf16[M, 4]"]),
    ("not i == j", lambda x: emit("not", emit("eq", x, emit("neg", x))), I32,
     ["%1 = neg(%0) : i32[M, 4]", "%2 = ne(%0, %1) : b1[M, 4]"]),
    ("not i != j", lambda x: emit("not", emit("ne", x, emit("neg", x))), I32,
     ["%1 = neg(%0) : i32[M, 4]", "%2 = eq(%0, %1) : b1[M, 4]"]),
    ("cat of equal constants", lambda x: emit("cat", full(1.0, x), full(1.0, x), axis=0), F32,
     ["%1 = full(dtype=\"f32\", shape=(2*M, 4), value=1.0) : f32[2*M, 4]"]),
    ("x ** 0 in a low float", lambda x: emit("pow", x, full(0.0, x)), BF16,
     ["%1 = full(dtype=\"bf16\", shape=(M, 4), value=1) : bf16[M, 4]"]),
    ("x ** -1", lambda x: emit("pow", x, full(-1, x)), F32, ["%1 = reciprocal(%0) : f32[M, 4]"]),
    ("x * -1", lambda x: emit("mul", full(-1.0, x), x), F32, ["%1 = neg(%0) : f32[M, 4]"]),
    ("x + -y", lambda x: emit("add", x, emit("neg", emit("exp", x))), F32,
     ["%1 = exp(%0) : f32[M, 4]", "%2 = sub(%0, %1) : f32[M, 4]"]),
    ("x / 8", lambda x: emit("div", x, full(8, x)), F32,
     ["%1 = full(dtype=\"f32\", shape=(M, 4), value=0.125) : f32[M, 4]", "%2 = mul(%0, %1) : f32[M, 4]"]),
    ("cast through", lambda x: emit("cast", emit("cast", x, dtype="f32"), dtype="f16"), BF16,
     ["%1 = cast(%0, dtype=\"f16\") : f16[M, 4]"]),
    ("constants in bf16", lambda x: emit("mul", x, emit("add", full(1, x), full(1 / 512, x))), BF16, []),
    ("sizes", lambda x: emit("mul", *[emit("full", value=s, shape=(), dtype="i64") for s in (M, 4)]), F32,
     ["%1 = full(dtype=\"i64\", shape=(), value=4*M) : i64[]"]),
    ("slice of slice", lambda x: emit("slice", emit("slice", x, start=(1, 0), stop=(M, 4), step=(1, 1)),
                                      start=(2, 1), stop=(M - 1, 3), step=(2, 1)), F32,
     ["%1 = slice(%0, start=(3, 1), step=(2, 1), stop=(M, 3)) : f32[ceiling(M/2 - 3/2), 2]"]),
    ("slice of a slice without an axis", lambda x: emit("slice", emit("reshape", emit(
        "slice", x, start=(0, 1), stop=(M, 2), step=(1, 1)), shape=(M,)), start=(2,), stop=(M,), step=(1,)), F32,
     ["%1 = slice(%0, start=(2, 1), step=(1, 1), stop=(M, 2)) : f32[M - 2, 1]",
      "%2 = reshape(%1, shape=(M - 2,)) : f32[M - 2]"]),
    ("slice of a piece", lambda x: emit("slice", emit("cat", x, emit("exp", x), axis=0),
                                        start=(M + 1, 0), stop=(2 * M, 4), step=(1, 1)), F32,
     ["%1 = exp(%0) : f32[M, 4]", "%2 = slice(%1, start=(1, 0), step=(1, 1), stop=(M, 4)) : f32[M - 1, 4]"]),
    ("slice of a piece that was moved", lambda x: emit("slice", emit("permute", emit(
        "cat", x, emit("exp", x), axis=0), perm=(1, 0)), start=(0, 2 * M - 1), stop=(2, 2 * M), step=(1, 1)), F32,
     ["%1 = exp(%0) : f32[M, 4]", "%2 = slice(%1, start=(M - 1, 0), step=(1, 1), stop=(M, 2)) : f32[1, 2]",
      "%3 = reshape(%2, shape=(2, 1)) : f32[2, 1]"]),
    ("op on the small shape", lambda x: emit("exp", emit("mul", bc(x, (N, M, 4), 1, 2), emit(
        "full", value=2.0, shape=(N, M, 4), dtype="f32"))), F32,
     ["%1 = full(dtype=\"f32\", shape=(M, 4), value=2.0) : f32[M, 4]", "%2 = mul(%0, %1) : f32[M, 4]",
      "%3 = exp(%2) : f32[M, 4]", "%4 = broadcast(%3, axes=(1, 2), shape=(N, M, 4)) : f32[N, M, 4]"]),
    ("permuted broadcast", lambda x: emit("permute", bc(x, (M, 4, N), 0, 1), perm=(2, 1, 0)), F32,
     ["%1 = permute(%0, perm=(1, 0)) : f32[4, M]", "%2 = broadcast(%1, axes=(1, 2), shape=(N, 4, M)) : f32[N, 4, M]"]),
    ("joined neighbours", lambda x: emit("reshape", emit("permute", x, perm=(2, 0, 1)), shape=(2, 3 * M)),
     TensorType((M, 3, 2), "f32"),
     ["%1 = reshape(%0, shape=(3*M, 2)) : f32[3*M, 2]", "%2 = permute(%1, perm=(1, 0)) : f32[2, 3*M]"]),
    ("joined neighbours that were parted stay", lambda x: emit("reshape", emit(
        "permute", emit("reshape", x, shape=(M, 2, 2)), perm=(2, 0, 1)), shape=(2, 2 * M)), F32,
     ["%1 = reshape(%0, shape=(M, 2, 2)) : f32[M, 2, 2]", "%2 = permute(%1, perm=(2, 0, 1)) : f32[2, M, 2]",
      "%3 = reshape(%2, shape=(2, 2*M)) : f32[2, 2*M]"]),
    ("parted axes", lambda x: emit("reshape", emit("permute", x, perm=(1, 0)), shape=(2, 2, M)), F32,
     ["%1 = reshape(%0, shape=(M, 2, 2)) : f32[M, 2, 2]", "%2 = permute(%1, perm=(1, 2, 0)) : f32[2, 2, M]"]),
    ("joined strangers stay", lambda x: emit("reshape", emit("permute", x, perm=(1, 0)), shape=(4 * M,)), F32,
     ["%1 = permute(%0, perm=(1, 0)) : f32[4, M]", "%2 = reshape(%1, shape=(4*M,)) : f32[4*M]"]),
    ("sum of permuted", lambda x: emit("sum", emit("permute", x, perm=(1, 0)), axes=(0,)), F32,
     ["%1 = sum(%0, axes=(1,)) : f32[M]"]),
    ("sum of sum", lambda x: emit("sum", emit("sum", x, axes=(0,)), axes=(0,)), F32,
     ["%1 = sum(%0, axes=(0, 1)) : f32[]"]),
    ("running sum from the other end", lambda x: emit("flip", emit("cumsum", emit(
        "flip", x, axes=(0, 1)), axis=1, reverse=False), axes=(0, 1)), F32,
     ["%1 = cumsum(%0, axis=1, reverse=True) : f32[M, 4]"]),
    ("running sum along what is not turned", lambda x: emit("cumsum", emit("flip", x, axes=(0,)), axis=1, reverse=True),
     F32, ["%1 = cumsum(%0, axis=1, reverse=True) : f32[M, 4]", "%2 = flip(%1, axes=(0,)) : f32[M, 4]"]),
    ("sum of flattened", lambda x: emit("sum", emit("reshape", x, shape=(4 * M,)), axes=(0,)), F32,
     ["%1 = sum(%0, axes=(0, 1)) : f32[]"]),
    ("amax of broadcast", lambda x: emit("amax", bc(x, (N, M, 4), 1, 2), axes=(0, 2)), F32,
     ["%1 = amax(%0, axes=(1,)) : f32[M]"]),
    ("flatten and pad zeros", lambda x: emit("pad", full(0.0, x), lo=(1, 1), hi=(0, 0), inner=(0, 0)), F32,
     ["%1 = full(dtype=\"f32\", shape=(M + 1, 5), value=0.0) : f32[M + 1, 5]"]),
    ("moves an axis of size 1", lambda x: emit("permute", emit("reshape", x, shape=(1, M, 4)), perm=(1, 0, 2)), F32,
     ["%1 = reshape(%0, shape=(M, 1, 4)) : f32[M, 1, 4]"]),
    ("iota of one", lambda x: emit("iota", size=1, dtype="i64"), F32,
     ["%1 = full(dtype=\"i64\", shape=(1,), value=0) : i64[1]"]),
    ("a choice of two numbers is a mask", lambda x: emit("eq", emit("where", x, full(1, one(x)), full(0, one(x))),
                                                         full(0, one(x))), B1, ["%1 = not(%0) : b1[M, 4]"]),
    ("one less a mask", lambda x: emit("sub", full(1, one(x)), one(x)), B1,
     ["%1 = full(dtype=\"f32\", shape=(M, 4), value=0.0) : f32[M, 4]",
      "%2 = full(dtype=\"f32\", shape=(M, 4), value=1.0) : f32[M, 4]", "%3 = where(%0, %1, %2) : f32[M, 4]"]),
    ("part of a mask of positions", lambda x: emit("slice", emit("le", emit("iota", size=8 * M, dtype="i64"), emit(
        "full", value=3, shape=(8 * M,), dtype="i64")), start=(2,), stop=(M,), step=(1,)), F32,
     ["%1 = iota(dtype=\"i64\", size=M - 2) : i64[M - 2]",
      "%2 = full(dtype=\"i64\", shape=(M - 2,), value=2) : i64[M - 2]", "%3 = add(%1, %2) : i64[M - 2]",
      "%4 = full(dtype=\"i64\", shape=(M - 2,), value=3) : i64[M - 2]", "%5 = le(%3, %4) : b1[M - 2]"]),
    ("amax over size 1", lambda x: emit("amax", emit("reshape", x, shape=(M, 4, 1)), axes=(2,)), F32, []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "build", "aval", "lines"), BECOMES, ids=[n for n, *_ in BECOMES])
def test_becomes(name: str, build: Build, aval: TensorType, lines: list[str]) -> None:
    assert body(build, aval) == lines


@pytest.mark.parametrize("is_product", [True, False])
def test_one_place_beside_a_product_is_made_of_its_own_piece(same, is_product: bool) -> None:
    """exp(cat(x[:, :1], x @ x.T) - top[:, None])[:, :1]  ->  exp(x[:, :1] - top[:, None])"""
    graph = Graph("g")
    x = graph.input(TensorType((M, 4), "f32"), "x")
    with building(graph):
        first = emit("slice", x, start=(0, 0), stop=(M, 1), step=(1, 1))
        product = emit("dot", x, x, x_axes=(0, 2), y_axes=(1, 2), out_axes=(0, 1))
        scores = emit("cat", first, product if is_product else x, axis=1)
        below = emit("exp", emit("sub", scores, bc(emit("amax", scores, axes=(1,)), scores.shape, 0)))
        graph.returning([emit("slice", below, start=(0, 0), stop=(M, 1), step=(1, 1))])
    simple = verify(Simplify()(graph))
    (power,) = (v for v in simple.order() if v.prim == "exp")
    assert power.args[0].args[0].prim == ("slice" if is_product else "cat")
    same(graph, simple, 0)


def test_a_part_of_what_is_made_of_itself_many_times_is_made_once() -> None:
    """A chain of 40 squares of what was written: each step of the part is one more node, not twice as many."""
    graph = Graph("g")
    x, update = graph.input(TensorType((19,), "f32"), "x"), graph.input(TensorType((8,), "f32"), "update")
    with building(graph):
        y = emit("add", x, emit("pad", update, lo=(0,), hi=(11,), inner=(0,)))
        for _ in range(40):
            y = emit("mul", y, y)
        graph.returning([emit("slice", y, start=(0,), stop=(8,), step=(1,))])
    simple = Simplify()(graph)
    assert [v.prim for v in simple.order()] == ["slice", "add", *["mul"] * 40]


def test_common_subexpressions_are_one_and_unused_inputs_stay() -> None:
    graph = Graph("g")
    x, _ = graph.input(F32, "x"), graph.input(F32, "unused")
    with building(graph):
        doubled = emit("mul", x, full(2.0, x))
        graph.returning([emit("exp", doubled), emit("exp", emit("mul", emit("neg", emit("neg", x)), full(2.0, x)))])
    simple = Simplify()(graph)
    assert simple.outputs[0] == simple.outputs[1]
    assert [v.params["name"] for v in simple.inputs] == ["x", "unused"]


def test_a_row_factor_is_computed_once_per_row() -> None:
    """rsqrt(mean + eps) with keepdim and without it come to one node on [M]."""
    graph = Graph("g")
    x = graph.input(F32, "x")
    with building(graph):
        flat = emit("sum", x, axes=(1,))
        kept = emit("reshape", flat, shape=(M, 1))
        wide = bc(emit("rsqrt", kept), (M, 4), 0, 1)
        also = bc(emit("rsqrt", flat), (M, 4), 0)
        graph.returning([emit("mul", emit("mul", x, wide), also)])
    lines = show(Simplify()(graph))
    assert lines.count("rsqrt") == 1
    assert "rsqrt(%1) : f32[M]" in lines


def test_the_sum_of_one_element_forgets_the_sign_of_zero(run) -> None:
    graph = Graph("g")
    x = graph.input(TensorType((3, 1), "f32"), "x")
    with building(graph):
        graph.returning([emit("sum", x, axes=(1,))])
    (result,) = run(Simplify()(graph), [np.array([[-0.0], [0.0], [2.0]], np.float32)])
    assert not np.signbit(result).any()


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
def test_holders_hold_every_value(dtype: str) -> None:
    rng = np.random.default_rng(0)
    for number in [*rng.normal(size=50) * 10.0 ** rng.integers(-6, 5, size=50), INF, -0.0, 65504.0]:
        held = rounded(number, dtype)
        assert all(repr(rounded(held, wider)) == repr(held) for wider in HOLDERS[dtype])


@pytest.mark.parametrize("dtype", ["b1", "u8", "u16", "u32", "i8", "i16", "i32", "i64"])
def test_holders_hold_every_integer(dtype: str) -> None:
    info = None if dtype == "b1" else np.iinfo(dtype.replace("i", "int").replace("u", "uint"))
    extremes = [0, 1] if info is None else [info.max, info.max - 1, info.max // 2 + 1, info.min, info.min + 1]
    for number in extremes:
        assert all(rounded(number, wider) == number for wider in HOLDERS[dtype])
    assert {"b1": "bf16", "u8": "bf16", "i16": "f32", "i32": "f64"}.get(dtype, dtype) in HOLDERS[dtype]


CAST = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64, "b1": torch.bool,
        "i8": torch.int8, "u8": torch.uint8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64}  # fmt: skip


@pytest.mark.parametrize("first", CAST)
def test_a_cast_in_between_is_left_out_only_where_it_changes_nothing(first: str) -> None:
    numbers = torch.tensor([0.0, 1, -1, 2.5, -2.5, 100, 127, 200, 255, 300, -300, 4099, 70001, -1e6, 2.0**24 + 1, 3e9])
    values = numbers.double().to(CAST[first])
    for middle, last in itertools.product(CAST, CAST):
        chain = prims(lambda x: emit("cast", emit("cast", x, dtype=middle), dtype=last), TensorType((M, 4), first))  # noqa: B023
        if len(chain) < 2 and middle not in (first, last):
            there = values.to(CAST[middle]).to(CAST[last])
            straight = values.to(CAST[last]) if chain else values
            torch.testing.assert_close(straight, there, rtol=0, atol=0, equal_nan=True)
    both = prims(lambda x: emit("cast", emit("cast", x, dtype="f64"), dtype="f32"), TensorType((M, 4), first))
    assert len(both) == {"i64": 2, "f32": 0}.get(first, 1)


ROUNDED = [
    (1 + 2**-8, "bf16", 1.0), (1 + 3 * 2**-8, "bf16", 1 + 2**-6), (0.1, "f32", 0.10000000149011612),
    (3.5e38, "f32", INF), (3.4e38, "bf16", INF), (70000.0, "f16", INF), (-2.7, "i32", -2), (NAN, "i32", None),
    (300, "u8", None), (2, "b1", True),
]  # fmt: skip


@pytest.mark.parametrize(("number", "dtype", "expected"), ROUNDED)
def test_constants_are_rounded_to_their_dtype(number: float, dtype: str, expected: float | None) -> None:
    assert rounded(number, dtype) == expected


SEGMENTS = [
    ((M, N, 6), (M * N, 2, 3), [([0, 1], [0]), ([2], [1, 2])]),
    ((M, 4), (M, 1, 4), [([0], [0]), ([1], [1, 2])]),
    ((2, 3), (3, 2), [([0, 1], [0, 1])]),
    ((), (1, 1), [([], [0, 1])]),
    ((M, N), (N, M), [([0, 1], [0, 1])]),
    ((8, M), (2, 4, M), [([0], [0, 1]), ([1], [2])]),
]


@pytest.mark.parametrize(("old", "new", "runs"), SEGMENTS)
def test_runs_of_axes_that_hold_the_same_elements(old: tuple, new: tuple, runs: list) -> None:
    assert segments(old, new) == runs
