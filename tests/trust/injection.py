"""Faults on purpose: each function of the package raises, one at a time, in calls of many kinds; the answer is eager's.

    python tests/trust/injection.py                     (scenes that have their numbers are not run again)
    python tests/trust/injection.py --every             (a function raises in each scene that runs it)
    python tests/trust/injection.py --scene first --function runtime/functorch/unit.py:TransformableGraph.captured

A scene is one way of calling a class. What functions of the package run in it raise at every call of them, by a code of
their own, for as long as the scene's last step takes: each in one scene of every kind of call, the first that runs it.
Values, gradients, arguments that are written, and the state of torch's generator have to be eager's; then the class is
used again without the fault.
"""

from __future__ import annotations

import argparse
import builtins
import gc
import json
import logging
import os
import random
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import outcome
import torch
import torch.utils._pytree as pytree
from injected_scenes import SCENES, Scene, kind_of
from reviewed import REVIEWED, C

import fusegrad

PACKAGE = Path(fusegrad.__file__).resolve().parent
ROOMS = ("ir", "tracer", "codegen", "runtime")
FILE = outcome.RESULTS / "injection.json"
TRIED = PACKAGE / "build" / "injected.json"
"""The functions that raised, by kind of call: for a run that goes on."""


class Injected(Exception):
    """No error that the package knows."""


KINDS: tuple[type[Exception], ...] = (Injected, RuntimeError, KeyError, AssertionError, AttributeError, RecursionError)
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


# ------------------------------------------------------------------ functions of the package
def place_of(code: types.CodeType) -> str | None:
    """`runtime/functorch/unit.py:TransformableGraph.captured`; None for what is not the package's."""
    file = Path(code.co_filename)
    if not file.is_absolute():
        return None
    parts = file.resolve()
    if not parts.is_relative_to(PACKAGE):
        return None
    inner = parts.relative_to(PACKAGE)
    if inner.parts[0] not in ROOMS or code.co_name == "<module>":
        return None
    return f"{inner.as_posix()}:{code.co_qualname}"


class _Profile:
    """Within it the package's functions that run are noted, in the order of their first calls."""

    def __init__(self, found: dict[types.CodeType, str]) -> None:
        self.found, self.others = found, set[types.CodeType]()

    def __enter__(self) -> None:
        threading.setprofile(self.see)
        sys.setprofile(self.see)

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def see(self, frame: types.FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or code in self.found or code in self.others:
            return
        if (place := place_of(code)) is not None:
            self.found[code] = place
        else:
            self.others.add(code)


class fault:
    """Within it the functions of this code, and those that are made of it, raise."""

    def __init__(self, code: types.CodeType, kind: type[Exception]) -> None:
        self.code, self.kind, self.hits = code, kind, 0
        self.name = f"_injected_{id(self)}"
        self.made = _raising_code(code, self.name)
        self.makers: list[tuple[types.FunctionType, types.CodeType]] = []

    def __enter__(self) -> fault:
        vars(builtins)[self.name] = self
        self.makers = [(maker, maker.__code__) for maker in _makers_of(self.code)]
        for maker, own in self.makers:
            maker.__code__ = own.replace(co_consts=tuple(self.made if c is self.code else c for c in own.co_consts))
        for function in _functions_of(self.code):
            function.__code__ = self.made
        return self

    def __exit__(self, *_: Any) -> None:
        for maker, own in self.makers:
            maker.__code__ = own
        for function in _functions_of(self.made):
            function.__code__ = self.code
        del vars(builtins)[self.name]

    def __call__(self) -> Exception:
        self.hits += 1
        return self.kind("injected")


def _raising_code(code: types.CodeType, name: str) -> types.CodeType:
    namespace: dict[str, Any] = {}
    exec(f"def raising(*args, **kwargs):\n    raise {name}()", namespace)  # in a frame of ours, and no other
    return namespace["raising"].__code__.replace(  # type: ignore[no-any-return]
        co_freevars=code.co_freevars, co_name=code.co_name, co_qualname=code.co_qualname, co_filename=code.co_filename
    )


def _functions_of(code: types.CodeType) -> list[types.FunctionType]:
    return [f for f in gc.get_referrers(code) if isinstance(f, types.FunctionType) and f.__code__ is code]


def _makers_of(code: types.CodeType) -> Iterator[types.FunctionType]:
    """The functions around a nested one: what they make from now on raises."""
    for constants in gc.get_referrers(code):
        if isinstance(constants, tuple):
            for outer in [c for c in gc.get_referrers(constants) if isinstance(c, types.CodeType)]:
                yield from _functions_of(outer)


# ------------------------------------------------------------------ one telling
@dataclass
class Told:
    """What a step gave: values, or an error; and the state of torch's generator after it."""

    values: Any
    error: str | None
    drawn: Any


def told(scene: Scene, call: Callable[..., Any], around: Any = None) -> Told:
    """One telling. around: a context in which the second step takes place."""
    from injected_scenes import State, tensors

    torch.manual_seed(3)
    state = State(call, tensors())
    scene.before(state)
    torch.manual_seed(5)
    try:
        if around is None:
            values = scene.act(state)
        else:
            with around:
                values = scene.act(state)
    except Exception as error:
        return Told(None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", None)
    return Told(values, None, torch.get_rng_state())


def difference(ours: Told, eagers: Told) -> str | None:
    """How two tellings differ."""
    if ours.error != eagers.error:
        return f"raised {ours.error}" if ours.error else f"did not raise {eagers.error}"
    if ours.error is not None:
        return None
    mine, theirs = pytree.tree_leaves(ours.values), pytree.tree_leaves(eagers.values)
    if len(mine) != len(theirs) or not all(map(_alike, mine, theirs)):
        return "wrong values"
    return None if torch.equal(ours.drawn, eagers.drawn) else "drew other random numbers"


def differs_from_all(ours: Told, right: Sequence[Told]) -> str | None:
    """How a telling differs from the first of these; None where it is one of them."""
    found = [difference(ours, r) for r in right]
    return None if None in found else found[0]


def _alike(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return bool(a == b)
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, **TOLERANCE, equal_nan=True)


# ------------------------------------------------------------------ one scene
@dataclass
class Result:
    """One scene. hits: injections that were met. silent: that nothing was told of."""

    functions: int = 0
    hits: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)
    reviewed: list[str] = field(default_factory=list)
    afterwards: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)


