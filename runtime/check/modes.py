"""The modes of `fusegrad.check`: each gives named results of `f` on tensors.

A mode is written once, over a toolkit of transforms: torch.func, or plain autograd (`reference_transforms.py`).
Nothing here needs more than torch: a reproducer consists of the source of what it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree
import torch.utils.checkpoint
from torch.autograd import forward_ad

from ...tracer.methods import as_tuple

Tensor = torch.Tensor
Named = dict[str, Any]
F = Callable[..., Any]  # all tensor arguments, by position -> what the Function returns
Mode = Callable[[Any, F, Sequence[Tensor], Sequence[Any]], Named]
BATCH = 3


# ------------------------------------------------------------------ arguments and results
def leaves(xs: Sequence[Tensor]) -> list[Tensor]:
    """The tensors without history; the same tensor twice stays the same."""
    fresh = {id(x): x.detach().requires_grad_(x.requires_grad) for x in xs}
    return [fresh[id(x)] for x in xs]


def distinct(xs: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that require a gradient, each once."""
    return list({id(x): x for x in xs if x.requires_grad}.values())


def moving(xs: Sequence[Tensor]) -> tuple[int, ...]:
    """The positions of the arguments that are differentiated."""
    return tuple(i for i, x in enumerate(xs) if x.requires_grad)


def ramp(x: Tensor) -> Tensor:
    """Numbers of both signs in the shape of x: tangents and weights that are the same everywhere, with no sum of 0."""
    numbers = torch.linspace(-0.6, 1, max(x.numel(), 2), dtype=torch.float64)[: x.numel()].reshape(x.shape)
    return torch.complex(numbers, 1 - numbers).to(x.dtype) if x.is_complex() else numbers.to(x.dtype)


def named_leaves(stem: str, values: Any) -> Named:
    """The tensors in a nested result, numbered."""
    return {f"{stem} {i}": v for i, v in enumerate(torch.utils._pytree.tree_leaves(values))}


def weighted_sum(outputs: Any, gs: Sequence[Any]) -> Any:
    """The outputs times their weights, all summed up to one real number."""
    terms = [(o * g).sum() for o, g in zip(as_tuple(outputs), gs, strict=True) if g is not None]
    total = sum(terms[1:], terms[0])
    return total.real if total.is_complex() else total


def scalar(f: F, gs: Sequence[Any]) -> F:
    """`f` with its outputs weighted and summed."""
    return lambda *xs: weighted_sum(f(*xs), gs)


def of_moving(f: F, xs: Sequence[Tensor], gs: Sequence[Any]) -> F:
    """`f` as a function of the differentiated arguments alone, with its differentiable outputs alone."""
    at = moving(xs)

    def inner(*differentiated: Tensor) -> tuple[Tensor, ...]:
        full = list(xs)
        for i, x in zip(at, differentiated, strict=True):
            full[i] = x
        return tuple(o for o, g in zip(as_tuple(f(*full)), gs, strict=True) if g is not None)

    return inner


