"""backward as a graph, for one combination of gradients: how it is captured, and when it serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import sympy
import torch

from ...ir.lazy_attribute import lazy_attribute
from ...tracer.capture.capture import unversioned_placeholders, written_placeholders
from ...tracer.capture.context import BackwardContext
from ...tracer.capture.history import History, known_history
from ...tracer.containers import leaves
from ...tracer.function import guarded_trace, rebind, require_no_difference
from ...tracer.loops.stacks import unstacked
from ...tracer.methods import as_tuple, backward_method, parameter_names
from ...tracer.opaque.opaque import Tape
from ...tracer.reads.reads import scan
from ...tracer.reads.value_keys import SCALARS, functions_of
from ...tracer.trace import CaptureError, Trace
from ..execution.executable import Executable
from ..execution.group import RECORDS
from ..settings import logs
from ..settings.config import KERNEL_BACKENDS
from ..settings.counters import count
from ..values.gradient_layouts import as_gradient_of, canonical_layout, cast_as_gradient
from ..values.sizes import Binder, BoundSizes
from .activity import takes_gaps
from .captured import CapturedFunction, name_at, require_capture_allowed, traceable_number
from .guards import LongestLoops, is_float
from .outputs import passthrough_results, views_of_inputs
from .redraw import draws
from .user_methods import ctx_attributes, requires_grad_at, run_user_backward

Tensor = torch.Tensor
Sizes = BoundSizes
V = TypeVar("V")


@dataclass
class BackwardTrace:
    """backward on fakes: what a process that finds a capture on disk makes again only where it is asked for."""

    trace: Trace
    since: int = 0  # the session's guards from this number on are backward's


@dataclass
class BackwardEntry:
    """backward at one None-mask and gradient layout."""

    source: BackwardTrace | Callable[[], BackwardTrace]
    guards: tuple[sympy.Basic, ...]
    lifted: list[Any] = field(default_factory=list)
    opaque: Sequence[Any] = ()  # its opaque nodes, in the order of their calls
    passed_gradients: dict[int, int] = field(default_factory=dict)  # result: the gradient that it is, unchanged
    viewed_gradients: dict[int, tuple[int, Any]] = field(default_factory=dict)  # result: its base's number, its fake
    written_inputs: tuple[int, ...] = ()  # which of (residuals, symbols, gradients) it writes to
    unversioned_inputs: tuple[int, ...] = ()  # those written unseen by autograd: through `.data` or numpy
    executables: dict[str, Executable] = field(default_factory=dict)
    alternatives: list[BackwardEntry] = field(default_factory=list)  # captured for other results of its opaque nodes
    admitted_sizes: dict[tuple[int, ...], bool] = field(default_factory=dict)
    refused_sizes: set[tuple[int, ...]] = field(default_factory=set)  # of loops whose late steps do something else
    is_checked: bool = False
    serves_all_sizes: bool = False  # it serves sizes for which a capture of its own would be another one
    longest: LongestLoops = field(default_factory=LongestLoops)
    stored_guards: tuple[sympy.Basic, ...] = ()  # of another process's capture, which hold as well

    @property
    def traced(self) -> BackwardTrace:
        """The trace, made at the first read."""
        if not isinstance(self.source, BackwardTrace):
            self.source = self.source()
        return self.source

    @property
    def trace(self) -> Trace:
        """Its graph: (residuals, symbols, gradients) to one gradient per argument."""
        return self.traced.trace

    @property
    def since(self) -> int:
        """The number of the session's first guard that is backward's."""
        return self.traced.since

    @lazy_attribute
    def draws(self) -> bool:
        """True if it may draw random numbers."""
        return draws(self.trace)

    @lazy_attribute
    def takes_gaps(self) -> list[bool]:
        """Per input tensor, whether torch's operations may have it with gaps in memory."""
        return [takes_gaps(n) for n in self.trace.graph_module.graph.nodes if n.op == "placeholder"]

    def with_passed_gradients(
        self, results: Sequence[V], gradients: Sequence[V], backend: str, view: Callable[[Tensor, V], V]
    ) -> list[V]:
        """The gradients for autograd: results, gradients that are handed on unchanged, and views of such.

        Over values of any kind: tensors in a call, their names in a text. view: makes what a fake is, of a gradient.
        """
        full = list(results)
        for result, gradient in self.passed_gradients.items():
            full[result] = gradients[gradient]
        if backend in KERNEL_BACKENDS:  # elsewhere the views are among the captured operations
            for result, (gradient, fake) in self.viewed_gradients.items():
                full[result] = view(fake, gradients[gradient])
        return full

    def admits(self, sizes: Sizes) -> bool:
        """True if the assumptions of this trace about sizes hold."""
        if self.refused_sizes and sizes.key in self.refused_sizes:
            return False
        if not self.guards or self.serves_all_sizes:
            return True
        if any(not s.is_integer for g in self.guards for s in g.free_symbols):  # numbers that were read: never twice
            return all(bool(g.xreplace(sizes)) for g in self.guards)
        key = sizes.key
        admitted = self.admitted_sizes.get(key)
        if admitted is None:
            if len(self.admitted_sizes) >= RECORDS:
                self.admitted_sizes.clear()
            admitted = self.admitted_sizes[key] = all(bool(g.xreplace(sizes)) for g in self.guards)
        return admitted

    def assume(self, guards: tuple[sympy.Basic, ...]) -> None:
        """Add the assumptions of lowering."""
        guards = tuple(dict.fromkeys((*self.stored_guards, *guards)))
        if guards != self.guards:
            self.guards = guards
            self.admitted_sizes.clear()


