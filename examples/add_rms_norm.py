"""Residual add and RMSNorm in one Function with two outputs: the normalised sum, and the sum for the next block."""

import torch
from compare import compare
from gallery.add_rms_norm import AddRMSNorm

AsWritten = AddRMSNorm.__base__  # a compiled class is a subclass of the class as written


def main():
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(shape, requires_grad=True) for shape in [(48, 257), (48, 257), (257,)])
    compare("add + RMSNorm", AsWritten.apply, AddRMSNorm.apply, x, residual, weight, 1e-6)


if __name__ == "__main__":
    main()