def primals(xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(xs[i].detach() for i in moving(xs))


def plain(xs: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach() for x in xs]


def visible(f: F) -> F:
    """`f` with its tensor outputs alone."""
    return lambda *xs: tuple(o for o in as_tuple(f(*xs)) if isinstance(o, Tensor))


# ------------------------------------------------------------------ plain autograd
def relation(output: Any, other: Tensor) -> str:
    """The way two tensors share memory: not at all, as one object, or as views."""
    if output is other:
        return "the same object"
    a, b = output.untyped_storage(), other.untyped_storage()
    if not a.nbytes() or a.data_ptr() != b.data_ptr():
        return "apart"
    return f"shares memory{', a view' if output._is_view() else ''}"


def observations(outputs: Sequence[Any], xs: Sequence[Tensor]) -> Named:
    """Outputs, what they share memory with, and what became of the arguments."""
    facts: Named = {f"output {i}": o for i, o in enumerate(outputs)}
    tensors = [(f"argument {i}", x) for i, x in enumerate(xs)]
    for i, output in enumerate(outputs):
        if isinstance(output, Tensor):
            shared = {name: how for name, other in tensors if (how := relation(output, other)) != "apart"}
            facts[f"memory of output {i}"] = shared
            tensors.append((f"output {i}", output))
    for i, x in enumerate(xs):
        returned = any(o is x for o in outputs)  # marked dirty: how often it was written to is the method's own affair
        facts[f"version of argument {i}"] = x._version > 0 if returned else x._version
        facts[f"argument {i} after the call"] = x.detach()
    return facts


def gradients(
    outputs: Sequence[Any], xs: Sequence[Tensor], gs: Sequence[Any], again: bool = False, keep: bool = False
) -> list[Any]:
    """The gradient of each distinct argument, None where there is none."""
    pairs = [(o, g) for o, g in zip(outputs, gs, strict=True) if g is not None and o.requires_grad]
    inputs = distinct(xs)
    if not pairs or not inputs:
        return [None] * len(inputs)
    ends, weights = zip(*pairs, strict=True)
    results = torch.autograd.grad(
        ends, inputs, weights, allow_unused=True, create_graph=again, retain_graph=again or keep
    )
    return list(results)


def forward(T: Any, f: F, xs: Sequence[Tensor], gs: Sequence[Any]) -> Named:
    xs = plain(leaves(xs))
    with torch.no_grad():
        return observations(as_tuple(f(*xs)), xs)


def backward(T: Any, f: F, xs: Sequence[Tensor], gs: Sequence[Any]) -> Named:
    xs = leaves(xs)
    outputs = as_tuple(f(*xs))
    return observations(outputs, xs) | named_leaves("gradient", gradients(outputs, xs, gs))


def double_backward(T: Any, f: F, xs: Sequence[Tensor], gs: Sequence[Any]) -> Named:
    xs = leaves(xs)
    gs = [None if g is None else g.detach().requires_grad_() for g in gs]
    first = gradients(as_tuple(f(*xs)), xs, gs, again=True)
    inputs = [*xs, *(g for g in gs if g is not None)]
    second = gradients(first, inputs, [None if g is None else ramp(g) for g in first])
    return named_leaves("gradient", first) | named_leaves("second", second)


def second_call(T: Any, f: F, xs: Sequence[Tensor], gs: Sequence[Any]) -> Named:
    """Two calls with different numbers: nothing of one may be left in the other."""
    first = backward(T, f, [shift(x, 1).requires_grad_(x.requires_grad) for x in xs], gs)
    return {f"first call, {name}": value for name, value in first.items()} | backward(T, f, xs, gs)


def backward_twice(T: Any, f: F, xs: Sequence[Tensor], gs: Sequence[Any]) -> Named:
    """One forward, two backwards with different gradients."""
    xs = leaves(xs)
    outputs = as_tuple(f(*xs))
    first = gradients(outputs, xs, gs, keep=True)
    second = gradients(outputs, xs, [None if g is None else -2 * g for g in gs])
    return named_leaves("first gradient", first) | named_leaves("gradient", second)


def checkpoint(T: Any, f: F, xs: Sequence[Tensor], gs: Sequence[Any]) -> Named:
    xs = leaves(xs)
    outputs = as_tuple(torch.utils.checkpoint.checkpoint(f, *xs, use_reentrant=False))
    return named_leaves("gradient", gradients(outputs, xs, gs))


def saved_tensors_hooks(T: Any, f: F, xs: Sequence[Tensor], gs: Sequence[Any]) -> Named:
    """Saved tensors go through the hooks, each once, and backward uses what these return."""
    packed: list[Tensor] = []

    def pack(t: Tensor) -> int:
        packed.append(t.detach().clone())
        return len(packed) - 1

    xs = leaves(xs)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: packed[i]):
        outputs = as_tuple(f(*xs))
    return {"number of saved tensors": len(packed)} | named_leaves("gradient", gradients(outputs, xs, gs))


# ------------------------------------------------------------------ torch.func
def dual_numbers(fn: F, xs: Sequence[Tensor], ts: Sequence[Tensor]) -> Any:
    """(outputs, tangents) of forward-mode dual numbers; no tangent is zeros."""
    make_dual: Any = forward_ad.make_dual
    unpack_dual: Any = forward_ad.unpack_dual
    with forward_ad.dual_level():
        outputs = fn(*[make_dual(x, t) for x, t in zip(xs, ts, strict=True)])
        pairs = [unpack_dual(o) for o in outputs]
        tangents = [torch.zeros_like(p.primal) if p.tangent is None else p.tangent for p in pairs]
        return tuple(p.primal for p in pairs), tuple(tangents)


