"""Calls that are ready to be made again: one function per call that came often, which asks no more than it must.

    Fast.apply(*args) -> the last such function -> another for these shapes -> the look-up that serves every call

Such a function returns MISS where anything differs from the call that it was written for; then the general way decides.
Entries are never changed, only exchanged as a whole: threads need no lock to use them.
"""

from __future__ import annotations

import inspect
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...tracer.locks import INNER, lock_of
from .argument_forms import MISS, Form, positional

Entry = Callable[[tuple[Any, ...]], Any]
FIRST = 3
"""Calls of one kind before a function is written for it; twice as many with every TABLE functions written."""
TABLE = 16
SHAPES = 64
"""Shapes that a class keeps functions for, and VARIANTS of each: grad modes, constants, settings."""
VARIANTS = 4
COUNTED = 1024
HOPELESS = -(1 << 60)
_lock = lock_of(INNER)


def never(args: tuple[Any, ...]) -> Any:
    """The entry of a class that has none."""
    return MISS


def shapes_of(args: tuple[Any, ...]) -> Any:
    """The key by which entries are looked up."""
    return tuple([a.shape if isinstance(a, torch.Tensor) else None for a in args])


class InlineCache:
    """The entries of one class."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.latest: Entry = never
        self.entries: OrderedDict[Any, tuple[Entry, ...]] = OrderedDict()
        self.counts: OrderedDict[Any, int] = OrderedDict()
        self.forms: dict[Any, Form] = {}  # by the number of positional arguments, then the keywords
        self.written_count = 0

    def __reduce__(self) -> Any:
        return operator.attrgetter("inline_cache"), (self.owner,)

    def learn_form(
        self, signature: inspect.Signature, count: int, keywords: Iterable[str], method: Callable[[], Any]
    ) -> None:
        """Calls with these keywords become calls by position, where there is no more to them."""
        names = tuple(keywords)
        key = (count, *names)
        if key not in self.forms and len(self.forms) < SHAPES:
            if (form := positional(signature, count, names, method)) is not None:
                self.forms[key] = form

    def lookup(self, args: tuple[Any, ...]) -> Any:
        """The result of the entry that fits, where it is not the last one used; else MISS."""
        try:
            candidates = self.entries.get(shapes_of(args), ())
        except (RuntimeError, TypeError):  # tensors without a shape, or with a symbolic one
            return MISS
        for entry in candidates:
            if (result := entry(args)) is not MISS:
                self.latest = entry
                return result
        return MISS

    def should_compile(self, key: Any) -> bool:
        """Counts a call that no entry fitted; whether one is to be written now."""
        with _lock:
            count = self.counts.pop(key, 0) + 1
            due = count >= FIRST << (self.written_count // TABLE)
            self.counts[key] = 0 if due else count
            if len(self.counts) > COUNTED:
                self.counts.popitem(last=False)
            return due

    def add(self, key: Any, args: tuple[Any, ...], entry: Entry | None) -> None:
        """Keeps an entry for calls like this one; None: none can be written."""
        with _lock:
            self.written_count += 1
            if entry is None:
                self.counts[key] = HOPELESS
                return
            shapes = shapes_of(args)
            self.entries[shapes] = (entry, *self.entries.pop(shapes, ())[: VARIANTS - 1])
            if len(self.entries) > SHAPES:
                self.entries.popitem(last=False)
            self.latest = entry

    def forget(self) -> None:
        """Drops all entries: what the methods read is not what it was."""
        with _lock:
            self.entries.clear()
            self.counts.clear()
            self.latest = never
