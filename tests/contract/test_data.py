"""Methods that ask what is in a tensor: compiled between the questions, by the answers of each call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import Function

import fusegrad
from fusegrad import NotTraceableError
from fusegrad.runtime.fallback.records import FallbackWarning

Tensor = torch.Tensor
both = pytest.mark.parametrize("backend", ["reference", "interpret"])


class Shifted(Function):
    """A number that is only computed with, and a promise that is only looked at."""

    @staticmethod
    def forward(ctx, x):
        least = x.min().item()
        assert x.isfinite().all()
        y = x - least
        ctx.save_for_backward(y)
        return y.sqrt() + 2 * least

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (y + 1)


class OnCtx(Function):
    """A number that backward is given by ctx, and one that is returned."""

    @staticmethod
    def forward(ctx, x):
        ctx.scale = x.abs().max().item()
        return x / ctx.scale * 3, ctx.scale

    @staticmethod
    def backward(ctx, g, _):
        return g * 3 / ctx.scale + (1 if ctx.scale > 2 else 0)


class Branch(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp() * 2 if x.sum() > 0 else x.sin() - 1
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return g * y if g.max() > 2 else g * x.cos()


class Halved(Function):
    @staticmethod
    def forward(ctx, x):
        y = x
        while y.abs().max() > 1:
            y = y / 2
        ctx.save_for_backward(y)
        return y * 1.5

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


class Count(Function):
    """A whole number as a factor and as a size."""

    @staticmethod
    def forward(ctx, x):
        ctx.n = (x > 0).sum().item()
        return x * ctx.n, torch.zeros(ctx.n + 1) + x.sum()

    @staticmethod
    def backward(ctx, g, h):
        return g * ctx.n + h.sum()


class Upper(Function):
    @staticmethod
    def forward(ctx, x):
        n = x.shape[-1]
        index = torch.ones(n, n).triu().reshape(-1).nonzero()
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x.reshape(x.shape[0], -1)[:, index.squeeze(1)]

    @staticmethod
    def backward(ctx, g):
        (index,) = ctx.saved_tensors
        out = g.new_zeros(ctx.shape[0], ctx.shape[1] * ctx.shape[2])
        out[:, index.squeeze(1)] = g
        return out.reshape(ctx.shape)


class Positive(Function):
    """Boolean indices and masked_select, whose sizes meet; one of them is saved."""

    @staticmethod
    def forward(ctx, x):
        mask = x > 0
        kept, selected = x[mask], x.masked_select(mask)
        ctx.save_for_backward(mask, kept)
        return kept * 2 + selected.sin()

    @staticmethod
    def backward(ctx, g):
        mask, kept = ctx.saved_tensors
        out = torch.zeros(mask.shape)
        out[mask] = g * kept
        return out


class Repeated(Function):
    @staticmethod
    def forward(ctx, x):
        times = x.reshape(-1).gt(0).long() + 1
        ctx.save_for_backward(times)
        ctx.shape = x.shape
        return x.reshape(-1).repeat_interleave(times) * 2

    @staticmethod
    def backward(ctx, g):
        (times,) = ctx.saved_tensors
        owner = torch.arange(times.shape[0]).repeat_interleave(times)
        return torch.zeros(times.shape[0]).index_add(0, owner, g * 2).reshape(ctx.shape)


class Distinct(Function):
    @staticmethod
    def forward(ctx, x):
        values, place = x.round().unique(return_inverse=True)
        ctx.save_for_backward(place)
        return values.exp()

    @staticmethod
    def backward(ctx, g):
        return g[ctx.saved_tensors[0]]


CLASSES = (Shifted, OnCtx, Branch, Halved, Count, Upper, Positive, Repeated, Distinct)


def outcome(cls: Any, x: Tensor, factor: float) -> list[Any]:
    x = x.detach().clone().requires_grad_()
    results = cls.apply(x)
    results = results if isinstance(results, tuple) else (results,)
    tensors = [r for r in results if isinstance(r, Tensor)]
    sum((t * factor).sum() for t in tensors).backward()
    return [*(r.detach() if isinstance(r, Tensor) else r for r in results), x.grad]


def data(seed: int, cls: type) -> Tensor:
    torch.manual_seed(seed)
    shape = (2, 4, 4) if cls is Upper else (4 + seed % 2, 5)
    return torch.randn(shape) * (1 + seed % 3)


@both
@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_every_answer_selects_what_comes_after(cls, backend) -> None:
    fast = fusegrad.compile(cls, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        if backend == "interpret":  # what a library does is on record
            warnings.filterwarnings("ignore", message=".*(between the kernels|reads the values of a tensor)")
        for seed in range(8):
            x, factor = data(seed, cls), 1.0 + seed % 3
            for mine, theirs in zip(outcome(fast, x, factor), outcome(cls, x, factor), strict=True):
                if isinstance(theirs, float):
                    assert abs(mine - theirs) < 1e-6 if backend == "interpret" else mine == theirs
                else:
                    same = torch.equal if backend == "reference" else torch.allclose
                    assert same(mine, theirs) or (backend == "interpret" and same(mine, theirs, 1e-5, 1e-6))
    report = fusegrad.explain(fast, data(0, cls).requires_grad_())
    assert {report.methods[m].status for m in ("forward", "backward")} == {"compiled"}
    assert report.opaque and all("what is in a tensor" in str(call) for call in report.opaque)


@pytest.mark.parametrize(("cls", "graphs"), [(Shifted, 1), (OnCtx, 1), (Count, 1), (Positive, 1), (Branch, 2)])
def test_numbers_that_are_computed_with_make_no_further_graph(cls, graphs) -> None:
    fast = fusegrad.compile(cls, backend="reference")
    for seed in range(12):
        x = data(2 * seed, cls)
        fast.apply(x)
    assert len(fusegrad.explain(fast, x).variants) == graphs


class Rounds(Function):
    """Another graph at every call."""

    @staticmethod
    def forward(ctx, x):
        return x * float(x.sum())

    @staticmethod
    def backward(ctx, g):
        return g * 2


def test_answers_that_keep_changing_leave_the_method_as_written() -> None:
    fast = fusegrad.compile(Rounds, backend="reference")
    with pytest.warns(FallbackWarning, match="what it decides by a tensor.s data keeps changing"):
        for seed in range(12):
            x = data(0, Rounds) * (seed + 1)
            assert torch.equal(fast.apply(x), Rounds.apply(x))
    report = fusegrad.explain(fast, x.requires_grad_())
    assert report.methods["forward"].status == "opaque" and report.methods["forward"].code == "FG051"


class Promised(Branch):
    is_traceable = True


@pytest.mark.parametrize("fast", [lambda: fusegrad.compile(Promised), lambda: fusegrad.compile(Branch, fullgraph=True)])
def test_a_promise_excludes_questions(fast) -> None:
    with pytest.raises(NotTraceableError, match="depends on the data"):
        fast().apply(torch.randn(3))


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(torch.ones(3)),
    "vmap": lambda f: torch.func.vmap(f)(torch.ones(2, 3)),
    "jvp": lambda f: torch.func.jvp(f, (torch.ones(3),), (torch.ones(3),)),
    "double backward": lambda f: torch.autograd.grad(
        torch.autograd.grad(f(x := torch.ones(3, requires_grad=True)).sum(), x, create_graph=True)[0].sum(), x
    ),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_under_transforms_the_class_is_its_own(name, first) -> None:
    class Mine(Function):
        @staticmethod
        def forward(x):
            return x * x.sum().item() if x.sum() > 0 else x

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * x * x

    def found(cls: Any) -> Any:
        try:
            return TRANSFORMS[name](cls.apply)
        except RuntimeError as error:
            return str(error).replace(cls.__name__, "Mine")

    fast = fusegrad.compile(Mine, backend="reference")
    if not first:
        fast.apply(torch.ones(3, requires_grad=True)).sum().backward()
    torch.testing.assert_close(found(fast), found(Mine)) if not isinstance(found(Mine), str) else None
    assert isinstance(found(fast), str) == isinstance(found(Mine), str)


class Opaque(Function):
    is_traceable = False

    @staticmethod
    def forward(ctx, x):
        return x * x.max().item()

    @staticmethod
    def backward(ctx, g):
        return g


class Mixed(Function):
    """An opaque call, a nested body that asks by itself, and questions of its own."""

    @staticmethod
    def forward(ctx, x):
        y = Opaque.apply(x) if x.sum() > 0 else x * 2
        ctx.save_for_backward(z := Branch.apply(y))
        return z * y.max().item()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


@both
def test_questions_beside_opaque_calls(backend) -> None:
    fast = fusegrad.compile(Mixed, backend=backend)
    for seed in range(8):
        x = data(seed, Mixed)
        for mine, theirs in zip(outcome(fast, x, 1.0), outcome(Mixed, x, 1.0), strict=True):
            assert torch.equal(mine, theirs) or (backend == "interpret" and torch.allclose(mine, theirs, 1e-5, 1e-5))
    assert fast._fusegrad.ledger.records["forward"].status == "compiled" and not fast._fusegrad.table.refused


# ------------------------------------------------------------------ types of tensors, which are no functions for torch
SCALES = [0.5, 2.0]
CONSTRUCTED: dict[str, Callable[[Tensor, float], Tensor]] = {
    "of a list": lambda x, k: x * torch.Tensor([3.0, k])[1],
    "of a size": lambda x, k: x * torch.Tensor(x.size()).fill_(k),
    "of sizes": lambda x, k: x * torch.FloatTensor(x.shape[0], 1).fill_(k),
    "of the size": lambda x, k: x * torch.Tensor([x.shape[0]]),
    "of integers": lambda x, k: x * x[torch.LongTensor([1, 0])].sum(),
    "of an array": lambda x, k: x * torch.from_numpy(np.arange(x.shape[0], dtype=np.float32))[:, None],
    "of a global": lambda x, k: x * torch.Tensor(SCALES)[1],
}


@pytest.mark.parametrize("how", CONSTRUCTED)
def test_a_tensor_that_a_type_makes_is_a_constant_of_the_graph(how) -> None:
    made = CONSTRUCTED[how]

    class Scaled(Function):
        @staticmethod
        def forward(ctx, x, k):
            ctx.save_for_backward(x)
            ctx.k = k
            return made(x, k).sin()

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * made(x, ctx.k).cos(), None

    fast = fusegrad.compile(Scaled, backend="reference")
    for rows, k, scale in ((4, 2.0, 2.0), (6, 2.0, 2.0), (4, 3.0, 2.0), (4, 2.0, 5.0), (4, 2.0, 2.0)):
        SCALES[1] = scale
        x, g = torch.randn(rows, 5, requires_grad=True), torch.randn(rows, 5)
        mine, theirs = (c.apply(x, k) for c in (fast, Scaled))
        assert torch.equal(mine, theirs)
        assert torch.equal(*(torch.autograd.grad(o, x, g)[0] for o in (mine, theirs)))
    assert {r.status for m, r in fast._fusegrad.ledger.records.items() if m in ("forward", "backward")} == {"compiled"}
