"""Attributes of objects from outside, read without running anything that a user wrote.

A property, a `__getattr__`, a lazy module: whatever would have to be called for an answer has none here (ABSENT). What
torch and C define is plain enough to be asked.
"""

from __future__ import annotations

import enum
import functools
import threading
import types
from typing import Any

import torch


class _Absent:
    """Stands for an attribute that is not there, or that only a call would tell."""

    def __repr__(self) -> str:
        return "absent"

    def __bool__(self) -> bool:
        return False


ABSENT = _Absent()
_CODE = (types.FunctionType, staticmethod, types.BuiltinFunctionType, types.MethodDescriptorType)
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_RUNS = (property, functools.cached_property, functools.partialmethod, functools.singledispatchmethod)


def attribute(owner: Any, name: str) -> Any:
    """`owner.name`, or ABSENT."""
    try:
        if issubclass(type(owner), types.ModuleType):
            return _of_module(owner, name)
        return _of_class(owner, name) if issubclass(type(owner), type) else _of_object(owner, name)
    except Exception:  # a descriptor in C may refuse
        return ABSENT


def _of_module(module: Any, name: str) -> Any:
    """The values in a module's namespace; of torch's own modules also what they compute."""
    namespace = object.__getattribute__(module, "__dict__")
    if name in namespace:
        return namespace[name]
    return getattr(module, name, ABSENT) if is_torchs(namespace.get("__name__")) else ABSENT


def _of_class(cls: Any, name: str) -> Any:
    raw = member(cls, name)
    if raw is ABSENT:
        is_own = hasattr(type, name) or _is_torchs_method(type(cls), "__getattr__")
        return getattr(cls, name, ABSENT) if is_own and not _runs_on_access(type(cls)) else ABSENT
    if isinstance(raw, classmethod):
        return getattr(cls, name) if type(raw.__func__) is types.FunctionType else ABSENT
    is_plain = isinstance(raw, (*_CODE, property)) or not hasattr(type(raw), "__get__") or _is_of_c(type(raw))
    return type.__getattribute__(cls, name) if is_plain else ABSENT


def _of_object(owner: Any, name: str) -> Any:
    cls = type(owner)
    if _runs_on_access(cls):
        return ABSENT
    raw, own = member(cls, name), instance_dict(owner)
    if isinstance(raw, _SLOTS):
        return object.__getattribute__(owner, name)
    if isinstance(raw, property) or (raw is not ABSENT and hasattr(type(raw), "__set__")):
        return object.__getattribute__(owner, name) if _is_trusted(cls, raw) else ABSENT
    if name in own:
        return own[name]
    if raw is ABSENT:
        return getattr(owner, name, ABSENT) if _is_torchs_method(cls, "__getattr__") else ABSENT
    if isinstance(raw, _RUNS) or (isinstance(raw, classmethod) and type(raw.__func__) is not types.FunctionType):
        return ABSENT
    is_plain = isinstance(raw, (*_CODE, classmethod)) or not hasattr(type(raw), "__get__") or _is_of_c(type(raw))
    return object.__getattribute__(owner, name) if is_plain else ABSENT


def member(cls: type, name: str) -> Any:
    """The value under a name in a class or one that it inherits from, unbound; or ABSENT."""
    for owner in type.mro(cls) if cls is type else cls.__mro__:
        namespace = type.__dict__["__dict__"].__get__(owner)
        if name in namespace:
            return namespace[name]
    return ABSENT


def instance_dict(owner: Any) -> dict[str, Any]:
    """The attributes that an object has of its own, apart from slots; of a `threading.local` those of this thread."""
    if type(owner) is threading.local:
        return vars(owner)
    try:
        attributes = object.__getattribute__(owner, "__dict__")
    except Exception:
        return {}
    return attributes if issubclass(type(attributes), dict) else {}


def cells_of(function: types.FunctionType) -> dict[str, types.CellType]:
    """The cells of a closure, by the names that the code has for them."""
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))


def cell_content(cell: types.CellType) -> Any:
    """The object in a cell; ABSENT in an empty one."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def closed_over(function: types.FunctionType) -> list[Any]:
    """The objects that a function closes over."""
    return [content for cell in function.__closure__ or () if (content := cell_content(cell)) is not ABSENT]


def has_instance_dict(cls: type) -> bool:
    """True if instances of the class have attributes of their own."""
    return cls is threading.local or bool(getattr(cls, "__dictoffset__", 0))


def bound_to(value: Any) -> Any:
    """The object of a method, None for what is no method."""
    methods = types.MethodType | types.BuiltinFunctionType | types.MethodWrapperType
    return value.__self__ if issubclass(type(value), methods) else None


def module_of(value: Any) -> str:
    """The name of the module that something says to come from; empty where it says none."""
    name = attribute(value, "__module__")
    return name if type(name) is str else ""


def is_torchs(module: Any) -> bool:
    """True if a module's name is one of torch's."""
    return type(module) is str and (module == "torch" or module.startswith("torch."))


def _runs_on_access(cls: type) -> bool:
    """True if a user's code decides about every attribute of its instances."""
    return type(member(cls, "__getattribute__")) is types.FunctionType


def _is_torchs_method(cls: type, name: str) -> bool:
    function = member(cls, name)
    return type(function) is types.FunctionType and is_torchs(function.__globals__.get("__name__"))


def _is_trusted(cls: type, raw: Any) -> bool:
    """True if a property computes what torch or Python's own enum says, or something in C."""
    if issubclass(cls, enum.Enum):
        return type(raw) is not property or is_torchs(cls.__module__)
    getter = getattr(raw, "fget", None) if isinstance(raw, property) else None
    if type(getter) is types.FunctionType:
        return is_torchs(getter.__globals__.get("__name__"))
    return (isinstance(raw, property) and is_torchs(cls.__module__)) or _is_of_c(type(raw))


def _is_of_c(kind: type) -> bool:
    """True if a descriptor's class is written in C, and calls no function of a user's."""
    return not issubclass(kind, _RUNS) and not isinstance(member(kind, "__get__"), types.FunctionType | _Absent)


def is_a(value: Any, kinds: Any) -> bool:
    """isinstance by what a value is, whatever its `__class__` says."""
    return issubclass(type(value), kinds)


def is_tensor(value: Any) -> bool:
    """True if a value is a tensor, whatever its `__class__` says."""
    return issubclass(type(value), torch.Tensor)
