"""A profile for people: text, a page with two pictures; and for programs: JSON, and the trace of what ran."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, Protocol

from ...ir.errors import FusegradError
from ..report.html_page import GREY, INK, RULE, contents, note, page, section, table
from ..report.terminal import Block, Table, plain
from .measure import Times
from .roofline import Modelled

SHOWN = 12  # operations of a direction
COLORS = {"fusegrad": "#3b6fb6", "eager": "#9aa4b2", "torch.compile": "#c2843a"}


class Profiled(Protocol):
    """What is shown of a profile."""

    name: str
    backend: str
    machine: str
    arguments: str
    measured: Any
    saved: dict[str, int]
    operations: dict[str, list[dict[str, Any]]]
    modelled: list[Modelled]
    device: Any
    binaries: dict[str, dict[str, Any]]
    copy_bandwidth: float | None
    peaks: dict[str, dict[str, int]]
    versions: dict[str, str]
    traces: dict[str, Any]

    def achieved(self) -> Iterator[Any]:
        """Our launches among what ran, with what they reached."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""


def write(profile: Profiled, path: Path) -> None:
    """By the end of the name. Raises ProfileArgumentError for another one."""
    if path.name.endswith(".trace.json"):
        _write_trace(profile, path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(profile.to_dict(), indent=1) + "\n", encoding="utf-8")
    elif path.suffix == ".html":
        path.write_text(as_html(profile), encoding="utf-8")
    else:
        pass

        raise ProfileArgumentError(
            function=profile.name, detail=f"it cannot be written as {path.name}",
            fix="end it in .json, .html or .trace.json.",
        )  # fmt: skip


def _write_trace(profile: Profiled, path: Path) -> None:
    """Both directions as one trace in Chrome's format, which Perfetto reads: backward after forward."""
    events: list[dict[str, Any]] = []
    for direction, profiler in profile.traces.items():
        profiler.export_chrome_trace(str(path))
        part = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        events += [{**event, "cat": f"{direction},{event.get('cat', '')}"} for event in part]
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


# ------------------------------------------------------------------ text
TIMES = ("", "direction", "median us", "p10", "p90", "calls")
MEMORY = ("memory, bytes", "saved tensors", "at most in forward", "in backward")
LAUNCHES = ("launch", "direction", "us", "GB/s", "GFLOP/s", "% of a copy")
OPERATIONS = ("operation", "calls", "us")
MODEL = ("launch", "direction", "bytes", "operations", "us", "bound by")
BINARIES = ("kernel", "warps", "registers", "spills", "shared", "occupancy", "accesses")


def as_text(profile: Profiled) -> str:
    """The tables as plain text."""
    return "\n\n".join(map(plain, blocks(profile)))


def blocks(profile: Profiled) -> list[Block]:
    """The tables: what was measured, then what is modelled, then what was compiled."""
    device, measured = profile.device, f"measured on {profile.machine}, backend {profile.backend}"
    if profile.copy_bandwidth:
        measured += f"; a copy moves {profile.copy_bandwidth / 1e9:,.0f} GB/s"
    model = f"model of {device.name} ({device.bandwidth / 1e12:g} TB/s): the least time, not a measured one"
    parts = [
        Table(measured, TIMES, _times(profile)),
        Table("", MEMORY, _memory(profile)),
        Table("our launches, as measured", LAUNCHES, _achieved(profile)),
        *(Table(f"{direction}, operations by their own time (measured)", OPERATIONS, _operations(rows))
          for direction, rows in profile.operations.items()),
        Table(model, MODEL, _modelled(profile.modelled)),
        Table(f"compiled for {device.target}", BINARIES, _binaries(profile)),
    ]  # fmt: skip
    return [f"{profile.name}({profile.arguments})", *(part for part in parts if part.rows)]


def _memory(profile: Profiled) -> list[list[str]]:
    names = dict.fromkeys([*profile.saved, *profile.peaks])
    return [[name, *map(_counted, (profile.saved.get(name), *_peaks(profile, name)))] for name in names]


def _peaks(profile: Profiled, name: str) -> tuple[int | None, int | None]:
    found = profile.peaks.get(name, {})
    return found.get("forward"), found.get("backward")


def _counted(count: int | None) -> str:
    return "" if count is None else f"{count:,}"


def _achieved(profile: Profiled) -> list[list[str]]:
    return [
        [a.name, a.direction, f"{a.microseconds:,.1f}", f"{a.bytes_per_second / 1e9:,.0f}",
         f"{a.operations_per_second / 1e9:,.0f}", "" if a.of_copy is None else f"{100 * a.of_copy:.0f}"]
        for a in profile.achieved()
    ]  # fmt: skip


