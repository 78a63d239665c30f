"""The content of an export: one Function at one key, for one target, as graphs, steps and kernels."""

from __future__ import annotations

import keyword
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import sympy
import torch

from ....codegen import Target
from ....ir import Graph
from ....ir.errors import FusegradError, LoweringError
from ....ir.lazy_attribute import lazy_attribute
from ....ir.passes.fuse import Extern, Group, Step
from ....ir.program import ValueRef
from ....ir.switches import without
from ....tracer.containers import holes
from ....tracer.methods import backward_method, method_place, parameter_names, uses_setup_context
from ....tracer.opaque.opaque import opaque_of
from ....tracer.trace import CaptureError
from ...capture.captured_backward import BackwardEntry, predicted_kinds
from ...capture.guards import is_float
from ...compiled.compiled import Compiled
from ...dispatch.pytree import arguments
from ...execution.generated import Generated
from ...execution.graph_to_kernels import generate, graph_of
from ...execution.targets import named_target, target_name
from ...report.explain import DEFAULT_TARGET, compiler_of
from ...settings.config import numerics
from ...specialize.pipeline import choose_residuals
from ...specialize.specialization import Specialization, forward_graph
from ...values.tensor_specs import fake_argument, with_gradients_asked
from .any_length import LONGEST, AnyLength, versions_of_any_length
from .loop_lengths import assume_compared
from .tangents import NoTangents, tangents_of
from .unit_sizes import may_be_one, substituted_graph
from .versions import Row, Version, fixed_versions, least_limits, pinned_by, relations_in, rows_of

Tensor = torch.Tensor
Sizes = dict[sympy.Symbol, int]
Source = tuple[int, str, int]
"""Which tensor argument tells a symbol, by "size" or "stride", on which axis."""


class ExportError(FusegradError):
    """Something about a Function that a file without fusegrad cannot hold."""

    message = "export({function}): {reason}\n  at:   {where}\n  fix:  {fix}"


@dataclass(frozen=True)
class Lengths:
    """What sizes are in the kernels. any_row: rows are of any length up to `longest`; fixed: numbers everywhere."""

    any_row: bool = False
    fixed: Mapping[sympy.Symbol, int] = field(default_factory=dict)
    longest: int = LONGEST


@dataclass(frozen=True)
class Part:
    """forward or backward: its graph, its steps, and for each fused step the versions of its kernels.

    Each version may have conditions on sizes, but for the last. `passed`: outputs that are an input as it came, by the
    number of the input. `sizes`: symbols that the inputs' shapes do not tell, given apart. `limits`: of row lengths.
    """

    method: str
    graph: Graph
    steps: list[Step]
    kernels: dict[int, list[Version]]
    passed: dict[int, int]
    sizes: tuple[sympy.Symbol, ...]
    source: str
    limits: Mapping[sympy.Symbol, int] = field(default_factory=dict)

    @property
    def versions(self) -> list[Version]:
        """Those of all steps."""
        return [version for several in self.kernels.values() for version in several]


