"""What is compiled and what runs as written: `is_traceable`, fullgraph, opaque methods and their reasons."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from function_samples import BACKENDS, RMSNorm, Softmax, assert_same, leaf, raised, run, status
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function

import fusegrad

both = pytest.mark.parametrize("backend", BACKENDS)
TOTAL = 0.0
BUFFER = torch.zeros(3)
SEEN: list[Any] = []


class Numpy(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * torch.from_numpy(np.cos(x.detach().numpy()))


class Item(Function):
    @staticmethod
    def forward(ctx, x):
        return x * x.sum().item()

    @staticmethod
    def backward(ctx, g):
        return g * g.sum().item()


class Branch(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        if x.sum() > 0:
            return x * 2
        return x * 3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (2 if x.sum() > 0 else 3)


class AssignsData(Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.zeros_like(x)
        y.data = x + 1
        return y

    @staticmethod
    def backward(ctx, g):
        return g


class AsksForInt(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2 if isinstance(x.shape[0], int) else x * 3

    @staticmethod
    def backward(ctx, g):
        return g


class AsksForType(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2 if type(x) is torch.Tensor else x * 3

    @staticmethod
    def backward(ctx, g):
        return g


class Formats(Function):
    @staticmethod
    def forward(ctx, x):
        return x * len(f"{x.mean():.3f}")

    @staticmethod
    def backward(ctx, g):
        return g


class Counts(Function):
    """A counter outside: it has to count every call."""

    @staticmethod
    def forward(ctx, x):
        SEEN.append(type(x))
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g


class WritesGlobal(Function):
    @staticmethod
    def forward(ctx, x):
        global TOTAL
        TOTAL += 1
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g


class WritesBuffer(Function):
    @staticmethod
    def forward(ctx, x):
        BUFFER.add_(1)
        return x * BUFFER

    @staticmethod
    def backward(ctx, g):
        return g


class Clock(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.t = time.time()
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g


class Address(Function):
    @staticmethod
    def forward(ctx, x):
        return x * (x.data_ptr() > 0)

    @staticmethod
    def backward(ctx, g):
        return g


class Offset(Function):
    @staticmethod
    def forward(ctx, x):
        return x * (1 + x.storage_offset())

    @staticmethod
    def backward(ctx, g):
        return g


class ToList(Function):
    @staticmethod
    def forward(ctx, x):
        return x * sum(x.tolist())

    @staticmethod
    def backward(ctx, g):
        return g


class ReturnsSets(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, {x + 1}

    @staticmethod
    def backward(ctx, g, n):
        return g


class Kept:
    def __init__(self, twice: torch.Tensor) -> None:
        self.twice = twice


class ObjectOnCtx(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = Kept(x * 2)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * ctx.kept.twice


OPAQUE = {
    Numpy: "numpy array",
    Item: "reads the data of a tensor",
    Branch: "control flow depends on the data",
    AssignsData: "assigns `.data`",
    AsksForInt: "differs in content",
    AsksForType: "differs in content",
    Formats: None,
    Clock: "uses the module `time`",
    Address: "memory address",
    ToList: None,
    ReturnsSets: "returns a set",
    Offset: "reads `.storage_offset` of a tensor",
    ObjectOnCtx: "`ctx.kept` is a Kept with tensors",
}


SEGMENTED = (Numpy, Item, Branch, AssignsData, Formats, Clock, Address, ToList, Offset)
"""Those whose statements run as written between compiled segments."""


def place(cls: type) -> tuple[str, int, int]:
    code = cls.forward.__code__
    return code.co_filename, code.co_firstlineno, max(line for *_, line in code.co_lines() if line)


@pytest.mark.parametrize("cls", [c for c in OPAQUE if c not in (Item, Branch)], ids=lambda c: c.__name__)
def test_an_opaque_method_gives_eagers_results_one_warning_and_its_reason(cls) -> None:
    fast = fusegrad.compile(cls)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in (5, 5, 6):
            mine, theirs = run(fast, leaf(n)), run(cls, leaf(n))
            if cls is not ReturnsSets:
                assert_same(mine, theirs, bitwise=True)
    texts = [str(w.message) for w in caught if issubclass(w.category, fusegrad.FallbackWarning)]
    assert len([t for t in texts if ".forward" in t]) == 1 and len(texts) <= 2
    record = fast._fusegrad.ledger.records["forward"]
    assert record.status == ("compiled" if cls in SEGMENTED else "opaque")
    told = fast._fusegrad.ledger.opaque_calls[0] if cls in SEGMENTED else record
    if OPAQUE[cls] is not None:
        assert OPAQUE[cls] in f"it {told.reason}" and told.reason in texts[0]
    filename, first, last = place(cls)
    name, line = told.where.rsplit(":", 1)
    assert name == filename and first <= int(line) <= last
    assert fusegrad.explain(fast, leaf(5)).to_dict()["methods"]["forward"]["reason"] == record.reason


@pytest.mark.parametrize("cls", OPAQUE, ids=lambda c: c.__name__)
def test_fullgraph_names_the_method_the_reason_and_the_line(cls) -> None:
    fast = fusegrad.compile(cls, fullgraph=True)
    for _ in range(2):
        with pytest.raises(fusegrad.NotTraceableError) as found:
            run(fast, leaf(5))
        text = str(found.value)
        assert text.startswith(f"{cls.__name__}.forward cannot be traced: ") and place(cls)[0] + ":" in text
        assert OPAQUE[cls] is None or OPAQUE[cls] in text
        assert "fix:" in text


def test_fullgraph_names_backward() -> None:
    class Backward(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * 2 if x.sum() > 0 else g

    with pytest.raises(fusegrad.NotTraceableError, match=r"Backward\.backward cannot be traced: its control flow"):
        fusegrad.compile(Backward, fullgraph=True).apply(leaf(3))
    fast = fusegrad.compile(Backward)
    assert_same(run(fast, leaf(3)), run(Backward, leaf(3)))
    assert status(fast) == status(fast, "backward") == "compiled"


@both
def test_an_opaque_backward_behind_a_compiled_forward(backend) -> None:
    class Clipped(Function):
        @staticmethod
        def forward(ctx, x):
            e = x.exp()
            ctx.save_for_backward(x, e, e * 2)
            ctx.k = x.shape[0]
            return e * 3

        @staticmethod
        def backward(ctx, g):
            x, e, twice = ctx.saved_tensors
            norm = float((g * e).norm().numpy())
            return g * x.exp() * 3 / max(norm, 1.0) * ctx.k + 0 * twice

    fast = fusegrad.compile(Clipped, backend=backend)
    with pytest.warns(fusegrad.FallbackWarning, match=r"Clipped\.backward"):
        assert_same(run(fast, leaf(4)), run(Clipped, leaf(4)))
    for n in (7, 4):
        assert_same(run(fast, leaf(n)), run(Clipped, leaf(n)))
    seconds = []
    for cls in (fast, Clipped):
        x = leaf(4)
        (g,) = torch.autograd.grad(cls.apply(x).sum(), x, create_graph=True)
        seconds.append([g.detach(), *torch.autograd.grad(g.sum(), x)])
    assert_same(*seconds)


def test_effects_happen_as_often_as_in_eager() -> None:
    global TOTAL
    counts = []
    for make in (lambda c: fusegrad.compile(c), lambda c: c):
        TOTAL = 0.0
        BUFFER.zero_()
        SEEN.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fusegrad.FallbackWarning)
            for cls in map(make, (Counts, WritesGlobal, WritesBuffer)):
                for _ in range(3):
                    run(cls, leaf(3))
        counts.append((TOTAL, BUFFER.tolist(), list(SEEN)))
    assert counts[0] == counts[1] == (3.0, [3.0] * 3, [torch.Tensor] * 3)


def test_print_prints_every_time_and_real_numbers(capsys) -> None:
    class Prints(Function):
        @staticmethod
        def forward(ctx, x):
            print(x.sum())
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g

    with pytest.warns(fusegrad.FallbackWarning, match="calls `print`"):
        fast = fusegrad.compile(Prints)
        fast.apply(torch.ones(3))
    fast.apply(torch.ones(4))
    assert capsys.readouterr().out == "tensor(3.)\ntensor(4.)\n"


def test_a_method_that_reads_where_a_view_begins() -> None:
    base = torch.arange(8.0)
    fast = fusegrad.compile(Offset)
    with pytest.warns(fusegrad.FallbackWarning, match="storage_offset"):
        for offset in (0, 3, 0, 2):
            x = base[offset : offset + 3]
            assert torch.equal(fast.apply(x), x * (1 + offset))


def test_what_opaque_methods_return_is_their_own() -> None:
    with pytest.warns(fusegrad.FallbackWarning):
        y, others = fusegrad.compile(ReturnsSets).apply(torch.ones(2))
    (first,) = others
    assert y.tolist() == first.tolist() == [2.0] * 2 and not isinstance(first, FakeTensor)


# ------------------------------------------------------------------ is_traceable
class Declared(Function):
    is_traceable = False

    @staticmethod
    def forward(ctx, x):
        SEEN.append((type(x) is torch.Tensor and not isinstance(x, FakeTensor), torch.is_grad_enabled()))
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        SEEN.append((not isinstance(g, FakeTensor), torch.is_grad_enabled()))
        (x,) = ctx.saved_tensors
        return g * x.exp()


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_false_never_meets_a_fake(backend) -> None:
    SEEN.clear()
    fast = fusegrad.compile(Declared, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(run(fast, leaf(3)), run(Declared, leaf(3)), bitwise=True)
    found = fusegrad.explain(fast, leaf(3)).to_dict()
    fusegrad.explain(fast, "f32[3]")
    assert SEEN == [(True, False)] * 4
    assert found["methods"]["forward"]["status"] == "opaque"
    assert "is_traceable = False" in found["methods"]["forward"]["reason"]


def test_false_under_torch_func_is_the_users_own() -> None:
    SEEN.clear()
    mine = raised(lambda: torch.func.grad(lambda x: fusegrad.compile(Declared).apply(x).sum())(torch.ones(3)))
    assert mine == raised(lambda: torch.func.grad(lambda x: Declared.apply(x).sum())(torch.ones(3)))


def test_false_with_fullgraph_runs_as_declared() -> None:
    fast = fusegrad.compile(Declared)
    assert_same(run(fast, leaf(3)), run(Declared, leaf(3)))


def test_true_over_an_untraceable_body_raises() -> None:
    class Lie(Branch):
        is_traceable = True

    class Sly(AsksForInt):
        is_traceable = True

    class Loud(Counts):
        is_traceable = True

    for cls in (Lie, Sly, Loud):
        fast = fusegrad.compile(cls)
        for _ in range(2):
            with pytest.raises(fusegrad.NotTraceableError, match=rf"{cls.__name__}.forward"):
                fast.apply(leaf(3))


def test_true_is_captured_without_a_warning() -> None:
    class Promise(Softmax):
        is_traceable = True

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = fusegrad.compile(Promise)
        assert_same(run(fast, leaf(3, 4)), run(Promise, leaf(3, 4)))
    assert status(fast) == status(fast, "backward") == "compiled"


@pytest.mark.parametrize("value", [1, 0, "yes", [], np.bool_(True)])
def test_anything_but_a_bool_is_a_type_error(value) -> None:
    cls = type("Marked", (Softmax,), {"is_traceable": value})
    with pytest.raises(TypeError, match="must be exactly a bool"):
        fusegrad.compile(cls)


def test_the_mark_is_inherited() -> None:
    class Child(Declared):
        pass

    class Undone(Child):
        is_traceable = True

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * x.exp()

    child, undone = fusegrad.compile(Child), fusegrad.compile(Undone)
    run(undone, leaf(3))
    run(child, leaf(3))
    assert status(undone) == "compiled" and status(child) != "compiled"


# ------------------------------------------------------------------ the user's Python does not run again
def calls_of(codes: dict[Any, str], action: Any) -> list[str]:
    found: list[str] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in codes:
            found.append(codes[frame.f_code])

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


@both
@pytest.mark.parametrize("cls", [RMSNorm, Softmax])
def test_after_warm_up_the_body_does_not_run(cls, backend) -> None:
    fast = fusegrad.compile(cls, backend=backend)
    names = ("forward", "setup_context", "backward")
    codes = {getattr(cls, n).__code__: n for n in names if n in vars(cls)}

    def call(n: int) -> None:
        run(fast, *((leaf(n, 6), leaf(6)) if cls is RMSNorm else (leaf(n, 6),)))

    assert calls_of(codes, lambda: call(3)), "the probe itself"
    for n in (3, 4):
        call(n)
    assert calls_of(codes, lambda: [call(n) for n in (3, 4, 5, 9)]) == []
