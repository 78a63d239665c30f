"""A number with many values: the first few are captured at once, others when they come often; all else is as ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import Function

import fusegrad
from fusegrad.ir.codes import code_of
from fusegrad.runtime.compiled import budget

Tensor = torch.Tensor


class Scaled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float, name: str = "") -> Tensor:
        ctx.by = by
        return x * by

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad * ctx.by * 2, None, None  # not the derivative of forward


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "AT_ONCE", 2)
    monkeypatch.setattr(budget, "OFTEN", 3)


def told(cls: Any, by: float, *more: Any, dtype: torch.dtype = torch.float32) -> list[float]:
    x = torch.ones(3, dtype=dtype, requires_grad=True)
    y = cls.apply(x, by, *more)
    y.sum().backward()
    return [*y.tolist(), *x.grad.tolist()]  # type: ignore[union-attr]


def captured(fast: Any) -> int:
    return len(fast._fusegrad.table.by_facts)


def test_a_number_that_is_new_at_every_call_is_captured_a_few_times() -> None:
    fast: Any = fusegrad.compile(Scaled)
    with pytest.warns(fusegrad.FallbackWarning, match="FG055"):
        for at in range(6):
            assert told(fast, float(at)) == told(Scaled, float(at))
    assert captured(fast) == 2
    report = fusegrad.explain(fast, torch.ones(3, requires_grad=True), 0.0)
    assert "FG055" in str(report)


class Repeated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float, turns: int) -> Tensor:
        ctx.by = by
        for _ in range(turns):
            x = x.sin() * by
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad * ctx.by * 2, None, None


def carried(x: Tensor) -> Tensor:
    h, hs = x[0], list[Tensor]()
    for t in range(x.shape[0]):
        h = torch.sin(h) * x[t]
        hs.append(h)
    return torch.stack(hs)


def test_a_loop_counts_as_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The three short traces of it have 60 operations."""
    monkeypatch.setattr(budget, "WORK", 50)
    fast = fusegrad.compile(carried)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        x = torch.randn(20, 3).to(dtype)
        assert torch.equal(fast(x), carried(x))
    assert captured(fast) == 4, "none falls back"


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_a_long_graph_counts_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "AT_ONCE", 100)
    monkeypatch.setattr(budget, "WORK", 24)
    short: Any = fusegrad.compile(Repeated)
    long: Any = fusegrad.compile(Repeated)
    for by in (1.0, 2.0, 2.0):
        assert told(short, by, 1) == told(Repeated, by, 1)
        assert told(long, by, 30) == told(Repeated, by, 30)
    assert captured(short) == 2
    assert captured(long) == 1
    for _ in range(4):  # another dtype, in which it is called often
        x = torch.rand(3, dtype=torch.float64)
        assert torch.equal(long.apply(x, 2.0, 30), Repeated.apply(x, 2.0, 30))
    assert captured(long) == 2


def made_anew(turns: int) -> Any:
    class Made(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
            ctx.by = by
            return x * by

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
            for _ in range(turns):
                grad = grad * ctx.by
            return grad, None

    return Made


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_classes_that_the_same_lines_make_share_what_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "_families", {})
    monkeypatch.setattr(budget, "FAMILY", 150)
    made = [made_anew(30) for _ in range(5)]
    fast: list[Any] = [fusegrad.compile(cls) for cls in made]
    for one, cls in zip(fast, made, strict=True):
        assert told(one, 2.0) == told(cls, 2.0)
    assert [captured(one) for one in fast] == [1, 1, 1, 0, 0]  # about 100 each, but for the first
    assert code_of(fast[-1]._fusegrad.ledger.records["forward"].reason) == "FG055"
    for _ in range(3):  # one that is kept, and called often
        assert told(fast[-1], 2.0) == told(made[-1], 2.0)
    assert captured(fast[-1]) == 1


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_a_class_has_its_own_count_however_often_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "_families", {})
    monkeypatch.setattr(budget, "FAMILY", 48)
    cls = made_anew(30)
    fast: list[Any] = [fusegrad.compile(cls) for _ in range(5)]
    assert [told(one, 2.0) for one in fast] == [told(cls, 2.0)] * 5
    assert [captured(one) for one in fast] == [1] * 5


# ------------------------------------------------------------------ further kinds
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("turns", [1, 40])
def test_further_kinds_are_captured_at_once(turns: int) -> None:
    fast: Any = fusegrad.compile(Repeated)
    for number, dtype in enumerate(DTYPES, 1):
        assert told(fast, 2.0, turns, dtype=dtype) == told(Repeated, 2.0, turns, dtype=dtype)
        assert captured(fast) == number
    record = fast._fusegrad.ledger.records["forward"]
    assert (record.status, record.reason) == ("compiled", None)


