"""A capture is made when it is worth its cost: at once, but for a class of many graphs, or whose captures fail.

A number in a key may have a new value at every call, an object may be another one, sizes and layouts may change, and a
capture costs as much as some hundred calls, whether it succeeds or not. Counts decide, not clocks, so that the same
calls are always treated alike.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...ir.switches import is_on
from ...tracer.capture.capture import OpaqueCallError, operations_kept, operations_traced
from ...tracer.reads.value_keys import Same

AT_ONCE = 16
"""Numbers and objects for which a class is captured at their first call, all else alike."""
CLOSURES = 4
"""Functions that close over something for which a class is captured at once: most are made anew at every call."""
WORK: float = 2048
"""Operations in the graphs of a class, all together, for which it is captured at once: dtypes, layouts, sizes. A loop
counts as the node that it is, and not as the traces that it was rolled from: it is traced for all lengths at once."""
FAMILY: float = 8 * WORK
"""The same of all classes that one class statement makes, but for the first: some 250 small ones."""
FAILED = 128
"""Operations traced in vain that double how often a further kind of call has to come before it is tried."""
OVERHEAD = 8
"""What a capture costs beside its operations, counted in these."""
ANEW = 64
"""What a class costs in its first capture, counted in these, whatever it computes: its methods are looked through."""
OFTEN = 256
"""Calls of one kind after which it is captured, whatever went before: eagerly they took as long as a capture does."""
REMEMBERED = 1024
METHODS = ("forward", "setup_context", "backward", "vjp", "jvp", "vmap")
MANY = (
    f"it was traced for {AT_ONCE} numbers or objects, all else alike, or for {CLOSURES} closures: with another it "
    f"falls back to eager until it was called with that one {OFTEN} times"
)
SPENT = (
    f"its graphs have {WORK} operations together: for a further kind of call it falls back to eager until that kind "
    f"came {OFTEN} times"
)
AGAIN = (
    f"it was traced for class after class that the same lines make, whose graphs have {FAMILY} operations together: "
    f"one more falls back to eager until it was called {OFTEN} times"
)
VAIN = (
    "its traces failed, which took long: a further kind of call falls back to eager until that kind came 2, 4, "
    f"8, .. times, {OFTEN} at most"
)


@dataclass
class Family:
    """The classes that one class statement makes, a class each time it runs, and what all but the first cost."""

    first: weakref.ref[type]
    codes: tuple[Any, ...]
    """Kept alive: a family is found by where these are in memory."""
    work: int = 0


_families: dict[Any, Family] = {}


def family_of(cls: type) -> Family:
    """The family of a class: by its name, and by the code of its methods."""
    methods = [inspect.unwrap(getattr(cls, name)) for name in METHODS if hasattr(cls, name)]
    codes = tuple(getattr(method, "__code__", None) for method in methods)
    key = (cls.__module__, cls.__qualname__, *map(id, codes))
    family = _families.setdefault(key, Family(weakref.ref(cls), codes))
    if len(_families) > REMEMBERED:
        _families.pop(next(iter(_families)), None)
    return family


class Budget:
    """The captures that a class may begin."""

    def __init__(self, cls: type) -> None:
        self.family = family_of(cls)
        self.is_another = self.family.first() is not cls
        self.is_counting = self.is_begun = False
        self.calls = 0
        self.captured: Counter[Any] = Counter()
        self.closures = 0
        self.work = self.failed = 0
        self.met: OrderedDict[Any, int] = OrderedDict()

    def why_not_begun(self) -> str | None:
        """Count a call; the reason why nothing of the class is looked at yet, not even its methods, or None."""
        if self.is_begun or not (self.is_another and self.family.work > FAMILY and is_on("patience")):
            return None
        self.calls += 1
        return AGAIN if self.calls < OFTEN else None

    def why_later(self, facts: Any, args: Sequence[Any]) -> str | None:
        """The reason why a call with these facts is not to be captured yet, and counts it; None where it may be."""
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
        """The number of times that such a call has to come, after the reason."""
        left = self.closures < CLOSURES if has_closure(args) else self.captured[alike(facts)] < AT_ONCE
        if not left:
            return MANY, OFTEN
        if self.work > WORK:
            return SPENT, OFTEN
        return VAIN, min(OFTEN, 2 ** min(self.failed // FAILED, OFTEN))

    def spend(self, facts: Any, args: Sequence[Any]) -> None:
        """A capture was made."""
        self.captured[alike(facts)] += 1
        self.closures += has_closure(args)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """An attempt at a capture. One that only found what is to run between its segments is part of the next."""
        before, kept, self.is_counting = operations_traced(), operations_kept(), True
        try:
            yield
        except OpaqueCallError:
            raise
        except BaseException:
            traced = operations_traced() - before
            self.failed += traced + OVERHEAD if traced else 0
            raise
        finally:
            self.is_counting = False
            self._count_for_all(operations_traced() - before + (0 if self.is_begun else ANEW))
            self.is_begun = True
        self.work += operations_kept() - kept

    @contextmanager
    def of_backward(self) -> Iterator[None]:
        """A capture of backward, which counts for what the classes of the family cost together."""
        before = operations_traced()
        try:
            yield
        finally:
            if not self.is_counting:
                self._count_for_all(operations_traced() - before)

    def _count_for_all(self, work: int) -> None:
        self.family.work += work if self.is_another else 0


def has_closure(args: Sequence[Any]) -> bool:
    """True if an argument is a function that closes over something."""
    return any(type(a) is types.FunctionType and a.__closure__ is not None for a in args)


def alike(fact: Any) -> Any:
    """A key without the ints, floats and identities in it."""
    if not isinstance(fact, tuple):
        return Same if type(fact) is Same else fact
    if len(fact) == 2 and fact[0] in ("int", "float"):
        return fact[0]
    return tuple(map(alike, fact))
