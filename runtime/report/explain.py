"""`fusegrad.explain`: what a compiled Function becomes at given shapes, without running it and without a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch.autograd.function import Function

from ...codegen import TARGETS, Kernel, Kernels, Target
from ...codegen.proofs import Proof
from ...ir import Graph, Place, Program, Value
from ...ir.codes import code_of, fix_of
from ...ir.errors import FusegradError, LoweringError
from ...ir.passes.cost import minimal_bytes
from ...ir.passes.fuse import Extern, Step
from ...ir.prims import PRIMS
from ...tracer.capture.capture import OpaqueMet, Session
from ...tracer.methods import backward_method, method_place, uses_setup_context
from ...tracer.opaque.opaque import opaque_of
from ...tracer.trace import CaptureError, Trace
from ..api import compile as compiled
from ..capture.captured import hint_of, present_residuals
from ..capture.guards import is_plain
from ..dispatch.dispatcher import Dispatcher
from ..dispatch.pytree import arguments
from ..execution.executable import Executable, fills_memory, has_outer_product
from ..execution.fusion_report import CutReport, GroupReport, cuts_of, groups_of
from ..execution.generated import Generated
from ..execution.kernel_plan import is_opaque
from ..execution.pipeline import generate, graph_of, text_of
from ..execution.targets import named_target
from ..fallback.records import OpaqueCall, Record, needs_a_fix
from ..functorch.unit import Unit
from ..kernels.cross_compile.pool import Binary
from ..kernels.proofs import line_of, proofs_of
from ..settings.config import numerics, settings
from ..specialize.compiled import Compiled
from ..specialize.compiled_backward import known_kinds, opaque_hints
from ..specialize.derived_backward import DERIVE_JVP, require_transposable, why_no_backward
from ..specialize.linearity import NonLinearJvp
from ..specialize.pipeline import require_equal
from ..specialize.residuals import Chosen
from ..specialize.specialization import Specialization, chosen_residuals, forward_graph
from ..specialize.variants import Variant, variants_of
from ..values.sizes import number
from ..values.tensor_specs import differentiable, is_spec, stand_in
from .residuals import Kept, kept

Sizes = dict[sympy.Symbol, int]
Tensor = torch.Tensor
DEFAULT_TARGET = "cuda:90"
SCHEMA = 2
SPLIT = "forward is split for torch.func: what it saves in between is one more output there"
TRANSPOSED = "the transpose of the derivative of forward, under torch.func; plain autograd raises, as in eager"
BATCHED = "every method over a batch"
UNCALLED = "no call has reached it"
NO_RULE = "over an opaque node no rule is derived; under transforms the class runs as it is written"


class UnknownTargetError(FusegradError, ValueError):
    """A target that is neither a GPU known by name nor "cpu"."""

    message = (
        "explain(target={target!r}): there is no such target\n  at:   {where}\n"
        '  fix:  use "cpu" or one of {known}'
    )


class NothingCapturedError(FusegradError):
    """A graph of a method was asked for that runs as the user wrote it."""

    message = (
        "{function}.{method} has no graph: {reason}\n  at:   {where}\n"
        "  fix:  ask for a method that is compiled, or make this one traceable."
    )


class ExplainedArgumentsError(FusegradError, TypeError):
    """What is to be explained takes other arguments."""

    message = (
        "explain({function}, ...): {detail}\n  at:   {where}\n"
        '  fix:  pass what `apply` takes: tensors, "bf16[8192,4096]", other values; or nothing, for what calls found.'
    )


@dataclass(frozen=True)
class KernelReport:
    """One launch: a generated kernel, or the call of a library op (`source` is then empty).

    Bytes are of device memory; `bytes_cached` are read once more, out of L2, in the same launch.
    """

    name: str
    direction: str
    source: str
    bytes_read: int
    bytes_written: int
    kind: str = "triton"
    bytes_cached: int = 0


@dataclass
class DirectionReport:
    """forward or backward: its graph, its launches, and the least that would have to move."""

    graph: Graph
    steps: list[Step]
    launches: list[KernelReport]
    minimal: int
    kernels: list[Kernels] = field(default_factory=list)
    segments: list[str] = field(default_factory=list)  # with opaque nodes: launches and eager calls, in their order
    reasons: list[str] = field(default_factory=list)
    groups: list[GroupReport] = field(default_factory=list)
    cuts: list[CutReport] = field(default_factory=list)
    products: list[str] = field(default_factory=list)  # which are in kernels, which by the library, and why


@dataclass
class Explanation:
    """What `explain` found. Prints as a report; `to_dict()` for programs."""

    name: str
    target: str
    methods: dict[str, Record]
    directions: dict[str, DirectionReport]
    saved_bytes: int
    residuals: tuple[Place, ...] = ()
    user_outputs: int = 0
    opaque: list[OpaqueCall] = field(default_factory=list)
    sizes: Sizes = field(default_factory=dict)  # of the symbols, at the arguments that were given
    kept: list[Kept] = field(default_factory=list)
    variants: list[Variant] = field(default_factory=list)
    numerics: str = "eager"

    @property
    def kernels(self) -> list[KernelReport]:
        """Every launch, forward first."""
        return [launch for report in self.directions.values() for launch in report.launches]

    @property
    def kernel_records(self) -> list[Kernel]:
        """The generated kernels as codegen made them."""
        return [k for report in self.directions.values() for ks in report.kernels for k in ks.kernels]

    @property
    def proofs(self) -> list[Proof]:
        """Of every generated kernel: whether its accesses are in range for all sizes; some 0.1 s for each."""
        return [p for report in self.directions.values() for p in proofs_of(report.steps, report.kernels)]

    @property
    def module(self) -> str:
        """The Triton module that holds every generated kernel."""
        from ... import codegen

        return codegen.module(self.kernel_records)

    def graph(self, direction: str = "forward") -> Graph:
        """The graph after the passes. Raises NothingCapturedError for a method that runs as written."""
        if direction in self.directions:
            return self.directions[direction].graph
        record = self.methods[direction]
        raise NothingCapturedError(
            function=self.name, method=direction, reason=record.reason or record.status, where=record.where or "unknown"
        )

    @property
    def program(self) -> Program:
        """Both graphs after the passes, and where backward's residuals come from. Only where forward is compiled."""
        backward = {(True,) * self.user_outputs: self.graph("backward")} if "backward" in self.directions else {}
        return Program(self.name, self.graph(), self.residuals, self.user_outputs, dict(backward))

    def binaries(self, *targets: str) -> dict[str, dict[str, Binary]]:
        """The kernels compiled in worker processes, without a GPU: {kernel: {target: Binary}}.

        targets: "cuda:80", "cuda:90", "cuda:100", "hip:gfx942"; by default the explanation's own. A Binary has `asm`
        (ptx and cubin, or amdgcn and hsaco), registers, spills and shared memory (bytes), access widths, or an error.
        """
        from ..kernels.cross_compile.pool import compile_for

        return compile_for(self.kernel_records, self.module, list(targets) or [self.target])

    def metrics(self, target: str | None = None) -> dict[str, dict[str, Any]]:
        """Registers, spills, shared memory and access widths per kernel, cross-compiled for `target`; needs no GPU."""
        where = target or self.target
        return {kernel: vars_of(by_target[where]) for kernel, by_target in self.binaries(where).items()}

    def to_dict(self) -> dict[str, Any]:
        """The facts as plain values that json can write; keys are added, never renamed, within a schema."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "target": self.target,
            "numerics": self.numerics,
            "methods": {name: _method_facts(record) for name, record in self.methods.items()},
            "kernels": [vars(k) | {} for k in self.kernels],
            "launches": {d: len(self._launches(d)) for d in ("forward", "backward")},
            "bytes": self._bytes(),
            "saved_bytes": self.saved_bytes,
            "kept": [k.to_dict() for k in self.kept],
            "groups": {d: [g.to_dict() for g in report.groups] for d, report in self.directions.items()},
            "cuts": {d: [c.to_dict() for c in report.cuts] for d, report in self.directions.items()},
            "opaque": [{**vars(o), "code": code_of(o.told), "fix": fix_of(o.told)} for o in self.opaque],
            "products": {d: report.products for d, report in self.directions.items()},
            "segments": {d: report.segments for d, report in self.directions.items()},
            "variants": [v.to_dict() for v in self.variants],
        }

    def _launches(self, direction: str) -> list[KernelReport]:
        return self.directions[direction].launches if direction in self.directions else []

    def _bytes(self) -> dict[str, int]:
        moved = {d: sum(k.bytes_read + k.bytes_written for k in self._launches(d)) for d in ("forward", "backward")}
        least = {f"minimal_{d}": self.directions[d].minimal if d in self.directions else 0 for d in moved}
        return {**moved, **least}

    def __str__(self) -> str:
        facts = self.to_dict()
        rounding = "" if self.numerics == "eager" else f', numerics="{self.numerics}"'
        lines = [f"{self.name} on {self.target}{rounding}"]
        lines += [_method_line(name, record) for name, record in self.methods.items()]
        for direction in self.directions:
            moved, least = facts["bytes"][direction], facts["bytes"][f"minimal_{direction}"]
            ratio = f", {moved / least:.2f} x the least possible" if least else ""
            lines.append(f"  {direction}: {facts['launches'][direction]} launches, {moved:,} bytes{ratio}")
            lines += [_kernel_line(k) for k in self._launches(direction)]
            lines += [f"    {cut}" for cut in self.directions[direction].cuts]
            lines += [f"    {line}" for line in self.directions[direction].products]
            lines += [f"    {call}" for call in self.opaque if call.method == direction]
        lines.append(f"  saved for backward: {self.saved_bytes:,} bytes")
        lines += [f"    {value}" for value in self.kept]
        lines += [f"  {line_of(proof)}" for proof in self.proofs] if settings().debug else []
        return "\n".join([*lines, *_variant_lines(self.variants)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from .notebook import as_html

        return as_html(self)


def _assumed(expr: sympy.Expr, sizes: Sizes) -> Sizes:
    """The sizes; one that depends on data (of x[mask], say) counts as the largest of the others."""
    largest = max(sizes.values(), default=1)
    return sizes if expr.free_symbols <= set(sizes) else {**dict.fromkeys(expr.free_symbols, largest), **sizes}


def vars_of(binary: Any) -> dict[str, Any]:
    """A binary's figures without its machine code."""
    names = ("registers", "spills", "shared", "accesses", "error")
    return {n: getattr(binary, n, None) for n in names}


