"""A Poisson residual, as in physics-informed networks: the Laplacian of a network by forward over reverse, under vmap.

The activation is a Function with a backward of its own, and nothing else: its jvp, its vmap rule and its second
derivative follow from that backward. Compared with the same network in plain PyTorch, and with finite differences.
"""

import math

import torch
from compare import BACKENDS, header, show
from torch.func import functional_call, grad, jvp, vmap

import fusegrad


@fusegrad.compile
class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        s = torch.sigmoid(x)
        ctx.save_for_backward(x, s)
        return x * s

    @staticmethod
    def backward(ctx, grad_output):
        x, s = ctx.saved_tensors
        return grad_output * s * (1 + x * (1 - s))


class Network(torch.nn.Module):
    def __init__(self, activation, width=8):
        super().__init__()
        sizes = [(2, width), (width, width), (width, 1)]
        self.layers = torch.nn.ModuleList(torch.nn.Linear(*s, dtype=torch.float64) for s in sizes)
        self.activation = activation

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x).squeeze(-1)


def laplacian(u, x):
    """sum_i d2u/dx_i2 at one point: a tangent through the gradient per axis, all axes in one batch."""

    def curvature(direction):
        return jvp(grad(u), (x,), (direction,))[1] @ direction

    return vmap(curvature)(torch.eye(x.shape[-1], dtype=x.dtype)).sum()


def laplacians(network, weights, points):
    return vmap(lambda x: laplacian(lambda x: functional_call(network, weights, x), x))(points)


def finite_differences(u, points, h=1e-4):
    steps = h * torch.eye(points.shape[-1], dtype=points.dtype)
    return sum((u(points + s) - 2 * u(points) + u(points - s)) / h**2 for s in steps)


def residual(network, weights, points):
    """Mean square of Laplace(u) + f, for f = 2 pi^2 sin(pi x) sin(pi y)."""
    source = 2 * math.pi**2 * torch.sin(math.pi * points).prod(-1)
    return (laplacians(network, weights, points) + source).square().mean()


def train(network, weights, points, steps=10):
    """The residuals of a few steps of Adam: reverse mode through the Laplacian, the third derivative of the network."""
    weights = {n: w.clone().requires_grad_() for n, w in weights.items()}
    optimizer = torch.optim.Adam(weights.values(), lr=0.02)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = residual(network, weights, points)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def main():
    torch.manual_seed(0)
    compiled, plain = Network(Swish.apply), Network(torch.nn.functional.silu)
    weights = {n: w.detach() for n, w in compiled.named_parameters()}
    points = torch.rand(8, 2, dtype=torch.float64)

    header("Laplacian of a network, 8 points")
    expected = laplacians(plain, weights, points)
    approximate = finite_differences(lambda x: functional_call(plain, weights, x), points)
    for backend in BACKENDS:
        with fusegrad.config.patch(backend=backend):
            got = laplacians(compiled, weights, points)
        show(backend, "without a Function", got, expected)
        show(backend, "finite differences", got, approximate)

    header("\n10 steps towards -Laplace(u) = f")
    losses = train(plain, weights, points)
    show("reference", "residual per step", train(compiled, weights, points), losses)
    assert losses[-1] < losses[0]
    print(f"residual {losses[0]:.2f} -> {losses[-1]:.2f}")


if __name__ == "__main__":
    main()
