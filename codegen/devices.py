"""GPUs as data: what their vendors say of memory, arithmetic and multiprocessors. Peaks are dense, without sparsity.

`clock` and `latency` are what a kernel is taken to find under load; data sheets give neither. A first measurement on a
device is what corrects them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .kernel import TARGETS

SCHEDULERS, UNIT = 4, 8


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

    def resident(self, registers: int, shared: int, warps: int) -> int | None:
        """Programs of so many warps that are on it at a time; None where nothing is known of them."""
        if registers < 0 or warps < 1:
            return None
        by_registers = SCHEDULERS * min(self.warps, self.registers // max(-(-registers // UNIT) * UNIT, UNIT)) // warps
        by_shared = self.shared // (shared + self.reserved) if shared + self.reserved else self.programs
        return min(by_registers, by_shared, self.programs)

    def occupancy(self, registers: int, shared: int, warps: int) -> float | None:
        """Resident warps over the most there can be; None where nothing is known."""
        programs = self.resident(registers, shared, warps)
        return None if programs is None else programs * warps / (SCHEDULERS * self.warps)


MULTIPROCESSORS = {
    "cuda:75": Multiprocessor(8, 512, 64 << 10, 0, programs=16),
    "cuda:80": Multiprocessor(16, 512, 164 << 10, 1 << 10),
    "cuda:86": Multiprocessor(12, 512, 100 << 10, 1 << 10, programs=16),
    "cuda:89": Multiprocessor(12, 512, 100 << 10, 1 << 10, programs=24),
    "cuda:90": Multiprocessor(16, 512, 228 << 10, 1 << 10),
    "cuda:100": Multiprocessor(16, 512, 228 << 10, 1 << 10),
    "hip:gfx942": Multiprocessor(8, 512, 64 << 10, 0),
}
"""CUDA C++ Programming Guide, technical specifications per compute capability; AMD CDNA 3 instruction set, 2023."""


@dataclass(frozen=True)
class Device:
    """A GPU by its peaks, as its vendor states them."""

    name: str
    """As NVIDIA or AMD call it."""
    target: str
    """What kernels are generated for: "cuda:90", "hip:gfx942"."""
    bandwidth: float
    """Bytes per second to its memory."""
    flops: float
    """float32 operations per second, outside matrix units."""
    products: float
    """Operations per second of 16-bit matmuls, in matrix units."""
    clock: float
    """Hertz."""
    source: str
    """The document that has these figures."""
    latency: float = 0.7e-6
    """Seconds from a load to its bytes, under load."""
    units: int = 0
    """Multiprocessors; 0: those of the target's entry."""
    l2: int = 0
    """Bytes of L2; 0: those of the target's entry."""

    @property
    def multiprocessors(self) -> int:
        """The number of its multiprocessors."""
        return self.units or TARGETS[self.target].units

    @property
    def issue_rate(self) -> float:
        """Warp instructions per second: one per scheduler and clock."""
        return self.multiprocessors * SCHEDULERS * self.clock

    @property
    def budget(self) -> float:
        """Warp instructions issued while memory moves a byte: with more of them, issue is what is waited for."""
        return self.issue_rate / self.bandwidth

    @property
    def needed_flight(self) -> float:
        """Bytes that have to be on their way at a time for memory never to wait, per multiprocessor (Little's law)."""
        return self.latency * self.bandwidth / self.multiprocessors


DEVICES = {
    "a100": Device("NVIDIA A100 80GB SXM", "cuda:80", 2.039e12, 19.5e12, 312e12, 1.41e9,
                   "NVIDIA A100 data sheet, 2022"),
    "4090": Device("NVIDIA RTX 4090", "cuda:89", 1.008e12, 82.6e12, 165e12, 2.52e9, "NVIDIA Ada whitepaper, 2023"),
    "3090": Device("NVIDIA RTX 3090", "cuda:86", 0.936e12, 35.6e12, 71e12, 1.7e9,
                   "NVIDIA Ampere GA102 whitepaper, 2021"),
    "l4": Device("NVIDIA L4", "cuda:89", 0.3e12, 30.3e12, 121e12, 2.04e9, "NVIDIA L4 data sheet, 2023",
                 units=58, l2=48 << 20),
    "a10": Device("NVIDIA A10", "cuda:86", 0.6e12, 31.2e12, 125e12, 1.7e9, "NVIDIA A10 data sheet, 2021", units=72),
    "t4": Device("NVIDIA T4", "cuda:75", 0.32e12, 8.1e12, 65e12, 1.59e9, "NVIDIA T4 data sheet, 2019"),
    "h100": Device("NVIDIA H100 SXM", "cuda:90", 3.35e12, 67e12, 989e12, 1.75e9, "NVIDIA H100 data sheet, 2023"),
    "h200": Device("NVIDIA H200 SXM", "cuda:90", 4.8e12, 67e12, 989e12, 1.75e9, "NVIDIA H200 data sheet, 2024"),
    "b200": Device("NVIDIA B200 SXM", "cuda:100", 8.0e12, 80e12, 2250e12, 1.85e9, "NVIDIA Blackwell data sheet, 2024"),
    "mi300x": Device("AMD Instinct MI300X", "hip:gfx942", 5.3e12, 163.4e12, 1307e12, 2.1e9,
                     "AMD MI300X data sheet, 2023"),
}  # fmt: skip


def device_of(name: str) -> Device | None:
    """A device by its name ("4090", "RTX 4090", "h100"), or the first of the table that runs code for a target."""
    bare = re.sub(r"[\s_-]|nvidia|geforce|rtx|amd|instinct|sxm", "", name.lower())
    return DEVICES.get(bare) or next((device for device in DEVICES.values() if device.target == name), None)
