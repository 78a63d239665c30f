"""Bytes and operations of a launch, for Triton's own profiler: its hooks ask for it, and nothing else does.

    proton -n norms script.py; proton-viewer -m tbyte/s,tflop/s norms.hatchet

A kernel's grid, integers and constants decide what it touches: counts are kept by them, from its first launch on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy

from ...codegen import Kernel, Pointer, Scalar
from ..values.sizes import number

Metadata = Callable[[Any, Any, Mapping[str, Any]], dict[str, Any]]
KNOWN = 4096
"""Launches that are remembered."""

_known: OrderedDict[Any, tuple[Kernel, Mapping[sympy.Symbol, int]]] = OrderedDict()


def remember_launch(kernel: Kernel, integers: Sequence[int], grid: int, sizes: Mapping[sympy.Symbol, int]) -> None:
    """A launch with this grid and these integers is one at these sizes."""
    _known[kernel.source, (*integers, *kernel.constants.values()), grid] = (kernel, sizes)
    if len(_known) > KNOWN:
        _known.popitem(last=False)


def metadata_of(kernel: Kernel) -> Metadata:
    """`launch_metadata` of a kernel: (grid, compiled, arguments by name) -> name, bytes and operations of a launch."""
    names = [*(a.name for a in kernel.arguments if isinstance(a, Scalar)), *kernel.constants]

    def metadata(grid: Any, compiled: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
        launch = _known.get((kernel.source, tuple(arguments[name] for name in names), grid[0]))
        return {"name": kernel.name} if launch is None else {"name": kernel.name, **launch_cost(*launch)}

    return metadata


def launch_cost(kernel: Kernel, sizes: Mapping[sympy.Symbol, int]) -> dict[str, int]:
    """Bytes to and from memory, and operations: of all widths together, and by the width of the floats."""
    moved = sum(number(n, sizes) for n in (*kernel.reads.values(), *kernel.writes.values()))
    operations = number(kernel.operations, sizes)
    return {"bytes": moved, "flops": operations, f"flops{width_of(kernel)}": operations}


def width_of(kernel: Kernel) -> int:
    """Bits of the floats that it computes with: 32, but for doubles, and for products of halves in matrix units."""
    dtypes = {a.dtype for a in kernel.arguments if isinstance(a, Pointer)}
    if "f64" in dtypes:
        return 64
    return 16 if "tl.dot(" in kernel.source and dtypes & {"f16", "bf16"} else 32
