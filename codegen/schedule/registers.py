"""Registers of a thread, estimated before its kernel is compiled: what lives at a time, and what addresses take."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from ..program.axes import Axis
from .alignment import Slide
from .residency import Residency, phases_of
from .roles import AxisRoles
from .workload import Workload

ROOM = 192
"""Of a thread, by the estimate: a good way below the 255 that there are, so that the estimate may be wrong."""


def registers_of(
    w: Workload, roles: AxisRoles, residency: Residency, tile: Mapping[Axis, int], slide: Slide | None, warps: int
) -> int:
    """About so many: copies of a thread's elements that live at the same time, and what addresses take.

    A row that is reduced inside lives from its load to its store; what is reduced beside it, until its sum is there. Of
    what only streams by, a few values at a time do.
    """
    elements = math.prod(tile.values()) // (warps * w.target.warp)
    accumulators = sum(bool(r.args[0].axes & set(tile)) for r in roles.final)
    addresses = 64 if slide is not None else 32
    if residency.chunked:
        return addresses + 3 * elements
    if roles.row:
        return 24 + elements * (len(w.row_loads(roles.row)) + accumulators + _summed_together(w, roles, residency) + 1)
    return addresses + elements * (3 * accumulators + 3)


def _summed_together(w: Workload, roles: AxisRoles, residency: Residency) -> int:
    """The most reductions along a row that nothing but it lies between."""
    phase = phases_of(w, roles.inner, residency.online)
    together = Counter(phase[r.args[0]] for r in roles.inner)
    return max(together.values(), default=1)
