"""Sums over the rows of what is made of a symmetric product: sums over columns, with what is beside it turned.

    s = x @ x.T                                   s.T is s
    d = exp(s - m[:, None])                       d.T is exp(s - m)
    d @ x, d.T @ x                          ->    d @ x, exp(s - m) @ x          one walk in the place of two
    d @ x + d.T @ x, (d + d.T) @ x          ->    (d + exp(s - m)) @ x           and one product

Losses over the pairs of a batch are such (contrastive, by labels, by kernels). All sums over rows are turned, or none.
"""

from __future__ import annotations

import itertools
import math
from functools import partial

from ....graph import Graph, Value
from ....prims import PRIMS
from ....rewrite import Op, Rules, X, Y, make, number_of, rebuild, rules
from ....types import LOW_FLOATS
from ...layout import layout
from ...virtual import is_source, sides_of, summed_axes, sums_of
from .dot_axes import Dot

Axes = tuple[int, ...]
LEAVES = ("input", "full", "iota", "broadcast")
"""What a kernel reads turned as it reads it straight."""


def without_transposes(graph: Graph, virtual: frozenset[int]) -> Graph:
    """The graph with values made of what is turned, in the place of transposes."""
    turned = Turned(graph, virtual)
    mirrored = {v.id: partial(turned.mirror, v.args[0]) for v in graph.order() if turned.is_mirror(v)}
    return rebuild(graph, layout, mirrored) if mirrored else graph


def one_sided(graph: Graph, virtual: frozenset[int]) -> Graph:
    """The graph with sums over columns alone, where each sum over rows can be turned."""
    turned = Turned(graph, virtual)
    rows, columns = turned.sums_by_side()
    if not columns or not all(map(turned.can_turn, (*rows, *columns))):
        return graph
    return rebuild(rebuild(graph, layout, {v.id: partial(turned.sum_of, v) for v in rows}), TOGETHER)


def is_of_symmetric(value: Value, virtual: frozenset[int]) -> bool:
    """A sum over rows or columns of what is made of symmetric products alone."""
    todo, products = [a for a in value.args if a.id in virtual], set[Value]()
    while todo:
        made = todo.pop()
        products |= {made} if is_source(made, virtual) else set()
        todo += [a for a in made.args if a.id in virtual]
    return bool(products) and all(_swap_of_product(v) is not None for v in products)


class Turned:
    """What is made of symmetric products alone, by the axes that change places."""

    def __init__(self, graph: Graph, virtual: frozenset[int]) -> None:
        self.nodes, self.virtual = graph.order(), virtual
        self.sides = sides_of(self.nodes, virtual)
        self.swaps: dict[int, Axes | None] = {}
        for value in self.nodes:
            if value.id in virtual:
                self.swaps[value.id] = self._swap(value)

    def _swap(self, value: Value) -> Axes | None:
        """The places of its axes once rows are columns; None where it is no such value."""
        if is_source(value, self.virtual):
            return _swap_of_product(value)
        found = {self.swaps[a.id] for a in value.args if a.id in self.virtual}
        swap = found.pop()
        if found or swap is None:
            return None
        if value.prim == "permute":
            perm = value.params["perm"]
            return tuple(perm.index(swap[a]) for a in perm)
        plain = PRIMS[value.prim].family == "elementwise"
        return swap if plain and all(a.id in self.virtual or _is_turned_by_kernels(a) for a in value.args) else None

    def sums_by_side(self) -> tuple[list[Value], list[Value]]:
        """The sums over rows and over columns; those over both are of either."""
        found: tuple[list[Value], list[Value]] = ([], [])
        for value in sums_of(self.nodes, self.virtual):
            sides = {self.sides[a.id, i] for a, i in self._summed(value) if (a.id, i) in self.sides}
            if len(sides) == 1:
                found[sides.pop()].append(value)
        return found

    def _summed(self, value: Value) -> list[tuple[Value, int]]:
        operands = [(at, a) for at, a in enumerate(value.args) if a.id in self.virtual]
        return [(a, i) for at, a in operands for i in summed_axes(value, at)]

    def can_turn(self, value: Value) -> bool:
        """One operand is virtual, and rows are beside columns, so that what is left has its order."""
        inside = [a for a in value.args if a.id in self.virtual]
        swap = self.swaps[inside[0].id]
        return len(inside) == 1 and swap is not None and _are_neighbours(swap)

    def is_mirror(self, value: Value) -> bool:
        """It is the transpose of such a value."""
        return value.prim == "permute" and self.swaps.get(value.args[0].id) == value.params["perm"]

    # -------------------------------------------------------------- in the graph being built
    def sum_of(self, value: Value, env: dict[int, Value]) -> Value:
        """A sum over rows as one over columns."""
        (at,) = [i for i, a in enumerate(value.args) if a.id in self.virtual]
        swap, args, params = self.swaps[value.args[at].id], [env[a.id] for a in value.args], dict(value.params)
        assert swap is not None
        args[at] = self.mirror(value.args[at], env)
        if value.prim == "dot":
            side = ("x_axes", "y_axes")[at]
            params[side] = tuple(params[side][a] for a in swap)
        elif "axes" in params:
            params["axes"] = tuple(sorted(swap[a] for a in params["axes"]))
        else:
            params["axis"] = swap[params["axis"]]
        return make(value.prim, *args, **params)

    def mirror(self, value: Value, env: dict[int, Value]) -> Value:
        """A value with rows in the place of columns."""
        if is_source(value, self.virtual):
            return env[value.id]
        if value.prim == "permute":
            (source,) = value.args
            if self.is_mirror(value):
                return env[source.id]
            return make("permute", self.mirror(source, env), **value.params)
        swap = self.swaps[value.id]
        assert swap is not None
        args = [self.mirror(a, env) if a.id in self.virtual else _turned(a, swap, env) for a in value.args]
        return make(value.prim, *args, **value.params)


