"""A value that an object makes when it is first asked for, without a lock: threads may make it twice, all get one.

`functools.cached_property` of Python 3.11 makes it under one lock for all objects, which deadlocks with any other lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class once(Generic[T]):
    """`@once` before a method without arguments: an attribute that is computed once."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self.make, self.name, self.__doc__ = make, make.__name__, make.__doc__

    @overload
    def __get__(self, instance: None, owner: Any = None) -> once[T]: ...
    @overload
    def __get__(self, instance: object, owner: Any = None) -> T: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        return instance.__dict__.setdefault(self.name, self.make(instance))
