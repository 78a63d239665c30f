"""A call within a graph that another tracer makes: torch.compile, torch.export, make_fx.

There forward and every rule is an operator (`operators.py`), and functorch's levels are driven as they are outside:
the backward, jvp and vmap that the user wrote are what the graph computes. What cannot be so is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree

from ...ir.codes import code_of
from ...ir.errors import FusegradError, users_line
from ...ir.switches import switch_state
from ...tracer.capture.capture import OpaqueCallError
from ...tracer.containers import open_containers
from ...tracer.function import methods_now
from ...tracer.methods import backward_method, method_place
from ...tracer.torch_private import (
    FakeTensor,
    custom_function_call,
    derivatives_active,
    forward_mode_is_active,
    guard_in_dynamo,
    is_traced_by_aot,
    is_wrapper_subclass,
    no_autocast,
    records_above_autograd,
    transforms_active,
    unwrap_functorch,
)
from ...tracer.trace import CaptureError
from ..capture.graph_mode import is_for_a_graph, outside_graph, wants_fake_results, with_fake_results
from ..capture.guards import is_tracked
from ..capture.outputs import from_flat_outputs
from ..compiled.backward import backward_is_captured
from ..distributed import call as distributed
from ..fallback.answer import Fault, answer_as_written, is_fault, put_on_record
from ..fallback.records import Record
from ..functorch.rules.function import function_of
from ..functorch.rules.transformable import why_not_transformable
from ..settings.config import settings
from ..specialize.comparisons import backend_apart
from ..values.sizes import BoundSizes
from .forward_operator import OperatorRules, UnknownSize, example

if TYPE_CHECKING:
    from ..compiled.compiled import Compiled
    from ..specialize.specialization import Specialization

Tensor = torch.Tensor


class OuterGraphError(FusegradError, NotImplementedError):
    """A call that cannot be in a graph that another tracer makes. torch.compile breaks its graph there."""

    message = (
        "{function}.apply cannot be in a graph of {who}: {reason}\n  at:   {where}\n"
        "  fix:  call it outside of that graph, or without fullgraph=True: it then runs between two graphs, as ever."
    )

    @property
    def code(self) -> str:
        """That of the reason."""
        return code_of(self.facts["reason"]) or super().code


FOLLOWED = ("FG025",)
"""What keeps a plain function from being compiled and not from being followed: torch differentiates it as it runs."""


class Refused(Exception):
    """A call that cannot be in another tracer's graph, and the reason (internal)."""

    def __init__(self, reason: str, where: str) -> None:
        super().__init__(reason)
        self.reason, self.where = reason, where


# ------------------------------------------------------------------ a call
def in_dynamos_graph(
    compiler: Compiled, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]
) -> Any:
    """A call that stands in Dynamo's graph: run for real, made more graph of, or asked by Dynamo for its results.

    run: makes it for real.
    """
    try:
        with with_fake_results() if is_for_a_graph(open_containers((*args, *kwargs.values()))) else nullcontext():
            return run(*args, **kwargs)
    except Exception as error:
        if not is_fault(error):
            raise
        fault = Fault.of(error)
    if not any(isinstance(a, FakeTensor) for a in pytree.tree_leaves((args, kwargs))):
        return answer_as_written(compiler, args, kwargs, fault)
    put_on_record(compiler, _maker(), fault, args)
    raise _no_place(compiler, compiler.ledger.records[_maker()].reason or fault.names, users_line())


def trace_call(compiler: Compiled, args: tuple[Any, ...]) -> Any:
    """A call in another tracer's graph. Raises OuterGraphError where it cannot be there."""
    asked_by_dynamo = wants_fake_results()
    try:
        with faults_refused(compiler, args):
            if asked_by_dynamo:
                _guard(compiler)
            return traced(compiler, args)
    except Refused as refused:
        compiler.ledger.records[_maker()] = Record("opaque", refused.reason, refused.where)
        if compiler.user.plain_function is not None and code_of(refused.reason) in FOLLOWED:
            return compiler.user.run(*args)
        if asked_by_dynamo or torch.compiler.is_exporting() or compiler.user.methods.declared_opaque():
            raise _no_place(compiler, refused.reason, refused.where) from None
    return compiler.user.run(*args)  # a Function of torch's own, whose backward a tracer follows


def _no_place(compiler: Compiled, reason: str, where: str) -> OuterGraphError:
    return OuterGraphError(function=compiler.user.cls.__name__, who=_maker(), reason=reason, where=where)


@contextmanager
def faults_refused(compiler: Compiled, args: tuple[Any, ...]) -> Iterator[None]:
    """Turns a mistake of ours, while a call is made part of another tracer's graph, into a refusal."""
    try:
        yield
        return
    except Exception as error:
        if isinstance(error, Refused) or not is_fault(error):
            raise
        fault = Fault.of(error)
    put_on_record(compiler, _maker(), fault, args)
    raise Refused(compiler.ledger.records[_maker()].reason or fault.names, method_place(compiler.user.cls.forward))  # type: ignore[attr-defined]


def _maker() -> str:
    return "torch.export" if torch.compiler.is_exporting() else "torch.compile"


def _guard(compiler: Compiled) -> None:
    """Make Dynamo's graph hold for as long as all that the methods read stays the same."""
    if not guard_in_dynamo(lambda: (id(compiler), _state(compiler)), compiler.user.cls.__name__):
        raise Refused("this torch takes no guard on what it reads", method_place(compiler.user.cls.forward))  # type: ignore[attr-defined]