class Transforms:
    """torch's own transforms."""

    grad = staticmethod(torch.func.grad)
    vjp = staticmethod(torch.func.vjp)
    jvp = staticmethod(torch.func.jvp)
    jacrev = staticmethod(torch.func.jacrev)
    jacfwd = staticmethod(torch.func.jacfwd)
    hessian = staticmethod(torch.func.hessian)
    vmap = staticmethod(torch.func.vmap)
    dual = staticmethod(dual_numbers)


def func_grad(T: Any, f: F, xs: Sequence[Tensor], gs: Sequence[Any]) -> Named:
    return named_leaves("gradient", T.grad(scalar(f, gs), argnums=moving(xs))(*plain(xs)))


def func_vjp(T: Any, f: F, xs: Sequence[Tensor], gs: Sequence[Any]) -> Named:
    outputs, pull = T.vjp(of_moving(f, xs, gs), *primals(xs))
    pulled = pull(tuple(g for g in gs if g is not None))
    return named_leaves("output", outputs) | named_leaves("gradient", pulled)


def pushforward(jvp: F, f: F, inputs: tuple[Tensor, ...]) -> Named:
    """Outputs and tangents of `f` along a ramp."""
    outputs, tangents = jvp(f, inputs, tuple(map(ramp, inputs)))
    return named_leaves("output", outputs) | named_leaves("tangent", tangents)


def func_jvp(T: Any, f: F, xs: Sequence[Tensor], gs: Sequence[Any]) -> Named:
    return pushforward(T.jvp, of_moving(f, xs, gs), primals(xs))


def dual(T: Any, f: F, xs: Sequence[Tensor], gs: Sequence[Any]) -> Named:
    return pushforward(T.dual, of_moving(f, xs, gs), primals(xs))


def jacobian(transform: F, f: F, xs: Sequence[Tensor], gs: Sequence[Any]) -> Named:
    argnums = tuple(range(len(moving(xs))))
    return named_leaves("jacobian", transform(of_moving(f, xs, gs), argnums=argnums)(*primals(xs)))


def func_jacrev(T: Any, f: F, xs: Sequence[Tensor], gs: Sequence[Any]) -> Named:
    return jacobian(T.jacrev, f, xs, gs)


def func_jacfwd(T: Any, f: F, xs: Sequence[Tensor], gs: Sequence[Any]) -> Named:
    return jacobian(T.jacfwd, f, xs, gs)


def func_hessian(T: Any, f: F, xs: Sequence[Tensor], gs: Sequence[Any]) -> Named:
    return named_leaves("hessian", T.hessian(scalar(f, gs), argnums=moving(xs))(*plain(xs)))


# ------------------------------------------------------------------ vmap
def shift(x: Tensor, by: int) -> Tensor:
    """The numbers of x in other places (a number alone: a little smaller), so that their range stays the same."""
    if x.dim() == 0:
        return x.detach() * (1 - by / 8) if x.is_floating_point() or x.is_complex() else x.detach()
    return x.detach().reshape(-1).roll(by).reshape(x.shape)


def stack_lanes(x: Tensor, dim: int | None, count: int) -> Tensor:
    """`count` lanes like x along `dim`."""
    return x.detach() if dim is None else torch.stack([shift(x, i) for i in range(count)], min(dim, x.dim()))


def batch(xs: Sequence[Tensor], dims: Sequence[int | None]) -> tuple[Any, Any]:
    """(arguments with a batch axis where `dims` says, in_dims)."""
    at = tuple(None if d is None else min(d, x.dim()) for x, d in zip(xs, dims, strict=True))
    return [stack_lanes(x, d, BATCH) for x, d in zip(xs, at, strict=True)], at


def batch_along(axis: int, xs: Sequence[Tensor]) -> tuple[Any, Any]:
    return batch(xs, [axis] * len(xs))


