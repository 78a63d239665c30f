"""A graph with opaque nodes, run on what these returned before: to be compared, and to finish a call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...tracer.opaque.call_interception import recording
from ...tracer.opaque.opaque import OpaqueNode, Run, Tape, running
from ...tracer.trace import CaptureError
from ..execution.executable import Executable
from ..settings.config import KERNEL_BACKENDS
from ..values.sizes import BoundSizes

Tensor = torch.Tensor
Call = Callable[[Sequence[Any]], Sequence[Any]]
VARIANTS = 8
"""Graphs of one method that differ only in what its opaque nodes returned; beyond them its own Python runs."""


def in_place_error(node: OpaqueNode) -> CaptureError:
    """A method that writes to its arguments would write twice if it had to be finished by hand."""
    return CaptureError(
        reason=f"it calls `{node.name}`, which {node.why.reason}, and writes to an argument", where=node.where
    )


def replay_opaque_nodes(call: Call, tape: Tape | None, sizes: Any) -> Call:
    """A captured graph on its inputs, its opaque nodes played back; what they are given counts as results."""
    if tape is None:
        return call

    def run(args: Sequence[Any]) -> list[Any]:
        compared_inputs: list[Tensor] = []
        with running(Run(Tape([t for t in tape.completed if t.opaque]), sizes, compared_inputs=compared_inputs)):
            return [*call(args), *compared_inputs]

    return run


def replay_opaque_calls(call: Call, tape: Tape | None) -> Call:
    """The user's method, its opaque calls played back; what they are given counts as results.

    Other nested calls run again: the graph holds them, and draws with its own random state what they draw.
    """
    if tape is None:
        return call

    def run(args: Sequence[Any]) -> list[Any]:
        compared_inputs: list[Tensor] = []
        with recording(Tape([t for t in tape.calls() if t.opaque], data=tape.data), compared_inputs=compared_inputs):
            return [*call(args), *compared_inputs]

    return run


_offers = threading.local()


def offer_tape(tape: Tape | None) -> None:
    """A tape for the graph that starts next in this thread; None takes it back."""
    _offers.tape = tape


def take_offered_tape() -> Tape | None:
    """The tape for the graph that starts now; it is handed over once."""
    tape: Tape | None = getattr(_offers, "tape", None)
    _offers.tape = None
    return tape


@contextmanager
def running_with_tape(
    executable: Executable, tape: Tape | None, sizes: BoundSizes
) -> Iterator[BoundSizes]:
    """Within the block a graph with opaque nodes runs; the sizes that it runs with, to which the nodes add."""
    bound = BoundSizes(sizes)
    run = Run(tape or Tape(), bound, laid_out=executable.backend in KERNEL_BACKENDS)
    with running(run):
        yield bound
