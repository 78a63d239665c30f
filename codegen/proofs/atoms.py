"""Atoms of polynomials and facts about them: bounds, definitions, and samples of values under which all facts hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from math import gcd
from random import Random
from typing import TypeAlias

from .polynomials import ONE, Coefficient, Monomial, Poly, Sample, text, value_at

SAMPLES = 64
"""A goal that is false for one of so many assignments is not worth a search for its proof."""
DRAWN = 8 * SAMPLES
"""Assignments of sizes that are drawn, of which the guards leave some."""
LANES = 1 << 20
"""Atoms from here on are lanes of a block, those from half as much on parts of them: bounded by everything else."""
FROM_ONE = 10
"""Longer products are not taken apart."""
Facts: TypeAlias = "tuple[Poly, ...]"
Draw: TypeAlias = "Callable[[Sample, Random], int]"
"""A value that an atom may have where the atoms before it have the sample's."""


@dataclass(frozen=True, slots=True)
class Bound:
    """factor * atom <= value, or >= value; `strict`: the factor is provably at least one."""

    factor: Poly
    value: Poly
    strict: bool


@dataclass(frozen=True, slots=True)
class Case:
    """Under `facts` (each >= 0) the atom is `value`."""

    value: Poly
    facts: Facts


@dataclass(frozen=True, slots=True)
class Division:
    """The atom is a quotient ("/") or remainder ("%") of x by d, both not negative, d positive."""

    kind: str
    x: Poly
    d: Poly
    quotient: int


@dataclass
class Bounds:
    """Bounds by atom, in layers: those that hold everywhere, and those that a branch or a mask adds."""

    parent: Bounds | None = None
    facts: Facts = ()  # of this layer and those below it, but for what holds everywhere
    upper: dict[int, list[Bound]] = field(default_factory=dict)
    lower: dict[int, list[Bound]] = field(default_factory=dict)
    answers: dict[tuple[Poly, bool], bool] = field(default_factory=dict)  # of goals that were searched for
    samples: list[Sample] = field(default_factory=list)  # values of all atoms under which every fact holds

    def uppers(self, atom: int) -> Iterator[Bound]:
        return chain.from_iterable(layer.upper.get(atom, ()) for layer in self._layers())

    def lowers(self, atom: int) -> Iterator[Bound]:
        return chain.from_iterable(layer.lower.get(atom, ()) for layer in self._layers())

    def _layers(self) -> Iterator[Bounds]:
        layer: Bounds | None = self
        while layer is not None:
            yield layer
            layer = layer.parent


