"""The shortest way from Python to an ATen operation: the method of `Tensor`, or the function of `torch`, that is it.

A call through `torch.ops` boxes its arguments; those do not: a third of the host time of a small operation less.
Whether one is the operation is not looked up but tried: it is called on the captured fakes, and stopped at once.
So are the ways to write a result into memory that there is.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode

from ....tracer.torch_private import functions_of_torch, no_autocast, operation, plain_tensors

Tensor = torch.Tensor
Operation = Callable[..., Any]


class _About(NamedTuple):
    """An operation that was about to run."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Reached(Exception):
    """Raised in place of an operation."""

    def __init__(self, operation: _About) -> None:
        super().__init__(str(operation.target))
        self.operation = operation


class _Stop(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Reached(_About(func, args, kwargs or {}))


def bind_operations(nodes: Sequence[Node]) -> dict[Node, Operation]:
    """Choose the callable for each of these nodes."""
    with plain_tensors(), torch.no_grad(), no_autocast(), _Stop():  # type: ignore[no-untyped-call]
        return {node: _unboxed(node) or operation(node.target) for node in nodes}


def _unboxed(node: Node) -> Operation | None:
    """The method or function that does what the node does; None where there is none, or it cannot be said."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return None
    try:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    except KeyError:
        return None
    if not any(isinstance(a, Tensor) for a in args):
        return None
    key = _kinds((target, args, kwargs))
    try:
        return _known[key]
    except (KeyError, TypeError):
        method = _method(node, target, args, kwargs)
    if key is not None and len(_known) < MOST:
        _known[key] = method
    return method


MOST = 8192
_known: dict[Any, Operation | None] = {}
"""The choices for arguments of these kinds, which is the same in every turn of a loop."""
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def _kinds(value: Any) -> Any:
    """The facts that an operation is chosen by: of tensors the dtype and whether they are numbers, else the value."""
    if isinstance(value, Tensor):
        return value.dtype, value.dim() == 0, value.requires_grad
    if isinstance(value, list | tuple):
        kinds = tuple(map(_kinds, value))
        return None if None in kinds else (type(value), kinds)
    if isinstance(value, dict):
        return _kinds(tuple(value.items()))
    return (type(value), value) if type(value) in _PLAIN or isinstance(value, torch._ops.OpOverload) else None


def _method(node: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation | None:
    name = _name_of(node)
    candidates: list[Any] = [getattr(place, name, None) for place in (Tensor, *functions_of_torch)]
    calls = [c for c in candidates if type(c) in (types.MethodDescriptorType, types.BuiltinFunctionType)]
    return next((c for c in calls if _leads_to(c, target, args, kwargs)), None)


def _leads_to(method: Operation, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    reached = _reached(method, args, kwargs)
    if reached is None or reached.target is not target:
        return False
    expected, actual = _filled(target, args, kwargs), _filled(target, reached.args, reached.kwargs)
    return len(expected) == len(actual) and all(map(_same, expected, actual))


def _reached(call: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> _About | None:
    """The operation that a call leads to; None where it does not take these arguments.

    The exception is not handed on: what its frames hold, the user's among them, would wait for Python's collector.
    """
    try:
        call(*args, **kwargs)
    except _Reached as reached:
        return reached.operation
    except Exception:
        return None
    return None


# ------------------------------------------------------------------ into memory that is there
def writing_overloads(pairs: Sequence[tuple[Node, Node]]) -> dict[Node, tuple[Operation, bool]]:
    """{node: (what to call, whether as a method of the memory)} for (node, the node whose memory it is to write to).

    Without those for which torch has no operation of its own: one that computes elsewhere and copies saves nothing.
    """
    with plain_tensors(), torch.no_grad(), no_autocast(), _Stop():  # type: ignore[no-untyped-call]
        ways = {node: _in_place(node, memory) or _into(node, memory) for node, memory in pairs}
    return {node: way for node, way in ways.items() if way is not None}


def _in_place(node: Node, memory: Node) -> tuple[Operation, bool] | None:
    name = _name_of(node)
    method = getattr(Tensor, f"{name}_", None)
    if node.args[:1] != (memory,) or type(method) is not types.MethodDescriptorType:
        return None
    return (method, True) if _writes(node, method, f"aten::{name}_", {}) else None


def _into(node: Node, memory: Node) -> tuple[Operation, bool] | None:
    name = _name_of(node)
    function = getattr(torch, name, None)
    if type(function) is not types.BuiltinFunctionType:
        return None
    return (function, False) if _writes(node, function, f"aten::{name}", {"out": memory.meta["val"]}) else None


def _name_of(node: Node) -> str:
    return str(node.target._schema.name).removeprefix("aten::")  # type: ignore[union-attr]


def _writes(node: Node, call: Operation, name: str, out: dict[str, Any]) -> bool:
    """True where the call leads to the writing operation of that name, with the arguments of the node."""
    target: Any = node.target
    try:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    except KeyError:
        return False
    reached = _reached(call, args, {**kwargs, **out})
    if reached is None or reached.target._schema.name != name or torch.Tag.generated in reached.target.tags:
        return False
    expected, actual = _by_name(target, args, kwargs), _by_name(reached.target, reached.args, reached.kwargs)
    outs = [actual.pop(a.name) for a in reached.target._schema.arguments if a.is_out]
    same = expected.keys() == actual.keys() and all(_same(value, actual[key]) for key, value in expected.items())
    return same and len(outs) == len(out) and all(map(operator.is_, outs, out.values()))


def _by_name(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [a.name for a in target._schema.arguments]
    return dict(zip(names, _filled(target, args, kwargs), strict=True))


def _filled(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments in the schema's order, with its defaults."""
    schema = target._schema.arguments
    defaults = [kwargs.get(a.name, a.default_value if a.has_default_value() else None) for a in schema[len(args) :]]
    return [*args, *defaults]


def _same(a: Any, b: Any) -> bool:
    """True for equal arguments; sizes by their expressions, so that nothing is assumed of them."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
        return a is b or (isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt) and str(a) == str(b))
    return type(a) is type(b) and bool(a == b)
