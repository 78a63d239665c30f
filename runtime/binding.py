"""The shortest way from Python to an ATen operation: the method of `Tensor`, where it leads there and nowhere else.

A call through `torch.ops` boxes its arguments; a method does not: a third of the host time of a small operation less.
Whether a method is the operation is not looked up but tried: it is called on the captured fakes, and stopped at once.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode

from ..tracer.torch_private import no_autocast, operation, plain_tensors

Tensor = torch.Tensor
Operation = Callable[..., Any]


class _Reached(Exception):
    """An operation was about to run."""

    def __init__(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(str(target))
        self.target, self.args_, self.kwargs = target, args, kwargs


class _Stop(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Reached(func, args, kwargs or {})


def bindings(nodes: Sequence[Node]) -> dict[Node, Operation]:
    """What to call for each of these nodes."""
    with plain_tensors(), torch.no_grad(), no_autocast(), _Stop():  # type: ignore[no-untyped-call]
        return {node: _method(node) or operation(node.target) for node in nodes}


def _method(node: Node) -> Operation | None:
    """The method that does what the node does; None where there is none, or it cannot be said."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return None
    method = getattr(Tensor, target._schema.name.removeprefix("aten::"), None)
    if type(method) is not types.MethodDescriptorType or not node.args:
        return None
    try:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    except KeyError:
        return None
    return method if isinstance(args[0], Tensor) and _leads_to(method, target, args, kwargs) else None


def _leads_to(method: Operation, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        method(*args, **kwargs)
    except _Reached as reached:
        asked, got = _filled(target, args, kwargs), _filled(target, reached.args_, reached.kwargs)
        return reached.target is target and len(asked) == len(got) and all(map(_same, asked, got))
    except Exception:  # it takes other arguments than the operation
        return False
    return False


def _filled(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments in the schema's order, with its defaults."""
    schema = target._schema.arguments
    rest = [kwargs.get(a.name, a.default_value if a.has_default_value() else None) for a in schema[len(args) :]]
    return [*args, *rest]


def _same(a: Any, b: Any) -> bool:
    """Whether two arguments are the same; sizes by what they are, so that nothing is assumed of them."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
        return a is b or (isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt) and str(a) == str(b))
    return type(a) is type(b) and bool(a == b)
