"""Every primitive in every dtype: the numbers are the reference's, in whole rows or in chunks, empty or not."""

from __future__ import annotations

import pytest
import sympy
import torch
from harness import INTERPRET, MANY, SMALL, Input, K, M, N, T, agree, full, graph_of, iota, op

from fusegrad.codegen import Unfusible, generate
from fusegrad.ir import emit
from fusegrad.ir.prims import COMPARE, UNARY

SIZES = ({M: 13, N: 50, K: 3}, {M: 1, N: 1, K: 1}, {M: 6, N: 64, K: 2})
EMPTY = ({M: 0, N: 5, K: 0}, {M: 7, N: 0, K: 4})
INTEGERS = ("i8", "i16", "i32", "i64", "u8")
ARITHMETIC = "add sub mul div pow max min rem fmod floordiv atan2".split()
ON_INTEGERS = "add sub mul max min and or xor shl shr pow".split()
DTYPES = ("b1", "i8", "u8", "i32", "i64", "f32", "f64", "bf16", "f16")


def unary(name: str, **params: object) -> object:
    return lambda x: T(emit(name, x.v, **params))


@pytest.mark.parametrize("name", [n for n in UNARY if n not in ("not", "conj")])
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
def test_unary_on_floats(name: str, dtype: str) -> None:
    agree(unary(name), SIZES[0], slack=12, x=Input(dtype, (M, N)))


@pytest.mark.parametrize("name", ["neg", "abs", "sign", "not", "floor", "round"])
def test_unary_on_integers(name: str) -> None:
    for dtype in INTEGERS:
        agree(unary(name), SIZES[0], x=Input(dtype, (M, N)))


@pytest.mark.parametrize("name", ["tanh", "expm1", "log1p", "asinh", "atanh", "asin", "atan", "sinh"])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_no_cancellation_near_zero(name: str, dtype: str) -> None:
    near = torch.logspace(-9, -0.01, 64, dtype=torch.float64).to(
        getattr(torch, {"f32": "float32", "f64": "float64"}[dtype])
    )
    x = torch.cat([near, -near])
    agree(unary(name), {M: 128}, slack=0.3, given={"x": x}, x=Input(dtype, (M,)))


@pytest.mark.parametrize(
    "name", ["tanh", "sinh", "cosh", "expm1", "log1p", "asinh", "acosh", "atan", "exp", "sigmoid", "sign"]
)
def test_at_the_edges(name: str) -> None:
    edges = torch.tensor(
        [0.0, 1.0, -1.0, 30.0, -30.0, 88.0, -88.0, 1e30, -1e30, float("inf"), -float("inf"), float("nan")]
    )
    agree(unary(name), {M: 12}, given={"x": edges}, x=Input("f32", (M,)))


@pytest.mark.parametrize("name", ARITHMETIC)
def test_binary_on_floats(name: str) -> None:
    for dtype in ("f32", "f64", "bf16", "f16"):
        agree(lambda x, y: op(name, x, y), SIZES[0], slack=12, x=Input(dtype, (M, N)), y=Input(dtype, (M, N)))


@pytest.mark.parametrize("name", ON_INTEGERS)
def test_binary_on_integers(name: str) -> None:
    for dtype in INTEGERS:
        agree(lambda x, y: op(name, x, y), SIZES[0], x=Input(dtype, (M, N)), y=Input(dtype, (M, N)))


@pytest.mark.parametrize("name", ["rem", "fmod", "floordiv"])
def test_division_of_signed_integers(name: str) -> None:
    for dtype in ("i8", "i32", "i64"):
        inputs = {"x": Input(dtype, (M, N)), "y": Input(dtype, (M, N))}
        agree(lambda x, y: op(name, op("sub", x, 3), op("sub", op("mul", y, 2), 5)), SIZES[0], **inputs)


@pytest.mark.parametrize("name", ["rem", "fmod", "floordiv", "pow", "atan2", "hypot", "shl", "shr"])
def test_numbers_as_operands(name: str) -> None:
    whole = name in ("shl", "shr")
    for dtype in ("i32",) if whole else ("f32", "f64", "bf16"):
        for number in (2, 40, -1) if whole else (1.5, -2.0):
            agree(lambda x, n=number: op(name, x, n), SIZES[2], x=Input(dtype, (M, N)))
            agree(lambda x, n=number: op(name, n, x), SIZES[2], x=Input(dtype, (M, N)))


@pytest.mark.parametrize("name", [*COMPARE, "and", "or", "xor", "add", "mul", "max", "min"])
def test_booleans(name: str) -> None:
    agree(lambda x, y: op(name, x, y), SIZES[0], x=Input("b1", (M, N)), y=Input("b1", (M, N)))
    agree(unary("not"), SIZES[0], x=Input("b1", (M, N)))


@pytest.mark.parametrize("source", DTYPES)
def test_cast(source: str) -> None:
    for target in DTYPES:
        if target not in (source, "u8"):
            agree(unary("cast", dtype=target), SIZES[0], x=Input(source, (M, N)))


