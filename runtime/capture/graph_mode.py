"""Recognition of calls for a graph that another tracer makes: torch.compile, torch.export, make_fx."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from ...tracer.opaque.watching import watcher
from ...tracer.torch_private import is_fake, is_traced_elsewhere, no_tracing_functions, plain_tensors
from ..values.bitwise import made_up_data

_fake_results: ContextVar[bool] = ContextVar("fusegrad_asked", default=False)


def is_for_a_graph(values: Sequence[Any]) -> bool:
    """True if a call on these values is recorded, or has no memory to run on."""
    return is_traced_elsewhere() or any(map(is_fake, values))


def is_for_outer_graph(args: Sequence[Any] = ()) -> bool:
    """True if a tracer other than fusegrad's makes a graph of this call.

    args: of a rule, which runs on tensors without memory where Dynamo asks for the results of a derivative.
    """
    return watcher() is None and (_fake_results.get() or is_for_a_graph(args))


def wants_fake_results() -> bool:
    """True if only fake results are asked for."""
    return _fake_results.get() and not is_traced_elsewhere()


@contextmanager
def with_fake_results() -> Iterator[None]:
    """Within the block calls are made as for a graph: fake tensors alone do not say that they are for one."""
    token = _fake_results.set(True)
    try:
        yield
    finally:
        _fake_results.reset(token)


@contextmanager
def with_fake_results_for(args: Sequence[Any]) -> Iterator[None]:
    """The same where an argument of an operator has no memory."""
    token = _fake_results.set(_fake_results.get() or any(map(is_fake, args)))
    try:
        yield
    finally:
        _fake_results.reset(token)


@contextmanager
def outside_graph() -> Iterator[None]:
    """Within the block nothing of the graph around it is seen: for captures of ours."""
    with ExitStack() as stack:
        stack.enter_context(made_up_data())
        stack.enter_context(no_tracing_functions())
        stack.enter_context(plain_tensors())
        stack.enter_context(torch.no_grad())
        yield
