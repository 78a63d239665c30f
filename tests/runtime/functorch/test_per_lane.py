"""What torch's vmap does not follow while sizes are symbols: one graph for every batch, equal to one call a lane."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch.autograd import Function
from torch.func import grad, vmap

import fusegrad
from fusegrad.runtime.functorch.batching.batchable import batchable
from fusegrad.runtime.functorch.batching.lanes import present_under_vmap
from fusegrad.runtime.functorch.unit import TransformableGraph
from fusegrad.tracer.capture.capture import Session, with_known_sizes
from fusegrad.tracer.reads.reads import scan

aten = torch.ops.aten
LANES = 3


def floats(*shape):
    numbers = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=numbers, dtype=torch.float64)


def indices(high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


X, AT, ROWS = floats(4, 5), indices(5, 4, 2), torch.tensor([2, 0, 3])
SQUARE = floats(3, 3) + 3 * torch.eye(3, dtype=torch.float64)
OPERATIONS = {
    "cat": (lambda x, y: aten.cat([x, y], -1), X, floats(4, 2)),
    "gather": (lambda x, i: aten.gather(x, 1, i), X, AT),
    "scatter": (lambda x, i, s: aten.scatter.src(x, 1, i, s), X, AT, floats(4, 2)),
    "scatter_reduce": (lambda x, i, s: aten.scatter_reduce.two(x, 1, i, s, "amax"), X, AT, floats(4, 2)),
    "select_scatter": (lambda x, s: aten.select_scatter(x, s, 0, 1), X, floats(5)),
    "slice_scatter": (lambda x, s: aten.slice_scatter(x, s, 1, 1, 3), X, floats(4, 2)),
    "slice_backward": (lambda g, x: aten.slice_backward(g, x.shape, 1, 1, 3, 1), floats(4, 2), X),
    "diagonal_backward": (lambda g: aten.diagonal_backward(g, [g.shape[0]] * 2, 0, 0, 1), floats(5)),
    "unfold_backward": (lambda g, x: aten.unfold_backward(g, x.shape, 1, 2, 1), floats(4, 4, 2), X),
    "index_select": (lambda x, i: aten.index_select(x, 0, i), X, ROWS),
    "index_add": (lambda x, i, s: aten.index_add(x, 0, i, s, alpha=2), X, ROWS, floats(3, 5)),
    "index_copy": (lambda x, i, s: aten.index_copy(x, 0, i, s), X, ROWS, floats(3, 5)),
    "index_fill": (lambda x, i: aten.index_fill.int_Scalar(x, 0, i, 1.5), X, ROWS),
    "embedding": (lambda w, i: aten.embedding(w, i), X, ROWS),
    "embedding_backward": (lambda g, i: aten.embedding_dense_backward(g, i, 7, 2, False), floats(3, 5), ROWS),
    "take": (lambda x, i: aten.take(x, i), X, AT),
    "conv1d": (lambda x, w: F.conv1d(x, w, stride=2), floats(2, 2, 7), floats(3, 2, 3)),
    "conv_backward": (
        lambda g, x, w: aten.convolution_backward(g, x, w, [3], [1], [0], [1], False, [0], 1, [True] * 3),
        floats(2, 3, 4), floats(2, 2, 6), floats(3, 2, 3),
    ),
    "im2col": (lambda x: F.unfold(x, 3, padding=1), floats(2, 2, 5, 5)),
    "col2im": (lambda x: F.fold(x, (5, 5), 3, padding=1), floats(2, 18, 25)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), floats(2, 2, 4, 4)),
    "solve": (torch.linalg.solve, SQUARE, floats(3)),
    "searchsorted": (torch.searchsorted, floats(5).sort()[0], X),
    "cross": (lambda x, y: torch.linalg.cross(x, y), floats(4, 3), floats(4, 3)),
    "layer_norm": (lambda x, w: F.layer_norm(x, (x.shape[-1],), w, w), X, floats(5)),
    "reflection_pad": (lambda x: F.pad(x, (1, 2), "reflect"), X),
    "scatter_add_": (lambda i, s: torch.zeros(4, 5, dtype=s.dtype).scatter_add_(1, i, s), AT, floats(4, 2)),
    "written view": (lambda x: torch.zeros(4, 5, dtype=x.dtype)[:, 1:3].copy_(x[:, :2]) + 0, X),
    "written twice": (lambda x: torch.ones(5, dtype=x.dtype).mul_(2).add_(x[0]).clone().fill_(1).add_(x[1]), X),
}  # fmt: skip


def each_way():
    for name, (_, *args) in OPERATIONS.items():
        alone = [tuple(0 if i == j else None for j in range(len(args))) for i in (0, len(args) - 1)]
        for dims in dict.fromkeys([(0,) * len(args), *alone]):
            yield pytest.param(name, dims, id=f"{name}-{''.join('-' if d is None else 'b' for d in dims)}")


def trace(function, values):
    session = Session()
    fakes = [session.fake(v) for v in values]
    return session.trace(lambda *xs: tuple(pytree.tree_leaves(function(*xs))), fakes, None, False), fakes


@pytest.mark.parametrize(("name", "dims"), list(each_way()))
def test_one_graph_for_every_batch(name, dims) -> None:
    function, *args = OPERATIONS[name]
    lane = batchable(trace(function, args)[0].graph_module)
    pairs = list(zip(args, dims, strict=True))
    values = [a if d is None else torch.stack([a.roll(i, 0) for i in range(LANES)]) for a, d in pairs]
    if name in ("scatter_add_", "solve", "searchsorted"):
        values = [a if d is None else a.expand(LANES, *a.shape) for a, d in pairs]
    found, fakes = trace(lambda *xs: present_under_vmap(lane, dims, xs, "error"), values)
    assert all(not isinstance(with_known_sizes(f.shape)[0], int) for f, d in zip(fakes, dims, strict=True) if d == 0)
    pairs = list(zip(values, dims, strict=True))
    lanes = [pytree.tree_leaves(function(*(v if d is None else v[i] for v, d in pairs))) for i in range(LANES)]
    for mine, theirs in zip(found.graph_module(*values), zip(*lanes, strict=True), strict=True):
        torch.testing.assert_close(mine, torch.stack(theirs))


class Routed(Function):
    """Zeros of its own to scatter into, a sort in between: no graph of primitives."""

    @staticmethod
    def forward(ctx, x):
        values, order = x.sort(-1, descending=True)
        ctx.save_for_backward(order)
        return torch.zeros(x.shape, dtype=x.dtype).scatter_(-1, order[..., :2], values[..., :2])

    @staticmethod
    def backward(ctx, g):
        (order,) = ctx.saved_tensors
        kept = g.gather(-1, order)[..., :2]
        out = torch.zeros(g.shape, dtype=g.dtype)
        out.scatter_(-1, order[..., :2], kept)
        return out


def test_a_buffer_of_the_methods_own_is_one_per_lane_and_captured_once() -> None:
    fast = fusegrad.compile(Routed)
    weights = floats(4, 5).cos()

    def loss(f):
        return lambda x: (f(x) * weights).square().sum()

    def plain(x):
        return torch.where(x >= x.topk(2, -1).values[..., -1:], x, 0.0)

    run = vmap(grad(loss(fast.apply)))
    before = None
    for lanes in (2, 5, 7):
        x = floats(lanes, 4, 5)
        torch.testing.assert_close(run(x), torch.stack([grad(loss(plain))(row) for row in x]))
        assert before in (None, fusegrad.stats()["captures"])
        before = fusegrad.stats()["captures"]
    assert {r.status for r in fast._fusegrad.ledger.records.values()} == {"compiled"}


class Histogram(Function):
    """torch has no batching rule for histc: it makes a loop, and a graph for each batch size."""

    @staticmethod
    def forward(ctx, x):
        counts = torch.histc(x, 4, -3, 3)
        ctx.save_for_backward(counts)
        return x * counts.amax()

    @staticmethod
    def backward(ctx, g):
        (counts,) = ctx.saved_tensors
        return g * counts.amax()


def test_a_loop_over_the_lanes_is_captured_for_a_few_sizes_and_on_record() -> None:
    fast = fusegrad.compile(Histogram)
    captures = []
    for lanes in range(2, 9):
        x = floats(lanes, 4)
        expected = [row * torch.histc(row, 4, -3, 3).amax() for row in x]
        torch.testing.assert_close(vmap(fast.apply)(x), torch.stack(expected))
        captures.append(fusegrad.stats()["captures"])
    assert captures[-1] == captures[-2] == captures[-3]
    record = fusegrad.explain(fast, "f64[4]").methods["torch.func"]
    assert record.status == "opaque" and "one batch size" in record.reason


def test_a_graph_that_cannot_be_captured_is_told_by_its_derivatives_too() -> None:
    told = []
    unit = TransformableGraph("leaves_torch", lambda x: (torch.from_numpy(x.numpy() * 2),), "reference", scan())
    unit.refused = told.append
    assert unit.batch((0,), "error").refused == unit.vjp(1).refused == unit.refused
    torch.testing.assert_close(unit.execute([floats(3)])[0], 2 * floats(3))
    assert ["numpy" in str(error) for error in told] == [True]


def weighted(cls, w, x, order):
    return (cls.apply(x, order) * w).sum()


class Inverse(Function):
    """Called under vmap, compiled code of torch's asks a batch of symbolic size for its sizes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, order):
        return torch.take_along_dim(x, order, dim=0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, g):
        order = ctx.saved_tensors[0]
        return Inverse.apply(g, order.argsort(0)), None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_a_rule_that_reads_sizes_as_numbers_is_traced_at_the_sizes_of_the_call(backend: str) -> None:
    fast = fusegrad.compile(Inverse, backend=backend)
    for lanes, n in ((3, 5), (2, 7), (3, 5)):
        x, w = floats(lanes, n), floats(n)
        order = floats(lanes, n).argsort(1)
        ours, eager = (vmap(grad(partial(weighted, c, w)))(x, order) for c in (fast, Inverse))
        assert torch.equal(ours, eager)
    assert "torch.func" not in fusegrad.explain(fast, floats(5), order[0, :5].clone()).methods
