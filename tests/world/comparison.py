"""What two tellings of one scene have in common: values, strides, flags, errors; and a word for the difference.

    same      equal bits and facts (within eager's own rounding on a kernel backend)
    rounds    other bits, no further from the float64 answer than eager is
    raises    both raise
    derives   eager raises, the compiled class gives what single calls of the class give
    refuses   eager raises, the compiled class raises by another name
    ---       what follows counts as a fault until it is explained
    other error, wrong derivation, values, facts, raises here
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from scenes import Seen, paired
from torch.utils._python_dispatch import TorchDispatchMode

Tensor = torch.Tensor
Facts = tuple[Any, ...]
RIGHT = ("same", "rounds", "raises", "derives", "refuses")


@dataclass(frozen=True)
class Verdict:
    """A word and, where it is needed, what it is about."""

    word: str
    detail: str = ""


def of_the_result() -> float:
    """The rounding of a class that computes in the dtype of its result."""
    return 0.0


def judged(
    ours: Any,
    eager: Any,
    exact: bool,
    float64: Callable[[], Any],
    checked: Callable[[], Any],
    unit: Callable[[], float] = of_the_result,
) -> Verdict:
    """ours, eager: what a scene saw, or the exception that it raised.

    Asked for where they are needed: `float64`, the answer in that dtype; `checked`, the same by single calls; `unit`,
    the rounding of the least precise dtype that eager itself computes in.
    """
    if isinstance(eager, Exception):
        return _where_eager_raises(ours, eager, checked)
    if isinstance(ours, Exception):
        return Verdict("raises here", told(ours))
    if (other := _other_facts(ours, eager)) is not None:
        return Verdict("facts", other)
    if exact and all(_equal(a, b) for (_, a), (_, b) in zip(ours, eager, strict=True)):
        return Verdict("same")
    return _rounded(ours, eager, exact, float64(), unit())


def _where_eager_raises(ours: Any, eager: Exception, checked: Callable[[], Any]) -> Verdict:
    if isinstance(ours, Exception):
        same = isinstance(ours, type(eager)) or isinstance(eager, type(ours))
        return Verdict("raises" if same else "refuses", "" if same else f"{told(ours)} | {told(eager)}")
    single = checked()
    if isinstance(single, Exception) or single is None:
        return Verdict("derives", "not checked")
    seen = paired(ours) if single and single[0][0] == "pairing" else ours
    wrong = _far(seen, single, _tolerance(ours))
    return Verdict("derives") if wrong is None else Verdict("wrong derivation", wrong)


def told(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:160]}"


# ------------------------------------------------------------------ facts
def facts(value: Any) -> Facts:
    if not isinstance(value, Tensor):
        return (type(value).__name__,)
    strided = value.layout is torch.strided
    stride = value.stride() if strided and value.numel() > 1 else None
    node = None if value.grad_fn is None else type(value.grad_fn).name(value.grad_fn)  # `ctx.name` may hide it
    view = value._is_view() if value.requires_grad else None
    return str(value.dtype), tuple(value.shape), stride, value.requires_grad, value.is_leaf, view, node


FREE = 4
"""Whose node it is counts for outputs alone: the node of a derivative is fusegrad's."""
NAMES = ("dtype", "shape", "strides", "requires_grad", "is_leaf", "is a view", "grad_fn")


def _other_facts(ours: Seen, eager: Seen) -> str | None:
    if [label for label, _ in ours] != [label for label, _ in eager]:
        return f"{[label for label, _ in ours]} instead of {[label for label, _ in eager]}"
    for (label, a), (_, b) in zip(ours, eager, strict=True):
        mine, theirs = (facts(v)[: None if label.startswith("output") else FREE] for v in (a, b))
        if len(mine) != len(theirs):
            return f"{label}: {mine[0]} instead of {theirs[0]}"
        for name, x, y in zip(NAMES, mine, theirs, strict=False):
            if x != y:
                return f"{label}: {name} {x} instead of {y}"
    return None


# ------------------------------------------------------------------ values
def _dense(t: Tensor) -> Tensor:
    """The same numbers in a layout, and a dtype, that can be computed with."""
    dense = t.detach().to_dense() if t.layout is not torch.strided else t.detach()
    return dense.float() if dense.is_floating_point() and dense.itemsize == 1 else dense


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return a is b or (type(a) is type(b) and (not _is_plain(a) or a == b or a != a))
    return torch.equal(_dense(a).nan_to_num(nan=17.0), _dense(b).nan_to_num(nan=17.0)) if a.numel() else True


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str | bool | complex | None)


def _rounded(ours: Seen, eager: Seen, exact: bool, float64: Any, unit: float) -> Verdict:
    """Other bits: right as far as the float64 answer, or eager's precision, tells."""
    for i, ((label, a), (_, b)) in enumerate(zip(ours, eager, strict=True)):
        if _equal(a, b) or not isinstance(a, Tensor):
            continue
        reference = float64[i][1] if isinstance(float64, list) and len(float64) == len(eager) else None
        error, bound = _error(a, b, reference, unit)
        if error > bound:
            return Verdict("values", f"{label}: off by {error:.2g}, where {bound:.2g} is allowed")
    return Verdict("rounds" if exact else "same")


def _error(ours: Tensor, eager: Tensor, reference: Any, unit: float) -> tuple[float, float]:
    """How far ours is off, and how far it may be: twice eager's error and a few units of the largest number."""
    a, b = _wide(ours), _wide(eager)
    r = _wide(reference) if isinstance(reference, Tensor) and reference.shape == eager.shape else b
    if bool((a.isfinite() != b.isfinite()).any()):
        return float("inf"), 0.0
    a, b, r = (t.where(b.isfinite() & r.isfinite(), 0) for t in (a, b, r))
    eps = max(torch.finfo(eager.dtype).eps, unit) if eager.is_floating_point() or eager.is_complex() else 0.0
    largest = max(_most(b), _most(r))
    return _most(a - r), 2 * _most(b - r) + 16 * eps * largest


def _most(t: Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0


def _wide(t: Tensor) -> Tensor:
    return _dense(t).to(torch.complex128 if t.is_complex() else torch.float64)


def _tolerance(seen: Seen) -> float:
    """Of sums over what was seen: tangents in a byte have few bits."""
    bytewide = [v.dtype for _, v in seen if isinstance(v, Tensor) and v.is_floating_point() and v.itemsize == 1]
    return max([1e-4, *(torch.finfo(dtype).eps / 8 for dtype in bytewide)])


def _far(ours: Seen, single: Seen, tolerance: float) -> str | None:
    """The first value of ours that is not that of single calls."""
    if len(ours) != len(single):
        return f"{len(ours)} values instead of {len(single)}"
    for (label, a), (_, b) in zip(ours, single, strict=True):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            continue
        if a.shape != b.shape:
            return f"{label}: shape {tuple(a.shape)} instead of {tuple(b.shape)}"
        wide, wanted = (_wide(t).nan_to_num(nan=17.0) for t in (a, b))
        error, largest = _most(wide - wanted), _most(wanted)
        if not error <= tolerance * max(largest, 1.0):
            return f"{label}: off by {error:.2g} of {largest:.2g}"
    return None


class Precision(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the block, from the first call of `watched` on: the rounding of the least precise dtype computed in."""

    unit, counts = 0.0, False

    def watched(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.counts = True
            return apply(*args)

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        exact = [t.dtype for t in found if self.counts and (t.is_floating_point() or t.is_complex())]
        self.unit = max([self.unit, *(torch.finfo(dtype).eps for dtype in exact)])
        return result
