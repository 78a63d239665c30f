"""What a step reads of what is carried, beside its own element: neighbours, one element, one that data tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

import fusegrad

Step = Callable[[Tensor, Tensor], Tensor]
"""(what is carried, one step of x) -> what is carried"""


def moved_by_cat(state: Tensor, x: Tensor) -> Tensor:
    return torch.cat([state[1:], x[:1]])


def moved_along_two_axes(state: Tensor, x: Tensor) -> Tensor:
    return F.pad(state[1:, :-1], (0, 0, 1, 0, 0, 1)) + x


def one_element(state: Tensor, x: Tensor) -> Tensor:
    return 0.9 * state.flip(0) + x * state[-1:].cos()


def element_of_data(state: Tensor, x: Tensor) -> Tensor:
    index = (x[:1].abs() * 3).long() % state.shape[0]
    return 0.5 * state + x * state.gather(0, index).cos()


def through_its_own_index(state: Tensor, x: Tensor) -> Tensor:
    return 0.5 * state + x * state.gather(0, state.argmax(0, keepdim=True)).cos()


def best_before(state: Tensor, x: Tensor) -> Tensor:
    return (state[:, None] + x[None].sin()).max(0).values


def moved_sum(state: Tensor, x: Tensor) -> Tensor:
    """A sum that a step makes, at its own places and at those beside them."""
    soft = torch.stack([state, state * x, x.sin()]).logsumexp(0)
    return soft - F.pad(soft, (1, 0), value=0.5)[..., :-1] * torch.roll(soft, 1, 0)


def moved_test(state: Tensor, x: Tensor) -> Tensor:
    """The same of a truth value."""
    is_some = (torch.stack([state, x]) > 0.1).any(0)
    return torch.where(is_some ^ torch.roll(is_some, 1, -1), state.cos(), x)


def sum_of_moved_sums(state: Tensor, x: Tensor) -> Tensor:
    """What a step holds is made of what it holds."""
    first = torch.stack([state, x]).logsumexp(0)
    second = torch.stack([first, torch.roll(first, 1, 0)]).logsumexp(0)
    return second - torch.roll(second, -1, -1)


STEPS: dict[Step, bool] = {
    moved_sum: True,
    moved_test: True,
    sum_of_moved_sums: True,
    moved_by_cat: True,
    moved_along_two_axes: False,
    one_element: True,
    element_of_data: True,
    through_its_own_index: True,
    best_before: False,
}
"""Steps, and whether all of them are one kernel."""


def class_of(step: Step) -> type[Function]:
    class Stepped(Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            state, after = torch.zeros_like(x[0]), []
            for t in range(x.shape[0]):
                state = step(state, x[t])
                after.append(state)
            return torch.stack(after)

        @staticmethod
        def backward(ctx: object, g: Tensor) -> Tensor:
            return g

    return Stepped


@pytest.fixture(autouse=True)
def on_kernels() -> Iterator[None]:
    with fusegrad.config.patch(backend="interpret", disable="patience"):
        yield


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_step_reads_of_what_is_carried_what_eager_reads(step: Step) -> None:
    # in memory, one step along the first axis is as far as two along the second
    x = torch.randn(11, 4, 2, 3, dtype=torch.float64)
    fast = fusegrad.compile(class_of(step))
    torch.testing.assert_close(fast.apply(x), class_of(step).apply(x))
    launches = fusegrad.explain(fast, x).directions["forward"].launches
    assert not STEPS[step] or sum(launch.times for launch in launches) == 1


def turned(state: Tensor, x: Tensor) -> Tensor:
    return 0.4 * (state + state.mT.cos()) + x


def turned_sum(state: Tensor, x: Tensor) -> Tensor:
    """What a step holds, and a truth value of it, as they are and transposed."""
    soft = torch.stack([state, x]).logsumexp(0)
    return torch.where((soft > 0.5).mT, soft - 0.5 * soft.mT, x)


@pytest.mark.parametrize("step", [turned, turned_sum], ids=lambda step: step.__name__)
def test_a_step_reads_a_square_matrix_as_its_transpose(step: Step) -> None:
    x = torch.randn(5, 2, 3, 3, dtype=torch.float64)
    fast = fusegrad.compile(class_of(step))
    torch.testing.assert_close(fast.apply(x), class_of(step).apply(x))
    (launch,) = fusegrad.explain(fast, x).directions["forward"].launches
    assert launch.times == 1


def divided_cell(x: Tensor, w: Tensor) -> Tensor:
    h, out = torch.ones_like(x[0]), []
    for t in range(x.shape[0]):
        h = torch.tanh((h / x[t]) @ w) + x[t]
        out.append(h)
    return torch.stack(out)


def test_beyond_the_end_of_what_a_product_sums_is_nothing() -> None:
    """A tile is longer than a row: there zero is divided by zero, and the product was NaN everywhere."""
    torch.manual_seed(0)
    x, w = torch.rand(5, 3, 4) + 0.5, torch.randn(4, 4)
    fast = fusegrad.compile(divided_cell)
    torch.testing.assert_close(fast(x, w), divided_cell(x, w))
    (launch,) = fusegrad.explain(fast, x, w).directions["forward"].launches
    assert launch.times == 1


class Windows(Function):
    """A piece of x as long as w in each step, and a number that is put into what is carried."""

    @staticmethod
    def forward(ctx: object, x: Tensor, w: Tensor) -> Tensor:
        padded, state, after = F.pad(x, (w.shape[1] - 1, 0)), torch.zeros_like(w), []
        for t in range(x.shape[1]):
            state = state + x[:, t : t + 1] * padded[:, t : t + w.shape[1]]
            after.append(state[:, -1])
            state = torch.roll(state, 1, dims=1)
            state[:, 0] = 0
        return torch.stack(after, 1)

    @staticmethod
    def backward(ctx: object, g: Tensor) -> None:
        return None


def test_pieces_of_a_size_and_numbers_that_are_put_in_one_place() -> None:
    x, w = torch.randn(2, 11, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    fast = fusegrad.compile(Windows)
    torch.testing.assert_close(fast.apply(x, w), Windows.apply(x, w))
    forward = fusegrad.explain(fast, x, w).directions["forward"]
    assert not forward.reasons and sum(launch.times for launch in forward.launches) == 1


def read_beside_later(x: Tensor, w: Tensor) -> Tensor:
    """Of what is handed on for two steps all but the first is read, and nothing makes it in such pieces."""
    one = two = torch.zeros_like(x[0])
    out = []
    for t in range(x.shape[0]):
        one, two = x[t] + w * one + F.pad(two[:, 1:], (0, 1)), one
        out.append(one)
    return torch.stack(out)


def test_what_is_read_but_for_its_first_element_is_carried_whole() -> None:
    args = [torch.empty(shape, device="meta", requires_grad=True) for shape in ((20, 8, 32), (32,))]
    found = fusegrad.explain(fusegrad.compile(read_beside_later), *args, target="cuda:90").directions
    assert (found["forward"].launch_count, found["backward"].launch_count) == (1, 2)
