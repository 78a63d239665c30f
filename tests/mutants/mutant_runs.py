"""Mutation testing: `make mutants N=200`. Changes one place of the generator or of a transform, and runs the tests.

A mutant is killed if a test fails or hangs. The tests run from those nearest to the module to all that see a result.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mutation_sites import Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "trust"))

import outcome  # noqa: E402

MEANING = ("codegen", "ir/passes", "ir/transforms")
"""Where a slip can make a wrong result."""
PLANS = ("schedule", "strided_pairs", "rooflines", "op_counts", "place", "tuning_candidates", "loop_nests", "strips")
"""Modules that choose among right kernels: a slip there costs speed first of all. Counted apart."""
RANDOM = "tests/codegen/test_random_graphs.py"
DERIVED = ("tests/runtime/functorch/test_derive_jvp.py", "tests/runtime/compiled/test_derived_backward.py")
NEAREST: dict[str, tuple[str, ...]] = {
    "ir/passes": ("tests/ir", RANDOM),
    "ir/transforms": ("tests/ir/transforms", *DERIVED),
    "codegen": (RANDOM, *(f"tests/codegen/test_{name}.py" for name in ("golden", "bodies", "primitives", "layout"))),
}
STAGES: tuple[tuple[str, ...], ...] = (
    ("tests/codegen", "tests/ir"),
    ("tests/suite", "tests/runtime", "tests/compose"),
    ("tests/contract", "tests/exporting", "tests/benchmarks", "tests/conformance", "tests/everywhere"),
)
LIMIT = 3600  # seconds for a stage that waits for something; processor time has its own limit


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: killed by a test, by a limit of time, or alive after every stage."""

    mutant: str
    killed: bool
    by: str
    seconds: float


def main() -> int:
    asked = _arguments()
    record = Record("mutants_plans" if asked.plans else "mutants", asked)
    chosen = _alive(record) if asked.again else _chosen(asked, len(record.verdicts))
    print(f"{len(chosen)} mutants, seed {asked.seed}", flush=True)
    if not record.is_of_these_sources() and not asked.tests:
        _require_green(asked.stages)
    until = time.monotonic() + 60 * asked.minutes

    def judge(mutant: Mutant) -> None:
        if time.monotonic() < until:
            verdict = _told(_judged(mutant, [asked.tests] if asked.tests else _stages(mutant, asked.stages)))
            if verdict.killed or not asked.tests:
                record.add(verdict)

    with ThreadPoolExecutor(asked.jobs) as pool:
        list(pool.map(judge, chosen))
    print(f"{record.killed} of {len(record.verdicts)} killed")
    return 1 if record.killed < len(record.verdicts) * 0.95 else 0


