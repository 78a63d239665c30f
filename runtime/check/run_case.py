"""One case of the comparison: the compiled class beside its own methods, in one mode, at one dtype and layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...ir.errors import FusegradError
from ..compiled.compiled import Compiled
from .compare import Difference, Outcome, Tolerance, error_text, errors, first_difference
from .modes import DERIVABLE, Transforms
from .reference_transforms import Differences, Mathematics
from .subject import Case, Subject
from .variations import all_cast

TOO_MANY = 250_000  # entries of a jacobian


@dataclass
class Row:
    """The result of a case. Errors are distances from float64 in ulp of the largest number: (compiled, eager)."""

    backend: str
    mode: str
    case: str
    result: str
    detail: str = ""
    runs: str = "compiled"
    errors: tuple[float, float] | None = None


def run_case(subject: Subject, case: Case) -> tuple[Row, Difference | None]:
    """Runs a case in both forms and compares."""
    gs = subject.gradients(case.xs, case.weights)
    subject.renew()
    row = Row("", case.mode, case.label, "ok")
    if (reason := _inapplicable(case, gs)) is not None:
        return replace(row, result=reason[0], detail=reason[1]), None
    ours = subject.run(subject.fast, case.mode, case.xs, gs)
    eager = subject.run(subject.eager, case.mode, case.xs, gs)
    # Where eager has no rule it cannot be the judge: single calls of it, put together, are.
    row.runs = _fallback_reasons(subject.compiler)
    judge = _against_eager if eager.error is None else _without_eager
    return judge(subject, case, gs, ours, eager, row)


def _inapplicable(case: Case, gs: Sequence[Any]) -> tuple[str, str] | None:
    gradients = [g for g in gs if g is not None]
    if case.mode == "vmap in_dims mixed" and len(case.xs) < 2:
        return "not applicable", "one tensor"
    if case.mode not in ("forward", "vmap in_dims=0", "vmap in_dims=1", "vmap in_dims mixed", "vmap(vmap)") and gs:
        if not gradients:
            return "not applicable", "no output is differentiable"
    if case.mode in ("jacrev", "jacfwd", "hessian"):
        inputs = sum(x.numel() for x in case.xs if x.requires_grad)
        entries = inputs * max(inputs, sum(g.numel() for g in gradients))
        return ("not run", f"{entries:,} entries, and smaller sizes raise") if entries > TOO_MANY else None
    return None


def _fallback_reasons(compiler: Compiled) -> str:
    opaque = {m: r for m, r in compiler.ledger.records.items() if r.status == "opaque"}
    return ", ".join(f"{m} as written: {r.reason}" for m, r in opaque.items()) or "compiled"


def _against_eager(
    subject: Subject, case: Case, gs: Sequence[Any], ours: Outcome, eager: Outcome, row: Row
) -> tuple[Row, Difference | None]:
    if ours.error is not None:
        return _mismatch(row, Difference(case.mode, f"raises {error_text(ours)}, eager does not"))
    wide = None if subject.random else _run_in_float64(subject, case, gs)
    difference = first_difference(ours, eager, wide, _tolerance(subject, case))
    if difference is None:
        return replace(row, errors=errors(ours, eager, wide)), None
    right, wrong = (case.mode in DERIVABLE and _matches_reference(subject, case, gs, o) for o in (ours, eager))
    if right and not wrong:
        return replace(
            row, result="eager is wrong", detail=f"{difference.name}: compiled is what single calls give"
        ), None
    return _mismatch(row, difference)


def _without_eager(
    subject: Subject, case: Case, gs: Sequence[Any], ours: Outcome, eager: Outcome, row: Row
) -> tuple[Row, Difference | None]:
    """Eager raises: so does the compiled class, or it derived a rule that has to be right."""
    raised = error_text(eager)
    # Both raise: the same kind of error, except where a rule is derived.
    if ours.error is not None:
        if case.mode in DERIVABLE:
            result = "refused" if isinstance(ours.error, FusegradError) else "both raise"
            return replace(row, result=result, detail=error_text(ours)), None
        if not _same_kind(ours.error, eager.error):
            return _mismatch(row, Difference(case.mode, f"raises {error_text(ours)}, eager {raised}"))
        return replace(row, result="not applicable", detail=f"eager raises {raised}"), None
    # The compiled class alone returns: by a derived rule, which single calls of eager have to confirm.
    if case.mode not in DERIVABLE:
        return _mismatch(row, Difference(case.mode, f"returns, eager raises {raised}"))
    difference = _reference_difference(subject, case, gs, ours, Mathematics)
    if (
        difference is not None
        and case.mode == "hessian"
        and _reference_difference(subject, case, gs, ours, Differences) is None
    ):
        difference = None  # eager's double backward is only a part of it
    if isinstance(difference, str):
        return replace(row, result="unverified", detail=f"eager raises {raised}, single calls {difference}"), None
    if difference is not None:
        return _mismatch(row, difference)
    own = subject.run(subject.eager, case.mode, case.xs, gs, Mathematics)
    return replace(
        row, result="derived", errors=errors(ours, own, _run_in_float64(subject, case, gs, Mathematics))
    ), None


def _mismatch(row: Row, difference: Difference) -> tuple[Row, Difference]:
    return replace(row, result="DIFFERS", detail=str(difference)), difference


def _same_kind(a: Any, b: Any) -> bool:
    return isinstance(a, type(b)) or isinstance(b, type(a))


def _tolerance(subject: Subject, case: Case) -> Tolerance:
    return replace(subject.tolerance, strict=subject.tolerance.strict and case.mode not in DERIVABLE)


def _run_in_float64(subject: Subject, case: Case, gs: Sequence[Any], toolkit: Any = Transforms) -> Outcome | None:
    """The case in float64, in eager."""
    xs, wide_gs = all_cast(case.xs, torch.float64), all_cast(gs, torch.float64)
    outcome = subject.run(subject.eager, case.mode, xs, wide_gs, toolkit)
    return outcome if outcome.error is None else None


def _reference_difference(
    subject: Subject, case: Case, gs: Sequence[Any], ours: Outcome, toolkit: Any
) -> Difference | str | None:
    """The difference of a derived result from single calls of eager; the error where these raise."""
    wide = None if subject.random else _run_in_float64(subject, case, gs, toolkit)
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


def _matches_reference(subject: Subject, case: Case, gs: Sequence[Any], outcome: Outcome) -> bool:
    return _reference_difference(subject, case, gs, outcome, Mathematics) is None
