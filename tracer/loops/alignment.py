"""Where two lists differ by repetitions: the loops of two traces whose lengths differ by one.

`range(2 * n - 1)` has two steps more where n is one more: `more` of a region.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

LEAST = 2
"""Repetitions in the shorter list that are a loop."""


@dataclass(frozen=True)
class Region:
    """`count` repetitions of `period` entries each, from `start` on, in the shorter list; the longer has `more`."""

    start: int
    period: int
    count: int
    more: int = 1

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count

    def without(self, first: int, last: int) -> Region:
        """The rest where some repetitions stand apart."""
        return replace(self, start=self.start + first * self.period, count=self.count - first - last)


MOST = 4
"""Steps that a loop has more where its length is one more."""


def repeated_regions(short: Sequence[Hashable], long: Sequence[Hashable]) -> Iterator[list[Region]]:
    """a b b c, a b b b c  ->  b twice, from 1 on; nothing where the lists differ in another way.

    Where there are several ways, that with one step more comes first.
    """
    found = [_regions(short, long, (0, 0), 0, most) for most in (1, MOST)]
    yield from (r for i, r in enumerate(found) if r is not None and r not in found[:i])


def _regions(
    short: Sequence[Hashable], long: Sequence[Hashable], at: tuple[int, int], floor: int, most: int
) -> list[Region] | None:
    i, j = at
    while i < len(short) and j < len(long) and short[i] == long[j]:
        i, j = i + 1, j + 1
    excess = (len(long) - j) - (len(short) - i)
    if j == len(long):
        return [] if i == len(short) else None
    for period in range(1, min(excess, i - floor) + 1):
        start = _begin_of_run(short, i, period, floor)
        count = (i - start) // period
        for more in range(1, _repetitions(short[i - period : i], long, j, most) + 1) if count >= LEAST else ():
            rest = _regions(short, long, (i, j + more * period), i, most)
            if rest is not None:
                return [Region(start, period, count, more), *rest]
    return None


def _repetitions(entries: Sequence[Hashable], long: Sequence[Hashable], at: int, most: int) -> int:
    """How often these entries follow, at most so many times."""
    period = len(entries)
    starts = range(at, at + most * period, period)
    return next((n for n, s in enumerate(starts) if long[s : s + period] != entries), most)


def _begin_of_run(entries: Sequence[Hashable], stop: int, period: int, floor: int) -> int:
    start = stop - period
    while start > floor and entries[start - 1] == entries[start - 1 + period]:
        start -= 1
    return start
