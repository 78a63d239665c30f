"""When a capture is worth what it costs: of calls that differ in numbers, or of long graphs, the first few at once.

A number in a key may have a new value at every call, and a capture costs as much as a hundred calls. Counts decide, not
clocks, so that the same calls are always treated alike.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

AT_ONCE = 16
"""Numbers for which a class is captured at their first call, all else alike."""
LENGTH = 4096
"""Operations of all captures of a class, with which no kind is captured at once: a capture costs by its operations."""
OFTEN = 32
"""Calls with one number after which it is captured, too."""
REMEMBERED = 1024
LATER = (
    f"it was captured for {AT_ONCE} numbers, all else alike, or for kinds with {LENGTH} operations together: with "
    f"another it runs as you wrote it until it was called with that one {OFTEN} times"
)


class Budget:
    """The captures that a class may begin."""

    def __init__(self) -> None:
        self.captured: Counter[Any] = Counter()
        self.operations = 0
        self.met: OrderedDict[Any, int] = OrderedDict()

    def allows(self, facts: Any) -> bool:
        """Whether a call with these facts may be captured now; counts it where it may not."""
        if self.captured[without_numbers(facts)] < AT_ONCE and self.operations < LENGTH:
            return True
        self.met[facts] = count = self.met.pop(facts, 0) + 1
        if len(self.met) > REMEMBERED:
            self.met.popitem(last=False)
        return count >= OFTEN

    def spend(self, facts: Any, operations: int) -> None:
        """A capture of so many operations was made."""
        self.captured[without_numbers(facts)] += 1
        self.operations += operations


def without_numbers(fact: Any) -> Any:
    """What remains of a key without the ints and floats in it."""
    if not isinstance(fact, tuple):
        return fact
    if len(fact) == 2 and fact[0] in ("int", "float"):
        return fact[0]
    return tuple(map(without_numbers, fact))