def backward_names(captured: CapturedFunction) -> list[str]:
    """The user's names for the inputs of backward: arguments, results of forward, gradients."""
    method = backward_method(captured.cls)
    assert method is not None
    residuals = ["" if p is None else name_at(captured, p) for p in captured.residual_places]
    symbols = [str(s) for s in captured.backward_symbols]
    return [*residuals, *symbols, *parameter_names(method, len(captured.forward.outputs), 1, "gradient")]


def capture_backward(captured: CapturedFunction, kinds: tuple[Any, ...], tape: Tape | None = None) -> BackwardEntry:
    """Trace the user's backward for gradients of these kinds. Raises CaptureError.

    tape: what its opaque calls returned before.
    """
    require_capture_allowed(f"{captured.name}.backward")
    count("captures")
    # Fresh fakes: a history that one trace gives them must not reach another.
    residuals, symbols = fresh_residuals(captured)
    fakes = [fake_gradient(captured, i, k) for i, k in enumerate(kinds)]
    everything, answer = [*residuals, *symbols, *fakes], False
    live = [i for i, v in enumerate(everything) if v is not None]
    histories: list[History] = []

    def body(*present: Any) -> tuple[Any, ...]:
        full: list[Any] = [None] * len(everything)
        for i, value in zip(live, present, strict=True):
            full[i] = value
        r, s = len(residuals), len(residuals) + len(symbols)
        symbol_values = dict(zip(captured.backward_symbols, full[r:s], strict=True))
        sizes = Binder(residuals, ("size",)).read(full[:r]) | symbol_values
        with known_history(full[:r], answer) as history:
            histories.append(history)
            return reduce_like_autograd(captured, run_user_backward(captured, full[:r], sizes, full[s:]))

    # Trace, twice where backward asks for a saved tensor's history.
    gradients = ", ".join("absent" if k is None else str(k) for k in kinds)
    label = f"{captured.name}.backward for gradients {gradients}"
    with logs.capturing(label, lambda: trace, captured.backward_place()):
        tape_copy = None if tape is None else tape.rewound_tape()
        trace = guarded_trace(captured.session, body, [everything[i] for i in live], captured.reads, tape=tape)
        # Backward asked whether a saved tensor has a history, which a capture has not: both answers, and one graph.
        if histories[-1].place is not None:
            answer, first = True, histories[-1]
            inputs = [everything[i] for i in live]
            other_trace = guarded_trace(captured.session, body, inputs, captured.reads, tape=tape_copy)
            require_no_difference(first, trace, histories[-1], other_trace)
    # The user's names, for the text of kernels.
    names = backward_names(captured)
    trace.names = [names[i] for i in live]
    trace.output_names = [f"grad_{name}" for name in captured.names]
    # The guards that this trace added to forward's.
    guards = captured.session.conditions(captured.symbols, captured.first_backward_guard)
    # Gradients that backward returns unchanged, or views of them, need no kernel.
    at_gradients = len(residuals) + len(symbols)
    of_gradient = {p: at - at_gradients for p, at in enumerate(live) if at >= at_gradients}
    passed_gradients = {r: of_gradient[p] for r, p in passthrough_results(trace).items() if p in of_gradient}
    viewed_gradients = {r: (of_gradient[p], f) for r, (p, f) in views_of_inputs(trace).items() if p in of_gradient}
    lifted = [captured.reads.tensor_path(t) for t in trace.lifted]
    # Writes to residuals and gradients, which a replay has to make, too.
    written_inputs = tuple(live[i] for i in written_placeholders(trace.graph_module, len(live)))
    unversioned = tuple(unversioned_placeholders(trace.graph_module, len(live))) if written_inputs else ()
    source = BackwardTrace(trace, captured.first_backward_guard)
    return BackwardEntry(
        source, guards, lifted, trace.opaque, passed_gradients, viewed_gradients, written_inputs, unversioned,
        longest=LongestLoops(trace.rolled),
    )  # fmt: skip


