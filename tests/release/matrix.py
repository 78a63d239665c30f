"""`make matrix`: the tests with several pairs of torch and triton, each in an environment under build/matrix.

An environment that has the pair already is used again. CUDA builds of torch take gigabytes; no GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "build" / "matrix"
PIECES = sorted(p.name for p in (ROOT / "tests").iterdir() if any(p.rglob("test_*.py")))
"""Folders of tests, run one after the other: what one of them leaves behind is not the next one's."""
BESIDE = ("numpy<2.4", "networkx", "sympy", "setuptools", "pytest", "pytest-xdist", "pytest-timeout", "hypothesis",
          "expecttest", "ninja", "rich", "cloudpickle", "transformers")  # fmt: skip
"""Triton 3.6 has an interpreter of its own that numpy 2.4 breaks: exported modules use it."""
CLOSING = re.compile(r"(\d+) (passed|failed|skipped|errors?|deselected)")


def pairs(text: str) -> list[tuple[str, str]]:
    """ "2.11.0:3.6.0 newest" -> [("2.11.0", "3.6.0"), ("", "")]; "" is whatever pip takes."""
    return [("", "") if word == "newest" else tuple(word.split(":")) for word in text.split()]  # type: ignore[misc]


def python_of(pair: tuple[str, str]) -> Path:
    return HOME / ("-".join(pair) if pair[0] else "newest") / "bin" / "python"


def installed(python: Path) -> tuple[str, str]:
    """torch and triton of an environment, without what follows a `+`."""
    ask = "import importlib.metadata as m; print(*[m.version(n).partition('+')[0] for n in ('torch', 'triton')])"
    told = subprocess.run([python, "-c", ask], capture_output=True, text=True)
    words = told.stdout.split()
    return (words[0], words[1]) if len(words) == 2 else ("", "")


def prepared(pair: tuple[str, str], base: str) -> Path:
    """The interpreter of an environment with this pair, made if need be, in which the sources are the package."""
    python = python_of(pair)
    if python.exists() and (installed(python) == pair or (not pair[0] and installed(python)[0])):
        return python
    subprocess.run([base, "-m", "venv", python.parents[1]], check=True)
    named = zip(("torch", "triton"), pair, strict=True)
    wanted = [f"{name}=={version}" if version else name for name, version in named]
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *wanted], check=True)  # first and alone, so that nothing else chooses a version
    subprocess.run([*pip, *BESIDE], check=True)
    return python


def site() -> str:
    """A folder in which the root goes by the package's name."""
    link = HOME / "site" / "fusegrad"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(ROOT)
    return str(link.parent)


def counts(output: str) -> dict[str, int]:
    """What pytest's closing line counts."""
    return {word.rstrip("s") if word.startswith("error") else word: int(n)
            for n, word in CLOSING.findall(output.strip().rpartition("\n")[2])}  # fmt: skip


def run(python: Path, piece: str, arguments: list[str]) -> tuple[dict[str, int], str]:
    """One folder of tests: what was counted, and what was said."""
    environment = {**os.environ, "PYTHONPATH": site(), "OMP_NUM_THREADS": "1"}
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=300", "--tb=short", "-rf"]
    told = subprocess.run(
        [*command, f"tests/{piece}", *arguments], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    found = counts(told.stdout)
    if told.returncode not in (0, 1, 5):
        found["error"] = found.get("error", 0) + 1
    return found, told.stdout


def report(pair: tuple[str, str], pieces: list[str], base: str, arguments: list[str]) -> dict[str, dict[str, int]]:
    """The tests of one pair, folder by folder, with what failed."""
    python = prepared(pair, base)
    have, rows = installed(python), {}
    print(f"torch {have[0]}, triton {have[1]}", flush=True)
    for piece in pieces:
        begun = time.monotonic()
        rows[piece], said = run(python, piece, arguments)
        told = ", ".join(f"{n} {word}" for word, n in rows[piece].items()) or "nothing ran"
        print(f"  {piece:12} {told}  ({time.monotonic() - begun:.0f} s)", flush=True)
        for line in said.splitlines():
            if line.startswith(("FAILED", "ERROR")):
                print(f"    {line}", flush=True)
    return rows


def failures(rows: dict[str, dict[str, int]]) -> int:
    return sum(row.get("failed", 0) + row.get("error", 0) for row in rows.values())


def main() -> int:
    from fusegrad.ir.versions import TRIED

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", default=" ".join(":".join(pair) for pair in TRIED) + " newest")
    parser.add_argument("--pieces", nargs="*", default=PIECES, help="folders below tests/")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that environments are made with")
    parser.add_argument("--json", type=Path, help="where to write what was counted")
    parser.add_argument("pytest", nargs="*", help="more arguments for pytest, behind --")
    asked = parser.parse_args()
    found = {":".join(p) if p[0] else "newest": report(p, asked.pieces, asked.python, asked.pytest)
             for p in pairs(asked.pairs)}  # fmt: skip
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return int(any(map(failures, found.values())))


if __name__ == "__main__":
    sys.exit(main())
