"""The deepest loop that a value depends on: it is computed in that loop's body, outside all others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ...program.axes import SCANS, Axis, Term, terms_below
from ..context import FINISH, Context
from .coordinates import Coordinates


class Levels:
    """Levels of terms, kept while no coordinate changes. `finishing`: the last program computes all that it needs."""

    def __init__(self, context: Context, coords: Coordinates) -> None:
        self._context, self._coords = context, coords
        self._cached: dict[Term, int] = {}
        self.finishing = False

    def of(self, term: Term) -> int:
        """The level of a term; those below it first, which may be many, one below the other."""
        if term not in self._cached:
            below = [term] if self.finishing else terms_below([term], self._cached)
            for other in (t for t in below if t not in self._cached):
                self._cached[other] = self._level(other)
        return self._cached[term]

    def of_axis(self, axis: Axis) -> int:
        """The level of the loop that sets the coordinate."""
        return self._coords[axis].level if axis in self._coords and not self.finishing else FINISH

    def deepest(self, terms: Iterable[Term], axes: Iterable[Axis]) -> int:
        """The level at which all of these stand."""
        return max([*map(self.of, terms), *map(self.of_axis, axes)], default=0)

    def fix(self, term: Term, level: int) -> None:
        """Set the level of a term that a loop of its own computes."""
        self._cached[term] = level

    def clear(self) -> None:
        """Coordinates have changed."""
        self._cached.clear()

    @contextmanager
    def in_last_program(self) -> Iterator[None]:
        """Values that are emitted meanwhile belong to the program that finishes."""
        self.finishing = True
        self.clear()
        yield
        self.finishing = False
        self.clear()

    def _level(self, term: Term) -> int:
        if self.finishing:
            return FINISH
        plan, body = self._context.plan, self._context.body
        levels = [self.of(a) for a in term.args]
        if term in plan.after_final:
            return FINISH
        # A reduction along chunks is complete behind their loops
        if plan.chunked and term in plan.inner:
            return body.level
        # Values along the row that every turn of the walk reads again: held, they would fill the registers
        if term.op == "load" and not plan.hoisted and term.axes & set(plan.row):
            levels.append(body.level)
        if term.op in ("load", "index"):
            place = term.param.place if term.op == "load" else term.param
            levels += [self.of_axis(a) for a in place.walked]
        if term.op == "spread" or term.op in SCANS:
            levels += [self.of_axis(a) for a in term.param]
        return max(levels, default=0)
