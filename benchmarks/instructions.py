"""A model of each case on a GPU that is not there: warp instructions, occupancy, waves, bytes on their way, and a time.

No time in here is a GPU's: see `runtime/kernels/machine_code/model.py` for what the model is, and what it leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import fusegrad
from fusegrad import explain
from fusegrad.codegen.devices import DEVICES, Device
from fusegrad.runtime.kernels.machine_code.model import LaunchModel, model_of
from fusegrad.runtime.kernels.machine_code.sass import NoListingError
from fusegrad.runtime.report.explanation import Explanation

from .plans import DIRECTIONS
from .suite import Case

DEVICE = "h100"
OF_LONGEST = ("programs", "resident", "occupancy", "waves", "idle", "flight", "bound")
"""Figures of a direction that are those of its longest launch."""


def instructions(case: Case) -> dict[str, Any]:
    """A row of the results: forward and backward in short, and the instructions with numerics="fast"."""
    found, fast = model(case), model(case, numerics="fast")
    ours = {d: None if found[d] is None else _in_short(found[d]) for d in DIRECTIONS}
    issued = {d: None if fast[d] is None else round(fast[d]["per_32"], 2) for d in DIRECTIONS}
    return {"case": case.name, "device": found["device"], **ours, "fast": issued, "not_modelled": found["not_modelled"]}


def _in_short(direction: Mapping[str, Any]) -> dict[str, Any]:
    longest = max(direction["kernels"].values(), key=lambda kernel: kernel["microseconds"])
    cut_short = any(kernel["data_dependent"] for kernel in direction["kernels"].values())
    figures = {n: direction[n] for n in ("per_32", "elements", "budget", "share", "microseconds", "copy", "over_copy")}
    figures |= {n: longest[n] for n in OF_LONGEST} | {"data_dependent": cut_short}
    pipes = {pipe: round(n, 2) for pipe, n in longest["pipes"].items()}
    return {n: round(v, 4) if isinstance(v, float) else v for n, v in figures.items()} | {"pipes": pipes}


def model(case: Case, device: str = DEVICE, numerics: str = "eager") -> dict[str, Any]:
    """What the model says of a case's generated kernels, by direction: figures of all its launches, and of each.

    -> {"case", "device", "forward": {"per_32", "elements", "budget", "share", "microseconds", "copy", "over_copy",
    "kernels": {name: the fields of LaunchModel}}, or None without a kernel, "backward", "not_modelled": {direction: why
    its machine code is not read}}. Times are the model's, in microseconds.
    """
    on = DEVICES[device]
    found = explain(_compiled(case, numerics), *case.args, target=on.target)
    result: dict[str, Any] = {"case": case.name, "device": on.name, "not_modelled": {}}
    for direction in DIRECTIONS:
        try:
            result[direction] = direction_of(_models(found, direction, on))
        except NoListingError as error:
            result[direction], result["not_modelled"][direction] = None, str(error.facts["reason"])
    return result


def _compiled(case: Case, numerics: str) -> Any:
    return case.function if numerics == "eager" else fusegrad.compile(case.function, numerics=numerics)


def _models(found: Explanation, direction: str, device: Device) -> dict[str, LaunchModel]:
    names = {k.name for k in found.kernels if k.direction == direction and k.kind == "triton"}
    kernels = [k for k in found.kernel_records if k.name in names]
    if not kernels:
        return {}
    binaries = found.binaries(device.target)
    return {k.name: model_of(k, binaries[k.name][device.target], found.sizes, device) for k in kernels}


def direction_of(models: Mapping[str, LaunchModel]) -> dict[str, Any] | None:
    """Launches one after the other: times and instructions add up, for 32 elements of the largest tensor of all."""
    if not models:
        return None
    rows = models.values()
    elements = max(32 * m.instructions / m.per_32 for m in rows)
    instructions, budget = (sum(n) * 32 / elements for n in zip(*map(_issued, rows), strict=True))
    time, copy = sum(m.microseconds for m in rows), sum(m.copy for m in rows)
    return {
        "elements": round(elements),
        "per_32": instructions, "budget": budget, "share": instructions / budget, "microseconds": time, "copy": copy,
        "over_copy": time / copy, "kernels": {name: m.to_dict() for name, m in models.items()},
    }  # fmt: skip


def _issued(model: LaunchModel) -> tuple[float, float]:
    """Warp instructions of the launch, and of its budget."""
    return model.instructions, model.instructions / model.share
