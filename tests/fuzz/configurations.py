"""`make fuzz-configurations N=200 SEED=0`: random programs, and the suite's Functions, under random settings.

Each seed is a program and a configuration: steps left out one by one and many at a time, backends, sizes as symbols or
as numbers, versions of kernels as a clock that guesses would choose them, captures from disk, debug. Every one of them
has to agree with eager. --help says more; processes, and the file of --json, are those of `make fuzz`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
from fuzz_programs import forget, load, program, source  # noqa: E402
from fuzz_runs import Sum, memory, run_by_seed  # noqa: E402
from fuzz_trials import DERIVABLE, OURS, CheckArgumentError, confirmed, judged, recipes, tolerance  # noqa: E402

import fusegrad  # noqa: E402
from fusegrad.ir.switches import SWITCHES  # noqa: E402
from fusegrad.runtime.check.check import without_warnings  # noqa: E402
from fusegrad.runtime.check.compare import Tolerance  # noqa: E402
from fusegrad.runtime.check.run_case import run_case  # noqa: E402
from fusegrad.runtime.check.subject import Case, Subject, examine  # noqa: E402
from fusegrad.runtime.execution import targets  # noqa: E402
from fusegrad.runtime.kernels import autotune as tune  # noqa: E402
from fusegrad.runtime.settings import config  # noqa: E402

Tensor = torch.Tensor
CASES = 3
"""Of a program; what makes another difference comes behind."""
SUITE_ONE_IN = 4
"""A seed in so many is a Function of the suite."""
CALLS = 4
"""Of one kind, so that the last are written out."""
MODES = ("backward", "second call", "vmap in_dims=0", "jvp", "double backward", "forward")
UNITS = 64 * 2.0**-23


# ------------------------------------------------------------------ settings
@dataclass(frozen=True)
class Configuration:
    """Settings that must make no difference. guess: versions of kernels are chosen at random, as by a clock."""

    disable: tuple[str, ...] = ()
    backend: str = "reference"
    dynamic: bool = True
    debug: bool = False
    store: bool = False
    guess: bool = False

    def __str__(self) -> str:
        flags = [n for n in ("debug", "store", "guess") if getattr(self, n)] + ([] if self.dynamic else ["static"])
        return f"{self.backend}, without {', '.join(self.disable) or 'nothing'}" + "".join(f", {f}" for f in flags)


def configuration(seed: int) -> Configuration:
    """The configuration of this number. Of three, one leaves out a single step, each in turn; one several; one none."""
    rng = random.Random(f"configuration {seed}")
    names = list(SWITCHES)
    kind, turn = seed % 3, seed // 3
    disable = [names[turn % len(names)]] if kind == 0 else rng.sample(names, rng.choice((2, 4, 8, 16))) * (kind == 1)
    backend = "reference" if rng.random() < 0.4 else "interpret"
    flags = [rng.random() < share for share in (0.25, 0.3, 0.2, 0.25)]
    static, debug, store, guess = flags
    kernels = backend == "interpret"
    return Configuration(tuple(sorted(disable)), backend, not static, debug, store and kernels, guess and kernels)


@contextlib.contextmanager
def in_force(chosen: Configuration, seed: int) -> Iterator[None]:
    """Within the block, a configuration; captures are kept in a folder of its own."""
    settings = {"disable": chosen.disable, "debug": chosen.debug, "store": chosen.store}
    with contextlib.ExitStack() as stack:
        if chosen.store:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(mock.patch.dict(os.environ, {"FUSEGRAD_CACHE_DIR": folder}))
        if chosen.guess:
            rng = random.Random(seed)
            stack.enter_context(mock.patch.object(targets, "is_tuned", lambda backend: True))
            stack.enter_context(mock.patch.object(tune, "fastest", lambda *a, **k: _guessed(rng, a[-1])))
        stack.enter_context(config.patch(**settings))
        yield


def _guessed(rng: random.Random, launches: Any) -> str:
    """The version that a clock could have found the fastest, once all have run."""
    for launch in launches.values():
        launch()
    return rng.choice(sorted(launches))


# ------------------------------------------------------------------ subjects
@dataclass(frozen=True)
class Sample:
    """A Function of the suite, as a subject."""

    name: str
    cls: Any
    arguments: tuple[Any, ...]


def suite() -> list[Any]:
    """The cases of tests/suite/functions.py, under a name that no other folder has."""
    name = "suite_functions"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE.parent / "suite" / "functions.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return list(sys.modules[name].CASES)


def sample(seed: int) -> Sample:
    rng = random.Random(seed)
    case = rng.choice(suite())
    torch.manual_seed(seed)
    return Sample(case.name, case.cls, tuple(case.make(rng.choice((2, 3, 5, 16, 17)))))


@dataclass
class Result:
    """What a seed gave: the configuration, what was tried, faults in words, what ran as written."""

    seed: int
    name: str
    chosen: Configuration
    modes: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    faults: list[dict[str, str]] = field(default_factory=list)
    written: tuple[str, ...] = ()

    def failed(self, mode: str, difference: Any, text: str) -> None:
        what = f"{mode}: {'numbers' if difference.index is not None else str(difference.fact)[:60]}"
        words = f"{self.name} on {self.chosen}: {mode}\n  {difference}\n\n{text}"
        self.faults.append({"kind": what, "text": words})


def tested(seed: int, chosen: Configuration | None = None) -> Result:
    """A seed's program under its configuration, against eager."""
    chosen = chosen or configuration(seed)
    with in_force(chosen, seed), without_warnings():
        return _suites(seed, chosen) if seed % SUITE_ONE_IN == 1 else _programs(seed, chosen)


