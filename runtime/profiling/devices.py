"""What named GPUs can do at most, for modelled times. Peaks of the vendors' data sheets, dense, without sparsity."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.errors import FusegradError


class UnknownDeviceError(FusegradError, ValueError):
    """A device that has no row in the table."""

    message = "profile(device={device!r}): there is no such device\n  at:   {where}\n  fix:  one of {known}"


@dataclass(frozen=True)
class Device:
    """bandwidth: bytes per second to its memory. flops: float32 operations per second outside matrix units."""

    name: str
    target: str
    bandwidth: float
    flops: float
    source: str


DEVICES = {
    "a100": Device("NVIDIA A100 80GB SXM", "cuda:80", 2.039e12, 19.5e12, "NVIDIA A100 data sheet, 2022"),
    "h100": Device("NVIDIA H100 SXM", "cuda:90", 3.35e12, 67e12, "NVIDIA H100 data sheet, 2023"),
    "h200": Device("NVIDIA H200 SXM", "cuda:90", 4.8e12, 67e12, "NVIDIA H200 data sheet, 2024"),
    "mi300x": Device("AMD Instinct MI300X", "hip:gfx942", 5.3e12, 163.4e12, "AMD MI300X data sheet, 2023"),
}


def device_named(name: str) -> Device:
    """The row of the table. Raises UnknownDeviceError."""
    if name not in DEVICES:
        raise UnknownDeviceError(device=name, known=", ".join(DEVICES))
    return DEVICES[name]
