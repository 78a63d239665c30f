"""Steps of a loop that an index adds up, as a sum for each place: of what the index sends there.

    out[t, b, c] += h[t, b, s] where c = index[b, s]
        ->  out[t, b, c] += sum over s of where(index[b, s] == c, h[t, b, s], 0)

The loop's own kernel takes it in each step, in a fixed order; what is added is in no memory. First and last steps that
stand beside the loop are summed by themselves. A step that adds so within the loop is the same to it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial

from ..ir import Graph, Value
from ..ir.graph import emit
from ..ir.infer import sizes_equal
from ..ir.loops.loop import scans_of
from ..ir.loops.tidy import in_bodies
from ..ir.passes.cost import estimate
from ..ir.passes.index_checks import walks
from ..ir.passes.pieces import Pieces, scan_along
from ..ir.passes.products import Machine
from ..ir.passes.streaming.streams import LAUNCH
from ..ir.rewrite import number_of, rebuild
from ..ir.switches import is_on
from ..ir.text.source_names import source_name
from ..ir.types import ITEMSIZE, Size
from .program.sizes import Hints

SHARE = 0.5
"""Of the device's peak for float32."""
OPERATIONS = 3
"""For each pair of an element and a place: a comparison, a choice, a sum."""
LAUNCHES = 2
"""Those that the loop's kernel does without: one for zeros, one that adds."""


@dataclass(frozen=True)
class Places:
    """An addition at places. index: where to, along an `axis` of the base; own: for each other axis that is indexed,
    the dim of the index whose place it is."""

    node: Value
    index: Value
    axis: int
    own: Mapping[int, int]

    @property
    def base(self) -> Value:
        return self.node.args[0]

    @property
    def source(self) -> Value:
        return self.node.args[1]

    @staticmethod
    def of(node: Value) -> Places | None:
        """None where it is no addition, or where places along several axes are data."""
        if node.prim != "scatter" or node.params["mode"] != "add" or not node.aval.is_float:
            return None
        base, _, *indices = node.args
        pairs = list(zip(node.params["axes"], indices, strict=True))
        own: dict[int, int] = {}
        for axis, index in pairs:
            if (dim := _walked(index, base.shape[axis], own.values())) is not None:
                own[axis] = dim
        data = [(axis, index) for axis, index in pairs if axis not in own]
        if len(data) != 1:
            return None
        ((axis, index),) = data
        return Places(node, index, axis, own)

    @property
    def is_of_steps(self) -> bool:
        """What is added are steps of a loop, each to places of its own."""
        dims = (*self.own.values(), *range(self.index.ndim, self.source.ndim))
        return any(_is_along(self.source, dim) for dim in dims)

    def seconds(self, machine: Machine, hints: Hints) -> tuple[float, float]:
        """To compare each element with each place; and of the memory and the launches that the loop does without."""
        source, base = self.source.aval, self.base.aval
        pairs = estimate(source.numel, hints) * estimate(base.shape[self.axis], hints)
        moved = 2 * source.numel * ITEMSIZE[source.dtype] + 2 * base.numel * ITEMSIZE[base.dtype]
        moved += self.index.aval.numel * ITEMSIZE[self.index.dtype] * len(self.node.params["axes"])
        saved = estimate(moved, hints) / machine.bandwidth + LAUNCHES * LAUNCH
        return OPERATIONS * pairs / (SHARE * machine.flops["f32"]), saved

    def sums(self, env: Mapping[int, Value]) -> Value:
        """The base and, for each place, the sum of what is sent there."""
        source, index, base = env[self.source.id], env[self.index.id], env[self.base.id]
        last = source.ndim
        shape = (*source.shape, base.shape[self.axis])
        place = emit("iota", size=shape[-1], dtype=index.dtype)
        sides = ((index, tuple(range(index.ndim))), (place, (last,)), (source, tuple(range(last))))
        at, place, wide = (emit("broadcast", v, shape=shape, axes=axes) for v, axes in sides)
        nothing = emit("full", value=0.0, shape=shape, dtype=source.dtype)
        chosen = emit("where", emit("eq", at, place), wide, nothing)
        summed = tuple(d for d in range(index.ndim) if d not in self.own.values())
        total = emit("sum", chosen, axes=summed) if summed else chosen
        total = emit("permute", total, perm=tuple(self._order(index.ndim, last)))
        return total if number_of(self.base) == 0 else emit("add", base, total)

    def _order(self, ndim: int, last: int) -> list[int]:
        """For each axis of the base, the axis of the sum that it is."""
        kept = [d for d in range(last + 1) if d >= ndim or d in self.own.values()]
        rest = iter(range(ndim, last))
        dims = [self.own.get(a, last if a == self.axis else None) for a in range(self.base.ndim)]
        return [kept.index(next(rest) if d is None else d) for d in dims]


