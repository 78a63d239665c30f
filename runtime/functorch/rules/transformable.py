"""The choice of torch.func between the rules of a specialisation and the user's own class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....tracer.capture.capture import writes_through_data
from ....tracer.methods import backward_method
from ....tracer.torch_private import forward_mode_is_active, levels_active
from ....tracer.trace import CaptureError
from ...compiled.traceability import switches_grad_mode
from ...specialize.randomness import why_not_differentiated

if TYPE_CHECKING:
    from ...compiled.compiled import Compiled
    from ...specialize.specialization import Specialization


def why_not_transformable(compiler: Compiled, spec: Specialization) -> str | None:
    """The reason why torch.func gets the user's own class; None where it gets the compiled one."""
    forward = spec.captured.forward
    if spec.captured.writes_inputs and (forward.hidden_count or backward_method(compiler.user.cls) is None):
        return "it writes to an argument and saves an intermediate, which torch.func differentiates"
    derived = compiler.options.derive_jvp == "forward" and not compiler.user.overrides("jvp")
    pushed = derived and forward_mode_is_active()
    if (why := why_not_differentiated(spec, pushed or backward_method(compiler.user.cls) is None)) is not None:
        return why
    if len(levels_active()) > 1 and _backward_writes_through_data(spec):
        return "its backward writes through `.data`, of which torch.func hears at one of its levels alone"
    if forward_mode_is_active() and switches_grad_mode(compiler.user.cls):
        return "it turns the grad mode off or on, which forward mode does not heed"
    if forward.returns_hidden and compiler.user.overrides("vmap"):
        return "it returns a container with tensors, of which its own vmap tells nothing"
    if not forward.tensor_outputs and compiler.user.overrides("vmap"):
        return "it returns no tensor, and what its own vmap returns is all that there is"
    return None


def _backward_writes_through_data(spec: Specialization) -> bool:
    entry = next((e for e in spec.backward.entries.values() if not isinstance(e, CaptureError)), None)
    return entry is not None and writes_through_data(entry.trace.graph_module)
