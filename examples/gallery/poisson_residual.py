"""The mean squared residual of a Poisson equation on a grid, by the five-point stencil and its adjoint."""

import torch
import torch.nn.functional as F

import fusegrad


def stencil(u):
    """The sum of the four neighbours less four times the point, for inner points."""
    inner = u[..., 1:-1, 1:-1]
    return u[..., :-2, 1:-1] + u[..., 2:, 1:-1] + u[..., 1:-1, :-2] + u[..., 1:-1, 2:] - 4 * inner


@fusegrad.compile
class PoissonResidual(torch.autograd.Function):
    """mean((laplace(u) - f)^2) over the inner points of [..., height, width]"""

    @staticmethod
    def forward(ctx, u, f, spacing):
        residual = stencil(u) / spacing**2 - f[..., 1:-1, 1:-1]
        ctx.save_for_backward(residual)
        ctx.spacing = spacing
        return residual.square().mean()

    @staticmethod
    def backward(ctx, grad_output):
        (residual,) = ctx.saved_tensors
        scaled = residual * (2 / residual.numel() * grad_output)
        # the stencil is symmetric: its adjoint is itself, on the residual with zeros around it
        return stencil(F.pad(scaled, (2, 2, 2, 2))) / ctx.spacing**2, -F.pad(scaled, (1, 1, 1, 1)), None
