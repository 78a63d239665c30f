"""A model of a launch's time, from its machine code and the device's data sheet. Nothing is measured here.

The longer of what its bytes take at the device's bandwidth and what its instructions take to be issued, on whole and on
part-filled multiprocessors: programs come in waves, and what the last wave leaves idle is lost. With too few bytes on
their way at a time memory waits (Little's law). What it leaves out: the L2 cache, bank conflicts, dependent
instructions, the finish of the last program, atomic operations that meet, the launch itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ....codegen.devices import MULTIPROCESSORS, Device
from ....codegen.kernel import Kernel, Pointer, Scalar
from ...values.sizes import Sizes, number
from ..cross_compile.pool import Binary
from .counts import Counts, Launch, count, parameters, spread
from .pipes import RATES
from .sass import NoListingError

PORT = 64
"""Bytes per clock between a multiprocessor and the L2 cache."""


@dataclass(frozen=True)
class LaunchModel:
    """One launch on a named device. Times are a model's, in microseconds.

    instructions: warp instructions of the launch; per_32: for 32 elements of its largest tensor, or of the matrix that
    is never in memory, masked ones included; pipes: by pipe, for 32 elements. budget: for 32 elements, what is issued
    while the bytes move; share: instructions over the budget. resident: programs on a multiprocessor at a time;
    occupancy: its warps over the most there can be; waves: programs over those resident everywhere; idle: share of
    multiprocessors without a program. flight: bytes on their way at a time, per multiprocessor. copy: the time of a
    copy of as many bytes. bound: "bytes", "flight", "issue" or the pipe that is waited for. data_dependent: loops whose
    turns hang on data, which count as one turn.
    """

    instructions: float
    per_32: float
    pipes: dict[str, float]
    budget: float
    share: float
    programs: int
    warps: int
    resident: int
    occupancy: float
    waves: float
    idle: float
    flight: int
    bytes: int
    microseconds: float
    copy: float
    bound: str
    data_dependent: tuple[int, ...] = ()

    @property
    def over_copy(self) -> float:
        """The model's time over that of a copy of as many bytes."""
        return self.microseconds / self.copy if self.copy else math.inf

    def to_dict(self) -> dict[str, Any]:
        """The fields, and `over_copy`."""
        return {**asdict(self), "over_copy": self.over_copy}


def model_figures(kernel: Kernel, binary: Binary, sizes: Sizes, device: Device | None) -> dict[str, Any]:
    """{"model": the fields of a LaunchModel}, or None and "not_modelled": the reason."""
    if binary.error or device is None or "cubin" not in binary.asm:
        reason = f"not compiled: {binary.error}" if binary.error else "machine code of this kind is not read"
        return {"model": None, "not_modelled": reason}
    try:
        return {"model": model_of(kernel, binary, sizes, device).to_dict()}
    except NoListingError as error:
        return {"model": None, "not_modelled": str(error.facts["reason"])}


def model_of(kernel: Kernel, binary: Binary, sizes: Sizes, device: Device) -> LaunchModel:
    """The model of one generated kernel at these sizes. Raises NoListingError where its machine code is not read."""
    launch = launch_of(kernel, sizes, device.target)
    cubin = binary.asm.get("cubin", b"")
    assert isinstance(cubin, bytes)
    counts = count(cubin, launch, kernel.name)
    moved = sum(number(size, sizes) for size in (*kernel.reads.values(), *kernel.writes.values()))
    needs, turns = (binary.registers, binary.shared), kernel.num_stages
    copied = binary.shared * (turns - 1) // turns if kernel.has_descriptors else 0
    return model_launch(counts, launch, moved, elements_of(kernel, sizes), needs, device, copied)


def launch_of(kernel: Kernel, sizes: Sizes, target: str) -> Launch:
    """A generated kernel's launch at these sizes."""
    values = [number(a.value, sizes) if isinstance(a, Scalar) else None for a in kernel.arguments]
    programs = number(kernel.grid, sizes)
    followed = spread(programs) if kernel.walk is not None else ()
    passed, sharing = parameters([*values, None, None]), number(kernel.sharing, sizes)
    return Launch(target, (programs, 1, 1), kernel.num_warps, passed, followed, sharing)


