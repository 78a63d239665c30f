"""A group's graph to kernels: as few as the rules allow, with a temporary wherever a value has to be complete first.

Each stage is built (axes), unified, scheduled and emitted, and on the way a step may ask for another division:

    Materialize(values)  they become stores of an earlier stage, and loads here
    Separate(sinks)      give them a kernel of their own

The symbols of a resident row are pinned: the stage is built again with their values.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations
from typing import Any

import sympy

from ..ir import Graph, Value
from ..ir.errors import Unfusible
from ..ir.graph import building, emit, provenance
from ..ir.loops.body import Body
from ..ir.passes.node_kinds import only_moves
from ..ir.passes.pieces import given_by_steps
from ..ir.passes.streaming.spellings.bins import with_bins
from ..ir.passes.virtual import virtual_values
from ..ir.prims import PRIMS
from ..ir.switches import is_on
from ..ir.text.source_names import variable_name
from ..ir.types import COMPLEX, FLOAT8, ITEMSIZE, LOW_FLOATS, Size, TensorType, contiguous_strides
from .emit import prelude, products
from .emit.emit import kernel_of
from .emit.loops.kernel import kernel_of_round_trip, kernels_of_loop
from .emit.mathematics import rules as elementwise_rules
from .emit.names import MOST, identifier
from .emit.streams.kernel import StreamPlan, kernel_of_stream, plan_of_stream
from .kernel import ENDS, MERGED, TOTALS, Buffer, Kernel, Kernels, Leaning, Pointer, Ref, Target
from .program.axes import Axis, Goal, Materialize, Memory, Part, Program, Sink, Term, terms_below
from .program.concatenations import parts_to_store
from .program.loops import STATE
from .program.short_axes import in_pieces
from .program.sinks import build_sinks
from .program.sizes import Hints, evaluate_size, symbols
from .program.terms import TermTable
from .program.unify import unify, with_nested_sums
from .rooflines import machine_of
from .scattered_steps import with_sums_of_steps
from .schedule.loops.division import divided_sums, sums_beside, too_many_late
from .schedule.loops.look_back import ends_of, late_stores
from .schedule.loops.roles import LoopProgram, by_loop, program_of, times_of
from .schedule.loops.round_trips import Planning, go_together
from .schedule.loops.together import time_of_registers, times_of_states, together
from .schedule.loops.whole import whole_schedule_of
from .schedule.quotients import Quotients
from .schedule.roles import nested_sums
from .schedule.schedule import schedule_of
from .schedule.streams.accumulators import accumulation_of
from .schedule.streams.bins import Binned, with_found, with_tiles
from .schedule.streams.lone_rows import with_lone_rows
from .schedule.streams.nothing import with_rows_of_nothing
from .schedule.streams.places import few_places, with_own_places
from .schedule.streams.prologues import Walked, with_prologues
from .schedule.streams.roles import Roles, joined_roles, require_own_extremes, roles_of, virtual_products
from .schedule.streams.splits import Split, parts_at, split_of, wanted_parts
from .schedule.workload import Separate, Workload
from .selected_sums import with_selected_sums
from .short_integers import in_short_integers
from .walks import Walks
from .whole import is_lighter, may_be_whole, moved_by, without_loops

FUSIBLE = frozenset(
    "input elementwise source layout reduce cumulative gather scatter random contract scan pick".split()
)
DEPTH = 120
"""Longest chain of values inside one kernel."""
PATIENCE = 16
"""Attempts at a division into kernels that each materialise one value more; those behind them materialise many."""
MOST_PAIRS = 16
"""Pairs of kernels that are tried as one; each is generated for it."""
ATOMIC = frozenset({"i32", "i64", "u32", "u64", "f32", "f64"})


def generate(
    graph: Graph, *, target: Target, hints: Mapping[sympy.Symbol, int], name: str, bounded: bool = False,
    small: bool = False, pairs: bool = False,
) -> Kernels:  # fmt: skip
    """The kernels that compute the outputs of `graph`, in launch order, and the temporaries between them.

    `hints`: the current value of every symbol; they choose blocks, never meaning. `bounded`: a row that stays in
    registers may have any length up to its block, by a guard, where else its length is compiled in. `small`: one kernel
    may hold all that is summed, where that is little; those for all sizes are beside it. `pairs`: sums over pairs are
    made tile by tile, as matmuls are that are never in memory. Raises Unfusible.
    """
    # argmax as simpler primitives: what may be fused is asked of those
    graph = with_sums_of_steps(graph, machine_of(target), hints)
    plain = given_by_steps(_expanded(graph, virtual_values(graph, hints, pairs)))
    for value in plain.order():
        _check_fusible(value)
    # sizes like C / 32 become integers before any arithmetic on indices
    quotients = Quotients.of(plain, hints)
    if quotients.whole:
        plain, hints = _substituted(plain, quotients.whole), quotients.hints(hints)
    # a product of matrices is one kernel or none; everything else is divided into as many as it takes
    label = identifier(name) or "kernel"
    walks = pairs or is_streamed(plain)
    if any(v.prim == "dot" for v in plain.order()) and not walks:
        return quotients.restored(products.kernels_of(with_selected_sums(plain), target, hints, label))
    plain = with_bins(plain, virtual_values(plain, hints), hints)
    divided = quotients.restored(_Group(plain, target, hints, label, bounded, pairs=pairs).kernels())
    whole = _whole(plain, divided, target, hints, label) if small else None
    return divided if whole is None else replace(quotients.restored(whole), divided=divided)


def _whole(graph: Graph, divided: Kernels, target: Target, hints: Hints, label: str) -> Kernels | None:
    """One kernel instead, where all of it is little, and it has fewer launches or moves fewer bytes."""
    if not is_on("whole_sums") or not may_be_whole(graph, divided.kernels, target, hints):
        return None
    steps, pins = without_loops(graph, hints)
    try:
        whole = _Group(steps, target, hints, label, bounded=True, whole=pins).kernels()
    except (Unfusible, Materialize, Separate):
        return None
    return whole if is_lighter(whole.kernels, divided.kernels, hints) else None


def module(kernels: Iterable[Kernel], header: str = "") -> str:
    """A self-contained Python module with the kernels and the helpers they use."""
    sources = [k.source for k in kernels]
    texts = [*prelude.helpers_in(sources), *sources]
    parts = ["\n".join(["import triton", "import triton.language as tl", *prelude.libraries_in(texts)]), *texts]
    body = "\n\n\n".join(p.strip("\n") for p in parts) + "\n"
    comment = "".join(f"# {line}".rstrip() + "\n" for line in header.splitlines())
    return f"{comment}\n{body}" if comment else body


def _check_fusible(value: Value) -> None:
    if value.prim == "scan":
        _check_steps(value)
        return
    if PRIMS[value.prim].family not in FUSIBLE:
        raise Unfusible(value, f"{value.prim} is not emitted")
    if value.dtype in COMPLEX or (value.dtype in FLOAT8 and not only_moves(value)):
        raise Unfusible(value, f"dtype {value.dtype} is not emitted")
    if PRIMS[value.prim].family == "elementwise" and value.prim != "cast" and value.prim not in elementwise_rules:
        raise Unfusible(value, f"{value.prim} has no rule")
    if value.prim == "scatter" and value.params["mode"] == "add" and value.dtype == "b1":
        raise Unfusible(value, "no atomic addition of booleans")


def _check_steps(scan: Value) -> None:
    """A step of a loop has no memory between its operations."""
    for value in scan.params["body"].graph.order():
        if value.prim in ("scan", "pick", "scatter"):
            raise Unfusible(scan, f"a step with {value.prim}")
        try:
            _check_fusible(value)
        except Unfusible as error:
            raise Unfusible(scan, error.reason) from None


def _above_products(graph: Graph, virtual: frozenset[int] = frozenset()) -> set[int]:
    """What a matrix product is below, or a virtual value, these themselves included."""
    above = set(virtual)
    for value in graph.order():
        if value.prim == "dot" or any(a.id in above for a in value.args):
            above.add(value.id)
    return above


def is_streamed(graph: Graph) -> bool:
    """A reduction reads a product of matrices, which need not be in memory then."""
    above = _above_products(graph)
    readers = [v for v in graph.order() if any(a.id in above for a in v.args)]
    return any(PRIMS[v.prim].family in ("reduce", "contract") for v in readers)


# ---------------------------------------------------------------------- before: fewer primitives
def _expanded(graph: Graph, virtual: frozenset[int]) -> Graph:
    """The live part of the graph, argmax and argmin spelled out: where(x == max, place, size), then the minimum.

    Sums over rows and columns of what is never in memory are sums of sums of rows.
    """
    out = Graph(graph.name)
    new = {v.id: out.input_like(v) for v in graph.inputs}
    with building(out):
        for value in graph.order():
            with provenance(value.origin):
                args = [new[a.id] for a in value.args]
                spelled = _expand_primitive(value, args[0]) if value.prim in ("argmax", "argmin") else None
                if value.prim in SPLIT and value.args[0].id in virtual:
                    spelled = _of_rows(value, args[0])
                new[value.id] = spelled or out.emit(value.prim, args, _expanded_params(value))
    outputs = [None if o is None else new[o.id] for o in graph.outputs]
    return out.returning(outputs, graph.output_strides)


def _expanded_params(value: Value) -> dict[str, Any]:
    return {
        k: Body(_expanded(p.graph, frozenset())) if isinstance(p, Body) else p for k, p in value.params.items()
    }  # fmt: skip


SPLIT = ("sum", "amax", "amin")


def _of_rows(value: Value, x: Value) -> Value | None:
    """A reduction of rows and columns as one of the columns, then of the rows; None where it keeps one of both."""
    axes, last = value.params["axes"], x.ndim - 1
    if not {last - 1, last} <= set(axes):
        return None
    return emit(value.prim, emit(value.prim, x, axes=(last,)), axes=tuple(a for a in axes if a != last))


def _expand_primitive(value: Value, x: Value) -> Value:
    axis = value.params["axis"]
    axes = tuple(d for d in range(x.ndim) if d != axis)
    top = emit("amax" if value.prim == "argmax" else "amin", x, axes=(axis,))
    hit = emit("eq", x, emit("broadcast", top, shape=x.shape, axes=axes))
    if x.aval.is_float:
        hit = emit("or", hit, emit("isnan", x))
    position = emit("broadcast", emit("iota", size=x.shape[axis], dtype="i64"), shape=x.shape, axes=(axis,))
    sentinel = emit("full", value=x.shape[axis], shape=x.shape, dtype="i64")
    return emit("amin", emit("where", hit, position, sentinel), axes=(axis,))


def _substituted(graph: Graph, pins: Mapping[sympy.Symbol, Size]) -> Graph:
    """The same graph, node for node, with symbols replaced by numbers, or by other sizes."""
    out = Graph(graph.name)
    for node, attrs in graph.nx.nodes(data=True):
        params = {k: _substitute_param(v, pins) for k, v in attrs["params"].items()}
        avals = tuple(TensorType(_substitute_param(a.shape, pins), a.dtype) for a in attrs["avals"])
        out.nx.add_node(node, **{**attrs, "params": params, "avals": avals})
    out.nx.add_edges_from(graph.nx.edges(keys=True))
    out.inputs = [Value(out, v.id) for v in graph.inputs]
    outputs = [None if o is None else Value(out, o.id) for o in graph.outputs]
    return out.returning(outputs, [_substitute_param(s, pins) for s in graph.output_strides])


def _substitute_param(param: Any, pins: Mapping[sympy.Symbol, Size]) -> Any:
    if isinstance(param, tuple):
        return tuple(_substitute_param(p, pins) for p in param)
    if isinstance(param, Body):
        return Body(_substituted(param.graph, pins))
    if not isinstance(param, sympy.Basic) or not param.free_symbols & pins.keys():
        return param
    replaced = param.subs(dict(pins))
    return int(replaced) if replaced.is_Integer else replaced


# ---------------------------------------------------------------------- the search for kernels
def _add_goals(goals: dict[int, list[Goal]], whole: Goal, ready: Mapping[int, int], stage: int) -> None:
    """A value in its stage; of a concatenation of many, each piece in the stage in which it is computed."""
    parts = parts_to_store(whole.node) if ready else []
    for piece, part in parts:
        goals[ready[piece.id]].append(replace(whole, part=part, piece=piece))
    if not parts:
        goals[stage].append(whole)


def _buffers(kernel: Kernel, moved: Container[str]) -> set[Ref]:
    """What a kernel reads, or what it writes, but for its scratch: memory of its own, numbered for each kernel anew."""
    pointers = (a for a in kernel.arguments if isinstance(a, Pointer) and a.name in moved)
    return {p.buffer for p in pointers if p.buffer.kind != "scratch"}


@dataclass(frozen=True)
class _Made:
    """Goals, and the kernels that compute them. first: those of a loop that the same kernel takes before these.

    private: memory between the two that nothing else reads.
    """

    goals: tuple[Goal, ...]
    kernels: tuple[Kernel, ...]
    label: str
    first: tuple[Goal, ...] = ()
    private: frozenset[Ref] = frozenset()

    @cached_property
    def stored(self) -> frozenset[Ref]:
        return self._memory([k.writes for k in self.kernels])

    @cached_property
    def loaded(self) -> frozenset[Ref]:
        return self._memory([{**k.reads, **k.cached} for k in self.kernels])

    @property
    def is_one_walk(self) -> bool:
        """One kernel, each of whose programs has all of its rows' stream."""
        walk = self.kernels[0].walk if len(self.kernels) == 1 else None
        return walk is not None and not walk.keeps_stream

    def walks_as(self, other: _Made) -> bool:
        """With the same tiles: what one of two kernels makes besides leaves the other the registers that it had."""
        walks = [m.kernels[0].walk for m in (self, other) if m.is_one_walk]
        return len({w.blocks for w in walks if w is not None}) == 1 and len(walks) == 2

    def _memory(self, moved: Sequence[Mapping[str, Size]]) -> frozenset[Ref]:
        """What kernels share. Scratch is a kernel's own."""
        pointers = ((a, m) for k, m in zip(self.kernels, moved, strict=True) for a in k.arguments)
        found = (a.buffer for a, m in pointers if isinstance(a, Pointer) and a.name in m)
        return frozenset(ref for ref in found if ref.kind != "scratch")

    def goes_by_step_with(self, other: _Made) -> bool:
        """Neither takes time in chunks, nor do both of them many steps at once."""
        heads = [m.kernels[0] for m in (self, other)]
        at_once = [k.course is not None and k.course.block > 1 for k in heads]
        return all(k.splits == 1 for k in heads) and not all(at_once)


