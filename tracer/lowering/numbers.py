"""Numbers that a method reads from tensors and computes with: to kernels tensors of one element, with all their digits.

    full(shape=(s0, 4), value=2*zf1)  ->  broadcast(cast(call(2*zf1), dtype="f32"), shape=(s0, 4))

The steps of a loop are given them: a step calls nothing that reads numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import sympy
import torch

from ...ir import Graph, TensorType, Value, building, emit
from ...ir.loops.loop import loop_of, rebuild_scans
from ...ir.rewrite import copy_into, rebuild
from .rules import cast, expand


def number_from_data(number: float, device: torch.device) -> torch.Tensor:
    """The number as a tensor."""
    return torch.full((), number, dtype=torch.float64, device=device)


number_from_data.fusegrad_call = number_from_data  # type: ignore[attr-defined]


def numbers_as_tensors(graph: Graph) -> Graph:
    """The graph with its constants that are made of numbers from data as results of a call."""
    graph = rebuild_scans(graph, _given_numbers)
    constants = (v for v in graph.order() if v.prim == "full")
    replacements = {v.id: partial(_tensor, v) for v in constants if _is_read(v.params["value"])}
    return rebuild(graph, {}, replacements) if replacements else graph


def _given_numbers(node: Value, args: list[Value]) -> list[Value] | None:
    """The results of a loop whose steps are given their numbers from data; None where they have none."""
    loop = loop_of(node, args)
    loop = replace(loop, body=rebuild_scans(loop.body, _given_numbers))
    constants = [v for v in loop.body.order() if v.prim == "full" and _is_read(v.params["value"])]
    if not constants:
        return None
    body = Graph(loop.body.name)
    env = {v.id: body.input_like(v) for v in loop.body.inputs}
    given = {v.id: body.input(TensorType((), v.dtype), f"number{i}") for i, v in enumerate(constants)}
    with building(body):
        env |= {v.id: expand(given[v.id], v.shape) for v in constants}
        copy_into(loop.body.order(), env)
    body.returning([env[o.id] for o in loop.results])
    numbers = tuple(emit("full", value=v.params["value"], shape=(), dtype=v.dtype) for v in constants)
    return replace(loop, body=body, wholes=(*loop.wholes, *numbers)).emit()


def _is_read(number: Any) -> bool:
    return isinstance(number, sympy.Basic) and not all(s.is_integer for s in number.free_symbols)


def _tensor(constant: Value, _: Mapping[int, Value]) -> Value:
    spec = ((constant.params["value"], ("device", "")), ())
    number = emit("call", target=number_from_data, spec=spec, avals=(TensorType((), "f64"),))
    return expand(cast(number, constant.dtype), constant.shape)
