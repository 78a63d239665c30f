"""What is played on the pretended GPU, by name. A scene yields what differs from eager on the same device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fusegrad
from fusegrad.benchmarks.correctness import faults, results
from fusegrad.benchmarks.inputs import as_list, cotangents, differentiable, real, reduced
from fusegrad.benchmarks.suite import CASES
from fusegrad.examples.gallery.catalogue import CATALOGUE
from fusegrad.ir.codes import code_of

sys.path.insert(0, str(Path(__file__).parents[1] / "suite"))
import functions as catalogue

SEED = 77
Scene = Callable[..., Iterator[str]]
SCENES: dict[str, Scene] = {}
THROUGH_TORCH, STEP_BY_STEP = "FG105", "FG106"


def scene(function: Scene) -> Scene:
    SCENES[function.__name__] = function
    return function


def on(device: str, values: Sequence[Any]) -> list[Any]:
    """Tensors as leaves on a device; what asked for a gradient asks for one there."""
    return [
        v.detach().to(device).requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in values
    ]


# ------------------------------------------------------------------ comparisons
def beside_eager(fast: Any, written: Any, args: Sequence[Any]) -> Iterator[str]:
    """Forward and backward; float64 judges."""
    eager, wide = results(written.apply, args, SEED), results(written.apply, args, SEED, wide=True)
    yield from faults(results(fast.apply, args, SEED), eager, wide)


def as_close_as_its_tests(fast: Any, written: Any, args: Sequence[Any]) -> Iterator[str]:
    """Forward and backward in float32, within what the Functions' own tests allow; then double backward."""
    try:
        expected = results(written.apply, args, SEED)
    except (RuntimeError, IndexError, ValueError):  # it makes tensors of the CPU, for example
        return
    for at, both in enumerate(zip(results(fast.apply, args, SEED), expected, strict=True)):
        yield from _apart(f"{at}", *both, rtol=1e-5, atol=2e-5)
    yield from second(fast, written, args)


def _apart(what: str, ours: Tensor | None, theirs: Tensor | None, rtol: float, atol: float) -> Iterator[str]:
    if ours is None or theirs is None:
        if ours is not theirs:
            yield f"{what}: {'nothing' if ours is None else 'a tensor'}, eager has {'one' if ours is None else 'none'}"
    elif (ours.dtype, ours.shape, ours.device) != (theirs.dtype, theirs.shape, theirs.device):
        yield f"{what}: {ours.dtype}{list(ours.shape)} on {ours.device}, eager {theirs.dtype}{list(theirs.shape)}"
    elif not torch.allclose(ours.cpu(), theirs.cpu(), rtol=rtol, atol=atol, equal_nan=True):
        yield f"{what}: off by {(ours.double() - theirs.double()).abs().max().item():.3g}"


def second(fast: Any, written: Any, args: Sequence[Any]) -> Iterator[str]:
    """The gradient of the squares of the gradients, in float64; what eager cannot differentiate is not asked for."""
    try:
        expected = _second(written.apply, args)
    except (RuntimeError, NotImplementedError):
        return
    for at, both in enumerate(zip(_second(fast.apply, args), expected, strict=True)):
        yield from _apart(f"double backward {at}", *both, rtol=1e-4, atol=1e-4)  # statistics are float32


def _second(apply: Callable[..., Any], args: Sequence[Any]) -> tuple[Tensor | None, ...]:
    wide = [
        a.detach().double().requires_grad_(a.requires_grad) if isinstance(a, Tensor) and a.is_floating_point() else a
        for a in args
    ]
    ends, leaves = differentiable(as_list(apply(*wide))), differentiable(wide)
    first = torch.autograd.grad(ends, leaves, cotangents(ends, SEED), create_graph=True, allow_unused=True)
    squares = [g.square().sum() for g in first if g is not None and g.requires_grad]
    if not squares:
        return (None,) * len(leaves)
    return torch.autograd.grad(sum(squares), leaves, allow_unused=True)  # type: ignore[arg-type]


def fallen(fast: Any, *directions: str) -> Iterator[str]:
    """Records that say that something did not run as kernels. The steps of a loop that does not roll do."""
    for name, record in fast._fusegrad.ledger.records.items():
        code = code_of(record.reason)
        if record.status == "opaque" or code == THROUGH_TORCH:
            yield f"{name}: {record.status}: {record.reason}"
        elif record.reason and code != STEP_BY_STEP and (not directions or name in directions):
            yield f"{name}: {record.reason}"


# ------------------------------------------------------------------ tables of Functions
@scene
def suite(name: str) -> Iterator[str]:
    """A case of the benchmarks at a reduced size."""
    case = reduced(next(c for c in CASES if c.name == name))
    fast = fusegrad.compile(case.function, backend="triton")
    yield from beside_eager(fast, case.function, on("cuda", real(case, SEED)))
    yield from fallen(fast)


@scene
def suite_twice(name: str) -> Iterator[str]:
    """Double backward of a benchmark's Function."""
    case = reduced(next(c for c in CASES if c.name == name))
    yield from second(fusegrad.compile(case.function, backend="triton"), case.function, on("cuda", real(case, SEED)))


@scene
def gallery(name: str) -> Iterator[str]:
    entry = next(e for e in CATALOGUE if e.name == name)
    fast = fusegrad.compile(entry.written, backend="triton")
    yield from as_close_as_its_tests(fast, entry.written, on("cuda", entry.arguments()))
    yield from fallen(fast)


@scene
def function(name: str) -> Iterator[str]:
    """One of tests/suite/functions.py."""
    case = next(c for c in catalogue.CASES if c.name == name)
    torch.manual_seed(SEED)
    made = [a.requires_grad_(a.is_floating_point()) if isinstance(a, Tensor) else a for a in case.make(4)]
    yield from as_close_as_its_tests(fusegrad.compile(case.cls, backend="triton"), case.cls, on("cuda", made))


import scenes_of_calls  # noqa: E402, F401
import scenes_of_faults  # noqa: E402, F401
import scenes_of_graphs  # noqa: E402, F401
import scenes_of_threads  # noqa: E402, F401
