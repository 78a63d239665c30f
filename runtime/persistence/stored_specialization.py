"""A specialisation out of a table. What the table does not tell is captured again, at the sizes of the stored capture.

A capture is a function of the code, of what it reads, and of the example that it is shown: the second one has the same
symbols, guards and places as the first. That is verified, and where it is not so the user's own method runs.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ...ir.errors import ParseError
from ...ir.prims import PRIMS
from ...ir.program import Program, ValueRef
from ...ir.switches import use_switch_state
from ...ir.text.document import document, graph_from, symbols_document, symbols_from
from ...ir.text.text import show
from ...tracer.capture.capture import capture_lock
from ...tracer.function import ForwardCapture, ForwardTrace, Output, expression_at_forward, methods_now
from ...tracer.loops.node import loop_of
from ...tracer.opaque.shared import Shared
from ...tracer.reads.reads import Reads
from ...tracer.torch_private import FakeTensorMode, plain_tensors
from ...tracer.trace import CaptureError, Trace
from ..capture.captured import CapturedFunction, Report, capture_function, hint_of
from ..capture.captured_backward import BackwardEntry, BackwardTrace, capture_backward, predicted_kinds
from ..capture.guards import LongestLoops, compare_sizes_only, global_state, guard_from
from ..execution.executable import Executable
from ..execution.kernel_plan import KernelPlan
from ..specialize.pipeline import choose_residuals, target_of
from ..specialize.residuals import ResidualPlan, executable_key
from ..specialize.specialization import Specialization
from ..values.sizes import Binder, BoundSizes, traced_numbers
from .literals import NoLiteral, constant_document, constant_from, places_document, with_sizes
from .plan_documents import NotKept, condition_of, conditions, plan, plan_of

Tensor = torch.Tensor
Doc = dict[str, Any]


# ------------------------------------------------------------------ write
def outline(captured: CapturedFunction) -> Doc:
    """The facts that a capture found out about forward. Raises NotKept where a table cannot say them."""
    # What a table cannot say is refused here; what it can, a second capture is compared with.
    forward = captured.forward
    is_beyond = forward.trace.lifted or captured.opaque or captured.written_inputs or captured.skip
    if is_beyond or captured.restrided or captured.returns_input_memory:
        raise NotKept("it reads tensors from outside, calls what is opaque, writes to arguments or returns views")
    if any(o.kind != "tensor" for o in forward.outputs):
        raise NotKept("it returns more than tensors of its own")
    return {
        "symbols": symbols_document(captured.symbols),
        "slots": captured.slots,
        "names": captured.names,
        "example": [example_of(f, captured) for f in forward.fakes],
        "sources": [[s.name, *source] for s, source in captured.binder.sources.items()],
        "outputs": [bool(o.value) for o in forward.outputs],
        "hidden": forward.hidden_count,
        "is_tuple": forward.is_tuple,
        "saved": places_document(forward.saved),
        "stacks": list(forward.stacks),
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
        "loops": [s.name for s in captured.longest.lengths],
    }


def _shared(shared: Sequence[Shared]) -> list[Any]:
    if any(type(key) not in (int, str) for s in shared for key in s.keys):
        raise NotKept("what it keeps on ctx is in a dict under a key that is no text")
    return [[s.name, s.argument, list(s.keys)] for s in shared]


def _constants(captured: CapturedFunction) -> Doc | None:
    """The constants on ctx; None where a table cannot say them: then they are captured again when they are wanted."""
    symbols = set(captured.symbols)
    try:
        constants = captured.forward.constants.items()
        documents = {k: constant_document(v, lambda n: expression_at_forward(n, symbols)) for k, v in constants}
        for value in documents.values():
            constant_from(value, {s.name: s for s in symbols}, "constants")
    except (NoLiteral, ParseError):
        return None
    return documents


def operations(trace: Trace) -> str:
    """A digest of the captured operations."""
    return hashlib.sha256(repr(_texts(trace.graph_module.graph)).encode()).hexdigest()


def _texts(graph: Graph) -> list[tuple[str, ...]]:
    """The operations in their order, sizes as the numbers of the first call: of equal ones a trace names another one
    where it was not known by then that they are equal.
    """
    numbers = {n: number for n in graph.nodes if (number := _number(n)) is not None}
    others = [n for n in graph.nodes if n not in numbers]
    words = {**numbers, **{n: f"%{i}" for i, n in enumerate(others)}}
    return [(n.op, _target(n), *(str(map_arg(a, words.__getitem__)) for a in (n.args, n.kwargs))) for n in others]


def _number(node: Node) -> int | float | bool | None:
    """What a size, or what is made of sizes, was at the first call; None of other nodes."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.hint  # type: ignore[no-any-return]
    return value if isinstance(value, int | float) else None


