"""A stream divided among programs, where its rows alone are too few for the device; and how what they find is merged.

    program (split, row):   m[split], l[split], acc[split]    of its part of the stream, in memory
    another kernel:         m = max(m[split]);   acc = sum(acc[split] * exp(m[split] - m))

A sum that is relative to a running value r moves by exp(G(now) - G(before)) inside one program (`algebra`); by the same
power it moves from the r of a part to the r of all. A part without anything has nothing: 0, relative to 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import sympy

from ....ir.switches import is_on
from ....ir.types import FLOATS, Size
from ...kernel import WORTH, Buffer, Target
from ...program.axes import Axis, Sink, Term
from ...program.sizes import Hints, cdiv, evaluate_size, whole_times
from ...program.terms import Temporary, TermTable
from ..separation.algebra import Algebra
from .accumulators import Accumulation, Accumulator
from .roles import Roles
from .tiles import StreamTile, programs_of

MOST = 64
"""Parts of a stream, at most."""
LEAST = 2
"""Blocks that a part has to have, at least: a program begins and ends, whatever it walks."""
MOST_PLACES = (1 << 31) - 1
"""No place is as far along a stream, which 32 bits count."""
LARGEST = 3.4028234663852886e38
"""The largest finite float32."""


def wanted_parts(roles: Roles, sums: Accumulation, tile: StreamTile, target: Target) -> Size:
    """How many parts would give each multiprocessor two programs, as far as the stream is long enough; one at least."""
    if roles.keeps_stream or sums.passes > 1 or not is_on("splits"):
        return 1
    programs = programs_of(tile.blocks[roles.row], roles)
    by_device = whole_times(2 * target.units, _at_least_one(programs))
    by_length = whole_times(cdiv(roles.stream.size, tile.blocks[roles.stream]), LEAST)
    if all(isinstance(n, int) for n in (by_device, by_length)):
        return min(MOST, by_device, by_length)
    return sympy.Min(MOST, by_device, by_length, evaluate=False)


def _at_least_one(n: Size) -> Size:
    return max(1, n) if isinstance(n, int) else sympy.Max(1, n)


def parts_at(wanted: Size, hints: Hints) -> int:
    """A power of two of parts; 1 leaves the stream whole."""
    count = evaluate_size(wanted, hints)
    return 1 if count < WORTH else 1 << count.bit_length() - 1


@dataclass(frozen=True)
class Split:
    """The axis of the parts, what each part stores, and the sinks that are made of all parts."""

    axis: Axis
    roles: Roles
    partial: Accumulation
    merged: tuple[Sink, ...]
    buffers: tuple[Buffer, ...]


def split_of(table: TermTable, sums: Accumulation, roles: Roles, parts: int, first: int) -> Split:
    """The stream in so many parts; `first`: the number of the first temporary that holds what they find."""
    axis = table.axes.axis(("split",), parts)
    found = [_Partial.of(table, a, axis, roles, first + at) for at, a in enumerate(sums.accumulators)]
    merged = _Merge(table, roles, axis, {p.of_all.term: p for p in found}).sinks(sums.sinks)
    divided = replace(roles, grid=(axis, *roles.grid), split=axis)
    partial = replace(sums, sinks=tuple(p.sink for p in found))
    return Split(axis, divided, partial, tuple(merged), tuple(p.buffer for p in found))


@dataclass(frozen=True)
class _Partial:
    """What the parts have found of one accumulator: a buffer, the store into it, and the load of it."""

    of_all: Accumulator
    buffer: Buffer
    sink: Sink
    load: Term

    @staticmethod
    def of(table: TermTable, accumulator: Accumulator, split: Axis, roles: Roles, number: int) -> _Partial:
        term = accumulator.term
        assert term.node is not None
        axes = (split, *(a for a in (*roles.grid, roles.row, *roles.depth) if a in term.axes))
        memory = Temporary(number, f"{term.node.origin.name or term.op}_parts", term.dtype, axes, term.node)
        return _Partial(accumulator, memory.buffer, memory.store(term, term.node), memory.load(table))


class _Merge:
    """The accumulators of the whole stream, out of those of its parts."""

    def __init__(self, table: TermTable, roles: Roles, split: Axis, partials: Mapping[Term, _Partial]) -> None:
        self.table, self.split, self.partials = table, split, partials
        self.algebra = Algebra(table, roles.is_fixed)
        self.whole: dict[Term, Term] = {}
        for term, partial in partials.items():
            if partial.of_all.kind in ("amax", "amin"):
                self.whole[term] = self._extreme(partial)
        self.whole |= {term: self._sum(p) for term, p in partials.items() if term not in self.whole}

    def sinks(self, sinks: Iterable[Sink]) -> list[Sink]:
        """What the kernel stores, with the accumulators merged."""
        roots = [t for s in sinks for t in s.terms]
        new = self.algebra.rewritten(roots, lambda t, args: self.whole.get(t) or self.algebra.again(t, args))
        return [s.of_terms(new) for s in sinks]

    def _extreme(self, partial: _Partial) -> Term:
        return self._over_parts(partial, self._of_best(partial, partial.of_all.beside))

    def _of_best(self, partial: _Partial, extreme: Term | None) -> Term:
        """What a part has found; of the place or number of an extreme nothing, where another part has a better one."""
        if extreme is None:
            return partial.load
        of_part, load = self.partials[extreme].load, partial.load
        is_best = self.table.test("eq", of_part, self.whole[extreme])
        if of_part.dtype in FLOATS:
            is_nan = self.table.make("isnan", of_part, dtype="b1")
            is_best = self.table.test("or", is_best, is_nan)
        nothing = self.table.const(0 if partial.of_all.kind == "sum" else MOST_PLACES, load.dtype)
        return self.table.make("where", is_best, load, nothing, dtype=load.dtype)

    def _sum(self, partial: _Partial) -> Term:
        accumulator = partial.of_all
        value = self._of_best(partial, accumulator.beside)
        if accumulator.scale is not None:
            value = self.algebra.make("mul", value, self._ratio(accumulator))
        return self._over_parts(partial, value)

    def _over_parts(self, partial: _Partial, value: Term) -> Term:
        term = partial.of_all.term
        return self.table.make(term.op, value, dtype=term.dtype, param=(self.split,), node=term.node)

    def _ratio(self, accumulator: Accumulator) -> Term:
        """exp(G(all) - G(part)), finite where a part without anything is relative to 0: it is times a sum of zeros."""
        assert accumulator.scale is not None
        of_part = {r: self._base(r, self.partials[r].load) for r in accumulator.running}
        of_all = {r: self._base(r, self.whole[r]) for r in accumulator.running}
        now, then = (self.algebra.replaced(accumulator.scale, values) for values in (of_all, of_part))
        ratio = self.algebra.make(accumulator.base, self.algebra.make("sub", now, then))
        largest = self.algebra.number(LARGEST, ratio)
        is_more = self.table.test("gt", ratio, largest)
        return self.table.make("where", is_more, largest, ratio, dtype=ratio.dtype)

    def _base(self, running: Term, extreme: Term) -> Term:
        """What sums are relative to: the extreme, and 0 where there is none."""
        nothing = self.table.const(float("-inf" if running.op == "amax" else "inf"), extreme.dtype)
        is_nothing = self.table.test("eq", extreme, nothing)
        return self.table.make("where", is_nothing, self.algebra.number(0.0, extreme), extreme, dtype=extreme.dtype)
