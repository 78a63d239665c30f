"""The packages' own tests, plain and under `--fusegrad=auto`: compared outcome by outcome.

Tests come with a package as it is installed, with its source distribution, which pip fetches, or from a commit of its
repository: of a copy under $WORLD_REPOSITORIES (<owner>+<name>/repo), or by git. The table tells what cannot be had.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packages import SUITES, Suite
from surroundings import ROOT, version

HERE = Path(__file__).resolve().parent
KEPT = ROOT / "build" / "world"
PLUGIN = ("-p", "fusegrad.runtime.pytest_plugin", "--fusegrad=auto")
Told = dict[str, Any]


@dataclass
class Outcomes:
    """What one run of a suite told: the outcome and the error of each test, and its time on the processor."""

    seconds: float
    by_test: dict[str, tuple[str, str]] = field(default_factory=dict)
    ended: str = ""

    def told(self) -> Told:
        counts = Counter(outcome for outcome, _ in self.by_test.values())
        return {"seconds": round(self.seconds, 1), "outcomes": dict(counts), "ended": self.ended}


def run(results: Any, only: Sequence[str], again: bool) -> None:
    """Every suite that is not known yet."""
    for suite in SUITES:
        if (only and suite.name not in only) or (suite.name in results.told["suites"] and not again):
            continue
        fact = compared(suite)
        results.put("suites", suite.name, fact)
        print(f"{suite.name}: {fact.get('absent') or fact['differ']}", flush=True)


def compared(suite: Suite) -> Told:
    """Both runs, and the tests whose outcome differs."""
    place, beside = folder(suite), [archived(*source) for source in suite.beside]
    absent = next((found for found in (place, *beside) if isinstance(found, str)), None)
    if absent is not None or isinstance(place, str):
        return {"absent": absent}
    helpers = [str(found) for found in beside]
    plain, fast = once(suite, place, (), helpers), once(suite, place, PLUGIN, helpers)
    return {"tests": len(plain.by_test), "plain": plain.told(), "fusegrad": fast.told(), "differ": differ(plain, fast)}


def differ(plain: Outcomes, fast: Outcomes) -> list[list[str]]:
    """Test, outcome of the plain run, outcome under the plugin, its error."""
    missing = ("not run", "")
    tests = sorted(plain.by_test.keys() | fast.by_test.keys())
    pairs = [(test, plain.by_test.get(test, missing), fast.by_test.get(test, missing)) for test in tests]
    return [[test, before[0], after[0], after[1]] for test, before, after in pairs if before[0] != after[0]]


def once(suite: Suite, place: Path, plugin: Sequence[str], helpers: Sequence[str]) -> Outcomes:
    """The suite in a process of its own; one that takes too long is ended, and counts as far as it came.

    helpers: folders whose modules the tests import.
    """
    with tempfile.TemporaryDirectory() as scratch:
        record = Path(scratch) / "outcomes.jsonl"
        record.touch()
        settings = Path(scratch) / "pytest.ini"  # else those of the folders above, in the end fusegrad's, would count
        settings.write_text("[pytest]\n", encoding="utf-8")
        for name, text in suite.lacking:
            helper = Path(scratch) / "lacking" / name
            helper.parent.mkdir(parents=True, exist_ok=True)
            helper.write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-c", str(settings), "--rootdir=.", "-p", "outcomes",
                   "-p", "no:cacheprovider", *plugin, *suite.options, *suite.paths]  # fmt: skip
        wanted = [str(HERE), str(Path(scratch) / "lacking"), *helpers, os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(filter(None, wanted))
        world = {**os.environ, "WORLD_OUTCOMES": str(record), "PYTHONPATH": path, **dict(suite.environment)}
        before, ended = _used(), ""
        try:
            done = subprocess.run(command, cwd=place, env=world, timeout=suite.seconds, capture_output=True, text=True)
            ended = "" if record.stat().st_size else (done.stderr or done.stdout)[-200:].strip()
            if done.returncode < 0:
                ended = f"killed by {signal.Signals(-done.returncode).name}"
        except subprocess.TimeoutExpired:
            ended = f"ended after {suite.seconds} s"
        lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
        return Outcomes(_used() - before, {test: (outcome, why) for test, outcome, why in lines}, ended)


def _used() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# ------------------------------------------------------------------ where the tests are
def folder(suite: Suite) -> Path | str:
    """The folder in which the tests run, or why there is none."""
    if suite.repository:
        return archived(suite.repository, suite.commit, suite.under, (*suite.paths, *suite.further))
    if suite.distribution is None:
        return _installed(suite)
    place = KEPT / "sources" / suite.distribution
    if not place.exists() and (why := _fetched(suite.distribution, place)) is not None:
        return why
    return next((path for path in place.iterdir() if path.is_dir()), place)


def _installed(suite: Suite) -> Path | str:
    spec = importlib.util.find_spec(suite.inside)
    if spec is None or spec.origin is None:
        return f"{suite.inside} is not installed"
    return Path(spec.origin).parent


def archived(repository: str, commit: str, under: str, paths: Sequence[str] = ()) -> Path | str:
    """The tests of a commit: the folder that they run in, or else the first of each of their paths."""
    place = KEPT / "sources" / f"{repository.replace('/', '+')}-{commit[:10]}"
    parts = [under] if under else sorted({path.split("/")[0] for path in paths})
    if not all((place / part).exists() for part in parts):
        place.mkdir(parents=True, exist_ok=True)
        git = ["git", f"--git-dir={_git_directory(repository, commit, place)}", f"--work-tree={place}"]
        world = {**os.environ, "GIT_INDEX_FILE": str(place / "index")}  # no archive: a copy may lack its largest files
        done = subprocess.run([*git, "checkout", commit, "--", *parts], capture_output=True, text=True, env=world)
        if not all((place / part).exists() for part in parts):
            return f"no commit {commit[:10]} of {repository} can be had: {done.stderr.strip()[-100:]}"
    return place / under


def _git_directory(repository: str, commit: str, place: Path) -> Path:
    """One with the commit, if it can be had."""
    copies = os.environ.get("WORLD_REPOSITORIES")
    copy = Path(copies) / repository.replace("/", "+") / "repo" if copies else None
    if copy is not None and copy.exists():
        return copy
    made = place / "fetched.git"
    subprocess.run(["git", "init", "-q", "--bare", str(made)], check=True)
    address = f"https://github.com/{repository}"
    subprocess.run(["git", f"--git-dir={made}", "fetch", "-q", "--depth=1", address, commit], capture_output=True)
    return made


def _fetched(distribution: str, place: Path) -> str | None:
    """The source distribution of the installed version, unpacked."""
    asked = f"{distribution}=={version(distribution)}"
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:",
             "-d", scratch, asked], capture_output=True, text=True)  # fmt: skip
        archive = next(Path(scratch).glob("*.tar.gz"), None)
        if archive is None:
            return f"no source distribution of {asked}: {done.stderr.strip().splitlines()[-1:]}"
        place.mkdir(parents=True)
        with tarfile.open(archive) as packed:
            packed.extractall(place, filter="data")
    return None