def fresh_residuals(captured: CapturedFunction) -> tuple[list[Tensor | None], list[Any]]:
    """Fresh fakes of what is kept for backward, and the sizes that they do not tell."""
    fakes = [captured.forward.fake_at(p) for p in captured.residual_places]
    symbols = [traceable_number(captured.session, s) for s in captured.backward_symbols]
    copies = [captured.session.fake_again(r) if r is not None else None for r in fakes]
    for r, place in zip(copies, captured.residual_places, strict=True):
        if r is not None and requires_grad_at(captured, place):
            r.requires_grad_()
    return copies, symbols


def capture_jvp(captured: CapturedFunction, tangents: Sequence[Tensor]) -> Trace:
    """The user's jvp over what is kept for backward, on tangents like these: its last inputs."""
    count("captures")
    residuals, symbols = fresh_residuals(captured)
    present = [r for r in residuals if r is not None]
    n, m = len(present), len(present) + len(symbols)

    def body(*values: Any) -> tuple[Any, ...]:
        supply = iter(values[:n])
        saved = [next(supply) if r is not None else None for r in residuals]
        symbol_values = dict(zip(captured.backward_symbols, values[n:m], strict=True))
        sizes = Binder(residuals, ("size",)).read(saved) | symbol_values
        return user_jvp(captured, saved, sizes, values[m:])

    moving = [captured.session.fake_again(t) for t in tangents]
    return guarded_trace(captured.session, body, [*present, *symbols, *moving], captured.reads)


def user_jvp(
    captured: CapturedFunction, saved: Sequence[Any], sizes: Mapping[sympy.Symbol, Any], moving: Sequence[Any]
) -> tuple[Any, ...]:
    n, supply = len(captured.forward.saved), iter(moving)
    attributes = ctx_attributes(captured, saved[n:], sizes)
    needs = captured.forward.needs_input_grad[: captured.count]
    ctx = BackwardContext(unstacked(saved[:n], captured.forward.stacks), attributes, needs)
    tangents = [None if like is None else next(supply).clone() for like in attributes["_fusegrad_likes"]]
    return as_tuple(captured.cls.jvp(ctx, *tangents))  # type: ignore[attr-defined]


def predicted_kinds(captured: CapturedFunction) -> tuple[Any, ...]:
    """The commonest backward: every differentiable output has a gradient, each row-major."""
    if captured.stored_kinds is not None:
        return captured.stored_kinds
    gradients = gradients_per_output(captured, captured.forward.fake_outputs)
    return tuple(None if g is None else "contiguous" for g in gradients)


def gradients_per_output(captured: CapturedFunction, gradients: Sequence[Any]) -> list[Any]:
    """Of one gradient per tensor output those that backward is given: an output that never moves has one only where
    zeros are made for it."""
    forward = captured.forward
    all_zeros = forward.materialize_grads and forward.materialize_non_diff_grads
    dropped = () if all_zeros else outputs_without_gradient(captured)
    supply = iter(None if i in dropped else g for i, g in enumerate(gradients))
    return [None if o.kind == "object" else next(supply) for o in captured.forward.outputs]


def outputs_without_gradient(captured: CapturedFunction) -> set[int]:
    """The tensor outputs without a gradient: marked ones, and integers."""
    marked = {p.index for p in captured.forward.non_differentiable if p.kind == "output"}
    return marked | {i for i, o in enumerate(captured.forward.fake_outputs) if not is_float(o)}