LEFT_OUT = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")
NET = ("runtime/fallback/answer.py:", "runtime/fallback/effects.py:")


class Injection:
    """All functions of one scene."""

    def __init__(self, scene: Scene, seed: int = 0) -> None:
        self.scene, self.random, self.number, self.result = scene, random.Random(seed), seed * 1e-3, Result()

    def another(self) -> float:
        """A number that no class was made of."""
        self.number += 1e-3
        return self.number

    def functions(self) -> dict[types.CodeType, str]:
        """What runs in the scene's second step, in a process that has done it before."""
        for _ in range(2):
            told(self.scene, self.scene.compiled(self.another()))
        found: dict[types.CodeType, str] = {}

        ours = told(self.scene, self.scene.compiled(number := self.another()), _Profile(found))
        if (why := differs_from_all(ours, self.right(number))) is not None:
            self.result.wrong.append(f"without a fault: {why}")
        kept = {
            code: p for code, p in found.items()
            if code.co_name not in LEFT_OUT and not p.startswith(NET) and REVIEWED.get(p) is not C
        }  # fmt: skip
        self.result.functions = len(kept)
        return kept

    def right(self, number: float) -> list[Told]:
        """Eager's answer; where that is an error, since a rule is missing that we derive, ours without a fault, too."""
        eagers = told(self.scene, self.scene.eager(number))
        return [eagers] if eagers.error is None else [eagers, told(self.scene, self.scene.compiled(number))]

    def all(self, share: float = 1.0, but: Collection[str] = ()) -> Result:
        began = time.process_time()
        for code, place in self.functions().items():
            if place not in but and self.random.random() < share:
                self.one(code, place)
                self.result.tried.append(place)
        self.result.seconds = round(time.process_time() - began, 1)
        return self.result

    def one(self, code: types.CodeType, place: str) -> None:
        """One function raises; then the class is used without that."""
        number, kind = self.another(), self.random.choice(KINDS)
        call = self.scene.compiled(number)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            injected = fault(code, kind)
            ours = told(self.scene, call, injected)
            if not injected.hits:
                return
            self.result.hits += 1
            right = self.right(number)
            self._judge(place, kind, differs_from_all(ours, right))
            again = differs_from_all(told(self.scene, call), right)
        if again is not None and place not in REVIEWED:
            self.result.afterwards.append(f"{place} ({kind.__name__}): {again}")
        if not any(issubclass(w.category, fusegrad.FallbackWarning) for w in warned):
            self.result.silent.append(place)

    def _judge(self, place: str, kind: type[Exception], why: str | None) -> None:
        if why is None:
            return
        if place in REVIEWED:
            self.result.reviewed.append(place)
        elif why.startswith("raised"):
            self.result.raised.append(f"{place} ({kind.__name__}): {why}")
        else:
            self.result.wrong.append(f"{place} ({kind.__name__}): {why}")


