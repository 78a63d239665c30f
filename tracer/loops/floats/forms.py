"""The forms in which floats of a step are looked for, and the search: around one of few cores one of few shells.

Constants are told from the values: the shortest decimal that is near enough, as it stands in a source, or the value.
Whatever is found has to give every value to the last bit, and so do others: `t * 0.01` and `t / 100` are the same for
a few steps, and no longer later. Of those that differ in a longer loop it is the one that is written much shorter, or
none.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..affine import Affine, Sample, fitted
from .apart import Float
from .formula import Formula

Values = Mapping[Sample, float]
FEWEST = 4
"""Values from which on a form is looked for."""
NEAR = 1e-9
SHORTER = 5
"""By how much a form is written shorter than another that is the same for short loops only."""
LATER = (64, 2048)
"""Lengths at which forms that give the same values have to be the same."""


def formula_of(floats: Mapping[Sample, Float]) -> Formula | None:
    """The formula with these values; None where there is none of these forms."""
    if len(floats) < FEWEST or not all(math.isfinite(f.value) for f in floats.values()):
        return None
    found = [f for f in dict.fromkeys(_candidates({s: f.value for s, f in floats.items()})) if _has(f, floats)]
    best = min(found, key=_written, default=None)
    if best is None or any(_written(f) < _written(best) + SHORTER and not _is_same_later(best, f) for f in found):
        return None
    return best


def _written(formula: Formula) -> int:
    """How much there is to write: its operations, and the digits of its constants."""
    return 2 + sum(_written(a) if isinstance(a, Formula) else _digits(a) for a in formula.args)


def _digits(argument: Any) -> int:
    if isinstance(argument, Affine):
        return sum(_digits(float(n)) for n in (abs(argument.step) - 1, argument.constant) if n)
    return len(repr(argument).partition("e")[0].replace(".", "").strip("-0")) if isinstance(argument, float) else 0


def _is_same_later(a: Formula, b: Formula) -> bool:
    try:
        return all(repr(a.at(t, n)) == repr(b.at(t, n)) for n in LATER for t in range(n))
    except ArithmeticError:
        return False


def _has(formula: Formula, floats: Mapping[Sample, Float]) -> bool:
    if formula.calls_functions() and formula.reads_length():
        return False
    try:
        return all(f.is_bitwise(formula.at(*sample)) for sample, f in floats.items())
    except ArithmeticError:
        return False


def _candidates(values: Values) -> Iterator[Formula]:
    for inverse, shell in SHELLS:
        try:
            inner = {sample: inverse(v) for sample, v in values.items()}
        except (ArithmeticError, ValueError):
            continue
        for core in CORES:
            yield from map(shell, core(inner))


# ------------------------------------------------------------------ shells
def _one_minus(f: Formula) -> Formula:
    return Formula(operator.sub, (1, f))


def _over(f: Formula) -> Formula:
    return Formula(operator.truediv, (1, f))


def _root(f: Formula) -> Formula:
    return Formula(math.sqrt, (f,))


def _half_power(f: Formula) -> Formula:
    return Formula(operator.pow, (f, 0.5))


Inverse = Callable[[float], float]
SHELLS: tuple[tuple[Inverse, Callable[[Formula], Formula]], ...] = (
    (lambda v: v, lambda f: f),
    (lambda v: 1 - v, _one_minus),
    (lambda v: 1 / v, _over),
    (lambda v: 1 - 1 / v, lambda f: _over(_one_minus(f))),
    (lambda v: v * v, _root),
    (lambda v: v * v, _half_power),
    (lambda v: 1 - v * v, lambda f: _root(_one_minus(f))),
    (lambda v: 1 - v * v, lambda f: _half_power(_one_minus(f))),
    (math.log, lambda f: Formula(math.exp, (f,))),
    (lambda v: math.acos(2 * v - 1) / math.pi, lambda f: _half_wave(f)),
)
"""What is around a core: how its values are told from those of the whole, and the whole of it."""


def _half_wave(f: Formula) -> Formula:
    """0.5 * (1 + cos(pi * t / n)), in the order in which that is computed."""
    angle = Formula(operator.mul, (math.pi, f))
    if f.call is operator.truediv:
        angle = Formula(operator.truediv, (Formula(operator.mul, (math.pi, f.args[0])), f.args[1]))
    return Formula(operator.mul, (0.5, Formula(operator.add, (1, Formula(math.cos, (angle,))))))


# ------------------------------------------------------------------ cores
def _powers(values: Values) -> Iterator[Formula]:
    """a ** (t + 1), c * a ** t"""
    first, second = _two_in_turn(values)
    if not (first and second) or first / second <= 0 or first == second:
        return
    for up in (1, -1):
        for base in _spelled((second / first) ** up):
            if base > 0 and base != 1:
                yield from _powers_of(base, values)


def _powers_of(base: float, values: Values) -> Iterator[Formula]:
    start = next(iter(values.values()))
    factors = [1.0, *(c for k in (0, 1, -1) for c in _spelled(start / base**k))]
    for factor in (c for c in dict.fromkeys(factors) if c not in (base, 1 / base)):
        try:
            exponents = {s: math.log(v / factor, base) for s, v in values.items()}
        except (ArithmeticError, ValueError):
            continue
        if (exponent := _whole(exponents)) is not None:
            power = Formula(operator.pow, (base, exponent))
            yield power if factor == 1 else Formula(operator.mul, (factor, power))


def _quotients(values: Values) -> Iterator[Formula]:
    """c / (t + 1), c / (1 + d * t), (t + 1) / (n - 1), t / 10"""
    for factor in _factors_of_reciprocals(values):
        if all(values.values()) and (below := _whole({s: factor / v for s, v in values.items()})) is not None:
            yield Formula(operator.truediv, (int(factor) if factor == int(factor) else factor, below))
    if all(values.values()):
        for factor in _spelled(next(iter(values.values()))):
            lines = _lines({s: factor / v for s, v in values.items()})
            yield from (Formula(operator.truediv, (factor, line)) for line in lines)
    for more in (0, -1, 1, 2, -2):
        below = Affine(0, 1, more)
        if all(below.at(*s) for s in values) and (above := _whole({s: v * below.at(*s) for s, v in values.items()})):
            yield Formula(operator.truediv, (above, below))
    first, second = _two_in_turn(values)
    if first != second:
        for step in _spelled(1 / (second - first)):
            if (above := _whole({s: v * step for s, v in values.items()})) is not None:
                yield Formula(operator.truediv, (above, step))


def _factors_of_reciprocals(values: Values) -> Iterator[float]:
    yield 1.0
    first, second = _two_in_turn(values)
    if first != second and (at := second / (first - second)):
        yield from _spelled(first * round(at))


def _lines(values: Values) -> Iterator[Formula]:
    """t * c, c + t * d, c - t * d"""
    first, second = _two_in_turn(values)
    for step in _spelled(second - first) if first != second else ():
        if (times := _whole({s: v / step for s, v in values.items()})) is not None:
            yield Formula(operator.mul, (times, step))
        start = next(iter(values.values()))
        for begin in _spelled(start):
            if (times := _whole({s: (v - begin) / step for s, v in values.items()})) is not None:
                yield Formula(operator.add, (begin, Formula(operator.mul, (times, step))))
                yield Formula(operator.sub, (begin, Formula(operator.mul, (times, -step))))


CORES = (_powers, _quotients, _lines)


# ------------------------------------------------------------------ constants
def _two_in_turn(values: Values) -> tuple[float, float]:
    """The values of the first two steps at one length."""
    first, second, *_ = values.values()
    return first, second


def _whole(numbers: Mapping[Sample, float]) -> Affine | None:
    """The function of the step and the length that these numbers are near; None where they are near no whole ones."""
    if any(not math.isfinite(n) or abs(n - round(n)) > 1e-5 for n in numbers.values()):
        return None
    return fitted({sample: round(n) for sample, n in numbers.items()})


def _spelled(value: float) -> list[float]:
    """A constant as it may stand in a source: a decimal near it; or else the value, or one next to it."""
    decimals = (float(f"{value:.{digits}g}") for digits in range(1, SHORT + 1))
    near = next((d for d in decimals if abs(d - value) <= NEAR * abs(value)), None)
    return [near] if near is not None else [value, math.nextafter(value, 0), math.nextafter(value, math.inf)]


SHORT = 8
"""Digits that a constant has in a source, or it is computed."""
