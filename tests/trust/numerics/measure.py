"""`make numerics`: measures every primitive, reduction, ATen operation and derivative, and writes docs/numerics.md.

    python tests/trust/numerics/measure.py [--only NAME ...] [--page]

`--page` writes the page from what is on record; `--only` prints some rows and writes nothing. Exits with 1 where the
bound is broken or a result is of another class than eager's.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests" / "codegen"), str(ROOT / "tests" / "tracer")]
os.environ.setdefault("FUSEGRAD_STORE", "0")

import derivative_rows  # noqa: E402
import nvidia  # noqa: E402
import operator_rows  # noqa: E402
import primitive_rows  # noqa: E402
import reduction_rows  # noqa: E402
import torch  # noqa: E402
from accuracy import NEIGHBOURS, Errors  # noqa: E402
from numerics_page import KNOWN, page  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "trust" / "numerics.json"
PAGE = ROOT / "docs" / "numerics.md"
Row = dict[str, Any]


def row(op: str, dtype: str, errors: Errors, **more: Any) -> Row:
    return {"op": op, "dtype": dtype, **dataclasses.asdict(errors), **more}


def primitives(only: set[str]) -> Iterator[Row]:
    for name in primitive_rows.elementwise():
        for dtype in primitive_rows.dtypes_of(name) if not only or name in only else ():
            yield row(name, dtype, primitive_rows.measured(name, dtype))
    for source in (*primitive_rows.FLOATS, *primitive_rows.WHOLE) if not only or "cast" in only else ():
        worst = max((e for _, e in primitive_rows.casts(source)), key=lambda e: (not e.good, e.found))
        yield row("cast", source, worst)


def reductions(only: set[str]) -> Iterator[Row]:
    for name in reduction_rows.NAMES:
        for dtype in reduction_rows.dtypes_of(name) if not only or name in only else ():
            for label, errors in reduction_rows.measured(name, dtype):
                yield row(name, dtype, errors, rows=label)


def operators(only: set[str]) -> Iterator[Row]:
    """One row for each overload and dtype: the worst case by what is wrong, then by its error."""
    known = operator_rows.lowered_ops()
    wanted = (lambda info: info.name in only) if only else (lambda info: True)
    dtypes = (*operator_rows.FLOATS, *operator_rows.WHOLE)
    shown = operator_rows.by_op(operator_rows.all_shown(wanted, dtypes))
    for (op, dtype), each in sorted(shown.items()):
        lowered = [s.errors["reference"] for _, s in each if "reference" in s.errors]
        kernels = [s.errors["interpret"] for _, s in each if "interpret" in s.errors]
        worst = max((*lowered, *kernels), key=lambda e: (not e.good, e.found), default=None)
        if worst is not None:
            kernel = max((k.found for k in kernels), default=None)
            most = dataclasses.replace(worst, found=max(e.found for e in lowered), eager=max(e.eager for e in lowered))
            yield row(op, dtype, most, how=known[op], samples=len(each), interpret=kernel)
    if not only:
        for op in sorted(known.keys() - {op for op, _ in shown}):
            yield row(op, "", Errors(0, 0, 0, 0, 0), how=known[op], samples=0, interpret=None)


def derivatives(only: set[str]) -> Iterator[Row]:
    for name in derivative_rows.VALUES:
        if not only or name in only:
            yield row(name, "f32", derivative_rows.forward(name), kind="values")
    for name in derivative_rows.SINGULAR:
        if not only or name in only:
            yield row(name, "f32", derivative_rows.singular(name), kind="derivative")
    for name in derivative_rows.of_primitives():
        if not only or name in only:
            yield row(name, "f32", derivative_rows.primitive(name), kind="primitive")


def on_nvidia(only: set[str]) -> dict[str, Row]:
    """What every primitive of floats becomes for sm_90."""
    found = {}
    for name in primitive_rows.elementwise():
        if "f32" in primitive_rows.dtypes_of(name) and name != "where" and (not only or name in only):
            operands = 1 if name in primitive_rows.UNARY else 2
            used = nvidia.instructions(primitive_rows.body_of(name), "f32", operands)
            found[name] = {"instructions": sorted(used), "calls": nvidia.called(name), "bound": nvidia.bound(name)}
    return found


def facts() -> Row:
    import triton

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "commit": commit, "date": str(datetime.date.today()), "torch": torch.__version__,
        "neighbours": NEIGHBOURS,
        "versions": f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}",
        "machine": f"a machine with {os.cpu_count()} {platform.machine()} cores and no GPU",
        "seed": "fixed, in dense.py",
    }  # fmt: skip


MEASURES = {"primitives": primitives, "reductions": reductions, "derivatives": derivatives, "operators": operators}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--parts", nargs="*", default=[*MEASURES, "nvidia"], choices=[*MEASURES, "nvidia"])
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(page(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
        return 0
    torch.set_num_threads(1)
    bad = measure(options)
    print(f"{bad} rows break the bound")
    return int(bad > 0)


def measure(options: argparse.Namespace) -> int:
    """All parts, each on record as soon as it is complete; how many rows are bad."""
    only, bad, found = set(options.only), 0, {}
    for part in options.parts:
        rows: Any = on_nvidia(only) if part == "nvidia" else list(_told(part, only))
        bad += sum(1 for r in rows if part != "nvidia" and (r["over"] or r["odd"]) and r["op"] not in KNOWN)
        if not only:
            found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
            found |= {**facts(), part: rows}
            RESULTS.parent.mkdir(parents=True, exist_ok=True)
            RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not only and found.keys() >= {*MEASURES, "nvidia"}:
        PAGE.write_text(page(found), encoding="utf-8")
    return bad


def _told(part: str, only: set[str]) -> Iterator[Row]:
    for r in MEASURES[part](only):
        mark = f"  BAD over {r['over']} odd {r['odd']} of {r['count']}: {r['worst']}" if r["over"] or r["odd"] else ""
        print(f"{part} {r['op']} {r['dtype']} eager {r['eager']:.3g} ours {r['found']:.3g}{mark}", flush=True)
        yield r


if __name__ == "__main__":
    sys.exit(main())
