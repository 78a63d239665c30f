"""The static model beside what was measured: where they part, one of the two is to be corrected.

The model's seam: `microseconds(case, device)`. Today it is the least time by the data sheet's bandwidth and operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..gpu_report import COPY
from ..peers import OURS
from ..plans import DIRECTIONS
from ..suite import CASES

Row = Mapping[str, Any]
UNEXPLAINED = 1.15
"""Times over what the model says, at the bandwidth that a copy reaches, from which on a case is listed."""


def model_device(name: str) -> str | None:
    """The row of the model's table for a device's name: "NVIDIA H100 80GB HBM3" -> "h100"; None without one."""
    from fusegrad.runtime.profile.devices import DEVICES

    return next((key for key in DEVICES if key in name.lower()), None)


def microseconds(case: str, device: str) -> dict[str, float]:
    """{direction: what the model says that the case's launches take}; {} where it has none."""
    import fusegrad
    from fusegrad.runtime.profile.devices import device_named
    from fusegrad.runtime.profile.roofline import model_launches

    found = next((c for c in CASES if c.name == case), None)
    if found is None:
        return {}
    on = device_named(device)
    explanation = fusegrad.explain(found.function, *found.args, target=on.target)
    rows = model_launches(explanation, on, explanation.sizes)
    return {d: sum(row.microseconds for row in rows if row.direction == d) for d in DIRECTIONS}


@dataclass(frozen=True)
class Beside:
    """One direction of one case. Milliseconds, measured and by the model; `copy`: bytes per second of a plain copy."""

    case: str
    direction: str
    measured: float
    model: float
    copy: float | None

    def unexplained(self, bandwidth: float) -> float:
        """Measured over the model's, where the model gets the bandwidth that the copy of these bytes reached."""
        reached = 1.0 if self.copy is None else self.copy / bandwidth
        return self.measured / (self.model / reached)


def beside(rows: Sequence[Row], device: str) -> Iterator[Beside]:
    """Every direction that was timed."""
    for row in rows:
        says = microseconds(row["case"], device)
        for direction, least in zip(DIRECTIONS, row["minimal"], strict=True):
            times = row["times"].get(direction, {})
            if OURS in times and says.get(direction):
                copy = times.get(COPY, {}).get("device", {}).get("median")
                reached = least / (copy * 1e-3) if copy else None
                measured = times[OURS]["device"]["median"]
                yield Beside(row["case"], direction, measured, says[direction] * 1e-3, reached)


def corrections(found: Sequence[Beside], bandwidth: float) -> list[str]:
    """What the model would have to be told, in sentences."""
    if not found:
        return []
    large = [b.copy for b in found if b.copy and b.measured > 0.05]
    lines = []
    if large:
        share = median(large) / bandwidth
        lines.append(f"A copy reaches {median(large) / 1e12:.2f} TB/s, {share:.2f} of the data sheet's.")
    ratios = [b.unexplained(bandwidth) for b in found]
    lines.append(f"At the copy's bandwidth the median case takes {median(ratios):.2f} x what the model says.")
    off = sorted((b for b in found if b.unexplained(bandwidth) > UNEXPLAINED), key=lambda b: -b.unexplained(bandwidth))
    lines += [f"{b.case} {b.direction}: {b.unexplained(bandwidth):.2f} x; the model does not know why." for b in off]
    early = [b for b in found if b.unexplained(bandwidth) < 1 / UNEXPLAINED]
    lines += [f"{b.case} {b.direction}: {b.unexplained(bandwidth):.2f} x, faster than the model: it counts too much, "
              "or a cache holds it." for b in early]  # fmt: skip
    return lines
