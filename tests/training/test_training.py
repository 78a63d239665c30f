"""A compiled Function in training code is the Function itself: every kind in every situation, as in eager."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from side_by_side import assert_same, leaf, plain, same
from situations import SITUATIONS, Layer, all_at_once, each_alone, one_by_one, per_sample
from training_functions import KINDS

import fusegrad

BATCHED = ["gate", "norm", "product", "rounded", "own"]
"""The kinds that have a rule for vmap, derived or their own; eager has one for `own` alone."""


WATCHED = ("checkpoint_that_is_selective", "mutation_of_what_is_saved")
"""Situations in which torch itself looks at every operation; classes run as written then, on record."""


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_as_in_eager(kind: str, situation: str) -> None:
    def story(c: Any) -> Any:
        return SITUATIONS[situation](KINDS[kind], c)

    may = ["dispatch modes"] if situation in WATCHED else []
    same(KINDS[kind].cls, story, opaque=KINDS[kind].opaque, may=may, tolerance=KINDS[kind].tolerance)


# ------------------------------------------------------------------ vmap over modules
@pytest.mark.parametrize("kind", BATCHED)
def test_an_ensemble_of_modules_is_its_members(kind: str) -> None:
    layers = [Layer(KINDS[kind], KINDS[kind].cls, seed) for seed in range(3)]
    fast = fusegrad.compile(KINDS[kind].cls)
    theirs = each_alone(layers, plain(4, 6))
    mine = all_at_once([Layer(KINDS[kind], fast, seed) for seed in range(3)], plain(4, 6))
    for ours, others in zip(mine, theirs, strict=True):
        given = [torch.zeros_like(a) if b is None and a is not None else b for a, b in zip(ours, others, strict=True)]
        assert_same(ours, given, 1e-5, flags=False)


@pytest.mark.parametrize("kind", BATCHED)
def test_gradients_per_sample_are_those_of_each(kind: str) -> None:
    fast = fusegrad.compile(KINDS[kind].cls)
    mine = per_sample(Layer(KINDS[kind], fast), plain(5, 6))
    assert_same(mine, one_by_one(Layer(KINDS[kind], KINDS[kind].cls), plain(5, 6)), 1e-5, flags=False)


# ------------------------------------------------------------------ tensors of other classes
class Named(torch.Tensor):
    """A subclass that adds nothing: torch hands it on."""


class Seeing(torch.Tensor):
    """A subclass that sees every function of torch, and changes what one of them does."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        return result * 2 if func in (torch.sigmoid, torch.Tensor.sin, torch.rsqrt) else result


class Wrapped(torch.Tensor):
    """A tensor around a tensor, which sees every operation: as sharded and quantised ones are made."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass
        return made(cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inside = inner.detach()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        opened = torch.utils._pytree.tree_map_only(cls, lambda t: t.inside, (args, kwargs or {}))
        return torch.utils._pytree.tree_map_only(torch.Tensor, cls, func(*opened[0], **opened[1]))


def plainly(t: Any) -> torch.Tensor:
    return t.inside if isinstance(t, Wrapped) else t.detach().as_subclass(torch.Tensor)


@pytest.mark.parametrize("kind", ["gate", "norm", "own", "opaque"])
@pytest.mark.parametrize("wrap", [lambda t: t.as_subclass(Named), lambda t: t.as_subclass(Seeing), Wrapped])
def test_subclasses_run_as_written_on_record(kind: str, wrap: Any) -> None:
    """What a subclass makes of an operation is its own affair; plain tensors are compiled before and after."""

    def story(c: Any) -> Any:
        seen: list[Any] = []
        for make in (lambda t: t, wrap, lambda t: t):
            x, w = leaf(4, 6), leaf(6, seed=1)
            rows = make(x * 1) if make is not Wrapped else Wrapped(leaf(4, 6))
            y = KINDS[kind].call(c, rows, w)
            y.sum().backward()
            kinds = [type(t).__name__ for t in (y, w.grad)]
            seen.append([kinds, plainly(y), plainly(w.grad), x.grad])
        return seen

    fast = fusegrad.compile(KINDS[kind].cls)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", fusegrad.FallbackWarning)
        assert_same(story(fast), story(KINDS[kind].cls))
    if not KINDS[kind].opaque:
        assert any("tensor subclass" in str(w.message) for w in told)
        assert "tensor subclass" in fast._fusegrad.ledger.records["forward"].reason
