"""Sums that take in what a step made a step later, as autograd adds up gradients, take it in at once.

    total, last = total + last, f(t)     and behind the loop total + last     ->     total = total + f(t)

Additions are in the same order. What leaves a loop (`motion`) is what a step adds itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...graph import Graph, Value, building, emit
from ...rewrite import without_shapes
from ...switches import is_on
from ...transforms.ops import zeros
from ..loop import Loop, below, loop_of, rebuild_scans, scans_of
from ..tidy import in_bodies

Pair = tuple[int, int]
"""The numbers of two carries: the sum, and what it takes in next."""


@dataclass(frozen=True)
class LateSums:
    """Graph -> an equal graph whose loops add up what a step makes in that step."""

    def __call__(self, graph: Graph) -> Graph:
        if not is_on("motion") or not scans_of(graph):
            return graph
        return rebuild_scans(in_bodies(graph, self), _taken_at_once)


def _taken_at_once(node: Value, args: list[Value]) -> list[Value] | None:
    pairs = _late_sums(node)
    return _with_sums(loop_of(node, args), pairs) if pairs else None


def _late_sums(node: Value) -> list[Pair]:
    """The sums of a loop that are only read behind it, added to what they would take in next."""
    loop = loop_of(node)
    pairs = ((i, j) for i in range(len(loop.init)) if (j := _next(loop, i)) is not None)
    return [pair for pair in pairs if _is_added_behind(node, pair)]


def _next(loop: Loop, number: int) -> int | None:
    """The carry that a step adds to this one, and that a step makes of neither, by a product or a sum."""
    carries = loop.inputs.carries
    before, after = carries[number], loop.results[number]
    if after.prim != "add" or before not in after.args or after.users:
        return None
    other = next((a for a in after.args if a != before), None)
    if other is None or other not in carries:
        return None
    late = list(carries).index(other)
    alone = len(before.users) == len(other.users) == 1 and not {before, other} & {*loop.results}
    made = loop.results[late]
    is_made_apart = without_shapes(made).prim in ("dot", "sum") and made.id not in below(loop.body, [before, other])
    return late if alone and is_made_apart and loop.results.count(after) == 1 else None


def _is_added_behind(node: Value, pair: Pair) -> bool:
    """Both ends of a pair are read by one addition alone."""
    graph = node.graph
    live = graph.live()
    picks = {u.params["index"]: u for u in node.users if u.prim == "pick" and u.id in live}
    ends = [picks.get(n) for n in pair]
    if None in ends:
        return False
    users = [[u for u in end.users if u.id in live] for end in ends if end is not None]
    are_results = any(end in graph.results for end in ends)
    return not are_results and all(len(u) == 1 for u in users) and users[0] == users[1] and users[0][0].prim == "add"


def _with_sums(loop: Loop, pairs: Sequence[Pair]) -> list[Value]:
    """The results of the loop: of each pair the whole sum, and zero."""
    body, init = loop.body.copy(), list(loop.init)
    inputs, outputs = ([Value(body, v.id) for v in values] for values in (loop.body.inputs, loop.results))
    for number, late in pairs:
        with building(body):
            outputs[number] = emit("add", inputs[number], outputs[late])
        init[number] = emit("add", init[number], init[late])
    summed = replace(loop, body=body.returning(outputs), init=tuple(init))
    dropped = sorted(late for _, late in pairs)
    kept = [n for n in range(len(init)) if n not in dropped]
    results = summed.part(kept, *summed.read, summed.results[len(init) :]).without_unread().emit()
    for late in dropped:
        results.insert(late, zeros(loop.init[late].aval))
    return results
