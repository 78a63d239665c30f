"""Stores of different programs do not meet: a place in memory tells which program writes it.

    offset = N * row + 256 * block + lane - shift    0 <= 256 * block + lane - shift < N  ->  the offset tells the row,
                                                     the row the shift, 0 <= lane < 256   ->  and then the block

Digit by digit, the one with the longest step first. Behind a counter only the last program to arrive stores: there the
place has to tell the counter. Atomic additions are meant to meet; so are words that many programs find alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .bounds import LANES, World
from .claims import Fault, Subject, multiple
from .polynomials import ONE, ZERO, Poly
from .reading import Access, origins, parts_of


def overlaps(subject: Subject) -> tuple[int, list[Fault]]:
    """(stores that no two programs share or that write the same, those of which that was not proved)."""
    stores = [a for a in subject.read.accesses if a.kind == "store"]
    apart, faults = 0, list[Fault]()
    if subject.reader.programs == ONE:
        return len(stores), faults
    groups: dict[tuple[str, tuple[object, ...]], list[Access]] = {}
    for store in stores:
        groups.setdefault((store.pointer, store.tickets), []).append(store)
    for group in groups.values():
        if _are_apart(subject, group):
            apart += len(group)
        else:
            faults += [Fault("overlap", a.line, a.text) for a in group]
    return apart, faults


def _are_apart(subject: Subject, group: Sequence[Access]) -> bool:
    """The places of all of these stores tell the program, by the same digits; or else what is stored there."""
    varying = Varying(subject)
    numbers = [varying.digits(a) for a in group]
    if any(n is None for n in numbers):
        return False
    found = [n for n in numbers if n is not None]
    if any(set(n.steps.values()) != set(found[0].steps.values()) for n in found):
        return False
    while (step := _told_next(subject.world, found)) is not None:
        for n in found:
            n.tell(varying, step)
    pairs = list(zip(found, group, strict=True))
    if all(varying.tells_program(n, access) for n, access in pairs):
        return True
    (number, store), *others = pairs
    return not others and not number.open and varying.tells_value(number, store)


def _told_next(world: World, numbers: Sequence[Number]) -> Poly | None:
    """A step that is longer than all that is below it, in each of the numbers."""
    steps = dict.fromkeys(numbers[0].open.values())
    for step in sorted(steps, key=lambda s: len(s.atoms), reverse=True):
        if all(n.is_longest(world, step) for n in numbers):
            return step
    return None


@dataclass
class Number:
    """rest + sum of step * atom: steps and rest are the same in all programs, or known."""

    access: Access
    rest: Poly
    steps: dict[int, Poly]  # by atom, positive
    signs: dict[int, int]
    known: set[int]
    open: dict[int, Poly]  # not yet told

    def is_longest(self, world: World, step: Poly) -> bool:
        """0 <= everything else < step, from a place that is the same for all."""
        if list(self.open.values()).count(step) != 1:
            return False
        others = ZERO
        for atom, own in self.open.items():
            if own != step:
                others = others + own * Poly.atom(atom) * self.signs[atom]
        told = ZERO
        for atom in set(self.steps) - set(self.open):
            told = told + self.steps[atom] * Poly.atom(atom) * self.signs[atom]
        for below in dict.fromkeys((others, others + told, others + self.rest, others + self.rest + told)):
            for place in (below, below + step - 1):
                if world.holds(place, self.access.facts) and world.holds(step - 1 - place, self.access.facts):
                    return True
        return False

    def tell(self, varying: Varying, step: Poly) -> None:
        self.known |= {a for a, s in self.open.items() if s == step}
        varying.close(self.known)
        self.open = {a: s for a, s in self.open.items() if a not in self.known}


class Varying:
    """Which atoms differ between programs, turns and lanes, and what tells what."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.world, self.program = subject, subject.world, subject.read.program
        self.items: dict[int, Poly] = {}  # an item, as start + step * a number of its own
        self.access: Access | None = None  # whose facts hold
        self._inside: set[Poly] = set()

    def is_varying(self, atom: int) -> bool:
        """A program, a turn, a lane, or made of them."""
        first = {self.program, *self.subject.read.spans}
        own = origins(self.world, Poly.atom(atom))
        return any(a in first or a in self.world.data or a >= LANES // 2 for a in own)

    # ------------------------------------------------------------------ numbers
    def digits(self, access: Access) -> Number | None:
        """The offset as a number in digits; None where it is none."""
        self.access = access
        offset = self._in_turns(access.offset, access)
        varying = {a for a in offset.atoms if self.is_varying(a)}
        rest, steps, signs = offset, dict[int, Poly](), dict[int, int]()
        for atom in varying:
            parted = rest.linear(atom)
            if parted is None or parted[0].atoms & varying:
                return None
            step, rest = parted
            sign = 1 if self.world.holds(step) else -1
            if not self.world.holds(step * sign):
                return None
            steps[atom], signs[atom] = step * sign, sign
        return Number(access, rest, steps, signs, set(), dict(steps))

    def _in_turns(self, offset: Poly, access: Access) -> Poly:
        """An item that is one of a loop's, in another order: start + step * a number of its own."""
        for atom in sorted(offset.atoms, reverse=True):
            if atom not in self.world.cases or not self.is_varying(atom):
                continue
            for turn, (start, stop) in self.subject.read.spans.items():
                step = self.subject.read.steps[turn]
                if turn in origins(self.world, Poly.atom(atom)) and self._is_turn(atom, start, stop, step, access):
                    name = f"{self.world.names[atom]}'"
                    own = self.world.atom(name, lambda s, _, t=turn: s[t], 0)  # type: ignore[misc]
                    self.world.bound_above(own.top, step, stop - start - 1)
                    self.items[atom] = start + own * step
                    offset = offset.with_atom(atom, self.items[atom])
                    self.subject.read.spans[own.top] = start, stop
                    self.subject.read.steps[own.top] = step
                    return offset
        return offset

    def _is_turn(self, atom: int, start: Poly, stop: Poly, step: Poly, access: Access) -> bool:
        value, n = Poly.atom(atom), step.number
        inside = self.world.holds(value - start, access.facts) and self.world.holds(stop - 1 - value, access.facts)
        return inside and isinstance(n, int) and multiple(self.world, value - start, n)

    # ------------------------------------------------------------------ what tells what
    def close(self, known: set[int]) -> None:
        """Add what follows from what is known."""
        while True:
            more = {a for a in self.world.names if a not in known and self._follows(a, known)}
            more |= self._dividends(known) - known
            if not more:
                return
            known |= more

    def _same(self, poly: Poly, known: set[int]) -> bool:
        return all(a in known or not self.is_varying(a) for a in poly.atoms)

    def _follows(self, atom: int, known: set[int]) -> bool:
        """Made of what is known."""
        if atom in self.items:
            return self._same(self.items[atom], known)
        if (division := self.world.divisions.get(atom)) is not None:
            return self._same(division.x, known) and self._same(division.d, known)
        cases = self.world.cases.get(atom, ("", ()))[1]
        return bool(cases) and all(self._same(p, known) for c in cases for p in (c.value, *c.facts))

    def _dividends(self, known: set[int]) -> set[int]:
        """Quotient and remainder tell what was divided, and with it the one atom of it that was unknown."""
        found: set[int] = set()
        pairs: dict[tuple[Poly, Poly], int] = {}
        for atom, division in self.world.divisions.items():
            if atom in known and self._same(division.d, known):
                pairs[division.x, division.d] = pairs.get((division.x, division.d), 0) + 1
        for (x, _), count in pairs.items():
            left = [a for a in x.atoms if a not in known and self.is_varying(a)]
            if count == 2 and len(left) == 1 and (parted := x.linear(left[0])) is not None:
                found |= {left[0]} if self._same(parted[0], known) and self.world.holds(parted[0] - 1) else set()
            elif count == 2 and left and x not in self._inside:
                found |= self._told_by(x, known)
        return found

    def _told_by(self, x: Poly, known: set[int]) -> set[int]:
        """What a known number tells, digit by digit."""
        assert self.access is not None
        self._inside.add(x)
        number = self.digits(replace(self.access, offset=x))
        if number is not None:
            while (step := _told_next(self.world, [number])) is not None:
                number.tell(self, step)
        self._inside.discard(x)
        return number.known if number is not None else set()

    def tells_program(self, number: Number, access: Access) -> bool:
        """The program, or behind a counter which one it is, is known."""
        known = set(number.known)
        self.close(known)
        if access.tickets:
            return self._same(access.tickets[-1].offset, known)
        return self.program is not None and self.program in known

    def tells_value(self, number: Number, store: Access) -> bool:
        """Whoever stores there stores the same: what the value is made of is known, over lanes and turns that are."""
        known = set(number.known)
        self.close(known)
        stem = store.pointer.removesuffix("_ptr")  # a word that is there already is this one
        known |= {a for a, name in self.world.data.items() if name == stem}
        reader, names, todo = self.subject.reader, set[str](), list(store.stored)
        while todo:
            if (name := todo.pop()) in names:
                continue
            names.add(name)
            atoms = reader.places.get(name, set())
            if not all(self._is_alike(a, known) for a in atoms):
                return False
            todo += () if atoms else reader.made_of.get(name, ())
        return True

    def _is_alike(self, atom: int, known: set[int]) -> bool:
        """The same in every program, or one of what every program goes through."""
        if atom in known or not self.is_varying(atom):
            return True
        if (span := self.subject.read.spans.get(atom)) is not None:
            return all(self._same(p, known) for p in span)
        own = parts_of(self.world, atom)
        return atom >= LANES or (bool(own) and all(self._is_alike(a, known) for a in own))
