"""What may join a region, beside what may not: a group of its own.

    kk = cat(past, k)                            one group with both results   ->   (past, k -> kk), (kk -> wide)
    wide = kk.expand(b, h, g, n, d).reshape(..)

A copy that products of virtual values alone read: kernels of the region read kk itself.

    dx = (w @ x + w.T @ x) / n                   one group   ->   (w @ x, w.T @ x -> sum), (sum, n -> dx)

A sum of two products of what is made of a symmetric one, such as x @ x.T: they are one (`spellings.symmetric`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...graph import Graph, Value
from ...prims import PRIMS
from ...rewrite import extract, nodes_between
from ...types import LOW_FLOATS, contiguous_strides
from ..fuse import Extern, Group, Step
from ..node_kinds import is_view
from .regions import Flow
from .spellings.symmetric import is_of_symmetric


def parts_apart(graph: Graph, steps: Sequence[Step], virtual: frozenset[int]) -> list[Step]:
    """The steps, with such copies behind the groups that made them, and such sums before those that read them."""
    flow, returned = Flow(graph, steps), set(graph.results)
    return [
        part
        for step in steps
        for own in ([step] if not isinstance(step, Group) else _divided(step, flow, virtual, returned))
        for part in ([own] if not isinstance(own, Group) else _with_totals_apart(own, flow, virtual))
    ]


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


def _with_totals_apart(group: Group, flow: Flow, virtual: frozenset[int]) -> Iterator[Step]:
    """The group behind the sum that it begins with."""
    nodes = nodes_between(group.outputs, {v.id for v in group.inputs})
    total = next((v for v in nodes if v.prim == "add" and _is_total(v, group, flow, virtual)), None)
    if total is None or total in group.outputs:
        yield group
        return
    products = flow.sources(total.args)
    added = [v for v in group.inputs if flow.source(v) in products]
    yield _part(group, added, [total])
    yield _part(group, [total, *(v for v in group.inputs if v not in added)], group.outputs)


def _is_total(value: Value, group: Group, flow: Flow, virtual: frozenset[int]) -> bool:
    """Of two products of symmetric values, both of which are read for it alone."""
    products = [flow.source(a) for a in value.args]
    if value.dtype in LOW_FLOATS or len({*products}) != 2 or not all(v.prim == "dot" for v in products):
        return False
    return all(_is_read_for(v, value, group, flow) and is_of_symmetric(v, virtual) for v in products)


def _is_read_for(product: Value, total: Value, group: Group, flow: Flow) -> bool:
    nodes = nodes_between(group.outputs, {v.id for v in group.inputs})
    readers = [s for s in flow.work if product in flow.sources(s.reads)]
    inside = [v for v in nodes if product in map(flow.source, v.args) and not is_view(v)]
    return readers == [group] and inside == [total] and product not in flow.sources(flow.graph.results)


def _part(group: Group, inputs: Sequence[Value], outputs: Sequence[Value]) -> Group:
    """Some results of a group, of some values."""
    own = dict(zip((v.id for v in group.outputs), group.graph.output_strides, strict=True))
    given = {v.id: i.params["strides"] for v, i in zip(group.inputs, group.graph.inputs, strict=True)}
    layouts = {**given, **{i: s for i, s in own.items() if s is not None}}
    strides = [own.get(v.id) or contiguous_strides(v.shape) for v in outputs]
    graph = extract(outputs, inputs, name=group.graph.name, strides=strides, layouts=layouts)
    return Group(graph, tuple(inputs), tuple(outputs))
