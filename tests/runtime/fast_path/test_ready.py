"""Calls that are written out: they are taken, they give what eager gives, and they miss where anything differs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from function_samples import BACKENDS, LayerNorm, Linear, RMSNorm, Softmax, leaf
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode

import fusegrad
from fusegrad.codegen import TARGETS
from fusegrad.ir.errors import UnsupportedBackendError
from fusegrad.runtime.dispatch.dispatcher import Dispatcher
from fusegrad.runtime.execution import targets
from fusegrad.runtime.fast_path import plan_codegen as inline
from fusegrad.runtime.fast_path.inline_cache import FIRST, TABLE, never
from fusegrad.runtime.kernels import launch

both = pytest.mark.parametrize("backend", BACKENDS)
SCALE: Any = 2.0
WEIGHT = torch.arange(4.0)


class Kept(Function):
    """An attribute, a mark, a number among the results, no materialised gradients."""

    @staticmethod
    def forward(ctx, x, k=2.0):
        ctx.kept, ctx.k = x.exp(), k
        ctx.set_materialize_grads(False)
        sign = x.sign()
        ctx.mark_non_differentiable(sign)
        return x * k, sign, "text", x.exp()

    @staticmethod
    def backward(ctx, g, _, __, h):
        return (0 if g is None else g * ctx.k) + (0 if h is None else h * ctx.kept), None


class InPlace(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx, g):
        return g * 3


class Views(Function):
    @staticmethod
    def forward(ctx, x):
        return x, x.t(), x * 2

    @staticmethod
    def backward(ctx, a, b, c):
        return a + b.t() + 2 * c


class Turned(Function):
    """Gradients that are views of a gradient."""

    @staticmethod
    def forward(ctx, x, y, z):
        return x.t() * 2, y.sum(0), z[1:] * 1

    @staticmethod
    def backward(ctx, a, b, c):
        return a.t(), b.unsqueeze(0).expand(3, 4), torch.cat([c[:1], c])


class Written(Function):
    """Two arguments are written to, the second with what the first was."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.mark_dirty(x, y)
        before = x.clone()
        return x.mul_(2).add_(y), y.copy_(before)

    @staticmethod
    def backward(ctx, g, h):
        return g * 2 + h, g


class Outside(Function):
    @staticmethod
    def forward(ctx, x):
        return x * SCALE * WEIGHT

    @staticmethod
    def backward(ctx, g):
        return g * SCALE * WEIGHT


class Sorted(Function):
    """An operation between kernels; one result twice."""

    @staticmethod
    def forward(ctx, x):
        values, index = (x * 2).sort(-1)
        ctx.save_for_backward(index)
        return values, values * 1, values * 1

    @staticmethod
    def backward(ctx, a, b, c):
        (index,) = ctx.saved_tensors
        g = a + b + c
        return torch.zeros_like(g).scatter(-1, index, g * 2)


class OfItsClass(Function):
    """Methods that are bound to the class, and one that is bound to an object: made anew at every look."""

    scale = 3.0

    @classmethod
    def forward(cls, ctx, x):
        return cls.scaled(x) * COUNTING.index(2)

    @classmethod
    def scaled(cls, x):
        return HELD.scaled(x) * cls.scale

    @classmethod
    def backward(cls, ctx, g):
        return cls.scaled(g)


class Holder:
    def scaled(self, x):
        return x * 2


HELD, COUNTING = Holder(), (1, 2, 3)

CASES: dict[str, tuple[type, Callable[[], tuple[Any, ...]]]] = {
    "rmsnorm": (RMSNorm, lambda: (leaf(3, 4), leaf(4), 1e-6)),
    "a default": (RMSNorm, lambda: (leaf(3, 4), leaf(4))),
    "softmax": (Softmax, lambda: (leaf(3, 4),)),
    "layernorm": (LayerNorm, lambda: (leaf(3, 4), leaf(4), leaf(4))),
    "no bias": (Linear, lambda: (leaf(3, 4), leaf(5, 4), None)),
    "some need no gradient": (Linear, lambda: (leaf(3, 4).detach(), leaf(5, 4), leaf(5))),
    "kept on ctx": (Kept, lambda: (leaf(3, 4), 3.0)),
    "in place": (InPlace, lambda: (leaf(3, 4) * 1,)),
    "views": (Views, lambda: (leaf(3, 4),)),
    "views of gradients": (Turned, lambda: (leaf(3, 4), leaf(3, 4), leaf(3, 4))),
    "two in place": (Written, lambda: (leaf(3, 4) * 1, leaf(3, 4) * 1)),
    "from outside": (Outside, lambda: (leaf(3, 4),)),
    "no kernel": (Sorted, lambda: (leaf(3, 4),)),
    "of its class": (OfItsClass, lambda: (leaf(3, 4),)),
    "transposed": (Softmax, lambda: (leaf(4, 3).t(),)),
    "expanded": (Softmax, lambda: (leaf(1, 4).expand(3, 4),)),
    "the same twice": (Linear, lambda: (lambda x: (x, x, None))(leaf(4, 4))),
    "a parameter": (Softmax, lambda: (torch.nn.Parameter(leaf(3, 4).detach()),)),
}

