"""`fusegrad.explain`: what a compiled Function becomes at given shapes, without running it and without a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...ir import Graph
from ...ir.errors import FusegradError, LoweringError
from ...ir.switches import use_switch_state
from ...tracer.capture.capture import OpaqueCallError
from ...tracer.methods import backward_method, method_place
from ...tracer.trace import CaptureError
from ..api import compile as compiled
from ..capture.captured import CapturedFunction, hint_of, present_residuals
from ..capture.guards import is_plain
from ..compiled.compiled import Compiled
from ..compiled.derived_backward import require_transposable, why_no_backward
from ..compiled.variants import variants_of
from ..dispatch.dispatcher import Dispatcher
from ..dispatch.pytree import arguments
from ..execution.graph_to_kernels import graph_of
from ..execution.targets import UnknownTargetError as UnknownTargetError
from ..execution.targets import named_target, target_name
from ..fallback.records import OpaqueCall, Record
from ..functorch.graphs import CachedGraph
from ..functorch.unit import TransformableGraph
from ..settings.config import numerics
from ..specialize.comparisons import ComparedPlan, for_a_call, why_as_traced
from ..specialize.compiled_backward import known_kinds, opaque_hints
from ..specialize.linearity import NonLinearJvp
from ..specialize.pipeline import choose_residuals, require_equal
from ..specialize.residuals import ResidualPlan
from ..specialize.specialization import Specialization, forward_graph
from ..values.named_sizes import with_numbers
from ..values.sizes import Sizes, number
from ..values.tensor_specs import fake_argument, is_spec, with_gradients_asked
from .argument_errors import own_error
from .costs.eager_cost import eager_cost, fake_bytes
from .costs.peak_memory import peak_of_trace
from .directions import aten_report, kernels_report
from .explanation import Explanation
from .methods import NO_RULE, method_records, record_of_calls, without_rules_over_opaque
from .residuals import residual_rows

Tensor = torch.Tensor
DEFAULT_TARGET = "cuda:90"


class ExplainedArgumentsError(FusegradError, TypeError):
    """The Function takes other arguments than those given."""

    message = (
        "explain({function}, ...): {detail}\n  at:   {where}\n"
        '  fix:  pass what `apply` takes: tensors, "bf16[8192,4096]", other values; or nothing, for what calls found.'
    )


# ------------------------------------------------------------------ the report
def explain(target_class: Any, /, *args: Any, target: str | None = None) -> Explanation:
    """Explain what a Function becomes for these arguments: methods, kernels, launches, bytes, saved tensors.

    Nothing runs but, for real tensors, the comparison of the first call.

    Args:
        target_class: A Function class or a function, compiled or not yet.
        args: Of one call: tensors (real or meta), specifications such as "bf16[8192,4096]" or "bf16[M,N]" (names have
            usual sizes), or any other argument of the Function. Without any, of a Function that takes some: what the
            calls so far found.
        target: A device ("h100", "4090", "t4", "mi300x"), a target ("cuda:80", "cuda:90", "hip:gfx942"), or "cpu"; by
            default the GPU generation sm_90.

    Returns:
        A report that prints, with everything in it as attributes.

    Raises:
        SpecError: for a specification that cannot be read.
        UnknownTargetError: for another target.
        ExplainedArgumentsError: for arguments that the Function does not take.
    """
    compiler, args = compiler_of(target_class), arguments(target_class, with_numbers(args, {}).args)
    device = target or DEFAULT_TARGET
    if device != "cpu":
        target_name(device)
    if (unfit := _binding_error(compiler, args)) is not None:
        if args:
            place = method_place(compiler.user.cls.forward)  # type: ignore[attr-defined]
            raise ExplainedArgumentsError(function=compiler.user.cls.__name__, detail=unfit, where=place)
        return _explain_class(compiler, device)
    # The methods by their records first; capturing forward, then backward, says more of some.
    stand_ins = with_gradients_asked([fake_argument(a) for a in compiler.user.complete(args)])
    methods = method_records(compiler)
    specialization = _forward(compiler, stand_ins, args, methods)
    explanation = _explanation(compiler, device, methods)
    if specialization is not None:
        hints, known_sizes = opaque_hints(specialization.backward), specialization.captured.sizes(stand_ins)
        explanation.sizes = sizes = {**hints, **known_sizes}
        has_backward = _backward_is_captured(compiler, specialization, methods)
        describe = _on_cpu if device == "cpu" else _on_gpu
        with use_switch_state(specialization.captured.switches):
            describe(explanation, specialization, sizes, has_backward)
        explanation.opaque = opaque_calls(specialization, has_backward)
    elif (unit := _backward_of_opaque_forward(compiler)) is not None and methods["backward"].status == "compiled":
        _describe_backward_unit(explanation, unit, unit.graphs.entries[-1])
    explanation.opaque = explanation.opaque or list(compiler.ledger.opaque_calls)
    if explanation.opaque:
        derived = [name for name, record in methods.items() if record.status == "derived"]
        methods |= {name: Record("absent", NO_RULE, explanation.opaque[0].where) for name in derived}
    for direction, report in explanation.directions.items():
        if report.reasons:
            reason = "; ".join(report.reasons)
            methods[direction] = replace(methods[direction], reason=reason)
            if report.is_unlaunched:
                methods[direction] = replace(methods[direction], status="opaque")
    explanation.variants = variants_of(compiler)
    return explanation


def _binding_error(compiler: Compiled, args: Sequence[Any]) -> str | None:
    """The reason why forward cannot be called with these arguments, or None."""
    function = compiler.user.plain_function
    method: Any = function or compiler.user.method("forward")
    ctx = () if function is not None or compiler.user.setup_style else (None,)
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # of compiled code
        return None
    try:
        signature.bind(*ctx, *args)
    except TypeError as error:
        return str(error)
    return None


def _explanation(compiler: Compiled, device: str, methods: dict[str, Record]) -> Explanation:
    """Without directions so far."""
    name, rounding = compiler.user.cls.__name__, numerics(compiler.options.numerics)
    target = device if device == "cpu" else target_name(device)
    return Explanation(name, target, methods, {}, 0, numerics=rounding, device=device)


def _explain_class(compiler: Compiled, device: str) -> Explanation:
    """Explain a class by its calls so far, without arguments."""
    methods = {name: record_of_calls(compiler, name, record) for name, record in method_records(compiler).items()}
    explanation = _explanation(compiler, device, methods)
    explanation.opaque, explanation.variants = list(compiler.ledger.opaque_calls), variants_of(compiler)
    return explanation


def _backward_of_opaque_forward(compiler: Compiled) -> TransformableGraph | None:
    """The backward of a class whose forward runs in eager, once it was traced."""
    _, forward = compiler.eager_forward or (None, None)
    units = getattr(forward, "units", {}).values()
    return next((unit for unit in reversed(units) if unit.graphs), None)


def _describe_backward_unit(explanation: Explanation, unit: TransformableGraph, entry: CachedGraph) -> None:
    """Its kernels, at the sizes that it was traced with: an opaque forward does not tell others."""
    trace = entry.executable.trace
    sizes = {s: hint_of(entry.session, s) for s in entry.executable.binder.sources}
    explanation.methods["backward"] = Record("compiled", "figures are for the sizes of its first call")
    try:
        graph = None if explanation.target == "cpu" else graph_of(trace, unit.name)
        report = graph and kernels_report(
            graph, "backward", sizes, named_target(explanation.device, explanation.numerics)
        )
    except LoweringError:
        report = None
    explanation.directions["backward"] = report or aten_report(trace, unit.name, "backward", sizes)


def compiler_of(target: Any) -> Dispatcher:
    """The compiler behind a compiled class or function; a fresh one for a plain class."""
    compiler = getattr(target, "_fusegrad", None)
    if isinstance(compiler, Dispatcher):
        return compiler
    return compiled(target)._fusegrad  # type: ignore[no-any-return]


def _forward(
    compiler: Compiled, stand_ins: Sequence[Any], real: Sequence[Any], methods: dict[str, Record]
) -> Specialization | None:
    if methods["forward"].status == "opaque":
        return None
    # Captured on stand-ins; real tensors are compared as at a first call, so that a refusal there is on record here.
    try:
        specialization = compiler.captures.only(stand_ins)
        if not _is_equal(compiler, specialization, real):
            specialization = compiler.captures.only(stand_ins, rolls=0)
            require_equal(specialization, compiler.user.complete(real))
        _note_steps(compiler, specialization, methods)
    except OpaqueCallError as met:
        _require_that_eager_runs(compiler, stand_ins, met)
        return _known_split(compiler, stand_ins, met, methods)
    except CaptureError as error:
        _require_that_eager_runs(compiler, stand_ins, error)
        methods["forward"] = compiler.ledger.record_of("forward", error)
        without_rules_over_opaque(compiler, methods)
        return None
    return specialization


def _is_equal(compiler: Compiled, specialization: Specialization, real: Sequence[Any]) -> bool:
    """False where loops are to be traced step by step; raises CaptureError where that would not help."""
    tensors = [a for a in real if isinstance(a, Tensor)]
    if any(map(is_spec, real)) or not all(is_plain(a) and a.device.type != "meta" for a in tensors):
        return True
    try:
        require_equal(specialization, compiler.user.complete(real))
    except CaptureError:
        if not specialization.captured.forward.trace.rolled:
            raise
        return False
    return True


def _note_steps(compiler: Compiled, specialization: Specialization, methods: dict[str, Record]) -> None:
    """Loops that this capture, or that of backward, traces step by step, are on record."""
    note = partial(compiler.ledger.note_steps_in, methods)
    note("forward", specialization.captured.session.take_unrolled())
    specialization.backward.note_steps = partial(note, "backward")


def _require_that_eager_runs(compiler: Compiled, stand_ins: Sequence[Any], met: CaptureError) -> None:
    """Raises ExplainedArgumentsError where the class itself fails on such arguments: there is nothing to explain."""
    if (own := own_error(compiler.user.original, stand_ins, met)) is not None:
        detail, place = own
        raise ExplainedArgumentsError(function=compiler.user.cls.__name__, detail=detail, where=place)


def _known_split(
    compiler: Compiled, stand_ins: Sequence[Any], opaque: OpaqueCallError, methods: dict[str, Record]
) -> Specialization | None:
    """A method with opaque nodes, as its calls so far left it: explaining runs no opaque body."""
    tensors = [a for a in stand_ins if isinstance(a, Tensor)]
    tables = compiler.table.by_facts.values()
    split = [s for specializations in tables for s in specializations if s.captured.opaque]
    accepting = [s for s in split if _accepts(s.captured, stand_ins)]
    fitting = next((s for s in accepting if s.captured.guard(tensors)), None)
    if fitting is None:
        methods["forward"] = _known_after_a_call(opaque)
    return fitting


def _known_after_a_call(opaque: OpaqueCallError) -> Record:
    return Record("compiled", f"{opaque.facts['reason']}: its segments are known after a call", opaque.where)


def opaque_calls(specialization: Specialization, has_backward: bool) -> list[OpaqueCall]:
    """The nested calls that fall back to eager, forward's first."""
    calls = [OpaqueCall.of(node, "forward") for node in specialization.captured.opaque]
    if has_backward:
        trace = specialization.backward.entry(known_kinds(specialization.backward)).trace
        calls += [OpaqueCall.of(node, "backward") for node in trace.opaque]
    return calls


