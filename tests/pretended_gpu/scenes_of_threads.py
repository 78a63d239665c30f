"""First calls, backwards, transforms and captured launches of many classes in many threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from scenes import scene
from scenes_of_calls import apart, rms_norm
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from written import Norm, gated, gradients, norm_by_hand, pair

import fusegrad

Values = tuple[list[Any], list[Any]]
_one_level = threading.Lock()
"""Of forward mode there is one level in a process: two threads with dual numbers fail in eager, too."""


@scene
def threads(count: int, rounds: int = 1) -> Iterator[str]:
    """A kind of call each, all at once, of classes that nothing was traced of yet."""
    wrong: list[str] = []

    def work(number: int, gate: threading.Barrier) -> None:
        gate.wait()
        kind = KINDS[number % len(KINDS)]
        what = f"thread {number}, {kind.__name__}"
        try:
            wrong.extend(apart(what, *kind(1.0 + number), 1e-4, 1e-4))
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}: {error}")

    for _ in range(rounds):
        gate = threading.Barrier(count)
        each = [threading.Thread(target=work, args=(n, gate), daemon=True) for n in range(count)]
        for thread in each:
            thread.start()
        for thread in each:
            thread.join()
    yield from wrong


# ------------------------------------------------------------------ a thread's values, and eager's
def _backward(scale: float) -> Values:
    written, (x, w) = gated(scale), pair()
    fast = fusegrad.compile(written, backend="triton")
    return gradients(fast.apply(x, w), x, w), gradients(written.apply(x, w), x, w)


def _double_backward(scale: float) -> Values:
    written, (x, w) = gated(scale), pair(dtype=torch.float64)
    fast = fusegrad.compile(written, backend="triton")

    def second(apply: Callable[..., Tensor]) -> list[Tensor]:
        first = torch.autograd.grad(apply(x, w).square().sum(), (x, w), create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.sum() for g in first), (x, w))]  # type: ignore[arg-type]

    return second(fast.apply), second(written.apply)


def _forward_mode(scale: float, derive: Any = "forward") -> Values:
    x, w = (t.detach() for t in pair(dtype=torch.float64))
    fast = fusegrad.compile(gated(scale), backend="triton", derive_jvp=derive)
    with _one_level, forward_ad.dual_level():
        given = forward_ad.make_dual(x, x * 0.3), forward_ad.make_dual(w, w * 0.7)
        plain = given[0] * torch.sigmoid(given[0] * scale) * given[1]
        ours, theirs = (forward_ad.unpack_dual(y) for y in (fast.apply(*given), plain))
    return list(ours), list(theirs)


def _forward_mode_from_backward(scale: float) -> Values:
    return _forward_mode(scale, "backward")


def _transforms(scale: float) -> Values:
    x, w = (scale * t.detach() for t in pair(dtype=torch.float64))
    fast = fusegrad.compile(type("OneNorm", (Norm,), {"__module__": __name__}), backend="triton")

    def transformed(f: Callable[..., Tensor]) -> list[Tensor]:
        gradient = torch.func.grad(lambda x, w: f(x, w).square().sum(), (0, 1))
        return [*gradient(x, w), torch.func.vmap(f, (0, None))(torch.stack([x, 2 * x]), w)]

    return transformed(lambda x, w: fast.apply(x, w)[0]), transformed(norm_by_hand)


def _counters(scale: float) -> Values:
    """A backward whose programs count who has arrived, a second time with the counters of the first."""
    written, both = rms_norm()
    fast = fusegrad.compile(written, backend="triton")
    return [*both(fast.apply), *both(fast.apply)], 2 * both(written.apply)


def _checkpointed(scale: float) -> Values:
    written, (x, w) = gated(scale), pair()
    fast = fusegrad.compile(written, backend="triton")

    def again(apply: Callable[..., Tensor]) -> list[Tensor]:
        return gradients(checkpoint(apply, x, w, use_reentrant=False), x, w)

    return again(fast.apply), again(written.apply)


def _several_sizes(scale: float) -> Values:
    """One class at three sizes and two dtypes."""
    written = gated(scale)
    fast = fusegrad.compile(written, backend="triton")
    given = [pair(dtype=d, rows=n) for n, d in ((16, torch.float32), (5, torch.float32), (1, torch.float64))]
    ours, theirs = ([v for x, w in given for v in gradients(f(x, w), x, w)] for f in (fast.apply, written.apply))
    return ours, theirs


KINDS = (
    _backward, _double_backward, _forward_mode, _transforms, _counters, _checkpointed, _forward_mode_from_backward,
    _several_sizes,
)  # fmt: skip
