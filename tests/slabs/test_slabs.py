"""Losses behind linear layers in slabs of rows, by kernels on the interpreter and by torch, beside eager in float64."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import fusegrad

sys.path.insert(0, str(Path(__file__).parents[1] / "streams"))
sys.path.insert(0, str(Path(__file__).parent))
from beside_eager import differences
from losses import IGNORED, LOSSES, labels, rand
from stream_functions import Case, named
from watching_slabs import both_ways, of, peak_bytes, small, walked

LIMIT = {torch.float32: 12_000, torch.bfloat16: 6_000, torch.float64: 24_000}
"""Bytes of a slab: a few slabs of 37 rows and 111 classes."""
each = pytest.mark.parametrize("case", LOSSES, ids=lambda c: c.name)
on_both = pytest.mark.parametrize("backend", ["interpret", "reference"])
IN_ONE_PIECE = {
    # the tokens of both of its arguments are not known to be as many
    "Batched": ("forward", "backward"),
    # what forward computed is all that backward needs
    "InForward": ("backward",),
}


def loss(name: str) -> Case:
    return next(c for c in LOSSES if c.name == name)


def compiled(cls: Any, backend: str = "interpret", **more: Any) -> Any:
    """An error where something would run in eager."""
    return fusegrad.compile(cls, backend=backend, fullgraph=True, **more)


# ------------------------------------------------------------------ results and gradients
@pytest.mark.parametrize("dtype", LIMIT, ids=lambda d: str(d).removeprefix("torch."))
@on_both
@each
def test_beside_eager(case: Case, backend: str, dtype: torch.dtype) -> None:
    expected = {d for d in ("forward", "backward") if d not in IN_ONE_PIECE.get(case.name, ())}
    if case.name == "SavedLogits" and backend == "reference":  # which saves what the class saves
        expected = set()
    with small(LIMIT[dtype]), walked() as seen:
        assert not differences(compiled(case.cls, backend).apply, case.cls.apply, case.arguments(37, 16, dtype))
    assert {d for d in ("forward", "backward") if len(of(seen, d)) > 1} == expected


@pytest.mark.parametrize("name", ["SavedLogSumExp", "CausalGQA", "SoftcapWindow", "LearnedBias", "Distances"])
def test_whatever_multiplies_to_more(name: str) -> None:
    """Attention, masks by places, distances: nothing is made for losses."""
    case = named(name)
    with small(9_000), walked() as seen:
        assert not differences(compiled(case.cls).apply, case.cls.apply, case.arguments(37, 16))
    assert seen


@pytest.mark.parametrize("rows", [0, 1, 2, 15, 16, 17, 31, 32, 33, 100])
@pytest.mark.parametrize("name", ["IgnoreIndex", "Bias"])
def test_numbers_of_rows(name: str, rows: int) -> None:
    case = loss(name)
    arguments = (rand(rows, 16).requires_grad_(), rand(50, 16).requires_grad_(), labels(rows, 50))
    arguments = (*arguments[:2], rand(50).requires_grad_(), arguments[2]) if name == "Bias" else arguments
    with small(3_300):
        for ours, eager in zip(
            both_ways(compiled(case.cls).apply, arguments), both_ways(case.cls.apply, arguments), strict=True
        ):
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_all_rows_ignored() -> None:
    case = loss("IgnoreIndex")
    arguments = (rand(37, 16).requires_grad_(), rand(50, 16).requires_grad_(), torch.full((37,), IGNORED))
    with small(3_300), walked() as seen:
        found = both_ways(compiled(case.cls).apply, arguments)
    assert seen and all(not t.any() for t in found)


@on_both
def test_a_class_that_is_called_with_more_rows_each_time(backend: str) -> None:
    """What fits is in one piece, and what does not is walked, though the first call did not need it."""
    case, rows = loss("IgnoreIndex"), (5, 9, 37, 64, 12, 50, 5)
    with small(20_000):
        fast = compiled(case.cls, backend)
        for n in rows:
            with walked() as seen:
                assert not differences(fast.apply, case.cls.apply, case.arguments(n, 16)), n
            assert (len(of(seen, "forward")) > 1) == (n * 3 * n * 4 > 20_000), (n, seen)


def test_fewer_rows_than_columns_of_a_row() -> None:
    """No kernel would stream a product that is smaller than an operand of it; it may fill memory all the same."""
    arguments = (rand(20, 64).requires_grad_(), rand(300, 64).requires_grad_(), labels(20, 300))
    case = loss("IgnoreIndex")
    with small(8_000), walked() as seen:
        assert not differences(compiled(case.cls).apply, case.cls.apply, arguments)
    assert len(of(seen, "forward")) > 1 and len(of(seen, "backward")) > 1


def test_where_depth_makes_kernels_slower() -> None:
    """With kernels at hand, the model prefers the library at this depth."""
    case = loss("IgnoreIndex")
    for depth, in_slabs in ((256, True), (16, False)):
        arguments = (rand(300, depth).requires_grad_(), rand(900, depth).requires_grad_(), labels(300, 900, 0.3))
        with fusegrad.config.patch(slab_bytes=400_000), walked() as seen:
            assert not differences(compiled(case.cls).apply, case.cls.apply, arguments)
        assert [len(of(seen, d)) > 1 for d in ("forward", "backward")] == [in_slabs, in_slabs]


def test_calls_that_came_often_walk_as_the_first() -> None:
    """The generated function of the inline cache calls the loop over slabs."""
    case = loss("IgnoreIndex")
    arguments = case.arguments(37, 16)
    with small(12_000):
        fast = compiled(case.cls)
        first = both_ways(fast.apply, arguments)
        for _ in range(4):
            with walked() as seen:
                again = both_ways(fast.apply, arguments)
            assert seen and all(map(torch.equal, first, again))


# ------------------------------------------------------------------ where results go, and memory
def test_products_are_computed_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    """dw into its rows, dx accumulated; neither is added to or copied from memory of its own."""
    from fusegrad.runtime.execution.slabs import destination

    calls: list[bool] = []
    multiply = destination.multiply_into

    def noted(value: Any, out: Any, x: Any, y: Any, adds: bool) -> Any:
        calls.append(adds)
        return multiply(value, out, x, y, adds)

    monkeypatch.setattr(destination, "multiply_into", noted)
    case = loss("IgnoreIndex")
    with small(12_000), walked() as seen:
        both_ways(compiled(case.cls).apply, case.arguments(37, 16))
    slabs = len(of(seen, "backward"))
    assert sorted(calls) == [False] * (slabs + 1) + [True] * (slabs - 1)


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("name", ["IgnoreIndex", "Smoothed", "InForward"])
def test_memory_is_bounded(name: str, backend: str) -> None:
    """Measured: what a call takes besides its results is a slab, and not the logits."""
    case, n, d, limit = loss(name), 512, 64, 1 << 18
    arguments = case.arguments(n, d)
    logits, results = n * 3 * n * 4, (n + 3 * n) * d * 4
    with small(limit):
        fast = compiled(case.cls, backend)
        both_ways(fast.apply, arguments)  # the first call compares with the class itself
        taken = peak_bytes(lambda: both_ways(fast.apply, arguments))
    eager = peak_bytes(lambda: both_ways(case.cls.apply, arguments))
    overhead = {"reference": 1, "interpret": 4}[backend]  # the interpreter holds operands of its own
    assert eager > 2 * logits and taken < 2 * results + overhead * limit + (1 << 17) < logits


def test_a_product_is_overwritten_by_what_is_made_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is proved that its kernel reads first: in every loss that has one."""
    from fusegrad.runtime.execution import group

    asked: list[bool] = []
    may_overwrite = group.may_overwrite
    monkeypatch.setattr(group, "may_overwrite", lambda *a: asked.append(may_overwrite(*a)) or asked[-1])
    names = ("LinearCrossEntropy", "Bias", "IgnoreIndex", "Smoothed", "Softcapped", "Distillation", "InForward")
    with small(12_000):
        for name in names:
            asked.clear()
            both_ways(compiled(loss(name).cls).apply, loss(name).arguments(37, 16))
            assert asked and all(asked), name


