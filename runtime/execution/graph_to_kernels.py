"""A captured graph to kernels, top to bottom: lowered, simplified, cut into steps, each fused step Triton text."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import sympy
import torch

from ... import codegen
from ...codegen import Kernels, Target
from ...codegen.rooflines import machine_of
from ...ir import Graph, Value, verify
from ...ir.errors import LoweringError, Unfusible
from ...ir.loops.around.beside import SummedBeside
from ...ir.loops.around.handover import Handover
from ...ir.loops.around.late import LateSums
from ...ir.loops.around.longer import LongerLoops
from ...ir.loops.around.neighbours import Neighbours
from ...ir.loops.around.picked import PickedSteps
from ...ir.loops.around.sums import SummedSteps
from ...ir.loops.motion import Motion
from ...ir.loops.parts import CarriedPieces
from ...ir.loops.tidy import TidyLoops
from ...ir.passes.clusters import Bound
from ...ir.passes.contract import Contract
from ...ir.passes.cost import estimate
from ...ir.passes.fuse import Extern, Fuse, Group, Step
from ...ir.passes.identities.assertions import AssertedIndices
from ...ir.passes.node_kinds import is_view
from ...ir.passes.pieces import Pieces
from ...ir.passes.place import Places, place_concatenations
from ...ir.passes.products import Decision, Machine, Products
from ...ir.passes.simplify import Simplify
from ...ir.passes.streaming.in_place import Overwrites, overwriting, taking_memory
from ...ir.passes.streaming.slabs import held_by_nodes, held_by_steps
from ...ir.passes.streaming.streams import PRICE, StreamDecision, Streams, held_in_one_piece, slabs_at
from ...ir.prims import PRIMS
from ...ir.switches import bounds_slabs, is_on, should_run, show_to_watch, slab_bytes, watch_allows
from ...ir.transforms.batch import batch
from ...ir.types import COMPLEX
from ...tracer.lowering.aten import lower, lowering_key
from ...tracer.reads.fingerprint import replaced_in_torch
from ...tracer.reads.reached import CallReached, without_calls
from ...tracer.trace import Trace
from ..kernels import proofs
from ..settings import logs
from ..settings.config import settings
from ..settings.counters import count
from ..settings.internal_errors import is_internal
from .generated import Generated

ProductsBy = Literal["model", "clock", "library", "torch"]
"""Who decides whether a product of matrices is in a kernel; "torch": nothing is in one."""
Slabbing = Literal["walk", "inside", "none"]
"""Whether regions that would fill memory are walked in slabs; or the graph is of a slab itself; or neither."""

PASSES: dict[str, Callable[[Graph], Graph]] = {
    "assertions": AssertedIndices(), "simplify": Simplify(), "tidy loops": TidyLoops(), "contract": Contract(),
    "late sums": LateSums(), "motion": Motion(batch), "simplify again": Simplify(), "pieces of loops": Pieces(),
    "longer loops": LongerLoops(), "neighbours": Neighbours(), "handover": Handover(), "picked steps": PickedSteps(),
    "summed steps": SummedSteps(), "summed beside": SummedBeside(), "carried pieces": CarriedPieces(),
}  # fmt: skip


def graph_of(trace: Trace, name: str) -> Graph:
    """A copy of the trace's graph, which is made once; again where more has become known about sizes or layouts."""
    if (name, lowering_key(trace)) not in trace.lowered:
        graph = _graph_of(trace, name)
        trace.lowered = {(name, lowering_key(trace)): graph}
    return trace.lowered[name, lowering_key(trace)].copy()  # type: ignore[no-any-return]


