"""Every class of functions.py, compiled, against eager: values, dtypes, shapes, strides, requires_grad, errors."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fusegrad

sys.path.insert(0, str(Path(__file__).parent))
from comparing import faults, laid_out, run, wide_run
from functions import CASES, Case

SEED = 20240
BATCHES = (4, 3, 1, 0, 17)
DEPENDS_ON_DATA = {"SegmentMean"}  # torch.bincount: how long its result is
each = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def arguments(case: Case, n: int, dtype: torch.dtype, layout: str) -> list[Any]:
    torch.manual_seed(SEED + n)
    made = [a.to(dtype) if isinstance(a, torch.Tensor) and a.dtype is torch.float32 else a for a in case.make(n)]
    return [laid_out(a, layout) for a in made]


def compare(case: Case, fast: Any, n: int, dtype: torch.dtype, layout: str, gradient_layout: str) -> list[str]:
    """What is different at this size, dtype and layout; eager's own error has to be raised as well."""
    args = arguments(case, n, dtype, layout)
    at = f"seed {SEED}, n={n}, {dtype}, {layout}, gradients {gradient_layout}"
    try:
        eager = run(case.cls.apply, args, SEED, gradient_layout)
    except (RuntimeError, IndexError, ValueError) as error:
        with pytest.raises(type(error)):
            run(fast.apply, args, SEED, gradient_layout)
        return []
    compiled = run(fast.apply, args, SEED, gradient_layout)
    wide = wide_run(case.cls.apply, args, eager.cotangents)
    return [f"{at}: {f}" for f in faults(compiled, eager, wide)]


def swept(case: Case, backend: str, sweep: list[tuple[int, torch.dtype, str, str]]) -> None:
    """One compiled class over the sweep; nothing may fall back."""
    fast = fusegrad.compile(case.cls, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [fault for point in sweep if point[1] in case.floats for fault in compare(case, fast, *point)]
    assert not found, "\n".join(found)
    reasons = {m: r.reason for m, r in fast._fusegrad.ledger.records.items() if r.reason}
    assert not reasons or case.name in DEPENDS_ON_DATA, reasons


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LAID_OUT = [
    (4, F32, "transposed", "expanded"),
    (5, F32, "step", "row"),
    (4, F32, "offset", "transposed"),
    (4, F32, "row", "step"),
    (4, F32, "channels_last", "channels_last"),
    (3, BF16, "transposed", "expanded"),
    (5, F16, "contiguous", "row"),
]


def laid_out_points(case: Case, count: int) -> list[Any]:
    """Some of the layouts; every layout meets every kind of Function, each class only a few."""
    first = CASES.index(case)
    return [LAID_OUT[(first + 3 * i) % len(LAID_OUT)] for i in range(count)]


@each
def test_reference(case: Case) -> None:
    swept(case, "reference", [(n, F32, "contiguous", "contiguous") for n in BATCHES] + laid_out_points(case, 1))


@each
def test_interpret(case: Case) -> None:
    swept(case, "interpret", [(3, F32, "contiguous", "contiguous"), *laid_out_points(case, 1)])


@pytest.mark.parametrize("case", CASES[::10], ids=lambda c: c.name)
def test_explained(case: Case) -> None:
    """Nothing is left to the user's own methods; library calls are for what no kernel of ours computes."""
    torch.manual_seed(SEED)
    made = case.make(64)
    args = [a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in made]
    found = fusegrad.explain(case.cls, *args)
    assert all(r.status != "opaque" for r in found.methods.values())
    assert case.name in DEPENDS_ON_DATA or not any(report.reasons for report in found.directions.values())
    assert case.library or all(k.kind == "triton" for k in found.kernels)


def test_the_comparison_can_fail() -> None:
    """A Function that is compiled right differs from one that is almost it."""
    case = next(c for c in CASES if c.name == "Silu")

    class Almost(case.cls):  # type: ignore[misc, name-defined]
        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return case.cls.backward(ctx, g) * 1.00001  # type: ignore[attr-defined, no-any-return]

    assert compare(case, fusegrad.compile(Almost, backend="reference"), 4, torch.float32, "contiguous", "contiguous")
