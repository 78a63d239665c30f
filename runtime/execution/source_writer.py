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

INDENT = "    "
STRAIGHT = "<fusegrad straight"
"""The beginning of the names of files that a traceback shows for such sources."""
NODE = "return node"
"""The beginning of the line that calls a generated Function."""


class SourceWriter:
    """The body of one function. Values are names; objects from outside become globals of the function."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.bound: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._counts: dict[str, int] = {}
        self._depth = 1

    def add(self, line: str) -> None:
        """Append a line."""
        self.lines.append(INDENT * self._depth + line)

    def name(self, hint: str) -> str:
        """Return a name that nothing else has."""
        self._counts[hint] = number = self._counts.get(hint, 0) + 1
        return f"{hint}_{number}"

    def let(self, hint: str, expression: str) -> str:
        """Assign an expression to a new name, and return it."""
        name = self.name(hint)
        self.add(f"{name} = {expression}")
        return name

    def assigned_names(self, first: int) -> list[str]:
        """The names that the lines from `first` on assign to."""
        matches = (re.match(r"\s*(\w+) = ", line) for line in self.lines[first:])
        return list(dict.fromkeys(match[1] for match in matches if match))

    def constant(self, value: Any, hint: str = "constant") -> str:
        """The name of an object; one object has one name."""
        if value is None or value is True or value is False:
            return repr(value)
        if id(value) not in self._names:
            name = self._names[id(value)] = self.name(hint)
            self.bound[name] = value  # which keeps it alive, so that its id stays its own
        return self._names[id(value)]

    def bind(self, function: Callable[..., Any], *known: Any, hint: str) -> str:
        """Return the name of a function whose first arguments are known."""
        return self.constant(functools.partial(function, *known), hint)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Indent the lines within below `head`."""
        self.add(head)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def function(self, name: str, parameters: Sequence[str]) -> Callable[..., Any]:
        """Compile the lines as the body of a function."""
        text = "\n".join([f"def {name}({', '.join(parameters)}):", *self.lines, ""])
        scope = {"__name__": __name__, **self.bound}  # so that a search for the user's frame passes it by
        exec(_compiled(text), scope)  # names of our own and fixed phrases: no part of it is input
        return scope[name]  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=1024)
def _compiled(text: str) -> CodeType:
    file = f"{STRAIGHT} {_compiled.cache_info().misses}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    hide_from_dynamo([file])
    return compile(text, file, "exec")


def row(names: Sequence[str]) -> str:
    """Names as the inside of a tuple or list: `a, b, `."""
    return "".join(f"{name}, " for name in names)
