"""A specialisation out of a table. What the table does not tell is captured again, at the sizes of the stored capture.

A capture is a function of the code, of what it reads, and of the example that it is shown: the second one has the same
symbols, guards and places as the first. That is verified, and where it is not so the user's own method runs.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import sympy
import torch

from ...ir import Graph
from ...ir.errors import ParseError
from ...ir.prims import PRIMS
from ...ir.program import Place, Program
from ...ir.switches import in_force, under
from ...ir.text.document import document, graph_from, symbols_document, symbols_from
from ...ir.text.text import show
from ...tracer.capture.capture import capture_lock
from ...tracer.containers import anew
from ...tracer.function import ForwardCapture, Output, as_written, methods_now, user_count
from ...tracer.methods import method_place
from ...tracer.opaque.shared import Shared
from ...tracer.reads.reads import Reads
from ...tracer.torch_private import FakeTensorMode, plain_tensors
from ...tracer.trace import CaptureError, Trace
from ..capture.guards import Guard, ask_for_sizes_alone, global_state, guard_from
from ..capture.shared_objects import Sharing
from ..execution.executable import Executable
from ..execution.kernel_plan import KernelPlan
from ..specialize.residuals import Chosen, choose
from ..specialize.specialization import BackwardEntry, Report, Specialization, hint_of
from ..values.sizes import Binder, traced_numbers
from .literals import NoLiteral, constant_document, constant_from, settled
from .plan_documents import NotKept, condition_of, conditions, plan, plan_of

Tensor = torch.Tensor
Doc = dict[str, Any]


# ------------------------------------------------------------------ write
def outline(spec: Specialization) -> Doc:
    """What a capture found out about forward. Raises NotKept where a table cannot say it."""
    forward = spec.forward
    if forward.trace.lifted or spec.opaque or spec.written or spec.skip or spec.restrided or spec.shows_more:
        raise NotKept("it reads tensors from outside, calls what is opaque, writes to arguments or returns views")
    if any(o.kind != "tensor" for o in forward.outputs):
        raise NotKept("it returns more than tensors of its own")
    return {
        "symbols": symbols_document(spec.symbols),
        "slots": spec.slots,
        "names": spec.names,
        "example": [example_of(f, spec) for f in forward.fakes],
        "sources": [[s.name, *where] for s, where in spec.binder.sources.items()],
        "outputs": [bool(o.value) for o in forward.outputs],
        "hidden": forward.hidden_count,
        "is_tuple": forward.is_tuple,
        "saved": _places(forward.saved),
        "saved_for_forward": _places(forward.saved_for_forward),
        "non_differentiable": _places(forward.non_differentiable),
        "materialize_grads": forward.materialize_grads,
        "materialize_non_diff_grads": forward.materialize_non_diff_grads,
        "needs_input_grad": list(forward.needs_input_grad),
        "tensor_attributes": [[name, *place] for name, place in forward.tensor_attributes.items()],
        "constants": _constants(spec),
        "shared": _shared(forward.shared),
        "backward_symbols": [s.name for s in spec.backward_symbols],
        "kinds": kinds_text(spec.predicted_kinds()),
        "operations": operations(forward.trace),
    }


def _shared(shared: Sequence[Shared]) -> list[Any]:
    if any(type(key) not in (int, str) for s in shared for key in s.keys):
        raise NotKept("what it keeps on ctx is in a dict under a key that is no text")
    return [[s.name, s.argument, list(s.keys)] for s in shared]


def _constants(spec: Specialization) -> Doc | None:
    """What is on ctx and no tensor; None where a table cannot say it: then it is captured again when it is wanted."""
    known = set(spec.symbols)
    try:
        found = {k: constant_document(v, lambda n: as_written(n, known)) for k, v in spec.forward.constants.items()}
        for value in found.values():
            constant_from(value, {s.name: s for s in known}, "constants")
    except (NoLiteral, ParseError):
        return None
    return found


def operations(trace: Trace) -> str:
    """A digest of the captured operations."""
    nodes = [(n.op, n.name, str(n.target), str(n.args), str(n.kwargs)) for n in trace.graph_module.graph.nodes]
    return hashlib.sha256(repr(nodes).encode()).hexdigest()


def first_sizes(spec: Specialization) -> dict[sympy.Symbol, int]:
    """The sizes of the call that was captured."""
    return {s: hint_of(spec.session, s) for s in spec.binder.sources}


def example_of(fake: Tensor, spec: Specialization) -> list[Any]:
    """Sizes and strides of the tensor that was captured."""
    hints = first_sizes(spec)
    shape, strides = (list(traced_numbers(part, hints)) for part in (fake.shape, fake.stride()))
    return [shape, strides, str(fake.dtype).removeprefix("torch."), str(fake.device), fake.requires_grad]


def _places(places: Sequence[Place | None]) -> list[Any]:
    return [None if p is None else list(p) for p in places]


def _places_of(data: Sequence[Any]) -> list[Any]:
    return [None if p is None else Place(*p) for p in data]


def kinds_text(kinds: tuple[Any, ...]) -> str:
    """The layouts of gradients as a text; Python's own, of tuples, texts, numbers and None."""
    return repr(kinds)


