"""The stores of a kernel's goals: one for each goal, or for each piece of a concatenation, or of a scatter's source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from ...ir import Value
from ...ir.prims import PRIMS
from ...ir.types import Size
from ..kernel import Ref
from .axes import Goal, Index, Materialize, Memory, Part, Sink, Term
from .builder import Builder, Held, Place, Slant, Unrolling
from .concatenations import loop_behind, moved_dims
from .loops import Loops
from .lowering import indirect_index, rule_of
from .sizes import nonnegative, same, tidy
from .terms import Restart, TermTable

MAX_PASSES = 200
"""Each refines one axis at least: no graph needs so many."""


def build_sinks(
    terms: TermTable, memory: Mapping[int, Memory], goals: Sequence[Goal], shared: bool = False, hasty: bool = False
) -> list[Sink]:
    """All stores of the goals; starts again whenever an axis had to be refined. shared: reductions share axes. hasty:
    all values that are asked for too often are materialised together, not the first one."""
    unrolling, numbers, held = Unrolling(terms.axes), _numbers(goals), Held()
    for _ in range(MAX_PASSES):
        terms.clear()
        often: dict[int, Value] = {}
        builder = Builder(terms, memory, rule_of, unrolling, held, shared, often if hasty else None)
        try:
            sinks = [
                replace(sink, goal=at)
                for at, (number, goal) in enumerate(zip(numbers, goals, strict=True))
                for sink in _sinks_of(builder, number, goal)
            ]
            sinks += Loops(builder).sinks()
        except Restart:
            continue
        except Materialize:
            if not often:
                raise
        if often:
            raise Materialize(often.values())
        return terms.renamed(sinks, terms.axes.refined)
    raise Materialize([g.node for g in goals])


def _numbers(goals: Sequence[Goal]) -> list[int]:
    """A number for each goal; parts of one value share it, and the axes that go with it."""
    first: dict[tuple[int, Ref | None], int] = {}
    made = [(g.node.id, g.memory.ref) if g.whole is None else (g.whole.id, None) for g in goals]
    return [first.setdefault(own, k) if g.part else k for k, (g, own) in enumerate(zip(goals, made, strict=True))]


def _sinks_of(builder: Builder, number: int, goal: Goal) -> list[Sink]:
    builder.goal, builder.loop = number, loop_behind(_stored(goal))
    if (slant := builder.unrolling.slants.get(number)) is not None and _is_moved_alone(goal, slant):
        return list(_store_pieces(builder, goal, slant))
    store = _store if goal.whole is None else _store_part
    return [_scatter(builder, goal)] if goal.scatter else [store(builder, goal, p) for p in _parts(builder, goal)]


def _parts(builder: Builder, goal: Goal) -> list[Place]:
    """The index of what is stored, or of its pieces where concatenations divide it."""
    parts = [_index(builder, goal.node, goal.part) if goal.whole is None else _index(builder, goal.whole)]
    for axis in builder.unrolling.by_goal.get(builder.goal, ()):
        pieces = [{axis: Index(offset=k)} for k in range(int(axis.size))]
        renamed = [tuple(builder.axes.settled(i).renamed(piece) for i in part) for part in parts for piece in pieces]
        parts = list(dict.fromkeys(renamed))  # a part beside the axis is stored once
    return parts


def _index(builder: Builder, node: Value, part: Part | None = None) -> Place:
    """An axis for each dimension from the start of the part on; for one of size 1 where a loop of one step gives it."""
    key = ("goal", builder.goal, node.id)  # and the size: pieces of one size share an axis
    shape = node.shape if part is None else (*node.shape[: part.dim], part.size, *node.shape[part.dim + 1 :])
    without = () if builder.loop is not None and builder.loop.params["length"] == 1 else (1,)
    place = [Index() if n in without else Index.over(builder.axes.axis((*key, d, n), n)) for d, n in enumerate(shape)]
    if part is not None:
        place[part.dim] = place[part.dim] + part.start
    return tuple(place)


def _stored(goal: Goal) -> Value:
    """The value that is stored, or the piece of it."""
    return goal.node if goal.piece is None else goal.piece


def _piece(goal: Goal, part: Part, index: Place) -> tuple[Value, Place]:
    """The piece that is stored, and the place in it."""
    inside = [place + tidy(-part.start) if d == part.dim else place for d, place in enumerate(index)]
    node = goal.node
    while (moved := moved_dims(node)) is not None:
        inside, (node,) = [inside[d] if d >= 0 else Index() for d in moved], node.args
    return _stored(goal), tuple(inside)


def _store(builder: Builder, goal: Goal, index: Place) -> Sink:
    node, memory = goal.node, goal.memory
    place = Index.linear(index, memory.strides)
    is_own = node.id in builder.memory and builder.memory[node.id].ref == memory.ref
    axes = builder.axes.walked(index)
    within = tuple(_conditions(builder, goal, index))  # steps that have no place in it read nothing for it, either
    # the store that materialises a value computes it; every other use of the value loads it
    if goal.part is not None:
        value = builder.at(*_piece(goal, goal.part, index), within)
    else:
        value = builder.computed(node, index, within) if is_own else builder.at(node, index, within)
    return Sink(memory.ref, value, builder.axes.settled(place), axes, memory.dtype, "store", node, within=within)


def _store_part(builder: Builder, goal: Goal, index: Place) -> Sink:
    """A part of what is made as a whole: under a mask, from the start of the part on."""
    whole, part, memory = goal.whole, goal.part, goal.memory
    assert whole is not None and part is not None
    inside = [place + tidy(-part.start) if d == part.dim else place for d, place in enumerate(index)]
    place, axes = builder.axes.settled(Index.linear(inside, memory.strides)), builder.axes.walked(index)
    within = tuple(_bounds_of(builder.terms, index[part.dim], part, whole.shape[part.dim]))
    return Sink(memory.ref, builder.at(whole, index), place, axes, memory.dtype, "store", goal.node, within=within)


def _is_moved_alone(goal: Goal, slant: Slant) -> bool:
    """What is stored is the value itself, whose elements are moved alone."""
    node = goal.node
    while node != slant.value and PRIMS[node.prim].family == "layout" and len(node.args) == 1:
        (node,) = node.args
    return node == slant.value and not goal.scatter and goal.part is None and goal.whole is None


def _store_pieces(builder: Builder, goal: Goal, slant: Slant) -> Iterator[Sink]:
    """Each piece at its places along the goal's axis: c = piece + start - r, where c + r is the place in the value."""
    axes, own, memory = builder.axes, _index(builder, goal.node), goal.memory
    beside = slant.place[slant.dim] + Index.over(slant.axis) * -1
    for number, (piece, part) in enumerate(slant.pieces):
        along = Index() if part.size == 1 else Index.over(axes.axis(("goal", builder.goal, "piece", number), part.size))
        to = {slant.axis: along + part.start + beside * -1}
        index, place = (tuple(axes.settled(axes.settled(i).renamed(to)) for i in each) for each in (own, slant.place))
        value = builder.at(piece, (*place[: slant.dim], along, *place[slant.dim + 1 :]))
        within = tuple(t for i, n in zip(index, goal.node.shape, strict=True) for t in _inside(builder.terms, i, n))
        at, walked = axes.settled(Index.linear(index, memory.strides)), tuple(dict.fromkeys(axes.walked(index)))
        yield Sink(memory.ref, value, at, walked, memory.dtype, "store", goal.node, within=within)