def _method_line(name: str, record: Record) -> str:
    why = f": {record.reason}" if record.reason else ""
    why += f" ({record.where})" if record.reason and record.where else ""
    line = f"  {name:<14} {record.status}{why}"
    return f"{line} [{record.code}]\n  {'':<14} fix: {fix_of(record.reason)}" if needs_a_fix(record) else line


def _method_facts(record: Record) -> dict[str, str | None]:
    fix = fix_of(record.reason) if needs_a_fix(record) else None
    return {"status": record.status, "reason": record.reason, "where": record.where, "code": record.code, "fix": fix}


def _variant_lines(variants: Sequence[Variant]) -> list[str]:
    """What the class was captured for so far."""
    lines = [f"  captured for {len(variants)} variant{'s' * (len(variants) > 1)}:"] if variants else []
    for number_, variant in enumerate(variants, 1):
        facts = variant.difference or "; ".join(f"{name}: {fact}" for name, fact in variant.facts.items())
        lines.append(f"    {number_}. {facts}")
        lines += [f"       if {' and '.join(variant.conditions)}"] if variant.conditions else []
        lines += [f"       {kernel}" for kernel in variant.kernels]
        lines += [f"       {variant.disk}"] if variant.disk else []
    return lines


def _kernel_line(kernel: KernelReport) -> str:
    again = f"  again from L2 {kernel.bytes_cached:,}" if kernel.bytes_cached else ""
    return f"    {kernel.name:<32} {kernel.kind:<7} reads {kernel.bytes_read:,}  writes {kernel.bytes_written:,}{again}"


