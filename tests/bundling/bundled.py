"""Functions for bundles: every kind of output, mark and residual that a manifest speaks of."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Norm(Function):
    """Saves something that is neither an argument nor a result."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, eps: float) -> Any:
        rstd = (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, rstd)
        return x * rstd * weight

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight, rstd = ctx.saved_tensors
        n, wg = x * rstd, grad * weight
        return (wg - n * (wg * n).mean(-1, keepdim=True)) * rstd, (grad * n).sum(0), None


class Scaled(Function):
    """Keyword arguments and defaults; an argument as a result; a constant in and out; a deliberately wrong gradient."""

    @staticmethod
    def forward(x: Any, y: Any, scales: Any = (2.0, 0.5), name: str = "a") -> Any:
        return x, (x * scales[0] + y.sin()) * scales[1], (name, x.shape[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1], output[1])
        ctx.scales, ctx.y = inputs[2], inputs[1]

    @staticmethod
    def backward(ctx: Any, gx: Any, g: Any, _: Any) -> Any:
        y, out = ctx.saved_tensors
        a, b = ctx.scales
        return gx + 3 * g * a * b, g * b * y.cos() + 0 * out + 0 * ctx.y, None, None


class Partial(Function):
    """Without materialised gradients: each combination of them is a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        index = x.argmax(-1)
        ctx.mark_non_differentiable(index)
        return x.sin(), x.exp(), index

    @staticmethod
    def backward(ctx: Any, a: Any, b: Any, _: Any) -> Any:
        (x,) = ctx.saved_tensors
        if a is None:
            return b * x.exp() * 7
        return a * x.cos() if b is None else a * x.cos() + b * x.exp()


class Dirty(Function):
    """Writes into its argument, and returns it."""

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        ctx.mark_dirty(x)
        ctx.save_for_backward(y)
        return x.mul_(y)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * ctx.saved_tensors[0], None


class Viewed(Function):
    """A view of an argument, the same result twice, and no gradient for one result."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y, mask = x * 2, x > 0
        ctx.save_for_backward(mask)
        ctx.mark_non_differentiable(mask)
        return x[1:, ::2].t(), y, y, mask

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, a: Any, b: Any, c: Any, _: Any) -> Any:
        (mask,) = ctx.saved_tensors
        return (b + c) * mask + a.sum()


class Asks(Function):
    """What it returns depends on which gradients are asked for, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w if ctx.needs_input_grad[0] else None)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w.t() if ctx.needs_input_grad[0] else None, 2 * x.t() @ grad if x is not None else None


class OwnJvp(Function):
    """A jvp that is not the derivative: no other may stand in for it."""

    @staticmethod
    def forward(x: Any) -> Any:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * ctx.saved_tensors[0].cos()

    @staticmethod
    def jvp(ctx: Any, tangent: Any) -> Any:
        return tangent * 100


class Drawn(Function):
    """Something with a library call in it: a sort, and a padded slice."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        values, order = x.sort(dim=1)
        ctx.save_for_backward(order)
        return torch.nn.functional.pad(values[:, : x.shape[1] // 2], (1, 2))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (order,) = ctx.saved_tensors
        half = grad[:, 1 : 1 + order.shape[1] // 2]
        full = torch.cat([half, half.new_zeros(half.shape[0], order.shape[1] - half.shape[1])], 1)
        return torch.zeros_like(full).scatter(1, order, full)


class Halves(Function):
    """Results that show each other's memory, or that of something that nobody gets whole."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y, z = x * 2, x.sin()
        return y, y[1:], z[:2], z[2:].t()

    @staticmethod
    def backward(ctx: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        return 2 * a + torch.cat([a[:1], b]) + torch.cat([c, d.t()]) * 5


class Lazy(Function):
    """A result that is another view of an argument than strides can say."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view(torch.int32), x * 2

    @staticmethod
    def backward(ctx: Any, _: Any, grad: Any) -> Any:
        return grad * 2
