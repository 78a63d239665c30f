"""The least time of a Function's launches on a named GPU: bytes by bandwidth, operations by their rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...codegen import Kernels
from ...codegen.devices import Device
from ...ir import Value
from ...ir.passes.fuse import Extern, Group, Step
from ...ir.prims import PRIMS
from ...ir.types import Size, product
from ..execution.aten.step_by_step import is_loop
from ..values.sizes import Sizes, number
from .directions import DirectionReport
from .page.explained import Explained


@dataclass(frozen=True)
class Modelled:
    """One launch on the named device, by its bytes and operations alone."""

    name: str
    """The launch's name."""
    direction: str
    """Either "forward" or "backward"."""
    kind: str
    """As in `KernelReport`: "triton", "library", "aten" or "torch"."""
    bytes: int
    """Bytes of device memory that it moves."""
    operations: int
    """Arithmetic operations that it does."""
    microseconds: float
    """The longer of what its bytes and its operations take at the device's peaks."""
    bound: str
    """Which of the two is longer: "bytes" or "operations"."""


@dataclass(frozen=True)
class ModelledSum:
    """A direction of a candidate as a whole."""

    candidate: str
    """One of "fusegrad", "eager", "torch.compile"."""
    direction: str
    """Either "forward" or "backward"."""
    launches: int
    """How many."""
    bytes: int
    """Bytes of device memory that they move."""
    microseconds: float
    """The least time in which the device could move these bytes."""


def model_sums(explanation: Explained, device: Device) -> list[ModelledSum]:
    """The compiled methods, and beside them the methods as the user wrote them, operation by operation."""
    rows = []
    for name, report in explanation.directions.items():
        costs = {"fusegrad": (len(report.launches), report.moved)}
        if report.eager is not None:
            costs["eager"] = (report.eager.launches, report.eager.bytes)
        rows += [ModelledSum(c, name, n, moved, moved / device.bandwidth * 1e6) for c, (n, moved) in costs.items()]
    return rows


def model_launches(explanation: Explained, device: Device, sizes: Sizes) -> list[Modelled]:
    """A row for each launch, forward first."""
    return [row for name, report in explanation.directions.items() for row in _direction(name, report, device, sizes)]


def _direction(name: str, report: DirectionReport, device: Device, sizes: Sizes) -> list[Modelled]:
    rows = []
    for launch, work in zip(report.launches, _works(report, sizes), strict=False):
        moved = launch.bytes_read + launch.bytes_written
        times = {"bytes": moved / device.bandwidth * 1e6, "operations": work / device.flops * 1e6}
        bound = max(times, key=lambda k: times[k])
        rows.append(Modelled(launch.name, name, launch.kind, moved, work, times[bound], bound))
    return rows


def _works(report: DirectionReport, sizes: Sizes) -> list[int]:
    """The operations of each launch of a direction, or of a step of a loop."""
    kernels, loops = iter(report.kernels), iter(report.loops)
    return [work for step in report.steps for work in _work(step, kernels, loops, sizes)]


def _work(
    step: Step, kernels: Iterator[Kernels], loops: Iterator[DirectionReport], sizes: Sizes
) -> list[int]:
    """The operations of each launch of a step."""
    if isinstance(step, Group):
        return [number(kernel.operations, sizes) for kernel in next(kernels).kernels]
    if isinstance(step, Extern) and is_loop(step):
        params = step.value.params
        stacked = len(step.value.avals) - params["carries"]
        return _works(next(loops), sizes) * number(params["length"], sizes) + [0] * stacked
    return [number(_operations(step.value), sizes)] if isinstance(step, Extern) else []


def _operations(value: Value) -> Size:
    """One for each element of an elementwise result, of a sum's operand, of a scan; two for each product's pair."""
    family = PRIMS[value.prim].family
    if family == "contract":
        sizes = dict(zip(value.params["x_axes"], value.args[0].shape, strict=True))
        sizes |= dict(zip(value.params["y_axes"], value.args[1].shape, strict=True))
        return 2 * product(sizes.values())
    if family in ("reduce", "cumulative"):
        return value.args[0].aval.numel
    return value.aval.numel if family == "elementwise" and value.prim != "cast" else 0
