"""Losses along rows: an element is picked by its place, a log-sum-exp takes one pass, whatever the rows hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness import INTERPRET, SMALL, Input, K, M, N, T, agree, full, graph_of, iota, op, run, text_of, where

from fusegrad.codegen import TARGETS, generate, module
from fusegrad.codegen.emit import values
from fusegrad.codegen.emit.prelude import HELPERS
from fusegrad.codegen.emit.reductions import online_sums, shares
from fusegrad.codegen.emit.statements import call, literal
from fusegrad.codegen.proofs import prove
from fusegrad.ir import emit

INF = float("inf")
EPS = torch.finfo(torch.float32).eps
PARTS = replace(INTERPRET, shared=256)
"""Rows of more than 2048 go in chunks of 1024, of which a thread keeps whole accesses."""
TARGETS_OUT = torch.tensor([0, 49, -1, 50, 1 << 40, -(1 << 40), 7, 7])


def hot(t: T, columns: Any, dtype: str = "i64") -> T:
    return op("eq", iota(columns, dtype).reshape(1, columns), t.reshape(t.shape[0], 1))


def picks(of: Callable[[T], T], dtype: str = "i64") -> Callable[[T, T], T]:
    """The sum over columns of what is zero but at a target."""
    return lambda x, t: where(hot(t, x.shape[1], dtype), of(x.to("f32")), 0.0).sum(1)


ONE_PLACE = {
    "a load": lambda v: v,
    "soft-capped": lambda v: (v / 30.0).tanh() * 30.0,
    "not zero at zero": lambda v: v.exp(),
    "beside its row": lambda v: v - v.amax(1, keep=True),
}
"""Functions of a row whose element at a target needs no other element of the function."""
MATRIX, PLACES = Input("bf16", (M, N)), Input("i64", (M,))


@pytest.mark.parametrize("target", [INTERPRET, SMALL], ids=["whole", "chunked"])
@pytest.mark.parametrize("body", ONE_PLACE)
def test_an_element_is_picked(body: str, target: Any) -> None:
    """Targets outside of the row pick nothing, as in the sum."""
    agree(picks(ONE_PLACE[body]), {M: 8, N: 50}, target, given={"t": TARGETS_OUT}, x=MATRIX, t=PLACES)
    agree(picks(ONE_PLACE[body]), {M: 1, N: 1}, target, given={"t": torch.tensor([0])}, x=MATRIX, t=PLACES)


@pytest.mark.parametrize("body", ONE_PLACE)
def test_no_column_is_compared(body: str) -> None:
    for dtype in ("i64", "i32"):
        text = text_of(picks(ONE_PLACE[body], dtype), {M: 8192, N: 32000}, x=MATRIX, t=Input(dtype, (M,)))
        assert " == " not in text and text.count("tl.load(x_ptr") == (2 if body == "beside its row" else 1)


def test_a_sum_of_all_rows_picks_too() -> None:
    body = lambda x, t: where(hot(t, N), x, 0.0).sum()  # noqa: E731
    agree(body, {M: 8, N: 50}, given={"t": TARGETS_OUT}, x=Input("f32", (M, N)), t=PLACES)
    assert " == t" not in text_of(body, {M: 8192, N: 32000}, x=Input("f32", (M, N)), t=PLACES)


def running(x: T) -> T:
    return T(emit("cumsum", x.v, axis=1, reverse=False))


MANY_PLACES = {
    "a byte": (lambda x, t: where(hot(t, N, "i8"), x, 1.0).sum(1), {"t": Input("i8", (M,))}),
    "a float": (lambda x, t: where(hot(t, N, "f32"), x, 0.0).sum(1), {"t": Input("f32", (M,))}),
    "a running sum": (lambda x, t: where(hot(t, N), running(x), 0.0).sum(1), {"t": PLACES}),
    "each column its own": (
        lambda x, t: where(op("eq", iota(N).expand(x.shape), t), x, 0.0).sum(1), {"t": Input("i64", (M, N))},
    ),
    "not zero elsewhere": (lambda x, t: where(hot(t, N), x, 1.0).sum(1), {"t": PLACES}),
}  # fmt: skip
"""Sums that stay sums."""


@pytest.mark.parametrize("body", MANY_PLACES)
def test_other_sums_are_sums(body: str) -> None:
    function, places = MANY_PLACES[body]
    agree(function, {M: 8, N: 50}, x=Input("f32", (M, N)), **places)


def test_a_picked_element_is_in_range_for_all_targets() -> None:
    """By its own mask, not on condition that targets are."""
    graph = graph_of(picks(ONE_PLACE["soft-capped"]), x=MATRIX, t=PLACES)
    (proof,) = prove(graph, generate(graph, target=TARGETS["cuda:90"], hints={M: 8192, N: 32000}, name="body"))
    assert proof.proved and proof.count("data") == 0 and proof.count("proved") == len(proof.claims)


# ------------------------------------------------------------------ log-sum-exp
def logsumexp(x: T) -> T:
    """As torch has it: an infinite maximum is subtracted as zero."""
    top = x.amax(1, keep=True)
    finite = where(op("eq", top.abs(), INF), full(0.0, top.shape, "f32"), top)
    return ((x - finite).exp().sum(1, keep=True).log() + finite).reshape(x.shape[0])


def softmax(x: T) -> T:
    top = x.amax(1, keep=True)
    e = (x - top).exp()
    return e / e.sum(1, keep=True)


def edges(columns: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(7, columns).to(dtype)
    x[0] = -INF
    x[1, columns // 2] = INF
    x[2, columns // 3] = float("nan")
    x[3, :-1] = -INF
    x[4] = INF
    x[5] += 1e4
    return x


@pytest.fixture(params=["library", "formula"])
def exponential(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device library's exp, and the one that NVIDIA's GPUs have below a maximum, with torch's powers of two."""
    if request.param == "formula":
        monkeypatch.setattr(online_sums, "exp_below", lambda *args: call("exp_below", args[-1], literal("False")))