def elements_of(kernel: Kernel, sizes: Sizes) -> int:
    """Elements of the largest tensor that it reads or writes, or of the matrix that it forms tile by tile."""
    if kernel.walk is not None:
        return number(kernel.walk.elements, sizes)
    width = {a.name: _bytes(a.dtype) for a in kernel.arguments if isinstance(a, Pointer)}
    moved = {**kernel.reads, **kernel.writes}
    return max((number(size, sizes) // width.get(name, 4) for name, size in moved.items()), default=1) or 1


def _bytes(dtype: str) -> int:
    digits = "".join(c for c in dtype.partition("e")[0] if c.isdigit())
    return max(1, int(digits or 8) // 8)


def model_launch(
    counts: Counts, launch: Launch, moved: int, elements: int, needs: tuple[int, int], device: Device, copied: int = 0
) -> LaunchModel:
    """needs: registers per lane and shared bytes per program. copied: bytes of a program that the tensor memory
    accelerator has on their way, for no lane: all of its tiles but those of the turn at hand."""
    processor, units = MULTIPROCESSORS[device.target], device.multiprocessors
    resident = max(1, processor.resident(*needs, launch.warps) or 1)
    occupancy = resident * launch.warps / (4 * processor.warps)
    flight = counts.flight * 32 * launch.warps + copied
    parts = {"bytes": moved / device.bandwidth, **_issue(counts.pipes, device)}
    at_once = max(1, min(resident, math.ceil(launch.programs / units)))
    time, bound = _waves(parts, launch.programs, resident, flight, device)
    per, budget = 32 / elements, device.budget * moved * 32 / elements
    return LaunchModel(
        instructions=counts.instructions, per_32=counts.instructions * per,
        pipes={pipe: n * per for pipe, n in counts.pipes.items()}, budget=budget,
        share=counts.instructions * per / budget if budget else math.inf, programs=launch.programs, warps=launch.warps,
        resident=resident, occupancy=occupancy, waves=launch.programs / (units * resident),
        idle=max(0.0, 1 - launch.programs / units), flight=flight * at_once, bytes=moved,
        microseconds=time * 1e6, copy=copy_seconds(moved, device) * 1e6, bound=bound,
        data_dependent=counts.data_dependent,
    )  # fmt: skip


def copy_seconds(moved: int, device: Device) -> float:
    """What a copy that moves so many bytes takes: few bytes are not enough to keep memory busy, whoever moves them."""
    fraction = min(1.0, moved / 2 / (device.needed_flight * device.multiprocessors))
    return moved / device.bandwidth / fraction if moved else 0.0


def _issue(pipes: Mapping[str, float], device: Device) -> dict[str, float]:
    """Seconds to issue all instructions, and those of each pipe."""
    rates = RATES[device.target]
    each = {pipe: n / rates[pipe] / device.issue_rate for pipe, n in pipes.items() if pipe in rates}
    return {"issue": sum(pipes.values()) / device.issue_rate, **each}


def _waves(parts: Mapping[str, float], programs: int, resident: int, flight: int, device: Device) -> tuple[float, str]:
    """Full waves, then what is left; and what the longer of them is bound by."""
    full, rest = divmod(programs, resident * device.multiprocessors)
    waves = [(full, resident * device.multiprocessors), (1, rest)]
    times = [(n * _wave(parts, size, size / programs, flight, device)[0], size) for n, size in waves if n and size]
    longest = max(times, default=(0.0, 0))
    bound = _wave(parts, longest[1], 1.0, flight, device)[1] if longest[1] else "bytes"
    return sum(time for time, _ in times), bound


def _wave(parts: Mapping[str, float], size: int, share: float, flight: int, device: Device) -> tuple[float, str]:
    """Seconds of `size` programs that run at the same time and do this share of the work."""
    units = device.multiprocessors
    busy, deepest = min(size, units), math.ceil(size / units)
    fraction = min(1.0, size * flight / (device.needed_flight * units), busy * PORT * device.clock / device.bandwidth)
    times = {name: time * share * units * deepest / size for name, time in parts.items() if name != "bytes"}
    times["bytes" if fraction == 1 else "flight"] = parts["bytes"] * share / max(fraction, 1e-9)
    bound = max(times, key=lambda name: times[name])
    return times[bound], bound
