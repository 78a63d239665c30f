"""What is made of a product element by element takes the product's memory, where nothing reads that any more.

    z -> kernel(z) -> dz [n, v]       becomes       z -> kernel(z) -> rows;  z, rows -> kernel(z, rows) -> dz, over z

A kernel that sums rows before it writes them reads them twice: its sums are a kernel of their own, and what is left is
element by element. Within a slab, whose memory is what bounds the number of its rows.

    total, z -> kernel(total, z) -> next       becomes       the same, next over total or z

Elsewhere large results take the memory of what a step made and none reads later, and no kernel is cut for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from ...graph import Graph, Value
from ...infer import same_shape
from ...prims import PRIMS
from ...rewrite import extract
from ...types import contiguous_strides
from ..clusters import Bound
from ..fuse import Fuse, Group, Step
from .regions import Flow

OVER = ("elementwise", "layout", "source", "gather")
"""Families of a group that is element by element in what it overwrites."""
Overwrites = dict[int, tuple[int, int]]
"""By step: the number of its result, and of the input that it takes the memory of."""


class _Pair(NamedTuple):
    """A result of a group, and the product whose memory it takes."""

    at: int
    result: Value
    product: Value


def steps_of_slab(graph: Graph) -> tuple[list[Step], Overwrites]:
    """The steps of a slab, with what overwrites products."""
    return overwriting(graph, Fuse()(graph))


def overwriting(graph: Graph, steps: Sequence[Step]) -> tuple[list[Step], Overwrites]:
    """The steps, groups cut so that large results take the memory of products that die with them."""
    steps, done = list(steps), list[tuple[Group, _Pair]]()
    while (found := next(_pairs(graph, steps, {p.result for _, p in done}), None)) is not None:
        group = steps[found.at]
        assert isinstance(group, Group)
        parts = _parts(graph, group, found)
        steps[found.at : found.at + 1] = parts
        done.append((parts[-1], found))
    return steps, {_place(steps, g): (g.outputs.index(p.result), g.inputs.index(p.product)) for g, p in done}


def taking_memory(
    graph: Graph, steps: Sequence[Step], groups: Collection[int], lent: Collection[int], bound: Bound
) -> Overwrites:
    """Results of groups, too large for `bound`, and what they are made of element by element that dies with them.

    groups: the places of those that may. lent: ids of values whose memory is a part of something.
    """
    if bound.most is None:
        return {}
    flow, over = Flow(graph, steps), Overwrites()
    kept = {*flow.sources(graph.results)}
    last = {v: at for at, s in enumerate(flow.work) for v in flow.sources(s.reads)}
    own = {v for s in flow.work for v in _own_memory(s) if v not in kept and v.id not in lent}
    for at, step in enumerate(flow.work):
        place = steps.index(step)
        if not isinstance(step, Group) or place not in groups:
            continue
        read = [*map(flow.source, step.inputs)]
        dying = [v for v in step.inputs if v in own and last[v] == at and read.count(v) == 1]
        large = [v for v in step.outputs if not bound.holds([v])]
        pairs = ((r, v) for r in large for v in dying if _is_alike(step, r, v) and _is_pointwise(step, r, v))
        if (pair := next(pairs, None)) is not None:
            over[place] = step.outputs.index(pair[0]), step.inputs.index(pair[1])
    return over


def _own_memory(step: Step) -> list[Value]:
    """The results of a step in row-major memory that is theirs alone."""
    if isinstance(step, Group):
        pairs = zip(step.outputs, step.graph.output_strides, strict=True)
        return [v for v, strides in pairs if strides is not None and same_shape(strides, contiguous_strides(v.shape))]
    return [v for v in step.results if v.prim == "dot"]


def _is_pointwise(group: Group, result: Value, value: Value) -> bool:
    """All of the result, with nothing summed on the way."""
    return _is_made_in_place(group, result, value) and not _cone(group, result, value)[1]


def _place(steps: Sequence[Step], group: Group) -> int:
    return next(at for at, step in enumerate(steps) if step is group)


def _pairs(graph: Graph, steps: Sequence[Step], done: set[Value]) -> Iterator[_Pair]:
    """What may overwrite what: a product that no step behind the group reads, nor a caller."""
    flow = Flow(graph, steps)
    kept = {*flow.sources(graph.results), *graph.inputs}
    taken = {v for s in flow.work if isinstance(s, Group) and done & set(s.outputs) for v in s.inputs}
    for at, step in enumerate(flow.work):
        if not isinstance(step, Group):
            continue
        read_later = {v for s in flow.work[at + 1 :] for v in flow.sources(s.reads)}
        for product in (v for v in step.inputs if v.prim == "dot" and v not in kept and v not in read_later | taken):
            for result in (v for v in step.outputs if v not in done and v not in kept):
                if _is_alike(step, result, product) and _is_made_in_place(step, result, product):
                    yield _Pair(steps.index(step), result, product)


def _is_alike(group: Group, result: Value, product: Value) -> bool:
    strides = group.graph.output_strides[group.outputs.index(result)]
    row_major = strides is not None and same_shape(strides, contiguous_strides(result.shape))
    return row_major and result.aval == product.aval


def _is_made_in_place(group: Group, result: Value, product: Value) -> bool:
    """From the result back to rows, what is made of the product is so element by element."""
    nodes, rows = _cone(group, result, product)
    direct = _made_of(product, {v.id for v in rows})
    plain = all(PRIMS[v.prim].family == "elementwise" and v.shape == product.shape for v in nodes if v.id in direct)
    return plain and result.id in direct and all(PRIMS[v.prim].family in OVER for v in nodes)


def _cone(group: Group, result: Value, product: Value) -> tuple[list[Value], list[Value]]:
    """The nodes that make the result at every element, and the smaller values of the product that they read."""
    of_product = _made_of(product)
    nodes, rows, todo = dict[int, Value](), dict[int, Value](), [result]
    while todo:
        value = todo.pop()
        if value.id in nodes or value.id in rows or value in group.inputs:
            continue
        if value.id in of_product and PRIMS[value.prim].family in ("reduce", "scan"):
            rows[value.id] = value
            continue
        nodes[value.id] = value
        todo += value.args
    return list(nodes.values()), [rows[i] for i in sorted(rows)]


def _made_of(product: Value, but: Collection[int] = ()) -> set[int]:
    """The nodes that depend on a product, not by way of some."""
    made, todo = {product.id}, [product]
    while todo:
        new = [u for u in todo.pop().users if u.id not in made and u.id not in but]
        made |= {u.id for u in new}
        todo += new
    return made


def _parts(graph: Graph, group: Group, pair: _Pair) -> list[Group]:
    """What the group makes besides, and the rows that the result needs; then the result."""
    _, rows = _cone(group, pair.result, pair.product)
    others = [v for v in group.outputs if v != pair.result]
    first = [*others, *(v for v in rows if v not in others)]
    if not first:
        return [group]
    return [_part(group, first, group.inputs), _part(group, [pair.result], [*group.inputs, *rows])]


def _part(group: Group, outputs: Sequence[Value], known: Sequence[Value]) -> Group:
    """A part of a group, with the inputs that it reads; layouts are the group's."""
    strides = dict(zip(group.outputs, group.graph.output_strides, strict=True))
    layouts = {v.id: own.params["strides"] for v, own in zip(group.inputs, group.graph.inputs, strict=True)}
    laid_out = [strides.get(v) or contiguous_strides(v.shape) for v in outputs]
    layouts |= {v.id: contiguous_strides(v.shape) for v in known if v.id not in layouts}
    whole = extract(outputs, known, name=group.graph.name, strides=laid_out, layouts=layouts)
    live = whole.live()
    read = [v for v, given in zip(known, whole.inputs, strict=True) if given.id in live]
    own = extract(outputs, read, name=whole.name, strides=laid_out, layouts=layouts)
    return Group(own, tuple(read), tuple(outputs))
