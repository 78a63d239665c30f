"""T4: a nested call that is not traceable runs as written, once, between the compiled segments of its caller."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import Function

import fusegrad
from fusegrad import NotTraceableError
from fusegrad.runtime.fallback.records import FallbackWarning

Tensor = torch.Tensor
SEEN: list[Any] = []
both = pytest.mark.parametrize("backend", ["reference", "interpret"])


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    SEEN.clear()
    yield
    SEEN.clear()


def saw(ctx: Any, name: str, *tensors: Tensor) -> None:
    """What an opaque body can see of its call; it must never see anything but plain tensors."""
    assert all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors)
    SEEN.append((name, ctx.needs_input_grad, torch.is_grad_enabled(), [tuple(t.shape) for t in tensors]))


class Sort(Function):
    """numpy, declared opaque."""

    is_traceable = False

    @staticmethod
    def forward(ctx, x):
        saw(ctx, "sort", x)
        values = np.sort(x.detach().numpy(), axis=-1)
        order = torch.from_numpy(np.argsort(x.detach().numpy(), axis=-1, kind="stable"))
        ctx.save_for_backward(order)
        return torch.from_numpy(values)

    @staticmethod
    def backward(ctx, g):
        (order,) = ctx.saved_tensors
        saw(ctx, "sort backward", g)
        return torch.zeros_like(g).scatter(-1, order, g)


class Noted(Function):
    """An identity that keeps a list of what went through."""

    is_traceable = False

    @staticmethod
    def forward(ctx, x, name="noted"):
        saw(ctx, name, x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class Unique(Function):
    """Auto: nothing is declared, and numpy decides the size of the result."""

    @staticmethod
    def forward(ctx, x):
        SEEN.append("unique") if type(x) is Tensor else None
        return torch.from_numpy(np.unique(x.detach().numpy()))

    @staticmethod
    def backward(ctx, g):
        return None


class SortedSoftmax(Function):
    """A softmax over values that numpy sorted."""

    @staticmethod
    def forward(ctx, x):
        s = Sort.apply(x * 2 + 1)
        e = (s - s.amax(-1, keepdim=True)).exp()
        y = e / e.sum(-1, keepdim=True)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        inner = y * (g - (g * y).sum(-1, keepdim=True))
        return inner * 2 + x * 0


class BothWays(Function):
    """Opaque in forward and in backward."""

    @staticmethod
    def forward(ctx, x, w):
        s = Sort.apply(x.sin() * w)
        ctx.save_for_backward(x, s)
        return s.exp() * x

    @staticmethod
    def backward(ctx, g):
        x, s = ctx.saved_tensors
        t = Sort.apply(g * s)
        return t.cos() + x, (t * x).sum(0)


class OnlyBackward(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin() * 2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return Sort.apply(g * x).cos() * 2


class InOrder(Function):
    @staticmethod
    def forward(ctx, x):
        a = Noted.apply(x + 1, "first")
        b = x.exp() * 2
        c = Noted.apply(b, "second")
        d = Noted.apply(a * c, "third")
        return d - a

    @staticmethod
    def backward(ctx, g):
        return Noted.apply(Noted.apply(g * 2, "fourth") + 1, "fifth")


class Sizes(Function):
    """The size of the result is known only by running."""

    @staticmethod
    def forward(ctx, x):
        u = Unique.apply((x * 2).round())
        ctx.n = u.shape[0]
        ctx.save_for_backward(x, u)
        return u.exp() - u.mean(), x + u.sum()

    @staticmethod
    def backward(ctx, g, h):
        x, u = ctx.saved_tensors
        return h * ctx.n + (g * u).sum() * x


class InsideAnother(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return fast_softmax.apply(x.sin()) * 3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos()


fast_softmax = fusegrad.compile(SortedSoftmax)


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def outcome(cls: Any, *args: Any) -> tuple[list[Any], list[Any]]:
    """(results with gradients, what opaque bodies saw) of a call with its backward."""
    SEEN.clear()
    fresh = [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args]
    outputs = cls.apply(*fresh)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    live = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
    wanted = [a for a in fresh if isinstance(a, Tensor) and a.requires_grad]
    gradients = [torch.arange(1.0, o.numel() + 1, dtype=o.dtype).reshape(o.shape) for o in live]
    found = torch.autograd.grad(live, wanted, gradients, allow_unused=True) if live else ()
    return [*(o.detach() if isinstance(o, Tensor) else o for o in outputs), *found], list(SEEN)


def same(mine: list[Any], theirs: list[Any], exact: bool) -> None:
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        if not isinstance(b, Tensor):
            assert type(a) is type(b) and a == b
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        torch.testing.assert_close(a, b, rtol=0.0 if exact else None, atol=0.0 if exact else None, equal_nan=True)


def agree(fast: Any, cls: Any, backend: str, *args: Any) -> None:
    """Results and everything that opaque bodies see are eager's."""
    theirs, saw_eager = outcome(cls, *args)
    mine, saw_mine = outcome(fast, *args)
    same(mine, theirs, exact=backend == "reference")
    assert saw_mine == saw_eager


