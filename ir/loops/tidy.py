"""Loops in normal form: nothing is carried, stacked or read step by step that need not be.

    a carry that no step changes              the same in all steps
    two carries that begin and go on alike    one
    the last of a y that is carried, too      what is carried in the end
    an x that is the same in all steps        the same in all steps: cotangents of a sum over time
    an operand given twice, or a constant     once, or in the body
    a y that is a step of an x, or a whole    that x, or that whole for each step
    a y that is permuted                      as it was, permuted behind the loop
    a y given twice                           once
    xs that are all flipped                   the loop runs the other way, and its ys are flipped
    a loop of one step, or of none            that step, or what it begins with
    what no result needs                      gone
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from ..graph import Graph, Value, building, emit
from ..infer import same_shape, sizes_equal
from ..prims import PRIMS
from ..rewrite import copy_into, make, rebuild
from .body import Body
from .loop import Loop, loop_of, rebuild_scans, scans_of
from .prune import prune_scans
from .unroll import unrolled

Rule: TypeAlias = Callable[[Loop], "list[Value] | None"]
"""A loop -> its results by a better one, or None where it does not apply."""


@dataclass(frozen=True)
class TidyLoops:
    """Graph -> an equal graph whose loops are in normal form, those within loops as well."""

    def __call__(self, graph: Graph) -> Graph:
        if not scans_of(graph):
            return graph
        graph = in_bodies(prune_scans(graph), self)
        for rule in RULES:
            graph = rebuild_scans(graph, lambda node, args, rule=rule: rule(loop_of(node, args)))  # type: ignore[misc]
        return prune_scans(rebuild(graph, {"slice": (last_step,)}))


def in_bodies(graph: Graph, run: Callable[[Graph], Graph]) -> Graph:
    """The graph, a pass done to the bodies of its loops."""

    def rebuilt(node: Value, args: list[Value]) -> list[Value] | None:
        loop = loop_of(node, args)
        body = run(loop.body)
        return None if Body(body) == node.params["body"] else replace(loop, body=body).emit()

    return rebuild_scans(graph, rebuilt)


# ---------------------------------------------------------------------------------------------- the rules
def single_step(loop: Loop) -> list[Value] | None:
    """A loop of one step that sums along nothing is no loop: what does is cheapest in the kernel of a loop."""
    is_plain = loop.length in (0, 1) and all(PRIMS[v.prim].family in PLAIN for v in loop.body.order())
    return unrolled(loop, loop.length, {}) if is_plain else None


PLAIN = ("input", "source", "layout", "elementwise")


def fixed_carries(loop: Loop) -> list[Value] | None:
    """h = h  ->  a whole"""
    count = len(loop.init)
    fixed = [i for i, v in enumerate(loop.inputs.carries) if loop.results[i] == v]
    if not fixed:
        return None
    carries = [i for i in range(count) if i not in fixed]
    steps, same = loop.read
    same += [(loop.inputs.carries[i], loop.init[i]) for i in fixed]
    results = _emitted(loop.part(carries, steps, same, loop.results[count:]))
    ends = dict(zip(carries, results, strict=False))
    return [*(ends.get(i, loop.init[i]) for i in range(count)), *results[len(carries) :]]


def equal_carries(loop: Loop) -> list[Value] | None:
    """g, h = f(g), f(g), both from one value  ->  one of them"""
    count = len(loop.init)
    first: dict[tuple[Value, Value], int] = {}
    same = {i: first.setdefault((loop.init[i], loop.results[i]), i) for i in range(count)}
    if all(i == j for i, j in same.items()):
        return None
    carries = loop.inputs.carries
    again = replace(loop, body=_with_known(loop.body, {carries[i].id: carries[j] for i, j in same.items() if i != j}))
    kept = [i for i in range(count) if same[i] == i]
    results = _emitted(again.part(kept, *again.read, again.results[count:]))
    ends = dict(zip(kept, results, strict=False))
    return [*(ends[same[i]] for i in range(count)), *results[len(kept) :]]


def last_step(value: Value) -> Value | None:
    """ys[-1], where a step gives what it carries on  ->  what is carried in the end"""
    (ys,) = value.args
    if ys.prim != "pick" or ys.args[0].prim != "scan":
        return None
    params, number = ys.args[0].params, ys.params["index"]
    results, carries = params["body"].graph.outputs, params["carries"]
    carried = next((i for i in range(carries) if results[i] == results[number]), carries)
    at = 0 if params["reverse"] else params["length"] - 1
    start, stop = value.params["start"], value.params["stop"]
    is_last = sizes_equal(start[0], at) and sizes_equal(stop[0], at + 1) and same_shape(value.shape[1:], ys.shape[1:])
    if carried == carries or not is_last or value.params["step"][0] != 1:
        return None
    return make("reshape", make("pick", ys.args[0], index=carried), shape=value.shape)


def uniform_steps(loop: Loop) -> list[Value] | None:
    """An x that is spread along time is a whole."""
    steps, same = loop.read
    uniform = [(v, one) for v, x in steps if (one := _each_step(x)) is not None]
    if not uniform:
        return None
    known = {v for v, _ in uniform}
    count = len(loop.init)
    rest = [(v, x) for v, x in steps if v not in known]
    return _emitted(loop.part(range(count), rest, [*same, *uniform], loop.results[count:]))


def _each_step(x: Value) -> Value | None:
    """What every step of x is, where it is the same."""
    if x.prim == "full":
        return emit("full", **x.params | {"shape": x.shape[1:]})
    if x.prim != "broadcast" or 0 in x.params["axes"]:
        return None
    axes = tuple(a - 1 for a in x.params["axes"])
    return emit("broadcast", x.args[0], shape=x.shape[1:], axes=axes)


def repeated_operands(loop: Loop) -> list[Value] | None:
    """What is given twice is read once, and constants are made in each step."""
    first: dict[tuple[bool, Value], Value] = {}
    known: dict[int, Value] = {}
    for is_step, pairs in zip((True, False), loop.read, strict=True):
        for own, operand in pairs:
            if first.setdefault((is_step, operand), own) != own:
                known[own.id] = first[is_step, operand]
            elif operand.prim == "full" and not is_step:
                known[own.id] = operand
    return replace(loop, body=_with_known(loop.body, known)).without_unread().emit() if known else None


def _with_known(body: Graph, known: Mapping[int, Value]) -> Graph:
    """The body where some inputs are others of its inputs, or constants."""
    out = Graph(body.name)
    env = {v.id: out.input_like(v) for v in body.inputs}
    with building(out):
        env |= {i: env[v.id] if v.graph is body else emit("full", **v.params) for i, v in known.items()}
        copy_into(body.order(), env)
    return out.returning([None if o is None else env[o.id] for o in body.outputs])


def passed_through(loop: Loop) -> list[Value] | None:
    """Results that are operands need no loop."""
    count = len(loop.init)
    steps, same = loop.read
    whole = {v: x for v, x in steps} | {v: _for_each_step(loop, w) for v, w in same if v in loop.results[count:]}
    kept = [o for o in loop.results[count:] if o not in whole]
    if len(kept) == len(loop.results) - count:
        return None
    results = _emitted(loop.part(range(count), steps, same, kept))
    supply = iter(results[count:])
    return [*results[:count], *(whole[o] if o in whole else next(supply) for o in loop.results[count:])]


def permuted_results(loop: Loop) -> list[Value] | None:
    """A step gives what it makes, once; its axes are moved for all steps at once, which moves nothing."""
    count = len(loop.init)
    given = loop.results[count:]
    if not any(o.prim == "permute" for o in given) and len(set(given)) == len(given):
        return None
    plain = [_unmoved(o) for o in given]
    ys = list(dict.fromkeys(o for o, _ in plain))
    results = loop.part(range(count), *loop.read, ys).emit()
    all_steps = dict(zip(ys, results[count:], strict=True))
    moved = (all_steps[y] if perm is None else make("permute", all_steps[y], perm=perm) for y, perm in plain)
    return [*results[:count], *moved]


def _unmoved(step: Value) -> tuple[Value, tuple[int, ...] | None]:
    """What a step's result is without having been permuted, and how all steps of it are."""
    if step.prim != "permute":
        return step, None
    return step.args[0], (0, *(a + 1 for a in step.params["perm"]))


