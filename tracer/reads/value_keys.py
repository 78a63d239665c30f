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
from typing import Any, NamedTuple

import torch

from ..containers import Hole
from .attributes import ABSENT, attribute, bound_to, has_instance_dict, instance_dict, is_a, member, module_of
from .packages import is_foreign

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
FACTS = 10_000
"""The number of functions within all values that are compared that may be read together; what refers to all of a
large package reads
more."""
CODE = 1000
"""Functions that the classes within one value may lead to together, one counted for each class that leads to it."""
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
            target = Same if value is None else value  # None is what a dead reference gives
            self._object = lambda: target

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
    owner = bound_to(value)
    if is_a(value, types.MethodType):
        return ("method", Same(value.__func__), Same(owner))
    if is_a(value, types.BuiltinMethodType) and not is_a(owner, types.ModuleType):
        return ("method", value.__name__, Same(owner))
    return ("id", Same(value))


def tensor_fact(t: torch.Tensor) -> tuple[Any, ...]:
    """The facts that are compared of a tensor that is not an argument: everything but its data."""
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
    if issubclass(kind, torch.Tensor):
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
    return tuple([(freeze(k, depth - 1), freeze(v, depth - 1)) for k, v in dict.items(value)])


def _digits(value: float | complex) -> str:
    """All of a float but the payload of a NaN."""
    if isinstance(value, complex):
        return f"{_digits(value.real)} {_digits(value.imag)}"
    text = float.__repr__(value)
    return f"-{text}" if text == "nan" and math.copysign(1.0, value) < 0 else text


def _frozen_rarity(value: Any, depth: int) -> Any:
    with _visiting(id(value), once=is_a(value, types.FunctionType | type)) as first:
        if not first:
            return ("again",)
        if _is_too_much():
            return ("more", _Unequal())
        try:
            return _picture(value, depth)
        except Exception:  # whatever objects do when they are looked at
            return ("not to be seen", _Unequal())


def _picture(value: Any, depth: int) -> Any:
    for kind, picture in _PICTURES:
        if is_a(value, kind):
            return picture(value, depth)
    if is_a(value, Memory):
        return _memory(value, depth)
    if is_plain_object(value):
        return ("object", *_who(value), *_content(value, depth))
    if type(value) is Hole or is_a_value(value):
        return (type(value), repr(value), value if value == value else None)
    return identity(value)


def _who(value: Any) -> tuple[Any, ...]:
    """The state by which an object is compared beside its content: a record of fields, which holes make anew, by that
    alone."""
    is_record = dataclasses.is_dataclass(value) or type(value) is types.SimpleNamespace
    return (type(value),) if is_record else (type(value), Same(value))


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


def items_of(value: Any) -> list[Any]:
    """The items of a sequence or a set, whatever its class says when it is iterated over."""
    kind = next(k for k in (list, tuple, set, frozenset, collections.deque) if is_a(value, k))
    return list(kind.__iter__(value))


def _rows(value: Any, depth: int) -> Any:
    items = tuple([freeze(v, depth - 1) for v in items_of(value)])
    return (type(value), items, *(() if is_library(type(value)) else _content(value, depth)))


def _table(value: Any, depth: int) -> Any:
    factory = _factory(value)
    own = () if is_library(type(value)) else _content(value, depth)
    return (type(value), _pairs(value, depth), freeze(factory, depth - 1), *own)


def _factory(value: Any) -> Any:
    return value.default_factory if is_a(value, collections.defaultdict) else None


def _set(value: Any, depth: int) -> Any:
    own = () if is_library(type(value)) else _content(value, depth)
    return (type(value), frozenset([freeze(v, depth - 1) for v in items_of(value)]), *own)


def _function(value: Any, depth: int) -> Any:
    if _counts_by_identity(value):
        return ("function", Same(value), ())
    own = _under_way.__dict__
    if own["facts"] > FACTS:
        return ("more", _Unequal())
    reads = _scans[0].of_function(value)
    own["facts"] += len(reads.entries)
    return ("function", Same(value), reads.facts())