class _Group:
    """One graph on its way to kernels. Values `cut` (ids) are materialised, those `alone` by a kernel of their own.

    whole: one kernel holds all that is summed, at these sizes of loops that are written out; None: as many as needed.
    """

    def __init__(
        self, graph: Graph, target: Target, hints: Hints, name: str, bounded: bool,
        whole: dict[sympy.Symbol, int] | None = None, pairs: bool = False,
    ) -> None:  # fmt: skip
        self.graph, self.target, self.hints, self.name, self.bounded = graph, target, hints, name, bounded
        self.whole = whole
        self.order = graph.order()
        self.empty = self._empty()
        self.virtual = virtual_values(graph, hints, pairs)
        self.streamed = _above_products(graph, self.virtual)
        self.cut: dict[int, None] = {}
        self.alone: set[int] = set()
        self.hasty = False
        self.known: dict[Any, tuple[Kernel, ...] | list[list[Goal]]] = {}
        self.loops: set[str] = set()
        self.temporaries: list[Buffer] = []
        self.pinned_graphs: dict[frozenset[tuple[sympy.Symbol, int]], Graph] = {}
        self._cut_deep()

    def _empty(self) -> dict[sympy.Symbol, int]:
        """Symbols that make a size zero: they are compiled in."""
        types = (t for v in (*self.graph.inputs, *self.order) for t in v.avals)
        sizes = {n for t in types for n in t.shape if not isinstance(n, int)}
        zeros = symbols(n for n in sizes if evaluate_size(n, self.hints) == 0)
        return {s: int(self.hints[s]) for s in sorted(zeros, key=str)}

    def _cut_deep(self) -> None:
        depth: dict[int, int] = {}
        for v in self.order:
            if v.prim == "scatter":
                self.cut[v.id] = None
            depth[v.id] = max((0 if a.id in self.cut else depth.get(a.id, 0) + 1 for a in v.args), default=0)
            if depth[v.id] >= DEPTH:
                self.cut[v.id] = None

    def kernels(self) -> Kernels:
        """Build; wherever a kernel asks for a cut, materialise and build again."""
        if self.whole is not None:
            return self._attempt()
        for attempt in range(4 * len(self.order) + 8):
            self.hasty = attempt >= PATIENCE
            try:
                return self._attempt()
            except Materialize as request:
                self._materialize(request)
        raise Unfusible(self.order[-1], "no division into kernels was found")

    def _materialize(self, request: Materialize) -> None:
        for node in (*request.nodes, *request.otherwise):
            if node.id in self.virtual:
                raise Unfusible(node, "a product of it would have to be in memory")
        for nodes in (self._in_parts(request.nodes), request.otherwise, request.nodes):
            new = [n.id for n in nodes if n.id not in self.cut and n.prim != "input"]
            if new:
                self.cut.update(dict.fromkeys(new))
                return
        isolated = {n.id for n in request.nodes} - self.alone
        if not isolated:
            node = request.nodes[0] if request.nodes else self.order[-1]
            raise Unfusible(node, "it cannot be computed by one kernel")
        self.alone |= isolated

    def _in_parts(self, nodes: Sequence[Value]) -> list[Value]:
        """Parts in the place of what only parts are read of."""
        walks, results = Walks.of(self.order, self.virtual, self.cut), set(self.graph.results)
        return [part for v in nodes for part in walks.parts_read(v, results) or [v]]

    # ------------------------------------------------------------------ memory
    def _memory(self) -> tuple[dict[int, Memory], list[Buffer]]:
        """Where cut values live: the output that returns them, or a temporary."""
        memory: dict[int, Memory] = {}
        temporaries: list[Buffer] = []
        for position, (value, strides) in enumerate(zip(self.graph.outputs, self.graph.output_strides, strict=True)):
            if value is not None and value.id in self.cut and self._holds_accumulation(value) and strides is not None:
                memory.setdefault(value.id, Memory(Ref("output", position), strides, value.dtype))
        for v in self.order:
            if v.id in self.cut and v.id not in memory:
                buffer = self._temporary(v, len(temporaries))
                memory[v.id] = Memory(Ref("temporary", len(temporaries)), buffer.strides, buffer.dtype)
                temporaries.append(buffer)
        return memory, temporaries

    def _holds_accumulation(self, value: Value) -> bool:
        """The output's own dtype can hold what is accumulated into it."""
        return not (value.prim == "scatter" and value.params["mode"] == "add") or value.dtype in ATOMIC

    def _temporary(self, value: Value, number: int) -> Buffer:
        dtype = value.dtype
        if not self._holds_accumulation(value):
            dtype = "f32" if dtype in LOW_FLOATS else "i32"
        label = identifier(variable_name(value)) or value.prim
        return Buffer(f"{label}_{number}", dtype, value.shape, contiguous_strides(value.shape))

    # ------------------------------------------------------------------ stages
    def _goals(self, memory: Mapping[int, Memory]) -> list[list[Goal]]:
        """The stores of each stage: a value's stage is above those of the cut values that it reads."""
        walks, stages, ready = self._stages()
        goals: defaultdict[int, list[Goal]] = defaultdict(list)
        for v in self.order:
            if v.prim == "scatter":
                # a scatter adds to a copy of its first operand, which an earlier kernel has to have written
                goals[ready[v.args[0].id]].append(Goal(v.args[0], memory[v.id]))
                goals[stages[v.id]].append(Goal(v, memory[v.id], scatter=True))
            elif v.id in self.cut:
                _add_goals(goals, walks.in_whole(Goal(v, memory[v.id])), ready, stages[v.id])
        late = max((ready[v.id] for v in self.graph.results if v.id in self.streamed), default=0)
        for position, (value, strides) in enumerate(zip(self.graph.outputs, self.graph.output_strides, strict=True)):
            if value is None or strides is None:
                continue
            ref = Ref("output", position)
            if value.id not in memory or memory[value.id].ref != ref:
                # what walks a stream waits for others that do: they may share a kernel, above all with what it reads
                stage = late if value.id in self.streamed else ready[value.id]
                stage = walks.stages.get(value.id, stage)
                goal, is_loaded = Goal(value, Memory(ref, strides, value.dtype)), value.id in memory
                goal = goal if is_loaded else walks.in_whole(goal)
                _add_goals(goals, goal, {} if is_loaded else ready, stage)
        stages_of = [[g for g in goals[s] if not self._is_empty(g.node)] for s in sorted(goals)]
        return [part for part in stages_of if part]

    def _stages(self) -> tuple[Walks, dict[int, int], dict[int, int]]:
        """What ends walks; the stage of each value; and the one in which each value may be read.

        What ends walks waits for the last of its kind, with which it may share a kernel.
        """
        walks = Walks.of(self.order, self.virtual, self.cut)
        stages, ready, beside = self._stages_with({}, walks.ends)
        stored = {*self.cut, *(v.id for v in self.graph.results)} & walks.ends
        late = max((stages[i] for i in stored), default=0)
        if late:
            stages, ready, beside = self._stages_with(dict.fromkeys(stored, late), walks.ends)
        # of two that wait, one may read a sum of the other: that is not made before both
        walks.stages = {i: max(late, beside[i]) for i in stored}
        return walks, stages, ready

    def _stages_with(
        self, late: Mapping[int, int], ends: Container[int]
    ) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
        """The same with some values in stages that are not begun before a given one; and the stages in which values
        may be made that another one is read beside. The place of an extreme is made beside the extreme.
        """
        stages: dict[int, int] = {}
        ready: dict[int, int] = {v.id: 0 for v in self.graph.inputs}
        beside = dict(ready)  # the same, where what walks a stream may be made beside what it is relative to
        for v in self.order:
            stage = max((ready[a.id] for a in v.args), default=0)
            near = max((beside[a.id] for a in v.args), default=0)
            if v.prim == "scatter":
                stage = max(stage, ready[v.args[0].id] + 1)
            is_late_sum = v.id not in ends and self._sums_rows(v)
            if v.id in self.cut and v.id in self.streamed and not is_late_sum and v.prim != "scatter":
                stage = near = max(near, late.get(v.id, near))
            stages[v.id] = near if v.id in ends and not v.aval.is_float else stage
            ready[v.id] = stage + 1 if v.id in self.cut else stage
            beside[v.id] = near if v.id in self.streamed and not is_late_sum else ready[v.id]
        return stages, ready, beside

    def _sums_rows(self, value: Value) -> bool:
        """A reduction of what walks have summed: no walk makes it beside these."""
        is_sum = PRIMS[value.prim].family in ("reduce", "contract")
        return is_sum and bool(self.virtual) and not any(a.id in self.virtual for a in value.args)

    def _is_empty(self, value: Value) -> bool:
        return any(_substitute_param(n, self.empty) == 0 for n in value.shape)

    def _attempt(self) -> Kernels:
        memory, self.temporaries = self._memory()
        made: list[_Made] = []
        for goals in self._goals(memory):
            for part in self._in_order(self._parts(goals)):
                made += self._stage(part, memory, sum(len(m.kernels) for m in made))
        made = self._with_rows_together(self._with_round_trips(made), memory)
        made = self._with_prologues(made, memory)
        kernels = [k for m in made for k in m.kernels]
        self._check_stored(kernels)
        self._check_order(kernels)
        if len({_stem_and_end(k.name)[0] for k in kernels}) == 1:
            kernels = [_with_name(k, self.name + _stem_and_end(k.name)[1]) for k in kernels]
        return Kernels(tuple(kernels), tuple(self.temporaries), {} if kernels else dict(self.empty))

    def _check_stored(self, kernels: Sequence[Kernel]) -> None:
        """Kernels write as many places of each result as it has, at the current sizes. Raises Unfusible."""
        written: defaultdict[Ref, int] = defaultdict(int)
        for kernel in kernels:
            for pointer in (a for a in kernel.arguments if isinstance(a, Pointer)):
                written[pointer.buffer] += evaluate_size(kernel.writes.get(pointer.name, 0), self.hints)
        for position, (value, strides) in enumerate(zip(self.graph.outputs, self.graph.output_strides, strict=True)):
            if value is None or strides is None:
                continue
            places = math.prod(evaluate_size(n, self.hints) for n in value.shape)
            if written[Ref("output", position)] < places * ITEMSIZE[value.dtype]:
                raise Unfusible(value, "kernels were found that do not store all of it: please report this")

    def _check_order(self, kernels: Sequence[Kernel]) -> None:
        """No kernel reads what only a later one writes, nor, but for walks and loops, what only it writes itself:
        beside its scratch, where its programs leave partial sums for the last. Raises Unfusible."""
        written = [_buffers(k, k.writes) for k in kernels]
        for at, kernel in enumerate(kernels):
            read = _buffers(kernel, kernel.reads)
            reads_own = kernel.walk is not None or kernel.course is not None
            there = set().union(*written[: at + 1 if reads_own else at])
            if read & set().union(*written[at:]) - there:
                raise Unfusible(self.order[-1], "kernels were found that read what is not there: please report this")

    def _parts(self, goals: Sequence[Goal]) -> list[list[Goal]]:
        """Goals that may share a kernel; scatters and values in `alone` get their own."""
        single = [g for g in goals if g.scatter or g.node.id in self.alone]
        together = [g for g in goals if not (g.scatter or g.node.id in self.alone)]
        return [*([together] if together else []), *([g] for g in single)]

    # ------------------------------------------------------------------ one stage
    def _stage(self, goals: Sequence[Goal], memory: Mapping[int, Memory], number: int) -> list[_Made]:
        todo = [list(goals)]
        made: list[_Made] = []
        while todo:
            part = todo.pop(0)
            label = f"{self.name}_{number + sum(len(m.kernels) for m in made)}"
            kernel = self._kernel_once(part, memory, label)
            if isinstance(kernel, tuple):
                made.append(_Made(tuple(part), kernel, label))
            else:
                todo[:0] = self._in_order(kernel)
        return made

    # ------------------------------------------------------------------ a maximum, and a sum relative to it
    def _with_rows_together(self, made: list[_Made], memory: Mapping[int, Memory]) -> list[_Made]:
        """A kernel with one that reads what it reduces, and what it reads: where that is complete in the program.

        It was materialised for a third one, which is no reason to read all of it again.
        """
        tried = set[tuple[str, str]]()
        for _ in range(MOST_PAIRS):
            pair = next((p for p in self._pairs_of_rows(made) if (p[0].label, p[1].label) not in tried), None)
            if pair is None:
                break
            one, two = pair
            tried.add((one.label, two.label))
            both = self._rows_joined(one, two, memory)
            made = [both if m is two else m for m in made if m is not one] if both is not None else made
        return made

    def _pairs_of_rows(self, made: Sequence[_Made]) -> Iterator[tuple[_Made, _Made]]:
        plain = [m for m in made if m.label not in self.loops and not m.first and self._is_of_rows(m)]
        for one, two in combinations(plain, 2):
            between = made[made.index(one) + 1 : made.index(two)]
            handed, shared = one.stored & two.loaded, one.loaded & two.loaded
            if handed and shared and not any(one.stored & m.loaded for m in between):
                yield one, two

    def _is_of_rows(self, made: _Made) -> bool:
        nodes = [g.node for g in made.goals]
        plain = not any(g.scatter or g.part is not None or g.node.id in self.streamed for g in made.goals)
        return plain and len(made.kernels) == 1 and any(PRIMS[v.prim].family == "reduce" for v in nodes)

    def _rows_joined(self, one: _Made, two: _Made, memory: Mapping[int, Memory]) -> _Made | None:
        """None where a program does not have what the second reads, or where all of it moves no fewer bytes."""
        goals = [*one.goals, *two.goals]
        made = {g.node.id for g in goals}  # either may have been joined before: its goals read each other
        read = {i: m for i, m in memory.items() if i not in made}
        try:
            kernels = self._kernel(goals, read, self.empty, two.label)
        except (Unfusible, Materialize):
            return None
        both = _Made(tuple(goals), kernels, two.label) if isinstance(kernels, tuple) else None
        return both if both is not None and self._is_better(both, one, two) else None

    def _kernel_once(
        self, goals: list[Goal], memory: Mapping[int, Memory], label: str
    ) -> tuple[Kernel, ...] | list[list[Goal]]:
        """What an attempt before has made of these goals, where it read the same memory; loops and streams are asked
        each time: they have temporaries of their own."""
        below = None if self.virtual else self._memory_below(goals, memory)
        if below is None:
            return self._kernel(goals, memory, self.empty, label)
        key = (tuple(goals), label, below)
        if key not in self.known:
            self.known[key] = self._kernel(goals, memory, self.empty, label)
        return self.known[key]

    def _memory_below(
        self, goals: Sequence[Goal], memory: Mapping[int, Memory]
    ) -> tuple[tuple[int, Memory], ...] | None:
        """The memory of goals and of what is made of for them; None where a loop is."""
        todo = [v for g in goals for v in (g.node, g.piece, g.whole) if v is not None]
        found = {v.id: memory[v.id] for v in todo if v.id in memory}
        todo, seen = [a for v in todo for a in (v, *v.args)], set[int]()
        while todo:
            node = todo.pop()
            if node.id in seen:
                continue
            seen.add(node.id)
            if node.prim == "scan":
                return None
            if node.id in memory:
                found[node.id] = memory[node.id]
            else:
                todo += node.args
        return tuple(found.items())

    # ------------------------------------------------------------------ numbers of rows, and a walk that reads them
    def _with_prologues(self, made: list[_Made], memory: Mapping[int, Memory]) -> list[_Made]:
        """Row sums made by a walk that reads them, which stores them for those behind it: a launch less.

        Those that another walk makes are found in a pass before its own.
        """
        if not self.virtual or not is_on("prologues"):
            return made
        for one in [m for m in made if self._is_of_rows(m) or m.is_one_walk]:
            # one that has taken another's row sums has given way to both
            made = next(self._with_prologue(made, one, memory), made) if one in made else made
        return made

    def _with_prologue(self, made: list[_Made], one: _Made, memory: Mapping[int, Memory]) -> Iterator[list[_Made]]:
        """The kernels with the row sums of `one` in each walk that may have them."""
        for two in made[made.index(one) + 1 :]:
            place = _place_of_both(made, one, two) if one.stored & two.loaded and two.is_one_walk else None
            both = None if place is None else self._prologue_joined(one, two, memory)
            if both is not None:
                yield [both if m is place else m for m in made if m is place or m not in (one, two)]

    def _prologue_joined(self, one: _Made, two: _Made, memory: Mapping[int, Memory]) -> _Made | None:
        """None where the walk's programs do not own these rows, where it has other tiles then, or all moves more."""
        goals, before = [*one.goals, *two.goals], list(self.temporaries)
        try:
            kernels = self._kernel(goals, memory, self.empty, two.label)
        except (Unfusible, Materialize):
            kernels = []
        both = _Made(tuple(goals), kernels, two.label) if isinstance(kernels, tuple) else None
        if both is not None and both.walks_as(two) and self._is_better(both, one, two):
            return both
        self.temporaries = before
        return None

    # ------------------------------------------------------------------ two loops in one kernel
    def _with_round_trips(self, made: list[_Made]) -> list[_Made]:
        """Loops over the same lanes in one kernel, where that moves no more bytes."""
        tried = set[tuple[str, str]]()
        while pair := next((p for p in self._pairs_of_loops(made) if (p[0].label, p[1].label) not in tried), None):
            tried.add((pair[0].label, pair[1].label))
            made = self._joined(made, *pair) or made
        return made

    def _pairs_of_loops(self, made: Sequence[_Made]) -> Iterator[tuple[_Made, _Made]]:
        """A loop, and one behind it: what reads the steps of the first comes later than both."""
        loops = [m for m in made if m.label in self.loops and not m.first]
        for one, two in combinations(loops, 2):
            between = made[made.index(one) + 1 : made.index(two)]
            if one.goes_by_step_with(two) and not any(one.stored & m.loaded for m in between):
                yield one, two

    def _joined(self, made: Sequence[_Made], one: _Made, two: _Made) -> list[_Made] | None:
        """All is made again, as temporaries are numbered as they come; None where nothing is gained."""
        private = (one.stored & two.loaded).difference(*(m.loaded | m.stored for m in made if m not in (one, two)))
        both = replace(two, first=one.goals, private=private)
        before = self.temporaries
        memory, self.temporaries = self._memory()
        again = [self._made(both if m is two else m, memory) for m in made if m is not one]
        trip = next((m for m in again if m is not None and m.label == two.label), None)
        if trip is None or None in again or not self._is_better(trip, one, two):
            self.temporaries = before
            return None
        return [m for m in again if m is not None]

    def _made(self, part: _Made, memory: Mapping[int, Memory]) -> _Made | None:
        goals, pins, label = list(part.goals), self.empty, part.label
        alone = not part.first
        kernels = self._kernel(goals, memory, pins, label) if alone else self._round_trip(part, goals, memory, pins)
        return replace(part, kernels=kernels) if isinstance(kernels, tuple) else None

    def _is_better(self, trip: _Made, one: _Made, two: _Made) -> bool:
        """It moves no more, and leaves no more of the device idle."""
        programs = [evaluate_size(m.kernels[0].grid, self.hints) for m in (trip, one, two)]
        moved = [moved_by(m.kernels, self.hints) for m in (trip, one, two)]
        return moved[0] <= moved[1] + moved[2] and programs[0] >= min(self.target.units, *programs[1:])

    def _round_trip(
        self, part: _Made, goals: list[Goal], memory: Mapping[int, Memory], pins: dict[sympy.Symbol, int]
    ) -> tuple[Kernel, ...] | None:
        """The kernel of two loops, and what merges its parts; None where they do not go together."""
        try:
            found = self._two_loops([*part.first, *goals], len(part.first), memory, pins)
            if found is None:
                return None
            terms, loops = found
            if free := symbols(a.size for p in loops for a in p.whole):
                pinned = {**pins, **{s: int(self.hints[s]) for s in sorted(free, key=str)}}
                return self._round_trip(part, goals, memory, pinned)
            made = self._there_and_back(terms, *loops, part.private, part.label)
            return tuple(replace(k, pinned=pins) for k in made)
        except (Unfusible, Materialize):
            return None

    def _two_loops(
        self, goals: list[Goal], count: int, memory: Mapping[int, Memory], pins: dict[sympy.Symbol, int]
    ) -> tuple[TermTable, tuple[LoopProgram, LoopProgram]] | None:
        """The programs of the loop of the first so many goals, and of that of the others, over the same axes."""
        graph, terms = self._with_pins(pins), TermTable()
        read = {k: _pinned(m, pins) for k, m in memory.items()}
        sinks = unify(terms, build_sinks(terms, read, [_pinned_goal(g, graph, pins) for g in goals]))
        sinks = together(terms, sinks)
        times = times_of_states(sinks)
        stores = [s for s in sinks if s.goal >= 0]
        walked = [{times_of(s, times) for s in stores if (s.goal < count) is side} for side in (True, False)]
        own, other = (set[Axis]().union(*of) for of in walked)
        if own & other or any(len(of - {frozenset()}) != 1 for of in walked):
            return None
        is_first = [s.goal < count if s.goal >= 0 else time_of_registers(s, times) in own for s in sinks]
        sides = [[s for s, is_own in zip(sinks, is_first, strict=True) if is_own is side] for side in (True, False)]
        return terms, (program_of(terms, sides[0]), program_of(terms, sides[1]))

    def _there_and_back(
        self, terms: TermTable, first: LoopProgram, second: LoopProgram, private: frozenset[Ref], label: str
    ) -> tuple[Kernel, ...]:
        """Raises Unfusible where the two do not go together."""
        second, merging = self._with_divided_sums(terms, second, label)
        self._check_round_trip(terms, first, second)
        planning = Planning(terms, first, second, private, self.target, self.hints)
        trip = planning.trip(len(self.temporaries))
        if trip.blocks is not None:
            self.temporaries += trip.blocks.buffers
            for ref, shape in trip.blocks.shapes.items():
                self.temporaries[ref.index] = replace(self.temporaries[ref.index], shape=shape)
        return (kernel_of_round_trip(trip, planning, label), *merging)

    def _check_round_trip(self, terms: TermTable, first: LoopProgram, second: LoopProgram) -> None:
        is_late = any(too_many_late(Workload(p, self.target, self.hints), p) for p in (first, second))
        is_shared = divided_sums(terms, first, self.target, self.hints, 0) is not None
        if is_late or is_shared or not go_together(first, second):
            raise Unfusible(first.states[0].update.node, "another loop has other lanes")

    def _in_order(self, parts: Sequence[Sequence[Goal]]) -> list[list[Goal]]:
        """Each part behind those that make what it reads; one that is on both sides of another is divided."""
        if len(parts) == 1:
            return [list(goals) for goals in parts]
        # pieces of one concatenation may be in several
        parts_of: defaultdict[int, dict[int, None]] = defaultdict(dict)
        for n, goal in ((n, goal) for n, goals in enumerate(parts) for goal in goals):
            parts_of[goal.node.id][n] = None
        level: dict[tuple[int, int], int] = {}
        below: dict[int, dict[int, int]] = {}
        for v in self.order:
            reached: dict[int, int] = {}
            for p, n in (pair for a in v.args for pair in below.get(a.id, {}).items()):
                reached[p] = max(n, reached.get(p, 0))
            mine = parts_of.get(v.id, ())
            own = {part: max((n + (p != part) for p, n in reached.items()), default=0) for part in mine}
            level |= {(v.id, part): n for part, n in own.items()}
            below[v.id] = reached | own
        divided: defaultdict[tuple[int, int], list[Goal]] = defaultdict(list)
        for n, goal in ((n, goal) for n, goals in enumerate(parts) for goal in goals):
            divided[level.get((goal.node.id, n), 0), n].append(goal)
        return [divided[key] for key in sorted(divided)]

    def _with_pins(self, pins: Mapping[sympy.Symbol, int]) -> Graph:
        """The graph with these sizes compiled in, one for all kernels that have the same."""
        key = frozenset(pins.items())
        if key not in self.pinned_graphs:
            self.pinned_graphs[key] = _substituted(self.graph, pins) if pins else self.graph
        return self.pinned_graphs[key]

    # ------------------------------------------------------------------ one kernel
    def _kernel(
        self, goals: list[Goal], memory: Mapping[int, Memory], pins: dict[sympy.Symbol, int], label: str
    ) -> tuple[Kernel, ...] | list[list[Goal]]:
        """The kernel of the goals, and what merges its parts; or goals that have to be kernels of their own."""
        graph = self._with_pins(pins)
        # axes and terms first: what cannot be indexed asks for a temporary before anything is decided
        own = [_pinned_goal(g, graph, pins) for g in goals]
        terms = TermTable()
        made = {g.node.id for g in goals} | {g.whole.id for g in goals if g.whole is not None}
        mine = self.streamed & made  # also for one another
        read = {k: _pinned(m, pins) for k, m in memory.items() if k not in mine}
        sinks = unify(terms, build_sinks(terms, read, own, shared=self.whole is not None, hasty=self.hasty))
        if any(s.ref.kind == STATE for s in sinks):
            return self._looped(goals, memory, pins, terms, sinks, label)
        if any(virtual_products(terms_below(s.terms), self.virtual) for s in sinks):
            return self._streamed(goals, memory, pins, terms, with_lone_rows(terms, sinks, self.virtual), label)
        if is_on("row_parts"):
            sinks = in_pieces(terms, sinks)
        sinks, numbers = in_short_integers(terms, sinks, self.hints)
        guards = tuple(sympy.Le(n, MOST) for n in numbers)
        if self.whole is not None:
            workload = Workload(Program(sinks), self.target, self.hints)
            kernel = kernel_of(workload.program, whole_schedule_of(workload), self.target, self.hints, label)
            return (replace(kernel, pinned=self.whole, guards=kernel.guards + guards),)
        # after axes have been unified: only then is it seen which sinks walk the same space
        groups = _by_nested_axes(sinks)
        if len(groups) > 1:
            return [[goals[at] for at in sorted({s.goal for s in group})] for group in groups]
        workload = self._workload(terms, sinks, self.target)
        try:
            plan = schedule_of(workload)
        except Separate as request:
            apart = {s.goal for s in request.sinks}
            return [[g for at, g in enumerate(goals) if (at in apart) is side] for side in (False, True)]
        # a row that stays in registers has a constant length: build again with the values of its symbols
        free = symbols(a.size for a in plan.pinned)
        if free and not self.bounded:
            pinned = {**pins, **{s: int(self.hints[s]) for s in sorted(free, key=str)}}
            return self._kernel(goals, memory, pinned, label)
        kernel = kernel_of(workload.program, plan, self.target, self.hints, label)
        return (replace(kernel, pinned=pins, guards=kernel.guards + guards),)

    def _workload(self, terms: TermTable, sinks: Sequence[Sink], target: Target) -> Workload:
        """A sum over rows and columns takes over the sum over columns, where the schedule would have both."""
        workload = Workload(Program(sinks), target, self.hints)
        if is_on("nested_sums") and (nested := nested_sums(workload)):
            workload = Workload(Program(with_nested_sums(terms, sinks, nested)), target, self.hints)
        return workload

    def _looped(
        self, goals: list[Goal], memory: Mapping[int, Memory], pins: dict[sympy.Symbol, int], terms: TermTable,
        sinks: list[Sink], label: str,
    ) -> tuple[Kernel, ...] | list[list[Goal]]:  # fmt: skip
        """A kernel that goes through time, or the goals in parts: those of one loop share a kernel."""
        sinks = together(terms, sinks)
        loops = by_loop(sinks, times_of_states(sinks))
        if len(loops) > 1:
            # what is put together of several loops is, once its parts are in memory
            several = [g for at, g in enumerate(goals) if sum(at in own for own in loops) > 1]
            if several:
                raise Materialize([v for g in several for v in g.node.args])
            return [[g for at, g in enumerate(goals) if at in own] for own in loops]
        program: LoopProgram | None = None
        try:
            program = program_of(terms, sinks)
            return self._loop(program, goals, memory, pins, terms, label)
        except Unfusible as error:
            if program is not None and program.whole != program.whole_in_steps:
                self._apart(ends_of(program.after))
            # of a step: what is called instead is the loop
            raise Unfusible(next(v for v in self.order if v.prim == "scan"), error.reason) from error

    def _with_divided_sums(
        self, terms: TermTable, program: LoopProgram, label: str
    ) -> tuple[LoopProgram, Sequence[Kernel]]:
        """The loop whose sums programs share, and the kernels that add these up; as it is, and none, where none can."""
        divided = divided_sums(terms, program, self.target, self.hints, len(self.temporaries))
        merging = [] if divided is None else self._merged(terms, divided.merged, f"{label}{MERGED}")
        if divided is None or not merging:
            return program, []
        self.temporaries += divided.buffers
        return divided.program, merging

    def _loop(
        self, program: LoopProgram, goals: list[Goal], memory: Mapping[int, Memory], pins: dict[sympy.Symbol, int],
        terms: TermTable, label: str,
    ) -> tuple[Kernel, ...] | list[list[Goal]]:  # fmt: skip
        """The kernels of one loop, again where sizes have to be compiled in."""
        # what a step reduces along is in the tile from end to end: build again with the values of its symbols
        if free := symbols(a.size for a in program.whole | program.depths):
            pinned = {**pins, **{s: int(self.hints[s]) for s in sorted(free, key=str)}}
            return self._kernel(goals, memory, pinned, label)
        self.loops.add(label)
        program, merging = self._with_divided_sums(terms, program, label)
        if not merging and too_many_late(Workload(program, self.target, self.hints), program):
            self._apart(ends_of(program.after))
            if beside := sums_beside(program):
                return [[g for at, g in enumerate(goals) if (at in beside) is side] for side in (False, True)]
        first = len(self.temporaries)
        made = kernels_of_loop(terms, program, self.target, self.hints, label, first)
        totals = self._merged(terms, made.merged, f"{label}{TOTALS}")
        if made.merged and not totals:
            self._apart(ends_of(late_stores(program)))
            why = "what chunks add up would need several kernels"
            made = kernels_of_loop(terms, program, self.target, self.hints, label, first, why)
        self.temporaries += made.buffers
        return tuple(replace(k, pinned=pins) for k in (*made.kernels, *totals, *merging))

    def _apart(self, ends: Sequence[Value]) -> None:
        """What a loop ends with goes to memory, where it does not yet. Raises Materialize."""
        if new := [v for v in ends if v.id not in self.cut]:
            raise Materialize(new)

    def _streamed(
        self, goals: list[Goal], memory: Mapping[int, Memory], pins: dict[sympy.Symbol, int], terms: TermTable,
        sinks: Sequence[Sink], label: str,
    ) -> tuple[Kernel, ...] | list[list[Goal]]:  # fmt: skip
        """The kernels that walk a stream, or the goals in parts: those of one walk share a kernel."""
        walks: Walked = defaultdict(list)
        sinks, binned = with_tiles(terms, with_own_places(terms, sinks, self.virtual), self.virtual)
        for sink in sinks:
            products = virtual_products(terms_below(sink.terms), self.virtual)
            roles = roles_of(sink, products, self.hints) if products else None
            walks[roles and roles.walk].append((sink, roles))
        walks = with_prologues(walks)
        if len(walks) > 1:
            refs = [{s.ref for s, _ in members} for members in walks.values()]
            return [[g for g in goals if g.memory.ref in part] for part in refs]
        (members,) = walks.values()
        require_own_extremes(sinks, self.virtual)
        roles = joined_roles(r for _, r in members if r is not None)
        # tiles hold depths from end to end: build again with the values of their symbols
        if free := symbols(a.size for a in (*roles.depth, *few_places(roles, self.hints))):
            pinned = {**pins, **{s: int(self.hints[s]) for s in sorted(free, key=str)}}
            return self._kernel(goals, memory, pinned, label)
        sums = with_rows_of_nothing(terms, accumulation_of(terms, sinks, roles, self.target.fast), roles)
        plan = plan_of_stream(terms, sums, roles, self.target, self.hints)
        if binned:
            return tuple(replace(k, pinned=pins) for k in self._binning(terms, plan, roles, binned, label))
        return tuple(replace(k, pinned=pins) for k in self._walking(terms, plan, roles, label))

    def _binning(
        self, terms: TermTable, plan: StreamPlan, roles: Roles, binned: Sequence[Binned], label: str
    ) -> tuple[Kernel, ...]:
        """The kernel that sums tiles by an index, and those that add up what its programs have found."""
        if not roles.keeps_stream:
            raise Unfusible(binned[0].sink.node, "an index tells no tiles apart")
        first = len(self.temporaries)
        sums, roles, tables, buffers = with_found(terms, plan.sums, roles, plan.tile, binned, first)
        kernel = kernel_of_stream(terms, replace(plan, sums=sums), roles, self.target, self.hints, label)
        merging = self._merged(terms, tables, f"{label}{TOTALS}")
        if not merging:
            raise Unfusible(binned[0].sink.node, "what programs find would take several kernels to add up")
        self.temporaries += buffers
        return (kernel, *merging)

    def _walking(self, terms: TermTable, plan: StreamPlan, roles: Roles, label: str) -> tuple[Kernel, ...]:
        """The kernel that walks a stream, or parts of it, and what merges these."""
        wanted = wanted_parts(roles, plan.sums, plan.tile, self.target)
        parts = parts_at(wanted, self.hints)
        if parts > 1:
            split = split_of(terms, plan.sums, roles, parts, len(self.temporaries))
            of_parts = replace(plan, sums=split.partial)
            first = kernel_of_stream(terms, of_parts, split.roles, self.target, self.hints, label)
            if merging := self._merging(terms, split, label):
                self.temporaries += split.buffers
                return (replace(first, splits=parts, wanted=wanted), *merging)
        whole = kernel_of_stream(terms, plan, roles, self.target, self.hints, label)
        return (replace(whole, wanted=wanted if parts == 1 else 1),)

    def _merging(self, terms: TermTable, split: Split, label: str) -> list[Kernel]:
        """The kernels that merge the parts of a stream; none where they would have to be divided themselves."""
        lone = [_without_lone_axes(s) for s in split.merged]
        label = f"{label}{MERGED}"
        return self._merged(terms, split.merged, label) or self._merged(terms, lone, label)

    def _merged(self, terms: TermTable, stores: Sequence[Sink], label: str) -> list[Kernel]:
        """The kernels of stores that read what kernels before them have summed; none where they need more than that."""
        kernels, todo = list[Kernel](), _by_nested_axes(unify(terms, list(stores)))
        while todo:
            # what leans to another tile leans there alone: beside that the merging is nothing
            workload = self._workload(terms, todo[0], replace(self.target, leaning=Leaning()))
            try:
                plan = schedule_of(workload)
            except Separate as request:
                parts = [[s for s in todo[0] if (s in request.sinks) is side] for side in (False, True)]
                if not all(parts):
                    return []
                todo[:1] = parts
                continue
            except Materialize:
                return []
            if symbols(a.size for a in plan.pinned):
                return []
            name = f"{label}_{len(kernels)}" if kernels else label
            kernels.append(kernel_of(workload.program, plan, workload.target, self.hints, name))
            del todo[0]
        return kernels


