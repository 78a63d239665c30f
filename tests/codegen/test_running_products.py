"""cumprod: a loop that kernels walk in blocks, fused with what is around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import fusegrad


class Transmittance(Function):
    """As volume rendering has it, with its gradient."""

    @staticmethod
    def forward(ctx: Any, density: Tensor) -> Tensor:
        kept = torch.exp(-density)
        through = torch.cumprod(kept, -1)
        ctx.save_for_backward(through)
        return through

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (through,) = ctx.saved_tensors
        return -(g * through).flip(-1).cumsum(-1).flip(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_beside_eager(dtype: torch.dtype) -> None:
    fast = fusegrad.compile(Transmittance, backend="interpret", fullgraph=dtype != torch.float64)
    for shape in ((3, 5), (1, 4), (4, 1), (0, 3), (3, 0), (2, 70), (2, 3, 4)):
        for given in (torch.rand(shape), torch.rand(*shape[:-2], *shape[:-3:-1]).mT):
            x = given.to(dtype).requires_grad_()
            found, expected = fast.apply(x), Transmittance.apply(x)
            torch.testing.assert_close(found, expected)
            g = torch.rand(shape).to(dtype)
            torch.testing.assert_close(*(torch.autograd.grad(y, x, g)[0] for y in (found, expected)))


def test_launches_and_bytes() -> None:
    x = torch.empty(65536, 128, device="meta", dtype=torch.bfloat16, requires_grad=True)
    report = fusegrad.explain(Transmittance, x, target="cuda:90")
    assert [d.launch_count for d in report.directions.values()] == [1, 1]


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_along_each_axis_and_pushed_forward(dim: int) -> None:
    def run(x: Tensor) -> Tensor:
        return torch.cumprod(x.sin(), dim) * 2

    fast, x, t = fusegrad.compile(run, backend="interpret"), torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    torch.testing.assert_close(torch.func.jvp(fast, (x,), (t,)), torch.func.jvp(run, (x,), (t,)))
    torch.testing.assert_close(torch.func.vmap(fast)(x[None]), run(x)[None])


def test_integers_stay_with_torch() -> None:
    x = torch.randint(1, 5, (3, 4))
    assert torch.equal(fusegrad.compile(lambda x: x.cumprod(0) + 1, backend="interpret")(x), x.cumprod(0) + 1)