def opaque(fast: Any) -> list[tuple[str, str]]:
    return [(c.node, c.method) for c in fast._fusegrad.ledger.opaque_calls]


def captures(fast: Any) -> int:
    return len(list(fast._fusegrad.table))


# ------------------------------------------------------------------ counts, values, kernels
@both
@pytest.mark.parametrize("cls", [SortedSoftmax, OnlyBackward, InOrder])
def test_bodies_run_as_often_as_in_eager(cls, backend) -> None:
    fast = fusegrad.compile(cls, backend=backend)
    for rows, columns in [(3, 5), (3, 5), (4, 7), (2, 6), (3, 5)]:
        agree(fast, cls, backend, leaf(rows, columns))
    assert captures(fast) == 1
    assert fast._fusegrad.ledger.records["forward"].status == "compiled"


@both
def test_forward_and_backward_split(backend) -> None:
    fast = fusegrad.compile(BothWays, backend=backend)
    for rows, columns in [(3, 5), (4, 5), (3, 8), (3, 8)]:
        agree(fast, BothWays, backend, leaf(rows, columns), leaf(columns, seed=1))
    assert opaque(fast) == [("Sort", "forward"), ("Sort", "backward")]
    assert captures(fast) == 1


def test_inductor_compiles_the_segments() -> None:
    fast = fusegrad.compile(BothWays, backend="inductor")
    for rows in (3, 3, 4):
        agree(fast, BothWays, "inductor", leaf(rows, 5), leaf(5, seed=1))


def test_one_kernel_per_segment() -> None:
    fast = fusegrad.compile(BothWays, backend="interpret")
    x, w = leaf(3, 5), leaf(5, seed=1)
    for _ in range(2):  # the first call is the user's own, its backward as well
        fast.apply(x, w).sum().backward()
    found = fusegrad.explain(fast, x, w)
    facts = found.to_dict()
    assert facts["launches"] == {"forward": 2, "backward": 2}
    for direction in ("forward", "backward"):
        kernel, eager, other = facts["segments"][direction]
        assert "eager" not in kernel + other and eager.startswith("eager Sort (") and __file__ in eager
    assert [(o["node"], o["method"]) for o in facts["opaque"]] == [("Sort", "forward"), ("Sort", "backward")]
    assert all(o["reason"] == "declares is_traceable = False" for o in facts["opaque"])
    assert "calls `Sort`, which declares is_traceable = False" in str(found)
    on_cpu = fusegrad.explain(fast, x, w, target="cpu").to_dict()["segments"]
    assert sum(line.startswith("eager Sort (") for line in on_cpu["forward"]) == 1 < len(on_cpu["forward"])


