"""A profile for people: text, a page with two pictures; and for programs: JSON, and the trace of what ran."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from ...codegen.devices import Device
from ...ir.errors import FusegradError
from ..cache.entry_files import versions
from ..report.page.charts import bars, roofline
from ..report.page.html import contents, note, page, picture, section, table
from ..report.roofline import Modelled, ModelledSum
from ..report.terminal import Block, Table, plain
from .measure import Times

SHOWN = 12  # operations of a direction


class ProfileArgumentError(FusegradError, ValueError):
    """A baseline or a path that profile does not know."""

    message = "profile({function}): {detail}\n  at:   {where}\n  fix:  {fix}"


@dataclass(frozen=True)
class Measured:
    """One direction of one candidate on the machine at hand."""

    candidate: str
    """Either "fusegrad", "eager" or "torch.compile"."""
    direction: str
    """Either "forward" or "backward"."""
    times: Times | None
    """Per call; None where it could not be timed."""
    error: str = ""
    """Why it could not be timed; "" where it was."""


@dataclass(frozen=True)
class Achieved:
    """One launch of a generated kernel as it was measured."""

    name: str
    """The kernel's name."""
    direction: str
    """Either "forward" or "backward"."""
    microseconds: float
    """Measured, per launch."""
    bytes_per_second: float
    """Bytes that it moves, over that time."""
    operations_per_second: float
    """Operations that it does, over that time."""
    of_copy: float | None
    """Its bytes per second over those of a plain copy on this device; None where no copy was timed."""
    modelled: float | None = None
    """Microseconds by a model of its machine code; None where it was not compiled."""


@dataclass
class Profile:
    """The result of `profile`. Prints as tables; `to_dict()`; `write(path)` as .json, .html, or a Chrome trace."""

    name: str
    """The class's name."""
    backend: str
    """What the timed calls ran on."""
    machine: str
    """The device that was timed, by name."""
    arguments: str
    """Of the timed calls, as specifications."""
    measured: list[Measured]
    """Times of each candidate in each direction."""
    saved: dict[str, int]
    """Bytes of saved tensors by candidate, inputs among them, each piece of memory once."""
    operations: dict[str, list[dict[str, Any]]]
    """What the profiler of torch saw of fusegrad's calls, by direction: a dict with "name", "calls" and "microseconds"
    for each operation."""
    modelled: list[Modelled]
    """The least time of each launch on the named device: a model, nothing measured."""
    device: Device
    """The device of the model."""
    binaries: dict[str, dict[str, Any]]
    """Figures of each kernel's machine code, as `Explanation.metrics` gives them; empty without `metrics=True`."""
    copy_bandwidth: float | None = None
    """Bytes per second of a plain copy on the machine that was timed; None on a CPU."""
    sums: list[ModelledSum] = field(default_factory=list)
    """The modelled launches in sum, beside those of eager, and of Inductor where torch.compile is a baseline."""
    not_counted: str = ""
    """Why there are no counts of Inductor's, where they were asked for; "" else."""
    peaks: dict[str, dict[str, int]] = field(default_factory=dict)
    """The most bytes that a call holds at a time, its results among them, by candidate and direction."""
    versions: dict[str, str] = field(default_factory=versions)
    """Of torch, triton, fusegrad and Python."""
    traces: dict[str, Any] = field(default_factory=dict, repr=False)
    """Of torch's profiler, by direction: what `write` puts into a Chrome trace."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values that json can write: times in microseconds, memory in bytes, bandwidth in bytes per second."""
        rows = [
            {"candidate": m.candidate, "direction": m.direction, "error": m.error}
            | (asdict(m.times) if m.times else {})
            for m in self.measured
        ]
        model = {"device": asdict(self.device), "launches": [asdict(m) for m in self.modelled]}
        model |= {"sums": [asdict(m) for m in self.sums], "not_counted": self.not_counted}
        return {
            "schema": 1, "function": self.name, "backend": self.backend, "machine": self.machine,
            "arguments": self.arguments, "versions": self.versions,
            "measured": {
                "times": rows, "saved_bytes": self.saved, "operations": self.operations,
                "copy_bandwidth": self.copy_bandwidth, "peak_bytes": self.peaks,
                "launches": [asdict(a) for a in self.achieved()],
            },
            "modelled": model, "binaries": self.binaries,
        }  # fmt: skip

    def achieved(self) -> Iterator[Achieved]:
        """The launches of generated kernels among what ran, with what they reached.

        Yields:
            One for each launch; none where other operations ran, as on a CPU.
        """
        launches = {(m.direction, m.name): m for m in self.modelled}
        for direction, rows in self.operations.items():
            for row in rows:
                if (m := launches.get((direction, row["name"]))) is not None:
                    time = row["microseconds"] / row["calls"]
                    moved, operations = m.bytes / time * 1e6, m.operations / time * 1e6
                    share = moved / self.copy_bandwidth if self.copy_bandwidth else None
                    yield Achieved(m.name, direction, time, moved, operations, share, self._modelled(m.name))

    def _modelled(self, name: str) -> float | None:
        model = self.binaries.get(name, {}).get("model")
        return model["microseconds"] if model else None

    def __str__(self) -> str:
        return "\n\n".join(map(plain, blocks(self)))

    __repr__ = __str__

    def write(self, path: str | Path) -> None:
        """Write the profile to a file, in the format that its name ends in.

        Args:
            path: `.json`, `.html` (one page without requests), or `.trace.json`: what ran, for Perfetto or
                chrome://tracing.

        Raises:
            ProfileArgumentError: for another name.
        """
        path = Path(path)
        if path.name.endswith(".trace.json"):
            _write_trace(self, path)
        elif path.suffix == ".json":
            path.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        elif path.suffix == ".html":
            path.write_text(as_html(self), encoding="utf-8")
        else:
            raise ProfileArgumentError(
                function=self.name, detail=f"it cannot be written as {path.name}",
                fix="end it in .json, .html or .trace.json.",
            )  # fmt: skip


