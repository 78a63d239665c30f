"""The mean squared residual of the viscous Burgers equation on a grid in time and space (Raissi et al. 2019)."""

import torch
import torch.nn.functional as F

import fusegrad


def residual_of(u, dt, dx, viscosity):
    """u_t + u u_x - viscosity u_xx at [..., time, place]: forward in time, central in place."""
    now, left, right = u[..., :-1, 1:-1], u[..., :-1, :-2], u[..., :-1, 2:]
    slope, bend = (right - left) / (2 * dx), (right - 2 * now + left) / dx**2
    return (u[..., 1:, 1:-1] - now) / dt + now * slope - viscosity * bend


@fusegrad.compile
class BurgersResidual(torch.autograd.Function):
    """mean(residual^2) over the inner points"""

    @staticmethod
    def forward(u, dt, dx, viscosity):
        return residual_of(u, dt, dx, viscosity).square().mean()

    @staticmethod
    def setup_context(ctx, inputs, output):
        u, *ctx.steps = inputs
        ctx.save_for_backward(u)

    @staticmethod
    def backward(ctx, grad_output):
        (u,) = ctx.saved_tensors
        dt, dx, viscosity = ctx.steps
        residual = residual_of(u, dt, dx, viscosity)
        r = residual * (2 / residual.numel() * grad_output)
        now, left, right = u[..., :-1, 1:-1], u[..., :-1, :-2], u[..., :-1, 2:]
        advected, diffused = r * now / (2 * dx), r * viscosity / dx**2
        to_now = r * ((right - left) / (2 * dx) - 1 / dt) + 2 * diffused
        grad = F.pad(r / dt, (1, 1, 1, 0)) + F.pad(to_now, (1, 1, 0, 1))
        grad = grad + F.pad(advected - diffused, (2, 0, 0, 1)) - F.pad(advected + diffused, (0, 2, 0, 1))
        return grad, None, None, None