def forward_document(spec: Specialization, backend: str, device: torch.device) -> Doc:
    """forward on one backend. Raises NotKept."""
    chosen = spec.known_choice()
    executable, conditions = spec.executables[_key(backend, chosen)], _conditions(spec.current_guard())
    if not ask_for_sizes_alone(conditions):
        raise NotKept("its guard asks for more than sizes")
    return {
        "outline": outline(spec),
        "guard": conditions,
        "chosen": None if chosen is None else _choice(chosen),
        "plan": plan(executable.plans[device]),
    }


def _conditions(guard: Any) -> list[str]:
    return list(guard.conditions)


def _key(backend: str, chosen: Chosen | None) -> str:
    return backend if chosen is None else f"{backend} chosen"


def _choice(chosen: Chosen) -> Doc:
    if type(chosen) not in (Chosen, StoredChosen):
        raise NotKept("its backward is derived")
    return {
        "places": _places(chosen.places),
        "residuals": _places(chosen.captured.residuals),
        "rebuild": document(chosen.rebuilding()),
    }


def backward_document(spec: Specialization, entry: BackwardEntry, backend: str, device: torch.device) -> Doc:
    """backward for one layout of gradients. Raises NotKept."""
    executable = entry.executables[_key(backend, spec.known_choice())]
    if entry.lifted or entry.opaque or entry.others or entry.viewed:
        raise NotKept("backward reads tensors from outside, calls what is opaque, or returns a view of a gradient")
    if entry.written:
        raise NotKept("backward writes to what it is given")
    return {
        "guards": conditions(entry.guards, {s.name: s for s in spec.symbols}),
        "passed": [list(pair) for pair in entry.passed.items()],
        "sources": [[s.name, *where] for s, where in executable.binder.sources.items()],
        "operations": operations(entry.trace),
        "plan": plan(executable.plans[device]),
    }


# ------------------------------------------------------------------ read
def _binder(data: Sequence[Any], symbols: dict[str, sympy.Symbol]) -> Binder:
    return Binder.reading({symbols[name]: (at, kind, axis) for name, at, kind, axis in data})