# ------------------------------------------------------------------ the report
def explain(target_class: Any, /, *args: Any, target: str | None = None) -> Explanation:
    """What `target_class` (compiled or not yet) becomes for these arguments.

    args: tensors (real or meta), specifications such as "bf16[8192,4096]", or any other argument of the Function.
    Without any, of a Function that takes some: what the calls so far found.
    target: "cuda:80", "cuda:90", "cuda:100", "hip:gfx942", "cpu"; by default the GPU generation sm_90.
    Nothing runs but, for real tensors, the comparison of the first call. Raises SpecError, UnknownTargetError,
    ExplainedArgumentsError.
    """
    compiler, args = compiler_of(target_class), arguments(target_class, args)
    where = target or DEFAULT_TARGET
    if where != "cpu" and where not in TARGETS:
        raise UnknownTargetError(target=where, known=", ".join(TARGETS))
    if (unfit := _unfit(compiler, args)) is not None:
        if args:
            place = method_place(compiler.cls.forward)  # type: ignore[attr-defined]
            raise ExplainedArgumentsError(function=compiler.cls.__name__, detail=unfit, where=place)
        return _as_called(compiler, where)
    stand_ins = differentiable([stand_in(a) for a in compiler.complete(args)])
    methods = _methods(compiler)
    specialization = _forward(compiler, stand_ins, args, methods)
    found = Explanation(compiler.cls.__name__, where, methods, {}, 0, numerics=numerics(compiler.numerics))
    if specialization is not None:
        found.sizes = sizes = {**opaque_hints(specialization.backward), **specialization.captured.sizes(stand_ins)}
        has_backward = _backward_is_captured(compiler, specialization, methods)
        describe = _on_cpu if where == "cpu" else _on_gpu
        describe(found, specialization, sizes, has_backward)
        found.opaque = opaque_calls(specialization, has_backward)
    elif (unit := _backward_beside(compiler)) is not None and methods["backward"].status == "compiled":
        _of_unit(found, unit, *unit.graphs[-1][2::2])
    found.opaque = found.opaque or list(compiler.opaque_calls)
    if found.opaque:
        derived = [name for name, record in methods.items() if record.status == "derived"]
        methods |= {name: Record("absent", NO_RULE, found.opaque[0].where) for name in derived}
    for direction, report in found.directions.items():
        if report.reasons:
            methods[direction] = replace(methods[direction], reason="; ".join(report.reasons))
    found.variants = variants_of(compiler)
    return found


