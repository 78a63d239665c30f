"""`fusegrad.check`: a compiled Function against the one that you wrote, case by case, with a table of what was found.

A case is a mode (backward, vmap, ...) on tensors: the user's own, and variations of them in size, layout and dtype.
Eager is the judge; where it has no rule, `mathematics.py` is; a run of eager in float64 says how near is near.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...ir.errors import FusegradError
from ...tracer.function import backward_method, method_place
from ..report.explain import compiler_of
from ..settings.config import BACKENDS, patch
from ..specialize.compiled import Compiled
from .cases import DTYPES, SIZES, Plan, shapes
from .compare import Difference, Outcome, Tolerance, error_text, errors, first_difference
from .layouts import LAYOUTS, all_cast
from .modes import DERIVABLE, MODES, Transforms
from .reference_transforms import Differences, Mathematics
from .subject import Case, CheckArgumentError, Subject, examined, name_of

TOO_MANY = 250_000  # entries of a jacobian
SLOW = 10.0


class CheckError(FusegradError, AssertionError):
    """A compiled Function is not what the user wrote. `report` and `reproducer` are attributes."""

    message = (
        "check({function}): {mode}, {case}, {backend}: {difference}\n  at:   {where}\n"
        "  fix:  please report it with the script below; `is_traceable = False` runs the class as you wrote it.\n\n"
        "{reproducer}"
    )

    def __init__(self, report: Report, reproducer: str, **facts: Any) -> None:
        super().__init__(reproducer=reproducer, **facts)
        self.report, self.reproducer = report, reproducer


# ------------------------------------------------------------------ the report
@dataclass
class Row:
    """What became of a case. Errors are distances from float64 in ulp of the largest number: (compiled, eager)."""

    backend: str
    mode: str
    case: str
    result: str
    detail: str = ""
    runs: str = "compiled"
    errors: tuple[float, float] | None = None


@dataclass
class Report:
    """What `check` found. Prints as a table."""

    name: str
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing differs; what does not apply or was not run is counted in `counts`."""
        return all(r.result != "DIFFERS" for r in self.rows)

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(r.result for r in self.rows))

    def to_dict(self) -> dict[str, Any]:
        rows = [vars(r) | {} for r in self.rows]
        return {"name": self.name, "ok": self.ok, "counts": self.counts, "seconds": self.seconds, "rows": rows}

    def __str__(self) -> str:
        header = ("backend", "mode", "case", "runs", "ulp", "eager ulp", "result")
        table = [header, *map(_cells, self.rows)]
        widths = [max(len(row[i]) for row in table) for i in range(len(header) - 1)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]) for row in table]
        rule = "-" * max(map(len, lines[:1]))
        counts = ", ".join(f"{n} {result}" for result, n in sorted(self.counts.items()))
        return "\n".join([f"check({self.name})", *lines[:1], rule, *lines[1:], rule, f"{counts}; {self.seconds:.1f} s"])

    __repr__ = __str__


def _cells(row: Row) -> tuple[str, ...]:
    ulps = [f"{e:.2g}" for e in row.errors] if row.errors is not None else ["", ""]
    result = f"{row.result} ({row.detail})" if row.detail else row.result
    return (row.backend, row.mode, row.case, row.runs, *ulps, result)


# ------------------------------------------------------------------ one case
def tried(subject: Subject, case: Case) -> tuple[Row, Difference | None]:
    """Runs a case in both forms and compares."""
    gs = subject.gradients(case.xs, case.weights)
    subject.refreshed()
    row = Row("", case.mode, case.what, "ok")
    if (why := _inapplicable(case, gs)) is not None:
        return replace(row, result=why[0], detail=why[1]), None
    ours = subject.run(subject.fast, case.mode, case.xs, gs)
    eager = subject.run(subject.eager, case.mode, case.xs, gs)
    row.runs = _how_it_ran(subject.compiler)
    judge = _against_eager if eager.error is None else _without_eager
    return judge(subject, case, gs, ours, eager, row)


def _inapplicable(case: Case, gs: Sequence[Any]) -> tuple[str, str] | None:
    given = [g for g in gs if g is not None]
    if case.mode == "vmap in_dims mixed" and len(case.xs) < 2:
        return "not applicable", "one tensor"
    if case.mode not in ("forward", "vmap in_dims=0", "vmap in_dims=1", "vmap in_dims mixed", "vmap(vmap)") and gs:
        if not given:
            return "not applicable", "no output is differentiable"
    if case.mode in ("jacrev", "jacfwd", "hessian"):
        inputs = sum(x.numel() for x in case.xs if x.requires_grad)
        entries = inputs * max(inputs, sum(g.numel() for g in given))
        return ("not run", f"{entries:,} entries, and smaller sizes raise") if entries > TOO_MANY else None
    return None


