"""One case of the comparison: the compiled class beside its own methods, in one mode, at one dtype and layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...ir.errors import FusegradError
from ..capture.captured import name_at, present_residuals
from ..compiled.compiled import Compiled
from .compare import Difference, Outcome, Tolerance, error_text, errors, first_difference
from .modes import DERIVABLE, GRADIENT_FREE, Transforms
from .reference_transforms import Differences, Mathematics
from .subject import Case, Subject
from .variations import all_cast

TOO_MANY = 250_000  # entries of a jacobian


@dataclass
class Row:
    """One case: a mode, on some tensors, and its result."""

    backend: str
    """The backend that ran it."""
    mode: str
    """What was called: "backward", "vmap in_dims=0", "hessian" .."""
    case: str
    """The tensors: the dtype, shape or layout that varies."""
    result: str
    """What was found.

    - "ok": equal, as near as float64 and eager ask for.
    - "derived": eager has no rule, and mathematics agrees.
    - "eager is wrong": single calls of eager, put together, agree with the compiled class.
    - "DIFFERS": the compiled class is wrong.
    - "both raise"; "refused": the compiled class alone raises, and says why.
    - "not applicable", "not run", "unverified": nothing was compared; `detail` says why.
    """
    detail: str = ""
    """Why, where the result says too little."""
    runs: str = "compiled"
    """Says "compiled", or what fell back to eager and why."""
    errors: tuple[float, float] | None = None
    """Distances of (compiled, eager) from float64, in ulp of the largest number; None where they have no meaning."""

    @property
    def raises(self) -> bool:
        """True if eager raises there, and the compiled class too."""
        return self.result == "both raise" or (self.result == "not applicable" and "raises" in self.detail)


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
    if case.mode not in GRADIENT_FREE and gs:
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
        return _beside_a_plain_backward(subject, case, gs, ours, row, raised)
    difference = _reference_difference(subject, case, gs, ours)
    if case.mode == "hessian" and difference is not None:
        return _against_differences(subject, case, gs, ours, row, difference)
    if isinstance(difference, str):
        return replace(row, result="unverified", detail=f"eager raises {raised}, single calls {difference}"), None
    if difference is not None:
        return _mismatch(row, difference)
    own = subject.run(subject.eager, case.mode, case.xs, gs, Mathematics)
    return replace(
        row, result="derived", errors=errors(ours, own, _run_in_float64(subject, case, gs, Mathematics))
    ), None


def _beside_a_plain_backward(
    subject: Subject, case: Case, gs: Sequence[Any], ours: Outcome, row: Row, raised: str
) -> tuple[Row, Difference | None]:
    """The compiled class alone returns: a checkpoint has nothing else to give than a plain backward of eager."""
    plain = subject.run(subject.eager, "backward", case.xs, gs) if case.mode == "checkpoint" else None
    if plain is None or plain.error is not None:
        return _mismatch(row, Difference(case.mode, f"returns, eager raises {raised}"))
    gradients = replace(plain, values={name: plain.values[name] for name in ours.values if name in plain.values})
    difference = first_difference(ours, gradients, None, _tolerance(subject, case))
    if difference is not None:
        return _mismatch(row, difference)
    return replace(row, detail=f"eager raises {raised}; the gradients are those of eager without it"), None


def _against_differences(
    subject: Subject, case: Case, gs: Sequence[Any], ours: Outcome, row: Row, difference: Difference | str
) -> tuple[Row, Difference | None]:
    """Double backward is no judge of a hessian where forward saved an intermediate: differences of backward are.

    Eager takes such a value for a constant, so that a distance from eager says nothing: the row has none.
    """
    saved = saved_intermediates(subject.compiler)
    partial = f"eager's double backward is partial: {', '.join(saved)} saved" if saved else "eager gives other numbers"
    poles = _common_nan(subject, case, gs, ours)
    by_steps = _step_difference(subject, case, gs, ours, poles)
    if by_steps is None and not poles:
        return replace(row, result="derived", detail=f"{partial}; compared with differences of backward"), None
    if by_steps is None:
        detail = "NaN in places, as in eager's double backward; the others are what differences of backward give"
        return replace(row, result="unverified", detail=detail), None
    if isinstance(by_steps, str) and (saved or isinstance(difference, str)):
        return replace(row, result="unverified", detail=f"{partial}; differences of backward: {by_steps}"), None
    return _mismatch(row, difference if isinstance(by_steps, str) else by_steps)  # type: ignore[arg-type]


def _common_nan(subject: Subject, case: Case, gs: Sequence[Any], ours: Outcome) -> set[str]:
    """The results that have NaN in both forms: there the formula has a pole, where a difference may be finite."""
    own = subject.run(subject.eager, case.mode, case.xs, gs, Mathematics).values
    both = ((name, value, own.get(name)) for name, value in ours.values.items())
    return {n for n, a, b in both if all(isinstance(t, torch.Tensor) and bool(t.isnan().any()) for t in (a, b))}


def saved_intermediates(compiler: Compiled) -> list[str]:
    """The user's names of what forward saves that is neither an argument nor an output."""
    named = ((spec.captured, place) for spec in compiler.table for place in present_residuals(spec.captured))
    return list(dict.fromkeys(f"`{name_at(captured, p)}`" for captured, p in named if p.kind == "hidden"))


