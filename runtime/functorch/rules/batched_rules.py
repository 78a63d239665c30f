"""The rules of a specialisation over one more batch axis: every unit of the level below, batched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....ir.errors import FusegradError
from ....ir.program import ValueRef
from ....tracer.capture.capture import is_capturing
from ....tracer.function import rebind
from ....tracer.torch_private import forward_mode_is_active, memory_of
from ...capture.outputs import is_as_strided, view_of
from ..batching.lanes import lane, present_under_vmap
from ..results import own_memory
from ..unit import OutDim, TransformableGraph
from .rules import FunctionRules, Lanes

Tensor = torch.Tensor
Dims = tuple[int | None, ...]


class BatchedRules(FunctionRules):
    """in_dims: where each argument of the Function has the batch axis; None where it has none."""

    def __init__(self, parent: FunctionRules, in_dims: Dims, randomness: str) -> None:
        super().__init__(parent.compiler, parent.spec)
        self.parent, self.in_dims, self.randomness = parent, in_dims, randomness
        self.copies = parent.copies
        self.dims = tuple(in_dims[i] for i in self.spec.captured.slots)
        self.forward_unit = parent.forward_unit.batch(self.dims, randomness)
        self.pushed_unit = parent.pushed_unit.batch(self.dims, randomness)
        self.residual_dims: Dims = tuple(self._dim_of(p) for p in self.spec.captured.residual_places)

    def _dim_of(self, place: ValueRef | None) -> int | None:
        if place is None:
            return None
        return self.dims[place.index] if place.kind == "input" else 0

    # ------------------------------------------------------------------ forward
    def run_forward(self, args: Sequence[Any]) -> tuple[Any, ...]:
        captured, total = self.spec.captured, self.outputs.total
        tensors = captured.tensors_of(args)
        results = list(self.forward_unit(*tensors))
        # What forward makes of arguments that it writes to stands behind the results.
        for i, value in zip(captured.written_inputs, results[total:], strict=True):
            if self.dims[i] is None:
                raise WrittenByEveryLane(function=captured.name, argument=captured.names[captured.slots[i]])
            tensors[i].copy_(value.movedim(0, self.dims[i] or 0))
        # Results that are one tensor, or share memory, are so in every lane.
        for i, position in enumerate(captured.forward.tensor_outputs):
            described = captured.forward.outputs[position]
            results[i] = results[described.index] if described.kind == "same" else results[i]
        if not (self.copies or is_capturing() or forward_mode_is_active()):
            results = self._aliased(results, tensors)
        results = [own_memory(r) for r in self.outputs.as_views(results[:total], tensors)]
        for i, index in self.outputs.written:
            results[i] = tensors[index]
        return tuple(results)

    def _aliased(self, results: list[Any], tensors: Sequence[Tensor]) -> list[Any]:
        """As `alias_outputs`, in every lane: kernels, and the rules of the IR, give each result its memory."""
        forward, sizes, aliased = self.spec.captured.forward, self.sizes_of(tensors), list(results)
        pools: dict[str, tuple[Sequence[Any], Sequence[Tensor]]] = {
            "input": (tensors, forward.fakes),
            "view": (tensors, forward.fakes),
            "part of output": (aliased, forward.fake_outputs),
            "part of hidden": (aliased[self.outputs.count :], forward.fake_hidden),
        }
        for i, position in enumerate(forward.tensor_outputs):
            kind, index = forward.outputs[position].kind, forward.outputs[position].index
            if kind not in pools:
                continue
            bases, likes = pools[kind]
            base, like, fake = bases[index], likes[index], forward.fake_outputs[i]
            if memory_of(base) == memory_of(aliased[i]) or not is_as_strided(fake, like):
                continue
            lanes = self.lanes_of(index, base) if bases is tensors else _lanes_in_front(base, like, sizes)
            aliased[i] = aliased[i] if lanes is None else self._view(i, fake, base, lanes, sizes)
        return aliased

    def _view(self, number: int, fake: Tensor, base: Tensor, lanes: Lanes, sizes: Any) -> Tensor:
        """An output of every lane in the memory of its base."""
        shape, strides, offset = view_of(fake, sizes)
        view = base.as_strided((*lanes[0], *shape), (*lanes[1], *strides), base.storage_offset() + offset)
        forward = self.spec.captured.forward
        is_view = forward.outputs[forward.tensor_outputs[number]].value is not False
        return view if is_view and number not in self.outputs.fixed else view.detach()

    def lanes_of(self, index: int, tensor: Tensor) -> Lanes | None:
        dim = self.dims[index]
        behind = None if dim is None else self.parent.lanes_of(index, lane(tensor, dim))
        if dim is None or behind is None:
            return None
        return (tensor.shape[dim], *behind[0]), (tensor.stride(dim), *behind[1])

    def out_dims(self) -> list[int | None]:
        """Where each result has the batch axis: an argument that forward writes to, where it had it."""
        arguments = dict(self.outputs.written)
        return [self.dims[arguments[i]] if i in arguments else 0 for i in range(self.outputs.total)]

    def sizes_of(self, inputs: Sequence[Any]) -> dict[Any, int]:
        lanes = [lane(t, d) for t, d in zip(inputs, self.dims, strict=True)]
        return self.parent.sizes_of(lanes)

    # ------------------------------------------------------------------ derivatives
    def backward_for(self, gradients: Sequence[Any]) -> TransformableGraph:
        of_gradients = [None if g is None else 0 for g in gradients]
        dims = (*self.residual_dims, *[None] * len(self.symbols), *of_gradients)
        back: list[OutDim] = ["sum" if d is None else d for d in self.in_dims[: self.spec.captured.count]]
        return self.parent.backward_for(gradients).batch(dims, self.randomness, back)

    def tangent_unit(self, mask: tuple[bool, ...]) -> TransformableGraph:
        moving = [d for d, moves in zip(self.in_dims, mask, strict=False) if moves]
        dims = (*self.residual_dims, *[None] * len(self.symbols), *[0] * self.outputs.count, *moving)
        return self.parent.tangent_unit(mask).batch(dims, self.randomness)

    def user_jvp(self, saved: Sequence[Any], sizes: Any, tangents: Sequence[Any], captured: bool) -> tuple[Any, ...]:
        live = [i for i, t in enumerate(tangents) if t is not None]

        def one(*values: Any) -> Sequence[Any]:
            supply = iter(values[len(saved) :])
            lanes = [next(supply) if i in live else None for i in range(len(tangents))]
            return self.parent.user_jvp(values[: len(saved)], sizes, lanes, captured)

        dims = (*map(self._dim_of, self.jvp_places), *(self.in_dims[i] for i in live))
        return tuple(present_under_vmap(one, dims, [*saved, *(tangents[i] for i in live)], self.randomness))


def _lanes_in_front(result: Tensor, like: Tensor, sizes: Any) -> Lanes | None:
    """Of a result; None where a lane is not laid out as a single one is."""
    depth = result.dim() - like.dim()
    shape, strides = result.shape, result.stride()
    single = rebind(tuple(like.stride()), sizes)
    laid_out = all(n == 1 or a == b for n, a, b in zip(shape[depth:], strides[depth:], single, strict=True))
    return (tuple(shape[:depth]), strides[:depth]) if laid_out else None


class WrittenByEveryLane(FusegradError, RuntimeError):
    """vmap over a Function that writes into an argument which is one for all lanes."""

    message = (
        "vmap({function}): forward writes into `{argument}`, which has no batch axis\n  at:   {where}\n"
        "  fix:  give vmap a batch of it (in_dims), or write into a clone."
    )
