"""Products over the axes that there are: layout around them becomes a matter of their labels.

    dot(reshape(q [b, h, n, d] -> [b*h, n, d]), ..)   ->  dot(q, .., bhnd,bhmd->bhnm)
    dot(q, broadcast(k [b, m, d] -> [b, h, m, d]))    ->  dot(q, k, bhnd,bmd->bhnm)
    sum(dot(x, y, bhnd,bhmd->bhnm), 1)                ->  dot(x, y, bhnd,bhmd->bnm)
    sum(dot(..) + dot(..) * 2, 1)                     ->  sum(dot(..), 1) + sum(dot(..), 1) * 2

A library merges the axes of a batch into one, and repeats an operand for it; a kernel walks them as they are, and so
does whoever compares two products.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ....graph import Graph, Value
from ....infer import sizes_equal
from ....rewrite import Rules, join_rules, make, rebuild
from ....types import Size, product
from ...layout import Axes, layout, segments, squeezed, wide, without_axes

SIDES = ("x_axes", "y_axes")
Labels = tuple[int, ...]
TERM_BY_TERM = ("add", "sub", "neg", "cast")
SCALED = ("mul", "div")
"""Linear in the first operand, where the second is the same along what is summed; mul in either."""


class Dot(NamedTuple):
    """A product on its way: operands with a label for each axis, and the labels of the result."""

    operands: tuple[Value, Value]
    labels: tuple[Labels, Labels]
    out: Labels

    @staticmethod
    def of(value: Value) -> Dot:
        x, y = value.args
        return Dot((x, y), (value.params["x_axes"], value.params["y_axes"]), value.params["out_axes"])

    def with_operand(self, side: int, value: Value, labels: Iterable[int]) -> Dot:
        """The same product with another operand on one side."""
        operands, every = list(self.operands), list(self.labels)
        operands[side], every[side] = value, tuple(labels)
        return Dot((operands[0], operands[1]), (every[0], every[1]), self.out)

    def made(self) -> Value:
        """The node; labels are numbered anew."""
        numbers = {label: i for i, label in enumerate(dict.fromkeys((*self.labels[0], *self.labels[1])))}
        x, y, out = (tuple(numbers[label] for label in labels) for labels in (*self.labels, self.out))
        return make("dot", *self.operands, x_axes=x, y_axes=y, out_axes=out)


def plain_dots(graph: Graph) -> Graph:
    """The graph with its products over plain axes."""
    return rebuild(graph, PLAIN)


# ------------------------------------------------------------------ rules
def _of_permute(value: Value) -> Value | None:
    """The labels move, not the operand."""
    dot = Dot.of(value)
    for side, operand in enumerate(dot.operands):
        if operand.prim == "permute":
            labels = dict(zip(operand.params["perm"], dot.labels[side], strict=True))
            return dot.with_operand(side, operand.args[0], (labels[i] for i in range(operand.ndim))).made()
    return None


def _of_broadcast(value: Value) -> Value | None:
    """What repeats an operand goes, where the other operand has that axis."""
    dot = Dot.of(value)
    for side, operand in enumerate(dot.operands):
        if operand.prim == "broadcast":
            (source,), axes = operand.args, operand.params["axes"]
            kept = [dot.labels[side][a] for a in axes]
            if 1 not in source.shape and set(dot.labels[side]) - set(kept) <= set(dot.labels[1 - side]):
                return dot.with_operand(side, source, kept).made()
    return None


def _of_ones(value: Value) -> Value | None:
    """Axes of size 1 are none."""
    dot, shapes = Dot.of(value), [a.shape for a in value.args]
    if not any(1 in shape for shape in shapes):
        return None
    for side, operand in enumerate(value.args):
        kept = wide(operand.shape)
        small = make("reshape", operand, shape=tuple(operand.shape[i] for i in kept))
        dot = dot.with_operand(side, small, (dot.labels[side][i] for i in kept))
    out = tuple(dot.out[i] for i in wide(value.shape))
    return make("reshape", dot._replace(out=out).made(), shape=value.shape)


def _of_merged(value: Value) -> Value | None:
    """An axis that a reshape merged is several."""
    dot = Dot.of(value)
    for side, operand in enumerate(dot.operands):
        if operand.prim == "reshape":
            for parts, merged in segments(operand.args[0].shape, operand.shape):
                sizes = [operand.args[0].shape[i] for i in parts if operand.args[0].shape[i] != 1]
                at = [i for i in merged if operand.shape[i] != 1]
                if len(at) == 1 < len(sizes) and _is_divisible(dot, dot.labels[side][at[0]], sizes):
                    return _divided(value, dot.labels[side][at[0]], sizes)
    return None


def _is_divisible(dot: Dot, label: int, sizes: Sequence[Size]) -> bool:
    """Both operands have that many places: B * H of one tensor may be b * h of another by what a call has shown."""
    pairs = (p for labels, x in zip(dot.labels, dot.operands, strict=True) for p in zip(labels, x.shape, strict=True))
    return all(sizes_equal(n, product(sizes)) for at, n in pairs if at == label)


def _divided(value: Value, label: int, sizes: Sequence[Size]) -> Value:
    """The product with several labels in the place of one."""
    dot = Dot.of(value)
    first = max((*dot.labels[0], *dot.labels[1])) + 1
    parts = tuple(range(first, first + len(sizes)))
    for side, operand in enumerate(dot.operands):
        labels, shape = _replaced(dot.labels[side], operand.shape, label, parts, sizes)
        dot = dot.with_operand(side, make("reshape", operand, shape=shape), labels)
    out, _ = _replaced(dot.out, value.shape, label, parts, sizes)
    return make("reshape", dot._replace(out=out).made(), shape=value.shape)


def _replaced(
    labels: Labels, shape: Sequence[Size], label: int, parts: Labels, sizes: Sequence[Size]
) -> tuple[Labels, tuple[Size, ...]]:
    pairs = [
        pair
        for at, size in zip(labels, shape, strict=True)
        for pair in (zip(parts, sizes, strict=True) if at == label else [(at, size)])
    ]
    return tuple(at for at, _ in pairs), tuple(size for _, size in pairs)


def _without_ones(value: Value) -> Value | None:
    """A permute of the axes that are not of size 1."""
    (x,) = value.args
    if 1 not in x.shape:
        return None
    rank = {axis: at for at, axis in enumerate(wide(x.shape))}
    perm = tuple(rank[i] for i in value.params["perm"] if i in rank)
    return make("reshape", make("permute", squeezed(x), perm=perm), shape=value.shape)


def _sum_of_products(value: Value) -> Value | None:
    """A sum over axes that both operands have is part of the product; one of what is linear in products, of each."""
    (x,) = value.args
    return _summed(x, x.shape, value.params["axes"])


def _summed(x: Value, shape: tuple[Size, ...], gone: Axes) -> Value | None:
    """The sum over axes of x in this shape, as sums of products; None where something else is summed."""
    if x.prim == "dot":
        return _sum_in_parts(x, shape, gone)
    if x.prim == "reshape":
        return _summed(x.args[0], shape, gone)
    if x.prim in TERM_BY_TERM and all(v.aval.is_float for v in (x, *x.args)):
        terms = [s for a in x.args if (s := _summed(a, shape, gone)) is not None]
        return make(x.prim, *terms, **x.params) if len(terms) == len(x.args) else None
    if x.prim in SCALED:
        ways = (x.args, x.args[::-1]) if x.prim == "mul" else (x.args,)
        for scaled, by in ways:
            factor = without_axes(make("reshape", by, shape=shape), gone)
            if factor is not None and (total := _summed(scaled, shape, gone)) is not None:
                return make(x.prim, total, factor)
    return None


def _sum_in_parts(x: Value, shape: tuple[Size, ...], gone: Axes) -> Value | None:
    """A product's sum; in another shape, that of heads in groups, one axis of the operands is several."""
    if x.shape == shape:
        return _sum_of_dot(Dot.of(x), gone)
    for axes, parts in segments(x.shape, shape):
        sizes = [shape[i] for i in parts if shape[i] != 1]
        label = Dot.of(x).out[axes[0]] if len(axes) == 1 < len(sizes) else None
        if label is not None and _is_divisible(Dot.of(x), label, sizes):
            (divided,) = _divided(x, label, sizes).args
            return _summed(divided, shape, gone)
    return None


def _sum_of_dot(dot: Dot, gone: Axes) -> Value | None:
    if not {dot.out[i] for i in gone} <= set(dot.labels[0]) & set(dot.labels[1]):
        return None
    return dot._replace(out=tuple(label for i, label in enumerate(dot.out) if i not in gone)).made()


PLAIN: Rules = join_rules(
    {
        "dot": (_of_permute, _of_broadcast, _of_ones, _of_merged),
        "permute": (_without_ones,),
        "sum": (_sum_of_products,),
    },
    layout,
)
