"""What Inductor makes of the methods as the user wrote them: launches, and bytes by its own count. Nothing is run.

A process of its own lowers the traced graphs for an H100 that is not there: `benchmarks/inductor.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from ...codegen.devices import Device
from ...tracer.trace import Trace
from ..report.costs.eager_cost import size_at
from ..report.explanation import Explanation
from ..report.roofline import ModelledSum
from ..values.sizes import Sizes

PROGRAM = "fusegrad.benchmarks.inductor"
LIMIT = 300.0
"""Seconds that Inductor may take."""


@dataclass(frozen=True)
class InductorCosts:
    """A row for each method that Inductor lowered, or why there is none."""

    sums: list[ModelledSum] = field(default_factory=list)
    why_not: str = ""


def inductor_costs(explanation: Explanation, device: Device) -> InductorCosts:
    """Launches and bytes of Inductor's code for forward and backward; the time of these bytes on the device."""
    traces = {name: report.traced for name, report in explanation.directions.items() if report.traced is not None}
    if any(trace.opaque for trace in traces.values()):
        return InductorCosts(why_not="the class calls something that is not traceable")
    try:
        counts = _counted({name: _given(trace, explanation.sizes) for name, trace in traces.items()})
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return InductorCosts(why_not=_line(error))
    return InductorCosts([_row(name, found, device) for name, found in counts.items()])


def _given(trace: Trace, sizes: Sizes) -> tuple[str, list[Any]]:
    """The text of the graph, and its arguments."""
    text = trace.graph_module.graph.python_code("self").src
    return text, [_argument(value, sizes) for value in (*trace.fakes, *trace.lifted)]


def _argument(value: Any, sizes: Sizes) -> Any:
    if not isinstance(value, torch.Tensor):
        return size_at(value, sizes)
    shape, strides = ([size_at(n, sizes) for n in numbers] for numbers in (value.shape, value.stride()))
    return str(value.dtype).removeprefix("torch."), shape, strides


def _counted(graphs: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Raises ValueError with the last line of what the process said, where it fails."""
    command, asked = [sys.executable, "-m", PROGRAM], json.dumps(graphs)
    ended = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=LIMIT, check=False)
    if ended.returncode:
        raise ValueError((ended.stderr.strip().splitlines() or ["no reason"])[-1])
    counts: dict[str, dict[str, int]] = json.loads(ended.stdout.splitlines()[-1])
    return counts


def _row(name: str, found: dict[str, int], device: Device) -> ModelledSum:
    moved = found["bytes"]
    return ModelledSum("torch.compile", name, found["launches"], moved, moved / device.bandwidth * 1e6)


def _line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
