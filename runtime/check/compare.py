"""Is one run of a Function the other? Facts by equality, numbers by their distance from a float64 run of eager.

|ours - wide| <= 1.5 |eager - wide| + 4 ulp of the largest number; single and double precision also stay element by
element near eager or near the wide run, so that one unlucky element of eager's excuses no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor
SLACK = 1.5
ULPS = 4
NEAR_ULPS = 64


@dataclass(frozen=True)
class Tolerance:
    """atol and rtol replace the rule of this module. strict: strides, requires_grad and None count too."""

    atol: float | None = None
    rtol: float | None = None
    strict: bool = True


@dataclass
class Outcome:
    """The outcome of a run: named results, or the error that it raised."""

    values: dict[str, Any]
    error: Exception | None = None


@dataclass(frozen=True)
class Difference:
    """The first thing in which two runs differ."""

    name: str
    fact: str
    index: tuple[int, ...] | None = None
    got: Any = None
    expected: Any = None
    wide: Any = None

    def __str__(self) -> str:
        if self.index is None:
            return f"{self.name}: {self.fact}"
        wide = "" if self.wide is None else f", float64 {self.wide!r}"
        return f"{self.name}{list(self.index)}: {self.fact}; got {self.got!r}, expected {self.expected!r}{wide}"


def first_difference(ours: Outcome, eager: Outcome, wide: Outcome | None, by: Tolerance) -> Difference | None:
    """None where both runs gave the same."""
    missing = eager.values.keys() ^ ours.values.keys()
    if missing:
        name = sorted(missing)[0]
        return Difference(name, "is there in one run and not in the other")
    wides: Mapping[str, Any] = wide.values if wide is not None else {}
    differences = (difference(n, ours.values[n], e, wides.get(n), by) for n, e in eager.values.items())
    return next((d for d in differences if d is not None), None)


def difference(name: str, ours: Any, eager: Any, wide: Any, by: Tolerance) -> Difference | None:
    """The difference between a value and eager's, or None."""
    if not by.strict:
        ours, eager = _zeros_for_none(ours, eager)
    if not isinstance(eager, Tensor) or not isinstance(ours, Tensor):
        same = type(ours) is type(eager) and not isinstance(eager, Tensor) and ours == eager
        return None if same else Difference(name, f"is {_short(ours)}, in eager {_short(eager)}")
    for fact in ("dtype", "shape", "device", *(("requires_grad",) if by.strict else ())):
        mine, theirs = getattr(ours, fact), getattr(eager, fact)
        if mine != theirs:
            return Difference(name, f"{fact} is {_plain(mine)}, in eager {_plain(theirs)}")
    if by.strict and eager.numel() and strides(ours) != strides(eager):
        return Difference(name, f"strides are {ours.stride()}, in eager {eager.stride()}")
    return inaccuracy(name, ours.detach(), eager.detach(), wide.detach() if isinstance(wide, Tensor) else None, by)


def _zeros_for_none(a: Any, b: Any) -> tuple[Any, Any]:
    """No gradient and a gradient of zeros are one thing to a transform."""
    if a is None and isinstance(b, Tensor):
        return torch.zeros_like(b), b
    return (a, torch.zeros_like(a)) if b is None and isinstance(a, Tensor) else (a, b)


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)[:80]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, torch.Size) else value


def strides(tensor: Tensor) -> list[int]:
    """The strides that mean something: those of axes longer than one."""
    return [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1]


def inaccuracy(name: str, ours: Tensor, eager: Tensor, wide: Tensor | None, by: Tolerance) -> Difference | None:
    """Whole numbers are equal, NaN and infinities in the same places, the rest as near to float64 as eager's is."""
    if not eager.is_floating_point() and not eager.is_complex():
        wrong = ours != eager
        return _worst(name, "differs", ours, eager, wide, wrong.double()) if bool(wrong.any()) else None
    # Numbers: the float64 run is the judge where there is one, else eager is.
    mine, theirs = widen(ours), widen(eager)
    judge = theirs if wide is None or wide.shape != eager.shape else widen(wide)
    # NaN and infinities have no distance: their places count.
    for kind in (torch.isnan, torch.isinf):
        wrong = kind(mine) != kind(theirs)
        if bool(wrong.any()):
            fact = f"{kind.__name__[2:]} in one and not in the other"
            return _worst(name, fact, ours, eager, wide, wrong.double())
    # Everywhere else the distance from the judge, beside eager's own.
    finite = torch.isfinite(mine) & torch.isfinite(judge) & torch.isfinite(theirs)
    error, eagers = ((torch.where(finite, x - judge, 0)).abs() for x in (mine, theirs))
    limit = _limits(mine, theirs, judge, finite, eagers, eager.dtype, by)
    if not bool((error > limit).any()):
        return None
    fact = f"error {error.max().item():.3g}, eager's {eagers.max().item():.3g}"
    return _worst(name, fact, ours, eager, wide, torch.where(error > limit, error, 0))


def _limits(
    mine: Tensor, theirs: Tensor, judge: Tensor, finite: Tensor, eagers: Tensor, dtype: torch.dtype, by: Tolerance
) -> Tensor:
    """The distance from the judge that each element may have."""
    scale = torch.where(finite, judge, 0).abs()
    if by.atol is not None or by.rtol is not None:
        return (by.atol or 0.0) + (by.rtol or 0.0) * scale + eagers
    if not eagers.numel():
        return eagers
    ulp = torch.finfo(dtype).eps * scale.max()
    limit = (SLACK * eagers.max() + ULPS * ulp).expand_as(eagers)
    if dtype in (torch.float16, torch.bfloat16):
        return limit
    near = torch.where(finite, mine - theirs, 0).abs() <= NEAR_ULPS * ulp
    return torch.where(near, limit, torch.minimum(limit, (SLACK * eagers.median() + NEAR_ULPS * ulp).expand_as(limit)))


def widen(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def _worst(name: str, fact: str, ours: Tensor, eager: Tensor, wide: Tensor | None, error: Tensor) -> Difference:
    """The difference at its largest."""
    flat = int(error.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), error.shape))
    at = [None if t is None or t.shape != eager.shape else t[index].item() for t in (ours, eager, wide)]
    return Difference(name, fact, index, *at)


def errors(ours: Outcome, eager: Outcome, wide: Outcome | None) -> tuple[float, float] | None:
    """The largest distances from float64 over all results, in ulp of the largest number: (ours, eager's)."""
    pairs = [
        pair
        for name, e in eager.values.items()
        if isinstance(e, Tensor) and e.is_floating_point() and wide is not None and e.numel()
        if (pair := _in_ulps(ours.values.get(name), e, wide.values.get(name))) is not None
    ]
    return (max(a for a, _ in pairs), max(b for _, b in pairs)) if pairs else None


def _in_ulps(ours: Any, eager: Tensor, wide: Any) -> tuple[float, float] | None:
    if not all(isinstance(t, Tensor) and t.shape == eager.shape for t in (ours, wide)):
        return None
    judge = widen(wide.detach())
    finite = torch.isfinite(judge)
    ulp = torch.finfo(eager.dtype).eps * torch.where(finite, judge, 0).abs().max().item()
    far = [torch.where(finite, widen(t.detach()) - judge, 0).abs().max().item() for t in (ours, eager)]
    return (far[0] / ulp, far[1] / ulp) if ulp else None


def error_text(outcome: Outcome) -> str:
    """The error that a run raised, in one line."""
    lines = str(outcome.error).strip().splitlines() or [""]
    return f"{type(outcome.error).__name__}: {lines[0][:90]}"
