"""`make fuzz-graphs N=200 SEED=0`: random programs within graphs that others make, against eager.

Each seed is a program and one way to reach it: torch.compile(fullgraph=True) with sizes as numbers or as symbols, two
sizes one after the other, torch.export and its module, torch.func's transforms, autocast or a checkpoint within
torch.compile, and autocast alone. --help says more.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
import torch.utils.checkpoint  # noqa: E402
from fuzz_programs import Written, forget, load, program, source  # noqa: E402
from fuzz_runs import Sum, answer_seeds, run_by_seed  # noqa: E402
from fuzz_trials import near, tensors  # noqa: E402

import fusegrad  # noqa: E402
from fusegrad.runtime.check.compare import Outcome, Tolerance, first_difference  # noqa: E402
from fusegrad.runtime.check.modes import gradients, leaves, named_leaves, plain  # noqa: E402
from fusegrad.runtime.check.subject import _normal, _seed  # noqa: E402
from fusegrad.runtime.check.variations import with_sizes  # noqa: E402
from fusegrad.tracer.methods import as_tuple  # noqa: E402

Tensor = torch.Tensor
F = Callable[..., Any]
HALVED = 2.0**-5
"""Some units of bfloat16."""
REFUSED = ("it returns a view of an argument that it writes to [FG033]", "and the method [FG070]")
TRANSFORMED = ("it writes to an argument", "would draw anew [FG025]", "modified by an inplace operation")
"""What a graph does not take, by name, and what it does not take under torch.func's transforms."""


# ------------------------------------------------------------------ what is run
def differentiated(f: F, xs: Sequence[Tensor], gs: Sequence[Any]) -> dict[str, Any]:
    xs = leaves(xs)
    outputs = as_tuple(f(*xs))
    found: dict[str, Any] = {f"output {i}": o for i, o in enumerate(outputs)}
    found |= {f"output {i} requires grad": o.requires_grad for i, o in enumerate(outputs) if isinstance(o, Tensor)}
    found |= {f"gradient {i}": g for i, g in enumerate(gradients(outputs, xs, gs))}
    return found | {f"argument {i} after the call": x.detach() for i, x in enumerate(xs)}


def without_gradients(f: F, xs: Sequence[Tensor], gs: Sequence[Any]) -> dict[str, Any]:
    with torch.no_grad():
        return {f"output {i}": o for i, o in enumerate(as_tuple(f(*plain(leaves(xs)))))}


def several(result: Any) -> tuple[Any, ...]:
    """What a method returned: one value, or a tuple of them. Dynamo follows it, as all that is below."""
    return result if isinstance(result, tuple) else (result,)


def tangent(x: Tensor) -> Tensor:
    return torch.full_like(x, 0.5)


def pulled(f: F) -> F:
    """torch.func.vjp of the outputs that are differentiated, to be compiled with it."""

    def within(*xs: Tensor) -> Any:
        outputs, pull = torch.func.vjp(f, *xs)
        return outputs, pull(tuple(tangent(o) for o in outputs))

    return within


def pushed(f: F) -> F:
    return lambda *xs: torch.func.jvp(f, xs, tuple(tangent(x) for x in xs))


def mapped(f: F) -> F:
    return lambda *xs: torch.func.vmap(f)(*[torch.stack([x, x.flip(0) if x.dim() else x * 0.5]) for x in xs])


TRANSFORMS = {"vjp": pulled, "jvp": pushed, "vmap": mapped}