def vmap_0(T: Any, f: F, xs: Sequence[Tensor], gs: Sequence[Any]) -> Named:
    lanes, at = batch_along(0, xs)
    return named_leaves("output", T.vmap(visible(f), in_dims=at)(*lanes))


def vmap_1(T: Any, f: F, xs: Sequence[Tensor], gs: Sequence[Any]) -> Named:
    lanes, at = batch_along(1, xs)
    return named_leaves("output", T.vmap(visible(f), in_dims=at, out_dims=0)(*lanes))


def vmap_mixed(T: Any, f: F, xs: Sequence[Tensor], gs: Sequence[Any]) -> Named:
    """Every second argument has a batch axis; then the others."""
    outputs: Named = {}
    for first in range(min(len(xs), 2)):
        lanes, at = batch(xs, [0 if i % 2 == first else None for i in range(len(xs))])
        outputs |= named_leaves(f"output ({first})", T.vmap(visible(f), in_dims=at)(*lanes))
    return outputs


def vmap_vmap(T: Any, f: F, xs: Sequence[Tensor], gs: Sequence[Any]) -> Named:
    inner, at = batch_along(0, xs)
    lanes = [torch.stack([b, b.flip(0)], 1) for b in inner]
    return named_leaves("output", T.vmap(T.vmap(visible(f), in_dims=at), in_dims=1)(*lanes))


def vmap_grad(T: Any, f: F, xs: Sequence[Tensor], gs: Sequence[Any]) -> Named:
    lanes, at = batch_along(0, xs)
    return named_leaves("gradient", T.vmap(T.grad(scalar(f, gs), argnums=moving(xs)), in_dims=at)(*lanes))


def grad_vmap(T: Any, f: F, xs: Sequence[Tensor], gs: Sequence[Any]) -> Named:
    lanes, at = batch_along(0, xs)
    differentiable = T.vmap(of_all(f, gs), in_dims=at)
    weights = [g for g in gs if g is not None]
    return named_leaves("gradient", T.grad(scalar(differentiable, weights), argnums=moving(xs))(*lanes))


def of_all(f: F, gs: Sequence[Any]) -> F:
    """`f` with its differentiable outputs alone."""
    return lambda *xs: tuple(o for o, g in zip(as_tuple(f(*xs)), gs, strict=True) if g is not None)


def jvp_vmap(T: Any, f: F, xs: Sequence[Tensor], gs: Sequence[Any]) -> Named:
    lanes, at = batch_along(0, xs)
    mapped = of_moving(T.vmap(of_all(f, gs), in_dims=at), with_grad_of(lanes, xs), [g for g in gs if g is not None])
    return pushforward(T.jvp, mapped, tuple(lanes[i].detach() for i in moving(xs)))


def with_grad_of(lanes: Sequence[Tensor], xs: Sequence[Tensor]) -> list[Tensor]:
    return [lane.requires_grad_(x.requires_grad) for lane, x in zip(lanes, xs, strict=True)]


MODES: dict[str, Mode] = {
    "forward": forward,
    "backward": backward,
    "second call": second_call,
    "backward twice": backward_twice,
    "double backward": double_backward,
    "checkpoint": checkpoint,
    "saved tensors hooks": saved_tensors_hooks,
    "dual numbers": dual,
    "grad": func_grad,
    "vjp": func_vjp,
    "jvp": func_jvp,
    "jacrev": func_jacrev,
    "jacfwd": func_jacfwd,
    "hessian": func_hessian,
    "vmap in_dims=0": vmap_0,
    "vmap in_dims=1": vmap_1,
    "vmap in_dims mixed": vmap_mixed,
    "vmap(vmap)": vmap_vmap,
    "vmap(grad)": vmap_grad,
    "grad(vmap)": grad_vmap,
    "jvp(vmap)": jvp_vmap,
}
DERIVABLE = list(MODES)[list(MODES).index("dual numbers") :]
"""Modes in which eager may have no rule where a compiled class derives one."""
GRADIENT_FREE = {"forward", "vmap in_dims=0", "vmap in_dims=1", "vmap in_dims mixed", "vmap(vmap)"}
"""Modes that ask for no derivative."""
