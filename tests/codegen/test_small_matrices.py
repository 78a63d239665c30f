"""Products of small matrices, as many as there are points: no call, but sums in the kernel of what is around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import fusegrad
from fusegrad.runtime.settings import config


def rotations(q: Tensor) -> Tensor:
    w, x, y, z = q.unbind(-1)
    rows = [
        1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y),
        2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x),
        2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y),
    ]  # fmt: skip
    return torch.stack(rows, -1).unflatten(-1, (3, 3))


class Covariances(Function):
    """R S S R^T of quaternions and scales, as Gaussians in space have them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, s: Tensor) -> Tensor:
        ctx.save_for_backward(q, s)
        m = rotations(q) * s[:, None]
        return m @ m.mT

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        q, s = ctx.saved_tensors
        r = rotations(q)
        gm = (g + g.mT) @ (r * s[:, None])
        gr = gm * s[:, None]
        w, x, y, z = (c[:, None, None] for c in q.unbind(-1))
        o = torch.zeros_like(w)
        parts = (
            ((o, -z, y), (z, o, -x), (-y, x, o)),
            ((o, y, z), (y, -2 * x, -w), (z, w, -2 * x)),
            ((-2 * y, x, w), (x, o, z), (-w, z, -2 * y)),
            ((-2 * z, -w, x), (w, -2 * z, y), (x, y, o)),
        )
        gq = [2 * sum(gr[:, i, j] * p[i][j][:, 0, 0] for i in range(3) for j in range(3)) for p in parts]
        return torch.stack(gq, -1), (gm * r).sum(1)


class Exponential(Function):
    """exp of skew matrices, and a gradient that reads single elements of a product."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        angle = w.norm(dim=-1, keepdim=True)[..., None] + 0.5
        z, (a, b, c) = torch.zeros_like(w[..., 0]), w.unbind(-1)
        k = torch.stack([z, -c, b, c, z, -a, -b, a, z], -1).view(*w.shape[:-1], 3, 3)
        r = torch.eye(3, dtype=w.dtype) + angle.sin() * k + angle.cos() * (k @ k)
        ctx.save_for_backward(r)
        return r

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (r,) = ctx.saved_tensors
        s = r.mT @ g
        return torch.stack([s[..., 2, 1] - s[..., 1, 2], s[..., 0, 2] - s[..., 2, 0], s[..., 1, 0] - s[..., 0, 1]], -1)


class Rodrigues(Function):
    """The rotation about a vector by its length, which every element of the matrix reads."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        angle = w.norm(dim=-1).clamp(min=1e-6)[:, None, None]
        a, b, c = (w / angle[..., 0]).unbind(-1)
        z = torch.zeros_like(a)
        k = torch.stack([z, -c, b, c, z, -a, -b, a, z], -1).reshape(-1, 3, 3)
        r = torch.eye(3, dtype=w.dtype) + angle.sin() * k + (1 - angle.cos()) * (k @ k)
        ctx.save_for_backward(w, r)
        return r

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        w, r = ctx.saved_tensors
        s = g @ r.mT
        v = torch.stack([s[:, 2, 1] - s[:, 1, 2], s[:, 0, 2] - s[:, 2, 0], s[:, 1, 0] - s[:, 0, 1]], -1)
        return v + 0.5 * torch.cross(w, v, dim=-1)


CASES = {"covariances": (Covariances, 4, 3), "exponential": (Exponential, 3), "rodrigues": (Rodrigues, 3)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_beside_eager(name: str, dtype: torch.dtype) -> None:
    cls, *widths = CASES[name]
    torch.manual_seed(0)
    args = [torch.randn(37, n).to(dtype).requires_grad_() for n in widths]
    exact = [a.detach().double().requires_grad_() for a in args]
    cotangent = torch.randn(3, 37, 3).to(dtype).transpose(0, 1)
    with config.patch(backend="interpret"):
        out = fusegrad.compile(cls).apply(*args)
        found = [out, *torch.autograd.grad(out, args, cotangent)]
    right = cls.apply(*exact)
    for a, b in zip(found, [right, *torch.autograd.grad(right, exact, cotangent.double())], strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).abs().max() <= (1e-5 if dtype == torch.float32 else 4e-2) * b.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_left_to_the_library(name: str) -> None:
    """Backward of covariances reads nine elements of a product, each of a sum of three, and sums it: two kernels."""
    cls, *widths = CASES[name]
    args = [torch.empty(100_000, n, device="meta", requires_grad=True) for n in widths]
    report = fusegrad.explain(fusegrad.compile(cls), *args, target="cuda:90")
    counts = {d: r.launch_count for d, r in report.directions.items()}
    assert counts == {"forward": 1, "backward": 2 if cls is Covariances else 1}
    assert all(k.kind == "triton" for k in report.kernels)
    assert not any("    row = tl.cast(" in k.source for k in report.kernels), "a program for each matrix"