def _mismatch(row: Row, difference: Difference) -> tuple[Row, Difference]:
    return replace(row, result="DIFFERS", detail=str(difference)), difference


def _same_kind(a: Any, b: Any) -> bool:
    return isinstance(a, type(b)) or isinstance(b, type(a))


def _tolerance(subject: Subject, case: Case) -> Tolerance:
    return replace(subject.tolerance, strict=subject.tolerance.strict and case.mode not in DERIVABLE)


def _run_in_float64(subject: Subject, case: Case, gs: Sequence[Any], toolkit: Any = Transforms) -> Outcome | None:
    """The case in float64, in eager."""
    outcome = subject.run(subject.eager, case.mode, *_in_float64(case.xs, gs), toolkit)
    return outcome if outcome.error is None else None


def _in_float64(xs: Sequence[Any], gs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return all_cast(xs, torch.float64), all_cast(gs, torch.float64)


def _reference_difference(subject: Subject, case: Case, gs: Sequence[Any], ours: Outcome) -> Difference | str | None:
    """The difference of a derived result from single calls of eager; the error where these raise."""
    own = subject.run(subject.eager, case.mode, case.xs, gs, Mathematics)
    if own.error is not None:
        return error_text(own)
    wide = None if subject.random else _run_in_float64(subject, case, gs, Mathematics)
    return first_difference(ours, own, wide, _tolerance(subject, case))


def _step_difference(
    subject: Subject, case: Case, gs: Sequence[Any], ours: Outcome, poles: set[str]
) -> Difference | str | None:
    """The same beside differences of backward, which are taken in float64. poles: results whose NaN are passed over."""
    if subject.random:
        return "other random numbers in float64"
    wide = subject.run(subject.eager, case.mode, *_in_float64(case.xs, gs), Differences)
    if wide.error is not None:
        return error_text(wide)
    own = Outcome({n: v.to(ours.values[n].dtype) for n, v in wide.values.items()})
    finite = {n: torch.where(v.isnan(), own.values[n], v) if n in poles else v for n, v in ours.values.items()}
    return first_difference(Outcome(finite), own, wide, _near_differences(ours))


def _near_differences(ours: Outcome) -> Tolerance:
    """Finite differences are good to four digits; what cancels in a low float leaves some units of it."""
    floats = [v.dtype for v in ours.values.values() if isinstance(v, torch.Tensor) and v.is_floating_point()]
    eps = max((torch.finfo(d).eps for d in floats), default=0.0)
    return Tolerance(max(1e-4, 8 * eps), max(1e-3, 16 * eps), strict=False)


def _matches_reference(subject: Subject, case: Case, gs: Sequence[Any], outcome: Outcome) -> bool:
    return _reference_difference(subject, case, gs, outcome) is None
