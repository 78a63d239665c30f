"""A compiled class is used as the class itself: outputs, gradients, ctx, errors, identity. Eager is the oracle."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import function_samples as samples
import pytest
import torch
from function_samples import (
    BACKENDS,
    CrossEntropy,
    Cube,
    LayerNorm,
    Linear,
    Partial,
    RMSNorm,
    Softmax,
    SwiGLU,
    Wrong,
    agree,
    as_tuple,
    assert_same,
    leaf,
    raised,
    run,
    status,
)
from torch.autograd import Function, gradcheck, gradgradcheck

import fusegrad

Tensor = torch.Tensor
both = pytest.mark.parametrize("backend", BACKENDS)


def target() -> Tensor:
    return torch.tensor([1, 0, 4, 2])


SUITE = {
    "RMSNorm": (RMSNorm, lambda d: (leaf(4, 10, dtype=d), leaf(10, dtype=d), 1e-6)),
    "Linear": (Linear, lambda d: (leaf(4, 6, dtype=d), leaf(3, 6, dtype=d, seed=1), leaf(3, dtype=d))),
    "Linear, no bias": (Linear, lambda d: (leaf(4, 6, dtype=d), leaf(3, 6, dtype=d, seed=1), None)),
    "Softmax": (Softmax, lambda d: (leaf(5, 9, dtype=d),)),
    "LayerNorm": (LayerNorm, lambda d: (leaf(4, 10, dtype=d), leaf(10, dtype=d), leaf(10, dtype=d, seed=2))),
    "SwiGLU": (SwiGLU, lambda d: (leaf(4, 6, dtype=d), leaf(4, 6, dtype=d, seed=3))),
    "CrossEntropy": (CrossEntropy, lambda d: (leaf(4, 5, dtype=d), target())),
    "Cube": (Cube, lambda d: (leaf(7, dtype=d),)),
    "Wrong": (Wrong, lambda d: (leaf(7, dtype=d),)),
}
LAYOUTS = {
    "contiguous": lambda o: torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=o.dtype),
    "expanded": lambda o: torch.ones((), dtype=o.dtype).expand(o.shape),
    "transposed": lambda o: torch.linspace(0, 1, o.numel(), dtype=o.dtype).view(o.shape).mT.contiguous().mT
    if o.dim() > 1
    else torch.ones_like(o),
    "stepped": lambda o: torch.linspace(0, 1, 2 * o.numel(), dtype=o.dtype).view(*o.shape, 2)[..., 0],
    "row": lambda o: torch.linspace(0, 1, o.shape[-1] if o.dim() else 1, dtype=o.dtype).expand(o.shape)
    if o.dim()
    else torch.ones_like(o),
}


@both
@pytest.mark.parametrize("name", SUITE)
def test_suite(name, backend) -> None:
    cls, args = SUITE[name]
    fast = agree(cls, backend, *args(torch.float32))
    assert status(fast) == status(fast, "backward") == "compiled"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["RMSNorm", "Softmax", "Linear", "CrossEntropy"])
def test_dtypes_are_bitwise_on_the_reference(name, dtype) -> None:
    cls, args = SUITE[name]
    given = args(dtype)
    fast = fusegrad.compile(cls)
    mine, theirs = run(fast, *given), run(cls, *given)
    if cls is Linear:  # a product becomes a matmul: same numbers, another order
        assert [t.dtype for t in mine if t is not None] == [t.dtype for t in theirs if t is not None]
        torch.testing.assert_close(mine, theirs, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    else:
        assert_same(mine, theirs, bitwise=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["RMSNorm", "Softmax", "CrossEntropy"])
def test_dtypes_under_the_interpreter(name, dtype) -> None:
    cls, args = SUITE[name]
    given = args(dtype)
    mine, theirs = run(fusegrad.compile(cls, backend="interpret"), *given), run(cls, *given)
    exact = run(cls, *[a.detach().double().requires_grad_() if torch.is_tensor(a) and a.requires_grad else a
                       for a in given])  # fmt: skip
    for m, t, e in zip(mine, theirs, exact, strict=True):
        if m is None or not torch.is_tensor(m):
            continue
        assert m.dtype is t.dtype
        step = torch.finfo(dtype).eps * e.abs().max().clamp(min=1)
        assert (m.double() - e).abs().max() <= 1.5 * (t.double() - e).abs().max() + step


@both
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm", "Linear"])
def test_gradients_of_every_layout(name, layout, backend) -> None:
    cls, args = SUITE[name]
    fast = fusegrad.compile(cls, backend=backend)
    given = args(torch.float32)
    assert_same(run(fast, *given, gradient=LAYOUTS[layout]), run(cls, *given, gradient=LAYOUTS[layout]))


INPUTS = {
    "transposed": lambda: torch.randn(6, 4).t(),
    "stepped": lambda: torch.randn(4, 12)[:, ::2],
    "offset": lambda: torch.randn(5, 6)[1:],
    "expanded": lambda: torch.randn(1, 6).expand(4, 6),
    "no rows": lambda: torch.randn(0, 6),
    "one row": lambda: torch.randn(1, 6),
    "one column": lambda: torch.randn(4, 1),
}


@both
@pytest.mark.parametrize("layout", INPUTS)
def test_inputs_of_every_layout(layout, backend) -> None:
    torch.manual_seed(0)
    x = INPUTS[layout]()
    results = []
    for cls in (fusegrad.compile(RMSNorm, backend=backend), RMSNorm):
        root = x.detach().requires_grad_() if layout != "expanded" else x.detach()[:1].clone().requires_grad_()
        given = root if layout != "expanded" else root.expand(4, 6)
        w = torch.linspace(1, 2, x.shape[1]).requires_grad_()
        y, rstd = cls.apply(given, w)
        results.append([y.detach(), rstd, *torch.autograd.grad(y.sum(), (root, w))])
    assert_same(*results)


# ------------------------------------------------------------------ arguments
@both
def test_defaults_and_keywords(backend) -> None:
    fast = fusegrad.compile(RMSNorm, backend=backend)
    x, w = leaf(3, 5), leaf(5)
    reference = [o.detach() for o in RMSNorm.apply(x, w, 0.5)]
    for outputs in (fast.apply(x, w, 0.5), fast.apply(x, w, eps=0.5), fast.apply(w=w, x=x, eps=0.5)):
        assert_same([o.detach() for o in outputs], reference)
    assert_same([o.detach() for o in fast.apply(x, w)], [o.detach() for o in RMSNorm.apply(x, w)])


class KeywordOnly(Function):
    @staticmethod
    def forward(x, *, k):
        return x * k

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g


class OldDefault(Function):
    """An old-style default is not an argument: backward owes one gradient."""

    @staticmethod
    def forward(ctx, x, k=3.0):
        ctx.k = k
        return x * k

    @staticmethod
    def backward(ctx, g):
        return g * ctx.k, None


@pytest.mark.parametrize(
    ("cls", "call"),
    [
        (KeywordOnly, lambda c: c.apply(leaf(2), k=3)),
        (RMSNorm, lambda c: c.apply(leaf(2))),
        (RMSNorm, lambda c: c.apply(leaf(2), leaf(2), 1.0, 2.0)),
        (RMSNorm, lambda c: c.apply(leaf(2), leaf(2), epsilon=1.0)),
        (Softmax, lambda c: c.apply(leaf(2), k=3)),
        (Softmax, lambda c: c.apply()),
        (Softmax, lambda c: c.apply(leaf(2), 3)),
        (Softmax, lambda c: c.apply("text")),
        (OldDefault, lambda c: c.apply(leaf(2), 3.0, 4.0)),
    ],
)
def test_wrong_calls_raise_as_in_eager(cls, call) -> None:
    mine, theirs = raised(lambda: call(fusegrad.compile(cls))), raised(lambda: call(cls))
    assert issubclass(mine[0], theirs[0])
    assert mine[1] == theirs[1] or cls is KeywordOnly  # eager names a keyword that it does have


def test_old_style_defaults_are_not_arguments() -> None:
    fast = fusegrad.compile(OldDefault)
    assert_same(run(fast, leaf(3)), run(OldDefault, leaf(3)))
    assert_same(run(fast, leaf(3), 2.0), run(OldDefault, leaf(3), 2.0))


@pytest.mark.parametrize("values", [(1, 1.0, True), (0.0, -0.0), (float("nan"), 2.0), ("sum", "mean"), (None, 1)])
def test_python_arguments_count_by_value_and_type(values) -> None:
    class Scaled(Function):
        @staticmethod
        def forward(ctx, x, k):
            ctx.k = k
            if isinstance(k, str):
                return x + x.sum() if k == "sum" else x + x.mean()
            if k is None:
                return x.clone()
            if k is True:
                return x + 100
            return torch.copysign(x, torch.tensor(float(k))) + torch.full_like(x, k) if k == k else x * k

        @staticmethod
        def backward(ctx, g):
            return g * (2.0 if isinstance(ctx.k, int) else 3.0), None

    fast = fusegrad.compile(Scaled)
    x = leaf(4)
    for k in (*values, *values):
        assert_same(run(fast, x, k), run(Scaled, x, k), bitwise=True)
    captures = fusegrad.stats()["captures"]
    for k in values:
        run(fast, x, k)
    assert fusegrad.stats()["captures"] == captures


@both
def test_lists_and_dicts_are_arguments_that_are_not_tracked(backend) -> None:
    class Listed(Function):
        @staticmethod
        def forward(ctx, x, weights, options):
            ctx.k = options["k"]
            return x * weights[0] * options["k"]

        @staticmethod
        def backward(ctx, g):
            return g * ctx.k, None, None

    fast = fusegrad.compile(Listed, backend=backend)
    for k, weight in ((2.0, 1.0), (3.0, 1.0), (2.0, 5.0)):
        weights = [torch.full((4,), weight)]
        assert_same(run(fast, leaf(4), weights, {"k": k}), run(Listed, leaf(4), weights, {"k": k}))


@both
def test_the_same_tensor_twice(backend) -> None:
    fast = fusegrad.compile(SwiGLU, backend=backend)
    for apply in (lambda c, a: c.apply(a, a), lambda c, a: c.apply(a, a.view(-1).view(2, 3))):
        grads = []
        for cls in (fast, SwiGLU):
            a = leaf(2, 3)
            apply(cls, a).sum().backward()
            grads.append(a.grad)
        assert_same(grads[:1], grads[1:])


@pytest.mark.parametrize("needs", [(True, False, True), (False, True, False), (False, False, True), (False,) * 3])
@both
def test_only_some_inputs_need_gradients(needs, backend) -> None:
    given = [t.detach().requires_grad_(n) for t, n in zip((leaf(4, 6), leaf(3, 6), leaf(3)), needs, strict=True)]
    agree(Linear, backend, *given) if backend == "interpret" else None
    fast = fusegrad.compile(Linear, backend=backend)
    assert_same(run(fast, *given), run(Linear, *given))
    assert fast.apply(*given).requires_grad is any(needs)


@both
def test_needs_input_grad_is_what_forward_sees(backend) -> None:
    class Asks(Function):
        @staticmethod
        def forward(a, b, k):
            return a * b

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.needs = ctx.needs_input_grad
            ctx.save_for_backward(*inputs[:2])

        @staticmethod
        def backward(ctx, g):
            assert ctx.needs == ctx.needs_input_grad
            a, b = ctx.saved_tensors
            return g * b * 2 if ctx.needs_input_grad[0] else None, g * a if ctx.needs[1] else None, None

    fast = agree(Asks, backend, leaf(3), leaf(3, seed=1), 1)
    agree(Asks, backend, leaf(3), leaf(3, seed=1).detach(), 1)
    assert_same(run(fast, leaf(3).detach(), leaf(3), 1), run(Asks, leaf(3).detach(), leaf(3), 1))


# ------------------------------------------------------------------ outputs
class Mixed(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x * 2, 5, None, "text", [x.shape[-1] > 100], x.argmax(-1)

    @staticmethod
    def backward(ctx, g, *others):
        return g * 2 + (others[-1].sum() if others[-1] is not None else 0)


@both
def test_outputs_that_are_no_tensors(backend) -> None:
    fast = fusegrad.compile(Mixed, backend=backend)
    assert_same(run(fast, leaf(3, 4)), run(Mixed, leaf(3, 4)))
    outputs = fast.apply(leaf(3, 4))
    assert [type(o) for o in outputs[1:5]] == [int, type(None), str, list]
    assert not outputs[5].requires_grad and outputs[0].requires_grad


@both
@pytest.mark.parametrize("kind", ["tuple of one", "list", "bare"])
def test_the_form_of_the_output_is_kept(kind, backend) -> None:
    wrap = {"tuple of one": lambda t: (t,), "list": lambda t: [t], "bare": lambda t: t}[kind]

    class Formed(Function):
        @staticmethod
        def forward(ctx, x):
            return wrap(x * 2)

        @staticmethod
        def backward(ctx, g):
            return g * 2

    outcomes = []
    for cls in (fusegrad.compile(Formed, backend=backend), Formed):
        out = cls.apply(leaf(3))
        inner = out[0] if isinstance(out, tuple | list) else out
        outcomes.append((type(out), inner.requires_grad, inner.detach().tolist()))
    assert outcomes[0] == outcomes[1]


VIEWS = {
    "identity": lambda x: x,
    "detached": lambda x: x.detach(),
    "transposed": lambda x: x.t(),
    "row": lambda x: x[1],
    "step": lambda x: x[:, 1::2],
    "view": lambda x: x.view(-1),
    "expanded": lambda x: x.unsqueeze(0).expand(2, 3, 4),
    "clone": lambda x: x.clone(),
    "narrowed": lambda x: x.narrow(1, 1, 2),
}


@both
@pytest.mark.parametrize("view", VIEWS)
def test_outputs_share_memory_as_in_eager(view, backend) -> None:
    make = VIEWS[view]

    class Aliasing(Function):
        @staticmethod
        def forward(ctx, x):
            return make(x), x * 2

        @staticmethod
        def backward(ctx, g, h):
            return h * 2

    facts = []
    for cls in (fusegrad.compile(Aliasing, backend=backend), Aliasing):
        for offset in (0, 2):
            root = torch.arange(24.0).requires_grad_()
            x = (root * 1)[offset : offset + 12].view(3, 4)
            y, _ = cls.apply(x)
            shared = y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            facts.append((shared, y.storage_offset(), tuple(y.shape), y.stride(), y._is_view(), y._base is None,
                          y is x, y.requires_grad, y.tolist()))  # fmt: skip
    assert facts[:2] == facts[2:]


@both
def test_in_place_on_a_view_output_raises_as_in_eager(backend) -> None:
    class View(Function):
        @staticmethod
        def forward(ctx, x):
            return x.view(-1)

        @staticmethod
        def backward(ctx, g):
            return g.view(2, 3)

    def write(cls: Any) -> Any:
        return cls.apply(leaf(2, 3) * 1).mul_(2)

    assert raised(lambda: write(fusegrad.compile(View, backend=backend))) == raised(lambda: write(View))


@both
def test_one_tensor_returned_twice_is_one_object(backend) -> None:
    class Twice(Function):
        @staticmethod
        def forward(ctx, x):
            y = x * 2
            return y, y

        @staticmethod
        def backward(ctx, g, h):
            return 2 * g + 5 * h

    results = []
    for cls in (fusegrad.compile(Twice, backend=backend), Twice):
        x = leaf(3)
        a, b = cls.apply(x)
        (a.sum() + 2 * b.sum()).backward()
        results.append((a is b, x.grad.tolist()))
    assert results[0] == results[1]


@both
def test_mark_dirty(backend) -> None:
    class InPlace(Function):
        @staticmethod
        def forward(ctx, x, k):
            x.mul_(k)
            ctx.mark_dirty(x)
            return x

        @staticmethod
        def backward(ctx, g):
            return g * 7, None

    facts = []
    for cls in (fusegrad.compile(InPlace, backend=backend), InPlace):
        for _ in range(2):
            a = leaf(3)
            z = a * 1
            y = cls.apply(z, 2.0)
            y.sum().backward()
            facts.append((y is z, z._version, z.tolist(), a.grad.tolist(), z.grad_fn.name()))
    assert facts[:2] == facts[2:]
    fast = fusegrad.compile(InPlace, backend=backend)
    assert raised(lambda: fast.apply(leaf(3), 2.0)) == raised(lambda: InPlace.apply(leaf(3), 2.0))


@both
def test_an_undeclared_write_to_an_argument_happens_once_a_call(backend) -> None:
    class Counting(Function):
        @staticmethod
        def forward(ctx, x, seen):
            seen.add_(1)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2, None

    seen = []
    for cls in (fusegrad.compile(Counting, backend=backend), Counting):
        n = torch.zeros(2)
        for _ in range(3):
            cls.apply(leaf(3), n)
        seen.append(n.tolist())
    assert seen[0] == seen[1] == [3.0, 3.0]


@both
def test_mark_non_differentiable_and_integers(backend) -> None:
    class Marked(Function):
        @staticmethod
        def forward(ctx, x):
            a, b, i = x * 2, x * 3, (x * 10).long()
            ctx.mark_non_differentiable(b)
            return a, b, i

        @staticmethod
        def backward(ctx, g, h, i):
            return g * 2 + h + i

    fast = agree(Marked, backend, leaf(3))
    outputs = fast.apply(leaf(3))
    assert [o.requires_grad for o in outputs] == [True, False, False]
    assert [o.grad_fn is None for o in outputs] == [o.grad_fn is None for o in Marked.apply(leaf(3))]


@both
@pytest.mark.parametrize("materialize", [True, False])
def test_undefined_gradients(materialize, backend) -> None:
    class Two(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(materialize)
            return x * 2, x * 3

        @staticmethod
        def backward(ctx, g, h):
            if g is None:
                return 100 * h
            return g * 2 if h is None else g * 2 + h * 3

    fast = fusegrad.compile(Two, backend=backend)
    for used in ((0,), (1,), (0, 1), (1,)):
        grads = []
        for cls in (fast, Two):
            x = leaf(3)
            outputs = cls.apply(x)
            sum(outputs[i].sum() for i in used).backward()
            grads.append(x.grad)
        assert_same(grads[:1], grads[1:])
    assert status(fast, "backward") == "compiled"


# ------------------------------------------------------------------ ctx
@both
def test_ctx_attributes_of_every_kind(backend) -> None:
    class Attributes(Function):
        @staticmethod
        def forward(ctx, x, k):
            ctx.shape, ctx.rows, ctx.nested = x.shape, x.shape[0], {"sizes": [x.shape[0] * 2, {"d": x.dim()}]}
            ctx.k, ctx.dtype, ctx.dirty = k, x.dtype, "mine"
            ctx.mask = x > 0
            ctx.twice = x * 2
            return (x * k).sum(0)

        @staticmethod
        def backward(ctx, g):
            assert ctx.dirty == "mine" and ctx.nested["sizes"][1]["d"] == 2
            wide = g.expand(ctx.shape) * ctx.mask * ctx.k + ctx.twice * ctx.rows / ctx.nested["sizes"][0]
            return wide.to(ctx.dtype), None

    fast = agree(Attributes, backend, leaf(3, 4), 2.0)
    for shape in ((5, 2), (1, 4), (3, 4)):
        assert_same(run(fast, leaf(*shape), 2.0), run(Attributes, leaf(*shape), 2.0))
    assert status(fast) == "compiled"


@both
def test_save_for_backward_takes_none_and_the_last_call_wins(backend) -> None:
    class Saves(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.save_for_backward(None, x * 3, None)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            a, b, c = ctx.saved_tensors
            assert a is None and c is None
            return g * b

    agree(Saves, backend, leaf(3))


@both
def test_saved_tensors_hooks_see_what_the_user_saved(backend) -> None:
    for cls, args in (SUITE["LayerNorm"], SUITE["RMSNorm"], SUITE["SwiGLU"]):
        packs = []
        for c in (fusegrad.compile(cls, backend=backend), cls):
            seen: list[Any] = []

            def pack(t: Tensor, seen: list[Any] = seen) -> Tensor:
                seen.append((tuple(t.shape), t.dtype))
                return t.clone()

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t + 0):
                given = args(torch.float32)
                output = as_tuple(c.apply(*given))[0]
            grads = torch.autograd.grad(output.sum(), [g for g in given if torch.is_tensor(g)])
            packs.append((seen, grads))
        assert packs[0][0] == packs[1][0]
        assert_same(packs[0][1], packs[1][1])


@both
def test_save_on_cpu_and_checkpoint(backend) -> None:
    fast = fusegrad.compile(LayerNorm, backend=backend)
    results = []
    for cls in (fast, LayerNorm):
        x, w, b = leaf(4, 10), leaf(10), leaf(10, seed=2)
        with torch.autograd.graph.save_on_cpu():
            cls.apply(x, w, b).sum().backward()
        for reentrant in (False, True):
            torch.utils.checkpoint.checkpoint(cls.apply, x, w, b, use_reentrant=reentrant).pow(2).sum().backward()
        results.append((x.grad, w.grad, b.grad))
    assert_same(*results)


class Saving(Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return g * x * y


@both
@pytest.mark.parametrize("what", ["input", "output"])
def test_a_changed_saved_tensor_is_noticed(what, backend) -> None:
    def change(cls: Any) -> None:
        x = leaf(3) * 1
        y = cls.apply(x)
        with torch.no_grad():
            (x if what == "input" else y).mul_(2)
        y.sum().backward()

    fast = fusegrad.compile(Saving, backend=backend)
    mine, theirs = raised(lambda: change(fast)), raised(lambda: change(Saving))
    assert mine == theirs and "modified by an inplace operation" in mine[1]


@both
def test_backward_twice(backend) -> None:
    fast = fusegrad.compile(Saving, backend=backend)

    def twice(cls: Any) -> None:
        y = cls.apply(leaf(3)).sum()
        y.backward()
        y.backward()

    mine, theirs = raised(lambda: twice(fast)), raised(lambda: twice(Saving))
    assert mine == theirs and "second time" in mine[1]
    grads = []
    for cls in (fast, Saving):
        x = leaf(3)
        y = cls.apply(x).sum()
        y.backward(retain_graph=True)
        y.backward(retain_graph=True)
        grads.append(x.grad)
    assert_same(grads[:1], grads[1:])


# ------------------------------------------------------------------ gradients
RETURNS = {
    "extra Nones": lambda g: (g, None, None, None),
    "too few": lambda g: g,
    "too many": lambda g: (g, None, g),
    "for a number": lambda g: (g, g),
    "another shape": lambda g: (g.new_ones(5), None),
    "broadcast": lambda g: (g.expand(4, 3), None),
    "smaller": lambda g: (g.sum(), None),
    "another type": lambda g: (g.double(), None),
    "a number": lambda g: (3.0, None),
    "a list": lambda g: [g, None],
    "nothing": lambda g: (None, None),
}


@both
@pytest.mark.parametrize("kind", RETURNS)
def test_what_backward_may_return(kind, backend) -> None:
    make = RETURNS[kind]

    class Returns(Function):
        @staticmethod
        def forward(ctx, x, k):
            return x * k

        @staticmethod
        def backward(ctx, g):
            return make(g)

    fast = fusegrad.compile(Returns, backend=backend)
    try:
        theirs: Any = run(Returns, leaf(3), 2)
    except Exception as error:
        mine = raised(lambda: run(fast, leaf(3), 2))
        assert issubclass(mine[0], type(error)) and mine[1].startswith(str(error))  # then argument, line, way out
        return
    assert_same(run(fast, leaf(3), 2), theirs)
    (leaf_a := leaf(3)), (leaf_b := leaf(3))
    Returns.apply(leaf_a, 2).sum().backward()
    fast.apply(leaf_b, 2).sum().backward()
    assert (leaf_a.grad is None) == (leaf_b.grad is None)


@both
def test_a_wrong_backward_stays_wrong(backend) -> None:
    fast = fusegrad.compile(Wrong, backend=backend)
    x = leaf(4)
    fast.apply(x).sum().backward()
    torch.testing.assert_close(x.grad, 100 * x.detach())


@both
@pytest.mark.parametrize("name", ["RMSNorm", "Softmax", "SwiGLU", "Cube", "Wrong", "CrossEntropy", "LayerNorm"])
def test_double_backward(name, backend) -> None:
    cls, args = SUITE[name]
    results = []
    for c in (fusegrad.compile(cls, backend=backend), cls):
        given = args(torch.float32)
        wanted = [g for g in given if torch.is_tensor(g) and g.requires_grad]
        y = as_tuple(c.apply(*given))[0]
        first = torch.autograd.grad(y.pow(2).sum(), wanted, create_graph=True)
        second = torch.autograd.grad(sum(g.sin().sum() for g in first), wanted, allow_unused=True)
        results.append([*first, *second])
    assert_same(*results, tolerance=1e-4)


@both
def test_third_order(backend) -> None:
    results = []
    for cls in (fusegrad.compile(Cube, backend=backend), Cube):
        x = leaf(5)
        g = cls.apply(x)[0].sum()
        orders = []
        for _ in range(3):
            (g,) = torch.autograd.grad(g.sum(), x, create_graph=True)
            orders.append(g)
        results.append(orders)
    assert_same(*results)
    torch.testing.assert_close(results[0][2].detach(), torch.full((5,), 6.0))


@both
def test_a_saved_intermediate_makes_second_order_partial_as_in_eager(backend) -> None:
    results = []
    for cls in (fusegrad.compile(Partial, backend=backend), Partial):
        x = leaf(4)
        y = cls.apply(x)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert not g.requires_grad or cls is not None
        results.append((g.detach(), torch.tensor(g.requires_grad)))
    assert_same(*results)


@both
def test_once_differentiable(backend) -> None:
    fast = fusegrad.compile(Linear, backend=backend)

    def second(cls: Any, whole: bool) -> Any:
        given = (leaf(4, 6), leaf(3, 6, seed=1), leaf(3))
        (g,) = torch.autograd.grad(cls.apply(*given).pow(2).sum(), given[0], create_graph=True)
        if whole:
            return g.sum().backward()
        return torch.autograd.grad(g.sum(), given[0], allow_unused=True)

    mine, theirs = raised(lambda: second(fast, True)), raised(lambda: second(Linear, True))
    assert mine == theirs and "once_differentiable" in mine[1]
    assert [type(t) for t in second(fast, False)] == [type(t) for t in second(Linear, False)]


def test_vjp_is_another_name_of_backward() -> None:
    class Vjp(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def vjp(ctx, g):
            return g * 9

    agree(Vjp, "reference", leaf(3))


def test_vjp_and_backward_together_raise_as_in_eager() -> None:
    class Both(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def vjp(ctx, g):
            return g * 9

        @staticmethod
        def backward(ctx, g):
            return g * 8

    def call(cls: Any) -> None:
        cls.apply(leaf(3)).sum().backward()

    assert raised(lambda: call(fusegrad.compile(Both))) == raised(lambda: call(Both))


def test_no_backward_raises_as_in_eager() -> None:
    class Forward(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

    fast = fusegrad.compile(Forward)
    assert torch.equal(fast.apply(leaf(3)), leaf(3) * 2)

    def call(cls: Any) -> None:
        cls.apply(leaf(3)).sum().backward()

    assert raised(lambda: call(fast)) == raised(lambda: call(Forward))


@pytest.mark.parametrize("name", ["RMSNorm", "Softmax", "SwiGLU", "CrossEntropy"])
def test_gradcheck(name) -> None:
    cls, args = SUITE[name]
    fast = fusegrad.compile(cls)

    def first(*given: Any) -> Any:
        return as_tuple(fast.apply(*given))[0]

    small = [g.detach()[..., :4].contiguous().requires_grad_() if torch.is_tensor(g) and g.requires_grad else g
             for g in args(torch.float64)]  # fmt: skip
    if name == "CrossEntropy":
        small[1] = small[1] % 4
    assert gradcheck(first, small)
    if name in ("RMSNorm", "Softmax"):
        assert gradgradcheck(lambda x, *rest: first(x, *rest), small) if name == "Softmax" else True


def test_gradgradcheck_of_a_function_without_intermediates() -> None:
    fast = fusegrad.compile(Cube)
    assert gradgradcheck(lambda x: fast.apply(x)[0], [leaf(4, dtype=torch.float64)])


@both
def test_hooks_on_leaves_outputs_and_nodes(backend) -> None:
    results = []
    for cls in (fusegrad.compile(Softmax, backend=backend), Softmax):
        x, seen = leaf(3, 4), []
        y = cls.apply(x)
        x.register_hook(lambda g, seen=seen: seen.append(g.clone()))
        y.register_hook(lambda g, seen=seen: seen.append(g.clone()))
        y.grad_fn.register_hook(lambda gi, go, seen=seen: seen.extend([*gi, *go]))
        y.grad_fn.register_prehook(lambda go, seen=seen: seen.extend(go))
        y.pow(2).sum().backward()
        results.append(seen)
    assert_same(*results)


@both
def test_anomaly_mode(backend) -> None:
    with torch.autograd.detect_anomaly(check_nan=False):
        agree(Softmax, backend, leaf(3, 4))


# ------------------------------------------------------------------ errors of the user's own
@pytest.mark.parametrize("style", ["TypeError", "shape"])
def test_an_exception_in_forward_is_the_users(style) -> None:
    class Raises(Function):
        @staticmethod
        def forward(ctx, x):
            if style == "TypeError":
                raise TypeError("forward refuses")
            return x @ x

        @staticmethod
        def backward(ctx, g):
            return g

    fast = fusegrad.compile(Raises)
    for _ in range(2):
        assert raised(lambda: fast.apply(leaf(2, 3))) == raised(lambda: Raises.apply(leaf(2, 3)))


def test_an_exception_in_backward_is_the_users() -> None:
    class Raises(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            raise KeyError("backward refuses")

    fast = fusegrad.compile(Raises)

    def call(cls: Any) -> None:
        cls.apply(leaf(3)).sum().backward()

    for _ in range(2):
        assert raised(lambda: call(fast)) == raised(lambda: call(Raises))


def test_a_condition_on_sizes_raises_for_the_sizes_that_break_it() -> None:
    class Even(Function):
        @staticmethod
        def forward(ctx, x):
            if x.shape[0] % 2:
                raise ValueError(f"{x.shape[0]} is odd")
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    fast = fusegrad.compile(Even)
    for n in (4, 6, 5, 8, 7, 5):
        if n % 2:
            assert raised(lambda n=n: fast.apply(leaf(n))) == (ValueError, f"{n} is odd")
        else:
            assert_same(run(fast, leaf(n)), run(Even, leaf(n)))
    assert status(fast) == "compiled"


# ------------------------------------------------------------------ identity
def test_the_class_is_still_itself() -> None:
    Fast = fusegrad.compile(RMSNorm)
    assert issubclass(Fast, RMSNorm) and issubclass(Fast, Function)
    for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
        assert getattr(Fast, attribute) == getattr(RMSNorm, attribute)
    assert Fast.forward is RMSNorm.forward and Fast.backward is RMSNorm.backward
    assert Fast.apply(leaf(2, 3), leaf(3))[0].grad_fn.name() == "RMSNormBackward"
    assert type(Fast.apply(leaf(2, 3), leaf(3))[0].grad_fn).__name__ == "RMSNormBackward"


def test_a_decorated_class_pickles_by_name() -> None:
    assert pickle.loads(pickle.dumps(samples.Decorated)) is samples.Decorated
    assert copy.deepcopy(samples.Decorated) is samples.Decorated
    assert samples.Decorated.__doc__ == "Doubles."


def test_compiling_twice_starts_from_the_users_class() -> None:
    Fast = fusegrad.compile(fusegrad.compile(RMSNorm))
    assert Fast._fusegrad_user_class is RMSNorm
    assert_same(run(Fast, leaf(3, 4), leaf(4)), run(RMSNorm, leaf(3, 4), leaf(4)))


def test_a_subclass_of_a_compiled_class_is_compiled_with_its_own_methods() -> None:
    class Tripled(samples.Decorated):
        @staticmethod
        def backward(ctx, g):
            return g * 3

    class Sextupled(Tripled):
        @staticmethod
        def backward(ctx, g):
            return Tripled.backward(ctx, g) * 2

    for cls, factor in ((samples.Decorated, 2.0), (Tripled, 3.0), (Sextupled, 6.0), (samples.Decorated, 2.0)):
        x = leaf(3)
        y = cls.apply(x)
        y.sum().backward()
        assert x.grad.tolist() == [factor] * 3
        assert y.grad_fn.name() == f"{cls.__name__}Backward"


def test_two_classes_of_one_name_do_not_share() -> None:
    def make(k: float) -> Any:
        class Made(Function):
            @staticmethod
            def forward(ctx, x):
                return x * k

            @staticmethod
            def backward(ctx, g):
                return g * k * 10

        return fusegrad.compile(Made)

    for k, cls in [(k, make(k)) for k in (2.0, 3.0)] * 2:
        x = leaf(3)
        cls.apply(x).sum().backward()
        assert x.grad.tolist() == [k * 10] * 3


def test_apply_taken_from_the_class_works() -> None:
    apply = fusegrad.compile(Softmax).apply
    assert_same([apply(leaf(3, 4)).detach()], [Softmax.apply(leaf(3, 4)).detach()])


@pytest.mark.parametrize("thing", [3, "text", None, object(), int, torch.nn.Linear])
def test_what_cannot_be_compiled(thing) -> None:
    if thing is None:
        assert callable(fusegrad.compile(thing))
        return
    with pytest.raises(TypeError, match=r"fusegrad.compile\("):
        fusegrad.compile(thing)


def test_flags_of_torch_keep_their_meaning() -> None:
    class Clearing(Saving):
        clear_saved_tensors_on_access = True

        @staticmethod
        def backward(ctx, g):
            x, y = ctx.saved_tensors
            return g * x * y

    agree(Clearing, "reference", leaf(3))


def test_custom_fwd_and_bwd() -> None:
    class Amp(Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g @ w.t(), x.t() @ g

    fast = fusegrad.compile(Amp)
    for on in (True, False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            assert_same(run(fast, leaf(2, 3), leaf(3, 4)), run(Amp, leaf(2, 3), leaf(3, 4)), bitwise=True)


@both
def test_nested_functions(backend) -> None:
    class Outer(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return Wrong.apply(x) * 2

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * Wrong.apply(x) * 2

    results = []
    for cls in (fusegrad.compile(Outer, backend=backend), Outer):
        x = leaf(4)
        (g,) = torch.autograd.grad(cls.apply(x).sum(), x, create_graph=True)
        results.append([g, *torch.autograd.grad(g.sum(), x)])
    assert_same(*results)


def test_a_compiled_function_inside_another() -> None:
    fast = fusegrad.compile(Wrong)

    class Outer(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return fast.apply(x) * 2

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return fast.apply(x * g)

    compiled = agree(Outer, "reference", leaf(4))
    assert status(compiled) == "compiled"


@both
def test_random_operations_follow_the_generator(backend) -> None:
    class Dropout(Function):
        @staticmethod
        def forward(ctx, x):
            mask = (torch.rand_like(x) > 0.5).to(x.dtype)
            ctx.save_for_backward(mask)
            return x * mask * 2

        @staticmethod
        def backward(ctx, g):
            (mask,) = ctx.saved_tensors
            return g * mask * 2

    fast = fusegrad.compile(Dropout, backend=backend)
    draws = []
    for cls in (fast, Dropout):
        torch.manual_seed(5)
        draws.append([t for _ in range(3) for t in run(cls, leaf(40))])
    if backend == "reference":
        assert_same(*draws, bitwise=True)
    y, g = draws[0][:2]
    assert torch.equal((y != 0).float() * 2, g)


@both
def test_what_an_operation_returns_as_a_view_is_no_view_for_the_user(backend) -> None:
    """einsum hands out a view of memory that nobody else sees; as a result it may be written to, as in eager."""
    y = fusegrad.compile(Linear, backend=backend).apply(leaf(3, 4), leaf(5, 4), None)
    assert not y._is_view()
    y.add_(1)
