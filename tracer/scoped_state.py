"""State in force within a block: attributes (of a `threading.local`, say) and context variables, then put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def attribute_within(owner: Any, name: str, value: Any, outside: Any = None) -> Iterator[None]:
    """Within the block `owner.name` is `value`. outside: the value of one that was never set."""
    before = getattr(owner, name, outside)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def variable_within(variable: ContextVar[Any], value: T) -> Iterator[T]:
    """Within the block the variable is `value`, which the block is given."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
