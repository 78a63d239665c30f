"""Which axis a streamed kernel has rows of, which it walks, and what every other axis is to it.

row      the longest axis of what the sink keeps, on one side of the products that never reach memory
stream   the longest of the other side; or, where the sink keeps both sides, a second axis of its tiles
outer    further axes that are summed over, one place at a time: the heads of a group
depth    contracted axes, and the columns of what is accumulated: whole in a tile
places   what sums over pairs are summed along, one place after the other
grid     the rest
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ....ir import Value
from ....ir.errors import Unfusible
from ...program.axes import REDUCTIONS, SCANS, Axis, Materialize, Sink, Term, axes_mentioned, terms_below
from ...program.sizes import Hints, evaluate_size
from ..separation.algebra import is_tile_product


@dataclass(frozen=True)
class Roles:
    """The axes of one streamed kernel. keeps_stream: a program has one block of the stream, and sums over `outer`.

    split: the axis of the grid that says which part of the stream a program walks. bins: axes of what tiles are summed
    to by an index; blocks: the number of a tile along each of its axes, as an axis.
    """

    row: Axis
    stream: Axis
    outer: tuple[Axis, ...]
    depth: tuple[Axis, ...]
    grid: tuple[Axis, ...]
    keeps_stream: bool = False
    split: Axis | None = None
    bins: tuple[Axis, ...] = ()
    blocks: Mapping[Axis, Axis] = field(default_factory=dict)
    places: tuple[Axis, ...] = ()

    @property
    def over(self) -> frozenset[Axis]:
        """The axes that the kernel's loops walk."""
        return frozenset(self.outer) if self.keeps_stream else frozenset((self.stream, *self.outer))

    @property
    def walk(self) -> tuple[object, ...]:
        """Sinks of the same walk may share a kernel."""
        return self.row, self.stream, frozenset(self.outer), frozenset(self.grid), self.keeps_stream

    def is_fixed(self, term: Term) -> bool:
        """The same at every place of the streamed axes."""
        return not term.axes & self.over

    def is_of_pairs(self, term: Term) -> bool:
        """A sum over pairs: a tile that is made one place of what it sums after the other."""
        return term.op in REDUCTIONS and bool(term.param) and set(term.param) <= set(self.places)


def virtual_products(terms: Sequence[Term], virtual: frozenset[int]) -> list[Term]:
    """The matrix products and sums over pairs among these terms that are never in memory."""
    made = [t for t in terms if t.node is not None and t.node.id in virtual]
    return [t for t in made if is_tile_product(t) or is_of_pairs(t)]


def is_of_pairs(term: Term) -> bool:
    """Of virtual values only those are reductions that are made of none."""
    return term.op in REDUCTIONS and term.node is not None and term.node.prim == term.op


def roles_of(sink: Sink, products: Sequence[Term], hints: Hints) -> Roles:
    """The roles of the axes below one sink; `products`: those below it that are never in memory.

    Raises Materialize for what has to be complete before, and Unfusible.
    """
    terms, kept = terms_below(sink.terms), set(sink.axes)
    if not any(kept & p.axes for p in products):
        raise Materialize(_row_values(terms, set(products), sink))
    rows, others, common, depth = _sides(sink, products, kept)
    places = {a for p in products if is_of_pairs(p) for a in p.param}
    depth -= places
    if rows & others:  # of a sum of two that walk in different directions each is complete before
        raise Materialize(_row_values(terms, set(products), sink))
    streamed = others - kept
    if _walk_apart(products, streamed):  # and of one along two streams, which are no tile's
        raise Materialize(_row_values(terms, set(products), sink))
    row = _longest(rows & kept, hints)
    stream = _longest(streamed or others, hints)
    if row is None or stream is None:
        # the sink is a sum over what would be its rows: they are complete before it
        raise Materialize(_row_values(terms, set(products), sink))
    reduced = {a for t in terms if t.op in REDUCTIONS for a in t.param}
    outer = {a for a in reduced if a in others | common or a.size == 1} - {stream} - kept
    roles = Roles(row, stream, _ordered(outer), (), (), not streamed)
    _require_rows(sink, terms, roles, set(products))
    depth |= _columns(terms, roles) | _small(terms, roles, depth, places)
    used = {row, stream, *outer, *depth, *places}
    every = set(sink.axes).union(*(axes_mentioned(t) for t in terms))
    grid = every - used
    if not grid <= kept or depth & {row, stream}:
        raise Unfusible(sink.node, "an axis of it is neither kept nor summed in one way")
    return Roles(
        row, stream, _ordered(outer), _ordered(depth), _ordered(grid), not streamed, places=_ordered(places)
    )  # fmt: skip


def joined_roles(several: Iterable[Roles]) -> Roles:
    """The roles of sinks that share a walk."""
    first, *others = several
    depth = {*first.depth, *(a for r in others for a in r.depth)}
    places = {*first.places, *(a for r in others for a in r.places)}
    return replace(first, depth=_ordered(depth), places=_ordered(places))


def _sides(sink: Sink, products: Sequence[Term], kept: set[Axis]) -> tuple[set[Axis], set[Axis], set[Axis], set[Axis]]:
    """(row side, other side, both, contracted) of the products."""
    rows, others, common, depth = (set[Axis]() for _ in range(4))
    for product in products:
        if not product.param:
            raise Unfusible(sink.node, "a product along an axis of length one")
        left, right = (a.axes for a in product.args[0].args) if is_tile_product(product) else _pair(product, sink)
        mine, other = left - right, right - left
        if not mine & kept or (other & kept and len(other & kept) > len(mine & kept)):
            mine, other = other, mine
        contracted = set(product.param)
        rows |= mine - contracted
        others |= other - contracted
        common |= (left & right) - contracted
        depth |= contracted
    return rows, others, common, depth


