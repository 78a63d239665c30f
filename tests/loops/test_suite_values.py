"""Each loop Function of the suite beside eager and float64: calls, derived backwards, transforms, twice backward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from loops.suite import FUNCTIONS, LoopFunction
from torch import Tensor

import fusegrad

sys.path.insert(0, str(Path(__file__).parents[1] / "suite"))
from comparing import inaccuracy

STEPS = 12
every = pytest.mark.parametrize("case", FUNCTIONS, ids=lambda c: c.name)
MISSES = {
    "interpret": {},
    "derived": {},
    "jvp": {},
    "vmap": {},
    "twice": {},
}
"""What is not so yet, by test and class, each with the words of its error: it has to go wrong in just that way."""


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def leaves_of(args: Sequence[Any]) -> list[Tensor]:
    return [a for a in args if isinstance(a, Tensor) and a.requires_grad]


def cotangents(outs: Sequence[Tensor]) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return [torch.randn(o.shape, generator=numbers, dtype=torch.float64).to(o.dtype) for o in outs]


def run(apply: Callable[..., Any], args: Sequence[Any], **options: Any) -> list[Any]:
    """The results of a call and its gradients."""
    outs = as_tuple(apply(*args))
    moving = [o for o in outs if o.requires_grad]
    grads = torch.autograd.grad(moving, leaves_of(args), cotangents(moving), allow_unused=True, **options)
    return [*outs, *grads]


def same_bits(found: Sequence[Any], expected: Sequence[Any]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def close(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Equal numbers in float64; None is zero."""
    for a, b in zip(found, expected, strict=True):
        a, b = (torch.zeros_like(b if a is None else a) if v is None else v for v in (a, b)) if a is not b else (0, 0)
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def missing(test: str, case: LoopFunction) -> Any:
    """What a test expects: nothing, or the error that is known."""
    words = MISSES[test].get(case.name)
    return pytest.raises(Exception, match=words) if words is not None else nullcontext()


@every
def test_calls_have_eagers_bits(case: LoopFunction) -> None:
    fast = fusegrad.compile(case.cls)
    for steps in (STEPS, STEPS + 3):
        args = case.arguments(steps)
        same_bits(run(fast.apply, args), run(case.cls.apply, args))
    assert fast._fusegrad.ledger.records["forward"].reason is None
    assert fast._fusegrad.ledger.records["backward"].reason is None


@every
def test_kernels_are_as_accurate_as_eager(case: LoopFunction) -> None:
    with missing("interpret", case):
        accurate(case, STEPS)


@pytest.mark.parametrize("steps", [1, 2])
@every
def test_so_are_those_of_one_step_or_two(case: LoopFunction, steps: int) -> None:
    accurate(case, max(steps, case.shortest))


def accurate(case: LoopFunction, steps: int) -> None:
    """The numbers of kernels are no further from float64's than eager's are."""
    fast, args = fusegrad.compile(case.cls), case.arguments(steps)
    wide = run(case.cls.apply, case.arguments(steps, dtype=torch.float64))
    eager = run(case.cls.apply, args)
    with fusegrad.config.patch(backend="interpret"):
        found = run(fast.apply, args)
    for c, e, w in zip(found, eager, wide, strict=True):
        assert e is None or inaccuracy(c.detach(), e.detach(), w.detach()) is None


@every
def test_a_derived_backward_is_autograds(case: LoopFunction) -> None:
    args = case.arguments(STEPS, dtype=torch.float64)
    with missing("derived", case):
        close(run(fusegrad.compile(case.plain), args), run(case.plain, args))


@every
def test_jvp_is_the_transpose_of_backward(case: LoopFunction) -> None:
    fast, args = fusegrad.compile(case.cls), case.arguments(STEPS, dtype=torch.float64)
    leaves = leaves_of(args)
    dots = cotangents(leaves)
    with missing("jvp", case):
        outs, pushed = torch.func.jvp(with_leaves(fast.apply, args), tuple(x.detach() for x in leaves), tuple(dots))
        bars = cotangents([o for o in as_tuple(outs) if o.is_floating_point()])
        there = sum((t * b).sum() for t, b in zip(as_tuple(pushed), bars, strict=True))
        grads = run(case.cls.apply, args)[len(as_tuple(outs)) :]
        back = sum((d * g).sum() for d, g in zip(dots, grads, strict=True) if g is not None)
        torch.testing.assert_close(there, back, rtol=1e-8, atol=1e-8)


def with_leaves(apply: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
    """A function of the arguments that want a gradient alone."""

    def of_leaves(*leaves: Tensor) -> Any:
        supply = iter(leaves)
        return apply(*(next(supply) if isinstance(a, Tensor) and a.requires_grad else a for a in args))

    return of_leaves


@every
def test_vmap_is_a_loop_over_samples(case: LoopFunction) -> None:
    fast, args = fusegrad.compile(case.cls), case.arguments(STEPS, dtype=torch.float64)
    stacks = [torch.stack([x, x * 0.9]).detach() for x in leaves_of(args)]
    with missing("vmap", case):
        found = as_tuple(torch.func.vmap(with_leaves(fast.apply, args))(*stacks))
        single = with_leaves(case.cls.apply, args)
        samples = [as_tuple(single(*(s[i] for s in stacks))) for i in range(2)]
        close(found, [torch.stack(outs) for outs in zip(*samples, strict=True)])


@every
def test_second_derivatives_are_eagers(case: LoopFunction) -> None:
    fast, args = fusegrad.compile(case.cls), case.arguments(STEPS, dtype=torch.float64)
    with missing("twice", case):
        close(twice(fast.apply, args), twice(case.cls.apply, args))


def twice(apply: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    grads = [g for g in run(apply, args, create_graph=True) if g is not None]
    ends = [g for g in grads if g.requires_grad]
    return list(torch.autograd.grad(sum((g**2).sum() for g in ends), leaves_of(args), allow_unused=True))
