"""Effects are decided by what a call reaches: what stands in a branch that is not taken is no reason to fall back."""

from __future__ import annotations

import gc
import re
import sys
import warnings
from typing import Any

import numpy
import pytest
import torch
from torch.autograd import Function

import fusegrad

LOG: list[Any] = []


class Speaks(Function):
    @staticmethod
    def forward(ctx, x, verbose):
        ctx.verbose = verbose
        if verbose: LOG.append(float(x.sum()))  # noqa: E701
        return x * 2

    @staticmethod
    def backward(ctx, g):
        if ctx.verbose:
            LOG.append("backward")
        return g * 2, None


class Keeps(Function):
    """`data`, `grad` and the like on ctx are names as any other."""

    @staticmethod
    def forward(ctx, x, k):
        ctx.data, ctx.grad, ctx._version = k, k + 1, k + 2
        return x * k

    @staticmethod
    def backward(ctx, g):
        return g * ctx.data * ctx.grad * ctx._version, None


def loud(x, verbose):
    if verbose:
        LOG.append(tuple(x.shape))
    return x * 3


class Given(Function):
    """The function that speaks is an argument."""

    @staticmethod
    def forward(ctx, x, verbose, function):
        return function(x, verbose)

    @staticmethod
    def backward(ctx, g):
        return g * 3, None, None


class Nested(Function):
    """The one that speaks is called by another one."""

    class Inner(Speaks):
        pass

    @staticmethod
    def forward(ctx, x, verbose):
        return Nested.Inner.apply(x + 1, verbose) * 2

    @staticmethod
    def backward(ctx, g):
        return g * 4, None


class Quiet(Nested):
    """As Nested, of which no call ever speaks: once one did, the inner class runs as written for good."""

    class Inner(Speaks):
        pass

    @staticmethod
    def forward(ctx, x, verbose):
        return Quiet.Inner.apply(x + 1, verbose) * 2


def outcome(cls: Any, *args: Any) -> list[Any]:
    LOG.clear()
    x = torch.arange(3.0, requires_grad=True)
    y = cls.apply(x, *args)
    y.sum().backward()
    return [y.detach().tolist(), x.grad.tolist(), [str(entry) for entry in LOG]]


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize(("cls", "more"), [(Speaks, ()), (Given, (loud,)), (Nested, ())])
def test_an_effect_happens_exactly_where_its_branch_is_taken(cls, more, backend) -> None:
    fast = fusegrad.compile(cls, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusegrad.FallbackWarning)
        for verbose in (False, False, True, False, True, True, False):
            assert outcome(fast, verbose, *more) == outcome(cls, verbose, *more)


QUIET = [(Speaks, (False,)), (Given, (False, loud)), (Quiet, (False,)), (Keeps, (2.0,))]


@pytest.mark.parametrize(("cls", "args"), QUIET)
def test_what_no_call_reaches_is_compiled_without_a_warning(cls, args) -> None:
    fast = fusegrad.compile(cls)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert outcome(fast, *args) == outcome(cls, *args)
    found = fusegrad.explain(fast, torch.ones(3), *args).methods
    assert {found[name].status for name in ("forward", "backward")} == {"compiled"}


def test_the_reason_is_that_of_the_effect() -> None:
    fast = fusegrad.compile(Speaks)
    with pytest.warns(fusegrad.FallbackWarning, match=r"it calls `append` of a list from outside .*effects_reached"):
        outcome(fast, True)


def test_an_effect_that_a_method_swallows_is_one() -> None:
    class Swallows(Function):
        @staticmethod
        def forward(ctx, x):
            try:
                if x.dim() == 1:
                    LOG.append("seen")
            except Exception:
                pass
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    fast = fusegrad.compile(Swallows)
    with pytest.warns(fusegrad.FallbackWarning, match="append"):
        assert outcome(fast) == outcome(Swallows)
    assert outcome(fast) == outcome(Swallows)


def test_a_trace_function_of_the_user_stays() -> None:
    def trace(frame, event, argument):
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        outcome(fusegrad.compile(Speaks), False)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)


# ------------------------------------------------------------------ what is said of those that are reached
class Elementwise(Function):
    @staticmethod
    def backward(ctx, g):
        return g


class OfADistribution(Elementwise):
    @staticmethod
    def forward(ctx, x):
        return torch.distributions.Normal(x, torch.ones_like(x), validate_args=True).log_prob(x * 2)


class OfASize(Elementwise):
    @staticmethod
    def forward(ctx, x):
        return x * float(numpy.fmod(x.shape[0], 2))


class HoldsAFunction(Elementwise):
    @staticmethod
    def forward(ctx, x):
        ctx.step = lambda g: g * x
        return x * 2


class HoldsAModule(Elementwise):
    @staticmethod
    def forward(ctx, x):
        ctx.layer = torch.nn.Linear(3, 3)
        return x * 2


