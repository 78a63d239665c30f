"""A spiking network that trains: leaky integrate-and-fire neurons, a loop over time with a surrogate gradient.

A neuron adds its input to a potential that leaks, fires where that passes a threshold, and starts again below it. The
step has no derivative: backward takes that of a fast sigmoid in its place, and goes through time from the end.
"""

import torch
from compare import compare
from torch import nn

import fusegrad


class AsWritten(torch.autograd.Function):
    """Spikes of a current [steps, batch, neurons]; potentials are saved."""

    @staticmethod
    def forward(ctx, current, leak, threshold):
        potential = torch.zeros_like(current[0])
        spikes, potentials = [], []
        for incoming in current:
            potential = leak * potential + incoming
            spike = (potential > threshold).to(current.dtype)
            spikes.append(spike)
            potentials.append(potential)
            potential = potential - spike * threshold
        ctx.save_for_backward(torch.stack(potentials))
        ctx.leak, ctx.threshold = leak, threshold
        return torch.stack(spikes)

    @staticmethod
    def backward(ctx, grad_spikes):
        (potentials,) = ctx.saved_tensors
        grad_potential = torch.zeros_like(potentials[0])
        grads = []
        for t in reversed(range(potentials.shape[0])):
            surrogate = 1 / (1 + 10 * (potentials[t] - ctx.threshold).abs()) ** 2
            grad_spike = grad_spikes[t] - ctx.threshold * grad_potential
            grad_potential = grad_potential + grad_spike * surrogate
            grads.append(grad_potential)
            grad_potential = ctx.leak * grad_potential
        return torch.stack(grads[::-1]), None, None


class LeakyFire(AsWritten):
    """The same, compiled: one kernel forward and one backward, for any number of steps."""


LeakyFire = fusegrad.compile(LeakyFire)


class Network(nn.Module):
    """Spikes in, a hidden layer of spiking neurons, and a score for each class from their spikes in the second half."""

    def __init__(self, fire):
        super().__init__()
        self.fire, self.hidden, self.scores = fire, nn.Linear(8, 24), nn.Linear(24, 2)

    def forward(self, x):
        return self.scores(self.fire(self.hidden(x), 0.9, 1.0)[len(x) // 2 :].mean(0))


def bursts(count, steps):
    """Input [steps, count, 8], and its class: whether channels fire early or late."""
    late = torch.rand(count) < 0.5
    rate = torch.linspace(1, 0, steps)[:, None].expand(steps, count).clone()
    rate[:, late] = rate.flip(0)[:, late]
    return (torch.rand(steps, count, 8) < 0.5 * rate[..., None]).float(), late.long()


def train(fire, epochs=30):
    """The losses of a network that learns to tell the two apart."""
    torch.manual_seed(0)
    network, losses = Network(fire), []
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    for _ in range(epochs):
        x, target = bursts(32, steps=25)
        loss = nn.functional.cross_entropy(network(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    torch.manual_seed(0)
    current = torch.randn(30, 4, 6, requires_grad=True)
    compare("LeakyFire", AsWritten.apply, LeakyFire.apply, current, 0.9, 1.0)
    written, compiled = train(AsWritten.apply), train(LeakyFire.apply)
    print(f"loss of the network: {written[0]:.3f} -> {written[-1]:.3f} as written, {compiled[-1]:.3f} compiled")
    assert compiled[-1] < 0.7 * compiled[0]


if __name__ == "__main__":
    main()
