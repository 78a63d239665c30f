"""What is picked at the place of a row's extreme is the extreme, which a walk finds without a sum of what is picked.

    i = argmin(s, 1);  sum over j of where(j == i, s, 0)   ->   amin(s, 1)

So `s.min(1)` is read: its values are picked at its indices.
"""

from __future__ import annotations

from functools import partial

from ....graph import Graph, Value
from ....rewrite import make, number_of, rebuild
from ...identities.places import are_places

EXTREMES = {"argmin": "amin", "argmax": "amax"}


def without_picked_extremes(graph: Graph, virtual: frozenset[int]) -> Graph:
    """The graph with extremes of virtual values in the place of such sums."""
    sums = {v.id: (v, place) for v in graph.order() if v.prim == "sum" and (place := _place(v)) is not None}
    found = {i: partial(_extreme, *pair) for i, pair in sums.items() if pair[1].args[0].id in virtual}
    return rebuild(graph, {}, found) if found else graph


def _place(total: Value) -> Value | None:
    """The place of the extreme that a sum picks, of each row or of all that it adds up; None of another sum."""
    if total.args[0].prim != "where":
        return None
    here, picked, nothing = total.args[0].args
    if here.prim != "eq" or number_of(nothing) != 0:
        return None
    for along, across in (here.args, here.args[::-1]):
        place = across.args[0] if across.prim == "broadcast" else None
        if place is None or place.prim not in EXTREMES or place.args[0] != picked:
            continue
        axis = place.params["axis"]
        others = tuple(a for a in range(picked.ndim) if a != axis)
        if are_places(along, axis) and across.params["axes"] == others and axis in total.params["axes"]:
            return place
    return None


def _extreme(total: Value, place: Value, env: dict[int, Value]) -> Value:
    """The extremes, added up where the sum had several."""
    axis = place.params["axis"]
    extreme = make(EXTREMES[place.prim], env[place.args[0].id], axes=(axis,))
    rest = tuple(a - (a > axis) for a in total.params["axes"] if a != axis)
    return make("sum", extreme, axes=rest) if rest else extreme
