"""One random program, compiled, against eager: backward on every kind of layout, other sizes, transforms, laws.

What runs and what judges is `fusegrad.check`'s. A difference in numbers alone counts if other numbers show it too: at a
jump (round, argmax, a comparison) the last bit of an argument may decide. A case is drawn as a `Recipe`, which says how
it is made of the program's own arguments, so that both can be made smaller.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from fuzz_laws import LAWS, broken
from fuzz_programs import Written, load, source

import fusegrad
from fusegrad.runtime.check.cases import shapes
from fusegrad.runtime.check.compare import Difference, Tolerance
from fusegrad.runtime.check.modes import DERIVABLE, MODES
from fusegrad.runtime.check.run_case import Row, _fallback_reasons, run_case
from fusegrad.runtime.check.subject import Case, CheckArgumentError, Subject, Weights, examine, flat_outputs
from fusegrad.runtime.check.variations import LAYOUTS, aliasable_pairs, lengths, with_layouts, with_sizes
from fusegrad.tracer.methods import as_tuple

Tensor = torch.Tensor
SIZES = (0, 1, 2, 3, 5, 15, 16, 17, 31, 32, 33, 63, 65)
FLOATS = {
    "float64": torch.float64, ".double()": torch.float64, "float32": torch.float32, ".float()": torch.float32,
    "float16": torch.float16, ".half()": torch.float16, "bfloat16": torch.bfloat16,
}  # fmt: skip
UNITS, FEW, COARSE = 256, 8, 1e-4
OURS = ("saved tensors hooks", "double backward")
"""Modes that show how a function alone is differentiated: what it saves, which gradients are None or need none.

What draws random numbers is left out of the derivable ones: their judge calls it more than once."""
GAPPED = ("step 2",)
"""A gradient with gaps is copied first: views of it have other strides than in eager, sums another order."""
SMALL = 400  # elements of all arguments, for jacobians
NUMBERS = re.compile(r"[0-9`(:\[]")
WHOLE = re.compile(r"[<>]|[=!]=|arg|round|int|bool|long|sign|count")
"""What makes whole numbers, which become floats of the default dtype."""
LENGTHS = re.compile(r"\b(std|norm|hypot|normalize|dist|cosine_similarity)\b")
MORE_NUMBERS = (1, 2)
"""Draws that all have to differ too."""
COMMON = ("forward", "second call", "backward twice", "checkpoint", "grad", "saved tensors hooks")
"""Modes that use what backward has captured; the others are drawn more rarely."""
RARE = tuple(m for m in MODES if m not in (*COMMON, "backward"))
JACOBIANS = ("jacrev", "jacfwd", "hessian")
SHARES = (("mode", 32), ("size", 21), ("gradient", 17), ("law", 12), ("layout", 7), ("rare mode", 6), ("which", 5))
"""Kinds of cases after the first, with how many of a hundred. A layout, and a rare mode, cost a capture each."""


@dataclass(frozen=True)
class Recipe:
    """How a case is made of a program's arguments. alone: the one that requires grad; same: which is which other."""

    mode: str = "backward"
    layouts: tuple[str, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()
    gradient: str = "contiguous"
    only: int | None = None
    alone: int | None = None
    same: tuple[int, int] | None = None

    def case(self, xs: Sequence[Tensor]) -> Case:
        made = list(xs)
        if self.sizes:
            made = with_sizes(made, dict(self.sizes))
        if self.layouts:
            made = with_layouts(made, self.layouts) or made
        if self.alone is not None:
            made = [x.detach().requires_grad_(i == self.alone) for i, x in enumerate(made)]
        if self.same is not None:
            made[self.same[1]] = made[self.same[0]]
        return Case(self.mode, self.what(), tuple(made), Weights(self.gradient, self.only))

    def what(self) -> str:
        told = [f"arguments {', '.join(self.layouts)}"] if self.layouts else []
        told += [f"length {n} -> {m}" for n, m in self.sizes]
        told += [f"gradient {self.gradient}"] if self.gradient != "contiguous" else []
        told += [f"gradient of output {self.only} alone"] if self.only is not None else []
        told += [f"argument {self.alone} alone requires grad"] if self.alone is not None else []
        told += [f"argument {self.same[1]} is argument {self.same[0]}"] if self.same is not None else []
        return "; ".join(told) or "as they are"


@dataclass(frozen=True)
class Fault:
    """A case in which the compiled program is not the one that was written."""

    program: Written
    backend: str
    recipe: Recipe
    case: Case
    difference: Difference

    @property
    def kind(self) -> str:
        """What a smaller program has to share."""
        what = "numbers" if self.difference.index is not None else self.difference.fact
        return f"{self.recipe.mode}: {NUMBERS.split(what)[0][:40]}"

    def __str__(self) -> str:
        where = f"{self.program.name} on {self.backend}: {self.case.mode}, {self.case.label} {shapes(self.case.xs)}"
        return f"{where}\n  {self.difference}\n\n{source(self.program)}"


@dataclass
class Found:
    """What became of a program: faults, cases run, and what ran as written, with the reason."""

    faults: list[Fault]
    cases: int = 0
    written: tuple[str, ...] = ()
    modes: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)


