"""Random worlds, one class: what was captured in one must never be served, wrong, in another. Eager is the judge.

    python tests/trust/pairs.py N [--seed S] [--backend B] [--subject NAME] [--stored] [--json PATH]

A trial goes A A A, B B B, A, then at random, so that calls are captured, looked up and written out; backward may run
in another world than forward. With --stored what is captured in A is on disk, and B is met by another compiled class
of the same source: at every tenth trial in another process. Every trial is made of its seed alone.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import linecache
import os
import random
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import outcome
import torch
from worlds import PRELUDE, SUBJECTS, Subject

import fusegrad

Tensor = torch.Tensor
AROUND = (
    "contextlib.nullcontext()",
    "contextlib.nullcontext()",
    "contextlib.nullcontext()",
    "torch.autocast('cpu', torch.bfloat16)",
    "torch.autocast('cpu', torch.float16)",
    "torch.no_grad()",
    "torch.inference_mode()",
    "torch.device('cpu')",
    "torch.autograd.graph.save_on_cpu()",
    "deterministic()",
    "default_dtype(torch.float64)",
)
AFTER = (
    "torch.autocast('cpu', torch.bfloat16)",
    "default_dtype(torch.float64)",
    "deterministic()",
    *["contextlib.nullcontext()"] * 5,
)
GRADIENTS = {
    "ones": torch.ones_like,
    "expanded": lambda t: t.new_ones(()).expand(t.shape),
    "random": lambda t: torch.arange(t.numel()).reshape(t.shape).to(t.dtype) + 1,
    "transposed": lambda t: (
        torch.arange(t.numel()).reshape(t.shape[::-1]).to(t.dtype).permute(*reversed(range(t.dim())))
    ),
    "stepped": lambda t: torch.arange(2 * t.numel()).reshape(*t.shape, 2).to(t.dtype)[..., 0],
    "absent": lambda t: None,
}
HOW = ("backward", "backward", "backward", "grad", "create_graph", "func.grad", "func.vmap", "func.jvp", "detached")
OFTEN = 4


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """torch.use_deterministic_algorithms"""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """torch.set_default_dtype"""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class World:
    """All that may differ between two calls."""

    settings: tuple[tuple[str, int], ...]
    call: str
    around: str = AROUND[0]
    after: str = AROUND[0]  # around backward
    how: str = "backward"
    gradients: tuple[str, str] = ("ones", "ones")
    needs: tuple[bool, bool] = (True, True)


def world_of(subject: Subject, numbers: random.Random) -> World:
    """One at random."""
    plain = numbers.random() < 0.5
    return World(
        tuple((name, numbers.randrange(len(states))) for name, states in subject.knobs.items()),
        numbers.choice(list(subject.calls)),
        *(() if plain else (numbers.choice(AROUND), numbers.choice(AFTER), numbers.choice(HOW))),
        gradients=(numbers.choice([*GRADIENTS]), numbers.choice([*GRADIENTS])) if not plain else ("ones", "random"),
        needs=(numbers.random() < 0.8, numbers.random() < 0.8) if not plain else (True, True),
    )


def neighbour(world: World, subject: Subject, numbers: random.Random) -> World:
    """A world that differs in one thing, or in two."""
    for _ in range(numbers.choice((1, 1, 2))):
        other = world_of(subject, numbers)
        name = numbers.choice(
            ["settings"] * 4 * bool(subject.knobs)
            + ["call"] * (2 + 3 * (len(subject.calls) > 1))
            + ["around", "after", "how", "gradients", "needs"]
        )
        if name == "settings":
            own, at = list(world.settings), numbers.randrange(len(world.settings))
            own[at] = other.settings[at]
            world = replace(world, settings=tuple(own))
        else:
            world = replace(world, **{name: getattr(other, name)})
    return world


class Stage:
    """A module with a subject in it, and its compiled class."""

    COUNT = 0

    def __init__(self, subject: Subject, backend: str, folder: Path | None = None) -> None:
        """folder: where the source is a file, as it has to be for captures to be kept on disk."""
        Stage.COUNT += 1
        self.subject, self.backend = subject, backend
        name = f"pairs_subject_{Stage.COUNT}" if folder is None else "pairs_subject"
        filename, source = f"<{name}>", PRELUDE + subject.source
        self.module = types.ModuleType(name)
        self.names: dict[str, Any] = vars(self.module)
        sys.modules[name] = self.module
        if folder is not None:
            filename = str(folder / "pairs_subject.py")
            Path(filename).write_text(source)
            self.names["__file__"] = filename
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        exec(compile(source, filename, "exec"), self.names)
        self.names |= {"deterministic": deterministic, "default_dtype": default_dtype, "contextlib": contextlib}
        self.fast: Any = fusegrad.compile(self.names["Fn"], backend=backend)

    def enter(self, settings: Sequence[tuple[str, int]]) -> None:
        """What is outside becomes what a world says."""
        for name, state in settings:
            exec(self.subject.knobs[name][state], self.names)

    def leave(self) -> None:
        """Everything as it was."""
        self.enter([(name, 0) for name in self.subject.knobs])
        sys.modules.pop(self.module.__name__, None)

    def told(self, world: World, later: World) -> tuple[list[Any], list[Any]]:
        """Everything about a call of ours and about eager's, errors included; backward may run in a later world."""
        self.enter(world.settings)
        sides = [self.names["Fn"].apply, self.fast.apply]
        made = [caught(lambda side=side: self.forward(side, world)) for side in sides]  # type: ignore[misc]
        if later.settings != world.settings:
            self.enter(later.settings)
        theirs, mine = [caught(lambda m=m: m() if callable(m) else m) for m in made]  # type: ignore[misc]
        return mine, theirs

    def forward(self, apply: Callable[..., Any], world: World) -> Any:
        """What is known after forward, or what runs backward and then knows."""
        self.seed(world)
        args = eval(f"({world.call},)", self.names)
        args = args[0] if len(args) == 1 and isinstance(args[0], tuple) else args
        for a, needs in zip(args, world.needs, strict=False):
            if isinstance(a, Tensor) and not needs and a.is_leaf:
                a.requires_grad_(False)
        if world.how.startswith("func."):
            with eval(world.around, self.names):
                return transformed(apply, world.how, args)
        with eval(world.around, self.names):
            outputs = apply(*args)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        facts: list[Any] = [t.detach().clone() if not t.is_inference() else t for t in outputs]
        facts += [
            (t.dtype, t.stride(), t.requires_grad, t.is_inference(), t.is_leaf, type(t).__name__) for t in outputs
        ]
        wanted = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
        pairs = [
            (o, GRADIENTS[g](o.detach())) for o, g in zip(outputs, world.gradients, strict=False) if o.requires_grad
        ]
        pairs = [(o, g) for o, g in pairs if g is not None]
        if world.how == "detached" or not wanted or not pairs:
            return facts
        return lambda: self.backward(facts, world, pairs, wanted)

    def seed(self, world: World) -> None:
        """Both sides draw the same numbers."""
        number = sum(state for _, state in world.settings)
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)

    def backward(self, facts: list[Any], world: World, pairs: Any, wanted: Any) -> list[Any]:
        """The facts with the gradients."""
        self.seed(world)
        with eval(world.after, self.names):
            return facts + self.gradients(world.how, pairs, wanted)

    def gradients(self, how: str, pairs: Any, wanted: Any) -> list[Any]:
        """backward, in one of the ways in which it is asked for."""
        outputs, given = ([p[i] for p in pairs] for i in (0, 1))
        if how == "backward":
            leaves = [w for w in wanted if w.is_leaf]
            torch.autograd.backward(outputs, given)
            return [None if w.grad is None else w.grad.clone() for w in leaves]
        found = torch.autograd.grad(outputs, wanted, given, allow_unused=True, create_graph=how == "create_graph")
        return [None if g is None else g.detach() for g in found] + [g is not None and g.requires_grad for g in found]


