"""When a capture is worth what it costs: of calls that differ in numbers, or of long graphs, the first few at once.

A number in a key may have a new value at every call, an object may be another one, and a capture costs as much as
some hundred calls. Counts decide, not clocks, so that the same calls are always treated alike.
"""

from __future__ import annotations

import types
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

from ..tracer.capture import Trace
from ..tracer.pictures import Same

AT_ONCE = 16
"""Numbers and objects for which a class is captured at their first call, all else alike."""
CLOSURES = 4
"""Functions that close over something for which a class is captured at once: most are made anew at every call."""
LENGTH = 2048
"""Operations of all captures of a class, with which no kind is captured at once: a capture costs by its operations."""
OFTEN = 256
"""Calls of one kind after which it is captured, too: eagerly they took as long as a capture does."""
REMEMBERED = 1024
LATER = (
    f"it was captured for {AT_ONCE} numbers or objects, all else alike, for {CLOSURES} closures, or for kinds "
    f"with {LENGTH} operations together: with another it runs as you wrote it until "
    f"it was called with that one {OFTEN} times"
)


class Budget:
    """The captures that a class may begin."""

    def __init__(self) -> None:
        self.captured: Counter[Any] = Counter()
        self.closures = 0
        self.operations = 0
        self.met: OrderedDict[Any, int] = OrderedDict()

    def allows(self, facts: Any, args: Sequence[Any]) -> bool:
        """Whether a call with these facts may be captured now; counts it where it may not."""
        left = self.closures < CLOSURES if has_closure(args) else self.captured[alike(facts)] < AT_ONCE
        if left and self.operations < LENGTH:
            return True
        self.met[facts] = count = self.met.pop(facts, 0) + 1
        if len(self.met) > REMEMBERED:
            self.met.popitem(last=False)
        return count >= OFTEN

    def spend(self, facts: Any, args: Sequence[Any], trace: Trace) -> None:
        """A capture was made."""
        self.captured[alike(facts)] += 1
        self.closures += has_closure(args)
        self.operations += len(trace.graph_module.graph.nodes)


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
