"""Code motion: products of matrices, and sums of what is only added up, leave the body of a `scan`.

    h = tanh(x[t] @ w + h @ u)      x @ w before the loop, of all steps at once
    out[t] = h @ v                  out = hs @ v behind it
    dw += g[t].T @ h[t - 1]         dw = gs.T @ hs behind it: one product, summed over steps as well
    db += g[t].sum(0)               db[i] += g[t, i] in the loop, its sum behind it

Kernels hold products with what they carry; any other is the library's, which is faster with all steps at once. Sums are
taken in another order than step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ..graph import Graph, Value, building, emit
from ..passes.cost import estimate
from ..prims import PRIMS
from ..rewrite import extract, make, nodes_between, shaped_as, without_shapes
from ..switches import is_on
from ..transforms.ops import inline, zeros
from ..types import Size, simplify_size
from .loop import Loop, below, loop_of, rebuild_scans, scans_of
from .parts import carry_in_pieces, made_behind, part_along, with_parts
from .tidy import permuted_results

Batch: TypeAlias = "Callable[[Graph, Sequence[bool], Size], tuple[Graph, tuple[bool, ...]]]"
"""(a graph, its inputs that are mapped, the batch) -> the graph over a batch, and its outputs that have the axis."""

APART = ("contract", "cumulative")
"""Families that are worth a loop's while to do for all steps at once."""
MOST = 4
"""Bytes that may be stacked for each byte of what is made of them behind the loop."""


