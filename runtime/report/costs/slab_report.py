"""A region that is walked in slabs, in figures: how many, what each launches, and the memory that it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....codegen import Kernels, Target
from ....ir import Value
from ....ir.passes.fuse import Group
from ....ir.passes.streaming.slabs import Slabs, each, least_bytes, summed_products
from ....ir.switches import slab_bytes
from ...execution.generated import Generated
from ...execution.graph_to_kernels import generate
from ...values.sizes import Sizes, number


@dataclass(frozen=True)
class SlabReport:
    """A region of matmuls that is computed a slab of rows at a time."""

    dim: str
    """The size that is walked: `x.shape[0]`."""
    every: int
    """All rows."""
    rows: int
    """Rows of a slab; the last one may have fewer."""
    slabs: int
    """How many slabs there are."""
    limit: int
    """The setting `slab_bytes`."""
    held: int
    """The bytes between launches that a slab holds at once."""
    at_once: int
    """The same where all rows are one slab."""
    launches: int
    """Launches of each slab."""
    bytes: int
    """Bytes that all slabs move."""
    least: int
    """The least bytes of this form, whatever makes the slabs: operands and results of the matmuls once a slab."""
    walk: Walk = field(repr=False, compare=False)
    """The compiler's own: slabs, and the steps and kernels of one."""

    def __str__(self) -> str:
        return (
            f"slabs of {self.dim}: {self.slabs} of {self.rows:,} rows, {self.launches} launches each; "
            f"{self.bytes:,} bytes, {self.bytes / max(1, self.least):.2f} x the least of this form; "
            f"{self.held:,} bytes in memory at a time (slab_bytes {self.limit:,}), {self.at_once:,} in one piece"
        )

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values that json can write."""
        return {name: value for name, value in vars(self).items() if name != "walk"}


@dataclass(frozen=True)
class Walk:
    """Slabs at known sizes: those of each, and the steps and kernels of one."""

    slabs: Slabs
    generated: Generated
    each: Sequence[Sizes]

    @classmethod
    def of(cls, slabs: Slabs, target: Target, sizes: Sizes, name: str) -> Walk:
        """The walk at these sizes, with the kernels that a call of them has."""
        sizes_of_slabs = each(slabs, sizes, slab_bytes())
        made = generate(slabs.group.graph, target, sizes_of_slabs[0], f"{name}_slab", "library", "inside")
        return cls(slabs, made, sizes_of_slabs)

    @property
    def kernels(self) -> Kernels:
        """Those of a slab."""
        return Kernels(tuple(k for _, kernels in self.groups() for k in kernels.kernels))

    def groups(self) -> Iterator[tuple[Group, Kernels]]:
        """The groups of a slab, with their kernels."""
        for at, kernels in self.generated.kernels.items():
            step = self.generated.steps[at]
            assert isinstance(step, Group)
            yield step, kernels

    def added(self, value: Value) -> int:
        """Bytes that a product reads to add to: in all slabs but the first."""
        is_sum = value in summed_products(self.slabs)
        return (len(self.each) - 1) * number(value.aval.nbytes, self.each[0]) if is_sum else 0

    def report(self, sizes: Sizes, moved: Sequence[int]) -> SlabReport:
        """In figures; moved: the bytes of each launch, in all slabs."""
        slabs, limit = self.slabs, slab_bytes()
        rows = slabs.rows(sizes, limit)
        return SlabReport(
            _dim(slabs), sizes[slabs.symbol], rows, len(self.each), limit, slabs.held_at(sizes, rows),
            slabs.held_at(sizes), len(moved), sum(moved), least_bytes(slabs, sizes, limit), self,
        )  # fmt: skip


def _dim(slabs: Slabs) -> str:
    """x.shape[0]"""
    for value, end in zip(slabs.group.graph.inputs, slabs.inputs, strict=True):
        if end.axis is not None and value.shape[end.axis] == slabs.symbol:
            return f"{value.params['name']}.shape[{end.axis}]"
    return str(slabs.symbol)
