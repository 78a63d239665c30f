"""Proofs that a polynomial is not negative: elimination, the last atom first.

    goal  remainder - c * v >= 0   with   d * v <= u     <-   (d * remainder - c * u + d - 1) >= 0

c, d > 0, all of them integers. Every answer "yes" is a proof; "no" only says that none was found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import count
from math import gcd

from .atoms import Atoms, Bound, Bounds
from .polynomials import (
    ONE,
    ZERO,
    Monomial,
    Poly,
    common_atoms,
    contains,
    content,
    divide_by_atoms,
    exact_quotient,
    is_integral,
    value_at,
    without,
)

STEPS = 600
"""How many goals one question may lead to."""
ALL_STEPS = 100_000
"""How many all questions about one kernel may lead to: what is asked after that is not searched for."""
DEPTH = 24
SIGN_DEPTH = 6
"""What asking for the sign of a factor costs of the depth; below so much of it, none is asked for."""
SPLIT = 6
"""What looking at cases costs, in terms of a goal."""
LARGEST = 2**256
"""Sizes and offsets have 64 bits, few of them are multiplied: a search with greater coefficients goes in circles."""


class Budget:
    """Steps that a search may still take: for one question, and for all about one kernel."""

    def __init__(self) -> None:
        self._question = 0
        self._kernel = ALL_STEPS

    def take(self) -> bool:
        """Take a step; False where none is left."""
        if self._question <= 0 or self._kernel <= 0:
            return False
        self._question -= 1
        self._kernel -= 1
        return True

    @contextmanager
    def question(self) -> Iterator[None]:
        """Within the block: one question, which may be part of another one."""
        outer, self._question = self._question, STEPS
        try:
            yield
        finally:
            self._question = outer

    @contextmanager
    def at_most(self, steps: int) -> Iterator[None]:
        """Within the block: questions that may lead to so many goals together."""
        withheld = max(0, self._kernel - steps)
        self._kernel -= withheld
        try:
            yield
        finally:
            self._kernel += withheld


class Search:
    """Proves goals from one layer of bounds; `later`: by bounds with later atoms than the bounded one, too."""

    def __init__(self, atoms: Atoms, budget: Budget, bounds: Bounds, later: bool) -> None:
        self.atoms, self.budget, self.bounds, self.later = atoms, budget, bounds, later

    def proves(self, goal: Poly, depth: int = 0) -> bool:
        """By any way down from the goal, the simplest goals first."""
        goal = self._without_common_factor(goal)
        answer = self._answer(goal)
        if answer is not None or depth > DEPTH:
            return bool(answer)
        key = goal, self.later
        self.bounds.answers[key] = False  # a goal that leads to itself is not proved by that
        self.bounds.answers[key] = proved = self._proves_each_term(goal, depth) or self._search(goal, depth)
        return proved

    def _search(self, goal: Poly, depth: int) -> bool:
        # A queue of goals, each of which is enough, and of goals to be parted by the cases of an atom.
        queue: list[tuple[int, int, Poly, int]] = [(0, 0, goal, -1)]
        visited, turn = {goal}, count(1)
        while queue and self.budget.take():
            _, _, current, atom = heappop(queue)
            if atom >= 0:
                if self._holds_in_cases(current, atom, depth):
                    return True
                continue
            # Goals with less of an atom: one that is seen to hold ends the search, one that fails leads nowhere.
            for subgoal in map(self._without_common_factor, self._subgoals(current, depth)):
                if subgoal in visited or not has_readable_coefficients(subgoal):
                    continue
                visited.add(subgoal)
                answer = self._answer(subgoal)
                if answer:
                    return True
                if answer is None:
                    heappush(queue, (_cost(subgoal), next(turn), subgoal, -1))
            # Cases multiply the goals: they come after elimination, at a price.
            for pivot in _pivots(current):
                if self._is_worth_cases(current, pivot, depth):
                    heappush(queue, (_cost(current) + SPLIT, next(turn), current, pivot))
        return False

    def _proves_each_term(self, goal: Poly, depth: int) -> bool:
        """Of a sum without a difference: that no term with an atom of unknown sign, as a quotient, is negative."""
        if len(goal.terms) == 1 or any(c < 0 for c in goal.terms.values()):
            return False
        terms = (Poly({m: c}) for m, c in goal.terms.items())
        return all(self.atoms.is_plain(term) or self.proves(term, depth + 1) for term in terms)

    def _answer(self, goal: Poly) -> bool | None:
        """The answer that takes no search; None where there is none."""
        if self.atoms.is_plain(goal):
            return True
        if (n := goal.number) is not None:
            return n >= 0
        if (goal, self.later) in self.bounds.answers:
            return self.bounds.answers[goal, self.later]
        if self.atoms.is_plain_from_one(goal):
            return True
        return False if any(value_at(goal, s) < 0 for s in self.bounds.samples) else None

    def _without_common_factor(self, goal: Poly) -> Poly:
        """The same question without a common factor."""
        n = content(goal)
        if n > 1:
            terms = {m: c // n for m, c in goal.terms.items()}
            goal = Poly({m: c for m, c in terms.items() if c})
        shared = common_atoms(goal) if any(c > 0 for c in goal.terms.values()) else ()  # -a >= 0 where a is zero
        return divide_by_atoms(goal, shared) if shared and self.atoms.positive.issuperset(shared) else goal

    # ------------------------------------------------------------------ elimination
    def _subgoals(self, goal: Poly, depth: int) -> Iterator[Poly]:
        """Goals each of which is enough for this one."""
        for atom in _pivots(goal):
            if (parted := goal.linear(atom)) is not None:
                factor, remainder = parted
                yield from self._eliminations(factor, remainder, atom, self._sign(factor, depth))
        harmful = [m for m, c in goal.terms.items() if m and c < 0]
        for fact in self.atoms.products if harmful else ():
            if (difference := self._less_by(goal, harmful, fact)) is not None:
                yield difference

    def _less_by(self, goal: Poly, harmful: list[Monomial], fact: Poly) -> Poly | None:
        """n * goal - m * fact, without the longest product that does harm in both, or of which the fact has more."""
        both = [(m, f) for f, c in fact.terms.items() if f and c < 0 for m in harmful if self._is_part(m, f)]
        if not both:
            return None
        longest, whole = max(both, key=lambda pair: (len(pair[0]), pair))
        n, m = -fact.terms[whole], -goal.terms[longest]
        if not isinstance(n, int) or not isinstance(m, int):
            return None
        difference = goal * n - fact * m
        return difference if longest == whole else difference + Poly({longest: n * m, whole: -n * m})

    def _is_part(self, monomial: Monomial, product: Monomial) -> bool:
        """The product is the monomial, or that times what is at least one."""
        if monomial == product:
            return True
        if len(monomial) >= len(product) or not contains(product, monomial):
            return False
        return self.atoms.positive.issuperset(monomial) and self.atoms.natural.issuperset(without(product, monomial))

    def _eliminations(self, factor: Poly, remainder: Poly, atom: int, sign: int) -> Iterator[Poly]:
        """Goals that are enough for factor * atom + remainder >= 0, with less of the atom."""
        harm = Poly({m: c for m, c in factor.terms.items() if c < 0})
        mixed = harm if sign <= 0 and len(harm.terms) < len(factor.terms) and self.atoms.is_plain(-harm) else ZERO
        for bound in self.bounds.lowers(atom) if sign > 0 else self.bounds.uppers(atom):
            if not self.later and any(a > atom for a in bound.value.atoms | bound.factor.atoms):
                continue
            if sign and (subgoal := _eliminate(factor, remainder, bound)) is not None:
                yield subgoal
            if mixed.terms and (times := _quotients_of_terms(harm, bound.factor)).terms:
                yield remainder + times * bound.value + (factor - times * bound.factor) * Poly.atom(atom)

    def _sign(self, factor: Poly, depth: int) -> int:
        """1 or -1 where the factor provably is not negative or not positive, else 0."""
        if self.atoms.is_plain_from_one(factor):
            return 1
        if self.atoms.is_plain_from_one(-factor):
            return -1
        if depth > SIGN_DEPTH:
            return 0
        if self.proves(factor, depth + SIGN_DEPTH):
            return 1
        return -1 if self.proves(-factor, depth + SIGN_DEPTH) else 0

    # ------------------------------------------------------------------ cases
    def _is_worth_cases(self, goal: Poly, atom: int, depth: int) -> bool:
        """It may help to look at the values that the atom has, case by case."""
        if atom not in self.atoms.cases:
            return False
        kind = self.atoms.cases[atom][0]
        if kind == "choice" or (parted := goal.linear(atom)) is None:
            return True
        sign = self._sign(parted[0], depth)
        return not sign or (kind == "min") == (sign > 0)

    def _holds_in_cases(self, goal: Poly, atom: int, depth: int) -> bool:
        """In each case; what is known of the atom is known of its value, which may exclude the case."""
        known = [fact for fact in self.bounds.facts if atom in fact.atoms]
        for case in self.atoms.cases[atom][1]:
            facts = (*case.facts, *(fact.with_atom(atom, case.value) for fact in known))
            if any(map(is_false, facts)):
                continue
            inside = Search(self.atoms, self.budget, self.atoms.layer(self.bounds, facts), self.later)
            if not inside.proves(goal.with_atom(atom, case.value), depth + 1):
                return False
        return True


def is_false(fact: Poly) -> bool:
    """Never the case, so that anything follows."""
    return (number := fact.number) is not None and number < 0


def has_readable_coefficients(goal: Poly) -> bool:
    """Its coefficients are such as a proof may have."""
    return all(-LARGEST < c < LARGEST for c in goal.terms.values())


def _cost(goal: Poly) -> int:
    """The length of a goal."""
    return sum(1 + len(m) for m in goal.terms)


def _pivots(goal: Poly) -> dict[int, None]:
    """The last atom, and the last that does harm; where that is the same, the harmful one before it."""
    harmful = sorted({m[-1] for m, c in goal.terms.items() if c < 0 and m})
    worst = harmful.pop() if harmful else goal.top
    return dict.fromkeys((goal.top, *(harmful[-1:] if worst == goal.top else (worst,))))


def _eliminate(factor: Poly, remainder: Poly, bound: Bound) -> Poly | None:
    """factor * atom + remainder >= 0 by a bound of the atom on the side that matters."""
    if bound.factor == ONE:
        return remainder + factor * bound.value
    if (times := exact_quotient(factor, bound.factor)) is not None:
        return remainder + times * bound.value
    if not bound.strict:
        return None
    # Between integers a strict inequality leaves bound.factor - 1 to spare.
    slack = bound.factor - 1 if is_integral(factor) and is_integral(remainder) else ZERO
    if len(factor.terms) == len(bound.factor.terms) == 1 and factor.terms.keys() == bound.factor.terms.keys():
        (n,), (m,) = factor.terms.values(), bound.factor.terms.values()
        if isinstance(n, int) and isinstance(m, int):  # by no more than is needed
            shared = gcd(n, m)
            times, by = Poly.of(n // shared), m // shared
            return remainder * by + times * bound.value + (by - 1 if slack.terms else 0)
    return remainder * bound.factor + factor * bound.value + slack


def _quotients_of_terms(poly: Poly, divisor: Poly) -> Poly:
    """The sum of the quotients of those terms that can be divided."""
    if len(divisor.terms) != 1:
        return exact_quotient(poly, divisor) or ZERO
    total = ZERO
    for m, c in poly.terms.items():
        total = total + (exact_quotient(Poly({m: c}), divisor) or ZERO)
    return total
