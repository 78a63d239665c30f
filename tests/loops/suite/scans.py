"""Sequence mixers: states of keys and values that decay, scanned along time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .table import gates, loop, rand

ANY = Any


def mamba(t: int, n: int) -> tuple[Tensor, ...]:
    a = -torch.rand(n, 16) - 0.1
    return rand(2, t, n), gates(2, t, n), a.requires_grad_(), rand(2, t, 16), rand(2, t, 16), rand(n)


@loop(mamba)
class SelectiveScan(Function):
    """Mamba's reference, 16 states: h = exp(delta * a) * h + delta * b * u; y = c . h + d * u."""

    @staticmethod
    def forward(ctx: ANY, u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        h, ys, hs = u.new_zeros(u.shape[0], *a.shape), [], []
        for t in range(u.shape[1]):
            decay = torch.exp(delta[:, t, :, None] * a)
            h = decay * h + (delta[:, t] * u[:, t])[..., None] * b[:, t, None]
            ys.append((h * c[:, t, None]).sum(-1) + d * u[:, t])
            hs.append(h)
        ctx.save_for_backward(u, delta, a, b, c, d, torch.stack(hs))
        return torch.stack(ys, dim=1)

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        u, delta, a, b, c, d, hs = ctx.saved_tensors
        gh, ga = torch.zeros_like(hs[0]), torch.zeros_like(hs[0])
        gu, gdelta, gb, gc = [], [], [], []
        for t in reversed(range(u.shape[1])):
            before = hs[t - 1] if t > 0 else torch.zeros_like(hs[0])
            decay = torch.exp(delta[:, t, :, None] * a)
            gh = gh + g[:, t, :, None] * c[:, t, None]
            gc.append((g[:, t, :, None] * hs[t]).sum(1))
            power = gh * before * decay
            ga = ga + power * delta[:, t, :, None]
            incoming = (gh * b[:, t, None]).sum(-1)
            gb.append((gh * (delta[:, t] * u[:, t])[..., None]).sum(1))
            gu.append(incoming * delta[:, t] + g[:, t] * d)
            gdelta.append((power * a).sum(-1) + incoming * u[:, t])
            gh = gh * decay
        gu, gdelta, gb, gc = (torch.stack(x[::-1], dim=1) for x in (gu, gdelta, gb, gc))
        return gu, gdelta, ga.sum(0), gb, gc, (g * u).sum((0, 1))


def rwkv(t: int, n: int) -> tuple[Tensor, ...]:
    return (-torch.rand(n) - 0.1).requires_grad_(), rand(n), rand(2, t, n), rand(2, t, n)


@loop(rwkv)
class WKV(Function):
    """wkv of RWKV-4, numerators and denominators over their running maximum (w: the decay, negative; u: the bonus)."""

    @staticmethod
    def forward(ctx: ANY, w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p, q = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0])
        o = torch.full_like(p, -1e38)
        ys = []
        for t in range(k.shape[1]):
            kt, vt = k[:, t], v[:, t]
            top = torch.maximum(o, u + kt)
            left, right = torch.exp(o - top), torch.exp(u + kt - top)
            ys.append((left * p + right * vt) / (left * q + right))
            top = torch.maximum(w + o, kt)
            left, right = torch.exp(w + o - top), torch.exp(kt - top)
            p, q, o = left * p + right * vt, left * q + right, top
        y = torch.stack(ys, dim=1)
        ctx.save_for_backward(w, u, k, v, y)
        return y

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        w, u, k, v, y = ctx.saved_tensors
        zero = torch.zeros_like(k[:, 0])
        p, q, dp, dq, o = zero, zero, zero, zero, torch.full_like(zero, -1e38)
        gw, gu, gk, gv, scaled, tops = zero, zero, [], [], [], []
        for t in range(k.shape[1]):
            kt, vt, yt = k[:, t], v[:, t], y[:, t]
            top = torch.maximum(o, u + kt)
            left, right = torch.exp(o - top), torch.exp(u + kt - top)
            per = g[:, t] / (left * q + right)
            gw = gw + per * left * (dp - yt * dq)
            bonus = per * right * (vt - yt)
            gu = gu + bonus
            gk.append(bonus)
            gv.append(per * right)
            scaled.append(per)
            tops.append(top)
            top = torch.maximum(w + o, kt)
            left, right = torch.exp(w + o - top), torch.exp(kt - top)
            dp, dq = left * (p + dp), left * (q + dq)
            p, q, o = left * p + right * vt, left * q + right, top
        gp, gq, o = zero, zero, torch.full_like(zero, -1e38)
        for t in reversed(range(k.shape[1])):
            kt, vt = k[:, t], v[:, t]
            near = torch.exp(kt + o)
            gk[t] = gk[t] + near * (gp * vt + gq)
            gv[t] = gv[t] + near * gp
            top = torch.maximum(w + o, -tops[t])
            left, right = torch.exp(w + o - top), torch.exp(-tops[t] - top)
            gp, gq, o = left * gp + right * scaled[t], left * gq - right * scaled[t] * y[:, t], top
        return gw.sum(0), gu.sum(0), torch.stack(gk, 1), torch.stack(gv, 1)


