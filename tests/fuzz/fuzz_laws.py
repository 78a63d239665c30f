"""Laws that hold between runs of one Function, whatever it computes; only what eager keeps is asked of a compiled one.

A law gives pairs that have to be equal up to rounding. Where eager cannot run it (a jvp that is derived), it is asked
of the compiled one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusegrad.ir.errors import FusegradError
from fusegrad.runtime.check.compare import Difference
from fusegrad.runtime.check.modes import batch, gradients, leaves, of_moving, primals, ramp, visible
from fusegrad.runtime.check.reference_transforms import vmap as stack
from fusegrad.runtime.check.subject import Case, Subject, flat_outputs
from fusegrad.runtime.check.variations import copies_of
from fusegrad.tracer.methods import as_tuple

Tensor = torch.Tensor
Pair = tuple[str, Any, Any]
UNITS = 256  # of the coarsest float in between, of the largest number
TWICE, THRICE = 2.0, -3.0


def _back(f: Any, xs: Sequence[Tensor], gs: Sequence[Any]) -> list[Any]:
    xs = leaves(xs)
    return gradients(as_tuple(f(*xs)), xs, gs)


def linear(f: Any, xs: Sequence[Tensor], gs: Sequence[Any]) -> Iterator[Pair]:
    """backward(a g + b h) = a backward(g) + b backward(h)."""
    hs = [None if g is None else ramp(g) for g in gs]
    both = [None if g is None else TWICE * g + THRICE * h for g, h in zip(gs, hs, strict=True)]
    first, second = _back(f, xs, gs), _back(f, xs, hs)
    for i, (whole, a, b) in enumerate(zip(_back(f, xs, both), first, second, strict=True)):
        if whole is not None:
            yield f"gradient {i}", whole, TWICE * _zero(a, whole) + THRICE * _zero(b, whole)


def _zero(a: Any, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if a is None else a


def permuted(f: Any, xs: Sequence[Tensor], gs: Sequence[Any]) -> Iterator[Pair]:
    """f of rows in another order is f's rows in that order, where f treats every row alike."""
    length = max((x.shape[0] for x in xs if x.dim()), default=0)
    turned = [_turned(x, length) for x in leaves(xs)]
    outputs = as_tuple(f(*leaves(xs)))
    for i, (a, b) in enumerate(zip(as_tuple(f(*turned)), outputs, strict=True)):
        if isinstance(a, Tensor):
            yield f"output {i}", a, _turned(b, length)
    hs = [g if g is None else _turned(g, length) for g in gs]
    for i, (a, b) in enumerate(zip(_back(f, turned, hs), _back(f, xs, gs), strict=True)):
        if a is not None and b is not None:
            yield f"gradient {i}", a, _turned(b, length)


def _turned(x: Tensor, length: int) -> Tensor:
    rows = bool(x.dim()) and x.shape[0] == length
    return x.detach().roll(1, 0).requires_grad_(x.requires_grad) if rows else x


def cloned(f: Any, xs: Sequence[Tensor], gs: Sequence[Any]) -> Iterator[Pair]:
    """Copies before and behind change nothing."""

    def between(*given: Tensor) -> tuple[Any, ...]:
        found = as_tuple(f(*[x.clone() for x in given]))
        return tuple(o.clone() if isinstance(o, Tensor) else o for o in found)

    for i, (a, b) in enumerate(zip(between(*leaves(xs)), as_tuple(f(*leaves(xs))), strict=True)):
        if isinstance(a, Tensor):
            yield f"output {i}", a, b
    for i, (a, b) in enumerate(zip(_back(between, xs, gs), _back(f, xs, gs), strict=True)):
        if a is not None and b is not None:
            yield f"gradient {i}", a, b


def vmapped(f: Any, xs: Sequence[Tensor], gs: Sequence[Any]) -> Iterator[Pair]:
    """vmap is a stack of single calls, dtypes apart: in torch a lane's number counts as a tensor in promotion."""
    lanes, dims = batch([x.detach() for x in xs], [0] * len(xs))
    mapped = torch.func.vmap(visible(f), in_dims=dims)(*lanes)
    for i, (a, b) in enumerate(zip(mapped, stack(visible(f), dims)(*lanes), strict=True)):
        yield f"output {i}", a.to(b.dtype) if a.is_floating_point() and b.is_floating_point() else a, b


