"""`make gpu`: what a first GPU allows, in order of value, in slices of minutes; again: what is left.

    python -m fusegrad.benchmarks.gpu_day                          a slice of 20 minutes
    python -m fusegrad.benchmarks.gpu_day --minutes 9              a shorter one: repeat until nothing is left
    python -m fusegrad.benchmarks.gpu_day --report                 what is known so far
    python -m fusegrad.benchmarks.gpu_day --page                   write the page, with the static model's times beside
    python -m fusegrad.benchmarks.gpu_day --device pretended       every step rehearsed without a GPU, at tiny sizes

Each step is in a process of its own, which is ended where it hangs. Every result is in the file at once:
benchmarks/results/gpu-<device>.json, and a page beside it. Exit code 1 where something is not right, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..__main__ import today
from .day import Day, one_answer
from .modelled import asked, model_device
from .page import page, summary, timed_rows
from .record import Record, open_record
from .steps import HERE, STEPS, chosen_steps

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BUILD = ROOT / "build" / "gpu"
"""Compiled kernels stay here from slice to slice; rehearsals write their results here."""
NO_GPU = """No GPU, so nothing was run: {absent}.
On a machine with one:  make gpu                              (CONSTRAINTS= keeps the torch that is installed there)
Without one:            make gpu ARGS="--device pretended"    rehearses every step
What is known so far:   make gpu ARGS="--report\""""


# ------------------------------------------------------------------ where results are from
STATUS = ("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")


def commit() -> str:
    """The commit, "+" where files differ from it; without git a sum over the sources."""
    try:
        return _git("rev-parse", "--short=12", "HEAD") + "+" * bool(_git(*STATUS))
    except (OSError, subprocess.CalledProcessError):
        return f"sources {_sources()}"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _sources() -> str:
    total = hashlib.sha256()
    for room in ("ir", "tracer", "codegen", "runtime", "benchmarks"):
        for path in sorted((ROOT / room).rglob("*.py")):
            total.update(path.read_bytes())
    return total.hexdigest()[:12]


def environment(kind: str) -> dict[str, str]:
    """Of the processes: compiled kernels are kept under build/, unless the caller says where."""
    caches = {name: str(BUILD / kind / folder) for name, folder in (
        ("FUSEGRAD_CACHE_DIR", "fusegrad"), ("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor"),
    )}  # fmt: skip
    return {**caches, **os.environ}


def surroundings(kind: str) -> dict[str, Any]:
    """What results depend on, asked for in a process of its own: a driver may hang."""
    found = one_answer(kind, f"{HERE}.machine:surroundings", "", environment(kind), 240)
    if found["outcome"] != "ok":
        said = found.get("said", "").strip().splitlines()[-1:]
        return {"absent": "; ".join([*found["faults"], *said])}
    facts = {key: value for key, value in found["facts"].items() if key != "launches"}
    return {**facts, "commit": commit(), "date": today()}


# ------------------------------------------------------------------ the command line
def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = "\n".join(f"    {step.name:<22}{step.what}" for step in STEPS)
    parser = argparse.ArgumentParser(
        "make gpu", description=f"{__doc__}\nsteps:\n{names}", formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "pretended"), default="cuda")
    parser.add_argument("--minutes", type=float, default=20.0, help="of this slice (20)")
    parser.add_argument("--only", type=lambda t: t.split(","), default=[], metavar="STEP,STEP", help="some steps alone")
    parser.add_argument("--report", action="store_true", help="print what is known, run nothing")
    parser.add_argument("--page", action="store_true", help="write the page, the model's times beside; run nothing")
    parser.add_argument("--again", action="store_true", help="try once more what was not right")
    parser.add_argument("--afresh", action="store_true", help="forget the results that there are")
    parser.add_argument("--out", type=Path, help="folder of the results (benchmarks/results; rehearsed: build/gpu)")
    options = parser.parse_args(arguments)
    try:
        options.steps = chosen_steps(options.only)
    except ValueError as error:
        parser.error(str(error))
    return options


def folders(options: argparse.Namespace) -> list[Path]:
    """Where results are written, and where others may be that are gone on from."""
    usual = BUILD if options.device == "pretended" else RESULTS
    return [options.out, usual] if options.out else [usual]


def report(options: argparse.Namespace) -> int:
    """Print every file that there is; with --page, ask the model first, and write the page."""
    files = sorted(folders(options)[0].glob("gpu-*.json"))
    for file in files:
        data = json.loads(file.read_text())
        record = Record(file, data["surroundings"], data)
        if options.page:
            ask_model(record)
            write_page(record)
        print(summary(record, options.steps), end="\n\n")
    if not files:
        print(f"nothing was run yet: there is no gpu-*.json in {folders(options)[0]}")
    return 0


def ask_model(record: Record) -> None:
    """What the static model of this commit says of the cases that were timed goes into the file."""
    device = model_device(record.data["surroundings"]["device"])
    if device is not None:
        record.data["model"] = asked(record.data.get("model", {}), timed_rows(record), device, commit())
        record.write()


def write_page(record: Record) -> None:
    record.path.with_suffix(".md").write_text(page(record, STEPS))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = parsed(arguments)
    if options.report or options.page:
        return report(options)
    known = surroundings(options.device)
    if "absent" in known:
        print(NO_GPU.format(absent=known["absent"]), file=sys.stderr)
        return 2
    record = open_record(folders(options), known, options.afresh)
    record.begin(options.minutes, today())
    day = Day(record, options.device, options.minutes, environment(options.device), options.again)
    try:
        day.run(options.steps)
    finally:
        write_page(record)
    print(summary(record, options.steps))
    print(f"\nwritten to {record.path} and {record.path.with_suffix('.md').name}")
    return int(any(found["faults"] for _, _, found in record.results()))


if __name__ == "__main__":
    sys.exit(main())
