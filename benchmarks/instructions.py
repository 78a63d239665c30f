"""A model of each case on a GPU that is not there: warp instructions, occupancy, waves, bytes on their way, and a time.

No time in here is a GPU's: see `runtime/kernels/machine_code/model.py` for what the model is, and what it leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fusegrad import explain
from fusegrad.codegen.devices import DEVICES, Device
from fusegrad.runtime.kernels.machine_code.model import LaunchModel, model_of
from fusegrad.runtime.report.explanation import Explanation

from .plans import DIRECTIONS
from .suite import Case

DEVICE = "h100"


def model(case: Case, device: str = DEVICE, numerics: str = "eager") -> dict[str, Any]:
    """What the model says of a case's generated kernels, by direction: figures of all its launches, and of each.

    -> {"case", "device", "forward": {"per_32", "budget", "share", "microseconds", "copy", "over_copy", "kernels":
    {name: the fields of LaunchModel}} or None without a kernel, "backward"}. Times are the model's, in microseconds.
    Raises NoListingError where a kernel's machine code cannot be read.
    """
    on = DEVICES[device]
    found = explain(_compiled(case, numerics), *case.args, target=on.target)
    models = _models(found, on)
    directions = {d: direction_of({k.name: models[k.name] for k in _kernels(found, d)}) for d in DIRECTIONS}
    return {"case": case.name, "device": on.name, **directions}


def _compiled(case: Case, numerics: str) -> Any:
    from fusegrad import compile

    return case.function if numerics == "eager" else compile(case.function, numerics=numerics)


def _kernels(found: Explanation, direction: str) -> Sequence[Any]:
    return [k for k in found.kernels if k.direction == direction and k.kind == "triton"]


def _models(found: Explanation, device: Device) -> dict[str, LaunchModel]:
    if not found.kernel_records:
        return {}
    binaries = found.binaries(device.target)
    return {
        k.name: model_of(k, binaries[k.name][device.target], found.sizes, device) for k in found.kernel_records
    }  # fmt: skip


def direction_of(models: Mapping[str, LaunchModel]) -> dict[str, Any] | None:
    """Launches one after the other: times and instructions add up, for 32 elements of the largest tensor of all."""
    if not models:
        return None
    rows = models.values()
    elements = max(32 * m.instructions / m.per_32 for m in rows)
    instructions, budget = (sum(n) * 32 / elements for n in zip(*map(_issued, rows), strict=True))
    time, copy = sum(m.microseconds for m in rows), sum(m.copy for m in rows)
    return {
        "per_32": instructions, "budget": budget, "share": instructions / budget, "microseconds": time, "copy": copy,
        "over_copy": time / copy, "kernels": {name: m.to_dict() for name, m in models.items()},
    }  # fmt: skip


def _issued(model: LaunchModel) -> tuple[float, float]:
    """Warp instructions of the launch, and of its budget."""
    return model.instructions, model.instructions / model.share
