"""One story, told with the class itself and with the class compiled: everything that is seen has to be the same.

A story takes a class and returns what it saw: tensors, flags, texts, nested as it likes. Values are compared bit for
bit on the reference, dtypes, shapes, strides and flags everywhere, exceptions by type and text.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

import fusegrad

Tensor = torch.Tensor
Story = Callable[[Any], Any]
BACKENDS = ("reference", "interpret")
TAKES_KEYWORDS = hasattr(torch.autograd.Function, "boxed_grads_call")
"""Whether `apply` of torch itself takes keywords, as not in 2.11; a compiled class takes them with any torch."""
both = pytest.mark.parametrize("backend", BACKENDS)


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 17 * len(shape))).to(dtype)
    return made.requires_grad_()


def plain(*shape: int, seed: int = 0) -> Tensor:
    return leaf(*shape, seed=seed).detach()


def outcome(story: Story, cls: Any) -> Any:
    """What a story saw, or the type and the text of what it raised."""
    try:
        return story(cls)
    except Exception as error:
        return error


def same(
    cls: Any,
    story: Story,
    backend: str = "reference",
    *,
    opaque: Sequence[str] = (),
    may: Sequence[str] = (),
    tolerance: float = 0.0,
    flags: bool = True,
    **options: Any,
) -> Any:
    """Tells the story twice with the compiled class and once with the class; returns the compiled class.

    opaque: the methods that run as they are written; `may`: those that do for some. Every other one has to be compiled.
    flags: strides, views and nodes count as well.
    """
    fast = fusegrad.compile(cls, backend=backend, **options)
    theirs = outcome(story, cls)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusegrad.FallbackWarning)
        for mine in (outcome(story, fast), outcome(story, fast)):
            assert_same(mine, theirs, 1e-4 if backend == "interpret" else tolerance, flags)
    records = fast._fusegrad.ledger.records
    written = {m: r.reason for m, r in records.items() if r.status == "opaque"}
    assert set(written) - set(may) == set(opaque), written
    return fast


def assert_same(mine: Any, theirs: Any, tolerance: float = 0.0, flags: bool = True) -> None:
    if isinstance(theirs, Exception) or isinstance(mine, Exception):
        assert isinstance(mine, type(theirs)), f"{mine!r} instead of {theirs!r}"
        assert str(mine) == str(theirs)
        return
    (ours, our_form), (others, their_form) = pytree.tree_flatten(mine), pytree.tree_flatten(theirs)
    assert our_form == their_form, f"{mine} instead of {theirs}"
    for a, b in zip(ours, others, strict=True):
        if isinstance(b, Tensor):
            assert_same_tensor(a, b, tolerance, flags)
        else:
            assert type(a) is type(b) and (a == b or a != a), f"{a!r} instead of {b!r}"


def assert_same_tensor(a: Tensor, b: Tensor, tolerance: float, flags: bool) -> None:
    assert isinstance(a, Tensor), f"{a!r} instead of {b!r}"
    mine, theirs = (facts(a), facts(b)) if flags else ((a.dtype, a.shape), (b.dtype, b.shape))
    assert mine == theirs, f"{mine} instead of {theirs}"
    exact = tolerance == 0.0 or not b.is_floating_point()
    torch.testing.assert_close(a, b, rtol=0 if exact else tolerance, atol=0 if exact else tolerance, equal_nan=True)


def facts(t: Tensor) -> tuple[Any, ...]:
    """What is equal of two tensors besides their values."""
    stride = t.stride() if t.numel() > 1 else None
    view = t._is_view() if t.requires_grad else None  # of what autograd does not watch, nobody can tell
    return t.dtype, tuple(t.shape), stride, t.requires_grad, t.is_leaf, view, name_of(t.grad_fn)


def name_of(node: Any) -> str | None:
    return None if node is None else node.name()


def gradients(*tensors: Tensor, of: Any) -> list[Any]:
    """Gradients of the sum of `of` (a tensor or several), None where there is none."""
    outputs = [o for o in (of if isinstance(of, tuple | list) else (of,)) if isinstance(o, Tensor) and o.requires_grad]
    return list(torch.autograd.grad([o.sum() for o in outputs], tensors, allow_unused=True))


def accumulated(*tensors: Tensor) -> list[Any]:
    return [t.grad for t in tensors]
