"""The methods of a Function class: which style, which are its own, their places and the names of their parameters."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

from torch.autograd.function import Function, once_differentiable

from .torch_private import boxes_gradients


def uses_setup_context(cls: type) -> bool:
    """True if `cls` is written as forward + setup_context, not as forward(ctx, ...)."""
    return cls.setup_context is not Function.setup_context  # type: ignore[attr-defined]


def backward_method(cls: type) -> Callable[..., Any] | None:
    """The user's backward, or the `vjp` that is an alias of it; None where there is none."""
    for name in ("backward", "vjp"):
        if getattr(cls, name) is not getattr(Function, name):
            return getattr(cls, name)  # type: ignore[no-any-return]
    return None


def methods(cls: type) -> dict[str, Callable[..., Any]]:
    """The methods that the user wrote, by name."""
    names = ("forward", "setup_context", "backward", "vjp", "jvp", "vmap")
    return {n: getattr(cls, n) for n in names if getattr(cls, n) is not getattr(Function, n)}


def is_once_differentiable(method: Callable[..., Any]) -> bool:
    """True if torch's `once_differentiable` wraps the method."""
    return getattr(method, "__wrapped__", None) is not None and method.__code__ is _ONCE.__code__


def _probe(ctx: Any, *gradients: Any) -> None:
    return None


_ONCE = once_differentiable(_probe)


def parameter_names(method: Callable[..., Any], count: int, skip: int, stem: str) -> list[str]:
    """The user's names for `count` arguments of a method after the first `skip`; `stem_i` beyond the method's
    parameters."""
    names = _positional(method)[skip:]
    return [names[i] if i < len(names) else f"{stem}_{i}" for i in range(count)]


def _positional(method: Callable[..., Any]) -> Sequence[str]:
    """The names of a method's positional parameters; of its `__signature__`, where that says something else."""
    if (signature := getattr(method, "__signature__", None)) is not None:
        return [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    code = getattr(inspect.unwrap(method), "__code__", None)
    first = 1 if isinstance(method, types.MethodType) else 0  # the class, of a class method
    return code.co_varnames[first : code.co_argcount] if code is not None else ()


def method_place(method: Any) -> str:
    """`file:line` of a method's definition."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else "unknown"


def as_tuple(result: Any) -> tuple[Any, ...]:
    """The returned values of a method as a tuple: it may return one alone."""
    return result if isinstance(result, tuple) else (result,)


def takes_boxed_gradients(cls: type) -> bool:
    """True if backward is given its gradients in one list, which it may empty."""
    return boxes_gradients and bool(getattr(cls, "boxed_grads_call", False))


def signature_objects(method: Callable[..., Any]) -> tuple[Any, ...]:
    """The objects that a method's signature is read off, each of which may be exchanged."""
    inner = inspect.unwrap(method)
    return (method, *(getattr(inner, name, None) for name in ("__code__", "__defaults__", "__kwdefaults__")))


def plain_function(cls: type) -> Callable[..., Any] | None:
    """The function that `compile` made a class of: forward is it, backward its vjp; None of a user's class."""
    function: Callable[..., Any] | None = getattr(cls, "_fusegrad_plain_function", (None,))[0]  # it may be a descriptor
    return function