def tested(p: Written, backend: str, seed: int, count: int = 5) -> Found:
    """A program under `count` cases that the seed chooses."""
    subject, xs = subject_of(p, backend, 0)
    found = Found([])
    runs: dict[str, None] = {}
    for recipe in recipes(p, xs, random.Random(seed), count):
        if (p.kind == "function" and recipe.mode in OURS) or (subject.random and recipe.mode in DERIVABLE):
            continue
        if recipe.mode in DERIVABLE and len(p.outputs) > 1 and _returns_one_twice(subject, xs):
            continue  # to autograd one tensor with one gradient, to torch.func two
        case = recipe.case(xs)
        result, difference = judged(p, subject, case)
        found.cases += 1
        found.modes.append(recipe.mode)
        found.results.append(result)
        runs[_fallback_reasons(subject.compiler)] = None
        if difference is not None and confirmed(p, subject, recipe, difference):
            found.faults.append(Fault(p, backend, recipe, case, difference))
            break
    found.written = tuple(r for r in runs if r != "compiled")
    return found


def _returns_one_twice(subject: Subject, xs: Sequence[Tensor]) -> bool:
    returned = _tensors_of(subject, xs)
    return len(set(map(id, returned))) < len(returned)


def _tensors_of(subject: Subject, xs: Sequence[Tensor]) -> list[Tensor]:
    """What eager returns."""
    return [o for o in as_tuple(flat_outputs(subject.on_tensors(subject.eager))(*xs)) if isinstance(o, Tensor)]


def judged(p: Written, subject: Subject, case: Case) -> tuple[str, Difference | None]:
    """(what became of the case, how it differs)."""
    if case.mode in LAWS:
        return broken(subject, case, eps_of(p))
    row, difference = run_case(subject, case)
    if difference is not None and difference.index is not None:
        row, difference = _loosely(p, subject, case)
    if difference is not None and case.weights.layout in GAPPED and "strides" in difference.fact:
        return "ok", None
    if difference is not None and _is_of_nothing(case, difference):
        return "ok", None
    if difference is not None and _is_torchs_own(subject, case, difference):
        return "torch's own corner", None
    if difference is not None and _is_at_a_corner(p, case, difference):
        return "derived at a corner", None
    return ("ok", None) if difference is not None and _is_freer(difference) else (row.result, difference)


def _is_of_nothing(case: Case, difference: Difference) -> bool:
    """Whether an operation of torch returned its empty argument itself: dropout, or the backward of cummax."""
    told = ("requires_grad", "An input that has been returned as-is")
    return any(x.numel() == 0 for x in case.xs) and any(words in difference.fact for words in told)


def _is_torchs_own(subject: Subject, case: Case, difference: Difference) -> bool:
    """What torch does against its own rules.

    Gradients that require grad and have no history: views of a gradient that `autograd.grad` returns without a graph.
    Tangents of float64, for a float32 number that was added to one of Python's.
    """
    if case.mode == "double backward":
        return _has_half_a_history(subject, case)
    numbers = any(x.dim() == 0 for x in case.xs)
    return numbers and difference.fact == "dtype is torch.float32, in eager torch.float64"


def _has_half_a_history(subject: Subject, case: Case) -> bool:
    xs = [x.detach().clone().requires_grad_(x.requires_grad) for x in case.xs]
    outputs = [o for o in _tensors_of(subject, xs) if o.requires_grad]
    weights = [torch.ones_like(o).requires_grad_() for o in outputs]
    moving = [x for x in xs if x.requires_grad]
    found = torch.autograd.grad(outputs, moving, weights, create_graph=True, allow_unused=True)
    return any(g is not None and g.requires_grad and g.grad_fn is None and g._is_view() for g in found)


def _is_at_a_corner(p: Written, case: Case, difference: Difference) -> bool:
    """Whether a derived jvp divides by a length of 0, which torch's own backward masks (docs/limits.md)."""
    return case.mode in DERIVABLE and difference.fact.startswith("nan in one") and bool(LENGTHS.search(source(p)))


def _is_freer(difference: Difference) -> bool:
    """Whether a result is no view where it is one in eager, of memory that both share: it may be written to."""
    ours, _, eagers = difference.fact.removeprefix("is ").partition(", in eager ")
    twice = eagers.replace("the same object", "shares memory, a view")  # of what a Function returns and is a view
    return bool(eagers) and ours != eagers and ours in (eagers.replace(", a view", ""), twice)


