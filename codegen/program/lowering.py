"""The rule of each primitive: its value at an index, in terms of its operands at theirs. Layout becomes arithmetic."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from ...ir import Value
from ...ir.passes.layout import segments
from ...ir.prims import PRIMS
from ...ir.types import Size, product
from ..emit.mathematics import lowest
from ..kernel import Ref
from .axes import Axis, Index, Materialize, Memory, Part, Term
from .builder import Builder, Guards, Place, Rule
from .concatenations import piece_at, stored_pieces
from .loops import Loops
from .one_hot import value_at_one_place
from .sizes import divide, longer_than_one, nonnegative, positive, same, tidy


def _elementwise(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    args = [b.at(a, index, guards) for a in node.args]
    return b.terms.make(node.prim, *args, dtype=node.dtype, node=node)


def _full(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    return b.terms.const(node.params["value"], node.dtype)


def _iota(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    return b.terms.cast(b.terms.index(index[0]), node.dtype, node)


def _input(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    memory = Memory(Ref("input", node.params["index"]), node.params["strides"], node.dtype)
    return b.terms.load(memory, index, guards, node)


def _broadcast(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    (x,) = node.args
    return b.at(x, [Index() if n == 1 else index[a] for n, a in zip(x.shape, node.params["axes"], strict=True)], guards)


def _permute(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    place = dict(zip(node.params["perm"], index, strict=True))
    return b.at(node.args[0], [place[d] for d in range(len(index))], guards)


def _slice(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    steps = zip(index, node.params["start"], node.params["step"], strict=True)
    return b.at(node.args[0], [i * step + start for i, start, step in steps], guards)


def _flip(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    flipped = node.params["axes"]
    turned = [i * -1 + (n - 1) if d in flipped else i for d, (i, n) in enumerate(zip(index, node.shape, strict=True))]
    return b.at(node.args[0], turned, guards)


def _pad(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    """where(the place is inside x, x there, 0), loads guarded."""
    (x,) = node.args
    places, tests = [], list[Term]()
    for i, n, lo, inner in zip(index, x.shape, node.params["lo"], node.params["inner"], strict=True):
        place, conditions = _inside(b, i + (-lo if isinstance(lo, int) else tidy(-lo)), n, inner)
        if place.is_beyond(n):
            return b.terms.const(0, node.dtype)
        places.append(place)
        tests.extend(conditions)
    value, zero = b.at(x, places, (*guards, *tests)), b.terms.const(0, node.dtype)
    if not tests:
        return value
    inside = functools.reduce(lambda both, test: b.terms.test("and", both, test), tests)
    return b.terms.make("where", inside, value, zero, dtype=node.dtype, node=node)


def _inside(b: Builder, place: Index, size: Size, inner: int) -> tuple[Index, list[Term]]:
    """The place in x of a place in its padded self, and what has to hold for it to be there."""
    zero = b.terms.const(0, "i64")
    bounds = place.bounds()
    reach = tidy((size - 1) * (inner + 1))
    tests = []
    if bounds is None or not nonnegative(bounds[0]):
        tests.append(b.terms.test("ge", b.terms.index(place), zero))
    if bounds is None or not nonnegative(tidy(reach - bounds[1])):
        tests.append(b.terms.test("le", b.terms.index(place), b.terms.const(reach, "i64")))
    if not inner:
        return place, tests
    step = b.terms.const(inner + 1, "i64")
    tests.append(b.terms.test("eq", b.terms.integer("rem", b.terms.index(place), step), zero))
    return Index(values=((b.terms.integer("floordiv", b.terms.index(place), step), 1),)), tests


def _cat(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    """A piece where the place provably lies in it, else a chain of choices with guarded loads."""
    parts = b.pieces(node)
    dim = parts[0].dim
    if (found := piece_at(index[dim], parts)) is not None:
        number, inside = found
        return b.at(node.arg(number), (*index[:dim], inside, *index[dim + 1 :]), guards)
    # under guards only some places are asked for: the pieces of a pad are none of the store
    if not guards:
        b.try_pieces(index[dim], tuple(p.size for p in parts))
    # what is stored piece by piece is read as a whole
    if stored_pieces(node):
        if not guards:
            b.try_slant(node, index, dim)
        raise Materialize([node])
    return _cat_chain(b, node, index, guards, parts)


def _cat_chain(b: Builder, node: Value, index: Place, guards: Guards, parts: Sequence[Part]) -> Term:
    value: Term | None = None
    dim = parts[0].dim
    starts = [*(p.start for p in parts), tidy(parts[-1].start + parts[-1].size)]
    number, bounds = _piece_of_sum(b, index[dim], starts) or (index[dim], starts)
    for k in reversed(range(len(parts))):
        low = b.terms.test("ge", b.terms.index(number), b.terms.const(bounds[k], "i64"))
        high = b.terms.test("lt", b.terms.index(number), b.terms.const(bounds[k + 1], "i64"))
        tests = ((low,) if k else ()) + ((high,) if k < len(parts) - 1 else ())
        # where its guards hold, a piece that is one long is read at its only place
        inside = Index() if parts[k].size == 1 else index[dim] + tidy(-starts[k])
        place = (*index[:dim], inside, *index[dim + 1 :])
        piece = b.at(node.args[k], place, (*guards, *tests))
        value = piece if value is None else b.terms.make("where", high, piece, value, dtype=node.dtype, node=node)
    assert value is not None
    return value


def _piece_of_sum(b: Builder, place: Index, starts: list[Size]) -> tuple[Index, list[Size]] | None:
    """The number of the piece, where a product sums along each of several equal ones; and the numbers."""
    sizes = [tidy(end - start) for start, end in itertools.pairwise(starts)]
    is_alike = b.in_product and all(same(n, sizes[0]) for n in sizes[1:]) and not place.values
    exact = b.axes.settled(place).divmod(sizes[0]) if is_alike else None
    return (exact[0], list(range(len(starts)))) if exact is not None else None


def _reshape(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    """Flatten the index, then take it apart again along the operand's dimensions, refining axes where it helps."""
    (x,) = node.args
    if not any(i.values for i in index):
        return b.at(x, _taken_apart(b, index, node.shape, x.shape), guards)
    # what data decides is divided alone: not together with the dimensions beside it, which stay as they are
    places: list[Index] = []
    for own, given in segments(x.shape, node.shape):
        shape = [node.shape[d] for d in given]
        places += _taken_apart(b, tuple(index[d] for d in given), shape, [x.shape[d] for d in own])
    return b.at(x, places, guards)


