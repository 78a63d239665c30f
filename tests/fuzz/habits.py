"""`make fuzz-habits N=200 SEED=0`: random Functions as people write them, told twice: the class and the class compiled.

Each seed is a class and a story of some calls: other numbers, other sizes, a global or a registry that changes in
between, double backward, hooks, checkpoints, torch.func. What is compared: results, gradients, flags, errors, what was
printed, logged and warned of, registries, random states and what is on `grad_fn`. --help says more.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import linecache
import random
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.utils._pytree as pytree  # noqa: E402
import torch.utils.checkpoint  # noqa: E402
from fuzz_habits import FORMS, Habitual, program, simpler, source  # noqa: E402
from fuzz_runs import Sum, answer_seeds, run_by_seed  # noqa: E402

import fusegrad  # noqa: E402

Tensor = torch.Tensor
Module = dict[str, Any]
Facts = list[tuple[str, Any]]
UNITS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 6e-2}
"""How far numbers may be apart: kernels add in another order, and a chain of steps shows it."""
SHRINK = 40
SEEN = ("SCALES", "RAMPS", "COUNT", "TIMES", "LOG", "STEPS")
"""What fragments fill in their module."""


# ------------------------------------------------------------------ one call
def backward(apply: Callable[..., Any], x: Tensor, a: Tensor) -> Facts:
    return _told_back(apply(x, a), x, a, lambda g: g)


def strided(apply: Callable[..., Any], x: Tensor, a: Tensor) -> Facts:
    """Gradients that have gaps, of arguments that are no rows."""
    x = x.detach().transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1).requires_grad_()
    return _told_back(apply(x, a), x, a, lambda g: torch.stack([g, g], -1)[..., 0])


def expanded(apply: Callable[..., Any], x: Tensor, a: Tensor) -> Facts:
    return _told_back(apply(x, a), x, a, lambda g: torch.tensor(0.5, dtype=g.dtype).expand(g.shape))


def half(apply: Callable[..., Any], x: Tensor, a: Tensor) -> Facts:
    """Of several results one alone is used."""
    out = apply(x, a)
    return _told_back(out[:1] if isinstance(out, tuple) else out, x, a, lambda g: g)


def _told_back(out: Any, x: Tensor, a: Tensor, lay: Callable[[Tensor], Tensor]) -> Facts:
    told = _outputs(out)
    if ends := _ends(out):
        told += _on_node(ends[0])
        given = [torch.linspace(-1, 1, max(e.numel(), 1))[: e.numel()].reshape(e.shape).to(e.dtype) for e in ends]
        told += _grads(torch.autograd.grad(ends, _moving(x, a), list(map(lay, given)), allow_unused=True))
    return told


def _outputs(out: Any) -> Facts:
    tensors = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
    return [("output", out), *((f"output {i}, its flags", _flags(t)) for i, t in enumerate(tensors))]


def _flags(t: Tensor) -> tuple[Any, ...]:
    """requires_grad, and how it lies in memory; of an empty tensor, and along axes of one, that says nothing."""
    strides = tuple(s if n > 1 else 0 for s, n in zip(t.stride(), t.shape, strict=True)) if t.numel() else ()
    return t.requires_grad, t.is_leaf, t._is_view(), strides


def _ends(out: Any) -> list[Tensor]:
    """What can be differentiated, each once."""
    found = {id(t): t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, Tensor) and t.requires_grad}
    return list(found.values())


def _sum(out: Any) -> Tensor:
    return sum(t.sum() for t in (out if isinstance(out, tuple) else (out,)) if _is_float(t))  # type: ignore[return-value]


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def twice(apply: Callable[..., Any], x: Tensor, a: Tensor) -> Facts:
    """Through one graph, two times."""
    out = apply(x, a)
    if not (ends := _ends(out)):
        return _outputs(out)
    first = torch.autograd.grad(_sum((*ends,)), _moving(x, a), retain_graph=True, allow_unused=True)
    again = torch.autograd.grad(_sum((*ends,)), _moving(x, a), allow_unused=True)
    return [*_outputs(out), *_grads(first), *_grads(again)]


def double(apply: Callable[..., Any], x: Tensor, a: Tensor) -> Facts:
    out = apply(x, a)
    if not (ends := _ends(out)):
        return _outputs(out)
    gs = [torch.full_like(e, 0.5).requires_grad_() for e in ends]
    first = torch.autograd.grad(ends, _moving(x, a), gs, create_graph=True, allow_unused=True)
    told = _grads(first)
    again = [f for f in first if f is not None and f.requires_grad]
    if again:
        second = torch.autograd.grad(
            again, [*_moving(x, a), *gs], [torch.ones_like(e) for e in again], allow_unused=True
        )
        told += [(f"second {i}", s) for i, s in enumerate(second)]
    return told


def without(apply: Callable[..., Any], x: Tensor, a: Tensor) -> Facts:
    with torch.no_grad():
        return _outputs(apply(x, a))


def alone(apply: Callable[..., Any], x: Tensor, a: Tensor) -> Facts:
    """Where the second argument needs no gradient."""
    return backward(apply, x, a.detach())


def flagged(apply: Callable[..., Any], x: Tensor, a: Tensor) -> Facts:
    return backward(lambda x, a: apply(x, a, "same"), x, a)


def checkpointed(apply: Callable[..., Any], x: Tensor, a: Tensor) -> Facts:
    return backward(lambda x, a: torch.utils.checkpoint.checkpoint(apply, x, a, use_reentrant=False), x, a)


def func_grad(apply: Callable[..., Any], x: Tensor, a: Tensor) -> Facts:
    return [("grad", torch.func.grad(lambda x, a: _sum(apply(x, a)))(x.detach(), a.detach()))]


def func_vmap(apply: Callable[..., Any], x: Tensor, a: Tensor) -> Facts:
    return [("vmap", torch.func.vmap(apply)(torch.stack([x, x * 2]).detach(), torch.stack([a, a]).detach()))]


def _moving(*given: Tensor) -> list[Tensor]:
    return [t for t in given if t.requires_grad]


def _grads(found: Any) -> Facts:
    told: Facts = [(f"gradient {i}", g) for i, g in enumerate(found)]
    return told + [(f"gradient {i} requires grad", g.requires_grad) for i, g in enumerate(found) if g is not None]


def _on_node(out: Tensor) -> Facts:
    """What the class put on ctx, as grad_fn shows it."""
    node = out.grad_fn
    names = ("alpha", "flag", "calls", "top")
    return [] if node is None else [(f"grad_fn.{n}", getattr(node, n, "nothing")) for n in names]


WAYS = {
    f.__name__: f
    for f in (backward, twice, double, without, alone, flagged, checkpointed, strided, expanded, half)
}
TRANSFORMS = {f.__name__: f for f in (func_grad, func_vmap)}
"""Of which eager refuses some classes that we take: compared where eager answers."""


# ------------------------------------------------------------------ a story
@dataclass(frozen=True)
class Call:
    """A way, the numbers, a first size or None, and what is changed in the module before."""

    way: str
    numbers: int
    rows: int | None = None
    change: str = ""


CHANGES = ("", "", "", "SCALE = 2.5", "VERBOSE = True", "SCALES.clear()", "STEPS = 7", "COUNT.clear()")


def story(p: Habitual, seed: int) -> tuple[Call, ...]:
    rng = random.Random(f"story {seed}")
    ways = [w for w in WAYS if w != "double" or not p.once]
    calls = [Call("backward", 0), Call("backward", 1), Call("backward", 2), Call("backward", 0)]
    for i in range(5):
        rows = rng.choice((None, None, None, 1, 2, 6, 0))
        calls.append(Call(rng.choice(ways), i + 3, rows, rng.choice(CHANGES)))
    if p.style == "setup":
        calls.append(Call(rng.choice(list(TRANSFORMS)), 9))
    return tuple(calls)


def arguments(p: Habitual, call: Call) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(call.numbers)
    shape = p.shape if call.rows is None else (call.rows, *p.shape[1:])
    x, a = (torch.randn(shape, generator=numbers, dtype=torch.float64) for _ in range(2))
    sign = -1.0 if call.numbers % 3 == 2 else 1.0  # so that branches on data turn
    dtype = getattr(torch, p.dtype)
    return (x.abs() * sign).to(dtype).requires_grad_(), a.to(dtype).requires_grad_()


def told(p: Habitual, module: Module, apply: Callable[..., Any], calls: tuple[Call, ...]) -> list[Facts]:
    """What each call gave, and left behind."""
    return [_told_of(p, module, apply, call) for call in calls]


def _told_of(p: Habitual, module: Module, apply: Callable[..., Any], call: Call) -> Facts:
    torch.manual_seed(call.numbers)
    random.seed(call.numbers)
    np.random.seed(call.numbers)
    with contextlib.suppress(NameError):
        exec(call.change, module)
    x, a = arguments(p, call)
    run = {**WAYS, **TRANSFORMS}[call.way]
    if FORMS[p.form].writes:
        apply = partial(_into, apply)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            facts = run(apply, x, a)
        except Exception as error:
            facts = [("raises", type(error).__name__)]
    return [*facts, ("printed", printed.getvalue()), *_left(module, warned, x, a)]


def _into(apply: Callable[..., Any], x: Tensor, *rest: Any) -> Any:
    """A call that writes to its first argument."""
    return apply(x * 1.0, *rest)


def _left(module: Module, warned: list[warnings.WarningMessage], x: Tensor, a: Tensor) -> Facts:
    slow = sum(w.category is UserWarning and str(w.message) == "slow path" for w in warned)
    yield_ = [("warnings", slow), ("versions", (x._version, a._version)), ("tag", getattr(x, "_tag", None))]
    states = [("torch's numbers", torch.get_rng_state()), ("Python's numbers", random.random())]
    return [*yield_, *states, *((name, module[name]) for name in SEEN if name in module)]


# ------------------------------------------------------------------ judged
@dataclass
class Found:
    """What became of a seed."""

    faults: list[dict[str, str]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    result: str = "ok"
    written: list[str] = field(default_factory=list)


def loaded(p: Habitual) -> Module:
    text, path = source(p), f"<{p.name}>"
    linecache.cache[path] = (len(text), None, text.splitlines(True), path)
    module = sys.modules[p.name] = types.ModuleType(p.name)  # where dataclasses look their module up
    exec(compile(text, path, "exec"), vars(module))
    return vars(module)


def difference(p: Habitual, calls: tuple[Call, ...], backend: str, found: Found | None = None) -> str | None:
    """The first difference in words, or what went wrong within; None where both tell the same story."""
    theirs, ours = loaded(p), loaded(p)
    fast = fusegrad.compile(ours[p.name], backend=backend)
    expected = told(p, theirs, theirs[p.name].apply, calls)
    got = told(p, ours, fast.apply, calls)
    if found is not None:
        records = fast._fusegrad.ledger.records.values()
        found.written = [f"{r.code}: {r.reason}"[:90] for r in records if r.status == "opaque"]
    for i, (call, want, have) in enumerate(zip(calls, expected, got, strict=True)):
        if call.way in TRANSFORMS and want[0][0] == "raises":
            continue  # what eager refuses may be derived
        for (name, e), (other, o) in zip(want, have, strict=False):
            if name != other or not same(e, o):
                return f"call {i} ({call}): {name} is {short(e)}, compiled {other} is {short(o)}"
    records = fast._fusegrad.ledger.records.values()
    return next((r.reason for r in records if r.code == "FG071"), None)  # a mistake of ours


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad) and _near(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or abs(a - b) <= 1e-3 * max(abs(a), abs(b), 1.0) or (a != a and b != b)
    return type(a) is type(b) and bool(a == b)


def _near(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    unit = UNITS[a.dtype]
    scale = max(1.0, float(a.detach().abs().double().nan_to_num().max())) if a.numel() else 1.0
    return torch.allclose(a.detach().double(), b.detach().double(), unit, unit * scale, equal_nan=True)


def short(value: Any) -> str:
    return " ".join(repr(value).split())[:300]


def tested(seed: int, backend: str = "reference") -> Found:
    p, found = program(seed), Found()
    calls = story(p, seed)
    found.calls = [c.way for c in calls]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        what = difference(p, calls, backend, found)
        if what is not None:
            p, calls, what = shrunk(p, calls, backend, what)
            found.result = "DIFFERS"
            names = ", ".join(f.name for f in p.fragments)
            found.faults = [{"kind": names[:100], "text": f"{p.name} on {backend}: {what}\n{calls}\n\n{source(p)}"}]
    return found


def shrunk(p: Habitual, calls: tuple[Call, ...], backend: str, what: str) -> tuple[Habitual, tuple[Call, ...], str]:
    """Fragments, then calls, left out while there is a difference."""
    left = SHRINK
    again = True
    while again and left > 0:
        again = False
        for q, some in _smaller(p, calls):
            left -= 1
            other = _differs(q, some, backend)
            if other is not None:
                p, calls, what, again = q, some, other, True
                break
    return p, calls, what


def _differs(p: Habitual, calls: tuple[Call, ...], backend: str) -> str | None:
    try:
        return difference(p, calls, backend)
    except Exception:
        return None


def _smaller(p: Habitual, calls: tuple[Call, ...]) -> Iterator[tuple[Habitual, tuple[Call, ...]]]:
    yield from ((q, calls) for q in simpler(p))
    if len(calls) > 1:
        yield from ((p, (*calls[:i], *calls[i + 1 :])) for i in range(len(calls)))
    yield from ((p, (*calls[:i], replace(c, change=""), *calls[i + 1 :])) for i, c in enumerate(calls) if c.change)


# ------------------------------------------------------------------ the run
def work(pipe: Connection, options: argparse.Namespace) -> None:
    """Answers each seed, in a process of its own: every tenth one on the generated kernels."""
    torch.set_num_threads(1)
    answer_seeds(pipe, _answer)


def _answer(seed: int) -> dict[str, Any]:
    backend = "interpret" if seed % 10 == 9 else "reference"
    found = tested(seed, backend)
    counts = {"modes": Counter(found.calls), "results": Counter([found.result]), "written": found.written}
    return {"faults": found.faults, "by_backend": {backend: counts}}


if __name__ == "__main__":
    words = "random Functions as people write them, beside eager"
    sys.exit(run_by_seed("tests/fuzz/habits.py", words, work, Sum()))
