"""Objects that a method leaves on ctx, or returns, and that hold its tensors: never kept from call to call."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.autograd import Function

import fusegrad
from fusegrad.tracer import containers
from fusegrad.tracer.capture.fake_leaks import holds_fakes
from fusegrad.tracer.torch_private import FakeTensorMode


@dataclass
class Operator:
    matrix: Any
    shape: Any = None

    def times(self, v):
        return self.matrix * v


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner):
        self.inner = inner

    def times(self, v):
        return self.inner[0]["matrix"] * v


KEEPERS = {
    "instance": lambda a: Operator(a).times,
    "object": lambda a: Operator(a),
    "slots": lambda a: Slotted([{"matrix": a}]),
    "closure": lambda a: lambda v: a * v,
    "partial": lambda a: functools.partial(torch.mul, a),
    "default": lambda a: lambda v, a=a: a * v,
    "vjp": lambda a: torch.func.vjp(lambda v: a * v, torch.ones_like(a))[1],
}


def product(kept: Any, v: Any) -> Any:
    result = kept.times(v) if hasattr(kept, "times") else kept(v)
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
@pytest.mark.parametrize("name", KEEPERS)
def test_backward_reads_this_calls_tensors(name) -> None:
    class Keeps(Function):
        @staticmethod
        def forward(ctx, a):
            ctx.kept = KEEPERS[name](a)
            return a * a / 2

        @staticmethod
        def backward(ctx, g):
            return product(ctx.kept, g)

    fast = fusegrad.compile(Keeps, backend="reference")
    for _ in range(3):
        a = torch.randn(4, requires_grad=True)
        fast.apply(a).sum().backward()
        torch.testing.assert_close(a.grad, a.detach())
    wanted = "compiled" if name in ("object", "partial") else "opaque"  # containers, whose tensors are known
    assert fast._fusegrad.ledger.records["forward"].status == wanted


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_a_returned_closure_is_this_calls() -> None:
    class Returns(Function):
        @staticmethod
        def forward(ctx, a):
            return a + 1, lambda: a.sum()

        @staticmethod
        def backward(ctx, g, _):
            return g

    fast = fusegrad.compile(Returns, backend="reference")
    for _ in range(2):
        a = torch.randn(4)
        assert torch.equal(fast.apply(a)[1](), a.sum())


def test_what_holds_no_tensor_of_the_capture_is_a_constant() -> None:
    class Scales(Function):
        @staticmethod
        def forward(ctx, a, by):
            ctx.by, ctx.op, ctx.shape = by, torch.mul, a.shape
            ctx.both = functools.partial(torch.mul, other=2)
            return by(a)

        @staticmethod
        def backward(ctx, g):
            return ctx.op(ctx.both(ctx.by(g)).view(ctx.shape), 0.5), None

    module = torch.nn.PReLU()
    fast = fusegrad.compile(Scales, backend="reference", fullgraph=True)
    x = torch.randn(3, requires_grad=True)
    fast.apply(x, torch.neg).sum().backward()
    assert x.grad.tolist() == [-1.0] * 3
    assert not holds_fakes([module, torch.ones(2), {"a": (1, "b")}, torch.nn, len])


def test_fakes_are_found_at_any_depth() -> None:
    with FakeTensorMode():
        fake = torch.ones(2)
    assert all(holds_fakes(keep(fake)) for name, keep in KEEPERS.items() if name != "vjp")
    assert not any(holds_fakes(keep(torch.ones(2))) for name, keep in KEEPERS.items() if name != "vjp")
    cycle: list[Any] = []
    cycle.append(cycle)
    assert not holds_fakes(cycle)


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_a_graph_that_forward_records_is_kept_as_in_eager() -> None:
    """forward turns grad mode on and leaves a tensor with its history on ctx; backward goes back through that."""

    class Recorded(Function):
        @staticmethod
        def forward(ctx, a):
            with torch.enable_grad():
                ctx.inner = a.detach().requires_grad_()
                ctx.outer = ctx.inner * ctx.inner
            return ctx.outer.detach()

        @staticmethod
        def backward(ctx, g):
            (found,) = torch.autograd.grad(ctx.outer, ctx.inner, g)
            return found

    fast = fusegrad.compile(Recorded, backend="reference")
    for _ in range(3):
        a = torch.randn(4, requires_grad=True)
        fast.apply(a).sum().backward()
        torch.testing.assert_close(a.grad, 2 * a.detach())
    assert "history of its own" in fast._fusegrad.ledger.records["forward"].reason


@dataclass(frozen=True)
class Unchanging:
    """Says that a copy of it is itself, as torch's TreeSpec of a leaf does."""

    number: int

    def __copy__(self):
        return self


def test_looking_into_a_dataclass_that_is_its_own_copy_does_not_change_it() -> None:
    one = Unchanging(3)
    assert containers.leaves((one, [one])) == [3, 3]
    assert containers.map_leaves(one, lambda leaf: leaf + 1) == Unchanging(4)
    assert one.number == 3
