"""Copies beside what they are copies of: one that products of virtual values alone read is a group of its own.

    kk = cat(past, k)                            one group with both results   ->   (past, k -> kk), (kk -> wide)
    wide = kk.expand(b, h, g, n, d).reshape(..)

The second may join a region then, whose kernels read kk itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...graph import Graph, Value
from ...prims import PRIMS
from ...rewrite import extract
from ...types import contiguous_strides
from ..fuse import Extern, Group, Step
from .regions import Flow


def copies_apart(graph: Graph, steps: Sequence[Step], virtual: frozenset[int]) -> list[Step]:
    """The steps, with such copies behind the groups that made them."""
    flow, returned = Flow(graph, steps), set(graph.results)
    return [part for s in steps for part in ([s] if not isinstance(s, Group) else _divided(s, flow, virtual, returned))]


def _divided(group: Group, flow: Flow, virtual: frozenset[int], returned: set[Value]) -> Iterator[Step]:
    copies = {v: made for v in group.outputs if (made := _copied(v, group)) is not None}
    apart = {v: of for v, of in copies.items() if v not in returned and _is_for_products(v, flow, virtual)}
    if not apart:
        yield group
        return
    yield _part(group, group.inputs, [v for v in group.outputs if v not in apart])
    yield from (_part(group, (of,), [v]) for v, of in apart.items())


def _copied(value: Value, group: Group) -> Value | None:
    """Another result of the group that this one is, in other places."""
    while PRIMS[value.prim].family == "layout" and len(value.args) == 1 and value.prim != "pad":
        (value,) = value.args
        if value in group.outputs:
            return value
    return None


def _is_for_products(copy: Value, flow: Flow, virtual: frozenset[int]) -> bool:
    """All that reads it are products that make virtual values, or sum them."""
    readers = [s for s in flow.work if copy in flow.sources(s.reads)]
    products = [s for s in readers if isinstance(s, Extern) and s.value.prim == "dot"]
    return products == readers and all(virtual & {s.value.id, *(a.id for a in s.value.args)} for s in products)


def _part(group: Group, inputs: Sequence[Value], outputs: Sequence[Value]) -> Group:
    """Some results of a group, of some values."""
    own = dict(zip((v.id for v in group.outputs), group.graph.output_strides, strict=True))
    given = {v.id: i.params["strides"] for v, i in zip(group.inputs, group.graph.inputs, strict=True)}
    layouts = {**given, **{i: s for i, s in own.items() if s is not None}}
    strides = [own[v.id] or contiguous_strides(v.shape) for v in outputs]
    graph = extract(outputs, inputs, name=group.graph.name, strides=strides, layouts=layouts)
    return Group(graph, tuple(inputs), tuple(outputs))
