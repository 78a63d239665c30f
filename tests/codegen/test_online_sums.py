"""Sums relative to an extreme along a row in chunks: which are made in its pass, and that they are what eager makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import INTERPRET, SMALL, Input, K, M, N, T, agree, op, text_of, where
from test_losses import PARTS, edges

Body = Callable[[T, T, T], T]


def powers(x: T, t: T) -> T:
    return (x - x.amax(1, keep=True)).exp()


def mean(x: T, y: T, t: T) -> T:
    e = powers(x, t)
    return (e * y).sum(1) / e.sum(1)


def variance(x: T, y: T, t: T) -> T:
    e = powers(x, t)
    return (e * y * y).sum(1) / e.sum(1) - (e * y).sum(1)


def of_a_minimum(x: T, y: T, t: T) -> T:
    low = x.reduce("amin", 1, keep=True)
    e = (low - x).exp()
    return (e * y).sum(1) / e.sum(1) + low.reshape(x.shape[0])


def tempered(x: T, y: T, t: T) -> T:
    hot = ((x - x.amax(1, keep=True)) * t.reshape(t.shape[0], 1)).exp()
    return (hot * y).sum(1) / powers(x, t).sum(1)


def picked(x: T, y: T, t: T) -> T:
    e = powers(x, t)
    return where(op("gt", y, 0.0), e, 0.0).sum(1) / e.sum(1)


def beside_zero(x: T, y: T, t: T) -> T:
    """Where the maximum is infinite, zero stands for it."""
    top = x.amax(1, keep=True)
    e = (x - where(op("eq", top.abs(), float("inf")), 0.0, top)).exp()
    return (e * y).sum(1) / (e.sum(1) + 1.0)


def of_others(x: T, y: T, t: T) -> T:
    """What may be far above the maximum so far, and not above the row's."""
    return (y - x.amax(1, keep=True)).exp().sum(1) + powers(x, t).sum(1)


def product(x: T, y: T, t: T) -> T:
    """Nothing tells a row of infinities from another one, but for a sum of powers alone."""
    return (powers(x, t) * y).sum(1)


def above_another(x: T, y: T, t: T) -> T:
    """Relative to the larger one of the maximum and a number: to that of a row's earlier part, say."""
    top = op("max", x.amax(1, keep=True), (t * 4.0).reshape(t.shape[0], 1))
    e = (x - top).exp()
    return (e * y).sum(1) / e.sum(1) + e.sum(1)


ONE_PASS = (mean, variance, of_a_minimum, tempered, picked, beside_zero)
MORE = (of_others, product, above_another)
every = pytest.mark.parametrize("body", ONE_PASS + MORE, ids=lambda b: b.__name__)
LAYOUTS = {"rows": (N, 1), "columns": (1, M), "gaps": (2 * N, 2)}


def rows(dtype: str, layout: str = "rows") -> dict[str, Input]:
    return {"x": Input(dtype, (M, N), LAYOUTS[layout]), "y": Input(dtype, (M, N)), "t": Input("f32", (M,))}


def widened(body: Body) -> Body:
    return lambda x, y, t: body(x.to("f32"), y.to("f32"), t)


CASES = [
    (SMALL, 50, "f32", "columns"), (SMALL, 50, "bf16", "gaps"), (PARTS, 2512, "bf16", "rows"),
    (PARTS, 2501, "f32", "rows"), (PARTS, 2512, "f32", "columns"),
]  # fmt: skip


@pytest.mark.parametrize(("target", "columns", "dtype", "layout"), CASES)
@every
def test_beside_the_reference(body: Body, target: Any, columns: int, dtype: str, layout: str) -> None:
    agree(widened(body), {M: 7, N: columns}, target, **rows(dtype, layout))


@pytest.mark.parametrize(("target", "columns"), [(SMALL, 50), (PARTS, 2512)])
@every
def test_infinities(body: Body, target: Any, columns: int) -> None:
    x = edges(columns, torch.float32)
    for given in (x, -x, x.sort(1).values, x.sort(1, descending=True).values):
        t = torch.linspace(0.25, 2.0, 7)
        agree(body, {M: 7, N: columns}, target, given={"x": given.contiguous(), "t": t}, **rows("f32"))


@every
def test_passes(body: Body) -> None:
    """How often a row is read that has no room in registers."""
    text = text_of(widened(body), {M: 8192, N: 128256}, **rows("bf16"))
    assert text.count("for col_at") == (1 if body in ONE_PASS else 2)


def test_columns_beside_each_other() -> None:
    def body(x: T, y: T) -> T:
        e = (x - x.amax(1, keep=True)).exp()
        return (e * y).sum(1) / e.sum(1)

    for rows_, columns in ((300, 8), (2501, 24)):
        agree(body, {M: 3, N: rows_, K: columns}, PARTS, x=Input("f32", (M, N, K)), y=Input("f32", (M, N, K)))


def along_either(x: T) -> T:
    """Contrastive: what rows and columns sum to is added up, so that both parts of a logarithm are in memory."""
    rows_, columns = (x.amax(a, keep=True) for a in (1, 0))
    sums = (x - rows_).exp().sum(1), (x - columns).exp().sum(0)
    logs = [s.log() + top.reshape(s.shape[0]) for s, top in zip(sums, (rows_, columns), strict=True)]
    return logs[0].sum(0) + logs[1].sum(0)


def test_an_extreme_that_is_in_memory_is_made_beside_its_sums() -> None:
    x = Input("f32", (M, N))
    for target, n in ((SMALL, 50), (INTERPRET, 97)):
        agree(along_either, {M: 41, N: n}, target, x=x)
    assert text_of(along_either, {M: 16384, N: 16384}, x=x).count("def body_") == 3
