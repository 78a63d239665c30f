"""One composition of transforms over the table: the compiled class against the same mathematics in plain torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compose.functions import CASES, Case, Numbers

import fusegrad

Tensor = torch.Tensor
LANES = 3


@functools.cache
def _compiled(cls: Any, backend: str) -> Any:
    return fusegrad.compile(cls, backend=backend)


def compiled(case: Case, backend: str = "reference") -> Any:
    """One compiled class per case and backend, so that the files share captures."""
    return _compiled(case.cls, backend)


class Call:
    """A callable of the case's arguments, seen as a function of its tensors, with a sample to call it on."""

    def __init__(self, case: Case, apply: Callable[..., Any]) -> None:
        self.case, self.apply = case, apply
        self.sample = case.make(Numbers(0))  # here, not while a transform is active
        self.point = self.tensors(0)

    def tensors(self, seed: int) -> tuple[Tensor, ...]:
        return tuple(a for a in self.case.make(Numbers(seed)) if isinstance(a, Tensor))

    def batch(self, *lanes: int) -> tuple[Tensor, ...]:
        """Other tensors in every lane; the batch axes are in front."""
        if not lanes:
            return self.point
        total = functools.reduce(int.__mul__, lanes)
        columns = zip(*map(self.tensors, range(total)), strict=True)
        return tuple(torch.stack(c).reshape(*lanes, *c[0].shape) for c in columns)

    @property
    def argnums(self) -> tuple[int, ...]:
        """The tensors that have derivatives."""
        return tuple(i for i, t in enumerate(self.point) if is_float(t))

    def all(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Every output."""
        supply = iter(tensors)
        result = self.apply(*(next(supply) if isinstance(a, Tensor) else a for a in self.sample))
        return result if isinstance(result, tuple) else (result,)

    def outputs(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The outputs that have derivatives."""
        return tuple(o for o in self.all(*tensors) if is_float(o))

    def loss(self, *tensors: Tensor) -> Tensor:
        """A number that depends on every output, on none of them linearly."""
        return sum(((o + w) ** 2 / 2).sum() for o, w in weighted(self.outputs(*tensors)))  # type: ignore[return-value]

    def of_floats(self, f: Callable[..., Any], at: tuple[Tensor, ...] | None = None) -> Callable[..., Any]:
        """`f` as a function of the tensors that have derivatives."""
        fixed = list(self.point if at is None else at)

        def function(*floats: Tensor) -> Any:
            for i, value in zip(self.argnums, floats, strict=True):
                fixed[i] = value
            return f(*fixed)

        return function

    def floats(self, tensors: tuple[Tensor, ...] | None = None) -> tuple[Tensor, ...]:
        """The differentiable ones of the tensors; of the sample's own by default."""
        given = self.point if tensors is None else tensors
        return tuple(given[i] for i in self.argnums)


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def weighted(outputs: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
    """Real views of the outputs, each with fixed weights."""
    real = [torch.view_as_real(o.resolve_conj()) if o.is_complex() else o for o in outputs]
    return [(o, torch.linspace(0.3, 1.7, o.numel(), dtype=o.dtype).cos().reshape(o.shape)) for o in real]


def directions(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A tangent (or a cotangent) for each tensor, never symmetric."""
    return tuple(torch.cos(3 * t + i + 1) if t.is_floating_point() else torch.sin(t + i) for i, t in enumerate(tensors))


def close(mine: Any, theirs: Any) -> None:
    torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-8)


def agree(case: Case, compose: Callable[[Call], Any], backend: str = "reference") -> None:
    """The composition gives the same for the compiled class and for plain torch, and nothing ran uncaptured."""
    assert case.plain is not None
    before = fusegrad.stats()["fallbacks"]
    mine = compose(Call(case, compiled(case, backend).apply))
    close(mine, compose(Call(case, case.plain)))
    assert fusegrad.stats()["fallbacks"] == before, "something ran uncaptured"


def real(case: Case) -> bool:
    return not any(isinstance(a, Tensor) and a.is_complex() for a in case.make(Numbers(0)))


def each(composition: str, *, order: int = 1, where: Callable[[Case], bool] = lambda c: True) -> Any:
    """Parametrised over the table: the cases with an oracle of this order, known failures as strict xfails."""
    chosen = [c for c in CASES if c.plain is not None and c.order >= order and where(c)]
    return parametrized(chosen, composition)


def parametrized(cases: list[Case], composition: str) -> Any:
    return pytest.mark.parametrize("case", [_marked(c, composition) for c in cases], ids=lambda c: c.name)


def _marked(case: Case, composition: str) -> Any:
    why = case.fails.get(composition)
    return pytest.param(case, marks=pytest.mark.xfail(strict=True, reason=why)) if why else case
