"""Operations that torch's vmap calls once a lane (index_add) are one operation over the batch, whatever its size."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import Function
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import fusegrad
from fusegrad.runtime.settings.counters import stats


class Gathered(Function):
    """weight[index] * scale: the gradient is an index_add."""

    @staticmethod
    def forward(ctx, weight, index, scale):
        ctx.save_for_backward(weight, index, scale)
        return weight[index] * scale

    @staticmethod
    def backward(ctx, g):
        weight, index, scale = ctx.saved_tensors
        rows = torch.zeros_like(weight).index_add(0, index, g * scale)
        return rows, None, (g * weight[index]).sum(0)


class Added(Function):
    """index_add in forward, of a result that is the same in every lane besides."""

    @staticmethod
    def forward(ctx, x, index, w):
        ctx.save_for_backward(index)
        return x.new_zeros(3, x.shape[1]).index_add(0, index, x * 3), w * 2

    @staticmethod
    def backward(ctx, g, h):
        (index,) = ctx.saved_tensors
        return g[index] * 3, None, h * 2


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def numbers(*shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).cos().reshape(shape)


def indices(lanes, count, rows):
    return (torch.arange(lanes * count).reshape(lanes, count) * 7) % rows


def given(lanes, dims):
    """weight [5, 4], index [6], scale [4], each with the batch at its dim or without."""
    whole = numbers(lanes, 5, 4), indices(lanes, 6, 5), numbers(lanes, 4)
    return [t[0] if d is None else t.movedim(0, d) for t, d in zip(whole, dims, strict=True)]


backends = pytest.mark.parametrize("backend", ["reference", "interpret"])
DIMS = [(None, 0, None), (2, 1, 1), (0, 0, None), (-1, 0, 0)]


@backends
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_per_sample_gradients(backend, dims) -> None:
    fast = fusegrad.compile(Gathered, backend=backend)
    pull = lambda f: vmap(grad(lambda w, i, s: f(w, i, s).pow(2).sum(), (0, 2)), dims)  # noqa: E731
    for lanes in (3, 1, 8):
        args = given(lanes, dims)
        close(pull(fast.apply)(*args), pull(lambda w, i, s: w[i] * s)(*args))


@backends
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_gradients_of_a_batch_are_summed_over_it(backend, dims) -> None:
    fast = fusegrad.compile(Gathered, backend=backend)
    pull = lambda f: grad(lambda w, i, s: vmap(f, dims)(w, i, s).pow(2).sum(), (0, 2))  # noqa: E731
    for lanes in (2, 5):
        args = given(lanes, dims)
        close(pull(fast.apply)(*args), pull(lambda w, i, s: w[i] * s)(*args))


@backends
def test_second_order(backend) -> None:
    fast = fusegrad.compile(Gathered, backend=backend)

    def twice(f):
        loss = lambda w, i, s: f(w, i, s).pow(3).sum()  # noqa: E731
        along = lambda w, i, s: jvp(lambda w, s: grad(loss, (0, 2))(w, i, s), (w, s), (w, s))[1]  # noqa: E731
        return vmap(along, (None, 0, 0))

    for lanes in (2, 4):
        args = given(lanes, (None, 0, 0))
        close(twice(fast.apply)(*args), twice(lambda w, i, s: w[i] * s)(*args))


@backends
def test_two_batch_axes(backend) -> None:
    fast = fusegrad.compile(Gathered, backend=backend)
    pull = lambda f: vmap(vmap(grad(lambda w, i, s: f(w, i, s).pow(2).sum()), (None, 0, None)), (0, 0, 0))  # noqa: E731
    for outer, inner in ((2, 3), (3, 2)):
        args = numbers(outer, 5, 4), indices(outer * inner, 6, 5).reshape(outer, inner, 6), numbers(outer, 4)
        close(pull(fast.apply)(*args), pull(lambda w, i, s: w[i] * s)(*args))


@backends
@pytest.mark.parametrize("out", [0, 1, -1])
def test_forward_with_a_result_that_no_lane_changes(backend, out) -> None:
    fast = fusegrad.compile(Added, backend=backend)
    plain = lambda x, i, w: (x.new_zeros(3, x.shape[1]).index_add(0, i, x * 3), w * 2)  # noqa: E731
    for lanes in (2, 5):
        args = numbers(lanes, 4, 2), indices(lanes, 4, 3), numbers(4)
        one, two = (vmap(f, (0, 0, None), (out, 0))(*args) for f in (fast.apply, plain))
        close(one, two)
        whole = lambda f: lambda x, i, w: sum(o.pow(2).sum() for o in vmap(f, (0, 0, None))(x, i, w))  # noqa: E731
        close(grad(whole(fast.apply), (0, 2))(*args), grad(whole(plain), (0, 2))(*args))


@backends
def test_one_graph_serves_every_batch_size(backend) -> None:
    fast = fusegrad.compile(Gathered, backend=backend)
    pull = vmap(grad(lambda w, i, s: fast.apply(w, i, s).sum()), (None, 0, None))
    pull(*given(3, (None, 0, None)))
    before = stats()
    for lanes in (4, 9, 16):
        pull(*given(lanes, (None, 0, None)))
    after = stats()
    assert after["captures"] == before["captures"]


class OneHot(Function):
    """F.one_hot asserts what it reads: torch has no batching rule for that."""

    @staticmethod
    def forward(ctx, x, t):
        p = x.softmax(-1)
        ctx.save_for_backward(p, t)
        return -(p.log() * torch.nn.functional.one_hot(t, 5)).sum(-1)

    @staticmethod
    def backward(ctx, g):
        p, t = ctx.saved_tensors
        return g.unsqueeze(-1) * (p - torch.nn.functional.one_hot(t, 5)), None


PER_LANE = {
    "vmap": lambda f: vmap(f),
    "vmap(vmap)": lambda f: vmap(vmap(f)),
    "vmap(grad)": lambda f: vmap(grad(lambda x, t: f(x, t).sum())),
    "vmap(vmap(grad))": lambda f: vmap(vmap(grad(lambda x, t: f(x, t).sum()))),
}


@backends
@pytest.mark.parametrize("composition", PER_LANE)
def test_one_hot(backend, composition) -> None:
    fast = fusegrad.compile(OneHot, backend=backend).apply
    plain = lambda x, t: -x.log_softmax(-1).gather(-1, t.unsqueeze(-1)).squeeze(-1)  # noqa: E731
    x, t = numbers(4, 3, 2, 5), indices(4, 6, 5).reshape(4, 3, 2)
    close(PER_LANE[composition](fast)(x, t), PER_LANE[composition](plain)(x, t))


@backends
def test_what_is_asserted_is_asserted_of_every_lane(backend) -> None:
    fast = vmap(fusegrad.compile(OneHot, backend=backend).apply)
    x, t = numbers(3, 2, 5), torch.zeros(3, 2, dtype=torch.int64)
    fast(x, t)
    traced = make_fx(lambda t: torch.nn.functional.one_hot(t, 5), tracing_mode="fake")(t)
    if not any("_assert" in str(node.target) for node in traced.graph.nodes):  # torch 2.11: nothing is asserted
        return
    with pytest.raises(RuntimeError, match="one_hot"):
        fast(x, torch.where(torch.arange(6).reshape(3, 2) == 3, 7, t))


@pytest.mark.parametrize("function", [Gathered, OneHot])
@backends
def test_no_capture_for_another_size_of_either_axis(backend, function) -> None:
    fast = fusegrad.compile(function, backend=backend).apply
    whole = {Gathered: lambda n: (numbers(*n, 5, 4), indices(n[0] * n[1], 6, 5).reshape(*n, 6), numbers(*n, 4)),
             OneHot: lambda n: (numbers(*n, 2, 5), indices(n[0] * n[1], 2, 5).reshape(*n, 2))}[function]  # fmt: skip
    pull = vmap(vmap(grad(lambda *a: fast(*a).sum())))
    pull(*whole((2, 3)))
    before = stats()["captures"]
    for sizes in ((5, 3), (2, 7), (4, 6), *([(1, 4), (3, 1)] if backend == "interpret" else [])):
        pull(*whole(sizes))
    assert stats()["captures"] == before


def test_a_batch_of_a_batch_is_not_captured() -> None:
    fast = fusegrad.compile(Gathered, backend="interpret").apply
    args = numbers(2, 3, 5, 4), indices(6, 6, 5).reshape(2, 3, 6), numbers(2, 3, 4)
    vmap(fast)(*(a[0] for a in args))
    before = stats()["captures"]
    found = vmap(vmap(fast))(*args)
    assert stats()["captures"] == before
    close(found, vmap(vmap(lambda w, i, s: w[i] * s))(*args))


class Scaled(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return x * w.square()

    @staticmethod
    def backward(ctx, g):
        (w,) = ctx.saved_tensors
        return g * w.square(), None


@pytest.mark.parametrize("dims", [(1, 0), (2, 1), (-1, 2)], ids=str)
def test_lanes_that_are_apart_in_memory_are_read_where_they_are(dims) -> None:
    fast = fusegrad.compile(Scaled, backend="interpret").apply
    x, w = numbers(4, 3, 2), numbers(4, 3, 2)
    x, w = x.movedim(0, dims[0]), w.movedim(0, dims[1])
    close(vmap(fast, dims, 1)(x, w), vmap(lambda x, w: x * w.square(), dims, 1)(x, w))
    with torch.autograd.profiler.profile() as ran:
        vmap(fast, dims)(x, w)
    assert not [e for e in ran.function_events if e.name == "aten::copy_"]
