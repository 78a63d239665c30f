"""One level of torch.func: the units behind the rules of a specialisation, over its own arguments or over a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ....ir.program import ValueRef
from ...capture.guards import is_float
from ...capture.outputs import tensor_at
from ..unit import TransformableGraph
from .user_outputs import UserOutputs

if TYPE_CHECKING:
    from ...compiled.compiled import Compiled
    from ...specialize.specialization import Specialization

Tensor = torch.Tensor
Lanes = tuple[tuple[int, ...], tuple[int, ...]]
"""How many lanes there are along each batch axis, and how far apart they are in memory."""


class FunctionRules:
    """The units that `function_of` makes a Function of.

    forward_unit: tensor arguments -> (user's tensors, hidden tensors, values of arguments that forward writes to)
    backward_for(gradients): (residuals, sizes, one gradient per user output) -> one gradient per argument
    tangent_unit(mask): (residuals, sizes, outputs, the tangents that are there) -> tangents of the user's tensors
    """

    forward_unit: TransformableGraph
    pushed_unit: TransformableGraph  # the same, of which forward mode is derived
    copies: bool  # whether no result may be a view

    def __init__(self, compiler: Compiled, spec: Specialization) -> None:
        captured = spec.captured
        self.compiler, self.spec = compiler, spec
        self.outputs = UserOutputs(captured)
        self.tracked = sum(i < captured.count for i in captured.slots)  # tensors from inside containers are not
        self.symbols = sorted(captured.binder.sources, key=str)
        self.hidden_is_constant = False  # nothing differentiates what forward kept
        self.batches: dict[Any, Any] = {}  # the rules over one more batch axis, by where it is
        self.function: Any = None  # the Function of these rules, once it is made

    # ------------------------------------------------------------------ of the level
    def run_forward(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The user's tensors and the hidden ones, at the bottom."""
        raise NotImplementedError

    def backward_for(self, gradients: Sequence[Any]) -> TransformableGraph:
        """The unit of the user's backward, where these gradients are given."""
        raise NotImplementedError

    def tangent_unit(self, mask: tuple[bool, ...]) -> TransformableGraph:
        """The unit of the transposed backward, where these arguments move."""
        raise NotImplementedError

    def user_jvp(self, saved: Sequence[Any], sizes: Any, tangents: Sequence[Any], captured: bool) -> tuple[Any, ...]:
        """The user's jvp: one tangent per output of the user's. captured: as a graph, or NestedForwardMode."""
        raise NotImplementedError

    def user_vmap(self, info: Any, in_dims: Any, args: Sequence[Any]) -> Any:
        """The user's vmap: (results, where their batch axes are)."""
        raise NotImplementedError

    def sizes_of(self, inputs: Sequence[Any]) -> dict[Any, int]:
        """The session's symbols at these tensor arguments."""
        raise NotImplementedError

    def lanes_of(self, index: int, tensor: Tensor) -> Lanes | None:
        """Of a tensor argument; None where it is not mapped along every batch axis."""
        return (), ()

    # ------------------------------------------------------------------ the same at every level
    def backward_as_written(
        self, residuals: Sequence[Any], sizes: Sequence[Any], gradients: Sequence[Any]
    ) -> Sequence[Any]:
        """The user's backward itself, one gradient per argument."""
        return self.backward_for(gradients).as_written([*residuals, *sizes, *gradients])

    def setup_context(self, ctx: Any, inputs: Sequence[Any], output: Sequence[Any]) -> None:
        """Save the values that backward and jvp read, and mark the results that have no gradient."""
        captured = self.spec.captured
        tensors = captured.tensors_of(inputs)
        outputs, hidden = self.outputs.split(output)

        def at(place: ValueRef | None) -> Any:
            return tensor_at(place, tensors, outputs, hidden)

        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*map(at, captured.residual_places), *tensors)
        ctx.save_for_forward(*map(at, self.jvp_places), *tensors)
        if self.outputs.written:
            ctx.mark_dirty(*map(at, captured.forward.dirty))
        integers = [o for o in output if not is_float(o)]
        fixed = [*map(at, captured.forward.non_differentiable), *(output[i] for i in self.outputs.fixed)]
        if marked := [*fixed, *integers, *(hidden if self.hidden_is_constant else ())]:
            ctx.mark_non_differentiable(*marked)
        ctx.likes = [(o.shape, o.dtype, o.device) for o in output]
        ctx.sizes = self.sizes_of(tensors)

    @property
    def jvp_places(self) -> list[ValueRef | None]:
        """Where the values are that jvp reads: those that the user's own asks for, else those of backward."""
        captured = self.spec.captured
        if not self.compiler.user.overrides("jvp"):
            return captured.residual_places
        return [*captured.forward.saved_for_forward, *captured.forward.tensor_attributes.values()]
