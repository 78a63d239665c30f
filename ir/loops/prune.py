"""Results of loops that are not read: gone, with the carries and operands that they alone need."""

from __future__ import annotations

from collections.abc import Collection

from ..graph import Graph, Value
from .loop import Loop, loop_of, rebuild_scans, results_read, scans_of


def prune_scans(graph: Graph) -> Graph:
    """The graph whose scans give what is read of them; bodies of scans within scans as well."""
    read = {v.id: results_read(v) for v in scans_of(graph)}

    def rebuilt(node: Value, args: list[Value]) -> list[Value | None] | None:
        loop = loop_of(node, args)
        small = _small(loop, _kept(loop, read[node.id]))
        if small.body is loop.body:
            return None
        supply = iter(small.emit())
        kept = _kept(loop, read[node.id])
        return [next(supply) if i in kept else None for i in range(len(node.avals))]

    return rebuild_scans(graph, rebuilt)


def _kept(loop: Loop, read: Collection[int]) -> set[int]:
    """The results that are read, and the carries that these are made of."""
    carries = {v.id: i for i, v in enumerate(loop.inputs.carries)}
    kept: set[int] = set()
    todo = list(read)
    while todo:
        kept.add(at := todo.pop())
        needed = _above(loop.body, loop.results[at])
        todo.extend(i for v, i in carries.items() if v in needed and i not in kept)
    return kept


def _above(graph: Graph, value: Value) -> set[int]:
    """The ids of all that a value is made of."""
    seen: set[int] = set()
    todo = [value.id]
    while todo:
        if (at := todo.pop()) not in seen:
            seen.add(at)
            todo.extend(graph.attributes[at]["args"])
    return seen


def _small(loop: Loop, kept: Collection[int]) -> Loop:
    count = len(loop.init)
    body = prune_scans(loop.body)
    if body is loop.body and len(kept) == len(loop.results):
        return loop.without_unread()
    inner = Loop(body, loop.init, loop.xs, loop.wholes, loop.length, loop.reverse)
    pairs = [zip(v, o, strict=True) for v, o in zip(inner.inputs[1:], (loop.xs, loop.wholes), strict=True)]
    carries = [i for i in range(count) if i in kept]
    ys = [o for i, o in enumerate(inner.results) if i >= count and i in kept]
    return inner.part(carries, pairs[0], pairs[1], ys).without_unread()
