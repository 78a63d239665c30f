"""A quantiser with a learned step (LSQ, Esser et al. 2020): rounding is straight-through, the step's gradient scaled.

Autograd would say that rounding has no slope. The backward says otherwise, and forward mode follows the backward: the
derivative along a direction is the same by jvp and by the gradient.
"""

import math

import torch
from compare import BACKENDS, compare, header, show
from gallery.learned_step import LearnedStep
from torch.func import grad, jvp

import fusegrad

AsWritten = LearnedStep.__base__  # a compiled class is a subclass of the class as written


def straight_through(weight, step, bits, weight_dot, step_dot):
    """The derivative along a direction, by hand."""
    high = 2 ** (bits - 1) - 1
    q = weight / step
    inside = (q > -high - 1) & (q < high)
    slope = torch.where(inside, q.round() - q, q.clamp(-high - 1, high))
    return inside * weight_dot + slope * step_dot / math.sqrt(q.numel() * high)


def train(quantize, steps=25):
    """The losses of a linear regression whose weights have 3 bits, from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    x, truth = torch.randn(64, 8, generator=generator), torch.linspace(-1, 1, 8)
    weight, step = torch.zeros(8, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    optimizer = torch.optim.SGD([weight, step], lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (x @ (quantize(weight, step, 3) - truth)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def main():
    torch.manual_seed(0)
    weight, step = torch.randn(8, 16), torch.tensor(0.3)
    leaves = [weight.clone().requires_grad_(), step.clone().requires_grad_()]
    compare("3-bit weights", AsWritten.apply, LearnedStep.apply, *leaves, 3)

    header("\nforward mode")
    target, directions = torch.randn(8, 16), (torch.randn(8, 16), torch.tensor(0.7))

    def loss(weight, step):
        return (LearnedStep.apply(weight, step, 3) - target).square().mean()

    for backend in BACKENDS:
        with fusegrad.config.patch(backend=backend):
            _, moved = jvp(lambda *a: LearnedStep.apply(*a, 3), (weight, step), directions)
            _, slope = jvp(loss, (weight, step), directions)
            gradients = grad(loss, (0, 1))(weight, step)
        show(backend, "straight-through rule", moved, straight_through(weight, step, 3, *directions))
        inner = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
        show(backend, "<gradient, direction>", slope, inner)

    header("\n25 steps of SGD")
    expected = train(AsWritten.apply)
    for backend in BACKENDS:
        with fusegrad.config.patch(backend=backend):
            show(backend, "loss per step", train(LearnedStep.apply), expected)
    assert expected[-1] < expected[0] / 5
    print(f"loss {expected[0]:.3f} -> {expected[-1]:.3f}")


if __name__ == "__main__":
    main()
