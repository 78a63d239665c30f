"""Layout primitives, strides, gathers and scatters: nothing but other addresses, or a cut where it has to be one."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
from harness import (
    INTERPRET,
    MANY,
    SMALL,
    Input,
    K,
    M,
    N,
    T,
    agree,
    cat,
    full,
    gather,
    iota,
    op,
    scatter,
    text_of,
    where,
)

from fusegrad.codegen.program.axes import Axis, Index
from fusegrad.codegen.program.sizes import divmod_sizes
from fusegrad.ir import emit

SIZES = {"odd": {M: 13, N: 50, K: 3}, "one": {M: 1, N: 1, K: 1}, "even": {M: 6, N: 64, K: 2}}
DEVICES = {"whole": INTERPRET, "chunked": SMALL, "tree": MANY}


def F(*shape: object, strides: tuple[object, ...] | None = None) -> Input:
    return Input("f32", shape, strides)  # type: ignore[arg-type]


def I(*shape: object) -> Input:  # noqa: E743
    return Input("i64", shape)  # type: ignore[arg-type]


def pad(x: T, lo: tuple[int, ...], hi: tuple[int, ...], inner: tuple[int, ...]) -> T:
    return T(emit("pad", x.v, lo=lo, hi=hi, inner=inner))


def flip(x: T, *axes: int) -> T:
    return T(emit("flip", x.v, axes=axes))


def cumsum(x: T, reverse: bool = False) -> T:
    return T(emit("cumsum", x.v, axis=1, reverse=reverse))


def exps(x: T, axis: int = 1) -> T:
    return (x - x.amax(axis, keep=True)).exp()


def smooth(x: T) -> T:
    return x[slice(1, x.shape[0])] + x[slice(0, x.shape[0] - 1)]


def interleaved(x: T, y: T) -> T:
    """x0 y0 x1 y1 .."""
    return cat([t.reshape(*t.shape, 1) for t in (x, y)], 2).reshape(M, 2 * N)


def turned(q: T, c: T, s: T) -> T:
    """Pairs of neighbours turned: rotary positions, interleaved."""
    pairs = q.reshape(M, N, 2)
    one, two = (pairs[:, :, slice(k, k + 1)].reshape(M, N) for k in (0, 1))
    return interleaved(one * c - two * s, two * c + one * s)


def rows_of_pairs(x: T) -> T:
    """A softmax over complex numbers' squares, and what is left of them: pairs below reductions and beside them."""
    one, two = (x[slice(0, M), slice(k, 2 * N, 2)] for k in (0, 1))
    e = exps(one * one + two * two)
    return interleaved(one * e / e.sum(1, keep=True), two - one.amax(1, keep=True))


def gated(g: T, x: T) -> T:
    """The gradient of silu(x[:, :N]) * x[:, N:], in one piece of memory."""
    one, two = x[:, slice(0, N)], x[:, slice(N, 2 * N)]
    p = 1.0 / (1.0 + (-one).exp())
    return cat([g * two * p * (1.0 + one * (1.0 - p)), g * one * p], 1)


def quarters(x: T, y: T) -> T:
    """Concatenations in two dimensions."""
    return cat([cat([x, y * 2.0], 1), cat([y, x.exp()], 1)], 0)


