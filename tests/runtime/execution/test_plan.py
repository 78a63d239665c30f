"""Executing one captured graph: sizes read off tensors, memory of results, layouts, variants of kernels."""

from __future__ import annotations

import pytest
import sympy
import torch
from function_samples import Linear, RMSNorm, Softmax, assert_same, leaf
from torch.autograd import Function

import fusegrad
from fusegrad.ir import building, emit, show, verify
from fusegrad.ir.errors import UnsupportedBackendError
from fusegrad.runtime.execution.executable import Executable, has_outer_product
from fusegrad.runtime.execution.graph_to_kernels import graph_of
from fusegrad.runtime.execution.layouts import own_memory
from fusegrad.runtime.execution.targets import target_for
from fusegrad.runtime.values.sizes import Binder, BoundSizes, number, numbers
from fusegrad.tracer.capture.capture import Session
from fusegrad.tracer.reads.reads import scan
from fusegrad.tracer.trace import Trace

n, m = sympy.symbols("n m", integer=True, positive=True)


def trace(body, *tensors: torch.Tensor) -> Trace:
    session = Session()
    return session.trace(body, [session.fake(t) for t in tensors], scan(body))


def test_numbers() -> None:
    assert numbers((3, n, n * m, sympy.floor(n / 2)), {n: 7, m: 2}) == (3, 7, 14, 3)
    assert type(number(n * 2, {n: 3})) is int


def test_sizes_are_read_off_shapes_strides_and_numbers() -> None:
    session = Session()
    x, y = torch.randn(6, 8)[:, ::2], torch.randn(5)
    fakes = [session.fake(x), session.fake(y), session.integer(9)]
    bound = Binder(fakes)([x, y, 9])
    assert isinstance(bound, BoundSizes)
    assert sorted(bound.values()) == [2, 4, 5, 6, 9]  # the stride of a row, 8, is 2 * 4
    assert bound.key == tuple(bound.values())


@pytest.mark.parametrize("strides", [(4, 1), (1, 3), (0, 1), (1, 0), (0, 0), (8, 2)])
def test_results_have_memory_of_their_own_in_the_layout_asked_for(strides) -> None:
    source = torch.arange(12.0).view(3, 4)
    if 0 in strides:
        source = source[tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)].expand(3, 4)
    owned = own_memory(source, strides, {source.untyped_storage()._cdata})
    assert torch.equal(owned, source) and owned.stride() == strides and not owned._is_view()
    assert owned.untyped_storage()._cdata != source.untyped_storage()._cdata
    assert own_memory(owned, strides, set()) is owned


BODIES = {
    "elementwise": (lambda x, w: ((x * w).exp(), x + 1), (leaf(3, 4), leaf(4))),
    "reduction": (lambda x, w: (x.sum(0), (x * w).amax(-1)), (leaf(3, 4), leaf(4))),
    "views": (lambda x, w: (x.t() * 2, w.expand(3, 4) + 1, x.reshape(-1) * 1), (leaf(3, 4), leaf(4))),
    "product": (lambda x, w: ((x @ w.unsqueeze(-1)).exp(), x * 2), (leaf(3, 4), leaf(4))),
    "one result twice": (lambda x, w: (x * 2, x * 2), (leaf(3, 4), leaf(4))),
    "write": (lambda x, w: (x.mul_(2), w * 1), (leaf(3, 4), leaf(4))),
    "own memory": (lambda x, w: (torch.zeros_like(x).add_(w), torch.arange(4) * w), (leaf(3, 4), leaf(4))),
    "sort": (lambda x, w: x.sort(-1)[:2], (leaf(3, 4), leaf(4))),
    "no input used": (lambda x, w: (torch.full((2, 2), 3.0),), (leaf(3, 4), leaf(4))),
    "transposed": (lambda x, w: (x.t().contiguous().t() + w,), (leaf(3, 4), leaf(4))),
}


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("name", BODIES)
def test_every_backend_gives_what_the_body_gives(name, backend) -> None:
    body, example = BODIES[name]
    plain = [t.detach() for t in example]
    executable = Executable(trace(body, *plain), name.replace(" ", "_").replace(",", ""), backend)
    for rows in (3, 5, 3):
        inputs, copies = ([leaf(rows, 4).detach(), leaf(4).detach()] for _ in range(2))
        mine, theirs = executable(inputs, []), body(*copies)
        assert_same(mine, theirs)
        assert_same(inputs, copies)