@loop(lambda t, n: (rand(2, t, n), rand(2, t, n), rand(2, t, n + 2)), launches=(1, 2))
class LinearAttention(Function):
    """A state of keys by values: s = s + k v.T; y = q . s. Backward makes the states again."""

    @staticmethod
    def forward(ctx: ANY, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s, ys = q.new_zeros(q.shape[0], k.shape[2], v.shape[2]), []
        for t in range(q.shape[1]):
            s = s + k[:, t, :, None] * v[:, t, None, :]
            ys.append((q[:, t, :, None] * s).sum(1))
        ctx.save_for_backward(q, k, v)
        return torch.stack(ys, dim=1)

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        q, k, v = ctx.saved_tensors
        s, gq = q.new_zeros(q.shape[0], k.shape[2], v.shape[2]), []
        for t in range(q.shape[1]):
            s = s + k[:, t, :, None] * v[:, t, None, :]
            gq.append((g[:, t, None, :] * s).sum(2))
        gs, gk, gv = torch.zeros_like(s), [], []
        for t in reversed(range(q.shape[1])):
            gs = gs + q[:, t, :, None] * g[:, t, None, :]
            gk.append((gs * v[:, t, None, :]).sum(2))
            gv.append((gs * k[:, t, :, None]).sum(1))
        return torch.stack(gq, 1), torch.stack(gk[::-1], 1), torch.stack(gv[::-1], 1)


@loop(lambda t, n: (rand(2, t, n), rand(2, t, n), rand(2, t, n), 0.9))
class Retention(Function):
    """The recurrent form of a retention: a state that decays by one number; all states are kept."""

    @staticmethod
    def forward(ctx: ANY, q: Tensor, k: Tensor, v: Tensor, decay: float) -> Tensor:
        s, ys, states = q.new_zeros(q.shape[0], k.shape[2], v.shape[2]), [], []
        for t in range(q.shape[1]):
            s = decay * s + k[:, t].unsqueeze(2) * v[:, t].unsqueeze(1)
            states.append(s)
            ys.append(torch.einsum("bk,bkv->bv", q[:, t], s))
        ctx.save_for_backward(q, k, v, torch.stack(states, 1))
        ctx.decay = decay
        return torch.stack(ys, 1)

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        q, k, v, states = ctx.saved_tensors
        gs, gk, gv = torch.zeros_like(states[:, 0]), [], []
        for t in reversed(range(q.shape[1])):
            gs = gs + q[:, t].unsqueeze(2) * g[:, t].unsqueeze(1)
            gk.append(torch.einsum("bkv,bv->bk", gs, v[:, t]))
            gv.append(torch.einsum("bkv,bk->bv", gs, k[:, t]))
            gs = ctx.decay * gs
        gq = torch.einsum("btv,btkv->btk", g, states)
        return gq, torch.stack(gk[::-1], 1), torch.stack(gv[::-1], 1), None


def unit_keys(t: int, n: int) -> tuple[Tensor, ...]:
    keys = torch.nn.functional.normalize(torch.randn(2, t, n), dim=-1).requires_grad_()
    return rand(2, t, n), keys, rand(2, t, n), gates(2, t)


@loop(unit_keys)
class DeltaRule(Function):
    """A state that corrects itself: e = v - s.T k; s = s + beta * k e.T; y = q . s"""

    @staticmethod
    def forward(ctx: ANY, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        s, ys, states = q.new_zeros(q.shape[0], k.shape[2], v.shape[2]), [], []
        for t in range(q.shape[1]):
            states.append(s)
            error = v[:, t] - (s * k[:, t, :, None]).sum(1)
            s = s + beta[:, t, None, None] * k[:, t, :, None] * error[:, None, :]
            ys.append((q[:, t, :, None] * s).sum(1))
        ctx.save_for_backward(q, k, v, beta, torch.stack(states))
        return torch.stack(ys, dim=1)

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        q, k, v, beta, states = ctx.saved_tensors
        gs = torch.zeros_like(states[0])
        gq, gk, gv, gbeta = [], [], [], []
        for t in reversed(range(q.shape[1])):
            s, kt, bt = states[t], k[:, t, :, None], beta[:, t, None]
            error = v[:, t] - (s * kt).sum(1)
            after = s + bt[..., None] * kt * error[:, None, :]
            gq.append((after * g[:, t, None, :]).sum(2))
            gs = gs + q[:, t, :, None] * g[:, t, None, :]
            along = (gs * kt).sum(1)
            gv.append(bt * along)
            gbeta.append((along * error).sum(1))
            gk.append(bt * ((gs * error[:, None, :]).sum(2) - (s * along[:, None, :]).sum(2)))
            gs = gs - bt[..., None] * kt * along[:, None, :]
        return tuple(torch.stack(x[::-1], 1) for x in (gq, gk, gv, gbeta))