class Record:
    """The verdicts, on disk after each one; a run may go on where another one stopped, on what the sources are now."""

    def __init__(self, name: str, asked: argparse.Namespace) -> None:
        self.name, self.asked, self.lock, self.commit = name, asked, threading.Lock(), outcome.surroundings()["commit"]
        path = outcome.RESULTS / f"{name}.json"
        before = json.loads(path.read_text(encoding="utf-8")) if asked.resume and path.exists() else {"verdicts": []}
        self.verdicts: list[dict[str, Any]] = before["verdicts"]

    def is_of_these_sources(self) -> bool:
        """Whether mutants of this very commit were judged before, after its tests had passed without one."""
        return any(v["commit"] == self.commit for v in self.verdicts) and not self.commit.endswith("dirty")

    @property
    def killed(self) -> int:
        return sum(v["killed"] for v in self.verdicts)

    def forget_but(self, names: set[str]) -> None:
        """Those that lived in code that is gone, or that no mutant is made of any more."""
        self.verdicts = [v for v in self.verdicts if v["killed"] or v["mutant"] in names]
        self._write()

    def add(self, verdict: Verdict) -> None:
        """In the place of an earlier verdict on the same mutant, where there is one."""
        with self.lock:
            self.verdicts = [v for v in self.verdicts if v["mutant"] != verdict.mutant]
            self.verdicts.append({**asdict(verdict), "commit": self.commit})
            self._write()

    def _write(self) -> None:
        told = {"seed": self.asked.seed, "plans": self.asked.plans, "killed": self.killed, "of": len(self.verdicts)}
        if self.asked.json:
            outcome.write(self.name, {**told, "verdicts": self.verdicts})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("-n", type=int, default=200, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--stages", type=int, default=len(STAGES), help="how many stages after the nearest tests")
    parser.add_argument("--plans", action="store_true", help="of the modules that choose among right kernels")
    parser.add_argument("--only", default="", help="mutants whose place contains this")
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/trust/mutants.json")
    parser.add_argument("--resume", action="store_true", help="as many as that file lacks")
    parser.add_argument("--again", action="store_true", help="with --resume: those that lived, with more stages")
    parser.add_argument("--tests", nargs="+", help="with --again: these tests alone; who lives keeps his verdict")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no mutant after so many")
    return parser.parse_args()


def _chosen(asked: argparse.Namespace, done: int) -> list[Mutant]:
    """The same for the same seed, sources, and number of those that are done."""
    every = [m for path in modules(asked.plans) for m in mutants(path, ROOT) if asked.only in str(m)]
    return random.Random(asked.seed + done).sample(every, min(max(asked.n - done, 0), len(every)))


def _alive(record: Record) -> list[Mutant]:
    """The mutants that lived through a run with fewer stages, in the sources of now."""
    every = {str(m): m for path in modules(record.asked.plans) for m in mutants(path, ROOT)}
    record.forget_but(set(every))
    return [every[v["mutant"]] for v in record.verdicts if not v["killed"] and record.asked.only in v["mutant"]]


def modules(plans: bool) -> Iterator[Path]:
    for folder in MEANING:
        found = (p for p in sorted((ROOT / folder).rglob("*.py")) if "proofs" not in p.relative_to(ROOT).parts)
        yield from (p for p in found if (p.stem in PLANS) == plans)


def _stages(mutant: Mutant, stages: int) -> list[Sequence[str]]:
    """The nearest tests, then the further ones, none of them twice."""
    nearest = _nearest(mutant)
    passed = [f"--ignore={tests}" for tests in nearest]
    return [nearest, *((*(tests for tests in stage if tests not in nearest), *passed) for stage in STAGES[:stages])]


def _judged(mutant: Mutant, stages: Sequence[Sequence[str]]) -> Verdict:
    start = time.monotonic()
    for tests in stages:
        by = unnoticed(mutant, tests)
        if by:
            return Verdict(str(mutant), True, by, round(time.monotonic() - start, 1))
    return Verdict(str(mutant), False, "", round(time.monotonic() - start, 1))


def _require_green(stages: int) -> None:
    """What fails without a change says nothing about one."""
    path = Path("ir/rewrite.py")
    whole = Mutant(path, 1, "", "", (ROOT / path).read_text(encoding="utf-8"))
    for tests in STAGES[:stages]:
        if failed := unnoticed(whole, tests):
            sys.exit(f"without a mutant: {failed}")


def _nearest(mutant: Mutant) -> tuple[str, ...]:
    return next(tests for folder, tests in NEAREST.items() if mutant.path.as_posix().startswith(folder))


def unnoticed(mutant: Mutant, tests: Sequence[str]) -> str:
    """The test that failed, or "" where all passed."""
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("mutant_trial.py")), str(mutant.path), *tests],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, start_new_session=True, cwd=ROOT,
    )  # fmt: skip
    try:
        out, _ = child.communicate(mutant.text, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return "a limit of time"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    if child.returncode == 0:
        return ""
    if child.returncode in (-signal.SIGKILL, -signal.SIGXCPU):
        return "a limit of processor time"
    failed = [line for line in out.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"exit code {child.returncode}"


def _told(verdict: Verdict) -> Verdict:
    state = "killed" if verdict.killed else "ALIVE "
    print(f"{state} {verdict.seconds:6.1f} s  {verdict.mutant}  {verdict.by}", flush=True)
    return verdict


if __name__ == "__main__":
    sys.exit(main())
