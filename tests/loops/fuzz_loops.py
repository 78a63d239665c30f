"""Random functions with loops over a size, compiled beside eager: results and gradients at several lengths.

Rolled and, one in so many, unrolled on `reference`, bitwise; on `interpret` by tolerance, in float64. One in so many
that rolled is pushed forward, mapped over samples, or differentiated twice as well.

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
UNROLLED = 10
"""One program in so many is compiled with its steps one by one, too."""
FAR = 4
"""One program in so many is called at the longest length, too, where it may be captured once more."""
GAPS = 3
"""The layout of a gradient of which every other element is another's."""
OTHER_FORMULA = "cumprod"
"""Its gradient is another formula of torch's where that may be differentiated again: see docs/limits.md."""
TRANSFORMED = 4
"""One program in so many goes through a transform."""


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
    asks = [is_differentiated(seed) and (seed // 5 % 4 > 0 or bool(seed // 20 >> i & 1)) for i in range(len(shapes))]
    moving = [t.detach().requires_grad_(a) for t, a in zip(tensors, asks, strict=True)]
    return [*moving, torch.rand(n) > 0.5]


def cotangent(result: Tensor, layout: int) -> Tensor:
    """Numbers for a result: in order, the same at all places, turned, or every other one of more."""
    if layout == 1:
        return torch.randn((), dtype=result.dtype).expand(result.shape)
    if layout == 2:
        return torch.randn(result.shape[::-1], dtype=result.dtype).permute(*range(result.dim())[::-1])
    return torch.randn((*result.shape, 2), dtype=result.dtype)[..., 0] if layout == GAPS else torch.randn_like(result)


def outcome(f: Function, n: int, seed: int, dtype: torch.dtype) -> list[Any]:
    """Results and gradients, and the arguments after the call."""
    args = arguments(n, seed, dtype)
    results = (f.apply if isinstance(f, type) else f)(*args)
    moving = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
    torch.manual_seed(seed)
    cotangents = [cotangent(r, seed // 3 % 5) for r in moving]
    leaves = [a for a in args[:5] if a.requires_grad]
    grads = torch.autograd.grad(moving, leaves, cotangents, allow_unused=True) if moving else ()
    found = [r.detach() if isinstance(r, Tensor) else r for r in results]
    return [*found, *(a.detach() for a in args), *grads]


# ------------------------------------------------------------------ transforms
def transformed(f: Function, n: int, seed: int) -> list[Any]:
    """A call in float64 under the transform that the seed chooses: what it returns."""
    *args, q = (a.detach() for a in arguments(n, seed, torch.float64))
    call = f.apply if isinstance(f, type) else f

    def floats(*xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(r for r in call(*xs, q) if isinstance(r, Tensor) and r.is_floating_point())

    return TRANSFORMS[seed // TRANSFORMED % len(TRANSFORMS)](floats, args)


def _pushed(call: Function, args: Sequence[Tensor]) -> list[Any]:
    found = torch.func.jvp(call, tuple(args), tuple(torch.cos(7 * a) for a in args))
    return [*found[0], *found[1]]


def _mapped(call: Function, args: Sequence[Tensor]) -> list[Any]:
    return list(torch.func.vmap(call)(*(torch.stack([a, a * 0.9]) for a in args)))


def _twice(call: Function, args: Sequence[Tensor]) -> list[Any]:
    leaves = [a.clone().requires_grad_() for a in args]
    total = sum(r.sin().sum() for r in call(*leaves) if r.requires_grad)
    first = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
    moving = [g for g in first if g is not None and g.requires_grad]
    second = torch.autograd.grad(sum(g.cos().sum() for g in moving), leaves, allow_unused=True)
    return [*first, *second]


TRANSFORMS = (_pushed, _mapped, _twice)


# ------------------------------------------------------------------ comparison
Same = Callable[[Tensor, Tensor], bool]


def same(a: Sequence[Any], b: Sequence[Any], equal: Same) -> bool:
    return all(_alike(p, q, equal) for p, q in zip(a, b, strict=True))


def _alike(p: Any, q: Any, equal: Same) -> bool:
    if (p is None) != (q is None):  # None is zero
        return bool(((q if p is None else p) == 0).all())
    if not (isinstance(p, Tensor) and isinstance(q, Tensor)):
        return type(p) is type(q) and bool(p == q)
    return p.shape == q.shape and p.dtype == q.dtype and equal(p, q)


def bitwise(p: Tensor, q: Tensor) -> bool:
    return p.stride() == q.stride() and bits(p, q)


def bits(p: Tensor, q: Tensor) -> bool:
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
    later = LATER if seed % FAR == 0 else LATER[:1]
    try:
        expected = {n: outcome(f, n, seed, dtype) for n in (FIRST, *later, *SHORT)}
        returns = is_differentiated(seed) and any(returns_arguments(f, n, seed, dtype) for n in expected)
        loose = backend == "interpret" or returns or (is_differentiated(seed) and OTHER_FORMULA in text)
    except Exception:
        return "invalid"

    # backward takes a gradient without the gaps that eager's views of it keep: see docs/limits.md
    exact = bits if seed // 3 % 5 == GAPS else bitwise

    def require_same(fast: Any, lengths: Sequence[int]) -> None:
        for n in lengths:
            found = outcome(fast, n, seed, dtype)
            assert same(expected[n], found, close if loose else exact), f"seed {seed}, n {n}, {dtype}\n{text}"

    with fusegrad.config.patch(disable="patience", backend=backend):
        require_same(fast := fusegrad.compile(f), [FIRST])
        verdict = verdict_of(fast)
        require_same(fast, [*later, *SHORT] if verdict == "rolled" else SHORT)
        if verdict == "rolled" and seed % TRANSFORMED == 0:
            require_same_transforms(f, fast, seed)
    if verdict == "rolled" and seed % UNROLLED == 0 and backend == "reference":
        with fusegrad.config.patch(disable="patience,loops"):
            require_same(fusegrad.compile(f), [FIRST])
    return verdict


def require_same_transforms(f: Function, fast: Any, seed: int) -> None:
    """Under the transform of the seed, where eager has a result there."""
    try:
        expected = transformed(f, FIRST, seed)
    except Exception:
        return
    found = transformed(fast, FIRST, seed)
    way = TRANSFORMS[seed // TRANSFORMED % len(TRANSFORMS)].__name__
    assert same(expected, found, close), f"seed {seed}, {way}\n{written(seed)[0]}"


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
