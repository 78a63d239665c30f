"""Is the written backward the derivative of forward? Its gradients beside differences of forward, in float64.

Not torch's gradcheck: it takes a kink for a mistake, and does not say which number is wrong. A complex gradient is what
torch says that it is: the slope along the real part, and i times the slope along the imaginary one.
A wrong backward stays wrong under fusegrad, and many are wrong on purpose: what is found is told, and nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .compare import Outcome, error_text
from .modes import distinct
from .reference_transforms import STEP, InFloat64, UnsteadyError, central_difference
from .subject import Subject, Weights
from .variations import all_cast

Tensor = torch.Tensor
NEAR = 1e-4  # of the largest number, and absolute: central differences are good to six digits
PARTS: dict[bool, dict[str, complex]] = {False: {"": 1.0}, True: {".real": 1.0, ".imag": 1j}}
"""The directions in which a number moves, by whether it is complex."""
INTENDED = "intended, as in a straight-through estimator? `expect_derivative=False` says so"


@dataclass(frozen=True)
class Derivative:
    """Whether the written backward is the derivative of forward."""

    holds: bool | None
    """True or False; None where nothing could be compared."""
    largest: float = 0.0
    """The largest difference of a gradient's number from forward's slope."""
    at: str = ""
    """The place of that difference, "x[3]"."""
    got: float = 0.0
    """backward's number there."""
    expected: float = 0.0
    """forward's slope there, by central differences in float64."""
    unasked: str = ""
    """Why nothing was compared."""

    def __str__(self) -> str:
        if self.holds is None:
            return f"backward beside the derivative of forward: not compared, {self.unasked}"
        if self.holds:
            return f"backward is the derivative of forward (largest difference {self.largest:.1g}, at {self.at})"
        numbers = f"{self.got:.4g}, by differences {self.expected:.4g}"
        largest = f"largest difference {self.largest:.3g} at {self.at}: {numbers}"
        return f"backward is not the derivative of forward: {largest}\n  {INTENDED}"


def compare_with_derivative(subject: Subject, xs: Sequence[Tensor]) -> Derivative | None:
    """On small tensors; None where backward is derived, so that there is nothing to ask."""
    if not isinstance(subject.user, type) or subject.compiler.user.derives_backward:
        return None
    try:
        return _compare(subject, all_cast(xs, torch.float64))
    except Exception as error:
        return Derivative(None, unasked=f"it raises {error_text(Outcome({}, error))}")


def _compare(subject: Subject, xs: Sequence[Tensor]) -> Derivative:
    # What backward says.
    with InFloat64():
        gs = subject.gradients(xs, Weights())
        outcome = subject.run(subject.eager, "backward", xs, gs)
    if outcome.error is not None or not any(g is not None for g in gs):
        raised = outcome.error and f"backward raises {error_text(outcome)}"
        return Derivative(None, unasked=raised or "no output is differentiable")
    # What forward does, number by number; where its two sides disagree there is no derivative.
    worst: Derivative | None = None
    for k, x in enumerate(distinct(xs)):
        name = subject.names[next(i for i, other in enumerate(xs) if other is x)]
        gradient = outcome.values[f"gradient {k}"]
        for index in _indices(x):
            at = f"{name}[{', '.join(map(str, index))}]" if index else name
            number = 0.0 if gradient is None else gradient[index].item()
            for part, unit in PARTS[x.is_complex()].items():
                got = (number * unit.conjugate()).real
                worst = _worse(worst, at + part, got, _slope(subject, xs, gs, x, index, unit))
    return worst or Derivative(None, unasked="forward has kinks, jumps or rounding at every place")


def _worse(worst: Derivative | None, at: str, got: float, expected: float | None) -> Derivative | None:
    """The larger difference of two, beside what it should be: a place without a slope is passed over."""
    if expected is None:
        return worst
    largest = abs(got - expected)
    if worst is not None and largest / (1 + abs(expected)) <= worst.largest / (1 + abs(worst.expected)):
        return worst
    return Derivative(largest <= NEAR * (1 + abs(expected)), largest, at, got, expected)


def _indices(x: Tensor) -> list[tuple[int, ...]]:
    return [tuple(int(i) for i in torch.unravel_index(torch.tensor(n), x.shape)) for n in range(x.numel())]


def _slope(
    subject: Subject, xs: Sequence[Tensor], gs: Sequence[Any], x: Tensor, index: tuple[int, ...], unit: complex
) -> float | None:
    """Of the weighted sum of the outputs, along one number of x; None where it has none."""
    step, weights = STEP * max(1.0, abs(x[index].item())), [g if g is None else g.conj() for g in gs]

    def value(move: float) -> Tensor:
        moved = x.detach().clone()
        moved[index] += move * unit
        with InFloat64(), torch.no_grad():
            return subject.weighted([moved if other is x else other for other in xs], weights)

    try:
        return central_difference(value(-step), value(0.0), value(step), step).item()
    except UnsteadyError:
        return None
