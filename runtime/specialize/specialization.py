"""A Function class at one key: its captured forward, its backward per None-mask, and how to run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar

import sympy
import torch

from ...ir import Graph
from ...ir.once import once
from ...ir.program import Place
from ...ir.switches import allowed, in_force, under
from ...tracer.capture.capture import OpaqueMet, Session, capture_lock, unversioned_placeholders, written_placeholders
from ...tracer.capture.context import BackwardContext, ForwardContext, attributes_of
from ...tracer.capture.history import History, known_history
from ...tracer.containers import Hole, anew, closed, exchanged, leaves
from ...tracer.function import (
    ForwardCapture,
    call_forward,
    capture_forward,
    guarded_trace,
    put_together,
    rebind,
    require_no_difference,
    run_backward,
    symbols_in,
    tensors_of_attributes,
    user_count,
)
from ...tracer.methods import as_tuple, backward_method, method_place, parameter_names, uses_setup_context
from ...tracer.opaque.opaque import Mismatch, Run, Tape, running
from ...tracer.reads.reads import Reads
from ...tracer.torch_private import (
    FakeTensorMode,
    functions_as_written,
    memory_of,
    no_autocast,
    plain_tensors,
    transforms_active,
)
from ...tracer.trace import CaptureError, Trace
from ..capture.activity import takes_gaps
from ..capture.first_call_check import MemoryFilled, cut, differs, is_made_up, takes_memory
from ..capture.graph_mode import is_outer
from ..capture.guards import Guard, is_float, lasting_state, size_guard
from ..capture.opaque_replay import VARIANTS as MOST_GRAPHS
from ..capture.opaque_replay import not_in_place, offered, played, replayed
from ..capture.redraw import draws
from ..capture.shared_objects import Sharing
from ..capture.views import view_like, with_aliases
from ..execution.aten.replay import step_by_step
from ..execution.executable import Executable
from ..execution.group import RECORDS
from ..execution.intermediates import intermediate_bytes
from ..execution.pipeline import optimize
from ..fallback.effects import drawing_again
from ..settings import logs
from ..settings.config import KERNEL_BACKENDS, settings
from ..settings.counters import count
from ..settings.internal_errors import or_fall_back
from ..values.sizes import Binder, BoundSizes
from .residuals import Chosen, choose

Tensor = torch.Tensor
V = TypeVar("V")
PART = "part of hidden"
Sizes = BoundSizes
_AS_IT_IS = nullcontext()
Report = Callable[[str, str], None]
"""(method, why) is called where a captured method runs slower than its backend promises."""


@dataclass
class BackwardEntry:
    """backward at one None-mask and gradient layout."""

    trace: Trace
    guards: tuple[sympy.Basic, ...]
    lifted: list[Any]
    since: int  # the session's guards from this number on are backward's
    passed: dict[int, int] = field(default_factory=dict)  # results that are a gradient as it came, by its number
    viewed: dict[int, tuple[int, Any]] = field(default_factory=dict)  # that are a view of one: its number, the fake
    written: tuple[int, ...] = ()  # which of (residuals, symbols, gradients) it writes to
    unversioned: tuple[int, ...] = ()  # which inputs it writes to unseen by autograd: by way of `.data`, or by numpy
    executables: dict[str, Executable] = field(default_factory=dict)
    others: list[BackwardEntry] = field(default_factory=list)  # captured for other results of its opaque nodes
    admitted: dict[tuple[int, ...], bool] = field(default_factory=dict)
    compared: bool = False
    everywhere: bool = False  # it serves sizes for which a capture of its own would be another one

    @once
    def draws(self) -> bool:
        """Whether it may draw random numbers."""
        return draws(self.trace)

    @once
    def takes_gaps(self) -> list[bool]:
        """Per tensor that is given, whether torch's operations may have it with gaps in memory."""
        return [takes_gaps(n) for n in self.trace.graph_module.graph.nodes if n.op == "placeholder"]

    @property
    def opaque(self) -> list[Any]:
        """Its opaque nodes, in the order of their calls."""
        return self.trace.opaque

    def with_given(
        self, results: Sequence[V], given: Sequence[V], backend: str, view: Callable[[Tensor, V], V]
    ) -> list[V]:
        """What autograd gets: results, gradients that are handed on as they came, and views of such.

        Over values of any kind: tensors in a call, their names in a text. view: makes what a fake is, of a gradient.
        """
        full = list(results)
        for result, gradient in self.passed.items():
            full[result] = given[gradient]
        if backend in KERNEL_BACKENDS:  # elsewhere the views are among the captured operations
            for result, (gradient, fake) in self.viewed.items():
                full[result] = view(fake, given[gradient])
        return full

    def admits(self, sizes: Sizes) -> bool:
        """Whether what this trace assumed about sizes holds."""
        if not self.guards or self.everywhere:
            return True
        if any(not s.is_integer for g in self.guards for s in g.free_symbols):  # numbers that were read: never twice
            return all(bool(g.xreplace(sizes)) for g in self.guards)
        key = sizes.key
        admitted = self.admitted.get(key)
        if admitted is None:
            if len(self.admitted) >= RECORDS:
                self.admitted.clear()
            admitted = self.admitted[key] = all(bool(g.xreplace(sizes)) for g in self.guards)
        return admitted

    def learn(self, guards: tuple[sympy.Basic, ...]) -> None:
        """Lowering added to what is assumed."""
        if guards != self.guards:
            self.guards = guards
            self.admitted.clear()


