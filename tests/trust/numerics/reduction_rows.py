"""Every reduction and scan that codegen emits, in every dtype: long, empty, with NaN and ties, whole and in chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accuracy import Errors, compared
from dense import BITS
from harness import INTERPRET, T
from primitive_rows import FLOATS, WHOLE, interpreted, through_torch

from fusegrad.ir import emit
from fusegrad.ir.prims import PRIMS
from fusegrad.tracer.dtypes import TO_TORCH

Tensor = torch.Tensor
CHUNKED = replace(INTERPRET, shared=2)
"""Room for almost nothing: rows go by in chunks."""
CHUNKED_ROWS, IN_CHUNKS = 3, ("f32", "i64")
NAMES = [n for n, p in PRIMS.items() if p.family in ("reduce", "cumulative")]
ON_WHOLE = {"sum": ("i32", "i64"), "prod": ("i32", "i64"), "cumsum": ("i64",)}
"""Integers that ATen's rules sum and multiply in: narrower ones are converted before."""


def dtypes_of(name: str) -> tuple[str, ...]:
    return (*FLOATS, *ON_WHOLE.get(name, tuple(d for d in WHOLE if d != "b1" or not name.startswith("arg"))))


def body_of(name: str) -> Callable[..., Any]:
    if name == "cumsum":
        return lambda x: T(emit(name, x.v, axis=1, reverse=False))
    if name.startswith("arg"):
        return lambda x: T(emit(name, x.v, axis=1))
    return lambda x: T(emit(name, x.v, axes=(1,)))


def rows_of(name: str, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """What is reduced along its rows, by what it shows."""
    kind, random = TO_TORCH[dtype], torch.Generator().manual_seed(11)
    if dtype not in FLOATS:
        yield from _whole_rows(name, dtype)
        return
    normal = torch.randn(12, 777, generator=random, dtype=torch.float64)
    yield "random", (normal * (1.0 if name != "prod" else 0.02) + (1.0 if name == "prod" else 0.0)).to(kind)
    yield "positive", (normal.abs() if name != "prod" else 1 + normal.abs() / 1000).to(kind)
    if name in ("sum", "cumsum"):
        long = torch.rand(1, 1_000_000, generator=random, dtype=torch.float64)
        yield "a million", (long * (0.05 if dtype == "f16" else 1.0)).to(kind)
    yield "special", _special_rows(kind)
    yield "one", normal[:, :1].to(kind)
    if name in ("sum", "prod", "cumsum"):
        yield "none", normal[:, :0].to(kind)


def _special_rows(kind: torch.dtype) -> Tensor:
    """Rows of few: NaN, infinities, signed zeros; what overflows and subnormals in rows of their own, in any order."""
    ends = [torch.finfo(kind).max, torch.ones(1, dtype=BITS[kind]).view(kind).item()]
    values = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan]
    drawn = torch.randint(0, len(values), (120, 5), generator=torch.Generator().manual_seed(12))
    pure = torch.tensor([*values, *ends, -ends[0]], dtype=kind)[:, None].expand(-1, 5)
    return torch.cat([pure, torch.tensor(values, dtype=kind)[drawn]])


def _whole_rows(name: str, dtype: str) -> Iterator[tuple[str, Tensor]]:
    kind, random = TO_TORCH[dtype], torch.Generator().manual_seed(13)
    if dtype == "b1":
        yield "random", torch.rand(64, 33, generator=random) < 0.5
        yield "same", torch.tensor([[True] * 9, [False] * 9])
        return
    limits = torch.iinfo(kind)
    yield "wrapping", torch.randint(limits.min, limits.max, (12, 333), generator=random, dtype=kind)
    yield "ties", torch.randint(0, 3, (64, 50), generator=random, dtype=kind)
    yield "ends", torch.tensor([[limits.min, limits.max, 0], [limits.max, limits.max, limits.min]], dtype=kind)


def truth(name: str, x: Tensor, eager: Tensor) -> np.ndarray:
    if not x.is_floating_point() or name.startswith("arg"):
        return eager.double().numpy()
    wide = np.longdouble if x.dtype == torch.float64 else np.float64
    array = x.double().numpy().astype(wide)
    with np.errstate(all="ignore"):
        return np.asarray(getattr(np, name)(array, 1))


def measured(name: str, dtype: str, targets: Sequence[Any] = (INTERPRET, CHUNKED)) -> Iterator[tuple[str, Errors]]:
    """(what is reduced, errors) for each kind of rows and target; NaN, infinities and zeros as eager's."""
    for label, x in rows_of(name, dtype):
        eager = through_torch(body_of(name), (x,))
        reference = truth(name, x, eager)
        for target in targets:
            if target is CHUNKED and not (dtype in IN_CHUNKS and 1 < x.shape[1] < 1000):
                continue
            rows = slice(None) if target is INTERPRET else slice(None, None, max(1, len(x) // CHUNKED_ROWS))
            found = interpreted(body_of(name), (x[rows].contiguous(),), target)
            where = label if target is INTERPRET else f"{label}, in chunks"
            size = _summed(name, label, x[rows])
            yield where, compared(found, eager[rows], reference[rows], local=False, size=size)


def _summed(name: str, label: str, x: Tensor) -> np.ndarray | None:
    """What a sum of both signs is measured by: the sum of the sizes, of which it may be a small part."""
    if label != "random" or name not in ("sum", "cumsum") or not x.is_floating_point():
        return None
    sizes = x.double().abs()
    return (sizes.cumsum(1) if name == "cumsum" else sizes.sum(1)).numpy()
