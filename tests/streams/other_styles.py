"""More styles, for the same tests: packed heads that are scaled first, masks that are added, a column that is padded.

Importing this module adds them to `STYLES` of many_styles.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from many_styles import INF, heads, rand, style
from torch.autograd import Function


@style(lambda b, h, n, d: (rand(b, n, 3, h, d),), 1, 2)
class PackedScaled(Function):
    """Queries, keys and values in one tensor, queries scaled before they are multiplied."""

    @staticmethod
    def forward(ctx, qkv):
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        p = torch.softmax((q * q.shape[-1] ** -0.5) @ k.mT, -1)
        ctx.save_for_backward(qkv, p)
        return (p @ v).transpose(1, 2).flatten(2)

    @staticmethod
    def backward(ctx, g):
        qkv, p = ctx.saved_tensors
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        b, n, _, h, d = qkv.shape
        g = g.reshape(b, n, h, d).transpose(1, 2)
        dp = g @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        return torch.stack([ds @ k * d**-0.5, ds.mT @ (q * d**-0.5), p.mT @ g]).permute(1, 3, 0, 2, 4)


@style(lambda b, h, n, d: (*heads(b, h, n, d), rand(h)), 1, 4)
class PaddedSink(Function):
    """A sink as one more column, for which the gradient of p is padded."""

    @staticmethod
    def forward(ctx, q, k, v, sinks):
        s = q @ k.mT * q.shape[-1] ** -0.5
        i = torch.arange(q.shape[-2], device=q.device)
        s = s.masked_fill((i[:, None] < i) | (i[:, None] - i >= 32), -INF)
        column = sinks.reshape(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[-2], 1)
        p = torch.softmax(torch.cat([s, column], -1), -1)
        ctx.save_for_backward(q, k, v, p)
        return p[..., :-1] @ v

    @staticmethod
    def backward(ctx, g):
        q, k, v, p = ctx.saved_tensors
        dp = F.pad(g @ v.mT, (0, 1))
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        da = ds[..., :-1] * q.shape[-1] ** -0.5
        return da @ k, da.mT @ q, p[..., :-1].mT @ g, ds[..., -1].sum((0, 2))


@style(lambda b, h, n, d: (rand(b, h, n, d), rand(b, 1, n, d), rand(b, 1, n, d)), 1, 4)
class AddedTriangle(Function):
    """A triangle of -inf is added; keys are repeated for the heads."""

    @staticmethod
    def forward(ctx, q, k, v):
        every = [t.repeat_interleave(q.shape[1], 1) for t in (k, v)]
        s = q @ every[0].mT * q.shape[-1] ** -0.5
        s = s + torch.full(s.shape[-2:], -INF, device=s.device, dtype=s.dtype).triu(1)
        p = s.softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        return p @ every[1]

    @staticmethod
    def backward(ctx, g):
        q, k, v, p = ctx.saved_tensors
        every = [t.repeat_interleave(q.shape[1], 1) for t in (k, v)]
        dp = g @ every[1].mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return ds @ every[0], (ds.mT @ q).sum(1, keepdim=True), (p.mT @ g).sum(1, keepdim=True)


def documents(b: int, h: int, n: int, d: int) -> tuple[torch.Tensor, ...]:
    return *heads(b, h, n, d), torch.sort(torch.randint(0, 4, (b, n)), -1).values


@style(documents, 2, 5)
class BatchesOfEach(Function):
    """Batches and heads are one axis, of each tensor by itself: that they agree is known of their product alone."""

    @staticmethod
    def forward(ctx, q, k, v, document):
        same = (document[:, :, None] == document[:, None])[:, None]
        bias = torch.zeros_like(same, dtype=q.dtype).masked_fill(~same, -1e9)
        bias = bias.expand(-1, q.shape[1], -1, -1).flatten(0, 1)
        s = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=q.shape[-1] ** -0.5)
        p = torch.softmax(s, -1)
        ctx.save_for_backward(q, k, v, p)
        return torch.bmm(p, v.flatten(0, 1)).view_as(q)

    @staticmethod
    def backward(ctx, g):
        q, k, v, p = ctx.saved_tensors
        q2, k2, v2, g2 = (t.flatten(0, 1) for t in (q, k, v, g))
        dp = g2 @ v2.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return (ds @ k2).view_as(q), (ds.mT @ q2).view_as(k), (p.mT @ g2).view_as(v), None


@style(lambda b, h, n, d: (*heads(b, h, n, d), rand(b, h, n)), 2, 4)
class Forgetting(Function):
    """Scores decay by a gate of each place: running sums before the scores, and of what is summed along either side."""

    @staticmethod
    def forward(ctx, q, k, v, gate):
        kept = F.logsigmoid(gate).cumsum(-1)
        i = torch.arange(q.shape[-2], device=q.device)
        s = q @ k.mT * q.shape[-1] ** -0.5 + kept[..., :, None] - kept[..., None, :]
        p = s.masked_fill(i > i[:, None], -INF).softmax(-1)
        ctx.save_for_backward(q, k, v, gate, p)
        return p @ v

    @staticmethod
    def backward(ctx, g):
        q, k, v, gate, p = ctx.saved_tensors
        dp = g @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        dkept = ds.sum(-1) - ds.sum(-2)
        dgate = dkept.flip(-1).cumsum(-1).flip(-1) * torch.sigmoid(-gate)
        return ds @ k * q.shape[-1] ** -0.5, ds.mT @ q * q.shape[-1] ** -0.5, p.mT @ g, dgate


def latents(b: int, h: int, n: int, d: int) -> tuple[torch.Tensor, ...]:
    return rand(b, n, 2 * d), rand(b, h, n, d), rand(h, 2 * d, d), rand(h, 2 * d, d)


@style(latents, 3, 12)
class LatentKeys(Function):
    """Keys and values of all heads are products with one latent vector a place: larger than it, smaller than scores."""

    @staticmethod
    def forward(ctx, c, q, wk, wv):
        k, v = (torch.einsum("bnl,hld->bhnd", c, w) for w in (wk, wv))
        p = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)
        out = p @ v
        ctx.save_for_backward(c, q, wk, wv, out)
        return out

    @staticmethod
    def backward(ctx, g):
        c, q, wk, wv, out = ctx.saved_tensors
        k, v = (torch.einsum("bnl,hld->bhnd", c, w) for w in (wk, wv))
        p = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)
        ds = p * (g @ v.mT - (g * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        dk, dv = ds.mT @ q, p.mT @ g
        dc = torch.einsum("bhnd,hld->bnl", dk, wk) + torch.einsum("bhnd,hld->bnl", dv, wv)
        return dc, ds @ k, *(torch.einsum("bnl,bhnd->hld", c, t) for t in (dk, dv))


@style(lambda b, h, n, d: (rand(b, n, d), rand(d, 2 * d), rand(b, n, 2 * d)), 2, 7)
class WideQueries(Function):
    """Queries are larger than what they are made of; so is what is summed with them."""

    @staticmethod
    def forward(ctx, x, w, y):
        ctx.save_for_backward(x, w, y)
        return torch.logsumexp(torch.tanh(x @ w) @ y.mT, -1)

    @staticmethod
    def backward(ctx, g):
        x, w, y = ctx.saved_tensors
        q = torch.tanh(x @ w)
        p = torch.softmax(q @ y.mT, -1) * g[..., None]
        dq = (p @ y) * (1 - q * q)
        return dq @ w.mT, torch.einsum("bnd,bne->de", x, dq), p.mT @ q


@style(lambda b, h, n, d: (rand(n, d), rand(n, d), rand(d, 2 * n)), 4, 4, usual=(1, 1, 4096, 64))
class Queue(Function):
    """InfoNCE with a queue of negatives: the positive is the first column of the logits, and the target of all rows."""

    @staticmethod
    def forward(ctx, q, k, queue):
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue], 1).float() / 4.0
        target = torch.zeros(logits.shape[0], dtype=torch.long, device=q.device)
        ctx.save_for_backward(q, k, queue, torch.logsumexp(logits, 1))
        return F.cross_entropy(logits, target)

    @staticmethod
    def backward(ctx, g):
        q, k, queue, lse = ctx.saved_tensors
        scale = g / (4.0 * q.shape[0])
        positive = (q * k).sum(1, keepdim=True).float() / 4.0
        dp = ((torch.exp(positive - lse[:, None]) - 1) * scale).to(q.dtype)
        dn = (torch.exp((q @ queue).float() / 4.0 - lse[:, None]) * scale).to(q.dtype)
        return dp * k + dn @ queue.T, dp * q, q.T @ dn