def _write_trace(profile: Profile, path: Path) -> None:
    """Both directions as one trace in Chrome's format, which Perfetto reads: backward after forward."""
    events: list[dict[str, Any]] = []
    for direction, profiler in profile.traces.items():
        profiler.export_chrome_trace(str(path))
        part = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        events += [{**event, "cat": f"{direction},{event.get('cat', '')}"} for event in part]
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


# ------------------------------------------------------------------ text
NOISY = 2.0
"""The spread above which a median says little."""
TIMES = ("", "direction", "median", "p10", "p90", "calls")
MEMORY = ("memory, bytes", "saved tensors", "at most in forward", "in backward")
LAUNCHES = ("launch", "direction", "us", "GB/s", "GFLOP/s", "% of a copy", "model us")
OPERATIONS = ("operation", "calls", "us")
MODEL = ("launch", "direction", "bytes", "operations", "in tensor cores", "exponentials", "us", "bound by")
SUMS = ("in sum", "direction", "launches", "bytes", "us")
BINARIES = ("kernel", "warps", "registers", "spills", "shared", "occupancy", "accesses")
ISSUED = (
    "kernel",
    "warp instructions per 32",
    "budget",
    "programs",
    "waves",
    "kB in flight",
    "us",
    "of a copy",
    "bound by",
)


