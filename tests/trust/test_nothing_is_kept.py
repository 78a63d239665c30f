"""No argument, output or gradient outlives its call, in any way of calling: where eager frees at once, so do we.

Python's collector is off meanwhile: what only a cycle holds is memory that a GPU has not.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kept
import odd_functions
import pytest
import torch
import trust_functions as functions_of_trust
import ways_of_calling as ways

import fusegrad
from fusegrad.examples.gallery.catalogue import CATALOGUE

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "suite"))

import functions

CALLS = 5
"""Calls are written out at the third, and so is what follows from it."""
EAGER = 2
BACKENDS = ("reference", "interpret")
every_way = pytest.mark.parametrize("way", ways.WAYS, ids=lambda way: way.__name__)


@pytest.fixture(autouse=True)
def in_silence() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def require_nothing_kept(
    written: Any, compiled: Any, way: ways.Way, make: Callable[[], tuple[Any, ...]], calls: int = CALLS
) -> None:
    """Nothing stays of calls of the compiled Function but what stays of eager's."""
    excused = {what for _, alive, _ in ways.kept(written, way, make, EAGER) for what in alive} if written else set()
    for call, alive, holders in ways.kept(compiled, way, make, calls):
        assert set(alive) <= excused, f"after call {call}: {alive}\n{holders}"


def tracked(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)


@every_way
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", functions.CASES, ids=lambda case: case.name)
def test_of_the_suite(case, backend, way) -> None:
    fast = fusegrad.compile(case.cls, backend=backend)
    require_nothing_kept(case.cls.apply, fast.apply, way, lambda: tracked(case.make(4)))


@every_way
@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
def test_of_the_gallery(entry, way) -> None:
    fast = fusegrad.compile(entry.written)
    require_nothing_kept(entry.written.apply, fast.apply, way, entry.arguments)


@every_way
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("odd", odd_functions.ODD, ids=lambda odd: odd.name)
def test_of_odd_ones(odd, backend, way) -> None:
    require_nothing_kept(odd.written, odd.compiled(backend), way, odd.make)


def test_a_slice_of_calls_with_large_tensors() -> None:
    some = (ways.forward_and_backward, ways.double_backward, ways.checkpointed)
    found = kept.measure((functions_of_trust.SwiGLU, odd_functions.OnContext), 40 << 20, some, calls=3)
    assert found["kept_bytes"] == 0 and found["kept_by_eager"] == [], found


def test_what_is_kept_is_counted() -> None:
    """A class that keeps what it is given, in Python, and in a node that C++ alone holds."""
    held: list[Any] = []

    def keeps(x: torch.Tensor) -> torch.Tensor:
        held.append(x)
        return x * 2

    def ties(x: torch.Tensor) -> torch.Tensor:
        held.append((x.detach() * 1).requires_grad_().exp().sum().grad_fn)
        return x * 2

    for function, least in ((keeps, 80 << 20), (ties, 80 << 20)):
        held.clear()
        with ways.uncollected():
            assert kept.kept_by(function, ways.forward_alone, odd_functions.Split, 40 << 20, 2) >= least
