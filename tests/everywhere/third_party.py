"""A test file as other projects write them: it knows nothing of fusegrad, and must not notice it.

Run by test_everywhere.py in processes of their own, with and without the plugin. Two tests fail either way.
"""

from __future__ import annotations

import copy
import gc
import pickle
import unittest
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch.autograd import Function, gradcheck, gradgradcheck


class Scale(Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor, None


early = Scale.apply


class Shifted(Scale):
    """A subclass that calls its parent's methods."""

    @staticmethod
    def forward(ctx, x, factor):
        return super(Shifted, Shifted).forward(ctx, x, factor) + 1


class Checked(Scale):
    """A subclass with an `apply` of its own."""

    calls = 0

    @classmethod
    def apply(cls, x, factor=2.0):
        cls.calls += 1
        return super().apply(x, factor)


class Sine(Function):
    """By numpy, between two parts that are captured."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos()


class Reversal(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return -g


class Split(Function):
    @staticmethod
    def forward(ctx, x):
        order = x.argsort()
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(order)
        return x[order], order

    @staticmethod
    def backward(ctx, g, _):
        (order,) = ctx.saved_tensors
        return torch.zeros_like(g).index_copy(0, order, g)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.apply_scale = Scale.apply
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.apply_scale(x * self.weight, 3.0)


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("f", [early, Scale.apply, Shifted.apply, Checked.apply])
def test_gradients(f):
    x = leaf(4)
    assert gradcheck(lambda x: f(x, 3.0), (x,)) and gradgradcheck(lambda x: f(x, 3.0), (x,))


def test_numpy():
    assert gradcheck(Sine.apply, (leaf(4),))


def test_apply_of_ones_own():
    before = Checked.calls
    Checked.apply(leaf(2)).sum().backward()
    assert Checked.calls == before + 1


def test_identity():
    assert pickle.loads(pickle.dumps(Scale)) is Scale
    assert issubclass(Shifted, Scale) and type(Shifted) is type(Function)
    assert Shifted.__mro__[:3] == (Shifted, Scale, Function)
    assert Scale.apply.__self__ is Scale
    assert Scale.__name__ == "Scale" and Scale.__qualname__ == "Scale"


def test_node_is_named_after_the_class():
    assert type(Scale.apply(leaf(2), 1.0).grad_fn).__name__ == "ScaleBackward"
    assert Scale.apply(leaf(2), 1.0).grad_fn.name() == "ScaleBackward"


def test_a_layer_is_copied():
    layer = copy.deepcopy(Layer())
    layer(torch.ones(3)).sum().backward()
    assert layer.weight.grad.tolist() == [3.0, 3.0, 3.0]


def test_nothing_is_warned():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Sine.apply(leaf(3)).sum().backward()
    assert not caught


def test_a_method_is_replaced(monkeypatch):
    x = leaf(2)
    Scale.apply(x, 2.0).sum().backward()
    monkeypatch.setattr(Scale, "backward", staticmethod(lambda ctx, g: (g * 7, None)))
    x.grad = None
    Scale.apply(x, 2.0).sum().backward()
    assert x.grad.tolist() == [7.0, 7.0]


def test_a_class_of_a_function_is_freed():
    def make():
        class Local(Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, g):
                return g * 2

        Local.apply(leaf(2)).sum().backward()
        return weakref.ref(Local)

    reference = make()
    gc.collect()
    assert reference() is None


def test_errors_are_torchs():
    with pytest.raises(TypeError):
        Scale.apply(leaf(2))
    with pytest.raises(RuntimeError, match="expected 2"):

        class Short(Function):
            @staticmethod
            def forward(ctx, x, y):
                return x * y

            @staticmethod
            def backward(ctx, g):
                return g

        Short.apply(leaf(2), leaf(2)).sum().backward()


class TestOldStyle(unittest.TestCase):
    def test_transforms(self):
        x = torch.randn(3)
        self.assertTrue(torch.equal(torch.vmap(torch.func.grad(lambda x: Reversal.apply(x).sum()))(x), -torch.ones(3)))

    def test_outputs(self):
        x = torch.randn(5, requires_grad=True)
        y, order = Split.apply(x)
        self.assertFalse(order.requires_grad)
        y[0].backward()
        self.assertEqual(x.grad[order[0]].item(), 1.0)

    def test_that_fails(self):
        x = leaf(3)
        self.assertTrue(gradcheck(Reversal.apply, (x,)))


def test_that_fails():
    x = leaf(2)
    Scale.apply(x, 3.0).sum().backward()
    assert x.grad.tolist() == [4.0, 4.0]