def _for_each_step(loop: Loop, x: Value) -> Value:
    return emit("broadcast", x, shape=(loop.length, *x.shape), axes=tuple(range(1, x.ndim + 1)))


def flipped_steps(loop: Loop) -> list[Value] | None:
    """Steps that are all read from the last to the first: the loop runs so."""
    forward = [_unflipped(x) for x in loop.xs]
    if not forward or any(x is None for x in forward):
        return None
    turned = replace(loop, xs=tuple(x for x in forward if x is not None), reverse=not loop.reverse)
    results, count = turned.emit(), len(loop.init)
    return [*results[:count], *(make("flip", y, axes=(0,)) for y in results[count:])]


def _unflipped(x: Value) -> Value | None:
    """What x is the flip of, along time."""
    if x.prim != "flip" or 0 not in x.params["axes"]:
        return None
    rest = tuple(a for a in x.params["axes"] if a != 0)
    return emit("flip", x.args[0], axes=rest) if rest else x.args[0]


RULES: tuple[Rule, ...] = (
    single_step, fixed_carries, equal_carries, uniform_steps, repeated_operands, permuted_results, passed_through,
    flipped_steps,
)  # fmt: skip


def _emitted(loop: Loop) -> list[Value]:
    """The results of a loop that may have none."""
    return loop.without_unread().emit() if loop.results else []
