"""Kernels run where their accesses are proved, for all sizes or at those of a call; else torch runs instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch

import fusegrad
from fusegrad import codegen
from fusegrad.codegen import Kernels
from fusegrad.ir import Graph
from fusegrad.ir.codes import code_of
from fusegrad.runtime.execution.bound_group import BoundGroup
from fusegrad.runtime.execution.variants import Variants
from fusegrad.runtime.kernels import proofs

pytestmark = pytest.mark.filterwarnings("ignore:.*goes through torch:fusegrad.FallbackWarning")
OPEN = "goes through torch at some sizes"


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return g * 3 * x * x


Change = Callable[[str], str]


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Change]]:
    """Changes of the text of every kernel that is generated."""
    changes: list[Change] = []
    own = codegen.generate

    def generate(graph: Graph, **how: Any) -> Kernels:
        made = own(graph, **how)
        for change in changes:
            made = replace(made, kernels=tuple(replace(k, source=change(k.source)) for k in made.kernels))
        return made

    monkeypatch.setattr(codegen, "generate", generate)
    yield changes


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of groups whose kernels were launched."""
    found: list[str] = []
    own = BoundGroup.launch

    def launch(self: BoundGroup, *given: Any) -> None:
        found.append(self.kernels.kernels[0].name)
        own(self, *given)

    monkeypatch.setattr(BoundGroup, "launch", launch)
    return found


def without_masks(source: str) -> str:
    return source.replace(", mask=inside", "").replace(", other=0.0", "")


def fast() -> Any:
    return fusegrad.compile(type("Cube", (Cube,), {}), backend="interpret")


def reasons(compiled: Any, *args: Any) -> list[str]:
    return [line for line in str(fusegrad.explain(compiled, *args)).splitlines() if OPEN in line]


def gradient(of: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(of(x), x, torch.ones_like(x))[0]


def test_proved_kernels_run(launched: list[str]) -> None:
    x, compiled = torch.randn(3, 50), fast()
    torch.testing.assert_close(gradient(compiled.apply, x), 3 * x * x)
    assert len(launched) == 2 and not reasons(compiled, x)


def test_an_access_that_may_leave_its_tensor_is_not_made(emitted: list[Change], launched: list[str]) -> None:
    emitted.append(without_masks)
    x, compiled = torch.randn(3, 50), fast()
    torch.testing.assert_close(gradient(compiled.apply, x), 3 * x * x)
    assert not launched
    (forward, backward) = reasons(compiled, x)
    assert "Cube_forward" in forward and "Cube_backward" in backward and "tl.load" in forward
    assert code_of(f"Cube_forward {OPEN}: not proved") == "FG105"


def test_sizes_at_which_it_stays_inside_are_launched(emitted: list[Change], launched: list[str]) -> None:
    """What is not proved for all sizes is asked at each: here whole blocks are in range, and others are not."""
    emitted.append(without_masks)
    compiled = fast()
    for rows, runs in ((1 << 14, 2), (3, 0), (1 << 15, 2), (3, 0)):
        launched.clear()
        x = torch.randn(rows, 64)
        torch.testing.assert_close(gradient(compiled.apply, x), 3 * x * x)
        assert len(launched) == runs, rows


def test_the_same_sizes_are_asked_once(emitted: list[Change], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    own = proofs.prove_kernel
    monkeypatch.setattr(proofs, "prove_kernel", lambda k, *a, **kw: (asked.append(k.name), own(k, *a, **kw))[1])
    monkeypatch.setattr(proofs, "_answers", type(proofs._answers)())
    compiled, x = fast(), torch.randn(3, 50)
    compiled.apply(x)
    assert asked == ["Cube_forward"]
    for _ in range(3):
        compiled.apply(x)
        compiled.apply(torch.randn(5, 7))
    assert len(asked) <= 2  # its counterpart for sizes that are no multiples
    emitted.append(without_masks)
    other = fast()
    for _ in range(8):
        other.apply(x)
    assert len(asked) <= 6


def test_a_mistake_of_the_prover_breaks_no_call(monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(proofs, "prove_kernel", broken)
    monkeypatch.setattr(proofs, "_answers", type(proofs._answers)())
    compiled, x = fast(), torch.randn(3, 50)
    torch.testing.assert_close(compiled.apply(x), x**3)
    assert not launched and "RecursionError: too deep" in reasons(compiled, x)[0]


def test_what_the_capture_assumed_is_handed_to_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[sympy.Basic] = []
    own = Variants.__init__

    def init(self: Variants, *given: Any) -> None:
        own(self, *given)
        seen.extend(self.assumed)

    monkeypatch.setattr(Variants, "__init__", init)
    fast().apply(torch.randn(6, 50))
    assert any(isinstance(c, sympy.Ge) and c.rhs == 2 for c in seen), seen


def test_kernels_that_draw_random_numbers_are_proved() -> None:
    """Philox gives several words at once, `a, b, _, _ = ...`: a text that cannot be read is launched nowhere."""

    class Drawn(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(seed)
            return torch.where(fusegrad.random.uniform(x.shape, seed, 0, like=x) >= 0.5, x, 0)

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            (seed,) = ctx.saved_tensors
            return g * fusegrad.random.normal(g.shape, seed, 0, like=g), None

    fast = fusegrad.compile(Drawn, backend="interpret", fullgraph=True)
    x = torch.randn(8, 32, requires_grad=True)
    fast.apply(x, torch.tensor(7)).sum().backward()
    assert {role: r.reason for role, r in fast._fusegrad.ledger.records.items() if r.reason} == {}