@dataclass(frozen=True)
class Gathered:
    """A whole Function. `residuals` say where backward's first inputs come from, `slots` where the tensors stand."""

    compiler: Compiled
    cls: type
    args: tuple[Any, ...]
    names: tuple[str, ...]
    specialization: Specialization
    device: str
    sizes: Sizes
    forward: Part
    backward: Part | None
    residuals: tuple[ValueRef, ...]
    jvp: Part | None = None
    jvp_reads: tuple[ValueRef, ...] = ()
    lengths: Lengths = Lengths()

    @property
    def name(self) -> str:
        return self.cls.__name__

    @property
    def target(self) -> str:
        """The machine code that its device runs: "cuda:90"."""
        return target_name(self.device)

    @property
    def parts(self) -> list[Part]:
        return [p for p in (self.forward, self.backward, self.jvp) if p is not None]

    @property
    def pinned(self) -> Sizes:
        """Symbols whose values are compiled into some kernel, or into all that is here."""
        return {**self.lengths.fixed, **pinned_by(v for p in self.parts for v in p.versions)}

    @property
    def rows(self) -> Sequence[Row]:
        """The rows that have any length."""
        return rows_of(v for p in self.parts for v in p.versions)

    @property
    def limits(self) -> Sizes:
        """The most that row lengths may be, of those that have a limit."""
        return least_limits(limit for p in self.parts for limit in p.limits.items())

    @property
    def guards(self) -> tuple[Any, ...]:
        """The assumptions about sizes that capturing and lowering both directions made, and those of their kernels."""
        own = self.specialization.captured.session.conditions(self.specialization.captured.symbols)
        return tuple(dict.fromkeys((*own, *relations_in(v for p in self.parts for v in p.versions))))

    @property
    def sources(self) -> dict[sympy.Symbol, Source]:
        """The places in the arguments that tell the symbols."""
        return dict(self.specialization.captured.binder.sources)

    @property
    def slots(self) -> list[int]:
        return self.specialization.captured.slots

    @lazy_attribute
    def ones(self) -> set[sympy.Symbol]:
        """The sizes that may be one, although they were captured as two or more."""
        kinds = self.sources.items()
        free = [s for s, (_, kind, _) in kinds if kind == "size" and s not in self.pinned]
        return may_be_one(self.compiler, self.specialization, self.args, free)


def gather_function(
    target_class: Any, args: Sequence[Any], target: str | None = None, derivatives: Sequence[str] = (),
    any_row: bool = False, fixed: Mapping[Source, int] = MappingProxyType({}),
) -> Gathered:  # fmt: skip
    """Capture and generate. Raises ExportError where something would have to run as the user wrote it.

    derivatives: "jvp", for kernels of forward mode. any_row: a row that a kernel holds may have any length, which else
    is compiled in. fixed: sizes of the arguments that are compiled in, by where the arguments tell them.
    """
    compiler, opened = compiler_of(target_class), arguments(target_class, tuple(args))
    device = target or DEFAULT_TARGET
    target_name(device)
    complete = compiler.user.complete(opened)
    stand_ins = with_gradients_asked([fake_argument(a) for a in complete])
    try:
        gathered = _gathered(compiler, stand_ins, device, derivatives, any_row, fixed)
        if (again := _in_all_kernels(gathered, fixed)) is not None:
            return _gathered(compiler, stand_ins, device, derivatives, any_row, *again)
        return gathered
    except NoTangents as error:
        raise export_error(compiler, f"it has no jvp to write down: {error}") from error
    except CaptureError as error:
        raise capture_refusal(compiler, error) from error
    except LoweringError as error:
        raise export_error(compiler, f"it cannot be written in kernels: {error}") from error


def _in_all_kernels(gathered: Gathered, fixed: Mapping[Source, int]) -> tuple[Mapping[Source, int], int] | None:
    """Lengths that one kernel has compiled in, and the longest row that all serve, where kernels differ in these."""
    stuck = {s for row in gathered.rows if (s := row.length) in gathered.pinned}
    longest = min(gathered.limits.values(), default=LONGEST)
    if not stuck and all(most == longest for p in gathered.parts for most in p.limits.values()):
        return None
    return {**fixed, **{gathered.sources[s]: gathered.sizes[s] for s in stuck}}, longest


def capture_for_export(target_class: Any, args: Sequence[Any]) -> tuple[Compiled, Specialization, list[Any]]:
    """Forward, and backward if there is one, as captured. Raises ExportError where a file could not hold it."""
    compiler = compiler_of(target_class)
    complete = compiler.user.complete(arguments(target_class, tuple(args)))
    stand_ins = with_gradients_asked([fake_argument(a) for a in complete])
    try:
        spec = _captured(compiler, stand_ins)
    except CaptureError as error:
        raise capture_refusal(compiler, error) from error
    return compiler, spec, stand_ins


