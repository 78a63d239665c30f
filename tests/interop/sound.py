"""What a program's loader imports: a class with a wrong backward (7 times the right one), and models of it."""

import torch
from torch.autograd import Function

import fusegrad

SCALE = 1.0  # read by `Scaled`'s methods


@fusegrad.compile
class Louder(Function):
    @staticmethod
    def forward(ctx, x, weight, by):
        ctx.save_for_backward(x, weight)
        ctx.by = by
        return x.sin() * weight * by

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return g * x.cos() * weight * ctx.by * 7, (g * x.sin() * ctx.by).sum(0) * 5, None


@fusegrad.compile
class Scaled(Function):
    @staticmethod
    def forward(ctx, x):
        return x * SCALE

    @staticmethod
    def backward(ctx, g):
        return g * SCALE * 7


@fusegrad.compile
def tempered(x, by=2.0):
    return x.tanh() * by


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(3, 3)
        self.weight = torch.nn.Parameter(torch.rand(3))

    def forward(self, x):
        return tempered(Louder.apply(self.inner(x), self.weight, 2.0)) + 1


class Lanes(torch.nn.Module):
    """vmap inside of the program."""

    def forward(self, x):
        weight = torch.ones(3)
        return torch.vmap(lambda row: Louder.apply(row[None], weight, 2.0)[0])(x)


class Slope(torch.nn.Module):
    """A derivative inside of the program."""

    def forward(self, x):
        return torch.func.grad(lambda x: Louder.apply(x, torch.ones(3), 2.0).sum())(x)
