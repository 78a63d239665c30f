"""Loops over a size: one graph for all lengths, eager's bits, and the reason on record where there is none."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from loops.recurrences import ROLLED, Recurrence, rand
from loops.unrolled import STEPWISE, Stepwise
from torch import Tensor
from torch.autograd import Function

import fusegrad
from fusegrad.tracer.loops.node import loop_of

FIRST, LATER = 24, (33, 13, 17, 60)
SHORT = (1, 2, 3, 4)


def run(cls: Any, args: tuple[Any, ...]) -> list[Tensor | None]:
    """The results and the gradients of a call."""
    args = tuple(a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args)
    out = cls.apply(*args)
    outs = out if isinstance(out, tuple) else (out,)
    moving = [o for o in outs if isinstance(o, Tensor) and o.requires_grad]
    wanted = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    torch.manual_seed(1)
    return [*outs, *torch.autograd.grad(moving, wanted, [torch.randn_like(o) for o in moving], allow_unused=True)]


def made(case: Recurrence | Stepwise, steps: int) -> tuple[Any, ...]:
    torch.manual_seed(steps)
    return case.make(steps)


def assert_same_bits(case: Recurrence | Stepwise, fast: Any, steps: int) -> int:
    """Compares a compiled class with eager; the captures that this took."""
    args = made(case, steps)
    expected = run(case.cls, args)
    before = fusegrad.stats()["captures"]
    found = run(fast, args)
    for a, b in zip(expected, found, strict=True):
        assert (a is None and b is None) or (a is not None and b is not None and a.stride() == b.stride())
        assert a is None or torch.equal(a, b)
    return fusegrad.stats()["captures"] - before


def loops_of(fast: Any) -> list[int]:
    """The loops in forward's and backward's graph of its only specialization."""
    ((spec,),) = fast._fusegrad.table.by_facts.values()
    (entry,) = spec.backward.entries.values()
    traces = spec.captured.forward.trace, entry.trace
    return [sum(loop_of(n.target) is not None for n in t.graph_module.graph.nodes) for t in traces]


@pytest.mark.parametrize("case", ROLLED, ids=lambda c: c.name)
def test_one_graph_serves_every_length(case: Recurrence) -> None:
    fast = fusegrad.compile(case.cls)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert assert_same_bits(case, fast, FIRST) == 2
        assert loops_of(fast) == list(case.loops)
        for steps in LATER:
            assert assert_same_bits(case, fast, steps) == 0
        assert fast._fusegrad.ledger.records["forward"].reason is None


@pytest.mark.parametrize("case", ROLLED, ids=lambda c: c.name)
def test_short_loops_have_eagers_bits(case: Recurrence) -> None:
    fast = fusegrad.compile(case.cls)
    assert_same_bits(case, fast, FIRST)
    for steps in (n for n in SHORT if n >= case.shortest):
        captures = assert_same_bits(case, fast, steps)
        assert captures == 0 or steps < case.least
    assert assert_same_bits(case, fast, FIRST + 1) == 0


@pytest.mark.parametrize("case", ROLLED, ids=lambda c: c.name)
def test_a_long_loop_after_a_short_one(case: Recurrence) -> None:
    fast = fusegrad.compile(case.cls)
    assert_same_bits(case, fast, 4)
    assert assert_same_bits(case, fast, FIRST) == 2
    assert assert_same_bits(case, fast, FIRST - 1) == 0


@pytest.mark.parametrize("case", [c for c in ROLLED if c.least == 3][::3], ids=lambda c: c.name)
def test_a_second_short_length_is_one_of_all(case: Recurrence) -> None:
    """A loop of few steps is traced step by step; another length of it shows that it varies."""
    fast = fusegrad.compile(case.cls)
    assert [assert_same_bits(case, fast, n) for n in (4, 4, 6, 8, 3, 5, 7, FIRST)] == [2, 0, 2, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("case", STEPWISE, ids=lambda c: c.name)
def test_what_is_no_loop_is_traced_step_by_step(case: Stepwise) -> None:
    fast = fusegrad.compile(case.cls)
    for steps in (20, 27, 20):
        assert_same_bits(case, fast, steps)
    record = fast._fusegrad.ledger.records[case.method]
    assert record.code == "FG106" and case.reason in str(record.reason)


def test_loops_can_be_switched_off() -> None:
    case = ROLLED[0]
    fast = fusegrad.compile(case.cls)
    with fusegrad.config.patch(disable="loops"):
        assert [assert_same_bits(case, fast, n) for n in (12, 13)] == [2, 2]
    assert [assert_same_bits(case, fast, n) for n in (12, 13)] == [2, 0]


@pytest.mark.parametrize("backend", ["interpret", "inductor"])
def test_other_backends_are_given_the_steps(backend: str) -> None:
    if backend == "inductor":
        pytest.importorskip("torch._inductor")
    case = ROLLED[0]
    fast = fusegrad.compile(case.cls)
    assert assert_same_bits(case, fast, 12) == 2
    args = made(case, 10)
    with fusegrad.config.patch(backend=backend):
        found = run(fast, args)
    for a, b in zip(run(case.cls, args), found, strict=True):
        torch.testing.assert_close(a, b)
    assert assert_same_bits(case, fast, 11) == 0
    records = fast._fusegrad.ledger.records
    assert all(r.reason is None for r in records.values())


class Reads(Function):
    """What the loop reads from outside."""

    weight = torch.randn(4)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[0])
        for t in range(x.shape[0]):
            h = torch.sin(h * Reads.weight) + x[t]
        return h

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def test_a_tensor_from_outside_is_that_of_each_call() -> None:
    fast = fusegrad.compile(Reads)
    for steps in (12, 15):
        x = torch.randn(steps, 4)
        assert torch.equal(fast.apply(x), Reads.apply(x))
        Reads.weight = torch.randn(4)
        assert torch.equal(fast.apply(x), Reads.apply(x))


def test_the_length_that_the_method_asks_for_is_a_guard() -> None:
    class Asks(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            h = torch.zeros_like(x[0])
            for t in range(x.shape[0]):
                h = torch.sin(h) + x[t]
            return -h if x.shape[0] > 30 else h

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return None

    fast = fusegrad.compile(Asks)
    for steps in (12, 20, 40, 31, 30, 50):
        x = torch.randn(steps, 4)
        assert torch.equal(fast.apply(x), Asks.apply(x))


@pytest.mark.parametrize("method", ["forward", "backward"])
def test_what_only_a_long_loop_does_is_found(method: str) -> None:
    """No graph of a short loop shows it: a loop longer than all before is compared with the method."""

    class Turns(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            h = torch.zeros_like(x[0])
            for t in range(len(x)):
                h = torch.sin(h) + x[t]
                h = -h if t == 30 and method == "forward" else h
            ctx.save_for_backward(x)
            return h

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            (x,), grads = ctx.saved_tensors, []
            for t in range(len(x)):
                g = g * torch.cos(x[t])
                grads.append(-g if t == 30 and method == "backward" else g)
            return torch.stack(grads)

    fast, case = fusegrad.compile(Turns), Recurrence(Turns, lambda t: (rand(t, 3),), 2, 1, (1, 1))
    assert [assert_same_bits(case, fast, n) for n in (12, 20, 30)] == [2, 0, 0]
    with warnings.catch_warnings():  # traced once more, step by step, for this length alone
        warnings.simplefilter("error", fusegrad.FallbackWarning)
        assert [assert_same_bits(case, fast, n) > 0 for n in (50, 50, 50)] == [True, False, False]
        for steps in (40, 60, 20):
            assert_same_bits(case, fast, steps)
    if method == "forward":
        record = fusegrad.explain(fast, rand(50, 3)).methods["forward"]
    else:
        record = fast._fusegrad.ledger.records["backward"]
    assert record.status == "compiled" and "late steps" in record.reason


def test_random_numbers_are_drawn_in_eagers_order() -> None:
    class Drops(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            h, hs = torch.zeros_like(x[0]), []
            for t in range(x.shape[0]):
                h = h * torch.rand_like(h) + x[t]
                hs.append(h)
            return torch.stack(hs)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return g

    fast = fusegrad.compile(Drops)
    for steps in (12, 15):
        x = torch.randn(steps, 4)
        torch.manual_seed(0)
        expected = Drops.apply(x)
        torch.manual_seed(0)
        assert torch.equal(fast.apply(x), expected)