def _captured(compiler: Compiled, stand_ins: Sequence[Any]) -> Specialization:
    """A capture that a file can hold, its loops compared with the methods. Raises CaptureError, ExportError."""
    spec, backwards = compiler.captures.only(stand_ins), {}
    require_closed(compiler, spec)
    if has_backward(compiler, stand_ins):
        kinds = predicted_kinds(spec.captured)
        backwards[kinds] = spec.backward.entry(kinds)
        require_closed(compiler, spec, backwards[kinds])
    assume_compared(spec, backwards)
    return spec


def has_backward(compiler: Compiled, stand_ins: Sequence[Any]) -> bool:
    """True where there is a backward, and something for it to differentiate."""
    return backward_method(compiler.user.cls) is not None and any(map(is_float, stand_ins))


def _gathered(
    compiler: Compiled, stand_ins: list[Any], device: str, derivatives: Sequence[str], any_row: bool,
    fixed: Mapping[Source, int], longest: int = LONGEST,
) -> Gathered:  # fmt: skip
    spec = _captured(compiler, stand_ins)
    sizes: Sizes = dict(spec.captured.sizes(stand_ins))
    told = spec.captured.binder.sources.items()
    lengths = Lengths(any_row, {s: fixed[source] for s, source in told if source in fixed}, longest)
    conditions = spec.captured.session.conditions(spec.captured.symbols)
    differentiates = has_backward(compiler, stand_ins)
    # Residuals before both graphs: what forward keeps is what backward reads.
    target = named_target(device, numerics(compiler.options.numerics))
    with without("slabs"):  # which a file has none of
        residual_plan = choose_residuals(spec, sizes, lambda: target) if differentiates else None
    graph = forward_graph(spec, residual_plan)
    graph.outputs = [None if i in spec.captured.skip else o for i, o in enumerate(graph.outputs)]
    places = residual_plan.places if residual_plan else spec.captured.residual_places
    forward = part_of(compiler, graph, "forward", device, sizes, {}, (), lengths, conditions)
    backward = full_backward = None
    # Backward for the gradients that a usual call has; as it came, for jvp, and without what it only passes on.
    if differentiates:
        entry = spec.backward.entry(predicted_kinds(spec.captured))
        name = f"{spec.captured.name}_backward"
        kinds = predicted_kinds(spec.captured)
        plan = residual_plan
        after = graph_of(entry.trace, name) if plan is None else plan.backward_graph(kinds, entry, name)
        full_backward = after.copy()
        after.outputs = [None if i in entry.passed_gradients else o for i, o in enumerate(after.outputs)]
        symbols = tuple(spec.captured.backward_symbols)
        conditions = spec.captured.session.conditions(spec.captured.symbols)
        passed = entry.passed_gradients
        backward = part_of(compiler, after, "backward", device, sizes, passed, symbols, lengths, conditions)
    # Names of the user's for the file.
    skip = 0 if uses_setup_context(compiler.user.cls) else 1
    names = tuple(parameter_names(compiler.user.cls.forward, len(stand_ins), skip, "argument"))  # type: ignore[attr-defined]
    saved = tuple(p for p in places if p is not None)
    jvp: Part | None = None
    reads: Sequence[ValueRef] = ()
    # Forward mode last: it may be the transpose of the whole backward.
    if "jvp" in derivatives:
        pushing, reads = tangents_of(compiler, spec, full_backward, saved)
        jvp = part_of(compiler, pushing, "jvp", device, sizes, {}, (), lengths, conditions)
    return Gathered(
        compiler, compiler.user.cls, tuple(stand_ins), names, spec, device, sizes, forward, backward, saved, jvp,
        tuple(reads), lengths,
    )  # fmt: skip