def _unfit(compiler: Compiled, args: Sequence[Any]) -> str | None:
    """Why forward cannot be called with these arguments."""
    sources = getattr(compiler.cls, "_fusegrad_sources", None)
    method: Any = compiler.cls.forward if sources is None else sources[0]  # type: ignore[attr-defined]
    ctx = () if sources is not None or uses_setup_context(compiler.cls) else (None,)
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # of compiled code
        return None
    try:
        signature.bind(*ctx, *args)
    except TypeError as error:
        return str(error)
    return None


def _as_called(compiler: Compiled, where: str) -> Explanation:
    """What is known of a class without the arguments of a call."""
    methods = {name: _met(compiler, name, record) for name, record in _methods(compiler).items()}
    found = Explanation(compiler.cls.__name__, where, methods, {}, 0, numerics=numerics(compiler.numerics))
    found.opaque, found.variants = list(compiler.opaque_calls), variants_of(compiler)
    return found


def _met(compiler: Compiled, method: str, record: Record) -> Record:
    """A record, unless it says of a method that it is compiled, and no call was there at which it was."""
    called = method in compiler.records or (method == "setup_context" and "forward" in compiler.records)
    return record if called or record.status != "compiled" else Record("not yet captured", UNCALLED)


def _backward_beside(compiler: Compiled) -> Unit | None:
    """The backward of a class whose forward runs as written, once it was captured."""
    units = getattr(vars(compiler).get("beside"), "units", {}).values()
    return next((unit for unit in reversed(units) if unit.graphs), None)


def _of_unit(found: Explanation, unit: Unit, executable: Executable, session: Session) -> None:
    """Its kernels, at the sizes that it was captured with: an opaque forward does not tell others."""
    trace = executable.trace
    sizes = {s: hint_of(session, s) for s in executable.binder.sources}
    found.methods["backward"] = Record("compiled", "figures are for the sizes of its first call")
    try:
        graph = None if found.target == "cpu" else graph_of(trace, unit.name)
        report = graph and _kernels_report(graph, "backward", sizes, named_target(found.target, found.numerics))
    except LoweringError:
        report = None
    found.directions["backward"] = report or _aten_report(trace, unit.name, "backward", sizes)


def compiler_of(target: Any) -> Dispatcher:
    """The compiler behind a compiled class or function; a fresh one for a plain class."""
    known = getattr(target, "_fusegrad", None)
    if isinstance(known, Dispatcher):
        return known
    return compiled(target)._fusegrad  # type: ignore[no-any-return]


