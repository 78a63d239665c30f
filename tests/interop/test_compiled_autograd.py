"""backward under compiled autograd: in the graph where the class is promised traceable, else a break run in eager."""

import pytest
import torch
import wrong

import fusegrad

FLAGS = (None, True, False)


def gradient(apply, backend, x):
    loss = apply(x * 2).exp().sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
        loss.backward()
    return x.grad


@pytest.mark.parametrize("flag", FLAGS)
def test_the_written_backward_runs(flag) -> None:
    cls = wrong.sine(flag)
    fast, counting = fusegrad.compile(cls), wrong.Counting()
    for rows in (3, 3, 5):
        mine, his = wrong.sample(rows, 2), wrong.sample(rows, 2)
        cls.apply(his * 2).exp().sum().backward()
        torch.testing.assert_close(gradient(fast.apply, counting, mine), his.grad)


@pytest.mark.parametrize(("flag", "graphs"), [(True, 1), (None, 2), (False, 2)])
def test_how_many_graphs(flag, graphs) -> None:
    fast, counting = fusegrad.compile(wrong.sine(flag)), wrong.Counting()
    gradient(fast.apply, counting, wrong.sample())
    assert len(counting.graphs) == graphs


def test_an_opaque_backward_sees_real_tensors_as_often_as_in_eager() -> None:
    seen = []
    fast = fusegrad.compile(wrong.sine(False, seen))
    for calls in (1, 2, 3):
        gradient(fast.apply, wrong.Counting(), wrong.sample())
        assert seen == [torch.Tensor] * calls


@pytest.mark.parametrize("flag", FLAGS)
def test_by_config_around_forward_and_backward(flag) -> None:
    fast = fusegrad.compile(wrong.sine(flag))

    @torch.compile(backend=wrong.Counting())
    def step(x):
        fast.apply(x * 2).sum().backward()

    x = wrong.sample()
    with torch._dynamo.config.patch(compiled_autograd=True):
        step(x)
    torch.testing.assert_close(x.grad, (2 * x).cos().detach() * 14)


@pytest.mark.parametrize("make", [wrong.scaled, wrong.marked])
@pytest.mark.parametrize("flag", FLAGS)
def test_other_classes(flag, make) -> None:
    cls = make(flag)
    fast = fusegrad.compile(cls)

    def first(apply):
        return lambda x: apply(x)[0] if make is wrong.marked else apply(x)

    mine, his = wrong.sample(), wrong.sample()
    first(cls.apply)(his * 2).exp().sum().backward()
    torch.testing.assert_close(gradient(first(fast.apply), wrong.Counting(), mine), his.grad)


@pytest.mark.parametrize("flag", [None, True])
def test_with_generated_kernels(flag) -> None:
    """There what is saved is chosen by fusegrad, and is not what the class's own backward reads."""
    cls = wrong.sine(flag)
    mine, his = wrong.sample(), wrong.sample()
    cls.apply(his * 2).exp().sum().backward()
    fast = fusegrad.compile(cls, backend="interpret")
    torch.testing.assert_close(gradient(fast.apply, wrong.Counting(), mine), his.grad)