def caught(run: Callable[[], Any]) -> Any:
    """What it returns, or which error it raises."""
    try:
        return run()
    except Exception as error:
        return ["raised", "RuntimeError" if isinstance(error, RuntimeError) else type(error).__name__]


def transformed(apply: Callable[..., Any], how: str, args: Sequence[Any]) -> list[Any]:
    """A call under a transform of its first argument; eager's old-style classes refuse it, ours may not."""
    first, rest = args[0].detach(), args[1:]

    def f(t: Tensor) -> Any:
        out = apply(t, *rest)
        return out[0] if isinstance(out, tuple) else out

    if how == "func.grad":
        return [torch.func.grad(lambda t: f(t).sum())(first)]
    if how == "func.jvp":
        return list(torch.func.jvp(f, (first,), (torch.ones_like(first),)))
    return [torch.vmap(f)(torch.stack([first, first * 2]))]


# ------------------------------------------------------------------ comparing
def same(mine: Any, theirs: Any, exact: bool) -> bool:
    """Bit for bit on the reference backend, to rounding on kernels."""
    if isinstance(theirs, Tensor):
        if not isinstance(mine, Tensor) or mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            return False
        if exact:
            return torch.equal(bits(mine), bits(theirs))
        wide = [
            t.detach().resolve_conj().to(torch.complex128 if t.is_complex() else torch.float64) for t in (mine, theirs)
        ]
        coarse = theirs.dtype in (torch.bfloat16, torch.float16)
        return torch.allclose(*wide, rtol=2e-2 if coarse else 1e-5, atol=1e-2 if coarse else 1e-5, equal_nan=True)
    if isinstance(theirs, list | tuple):
        return (
            isinstance(mine, list | tuple)
            and len(mine) == len(theirs)
            and all(same(m, t, exact) for m, t in zip(mine, theirs, strict=True))
        )
    return bool(mine == theirs)


