"""What code that is called from a method is given: memory laid out as in eager, also between kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from side_by_side import both, leaf, same
from torch.autograd import Function

Tensor = torch.Tensor
LIBRARY = torch.library.Library("fusegrad_layouts", "DEF")
LIBRARY.define("of_rows(Tensor x) -> Tensor")


def of_rows(x: Tensor) -> Tensor:
    """As compiled code that reads memory in its order."""
    assert x.is_contiguous()
    return x.as_strided((x.numel(),), (1,)).cumsum(0).view(x.shape).clone()


LIBRARY.impl("of_rows", of_rows, "CPU")
torch.library.register_fake("fusegrad_layouts::of_rows", torch.empty_like)


class OfRows(Function):
    @staticmethod
    def forward(ctx, x):
        assert x.is_contiguous()
        return x * 2

    @staticmethod
    def backward(ctx, g):
        assert g.is_contiguous()
        return g * 3


CALLED = {"an operator of a library": torch.ops.fusegrad_layouts.of_rows, "a Function": OfRows.apply}
PREPARED = {
    "as it is": lambda t: t.contiguous(),
    "transposed": lambda t: t.t().contiguous(),
    "computed, then transposed": lambda t: t.exp().t().contiguous(),
    "in steps": lambda t: t[:, ::2].contiguous(),
    "expanded": lambda t: t[:1].expand(3, -1).contiguous(),
}
GRADIENTS = {
    "row-major": lambda like: torch.arange(1.0, 1 + like.numel()).view_as(like),
    "transposed": lambda like: torch.arange(1.0, 1 + like.numel()).view(*like.shape[::-1]).t(),
    "expanded": lambda like: torch.ones(()).expand_as(like),
}


@both
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("prepared", PREPARED)
@pytest.mark.parametrize("called", CALLED)
def test_what_is_called_is_given_memory_in_its_order(called, prepared, gradient, backend) -> None:
    call, prepare = CALLED[called], PREPARED[prepared]

    class Calls(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.shape = x.shape
            return call(prepare(x))

        @staticmethod
        def backward(ctx, g):
            return call(prepare(g)).sum().expand(ctx.shape)

    def story(c: Any) -> Any:
        seen = []
        for x in (leaf(4, 6), leaf(6, 4).t()):
            y = c.apply(x)
            seen.append((y, torch.autograd.grad(y, x, GRADIENTS[gradient](y))))
        return seen

    same(Calls, story, backend)


LIBRARY.define("waited_for(Tensor x) -> Tensor")
LIBRARY.impl("waited_for", lambda x: x, "CPU")
torch.library.register_fake("fusegrad_layouts::waited_for", torch.empty_like)


@both
def test_an_operator_that_returns_what_it_is_given_and_does_not_say_so(backend) -> None:
    class Waits(Function):
        @staticmethod
        def forward(ctx, x):
            return torch.ops.fusegrad_layouts.waited_for(x)

        @staticmethod
        def backward(ctx, g):
            return g * 2

    def story(c: Any) -> Any:
        x = leaf(4, 6) * 1
        for _ in range(3):
            y = c.apply(x)
        shown = y.data_ptr() == x.data_ptr(), y._base is x
        with torch.no_grad():
            x.mul_(2)
        return shown, y.detach(), x.detach()

    same(Waits, story, backend)
