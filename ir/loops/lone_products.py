"""Products in a step that use each element once are sums in it: a library call would read from memory what is carried.

    y[b, v] = dot(q[b, k], s[b, k, v])  ->  sum over k of q[b, k] * s[b, k, v]

`s` is carried, or another one in each step, and has all axes of the product; a matrix that all steps multiply with is
one product over all of them. Low floats are added in float32, as by a product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..graph import Value
from ..rewrite import make, rebuild
from ..types import LOW_FLOATS, Size
from .loop import Loop, below

Axes = tuple[int, ...]


def lone_products(loop: Loop) -> list[Value] | None:
    """The loop whose products of a matrix that varies with a vector are sums; None where it has none."""
    inputs = loop.inputs
    varying = below(loop.body, [*inputs.carries, *inputs.xs])
    lone = [v for v in loop.body.order() if v.prim == "dot" and (large := _largest(v)) and large.id in varying]
    if not lone:
        return None
    return replace(loop, body=rebuild(loop.body, {}, {v.id: _summing(v) for v in lone})).emit()


def _operands(value: Value) -> list[tuple[Value, Axes]]:
    """The operands of a product, with labels of their axes."""
    return [(x, value.params[name]) for x, name in zip(value.args, ("x_axes", "y_axes"), strict=True)]


def _wide(x: Value, labels: Axes) -> list[int]:
    return [label for label, n in zip(labels, x.shape, strict=True) if n != 1]


def _largest(value: Value) -> Value | None:
    """The operand that has all axes of the product, where the other one has fewer."""
    (x, x_axes), (y, y_axes) = _operands(value)
    left, right = set(_wide(x, x_axes)), set(_wide(y, y_axes))
    is_summed = bool((left | right) - set(value.params["out_axes"]))
    return None if left == right or not is_summed else x if right < left else y if left < right else None


class _summing:
    """A builder of the sum that a product is."""

    def __init__(self, value: Value) -> None:
        self.value = value

    def __call__(self, env: Mapping[int, Value]) -> Value:
        value, operands = self.value, _operands(self.value)
        sizes = {a: n for x, labels in operands for a, n in zip(labels, x.shape, strict=True) if n != 1}
        outer = [a for a in value.params["out_axes"] if a in sizes]
        labels = [*outer, *(a for a in sizes if a not in outer)]
        shape = tuple(sizes[a] for a in labels)
        x, y = (_spread(_widened(env[v.id]), axes, labels, shape) for v, axes in operands)
        total = make("sum", make("mul", x, y), axes=tuple(range(len(outer), len(labels))))
        total = make("cast", total, dtype=value.dtype) if total.dtype != value.dtype else total
        return make("reshape", total, shape=value.shape) if total.shape != value.shape else total


def _widened(x: Value) -> Value:
    return make("cast", x, dtype="f32") if x.dtype in LOW_FLOATS else x


def _spread(x: Value, axes: Axes, labels: Sequence[int], shape: tuple[Size, ...]) -> Value:
    """A value over labelled axes as one over `labels`."""
    wide = _wide(x, axes)
    small = make("reshape", x, shape=tuple(n for n in x.shape if n != 1)) if len(wide) != x.ndim else x
    order = sorted(range(len(wide)), key=lambda i: labels.index(wide[i]))
    moved = make("permute", small, perm=tuple(order)) if order != list(range(len(wide))) else small
    places = tuple(labels.index(wide[i]) for i in order)
    return make("broadcast", moved, shape=shape, axes=places) if len(places) != len(shape) else moved