def _methods(compiler: Compiled) -> dict[str, Record]:
    cls = compiler.cls
    absent = Record("absent")
    has_backward = backward_method(cls) is not None
    own = {n: getattr(cls, n) is not getattr(Function, n) for n in ("jvp", "vmap")}
    reasons = {role: compiler.opaque(role) for role in compiler.methods.roles()}
    opaque = {role: compiler.record_of(role, error) for role, error in reasons.items() if error is not None}
    found = {
        "forward": Record("compiled"),
        "setup_context": Record("compiled") if uses_setup_context(cls) else Record("derived", SPLIT),
        "backward": _backward(compiler) if has_backward else absent if own["jvp"] else Record("derived", TRANSPOSED),
        "jvp": _own_jvp(compiler) if own["jvp"] else _derived_jvp(compiler),
        "vmap": Record("opaque", "the user's own rule runs as it is") if own["vmap"] else Record("derived", BATCHED),
    }
    known = {n: _in_part(compiler, n, r) for n, r in compiler.records.items() if r.status == "opaque"}
    return _beside_opaque_ones(compiler, _at_run_time(compiler, found) | opaque | known)


def _in_part(compiler: Compiled, method: str, record: Record) -> Record:
    """A record that is of some arguments only, where the method is compiled for others."""
    captured = [s for found in compiler.known.values() for s in found]
    serves = {"forward": bool(captured), "backward": any(s.backward.serves for s in captured)}
    if not serves.get(method):
        return record
    return Record("compiled", f"{record.reason}; for such arguments it runs as written", record.where)


def _at_run_time(compiler: Compiled, methods: dict[str, Record]) -> dict[str, Record]:
    """With what calls found out: kernels that were refused, operations that run between others."""
    told = {n: r for n, r in compiler.records.items() if r.status == "compiled" and r.reason is not None}
    return methods | {n: r for n, r in told.items() if methods.get(n, Record("")).status == "compiled"}


def _backward(compiler: Compiled) -> Record:
    return Record("derived", "the transpose of jvp") if compiler.derives_backward else Record("compiled")


def _derived_jvp(compiler: Compiled) -> Record:
    if compiler.derive_jvp is False:
        return Record("absent", "it is compiled with derive_jvp=False")
    alone = backward_method(compiler.cls) is None or hasattr(compiler.cls, "_fusegrad_sources")
    return Record("derived", DERIVE_JVP["forward alone" if alone else compiler.derive_jvp])


def _own_jvp(compiler: Compiled) -> Record:
    """The user's jvp is compiled where it is declared traceable (or everything has to be)."""
    promised = compiler.must_capture("jvp")
    return Record("compiled") if promised else Record("opaque", "the user's own rule runs as it is")


def _beside_opaque_ones(compiler: Compiled, methods: dict[str, Record]) -> dict[str, Record]:
    """Nothing is derived over an opaque method; backward is captured at its first call where forward is one."""
    forward, known = methods["forward"], compiler.records.get("backward", Record("absent"))
    if "opaque" in (forward.status, methods["backward"].status):
        methods |= {name: Record("absent") for name, r in methods.items() if r.status == "derived"}
    if forward.status != "opaque":
        return methods
    if methods["setup_context"].status == "compiled":
        methods["setup_context"] = forward
    if methods["backward"].status == "compiled" and known.status != "compiled":
        methods["backward"] = Record("not yet captured", "forward runs as written, so it is captured at its first call")
    return methods


def _forward(
    compiler: Compiled, stand_ins: Sequence[Any], real: Sequence[Any], methods: dict[str, Record]
) -> Specialization | None:
    if methods["forward"].status == "opaque":
        return None
    try:
        specialization = compiler.capture_only(stand_ins)
        if all(is_plain(a) and a.device.type != "meta" for a in real if isinstance(a, Tensor)) and not any(
            map(is_spec, real)
        ):
            require_equal(specialization, compiler.complete(real))
    except OpaqueMet as met:
        return _known_split(compiler, stand_ins, met, methods)
    except CaptureError as error:
        methods["forward"] = compiler.record_of("forward", error)
        _beside_opaque_ones(compiler, methods)
        return None
    return specialization


