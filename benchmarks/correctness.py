"""Is it right? Forward and backward against the same class in eager and in float64, which judges between the two.

The worst element may miss float64 by twice what eager does and a few units in the last place of the largest value; all
of them, where they are many, on average by twice what eager does and an eighth of a unit of the average value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from .inputs import as_list, cotangents, differentiable

FACTOR = 2.0
UNITS = {torch.float32: 8.0}
"""Of the worst element, by dtype, else one: a float32 result is a statistic, or a sum in another order."""
MANY = 64
Apply = Callable[..., Any]


def results(apply: Apply, args: Sequence[Any], seed: int, wide: bool = False) -> list[Tensor | None]:
    """Outputs, then the gradients of the inputs that ask for one."""
    given = [_leaf(a, wide) for a in args]
    with mock.patch.object(Tensor, "float", Tensor.double) if wide else nullcontext():  # statistics in float64, too
        outputs = as_list(apply(*given))
        ends, leaves = differentiable(outputs), differentiable(given)
        grads = [g.to(e.dtype) for g, e in zip(_grads(ends, args, seed), ends, strict=True)]
        found = torch.autograd.grad(ends, leaves, grads, allow_unused=True)
    return [o.detach() if isinstance(o, Tensor) else None for o in outputs] + list(found)


def _leaf(value: Any, wide: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    leaf = value.detach().double() if wide and value.is_floating_point() else value.detach()
    return leaf.requires_grad_(leaf.is_floating_point())


def _grads(ends: Sequence[Tensor], args: Sequence[Any], seed: int) -> list[Tensor]:
    """Cotangents, the same ones in float64: rounded to the dtype of the first argument, or float32 for a number."""
    first = next(a.dtype for a in args if isinstance(a, Tensor))
    return [c.to(first if c.dim() else torch.float32) for c in cotangents(ends, seed)]


def faults(ours: Sequence[Any], eager: Sequence[Any], wide: Sequence[Any]) -> list[str]:
    """What is not right, by the position among outputs and gradients."""
    return [f"{at}: {why}" for at, three in enumerate(zip(ours, eager, wide, strict=True)) for why in _faults(*three)]


def _faults(ours: Tensor | None, eager: Tensor | None, wide: Tensor | None) -> Iterator[str]:
    if ours is None or eager is None or wide is None:
        if ours is not eager:
            yield f"{'nothing' if ours is None else 'a tensor'}, eager has {'nothing' if eager is None else 'one'}"
        return
    if (ours.dtype, ours.shape) != (eager.dtype, eager.shape):
        yield f"{ours.dtype}{list(ours.shape)}, eager {eager.dtype}{list(eager.shape)}"
    elif not torch.equal(torch.isfinite(ours.float()), torch.isfinite(eager.float())):
        yield "not finite where eager is, or the other way round"
    else:
        yield from _inaccuracies(ours, eager, wide.double())


def _inaccuracies(ours: Tensor, eager: Tensor, wide: Tensor) -> Iterator[str]:
    finite = torch.isfinite(eager.float())
    exact = wide[finite].abs()
    if not exact.numel():
        return
    ulp = torch.finfo(eager.dtype).eps if eager.is_floating_point() else 0.0
    mine, theirs = ((t.double() - wide)[finite].abs() for t in (ours, eager))
    worst = ("worst", torch.max, UNITS.get(eager.dtype, 1.0))
    for name, of, units in (worst, ("average", torch.mean, 1 / 8))[: 1 + (exact.numel() >= MANY)]:
        limit = FACTOR * of(theirs).item() + units * ulp * of(exact).item()
        if of(mine).item() > limit:
            yield f"{name} error {of(mine).item():.3g}, eager {of(theirs).item():.3g}"
