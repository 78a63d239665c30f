"""Functions of sums over pairs that are no matmuls, with backwards by hand."""

from __future__ import annotations

import torch
from torch.autograd import Function

# mypy: disable-error-code="no-untyped-def, no-untyped-call, override, misc"


class Chamfer(Function):
    """The nearest of each of two clouds, with their places."""

    @staticmethod
    def forward(ctx, a, b):
        d = ((a[:, None] - b[None]) ** 2).sum(-1)
        (m, i), (n, j) = d.min(1), d.min(0)
        ctx.save_for_backward(a, b, i, j)
        ctx.mark_non_differentiable(i, j)
        return m.mean() + n.mean(), i, j

    @staticmethod
    def backward(ctx, g, *_):
        a, b, i, j = ctx.saved_tensors
        da, db = 2 * (a - b[i]) * (g / a.shape[0]), 2 * (b - a[j]) * (g / b.shape[0])
        return da.index_add(0, j, -db), db.index_add(0, i, -da)


class Density(Function):
    """log sum exp(-|a - b|^2), as in kernel density."""

    @staticmethod
    def forward(ctx, a, b):
        out = torch.logsumexp(-((a[:, None] - b[None]) ** 2).sum(-1), 1)
        ctx.save_for_backward(a, b, out)
        return out

    @staticmethod
    def backward(ctx, g):
        a, b, lse = ctx.saved_tensors
        apart = a[:, None] - b[None]
        p = torch.exp(-(apart**2).sum(-1) - lse[:, None])
        w = (-2 * p * g[:, None])[..., None] * apart
        return w.sum(1), -w.sum(0)


class Laplacian(Function):
    """A kernel of absolute differences, in both directions."""

    @staticmethod
    def forward(ctx, a, b):
        k = torch.exp((a[:, None] - b[None]).abs().sum(-1) / -2.0)
        ctx.save_for_backward(a, b)
        return torch.logsumexp(k, 0), k.softmax(1).amax(1)

    @staticmethod
    def backward(ctx, *_):
        return None, None


class Additive(Function):
    """Additive attention, as it is written with a vector of weights."""

    @staticmethod
    def forward(ctx, q, k, w, v):
        return torch.softmax(torch.tanh(q[:, :, None] + k[:, None]).matmul(w), -1) @ v

    @staticmethod
    def backward(ctx, *_):
        return None, None, None, None


class Chebyshev(Function):
    """The farthest by the largest difference, of points that are normed first."""

    @staticmethod
    def forward(ctx, a, b):
        a = a / a.norm(dim=-1, keepdim=True)
        d = (a[:, :, None] - b[:, None]).abs().amax(-1)
        m, i = d.max(2)
        ctx.mark_non_differentiable(i)
        return m, i

    @staticmethod
    def backward(ctx, *_):
        return None, None


class Returned(Function):
    """Distances are returned: they are in memory, whoever else reads them."""

    @staticmethod
    def forward(ctx, a, b):
        d = ((a[:, None] - b[None]) ** 2).sum(-1)
        return torch.logsumexp(-d, 1), d

    @staticmethod
    def backward(ctx, *_):
        return None, None
