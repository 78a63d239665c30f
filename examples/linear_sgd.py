"""A linear layer as a ctx-style Function inside an nn.Module, trained with SGD, compiled and as written.

The products are written as broadcast-multiply-sum, as tutorials do, and grad_weight comes back with the batch dimension
still on it: autograd sums it away.
"""

import math

import torch
from compare import BACKENDS, compare, header, show

import fusegrad


@fusegrad.compile
class FunctionalLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias):
        output = (weight.unsqueeze(0) * input.unsqueeze(1)).sum(dim=-1)
        if bias is not None:
            output = output + bias.unsqueeze(0)
        ctx.save_for_backward(input, weight, bias)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output):
        input, weight, bias = ctx.saved_tensors
        grad_weight = grad_output.unsqueeze(-1) * input.unsqueeze(-2)
        grad_bias = grad_output.detach().clone() if bias is not None else None
        grad_input = (grad_output.unsqueeze(-1) * weight.unsqueeze(0)).sum(dim=1)
        return grad_input, grad_weight, grad_bias


LinearAsWritten = FunctionalLinear.__base__  # a compiled class is a subclass of the class as written


class MyLinear(torch.nn.Module):
    def __init__(self, in_features, out_features, function):
        super().__init__()
        bound = 1 / math.sqrt(in_features)
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features).uniform_(-bound, bound))
        self.bias = torch.nn.Parameter(torch.empty(out_features).uniform_(-bound, bound))
        self.functional_linear = function.apply

    def forward(self, input):
        return self.functional_linear(input, self.weight, self.bias)


def train(function, steps=20):
    """The losses of a two-layer regression, from a fixed seed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(MyLinear(8, 32, function), torch.nn.Tanh(), MyLinear(32, 1, function))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 8)
    y = x[:, :1] * x[:, 1:2]
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def main():
    torch.manual_seed(0)
    tensors = [torch.randn(shape, requires_grad=True) for shape in [(64, 8), (32, 8), (32,)]]
    compare("linear", LinearAsWritten.apply, FunctionalLinear.apply, *tensors)
    header("\n20 steps of SGD")
    expected = train(LinearAsWritten)
    for backend in BACKENDS:
        with fusegrad.config.patch(backend=backend):
            show(backend, "loss per step", train(FunctionalLinear), expected)


if __name__ == "__main__":
    main()
