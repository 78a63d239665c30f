"""Sums over pairs that are no product of matrices, and outgrow what they are made of: (x[:, None] - y).pow(2).sum(-1).

    x [n, d], y [m, d] -> [n, m] in memory -> exp -> @ v

A kernel that streams makes its tiles by products. x.x + y.y - 2 x.y has one, and other digits: where points are near,
what is left of it is an error of the size of x.x. So nothing is rewritten; such values stay in memory, on record.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...graph import Graph, Value
from ...prims import PRIMS
from ..cost import Hints, estimate
from ..virtual import FOLLOWS


def pairs_in_memory(graph: Graph, hints: Hints) -> list[Value]:
    """The sums whose values, or what is made of them, a product reads from memory."""
    nodes = graph.order()
    found = [v for v in nodes if v.prim == "sum" and _is_of_pairs(v, hints)]
    return [v for v in found if any(a.id in _made_of(v, nodes) for d in nodes if d.prim == "dot" for a in d.args)]


def _is_of_pairs(value: Value, hints: Hints) -> bool:
    """Two values at least are broadcast along each other, and all are smaller than the sum."""
    sources = list(dict.fromkeys(_sources(value.args[0])))
    size = estimate(value.aval.numel, hints)
    return len(sources) > 1 and all(estimate(s.aval.numel, hints) < size for s in sources)


def _sources(value: Value) -> Iterator[Value]:
    """What a value is made of, element by element; numbers are left out."""
    todo, seen = [value], set[int]()
    while todo:
        current = todo.pop()
        if current.id in seen or current.prim == "full":
            continue
        seen.add(current.id)
        if PRIMS[current.prim].family in FOLLOWS:
            todo += current.args
        else:
            yield current


def _made_of(value: Value, nodes: list[Value]) -> set[int]:
    made = {value.id}
    for node in nodes:
        inside = PRIMS[node.prim].family in FOLLOWS and any(a.id in made for a in node.args)
        made |= {node.id} if inside else set()
    return made
