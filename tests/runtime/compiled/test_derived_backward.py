"""A class with a jvp and no backward: its backward is the transpose of that jvp, in every composition, or an error."""

from typing import ClassVar

import pytest
import torch
from torch.autograd import Function
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap

import fusegrad
from fusegrad.runtime.specialize.linearity import NonLinearJvp

NO_BACKWARD = "You must implement either the backward or vjp method"


class FiveTimes(Function):
    """Its jvp is deliberately not the derivative of forward."""

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_forward(*inputs)
        ctx.factor = 5

    @staticmethod
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return ctx.factor * t * x.cos()


class OldStyle(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_forward(x)
        ctx.factor = 5
        return x.sin()

    jvp = staticmethod(FiveTimes.jvp)


class Mixed(Function):
    """Several arguments and outputs, a reduction, an attribute, an integer output, a default."""

    @staticmethod
    def forward(x, w, index, scale=2.0):
        return (x * w).sum(-1), x[index] * scale, index + 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, w, ctx.index, ctx.scale = inputs
        ctx.save_for_forward(x, w)

    @staticmethod
    def jvp(ctx, tx, tw, t_index, t_scale):
        assert t_index is None and t_scale is None
        x, w = ctx.saved_tensors
        return 3 * (tx * w).sum(-1) - (tw * x).sum(-1), tx[ctx.index] * ctx.scale, None


class Written(Function):
    @staticmethod
    def forward(x):
        return x.mul_(2)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_dirty(*inputs)

    @staticmethod
    def jvp(ctx, t):
        return t.mul_(7)


class Squared(FiveTimes):
    @staticmethod
    def jvp(ctx, t):
        return t * t.abs()  # not linear


class Clipped(FiveTimes):
    @staticmethod
    def jvp(ctx, t):
        return torch.special.bessel_j0(t)  # a library call that is in no table


class ReadsData(FiveTimes):
    @staticmethod
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return t * x.sum().item()


class Declared(FiveTimes):
    traceable: ClassVar = {"jvp": False}


class Halved(Function):
    """A Function whose derivative is not its own map."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return g / 2


class ThroughAnother(FiveTimes):
    @staticmethod
    def jvp(ctx, t):
        return Halved.apply(t)


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(3, 4, dtype=torch.float64, requires_grad=True)


def single(x):
    """The same in float32: what a kernel computes."""
    return x.detach().float().requires_grad_()


@pytest.mark.parametrize("cls", [FiveTimes, OldStyle])
@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_backward_is_the_transpose_of_jvp(cls, backend, x) -> None:
    fast = fusegrad.compile(cls, backend=backend)
    x = single(x)
    g = torch.randn_like(x)
    fast.apply(x).backward(g)
    torch.testing.assert_close(x.grad, 5 * g * x.detach().cos())


def by_hand(x):
    """What its derivatives, of any order, follow from: 5 sin has the derivative that the class claims."""
    return 5 * x.sin()


@pytest.mark.parametrize("cls", [FiveTimes, OldStyle])
@pytest.mark.parametrize(
    "compose",
    [
        lambda f, x: grad(lambda x: f(x).sum())(x),
        lambda f, x: vjp(f, x)[1](torch.ones_like(x))[0],
        lambda f, x: jacrev(f)(x),
        lambda f, x: hessian(lambda x: f(x).sum())(x),
        lambda f, x: vmap(grad(lambda x: f(x).sum()))(x),
        lambda f, x: grad(lambda x: vmap(f)(x).sum())(x),
        lambda f, x: grad(lambda x: grad(lambda x: f(x).sum())(x).sum())(x),
        lambda f, x: jvp(grad(lambda x: f(x).sum()), (x,), (x.cos(),))[1],
        lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True),
    ],
    ids="grad vjp jacrev hessian vmap(grad) grad(vmap) grad(grad) jvp(grad) vectorized".split(),
)
def test_under_transforms(cls, compose, x) -> None:
    x = x.detach()
    torch.testing.assert_close(compose(fusegrad.compile(cls).apply, x), compose(by_hand, x))


def test_double_backward(x) -> None:
    (first,) = torch.autograd.grad(fusegrad.compile(FiveTimes).apply(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, -5 * x.detach().sin())


@pytest.mark.parametrize("size", [3, 5])
def test_the_inner_products_agree(size) -> None:
    """<jvp(t), g> == <t, backward(g)>, for several arguments and outputs; one class serves every size."""
    x, w = torch.randn(size, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    index = torch.tensor([0, 2])
    fast = fusegrad.compile(Mixed)

    def f(x, w):
        return fast.apply(x, w, index)[:2]

    tangents = torch.randn_like(x), torch.randn_like(w)
    _, pushed = jvp(f, (x, w), tangents)
    gradients = tuple(torch.randn_like(p) for p in pushed)
    _, pull = vjp(f, x, w)
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    eager = torch.autograd.grad(f(*leaves), leaves, gradients)
    left = sum((p * g).sum() for p, g in zip(pushed, gradients, strict=True))
    for pulled in (pull(gradients), eager):
        torch.testing.assert_close(sum((t * g).sum() for t, g in zip(tangents, pulled, strict=True)), left)


def test_no_gradient_for_an_argument_that_needs_none(x) -> None:
    w = torch.randn(4, dtype=torch.float64)
    out, *_ = fusegrad.compile(Mixed).apply(x, w, torch.tensor([1]))
    out.sum().backward()
    assert w.grad is None
    torch.testing.assert_close(x.grad, (3 * w).expand(3, 4))


def test_in_place(x) -> None:
    fast = fusegrad.compile(Written)
    (found,) = torch.autograd.grad(fast.apply(x.clone()).sum(), x)
    torch.testing.assert_close(found, torch.full_like(x, 7))
    torch.testing.assert_close(grad(lambda x: fast.apply(x.clone()).sum())(x.detach()), torch.full_like(x, 7))


@pytest.mark.parametrize(
    "differentiate",
    [lambda f, x: f(x).sum().backward(), lambda f, x: grad(lambda x: f(x).sum())(x)],
    ids=["plain", "func"],
)
@pytest.mark.parametrize(
    ("cls", "line", "op"), [(Squared, "return t * t.abs()", "abs"), (Clipped, "return torch.special", "bessel_j0")]
)
def test_a_jvp_that_is_not_linear_is_refused_by_name_and_line(cls, line, op, differentiate, x) -> None:
    fast = fusegrad.compile(cls)
    for _ in range(2):
        with pytest.raises(NonLinearJvp, match="write a `backward`") as caught:
            differentiate(fast.apply, x)
        assert op in str(caught.value) and line in str(caught.value) and "test_derived_backward.py" in str(caught.value)
    _, pushed = jvp(fast.apply, (x,), (x.detach(),))
    torch.testing.assert_close(pushed, cls.jvp(None, x))
    record = fusegrad.explain(fast, x).methods["backward"]
    assert record.status == "absent" and op in record.reason


def test_transposed_through_a_function_that_it_calls_it_would_be_another_map(x) -> None:
    with pytest.raises(NonLinearJvp, match="another linear map"):
        fusegrad.compile(ThroughAnother).apply(x).sum().backward()


@pytest.mark.parametrize("cls", [ReadsData, Declared])
def test_without_a_captured_jvp_the_error_is_torchs(cls, x) -> None:
    fast = fusegrad.compile(cls)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=NO_BACKWARD):
            fast.apply(x).sum().backward()
        with pytest.raises(NotImplementedError, match=NO_BACKWARD):
            grad(lambda x: fast.apply(x).sum())(x)
    _, pushed = jvp(fast.apply, (x,), (x,))
    _, expected = jvp(cls.apply, (x,), (x,))
    torch.testing.assert_close(pushed, expected)
    assert fusegrad.explain(fast, x).methods["backward"].status == "absent"


def test_another_jvp_in_its_place_is_the_one_that_is_transposed(x) -> None:
    class Changing(FiveTimes):
        pass

    fast = fusegrad.compile(Changing)
    grad(lambda x: fast.apply(x).sum())(x.detach())
    Changing.jvp = staticmethod(lambda ctx, t: 11 * t)
    torch.testing.assert_close(torch.autograd.grad(fast.apply(x).sum(), x)[0], torch.full_like(x, 11))


def test_nested_in_another(x) -> None:
    """Called by a method that is captured, it is differentiated by its jvp there as well."""
    inner = fusegrad.compile(FiveTimes)
    outer = fusegrad.compile(lambda x: 2 * inner.apply(x))
    (found,) = torch.autograd.grad(outer(x).sum(), x)
    torch.testing.assert_close(found, 10 * x.detach().cos())
    torch.testing.assert_close(grad(lambda x: outer(x).sum())(x.detach()), 10 * x.detach().cos())


def test_with_trees(x) -> None:
    fast = fusegrad.compile(FiveTimes, pytree=True)
    torch.testing.assert_close(torch.autograd.grad(fast.apply(x).sum(), x)[0], 5 * x.detach().cos())


def test_checkpointed_and_under_saved_tensor_hooks(x) -> None:
    fast, seen = fusegrad.compile(FiveTimes), []
    found = torch.utils.checkpoint.checkpoint(fast.apply, x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), x)[0], 5 * x.detach().cos())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        y = fast.apply(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 5 * x.detach().cos())
    assert len(seen) == 1


def test_a_write_to_what_jvp_reads_is_noticed(x) -> None:
    middle = x * 1
    y = fusegrad.compile(FiveTimes).apply(middle)
    middle.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_explain_and_records(x) -> None:
    fast = fusegrad.compile(FiveTimes)
    fast.apply(x).sum().backward()
    record = fusegrad.explain(fast, x).methods["backward"]
    assert (record.status, record.reason) == ("derived", "the transpose of jvp")
    assert fast.apply(x).grad_fn.name() == "FiveTimesBackward"


@pytest.mark.parametrize("lower", [torch.float16, torch.bfloat16])
def test_rounding_on_the_way_is_no_other_map(lower, x) -> None:
    class Rounded(FiveTimes):
        @staticmethod
        def jvp(ctx, t):
            return 5 * t.to(lower).to(t.dtype)

    (found,) = torch.autograd.grad(fusegrad.compile(Rounded).apply(x).sum(), x)
    torch.testing.assert_close(found, torch.full_like(x, 5))


def test_check_compares_with_the_transpose_in_eager(x) -> None:
    report = fusegrad.check(FiveTimes, x, transforms=["vmap(grad)", "jvp"])
    assert report.ok and {"backward", "vmap(grad)"} <= {r.mode for r in report.rows if r.result in ("ok", "derived")}
