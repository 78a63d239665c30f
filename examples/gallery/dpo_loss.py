"""Direct preference optimisation (Rafailov et al. 2023) on log-probabilities of whole answers."""

import torch
import torch.nn.functional as F

import fusegrad


@fusegrad.compile
class DPOLoss(torch.autograd.Function):
    """Mean of -log sigmoid(beta * margin), and the margins, which have no gradient"""

    @staticmethod
    def forward(chosen, rejected, reference_chosen, reference_rejected, beta):
        margin = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
        return -F.logsigmoid(margin).mean(), margin

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.beta = inputs[4]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx, grad_loss, _):
        (margin,) = ctx.saved_tensors
        grad = -grad_loss * ctx.beta * torch.sigmoid(-margin) / margin.numel()
        return grad, -grad, None, None, None
