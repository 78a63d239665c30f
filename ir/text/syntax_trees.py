"""Python text as a syntax tree, in any thread.

As it makes the objects of a tree, CPython 3.11 counts in one number for all threads how deep it is. Where the garbage
collector runs a finalizer meanwhile, another thread may parse, and both are told `SystemError: AST constructor
recursion depth mismatch`. Nothing is wrong with the text: it is parsed once more.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
DISTURBED = "recursion depth mismatch"
TRIES = 100


def parse(text: str) -> ast.Module:
    """`ast.parse`, whatever other threads do."""
    return undisturbed(lambda: ast.parse(text))


def parse_expression(text: str) -> ast.Expression:
    """The same of an expression."""
    return undisturbed(lambda: ast.parse(text, mode="eval"))


def source_of(item: Any) -> str:
    """`inspect.getsource`, which parses the file of a class."""
    return undisturbed(lambda: inspect.getsource(item))


def source_lines(item: Any) -> tuple[list[str], int]:
    """`inspect.getsourcelines`, which does, too."""
    return undisturbed(lambda: inspect.getsourcelines(item))


def undisturbed(parses: Callable[[], T]) -> T:
    """The result of a call that parses Python text before it does anything else."""
    for _ in range(TRIES):
        try:
            return parses()
        except SystemError as error:
            if DISTURBED not in str(error):
                raise
    return parses()
