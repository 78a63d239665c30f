"""The GPUs that a profile can model, by name: those of the table of devices that kernels are generated for."""

from __future__ import annotations

from ...codegen.devices import DEVICES as DEVICES
from ...codegen.devices import Device, device_of
from ...ir.errors import FusegradError
from ..settings.suggestions import meant


class UnknownDeviceError(FusegradError, ValueError):
    """A device that has no row in the table."""

    message = "profile(device={device!r}): there is no such device\n  at:   {where}\n  fix:  {hint}one of {known}"


def device_named(name: str) -> Device:
    """The row of the table, by the device's name or by a target's ("cuda:90"). Raises UnknownDeviceError."""
    if (device := device_of(name)) is None:
        raise UnknownDeviceError(device=name, known=", ".join(DEVICES), hint=meant(name, DEVICES))
    return device