def _known_split(
    compiler: Compiled, stand_ins: Sequence[Any], met: OpaqueMet, methods: dict[str, Record]
) -> Specialization | None:
    """A method with opaque nodes, as its calls so far left it: explaining runs no opaque body."""
    tensors = [a for a in stand_ins if isinstance(a, Tensor)]
    known = [s for found in compiler.known.values() for s in found if s.captured.opaque and s.captured.takes(stand_ins)]
    fitting = next((s for s in known if s.captured.guard(tensors)), None)
    if fitting is None:
        reason = f"{met.facts['reason']}: its segments are known after a call"
        methods["forward"] = Record("compiled", reason, met.where)
    return fitting


def opaque_calls(specialization: Specialization, has_backward: bool) -> list[OpaqueCall]:
    """The nested calls that run as the user wrote them, forward's first."""
    found = [OpaqueCall.of(node, "forward") for node in specialization.captured.opaque]
    if has_backward:
        trace = specialization.backward.entry(known_kinds(specialization.backward)).trace
        found += [OpaqueCall.of(node, "backward") for node in trace.opaque]
    return found


def _backward_is_captured(compiler: Compiled, specialization: Specialization, methods: dict[str, Record]) -> bool:
    if methods["backward"].status not in ("compiled", "derived") or backward_method(compiler.cls) is None:
        return False
    try:
        if compiler.derives_backward:
            require_transposable(compiler, specialization)
        specialization.backward.entry(known_kinds(specialization.backward))
    except NonLinearJvp as error:
        methods["backward"] = Record("absent", f"jvp is not linear: {error.facts['why']}", error.facts["where"])
        return False
    except CaptureError as error:
        if compiler.derives_backward:
            methods["backward"] = Record("absent", *why_no_backward(compiler.user_class, error))
            return False
        if isinstance(error, OpaqueMet):
            reason = f"{error.facts['reason']}: its segments are known after a call"
            methods["backward"] = Record("compiled", reason, error.where)
            return False
        methods["backward"] = compiler.record_of("backward", error)
        _beside_opaque_ones(compiler, methods)
        return False
    return True


def _on_gpu(found: Explanation, spec: Specialization, sizes: Sizes, has_backward: bool) -> None:
    """Kernels and library calls, with the residuals that a GPU backend would choose."""
    captured = spec.captured
    target = named_target(found.target, found.numerics)
    chosen = chosen_residuals(spec, sizes) if has_backward else None
    found.kept = kept(spec, chosen, sizes) if has_backward else []
    found.user_outputs = len(captured.forward.fake_outputs)
    try:
        forward = forward_graph(spec, chosen)
        places = chosen.places if chosen else captured.residual_places
        found.residuals = tuple(p for p in places if p is not None)
        found.saved_bytes = _saved_bytes(forward, found, spec, sizes)
        hidden = [None if i in captured.skip else o for i, o in enumerate(forward.outputs)]
        forward.outputs = hidden
        found.directions["forward"] = _kernels_report(forward, "forward", sizes, target)
        if has_backward:
            found.directions["backward"] = _kernels_report(_backward_graph(spec, chosen), "backward", sizes, target)
    except LoweringError as error:
        _on_cpu(found, spec, sizes, has_backward)
        for report in found.directions.values():
            report.reasons.append(f"no kernels, the captured ATen operations run one by one: {error}")


def _backward_graph(spec: Specialization, chosen: Chosen | None) -> Graph:
    kinds, name = known_kinds(spec.backward), f"{spec.captured.name}_backward"
    entry = spec.backward.entry(kinds)
    return graph_of(entry.trace, name) if chosen is None else chosen.backward_graph(kinds, entry, name)


def _saved_bytes(forward: Graph, found: Explanation, spec: Specialization, sizes: Sizes) -> int:
    """Bytes of the distinct tensors kept for backward."""
    total = 0
    for place in dict.fromkeys(found.residuals):
        if place.kind == "hidden":
            value = forward.outputs[found.user_outputs + place.index]
            total += number(value.aval.nbytes, sizes) if value is not None else 0
        else:
            fake = spec.captured.forward.fake_at(place)
            total += _bytes(fake, sizes) if fake is not None else 0
    return total


def _bytes(fake: Tensor, sizes: Sizes) -> int:
    total = fake.element_size()
    for size in fake.shape:
        total *= size if isinstance(size, int) else number(size.node.expr, _assumed(size.node.expr, sizes))
    return total