def _taken_apart(b: Builder, index: Place, shape: Sequence[Size], inner: Sequence[Size]) -> list[Index]:
    """The place in dimensions `inner` of a place in as many elements of another shape."""
    # from the last dimension on: what is left over is the index of those before it
    flat = Index.row_major(index, shape)
    places: list[Index] = []
    wide = next((d for d, n in enumerate(inner) if n != 1), 0)
    for n in reversed(inner[wide + 1 :]):
        flat, last = _divided(b, b.axes.settled(flat), n)
        places.insert(0, last)
    return [*(Index() for _ in inner[:wide]), flat, *places] if inner else []


def _divided(b: Builder, place: Index, size: Size) -> tuple[Index, Index]:
    """(place // size, place % size)."""
    if size == 1:
        return place, Index()
    if not place.values and (exact := place.divmod(size)) is not None:
        return exact
    # an axis across the boundary of two blocks is divided, which starts the pass again
    if not place.values:
        _refine_for(b, place, size)
    # what cannot be proven is computed, lane by lane
    number, divisor = b.terms.index(place), b.terms.const(size, "i64")
    quotient = b.terms.integer("floordiv", number, divisor)
    return Index(values=((quotient, 1),)), Index(values=((b.terms.integer("rem", number, divisor), 1),))


def _refine_for(b: Builder, place: Index, size: Size) -> None:
    """Split the axis that straddles a multiple of `size`, if it divides."""
    for axis, coefficient in (t for t in place.terms if not t[0].turn):
        per = divide(size, coefficient if nonnegative(coefficient) else tidy(-coefficient))
        # of a coefficient whose sign no proof tells it may be negative, which is no size
        if per is None or per == 1 or not longer_than_one(per) or nonnegative(-per):
            continue
        quotient = divide(axis.size, per)
        if quotient is not None and quotient != 1 and not same(axis.size, per):
            b.axes.refine(axis, per)


