"""`make newcomer`: docs/tutorial.md on a fresh clone with a fresh environment, and the seconds that each step takes.

The Python blocks of a section run one after the other in one process, as in a reader's session; what the page does in a
shell runs there. benchmarks/results/newcomer.json holds the seconds with machine, versions and date.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = "docs/tutorial.md"
RESULTS = ROOT / "benchmarks" / "results" / "newcomer.json"
FILE = "gated_rms_norm.py"
SESSION = """
import json, sys, time
sections, folder = json.loads(sys.argv[1]), sys.argv[2]
space, seconds = {"__name__": "__main__"}, {}
for title, blocks in sections:
    for at, text in enumerate(blocks):
        began = time.perf_counter()
        source = f"{folder}/{len(seconds)}_{at}.py"  # methods are traced by their source
        with open(source, "w") as file:
            file.write(text)
        exec(compile(text, source, "exec"), space)
        seconds[title] = seconds.get(title, 0.0) + time.perf_counter() - began
print(json.dumps({"seconds": seconds, "file": str(space["folder"])}))
"""
VERSIONS = "import json; from importlib.metadata import version; print(json.dumps({n: version(n) for n in %r}))"


def sections(page: str) -> list[tuple[str, list[str]]]:
    """The sections of a page that have Python blocks, each with its blocks."""
    parts = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    found = [(part.partition("\n")[0], re.findall(r"^```python\n(.*?)^```", part, re.DOTALL | re.M)) for part in parts]
    return [(title, blocks) for title, blocks in found if blocks]


def with_import_apart(found: Sequence[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    """The imports of the first block as a step of their own: they are what a reader waits for first."""
    (title, (first, *others)), *rest = found
    lines = first.split("\n\n\n")[0]
    return [("import", [f"{lines}\nimport torch.autograd\n"]), (title, [first, *others]), *rest]


class Steps:
    """Seconds by step, in their order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def run(self, name: str, command: Sequence[object], folder: Path | None = None) -> str:
        """What a command prints; raises CalledProcessError with its errors on stderr."""
        print(f"{name} ..", file=sys.stderr, flush=True)
        began = time.perf_counter()
        words = [str(word) for word in command]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FUSEGRAD"))}
        environment |= {"FUSEGRAD_CACHE_DIR": str(folder / "cache")} if folder else {}
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment)
        self.seconds[name] = time.perf_counter() - began
        return done.stdout


def first_hour(folder: Path, python: str) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds by step, and the versions that were installed."""
    steps, clone, home = Steps(), folder / "fusegrad", folder / "environment"
    steps.run("clone", ["git", "clone", "--quiet", ROOT, clone])
    steps.run("environment", [python, "-m", "venv", home])
    here = home / "bin" / "python"
    install = [here, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", clone / "constraints.txt"]
    steps.run("install torch", [*install, "torch>=2.11"])
    steps.run("install fusegrad", [*install, "-e", clone])
    work = folder / "work"
    work.mkdir()
    parts = with_import_apart(sections((clone / TUTORIAL).read_text(encoding="utf-8")))
    said = steps.run("the tutorial, in all", [here, "-c", SESSION, json.dumps(parts), work], work)
    session = json.loads(said.splitlines()[-1])
    whole = steps.seconds.pop("the tutorial, in all")
    steps.seconds |= session["seconds"] | {"the tutorial, in all": whole}
    steps.run("running the exported file", [here, Path(session["file"]) / FILE], work)
    command = [home / "bin" / "fusegrad", "explain", clone / "examples/swiglu.py:SwiGLU"]
    steps.run("`fusegrad explain`, from a shell", [*command, "bf16[4096,4096]", "bf16[4096,4096]"], work)
    return steps.seconds, json.loads(steps.run("versions", [here, "-c", VERSIONS % (("torch", "triton", "fusegrad"),)]))


def table(seconds: dict[str, float]) -> Iterator[str]:
    """A line a step: its seconds, and those since the beginning; the session's sum is no step of its own."""
    total = 0.0
    for name, each in seconds.items():
        total += 0.0 if name in NOT_COUNTED else each
        yield f"{each:8.1f} s  {total:8.1f} s  {name}"


NOT_COUNTED = ("the tutorial, in all", "versions")


def processor() -> str:
    """The processor's name, nothing that names the machine."""
    return in_file(Path("/proc/cpuinfo"), lambda line: line.startswith("model name")) or platform.machine()


def in_file(path: Path, wanted: Callable[[str], bool]) -> str:
    """The value behind a colon of the first line that is wanted; "" where there is none."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if wanted(line)), "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("make newcomer", description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the fresh environment")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS, help="the file of results")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        seconds, versions = first_hour(Path(folder), options.python)
    seconds.pop("versions")
    machine = {"processor": processor(), "cores": os.cpu_count()}
    facts = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "machine": machine,
             "versions": {"Python": platform.python_version(), **versions},
             "seconds": {name: round(each, 1) for name, each in seconds.items()}}  # fmt: skip
    options.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print("\n".join([" seconds        so far", *table(seconds), f"written to {options.output}"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
