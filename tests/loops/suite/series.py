"""Filters of time series and returns of rewards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..recurrences import MovingAverage
from .table import gates, loop, rand

ANY = Any


loop(lambda t, n: (rand(t, n), 0.9))(MovingAverage)


@loop(lambda t, n: (rand(t, n), rand(n), 0.99))
class DiscountedReturns(Function):
    """r[t] + gamma * (what follows), from a value behind the end."""

    @staticmethod
    def forward(ctx: ANY, rewards: Tensor, last: Tensor, gamma: float) -> Tensor:
        ctx.gamma = gamma
        value, returns = last, []
        for r in reversed(rewards):
            value = r + gamma * value
            returns.insert(0, value)
        return torch.stack(returns)

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        carry, grads = torch.zeros_like(g[0]), []
        for t in range(len(g)):
            carry = g[t] + ctx.gamma * carry
            grads.append(carry)
        return torch.stack(grads), ctx.gamma * carry, None


@loop(lambda t, n: (rand(t, n), rand(t + 1, n), (torch.rand(t, n) < 0.1).float(), 0.99, 0.95))
class Advantages(Function):
    """Generalised advantage estimation with ends of episodes."""

    @staticmethod
    def forward(ctx: ANY, rewards: Tensor, values: Tensor, dones: Tensor, gamma: float, lam: float) -> Tensor:
        ctx.gamma, ctx.lam = gamma, lam
        ctx.save_for_backward(dones)
        advantages = torch.zeros_like(rewards)
        last = torch.zeros_like(rewards[0])
        for t in reversed(range(rewards.shape[0])):
            alive = 1.0 - dones[t]
            delta = rewards[t] + gamma * values[t + 1] * alive - values[t]
            last = delta + gamma * lam * alive * last
            advantages[t] = last
        return advantages

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        (dones,) = ctx.saved_tensors
        alive = 1.0 - dones
        carry, deltas = torch.zeros_like(g[0]), []
        for t in range(g.shape[0]):
            before = alive[t - 1] if t > 0 else torch.zeros_like(carry)
            carry = g[t] + ctx.gamma * ctx.lam * before * carry
            deltas.append(carry)
        d = torch.stack(deltas)
        zero = torch.zeros_like(d[:1])
        later = torch.cat([zero, ctx.gamma * alive * d])
        return d, later - torch.cat([d, zero]), None, None, None


@loop(lambda t, n: (rand(t, n), 0.3, 0.1), shortest=2)
class HoltWinters(Function):
    """Double exponential smoothing: a level and a trend; forecasts of one step ahead."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, alpha: float, beta: float) -> Tensor:
        ctx.alpha, ctx.beta = alpha, beta
        level, trend = x[0], x[1] - x[0]
        out = []
        for t in range(x.shape[0]):
            before = level
            level = alpha * x[t] + (1 - alpha) * (level + trend)
            trend = beta * (level - before) + (1 - beta) * trend
            out.append(level + trend)
        return torch.stack(out)

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        alpha, beta = ctx.alpha, ctx.beta
        gl, gt, grads = torch.zeros_like(g[0]), torch.zeros_like(g[0]), []
        for t in range(g.shape[0] - 1, -1, -1):
            gl, gt = gl + g[t], gt + g[t]
            new = gl + beta * gt
            grads.append(alpha * new)
            gl, gt = (1 - alpha) * new - beta * gt, (1 - alpha) * new + (1 - beta) * gt
        gx = torch.stack(grads[::-1])
        first = torch.stack([gl - gt, gt])
        return torch.cat([gx[:2] + first, gx[2:]]), None, None


