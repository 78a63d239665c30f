"""A class at one key: its forward as a graph, and the facts that a call and its backward need of the user's methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from typing import Any, cast

import sympy
import torch

from ...ir.lazy_attribute import lazy_attribute
from ...ir.program import ValueRef
from ...ir.switches import switch_state, watch_allows
from ...tracer.capture.capture import Session, unversioned_placeholders, written_placeholders
from ...tracer.containers import copy_containers
from ...tracer.function import ForwardCapture, capture_forward, rebind, symbols_in, user_count
from ...tracer.methods import backward_method, method_place, parameter_names, plain_function, uses_setup_context
from ...tracer.opaque.opaque import Tape
from ...tracer.reads.reads import Reads
from ...tracer.torch_private import no_autocast, share_memory
from ...tracer.trace import CaptureError
from ..settings import logs
from ..settings.counters import count
from ..values.sizes import Binder, BoundSizes
from .guards import Guard, LongestLoops, guard_from, lasting_state, size_guard
from .opaque_replay import in_place_error
from .redraw import draws
from .shared_objects import Sharing

Tensor = torch.Tensor
Sizes = Mapping[sympy.Symbol, Any]
Report = Callable[[str, str], None]
"""(method, why) is called where a captured method runs slower than its backend promises."""
_AS_IT_IS = nullcontext()


class CapturedFunction:
    """forward of one class at one key, with the facts that a call needs: data, but for the trace, which may be lazy.

    `capture_function` makes one from a class and arguments, `persistence` from a document on disk.
    """

    def __init__(
        self,
        cls: type,
        args: Sequence[Any],
        reads: Reads,
        dynamic: bool,
        report: Report | None,
        forward: ForwardCapture,
        binder: Binder,
        opaque: Sequence[Any] = (),
    ) -> None:
        self.cls, self.name, self.dynamic = cls, cls.__name__, dynamic
        self.reads = reads
        self.report = report or (lambda method, why: None)
        self.switches = switch_state()  # whatever is captured or generated later, is so under them
        self.slots = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        self.arguments = tuple(None if isinstance(a, Tensor) else copy_containers(a) for a in args)
        self.count = user_count(args)  # tensors from inside the user's containers stand behind the arguments
        self.names = argument_names(cls, len(args))
        self.forward, self.binder, self.opaque = forward, binder, opaque
        symbols = [*binder.sources, *(s for node in opaque for s in node.hints)]
        self.symbols: AbstractSet[sympy.Symbol] = dict.fromkeys(symbols).keys()  # in this order in every process
        self.backward_symbols: list[sympy.Symbol] = []  # of these, those that backward is given as numbers
        self.guard: Guard = guard_from(())
        self.assumed_conditions: Sequence[str] = ()  # the guard's conditions that no session knows: of a stored capture
        self.stored_kinds: tuple[Any, ...] | None = None  # the commonest backward, where it is known without a trace
        self.read_constants: Callable[[Sizes], dict[str, Any]] | None = None  # the same of what is on ctx
        # Reads and writes of the graph besides its arguments' values.
        self.lifted: list[Any] = []
        self.code_on_ctx_asks: bool | None = None  # for the layout of tensors; None: not known yet
        self.written_inputs: list[int] = []
        self.unversioned_inputs: list[int] = []
        # How its results become the user's.
        self.is_plain = plain_function(cls) is not None
        self.passthrough: tuple[tuple[int, int], ...] = ()
        self.skip = frozenset(i for i, k in enumerate(output_kinds(forward)) if k != "tensor")
        self.inner_views = inner_views(forward)
        self.sharing = Sharing(forward.shared, self.arguments) if forward.shared else None
        self.under_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        self.outside_at_capture = self.outside_state()  # when it was captured
        # Findings of the first call's comparison.
        self.restrided = False  # strides were corrected
        self.returns_input_memory = False  # an operator returns memory that it is given, and does not say so
        self.longest = LongestLoops()
        self.unchecked = False  # made-up data was no fit for its method: the first call on real data compares

    @property
    def session(self) -> Session:
        """Where its methods are traced."""
        return self.forward.session

    @property
    def first_backward_guard(self) -> int:
        """The number of the first guard that a backward added: what one assumed, all later ones were captured under."""
        return self.forward.traced.since

    def current_guard(self) -> Guard:
        """The conditions on sizes under which what is known by now holds."""
        guard = size_guard(self.session, self.forward.fakes)
        if not self.assumed_conditions:
            return guard
        return guard_from(list(dict.fromkeys((*self.assumed_conditions, *cast(Any, guard).conditions))))

    def sizes(self, args: Sequence[Any]) -> BoundSizes:
        """The session's symbols at this call."""
        return self.binder(self.tensors_of(args))

    def tensors_of(self, args: Sequence[Any]) -> list[Tensor]:
        return [args[i] for i in self.slots]

    def with_tensors(self, tensors: Sequence[Any]) -> list[Any]:
        """The arguments of this specialisation with other tensors."""
        supply = iter(tensors)
        return [next(supply) if i in self.slots else a for i, a in enumerate(self.arguments)]

    def forward_place(self) -> str:
        """`file:line` of the user's forward."""
        return method_place(self.cls.forward)  # type: ignore[attr-defined]

    def backward_place(self) -> str:
        """`file:line` of the user's backward."""
        return method_place(backward_method(self.cls) or self.cls.forward)  # type: ignore[attr-defined]

    @property
    def writes_inputs(self) -> bool:
        """True if forward writes to an argument's memory: then shared memory between arguments matters."""
        return bool(self.forward.dirty) or bool(self.written_inputs)

    def writes_shared_memory(self, tensors: Sequence[Any]) -> bool:
        """True if forward writes to arguments of which some, or elements of one, are one memory: eager runs it then."""
        return self.writes_inputs and share_memory(tensors)

    @lazy_attribute
    def draws(self) -> bool:
        """True if forward may draw random numbers."""
        return draws(self.forward.trace)

    @property
    def residual_places(self) -> list[ValueRef | None]:
        """The tensors kept for backward: the saved tensors, then tensors that are attributes of ctx."""
        return [*self.forward.saved, *self.forward.tensor_attributes.values()]

    def constants_at(self, sizes: Sizes) -> dict[str, Any]:
        """The attributes of ctx that are no tensors, at these sizes."""
        if self.read_constants is not None and not self.forward.is_traced:
            return self.read_constants(sizes)
        return {k: rebind(v, sizes) for k, v in self.forward.constants.items()}

    def outside_state(self) -> tuple[Any, ...]:
        """The facts read from outside, and torch's state, at present."""
        return self.reads.facts(), lasting_state()

    def without_added_casts(self) -> Any:
        """Casts are part of the captured graph: autocast must not add its own while it is replayed."""
        return no_autocast() if self.under_autocast else _AS_IT_IS


