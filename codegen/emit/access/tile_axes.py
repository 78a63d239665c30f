"""The axes that lanes lie along: their letters, block sizes, counts of blocks, and the lanes themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from ...program.axes import Axis
from ...program.sizes import tidy
from ...schedule.schedule import Schedule
from ..context import Context
from ..names import Names
from ..statements import Expr, binary, call, literal, name


def name_axes(plan: Schedule, names: Names) -> dict[Axis, str]:
    """Row and col over M and N, then c over C, d over D ..; the letters of the sizes are returned."""
    spare = iter("CDEFGHIJKLOPQRSTUVWXYZ")
    outer = [a for a in plan.order[:-1] if a not in plan.row] or list(plan.order[:-1])
    letters: dict[Axis, str] = {}
    for axis in reversed(plan.order):
        if axis is plan.order[-1]:
            letters[axis], axis.name = "N", "col"
        elif outer and axis is outer[0]:
            letters[axis], axis.name = "M", "row"
        else:
            letters[axis] = next(spare, "X")
            axis.name = letters[axis].lower()
        names.fresh(letters[axis]), names.fresh(axis.name)
    return letters


class TileAxes:
    """The tile of a kernel. `dims`: the axes that what is emitted now may vary along, in order."""

    def __init__(self, context: Context, letters: Mapping[Axis, str], block_sizes: Mapping[Axis, int]) -> None:
        self.dims = tuple(context.plan.tile)
        self.block_sizes = dict(block_sizes)
        self._context, self._sizes, self._letters = context, context.sizes, letters
        self._named: set[Axis] = set()  # axes with lanes of their own name
        for axis, letter in letters.items():
            self._sizes.fixed(letter, tidy(axis.size))

    @contextmanager
    def replaced_by(self, axis: Axis, lanes: int, letter: str | None = None) -> Iterator[None]:
        """Another tile for a while: of one axis, with so many lanes; under another letter where these differ."""
        outside = self.dims, self.block_sizes, self._letters
        self.dims, self.block_sizes = (axis,), {**self.block_sizes, axis: lanes}
        self._letters = {**self._letters, axis: letter or self._letters[axis]}
        yield
        self.dims, self.block_sizes, self._letters = outside

    # ------------------------------------------------------------------ blocks
    def block(self, axis: Axis) -> Expr:
        """The lanes of one block."""
        label = f"BLOCK_{self._letters[axis]}"
        self._sizes.constants[label] = self.block_sizes[axis]
        return name(label)

    def own(self, axis: Axis) -> Expr:
        """The distance between blocks."""
        distance = self._context.plan.own_columns(axis)
        if distance == self.block_sizes[axis]:
            return self.block(axis)
        return self._sizes.fixed(f"OWN_{self._letters[axis]}", distance)

    def count(self, axis: Axis) -> Expr:
        """The number of blocks along an axis, or of elements where it has no lanes."""
        if axis in self.dims:
            self._sizes.require_countable(axis.size)
        length = self._sizes.text(axis.size)
        if (reach := self._context.plan.extent(axis)) != axis.size:
            length = binary("+", length, literal(tidy(reach - axis.size)))
        return call("tl.cdiv", length, self.own(axis)) if axis in self.dims else length

    def is_whole_in_a_block(self, axis: Axis) -> bool:
        """True where one block holds the axis, whatever the sizes."""
        slide = self._context.plan.slide
        fits = axis in self.dims and isinstance(axis.size, int) and axis.size <= self.block_sizes[axis]
        return fits and not (slide is not None and axis is slide.axis)

    # ------------------------------------------------------------------ lanes
    def lanes(self, axes: Iterable[Axis]) -> list[Axis]:
        """Those of the axes that have lanes, in the order of the tile."""
        varying = set(axes)
        return [a for a in self.dims if a in varying]

    def lane(self, axis: Axis) -> Expr:
        """The lanes of an axis, shaped for the tile: col = tl.arange(0, BLOCK_N)[None, :]."""
        top, place = self._context.top, (self._letters[axis], self.dims.index(axis), len(self.dims))
        if (lane := top.memo.get(("lane", axis, place))) is None:
            arange = call("tl.arange", literal(0), self.block(axis))
            label = self._context.names.fresh(self._further_name(axis)) if axis in self._named else axis.name
            self._named.add(axis)
            shape = ", ".join(":" if a is axis else "None" for a in self.dims)
            text = arange.text + (f"[{shape}]" if len(self.dims) > 1 else "")
            lane = top.memo["lane", axis, place] = top.define(label, Expr(text, names=arange.names))
        return lane

    def _further_name(self, axis: Axis) -> str:
        """Of lanes that lie otherwise than those that were named first."""
        ending = "s" if len(self.dims) == 1 else "_across" if self.dims.index(axis) else "_down"
        return f"{axis.name}{ending}"

    def shape(self, axes: Iterable[Axis]) -> Expr:
        """[BLOCK_M, 1]: the shape of a value that varies along these axes."""
        varying = set(self.lanes(axes))
        if not varying:
            return Expr("[]")
        dims = [self.block(a) if a in varying else literal(1) for a in self.dims]
        return Expr(f"[{', '.join(d.text for d in dims)}]", names=frozenset().union(*(d.names for d in dims)))

    def broadcast(self, value: Expr, axes: Iterable[Axis]) -> Expr:
        """The value in all lanes of these axes."""
        shape = self.shape(axes)
        return call("tl.broadcast_to", value, shape) if shape.text != "[]" else value

    def is_missing_lanes(self, axes: Iterable[Axis], present: Iterable[Axis]) -> bool:
        """True where a value along `axes` has lanes along which an address of `present` does not vary."""
        return bool(set(self.lanes(axes)) - set(self.lanes(present)))
