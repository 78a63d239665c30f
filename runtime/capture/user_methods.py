"""The user's own methods on real tensors, with a ctx that holds what the capture knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from ...ir.program import ValueRef
from ...tracer.capture.context import ForwardContext, attributes_of
from ...tracer.containers import close_containers, leaves
from ...tracer.function import call_forward, merge_attributes, rebind, run_backward, tensors_of_attributes
from ...tracer.loops.stacks import stacked_again
from ...tracer.methods import as_tuple
from ...tracer.torch_private import transforms_active
from .captured import CapturedFunction
from .graph_mode import is_for_outer_graph
from .guards import is_float

Tensor = torch.Tensor
PART = "part of hidden"


def ctx_attributes(
    captured: CapturedFunction, tensors: Sequence[Any], sizes: Mapping[sympy.Symbol, Any]
) -> dict[str, Any]:
    """ctx attributes for a run of the user's own body."""
    names = captured.forward.tensor_attributes
    return merge_attributes(captured.constants_at(sizes), dict(zip(names, tensors, strict=True)))


def run_user_backward(
    captured: CapturedFunction,
    residuals: Sequence[Any],
    sizes: Mapping[sympy.Symbol, Any],
    gradients: Sequence[Any],
    attached: bool = False,
    ctx_state: dict[str, Any] | None = None,
) -> tuple[Any, ...]:
    """The user's own backward body on whatever is given. attached: without its `once_differentiable`.

    left: ctx's attributes after the last run of the same node, and after this one.
    """
    n = len(captured.forward.saved)
    residuals = with_eager_requires_grad(captured, residuals)
    attributes = {} if ctx_state is None else ctx_state
    if not attributes:
        attributes.update(ctx_attributes(captured, residuals[n:], sizes))
    may_change = ctx_state is not None
    return run_backward(
        captured.cls, captured.forward, residuals[:n], attributes, gradients, captured.count, attached, may_change
    )


def with_eager_requires_grad(captured: CapturedFunction, residuals: Sequence[Any]) -> Sequence[Any]:
    """The residuals, requiring grad as in eager, since backward and its callees may ask for that.

    At the bottom of torch.func it does not; above, the transforms say themselves what they differentiate.
    """
    if transforms_active() or is_for_outer_graph(residuals):
        return residuals
    pairs = zip(residuals, captured.residual_places, strict=True)
    return [alias_requiring_grad(r) if requires_grad_at(captured, p) else r for r, p in pairs]


def requires_grad_at(captured: CapturedFunction, place: ValueRef | None) -> bool:
    """True if autograd follows the tensor at a place, in a call that it follows."""
    forward = captured.forward
    if place is None:
        return False
    if place.kind == "input":
        return forward.needs_input_grad[captured.slots[place.index]]
    moves = place.kind == "output" and any(forward.needs_input_grad)
    return moves and place not in forward.non_differentiable and is_float(forward.fake_at(place))


def run_user_forward(captured: CapturedFunction, args: Sequence[Any]) -> list[Any]:
    """Run the user's own forward: its tensors, then the hidden ones."""
    ctx = ForwardContext(captured.forward.needs_input_grad[: captured.count])
    output = call_forward(captured.cls, ctx, close_containers(args, captured.count))
    tensors = [o for o in as_tuple(output) if isinstance(o, Tensor)]
    return [*tensors, *hidden_tensors(captured, ctx, output, captured.tensors_of(args))]


def hidden_of_user(captured: CapturedFunction, args: Sequence[Any], output: Any) -> list[Any]:
    """The tensors that the user's setup_context keeps besides arguments and outputs."""
    ctx = ForwardContext(captured.forward.needs_input_grad[: captured.count])
    captured.cls.setup_context(ctx, tuple(close_containers(args, captured.count)), output)  # type: ignore[attr-defined]
    return hidden_tensors(captured, ctx, output, captured.tensors_of(args))


def hidden_tensors(
    captured: CapturedFunction, ctx: ForwardContext, output: Any, inputs: Sequence[Tensor]
) -> list[Tensor]:
    """The tensors that are kept and neither arguments nor outputs, in the order of `fake_hidden`."""
    # Arguments and outputs are no hidden tensors, whatever else holds them.
    outputs = as_tuple(output)
    outer = {id(t): t for t in (*inputs, *(o for o in outputs if isinstance(o, Tensor)))}
    # In the order in which the trace found them: bases, tensors in containers, tensors on ctx.
    contained = [v for o in outputs if not isinstance(o, Tensor) for v in leaves(o) if isinstance(v, Tensor)]
    saved = ctx.to_save
    if captured.forward.stacks:
        saved = stacked_again(saved, stack_lengths(captured, captured.binder(inputs)))
    on_ctx = (*saved, *ctx.saved_for_forward, *tensors_of_attributes(attributes_of(ctx)))
    candidates = (*bases_of_parts(captured, outputs), *contained, *on_ctx)
    hidden: list[Tensor] = []
    for t in candidates:
        if t is not None and id(t) not in outer:
            outer[id(t)] = t
            hidden.append(t)
    return hidden


def stack_lengths(captured: CapturedFunction, sizes: Any) -> list[int | None]:
    """How many of the user's each saved tensor is, at these sizes; None for one."""
    forward = captured.forward
    shapes = [() if n not in forward.stacks else forward.fake_at(p).shape for n, p in enumerate(forward.saved)]  # type: ignore[union-attr]
    return [rebind(shape[0], sizes) if shape else None for shape in shapes]


def bases_of_parts(captured: CapturedFunction, outputs: Sequence[Any]) -> list[Tensor]:
    """The values in between of which some outputs are parts, in the order in which these were found."""
    parts = {o.index: outputs[at] for at, o in enumerate(captured.forward.outputs) if o.kind == PART}
    return [parts[i]._base for i in sorted(parts)]


def alias_requiring_grad(value: Tensor) -> Tensor:
    """An alias that requires grad, but for what does so. No `detach` that a capture would take for the user's."""
    return value if value.requires_grad else torch.ops.aten.detach.default(value).requires_grad_()
