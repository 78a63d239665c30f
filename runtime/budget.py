"""When a capture is worth what it costs: the first kind of call at once, a further one when it came often.

A number in a key may have a new value at every call, an object may be another one, sizes and layouts may change, and a
capture costs as much as some hundred calls, whether it succeeds or not. Counts decide, not clocks, so that the same
calls are always treated alike.
"""

from __future__ import annotations

import math
import types
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..ir.switches import is_on
from ..tracer.capture import OpaqueMet, operations_traced
from ..tracer.pictures import Same

AT_ONCE = 16
"""Numbers and objects for which a class is captured at their first call, all else alike."""
CLOSURES = 4
"""Functions that close over something for which a class is captured at once: most are made anew at every call."""
WORK: float = 32
"""Operations traced for a class, in captures that failed as well, that double how often a further kind has to come."""
OVERHEAD = 8
"""What a capture costs beside its operations, counted in these."""
OFTEN = 256
"""Calls of one kind after which it is captured, whatever went before: eagerly they took as long as a capture does."""
REMEMBERED = 1024
MANY = (
    f"it was captured for {AT_ONCE} numbers or objects, all else alike, or for {CLOSURES} closures: with another it "
    f"runs as you wrote it until it was called with that one {OFTEN} times"
)
SPENT = (
    "its captures so far, failed ones as well, took long: for a further kind of call it runs as you wrote it until "
    f"that kind came 2, 4, 8, .. times, {OFTEN} at most"
)


class Budget:
    """The captures that a class may begin."""

    def __init__(self) -> None:
        self.captured: Counter[Any] = Counter()
        self.closures = 0
        self.work = 0
        self.met: OrderedDict[Any, int] = OrderedDict()

    def why_later(self, facts: Any, args: Sequence[Any]) -> str | None:
        """Why a call with these facts is not to be captured yet, and counts it; None where it may be."""
        if not is_on("patience"):
            return None
        why, calls = self._wanted(facts, args)
        if calls == 1:
            return None
        self.met[facts] = count = self.met.pop(facts, 0) + 1
        if len(self.met) > REMEMBERED:
            self.met.popitem(last=False)
        return why if count < calls else None

    def _wanted(self, facts: Any, args: Sequence[Any]) -> tuple[str, int]:
        """How often such a call has to come, and why."""
        left = self.closures < CLOSURES if has_closure(args) else self.captured[alike(facts)] < AT_ONCE
        return (SPENT, self.calls_wanted()) if left else (MANY, OFTEN)

    def calls_wanted(self) -> int:
        """How often a further kind has to come, numbers and closures apart."""
        return int(min(OFTEN, 2 ** math.ceil(self.work / WORK)))

    def spend(self, facts: Any, args: Sequence[Any]) -> None:
        """A capture was made."""
        self.captured[alike(facts)] += 1
        self.closures += has_closure(args)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """An attempt at a capture. One that only found what is to run between its segments is part of the next."""
        before, costs = operations_traced(), True
        try:
            yield
        except OpaqueMet:
            costs = False
            raise
        finally:
            traced = operations_traced() - before
            self.work += traced + OVERHEAD if traced and costs else 0


def has_closure(args: Sequence[Any]) -> bool:
    """Whether an argument is a function that closes over something."""
    return any(type(a) is types.FunctionType and a.__closure__ is not None for a in args)


def alike(fact: Any) -> Any:
    """What remains of a key without the ints, floats and identities in it."""
    if not isinstance(fact, tuple):
        return Same if type(fact) is Same else fact
    if len(fact) == 2 and fact[0] in ("int", "float"):
        return fact[0]
    return tuple(map(alike, fact))
