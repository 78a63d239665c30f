"""One direction of a Function in figures: what is launched, the bytes that it moves, and the least possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from ...codegen import Kernel, Kernels, Target
from ...ir import Graph, Value
from ...ir.errors import LoweringError
from ...ir.passes.cost import minimal_bytes
from ...ir.passes.fuse import Extern, Group, Step
from ...ir.prims import PRIMS
from ...tracer.opaque.opaque import opaque_of
from ...tracer.trace import Trace
from ..execution.aten.step_by_step import STEP_BY_STEP, is_loop
from ..execution.executable import fills_memory, has_outer_product
from ..execution.fusion_report import FusionBreak, GroupReport, fusion_breaks_of, groups_of
from ..execution.generated import Generated
from ..execution.graph_to_kernels import generate, graph_of, text_of
from ..execution.group import UNPROVED
from ..execution.kernel_plan import is_opaque
from ..kernels.proofs import are_proved, unproved_at
from ..values.sizes import Sizes, number
from .costs.eager_cost import EagerCost, aten_calls
from .costs.peak_memory import PeakMemory, peak_of_kernels
from .costs.slab_report import SlabReport, Walk
from .walks import course_text, walk_text


@dataclass(frozen=True)
class KernelReport:
    """One launch: a generated kernel, or the call of a library or of an operation of torch."""

    name: str
    """Of the kernel, or of the operation that is called."""
    direction: str
    """Either "forward" or "backward"."""
    source: str
    """The kernel's Triton text, with the functions that it calls; "" where no kernel was generated."""
    bytes_read: int
    """Bytes read from device memory."""
    bytes_written: int
    """Bytes written to device memory."""
    kind: str = "triton"
    """What is launched.

    - "triton": a generated kernel.
    - "library": a call of cuBLAS or another library.
    - "aten": an operation of torch, on a target for which nothing is generated.
    - "torch": an operation of torch, in place of a generated kernel that may not run.
    """
    bytes_cached: int = 0
    """Bytes that the launch reads once more, out of L2."""
    times: int = 1
    """How often it runs in a call: once, or once a slab; bytes are those of all."""
    walk: str = ""
    """Where it forms tiles of a matrix that is never in memory: its rows and their blocks, what it walks, by what its
    sums are rescaled, and which blocks it skips. Where it takes many steps of a loop at once: how many, and in how many
    chunks of time, by what count of programs. Else ""."""


@dataclass
class DirectionReport:
    """forward or backward: its graph, its launches, and the minimum traffic."""

    graph: Graph
    """The IR after the passes."""
    steps: list[Step]
    """The fused groups and the calls between them, in order: of the compiler."""
    launches: list[KernelReport]
    """Every launch, in the order in which they run."""
    minimal: int
    """The minimum traffic in bytes: every input read once, every output written once."""
    kernels: list[Kernels] = field(default_factory=list)
    """The generated kernels of each fused group: of the compiler."""
    segments: list[str] = field(default_factory=list)
    """Where some calls are not traceable: kernels and eager calls by name, in their order; else empty."""
    loops: list[DirectionReport] = field(default_factory=list)
    """Of each loop that runs step by step, one step."""
    reasons: list[str] = field(default_factory=list)
    """Why a generated kernel may not run, where one may not."""
    groups: list[GroupReport] = field(default_factory=list)
    """The fused groups: what each computes, reads and writes."""
    cuts: list[FusionBreak] = field(default_factory=list)
    """The fusion breaks: why two launches are not one."""
    products: list[str] = field(default_factory=list)
    """A line for each matmul: in a kernel or by the library, and why; and for each region of matmuls whose results are
    larger than what they are made of: whether these are ever in memory, and why."""
    slabs: dict[int, SlabReport] = field(default_factory=dict)
    """Regions of matmuls that are computed a slab of rows at a time, by step."""
    traced: Trace | None = None
    """The operations of the method as the user wrote it; None where it is derived."""
    eager: EagerCost | None = None
    """What the method costs in eager; None where it was not counted."""
    memory: PeakMemory | None = None
    """The most memory that a call holds at a time beside its arguments; None where it was not counted."""

    @property
    def is_unlaunched(self) -> bool:
        """True if kernels were generated and none of them may run."""
        kinds = {launch.kind for launch in self.launches}
        return "torch" in kinds and "triton" not in kinds

    @property
    def launch_count(self) -> int:
        """The number of launches in a call."""
        return sum(k.times for k in self.launches)

    def groups_with_kernels(self) -> Iterator[tuple[Group, Kernels]]:
        """Each fused group with its kernels; for a region in slabs those of a slab."""
        groups = [at for at, step in enumerate(self.steps) if isinstance(step, Group)]
        for at, kernels in zip(groups, self.kernels, strict=True):
            step = self.steps[at]
            assert isinstance(step, Group)
            yield from self.slabs[at].walk.groups() if at in self.slabs else [(step, kernels)]

    @property
    def moved(self) -> int:
        """The bytes that the launches read and write, in device memory."""
        return sum(k.bytes_read + k.bytes_written for k in self.launches)

    @property
    def summary(self) -> str:
        """The costs in a line: launches, bytes, their ratio to the minimum traffic, and the same of eager."""
        parts = [_cost_line(self.launch_count, self.moved, self.minimal, " the minimum traffic")]
        if (eager := self.eager) is not None:
            at_least = "at least " if eager.at_least else ""
            parts.append(f"eager: {at_least}{_cost_line(eager.launches, eager.bytes, self.minimal, '')}")
        return "; ".join(parts)