def _how_it_ran(compiler: Compiled) -> str:
    opaque = {m: r for m, r in compiler.records.items() if r.status == "opaque"}
    return ", ".join(f"{m} as written: {r.reason}" for m, r in opaque.items()) or "compiled"


def _against_eager(
    subject: Subject, case: Case, gs: Sequence[Any], ours: Outcome, eager: Outcome, row: Row
) -> tuple[Row, Difference | None]:
    if ours.error is not None:
        return _differs(row, Difference(case.mode, f"raises {error_text(ours)}, eager does not"))
    wide = None if subject.random else _wide(subject, case, gs)
    found = first_difference(ours, eager, wide, _tolerance(subject, case))
    if found is None:
        return replace(row, errors=errors(ours, eager, wide)), None
    right, wrong = (case.mode in DERIVABLE and _is_mathematics(subject, case, gs, o) for o in (ours, eager))
    if right and not wrong:
        return replace(row, result="eager is wrong", detail=f"{found.name}: compiled is what single calls give"), None
    return _differs(row, found)


def _without_eager(
    subject: Subject, case: Case, gs: Sequence[Any], ours: Outcome, eager: Outcome, row: Row
) -> tuple[Row, Difference | None]:
    """Eager raises: so does the compiled class, or it derived a rule that has to be right."""
    raised = error_text(eager)
    if ours.error is not None:
        if case.mode in DERIVABLE:
            result = "refused" if isinstance(ours.error, FusegradError) else "both raise"
            return replace(row, result=result, detail=error_text(ours)), None
        if not _same_kind(ours.error, eager.error):
            return _differs(row, Difference(case.mode, f"raises {error_text(ours)}, eager {raised}"))
        return replace(row, result="not applicable", detail=f"eager raises {raised}"), None
    if case.mode not in DERIVABLE:
        return _differs(row, Difference(case.mode, f"returns, eager raises {raised}"))
    found = _from_mathematics(subject, case, gs, ours, Mathematics)
    if found is not None and case.mode == "hessian" and _from_mathematics(subject, case, gs, ours, Differences) is None:
        found = None  # eager's double backward is only a part of it
    if isinstance(found, str):
        return replace(row, result="unverified", detail=f"eager raises {raised}, single calls {found}"), None
    if found is not None:
        return _differs(row, found)
    own = subject.run(subject.eager, case.mode, case.xs, gs, Mathematics)
    return replace(row, result="derived", errors=errors(ours, own, _wide(subject, case, gs, Mathematics))), None


def _differs(row: Row, found: Difference) -> tuple[Row, Difference]:
    return replace(row, result="DIFFERS", detail=str(found)), found


def _same_kind(a: Any, b: Any) -> bool:
    return isinstance(a, type(b)) or isinstance(b, type(a))


def _tolerance(subject: Subject, case: Case) -> Tolerance:
    return replace(subject.tolerance, strict=subject.tolerance.strict and case.mode not in DERIVABLE)


def _wide(subject: Subject, case: Case, gs: Sequence[Any], toolkit: Any = Transforms) -> Outcome | None:
    """The case in float64, in eager."""
    xs, wide_gs = all_cast(case.xs, torch.float64), all_cast(gs, torch.float64)
    found = subject.run(subject.eager, case.mode, xs, wide_gs, toolkit)
    return found if found.error is None else None


def _from_mathematics(
    subject: Subject, case: Case, gs: Sequence[Any], ours: Outcome, toolkit: Any
) -> Difference | str | None:
    """How far a derived result is from single calls of eager; the error where these raise."""
    wide = None if subject.random else _wide(subject, case, gs, toolkit)
    if toolkit is Differences:
        own = wide and Outcome({n: v.to(ours.values[n].dtype) for n, v in wide.values.items()})
    else:
        own = subject.run(subject.eager, case.mode, case.xs, gs, toolkit)
    if own is None or own.error is not None:
        return "too" if own is None else error_text(own)
    loose = _near_differences(ours) if toolkit is Differences else _tolerance(subject, case)
    return first_difference(ours, own, wide, loose)


def _near_differences(ours: Outcome) -> Tolerance:
    """Finite differences are good to four digits; what cancels in a low float leaves some units of it."""
    floats = [v.dtype for v in ours.values.values() if isinstance(v, torch.Tensor) and v.is_floating_point()]
    eps = max((torch.finfo(d).eps for d in floats), default=0.0)
    return Tolerance(max(1e-4, 8 * eps), max(1e-3, 16 * eps), strict=False)


