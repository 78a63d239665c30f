"""torch.func's transforms from plain autograd and loops: what they mean, for Functions that eager has no rule for.

grad and vjp are the user's backward; <jvp(t), e> = <t, backward(e)> for every e; vmap is a stack of single calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...tracer.methods import as_tuple
from .modes import dual_numbers

Tensor = torch.Tensor
F = Callable[..., Any]
STEP = 1e-5  # of central differences in float64: errors of about 1e-10
STEADY = 1e-3  # two one-sided differences of what is smooth differ by far less
WIDER = {
    torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}  # fmt: skip


class UnsteadyError(ArithmeticError):
    """Differences that depend on the side from which they are taken: a kink, a jump, or rounding inside."""


class InFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Casts to a narrower float go to float64: a small step would vanish in the rounding of `x.float()`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.view.dtype:  # bits, not numbers
            return func(*args, **(kwargs or {}))
        return func(*map(_wider, args), **{name: _wider(value) for name, value in (kwargs or {}).items()})


def _wider(value: Any) -> Any:
    return WIDER.get(value, value) if isinstance(value, torch.dtype) else value


def track(xs: Sequence[Tensor], at: Sequence[int]) -> list[Tensor]:
    return [x.detach().requires_grad_() if i in at else x for i, x in enumerate(xs)]


def back(outputs: Sequence[Tensor], weights: Sequence[Tensor], xs: Sequence[Tensor], again: bool = False) -> list[Any]:
    """The gradients of xs, zeros where there is none."""
    pairs = [(o, w) for o, w in zip(outputs, weights, strict=True) if o.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in xs]
    ends, cotangents = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(ends, xs, cotangents, allow_unused=True, retain_graph=True, create_graph=again)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, xs, strict=True)]


def basis(like: Tensor) -> list[Tensor]:
    """The unit tensors of a shape."""
    return list(torch.eye(like.numel(), dtype=like.dtype).reshape(-1, *like.shape))


def rows(output: Tensor, xs: Sequence[Tensor]) -> list[Tensor]:
    """The jacobian of one output: backward of each unit gradient."""
    gradients = [back([output], [e], xs) for e in basis(output)]
    return [_stack([r[i] for r in gradients], (*output.shape, *x.shape), x) for i, x in enumerate(xs)]


def _stack(parts: Sequence[Tensor], shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.stack(list(parts)).reshape(tuple(shape)) if parts else like.new_zeros(tuple(shape))


def grad(fn: F, argnums: Sequence[int]) -> F:
    def gradient(*xs: Tensor) -> Any:
        xs = tuple(track(xs, argnums))
        return tuple(back([fn(*xs)], [torch.ones(())], [xs[i] for i in argnums]))

    return gradient


def vjp(fn: F, *xs: Tensor) -> Any:
    inputs = track(xs, range(len(xs)))
    outputs = fn(*inputs)
    return outputs, lambda weights: tuple(back(outputs, weights, inputs))


def jvp(fn: F, xs: Sequence[Tensor], ts: Sequence[Tensor]) -> Any:
    """The user's own jvp by dual numbers, or else the transpose of their backward."""
    try:
        return dual_numbers(fn, xs, ts)
    except (RuntimeError, NotImplementedError):
        inputs = track(xs, range(len(xs)))
        outputs = fn(*inputs)
        return outputs, tuple(_contract(rows(o, inputs), ts, o) for o in outputs)


def _contract(jacobian: Sequence[Tensor], ts: Sequence[Tensor], output: Tensor) -> Tensor:
    """A tangent: it has the dtype of its output."""
    pairs = zip(jacobian, ts, strict=True)
    return sum((torch.tensordot(j, t, t.dim()) for j, t in pairs), torch.zeros_like(output)).to(output.dtype)


def jacrev(fn: F, argnums: Sequence[int]) -> F:
    def jacobian(*xs: Tensor) -> Any:
        xs = tuple(track(xs, argnums))
        return tuple(tuple(rows(o, [xs[i] for i in argnums])) for o in fn(*xs))

    return jacobian


def jacfwd(fn: F, argnums: Sequence[int]) -> F:
    """Column by column with the user's own jvp, else from their backward."""

    def jacobian(*xs: Tensor) -> Any:
        try:
            return _by_columns(fn, xs, argnums)
        except (RuntimeError, NotImplementedError):
            inputs = track(xs, argnums)
            return tuple(tuple(row.to(o.dtype) for row in rows(o, [inputs[i] for i in argnums])) for o in fn(*inputs))

    return jacobian


