"""The static model beside what was measured: where they part, one of the two is to be corrected.

`says` is the seam to the model. What it says is kept in the record, by case and commit: the model compiles kernels, for
which no minute of a lent GPU is spent (`--page` asks it, on any machine).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..gpu_report import COPY
from ..peers import OURS
from ..plans import DIRECTIONS, plan
from ..suite import CASES, Case

Row = Mapping[str, Any]
UNEXPLAINED = 1.15
"""Times over what the model says, at the bandwidth that a copy reaches, from which on a case is listed."""
LARGE = 64 << 20
"""Bytes from which on a copy's time is the memory's."""


def model_device(name: str) -> str | None:
    """The row of the model's table for a device's name: "NVIDIA H100 80GB HBM3" -> "h100"; None without one."""
    from fusegrad.runtime.profile.devices import DEVICES

    return next((key for key in DEVICES if re.search(rf"{key}(?!\d)", name.lower())), None)  # an L40 is no L4


def says(case: str, device: str) -> dict[str, Any]:
    """{direction: {"ms": of its launches, "bound": what the longest waits for}}; {} where it knows not all of them."""
    found = next(c for c in CASES if c.name == case)
    if any(plan(found)["library"]):
        return {}
    try:
        from ..instructions import model
    except ImportError:  # the model of machine code is not there: bytes and operations alone
        return _by_data_sheet(found, device)
    said = model(found, device)
    return {d: _direction(said[d]["microseconds"], said[d]["kernels"].values()) for d in DIRECTIONS if said[d]}


def _direction(microseconds: float, kernels: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    longest = max(kernels, key=lambda kernel: kernel["microseconds"])
    return {"ms": microseconds * 1e-3, "bound": longest["bound"]}


def _by_data_sheet(case: Case, device: str) -> dict[str, Any]:
    import fusegrad
    from fusegrad.runtime.profile.devices import device_named
    from fusegrad.runtime.report.roofline import model_launches

    on = device_named(device)
    explanation = fusegrad.explain(case.function, *case.args, target=on.target)
    rows = [vars(row) for row in model_launches(explanation, on, explanation.sizes)]
    each = {d: [row for row in rows if row["direction"] == d] for d in DIRECTIONS}
    return {d: _direction(sum(row["microseconds"] for row in of), of) for d, of in each.items() if of}


def asked(known: Mapping[str, Any], rows: Sequence[Row], device: str, commit: str) -> dict[str, Any]:
    """{case: what the model of this commit says}, for every case that was timed."""
    fresh = {case: said for case, said in known.items() if said["commit"] == commit}
    for case in {row["case"] for row in rows} - set(fresh):
        fresh[case] = {"commit": commit, "says": says(case, device)}
    return fresh


# ------------------------------------------------------------------ what differs
@dataclass(frozen=True)
class Beside:
    """One direction of one case. Milliseconds, measured and by the model; `copy`: bytes per second of a plain copy."""

    case: str
    direction: str
    measured: float
    model: float
    bound: str
    bytes: int
    copy: float | None

    def unexplained(self, bandwidth: float) -> float:
        """Measured over the model's, where the model gets the bandwidth that the copy of these bytes reached."""
        reached = 1.0 if self.copy is None else self.copy / bandwidth
        return self.measured / (self.model / reached if self.bound == "bytes" else self.model)


def beside(rows: Sequence[Row], known: Mapping[str, Any]) -> Iterator[Beside]:
    """Every direction that was timed and that the model knows."""
    for row in rows:
        said = known.get(row["case"], {}).get("says", {})
        for direction, least in zip(DIRECTIONS, row["minimal"], strict=True):
            times = row["times"].get(direction, {})
            if OURS in times and said.get(direction):
                copy = times.get(COPY, {}).get("device", {}).get("median")
                yield Beside(
                    row["case"], direction, times[OURS]["device"]["median"], said[direction]["ms"],
                    said[direction]["bound"], least, least / (copy * 1e-3) if copy else None,
                )  # fmt: skip


def corrections(found: Sequence[Beside], bandwidth: float) -> list[str]:
    """What the model would have to be told, in sentences: first its constants, then the cases that these leave."""
    if not found:
        return []
    lines = []
    if large := [b.copy for b in found if b.copy and b.bytes >= LARGE]:
        reached = median(large)
        lines.append(f"A copy of 64 MB or more reaches {reached / 1e12:.2f} TB/s, {reached / bandwidth:.2f} of the "
                     "data sheet's.")  # fmt: skip
    bounds: dict[str, list[float]] = defaultdict(list)
    for each in found:
        bounds[each.bound].append(each.unexplained(bandwidth))
    lines += [f"Bound by {bound}: the median of {len(ratios)} takes {median(ratios):.2f} x what the model says."
              for bound, ratios in sorted(bounds.items())]  # fmt: skip
    off = sorted(found, key=lambda b: -b.unexplained(bandwidth))
    lines += [f"{b.case} {b.direction}: {b.unexplained(bandwidth):.2f} x (bound by {b.bound}): the model misses why."
              for b in off if b.unexplained(bandwidth) > UNEXPLAINED]  # fmt: skip
    lines += [f"{b.case} {b.direction}: {b.unexplained(bandwidth):.2f} x (bound by {b.bound}): it counts too much, "
              "or a cache holds it." for b in off if b.unexplained(bandwidth) < 1 / UNEXPLAINED]  # fmt: skip
    return lines