def _is_mathematics(subject: Subject, case: Case, gs: Sequence[Any], outcome: Outcome) -> bool:
    return _from_mathematics(subject, case, gs, outcome, Mathematics) is None


# ------------------------------------------------------------------ check
def check(
    target: Any,
    /,
    *args: Any,
    transforms: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    layouts: Sequence[str] | None = None,
    sizes: Sequence[int] | None = None,
    backends: Sequence[str] | None = None,
    seed: int = 0,
    atol: float | None = None,
    rtol: float | None = None,
    quiet: bool = False,
    **kwargs: Any,
) -> Report:
    """Compare a compiled Function with the one you wrote, on these arguments and on variations of them.

    args, kwargs: of one call; tensors, specifications such as "f32[64,128]", any other object. transforms: out of
    `MODES` in runtime/check/modes.py; dtypes: out of "f32", "f64", "f16", "bf16"; layouts: out of `LAYOUTS` in
    layouts.py; sizes: lengths that each axis is given in turn; an empty list leaves a kind of variation out.
    backends: by default the class's own; on CPU also "reference" and "interpret". atol, rtol: how much farther from
    float64 than eager a number may be; by default half as far again, and 4 ulp of the largest.

    Prints a table and returns it as a Report. Raises CheckError, with a script that shows it, for the first difference.
    """
    start = time.perf_counter()
    chosen: dict[str, Any] = {
        "modes": known_names(target, "transforms", transforms, MODES),
        "dtypes": known_names(target, "dtypes", dtypes, DTYPES),
        "layouts": known_names(target, "layouts", layouts, LAYOUTS, [n for n in LAYOUTS if n != "contiguous"]),
        "sizes": SIZES if sizes is None else sizes,
    }
    report = Report(name_of(target))
    failure: tuple[Subject, Case, Row, Difference] | None = None
    with quietly(), torch.random.fork_rng(devices=[]):
        for backend in known_names(target, "backends", backends, BACKENDS, [compiler_of(target).backend]):
            subject, own = examined(target, args, kwargs, backend, Tolerance(atol, rtol), seed)
            found = _all_rows(report, Plan(subject, own, **chosen), backend, start)
            failure = failure or (found and (subject, *found))
    report.seconds = time.perf_counter() - start
    if not quiet:
        print(report)
    if failure is not None:
        with quietly():
            error = _check_error(report, *failure)
        raise error
    return report


@contextmanager
def quietly() -> Iterator[None]:
    """Without warnings of fallbacks (they are in the table), and without what torch logs of calls that raise.

    A fault of ours raises: where eager answered in its place, no difference would show.
    """
    torchs = logging.getLogger("torch._subclasses.fake_tensor")
    level = torchs.level
    torchs.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), patch(debug=True):
            warnings.simplefilter("ignore")
            yield
    finally:
        torchs.setLevel(level)


def _all_rows(report: Report, plan: Plan, backend: str, start: float) -> Any:
    """Fills the report; returns the first case that differs."""
    first = None
    told = start
    for case in plan:
        row, found = tried(plan.subject, case)
        row.backend = backend
        report.rows.append(row)
        first = first or (found and (case, row, found))
        if time.perf_counter() - told > SLOW:
            told = time.perf_counter()
            print(f"check({report.name}): {len(report.rows)} cases after {told - start:.0f} s", file=sys.stderr)
    return first


def known_names(target: Any, option: str, asked: Sequence[str] | None, known: Any, default: Any = None) -> list[str]:
    names = list(asked if asked is not None else default or known)
    if unknown := [n for n in names if n not in known]:
        detail = f"{option}: there is no {unknown[0]!r}"
        raise CheckArgumentError(function=name_of(target), detail=detail, fix=f"use some of {', '.join(known)}")
    return names


def _check_error(report: Report, subject: Subject, case: Case, row: Row, found: Difference) -> CheckError:
    from .reproducer import reproduced

    cls = subject.compiler.cls
    smaller, difference, script = reproduced(subject, case, row, found)
    method = (backward_method(cls) if case.mode != "forward" else None) or cls.forward  # type: ignore[attr-defined]
    return CheckError(
        report,
        script,
        function=subject.name,
        mode=case.mode,
        case=case.what if smaller is case else f"{case.what} (seen at {shapes(smaller.xs)} too)",
        backend=row.backend,
        difference=difference,
        where=method_place(method),
    )
