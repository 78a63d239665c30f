"""The reasons why a graph is several launches: its fused groups, and why each cut is between or within them.

Read off the same division that made the kernels (`ir/passes/fuse.py`): nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import networkx as nx

from ...codegen import Kernel, Kernels, Pointer, Ref
from ...ir import Graph, Value
from ...ir.codes import code_of
from ...ir.passes.fuse import Extern, Group, Partition
from ...ir.prims import PRIMS
from ...ir.types import COMPLEX, FLOAT8
from ...tracer.opaque.opaque import opaque_of
from .aten.step_by_step import STEP_BY_STEP
from .generated import Generated

ENDED = "a scatter is whole only when its kernel has ended"
HELD = "one kernel would hold results of several calls for longer than it saves in moving"
PRODUCT = "what comes before a matmul would be computed again for every tile of it"
SLABS = "a region of matmuls is computed a slab of rows at a time, which bounds its memory"
APART = "they share no value, or run over different spaces"
DIRECTIONS = "a kernel for each direction in which a matrix that is never in memory is summed"


@dataclass(frozen=True)
class GroupReport:
    """One fused group: its kernels, what they compute, read and write, and the user's lines."""

    kernels: tuple[str, ...]
    """Its kernels, in launch order."""
    operations: tuple[str, ...]
    """The primitives that it computes."""
    reads: tuple[str, ...]
    """The values that it reads, by name."""
    writes: tuple[str, ...]
    """The values that it writes, by name."""
    lines: tuple[str, ...]
    """`file:line` of the lines of yours that it computes."""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values that json can write."""
        return {name: list(value) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class FusionBreak:
    """The reason why what comes `after` is not in the launch of what comes `before`."""

    before: str
    """The launch before the break."""
    after: str
    """The launch after it."""
    reason: str
    """Why the two are not one."""
    where: str | None = None
    """`file:line` of the operation in the way; None where there is none."""

    @property
    def code(self) -> str:
        """The code of the reason, under which troubleshooting has more."""
        return code_of(self.reason) or ""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values that json can write."""
        return {**asdict(self), "code": self.code}

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where and not self.where.startswith("<") else ""  # of a source that is there
        return f"fusion break between {self.before} and {self.after}: {self.reason}{place} [{self.code}]"


# ------------------------------------------------------------------ groups
def groups_of(generated: Generated) -> list[GroupReport]:
    """Every fused group, in the order of launches."""
    return [_group(step, generated.kernels[at]) for at, step in enumerate(generated.steps) if isinstance(step, Group)]


def _group(group: Group, kernels: Kernels) -> GroupReport:
    values = [v for v in group.graph.order() if v.prim != "input"]
    names = {v: v.params["name"] for v in group.graph.inputs}
    lines = dict.fromkeys(v.origin.where for v in values if v.origin.where)
    written_names = [v.origin.name or v.prim for v in group.outputs]
    return GroupReport(
        tuple(k.name for k in kernels.kernels), tuple(v.prim for v in values), tuple(names.values()),
        tuple(written_names), tuple(lines),
    )  # fmt: skip


# ------------------------------------------------------------------ cuts
def fusion_breaks_of(graph: Graph, generated: Generated) -> list[FusionBreak]:
    """A reason for every two launches that follow each other."""
    return list(_Division(graph, generated).cuts())


