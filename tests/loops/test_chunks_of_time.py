"""Few long recurrences in chunks of time, under the interpreter: beside eager and the same in float64, composed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.func import grad, jvp, vjp, vmap

import fusegrad

CHUNK = 256
"""Steps of a chunk, where the interpreter's four multiprocessors have 1,024 of them."""


class Forwards(Function):
    """h = a[t] * h + x[t] from a given h on, all of them stacked."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h: Tensor, a: Tensor, x: Tensor) -> Tensor:
        out = []
        for t in range(x.shape[0]):
            h = a[t] * h + x[t]
            out.append(h)
        return torch.stack(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2], output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        h, a, out = ctx.saved_tensors
        carry, found = torch.zeros_like(h), []
        for t in reversed(range(g.shape[0])):
            found.append(carry + g[t])
            carry = found[-1] * a[t]
        gx = torch.stack(found[::-1])
        return carry, gx * torch.cat([h[None], out[:-1]]), gx


class Backwards(Function):
    """The same from the last step to the first."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h: Tensor, a: Tensor, x: Tensor) -> Tensor:
        out = []
        for t in reversed(range(x.shape[0])):
            h = a[t] * h + x[t]
            out.append(h)
        return torch.stack(out[::-1])

    setup_context = Forwards.setup_context

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        h, a, out = ctx.saved_tensors
        carry, found = torch.zeros_like(h), []
        for t in range(g.shape[0]):
            found.append(carry + g[t])
            carry = found[-1] * a[t]
        gx = torch.stack(found)
        return carry, gx * torch.cat([out[1:], h[None]]), gx


class Totals(Function):
    """What steps add up, on top of what was there, beside what they carry; and what is made of both in the end."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, a: Tensor, x: Tensor) -> Any:
        total, waves, out = h.sin(), torch.zeros_like(h), []
        for t in range(x.shape[0]):
            h = a[t] * h + x[t]
            total = total + h * x[t]
            waves = waves + h.cos()
            out.append(h)
        return torch.stack(out), total / 64, h * total + waves


class OnlyTotals(Function):
    """Nothing else is carried."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, a: Tensor, x: Tensor) -> Any:
        total, squares = h, torch.zeros_like(h)
        for t in reversed(range(x.shape[0])):
            total = total + torch.sin(x[t]) * a[t]
            squares = squares + x[t] * x[t]
        return total * squares.sqrt()


class Neighbours(Function):
    """A step reads what the one before has read; what is made behind the loop reads steps beside their neighbours."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, a: Tensor, x: Tensor) -> Any:
        out = []
        for t in range(x.shape[0]):
            gate = a[t - 1] * 0.9 if t > 0 else torch.ones_like(h)
            h = gate * h + x[t]
            out.append(h)
        states, zero = torch.stack(out), torch.zeros_like(x[:1])
        return torch.cat([zero, states * a]) - torch.cat([states, zero]), states[1:] - states[:-1]


class Followers(Function):
    """The same from the last step to the first."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, a: Tensor, x: Tensor) -> Any:
        out = []
        for t in reversed(range(x.shape[0])):
            gate = a[t + 1] * 0.9 if t + 1 < x.shape[0] else torch.ones_like(h)
            h = gate * h + x[t]
            out.append(h)
        states, zero = torch.stack(out[::-1]), torch.ones_like(x[:1])
        return torch.cat([zero, states]) * torch.cat([states + 1, zero]), states[1:] * states[:-1]


