"""A call while a transform or a dual level is active."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ...tracer.capture.capture import DataReadError, OpaqueCallError
from ...tracer.containers import open_containers
from ...tracer.methods import method_place
from ...tracer.torch_private import custom_function_call, forward_mode_is_active, plain_tensors, transforms_active
from ...tracer.trace import CaptureError
from ..capture.outputs import from_flat_outputs
from ..compiled.backward import backward_is_captured
from ..fallback.answer import UNDER_FUNC
from ..fallback.records import NotCaptured
from ..specialize.comparisons import backend_apart
from ..values.bitwise import made_up_data
from .placeholders import example, readable
from .rules.functorch_function import functorch_function_of
from .rules.transformable import why_not_transformable

if TYPE_CHECKING:
    from ..compiled.compiled import Compiled
    from ..fallback.records import Attempt

Tensor = torch.Tensor

def _as_written(compiler: Compiled, missing: Attempt, args: tuple[Any, ...]) -> Any:
    """The user's own class; where torch refuses that (a forward with ctx), with the reason why there is no other."""
    try:
        if isinstance(missing.error, OpaqueCallError):  # over an opaque node no rule is derived
            return compiler.user.run(*args)
        return compiler.run_refused(missing, args, compiler.user.run)
    except RuntimeError as refused:
        if not compiler.user.setup_style:
            record = compiler.ledger.note_no_rules(missing.error)
            refused.add_note(f"fusegrad: no rules are derived, since forward is not traced: {record}")
        raise


def call_under_transform(compiler: Compiled, args: tuple[Any, ...]) -> Any:
    """A call while a transform or a dual level is active: functorch drives, our graphs run at the bottom."""
    opaque = (compiler.keys.opaque(role) for role in compiler.user.methods.roles())
    if UNDER_FUNC in compiler.ledger.broken or any(error is not None for error in opaque):
        return compiler.user.run(*args)  # over an opaque method no rule is derived
    flat_args = open_containers(args)
    plain = [example(a) for a in flat_args]
    specialization, derivable, failed = None, False, None
    with plain_tensors(), torch.no_grad():
        is_known = compiler.keys.exact(plain) in compiler.table.by_call or readable(plain, flat_args)
        try:
            with nullcontext() if is_known else made_up_data():
                specialization = compiler.specialization(plain)
            if specialization is not None and specialization.keeper is not None:
                specialization.keeper.release()  # nothing is kept of a call under a transform
            derivable = specialization is not None and backward_is_captured(compiler, specialization)
        except NotCaptured as error:
            failed = error.attempt
    if failed is not None:
        if isinstance(failed.error, DataReadError):
            compiler.ledger.refuse_derivative(failed.error)
        return _as_written(compiler, failed, args)
    if specialization is None or specialization.captured.opaque or not derivable:
        return compiler.user.run(*args)
    if (why := why_not_transformable(compiler, specialization)) is not None:
        place = method_place(compiler.user.method("forward"))
        compiler.ledger.refuse("torch.func", CaptureError(reason=why, where=place))
        return compiler.user.run(*args)
    own_jvp = forward_mode_is_active() and compiler.user.overrides("jvp")
    backend = backend_apart(specialization, compiler.options.backend_for(plain), own_jvp)
    function = functorch_function_of(compiler, specialization, backend)
    tensors = [a if isinstance(a, Tensor) else None for a in flat_args]  # the rest is a constant of the specialisation
    outputs = custom_function_call(function, *tensors) if transforms_active() else function.apply(*tensors)
    captured = specialization.captured
    return from_flat_outputs(captured, outputs, captured.tensors_of(flat_args), captured.sizes(plain), args)