CASES: dict[str, tuple[Callable[..., object], dict[str, Input]]] = {
    "slice": (lambda x: x[slice(0, M, 2), slice(1, N, 3)], {"x": F(M, N)}),
    "shifted": (lambda x: x.exp()[:, slice(1, N)] - x.exp()[:, slice(0, N - 1)], {"x": F(M, N)}),
    "slice of a reduction": (lambda x: (x - x.sum(1, keep=True))[:, slice(0, 1)], {"x": F(M, N)}),
    "many places": (lambda x: reduce(lambda a, _: smooth(a), range(12), x), {"x": F(40)}),
    "long chain": (lambda x: reduce(lambda a, _: a * 1.01 + 0.1, range(150), x), {"x": F(M, N)}),
    "flip": (lambda x: flip(x, 0, 1) + x, {"x": F(M, N)}),
    "flip of a reduction": (lambda x: flip(x.sum(1), 0) * x.sum(1), {"x": F(M, N)}),
    "flip after a reduction": (lambda x: flip(x - x.amax(1, keep=True), 1), {"x": F(M, N)}),
    "pad": (lambda x: pad(x.exp(), (1, 2), (0, 3), (0, 0)) * 2.0, {"x": F(M, N)}),
    "pad between": (lambda x: pad(x, (1, 2), (0, 3), (1, 2)), {"x": F(M, N)}),
    "pad a reduction": (lambda x: pad(x.sum(1), (1,), (2,), (0,)), {"x": F(M, N)}),
    "pad, then reduce": (lambda x: pad(x, (1, 2), (0, 3), (0, 0)).amax(1), {"x": F(M, N)}),
    "cat": (lambda x, y: cat([x, y, x], 1), {"x": F(M, N), "y": F(M, 3)}),
    "cat rows": (lambda x, y: cat([x * 2.0, y], 0) + 1.0, {"x": F(M, N), "y": F(4, N)}),
    "cat alike": (lambda x, y: cat([x, y], 0) * 2.0, {"x": F(M, N), "y": F(M, N)}),
    "interleaved": (interleaved, {"x": F(M, N), "y": F(M, N)}),
    "turned": (turned, {"q": F(M, 2 * N), "c": F(1, N), "s": F(1, N)}),
    "rows of pairs": (rows_of_pairs, {"x": F(M, 2 * N)}),
    "gated": (gated, {"g": F(M, N), "x": F(M, 2 * N)}),
    "quarters": (quarters, {"x": F(M, N), "y": F(M, N)}),
    "uneven pieces": (
        lambda x: cat([x[:, slice(5, N + 5)].tanh(), x[:, slice(0, 2)].exp(), x[:, slice(2, 5)]], 1),
        {"x": F(M, N + 5)},
    ),
    "cat, then reduce": (lambda x, y: cat([x, y], 1).sum(1), {"x": F(M, N), "y": F(M, 3)}),
    "cat of reductions": (lambda x, y: cat([x.sum(1), y.sum(1)], 0), {"x": F(M, N), "y": F(M, N)}),
    "softmax of a cat": (lambda x, y: exps(cat([x, y], 1)), {"x": F(M, N), "y": F(M, 3)}),
    "stack": (lambda x, y: cat([x.reshape(M, 1, N), y.reshape(M, 1, N)], 1), {"x": F(M, N), "y": F(M, N)}),
    "permute": (lambda x: x.permute(2, 0, 1) + 1.0, {"x": F(M, N, 5)}),
    "permute, then reduce": (lambda x: x.permute(2, 0, 1).sum(1), {"x": F(M, N, 5)}),
    "x + x.T": (lambda x: x + x.t, {"x": F(M, M)}),
    "two directions": (lambda x: x.sum(0) + x.sum(1), {"x": F(M, M)}),
    "rows and columns": (lambda x: (x.sum(0), x.sum(1)), {"x": F(M, N)}),
    "reshape, odd": (lambda x: x.reshape(8, 3) * 2.0, {"x": F(6, 4)}),
    "reshape, odd, then reduce": (lambda x: x.reshape(8, 3).sum(1), {"x": F(6, 4)}),
    "reshape of a transpose": (lambda x: x.t.reshape(M * N) * 3.0, {"x": F(M, N)}),
    "reshape of a cat": (lambda x, y: cat([x, y], 1).reshape(M * 2 * N), {"x": F(M, N), "y": F(M, N)}),
    "reshape of rows": (lambda x: (x - x.amax(1, keep=True)).reshape(M * N) + iota(M * N, "f32"), {"x": F(M, N)}),
    "reshape of a reduction": (lambda x: x.sum(1).reshape(8, 3), {"x": F(24, N)}),
    "transposed input": (lambda x, y: (x + y).sum(1), {"x": F(M, N, strides=(1, M)), "y": F(M, N)}),
    "transposed rows": (exps, {"x": F(M, N, strides=(1, M))}),
    "stride 0": (lambda x, y: x * y, {"x": F(M, N, strides=(0, 0)), "y": F(M, N)}),
    "expanded gradient": (lambda g, x: (g * x).sum(0), {"g": F(M, N, strides=(0, 1)), "x": F(M, N)}),
    "step 2": (lambda x, y: x * y + x.sum(1, keep=True), {"x": F(M, N, strides=(2 * N, 2)), "y": F(M, N)}),
    "0-d": (lambda x: x * 2.0 + 1.0, {"x": F()}),
    "0-d of a sum": (lambda x, y: x.sum() * y, {"x": F(M), "y": F()}),
    "minus the mean": (lambda x: x - x.mean(), {"x": F(M, N)}),
    "variance": (lambda x: ((x - x.mean()) * (x - x.mean())).mean(), {"x": F(M, N)}),
    "sum of sums": (lambda x: x.sum(1).sum(0), {"x": F(M, N)}),
    "sum of what does not vary": (lambda x: full(2.0, (M, N), "f32").sum(1) + x.expand((M, N)).sum(1), {"x": F(M, 1)}),
    "product of what does not vary": (lambda x: x.expand((M, N)).reduce("prod", 1), {"x": F(M, 1)}),
    "every axis": (lambda x: (x.sum(0), x.sum(1), x.sum(2), x.sum(0, 1), x.sum()), {"x": F(M, N, 5)}),
    "every axis at once": (
        lambda x: x.sum(0, keep=True) * x.sum(1, keep=True) * x.sum(2, keep=True),
        {"x": F(M, N, 5)},
    ),
    "reductions of two axes": (lambda x: (lambda s: s / s.sum(1, keep=True))(exps(x, 2)), {"x": F(M, 7, N)}),
    "small product": (lambda x, y: (x.reshape(M, N, 1) * y.reshape(1, N, 5)).sum(1), {"x": F(M, N), "y": F(N, 5)}),
    "one value twice": (lambda x: (x, x * 1.0, x, x * 2.0, x * 2.0), {"x": F(M, N)}),
    "unrelated outputs": (lambda x, y: (x * 2.0, y * 3.0, y.sum(0)), {"x": F(M, N), "y": F(K, 4)}),
    "infinite padding": (lambda x: (x * 0.0).rsqrt().sum(1) + x.sum(1), {"x": F(M, N)}),
    "running softmax": (lambda x: cumsum(exps(x)) / x.exp().sum(1, keep=True), {"x": F(M, N)}),
    "running columns": (lambda x: cumsum(x / x.sum(0, keep=True)), {"x": F(M, N)}),
    "forth and back": (lambda x: cumsum(x) + cumsum(x, True), {"x": F(M, N)}),
    "embedding": (lambda w, i: gather(w, i, axes=(0,)) * 2.0, {"w": Input("bf16", (8, N)), "i": I(M, 3)}),
    "gather columns": (lambda w, i: gather(w, i, axes=(1,)), {"w": F(N, 8), "i": I(M)}),
    "gather pairs": (lambda w, i, j: gather(w * w, i, j, axes=(0, 2)), {"w": F(8, N, 9), "i": I(M), "j": I(M)}),
    "gather a reduction": (lambda w, i: gather(w.sum(1), i, axes=(0,)), {"w": F(8, N), "i": I(M)}),
    "gather a softmax": (
        lambda w, i: gather(exps(w) / w.exp().sum(1, keep=True), i, axes=(0,)),
        {"w": F(8, N), "i": I(M)},
    ),
    "scatter on a base": (
        lambda b, g, i: scatter(b * 2.0, g, i, axes=(0,)) + 1.0,
        {"b": F(8, N), "g": F(M, N), "i": I(M)},
    ),
    "scatter pairs": (lambda g, i: scatter(full(0, (8, 9), "f32"), g, i, i, axes=(0, 1)), {"g": F(M), "i": I(M)}),
    "scatter what does not vary": (
        lambda g, i: scatter(full(0, (8,), "f32"), g.expand((M, N)), i.reshape(M, 1).expand((M, N)), axes=(0,)),
        {"g": F(1, N), "i": I(M)},
    ),
    "scatter a reduction": (
        lambda g, i: scatter(full(0, (8,), "f32"), g.sum(1), i, axes=(0,)).sum(),
        {"g": F(M, N), "i": I(M)},
    ),
    "scatter, set": (lambda b, g: scatter(b, g, iota(M), axes=(0,), mode="set"), {"b": F(M, N), "g": F(M, N)}),
    "masked": (lambda x: where(op("gt", x, 0.0), x.sqrt(), 0.0).sum(1), {"x": F(M, N)}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sizes", SIZES)
def test_agrees(case: str, sizes: str) -> None:
    body, inputs = CASES[case]
    for target in DEVICES.values():
        agree(body, SIZES[sizes], target, slack=12, **inputs)


NEVER_EMPTY = (
    "softmax",
    "two axes",
    "slice of",
    "shifted",
    "pad between",
    "rows",
    "then reduce",
    "product",
    "flip after",
)


@pytest.mark.parametrize("case", [c for c in CASES if not any(word in c for word in NEVER_EMPTY)])
def test_agrees_on_nothing(case: str) -> None:
    body, inputs = CASES[case]
    for sizes in ({M: 0, N: 5, K: 0}, {M: 7, N: 0, K: 4}):
        agree(body, sizes, **inputs)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "i64", "f64", "i8"])
