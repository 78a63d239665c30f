"""What a loop reads step by step: places of a value along one of its axes."""

from __future__ import annotations

from typing import NamedTuple

from ...graph import Value, emit
from ...infer import drop_axes, sizes_equal
from ...types import Size, simplify_size
from ..parts import part_along


class Walked(NamedTuple):
    """An operand: the value whose axes are moved, and sliced along time from `start` on; `views`: what is between."""

    value: Value
    perm: tuple[int, ...]
    start: Size
    views: tuple[Value, ...]

    @staticmethod
    def of(operand: Value) -> Walked:
        perm, start, views = tuple(range(operand.ndim)), simplify_size(0), list[Value]()
        value = operand
        while value.prim == "permute" or (value.prim == "slice" and _is_along(value, perm[0])):
            views.append(value)
            if value.prim == "slice":
                start = simplify_size(start + value.params["start"][perm[0]])
            else:
                perm = tuple(value.params["perm"][a] for a in perm)
            (value,) = value.args
        return Walked(value, perm, start, tuple(views))

    @property
    def axis(self) -> int:
        return self.perm[0]

    @property
    def size(self) -> Size:
        """Places along the axis."""
        return self.value.shape[self.axis]

    def part(self, value: Value, start: Size, stop: Size) -> Value:
        """Places of the value, as the loop reads it. `value`: that in the graph being built."""
        moved = value if self.perm == tuple(range(value.ndim)) else emit("permute", value, perm=self.perm)
        return part_along(moved, 0, start, stop)

    def with_steps(self, steps: Value) -> Value:
        """The value, of these steps, and of what is beside them step by step: the kernel of a loop stores such."""
        stop = simplify_size(self.start + steps.shape[0])
        before, behind = self.start, simplify_size(self.size - stop)
        assert isinstance(before, int) and isinstance(behind, int)
        moved = emit("permute", steps, perm=tuple(self.perm.index(a) for a in range(steps.ndim)))
        pieces = [*self._one_by_one(0, before), moved, *self._one_by_one(stop, behind)]
        return emit("cat", *pieces, axis=self.axis) if len(pieces) > 1 else moved

    def _one_by_one(self, start: Size, count: int) -> list[Value]:
        starts = [simplify_size(start + n) for n in range(count)]
        return [part_along(self.value, self.axis, at, simplify_size(at + 1)) for at in starts]


def _is_along(value: Value, axis: int) -> bool:
    """A slice that takes neighbours along one axis, and all along the others."""
    params, (x,) = value.params, value.args
    others = zip(*(drop_axes(params[k], (axis,)) for k in ("start", "stop")), drop_axes(x.shape, (axis,)), strict=True)
    return all(s == 1 for s in params["step"]) and all(a == 0 and sizes_equal(b, n) for a, b, n in others)
