"""Pickles of compiled classes, by any pickler: nothing is read or written here.

A class whose own name finds it goes by that name, as any class does. `Fast = compile(Cls)` has the name of `Cls`: it
goes as `Cls` and what `compile` was told, and is the same class again where that has been compiled already.
"""

from __future__ import annotations

import copyreg
import importlib
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...tracer.locks import INNER, lock_of
from ..compiled.options import Options

OPTIONS = "_fusegrad_options"
_compiled: weakref.WeakValueDictionary[tuple[int, str], type] = weakref.WeakValueDictionary()
"""Compiled classes by the class that they were compiled from, which they keep, and the options."""
_lock = lock_of(INNER)


class Maker(NamedTuple):
    """The makers of compiled classes, and of their `apply`."""

    compile_class: Callable[..., type]
    entrance: Callable[[Any, list[type]], Any]


_makers: list[Maker] = []


def _maker() -> Maker:
    """The makers; a pickle may be the first that asks for any of this package."""
    if not _makers:
        importlib.import_module(f"{__package__}.compiled_class")
    return _makers[0]


def make_classes_by(maker: Maker) -> None:
    """compiled_class.py does, when it is imported: it stands on this file."""
    _makers[:] = [maker]


def remember(fast: Any, options: Sequence[Any]) -> None:
    """A compiled class may be pickled from now on; of two that are alike the first is what comes back."""
    type.__setattr__(fast, OPTIONS, tuple(options))  # past `arrived`
    with _lock:
        _compiled.setdefault(_key(fast._fusegrad_user_class, options), fast)


def arrived(cls: Any) -> None:
    """A class was put together from its contents, in another process maybe: it is entered as every other is."""
    apply = _maker().entrance(cls._fusegrad, [cls])
    for name in ("apply", "_fusegrad_apply"):
        type.__setattr__(cls, name, apply)


def _key(users: type, options: Sequence[Any]) -> tuple[int, str]:
    return id(users), repr(options)


def by_name(cls: type) -> Any:
    """The object that the name of a class finds; None where it finds nothing."""
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found


def reduced(cls: Any) -> Any:
    """The stand-in of a compiled class: a name, for which pickle has errors of its own, or a call."""
    users = vars(cls).get("_fusegrad_user_class")
    if OPTIONS in vars(cls) and by_name(cls) is users:
        return again, (users, vars(cls)[OPTIONS])
    return cls.__qualname__


def again(users: type, options: Sequence[Any]) -> type:
    """The compiled class that such a call stands for."""
    return _compiled.get(_key(users, options)) or _maker().compile_class(users, Options(*options))


def register(metaclass: type) -> None:
    """Classes of a metaclass are pickled so: for classes, pickle asks no other way."""
    copyreg.pickle(metaclass, reduced)