def _backward_is_captured(compiler: Compiled, specialization: Specialization, methods: dict[str, Record]) -> bool:
    if methods["backward"].status not in ("compiled", "derived") or backward_method(compiler.user.cls) is None:
        return False
    # A derived backward is asked for first: it has to be a transpose before it can be captured.
    try:
        if compiler.user.derives_backward:
            require_transposable(compiler.user.original, compiler.keys.opaque, specialization)
        specialization.backward.entry(known_kinds(specialization.backward))
    except NonLinearJvp as error:
        methods["backward"] = Record("absent", f"jvp is not linear: {error.facts['why']}", error.facts["where"])
        return False
    except CaptureError as error:
        if compiler.user.derives_backward:
            methods["backward"] = Record("absent", *why_no_backward(compiler.user.original, error))
            return False
        if isinstance(error, OpaqueCallError):
            methods["backward"] = _known_after_a_call(error)
            return False
        methods["backward"] = compiler.ledger.record_of("backward", error)
        without_rules_over_opaque(compiler, methods)
        return False
    return True


def _accepts(captured: CapturedFunction, args: Sequence[Any]) -> bool:
    """True for arguments of the kind that a function was traced for, sizes apart."""
    slots = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
    if slots != captured.slots or len(args) != len(captured.arguments):
        return False
    pairs = zip((args[i] for i in slots), captured.forward.fakes, strict=True)
    constants = [a for i, a in enumerate(args) if i not in slots]
    own = [a for i, a in enumerate(captured.arguments) if i not in slots]
    return constants == own and all(a.dtype == f.dtype and a.dim() == f.dim() for a, f in pairs)