class Atoms:
    """The atoms of one kernel: names, definitions, signs and bounds; whatever follows without a search."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.positive: set[int] = set()  # atoms that are never negative
        self.natural: set[int] = set()  # those that are at least one
        self.cases: dict[int, tuple[str, tuple[Case, ...]]] = {}  # atoms that are one of several: minima, choices
        self.divisions: dict[int, Division] = {}
        self.data: dict[int, str] = {}  # atoms that were read from memory, and whence
        self.bounds = Bounds(samples=[{} for _ in range(DRAWN)])
        self.products: list[Poly] = []  # facts that bound products of sums: s0 * (s1 - s2) <= 1000
        self._layers: dict[Facts, Bounds] = {(): self.bounds}
        self._random = Random(0)

    def add(self, name: str, draw: Draw, order: int = 0) -> int:
        """A new atom's number; `order`: the least that it may be."""
        number = order + len(self.names)
        self.names[number] = name
        for sample in self.bounds.samples:
            sample[number] = draw(sample, self._random)
        return number

    # ------------------------------------------------------------------ signs that need no search
    def is_plain(self, poly: Poly) -> bool:
        """poly >= 0 term by term: no coefficient is negative, nor any atom."""
        positive = self.positive
        for m, c in poly.terms.items():
            if c < 0:
                return False
            for a in m:
                if a not in positive and m.count(a) % 2:
                    return False
        return True

    def is_natural(self, poly: Poly) -> bool:
        """poly >= 1 term by term."""
        some = any(c >= 1 and self.natural.issuperset(m) for m, c in poly.terms.items())
        return some and self.is_plain(poly)

    def is_plain_from_one(self, poly: Poly) -> bool:
        """poly >= 0 term by term where atoms that are at least one are counted from there: s0 * s1 - s1, s0 - 1."""
        least = sum(c for m, c in poly.terms.items() if self.natural.issuperset(m))
        if least < 0 or self.is_plain(poly):
            return least >= 0
        return all(len(m) <= FROM_ONE for m in poly.terms) and self.is_plain(self._from_one(poly))

    def _from_one(self, poly: Poly) -> Poly:
        """The polynomial in a - 1 for each atom a that is at least one: 2^n terms of a product of n atoms."""
        terms: dict[Monomial, Coefficient] = {}
        for m, c in poly.terms.items():
            parts: list[Monomial] = [()]
            for a in m:
                parts = [*((*p, a) for p in parts), *(parts if a in self.natural else ())]
            for part in parts:
                terms[part] = terms.get(part, 0) + c
        return Poly({m: c for m, c in terms.items() if c})

    # ------------------------------------------------------------------ facts
    def assume(self, fact: Poly) -> None:
        """fact >= 0, everywhere."""
        self._add_fact(self.bounds, fact)
        if any(c < 0 and len(m) > 1 for m, c in fact.terms.items()):
            self.products.append(fact)
        self.keep_samples(lambda sample: value_at(fact, sample) >= 0)
        self.bounds.answers.clear()

    def keep_samples(self, holds: Callable[[Sample], bool]) -> None:
        self.bounds.samples = [s for s in self.bounds.samples if holds(s)]

    def keep_few_samples(self) -> None:
        """So many are enough, once the guards have excluded theirs."""
        del self.bounds.samples[SAMPLES:]

    def under(self, facts: Facts) -> Bounds:
        """The layer of facts that hold besides those that hold everywhere; one for each tuple of facts."""
        if facts not in self._layers:
            self._layers[facts] = self.layer(self.bounds, facts)
        return self._layers[facts]

    def layer(self, parent: Bounds, facts: Facts) -> Bounds:
        samples = [s for s in parent.samples if all(value_at(f, s) >= 0 for f in facts)]
        added = Bounds(parent, (*parent.facts, *facts), samples=samples)
        for fact in facts:
            self._add_fact(added, fact)
            if (whole := self._in_whole(added, fact)) is not None:
                self._add_fact(added, whole)
        return added

    def _in_whole(self, layer: Bounds, fact: Poly) -> Poly | None:
        """2 * x + lane - 2 >= 0 where lane <= 1  ->  x - 1 >= 0: what comes in twos, of what is more than 1/2."""
        if not all(isinstance(c, int) for c in fact.terms.values()):
            return None
        single = {m: int(c) for m, c in fact.terms.items() if len(m) == 1 and abs(c) == 1}
        rest = {m: int(c) for m, c in fact.terms.items() if m and m not in single}
        by = gcd(*rest.values())
        ends = [self._largest(layer, m[0], c) for m, c in single.items()]
        if by <= 1 or not ends or None in ends:
            return None
        most = int(fact.terms.get((), 0)) + sum(e for e in ends if e is not None)
        return Poly({m: c // by for m, c in rest.items()}) + most // by

    def _largest(self, layer: Bounds, atom: int, sign: int) -> int | None:
        """The most that an atom is, or what is least of it, negative; None where no number bounds it."""
        bounds = layer.uppers(atom) if sign > 0 else layer.lowers(atom)
        numbers = [sign * n for b in bounds if b.factor == ONE and isinstance(n := b.value.number, int)]
        return min(numbers, default=None)

    def _add_fact(self, layer: Bounds, fact: Poly) -> None:
        """As a bound of each of its atoms that it bounds; with a minimum, of both that it is the minimum of."""
        for atom in fact.atoms & self.cases.keys():
            kind, cases = self.cases[atom]
            parted = fact.linear(atom)
            if parted and kind != "choice" and self.is_plain(parted[0] if kind == "min" else -parted[0]):
                for case in cases:
                    self._add_fact(layer, fact.with_atom(atom, case.value))
        # The fact solved for each atom that is in it once, with a factor of a plain sign.
        for atom in fact.atoms:
            parted = fact.linear(atom)
            if parted is None:
                continue
            factor, remainder = parted
            if self.is_plain(factor):
                layer.lower.setdefault(atom, []).append(Bound(factor, -remainder, self.is_natural(factor)))
            elif self.is_plain(-factor):
                layer.upper.setdefault(atom, []).append(Bound(-factor, remainder, self.is_natural(-factor)))

    # ------------------------------------------------------------------ definitions
    def parts(self, atom: int) -> set[int]:
        """The atoms that an atom was made of."""
        inside: set[int] = set()
        for case in self.cases.get(atom, ("", ()))[1]:
            inside |= case.value.atoms.union(*(f.atoms for f in case.facts))
        if (division := self.divisions.get(atom)) is not None:
            inside |= division.x.atoms | division.d.atoms
        return inside

    def origins(self, poly: Poly) -> set[int]:
        """The atoms of a polynomial, and those that they were made of."""
        reached: set[int] = set()
        todo = list(poly.atoms)
        while todo:
            if (atom := todo.pop()) not in reached:
                reached.add(atom)
                todo += self.parts(atom)
        return reached

    def text(self, poly: Poly) -> str:
        return text(poly, lambda a: self.names.get(a, f"a{a}"))
