"""What is known about atoms, and whether a polynomial is provably not negative: elimination, the last atom first.

    goal  rest - c * v >= 0   with   d * v <= u     <-   (d * rest - c * u + d - 1) >= 0         c, d > 0, all integers

A quotient q = x // d is an atom with d * q <= x; a minimum one that is at most either, and is either. Every answer
"yes" is a proof; "no" only says that none was found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import gcd
from random import Random
from typing import TypeAlias

from .polynomials import ONE, ZERO, Coefficient, Poly, TooLong

STEPS = 600
"""How many goals one question may lead to."""
ALL_STEPS = 100_000
"""How many all questions about one kernel may lead to: what is asked after that is not searched for."""
DEPTH = 24
TOPS = 12
"""So many expressions that are at least another one are looked at for one that a division leaves nothing of."""
SPLIT = 6
"""What looking at cases costs, in terms of a goal."""
SAMPLES = 32
"""A goal that is false for one of so many assignments is not worth a search for its proof."""
LANES = 1 << 20
"""Atoms from here on are lanes of a block, those from half as much on parts of them: bounded by everything else."""


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
    facts: tuple[Poly, ...]


@dataclass(frozen=True, slots=True)
class Division:
    """What an atom is: quotient or remainder of x by d, both not negative, d positive."""

    kind: str
    x: Poly
    d: Poly


Sample: TypeAlias = "dict[int, int]"
Chosen: TypeAlias = "Callable[[Sample, Random], int]"


@dataclass
class Known:
    """Bounds by atom, in layers: what holds everywhere, and what a branch or a mask adds."""

    parent: Known | None = None
    upper: dict[int, list[Bound]] = field(default_factory=dict)
    lower: dict[int, list[Bound]] = field(default_factory=dict)
    memo: dict[tuple[Poly, bool], bool] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)  # values of all atoms under which everything known holds

    def uppers(self, atom: int) -> Iterator[Bound]:
        layer: Known | None = self
        while layer is not None:
            yield from layer.upper.get(atom, ())
            layer = layer.parent

    def lowers(self, atom: int) -> Iterator[Bound]:
        layer: Known | None = self
        while layer is not None:
            yield from layer.lower.get(atom, ())
            layer = layer.parent


Facts: TypeAlias = "tuple[Poly, ...]"


class World:
    """Atoms, their names and what they are."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.positive: set[int] = set()  # atoms that are never negative
        self.natural: set[int] = set()  # those that are at least one
        self.cases: dict[int, tuple[str, tuple[Case, ...]]] = {}  # atoms that are one of several: minima, choices
        self.divisions: dict[int, Division] = {}
        self.data: dict[int, str] = {}  # atoms that were read from memory, and whence
        self.known = Known(samples=[{} for _ in range(SAMPLES)])
        self._random = Random(0)
        self._layers: dict[Facts, Known] = {(): self.known}
        self._made: dict[object, Poly] = {}
        self._turns: list[tuple[int, Poly, Poly]] = []
        self._left = ALL_STEPS
        self._mixed: list[Poly] = []  # facts that bound products of sums: s0 * (s1 - s2) <= 1000
        self._count = 0
        self._steps = 0

    # ------------------------------------------------------------------ atoms
    def atom(
        self, name: str, chosen: Chosen, least: int | None = None, most: Poly | int | None = None, order: int = 0
    ) -> Poly:
        """A new one; `chosen`: a value that it has where the other atoms have theirs."""
        number = order + self._count
        self._count += 1
        self.names[number] = name
        for sample in self.samples:
            sample[number] = chosen(sample, self._random)
        made = Poly.atom(number)
        if least is not None:
            self.bound_below(number, ONE, Poly.of(least))
        if most is not None:
            self.bound_above(number, ONE, Poly.of(most))
        return made

    def bound_above(self, atom: int, factor: Poly, value: Poly) -> None:
        self.known.upper.setdefault(atom, []).append(Bound(factor, value, self.is_strict(factor)))
        self.known.memo.clear()

    def bound_below(self, atom: int, factor: Poly, value: Poly) -> None:
        if factor == ONE and self._plainly(value):
            self.positive.add(atom)
            if self._plainly(value - 1):
                self.natural.add(atom)
        self.known.lower.setdefault(atom, []).append(Bound(factor, value, self.is_strict(factor)))
        self.known.memo.clear()

    def is_strict(self, factor: Poly) -> bool:
        """At least one."""
        return self._is_natural(factor) or self.holds(factor - 1)

    def _is_natural(self, factor: Poly) -> bool:
        """At least one, plainly."""
        some = any(c >= 1 and self.natural.issuperset(m) for m, c in factor.terms.items())
        return some and self._plainly(factor)

    def assume(self, fact: Poly) -> None:
        """fact >= 0, everywhere."""
        self._add(self.known, fact)
        parts = [p[0] for a in fact.atoms if (p := fact.linear(a)) is not None]
        if not all(self._plainly(f) or self._plainly(-f) for f in parts):
            self._mixed.append(fact)
        self.known.samples = [s for s in self.known.samples if at(fact, s) >= 0]
        self.known.memo.clear()

    def _add(self, layer: Known, fact: Poly) -> None:
        """As a bound of each of its atoms that it bounds; with a minimum, it holds of what that is the minimum of."""
        for atom in fact.atoms & self.cases.keys():
            kind, cases = self.cases[atom]
            parted = fact.linear(atom)
            if parted and kind != "choice" and self._plainly(parted[0] if kind == "min" else -parted[0]):
                for case in cases:
                    self._add(layer, fact.with_atom(atom, case.value))
        for atom in fact.atoms:
            parted = fact.linear(atom)
            if parted is None:
                continue
            factor, rest = parted
            if self._plainly(factor):
                layer.lower.setdefault(atom, []).append(Bound(factor, -rest, self._is_natural(factor)))
            elif self._plainly(-factor):
                layer.upper.setdefault(atom, []).append(Bound(-factor, rest, self._is_natural(-factor)))

    @property
    def samples(self) -> list[Sample]:
        return self.known.samples

    # ------------------------------------------------------------------ what arithmetic makes
    def divided(self, x: Poly, d: Poly) -> tuple[Poly, Poly] | None:
        """(x // d, x % d) where x >= 0 and d >= 1 provably, else None."""
        if (exact := x.divided(d)) is not None and d.terms:
            return exact, ZERO
        if ("/", x, d) in self._made:
            return self._made["/", x, d], self._made["%", x, d]
        n, m = x.number, d.number
        if isinstance(n, int) and isinstance(m, int) and m > 0 and n >= 0:
            return Poly.of(n // m), Poly.of(n % m)
        if not self.holds(d - 1) or not self.holds(x):
            return None
        if self.holds(d - 1 - x):
            return ZERO, x
        if (shared := self._shared(x, d)) != ONE:
            small, less = x.divided(shared), d.divided(shared)
            assert small is not None and less is not None
            found = self.divided(small, less)
            return found and (found[0], found[1] * shared)
        return self._quotient(x, d)

    def _shared(self, x: Poly, d: Poly) -> Poly:
        """A factor of both."""
        common = tuple(a for a in d.common() if a in x.common() and a in self.positive)
        number = 1
        if d.constant == 0 or d.number is not None:
            whole = [c for p in (x, d) for c in p.terms.values()]
            number = gcd(*(int(c) for c in whole)) if all(isinstance(c, int) for c in whole) else 1
        monomial = Poly({tuple(common[:1]): max(1, number)})
        both = x.divided(monomial) is not None and d.divided(monomial) is not None
        return monomial if both and monomial != ONE else ONE

    def _quotient(self, x: Poly, d: Poly) -> tuple[Poly, Poly]:
        names = [f"({self.text(x)}){operator}({self.text(d)})" for operator in ("//", "%")]
        order = LANES // 2 if x.atoms and x.top >= LANES // 2 else 0
        quotient = self.atom(names[0], lambda s, _: int(at(x, s) // at(d, s)), 0, order=order)
        rest = self.atom(names[1], lambda s, _: int(at(x, s) % at(d, s)), 0, order=order)
        (q,), (r,) = quotient.atoms, rest.atoms
        for most in self._tops(x):  # x <= d * n - 1  ->  x // d <= n - 1
            if (n := (most + 1).divided(d)) is not None:
                self.bound_above(q, ONE, n - 1)
            elif isinstance(top := most.number, int) and isinstance(by := d.number, int):
                self.bound_above(q, ONE, Poly.of(top // by))
        self.bound_above(q, d, x)
        self.bound_below(q, d, x - d + 1)
        self.bound_above(r, ONE, d - 1)
        self.bound_above(r, ONE, x - d * quotient)
        self.bound_below(r, ONE, x - d * quotient)
        if len(x.atoms) == 1 and x == Poly.atom(x.top) and x.top > r:  # lanes in groups
            self.bound_above(x.top, ONE, d * quotient + d - 1)
            self.bound_below(x.top, ONE, d * quotient)
        self.divisions |= {q: Division("/", x, d), r: Division("%", x, d)}
        self._made["/", x, d], self._made["%", x, d] = quotient, rest
        return quotient, rest

    def _tops(self, x: Poly) -> Iterator[Poly]:
        """What x is at most, in fewer and fewer atoms."""
        todo, seen = deque([x]), {x}
        for _ in range(TOPS):
            if not todo:
                return
            yield (x := todo.popleft())
            if x.number is not None or (parted := x.linear(x.top)) is None or not self._plainly(parted[0]):
                continue
            for bound in self.known.uppers(x.top):
                if bound.factor == ONE and (less := parted[1] + parted[0] * bound.value) not in seen:
                    seen.add(less)
                    todo.append(less)

    def ceiling(self, x: Poly, d: Poly) -> Poly | None:
        """ceil(x / d) for x >= 0, d >= 1."""
        if (exact := x.divided(d)) is not None and d.terms:
            return exact
        n, m = x.number, d.number
        if isinstance(n, int) and isinstance(m, int) and m > 0:
            return Poly.of(-(-n // m))
        if ("^", x, d) not in self._made:
            if not self.holds(d - 1) or not self.holds(x):
                return None
            if (shared := self._shared(x, d)) != ONE:
                small, less = x.divided(shared), d.divided(shared)
                assert small is not None and less is not None
                return self.ceiling(small, less)
            name = f"ceil(({self.text(x)})/({self.text(d)}))"
            made = self.atom(name, lambda s, _: int(-(-at(x, s) // at(d, s))), int(self.holds(x - 1)))
            (c,) = made.atoms
            self.bound_below(c, d, x)
            self.bound_above(c, d, x + d - 1)
            if d != ONE:
                self.bound_above(c, ONE, x)
            self._made["^", x, d] = made
            for turn in (t for t, *loop in self._turns if loop == [x, d]):
                self.bound_above(turn, ONE, made - 1)
        return self._made["^", x, d]

    def turns(self, name: str, length: Poly, step: Poly) -> Poly:
        """The number of a loop's turn: 0, 1, .. while step times it is below the length."""
        made = self.atom(name, lambda s, r: turn(int((at(length, s) - 1) // at(step, s)), r), 0)
        self.bound_above(made.top, step, length - 1)
        self._turns.append((made.top, length, step))
        if step != ONE and (all_ := self._made.get(("^", length, step))) is not None:
            self.bound_above(made.top, ONE, all_ - 1)
        return made

    def extremum(self, kind: str, a: Poly, b: Poly) -> Poly:
        """min(a, b), max(a, b)"""
        sign = 1 if kind == "min" else -1
        if self.holds((b - a) * sign):
            return a
        if self.holds((a - b) * sign):
            return b
        if (kind, a, b) not in self._made:
            choose = min if sign > 0 else max
            name = f"{kind}({self.text(a)}, {self.text(b)})"
            made = self.atom(name, lambda s, _: int(choose(at(a, s), at(b, s))))
            (m,) = made.atoms
            for one in (a, b):
                (self.bound_above if sign > 0 else self.bound_below)(m, ONE, one)
            both = (Case(a, ((b - a) * sign,)), Case(b, ((a - b) * sign,)))
            self.cases[m] = kind, both
            for least in (1, 0):
                every = all if sign > 0 else any
                if every(self.holds(one - least) for one in (a, b)):
                    self.bound_below(m, ONE, Poly.of(least))
                    break
            self._made[kind, a, b] = made
        return self._made[kind, a, b]

    def choice(self, name: str, cases: Sequence[Case]) -> Poly:
        """One of several values."""
        if all(c.value == cases[0].value for c in cases):
            return cases[0].value
        made = self.atom(name, lambda s, _: _chosen(cases, s))
        (v,) = made.atoms
        self.cases[v] = "choice", tuple(cases)
        if all(self.holds(c.value, c.facts) for c in cases):
            self.bound_below(v, ONE, ZERO)
        return made

    def text(self, poly: Poly) -> str:
        return poly.text(lambda a: self.names.get(a, f"a{a}"))

    # ------------------------------------------------------------------ proofs
    def holds(self, goal: Poly, facts: Iterable[Poly] = ()) -> bool:
        """goal >= 0 for all values of the atoms under which the facts hold."""
        if self._plainly(goal):
            return True
        facts = tuple(facts)
        if any(self._plainly(goal - fact) or _is_false(fact) for fact in facts):
            return True
        known = self._under(facts)
        outer, self._steps = self._steps, STEPS
        try:
            return self._proved(goal, known, 0, False) or self._proved_again(goal, known)
        except TooLong:
            return False
        finally:
            self._steps = outer

    @contextmanager
    def at_most(self, steps: int) -> Iterator[None]:
        """Within the block: questions that may lead to so many goals together."""
        kept = max(0, self._left - steps)
        self._left -= kept
        try:
            yield
        finally:
            self._left += kept

    def _proved_again(self, goal: Poly, known: Known) -> bool:
        """With bounds by later atoms, too."""
        self._steps = STEPS
        return self._proved(goal, known, 0, True)

    def _under(self, facts: Facts) -> Known:
        if facts not in self._layers:
            self._layers[facts] = self._with(self.known, facts)
        return self._layers[facts]

    def _with(self, known: Known, facts: Facts) -> Known:
        layer = Known(known, samples=[s for s in known.samples if all(at(f, s) >= 0 for f in facts)])
        for fact in facts:
            self._add(layer, fact)
        return layer

    def _plainly(self, goal: Poly) -> bool:
        """No coefficient is negative, nor any atom."""
        positive = self.positive
        for m, c in goal.terms.items():
            if c < 0:
                return False
            for a in m:
                if a not in positive and m.count(a) % 2:
                    return False
        return True

    def _smaller(self, goal: Poly) -> Poly:
        """The same question without a common factor."""
        n = goal.content()
        if n > 1:
            terms = {m: c // n for m, c in goal.terms.items()}
            goal = Poly({m: c for m, c in terms.items() if c})
        shared = goal.common() if any(c > 0 for c in goal.terms.values()) else ()  # -a >= 0 where a is zero
        return goal.without(shared) if shared and all(a in self.positive for a in shared) else goal

    def _proved(self, goal: Poly, known: Known, depth: int, later: bool) -> bool:
        """By any way down from the goal, the simplest goals first."""
        answer = self._seen_through(goal := self._smaller(goal), known, later)
        if answer is not None or depth > DEPTH:
            return bool(answer)
        key = goal, later
        known.memo[key] = False  # a goal that leads to itself is not proved by that
        known.memo[key] = found = self._searched(goal, known, depth, later)
        return found

    def _searched(self, goal: Poly, known: Known, depth: int, later: bool) -> bool:
        open_: list[tuple[int, int, Poly, int]] = [(0, 0, goal, -1)]
        seen, turn = {goal}, count(1)
        while open_ and self._steps > 0 and self._left > 0:
            self._steps -= 1
            self._left -= 1
            _, _, now, atom = heappop(open_)
            if atom >= 0:
                if self._in_cases(now, atom, known, depth, later):
                    return True
                continue
            for left in map(self._smaller, self._below(now, known, depth, later)):
                if left in seen or not left.is_readable:
                    continue
                seen.add(left)
                answer = self._seen_through(left, known, later)
                if answer:
                    return True
                if answer is None:
                    heappush(open_, (_cost(left), next(turn), left, -1))
            for pivot in self._pivots(now):
                if self._is_split(now, pivot, known, depth, later):
                    heappush(open_, (_cost(now) + SPLIT, next(turn), now, pivot))
        return False

    def _seen_through(self, goal: Poly, known: Known, later: bool) -> bool | None:
        """Whether a goal holds where that takes no search; else None."""
        if self._plainly(goal):
            return True
        if (n := goal.number) is not None:
            return n >= 0
        if (goal, later) in known.memo:
            return known.memo[goal, later]
        return False if any(at(goal, s) < 0 for s in known.samples) else None

    def _pivots(self, goal: Poly) -> dict[int, None]:
        """The last atom; and where it does no harm, the last that does."""
        worst = max((m[-1] for m, c in goal.terms.items() if c < 0 and m), default=goal.top)
        return dict.fromkeys((goal.top, worst))

    def _below(self, goal: Poly, known: Known, depth: int, later: bool) -> Iterator[Poly]:
        """Goals that are enough for this one."""
        for atom in self._pivots(goal):
            if (parted := goal.linear(atom)) is not None:
                factor, rest = parted
                yield from self._without(factor, rest, atom, self._sign(factor, known, depth, later), known, later)
        for fact in self._mixed:
            if (left := _less_by(goal, fact)) is not None:
                yield left

    def _is_split(self, goal: Poly, atom: int, known: Known, depth: int, later: bool) -> bool:
        """Whether it may help to look at what the atom is, case by case."""
        if atom not in self.cases:
            return False
        kind = self.cases[atom][0]
        if kind == "choice" or (parted := goal.linear(atom)) is None:
            return True
        sign = self._sign(parted[0], known, depth, later)
        return not sign or (kind == "min") == (sign > 0)

    def _without(self, factor: Poly, rest: Poly, atom: int, sign: int, known: Known, later: bool) -> Iterator[Poly]:
        """Goals that are enough for factor * atom + rest >= 0, with less of the atom."""
        harm = Poly({m: c for m, c in factor.terms.items() if c < 0})
        mixed = harm if sign <= 0 and len(harm.terms) < len(factor.terms) and self._plainly(-harm) else ZERO
        for b in known.lowers(atom) if sign > 0 else known.uppers(atom):
            if not later and any(a > atom for a in b.value.atoms | b.factor.atoms):
                continue
            if sign and (left := self._eliminated(factor, rest, b)) is not None:
                yield left
            if mixed.terms and (times := _part(harm, b.factor)).terms:
                yield rest + times * b.value + (factor - times * b.factor) * Poly.atom(atom)

    def _sign(self, factor: Poly, known: Known, depth: int, later: bool) -> int:
        if self._plainly(factor):
            return 1
        if self._plainly(-factor):
            return -1
        if depth > 6:
            return 0
        if self._proved(factor, known, depth + 6, later):
            return 1
        return -1 if self._proved(-factor, known, depth + 6, later) else 0

    def _eliminated(self, factor: Poly, rest: Poly, bound: Bound) -> Poly | None:
        """factor * atom + rest >= 0 by a bound of the atom on the side that matters."""
        if bound.factor == ONE:
            return rest + factor * bound.value
        if (times := factor.divided(bound.factor)) is not None:
            return rest + times * bound.value
        if not bound.strict:
            return None
        slack = bound.factor - 1 if factor.integral and rest.integral else ZERO
        if len(factor.terms) == len(bound.factor.terms) == 1 and factor.terms.keys() == bound.factor.terms.keys():
            (n,), (m,) = factor.terms.values(), bound.factor.terms.values()
            if isinstance(n, int) and isinstance(m, int):  # by no more than is needed
                shared = gcd(n, m)
                times, by = Poly.of(n // shared), m // shared
                return rest * by + times * bound.value + (by - 1 if slack.terms else 0)
        return rest * bound.factor + factor * bound.value + slack

    def _in_cases(self, goal: Poly, atom: int, known: Known, depth: int, later: bool) -> bool:
        for case in self.cases[atom][1]:
            inside = self._with(known, case.facts)
            if not self._proved(goal.with_atom(atom, case.value), inside, depth + 1, later):
                return False
        return True


def at(poly: Poly, sample: Sample) -> Coefficient:
    """Its value there."""
    total: Coefficient = 0
    for m, c in poly.terms.items():
        for a in m:
            c = c * sample[a]
        total += c
    return total


def _less_by(goal: Poly, fact: Poly) -> Poly | None:
    """n * goal - m * fact, without the longest product that does harm in both."""
    both = [m for m, c in fact.terms.items() if m and c < 0 and goal.terms.get(m, 0) < 0]
    if not both:
        return None
    most = max(both, key=lambda m: (len(m), m))
    n, m = -fact.terms[most], -goal.terms[most]
    return goal * n - fact * m if isinstance(n, int) and isinstance(m, int) else None


def _is_false(fact: Poly) -> bool:
    """Never the case, so that anything follows."""
    return fact.number is not None and fact.constant < 0


def _cost(goal: Poly) -> int:
    """How long a goal is."""
    return sum(1 + len(m) for m in goal.terms)


def turn(last: int, random: Random) -> int:
    """One of 0 .. last, often an extreme."""
    return max(0, random.choice((0, last, last, random.randint(0, max(0, last)))))


def _chosen(cases: Sequence[Case], sample: Sample) -> int:
    """The value of the first case that is the case."""
    found = next((c for c in cases if all(at(f, sample) >= 0 for f in c.facts)), cases[-1])
    return int(at(found.value, sample))


def _part(of: Poly, divisor: Poly) -> Poly:
    """The sum of the quotients of those terms that can be divided."""
    if len(divisor.terms) != 1:
        return of.divided(divisor) or ZERO
    found = ZERO
    for m, c in of.terms.items():
        found = found + (Poly({m: c}).divided(divisor) or ZERO)
    return found