@pytest.mark.usefixtures("exponential")
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(("target", "columns"), [(SMALL, 50), (PARTS, 2512), (PARTS, 2501), (PARTS, 3072)])
def test_log_sum_exp_in_one_pass(dtype: str, target: Any, columns: int) -> None:
    x, kind = edges(columns, {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype]), dtype
    agree(lambda x: logsumexp(x.to("f32")), {M: 7, N: columns}, target, given={"x": x}, x=Input(kind, (M, N)))
    agree(lambda x: softmax(x.to("f32")), {M: 7, N: columns}, target, given={"x": x}, x=Input(kind, (M, N)))


def test_a_row_is_read_once() -> None:
    for dtype, columns in (("bf16", 128256), ("f32", 65536), ("bf16", 50257)):
        text = text_of(lambda x: logsumexp(x.to("f32")), {M: 8192, N: columns}, x=Input(dtype, (M, N)))
        assert text.count("tl.load(x_ptr") == 1 and "parts = tl.reshape(" in text, columns
    # rows of no width that accesses have: every lane has a maximum
    text = text_of(lambda x: logsumexp(x.to("f32")), {M: 64, N: 99991, K: 3}, x=Input("f32", (M, N), (K, 1)))
    assert text.count("tl.load(x_ptr") == 1


def test_a_row_that_is_read_once_leaves_all_multiprocessors_busy() -> None:
    graph = graph_of(lambda x: logsumexp(x.to("f32")).sum(), x=MATRIX)
    (kernel,) = generate(graph, target=TARGETS["cuda:90"], hints={M: 8192, N: 128256}, name="body").kernels
    assert int(kernel.grid.subs({M: 8192, N: 128256})) >= 4 * 132  # type: ignore[union-attr]


