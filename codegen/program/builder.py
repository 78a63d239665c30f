"""Values at indices: a node is asked for at an index, and the rule of its primitive asks for the operands at theirs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import count
from typing import NamedTuple, TypeAlias

from ...ir import Value
from ...ir.prims import PRIMS
from ...ir.types import Size, contiguous_strides, product
from ..kernel import Ref
from .axes import Axis, Index, Materialize, Memory, Part, Term
from .concatenations import MAX_PIECES, pieces
from .sizes import divide, same, tidy
from .terms import AxisTable, Restart, TermTable

Place: TypeAlias = tuple[Index, ...]
Guards: TypeAlias = tuple[Term, ...]
Rule: TypeAlias = "Callable[[Builder, Value, Place, Guards], Term]"
Held: TypeAlias = dict[tuple[Value, Value], int]
"""(a loop, a value of its body) -> the number of what steps hold: values that are asked for at several places."""

MAX_PLACES = 9
"""A value that is asked for at more kinds of places than a small matrix has (x[i], x[i + 1], x[2 * i]) goes through
memory."""
MAX_QUESTIONS = 32
"""So does one that is asked for more often: at places and under guards, which each slice of a sum of slices doubles."""
MAX_FEW = 8
"""Elements of which a reduction costs no more than a few elementwise operations."""
MAX_SUMMED = 8
"""A sum of products along a concatenation of at most so many equal pieces is one of sums along the pieces."""
MAX_UNROLLED = 2
"""Concatenations within concatenations that are stored piece by piece."""


class Slant(NamedTuple):
    """A goal is this value, moved about: what is stored along `axis` lies along its `dim` at a sum of it and others.

    It is what a loop gives, or a concatenation of such along `dim`; `place`: in it.
    """

    axis: Axis
    value: Value
    place: Place
    dim: int

    @property
    def pieces(self) -> list[tuple[Value, Part]]:
        """What is stored one by one, with their places in it."""
        if self.value.prim == "cat":
            return list(zip(self.value.args, pieces(self.value), strict=True))
        return [(self.value, Part(self.dim, 0, self.value.shape[self.dim]))]


class Unrolling:
    """Concatenations that are stored piece by piece: by goal, the axes whose values are stored one by one.

    slants: by goal, the concatenation along whose pieces all is stored that is beside them.
    """

    def __init__(self, axes: AxisTable) -> None:
        self.axes = axes
        self.by_goal: dict[int, list[Axis]] = {}
        self.slants: dict[int, Slant] = {}

    def slant(self, goal: int, value: Value, place: Place, dim: int) -> None:
        """Store what a loop gives where it is, though a place is one along several axes; ends the pass then."""
        index = place[dim]
        own = [a for a, c in index.terms if c == 1 and not a.turn and self.axes.is_of_goal(a, goal)]
        elsewhere = {a for d, i in enumerate(place) if d != dim for a in i.axes}
        alone = [a for a in own if a not in elsewhere]
        if goal not in self.slants and len(index.terms) > 1 and alone and not any(i.values for i in place):
            self.slants[goal] = Slant(alone[-1], value, place, dim)
            raise Restart

    def attempt(self, goal: int, index: Index, sizes: tuple[Size, ...]) -> None:
        """Unroll where pieces are alike and the index is an axis of what is stored; ends the pass then."""
        alike = len(sizes) <= MAX_PIECES and all(same(n, sizes[0]) for n in sizes[1:])
        if not alike or len(self.by_goal.get(goal, ())) == MAX_UNROLLED:
            return
        # first an axis of its own for the number of the piece, in one pass; then that axis is unrolled, in the next
        if (axis := self._stored_axis(goal, index)) is not None and self._is_parted(axis, sizes[0]):
            self.axes.refine(axis, sizes[0])
        exact = index.divmod(sizes[0])
        if exact is not None and (piece := self._stored_axis(goal, exact[0])) is not None and piece.size == len(sizes):
            self.by_goal.setdefault(goal, []).append(piece)
            raise Restart

    def divide_sum(self, index: Index, sizes: tuple[Size, ...]) -> None:
        """A product that sums along a concatenation of equal pieces sums along each; ends the pass then."""
        if len(sizes) <= MAX_SUMMED and all(same(n, sizes[0]) for n in sizes[1:]) and len(index.terms) == 1:
            ((axis, _),) = index.terms
            if index == Index.over(axis) and self._is_parted(axis, sizes[0]):
                self.axes.refine(axis, sizes[0])

    def _is_parted(self, axis: Axis, size: Size) -> bool:
        """True if an axis has whole pieces of that size, which a slice of a concatenation may not have."""
        return not same(size, 1) and divide(axis.size, size) is not None

    def _stored_axis(self, goal: int, index: Index) -> Axis | None:
        """The axis that an index is, if it is one of what the goal stores."""
        if len(index.terms) != 1 or index != Index.over(axis := index.terms[0][0]):
            return None
        return axis if self.axes.is_of_goal(axis, goal) else None


class Builder:
    """One pass over the goals of a kernel.

    goal: the number of the one whose values are built; loop: the one that gives it, moved about at most, if one does;
    path: the loops whose step this is; states, steps: what loops carry, by number, and the builders of their steps.
    held: by loop, what its steps hold, with its number. shared: whether reductions share axes. often: where values are
    noted that are asked for too often, and are read as if they were in memory; None: the first one ends the pass.
    """

    def __init__(
        self, terms: TermTable, memory: Mapping[int, Memory], rule_of: Callable[[Value], Rule], unrolling: Unrolling,
        held: Held, shared: bool = False, often: dict[int, Value] | None = None,
    ) -> None:  # fmt: skip
        self.terms, self.axes, self.memory = terms, terms.axes, memory
        self.rule_of, self.unrolling = rule_of, unrolling
        self.held, self.shared, self.often = held, shared, often
        self.goal = -1
        self.loop: Value | None = None
        self.path: tuple[int, ...] = ()
        self.states: dict[Hashable, int] = {}
        self.steps: dict[Value, Builder] = {}
        self.in_reduction = self.in_product = False
        self._values: dict[tuple[int, Place, Guards], Term] = {}
        self._places: dict[int, set[tuple[object, ...]]] = {}
        self._questions: dict[int, set[tuple[Place, Guards]]] = {}
        self._pieces: dict[int, list[Part]] = {}

    @property
    def most_questions(self) -> int:
        """Places at which one value is asked for, at most."""
        return MAX_QUESTIONS

    def at(self, node: Value, index: Sequence[Index], guards: Guards = ()) -> Term:
        """The value of `node` at an index."""
        if any(n == 0 for n in node.shape):  # never looked at: there may be no memory behind it
            return self.terms.const(0, node.dtype)
        place = tuple(self.axes.settled(i) if n != 1 else Index() for i, n in zip(index, node.shape, strict=True))
        if guards and all(i.is_within(n) for i, n in zip(place, node.shape, strict=True)):
            guards = ()  # there is an element at each place: who reads it by what guards need not be told apart
        key = (node.id, place, guards)
        if key not in self._values:
            self._count(node, place, guards)
            self._values[key] = self._build(node, place, guards)
        return self._values[key]

    def _build(self, node: Value, place: Place, guards: Guards) -> Term:
        if node.id in self.memory:
            return self.terms.load(self.memory[node.id], place, guards, node)
        if self.often and node.id in self.often:
            memory = Memory(Ref("temporary", -1), contiguous_strides(node.shape), node.dtype)
            return self.terms.load(memory, place, guards, node)
        return self.rule_of(node)(self, node, place, guards)

    def computed(self, node: Value, index: Place, guards: Guards = ()) -> Term:
        """The value computed here, though its memory is known."""
        return self.terms.const(0, node.dtype) if 0 in node.shape else self.rule_of(node)(self, node, index, guards)

    def operand(self, node: Value, index: Sequence[Index], guards: Guards = ()) -> Term:
        """The argument of a reduction or scan: it is never looked at piece by piece."""
        outer, self.in_reduction = self.in_reduction, True
        term = self.at(node, index, guards)
        self.in_reduction = outer
        return term

    def factor(self, node: Value, index: Sequence[Index]) -> Term:
        """An operand of a product."""
        outer, self.in_product = self.in_product, True
        term = self.operand(node, index)
        self.in_product = outer
        return term

    def summed(self, key: Hashable, size: Size, outer: Sequence[Index]) -> Index:
        """What a reduction runs over: an axis of its own, or, where these are shared, the first one that it is not
        asked for along.

        A sum of sums along rows and columns by turns asks for what it is made of along twice as many axes each time.
        """
        if size == 1:
            return Index()
        if not self.shared:
            return Index.over(self.axes.axis(key, size))
        taken = {a for i in outer for a in self.axes.settled(i).axes}
        axes = (self.axes.axis(("summed", size, n), size) for n in count())
        return next(i for i in map(Index.over, axes) if not taken & set(self.axes.settled(i).axes))

    def pieces(self, node: Value) -> list[Part]:
        """The places of a concatenation's pieces."""
        if node.id not in self._pieces:
            self._pieces[node.id] = pieces(node)
        return self._pieces[node.id]

    def try_pieces(self, index: Index, sizes: tuple[Size, ...]) -> None:
        """Store a concatenation piece by piece where that is possible, or sum so."""
        if self.in_product:
            self.unrolling.divide_sum(index, sizes)
        elif not self.in_reduction:
            self.unrolling.attempt(self.goal, index, sizes)

    def try_slant(self, value: Value, index: Place, dim: int) -> None:
        """Store all that a loop gives where it is made."""
        if not self.in_reduction:
            self.unrolling.slant(self.goal, value, tuple(map(self.axes.settled, index)), dim)

    def _count(self, node: Value, place: Place, guards: Guards) -> None:
        """Places along other axes of the same sizes are one kind: reductions have axes of their own, until unified."""
        if node.id in self.memory or PRIMS[node.prim].family in ("input", "source"):
            return
        kinds = self._places.setdefault(node.id, set())
        kinds.add(tuple(i.kind for i in place))
        questions = self._questions.setdefault(node.id, set())
        questions.add((place, guards))
        often = len(kinds) > MAX_PLACES or len(questions) > self.most_questions
        if not often or PRIMS[node.prim].family != "elementwise":
            return
        if self.often is None:
            raise Materialize([node])
        self.often[node.id] = node

    def is_made_again(self, node: Value, index: Sequence[Index], summed: Sequence[Size]) -> bool:
        """Whether a reduction along so few elements is made at each place where it is asked for: S[:, 1, 2], of small
        matrices. Not within another one, where that would multiply."""
        few = all(isinstance(n, int) for n in summed) and product(summed) <= MAX_FEW
        return few and not self.in_reduction and not any(i.values for i in index)

    def check_complete(self, node: Value, index: Sequence[Index]) -> None:
        """Have `node` materialized unless it is asked for at every place exactly once."""
        axes = [a for i in index for a in self.axes.settled(i).axes]
        complete = all(self._covers(i, n) for i, n in zip(index, node.shape, strict=True))
        if not complete or len(axes) != len(set(axes)):
            raise Materialize([node])

    def _covers(self, place: Index, size: Size) -> bool:
        """The place runs over 0 .. size-1 exactly once: a mixed-radix number in axes of their own."""
        if place.values or place.offset != 0:
            return False
        reach: Size = 1
        digits = list(self.axes.settled(place).terms)
        while digits:
            digit = next((t for t in digits if same(t[1], reach)), None)
            if digit is None:
                return False
            digits.remove(digit)
            reach = tidy(reach * digit[0].size)
        return same(reach, size)
