"""Effects of a call that fails half way: writes to its arguments, and random numbers that it drew.

The user's own method answers such a call, and has to find what it would have found: numbers are given back; what is
written is not, so that the error says so and nothing runs again.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ...tracer.opaque.opaque import version
from ..capture.captured import CapturedFunction

Tensor = torch.Tensor
F = TypeVar("F", bound=Callable[..., Any])
AFTER_EFFECTS = "_fusegrad_after_effects"
"""The attribute of an error that came after something was written."""


class Launching:
    """Marks functions that call generated Functions, and besides these nothing that is not ours."""

    def __init__(self) -> None:
        self.codes: set[types.CodeType] = set()

    def __call__(self, function: F) -> F:
        self.codes.add(function.__code__)
        return function


launching = Launching()


def with_effects_noted(apply: Callable[..., Any], captured: CapturedFunction) -> Callable[..., Any]:
    """`apply` of a node whose call leaves marks: random numbers are given back, and an error knows whether it wrote."""
    draws = captured.draws
    if not (draws or captured.writes_inputs):
        return apply

    @launching
    def run(*args: Any) -> Any:
        before = EffectsBefore(args, draws)
        try:
            return apply(*args)
        except Exception as error:
            before.settle(error)
            raise

    run.__self__ = getattr(apply, "__self__", None)  # type: ignore[attr-defined]
    return run


class EffectsBefore:
    """The state that a call may change, before it: the versions of its arguments, the states of torch's generators."""

    def __init__(self, args: Sequence[Any], draws: bool) -> None:
        self.args, self.versions = args, [version(a) for a in args]
        self.states = generator_states(args) if draws else []

    def settle(self, error: Exception) -> None:
        """Random numbers are drawn again from where they were; what is written stays, and `error` says so."""
        for restore in self.states:
            restore()
        if [version(a) for a in self.args] != self.versions:
            setattr(error, AFTER_EFFECTS, True)


def generator_states(args: Sequence[Any]) -> list[Callable[[], Any]]:
    """Functions that put back each generator that a call on these tensors may draw from."""
    cpu = torch.get_rng_state()
    devices = {a.device.index or 0 for a in args if isinstance(a, Tensor) and a.device.type == "cuda"}
    generators = [torch.cuda.default_generators[d] for d in sorted(devices)]
    offsets = [(g, g.get_offset()) for g in generators]
    return [lambda: torch.set_rng_state(cpu), *(lambda g=g, n=n: g.set_offset(n) for g, n in offsets)]


@contextmanager
def drawing_again(values: Sequence[Any]) -> Iterator[None]:
    """Where the block fails, what it drew of random numbers is drawn again afterwards."""
    states = generator_states(values)
    try:
        yield
    except Exception:
        for restore in states:
            restore()
        raise
