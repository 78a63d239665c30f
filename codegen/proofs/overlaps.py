"""Stores of different programs do not meet: a place in memory tells which program writes it.

    offset = N * row + 256 * block + lane - shift    0 <= 256 * block + lane - shift < N  ->  the offset tells the row,
                                                     the row the shift, 0 <= lane < 256   ->  and then the block

Digit by digit, the one with the longest step first. Behind a counter only the last program to arrive stores: there the
place has to tell the counter. Atomic additions are meant to meet; so are words that many programs find alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .arithmetic import is_multiple
from .atoms import LANES
from .bounds import World
from .claims import Fault, Subject
from .polynomials import ONE, ZERO, Poly
from .reading import Access


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
    numbers = [n for a in group if (n := varying.digits(a)) is not None]
    if len(numbers) < len(group) or any(set(n.steps.values()) != set(numbers[0].steps.values()) for n in numbers):
        return False
    while (step := longest_step(subject.world, numbers)) is not None:
        for number in numbers:
            number.determine(varying, step)
    pairs = list(zip(numbers, group, strict=True))
    if all(varying.determines_program(number, store) for number, store in pairs):
        return True
    number, store = pairs[0]
    return len(pairs) == 1 and not number.open and varying.determines_value(number, store)


def longest_step(world: World, numbers: Sequence[Number]) -> Poly | None:
    """A step that is longer than all that is below it, in each of the numbers."""
    steps = dict.fromkeys(numbers[0].open.values())
    for step in sorted(steps, key=lambda s: len(s.atoms), reverse=True):
        if all(n.is_longest(world, step) for n in numbers):
            return step
    return None


@dataclass
class Number:
    """constant + sum of step * atom: steps and constant are the same in all programs, or determined."""

    access: Access
    constant: Poly
    steps: dict[int, Poly]  # by atom, positive
    signs: dict[int, int]
    determined: set[int]
    open: dict[int, Poly]  # not yet determined

    def is_longest(self, world: World, step: Poly) -> bool:
        """0 <= everything else < step, from a place that is the same for all."""
        if list(self.open.values()).count(step) != 1:
            return False
        below = self._sum(a for a, own in self.open.items() if own != step)
        above = self._sum(set(self.steps) - set(self.open))
        sums = (below, below + above, below + self.constant, below + self.constant + above)
        # where a digit below counts down, its first value is the largest
        down = [step - own for atom, own in self.open.items() if own != step and self.signs[atom] < 0]
        for total in dict.fromkeys(sums):
            for place in (total, total + step - 1, *(total + first for first in down)):
                if world.holds(place, self.access.facts) and world.holds(step - 1 - place, self.access.facts):
                    return True
        return False

    def _sum(self, atoms: Iterable[int]) -> Poly:
        total = ZERO
        for atom in atoms:
            total = total + self.steps[atom] * Poly.atom(atom) * self.signs[atom]
        return total

    def determine(self, varying: Varying, step: Poly) -> None:
        """The place determines the digit of this step, and with it what follows from the digit."""
        self.determined |= {a for a, s in self.open.items() if s == step}
        varying.close(self.determined)
        self.open = {a: s for a, s in self.open.items() if a not in self.determined}


class Varying:
    """Which atoms differ between programs, turns and lanes, and which atoms determine which."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.world, self.atoms = subject, subject.world, subject.world.atoms
        self.items: dict[int, Poly] = {}  # an item, as start + step * a number of its own
        self.access: Access | None = None  # whose facts hold
        self._inside: set[Poly] = set()  # dividends of which the digits are looked at

    def is_varying(self, atom: int) -> bool:
        """A program, a turn, a lane, or made of them."""
        first = {self.subject.read.program, *self.subject.read.spans}
        origins = self.atoms.origins(Poly.atom(atom))
        return any(a in first or a in self.atoms.data or a >= LANES // 2 for a in origins)

    # ------------------------------------------------------------------ numbers
    def digits(self, access: Access) -> Number | None:
        """The offset as a number in digits; None where it is none."""
        self.access = access
        offset = self._from_ends(self._in_turns(access.offset, access))
        varying = {a for a in offset.atoms if self.is_varying(a)}
        remainder, steps, signs = offset, dict[int, Poly](), dict[int, int]()
        # Each varying atom is one digit: linear, with a step that no other digit is in.
        for atom in varying:
            parted = remainder.linear(atom)
            if parted is None or parted[0].atoms & varying:
                return None
            step, remainder = parted
            sign = 1 if self.world.holds(step) else -1
            if not self.world.holds(step * sign):
                return None
            steps[atom], signs[atom] = step * sign, sign
        return Number(access, remainder, steps, signs, set(), dict(steps))

    def _in_turns(self, offset: Poly, access: Access) -> Poly:
        """An item that is one of a loop's, in another order: start + step * a number of its own."""
        read = self.subject.read
        for atom in sorted(offset.atoms, reverse=True):
            if atom not in self.atoms.cases or not self.is_varying(atom):
                continue
            for turn, (start, stop) in read.spans.items():
                step = read.steps[turn]
                if turn in self.atoms.origins(Poly.atom(atom)) and self._is_turn(atom, start, stop, step, access):
                    name = f"{self.atoms.names[atom]}'"
                    number = self.world.atom(name, lambda s, _, t=turn: s[t], 0)  # type: ignore[misc]
                    self.world.bound_above(number.top, step, stop - start - 1)
                    self.items[atom] = start + number * step
                    read.spans[number.top], read.steps[number.top] = (start, stop), step
                    return offset.with_atom(atom, self.items[atom])
        return offset

    def _from_ends(self, offset: Poly) -> Poly:
        """A turn that is counted from an end which is not always the same: the end less a number of its own."""
        read = self.subject.read
        for turn, (start, stop) in [*read.spans.items()]:
            ends = {a for a in stop.atoms & offset.atoms if self.is_varying(a)} if turn in offset.atoms else ()
            if not ends or read.steps[turn] != ONE:
                continue
            name = f"{self.atoms.names[turn]}'"
            number = self.world.atom(name, lambda s, _, t=turn: s[t], 0)  # type: ignore[misc]
            mirrored = offset.with_atom(turn, stop - 1 - number)
            if not mirrored.atoms & ends:
                self.world.bound_above(number.top, ONE, stop - start - 1)
                self.items[turn] = stop - 1 - number
                read.spans[number.top], read.steps[number.top] = (start, stop), ONE
                offset = mirrored
        return offset

    def _is_turn(self, atom: int, start: Poly, stop: Poly, step: Poly, access: Access) -> bool:
        value, n = Poly.atom(atom), step.number
        inside = self.world.holds(value - start, access.facts) and self.world.holds(stop - 1 - value, access.facts)
        return inside and isinstance(n, int) and is_multiple(self.world, value - start, n)

    # ------------------------------------------------------------------ what follows from determined atoms
    def close(self, determined: set[int]) -> None:
        """Add what follows from what is determined."""
        while True:
            more = {a for a in self.atoms.names if a not in determined and self._follows(a, determined)}
            more |= self._dividends(determined) - determined
            if not more:
                return
            determined |= more

    def _is_same(self, poly: Poly, determined: set[int]) -> bool:
        return all(a in determined or not self.is_varying(a) for a in poly.atoms)

    def _follows(self, atom: int, determined: set[int]) -> bool:
        """Made of what is determined."""
        if atom in self.items:
            return self._is_same(self.items[atom], determined)
        if (division := self.atoms.divisions.get(atom)) is not None:
            return self._is_same(division.x, determined) and self._is_same(division.d, determined)
        cases = self.atoms.cases.get(atom, ("", ()))[1]
        return bool(cases) and all(self._is_same(p, determined) for c in cases for p in (c.value, *c.facts))

    def _dividends(self, determined: set[int]) -> set[int]:
        """Quotient and remainder determine what was divided, and with it the one atom of it that was open."""
        divisions = ((a, d) for a, d in self.atoms.divisions.items() if a in determined)
        pairs = Counter((d.x, d.d) for _, d in divisions if self._is_same(d.d, determined))
        atoms: set[int] = set()
        for x in (x for (x, _), count in pairs.items() if count == 2):
            open_ = [a for a in x.atoms if a not in determined and self.is_varying(a)]
            if len(open_) == 1 and (parted := x.linear(open_[0])) is not None:
                exact = self._is_same(parted[0], determined) and self.world.holds(parted[0] - 1)
                atoms |= {open_[0]} if exact else set()
            elif open_ and x not in self._inside:
                atoms |= self._digits_of(x)
        return atoms

    def _digits_of(self, x: Poly) -> set[int]:
        """The atoms that a number determines, digit by digit."""
        assert self.access is not None
        self._inside.add(x)
        number = self.digits(replace(self.access, offset=x))
        if number is not None:
            while (step := longest_step(self.world, [number])) is not None:
                number.determine(self, step)
        self._inside.discard(x)
        return number.determined if number is not None else set()

    # ------------------------------------------------------------------ answers
    def determines_program(self, number: Number, access: Access) -> bool:
        """The program, or behind a counter which one it is, is determined."""
        determined = set(number.determined)
        self.close(determined)
        if access.tickets:
            return self._is_same(access.tickets[-1].offset, determined)
        determined |= self._fixed(access)
        self.close(determined)
        program = self.subject.read.program
        return program is not None and program in determined

    def _fixed(self, access: Access) -> set[int]:
        """What a condition leaves one value: that of the last chunk of time, whose programs store how it ends."""
        return {a for fact in access.facts for a in fact.atoms if self._is_fixed(a, fact, access)}

    def _is_fixed(self, atom: int, fact: Poly, access: Access) -> bool:
        """0 <= atom - number, and no atom is larger."""
        parted = fact.linear(atom)
        return (
            parted is not None and parted[0] == ONE and self.is_varying(atom)
            and not any(self.is_varying(a) for a in parted[1].atoms) and self.world.holds(-fact, access.facts)
        )  # fmt: skip

    def determines_value(self, number: Number, store: Access) -> bool:
        """All programs that store there store the same: the value is made of determined atoms, over lanes and turns."""
        determined = set(number.determined)
        self.close(determined)
        # From the names in the stored value back to those that they were made of.
        stem = store.pointer.removesuffix("_ptr")  # a word that is there already is this one
        determined |= {a for a, name in self.atoms.data.items() if name == stem}
        reader, names, todo = self.subject.reader, set[str](), list(store.stored)
        while todo:
            if (name := todo.pop()) in names:
                continue
            names.add(name)
            atoms = reader.places.get(name, set())
            if not all(self._is_alike(a, determined) for a in atoms):
                return False
            # floats, and integers that are read or counted, are what they are made of
            todo += reader.made_of.get(name, ()) if not atoms or any(map(self._is_of_data, atoms)) else ()
        return True

    def _is_alike(self, atom: int, determined: set[int]) -> bool:
        """The same in every program, or one of what every program goes through; data is judged by its names."""
        if atom in determined or not self.is_varying(atom):
            return True
        if atom in self.atoms.data:
            return self.atoms.data[atom] not in self._counted
        if (span := self.subject.read.spans.get(atom)) is not None:
            return all(self._is_same(p, determined) for p in span)
        parts = self.atoms.parts(atom)
        return atom >= LANES or (bool(parts) and all(self._is_alike(a, determined) for a in parts))

    @cached_property
    def _counted(self) -> set[str]:
        """Words that programs change in turn: each finds another one there."""
        return {a.pointer.removesuffix("_ptr") for a in self.subject.read.accesses if a.kind == "atomic"}

    def _is_of_data(self, atom: int) -> bool:
        return not self.atoms.data.keys().isdisjoint(self.atoms.origins(Poly.atom(atom)))
