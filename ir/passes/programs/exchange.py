"""Sums over a virtual value that backward has from forward, by the order in which two sums are taken.

    sum_j A[i,j] * (sum_d x[i,d] y[j,d])   ->   sum_d x[i,d] * B[i,d]      where B[i,d] = sum_j A[i,j] y[j,d] is there

B is a product of forward, which backward is handed: the textbook's (p * (g @ v.T)).sum(-1) becomes (g * out).sum(-1). A
and the product in brackets are products of factors; what is fixed along j stands before the sum. Right wherever real
arithmetic is; without it there is one more pass over the virtual value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ...graph import Graph, Value
from ...rewrite import join_rules, make, rebuild
from ...types import LOW_FLOATS
from ..layout import layout
from ..simplify import HOLDERS, cast
from ..streaming.spellings.dot_axes import Dot, plain_dots
from ..streaming.spellings.row_sums import Builders, wide_readers

RULES = join_rules(layout, {"cast": (cast,)})
Powers = Counter[Value]
"""Factors of a product, each with the power that it has: 1 where it multiplies, -1 where it divides."""


class Bracket(NamedTuple):
    """An input of backward that holds a value, in some shape, and the value's nodes in the same graph."""

    known: Value
    made: Value


def exchanged(graph: Graph, brackets: Sequence[Bracket]) -> tuple[Graph, list[Bracket]]:
    """The graph with such sums in the place of those that it has, and the brackets that it reads for them."""
    asked = graph.copy()
    asked.outputs = [*asked.outputs, *(Value(asked, b.made.id) for b in brackets)]
    asked.output_strides = [*asked.output_strides, *(None for _ in brackets)]
    plain = plain_dots(asked)
    count = len(graph.outputs)
    found = list(_exchanges(plain, graph, brackets, plain.outputs[count:]))
    if not found:
        return graph, []
    plain.outputs, plain.output_strides = plain.outputs[:count], plain.output_strides[:count]
    better = rebuild(plain, RULES, _builders(plain, found))
    return better, list(dict.fromkeys(e.bracket for e in found))


def _builders(plain: Graph, found: Sequence[Exchange]) -> Builders:
    """Of the sums, and of what takes them off: no rounding stands between these two."""
    wide: dict[int, Value] = {}
    low = {e.sum.id for e in found if e.sum.dtype in LOW_FLOATS}
    readers = wide_readers(plain, wide, low, {e.sum.args[0].shape for e in found})
    return {e.sum.id: partial(e.build, wide) for e in found} | readers


def _exchanges(
    plain: Graph, graph: Graph, brackets: Sequence[Bracket], made: Sequence[Value | None]
) -> Iterator[Exchange]:
    """The first exchange of each sum."""
    places = {v.id: at for at, v in enumerate(graph.inputs)}
    known = [plain.inputs[places[b.known.id]] for b in brackets]
    roots = [None if m is None else _root(m) for m in made]
    for value in plain.order():
        tried = (
            _exchange(value, root, input_, bracket)
            for root, input_, bracket in zip(roots, known, brackets, strict=True)
            if value.prim == "sum" and root is not None
        )
        yield from [e for e in tried if e is not None][:1]


def _root(value: Value) -> Value | None:
    """The product below reshapes."""
    while value.prim == "reshape":
        (value,) = value.args
    return value if value.prim == "dot" else None


# ------------------------------------------------------------------ one exchange
@dataclass(frozen=True)
class Exchange:
    """A sum, what it is the sum of, and the operand and the bracket whose product is summed instead."""

    sum: Value
    operand: Value  # x, with the labels of `inner`
    operand_labels: tuple[int, ...]
    product: Value  # the product that is B
    bracket_labels: tuple[int, ...]  # of B, as labels of `inner`
    kept: tuple[int, ...]  # labels of the axes that the sum leaves
    factors: Powers  # fixed along the sum
    known: Value
    bracket: Bracket

    def build(self, wide: dict[int, Value], env: dict[int, Value]) -> Value:
        """The sum in its own dtype; in `wide`, as it was added."""
        order = (*self.kept, *(label for label in self.operand_labels if label not in self.kept))
        known = make("reshape", env[self.known.id], shape=self.product.shape)
        sizes = dict(zip(self.kept, self.sum.shape, strict=True))
        sizes |= dict(zip(self.operand_labels, self.operand.shape, strict=True))
        shape = tuple(sizes[label] for label in order)
        pairs = ((env[self.operand.id], self.operand_labels), (known, self.bracket_labels))
        left, right = (_spread(_exact(v), labels, order, shape) for v, labels in pairs)
        total = make("sum", make("mul", left, right), axes=tuple(range(len(self.kept), len(order))))
        for factor, power in self.factors.items():
            total = self._multiplied(total, factor, power, env)
        wide[self.sum.id] = total
        return make("cast", total, dtype=self.sum.dtype)

    def _multiplied(self, total: Value, factor: Value, power: int, env: dict[int, Value]) -> Value:
        if factor.prim == "full":
            row = make("full", value=factor.params["value"], shape=total.shape, dtype=total.dtype)
        else:
            gone = self.sum.params["axes"]
            (source,), axes = factor.args, factor.params["axes"]
            place = {a: at for at, a in enumerate(a for a in range(factor.ndim) if a not in gone)}
            row = make("broadcast", env[source.id], shape=total.shape, axes=tuple(place[a] for a in axes))
            row = make("cast", row, dtype=total.dtype)
        for _ in range(abs(power)):
            total = make("mul" if power > 0 else "div", total, row)
        return total