def _without_lone_axes(sink: Sink) -> Sink:
    """The store without axes of one place that nothing of it varies along: the only row of a stream."""
    varying = sink.place.axes.union(*(t.axes for t in terms_below(sink.terms)))
    return replace(sink, axes=tuple(a for a in sink.axes if a.size != 1 or a in varying))


def _place_of_both(made: Sequence[_Made], one: _Made, two: _Made) -> _Made | None:
    """Which of the two gives way to a kernel that is both; None where what is between them is between all they do."""
    between = made[made.index(one) + 1 : made.index(two)]
    if not any(m.stored & two.loaded for m in between):
        return one
    return None if any(one.stored & m.loaded for m in between) else two


def _stem_and_end(label: str) -> tuple[str, str]:
    """loop_0_totals  ->  loop_0, _totals"""
    found = re.search(rf"({'|'.join(ENDS)})(_\d+)?$", label)
    end = found.group() if found else ""
    return label.removesuffix(end), end


def _with_name(kernel: Kernel, label: str) -> Kernel:
    return replace(kernel, name=label, source=kernel.source.replace(f"def {kernel.name}(", f"def {label}(", 1))


def _pinned(memory: Memory, pins: Mapping[sympy.Symbol, int]) -> Memory:
    return Memory(memory.ref, _substitute_param(memory.strides, pins), memory.dtype) if pins else memory


