"""Which captured graph serves a call: sizes, state, what is read from outside; and calls from several threads."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from function_samples import BACKENDS, Linear, RMSNorm, Softmax, assert_same, leaf, run, status
from torch.autograd import Function

import fusegrad
from fusegrad.tracer.reads import reads, value_keys

both = pytest.mark.parametrize("backend", BACKENDS)
SCALE: Any = 2.0
WEIGHT = torch.arange(4.0)


class Settings:
    k = 2.0
    table: Any = {"w": [torch.ones(4)], "k": 1.0}  # noqa: RUF012


def helper(x):
    return x * SCALE


class Reads(Function):
    """Globals, helpers, attribute chains, containers and tensors from outside, in both directions."""

    @staticmethod
    def forward(ctx, x):
        return helper(x) * WEIGHT * Settings.table["w"][0] + Settings.k

    @staticmethod
    def backward(ctx, g):
        return helper(g) * WEIGHT * Settings.table["w"][0] * Settings.table["k"]


def assign(name: str, value: Any) -> Callable[[], None]:
    return lambda: globals().__setitem__(name, value)


CHANGES: dict[str, Callable[[], Any]] = {
    "scalar": assign("SCALE", 3.0),
    "type of a scalar": assign("SCALE", 3),
    "a scalar becomes a tensor": assign("SCALE", torch.full((4,), 5.0)),
    "and a scalar again": assign("SCALE", -0.0),
    "tensor in place": lambda: WEIGHT.add_(1),
    "tensor rebound": assign("WEIGHT", torch.full((4,), 7.0)),
    "tensor of another type": assign("WEIGHT", torch.full((4,), 7.0, dtype=torch.float64)),
    "tensor of another shape": assign("WEIGHT", torch.full((1,), 8.0)),
    "attribute": lambda: setattr(Settings, "k", 9.0),
    "item": lambda: Settings.table.__setitem__("k", 4.0),
    "tensor in a container": lambda: Settings.table["w"].__setitem__(0, torch.full((4,), 2.0)),
    "container": lambda: setattr(Settings, "table", {"w": [torch.ones(4)], "k": 2.0}),
    "helper": assign("helper", lambda x: x + 1),
}


@both
def test_what_is_read_from_outside_may_change(backend) -> None:
    global SCALE, WEIGHT, helper
    kept = SCALE, WEIGHT, helper
    try:
        fast = fusegrad.compile(Reads, backend=backend)
        assert_same(run(fast, leaf(3, 4)), run(Reads, leaf(3, 4)))
        for name, change in CHANGES.items():
            change()
            mine, theirs = run(fast, leaf(3, 4)), run(Reads, leaf(3, 4))
            assert all(torch.allclose(m, t) and m.dtype == t.dtype for m, t in zip(mine, theirs, strict=True)), name
        assert status(fast) == status(fast, "backward") == "compiled"
    finally:
        SCALE, WEIGHT, helper = kept


def test_the_same_value_again_is_not_captured_again() -> None:
    global SCALE
    kept = SCALE
    try:
        fast = fusegrad.compile(Reads)
        for value in (2.0, 5.0):
            SCALE = value
            run(fast, leaf(3, 4))
        before = fusegrad.stats()
        for value in (2.0, 5.0, 2.0):
            SCALE = value
            run(fast, leaf(3, 4))
        after = fusegrad.stats()
        assert (after["captures"], after["compiles"]) == (before["captures"], before["compiles"])
    finally:
        SCALE = kept


def test_a_change_between_forward_and_backward_is_seen_as_in_eager() -> None:
    global SCALE
    kept = SCALE

    class Late(Function):
        @staticmethod
        def forward(ctx, x):
            return x * SCALE

        @staticmethod
        def backward(ctx, g):
            return g * SCALE

    try:
        fast = fusegrad.compile(Late)
        for values in ((2.0, 2.0), (2.0, 3.0), (3.0, 2.0), (5.0, 6.0)):
            grads = []
            for cls in (fast, Late):
                SCALE = values[0]
                x = leaf(3)
                y = cls.apply(x)
                SCALE = values[1]
                y.sum().backward()
                grads.append(torch.cat([y.detach(), x.grad]))
            assert_same(grads[:1], grads[1:])
    finally:
        SCALE = kept


def test_closures_and_factories() -> None:
    k: Any = 2.0
    w = torch.ones(3)

    class Closure(Function):
        @staticmethod
        def forward(ctx, x):
            return x * k * w

        @staticmethod
        def backward(ctx, g):
            return g * k * w

    fast = fusegrad.compile(Closure)
    for k in (2.0, 3, float("nan"), True, -0.0, 0.0):  # noqa: B007
        for w in (torch.ones(3), torch.full((3,), 4.0)):  # noqa: B007
            assert_same(run(fast, leaf(3)), run(Closure, leaf(3)), bitwise=True)
    captures = fusegrad.stats()["captures"]
    k = float("nan")
    run(fast, leaf(3))
    assert fusegrad.stats()["captures"] == captures


# ------------------------------------------------------------------ sizes
@both
@pytest.mark.parametrize("cls", [RMSNorm, Softmax])
def test_one_hundred_batch_sizes_share_what_was_compiled(cls, backend) -> None:
    fast = fusegrad.compile(cls, backend=backend)

    def call(n: int) -> None:
        args = (leaf(n, 6), leaf(6)) if cls is RMSNorm else (leaf(n, 6),)
        mine = run(fast, *args)
        if n % 10 < 3:
            assert_same(mine, run(cls, *args))

    for n in (2, 3):
        call(n)
    before = fusegrad.stats()
    for n in range(4, 102) if backend == "reference" else range(4, 40):
        call(n)
    after = fusegrad.stats()
    assert (after["captures"], after["compiles"]) == (before["captures"], before["compiles"])
    call(1)
    call(0)


@both
def test_sizes_that_a_method_asks_for(backend) -> None:
    class Asks(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.wide = x.shape[1] > 4
            half = x.shape[1] // 2
            return x[:, :half] * (2 if ctx.wide else 3)

        @staticmethod
        def backward(ctx, g):
            return torch.cat([g * 2, g], 1) if ctx.wide else torch.cat([g, g * 3], 1)

    fast = fusegrad.compile(Asks, backend=backend)
    for n in (6, 8, 4, 2, 10, 4):
        assert_same(run(fast, leaf(3, n)), run(Asks, leaf(3, n)))
    assert status(fast) == status(fast, "backward") == "compiled"


def test_a_backward_that_asks_for_sizes_its_forward_did_not() -> None:
    class Asks(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * (2 if x.shape[0] > 3 else 5)

    fast = fusegrad.compile(Asks)
    for n in (5, 2, 7, 3, 1, 0, 4):
        assert_same(run(fast, leaf(n)), run(Asks, leaf(n)))


def test_ranks_and_broadcasts() -> None:
    class Sum(Function):
        @staticmethod
        def forward(ctx, a, b):
            return a + b

        @staticmethod
        def backward(ctx, g):
            return g, g

    fast = fusegrad.compile(Sum)
    for a, b in (((3, 4), (4,)), ((3, 4), (3, 1)), ((4,), (3, 4)), ((), (2,)), ((1, 4), (3, 1)), ((2, 2), (2, 2))):
        assert_same(run(fast, leaf(*a), leaf(*b)), run(Sum, leaf(*a), leaf(*b)))


def test_static_sizes() -> None:
    fast = fusegrad.compile(Softmax, dynamic=False)
    for n in (3, 4, 3):
        assert_same(run(fast, leaf(n, 5)), run(Softmax, leaf(n, 5)))


@both
def test_a_bias_that_comes_and_goes(backend) -> None:
    fast = fusegrad.compile(Linear, backend=backend)
    for bias in (leaf(3), None, leaf(3), None):
        args = (leaf(4, 6), leaf(3, 6, seed=1), bias)
        assert_same(run(fast, *args), run(Linear, *args))


# ------------------------------------------------------------------ torch's own state
class Matmul(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.nn.functional.silu(x @ w)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return (g @ w.t().to(g.dtype)).to(x.dtype), (x.t().to(g.dtype) @ g).to(w.dtype)


@both
def test_autocast_on_and_off(backend) -> None:
    fast = fusegrad.compile(Matmul, backend=backend)
    for dtype in (None, torch.bfloat16, None, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            mine, theirs = run(fast, leaf(3, 4), leaf(4, 5)), run(Matmul, leaf(3, 4), leaf(4, 5))
        assert [t.dtype for t in mine] == [t.dtype for t in theirs]
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)


def test_backward_runs_in_the_autocast_state_of_its_own_time_as_in_eager() -> None:
    fast = fusegrad.compile(Matmul)
    for inside in (True, False):
        results = []
        for cls in (fast, Matmul):
            x, w = leaf(3, 4), leaf(4, 5)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
                y = cls.apply(x, w)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
                results.append([y.detach(), *torch.autograd.grad(y.float().sum(), (x, w))])
        assert_same(*results, tolerance=1e-2)


@both
def test_no_grad_and_inference_mode(backend) -> None:
    fast = fusegrad.compile(Softmax, backend=backend)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        facts = []
        for cls in (fast, Softmax):
            with mode():
                y = cls.apply(leaf(3, 4))
            facts.append((y.requires_grad, y.is_inference(), y.grad_fn is None))
            torch.testing.assert_close(y.detach(), leaf(3, 4).detach().softmax(-1))
        assert facts[0] == facts[1]
    with torch.inference_mode():
        made = torch.randn(3, 4)
        torch.testing.assert_close(fast.apply(made), made.softmax(-1))
    assert_same(run(fast, leaf(3, 4)), run(Softmax, leaf(3, 4)))


def test_the_default_dtype() -> None:
    class Makes(Function):
        @staticmethod
        def forward(ctx, x):
            return torch.ones(x.shape) * 2

        @staticmethod
        def backward(ctx, g):
            return g

    fast = fusegrad.compile(Makes)
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            assert fast.apply(torch.ones(2)).dtype is dtype
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_default_device_and_function_modes() -> None:
    fast = fusegrad.compile(Softmax)
    with torch.device("cpu"):
        assert_same(run(fast, leaf(3, 4)), run(Softmax, leaf(3, 4)))
    assert_same(run(fast, leaf(3, 4)), run(Softmax, leaf(3, 4)))


def test_parameters_buffers_and_subclasses() -> None:
    class Mine(torch.Tensor):
        pass

    fast = fusegrad.compile(Softmax)
    w = torch.nn.Parameter(torch.randn(3, 4))
    fast.apply(w).pow(2).sum().backward()
    expected = torch.autograd.grad(w.softmax(-1).pow(2).sum(), w)[0]
    torch.testing.assert_close(w.grad, expected)
    given = torch.randn(3, 4).as_subclass(Mine)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mine, theirs = fast.apply(given), Softmax.apply(given)
    assert type(mine) is type(theirs)
    torch.testing.assert_close(mine, theirs)


def test_complex_conjugated_and_negated_views() -> None:
    class Square(Function):
        @staticmethod
        def forward(ctx, z):
            ctx.save_for_backward(z)
            return z * z

        @staticmethod
        def backward(ctx, g):
            (z,) = ctx.saved_tensors
            return 2 * g * z.conj()

    fast = fusegrad.compile(Square)
    z = torch.randn(3, dtype=torch.complex64)
    for given in (z, z.conj(), z.imag, z.conj().imag):
        results = []
        for cls in (fast, Square):
            x = given.detach().requires_grad_()
            y = cls.apply(x)
            results.append([y.detach().resolve_conj(), torch.autograd.grad(y.abs().sum(), x)[0].resolve_conj()])
        assert all(torch.allclose(a, b) for a, b in zip(*results, strict=True))


@both
def test_saved_tensors_hooks_come_and_go(backend) -> None:
    fast = fusegrad.compile(RMSNorm, backend=backend)
    for active in (False, True, False, True):
        results = []
        for cls in (fast, RMSNorm):
            x, w = leaf(3, 4), leaf(4)
            if active:
                with torch.autograd.graph.saved_tensors_hooks(lambda t: t.t().contiguous(), lambda t: t.t()):
                    y = cls.apply(x, w)[0]
            else:
                y = cls.apply(x, w)[0]
            results.append(torch.autograd.grad(y.sum(), (x, w)))
        assert_same(*results)


# ------------------------------------------------------------------ threads
def in_threads(count: int, work: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


@both
def test_first_calls_from_many_threads_capture_once(backend) -> None:
    fast = fusegrad.compile(RMSNorm, backend=backend)
    before = fusegrad.stats()["captures"]
    expected = run(RMSNorm, leaf(4, 6), leaf(6))
    in_threads(8, lambda i: assert_same(run(fast, leaf(4, 6), leaf(6)), expected))
    assert fusegrad.stats()["captures"] == before + 2


def test_different_classes_and_shapes_from_many_threads() -> None:
    fast = {cls: fusegrad.compile(cls) for cls in (RMSNorm, Softmax, Linear)}

    def work(i: int) -> None:
        for n in (2, 3 + i):
            for cls, args in ((RMSNorm, (leaf(n, 6), leaf(6))), (Softmax, (leaf(n, 5),)),
                              (Linear, (leaf(n, 3), leaf(2, 3), None))):  # fmt: skip
                assert_same(run(fast[cls], *args), run(cls, *args))

    in_threads(6, work)


def test_backward_of_one_graph_from_several_threads() -> None:
    fast = fusegrad.compile(Softmax)
    x = leaf(3, 4)
    y = fast.apply(x)
    found: list[Any] = []
    in_threads(4, lambda i: found.append(torch.autograd.grad(y.sum() * (i + 1), x, retain_graph=True)[0]))
    assert len(found) == 4


def test_a_patched_setting_does_not_leak_into_another_thread() -> None:
    seen: list[Any] = []
    with fusegrad.config.patch(backend="interpret"):
        in_threads(1, lambda i: seen.append(fusegrad.config.settings().backend))
        assert fusegrad.config.settings().backend == "interpret"
    assert seen == [None]


def test_a_class_that_always_runs_as_written_has_no_key(monkeypatch) -> None:
    class Takes(Function):
        @staticmethod
        def forward(ctx, x, step, lock):
            ctx.step = step
            return step(x)

        @staticmethod
        def backward(ctx, g):
            return ctx.step(g), None, None

    scanned: list[Any] = []
    own = reads.scan
    monkeypatch.setattr(reads, "scan", lambda *functions: scanned.append(functions) or own(*functions))
    fast, x = fusegrad.compile(Takes), torch.ones(3, requires_grad=True)

    def call(k: float) -> None:
        x.grad = None
        fast.apply(x, lambda t: t * k, threading.Lock()).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [k] * 3

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusegrad.FallbackWarning)
        for n in range(10):
            call(float(n))
        first = len(scanned)
        for n in range(20):
            call(float(n))
    assert len(scanned) == first


def _many_readers() -> list[Any]:
    names = [f"NAME_{i}" for i in range(20)]
    env = {"__name__": "user", **dict.fromkeys(names, 1.0)}
    for i in range(6):
        exec(f"def f_{i}(x):\n    return x, {', '.join(names)}", env)
    return [env[f"f_{i}"] for i in range(6)]


def test_what_functions_read_is_bounded_for_all_values_of_a_call_together(monkeypatch):
    readers = _many_readers()

    class TakesReaders(Function):
        @staticmethod
        def forward(ctx, x, *functions):
            return x * 6

        @staticmethod
        def backward(ctx, g):
            return (g * 6, *[None] * 7)

    for facts, unbounded in ((10_000, False), (50, True)):
        monkeypatch.setattr(value_keys, "FACTS", facts)
        fast = fusegrad.compile(TakesReaders, backend="reference")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fusegrad.FallbackWarning)
            for n in range(3):
                x = torch.full((3,), float(n), requires_grad=True)
                assert torch.equal(fast.apply(x, {}.keys(), *readers), x * 6)
        compiler = fast._fusegrad
        assert compiler.ledger.records["forward"].status == "opaque"
        assert compiler.keys.is_unbounded is unbounded
        assert compiler._is_hopeless() is unbounded  # at once: no later call looks at all of it again
