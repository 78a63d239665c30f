"""Derived methods, as the author of a class wants them: a backward beside a jvp alone, a jvp where there is none.

jvp is linear in its tangents, so that backward is its transpose in them: <jvp(t), g> == <t, backward(g)>.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import Function

from ...ir.errors import FusegradError
from ...ir.lazy_attribute import lazy_attribute
from ...tracer.capture.capture import capture_lock, is_capturing
from ...tracer.frames import user_line
from ...tracer.methods import as_tuple, backward_method, method_place, uses_setup_context
from ...tracer.torch_private import is_batched, plain_tensors, transforms_active
from ...tracer.trace import CaptureError
from ..capture.captured_backward import predicted_kinds
from ..capture.guards import is_float, is_plain, is_tracked
from ..settings.config import settings
from ..specialize.linearity import (
    CoarsestEps,
    IgnoreDetach,
    NonLinearJvp,
    not_transposed,
    probe_tensor,
    require_linear_jvp,
)
from ..values.tensors import zeros
from .function_class import node_class
from .traceability import Traceability

if TYPE_CHECKING:
    from ..specialize.specialization import Specialization

Tensor = torch.Tensor


DERIVE_JVP: dict[str | bool, str] = {
    "backward": "the transpose of backward",
    "forward": "the derivative of forward, for compile(derive_jvp='forward')",
    "forward alone": "the derivative of forward",
}
"""What forward mode is where a class has no jvp, by `derive_jvp`; of a class without backward, of a plain function."""


class DeriveJvpError(FusegradError, ValueError):
    """`compile(derive_jvp=...)` is not what it has to be."""

    message = (
        "fusegrad.compile(derive_jvp={value!r}): it is none of 'backward', 'forward' and False\n"
        "  at:   {where}\n  fix:  {fix}"
    )


def valid_derive_jvp(value: Any) -> Any:
    """The value, if `derive_jvp` may be that; raises DeriveJvpError otherwise."""
    if value is False or (isinstance(value, str) and value in ("backward", "forward")):
        return value
    fix = "write 'backward' for its transpose, 'forward' for the derivative of forward, False to have none derived"
    raise DeriveJvpError(value=value, where=user_line(), fix=fix)


def with_derived_backward(cls: Any, methods: Traceability) -> type:
    """`cls` with the transpose of its jvp as backward, where it has a jvp alone that may be captured; else `cls`."""
    if cls.jvp is Function.jvp or backward_method(cls) is not None or methods.declared_opaque():
        return cls  # type: ignore[no-any-return]

    @functools.wraps(cls.jvp)
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return transposed_jvp(cls, ctx, gradients)

    backward.__signature__ = inspect.Signature()  # type: ignore[attr-defined]  # its parameters are gradients, not tangents
    body = {name: getattr(cls, name) for name in ("__module__", "__qualname__")}
    keeping = _setup_context(cls) if uses_setup_context(cls) else _forward(cls)
    return node_class(cls, (cls,), {**body, **keeping, "backward": staticmethod(backward)})  # type: ignore[no-any-return]


def _setup_context(cls: Any) -> dict[str, Any]:
    @functools.wraps(cls.setup_context)
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        cls.setup_context(ctx, inputs, output)
        _keep(ctx, inputs)

    return {"setup_context": staticmethod(setup_context)}


def _forward(cls: Any) -> dict[str, Any]:
    @functools.wraps(cls.forward)
    def forward(ctx: Any, *args: Any) -> Any:
        output = cls.forward(ctx, *args)
        _keep(ctx, args)
        return output

    return {"forward": staticmethod(forward)}


def _keep(ctx: Any, inputs: Sequence[Any]) -> None:
    """Keep for backward what jvp reads, and the form of its tangents."""
    ctx.save_for_backward(*(getattr(ctx, "saved_for_forward", None) or ()))
    ctx._fusegrad_likes = tuple((tuple(x.shape), x.dtype, x.device) if is_float(x) else None for x in inputs)


def transposed_jvp(cls: Any, ctx: Any, gradients: Sequence[Any]) -> tuple[Any, ...]:
    """backward of a class with a jvp alone. Raises NonLinearJvp where real values show that it is no transpose."""
    recorded, ctx = torch.is_grad_enabled(), _ReadOnce(ctx)
    with torch.enable_grad():
        probes = [None if s is None else zeros(s).requires_grad_() for s in ctx._fusegrad_likes]
        wanted = [p for p in probes if p is not None]
        with IgnoreDetach(wanted):
            tangents = _pushed(cls, ctx, probes)
        pairs = [(t, g) for t, g in zip(tangents, gradients, strict=False) if g is not None and is_tracked(t)]
        found: Sequence[Any] = [None] * len(wanted)
        if pairs:
            outputs, given = [t for t, _ in pairs], [g for _, g in pairs]
            kept = recorded or is_capturing()  # a capture would take gradients without a graph for constants
            found = torch.autograd.grad(outputs, wanted, given, allow_unused=True, create_graph=kept)
    if settings().check and _are_real(gradients):
        _require_transpose(cls, ctx, wanted, gradients, found)
    supply = iter(found)
    return tuple(None if p is None else _or_zeros(next(supply), p) for p in probes)


class _ReadOnce:
    """The real ctx, whose saved tensors are unpacked once, however often jvp runs: checkpoint has them once only."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx

    @lazy_attribute
    def saved_tensors(self) -> Any:
        return self._ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def _pushed(cls: Any, ctx: Any, probes: Sequence[Any]) -> tuple[Any, ...]:
    """The user's jvp on tangents of their own, which it may write to."""
    return as_tuple(cls.jvp(ctx, *(None if p is None else p.clone() for p in probes)))


