"""Code motion: products of matrices, and sums of what is only added up, leave the body of a `scan`.

    h = tanh(x[t] @ w + h @ u)      x @ w before the loop, of all steps at once
    out[t] = h @ v                  out = hs @ v behind it
    dw += g[t].T @ h[t - 1]         dw = gs.T @ hs behind it: one product, summed over steps as well
    db += g[t].sum(0)               db[i] += g[t, i] in the loop, its sum behind it

Kernels hold products with what they carry; any other is the library's, which is faster with all steps at once. Sums are
taken in another order than step by step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...graph import Graph, Value, building, emit
from ...loops.loop import Loop, below, loop_of, rebuild_scans, scans_of
from ...prims import PRIMS
from ...rewrite import extract, nodes_between
from ...transforms.batch import batch
from ...transforms.ops import inline, zeros
from ..cost import estimate

APART = ("contract", "cumulative")
"""Families that are worth a loop's while to do for all steps at once."""
MOST = 4
"""Bytes that may be stacked for each byte of what is made of them behind the loop."""


@dataclass(frozen=True)
class Motion:
    """Graph -> an equal graph whose loops do step by step what has to be done so."""

    def __call__(self, graph: Graph) -> Graph:
        return rebuild_scans(graph, moved) if scans_of(graph) else graph


def moved(node: Value, args: list[Value]) -> list[Value] | None:
    """The results of a scan with what leaves it before and behind it; None where nothing does."""
    loop = loop_of(node, args)
    kept = _summed_later(loop) or _done_behind(loop) or _done_before(loop)
    return None if kept is None else kept


# ------------------------------------------------------------------------------------------------ before the loop
def _done_before(loop: Loop) -> list[Value] | None:
    """What no step's result goes into is made for all steps at once."""
    carried = below(loop.body, loop.inputs.carries)
    early = [v for v in loop.body.order() if v.id not in carried and PRIMS[v.prim].family in APART]
    if not early:
        return None
    needed = [v for v in early if any(u not in early for u in v.users) or v in loop.results]
    made, has_axis = _for_all_steps(loop, needed, {})
    again = [list(zip(v, o, strict=True)) for v, o in zip(loop.inputs[1:], (loop.xs, loop.wholes), strict=True)]
    for value, result, varies in zip(needed, made, has_axis, strict=True):
        again[0 if varies else 1].append((value, result))
    count = len(loop.init)
    smaller = loop.part(range(count), again[0], again[1], loop.results[count:]).without_unread()
    return _emitted(smaller)


def _emitted(loop: Loop) -> list[Value]:
    """The results of a loop, of which more may leave."""
    results = loop.emit()
    node = results[0] if results[0].prim == "scan" else results[0].args[0]
    return moved(node, list(node.args)) or results


def _for_all_steps(loop: Loop, values: Sequence[Value], known: dict[Value, Value]) -> tuple[list[Value], list[bool]]:
    """Values of the body for all steps at once, and which of them have the axis of steps.

    known: values of the body that are there already, stacked.
    """
    xs = dict(zip(loop.inputs.xs, loop.xs, strict=True)) | known
    wholes = dict(zip(loop.inputs.wholes, loop.wholes, strict=True))
    sources = [*xs, *wholes]
    part = extract(values, sources, name=loop.body.name)
    over = batch(part, [v in xs for v in sources], loop.length)
    made = inline(over.graph, [*xs.values(), *wholes.values()])
    return [m for m in made if m is not None], list(over.mapped)


