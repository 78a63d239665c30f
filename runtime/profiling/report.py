"""A profile for people: text, a page with two pictures; and for programs: JSON, and the trace of what ran."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .measure import Times
from .model import Modelled

if TYPE_CHECKING:
    from .profile import Profile

SHOWN = 12  # operations of a direction
COLORS = {"fusegrad": "#3b6fb6", "eager": "#9aa4b2", "torch.compile": "#c2843a"}


def write(profile: Profile, path: Path) -> None:
    """By the end of the name. Raises ProfileArgumentError for another one."""
    if path.name.endswith(".trace.json"):
        _write_trace(profile, path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(profile.to_dict(), indent=1) + "\n", encoding="utf-8")
    elif path.suffix == ".html":
        path.write_text(as_html(profile), encoding="utf-8")
    else:
        from .profile import ProfileArgumentError

        raise ProfileArgumentError(
            function=profile.name, detail=f"it cannot be written as {path.name}",
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
def as_text(profile: Profile) -> str:
    """The tables."""
    lines = [f"{profile.name}({profile.arguments})", "", f"measured on {profile.machine}, backend {profile.backend}"]
    lines += _table(["", "direction", "median us", "p10", "p90", "calls"], _times(profile))
    lines += [f"  saved for backward by {name}: {count:,} bytes" for name, count in profile.saved.items()]
    if profile.peak is not None:
        lines.append(f"  memory at most, above what was there: {profile.peak:,} bytes")
    if profile.copy_bandwidth:
        lines.append(f"  a copy moves {profile.copy_bandwidth / 1e9:,.0f} GB/s")
    for direction, rows in profile.operations.items():
        lines += ["", f"{direction}, operations by their own time (measured)"]
        lines += _table(["operation", "calls", "us"], _operations(rows))
    device = profile.device
    lines += ["", f"model of {device.name} ({device.bandwidth / 1e12:g} TB/s): the least time, not a measured one"]
    lines += _table(["launch", "direction", "bytes", "operations", "us", "bound by"], _modelled(profile.modelled))
    if profile.binaries:
        lines += ["", f"compiled for {device.target}"]
        lines += _table(["kernel", "registers", "spills", "shared", "accesses"], _binaries(profile))
    return "\n".join(lines)


def _times(profile: Profile) -> list[list[str]]:
    return [[m.candidate, m.direction, *(_figures(m.times) if m.times else [m.error])] for m in profile.measured]


def _figures(times: Times) -> list[str]:
    return [*(f"{t:,.1f}" for t in (times.median, times.p10, times.p90)), str(times.calls)]


def _operations(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    shown = [[r["name"], f"{r['calls']:g}", f"{r['microseconds']:,.1f}"] for r in rows[:SHOWN]]
    rest = sum(r["microseconds"] for r in rows[SHOWN:])
    return [*shown, [f"{len(rows) - SHOWN} more", "", f"{rest:,.1f}"]] if len(rows) > SHOWN else shown


def _modelled(rows: Sequence[Modelled]) -> list[list[str]]:
    return [
        [m.name, m.direction, f"{m.bytes:,}", f"{m.operations:,}", f"{m.microseconds:,.2f}", m.bound] for m in rows
    ]


def _binaries(profile: Profile) -> list[list[str]]:
    names = ("registers", "spills", "shared", "accesses")
    return [[kernel, *(str(facts.get(n)) for n in names)] for kernel, facts in profile.binaries.items()]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Numbers to the right, words to the left."""
    full = [list(head), *([*row, *[""] * (len(head) - len(row))] for row in rows)]
    widths = [max(len(row[i]) for row in full[: len(full)] if len(row[i]) < 60) for i in range(len(head))]
    for row in full:
        cells = [c.ljust(w) if not _is_number(c) else c.rjust(w) for c, w in zip(row, widths, strict=True)]
        yield f"  {'  '.join(cells)}".rstrip()


def _is_number(text: str) -> bool:
    return text[:1].isdigit() and text.replace(",", "").replace(".", "").isdigit()


