"""A program whose steps are alike where they differ by a float."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...lowering.number_overloads import taking_tensors
from ..program import Constant, Expression, Program, Step, with_leaves


@dataclass(frozen=True)
class Float:
    """A float that a step is given."""

    value: float

    def is_bitwise(self, other: Any) -> bool:
        """Whether a value is this float, the sign of a zero included."""
        return type(other) is float and repr(other) == repr(self.value)


def floats_apart(program: Program) -> Program:
    """The same program, its floats no part of what steps do; itself where it has none."""
    steps = [_apart(step) for step in program.steps]
    return program if all(a is b for a, b in zip(steps, program.steps, strict=True)) else replace(program, steps=steps)


def _apart(step: Step) -> Step:
    floats = [at for at, leaf in zip(_arguments(step), step.leaves, strict=True) if _is_float(leaf)]
    # what has a name, `alpha=`, or takes numbers alone, stays a part of what is done
    if not floats or step.form[1] or taking_tensors(step.target, floats) is None:
        return step
    leaves = [Float(leaf.value) if _is_float(leaf) else leaf for leaf in step.leaves]
    kinds = tuple(leaf if isinstance(leaf, Constant | Expression) else type(leaf).__name__ for leaf in leaves)
    token: Any = step.token
    return replace(step, leaves=leaves, token=(*token[:2], kinds, *token[3:]))


def _arguments(step: Step) -> list[int]:
    """Of each leaf the argument that it is, or is in."""
    numbers: list[int] = []
    for at, form in enumerate(step.form[0]):
        with_leaves(form, partial(numbers.append, at))
    return numbers if not step.form[1] else [-1] * len(step.leaves)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Constant) and type(leaf.value) is float
