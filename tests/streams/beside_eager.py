"""A call compiled to streamed kernels, run by the interpreter, beside eager in float64: results and gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import fusegrad

Tensor = torch.Tensor
Call = Callable[..., Any]
FLOOR = {torch.float64: 1e-11, torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Errors that are always allowed, as a share of the largest element: some units of the dtype."""
WORSE_THAN_EAGER = 2.0
"""How many times the error of eager in the same dtype is allowed, where that is more."""
TINY = 1e-30
SMALL = 0.05
"""Gradients are taken to be this share of the largest one at least: one that is zero in theory has no digits.

They are also taken to be as large as they are for other gradients of the results: what is zero for these alone, as they
are the same in all rows, say, is made of what is not, and has the roundings of that. One that is zero for those, too
(that of what shifts all scores alike) is a sum of what the largest is made of, of which nothing but roundings is left.
"""


@dataclass(frozen=True)
class Made:
    """What a call made: its results, and the gradients of its arguments that ask for one."""

    results: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((f"result {n}", r) for n, r in enumerate(self.results))
        yield from ((f"gradient {n}", g) for n, g in enumerate(self.gradients) if g is not None)


def tensors_of(values: Any) -> tuple[Tensor, ...]:
    return tuple(v for v in (values if isinstance(values, tuple) else (values,)) if isinstance(v, Tensor))


def gradients_for(results: Sequence[Tensor], layout: Call | None = None) -> list[Tensor]:
    """Random gradients of results, the same ones each time."""
    random = torch.Generator().manual_seed(3)
    made = [torch.randn(r.shape, dtype=torch.float64, generator=random).to(r.dtype) for r in results]
    return made if layout is None else [layout(g) for g in made]


def transposed_heads(value: Any) -> Any:
    """The same numbers in memory of [b, n, h, d], where the value is [b, h, n, d]."""
    if not isinstance(value, Tensor) or value.dim() < 3:
        return value
    return value.detach().transpose(-3, -2).contiguous().transpose(-3, -2).requires_grad_(value.requires_grad)


def expanded(value: Tensor) -> Tensor:
    """One number, or one for each column, at every place: the gradient of a sum."""
    one = value[..., :1, :] if value.dim() > 1 and value.shape[-2] else value.mean()
    return one.expand(value.shape)


def run(call: Call, arguments: Sequence[Any], given: Sequence[Tensor] | None = None) -> Made:
    """The call and its backward; `given`: the gradients of its results."""
    arguments = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in arguments]
    results = tensors_of(call(*arguments))
    asked = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
    given = gradients_for(results) if given is None else given
    found = torch.autograd.grad(results, asked, [g.to(r.dtype) for g, r in zip(given, results, strict=True)],
                                allow_unused=True)  # fmt: skip
    return Made(tuple(r.detach() for r in results), found)


def as_float64(value: Any) -> Any:
    """The same numbers in float64, in memory of their own."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def error(found: Tensor, exact: Tensor, least: float = TINY) -> float:
    """The largest, as a share of the largest element, or of `least`; infinite where other places are NaN."""
    found = found.detach().double()
    if found.shape != exact.shape or not torch.equal(found.isnan(), exact.isnan()):
        return math.inf
    infinite = exact.isinf() | found.isinf()
    if not torch.equal(found[infinite], exact[infinite]):
        return math.inf
    finite = torch.isfinite(exact)
    if not finite.any():
        return 0.0
    return float((found - exact)[finite].abs().max() / exact[finite].abs().max().clamp_min(max(least, TINY)))


def _largest(tensor: Tensor) -> float:
    return float(tensor[torch.isfinite(tensor)].abs().max()) if torch.isfinite(tensor).any() else 0.0


def differences(
    fast: Call, eager: Call, arguments: Sequence[Any], layout: Call | None = None, neighbours: int = 0
) -> list[str]:
    """Where the compiled call is further from float64 than eager and the dtype allow; [] where it is right.

    layout: of the gradients of results. neighbours: so many calls of eager close by are asked, too, where it is
    further: that eager is near once, in a sum that cancels, says nothing of what the dtype allows. Raises
    FallbackWarning where something is run as it was written.
    """
    dtype = next(a.dtype for a in arguments if isinstance(a, Tensor) and a.is_floating_point())
    plain = run(eager, arguments)
    given = gradients_for(plain.results, layout)
    exact = run(eager, [as_float64(a) for a in arguments], [g.double() for g in given])
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusegrad.FallbackWarning)
        ours = run(fast, arguments, given)
    plain = run(eager, arguments, given)
    wide = [as_float64(a) for a in arguments]
    usual = exact if layout is None else run(eager, wide, [g.double() for g in gradients_for(plain.results)])
    told, errors = [], _errors(plain, exact, usual)
    for (name, x), (_, p), off in zip(ours.named(), plain.named(), _errors(ours, exact, usual).values(), strict=True):
        allowed = max(FLOOR[dtype], WORSE_THAN_EAGER * errors[name])
        if neighbours and not off <= allowed:
            near = Neighbours(eager, arguments, given, layout)
            errors, neighbours = near.largest_errors(neighbours, errors, usual), 0
            allowed = max(FLOOR[dtype], WORSE_THAN_EAGER * errors[name])
        if x.dtype != p.dtype or not off <= allowed:
            told.append(f"{name} {tuple(x.shape)} {x.dtype}: {off:.1e}, allowed {allowed:.1e}")
    return told


def _errors(made: Made, exact: Made, usual: Made) -> dict[str, float]:
    """By name; usual: the gradients for other gradients of the results, which say how large they are."""
    largest = max((_largest(g) for g in exact.gradients if g is not None), default=0.0)
    least, zero = SMALL * largest, _zero_in_theory(usual)
    own = ((name, largest if name in zero else _largest(g)) for name, g in usual.named() if name.startswith("gradient"))
    sizes = {name: max(least, size) for name, size in own}
    pairs = zip(made.named(), exact.named(), strict=True)
    return {name: error(x, e, sizes.get(name, least)) for (name, x), (_, e) in pairs}


def _zero_in_theory(usual: Made) -> set[str]:
    """The gradients of which nothing but roundings is left in float64."""
    largest = {name: _largest(g) for name, g in usual.named() if name.startswith("gradient")}
    return {name for name, size in largest.items() if size < 1e-10 * max(largest.values())}


@dataclass(frozen=True)
class Neighbours:
    """Calls of eager whose arguments, and gradients of results, differ by some units of their dtype."""

    eager: Call
    arguments: Sequence[Any]
    given: Sequence[Tensor]
    layout: Call | None

    def largest_errors(self, count: int, found: dict[str, float], usual: Made) -> dict[str, float]:
        """The largest errors of eager here and there."""
        for seed in range(count):
            near = [_nudged(a, seed) for a in self.arguments]
            given = [self._laid_out(_nudged(g, seed + 100)) for g in self.given]
            exact = run(self.eager, [as_float64(a) for a in near], [g.double() for g in given])
            there = _errors(run(self.eager, near, given), exact, usual)
            found = {name: max(off, there[name]) for name, off in found.items()}
        return found

    def _laid_out(self, gradient: Tensor) -> Tensor:
        return gradient if self.layout is None else self.layout(gradient)


def _nudged(value: Any, seed: int) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    random = torch.Generator().manual_seed(seed)
    units = torch.randint(-4, 5, value.shape, generator=random) * torch.finfo(value.dtype).eps
    return (value.detach() * (1 + units)).to(value.dtype).requires_grad_(value.requires_grad)
