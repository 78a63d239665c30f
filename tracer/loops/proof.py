"""The proof of a rolled trace: unrolled at a length, it is the trace of that length, step by step."""

from __future__ import annotations

from typing import Any

from .affine import Fit
from .description import Carried, Each, Parts, Place, Read, Rolled, Run, Same
from .floats import Float, Formula
from .program import Constant, Program, Ref
from .reasons import OtherSteps
from .rolling import Located

UNPROVED = "unrolled again at another length it is not the method"


def require_proved(rolled: Rolled, program: Program) -> None:
    """Raises OtherSteps where the rolled form is not this program at its length."""
    if not is_proved(rolled, program):
        raise OtherSteps(UNPROVED)


def is_proved(rolled: Rolled, program: Program) -> bool:
    """True where the rolled form is this program at its length."""
    return _Proof(rolled, program).holds()


class _Proof:
    def __init__(self, rolled: Rolled, program: Program) -> None:
        self.rolled, self.length = rolled, program.length
        self.program = program
        self.shown = Located(rolled.shown, rolled.layout)

    def holds(self) -> bool:
        regions = self.rolled.layout.at(self.length)
        outside = len(self.rolled.outside)
        if outside + sum(r.count * r.period for r in regions) != len(self.program.steps):
            return False
        self.located = Located(self.program, self.rolled.layout)
        results = self.rolled.results
        same = len(results) == len(self.program.results)
        return same and all(map(self._is_step, self.located.places)) and all(
            self._is(operand, leaf, 0) for operand, leaf in zip(results, self.program.results, strict=True)
        )

    def _is_step(self, place: Place) -> bool:
        """Whether the step at a place does what the rolled form says."""
        source = place.source
        step = self.located.steps[place]
        if isinstance(source, Each):
            operands, like = self.rolled.bodies[source.loop][source.step], Place(source, 0)
        else:
            operands, like = self.rolled.outside[source.step], place
        if step.token != self.shown.steps[like].token or len(step.leaves) != len(operands):
            return False
        loop = source.loop if isinstance(source, Each) else -1
        pairs = zip(operands, step.leaves, strict=True)
        return all(self._is(operand, leaf, place.index, loop) for operand, leaf in pairs)

    def _is(self, operand: Any, leaf: Any, t: int, loop: int = -1) -> bool:
        if isinstance(leaf, Ref):
            return self._place(operand, t, loop) == self.located.place(leaf)
        if isinstance(leaf, list):
            expected = self._places(operand, t, loop)
            return expected == [self.located.place(ref) for ref in leaf]
        if isinstance(leaf, Float):
            return self._is_float(operand, leaf, t)
        if isinstance(operand, Fit):
            return bool(operand.at(t, self.length) == leaf)
        return bool(operand == leaf)

    def _is_float(self, operand: Any, leaf: Float, t: int) -> bool:
        try:
            value = operand.at(t, self.length) if isinstance(operand, Formula) else operand.value
        except ArithmeticError:
            return False
        return isinstance(operand, Formula | Constant) and leaf.is_bitwise(value)

    def _place(self, operand: Any, t: int, loop: int) -> Place | None:
        if isinstance(operand, Read):
            return Place(operand.source, operand.index.at(t, self.length))
        if isinstance(operand, Same):
            return Place(Each(loop, operand.step, operand.port), t)
        if not isinstance(operand, Carried):
            return None
        if t < len(operand.first):
            return self._place(operand.first[t], 0, -1)
        return Place(Each(loop, operand.step, operand.port), t - len(operand.first))

    def _places(self, operand: Any, t: int, loop: int) -> list[Place | None]:
        if isinstance(operand, tuple):
            return [self._place(o, t, loop) for o in operand]
        return [p for part in operand.parts for p in self._run(part)] if isinstance(operand, Parts) else []

    def _run(self, part: Any) -> list[Place | None]:
        if isinstance(part, Read):
            return [self._place(part, 0, -1)]
        if isinstance(part, tuple):
            return [place for turn in zip(*map(self._run, part), strict=True) for place in turn]
        assert isinstance(part, Run)
        start, count = part.start.at(0, self.length), part.count.at(0, self.length)
        return [Place(part.source, start + part.direction * i) for i in range(count)]