def _cost_line(launches: int, moved: int, minimal: int, unit: str) -> str:
    ratio = f", {moved / minimal:.2f} x{unit}" if minimal else ""
    return f"{launches} launch{'es' * (launches != 1)}, {moved:,} bytes{ratio}"


def kernels_report(graph: Graph, direction: str, sizes: Sizes, target: Target) -> DirectionReport:
    generated = generate(graph, target, sizes, graph.name)
    least = number(minimal_bytes(graph), sizes)
    walks = {at: Walk.of(slabs, target, sizes, generated.names[at]) for at, slabs in generated.slabs.items()}
    by_step = {**generated.kernels, **{at: walk.kernels for at, walk in walks.items()}}
    generated = replace(generated, kernels={at: by_step[at] for at in sorted(by_step)})
    report = DirectionReport(graph, generated.steps, [], least, list(generated.kernels.values()), generated.reasons)
    report.groups, report.cuts = groups_of(generated), fusion_breaks_of(graph, generated)
    report.products = [str(d) for d in generated.products]
    # One launch for each kernel and library call, in the order in which they run.
    for at, step in enumerate(generated.steps):
        if is_opaque(step):
            continue
        if at in walks:
            launches = list(_slab_launches(walks[at], direction))
            report.launches += launches
            moved = [k.bytes_read + k.bytes_written for k in launches]
            report.slabs[at] = walks[at].report(sizes, moved)
        elif isinstance(step, Group) and at in generated.kernels:
            kernels, why = generated.kernels[at], _why_not_launched(step, generated.kernels[at], sizes)
            if why:
                report.reasons.append(f"{generated.names[at]} {UNPROVED}: {why}")
                report.launches += [_node_report(v, direction, sizes, "torch") for v in _computed_values(step.graph)]
            else:
                report.launches += [_kernel_report(k, direction, sizes) for k in kernels.kernels]
        elif isinstance(step, Extern) and is_loop(step):
            _add_loop(report, step.value, direction, sizes, target, generated.refused.get(step.value.id))
        elif isinstance(step, Extern):
            report.launches.append(_node_report(step.value, direction, sizes))
    if any(map(is_opaque, generated.steps)):
        report.segments = _segments(generated)
    held = {at: found.held for at, found in report.slabs.items()}
    report.memory = PeakMemory(peak_of_kernels(graph, generated, sizes, held))
    return report


def _add_loop(
    report: DirectionReport, scan: Value, direction: str, sizes: Sizes, target: Target, why: str | None
) -> None:  # fmt: skip
    """The launches of each step, and those that stack what the steps give. why: it has no kernel of its own."""
    body = kernels_report(scan.params["body"].graph, direction, sizes, target)
    report.loops.append(body)
    report.reasons += [f"{STEP_BY_STEP} ({why})" if why else STEP_BY_STEP, *body.reasons]
    report.launches += [_repeated(k, number(scan.params["length"], sizes)) for k in body.launches]
    stacked = [number(t.nbytes, sizes) for t in scan.avals[scan.params["carries"] :]]
    report.launches += [KernelReport("stack", direction, "", n, n, kind="library") for n in stacked]


def _repeated(launch: KernelReport, times: int) -> KernelReport:
    """One report of what runs in each step of a loop."""
    moved = {name: times * getattr(launch, name) for name in ("bytes_read", "bytes_written", "bytes_cached")}
    return replace(launch, **moved, times=times * launch.times)


