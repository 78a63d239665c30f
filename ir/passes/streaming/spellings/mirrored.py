"""Sums of a virtual value and another one's transpose: each is summed by itself.

    (w + w.T) @ z     ->   w @ z + w.T @ z
    (w + w.T).sum(1)  ->   w.sum(1) + w.sum(0)

In such a sum a row is a column, too; no walk has both.
"""

from __future__ import annotations

from functools import partial

from ....graph import Graph, Value
from ....rewrite import make, rebuild
from ....types import LOW_FLOATS


def without_mirrors(graph: Graph, virtual: frozenset[int]) -> Graph:
    """The graph with matmuls and sums of the parts in the place of those of such sums."""
    ends = [v for v in graph.order() if v.prim in ("dot", "sum")]
    sides = {v.id: (v, at) for v in ends for at, a in enumerate(v.args) if _is_mirrored(a, virtual)}
    return rebuild(graph, {}, {i: partial(_of_parts, v, at) for i, (v, at) in sides.items()}) if sides else graph


def _is_mirrored(value: Value, virtual: frozenset[int]) -> bool:
    """One of the two is transposed, and both are virtual."""
    if value.prim not in ("add", "sub") or any(a.id not in virtual for a in value.args):
        return False
    return sum(_is_transposed(a) for a in value.args) == 1


def _is_transposed(value: Value) -> bool:
    while value.prim == "cast":
        (value,) = value.args
    return value.prim == "permute" and value.params["perm"] != tuple(range(value.ndim))


def _of_parts(value: Value, side: int, env: dict[int, Value]) -> Value:
    args, added = [env[a.id] for a in value.args], value.args[side]
    wide = "f32" if value.prim == "sum" and value.dtype in LOW_FLOATS else value.dtype
    parts = []
    for part in added.args:
        args[side] = _cast(env[part.id], wide)
        parts.append(make(value.prim, *args, **value.params))
    return _cast(make(added.prim, *parts), value.dtype)


def _cast(value: Value, dtype: str) -> Value:
    return make("cast", value, dtype=dtype) if value.dtype != dtype else value
