"""Several results that reduce different axes of the same tensors: one kernel, each byte moved once, in any layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sympy
from harness import INTERPRET, MANY, SMALL, Input, K, M, N, T, agree, graph_of

from fusegrad.codegen import TARGETS, Kernel, generate
from fusegrad.ir import Size
from fusegrad.ir.passes.cost import minimal_bytes

DEVICES = {"whole": INTERPRET, "chunked": SMALL, "tree": MANY}
GROUPS = 4
Body = Callable[..., Any]
SIZES = {"odd": {M: 3, N: 12, K: 37}, "one": {M: 1, N: 4, K: 1}, "wide": {M: 2, N: 64, K: 8}}
NCX = (M, N, K)
LAST = (N * K, 1, N)
"""The strides of [n, c, x] in memory [n, x, c]."""


def F(*shape: Size, strides: tuple[Size, ...] | None = None, dtype: str = "f32") -> Input:
    return Input(dtype, shape, strides)


def groups(x: T) -> T:
    return x.reshape(M, GROUPS, sympy.Rational(1, GROUPS) * N, K)


def group_forward(x: T, w: T, b: T) -> tuple[T, T, T]:
    xg = groups(x)
    mu = xg.mean(2, 3, keep=True)
    d = xg - mu
    rstd = ((d * d).mean(2, 3, keep=True) + 1e-5).rsqrt()
    y = (d * rstd).reshape(*NCX) * w.reshape(1, N, 1) + b.reshape(1, N, 1)
    return y, mu, rstd


def group_backward(dy: T, x: T, w: T, mu: T, rstd: T) -> tuple[T, T, T]:
    x_hat, gw = (groups(x) - mu) * rstd, groups(dy * w.reshape(1, N, 1))
    dx = rstd * (gw - gw.mean(2, 3, keep=True) - x_hat * (gw * x_hat).mean(2, 3, keep=True))
    return dx.reshape(*NCX), (dy * x_hat.reshape(*NCX)).sum(0, 2), dy.sum(0, 2)


def batch_backward(dy: T, x: T, w: T, mu: T, rstd: T) -> tuple[T, T, T]:
    x_hat = (x - mu.reshape(1, N, 1)) * rstd.reshape(1, N, 1)
    dw, db = (dy * x_hat).sum(0, 2, keep=True), dy.sum(0, 2, keep=True)
    count = M * K
    dx = (w * rstd).reshape(1, N, 1) * (dy - db / count - x_hat * (dw / count))
    return dx, dw.reshape(N), db.reshape(N)


def affine_backward(dy: T, x: T, w: T, alpha: T) -> tuple[T, T, T, T]:
    t = (alpha.expand(NCX) * x).tanh()
    d = dy * w.reshape(1, N, 1) * (1.0 - t * t)
    return d * alpha.expand(NCX), (d * x).sum(), (dy * t).sum(0, 2), dy.sum(0, 2)


def poly_backward(dy: T, x: T, w0: T, w1: T, w2: T) -> tuple[T, T, T, T, T]:
    """Three norms of powers of one x; the sums over everything go on from those over a row."""
    dx, dw = None, []
    for power, w in ((3, w0), (2, w1), (1, w2)):
        p = {1: x, 2: x * x, 3: x * x * x}[power]
        rstd = ((p * p).mean(1, keep=True) + 1e-5).rsqrt()
        p_hat = p * rstd
        dw.append((dy * p_hat).sum())
        dp = w * rstd * (dy - p_hat * (dy * p_hat).mean(1, keep=True))
        slope = {1: dp, 2: dp * 2.0 * x, 3: dp * 3.0 * (x * x)}[power]
        dx = slope if dx is None else dx + slope
    assert dx is not None
    return dx, *dw, dy.sum()


def weighted_mean(x: T, w: T) -> tuple[T, T]:
    """The sum of the weights lacks an axis of what it divides."""
    total = w.sum(1, keep=True) + 9.0
    return (x * w.reshape(M, N, 1)).sum(1) / total, total.reshape(M)


def _gradients(body: Body, strides: tuple[Size, ...] | None, **small: Input) -> tuple[Body, dict[str, Input]]:
    large = {name: F(*NCX, strides=strides) for name in ("dy", "x")}
    return body, large | small


STATISTICS = {"mu": F(M, GROUPS, 1, 1), "rstd": F(M, GROUPS, 1, 1)}
PER_CHANNEL = {"mu": F(N), "rstd": F(N)}
CASES: dict[str, tuple[Body, dict[str, Input]]] = {
    "group forward": (group_forward, {"x": F(*NCX), "w": F(N), "b": F(N)}),
    "group backward": _gradients(group_backward, None, w=F(N), **STATISTICS),
    "group backward, channels last": _gradients(group_backward, LAST, w=F(N), **STATISTICS),
    "batch backward": _gradients(batch_backward, None, w=F(N), **PER_CHANNEL),
    "batch backward, channels last": _gradients(batch_backward, LAST, w=F(N), **PER_CHANNEL),
    "affine backward": _gradients(affine_backward, None, w=F(N), alpha=F(1)),
    "affine backward, channels last": _gradients(affine_backward, LAST, w=F(N), alpha=F(1)),
    "weighted mean": (weighted_mean, {"x": F(*NCX), "w": F(M, N)}),
    "poly backward": (poly_backward, {"dy": F(M, K), "x": F(M, K), "w0": F(1), "w1": F(1), "w2": F(1)}),
}


@pytest.mark.parametrize(
    ("sizes", "device"),
    [("odd", "whole"), ("odd", "chunked"), ("odd", "tree"), ("one", "whole"), ("wide", "chunked")],
)
@pytest.mark.parametrize("case", CASES)
def test_agrees(case: str, sizes: str, device: str) -> None:
    body, inputs = CASES[case]
    agree(body, SIZES[sizes], DEVICES[device], slack=40, **inputs)


LARGE = {
    "an image": {M: 32, N: 512, K: 4096},
    "small images": {M: 128, N: 1024, K: 49},
    "many pixels": {M: 64, N: 256, K: 16384},
}


READ_TWICE = {("batch backward, channels last", "many pixels")}
"""The shortest strip of channels that memory is read by is 67 MB of dy and x, more than the cache."""


@pytest.mark.parametrize("sizes", LARGE)
@pytest.mark.parametrize("case", CASES)
def test_moves_each_byte_once_in_one_kernel(case: str, sizes: str) -> None:
    kernels, times = _on_gpu(case, LARGE[sizes])
    assert len(kernels) == 1 and times < (1.7 if (case, sizes) in READ_TWICE else 1.1)


def _on_gpu(case: str, sizes: dict[sympy.Symbol, int]) -> tuple[tuple[Kernel, ...], float]:
    """The kernels for bf16 tensors at these sizes, and how often each byte moves."""
    body, inputs = CASES[case]
    low = {k: replace(i, dtype="bf16") if k in ("x", "dy") else i for k, i in inputs.items()}
    graph = graph_of(lambda *given: [_low(r) for r in body(*(t.to("f32") for t in given))], **low)
    kernels = generate(graph, target=TARGETS["cuda:90"], hints=sizes, name="body").kernels
    moved = sum(n for k in kernels for n in (*k.reads.values(), *k.writes.values()))
    return kernels, float(sympy.sympify(moved).subs(sizes) / sympy.sympify(minimal_bytes(graph)).subs(sizes))


def _low(result: T) -> T:
    """The gradient of a bf16 tensor."""
    return result.to("bf16") if len(result.shape) > 1 and result.shape[-1] != 1 else result