class Specialization:
    """One key of one class. Raises CaptureError from the constructor where forward cannot be captured."""

    is_compared: ClassVar[bool] = True
    """Whether its first run is compared with the user's own method."""
    counted: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)
    """Where a capture of backward runs, so that its operations count (`budget.py`)."""
    unchecked = False
    """Whether made-up data was no fit for its method, so that the first call on real data compares."""

    def __init__(
        self,
        cls: type,
        args: Sequence[Any],
        reads: Reads,
        dynamic: bool = True,
        report: Report | None = None,
        tape: Tape | None = None,
    ) -> None:
        self.reads = reads = reads.with_arguments(args)
        self.cls, self.name, self.dynamic = cls, cls.__name__, dynamic
        self.report = report or (lambda method, why: None)
        self.switches = in_force()  # whatever is captured or generated later, is so under them
        self.siblings: list[tuple[Specialization, list[Any]]] = []
        self.slots = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        self.arguments = tuple(None if isinstance(a, Tensor) else anew(a) for a in args)
        self.count = user_count(args)  # tensors from inside the user's containers stand behind his arguments
        self.session = Session(dynamic)
        needs = tuple(isinstance(a, Tensor) and a.requires_grad and i < self.count for i, a in enumerate(args))
        fakes = [self.session.fake(args[i]) for i in self.slots]
        require_allowed(f"{self.name}.forward")
        count("captures")
        with logs.capturing(f"{self.name}.forward", lambda: self.forward.trace, self.forward_place()):
            self.forward: ForwardCapture = capture_forward(cls, args, fakes, self.session, reads, needs, tape)
        self.names = self._argument_names(len(args))
        self.forward.trace.names = [self.names[i] for i in self.slots]
        visible = len(self.forward.fake_outputs)
        self.forward.trace.output_names = ["out"] if visible == 1 else [f"out_{i}" for i in range(visible)]
        self.guard = self.current_guard()
        self.binder = Binder(fakes)
        self.session.keep_equal()
        self.lifted = [reads.tensor_path(t) for t in self.forward.trace.lifted]
        self.is_plain = hasattr(cls, "_fusegrad_sources")
        self.given = self._given_back() if self.is_plain else ()
        self.skip = frozenset(i for i, k in enumerate(self._kinds()) if k != "tensor")
        self.inner_views = self._inner_views()
        self.executables: dict[str, Executable] = {}
        self.nodes: dict[Any, Any] = {}  # the generated Functions and units over this specialisation
        self.written = written_placeholders(self.forward.trace.graph_module, len(fakes))
        self.unversioned = unversioned_placeholders(self.forward.trace.graph_module, len(fakes)) if self.written else []
        self.opaque = self.forward.trace.opaque
        told = [*self.binder.sources, *(s for node in self.opaque for s in node.hints)]
        self.symbols: AbstractSet[sympy.Symbol] = dict.fromkeys(told).keys()  # in this order in every process
        if self.opaque and self.writes_inputs:
            raise not_in_place(self.opaque[0])
        self.under_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        self._chosen: Chosen | None = None
        self._decided = False
        self.entries: dict[Any, BackwardEntry | CaptureError] = {}
        self.proved: set[Any] = set()  # of what backward is derived from
        self.keeper: Any = None  # where it is kept on disk
        self.first_outside = self.outside()  # when it was captured
        self.restrided = False  # the first call's comparison corrected strides
        self.shows_more = False  # than its operators say: one returns memory that it is given
        self.backward_failed = False  # then the user's own runs, from the next call on
        self.backward_faulty = False  # the same, and for the calls before
        self.backward_symbols = self._unbound_symbols()
        self.sharing = Sharing(self.forward.shared, self.arguments) if self.forward.shared else None
        self.since = len(self.session.env.guards)  # what one backward assumed, every later one was captured under

    def current_guard(self) -> Guard:
        """The conditions on sizes under which what is known by now holds."""
        return size_guard(self.session, self.forward.fakes)

    def _argument_names(self, count: int) -> list[str]:
        skip = 0 if uses_setup_context(self.cls) else 1
        return parameter_names(self.cls.forward, count, skip, "argument")  # type: ignore[attr-defined]

    def _backward_names(self) -> list[str]:
        """The user's names for what backward reads: his arguments, what forward made, his gradients."""
        method = backward_method(self.cls)
        assert method is not None
        residuals = ["" if p is None else self.name_at(p) for p in self.residual_places]
        symbols = [str(s) for s in self.backward_symbols]
        return [*residuals, *symbols, *parameter_names(method, len(self.forward.outputs), 1, "gradient")]

    def name_at(self, place: Place) -> str:
        """The user's name for what is at a place."""
        if place.kind == "input":
            return self.names[self.slots[place.index]]
        position = place.index + (len(self.forward.fake_outputs) if place.kind == "hidden" else 0)
        node = list(self.forward.trace.graph_module.graph.nodes)[-1].args[0][position]
        origin = getattr(node, "meta", {}).get("fusegrad_origin")
        return origin[0] if origin and origin[0] else f"{place.kind}_{place.index}"

    # ------------------------------------------------------------------ forward
    def _kinds(self) -> list[str]:
        return [self.forward.outputs[i].kind for i in self.forward.tensor_outputs]

    def _inner_views(self) -> frozenset[int]:
        """The outputs that are views of what nobody else sees: kernels make them by themselves."""
        kinds = [self.forward.outputs[i] for i in self.forward.tensor_outputs]
        return frozenset(i for i, o in enumerate(kinds) if o.kind == "tensor" and o.value)

    def sizes(self, args: Sequence[Any]) -> Sizes:
        """The session's symbols at this call."""
        return self.binder(self.tensors_of(args))

    def tensors_of(self, args: Sequence[Any]) -> list[Tensor]:
        return [args[i] for i in self.slots]

    def executable(self, backend: str) -> Executable:
        """forward on `backend`, prepared once."""
        if backend not in self.executables:
            with capture_lock:
                self._add_executable(backend)
        return self.executables[backend]

    def _add_executable(self, backend: str) -> None:
        if backend in self.executables:  # another thread was first
            return
        skip = self.skip if backend in KERNEL_BACKENDS else frozenset()
        name, report = f"{self.name}_forward", partial(self.report, "forward")
        self.executables[backend] = Executable(
            self.forward.trace, name, backend, skip, report, why_not=GIVEN_BACK if self.shows_more else ""
        )
        self.guard = self.current_guard()  # lowering may have learnt more about sizes

    def chosen(self, backend: str, sizes: Sizes) -> Chosen | None:
        """Cheaper residuals than the user's, on a kernel backend; decided once, at the first sizes."""
        if backend not in KERNEL_BACKENDS:
            return None
        if not self._decided:
            with capture_lock:
                self._choose(sizes)
        return self._chosen

    def _choose(self, sizes: Sizes) -> None:
        if not self._decided:
            self._chosen, self._decided = choose(self, sizes), True
            self.guard = self.current_guard()  # what backward assumed is in both graphs

    def known_choice(self) -> Chosen | None:
        """What was decided on residuals so far."""
        return self._chosen

    def chosen_executable(self, backend: str, chosen: Chosen) -> Executable:
        """forward on `backend`, with the chosen values as its hidden outputs."""
        key = f"{backend} chosen"
        if key not in self.executables:
            with capture_lock:
                self._add_chosen(key, backend, chosen)
        return self.executables[key]

    def _add_chosen(self, key: str, backend: str, chosen: Chosen) -> None:
        if key not in self.executables:
            name, report = f"{self.name}_forward", partial(self.report, "forward")
            graph = optimize(chosen.program.forward)
            self.executables[key] = Executable(self.forward.trace, name, backend, self.skip, report, graph)

    def _exactly_as_captured(self) -> Any:
        """Casts are part of the captured graph: autocast must not add its own while it is replayed."""
        return no_autocast() if self.under_autocast else _AS_IT_IS

    def run_forward(
        self, args: Sequence[Any], backend: str, chosen: Chosen | None = None, sizes: Sizes | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """(the user's tensor outputs, the hidden ones) on real tensors."""
        inputs = self.tensors_of(args)
        sizes = self.sizes(args) if sizes is None else sizes
        executable = self.executable(backend) if chosen is None else self.chosen_executable(backend, chosen)
        lifted = [r.get() for r in self.lifted if r is not None]
        given = [t.data if i in self.unversioned else t for i, t in enumerate(inputs)] if self.unversioned else inputs
        with self._between(executable, offered(), sizes) if self.opaque else self._exactly_as_captured() as now:
            results = executable(given, lifted, sizes if now is None else now)
        if now is not None:
            sizes.learn(now)
        n = len(self.forward.tensor_outputs)
        outputs = self.aliased(results[:n], inputs, sizes, results[n:]) if self.skip else results[:n]
        if not self.is_plain:
            outputs = [o if o._is_view() or i not in self.inner_views else o.view_as(o) for i, o in enumerate(outputs)]
        else:  # of memory that nobody else sees: autograd would refuse to write to it
            outputs = [o.detach() if o._is_view() and i not in self.skip else o for i, o in enumerate(outputs)]
        return outputs, results[n:]

    def aliased(
        self, outputs: list[Any], inputs: Sequence[Tensor], sizes: Sizes, hidden: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Outputs that are an input, show the memory of one or of another output, or are one object twice."""

        def view(fake: Tensor, base: Tensor, like: Tensor, tracked: bool) -> Tensor:
            shown = view_like(fake, base, sizes, like)
            return shown if tracked else shown.detach()

        return with_aliases(self.forward, outputs, inputs, hidden, view)

    def returned(
        self, outputs: Sequence[Tensor], inputs: Sequence[Any] = (), hidden: Sequence[Any] = (), sizes: Any = None
    ) -> Any:
        """The user's return value: tensors in their places among plain objects, a tuple where he returned one."""
        supply = iter(outputs)

        def leaf(value: Any) -> Any:
            return self.at(value.key, inputs, outputs, hidden) if isinstance(value, Hole) else rebind(value, sizes)

        full = tuple(
            exchanged(o.value, leaf) if o.kind == "object" else next(supply) for o in self.forward.outputs
        )
        return full if self.forward.is_tuple else full[0]

    def _given_back(self) -> tuple[tuple[int, int], ...]:
        """(result, argument) of each result of a plain function that is an argument, the very object.

        Raises CaptureError where a tensor requires grad that is no argument: no Function has a gradient for it.
        """
        if any(t.requires_grad for t in self.forward.trace.lifted):
            raise CaptureError(reason="a tensor from outside requires grad", where=self.forward_place())
        return tuple((i, self.slots[o.index]) for i, o in enumerate(self.forward.outputs) if o.kind == "input")

    def with_given(self, result: Any, args: Sequence[Any]) -> Any:
        """What a plain function returns: its arguments as they are, which a Function makes views of."""
        if not self.given:
            return result
        full = list(as_tuple(result))
        for i, argument in self.given:
            full[i] = args[argument]
        return tuple(full) if self.forward.is_tuple else full[0]

    def at(self, place: Place | None, inputs: Sequence[Any], outputs: Sequence[Any], hidden: Sequence[Any]) -> Any:
        """The real tensor at a place."""
        if place is None:
            return None
        return {"input": inputs, "output": outputs, "hidden": hidden}[place.kind][place.index]

    # ------------------------------------------------------------------ backward
    @property
    def writes_inputs(self) -> bool:
        """Whether forward writes to an argument's memory: then it matters whether arguments share memory."""
        return bool(self.forward.dirty) or bool(self.written)

    @once
    def draws(self) -> bool:
        """Whether forward may draw random numbers."""
        return draws(self.forward.trace)

    @property
    def residual_places(self) -> list[Place | None]:
        """What is kept for backward: the saved tensors, then tensors that were put on ctx as attributes."""
        return [*self.forward.saved, *self.forward.tensor_attributes.values()]

    @property
    def residual_places_present(self) -> list[Place]:
        """The places that hold a tensor."""
        return [p for p in self.residual_places if p is not None]

    def is_apart(self) -> bool:
        """Whether the user's own backward is what is differentiated: it has opaque nodes, or is given a number that
        forward read from a tensor."""
        return any(not s.is_integer for s in self.backward_symbols) or self.backward_is_split()

    @property
    def hints(self) -> dict[sympy.Symbol, int]:
        """The sizes that opaque nodes returned when they were captured."""
        entries = [e for e in self.entries.values() if isinstance(e, BackwardEntry)]
        opaque = [*self.opaque, *(node for entry in entries for node in entry.trace.opaque)]
        return {s: n for node in opaque for s, n in node.hints.items()}

    def takes(self, args: Sequence[Any]) -> bool:
        """Whether the arguments are of the kind that it was captured for, sizes apart."""
        slots = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        if slots != self.slots or len(args) != len(self.arguments):
            return False
        pairs = zip((args[i] for i in slots), self.forward.fakes, strict=True)
        constants = [a for i, a in enumerate(args) if i not in slots]
        own = [a for i, a in enumerate(self.arguments) if i not in slots]
        return constants == own and all(a.dtype == f.dtype and a.dim() == f.dim() for a, f in pairs)

    def _unbound_symbols(self) -> list[sympy.Symbol]:
        """Symbols that backward may need and that the shapes of its own inputs do not tell."""
        kept = [f for p in self.residual_places if (f := self.forward.fake_at(p)) is not None]
        bound = set(Binder([*kept, *self.forward.fake_outputs]).sources)
        known = self.symbols
        wanting = [f for i, f in zip(self.slots, self.forward.fakes, strict=True) if self.forward.needs_input_grad[i]]
        shapes = [e for f in (*kept, *self.forward.fake_outputs) for e in (*f.shape, *f.stride())]
        shapes += [e for f in wanting for e in f.shape]
        wanted = symbols_in(self.forward.constants.values()) | symbols_in(shapes)
        masked = set(Binder(kept, ("size",)).sources)
        return sorted(((wanted & known) - (bound & masked)), key=str)

    def constants_at(self, sizes: dict[sympy.Symbol, Any]) -> dict[str, Any]:
        """What forward left on ctx and is no tensor, at these sizes."""
        return {k: rebind(v, sizes) for k, v in self.forward.constants.items()}

    def attributes(self, tensors: Sequence[Any], sizes: dict[sympy.Symbol, Any]) -> dict[str, Any]:
        """ctx attributes for a run of the user's own body."""
        return put_together(self.constants_at(sizes), dict(zip(self.forward.tensor_attributes, tensors, strict=True)))

    def users_backward(
        self,
        residuals: Sequence[Any],
        sizes: dict[sympy.Symbol, Any],
        gradients: Sequence[Any],
        attached: bool = False,
        left: dict[str, Any] | None = None,
    ) -> tuple[Any, ...]:
        """The user's own backward body on whatever is given. attached: without its `once_differentiable`.

        left: ctx's attributes after the last run of the same node, and after this one.
        """
        n = len(self.forward.saved)
        residuals = self._as_followed(residuals)
        attributes = {} if left is None else left
        if not attributes:
            attributes.update(self.attributes(residuals[n:], sizes))
        may_change = left is not None
        return run_backward(
            self.cls, self.forward, residuals[:n], attributes, gradients, self.count, attached, may_change
        )

    def _as_followed(self, residuals: Sequence[Any]) -> Sequence[Any]:
        """What is kept for backward, requiring grad as in eager, where backward and what it calls may ask for that.

        At the bottom of torch.func it does not; above, the transforms say themselves what they differentiate.
        """
        if transforms_active() or is_outer(residuals):
            return residuals
        pairs = zip(residuals, self.residual_places, strict=True)
        return [followed(r) if self._requires_grad(p) else r for r, p in pairs]

    def _requires_grad(self, place: Place | None) -> bool:
        """Whether autograd follows what is at a place, in a call that it follows."""
        forward = self.forward
        if place is None:
            return False
        if place.kind == "input":
            return forward.needs_input_grad[self.slots[place.index]]
        moves = place.kind == "output" and any(forward.needs_input_grad)
        return moves and place not in forward.non_differentiable and is_float(forward.fake_at(place))

    def forward_place(self) -> str:
        """`file:line` of the user's forward."""
        return method_place(self.cls.forward)  # type: ignore[attr-defined]

    def backward_place(self) -> str:
        """`file:line` of the user's backward."""
        return method_place(backward_method(self.cls) or self.cls.forward)  # type: ignore[attr-defined]

    def entry(self, kinds: tuple[Any, ...]) -> BackwardEntry:
        """The captured backward for these gradients; raises CaptureError (the same each time) where it cannot be."""
        key = self._now(kinds)
        if key not in self.entries:
            with capture_lock, under(self.switches):
                key = self._add_entry(key, kinds)
        entry = self.entries[key]
        if isinstance(entry, CaptureError):
            raise entry.bare()
        return entry

    def adopt(self, cls: type, reads: Reads) -> None:
        """Another backward in the place of the one that could not be captured; what it reads, and does besides."""
        self.cls, self.reads, self.backward_failed = cls, reads.with_arguments(self.arguments), False
        self.entries.clear()
        for unit in self.nodes.values():
            if hasattr(unit, "reads"):
                unit.reads = self.reads

    @property
    def serves_backward(self) -> bool:
        """Whether gradients come from a captured backward, of some kind at least."""
        return any(isinstance(e, BackwardEntry) and e.executables for e in self.entries.values())

    def _now(self, kinds: tuple[Any, ...]) -> Any:
        """What backward depends on: the gradients, and what is read from outside, which may change after forward."""
        return kinds, *self.outside(), backward_method(self.cls), self.cls.jvp  # type: ignore[attr-defined]

    def outside(self) -> tuple[Any, ...]:
        """What is read from outside, and torch's state, at present."""
        return self.reads.facts(), lasting_state()

    def add_split_entry(
        self, kinds: tuple[Any, ...], tape: Tape, residuals: Sequence[Any], sizes: Sizes, gradients: Sequence[Any]
    ) -> BackwardEntry | None:
        """Capture backward with opaque nodes, whose results are on the tape, and compare it at once."""
        key, others = self._now(kinds), self.other_entries(kinds)
        if len(others) >= MOST_GRAPHS:
            return None
        self.session.move_to(sizes)
        try:
            with self.counted():
                entry = self._capture_backward(kinds, tape.again())
            self._compare_backward(kinds, entry, residuals, sizes, gradients, tape)
        except CaptureError as error:
            self.entries[key] = error.bare()
            self.backward_failed = self.backward_failed or not isinstance(error, OpaqueMet)
            raise
        entry.others, entry.compared = others, True
        self.entries[self._now(kinds)] = entry  # the capture may have found more that backward reads
        if entry.guards:  # no other capture of it is made beside this one: calls of other sizes begin anew
            self.guard = self.current_guard()
        return entry

    def knows(self, sizes: Sizes) -> bool:
        """Whether what backwards assumed about sizes, under which every later one is captured, holds at these."""
        given = self.binder.sources.keys()
        return all(bool(c.xreplace(sizes)) for c in self.session.conditions(given, self.since))

    def other_entries(self, kinds: tuple[Any, ...]) -> list[BackwardEntry]:
        """What backward was captured as for these gradients, newest first."""
        known = self.entries.get(self._now(kinds))
        return [known, *known.others] if isinstance(known, BackwardEntry) else []

    def executable_of_entry(self, entry: BackwardEntry, kinds: tuple[Any, ...], backend: str) -> Executable:
        """A captured backward on `backend`, on the user's own residuals."""
        with capture_lock, under(self.switches):
            if backend not in entry.executables:
                entry.executables[backend] = self._backward_executable(entry, kinds, backend, None)
                entry.learn(self.session.conditions(self.symbols, entry.since))
        return entry.executables[backend]

    def known_kinds(self) -> tuple[Any, ...]:
        """The gradients to explain backward for: the commonest; with opaque nodes, those that it was called with."""
        predicted = self.predicted_kinds()
        if isinstance(self.entries.get(self._now(predicted)), BackwardEntry):
            return predicted
        split_for = [k[0] for k, e in self.entries.items() if isinstance(e, BackwardEntry) and e.trace.opaque]
        return split_for[-1] if split_for else predicted

    def backward_is_split(self) -> bool:
        """Whether the commonest backward has opaque nodes."""
        try:
            with plain_tensors(), torch.no_grad():
                return bool(self.entry(self.predicted_kinds()).trace.opaque)
        except OpaqueMet:
            return True
        except CaptureError:
            return False

    def _add_entry(self, key: Any, kinds: tuple[Any, ...]) -> Any:
        """Captures backward, if no other thread was first; its key, with what the capture found that it reads."""
        if key in self.entries:
            return key
        try:
            with self.counted():
                found = self._capture_backward(kinds)
            key = self._now(kinds)
            self.entries[key] = found
        except CaptureError as error:
            self.entries[key] = error.bare()
            self.backward_failed = self.backward_failed or not isinstance(error, OpaqueMet)
        return key

    def _capture_backward(self, kinds: tuple[Any, ...], tape: Tape | None = None) -> BackwardEntry:
        require_allowed(f"{self.name}.backward")
        count("captures")
        residuals, symbols = self._kept_again()
        fakes = [self._fake_gradient(i, k) for i, k in enumerate(kinds)]
        live = [i for i, v in enumerate([*residuals, *symbols, *fakes]) if v is not None]
        total, answer = len(residuals) + len(symbols) + len(fakes), False
        asked: list[History] = []

        def body(*present: Any) -> tuple[Any, ...]:
            full: list[Any] = [None] * total
            for i, value in zip(live, present, strict=True):
                full[i] = value
            r, s = len(residuals), len(residuals) + len(symbols)
            told = dict(zip(self.backward_symbols, full[r:s], strict=True))
            sizes = Binder(residuals, ("size",)).read(full[:r]) | told
            with known_history(full[:r], answer) as known:
                asked.append(known)
                return self._finished(self.users_backward(full[:r], sizes, full[s:]))

        everything = [*residuals, *symbols, *fakes]
        gradients = ", ".join("absent" if k is None else str(k) for k in kinds)
        with logs.capturing(f"{self.name}.backward for gradients {gradients}", lambda: trace, self.backward_place()):
            again = None if tape is None else tape.again()
            trace = guarded_trace(self.session, body, [everything[i] for i in live], self.reads, tape=tape)
            if asked[-1].place is not None:
                answer, first_asked = True, asked[-1]
                other = guarded_trace(self.session, body, [everything[i] for i in live], self.reads, tape=again)
                require_no_difference(first_asked, trace, asked[-1], other)
        names = self._backward_names()
        trace.names = [names[i] for i in live]
        trace.output_names = [f"grad_{name}" for name in self.names]
        guards = self.session.conditions(self.symbols, self.since)
        first = len(residuals) + len(symbols)
        passed = {r: live[p] - first for r, p in _passed_through(trace).items() if p < len(live) and live[p] >= first}
        viewed = {r: (live[p] - first, f) for r, (p, f) in _viewed(trace).items() if p < len(live) and live[p] >= first}
        lifted = [self.reads.tensor_path(t) for t in trace.lifted]
        written = tuple(live[i] for i in written_placeholders(trace.graph_module, len(live)))
        unversioned = tuple(unversioned_placeholders(trace.graph_module, len(live))) if written else ()
        return BackwardEntry(trace, guards, lifted, self.since, passed, viewed, written, unversioned)

    def _kept_again(self) -> tuple[list[Tensor | None], list[Any]]:
        """Fresh fakes of what is kept for backward, and the sizes that they do not tell."""
        kept = [self.forward.fake_at(p) for p in self.residual_places]
        symbols = [number_of(self.session, s) for s in self.backward_symbols]
        again = [self.session.fake_again(r) if r is not None else None for r in kept]
        for r, place in zip(again, self.residual_places, strict=True):
            if r is not None and self._requires_grad(place):
                r.requires_grad_()
        return again, symbols

    def captured_jvp(self, tangents: Sequence[Tensor]) -> Trace:
        """The user's jvp over what is kept for backward, on tangents like these: its last inputs."""
        count("captures")
        residuals, symbols = self._kept_again()
        present = [r for r in residuals if r is not None]
        n, m = len(present), len(present) + len(symbols)

        def body(*values: Any) -> tuple[Any, ...]:
            supply = iter(values[:n])
            kept = [next(supply) if r is not None else None for r in residuals]
            sizes = Binder(residuals, ("size",)).read(kept) | dict(zip(self.backward_symbols, values[n:m], strict=True))
            return self._jvp_of_kept(kept, sizes, values[m:])

        moving = [self.session.fake_again(t) for t in tangents]
        return guarded_trace(self.session, body, [*present, *symbols, *moving], self.reads)

    def _jvp_of_kept(
        self, kept: Sequence[Any], sizes: dict[sympy.Symbol, Any], moving: Sequence[Any]
    ) -> tuple[Any, ...]:
        n, supply = len(self.forward.saved), iter(moving)
        attributes = self.attributes(kept[n:], sizes)
        ctx = BackwardContext(kept[:n], attributes, self.forward.needs_input_grad[: self.count])
        tangents = [None if like is None else next(supply).clone() for like in attributes["_fusegrad_likes"]]
        return as_tuple(self.cls.jvp(ctx, *tangents))  # type: ignore[attr-defined]

    def predicted_kinds(self) -> tuple[Any, ...]:
        """The commonest backward: every differentiable output has a gradient, each row-major."""
        return tuple(None if g is None else "contiguous" for g in self.per_output(self.forward.fake_outputs))

    def per_output(self, gradients: Sequence[Any]) -> list[Any]:
        """Of one gradient per tensor output those that backward is given: an output that never moves has one only where
        zeros are made for it."""
        forward = self.forward
        dropped = () if forward.materialize_grads and forward.materialize_non_diff_grads else self._never_move()
        supply = iter(None if i in dropped else g for i, g in enumerate(gradients))
        return [None if o.kind == "object" else next(supply) for o in self.forward.outputs]

    def _never_move(self) -> set[int]:
        """The tensor outputs without a gradient: marked ones, and integers."""
        marked = {p.index for p in self.forward.non_differentiable if p.kind == "output"}
        return marked | {i for i, o in enumerate(self.forward.fake_outputs) if not is_float(o)}

    def _fake_gradient(self, index: int, kind: Any) -> Any:
        if kind is None:
            return None
        like = self.gradient_likes()[index]
        if isinstance(kind, tuple):
            return self.session.fake_permuted(like, kind)
        return self.session.fake_like(like, expanded=kind == "expanded")

    def gradient_likes(self) -> list[Any]:
        """Per user output: the fake that its gradient looks like, None for outputs that are no tensors."""
        supply = iter(self.forward.fake_outputs)
        return [None if o.kind == "object" else next(supply) for o in self.forward.outputs]

    def _finished(self, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """What autograd does to a gradient, done in the graph: reduced to the input's shape, cast to its dtype."""
        finished: list[Any] = []
        for argument, gradient in enumerate(gradients):
            if self._unwanted(argument):
                finished.append(None)
            elif isinstance(gradient, Tensor) and argument in self.slots:
                like = self.forward.fakes[self.slots.index(argument)]
                finished.append(_as_gradient_of(like.dtype, self.session.settled(like.shape), gradient))
            else:
                finished.append(gradient if gradient is None or isinstance(gradient, Tensor) else _refuse(gradient))
        return tuple(finished)

    def unasked_layout(
        self, residuals: Sequence[Any], sizes: Sizes, gradients: Sequence[Any], chosen: Chosen | None
    ) -> str | None:
        """Why backward, which may ask for layouts, meets others than it was captured with; None where it does not."""
        if not self.reads.asks_layout:
            return None
        if any(in_a_class(g) is not g for g in gradients):
            return "it may ask how a gradient lies in memory, which has gaps"
        pairs = () if chosen is not None else zip(residuals, self.residual_places, strict=True)
        kept = [(r, f) for r, p in pairs if (f := self.forward.fake_at(p)) is not None]
        if any(tuple(r.stride()) != tuple(rebind(tuple(f.stride()), sizes)) for r, f in kept):
            return "it may ask how a saved tensor lies in memory, which a hook gave another layout"
        return None

    def as_autograd_takes(self, argument: int, gradient: Any, sizes: dict[sympy.Symbol, Any]) -> Any:
        """One gradient reduced to its argument's shape and cast to its dtype, at the given sizes.

        Where none is needed it is dropped: autograd does not look at its shape either.
        """
        if self._unwanted(argument):
            return None
        if not isinstance(gradient, Tensor) or argument not in self.slots:
            return gradient
        fake = self.forward.fakes[self.slots.index(argument)]
        shape = rebind(fake.shape, sizes)
        if tuple(gradient.shape) != tuple(shape):
            gradient = gradient.sum_to_size(shape)
        return _cast(gradient, fake.dtype)

    def _unwanted(self, argument: int) -> bool:
        """A tensor argument that needs no gradient: autograd would drop what backward returns for it."""
        return argument in self.slots and not self.forward.needs_input_grad[argument]

    def run_backward(
        self,
        residuals: Sequence[Any],
        sizes: Sizes,
        gradients: Sequence[Tensor | None],
        backend: str,
        chosen: Chosen | None = None,
    ) -> tuple[Any, ...]:
        """The gradients, from kernels. Raises CaptureError where the user's own body has to run instead."""
        given = gradients
        gradients = [in_a_class(g) for g in given]
        kinds = tuple(gradient_kind(g) for g in gradients)
        entry = self.entry(kinds)
        key = backend if chosen is None else f"{backend} chosen"
        if entry.admits(sizes) and key not in entry.executables:
            originals = residuals if chosen is None else chosen.rebuilt(residuals, sizes)
            with capture_lock, under(self.switches):
                if key not in entry.executables:  # no other thread was first
                    self._compare_backward(kinds, entry, originals, sizes, gradients)
                    executable = self._backward_executable(entry, kinds, backend, chosen)
                    entry.learn(self.session.conditions(self.symbols, entry.since))
                    entry.executables[key] = executable
        if not entry.admits(sizes):
            if entry.opaque:
                raise Mismatch(self.name, Tape())
            originals = residuals if chosen is None else chosen.rebuilt(residuals, sizes)
            return self._sibling_backward(originals, sizes, gradients, backend)
        return self.run_entry(entry, entry.executables[key], residuals, sizes, given)

    def run_entry(
        self,
        entry: BackwardEntry,
        executable: Executable,
        residuals: Sequence[Any],
        sizes: Sizes,
        given: Sequence[Any],
        tape: Tape | None = None,
    ) -> tuple[Any, ...]:
        """The gradients from one captured backward. tape: results of its opaque nodes that there are already."""
        symbols = [sizes[s] for s in self.backward_symbols]
        inputs = [v for v in (*residuals, *symbols, *given) if v is not None]
        by_torch = executable.backend == "reference"
        for i in range(len(inputs) - sum(g is not None for g in given), len(inputs)):
            if not (by_torch and entry.takes_gaps[i]):
                inputs[i] = in_a_class(inputs[i])
        for i in entry.unversioned:
            inputs[i] = inputs[i].data
        lifted = [r.get() for r in entry.lifted if r is not None]
        with self._exactly_as_captured() if not entry.opaque else self._between(executable, tape, sizes) as now:
            with drawing_again(inputs) if entry.draws else _AS_IT_IS:
                results = executable(inputs, lifted, sizes if now is None else now)
        view = lambda fake, gradient: view_like(fake, in_a_class(gradient), sizes)  # type: ignore[arg-type]  # noqa: E731
        return tuple(entry.with_given(results, given, executable.backend, view))

    @contextmanager
    def _between(self, executable: Executable, tape: Tape | None, sizes: Sizes) -> Iterator[Sizes]:
        """Within the block a graph with opaque nodes runs; the sizes that it runs with, to which the nodes add."""
        now = BoundSizes(sizes)
        run = Run(tape or Tape(), now, laid_out=executable.backend in KERNEL_BACKENDS)
        with self._exactly_as_captured(), running(run):
            yield now

    def _backward_executable(
        self, entry: BackwardEntry, kinds: tuple[Any, ...], backend: str, chosen: Chosen | None
    ) -> Executable:
        name, report = f"{self.name}_backward", partial(self.report, "backward")
        graph = None if chosen is None else self._graph_from(chosen, entry, kinds, name)
        viewed = entry.viewed if backend in KERNEL_BACKENDS else {}
        return Executable(entry.trace, name, backend, frozenset({*entry.passed, *viewed}), report, graph)

    def _graph_from(self, chosen: Chosen, entry: BackwardEntry, kinds: tuple[Any, ...], name: str) -> Graph:
        """backward on the residuals that were chosen. Raises CaptureError where we fail at that."""
        build, report = partial(chosen.backward_graph, kinds, entry, name), partial(self.report, "backward")
        graph = or_fall_back(build, report, "backward runs as written")
        if graph is None:
            raise CaptureError(reason="internal error: it is not made to start from what forward kept", where="unknown")
        return graph

    def _sibling_backward(
        self, residuals: Sequence[Any], sizes: Sizes, gradients: Sequence[Any], backend: str
    ) -> tuple[Any, ...]:
        """backward where its capture assumed other sizes than the call has."""
        sibling, args = self.sibling_at(sizes)
        return sibling.run_backward(residuals, sibling.binder(args), gradients, backend)

    def sibling_at(self, sizes: Sizes) -> tuple[Specialization, list[Any]]:
        """A capture at these sizes, and arguments that have them. Raises CaptureError."""
        for sibling, args in self.siblings:
            if all(_same_shape(a, f, sizes) for a, f in zip(args, self.forward.fakes, strict=True)):
                return sibling, args
        args = [_stand_in(f, sizes) for f in self.forward.fakes]
        supply = iter(args)
        full = [next(supply) if i in self.slots else a for i, a in enumerate(self.arguments)]
        sibling = Specialization(self.cls, full, self.reads, self.dynamic, self.report)
        if sibling.residual_places != self.residual_places:
            raise CaptureError(reason="what it saves depends on the sizes", where="unknown")
        self.siblings.append((sibling, args))
        return sibling, args

    def entry_at(self, kinds: tuple[Any, ...], sizes: Sizes) -> tuple[Specialization, BackwardEntry] | None:
        """The backward that runs at these sizes, and whose it is; None where that is found out by running it."""
        entry = self.entry(kinds)
        if entry.admits(sizes):
            return self, entry
        if entry.opaque:
            return None
        added = next((other for other in entry.others if other.admits(sizes) and not other.opaque), None)
        if added is not None:
            return self, added
        sibling, args = self.sibling_at(sizes)
        return sibling.entry_at(kinds, sibling.binder(args))

    def is_for_other_sizes(self, kinds: tuple[Any, ...], sizes: Sizes) -> bool:
        """Whether no backward can be made for these: of a forward with opaque nodes there is no capture beside it."""
        known = self.other_entries(kinds)
        fits = self.knows(sizes) or any(entry.opaque or entry.admits(sizes) for entry in known)
        return bool(self.opaque and known) and not fits

    # ------------------------------------------------------------------ first calls
    def check_forward(self, args: Sequence[Any], tape: Tape | None = None) -> str | None:
        """Why the captured forward is not the user's method; None where it is (or where it cannot be compared)."""
        if not settings().check:
            return None
        sizes = self.sizes(args)
        values = self._light([args[i] for i in self.slots], self.forward.fakes, self.forward.trace, sizes)
        if values is None:
            return None
        supply = iter(values)
        arguments = [next(supply) if i in self.slots else a for i, a in enumerate(args)]
        cut_down = any(a is not b for a, b in zip(arguments, args, strict=True))
        if cut_down and tape is not None:
            return None
        at = self.sizes(arguments)
        replay = _Recorded(replayed(self._replay_forward, tape, at))
        theirs = played(self.users_forward, tape)
        why = self._compared(replay, theirs, arguments, cut_down, tape or self.forward.trace)
        if why is None and replay.results:  # empty where cut data was no fit for the method
            captured = self.forward
            self.shows_more = self._shows_memory_of(replay.given, replay.results)
            fakes = self._with_real_strides(captured.trace, replay.results, at)
            for kept in (captured.fake_outputs, captured.fake_hidden):
                kept[:] = [f if f is not None else k for f, k in zip(fakes, kept, strict=False)]
                fakes = fakes[len(kept) :]
        return why

    def _shows_memory_of(self, given: Sequence[Any], results: Sequence[Any]) -> bool:
        """Whether an output that the capture takes for one of its own shows an argument: an operator did not say so."""
        held = {memory_of(t) for t in given if isinstance(t, Tensor) and t.layout is torch.strided}
        pairs = zip(results, self._kinds(), strict=False)
        own = [r for r, kind in pairs if kind == "tensor" and isinstance(r, Tensor) and r.layout is torch.strided]
        return any(memory_of(r) in held for r in own)

    def _with_real_strides(self, trace: Trace, results: Sequence[Any], sizes: Sizes) -> list[Tensor | None]:
        """Per output a fake with eager's strides where the captured one had others; the trace is told as well."""
        (made,) = trace.graph_module.graph.find_nodes(op="output")[0].args
        found: list[Tensor | None] = []
        for node, result in zip(made, results, strict=False):
            order = None if node is None else order_unlike(node.meta.get("val"), result, sizes)
            found.append(None if order is None else self.session.fake_permuted(node.meta["val"], order))
            if found[-1] is not None:
                node.meta["val"] = found[-1]
                self.restrided = True
        return found

    def _light(self, values: Sequence[Any], fakes: Sequence[Any], trace: Trace, sizes: Sizes) -> list[Any] | None:
        """The values, cut down where the user's method would fill memory; None where no cut is legal."""
        if intermediate_bytes(trace.graph_module, sizes) <= settings().check_bytes:
            return list(values)
        return cut(values, fakes, sizes, self.session.conditions(sizes))

    def _replay_forward(self, args: Sequence[Any]) -> list[Any]:
        with self._exactly_as_captured():
            lifted = [r.get() for r in self.lifted if r is not None]
            return list(step_by_step(self.forward.trace.graph_module, *self.tensors_of(args), *lifted))

    def users_forward(self, args: Sequence[Any]) -> list[Any]:
        """The user's own forward: his tensors, then the hidden ones."""
        ctx = ForwardContext(self.forward.needs_input_grad[: self.count])
        output = call_forward(self.cls, ctx, closed(args, self.count))
        tensors = [o for o in as_tuple(output) if isinstance(o, Tensor)]
        return [*tensors, *self._hidden_in(ctx, output, self.tensors_of(args))]

    def users_hidden(self, args: Sequence[Any], output: Any) -> list[Any]:
        """What the user's setup_context keeps besides arguments and outputs."""
        ctx = ForwardContext(self.forward.needs_input_grad[: self.count])
        self.cls.setup_context(ctx, tuple(closed(args, self.count)), output)  # type: ignore[attr-defined]
        return self._hidden_in(ctx, output, self.tensors_of(args))

    def _hidden_in(self, ctx: ForwardContext, output: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that are kept and neither arguments nor outputs, in the order of `fake_hidden`."""
        outputs = as_tuple(output)
        seen = {id(t): t for t in (*inputs, *(o for o in outputs if isinstance(o, Tensor)))}
        contained = [v for o in outputs if not isinstance(o, Tensor) for v in leaves(o) if isinstance(v, Tensor)]
        on_ctx = (*ctx.to_save, *ctx.saved_for_forward, *tensors_of_attributes(attributes_of(ctx)))
        kept = (*self._bases(outputs), *contained, *on_ctx)
        hidden: list[Tensor] = []
        for t in kept:
            if t is not None and id(t) not in seen:
                seen[id(t)] = t
                hidden.append(t)
        return hidden

    def _bases(self, outputs: Sequence[Any]) -> list[Tensor]:
        """The values in between of which some outputs are parts, in the order in which these were found."""
        parts = {o.index: outputs[at] for at, o in enumerate(self.forward.outputs) if o.kind == PART}
        return [parts[i]._base for i in sorted(parts)]

    def with_tensors(self, tensors: Sequence[Any]) -> list[Any]:
        """The arguments of this specialisation with other tensors."""
        supply = iter(tensors)
        return [next(supply) if i in self.slots else a for i, a in enumerate(self.arguments)]

    def _compare_backward(
        self,
        kinds: tuple[Any, ...],
        entry: BackwardEntry,
        residuals: Sequence[Any],
        sizes: Any,
        gradients: Sequence[Any],
        tape: Tape | None = None,
    ) -> None:
        """The first call's comparison with the user's own backward; where they differ, his own runs from now on."""
        try:
            self._check_backward(entry, residuals, sizes, gradients, tape)
        except CaptureError as error:
            self.entries[self._now(kinds)], self.backward_failed = error.bare(), True
            raise

    def _check_backward(
        self,
        entry: BackwardEntry,
        residuals: Sequence[Any],
        sizes: Any,
        gradients: Sequence[Any],
        tape: Tape | None = None,
    ) -> None:
        if not settings().check or entry.executables or entry.compared:
            return
        fakes = [*(self.forward.fake_at(p) for p in self.residual_places), *self.gradient_likes()]
        values = self._light([*residuals, *gradients], fakes, entry.trace, sizes)
        if values is None:
            return
        at = self.binder_of_values(values, fakes, sizes)
        if at is not sizes and tape is not None:
            return
        r = len(residuals)

        def users(given: Sequence[Any]) -> Sequence[Any]:
            results = self.users_backward(given[:r], at, given[r:])
            return [self.as_autograd_takes(i, g, at) for i, g in enumerate(results)]

        def mine(given: Sequence[Any]) -> Sequence[Any]:
            symbols = [at[s] for s in self.backward_symbols]
            inputs = [v for v in (*given[:r], *symbols, *given[r:]) if v is not None]
            with self._exactly_as_captured():
                lifted = [p.get() for p in entry.lifted if p is not None]
                return step_by_step(entry.trace.graph_module, *inputs, *lifted)  # type: ignore[no-any-return]

        replay = _Recorded(replayed(mine, tape, known := BoundSizes(at)))
        why = self._compared(replay, played(users, tape), values, at is not sizes, tape or entry.trace)
        if why is not None:
            raise CaptureError(reason=why, where="unknown")
        self._with_real_strides(entry.trace, replay.results, known)

    def binder_of_values(self, values: Sequence[Any], fakes: Sequence[Any], sizes: Any) -> Any:
        """The sizes at which cut-down values stand; the given ones where nothing was cut."""
        present = [(v, f) for v, f in zip(values, fakes, strict=True) if v is not None and f is not None]
        found = Binder([f for _, f in present])([v for v, _ in present])
        return sizes if all(sizes.get(s) == n for s, n in found.items()) else BoundSizes({**sizes, **found})

    def _compared(
        self, mine: Any, users: Any, arguments: Sequence[Any], cut_down: bool, of: Trace | Tape
    ) -> str | None:
        """of: the graph, or the tape of its nested calls, which are not to be run again."""
        try:
            with functions_as_written():
                why = differs(mine, users, arguments)
                if why is None or isinstance(of, Tape) or not takes_memory(of.graph_module):
                    return why
                with MemoryFilled():  # type: ignore[no-untyped-call]
                    return differs(mine, users, arguments)
        except Exception:
            if cut_down or is_made_up():  # such data may be illegal for the method where the real data is not
                self.unchecked = is_made_up()
                return None
            raise


def require_allowed(what: str) -> None:
    """Raises CaptureError where whoever watches does not let this be captured."""
    if not allowed("capture", what):
        raise CaptureError(reason="it is not captured while a fault is looked for", where="unknown")


def _passed_through(trace: Trace) -> dict[int, int]:
    """Results of a trace that are one of its inputs, untouched: {result: input}."""
    graph = trace.graph_module.graph
    (made,) = graph.find_nodes(op="output")[0].args
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    untouched = {n: i for i, n in enumerate(inputs) if not any(map(_is_write, n.users))}
    return {r: untouched[n] for r, n in enumerate(made) if n in untouched}


def _viewed(trace: Trace) -> dict[int, tuple[int, Tensor]]:
    """Results of a trace that are views of one of its inputs: {result: (input, what the view is like)}."""
    graph = trace.graph_module.graph
    (made,) = graph.find_nodes(op="output")[0].args
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    if any(map(_is_write, graph.nodes)):
        return {}
    found = {r: (_base_of(n), n) for r, n in enumerate(made) if isinstance(n, torch.fx.Node) and n not in inputs}
    return {r: (inputs.index(base), n.meta["val"]) for r, (base, n) in found.items() if base in inputs}


def _base_of(node: torch.fx.Node) -> torch.fx.Node:
    """What a chain of views begins with."""
    while getattr(getattr(node.target, "_schema", None), "name", None) in VIEWS:
        node = node.all_input_nodes[0]
    return node


GIVEN_BACK = "an operator returns memory that it is given, of which it says nothing"
VIEWS = frozenset(f"aten::{name}" for name in "t transpose permute view expand unsqueeze squeeze select slice".split())
"""What looks at its argument's memory and does nothing else."""


def _is_write(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable

class _Recorded:
    """A call that remembers its results."""

    def __init__(self, call: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        self.call, self.given, self.results = call, list[Any](), list[Any]()

    def __call__(self, given: Sequence[Any]) -> Sequence[Any]:
        self.given = list(given)
        self.results = list(self.call(given))
        return list(self.results)


def order_unlike(fake: Any, real: Any, sizes: Sizes) -> tuple[int, ...] | None:
    """The axes of `real` from outermost to innermost, where it is dense and its strides are not those of `fake`."""
    if not isinstance(fake, Tensor) or not isinstance(real, Tensor) or not real.numel():
        return None
    if real.layout is not torch.strided:
        return None
    expected = rebind(tuple(fake.stride()), sizes)
    if all(a == b or n == 1 for a, b, n in zip(expected, real.stride(), real.shape, strict=True)):
        return None
    return _dense_order(real)


def gradient_kind(gradient: Tensor | None) -> Any:
    """The layout class of a gradient: "contiguous", "expanded" (every stride 0), or its axes, outermost first.

    (1, 0)  dense, transposed      (0, ~1)  expanded along axis 1, dense otherwise: what `.sum(1)` hands back
    """
    if gradient is None:
        return None
    if gradient.is_contiguous():
        return "contiguous"
    return "expanded" if not any(gradient.stride()) else _axes_by_stride(gradient)


def _axes_by_stride(t: Tensor) -> tuple[int, ...]:
    order = sorted(range(t.dim()), key=lambda i: (-t.stride()[i], -t.shape[i], i))
    still = [i for i in order if t.stride()[i] == 0 and t.shape[i] > 1]
    return (*(i for i in order if i not in still), *(~i for i in still))


def _dense_order(t: Tensor) -> tuple[int, ...] | None:
    """The axes, outermost first, where `t` is dense in that order; None where it has gaps or stands still."""
    order = _axes_by_stride(t)
    return order if min(order, default=0) >= 0 and t.permute(order).is_contiguous() else None


def in_a_class(gradient: Tensor | None) -> Tensor | None:
    """The gradient itself where its layout has a class, else a copy without the gaps (sliced and stepped gradients)."""
    if gradient is None or gradient.is_contiguous() or not any(gradient.stride()):
        return gradient
    order = _axes_by_stride(gradient)
    moving = tuple(axis for axis in order if axis >= 0)
    core = gradient[tuple(slice(None) if axis in moving else slice(0, 1) for axis in range(gradient.dim()))]
    axes = [*moving, *(~axis for axis in order[len(moving) :])]
    if core.permute(axes).is_contiguous():
        return gradient
    back = sorted(range(len(axes)), key=axes.__getitem__)
    return core.permute(axes).contiguous().permute(back).expand(gradient.shape)


def _as_gradient_of(dtype: torch.dtype, shape: Sequence[Any], gradient: Tensor) -> Tensor:
    if [_expr(n) for n in gradient.shape] != [_expr(n) for n in shape]:
        gradient = gradient.sum_to_size(shape)
    return _cast(gradient, dtype)


def _cast(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """As autograd casts a gradient; a complex one for a real argument is left for it to refuse."""
    return gradient if gradient.dtype == dtype or gradient.is_complex() > dtype.is_complex else gradient.to(dtype)


def _expr(size: Any) -> Any:
    return size if isinstance(size, int) else size.node.expr


def _stand_in(fake: Tensor, sizes: Sizes) -> Tensor:
    shape, strides = rebind(fake.shape, sizes), rebind(tuple(fake.stride()), sizes)
    with FakeTensorMode():
        return torch.empty_strided(shape, strides, dtype=fake.dtype, device=fake.device).requires_grad_(
            fake.requires_grad
        )


def _same_shape(tensor: Tensor, fake: Tensor, sizes: Sizes) -> bool:
    return tuple(tensor.shape) == tuple(rebind(fake.shape, sizes))


def followed(value: Tensor) -> Tensor:
    """An alias that requires grad, but for what does so. No `detach` that a capture would take for the user's."""
    return value if value.requires_grad else torch.ops.aten.detach.default(value).requires_grad_()


def _refuse(value: Any) -> Any:
    raise CaptureError(reason=f"backward returns a {type(value).__name__} as a gradient", where="unknown")


def hint_of(session: Session, symbol: sympy.Symbol) -> Any:
    """The value of a symbol at the capture."""
    values = getattr(session.env, "backed_var_to_val", None) or session.env.var_to_val
    return int(values[symbol]) if symbol.is_integer else float(values[symbol])


def number_of(session: Session, symbol: sympy.Symbol) -> Any:
    """A symbol as a number that can be traced."""
    env, hint = session.env, hint_of(session, symbol)
    return env.create_symintnode(symbol, hint=hint) if symbol.is_integer else env.create_symfloatnode(symbol, hint=hint)
