"""Where two lists differ by repetitions, the loops of traces whose lengths differ by one; where one list has some.

`range(2 * n - 1)` has two steps more where n is one more: `more` of a region.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

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

    def behind(self, start: int) -> Region:
        """What is left of it from an entry on."""
        left = max(self.start, start)
        return replace(self, start=left, count=max(0, (self.stop - left) // self.period))


MOST = 4
"""Steps that a loop has more where its length is one more."""


def alignments(short: Sequence[Hashable], long: Sequence[Hashable]) -> Iterator[list[Region]]:
    """The ways in which the lists differ by repetitions alone, the likeliest first.

    a b b c, a b b b c  ->  b twice, from 1 on
    a a a a, a a a a a a  ->  a four times, with two more; (a a) twice; a twice, and again a twice
    """
    return _alignments(short, long, 0, 0, 0)


def _alignments(
    short: Sequence[Hashable], long: Sequence[Hashable], i: int, j: int, floor: int
) -> Iterator[list[Region]]:
    while i < len(short) and j < len(long) and short[i] == long[j]:
        i, j = i + 1, j + 1
    if j == len(long):
        yield from [[]] if i == len(short) else []
        return
    excess = (len(long) - j) - (len(short) - i)
    periods = [p for p in range(1, min(excess, i - floor) + 1) if short[i - p : i] == long[j : j + p]]
    runs = []
    for period in periods:
        start, more = _begin_of_run(short, i, period, floor), _repetitions(short[i - period : i], long, j)
        runs.append(Region(start, period, (i - start) // period, more))
    for regions in _loops(runs):
        added = sum(region.more * region.period for region in regions)
        yield from ([*regions, *rest] for rest in _alignments(short, long, i, j + added, i))


def _loops(runs: Sequence[Region]) -> Iterator[list[Region]]:
    """A run with so many repetitions more is one loop that has them, of as few entries a turn as can be, or so many
    loops."""
    added = [(run, more) for run in runs if run.count >= LEAST for more in range(1, run.more + 1)]
    yield from ([replace(run, more=more)] for run, more in added if more <= MOST)
    for run, more in added:
        if more > 1 and (count := run.count // more) >= LEAST:
            yield [Region(run.start + n * count * run.period, run.period, count) for n in range(more)]


def _repetitions(entries: Sequence[Hashable], long: Sequence[Hashable], at: int) -> int:
    """How often entries are repeated from there on."""
    period, found = len(entries), 0
    while long[at + found * period : at + (found + 1) * period] == entries:
        found += 1
    return found


def _begin_of_run(entries: Sequence[Hashable], stop: int, period: int, floor: int) -> int:
    start = stop - period
    while start > floor and entries[start - 1] == entries[start - 1 + period]:
        start -= 1
    return start


def going_on(entries: Sequence[Hashable], region: Region) -> int:
    """How many entries behind a region, fewer than a turn, are those of its next turn."""
    behind = entries[region.stop : region.stop + region.period - 1]
    pairs = zip(behind, entries[region.stop - region.period :], strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


# ---------------------------------------------------------------------------------------------- in one list
FEWEST_TURNS = 4
"""Repetitions in one list that may be a loop."""


def repetitions(entries: Sequence[Hashable], least: int, turns: int = FEWEST_TURNS) -> list[Region]:
    """a b b b b c, 4  ->  b four times. Those that have `least` entries together at least, and so many `turns`."""
    numbers = {entry: number for number, entry in enumerate(dict.fromkeys(entries))}
    return _repetitions_in(np.array([numbers[entry] for entry in entries]), 0, least, turns)


def _repetitions_in(entries: np.ndarray[Any, Any], offset: int, least: int, turns: int) -> list[Region]:
    longest = len(entries) // turns if len(entries) >= least else 0
    runs = [_longest_run(entries, period) for period in range(1, longest + 1)]
    best = max(runs, key=lambda run: run.period * run.count, default=Region(0, 0, 0))
    if best.period * best.count < least or best.count < turns:
        return []
    before = _repetitions_in(entries[: best.start], offset, least, turns)
    behind = _repetitions_in(entries[best.stop :], offset + best.stop, least, turns)
    return [*before, Region(offset + best.start, best.period, best.count), *behind]


def _longest_run(entries: np.ndarray[Any, Any], period: int) -> Region:
    """The longest stretch in which each entry is the one a period before."""
    ends = np.flatnonzero(np.concatenate([[True], entries[period:] != entries[:-period], [True]]))
    at = int(np.argmax(np.diff(ends)))
    alike = int(ends[at + 1] - ends[at]) - 1
    return Region(int(ends[at]), period, alike // period + 1)