def _slab_launches(walk: Walk, direction: str) -> Iterator[KernelReport]:
    """The launches of a slab, with the bytes of all slabs."""
    for at, step in enumerate(walk.generated.steps):
        if isinstance(step, Extern):
            found = _in_all([_node_report(step.value, direction, sizes) for sizes in walk.each])
            yield replace(found, bytes_read=found.bytes_read + walk.added(step.value))
        elif at in walk.generated.kernels:
            for kernel in walk.generated.kernels[at].kernels:
                yield _in_all([_kernel_report(kernel, direction, sizes) for sizes in walk.each])


def _in_all(runs: Sequence[KernelReport]) -> KernelReport:
    """One report of what runs once a slab."""
    totals = {name: sum(getattr(r, name) for r in runs) for name in ("bytes_read", "bytes_written", "bytes_cached")}
    return replace(runs[0], **totals, times=len(runs))


def _why_not_launched(group: Group, kernels: Kernels, sizes: Sizes) -> str:
    """The reason why calls of these sizes go through torch; "" where the kernels run."""
    shapes = [aval.shape for value in group.graph.order() for aval in value.avals]
    symbols = {s for shape in shapes for n in shape for s in getattr(n, "free_symbols", ())}
    if not symbols <= set(sizes) or are_proved(group.graph, kernels):  # what data decides is known in a call
        return ""
    return unproved_at(group.graph, kernels, sizes)


def _segments(generated: Generated) -> list[str]:
    """The steps that run, in order: kernels by name, library calls, and the user's own nested calls."""
    lines: list[str] = []
    for at, step in enumerate(generated.steps):
        if at in generated.kernels:
            lines += [kernel.name for kernel in generated.kernels[at].kernels]
        elif isinstance(step, Extern):
            node, library = opaque_of(step.value), str(step.value.params.get("op", "call"))
            lines.append(library if node is None else f"eager {node.name} ({node.where})")
    return lines


def _computed_values(graph: Graph) -> list[Value]:
    return [v for v in graph.order() if PRIMS[v.prim].family not in ("layout", "source", "pick")]


def _kernel_report(kernel: Kernel, direction: str, sizes: Sizes) -> KernelReport:
    bytes_read = sum(number(b, sizes) for b in kernel.reads.values())
    bytes_written = sum(number(b, sizes) for b in kernel.writes.values())
    cached = sum(number(b, sizes) for b in kernel.cached.values())
    text, walk = text_of(Kernels((kernel,))), _walk(kernel, sizes)
    return KernelReport(kernel.name, direction, text, bytes_read, bytes_written, bytes_cached=cached, walk=walk)


def _walk(kernel: Kernel, sizes: Sizes) -> str:
    if kernel.course is not None:
        return course_text(kernel.course, sizes)
    parts = [] if kernel.walk is None else [walk_text(kernel.walk, sizes)]
    return "; ".join([*parts, "tiles by descriptors"] if kernel.has_descriptors else parts)


def _node_report(value: Value, direction: str, sizes: Sizes, kind: str = "library") -> KernelReport:
    name = str(value.params.get("op") or getattr(value.params.get("target"), "__name__", value.prim))
    bytes_read = sum(number(t.nbytes, sizes) for a in value.args for t in a.avals)
    bytes_written = sum(number(t.nbytes, sizes) for t in value.avals)
    return KernelReport(name, direction, "", bytes_read, bytes_written, kind=kind)


def aten_report(trace: Trace, name: str, direction: str, sizes: Sizes) -> DirectionReport:
    try:
        graph = graph_of(trace, name)
    except LoweringError:
        graph = Graph(name)
    calls = aten_calls(trace, sizes)
    launches = [KernelReport(c.name, direction, "", c.bytes_read, c.bytes_written, "aten") for c in calls]
    contracted = has_outer_product(trace) and not graph.mutations and len(graph)
    if contracted and fills_memory(trace, sizes):  # then the lowered graph runs, through torch
        launches = [_node_report(v, direction, sizes) for v in _computed_values(graph)]
    report = DirectionReport(graph, [], launches, number(minimal_bytes(graph), sizes))
    if trace.opaque:
        report.segments = [line for n in trace.graph_module.graph.nodes if (line := _aten_line(n)) is not None]
    return report


def _aten_line(node: torch.fx.Node) -> str | None:
    """An operation, or a nested call of the user's own, as a line of the report."""
    opaque = getattr(node.target, "opaque", None)
    if opaque is not None:
        return f"eager {opaque.name} ({opaque.where})"
    return str(node.target) if isinstance(node.target, torch._ops.OpOverload) else None