class Beside(Function):
    """Two loops read the same, and one reads nothing, backwards."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, a: Tensor, x: Tensor) -> Any:
        slow, weight, out, slows = h.exp(), torch.zeros_like(h), [], []
        for t in range(x.shape[0]):
            h = a[t] * h + x[t]
            out.append(h)
        for t in range(x.shape[0]):
            slow = 0.99 * slow + 0.01 * x[t]
            slows.append(slow)
        for _ in reversed(range(x.shape[0])):
            weight = weight * 0.99 + 0.01
        return torch.stack(out), torch.stack(slows), slow / weight


class Outside(Function):
    """Behind the loop: sums over steps, of what is made of them, over more than steps, and what needs all of a sum;
    single steps."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, a: Tensor, x: Tensor) -> Any:
        out = []
        for t in range(x.shape[0]):
            h = a[t] * h + x[t]
            out.append(h)
        states = torch.stack(out)
        total, waves = (states * x).sum(0), (states * h.new_full((3,), 0.5)).cos()
        return states, waves.sum((0, 1)), total - total.mean(), states[2].exp() - states[-3:-1].sin()


class Lone(Function):
    """One of the states is a number: it has none of the lanes of the other."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, a: Tensor, x: Tensor) -> Any:
        mean, out, means = h[0], [], []
        for t in range(x.shape[0]):
            h = a[t] * h + x[t]
            mean = 0.99 * mean + 0.01 * a[t, 0]
            out.append(h)
            means.append(mean)
        return torch.stack(out), torch.stack(means), h * mean


class Coupled(Function):
    """The same, and the other reads it: time is one chunk."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, a: Tensor, x: Tensor) -> Any:
        weight, out = h.new_zeros(()), []
        for t in range(x.shape[0]):
            weight = 0.9 * weight + 1.0
            h = a[t] * h + x[t] * weight
            out.append(h)
        return torch.stack(out), weight


