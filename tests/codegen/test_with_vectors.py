"""Products with a vector, of matrices that a kernel makes or reads anyway, are summed on the way: beside eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.func import jvp, vmap
from torch.nn.functional import gelu

import fusegrad


class Step(Function):
    """One step of linear attention that decays, its state in and out."""

    generate_vmap_rule = True

    @staticmethod
    def forward(s: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Any:
        after = decay[..., None, None] * s + k[..., :, None] * v[..., None, :]
        return torch.einsum("bhk,bhkv->bhv", q, after), after

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx: Any, gy: Tensor, gs: Tensor) -> Any:
        s, q, k, v, decay, after = ctx.saved_tensors
        g = gs + q[..., :, None] * gy[..., None, :]
        gk, gv = torch.einsum("bhkv,bhv->bhk", g, v), torch.einsum("bhkv,bhk->bhv", g, k)
        gq = torch.einsum("bhkv,bhv->bhk", after, gy)
        return decay[..., None, None] * g, gq, gk, gv, (g * s).sum((-1, -2))


class Score(Function):
    """Of each row a number."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return torch.sigmoid(gelu(x) @ w)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        y = gelu(x)
        p = torch.sigmoid(y @ w)
        d = g * p * (1 - p)
        slope = torch.erf(x * 0.5**0.5) * 0.5 + 0.5 + x * torch.exp(-x * x / 2) * 0.3989422804014327
        return d @ w.T * slope, y.T @ d


class Gate(Function):
    """Rows times a number of each; x is read once, and has any layout."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * torch.sigmoid(x @ w)

    setup_context = Score.setup_context

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        s = torch.sigmoid(x @ w)
        ds = (g * x).sum(-1, keepdim=True) * s * (1 - s)
        return g * s + ds * w.T, x.mT @ ds


class Rows(Function):
    """A batch of matrices times one vector: its gradient is a product over rows that einsum has permuted."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    setup_context = Score.setup_context

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g[..., None] * w, torch.einsum("bnd,bn->d", x, g)


Shapes = tuple[tuple[int, ...], ...]
ODD: dict[type[Function], Shapes] = {
    Step: ((2, 3, 17, 19), (2, 3, 17), (2, 3, 17), (2, 3, 19), (2, 3)), Score: ((33, 77), (77, 1)),
    Gate: ((33, 77), (77, 1)), Rows: ((3, 13, 17), (17,)),
}  # fmt: skip
LARGE: dict[type[Function], Shapes] = {
    Step: ((8, 32, 64, 64), (8, 32, 64), (8, 32, 64), (8, 32, 64), (8, 32)), Score: ((8192, 4096), (4096, 1)),
    Gate: ((8192, 4096), (4096, 1)), Rows: ((16, 2048, 256), (256,)),
}  # fmt: skip
LAUNCHES = {Step: (1, 2), Score: (1, 1), Gate: (1, 1), Rows: (1, 2)}
"""Of forward and backward: what reads another matrix, or no more than a product, is a launch of its own."""
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x, "transposed": lambda x: x.mT.contiguous().mT if x.ndim > 1 else x,
    "every other": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    "offset": lambda x: torch.cat([x, x])[x.shape[0] :],
}  # fmt: skip


def given(cls: type[Function], dtype: torch.dtype, batch: tuple[int, ...] = ()) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*batch, *s).to(dtype) for s in ODD[cls]]


def with_gradients(apply: Any, values: list[Tensor]) -> list[Tensor]:
    values = [v.detach().requires_grad_() for v in values]
    out = apply(*values)
    out = out if isinstance(out, tuple) else (out,)
    return [*out, *torch.autograd.grad(out, values, [torch.cos(o.detach()) for o in out])]


def near(found: list[Tensor], eager: list[Tensor], exact: list[Tensor]) -> None:
    for x, y, z in zip(found, eager, exact, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        limit = 2 * float((y.double() - z).abs().max()) + 8 * torch.finfo(y.dtype).eps * float(z.abs().max())
        assert float((x.double() - z).abs().max()) <= limit


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", ODD)
def test_values_and_gradients(cls: Any, dtype: torch.dtype, layout: str) -> None:
    fast, values = fusegrad.compile(cls, backend="interpret"), given(cls, dtype)
    exact = with_gradients(cls.apply, [v.double() for v in values])
    laid = [LAYOUTS[layout](v) for v in values]
    near(with_gradients(fast.apply, laid), with_gradients(cls.apply, laid), exact)


@pytest.mark.parametrize("cls", ODD)
def test_compositions(cls: Any) -> None:
    fast, values = fusegrad.compile(cls, backend="interpret"), given(cls, torch.float32, (2,))
    exact = [v.double() for v in values]
    ways: list[Any] = [
        lambda apply, v: list(jvp(lambda *x: _first(apply(*x)), tuple(x[0] for x in v), tuple(x[1] for x in v))),
        lambda apply, v: [_first(vmap(apply)(*v))],
        lambda apply, v: list(vmap(lambda *x: jvp(lambda *y: _first(apply(*y)), x, x))(*v)),
    ]
    for way in ways:
        plain = way(cls.forward, values)
        near(way(fast.apply, values), plain, way(cls.forward, exact))


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("cls", LARGE)
def test_the_matrix_is_read_once(cls: Any) -> None:
    args = [torch.empty(s, device="meta", dtype=torch.bfloat16, requires_grad=True) for s in LARGE[cls]]
    found = fusegrad.explain(fusegrad.compile(cls), *args, target="cuda:90").directions
    assert tuple(found[d].launch_count for d in ("forward", "backward")) == LAUNCHES[cls]
    assert all(found[d].moved <= 1.03 * found[d].minimal for d in ("forward", "backward"))
