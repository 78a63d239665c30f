"""Losses behind linear layers, as users write them in plain PyTorch: what fills memory with logits."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.autograd import Function

sys.path.insert(0, str(Path(__file__).parents[1] / "streams"))
from stream_functions import Case, Tensor, named, rand

LOSSES: list[Case] = [named("LinearCrossEntropy")]
IGNORED = -100


def loss(make):  # type: ignore[no-untyped-def]
    def register(cls: type) -> type:
        LOSSES.append(Case(cls, make))
        return cls

    return register


def labels(n: int, classes: int, ignored: float = 0.0) -> Tensor:
    target = torch.randint(0, classes, (n,))
    return torch.where(torch.rand(n) < ignored, IGNORED, target)


def wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def one_hot(target: Tensor, classes: int) -> Tensor:
    return torch.arange(classes, device=target.device)[None, :] == target[:, None]


@loss(lambda n, d: (rand(n, d), rand(3 * n, d), rand(3 * n), labels(n, 3 * n)))
class Bias(Function):
    """Logits have a bias; each row has its own gradient."""

    @staticmethod
    def forward(ctx, x, w, b, target):
        z = F.linear(x, w, b)
        lse = torch.logsumexp(z, -1)
        ctx.save_for_backward(x, w, b, target, lse)
        return lse - z.gather(1, target[:, None])[:, 0]

    @staticmethod
    def backward(ctx, g):
        x, w, b, target, lse = ctx.saved_tensors
        p = torch.exp(F.linear(x, w, b) - lse[:, None])
        dz = (p - one_hot(target, w.shape[0]).to(p.dtype)) * g[:, None]
        return dz @ w, dz.mT @ x, dz.sum(0), None


@loss(lambda n, d: (rand(n, d), rand(3 * n, d), labels(n, 3 * n, ignored=0.3)))
class IgnoreIndex(Function):
    """The mean over the rows that count, whose number is data."""

    @staticmethod
    def forward(ctx, x, w, target):
        counts = target != IGNORED
        n = counts.sum().clamp_min(1)
        z = wide(x @ w.mT)
        lse = torch.logsumexp(z, -1)
        picked = z.gather(1, torch.where(counts, target, 0)[:, None])[:, 0]
        ctx.save_for_backward(x, w, target, lse, n)
        return torch.where(counts, lse - picked, 0.0).sum() / n

    @staticmethod
    def backward(ctx, g):
        x, w, target, lse, n = ctx.saved_tensors
        scale = torch.where(target != IGNORED, g / n, 0.0)[:, None]
        p = torch.exp(wide(x @ w.mT) - lse[:, None])
        dz = ((p - one_hot(target, w.shape[0]).to(p.dtype)) * scale).to(x.dtype)
        return dz @ w, dz.mT @ x, None


@loss(lambda n, d: (rand(n, d), rand(3 * n, d), labels(n, 3 * n, ignored=0.2), 0.1, 1e-2))
class Smoothed(Function):
    """Label smoothing and a z-loss, the mean over the rows that count."""

    @staticmethod
    def forward(ctx, x, w, target, smoothing, z_loss):
        counts = target != IGNORED
        n = counts.sum().clamp_min(1)
        z = wide(x @ w.mT)
        lse = torch.logsumexp(z, -1)
        picked = z.gather(1, torch.where(counts, target, 0)[:, None])[:, 0]
        row = lse - (1 - smoothing) * picked - smoothing * z.mean(-1) + z_loss * lse * lse
        ctx.save_for_backward(x, w, target)
        ctx.smoothing, ctx.z_loss = smoothing, z_loss
        return torch.where(counts, row, 0.0).sum() / n

    @staticmethod
    def backward(ctx, g):
        x, w, target = ctx.saved_tensors
        counts = target != IGNORED
        scale = torch.where(counts, g / counts.sum().clamp_min(1), 0.0)[:, None]
        z = wide(x @ w.mT)
        lse = torch.logsumexp(z, -1, keepdim=True)
        p = torch.exp(z - lse) * (1 + 2 * ctx.z_loss * lse)
        hot = one_hot(target, w.shape[0]).to(z.dtype)
        dz = ((p - (1 - ctx.smoothing) * hot - ctx.smoothing / w.shape[0]) * scale).to(x.dtype)
        return dz @ w, dz.mT @ x, None, None, None


@loss(lambda n, d: (rand(n, d), rand(3 * n, d), labels(n, 3 * n), 5.0))
class Softcapped(Function):
    """Logits are capped by a tanh."""

    @staticmethod
    def capped(x, w, cap):
        return torch.tanh(wide(x @ w.mT) / cap)

    @staticmethod
    def forward(ctx, x, w, target, cap):
        z = Softcapped.capped(x, w, cap) * cap
        ctx.save_for_backward(x, w, target)
        ctx.cap = cap
        return (torch.logsumexp(z, -1) - z.gather(1, target[:, None])[:, 0]).sum()

    @staticmethod
    def backward(ctx, g):
        x, w, target = ctx.saved_tensors
        t = Softcapped.capped(x, w, ctx.cap)
        p = torch.softmax(t * ctx.cap, -1)
        dz = ((p - one_hot(target, w.shape[0]).to(p.dtype)) * (1 - t * t) * g).to(x.dtype)
        return dz @ w, dz.mT @ x, None, None


@loss(lambda n, d: (rand(n, d), rand(3 * n, d), rand(n, d), rand(3 * n, d), 2.0))
class Distillation(Function):
    """The divergence of a student's distribution from a teacher's, of two linear layers; the teacher is fixed."""

    @staticmethod
    def distributions(x, w, t, v, temperature):
        student = torch.log_softmax(wide(x @ w.mT) / temperature, -1)
        teacher = torch.log_softmax(wide(t @ v.mT) / temperature, -1)
        return student, teacher

    @staticmethod
    def forward(ctx, x, w, t, v, temperature):
        student, teacher = Distillation.distributions(x, w, t, v, temperature)
        ctx.save_for_backward(x, w, t, v)
        ctx.temperature = temperature
        return (torch.exp(teacher) * (teacher - student)).sum(-1).mean()

    @staticmethod
    def backward(ctx, g):
        x, w, t, v = ctx.saved_tensors
        student, teacher = Distillation.distributions(x, w, t, v, ctx.temperature)
        scale = g / (x.shape[0] * ctx.temperature)
        dz = ((torch.exp(student) - torch.exp(teacher)) * scale).to(x.dtype)
        return dz @ w, dz.mT @ x, None, None, None


@loss(lambda n, d: (rand(n, 3, d), rand(n, 3, d), rand(3 * n, d), *torch.randint(0, 3 * n, (2, n, 3)), 0.5))
class Preference(Function):
    """The likelihood that one sequence is preferred to another, by the log-probabilities of both."""

    @staticmethod
    def log_probability(x, w, target):
        z = wide(x @ w.mT)
        return (z.gather(-1, target[..., None])[..., 0] - torch.logsumexp(z, -1)).sum(-1)

    @staticmethod
    def forward(ctx, chosen, rejected, w, c, r, beta):
        margin = Preference.log_probability(chosen, w, c) - Preference.log_probability(rejected, w, r)
        ctx.save_for_backward(chosen, rejected, w, c, r, margin)
        ctx.beta = beta
        return -F.logsigmoid(beta * margin).mean()

    @staticmethod
    def gradient(x, w, target, slope):
        p = torch.softmax(wide(x @ w.mT), -1)
        hot = (torch.arange(w.shape[0], device=x.device) == target[..., None]).to(p.dtype)
        return ((hot - p) * slope[:, None, None]).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        chosen, rejected, w, c, r, margin = ctx.saved_tensors
        slope = -torch.sigmoid(-ctx.beta * margin) * (ctx.beta * g / margin.shape[0])
        dc, dr = Preference.gradient(chosen, w, c, slope), Preference.gradient(rejected, w, r, -slope)
        dw = torch.einsum("bnv,bnh->vh", dc, chosen) + torch.einsum("bnv,bnh->vh", dr, rejected)
        return dc @ w, dr @ w, dw, None, None, None


@loss(lambda n, d: (rand(n, d), rand(3 * n, d), labels(n, 3 * n)))
class InForward(Function):
    """Forward computes both gradients, and backward multiplies them: as Liger has it."""

    @staticmethod
    def forward(ctx, x, w, target):
        z = wide(x @ w.mT)
        lse = torch.logsumexp(z, -1, keepdim=True)
        hot = one_hot(target, w.shape[0])
        dz = ((torch.exp(z - lse) - hot.to(z.dtype)) / x.shape[0]).to(x.dtype)
        ctx.save_for_backward(dz @ w, dz.mT @ x)
        return (lse[:, 0] - z.gather(1, target[:, None])[:, 0]).mean()

    @staticmethod
    def backward(ctx, g):
        dx, dw = ctx.saved_tensors
        return dx * g, dw * g, None


@loss(lambda n, d: (rand(2, n, d), rand(3 * n, d), torch.randint(0, 3 * n, (2, n))))
class Batched(Function):
    """Tokens have two axes, which are one for the product."""

    @staticmethod
    def forward(ctx, x, w, target):
        rows, t = x.reshape(-1, x.shape[-1]), target.reshape(-1)
        z = rows @ w.mT
        ctx.save_for_backward(x, w, target)
        return (torch.logsumexp(z, -1) - z.gather(1, t[:, None])[:, 0]).mean()

    @staticmethod
    def backward(ctx, g):
        x, w, target = ctx.saved_tensors
        rows, t = x.reshape(-1, x.shape[-1]), target.reshape(-1)
        p = torch.softmax(rows @ w.mT, -1)
        dz = (p - one_hot(t, w.shape[0]).to(p.dtype)) * (g / rows.shape[0])
        return (dz @ w).reshape(x.shape), dz.mT @ rows, None


@loss(lambda n, d: (rand(n, d), rand(3 * n, d), labels(n, 3 * n)))
class SavedLogits(Function):
    """The logits are saved for backward, which makes nothing again."""

    @staticmethod
    def forward(ctx, x, w, target):
        z = x @ w.mT
        ctx.save_for_backward(x, w, target, z)
        return (torch.logsumexp(z, -1) - z.gather(1, target[:, None])[:, 0]).mean()

    @staticmethod
    def backward(ctx, g):
        x, w, target, z = ctx.saved_tensors
        p = torch.softmax(z, -1)
        dz = (p - one_hot(target, w.shape[0]).to(p.dtype)) * (g / x.shape[0])
        return dz @ w, dz.mT @ x, None
