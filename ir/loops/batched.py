"""A loop over a batch: the body over a batch, and carries that have the axis as soon as one step gives it to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..graph import Graph, Value, building, emit
from ..types import Size
from .loop import Loop, loop_of

OverBatch = Callable[[Graph, Sequence[bool]], "tuple[Graph, tuple[bool, ...]]"]
"""(a body, its inputs that are mapped) -> the body over the batch, and which outputs have the axis."""


def batch_scan(
    node: Value, args: list[Value], mapped: Sequence[bool], size: Size, over: OverBatch
) -> tuple[Any, Any]:
    """The results of the scan over the batch, and which have the axis: lists where there are several."""
    loop, flags = loop_of(node, args), list(mapped)
    count = len(loop.init)
    while True:
        body, given = over(loop.body, flags)
        grown = [f or g for f, g in zip(flags[:count], given[:count], strict=True)]
        if grown == flags[:count]:
            break
        flags[:count] = grown
    with building(body):
        carried = [_with_axis(o, f, g, size) for o, f, g in zip(body.outputs[:count], grown, given, strict=False)]
    body.returning([*carried, *body.outputs[count:]])
    init = [_with_axis(a, f, m, size) for a, f, m in zip(loop.init, grown, mapped, strict=False)]
    xs = [steps_first(x) if m else x for x, m in zip(loop.xs, mapped[count:], strict=False)]
    results = Loop(body, tuple(init), tuple(xs), loop.wholes, loop.length, loop.reverse).emit()
    has_axis = [*grown, *given[count:]]
    results[count:] = [steps_first(y) if m else y for y, m in zip(results[count:], given[count:], strict=True)]
    return (results, has_axis) if len(results) > 1 else (results[0], has_axis[0])


def steps_first(x: Value) -> Value:
    """[batch, steps, ..] -> [steps, batch, ..], and back."""
    return emit("permute", x, perm=(1, 0, *range(2, x.ndim)))


def _with_axis(x: Value | None, wanted: bool, has: bool, size: Size) -> Value:
    assert x is not None  # the results of a body are all there
    if has or not wanted:
        return x
    return emit("broadcast", x, shape=(size, *x.shape), axes=tuple(range(1, x.ndim + 1)))
