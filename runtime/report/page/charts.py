"""The two pictures of a profile, as SVG without outside resources: times as bars, and the model as a roofline."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from ....codegen.devices import Device
from ..roofline import Modelled
from .html import GREY, INK, RULE

COLORS = {"fusegrad": "#3b6fb6", "eager": "#9aa4b2", "torch.compile": "#c2843a"}
BAR, BARS_AT, LONGEST = 26, 230, 620
WIDTH, HEIGHT, LEFT, BOTTOM = 960, 320, 70, 40


def _svg(width: int, height: int, font: int, parts: Sequence[str]) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    face = f'font-family="system-ui, sans-serif" font-size="{font}" fill="{INK}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {face}>{"".join(parts)}</svg>'


# ------------------------------------------------------------------ times
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


# ------------------------------------------------------------------ the roofline
def roofline(device: Device, launches: Sequence[Modelled]) -> str:
    """Operations per second against operations per byte, both by powers of ten; a dot for each launch at its roof."""
    points = [(at, m.operations / m.bytes, m.operations / m.microseconds * 1e6)
              for at, m in enumerate(launches, 1) if m.bytes and m.operations]  # fmt: skip
    # Products of low floats have a roof of their own, which is drawn where one needs it.
    peak = device.products if any(m.products for m in launches) else device.flops
    # The axes: whole powers of ten around the launches, the ridge, and the roof at the far left.
    ridge = device.flops / device.bandwidth
    low, high = _decades([*(x for _, x, _ in points), 0.1, peak / device.bandwidth * 10])
    floor, top = _decades([device.bandwidth * 10**low, peak])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - low) / (high - low)
        up = (math.log10(y) - floor) / (top - floor)
        return LEFT + across * (WIDTH - LEFT - 20), HEIGHT - BOTTOM - up * (HEIGHT - BOTTOM - 24)

    # The roof below the bandwidth up to the ridge, and flat from there; a dot for each launch on it.
    roof = [at(10**low, device.bandwidth * 10**low), at(ridge, device.flops), at(10**high, device.flops)]
    parts = [*_grid(low, high, floor, top, at), _line(roof)]
    if peak > device.flops:
        parts.append(_line([at(ridge, device.flops), at(peak / device.bandwidth, peak), at(10**high, peak)], "5 4"))
    dots = [(*at(x, y), number) for number, x, y in points]
    return _svg(WIDTH, HEIGHT, 12, [*parts, *_dots(dots, [m.name for m in launches])])


def _line(places: Sequence[tuple[float, float]], dashes: str = "") -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{points}" fill="none" stroke="#374151" stroke-width="2"{dashed}/>'


DIGIT = 7  # pixels that a character of a label takes, a little more than any common face
Dot = tuple[float, float, int]
"""Where a launch stands, and its number."""


def _dots(dots: Sequence[Dot], names: Sequence[str]) -> Iterator[str]:
    """A dot for each launch, with its number above; dots whose numbers would overlap share one label."""
    for x, y, number in dots:
        title = f"<title>{escape(names[number - 1])}</title>"
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#3b6fb6">{title}</circle>'
    for group in _label_groups(dots):
        x, y = sum(x for x, _, _ in group) / len(group), min(y for _, y, _ in group)
        yield f'<text x="{x:.1f}" y="{y - 9:.1f}" text-anchor="middle">{_numbers(group)}</text>'


def _label_groups(dots: Sequence[Dot]) -> list[list[Dot]]:
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
        yield f'<text x="{left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end" {grey}>{_with_si_prefix(power)}</text>'
    yield f'<text x="{WIDTH / 2}" y="{HEIGHT - 4}" text-anchor="middle" {grey}>operations per byte</text>'
    yield f'<text x="0" y="11" {grey}>operations per second</text>'


def _with_si_prefix(power: int) -> str:
    """13 -> 10 T"""
    thousands = max(0, min(power // 3, 5))
    return f"{10.0 ** (power - 3 * thousands):g} {' kMGTP'[thousands]}"
