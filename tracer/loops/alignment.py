"""Where two lists differ by repetitions: the loops of two traces whose lengths differ by one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

LEAST = 2
"""Repetitions in the shorter list that are a loop."""


@dataclass(frozen=True)
class Region:
    """`count` repetitions of `period` entries each, from `start` on, in the shorter list; the longer has one more."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count

    def without(self, first: int, last: int) -> Region:
        """The rest where some repetitions stand apart."""
        return Region(self.start + first * self.period, self.period, self.count - first - last)


def repeated_regions(short: Sequence[Hashable], long: Sequence[Hashable]) -> list[Region] | None:
    """a b b c, a b b b c  ->  b twice, from 1 on. None where the lists differ in another way."""
    return _regions(short, long, 0, 0, 0)


def _regions(short: Sequence[Hashable], long: Sequence[Hashable], i: int, j: int, floor: int) -> list[Region] | None:
    while i < len(short) and j < len(long) and short[i] == long[j]:
        i, j = i + 1, j + 1
    excess = (len(long) - j) - (len(short) - i)
    if j == len(long):
        return [] if i == len(short) else None
    for period in range(1, min(excess, i - floor) + 1):
        if short[i - period : i] != long[j : j + period]:
            continue
        start = _begin_of_run(short, i, period, floor)
        count = (i - start) // period
        rest = _regions(short, long, i, j + period, i) if count >= LEAST else None
        if rest is not None:
            return [Region(start, period, count), *rest]
    return None


def _begin_of_run(entries: Sequence[Hashable], stop: int, period: int, floor: int) -> int:
    start = stop - period
    while start > floor and entries[start - 1] == entries[start - 1 + period]:
        start -= 1
    return start
