"""The classes that swapped modules get: the replacement's methods before the original's, under the original's name.

They are made again by what they were made of where a module is copied or read from a pickle.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType
from typing import Any

Exchanges = tuple[tuple[Any, Any], ...]
"""(what a method names by a global name, what it shall mean instead)"""


@functools.lru_cache(maxsize=256)
def class_of(original: Any, replacement: Any, exchanges: Exchanges) -> Any:
    """A subclass of the original; one for all modules that are swapped alike."""
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    marks = {"_fusegrad_swapped": (original, replacement, exchanges), "__reduce_ex__": _reduced}
    swapped = type(original)(original.__name__, _bases(original, replacement), {**names, **marks})
    for name, method in rebound_methods(swapped, exchanges):
        setattr(swapped, name, method)
    return swapped


def _bases(original: Any, replacement: Any) -> tuple[type, ...]:
    if replacement is None:
        return (original,)
    own = as_class(replacement)
    return (own,) if issubclass(own, original) else (own, original)


def as_class(replacement: Any) -> type:
    """The replacement; a function, which serves as `forward`, as a class that has it."""
    return replacement if isinstance(replacement, type) else type(replacement.__name__, (), {"forward": replacement})


def _reduced(module: Any, protocol: int) -> tuple[Any, ...]:
    return _remade, type(module)._fusegrad_swapped, module.__getstate__()


def _remade(original: Any, replacement: Any, exchanges: Exchanges) -> Any:
    cls = class_of(original, replacement, exchanges)
    return cls.__new__(cls)


# ------------------------------------------------------------------ what a method means by a global name
def rebound_methods(cls: type, exchanges: Exchanges) -> Iterator[tuple[str, FunctionType]]:
    """The methods that name something that is exchanged, as they shall be; of torch's own classes none."""
    own = [base for base in cls.__mro__ if base is not object and base.__module__.partition(".")[0] != "torch"]
    bases = own if exchanges else []
    for name in dict.fromkeys(name for base in bases for name in vars(base)):
        method = next(vars(base)[name] for base in cls.__mro__ if name in vars(base))
        replacement = rebound(method, exchanges)
        if replacement is not method:
            yield name, replacement


def rebound(function: Any, exchanges: Exchanges, visited: tuple[Any, ...] = ()) -> Any:
    """The function where it, or one that it wraps, means something else by a name; itself where neither does.

    A copy, with a copy of its globals: what is assigned to them later is not seen.
    """
    if not isinstance(function, FunctionType) or function in visited:
        return function
    names, cells = _exchanged_names(function, exchanges), function.__closure__ or ()
    filled = tuple(_rebound_cell(cell, exchanges, (*visited, function)) for cell in cells)
    if not names and filled == cells:
        return function
    scope = {**function.__globals__, **names} if names else function.__globals__
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, filled or None)
    copy.__kwdefaults__ = function.__kwdefaults__
    inner = vars(function).get("__wrapped__", _NOTHING)
    functools.update_wrapper(copy, function)
    if inner is _NOTHING:
        del copy.__wrapped__  # type: ignore[attr-defined]
    else:
        copy.__wrapped__ = rebound(inner, exchanges, (*visited, function))  # type: ignore[attr-defined]
    return copy


_NOTHING = object()


def _exchanged_names(function: FunctionType, exchanges: Exchanges) -> dict[str, Any]:
    meant = {name: function.__globals__.get(name) for name in _names(function.__code__)}
    return {name: new for name, value in meant.items() for target, new in exchanges if value is target}


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _rebound_cell(cell: CellType, exchanges: Exchanges, visited: tuple[Any, ...]) -> CellType:
    try:
        content = cell.cell_contents
    except ValueError:  # not filled yet
        return cell
    replacement = rebound(content, exchanges, visited)
    return cell if replacement is content else CellType(replacement)
