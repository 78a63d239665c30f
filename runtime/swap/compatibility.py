"""Checks that a replacement can stand in for a module: how it is called, what it reads of it, what it leaves unread."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
from torch import nn

from .swapped_class import as_class


def misfit(module: nn.Module, replacement: Any) -> str | None:
    """The reason why the replacement does not fit this module, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a ScriptModule, whose methods are compiled already"
    if "forward" in vars(module):
        return "it has a `forward` of its own, set on the instance: swap first, or take that away"
    if replacement is None:
        return None
    own = as_class(replacement)
    refuses = getattr(own, "refuses", None)
    refusal = refuses(module) if refuses is not None else None
    return refusal or _signature_misfit(module, own) or _state_misfit(module, own)


# ------------------------------------------------------------------ how it is called
ANY_POSITIONAL, ANY_NAMED = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
NONE = inspect.Parameter.empty


def _signature_misfit(module: nn.Module, own: type) -> str | None:
    forward = getattr(own, "forward", nn.Module.forward)
    if forward is nn.Module.forward:  # other methods are replaced, not this one
        return None
    return signature_misfit(type(module).forward, forward, is_method=True)


def signature_misfit(original: Any, new: Any, is_method: bool = False) -> str | None:
    """The reason why `new` cannot be called in every way in which `original` can, or None."""
    expected, offered = inspect.signature(original), inspect.signature(new)
    parameters = (list(s.parameters.values())[is_method:] for s in (expected, offered))  # without self
    reason = next(_call_misfits(*parameters), None)
    place = f"in the place of {_qualified_name(original)}{expected}"
    return reason and f"{reason}; it is {_qualified_name(new)}{offered}, {place}"


def _qualified_name(function: Any) -> str:
    return str(getattr(function, "__qualname__", function))


def _call_misfits(original: list[inspect.Parameter], new: list[inspect.Parameter]) -> Iterator[str]:
    kinds = {p.kind for p in new}
    named = {p.name: p for p in new if p.kind not in (ANY_POSITIONAL, ANY_NAMED)}
    places = [p.name for p in new if p.kind in POSITIONAL]
    for i, p in enumerate(original):
        if p.kind in POSITIONAL and places[i : i + 1] != [p.name] and ANY_POSITIONAL not in kinds:
            yield f"it takes no `{p.name}` in place {i}"
        if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name not in named and ANY_NAMED not in kinds:
            yield f"it takes no `{p.name}`"
        if p.kind in (ANY_POSITIONAL, ANY_NAMED) and p.kind not in kinds:
            yield f"it takes no further arguments, as `{p}` does"
    required = {p.name for p in original if p.default is NONE}
    yield from (f"it needs `{name}`" for name, p in named.items() if p.default is NONE and name not in required)


# ------------------------------------------------------------------ what it reads of the module
def _state_misfit(module: nn.Module, own: type) -> str | None:
    forward = getattr(own, "forward", None)
    if not isinstance(forward, FunctionType) or forward is nn.Module.forward:
        return None
    read, is_all = attributes_read(forward, own, type(module))
    if absent := [name for name in read if not hasattr(module, name) and not hasattr(own, name)]:
        return f"it reads `self.{absent[0]}`, which the module does not have"
    unread = [name for name in _with_parameters(module) if name not in read]
    return f"it misses the parameters in `{unread[0]}`, which nothing of it reads" if is_all and unread else None


def _with_parameters(module: nn.Module) -> Iterator[str]:
    """The module's own parameters, and its submodules that have some."""
    yield from (name for name, p in module.named_parameters(recurse=False) if p is not None)
    yield from (name for name, m in module.named_children() if next(m.parameters(), None) is not None)


def attributes_read(method: FunctionType, *classes: type) -> tuple[list[str], bool]:
    """The attributes that a method reads of its first argument, through other methods too; and whether that is all.

    It is not where the method passes that argument on, closes over it, or calls `super()`: what these read isn't known.
    """
    names: dict[str, None] = {}
    is_all, todo, visited = True, [method], []
    while todo:
        visited.append(todo.pop())
        for name in _reads(visited[-1]):
            is_all = is_all and name is not None
            if name is not None:
                names[name] = None
                called = next((vars(b)[name] for c in classes for b in c.__mro__ if name in vars(b)), None)
                if isinstance(called, FunctionType) and called not in visited:
                    todo.append(called)
    return list(names), is_all


def _reads(method: FunctionType) -> Iterator[str | None]:
    """The names of `self.name`; None where self is used in another way. Read from the code object."""
    code = method.__code__
    first = code.co_varnames[0] if code.co_argcount else None
    if first in code.co_cellvars or "__class__" in code.co_freevars:
        yield None
    steps = list(dis.get_instructions(code))
    for step, after in pairwise(steps):
        loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if not step.opname.startswith("LOAD_FAST") or first not in loaded:
            continue
        is_attribute = loaded[-1] == first and after.opname in ("LOAD_ATTR", "LOAD_METHOD")
        yield after.argval if is_attribute and loaded.count(first) == 1 else None