def test_a_product_is_kept_where_that_is_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusegrad.runtime.execution import group

    monkeypatch.setattr(group, "may_overwrite", lambda *a: False)
    case = loss("IgnoreIndex")
    with small(12_000):
        assert not differences(compiled(case.cls).apply, case.cls.apply, case.arguments(37, 16))


# ------------------------------------------------------------------ what is saved
def fate_of_logits(limit: int) -> str:
    with small(limit):
        kept = fusegrad.explain(loss("SavedLogits").cls, *loss("SavedLogits").arguments(37, 64)).kept
    return next(row.how for row in kept if row.name == "z")


def test_logits_are_saved_only_where_memory_allows() -> None:
    """They are made again where they would take more than a slab; 16 deep a product moves less than what it saves."""
    assert fate_of_logits(1 << 20) == "saved as written"
    assert fate_of_logits(12_000) == "computed again"


def test_hooks_on_saved_tensors_see_what_the_class_saves() -> None:
    seen: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(tensor.shape))
        return tensor

    case = loss("SavedLogits")
    with small(12_000, backend="interpret"), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        fusegrad.compile(case.cls).apply(*case.arguments(37, 16))
    assert (37, 111) in seen


# ------------------------------------------------------------------ compositions
def second_derivatives(call: Any, arguments: Any) -> list[torch.Tensor]:
    asked = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
    first = torch.autograd.grad(call(*arguments).sin().sum(), asked, create_graph=True)
    return list(torch.autograd.grad(sum(g.square().sum() for g in first), asked))  # type: ignore[arg-type]


def tangents(call: Any, arguments: Any) -> list[torch.Tensor]:
    plain = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments]
    x, w, *rest = plain
    return list(torch.func.jvp(lambda x, w: call(x, w, *rest), (x, w), (torch.cos(x), torch.sin(w))))


def samples(call: Any, arguments: Any) -> list[torch.Tensor]:
    x, w, *rest = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments]
    batch = torch.stack([x, x * 0.5])
    return [torch.func.vmap(lambda x: call(x, w, *rest))(batch),
            torch.func.vmap(torch.func.grad(lambda x: call(x, w, *rest)))(batch)]  # fmt: skip


