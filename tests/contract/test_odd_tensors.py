"""Tensors and arguments that are not the usual ones: none at all, sparse gradients, `.data`, data that nobody has."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.autograd import Function

import fusegrad

Tensor = torch.Tensor
both = pytest.mark.parametrize("backend", ["reference", "interpret"])


def status(fast: Any, *args: Any) -> set[str]:
    report = fusegrad.explain(fast, *args)
    return {report.methods[m].status for m in ("forward", "backward")}


class Table(Function):
    @staticmethod
    def forward(ctx, rows, columns):
        return torch.ones(rows, columns).cumsum(1) * 2

    @staticmethod
    def backward(ctx, g):
        return None, None


@both
def test_no_tensor_among_the_arguments(backend) -> None:
    fast = fusegrad.compile(Table, backend=backend)
    for rows, columns in ((3, 4), (2, 5), (3, 4)):
        assert torch.equal(fast.apply(rows, columns), Table.apply(rows, columns))


class SparseRows(Function):
    @staticmethod
    def forward(ctx, weight, index):
        ctx.save_for_backward(index)
        ctx.size = weight.shape
        return weight[index] * 2

    @staticmethod
    def backward(ctx, g):
        (index,) = ctx.saved_tensors
        return torch.sparse_coo_tensor(index.reshape(1, -1), g * 2, ctx.size, check_invariants=False), None


@both
def test_a_sparse_gradient(backend) -> None:
    found = []
    fast = fusegrad.compile(SparseRows, backend=backend)
    for cls in (SparseRows, fast):
        w = torch.ones(5, 2, requires_grad=True)
        for _ in range(3):
            cls.apply(w, torch.tensor([1, 3])).sum().backward()
        assert w.grad.is_sparse
        found.append(w.grad.to_dense())
    assert torch.equal(*found)
    assert status(fast, torch.ones(5, 2, requires_grad=True), torch.tensor([1, 3])) == {"compiled"}


class Different(SparseRows):
    """What it returns depends on how often it was called: never what its capture says."""

    calls = 0

    @staticmethod
    def backward(ctx, g):
        scale = 3 if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None else 1
        (index,) = ctx.saved_tensors
        return torch.sparse_coo_tensor(index.reshape(1, -1), g * scale, ctx.size, check_invariants=False), None


def test_sparse_gradients_are_compared() -> None:
    fast = fusegrad.compile(Different, backend="reference")
    w = torch.ones(5, 2, requires_grad=True)
    with pytest.warns(fusegrad.runtime.fallback.records.FallbackWarning, match="differs in content"):
        fast.apply(w, torch.tensor([1, 3])).sum().backward()
    assert w.grad.to_dense().sum() == 4


class Unchecked(Function):
    """Writes past the version counter."""

    @staticmethod
    def forward(ctx, scratch, value, index):
        ctx.index = index
        scratch.data[index] = value
        return scratch

    @staticmethod
    def backward(ctx, g):
        return g, g[ctx.index], None


@both
def test_a_write_by_way_of_data_is_not_counted(backend) -> None:
    found = []
    for cls in (Unchecked, fusegrad.compile(Unchecked, backend=backend)):
        for _ in range(4):
            x, w = torch.ones(3, requires_grad=True), torch.ones(1, requires_grad=True)
            k = torch.zeros(3, 2)
            k = cls.apply(k, x * 2, (..., 0))
            y = (k[..., :1] * w).sum(-1)  # saves a view of k for the gradient of w
            k = cls.apply(k, y, (..., 1))
            k.sum().backward()
            assert k._version == 0
            found.append(torch.cat([x.grad, w.grad, k.detach().reshape(-1)]))
    assert all(torch.equal(found[0], f) for f in found)


class Root(Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(root := torch.linalg.cholesky(a))
        return (root * root).sum(-1)

    @staticmethod
    def backward(ctx, g):
        (root,) = ctx.saved_tensors
        return root * g.unsqueeze(-1)


A = torch.eye(4) * 2
FIRST: dict[str, Any] = {
    "grad": lambda f: torch.func.grad(lambda a: f(a).sum())(A),
    "vmap": lambda f: torch.func.vmap(f)(torch.stack([A, 3 * A])),
    "vmap along another axis": lambda f: torch.func.vmap(f, in_dims=1)(torch.stack([A, 3 * A], 1)),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(lambda a: f(a).sum()))(torch.stack([A, 3 * A])),
    "torch.compile": lambda f: torch.compile(lambda a: f(a).sum(), backend="aot_eager")(A),
}


@pytest.mark.parametrize("name", FIRST)
def test_a_first_use_under_a_transform_of_what_not_all_data_is_fit_for(name) -> None:
    fast = fusegrad.compile(Root, backend="reference")
    torch._dynamo.reset()
    first = FIRST[name](fast.apply)
    x = A.clone().requires_grad_()
    fast.apply(x).sum().backward()
    y = A.clone().requires_grad_()
    Root.apply(y).sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert first.isfinite().all()
    assert status(fast, x) == {"compiled"}


class Lies(Root):
    """Whose capture is found wrong at the first call on real data."""

    @staticmethod
    def forward(ctx, a):
        fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        ctx.save_for_backward(root := torch.linalg.cholesky(a))
        return root * (2 if fake else 1)


def test_what_could_not_be_compared_is_at_the_first_call_on_real_data() -> None:
    fast = fusegrad.compile(Lies, backend="reference")
    torch._dynamo.reset()
    with pytest.raises(fusegrad.NotTraceableError, match="differs in content"):  # the graph's own first run
        torch.compile(lambda a: fast.apply(a).sum(), backend="aot_eager")(A)
    with pytest.warns(fusegrad.runtime.fallback.records.FallbackWarning, match="differs in content"):
        assert torch.equal(fast.apply(A.clone()), Lies.apply(A))


class Applied(Function):
    @staticmethod
    def forward(ctx, f, x):
        ctx.save_for_backward(x)
        return f(x)

    @staticmethod
    def backward(ctx, g):
        return None, g * 2


@pytest.mark.parametrize("f", [torch.tanh, lambda t: t.sin()], ids=["torch's", "own"])
def test_a_callable_as_an_argument_in_torch_compile(f) -> None:
    torch._dynamo.reset()
    fast, x = fusegrad.compile(Applied), torch.randn(3, requires_grad=True)
    y = torch.compile(lambda a: fast.apply(f, a), backend="aot_eager")(x)
    y.sum().backward()
    assert torch.equal(y, f(x)) and torch.equal(x.grad, torch.full((3,), 2.0))


class Masked(Function):
    @staticmethod
    def forward(x):
        out = torch.zeros_like(x)
        mask = x > 0
        out[mask] = torch.sin(x[mask])
        out[~mask] = x[~mask] * 2
        return out

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


class AroundAMask(Masked):
    @staticmethod
    def forward(x):
        return Masked.apply(x) * 2


@both
def test_a_mask_inside_a_nested_function(backend) -> None:
    fast = fusegrad.compile(AroundAMask, backend=backend)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(3, 4, requires_grad=True)
        y, z = fast.apply(x), AroundAMask.apply(x)
        assert torch.allclose(y, z, rtol=1e-6)
        assert torch.equal(*(torch.autograd.grad(o.sum(), x)[0] for o in (y, z)))
    report = fusegrad.explain(fast, x)
    assert not report.opaque and status(fast, x) == {"compiled"}


class Outer(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return (a.unsqueeze(-1) * b.unsqueeze(-2)).sum(0)

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return (g * b.unsqueeze(-2)).sum(-1), (g * a.unsqueeze(-1)).sum(-2)


def test_summed_outer_products_have_the_bits_of_eager() -> None:
    fast = fusegrad.compile(Outer, backend="reference")
    for rows in (33, 5):
        a, b = torch.randn(rows, 20, requires_grad=True), torch.randn(rows, 17, requires_grad=True)
        for _ in range(3):
            y, z = Outer.apply(a, b), fast.apply(a, b)
            assert torch.equal(y, z)
            grads = [torch.autograd.grad(o, (a, b), torch.ones_like(o)) for o in (y, z)]
            assert all(map(torch.equal, *grads))


class Cut(Function):
    """backward writes through `.data`, which cuts no history for autograd, and at one of torch.func's levels does."""

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        y = x * 2
        y.data[:1] = 0
        return g * y


