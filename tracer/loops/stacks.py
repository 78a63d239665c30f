"""Lists of tensors that forward saves, as long as one of its loops: `ctx.save_for_backward(x, *hs)`.

A graph has a fixed number of results. A run of saved tensors that are alike is one of them, stacked, and backward is
shown its slices.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any, TypeGuard

import torch

from ..capture.metadata import strides_in_order
from ..torch_private import memory_of, saved_tensors_can_be_told_apart
from .lengths import each_of

Tensor = torch.Tensor


def runs_of(saved: Sequence[Tensor | None], others: Sequence[Tensor]) -> list[list[Any]]:
    """The saved tensors in runs: those in a row that can be stacked, and each of the rest alone.

    others: arguments and results, which stay what they are.
    """
    known = [memory_of(t) for t in others if _is_strided(t)]
    memories = Counter([*known, *(memory_of(t) for t in saved if _is_strided(t))])
    alone = {m for m, number in memories.items() if number > 1} | {*known}
    kinds = [_kind(t) or (n,) if _is_strided(t) and memory_of(t) not in alone else (n,) for n, t in enumerate(saved)]
    pairs = itertools.groupby(zip(kinds, saved, strict=True), lambda pair: pair[0])
    return [[t for _, t in run] for _, run in pairs]


def _is_strided(tensor: Tensor | None) -> TypeGuard[Tensor]:
    """True if it is a tensor whose values lie in one piece of memory: not a sparse one."""
    return tensor is not None and tensor.layout is torch.strided


def _kind(tensor: Tensor) -> Hashable | None:
    """Equal for tensors of which eager's slices of a stack are no different; None where a slice lies otherwise."""
    has_history = tensor.requires_grad and tensor.grad_fn is not None
    rows = strides_in_order(tensor.shape, range(tensor.dim())[::-1])
    if has_history or list(map(str, rows)) != list(map(str, tensor.stride())):
        return None
    return str(tensor.dtype), str(tensor.device), *map(str, tensor.shape)


def growing(told: Sequence[Sequence[int]]) -> frozenset[int]:
    """The runs that are not as long at each length of a loop; none where there are not as many runs."""
    if not saved_tensors_can_be_told_apart or len({len(lengths) for lengths in told}) > 1:
        return frozenset()
    return frozenset(n for n, lengths in enumerate(zip(*told, strict=True)) if len(set(lengths)) > 1)


def stacked(runs: Sequence[Sequence[Any]], which: Collection[int]) -> tuple[list[Any], tuple[int, ...]]:
    """The saved tensors, each of these runs stacked, and where the stacks are."""
    found: list[Any] = []
    places: list[int] = []
    for number, run in enumerate(runs):
        if number in which:
            places.append(len(found))
        found += [torch.stack(list(run))] if number in which else run
    return found, tuple(places)


def unstacked(saved: Sequence[Any], stacks: Collection[int]) -> tuple[Any, ...]:
    """The saved tensors as the user saved them."""
    return tuple(itertools.chain.from_iterable(_slices(saved, stacks)))


def _slices(saved: Sequence[Any], stacks: Collection[int]) -> Iterator[Sequence[Any]]:
    for place, value in enumerate(saved):
        yield each_of(value) if place in stacks else (value,)


def stacked_again(saved: Sequence[Any], counts: Sequence[int | None]) -> list[Any]:
    """The user's saved tensors as a graph keeps them: so many in a stack each, None for one alone."""
    supply = iter(saved)
    return [next(supply) if n is None else torch.stack(list(itertools.islice(supply, n))) for n in counts]