def _pinned_goal(goal: Goal, graph: Graph, pins: Mapping[sympy.Symbol, int]) -> Goal:
    part = goal.part and Part(*(_substitute_param(n, pins) for n in goal.part))
    piece = None if goal.piece is None else Value(graph, goal.piece.id)
    whole = None if goal.whole is None else Value(graph, goal.whole.id)
    return Goal(Value(graph, goal.node.id), _pinned(goal.memory, pins), goal.scatter, part, piece, whole)


def _by_nested_axes(sinks: Sequence[Sink]) -> list[list[Sink]]:
    """Sinks whose axes nest: one kernel walks the largest set. What is stored piece by piece stays together."""
    below = _axes_below(terms_below(t for s in sinks for t in s.terms))
    walked = [(s, frozenset(s.axes).union(*(below[t] for t in s.terms))) for s in sinks]
    groups: list[tuple[list[Sink], frozenset[Axis]]] = []
    stored: list[set[Ref]] = []
    for sink, axes in sorted(walked, key=lambda w: -len(w[1])):
        beside = (place for place, refs in enumerate(stored) if sink.ref in refs)
        nested = (place for place, (_, own) in enumerate(groups) if axes <= own or own <= axes)
        place = next(chain(beside, nested), None)
        if place is None:
            groups.append(([sink], axes))
            stored.append({sink.ref})
            continue
        members, own = groups[place]
        members.append(sink)
        stored[place].add(sink.ref)
        groups[place] = (members, own | axes)
    return [members for members, _ in groups]


def _axes_below(terms: Iterable[Term]) -> dict[Term, frozenset[Axis]]:
    """The axes of each term and of all below it; arguments come first."""
    below: dict[Term, frozenset[Axis]] = {}
    for term in terms:
        below[term] = term.axes.union(*(below[a] for a in term.args))
    return below