def inner(f: Any, xs: Sequence[Tensor], gs: Sequence[Any]) -> Iterator[Pair]:
    """<jvp(t), g> = <t, vjp(g)>."""
    given, weights = primals(xs), tuple(g for g in gs if g is not None)
    moving = of_moving(f, xs, gs)
    tangents = tuple(map(ramp, given))
    _, pushed = torch.func.jvp(moving, given, tuple(t.clone() for t in tangents))  # what is written has it written too
    _, pull = torch.func.vjp(moving, *given)
    pairs = list(zip(pushed, weights, strict=True)), list(zip(pull(weights), tangents, strict=True))
    left, right = (sum((_dot(a, b) for a, b in found), torch.zeros((), dtype=torch.float64)) for found in pairs)
    scale = sum((_dot(a.abs(), b.abs()) for found in pairs for a, b in found), torch.zeros((), dtype=torch.float64))
    yield "product", torch.stack([left, scale]), torch.stack([right, scale])


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a.detach().double() * b.detach().double()).sum()


@dataclass(frozen=True)
class Law:
    """weight: how often it is drawn; vmap and jvp cost a capture."""

    pairs: Callable[..., Iterator[Pair]]
    weight: int


LAWS = {
    "law: backward is linear": Law(linear, 4),
    "law: permuted rows": Law(permuted, 3),
    "law: inserted clones": Law(cloned, 4),
    "law: vmap is a stack": Law(vmapped, 1),
    "law: jvp and vjp": Law(inner, 1),
}


def broken(subject: Subject, case: Case, eps: float) -> tuple[str, Difference | None]:
    """(what became of it, the difference where eager keeps the law and the compiled one does not)."""
    law = LAWS[case.mode]
    gs = subject.gradients(case.xs, case.weights)
    if not any(g is not None for g in gs):
        return "not applicable", None
    eager, theirs = _kept(subject, subject.eager, law, case, gs, eps)
    if theirs is not None:
        return "eager does not keep it", None
    ours, difference = _kept(subject, subject.fast, law, case, gs, eps)
    if ours is None:
        return ("ok" if eager is None else "derived") if difference is None else "DIFFERS", difference
    if isinstance(ours, FusegradError) or eager is not None:
        return "refused", None
    told = f"raises {type(ours).__name__}: {str(ours).splitlines()[0] if str(ours) else ''}"
    return "DIFFERS", Difference(case.mode, f"{told}, eager does not")


def _kept(
    subject: Subject, apply: Any, law: Law, case: Case, gs: Sequence[Any], eps: float
) -> tuple[Exception | None, Difference | None]:
    """(the error that it raised, the first pair that differs)."""
    torch.manual_seed(subject.seed)
    f = _seeded(flat_outputs(subject.on_tensors(apply)), subject.seed)
    try:
        pairs = law.pairs(f, copies_of(case.xs), gs)
        return None, next((d for pair in pairs if (d := _apart(*pair, eps)) is not None), None)
    except Exception as error:
        return error, None


def _seeded(f: Any, seed: int) -> Any:
    """The same random numbers at each call."""

    def call(*xs: Tensor) -> Any:
        torch.manual_seed(seed)
        return f(*xs)

    return call


def _apart(name: str, a: Tensor, b: Tensor, eps: float) -> Difference | None:
    if a.shape != b.shape or a.dtype != b.dtype:
        return Difference(name, f"is {a.dtype} {list(a.shape)} on one side and {b.dtype} {list(b.shape)} on the other")
    wide, other = a.detach().double(), b.detach().double()
    unlike = (wide - other).abs() > UNITS * eps * other.abs().nan_to_num(0, 0, 0).max() if wide.numel() else None
    wrong = None if unlike is None else (unlike & (wide != other)) | (wide.isnan() != other.isnan())
    if wrong is None or not bool(wrong.any()):
        return None
    at = tuple(int(i) for i in wrong.nonzero()[0])
    return Difference(name, "the two sides differ", at, wide[at].item(), other[at].item())


__all__ = ["LAWS", "broken"]