def fake_gradient(captured: CapturedFunction, index: int, kind: Any) -> Any:
    """A fake gradient of one output in a class of layouts; None for an absent one."""
    if kind is None:
        return None
    like = gradient_likes(captured)[index]
    if isinstance(kind, tuple):
        return captured.session.fake_permuted(like, kind)
    return captured.session.fake_like(like, expanded=kind == "expanded")


def gradient_likes(captured: CapturedFunction) -> list[Any]:
    """Per user output: the fake that its gradient looks like, None for outputs that are no tensors."""
    supply = iter(captured.forward.fake_outputs)
    return [None if o.kind == "object" else next(supply) for o in captured.forward.outputs]


def reduce_like_autograd(captured: CapturedFunction, gradients: Sequence[Any]) -> tuple[Any, ...]:
    """Do to a gradient, in the graph, what autograd does: reduce it to the input's shape, cast it to its dtype."""
    finished: list[Any] = []
    for argument, gradient in enumerate(gradients):
        if needs_no_gradient(captured, argument):
            finished.append(None)
        elif isinstance(gradient, Tensor) and argument in captured.slots:
            like = captured.forward.fakes[captured.slots.index(argument)]
            finished.append(as_gradient_of(like.dtype, captured.session.with_current_sizes(like.shape), gradient))
        else:
            finished.append(gradient if gradient is None or isinstance(gradient, Tensor) else _refuse(gradient))
    return tuple(finished)


def reduce_to_argument(
    captured: CapturedFunction, argument: int, gradient: Any, sizes: Mapping[sympy.Symbol, Any]
) -> Any:
    """One gradient reduced to its argument's shape and cast to its dtype, at the given sizes.

    Where none is needed it is dropped: autograd does not look at its shape either.
    """
    if needs_no_gradient(captured, argument):
        return None
    if not isinstance(gradient, Tensor) or argument not in captured.slots:
        return gradient
    fake = captured.forward.fakes[captured.slots.index(argument)]
    shape = rebind(fake.shape, sizes)
    if tuple(gradient.shape) != tuple(shape):
        gradient = gradient.sum_to_size(shape)
    return cast_as_gradient(gradient, fake.dtype)


def needs_no_gradient(captured: CapturedFunction, argument: int) -> bool:
    """A tensor argument that needs no gradient: autograd would drop what backward returns for it."""
    return argument in captured.slots and not captured.forward.needs_input_grad[argument]


def layout_guard_failure(
    captured: CapturedFunction, residuals: Sequence[Any], sizes: Sizes, gradients: Sequence[Any], recomputed: bool
) -> str | None:
    """The reason why backward, which may ask for layouts, meets others than at its capture; None if it does not."""
    if not _may_ask_for_layouts(captured, sizes):
        return None
    if any(canonical_layout(g) is not g for g in gradients):
        return "it may ask how a gradient lies in memory, which has gaps"
    pairs = () if recomputed else zip(residuals, captured.residual_places, strict=True)
    fakes = [(r, f) for r, p in pairs if (f := captured.forward.fake_at(p)) is not None]
    if any(tuple(r.stride()) != tuple(rebind(tuple(f.stride()), sizes)) for r, f in fakes):
        return "it may ask how a saved tensor lies in memory, which a hook gave another layout"
    return None


def _may_ask_for_layouts(captured: CapturedFunction, sizes: Sizes) -> bool:
    """By its code, or by that of functions and objects that forward put on ctx, which no scan of backward sees."""
    if captured.code_on_ctx_asks is None:
        values = [inner for v in captured.constants_at(sizes).values() for inner in (v, *leaves(v))]
        code = [f for v in values if type(v) not in SCALARS for f in functions_of(v)]
        captured.code_on_ctx_asks = bool(code) and scan(*code).queries_layout
    return captured.reads.queries_layout or captured.code_on_ctx_asks


def admits_sizes(captured: CapturedFunction, sizes: Sizes) -> bool:
    """True if the assumptions of backwards about sizes, under which every later one is captured, hold at these."""
    sources = captured.binder.sources.keys()
    return all(bool(c.xreplace(sizes)) for c in captured.session.conditions(sources, captured.first_backward_guard))


def _refuse(value: Any) -> Any:
    raise CaptureError(reason=f"backward returns a {type(value).__name__} as a gradient", where="unknown")
