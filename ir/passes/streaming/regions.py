"""Regions: steps that virtual values connect, what joins them, whether they may be one, and the group that they are."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import networkx as nx

from ...graph import Graph, Value
from ...prims import COMPARE, PRIMS
from ...rewrite import NOTHING, Replacements, extract, nodes_between
from ...text.source_names import source_name
from ...types import ITEMSIZE, Size, contiguous_strides
from ..cost import Hints, estimate
from ..fuse import Extern, Group, Step, View
from ..node_kinds import SOURCES, is_view
from ..products import DTYPES
from ..virtual import is_source, sums_of, virtual_values
from .pairs import REDUCES, inside_of_pairs
from .spellings.bins import binned
from .spellings.concatenations import without_concatenations
from .spellings.dot_axes import plain_dots
from .spellings.extremes import without_picked_extremes
from .spellings.mirrored import without_mirrors
from .spellings.picked import without_picks
from .spellings.row_sums import wide_row_sums
from .spellings.split_sums import split_sums
from .spellings.symmetric import one_sided, without_transposes
from .spellings.ties import tie_of, without_ties

UNSEEN = ("aten._assert_async", "aten.rand.", "aten.randn.")
"""No kernel sees when they run: what is asserted, and what is drawn in an order of its own."""
FINISH = ("elementwise", "layout", "source", "reduce")
"""Families of groups that may be part of a region because they only read what it sums to."""

SCALES, MOST_SCALES, FEW = ("mul", "div", "neg", "cast", "add", "sub"), 4, 64
"""Operations of a copy that is scaled, how many of them, and how many times fewer elements other operands have."""


# ------------------------------------------------------------------ who makes what
class Flow:
    """Who makes and who reads what, among steps; views are seen through."""

    def __init__(self, graph: Graph, steps: Sequence[Step]) -> None:
        self.graph, self.steps = graph, steps
        self.work = [s for s in steps if not isinstance(s, View)]
        self.makers = {v.id: at for at, s in enumerate(self.work) for v in s.results}
        self.order = nx.DiGraph()
        self.order.add_nodes_from(range(len(self.work)))
        self.order.add_edges_from((m, at) for at, s in enumerate(self.work) for m in self._makers(s.reads))

    def source(self, value: Value) -> Value:
        """The value in memory at the end of a chain of views."""
        while value.id not in self.makers and is_view(value):
            (value,) = value.args
        return value

    def sources(self, values: Iterable[Value]) -> list[Value]:
        """Those of some values, once each and without constants."""
        found = dict.fromkeys(map(self.source, values))
        return [v for v in found if v.prim not in SOURCES]

    def maker(self, value: Value) -> int | None:
        """The step that makes a value in memory; None for an input of the graph."""
        source = value.args[0] if value.prim == "pick" else value
        return self.makers.get(source.id)

    def _makers(self, values: Iterable[Value]) -> Iterator[int]:
        return (m for v in self.sources(values) if (m := self.maker(v)) is not None)

    def touching(self, virtual: frozenset[int]) -> list[list[int]]:
        """Steps that read or make virtual values, by what these connect."""
        touched = nx.Graph()
        pairs = {v.id for v in self.graph.order() if v.prim in REDUCES and v.id in virtual}
        for at, step in enumerate(self.work):
            if any(v.id in virtual for v in (*step.reads, *step.results)) or (pairs and self._makes(step, pairs)):
                touched.add_node(at)
                touched.add_edges_from((m, at) for m in self._makers(v for v in step.reads if v.id in virtual))
        return sorted(sorted(found) for found in nx.connected_components(touched))


    def _makes(self, step: Step, pairs: Container[int]) -> bool:
        """A group that makes sums over pairs, of which no other step may hear."""
        if not isinstance(step, Group):
            return False
        known = {v.id for v in (*step.reads, *self.sources(step.reads))}
        return any(v.id in pairs for v in nodes_between(step.results, known))


# ------------------------------------------------------------------ regions
@dataclass(frozen=True)
class Region:
    """Steps that virtual values connect, by their places among the steps that are no views."""

    flow: Flow
    places: frozenset[int]
    virtual: frozenset[int]
    hints: Hints = field(hash=False)
    added: frozenset[int] = frozenset()  # ids of the scatters that its kernels sum

    @property
    def members(self) -> list[Step]:
        return [self.flow.work[at] for at in sorted(self.places)]

    @cached_property
    def products(self) -> list[Value]:
        """The products that are virtual, and the sums over pairs."""
        return [v for v in self.nodes() if is_source(v, self.virtual)]

    @property
    def pairs(self) -> list[Value]:
        """The sums over pairs that are virtual."""
        return [v for v in self.products if v.prim != "dot"]

    @property
    def is_summed(self) -> bool:
        """Something makes fewer elements of its virtual values: otherwise they are what the user asks for."""
        return bool(sums_of(self.nodes(), self.virtual))

    def nodes(self) -> list[Value]:
        """All nodes of the whole graph that it computes."""
        inside: dict[int, Value] = {}
        known = {v.id for v in self.inputs()}
        todo = [v for s in self.members for v in s.results]
        while todo:
            value = todo.pop()
            if value.id not in inside and value.id not in known and value.prim != "input":
                inside[value.id] = value
                todo.extend(value.args)
        return [inside[i] for i in sorted(inside)]

    # -------------------------------------------------------------- its ends
    def inputs(self) -> list[Value]:
        read = self.flow.sources(v for s in self.members for v in s.reads)
        return sorted((v for v in read if self.flow.maker(v) not in self.places), key=lambda v: v.id)

    def outputs(self) -> list[Value]:
        """The values that it makes and that a step outside reads, or the graph returns."""
        outside = [s for at, s in enumerate(self.flow.work) if at not in self.places]
        read = {v for s in outside for v in self.flow.sources(s.reads)}
        returned = self.flow.sources(self.flow.graph.results)
        made = [v for v in dict.fromkeys([*read, *returned]) if self.flow.maker(v) in self.places]
        views = {v: found for v in made if len(found := self._views_returned(v)) > 1}
        seen = {v for v, found in views.items() if v not in read and v not in found}
        return sorted({*made, *(r for found in views.values() for r in found)} - seen, key=lambda v: v.id)

    def _views_returned(self, value: Value) -> list[Value]:
        """Results that look at one value: of several each has memory of its own, and is written here rather than
        copied."""
        return [r for r in dict.fromkeys(self.flow.graph.results) if self.flow.source(r) == value]

    def crossing_virtual(self) -> list[Value]:
        """The virtual values that its steps hand to each other in memory."""
        crossing = [v for s in self.members for v in s.results if v.id in self.virtual]
        return crossing or self.pairs

    # -------------------------------------------------------------- what joins it
    def with_neighbours(self) -> Region:
        """With the groups between its steps, those that make large operands for it alone, and those that finish it."""
        grown = self._with(self._between()) if all(self._is_group(at) for at in self._between()) else self
        while more := next(grown._joining(), None):
            grown = grown._with(more)
        return grown

    def with_bins(self, refused: Container[int]) -> Region:
        """With what adds its tiles into small tables, which library calls would read from memory."""
        found = [v for v in binned(self.flow.graph.order(), self.virtual, self.hints) if v.id not in refused]
        joining = [v for v in found if self._sums_alone(v)]
        grown = replace(self, added=frozenset(v.id for v in joining))
        grown = grown._with(self.flow.makers[v.id] for v in joining)
        return grown.with_neighbours() if joining else self

    def _sums_alone(self, scatter: Value) -> bool:
        """It reads something of the region that nobody else does, and nothing comes between."""
        (source,) = self.flow.sources(scatter.args[1:2])
        step, returned = self.flow.makers[scatter.id], self.flow.sources(self.flow.graph.results)
        if self.flow.maker(source) not in self.places or source in returned:
            return False
        readers = [at for at, s in enumerate(self.flow.work) if source in self.flow.sources(s.reads)]
        return set(readers) <= self.places | {step} and not self._with([step])._between()

    def _with(self, places: Iterable[int]) -> Region:
        return replace(self, places=self.places | frozenset(places))

    def _joining(self) -> Iterator[frozenset[int]]:
        """Steps outside that join, one at a time, as long as nothing comes between."""
        for at in sorted(self._beside()):
            step = self.flow.work[at]
            joins = isinstance(step, Group) and (self._finishes(step) or self._is_operand(step))
            if joins and not self._with([at])._between():
                yield frozenset([at])

    def _beside(self) -> set[int]:
        order = self.flow.order
        return {n for at in self.places for n in (*order.predecessors(at), *order.successors(at))} - self.places

    def _finishes(self, group: Group) -> bool:
        """It reads what the region sums to, and multiplies nothing itself."""
        makers = {self.flow.maker(v) for v in self.flow.sources(group.reads)}
        plain = all(PRIMS[v.prim].family in FINISH for v in group.graph.order())
        return plain and bool(makers & self.places) and makers <= self.places | {None}

    def _is_operand(self, group: Group) -> bool:
        """All that it makes is read here alone, and is a copy, a scaled one too, or as large as a virtual value."""
        readers = self.flow.order.successors(self.flow.work.index(group))
        returned = self.flow.sources(self.flow.graph.results)
        if not set(readers) <= self.places or any(v in returned for v in group.results):
            return False
        least = min(self._elements(v) for v in self.products)
        is_large = all(self._elements(v) >= least for v in group.results)
        return self._is_copy(group) or is_large or self._is_of_places(group)

    def _is_of_places(self, group: Group) -> bool:
        """The bins of a table, of next to nothing in memory: they are made again for each tile."""
        readers = [self.flow.work[at] for at in self.flow.order.successors(self.flow.work.index(group))]
        if not all(isinstance(s, Extern) and s.value.id in self.added for s in readers):
            return False
        plain = all(PRIMS[v.prim].family in ("elementwise", "layout", "source") for v in group.graph.order())
        return plain and all(self._is_small(v, group) for v in group.inputs)

    def _is_copy(self, group: Group) -> bool:
        """Of one tensor, as wide; a few operations more for each element of a tile are little beside its products."""
        nodes = [v for v in group.graph.order() if PRIMS[v.prim].family not in ("layout", "source")]
        large = [v for v in group.inputs if not self._is_small(v, group)]
        wide = max((ITEMSIZE[v.dtype] for v in large), default=0)
        scaled = len(nodes) <= MOST_SCALES and all(v.prim in SCALES and self._is_scaled(v, group) for v in nodes)
        return not nodes or (scaled and wide <= min(ITEMSIZE[v.dtype] for v in group.outputs))

    def _is_scaled(self, value: Value, group: Group) -> bool:
        """Operands but one are numbers, or few."""
        return sum(not self._is_small(a, group) for a in value.args) <= 1

    def _is_small(self, operand: Value, group: Group) -> bool:
        while operand.prim in ("broadcast", "cast", "reshape"):
            (operand,) = operand.args
        made = min(self._elements(v) for v in group.outputs)
        return operand.prim in SOURCES or FEW * self._elements(operand) <= made

    def _elements(self, value: Value) -> int:
        return estimate(value.aval.numel, self.hints)

    def _is_group(self, at: int) -> bool:
        return isinstance(self.flow.work[at], Group)

    def _between(self) -> set[int]:
        """Steps outside that need some of its steps, and are needed by others."""
        after = set().union(*(nx.descendants(self.flow.order, at) for at in self.places))
        before = set().union(*(nx.ancestors(self.flow.order, at) for at in self.places))
        return (after & before) - self.places

    def names(self) -> list[str]:
        """The user's names of its virtual values, and of its products those of their lines."""
        inside = [v for v in self.nodes() if v.id in self.virtual]
        known = [source_name(v) if is_source(v, self.virtual) else v.origin.name for v in inside]
        return list(dict.fromkeys(name for name in known if name))

    # -------------------------------------------------------------- whether it may be one
    def obstacle(self) -> str:
        """The reason why its steps cannot be one group of kernels; "" where they can."""
        if (dtype := next((v.dtype for v in self.products if v.dtype not in DTYPES), None)) is not None:
            return f"{dtype} is multiplied by the library"
        return self.need_of_memory()

    def need_of_memory(self) -> str:
        """The reason why what is virtual has to be in memory as a whole; "" where it has not."""
        if (result := next((v for v in self.outputs() if v.id in self.virtual), None)) is not None:
            return f"{_name(result)} is returned or saved"
        inside = set[int]().union(*map(inside_of_pairs, self.pairs))
        if (written := next((v for v in self.outputs() if v.id in inside), None)) is not None:
            return f"{_name(written)}, which it sums, is in memory"
        calls = (s.value for s in self.members if isinstance(s, Extern) and s.value.prim != "dot")
        if called := [v for v in calls if v.id not in self.added]:
            return f"{_name(called[0])} reads it from memory"
        if (compared := self._compared()) is not None:
            return f"{_name(compared)} compares it with what is made of it, bit for bit"
        if between := self._between():
            return f"{_name(self.flow.work[min(between)].results[0])} comes between, and is no part of its kernels"
        return self._effects()

    def _compared(self) -> Value | None:
        """What compares floats that two kernels would make, each in its own order of additions.

        Not what is a row's extreme: the walk that finds that says so (`ties`).
        """
        nodes = self.nodes()
        made = {v.id for v in self.products}
        for value in nodes:
            made |= {value.id} if any(a.id in made for a in value.args) else set()
        compared = (v for v in nodes if v.prim in COMPARE and v.args[0].aval.is_float and not self._is_tie(v))
        return next((v for v in compared if all(a.id in made for a in v.args)), None)

    def _is_tie(self, value: Value) -> bool:
        tie = tie_of(value)
        return tie is not None and tie.x.id in self.virtual

    def _effects(self) -> str:
        """An effect between its first and its last step stays where it is."""
        span = self.flow.work[min(self.places) : max(self.places)]
        called = [s.value for s in span if isinstance(s, Extern) and PRIMS[s.value.prim].effect]
        effects = [v for v in called if not str(v.params.get("op")).startswith(UNSEEN)]
        return f"{_name(effects[0])} runs in between" if effects else ""

    # -------------------------------------------------------------- as one
    def group(self) -> Group:
        """All of it in one graph."""
        inputs, outputs = self.inputs(), self.outputs()
        graph = self.part(outputs, inputs).graph
        for spelled in SPELLINGS:
            graph = spelled(graph, virtual_values(graph, self.hints, bool(self.pairs)))
        return Group(graph, tuple(inputs), tuple(outputs), bool(self.pairs))

    def part(self, outputs: Sequence[Value], inputs: Sequence[Value], replacing: Replacements = NOTHING) -> Group:
        """What is between some values of it, as it stands; but for nodes that are replaced, by id."""
        name = next((s.graph.name for s in self.members if isinstance(s, Group)), self.flow.graph.name)
        layouts = _layouts(self.flow.work)
        strides = [layouts.get(v.id) or self._strides(v) for v in outputs]
        graph = extract(outputs, inputs, name=name, strides=strides, layouts=layouts, replacing=replacing)
        return Group(graph, tuple(inputs), tuple(outputs))

    def _strides(self, value: Value) -> tuple[Size, ...]:
        """The layout of what a product made until now."""
        returned = self.flow.graph.strides_of_output(value)
        return contiguous_strides(value.shape) if returned is None or 0 in returned else returned

    def replaced_by(self, *groups: Group) -> list[Step]:
        """The steps with groups in the place of its last one; what needs them comes behind."""
        last = self.flow.steps.index(self.flow.work[max(self.places)])
        needs = set().union(*(nx.descendants(self.flow.order, at) for at in self.places))
        late = [self.flow.work[at] for at in sorted(needs - self.places)]
        inside = self.members
        before = [s for s in self.flow.steps[:last] if s not in inside and s not in late]
        delayed = [s for s in self.flow.steps[:last] if s in late]
        return _views_in_order(self.flow.graph, [*before, *groups, *delayed, *self.flow.steps[last + 1 :]])