def bits(t: Tensor) -> Tensor:
    """What a tensor is in memory; every NaN is one."""
    t = t.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    t = torch.view_as_real(t) if t.is_complex() else t
    if t.is_floating_point():
        t = torch.where(t.isnan(), torch.full_like(t, float("nan")), t)
    return t.contiguous().reshape(-1).view(torch.uint8)


def admissible(mine: Sequence[Any], theirs: Sequence[Any], how: str, exact: bool) -> bool:
    """Whether ours may be told in the place of eager's. What eager refuses under a transform, we may do."""
    if theirs[:1] == ["raised"] and how.startswith("func."):
        return True
    return same(mine, theirs, exact)


@dataclass
class Failure:
    """What a trial found wrong."""

    seed: int
    subject: str
    backend: str
    world: World
    later: World
    mine: str
    theirs: str

    def __str__(self) -> str:
        knobs = {n: SUBJECTS[self.subject].knobs[n][i] for n, i in self.world.settings}
        return (
            f"seed {self.seed}: {self.subject!r} on {self.backend}\n  in {self.world}\n  {knobs}"
            f"\n  backward in {self.later.settings}"
            f"\n  mine   {self.mine}\n  eager  {self.theirs}"
        )


def trial(seed: int, backend: str | None = None, only: str | None = None) -> tuple[Failure | None, int, str]:
    """(what was wrong, calls that were compared, the subject)."""
    numbers = random.Random(seed)
    name = numbers.choice([*SUBJECTS])
    name = only or name
    subject = SUBJECTS[name]
    backend = backend or ("interpret" if subject.kernels and numbers.random() < 0.15 else "reference")
    first = world_of(subject, numbers)
    second = neighbour(first, subject, numbers)
    known = [first, second, neighbour(first, subject, numbers)]
    sequence = [first] * numbers.randint(1, OFTEN) + [second] * numbers.randint(1, OFTEN) + [first]
    sequence += numbers.choices(known, k=numbers.randint(2, 8))
    stage, calls = Stage(subject, backend), 0
    try:
        for world in sequence:
            later = numbers.choice(known) if numbers.random() < 0.15 else world
            mine, theirs = stage.told(world, later)
            calls += 1
            if numbers.random() < 0.1:
                gc.collect()
            if not admissible(mine, theirs, world.how, backend == "reference"):
                return Failure(seed, name, backend, world, later, str(mine), str(theirs)), calls, name
    finally:
        stage.leave()
    return None, calls, name


