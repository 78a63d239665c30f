"""Hashable pictures of Python values: two values have one picture only where no code can tell them apart.

What has no content that could be compared counts by identity: an object that is gone is like no other, even one that
was given its address.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import enum
import functools
import math
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .containers import Hole

SCALARS = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, torch.layout,
           torch.memory_format)  # fmt: skip
EXACT = frozenset({int, str, bytes, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
"""Types of which equal values of one type are the same."""
LIBRARIES = {"torch", "math", "numpy", "builtins", "operator", "functools", "itertools", "typing", "collections",
             "triton", "fusegrad", "pytest", "_pytest"}  # fmt: skip
"""Modules whose functions ask for nothing that can change; `_pytest` is what a rewritten `assert` calls."""
DEPTH = 8
MOST = 2000
"""Values within one value from outside: comparing more would take longer than what is called."""
LARGEST = 4096
"""Bytes of a memory that is compared by content."""


class Same:
    """Equal to another of the same object, while that lives."""

    __slots__ = ("_hash", "_object")

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        try:
            self._object: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            held = Same if value is None else value  # None is what a dead reference gives
            self._object = lambda: held

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Same) and (value := self._object()) is not None and value is other._object()

    def __repr__(self) -> str:
        return "the same object"


class _Unequal:
    """A picture of what cannot be seen: like no other."""

    def __repr__(self) -> str:
        return "not to be compared"


def identity(value: Any) -> tuple[Any, ...]:
    """Which object it is; bound methods are made anew at each access, so their function and their object count."""
    owner = getattr(value, "__self__", None)
    if isinstance(value, types.MethodType):
        return ("method", Same(value.__func__), Same(owner))
    if isinstance(value, types.BuiltinMethodType) and not isinstance(owner, types.ModuleType):
        return ("method", value.__name__, Same(owner))
    return ("id", Same(value))


def tensor_fact(t: torch.Tensor) -> tuple[Any, ...]:
    """What is compared of a tensor that is not an argument: everything but its data."""
    strided = t.layout is torch.strided
    return (
        "tensor",
        t.dtype,
        t.device,
        tuple(t.shape),
        t.stride() if strided else t.layout,
        t.requires_grad,
        type(t) if not strided or type(t) not in _TENSORS else None,
        strided and (t.is_conj(), t.is_neg()),
    )


_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def freeze(value: Any, depth: int = DEPTH) -> Any:
    """A hashable picture of a value; NaN equals itself; 1, 1.0, True differ; objects count by identity and content."""
    kind = type(value)
    if kind in EXACT:
        return (kind.__name__, value)
    if kind is float or kind is complex:
        return (kind.__name__, _digits(value))
    if isinstance(value, torch.Tensor):
        return tensor_fact(value)
    if kind is torch.Size:
        return ("Size", tuple(value))
    if depth == 0:
        return ("deeper", _Unequal())
    if kind is list or kind is tuple:
        return (kind.__name__, tuple([freeze(v, depth - 1) for v in value]))
    if kind is dict:
        return ("dict", _pairs(value, depth))
    return _frozen_rarity(value, depth)


def _pairs(value: dict[Any, Any], depth: int) -> tuple[Any, ...]:
    return tuple([(freeze(k, depth - 1), freeze(v, depth - 1)) for k, v in value.items()])


def _digits(value: float | complex) -> str:
    """All of a float but the payload of a NaN."""
    if isinstance(value, complex):
        return f"{_digits(value.real)} {_digits(value.imag)}"
    text = float.__repr__(value)
    return f"-{text}" if text == "nan" and math.copysign(1.0, value) < 0 else text


def _frozen_rarity(value: Any, depth: int) -> Any:
    with _visited(id(value), once=isinstance(value, types.FunctionType | type)) as first:
        if not first:
            return ("again",)
        for kind, picture in _PICTURES:
            if isinstance(value, kind):
                return picture(value, depth)
        if is_plain_object(value):
            return ("object", *_who(value), *_content(value, depth))
        if isinstance(value, Hole) or is_a_value(value):
            return (type(value), repr(value), value if value == value else None)
        return identity(value)


def _who(value: Any) -> tuple[Any, ...]:
    return (type(value),) if dataclasses.is_dataclass(value) else (type(value), Same(value))


def _content(value: Any, depth: int) -> tuple[Any, ...]:
    """The attributes of an object, and those of its class."""
    state = tuple([(k, freeze(v, depth - 1)) for k, v in state_of(value).items()])
    return state, class_content(type(value), depth - 1)


_DERIVED: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (float, lambda v: _digits(float(v))),
    (complex, lambda v: _digits(complex(v))),
    (int, int.__int__),
    (str, str.__str__),
    (bytes, bytes),
)  # fmt: skip


def _of_subclass(base: type, plain: Callable[[Any], Any]) -> Callable[[Any, int], Any]:
    """A number or a text of a class of its own (an IntEnum, np.float64, a str with attributes)."""
    return lambda v, depth: (type(v), plain(v), *(() if is_library(type(v)) else _content(v, depth)))


def _rows(value: Any, depth: int) -> Any:
    items = tuple([freeze(v, depth - 1) for v in value])
    return (type(value), items, *(() if is_library(type(value)) else _content(value, depth)))


def _table(value: Any, depth: int) -> Any:
    factory = getattr(value, "default_factory", None)
    own = () if is_library(type(value)) else _content(value, depth)
    return (type(value), _pairs(value, depth), freeze(factory, depth - 1), *own)


def _set(value: Any, depth: int) -> Any:
    own = () if is_library(type(value)) else _content(value, depth)
    return (type(value), frozenset([freeze(v, depth - 1) for v in value]), *own)


def _function(value: Any, depth: int) -> Any:
    from .reads import reads_of

    known = is_library(value) or is_standard(value)
    return ("function", Same(value), () if known else reads_of(value).facts())


def _class(value: type, depth: int) -> Any:
    return ("class", Same(value), class_content(value, depth - 1)) if not is_library(value) else ("id", Same(value))


def _memory(value: Any, depth: int) -> Any:
    """Numbers in memory that Python code may change: by content, where they are few."""
    if _bytes_of(value) > LARGEST:
        return ("large", _Unequal())
    shown = getattr(value, "shape", len(value)), str(getattr(value, "dtype", getattr(value, "typecode", "")))
    return (type(value), shown, value.tobytes() if hasattr(value, "tobytes") else bytes(value))


def _bytes_of(value: Any) -> int:
    return int(value.nbytes) if hasattr(value, "nbytes") else len(value) * getattr(value, "itemsize", 1)


def _is_array(value: Any) -> bool:
    kind = type(value)
    return kind.__name__ == "ndarray" and kind.__module__ == "numpy"


class _Arrays(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return _is_array(value)


class Memory(metaclass=_Arrays):
    """isinstance(value, Memory): a numpy array, whether or not numpy is installed."""


_PICTURES: tuple[tuple[Any, Callable[[Any, int], Any]], ...] = (
    (enum.Enum, lambda v, depth: (type(v), v.name)),
    *((base, _of_subclass(base, plain)) for base, plain in _DERIVED),
    (slice, lambda v, depth: ("slice", freeze((v.start, v.stop, v.step), depth - 1))),
    (functools.partial, lambda v, depth: ("partial", freeze((v.func, v.args, v.keywords), depth - 1))),
    (collections.deque, lambda v, depth: ("deque", v.maxlen, *_rows(v, depth))),
    (list | tuple, _rows),
    (dict, _table),
    (set | frozenset, _set),
    (types.FunctionType, _function),
    (type, _class),
    ((bytearray, array.array, Memory), _memory),
)
"""Types, with their subclasses, and how each is seen."""


# ------------------------------------------------------------------ what is on its way
_under_way = threading.local()


@contextmanager
def _visited(number: int, once: bool = False) -> Iterator[bool]:
    """Whether this thread is not looking at it already: what refers to itself has a picture, too.

    once: and has not looked at it within the outermost picture. Code refers to code by many ways, and each of them
    would be walked; the order of a walk is always the same, so is what stands for the second visit.
    """
    own = _under_way.__dict__
    seen, done = own.setdefault("numbers", set()), own.setdefault("done", set())
    first = number not in seen and number not in done
    if first:
        seen.add(number)
    try:
        yield first
    finally:
        if first:
            seen.discard(number)
            if once:
                done.add(number)
        if not seen:
            done.clear()


# ------------------------------------------------------------------ objects and classes
def is_library(value: Any) -> bool:
    """Whether something is of a module that code may use without being looked into."""
    own = isinstance(value, types.FunctionType)  # whose `__module__` functools.wraps takes from another
    module = value.__globals__.get("__name__") if own else getattr(value, "__module__", None)
    return isinstance(module, str) and module.split(".")[0] in LIBRARIES


def is_standard(value: Any) -> bool:
    """Whether a class or a function is of Python's own library, whose code no one exchanges."""
    return str(getattr(value, "__module__", "")).split(".")[0] in sys.stdlib_module_names


