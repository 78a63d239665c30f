"""Focal loss for yes-or-no targets (Lin et al. 2017): easy examples count less, by (1 - p)^gamma."""

import torch
from compare import compare
from gallery.focal_loss import FocalLoss

AsWritten = FocalLoss.__base__  # a compiled class is a subclass of the class as written


def main():
    torch.manual_seed(0)
    logits, target = torch.randn(48, 80, requires_grad=True), torch.rand(48, 80) < 0.1
    compare("focal loss", AsWritten.apply, FocalLoss.apply, logits, target, 0.25, 2.0)


if __name__ == "__main__":
    main()