@loop(lambda t, n: (rand(2, t, n), gates(n)))
class LeakyPool(Function):
    """A mean of what was seen, with a leak of its own for each channel; the last one is returned."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, leak: Tensor) -> Tensor:
        total, weight = torch.zeros_like(x[:, 0]), torch.zeros_like(leak)
        totals = []
        for t in range(x.shape[1]):
            totals.append(total)
            total = total * leak + x[:, t]
            weight = weight * leak + 1
        ctx.save_for_backward(x, leak, torch.stack(totals, 1), total, weight)
        return total / weight

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        x, leak, totals, total, weight = ctx.saved_tensors
        gt, gw = g / weight, -(g * total).sum(0) / (weight * weight)
        gx, gleak = [], torch.zeros_like(leak)
        for t in range(x.shape[1] - 1, -1, -1):
            gx.append(gt)
            gleak = gleak + (gt * totals[:, t]).sum(0)
            gt = gt * leak
        before, slope = torch.zeros_like(leak), torch.zeros_like(leak)
        for _ in range(x.shape[1]):
            slope = slope * leak + before
            before = before * leak + 1
        return torch.stack(gx[::-1], 1), gleak + gw * slope


@loop(lambda t, n: (rand(3, t), torch.rand(3, t) > 0.8))
class ResettingMaximum(Function):
    """A cumulative maximum along the last axis that starts again where it is told."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, reset: Tensor) -> Tensor:
        m, out, taken = x[:, 0], [x[:, 0]], [torch.ones_like(x[:, 0], dtype=torch.bool)]
        for t in range(1, x.size(1)):
            new = reset[:, t] | (x[:, t] > m)
            m = torch.where(new, x[:, t], m)
            taken.append(new)
            out.append(m)
        ctx.save_for_backward(torch.stack(taken, -1))
        return torch.stack(out, -1)

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        (taken,) = ctx.saved_tensors
        carry, grads = torch.zeros_like(g[:, 0]), []
        for t in range(g.shape[1] - 1, -1, -1):
            carry = carry + g[:, t]
            grads.append(torch.where(taken[:, t], carry, 0))
            carry = torch.where(taken[:, t], 0, carry)
        return torch.stack(grads[::-1], -1), None


def measured(t: int, n: int) -> tuple[Tensor, ...]:
    return rand(t, n), (torch.rand(n) + 0.5).requires_grad_(), (torch.rand(n) + 0.5).requires_grad_()


@loop(measured)
class Kalman(Function):
    """A filter of one dimension for each of n series: q, the noise of the process, r, that of what is measured."""

    @staticmethod
    def forward(ctx: ANY, z: Tensor, q: Tensor, r: Tensor) -> Tensor:
        mean, p = torch.zeros_like(q), torch.ones_like(q)
        means, gains = [], []
        for t in range(z.shape[0]):
            p = p + q
            k = p / (p + r)
            mean = mean + k * (z[t] - mean)
            p = (1 - k) * p
            means.append(mean)
            gains.append(k)
        out = torch.stack(means)
        ctx.save_for_backward(z, r, out, torch.stack(gains))
        return out

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        z, r, means, gains = ctx.saved_tensors
        gm, gp, gq, gr = (torch.zeros_like(r) for _ in range(4))
        gz = []
        for t in reversed(range(z.shape[0])):
            k = gains[t]
            before = means[t - 1] if t > 0 else torch.zeros_like(r)
            p = k * r / (1 - k)
            gm = gm + g[t]
            gk = gm * (z[t] - before) - gp * p
            gz.append(gm * k)
            gm = gm * (1 - k)
            total = (p + r) * (p + r)
            gp = gp * (1 - k) + gk * r / total
            gr = gr - gk * p / total
            gq = gq + gp
        return torch.stack(gz[::-1]), gq, gr


@loop(lambda t, n: (rand(t, 2, n), rand(t, 2, n), rand(n), gates(n)))
class Oscillators(Function):
    """States that turn by an angle and decay, in real numbers: (re, im) = decay * exp(i * angle) * (re, im) + x."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, y: Tensor, angle: Tensor, decay: Tensor) -> ANY:
        cos, sin = decay * torch.cos(angle), decay * torch.sin(angle)
        re, im = torch.zeros_like(x[0]), torch.zeros_like(x[0])
        res, ims = [], []
        for xt, yt in zip(x, y, strict=True):
            re, im = cos * re - sin * im + xt, sin * re + cos * im + yt
            res.append(re)
            ims.append(im)
        res, ims = torch.stack(res), torch.stack(ims)
        ctx.save_for_backward(angle, decay, res, ims)
        return res, ims

    @staticmethod
    def backward(ctx: ANY, gres: Tensor, gims: Tensor) -> ANY:
        angle, decay, res, ims = ctx.saved_tensors
        cos, sin = decay * torch.cos(angle), decay * torch.sin(angle)
        zero = torch.zeros_like(gres[0])
        gre, gim, gcos, gsin, gx, gy = zero, zero, torch.zeros_like(cos), torch.zeros_like(cos), [], []
        for t in reversed(range(len(gres))):
            gre, gim = gre + gres[t], gim + gims[t]
            gx.append(gre)
            gy.append(gim)
            re, im = (res[t - 1], ims[t - 1]) if t > 0 else (zero, zero)
            gcos = gcos + (gre * re + gim * im).sum(0)
            gsin = gsin + (gim * re - gre * im).sum(0)
            gre, gim = cos * gre + sin * gim, cos * gim - sin * gre
        gangle = gsin * cos - gcos * sin
        gdecay = gcos * torch.cos(angle) + gsin * torch.sin(angle)
        return torch.stack(gx[::-1]), torch.stack(gy[::-1]), gangle, gdecay
