"""A specialisation out of a table. What the table does not tell is captured again, at the sizes of the stored capture.

A capture is a function of the code, of what it reads, and of the example that it is shown: the second one has the same
symbols, guards and places as the first. That is verified, and where it is not so the user's own method runs.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import sympy
import torch

from ...ir.errors import ParseError
from ...ir.prims import PRIMS
from ...ir.program import Program, ValueRef
from ...ir.switches import use_switch_state
from ...ir.text.document import document, graph_from, symbols_document, symbols_from
from ...ir.text.text import show
from ...tracer.capture.capture import capture_lock
from ...tracer.function import ForwardCapture, ForwardTrace, Output, expression_at_forward, methods_now
from ...tracer.opaque.shared import Shared
from ...tracer.reads.reads import Reads
from ...tracer.torch_private import FakeTensorMode, plain_tensors
from ...tracer.trace import CaptureError, Trace
from ..capture.captured import CapturedFunction, Report, capture_function, hint_of
from ..capture.captured_backward import BackwardEntry, BackwardTrace, capture_backward, predicted_kinds
from ..capture.guards import compare_sizes_only, global_state, guard_from
from ..execution.executable import Executable
from ..execution.kernel_plan import KernelPlan
from ..specialize.pipeline import choose_residuals
from ..specialize.residuals import ResidualPlan, executable_key
from ..specialize.specialization import Specialization
from ..values.sizes import Binder, BoundSizes, traced_numbers
from .literals import NoLiteral, constant_document, constant_from, places_document, settled
from .plan_documents import NotKept, condition_of, conditions, plan, plan_of

Tensor = torch.Tensor
Doc = dict[str, Any]


# ------------------------------------------------------------------ write
def outline(captured: CapturedFunction) -> Doc:
    """What a capture found out about forward. Raises NotKept where a table cannot say it."""
    forward = captured.forward
    beyond = forward.trace.lifted or captured.opaque or captured.written_inputs or captured.skip
    if beyond or captured.restrided or captured.returns_input_memory:
        raise NotKept("it reads tensors from outside, calls what is opaque, writes to arguments or returns views")
    if any(o.kind != "tensor" for o in forward.outputs):
        raise NotKept("it returns more than tensors of its own")
    return {
        "symbols": symbols_document(captured.symbols),
        "slots": captured.slots,
        "names": captured.names,
        "example": [example_of(f, captured) for f in forward.fakes],
        "sources": [[s.name, *where] for s, where in captured.binder.sources.items()],
        "outputs": [bool(o.value) for o in forward.outputs],
        "hidden": forward.hidden_count,
        "is_tuple": forward.is_tuple,
        "saved": places_document(forward.saved),
        "saved_for_forward": places_document(forward.saved_for_forward),
        "non_differentiable": places_document(forward.non_differentiable),
        "materialize_grads": forward.materialize_grads,
        "materialize_non_diff_grads": forward.materialize_non_diff_grads,
        "needs_input_grad": list(forward.needs_input_grad),
        "tensor_attributes": [[name, *place] for name, place in forward.tensor_attributes.items()],
        "constants": _constants(captured),
        "shared": _shared(forward.shared),
        "backward_symbols": [s.name for s in captured.backward_symbols],
        "kinds": kinds_text(predicted_kinds(captured)),
        "operations": operations(forward.trace),
    }


def _shared(shared: Sequence[Shared]) -> list[Any]:
    if any(type(key) not in (int, str) for s in shared for key in s.keys):
        raise NotKept("what it keeps on ctx is in a dict under a key that is no text")
    return [[s.name, s.argument, list(s.keys)] for s in shared]


def _constants(captured: CapturedFunction) -> Doc | None:
    """What is on ctx and no tensor; None where a table cannot say it: then it is captured again when it is wanted."""
    known = set(captured.symbols)
    try:
        constants = captured.forward.constants
        found = {k: constant_document(v, lambda n: expression_at_forward(n, known)) for k, v in constants.items()}
        for value in found.values():
            constant_from(value, {s.name: s for s in known}, "constants")
    except (NoLiteral, ParseError):
        return None
    return found


def operations(trace: Trace) -> str:
    """A digest of the captured operations."""
    nodes = [(n.op, n.name, str(n.target), str(n.args), str(n.kwargs)) for n in trace.graph_module.graph.nodes]
    return hashlib.sha256(repr(nodes).encode()).hexdigest()


def first_sizes(captured: CapturedFunction) -> dict[sympy.Symbol, int]:
    """The sizes of the call that was captured."""
    return {s: hint_of(captured.session, s) for s in captured.binder.sources}


def example_of(fake: Tensor, captured: CapturedFunction) -> list[Any]:
    """Sizes and strides of the tensor that was captured."""
    hints = first_sizes(captured)
    shape, strides = (list(traced_numbers(part, hints)) for part in (fake.shape, fake.stride()))
    return [shape, strides, str(fake.dtype).removeprefix("torch."), str(fake.device), fake.requires_grad]


def _places_of(data: Sequence[Any]) -> list[Any]:
    return [None if p is None else ValueRef(*p) for p in data]


def kinds_text(kinds: tuple[Any, ...]) -> str:
    """The layouts of gradients as a text; Python's own, of tuples, texts, numbers and None."""
    return repr(kinds)