def _times(profile: Profiled) -> list[list[str]]:
    return [[m.candidate, m.direction, *(_figures(m.times) if m.times else [m.error])] for m in profile.measured]


def _figures(times: Times) -> list[str]:
    return [*(f"{t:,.1f}" for t in (times.median, times.p10, times.p90)), str(times.calls)]


def _operations(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    shown = [[r["name"], f"{r['calls']:g}", f"{r['microseconds']:,.1f}"] for r in rows[:SHOWN]]
    rest = sum(r["microseconds"] for r in rows[SHOWN:])
    return [*shown, [f"{len(rows) - SHOWN} more", "", f"{rest:,.1f}"]] if len(rows) > SHOWN else shown


def _modelled(rows: Sequence[Modelled]) -> list[list[str]]:
    return [
        [m.name, m.direction, f"{m.bytes:,}", f"{m.operations:,}", _least(m.microseconds), m.bound] for m in rows
    ]


def _least(microseconds: float) -> str:
    """Two digits at least, of the shortest time too."""
    return f"{microseconds:,.2f}" if microseconds >= 0.1 else f"{microseconds:.{_places(microseconds)}f}"


def _places(value: float) -> int:
    return 2 if value <= 0 else 1 - math.floor(math.log10(value))


def _binaries(profile: Profiled) -> list[list[str]]:
    return [[kernel, *(_fact(facts.get(n)) for n in BINARIES[1:])] for kernel, facts in profile.binaries.items()]


def _fact(value: Any) -> str:
    return f"{100 * value:.0f} %" if isinstance(value, float) else str(value)


# ------------------------------------------------------------------ a page
NOT_COMPILED = "Not compiled: profile(..., metrics=True)."


def as_html(profile: Profiled) -> str:
    """One page without scripts or requests: measured times as bars, the model as a roofline, every table."""
    measured = f"Measured on {profile.machine}, backend {profile.backend}"
    headings = (measured, f"Model of {profile.device.name}", "Compiled for it")
    bodies = (_measured_part(profile), _model_part(profile), _binaries_part(profile))
    sections = [section(heading, body) for heading, body in zip(headings, bodies, strict=True)]
    versions = note(", ".join(f"{k} {v}" for k, v in profile.versions.items() if v))
    return page(f"{profile.name}({profile.arguments})", contents(*headings), *sections, versions)


def _measured_part(profile: Profiled) -> str:
    timed = [(m.candidate, m.direction, m.times.median) for m in profile.measured if m.times is not None]
    parts = [
        bars(timed),
        table(["candidate", *TIMES[1:]], _times(profile)),
        table(MEMORY, _memory(profile)),
        *([table(LAUNCHES, launches)] if (launches := _achieved(profile)) else []),
        note("Medians; forward without a graph, backward of a forward that is kept."),
    ]
    operations = "".join(
        f"<div><h3>{escape(d)}</h3>{table(OPERATIONS, _operations(rows))}</div>"
        for d, rows in profile.operations.items()
    )
    return f'{"".join(parts)}<div class="beside">{operations}</div>'


def _model_part(profile: Profiled) -> str:
    told = "Not measured: the least time in which this device could move each launch's bytes, or do its operations."
    numbered = [[str(at), *row] for at, row in enumerate(_modelled(profile.modelled), 1)]
    return "".join([note(f"{told} Peaks: {profile.device.source}."), roofline(profile), table(["", *MODEL], numbered)])


def _binaries_part(profile: Profiled) -> str:
    return table(BINARIES, _binaries(profile)) if profile.binaries else note(NOT_COMPILED)


BAR, BARS_AT, LONGEST = 26, 230, 620


def bars(rows: Sequence[tuple[str, str, float]]) -> str:
    """(candidate, direction, microseconds) as horizontal bars from zero."""
    longest, parts = max((t for *_, t in rows), default=1.0), []
    for i, (candidate, direction, time) in enumerate(rows):
        y, width = i * BAR, LONGEST * time / longest
        color = COLORS.get(candidate, "#5d6b7a")
        parts.append(f'<text x="0" y="{y + 17}">{escape(candidate)}, {escape(direction)}</text>')
        parts.append(f'<rect x="{BARS_AT}" y="{y + 4}" width="{width:.1f}" height="18" rx="2" fill="{color}"/>')
        parts.append(f'<text x="{BARS_AT + 8 + width:.1f}" y="{y + 17}">{time:,.1f} us</text>')
    return _svg(WIDTH, BAR * len(rows), 13, parts)


WIDTH, HEIGHT, LEFT, BOTTOM = 960, 320, 70, 40


def _svg(width: int, height: int, font: int, parts: Sequence[str]) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    face = f'font-family="system-ui, sans-serif" font-size="{font}" fill="{INK}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {face}>{"".join(parts)}</svg>'


def roofline(profile: Profiled) -> str:
    """Operations per second against operations per byte, both by powers of ten; a dot for each launch at its roof."""
    device = profile.device
    points = [(at, m.operations / m.bytes) for at, m in enumerate(profile.modelled, 1) if m.bytes and m.operations]
    ridge = device.flops / device.bandwidth
    low, high = _decades([*(x for _, x in points), 0.1, ridge * 10])
    floor, top = _decades([device.bandwidth * 10**low, device.flops])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - low) / (high - low)
        up = (math.log10(y) - floor) / (top - floor)
        return LEFT + across * (WIDTH - LEFT - 20), HEIGHT - BOTTOM - up * (HEIGHT - BOTTOM - 24)

    roof = [at(10**low, device.bandwidth * 10**low), at(ridge, device.flops), at(10**high, device.flops)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in roof)
    parts = [*_grid(low, high, floor, top, at)]
    parts.append(f'<polyline points="{line}" fill="none" stroke="#374151" stroke-width="2"/>')
    dots = [(*at(x, min(device.flops, x * device.bandwidth)), number) for number, x in points]
    return _svg(WIDTH, HEIGHT, 12, [*parts, *_dots(dots, [m.name for m in profile.modelled])])


