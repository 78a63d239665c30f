"""make_fx's recorder with a shorter way for what most operations are: tensors that it knows in, one tensor out.

torch's own keeps with every node in which memory formats the result is contiguous, and a proxy for each size, stride,
number of elements and offset: half a millisecond of symbolic arithmetic. Here sizes that are symbols are found by them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree

from ...ir.errors import InternalError
from ..torch_private import (
    ASKS_DEVICE,
    FakeTensor,
    ProxyMode,
    extract_val,
    has_kernel,
    has_proxy,
    plain_tensors,
    remember_tensor,
    symbol_node,
    tracked_proxy,
)

Tensor = torch.Tensor
PLAIN = (
    bool, int, float, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)


class _Unknown(Exception):
    """An argument that takes torch's own recorder."""


class Recorder(ProxyMode):  # type: ignore[misc]
    """The mode of a trace that make_fx runs. fault: what went wrong in what is ours here, told at its end."""

    fault: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_DEVICE:
            return super().__torch_dispatch__(func, types, args, kwargs)
        operands = self._traced_arguments(func, args, kwargs or {})
        if operands is not None:
            return self._record_node(func, args, kwargs or {}, operands)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _traced_arguments(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The arguments as nodes; None where torch's own recorder takes the operation."""
        try:
            if is_short(func) and not self._may_be_constant(func, (*args, *kwargs.values())):
                with suppress(_Unknown):
                    return self._nodes((args, kwargs))
            self._keep_metadata((*args, *kwargs.values()))
        except Exception as error:
            self.fault = f"{type(error).__name__}: {error}"
        return None

    def __sym_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """A size that was learnt since is a number: the symbol that it was is all that has a node."""
        return super().__sym_dispatch__(func, types, tuple(map(_known_number, args)), kwargs)

    def _record_node(self, func: Any, args: Any, kwargs: Any, operands: Any) -> Any:
        graph = self.tracer.graph
        node = graph.create_node("call_function", func, *operands, name=_name(func))
        result = func(*args, **kwargs)
        proxy = torch.fx.Proxy(node, self.tracer)
        if type(result) is not FakeTensor or not self._are_recorded(result.shape, result.stride()):
            return track_tensor_tree(result, proxy, constant=None, tracer=self.tracer)
        node.meta["val"] = extract_val(result) if torch.is_grad_enabled() else result
        remember_tensor(self.tracer, result, proxy)
        return result

    def _nodes(self, value: Any) -> Any:
        """The arguments as nodes of the graph."""
        if isinstance(value, Tensor):
            return self._node_of(value)
        if type(value) in PLAIN:
            return value
        if isinstance(value, torch.SymInt):
            return symbol_node(self.tracer, value)
        if isinstance(value, Mapping):
            return {k: self._nodes(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self._nodes, value))
        raise _Unknown

    def _node_of(self, tensor: Tensor) -> torch.fx.Node:
        proxy, _ = tracked_proxy(self.tracer, tensor)
        if proxy is None:
            raise _Unknown
        return proxy.node  # type: ignore[no-any-return]

    def _may_be_constant(self, func: Any, operands: Sequence[Any]) -> bool:
        """True if torch's recorder follows the values: it knows all of them, or one of them is written to."""
        are_constants = [tracked_proxy(self.tracer, a)[1] is not None for a in tensors_in(operands)]
        return any(are_constants) and (func._schema.is_mutable or all(are_constants))

    def _are_recorded(self, sizes: Sequence[Any], strides: Sequence[Any]) -> bool:
        """True if each is a number, a symbol, or a stride that another tensor has: what is new needs torch's proxy."""
        return all(map(_is_atom, sizes)) and all(_is_atom(n) or has_proxy(self.tracer, n) for n in strides)

    def _keep_metadata(self, operands: Sequence[Any]) -> None:
        """A copy for the node: what other operations do to a tensor's sizes must not show in the node that made it."""
        for tensor in operands:
            if type(tensor) is FakeTensor and (proxy := tracked_proxy(self.tracer, tensor)[0]) is not None:
                if proxy.node.meta.get("val") is tensor:
                    with plain_tensors():
                        proxy.node.meta["val"] = extract_val(tensor)


def _known_number(size: Any) -> Any:
    if isinstance(size, list | tuple):
        return type(size)(map(_known_number, size))
    return int(size.node.expr) if isinstance(size, torch.SymInt) and size.node.expr.is_Integer else size


def _is_atom(size: Any) -> bool:
    """True if a size is a number or a symbol, and not computed of them."""
    return isinstance(size, int) or size.node.expr.is_Atom


def tensors_in(arguments: Sequence[Any]) -> list[Tensor]:
    """The tensors among the arguments of an operation, lists of them included."""
    return [t for a in arguments for t in (a if isinstance(a, list | tuple) else (a,)) if isinstance(t, Tensor)]


@lru_cache(maxsize=2048)
def is_short(func: Any) -> bool:
    """True if an operation of torch's own makes one tensor, as all its arguments say."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten" or any(t in func.tags for t in _TAGS):
        return False
    returns = [str(r.type) for r in func._schema.returns]
    return returns == ["Tensor"] and "lift" not in func._schema.name and not has_kernel(
        func.name(), "CompositeImplicitAutograd"  # type: ignore[no-untyped-call]
    )  # fmt: skip


@lru_cache(maxsize=2048)
def _name(func: Any) -> str:
    return torch.fx.Graph()._target_to_str(func.overloadpacket.__name__)


def begin_recording() -> None:
    """The trace that runs takes the shorter way from here on, where this torch lets it."""
    mode: Any = get_proxy_mode()
    if ProxyMode is not object and type(mode) is ProxyMode:
        mode.__class__ = Recorder


def end_recording() -> None:
    """The trace that runs is whole. Raises InternalError where it is not."""
    mode: Any = get_proxy_mode()
    if (fault := getattr(mode, "fault", None)) is not None:
        raise InternalError(f"in recording: {fault}")