def _graph_of(trace: Trace, name: str) -> Graph:
    """trace -> lower -> simplify -> contract -> simplify. Raises LoweringError."""
    if not watch_allows("lower", name):
        raise LoweringError("it is left as it was traced")
    names = [*trace.names, *(f"captured_{i}" for i in range(len(trace.lifted)))] if trace.names else None
    try:
        with without_calls(replaced_in_torch()):
            graph = lower(trace.graph_module, [*trace.fakes, *trace.lifted], name=name, input_names=names)
    except CallReached as called:
        raise LoweringError(f"{called.name} was replaced, and what operations are made of calls it") from None
    show_to_watch("lower", trace.graph_module, graph)
    graph = optimize(graph)
    _name_outputs(graph, trace.output_names)
    return graph


def _name_outputs(graph: Graph, names: Sequence[str]) -> None:
    """Outputs that the user's source gives no name get one, so that the kernels' pointers say what they are.

    So does what they are views of: a kernel writes that.
    """
    for output, name in zip(graph.outputs, names, strict=False):
        value = output
        while value is not None and value.prim != "input":
            _give_name(value, (output and output.origin.name) or name)
            value = value.args[0] if is_view(value) and value.args else None


def _give_name(value: Value, name: str) -> None:
    if value.origin.name is None:
        value.attrs["origin"] = replace(value.origin, name=name)


def optimize(graph: Graph) -> Graph:
    """The same program after the passes; verified after each under `config.debug`."""
    for step, run in PASSES.items():
        if should_run(step, graph.name):
            before, graph = graph, run(graph)
            show_to_watch(step, before, graph)
        if settings().debug:
            verify(graph)
    return graph


MAKING = "kernels"
"""The step that makes the kernels of a group."""


def generate(
    graph: Graph, target: Target, hints: Mapping[sympy.Symbol, int], name: str, products: ProductsBy = "model",
    slabs: Slabbing = "walk", small: bool = True,
) -> Generated:  # fmt: skip
    """fuse -> schedule -> loops -> Triton text. A node that cannot be generated is called as it is, between kernels.

    products: by the "model" a kernel or the library's call; by a "clock" a kernel wherever that moves fewer bytes, for
    a clock to compare with the call; by the "library"; or all by "torch". slabs: whether regions may be walked in them.
    small: whether what is little may have kernels that hold no more.
    """
    added = {} if products == "torch" else _additions(graph, target, hints)
    refused = {i: why for i, why in unordered_scatters(graph).items() if i not in added or not added[i].summed}
    called: dict[int, Decision] = {}
    unstreamed: dict[int, str] = {}
    reasons: list[str] = []
    divides = Division.of(graph, target, hints, products, slabs)
    while True:
        # The division: groups, calls between them, and which calls write into a concatenation or join a kernel.
        steps, places, streamed, decisions = divides(frozenset(refused), frozenset(called), unstreamed)
        steps, over = overwriting(graph, steps) if divides.is_slab else (steps, Overwrites())
        names = group_names(name, steps)
        # A refusal in any group changes the division itself, so all of it is made again without that node; of products
        # without all that were refused. Of several products in one group the last one joined the others: it leaves.
        stream_of = {id(d.group): d for d in streamed if d.group is not None}
        product_of = {id(d.group): d for d in decisions if d.group is not None}
        walked = slabs_at(steps, streamed)
        without = range(len(steps)) if products == "torch" else walked
        kernels, refusals = _made(steps, names, without, product_of, target, hints, small)
        if refusals:
            first = refusals[0]
            left_out = [(product_of[id(r.group)], r.error.reason) for r in refusals if id(r.group) in product_of]
            called |= {product.value.id: product.refused(reason) for product, reason in left_out}
            if (stream := stream_of.get(id(first.group))) is not None:
                # without what it adds into tables, first
                unstreamed |= dict.fromkeys(stream.added or stream.pairs or stream.products, first.error.reason)
            elif not left_out and _adds_floats(first.group) and (own := [a for a in added.values() if a.summed]):
                added |= {a.value.id: a.refused(first.error.reason) for a in own}
                refused |= {a.value.id: ADDED for a in own}
            elif not left_out:
                alike = sorted(_refused_alike(graph, first.error.value, frozenset(refused)))
                refused |= dict.fromkeys(alike, str(first.error))
                reasons.append(str(first.error))
            continue
        joined = _in_one_group(divides, steps, kernels, frozenset(refused), name) if small else None
        if joined is not None:
            steps, names, kernels = joined
        told = [d for d in streamed if divides.streams or d.slabs is not None or d.unwalked]
        told = _with_splits(told, steps, kernels)
        products_told: tuple[Decision | StreamDecision, ...] = (*told, *decisions, *called.values())
        held = held_in_one_piece(graph, streamed, hints, divides.limit)
        over = over or taking_memory(graph, steps, kernels, places, divides.bound)
        generated = Generated(
            steps, names, kernels, reasons, refused, (*products_told, *added.values()), places, walked, over, held,
            divides.bound,
        )
        log_division(graph, generated)
        return generated


