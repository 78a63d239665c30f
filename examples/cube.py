"""x ** 3, its derivative computed in the forward and returned as a second output, so that grad(grad(cube)) is right.

The Function of the PyTorch notes on extending torch.func; only the decorator is new.
"""

import torch
from compare import BACKENDS, compare, header, show

import fusegrad


@fusegrad.compile
class Cube(torch.autograd.Function):
    @staticmethod
    def forward(x):
        result = x**3
        dx = 3 * x**2
        return result, dx

    @staticmethod
    def setup_context(ctx, inputs, output):
        (x,) = inputs
        _, dx = output
        ctx.save_for_backward(x, dx)

    @staticmethod
    def backward(ctx, grad_output, grad_dx):
        x, dx = ctx.saved_tensors
        # the second term is what makes higher orders right
        return grad_output * dx + grad_dx * 6 * x


CubeAsWritten = Cube.__base__  # a compiled class is a subclass of the class as written


def cube(x):
    return Cube.apply(x)[0]


def cube_as_written(x):
    return CubeAsWritten.apply(x)[0]


def main():
    torch.manual_seed(0)
    x = torch.randn(64, 33, requires_grad=True)
    compare("cube", cube_as_written, cube, x)

    header("\ngrad(grad(cube)), through torch.func")
    point = torch.randn([])
    twice = torch.func.grad(torch.func.grad(cube_as_written))(point)
    for backend in BACKENDS:
        with fusegrad.config.patch(backend=backend):
            got = torch.func.grad(torch.func.grad(cube))(point)
        show(backend, "second derivative", got, twice)
        torch.testing.assert_close(got, 6 * point)


if __name__ == "__main__":
    main()
