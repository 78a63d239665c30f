"""A fault of ours in a call: the user's own method answers, once, with a warning, a record and a file."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import Function

import fusegrad
from fusegrad.runtime.autograd import backward, node
from fusegrad.runtime.capture import captured, first_call_check
from fusegrad.runtime.capture.captured import CapturedFunction
from fusegrad.runtime.capture.outputs import rebuild_output
from fusegrad.runtime.compiled import keys
from fusegrad.runtime.execution.executable import Executable
from fusegrad.runtime.fallback import answer as fallback
from fusegrad.runtime.fast_path import entry_codegen as written
from fusegrad.runtime.functorch import backward_unit, call, unit
from fusegrad.runtime.functorch.batching import batched_unit
from fusegrad.runtime.functorch.rules import functorch_function

Tensor = torch.Tensor
BACKENDS = ("reference", "interpret")
told = pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")


class Gated(Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return torch.sigmoid(x * w) * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        gate = torch.sigmoid(x * w)
        inner = g * x * gate * (1 - gate)
        return g * gate + inner * w, inner * x


class Doubled(Function):
    """Writes to its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


class Noise(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Picky(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, i: Tensor) -> Tensor:
        ctx.save_for_backward(i)
        return x[i]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g.new_zeros(3).index_add(0, ctx.saved_tensors[0], g), None


def failing(*_: Any, **__: Any) -> Any:
    raise LookupError("no such value")


def pair() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3).requires_grad_(), torch.randn(4, 3).requires_grad_()


def both_ways(call: Callable[..., Tensor], args: tuple[Tensor, ...]) -> list[Tensor]:
    y = call(*args)
    return [y, *torch.autograd.grad(y, args, torch.ones_like(y))]


PLACES = {
    "the scan": (keys.Keys, "scan"),
    "the key": (keys, "exact_key"),
    "the capture": (captured, "capture_forward"),
    "the comparison": (first_call_check, "bitwise_difference"),
    "the choice of an executable": (Executable, "_choose"),
    "the node": (node, "make_node"),
    "the launch": (Executable, "__call__"),
    "sizes": (CapturedFunction, "sizes"),
    "backward": (backward, "run_backward"),
    "the written entry": (written, "guard_tensors"),
}


