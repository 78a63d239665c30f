"""`make bench`: what can be measured without a GPU, as one table, a file of results and a picture.

    make bench                                       everything: 10 to 20 minutes on two free cores, into build/bench
    make bench ARGS=--write-docs                     .. into benchmarks/results and docs/benchmarks.md, to be committed
    make bench ARGS="--quick"                        one shape per Function
    make bench ARGS="--only host,latency"            some parts; the others' last results stay
    make bench ARGS="--only streams --peer FILE"     kernels with matmuls, and a file's own beside them
    python -m fusegrad.benchmarks limits             tighten limits.json to what has become better
    python -m fusegrad.benchmarks needs              write needs.json from the last results

Tracked files are written with --write-docs alone. Each part keeps the machine, the versions and the date that it was
measured with; rows that a partial run leaves as they were keep theirs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ..__main__ import Parser
from . import cpu, goals, inductor, instructions, kernels, latency, limits, needs, overhead, picture, plans, report
from . import stream_kernels as products
from .flex_kernels import FLEXED, flex_kernels
from .loop_functions import LOOPS
from .loop_kernels import loops
from .peer_instructions import peer_instructions
from .stream_functions import STREAMS, WIDTHS
from .suite import CASES, Case, chosen

Rows = Iterator[dict[str, Any]]
ROOT = Path(__file__).parents[1]
OUT, BUILT = Path(__file__).with_name("results"), ROOT / "build" / "bench"
"""The folder of the results that are committed, and the one that a run writes to otherwise."""
DOCUMENT = ROOT / "docs" / "benchmarks.md"


# ------------------------------------------------------------------ the parts
def each(measure: Callable[[Any], dict[str, Any]], cases: Sequence[Any], jobs: int, start: Any = None) -> Rows:
    """`measure` of every case by `jobs` processes, in the order of the cases, with progress on stderr."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes inherit it
    began = time.monotonic()
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=start) as processes:
        for done, (case, found) in enumerate(zip(cases, processes.map(measure, cases), strict=True), 1):
            _progress(f"{measure.__name__} {done}/{len(cases)}", getattr(case, "name", case), time.monotonic() - began)
            yield found
    print(file=sys.stderr)


def _progress(what: str, case: str, seconds: float) -> None:
    if sys.stderr.isatty():
        print(f"\r{what}  {case:<44} {seconds:5.0f} s", end="", file=sys.stderr, flush=True)
    else:
        print(f"{what}  {case}  {seconds:.0f} s", file=sys.stderr, flush=True)


def _latencies(quick: bool) -> Rows:
    names = latency.FUNCTIONS[: 1 if quick else None]
    return each(latency.latency, names, jobs=1)  # alone: what runs beside it would be timed, too


def _streams(options: argparse.Namespace) -> Rows:
    """Ours, FlexAttention's, then those of the file that `--peer` names."""
    few = len(STREAMS) // len(WIDTHS) if options.quick else None
    names = _named(list(STREAMS)[:few], options)
    flexed = [name for name in names if name in FLEXED]
    yield from each(products.streams, names, options.jobs, kernels.one_compiler)
    yield from each(products.fast, flexed, options.jobs, kernels.one_compiler)
    yield from each(flex_kernels, flexed, options.jobs, inductor.pretend_gpu)
    yield from products.peers(options.peer) if options.peer else ()


def _named(names: Iterable[str], options: argparse.Namespace) -> list[str]:
    return [name for name in names if options.match in name]


def _beside_peers(options: argparse.Namespace) -> list[Case]:
    """One shape of each Function, and all that the last count found over its budget."""
    rows = read(options.out).get("instructions", {}).get("rows", [])
    over = {row["case"] for row, direction in goals.modelled(rows) if row[direction]["share"] > 1}
    first = {case.name for case in chosen(one_per_function=True)}
    return [case for case in chosen(options.match) if case.name in over | first]


PARTS: dict[str, Callable[[list[Case], argparse.Namespace], Rows]] = {
    "host": lambda cases, options: each(overhead.overhead, ["RMSNorm", "styles"], jobs=1),
    "latency": lambda cases, options: _latencies(options.quick),
    "cpu": lambda cases, options: each(cpu.cpu, cpu.cases(options.match, options.quick), jobs=1),
    "plans": lambda cases, options: each(plans.plan, cases, options.jobs),
    "inductor": lambda cases, options: each(inductor.inductor, cases, options.jobs, inductor.pretend_gpu),
    "kernels": lambda cases, options: each(kernels.kernels, cases, options.jobs, kernels.one_compiler),
    "instructions": lambda cases, options: each(instructions.instructions, cases, options.jobs, kernels.one_compiler),
    "peers": lambda cases, options: each(peer_instructions, _beside_peers(options), options.jobs, inductor.pretend_gpu),
    "streams": lambda cases, options: _streams(options),
    "loops": lambda cases, options: each(loops, _named(LOOPS, options), options.jobs, kernels.one_compiler),
}
"""What is timed comes first, while nothing else runs."""
ALL = tuple(PARTS)