def test_the_kernels_run_once_per_segment(monkeypatch) -> None:
    from fusegrad.runtime.kernels import interpreter as interpret

    launched: list[str] = []
    real = interpret.run
    monkeypatch.setattr(interpret, "run", lambda kernel, *rest: (launched.append(kernel.name), real(kernel, *rest)))
    fast = fusegrad.compile(BothWays, backend="interpret")
    for _ in range(2):
        agree(fast, BothWays, "interpret", leaf(3, 5), leaf(5, seed=1))
    launched.clear()
    outcome(fast, leaf(3, 5, seed=2), leaf(5, seed=3))
    assert len(launched) == 4


def test_explaining_runs_no_opaque_body() -> None:
    found = fusegrad.explain(SortedSoftmax, "f32[3,5]")
    assert not SEEN and found.methods["forward"].status == "compiled"
    assert "Sort" in str(found.methods["forward"].reason) and __file__ in str(found.methods["forward"].where)


# ------------------------------------------------------------------ what is known only by running
@both
def test_sizes_that_depend_on_data(backend) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        fast = fusegrad.compile(Sizes, backend=backend)
        for n in (5, 6, 9, 3, 17):
            agree(fast, Sizes, backend, leaf(4, n))
    assert captures(fast) == 1


def test_one_attempt_on_fakes_and_one_warning_for_auto() -> None:
    class Tally:
        def __init__(self) -> None:
            self.fake = self.real = 0

        def add(self, x: Any) -> None:
            self.real, self.fake = self.real + (type(x) is Tensor), self.fake + (type(x) is not Tensor)

    tally = Tally()
    unseen = weakref.ref(tally)  # no scan sees what a call returns

    class Auto(Function):
        @staticmethod
        def forward(ctx, x):
            unseen().add(x)
            return x * float(x.detach().numpy().sum())

        @staticmethod
        def backward(ctx, g):
            return g

    class Outer(Function):
        @staticmethod
        def forward(ctx, x):
            return Auto.apply(x * 2) + 1

        @staticmethod
        def backward(ctx, g):
            return g

    fast = fusegrad.compile(Outer)
    with pytest.warns(FallbackWarning, match=r"Outer.forward calls `Auto`, which .*numpy"):
        agree(fast, Outer, "reference", leaf(3, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agree(fast, Outer, "reference", leaf(5, 4))
    assert tally.fake <= 1 and tally.real == 4


def test_undeclared_effects_make_a_nested_class_opaque() -> None:
    class Counts(Function):
        @staticmethod
        def forward(ctx, x):
            SEEN.append(type(x))
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    class Outer(Function):
        @staticmethod
        def forward(ctx, x):
            return Counts.apply(x + 1) * 3

        @staticmethod
        def backward(ctx, g):
            return Counts.apply(g) * 3

    fast = fusegrad.compile(Outer)
    with pytest.warns(FallbackWarning, match="it calls `append` of a list from outside"):
        for _ in range(3):
            agree(fast, Outer, "reference", leaf(3))
    assert opaque(fast) == [("Counts", "forward"), ("Counts", "backward")]


class Picks(Function):
    """Another dtype, rank, constant, layout or None, as the data says."""

    is_traceable = False

    @staticmethod
    def forward(ctx, x, how):
        saw(ctx, how, x)
        y = x.detach().clone()
        return {
            "float": lambda: (y, 2.0),
            "double": lambda: (y.double(), 2.0),
            "row": lambda: (y[0].clone(), 2.0),
            "number": lambda: (y, 3.0),
            "turned": lambda: (y.t().contiguous().t(), 2.0),
            "none": lambda: (y, None),
            "one": lambda: (y[:1, :1].clone(), 2.0),
        }[how]()

    @staticmethod
    def backward(ctx, g, n):
        return g, None


HOW = ["float"]


class Chooses(Picks):
    """`how` comes from where no capture looks."""

    @staticmethod
    def forward(ctx, x):
        return Picks.forward(ctx, x, HOW[0])


class Follows(Function):
    @staticmethod
    def forward(ctx, x):
        first = Noted.apply(x + 1)
        y, scale = Chooses.apply(first * 2)
        ctx.save_for_backward(x)
        return y.sin() * x + (scale or 0.0)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g.float() * x


@both
def test_other_results_than_at_the_capture(backend) -> None:
    """Another dtype, rank, number or size of one: no body runs twice, and the next call has a graph for it."""
    fast = fusegrad.compile(Follows, backend=backend)
    order = ["float", "double", "float", "row", "number", "turned", "none", "one", "double", "row", "float"]
    for how in order:
        HOW[0] = how
        agree(fast, Follows, backend, leaf(3, 4))
    assert captures(fast) <= 7
    assert fast._fusegrad.ledger.records["forward"].status == "compiled"


def test_the_number_of_graphs_is_bounded() -> None:
    numbers = iter(range(100))

    class Next(Function):
        is_traceable = False

        @staticmethod
        def forward(ctx, x):
            SEEN.append("next")
            return x.detach().clone(), next(numbers)

        @staticmethod
        def backward(ctx, g, n):
            return g

    class Outer(Function):
        @staticmethod
        def forward(ctx, x):
            y, n = Next.apply(x + 1)
            return y * n

        @staticmethod
        def backward(ctx, g):
            return g

    fast = fusegrad.compile(Outer)
    x = torch.randn(3)
    for n in range(20):
        SEEN.clear()
        assert torch.equal(fast.apply(x), (x + 1) * n) and SEEN == ["next"]
    assert captures(fast) == 8


def test_an_exception_inside_is_eagers() -> None:
    class Sometimes(Function):
        is_traceable = False

        @staticmethod
        def forward(ctx, x):
            SEEN.append("sometimes")
            if len(FAIL):
                raise KeyError(FAIL.pop())
            return x.detach() * 2

        @staticmethod
        def backward(ctx, g):
            return g

    class Outer(Function):
        @staticmethod
        def forward(ctx, x):
            return Sometimes.apply(x + 1) * 2

        @staticmethod
        def backward(ctx, g):
            return g

    FAIL: list[str] = ["at the first call"]
    fast, x = fusegrad.compile(Outer), torch.randn(3)
    for expected in ("at the first call", "later"):
        SEEN.clear()
        with pytest.raises(KeyError, match=expected):
            fast.apply(x)
        assert SEEN == ["sometimes"]
        for _ in range(2):
            assert torch.equal(fast.apply(x), (x + 1) * 2 * 2)
        assert SEEN == ["sometimes"] * 3
        FAIL.append("later")


# ------------------------------------------------------------------ what the body sees
def test_autocast_and_the_generator_are_eagers() -> None:
    class Draws(Function):
        is_traceable = False

        @staticmethod
        def forward(ctx, x):
            SEEN.append((torch.is_autocast_enabled("cpu"), (x @ x.t()).dtype))
            return x + torch.rand_like(x)

        @staticmethod
        def backward(ctx, g):
            return g

    class Outer(Function):
        @staticmethod
        def forward(ctx, x):
            y = Draws.apply(x * 2)
            return (y @ y.t()).float() + torch.rand(1)

        @staticmethod
        def backward(ctx, g):
            return g[:, :1].expand(-1, 4).contiguous()

    fast = fusegrad.compile(Outer)
    for on in (True, False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            for _ in range(2):
                found = []
                for cls in (Outer, fast):
                    torch.manual_seed(3)
                    found.append((*outcome(cls, leaf(3, 4)), torch.rand(1)))
                same(found[1][0], found[0][0], exact=True)
                assert found[0][1:] == found[1][1:]


class Shapes(Function):
    """Keywords, numbers, the same tensor twice, results with a None and a number among them."""

    is_traceable = False

    @staticmethod
    def forward(ctx, x, y, k=1, names=("a",)):
        saw(ctx, f"{k} {names} {x is y}", x, y)
        return x.detach() * k, None, (y.detach() + 1), "text"

    @staticmethod
    def backward(ctx, *g):
        return g[0], g[2], None, None


@both
def test_arguments_and_results_of_every_kind(backend) -> None:
    class Outer(Function):
        @staticmethod
        def forward(ctx, x):
            a, none, b, text = Shapes.apply(x, x, 3)
            assert none is None and text == "text"
            c, _, d, _ = Shapes.apply(x.detach(), a + b, x.shape[0], ("p", "q"))
            return a * b + c - d

        @staticmethod
        def backward(ctx, g):
            return g

    fast = fusegrad.compile(Outer, backend=backend)
    for rows in (3, 3, 5):
        agree(fast, Outer, backend, leaf(rows, 4))


@both
def test_results_that_show_an_argument(backend) -> None:
    class Outer(Function):
        @staticmethod
        def forward(ctx, x):
            y = Noted.apply(x)
            return y, Noted.apply(x * 2)

        @staticmethod
        def backward(ctx, g, h):
            return g + h

    fast = fusegrad.compile(Outer, backend=backend)
    for _ in range(3):
        agree(fast, Outer, backend, leaf(3, 4))
        x = leaf(3, 4)
        y, _ = fast.apply(x)
        assert y.data_ptr() == x.data_ptr()
    assert opaque(fast) == [("Noted", "forward"), ("Noted", "forward")]


def test_a_nested_write_leaves_the_method_as_written() -> None:
    class Dirty(Function):
        is_traceable = False

        @staticmethod
        def forward(ctx, x):
            SEEN.append("dirty")
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx, g):
            return g * 2

    class Outer(Function):
        @staticmethod
        def forward(ctx, x):
            y = x + 1
            z = Dirty.apply(y)
            return y * z

        @staticmethod
        def backward(ctx, g):
            return g

    fast = fusegrad.compile(Outer)
    with pytest.warns(FallbackWarning, match="calls `Dirty`, which declares is_traceable = False and writes to"):
        for _ in range(3):
            agree(fast, Outer, "reference", leaf(3, 4))
    assert fast._fusegrad.ledger.records["forward"].status == "opaque"


def test_a_custom_operator_without_a_fake() -> None:
    library = torch.library.Library("fusegrad_split", "DEF")
    library.define("twice(Tensor x) -> Tensor")

    def twice(x: Tensor) -> Tensor:
        assert type(x) is Tensor
        SEEN.append("twice")
        return x * 2

    library.impl("twice", twice, "CPU")

    @torch.library.custom_op("fusegrad_split::thrice", mutates_args=())
    def thrice(x: Tensor) -> Tensor:
        assert type(x) is Tensor
        SEEN.append("thrice")
        return x * 3

    class Outer(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return thrice(torch.ops.fusegrad_split.twice(x + 1).sin()) - 1

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return torch.ops.fusegrad_split.twice.default(g * x) + 1

    fast = fusegrad.compile(Outer)
    for rows in (3, 3, 4, 4):
        agree(fast, Outer, "reference", leaf(rows, 4))
    found = dict.fromkeys(opaque(fast))
    assert list(found)[-1] == ("fusegrad_split::twice", "backward") and len(found) == 3


# ------------------------------------------------------------------ compositions
@both
def test_double_backward(backend) -> None:
    class Cube(Function):
        is_traceable = False

        @staticmethod
        def forward(ctx, x):
            saw(ctx, "cube", x)
            ctx.save_for_backward(x)
            return torch.from_numpy(x.detach().numpy() ** 3)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return 3 * g * x * x

    class Outer(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return Cube.apply(x.clone()) * 2

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return Cube.apply(x) * g + Cube.apply(g)

    def second(cls: Any) -> tuple[list[Any], list[Any]]:
        SEEN.clear()
        x = leaf(3, 4)
        (g,) = torch.autograd.grad(cls.apply(x).sum(), x, create_graph=True)
        return [g.detach(), *torch.autograd.grad((g * g).sum(), x)], list(SEEN)

    fast = fusegrad.compile(Outer, backend=backend)
    for _ in range(3):
        mine, theirs = second(fast), second(Outer)
        same(mine[0], theirs[0], exact=backend == "reference")
        assert mine[1] == theirs[1]
    agree(fast, Outer, backend, leaf(3, 4))


class WithRules(Function):
    """Everything that torch.func asks for, written by the user, around an opaque node."""

    @staticmethod
    def forward(x):
        return Sort.apply(x * 2) + 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x

    @staticmethod
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return t * x

    @staticmethod
    def vmap(info, in_dims, x):
        return WithRules.apply(x.movedim(in_dims[0], 0)), 0


def test_transforms_use_the_users_rules() -> None:
    fast = fusegrad.compile(WithRules)
    x = torch.randn(4, 3)
    for _ in range(2):
        for transform in (
            lambda cls: torch.func.grad(lambda v: cls.apply(v).sum())(x),
            lambda cls: torch.func.jvp(cls.apply, (x,), (torch.ones_like(x),))[1],
            lambda cls: torch.vmap(cls.apply)(x),
        ):
            SEEN.clear()
            theirs, saw_eager = _outcome_of(transform, WithRules)
            mine, saw_mine = _outcome_of(transform, fast)
            assert type(mine) is type(theirs) and (torch.equal(mine, theirs) if isinstance(mine, Tensor) else True)
            assert saw_mine == saw_eager
        agree(fast, WithRules, "reference", leaf(4, 3))


def _outcome_of(transform: Callable[[Any], Any], cls: Any) -> tuple[Any, list[Any]]:
    SEEN.clear()
    try:
        return transform(cls), list(SEEN)
    except Exception as error:
        return error, list(SEEN)


def test_a_backward_with_an_opaque_node_under_grad() -> None:
    class Outer(Function):
        @staticmethod
        def forward(x):
            return x.sin()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return Plain.apply(g * x)

    class Plain(Function):
        is_traceable = False

        @staticmethod
        def forward(x):
            SEEN.append("plain")
            return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, g):
            return g * 2

    fast, x = fusegrad.compile(Outer), torch.randn(4)
    for _ in range(2):
        found = [_outcome_of(lambda cls: torch.func.grad(lambda v: cls.apply(v).sum())(x), c) for c in (Outer, fast)]
        assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1] == ["plain"]


@both
def test_inside_another_compiled_function(backend) -> None:
    fast = fusegrad.compile(InsideAnother, backend=backend)
    for rows in (3, 3, 4):
        agree(fast, InsideAnother, backend, leaf(rows, 5))
    assert opaque(fast) == [("SortedSoftmax", "forward")]
    (call,) = fast._fusegrad.ledger.opaque_calls
    assert "calls `Sort`, which declares is_traceable = False" in call.reason


def test_a_plain_function() -> None:
    def function(x, w):
        return Sort.apply(x * w).sin()

    fast = fusegrad.compile(function)
    x, w = torch.randn(3, 4), torch.randn(4)
    for _ in range(3):
        SEEN.clear()
        expected, seen = function(x, w), list(SEEN)
        SEEN.clear()
        assert torch.equal(fast(x, w), expected) and seen == SEEN
    assert opaque(fast) == [("Sort", "forward")]
    leaf_x = x.requires_grad_()
    for _ in range(2):
        found = []
        for f in (function, fast):
            SEEN.clear()
            found.append((*torch.autograd.grad(f(leaf_x, w).sum(), leaf_x), list(SEEN)))
        assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_threads() -> None:
    fast = fusegrad.compile(BothWays)
    args = [(leaf(3, 4 + i % 3, seed=i), leaf(4 + i % 3, seed=i + 50)) for i in range(8)]
    expected = [outcome(BothWays, *a) for a in args]
    SEEN.clear()
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for _ in range(3):
                x, w = (a.detach().clone().requires_grad_() for a in args[i])
                y = fast.apply(x, w)
                g = torch.arange(1.0, y.numel() + 1).reshape(y.shape)
                same([y.detach(), *torch.autograd.grad(y, (x, w), g)], expected[i][0], exact=True)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    assert captures(fast) == 1
    assert len(SEEN) == 3 * sum(len(seen) for _, seen in expected)


# ------------------------------------------------------------------ declarations
def test_an_outer_promise_is_kept_around_an_opaque_node() -> None:
    class Promised(SortedSoftmax):
        is_traceable = True

    fast = fusegrad.compile(Promised)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            agree(fast, SortedSoftmax, "reference", leaf(3, 5))
    assert opaque(fast) == [("Sort", "forward")]


@pytest.mark.parametrize(("cls", "method"), [(SortedSoftmax, "forward"), (OnlyBackward, "backward")])
def test_fullgraph_names_the_node_and_its_line(cls, method) -> None:
    fast = fusegrad.compile(cls, fullgraph=True)
    with pytest.raises(NotTraceableError, match=rf"{cls.__name__}.{method} .*calls `Sort`, which declares") as found:
        fast.apply(leaf(3, 5))
    assert __file__ in str(found.value) and not SEEN


def test_a_declaration_of_one_method_counts_for_a_nested_class() -> None:
    class Plain(Function):
        @staticmethod
        def forward(ctx, x):
            assert type(x) is Tensor
            SEEN.append("plain")
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    class Table(Plain):
        traceable = {"forward": False}  # noqa: RUF012

    option = fusegrad.compile(Plain, traceable={"forward": False})

    class Outer(Function):
        @staticmethod
        def forward(ctx, x):
            y = Table.apply(x + 1)
            return option.apply(y.sin()) * 3

        @staticmethod
        def backward(ctx, g):
            return g

    fast = fusegrad.compile(Outer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (3, 3, 4):
            agree(fast, Outer, "reference", leaf(rows, 4))
    assert opaque(fast) == [("Table", "forward"), ("Plain", "forward")]


@both
def test_tensors_in_containers(backend) -> None:
    class Outer(Function):
        @staticmethod
        def forward(ctx, x, others):
            ctx.kept = [Sort.apply(x * others["w"])]
            return ctx.kept[0].exp(), {"sorted": ctx.kept[0]}

        @staticmethod
        def backward(ctx, g, unused):
            return g * ctx.kept[0], None

    fast, w = fusegrad.compile(Outer, backend=backend), torch.randn(5)
    for rows in (3, 3, 4):
        found = []
        for cls in (Outer, fast):
            SEEN.clear()
            x = leaf(rows, 5)
            y, more = cls.apply(x, {"w": w})
            found.append(([y.detach(), more["sorted"], *torch.autograd.grad(y.sum(), x)], list(SEEN)))
        same(found[1][0], found[0][0], exact=backend == "reference")
        assert found[0][1] == found[1][1]
    assert opaque(fast) == [("Sort", "forward")]


class AsksBeforeAndAfter(Function):
    """A statement that happens once, between two questions."""

    @staticmethod
    def forward(ctx, x):
        if not bool((x > 0).any()):
            return x * 2
        print("positive", tuple(x.shape))
        if x.max() > 1:
            return x * 3
        return x.abs().max().item() * x

    @staticmethod
    def backward(ctx, g):
        if not bool((g > 0).any()):
            return g * 2
        print("gradient")
        return g * 3 if g.max() > 1 else g * 4


@both
def test_graphs_that_do_not_fit_take_nothing_from_what_happened(backend, capsys) -> None:
    """The call's own answers fit no graph: each that is tried after the first hands on what ran before."""
    fast, told = fusegrad.compile(AsksBeforeAndAfter, backend=backend), {}
    low, middle, high = -torch.ones(4), torch.full((4,), 0.5), torch.full((4,), 2.0)
    calls = [(low, low), (high, high), (middle, middle), (middle, high), (low, middle), (high, low), (middle, middle)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusegrad.FallbackWarning)
        for of in (AsksBeforeAndAfter, fast):
            for values, gradient in calls:
                x = values.clone().requires_grad_()
                y = of.apply(x)
                found = (y.detach(), torch.autograd.grad(y, x, gradient)[0], capsys.readouterr().out)
                told.setdefault(of, []).append(found)
    for wanted, mine in zip(*told.values(), strict=True):
        assert torch.equal(mine[0], wanted[0]) and torch.equal(mine[1], wanted[1]) and mine[2] == wanted[2]
