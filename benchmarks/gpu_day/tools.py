"""Other programs, each with what it says: fusegrad's doctor, pytest, compute-sanitizer."""

from __future__ import annotations

import argparse
import glob
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from .worker import PRETENDED

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")


# ------------------------------------------------------------------ doctor
def doctor(unit: str, kind: str) -> dict[str, Any]:
    """Its findings; what it calls a fault is one."""
    from fusegrad.runtime.commands import doctor as command

    if kind == "pretended":  # Inductor's own launches are not pretended
        command.BACKENDS = tuple(name for name in command.BACKENDS if name != "inductor")  # type: ignore[assignment]
    facts = command.run(argparse.Namespace(quick=False)).facts
    findings = [f for part in facts.values() for f in part]
    said = {f["what"]: f["found"] for f in findings}
    return {"faults": [f"{f['what']}: {f['found']}" for f in findings if f["state"] == "fault"], "findings": said}


# ------------------------------------------------------------------ tests
SELECTED = ["-q", "-m", "gpu", "-p", "no:cacheprovider"]


def files_marked() -> list[str]:
    """Test files with tests marked gpu; what is in tests/gpu are steps of the day by themselves."""
    files = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    return [str(path.relative_to(ROOT)) for path in files if path.parent.name != "gpu"]


def tests(unit: str, kind: str) -> dict[str, Any]:
    """pytest on the tests marked gpu, in a process of its own."""
    if importlib.util.find_spec("pytest") is None:
        return {"skipped": "pytest is not installed"}
    first = f"import sys; sys.path.insert(0, {str(PRETENDED)!r}); import launches; " if kind == "pretended" else ""
    last = f"import sys, pytest; sys.exit(pytest.main({[*SELECTED, *files_marked()]!r}))"
    done = subprocess.run([sys.executable, "-c", first + last], cwd=ROOT, capture_output=True, text=True, timeout=230)
    lines = done.stdout.strip().splitlines() or [done.stderr[-300:]]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    wrong = failed or ([] if done.returncode == 0 else lines[-3:])
    return {"faults": wrong, "said": lines[-1]}


# ------------------------------------------------------------------ compute-sanitizer
PLACES = ("/usr/local/cuda*/bin", "/opt/cuda*/bin", f"{sys.prefix}/lib/python*/site-packages/nvidia/*/bin")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")


def compute_sanitizer() -> str | None:
    """Where it is, or None."""
    homes = [f"{os.environ['CUDA_HOME']}/bin"] if "CUDA_HOME" in os.environ else []
    folders = [folder for place in (*homes, *PLACES) for folder in sorted(glob.glob(place), reverse=True)]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def sanitizer(unit: str, kind: str) -> dict[str, Any]:
    """`checks:counting` under a tool of compute-sanitizer; on a pretended GPU, without it, alone."""
    program = compute_sanitizer()
    if program is None and kind == "cuda":
        return {"skipped": "compute-sanitizer is not installed (it comes with the CUDA toolkit)"}
    command = [sys.executable, "-P", str(WORKER), kind, "fusegrad.benchmarks.gpu_day.checks:counting"]
    if program:
        command = [program, "--tool", unit, "--target-processes", "application-only", "--error-exitcode", "9", *command]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # every tensor has bounds of its own
    asked = json.dumps({"unit": unit}) + "\n"
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=175, env=environment)
    wrong = _sanitizer_faults(done.returncode, done.stdout, done.stderr)
    return {"faults": wrong, "program": "compute-sanitizer" if program else "none"}


def _sanitizer_faults(code: int, said: str, errors: str) -> list[str]:
    """What the tool counted, and what the program under it answered."""
    text = said + errors
    wrong = [line.strip("= ") for line in text.splitlines() if (m := SUMMARY.search(line)) and m[1] != "0"]
    answers = [json.loads(line) for line in said.splitlines() if line.startswith('{"') and '"outcome"' in line]
    wrong += [fault for answer in answers for fault in answer["faults"]]
    if (code and not wrong) or not answers:
        wrong.append(f"the process ended with {code}: {text[-600:]}")
    return wrong