def test_embedding_backward(dtype: str) -> None:
    """Repeated indices add up, in a dtype that can hold the sum."""
    inputs = {"g": Input(dtype, (M, N)), "i": I(M)}
    for target in DEVICES.values():
        agree(lambda g, i: scatter(full(0, (8, N), dtype), g, i, axes=(0,)), SIZES["odd"], target, slack=12, **inputs)


@pytest.mark.parametrize("case", ["interleaved", "turned", "rows of pairs"])
def test_neighbours_move_together(case: str) -> None:
    """One access for both of a pair."""
    body, inputs = CASES[case]
    text = text_of(body, {M: 64, N: 128}, **inputs)
    assert text.count("tl.interleave(") == text.count("tl.store(") == 1
    assert text.count("tl.load(x_ptr") + text.count("tl.load(q_ptr") == 1


@pytest.mark.parametrize("case", ["interleaved", "turned", "gated", "quarters", "stack"])
def test_equal_pieces_are_stored_one_by_one(case: str) -> None:
    """No lane loads for a piece that it does not belong to."""
    body, inputs = CASES[case]
    text = text_of(body, {M: 64, N: 128}, **inputs)
    assert "tl.where" not in text and "floor_quotient" not in text
    assert text.count("@triton.jit\ndef body(") == 1


@pytest.mark.parametrize("n", [7, N])
def test_a_row_and_a_place_in_it_are_told_from_a_number(n: Any) -> None:
    """In a matrix one wider, what is at [r, c] lies at [r, r + c] in rows that are one shorter."""
    r, c = Axis(n, 0), Axis(n, 1)
    place = Index(((r, 2 * n), (c, 1)))
    assert place.divmod(2 * n - 1) == (Index.over(r), Index(((r, 1), (c, 1))))
    assert place.divmod(2 * n) == (Index.over(r), Index.over(c))
    assert place.divmod(2 * n - 2) is None


def test_no_quotient_but_in_whole_numbers() -> None:
    assert divmod_sizes(200, 199) == (1, 1) and divmod_sizes(2 * N, 2 * N - 1) == (1, 1)
    assert divmod_sizes(N / 2, N) == (0, N / 2) and divmod_sizes(M, N) == (0, M) and divmod_sizes(3, N) == (0, 3)
