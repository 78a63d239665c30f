"""Functions as users write them, for runs in many threads, processes and environments: all run on every backend."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

Tensor = torch.Tensor


class RMSNorm(Function):
    """setup_context style, a default argument, a second output without a gradient."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, eps: float = 1e-6) -> Any:
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return x * rstd * w, rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, _ = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, w, output[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Any) -> Any:
        x, w, rstd = ctx.saved_tensors
        x_hat, gw = x * rstd, dy * w
        mean = (gw * x_hat).mean(-1, keepdim=True)
        return (gw - x_hat * mean) * rstd, (dy * x_hat).sum(0), None


class Softmax(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        e = torch.exp(x - x.amax(-1, keepdim=True))
        y = e / e.sum(-1, keepdim=True)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y * (g - (g * y).sum(-1, keepdim=True))


class LayerNorm(Function):
    """Saves an intermediate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        rstd = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)
        x_hat = centred * rstd
        ctx.save_for_backward(x_hat, rstd, w)
        return x_hat * w + b

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x_hat, rstd, w = ctx.saved_tensors
        gw = g * w
        along, mean = (gw * x_hat).mean(-1, keepdim=True), gw.mean(-1, keepdim=True)
        return (gw - x_hat * along - mean) * rstd, (g * x_hat).sum(0), g.sum(0)


class SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        sig = torch.sigmoid(a)
        ctx.save_for_backward(a, b, sig)
        return a * sig * b

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        a, b, sig = ctx.saved_tensors
        return g * b * sig * (1 + a * (1 - sig)), g * a * sig


class Scale(Function):
    """A number that may be another at every call, kept on ctx; the gradient is deliberately twice too large."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return 2 * g * ctx.factor, None


class Centred(Function):
    """Sums along the first axis, keeps a size on ctx."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = x.shape[0]
        return x - x.sum(0, keepdim=True) / x.shape[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g - g.sum(0, keepdim=True) / ctx.rows


class StraightThrough(Function):
    """A gradient that is not the forward's derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() <= 1, g, torch.zeros_like(g))


class Opaque(Function):
    """Runs as written: it leaves the tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.top = x.max().item()
        return x / (1 + abs(ctx.top))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / (1 + abs(ctx.top))


def arguments(cls: type, rows: int, columns: int, seed: int = 0) -> tuple[Any, ...]:
    """Arguments for one of the classes: leaves that require grad, and the number of Scale."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, columns, generator=generator).requires_grad_() for _ in range(2))
    w, b = (torch.randn(columns, generator=generator).requires_grad_() for _ in range(2))
    known: dict[type, tuple[Any, ...]] = {RMSNorm: (x, w), LayerNorm: (x, w, b), SwiGLU: (x, y), Scale: (x, 0.5)}
    return known.get(cls, (x,))


ALL: tuple[Any, ...] = (RMSNorm, Softmax, LayerNorm, SwiGLU, Scale, Centred, StraightThrough, Opaque)


def first(result: Any) -> Tensor:
    """The output that has a gradient."""
    return result[0] if isinstance(result, tuple) else result


def run(cls: Any, args: tuple[Any, ...]) -> list[Any]:
    """The output, and the gradients of a call's tensors for a gradient that is not uniform."""
    y = first(cls.apply(*args))
    leaves = [a for a in args if isinstance(a, Tensor)]
    g = torch.linspace(-1, 2, y.numel()).view(y.shape)
    return [y.detach(), *torch.autograd.grad(y, leaves, g)]
