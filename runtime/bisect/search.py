"""`fusegrad.bisect`: the first step after which a compiled Function is not the one that you wrote.

Steps (traces, passes, single rules, kernels of groups) are numbered as they are met. With the first k alone the rest
runs as it was before: traced operations, the reference executor on the graph so far. Where k are right and k + 1
wrong, step k + 1 is the one. What is right is `fusegrad.check`'s verdict on the whole call.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ...ir.switches import KERNELS, SWITCHES, use_watch
from ..check.cases import Plan
from ..check.check import valid_names, without_warnings
from ..check.compare import Difference, Tolerance
from ..check.modes import DERIVABLE, MODES
from ..check.reproducer import reproduce
from ..check.run_case import Row, run_case
from ..check.subject import Case, Subject, examine, name_of
from ..report.explain import compiler_of
from ..settings import config
from ..settings.config import BACKENDS, KERNEL_BACKENDS
from .localize import Finding, localize
from .steps import Step, Steps

USUAL = ("forward", "backward", "jvp", "vmap in_dims=0")
OFTEN = 5
"""Calls of one kind, of which the last are written out."""
CAPTURES = frozenset({"capture"})
SECONDS = 20.0
"""The time that decisions of the generator are tried at most, one by one."""
DERIVED = "the derived rule itself: before any pass its graph is not the derivative"
NOT_A_STEP = "none of the steps: it differs with all of them left out"


@dataclass(frozen=True)
class Culprit:
    """The first wrong step."""

    kind: str
    """What kind of step: "capture", "lower", "rule", "kernels" .."""
    subject: str
    """The graph, group or method that it was about."""
    what: str
    """The step in words."""
    where: str = ""
    """`file:line` of yours that it came from."""
    values: str = ""
    """The values with which it is wrong, and what it made of them."""
    avoid: str = ""
    """A setting under which the call is right; it was tried."""


@dataclass(frozen=True)
class Bisection:
    """The result of `bisect`. Prints as a few lines."""

    name: str
    """The class's name."""
    backend: str
    """The backend that was bisected."""
    modes: tuple[str, ...]
    """The modes that were tried."""
    mode: str = ""
    """The mode that differs; "" where none does."""
    difference: str = ""
    """The difference in words; "" where there is none."""
    culprit: Culprit | None = None
    """The first wrong step; None where nothing differs."""
    number: int = 0
    """The step's number."""
    steps: int = 0
    """How many steps there were."""
    runs: int = 0
    """How often the class was compiled and called."""
    seconds: float = 0.0
    """How long it took."""
    script: str = ""
    """A program that shows the difference again."""

    @property
    def ok(self) -> bool:
        """True where nothing differs."""
        return not self.difference

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values that json can write."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        head = f"bisect({self.name}) on {self.backend}"
        if self.culprit is None:
            return f"{head}: no difference in {', '.join(self.modes)}"
        own = self.culprit
        lines = [f"{head}: {self.mode} differs: {self.difference}", f"  first wrong step: {own.what}"]
        lines += [f"  at:      {own.where}"] if own.where else []
        lines += [f"  values:  {own.values}"] if own.values else []
        lines += [f"  avoid:   {own.avoid}"] if own.avoid else []
        return "\n".join([*lines, f"  step {self.number} of {self.steps}, {self.runs} runs, {self.seconds:.1f} s"])

    __repr__ = __str__


def bisect(
    target: Any,
    /,
    *args: Any,
    transforms: Sequence[str] | None = None,
    backend: str | None = None,
    seed: int = 0,
    atol: float | None = None,
    rtol: float | None = None,
    quiet: bool = False,
    **kwargs: Any,
) -> Bisection:
    """Name the first step of the pipeline after which a compiled Function differs from the one you wrote, or raises.

    Prints what it found and returns it.

    Args:
        target: A Function class or a function, compiled or not yet.
        args: Of one call, as for `check`.
        transforms: The modes to try, by default forward, backward, jvp and vmap.
        backend: By default the class's own; "interpret" runs the kernels without a GPU.
        seed: Of the random tensors, as for `check`.
        atol: As for `check`.
        rtol: As for `check`.
        quiet: Print nothing.
        kwargs: Of the call, for plain functions.

    Returns:
        `ok` where nothing differs; else `culprit` says which pass, rule or group, the line of yours it came from and
        the
            values, and `script` shows the difference again.

    Raises:
        CheckArgumentError: for a mode or backend that does not exist.
    """
    start = time.perf_counter()
    backend = backend or compiler_of(target).options.backend
    modes = valid_names(target, "transforms", transforms, MODES, USUAL)
    valid_names(target, "backend", [backend], BACKENDS)
    settings = {"check": False, "debug": True, "store": False}
    with without_warnings(), torch.random.fork_rng(devices=[]), config.patch(**settings):
        subject, own = examine(target, args, kwargs, backend, Tolerance(atol, rtol), seed)
        search = Search(subject, backend)
        bisection = search.first_difference(Plan(subject, own, modes, (), (), ()), modes)
    bisection = replace(bisection, seconds=time.perf_counter() - start)
    if not quiet:
        print(bisection)
    return bisection


