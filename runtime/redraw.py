"""Random numbers are drawn once: what differentiates a method that draws runs it again, on the numbers that it drew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Node

from ..tracer.capture import Trace

Generators = Sequence[tuple[torch.device, torch.Tensor]]
"""The states of torch's generators, by device."""
_KEY = "fusegrad_draws"


def first_draw(nodes: Iterable[Node]) -> Node | None:
    """The first operation that draws from one of torch's generators."""
    return next((n for n in nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())), None)


def draws(trace: Trace) -> bool:
    """Whether a captured graph draws random numbers, in itself or in what it calls."""
    meta = trace.graph_module.meta
    if _KEY not in meta:
        nodes = trace.graph_module.graph.nodes
        meta[_KEY] = first_draw(nodes) is not None or any(hasattr(n.target, "fusegrad_call") for n in nodes)
    return meta[_KEY]  # type: ignore[no-any-return]


def generators(values: Iterable[Any]) -> Generators:
    """The states that draws beside these values begin with."""
    devices = {v.device for v in values if isinstance(v, torch.Tensor)} | {torch.device("cpu")}
    return [(d, _module(d).get_rng_state(*_numbered(d))) for d in devices if _has_states(d)]


@contextmanager
def drawing_from(states: Generators | None) -> Iterator[None]:
    """Within the block the numbers of that time are drawn again; afterwards the generators are as they were."""
    now = [(d, _module(d).get_rng_state(*_numbered(d))) for d, _ in states or ()]
    _set(states or ())
    try:
        yield
    finally:
        _set(now)


def _set(states: Generators) -> None:
    for device, state in states:
        _module(device).set_rng_state(state, *_numbered(device))


def _has_states(device: torch.device) -> bool:
    """Whether a device's generator can be asked: not while a CUDA graph records, nor where there is none."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    return hasattr(_module(device), "get_rng_state")


def _module(device: torch.device) -> Any:
    return torch if device.type == "cpu" else torch.get_device_module(device.type)


def _numbered(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "cpu" else (device,)
