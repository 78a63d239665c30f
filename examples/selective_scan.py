"""A selective scan, as in Mamba's reference: a loop over time whose states decay by what it reads at each step.

    h = exp(delta[t] * a) * h + delta[t] * b[t] * u[t]        y[t] = sum over states of c[t] * h

The plain loop beside the same loop compiled: a table of launches, bytes moved and bytes saved for backward, counted by
`explain` for an H100, not timed.
"""

import torch
from compare import compare

import fusegrad


class AsWritten(torch.autograd.Function):
    """u, delta [batch, steps, width]; a [width, states]; b, c [batch, steps, states]."""

    @staticmethod
    def forward(ctx, u, delta, a, b, c):
        h, ys, hs = u.new_zeros(u.shape[0], *a.shape), [], []
        for t in range(u.shape[1]):
            decay = torch.exp(delta[:, t, :, None] * a)
            h = decay * h + (delta[:, t] * u[:, t])[..., None] * b[:, t, None]
            ys.append((h * c[:, t, None]).sum(-1))
            hs.append(h)
        ctx.save_for_backward(u, delta, a, b, c, torch.stack(hs))
        return torch.stack(ys, dim=1)

    @staticmethod
    def backward(ctx, grad_y):
        u, delta, a, b, c, hs = ctx.saved_tensors
        grad_h, grad_a = torch.zeros_like(hs[0]), torch.zeros_like(hs[0])
        grad_u, grad_delta, grad_b, grad_c = [], [], [], []
        for t in reversed(range(u.shape[1])):
            before = hs[t - 1] if t > 0 else torch.zeros_like(hs[0])
            decay = torch.exp(delta[:, t, :, None] * a)
            grad_h = grad_h + grad_y[:, t, :, None] * c[:, t, None]
            grad_c.append((grad_y[:, t, :, None] * hs[t]).sum(1))
            grad_power = grad_h * before * decay
            grad_a = grad_a + grad_power * delta[:, t, :, None]
            grad_input = (grad_h * b[:, t, None]).sum(-1)
            grad_b.append((grad_h * (delta[:, t] * u[:, t])[..., None]).sum(1))
            grad_u.append(grad_input * delta[:, t])
            grad_delta.append((grad_power * a).sum(-1) + grad_input * u[:, t])
            grad_h = grad_h * decay
        grads = [torch.stack(g[::-1], dim=1) for g in (grad_u, grad_delta, grad_b, grad_c)]
        return grads[0], grads[1], grad_a.sum(0), grads[2], grads[3]


class SelectiveScan(AsWritten):
    """The same, compiled."""


SelectiveScan = fusegrad.compile(SelectiveScan)


def arguments(batch, steps, width, states, dtype=torch.float32):
    """Sample arguments that ask for gradients; decays are between 0 and 1."""
    u, delta = torch.randn(batch, steps, width, dtype=dtype), torch.rand(batch, steps, width, dtype=dtype)
    a = -torch.rand(width, states, dtype=dtype)
    b, c = torch.randn(2, batch, steps, states, dtype=dtype).unbind(0)
    return [x.clone().requires_grad_() for x in (u, delta, a, b, c)]


def table(explained):
    """Launches and bytes of both ways, by direction; bytes saved for backward."""
    facts = explained.to_dict()
    print(f"{'':<10}{'launches':>10}{'MB moved':>10}   plain loop:{'launches':>10}{'MB moved':>10}")
    for direction in ("forward", "backward"):
        own, plain = facts["launches"][direction], facts["eager"][direction]
        moved = sum(k["bytes_read"] + k["bytes_written"] for k in facts["kernels"] if k["direction"] == direction)
        print(f"{direction:<10}{own:>10}{moved / 1e6:>10.1f}{plain['launches']:>24}{plain['bytes'] / 1e6:>10.1f}")
    print(f"saved for backward: {facts['saved_bytes'] / 1e6:.1f} MB")


def main():
    torch.manual_seed(0)
    compare("SelectiveScan", AsWritten.apply, SelectiveScan.apply, *arguments(2, 20, 6, 4))
    table(fusegrad.explain(SelectiveScan, *arguments(2, 512, 256, 16), target="cuda:90"))


if __name__ == "__main__":
    main()