def _method(value: types.MethodType, depth: int) -> Any:
    """A bound method: its function and what that reads, its object and what that is at present."""
    return ("method", freeze(value.__func__, depth - 1), freeze(value.__self__, depth - 1))


def _counts_by_identity(value: Any) -> bool:
    """True if a function or a class counts by identity: what is installed is not looked into, but for packages of
    classes that are compiled."""
    return is_library(value) or is_standard(value) or is_foreign(value, frozenset(HOMES))


class Scans(NamedTuple):
    """The reads of functions: reads.py finds it, and stands on this file."""

    of_function: Callable[[types.FunctionType], Any]
    of_class: Callable[[type, Any], Any]


_scans: list[Scans] = []


def set_scans(scans: Scans) -> None:
    """reads.py does, when it is imported."""
    _scans[:] = [scans]


HOMES: set[str] = set()
"""The packages of the classes that were compiled in this process."""


def _class(value: type, depth: int) -> Any:
    return ("class", Same(value), class_content(value, depth - 1)) if not is_library(value) else ("id", Same(value))


def _memory(value: Any, depth: int) -> Any:
    """Numbers in memory that Python code may change: by content, where they are few."""
    if _bytes_of(value) > LARGEST:
        return ("large", _Unequal())
    layout = getattr(value, "shape", len(value)), str(getattr(value, "dtype", getattr(value, "typecode", "")))
    return (type(value), layout, value.tobytes() if hasattr(value, "tobytes") else bytes(value))


def _bytes_of(value: Any) -> int:
    return int(value.nbytes) if hasattr(value, "nbytes") else len(value) * getattr(value, "itemsize", 1)


