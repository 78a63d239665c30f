"""Layout in normal form: one layout node between two computations, and every computation on its smallest shape.

permute o permute, reshape o reshape, broadcast o broadcast, slice o slice, flip o flip     one node
unsqueeze, squeeze, permutes that move only axes of size 1                                  a reshape
reshapes of permuted axes that stay neighbours                                              a permute of a reshape
exp(broadcast(x)) * broadcast(y)                                                            broadcast(exp(x) * y)
sum(permute(x)), sum(reshape(x)), sum(sum(x)), flip(cumsum(flip(x)))                         one sum of x
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import sympy

from ..graph import Value
from ..infer import drop_axes, is_at_most, same_shape, sizes_equal
from ..prims import PRIMS
from ..rewrite import Rules, make, number_of
from ..types import LOW_FLOATS, Size, product, simplify_size

Axes = tuple[int, ...]
Shape = Sequence[Size]


# --------------------------------------------------------------------------------------------------------- shapes
def wide(shape: Shape) -> list[int]:
    """The axes that are not of size 1."""
    return [i for i, size in enumerate(shape) if size != 1]


def only_ones(shape: Shape, target: Shape) -> bool:
    """The shapes differ in axes of size 1 only."""
    return same_shape([shape[i] for i in wide(shape)], [target[i] for i in wide(target)])


def segments(source: Shape, target: Shape) -> list[tuple[list[int], list[int]]]:
    """The finest runs of axes of two shapes that hold the same elements.

    [B, S, 6] and [B*S, 2, 3]  ->  [([0, 1], [0]), ([2], [1, 2])]
    """
    return [(list(own), list(others)) for own, others in _segments(tuple(source), tuple(target))]


@functools.lru_cache(maxsize=1 << 12)
def _segments(source: tuple[Size, ...], target: tuple[Size, ...]) -> list[tuple[list[int], list[int]]]:
    runs: list[tuple[list[int], list[int]]] = []
    left, right = list(range(len(source))), list(range(len(target)))
    while left and right:
        # a run grows on the side that holds fewer elements, until both sides hold the same
        run: tuple[list[int], list[int]] = ([left.pop(0)], [right.pop(0)])
        while not sizes_equal(*(sizes := (product(source[i] for i in run[0]), product(target[i] for i in run[1])))):
            side = 0 if _divides(*sizes) or _is_reached(run[0], left, sizes[1], source) else 1
            if not (left, right)[side]:
                side = 1 - side
            if not (left, right)[side]:
                return [(list(range(len(source))), list(range(len(target))))]  # not provably equal: one run of all
            run[side].append((left, right)[side].pop(0))
        runs.append(run)
    return _with_rest(runs, left, right)


def _with_rest(
    runs: list[tuple[list[int], list[int]]], left: list[int], right: list[int]
) -> list[tuple[list[int], list[int]]]:
    """Trailing axes of size 1 join the last run."""
    if not (left or right):
        return runs
    if not runs:
        return [(left, right)]
    return [*runs[:-1], (runs[-1][0] + left, runs[-1][1] + right)]


def _is_reached(run: Sequence[int], following: Sequence[int], size: Size, shape: Shape) -> bool:
    """A run with some of the axes that follow holds so many elements: [S, H/S] and [H]."""
    totals = (product(shape[i] for i in (*run, *following[: at + 1])) for at in range(len(following)))
    return not isinstance(size, int) and any(sizes_equal(total, size) for total in totals)


def _divides(small: Size, large: Size) -> bool:
    """`large` is provably a multiple of `small`."""
    if isinstance(small, int) and isinstance(large, int):
        return small < large
    quotient = sympy.cancel(sympy.sympify(large) / small)
    return bool(quotient.as_numer_denom()[1] == 1)


# ------------------------------------------------------------------------------------------------- one layout node
def _of_shape(full: Value, shape: Shape) -> Value:
    """The same constant in another shape."""
    return make("full", **(full.params | {"shape": tuple(shape)}))


def reshape(value: Value) -> Value | None:
    """reshape(reshape(x)) -> reshape(x); reshape(x) to its own shape -> x; reshape(broadcast(x)) -> broadcast(x); or a
    permute of a reshape"""
    (x,) = value.args
    if same_shape(x.shape, value.shape):
        return x
    if x.prim == "reshape":
        return make("reshape", x.args[0], shape=value.shape)
    if x.prim == "full":
        return _of_shape(x, value.shape)
    if x.prim == "broadcast" and only_ones(x.shape, value.shape):
        return _rebroadcast(x, value.shape)
    # what a reshape has parted before stays parted: products tell their axes by it
    if x.prim == "permute" and x.args[0].prim != "reshape" and not only_ones(x.shape, value.shape):
        return _of_neighbours(x.args[0], x.params["perm"], value.shape)
    return None


def _of_neighbours(source: Value, perm: Axes, shape: tuple[Size, ...]) -> Value | None:
    """reshape(permute(x [B, N, D] to [D, B, N]), [D, B*N]) -> permute(reshape(x, [B*N, D])): axes that are joined, or
    parted, are neighbours in x as well, so that no element moves."""
    runs = segments([source.shape[a] for a in perm], shape)
    own = [([a for i in axes if source.shape[a := perm[i]] != 1], places) for axes, places in runs]
    own.sort(key=lambda run: run[0] or [source.ndim])
    if [a for axes, _ in own for a in axes] != wide(source.shape):
        return None
    places = [p for _, places in own for p in places]
    inner = make("reshape", source, shape=tuple(shape[p] for p in places))
    return make("permute", inner, perm=tuple(places.index(p) for p in range(len(shape))))


def _rebroadcast(x: Value, shape: tuple[Size, ...]) -> Value:
    """Axes of size 1 come and go around a broadcast."""
    source = squeezed(x.args[0])
    axes = [a for a, size in zip(x.params["axes"], x.args[0].shape, strict=True) if size != 1]
    moved = dict(zip(wide(x.shape), wide(shape), strict=True))
    return make("broadcast", source, shape=shape, axes=tuple(moved[a] for a in axes))


def squeezed(x: Value) -> Value:
    """x without its axes of size 1."""
    return make("reshape", x, shape=tuple(x.shape[i] for i in wide(x.shape)))


def permute(value: Value) -> Value | None:
    """permute(permute(x)) -> permute(x); permute(broadcast(x)) -> broadcast(permute(x)); or a reshape, or x itself"""
    (x,) = value.args
    perm = value.params["perm"]
    if perm == tuple(range(x.ndim)):
        return x
    if [i for i in perm if x.shape[i] != 1] == wide(x.shape):
        return make("reshape", x, shape=value.shape)
    if x.prim == "permute":
        return make("permute", x.args[0], perm=tuple(x.params["perm"][i] for i in perm))
    if x.prim == "full":
        return _of_shape(x, value.shape)
    if x.prim == "broadcast":
        return _permuted_broadcast(x, value)
    return None


def _permuted_broadcast(x: Value, value: Value) -> Value:
    goes_to = {axis: position for position, axis in enumerate(value.params["perm"])}
    places = [goes_to[a] for a in x.params["axes"]]
    order = sorted(range(len(places)), key=places.__getitem__)
    source = make("permute", x.args[0], perm=tuple(order))
    return make("broadcast", source, shape=value.shape, axes=tuple(sorted(places)))


def broadcast(value: Value) -> Value | None:
    """broadcast(broadcast(x)) -> broadcast(x); unsqueeze -> reshape; the source loses its axes of size 1"""
    (x,) = value.args
    axes, shape = value.params["axes"], value.shape
    if x.prim == "full":
        return _of_shape(x, shape)
    if x.prim == "broadcast":
        return make("broadcast", x.args[0], shape=shape, axes=tuple(axes[a] for a in x.params["axes"]))
    if only_ones(x.shape, shape):
        return make("reshape", x, shape=shape)
    if 1 in x.shape:
        wide_axes = tuple(a for a, size in zip(axes, x.shape, strict=True) if size != 1)
        return make("broadcast", squeezed(x), shape=shape, axes=wide_axes)
    return None


def slice_(value: Value) -> Value | None:
    """slice of a slice, of a broadcast, of a constant, within a piece; the slice that takes everything -> x"""
    (x,) = value.args
    start, stop, step = (value.params[k] for k in ("start", "stop", "step"))
    if all(a == 0 and sizes_equal(b, n) and s == 1 for a, b, s, n in zip(start, stop, step, x.shape, strict=True)):
        return x
    if x.prim == "full":
        return _of_shape(x, value.shape)
    if x.prim == "slice" and all(s == 1 for s in x.params["step"]):
        base = x.params["start"]
        moved = (tuple(simplify_size(a + b) for a, b in zip(base, at, strict=True)) for at in (start, stop))
        return make("slice", x.args[0], **dict(zip(("start", "stop"), moved, strict=True)), step=step)
    rule = sliced.get(x.prim)
    return rule(x, value) if rule is not None else None


def _sliced_broadcast(x: Value, value: Value) -> Value | None:
    axes, source = x.params["axes"], x.args[0]
    if 1 in source.shape:
        return None
    bounds = {k: tuple(value.params[k][a] for a in axes) for k in ("start", "stop", "step")}
    return make("broadcast", make("slice", source, **bounds), shape=value.shape, axes=axes)


def _sliced_reshape(x: Value, value: Value) -> Value | None:
    """slice(reshape(slice(x))) -> reshape(slice(x)), where axes of size 1 come and go between them"""
    (source,) = x.args
    if source.prim != "slice" or not only_ones(source.shape, x.shape) or 0 in value.shape:
        return None
    bounds = {"start": [0] * source.ndim, "stop": list(source.shape), "step": [1] * source.ndim}
    for own, axis in zip(wide(source.shape), wide(x.shape), strict=True):
        for k, places in bounds.items():
            places[own] = value.params[k][axis]
    taken = make("slice", source, **{k: tuple(places) for k, places in bounds.items()})
    return make("reshape", taken, shape=value.shape)


def _sliced_cat(x: Value, value: Value) -> Value | None:
    """slice(cat(x, y)) -> slice(x), where it takes nothing of the other"""
    axis, first = x.params["axis"], simplify_size(0)
    start, stop = (value.params[k][axis] for k in ("start", "stop"))
    for piece in x.args if not sizes_equal(start, stop) else ():
        end = _multiplied_out(first + piece.shape[axis])
        if is_at_most(first, start) and is_at_most(stop, end):
            places = {"start": _multiplied_out(start - first), "stop": _multiplied_out(stop - first)}
            own = {k: (*value.params[k][:axis], at, *value.params[k][axis + 1 :]) for k, at in places.items()}
            return make("slice", piece, **own, step=value.params["step"])
        first = end
    return None


def _multiplied_out(size: Size) -> Size:
    return size if isinstance(size, int) else simplify_size(sympy.expand(size))


def _sliced_permute(x: Value, value: Value) -> Value | None:
    """slice(permute(cat(x, y))) -> permute(slice(x)), where it takes nothing of the other"""
    (source,), perm = x.args, x.params["perm"]
    if source.prim != "cat":
        return None
    bounds = {k: tuple(value.params[k][perm.index(a)] for a in range(x.ndim)) for k in ("start", "stop", "step")}
    taken = make("slice", source, **bounds)
    return None if taken.prim == "slice" and taken.args[0] == source else make("permute", taken, perm=perm)


sliced: dict[str, Callable[[Value, Value], Value | None]] = {
    "broadcast": _sliced_broadcast, "reshape": _sliced_reshape, "cat": _sliced_cat, "permute": _sliced_permute,
}  # fmt: skip


def flip(value: Value) -> Value | None:
    """flip(flip(x, a), b) -> flip(x, a xor b); axes of size 1 stay as they are"""
    (x,) = value.args
    axes = tuple(a for a in value.params["axes"] if x.shape[a] != 1)
    if not axes or x.prim == "full":
        return x
    if x.prim == "flip":
        return make("flip", x.args[0], axes=tuple(sorted(set(axes) ^ set(x.params["axes"]))))
    return make("flip", x, axes=axes) if axes != value.params["axes"] else None


def cumsum(value: Value) -> Value | None:
    """cumsum(flip(x)) -> flip(cumsum(x) from the other end)"""
    (x,) = value.args
    if x.prim != "flip":
        return None
    axis, axes = value.params["axis"], x.params["axes"]
    reverse = value.params["reverse"] != (axis in axes)
    return make("flip", make("cumsum", x.args[0], axis=axis, reverse=reverse), axes=axes)


def pad(value: Value) -> Value | None:
    """pad by nothing -> x; pad(full(0)) -> full(0)"""
    (x,) = value.args
    if all(p == 0 for k in ("lo", "hi", "inner") for p in value.params[k]):
        return x
    if x.prim == "full" and repr(number_of(x)) in ("0", "0.0", "False"):
        return _of_shape(x, value.shape)
    return None


def iota(value: Value) -> Value | None:
    """iota(1) -> full(0)"""
    return make("full", value=0, shape=(1,), dtype=value.dtype) if value.params["size"] == 1 else None


def cat(value: Value) -> Value | None:
    """cat(x) -> x; cat(cat(x, y), z) -> cat(x, y, z); pieces without elements go; equal constants join"""
    axis = value.params["axis"]
    pieces = [p for p in value.args if p.shape[axis] != 0] or [value.args[0]]
    flat = [q for p in pieces for q in (p.args if p.prim == "cat" and p.params["axis"] == axis else (p,))]
    if len(flat) == 1:
        return flat[0]
    if all(p.prim == "full" and _same_number(p, flat[0]) for p in flat):
        return _of_shape(flat[0], value.shape)
    return make("cat", *flat, axis=axis) if tuple(flat) != value.args else None


def _same_number(a: Value, b: Value) -> bool:
    return repr(a.params["value"]) == repr(b.params["value"])


# ------------------------------------------------------------------------------------ computing on the small shape
def hoist(value: Value) -> Value | None:
    """Push a broadcast past an elementwise op, so that the op runs on the small shape.

    mul(broadcast(x, shape, axes), full(2, shape))  ->  broadcast(mul(x, full(2)), shape, axes)
    """
    sources = [_spread(a) for a in value.args]
    if not value.args or all(a.prim == "full" for a in value.args) or any(s is None for s in sources):
        return None
    filled = sorted({a for s in sources if s is not None for a in s})
    if len(filled) == value.ndim:
        return None
    shape = tuple(value.shape[a] for a in filled)
    small = [_on(a, axes, filled, shape) for a, axes in zip(value.args, sources, strict=True) if axes is not None]
    return make("broadcast", make(value.prim, *small, **value.params), shape=value.shape, axes=tuple(filled))


def _spread(x: Value) -> Axes | None:
    """The axes of x that a broadcast or an unsqueeze (a reshape) has filled from its source; None for anything else."""
    if x.prim == "full":
        return ()
    if x.prim == "broadcast":
        return tuple(a for a, n in zip(x.params["axes"], x.args[0].shape, strict=True) if n != 1)
    if x.prim == "reshape" and only_ones(x.args[0].shape, x.shape):
        return tuple(wide(x.shape))
    return None


def _on(x: Value, axes: Axes, filled: Sequence[int], shape: tuple[Size, ...]) -> Value:
    """The source of x, brought to the small shape over the axes `kept`."""
    if x.prim == "full":
        return _of_shape(x, shape)
    return make("broadcast", squeezed(x.args[0]), shape=shape, axes=tuple(filled.index(a) for a in axes))


def without_axes(x: Value, gone: Axes) -> Value | None:
    """A value that is the same along these axes, without them; None where it need not be."""
    filled = _spread(x)
    if filled is None or set(filled) & set(gone):
        return None
    kept = [a for a in range(x.ndim) if a not in gone]
    return _on(x, filled, kept, tuple(x.shape[a] for a in kept))


# ------------------------------------------------------------------------------------------------------ reductions
def reduced(value: Value) -> Value | None:
    """A reduction over nothing, over axes of size 1, of a reduction, of a permuted, reshaped or broadcast value."""
    (x,) = value.args
    axes: Axes = value.params["axes"]
    if all(x.shape[a] == 1 for a in axes):
        return _from_zero(make("reshape", x, shape=value.shape), value.prim)
    rule = of_layout.get(x.prim)
    return rule(value, x, axes) if rule is not None else None


def _from_zero(x: Value, prim: str) -> Value:
    """A sum begins at 0.0, which -0.0 does not survive: the sum of a single -0.0 is 0.0."""
    if prim != "sum" or not x.aval.is_float:
        return x
    return make("add", x, make("full", value=0.0, shape=x.shape, dtype=x.dtype))


def _of_reduction(value: Value, x: Value, axes: Axes) -> Value | None:
    """sum(sum(x, 1), 0) -> sum(x, (0, 1)); a low float sum rounds in between, and stays"""
    if x.prim != value.prim or (x.prim in ("sum", "prod") and x.dtype in LOW_FLOATS):
        return None
    source = x.args[0]
    remaining = [a for a in range(source.ndim) if a not in x.params["axes"]]
    both = tuple(sorted({*x.params["axes"], *(remaining[a] for a in axes)}))
    return make(value.prim, source, axes=both)


def _of_permute(value: Value, x: Value, axes: Axes) -> Value:
    """sum(permute(x, p), axes) -> permute(sum(x, p[axes]))"""
    perm = x.params["perm"]
    gone = tuple(sorted(perm[a] for a in axes))
    small = make(value.prim, x.args[0], axes=gone)
    rank = {a: i for i, a in enumerate(a for a in range(x.ndim) if a not in gone)}
    return make("permute", small, perm=tuple(rank[perm[a]] for a in range(x.ndim) if a not in axes))


def _of_reshape(value: Value, x: Value, axes: Axes) -> Value | None:
    """sum(reshape(x, [B*S, N]), 0) -> sum(x [B, S, N], (0, 1)): where the axes are whole runs of axes of x"""
    source = x.args[0]
    gone: list[int] = []
    for source_axes, axes_of_x in segments(source.shape, x.shape):
        inside = {a in axes for a in axes_of_x if x.shape[a] != 1}
        if len(inside) == 2:
            return None
        gone += source_axes if True in inside else []
    small = make(value.prim, source, axes=tuple(sorted(gone)))
    return make("reshape", small, shape=drop_axes(x.shape, axes))


def _of_broadcast(value: Value, x: Value, axes: Axes) -> Value | None:
    """sum(broadcast(x), the new axes) -> x * count in float32 and wider; amax(broadcast(x)) -> broadcast(amax(x))"""
    filled = {a: i for i, a in enumerate(x.params["axes"]) if x.args[0].shape[i] != 1}
    spread = [x.shape[a] for a in axes if a not in filled]
    if not spread or not all(_positive(n) for n in spread):
        return None
    if value.prim == "prod" or (value.prim == "sum" and value.dtype in (*LOW_FLOATS, "b1")):
        return None
    source = squeezed(x.args[0])
    inner = tuple(sorted(_rank(filled, a) for a in axes if a in filled))
    small = make(value.prim, source, axes=inner)
    if value.prim == "sum":
        count = make("full", value=product(spread), shape=small.shape, dtype=small.dtype)
        small = _from_zero(make("mul", small, count), "sum")
    place = {a: i for i, a in enumerate(a for a in range(x.ndim) if a not in axes)}
    return make("broadcast", small, shape=value.shape, axes=tuple(place[a] for a in filled if a not in axes))


def _rank(filled: dict[int, int], axis: int) -> int:
    return sorted(filled).index(axis)


def _positive(size: Size) -> bool:
    return size > 0 if isinstance(size, int) else bool(size.is_positive)


def _of_full(value: Value, x: Value, axes: Axes) -> Value | None:
    """sum(full(0)) -> full(0); amax(full(c)) -> full(c)"""
    zero = repr(number_of(x)) in ("0", "0.0", "False")
    constant = zero if value.prim == "sum" else value.prim in ("amax", "amin") and all(map(_positive, x.shape))
    return _of_shape(x, value.shape) if constant else None


of_layout: dict[str, Callable[[Value, Value, Axes], Value | None]] = {
    **dict.fromkeys(("sum", "prod", "amax", "amin"), _of_reduction),
    "permute": _of_permute,
    "reshape": _of_reshape,
    "broadcast": _of_broadcast,
    "full": _of_full,
}

layout: Rules = {
    "reshape": (reshape,),
    "permute": (permute,),
    "broadcast": (broadcast,),
    "slice": (slice_,),
    "flip": (flip,),
    "cumsum": (cumsum,),
    "pad": (pad,),
    "cat": (cat,),
    "iota": (iota,),
    **{prim: (reduced,) for prim in ("sum", "prod", "amax", "amin")},
    **{p.name: (hoist,) for p in PRIMS.values() if p.family == "elementwise"},
}
