"""Programs of a kernel that truly run at once, in any order: processes that share the arguments' memory.

The interpreter runs one program after the other, so none ever waits for another there. Here several interpreters,
forked from this process, each run some of the programs on the same memory. Triton's interpreted atomics are the
processor's own, hence atomic between processes, too. What is missing is a GPU's weaker order of memory.
"""

from __future__ import annotations

import mmap
import os
import random
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusegrad.runtime.kernels import interpreter
from fusegrad.runtime.kernels import triton_private as private

Deal = Callable[[int], list[list[int]]]
"""The programs of each process, in the order in which it runs them, of so many programs."""


def in_turn(processes: int) -> Deal:
    """As a GPU does: those with smaller numbers begin first."""
    return lambda grid: [list(range(p, grid, processes)) for p in range(min(processes, grid))]


def from_the_last(processes: int) -> Deal:
    """Those with larger numbers first: whoever waits for smaller ones waits in vain for some of them."""
    return lambda grid: [each[::-1] for each in in_turn(processes)(grid)]


def shuffled(processes: int, seed: int) -> Deal:
    """In no order at all."""

    def deal(grid: int) -> list[list[int]]:
        programs = random.Random(seed).sample(range(grid), grid)
        return [programs[p::processes] for p in range(min(processes, grid))]

    return deal


@dataclass
class Seen:
    """What ran: (kernel, programs) of each launch whose programs were dealt to several processes."""

    launches: list[tuple[str, int]] = field(default_factory=list)


@contextmanager
def programs_at_once(deal: Deal, late: Sequence[int] = (), seconds: float = 0.05) -> Iterator[Seen]:
    """Launches on the `interpret` backend deal their programs to processes meanwhile; `late` ones begin later."""
    alone, seen = interpreter.run_programs, Seen()

    def run(kernel: Any, text: str, arguments: Sequence[Any], grid: int, programs: Sequence[int]) -> None:
        hands = deal(grid)
        if len(hands) < 2:
            return alone(kernel, text, arguments, grid, programs)
        seen.launches.append((kernel.name, grid))

        def work(hand: Sequence[int]) -> None:
            _give_way()
            alone(kernel, text, shared, grid, _in_time(hand, late, seconds))

        with _shared(arguments) as shared:
            in_processes(work, hands)

    interpreter.run_programs = run
    try:
        yield seen
    finally:
        interpreter.run_programs = alone


def _in_time(hand: Sequence[int], late: Sequence[int], seconds: float) -> Iterator[int]:
    """These programs, the late ones so much later."""
    for program in hand:
        time.sleep(seconds if program in late else 0)
        yield program


def _give_way() -> None:
    """From now on whoever asks in this process for what others tell leaves them the processor."""
    atomic = private.builder.create_atomic_rmw

    def giving_way(*args: Any) -> Any:
        time.sleep(1e-4)
        return atomic(*args)

    private.builder.create_atomic_rmw = giving_way  # type: ignore[method-assign]


@contextmanager
def _shared(arguments: Sequence[Any]) -> Iterator[list[Any]]:
    """The arguments in memory that processes share; what is written there is copied back."""
    copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def share(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in copies:
            copies[storage.data_ptr()] = (storage, _copy(storage))
        shared = copies[storage.data_ptr()][1]
        return value.new_empty(0).set_(shared, value.storage_offset(), value.shape, value.stride())

    yield [share(a) for a in arguments]
    for original, copy in copies.values():
        if original.nbytes():
            original.copy_(copy)


def _copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """The same bytes in memory that forked processes share; it begins with a page."""
    copy = torch.frombuffer(mmap.mmap(-1, max(storage.nbytes(), 1)), dtype=torch.uint8).untyped_storage()
    if storage.nbytes():
        copy.copy_(storage)
    return copy


def in_processes(work: Callable[[Sequence[int]], None], hands: Sequence[Sequence[int]]) -> None:
    """Do the work for each hand in a process of its own; AssertionError with a traceback where one fails."""
    children = []
    for hand in hands:
        reading, writing = os.pipe()
        if child := os.fork():
            os.close(writing)
            children.append((child, reading))
            continue
        status = 1
        try:
            torch.set_num_threads(1)  # the pool of threads is the parent's
            work(hand)
            status = 0
        except BaseException:
            os.write(writing, traceback.format_exc()[-60_000:].encode())
        finally:
            os._exit(status)
    failures = []
    for child, reading in children:
        with os.fdopen(reading, "rb") as told:
            text = told.read().decode()
        _, status = os.waitpid(child, 0)
        failures += [text or f"process {child} ended with status {status}"] if status else []
    assert not failures, failures[0]
