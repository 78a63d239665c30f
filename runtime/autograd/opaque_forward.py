"""A class whose forward runs as written: backward alone is captured, for what forward left on the real ctx.

The Function that runs is a subclass of the user's with another backward: forward, setup_context, the ctx, its hooks and
its version checks are eager's. What cannot be a key (a container with tensors, say) leaves backward to the user too.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
import types
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import Function, once_differentiable

from ...tracer.capture.capture import Session, capture_lock, is_capturing, written_placeholders
from ...tracer.capture.context import backward_context
from ...tracer.containers import copy_containers
from ...tracer.methods import as_tuple, backward_method, is_once_differentiable, method_place
from ...tracer.opaque.segments import Segment
from ...tracer.opaque.shared import picture, tensors_of
from ...tracer.reads.reads import Reads, scan
from ...tracer.reads.value_keys import DEPTH, SCALARS, Handle, freeze, is_library
from ...tracer.torch_private import (
    dual_level,
    is_batched,
    no_autocast,
    saved_tensors_can_be_told_apart,
    saved_tensors_of,
    torchs_apply,
    transforms_active,
)
from ...tracer.trace import CaptureError, Trace
from ..capture.guards import backward_guard_failure, global_state, is_plain, is_tracked
from ..compiled.function_class import node_class
from ..fallback.answer import Fault, hand_over, is_fault, put_on_record, recorded_faults
from ..functorch.graphs import present
from ..functorch.results import ran, without_idle
from ..functorch.rules.user_jvp import ComparedGraphs
from ..functorch.unit import TransformableGraph
from ..settings.config import AS_TRACED, KERNEL_BACKENDS
from ..specialize.comparisons import why_alone_as_traced

if TYPE_CHECKING:
    from ..compiled.compiled import Compiled

Tensor = torch.Tensor
BACKWARDS = 64
"""Captures of one backward; beyond them the user's own runs."""
ATTEMPTS = 8
"""Keys for which a capture is tried while none succeeds."""
REMEMBERED = 1024
WRITES_GIVEN = "its backward writes to a tensor that it is given, of which it is differentiated as written"


def opaque_forward_of(compiler: Compiled) -> OpaqueForward | None:
    """The Function for a class whose forward runs as written; None where its backward does, too."""
    cls: Any = compiler.user.cls
    both = cls.backward is not Function.backward and cls.vjp is not Function.vjp  # torch refuses the two together
    delicate = any(getattr(cls, f, False) for f in ("clear_saved_tensors_on_access", "boxed_grads_call"))
    if backward_method(cls) is None or both or delicate or compiler.user.plain_function is not None:
        return None
    kept_out = compiler.user.derives_backward or compiler.keys.opaque("backward") is not None
    return None if kept_out else OpaqueForward(compiler)


