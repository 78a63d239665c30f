"""Shares of a row, exp(x - max(x)) / sum(exp(x - max(x))): powers of at most one, divided by a sum of at least one.

Between such bounds nothing overflows, and a division by a number that a whole row has is three instructions, not ten.
"""

from __future__ import annotations

from ...program.axes import Program, Term
from ..mathematics import NARROW

CONTRACTS = {"cuda", "hip"}
"""The targets whose `fma` rounds once: what a quotient leaves is exact there."""
BOUNDED = ("f32", "bf16")
"""Dtypes that hold the sum of any row of ones."""


def is_share(term: Term) -> bool:
    """A quotient of a power of a row by the sum of those powers, one of which is that of the maximum."""
    if term.op != "div":
        return False
    power, total = map(_spread, term.args)
    is_sum = total.op == "sum" and _spread(total.args[0]) is power
    return is_sum and power.op == "exp" and {power.dtype, total.dtype} <= {*BOUNDED} and is_below_maximum(power.args[0])


def is_below_maximum(term: Term) -> bool:
    """x - max(x): not positive, and zero once in a row, or NaN."""
    if term.op != "sub":
        return False
    x, top = map(_spread, term.args)
    return top.op == "amax" and _spread(top.args[0]) is x


def powers_beside_one(program: Program) -> frozenset[Term]:
    """Powers in float32 that go into sums of their rows, and into shares that are rounded to 16 bits, alone.

    Beside the 1 of the maximum their subnormal results count for nothing.
    """
    users: dict[Term, list[Term]] = {}
    for term in program.terms:
        for arg in term.args:
            users.setdefault(arg, []).append(term)
    roots = set(program.roots)

    def is_rounded(share: Term) -> bool:
        casts = users.get(share, [])
        return share not in roots and all(t.op == "cast" and t.dtype in NARROW for t in casts)

    def is_counted(power: Term, user: Term) -> bool:
        if user.op == "sum":
            return set(_spread(power.args[0].args[1]).param) <= set(user.param)
        return is_share(user) and is_rounded(user)

    powers = [t for t in program.terms if t.op == "exp" and t.dtype == "f32" and is_below_maximum(t.args[0])]
    return frozenset(p for p in powers if p not in roots and all(is_counted(p, u) for u in users.get(p, ())))


def _spread(term: Term) -> Term:
    """What is repeated along an axis."""
    return term.args[0] if term.op == "spread" else term