def forward_document(spec: Specialization, backend: str, device: torch.device) -> Doc:
    """forward on one backend. Raises NotKept."""
    chosen = spec.residual_plan
    executable = spec.executables[executable_key(backend, chosen)]
    guard: Any = spec.captured.current_guard()
    conditions = list(guard.conditions)
    if not compare_sizes_only(conditions):
        raise NotKept("its guard asks for more than sizes")
    return {
        "outline": outline(spec.captured),
        "guard": conditions,
        "chosen": None if chosen is None else _choice(chosen),
        "plan": plan(executable.plans[device]),
    }


def _choice(chosen: ResidualPlan) -> Doc:
    if type(chosen) is not ResidualPlan:
        raise NotKept("its backward is derived")
    return {
        "places": places_document(chosen.places),
        "residuals": places_document(chosen.residuals),
        "rebuild": document(chosen.rebuilding()),
    }


def backward_document(spec: Specialization, entry: BackwardEntry, backend: str, device: torch.device) -> Doc:
    """backward for one layout of gradients. Raises NotKept."""
    executable = entry.executables[executable_key(backend, spec.residual_plan)]
    if entry.lifted or entry.opaque or entry.alternatives or entry.viewed_gradients:
        raise NotKept("backward reads tensors from outside, calls what is opaque, or returns a view of a gradient")
    if entry.written_inputs:
        raise NotKept("backward writes to what it is given")
    return {
        "guards": conditions(entry.guards, {s.name: s for s in spec.captured.symbols}),
        "passed": [list(pair) for pair in entry.passed_gradients.items()],
        "sources": [[s.name, *where] for s, where in executable.binder.sources.items()],
        "operations": operations(entry.trace),
        "plan": plan(executable.plans[device]),
    }


# ------------------------------------------------------------------ read
def _binder(data: Sequence[Any], symbols: dict[str, sympy.Symbol]) -> Binder:
    return Binder.from_sources({symbols[name]: (at, kind, axis) for name, at, kind, axis in data})