class OpaqueForward:
    """The Function of a class whose forward must not (or cannot) be captured, with a backward that may be."""

    def __init__(self, compiler: Compiled) -> None:
        method = backward_method(compiler.user.cls)
        assert method is not None
        self.compiler, self.method = compiler, method
        self.units: dict[Any, OpaqueBackward] = {}
        self.refused: OrderedDict[Any, None] = OrderedDict()
        self.refusing: set[Any] = set()  # shapes that cannot be captured, while the user's body runs
        self.marks: dict[Any, int] = {}
        self.reads = self._scanned()
        self.unpacked = threading.local()  # `of`: a ctx, and what it saved
        self.node = self._node()

    def _scanned(self) -> Reads:
        """The reads of backward besides its arguments, at present."""
        reads = scan(*self.compiler.user.methods.sources("backward"))
        reads.version = self.marks.setdefault(reads.signature(), len(self.marks))
        return reads

    def _node(self) -> type:
        cls = self.compiler.user.cls

        def backward(ctx: Any, *gradients: Any) -> Any:
            return self.backward(ctx, gradients)

        name = "backward" if cls.backward is not Function.backward else "vjp"  # type: ignore[attr-defined]
        rule = once_differentiable(backward) if is_once_differentiable(self.method) else backward
        body = {name: staticmethod(rule), "__module__": cls.__module__, "__qualname__": cls.__qualname__}
        node: Any = node_class(cls, (cls,), body)
        if saved_tensors_can_be_told_apart:
            node._backward_cls.saved_tensors = property(self._saved_tensors)
        return node  # type: ignore[no-any-return]

    def _saved_tensors(self, ctx: Any) -> tuple[Any, ...]:
        """The saved tensors: at the first question after they were unpacked, those."""
        unpacked: tuple[Any, tuple[Any, ...] | None] | None = getattr(self.unpacked, "of", None)
        of, saved = unpacked or (None, None)
        if of is not ctx or saved is None:
            return saved_tensors_of(ctx)
        self.unpacked.of = None
        return saved

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return hand_over(torchs_apply(self.node), *args, **kwargs)

    # ------------------------------------------------------------------ backward
    def backward(self, ctx: Any, gradients: Sequence[Any]) -> Any:
        """The gradients from what was captured, or from the user's own body on the real ctx."""
        if "backward" in self.compiler.ledger.broken:
            return hand_over(self.method, ctx, *gradients)
        try:
            return self._backward(ctx, gradients)
        except Exception as error:
            if not is_fault(error):
                raise
            fault = Fault.of(error)
        results = hand_over(self.method, ctx, *gradients)
        put_on_record(self.compiler, "backward", fault, gradients)
        return results

    def _backward(self, ctx: Any, gradients: Sequence[Any]) -> Any:
        if is_capturing() or transforms_active() or dual_level() >= 0 or any(map(is_batched, gradients)):
            return hand_over(self.method, ctx, *gradients)
        if self._is_hopeless():
            return hand_over(self.method, ctx, *gradients)
        left = _Left(ctx)
        shape: Any = (left.facts, ctx.needs_input_grad, tuple(g is not None for g in gradients))
        if shape in self.refused or shape in self.refusing:  # the latter: of a backward within that very backward
            return hand_over(self.method, ctx, *gradients)
        saved: Sequence[Any] | None = None
        try:
            left.require_constants()
            if (saved := _unpacked(ctx)) is None:
                return self.method(ctx, *gradients)
            if (why := backward_guard_failure(self.reads, (*saved, *left.tensors.values()), gradients)) is not None:
                shape = None
                raise CaptureError(reason=why, where=method_place(self.method))
            unit, given = self._unit(left, shape, saved, gradients), [*saved, *left.tensors.values(), *gradients]
            if unit.writes_into_a_history(given):
                error = CaptureError(reason=WRITES_GIVEN, where=method_place(self.method))
                self.compiler.ledger.refuse_derivative(error)
                return self._on_the_real_ctx(ctx, gradients, saved)
            results = unit.differentiable(given)
        except CaptureError as error:
            return self._users(ctx, gradients, shape, error, saved)
        self.compiler.ledger.note_compiled("backward")
        return tuple(results)

    def _is_hopeless(self) -> bool:
        return len(self.refused) >= ATTEMPTS and not any(unit.graphs for unit in self.units.values())

    def _users(
        self, ctx: Any, gradients: Sequence[Any], shape: Any, error: CaptureError, saved: Sequence[Any] | None
    ) -> Any:
        """The user's own body, and only then the record: a call that is wrong by itself raises its own error.

        saved: what was unpacked of ctx, and is not unpacked again: checkpoints let that be done once.
        """
        self.refusing.add(shape)
        try:
            results = self._on_the_real_ctx(ctx, gradients, saved)
        finally:
            self.refusing.discard(shape)
        with recorded_faults(self.compiler, "backward", gradients):
            self.compiler.ledger.refuse("backward", as_effect(error))
            if shape is not None:  # None: of this call alone
                self.refused[shape] = None
                self._forget_units(shape)
            if len(self.refused) > REMEMBERED:
                self.refused.popitem(last=False)
        return results

    def _on_the_real_ctx(self, ctx: Any, gradients: Sequence[Any], saved: Sequence[Any] | None) -> Any:
        self.unpacked.of = None if saved is None else (ctx, tuple(saved))
        try:
            return hand_over(self.method, ctx, *gradients)
        finally:
            self.unpacked.of = None

    def _forget_units(self, shape: Any) -> None:
        """Those that nothing was captured for: numbers that change at every call must not fill the memory."""
        with capture_lock:
            for key in [k for k, unit in self.units.items() if k[0] == shape and not unit.graphs]:
                del self.units[key]

    def _unit(self, left: _Left, shape: Any, saved: Sequence[Any], gradients: Sequence[Any]) -> OpaqueBackward:
        """backward for these constants, on this backend, and for what it reads outside at present."""
        backend = self.compiler.options.backend_for((*gradients, *saved))
        unit = self.units.get(self._key(shape, len(saved), backend))
        if unit is not None:
            return unit
        with capture_lock:
            self.reads = self._scanned()
            if (certain := self.reads.certain_effects()):
                raise CaptureError(reason=certain[0].reason, where=certain[0].where)
            key = self._key(shape, len(saved), backend)
            if key not in self.units:
                self.require_room()
                self.units[key] = self._new_unit(left, shape, saved, gradients, backend)
            return self.units[key]

    def _new_unit(
        self, left: _Left, shape: Any, saved: Sequence[Any], gradients: Sequence[Any], backend: str
    ) -> OpaqueBackward:
        """On the backend, or as it was traced where it compares what it makes with what forward kept: eager's bits."""
        unit = OpaqueBackward(self, left, len(saved), shape[1], backend)
        given = [*saved, *left.tensors.values()]
        if backend not in KERNEL_BACKENDS or not (why := unit.why_as_traced(given, gradients)):
            return unit
        self.compiler.ledger.report_once("backward", why)
        return OpaqueBackward(self, left, len(saved), shape[1], AS_TRACED)

    def _key(self, shape: Any, saved: int, backend: str) -> Any:
        return (shape, saved, backend, global_state(), self.reads.version, self.reads.facts())

    def require_room(self) -> None:
        """Raises CaptureError where backward was captured often enough."""
        if sum(len(unit.graphs) for unit in self.units.values()) >= BACKWARDS:
            raise CaptureError(
                reason=f"it is traced for {BACKWARDS} combinations of what forward leaves on ctx already; "
                "save a number that changes at every call as a 0-d tensor",
                where="unknown",
            )


