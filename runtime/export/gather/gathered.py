"""What an export writes down: one Function at one key, for one target, as graphs, steps and kernels."""

from __future__ import annotations

import keyword
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from ....codegen import TARGETS, Kernels, Target
from ....ir import Graph
from ....ir.errors import FusegradError, LoweringError
from ....ir.lazy_attribute import lazy_attribute
from ....ir.passes.fuse import Extern, Group, Step
from ....ir.program import ValueRef
from ....tracer.containers import holes
from ....tracer.methods import backward_method, method_place, parameter_names, uses_setup_context
from ....tracer.opaque.opaque import opaque_of
from ....tracer.trace import CaptureError
from ...capture.captured_backward import BackwardEntry, predicted_kinds
from ...capture.guards import is_float
from ...compiled.compiled import Compiled
from ...dispatch.pytree import arguments
from ...execution.pipeline import generate, graph_of, kernels_of
from ...execution.targets import named_target
from ...execution.variants import are_for_multiples, counterpart_sizes
from ...report.explain import DEFAULT_TARGET, UnknownTargetError, compiler_of
from ...settings.config import numerics
from ...specialize.pipeline import choose_residuals
from ...specialize.specialization import Specialization, forward_graph
from ...values.tensor_specs import fake_argument, with_gradients_asked
from .tangents import NoTangents, tangents_of
from .unit_sizes import may_be_one

Tensor = torch.Tensor
Sizes = dict[sympy.Symbol, int]
Source = tuple[int, str, int]
"""Which tensor argument tells a symbol, by "size" or "stride", on which axis."""


class ExportError(FusegradError):
    """Something about a Function that a file without fusegrad cannot hold."""

    message = "export({function}): {reason}\n  at:   {where}\n  fix:  {fix}"


@dataclass(frozen=True)
class Part:
    """forward or backward: its graph, its steps, and for each fused step one or two versions of its kernels.

    The first version may have conditions on sizes, the last has none but those of the whole. `passed`: outputs that are
    an input as it came, by the number of the input. `sizes`: symbols that the inputs' shapes do not tell, given apart.
    """

    method: str
    graph: Graph
    steps: list[Step]
    kernels: dict[int, list[Kernels]]
    passed: dict[int, int]
    sizes: tuple[sympy.Symbol, ...]
    where: str


@dataclass(frozen=True)
class Gathered:
    """A whole Function. `residuals` say where backward's first inputs come from, `slots` where the tensors stand."""

    compiler: Compiled
    cls: type
    args: tuple[Any, ...]
    names: tuple[str, ...]
    specialization: Specialization
    target: str
    sizes: Sizes
    forward: Part
    backward: Part | None
    residuals: tuple[ValueRef, ...]
    jvp: Part | None = None
    jvp_reads: tuple[ValueRef, ...] = ()

    @property
    def name(self) -> str:
        return self.cls.__name__

    @property
    def parts(self) -> list[Part]:
        return [p for p in (self.forward, self.backward, self.jvp) if p is not None]

    @property
    def pinned(self) -> Sizes:
        """Symbols whose values are compiled into some kernel."""
        versions = [k for p in self.parts for found in p.kernels.values() for k in found]
        return {s: v for version in versions for kernel in version.kernels for s, v in kernel.pinned.items()}

    @property
    def guards(self) -> tuple[Any, ...]:
        """What capturing and lowering both directions assumed about sizes."""
        return self.specialization.captured.session.conditions(self.specialization.captured.symbols)

    @property
    def sources(self) -> dict[sympy.Symbol, Source]:
        """Where the arguments tell the symbols."""
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


def gathered(
    target_class: Any, args: Sequence[Any], target: str | None = None, derivatives: Sequence[str] = ()
) -> Gathered:
    """Capture and generate. Raises ExportError where something would have to run as the user wrote it.

    derivatives: "jvp", for kernels of forward mode.
    """
    compiler, given = compiler_of(target_class), arguments(target_class, tuple(args))
    where = target or DEFAULT_TARGET
    if where not in TARGETS:
        raise UnknownTargetError(target=where, known=", ".join(TARGETS))
    complete = compiler.user.complete(given)
    stand_ins = with_gradients_asked([fake_argument(a) for a in complete])
    try:
        return _gathered(compiler, stand_ins, where, derivatives)
    except NoTangents as error:
        raise apart(compiler, f"it has no jvp to write down: {error}") from error
    except CaptureError as error:
        raise refused(compiler, error) from error
    except LoweringError as error:
        raise apart(compiler, f"it cannot be written in kernels: {error}") from error


def captured(target_class: Any, args: Sequence[Any]) -> tuple[Compiled, Specialization, list[Any]]:
    """Forward, and backward if there is one, as captured. Raises ExportError where a file could not hold it."""
    compiler = compiler_of(target_class)
    complete = compiler.user.complete(arguments(target_class, tuple(args)))
    stand_ins = with_gradients_asked([fake_argument(a) for a in complete])
    try:
        spec = compiler.captures.only(stand_ins)
        require_closed(compiler, spec)
        if has_backward(compiler, stand_ins):
            require_closed(compiler, spec, spec.backward.entry(predicted_kinds(spec.captured)))
    except CaptureError as error:
        raise refused(compiler, error) from error
    return compiler, spec, stand_ins


def has_backward(compiler: Compiled, stand_ins: Sequence[Any]) -> bool:
    """Whether there is a backward, and something for it to differentiate."""
    return backward_method(compiler.user.cls) is not None and any(map(is_float, stand_ins))