def _exchange(value: Value, product: Value, known: Value, bracket: Bracket) -> Exchange | None:
    """The exchange of one sum by one bracket, where it is one."""
    powers, outer = _factors(value.args[0]), Dot.of(product)
    for side, a in enumerate(product.args):
        if a.ndim == value.args[0].ndim and _summed(outer, side) == set(value.params["axes"]):
            rest = powers.copy()
            rest.subtract(_factors(a))
            left = Counter({v: n for v, n in rest.items() if n})
            for inner in [v for v in left if v.prim == "dot" and left[v] == 1 and v.shape == value.args[0].shape]:
                factors = Counter({v: n for v, n in left.items() if v != inner})
                fixed = all(_is_fixed(v, value.params["axes"]) for v in factors)
                matched = _matched(inner, product, side) if fixed else None
                if matched is not None:
                    operand, labels, bracket_labels = matched
                    gone = value.params["axes"]
                    kept = tuple(n for i, n in enumerate(inner.params["out_axes"]) if i not in gone)
                    return Exchange(value, operand, labels, product, bracket_labels, kept, factors, known, bracket)
    return None


def _summed(dot: Dot, side: int) -> set[int]:
    """The axes of an operand that the product sums."""
    return {i for i, label in enumerate(dot.labels[side]) if label not in dot.out}


def _matched(inner: Value, product: Value, side: int) -> tuple[Value, tuple[int, ...], tuple[int, ...]] | None:
    """The other operand of `inner`, its labels, and those of B, if the two share the operand y in the same way."""
    first, second = Dot.of(inner), Dot.of(product)
    names = dict(zip(second.labels[side], first.out, strict=True))  # labels of B's product -> labels of inner
    for at, y in enumerate(first.operands):
        if y != second.operands[1 - side]:
            continue
        pairs = set(zip(second.labels[1 - side], first.labels[at], strict=True))
        everything = names | dict(pairs)
        one_to_one = len(set(everything.values())) == len(everything)
        if one_to_one and all(names.get(a, b) == b for a, b in pairs) and all(n in everything for n in second.out):
            x, labels = first.operands[1 - at], first.labels[1 - at]
            out = tuple(everything[n] for n in second.out)
            if set(labels) <= set(out) and not _alone(first, labels, out):
                return x, labels, out
    return None


def _alone(inner: Dot, labels: Sequence[int], out: Sequence[int]) -> bool:
    """Something that `inner` sums is no axis of both x and B."""
    summed = {n for side in inner.labels for n in side if n not in inner.out}
    return not summed <= set(labels) & set(out)


# ------------------------------------------------------------------ factors
def _factors(value: Value, power: int = 1) -> Powers:
    """The values whose product it is, seen through casts that lose nothing."""
    if value.prim in ("mul", "div"):
        left, right = value.args
        found = _factors(left, power)
        found.update(_factors(right, power if value.prim == "mul" else -power))
        return found
    if value.prim == "cast" and value.dtype in HOLDERS.get(value.args[0].dtype, ()):
        return _factors(value.args[0], power)
    return Counter({value: power})


def _is_fixed(value: Value, axes: Sequence[int]) -> bool:
    """The same all along these axes."""
    return value.prim == "full" or (value.prim == "broadcast" and not set(value.params["axes"]) & set(axes))


def _exact(value: Value) -> Value:
    """Low floats as float32: their products are not rounded before they are added."""
    return make("cast", value, dtype="f32" if value.dtype in LOW_FLOATS else value.dtype)


def _spread(value: Value, labels: Sequence[int], order: Sequence[int], shape: Sequence[object]) -> Value:
    """A value over labels as one over all of them, in that order."""
    sorted_axes = sorted(range(len(labels)), key=lambda i: order.index(labels[i]))
    moved = make("permute", value, perm=tuple(sorted_axes)) if sorted_axes != list(range(len(labels))) else value
    places = tuple(order.index(labels[i]) for i in sorted_axes)
    return make("broadcast", moved, shape=tuple(shape), axes=places) if len(places) != len(shape) else moved