def inside_compile(call: Any, arguments: Any) -> list[torch.Tensor]:
    def scaled(*arguments: Any) -> Any:
        return call(*arguments) * 2

    return both_ways(torch.compile(scaled, backend="eager"), arguments)


@pytest.mark.parametrize("how", [second_derivatives, tangents, samples, inside_compile], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["LinearCrossEntropy", "IgnoreIndex"])
def test_composed(name: str, how: Any) -> None:
    """By other graphs, some of them in slabs, and right."""
    case = loss(name)
    arguments = case.arguments(37, 16)
    if how is tangents:
        arguments = tuple(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments)
    with small(12_000, backend="interpret"):
        found = how(fusegrad.compile(case.cls).apply, arguments)
    for ours, eager in zip(found, _eager(how, case, arguments), strict=True):
        torch.testing.assert_close(ours, eager, rtol=2e-3, atol=1e-4)


def _eager(how: Any, case: Case, arguments: Any) -> list[torch.Tensor]:
    """The same of the class itself; of classes without rules, of the loss as torch differentiates it."""
    if how in (second_derivatives, inside_compile):
        return how(case.cls.apply, arguments)

    def plain(x: Any, w: Any, target: Any) -> Any:
        return torch.nn.functional.cross_entropy(x @ w.mT, target, ignore_index=IGNORED)

    return how(plain, arguments)


@on_both
def test_threads(backend: str) -> None:
    case = loss("IgnoreIndex")
    arguments = [case.arguments(n, 16) for n in (37, 48, 37, 48)]
    expected = [both_ways(case.cls.apply, a) for a in arguments]
    found: dict[int, list[torch.Tensor]] = {}
    with small(12_000):
        fast = compiled(case.cls, backend, slab_bytes=12_000)

    def run(at: int) -> None:
        with fusegrad.config.patch(disable="streams"):
            for _ in range(3):
                found[at] = both_ways(fast.apply, arguments[at])

    threads = [threading.Thread(target=run, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for at, ours in found.items():
        for a, b in zip(ours, expected[at], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert len(found) == 4


def test_reference_has_the_bits_of_eager_where_all_fits() -> None:
    case = loss("LinearCrossEntropy")
    arguments = case.arguments(37, 16)
    with walked() as seen:
        assert all(map(torch.equal, both_ways(compiled(case.cls, "reference").apply, arguments),
                       both_ways(case.cls.apply, arguments)))  # fmt: skip
    assert not seen


# ------------------------------------------------------------------ what is not walked
def test_contrastive_losses_are_refused() -> None:
    """Each direction needs all of the other."""
    case = named("InfoNCE")
    with small(2_000):
        assert not differences(compiled(case.cls).apply, case.cls.apply, case.arguments(37, 16))
        (line,) = fusegrad.explain(case.cls, *case.arguments(37, 16)).directions["forward"].products
    assert "in memory, " in line and "not in slabs of rows: none of its dims can be walked: " in line
    assert "pairs its elements with each other" in line


def test_without_slabs() -> None:
    case = loss("IgnoreIndex")
    with fusegrad.config.patch(slab_bytes=12_000, disable="streams,slabs"), walked() as seen:
        assert not differences(compiled(case.cls).apply, case.cls.apply, case.arguments(37, 16))
    assert not seen


# ------------------------------------------------------------------ faults are noticed
def test_a_sum_that_forgets_a_slab_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusegrad.runtime.execution.slabs import destination

    multiply = destination.multiply_into
    monkeypatch.setattr(destination, "multiply_into", lambda v, out, x, y, adds: multiply(v, out, x, y, False))
    with small(12_000):
        assert differences(compiled(loss("IgnoreIndex").cls).apply, loss("IgnoreIndex").cls.apply,
                           loss("IgnoreIndex").arguments(37, 16))  # fmt: skip


def test_places_that_begin_anew_in_each_slab_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusegrad.ir.passes.streaming.walk import Walk
    from fusegrad.ir.rewrite import make

    def unplaced(self: Walk, node: Any, env: Any) -> Any:
        return make(node.prim, *(env[a.id] for a in node.args), **node.params)

    monkeypatch.setattr(Walk, "_placed", unplaced)
    with small(12_000):
        assert differences(compiled(loss("IgnoreIndex").cls).apply, loss("IgnoreIndex").cls.apply,
                           loss("IgnoreIndex").arguments(37, 16))  # fmt: skip


def test_means_of_slabs_instead_of_all_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusegrad.ir.passes.streaming.slabs import Slabs

    sizes = Slabs.sizes
    monkeypatch.setattr(
        Slabs, "sizes",
        lambda self, given, rows=None, start=0: {
            **(found := sizes(self, given, rows, start)),
            **({} if self.count is None else {self.count: found[self.symbol]}),
        },
    )  # fmt: skip
    case = loss("InForward")
    with small(12_000):
        assert differences(compiled(case.cls).apply, case.cls.apply, case.arguments(37, 16))
