"""`make dist`: a wheel and a source distribution in dist/, and the wheel tried in an environment of its own.

It sees the packages of this environment (torch takes gigabytes), but not its fusegrad; nothing runs in the sources.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
SOURCES = ("pyproject.toml", "Makefile", "constraints.txt", "LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md",
           "mkdocs.yml", "py.typed", "tests/conftest.py", "docs/quickstart.md", "examples/swiglu.py",
           "benchmarks/limits.json")  # fmt: skip
"""What the source distribution has to hold, beside the packages: its tests can be run, and its pages made."""
DEMO = "fusegrad/examples/demo"
"""The one example that a wheel holds, for `fusegrad demo`."""
KEPT_OUT = re.compile(r"(^|/)(build|dist|\.git|\.github|\.venv|__pycache__|fusegrad-demo)/|\.py[co]$|\.so$")


def packages() -> list[str]:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    return [name.replace(".", "/") for name in found]


def wheel_faults(names: Sequence[str]) -> list[str]:
    """A wheel holds the packages, whole, the demo, and nothing else."""
    homes = {n.rpartition("/")[0] for n in names if n.endswith("__init__.py")}
    lacking = [f"no {name}" for name in {*packages(), DEMO} - homes]
    lacking += [f"no {name}" for name in ("fusegrad/py.typed", "fusegrad/__main__.py") if name not in names]
    own = "|".join(map(re.escape, packages()))
    known = re.compile(rf"({own}|{DEMO})/[^/]+\.(py|typed)$|fusegrad-[^/]+\.dist-info/")
    return lacking + [f"{n} is there" for n in names if not known.match(n)]


def sdist_faults(names: Sequence[str]) -> list[str]:
    """A source distribution holds what is needed to test it, and nothing that was made."""
    inside = [n.partition("/")[2] for n in names]
    lacking = [f"no {name}" for name in SOURCES if name not in inside]
    return lacking + [f"{n} is there" for n in inside if KEPT_OUT.search(n)]


def built() -> tuple[Path, Path]:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True, stdout=subprocess.DEVNULL)
        DIST.mkdir(exist_ok=True)
        made = [path.replace(DIST / path.name) for path in sorted(Path(folder).iterdir())]
    (wheel,), (sdist,) = ([p for p in made if p.name.endswith(kind)] for kind in (".whl", ".tar.gz"))
    return wheel, sdist


def quickstart() -> str:
    """The first program of the front page."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1] + "\nprint(fusegrad.__file__)\n"


def tried(wheel: Path, folder: Path) -> str:
    """What the quickstart prints where the wheel alone is fusegrad; raises where it fails."""
    home = folder / "environment"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*install, wheel], check=True)
    (site,) = home.glob("lib/*/site-packages")
    (site / "beside.pth").write_text(sysconfig.get_paths()["purelib"], encoding="utf-8")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "quickstart.py").write_text(quickstart(), encoding="utf-8")
    fusegrad = home / "bin" / "fusegrad"
    for command in ([python, "quickstart.py"], [fusegrad, "demo", "--steps", "1"], [fusegrad, "--version"]):
        told = subprocess.run(command, cwd=elsewhere, check=True, capture_output=True, text=True)
        if str(site) not in told.stdout and command[0] == python:
            raise SystemExit(f"another fusegrad ran:\n{told.stdout}")
    return told.stdout.strip()


def main() -> int:
    wheel, sdist = built()
    with zipfile.ZipFile(wheel) as opened:
        faults = wheel_faults(opened.namelist())
    with tarfile.open(sdist) as archive:
        faults += sdist_faults([m.name for m in archive if m.isfile()])
    for fault in faults:
        print(fault)
    with tempfile.TemporaryDirectory() as folder:
        print(f"{wheel.name} and {sdist.name}: {tried(wheel, Path(folder))} runs from another folder")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
