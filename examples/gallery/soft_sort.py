"""SoftSort (Prillo & Eisenschlos 2020): a row in descending order by a soft permutation, made again in backward."""

import torch

import fusegrad


def soft_permutation(ordered, x, tau):
    """softmax over j of -|ordered_i - x_j| / tau, and which of the two is larger."""
    difference = ordered.unsqueeze(-1) - x.unsqueeze(-2)
    return torch.softmax(-difference.abs() / tau, -1), torch.sign(difference)


@fusegrad.compile
class SoftSort(torch.autograd.Function):
    """P @ x, where P is the soft permutation that puts x in descending order"""

    @staticmethod
    def forward(ctx, x, tau):
        ordered, order = torch.sort(x, dim=-1, descending=True)
        ctx.save_for_backward(x, order)
        ctx.tau = tau
        p, _ = soft_permutation(ordered, x, tau)
        return (p * x.unsqueeze(-2)).sum(-1)

    @staticmethod
    def backward(ctx, grad_output):
        x, order = ctx.saved_tensors
        p, sign = soft_permutation(x.gather(-1, order), x, ctx.tau)
        y = (p * x.unsqueeze(-2)).sum(-1, keepdim=True)
        grad = grad_output.unsqueeze(-1)
        grad_distance = grad * p * (x.unsqueeze(-2) - y) * sign / ctx.tau
        grad_x = (grad * p).sum(-2) + grad_distance.sum(-2)
        return grad_x - grad_distance.sum(-1).gather(-1, torch.argsort(order, dim=-1)), None
