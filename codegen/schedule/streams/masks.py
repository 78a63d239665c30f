"""Masks along the stream: where anything is alive, where everything is, and what silences lanes beyond its end.

where(i >= j, s, -inf) below exp      nothing behind j = i counts: whole blocks are skipped, others need no mask
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import sympy

from ....ir import Value
from ....ir.errors import Unfusible
from ....ir.types import FLOATS, Size
from ...program.axes import REDUCTIONS, Index, Term, terms_below
from ...program.sizes import tidy
from ..separation.algebra import Algebra, Test, is_infinite, is_number, is_tile_product, source_of
from .accumulators import Accumulator, operands_of
from .roles import Roles

NOTHING = {"product": 0.0, "sum": 0.0, "amax": float("-inf"), "amin": float("inf")}
"""What adds nothing to an accumulator."""
INFINITY = float("inf")


@dataclass(frozen=True)
class Bound:
    """by * stream + row * (place of the row) + offset + sum of numbers >= 0, by is 1 or -1; or 0, of what data says of
    rows alone.
    """

    by: int
    row: int
    offset: Size
    numbers: tuple[tuple[int, Term], ...] = ()

    def negative(self) -> Bound:
        return Bound(-self.by, -self.row, tidy(-self.offset), tuple((-c, t) for c, t in self.numbers))


@dataclass(frozen=True)
class Span:
    """The part of the stream that one pass walks. implied: conditions that hold in the blocks that need no mask.

    silenced: what is made neutral beyond the end of the stream, and the value that does it. apart: accumulators whose
    bodies that does not make neutral. added: what a place that is skipped adds to a sum, 0 or NaN, where it may be
    NaN. guards: what of sizes is assumed.
    """

    lows: tuple[Bound, ...] = ()
    highs: tuple[Bound, ...] = ()
    implied: frozenset[Term] = frozenset()
    silenced: Mapping[Term, float] = field(default_factory=dict)
    apart: frozenset[Term] = frozenset()
    added: Mapping[Term, Term] = field(default_factory=dict)
    guards: tuple[sympy.Basic, ...] = ()

    @property
    def is_bounded(self) -> bool:
        return bool(self.lows or self.highs)

    @property
    def grows_with_rows(self) -> bool:
        """Later rows walk more of the stream: those of a causal mask, not those of a window."""
        return any(b.row > 0 for b in self.highs) and not any(b.row for b in self.lows)


def span_of_masks(accumulators: Sequence[Accumulator], roles: Roles) -> Span:
    """Conditions that each body needs to be alive bound the stream for all."""
    if roles.keeps_stream:
        return Span()
    silent, apart = silenced(accumulators, roles)
    needed = [dict.fromkeys(_alive_if(a)) for a in accumulators]
    shared = [c for c in needed[0] if all(c in n for n in needed)]
    bounds = [(c, b) for c in shared for b in bounds_of(c, roles)]
    found = list(dict.fromkeys(b for _, b in bounds))
    lows, highs = (tuple(b for b in found if (b.by > 0) is is_low) for is_low in (True, False))
    return Span(lows, highs, frozenset(c for c, _ in bounds), silent, apart)


# ------------------------------------------------------------------ what silences a body
def _anything(_: Term) -> bool:
    return True


def silencers(
    term: Term, nothing: float, tame: Test | None, sums: frozenset[Term] = frozenset()
) -> dict[Term, float]:
    """{term: value}: with that value there, this term is `nothing`; outermost first.

    tame: of what is finite in lanes beyond the end of the stream; then whatever else the term is made of, and that
    value is read by nothing else of it. None: where all else is finite. `sums` are made beside the term: what they
    read is not read here.
    """
    found: dict[Term, float] = {term: nothing}
    for part, value in silent_parts(term, nothing, tame or _anything):
        beside = set(terms_below((a for a in term.args if a is not part), sums)) if tame else set()
        for key, wanted in silencers(part, value, tame, sums).items():
            if key not in beside:
                found.setdefault(key, wanted)
    if nothing == 0.0 and term.op in ("add", "sub"):  # both have to vanish
        x, y = (silencers(a, 0.0, tame, sums) for a in term.args)
        found.update({k: v for k, v in x.items() if y.get(k) == v and k not in found})
    return found


def silent_parts(term: Term, nothing: float, tame: Test = _anything) -> list[tuple[Term, float]]:
    """The arguments that alone make a term nothing, each with the value that does."""
    args = term.args
    if term.op == "where" and is_number(args[2]) and args[2].param == nothing:
        return [(args[1], nothing)]
    if nothing == 0.0:
        if term.op == "mul":
            return [(a, 0.0) for a, b in (args, args[::-1]) if tame(b)]
        if term.op in ("neg", "cast") or (term.op == "div" and tame(term)):
            return [(args[0], 0.0)] if args[0].dtype in FLOATS else []
        return [(args[0], -INFINITY)] if term.op in ("exp", "exp2", "sigmoid") else []
    if nothing == -INFINITY:
        if term.op == "add":
            return [(a, nothing) for a, b in (args, args[::-1]) if tame(b)]
        if term.op == "fma" and is_number(args[1]) and args[1].param > 0:
            return [(args[0], nothing)] if tame(args[2]) else []
        if term.op == "cast":
            return [(args[0], nothing)] if args[0].dtype in FLOATS else []
        if (term.op == "sub" and tame(args[1])) or _is_scaled(term):
            return [(args[0], nothing)]
    return []


def _is_scaled(term: Term) -> bool:
    return term.op == "mul" and is_number(term.args[1]) and term.args[1].param > 0


TAME = frozenset(
    "load index const cast spread where not and or xor eq ne lt le gt ge isnan isinf signbit check_index random "
    "carried add sub mul fma neg abs sign max min floor ceil round trunc sin cos atan atan2 tanh asinh erf "
    "sigmoid".split()
)
"""Operations on floats whose result is finite where their arguments are, whatever these are."""


def is_tame(term: Term, roles: Roles, sums: frozenset[Term]) -> bool:
    """Finite beyond the end of the stream, where loads gave zeros.

    Nothing divides by what is loaded, nor takes its logarithm, its root or a great power; nothing that a row has is in
    it, which is what it is there too: NaN, where all of a row is masked. `sums`: so far, they are finite. A matrix
    product is there what its operand along the stream makes it: zero, or NaN in all rows.
    """
    products = {t for t in terms_below([term]) if is_tile_product(t)} - sums
    below = [t for t in terms_below([term], sums | products) if t not in sums]
    if any(_is_wild(t) or _is_of_rows(t, roles) for t in below if t not in products):
        return False
    operands = (y for t in below if t in products for y in t.args[0].args if roles.stream in y.axes)
    return all(is_tame(y, roles, sums) for y in operands)


def _is_wild(term: Term) -> bool:
    if term.op == "const":
        return is_infinite(term)
    if term.op == "div":
        return not (is_number(term.args[1]) and term.args[1].param)
    return term.dtype in FLOATS and term.op not in TAME and term.op not in REDUCTIONS


def _is_of_rows(term: Term, roles: Roles) -> bool:
    return term.dtype in FLOATS and term.op in ("load", *REDUCTIONS) and roles.stream not in term.axes


def silenced(accumulators: Sequence[Accumulator], roles: Roles) -> tuple[dict[Term, float], frozenset[Term]]:
    """Tiles to silence beyond the end of the stream: as few as serve all bodies, as deep as they can be; and operands
    of products that are not finite there.

    And the accumulators that something else's silence would reach, by a value that is not nothing to them: each of
    these is silenced where it is folded.
    """
    tile, sums = {roles.row, roles.stream}, frozenset(a.term for a in accumulators)
    tame = partial(is_tame, roles=roles, sums=sums)
    beside = _wild_operands(accumulators, roles, tame)
    served: dict[Term, dict[Term, float]] = {}
    choices: list[dict[Term, float]] = []
    for a in accumulators:
        body = silencers(a.body, NOTHING[a.kind], lambda t: source_of(t) in beside or tame(t), sums)
        mine = {t: v for t, v in body.items() if tile <= t.axes and not t.axes & set(roles.depth) and t.op != "load"}
        served[a.term] = mine or {a.body: NOTHING[a.kind]}
        _join_choice(choices, served[a.term])
    found: dict[Term, float] = {}
    for choice in choices:
        if not any(found.get(t) == v for t, v in choice.items()):
            term = next((t for t in reversed(choice) if t not in found), None)
            if term is not None:
                found[term] = choice[term]
    apart = [a for a in accumulators if not _is_served(a, served[a.term], found, sums)]
    for a in apart:
        if a.kind == "product" and not _is_silent(a, served[a.term], found):
            raise Unfusible(_node(a), "what is nothing beyond the end of its rows is something to another sum")
    return found | beside, frozenset(a.term for a in apart if a.kind != "product")


def _wild_operands(accumulators: Sequence[Accumulator], roles: Roles, tame: Test) -> dict[Term, float]:
    """What a sum of products has beside its tiles where that is no zero beyond the end: a row behind the last piece of
    a concatenation, or what divides by zeros."""
    pairs = (operands_of(a.body, roles) for a in accumulators if a.kind == "product")
    return {source_of(y): 0.0 for _, y in filter(None, pairs) if source_of(y).op != "load" and not tame(y)}


def _is_served(
    a: Accumulator, mine: Mapping[Term, float], found: Mapping[Term, float], sums: frozenset[Term]
) -> bool:  # fmt: skip
    """Its body is nothing where `found` is silent, and reads no silence that is meant for others."""
    own = {t for t in found if mine.get(t) == found[t]}
    below = terms_below([a.body], sums | own)
    return bool(own & set(below)) and all(t in own for t in below if t in found)


def _is_silent(a: Accumulator, mine: Mapping[Term, float], found: dict[Term, float]) -> bool:
    """Silenced as far out as can be; False where something else has to be there."""
    term, value = next(iter(mine.items()))
    return found.setdefault(term, value) == value


def _node(a: Accumulator) -> Value:
    assert a.term.node is not None
    return a.term.node


def _join_choice(choices: list[dict[Term, float]], mine: dict[Term, float]) -> None:
    for place, others in enumerate(choices):
        common = {t: v for t, v in others.items() if mine.get(t) == v}
        if common:
            choices[place] = common
            return
    choices.append(mine)


# ------------------------------------------------------------------ where anything is alive
def _alive_if(accumulator: Accumulator) -> list[Term]:
    """Conditions that all have to hold for a body to be anything."""
    found: dict[Term, None] = {}
    for term, value in silencers(accumulator.body, NOTHING[accumulator.kind], None).items():
        if term.op == "where" and is_number(term.args[2]) and term.args[2].param == value:
            found.update(dict.fromkeys(conjuncts(term.args[0])))
    return list(found)


def conjuncts(condition: Term) -> list[Term]:
    return [c for a in condition.args for c in conjuncts(a)] if condition.op == "and" else [condition]


def bounds_of(condition: Term, roles: Roles) -> list[Bound]:
    """What a comparison of places says of the place along the stream; [] where nothing is known."""
    if condition.op not in ("ge", "gt", "le", "lt", "eq"):
        return []
    x, y = (affine(a, roles) for a in condition.args)
    if x is None or y is None:
        return []
    difference = x - y if condition.op not in ("le", "lt") else y - x
    if condition.op in ("gt", "lt"):
        difference = difference + (-1)
    bound = difference.bound()
    if bound is None:
        return []
    return [bound, bound.negative()] if condition.op == "eq" else [bound]


@dataclass(frozen=True)
class Affine:
    """stream * S + row * R + offset + numbers."""

    stream: Size = 0
    row: Size = 0
    offset: Size = 0
    numbers: tuple[tuple[Term, int], ...] = ()

    def __add__(self, by: Affine | int) -> Affine:
        if isinstance(by, int):
            return Affine(self.stream, self.row, tidy(self.offset + by), self.numbers)
        numbers = dict(self.numbers)
        for term, c in by.numbers:
            numbers[term] = numbers.get(term, 0) + c
        kept = tuple((t, c) for t, c in numbers.items() if c)
        return Affine(tidy(self.stream + by.stream), tidy(self.row + by.row), tidy(self.offset + by.offset), kept)

    def __neg__(self) -> Affine:
        numbers = tuple((t, -c) for t, c in self.numbers)
        return Affine(tidy(-self.stream), tidy(-self.row), tidy(-self.offset), numbers)

    def __sub__(self, by: Affine) -> Affine:
        return self + -by

    def bound(self) -> Bound | None:
        """What its being at least 0 says of the stream; or of rows, where data is in it."""
        if self.stream not in ((1, -1, 0) if self.row and self.numbers else (1, -1)) or self.row not in (1, 0, -1):
            return None
        return Bound(int(self.stream), int(self.row), self.offset, tuple((c, t) for t, c in self.numbers))


def affine(term: Term, roles: Roles) -> Affine | None:
    """An integer as a sum of the places of stream and row, and of what is the same for a whole tile."""
    if term.dtype in FLOATS or term.dtype == "b1":
        return None
    if term.op == "const":
        return Affine(offset=term.param)
    if term.op == "index":
        return _affine_place(term.param, roles)
    if term.op == "cast":
        return affine(term.args[0], roles) if term.dtype in ("i64", "i32") else None
    if term.op in ("add", "sub"):
        x, y = (affine(a, roles) for a in term.args)
        return None if x is None or y is None else x + y if term.op == "add" else x - y
    if term.op == "neg":
        x = affine(term.args[0], roles)
        return None if x is None else -x
    varying = term.axes & {roles.row, roles.stream, *roles.depth}
    return Affine(numbers=((term, 1),)) if not varying else None


def _affine_place(place: Index, roles: Roles) -> Affine | None:
    found = Affine(offset=place.offset)
    for axis, c in place.terms:
        if axis is roles.stream:
            found = found + Affine(stream=c)
        elif axis is roles.row:
            found = found + Affine(row=c)
        else:  # another coordinate of the program
            return None
    return found if not place.values else None


def whole_bodies(
    algebra: Algebra, bodies: Iterable[Term], implied: frozenset[Term], sums: Container[Term]
) -> list[Term]:
    """The bodies where all implied conditions hold; `sums` stay what they are."""

    def rule(term: Term, args: tuple[Term, ...]) -> Term:
        if term in sums:
            return term
        if term.op != "where":
            return algebra.again(term, args)
        left = [c for c in conjuncts(term.args[0]) if c not in implied]
        if not left:
            return args[1]
        if len(left) == len(conjuncts(term.args[0])):
            return algebra.again(term, args)
        condition = left[0]
        for c in left[1:]:
            condition = algebra.table.make("and", condition, c, dtype="b1")
        return algebra.table.make("where", condition, *args[1:], dtype=term.dtype, node=term.node)

    bodies = list(bodies)
    new = algebra.rewritten(bodies, rule)
    return [new[b] for b in bodies]