def part_of(
    compiler: Compiled, graph: Graph, method: str, device: str, sizes: Sizes,
    passed: dict[int, int], told_apart: tuple[sympy.Symbol, ...], lengths: Lengths, assumed: Sequence[Any],
) -> Part:  # fmt: skip
    """The steps and kernels of a graph; assumed: conditions on sizes.

    Raises ExportError where a method would have to run as the user wrote it.
    """
    derived = method == "jvp" and not compiler.user.overrides("jvp")
    source = method_place(getattr(compiler.user.cls, "backward" if derived else method))
    target = named_target(device, numerics(compiler.options.numerics))
    graph = substituted_graph(graph, lengths.fixed) if lengths.fixed else graph
    generated = generate(graph, target, sizes, graph.name, slabs="none", small=False)
    for step in generated.steps:
        if isinstance(step, Extern) and (node := opaque_of(step.value)) is not None:
            raise export_error(compiler, f"{node.name} is an opaque node in its {method}", node.where)
    free = {at: _of_any_length(generated, at, target, sizes, assumed, lengths) for at in generated.kernels}
    found = {at: versions for at, versions in free.items() if versions is not None}
    kernels = {
        at: found[at].versions if at in found else fixed_versions(step, first, target, sizes, generated.names[at])
        for at, first in generated.kernels.items()
        if isinstance(step := generated.steps[at], Group)
    }
    limits = least_limits((v.row.length, v.limit) for v in found.values())
    return Part(method, graph, generated.steps, kernels, passed, told_apart, source, limits)


def _of_any_length(
    generated: Generated, at: int, target: Target, sizes: Sizes, assumed: Sequence[Any], lengths: Lengths
) -> AnyLength | None:
    """The versions of a step for a row of any length, where its kernels hold one and compile in no other size."""
    step, symbols = generated.steps[at], {s for k in generated.kernels[at].kernels for s in k.pinned}
    if not lengths.any_row or len(symbols) != 1 or 0 in {sizes[s] for s in symbols} or not isinstance(step, Group):
        return None
    return versions_of_any_length(step, target, sizes, generated.names[at], symbols.pop(), assumed, lengths.longest)


# ------------------------------------------------------------------ what cannot be written down
def require_closed(compiler: Compiled, spec: Specialization, entry: BackwardEntry | None = None) -> None:
    """Refuse what reads, writes or calls things outside the file."""
    captured = spec.captured
    method = "forward" if entry is None else "backward"
    trace, lifted = (captured.forward.trace, captured.lifted) if entry is None else (entry.trace, entry.lifted)
    if trace.opaque:
        node = trace.opaque[0]
        raise export_error(compiler, f"{node.name} is an opaque node in its {method}", node.where)
    if lifted:
        raise export_error(compiler, f"{method} reads a tensor from outside ({lifted[0]}); make it an argument")
    if any(o.kind == "object" and holes(o.value) for o in captured.forward.outputs):
        raise export_error(compiler, "forward returns tensors inside a container")


def export_error(compiler: Compiled, reason: str, source: str | None = None) -> ExportError:
    """The error for something that a file cannot hold."""
    place = source or method_place(compiler.user.cls.forward)  # type: ignore[attr-defined]
    return ExportError(
        function=compiler.user.cls.__name__, reason=reason, where=place,
        fix="use the class through fusegrad, or change what the reason names.",
    )  # fmt: skip


def require_nameable(
    compiler: Compiled, names: Iterable[str], reserved: Container[str], ascii_only: bool = False
) -> None:
    """Raise ExportError unless a file can call the class and its arguments by their names."""
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name) or (ascii_only and not name.isascii()):
            raise export_error(compiler, f"{name!a} is no name that the file can hold")
        if name in reserved:
            raise export_error(compiler, f"{name!r} is a name that the file has for something else")


def capture_refusal(compiler: Compiled, error: CaptureError) -> ExportError:
    """The error for a Function that cannot be captured."""
    refusal = f"it cannot be traced: {error.facts.get('reason', error)}"
    return export_error(compiler, refusal, error.facts.get("where"))
