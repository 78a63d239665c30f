"""The counters."""

from __future__ import annotations

import threading

import pytest
from function_samples import Softmax, leaf, run
from test_traceable import ObjectOnCtx

import fusegrad
from fusegrad.runtime.settings.counters import COUNTERS, count, reset


def test_what_is_counted() -> None:
    reset()
    assert fusegrad.stats() == dict.fromkeys(COUNTERS, 0)
    fast = fusegrad.compile(Softmax)
    run(fast, leaf(3, 4))
    first = fusegrad.stats()
    assert first["captures"] == 2 and first["compiles"] == 2 and first["fallbacks"] == 0
    run(fast, leaf(5, 4))
    assert fusegrad.stats() == first
    with pytest.warns(fusegrad.FallbackWarning):
        run(fusegrad.compile(ObjectOnCtx), leaf(3))
    assert fusegrad.stats()["fallbacks"] == 2  # forward, then backward


def test_kernels_are_counted_on_the_interpreter() -> None:
    reset()
    fast = fusegrad.compile(Softmax, backend="interpret")
    run(fast, leaf(3, 4))
    first = fusegrad.stats()["compiles"]
    assert first >= 2  # forward and backward, each for aligned sizes too where that makes another kernel
    for rows in (16, 5, 32, 64, 7):
        run(fast, leaf(rows, 4))
    assert fusegrad.stats()["compiles"] == first


def test_the_answer_is_a_copy() -> None:
    fusegrad.stats()["captures"] = -1
    assert fusegrad.stats()["captures"] >= 0


def test_counting_from_threads() -> None:
    reset()
    threads = [threading.Thread(target=lambda: [count("compiles") for _ in range(1000)]) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert fusegrad.stats()["compiles"] == 8000
    reset()
