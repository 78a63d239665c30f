"""Cross-entropy with ignore_index: the mean over the rows that count. Beside the inputs one number a row is saved."""

import torch
from compare import compare
from gallery.cross_entropy import CrossEntropy

AsWritten = CrossEntropy.__base__  # a compiled class is a subclass of the class as written


def main():
    torch.manual_seed(0)
    logits, target = torch.randn(64, 101, requires_grad=True), torch.randint(0, 101, (64,))
    target[::5] = -100
    compare("cross-entropy", AsWritten.apply, CrossEntropy.apply, logits, target, -100, 0.0, 0.0)


if __name__ == "__main__":
    main()
