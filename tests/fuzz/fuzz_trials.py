"""One random program, compiled, against eager: backward on every kind of layout, other sizes, transforms.

What runs and what judges is `fusegrad.check`'s. A difference in numbers alone counts if other numbers show it too: at a
jump (round, argmax, a comparison) the last bit of an argument may decide.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from fuzz_programs import Written, load, source

import fusegrad
from fusegrad.runtime.checking.cases import shapes
from fusegrad.runtime.checking.layouts import LAYOUTS, all_laid_out, lengths, resized
from fusegrad.runtime.checking.modes import DERIVABLE, MODES
from fusegrad.runtime.checking.subject import Case, CheckArgumentError, Subject, Weights, examined
from fusegrad.runtime.checking.trial import tried
from fusegrad.runtime.checking.verdict import Difference, Tolerance

Tensor = torch.Tensor
SIZES = (0, 1, 2, 3, 5, 16, 17, 31, 32, 33)
PLAIN = [m for m in MODES if m not in DERIVABLE]
"""Modes that eager always has."""
FLOATS = {
    "float64": torch.float64, "float32": torch.float32, ".float()": torch.float32, "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}  # fmt: skip
UNITS = 64
OURS = ("saved tensors hooks", "double backward")
"""Modes that show how a function alone is differentiated: what it saves, which gradients are None or need none."""
GAPPED = ("step 2",)
"""A gradient with gaps is copied first: what is a view of it has other strides than in eager."""
SMALL = 400  # elements of all arguments, for jacobians
CHEAP = ("vmap in_dims=0", "vmap in_dims=1", "vjp", "jvp", "vmap(grad)")
MORE_NUMBERS = (1, 2)
"""Draws that all have to differ too."""


@dataclass(frozen=True)
class Fault:
    """A case in which the compiled program is not the one that was written."""

    program: Written
    backend: str
    case: Case
    difference: Difference

    def __str__(self) -> str:
        where = f"{self.program.name} on {self.backend}: {self.case.mode}, {self.case.what} {shapes(self.case.xs)}"
        return f"{where}, grad_output {self.case.weights.layout}\n  {self.difference}\n\n{source(self.program)}"


@dataclass
class Found:
    """What became of a program: faults, cases run, and what ran as written, with the reason."""

    faults: list[Fault]
    cases: int = 0
    written: tuple[str, ...] = ()


def tested(p: Written, backend: str, seed: int, count: int = 5) -> Found:
    """A program under `count` cases that the seed chooses."""
    subject, xs = subject_of(p, backend, 0)
    found = Found([])
    runs: dict[str, None] = {}
    for case in cases(subject, xs, random.Random(seed), count):
        if p.kind == "function" and case.mode in OURS:
            continue
        row, difference = tried(subject, case)
        if difference is not None and case.weights.layout in GAPPED and "strides" in difference.what:
            difference = None
        found.cases += 1
        runs[row.runs] = None
        if difference is not None and confirmed(p, backend, case, difference):
            found.faults.append(Fault(p, backend, case, difference))
            break
    found.written = tuple(r for r in runs if r != "compiled")
    return found


def subject_of(p: Written, backend: str, numbers: int) -> tuple[Subject, tuple[Tensor, ...]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target = fusegrad.compile(load(p), backend=backend)
        return examined(target, tuple(p.tensors(numbers)), {}, backend, tolerance(p, backend), 0)


def tolerance(p: Written, backend: str) -> Tolerance:
    """Kernels add in another order, and cancellation shows it: some units of the coarsest float in between."""
    if backend == "reference":
        return Tolerance()
    text = source(p) + " ".join(a.dtype for a in p.arguments)
    coarsest = max(torch.finfo(d).eps for name, d in FLOATS.items() if name in text)
    return Tolerance(UNITS * coarsest, UNITS * coarsest)


def cases(subject: Subject, xs: tuple[Tensor, ...], rng: random.Random, count: int) -> Iterator[Case]:
    """Backward as the arguments are; then layouts, lengths, and modes in turn."""
    yield Case("backward", "as they are", xs)
    kinds = [laid_out, resized_case, another_mode, laid_out]
    for i in range(count - 1):
        yield kinds[i % len(kinds)](subject, xs, rng)


def laid_out(subject: Subject, xs: tuple[Tensor, ...], rng: random.Random) -> Case:
    names = [rng.choice(list(LAYOUTS)) for _ in xs]
    made = all_laid_out(xs, names)
    layout = rng.choice(list(LAYOUTS))
    what = f"arguments {', '.join(names)}" if made is not None else "as they are"
    mode = rng.choice(("backward", "backward", rng.choice(PLAIN)))
    return Case(mode, what, tuple(made) if made is not None else xs, Weights(layout))


def resized_case(subject: Subject, xs: tuple[Tensor, ...], rng: random.Random) -> Case:
    old = [n for n in lengths(xs) if n]
    if not old:
        return laid_out(subject, xs, rng)
    n, m = rng.choice(old), rng.choice(SIZES)
    return Case("backward", f"length {n} -> {m}", tuple(resized(xs, {n: m})), Weights(rng.choice(list(LAYOUTS))))


def another_mode(subject: Subject, xs: tuple[Tensor, ...], rng: random.Random) -> Case:
    small = sum(x.numel() for x in xs) <= SMALL
    mode = rng.choice(list(MODES) if small else [*PLAIN, *CHEAP])
    return Case(mode, "as they are", xs)


def confirmed(p: Written, backend: str, case: Case, difference: Difference) -> bool:
    """Whether it is more than a value at a jump: other facts than numbers, or other numbers differ too."""
    if difference.index is None:
        return True
    subject, _ = subject_of(p, backend, 0)
    return all(tried(subject, renumbered(case, numbers))[1] is not None for numbers in MORE_NUMBERS)


def renumbered(case: Case, numbers: int) -> Case:
    """Other numbers in the same layouts."""
    generator = torch.Generator().manual_seed(numbers)
    return replace(case, xs=tuple(_other(x, generator) for x in case.xs))


def _other(x: Tensor, generator: torch.Generator) -> Tensor:
    if not x.is_floating_point() or not x.numel():
        return x
    made = x.detach()[tuple(slice(0, 1) if s == 0 else slice(None) for s in x.stride())].clone()
    fresh = torch.randn(made.shape, generator=generator, dtype=torch.float64).to(x.dtype)
    memory = torch.empty_strided(made.shape, x.stride(), dtype=x.dtype).copy_(fresh)
    return memory.expand(x.shape).requires_grad_(x.requires_grad)


__all__ = ["CheckArgumentError", "Fault", "Found", "tested"]