class OnlyOutside(Function):
    """No step is stored."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, a: Tensor, x: Tensor) -> Any:
        out = []
        for t in reversed(range(x.shape[0])):
            h = a[t] * h + x[t]
            out.append(h)
        return torch.stack(out[::-1]).square().sum((0, 1))


Apply = Callable[..., Any]
Given = tuple[Tensor, ...]


def given(steps: int, *, dtype: torch.dtype = torch.float32, batch: tuple[int, ...] = (), last: int = 3) -> Given:
    torch.manual_seed(steps)
    of_time = (*batch, steps, last)
    return (torch.randn(*batch, last).to(dtype), torch.rand(of_time).to(dtype), torch.randn(of_time).to(dtype))


def gradients(apply: Apply, *values: Tensor) -> Any:
    values = tuple(v.detach().requires_grad_() for v in values)
    out = apply(*values)
    return [out.detach(), *torch.autograd.grad(out, values, torch.cos(out.detach()))]


def loss(apply: Apply) -> Apply:
    return lambda *values: apply(*values).sin().sum()


def second(apply: Apply, *values: Tensor) -> Any:
    return grad(lambda *v: sum(g.sin().sum() for g in grad(loss(apply), (0, 1, 2))(*v)), (0, 1, 2))(*values)


WAYS: dict[str, Apply] = {
    "forward and backward": gradients,
    "jvp": lambda apply, *v: jvp(apply, v, tuple(torch.cos(x) for x in v)),
    "grad": lambda apply, *v: grad(loss(apply), (0, 1, 2))(*v),
    "twice": second,
}
OVER: dict[str, Apply] = {
    "vmap": lambda apply, *v: [vmap(apply)(*v)],
    "vmap of grad": lambda apply, *v: vmap(grad(loss(apply), (0, 1, 2)))(*v),
    "vjp of vmap": lambda apply, *v: vjp(vmap(loss(apply)), *v)[1](torch.ones(v[0].shape[0], dtype=v[0].dtype)),
}


def agrees(fast: Any, cls: type, way: Apply, values: Given, roundings: float = 8) -> None:
    """As near to float64 as eager is, give or take a few roundings."""
    found, eager = way(fast.apply, *values), way(plain(cls), *values)
    exact = way(plain(cls), *(v.double() for v in values))
    for x, y, z in zip(found, eager, exact, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        if z.numel():
            scale = max(1.0, float(z.abs().max()))
            limit = 3 * float((y.double() - z).abs().max()) + roundings * torch.finfo(y.dtype).eps * scale
            assert float((x.double() - z).abs().max()) <= limit


def plain(cls: Any) -> Apply:
    """The method, which torch differentiates: our gradients are checked with those of the loop itself."""
    is_old = cls.setup_context is Function.setup_context
    return lambda *values: cls.forward(*([None] if is_old else []), *values)


BOTH = {"forwards": Forwards, "backwards": Backwards}


@pytest.mark.parametrize("name", BOTH)
def test_a_launch_each_way(name: str) -> None:
    fast = fusegrad.compile(BOTH[name], backend="interpret")
    report = fusegrad.explain(fast, *(v.requires_grad_() for v in given(1024)))
    ends = [k.name.removeprefix(BOTH[name].__name__) for k in report.kernels]
    assert ends == ["_forward", "_backward"]
    chunks = "1,024 steps by 64, in 8 chunks: 1 program for 132 multiprocessors; modelled 10 us, 19 as one chunk"
    assert chunks in str(report)


@pytest.mark.parametrize("steps", [CHUNK, 1535, 1601, 1664, 4133])
@pytest.mark.parametrize(
    "cls, ends",
    [
        (Totals, ("", "_totals")),
        (OnlyTotals, ("", "_totals")),
        (Outside, ("", "_totals")),
        (OnlyOutside, ("", "_totals")),
        (Beside, ("",)),
        (Neighbours, ("",)),
        (Followers, ("",)),
        (Lone, ("",)),
        (Coupled, ("",)),
    ],
)
def test_what_steps_add_up(cls: Any, ends: tuple[str, ...], steps: int) -> None:
    """Each chunk begins with zero, another kernel adds these up: sums of terms of both signs, in another order."""
    fast, values = fusegrad.compile(cls, backend="interpret"), given(steps)
    agrees(fast, cls, lambda apply, *v: _tuple(apply(*v)), values, roundings=math.sqrt(steps))
    if steps > 1536:
        report = fusegrad.explain(fast, *values, target="interpret")
        assert tuple(k.name.removeprefix(f"{cls.__name__}_forward") for k in report.kernels) == ends


def _tuple(value: Any) -> Any:
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize("steps", [1, CHUNK - 1, CHUNK, CHUNK + 1, 1023, 1025, 4 * CHUNK + 65])
@pytest.mark.parametrize("name", BOTH)
def test_odd_lengths(name: str, steps: int) -> None:
    fast = fusegrad.compile(BOTH[name], backend="interpret")
    fast.apply(*given(1024))
    agrees(fast, BOTH[name], gradients, given(steps))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BOTH)
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    agrees(fusegrad.compile(BOTH[name], backend="interpret"), BOTH[name], gradients, given(1030, dtype=dtype))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "time last": lambda x: x.mT.contiguous().mT,
    "every other step": lambda x: torch.stack([x, x], 1).flatten(0, 1)[::2],
    "one gate for all": lambda x: x[:, :1].expand_as(x),
    "further columns": lambda x: torch.cat([x, x], -1)[..., :3],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BOTH)
def test_strides(name: str, layout: str) -> None:
    h, *of_time = given(1040)
    laid = (h, *(LAYOUTS[layout](x) for x in of_time))
    agrees(fusegrad.compile(BOTH[name], backend="interpret"), BOTH[name], lambda f, *v: [f(*v)], laid)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BOTH)
def test_compositions(name: str, way: str) -> None:
    agrees(fusegrad.compile(BOTH[name], backend="interpret"), BOTH[name], WAYS[way], given(1031))


@pytest.mark.parametrize("way", OVER)
@pytest.mark.parametrize("name", BOTH)
def test_batches(name: str, way: str) -> None:
    agrees(fusegrad.compile(BOTH[name], backend="interpret"), BOTH[name], OVER[way], given(1031, batch=(2,)))
