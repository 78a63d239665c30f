"""A Function with a wrong backward (7 times the right one), and a backend that counts the graphs that it is given."""

import torch
from torch.autograd import Function

SCALE = 1.0  # read by `scaled`'s methods, changed by a test


class Counting:
    """A backend of torch.compile."""

    def __init__(self) -> None:
        self.graphs = []

    def __call__(self, gm, inputs):
        self.graphs.append(gm)
        return gm.forward


def sine(flag, seen=None):
    """`seen` gets the type of what each body is given; a class that only traces is to leave it alone."""

    class Sine(Function):
        @staticmethod
        def forward(x):
            return x.sin()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[0])

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            if seen is not None:
                seen.append(type(g))
            return g * x.cos() * 7

    return declared(Sine, flag)


def scaled(flag):
    class Scaled(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * SCALE

        @staticmethod
        def backward(ctx, g):
            return g * SCALE * 7

    return declared(Scaled, flag)


def marked(flag):
    """What Dynamo's own rendering of a Function leaves out: marks, and gradients that stay None."""

    class Marked(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(False)
            side = x.floor()
            ctx.mark_non_differentiable(side)
            ctx.save_for_backward(x)
            return x.exp(), side

        @staticmethod
        def backward(ctx, g, none):
            assert none is None
            (x,) = ctx.saved_tensors
            return g * x * 7

    return declared(Marked, flag)


def declared(cls, flag):
    if flag is not None:
        cls.is_traceable = flag
    return cls


def sample(*shape):
    torch.manual_seed(0)
    return torch.randn(*shape or (4, 3)).requires_grad_()


def result(fn):
    """(value, gradient of its sum where it has one)."""
    x = sample()
    y = fn(x)
    y = y[0] + y[1] if isinstance(y, tuple) else y
    gradient = torch.autograd.grad(y.sum(), x)[0] if y.requires_grad else torch.zeros(())
    return y.detach(), gradient