def _is_fixed(cls: type) -> bool:
    return is_library(cls) or is_standard(cls)


def is_a_value(value: Any) -> bool:
    """Whether an object without visible state compares by value, and so never changes (a Decimal, a range)."""
    hashed: Any = type(value).__hash__
    is_code = isinstance(value, type | types.ModuleType | types.BuiltinFunctionType)
    return not is_code and hashed is not None and hashed is not object.__hash__


def state_of(value: Any) -> dict[str, Any]:
    """The attributes of a plain object, those in slots included."""
    slots = [n for c in type(value).__mro__ for n in _slots(c) if hasattr(value, n)]
    return {n: getattr(value, n) for n in slots} | getattr(value, "__dict__", {})


def _slots(cls: type) -> tuple[str, ...]:
    named = cls.__dict__.get("__slots__", ())
    return tuple(n for n in ((named,) if isinstance(named, str) else named) if n not in ("__dict__", "__weakref__"))


def is_plain_object(value: Any) -> bool:
    """Whether an object's state can be seen: attributes, methods in Python, or a module of layers."""
    kind = type(value)
    if isinstance(value, torch.nn.Module):
        return True
    has_state = hasattr(value, "__dict__") or bool(_slots(kind))
    odd = isinstance(value, type | types.FunctionType | types.MethodType | types.ModuleType | functools.partial)
    calls = next((vars(c)["__call__"] for c in kind.__mro__ if "__call__" in vars(c)), None)
    return has_state and not is_library(kind) and not odd and (calls is None or isinstance(calls, types.FunctionType))