TILED = (
    "rmsnorm", "a default", "no bias", "in place", "views", "views of gradients", "two in place", "from outside",
    "no kernel", "expanded",
)  # fmt: skip
"""The cases that kernels are tried on as well."""


def told(cls: Any, args: tuple[Any, ...]) -> list[Any]:
    """All that a call gives: results, their flags, gradients."""
    tensors = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    output = cls.apply(*args)
    results = output if isinstance(output, tuple) else (output,)
    kept = [r.detach().clone() if isinstance(r, torch.Tensor) else r for r in results]
    flags = [(r.requires_grad, r._is_view(), type(r.grad_fn).__name__, r.stride()) for r in results if isinstance(
        r, torch.Tensor)]  # fmt: skip
    differentiable = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    given = [torch.ones_like(r) * (i + 1) for i, r in enumerate(differentiable)]
    return [*kept, flags, *(torch.autograd.grad(differentiable, tensors, given) if differentiable else ())]


def same(mine: list[Any], theirs: list[Any]) -> None:
    assert len(mine) == len(theirs)
    for m, t in zip(mine, theirs, strict=True):
        if isinstance(t, torch.Tensor):
            torch.testing.assert_close(m, t, rtol=1e-4, atol=1e-5)
        else:
            assert m == t


def again(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments in memory of their own."""
    copies: dict[int, Any] = {}

    def copy(a: Any) -> Any:
        if not isinstance(a, torch.Tensor):
            return a
        if id(a) not in copies:
            source = torch.nn.Parameter if isinstance(a, torch.nn.Parameter) else lambda t: t
            own = torch.empty_strided(a.shape, a.stride()).copy_(a.detach()) if 0 not in a.stride() else a.detach()
            copies[id(a)] = source(own).requires_grad_(a.requires_grad)
            if not a.is_leaf and a.requires_grad and a.dim() and a.is_contiguous():
                copies[id(a)] = copies[id(a)] * 1
        return copies[id(a)]

    return tuple(map(copy, args))


@contextmanager
def nothing_looked_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the block a call that no entry serves fails."""

    def refuse(self: Any, args: Any, kwargs: Any) -> Any:
        raise AssertionError("the call was looked up")

    with monkeypatch.context() as patch:
        patch.setattr(Dispatcher, "__call__", refuse)
        yield


@pytest.mark.parametrize(("name", "backend"), [*((n, "reference") for n in CASES), *((n, "interpret") for n in TILED)])
@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_a_call_that_comes_often_is_written_out(name, backend, monkeypatch) -> None:
    cls, make = CASES[name]
    fast = fusegrad.compile(cls, backend=backend)
    for at in range(FIRST + 4):
        args = make()
        with nothing_looked_up(monkeypatch) if at > FIRST else nullcontext():
            mine = told(fast, again(args))
        same(mine, told(cls, again(args)))


@both
@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_without_gradients_there_is_no_node(backend, monkeypatch) -> None:
    fast = fusegrad.compile(Softmax, backend=backend)
    for mode in (torch.no_grad, torch.inference_mode, nullcontext):
        for at in range(FIRST + 2):
            with mode(), nothing_looked_up(monkeypatch) if at > FIRST else nullcontext():
                x = torch.randn(3, 4)
                y, expected = fast.apply(x), Softmax.apply(x)
                torch.testing.assert_close(y, expected)
                assert (y.is_inference(), y.requires_grad) == (expected.is_inference(), False)


def warmed(cls: type, make: Callable[[], tuple[Any, ...]], backend: str = "reference") -> Any:
    fast: Any = fusegrad.compile(cls, backend=backend)
    for _ in range(FIRST + 3):
        told(fast, make())
    assert fast._fusegrad.inline_cache.latest is not never
    return fast


class Counts(TorchDispatchMode):
    """What it sees of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def _dual(cls: Any) -> Any:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.linspace(-1, 1, 12).view(3, 4), torch.ones(3, 4))
        return forward_ad.unpack_dual(cls.apply(x)).tangent


def _hooks(cls: Any) -> Any:
    packed: list[int] = []
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.dim()) or t * 2, lambda t: t / 2):
        y = cls.apply(x)
    return [packed, *torch.autograd.grad(y, x, torch.ones_like(y))]


def _patched(cls: Any) -> Any:
    with fusegrad.config.patch(backend="interpret"):
        return told(cls, (torch.linspace(-1, 1, 12).view(3, 4).requires_grad_(),))


class Composite:
    """What Softmax is under transforms, which eager refuses for a class of its style."""

    @staticmethod
    def apply(x):
        return x.softmax(-1)


X = torch.linspace(-1, 1, 12).view(3, 4)
CIRCUMSTANCES: dict[str, Callable[[Any], Any]] = {
    "no_grad": lambda c: torch.no_grad()(lambda: told(c, (X.clone().requires_grad_(),)))(),
    "no gradient needed": lambda c: told(c, (X.clone(),)),
    "another shape": lambda c: told(c, (torch.ones(5, 4, requires_grad=True),)),
    "other strides": lambda c: told(c, (torch.ones(4, 3, requires_grad=True).t(),)),
    "another dtype": lambda c: told(c, (X.double().requires_grad_(),)),
    "a parameter": lambda c: told(c, (torch.nn.Parameter(X.clone()),)),
    "autocast": lambda c: torch.autocast("cpu", torch.bfloat16)(lambda: told(c, (X.clone().requires_grad_(),)))(),
    "inference mode": lambda c: torch.inference_mode()(lambda: c.apply(X.clone()).is_inference())(),
    "func.grad": lambda c: torch.func.grad(lambda x: (c.apply(x) * X).sum())(X),
    "vmap": lambda c: torch.vmap(c.apply)(torch.stack([X, X])),
    "dual numbers": _dual,
    "saved tensor hooks": _hooks,
    "settings": _patched,
    "create_graph": lambda c: (lambda x: torch.autograd.grad(
        torch.autograd.grad(c.apply(x).square().sum(), x, create_graph=True)[0].sum(), x))(X.clone().requires_grad_()),
    "an expanded gradient": lambda c: (lambda x: torch.autograd.grad(c.apply(x).sum(), x))(X.clone().requires_grad_()),
    "twice": lambda c: (lambda x: [torch.autograd.grad(y, x, X, retain_graph=True)[0] for y in [c.apply(x)] * 3])(
        X.clone().requires_grad_()),
}  # fmt: skip


@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_what_surrounds_a_call_is_noticed(name) -> None:
    make = lambda: (X.clone().requires_grad_(),)  # noqa: E731
    fast = warmed(Softmax, make)
    for _ in range(FIRST + 2):
        fast.apply(X.clone())
    for _ in range(2):
        reference = Composite if name in ("func.grad", "vmap", "dual numbers") else Softmax
        mine, theirs = CIRCUMSTANCES[name](fast), CIRCUMSTANCES[name](reference)
        if isinstance(theirs, list):
            same(mine, theirs)
        else:
            torch.testing.assert_close(mine, theirs)


def test_a_dispatch_mode_sees_what_it_sees_of_a_first_call() -> None:
    fast, fresh = warmed(Softmax, lambda: (X.clone().requires_grad_(),)), fusegrad.compile(Softmax)
    seen = []
    for cls in (fresh, fast):
        with Counts() as mode:
            cls.apply(X.clone().requires_grad_())
        seen.append(mode.seen)
    assert seen[0] == seen[1]


@both
def test_what_is_read_outside_is_asked_again(backend) -> None:
    global SCALE, WEIGHT
    kept = SCALE, WEIGHT
    try:
        make = lambda: (X.clone().requires_grad_(),)  # noqa: E731
        fast = warmed(Outside, make, backend)
        weights = (torch.ones(4), torch.ones(1), torch.ones(4, dtype=torch.float64), kept[1])
        scales = (3.0, 3, float("nan"), 0.0, -0.0, 2.0)
        for SCALE, WEIGHT in (*zip(scales, weights * 2, strict=False), (2.0, kept[1])):  # noqa: B007  read by the class
            for m, t in zip(told(fast, make()), told(Outside, make()), strict=True):
                if isinstance(t, torch.Tensor):
                    assert torch.equal(m.view(torch.uint8), t.view(torch.uint8)) or backend == "interpret"
                    torch.testing.assert_close(m, t, equal_nan=True)
        y = fast.apply(x := X.clone().requires_grad_())
        SCALE = 7.0
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], (SCALE * WEIGHT).expand(3, 4))
        with torch.no_grad():
            WEIGHT = torch.ones(4, requires_grad=True)
            torch.testing.assert_close(fast.apply(X), X * 7)
    finally:
        SCALE, WEIGHT = kept


def test_another_method_takes_the_place_of_an_old_one() -> None:
    class Changing(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    make = lambda: (X.clone().requires_grad_(),)  # noqa: E731
    fast = warmed(Changing, make)
    Changing.backward = staticmethod(lambda ctx, g: g * 5)
    same(told(fast, make()), told(Changing, make()))
    Changing.forward = staticmethod(lambda ctx, x: x * 3)
    same(told(fast, make()), told(Changing, make()))


def test_what_was_saved_is_looked_at() -> None:
    """In place: autograd's own error. Through `.data`: backward reads what is there now, as in eager, and no more."""
    fast = warmed(Kept2, lambda: (X.clone().requires_grad_(),))
    leaf_ = X.clone().requires_grad_()
    x = leaf_ * 1
    y = fast.apply(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    grads = []
    for cls in (fast, Kept2):
        x = X.clone().requires_grad_()
        y = cls.apply(x)
        x.data = torch.full((3, 4), 5.0).t().contiguous().t()
        grads += torch.autograd.grad(y, x, torch.ones(3, 4))
    torch.testing.assert_close(*grads)
    y = fast.apply(x := X.clone().requires_grad_())
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


class Kept2(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g


@both
def test_gradients_that_are_missing(backend) -> None:
    fast = fusegrad.compile(Kept, backend=backend)
    for _ in range(FIRST + 3):
        for chosen in ((0,), (3,), (0, 3)):
            found = []
            for cls in (fast, Kept):
                x = X.clone().requires_grad_()
                outputs = cls.apply(x, 2.0)
                found.append(torch.autograd.grad([outputs[i] for i in chosen], x, [X] * len(chosen))[0])
            torch.testing.assert_close(*found)


def test_threads_share_entries() -> None:
    fast: Any = fusegrad.compile(RMSNorm)
    wrong: list[Any] = []

    def ones(n: int) -> tuple[Any, ...]:
        return torch.ones(n, 4, requires_grad=True), torch.ones(4, requires_grad=True), 1e-6

    expected = {n: told(RMSNorm, ones(n)) for n in (1, 2, 3, 5)}

    def work(offset: int) -> None:
        try:
            for at in range(60):
                n = (1, 2, 3, 5)[(at + offset) % 4]
                same(told(fast, ones(n)), expected[n])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not wrong, wrong[0]


def test_many_sizes_are_not_all_written_out() -> None:
    fast: Any = fusegrad.compile(Softmax)
    for _ in range(3):
        for n in range(1, 40):
            fast.apply(torch.ones(n, 4))
    assert fast._fusegrad.inline_cache.written_count == TABLE  # then three calls of a size are too few
    captures = fusegrad.stats()["captures"]
    for n in range(1, 40):
        torch.testing.assert_close(fast.apply(torch.ones(n, 4)), torch.ones(n, 4) / 4)
    assert fusegrad.stats()["captures"] == captures


# ------------------------------------------------------------------ what a launch needs
class Recorder:
    """Stands in for Triton: keeps kernels, grids and the addresses of what is no fresh memory; counts allocations."""

    def __init__(self) -> None:
        self.launches: list[Any] = []
        self.allocations: list[Any] = []

    def launcher(self, kernel: Any, text: str, backend: str, device: Any = None) -> Any:
        counters = [i for i, a in enumerate(kernel.arguments) if getattr(getattr(a, "buffer", None), "kind", "") == (
            "scratch") and kernel.scratch[a.buffer.index].zeroed]  # fmt: skip

        def record(arguments: Any, grid: int) -> None:
            numbers = [a for a in arguments if isinstance(a, int)]
            static = [arguments[i].data_ptr() for i in counters]
            self.launches.append((kernel.name, grid, numbers, static))

        return record

    def allocator(self, device: torch.device) -> Callable[..., torch.Tensor]:
        def empty(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
            self.allocations.append((shape, strides, dtype))
            return torch.zeros(()).new_empty_strided(shape, strides, dtype=dtype)

        return empty

    def drained(self) -> Any:
        found = self.launches[:], self.allocations[:]
        self.launches.clear()
        self.allocations.clear()
        return found


@pytest.mark.parametrize("cls", [RMSNorm, LayerNorm], ids=lambda c: c.__name__)
def test_every_call_launches_and_allocates_the_same(cls, monkeypatch) -> None:
    """So that it can be captured in a CUDA graph: nothing depends on the call before, counters stay where they are."""
    recorder = Recorder()
    monkeypatch.setattr(launch, "launcher", recorder.launcher)
    monkeypatch.setattr(targets, "target_for", lambda backend, device: TARGETS["cuda:90"])
    monkeypatch.setattr(inline, "allocator", recorder.allocator)
    fast: Any = fusegrad.compile(cls, backend="triton")
    rest = (1e-6,) if cls is RMSNorm else (leaf(64),)
    calls = []
    for _ in range(FIRST + 6):
        x, w = leaf(256, 64), leaf(64)
        y = fast.apply(x, w, *rest)
        y = y[0] if isinstance(y, tuple) else y
        torch.autograd.grad(y, (x, w), torch.ones_like(y))
        calls.append(recorder.drained())
    launches, allocations = zip(*calls, strict=True)
    assert all(each == launches[0] for each in launches) and len(launches[0]) == 2  # forward, backward
    assert allocations[0] == [] and allocations[-1] == allocations[-2] == allocations[-3] != []


QUIET = {"aten::empty_strided", "aten::empty", "aten::detach", "detach", "aten::ones_like", "aten::empty_like",
         "aten::fill_", "aten::zeros", "aten::zero_"}  # fmt: skip
"""What a call may use besides kernels: memory, `ones_like` around it, autograd's zeros for outputs without gradient."""


@pytest.mark.parametrize("calls", [2, FIRST + 6])
@pytest.mark.parametrize("cls", [RMSNorm, LayerNorm], ids=lambda c: c.__name__)
def test_no_later_call_waits_copies_or_reads_a_number(cls, calls, monkeypatch) -> None:
    """What a profiler sees of it are allocations: nothing that a CUDA graph could not hold."""
    recorder = Recorder()
    monkeypatch.setattr(launch, "launcher", recorder.launcher)
    monkeypatch.setattr(targets, "target_for", lambda backend, device: TARGETS["cuda:90"])
    fast: Any = fusegrad.compile(cls, backend="triton")
    x, w, rest = leaf(256, 64), leaf(64), (1e-6,) if cls is RMSNorm else (leaf(64),)

    def call() -> None:
        y = fast.apply(x, w, *rest)
        y = y[0] if isinstance(y, tuple) else y
        torch.autograd.grad(y, (x, w), torch.ones_like(y))

    for _ in range(calls):
        call()
    recorder.drained()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        call()
    names = {e.name for e in seen.events()}
    assert {n for n in names if n.startswith("aten::")} <= QUIET
    assert len(recorder.launches) == 2


class Asks(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2 if ctx.needs_input_grad[0] else x * 3

    @staticmethod
    def backward(ctx, g):
        return g * 2


def test_what_needs_a_gradient_is_known_without_grad_mode() -> None:
    fast: Any = fusegrad.compile(Asks)
    with torch.no_grad():
        for needs in (False, True) * (FIRST + 2):
            assert torch.equal(fast.apply(X.clone().requires_grad_(needs)), X * (2 if needs else 3))
    for _ in range(2):  # what was written out without grad mode has no node
        assert fast.apply(X.clone().requires_grad_()).requires_grad


def test_a_setting_holds_for_calls_that_are_written_out() -> None:
    fast = warmed(Softmax, lambda: (X.clone().requires_grad_(),))
    with fusegrad.config.patch(backend="triton"), pytest.raises(UnsupportedBackendError):
        fast.apply(X.clone().requires_grad_())
