"""Parts of a tensor that are written: y[a:b] += v, in normal form on the whole of it.

where(inside, pad(y[a:b] + v), y)      where(inside, y + pad(v), y)     each place of y is asked for once
where(inside, pad(y[a:b]), y)          y                                 what was written is what is there
where(inside, x, y)[a:b]               x[a:b]                            what was written is what is read
(y + pad(v))[a:b]                      y[a:b] + v                        so are the steps of a chain of writes
where(elsewhere, x, y)[a:b]            y[a:b]
where(inside, x, where(inside, y, z))  where(inside, x, z)               what was written over is not there
where(rows, where(inside, x, y), y)    where(inside, x, y)               a part of a part: y[2:][:, :5] += v
where(inside, pad(x), 0)               pad(x)
pad(pad(x, lo=(0, 2)), lo=(3, 0))      pad(x, lo=(3, 2))
pad(x, hi=(3)) + pad(y, lo=(5))        cat(x + 0, y + 0)                 gradients of slices that part an axis

Without, a chain of such writes asks for y twice at each of them, under other guards each time.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence

import sympy

from ...graph import Value
from ...infer import same_shape, sizes_equal
from ...prims import PRIMS
from ...rewrite import Rules, make, number_of
from ...types import Size, simplify_size
from ..layout import only_ones

MOST_PARTS = 8
"""Slices that part an axis: their gradients are put together."""
MOST_STEPS = 64
"""Operations of a chain of writes that a region is looked for in."""
Side = tuple[Size, Size, int]
"""Of an axis the places before, behind, and between two elements."""


def written(value: Value) -> Value | None:
    """where(inside, pad(f(y[region], v)), y)  ->  where(inside, f(y, pad(v)), y); where f(y[region]) is y[region], y"""
    inside, update, rest = value.args
    if rest.prim == "where" and rest.args[0] == inside:
        return make("where", inside, update, rest.args[2])
    if not _is_mask(inside):
        return None
    if update.prim == "where" and update.args[2] == rest and _is_within(update.args[0], inside):
        return update
    if update.prim != "pad" or not _same_region(inside, update):
        return None
    if number_of(rest) == 0 and not _is_negative(number_of(rest)):
        return update
    whole = _Whole(update)
    if not whole.reads(update.args[0]):
        return None
    made = whole.of(update.args[0])
    return rest if made == rest else make("where", inside, made, rest)


def read_back(value: Value) -> Value | None:
    """where(inside, x, y)[region]  ->  x[region]   where the region is what is inside; y[region] where none of it is"""
    (source,) = value.args
    if any(step != 1 for step in value.params["step"]):  # what lies between is read as well: no part is less than all
        inside = source.args[0] if source.prim == "where" else None
        is_whole = inside is not None and _is_mask(inside) and _is_slice_at(value, inside)
        return make("slice", source.args[1], **value.params) if is_whole else None
    part = _Part(value)
    return part.of(source) if part.reads(source) else None


def pads(value: Value) -> Value | None:
    """One pad of two; places between are made once for each axis."""
    (source,) = value.args
    if source.prim != "pad":
        return None
    axes = [_both(*sides) for sides in zip(_sides(source), _sides(value), strict=True)]
    if None in axes:
        return None
    lo, hi, inner = zip(*(a for a in axes if a is not None), strict=True)
    return make("pad", *source.args, lo=lo, hi=hi, inner=inner)


def parts_added(value: Value) -> Value | None:
    """pad(x, hi=(3)) + pad(y, lo=(5))  ->  cat(x + 0, y + 0)   where they part an axis; -0.0 + 0.0 is 0.0"""
    pads = _pads_added(value)
    if not 1 < len(pads) <= MOST_PARTS or not all(map(_is_part, pads)):
        return None
    axes = {a for p in pads for a, side in enumerate(_sides(p)) if side != (0, 0, 0)}
    if len(axes) != 1 or (ordered := _end_to_end(pads, axis := axes.pop())) is None:
        return None
    parts = [p.args[0] for p in ordered]
    zeros = [make("full", value=0.0 if p.aval.is_float else 0, shape=p.shape, dtype=p.dtype) for p in parts]
    return make("cat", *(make("add", p, zero) for p, zero in zip(parts, zeros, strict=True)), axis=axis)


def _pads_added(value: Value) -> list[Value]:
    """What a sum is of, as far as that are pads at last; none where it is longer than what is looked for."""
    if value.prim != "add":
        return [value]
    found: list[Value] = []
    waiting = [value]
    while waiting and len(found) <= MOST_PARTS and len(waiting) <= MOST_PARTS:
        term = waiting.pop()
        if term.prim == "add":
            waiting += term.args
        elif term.prim != "pad":
            return []
        else:
            found.append(term)
    return found if not waiting else []


def _is_part(pad: Value) -> bool:
    return not any(pad.params["inner"]) and pad.dtype != "b1"


def _end_to_end(pads: Sequence[Value], axis: int) -> list[Value] | None:
    """The pads in the order of their places, each of which begins where the one before ends; None with gaps."""
    ordered, end = list[Value](), sympy.Integer(0)
    rest = list(pads)
    while rest:
        after = next((p for p in rest if sizes_equal(p.params["lo"][axis], simplify_size(end))), None)
        if after is None:
            return None
        rest.remove(after)
        ordered.append(after)
        end = sympy.sympify(end) + after.args[0].shape[axis]
    return ordered if sizes_equal(ordered[-1].params["hi"][axis], 0) else None


def _is_negative(number: object) -> bool:
    return isinstance(number, float) and math.copysign(1.0, number) < 0


def _sides(pad: Value) -> Iterator[Side]:
    return zip(pad.params["lo"], pad.params["hi"], pad.params["inner"], strict=True)


def _both(first: Side, second: Side) -> Side | None:
    if second == (0, 0, 0):
        return first
    if first == (0, 0, 0):
        return second
    return None if second[2] else (first[0] + second[0], first[1] + second[1], first[2])


regions: Rules = {"where": (written,), "slice": (read_back,), "pad": (pads,), "add": (parts_added,)}


class _Remade:
    """Values of one shape made again in another, element by element, each of them once.

    most: values that are looked at; what is deeper is taken as it is.
    """

    most = sys.maxsize

    def __init__(self) -> None:
        self._reads: dict[int, bool] = {}
        self._made: dict[int, Value] = {}

    def reads(self, value: Value) -> bool:
        """True if a value is known in the other shape, or made, element by element, of what is."""
        if value.id not in self._reads:
            self._reads[value.id] = False
            if len(self._reads) <= self.most:
                self._reads[value.id] = self.is_known(value) or any(map(self.reads, self.parts(value)))
        return self._reads[value.id]

    def of(self, value: Value) -> Value:
        if value.id not in self._made:
            self._made[value.id] = self.again(value)
        return self._made[value.id]

    def is_known(self, value: Value) -> bool:
        raise NotImplementedError

    def parts(self, value: Value) -> Sequence[Value]:
        """What a value is made of element by element; nothing where it is not."""
        raise NotImplementedError

    def again(self, value: Value) -> Value:
        raise NotImplementedError


class _Whole(_Remade):
    """Values of a region as values of the whole tensor, which are the same within the region."""

    def __init__(self, pad: Value) -> None:
        super().__init__()
        self.pad = pad

    def is_known(self, value: Value) -> bool:
        is_part = value.prim == "slice" and same_shape(value.args[0].shape, self.pad.shape)
        return is_part and _is_slice_at(value, self.pad)

    def parts(self, value: Value) -> Sequence[Value]:
        made = _below_reshape(value)
        is_made = PRIMS[made.prim].family == "elementwise" and made.aval.is_float
        return _reshaped(made.args, value) if is_made else ()

    def again(self, value: Value) -> Value:
        if self.is_known(value):
            return value.args[0]
        if self.reads(value):
            made = _below_reshape(value)
            return make(made.prim, *map(self.of, _reshaped(made.args, value)), **made.params)
        if (number := number_of(value)) is not None:
            return make("full", value=number, shape=self.pad.shape, dtype=value.dtype)
        return make("pad", value, **self.pad.params)


class _Part(_Remade):
    """Values of a whole tensor as values of the region that a slice is of: what was written there, or beside it."""

    most = MOST_STEPS

    def __init__(self, part: Value) -> None:
        super().__init__()
        self.part = part

    def is_known(self, value: Value) -> bool:
        return self._written(value) is not None

    def parts(self, value: Value) -> Sequence[Value]:
        is_made = PRIMS[value.prim].family == "elementwise" and value.prim != "check_index"
        return value.args if is_made else ()

    def again(self, value: Value) -> Value:
        if not self.reads(value):
            return make("slice", value, **self.part.params)
        written = self._written(value)
        if written is not None:
            return self.of(written) if same_shape(written.shape, value.shape) else written
        return make(value.prim, *map(self.of, value.args), **value.params)

    def _written(self, value: Value) -> Value | None:
        """What is there instead of a choice by region, or of a pad."""
        if value.prim == "where" and _is_mask(value.args[0]):
            inside, update, rest = value.args
            return update if _is_slice_at(self.part, inside) else rest if self._is_beside(inside) else None
        if value.prim != "pad":
            return None
        if _is_slice_at(self.part, value):
            return value.args[0]
        nothing = False if value.dtype == "b1" else 0.0 if value.aval.is_float else 0
        full = {"value": nothing, "shape": self.part.shape, "dtype": value.dtype}
        return make("full", **full) if self._is_beside(value) else None

    def _is_beside(self, pad: Value) -> bool:
        """True if the region has no place that a pad leaves its operand."""
        sides = zip(self.part.params["start"], self.part.params["stop"], pad.params["lo"], pad.params["hi"], pad.shape,
                    strict=True)  # fmt: skip
        return any(_at_least(lo, stop) or _at_least(start, n - hi) for start, stop, lo, hi, n in sides)


def _below_reshape(value: Value) -> Value:
    """What has axes of size 1 elsewhere: y[:, 0] += v is a column whose sum is a vector."""
    moves = value.prim == "reshape" and only_ones(value.args[0].shape, value.shape)
    return value.args[0] if moves else value


def _reshaped(args: Sequence[Value], value: Value) -> list[Value]:
    return [a if same_shape(a.shape, value.shape) else make("reshape", a, shape=value.shape) for a in args]


def _is_mask(value: Value) -> bool:
    """True within a region."""
    return value.prim == "pad" and value.dtype == "b1" and number_of(value.args[0]) == 1


def _is_within(part: Value, whole: Value) -> bool:
    """True if a mask is one of a part of another's region, which has no gaps."""
    if not _is_mask(part) or any(whole.params["inner"]):
        return False
    sides = zip(_sides(part), _sides(whole), strict=True)
    return all(_at_least(a[0], b[0]) and _at_least(a[1], b[1]) for a, b in sides)


def _at_least(a: Size, b: Size) -> bool:
    rest = simplify_size(sympy.sympify(a) - b)
    return isinstance(rest, int) and rest >= 0


def _same_region(a: Value, b: Value) -> bool:
    """True if two pads leave their operands the same places."""
    alike = all(sizes_equal(x[0], y[0]) and x[2] == y[2] for x, y in zip(_sides(a), _sides(b), strict=True))
    return alike and same_shape(a.args[0].shape, b.args[0].shape)


def _is_slice_at(part: Value, pad: Value) -> bool:
    """True if a slice is of the places that a pad leaves its operand."""
    starts, steps = part.params["start"], part.params["step"]
    begins = all(
        sizes_equal(start, lo) and (step == inner + 1 or sizes_equal(n, 1))
        for start, step, (lo, _, inner), n in zip(starts, steps, _sides(pad), part.shape, strict=True)
    )
    return begins and same_shape(part.shape, pad.args[0].shape)