# ------------------------------------------------------------------ running them
def bench(options: argparse.Namespace) -> int:
    """Run the parts asked for, write each result as it comes, print the tables."""
    cases = chosen(options.match, options.quick)
    results = read(options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        began, label = time.monotonic(), {"date": today(), "machine": machine()}
        rows = kept(results.get(name, {}), label)
        for row in PARTS[name](cases, options):
            rows = merged(rows, [row])
            results[name] = {**label, "seconds": round(time.monotonic() - began), "rows": rows}
            write(results, options.out)
    return show(results, options)


def file_of(part: str) -> str:
    return f"{part}.json" if part in ("streams", "loops") else "cpu.json"


def read(folder: Path) -> dict[str, Any]:
    """The results in a folder, of all its files; {} where there are none."""
    files = [folder / name for name in dict.fromkeys(map(file_of, ALL))]
    return {part: rows for f in files if f.exists() for part, rows in json.loads(f.read_text()).items()}


def write(results: dict[str, Any], folder: Path) -> None:
    """Each part into its file."""
    for name in dict.fromkeys(map(file_of, results)):
        (folder / name).write_text(written({p: rows for p, rows in results.items() if file_of(p) == name}))


def kept(part: dict[str, Any], label: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that there were; those of another machine, version or day have its label in `measured`."""
    old = {name: part[name] for name in label if name in part}
    rows: list[dict[str, Any]] = part.get("rows", [])
    return rows if old == label else [{"measured": old, **row} for row in rows]


def merged(known: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that there were, with the new ones in place of those for the same case or Function."""
    return list({row.get("case") or row["function"]: row for row in (*known, *rows)}.values())


def written(results: dict[str, Any]) -> str:
    """JSON with a line for each row."""
    parts = {name: dict(part) for name, part in results.items()}
    rows = {name: part.pop("rows") for name, part in parts.items() if "rows" in part}
    text = json.dumps(parts, indent=1)
    for name, found in rows.items():
        lines = ",\n".join("   " + json.dumps(row) for row in found)
        head = json.dumps(name) + ": {\n"
        text = text.replace(head, f'{head}  "rows": [\n{lines}\n  ],\n')
    return text + "\n"


def show(results: dict[str, Any], options: argparse.Namespace) -> int:
    """Print the tables, draw the picture, write the document."""
    print(report.text(results))
    options.out.mkdir(parents=True, exist_ok=True)
    drawing = options.out / "cpu.svg"
    if not picture.draw(results, drawing):
        print("\nno picture was drawn: matplotlib is not installed (pip install 'fusegrad[bench]')")
    if options.write_docs:
        link = f"../{drawing.relative_to(ROOT)}" if drawing.exists() else None
        DOCUMENT.write_text(report.document(results, link))
    print(f"\nwritten to {options.out}{f' and {DOCUMENT}' if options.write_docs else ''}")
    return 0


def machine() -> dict[str, Any]:
    """What the figures depend on, and nothing that names the machine."""
    return {"processor": _processor(), "cores": os.cpu_count(), "versions": _versions()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in ("torch", "triton", "fusegrad"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def tighten(options: argparse.Namespace) -> int:
    """Write limits.json."""
    old = limits.read()
    plans_of = each(limits.plan_with_instructions, chosen(options.match), options.jobs, kernels.one_compiler)
    new = limits.tightened(old, plans_of, options.raise_)
    new = {case.name: new[case.name] for case in CASES if case.name in new}
    path = tracked(limits.PATH, options)
    limits.write(new, path)
    changed = sum(old.get(name) != limit for name, limit in new.items())
    print(f"{changed} of {len(new)} cases changed in {path}")
    return 0


def tracked(path: Path, options: argparse.Namespace) -> Path:
    """A committed table with --write-docs; else a file of its name beside the results."""
    options.out.mkdir(parents=True, exist_ok=True)
    return path if options.write_docs else options.out / path.name


# ------------------------------------------------------------------ the command line
def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("make bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("command", choices=("parts", "show", "limits", "needs"), nargs="?", default="parts",
                        help="measure (default), print what was measured, or write a table of limits")  # fmt: skip
    parser.add_argument("--only", type=_parts, default=list(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--match", default="", help="only cases whose names contain this")
    parser.add_argument("--quick", action="store_true", help="one shape per Function")
    parser.add_argument("--peer", type=Path, metavar="FILE", help="streams: kernels to compile beside, KERNELS in it")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    add_outputs(parser)
    parser.add_argument("--raise", action="store_true", dest="raise_", help="limits: numbers may become larger, too")
    return placed(parser.parse_args(arguments))


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """--write-docs and the folder; `--out` is a name that it had."""
    parser.add_argument("--write-docs", action="store_true", help="write the tracked files: results, tables, pages")
    parser.add_argument("-o", "--output", "--out", dest="out", type=Path, metavar="FOLDER",
                        help="of the results (build/bench; with --write-docs benchmarks/results)")  # fmt: skip


def placed(options: argparse.Namespace) -> argparse.Namespace:
    """With the folder that was meant where none was given."""
    options.out = options.out or (OUT if options.write_docs else BUILT)
    return options


def _parts(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(PARTS):
        raise argparse.ArgumentTypeError(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return [name for name in PARTS if name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = parsed(arguments)
    if options.command == "limits":
        return tighten(options)
    if options.command == "needs":
        path = tracked(needs.PATH, options)
        needs.write(_last(options)["kernels"]["rows"], path)
        print(f"written to {path}")
        return 0
    return show(_last(options), options) if options.command == "show" else bench(options)


def _last(options: argparse.Namespace) -> dict[str, Any]:
    """The results in the folder; those that are committed where it has none."""
    return read(options.out) or read(OUT)


if __name__ == "__main__":
    sys.exit(main())
