"""An attribute computed at its first read, without a lock: two threads may compute it, and all of them get one result.

`functools.cached_property` of Python 3.11 computes under one lock for all objects, which deadlocks with any other lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class lazy_attribute(Generic[T]):
    """`@lazy_attribute` before a method without arguments: an attribute that is computed once."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self.make, self.name, self.__doc__ = make, make.__name__, make.__doc__

    @overload
    def __get__(self, instance: None, owner: Any = None) -> lazy_attribute[T]: ...
    @overload
    def __get__(self, instance: object, owner: Any = None) -> T: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        return instance.__dict__.setdefault(self.name, self.make(instance))
