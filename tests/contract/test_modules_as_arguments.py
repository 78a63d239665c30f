"""Modules, and objects with tensors, as arguments: by identity, with their parameters read at every call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from side_by_side import both, leaf, same
from torch.autograd import Function

import fusegrad

Tensor = torch.Tensor


def layers(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))


class Recomputes(Function):
    """A reversible block: the module is on ctx, backward runs it again, with gradients of its parameters."""

    @staticmethod
    def forward(ctx, x, module, *weights):
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return x + module(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        weights = tuple(ctx.module.parameters())
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = x + ctx.module(x)
        found = torch.autograd.grad(y, (x, *weights), g)
        return found[0], None, *found[1:]


class Applies(Function):
    """The module is not differentiated: its parameters have no gradient."""

    @staticmethod
    def forward(ctx, x, module):
        y = module(x)
        ctx.save_for_backward(y)
        return y * 2

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * y, None


def step(cls: Any, module: Any, n: int, own: bool) -> Any:
    x, weights = leaf(3 + n, 4, seed=n), list(module.parameters())
    y = cls.apply(x, module, *(weights if own else ()))
    return y, torch.autograd.grad(y.square().sum(), (x, *weights), allow_unused=True)


@both
@pytest.mark.parametrize("cls", [Recomputes, Applies], ids=lambda c: c.__name__)
def test_a_module_is_an_argument(cls, backend):
    def story(given: Any) -> Any:
        own, module, found = cls is Recomputes, layers(), []
        for n in range(3):
            found.append(step(given, module, n, own))
            with torch.no_grad():
                module[0].weight.mul_(1.5)
        module[0].weight = torch.nn.Parameter(torch.ones(4, 4))
        found.append(step(given, module, 0, own))
        module[1] = torch.nn.ReLU()
        return [*found, step(given, module, 0, own), step(given, layers(3), 0, own)]

    same(cls, story, backend)


class Counted(torch.nn.Module):
    """Changes itself when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.scale = 0, torch.nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x):
        self.calls += 1
        return x * self.scale * self.calls


def test_a_module_that_counts_its_calls():
    def story(cls: Any) -> Any:
        module = Counted()
        return [step(cls, module, n, False) for n in range(3)], module.calls

    same(Applies, story, may=("forward", "backward"))


def test_a_module_with_running_statistics(capsys):
    def story(cls: Any) -> Any:
        module = torch.nn.BatchNorm1d(4)
        found = [step(cls, module, n, False) for n in range(3)]
        module.eval()
        return found, step(cls, module, 0, False), dict(module.state_dict())

    same(Applies, story, may=("forward", "backward"))


class Loud(torch.nn.Linear):
    def forward(self, x):
        print(f"{float(x.sum()):.4f}")
        return super().forward(x)


def test_a_module_that_prints(capsys):
    def story(cls: Any) -> Any:
        torch.manual_seed(0)
        module = Loud(4, 4)
        return [step(cls, module, n, False) for n in range(3)], capsys.readouterr().out

    same(Applies, story, may=("forward", "backward"))


class Config:
    def __init__(self, w: Tensor, bias: float) -> None:
        self.w, self.bias = w, bias

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.w + self.bias


class OnCtx(Function):
    @staticmethod
    def forward(ctx, x, config):
        ctx.config = config
        return config(x)

    @staticmethod
    def backward(ctx, g):
        return g @ ctx.config.w.t() * ctx.config.bias, None


def test_an_object_with_tensors_is_an_argument_and_on_ctx():
    def story(cls: Any) -> Any:
        config, found = Config(leaf(4, 4).detach(), 0.5), []
        for n in range(4):
            x = leaf(2 + n, 4, seed=n)
            y = cls.apply(x, config)
            found.append((y, torch.autograd.grad(y.sum(), x)))
            config.w = config.w * 2
            config.bias += 1.0 if n == 2 else 0.0
        x = leaf(2, 4)
        y = cls.apply(x, config)
        config.w = torch.zeros(4, 4)  # backward reads it as it is then
        return found, torch.autograd.grad(y.sum(), x)

    same(OnCtx, story)


class CallsAMethod(Function):
    """It is given `module.forward`, which reads the module's parameters."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.function(x)
        return torch.autograd.grad(y, x, g)[0], None


@both
def test_a_method_of_a_module_reads_that_modules_parameters(backend) -> None:
    fast = fusegrad.compile(CallsAMethod, backend=backend)
    modules = [layers(0), layers(1)]
    for n in range(8):
        module = modules[n % 2]
        if n == 4:
            module[0].weight = torch.nn.Parameter(torch.ones(4, 4))
        elif n > 4:
            module[2].bias.data.add_(1)
        found = []
        for cls in (CallsAMethod, fast):
            x = leaf(3, 4, seed=n)
            y = cls.apply(x, module.forward)
            found.append((y.detach(), *torch.autograd.grad(y.square().sum(), x)))
        torch.testing.assert_close(found[1], found[0])
    methods = fusegrad.explain(fast).methods
    assert methods["forward"].status == methods["backward"].status == "compiled"