def _reduce(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    (x,) = node.args
    axes = node.params["axes"]
    if not b.is_made_again(node, index, [x.shape[d] for d in axes]):
        b.check_complete(node, index)
    is_there = all(b.axes.settled(i).is_within(n) for i, n in zip(index, node.shape, strict=True))
    outer = iter(index)
    own: dict[int, Index] = {}
    for d in axes:
        own[d] = b.summed(("over", *b.path, node.id, d), x.shape[d], (*index, *own.values()))
    place = [own[d] if d in own else next(outer) for d in range(x.ndim)]
    arg = b.operand(x, place, () if is_there else guards)
    over = [a for d in axes for a in b.axes.settled(own[d]).walked]
    return _folded(b, node, arg, over)


def _folded(b: Builder, node: Value, arg: Term, over: list[Axis]) -> Term:
    """The reduction of a term; a sum along an axis that the term does not know is a multiplication."""
    if any(a.size == 0 for a in over):
        return b.terms.const(lowest(node.prim, node.dtype), node.dtype)
    absent = [a for a in over if a not in arg.axes]
    if absent and node.prim == "sum" and all(positive(a.size) for a in absent):
        over = [a for a in over if a in arg.axes]
        times = b.terms.const(product(a.size for a in absent), node.dtype)
        total = _folded(b, node, arg, over)
        return b.terms.make("mul", total, times, dtype=node.dtype, node=node)
    if absent:
        arg = b.terms.make("spread", arg, dtype=arg.dtype, param=tuple(absent), node=node)
    for axis in over if node.prim == "sum" else ():
        if (picked := value_at_one_place(b.terms, arg, axis)) is not None:
            return _folded(b, node, picked, [a for a in over if a is not axis])
    if not over:
        return arg
    return b.terms.make(node.prim, arg, dtype=node.dtype, param=tuple(sorted(over, key=lambda a: a.order)), node=node)


def _dot(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    """sum(x * y): what a product is, and how it is known (`emit/products.py`); it is never formed."""
    b.check_complete(node, index)
    x, y = node.args
    x_axes, y_axes, out_axes = (node.params[p] for p in ("x_axes", "y_axes", "out_axes"))
    place = dict(zip(out_axes, index, strict=True))
    sizes = dict(zip((*x_axes, *y_axes), (*x.shape, *y.shape), strict=True))
    summed = [label for label in sizes if label not in place]
    for label in summed:
        place[label] = b.summed(("over", *b.path, node.id, label), sizes[label], list(place.values()))
    factors = [b.factor(v, [place[label] for label in axes]) for v, axes in ((x, x_axes), (y, y_axes))]
    over = sorted({a for label in summed for a in b.axes.settled(place[label]).walked}, key=lambda a: a.order)
    product_ = b.terms.make("mul", *factors, dtype=node.dtype, node=node)
    return b.terms.make("sum", product_, dtype=node.dtype, param=tuple(over), node=node)


def _cumsum(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    (x,) = node.args
    if node.shape[node.params["axis"]] == 1:
        return b.at(x, index)
    b.check_complete(node, index)
    along = b.axes.settled(index[node.params["axis"]])
    if len(along.terms) != 1:
        raise Materialize([x] if x.prim != "input" and x.id not in b.memory else [node])
    ((axis, _),) = along.terms
    arg = b.operand(x, index)
    if axis not in arg.axes:
        arg = b.terms.make("spread", arg, dtype=arg.dtype, param=(axis,), node=node)
    op = "cumsum_reverse" if node.params["reverse"] else "cumsum"
    return b.terms.make(op, arg, dtype=node.dtype, param=(axis,), node=node)


def _check_index(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    """The index itself, after an assertion for the lanes that read or write something."""
    args = [b.at(a, index, guards) for a in node.args]
    return b.terms.make("check_index", *args, *guards, dtype=node.dtype, node=node)


def _gather(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    x, *positions = node.args
    return b.at(x, indirect_index(b, positions, node.params["axes"], index, x.ndim, guards), guards)


def indirect_index(
    b: Builder, positions: Sequence[Value], axes: Sequence[int], index: Place, ndim: int, guards: Guards = ()
) -> list[Index]:
    """The index in what is gathered from, or scattered to: positions along `axes`, else the dimensions of `index`."""
    rank = positions[0].ndim
    read = {a: _as_place(b.at(p, index[:rank], guards)) for a, p in zip(axes, positions, strict=True)}
    direct = iter(index[rank:])
    return [b.terms.as_i64(read[d]) if d in read else next(direct) for d in range(ndim)]


def _as_place(position: Term) -> Index:
    """A position as a place: where it counts along an axis, that axis is walked."""
    return position.param if position.op == "index" else Index(values=((position, 1),))


def _random(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    seed, offset = (b.at(a, ()) for a in node.args)
    place = Index.row_major(index, node.shape)
    if offset.op == "const":
        at = b.terms.index(place + offset.param)
    else:
        at = b.terms.integer("add", offset, b.terms.index(place))
    return b.terms.make("random", seed, at, dtype=node.dtype, param=node.params["kind"], node=node)


def _scattered(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    raise Materialize([node])


def _result_of_loop(b: Builder, node: Value, index: Place, guards: Guards) -> Term:
    return Loops(b).result(node, index, guards)


rules: dict[str, Rule] = {
    "input": _input,
    "full": _full,
    "iota": _iota,
    "broadcast": _broadcast,
    "permute": _permute,
    "slice": _slice,
    "flip": _flip,
    "pad": _pad,
    "cat": _cat,
    "reshape": _reshape,
    "check_index": _check_index,
}
family_rules: dict[str, Rule] = {
    "elementwise": _elementwise,
    "reduce": _reduce,
    "contract": _dot,
    "cumulative": _cumsum,
    "gather": _gather,
    "scatter": _scattered,
    "random": _random,
    "scan": _result_of_loop,
    "pick": _result_of_loop,
}


def rule_of(node: Value) -> Rule:
    return rules.get(node.prim) or family_rules[PRIMS[node.prim].family]
