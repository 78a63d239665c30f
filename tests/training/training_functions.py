"""Functions of every kind that training code holds, all called with rows `x` [4, 6] and a weight `w` [6]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import Function

Tensor = torch.Tensor


class Gate(Function):
    """Elementwise, with a gradient that is summed to the weight."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * torch.sigmoid(x * w)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        s = torch.sigmoid(x * w)
        slope = g * x * s * (1 - s)
        return g * s + slope * w, (slope * x).sum(0)


class Norm(Function):
    """setup_context style, a number, and a value that forward returns for backward alone."""

    @staticmethod
    def forward(x, w, eps=1e-5):
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return x * rstd * w, rstd

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, w, _ = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, w, output[1])

    @staticmethod
    def backward(ctx, g, _):
        x, w, rstd = ctx.saved_tensors
        normed = x * rstd
        gw = g * w
        return rstd * (gw - normed * (gw * normed).mean(-1, keepdim=True)), (g * normed).sum(0), None


class Product(Function):
    """A matrix product: autocast has a say, and the gradients have the dtypes of the arguments."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.outer(w)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        outer = x.t() @ g.to(x.dtype)
        return g.to(x.dtype) @ w.outer(w), outer @ w + outer.t() @ w


class Amp(Function):
    """Decorated for autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x.exp() * w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * x.exp() * w, (g * x.exp()).sum(0)


class Rounded(Function):
    """Straight through, with codes that are integers beside the values: no derivative of forward."""

    @staticmethod
    def forward(ctx, x, w):
        codes = torch.round(x / w.abs().mean()).to(torch.int32)
        ctx.save_for_backward(codes)
        return codes * w.abs().mean(), codes

    @staticmethod
    def backward(ctx, g, _):
        (codes,) = ctx.saved_tensors
        return g * (codes.abs() < 2), None


class Written(Function):
    """Writes to its argument."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.mark_dirty(x)
        ctx.save_for_backward(w)
        return x.mul_(w)

    @staticmethod
    def backward(ctx, g):
        (w,) = ctx.saved_tensors
        return g * w, None


class Dropped(Function):
    """Random numbers: a second forward, as a checkpoint runs, must draw the same ones."""

    @staticmethod
    def forward(ctx, x, w):
        mask = torch.rand_like(x) < 0.5
        ctx.save_for_backward(mask, w)
        return x * mask * w

    @staticmethod
    def backward(ctx, g):
        mask, w = ctx.saved_tensors
        return g * mask * w, None


class Opaque(Function):
    """Runs as written, backward included."""

    is_traceable = False

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        ctx.scale = float(w.detach().float().sum())
        return x * w * ctx.scale

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w * ctx.scale, (g * x).sum(0) * ctx.scale


class Own(Function):
    """All three rules are its author's."""

    @staticmethod
    def forward(x, w):
        return x.sin() * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return 2 * g * x.cos() * w, (g * x.sin()).sum(0)

    @staticmethod
    def jvp(ctx, dx, dw):
        x, w = ctx.saved_tensors
        return 2 * dx * x.cos() * w + dw * x.sin()

    @staticmethod
    def vmap(info, in_dims, x, w):
        xs = x.movedim(in_dims[0], 0) if in_dims[0] is not None else x.expand(info.batch_size, *x.shape)
        ws = w.movedim(in_dims[1], 0) if in_dims[1] is not None else w.expand(info.batch_size, *w.shape)
        return xs.sin() * ws[:, None], 0


class Kind(NamedTuple):
    """A Function, how it is called, what of it runs as written, and how far results may differ."""

    cls: Any
    call: Callable[[Any, Tensor, Tensor], Tensor]
    opaque: tuple[str, ...] = ()
    tolerance: float = 0.0


def first(c: Any, x: Tensor, w: Tensor) -> Tensor:
    return c.apply(x, w)[0]


def alone(c: Any, x: Tensor, w: Tensor) -> Tensor:
    return c.apply(x, w)


KINDS = {
    "gate": Kind(Gate, alone),
    "norm": Kind(Norm, lambda c, x, w: c.apply(x, w, 1e-6)[0]),
    "product": Kind(Product, alone, (), 5e-3),  # its last bit depends on where the operands lie in memory, in eager too
    "amp": Kind(Amp, alone),
    "rounded": Kind(Rounded, first),
    "written": Kind(Written, lambda c, x, w: c.apply(x * 1, w)),
    "dropped": Kind(Dropped, alone),
    "opaque": Kind(Opaque, alone, ("forward", "backward")),
    "own": Kind(Own, alone),
}
