"""What the launches of a Function cost at least on a named GPU: bytes by bandwidth, operations by their rate."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import sympy

from ...ir import Graph, Value
from ...ir.passes.fuse import Extern, Group
from ...ir.prims import PRIMS
from ...ir.types import Size, product
from ..explain import DirectionReport, Explanation
from .devices import Device

Sizes = dict[sympy.Symbol, int]


@dataclass(frozen=True)
class Modelled:
    """One launch. microseconds: the longer of what its bytes and its operations take at the device's peaks."""

    name: str
    direction: str
    kind: str
    bytes: int
    operations: int
    microseconds: float
    bound: str

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def modelled(found: Explanation, device: Device, sizes: Sizes) -> list[Modelled]:
    """A row for each launch, forward first. The operations of a step with several kernels count for its first."""
    return [row for name, report in found.directions.items() for row in _direction(name, report, device, sizes)]


def _direction(name: str, report: DirectionReport, device: Device, sizes: Sizes) -> list[Modelled]:
    rows, launches, made = [], iter(report.launches), iter(report.kernels)
    for step in report.steps:
        count = len(next(made).kernels) if isinstance(step, Group) else int(isinstance(step, Extern))
        done = operations_of(step.graph if isinstance(step, Group) else [step.value], sizes)
        for first, launch in zip([True, *[False] * count], [next(launches) for _ in range(count)], strict=False):
            moved, work = launch.bytes_read + launch.bytes_written, done if first else 0
            times = {"bytes": moved / device.bandwidth * 1e6, "operations": work / device.flops * 1e6}
            bound = max(times, key=lambda k: times[k])
            rows.append(Modelled(launch.name, name, launch.kind, moved, work, times[bound], bound))
    return rows


def operations_of(values: Graph | list[Value], sizes: Sizes) -> int:
    """One for each element of an elementwise result, of a sum's operand, of a scan; two for each product's pair."""
    nodes = values.order() if isinstance(values, Graph) else values
    return sum(_number(_operations(v), sizes) for v in nodes)


def _operations(value: Value) -> Size:
    family = PRIMS[value.prim].family
    if family == "contract":
        sizes = dict(zip(value.params["x_axes"], value.args[0].shape, strict=True))
        sizes |= dict(zip(value.params["y_axes"], value.args[1].shape, strict=True))
        return 2 * product(sizes.values())
    if family in ("reduce", "scan"):
        return value.args[0].aval.numel
    return value.aval.numel if family == "elementwise" and value.prim != "cast" else 0


def _number(size: Size, sizes: Sizes) -> int:
    return size if isinstance(size, int) else int(size.xreplace(sizes))
