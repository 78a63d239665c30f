"""The comparison of each first call: it finds what fake tensors hide, and takes little memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from function_samples import Linear, Softmax, assert_same, leaf, run, status
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode

import fusegrad
from fusegrad.runtime.execution.intermediates import intermediate_bytes
from fusegrad.runtime.values.bitwise import bitwise_difference, cut_small
from fusegrad.tracer.capture.capture import Session
from fusegrad.tracer.reads.reads import scan

n, m = sympy.symbols("n m", integer=True, positive=True)


# ------------------------------------------------------------------ differs
def test_equal_calls_do_not_differ() -> None:
    x = torch.tensor([1.0, float("nan"), float("inf"), -0.0])
    assert bitwise_difference(lambda a: [a[0] * 2], lambda a: [a[0] * 2], [x]) is None


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (lambda a: [a[0] * 2 + 1e-6], "content"),
        (lambda a: [a[0] * 2, a[0]], "returns 1 values"),
        (lambda a: [(a[0] * 2).double()], "is float32"),
        (lambda a: [(a[0] * 2)[None]], "is float32[4] traced and float32[1, 4]"),
        (lambda a: [None], "a tensor in one"),
        (lambda a: [torch.where(a[0] == 2, float("nan"), a[0] * 2)], "content"),
        (lambda a: [a[0].mul_(2)], "content"),
    ],
)
def test_differences_are_described(other, why) -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert why in str(bitwise_difference(lambda a: [a[0] * 2], other, [x]))
    assert x.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_both_calls_get_the_same_random_numbers_and_the_generator_is_left_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    draw = lambda a: [torch.rand_like(a[0])]  # noqa: E731
    assert bitwise_difference(draw, draw, [torch.ones(4)]) is None
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("given", [torch.randn(3, 4).t(), torch.randn(4)[::2], torch.randn(1, 3).expand(2, 3),
                                   torch.randn(3) * 1j, torch.ones(0, 3), torch.ones([])])  # fmt: skip
def test_arguments_keep_their_layout(given) -> None:
    def call(args):
        assert args[0].stride() == given.stride() and torch.equal(args[0], given) and args[0] is not given
        return [args[0] * 2]

    assert bitwise_difference(call, call, [given, 3]) is None


# ------------------------------------------------------------------ cut inputs
def fakes_of(*tensors: torch.Tensor) -> tuple[Session, list[Any], dict[Any, int]]:
    from fusegrad.runtime.values.sizes import Binder

    session = Session()
    fakes = [session.fake(t) for t in tensors]
    return session, fakes, Binder(fakes)(tensors)


def test_cut_tensors_keep_their_relations_layout_and_values() -> None:
    tensors = torch.randn(300, 400), torch.randn(400), torch.randn(500, 300).t()
    _, fakes, sizes = fakes_of(*tensors)
    small = cut_small(tensors, fakes, sizes, [])
    assert small is not None and all(max(t.shape) < 20 for t in small)
    for s, t in zip(small, tensors, strict=True):
        assert torch.equal(s, t[tuple(slice(0, k) for k in s.shape)])
    assert small[2].stride()[0] == 1


def test_cut_respects_conditions() -> None:
    (x,) = tensors = (torch.randn(300),)
    _, fakes, sizes = fakes_of(x)
    (symbol,) = sizes
    assert cut_small(tensors, fakes, sizes, [symbol > 10])[0].shape[0] > 10
    assert cut_small(tensors, fakes, sizes, [symbol > 200]) is None
    assert cut_small(tensors, fakes, sizes, [sympy.Eq(symbol % 8, 0)])[0].shape[0] % 8 == 0


def test_cut_indices_stay_inside() -> None:
    tensors = torch.randn(300, 400), torch.randint(0, 400, (300,)), torch.full((300,), -100)
    _, fakes, sizes = fakes_of(*tensors)
    small = cut_small(tensors, fakes, sizes, [])
    assert small[1].max() < small[0].shape[1] and small[1].min() >= 0 and (small[2] == -100).all()


def test_small_sizes_are_not_enlarged() -> None:
    tensors = torch.randn(2, 3), None, 5
    _, fakes, sizes = fakes_of(tensors[0])
    small = cut_small(tensors, [*fakes, None, None], sizes, [])
    assert small[0].shape == (2, 3) and small[1:] == [None, 5]


def test_intermediate_bytes_do_not_count_views() -> None:
    x = torch.randn(10, 20)
    session, fakes, sizes = fakes_of(x)

    def body(x):
        return ((x.unsqueeze(0) * x.unsqueeze(1)).t() if False else (x.t() * 2 + 1).double(),)

    found = session.trace(body, fakes, scan(body))
    assert intermediate_bytes(found.graph_module, sizes) == 200 * (4 + 4 + 8)


# ------------------------------------------------------------------ lies are found
class Lies(Function):
    """What fakes hide: a method that treats sizes and types as objects."""

    mode = ""

    @staticmethod
    def forward(ctx, x, how):
        hidden = {
            "int": lambda: isinstance(x.shape[0], int),
            "type": lambda: type(x) is torch.Tensor,
            "text": lambda: str(x.shape) == f"torch.Size([{', '.join(str(int(k)) for k in x.size())}])" and False,
            "class": lambda: x.__class__.__name__ == "Tensor",
        }[how]()
        return x * (2 if hidden else 3)

    @staticmethod
    def backward(ctx, g):
        return g, None


@pytest.mark.parametrize("how", ["int", "type", "class"])
@pytest.mark.parametrize("size", [5, 3_000_000])
def test_a_lie_in_forward(how, size) -> None:
    fast = fusegrad.compile(Lies)
    x = torch.ones(size)
    with pytest.warns(fusegrad.FallbackWarning, match="differs in content"):
        assert torch.equal(fast.apply(x, how), Lies.apply(x, how))
    assert status(fast) == "opaque"


@pytest.mark.parametrize("size", [5, 3_000_000])
def test_a_lie_in_backward(size) -> None:
    class Late(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2 if type(g) is torch.Tensor else g * 5

    fast = fusegrad.compile(Late)
    for _ in range(2):
        x = torch.ones(size, requires_grad=True)
        y = fast.apply(x)
        if status(fast, "backward") == "opaque":
            y.sum().backward()
        else:
            with pytest.warns(fusegrad.FallbackWarning, match="Late.backward.*differs in content"):
                y.sum().backward()
        assert x.grad[0] == 2 and x.grad[-1] == 2
    assert (status(fast), status(fast, "backward")) == ("compiled", "opaque")


def test_random_methods_are_compared_with_the_same_numbers() -> None:
    class Dropout(Function):
        @staticmethod
        def forward(ctx, x):
            return x * (torch.rand_like(x) > 0.5)

        @staticmethod
        def backward(ctx, g):
            return g

    fast = fusegrad.compile(Dropout)
    torch.manual_seed(1)
    mine = [fast.apply(torch.ones(50)) for _ in range(2)]
    torch.manual_seed(1)
    assert_same(mine, [Dropout.apply(torch.ones(50)) for _ in range(2)], bitwise=True)
    assert status(fast) == "compiled"


def test_a_write_to_an_argument_happens_once_in_spite_of_the_check() -> None:
    class InPlace(Function):
        @staticmethod
        def forward(ctx, x):
            x.add_(1)
            ctx.mark_dirty(x)
            return x

        @staticmethod
        def backward(ctx, g):
            return g

    fast = fusegrad.compile(InPlace)
    x = torch.zeros(3)
    for k in (1, 2, 3):
        fast.apply(x)
        assert x.tolist() == [k] * 3


def test_data_that_is_legal_only_whole_does_not_refuse_the_method() -> None:
    """Cut to a few rows, `index` points outside: the method fails there, and is compiled all the same."""

    class Rows(Function):
        @staticmethod
        def forward(ctx, x, start):
            ctx.n = x.shape[0]
            return x[torch.arange(start, start + 3)].sum() + (x * 2).sum()

        @staticmethod
        def backward(ctx, g):
            return g.expand(ctx.n), None

    x = torch.ones(5_000_000)
    with fusegrad.config.patch(check_bytes=1):
        fast = fusegrad.compile(Rows)
        assert fast.apply(x, 100) == Rows.apply(x, 100)
    assert status(fast) == "compiled"


# ------------------------------------------------------------------ memory
_PROBE = """
import resource, sys, torch
sys.path.insert(0, {folder!r})
import fusegrad
from function_samples import Linear
if sys.argv[1] == "compiled":
    Linear = fusegrad.compile(Linear)
