"""Numbers that a method reads from tensors and computes with: to kernels tensors of one element, with all their digits.

    full(shape=(s0, 4), value=2*zf1)  ->  broadcast(cast(call(2*zf1), dtype="f32"), shape=(s0, 4))
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import sympy
import torch

from ...ir import Graph, TensorType, Value, emit
from ...ir.rewrite import rebuild
from .rules import cast, expand


def number_from_data(number: float, device: torch.device) -> torch.Tensor:
    """The number as a tensor."""
    return torch.full((), number, dtype=torch.float64, device=device)


number_from_data.fusegrad_call = number_from_data  # type: ignore[attr-defined]


def numbers_as_tensors(graph: Graph) -> Graph:
    """The graph with its constants that are made of numbers from data as results of a call."""
    constants = (v for v in graph.order() if v.prim == "full")
    replacements = {v.id: partial(_tensor, v) for v in constants if _is_read(v.params["value"])}
    return rebuild(graph, {}, replacements) if replacements else graph


def _is_read(number: Any) -> bool:
    return isinstance(number, sympy.Basic) and not all(s.is_integer for s in number.free_symbols)


def _tensor(constant: Value, _: Mapping[int, Value]) -> Value:
    spec = ((constant.params["value"], ("device", "")), ())
    number = emit("call", target=number_from_data, spec=spec, avals=(TensorType((), "f64"),))
    return expand(cast(number, constant.dtype), constant.shape)