class _ByName(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return issubclass(type(value), cls)


class _Arrays(_ByName):
    def __subclasscheck__(cls, kind: type) -> bool:
        return kind.__name__ == "ndarray" and kind.__module__ == "numpy"


class Memory(metaclass=_Arrays):
    """is_a(value, Memory): a numpy array, whether or not numpy is installed."""


class _Handles(_ByName):
    def __subclasscheck__(cls, kind: type) -> bool:
        return kind.__name__ == "ProcessGroup" and kind.__module__.split(".")[0] == "torch"


class Handle(metaclass=_Handles):
    """is_a(value, Handle): what names something outside, and never names another: a process group.

    Rank and size are those with which it was made; what it does is no part of a graph. Identity says all of it.
    """


_PICTURES: tuple[tuple[Any, Callable[[Any, int], Any]], ...] = (
    (enum.Enum, lambda v, depth: (type(v), v.name)),
    *((base, _of_subclass(base, plain)) for base, plain in _DERIVED),
    (slice, lambda v, depth: ("slice", freeze((v.start, v.stop, v.step), depth - 1))),
    (functools.partial, lambda v, depth: ("partial", freeze((v.func, v.args, v.keywords), depth - 1))),
    (collections.deque, lambda v, depth: ("deque", v.maxlen, *_rows(v, depth))),
    (list | tuple, _rows),
    (dict, _table),
    (set | frozenset, _set),
    (types.MappingProxyType, lambda v, depth: ("proxy", freeze(dict(v), depth - 1))),
    (weakref.ref, lambda v, depth: ("weak", Same(v), freeze(v(), depth - 1))),
    (types.FunctionType, _function),
    (types.MethodType, _method),
    (type, _class),
    ((bytearray, array.array), _memory),
)
"""Types, with their subclasses, and how each is seen."""


# ------------------------------------------------------------------ what is on its way
_under_way = threading.local()


@contextmanager
def _visiting(number: Any, once: bool = False) -> Iterator[bool]:
    """True if this thread is not looking at it already: what refers to itself has a picture, too.

    once: and has not looked at it within the outermost picture. Code refers to code by many ways, and each of them
    would be walked; the order of a walk is always the same, so is what stands for the second visit.
    """
    own = _under_way.__dict__
    under_way, finished = own.setdefault("numbers", set()), own.setdefault("done", set())
    if not under_way:
        own["count"] = own["code"] = 0
        own["facts"] = own["facts"] if own.get("together") else 0
    own["count"] += 1
    first = number not in under_way and number not in finished
    if first:
        under_way.add(number)
    try:
        yield first
    finally:
        if first:
            under_way.discard(number)
            if once:
                finished.add(number)
        if not under_way:
            finished.clear()


@contextmanager
def shared_allowance() -> Iterator[Callable[[], bool]]:
    """Within the block the functions in all pictures together may read FACTS: one picture alone is not what costs.

    What it gives says whether they read more, or lead to more code than can be compared.
    """
    own = _under_way.__dict__
    if outermost := not (own.get("together") or own.get("numbers")):  # nor is it within one picture
        own["together"], own["facts"], own["spent"] = True, 0, False
    try:
        yield lambda: own.get("facts", 0) > FACTS or own.get("spent", False)
    finally:
        if outermost:
            own["together"] = False


def _is_too_much() -> bool:
    """True if the outermost picture holds more than can be compared at every call."""
    own = _under_way.__dict__
    return bool(own["count"] > MOST or own["facts"] > FACTS or own["code"] > CODE)


# ------------------------------------------------------------------ objects and classes
def is_library(value: Any) -> bool:
    """True if something is of a module that code may use without being looked into."""
    own = is_a(value, types.FunctionType)  # whose `__module__` functools.wraps takes from another
    module = value.__globals__.get("__name__") if own else module_of(value)
    return type(module) is str and module.split(".")[0] in LIBRARIES


def is_standard(value: Any) -> bool:
    """True if a class or a function is of Python's own library, whose code stays as it is."""
    return module_of(value).split(".")[0] in sys.stdlib_module_names


def is_fixed(cls: type) -> bool:
    return is_library(cls) or is_standard(cls)


def is_a_value(value: Any) -> bool:
    """True if an object without visible state compares by value, and so never changes (a Decimal, a range)."""
    hashed: Any = type(value).__hash__
    is_code = is_a(value, type | types.ModuleType | types.BuiltinFunctionType | types.MethodType)
    is_users = isinstance(hashed, types.FunctionType) and not is_library(type(value)) and not is_standard(type(value))
    return not is_code and hashed is not None and hashed is not object.__hash__ and not is_users


def state_of(value: Any) -> dict[str, Any]:
    """The attributes of a plain object, those in slots included."""
    slots = {n: attribute(value, n) for c in type(value).__mro__ for n in _slots(c)}
    return {n: v for n, v in slots.items() if v is not ABSENT} | instance_dict(value)


def _slots(cls: type) -> tuple[str, ...]:
    """The names in a class's own `__slots__`."""
    if "__slots__" not in vars(cls):
        return ()
    slots = _slotted.get(cls)
    return _slotted.setdefault(cls, _named_slots(cls)) if slots is None else slots


_slotted: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def _named_slots(cls: type) -> tuple[str, ...]:
    named = vars(cls).get("__slots__", ())
    slot_names = (named,) if type(named) is str else tuple(named) if is_a(named, list | tuple | dict) else ()
    return tuple(_mangled(cls, n) for n in slot_names if n not in ("__dict__", "__weakref__"))


def _mangled(cls: type, name: str) -> str:
    private = name.startswith("__") and not name.endswith("__")
    return f"_{cls.__name__.lstrip('_')}{name}" if private else name


def is_plain_object(value: Any) -> bool:
    """True if an object's state can be seen: attributes, methods in Python, or a module of layers."""
    kind = type(value)
    if issubclass(kind, torch.nn.Module):
        return True
    has_state = has_instance_dict(kind) or any(map(_slots, kind.__mro__))
    odd = is_a(value, type | types.FunctionType | types.MethodType | types.ModuleType | functools.partial)
    calls = member(kind, "__call__")
    return has_state and not is_library(kind) and not odd and (not calls or isinstance(calls, types.FunctionType))


_ASKED = {"__call__", "__getattr__", "__getattribute__", "__getitem__", "__iter__", "__len__", "__contains__",
          "__bool__", "__float__", "__int__", "__index__", "__enter__", "__exit__"}  # fmt: skip


def class_content(cls: type, depth: int) -> tuple[Any, ...]:
    """The values found on a class, by its instances too: data by content, methods with their reads."""
    with _visiting(~id(cls), once=True) as first:  # not the class as a value
        if not first or depth <= 0:
            return ()
        # A class that was found to lead to too much once does so always: it is not walked again.
        owners = [c for c in cls.__mro__ if not is_fixed(c)]
        if any(c in _endless for c in owners):
            return (_too_much_code(),)
        return tuple([_body(c, depth) for c in reversed(owners)])  # what many inherit from tells first


_endless: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes whose own code leads to more than a scan looks at: found out once, whatever has them is not compared."""


def _too_much_code() -> Any:
    """The picture of what leads to more code than can be compared; whatever else is on its way is not looked at."""
    own = _under_way.__dict__
    own["code"], own["spent"] = CODE + 1, True
    return ("more", _Unequal())


def _body(cls: type, depth: int) -> tuple[Any, ...]:
    """The values in one class itself: subclasses share it, so it is walked once within the outermost picture."""
    if _counts_by_identity(cls):
        return tuple([(n, ("id", Same(v))) for n, v in _members(cls)])
    with _visiting((id(cls), "body"), once=True) as first:
        if not first:
            return ()
        members = _members(cls)
        functions = (f for _, v in members if is_a(f := function_within(v), types.FunctionType))
        own = [f for f in functions if not _counts_by_identity(f)]
        return (*[(n, _member(v, depth)) for n, v in members], _read_in(cls, own))


def _read_in(cls: type, functions: list[types.FunctionType]) -> Any:
    """The reads of the functions of one class: a scan for each of them would find the same helpers again and again."""
    under_way = _under_way.__dict__
    if _is_too_much():
        return _too_much_code() if under_way["code"] > CODE else ("more", _Unequal())
    if (reads := _scans[0].of_class(cls, functions)) is None:
        _endless.add(cls)
        return _too_much_code()
    under_way["facts"] += len(reads.entries)
    under_way["code"] += reads.functions_scanned
    if under_way["code"] > CODE:
        return _too_much_code()
    return ("more", _Unequal()) if _is_too_much() else reads.facts()


def _members(cls: type) -> list[tuple[str, Any]]:
    return [(n, v) for n, v in vars(cls).items() if n in _ASKED or not (n.startswith("__") and n.endswith("__"))]


def _member(value: Any, depth: int) -> Any:
    inner = function_within(value)
    if is_a(inner, types.FunctionType):
        return ("function", Same(inner), Same(inner.__code__), freeze(inner.__defaults__), freeze(inner.__kwdefaults__))
    return freeze(value, depth) if not is_a(value, type) else ("id", Same(value))


def function_within(value: Any) -> Any:
    """The function behind what stands in a class: a static method, a property."""
    if is_a(value, staticmethod | classmethod):
        return value.__func__
    if is_a(value, property):
        return value.fget
    return instance_dict(value).get("func", value) if is_a(value, functools.cached_property) else value


def functions_of_class(cls: type) -> Iterator[types.FunctionType]:
    """The functions that a user's class has."""
    for owner in cls.__mro__:
        for _, value in _members(owner) if not is_library(owner) else ():
            if is_a(inner := function_within(value), types.FunctionType):
                yield inner


def functions_of(value: Any) -> list[types.FunctionType]:
    """The user's code that a value brings along: a function itself, or the methods of its class."""
    while is_a(value, types.MethodType | functools.partial):
        value = value.__func__ if is_a(value, types.MethodType) else value.func
    if is_a(value, types.FunctionType):
        return [value]
    return [] if is_a(value, torch.Tensor) else list(functions_of_class(type(value)))


# ------------------------------------------------------------------ what has no picture
_SEEN = (*SCALARS, torch.Tensor, Hole, type, types.BuiltinFunctionType, types.EllipsisType, enum.Enum, Handle)


def why_unfit(value: Any, depth: int = DEPTH) -> str | None:
    """The reason why a value's state cannot be seen, so that a capture could serve a call that it does not fit.

    That of torch.Generators no graph has: what draws from them, or asks for it, runs as written.
    """
    waiting, visited = [(value, depth)], set[int]()
    while waiting:
        current, depth_left = waiting.pop(0)
        ours = type(current).__module__.split(".")[0] == "fusegrad"
        if ours or is_a(current, (*_SEEN, torch.Generator)) or id(current) in visited:
            continue
        visited.add(id(current))
        if len(visited) > MOST:
            return f"an argument holds more than {MOST} values"
        if (why := _why_unfit(current, inner := _parts_of(current), depth_left)) is not None:
            return why
        waiting += [(part, depth_left - 1) for part in inner or ()]
    return None


def has_hidden_state(value: Any) -> bool:
    """True if an object changes in a way that its content does not show: a generator, an iterator, a lock."""
    if is_a(value, torch.Generator):
        return True
    return not is_a(value, torch.nn.Module) and not is_a(value, Memory) and why_unfit(value) is not None


def _why_unfit(value: Any, inner: list[Any] | None, depth_left: int) -> str | None:
    if is_a(value, types.FunctionType):
        certain = [] if _counts_by_identity(value) else _reads(value).certain_effects()
        return certain[0].reason if certain else None
    if inner is None or depth_left == 0:
        return None if inner is None and is_a_value(value) else f"an argument holds a {type(value).__qualname__}"
    return None


def _reads(function: types.FunctionType) -> Any:
    return _scans[0].of_function(function)


def possible_effects(values: Any) -> list[Any]:
    """The effects that functions among these values may have, and the methods of objects."""
    waiting, visited, collected = list(values), set[int](), list[Any]()
    while waiting and len(visited) < MOST:
        value = waiting.pop()
        if id(value) in visited or is_a(value, _SEEN):
            continue
        visited.add(id(value))
        if is_a(value, types.FunctionType) and not _counts_by_identity(value):
            collected += _reads(value).uncertain_effects()
        elif is_plain_object(value):
            methods = (f for f in functions_of_class(type(value)) if not _counts_by_identity(f))
            effects = (effect for f in methods for effect in _reads(f).effects)
            collected += [effect._replace(certain=False) for effect in effects if effect.code]
        waiting += _parts_of(value) or ()
    return collected


def _parts_of(value: Any) -> list[Any] | None:
    if is_a(value, list | tuple | set | frozenset | collections.deque):
        return items_of(value)
    if is_a(value, dict):
        return [*dict.keys(value), *dict.values(value), _factory(value)]
    if is_a(value, slice):
        return [value.start, value.stop, value.step]
    if is_a(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if is_a(value, types.MethodType):
        return [value.__func__, value.__self__]
    if is_a(value, types.FunctionType):
        return []
    return list(state_of(value).values()) if is_plain_object(value) else None


def why_too_much(value: Any) -> str | None:
    """The reason why a value from outside cannot be compared at every call; None where it can."""
    waiting, count = [(value, 0, frozenset[int]())], 0
    while waiting:
        current, depth, above = waiting.pop()
        count += 1
        if is_a(current, (*SCALARS, torch.Tensor, type, types.FunctionType)) or id(current) in above:
            continue
        parts = _parts_of(current)
        if (why := _why_unseen(current, parts, depth)) is not None:
            return why
        if count + len(parts or ()) > MOST:
            return f"holds more than {MOST} values"
        waiting += [(part, depth + 1, above | {id(current)}) for part in parts or ()]
    return None


def _why_unseen(value: Any, parts: list[Any] | None, depth: int) -> str | None:
    if is_a(value, bytearray | array.array) or is_a(value, Memory):
        return "is a large array" if _bytes_of(value) > LARGEST else None
    if hasattr(type(value), "__next__"):
        return "is an iterator"
    return f"is nested deeper than {DEPTH}" if parts and depth >= DEPTH else None
