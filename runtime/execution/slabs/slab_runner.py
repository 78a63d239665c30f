"""Runs a region in slabs of rows: the same plan for each, its results written in place or added up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from ....ir import Value
from ....ir.lazy_attribute import lazy_attribute
from ....ir.passes.fuse import Group
from ....ir.passes.place import is_plain_product
from ....ir.passes.streaming.slabs import End, Slabs
from ....tracer.dtypes import to_torch
from ...values.sizes import BoundSizes, Sizes, number, numbers
from ..layouts import expected_layout
from .destination import Destination, Destinations

Tensor = torch.Tensor
LOW = (torch.float16, torch.bfloat16)


class SlabPlan(Protocol):
    """Runs a group at some sizes, and computes what it can where it belongs."""

    def run_into(self, inputs: Sequence[Tensor], sizes: Sizes, into: Destinations) -> list[Any]: ...


class SlabRunner:
    """A group that is walked in slabs. limit: bytes that a slab may hold; make_plan: makes the plan of one slab."""

    one_by_one = False
    overwrites: tuple[int, int] | None = None

    def __init__(self, slabs: Slabs, name: str, limit: int, make_plan: Callable[[], SlabPlan]) -> None:
        self.slabs, self.name, self.limit, self._make_plan = slabs, name, limit, make_plan

    @property
    def group(self) -> Group:
        return self.slabs.group

    @lazy_attribute
    def plan(self) -> SlabPlan:
        """The plan of a slab, at any number of rows."""
        return self._make_plan()

    def __call__(self, inputs: Sequence[Tensor], sizes: Sizes, key: tuple[int, ...] = ()) -> list[Tensor]:
        slabs, every = self.slabs, sizes[self.slabs.symbol]
        rows = slabs.rows(sizes, self.limit)
        results = list(self._results(slabs.sizes(sizes), inputs))
        for start in range(0, max(1, every), rows):
            count = min(rows, every - start)
            self._run(inputs, BoundSizes(slabs.sizes(sizes, count, start)), start, count, results)
        return [r.whole() for r in results]

    def _run(self, inputs: Sequence[Tensor], sizes: Sizes, start: int, count: int, results: Sequence[_Result]) -> None:
        """One slab."""
        parts = [_rows(x, e, sizes, start, count) for x, e in zip(inputs, self.slabs.inputs, strict=True)]
        places = [r.place(sizes, start, count) for r in results]
        named = zip(self.group.graph.outputs, places, strict=True)
        made = self.plan.run_into(parts, sizes, {v.id: p for v, p in named if v is not None and p is not None})
        for result, place, part in zip(results, places, made, strict=True):
            result.take(part, place)

    def _results(self, sizes: Sizes, inputs: Sequence[Tensor]) -> Iterator[_Result]:
        outputs = zip(self.group.graph.outputs, self.layouts(sizes), self.slabs.outputs, strict=True)
        for value, layout, end in outputs:
            assert value is not None
            yield (_Sum if end.axis is None else _Rows)(value, layout, end, inputs[0].device)

    def layouts(self, sizes: Sizes) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Shape and strides of each result."""
        graph = self.group.graph
        pairs = zip(graph.outputs, graph.output_strides, strict=True)
        return [(numbers(v.shape, sizes), numbers(s, sizes)) for v, s in pairs if v is not None and s is not None]

    def is_launched(self, key: tuple[int, ...]) -> bool:
        """Always: whatever a slab needs is found when it runs."""
        return True


def _rows(tensor: Tensor, end: End, sizes: Sizes, start: int, count: int) -> Tensor:
    """The rows of a slab; all of what is not divided."""
    if end.axis is None:
        return tensor
    unit = number(end.unit, sizes)
    return tensor.narrow(end.axis, start * unit, count * unit)


class _Result:
    """One result of all slabs."""

    def __init__(
        self, value: Value, layout: tuple[tuple[int, ...], tuple[int, ...]], end: End, device: torch.device
    ) -> None:
        self.value, self.layout, self.end, self.device = value, layout, end, device

    def empty(self) -> Tensor:
        """Memory for it."""
        return torch.empty_strided(*self.layout, dtype=to_torch(self.value.dtype), device=self.device)

    def place(self, sizes: Sizes, start: int, count: int) -> Destination | None:
        """Where the result of a slab may be computed."""
        raise NotImplementedError

    def take(self, part: Tensor, place: Destination | None) -> None:
        """The result of a slab."""
        raise NotImplementedError

    def whole(self) -> Tensor:
        """The result of all."""
        raise NotImplementedError


class _Rows(_Result):
    """A result with the rows of all slabs, one behind the other."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tensor = self.empty()

    def place(self, sizes: Sizes, start: int, count: int) -> Destination:
        return Destination(_rows(self.tensor, self.end, sizes, start, count))

    def take(self, part: Tensor, place: Destination | None) -> None:
        assert place is not None
        if part is not place.tensor:
            place.tensor.copy_(part)

    def whole(self) -> Tensor:
        return self.tensor


class _Sum(_Result):
    """A result that slabs add to: a product where it is, other sums of low floats in float32."""

    total: Tensor | None = None

    def place(self, sizes: Sizes, start: int, count: int) -> Destination | None:
        if not is_plain_product(self.value):
            return None
        return Destination(self.empty() if self.total is None else self.total, adds=self.total is not None)

    def take(self, part: Tensor, place: Destination | None) -> None:
        if place is not None and part is place.tensor:
            self.total = part
        elif self.total is None:
            self.total = part.float() if part.dtype in LOW else part
        else:
            self.total.add_(part)

    def whole(self) -> Tensor:
        assert self.total is not None
        return expected_layout(self.total.to(to_torch(self.value.dtype)), self.layout[1])
