"""A slice of `make processes`: forks of this very process, and some of the scenarios."""

from __future__ import annotations

import os
import threading

import processes
import pytest
import torch
import trust_functions as functions
from forking import needs_torch_to_go_on

import fusegrad
from fusegrad.runtime.kernels.cross_compile.pool import Pool
from fusegrad.tracer import locks


@pytest.mark.parametrize("name", processes.scenarios(1))
def test_scenarios(name) -> None:
    if "fork" in name:
        needs_torch_to_go_on()
    found = processes.scenarios(2)[name]()
    assert found.ok, found.wrong


def computes_in_a_child() -> bool:
    """Whether a child, forked now, gets eager's results from a first call; one that hangs is killed."""
    child = os.fork()
    if child == 0:
        status = 3
        try:
            args = functions.arguments(functions.Softmax, 3, 4)
            mine = functions.run(fusegrad.compile(functions.Softmax), args)
            eager = functions.run(functions.Softmax, args)
            status = 0 if all(torch.allclose(a, b) for a, b in zip(mine, eager, strict=True)) else 1
        finally:
            os._exit(status)
    killer = threading.Timer(60, os.kill, (child, 9))
    killer.start()
    status = os.waitpid(child, 0)[1]
    killer.cancel()
    return status == 0


@pytest.mark.parametrize("at", range(0, len(locks._known), 3))
def test_a_fork_waits_for_each_lock(at) -> None:
    needs_torch_to_go_on()
    (_, lock), held, forking = locks._known[at], threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            forking.wait(0.1)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    assert computes_in_a_child()
    thread.join()


def test_a_fork_goes_on_where_a_lock_is_not_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_torch_to_go_on()
    monkeypatch.setattr(locks, "PATIENCE", 0.05)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with locks._known[-1][1], locks._known[0][1]:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        assert computes_in_a_child()
    finally:
        done.set()
        thread.join()


def test_who_does_not_wait_any_more_leaves_no_compilers() -> None:
    """What a signal's handler raises ends the jobs, as an interrupt does: nobody is left to take the results."""
    pool = Pool(1)
    with pytest.raises(SystemExit), pool.waited_for():
        raise SystemExit
    assert pool.closed and not pool.directory.exists() and not pool.waiting


def test_the_end_of_a_process_leaves_compilers_to_threads_that_it_waits_for() -> None:
    pool = Pool(1)
    with pool.waited_for():
        pool.leave()
        assert not pool.closed
    pool.leave()
    assert pool.closed
