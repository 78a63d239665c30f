"""A compiled class inside of torch.compile: the backward as it was written, wrong on purpose, is the one that runs."""

import pytest
import torch
import wrong
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import fusegrad

FLAGS = (None, True, False)
BODIES = {
    "call": lambda f: lambda x: f(x * 2) + 1,
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "grad of grad": lambda f: torch.func.grad(lambda y: torch.func.grad(lambda x: f(x).sum())(y).sum()),
    "vmap": lambda f: lambda x: torch.vmap(f)(x) * 2,
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(lambda x: f(x).sum())),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "checkpoint": lambda f: lambda x: checkpoint(f, x, use_reentrant=False) * 2,
}
REFUSED = ("vmap", "vmap of grad", "jvp")  # where the class has no rule: derived, unless it is opaque


def close(ours, theirs):
    for mine, his in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, his)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("flag", FLAGS)
def test_the_written_backward_runs(flag, body) -> None:
    fast = fusegrad.compile(wrong.sine(flag))
    fn = torch.compile(BODIES[body](fast.apply), backend=wrong.Counting())
    if flag is False and body in REFUSED:
        with pytest.raises((RuntimeError, NotImplementedError), match=r"vmap support|implement the jvp"):
            wrong.result(fn)
        return
    for _ in range(2):
        close(wrong.result(fn), wrong.result(BODIES[body](fast.apply)))


@pytest.mark.parametrize("flag", [None, True])
@pytest.mark.parametrize("spelling", ["class", "apply"])
def test_a_traceable_class_is_in_the_graph(spelling, flag) -> None:
    fast = fusegrad.compile(wrong.sine(flag))
    alias = fast.apply
    counting = wrong.Counting()
    body = (lambda x: alias(x * 2) + 1) if spelling == "apply" else (lambda x: fast.apply(x * 2) + 1)
    fn = torch.compile(body, backend=counting, fullgraph=True)
    close(wrong.result(fn), wrong.result(body))
    assert len(counting.graphs) == 1


def test_a_class_that_is_declared_out_breaks_the_graph() -> None:
    fast = fusegrad.compile(wrong.sine(False))
    counting = wrong.Counting()
    wrong.result(torch.compile(lambda x: fast.apply(x * 2) + 1, backend=counting))
    assert len(counting.graphs) == 2
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Sine.apply .*it declares is_traceable = False"):
        wrong.result(torch.compile(lambda x: fast.apply(x * 2) + 1, backend=counting, fullgraph=True))
    assert "it declares is_traceable = False" in str(fusegrad.explain(fast, wrong.sample()))


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("flag", [None, True])
def test_transforms_are_in_the_graph(flag, body) -> None:
    """torch itself would drop the backward there."""
    fast = fusegrad.compile(wrong.sine(flag))
    fn = torch.compile(BODIES[body](fast.apply), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        close(wrong.result(fn), wrong.result(BODIES[body](fast.apply)))


@pytest.mark.parametrize("make", [wrong.sine, wrong.marked])
@pytest.mark.parametrize("flag", FLAGS)
def test_through_aot_autograd(flag, make) -> None:
    cls = make(flag)
    fast = fusegrad.compile(cls)
    fn = torch.compile(lambda x: fast.apply(x * 2), backend="aot_eager")
    close(wrong.result(fn), wrong.result(lambda x: cls.apply(x * 2)))


@pytest.mark.parametrize("flag", FLAGS)
def test_what_it_reads_may_change(flag, monkeypatch) -> None:
    fast = fusegrad.compile(wrong.scaled(flag))
    fn = torch.compile(lambda x: fast.apply(x) * 1, backend="aot_eager")
    for scale in (1.0, 3.0, 1.0):
        monkeypatch.setattr(wrong, "SCALE", scale)
        value, gradient = wrong.result(fn)
        torch.testing.assert_close(value, wrong.sample().detach() * scale)
        torch.testing.assert_close(gradient, torch.full_like(gradient, 7 * scale))


@pytest.mark.parametrize("flag", FLAGS)
def test_a_subclass_has_its_own_methods(flag) -> None:
    class Doubled(fusegrad.compile(wrong.sine(flag))):
        @staticmethod
        def forward(x):
            return x.sin() * 2

    fn = torch.compile(lambda x: Doubled.apply(x) + 1, backend=wrong.Counting())
    close(wrong.result(fn), wrong.result(lambda x: Doubled.apply(x) + 1))


class Pair(torch.Tensor):
    """Two tensors in one, which knows a few operations by name: no other may be made of it."""

    KNOWN = ("aten.mul", "aten.sin", "aten.cos", "aten.add", "aten.sum", "aten.detach", "aten.alias", "aten.view",
             "aten.ones_like", "aten.expand")  # fmt: skip

    @staticmethod
    def __new__(cls, first, second):
        options = {"dtype": first.dtype, "device": first.device, "requires_grad": first.requires_grad}
        return torch.Tensor._make_wrapper_subclass(cls, first.shape, first.stride(), **options)

    def __init__(self, first, second):
        self.first, self.second = first, second

    def __repr__(self):
        return "Pair"

    def __tensor_flatten__(self):
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Pair(inner["first"], inner["second"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        assert str(func).startswith(cls.KNOWN), func
        each = [tree_map_only(Pair, lambda t, n=name: getattr(t, n), args) for name in ("first", "second")]
        results = [func(*a, **(kwargs or {})) for a in each]
        return Pair(*results) if isinstance(results[0], torch.Tensor) else results[0]


def test_a_tensor_subclass_breaks_the_graph() -> None:
    """It gives operations a meaning of its own: the class runs as written on it, in a graph as outside of one."""
    fast = fusegrad.compile(wrong.sine(None))

    def run(f):
        x = Pair(torch.arange(3.0), -torch.arange(3.0)).requires_grad_()
        y = f(x)
        y.sum().backward()
        return y.first.detach(), y.second.detach(), x.grad.first, x.grad.second

    close(run(torch.compile(lambda x: fast.apply(x * 2), backend="aot_eager")), run(lambda x: fast.apply(x * 2)))
    with pytest.raises(RuntimeError, match="an argument is a tensor subclass"):
        run(torch.compile(lambda x: fast.apply(x * 2), backend="aot_eager", fullgraph=True))


def test_a_compiled_function() -> None:
    @fusegrad.compile
    def f(x, power=2.0):
        return x.sin() * x * power

    fn = torch.compile(lambda x: f(x * 2, power=3.0) + 1, backend="aot_eager", fullgraph=True)
    close(wrong.result(fn), wrong.result(lambda x: f(x * 2, power=3.0) + 1))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("flag", FLAGS)
def test_checkpoint(flag, compiled, reentrant) -> None:
    fast = fusegrad.compile(wrong.sine(flag))

    def body(x):
        return checkpoint(fast.apply, x * 2, use_reentrant=reentrant) * 2

    x = wrong.sample()
    (torch.compile(body, backend=wrong.Counting()) if compiled else body)(x).sum().backward()
    torch.testing.assert_close(x.grad, (2 * x).cos().detach() * 28)