def halved(f: F) -> F:
    """Under autocast, to be compiled with it or not."""

    def within(*xs: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return f(*xs)

    return within


def checkpointed(f: F) -> F:
    return lambda *xs: torch.utils.checkpoint.checkpoint(f, *xs, use_reentrant=False)


AROUND = {"autocast": halved, "checkpoint": checkpointed}


def transformed(f: F, xs: Sequence[Tensor], gs: Sequence[Any]) -> dict[str, Any]:
    return named_leaves("result", f(*plain(leaves(xs))))


# ------------------------------------------------------------------ ways
def compiled(f: F, xs: Sequence[Tensor], **options: Any) -> F:
    torch._dynamo.reset()
    return torch.compile(f, backend="aot_eager", fullgraph=True, **options)


def as_it_is(f: F, xs: Sequence[Tensor], **options: Any) -> F:
    return f


def exported(f: F, xs: Sequence[Tensor], **options: Any) -> F:
    class Holder(torch.nn.Module):
        def forward(self, *xs: Tensor) -> Any:
            return f(*xs)

    return torch.export.export(Holder(), tuple(xs), **options).module()


@dataclass(frozen=True)
class Way:
    """How a program is reached: what makes the graph, what is asked of it, and for how many sizes."""

    name: str
    make: Callable[..., F] = compiled
    ask: Callable[..., dict[str, Any]] = differentiated
    sizes: int = 1
    transform: str = ""
    around: str = ""
    options: tuple[tuple[str, Any], ...] = ()


WAYS = (
    Way("torch.compile"),
    Way("torch.compile, two sizes", sizes=2),
    Way("torch.compile(dynamic=True)", sizes=2, options=(("dynamic", True),)),
    Way("torch.compile under no_grad", ask=without_gradients),
    Way("torch.export", exported),
    Way("torch.export(strict=True)", exported, options=(("strict", True),)),
    Way("autocast", as_it_is, around="autocast"),
    Way("autocast within torch.compile", around="autocast"),
    Way("checkpoint within torch.compile", around="checkpoint"),
    *(Way(f"torch.func.{t} within torch.compile", ask=transformed, transform=t) for t in TRANSFORMS),
)


@dataclass
class Result:
    seed: int
    way: str
    result: str = "ok"
    faults: list[dict[str, str]] = field(default_factory=list)


def call_of(p: Written, apply: F) -> F:
    """The program as a function of its tensors, its other arguments being in the text."""
    names = ", ".join(a.name for a in p.arguments if not a.text)
    given = ", ".join(a.text or (f"{a.name}.clone()" if a.name == p.dirty else a.name) for a in p.arguments)
    space = {"apply": apply}
    exec(f"def call({names}):\n    return apply({given})\n", space)
    return space["call"]


def tested(seed: int, way: Way | None = None) -> Result:
    """A seed's program, reached in one way, beside eager."""
    p = program(seed)
    way = way or random.Random(f"way {seed}").choice(WAYS)
    found = Result(seed, way.name)
    target = load(p)
    fast = fusegrad.compile(target, backend="reference")
    ours, eager = (call_of(p, t.apply if isinstance(target, type) else t) for t in (fast, target))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _judge(p, way, ours, eager, found)
    finally:
        forget(p)
    return found


def _judge(p: Written, way: Way, ours: F, eager: F, found: Result) -> None:
    every = [tensors(p, 0), *([_resized(tensors(p, 1))] if way.sizes > 1 else [])]
    if way.transform:
        ours, eager = (_of_floats(f, every[0], way.transform) for f in (ours, eager))
    if way.around:
        ours, eager = (AROUND[way.around](f) for f in (ours, eager))
    reached, made = None, Outcome({})
    for xs in every:
        gs = _weights(eager, xs) if way.ask is differentiated else []
        theirs = outcome(lambda xs=xs, gs=gs: way.ask(eager, xs, gs))
        if theirs.error is not None and way.transform:
            found.result, theirs = "as outside of the graph", outcome(lambda xs=xs, gs=gs: way.ask(ours, xs, gs))
        if theirs.error is not None:
            found.result = "eager raises"
            return
        if reached is None:
            _seed(0)
            made = outcome(lambda xs=xs: {"f": way.make(ours, xs, **dict(way.options))})
            reached = made.values.get("f")
        mine = made if made.error is not None else outcome(lambda xs=xs, gs=gs, f=reached: way.ask(f, xs, gs))
        if mine.error is not None:
            _refused(p, way, found, mine.error)
            return
        by = Tolerance(HALVED, HALVED, False) if way.around == "autocast" else replace(near(p), strict=False)
        difference = first_difference(mine, theirs, None, by)
        if difference is not None and not _is_so_outside(way, ours, xs, gs, mine, by):
            _failed(p, way, found, difference.fact, str(difference))
            return


def _is_so_outside(way: Way, ours: F, xs: Sequence[Tensor], gs: Sequence[Any], mine: Outcome, by: Tolerance) -> bool:
    """Whether the compiled program says the same without a graph: `make fuzz` judges that, by float64."""
    outside = outcome(lambda: way.ask(ours, xs, gs))
    return outside.error is None and first_difference(mine, outside, None, by) is None


def _of_floats(f: F, xs: Sequence[Tensor], transform: str) -> F:
    """The transform of `f` in its floating arguments and outputs alone."""
    at = [i for i, x in enumerate(xs) if x.is_floating_point()]
    fixed = [x.detach() for x in xs]

    def inner(*given: Tensor) -> Any:
        full = list(fixed)
        for i, x in zip(at, given, strict=True):
            full[i] = x
        return tuple(o for o in several(f(*full)) if isinstance(o, Tensor) and o.is_floating_point())

    made = TRANSFORMS[transform](inner)
    return lambda *all_: made(*[all_[i] for i in at])


def _resized(xs: Sequence[Tensor]) -> list[Tensor]:
    lengths = sorted({n for x in xs for n in x.shape if n > 1})
    return with_sizes(list(xs), {n: n + 3 for n in lengths}) if lengths else list(xs)


def _weights(f: F, xs: Sequence[Tensor]) -> list[Any]:
    _seed(0)
    try:
        outputs = as_tuple(f(*leaves(xs)))
    except Exception:
        return []
    numbers = torch.Generator().manual_seed(1)
    return [_normal(o, numbers) if isinstance(o, Tensor) and o.requires_grad else None for o in outputs]


def outcome(run: Callable[[], dict[str, Any]]) -> Outcome:
    _seed(0)
    try:
        return Outcome(run())
    except Exception as error:
        return Outcome({}, error)


def _refused(p: Written, way: Way, found: Result, error: Exception) -> None:
    text = f"{type(error).__name__}: {error}"
    if any(words in text for words in (*REFUSED, *(TRANSFORMED if way.transform else ()))):
        found.result = "refused"
    else:
        _failed(p, way, found, f"raises {type(error).__name__}", text[-1500:])


def _failed(p: Written, way: Way, found: Result, what: str, text: str) -> None:
    found.result = "DIFFERS"
    words = f"{p.name} in {way.name}\n  {text}\n\n{source(p)}"
    found.faults.append({"kind": f"{way.name}: {what[:80]}", "text": words})


# ------------------------------------------------------------------ the run
def work(pipe: Connection, options: argparse.Namespace) -> None:
    """Answers each seed, in a process of its own."""
    torch.set_num_threads(1)
    answer_seeds(pipe, _answer)


def _answer(seed: int) -> dict[str, Any]:
    found = tested(seed)
    counts = {"modes": Counter([found.way]), "results": Counter([found.result]), "written": []}
    return {"faults": found.faults, "by_backend": {"reference": counts}}


if __name__ == "__main__":
    told = "random programs within the graphs of torch.compile and torch.export"
    sys.exit(run_by_seed("tests/fuzz/graphs.py", told, work, Sum()))
