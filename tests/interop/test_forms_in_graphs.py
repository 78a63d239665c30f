"""`compile(pytree=True)` inside of torch.compile: nested arguments and results in one graph."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import Function
from torch.autograd.function import FunctionMeta

import fusegrad


@fusegrad.compile(pytree=True)
class Weighted(Function):
    """A custom slope of 5 and 7, so that a derivative of forward itself is noticed."""

    @staticmethod
    def forward(ctx, batch, scale=2.0, *, options=None):
        ctx.save_for_backward(batch["x"], batch["w"][0])
        ctx.scale = scale
        return {"y": batch["x"] * batch["w"][0] * scale, "parts": [batch["x"] + 1, (batch["w"][0], "name", 3)]}

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return {"x": g["y"] * w * 5, "w": [g["y"] * x * 7 * ctx.scale]}, None


@fusegrad.compile(pytree=True)
def plain(pair, more):
    first, second = pair
    return {"sum": first + second * more["k"]}, [first.sin()]


def leaves():
    return [torch.tensor([1.0, -2.0, 3.0], requires_grad=True), torch.tensor([0.5, 1.5, -1.0], requires_grad=True)]


def loss_of_class(x, w):
    found = Weighted.apply({"x": x * 1, "w": [w]}, 3.0)
    return (found["y"] * found["parts"][1][2]).sum() + (found["parts"][1][0] * 2).sum()


def loss_of_function(x, w):
    (found, others) = plain((x, w), more={"k": 4})
    return found["sum"].sum() + others[0].sum()


@pytest.mark.parametrize("loss", [loss_of_class, loss_of_function])
def test_nested_arguments_and_results_are_in_one_graph(loss):
    found = []
    for call in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        given = leaves()
        value = call(*given)
        found.append((value.detach(), *torch.autograd.grad(value, given)))
    torch.testing.assert_close(found[1], found[0])


def test_two_forms_are_told_apart_in_one_graph():
    def both(x, w):
        first, _ = plain((x, w), {"k": 4})
        second, _ = plain((x, first["sum"]), {"k": w})
        return second["sum"]

    given = leaves()
    torch.testing.assert_close(torch.compile(both, backend="aot_eager", fullgraph=True)(*given), both(*given))


Pair = namedtuple("Pair", ["first", "second"])


def test_named_tuples_are_in_one_graph_and_stay_what_they_are():
    @fusegrad.compile(pytree=True)
    class Swaps(Function):
        @staticmethod
        def forward(ctx, pair):
            assert isinstance(pair, Pair)
            ctx.save_for_backward(*pair)
            return Pair(pair.second * 2, [pair.first.sin()])

        @staticmethod
        def backward(ctx, g):
            return (Pair(g.second[0] * 5, g.first * 7),)

    def swapped(x, w):
        found = Swaps.apply(Pair(x * 1, w))
        return (found.first * found.second[0]).sum() * (2 if isinstance(found, Pair) else 0)

    found = []
    for call in (swapped, torch.compile(swapped, backend="aot_eager", fullgraph=True)):
        given = leaves()
        value = call(*given)
        found.append((value.detach(), *torch.autograd.grad(value, given)))
    torch.testing.assert_close(found[1], found[0])


def test_other_containers_break_the_graph_and_are_right():
    counter, given = CompileCounterWithBackend("aot_eager"), leaves()

    def of_pair(x, w):
        return plain([x * 1, w], OrderedDict(k=2))[0]["sum"] * 2

    torch.testing.assert_close(torch.compile(of_pair, backend=counter)(*given), of_pair(*given))
    assert counter.frame_count == 2


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_what_is_opaque_runs_between_two_graphs():
    seen = []

    @fusegrad.compile(pytree=True)
    class Opaque(Function):
        @staticmethod
        def forward(ctx, d):
            seen.append(d["x"].sum().item())
            return {"y": d["x"] * 2}

        @staticmethod
        def backward(ctx, g):
            return {"x": g["y"] * 5}

    fn = torch.compile(lambda x: Opaque.apply({"x": x * 1})["y"] * 3, backend="aot_eager")
    for _ in range(3):
        x = torch.ones(2, requires_grad=True)
        fn(x).sum().backward()
        assert x.grad.tolist() == [15.0, 15.0]
    assert seen == [2.0] * 3


def test_a_method_that_is_assigned_to_the_class_is_compiled():
    @fusegrad.compile(pytree=True)
    class Assigned(Function):
        @staticmethod
        def forward(ctx, d):
            return {"y": d["x"] * 2}

        @staticmethod
        def backward(ctx, g):
            return {"x": g["y"] * 5}

    def slope():
        x = torch.ones(2, requires_grad=True)
        Assigned.apply({"x": x})["y"].sum().backward()
        return x.grad.tolist()

    assert slope() == [5.0, 5.0]
    Assigned.backward = staticmethod(lambda ctx, g: {"x": g["y"] * 7})
    assert slope() == [7.0, 7.0]


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_other_containers_at_a_later_call_are_an_error():
    @fusegrad.compile(pytree=True)
    class Changes(Function):
        @staticmethod
        def forward(ctx, d):
            return {"y": d["x"] * 2} if d["x"].sum().item() > 0 else [d["x"]]

        @staticmethod
        def backward(ctx, *g):
            return {"x": None}

    def body(x):
        found = Changes.apply({"x": x * 1})
        return found["y"] * 3 if isinstance(found, dict) else found[0]

    fn = torch.compile(body, backend="aot_eager")
    assert fn(torch.ones(2)).tolist() == [6.0, 6.0]
    with pytest.raises(RuntimeError, match="returns other containers than when the graph after it was made"):
        fn(-torch.ones(2))


@pytest.mark.parametrize("pytree", [False, True])
def test_a_metaclass_of_the_authors_serves_subclasses_too(pytree):
    class Meta(FunctionMeta):
        pass

    class Base(Function, metaclass=Meta):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 3

    class Other(fusegrad.compile(Base, pytree=pytree)):
        @staticmethod
        def backward(ctx, g):
            return g * 5

    x = torch.ones(2, requires_grad=True)
    Other.apply(x).sum().backward()
    assert isinstance(Other, Meta) and x.grad.tolist() == [5.0, 5.0]