def test_captured_tensors_come_after_the_inputs() -> None:
    session, w = Session(), torch.ones(4)
    reads = scan(lambda x: (x * w,))
    found = session.trace(lambda x: (x * w,), [session.fake(torch.randn(3, 4))], reads)
    for backend in ("reference", "interpret"):
        executable = Executable(found, "scaled", backend)
        assert torch.equal(executable([torch.ones(3, 4)], [torch.full((4,), 7.0)])[0], torch.full((3, 4), 7.0))


def test_a_skipped_output_is_not_computed_by_kernels() -> None:
    found = trace(lambda x: (x * 2, x.exp()), torch.randn(3, 4))
    first, second = Executable(found, "skips", "interpret", frozenset({1}))([torch.ones(3, 4)], [])
    assert second is None and torch.equal(first, torch.full((3, 4), 2.0))


def test_inputs_of_another_layout_are_brought_into_the_captured_one() -> None:
    found = trace(lambda x: (x * 2,), torch.randn(3, 4))
    executable = Executable(found, "doubled", "interpret")
    x = torch.randn(4, 3).t()
    sizes = executable.binder([x.contiguous()])
    assert torch.equal(executable([x], [], sizes)[0], x * 2)


def test_outer_products_are_found() -> None:
    def linear(x, w):
        return ((w.unsqueeze(0) * x.unsqueeze(1)).sum(-1),)

    assert has_outer_product(trace(linear, torch.randn(3, 4), torch.randn(5, 4)))
    assert not has_outer_product(trace(lambda x, w: (x * w,), torch.randn(3, 4), torch.randn(4)))
    assert not has_outer_product(trace(lambda x: (x * 2,), torch.randn(3, 4)))


def test_an_outer_product_that_is_summed_needs_no_memory() -> None:
    def linear(x, w):
        return ((w.unsqueeze(0) * x.unsqueeze(1)).sum(-1),)

    x, w = torch.randn(30, 40), torch.randn(50, 40)
    executable = Executable(trace(linear, x, w), "linear", "reference")
    torch.testing.assert_close(executable([x, w], [])[0], x @ w.t())


def test_what_triton_needs() -> None:
    with pytest.raises(UnsupportedBackendError, match='use backend="reference"'):
        target_for("triton", torch.device("cpu"))
    assert target_for("interpret", torch.device("cpu")).arch is not None


@pytest.mark.parametrize("cls", [RMSNorm, Softmax, Linear])
def test_a_plan_serves_many_sizes_with_few_variants(cls) -> None:
    from function_samples import run

    import fusegrad

    fast = fusegrad.compile(cls, backend="interpret")
    for rows in (2, 3, 9, 17):
        args = {RMSNorm: (leaf(rows, 6), leaf(6)), Softmax: (leaf(rows, 6),),
                Linear: (leaf(rows, 6), leaf(5, 6), None)}[cls]  # fmt: skip
        assert_same(run(fast, *args), run(cls, *args))
    before = fusegrad.stats()["compiles"]
    run(fast, *args)
    assert fusegrad.stats()["compiles"] == before


class Shifted(Function):
    @staticmethod
    def forward(ctx, x, b):
        return torch.tanh(x + b)


@pytest.mark.parametrize("rows", [(64, 7, 33, 128, 2), (7, 64, 128, 33, 2)], ids=["aligned first", "odd first"])
def test_kernels_for_aligned_and_for_any_sizes_come_together(rows):
    """Whatever size comes first: wide accesses where sizes allow them, and nothing compiled later."""
    fast = fusegrad.compile(type("Shifted", (Shifted,), {}), backend="interpret")
    bias = torch.randn(48)
    counts = set()
    for n in rows:
        x = torch.randn(n, 48)
        torch.testing.assert_close(fast.apply(x, bias), torch.tanh(x + bias))
        counts.add(fusegrad.stats()["compiles"])
    assert len(counts) == 1


def test_a_trace_is_lowered_once_and_every_caller_has_a_graph_of_his_own() -> None:
    captured = trace(lambda x, y: (x * y).exp() / (x + y), torch.randn(3, 4), torch.randn(4))
    graph, again = graph_of(captured, "body"), graph_of(captured, "body")
    text = show(again)
    assert show(verify(graph)) == text and len(captured.lowered) == 1
    graph.outputs = [None]
    with building(graph):
        emit("neg", graph.inputs[0])
    assert show(again) == text == show(graph_of(captured, "body")) and not again.inputs[0] == graph.inputs[0]
    assert all(v.graph is again for v in (*again.inputs, *again.results))
    assert graph_of(captured, "another").name == "another"
