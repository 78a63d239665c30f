"""Peaks of named GPUs, for modelled times: those of the vendors' data sheets, dense, without sparsity."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.errors import FusegradError


class UnknownDeviceError(FusegradError, ValueError):
    """A device that has no row in the table."""

    message = "profile(device={device!r}): there is no such device\n  at:   {where}\n  fix:  one of {known}"


@dataclass(frozen=True)
class Multiprocessor:
    """The warps that one multiprocessor (or compute unit) holds at a time, by its four schedulers.

    warps: at most per scheduler. registers: per scheduler and lane, handed out by eights. shared: bytes, of which each
    program takes `reserved` more than it asks for.
    """

    warps: int
    registers: int
    shared: int
    reserved: int
    programs: int = 32

    def occupancy(self, registers: int, shared: int, warps: int) -> float | None:
        """Resident warps over the most there can be, for programs of so many warps; None where nothing is known."""
        if registers < 0 or warps < 1:
            return None
        by_registers = SCHEDULERS * min(self.warps, self.registers // max(-(-registers // UNIT) * UNIT, UNIT)) // warps
        by_shared = self.shared // (shared + self.reserved) if shared + self.reserved else self.programs
        return min(by_registers, by_shared, self.programs) * warps / (SCHEDULERS * self.warps)


SCHEDULERS, UNIT = 4, 8
MULTIPROCESSORS = {
    "cuda:80": Multiprocessor(16, 512, 164 << 10, 1 << 10),
    "cuda:90": Multiprocessor(16, 512, 228 << 10, 1 << 10),
    "cuda:100": Multiprocessor(16, 512, 228 << 10, 1 << 10),
    "hip:gfx942": Multiprocessor(8, 512, 64 << 10, 0),
}
"""CUDA C++ Programming Guide, technical specifications per compute capability; AMD CDNA 3 instruction set, 2023."""


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