def _by_columns(fn: F, xs: Sequence[Tensor], argnums: Sequence[int]) -> Any:
    outputs = fn(*xs)
    columns = [[_push_forward(fn, xs, i, e) for e in basis(xs[i])] for i in argnums]
    return _from_columns(columns, outputs, [xs[i] for i in argnums])


def _from_columns(columns: Sequence[Any], outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
    """columns[input][unit][output] -> the jacobian of each output by each input."""
    return tuple(
        tuple(
            torch.stack([c[k] for c in column], -1).reshape((*o.shape, *x.shape))
            for x, column in zip(inputs, columns, strict=True)
        )
        for k, o in enumerate(outputs)
    )


def _push_forward(fn: F, xs: Sequence[Tensor], at: int, tangent: Tensor) -> Any:
    return dual_numbers(fn, xs, [tangent if i == at else torch.zeros_like(x) for i, x in enumerate(xs)])[1]


def hessian(fn: F, argnums: Sequence[int]) -> F:
    """The derivative of backward, by double backward. As torch's, by forward mode, it has the dtype of the gradient."""

    def second(*xs: Tensor) -> Any:
        xs = tuple(track(xs, argnums))
        inputs = [xs[i] for i in argnums]
        first = back([fn(*xs)], [torch.ones(())], inputs, again=True)
        return tuple(tuple(row.to(g.dtype) for row in rows(g, inputs)) for g in first)

    return second


def hessian_by_differences(fn: F, argnums: Sequence[int]) -> F:
    """The derivative of backward as a function of the arguments, in float64. Raises UnsteadyError where it has none."""

    def second(*xs: Tensor) -> Any:
        dtypes = [xs[i].dtype for i in argnums]
        with InFloat64():
            xs = tuple(x.to(WIDER.get(x.dtype, x.dtype)) for x in xs)
            columns = [[_difference(grad(fn, argnums), xs, i, e) for e in basis(xs[i])] for i in argnums]
        inputs = [xs[i] for i in argnums]
        rows = _from_columns(columns, inputs, inputs)
        return tuple(tuple(entry.to(dtype) for entry in row) for row, dtype in zip(rows, dtypes, strict=True))

    return second


def _difference(fn: F, xs: Sequence[Tensor], at: int, unit: Tensor) -> list[Tensor]:
    behind, here, ahead = (fn(*[x + s * STEP * unit if i == at else x for i, x in enumerate(xs)]) for s in (-1, 0, 1))
    return [central_difference(*values) for values in zip(behind, here, ahead, strict=True)]


def central_difference(behind: Tensor, here: Tensor, ahead: Tensor, step: float = STEP) -> Tensor:
    """Of three values, a step apart. Raises UnsteadyError where the two sides disagree."""
    central = (ahead - behind) / (2 * step)
    sides = (ahead - 2 * here + behind).abs() / step
    if bool((sides > STEADY * (1 + central.abs())).any()):
        raise UnsteadyError("the two sides of a difference disagree: a kink, a jump, or rounding inside")
    return central


def vmap(fn: F, in_dims: Any, out_dims: int = 0) -> F:
    def stacked(*xs: Tensor) -> Any:
        dims = (in_dims,) * len(xs) if isinstance(in_dims, int) else in_dims
        count = next(x.shape[d] for x, d in zip(xs, dims, strict=True) if d is not None)
        pairs = list(zip(xs, dims, strict=True))
        lanes = [as_tuple(fn(*[x if d is None else x.select(d, i) for x, d in pairs])) for i in range(count)]
        return tuple(torch.stack(parts) for parts in zip(*lanes, strict=True))

    return stacked


class Mathematics:
    """The toolkit in place of torch's."""

    dual = staticmethod(jvp)
    grad = staticmethod(grad)
    vjp = staticmethod(vjp)
    jvp = staticmethod(jvp)
    jacrev = staticmethod(jacrev)
    jacfwd = staticmethod(jacfwd)
    hessian = staticmethod(hessian)
    vmap = staticmethod(vmap)


class Differences(Mathematics):
    """The same, with second derivatives as differences of backward: where eager's double backward is only a part."""

    hessian = staticmethod(hessian_by_differences)