@pytest.mark.parametrize("name", ["sum", "prod", "amax", "amin"])
@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1), (0, 2), (1, 2)])
def test_reduce(name: str, axes: tuple[int, ...]) -> None:
    shape = (M, N, 5) if 2 in axes else (M, N)
    for dtype in ("f32", "f64", "bf16", "i32", "i64"):
        for target in (INTERPRET, SMALL, MANY):
            agree(unary(name, axes=axes), SIZES[0], target, slack=12, x=Input(dtype, shape))
    for sizes in (*SIZES[1:], *(EMPTY if name in ("sum", "prod") else ())):
        for target in (INTERPRET, SMALL):
            agree(unary(name, axes=axes), sizes, target, x=Input("f32", shape))


@pytest.mark.parametrize("target", [INTERPRET, SMALL, MANY])
def test_reduce_booleans_and_bytes(target: object) -> None:
    agree(unary("amax", axes=(1,)), SIZES[0], target, x=Input("b1", (M, N)))
    agree(unary("amin", axes=(0, 1)), SIZES[0], target, x=Input("b1", (M, N)))
    agree(unary("amax", axes=(0,)), SIZES[0], target, x=Input("u8", (M, N)))


@pytest.mark.parametrize("name", ["amax", "amin", "argmax", "argmin"])
@pytest.mark.parametrize("axis", [0, 1])
def test_nan_wins_and_the_first_of_equals(name: str, axis: int) -> None:
    x = torch.randn(13, 50).round()
    x[3, 7] = x[3, 9] = x[8, 7] = float("nan")
    params = {"axis": axis} if name.startswith("arg") else {"axes": (axis,)}
    for target in (INTERPRET, SMALL, MANY):
        agree(unary(name, **params), SIZES[0], target, given={"x": x}, x=Input("f32", (M, N)))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_cumsum(axis: int, reverse: bool) -> None:
    for dtype in ("f32", "i64", "f64"):
        for target in (INTERPRET, SMALL):
            for sizes in SIZES:
                agree(unary("cumsum", axis=axis, reverse=reverse), sizes, target, slack=20, x=Input(dtype, (M, N)))


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_random(kind: str) -> None:
    def draw(seed: T, offset: T) -> T:
        return T(emit("random", seed.v, offset.v, shape=(M, N), dtype="f32", kind=kind))

    for offset in (0, 12345, 2**33 + 7):
        given = {"seed": torch.tensor(2**40 + 99), "offset": torch.tensor(offset)}
        agree(draw, SIZES[0], given=given, seed=Input("i64", ()), offset=Input("i64", ()))


def test_constants_and_sizes() -> None:
    agree(lambda x: x * (1 / M) + N, SIZES[0], x=Input("f32", (M, N)))
    agree(lambda: iota(N), SIZES[0])
    agree(lambda: iota(N, "f32"), SIZES[0])


@pytest.mark.parametrize("name", [n for n in ARITHMETIC if n != "rem"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_constant_beside_float64_is_float64(name: str, place: int) -> None:
    def body(x: T) -> T:
        pair = [x, full(0.1, x.shape, x.dtype)]
        return op(name, *(reversed(pair) if place == 0 else pair))

    agree(body, SIZES[0], given={"x": torch.rand(13, 50, dtype=torch.float64) / 5}, x=Input("f64", (M, N)))


@pytest.mark.parametrize("bound", [sympy.Max(1 / M, 0.1), sympy.Min(1 / M, 0.01)], ids=str)
def test_a_bound_of_sizes_is_float64(bound: sympy.Expr) -> None:
    agree(lambda x: op("mul", x, full(bound, x.shape, x.dtype)), {M: 13, N: 5}, x=Input("f64", (M, N)))


def test_what_is_not_emitted_is_refused() -> None:
    with pytest.raises(Unfusible, match="left to the library: no tile holds f64"):
        graph = graph_of(
            lambda x, y: T(emit("dot", x.v, y.v, x_axes=(0, 1), y_axes=(1, 2), out_axes=(0, 2))),
            x=Input("f64", (4, 4)), y=Input("f64", (4, 4)),
        )  # fmt: skip
        generate(graph, target=INTERPRET, hints={}, name="body")


OF_SIZES = (
    1 / M, sympy.sqrt(M), 1 / sympy.sqrt(M), M ** sympy.Rational(3, 2), sympy.Rational(1, 3) ** N,
    N / sympy.cbrt(M), sympy.floor(M / 3) / 7, sympy.ceiling(M / 3) / 7, sympy.Max(M, 4) / 7, sympy.Min(M, 4) / 7,
    (M + N) / 8 - 1 / N,
)  # fmt: skip


@pytest.mark.parametrize("number", OF_SIZES, ids=str)
def test_a_number_made_of_sizes(number: sympy.Expr) -> None:
    kernels = agree(lambda x: op("mul", x, full(number, x.shape, x.dtype)), {M: 13, N: 5}, x=Input("f32", (M, N)))
    assert len(kernels.kernels) == 1


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("kind", ["amax", "amin"])
def test_a_truth_that_is_the_same_everywhere_is_reduced(kind: str, value: bool) -> None:
    agree(lambda x: full(value, (M, N), "b1").reduce(kind, 1), {M: 13, N: 5}, x=Input("f32", (M, N)))
    agree(lambda x: full(value, (M, 64), "b1").reduce(kind, 1), {M: 13}, x=Input("f32", (M, 64)))