def _swap_of_product(product: Value) -> Axes | None:
    """Of x @ x.T, or of 2 * x @ x.T: what tells its operands apart are two axes of the result."""
    if product.prim != "dot":
        return None
    dot = _straight(Dot.of(product))
    if _unscaled(dot.operands[0]) != _unscaled(dot.operands[1]):
        return None
    apart = [(a, b) for a, b in zip(*dot.labels, strict=True) if a != b]
    if len(apart) != 1 or not {*apart[0]} <= {*dot.out}:
        return None
    first, second = (dot.out.index(label) for label in apart[0])
    places = list(range(len(dot.out)))
    places[first], places[second] = second, first
    return tuple(places)


def _straight(dot: Dot) -> Dot:
    """The product with operands that are no transposes."""
    for side, operand in enumerate(dot.operands):
        if operand.prim == "permute":
            labels = dict(zip(operand.params["perm"], dot.labels[side], strict=True))
            return _straight(dot.with_operand(side, operand.args[0], (labels[i] for i in range(operand.ndim))))
    return dot


def _unscaled(value: Value) -> Value:
    """Without powers of two, by which nothing is rounded, on whatever side they are."""
    while value.prim in ("neg", "mul"):
        numbers = [a for a in value.args if _is_power_of_two(number_of(a))]
        others = [a for a in value.args if a not in numbers]
        if len(others) != 1:
            return value
        (value,) = others
    return value


def _is_power_of_two(number: float | None) -> bool:
    return number is not None and math.isfinite(number) and abs(math.frexp(number)[0]) == 0.5


def _are_neighbours(swap: Axes) -> bool:
    moved = [i for i, at in enumerate(swap) if at != i]
    return moved[1] - moved[0] == 1


def _is_turned_by_kernels(value: Value) -> bool:
    if PRIMS[value.prim].family == "elementwise":
        return all(map(_is_turned_by_kernels, value.args))
    return value.prim in LEAVES


def _turned(value: Value, swap: Axes, env: dict[int, Value]) -> Value:
    """What is not virtual: each tensor, number and place that it is made of is turned."""
    if PRIMS[value.prim].family != "elementwise":
        return make("permute", env[value.id], perm=swap)
    return make(value.prim, *(_turned(a, swap, env) for a in value.args), **value.params)


def _together(x: Value, y: Value) -> Value | None:
    """x @ z + y @ z, where nothing is rounded between."""
    if x.dtype in LOW_FLOATS or not (_is_product(x) and _is_product(y)):
        return None
    first, second = _product(x), _product(y)
    for i, j in itertools.product((0, 1), repeat=2):
        if first.operands[1 - i] == second.operands[1 - j] and _added(first, i) == _added(second, j):
            total = make("add", first.operands[i], second.operands[j])
            return first.with_operand(i, total, first.labels[i]).made()
    return None


def _is_product(value: Value) -> bool:
    """A product, or its transpose."""
    return value.prim == "dot" or (value.prim == "permute" and _is_product(value.args[0]))


def _product(value: Value) -> Dot:
    if value.prim == "dot":
        return _straight(Dot.of(value))
    dot = _product(value.args[0])
    return dot._replace(out=tuple(dot.out[a] for a in value.params["perm"]))


def _added(dot: Dot, side: int) -> tuple[object, ...]:
    """What two products have alike that differ in the operand on one side alone, by how it lies; labels apart."""
    number = {label: at for at, label in enumerate(dict.fromkeys((*dot.labels[1 - side], *dot.labels[side])))}
    labels = (dot.labels[1 - side], dot.labels[side], dot.out)
    return (dot.operands[side].aval, *(tuple(number[label] for label in own) for own in labels))


TOGETHER: Rules = rules((Op("add", (X, Y)), _together))