def _unpacked(ctx: Any) -> Sequence[Any] | None:
    """The saved tensors; None where they were freed, which is an error only where backward asks for it."""
    try:
        return ctx.saved_tensors  # type: ignore[no-any-return]
    except RuntimeError:
        return None


def as_effect(error: CaptureError) -> CaptureError:
    """A segment that nothing is captured around, told as what its statements do."""
    if not isinstance(error.callee, Segment):
        return error
    return CaptureError(reason=error.facts["reason"], where=error.callee.where)


class _Left:
    """Attributes of ctx besides saved tensors: tensors, and constants that become part of the key."""

    def __init__(self, ctx: Any) -> None:
        attributes = vars(ctx)
        self.tensors = {k: v for k, v in attributes.items() if isinstance(v, Tensor)}
        self.constants = {k: v for k, v in attributes.items() if k not in self.tensors}
        frozen = ((k, why_no_constant(v) or freeze(v)) for k, v in self.constants.items())
        self.facts = (tuple(self.tensors), tuple(frozen))

    def require_constants(self) -> None:
        """Raises CaptureError where an attribute can be no part of a key."""
        for name, value in self.constants.items():
            if (why := why_no_constant(value)) is not None:
                raise CaptureError(reason=f"`ctx.{name}` {why}", where="unknown")


def why_no_constant(value: Any, depth: int = DEPTH) -> str | None:
    """The reason why a value cannot be part of a key: it holds tensors, or content that equality does not tell."""
    if isinstance(value, Tensor):
        return "is a container with tensors"
    if isinstance(value, (*SCALARS, Handle)) or _is_of_a_library(value):
        return None
    inner = _inner(value)
    if inner is None or depth == 0:
        return f"holds a {type(value).__name__}"
    return next((why for v in inner if (why := why_no_constant(v, depth - 1)) is not None), None)


def _is_of_a_library(value: Any) -> bool:
    kinds = (type, types.FunctionType, types.BuiltinFunctionType)
    return isinstance(value, kinds) and (is_library(value) or is_library(getattr(value, "__self__", None)))


