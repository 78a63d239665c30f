"""The share of a virtual value that masks leave: of what is known by places alone, sampled on a coarse grid.

    where(i >= j, s, -inf)                        0.5
    where((i >= j) & (i - j < 256), s, -inf)      0.12 of 4096 x 4096

Kernels visit no tile that is masked as a whole. An estimate for the model of their time; what they skip, they prove.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import partial

import numpy as np
import sympy

from ...evaluate import evaluate
from ...graph import Value
from ...prims import PRIMS
from ...rewrite import extract, make, number_of, rebuild
from ...text.text import symbols_of
from ..cost import Hints, estimate

GRID = 64
"""Samples along an axis whose size is a symbol."""
MOST = 1 << 20
"""Samples in all, beyond which nothing is asked."""
BY_PLACE = ("elementwise", "layout", "source")


def alive_share(nodes: Sequence[Value], virtual: Collection[int], hints: Hints) -> float:
    """The smallest share that one mask of scores leaves; 1.0 where there is none, or none that places decide."""
    added = {_below_copies(a).id for v in nodes if v.prim == "add" and v.id in virtual for a in v.args}
    masked = [v for v in nodes if v.prim == "where" and (v.id in virtual or v.id in added)]
    sides = [(v.args[0], alive) for v in masked if (alive := _alive_side(v)) is not None]
    return min((_share(condition, alive, hints) for condition, alive in sides), default=1.0)


def _below_copies(value: Value) -> Value:
    """The same for every sample and head, of which the share is the same; in any dtype."""
    while value.prim in ("broadcast", "cast", "reshape"):
        (value,) = value.args
    return value


def _alive_side(value: Value) -> bool | None:
    """The truth value of the condition where something is alive; None where neither side is -inf."""
    _, yes, no = (number_of(a) for a in value.args)
    return None if (yes == -math.inf) == (no == -math.inf) else no == -math.inf


def _share(condition: Value, alive: bool, hints: Hints) -> float:
    """At most: of conditions that all have to hold, one that data decides may leave anything."""
    condition = _below_copies(condition)
    if condition.prim == "not":
        return _share(condition.args[0], not alive, hints)
    inside = _computed(condition)
    if inside is None and condition.prim == ("and" if alive else "or"):
        return min(_share(a, alive, hints) for a in condition.args)
    if inside is None:
        return 1.0
    sizes = {s: min(GRID, estimate(s, hints)) for v in inside for s in symbols_of((*v.avals, *v.params.values()))}
    if math.prod(estimate(n, sizes) for n in condition.shape) > MOST:
        return 1.0
    asked = extract([condition], [], name="mask")
    replaced = {v.id: partial(_at_hints, v, sizes, hints) for v in asked.order() if v.prim in ("iota", "full")}
    (found,) = evaluate(rebuild(asked, {}, replaced), [], sizes)
    return float(np.mean(np.asarray(found) == alive))


def _computed(condition: Value) -> list[Value] | None:
    """The nodes of a condition that places alone decide."""
    todo, seen = [condition], dict[int, Value]()
    while todo:
        value = todo.pop()
        if value.prim == "input" or PRIMS[value.prim].family not in BY_PLACE:
            return None
        if value.id not in seen:
            seen[value.id] = value
            todo += value.args
    return list(seen.values())


def _at_hints(value: Value, sizes: Hints, hints: Hints, env: dict[int, Value]) -> Value:
    """Places of a grid in the place of all, and numbers made of sizes as they are."""
    if value.prim == "full":
        number = value.params["value"]
        plain = estimate(number, hints) if isinstance(number, sympy.Basic) else number
        return make("full", **{**value.params, "value": plain})
    places = make("iota", **value.params)
    step = estimate(value.params["size"], hints) // max(1, estimate(value.params["size"], sizes))
    return make("mul", places, make("full", value=step, shape=value.shape, dtype=value.dtype))
