"""A kernel's atoms, and proofs that a polynomial in them is not negative."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from .atoms import Atoms, Bound, Draw
from .polynomials import ONE, Poly, TooLong
from .search import Budget, Search, is_false


class World:
    """Atoms, and a search for what their facts imply."""

    def __init__(self) -> None:
        self.atoms = Atoms()
        self.budget = Budget()
        self.multiples: list[tuple[Poly, int]] = []  # what is known to be one of a number, though no atom says so

    def atom(
        self, name: str, draw: Draw, least: int | None = None, most: Poly | int | None = None, order: int = 0
    ) -> Poly:
        """A new one; `draw`: a value that it has where the other atoms have theirs."""
        number = self.atoms.add(name, draw, order)
        if least is not None:
            self.bound_below(number, ONE, Poly.of(least))
        if most is not None:
            self.bound_above(number, ONE, Poly.of(most))
        return Poly.atom(number)

    def bound_above(self, atom: int, factor: Poly, value: Poly) -> None:
        """factor * atom <= value"""
        self._bound(self.atoms.bounds.upper, atom, factor, value)

    def bound_below(self, atom: int, factor: Poly, value: Poly) -> None:
        """factor * atom >= value"""
        if factor == ONE and self.atoms.is_plain(value):
            self.atoms.positive.add(atom)
            if self.atoms.is_plain(value - 1):
                self.atoms.natural.add(atom)
        self._bound(self.atoms.bounds.lower, atom, factor, value)

    def _bound(self, side: dict[int, list[Bound]], atom: int, factor: Poly, value: Poly) -> None:
        strict = self.atoms.is_natural(factor) or self.holds(factor - 1)
        side.setdefault(atom, []).append(Bound(factor, value, strict))
        self.atoms.bounds.answers.clear()

    def holds(self, goal: Poly, facts: Iterable[Poly] = ()) -> bool:
        """goal >= 0 for all values of the atoms under which the facts hold."""
        if self.atoms.is_plain(goal):
            return True
        # One fact alone often is enough, and no search is needed to see that.
        facts = tuple(facts)
        if any(self.atoms.is_plain(goal - fact) or is_false(fact) for fact in facts):
            return True
        bounds = self.atoms.under(facts)
        try:
            for later in (False, True):  # few proofs need bounds by later atoms, all of them take longer with those
                with self.budget.question():
                    if Search(self.atoms, self.budget, bounds, later).proves(goal):
                        return True
        except TooLong:
            pass
        return False


def draw_up_to(last: int, random: Random) -> int:
    """One of 0 .. last, often an extreme."""
    return max(0, random.choice((0, last, last, random.randint(0, max(0, last)))))
