"""A broadcast product that is summed is a matrix product: the product of three or more axes is never formed.

    sum(mul(broadcast(g [B, O]), broadcast(w [O, I])) [B, O, I], 1)  ->  dot(g, w, labels bo,oi->bi)

Applied where each operand has an axis that the other lacks. sum(x * y) over equal shapes and sum(x [M, N] * w [N]) are
bound by memory, and stay fused reductions. In low floats eager rounds the product before adding it; here it is not.

In a step of a loop such a product of a matrix and a vector is a sum, if the matrix is carried, or another one in each
step: a call would read from memory what the loop has at hand. A matrix that all steps multiply with is one product
over all of them.

    dot(q [B, K], s [B, K, V], labels bk,bkv->bv)  ->  sum(mul(broadcast(q), s), 1)

So is one of a matrix that a kernel makes or reads anyway: it is summed on the way, and not read again. But for batches
of two in a row, with different matrices: attention of one query, of which streams make one kernel.

A product of matrices that sums along nothing is an elementwise one, and one of two with the same axes is a sum.

    dot(x [N, K], y [N, K], labels nk,nk->n)  ->  sum(mul(x, y), 1)

Products of small matrices, of which there are many, are written out: rotations, covariances, transforms.

    dot(r [N, 3, 3], s [N, 3, 3], labels nik,nkj->nij)  ->  r[:, :, 0] * s[:, 0] + r[:, :, 1] * s[:, 1] + ..

After `Simplify`, which leaves one layout node between factors and their product; before `Fuse`, to which a `dot` is a
call, no member of a group.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, cast

from ..graph import Graph, Value
from ..infer import same_shape, sizes_equal
from ..loops.loop import below, loop_of, rebuild_scans
from ..loops.tidy import in_bodies
from ..prims import PRIMS
from ..rewrite import make, rebuild
from ..types import FLOATS, LOW_FLOATS, Size, product
from .layout import only_ones, segments, squeezed, wide
from .node_kinds import VIEWS
from .simplify import HOLDERS

MOST_FACTORS = 8
SMALL = 8
"""The longest side of a small matrix: what its product reads again is found in L1, faster than memory brings others."""
IN_KERNELS = ("elementwise", "reduce")
"""Families of what reads a value element by element."""


@dataclass(frozen=True)
class Contract:
    """Graph -> an equal graph where sums of outer products are `dot`.

    in_loop: of the body of a loop, where one program multiplies with what it carries, small matrices as well.
    """

    in_loop: bool = False

    def __call__(self, graph: Graph) -> Graph:
        bodies = Contract(in_loop=True)
        graph = _without_outer_products(rebuild_scans(in_bodies(graph, bodies), _with_lone_sums))
        graph = _with_sums_of_alike(_with_sums_of_made(graph))
        graph = graph if self.in_loop else _with_small_products(graph)
        contractions = {v: c for v in graph.order() if (c := contraction(v)) is not None}
        if not self.in_loop:
            contractions = {v: c for v, c in contractions.items() if not c.is_of_small}
        selected = _not_needed_otherwise(graph, contractions)
        return rebuild(graph, {}, {v.id: c.build for v, c in selected.items()}) if selected else graph


def _without_outer_products(graph: Graph) -> Graph:
    """dot(x, y, labels bi,bj->bij)  ->  mul(broadcast(x), broadcast(y)): a product that sums along nothing"""
    sums_nothing = any(v.prim == "dot" and _sums_nothing(v) for v in graph.order())
    return rebuild(graph, {"dot": (_outer_product,)}) if sums_nothing else graph


def _sums_nothing(dot: Value) -> bool:
    out, pairs = dot.params["out_axes"], zip(dot.args, _axes_of_operands(dot), strict=True)
    summed = [n for x, axes in pairs for n, a in zip(x.shape, axes, strict=True) if a not in out]
    return all(n == 1 for n in summed) and {a.dtype for a in dot.args} == {dot.dtype}


def _axes_of_operands(dot: Value) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return dot.params["x_axes"], dot.params["y_axes"]


def _outer_product(dot: Value) -> Value | None:
    if not _sums_nothing(dot):
        return None
    out = dot.params["out_axes"]
    kept = [tuple(a for a in axes if a in out) for axes in _axes_of_operands(dot)]
    sides = zip(dot.args, _axes_of_operands(dot), kept, strict=True)
    lean = [_without_ones(x, [n for n, a in zip(x.shape, axes, strict=True) if a in own]) for x, axes, own in sides]
    sizes = dict(zip(out, dot.shape, strict=True))
    if not all(same_shape(x.shape, [sizes[a] for a in own]) for x, own in zip(lean, kept, strict=True)):
        return None  # s0 * s1 and s2 * s3 are equal by a guard: elementwise operations do not know it
    return make("mul", *(_spread(x, own, out, dot.shape) for x, own in zip(lean, kept, strict=True)))


def _without_ones(value: Value, shape: Sequence[Size]) -> Value:
    return value if len(shape) == value.ndim else make("reshape", value, shape=tuple(shape))


class Factor(NamedTuple):
    """An operand of the product: axis i of `value` is axis `labels[i]` of what is summed; None where its size is 1."""

    value: Value
    labels: tuple[int | None, ...]

    @property
    def axes(self) -> set[int]:
        return {a for a in self.labels if a is not None}


@dataclass(frozen=True)
class Contraction:
    """A sum as the product of two operands, each the product of factors. `inside`: nodes that it needs no more."""

    sum: Value
    left: tuple[Factor, ...]
    right: tuple[Factor, ...]
    inside: frozenset[Value]

    @property
    def products(self) -> list[Value]:
        """The nodes inside that are as large as what is summed."""
        everything = wide(self.sum.args[0].shape)
        return [v for v in self.inside if len(wide(v.shape)) == len(everything)]

    @property
    def is_of_small(self) -> bool:
        """The product of small matrices."""
        shape, summed = self.sum.args[0].shape, set(self.sum.params["axes"])
        batch = (_axes(self.left) & _axes(self.right)) - summed
        return _are_small({a: shape[a] for a in wide(shape) if a not in batch}, summed)

    def build(self, env: dict[int, Value]) -> Value:
        # axes that one operand alone has are summed before the product, which is the smaller for it
        summed = set(self.sum.params["axes"])
        x, x_axes = _early_sum(*self._operand(env, self.left), summed - _axes(self.right))
        y, y_axes = _early_sum(*self._operand(env, self.right), summed - _axes(self.left))
        outer = tuple(a for a in wide(self.sum.args[0].shape) if a not in summed)
        if summed & {*x_axes, *y_axes}:  # summed together, or by one in a low float
            result = make("dot", x, y, x_axes=x_axes, y_axes=y_axes, out_axes=outer)
        else:
            shape = tuple(self.sum.args[0].shape[a] for a in outer)
            result = make("mul", _spread(x, x_axes, outer, shape), _spread(y, y_axes, outer, shape))
        return make("reshape", result, shape=self.sum.shape) if result.shape != self.sum.shape else result

    def _operand(self, env: dict[int, Value], factors: Sequence[Factor]) -> tuple[Value, tuple[int, ...]]:
        """The product of some factors, over the axes of the first, which has them all."""
        axes = tuple(a for a in factors[0].labels if a is not None)
        values = [_plain(env[f.value.id], self.sum.dtype) for f in factors]
        total = values[0]
        for factor, value in zip(factors[1:], values[1:], strict=True):
            own = tuple(a for a in factor.labels if a is not None)
            total = make("mul", total, _spread(value, own, axes, total.shape))
        return total, axes


def contraction(value: Value) -> Contraction | None:
    """The sum as a contraction, where it is the sum of a product with outer structure."""
    if value.prim != "sum" or value.dtype not in FLOATS:
        return None
    (x,) = value.args
    inside: set[Value] = set()
    factors = _factors(x, tuple(a if x.shape[a] != 1 else None for a in range(x.ndim)), set(wide(x.shape)), inside)
    operands = _two_operands(factors)
    if operands is None or _axes(factors) != set(wide(x.shape)):
        return None
    return Contraction(value, *operands, frozenset(inside))


def _factors(value: Value, labels: tuple[int | None, ...], everything: set[int], inside: set[Value]) -> list[Factor]:
    """The values that are multiplied, seen through products over all the axes, casts that lose nothing, and layout."""
    if value.prim == "mul" and {a for a in labels if a is not None} == everything:
        inside.add(value)
        return [f for arg in value.args for f in _factors(arg, labels, everything, inside)]
    if value.prim == "cast" and value.args[0].dtype in FLOATS and value.dtype in HOLDERS[value.args[0].dtype]:
        inside.add(value)
        return _factors(value.args[0], labels, everything, inside)
    source = _through(value, labels)
    return [Factor(value, labels)] if source is None else _factors(value.args[0], source, everything, inside)


def _through(value: Value, labels: tuple[int | None, ...]) -> tuple[int | None, ...] | None:
    """The labels of what a layout node moves."""
    if value.prim == "broadcast":
        pairs = zip(value.params["axes"], value.args[0].shape, strict=True)
        return tuple(labels[a] if n != 1 else None for a, n in pairs)
    if value.prim == "permute":
        place = {axis: position for position, axis in enumerate(value.params["perm"])}
        return tuple(labels[place[i]] for i in range(value.ndim))
    if value.prim == "reshape" and only_ones(value.args[0].shape, value.shape):
        labels_left = iter([labels[a] for a in wide(value.shape)])
        return tuple(next(labels_left) if n != 1 else None for n in value.args[0].shape)
    return None


def _two_operands(factors: list[Factor]) -> tuple[tuple[Factor, ...], tuple[Factor, ...]] | None:
    """Two factors that each have an axis of their own and have all the axes of the rest, which joins them."""
    if not 2 <= len(factors) <= MOST_FACTORS:
        return None
    largest = sorted(factors, key=lambda f: -len(f.axes))
    left = largest[0]
    right = next((f for f in largest if f.axes - left.axes), None)
    if right is None or not left.axes - right.axes:
        return None
    remaining = [f for f in factors if f is not left and f is not right]
    if any(not (f.axes <= left.axes or f.axes <= right.axes) for f in remaining):
        return None
    with_left = [f for f in remaining if f.axes <= left.axes]
    return (left, *with_left), (right, *(f for f in remaining if f not in with_left))


def _axes(factors: Iterable[Factor]) -> set[int]:
    return {a for f in factors for a in f.axes}


def _not_needed_otherwise(graph: Graph, contractions: dict[Value, Contraction]) -> dict[Value, Contraction]:
    """Those whose product nothing else needs: otherwise it is formed anyway, and summing it on the way is free."""
    live, results = graph.live(), set(graph.results)
    selected = dict(contractions)
    while True:
        gone = {v for c in selected.values() for v in c.inside} | set(selected)
        unshared = {s: c for s, c in selected.items() if not any(_escapes(v, gone, live, results) for v in c.products)}
        if len(unshared) == len(selected):
            return unshared
        selected = unshared


def _escapes(value: Value, gone: set[Value], live: set[int], results: set[Value]) -> bool:
    return value in results or any(u.id in live and u not in gone for u in value.users)


# ------------------------------------------------------------------ products that are sums
def _with_lone_sums(node: Value, args: list[Value]) -> list[Value] | None:
    """The results of a loop whose products of a matrix that varies with a vector are sums; None where it has none."""
    loop = loop_of(node, args)
    varying = below(loop.body, [*loop.inputs.carries, *loop.inputs.xs])
    lone = [v for v in loop.body.order() if v.prim == "dot" and (large := _matrix(v)) and large.id in varying]
    if not lone:
        return None
    return replace(loop, body=rebuild(loop.body, {}, {v.id: partial(_summed, v) for v in lone})).emit()


def _with_sums_of_made(graph: Graph) -> Graph:
    """Where a matrix that a kernel makes or reads anyway is multiplied with a vector, the kernel sums it on the way."""
    matrices = {v: _base(m) for v in graph.order() if v.prim == "dot" and (m := _matrix(v)) is not None}
    live = graph.live()
    made = [v for v, m in matrices.items() if PRIMS[m.prim].family == "elementwise" or _is_read_by_kernels(m, live)]
    batched = {v: m for v, m in matrices.items() if _is_batched(v)}
    pairs = [(v, w) for v in batched for w in _reached(v, batched)]
    lone = [v for v in made if all(v not in pair for pair in pairs)]
    return rebuild(graph, {}, {v.id: partial(_summed, v) for v in lone}) if lone else graph


def _with_sums_of_alike(graph: Graph) -> Graph:
    """Where neither operand has an axis that the other lacks, each element is read once: no call is faster."""
    alike = [v for v in graph.order() if v.prim == "dot" and v.dtype in FLOATS and _are_alike(v)]
    return rebuild(graph, {}, {v.id: partial(_summed, v) for v in alike}) if alike else graph


def _are_alike(dot: Value) -> bool:
    x, y = _labelled(dot)
    return _is_plain(x, y) and x.axes == y.axes


def _is_plain(x: Factor, y: Factor) -> bool:
    """Neither is read along a diagonal; and their sizes are equal by more than a guard, which a sum would not know."""
    sizes = [dict(zip(f.labels, f.value.shape, strict=True)) for f in (x, y)]
    proved = all(sizes_equal(sizes[0][a], sizes[1][a]) for a in x.axes & y.axes)
    return proved and all(len(f.axes) == len(wide(f.value.shape)) for f in (x, y))


def _with_small_products(graph: Graph) -> Graph:
    """Products of small matrices element by element, so that what is around them is in their kernel."""
    small = [v for v in graph.order() if v.prim == "dot" and v.dtype in FLOATS and _is_of_small(v)]
    return rebuild(graph, {}, {v.id: partial(_written_out, v) for v in small}) if small else graph


def _written_out(value: Value, env: Mapping[int, Value]) -> Value:
    """A product as a sum of elementwise ones; low floats are added in float32, as by a product."""
    x, y, outer, shape = _as_broadcast(value, env)
    places = itertools.product(*(range(cast(int, n)) for n in shape[outer:]))
    terms = (make("mul", *(_at_place(f, place, outer) for f in (x, y))) for place in places)
    return _of_dtype(functools.reduce(partial(make, "add"), terms), value)


def _at_place(value: Value, place: Sequence[int], outer: int) -> Value:
    """The elements at a place along the last dimensions."""
    shape = value.shape[:outer]
    start, stop = (*(0 for _ in shape), *place), (*shape, *(i + 1 for i in place))
    return make("reshape", make("slice", value, start=start, stop=stop, step=(1,) * value.ndim), shape=shape)


def _is_of_small(dot: Value) -> bool:
    sizes = {a: n for f in _labelled(dot) for a, n in zip(f.labels, f.value.shape, strict=True)}
    sides = {a: n for a, n in sizes.items() if a is not None and a not in _batch(dot)}
    return _is_plain(*_labelled(dot)) and _are_small(sides, sides.keys() - set(dot.params["out_axes"]))


def _are_small(sides: Mapping[int, Size], summed: Collection[int]) -> bool:
    """Of the sides of two matrices, without their batch; and what is summed is written out."""
    short = all(isinstance(n, int) and n <= SMALL for n in sides.values())
    return short and product(n for a, n in sides.items() if a in summed) <= SMALL


def _is_read_by_kernels(matrix: Value, live: set[int]) -> bool:
    """Something else than products reads it, element by element."""
    todo = [matrix]
    while todo:
        readers = [u for u in todo.pop().users if u.id in live]
        if any(PRIMS[u.prim].family in IN_KERNELS for u in readers):
            return True
        todo += [u for u in readers if u.prim in VIEWS]
    return False


def _is_batched(dot: Value) -> bool:
    """The vector is another one for each matrix of a batch."""
    return bool(_batch(dot))


def _batch(dot: Value) -> set[int]:
    """The axes of a product that number its pairs of matrices."""
    x, y = (f.axes for f in _labelled(dot))
    return x & y & set(dot.params["out_axes"])


def _reached(dot: Value, matrices: Mapping[Value, Value]) -> set[Value]:
    """Products of what is made of it with another matrix, as attention of one query has with its values."""
    others = {v for v, m in matrices.items() if m != matrices[dot]}
    seen, todo = set[Value](), list(dot.users)
    while todo:
        if (value := todo.pop()) not in seen:
            seen.add(value)
            todo += value.users
    return seen & others


def _base(value: Value) -> Value:
    """The value whose elements these are, in another layout."""
    while value.prim in VIEWS:
        (value,) = value.args
    return value


def _labelled(value: Value) -> list[Factor]:
    """The operands of a product."""
    pairs = zip(value.args, (value.params["x_axes"], value.params["y_axes"]), strict=True)
    return [Factor(x, tuple(a if n != 1 else None for a, n in zip(axes, x.shape, strict=True))) for x, axes in pairs]


def _matrix(value: Value) -> Value | None:
    """The operand that has all axes of a product, where the other one has fewer."""
    x, y = sorted(_labelled(value), key=lambda f: len(f.axes))
    is_summed = not y.axes <= set(value.params["out_axes"])
    return y.value if x.axes < y.axes and is_summed and _is_plain(x, y) else None


def _summed(value: Value, env: Mapping[int, Value]) -> Value:
    """A product as a sum; low floats are added in float32, as by a product."""
    if (unmerged := _sum_of_unmerged(value, env)) is not None:
        return _of_dtype(unmerged, value)
    x, y, outer, shape = _as_broadcast(value, env)
    return _of_dtype(make("sum", make("mul", x, y), axes=tuple(range(outer, len(shape)))), value)


def _sum_of_unmerged(value: Value, env: Mapping[int, Value]) -> Value | None:
    """The sum along what an elementwise matrix was made along, whose rows were merged for the product; None of others.

    reshape(tanh(q[:, None] + k), (n * m, d)) @ w   ->   reshape(sum(tanh(q[:, None] + k) * w), (n * m,))
    """
    vector, matrix = sorted(_labelled(value), key=lambda f: len(f.axes))
    merged, kept = env[matrix.value.id], [a for a in value.params["out_axes"] if a in matrix.axes]
    if merged.prim != "reshape" or PRIMS[merged.args[0].prim].family != "elementwise" or None in matrix.labels:
        return None
    (x,) = merged.args
    runs = segments(x.shape, merged.shape)
    alone = {label for label, (own, _) in zip(matrix.labels, runs, strict=False) if len(own) == 1}
    is_row = all(len(joined) == 1 for _, joined in runs) and len(runs) == len(matrix.labels)
    if not is_row or not {*vector.axes, *matrix.axes - set(kept)} <= alone or alone >= matrix.axes:
        return None
    if [label for label in matrix.labels if label in kept] != kept:
        return None
    places = {label: own for label, (own, _) in zip(matrix.labels, runs, strict=True)}
    wide_dtype = "f32" if value.dtype in LOW_FLOATS else value.dtype
    along = tuple(places[label][0] for label in vector.labels if label is not None)
    if sorted(along) != list(along):
        return None
    small = make("broadcast", _plain(env[vector.value.id], wide_dtype), shape=x.shape, axes=along)
    large = make("cast", x, dtype=wide_dtype) if x.dtype != wide_dtype else x
    summed = tuple(at for label in matrix.labels if label not in kept for at in places[label])
    return make("sum", make("mul", large, small), axes=summed)


def _as_broadcast(value: Value, env: Mapping[int, Value]) -> tuple[Value, Value, int, tuple[Size, ...]]:
    """The operands of a product over all its axes, how many of these are kept, which come first, and the shape."""
    factors = _labelled(value)
    sizes = {a: n for f in factors for a, n in zip(f.labels, f.value.shape, strict=True) if a is not None}
    outer = [a for a in value.params["out_axes"] if a in sizes]
    labels = (*outer, *(a for a in sizes if a not in outer))
    shape, wide_dtype = tuple(sizes[a] for a in labels), "f32" if value.dtype in LOW_FLOATS else value.dtype
    axes = [tuple(a for a in f.labels if a is not None) for f in factors]
    x, y = (_spread(_plain(env[f.value.id], wide_dtype), a, labels, shape) for f, a in zip(factors, axes, strict=True))
    return x, y, len(outer), shape


def _of_dtype(total: Value, value: Value) -> Value:
    """What a product comes to, in its dtype and shape."""
    total = make("cast", total, dtype=value.dtype) if total.dtype != value.dtype else total
    return make("reshape", total, shape=value.shape) if total.shape != value.shape else total


def _plain(value: Value, dtype: str) -> Value:
    """An operand of `dot`: without axes of size 1, in the dtype of the sum."""
    small = squeezed(value) if 1 in value.shape else value
    return make("cast", small, dtype=dtype) if small.dtype != dtype else small


def _early_sum(value: Value, axes: tuple[int, ...], alone: set[int]) -> tuple[Value, tuple[int, ...]]:
    """Axes that are summed and that the other operand lacks go first; a low float sum would round too early."""
    gone = tuple(i for i, a in enumerate(axes) if a in alone)
    if not gone or value.dtype not in ("f32", "f64"):
        return value, axes
    return make("sum", value, axes=gone), tuple(a for a in axes if a not in alone)


def _spread(value: Value, axes: tuple[int, ...], target: tuple[int, ...], shape: tuple[Size, ...]) -> Value:
    """A value over `axes` as one over `target`, in that order."""
    order = sorted(range(len(axes)), key=lambda i: target.index(axes[i]))
    moved = make("permute", value, perm=tuple(order)) if order != list(range(len(axes))) else value
    places = tuple(target.index(axes[i]) for i in order)
    return make("broadcast", moved, shape=shape, axes=places) if len(places) != len(shape) else moved
