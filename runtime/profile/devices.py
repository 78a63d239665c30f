"""The GPUs that a profile can model, by name: those of the table of devices that kernels are generated for."""

from __future__ import annotations

from ...codegen.devices import DEVICES as ALL
from ...codegen.devices import Device
from ...codegen.kernel import TARGETS
from ...ir.errors import FusegradError

DEVICES = {name: device for name, device in ALL.items() if device.target in TARGETS}


class UnknownDeviceError(FusegradError, ValueError):
    """A device that has no row in the table."""

    message = "profile(device={device!r}): there is no such device\n  at:   {where}\n  fix:  one of {known}"


def device_named(name: str) -> Device:
    """The row of the table. Raises UnknownDeviceError."""
    if name not in DEVICES:
        raise UnknownDeviceError(device=name, known=", ".join(DEVICES))
    return DEVICES[name]