def _target(node: Node) -> str:
    """What a node calls; a loop by its body, a function of Python by its name: as text it would say where it lies."""
    target, loop = node.target, loop_of(node.target)
    if node.op == "placeholder":
        return ""
    if loop is not None:
        return f"loop {loop.carries} {_texts(loop.body.graph)}"
    return f"{target.__module__}.{target.__qualname__}" if isinstance(target, FunctionType) else str(target)


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
    residual_plan = spec.residual_plan
    if spec.why_as_traced:
        raise NotKept(spec.why_as_traced)
    executable = spec.executables[executable_key(backend, residual_plan)]
    guard: Any = spec.captured.current_guard()
    conditions = list(guard.conditions)
    if not compare_sizes_only(conditions):
        raise NotKept("its guard asks for more than sizes")
    return {
        "outline": outline(spec.captured),
        "guard": conditions,
        "longest": _lengths(spec.captured.longest),
        "chosen": None if residual_plan is None else _choice(residual_plan),
        "plan": plan(executable.plans[device]),
    }


def _lengths(longest: LongestLoops) -> dict[str, int]:
    return {s.name: n for s, n in longest.lengths.items()}


def _choice(residual_plan: ResidualPlan) -> Doc:
    if type(residual_plan) is not ResidualPlan:
        raise NotKept("its backward is derived, or compares what it makes again")
    return {
        "places": places_document(residual_plan.places),
        "residuals": places_document(residual_plan.residuals),
        "rebuild": document(residual_plan.rebuilding()),
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
        "longest": _lengths(entry.longest),
        "passed": [list(pair) for pair in entry.passed_gradients.items()],
        "sources": [[s.name, *source] for s, source in executable.binder.sources.items()],
        "operations": operations(entry.trace),
        "plan": plan(executable.plans[device]),
    }


# ------------------------------------------------------------------ read
def _binder(data: Sequence[Any], symbols: dict[str, sympy.Symbol]) -> Binder:
    return Binder.from_sources({symbols[name]: (at, kind, axis) for name, at, kind, axis in data})