@dataclass(frozen=True)
class Motion:
    """Graph -> an equal graph whose loops do step by step what has to be done so. `batch` is vmap."""

    batch: Batch = field(hash=False)

    def __call__(self, graph: Graph) -> Graph:
        if not is_on("motion") or not scans_of(graph):
            return graph
        moved = rebuild_scans(graph, self._moved)
        return rebuild_scans(moved, lambda node, args: permuted_results(loop_of(node, args)))

    def _moved(self, node: Value, args: list[Value]) -> list[Value] | None:
        """The results of a scan with what leaves it before and behind it; None where nothing does."""
        loop = loop_of(node, args)
        return next((results for rule in self._rules if (results := rule(loop)) is not None), None)

    @property
    def _rules(self) -> list[Callable[[Loop], list[Value] | None]]:
        behind = (self._laid_out_behind, self._summed_later, self._done_in_parts, self._done_behind, self._made_behind)
        return [*behind, self._handed_later, self._carried_in_pieces, self._done_before]

    def _emitted(self, loop: Loop) -> list[Value]:
        """The results of a loop, of which more may leave."""
        if not (results := loop.emit()):
            return results
        node = results[0] if results[0].prim == "scan" else results[0].args[0]
        return self._moved(node, list(node.args)) or results

    # ------------------------------------------------------------------ in parts
    def _done_in_parts(self, loop: Loop) -> list[Value] | None:
        """Products of which a part may leave the loop."""
        divided = with_parts(loop)
        return None if divided is None else self._emitted(divided)

    def _carried_in_pieces(self, loop: Loop) -> list[Value] | None:
        """What a concatenation is added to is carried in its pieces, each of which goes through time by itself."""
        return carry_in_pieces(loop, self._emitted)

    def _made_behind(self, loop: Loop) -> list[Value] | None:
        """What steps give is turned, and put together, for all of them at once."""
        found = made_behind(loop)
        if found is None:
            return None
        smaller, results = found
        return results(self._emitted(smaller))

    def _handed_later(self, loop: Loop) -> list[Value] | None:
        """A product that a step makes for the next one alone to give is made of all steps at once, and given later."""
        count = len(loop.init)
        number = next((n for n in range(count) if _is_given_later(loop, n)), None)
        if number is None:
            return None
        before, after = loop.inputs.carries[number], loop.results[number]
        others = [n for n in range(count) if n != number]
        ys = [after, *(y for y in loop.results[count:] if y != before)]
        steps, whole = loop.read
        made = self._emitted(loop.part(others, steps, whole, ys))
        finals, stacked, rest = made[: count - 1], made[count - 1], iter(made[count:])
        first = make("reshape", loop.init[number], shape=(1, *before.shape))
        every = emit("cat", *((stacked, first) if loop.reverse else (first, stacked)), axis=0)
        end = simplify_size(loop.length + 1)
        late, last = ((1, end), (0, 1)) if loop.reverse else ((0, loop.length), (loop.length, end))
        later = part_along(every, 0, *late)
        given = [later if y == before else next(rest) for y in loop.results[count:]]
        final = make("reshape", part_along(every, 0, *last), shape=before.shape)
        return [*finals[:number], final, *finals[number:], *given]

    # ------------------------------------------------------------------ before the loop
    def _done_before(self, loop: Loop) -> list[Value] | None:
        """What no step's result goes into is made for all steps at once."""
        carried = below(loop.body, loop.inputs.carries)
        free = (v for v in loop.body.order() if v.id not in carried and PRIMS[v.prim].family in APART)
        early = [v for v in free if not _calls(nodes_between([v], [i.id for i in loop.body.inputs]))]
        if not early:
            return None
        needed = [v for v in early if any(u not in early for u in v.users) or v in loop.results]
        made, has_axis = self._for_all_steps(loop, needed, {})
        again = loop.read
        for value, result, varies in zip(needed, made, has_axis, strict=True):
            again[0 if varies else 1].append((value, result))
        count = len(loop.init)
        smaller = loop.part(range(count), again[0], again[1], loop.results[count:]).without_unread()
        return self._emitted(smaller)

    def _for_all_steps(
        self, loop: Loop, values: Sequence[Value], known: dict[Value, Value]
    ) -> tuple[list[Value], list[bool]]:
        """Values of the body for all steps at once, and which of them have the axis of steps.

        known: values of the body that are there already, stacked.
        """
        xs = dict(zip(loop.inputs.xs, loop.xs, strict=True)) | known
        wholes = dict(zip(loop.inputs.wholes, loop.wholes, strict=True))
        sources = [*xs, *wholes]
        part = extract(values, sources, name=loop.body.name)
        graph, mapped = self.batch(part, [v in xs for v in sources], loop.length)
        made = inline(graph, [*xs.values(), *wholes.values()])
        return [m for m in made if m is not None], list(mapped)

    # ------------------------------------------------------------------ behind the loop
    def _laid_out_behind(self, loop: Loop) -> list[Value] | None:
        """Results of steps that are operands in another shape are these, of all steps at once."""
        count = len(loop.init)
        ends = [o for o in dict.fromkeys(loop.results[count:]) if _is_view_of_steps(loop, o)]
        if not ends:
            return None
        kept = [o for o in dict.fromkeys(loop.results[count:]) if o not in ends]
        pairs = loop.read
        results = self._emitted(loop.part(range(count), pairs[0], pairs[1], kept).without_unread())
        made, has_axis = self._for_all_steps(loop, ends, {})
        assert all(has_axis)
        at_step = dict(zip([*kept, *ends], [*results[count:], *made], strict=True))
        return [*results[:count], *(at_step[o] for o in loop.results[count:])]

    def _done_behind(self, loop: Loop) -> list[Value] | None:
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
        if _bytes(fresh) > MOST * _bytes(ends) or any(v.id in sources for v in ends) or _calls(between):
            return None
        own = [o for o in dict.fromkeys(loop.results[count:]) if o.id not in late]
        stacked = list(dict.fromkeys([*own, *handed]))
        pairs = loop.read
        results = self._emitted(loop.part(range(count), pairs[0], pairs[1], stacked).without_unread())
        at_step = dict(zip(stacked, results[count:], strict=True))
        made, has_axis = self._for_all_steps(loop, ends, {v: at_step[v] for v in handed})
        assert all(has_axis)
        at_step |= dict(zip(ends, made, strict=True))
        return [*results[:count], *(at_step[o] for o in loop.results[count:])]

    # ------------------------------------------------------------------ sums of all steps
    def _summed_later(self, loop: Loop) -> list[Value] | None:
        """The first carry that a step only adds to: its sum, over steps or within each, is taken behind the loop."""
        found = next((pair for i in range(len(loop.init)) if (pair := _added(loop, i)) is not None), None)
        if found is None:
            return None
        number, added = found
        step = without_shapes(added)
        results = (self._sum_of_steps if step.prim == "dot" else self._sum_of_sums)(loop, number, step)
        results[number] = emit("add", loop.init[number], shaped_as(added, results[number]))
        return results

    def _sum_of_steps(self, loop: Loop, number: int, step: Value) -> list[Value]:
        """The sum over steps of what each adds."""
        count = len(loop.init)
        carries = [i for i in range(count) if i != number]
        pairs = loop.read
        results = self._emitted(loop.part(carries, pairs[0], pairs[1], [*loop.results[count:], step]))
        results.insert(number, _summed(results.pop()))
        return results

    def _sum_of_sums(self, loop: Loop, number: int, step: Value) -> list[Value]:
        """A carry of what a step sums, not yet summed."""
        wide = step.args[0]
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
        results = self._emitted(again.without_unread())
        results[number] = emit("sum", results[number], axes=step.params["axes"])
        return results


