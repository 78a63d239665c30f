"""GPU results as text, and the goals that only they can decide."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .peers import AGAIN, OURS
from .report import aligned
from .statistics import geometric_mean, noise

Row = Mapping[str, Any]
COPY = "copy"
LARGE = 64 << 20
SMALL = "512,1024"
SHORT_ROWS = "65536,256"
BESIDE = ("eager", "compile", "max-autotune", "liger")
BESIDE_ATTENTION = ("eager", "compile", "sdpa", "flex")
COLUMNS = ("case", "direction", "ms", "of copy's bandwidth", "wall, ms", "noise")
HEAD = (*COLUMNS, *BESIDE)


def wrong(row: Row) -> bool:
    """Whether the compiled Function failed its check, or did not run."""
    return OURS in row["errors"] or any(found["faults"] for found in row["checks"].get(OURS, ()))


def median(row: Row, direction: str, peer: str, what: str = "device") -> float | None:
    """Milliseconds, None where the peer was not timed."""
    found = row["times"].get(direction, {}).get(peer)
    return None if found is None else float(found[what]["median"])


def both(row: Row, peer: str, what: str = "device") -> float | None:
    """forward and backward together."""
    times = [median(row, direction, peer, what) for direction in row["times"]]
    return None if None in times else sum(times)  # type: ignore[arg-type]


def ratio(row: Row, direction: str, peer: str) -> float | None:
    """How many times longer a peer takes on the device; of the copy: our share of its bandwidth."""
    ours, theirs = median(row, direction, OURS), median(row, direction, peer)
    return None if not ours or theirs is None else theirs / ours


# ------------------------------------------------------------------ goals
def _bandwidth(direction: str, wanted: Callable[[Row], bool]) -> Callable[[list[Row]], Iterator[tuple[str, float]]]:
    def measure(rows: list[Row]) -> Iterator[tuple[str, float]]:
        for row in rows:
            if wanted(row) and (share := ratio(row, direction, COPY)) is not None:
                yield f"{row['case']} {direction}", share

    return measure


def _is_large(direction: int) -> Callable[[Row], bool]:
    return lambda row: row["minimal"][direction] >= LARGE and "FusedLinear" not in row["case"]


def _against(peer: str, what: str, at: str = "") -> Callable[[list[Row]], Iterator[tuple[str, float]]]:
    def measure(rows: list[Row]) -> Iterator[tuple[str, float]]:
        for row in rows:
            ours, theirs = both(row, OURS, what), both(row, peer, what)
            if at in row["case"] and ours and theirs:
                yield row["case"], theirs / ours

    return measure


GOALS: tuple[tuple[str, float, Callable[[list[float]], float], Any], ...] = (
    ("share of the copy's bandwidth, forward, 64 MB or more", 0.95, min, _bandwidth("forward", _is_large(0))),
    ("share of the copy's bandwidth, backward, 64 MB or more", 0.90, min, _bandwidth("backward", _is_large(1))),
    ("share of the copy's bandwidth, 65536x256", 0.85, min, _bandwidth("forward", lambda r: SHORT_ROWS in r["case"])),
    ("max-autotune's device time over ours, geometric mean", 1.25, geometric_mean, _against("max-autotune", "device")),
    ("max-autotune's device time over ours, least", 0.97, min, _against("max-autotune", "device")),
    ("max-autotune's wall time over ours, 512x1024, least", 2.5, min, _against("max-autotune", "wall", SMALL)),
    ("Liger's device time over ours, geometric mean", 1.5, geometric_mean, _against("liger", "device")),
    ("Liger's device time over ours, least", 1.0, min, _against("liger", "device")),
    ("Liger's wall time over ours, 512x1024, least", 5.0, min, _against("liger", "wall", SMALL)),
)
"""(name, at least, how to take the cases together, (case, value) of each)"""


def goal_rows(rows: list[Row]) -> list[list[str]]:
    """A line for every goal that some case can decide."""
    lines = []
    for name, least, together, measure in GOALS:
        if found := list(measure(rows)):
            value = together([v for _, v in found])
            missed = sum(v < least for _, v in found)
            at = min(found, key=lambda f: f[1])[0]
            verdict = "met" if value >= least else f"missed ({missed} of {len(found)} below)"
            lines.append([name, f">= {least:g}", f"{value:.3f}", at, verdict])
    return lines


# ------------------------------------------------------------------ text
def text(found: Mapping[str, Any]) -> str:
    """Device, the cases, what was wrong, the goals."""
    rows = found["rows"]
    about = "; ".join(f"{k} {v}" for k, v in found["surroundings"].items() if k != "versions")
    times = aligned(HEAD, [line for row in rows for line in lines_of(row)]) if rows else "nothing was timed"
    lines = [about, "", times]
    lines += [f"\n{row['case']}: {peer}: {error}" for row in rows for peer, error in row["errors"].items()]
    lines += [f"\n{row['case']}: {peer} differs: {'; '.join(f['faults'])} (judged by {f['judge']})"
              for row in rows for peer, checks in row["checks"].items() for f in checks if f["faults"]]  # fmt: skip
    goals = [] if "mean nothing" in found["surroundings"]["device"] else goal_rows(rows)
    return "\n".join([*lines, "", aligned(("goal", "limit", "value", "worst case", "verdict"), goals) if goals else ""])


def lines_of(row: Row, beside: Sequence[str] = BESIDE) -> Iterator[list[str]]:
    """Of each direction: COLUMNS, and how many times longer each peer takes."""
    for direction in row["times"]:
        ours, again = median(row, direction, OURS), median(row, direction, AGAIN)
        yield [
            row["case"],
            direction,
            _number(ours, ".4f") + ("" if _alone(row, direction) else " and host"),
            _number(ratio(row, direction, COPY), ".2f"),
            _number(median(row, direction, OURS, "wall"), ".4f"),
            _number(noise(ours, again) if ours and again else None, ".1%"),
            *(_number(ratio(row, direction, peer), ".2f") for peer in beside),
        ]


def _alone(row: Row, direction: str) -> bool:
    ours = row["times"][direction].get(OURS)
    return ours is None or bool(ours["device alone"])


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
