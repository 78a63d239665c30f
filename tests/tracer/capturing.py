"""A capture as the tracer makes it, without the tracer: fakes with symbolic sizes, and make_fx on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fusegrad.ir import Graph


def fakes_of(tensors: Sequence[torch.Tensor]) -> list[Any]:
    mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False), allow_non_fake_inputs=True)
    return [_fake(mode, t, f"t{i}") for i, t in enumerate(tensors)]


def _fake(mode: FakeTensorMode, tensor: torch.Tensor, name: str) -> Any:
    sizes: Any = [DimDynamic.DYNAMIC] * tensor.dim()
    strides: Any = [DimDynamic.INFER_STRIDE] * tensor.dim()
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes, dynamic_strides=strides)
    return mode.from_tensor(tensor, source=LocalSource(name), symbolic_context=context)


def capture(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> tuple[torch.fx.GraphModule, list[Any]]:
    """The ATen graph of the function, nothing decomposed, and the fakes it was traced on."""
    fakes = fakes_of(tensors)
    with fakes[0].fake_mode, torch.no_grad(), enable_python_dispatcher():
        return make_fx(lambda *args: function(*args), tracing_mode="real", _allow_non_fake_inputs=True)(*fakes), fakes


def symbols(graph: Graph, tensors: Sequence[torch.Tensor]) -> dict[sympy.Symbol, int]:
    """The value of each symbol that is a size or a stride of an input."""
    bound: dict[sympy.Symbol, int] = {}
    for value, tensor in zip(graph.inputs, tensors, strict=True):
        found = zip((*value.shape, *value.params["strides"]), (*tensor.shape, *tensor.stride()), strict=True)
        bound.update({size: number for size, number in found if isinstance(size, sympy.Symbol)})
    return bound