def _state(compiler: Compiled) -> Any:
    reads = compiler.keys.reads_now()
    return reads.facts(), methods_now(compiler.user.original), settings(), switch_state(), torch.get_default_dtype()


def traced(compiler: Compiled, args: tuple[Any, ...], spec: Specialization | None = None) -> Any:
    """A call, with every argument given. Raises Refused where it cannot be in the graph.

    spec: what serves these arguments, though it was captured for others: for the whole of which they are parts.
    """
    if distributed.has_dtensors(args):
        _require_parts_are_seen(args)
        try:
            return distributed.call_in_graph(compiler, args, partial(traced, compiler))
        except CaptureError as error:
            raise _refused(error) from error
    if any(is_wrapper_subclass(unwrap_functorch(a)) for a in args if isinstance(a, Tensor)):
        raise Refused("an argument is a tensor subclass, which gives operations a meaning of its own", users_line())
    if derivatives_active() and (torch.compiler.is_exporting() or records_above_autograd()):
        raise Refused("torch.export takes no derivative of torch.func around it", users_line())
    args = tuple(map(_as_constant, args))
    flat_args = open_containers(args)
    alone = not (transforms_active() or forward_mode_is_active())
    spec = spec or _specialization(compiler, flat_args)
    if (why := _why_not(compiler, spec, alone) or _why_no_backward(compiler, flat_args)) is not None:
        raise Refused(why, spec.captured.forward_place())
    tensors = spec.captured.tensors_of(flat_args)
    if spec.captured.writes_shared_memory(tensors):
        raise Refused("it writes to an argument that shares memory with another one", spec.captured.forward_place())
    backend = backend_apart(spec, compiler.options.backend_for(flat_args))
    forward = OperatorRules.of(compiler, spec, backend, tensors, alone)
    arguments = [a if isinstance(a, Tensor) else None for a in flat_args]
    if records_above_autograd() or not (spec.captured.skip or transforms_active()):
        outputs = forward.operator(*tensors)
    elif transforms_active():
        outputs = custom_function_call(function_of(forward), *arguments)
    else:
        outputs = function_of(forward).apply(*arguments)
    copies = forward.written_outputs
    last = {argument: output for output, argument in copies}  # whose gradient is that of an argument returned twice
    for argument, output in last.items():
        tensors[argument].copy_(outputs[output])
    same = {output: last[argument] for output, argument in copies}
    outputs = tuple(outputs[same.get(i, i)] for i in range(len(outputs)))
    sizes = BoundSizes(spec.captured.binder.read(tensors))
    return from_flat_outputs(spec.captured, outputs, tensors, sizes, args)


def _require_parts_are_seen(args: Sequence[Any]) -> None:
    """Of a DTensor torch.export and make_fx see the whole: its part would be a constant of their graphs."""
    sees_parts = wants_fake_results() or any(is_wrapper_subclass(a) and is_traced_by_aot(a) for a in args)
    if torch.compiler.is_exporting() or not sees_parts:
        raise Refused("it is given DTensors, whose parts only torch.compile sees", users_line())


def _as_constant(value: Any) -> Any:
    """Numbers are part of what is captured, in a graph as outside."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.pytype(value)
    return value


def _specialization(compiler: Compiled, flat_args: Sequence[Any]) -> Specialization:
    from ..fallback.records import NotCaptured

    for role in compiler.user.methods.roles():
        if (error := compiler.keys.opaque(role)) is not None:
            raise _refused(error)
    try:
        examples = [example(a) for a in flat_args]
        with outside_graph():
            spec = compiler.specialization(examples)
            if spec is None:
                raise Refused(*_recorded(compiler, "forward"))
            if spec.keeper is not None:
                spec.keeper.release()
            with no_autocast():  # backward comes outside of it
                if not spec.captured.opaque and not backward_is_captured(compiler, spec):
                    raise Refused(*_recorded(compiler, "backward"))
    except UnknownSize:
        raise Refused("a size depends on the data of a tensor", "unknown") from None
    except NotCaptured as missing:
        error = missing.attempt.error
        if not isinstance(error, OpaqueCallError):
            compiler.ledger.refuse("forward", error)
        raise _refused(error) from missing
    if not spec.captured.guard(spec.captured.tensors_of(flat_args)):
        raise Refused("it was traced for other sizes", spec.captured.forward_place())
    return spec


def _refused(error: CaptureError) -> Refused:
    return Refused(error.facts["reason"], error.facts["where"])


def _recorded(compiler: Compiled, method: str) -> tuple[str, str]:
    record = compiler.ledger.records.get(method)
    return (record and record.reason) or "it runs in eager", (record and record.where) or "unknown"


def _why_no_backward(compiler: Compiled, flat_args: Sequence[Any]) -> str | None:
    """The reason where a gradient may be asked for and there is no backward: eager's error would come at that time."""
    is_differentiated = torch.is_grad_enabled() and not transforms_active() and any(map(is_tracked, flat_args))
    return "it has no backward" if is_differentiated and backward_method(compiler.user.cls) is None else None


def _why_not(compiler: Compiled, spec: Specialization, alone: bool) -> str | None:
    """alone: only autograd differentiates the call, once, by the user's backward, and nothing maps it."""
    captured = spec.captured
    if captured.opaque:
        return "it calls what is opaque"
    dirty = {p.index for p in captured.forward.dirty}
    if any(o.kind == "view" and o.index in dirty for o in captured.forward.outputs):
        return "it returns a view of an argument that it writes to"
    if alone:
        return None
    if dirty and compiler.options.derive_jvp == "forward":
        return "it writes to an argument that forward mode goes by"
    return why_not_transformable(compiler, spec)
