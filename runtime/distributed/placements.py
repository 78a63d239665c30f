"""In and out of a device mesh: a DTensor's part on this rank, the DTensor of a part, each the other's transpose.

Only here is torch.distributed.tensor touched, and only where the program has imported it: else there is no DTensor.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import Function

from ...ir.sharding.rules import WHOLE, State
from .partition import ShardingPlan, dual

Tensor = torch.Tensor


def types() -> Any:
    """torch.distributed.tensor, where the program has imported it; else there is no DTensor."""
    return sys.modules.get("torch.distributed.tensor")


@dataclass(frozen=True)
class Layout:
    """The placements of a tensor on a mesh, and those that its gradient has to have."""

    mesh: Any
    placements: tuple[Any, ...]
    gradient: tuple[Any, ...]

    @property
    def dual(self) -> Layout:
        return Layout(self.mesh, self.gradient, self.placements)


def layout_of(mesh: Any, states: Sequence[State], ways: Sequence[ShardingPlan | None]) -> Layout:
    """The layout of these states, one per mesh dim. Where nothing is divided, every rank does the same, twice over."""
    duals = [s if way is None else dual(s) for s, way in zip(states, ways, strict=True)]
    return Layout(mesh, tuple(map(placement_of, states)), tuple(map(placement_of, duals)))


def placement_of(state: State) -> Any:
    module = types()
    if isinstance(state, int):
        return module.Shard(state)
    return module.Replicate() if state == WHOLE else module.Partial()


def placements_of(value: Any, ndim: int) -> Sequence[Any]:
    module = types()
    return value.placements if isinstance(value, module.DTensor) else (module.Replicate(),) * ndim


def is_split(placement: Any) -> bool:
    """True for Shard itself: other kinds of shards are laid out in other orders."""
    return type(placement) is types().Shard


def moved_share(placement: Any, state: State, count: int) -> float:
    """The part of a tensor that goes over the wires, to and from each rank, relative to its size."""
    if placement == placement_of(state) or placement.is_replicate():
        return 0.0
    if placement.is_partial():
        return 1.0 if isinstance(state, int) else 2.0
    return 1.0 / count if isinstance(state, int) else 1.0


# ------------------------------------------------------------------ the sizes of parts
def part_sizes(size: int, counts: Sequence[int]) -> set[int]:
    """The sizes of the parts of a dim that is divided by so many ranks, and each part again, ..."""
    sizes = {size}
    for count in counts:
        sizes = {part_size(n, count, i) for n in sizes for i in _unlike(n, count)}
    return sizes


def _unlike(size: int, count: int) -> tuple[int, ...]:
    """The first rank, the one that has the rest, and the last: among them is every size."""
    return 0, min(count - 1, size // max(1, -(-size // count))), count - 1


def part_size(size: int, count: int, index: int) -> int:
    """The size of a part, as torch.chunk divides: the first parts are equal, the last may be empty."""
    full = -(-size // count)
    return max(0, min(full, size - full * index))


def dense_strides(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps, the axes in the order of other strides."""
    order = sorted(range(len(shape)), key=lambda i: (like[i], -i))
    strides, step = [1] * len(shape), 1
    for axis in order:
        strides[axis] = step
        step *= max(1, shape[axis])
    return tuple(strides)


def local_shape(shape: Sequence[int], states: Sequence[State], mesh: Any) -> tuple[int, ...]:
    """The shape of this rank's part."""
    sizes, coordinate = list(shape), mesh.get_coordinate()
    for at, state in enumerate(states):
        if isinstance(state, int):
            sizes[state] = part_size(sizes[state], mesh.size(at), coordinate[at])
    return tuple(sizes)


# ------------------------------------------------------------------ in and out of the mesh
def to_local(value: Tensor, layout: Layout) -> Tensor:
    """This rank's part of a tensor, followed by autograd."""
    if not isinstance(value, types().DTensor):
        return value
    return ToLocal.apply(value, layout)  # type: ignore[no-any-return,no-untyped-call]


def from_local(part: Tensor, layout: Layout, shape: Sequence[int]) -> Any:
    """The DTensor that has this part, followed by autograd."""
    return FromLocal.apply(part, layout, torch.Size(shape), dense_strides(shape, part.stride()))  # type: ignore[no-untyped-call]


class ToLocal(Function):
    """A DTensor -> this rank's part of it in a layout. `FromLocal` is its transpose: any order is differentiable."""

    @staticmethod
    def forward(ctx: Any, value: Any, layout: Layout) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.shape, ctx.stride = layout, value.shape, value.stride()
        part = _part(value, layout.placements)
        if not value.is_floating_point() and not value.is_complex():
            ctx.mark_non_differentiable(part)
        return part

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        if gradient is None:
            return None, None
        return FromLocal.apply(gradient, ctx.layout.dual, ctx.shape, ctx.stride), None  # type: ignore[no-untyped-call]


class ScaledGradient(Function):
    """A tensor as it is, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, factor: float) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.factor = factor
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return None if gradient is None else gradient * ctx.factor, None


class FromLocal(Function):
    """This rank's part -> the DTensor of this shape. `ToLocal` is its transpose."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, layout: Layout, shape: torch.Size, stride: tuple[int, ...]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.layout = layout
        return types().DTensor.from_local(
            part, layout.mesh, layout.placements, run_check=False, shape=shape, stride=stride
        )

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        if gradient is None:
            return None, None, None, None
        return ToLocal.apply(gradient, ctx.layout.dual), None, None, None  # type: ignore[no-untyped-call]


def _part(value: Any, placements: Sequence[Any]) -> Tensor:
    with torch.no_grad():
        redistributed = value if value.placements == tuple(placements) else value.redistribute(placements=placements)
        part = redistributed.to_local()
        part = part.wait() if hasattr(part, "wait") else part
        part = part.contiguous() if value.is_contiguous() else part
        return part.view_as(part)  # type: ignore[no-any-return]
