"""Builds the source of one Python function at run time: lines, and the objects that they name.

A text is compiled once, however many functions are made of it: what differs between two calls of one Function (shapes,
kernels, guards) stands in the text by name only. Debuggers and profilers read the text back through linecache.
"""

from __future__ import annotations

import functools
import linecache
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

from ...tracer.torch_private import hide_from_dynamo
from ..settings.generated_sources import STRAIGHT

INDENT = "    "


class SourceWriter:
    """The body of one function. Values are names; objects from outside become globals of the function."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.bound: dict[str, Any] = {}
        self._known: dict[int, str] = {}
        self._taken: dict[str, int] = {}
        self._depth = 1

    def add(self, line: str) -> None:
        """One more line."""
        self.lines.append(INDENT * self._depth + line)

    def name(self, hint: str) -> str:
        """A name that nothing else has."""
        self._taken[hint] = number = self._taken.get(hint, 0) + 1
        return f"{hint}_{number}"

    def let(self, hint: str, expression: str) -> str:
        """Names the value of an expression."""
        name = self.name(hint)
        self.add(f"{name} = {expression}")
        return name

    def assigned(self, first: int) -> list[str]:
        """The names that the lines from `first` on let be something."""
        found = (re.match(r"\s*(\w+) = ", line) for line in self.lines[first:])
        return list(dict.fromkeys(match[1] for match in found if match))

    def constant(self, value: Any, hint: str = "constant") -> str:
        """The name of an object; one object has one name."""
        if value is None or value is True or value is False:
            return repr(value)
        if id(value) not in self._known:
            name = self._known[id(value)] = self.name(hint)
            self.bound[name] = value  # which keeps it alive, so that its id stays its own
        return self._known[id(value)]

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """The lines within stand below `head`."""
        self.add(head)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def function(self, name: str, parameters: Sequence[str]) -> Callable[..., Any]:
        """The function of these lines."""
        text = "\n".join([f"def {name}({', '.join(parameters)}):", *self.lines, ""])
        made = dict(self.bound)
        exec(_compiled(text), made)  # names of our own and fixed phrases: nothing of it is anyone's input
        return made[name]  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=1024)
def _compiled(text: str) -> CodeType:
    file = f"{STRAIGHT} {_compiled.cache_info().misses}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    hide_from_dynamo([file])
    return compile(text, file, "exec")


def row(names: Sequence[str]) -> str:
    """Names as the inside of a tuple or list: `a, b, `."""
    return "".join(f"{name}, " for name in names)
