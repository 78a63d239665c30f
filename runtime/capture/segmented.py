"""A class whose methods are rewritten around what cannot be captured; see tracer/opaque/segments.py.

What is taken out is known from the byte code (effects), or from the place at which a capture failed. Where the rest
cannot be captured either, more of the statements around goes with it, up to the method, which then runs as written.
"""

from __future__ import annotations

import operator
import re
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch.autograd.function import Function

from ...tracer.capture.history import ASKS
from ...tracer.capture.memory import RESIZES
from ...tracer.methods import plain_function
from ...tracer.opaque.opaque import Why
from ...tracer.opaque.segments import (
    Lines,
    Segment,
    UnfitError,
    cut,
    decorate_again,
    holds,
    innermost_function,
    lines_of,
    lines_that_catch,
    names_reached,
    stores_items,
)
from ...tracer.reads.changes import is_change
from ...tracer.reads.reads import Read, Reads, certain_effects, scan
from ...tracer.trace import CaptureError

ATTEMPTS = 12
"""The number of times that one class is rewritten; methods that still cannot be traced fall back to eager."""
CATCHES = "it catches what torch raises for some data"
WHOLE = (ASKS, RESIZES)
"""What no lines of their own may do: they would be given values without a history, or free what a graph keeps."""
WITH_CTX = ("setup_context", "backward", "vjp")


class _Rewritten:
    """A static method in the place of another, for as long as that is the user's."""

    def __init__(self, cls: type, name: str, replacement: Any) -> None:
        self.cls, self.name, self.replacement = cls, name, replacement
        self.identity = _identity(getattr(cls, name))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return getattr(self.cls, self.name) if self.is_stale() else self.replacement

    def is_stale(self) -> bool:
        """True if the user exchanged the method since: an assignment to its code or defaults makes another."""
        (before, *parts), (now, *parts_now) = self.identity, _identity(getattr(self.cls, self.name))
        return before != now or not all(map(operator.is_, parts, parts_now))