# ------------------------------------------------------------------ a page
def as_html(profile: Profile) -> str:
    """One page without scripts or requests: measured times as bars, the model as a roofline, every table."""
    measured = [(m.candidate, m.direction, m.times.median) for m in profile.measured if m.times is not None]
    return PAGE.format(
        title=escape(f"{profile.name}({profile.arguments})"), machine=escape(profile.machine),
        backend=escape(profile.backend), bars=bars(measured),
        times=_rows(["candidate", "direction", "median us", "p10", "p90", "calls"], _times(profile)),
        saved=_rows(["candidate", "bytes saved for backward"], [[n, f"{b:,}"] for n, b in profile.saved.items()]),
        operations="".join(
            f"<h3>{escape(d)}</h3>" + _rows(["operation", "calls", "us"], _operations(rows))
            for d, rows in profile.operations.items()
        ),
        device=escape(profile.device.name), source=escape(profile.device.source), roofline=roofline(profile),
        launches=_rows(["launch", "direction", "bytes", "operations", "us", "bound by"], _modelled(profile.modelled)),
        binaries=_rows(["kernel", "registers", "spills", "shared", "accesses"], _binaries(profile)) if profile.binaries
        else "<p>Not compiled: <code>profile(.., metrics=True)</code>.</p>",
        versions=escape(", ".join(f"{k} {v}" for k, v in profile.versions.items() if v)),
    )  # fmt: skip


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def bars(rows: Sequence[tuple[str, str, float]]) -> str:
    """(candidate, direction, microseconds) as horizontal bars from zero."""
    longest, height = max((t for *_, t in rows), default=1.0), 26
    parts = []
    for i, (candidate, direction, time) in enumerate(rows):
        y, width = i * height, 620 * time / longest
        color = COLORS.get(candidate, "#5d6b7a")
        parts.append(f'<text x="0" y="{y + 17}">{escape(candidate)}, {escape(direction)}</text>')
        parts.append(f'<rect x="230" y="{y + 4}" width="{width:.1f}" height="18" rx="2" fill="{color}"/>')
        parts.append(f'<text x="{238 + width:.1f}" y="{y + 17}">{time:,.1f} us</text>')
    size = f'width="960" height="{height * len(rows)}" viewBox="0 0 960 {height * len(rows)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-size="13">{"".join(parts)}</svg>'


WIDTH, HEIGHT, LEFT, BOTTOM = 960, 320, 70, 40


def roofline(profile: Profile) -> str:
    """Operations per second against operations per byte, both by powers of ten; a dot for each launch at its roof."""
    device = profile.device
    points = [(m, m.operations / m.bytes) for m in profile.modelled if m.bytes and m.operations]
    ridge = device.flops / device.bandwidth
    low, high = _decades([*(x for _, x in points), 0.1, ridge * 10])
    floor, top = _decades([device.bandwidth * 10**low, device.flops])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - low) / (high - low)
        up = (math.log10(y) - floor) / (top - floor)
        return LEFT + across * (WIDTH - LEFT - 20), HEIGHT - BOTTOM - up * (HEIGHT - BOTTOM - 14)

    roof = [at(10**low, device.bandwidth * 10**low), at(ridge, device.flops), at(10**high, device.flops)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in roof)
    parts = [*_grid(low, high, floor, top, at)]
    parts.append(f'<polyline points="{line}" fill="none" stroke="#374151" stroke-width="2"/>')
    for number, (launch, x) in enumerate(points, 1):
        across, up = at(x, min(device.flops, x * device.bandwidth))
        told, y = f"{number}  {launch.name}: {x:.2g} operations per byte", HEIGHT - BOTTOM - 16 * (len(points) - number)
        parts.append(f'<circle cx="{across:.1f}" cy="{up:.1f}" r="5" fill="#3b6fb6"/>')
        parts.append(f'<text x="{across:.1f}" y="{up - 9:.1f}" text-anchor="middle">{number}</text>')
        parts.append(f'<text x="{WIDTH / 2}" y="{y - 8}">{escape(told)}</text>')
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-size="12">{"".join(parts)}</svg>'


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """The powers of ten around positive numbers."""
    return math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))


def _grid(low: int, high: int, floor: int, top: int, at: Any) -> Iterator[str]:
    grey = 'stroke="#e5e7eb"'
    for power in range(low, high + 1):
        (x, below), (_, above) = at(10.0**power, 10.0**floor), at(10.0**power, 10.0**top)
        yield f'<path d="M{x:.1f} {below:.1f}V{above:.1f}" {grey}/>'
        yield f'<text x="{x:.1f}" y="{HEIGHT - 22}" text-anchor="middle" fill="#6b7280">{10.0**power:g}</text>'
    for power in range(floor, top + 1):
        (left, y), (right, _) = at(10.0**low, 10.0**power), at(10.0**high, 10.0**power)
        yield f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" {grey}/>'
        yield f'<text x="{left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end" fill="#6b7280">1e{power}</text>'
    yield f'<text x="{WIDTH / 2}" y="{HEIGHT - 4}" text-anchor="middle" fill="#6b7280">operations per byte</text>'


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ margin: 24px auto; max-width: 1100px; font: 14px/1.5 system-ui, sans-serif; color: #111827; background: #fff; }}
h1 {{ font-size: 20px; }} h2 {{ font-size: 17px; margin-top: 32px; }} h3 {{ font-size: 14px; }}
table {{ border-collapse: collapse; margin: 8px 0 16px; }}
td, th {{ padding: 3px 18px 3px 0; text-align: left; border-bottom: 1px solid #e5e7eb; }}
.note {{ color: #6b7280; }}
</style>
</head>
<body>
<h1>{title}</h1>
<h2>Measured on {machine}, backend {backend}</h2>
{bars}
{times}
{saved}
<p class="note">Medians; forward without a graph, backward of a forward that is kept.</p>
{operations}
<h2>Model of {device}</h2>
<p class="note">Not measured: the least time in which this device could move the bytes, or do the operations, of each
launch. Peaks: {source}.</p>
{roofline}
{launches}
<h2>Compiled for it</h2>
{binaries}
<p class="note">{versions}</p>
</body>
</html>
"""