def _loosely(p: Written, subject: Subject, case: Case) -> tuple[Row, Difference | None]:
    """By the coarsest float in between: `frac`, or a difference, makes the last bits of a sum the first ones."""
    own = subject.tolerance
    subject.tolerance = replace(near(p), strict=own.strict)
    try:
        return run_case(subject, case)
    finally:
        subject.tolerance = own


def confirmed(p: Written, subject: Subject, recipe: Recipe, difference: Difference) -> bool:
    """Whether it is more than a value at a jump: other facts than numbers, or other numbers differ too."""
    if difference.index is None:
        return True
    return all(judged(p, subject, recipe.case(tensors(p, n)))[1] is not None for n in MORE_NUMBERS)


def tensors(p: Written, numbers: int) -> tuple[Tensor, ...]:
    return tuple(x for x in p.tensors(numbers) if isinstance(x, Tensor))


def subject_of(p: Written, backend: str, numbers: int) -> tuple[Subject, tuple[Tensor, ...]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target = fusegrad.compile(load(p), backend=backend)
        return examine(target, tuple(p.tensors(numbers)), {}, backend, tolerance(p, backend), 0)


def eps_of(p: Written) -> float:
    """Of the coarsest float in between."""
    return max((float(torch.finfo(d).eps) for d in floats_of(p)), default=2**-23)


def floats_of(p: Written) -> set[torch.dtype]:
    text = source(p) + " ".join(a.dtype for a in p.arguments)
    whole = {torch.get_default_dtype()} if WHOLE.search(text) else set()
    return whole | {d for name, d in FLOATS.items() if name in text}


def tolerance(p: Written, backend: str) -> Tolerance:
    """Kernels add in another order, and cancellation shows it."""
    return Tolerance() if backend == "reference" else near(p)


def near(p: Written) -> Tolerance:
    """Some units of the coarsest float in between."""
    eps = eps_of(p)
    units = UNITS if eps < COARSE else FEW
    return Tolerance(units * eps, units * eps)


# ------------------------------------------------------------------ cases
def recipes(p: Written, xs: Sequence[Tensor], rng: random.Random, count: int) -> Iterator[Recipe]:
    """Backward as the arguments are; then others, the cheap ones more often."""
    yield Recipe()
    names, weights = zip(*SHARES, strict=True)
    for kind in rng.choices(names, weights, k=count - 1):
        yield KINDS[kind](p, xs, rng)


def _mode(p: Written, xs: Sequence[Tensor], rng: random.Random) -> Recipe:
    return Recipe(rng.choice(COMMON))


def _rare_mode(p: Written, xs: Sequence[Tensor], rng: random.Random) -> Recipe:
    small = sum(x.numel() for x in xs) <= SMALL
    return Recipe(rng.choice([m for m in RARE if small or m not in JACOBIANS]))


def _law(p: Written, xs: Sequence[Tensor], rng: random.Random) -> Recipe:
    return Recipe(rng.choice([name for name, law in LAWS.items() for _ in range(law.weight)]))


def _size(p: Written, xs: Sequence[Tensor], rng: random.Random) -> Recipe:
    old = [n for n in lengths(xs) if n]
    if not old:
        return _gradient(p, xs, rng)
    return Recipe(sizes=((rng.choice(old), rng.choice(SIZES)),), gradient=rng.choice(("contiguous", *LAYOUTS)))


def _gradient(p: Written, xs: Sequence[Tensor], rng: random.Random) -> Recipe:
    return Recipe(gradient=rng.choice([n for n in LAYOUTS if n != "contiguous"]))


def _layout(p: Written, xs: Sequence[Tensor], rng: random.Random) -> Recipe:
    mode = rng.choice(("backward", "backward", "backward", rng.choice(COMMON)))
    return Recipe(mode, tuple(rng.choice(list(LAYOUTS)) for _ in xs), gradient=rng.choice(list(LAYOUTS)))


def _which(p: Written, xs: Sequence[Tensor], rng: random.Random) -> Recipe:
    """One output alone, one argument alone, one tensor as two arguments."""
    moving = [i for i, x in enumerate(xs) if x.requires_grad]
    options: list[dict[str, Any]] = [{"alone": i} for i in moving if len(moving) > 1]
    options += [{"only": i} for i in range(len(p.outputs)) if len(p.outputs) > 1]
    options += [{"same": pair} for pair in aliasable_pairs(xs)]
    return Recipe(**rng.choice(options)) if options else _gradient(p, xs, rng)


KINDS = {
    "mode": _mode, "size": _size, "gradient": _gradient, "layout": _layout, "law": _law, "rare mode": _rare_mode,
    "which": _which,
}  # fmt: skip

__all__ = ["DERIVABLE", "CheckArgumentError", "Fault", "Found", "Recipe", "tested"]
