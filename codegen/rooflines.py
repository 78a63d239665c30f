"""The best that devices can do, from the table of devices: dense products, without TF32 for float32."""

from __future__ import annotations

from ..ir.passes.products import Machine
from .devices import DEVICES, Device, device_of
from .kernel import Target


def _machine(device: Device) -> Machine:
    return Machine(device.bandwidth, {"f16": device.products, "bf16": device.products, "f32": device.flops})


MACHINES = {d.target: _machine(d) for d in DEVICES.values() if d is device_of(d.target)}


def machine_of(target: Target) -> Machine:
    """The device, or the newest one that is not newer; the interpreter is taken for a GPU, so that it runs the same."""
    if str(target) in MACHINES:
        return MACHINES[str(target)]
    if target.kind == "hip":
        return MACHINES["hip:gfx942"]
    arch = int(target.arch) if target.arch.isdigit() else 90
    older = [n for n in MACHINES if n.startswith("cuda:") and int(n.removeprefix("cuda:")) <= arch]
    return MACHINES[older[-1] if older else "cuda:80"]