def _kernels_report(graph: Graph, direction: str, sizes: Sizes, target: Target) -> DirectionReport:
    made = generate(graph, target, sizes, graph.name)
    least = number(minimal_bytes(graph), sizes)
    report = DirectionReport(graph, made.steps, [], least, list(made.kernels.values()), made.reasons)
    report.groups, report.cuts = groups_of(made), cuts_of(graph, made)
    report.products = [str(d) for d in made.products]
    for at, step in enumerate(made.steps):
        if is_opaque(step):
            continue
        if at in made.kernels:
            report.launches += [_kernel_report(k, direction, sizes) for k in made.kernels[at].kernels]
        elif isinstance(step, Extern):
            report.launches.append(_node_report(step.value, direction, sizes))
    if any(map(is_opaque, made.steps)):
        report.segments = _segments(made)
    return report


def _segments(made: Generated) -> list[str]:
    """What runs, in order: kernels by name, library calls, and the user's own nested calls."""
    lines: list[str] = []
    for at, step in enumerate(made.steps):
        if at in made.kernels:
            lines += [kernel.name for kernel in made.kernels[at].kernels]
        elif isinstance(step, Extern):
            node, library = opaque_of(step.value), str(step.value.params.get("op", "call"))
            lines.append(library if node is None else f"eager {node.name} ({node.where})")
    return lines


def _computed(graph: Graph) -> list[Value]:
    return [v for v in graph.order() if PRIMS[v.prim].family not in ("layout", "source", "pick")]


def _kernel_report(kernel: Kernel, direction: str, sizes: Sizes) -> KernelReport:
    read = sum(number(b, sizes) for b in kernel.reads.values())
    written = sum(number(b, sizes) for b in kernel.writes.values())
    cached = sum(number(b, sizes) for b in kernel.cached.values())
    text = text_of(Kernels((kernel,)))
    return KernelReport(kernel.name, direction, text, read, written, bytes_cached=cached)


def _node_report(value: Value, direction: str, sizes: Sizes) -> KernelReport:
    name = str(value.params.get("op") or getattr(value.params.get("target"), "__name__", value.prim))
    read = sum(number(t.nbytes, sizes) for a in value.args for t in a.avals)
    written = sum(number(t.nbytes, sizes) for t in value.avals)
    return KernelReport(name, direction, "", read, written, kind="library")


def _on_cpu(found: Explanation, spec: Specialization, sizes: Sizes, has_backward: bool) -> None:
    """The reference backend calls the captured ATen operations one by one."""
    captured = spec.captured
    places = dict.fromkeys(p for p in captured.residual_places if p is not None)
    found.residuals, found.user_outputs = tuple(present_residuals(captured)), len(captured.forward.fake_outputs)
    found.saved_bytes = sum(_bytes(f, sizes) for p in places if (f := captured.forward.fake_at(p)) is not None)
    found.kept = kept(spec, None, sizes) if has_backward else []
    traces = {"forward": captured.forward.trace}
    if has_backward:
        traces["backward"] = spec.backward.entry(known_kinds(spec.backward)).trace
    for direction, trace in traces.items():
        found.directions[direction] = _aten_report(trace, f"{captured.name}_{direction}", direction, sizes)


def _aten_report(trace: Trace, name: str, direction: str, sizes: Sizes) -> DirectionReport:
    try:
        graph = graph_of(trace, name)
    except LoweringError:
        graph = Graph(name)
    launches = [r for n in trace.graph_module.graph.nodes if (r := _aten_launch(n, direction, sizes)) is not None]
    contracted = has_outer_product(trace) and not graph.mutations and len(graph)
    if contracted and fills_memory(trace, sizes):  # then the lowered graph runs, through torch
        launches = [_node_report(v, direction, sizes) for v in _computed(graph)]
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


def _aten_launch(node: torch.fx.Node, direction: str, sizes: Sizes) -> KernelReport | None:
    value, schema = node.meta.get("val"), getattr(node.target, "_schema", None)
    if node.op != "call_function" or not isinstance(value, Tensor) or schema is None:
        return None
    if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        return None
    operands = [a.meta["val"] for a in node.all_input_nodes if isinstance(a.meta.get("val"), Tensor)]
    read = sum(_bytes(o, sizes) for o in operands)
    return KernelReport(str(node.target), direction, "", read, _bytes(value, sizes), "aten")
