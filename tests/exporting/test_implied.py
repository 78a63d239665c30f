"""Relations between sizes that follow from others: what is left, and that it is never too little."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv, Max, Mod

from fusegrad.runtime.export.text.implied import Facts

K, G, M, L = sympy.symbols("K G M L", integer=True, positive=True)
LEAST = {K: 2, G: 1, M: 1, L: 2}
Q = FloorDiv(K, G)


@pytest.mark.parametrize(
    ("conditions", "left"),
    [
        ([sympy.Ge(128 * L * G * M * Q, 2), sympy.Eq(Mod(K, G), 0)], [sympy.Eq(Mod(K, G), 0)]),
        ([sympy.Eq(Mod(K, G), 0), sympy.Ne(Q, 1), sympy.Eq(K, 4 * G)], [sympy.Eq(K, 4 * G)]),
        ([sympy.Eq(Mod(K, G), 0), sympy.Ne(G, K), sympy.Gt(Q, 1)], [sympy.Eq(Mod(K, G), 0), sympy.Ne(G, K)]),
        ([sympy.Eq(M * Max(1, G), M * G)], []),
        ([sympy.Ne(Mod(G, 2 * G), 0)], []),
        ([sympy.Eq(Mod(M, 16), 0), sympy.Eq(Mod(M, 32), 0)], [sympy.Eq(Mod(M, 32), 0)]),
        ([sympy.Lt(M, L)], [sympy.Lt(M, L)]),
        ([sympy.Ge(L * M, L + M)], [sympy.Ge(L * M, L + M)]),
        ([sympy.Ge(Q, 1)], [sympy.Ge(Q, 1)]),  # nothing says that G divides K
        ([sympy.Or(sympy.Eq(K, G), sympy.Eq(Mod(K, G), 0)), sympy.Eq(Mod(K, G), 0)], [sympy.Eq(Mod(K, G), 0)]),
    ],
)
def test_what_is_left(conditions: list[Any], left: list[Any]) -> None:
    assert Facts(LEAST).needed(conditions) == left


POOL = [
    sympy.Eq(Mod(K, G), 0), sympy.Ne(K, G), sympy.Ne(Q, 1), sympy.Gt(Q, 1), sympy.Eq(K, 2 * G), sympy.Eq(Mod(M, 2), 0),
    sympy.Eq(Mod(M, 4), 0), sympy.Ge(M * Q, M), sympy.Eq(G * Q, K), sympy.Ne(Mod(G, K), 0), sympy.Lt(G, K),
    sympy.Eq(M * Max(1, Q), M * Q), sympy.Ge(K, M), sympy.Ne(M, 1), sympy.Eq(Mod(K * M, 4), 0),
]  # fmt: skip


def holds(condition: Any, sizes: dict[sympy.Symbol, int]) -> bool:
    return bool(condition.subs(sizes))


@pytest.mark.parametrize("first", range(len(POOL)))
def test_what_is_left_says_all(first: int) -> None:
    """Of every three relations, at all small sizes: where those that are left hold, so do the others."""
    ranges = range(2, 9), range(1, 5), range(1, 6), (2,)
    points = [dict(zip((K, G, M, L), p, strict=True)) for p in itertools.product(*ranges)]
    truth = {c: [holds(c, p) for p in points] for c in POOL}
    for several in itertools.combinations(POOL[first:], 3):
        if several[0] is POOL[first]:
            left = Facts(LEAST).needed(several)
            for at in range(len(points)):
                assert all(truth[c][at] for c in several) or not all(truth[c][at] for c in left), (several, left)
