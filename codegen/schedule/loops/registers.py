"""Registers of a thread that goes through time, estimated: what is carried, what is read beforehand, and a step.

A value that is read once streams by, element by element; others live until they are read last.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate

from ....ir.types import ITEMSIZE
from ...program.axes import Axis, Term, terms_below
from .recurrences import Linear
from .roles import LoopProgram, LoopState

ADDRESSES = 32
"""For addresses, masks and what a value is made of."""
WALKS = 3
"""Of a chunk's steps: for what they make of the states, for these where others are in vain, and for the results."""
FREE = ("const", "index", "carried")
"""Numbers, addresses, and what is counted as a state."""
WORD = 4


def threads_of(blocks: dict[Axis, int], threads: int) -> dict[Axis, int]:
    """The threads along each axis of a tile, whose last axis has the first of them."""
    along: dict[Axis, int] = {}
    for axis, lanes in reversed(blocks.items()):
        along[axis] = min(threads, lanes)
        threads //= along[axis]
    return along


def registers_of(program: LoopProgram, blocks: dict[Axis, int], threads: int) -> int:
    """About so many, step by step, with these lanes along each axis of the tile in its order."""
    step = terms_below(t for s in (*program.in_loop, *(s.update for s in program.states)) for t in s.terms)
    moving = _moving(step, program.time)
    read = {a for t in moving for a in t.args}
    before = (t for t in step if t in read and t not in moving and t.op not in FREE)
    held = sum(_words(t, blocks, threads) for t in (*before, *(s.before for s in program.states)))
    words = partial(_words, blocks=blocks, threads=threads)
    return ADDRESSES + held + _most_at_once(list(moving), words, {s.update.value for s in program.states})


def registers_at_once(terms: Sequence[Term], blocks: dict[Axis, int], threads: int) -> int:
    """About so many where there is no loop, and all of it is one step."""
    return ADDRESSES + _most_at_once(list(terms), partial(_words, blocks=blocks, threads=threads))


def registers_of_scans(
    program: LoopProgram, linear: Mapping[LoopState, Linear], blocks: dict[Axis, int], threads: int
) -> int:
    """About so many while steps are taken at once: what is scanned and its scan, the states, what is read once more."""
    words = partial(_words, blocks=blocks, threads=threads)
    scanned = [part for line in linear.values() for part in line if part is not None]
    before = terms_below(scanned)
    again = {a for t in program.terms if t not in before for a in t.args if a in before and a.op not in FREE}
    states = [s.update.value for s in linear]
    return ADDRESSES + sum(map(words, (*scanned, *scanned, *states, *again)))


def registers_of_chunks(
    program: LoopProgram, linear: Mapping[LoopState, Linear], blocks: dict[Axis, int], threads: int
) -> int:
    """About so many where chunks of time look back: the loads of the rest of a step begin at once, and a chunk is
    walked up to three times, whose addresses are made before all of them."""
    before = terms_below(part for line in linear.values() for part in line if part is not None)
    late = (t for t in program.terms if t.op == "load" and program.time in t.axes and t not in before)
    in_flight = sum(_words(t, blocks, threads) for t in late)
    return registers_of_scans(program, linear, blocks, threads) + in_flight + (WALKS - 1) * ADDRESSES


def _moving(step: Iterable[Term], time: Axis) -> dict[Term, None]:
    """What is not the same in all steps."""
    found: dict[Term, None] = {}
    for term in step:
        if term.op == "carried" or time in term.axes or any(a in found for a in term.args):
            found[term] = None
    return found


def _words(term: Term, blocks: dict[Axis, int], threads: int) -> int:
    """Of a thread, for its elements of a tile; a number that all have alike needs none of its own.

    Threads along an axis that a value lacks hold the same of it, but for the last axis: without that, it has a layout
    of its own.
    """
    own = {a: n for a, n in blocks.items() if a in term.axes}
    if not own:
        return 0
    along = threads_of(blocks if next(reversed(blocks)) in own else own, threads)
    return math.prod(-(-n // along[a]) for a, n in own.items()) * -(-ITEMSIZE[term.dtype] // WORD)


def _most_at_once(step: list[Term], words: Callable[[Term], int], lasting: Iterable[Term] = ()) -> int:
    """What lives at the same time within a step, at most; lasting: to its end."""
    uses = Counter(a for t in step for a in t.args)
    ends = {a: at for at, t in enumerate(step) for a in t.args} | dict.fromkeys(lasting, len(step))
    changes: Counter[int] = Counter()
    for at, term in enumerate(step):
        end = ends.get(term, at)
        if term.op not in FREE and (uses[term] > 1 or end == len(step)):
            changes[at] += words(term)
            changes[end] -= words(term)
    return max(accumulate(changes[at] for at in range(len(step))), default=0)
