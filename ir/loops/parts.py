"""Parts of what a step makes, where one of them need not be done step by step: each is made by itself.

    cat(x[t], h) @ w            ->   x[t] @ w[:n] + h @ w[n:]            the first leaves the loop
    d = g @ w                   ->   d[:, :n] = g @ w[:, :n], ..         so does a part that goes into no other step
    b = b + cat(p, q)           ->   b = cat(b, c), b = b + p, c = c + q   where what is added up is put together
    out1[t], out2[t] = p, p.T   ->   p is given, and turned behind the loop
    out[t] = cat(x[t], h)       ->   h is given, and put together with x behind the loop
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate, combinations, pairwise
from typing import TypeAlias

from ..graph import Graph, Value, building, emit
from ..infer import is_at_most, sizes_equal
from ..prims import PRIMS
from ..rewrite import copy_into, extract, make, nodes_between, rebuild
from ..switches import is_on
from ..transforms.ops import shift_axes
from ..types import Size, simplify_size
from .loop import Loop, below, loop_of, rebuild_scans
from .pieces import cuts, inner, plus

Build: TypeAlias = "Callable[[dict[int, Value]], Value]"


def with_parts(loop: Loop) -> Loop | None:
    """The loop with products in parts, of which some leave it; None where there are none."""
    builds = _sums_in_parts(loop) | _slices_of_products(loop)
    return replace(loop, body=rebuild(loop.body, {}, builds)) if builds else None


# ---------------------------------------------------------------------------------------------- sums in parts
def _sums_in_parts(loop: Loop) -> dict[int, Build]:
    """Products of concatenations of which a piece is known without what is carried."""
    carried = below(loop.body, loop.inputs.carries)
    found: dict[int, Build] = {}
    for dot in _products(loop.body, carried):
        for number, dim in _summed(dot):
            bounds = [0, *cuts(dot.args[number], dim), dot.args[number].shape[dim]]
            runs = _runs(dot.args[number], dim, bounds, carried)
            if len(runs) > 2:
                found[dot.id] = _sum_of_parts(dot, runs)
    return found


def _products(body: Graph, carried: set[int]) -> Iterator[Value]:
    return (v for v in body.order() if v.prim == "dot" and v.id in carried)


def _summed(dot: Value) -> list[tuple[int, int]]:
    """(operand, dim) of the axis that a product sums along, where it is one."""
    x_axes, y_axes, out_axes = (dot.params[p] for p in ("x_axes", "y_axes", "out_axes"))
    labels = set((*x_axes, *y_axes)) - set(out_axes)
    if len(labels) != 1 or not labels <= set(x_axes) & set(y_axes):
        return []
    (label,) = labels
    return [(0, x_axes.index(label)), (1, y_axes.index(label))]


def _runs(value: Value, dim: int, bounds: Sequence[Size], carried: set[int]) -> list[Size]:
    """The places at which pieces that depend on what is carried, and such that do not, meet; and both ends."""
    moving = [_depends(value, dim, a, b, carried) for a, b in pairwise(bounds)]
    meets = [at for at, before, after in zip(bounds[1:-1], moving, moving[1:], strict=False) if before != after]
    return [bounds[0], *meets, bounds[-1]]


def _depends(value: Value, dim: int, start: Size, stop: Size, carried: set[int]) -> bool:
    """True where a piece of a value is made of what is carried."""
    if value.id not in carried:
        return False
    if value.prim == "cat" and value.params["axis"] == dim:
        return any(v.id in carried for v in _between(value, dim, start, stop))
    if value.prim == "permute":
        return _depends(value.args[0], value.params["perm"][dim], start, stop, carried)
    return value.prim != "cast" or _depends(value.args[0], dim, start, stop, carried)


def _between(cat: Value, dim: int, start: Size, stop: Size) -> list[Value]:
    """The pieces of a concatenation from one place to another; all of them where that is not known."""
    ends = [0, *_ends(cat, dim)]
    at = [next((i for i, e in enumerate(ends) if sizes_equal(e, place)), None) for place in (start, stop)]
    return list(cat.args if at[0] is None or at[1] is None else cat.args[at[0] : at[1]])


def _ends(cat: Value, dim: int) -> list[Size]:
    return list(accumulate((x.shape[dim] for x in cat.args), plus))


def _sum_of_parts(dot: Value, bounds: Sequence[Size]) -> Build:
    def build(env: dict[int, Value]) -> Value:
        parts = [_part(dot, env, a, b) for a, b in pairwise(bounds)]
        return reduce(lambda a, b: emit("add", a, b), parts)

    return build


def _part(dot: Value, env: Mapping[int, Value], start: Size, stop: Size) -> Value:
    sides = [piece(env[dot.args[n].id], dim, start, stop) for n, dim in _summed(dot)]
    return emit("dot", *sides, **dot.params)


def piece(value: Value, dim: int, start: Size, stop: Size) -> Value:
    """A slice of a value along one dim, of what it is put together of."""
    if value.prim == "cat" and value.params["axis"] == dim:
        inside = _between(value, dim, start, stop)
        return inside[0] if len(inside) == 1 else _cat_or_slice(value, inside, dim, start, stop)
    if value.prim == "permute":
        (x,), perm = value.args, value.params["perm"]
        return make("permute", piece(x, perm[dim], start, stop), perm=perm)
    if value.prim == "cast" or _ends_within(value, dim):
        return make(value.prim, *(piece(a, dim, start, stop) for a in value.args), **value.params)
    return part_along(value, dim, start, stop)


def _cat_or_slice(value: Value, inside: Sequence[Value], dim: int, start: Size, stop: Size) -> Value:
    is_known = len(inside) < len(value.args)
    return emit("cat", *inside, axis=dim) if is_known else part_along(value, dim, start, stop)


def part_along(value: Value, dim: int, start: Size, stop: Size) -> Value:
    """A slice along one dim."""
    starts = tuple(start if d == dim else 0 for d in range(value.ndim))
    stops = tuple(stop if d == dim else n for d, n in enumerate(value.shape))
    return emit("slice", value, start=starts, stop=stops, step=(1,) * value.ndim)


# ---------------------------------------------------------------------------------------- slices of products
def _slices_of_products(loop: Loop) -> dict[int, Build]:
    """Slices that are no more than a product of which a part goes into no other step: products with slices."""
    count = len(loop.init)
    within = {v.id for v in nodes_between(loop.results[:count], [v.id for v in loop.body.inputs])}
    found: dict[int, Build] = {}
    for dot in (v for v in loop.body.order() if v.prim == "dot" and v.id in within):
        users = list(dict.fromkeys(dot.users))
        dim = _sliced_dim(dot, users)
        if dim is not None and (dot in loop.results or any(u.id not in within for u in users)):
            found |= {u.id: _product_of_slice(dot, u, dim) for u in users}
    return found


def _sliced_dim(dot: Value, users: Sequence[Value]) -> int | None:
    """The dim along which all that reads a product is a slice of it, where they are no more than it is."""
    dim = _dim_of_slices(dot, users)
    if dim is None:
        return None
    bounds = sorted(((u.params["start"][dim], u.params["stop"][dim]) for u in users), key=str)
    return dim if len(set(bounds)) == len(bounds) and _are_apart(bounds) else None


def _dim_of_slices(value: Value, users: Sequence[Value]) -> int | None:
    """The only dim along which slices take a part of a value, if all that reads it is one, of neighbours."""
    if not users or any(u.prim != "slice" or any(s != 1 for s in u.params["step"]) for u in users):
        return None
    dims = {d for u in users for d in range(value.ndim) if not sizes_equal(u.shape[d], value.shape[d])}
    return dims.pop() if len(dims) == 1 else None


def _are_apart(bounds: Sequence[tuple[Size, Size]]) -> bool:
    """No two of these runs overlap, provably."""
    pairs = combinations(bounds, 2)
    return all(is_at_most(one[1], two[0]) or is_at_most(two[1], one[0]) for one, two in pairs)


def _product_of_slice(dot: Value, part: Value, dim: int) -> Build:
    start, stop = part.params["start"][dim], part.params["stop"][dim]
    return lambda env: _sliced_product(dot, [env[a.id] for a in dot.args], dim, start, stop)


def _sliced_product(dot: Value, args: Sequence[Value], dim: int, start: Size, stop: Size) -> Value:
    """A slice of the product of these, as a product with a slice."""
    label = dot.params["out_axes"][dim]
    sides = zip(args, (dot.params["x_axes"], dot.params["y_axes"]), strict=True)
    own = [piece(v, a.index(label), start, stop) if label in a else v for v, a in sides]
    return emit("dot", *own, **dot.params)


# ------------------------------------------------------------------------------------------- carried in pieces
def carried_in_pieces(loop: Loop) -> tuple[Loop, int, int, int] | None:
    """The loop with the pieces of the first carry to which a step adds a concatenation; the carry, its number of
    pieces, and the dim along which they are one."""
    found = next((pair for i in range(len(loop.init)) if (pair := _added_pieces(loop, i)) is not None), None)
    if found is None:
        return None
    number, added, dim = found
    body, bounds = loop.body.copy(), [*pairwise([0, *_ends_within(added, dim)])]
    with building(body):
        parts = [piece(Value(body, added.id), dim, a, b) for a, b in bounds]
        pieces = [body.input(x.aval, loop.inputs.carries[number].params["name"]) for x in parts]
        after = [emit("add", p, x) for p, x in zip(pieces, parts, strict=True)]
    init = [part_along(loop.init[number], dim, a, b) for a, b in bounds]
    inputs = _with(number, pieces, [Value(body, v.id) for v in loop.body.inputs])
    outputs = _with(number, after, [Value(body, o.id) for o in loop.results])
    own = extract(outputs, inputs, name=body.name)
    return replace(loop, body=own, init=tuple(_with(number, init, loop.init))), number, len(pieces), dim


def read_in_pieces(loop: Loop) -> tuple[Loop, int, int, int] | None:
    """The same of the first carry that is read in pieces alone: one of them may go into no other step."""
    found = next((how for i in range(len(loop.init)) if (how := _read_pieces(loop, i)) is not None), None)
    if found is None:
        return None
    number, dim, bounds = found
    out, before = Graph(loop.body.name), loop.inputs.carries[number]
    env: dict[int, Value] = {}
    pieces: list[Value] = []
    for value in loop.body.inputs:
        if value != before:
            env[value.id] = out.input_like(value)
            continue
        shapes = [(*before.shape[:dim], simplify_size(b - a), *before.shape[dim + 1 :]) for a, b in bounds]
        pieces = [out.input(replace(before.aval, shape=shape), before.params["name"]) for shape in shapes]
    for user in before.users:
        a = user.params["start"][dim]
        env[user.id] = next(p for p, (start, _) in zip(pieces, bounds, strict=True) if sizes_equal(start, a))
    with building(out):
        copy_into((v for v in loop.body.order() if v != before), env)
        after = [_update(env[loop.results[number].id], dim, a, b) for a, b in bounds]
    body = out.returning(_with(number, after, [env[o.id] for o in loop.results]))
    init = [part_along(loop.init[number], dim, a, b) for a, b in bounds]
    return replace(loop, body=body, init=tuple(_with(number, init, loop.init))), number, len(bounds), dim


def _update(value: Value, dim: int, start: Size, stop: Size) -> Value:
    """A piece of what a step makes; of a product a product, that may leave the loop without the others."""
    if value.prim != "dot":
        return piece(value, dim, start, stop)
    return _sliced_product(value, value.args, dim, start, stop)


def _read_pieces(loop: Loop, number: int) -> tuple[int, int, list[tuple[Size, Size]]] | None:
    """A carry that is read in pieces and made in pieces, its dim and they; slices of what is whole have other lanes."""
    found, after = _sliced_apart(loop, loop.inputs.carries[number]), loop.results[number]
    is_made_so = found is not None and (after.prim == "dot" or bool(_ends_within(after, found[0])))
    return (number, *found) if found is not None and is_made_so else None


def _sliced_apart(loop: Loop, before: Value) -> tuple[int, list[tuple[Size, Size]]] | None:
    """The dim along which all that reads a carry is a slice of it, and the pieces of which each is one."""
    users = list(dict.fromkeys(before.users))
    dim = _dim_of_slices(before, users)
    if dim is None or before in loop.results:
        return None
    ends = [(u.params["start"][dim], u.params["stop"][dim]) for u in users]
    places = inner([place for both in ends for place in both], before.shape[dim])
    bounds = list(pairwise([0, *places, before.shape[dim]]))
    are_pieces = all(any(sizes_equal(a, c) and sizes_equal(b, d) for c, d in bounds) for a, b in ends)
    return (dim, bounds) if places and are_pieces else None


def carry_in_pieces(loop: Loop, emitted: Callable[[Loop], list[Value]]) -> list[Value] | None:
    """The results of a loop whose carries go through time in pieces, `emitted` so; None where none of them can."""
    found = carried_in_pieces(loop) or read_in_pieces(loop)
    if found is None:
        return None
    divided, number, count, dim = found
    results = emitted(divided)
    whole = emit("cat", *results[number : number + count], axis=dim)
    return [*results[:number], whole, *results[number + count :]]


@dataclass(frozen=True)
class CarriedPieces:
    """Graph -> an equal graph whose loops carry in its pieces what concatenations are added to."""

    def __call__(self, graph: Graph) -> Graph:
        if not is_on("motion"):
            return graph
        return rebuild_scans(graph, lambda node, args: self._in_pieces(loop_of(node, args)))

    def _in_pieces(self, loop: Loop) -> list[Value] | None:
        return carry_in_pieces(loop, lambda divided: self._in_pieces(divided) or divided.emit())


def _with(number: int, several: Sequence[Value], values: Sequence[Value]) -> list[Value]:
    """Several values in the place of one."""
    return [*values[:number], *several, *values[number + 1 :]]


def _added_pieces(loop: Loop, number: int) -> tuple[int, Value, int] | None:
    """The carry, what is added to it, and the dim along which that is made of pieces."""
    before, after = loop.inputs.carries[number], loop.results[number]
    if after.prim != "add" or before not in after.args or len(before.users) != 1 or len(after.users) > 0:
        return None
    if any(o in (after, before) for i, o in enumerate(loop.results) if i != number):
        return None
    carried = below(loop.body, loop.inputs.carries)
    added = next((a for a in after.args if a != before), before)
    dim = next((d for d in range(added.ndim) if _ends_within(added, d)), None)
    return (number, added, dim) if dim is not None and added.id in carried else None


def _ends_within(value: Value, dim: int) -> list[Size]:
    """Where the pieces end of the concatenation along this dim that it is made of, element by element; or none."""
    if value.prim == "cat":
        return _ends(value, dim) if value.params["axis"] == dim else []
    if value.prim == "permute":
        return _ends_within(value.args[0], value.params["perm"][dim])
    is_made = PRIMS[value.prim].family == "elementwise"
    return next((ends for a in value.args if (ends := _ends_within(a, dim))), []) if is_made else []


# ------------------------------------------------------------------------------------------------ made behind it
Behind: TypeAlias = "Callable[[Mapping[Value, Value]], Value]"
"""A result of all steps, of what the steps give."""


def made_behind(loop: Loop) -> tuple[Loop, Callable[[list[Value]], list[Value]]] | None:
    """The loop that gives the pieces of concatenations with what it reads or carries, and once what it gives turned as
    well; its results by what that gives. None where it gives nothing of the kind."""
    count, ys = len(loop.init), loop.results[len(loop.init) :]
    ways = [_made_behind(y, ys) for y in ys]
    if not any(ways):
        return None
    operands = dict(zip(loop.inputs.xs, loop.xs, strict=True))
    wanted = [parts for y, way in zip(ys, ways, strict=True) for parts in (way[0] if way else [y])]
    given = [v for v in dict.fromkeys(wanted) if v not in operands]
    body = extract([*loop.results[:count], *given], loop.body.inputs, name=loop.body.name)

    def results(made: list[Value]) -> list[Value]:
        env = operands | dict(zip(given, made[count:], strict=True))
        return [*made[:count], *(way[1](env) if way else env[y] for y, way in zip(ys, ways, strict=True))]

    return replace(loop, body=body), results


def _made_behind(y: Value, ys: Sequence[Value]) -> tuple[list[Value], Behind] | None:
    """What has to be given in the place of a result, and how that is made of it; None for what is given as it is."""
    if y.prim == "permute" and y.args[0] in ys:
        perm = (0, *shift_axes(y.params["perm"]))
        return [y.args[0]], lambda env: emit("permute", env[y.args[0]], perm=perm)
    if y.prim == "cat" and any(x.prim == "input" for x in y.args):  # what is made is stored where it is made
        return [*y.args], lambda env: emit("cat", *(env[x] for x in y.args), axis=y.params["axis"] + 1)
    return None
