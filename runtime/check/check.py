"""`fusegrad.check`: a compiled Function against the one that you wrote, case by case, with a table of what was found.

A case is a mode (backward, vmap, ...) on tensors: the user's own, and variations of them in size, layout and dtype.
Eager is the judge; where it has no rule, `reference_transforms.py` is; a run of eager in float64 says how near is near.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ...ir.errors import FusegradError
from ...tracer.methods import backward_method, method_place
from ..report.explain import compiler_of
from ..settings.config import BACKENDS, patch
from ..settings.suggestions import meant
from .cases import DTYPES, SIZES, Plan, shapes
from .compare import Difference, Tolerance
from .derivative import Derivative, compare_with_derivative
from .modes import GRADIENT_FREE, MODES
from .run_case import Row, run_case
from .subject import Case, CheckArgumentError, Subject, examine, name_of
from .variations import LAYOUTS

SLOW = 10.0


class CheckError(FusegradError, AssertionError):
    """A compiled Function is not what the user wrote."""

    report: Report
    """The table of what was compared."""
    reproducer: str
    """A script that shows the difference; "" where nothing could be compared."""
    message = (
        "check({function}): {mode}, {case}, {backend}: {difference}\n  at:   {where}\n"
        "  fix:  please report it with the script in the error's `reproducer`, which shows it again (the command "
        "`fusegrad check` writes it into a file); `is_traceable = False` runs the class in eager."
    )

    def __init__(self, report: Report, reproducer: str, **facts: Any) -> None:
        super().__init__(**facts)
        self.report, self.reproducer = report, reproducer


class NothingComparedError(CheckError):
    """No case of `check` could be compared, or none with a gradient: eager itself raises in all of them."""

    message = "check({function}): {difference}\n  at:   {where}\n  fix:  {fix}"


class DerivativeError(CheckError):
    """A backward that `check(expect_derivative=True)` finds to be no derivative of forward."""

    message = (
        "check({function}): {difference}\n  at:   {where}\n"
        "  fix:  mend the backward; where it is meant so, `expect_derivative=False`."
    )


# ------------------------------------------------------------------ the report
COMPARED = ("ok", "derived", "eager is wrong", "DIFFERS")


@dataclass
class Report:
    """The result of `check`. Prints as a table."""

    name: str
    """The class's name."""
    rows: list[Row] = field(default_factory=list)
    """A row for each case."""
    seconds: float = 0.0
    """How long it took."""
    derivative: Derivative | None = None
    """Whether the backward is the derivative of forward; None where that was not asked, or backward is derived."""

    @property
    def ok(self) -> bool:
        """True where something was compared and nothing differs; what does not apply is counted in `counts`."""
        return all(r.result != "DIFFERS" for r in self.rows) and self.uncompared is None

    @property
    def uncompared(self) -> str | None:
        """The reason why nothing was compared, or nothing that has a gradient; None where something was."""
        compared = {r.mode for r in self.rows if r.result in COMPARED}
        raising = next((r for r in self.rows if r.raises and r.mode not in GRADIENT_FREE), None)
        if not compared:
            return f"nothing was compared: {next((r.detail for r in self.rows if r.detail), 'no case applies')}"
        if raising is None or not compared <= GRADIENT_FREE or any(r.result == "refused" for r in self.rows):
            return None
        return f"no gradient was compared, backward raises in every mode: {raising.detail}"

    @property
    def counts(self) -> dict[str, int]:
        """The number of cases by their result."""
        return dict(Counter(r.result for r in self.rows))

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values that json can write."""
        rows = [vars(r) | {} for r in self.rows]
        facts = {"name": self.name, "ok": self.ok, "counts": self.counts, "seconds": self.seconds, "rows": rows}
        return {**facts, "derivative": self.derivative and vars(self.derivative) | {}}

    def __str__(self) -> str:
        notes = {note: f"[{at}]" for at, note in enumerate(self.notes, 1)}
        table = _without_constants([HEADER, *(_cells(row, notes) for row in self.rows)])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        rule = "-" * len(lines[0])
        backends = {r.backend for r in self.rows}
        head = f"check({self.name})" + (f" on {backends.pop()}" if len(backends) == 1 else "")
        counts = ", ".join(f"{n} {result}" for result, n in sorted(self.counts.items()))
        below = [f"{notes[note]} {count} x {note}" for note, count in self.notes.items()]
        below += [f"{counts}; {self.seconds:.1f} s", *([str(self.derivative)] if self.derivative else [])]
        return "\n".join([head, lines[0], rule, *lines[1:], rule, *below])

    __repr__ = __str__

    @property
    def notes(self) -> dict[str, int]:
        """What the rows have to say beside their results, each text once, with the number of its rows."""
        return dict(Counter(note for row in self.rows for note in (_runs(row), row.detail) if note))


HEADER = ("backend", "mode", "case", "runs", "ulp", "eager", "result")
COMPILED = "compiled"


def _without_constants(table: Sequence[Sequence[str]]) -> list[list[str]]:
    """The columns of which there is something to tell: several backends, or a row that is not compiled."""
    same = {at for at in (0, 3) if len({row[at] for row in table[1:]}) == 1 and (at == 0 or table[1][at] == COMPILED)}
    return [[cell for at, cell in enumerate(row) if at not in same] for row in table]


def _cells(row: Row, notes: Mapping[str, str]) -> tuple[str, ...]:
    ulps = [f"{e:.2g}" for e in row.errors] if row.errors is not None else ["", ""]
    runs = f"in part {notes[row.runs]}" if _runs(row) else COMPILED
    result = f"{row.result} {notes[row.detail]}" if row.detail else row.result
    return (row.backend, row.mode, row.case, runs, *ulps, result)


def _runs(row: Row) -> str:
    """What of a row runs in eager, and why; "" where it is compiled."""
    return "" if row.runs == COMPILED else row.runs


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
    expect_derivative: bool | None = None,
    quiet: bool = False,
    **kwargs: Any,
) -> Report:
    """Compare a compiled Function with the one you wrote, on these arguments and on variations of them.

    Prints a table and returns it as a Report.

    Args:
        target: A Function class or a function, compiled or not yet.
        args: Of one call: tensors, specifications such as "f32[64,128]", any other object.
        transforms: The modes to try, by default all: "forward", "backward", "second call", "backward twice", "double
            backward", "checkpoint", "saved tensors hooks", "dual numbers", "grad", "vjp", "jvp", "jacrev", "jacfwd",
            "hessian", "vmap in_dims=0", "vmap in_dims=1", "vmap in_dims mixed", "vmap(vmap)", "vmap(grad)",
            "grad(vmap)", "jvp(vmap)".
        dtypes: Out of "f32", "f64", "f16", "bf16", by default all; an empty list leaves this kind of variation out.
        layouts: By default all: "contiguous", "transposed", "offset 1", "step 2", "first axis expanded",
            "one number expanded", "channels last", "odd strides of size 1"; an empty list leaves this kind of variation
            out.
        sizes: Lengths that each axis is given in turn, by default 0, 1, 2, 3 and 17; an empty list leaves this kind of
            variation out.
        backends: By default the class's own; on CPU also "reference" and "interpret".
        seed: Of the random tensors that stand for specifications, and of the gradients.
        atol: How much farther from float64 than eager a number may be; by default 4 ulp of the largest.
        rtol: The same, relative to the number; by default half as far again as eager is.
        expect_derivative: By default a line says whether the backward that you wrote is the derivative of forward. With
            True one that is not is an error; with False (a straight-through estimator) nothing is asked.
        quiet: Print nothing.
        kwargs: Of the call, for plain functions.

    Returns:
        A row for each case, and `ok`.

    Raises:
        CheckError: for the first difference, with a script that shows it; without one, where nothing could be compared
            because eager itself raises.
        CheckArgumentError: for a mode, dtype, layout or backend that does not exist.
    """
    start = time.perf_counter()
    options: dict[str, Any] = {
        "modes": valid_names(target, "transforms", transforms, MODES),
        "dtypes": valid_names(target, "dtypes", dtypes, DTYPES),
        "layouts": valid_names(target, "layouts", layouts, LAYOUTS, [n for n in LAYOUTS if n != "contiguous"]),
        "sizes": SIZES if sizes is None else sizes,
    }
    # One backend after the other, each with a subject of its own; the first difference is reproduced at the end.
    report = Report(name_of(target))
    failure: tuple[Subject, Case, Row, Difference] | None = None
    with without_warnings(), torch.random.fork_rng(devices=[]):
        for backend in valid_names(target, "backends", backends, BACKENDS, [compiler_of(target).options.backend]):
            subject, own = examine(target, args, kwargs, backend, Tolerance(atol, rtol), seed)
            failing = _fill_report(report, Plan(subject, own, **options), backend, start)
            failure = failure or (failing and (subject, *failing))
        if expect_derivative is not False:
            report.derivative = compare_with_derivative(subject, Plan(subject, own, **options).tiny())
    # The table before the error: making the difference smaller takes seconds.
    report.seconds = time.perf_counter() - start
    if not quiet:
        print(report)
    if failure is not None:
        with without_warnings():
            error = _check_error(report, *failure)
        raise error
    if (unmet := _unmet(report, target, expect_derivative)) is not None:
        raise unmet
    return report


def _unmet(report: Report, target: Any, expect_derivative: bool | None) -> CheckError | None:
    """The error of a check in which nothing differs, and which is no success."""
    facts = {"function": report.name, "where": method_place(_method(compiler_of(target).user.cls, "backward"))}
    if report.uncompared is not None:
        fix = "run the eager class on these arguments, backward too, and mend what it raises."
        return NothingComparedError(report, "", difference=report.uncompared, fix=fix, **facts)
    if expect_derivative and report.derivative is not None and report.derivative.holds is False:
        return DerivativeError(report, "", difference=str(report.derivative).splitlines()[0], **facts)
    return None


def _method(cls: Any, mode: str) -> Any:
    """The method that a mode is about."""
    return (backward_method(cls) if mode != "forward" else None) or cls.forward


@contextmanager
def without_warnings() -> Iterator[None]:
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


def _fill_report(report: Report, plan: Plan, backend: str, start: float) -> Any:
    """Fills the report; returns the first case that differs."""
    first = None
    last_note = start
    for case in plan:
        row, difference = run_case(plan.subject, case)
        row.backend = backend
        report.rows.append(row)
        first = first or (difference and (case, row, difference))
        if time.perf_counter() - last_note > SLOW:
            last_note = time.perf_counter()
            print(f"check({report.name}): {len(report.rows)} cases after {last_note - start:.0f} s", file=sys.stderr)
    return first


def valid_names(target: Any, option: str, names: Sequence[str] | None, valid: Any, default: Any = None) -> list[str]:
    names = list(names if names is not None else default or valid)
    if unknown := [n for n in names if n not in valid]:
        detail = f"{option}: there is no {unknown[0]!r}"
        fix = f"{meant(unknown[0], valid)}use some of {', '.join(valid)}"
        raise CheckArgumentError(function=name_of(target), detail=detail, fix=fix)
    return names


def _check_error(report: Report, subject: Subject, case: Case, row: Row, first: Difference) -> CheckError:
    from .reproducer import reproduce

    smaller, difference, script = reproduce(subject, case, row, first)
    return CheckError(
        report,
        script,
        function=subject.name,
        mode=case.mode,
        case=case.label if smaller is case else f"{case.label} (seen at {shapes(smaller.xs)} too)",
        backend=row.backend,
        difference=difference,
        where=method_place(_method(subject.compiler.user.cls, case.mode)),
    )