class Stored(Specialization):
    """forward of one key on one backend, from disk."""

    def __init__(
        self, cls: type, args: Sequence[Any], reads: Reads, dynamic: bool, report: Report, found: Doc, backend: str
    ) -> None:
        known = found["outline"]
        if not ask_for_sizes_alone(found["guard"]):
            raise ValueError("the guard asks for more than sizes")
        self.cls, self.reads, self.name, self.dynamic, self.report = cls, reads, cls.__name__, dynamic, report
        self.switches = in_force()
        self.is_plain, self.given = False, ()
        self.siblings, self.slots, self.names = [], known["slots"], known["names"]
        self.arguments = tuple(None if isinstance(a, Tensor) else anew(a) for a in args)
        self.count = user_count(args)
        self.table, self.backend, self.then = known, backend, self._present()
        by_name = symbols_from(known["symbols"], "symbols")
        self.binder, self.symbols = _binder(known["sources"], by_name), set(by_name.values())
        self.guard = guard_from(found["guard"])
        self.assumed = list(found["guard"])
        self.lifted, self.skip, self.written, self.unversioned, self.opaque = [], frozenset(), [], [], []
        self.nodes, self.entries, self.proved = {}, {}, set()
        self.under_autocast = self.backward_failed = self.backward_faulty = self.restrided = False
        self.shows_more = False
        self.backward_symbols = [by_name[name] for name in known["backward_symbols"]]
        self.forward = StoredForward(self, known)
        self.inner_views = self._inner_views()
        told = known["constants"]
        self.on_ctx = None if told is None else {k: constant_from(v, by_name, "constants") for k, v in told.items()}
        self.sharing = Sharing(self.forward.shared, self.arguments) if self.forward.shared else None
        self._chosen, self._decided = None if found["chosen"] is None else StoredChosen(self, found["chosen"]), True
        self.keeper: Any = None
        self.first_outside = self.outside()
        device = next(args[i].device for i in self.slots)
        made = plan_of(found["plan"], f"{self.name}_forward", backend, device, partial(report, "forward"))
        executable = StoredExecutable(self, made, self.binder, self.skip)
        self.executables = {_key(backend, self._chosen): executable}
        self.draws = _may_draw(made)

    def _present(self) -> Any:
        return self.reads.facts(), global_state(), methods_now(self.cls)

    def constants_at(self, sizes: dict[sympy.Symbol, Any]) -> dict[str, Any]:
        if self.on_ctx is None or "session" in self.__dict__:
            return super().constants_at(sizes)
        return {name: settled(value, sizes) for name, value in self.on_ctx.items()}

    def __getattr__(self, name: str) -> Any:
        if name not in ("session", "since"):
            raise AttributeError(name)
        self.capture_again()
        return self.__dict__[name]

    def capture_again(self) -> None:
        """The session and the traces, which no table holds; raises CaptureError where they are not what they were."""
        with capture_lock, under(self.switches), plain_tensors(), torch.no_grad():
            if "session" in self.__dict__:
                return
            if self.then != self._present():
                raise self._differs("what it reads is no longer what it was at the call")
            fresh = Specialization(self.cls, self._examples(), self.reads, self.dynamic, self.report)
            if json.loads(json.dumps(outline(fresh))) != self.table:
                raise self._differs("a second capture finds something else than the first")
            self.session, self.since, self.forward = fresh.session, fresh.since, fresh.forward

    def _differs(self, why: str) -> CaptureError:
        return CaptureError(reason=why, where=method_place(self.cls.forward))  # type: ignore[attr-defined]

    def _examples(self) -> list[Any]:
        """The arguments that the stored capture was made for."""
        with FakeTensorMode():
            tensors = iter([
                torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device=device).requires_grad_(needs)
                for shape, strides, dtype, device, needs in self.table["example"]
            ])  # fmt: skip
            return [next(tensors) if i in self.slots else a for i, a in enumerate(self.arguments)]

    def current_guard(self) -> Guard:
        """What the table was made under, and what has been learnt since."""
        return guard_from(list(dict.fromkeys((*self.assumed, *_conditions(super().current_guard())))))

    def predicted_kinds(self) -> tuple[Any, ...]:
        return tuple(ast.literal_eval(self.table["kinds"]))

    def entry(self, kinds: tuple[Any, ...]) -> BackwardEntry:
        key = self._now(kinds)
        if key not in self.entries and self.keeper is not None and self.then == self._present():
            with capture_lock:
                found = self.keeper.backward(kinds)
                if found is not None:
                    self.entries.setdefault(key, found)
        return super().entry(kinds)

    def entry_from(self, kinds: tuple[Any, ...], found: Doc, device: torch.device) -> BackwardEntry:
        """backward for these gradients, out of its table."""
        return StoredEntry(self, kinds, found, device)


def _may_draw(made: KernelPlan) -> bool:
    """Whether a plan calls operations of torch's, of which some draw random numbers."""
    return any(PRIMS[v.prim].family == "extern" for v in made.graph.order())


