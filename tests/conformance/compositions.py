"""Ways to differentiate and batch a function, each beside what it has to give: a loop of plain autograd over samples.

The loop uses no torch.func: reverse mode with `torch.autograd.grad`, forward mode with dual numbers, one sample and one
direction at a time. It is what the author's own rules say, so a custom (even a wrong) gradient is expected as written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

Tensor = torch.Tensor
Fn = Callable[..., tuple[Any, ...]]
BATCH = 3


@dataclass(frozen=True)
class Batch:
    """Samples of a function's tensor arguments; `moving`: the positions of those to differentiate."""

    samples: list[list[Tensor]]
    moving: tuple[int, ...]

    def stacked(self, dims: Sequence[int | None]) -> list[Tensor]:
        """The first samples along new axes; None: the first sample's alone."""
        first = self.samples[0]
        return [first[i] if d is None else torch.stack([s[i] for s in self.samples], d) for i, d in enumerate(dims)]

    def lanes(self, dims: Sequence[int | None]) -> list[list[Tensor]]:
        first = self.samples[0]
        return [[(s if d is not None else first)[i] for i, d in enumerate(dims)] for s in self.samples]

    def dims(self, pattern: Sequence[int | None]) -> list[int | None]:
        return [pattern[i % len(pattern)] for i in range(len(self.samples[0]))]


# ------------------------------------------------------------------ what is differentiated
def floats(outputs: Any) -> tuple[Tensor, ...]:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return tuple(o for o in outputs if isinstance(o, Tensor) and o.is_floating_point())


def loss(f: Fn) -> Callable[..., Tensor]:
    return lambda *xs: sum(o.sin().sum() for o in floats(f(*xs)))  # type: ignore[return-value]


def of_moving(f: Fn, xs: Sequence[Tensor], moving: Sequence[int]) -> Fn:
    """The float outputs of `f` as a function of its moving arguments alone."""

    def partial(*given: Tensor) -> tuple[Tensor, ...]:
        full = list(xs)
        for i, x in zip(moving, given, strict=True):
            full[i] = x
        return floats(f(*full))

    return partial


def direction(x: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).reshape(x.shape)


# ------------------------------------------------------------------ plain autograd
def leaves(xs: Sequence[Tensor], moving: Sequence[int]) -> list[Tensor]:
    return [x.detach().clone().requires_grad_(i in moving) for i, x in enumerate(xs)]