class Search:
    """One Function on one backend: runs of a case with some steps only."""

    def __init__(self, subject: Subject, backend: str) -> None:
        self.subject, self.backend, self.runs = subject, backend, 0
        self.always: frozenset[str] = frozenset()
        self.calls = 1

    def run(self, case: Case, most: int | None) -> tuple[Steps, Difference | None]:
        """The case, compiled afresh with the first steps alone."""
        steps = Steps(most, self.always)
        self.runs += 1
        with use_watch(steps):
            self.subject.fast, self.subject.compiler = self.subject.compile_again()
            for _ in range(self.calls):
                if (difference := run_case(self.subject, case)[1]) is not None:
                    return steps, difference
        return steps, None

    def first_difference(self, cases: Plan, modes: Sequence[str]) -> Bisection:
        """The first case that differs, taken apart; cases that differ nowhere are called often, too."""
        own_cases = [c for _, c in zip(modes, cases, strict=False)]  # variations come behind
        nothing = Bisection(self.subject.name, self.backend, tuple(modes))
        for self.calls in (1, OFTEN):
            for case in own_cases:
                steps, difference = self.run(case, None)
                if difference is not None:
                    return self._explain(replace(nothing, mode=case.mode), case, steps, difference)
        return replace(nothing, runs=self.runs)

    def _explain(self, nothing: Bisection, case: Case, steps: Steps, difference: Difference) -> Bisection:
        number, steps, difference, last = self.bisect_steps(case, steps, difference)
        culprit = self._culprit(case, last, steps, difference)
        total, row = len(self.run(case, None)[0].passed), Row(self.backend, case.mode, case.label, "DIFFERS")
        script = _script(reproduce(self.subject, case, row, difference)[2], culprit)
        return replace(nothing, difference=str(difference), culprit=culprit, number=number, steps=total, runs=self.runs,
                       script=script)  # fmt: skip

    def bisect_steps(
        self, case: Case, steps: Steps, difference: Difference
    ) -> tuple[int, Steps, Difference, Step | None]:
        """(number of the first wrong step, the run that ends with it, its difference, the step)."""
        # Without any step the rest runs as it was before: where that is wrong already, no step is to blame.
        low, high = 0, len(steps.passed)
        none, wrong = self.run(case, 0)
        if wrong is not None and not self.always:  # captures are what makes it run at all: only the rest is counted
            self.always = CAPTURES
            none, wrong = self.run(case, 0)
            steps, _ = self.run(case, None)
            high = len(steps.passed)
        if wrong is not None:
            return 0, none, wrong, None
        # With `low` steps the class is right, with `high` it is wrong.
        while high - low > 1:
            middle = (low + high) // 2
            trial, wrong = self.run(case, middle)
            if wrong is None:
                low = middle
            else:
                high, steps, difference = middle, trial, wrong
        return high, steps, difference, steps.passed[high - 1]

    def _culprit(self, case: Case, step: Step | None, steps: Steps, difference: Difference) -> Culprit:
        if step is None:
            return Culprit("derive" if case.mode in DERIVABLE else "call", self.subject.name,
                           DERIVED if case.mode in DERIVABLE else NOT_A_STEP)  # fmt: skip
        finding = localize(step, steps, self.subject, difference)
        return Culprit(
            step.kind,
            step.subject,
            finding.fact,
            finding.place,
            finding.values,
            self._avoiding_setting(case, step, finding),
        )

    def _avoiding_setting(self, case: Case, step: Step, finding: Finding) -> str:
        """A setting under which the case is right; tried, not guessed."""
        names = finding.switches or (step.kind,)
        for settings in self._candidates(step, [n for n in names if n in SWITCHES]):
            if self._is_right(case, settings):
                return ", ".join(f"fusegrad.config.patch({k}={v!r})" for k, v in settings.items())
        return "is_traceable = False runs the class in eager"

    def _candidates(self, step: Step, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Settings that may help: the step left out, single decisions of the generator, the first call's check."""
        yield from ({"disable": (n,)} for n in names)
        stop = time.perf_counter() + SECONDS
        for name in KERNELS if step.kind == "kernels" else ():
            if time.perf_counter() < stop:
                yield {"disable": (name,)}
        if step.kind == "capture":
            yield {"check": True}
        elif self.backend in KERNEL_BACKENDS:
            yield {"backend": "reference"}

    def _is_right(self, case: Case, settings: dict[str, Any]) -> bool:
        with config.patch(**settings), _own_backend(self.subject, settings):
            return self.run(case, None)[1] is None


@contextmanager
def _own_backend(subject: Subject, settings: dict[str, Any]) -> Iterator[None]:
    """Within the block the class is compiled for the backend of the settings."""
    before = subject.options
    subject.options = {**before, "backend": settings.get("backend", before["backend"])}
    try:
        yield
    finally:
        subject.options = before


HEAD = """# fusegrad.bisect: {what}{where}
# to go on without it: {avoid}
"""
CHECKED = "settings = fusegrad.config.patch(check=False, debug=True, store=False)  # its own check would hide it\n"


def _script(script: str, own: Culprit) -> str:
    """The script of `check`, with what was found above it."""
    place = f"\n# at: {own.where}" if own.where else ""
    head = HEAD.format(what=own.what.replace("\n", " "), where=place, avoid=own.avoid)
    return head + script.replace("\nimport fusegrad\n", f"\nimport fusegrad\n\n{CHECKED}settings.__enter__()\n", 1)


__all__ = ["Bisection", "Culprit", "bisect", "name_of"]