class StoredForward(ForwardCapture):
    """What forward's capture found out; its fakes and its trace are captured again where they are asked for."""

    def __init__(self, spec: Stored, known: Doc) -> None:
        self.spec, self.hidden = spec, known["hidden"]
        self.outputs = [Output("tensor", value=is_view) for is_view in known["outputs"]]
        self.tensor_outputs = list(range(len(known["outputs"])))
        self.is_tuple, self.materialize_grads = known["is_tuple"], known["materialize_grads"]
        self.materialize_non_diff_grads = known["materialize_non_diff_grads"]
        self.saved, self.saved_for_forward = _places_of(known["saved"]), _places_of(known["saved_for_forward"])
        self.dirty, self.non_differentiable = [], _places_of(known["non_differentiable"])
        self.needs_input_grad = tuple(known["needs_input_grad"])
        self.tensor_attributes = {name: Place(kind, index) for name, kind, index in known["tensor_attributes"]}
        self.shared = tuple(Shared(name, argument, tuple(keys)) for name, argument, keys in known["shared"])
        if known["constants"] == {}:
            self.constants = {}

    def __getattr__(self, name: str) -> Any:
        if name not in ("session", "trace", "fakes", "fake_outputs", "fake_hidden", "constants"):
            raise AttributeError(name)
        self.spec.capture_again()
        return getattr(self.spec.forward, name)

    @property
    def hidden_count(self) -> int:
        return int(self.hidden)


class StoredChosen(Chosen):
    """Residuals that were chosen when the capture was stored, and the way back from them."""

    def __init__(self, spec: Stored, found: Doc) -> None:
        self.spec, self.places = spec, _places_of(found["places"])
        self.captured = Program(spec.name, Graph(), tuple(_places_of(found["residuals"])), 0)
        self._stored_rebuild = found["rebuild"]
        self._rebuild = None

    def rebuilding(self) -> Graph:
        if self._rebuild is None:
            self._rebuild = graph_from(self._stored_rebuild)
        return self._rebuild

    def __getattr__(self, name: str) -> Any:
        if name != "program":
            raise AttributeError(name)
        again = choose(self.spec, first_sizes(self.spec))
        same = type(again) is Chosen and again.places == self.places
        if again is None or not same or show(again.rebuilding()) != show(self.rebuilding()):
            raise self.spec._differs("a second capture saves something else than the first")
        self.program, self.captured = again.program, again.captured
        return again.program


class StoredExecutable(Executable):
    """A plan from disk; its trace is captured again where it is asked for."""

    def __init__(self, owner: Stored | StoredEntry, made: KernelPlan, binder: Binder, skip: frozenset[int]) -> None:
        self.owner, self.graph, self.name, self.backend = owner, made.graph, made.name, made.backend
        self.switches = made.switches
        self.skip, self.report, self.binder, self.plans = skip, made.report, binder, {made.device: made}
        self.devices_without_plan, self.fallback, self.why_not = set(), self._replay, ""
        self.run = self._planned

    def __getattr__(self, name: str) -> Any:
        if name != "trace":
            raise AttributeError(name)
        self.trace = self.owner.forward.trace if isinstance(self.owner, Stored) else self.owner.trace
        return self.trace


class StoredEntry(BackwardEntry):
    """backward for one layout of gradients, from disk. It was compared with the user's own when it was stored."""

    def __init__(self, spec: Stored, kinds: tuple[Any, ...], found: Doc, device: torch.device) -> None:
        by_name = {s.name: s for s in spec.symbols}
        self.spec, self.kinds, self.operations = spec, kinds, found["operations"]
        self.guards = self.stored_guards = tuple(condition_of(g, by_name) for g in found["guards"])
        self.lifted, self.viewed, self.others, self.admitted, self.compared = [], {}, [], {}, True
        self.passed = {result: gradient for result, gradient in found["passed"]}
        self.written = self.unversioned = ()
        report = partial(spec.report, "backward")
        made = plan_of(found["plan"], f"{spec.name}_backward", spec.backend, device, report)
        skip, binder = frozenset(self.passed), _binder(found["sources"], by_name)
        self.executables = {_key(spec.backend, spec.known_choice()): StoredExecutable(self, made, binder, skip)}
        self.draws = _may_draw(made)

    @property
    def opaque(self) -> list[Any]:
        return []

    def __getattr__(self, name: str) -> Any:
        if name not in ("trace", "since"):
            raise AttributeError(name)
        with capture_lock, plain_tensors(), torch.no_grad():
            again = self.spec._capture_backward(self.kinds)
        if operations(again.trace) != self.operations or again.passed != self.passed:
            raise self.spec._differs("a second capture of backward finds something else than the first")
        self.trace, self.since = again.trace, again.since
        return self.__dict__[name]

    def learn(self, guards: tuple[sympy.Basic, ...]) -> None:
        super().learn(tuple(dict.fromkeys((*self.stored_guards, *guards))))