def _inner(value: Any) -> list[Any] | None:
    """The content of a container or a record of plain fields; None for everything else."""
    if type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return list(value)
    if type(value) is dict:
        return [*value.keys(), *value.values()]
    if isinstance(value, enum.Enum):
        return [value.value]
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return list(vars(value).values()) if is_record or isinstance(value, types.SimpleNamespace) else None


class OpaqueBackward(TransformableGraph):
    """backward as a unit of (saved tensors, tensors among ctx's attributes, gradients), for given constants."""

    def __init__(self, owner: OpaqueForward, left: _Left, saved: int, needs: tuple[bool, ...], backend: str) -> None:
        self.owner, self.saved, self.needs = owner, saved, needs
        self.names, self.constants = list(left.tensors), copy_containers(left.constants)
        self.under_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        name = f"{owner.compiler.user.cls.__name__}_backward"
        graphs = _BackwardGraphs(name, self._python, backend, owner.reads)
        graphs.owner = owner
        super().__init__(name, self._python, backend, owner.reads, graphs)

    def _python(self, *args: Any) -> Sequence[Any]:
        middle = self.saved + len(self.names)
        attributes = copy_containers(self.constants) | dict(zip(self.names, args[self.saved : middle], strict=True))
        ctx = backward_context(self.owner.compiler.user.cls.__name__)(args[: self.saved], attributes, self.needs)
        before = {k: (id(v), _content(v)) for k, v in vars(ctx).items()}
        results = self.owner.method(ctx, *args[middle:])
        _require_unchanged(before, ctx)
        return [_gradient(r) for r in as_tuple(results)]

    def why_as_traced(self, given: Sequence[Any], gradients: Sequence[Any]) -> str:
        """The reason why kernels would not have the bits that it compares; "" where it compares none."""
        executable, _ = self.captured([*given, *gradients])
        return why_alone_as_traced(executable.trace, self.name, len(present(given)))

    def differentiable(self, args: Sequence[Any]) -> Sequence[Any]:
        """Gradients that can be differentiated again, along what they depend on."""
        if not torch.is_grad_enabled():
            return self(*args)
        return self(*without_idle((self.captured(args)[0].trace, present(args)), args))

    def writes_into_a_history(self, args: Sequence[Any]) -> bool:
        """True if these gradients are recorded by autograd, and the graph writes to its inputs: a derivative
        would compute it again, on what is in that memory by then."""
        if not (torch.is_grad_enabled() and any(map(is_tracked, args))):
            return False
        return bool(written_placeholders(self.captured(args)[0].trace.graph_module, len(present(args))))

    def execute(self, args: Sequence[Any]) -> Sequence[Any]:
        """As for any unit, but a failed capture is told: the user's body is to run on the real ctx."""
        if is_capturing():
            return self.body(*args)
        executable, lifted = self.captured(args)
        live = present(args)
        with no_autocast() if self.under_autocast else nullcontext():
            return ran((executable.trace, live), executable([args[i] for i in live], lifted))


class _BackwardGraphs(ComparedGraphs):
    """The graphs of such a backward: a limited number, of plain tensors."""

    owner: OpaqueForward

    def trace(self, args: Sequence[Any], dynamic: bool = True) -> tuple[Session, Trace]:
        if not all(is_plain(a) for a in args if isinstance(a, Tensor)):
            raise CaptureError(reason="it is given a tensor subclass, or one that is not strided", where="unknown")
        self.owner.require_room()
        return super().trace(args, dynamic)


def _content(value: Any) -> Any:
    """The content of an attribute: its tensors by identity, as a write to a saved one may make it require grad."""
    return None if isinstance(value, Tensor) else (tuple(map(id, tensors_of(value))), picture(value))


def _require_unchanged(before: dict[str, Any], ctx: Any) -> None:
    """A captured graph would not write to ctx, and a second backward may read there."""
    after = {k: (id(v), _content(v)) for k, v in vars(ctx).items()}
    changed = next((k for k in {**before, **after} if before.get(k) != after.get(k)), None)
    if changed is not None:
        raise CaptureError(reason=f"backward changes `ctx.{changed}`", where="unknown")


def _gradient(value: Any) -> Any:
    if value is None or isinstance(value, Tensor):
        return value
    raise CaptureError(reason=f"backward returns a {type(value).__name__} as a gradient", where="unknown")
