"""What random programs found, made small."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F

import fusegrad
from fusegrad.ir.passes.fuse import Group
from fusegrad.tracer.capture.metadata import Fakes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_number_to_the_power_of_a_narrow_float(dtype: torch.dtype) -> None:
    """Program 30017: the number had the narrow type, beside an exponent that is held in float32."""

    def power(x: torch.Tensor) -> torch.Tensor:
        return 2.0 ** x.clamp(-2, 2)

    x = torch.linspace(-3, 3, 9).to(dtype).requires_grad_()
    fast = fusegrad.compile(power, backend="interpret", fullgraph=True)
    torch.testing.assert_close(fast(x), power(x))
    found = [torch.autograd.grad(call(x).sum(), x)[0] for call in (fast, power)]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("name", ["any", "all"])
def test_any_and_all_of_nothing(name: str, backend: str) -> None:
    """Program 1773: the largest of no numbers is the least integer, which is not 0 and counted as true."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return getattr(x > 0, name)(1, keepdim=True).float() * 2

    x = torch.zeros(2, 0, 3)
    assert torch.equal(fusegrad.compile(program, backend=backend, fullgraph=True)(x), program(x))


DRAWS = {
    "into memory like a turned tensor": lambda x: torch.empty_like(torch.rot90(x, 1, (-2, -1))).normal_(),
    "like a transposed tensor": lambda x: torch.rand_like(x.t() * 2),
    "in place": lambda x: (x.t() * 3).uniform_(),
    "in place, by a chance": lambda x: (x.t().exp() + 1).bernoulli_(0.5),
    "in place, by chances": lambda x: (x.t() * 2).bernoulli_(x.t().sigmoid()[:, :1].contiguous()),
    "dropout": lambda x: torch.dropout(x.t() * 2, 0.5, True),
    "numbers of rows": lambda x: torch.multinomial((x.t() * 2).exp(), 2).float(),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_random_numbers_come_in_the_order_of_memory(draw: str) -> None:
    """Program 2520: kernels lay a value out row by row, and what torch drew into it came in that order."""

    class Draws(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return DRAWS[draw](x)

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> None:
            return None

    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    fast, found = fusegrad.compile(Draws, backend="interpret", fullgraph=True), []
    for call in (fast.apply, fast.apply, Draws.apply):
        torch.manual_seed(0)
        found.append(call(x))
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[2])


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_forward_mode_of_what_has_no_linear_vjp(backend: str) -> None:
    """Program 3189: torch pulls back through the logarithm of a gradient, whose derivative at 0 is no number."""
    x, t = torch.linspace(-1, 2, 12).reshape(3, 4), torch.linspace(1, -2, 12).reshape(3, 4)
    fast = fusegrad.compile(lambda x: x.logcumsumexp(1), backend=backend)
    found, expected = (torch.func.jvp(f, (x,), (t,)) for f in (fast, lambda x: x.logcumsumexp(1)))
    torch.testing.assert_close(found, expected)


def test_forward_mode_goes_by_the_jvp_of_a_function_that_is_called() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x.sin()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return 3 * g

        @staticmethod
        def jvp(ctx: Any, t: torch.Tensor) -> torch.Tensor:
            return 7 * t * ctx.saved_tensors[0]

    def plain(x: torch.Tensor) -> torch.Tensor:
        return Wrong.apply(x * 2)

    x, t = torch.tensor([0.5, -1.0]), torch.ones(2)
    for backend in ("reference", "interpret"):
        inner = fusegrad.compile(Wrong, backend=backend)
        for function in (plain, lambda x, inner=inner: inner.apply(x * 2)):
            fast = fusegrad.compile(function, backend=backend)
            torch.testing.assert_close(torch.func.jvp(fast, (x,), (t,))[1], 28 * x)
            torch.testing.assert_close(torch.func.grad(lambda x, f=fast: f(x).sum())(x), torch.full((2,), 6.0))
            slope = torch.func.grad(lambda x, f=fast: torch.func.jvp(f, (x,), (t,))[1].sum())
            torch.testing.assert_close(slope(x), torch.full((2,), 28.0))


@pytest.mark.parametrize("product", [lambda x: x @ x.mT, lambda x: torch.matmul(x, x[0])])
def test_a_product_is_written_to_in_place(product: Any) -> None:
    """Program 2309: taken apart, it ended in a view, which autograd lets nobody write to."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return product(x)

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g.sum().expand(2, 3, 3)

    for target in (Product, product):
        fast = fusegrad.compile(target, backend="reference", fullgraph=True)
        x = torch.ones(2, 3, 3, requires_grad=True)
        y = (fast.apply if target is Product else fast)(x)
        assert not y._is_view() and bool((y.add_(1) == product(x) + 1).all())


def test_a_capture_that_was_interrupted_leaves_nothing_behind() -> None:
    """An interrupt in the middle of torch's fake mode left it believing that it ran a kernel."""

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g * ctx.saved_tensors[0].cos()

    others = {id(mode) for mode in _fake_modes()}  # of captures that other tests go on with
    fast, x = fusegrad.compile(Sine, backend="reference", fullgraph=True), torch.ones(3, requires_grad=True)
    y = fast.apply(x)
    for mode in _fake_modes():
        if id(mode) not in others:
            mode.in_kernel_invocation = True
    y.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_a_fake_mode_that_was_interrupted_tells_devices_again() -> None:
    mode = Fakes()
    with mode:
        fake = torch.empty(3)
    with pytest.raises(KeyboardInterrupt), mode:
        mode.in_kernel_invocation = True
        raise KeyboardInterrupt
    assert fake.device == torch.device("cpu")


def _fake_modes() -> list[Fakes]:
    return [o for o in gc.get_objects() if type(o) is Fakes]


def test_a_sum_that_leaves_expanded_is_computed_once() -> None:
    """Program 2970: it was written to the expanded memory within a loop, and computed again at every turn."""

    class Sums(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.stack([y, y * 2], 1)

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            return g.sum().expand(5, 16, 3), g.sum().expand(5, 1, 3)

    fast = fusegrad.compile(Sums, backend="interpret", fullgraph=True)
    x, y = torch.ones(5, 16, 3, requires_grad=True), torch.ones(5, 1, 3, requires_grad=True)
    steps = fusegrad.explain(fast, x, y).directions["backward"].steps
    (group,) = (step for step in steps if isinstance(step, Group))
    assert [v.shape for v in group.outputs] == [()]
    found = torch.autograd.grad(fast.apply(x, y).sum(), (x, y))
    assert found[0].stride() == (0, 0, 0) and all(bool((g == 30).all()) for g in found)


def test_the_tangent_of_what_is_written_is_written_last() -> None:
    """Program 3328: the tangent of another output was the very tensor that the written argument's went into."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            x.mul_(1.5)
            ctx.mark_dirty(x)
            return x.exp(), x

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
            return g

    fast, t = fusegrad.compile(Scaled, fullgraph=True), torch.tensor([3.0, 4.0])
    _, found = torch.func.jvp(lambda x: fast.apply(x.clone()), (torch.ones(2),), (t.clone(),))
    assert found[0].tolist() == t.tolist() and found[1].tolist() == [0.0, 0.0]


def test_a_second_derivative_where_nothing_moves() -> None:
    """Program 2524: forward mode over a gradient that does not depend on the argument."""
    fast = fusegrad.compile(lambda x: x.as_strided(x.shape, x.stride()))
    assert torch.func.hessian(fast)(torch.ones(())).item() == 0.0


@pytest.mark.parametrize("f", [F.hardsigmoid, F.hardshrink, F.mish])
def test_forward_mode_where_backward_has_no_derivative(f: Any) -> None:
    """Program 3784: torch cannot differentiate the backward of hardsigmoid, and has a forward mode for it."""
    fast, x = fusegrad.compile(lambda x: f(x)), torch.linspace(-4, 4, 9)
    for transform in (torch.func.vmap, lambda f: f):
        found, expected = (torch.func.jvp(transform(g), (x,), (x + 1,))[1] for g in (fast, f))
        torch.testing.assert_close(found, expected)


def test_results_that_are_equal_have_memory_of_their_own() -> None:
    """Program 10486: beside an outer product `maximum(v, v)` was `v` itself."""

    def outer(x: torch.Tensor, y: torch.Tensor) -> Any:
        v = torch.outer(x, x)
        return torch.maximum(v, v), v, x @ y @ x

    first, second, _ = fusegrad.compile(outer)(torch.ones(2), torch.ones(2, 2))
    assert first.data_ptr() != second.data_ptr()


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_sizes_are_not_read_off_strides_that_a_hook_may_change(backend: str) -> None:
    """Program 12670: a length of the argument was known by the stride of what was saved alone."""

    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x.chunk(2, -1)[-1])
            ctx.shape = x.shape
            return x.chunk(2, -1)[-1].clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return (g * ctx.saved_tensors[0]).sum().expand(ctx.shape)

    fast = fusegrad.compile(Half, backend=backend, fullgraph=True)
    for columns in (3, 5):
        x = torch.ones(2, columns, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t.contiguous().clone()):
            y = fast.apply(x)
        y.sum().backward()
        assert x.grad is not None and x.grad.tolist() == [[2.0 * (columns // 2)] * columns] * 2


@pytest.mark.parametrize("step", [lambda x: x, lambda x: x + 1, lambda x: x * 2], ids=["itself", "plus", "times"])
def test_a_gradient_that_is_a_weight_keeps_its_history(step: Any) -> None:
    """Program 7309: `autograd.grad` without a graph returns the weight itself, where nothing is done."""

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                return torch.autograd.grad(step(x), x, g)[0]

    tracked = []
    for f in (Inner, fusegrad.compile(Inner)):
        x, g = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        tracked.append(torch.autograd.grad(f.apply(x), x, g, create_graph=True)[0].requires_grad)
    assert tracked[0] == tracked[1]


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("f", [F.hardshrink, F.softshrink])
def test_the_derivative_of_what_shrinks_is_torchs_own(f: Any, backend: str) -> None:
    """Program 11031: that of its decomposition made an infinite gradient NaN, and took the layout of the argument."""
    x = torch.tensor([[0.0, 0.5, -0.6], [3.0, float("nan"), -0.5]])
    for g in (torch.ones(3, 2).t(), torch.full((2, 3), float("inf"))):
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        f(a).backward(g)
        fusegrad.compile(lambda x: f(x), backend=backend)(b).backward(g)
        torch.testing.assert_close(b.grad, a.grad, equal_nan=True, rtol=0, atol=0)
        assert b.grad is not None and a.grad is not None and b.grad.stride() == a.grad.stride()


NUMBERS = {"a float32 number": torch.tensor(0.3), "a float32 row": torch.ones(4), "bfloat16": torch.ones(4).bfloat16()}


@pytest.mark.parametrize("other", NUMBERS)
@pytest.mark.parametrize("name", ["logaddexp", "addcmul", "fmax", "atan2", "hypot", "xlogy"])
def test_formulas_promote_as_torch_does(name: str, other: str) -> None:
    """Program 16960: a half beside a number (no axis) of float32 became float32 on kernels."""
    y = NUMBERS[other]

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(x, x, y) if name == "addcmul" else getattr(torch, name)(x, y)

    x = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float16)
    fast = fusegrad.compile(f, backend="interpret", fullgraph=True)
    torch.testing.assert_close(fast(x, y), f(x, y))


@pytest.mark.parametrize("dim", [0, 1])
def test_forward_mode_by_forward_mode_within_dual_numbers(dim: int) -> None:
    """Program 3189: torch allows one level of dual numbers, and the rule of `logcumsumexp` opened another."""
    fast, x = fusegrad.compile(lambda x: x.logcumsumexp(dim)), torch.linspace(-1, 2, 6).view(2, 3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x + 1)
        found, expected = (forward_ad.unpack_dual(f(dual)).tangent for f in (fast, lambda x: x.logcumsumexp(dim)))
    torch.testing.assert_close(found, expected)
    found, expected = (
        torch.func.jvp(lambda x, f=f: torch.func.jvp(f, (x,), (x + 1,))[1], (x,), (x,))[1]
        for f in (fast, lambda x: x.logcumsumexp(dim))
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("f", [torch.sgn, torch.floor, lambda x: torch.round(x).view(x.shape)])
def test_zeros_without_memory_that_a_view_needs_as_memory(f: Any, backend: str) -> None:
    """Program 46867: autograd's zeros of `sgn`, seen through a view, were copied from the meta device."""
    fast = fusegrad.compile(lambda x: f(x.view_as(x)), backend=backend)
    for x in (torch.tensor(0.7), torch.ones(2, 3)):
        x.requires_grad_()
        fast(x).sum().backward()
        assert x.grad is not None
        assert (x.grad + 1).tolist() == torch.ones_like(x).tolist()  # zeros of eager themselves may have no memory


def test_a_tangent_has_the_dtype_of_its_result() -> None:
    """Program 55683: torch.func makes float64 of a float32 number beside one of Python, which dual numbers do not."""
    fast = fusegrad.compile(lambda x, y: (F.hardsigmoid(x), torch.acosh(y.abs() + 1.5)))
    x = torch.tensor(0.3)
    with forward_ad.dual_level():
        found = fast(forward_ad.make_dual(x, x + 1), forward_ad.make_dual(x + 2, x + 1))
        assert [forward_ad.unpack_dual(t).tangent.dtype for t in found] == [torch.float32] * 2


@pytest.mark.parametrize("dims", [(0, 0), (0, 1), (1, 0), (2, 1), (4, 0)])
def test_lanes_that_have_no_view(dims: tuple[int, int]) -> None:
    """Program 56608: a view of each lane is no view of them all."""

    class Ordered(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            y = torch.asin(x.clamp(-0.9, 0.9))
            y = y @ y.mT
            return y.scatter(-1, y.argsort(-1), 2)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g.sum(-1, keepdim=True)

    fast, x = fusegrad.compile(Ordered), torch.randn(3, 2, 2, 2, 1)
    found, expected = (torch.func.vmap(torch.func.vmap(f.apply, dims[1]), dims[0])(x) for f in (fast, Ordered))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("saves", ["save_for_backward", "save_for_forward"])
@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("dirty", [False, True])
def test_an_argument_that_is_returned_as_it_is_and_saved(saves: str, marks: bool, dirty: bool) -> None:
    """Program 83140: torch refuses most of such calls, by who requires grad; no compiled call is let through."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x, (x.mul_(2) if dirty else x).sqrt(), x

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            getattr(ctx, saves)(*inputs)
            if dirty:
                ctx.mark_dirty(*inputs)
            if marks:
                ctx.mark_non_differentiable(output[0])

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> torch.Tensor:
            return gradients[0]

    def outcome(f: Any, tracked: bool, recorded: bool) -> Any:
        x = torch.rand(3, requires_grad=tracked)
        with torch.set_grad_enabled(recorded):
            try:
                return [(o.requires_grad, o is x) for o in f.apply(x.clone() if dirty else x)]
            except Exception as error:
                return f"{error}"[:50]

    found = [
        [outcome(f, tracked, recorded) for tracked in (False, True) for recorded in (False, True)]
        for f in (fusegrad.compile(Twice), Twice)
    ]
    assert found[0] == found[1]


def test_containers_and_plain_functions_may_keep_what_they_return() -> None:
    fast = fusegrad.compile(lambda x: (x, x.sin()), fullgraph=True)
    x = torch.rand(3, requires_grad=True)
    torch.testing.assert_close(torch.autograd.grad(sum(o.sum() for o in fast(x)), x)[0], 1 + x.detach().cos())
