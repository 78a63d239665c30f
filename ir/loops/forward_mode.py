"""The tangent of a loop: one loop that carries values and their tangents side by side.

    h = f(h, x)   ->   h, h_dot = f(h, x), df(h, x)(h_dot, x_dot)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ..graph import Graph, Value, building, emit
from ..rewrite import extract
from ..types import TensorType
from .loop import Loop, loop_of

Push = Callable[[Graph, Sequence[int]], Graph]
"""(a body, its inputs that have a tangent) -> its outputs and then their tangents, None for zero."""


def push_scan(node: Value, args: list[Value], dots: list[Value | None], push: Push) -> tuple[Any, Any]:
    """The results of a scan and their tangents: lists where there are several."""
    loop = loop_of(node, args)
    moving, joint = _joint(loop, [i for i, d in enumerate(dots) if d is not None], push)
    count, results = len(loop.init), len(loop.results)
    tangents = [o for o in joint.outputs[results:]]
    with building(joint):
        tangents[:count] = [
            _or_zeros(t, joint.inputs[i].aval) if i in moving else None for i, t in enumerate(tangents[:count])
        ]
    both = _both(loop, joint, moving, dots, tangents).emit()
    supply = iter(both)
    values: list[Any] = [next(supply) for _ in range(count)]
    moved: list[Any] = [None if t is None else next(supply) for t in tangents[:count]]
    values += [next(supply) for _ in range(results - count)]
    moved += [None if t is None else next(supply) for t in tangents[count:]]
    return (values, moved) if results > 1 else (values[0], moved[0])


def _joint(loop: Loop, moving: list[int], push: Push) -> tuple[list[int], Graph]:
    """The body with tangents, and the inputs that have one: carries join as long as a step gives them one."""
    while True:
        joint = push(loop.body, moving)
        tangents = joint.outputs[len(loop.results) :]
        more = [i for i in range(len(loop.init)) if tangents[i] is not None and i not in moving]
        if not more:
            return moving, joint
        moving = sorted([*moving, *more])


def _both(
    loop: Loop, joint: Graph, moving: list[int], dots: list[Value | None], tangents: Sequence[Value | None]
) -> Loop:
    """The loop over values and tangents: of each kind of operand the values, then the tangents."""
    count = len(loop.init)
    bounds = (0, count, count + len(loop.xs), len(loop.body.inputs))
    values, own = [*loop.init, *loop.xs, *loop.wholes], joint.inputs[len(loop.body.inputs) :]
    operands: list[tuple[Value, ...]] = []
    inputs: list[Value] = []
    for start, stop in itertools.pairwise(bounds):
        moved = [i for i in moving if start <= i < stop]
        inputs += [*joint.inputs[start:stop], *(own[moving.index(i)] for i in moved)]
        operands.append((*values[start:stop], *(_or_zeros(dots[i], values[i].aval) for i in moved)))
    given = joint.outputs[: len(loop.results)]
    each = [*given[:count], *tangents[:count], *given[count:], *tangents[count:]]
    body = extract([o for o in each if o is not None], inputs, name=joint.name)
    init, xs, wholes = operands
    return Loop(body, init, xs, wholes, loop.length, loop.reverse)


def _or_zeros(value: Value | None, aval: TensorType) -> Value:
    return emit("full", value=0.0, shape=aval.shape, dtype=aval.dtype) if value is None else value
