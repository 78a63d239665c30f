"""The least time of a Function's launches on a named GPU: bytes by bandwidth, operations by the rate of their units."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...codegen import Kernel, Kernels
from ...codegen.devices import Device
from ...ir import Value
from ...ir.passes.fuse import Extern, Group, Step
from ...ir.passes.streaming.streams import SPECIAL
from ...ir.prims import PRIMS
from ...ir.types import LOW_FLOATS, Size, product
from ..execution.aten.step_by_step import is_loop
from ..values.sizes import Sizes, number
from .costs.slab_report import Walk
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
    """Arithmetic operations that it does; of blocks in which all is masked none."""
    microseconds: float
    """The longest of what its bytes and its operations take at the device's peaks."""
    bound: str
    """Which of them is the longest: "bytes", "operations", "tensor cores", or "exponentials"."""
    products: int = 0
    """Those of its operations that tensor cores do."""
    exponentials: int = 0
    """What the unit for special functions computes, where the matrices are never in memory."""


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
        costs = {"fusegrad": (report.launch_count, report.moved)}
        if report.eager is not None:
            costs["eager"] = (report.eager.launches, report.eager.bytes)
        rows += [ModelledSum(c, name, n, moved, moved / device.bandwidth * 1e6) for c, (n, moved) in costs.items()]
    return rows


def model_launches(explanation: Explained, device: Device, sizes: Sizes) -> list[Modelled]:
    """A row for each launch, forward first."""
    return [row for name, report in explanation.directions.items() for row in _direction(name, report, device, sizes)]


def _direction(name: str, report: DirectionReport, device: Device, sizes: Sizes) -> list[Modelled]:
    rows, launches = [], iter(report.launches)
    for work in _works(report, sizes):
        launch = next(launches)
        moved = launch.bytes_read + launch.bytes_written
        times = {"bytes": moved / device.bandwidth, **work.seconds(device)}
        bound = max(times, key=lambda k: times[k])
        rows.append(
            Modelled(launch.name, name, launch.kind, moved, work.operations, times[bound] * 1e6, bound,
                     work.products, work.exponentials)
        )  # fmt: skip
    return rows


@dataclass(frozen=True)
class _Work:
    """What one launch computes: operations, those of them that tensor cores do, and exponentials besides."""

    operations: int
    products: int = 0
    exponentials: int = 0

    def seconds(self, device: Device) -> dict[str, float]:
        return {
            "operations": (self.operations - self.products) / device.flops,
            "tensor cores": self.products / device.products,
            "exponentials": self.exponentials * SPECIAL / device.flops,
        }

    def __add__(self, other: _Work) -> _Work:
        return _Work(
            self.operations + other.operations, self.products + other.products, self.exponentials + other.exponentials
        )

    def __mul__(self, times: int) -> _Work:
        return _Work(times * self.operations, times * self.products, times * self.exponentials)


def _works(report: DirectionReport, sizes: Sizes) -> Iterator[_Work]:
    """The work of each launch of a direction, or of all steps of a loop."""
    kernels, loops = iter(report.kernels), iter(report.loops)
    for at, step in enumerate(report.steps):
        works = _work(step, kernels, loops, sizes)
        yield from _slab_work(report.slabs[at].walk) if at in report.slabs else works


def _slab_work(walk: Walk) -> list[_Work]:
    """The work of each launch of a slab, in all slabs."""
    by_slab = []
    for sizes in walk.each:
        kernels = iter(walk.generated.kernels.values())
        by_slab.append([work for step in walk.generated.steps for work in _work(step, kernels, iter(()), sizes)])
    return [sum(works, start=_Work(0)) for works in zip(*by_slab, strict=True)]


def _work(
    step: Step, kernels: Iterator[Kernels], loops: Iterator[DirectionReport], sizes: Sizes
) -> list[_Work]:
    """The work of each launch of a step."""
    if isinstance(step, Group):
        return [_of_kernel(kernel, sizes) for kernel in next(kernels).kernels]
    if isinstance(step, Extern) and is_loop(step):
        steps = number(step.value.params["length"], sizes)
        stacked = len(step.value.avals) - step.value.params["carries"]
        return [*(work * steps for work in _works(next(loops), sizes)), *[_Work(0)] * stacked]
    return [_of_call(step.value, sizes)] if isinstance(step, Extern) else []


def _of_kernel(kernel: Kernel, sizes: Sizes) -> _Work:
    """Where a matrix is never in memory, the blocks that are not skipped."""
    operations, walk = number(kernel.operations, sizes), kernel.walk
    if walk is None:
        return _Work(operations, number(kernel.multiplied, sizes))
    products, powers = (round(walk.alive * number(n, sizes)) for n in (walk.multiplied, walk.exponentials))
    return _Work(round(walk.alive * operations), products if walk.dtype in LOW_FLOATS else 0, powers)


def _of_call(value: Value, sizes: Sizes) -> _Work:
    operations = number(_operations(value), sizes)
    return _Work(operations, operations if value.prim == "dot" and value.dtype in LOW_FLOATS else 0)


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