def blocks(profile: Profile) -> list[Block]:
    """The tables: what was measured, then what is modelled, then what was compiled."""
    # Measured figures first and modelled ones after them, each under a title that says which they are.
    device, measured = profile.device, f"measured on {profile.machine}, backend {profile.backend}"
    if profile.copy_bandwidth:
        measured += f"; a copy moves {profile.copy_bandwidth / 1e9:,.0f} GB/s"
    model = f"model of {device.name} ({device.bandwidth / 1e12:g} TB/s): the least time, not a measured one"
    parts = [
        Table(measured, TIMES, _times(profile)),
        Table("", MEMORY, _memory(profile)),
        Table("our launches, as measured", LAUNCHES, _launch_rows(profile)),
        *(Table(f"{direction}, operations by their own time (measured)", OPERATIONS, _operations(rows))
          for direction, rows in profile.operations.items()),
        Table(model, MODEL, _model_rows(profile.modelled)),
        Table("", SUMS, _sum_rows(profile.sums)),
        Table(f"compiled for {device.target}", BINARIES, _binaries(profile)),
        Table(f"model of {device.name} by machine instructions, not measured", ISSUED, _issued(profile)),
    ]  # fmt: skip
    head = f"{profile.name}({profile.arguments})"
    return [head, *(part for part in parts if part.rows), *_uncounted(profile), *noise(profile)]


def _uncounted(profile: Profile) -> list[str]:
    return [f"torch.compile: Inductor's launches are not counted: {profile.not_counted}"] if profile.not_counted else []


def noise(profile: Profile) -> list[str]:
    """A warning where times spread: the machine did something else meanwhile, and medians say little."""
    timed = [(m, m.times) for m in profile.measured if m.times is not None and m.times.spread > NOISY]
    if not timed:
        return []
    worst, times = max(timed, key=lambda pair: pair[1].spread)
    where = f"{worst.candidate} {worst.direction}, {duration(times.p10)} to {duration(times.p90)}"
    spread = f"{len(timed)} of {len(profile.measured)} times spread more than {NOISY:g}-fold from p10 to p90"
    return [f"noisy: {spread} ({where}); what differs less says nothing. A machine without other work helps."]


def duration(microseconds: float) -> str:
    """ "802 us", "64.0 ms", "1.20 s": three digits."""
    scales = ((1e6, "s"), (1e3, "ms"), (1.0, "us"))
    scale, unit = next(((s, u) for s, u in scales if microseconds >= s), scales[-1])
    value = microseconds / scale
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def _memory(profile: Profile) -> list[list[str]]:
    names = dict.fromkeys([*profile.saved, *profile.peaks])
    return [[name, *map(_with_commas, (profile.saved.get(name), *_peaks(profile, name)))] for name in names]


def _peaks(profile: Profile, name: str) -> tuple[int | None, int | None]:
    peaks = profile.peaks.get(name, {})
    return peaks.get("forward"), peaks.get("backward")


def _with_commas(count: int | None) -> str:
    return "" if count is None else f"{count:,}"


def _launch_rows(profile: Profile) -> list[list[str]]:
    return [
        [a.name, a.direction, f"{a.microseconds:,.1f}", f"{a.bytes_per_second / 1e9:,.0f}",
         f"{a.operations_per_second / 1e9:,.0f}", "" if a.of_copy is None else f"{100 * a.of_copy:.0f}",
         "" if a.modelled is None else f"{a.modelled:,.1f}"]
        for a in profile.achieved()
    ]  # fmt: skip


def _times(profile: Profile) -> list[list[str]]:
    return [[m.candidate, m.direction, *(_figures(m.times) if m.times else [m.error])] for m in profile.measured]


def _figures(times: Times) -> list[str]:
    return [*map(duration, (times.median, times.p10, times.p90)), str(times.calls)]