def or_zeros(found: Sequence[Any], like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(torch.zeros_like(x) if g is None else g for g, x in zip(found, like, strict=True))


def first_order(f: Fn, moving: Sequence[int], xs: Sequence[Tensor], create_graph: bool = False) -> Any:
    inputs = leaves(xs, moving)
    wanted = [inputs[i] for i in moving]
    found = torch.autograd.grad(loss(f)(*inputs), wanted, create_graph=create_graph, allow_unused=True)
    return or_zeros(found, wanted), wanted


def second_order(f: Fn, moving: Sequence[int], xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    gradients, wanted = first_order(f, moving, xs, create_graph=True)
    found = torch.autograd.grad(sum(g.sin().sum() for g in gradients), wanted, allow_unused=True)
    return or_zeros(found, wanted)


def pulled(f: Fn, moving: Sequence[int], xs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
    inputs = leaves(xs, moving)
    wanted = [inputs[i] for i in moving]
    found = torch.autograd.grad(floats(f(*inputs)), wanted, list(cotangents), allow_unused=True)
    return or_zeros(found, wanted)


def tangents_of(f: Fn, moving: Sequence[int], xs: Sequence[Tensor], steps: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Forward mode by dual numbers."""
    supply = iter(steps)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, next(supply)) if i in moving else x for i, x in enumerate(xs)]
        parts = [forward_ad.unpack_dual(o) for o in floats(f(*duals))]
        return tuple(torch.zeros_like(p.primal) if p.tangent is None else p.tangent.clone() for p in parts)


def units(x: Tensor) -> list[Tensor]:
    return [u.reshape(x.shape) for u in torch.eye(x.numel(), dtype=x.dtype)]


def rows(f: Fn, moving: Sequence[int], xs: Sequence[Tensor]) -> tuple[Any, ...]:
    """The Jacobian of every output by every moving argument, one cotangent at a time."""
    outputs = floats(f(*xs))
    found = []
    for o, output in enumerate(outputs):
        zeros = [torch.zeros_like(p) for p in outputs]
        lines = [pulled(f, moving, xs, [*zeros[:o], unit, *zeros[o + 1 :]]) for unit in units(output)]
        parts = zip(*lines, strict=True)
        found.append(tuple(torch.stack(p).reshape(*output.shape, *p[0].shape) for p in parts))
    return tuple(found)


def columns(f: Fn, moving: Sequence[int], xs: Sequence[Tensor]) -> tuple[Any, ...]:
    """The same, one tangent at a time."""
    parts = [along(lambda *t: tangents_of(f, moving, xs, t), [xs[i] for i in moving], j) for j in range(len(moving))]
    return tuple(zip(*parts, strict=True))


def along(push: Callable[..., tuple[Tensor, ...]], primals: Sequence[Tensor], j: int) -> tuple[Tensor, ...]:
    """Columns of every result for the unit tangents of primal `j`, as trailing axes."""
    zeros = [torch.zeros_like(p) for p in primals]
    pushed = [push(*zeros[:j], unit, *zeros[j + 1 :]) for unit in units(primals[j])]
    return tuple(torch.stack(c, -1).reshape(*c[0].shape, *primals[j].shape) for c in zip(*pushed, strict=True))


def curvature(f: Fn, moving: Sequence[int], xs: Sequence[Tensor]) -> tuple[Any, ...]:
    """The Hessian of the loss: dual numbers through a recorded backward."""

    def push(*steps: Tensor) -> tuple[Tensor, ...]:
        supply = iter(steps)
        with forward_ad.dual_level():
            given = enumerate(leaves(xs, moving))
            inputs = [forward_ad.make_dual(x, next(supply)) if i in moving else x for i, x in given]
            wanted = [inputs[i] for i in moving]
            found = torch.autograd.grad(loss(f)(*inputs), wanted, create_graph=True, allow_unused=True)
            gradients = [forward_ad.unpack_dual(g) for g in or_zeros(found, wanted)]
            return tuple(torch.zeros_like(g.primal) if g.tangent is None else g.tangent.detach() for g in gradients)

    parts = [along(push, [xs[i] for i in moving], j) for j in range(len(moving))]
    return tuple(zip(*parts, strict=True))


def stack(results: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(torch.stack(r) if isinstance(r[0], Tensor) else r[0] for r in zip(*results, strict=True))


# ------------------------------------------------------------------ the table
@dataclass(frozen=True)
class Composition:
    """arguments(batch) -> what `run(f, moving, dims)(*arguments)` is called with; `expected(f, batch, dims)` by loops.

    pattern: in_dims of the tensor arguments, in turn. outside: autograd is called from outside, on the results of `f`.
    """

    run: Callable[[Fn, tuple[int, ...], list[Any]], Callable[..., Any]]
    expected: Callable[[Fn, Batch, list[Any]], Any]
    pattern: tuple[int | None, ...] = (None,)
    outside: bool = False
    nested: bool = False

    def arguments(self, batch: Batch) -> list[Tensor]:
        if self.nested:
            return [torch.stack([x, x.flip(0)], 1) for x in batch.stacked(batch.dims((0,)))]
        return batch.stacked(batch.dims(self.pattern))


def single(reference: Callable[..., Any]) -> Callable[[Fn, Batch, list[Any]], Any]:
    return lambda f, batch, dims: reference(f, batch.moving, batch.samples[0])


def each(reference: Callable[..., Any]) -> Callable[[Fn, Batch, list[Any]], Any]:
    return lambda f, batch, dims: stack([reference(f, batch.moving, lane) for lane in batch.lanes(dims)])


def plain(f: Fn, moving: Sequence[int], xs: Sequence[Tensor]) -> tuple[Any, ...]:
    return f(*xs)


def twice(f: Fn, batch: Batch, dims: list[Any]) -> tuple[Any, ...]:
    lanes = batch.lanes(dims)
    return stack([stack([f(*a), f(*b)]) for a, b in zip(lanes, reversed(lanes), strict=True)])


def by_arguments(f: Fn, moving: tuple[int, ...], transform: Callable[..., Any]) -> Callable[..., Any]:
    def run(*xs: Tensor) -> Any:
        given = [xs[i] for i in moving]
        return transform(of_moving(f, xs, moving), given)

    return run


COMPOSITIONS: dict[str, Composition] = {
    "forward": Composition(lambda f, m, d: f, single(plain), outside=True),
    "backward": Composition(
        lambda f, m, d: lambda *xs: first_order(f, m, xs)[0], single(lambda f, m, xs: first_order(f, m, xs)[0]),
        outside=True,
    ),
    "double backward": Composition(
        lambda f, m, d: lambda *xs: second_order(f, m, xs), single(second_order), outside=True
    ),
    "func.grad": Composition(
        lambda f, m, d: grad(loss(f), argnums=m), single(lambda f, m, xs: first_order(f, m, xs)[0])
    ),
    "vjp": Composition(
        lambda f, m, d: by_arguments(f, m, lambda g, given: pull(*vjp(g, *given))),
        single(lambda f, m, xs: pulled(f, m, xs, [direction(o) for o in floats(f(*xs))])),
    ),
    "jvp": Composition(
        lambda f, m, d: by_arguments(f, m, lambda g, given: jvp(g, tuple(given), tuple(map(direction, given)))[1]),
        single(lambda f, m, xs: tangents_of(f, m, xs, [direction(xs[i]) for i in m])),
    ),
    "jacrev": Composition(
        lambda f, m, d: by_arguments(f, m, lambda g, given: jacrev(g, tuple(range(len(given))))(*given)), single(rows)
    ),
    "jacfwd": Composition(
        lambda f, m, d: by_arguments(f, m, lambda g, given: jacfwd(g, tuple(range(len(given))))(*given)),
        single(columns),
    ),
    "hessian": Composition(lambda f, m, d: hessian(loss(f), argnums=m), single(curvature)),
    "vmap 0": Composition(lambda f, m, d: vmap(f, tuple(d)), each(plain), (0,)),
    "vmap 1": Composition(lambda f, m, d: vmap(f, tuple(d)), each(plain), (1,)),
    "vmap mixed": Composition(lambda f, m, d: vmap(f, tuple(d)), each(plain), (0, None, 1)),
    "vmap vmap": Composition(lambda f, m, d: vmap(vmap(f)), twice, (0,), nested=True),
    "vmap grad": Composition(
        lambda f, m, d: vmap(grad(loss(f), argnums=m)), each(lambda f, m, xs: first_order(f, m, xs)[0]), (0,)
    ),
    "grad vmap": Composition(
        lambda f, m, d: grad(loss(vmap(f)), argnums=m), each(lambda f, m, xs: first_order(f, m, xs)[0]), (0,)
    ),
}  # fmt: skip


def pull(outputs: tuple[Tensor, ...], back: Callable[..., Any]) -> Any:
    return back(tuple(map(direction, outputs)))