class Stored:
    """A specialization out of a document: forward of one key on one backend, and backwards as they are asked for."""

    def __init__(
        self, cls: type, args: Sequence[Any], reads: Reads, dynamic: bool, report: Report, found: Doc, backend: str
    ) -> None:
        """Raises ValueError, KeyError, ParseError where the document is not what it should be."""
        if not compare_sizes_only(found["guard"]):
            raise ValueError("the guard asks for more than sizes")
        self.table, self.backend = found["outline"], backend
        self.symbols = symbols_from(self.table["symbols"], "symbols")
        binder = _binder(self.table["sources"], self.symbols)
        forward = _forward_of(self.table, self.capture_again)
        self.captured = CapturedFunction(cls, args, reads, dynamic, report, forward, binder)
        self._complete(found["guard"])
        self.spec = Specialization(self.captured)
        self.then = self._present()
        self._add_forward(found, next(a.device for a in args if isinstance(a, Tensor)))

    def _complete(self, guard: Sequence[str]) -> None:
        """What `capture_function` reads off a trace, out of the table."""
        captured, table = self.captured, self.table
        captured.guard, captured.assumed_conditions = guard_from(guard), guard
        captured.backward_symbols = [self.symbols[name] for name in table["backward_symbols"]]
        captured.stored_kinds = tuple(ast.literal_eval(table["kinds"]))
        if (constants := table["constants"]) is not None:
            read = {k: constant_from(v, self.symbols, "constants") for k, v in constants.items()}
            captured.read_constants = lambda sizes: {name: settled(value, sizes) for name, value in read.items()}

    def _add_forward(self, found: Doc, device: torch.device) -> None:
        spec, captured = self.spec, self.captured
        name, report = f"{captured.name}_forward", partial(captured.report, "forward")
        plan = plan_of(found["plan"], name, self.backend, device, report)
        spec.decide(None if found["chosen"] is None else self._chosen(found["chosen"]))
        executable = Executable.planned(plan, lambda: captured.forward.trace, captured.skip, captured.binder)
        spec.executables[executable_key(self.backend, spec.residual_plan)] = executable
        captured.draws = _may_draw(plan)

    def _chosen(self, found: Doc) -> ResidualPlan:
        rebuild = graph_from(found["rebuild"])
        return ResidualPlan(_places_of(found["residuals"]), _places_of(found["places"]), self._choose_again, rebuild)

    def _choose_again(self) -> tuple[Program, Program]:
        stored, again = self.spec.residual_plan, choose_residuals(self.spec, BoundSizes(first_sizes(self.captured)))
        same = type(again) is ResidualPlan and stored is not None and again.places == stored.places
        if again is None or stored is None or not same or show(again.rebuilding()) != show(stored.rebuilding()):
            raise self._differs("a second trace saves something else than the first")
        return again.programs

    def _present(self) -> Any:
        """What a capture depends on, at present."""
        return self.captured.reads.facts(), global_state(), methods_now(self.captured.cls)

    def capture_again(self) -> ForwardTrace:
        """The session and the trace, which no document holds. Raises CaptureError where they are not what they were."""
        captured = self.captured
        with capture_lock, use_switch_state(captured.switches), plain_tensors(), torch.no_grad():
            if captured.forward.is_traced:  # another thread was first
                return captured.forward.traced
            if not self.is_current():
                raise self._differs("what it reads is no longer what it was at the call")
            reads, dynamic, report = captured.reads, captured.dynamic, captured.report
            fresh = capture_function(captured.cls, self._examples(), reads, dynamic, report)
            if json.loads(json.dumps(outline(fresh))) != self.table:
                raise self._differs("a second trace finds something else than the first")
            return fresh.forward.traced

    def _differs(self, why: str) -> CaptureError:
        return CaptureError(reason=why, where=self.captured.forward_place())

    def _examples(self) -> list[Any]:
        """The arguments that the stored capture was made for."""
        with FakeTensorMode():
            tensors = [
                torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device=device).requires_grad_(needs)
                for shape, strides, dtype, device, needs in self.table["example"]
            ]
        return self.captured.with_tensors(tensors)

    def is_current(self) -> bool:
        """Whether what the capture read is still what it was at the call."""
        return bool(self.then == self._present())

    def entry_from(self, kinds: tuple[Any, ...], found: Doc, device: torch.device) -> BackwardEntry:
        """backward for gradients of these layouts. It was compared with the user's own when it was stored."""
        captured, passed = self.captured, {result: gradient for result, gradient in found["passed"]}
        guards = tuple(condition_of(g, self.symbols) for g in found["guards"])
        plan = plan_of(
            found["plan"], f"{captured.name}_backward", self.backend, device, partial(captured.report, "backward")
        )
        trace = partial(self._backward_again, kinds, found["operations"], passed)
        entry = BackwardEntry(trace, guards, passed_gradients=passed, is_checked=True, stored_guards=guards)
        binder = _binder(found["sources"], self.symbols)
        executable = Executable.planned(plan, lambda: entry.trace, frozenset(passed), binder)
        entry.executables[executable_key(self.backend, self.spec.residual_plan)] = executable
        entry.draws = _may_draw(plan)
        return entry

    def _backward_again(self, kinds: tuple[Any, ...], known: str, passed: dict[int, int]) -> BackwardTrace:
        with capture_lock, plain_tensors(), torch.no_grad():
            again = capture_backward(self.captured, kinds)
        if operations(again.trace) != known or again.passed_gradients != passed:
            raise self._differs("a second trace of backward finds something else than the first")
        return again.traced


def _may_draw(made: KernelPlan) -> bool:
    """Whether a plan calls operations of torch's, of which some draw random numbers."""
    return any(PRIMS[v.prim].family == "extern" for v in made.graph.order())


def _forward_of(known: Doc, trace: Callable[[], ForwardTrace]) -> ForwardCapture:
    """What forward's capture found out, but for its trace, which is made again where it is asked for."""
    return ForwardCapture(
        source=trace,
        outputs=[Output("tensor", value=is_view) for is_view in known["outputs"]],
        is_tuple=known["is_tuple"],
        tensor_outputs=list(range(len(known["outputs"]))),
        hidden_count=int(known["hidden"]),
        saved=_places_of(known["saved"]),
        saved_for_forward=_places_of(known["saved_for_forward"]),
        dirty=[],
        non_differentiable=_places_of(known["non_differentiable"]),
        materialize_grads=known["materialize_grads"],
        materialize_non_diff_grads=known["materialize_non_diff_grads"],
        needs_input_grad=tuple(known["needs_input_grad"]),
        tensor_attributes={name: ValueRef(kind, index) for name, kind, index in known["tensor_attributes"]},
        shared=tuple(Shared(name, argument, tuple(keys)) for name, argument, keys in known["shared"]),
    )