class NotesOnATensor(Elementwise):
    @staticmethod
    def forward(ctx, x):
        x._dtype = torch.float16
        return x * 2


ADVICE = [
    (OfADistribution, "FG017", "validate_args=False"), (OfASize, "FG012", "numpy|torch"),
    (HoldsAFunction, "FG082", "save_for_backward"),
    (HoldsAModule, "FG082", "functional_call"), (NotesOnATensor, "FG026", "setup_context"),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "code", "advice"), ADVICE)
def test_the_advice_fits_the_reason(cls, code, advice) -> None:
    fast = fusegrad.compile(cls)
    with pytest.warns(fusegrad.FallbackWarning):
        assert outcome(fast) == outcome(cls)
    told = fusegrad.explain(fast, torch.ones(3)).to_dict()
    found = told["opaque"][0] if told["opaque"] else told["methods"]["forward"]
    assert found["code"] == code and re.search(advice, found["fix"])


def test_class_methods_have_their_arguments_names() -> None:
    class OfTheClass(Function):
        @classmethod
        def forward(cls, ctx, first, second):
            return first * second

        @classmethod
        def backward(cls, ctx, g):
            return g, None

    fast = fusegrad.compile(OfTheClass)
    outcome(fast, torch.ones(3))
    assert "first: float32" in str(fusegrad.explain(fast, torch.ones(3), torch.ones(3)))


# ------------------------------------------------------------------ in other packages
@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package as pip installs one."""
    folder = tmp_path / "site-packages" / "of_others"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(
        "import random\nimport time as clock\nfrom random import uniform\nCACHE, COLLECTED = {}, {}\n"
        "def inner(x, how):\n"
        "    if how == 'draws':\n        return x * random.random()\n"
        "    if how == 'clock':\n        return x * clock.perf_counter()\n"
        "    if how == 'uniform':\n        return x * uniform(1, 2)\n"
        "    CACHE[how] = how\n    return x * 2\n"
        "def collecting(phase, info):\n    COLLECTED[phase] = clock.perf_counter(), random.random()\n"
        "def outer(x, how):\n    return inner(x, how)\n"
    )
    monkeypatch.syspath_prepend(str(folder.parent))
    yield __import__("of_others")
    del sys.modules["of_others"]


@pytest.mark.parametrize("how", ["draws", "clock", "uniform"])
def test_what_another_package_draws_is_drawn_at_every_call(how, installed) -> None:
    class Calls(Elementwise):
        @staticmethod
        def forward(ctx, x, how):
            return installed.outer(x, how)

        @staticmethod
        def backward(ctx, g):
            return g, None

    fast, x = fusegrad.compile(Calls), torch.ones(3, requires_grad=True)
    with pytest.warns(fusegrad.FallbackWarning, match="uses the module `(time|random)`"):
        first = fast.apply(x, how)
    assert fast.apply(x, how)[0] != first[0] != fast.apply(x, how)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = fusegrad.compile(type("Calls", (Calls,), {}))
        for _ in range(3):
            assert own.apply(x, "nothing").tolist() == [2.0] * 3


def test_what_the_garbage_collector_calls_is_no_effect_of_a_method(installed) -> None:
    """It runs in between, wherever an object is made: in a frame that is about to be traced, too."""

    class Plain(Elementwise):
        @staticmethod
        def forward(ctx, x, how):
            return installed.outer(x, how)

        @staticmethod
        def backward(ctx, g):
            return g * 2, None

    fast, x, before = fusegrad.compile(Plain, fullgraph=True), torch.ones(3, requires_grad=True), gc.get_threshold()
    gc.callbacks.append(installed.collecting)
    gc.set_threshold(3)
    try:
        y = fast.apply(x, "nothing")
        (g,) = torch.autograd.grad(y.sum(), x)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(installed.collecting)
    assert y.tolist() == g.tolist() == [2.0] * 3 and set(installed.COLLECTED) >= {"start", "stop"}


def told_at_the_end() -> None:
    LOG.append("at the end")


def told_at_its_end() -> None:
    LOG.append("first")
    torch.autograd.Variable._execution_engine.queue_callback(told_at_the_end)  # type: ignore[attr-defined]


class Queues(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        torch.autograd.Variable._execution_engine.queue_callback(told_at_its_end)
        return g * 2


ENGINE = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]


class QueuesByName(Queues):
    @staticmethod
    def backward(ctx, g):
        ENGINE.queue_callback(told_at_its_end)
        return g * 2


@pytest.mark.parametrize("cls", [Queues, QueuesByName])
def test_what_autograds_engine_is_told_is_told_once_a_backward(cls) -> None:
    fast = fusegrad.compile(cls)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusegrad.FallbackWarning)
        for _ in range(4):
            assert outcome(fast) == outcome(cls)
    assert LOG == ["first", "at the end"]