def _bounds_of(terms: TermTable, place: Index, part: Part, size: Size) -> Iterator[Term]:
    """What says that a place along so many is one of the part."""
    end = tidy(part.start + part.size)
    if part.start != 0:
        yield terms.test("ge", terms.index(place), terms.const(part.start, "i64"))
    if not same(end, size):
        yield terms.test("lt", terms.index(place), terms.const(end, "i64"))


def _conditions(builder: Builder, goal: Goal, index: Place) -> Iterator[Term]:
    """What says that a step of a loop has a place in what is stored, where not all of them have."""
    terms = builder.terms
    for dim, (place, size) in enumerate(zip(map(builder.axes.settled, index), goal.node.shape, strict=True)):
        if goal.part is not None and dim == goal.part.dim:
            place, size = place + tidy(-goal.part.start), goal.part.size
        if any(a.turn for a in place.walked):
            yield from _inside(terms, place, size)


def _inside(terms: TermTable, place: Index, size: Size) -> Iterator[Term]:
    """What says that a place is in 0 .. size - 1; nothing where it is anyway."""
    bounds = place.bounds() or (-1, size)
    if not nonnegative(bounds[0]):
        yield terms.test("ge", terms.index(place), terms.const(0, "i64"))
    if not nonnegative(tidy(size - 1 - bounds[1])):
        yield terms.test("lt", terms.index(place), terms.const(size, "i64"))


def _scatter(builder: Builder, goal: Goal) -> Sink:
    node, memory = goal.node, goal.memory
    _, source, *targets = node.args
    index = _index(builder, source)
    dims = indirect_index(builder, targets, node.params["axes"], index, len(memory.strides))
    place = Index.linear(dims, memory.strides)
    loop = tuple(sorted(builder.axes.walked(index), key=lambda a: a.order))
    value = builder.at(source, index)
    mode: Literal["add", "set"] = "add" if node.params["mode"] == "add" else "set"
    return Sink(memory.ref, value, builder.axes.settled(place), loop, memory.dtype, mode, node)
