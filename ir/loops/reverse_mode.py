"""The transpose of a loop that is linear in what it carries: a loop that runs the other way.

    h = a[t] * h + x[t],  y[t] = h    ->    h_bar = h_bar + y_bar[t];  x_bar[t] = h_bar;  h_bar = a[t] * h_bar

What is the same in all steps gets the sum of their cotangents, carried along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import InvalidGraphError
from ..graph import Graph, Value, building, emit
from ..rewrite import extract
from ..types import TensorType
from .loop import Loop, loop_of

Transpose = Callable[[Graph, Sequence[int]], Graph]
"""(a body, the inputs that it is linear in) -> (its other inputs, cotangents of its outputs) -> cotangents of these."""


def transpose_scan(
    node: Value, bars: Sequence[Value | None], args: list[Value], hits: Sequence[int], transpose: Transpose
) -> list[Value | None]:
    """Cotangents of the operands `hits`, from those of the results. Of linear operands, `args` has only the type."""
    loop = loop_of(node, args)
    count, linear = len(loop.init), sorted(loop.dependents(hits))
    if linear[:count] != list(range(count)):
        raise InvalidGraphError("a loop carries what is not linear beside what is", node=repr(node))
    pulled = transpose(_with_cotangents(loop, bars), linear)
    back = _Backward(loop, linear, bars, pulled).loop()
    found = dict(zip(back[1], back[0].emit(), strict=True))
    return [found.get(i) for i in hits]


def _with_cotangents(loop: Loop, bars: Sequence[Value | None]) -> Graph:
    """The body with the results that have a cotangent; carries have one in any step."""
    outputs = [o if i < len(loop.init) or bars[i] is not None else None for i, o in enumerate(loop.body.outputs)]
    return loop.body.copy().returning(outputs)


class _Backward:
    """The transposed loop. Inputs of `pulled`: those that are no linear inputs, then cotangents of carries and ys."""

    def __init__(self, loop: Loop, linear: list[int], bars: Sequence[Value | None], pulled: Graph) -> None:
        self.source, self.bars, self.pulled = loop, bars, pulled
        self.count, self.steps = len(loop.init), len(loop.init) + len(loop.xs)
        self.of_input = dict(zip(linear, pulled.outputs, strict=True))
        self.operands = [*loop.init, *loop.xs, *loop.wholes]
        known = [i for i in range(len(self.operands)) if i not in linear]
        given = [i for i, b in enumerate(bars) if i < self.count or b is not None]
        names = iter(pulled.inputs)
        self.known = {i: next(names) for i in known}
        self.bar_inputs = {i: next(names) for i in given}

    def loop(self) -> tuple[Loop, list[int]]:
        """The loop, and the operands of the first one whose cotangents are its results."""
        kinds = [[i for i in self.of_input if start <= i < stop] for start, stop in self._bounds()]
        carries, xs, wholes = kinds
        xs, wholes = ([i for i in kind if self.of_input[i] is not None] for kind in (xs, wholes))
        sums = [self.pulled.input(self.operands[i].aval, f"sum{i}") for i in wholes]
        with building(self.pulled):
            ends = [_or_zeros(self.of_input[i], self.pulled_type(i)) for i in carries]
            added = [emit("add", s, self.of_input[i]) for s, i in zip(sums, wholes, strict=True)]  # type: ignore[arg-type]
        given = [*ends, *added, *(self.of_input[i] for i in xs)]
        body = extract(given, [*self._inputs(sums)], name=self.pulled.name)
        init = [_or_zeros(self.bars[i], self.operands[i].aval) for i in carries]
        init += [_or_zeros(None, self.operands[i].aval) for i in wholes]
        ys = [b for i, b in enumerate(self.bars) if i >= self.count and b is not None]
        known_xs, known_wholes = (
            [self.operands[i] for i in self.known if start <= i < stop] for start, stop in self._bounds()[1:]
        )
        back = Loop(
            body, tuple(init), (*ys, *known_xs), tuple(known_wholes), self.source.length, not self.source.reverse
        )
        return back.without_unread(), [*carries, *wholes, *xs]

    def pulled_type(self, carry: int) -> TensorType:
        return self.bar_inputs[carry].aval

    def _bounds(self) -> tuple[tuple[int, int], ...]:
        return (0, self.count), (self.count, self.steps), (self.steps, len(self.operands))

    def _inputs(self, sums: Sequence[Value]) -> list[Value]:
        """Inputs of `pulled` in the order of a body: carries, steps, wholes."""
        bars = list(self.bar_inputs.values())
        steps = [v for i, v in self.known.items() if i < self.steps]
        wholes = [v for i, v in self.known.items() if i >= self.steps]
        return [*bars[: self.count], *sums, *bars[self.count :], *steps, *wholes]


def _or_zeros(value: Value | None, aval: TensorType) -> Value:
    return emit("full", value=0.0, shape=aval.shape, dtype=aval.dtype) if value is None else value
