"""What forward keeps where kernels stream products: decided for both methods, and nothing that autograd can see."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fusegrad
from fusegrad.examples.gallery import info_nce as gallery_info_nce
from fusegrad.ir.errors import Unfusible
from fusegrad.runtime.execution import graph_to_kernels
from fusegrad.runtime.report.explain import compiler_of
from fusegrad.runtime.report.explanation import Explanation
from fusegrad.runtime.specialize import streamed_residuals

sys.path.insert(0, str(Path(__file__).parent))
from beside_eager import differences
from stream_functions import CASES, Case

ROWS = {"amax of s": "f32[2,3,37]", "sum of e": "f32[2,3,37]", "out": "f32[6,37,16]"}
SAVED_P = next(c for c in CASES if c.name == "SavedProbabilities")
SAVES_NOTHING = next(c for c in CASES if c.name == "Textbook")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if kernels were generated for every region that the model prefers."""

    def by_the_model(graph: Any, sizes: Any, target: Any, limit: Any) -> tuple[float, bool]:
        return streamed_residuals._modelled(graph, sizes, target), False

    monkeypatch.setattr(streamed_residuals, "_generated_seconds", by_the_model)


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of graphs with several products, all of which the generator refuses."""
    refused: list[str] = []
    generate = graph_to_kernels.codegen.generate

    def refusing(graph: Any, **more: Any) -> Any:
        if sum(v.prim == "dot" for v in graph.order()) > 1:
            refused.append(graph.name)
            raise Unfusible(value=graph.order()[-1], reason="nothing fits")
        return generate(graph, **more)

    monkeypatch.setattr(graph_to_kernels.codegen, "generate", refusing)
    return refused


def explained(case: Case, dtype: torch.dtype = torch.float32) -> Explanation:
    return fusegrad.explain(case.cls, *case.arguments(37, 16, dtype))


def kept(explanation: Explanation, *how: str) -> dict[str, str]:
    return {row.name: row.type for row in explanation.kept if row.how in how}


def test_rows_and_the_result_are_saved_instead_of_p(streams: None) -> None:
    found = explained(SAVED_P)
    assert kept(found, "saved instead") == ROWS
    assert kept(found, "computed again") == {"p": "f32[2,3,37,37]"}
    assert found.saved_bytes == 3 * 2 * 3 * 37 * 16 * 4 + 2 * 2 * 3 * 37 * 4 + 6 * 37 * 16 * 4


def test_rows_of_a_class_that_saves_nothing_in_between(streams: None) -> None:
    assert kept(explained(SAVES_NOTHING), "saved besides") == {"amax": "f32[5,37]", "sum": "f32[5,37]"}


def test_rows_of_low_floats_are_float32(streams: None) -> None:
    """Backward only divides tiles of 16 bits by the sum: it is handed over inverted."""
    rows = {name.replace("sum", "1 / sum"): type_ for name, type_ in ROWS.items()}
    assert kept(explained(SAVED_P, torch.bfloat16), "saved instead") == rows | {"out": "bf16[6,37,16]"}


@pytest.mark.parametrize("case", [SAVED_P, SAVES_NOTHING], ids=lambda c: c.name)
def test_where_no_kernel_is_generated_the_users_choice_stays(case: Case, refusals: list[str]) -> None:
    """Nothing is made again that a library would have to make; the reason is on record in both directions."""
    found = explained(case)
    assert refusals and not kept(found, "saved instead", "saved besides", "computed again")
    lines = [line for report in found.directions.values() for line in report.products if line.startswith("stream ")]
    assert lines and all("in memory, nothing fits" in line or "is returned or saved" in line for line in lines)


def test_a_mistake_of_the_generator_costs_no_more_than_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = graph_to_kernels.codegen.generate

    def failing(graph: Any, **more: Any) -> Any:
        assert sum(v.prim == "dot" for v in graph.order()) < 2, "the number of products"
        return generate(graph, **more)

    monkeypatch.setattr(graph_to_kernels.codegen, "generate", failing)
    found = explained(SAVES_NOTHING)
    assert found.directions["forward"].products[0].endswith(
        "in memory, internal error: AssertionError: the number of products (please report it)"
    )
    assert {k.kind for k in found.directions["forward"].launches} <= {"triton", "library"}
    with fusegrad.config.patch(debug=True), pytest.raises(AssertionError, match="the number of products"):
        explained(SAVES_NOTHING)


@pytest.mark.parametrize("switch", ["streams", "recompute"])
def test_switched_off(switch: str, streams: None) -> None:
    with fusegrad.config.patch(disable=switch):
        assert not kept(explained(SAVED_P), "saved instead", "computed again")


def test_a_model_that_finds_no_gain_keeps_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_residuals, "_generated_seconds", lambda *_: (1e9, False))
    assert not kept(explained(SAVED_P), "saved instead")


def both_ways(case: Case, change: Any = None, **options: Any) -> list[list[Any]]:
    """Results and gradients of the compiled class, and of the class; `change` is done to results before backward."""
    found = []
    for cls in (fusegrad.compile(case.cls, backend="interpret", **options), case.cls):
        arguments = case.arguments(37, 16)
        out = cls.apply(*arguments)
        result = out.detach().clone()
        if change is not None:
            change(out)
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        found.append([result, *torch.autograd.grad(out, tensors, torch.cos(result))])
    return found


def assert_alike(found: list[list[Any]]) -> None:
    for ours, eager in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", [SAVED_P, SAVES_NOTHING], ids=lambda c: c.name)
def test_gradients(case: Case, streams: None) -> None:
    assert_alike(both_ways(case))


def test_a_result_may_be_written_to_before_backward(streams: None) -> None:
    """The class saved p, not its result: eager allows it, and the gradients are those of the result as it was."""
    assert_alike(both_ways(SAVED_P, change=lambda out: out.data.mul_(3.0)))
    assert_alike(both_ways(SAVED_P, change=lambda out: out.add_(1.0)))


def test_hooks_on_saved_tensors_see_what_the_user_saved(streams: None) -> None:
    seen: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(tensor.shape))
        return tensor

    arguments = SAVED_P.arguments(37, 16)
    fast = fusegrad.compile(SAVED_P.cls, backend="interpret")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        fast.apply(*arguments)
    assert seen == [(2, 3, 37, 16)] * 3 + [(2, 3, 37, 37)]


def test_what_is_saved_is_decided_once(streams: None) -> None:
    """By the sizes of the first call: the class stays right at sizes at which nothing is virtual."""
    fast = fusegrad.compile(SAVED_P.cls, backend="interpret")
    for n, d in ((37, 16), (5, 16), (40, 16)):
        ours, eager = SAVED_P.arguments(n, d), SAVED_P.arguments(n, d)
        a, b = fast.apply(*ours), SAVED_P.cls.apply(*eager)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        g = torch.cos(b.detach())
        for x, y in zip(torch.autograd.grad(a, ours[:3], g), torch.autograd.grad(b, eager[:3], g), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    assert len(list(compiler_of(fast).table)) == 1


def test_second_derivatives(streams: None) -> None:
    fast = fusegrad.compile(SAVES_NOTHING.cls, backend="interpret")
    found = []
    for cls in (fast, SAVES_NOTHING.cls):
        q, k, v = SAVES_NOTHING.arguments(11, 4)
        first = torch.autograd.grad(cls.apply(q, k, v).sin().sum(), (q, k, v), create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), (q, k, v)))
    for ours, eager in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("target", ["cuda:80", "cuda:89"])
def test_memory_counts_where_the_model_of_time_nearly_agrees(target: str) -> None:
    """Deep heads on devices with much bandwidth for their arithmetic: 8.6 GB of scores, and none of them in memory."""
    heads = ["bf16[4,32,4096,128]"] * 3
    found = fusegrad.explain(fusegrad.compile(SAVED_P.cls), *heads, 0.1, target=target)
    for report in found.directions.values():
        assert [line for line in report.products if ": never in memory" in line] == report.products


def test_the_sums_of_logsumexp_serve_a_softmax() -> None:
    """In both directions: backward has no walk for rows, and none for columns."""
    rows = "bf16[4096,128]"
    found = fusegrad.explain(gallery_info_nce.InfoNCE, rows, rows, 0.1, target="cuda:90")
    walks = [k for k in found.kernels if k.walk and "backward" in k.name]
    assert len(walks) == 2 and all("tl.dot(" in k.source and "row_max" not in k.source for k in walks)
    assert found.directions["backward"].launch_count == 4


class HeadsOfArguments(torch.autograd.Function):
    """Saves views of its arguments, in heads, and p."""

    @staticmethod
    def forward(ctx: Any, *arguments: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.reshape(*x.shape[:2], 4, -1) for x in arguments)
        p = torch.einsum("bnhd,bmhd->bhnm", q, k).softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        return torch.einsum("bhnm,bmhd->bnhd", p, v).flatten(2)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        q, k, v, p = ctx.saved_tensors
        g = g.reshape(*g.shape[:2], 4, -1)
        dp = torch.einsum("bnhd,bmhd->bhnm", g, v)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        gradients = (
            torch.einsum("bhnm,bmhd->bnhd", ds, k),
            torch.einsum("bhnm,bnhd->bmhd", ds, q),
            torch.einsum("bhnm,bnhd->bmhd", p, g),
        )
        return tuple(x.flatten(2) for x in gradients)


def test_views_that_are_saved_serve_for_what_is_made_of_their_arguments() -> None:
    given = [torch.empty(2, 4096, 256, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(3)]
    report = fusegrad.explain(fusegrad.compile(HeadsOfArguments), *given, target="cuda:90")
    assert [report.directions[d].launch_count for d in ("forward", "backward")] == [1, 2]
    assert not [name for name in kept(report, "saved instead") if "reshape" in name]


def test_views_that_are_saved_beside_eager() -> None:
    given = [torch.randn(2, n, 16, requires_grad=True) for n in (13, 21, 21)]
    fast = fusegrad.compile(HeadsOfArguments, backend="interpret")
    assert not differences(fast.apply, HeadsOfArguments.apply, given)