def _on_gpu(explanation: Explanation, spec: Specialization, sizes: Sizes, has_backward: bool) -> None:
    """Kernels and library calls, with the residuals that a GPU backend would choose."""
    captured = spec.captured
    target = named_target(explanation.device, explanation.numerics)
    plan = choose_residuals(spec, sizes, lambda: target) if has_backward else None
    if has_backward and for_a_call(spec, plan) is None and (why := why_as_traced(spec, "triton")):
        _on_cpu(explanation, spec, sizes, has_backward)
        for report in explanation.directions.values():
            report.reasons.append(why)
        return
    explanation.kept = residual_rows(spec, plan, sizes) if has_backward else []
    explanation.user_outputs = len(captured.forward.fake_outputs)
    # Forward with the residuals as hidden outputs; backward reads them, so it comes second.
    try:
        forward = forward_graph(spec, plan)
        places = plan.places if plan else captured.residual_places
        explanation.residuals = tuple(p for p in places if p is not None)
        explanation.saved_bytes = _saved_bytes(forward, explanation, spec, sizes)
        hidden = [None if i in captured.skip else o for i, o in enumerate(forward.outputs)]
        forward.outputs = hidden
        explanation.directions["forward"] = kernels_report(forward, "forward", sizes, target)
        if has_backward:
            explanation.directions["backward"] = kernels_report(_backward_graph(spec, plan), "backward", sizes, target)
        if isinstance(plan, ComparedPlan):
            explanation.directions["backward"].products.append(plan.line)
        _add_eager_costs(explanation, spec, sizes)
        # Kernels of slabs compute with the number of all rows, and the place of the first one.
        walks = [s.walk for report in explanation.directions.values() for s in report.slabs.values()]
        explanation.sizes = {symbol: n for walk in walks for symbol, n in walk.each[0].items()} | dict(sizes)
    except LoweringError as error:
        _on_cpu(explanation, spec, sizes, has_backward)
        for report in explanation.directions.values():
            report.reasons.append(f"no kernels, the traced ATen operations run one by one: {error}")


