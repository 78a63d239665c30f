"""RMSNorm (Zhang & Sennrich 2019) with rstd, the smallest thing that backward needs, saved beside the inputs."""

import torch
from compare import compare
from gallery.rms_norm import RMSNorm

AsWritten = RMSNorm.__base__  # a compiled class is a subclass of the class as written


def main():
    torch.manual_seed(0)
    x, weight = torch.randn(48, 257, requires_grad=True), torch.randn(257, requires_grad=True)
    compare("RMSNorm", AsWritten.apply, RMSNorm.apply, x, weight, 1e-6)


if __name__ == "__main__":
    main()
