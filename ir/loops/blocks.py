"""A loop as a loop over blocks of steps, and a rest: what is kept of a block is what is carried into it.

    T steps   ->   T // k blocks, each a loop of k steps; then a loop of T % k steps
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import sympy

from ..graph import Graph, Value, building, emit
from ..types import Size, simplify_size
from .loop import Loop, results_of

Emit = Callable[[Loop], list[Value]]
"""A loop -> its results, in the graph being built."""


def in_blocks(loop: Loop, steps: int, emit_blocks: Emit, emit_rest: Emit) -> list[Value]:
    """The results of the loop by blocks of so many steps, which one function emits, and a rest, which another does."""
    blocks = simplify_size(sympy.floor(sympy.sympify(loop.length) / steps))
    whole = simplify_size(sympy.expand(blocks * sympy.Integer(steps)))
    rest = simplify_size(sympy.expand(loop.length - whole))
    # Backwards, the rest comes first: it is behind the blocks.
    parts = {"blocks": _blocks(loop, blocks, steps, whole), "rest": _part(loop, whole, loop.length, rest)}
    order = ("rest", "blocks") if loop.reverse else ("blocks", "rest")
    count, carries, ys = len(loop.init), loop.init, dict[str, list[Value]]()
    for name in order:
        part = replace(parts[name], init=tuple(carries))
        results = (emit_blocks if name == "blocks" else emit_rest)(part)
        carries, ys[name] = tuple(results[:count]), results[count:]
    flat = [emit("reshape", y, shape=(whole, *y.shape[2:])) for y in ys["blocks"]]
    return [*carries, *(emit("cat", a, b, axis=0) for a, b in zip(flat, ys["rest"], strict=True))]


def _part(loop: Loop, start: Size, stop: Size, length: Size) -> Loop:
    """The steps from one to another."""
    return replace(loop, xs=tuple(_cut(x, start, stop) for x in loop.xs), length=length)


def _cut(x: Value, start: Size, stop: Size) -> Value:
    rest = x.shape[1:]
    zeros, ones = (0,) * len(rest), (1,) * x.ndim
    return emit("slice", x, start=(start, *zeros), stop=(stop, *rest), step=ones)


def _blocks(loop: Loop, blocks: Size, steps: int, whole: Size) -> Loop:
    """A loop over blocks whose body is the loop of one block."""
    xs = [emit("reshape", _cut(x, 0, whole), shape=(blocks, steps, *x.shape[1:])) for x in loop.xs]
    body = Graph(loop.body.name)
    inputs = loop.inputs
    carries = tuple(body.input_like(v) for v in inputs.carries)
    block = tuple(body.input(v.aval.with_shape((steps, *v.shape)), v.params["name"]) for v in inputs.xs)
    wholes = tuple(body.input_like(v) for v in inputs.wholes)
    with building(body):
        inner = replace(loop, init=carries, xs=block, wholes=wholes, length=steps)
        body.returning(results_of(emit("scan", *carries, *block, *wholes, **inner.params)))
    return replace(loop, body=body, xs=tuple(xs), length=blocks)
