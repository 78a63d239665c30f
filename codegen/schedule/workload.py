"""A program at the current sizes, on one target: the facts that all decisions read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ...ir import Value
from ...ir.switches import is_on
from ...ir.types import ITEMSIZE
from ..kernel import Target
from ..program.axes import REDUCTIONS, SCANS, Axis, Program, Sink, Term, terms_below
from ..program.sizes import Hints, evaluate_size, power_of_two
from .alignment import slide_of

PARTIALS = 0.0295
"""Bytes of partial sums that a program may write, of those that it moves: fewer programs rather than more of them."""


class Separate(Exception):
    """These sinks belong in a kernel of their own."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self.sinks = tuple(sinks)


@dataclass(frozen=True)
class Budget:
    """Elements that one program may hold: `resident` in rows, `lanes` in a tile, `chunk` of a row.

    Before its partial sums are worth their bytes, a program walks at least `turns` items and `walked` elements, and so
    many that the sums are at most the share `partials` of the bytes that it moves; but more than `long` of them only
    where half of the units are busy. From `wide` lanes on, a row that begins at an odd place is worth its own tile.
    Of 16-bit elements `packed` may stay as they were read, two in a register; as many registers are for the rest.
    """

    resident: int
    lanes: int
    chunk: int
    units: int
    least_items: int
    turns: int
    walked: int
    partials: float
    long: int
    wide: int
    packed: int

    @staticmethod
    def of(target: Target) -> Budget:
        leaning = target.leaning
        if target.kind == "interpret":
            resident = max(16, int(target.shared * 8 * 2.0**leaning.held))
            chunk = 1 << max(4, min(15, (resident // 2).bit_length() - 1))
            lanes = min(1 << 16, resident)
            return Budget(resident, lanes, chunk, target.units, target.units, 1, 1, 1.0, 1, 128, target.packed)
        lanes, chunk = (max(256, int(n * 2.0**leaning.lanes)) for n in (2048, 4096))
        units, packed = target.units, target.packed if leaning.held >= 0 else 0
        resident = int((48 << 10) * 2.0**leaning.held)
        return Budget(resident, lanes, chunk, units, units // 2, 4, 1 << 14, PARTIALS, 12, 1024, packed)


class Below(dict[Term, set[Term]]):
    """The terms below a term, found when it is first asked for: a program without reductions asks for none."""

    def __missing__(self, term: Term) -> set[Term]:
        self[term] = below = set(terms_below([term])) - {term}
        return below


class Workload:
    """The terms of a program by what they do, its axes in loop order, and what moves along them."""

    def __init__(self, program: Program, target: Target, hints: Hints) -> None:
        self.program, self.target, self.hints = program, target, hints
        self.budget = Budget.of(target)
        self.size = {a: evaluate_size(a.size, hints) for a in program.axes}
        self.loads = [t for t in program.terms if t.op == "load"]
        self.reductions = [t for t in program.terms if t.op in REDUCTIONS]
        self.scans = [t for t in program.terms if t.op in SCANS]
        self.under = Below()
        self.weight, self.order = _by_stride(self)
        slides = bool(self.order) and is_on("boundary")
        self.slide = slide_of(program, self.order[-1], self.size, hints) if slides else None

    @property
    def vector(self) -> Axis:
        """The axis of the lanes: it has stride 1 in most of the memory that moves."""
        return self.order[-1]

    @property
    def has_odd_rows(self) -> bool:
        """Accesses are narrow, and want more threads: addresses for every element are in registers."""
        return any(self.size[a] % 8 for a in self.order[-1:])

    def elements(self, axes: Iterable[Axis]) -> int:
        return math.prod(self.size[a] for a in axes)

    def padded(self, axes: Iterable[Axis]) -> int:
        """The lanes of a tile that covers the axes."""
        return math.prod(power_of_two(self.size[a]) for a in axes)

    def is_pinnable(self, axes: Iterable[Axis]) -> bool:
        """Only the length of a row may be compiled in: a new batch size needs no new kernel."""
        return all(isinstance(a.size, int) or a is self.vector for a in axes)

    def row_loads(self, row: Iterable[Axis]) -> list[Term]:
        """One load of every whole row that is read."""
        return list({t.param: t for t in self.loads if t.axes >= set(row)}.values())

    def bytes_read(self, terms: Iterable[Term]) -> int:
        """The bytes of all loads below the terms, each once."""
        loads = {t.param: t for t in terms_below(terms) if t.op == "load"}
        return sum(ITEMSIZE[t.dtype] * self.elements(t.axes) for t in loads.values())

    def sinks_of(self, terms: set[Term]) -> list[Sink]:
        """The sinks that need one of the terms."""
        return [s for s in self.program.sinks if any(t in terms or self.under[t] & terms for t in s.terms)]


def _by_stride(w: Workload) -> tuple[dict[Axis, int], list[Axis]]:
    """The bytes that move along each axis at stride 1; the axes, the largest stride first, then the vector."""
    stride = {a: 0 for a in w.program.axes}
    weight = {a: 0 for a in w.program.axes}
    for t in w.program.traffic():
        moved = w.elements(t.axes) * t.itemsize
        for axis, coefficient in t.place.terms:
            step = abs(evaluate_size(coefficient, w.hints))
            stride[axis] = max(stride[axis], step)
            weight[axis] += moved if step == 1 else 0
    vector = max(w.program.axes, key=lambda a: (weight[a], -stride[a], a.order), default=None)
    return weight, sorted(w.program.axes, key=lambda a: (a is vector, -stride[a], a.order))


def nodes_of(terms: Iterable[Term]) -> list[Value]:
    return [t.node for t in terms if t.node is not None]