_ASKED = {"__call__", "__getattr__", "__getattribute__", "__getitem__", "__iter__", "__len__", "__contains__",
          "__bool__", "__float__", "__int__", "__index__", "__enter__", "__exit__"}  # fmt: skip


def class_content(cls: type, depth: int) -> tuple[Any, ...]:
    """What is found on a class, by its instances too: data by content, methods with their reads."""
    with _visited(~id(cls), once=True) as first:  # not the class as a value
        if not first or depth <= 0:
            return ()
        return tuple([(n, _member(v, depth)) for c in cls.__mro__ if not _is_fixed(c) for n, v in _members(c)])


def _members(cls: type) -> list[tuple[str, Any]]:
    return [(n, v) for n, v in vars(cls).items() if n in _ASKED or not (n.startswith("__") and n.endswith("__"))]


def _member(value: Any, depth: int) -> Any:
    inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
    if isinstance(inner, types.FunctionType):
        return _frozen_rarity(inner, depth)
    return freeze(value, depth) if not isinstance(value, type) else ("id", Same(value))


def functions_of_class(cls: type) -> Iterator[types.FunctionType]:
    """The functions that a user's class has."""
    for owner in cls.__mro__:
        for _, value in _members(owner) if not is_library(owner) else ():
            inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
            if isinstance(inner, types.FunctionType):
                yield inner


# ------------------------------------------------------------------ what has no picture
_SEEN = (*SCALARS, torch.Tensor, Hole, type, types.BuiltinFunctionType, types.EllipsisType, enum.Enum)


def unfit(value: Any, depth: int = DEPTH) -> str | None:
    """Why a value's state cannot be seen, so that a capture could serve a call that it does not fit."""
    from .reads import reads_of

    if isinstance(value, _SEEN) or type(value).__module__.split(".")[0] == "fusegrad":
        return None
    if isinstance(value, types.FunctionType):
        return reads_of(value).effects[0][0] if not is_library(value) and reads_of(value).effects else None
    inner = _inner(value)
    if inner is None or depth == 0:
        return None if inner is None and is_a_value(value) else f"an argument holds a {type(value).__qualname__}"
    return next((why for v in inner if (why := unfit(v, depth - 1))), None)


def _inner(value: Any) -> list[Any] | None:
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return list(value)
    if isinstance(value, dict):
        return [*value, *value.values(), getattr(value, "default_factory", None)]
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    modules = isinstance(value, torch.nn.Module)
    return list(state_of(value).values()) if is_plain_object(value) and not modules else None


def too_much(value: Any) -> str | None:
    """Why a value from outside cannot be compared at every call; None where it can."""
    waiting, count = [(value, 0, frozenset[int]())], 0
    while waiting:
        found, depth, above = waiting.pop()
        count += 1
        if isinstance(found, (*SCALARS, torch.Tensor, type, types.FunctionType)) or id(found) in above:
            continue
        parts = list(state_of(found).values()) if isinstance(found, torch.nn.Module) else _inner(found)
        if (why := _unseen(found, parts, depth)) is not None:
            return why
        if count + len(parts or ()) > MOST:
            return f"holds more than {MOST} values"
        waiting += [(part, depth + 1, above | {id(found)}) for part in parts or ()]
    return None


def _unseen(value: Any, parts: list[Any] | None, depth: int) -> str | None:
    if isinstance(value, bytearray | array.array | Memory):
        return "is a large array" if _bytes_of(value) > LARGEST else None
    if hasattr(type(value), "__next__"):
        return "is an iterator"
    return f"is nested deeper than {DEPTH}" if parts and depth >= DEPTH else None
