"""Forward and backward bodies of the usual Functions, as graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness import Input, K, M, N, T, cat, full, gather, iota, named, op, where

Body = tuple[Callable[..., Any], dict[str, Input]]
ROWS, WEIGHT, STATISTIC = Input("bf16", (M, N)), Input("bf16", (N,)), Input("f32", (M, 1))
EXACT, TARGET = Input("f32", (M, N)), Input("i64", (M,))


def rms_forward(x: T, w: T) -> tuple[T, T]:
    xf = x.to("f32")
    with named("rstd", "rstd = torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + 1e-6)", 2):
        rstd = ((xf * xf).mean(1, keep=True) + 1e-6).rsqrt()
    with named("y", "return (xf * rstd * w.float()).to(x.dtype), rstd", 3):
        return (xf * rstd * w.to("f32")).to("bf16"), rstd


def rms_backward(dy: T, x: T, w: T, rstd: T) -> tuple[T, T]:
    with named("x_hat", "x_hat = x.float() * rstd", 1):
        x_hat = x.to("f32") * rstd
    g = dy.to("f32")
    with named("gw", "gw = g * w.float()", 3):
        gw = g * w.to("f32")
    with named("c", "c = (gw * x_hat).mean(-1, keepdim=True)", 4):
        c = (gw * x_hat).mean(1, keep=True)
    with named("dx", "dx = ((gw - x_hat * c) * rstd).to(x.dtype)", 5):
        dx = ((gw - x_hat * c) * rstd).to("bf16")
    with named("dw", "dw = (g * x_hat).sum(0).to(w.dtype)", 6):
        return dx, (g * x_hat).sum(0).to("bf16")


def layer_forward(x: T, w: T, b: T) -> tuple[T, T, T]:
    xf = x.to("f32")
    mu = xf.mean(1, keep=True)
    centred = xf - mu
    rstd = ((centred * centred).mean(1, keep=True) + 1e-5).rsqrt()
    return (centred * rstd * w.to("f32") + b.to("f32")).to("bf16"), mu, rstd


def layer_backward(dy: T, x: T, w: T, mu: T, rstd: T) -> tuple[T, T, T]:
    x_hat, g = (x.to("f32") - mu) * rstd, dy.to("f32")
    gw = g * w.to("f32")
    c1, c2 = (gw * x_hat).mean(1, keep=True), gw.mean(1, keep=True)
    return ((gw - x_hat * c1 - c2) * rstd).to("bf16"), (g * x_hat).sum(0).to("bf16"), g.sum(0).to("bf16")


def softmax(x: T) -> T:
    xf = x.to("f32")
    with named("top", "top = x.float().amax(-1, keepdim=True)", 1):
        top = xf.amax(-1, keep=True)
    with named("e", "e = torch.exp(x.float() - top)", 2):
        e = (xf - top).exp()
    with named("y", "return (e / e.sum(-1, keepdim=True)).to(x.dtype)", 3):
        return (e / e.sum(-1, keep=True)).to("bf16")


def softmax_backward(g: T, y: T) -> T:
    gf, yf = g.to("f32"), y.to("f32")
    return (yf * (gf - (gf * yf).sum(1, keep=True))).to("bf16")


def causal_softmax(x: T) -> T:
    rows, columns = iota(M).reshape(M, 1), iota(N).reshape(1, N)
    seen = op("le", columns, rows).expand(x.shape)
    v = where(seen, x.to("f32"), float("-inf"))
    e = (v - v.amax(-1, keep=True)).exp()
    return (e / e.sum(-1, keep=True)).to("bf16")


def picked(x: T, label: T) -> T:
    return gather(x, iota(x.shape[0]), label, axes=(0, 1))


def cross_entropy(x: T, labels: T) -> tuple[T, T, T]:
    xf = x.to("f32")
    top = xf.amax(1, keep=True)
    total = (xf - top).exp().sum(1, keep=True)
    with named("valid", "valid = target != ignore_index", 3):
        valid = op("ne", labels, -100)
    with named("label", "label = torch.where(valid, target, 0)", 4):
        label = where(valid, labels, 0)
    with named("loss", "loss = total.log() + top - x.gather(1, label)", 5):
        loss = total.log().reshape(M) + top.reshape(M) - picked(xf, label)
        loss = where(valid, loss, 0.0).sum(0)
    with named("count", "count = valid.float().sum()", 6):
        count = valid.to("f32").sum(0)
    p = (xf - top).exp() / total
    hot = op("eq", iota(N).reshape(1, N), label.reshape(M, 1))
    with named("dx", "dx = torch.where(valid, torch.where(hot, p - 1, p), 0)", 7):
        dx = where(valid.reshape(M, 1).expand(x.shape), where(hot, p - 1.0, p), 0.0)
        return loss, count, dx.to("bf16")


def cross_entropy_full(x: T, t: T) -> tuple[T, T]:
    """Label smoothing, z-loss and soft cap."""
    th = (x.to("f32") / 30.0).tanh()
    v = 30.0 * th
    top = v.amax(1, keep=True)
    total = (v - top).exp().sum(1, keep=True)
    lse = total.log() + top
    l1 = lse.reshape(M)
    loss = 0.9 * (l1 - picked(v, t)) + 0.1 * (l1 - v.mean(1)) + 1e-4 * l1 * l1
    hot = op("eq", iota(N).reshape(1, N), t.reshape(M, 1))
    dv = (v - top).exp() / total * (1 + 2e-4 * lse) - where(hot, full(0.9, x.shape, "f32"), 0.0) - 0.1 / N
    return loss.sum(0), (dv * (1 - th * th)).to("bf16")


def swiglu(a: T, b: T) -> T:
    af = a.to("f32")
    with named("y", "return (F.silu(a.float()) * b.float()).to(a.dtype)", 1):
        return (af * af.sigmoid() * b.to("f32")).to("bf16")


def swiglu_backward(g: T, a: T, b: T) -> tuple[T, T]:
    gf, af = g.to("f32"), a.to("f32")
    s = af.sigmoid()
    return (gf * b.to("f32") * (s * (1 + af * (1 - s)))).to("bf16"), (gf * af * s).to("bf16")


def dyt_backward(g: T, x: T, alpha: T, w: T) -> tuple[T, T, T, T]:
    gf, xf = g.to("f32"), x.to("f32")
    t = (alpha * xf).tanh()
    d = gf * w * (1 - t * t)
    return (d * alpha).to("bf16"), (d * xf).sum(), (gf * t).sum(0), gf.sum(0)


def gelu_backward(g: T, x: T, b: T) -> tuple[T, T]:
    z = x.to("f32") + b.to("f32")
    t = (0.7978845608 * (z + 0.044715 * z * z * z)).tanh()
    d = 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * 0.7978845608 * (1 + 3 * 0.044715 * z * z)
    dx = g.to("f32") * d
    return dx.to("bf16"), dx.sum(0).to("bf16")


GROUPS, CHANNELS, PIXELS = 8, 32, 9
IMAGE, CHANNEL, GROUP = Input("bf16", (M, CHANNELS, PIXELS)), Input("bf16", (CHANNELS,)), Input("f32", (M, GROUPS, 1))


def group_forward(x: T, w: T, b: T) -> tuple[T, T, T]:
    n, c, h = x.shape
    xf = x.to("f32").reshape(n, GROUPS, c // GROUPS * h)
    mu = xf.mean(2, keep=True)
    centred = xf - mu
    rstd = ((centred * centred).mean(2, keep=True) + 1e-5).rsqrt()
    y = (centred * rstd).reshape(n, c, h) * w.to("f32").reshape(1, c, 1) + b.to("f32").reshape(1, c, 1)
    return y.to("bf16"), mu, rstd


def group_backward(dy: T, x: T, w: T, mu: T, rstd: T) -> tuple[T, T, T]:
    n, c, h = x.shape
    grouped = (n, GROUPS, c // GROUPS * h)
    x_hat, g = (x.to("f32").reshape(*grouped) - mu) * rstd, dy.to("f32")
    gw = (g * w.to("f32").reshape(1, c, 1)).reshape(*grouped)
    c1, c2 = (gw * x_hat).mean(2, keep=True), gw.mean(2, keep=True)
    dx = ((gw - x_hat * c1 - c2) * rstd).reshape(n, c, h)
    return dx.to("bf16"), (g * x_hat.reshape(n, c, h)).sum(0, 2).to("bf16"), g.sum(0, 2).to("bf16")


def halves(q: T) -> tuple[T, T]:
    h, qf = q.shape[-1] // 2, q.to("f32")
    return qf[:, :, :, slice(0, h)], qf[:, :, :, slice(h, 2 * h)]


def rope(q: T, cos: T, sin: T) -> T:
    with named("out", "out = torch.cat([q1 * cos - q2 * sin, q2 * cos + q1 * sin], -1)", 1):
        q1, q2 = halves(q)
        return cat([q1 * cos - q2 * sin, q2 * cos + q1 * sin], -1).to("bf16")


def rotate_half(q: T, cos: T, sin: T) -> T:
    q1, q2 = halves(q)
    return (q.to("f32") * cos + cat([-q2, q1], -1) * sin).to("bf16")


def column_softmax(x: T) -> T:
    xf = x.to("f32")
    e = (xf - xf.amax(0, keep=True)).exp()
    return (e / e.sum(0, keep=True)).to("bf16")


def add_rms(x: T, residual: T, w: T) -> tuple[T, T, T]:
    h = x + residual
    hf = h.to("f32")
    rstd = ((hf * hf).mean(1, keep=True) + 1e-6).rsqrt()
    return (hf * rstd * w.to("f32")).to("bf16"), h, rstd


def kl(a: T, b: T) -> T:
    return (a.exp() * (a - b)).sum(1)


def jsd(x: T, y: T) -> tuple[T, T]:
    q, p = x.exp(), y.exp()
    m = (0.5 * (p + q)).log()
    return (0.5 * (p * (y - m) + q * (x - m))).sum(), 0.5 * q * (x - m)


QUERY = Input("bf16", (2, M, 3, 16))
def lookup(x: T, index: T) -> T:
    """x[index] * 2: rows, counted from the end where the index is negative."""
    rows = x.shape[0]
    wrapped = where(op("lt", index, 0), op("add", index, full(rows, index.shape, "i64")), index)
    with named("y", "y = x[index] * 2", 2):
        checked = op("check_index", wrapped, full(rows, index.shape, "i64"))
        return gather(x, checked, axes=(0,)) * 2.0


BODIES: dict[str, Body] = {
    "rms_forward": (rms_forward, {"x": ROWS, "w": WEIGHT}),
    "rms_backward": (rms_backward, {"dy": ROWS, "x": ROWS, "w": WEIGHT, "rstd": STATISTIC}),
    "layer_forward": (layer_forward, {"x": ROWS, "w": WEIGHT, "b": WEIGHT}),
    "layer_backward": (layer_backward, {"dy": ROWS, "x": ROWS, "w": WEIGHT, "mu": STATISTIC, "rstd": STATISTIC}),
    "softmax": (softmax, {"x": ROWS}),
    "softmax_backward": (softmax_backward, {"g": ROWS, "y": ROWS}),
    "causal_softmax": (causal_softmax, {"x": Input("bf16", (K, M, N))}),
    "cross_entropy": (cross_entropy, {"x": ROWS, "labels": TARGET}),
    "cross_entropy_full": (cross_entropy_full, {"x": ROWS, "t": TARGET}),
    "swiglu": (swiglu, {"a": IMAGE, "b": IMAGE}),
    "swiglu_backward": (swiglu_backward, {"g": IMAGE, "a": IMAGE, "b": IMAGE}),
    "dyt_backward": (dyt_backward, {"g": ROWS, "x": ROWS, "alpha": Input("f32", ()), "w": Input("f32", (N,))}),
    "gelu_backward": (gelu_backward, {"g": ROWS, "x": ROWS, "b": WEIGHT}),
    "group_forward": (group_forward, {"x": IMAGE, "w": CHANNEL, "b": CHANNEL}),
    "group_backward": (group_backward, {"dy": IMAGE, "x": IMAGE, "w": CHANNEL, "mu": GROUP, "rstd": GROUP}),
    "rope": (rope, {"q": QUERY, "cos": Input("f32", (M, 1, 8)), "sin": Input("f32", (M, 1, 8))}),
    "rotate_half": (rotate_half, {"q": QUERY, "cos": Input("f32", (M, 1, 16)), "sin": Input("f32", (M, 1, 16))}),
    "column_softmax": (column_softmax, {"x": ROWS}),
    "add_rms": (add_rms, {"x": ROWS, "residual": ROWS, "w": WEIGHT}),
    "lookup": (lookup, {"x": ROWS, "index": Input("i64", (K,))}),
    "kl": (kl, {"a": EXACT, "b": EXACT}),
    "jsd": (jsd, {"x": EXACT, "y": EXACT}),
}