def _or_zeros(gradient: Any, probe: Tensor) -> Tensor:
    return torch.zeros_like(probe, requires_grad=False) if gradient is None else gradient


def _are_real(gradients: Sequence[Any]) -> bool:
    tensors = [g for g in gradients if isinstance(g, Tensor)]
    return not is_capturing() and not transforms_active() and all(is_plain(g) and not is_batched(g) for g in tensors)


def _require_transpose(
    cls: Any, ctx: Any, probes: Sequence[Tensor], gradients: Sequence[Any], found: Sequence[Any]
) -> None:
    """A Function that jvp calls may have another derivative than its own, and transposing goes by that."""
    with torch.no_grad():
        tangents = [probe_tensor(p) for p in probes]
        supply = iter(tangents)
        given = [None if s is None else next(supply) for s in ctx._fusegrad_likes]
        with CoarsestEps() as seen:
            made = _pushed(cls, ctx, given)
        pushed = [t for t, g in zip(made, gradients, strict=False) if g is not None]
        why = not_transposed(pushed, [g for g in gradients if g is not None], tangents, list(found), seen.coarsest)
    if why is not None:
        raise NonLinearJvp(function=cls.__name__, why=why, where=method_place(cls.jvp))


# ------------------------------------------------------------------ whether it has a transpose
def require_transposable(cls: Any, opaque: Callable[[str], CaptureError | None], spec: Specialization) -> None:
    """Raise NonLinearJvp where jvp has no transpose, CaptureError where it cannot be captured; else capture that.

    opaque: tells why a role of the class must not be captured.
    """
    captured = spec.captured
    key = (captured.reads.facts(), cls.jvp)
    if key in spec.proved:
        return
    if (error := opaque("jvp")) is not None:
        raise error
    if captured.opaque:
        first = captured.opaque[0]
        raise CaptureError(reason=f"forward calls `{first.name}`, which is opaque", where=first.where)
    with plain_tensors(), torch.no_grad(), capture_lock:
        if key not in spec.proved:  # no other thread was first
            require_linear_jvp(spec)
            spec.backward.entry(predicted_kinds(captured))
            spec.proved.add(key)


def why_no_backward(cls: Any, error: CaptureError) -> tuple[str, str]:
    """Reason and place of a jvp that cannot be transposed, since it cannot be captured."""
    reason, where = error.facts["reason"], error.facts["where"]
    return f"jvp cannot be transposed: {reason}", method_place(cls.jvp) if where == "unknown" else where