class Segmented:
    """The user's class, and the one with segments that stands for it."""

    def __init__(self, cls: type) -> None:
        self.original = self.cls = cls
        self.allowed = plain_function(cls) is None
        self.lines: dict[str, Lines] = {}
        self.rewritten: dict[str, _Rewritten] = {}
        self.segments: dict[str, list[Segment]] = {}
        self.attempts = 0
        self.failed: set[str] = set()

    def forget_exchanged(self) -> None:
        """Forget what is known of methods that the user exchanged since."""
        for name in [n for n, rewritten in self.rewritten.items() if rewritten.is_stale()]:
            self._forget(name)

    def _forget(self, name: str) -> None:
        for table in (self.lines, self.rewritten, self.segments):
            table.pop(name, None)
        self._make()

    def add_reads(self, reads: Reads) -> None:
        """A rewritten method is as good as the code of the user's."""
        for name in self.rewritten:
            function = innermost_function(getattr(self.original, name))
            path = f"code of {self.original.__qualname__}.{name}@{id(function)}"
            reads.entries[path] = Read(path, "function", lambda function=function: function, ("is", function))  # type: ignore[misc]
            reads.keepalive.append(function)

    def give_up_clashing(self, reads: Reads) -> bool:
        """Give up segments that may change what the methods read besides them; whether there were any."""
        roots = {_root_name(r.path) for r in reads.entries.values() if r.kind in ("value", "tensor")} - {None}
        clashing = [n for n, segments in self.segments.items() if any(_may_change(s, roots) for s in segments)]
        for name in clashing:
            self._give_up(name)
        return bool(clashing)

    def take_out_effects(self, methods: Mapping[str, Callable[..., Any]]) -> None:
        """Take out of methods what a graph would lose, as far as it can be taken out."""
        for name in methods:
            for _ in range(2):
                # Twice at most: what is taken out may uncover effects behind it.
                effects = certain_effects(getattr(self.cls, name))
                findings = [(lines_of(getattr(self.original, name), e.where), e.reason) for e in effects]
                findings += [([line], CATCHES) for line in self._catching_lines(name)]
                if not findings or not all(lines for lines, _ in findings):
                    break
                why = {line: _reason_of(reason) for lines, reason in reversed(findings) for line in lines}
                if not self._take_out_lines(name, why):
                    break
            # Effects that remain would happen once in a graph and never again: the whole method goes.
            if name in self.lines and certain_effects(getattr(self.cls, name)):
                self._give_up(name)

    def _catching_lines(self, name: str) -> list[int]:
        """Where a method catches what torch raises for some data."""
        function = innermost_function(getattr(self.original, name))
        return [] if function is None or name in self.lines or name in self.failed else lines_that_catch(function)

    def catches(self, name: str) -> str | None:
        """The place where a method catches what torch raises for some data, once it cannot be taken out."""
        function = innermost_function(getattr(self.original, name))
        lines = lines_that_catch(function) if name in self.failed and function is not None else []
        return f"{function.__code__.co_filename}:{lines[0]}" if lines and function is not None else None

    def take_out(self, methods: Mapping[str, Callable[..., Any]], error: CaptureError) -> bool:
        """Take out of methods where a capture failed; whether anything changed."""
        segment = error.callee
        if isinstance(segment, Segment):
            return self._widen(segment)
        if error.facts["reason"] in WHOLE:
            return False
        for name in methods:
            lines = _lines_of_error(getattr(self.original, name), error)
            reasons = self.lines.get(name, Lines()).why
            if lines and not all(line in reasons for line in lines):
                return self._take_out_lines(name, dict.fromkeys(lines, _reason_of(error.facts["reason"])))
        return False

    def _take_out_lines(self, name: str, why: Mapping[int, Why]) -> bool:
        return self._rewrite(name, self.lines.get(name, Lines()).with_lines(why))

    def _widen(self, segment: Segment) -> bool:
        """More statements around, or behind, a segment that cannot be called by a graph as it is."""
        name = next((n for n, segments in self.segments.items() if any(s is segment for s in segments)), None)
        if name is None:
            return False
        lines = self.lines[name]
        if segment.apart - lines.confined and self._rewrite(name, lines.with_confined(segment.apart)):
            return True
        return self._rewrite(name, self.lines[name].with_enclosing(segment.lines)) or self._give_up(name)

    def _give_up(self, name: str) -> bool:
        self._forget(name)
        self.failed.add(name)
        return False

    def _rewrite(self, name: str, lines: Lines) -> bool:
        method, function = getattr(self.original, name), innermost_function(getattr(self.original, name))
        self.attempts += 1
        if function is None or name in self.failed or self.attempts > ATTEMPTS or not _is_static(self.original, name):
            return False
        try:
            # Rewrite, and keep the user's decorators around the new body.
            replacement, segments = cut(function, lines, self._ctx(name, function), f"{self.original.__name__}Backward")
            wrapped = decorate_again(method, replacement)
        except UnfitError:
            return False
        self.lines[name], self.segments[name] = lines, segments
        self.rewritten[name] = _Rewritten(self.original, name, wrapped)
        self._make()
        return True

    def _ctx(self, name: str, function: types.FunctionType) -> str | None:
        """The name that the method has for ctx."""
        has_ctx = name in WITH_CTX or self.original.setup_context is Function.setup_context  # type: ignore[attr-defined]
        return function.__code__.co_varnames[0] if has_ctx and function.__code__.co_argcount else None

    def _make(self) -> None:
        original = self.original
        names = {n: getattr(original, n) for n in ("__module__", "__qualname__", "__doc__")}
        body: dict[str, Any] = {**names, **self.rewritten}
        self.cls = type(original)(original.__name__, (original,), body) if self.rewritten else original


def _is_static(cls: type, name: str) -> bool:
    owner = next((c for c in cls.__mro__ if name in vars(c)), None)
    return owner is not None and isinstance(vars(owner)[name], staticmethod)


def _identity(method: Any) -> Any:
    """The identity of a method: it tells whether the user exchanged it since."""
    function = innermost_function(method)
    return method, getattr(function, "__code__", None), getattr(function, "__defaults__", None)


def _root_name(path: str) -> str | None:
    """The global or the free variable that a path begins with."""
    match = re.match(r"(?:global|closure) (\w+)", path)
    return match[1] if match else None


def _may_change(segment: Segment, roots: Collection[str | None]) -> bool:
    """True if a segment names one of these roots, and changes an object."""
    names = names_reached(segment.function)
    if not names & set(roots):
        return False
    in_place = any(n.endswith("_") and not n.startswith("_") for n in names) or stores_items(segment.function.__code__)
    return in_place or any(is_change(effect.reason) for effect in scan(segment.function).effects)


def _reason_of(reason: str) -> Why:
    return Why(reason.removeprefix("it ") if reason.startswith("it ") else f"cannot be traced: {reason}")


def _lines_of_error(method: Any, error: CaptureError) -> list[int]:
    """The lines of a method that an error passed through, innermost call; else those that lead to its place."""
    function = innermost_function(method)
    if function is None:
        return []
    code = function.__code__
    lines = [n for file, name, n in error.passed if name == code.co_name and holds(code, file, n)]
    return lines[-1:] or lines_of(method, error.facts["where"])