class Stored:
    """A specialization out of a document: forward of one key on one backend, and backwards as they are asked for."""

    def __init__(
        self, cls: type, args: Sequence[Any], reads: Reads, dynamic: bool, report: Report, data: Doc, backend: str
    ) -> None:
        """Raises ValueError, KeyError, ParseError where the document is not what it should be."""
        if not compare_sizes_only(data["guard"]):
            raise ValueError("the guard asks for more than sizes")
        self.table, self.backend = data["outline"], backend
        self.symbols = symbols_from(self.table["symbols"], "symbols")
        binder = _binder(self.table["sources"], self.symbols)
        forward = _forward_of(self.table, self.capture_again)
        self.captured = CapturedFunction(cls, args, reads, dynamic, report, forward, binder)
        self._complete(data["guard"])
        self.captured.longest = self._longest(data["longest"])
        self.spec = Specialization(self.captured)
        self.spec.why_as_traced = ""  # of no other one a document is made
        self.then = self._present()
        self._add_forward(data, next(a.device for a in args if isinstance(a, Tensor)))

    def _complete(self, guard: Sequence[str]) -> None:
        """Fill in from the table what `capture_function` reads off a trace."""
        captured, table = self.captured, self.table
        captured.guard, captured.assumed_conditions = guard_from(guard), guard
        captured.backward_symbols = [self.symbols[name] for name in table["backward_symbols"]]
        captured.stored_kinds = tuple(ast.literal_eval(table["kinds"]))
        if (constants := table["constants"]) is not None:
            read = {k: constant_from(v, self.symbols, "constants") for k, v in constants.items()}
            captured.read_constants = lambda sizes: {name: with_sizes(value, sizes) for name, value in read.items()}

    def _longest(self, lengths: dict[str, int]) -> LongestLoops:
        """The longest loops that were compared when this was stored."""
        longest = LongestLoops()
        longest.lengths = {self.symbols[name]: int(n) for name, n in lengths.items()}
        return longest

    def _add_forward(self, data: Doc, device: torch.device) -> None:
        spec, captured = self.spec, self.captured
        name, report = f"{captured.name}_forward", partial(captured.report, "forward")
        plan = plan_of(data["plan"], name, self.backend, device, report)
        spec.decide(None if data["chosen"] is None else self._residual_plan_from(data["chosen"]))
        executable = Executable.planned(plan, lambda: captured.forward.trace, captured.skip, captured.binder)
        spec.executables[executable_key(self.backend, spec.residual_plan)] = executable
        captured.draws = _may_draw(plan)

    def _residual_plan_from(self, data: Doc) -> ResidualPlan:
        rebuild = graph_from(data["rebuild"])
        return ResidualPlan(_places_of(data["residuals"]), _places_of(data["places"]), self._choose_again, rebuild)

    def _choose_again(self) -> tuple[Program, Program]:
        sizes, target = BoundSizes(first_sizes(self.captured)), partial(target_of, self.spec, self.backend)
        stored, again = self.spec.residual_plan, choose_residuals(self.spec, sizes, target)
        same = type(again) is ResidualPlan and stored is not None and again.places == stored.places
        if again is None or stored is None or not same or self._rebuilt(again) != self._rebuilt(stored):
            raise self._differs("a second trace saves something else than the first")
        return again.programs

    def _rebuilt(self, plan: ResidualPlan) -> str:
        """What backward is made of what a plan saves, with the sizes of the first call."""
        numbers = {s.name: str(n) for s, n in first_sizes(self.captured).items()}
        _, *lines = (line for line in show(plan.rebuilding()).splitlines() if not line.startswith("symbols "))
        return re.sub(r"\b[A-Za-z]\w*", lambda found: numbers.get(found[0], found[0]), "\n".join(lines))

    def _present(self) -> Any:
        """The present values of what a capture depends on."""
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
            rolls = bool(self.table["loops"])
            fresh = capture_function(captured.cls, self._examples(), reads, dynamic, report, rolls=rolls)
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
        """True where all that the capture read is still as it was at the call."""
        return bool(self.then == self._present())

    def entry_from(self, kinds: tuple[Any, ...], data: Doc, device: torch.device) -> BackwardEntry:
        """backward for gradients of these layouts. It was compared with the user's own when it was stored."""
        captured, passed = self.captured, {result: gradient for result, gradient in data["passed"]}
        guards = tuple(condition_of(g, self.symbols) for g in data["guards"])
        plan = plan_of(
            data["plan"], f"{captured.name}_backward", self.backend, device, partial(captured.report, "backward")
        )
        trace = partial(self._backward_again, kinds, data["operations"], passed)
        entry = BackwardEntry(trace, guards, passed_gradients=passed, is_checked=True, stored_guards=guards)
        binder = _binder(data["sources"], self.symbols)
        executable = Executable.planned(plan, lambda: entry.trace, frozenset(passed), binder)
        entry.executables[executable_key(self.backend, self.spec.residual_plan)] = executable
        entry.draws, entry.longest = _may_draw(plan), self._longest(data["longest"])
        return entry

    def _backward_again(self, kinds: tuple[Any, ...], digest: str, passed: dict[int, int]) -> BackwardTrace:
        with capture_lock, plain_tensors(), torch.no_grad():
            again = capture_backward(self.captured, kinds)
        if operations(again.trace) != digest or again.passed_gradients != passed:
            raise self._differs("a second trace of backward finds something else than the first")
        return again.traced


def _may_draw(kernel_plan: KernelPlan) -> bool:
    """True where a plan calls operations of torch's, of which some draw random numbers."""
    return any(PRIMS[v.prim].family == "extern" for v in kernel_plan.graph.order())


def _forward_of(table: Doc, trace: Callable[[], ForwardTrace]) -> ForwardCapture:
    """The result of forward's capture, but for its trace, which is made again where it is asked for."""
    return ForwardCapture(
        source=trace,
        outputs=[Output("tensor", value=is_view) for is_view in table["outputs"]],
        is_tuple=table["is_tuple"],
        tensor_outputs=list(range(len(table["outputs"]))),
        hidden_count=int(table["hidden"]),
        saved=_places_of(table["saved"]),
        stacks=tuple(table["stacks"]),
        saved_for_forward=_places_of(table["saved_for_forward"]),
        dirty=[],
        non_differentiable=_places_of(table["non_differentiable"]),
        materialize_grads=table["materialize_grads"],
        materialize_non_diff_grads=table["materialize_non_diff_grads"],
        needs_input_grad=tuple(table["needs_input_grad"]),
        tensor_attributes={name: ValueRef(kind, index) for name, kind, index in table["tensor_attributes"]},
        shared=tuple(Shared(name, argument, tuple(keys)) for name, argument, keys in table["shared"]),
    )
