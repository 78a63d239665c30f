"""Kernels run where their accesses are proved, for all sizes or at those of a call; else torch runs instead."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch

import fusegrad
from fusegrad import codegen
from fusegrad.benchmarks import gpu
from fusegrad.benchmarks.peers import OURS, appliers
from fusegrad.benchmarks.suite import CASES
from fusegrad.codegen import TARGETS, Kernels
from fusegrad.ir import Graph
from fusegrad.ir.codes import code_of
from fusegrad.ir.errors import NotLaunchedError, Unfusible
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


@pytest.mark.parametrize("target", TARGETS)
def test_explain_claims_no_launch_of_kernels_that_never_run(emitted: list[Change], target: str) -> None:
    x = torch.randn(3, 50, requires_grad=True)
    launched = fusegrad.explain(fast(), x, target=target)
    assert {k.kind for k in launched.kernels} == {"triton"} and launched.methods["backward"].status == "compiled"
    emitted.append(without_masks)
    found = fusegrad.explain(fast(), x, target=target)
    assert {k.kind for k in found.kernels} == {"torch"} and not any(k.source for k in found.kernels)
    for direction in ("forward", "backward"):
        record = found.methods[direction]
        assert (record.status, record.code) == ("opaque", "FG105")
        moved = found.to_dict()["bytes"]
        assert moved[direction] > launched.to_dict()["bytes"][direction] == moved[f"minimal_{direction}"]


def test_one_kernel_of_two_that_is_not_proved(emitted: list[Change]) -> None:
    """What runs is said of each direction."""
    emitted.append(lambda source: source if "backward" in source else without_masks(source))
    found = fusegrad.explain(fast(), torch.randn(3, 50, requires_grad=True))
    assert [k.kind for k in found.kernels if k.direction == "backward"] == ["triton"]
    assert found.methods["backward"].status == "compiled" and found.methods["forward"].status == "opaque"


def test_fullgraph_raises_where_no_kernel_is_launched(emitted: list[Change], launched: list[str]) -> None:
    """At each call, in each direction: nothing is computed by torch under the name of a kernel."""
    compiled = fusegrad.compile(type("Cube", (Cube,), {}), backend="interpret", fullgraph=True)
    x = torch.randn(3, 50, requires_grad=True)
    y = compiled.apply(x)
    emitted.append(without_masks)
    for _ in range(2):
        with pytest.raises(NotLaunchedError, match=r"Cube\.backward is traced, and launches no kernel") as raised:
            torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
        assert raised.value.code == "FG105"
        with pytest.raises(NotLaunchedError, match=r"Cube\.forward is traced, and launches no kernel"):
            fusegrad.compile(type("Cube", (Cube,), {}), backend="interpret", fullgraph=True).apply(x)
    assert launched == ["Cube_forward"]


def test_fullgraph_raises_where_the_generator_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = fusegrad.compile(type("Cube", (Cube,), {}), backend="interpret", fullgraph=True)
    compiled.apply(torch.randn(3, 50))

    def refuse(*_: Any) -> None:
        raise Unfusible(value=None, reason="nothing fits")

    monkeypatch.setattr(Variants, "admitting", refuse)
    for _ in range(2):
        with pytest.raises(NotLaunchedError, match=r"runs operation by operation: .*nothing fits"):
            compiled.apply(torch.randn(3, 51))


def test_the_benchmark_times_no_operations_of_torch_under_our_name(emitted: list[Change]) -> None:
    emitted.append(without_masks)
    case = replace(next(c for c in CASES if c.name.startswith("SquaredReLU")), args=("bf16[63,17]",))
    row: dict[str, Any] = {"errors": {}, "checks": {}}
    apply = appliers(case, (OURS,), "interpret")[OURS]
    assert not gpu._is_right(OURS, case, apply, argparse.Namespace(device="cpu"), row)
    assert "launches no kernel" in row["errors"][OURS]


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
    """Philox gives several words at once, `a, b, c, d = ...`: a text that cannot be read is launched nowhere."""

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