def _gathered(compiler: Compiled, stand_ins: list[Any], target: str, derivatives: Sequence[str]) -> Gathered:
    spec = compiler.captures.only(stand_ins)
    require_closed(compiler, spec)
    sizes: Sizes = dict(spec.captured.sizes(stand_ins))
    differentiates = has_backward(compiler, stand_ins)
    chosen = choose_residuals(spec, sizes) if differentiates else None
    graph = forward_graph(spec, chosen)
    graph.outputs = [None if i in spec.captured.skip else o for i, o in enumerate(graph.outputs)]
    places = chosen.places if chosen else spec.captured.residual_places
    forward = part_of(compiler, graph, "forward", target, sizes, {}, ())
    backward = whole = None
    if differentiates:
        entry = spec.backward.entry(predicted_kinds(spec.captured))
        require_closed(compiler, spec, entry)
        name = f"{spec.captured.name}_backward"
        kinds = predicted_kinds(spec.captured)
        after = graph_of(entry.trace, name) if chosen is None else chosen.backward_graph(kinds, entry, name)
        whole = after.copy()
        after.outputs = [None if i in entry.passed_gradients else o for i, o in enumerate(after.outputs)]
        symbols = tuple(spec.captured.backward_symbols)
        backward = part_of(compiler, after, "backward", target, sizes, entry.passed_gradients, symbols)
    skip = 0 if uses_setup_context(compiler.user.cls) else 1
    names = tuple(parameter_names(compiler.user.cls.forward, len(stand_ins), skip, "argument"))  # type: ignore[attr-defined]
    kept = tuple(p for p in places if p is not None)
    jvp: Part | None = None
    reads: Sequence[ValueRef] = ()
    if "jvp" in derivatives:
        pushing, reads = tangents_of(compiler, spec, whole, kept)
        jvp = part_of(compiler, pushing, "jvp", target, sizes, {}, ())
    return Gathered(
        compiler, compiler.user.cls, tuple(stand_ins), names, spec, target, sizes, forward, backward, kept, jvp,
        tuple(reads),
    )


def part_of(
    compiler: Compiled, graph: Graph, method: str, target: str, sizes: Sizes,
    passed: dict[int, int], told_apart: tuple[sympy.Symbol, ...],
) -> Part:  # fmt: skip
    """The steps and kernels of a graph. Raises ExportError where a method would have to run as the user wrote it."""
    derived = method == "jvp" and not compiler.user.overrides("jvp")
    where = method_place(getattr(compiler.user.cls, "backward" if derived else method))
    device = named_target(target, numerics(compiler.options.numerics))
    made = generate(graph, device, sizes, graph.name)
    for step in made.steps:
        if isinstance(step, Extern) and (node := opaque_of(step.value)) is not None:
            raise apart(compiler, f"{node.name} is an opaque node in its {method}", node.where)
    kernels = {
        at: _versions(step, first, device, sizes, made.names[at])
        for at, first in made.kernels.items()
        if isinstance(step := made.steps[at], Group)
    }
    return Part(method, graph, made.steps, kernels, passed, told_apart, where)


def _versions(group: Group, first: Kernels, target: Target, sizes: Sizes, name: str) -> list[Kernels]:
    """Kernels for these sizes, and their counterpart: wide accesses where sizes are multiples, any size else."""
    pinned, aligned = {s for k in first.kernels for s in k.pinned}, _is_aligned(first)
    hints = counterpart_sizes(sizes, pinned, aligned)
    if hints is None:
        return [first]
    other = kernels_of(group, target, hints, f"{name}_{'any_size' if aligned else 'aligned'}")
    if _is_aligned(other) == aligned or any(s not in pinned for k in other.kernels for s in k.pinned):
        return [first]
    return [first, other] if aligned else [other, first]


def _is_aligned(kernels: Kernels) -> bool:
    return are_for_multiples(g for k in kernels.kernels for g in k.guards)


# ------------------------------------------------------------------ what cannot be written down
def require_closed(compiler: Compiled, spec: Specialization, entry: BackwardEntry | None = None) -> None:
    """Refuse what reads, writes or calls things outside the file."""
    captured = spec.captured
    method = "forward" if entry is None else "backward"
    trace, lifted = (captured.forward.trace, captured.lifted) if entry is None else (entry.trace, entry.lifted)
    if trace.opaque:
        node = trace.opaque[0]
        raise apart(compiler, f"{node.name} is an opaque node in its {method}", node.where)
    if lifted:
        raise apart(compiler, f"{method} reads a tensor from outside ({lifted[0]}); make it an argument")
    if any(o.kind == "object" and holes(o.value) for o in captured.forward.outputs):
        raise apart(compiler, "forward returns tensors inside a container")


def apart(compiler: Compiled, reason: str, where: str | None = None) -> ExportError:
    """The error for something that a file cannot hold."""
    place = where or method_place(compiler.user.cls.forward)  # type: ignore[attr-defined]
    return ExportError(
        function=compiler.user.cls.__name__, reason=reason, where=place,
        fix="use the class through fusegrad, or change what the reason names.",
    )  # fmt: skip


def require_nameable(compiler: Compiled, names: Iterable[str], taken: Container[str], ascii_only: bool = False) -> None:
    """Raise ExportError unless a file can call the class and its arguments by their names."""
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name) or (ascii_only and not name.isascii()):
            raise apart(compiler, f"{name!a} is no name that the file can hold")
        if name in taken:
            raise apart(compiler, f"{name!r} is a name that the file has for something else")


def refused(compiler: Compiled, error: CaptureError) -> ExportError:
    """The error for a Function that cannot be captured."""
    return apart(compiler, f"it cannot be traced: {error.facts.get('reason', error)}", error.facts.get("where"))
