"""Operations of which the result is an atom of its own: quotients, minima, choices, turns of a loop.

A quotient q = x // d is an atom with d * q <= x; a minimum one that is at most either, and is either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import gcd

from .atoms import LANES, Case, Division
from .bounds import World, draw_up_to
from .polynomials import ONE, ZERO, Poly, Sample, common_atoms, exact_quotient, is_integral, value_at

UPPER_BOUNDS = 12
"""So many expressions that are at least another one are looked at for one that a division leaves nothing of."""
STEPS = 100
"""How many goals it may lead to, which of two operands always is the smaller: mostly neither, and it is not needed."""


class Arithmetic:
    """Makes atoms in a world; an operation of the same operands has the same result."""

    def __init__(self, world: World) -> None:
        self.world, self.atoms = world, world.atoms
        self._quotients: dict[tuple[Poly, Poly], tuple[Poly, Poly]] = {}
        self._floors: dict[tuple[Poly, Poly], tuple[Poly, Poly]] = {}
        self._ceilings: dict[tuple[Poly, Poly], Poly] = {}
        self._extrema: dict[tuple[str, Poly, Poly], Poly] = {}
        self._turns: list[tuple[int, Poly, Poly]] = []

    # ------------------------------------------------------------------ division
    def divide(self, x: Poly, d: Poly) -> tuple[Poly, Poly] | None:
        """(x // d, x % d) where x >= 0 and d >= 1 provably, else None."""
        if (exact := exact_quotient(x, d)) is not None and d.terms:
            return exact, ZERO
        if (x, d) in self._quotients:
            return self._quotients[x, d]
        n, m = x.number, d.number
        if isinstance(n, int) and isinstance(m, int) and m > 0 and n >= 0:
            return Poly.of(n // m), Poly.of(n % m)
        # Triton rounds towards zero: only without signs is that the quotient.
        if not self.world.holds(d - 1) or not self.world.holds(x):
            return None
        if self.world.holds(d - 1 - x):
            return ZERO, x
        # Without a common factor the same quotient has one name, whatever it was written as.
        if (reduced := self._without_common_factor(x, d)) is not None:
            small_x, small_d, shared = reduced
            result = self.divide(small_x, small_d)
            return result and (result[0], result[1] * shared)
        self._quotients[x, d] = result = self._quotient(x, d)
        return result

    def floor(self, x: Poly, d: Poly) -> tuple[Poly, Poly] | None:
        """Python's (x // d, x % d) of an x of any sign where d >= 1 provably, else None."""
        if not self.world.holds(d - 1):
            return None
        if (x, d) not in self._floors:
            self._floors[x, d] = self._floor(x, d)
        return self._floors[x, d]

    def _floor(self, x: Poly, d: Poly) -> tuple[Poly, Poly]:
        world, texts = self.world, (self.atoms.text(x), self.atoms.text(d))
        remainder = world.atom("({})%({})".format(*texts), lambda s, _: int(value_at(x, s) % value_at(d, s)), 0, d - 1)
        quotient = world.atom("({})//({})".format(*texts), lambda s, _: int(value_at(x, s) // value_at(d, s)))
        (q,), (r,) = quotient.atoms, remainder.atoms
        world.bound_above(q, d, x)
        world.bound_below(q, d, x - d + 1)
        # by the remainder, too, of which a mask may say that it is 0
        world.bound_above(q, d, x - remainder)
        world.bound_below(q, d, x - remainder)
        self.atoms.divisions |= {q: Division("/", x, d, q), r: Division("%", x, d, q)}
        return quotient, remainder

    def ceiling(self, x: Poly, d: Poly) -> Poly | None:
        """ceil(x / d) for x >= 0, d >= 1."""
        if (exact := exact_quotient(x, d)) is not None and d.terms:
            return exact
        n, m = x.number, d.number
        if isinstance(n, int) and isinstance(m, int) and m > 0:
            return Poly.of(-(-n // m))
        if (x, d) in self._ceilings:
            return self._ceilings[x, d]
        if not self.world.holds(d - 1) or not self.world.holds(x):
            return None
        if (reduced := self._without_common_factor(x, d)) is not None:
            return self.ceiling(*reduced[:2])
        self._ceilings[x, d] = result = self._ceiling(x, d)
        return result

    def _without_common_factor(self, x: Poly, d: Poly) -> tuple[Poly, Poly, Poly] | None:
        """(x / factor, d / factor, factor) where both have a factor in common."""
        in_x = common_atoms(x)
        common = tuple(a for a in common_atoms(d) if a in in_x and a in self.atoms.positive)
        number = 1
        if () not in d.terms or d.number is not None:
            coefficients = [c for p in (x, d) for c in p.terms.values()]
            number = gcd(*(int(c) for c in coefficients)) if all(isinstance(c, int) for c in coefficients) else 1
        factor = Poly({tuple(common[:1]): max(1, number)})
        if factor == ONE or (small_x := exact_quotient(x, factor)) is None:
            return None
        small_d = exact_quotient(d, factor)
        return None if small_d is None else (small_x, small_d, factor)

    def _quotient(self, x: Poly, d: Poly) -> tuple[Poly, Poly]:
        world, texts = self.world, (self.atoms.text(x), self.atoms.text(d))
        order = LANES // 2 if x.atoms and x.top >= LANES // 2 else 0
        names = ["({})//({})".format(*texts), "({})%({})".format(*texts)]
        quotient = world.atom(names[0], lambda s, _: int(value_at(x, s) // value_at(d, s)), 0, order=order)
        remainder = world.atom(names[1], lambda s, _: int(value_at(x, s) % value_at(d, s)), 0, order=order)
        (q,), (r,) = quotient.atoms, remainder.atoms
        # Bounds without x first: they are what most proofs need.
        for bound in self._upper_bounds(x):  # x <= d * n - 1  ->  x // d <= n - 1
            if (n := exact_quotient(bound + 1, d)) is not None:
                world.bound_above(q, ONE, n - 1)
            elif isinstance(top := bound.number, int) and isinstance(divisor := d.number, int):
                world.bound_above(q, ONE, Poly.of(top // divisor))
        # x == d * q + r, 0 <= r < d
        world.bound_above(q, d, x)
        world.bound_below(q, d, x - d + 1)
        world.bound_above(r, ONE, d - 1)
        world.bound_above(r, ONE, x - d * quotient)
        world.bound_below(r, ONE, x - d * quotient)
        if len(x.atoms) == 1 and x == Poly.atom(x.top) and x.top > r:  # lanes in groups
            world.bound_above(x.top, ONE, d * quotient + d - 1)
            world.bound_below(x.top, ONE, d * quotient)
        self.atoms.divisions |= {q: Division("/", x, d, q), r: Division("%", x, d, q)}
        return quotient, remainder

    def _upper_bounds(self, x: Poly) -> Iterator[Poly]:
        """Expressions that are at least x, in fewer and fewer atoms."""
        todo, visited = deque([x]), {x}
        for _ in range(UPPER_BOUNDS):
            if not todo:
                return
            yield (x := todo.popleft())
            for larger in self._larger(x):
                if larger not in visited:
                    visited.add(larger)
                    todo.append(larger)

    def _larger(self, x: Poly) -> Iterator[Poly]:
        """x with a bound in the place of its last atom that makes it larger."""
        for atom in sorted(x.atoms, reverse=True):
            parted = x.linear(atom)
            if parted is not None and self.atoms.is_plain(parted[0]):
                bounds = self.atoms.bounds.uppers(atom)
                yield from (parted[1] + parted[0] * b.value for b in bounds if b.factor == ONE)
                return

    def _ceiling(self, x: Poly, d: Poly) -> Poly:
        name = f"ceil(({self.atoms.text(x)})/({self.atoms.text(d)}))"
        least = int(self.world.holds(x - 1))
        result = self.world.atom(name, lambda s, _: int(-(-value_at(x, s) // value_at(d, s))), least)
        c = result.top
        self.world.bound_below(c, d, x)
        self.world.bound_above(c, d, x + d - 1)
        if d != ONE:
            self.world.bound_above(c, ONE, x)
        for turn in (t for t, *loop in self._turns if loop == [x, d]):
            self.world.bound_above(turn, ONE, result - 1)
        return result

    # ------------------------------------------------------------------ loops, minima and choices
    def turns(self, name: str, length: Poly, step: Poly) -> Poly:
        """The number of a loop's turn: 0, 1, .. while step times it is below the length.

        Where the step and the length are multiples of a block, the last turn leaves room for one; below what the length
        never exceeds, too: a loop to min(length, N) in whole blocks of N.
        """
        number = self.world.atom(
            name, lambda s, r: draw_up_to(int((value_at(length, s) - 1) // value_at(step, s)), r), 0
        )
        self.world.bound_above(number.top, step, length - self._common_block(length, step))
        at_least = [*self._upper_bounds(length)]
        for longer in dict.fromkeys((*at_least, *(self._in_blocks(x, step) for x in at_least))):
            if longer != length and (block := self._common_block(longer, step)) > 1:
                self.world.bound_above(number.top, step, longer - block)
        self._turns.append((number.top, length, step))
        if step != ONE and (turns := self._turns_of(length, step)) is not None:
            self.world.bound_above(number.top, ONE, turns - 1)
        return number

    def _in_blocks(self, length: Poly, step: Poly) -> Poly:
        """At least as long: without what is taken from it that is no multiple of the step."""
        block, positive = step.number, self.atoms.positive
        if not isinstance(block, int):
            return length
        kept = {m: c for m, c in length.terms.items() if c > 0 or c % block == 0 or not positive.issuperset(m)}
        return Poly(kept)

    def _turns_of(self, length: Poly, step: Poly) -> Poly | None:
        """How many turns there are, where that is a number, or an atom already."""
        if isinstance(whole := length.number, int) and isinstance(by := step.number, int):
            return Poly.of(-(-whole // by))
        return self._ceilings.get((length, step))

    def _common_block(self, length: Poly, step: Poly) -> int:
        """A number that both are multiples of: the step's largest, or half of it .."""
        block = gcd(*step.terms.values()) if is_integral(step) else 1  # type: ignore[arg-type]
        while block > 1 and not is_multiple(self.world, length, block):
            block = block // 2 if block % 2 == 0 else 1
        return block

    def extremum(self, kind: str, a: Poly, b: Poly) -> Poly:
        """min(a, b), max(a, b)"""
        if (chosen := self._always_chosen(kind, a, b)) is not None:
            return chosen
        if (kind, a, b) not in self._extrema:
            self._extrema[kind, a, b] = self._extremum(kind, a, b)
        return self._extrema[kind, a, b]

    def _always_chosen(self, kind: str, a: Poly, b: Poly) -> Poly | None:
        """The operand that the result is everywhere."""
        more = b - a if kind == "min" else a - b
        with self.world.budget.at_most(STEPS):
            if self.world.holds(more):
                return a
            return b if self.world.holds(-more) else None

    def _extremum(self, kind: str, a: Poly, b: Poly) -> Poly:
        is_min = kind == "min"
        choose, every = (min, all) if is_min else (max, any)
        name = f"{kind}({self.atoms.text(a)}, {self.atoms.text(b)})"
        result = self.world.atom(name, lambda s, _: int(choose(value_at(a, s), value_at(b, s))))
        for operand in (a, b):
            (self.world.bound_above if is_min else self.world.bound_below)(result.top, ONE, operand)
        self.atoms.cases[result.top] = kind, extremum_cases(kind, a, b)
        for least in (1, 0):
            if every(self.world.holds(operand - least) for operand in (a, b)):
                self.world.bound_below(result.top, ONE, Poly.of(least))
                break
        return result

    def choice(self, name: str, cases: Sequence[Case]) -> Poly:
        """One of several values."""
        if all(c.value == cases[0].value for c in cases):
            return cases[0].value
        result = self.world.atom(name, lambda s, _: _first_case(cases, s))
        self.atoms.cases[result.top] = "choice", tuple(cases)
        if all(self.world.holds(c.value, c.facts) for c in cases):
            self.world.bound_below(result.top, ONE, ZERO)
        return result


def extremum_cases(kind: str, a: Poly, b: Poly) -> tuple[Case, Case]:
    """min(a, b) is a where b - a >= 0, and b where a - b >= 0."""
    sign = 1 if kind == "min" else -1
    return Case(a, ((b - a) * sign,)), Case(b, ((a - b) * sign,))


def _first_case(cases: Sequence[Case], sample: Sample) -> int:
    """The value of the first case that is the case."""
    first = next((c for c in cases if all(value_at(f, sample) >= 0 for f in c.facts)), cases[-1])
    return int(value_at(first.value, sample))


def is_multiple(world: World, value: Poly, factor: int, depth: int = 6) -> bool:
    """Provably a multiple: with choices made and remainders as x - d * (x // d)."""
    if exact_quotient(value, Poly.of(factor)) is not None or _is_known_multiple(world, value, factor):
        return True
    cases, divisions = world.atoms.cases, world.atoms.divisions
    composed = [a for a in value.atoms if a in cases or (a in divisions and divisions[a].kind == "%")]
    if not composed or not depth:
        return False
    atom = max(composed)
    if atom in cases:
        values = [c.value for c in cases[atom][1]]
    else:
        values = [divisions[atom].x - divisions[atom].d * Poly.atom(divisions[atom].quotient)]
    return all(is_multiple(world, value.with_atom(atom, v), factor, depth - 1) for v in values)


def _is_known_multiple(world: World, value: Poly, factor: int) -> bool:
    """A product of sizes that a guard says is one, n * m, as often as it comes, and what is one by itself."""
    rest = Poly({m: c for m, c in value.terms.items() if Fraction(c) % factor})
    known = [x for x, n in world.multiples if n % factor == 0 and x.number is None]
    return any(exact_quotient(rest, x) is not None for x in known)