# ------------------------------------------------------------------ captures on disk
STORED = [name for name, subject in SUBJECTS.items() if subject.kernels]


def stored_trial(seed: int, _: str | None = None, only: str | None = None) -> tuple[Failure | None, int, str]:
    """World A, then B and A again before another class of the same source, which finds on disk what A left there."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, FUSEGRAD_CACHE_DIR=f"{folder}/cache"):
        for act in (0, 1):
            if act == 1 and seed % 10 == 0:
                return in_another_process(seed, only, folder)
            failure, calls, name = stored_act(seed, only, folder, act)
            if failure is not None:
                break
    return failure, calls, name


def stored_act(seed: int, only: str | None, folder: str, act: int) -> tuple[Failure | None, int, str]:
    """One of the two halves of a trial."""
    numbers = random.Random(seed)
    name = only or numbers.choice(STORED)
    subject = SUBJECTS[name]
    first = replace(world_of(subject, numbers), around=AROUND[0], after=AROUND[0], how="backward")
    second = neighbour(first, subject, numbers)
    worlds = ([first, first], [second, first, second])[act]
    with fusegrad.config.patch(store=True, check=True):
        stage = Stage(subject, "interpret", Path(folder))
        try:
            for world in worlds:
                mine, theirs = stage.told(world, world)
                if not admissible(mine, theirs, world.how, False):
                    return Failure(seed, name, "interpret", world, world, str(mine), str(theirs)), len(worlds), name
        finally:
            stage.leave()
    return None, len(worlds), name


def in_another_process(seed: int, only: str | None, folder: str) -> tuple[Failure | None, int, str]:
    """The second half, by a new interpreter with another hash seed."""
    code = (
        f"import sys, warnings; sys.path.insert(0, {str(Path(__file__).parent)!r}); warnings.simplefilter('ignore')\n"
        f"import pairs; found = pairs.stored_act({seed}, {only!r}, {folder!r}, 1)\n"
        "print(found[0]); sys.exit(2 if found[0] is not None else 0)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": str(seed % 1000), "FUSEGRAD_STORE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    numbers = random.Random(seed)
    name = only or numbers.choice(STORED)
    if done.returncode == 0:
        return None, 3, name
    world = world_of(SUBJECTS[name], numbers)
    return (
        Failure(seed, name, "interpret", world, world, done.stdout + done.stderr[-2000:], "in another process"),
        3,
        name,
    )


def run(
    count: int, seed: int = 0, backend: str | None = None, only: str | None = None, most: int = 20, one: Any = trial
) -> dict[str, Any]:
    """Many trials, with what they found."""
    failures, calls, started, met = [], 0, time.time(), Counter[str]()
    before = fusegrad.stats()
    for number in range(count):
        failure, made, name = one(seed + number, backend, only)
        calls, met[name] = calls + made, met[name] + 1
        if failure is not None:
            failures.append(failure)
            print(failure, flush=True)
            if len(failures) >= most:
                break
    after = fusegrad.stats()
    return {
        "trials": sum(met.values()),
        "first seed": seed,
        "calls": calls,
        "subjects": len(met),
        "captures": after["captures"] - before["captures"],
        "from disk": after.get("from_disk", 0) - before.get("from_disk", 0),
        "failures": [str(f) for f in failures],
        "seconds": round(time.time() - started, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend")
    parser.add_argument("--subject")
    parser.add_argument("--most", type=int, default=20)
    parser.add_argument("--stored", action="store_true")
    parser.add_argument("--json")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    one = stored_trial if asked.stored else trial
    found = run(asked.count, asked.seed, asked.backend, asked.subject, asked.most, one)
    print(json.dumps({**found, "failures": len(found["failures"])}))
    if asked.json:
        path = Path(asked.json)
        known = json.loads(path.read_text()) if path.exists() else {}
        path.parent.mkdir(parents=True, exist_ok=True)
        known |= outcome.surroundings() | {"on disk" if asked.stored else "in one process": found}
        path.write_text(json.dumps(known, indent=1) + "\n")
    return 2 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