def _add_eager_costs(explanation: Explanation, spec: Specialization, sizes: Sizes) -> None:
    """Beside the kernels, the cost of the methods that the user wrote: a derived one has none in eager."""
    traced = {"forward": spec.captured.forward.trace}
    if "backward" in explanation.directions and explanation.methods["backward"].status == "compiled":
        traced["backward"] = spec.backward.entry(known_kinds(spec.backward)).trace
    for direction, trace in traced.items():
        report = explanation.directions[direction]
        report.traced, report.eager = trace, eager_cost(trace, sizes)
        if report.memory is not None:
            report.memory = replace(report.memory, eager=peak_of_trace(trace, sizes))


def _backward_graph(spec: Specialization, plan: ResidualPlan | None) -> Graph:
    kinds, name = known_kinds(spec.backward), f"{spec.captured.name}_backward"
    entry = spec.backward.entry(kinds)
    return graph_of(entry.trace, name) if plan is None else plan.backward_graph(kinds, entry, name)


def _saved_bytes(forward: Graph, explanation: Explanation, spec: Specialization, sizes: Sizes) -> int:
    """Bytes of the distinct tensors kept for backward."""
    total = 0
    for place in dict.fromkeys(explanation.residuals):
        if place.kind == "hidden":
            value = forward.outputs[explanation.user_outputs + place.index]
            total += number(value.aval.nbytes, sizes) if value is not None else 0
        else:
            fake = spec.captured.forward.fake_at(place)
            total += fake_bytes(fake, sizes) if fake is not None else 0
    return total


def _on_cpu(explanation: Explanation, spec: Specialization, sizes: Sizes, has_backward: bool) -> None:
    """The reference backend calls the traced ATen operations one by one."""
    captured = spec.captured
    places = dict.fromkeys(p for p in captured.residual_places if p is not None)
    explanation.residuals, explanation.user_outputs = (
        tuple(present_residuals(captured)),
        len(captured.forward.fake_outputs),
    )
    fakes = (captured.forward.fake_at(p) for p in places)
    explanation.saved_bytes = sum(fake_bytes(f, sizes) for f in fakes if f is not None)
    explanation.kept = residual_rows(spec, None, sizes) if has_backward else []
    traces = {"forward": captured.forward.trace}
    if has_backward:
        traces["backward"] = spec.backward.entry(known_kinds(spec.backward)).trace
    for direction, trace in traces.items():
        explanation.directions[direction] = aten_report(trace, f"{captured.name}_{direction}", direction, sizes)