class _Division:
    """A graph's clusters, as the fuser left them, and the launches that came of them."""

    def __init__(self, graph: Graph, generated: Generated) -> None:
        self.generated = generated
        self.partition = Partition(graph, frozenset(generated.refused), {}, generated.bound)
        self.called = {s.value.id for s in generated.steps if isinstance(s, Extern)}
        self.steps = [(at, s) for at, s in enumerate(generated.steps) if isinstance(s, Group | Extern)]

    def cuts(self) -> Iterator[FusionBreak]:
        for (at, step), following in pairwise([*self.steps, None]):  # type: ignore[misc]
            if isinstance(step, Group) and at not in self.generated.slabs:
                yield from _breaks_within(self.generated.kernels[at])
            if following is not None:
                yield FusionBreak(self._name(at, step, -1), self._name(*following, 0), *self._why(step, following[1]))

    def _name(self, at: int, step: Group | Extern, index: int) -> str:
        """A step by its first or its last launch."""
        kernels = self.generated.kernels[at].kernels if isinstance(step, Group) else ()
        if isinstance(step, Group):
            return kernels[index].name if kernels else self.generated.names[at]
        return call_name(step.value)

    def _why(self, earlier: Group | Extern, later: Group | Extern) -> tuple[str, str | None]:
        if self._is_of_slabs(earlier) or self._is_of_slabs(later):
            return SLABS, None
        for step in (later, earlier):
            if isinstance(step, Extern):
                return self._not_ours(step.value), step.value.origin.where
        assert isinstance(earlier, Group) and isinstance(later, Group)
        return self._between(self._cluster(earlier), self._cluster(later))

    def _is_of_slabs(self, step: Group | Extern) -> bool:
        """It is walked in slabs, or was part of what is."""
        if not isinstance(step, Group) or not self.generated.slabs:
            return False
        inside = any(step is s.group for s in self.generated.slabs.values())
        return inside or self.partition.clusters.of(self.partition.kinds.base(step.outputs[0])) is None

    def _cluster(self, group: Group) -> int:
        cluster = self.partition.clusters.of(self.partition.kinds.base(group.outputs[0]))
        assert cluster is not None
        return cluster

    def _between(self, a: int, b: int) -> tuple[str, str | None]:
        """Say what stands on a way from one group to the other; else whether memory would be held."""
        way = _way(self.partition.clusters.dag, a, b) or _way(self.partition.clusters.dag, b, a)
        for at in way:
            value = self.partition.kinds.nodes[at if at >= 0 else -1 - at]
            if at < 0:
                return ENDED, value.origin.where
            if self.partition.kinds.is_extern(value) and value.id not in self.called:
                return PRODUCT, value.origin.where  # it is part of one of the two
            if self.partition.kinds.is_extern(value):
                return f"`{call_name(value)}` is in between: {self._not_ours(value)}", value.origin.where
        if way:
            return "a step in between needs the one and is needed by the other", None
        return (HELD if self.partition.clusters.lifetimes.would_grow(a, b) else APART), None

    def _not_ours(self, value: Value) -> str:
        """The reason why a node is called as it is."""
        if (node := opaque_of(value)) is not None:
            return f"`{node.name}` runs in eager between the segments"
        if value.id in self.generated.refused:
            return self.generated.refused[value.id]
        if value.prim == "scan":
            return STEP_BY_STEP
        if PRIMS[value.prim].family == "contract":
            return "a matmul is a library call"
        odd = {t.dtype for v in (value, *value.args) for t in v.avals} & {*COMPLEX, *FLOAT8}
        return f"`{call_name(value)}` works on {min(odd)}" if odd else f"`{call_name(value)}` has no kernel"


def call_name(value: Value) -> str:
    """The name of a node that is called as it is."""
    node = opaque_of(value)
    name = value.params.get("op") or getattr(value.params.get("target"), "__name__", value.prim)
    return str(name) if node is None else node.name


def _way(dag: nx.DiGraph, a: int, b: int) -> Sequence[int]:
    """The clusters on a way from a to b that is no single edge; none where there is none."""
    without_edge = nx.restricted_view(dag, (), [(a, b)] if dag.has_edge(a, b) else [])
    try:
        return list(nx.shortest_path(without_edge, a, b))[1:-1]
    except nx.NetworkXNoPath:
        return ()


def _breaks_within(kernels: Kernels) -> Iterator[FusionBreak]:
    """The cuts of one group: what a kernel reads of the one before."""
    for earlier, later in pairwise(kernels.kernels):
        written = _buffers(earlier, kernels, earlier.writes)
        shared = [written[ref] for ref in _buffers(later, kernels, {**later.reads, **later.cached}) if ref in written]
        yield FusionBreak(earlier.name, later.name, _why_within(earlier, later, shared))


def _why_within(earlier: Kernel, later: Kernel, shared: Sequence[str]) -> str:
    """shared: what the one writes, and the other reads. Numbers of rows that both could make are no reason."""
    first = earlier.walk.prologue if earlier.walk is not None and later.walk is not None else ()
    if not set(shared) <= set(first):
        return f"it needs the complete `{', '.join(shared)}` of the one before (a grid-wide dependency)"
    both = earlier.walk is not None and later.walk is not None
    return DIRECTIONS if both else APART


def _buffers(kernel: Kernel, kernels: Kernels, pointers: Container[str]) -> dict[Ref, str]:
    """The results and temporaries among these pointers of a kernel, by their names."""
    named = [a for a in kernel.arguments if isinstance(a, Pointer) and a.name in pointers]
    touched = [a for a in named if a.buffer.kind in ("output", "temporary")]
    own = {i: b.name.rpartition("_")[0] for i, b in enumerate(kernels.temporaries)}
    return {a.buffer: own.get(a.buffer.index, "") if a.buffer.kind == "temporary" else a.name.removesuffix("_ptr")
            for a in touched}  # fmt: skip