# ------------------------------------------------------------------------------------------------ behind the loop
def _done_behind(loop: Loop) -> list[Value] | None:
    """Results of steps that are made of products, and go into no other step, are made of what these multiply."""
    count = len(loop.init)
    within = _above(loop, loop.results[:count])
    late = {v.id for v in loop.body.order() if v.id not in within and PRIMS[v.prim].family in APART}
    late = below(loop.body, [Value(loop.body, i) for i in sorted(late)]) - within if late else late
    ends = [o for o in dict.fromkeys(loop.results[count:]) if o.id in late]
    if not ends:
        return None
    sources = {v.id for v in (*loop.inputs.xs, *loop.inputs.wholes)}
    between = [v for v in loop.body.order() if v.id in _above(loop, ends) & late]
    frontier = list(dict.fromkeys(a for v in between for a in v.args if a.id not in late))
    carried = below(loop.body, loop.inputs.carries)
    handed = [v for v in frontier if v.id in carried]
    fresh = [v for v in handed if v not in loop.results[count:]]
    if _bytes(fresh) > MOST * _bytes(ends) or any(v.id in sources for v in ends):
        return None
    own = [o for o in dict.fromkeys(loop.results[count:]) if o.id not in late]
    stacked = list(dict.fromkeys([*own, *handed]))
    pairs = [list(zip(v, o, strict=True)) for v, o in zip(loop.inputs[1:], (loop.xs, loop.wholes), strict=True)]
    results = _emitted(loop.part(range(count), pairs[0], pairs[1], stacked).without_unread())
    at_step = dict(zip(stacked, results[count:], strict=True))
    made, has_axis = _for_all_steps(loop, ends, {v: at_step[v] for v in handed})
    assert all(has_axis)
    at_step |= dict(zip(ends, made, strict=True))
    return [*results[:count], *(at_step[o] for o in loop.results[count:])]


def _above(loop: Loop, values: Sequence[Value]) -> set[int]:
    """The ids of these and of what they are made of, inputs aside."""
    return {v.id for v in nodes_between(values, [v.id for v in loop.body.inputs])}


def _bytes(values: Collection[Value]) -> int:
    return sum(estimate(v.aval.nbytes) for v in values)


# ------------------------------------------------------------------------------------------------ sums of all steps
def _summed_later(loop: Loop) -> list[Value] | None:
    """The first carry that a step only adds to: its sum over steps, or over what a step sums, is taken behind it."""
    found = next((pair for i in range(len(loop.init)) if (pair := _added(loop, i)) is not None), None)
    if found is None:
        return None
    number, step = found
    return _sum_of_steps(loop, number, step) if step.prim == "dot" else _sum_of_sums(loop, number, step)


def _added(loop: Loop, number: int) -> tuple[int, Value] | None:
    """What a step adds to a carry that nothing else reads: a product, or a sum."""
    before, after = loop.inputs.carries[number], loop.results[number]
    if after.prim != "add" or before not in after.args or len(before.users) != 1 or after.args[0] == after.args[1]:
        return None
    if any(o in (after, before) for i, o in enumerate(loop.results) if i != number) or len(after.users) > 0:
        return None
    (step,) = (a for a in after.args if a != before)
    carried = below(loop.body, loop.inputs.carries)
    return (number, step) if step.prim in ("dot", "sum") and step.id in carried | _steps(loop) else None


def _steps(loop: Loop) -> set[int]:
    return below(loop.body, loop.inputs.xs)


def _sum_of_steps(loop: Loop, number: int, step: Value) -> list[Value]:
    """init + the sum over steps of what each adds."""
    count = len(loop.init)
    carries = [i for i in range(count) if i != number]
    pairs = [list(zip(v, o, strict=True)) for v, o in zip(loop.inputs[1:], (loop.xs, loop.wholes), strict=True)]
    results = _emitted(loop.part(carries, pairs[0], pairs[1], [*loop.results[count:], step]))
    results.insert(number, emit("add", loop.init[number], _summed(results.pop())))
    return results


def _summed(products: Value) -> Value:
    """The sum over steps, which a product takes along with its own."""
    if products.prim != "dot":
        return emit("sum", products, axes=(0,))
    return emit("dot", *products.args, **products.params | {"out_axes": products.params["out_axes"][1:]})


def _sum_of_sums(loop: Loop, number: int, step: Value) -> list[Value]:
    """A carry of what a step sums, not yet summed."""
    count, wide = len(loop.init), step.args[0]
    body = loop.body.copy()
    with building(body):
        larger = body.input(wide.aval, loop.inputs.carries[number].params["name"])
        after = emit("add", larger, Value(body, wide.id))
    inputs = [Value(body, v.id) for v in loop.body.inputs]
    outputs = [Value(body, o.id) for o in loop.results]
    inputs[number], outputs[number] = larger, after
    init = list(loop.init)
    init[number] = zeros(wide.aval)
    again = Loop(
        extract(outputs, inputs, name=body.name), tuple(init), loop.xs, loop.wholes, loop.length, loop.reverse
    )
    results = _emitted(again.without_unread())
    results[number] = emit("add", loop.init[number], emit("sum", results[number], axes=step.params["axes"]))
    return results
