"""The kinds of nodes that a partition tells apart: called by torch, computed in kernels, or free wherever needed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TypeAlias

from ..graph import Graph, Value
from ..infer import same_shape, sizes_equal
from ..lazy_attribute import lazy_attribute
from ..prims import PRIMS
from ..text.text import symbols_of
from ..types import COMPLEX, FLOAT8, Size, contiguous_strides
from .layout import only_ones, segments

EXTERN = ("extern", "contract")
VIEWS = ("permute", "broadcast", "slice", "reshape")
SOURCES = ("full", "iota")
Strides: TypeAlias = tuple[Size, ...]


def is_extern(value: Value, apart: frozenset[int] = frozenset()) -> bool:
    """Called as it is: no primitive of ours, a product, dtypes that torch alone rounds as torch does, or in `apart`."""
    dtypes = {t.dtype for v in (value, *value.args) for t in v.avals}
    torchs = dtypes & set(COMPLEX) or (dtypes & set(FLOAT8) and not only_moves(value))
    return bool(torchs) or PRIMS[value.prim].family in EXTERN or value.id in apart


def only_moves(value: Value) -> bool:
    """The value is stored, moved, converted or chosen, not computed: all that eight-bit floats are for."""
    if value.prim == "full":
        return bool(value.params["value"] == 0)
    return value.prim in ("cast", "where") or PRIMS[value.prim].family in ("input", "layout", "gather")


def is_view(value: Value) -> bool:
    """A layout node that torch performs without touching memory."""
    if value.prim != "reshape":
        return value.prim in VIEWS
    (source,) = value.args
    return only_ones(source.shape, value.shape) or is_packed(source) or _merged(source, value) is not None


def is_packed(value: Value) -> bool:
    """Row-major in memory, once it is in memory."""
    if value.prim == "input":
        return same_shape(value.params["strides"], contiguous_strides(value.shape))
    return is_packed(value.args[0]) if value.prim == "reshape" else value.prim not in VIEWS


def _strides(value: Value) -> Strides | None:
    """Strides in memory of what is permuted, sliced or reshaped without touching it; None for other views."""
    if is_packed(value):
        return contiguous_strides(value.shape)
    if value.prim == "reshape":
        return _merged(value.args[0], value)
    source = _strides(value.args[0]) if value.prim in ("permute", "slice") else None
    if source is None or value.prim == "permute":
        return source and tuple(source[a] for a in value.params["perm"])
    return tuple(stride * step for stride, step in zip(source, value.params["step"], strict=True))


def _merged(source: Value, value: Value) -> Strides | None:
    """Strides of a reshape that merges axes of its source that lie one in the other, and takes none apart."""
    strides = _strides(source)
    runs = segments(source.shape, value.shape) if strides else []
    if not runs or any(len(own) != 1 for _, own in runs):
        return None
    assert strides is not None
    sizes = source.shape
    nested = all(sizes_equal(strides[a], strides[b] * sizes[b]) for run, _ in runs for a, b in pairwise(run))
    return tuple(strides[run[-1]] for run, _ in runs) if nested else None


class NodeKinds:
    """The nodes of one graph by kind. `brought`: the call that brings a symbol, a size that only its result has."""

    def __init__(self, graph: Graph, apart: frozenset[int]) -> None:
        self.graph = graph
        self._is_extern: dict[int, bool] = {}
        self.nodes = {v.id: v for v in graph.order()}
        self.brought = {s: v.id for v in self.nodes.values() for s in getattr(v.params.get("target"), "brings", ())}
        self.apart = apart | frozenset(self._late_views()) if self.brought else apart

    def _late_views(self) -> Iterator[int]:
        """Views of a size that a call brings, of what there may be before the call: no kernel makes both."""
        behind: dict[int, frozenset[int]] = {}
        for value in self.nodes.values():
            behind[value.id] = frozenset().union(*({a.id} | behind.get(a.id, frozenset()) for a in value.args))
            sizes = {s for s in symbols_of(value.avals) if s in self.brought}
            if is_view(value) and value.args and not {self.brought[s] for s in sizes} <= behind[value.id]:
                yield value.id

    def is_extern(self, value: Value) -> bool:
        """Asked for often: answered once for each node."""
        if (known := self._is_extern.get(value.id)) is None:
            known = self._is_extern[value.id] = is_extern(value, self.apart)
        return known

    def in_memory(self, value: Value) -> bool:
        """Without a kernel of ours: an input, or what a call returns."""
        made = value.args[0] if value.prim == "pick" else value
        return made.prim == "input" or self.is_extern(made)

    def is_free(self, value: Value) -> bool:
        """Costs nothing wherever it is needed, and so belongs to no cluster."""
        return not self.in_memory(value) and (value.prim in SOURCES or is_view(value))

    def is_core(self, value: Value) -> bool:
        """Computed in a kernel."""
        return not self.in_memory(value) and not self.is_free(value)

    def base(self, value: Value) -> Value:
        """The value at the end of a chain of views. A view that is called as it is is no link of a chain."""
        while is_view(value) and not self.in_memory(value):
            (value,) = value.args
        return value

    @lazy_attribute
    def externs(self) -> list[Value]:
        return [v for v in self.nodes.values() if self.is_extern(v)]

    @lazy_attribute
    def cores(self) -> list[Value]:
        return [v for v in self.nodes.values() if self.is_core(v)]

    def sources(self, value: Value) -> list[Value]:
        """The values that a node reads, core or in memory, through whatever is free."""
        sources: dict[Value, None] = {}
        todo = list(value.args)
        while todo:
            arg = todo.pop()
            if self.is_free(arg):
                todo.extend(arg.args)
            else:
                sources[arg] = None
        return sorted(sources, key=lambda v: v.id, reverse=True)
