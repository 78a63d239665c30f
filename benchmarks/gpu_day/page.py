"""What came of the day: a summary for the terminal, and a page beside the file."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from .. import gpu_report
from ..report import aligned
from . import modelled
from .record import Record
from .steps import Step

OUTCOMES = ("ok", "wrong", "failed", "hung", "died", "skipped")
TIMED = ("times of ten", "times of functions", "times of the rest", "times with autotuning")
COMPARED = ("telling", "functions", "gallery", "products", "streams", "rest")
NOT_ASKED = """## Beside the static model

The model was not asked yet: `make gpu ARGS=--page` does it, on any machine."""
NOTHING = "No GPU: a rehearsal. Its times mean nothing, and what differs from a model means nothing either."


def is_pretended(record: Record) -> bool:
    return record.data["surroundings"]["device"] == "pretended"


# ------------------------------------------------------------------ the terminal
def summary(record: Record, steps: Sequence[Step]) -> str:
    """Steps, what is left of them, and what is not right."""
    head = ("step", *OUTCOMES, "left", "seconds")
    lines = [_about(record), "", aligned(head, [_row(record, step) for step in steps]), ""]
    lines += [f"{step}, {unit}: {found['outcome']}: {'; '.join(found['faults'])}"
              for step, unit, found in _not_right(record)]  # fmt: skip
    left = sum(len(record.left(step)) for step in steps)
    lines.append(f"{left} units are left; the same command goes on" if left else "nothing is left")
    return "\n".join(lines)


def _about(record: Record) -> str:
    known = record.data["surroundings"]
    versions = ", ".join(f"{name} {version}" for name, version in known["versions"].items())
    spent = sum(each["seconds"] for each in record.data["slices"])
    about = f"{known['device']}, {versions}, commit {known['commit']}, {known['date']}; {spent / 60:.0f} minutes in "
    return f"{about}{len(record.data['slices'])} slices" + (f"\n{NOTHING}" if is_pretended(record) else "")


def _row(record: Record, step: Step) -> list[str]:
    counts = collections.Counter(found["outcome"] for found in record.units(step.name).values())
    numbers = [str(counts[o] or "-") for o in OUTCOMES]
    return [step.name, *numbers, str(len(record.left(step)) or "-"), f"{record.seconds(step.name):.0f}"]


def _not_right(record: Record) -> Iterator[tuple[str, str, dict[str, Any]]]:
    return ((s, u, f) for s, u, f in record.results() if f["outcome"] not in ("ok", "skipped"))


# ------------------------------------------------------------------ the page
def page(record: Record, steps: Sequence[Step]) -> str:
    """The file as Markdown."""
    known = record.data["surroundings"]
    title = "Rehearsed on a pretended GPU" if is_pretended(record) else f"Measured on {known['device']}"
    parts: list[str] = [f"# {title}", _facts(record), _table(("step", *OUTCOMES, "left"), (
        _row(record, step)[:-1] for step in steps))]  # fmt: skip
    parts += [section for _, section in _sections(record) if section]
    return "\n\n".join(parts) + "\n"


def _facts(record: Record) -> str:
    known = record.data["surroundings"]
    facts = [f"{key} {value}" for key, value in known.items() if key not in ("versions", "device") and value]
    versions = [f"{name} {version}" for name, version in known["versions"].items()]
    commits = sorted({found["commit"] for _, _, found in record.results()})
    text = f"Written by `make gpu`. {'; '.join([*facts, *versions])}."
    text += f" Results are of {len(commits)} commits: {', '.join(commits)}." if len(commits) > 1 else ""
    return f"{NOTHING}\n\n{text}" if is_pretended(record) else text


def _table(head: Sequence[str], rows: Any) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(c).replace("|", "/") for c in line) + " |" for line in lines)


def _sections(record: Record) -> Iterator[tuple[str, str]]:
    yield "wrong", _list("What is not right", (
        f"**{s}, {u}**: {f['outcome']}: {'; '.join(f['faults'])}" for s, u, f in _not_right(record)))  # fmt: skip
    yield "skipped", _list("What was left out", (
        f"{s}, {u}: {f['facts']['skipped']}" for s, u, f in record.results() if f["outcome"] == "skipped"))  # fmt: skip
    yield "equal", _equality(record)
    rows = timed_rows(record)
    if not is_pretended(record):
        yield "model", _model(record, rows)
        yield "goals", _goals(rows)
        yield "profile", _profile(record)
    yield "times", _times(rows)
    yield "attention", _attention(record)
    yield "models", _models(record)
    yield "tuned", _list("Where the schedule's own choice was not the fastest", _lost_choices(record))


def timed_rows(record: Record) -> list[Any]:
    """Rows of the benchmarks, of all steps that time."""
    return [found["facts"]["row"] for _, _, found in record.results(*TIMED) if "row" in found["facts"]]


def _list(title: str, lines: Any) -> str:
    items = [f"- {line}" for line in lines]
    return "\n".join([f"## {title}", "", *items]) if items else ""


def _equality(record: Record) -> str:
    rows = [[unit, *_shares(found)] for _, unit, found in record.results(*COMPARED) if found["facts"].get("equal")]
    exact = sum(least == "1" for _, least, _ in rows)
    if not rows:
        return ""
    text = f"{exact} of {len(rows)} are eager's bit for bit, in every output and gradient. The others:"
    apart = [row for row in rows if row[1] != "1"]
    table = _table(("Function", "least share of equal elements of a result", "mean over results"), apart)
    return f"## Beside eager, bit for bit\n\n{text}\n\n{table}"


def _shares(found: Mapping[str, Any]) -> tuple[str, str]:
    shares = found["facts"]["equal"]
    return _share(min(shares)), _share(fmean(shares))


def _share(share: float) -> str:
    """ "1" for all of them alone, however many there are"""
    short = f"{share:.6g}"
    return f"{share:.12g}" if short == "1" and share < 1 else short


# ------------------------------------------------------------------ times
def _times(rows: Sequence[Any]) -> str:
    lines = [line for row in rows for line in gpu_report.lines_of(row)]
    if not lines:
        return ""
    note = "Milliseconds on the device; of the peers, how many times longer they take."
    return f"## Times\n\n{note}\n\n{_table(gpu_report.HEAD, lines)}"


def _attention(record: Record) -> str:
    rows = [found["facts"]["row"] for _, _, found in record.results("times of streams") if "row" in found["facts"]]
    lines = [line for row in rows for line in gpu_report.lines_of(row, gpu_report.BESIDE_ATTENTION)]
    if not lines:
        return ""
    head = (*gpu_report.COLUMNS, *gpu_report.BESIDE_ATTENTION)
    return f"## Attention and its kin\n\nAs above, beside torch's own attention.\n\n{_table(head, lines)}"


def _goals(rows: list[Any]) -> str:
    lines = gpu_report.goal_rows(rows)
    return f"## Goals\n\n{_table(('goal', 'limit', 'value', 'worst case', 'verdict'), lines)}" if lines else ""


def _model(record: Record, rows: Sequence[Any]) -> str:
    """What differs from the static model."""
    from fusegrad.runtime.profile.devices import device_named

    device = modelled.model_device(record.data["surroundings"]["device"])
    if device is None:
        return _list("Beside the static model", ["The model has no row for this device."])
    bandwidth = device_named(device).bandwidth
    found = list(modelled.beside(rows, record.data.get("model", {})))
    lines = [[b.case, b.direction, f"{b.measured:.4f}", f"{b.model:.4f}", b.bound, f"{b.unexplained(bandwidth):.2f}"]
             for b in found]  # fmt: skip
    table = _table(("case", "direction", "ms", "model, ms", "bound by", "measured over model"), lines)
    corrected = _list("Beside the static model", modelled.corrections(found, bandwidth))
    note = "The model gets the bandwidth that a copy of the same bytes reached."
    return f"{corrected}\n\n{note}\n\n{table}" if found else NOT_ASKED


def _models(record: Record) -> str:
    names = ("first loss", "last loss", "swapped", "apart", "eager ms", "swapped ms")
    rows = [[unit, *(f"{found['facts'][n]:.5g}" for n in names)]
            for _, unit, found in record.results("models") if "apart" in found["facts"]]  # fmt: skip
    return f"## Models\n\n{_table(('model', *names), rows)}" if rows else ""


def _profile(record: Record) -> str:
    said = ["\n".join(found["facts"]["said"]) for _, _, found in record.results("profile") if "said" in found["facts"]]
    return "\n\n".join(["## Profiles", *(f"```text\n{text}\n```" for text in said)]) if said else ""


def _lost_choices(record: Record) -> Iterator[str]:
    for _, _, found in record.results("tune", "products"):
        for trial in found["facts"].get("trials", ()):
            times = trial["milliseconds"] or ()
            if times and min(times) < 0.98 * times[0]:
                best = trial["candidates"][list(times).index(min(times))]
                yield f"{trial['kernel']} {trial['sizes']}: {best} takes {min(times) / times[0]:.2f} of its time"