def used():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
x, w, b = (torch.randn(*s, requires_grad=True) for s in ((512, 1024), (1024, 1024), (1024,)))
(x @ w.t()).sum().backward()
small = [torch.randn(*s, requires_grad=True) for s in ((2, 3), (4, 3), (4,))]
if sys.argv[1] == "compiled":
    Linear.apply(*small).sum().backward()
start = used()
y = Linear.apply(x, w, b)
forward = used() - start
y.backward(torch.randn_like(y))
print(forward, used() - start)
"""


@pytest.mark.slow
def test_a_linear_layer_without_its_product_of_every_row_and_column(tmp_path: Path) -> None:
    """Eager's broadcast product is 512 x 1024 x 1024 x 4 bytes = 2 GiB; ours, the first call's check included, a
    fiftieth of it."""
    script = tmp_path / "probe.py"
    script.write_text(_PROBE.format(folder=str(Path(__file__).parents[1])))
    answer = subprocess.run([sys.executable, str(script), "compiled"], capture_output=True, text=True, check=True)
    forward, whole = map(int, answer.stdout.split())
    product = 512 * 1024 * 1024 * 4
    assert forward < product / 50 and whole < product / 50


def test_a_heavy_method_is_right_and_compiled() -> None:
    fast = fusegrad.compile(Linear)
    args = leaf(512, 256), leaf(512, 256), leaf(512)  # a product of 256 MiB: checked on cut inputs
    y = fast.apply(*args)
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(y, torch.nn.functional.linear(*args), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(args[1].grad, torch.ones(512, 512) @ args[0].detach(), rtol=1e-3, atol=1e-3)
    assert status(fast) == status(fast, "backward") == "compiled"


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_backward_under_a_mode_of_someone_elses_is_not_refused_for_good() -> None:
    fast = fusegrad.compile(Softmax)
    x = leaf(3, 4)
    y = fast.apply(x)
    with Watching(), pytest.warns(fusegrad.FallbackWarning, match="a TorchDispatchMode"):
        y.pow(2).sum().backward()
    assert status(fast, "backward") != "opaque"
    expected = run(Softmax, leaf(3, 4), gradient=lambda o: 2 * o.detach())
    assert_same([x.grad], expected[1:])
    assert_same(run(fast, leaf(3, 4)), run(Softmax, leaf(3, 4)))
    assert status(fast, "backward") == "compiled"


def test_patch_check_bytes_decides() -> None:
    for limit in (0, 1 << 40):
        with fusegrad.config.patch(check_bytes=limit):
            fast = fusegrad.compile(Softmax)
            assert_same(run(fast, leaf(50, 60)), run(Softmax, leaf(50, 60)))
            assert status(fast) == "compiled"


class Padded(Function):
    """What is beside the argument is memory that nobody wrote to."""

    @staticmethod
    def forward(ctx, x):
        padded = torch.empty(x.shape[0], 2 * x.shape[1])
        padded[:, : x.shape[1]] = x
        return padded

    @staticmethod
    def backward(ctx, g):
        found = g.new_empty(g.shape[0], g.shape[1])
        found[:, : g.shape[1] // 2] = g[:, : g.shape[1] // 2]
        return found[:, : g.shape[1] // 2]


class PaddedLie(Padded):
    @staticmethod
    def forward(ctx, x):
        padded = torch.empty(x.shape[0], 2 * x.shape[1])
        padded[:, : x.shape[1]] = x + (0.0 if lies(x) else 1.0)
        return padded


def lies(x: torch.Tensor) -> bool:
    return isinstance(x, FakeTensor)


def _with_junk(n: int) -> torch.Tensor:
    """A leaf, made after memory of its size was let go with other numbers in it each time."""
    for size in (64 * 64, 2 * 64 * 64):
        del [torch.full((size,), float(n + k)) for k in range(4)][:]
    return leaf(64, 64)


def test_memory_that_nobody_wrote_to_is_no_difference() -> None:
    fast = fusegrad.compile(Padded)
    for n in range(4):
        x = _with_junk(n)
        out = fast.apply(x)
        assert torch.equal(out[:, :64], x)
        assert torch.equal(torch.autograd.grad(out[:, :64].sum(), x)[0], torch.ones(64, 64))
    assert (status(fast, "forward"), status(fast, "backward")) == ("compiled", "compiled")


def test_a_lie_beside_such_memory_is_found() -> None:
    fast = fusegrad.compile(PaddedLie)
    with pytest.warns(fusegrad.FallbackWarning, match="differs in content"):
        x = _with_junk(7)
        assert torch.equal(fast.apply(x)[:, :64], x + 1)
