"""Python values and blocks as text: constants that are compiled in, docstrings, indentation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ....ir.text.printable import in_docstring

CONSTANTS = (int, float, bool, str, type(None), torch.dtype)


def is_literal(value: Any) -> bool:
    """True where a constant can be written down."""
    if isinstance(value, dict):
        return all(map(is_literal, value)) and all(map(is_literal, value.values()))
    return all(map(is_literal, value)) if isinstance(value, tuple | list) else isinstance(value, CONSTANTS)


def constant_text(value: Any) -> str:
    """A literal, which evaluates to the value where torch is imported."""
    if isinstance(value, tuple | list):
        inner = ", ".join(map(constant_text, value)) + "," * (isinstance(value, tuple) and len(value) == 1)
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{constant_text(k)}: {constant_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, float) and value - value != 0:
        return f'float("{value}")'
    return str(value) if isinstance(value, torch.dtype) else repr(value)


def unpacking(names: list[str]) -> str:
    """ "a, b" or "a,": the left side of an assignment from a tuple."""
    return ", ".join(names) + "," * (len(names) == 1)


def assignment(names: list[str], text: str) -> str:
    """ "a, b = call()", or the call alone where it returns nothing."""
    return f"{', '.join(names)} = {text}" if names else text


def docstring(text: str) -> Iterator[str]:
    """The lines of a docstring."""
    lines = in_docstring(text).split("\n")
    yield f'"""{lines[0]}' + ('"""' if len(lines) == 1 else "")
    yield from lines[1:]
    if len(lines) > 1:
        yield '"""'


def indented(lines: Iterable[str], by: int = 4) -> Iterator[str]:
    """The lines, `by` columns to the right."""
    yield from (" " * by + line if line else line for line in lines)
