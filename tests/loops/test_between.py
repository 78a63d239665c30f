"""Between loops and what reads them: pieces, single steps, what one loop hands to another, products in steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import fusegrad

ANY = Any


def doubled(forward: ANY) -> type[Function]:
    """A Function with this forward, and a backward that is easy to write."""

    def backward(ctx: ANY, *gs: Tensor) -> ANY:
        (x,) = ctx.saved_tensors
        return 2 * gs[0].sum() * x

    def keeping(ctx: ANY, x: Tensor) -> ANY:
        ctx.save_for_backward(x)
        return forward(x)

    members = {"forward": staticmethod(keeping), "backward": staticmethod(backward)}
    return type(forward.__name__, (Function,), members)


def walked(x: Tensor) -> list[Tensor]:
    """A recurrence whose first state is a step of x."""
    h = x[0]
    hs = [h]
    for t in range(1, x.shape[0]):
        h = torch.tanh(h * x[t] + 0.5)
        hs.append(h)
    return hs


@doubled
def powers_of_states(x: Tensor) -> Tensor:
    return (torch.stack(walked(x), 1) * 0.5).exp() + x.mT


@doubled
def states_and_powers(x: Tensor) -> ANY:
    states = torch.stack(walked(x))
    return states, torch.exp(states - 1) * x


@doubled
def first_of_the_walk_back(x: Tensor) -> ANY:
    h, hs = x[-1], [x[-1]]
    for t in range(x.shape[0] - 2, -1, -1):
        h = torch.tanh(h * x[t] + 0.5)
        hs.append(3 * h)
    states = torch.stack(hs[::-1])
    return states, states[0].sum() + 1


@doubled
def first_two_changed(x: Tensor) -> ANY:
    h, hs = torch.zeros_like(x[0]), []
    for t in reversed(range(x.shape[0])):
        h = torch.tanh(h * x[t] + 0.5)
        hs.append(3 * h)
    states = torch.stack(hs[::-1])
    return torch.cat([states[:2] + h, states[2:]])


@doubled
def sums_of_states(x: Tensor) -> ANY:
    """Over steps alone, over all, of what is made of states and something beside them."""
    states = torch.stack(walked(x), 1)
    weights = x[0].exp()
    return states.sum(1), (states * weights[:, None]).sum((0, 1)) + 1, (states.mT * x).mean(0)


@doubled
def sums_of_what_is_read(x: Tensor) -> ANY:
    """A loop over all steps but the first, and sums of what it reads: over steps, over all, of what is made of them."""
    weights = x[0].exp()
    return torch.stack(walked(x)[1:]), (x * x.sin() * weights).sum(0), x.mT.exp().mean((0, 1)) + 1


@doubled
def sums_of_part_of_it(x: Tensor) -> ANY:
    """A loop that reads all steps beside a sum over some of them, which is not carried."""
    h, hs = torch.zeros_like(x[0]), []
    for xt in x:
        h = torch.tanh(h * xt + 0.5)
        hs.append(h)
    return torch.stack(hs), x[1:].sum(0)


def beside_neighbours(y: Tensor, x: Tensor) -> ANY:
    """What reads steps of y beside earlier or later ones: slices, rows around them, along another axis, two apart."""
    around = torch.cat([x[:1], y]) * torch.cat([y * 2, x[-1:].exp()])
    zero = y.new_zeros(y.shape[1], 1)
    along = torch.cat([zero, y.mT], 1) - torch.cat([y.mT.sin(), zero + 1], 1)
    return (y[1:] - y[:-1]) * x[1:], y[2:] + y[:-2], around, y * torch.cat([x[:1], y[:-1]]), along


@doubled
def neighbours_there(x: Tensor) -> ANY:
    h, hs = torch.zeros_like(x[0]), []
    for xt in x:
        h = torch.tanh(h * xt + 0.5)
        hs.append(h)
    return beside_neighbours(torch.stack(hs), x)


@doubled
def neighbours_back(x: Tensor) -> ANY:
    h, hs = torch.zeros_like(x[0]), []
    for t in reversed(range(x.shape[0])):
        h = torch.tanh(h * x[t] + 0.5)
        hs.append(h.exp())
    return beside_neighbours(torch.stack(hs[::-1]), x)


@doubled
def two_loops_of_one(x: Tensor) -> ANY:
    """Loops that read the same, one of which begins with what is made of it all."""
    h, k, hs, ks, count = x.mean(0), torch.zeros_like(x[0]), [], [], torch.zeros_like(x[0])
    for xt in x:
        h = torch.tanh(h * xt)
        hs.append(h)
    for t in range(x.shape[0]):
        k = torch.sin(k + x[t])
        ks.append(k * x[t])
    for _ in range(x.shape[0]):
        count = torch.cos(count) + 1
    return torch.stack(hs), torch.stack(ks), k * count


@doubled
def one_loop_after_another(x: Tensor) -> ANY:
    """The second begins with what the first ends with."""
    h, hs, ks = torch.zeros_like(x[0]), [], []
    for xt in x:
        h = torch.tanh(h * xt + 0.5)
        hs.append(h)
    for xt in x:
        h = torch.sin(h + xt)
        ks.append(h)
    return torch.stack(hs), torch.stack(ks)


@doubled
def sums_in_halves(x: Tensor) -> Tensor:
    h, hs = torch.zeros_like(x[0]), []
    for xt in x:
        h = torch.tanh(h * xt + 0.5)
        hs.append(h)
    return torch.stack(hs).sum(0)


@doubled
def there_and_back(x: Tensor) -> Tensor:
    h, there, sums, back = x[0], [], [], []
    for t in range(x.shape[0]):
        h = torch.tanh(h + x[t])
        there.append(h)
        sums.append(h * x[t].exp() + h)
    for t in reversed(range(x.shape[0])):
        h = torch.sin(h * x[t]) + there[t] * sums[t]
        back.append(h)
    return torch.stack(back)


@doubled
def states_of_keys(x: Tensor) -> ANY:
    s, ys, states = x.new_zeros(x.shape[1], x.shape[2], x.shape[2]), [], []
    for t in range(x.shape[0]):
        s = 0.9 * s + x[t].unsqueeze(2) * x[t].unsqueeze(1)
        states.append(s)
        ys.append(torch.einsum("bk,bkv->bv", x[t], s))
    return torch.stack(ys), torch.stack(states)


@doubled
def pairs_of_a_step(x: Tensor) -> Tensor:
    """A step reads its row along two axes, which the program has in the cache."""
    h, hs = x[0], []
    for xt in x:
        h = torch.sin(h[:, None] + xt[:, None] * xt[None, :]).sum(0)
        hs.append(h)
    return torch.stack(hs)


@doubled
def steps_behind_a_loop(x: Tensor) -> Tensor:
    """Steps that carry nothing, each of which waits for what a loop ends with."""
    last = walked(x)[-1]
    return torch.stack([(last * x[t].cos()).sum(0) for t in range(x.shape[0])])


@doubled
def what_it_reads(x: Tensor) -> ANY:
    """What is made for the steps is a result, too."""
    d = x.exp() + 1
    return d, torch.stack(walked(d))


@doubled
def what_it_reads_of_the_middle(x: Tensor) -> ANY:
    """The same along another axis, but for steps at both ends; backwards."""
    d, h, hs = (x * 2).sin().mT, torch.zeros_like(x[0]), []
    for t in reversed(range(1, x.shape[0] - 2)):
        h = torch.tanh(h * d[:, t] + 0.5)
        hs.append(h)
    return d, torch.stack(hs, 1), h * d[:, -1]


@doubled
def one_element_of_the_last(x: Tensor) -> ANY:
    h, hs = torch.zeros_like(x[0]), []
    for xt in x:
        h = torch.tanh(h * xt + 0.5)
        hs.append(h)
    states = torch.stack(hs, 1)
    return states, states[-1, -1], states[1:, -1]


@doubled
def steps_cut_in_the_middle(x: Tensor) -> ANY:
    """The first step begins otherwise: those of the loop begin behind that, and end in the middle of the next."""
    hs: list[Tensor] = []
    for t in range(x.shape[0]):
        z = torch.zeros_like(x[0]) if t == 0 else torch.stack([hs[-1].sin(), hs[-1].cos(), x[t - 1]]).amax(0)
        hs.append(x[t] - torch.exp(z))
    return torch.stack(hs), hs[-1] * 2


@doubled
def steps_cut_on_the_way_back(x: Tensor) -> ANY:
    z, hs = torch.ones_like(x[0]), []
    for t in reversed(range(x.shape[0])):
        hs.append(x[t] - torch.exp(z))
        if t > 0:
            z = torch.stack([hs[-1].sin(), hs[-1].cos()]).amax(0)
    return torch.stack(hs[::-1], 1)


@doubled
def along_antidiagonals(x: Tensor) -> Tensor:
    """Steps are diagonals of a square, and go back to where they are in it."""
    n = x.shape[0]
    d, h, hs = torch.nn.functional.pad(x[:, :n], (0, n)).reshape(-1)[: n * (2 * n - 1)].reshape(n, -1), x[0, :n], []
    for p in range(d.shape[1]):
        h = torch.tanh(h + d[:, p])
        hs.append(h)
    return torch.nn.functional.pad(torch.stack(hs, 1).reshape(-1), (0, n)).reshape(n, 2 * n)[:, :n]


WIDE = (40, 4)
CASES: dict[ANY, tuple[tuple[int, ...], float]] = {
    powers_of_states: (WIDE, 1.05), states_and_powers: (WIDE, 1.05), first_of_the_walk_back: (WIDE, 1.05),
    first_two_changed: (WIDE, 1.05), sums_of_states: (WIDE, 1.05), sums_in_halves: (WIDE, 1.05),
    pairs_of_a_step: (WIDE, 1.05), there_and_back: (WIDE, 2.6), states_of_keys: ((40, 2, 4), 1.2),
    neighbours_there: (WIDE, 1.1), neighbours_back: (WIDE, 1.1), sums_of_what_is_read: (WIDE, 1.05),
    sums_of_part_of_it: (WIDE, 1.6), two_loops_of_one: (WIDE, 1.4), one_loop_after_another: (WIDE, 1.4),
    steps_behind_a_loop: (WIDE, 2.2), what_it_reads: (WIDE, 1.05), what_it_reads_of_the_middle: (WIDE, 1.05),
    one_element_of_the_last: (WIDE, 1.05), steps_cut_in_the_middle: (WIDE, 1.05),
    steps_cut_on_the_way_back: (WIDE, 1.05), along_antidiagonals: ((40, 40), 1.1),
}  # fmt: skip
"""The shape of the argument, and the bytes that forward moves, at most, over the least possible."""
LAUNCHES = {sums_of_part_of_it: 2, two_loops_of_one: 2, one_loop_after_another: 2, steps_behind_a_loop: 2}


@pytest.mark.parametrize("cls", CASES, ids=lambda c: c.__name__)
def test_launches_and_bytes(cls: ANY) -> None:
    shape, most = CASES[cls]
    report = fusegrad.explain(fusegrad.compile(cls), torch.empty(shape, requires_grad=True), target="cuda:90")
    forward = report.directions["forward"]
    assert forward.launch_count == LAUNCHES.get(cls, 1)
    assert forward.moved <= most * forward.minimal


@pytest.mark.parametrize("cls", CASES, ids=lambda c: c.__name__)
def test_numbers(cls: ANY) -> None:
    fast, shape = fusegrad.compile(cls, backend="interpret", fullgraph=True), CASES[cls][0]
    for steps in (12, shape[0], 9):
        x = torch.randn(steps, *shape[1:])
        for got, want in zip(as_tuple(fast.apply(x)), as_tuple(cls.apply(x)), strict=True):
            torch.testing.assert_close(got, want)


def test_sums_of_halves_are_rounded_once() -> None:
    fast = fusegrad.compile(sums_in_halves, backend="interpret", fullgraph=True)
    x = torch.randn(300, 4, dtype=torch.float16)
    got, want = fast.apply(x), sums_in_halves.apply(x)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want)


def as_tuple(out: ANY) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def turned_and_widened(g: Tensor) -> tuple[Tensor, Tensor]:
    """What a step hands on is turned by the next; what is summed is the same along the axis."""
    k, total, given = g[-1], torch.zeros_like(g[-1]), []
    for t in reversed(range(g.shape[0])):
        h, k = k, g[t].flip(0)
        given.append(h * k)
        total = total + torch.logsumexp(h, 0).expand(3)
    return torch.stack(given[::-1]), total


@pytest.mark.parametrize("wide", [False, True])
def test_many_steps_at_once_only_where_lanes_are_alone(wide: bool) -> None:
    g = torch.randn(26, 1 if wide else 3, dtype=torch.float64).expand(26, 3)
    with fusegrad.config.patch(backend="interpret"):
        found = fusegrad.compile(turned_and_widened)(g)
    for a, b in zip(found, turned_and_widened(g), strict=True):
        torch.testing.assert_close(a, b)