def _is_along(value: Value, dim: int) -> bool:
    """Along a dim are steps of a loop, or first and last ones beside them."""
    while value.prim == "permute":
        value, dim = value.args[0], value.params["perm"][dim]
    pieces = value.args if value.prim == "cat" else (value,)
    return any(scan_along(p, dim) is not None for p in pieces)


def _walked(index: Value, size: Size, taken: Collection[int]) -> int | None:
    """The dim along which an index is its own place, all of an axis so long; zero is that of an axis of one."""
    is_zero = size == 1 and number_of(index) == 0
    dims = (d for d, n in enumerate(index.shape) if d not in taken and sizes_equal(n, size))
    return next((d for d in dims if is_zero or walks(index, d)), None)


@dataclass(frozen=True)
class Addition:
    """What becomes of an addition of a loop's steps, and the reason. summed: by place, in the loop's kernel."""

    value: Value
    summed: bool
    reason: str

    @staticmethod
    def of(places: Places, machine: Machine, hints: Hints) -> Addition:
        """By the seconds of both ways."""
        own, saved = places.seconds(machine, hints)
        reason = f"{own * 1e6:.1f} us of comparisons instead of {saved * 1e6:.1f} us of memory and launches"
        return Addition(places.node, own <= saved, reason)

    def refused(self, why: str) -> Addition:
        """The same where no kernel can be generated."""
        return Addition(self.value, False, why)

    def __str__(self) -> str:
        way = "by place in the loop's kernel" if self.summed else "by the library"
        return f"addition {source_name(self.value)}: {way}, {self.reason}"


def additions_of_steps(graph: Graph, machine: Machine, hints: Hints) -> list[Addition]:
    """The additions of steps of loops by an index; none where they are switched off."""
    return [Addition.of(p, machine, hints) for p in _of_steps(graph)] if is_on("scattered_steps") else []


def _of_steps(graph: Graph) -> list[Places]:
    return [p for v in graph.order() if (p := Places.of(v)) is not None and p.is_of_steps]


def with_sums_of_steps(graph: Graph, machine: Machine, hints: Hints) -> Graph:
    """The graph with such sums in the place of additions of floats, and of those in a step of a loop that pay."""
    if not is_on("scattered_steps"):
        return graph
    found = _of_steps(graph)
    graph = Pieces()(_with_sums(graph, found)) if found else graph
    if not any(v.prim == "scatter" for scan in scans_of(graph) for v in scan.params["body"].graph.order()):
        return graph
    return in_bodies(graph, partial(_in_body, machine=machine, hints=hints))


def _in_body(body: Graph, machine: Machine, hints: Hints) -> Graph:
    found = [p for v in body.order() if (p := Places.of(v)) is not None]
    summed = [p for p in found if Addition.of(p, machine, hints).summed]
    return _with_sums(body, summed) if summed else body


def _with_sums(graph: Graph, found: list[Places]) -> Graph:
    return rebuild(graph, {}, {p.node.id: p.sums for p in found})