def price_of_slabs() -> float:
    """How many times as long slabs may take: any number where their memory was asked for."""
    return math.inf if bounds_slabs() else PRICE


@dataclass(frozen=True)
class Division:
    """A graph as steps, by the passes that are on. limit: bytes that a region of products may hold; None: any."""

    graph: Graph
    target: Target
    machine: Machine
    hints: Mapping[sympy.Symbol, int]
    products: ProductsBy
    streams: bool
    limit: int | None
    price: float
    in_place: bool
    is_slab: bool

    @classmethod
    def of(
        cls, graph: Graph, target: Target, hints: Mapping[sympy.Symbol, int], products: ProductsBy, slabs: Slabbing
    ) -> Division:
        """The division of a graph under the switches in force."""
        kernels, name = products in ("model", "clock"), graph.name
        streams = kernels and should_run("streams", name)
        limit = slab_bytes() if slabs == "walk" and should_run("slabs", name) else None
        is_slab = slabs == "inside" and products != "torch"
        by = products if not kernels or should_run("products", name) else "library"
        price, in_place = price_of_slabs(), should_run("place", name)
        return cls(graph, target, machine_of(target), hints, by, streams, limit, price, in_place, is_slab)

    @property
    def bound(self) -> Bound:
        """What a group may keep waiting, at these sizes."""
        return Bound(self.limit, self.hints)

    def __call__(
        self, refused: frozenset[int], called: frozenset[int], unstreamed: Mapping[int, str]
    ) -> tuple[list[Step], Places, list[StreamDecision], list[Decision]]:
        """refused: nodes that are called instead; called: products; unstreamed: products without kernels, and why."""
        steps, places = Fuse(refused, bound=self.bound)(self.graph), Places()
        streamed, decisions = list[StreamDecision](), list[Decision]()
        if self.streams or self.limit is not None:
            held = held_by_nodes if self.products == "torch" else held_by_steps
            regions = Streams(
                self.machine, self.hints, self.streams, unstreamed, self.limit, self.price, held, self._moved
            )  # fmt: skip
            steps, streamed = regions(self.graph, steps)
        if self.in_place:
            steps, places = place_concatenations(self.graph, steps)
        if self.products in ("model", "clock"):
            fused = Products(self.machine, self.hints, called | frozenset(places), self.products == "clock")
            steps, decisions = fused(self.graph, steps)
        return steps, places, streamed, decisions

    def _moved(self, group: Group) -> tuple[int, int] | None:
        """Bytes that the kernels of a group read and write, as they are without walks; None where it has none."""
        try:
            made = codegen.generate(group.graph, target=self.target, hints=self.hints, name=group.graph.name)
        except Unfusible:
            return None
        sides = zip(*((k.reads, k.writes) for k in made.kernels), strict=True)
        read, written = (sum(estimate(n, self.hints) for side in kernels for n in side.values()) for kernels in sides)
        return read, written


