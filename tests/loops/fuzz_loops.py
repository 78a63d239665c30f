"""Random functions with loops over a size, compiled beside eager: results and gradients at several lengths.

Rolled and, one in so many, unrolled on `reference`, bitwise; on `interpret` by tolerance, in float64.

    python tests/loops/fuzz_loops.py --seconds 600 --seed 0
    python tests/loops/fuzz_loops.py --seconds 600 --seed 0 --backend interpret
"""

from __future__ import annotations

import argparse
import linecache
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from random_loops import Writer, WriterOfClasses
from torch import Tensor

import fusegrad
from fusegrad.tracer.loops.node import has_loop

Function = Callable[..., Any]
WIDTH = 3
FIRST, LATER, SHORT = 10, (13, 26), (4,)
"""Steps of the first call, and of calls that the same graph serves where it has a loop; too few of them."""
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16)
GRADIENTS = 4
"""One function in so many is differentiated, too."""
CLASSES = 3
"""One program in so many is a class with a backward of its own."""
UNROLLED = 5
"""One program in so many is compiled with its steps one by one, too."""


def written(seed: int) -> tuple[str, Function]:
    """The text of a random program, and what is called."""
    is_class = seed % CLASSES == 0
    text = (WriterOfClasses if is_class else Writer)(seed).text()
    made = defined(text, f"<loop {seed}>")
    return text, made["F" if is_class else "f"]


def defined(text: str, name: str) -> dict[str, Any]:
    """The names that a text defines; its lines can be looked up."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"torch": torch, "__name__": "programs"}
    exec(compile(text, name, "exec"), scope)
    return scope


# ------------------------------------------------------------------ arguments
def is_differentiated(seed: int) -> bool:
    return seed % GRADIENTS == 1 or seed % CLASSES == 0


def laid_out(t: Tensor, layout: int) -> Tensor:
    """The same values in another place in memory: turned, every other one of more, or the same for each step."""
    if layout == 1:
        return t.t().contiguous().t()
    if layout == 2:
        return torch.stack([t, t], -1)[..., 0]
    if layout == 3:
        return t[:1].expand(t.shape)
    return torch.cat([t, t])[len(t) :] if layout == 4 else t


def arguments(n: int, seed: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(seed + n)
    shapes = ((n, WIDTH), (n, WIDTH), (WIDTH,), (WIDTH, n), (WIDTH, WIDTH))
    layouts = [seed // 7**i % 7 if len(s) == 2 else 0 for i, s in enumerate(shapes)]
    tensors = [laid_out(torch.randn(s).mul(0.5).to(dtype), k) for s, k in zip(shapes, layouts, strict=True)]
    moving = [t.detach().requires_grad_(is_differentiated(seed)) for t in tensors]
    return [*moving, torch.rand(n) > 0.5]


def outcome(f: Function, n: int, seed: int, dtype: torch.dtype) -> list[Any]:
    """Results and gradients, and the arguments after the call."""
    args = arguments(n, seed, dtype)
    results = (f.apply if isinstance(f, type) else f)(*args)
    moving = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
    torch.manual_seed(seed)
    cotangents = [torch.randn_like(r) for r in moving]
    grads = torch.autograd.grad(moving, args[:5], cotangents, allow_unused=True) if moving else ()
    found = [r.detach() if isinstance(r, Tensor) else r for r in results]
    return [*found, *(a.detach() for a in args), *grads]


# ------------------------------------------------------------------ comparison
Same = Callable[[Tensor, Tensor], bool]


def same(a: Sequence[Any], b: Sequence[Any], equal: Same) -> bool:
    return all(_alike(p, q, equal) for p, q in zip(a, b, strict=True))


def _alike(p: Any, q: Any, equal: Same) -> bool:
    if not (isinstance(p, Tensor) and isinstance(q, Tensor)):
        return type(p) is type(q) and bool(p == q)
    return p.shape == q.shape and p.dtype == q.dtype and equal(p, q)


def bitwise(p: Tensor, q: Tensor) -> bool:
    return torch.equal(p.nan_to_num(), q.nan_to_num())


def close(p: Tensor, q: Tensor) -> bool:
    if not p.is_floating_point():
        return torch.equal(p, q)
    tolerance = {torch.float64: 1e-7, torch.float32: 1e-3}.get(p.dtype, 0.05)
    return torch.allclose(p, q, rtol=tolerance, atol=tolerance, equal_nan=True)


def returns_arguments(f: Function, n: int, seed: int, dtype: torch.dtype) -> bool:
    """True if a result is an argument as it came, whose gradient eager sums in an order of its own."""
    args = arguments(n, seed, dtype)
    return not isinstance(f, type) and any(r is a for r in f(*args) for a in args)


# ------------------------------------------------------------------ one program
def try_one(seed: int, backend: str = "reference") -> str:
    """What became of one random program: "rolled", "stepwise", "eager"; raises AssertionError where it is wrong.

    "invalid": eager has no result for it.
    """
    text, f = written(seed)
    dtype = torch.float64 if backend == "interpret" else DTYPES[seed % len(DTYPES)]
    try:
        expected = {n: outcome(f, n, seed, dtype) for n in (FIRST, *LATER, *SHORT)}
        loose = backend == "interpret" or (is_differentiated(seed) and returns_arguments(f, 5, seed, dtype))
    except Exception:
        return "invalid"

    def require_same(fast: Any, lengths: Sequence[int]) -> None:
        for n in lengths:
            found = outcome(fast, n, seed, dtype)
            assert same(expected[n], found, close if loose else bitwise), f"seed {seed}, n {n}, {dtype}\n{text}"

    with fusegrad.config.patch(disable="patience", backend=backend):
        require_same(fast := fusegrad.compile(f), [FIRST])
        verdict = verdict_of(fast)
        require_same(fast, [*LATER, *SHORT] if verdict == "rolled" else SHORT)
    if verdict == "rolled" and seed % UNROLLED == 0 and backend == "reference":
        with fusegrad.config.patch(disable="patience,loops"):
            require_same(fusegrad.compile(f), [FIRST])
    return verdict


def verdict_of(fast: Any) -> str:
    """Whether what was captured has a loop, or steps; "eager" where nothing was."""
    graphs = graphs_of(fast)
    return "rolled" if any(map(has_loop, graphs)) else "stepwise" if graphs else "eager"


def graphs_of(fast: Any) -> list[torch.fx.GraphModule]:
    """The graphs that were captured."""
    specs = [s for specs in fast._fusegrad.table.by_facts.values() for s in specs]
    backwards = [e for s in specs for e in s.backward.entries.values() if not isinstance(e, Exception)]
    return [s.captured.forward.trace.graph_module for s in specs] + [e.trace.graph_module for e in backwards]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="reference")
    options = parser.parse_args()
    end, seed, verdicts = time.time() + options.seconds, options.seed, Counter[str]()
    warnings.simplefilter("ignore")
    while time.time() < end:
        try:
            verdicts[try_one(seed, options.backend)] += 1
        except Exception as error:
            verdicts["WRONG"] += 1
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
        seed += 1
        if seed % 20 == 0:
            print(dict(verdicts), f"seeds {options.seed} to {seed - 1}", flush=True)
    print(dict(verdicts), f"seeds {options.seed} to {seed - 1}")


if __name__ == "__main__":
    main()