@pytest.mark.parametrize("spread", [0.5, 4.0, 20.0, 60.0])
def test_exp_below_has_the_digits_of_the_library(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of powers relative to a maximum, beside float64's; where all are alike, so are their errors."""
    monkeypatch.setattr(online_sums, "exp_below", lambda *args: call("exp_below", args[-1], literal("False")))
    x = torch.randn(6, 4096).clamp(max=2.0) * spread
    x[0], x[0, 7] = -spread, 0.0
    graph, sizes = graph_of(lambda x: (x - x.amax(1, keep=True)).exp().sum(1), x=Input("f32", (M, N))), {M: 6, N: 4096}
    kernels = generate(graph, target=PARTS, hints=sizes, name="body")
    text = module(kernels.kernels)
    (y,) = run(kernels, text, graph, [x], sizes)
    powers = (x - x.amax(1, keepdim=True)).double().exp()
    errors, eager = ((v.double() / powers.sum(1) - 1).abs() / EPS for v in (y, powers.float().sum(1)))
    assert "exp_below(" in text and (errors <= 1.5 * eager + 1).all(), (errors, eager)


def test_lanes_outside_that_stay_zero_need_no_choice() -> None:
    """tanh(0 / 30) * 30 is the zero that was read there; exp(0) is none."""
    sums = {
        "capped": lambda x: ((x.to("f32") / 30.0).tanh() * 30.0).sum(1), "exp": lambda x: x.to("f32").exp().sum(1),
    }  # fmt: skip
    texts = {k: text_of(body, {M: 8192, N: 128256}, x=MATRIX) for k, body in sums.items()}
    assert "tl.where(inside" in texts["exp"] and "tl.where(inside" not in texts["capped"]
    for body in sums.values():
        agree(body, {M: 3, N: 50}, SMALL, x=MATRIX)


# ------------------------------------------------------------------ shares of a row
def _on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs what GPUs do, but for their instruction."""
    monkeypatch.setattr(shares, "CONTRACTS", {"interpret"})
    for module_of_it in (online_sums, values):
        monkeypatch.setattr(module_of_it, "exp_below", lambda *args: call("exp_below", args[-1], literal("False")))


@pytest.mark.parametrize(("target", "columns"), [(SMALL, 50), (PARTS, 2501)])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_shares_of_a_row(dtype: str, target: Any, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of infinities and NaN, too: with bounds on both sides the short division is the long one."""
    _on_gpus(monkeypatch)
    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    for body in (lambda x: softmax(x.to("f32")), lambda x: softmax(x.to("f32")).to(dtype)):
        agree(body, {M: 7, N: columns}, target, given={"x": edges(columns, kind)}, x=Input(dtype, (M, N)))


def test_the_division_of_a_share_is_exact() -> None:
    """The helper's own text, with a product and a sum that round once; 10^6 quotients of normal numbers."""
    scope = {"tl": SimpleNamespace(fma=lambda a, b, c: (a.astype("f8") * b + c).astype("f4"))}
    exec(HELPERS["share"].partition("\n")[2], scope)
    random = np.random.default_rng(0)
    x = (2.0 ** random.uniform(-80, 0, 1_000_000)).astype("f4")
    total = (2.0 ** random.uniform(0, 20, x.size)).astype("f4")
    assert (scope["share"](x, total, np.float32(1) / total) == x / total).all()


def text_of_two(function: Any, dtype: str = "bf16") -> str:
    """The kernel of a function of two matrices of bfloat16, as GPUs get it."""
    inputs = {"x": Input("bf16", (M, N)), "y": Input("bf16", (M, N))}
    graph = graph_of(lambda x, y: function(x.to("f32"), y.to("f32")).to(dtype), **inputs)
    return module(generate(graph, target=TARGETS["cuda:90"], hints={M: 64, N: 512}, name="body").kernels)


def powers(x: T, top: T) -> T:
    return (x - top.amax(1, keep=True)).exp()


NO_SHARES = {
    "another row's sum": lambda x, y: powers(x, x) / powers(y, y).sum(1, keep=True),
    "another row's maximum": lambda x, y: powers(x, y) / powers(x, y).sum(1, keep=True),
    "a weighted sum": lambda x, y: powers(x, x) / (powers(x, x) * y).sum(1, keep=True),
    "no maximum": lambda x, y: (x + y).exp() / (x + y).exp().sum(1, keep=True),
}


@pytest.mark.parametrize("name", NO_SHARES)
def test_what_is_no_share_is_divided(name: str) -> None:
    assert "share(" not in text_of_two(NO_SHARES[name])


def test_powers_that_are_stored_keep_what_is_subnormal() -> None:
    assert "libdevice.exp(" not in text_of_two(lambda x, y: softmax(x + y))
    assert "libdevice.exp(" in text_of_two(lambda x, y: softmax(x + y), "f32")
    assert "libdevice.exp(" in text_of_two(lambda x, y: powers(x, x) + y * softmax(x))
