"""Random numbers drawn once: a derivative of a method that draws runs it again, on the numbers of its first run."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ...tracer.loops.node import operations
from ...tracer.trace import CaptureError, Trace
from ..values.tensors import records_launches

Generators = Sequence[tuple[torch.device, torch.Tensor]]
"""The states of torch's generators, by device."""
_KEY, _DRAWS = "fusegrad_draws", torch.Tag.nondeterministic_seeded


def first_draw(nodes: Iterable[Node]) -> Node | None:
    """The first operation that draws from one of torch's generators, in a loop or outside."""
    return next((n for n in operations(nodes) if _DRAWS in getattr(n.target, "tags", ())), None)


def draws(trace: Trace) -> bool:
    """True if a captured graph draws random numbers, in itself or in nested calls."""
    meta = trace.graph_module.meta
    if _KEY not in meta:
        nodes = trace.graph_module.graph.nodes
        meta[_KEY] = first_draw(nodes) is not None or any(hasattr(n.target, "fusegrad_call") for n in nodes)
    return meta[_KEY]  # type: ignore[no-any-return]


def generator_states(values: Iterable[Any]) -> Generators:
    """The generators' states that draws on the devices of these values begin with."""
    devices = {v.device for v in values if isinstance(v, torch.Tensor)} | {torch.device("cpu")}
    return [(d, _module(d).get_rng_state(*_device_argument(d))) for d in devices if _has_states(d)]


@contextmanager
def redraw(states: Generators | None) -> Iterator[None]:
    """Within the block the numbers of that time are drawn again; afterwards the generators are as they were.

    `end_redraw` ends that before the end of the block.
    """
    before = [(d, _module(d).get_rng_state(*_device_argument(d))) for d, _ in states or ()]
    outer, _outer.now = getattr(_outer, "now", None), before
    _set(states or ())
    try:
        yield
    finally:
        _set(getattr(_outer, "now", None) or ())
        _outer.now = outer


_outer = threading.local()  # `now`: the generators as they were before numbers were drawn again


def end_redraw() -> None:
    """Let later draws be new ones: a derivative may call a method that draws, which is no repetition."""
    _set(getattr(_outer, "now", None) or ())
    _outer.now = None


def require_no_draw_after(node: Node | None) -> None:
    """Raises CaptureError where a derivative, traced since then, draws: its graph would draw again what was drawn."""
    graph = _recorded_graph()
    later = [] if graph is None else takewhile(lambda n: n is not node, reversed(graph.nodes))
    if (drawing := first_draw(later)) is not None:
        _, place, _ = drawing.meta.get("fusegrad_origin") or (None, "unknown", None)
        raise CaptureError(reason=f"it draws random numbers (`{drawing.target}`) in a derivative", where=place)


def last_node() -> Node | None:
    """Of the graph that is being recorded."""
    graph = _recorded_graph()
    return None if graph is None else next(iter(reversed(graph.nodes)), None)


def _recorded_graph() -> Any:
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.graph


def _set(states: Generators) -> None:
    for device, state in states:
        _module(device).set_rng_state(state, *_device_argument(device))


def _has_states(device: torch.device) -> bool:
    """True if a device's generator has a state to read: not while a CUDA graph records, nor without a generator."""
    return not records_launches(device) and hasattr(_module(device), "get_rng_state")


def _module(device: torch.device) -> Any:
    return torch if device.type == "cpu" else torch.get_device_module(device.type)


def _device_argument(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "cpu" else (device,)