def _plain(graph: Graph, _: frozenset[int]) -> Graph:
    return plain_dots(graph)


SPELLINGS: tuple[Callable[[Graph, frozenset[int]], Graph], ...] = (
    without_ties, without_picks, without_picked_extremes, without_concatenations, without_transposes, one_sided,
    without_mirrors, _plain, split_sums, wide_row_sums,
)  # fmt: skip
"""What a region is read as, one after the other."""


def _views_in_order(graph: Graph, steps: Sequence[Step]) -> list[Step]:
    """The steps, each view that is still read where what it looks at is in memory."""
    views = {s.value.id: s for s in steps if isinstance(s, View)}
    made = {v.id for s in steps if not isinstance(s, View) for v in s.results}
    placed: set[int] = set()

    def needed(values: Iterable[Value]) -> Iterator[Step]:
        for value in values:
            if value.id in views and value.id not in made and value.id not in placed:
                yield from needed(value.args)
                placed.add(value.id)
                yield views[value.id]

    ordered: list[Step] = []
    for step in steps:
        if not isinstance(step, View):
            ordered += [*needed(step.reads), step]
    return [*ordered, *needed(graph.results)]


def _layouts(steps: Iterable[Step]) -> dict[int, tuple[Size, ...] | None]:
    """The strides of what groups compute."""
    groups = [s for s in steps if isinstance(s, Group)]
    return {v.id: s for g in groups for v, s in zip(g.outputs, g.graph.output_strides, strict=True)}


def _name(value: Value) -> str:
    return f"`{value.origin.name or value.params.get('op') or value.prim}`"