def _subject(target: Any, arguments: Sequence[Any], chosen: Configuration, by: Tolerance) -> tuple[Subject, Any]:
    fast = fusegrad.compile(target, backend=chosen.backend, dynamic=chosen.dynamic)
    return examine(fast, tuple(arguments), {}, chosen.backend, by, 0)


def _programs(seed: int, chosen: Configuration) -> Result:
    p = program(seed)
    found = Result(seed, p.name, chosen)
    by = tolerance(p, "interpret")  # sums in another order, on either backend, once steps are left out
    subject, xs = _subject(load(p), p.tensors(0), chosen, by)
    for recipe in recipes(p, xs, random.Random(seed), CASES):
        case = recipe.case(xs)
        if (p.kind == "function" and case.mode in OURS) or (subject.random and case.mode in DERIVABLE):
            continue
        difference = _often(found, subject, case, partial(judged, p, subject, case))
        if difference is not None and confirmed(p, subject, recipe, difference):
            found.failed(f"{case.mode}, {case.label}", difference, source(p))
            break
    found.written = _written(subject)
    forget(p)
    return found


def _often(found: Result, subject: Subject, case: Case, run: Any) -> Any:
    """The case once; the commonest so often that its call is written out, and then from disk, if that is on."""
    difference = None
    again = CALLS + found.chosen.store if case.mode == "backward" else 1
    for call in range(again):
        if call == CALLS:
            subject.fast, subject.compiler = subject.compile_again()
        result, difference = run()
        found.modes.append(case.mode)
        found.results.append(result)
        if difference is not None:
            break
    return difference


def _suites(seed: int, chosen: Configuration) -> Result:
    one = sample(seed)
    found = Result(seed, one.name, chosen)
    try:
        subject, xs = _subject(one.cls, one.arguments, chosen, Tolerance(UNITS, UNITS))
    except CheckArgumentError:
        return found
    for mode in ("backward", random.Random(seed).choice(MODES)):
        case = Case(mode, "as they are", xs)
        difference = _often(found, subject, case, partial(_row, subject, case))
        if difference is not None:
            found.failed(mode, difference, f"tests/suite/functions.py, {one.name}, seed {seed}")
            break
    found.written = _written(subject)
    return found


def _row(subject: Subject, case: Case) -> tuple[str, Any]:
    row, difference = run_case(subject, case)
    return row.result, difference


def _written(subject: Subject) -> tuple[str, ...]:
    return tuple(str(r.reason) for r in subject.compiler.ledger.records.values() if r.status == "opaque")


# ------------------------------------------------------------------ the run
def work(pipe: Connection, options: argparse.Namespace) -> None:
    """Answers each seed, in a process of its own."""
    torch.set_num_threads(1)
    for seed in iter(pipe.recv, None):
        start = time.process_time()
        try:
            pipe.send({**_answer(tested(seed)), "seconds": time.process_time() - start, "memory": memory()})
        except CheckArgumentError:
            pipe.send({"seed": seed, "faults": [], "memory": memory()})
        except Exception:
            fault = {"kind": "the fuzzer raises", "text": f"{configuration(seed)}\n{traceback.format_exc()}"}
            pipe.send({"seed": seed, "faults": [fault], "memory": memory()})


def _answer(found: Result) -> dict[str, Any]:
    counts = {"modes": Counter(found.modes), "results": Counter(found.results), "written": list(found.written)}
    return {"seed": found.seed, "faults": found.faults, "by_backend": {found.chosen.backend: counts},
            "disable": found.chosen.disable}  # fmt: skip


@dataclass
class Configurations(Sum):
    """Counts over configurations."""

    left_out: Counter[str] = field(default_factory=Counter)

    def add(self, answer: dict[str, Any]) -> None:
        super().add(answer)
        self.left_out.update(answer.get("disable", ()))

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "left_out": dict(sorted(self.left_out.items()))}

    def __str__(self) -> str:
        told = ", ".join(f"{name} {n}" for name, n in self.left_out.most_common())
        return f"{super().__str__()}\nleft out: {told}"


if __name__ == "__main__":
    told = "random programs under random settings, against eager"
    sys.exit(run_by_seed("tests/fuzz/configurations.py", told, work, Configurations()))