class RefusesLong(Function):
    """One that is refused for some sizes, each of which is another kind, and captured for others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.mark_non_differentiable()
        for _ in range(10):
            x = x.sin()
        if name.startswith("refused"):
            assert type(x).__name__ != "FakeTensor", "only on real tensors"
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad * 3, None


def attempts(fast: Any, *args: Any) -> int:
    """How often a kind comes until it is tried; 0: it is not."""
    before = fusegrad.stats()["captures"]
    for call in range(1, 20):
        assert torch.equal(fast.apply(*args), RefusesLong.apply(*args))
        if fusegrad.stats()["captures"] > before:
            return call
    return 0


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_kinds_are_tried_at_growing_intervals_while_captures_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "AT_ONCE", 100)
    monkeypatch.setattr(budget, "FAILED", 12 + budget.OVERHEAD)
    monkeypatch.setattr(budget, "OFTEN", 8)
    fast, x = fusegrad.compile(RefusesLong, traceable=None), torch.ones(3)
    calls = [attempts(fast, x, f"refused {n}") for n in range(4)]
    assert calls == [1, 1, 2, 4], "what failed once may be captured for another kind"
    assert "only on real tensors" in fast._fusegrad.ledger.records["forward"].reason
    assert "FG056" in str(fusegrad.explain(fast))
    assert attempts(fast, x, "other") == 8, "no kind is given up"
    assert captured(fast) == 1
    assert attempts(fast, x.double(), "other") == 8


def test_fullgraph_tries_each_kind_and_raises() -> None:
    fast: Any = fusegrad.compile(RefusesLong, fullgraph=True)
    for n in range(3):
        with pytest.raises(fusegrad.NotTraceableError, match="only on real tensors"):
            fast.apply(torch.ones(3), f"refused {n}")


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_a_number_that_comes_often_is_captured() -> None:
    fast: Any = fusegrad.compile(Scaled)
    for at in (0.0, 1.0, 2.0, 3.0, 2.0, 3.0):
        assert told(fast, at) == told(Scaled, at)
    assert captured(fast) == 2
    told(fast, 2.0)
    assert captured(fast) == 3
    told(fast, 4.0)
    assert captured(fast) == 3


def test_other_dtypes_layouts_and_words_are_captured_at_once() -> None:
    fast: Any = fusegrad.compile(Scaled)
    kinds = [(dtype, word) for dtype in (torch.float32, torch.float64, torch.float16) for word in ("a", "b")]
    for dtype, word in kinds:
        assert told(fast, 1.0, word, dtype=dtype) == told(Scaled, 1.0, word, dtype=dtype)
    assert captured(fast) == len(kinds)


def test_fullgraph_captures_every_number() -> None:
    fast: Any = fusegrad.compile(Scaled, fullgraph=True)
    for at in range(5):
        told(fast, float(at))
    assert captured(fast) == 5


def test_under_a_transform_a_capture_does_not_wait() -> None:
    fast: Any = fusegrad.compile(Scaled)
    x = torch.ones(3)
    for at in range(5):
        assert torch.func.grad(lambda x, by=float(at): fast.apply(x, by).sum())(x).tolist() == [2.0 * at] * 3
    assert captured(fast) == 5


class Applied(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, f: Any) -> Tensor:
        ctx.save_for_backward(x)
        return f(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad * 3, None


class AppliedToData(Applied):
    @staticmethod
    def forward(ctx: Any, x: Tensor, f: Any) -> Tensor:
        ctx.save_for_backward(x)
        return f(x) * 2 if x.sum() > 0 else f(x)


def _multiplication(by: list[int]) -> Any:
    return lambda x: x * by[0]


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
@pytest.mark.parametrize("cls", [Applied, AppliedToData])
def test_a_closure_that_is_new_at_every_call_is_captured_a_few_times(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "AT_ONCE", 100)
    fast: Any = fusegrad.compile(cls)
    for at in range(8):
        times: Any = _multiplication([at])
        assert told(fast, times) == told(cls, times)
    assert captured(fast) == budget.CLOSURES


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_closures_are_counted_for_all_kinds_of_calls_of_a_class() -> None:
    fast: Any = fusegrad.compile(Applied)
    for dims in range(1, 9):
        x, times = torch.ones([2] * dims), _multiplication([dims])
        assert torch.equal(fast.apply(x, times), Applied.apply(x, times))
    assert captured(fast) == budget.CLOSURES


class AsksForSome(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        if by < 10 and x.sum() > 100:
            return x
        return x * by

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad * ctx.by * 2, None


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_what_was_in_the_way_with_one_number_is_not_met_again_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "AT_ONCE", 100)
    fast: Any = fusegrad.compile(AsksForSome)
    tried = []
    for by in (1.0, 2.0, 3.0, 20.0, 30.0):
        before = fusegrad.stats()["captures"]
        assert told(fast, by) == told(AsksForSome, by)
        tried.append(fusegrad.stats()["captures"] - before)
    assert tried == [2, 1, 1, 1, 1]
    whole = [not s.captured.opaque for s in fast._fusegrad.table]
    assert whole == [False, False, False, True, True]
    assert told(fast, 20.0) == told(AsksForSome, 20.0)
    assert captured(fast) == 5