# ------------------------------------------------------------------ the run
def one_scene(name: str, seed: int, share: float, but: Collection[str] = ()) -> Result:
    """In this process."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # torch tells of errors that pass it
    return Injection(SCENES[name], seed).all(share, but)


def in_a_process(name: str, seed: int, share: float, every: bool) -> dict[str, Any]:
    """In a process of its own: what a fault leaves behind in one scene is none of another's."""
    environment = {**os.environ, "FUSEGRAD_STORE": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--scene", name, "--seed", str(seed), "--share", str(share)]
    done = subprocess.run([*command, *(["--every"] if every else [])], capture_output=True, text=True, env=environment)
    if done.returncode:
        return {**asdict(Result()), "raised": [f"the process ended with {done.returncode}: {done.stderr[-400:]}"]}
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def tried() -> dict[str, list[str]]:
    """By kind of call, what need not raise there again."""
    return json.loads(TRIED.read_text(encoding="utf-8")) if TRIED.exists() else {}


def _note_tried(name: str, places: Sequence[str]) -> int:
    """How many functions raised by now, in any kind of call."""
    known = tried()
    known[kind_of(name)] = sorted({*known.get(kind_of(name), ()), *places})
    TRIED.parent.mkdir(exist_ok=True)
    TRIED.write_text(json.dumps(known), encoding="utf-8")
    return len({place for places in known.values() for place in places})


def total(scenes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The sums, and what is not as it has to be."""
    numbers = {key: sum(s[key] for s in scenes.values()) for key in ("functions", "hits")}
    lists = {key: sum(len(s[key]) for s in scenes.values()) for key in ("wrong", "raised", "afterwards", "reviewed")}
    silent = sorted({place for s in scenes.values() for place in s["silent"]})
    return {**numbers, **lists, "silent": len(silent), "scenes": len(scenes)}


def run(seed: int, share: float, fresh: bool, every: bool) -> dict[str, Any]:
    """Every scene that has no numbers yet."""
    known = {} if fresh or not FILE.exists() else json.loads(FILE.read_text(encoding="utf-8"))["each"]
    if not known:
        TRIED.unlink(missing_ok=True)
    for name in SCENES:
        if name in known:
            continue
        known[name] = in_a_process(name, seed, share, every)
        places = _note_tried(name, known[name].pop("tried"))
        found = {"seed": seed, "share": share, "every": every, "places": places, "total": total(known), "each": known}
        outcome.write("injection", found)
        bad = {key: known[name][key] for key in ("wrong", "raised", "afterwards") if known[name][key]}
        print(f"{name}: {known[name]['hits']} of {known[name]['functions']} functions, {bad or 'right'}", flush=True)
    return total(known)


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser()
    options.add_argument("--scene", choices=[*SCENES])
    options.add_argument("--function", help="file:name, with --scene: this one alone, with its error")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--share", type=float, default=1.0, help="of the functions of a scene")
    options.add_argument("--every", action="store_true", help="a function raises in each scene that runs it")
    options.add_argument("--fresh", action="store_true", help="scenes that have their numbers are run again")
    chosen = options.parse_args(arguments)
    if chosen.function:
        injection = Injection(SCENES[chosen.scene], chosen.seed)
        for code, place in injection.functions().items():
            if place == chosen.function:
                injection.one(code, place)
        print(json.dumps(asdict(injection.result), indent=1))
        return 0
    if chosen.scene:
        but = () if chosen.every else tried().get(kind_of(chosen.scene), ())
        print(json.dumps(asdict(one_scene(chosen.scene, chosen.seed, chosen.share, set(but)))))
        return 0
    found = run(chosen.seed, chosen.share, chosen.fresh, chosen.every)
    print(json.dumps(found))
    return int(bool(found["wrong"] or found["raised"] or found["afterwards"]))


if __name__ == "__main__":
    sys.exit(main())