def _is_given_later(loop: Loop, number: int) -> bool:
    """Whether a step only gives what the one before has made, by a product that no other state needs."""
    count, before, after = len(loop.init), loop.inputs.carries[number], loop.results[number]
    if before.users or before in loop.results[:count] or before not in loop.results[count:]:
        return False
    others = [o for n, o in enumerate(loop.results[:count]) if n != number]
    return any(PRIMS[Value(loop.body, i).prim].family in APART for i in _above(loop, [after]) - _above(loop, others))


def _is_view_of_steps(loop: Loop, value: Value) -> bool:
    """Whether a value of the body is one operand that is another one in each step, in another shape."""
    at = value
    while PRIMS[at.prim].family == "layout" and len(at.args) == 1:
        (at,) = at.args
    return at != value and at in loop.inputs.xs


def _above(loop: Loop, values: Sequence[Value]) -> set[int]:
    """The ids of these and of what they are made of, inputs aside."""
    return {v.id for v in nodes_between(values, [v.id for v in loop.body.inputs])}


def _calls(nodes: Sequence[Value]) -> bool:
    """Something among them is no primitive: what it is for all steps at once is not known here."""
    return any(PRIMS[v.prim].family == "extern" for v in nodes)


def _bytes(values: Collection[Value]) -> int:
    return sum(estimate(v.aval.nbytes) for v in values)


def _added(loop: Loop, number: int) -> tuple[int, Value] | None:
    """What a step adds to a carry that nothing else reads: a product, or a sum, as it is or in another shape."""
    before, after = loop.inputs.carries[number], loop.results[number]
    if after.prim != "add" or before not in after.args or len(before.users) != 1 or after.args[0] == after.args[1]:
        return None
    if any(o in (after, before) for i, o in enumerate(loop.results) if i != number) or len(after.users) > 0:
        return None
    (added,) = (a for a in after.args if a != before)
    step, carried = without_shapes(added), below(loop.body, loop.inputs.carries)
    return (number, added) if step.prim in ("dot", "sum") and step.id in carried | _steps(loop) else None


def _steps(loop: Loop) -> set[int]:
    return below(loop.body, loop.inputs.xs)


def _summed(products: Value) -> Value:
    """The sum over steps, which a product takes along with its own."""
    if products.prim != "dot":
        return emit("sum", products, axes=(0,))
    return emit("dot", *products.args, **products.params | {"out_axes": products.params["out_axes"][1:]})