def _in_one_group(
    divides: Division, steps: Sequence[Step], kernels: Mapping[int, Kernels], refused: frozenset[int], name: str
) -> tuple[list[Step], list[str], dict[int, Kernels]] | None:
    """The steps with all groups as one, and its kernel: where nothing else is called, and all of it is little."""
    is_allowed = all(map(is_on, ("whole_sums", "fuse", "siblings")))
    if len(kernels) < 2 or any(isinstance(s, Extern) for s in steps) or not is_allowed:
        return None
    several = [k for made in kernels.values() for k in made.kernels]
    if not codegen.is_little(several, divides.target, divides.hints):
        return None
    one = Fuse(refused, bound=divides.bound, at_all=True)(divides.graph)
    names, groups = group_names(name, one), [at for at, s in enumerate(one) if isinstance(s, Group)]
    if len(groups) != 1:
        return None
    (at,) = groups
    try:
        made = _kernels_at(one, at, divides.target, divides.hints, names[at], small=True)
    except _Refusal:
        return None
    return (one, names, {at: made}) if codegen.is_lighter(made.kernels, several, divides.hints) else None


def _with_splits(
    streamed: Sequence[StreamDecision], steps: Sequence[Step], kernels: Mapping[int, Kernels]
) -> list[StreamDecision]:
    """The decisions, with the number of parts in which the stream of each is walked."""
    made = ((s, kernels[at].kernels) for at, s in enumerate(steps) if at in kernels)
    parts = {id(s): max((k.splits for k in own), default=1) for s, own in made}
    return [replace(d, splits=parts.get(id(d.group), 1)) for d in streamed]


def _made(
    steps: Sequence[Step], names: Sequence[str], without: Container[int], products: Container[int], target: Target,
    hints: Mapping[sympy.Symbol, int], small: bool,
) -> tuple[dict[int, Kernels], list[_Refusal]]:  # fmt: skip
    """The kernels of all groups but those `without`; or refusals: the first, and where it is of a product all others
    that are."""
    kernels: dict[int, Kernels] = {}
    refusals: list[_Refusal] = []
    groups = [at for at, s in enumerate(steps) if isinstance(s, Group) and at not in without]
    for at in [at for at in groups if watch_allows(MAKING, names[at])]:
        try:
            kernels[at] = _kernels_at(steps, at, target, hints, names[at], small)
        except _Refusal as found:
            refusals.append(found)
            if id(refusals[0].group) not in products:
                break
    return kernels, refusals


ADDED = "floats that are added to one place at once are added in no fixed order"
PUT = "which of several values that are put in one place stays depends on the order"


def unordered_scatters(graph: Graph) -> dict[int, str]:
    """The nodes whose result in a kernel would depend on which program comes first; torch's own operation has an order.

    Additions to integers have none to keep. Values that are put are put as torch does, where duplicates have no order
    too, unless it is asked for deterministic algorithms.
    """
    scatters = [v for v in graph.order() if v.prim == "scatter"]
    if torch.are_deterministic_algorithms_enabled():
        puts = {v.id: PUT for v in scatters if v.params["mode"] == "set"}
    else:
        puts = {}
    added = [v for v in scatters if v.params["mode"] == "add" and (v.aval.is_float or v.dtype in COMPLEX)]
    return puts | {v.id: ADDED for v in added}


def _additions(graph: Graph, target: Target, hints: Mapping[sympy.Symbol, int]) -> dict[int, codegen.Addition]:
    """By node, what becomes of additions of the steps of loops."""
    return {a.value.id: a for a in codegen.additions_of_steps(graph, machine_of(target), hints)}


def _adds_floats(group: Group) -> bool:
    return any(why == ADDED for why in unordered_scatters(group.graph).values())


class _Refusal(Exception):
    """No kernels for one group (internal: something in it is called instead)."""

    def __init__(self, group: Group, error: Unfusible) -> None:
        self.group, self.error = group, error


