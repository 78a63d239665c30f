"""Sums over pairs that outgrow what they are made of, and are no product of matrices.

    d = (x[:, None] - y[None]).pow(2).sum(-1)      x [n, k], y [m, k]; d [n, m] is larger than both

What is summed is made of two sides element by element: one has the rows, the other the columns, and either may have
what is summed over, which numbers and further operands may have, too. x.x + y.y - 2 x.y is a product, and has other
digits: where points are near, what is left of it is an error of the size of x.x. So nothing is rewritten; a kernel
makes tiles of such a value as it is spelled, one place of what is summed over after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from ...graph import Value
from ...prims import PRIMS
from ...types import LOW_FLOATS, Size
from ..cost import Hints, estimate
from ..layout import segments

REDUCES = ("sum", "amax", "amin")
"""Reductions that take one place in after the other."""
FOLLOWED = ("broadcast", "permute", "reshape")
"""Layouts through which axes are followed; others are what a side is made of."""
MOST = 64
"""Nodes between such a sum and its sides, at most."""
EXPONENTIAL = ("exp", "exp2", "expm1", "log", "log2", "log1p", "tanh", "sigmoid", "sin", "cos", "erf")
"""Primitives that are left to the unit for special functions."""
ROUNDED = 3
"""Instructions of an operation whose result is rounded to a low float; of another it is one."""
Places: TypeAlias = tuple[int | None, ...]
"""For each axis of a value that of the sum's operand that it is; None of one place."""


class Sides(NamedTuple):
    """The axes of a sum's operand that the rows alone have, and the columns."""

    rows: frozenset[int]
    columns: frozenset[int]


def pair_sums(nodes: Sequence[Value], hints: Hints) -> list[Value]:
    """Those of some nodes that are sums over pairs, larger than what they are made of."""
    return [v for v in nodes if sides_of_pairs(v) is not None and _outgrows(v, hints)]


def sides_of_pairs(value: Value) -> Sides | None:
    """What is a row and what a column of a sum over pairs; None where it is none."""
    if value.prim not in REDUCES or value.dtype not in ("f32", *LOW_FLOATS) or value.ndim < 2:
        return None
    (x,) = value.args
    leaves = _leaves(x)
    if leaves is None or not any(set(value.params["axes"]) & set(at) for leaf, at in leaves if leaf.prim != "iota"):
        return None  # what numbers of places alone are summed to is a row's, whatever else it is made of
    kept = {a for a in range(x.ndim) if a not in value.params["axes"] and x.shape[a] != 1}
    found = {frozenset(a for a in places if a in kept) for _, places in leaves} - {frozenset()}
    widest = sorted((s for s in found if not any(s < other for other in found)), key=sorted)
    if len(widest) != 2 or widest[0] | widest[1] != kept:
        return None
    first, second = widest
    return Sides(first - second, second - first)


def operations_of_pairs(value: Value, hints: Hints) -> int:
    """Operations of all elements of a sum over pairs, a product and a sum being two, as for matmuls."""
    size, steps = value.args[0].aval.numel, 1
    for node in _made_of_sides(value.args[0]):
        if PRIMS[node.prim].family == "elementwise" and node.prim != "cast" and node.aval.numel == size:
            steps += ROUNDED if node.dtype in LOW_FLOATS else 1
    return 2 * steps * estimate(size, hints)


def powers_of_pairs(value: Value, hints: Hints) -> int:
    """Special functions of all elements of a sum over pairs."""
    size = value.args[0].aval.numel
    inside = [v for v in _made_of_sides(value.args[0]) if v.prim in EXPONENTIAL and v.aval.numel == size]
    return len(inside) * estimate(size, hints)


def inside_of_pairs(value: Value) -> set[int]:
    """Ids of what a sum over pairs sums, as large as that."""
    size = value.args[0].aval.numel
    return {v.id for v in _made_of_sides(value.args[0]) if v.aval.numel == size}


def _outgrows(value: Value, hints: Hints) -> bool:
    size = estimate(value.aval.numel, hints)
    return all(estimate(leaf.aval.numel, hints) < size for leaf, _ in _leaves(value.args[0]) or ())


def _made_of_sides(root: Value) -> Iterator[Value]:
    """The nodes between a sum and its sides."""
    todo, seen = [root], set[int]()
    while todo:
        value = todo.pop()
        if value.id not in seen and _is_followed(value):
            seen.add(value.id)
            yield value
            todo += value.args


def _is_followed(value: Value) -> bool:
    return PRIMS[value.prim].family == "elementwise" or value.prim in FOLLOWED


def _leaves(root: Value) -> list[tuple[Value, Places]] | None:
    """What a value is made of, element by element, numbers aside; None where axes are not followed so far."""
    found: list[tuple[Value, Places]] = []
    todo, seen = [(root, _own_places(root.shape))], set[tuple[int, Places]]()
    while todo:
        value, places = todo.pop()
        if (value.id, places) in seen or value.prim == "full":
            continue
        seen.add((value.id, places))
        if len(seen) > MOST:
            return None
        if not _is_followed(value):
            found.append((value, places))
            continue
        for operand in value.args:
            above = _places_of(operand, value, places)
            if above is None:
                return None
            todo.append((operand, above))
    return found


def _own_places(shape: Sequence[Size]) -> Places:
    return tuple(None if n == 1 else at for at, n in enumerate(shape))


def _places_of(operand: Value, value: Value, places: Places) -> Places | None:
    """The axes of an operand as those of the sum's; None where they are others."""
    if value.prim == "broadcast":
        pairs: Collection[tuple[int, int]] = list(enumerate(value.params["axes"]))
    elif value.prim == "permute":
        pairs = [(axis, at) for at, axis in enumerate(value.params["perm"])]
    elif value.prim == "reshape":
        runs = [([i for i in a if operand.shape[i] != 1], [i for i in b if value.shape[i] != 1])
                for a, b in segments(operand.shape, value.shape)]  # fmt: skip
        if any(len(a) != len(b) or len(a) > 1 for a, b in runs):
            return None
        pairs = [(a[0], b[0]) for a, b in runs if a]
    else:
        pairs = [(at, at) for at in range(value.ndim)]
    of = {axis: places[at] for axis, at in pairs if operand.shape[axis] != 1}
    return tuple(of.get(axis) for axis in range(operand.ndim))