@told
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("owner", "name"), PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("before", [0, 2, 5])
def test_the_answer_is_eagers(
    owner: Any, name: str, before: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, args = fusegrad.compile(Gated, backend=backend), pair()
    for _ in range(before):
        both_ways(fast.apply, args)
    monkeypatch.setattr(owner, name, failing)
    for _ in range(2):
        torch.testing.assert_close(both_ways(fast.apply, args), both_ways(Gated.apply, args))
    monkeypatch.undo()
    torch.testing.assert_close(both_ways(fast.apply, args), both_ways(Gated.apply, args))


def test_it_is_told_once_on_record_and_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSEGRAD_CACHE_DIR", str(tmp_path))
    fast, args = fusegrad.compile(Gated), pair()
    monkeypatch.setattr(first_call_check, "bitwise_difference", failing)
    with pytest.warns(fusegrad.FallbackWarning, match=r"Gated.forward .*internal error: LookupError.*FG071") as seen:
        for _ in range(3):
            fast.apply(*args)
    assert len([w for w in seen if "internal error" in str(w.message)]) == 1
    assert str(seen[0].filename) == __file__
    (file,) = (tmp_path / "faults").iterdir()
    assert "no such value" in file.read_text() and "float32 [4, 3] cpu" in file.read_text()
    record = fast._fusegrad.ledger.records["forward"]
    assert record.status == "opaque" and record.code == "FG071" and str(file) in record.reason
    assert "internal error: LookupError" in str(fusegrad.explain(fast, *args))


@told
def test_a_file_that_cannot_be_written_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    monkeypatch.setenv("FUSEGRAD_CACHE_DIR", str(tmp_path / "cache"))
    fast, args = fusegrad.compile(Gated), pair()
    monkeypatch.setattr(first_call_check, "bitwise_difference", failing)
    torch.testing.assert_close(both_ways(fast.apply, args), both_ways(Gated.apply, args))
    assert "internal error" in fast._fusegrad.ledger.records["forward"].reason


@told
def test_the_same_call_does_not_fail_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(first_call_check, "bitwise_difference", lambda *_: calls.append(1) or failing())
    fast, args = fusegrad.compile(Gated), pair()
    for _ in range(4):
        fast.apply(*args)
    assert len(calls) == 1


@told
def test_after_a_few_faults_a_class_runs_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(keys, "exact_key", lambda *_: calls.append(1) or failing())
    fast, args = fusegrad.compile(Gated), pair()
    for _ in range(20):
        fast.apply(*args)
    assert len(calls) < 10


@told
@pytest.mark.parametrize("backend", BACKENDS)
def test_fullgraph_raises(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, args = fusegrad.compile(Gated, backend=backend, fullgraph=True), pair()
    monkeypatch.setattr(first_call_check, "bitwise_difference", failing)
    with pytest.raises(fallback.FaultError, match="LookupError: no such value") as raised:
        fast.apply(*args)
    assert raised.value.code == "FG901" and raised.value.__context__ is None


def test_the_suite_takes_it_for_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_call_check, "bitwise_difference", failing)
    with pytest.raises(fusegrad.FallbackWarning, match="internal error"):
        fusegrad.compile(Gated).apply(*pair())


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_of_the_users_is_theirs(backend: str) -> None:
    fast, x = fusegrad.compile(Picky, backend=backend), torch.randn(3)
    fast.apply(x, torch.tensor([0, 2]))
    with pytest.raises(IndexError) as raised:
        fast.apply(x, torch.tensor([0, 5]))
    assert raised.value.__context__ is None and raised.value.__cause__ is None
    assert not fast._fusegrad.ledger.faults


@told
def test_random_numbers_are_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, x = fusegrad.compile(Noise), torch.randn(5).requires_grad_()
    fast.apply(x)
    monkeypatch.setattr(rebuild_output, "__code__", failing.__code__)  # after forward has drawn
    torch.manual_seed(0)
    mine = fast.apply(x), torch.get_rng_state()
    torch.manual_seed(0)
    theirs = Noise.apply(x), torch.get_rng_state()
    torch.testing.assert_close(mine, theirs)


def test_what_is_written_is_not_written_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = fusegrad.compile(Doubled)
    fast.apply(torch.ones(3))
    monkeypatch.setattr(rebuild_output, "__code__", failing.__code__)  # after forward has written
    x = torch.ones(3)
    with pytest.raises(LookupError):
        fast.apply(x)
    assert x.tolist() == [2, 2, 2]


@told
def test_what_is_not_yet_written_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, x = fusegrad.compile(Doubled), torch.ones(3)
    fast.apply(torch.ones(3))
    monkeypatch.setattr(Executable, "__call__", failing)
    assert fast.apply(x) is x and x.tolist() == [2, 2, 2]


@told
def test_no_tensor_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = fusegrad.compile(Gated)
    fast.apply(*pair())
    monkeypatch.setattr(Executable, "__call__", failing)
    args = pair()
    alive = [weakref.ref(a) for a in args]
    fast.apply(*args)
    del args
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


FUNC: dict[str, Callable[[Callable[..., Tensor], Tensor, Tensor], Any]] = {
    "vmap": lambda f, x, w: torch.vmap(f)(x, w),
    "jvp": lambda f, x, w: torch.func.jvp(f, (x, w), (w, x)),
    "grad": lambda f, x, w: torch.func.grad(lambda *a: f(*a).sum(), (0, 1))(x, w),
    "vmap of grad": lambda f, x, w: torch.vmap(torch.func.grad(lambda *a: f(*a).sum(), (0, 1)))(x, w),
    "hessian": lambda f, x, w: torch.func.jacrev(torch.func.grad(lambda *a: f(*a).sum()))(x, w),
}
RULES = {
    "units": (unit.TransformableGraph, "captured"),
    "batches": (batched_unit.BatchedUnit, "execute"),
    "rules": (functorch_function.FunctorchFunction, "run_forward"),
    "backward": (backward_unit.BackwardUnit, "execute"),
    "tangents": (functorch_function.FunctorchFunction, "tangent_unit"),
}


@told
@pytest.mark.parametrize("way", FUNC.values(), ids=FUNC)
@pytest.mark.parametrize(("owner", "name"), RULES.values(), ids=RULES)
def test_derivatives_and_batches_are_eagers(
    way: Callable[..., Any], owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WithRules(Gated):
        generate_vmap_rule = True

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

    theirs = WithRules.apply if way is not FUNC["jvp"] else lambda x, w: torch.sigmoid(x * w) * x
    x, w = (a.detach() for a in pair())
    right = way(theirs, x, w)
    monkeypatch.setattr(owner, name, failing)
    try:
        mine = way(fusegrad.compile(WithRules).apply, x, w)
    except NotImplementedError:  # eager's answer, where the class has no such rule of its own
        assert way is FUNC["jvp"]
        return
    torch.testing.assert_close(mine, right)


class Counted(Function):
    """Its effect is seen outside."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Counted.calls += 1
        return x * (2 if x.sum().item() > 0 else 3)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Around(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Counted.apply(x.exp()) + 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


@told
@pytest.mark.parametrize("before", [0, 3])
def test_what_runs_as_written_within_runs_once(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, x = fusegrad.compile(Around), torch.randn(4)
    for _ in range(before):
        fast.apply(x)
    Counted.calls = 0
    monkeypatch.setattr(rebuild_output, "__code__", failing.__code__)  # after all segments have run
    torch.testing.assert_close(fast.apply(x), Around.apply(x))
    assert Counted.calls == 2


@told
def test_an_error_of_the_method_is_raised_once() -> None:
    class Refusing(Function):
        calls = 0

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if x.sum().item() < 0:
                Refusing.calls += 1
                raise ValueError("negative")
            return x + 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g

    fast = fusegrad.compile(Refusing)
    for _ in range(3):
        fast.apply(torch.ones(3))
    with pytest.raises(ValueError, match="negative") as raised:
        fast.apply(-torch.ones(3))
    assert Refusing.calls == 1 and raised.value.__context__ is None


@told
def test_a_fault_is_on_record_where_eager_refuses_the_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    class OldStyle(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return g * x.cos()

    fast = fusegrad.compile(OldStyle)
    monkeypatch.setattr(call, "custom_function_call", failing)
    with pytest.warns(fusegrad.FallbackWarning, match="internal error"):
        with pytest.raises(RuntimeError, match="setup_context"):
            torch.func.vmap(fast.apply)(torch.ones(3))
    assert fast._fusegrad.ledger.records["torch.func"].code == "FG071"