def _kernels_at(
    steps: Sequence[Step], at: int, target: Target, hints: Mapping[sympy.Symbol, int], name: str, small: bool
) -> Kernels:
    group = steps[at]
    assert isinstance(group, Group)
    try:
        return kernels_of(group, target, hints, name, small=small)
    except Unfusible as error:
        raise _Refusal(group, error) from error
    except Exception as error:
        # a mistake of ours with products costs their kernels and no more: the library has them, and it is on record
        if not is_internal(error) or settings().debug or all(v.prim != "dot" for v in group.graph.order()):
            raise
        first = (str(error).strip().splitlines() or [""])[0]
        why = f"internal error: {type(error).__name__}: {first} (please report it)"
        raise _Refusal(group, Unfusible(group.outputs[0], why)) from error


def _refused_alike(graph: Graph, refused: Value, apart: frozenset[int]) -> frozenset[int]:
    """The nodes that the generator would refuse for the same reason; all of them where none is found."""
    remaining = [v for v in graph.order() if v.id not in apart]
    fusible = [v for v in remaining if PRIMS[v.prim].family not in ("extern", "contract", "pick")]
    alike = frozenset(v.id for v in fusible if v.prim == refused.prim and v.avals[0].dtype == refused.avals[0].dtype)
    return alike or frozenset(v.id for v in fusible)


def kernels_of(
    group: Group, target: Target, hints: Mapping[sympy.Symbol, int], name: str, bounded: bool = False,
    small: bool = False,
) -> Kernels:  # fmt: skip
    """schedule -> lower to loops -> emit Triton text. bounded, small: as for `codegen.generate`."""
    kernels = codegen.generate(
        group.graph, target=target, hints=hints, name=name, bounded=bounded, small=small, pairs=group.pairs
    )  # fmt: skip
    count("compiles", len(kernels.kernels))
    log_kernels(kernels, target)
    if settings().debug:
        proofs.log_proofs(group, kernels)
    return kernels


def text_of(kernels: Kernels, header: str = "") -> str:
    """The importable module that holds these kernels."""
    return codegen.module(kernels.kernels, header)


def group_names(name: str, steps: Sequence[Step]) -> list[str]:
    """A name for each step's kernels: the method's, numbered where there are several groups."""
    groups = [s for s in steps if isinstance(s, Group)]
    if len(groups) == 1:
        return [name if isinstance(s, Group) else "" for s in steps]
    numbers = iter(range(1, len(groups) + 1))
    return [f"{name}_{next(numbers)}" if isinstance(s, Group) else "" for s in steps]


def log_division(graph: Graph, generated: Generated) -> None:
    """A graph became groups and calls."""
    if not logs.fusion.isEnabledFor(logging.INFO):
        return
    from .fusion_report import fusion_breaks_of, groups_of  # a report of what is made here, for who asked for it

    groups = groups_of(generated)
    calls = sum(isinstance(s, Extern) for s in generated.steps)
    logs.fusion.info("%s: fused groups: %d, library calls: %d", graph.name, len(groups), calls)
    for group in groups:
        logs.fusion.info("  %s: %s; reads %s; writes %s", ", ".join(group.kernels), " ".join(group.operations),
                         ", ".join(group.reads), ", ".join(group.writes))  # fmt: skip
        logs.fusion.debug("    of %s", ", ".join(group.lines))
    for cut in fusion_breaks_of(graph, generated):
        logs.fusion.info("  %s", cut)


def log_kernels(kernels: Kernels, target: Target) -> None:
    """Kernels were generated."""
    for kernel in kernels.kernels if logs.codegen.isEnabledFor(logging.INFO) else ():
        logs.codegen.info("%s for %s\n%s", kernel.name, target, kernel.source.rstrip())
        pinned = {str(s): n for s, n in kernel.pinned.items()}
        logs.codegen.debug("%s: grid %s, %d warps, %d stages, constants %s, pinned %s, guards %s",
                           kernel.name, kernel.grid, kernel.num_warps, kernel.num_stages, kernel.constants, pinned,
                           list(kernel.guards))  # fmt: skip