@both
def test_a_write_by_way_of_data_in_backward_is_what_eager_has_of_it_at_every_order(backend) -> None:
    fast, x = fusegrad.compile(Cut, backend=backend), torch.arange(1.0, 5.0)

    def told(cls):
        def grad(x):
            return torch.func.grad(lambda x: cls.apply(x).sum())(x)

        leaf = x.clone().requires_grad_()
        first = torch.autograd.grad(cls.apply(leaf).sum(), leaf, create_graph=True)[0]
        return grad(x), torch.func.grad(lambda x: grad(x).sum())(x), first, torch.autograd.grad(first.sum(), leaf)[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusegrad.FallbackWarning)
        assert all(torch.allclose(a, b) for a, b in zip(told(fast), told(Cut), strict=True))
    assert torch.equal(torch.func.vmap(fast.apply)(x.repeat(2, 1)), (x * x).repeat(2, 1))
    records = fast._fusegrad.ledger.records
    assert records["torch.func"].code and records["backward"].status == "compiled"


class SavesSparse(Function):
    @staticmethod
    def forward(ctx, indices, x):
        sparse = torch.sparse_coo_tensor(indices, torch.ones(indices.shape[1]), (4, 4))
        ctx.save_for_backward(sparse)
        return torch.matmul(sparse, x)

    @staticmethod
    def backward(ctx, g):
        (sparse,) = ctx.saved_tensors
        return None, sparse.t().matmul(g) if sparse.is_sparse else g


@both
@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_a_backward_that_is_given_a_sparse_tensor_runs_as_written(backend) -> None:
    fast = fusegrad.compile(SavesSparse, backend=backend)
    indices = torch.tensor([[0, 1, 2], [1, 3, 0]])
    for _ in range(4):
        found = []
        for cls in (SavesSparse, fast):
            x = torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_()
            found += torch.autograd.grad(cls.apply(indices, x).square().sum(), x)
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    methods = fusegrad.explain(fast).methods
    assert methods["forward"].status == "compiled"
    assert (methods["backward"].status, methods["backward"].code) == ("opaque", "FG030")