def capture_function(
    cls: type,
    args: Sequence[Any],
    reads: Reads,
    dynamic: bool = True,
    report: Report | None = None,
    tape: Tape | None = None,
    rolls: int = 0,
) -> CapturedFunction:
    """Trace forward of a class at these arguments. Raises CaptureError.

    tape: what its opaque calls returned; report: is told where a captured method runs slower than it might.
    rolls: loops over a size are one node from so many steps on, for what runs them so; 0: none is.
    """
    # Trace, under a session of its own: its symbols are shared with every backward traced later.
    reads = reads.with_arguments(args)
    forward = trace_forward(cls, args, reads, Session(dynamic, rolls), tape)
    traced, trace = forward.traced, forward.trace
    captured = CapturedFunction(cls, args, reads, dynamic, report, forward, Binder(traced.fakes), trace.opaque)
    # The user's names, for the text of kernels.
    visible = len(traced.fake_outputs)
    trace.names = [captured.names[i] for i in captured.slots]
    trace.output_names = ["out"] if visible == 1 else [f"out_{i}" for i in range(visible)]
    captured.longest = LongestLoops(trace.rolled)
    # Writes to arguments: an opaque node beside one could not be finished by hand, so it is refused now.
    captured.written_inputs = written_placeholders(trace.graph_module, len(captured.slots))
    if captured.written_inputs:
        captured.unversioned_inputs = unversioned_placeholders(trace.graph_module, len(captured.slots))
    if captured.opaque and captured.writes_inputs:
        raise in_place_error(captured.opaque[0])
    # The guard before anything else is asked of the session, which may learn more with every question.
    captured.guard = captured.current_guard()
    captured.session.fix_equalities()
    # The inputs that backward will need are known now, before any backward is traced.
    captured.lifted = [captured.reads.tensor_path(t) for t in trace.lifted]
    captured.passthrough = passthrough_inputs(captured) if captured.is_plain else ()
    captured.backward_symbols = unbound_symbols(captured)
    # Later guards of the session are backward's.
    traced.since = len(captured.session.env.guards)
    return captured


