"""LayerNorm (Ba et al. 2016): mean and rstd of each row are saved; x_hat is computed again in backward."""

import torch
from compare import compare
from gallery.layer_norm import LayerNorm

AsWritten = LayerNorm.__base__  # a compiled class is a subclass of the class as written


def main():
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in [(48, 257), (257,), (257,)])
    compare("LayerNorm", AsWritten.apply, LayerNorm.apply, x, weight, bias, 1e-5)


if __name__ == "__main__":
    main()
