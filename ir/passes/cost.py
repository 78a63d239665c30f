"""Bytes: what a graph has to move at least, and guesses for symbolic sizes where two costs are compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import sympy

from ..graph import Graph, Value
from ..types import ITEMSIZE, Size, elements_in_memory, simplify_size

Hints = Mapping[sympy.Symbol, int]
TYPICAL = 4096
"""The value that an unknown size is taken to have."""


def estimate(size: Size, hints: Hints | None = None) -> int:
    """The size under the hints; a symbol without one counts as 4096."""
    if isinstance(size, int):
        return size
    values = {s: (hints or {}).get(s, TYPICAL) for s in size.free_symbols}
    return int(size.xreplace(values))


def minimal_bytes(graph: Graph) -> Size:
    """Each input that is used read once, each output written once: no kernel can move less.

    What is expanded counts the elements that it has, an input that is only gathered from or sliced those taken, and a
    small table that much is gathered from those that it has.
    """
    live, results, layouts = graph.live(), dict.fromkeys(graph.results), graph.strides_of_outputs()
    reads = [_bytes_read(v, live, v in results) for v in graph.inputs if v.id in live]
    return _total([*reads, *(_bytes_written(v, layouts.get(v)) for v in results if v.prim != "input")])


def _bytes_written(value: Value, strides: tuple[Size, ...] | None) -> Size:
    if strides is None:
        return value.aval.nbytes
    return simplify_size(elements_in_memory(value.shape, strides) * ITEMSIZE[value.dtype])


def bytes_read(value: Value) -> Size:
    """The bytes that have to be read of an input."""
    return _bytes_read(value, value.graph.live(), value in value.graph.results)


def _bytes_read(value: Value, live: set[int], is_result: bool) -> Size:
    users = [u for u in value.users if u.id in live]
    complete = is_result or not all(_takes_part(u, value) for u in users)
    elements = _elements(value) if complete else _taken(value, users)
    return simplify_size(elements * ITEMSIZE[value.dtype])


def _taken(value: Value, users: Sequence[Value]) -> Size:
    taken = _total(u.aval.numel for u in users)
    gathers = any(u.prim == "gather" for u in users)
    return simplify_size(sympy.Min(taken, _elements(value))) if gathers else taken


def _takes_part(user: Value, value: Value) -> bool:
    return user.prim in ("gather", "slice") and user.args[0] == value and value not in user.args[1:]


def _elements(value: Value) -> Size:
    return elements_in_memory(value.shape, value.params.get("strides", (1,) * value.ndim))


def _total(sizes: Iterable[Size]) -> Size:
    return simplify_size(sum(sizes, start=sympy.Integer(0)))