def _operations(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    listed = [[r["name"], f"{r['calls']:g}", f"{r['microseconds']:,.1f}"] for r in rows[:SHOWN]]
    remaining = sum(r["microseconds"] for r in rows[SHOWN:])
    return [*listed, [f"{len(rows) - SHOWN} more", "", f"{remaining:,.1f}"]] if len(rows) > SHOWN else listed


def _model_rows(rows: Sequence[Modelled]) -> list[list[str]]:
    return [
        [m.name, m.direction, f"{m.bytes:,}", f"{m.operations:,}", _with_commas(m.products or None),
         _with_commas(m.exponentials or None), _least(m.microseconds), m.bound]
        for m in rows
    ]  # fmt: skip


def _sum_rows(rows: Sequence[ModelledSum]) -> list[list[str]]:
    return [[m.candidate, m.direction, f"{m.launches:,}", f"{m.bytes:,}", _least(m.microseconds)] for m in rows]


def _least(microseconds: float) -> str:
    """Two digits at least, of the shortest time too."""
    return f"{microseconds:,.2f}" if microseconds >= 0.1 else f"{microseconds:.{_places(microseconds)}f}"


def _places(value: float) -> int:
    return 2 if value <= 0 else 1 - math.floor(math.log10(value))


def _binaries(profile: Profile) -> list[list[str]]:
    return [[kernel, *(_fact(facts.get(n)) for n in BINARIES[1:])] for kernel, facts in profile.binaries.items()]


def _issued(profile: Profile) -> list[list[str]]:
    """A line for each kernel that was compiled; the reason in it, where there is no model."""
    return [[kernel, *_model_cells(facts)] for kernel, facts in profile.binaries.items()]


def _model_cells(facts: dict[str, Any]) -> list[str]:
    m = facts.get("model")
    if m is None:
        return [str(facts.get("not_modelled", "")), *[""] * (len(ISSUED) - 2)]
    return [f"{m['per_32']:.1f}", f"{m['budget']:.1f}", f"{m['programs']:,}", f"{m['waves']:.2f}",
            f"{m['flight'] / 1024:.1f}", f"{m['microseconds']:,.1f}", f"{m['over_copy']:.2f}", m["bound"]]  # fmt: skip


def _fact(value: Any) -> str:
    return f"{100 * value:.0f} %" if isinstance(value, float) else str(value)


# ------------------------------------------------------------------ a page
MODEL_OF_ISSUE = "A model by the instructions of the machine code, not a measurement: bytes, issue, waves of programs."
NOT_COMPILED = "Not compiled: profile(..., metrics=True)."


def as_html(profile: Profile) -> str:
    """One page without scripts or requests: measured times as bars, the model as a roofline, every table."""
    measured = f"Measured on {profile.machine}, backend {profile.backend}"
    headings = (measured, f"Model of {profile.device.name}", "Compiled for it")
    bodies = (_measured_part(profile), _model_part(profile), _binaries_part(profile))
    sections = [section(heading, body) for heading, body in zip(headings, bodies, strict=True)]
    versions = note(", ".join(f"{k} {v}" for k, v in profile.versions.items() if v))
    return page(f"{profile.name}({profile.arguments})", contents(*headings), *sections, versions)


def _measured_part(profile: Profile) -> str:
    timed = [(m.candidate, m.direction, m.times.median) for m in profile.measured if m.times is not None]
    parts = [
        picture(bars(timed)),
        table(["candidate", *TIMES[1:]], _times(profile)),
        table(MEMORY, _memory(profile)),
        *([table(LAUNCHES, launches)] if (launches := _launch_rows(profile)) else []),
        *map(note, noise(profile)),
        note("Medians; forward without a graph, backward of a forward that is kept."),
    ]
    operations = "".join(
        f"<div><h3>{escape(d)}</h3>{table(OPERATIONS, _operations(rows))}</div>"
        for d, rows in profile.operations.items()
    )
    return f'{"".join(parts)}<div class="beside">{operations}</div>'


def _model_part(profile: Profile) -> str:
    text = "Not measured: the least time in which this device could move each launch's bytes, or do its operations."
    numbered = [[str(at), *row] for at, row in enumerate(_model_rows(profile.modelled), 1)]
    return "".join(
        [
            note(f"{text} Peaks: {profile.device.source}."),
            picture(roofline(profile.device, profile.modelled)),
            table(["", *MODEL], numbered),
            table(SUMS, _sum_rows(profile.sums)),
            *map(note, _uncounted(profile)),
        ]
    )


def _binaries_part(profile: Profile) -> str:
    if not profile.binaries:
        return note(NOT_COMPILED)
    return table(BINARIES, _binaries(profile)) + note(MODEL_OF_ISSUE) + table(ISSUED, _issued(profile))
