"""What random programs found, each in a few lines: the compiled Function against eager, or against single calls."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import Function

import fusegrad

both = pytest.mark.parametrize("backend", ["reference", "interpret"])


def same(target, mode, *args, backend="reference"):
    """Raises where a mode of a compiled target differs from eager on these arguments."""
    fast = fusegrad.compile(target, backend=backend)
    fusegrad.check(fast, *args, transforms=[mode], dtypes=[], layouts=[], sizes=[], quiet=True)
    return fast


def test_a_function_without_a_way_for_gradients_has_tangents_of_zeros() -> None:
    def program(x):
        return torch.atan(x.select(1, 0).double()).floor()

    fast = same(program, "jvp(vmap)", "f32[3,2]")
    x = torch.randn(3, 2)
    out, tangent = torch.func.jvp(fast, (x,), (torch.ones_like(x),))
    assert torch.equal(out, program(x)) and not tangent.any()


@pytest.mark.parametrize("mode", ["jacfwd", "dual numbers"])
def test_an_expanded_result_has_tangents(mode) -> None:
    same(lambda x: x.sin().expand(2, *x.shape), mode, "f32[1,3]")


class Summed(Function):
    """Its gradient is expanded."""

    @staticmethod
    def forward(x):
        return x.sum().square() / 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return (grad * x.sum()).expand(x.shape)


@both
def test_an_expanded_gradient_has_tangents(backend) -> None:
    fast = fusegrad.compile(Summed, backend=backend)
    found = torch.func.jacfwd(torch.func.grad(fast.apply))(torch.randn(3, 2))
    torch.testing.assert_close(found, torch.ones(3, 2, 3, 2))


class Wider(Function):
    """Two floats in, of which one gradient is computed in the wider type."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x)
        return y * 2, y + 1

    @staticmethod
    def backward(ctx, g, h):
        (x,) = ctx.saved_tensors
        return h.sum() * x, h


@pytest.mark.parametrize("mode", ["jvp", "jacfwd"])
def test_the_judge_gives_a_tangent_the_dtype_of_its_output(mode) -> None:
    same(Wider, mode, "f64[4]", "f32[2]")
    same(Wider, mode, "bf16[4]", "f32[2]")


class UnusedOutput(Function):
    """It saves its output, reads it nowhere, and writes to memory of its own in backward."""

    @staticmethod
    def forward(x, y, z):
        return y * z

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output, inputs[2])

    @staticmethod
    def backward(ctx, grad):
        _output, z = ctx.saved_tensors
        return grad.clone().mul_(z), grad * z, None


def test_what_a_backward_that_writes_in_place_does_not_read_stays_without_a_gradient() -> None:
    fast = same(UnusedOutput, "double backward", "f32[3]", "f32[3]", "f32[3]")
    x, y, z = (torch.randn(3, requires_grad=True) for _ in range(3))
    first = torch.autograd.grad(fast.apply(x, y, z).sum(), (x, y), create_graph=True)
    assert all(g.requires_grad for g in first)
    second = torch.autograd.grad(sum(g.sum() for g in first), (x, y, z), allow_unused=True)
    assert second[:2] == (None, None) and second[2] is not None