def trace_forward(
    cls: type, args: Sequence[Any], reads: Reads, session: Session, tape: Tape | None
) -> ForwardCapture:
    """forward and setup_context on fakes like the arguments."""
    user_arguments = user_count(args)
    needs = tuple(isinstance(a, Tensor) and a.requires_grad and i < user_arguments for i, a in enumerate(args))
    fakes = [session.fake(a) for a in args if isinstance(a, Tensor)]
    require_capture_allowed(f"{cls.__name__}.forward")
    count("captures")
    with logs.capturing(f"{cls.__name__}.forward", lambda: forward.trace, method_place(cls.forward)):  # type: ignore[attr-defined]
        forward = capture_forward(cls, args, fakes, session, reads, needs, tape)
    return forward


def passthrough_inputs(captured: CapturedFunction) -> tuple[tuple[int, int], ...]:
    """(result, argument) of each result of a plain function that is an argument, the very object.

    Raises CaptureError where a tensor requires grad that is no argument: no Function has a gradient for it.
    """
    if any(t.requires_grad for t in captured.forward.trace.lifted):
        raise CaptureError(reason="a tensor from outside requires grad", where=captured.forward_place())
    return tuple((i, captured.slots[o.index]) for i, o in enumerate(captured.forward.outputs) if o.kind == "input")


def name_at(captured: CapturedFunction, place: ValueRef) -> str:
    """The user's name for what is at a place."""
    for attribute, at in captured.forward.tensor_attributes.items():
        if at == place and place.kind == "hidden":
            return f"ctx.{attribute}"
    if place.kind == "input":
        return captured.names[captured.slots[place.index]]
    position = place.index + (len(captured.forward.fake_outputs) if place.kind == "hidden" else 0)
    node = list(captured.forward.trace.graph_module.graph.nodes)[-1].args[0][position]
    origin = getattr(node, "meta", {}).get("fusegrad_origin")
    return origin[0] if origin and origin[0] else f"{place.kind}_{place.index}"


def present_residuals(captured: CapturedFunction) -> list[ValueRef]:
    """The places that hold a tensor."""
    return [p for p in captured.residual_places if p is not None]


def unbound_symbols(captured: CapturedFunction) -> list[sympy.Symbol]:
    """Symbols that backward may need and that the shapes of its own inputs do not tell."""
    residuals = [f for p in captured.residual_places if (f := captured.forward.fake_at(p)) is not None]
    bound = set(Binder([*residuals, *captured.forward.fake_outputs]).sources)
    captured_symbols = captured.symbols
    needs = captured.forward.needs_input_grad
    differentiated = [f for i, f in zip(captured.slots, captured.forward.fakes, strict=True) if needs[i]]
    shapes = [e for f in (*residuals, *captured.forward.fake_outputs) for e in (*f.shape, *f.stride())]
    shapes += [e for f in differentiated for e in f.shape]
    needed = symbols_in(captured.forward.constants.values()) | symbols_in(shapes)
    masked = set(Binder(residuals, ("size",)).sources)
    return sorted(((needed & captured_symbols) - (bound & masked)), key=str)


def output_kinds(forward: ForwardCapture) -> list[str]:
    """Per tensor output: "tensor", or which memory it shows."""
    return [forward.outputs[i].kind for i in forward.tensor_outputs]


def inner_views(forward: ForwardCapture) -> frozenset[int]:
    """The outputs that are views of what no caller sees: kernels make them by themselves."""
    outputs = [forward.outputs[i] for i in forward.tensor_outputs]
    return frozenset(i for i, o in enumerate(outputs) if o.kind == "tensor" and o.value)


def argument_names(cls: type, count: int) -> list[str]:
    """The user's names for forward's arguments."""
    skip = 0 if uses_setup_context(cls) else 1
    return parameter_names(cls.forward, count, skip, "argument")  # type: ignore[attr-defined]


def require_capture_allowed(method: str) -> None:
    """Raise CaptureError if the watch refuses this capture."""
    if not watch_allows("capture", method):
        raise CaptureError(reason="it is not traced while a fault is looked for", where="unknown")


def hint_of(session: Session, symbol: sympy.Symbol) -> Any:
    """The value of a symbol at the capture."""
    values = getattr(session.env, "backed_var_to_val", None) or session.env.var_to_val
    return int(values[symbol]) if symbol.is_integer else float(values[symbol])


def traceable_number(session: Session, symbol: sympy.Symbol) -> Any:
    """A symbol as a number that can be traced."""
    env, hint = session.env, hint_of(session, symbol)
    return env.create_symintnode(symbol, hint=hint) if symbol.is_integer else env.create_symfloatnode(symbol, hint=hint)