DIGIT = 7  # pixels that a character of a label takes, a little more than any common face
Dot = tuple[float, float, int]
"""Where a launch stands, and its number."""


def _dots(dots: Sequence[Dot], names: Sequence[str]) -> Iterator[str]:
    """A dot for each launch, with its number above; dots whose numbers would overlap share one label."""
    for x, y, number in dots:
        told = f"<title>{escape(names[number - 1])}</title>"
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#3b6fb6">{told}</circle>'
    for group in _together(dots):
        x, y = sum(x for x, _, _ in group) / len(group), min(y for _, y, _ in group)
        yield f'<text x="{x:.1f}" y="{y - 9:.1f}" text-anchor="middle">{_numbers(group)}</text>'


def _together(dots: Sequence[Dot]) -> list[list[Dot]]:
    """From left to right; a group joins the one before it for as long as their labels overlap."""
    groups: list[list[Dot]] = []
    for dot in sorted(dots):
        group = [dot]
        while groups and _span(groups[-1])[1] > _span(group)[0]:
            group = [*groups.pop(), *group]
        groups.append(group)
    return groups


def _span(group: Sequence[Dot]) -> tuple[float, float]:
    """From where to where a label reaches."""
    middle, half = sum(x for x, _, _ in group) / len(group), DIGIT * (len(_numbers(group)) + 1) / 2
    return middle - half, middle + half


def _numbers(group: Sequence[Dot]) -> str:
    """4, 5, 6, 7, 10 -> 4-7, 10"""
    runs: list[list[int]] = []
    for number in sorted(number for _, _, number in group):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """The powers of ten around positive numbers."""
    return math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))


def _grid(low: int, high: int, floor: int, top: int, at: Any) -> Iterator[str]:
    rule, grey = f'stroke="{RULE}"', f'fill="{GREY}"'
    for power in range(low, high + 1):
        (x, below), (_, above) = at(10.0**power, 10.0**floor), at(10.0**power, 10.0**top)
        yield f'<path d="M{x:.1f} {below:.1f}V{above:.1f}" {rule}/>'
        yield f'<text x="{x:.1f}" y="{HEIGHT - 22}" text-anchor="middle" {grey}>{10.0**power:g}</text>'
    for power in range(floor, top + 1):
        (left, y), (right, _) = at(10.0**low, 10.0**power), at(10.0**high, 10.0**power)
        yield f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" {rule}/>'
        yield f'<text x="{left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end" {grey}>{_prefixed(power)}</text>'
    yield f'<text x="{WIDTH / 2}" y="{HEIGHT - 4}" text-anchor="middle" {grey}>operations per byte</text>'
    yield f'<text x="0" y="11" {grey}>operations per second</text>'


def _prefixed(power: int) -> str:
    """13 -> 10 T"""
    thousands = max(0, min(power // 3, 5))
    return f"{10.0 ** (power - 3 * thousands):g} {' kMGTP'[thousands]}"


class ProfileArgumentError(FusegradError, ValueError):
    """A baseline or a path that profile does not know."""

    message = "profile({function}): {detail}\n  at:   {where}\n  fix:  {fix}"