def _walk_apart(products: Sequence[Term], streamed: set[Axis]) -> bool:
    """Some two of the products have each an axis to walk that the other has not."""
    walked = {frozenset(p.axes & streamed) for p in products}
    return any(not (a <= b or b <= a) for a in walked for b in walked)


def _pair(product: Term, sink: Sink) -> tuple[frozenset[Axis], frozenset[Axis]]:
    """The axes of what has the rows of a sum over pairs, and of what has its columns."""
    over = set(product.param)
    found = {frozenset(t.axes - over) for t in terms_below([product.args[0]]) if t.op in ("load", "index", *REDUCTIONS)}
    widest = [s for s in found if not any(s < other for other in found)]
    if len(widest) != 2:
        raise Unfusible(sink.node, "a sum over more than two sides")
    first, second = sorted(widest, key=lambda s: sorted(a.order for a in s))
    return first, second


def _longest(axes: Iterable[Axis], hints: Hints) -> Axis | None:
    return max(axes, key=lambda a: (evaluate_size(a.size, hints), -a.order), default=None)


def _ordered(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    return tuple(sorted(axes, key=lambda a: a.order))


def _row_values(terms: Sequence[Term], virtual: set[Term], sink: Sink) -> list[Value]:
    """The innermost reductions over a product that never reaches memory: what the sink is made of."""
    found = [t for t in terms if t.op in REDUCTIONS and t not in virtual and virtual & set(terms_below(t.args))]
    first = [t for t in found if not any(f in found for f in terms_below(t.args))]
    nodes = [t.node for t in first if t.node is not None and t.node.id != sink.node.id]
    if not nodes:
        raise Unfusible(sink.node, "it keeps no axis of the products below it")
    return nodes


def _require_rows(sink: Sink, terms: Sequence[Term], roles: Roles, virtual: set[Term]) -> None:
    """A reduction over the rows themselves, or over part of what is streamed, is complete before this kernel."""
    before: list[Value] = []
    for term in terms:
        if term.op in SCANS and set(term.param) & {roles.row, roles.stream, *roles.outer}:
            raise _scanned_before(term, terms, virtual, sink)
        if term.op in REDUCTIONS and term not in virtual and _is_above(term, virtual):
            before += [term.node] if not set(term.param) <= roles.over and term.node is not None else []
    if before:
        earlier = [node for node in before if node.id != sink.node.id]
        raise Materialize(earlier or _row_values(terms, virtual, sink))


def require_own_extremes(sinks: Sequence[Sink], virtual: frozenset[int]) -> None:
    """What is never in memory is compared with an extreme of this walk; another kernel's may have other bits."""
    own = {s.node.id for s in sinks}
    for sink in sinks:
        terms = terms_below(sink.terms)
        made = set(virtual_products(terms, virtual))
        for term in terms:
            extremes = [e for a in term.args if (e := extreme_in_memory(a)) is not None] if term.op == "eq" else []
            if any(e.id not in own for e in extremes) and _is_above(term, made):
                raise Unfusible(term.node or sink.node, "it is compared with an extreme that another kernel has found")


def extreme_in_memory(term: Term) -> Value | None:
    """The maximum or minimum that a term reads from memory."""
    while term.op == "cast":
        (term,) = term.args
    is_extreme = term.op == "load" and term.node is not None and term.node.prim in ("amax", "amin")
    return term.node if is_extreme else None


def _scanned_before(scan: Term, terms: Sequence[Term], virtual: set[Term], sink: Sink) -> Exception:
    """A running sum has all rows, or all columns: it is complete before this kernel, or begins behind it."""
    if scan in virtual:
        return Unfusible(scan.node or sink.node, "a running sum along what is streamed")
    if _is_above(scan, virtual):
        return Materialize(_row_values(terms, virtual, sink))
    return Materialize([scan.node] if scan.node is not None else [])


def _is_above(term: Term, virtual: set[Term]) -> bool:
    return any(t in virtual for t in terms_below(term.args))


def _columns(terms: Sequence[Term], roles: Roles) -> set[Axis]:
    """Free columns of sums over the stream: those of v in p @ v."""
    found: set[Axis] = set()
    for term in terms:
        if term.op == "sum" and set(term.param) & roles.over and term.args[0].op == "mul":
            for x, y in (term.args[0].args, term.args[0].args[::-1]):
                if roles.row in x.axes and roles.row not in y.axes and roles.stream in y.axes:
                    found |= y.axes - x.axes - {roles.stream, *roles.outer}
    return found


def _small(terms: Sequence[Term], roles: Roles, contracted: set[Axis], places: set[Axis]) -> set[Axis]:
    """Axes of reductions along what a tile holds whole, sum(g * out) of rows; of the stream they are made before.

    Those along rows as well, how many of them count, say: a tile has a block of them.
    """
    found: set[Axis] = set()
    for term in terms:
        if term.op not in REDUCTIONS or set(term.param) & (roles.over | places) or is_tile_product(term):
            continue
        is_in_blocks = term.args[0].axes & roles.over or {roles.row, roles.stream} & set(term.param)
        if is_in_blocks and term.node is not None:
            raise Materialize([term.node])
        found |= set(term.param)
    return found - contracted
