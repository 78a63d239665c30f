"""Python Functions that call a C++ one, and Python mirrors of the C++ ones (wrong on purpose in the same way)."""

import torch
from torch.autograd import Function


class Mirror(Function):
    """What the C++ Relu is, in Python: nested Functions of Python are known to be kept."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clamp_min(0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x > 0).to(g.dtype) * x * x * 3


def declared(cls, flag):
    if flag is not None:
        cls.is_traceable = flag
    return cls


def in_forward(relu, flag):
    class InForward(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return relu(x.sin()) * 2

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * x.cos()

    return declared(InForward, flag)


def in_setup(relu, flag):
    class InSetup(Function):
        @staticmethod
        def forward(x):
            y = relu(x)
            return y * 2, y

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[0], output[1])

        @staticmethod
        def backward(ctx, g, g2):
            x, y = ctx.saved_tensors
            return g * x.cos() + g2 * y

    return declared(InSetup, flag)


def saved_result(relu, flag):
    class SavedResult(Function):
        @staticmethod
        def forward(ctx, x):
            y = relu(x)
            ctx.save_for_backward(y)
            return y * 2

        @staticmethod
        def backward(ctx, g):
            (y,) = ctx.saved_tensors
            return g * y

    return declared(SavedResult, flag)


def in_backward(relu, flag):
    class InBackward(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * relu(x) + relu(g)

    return declared(InBackward, flag)


def forward_only(relu, flag):
    class ForwardOnly(Function):
        @staticmethod
        def forward(x):
            return relu(x) * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

    return declared(ForwardOnly, flag)


CLASSES = (in_forward, in_setup, saved_result, in_backward)


def outcome(run):
    """The tensors that `run` returns, or the class and the text of what it raises."""
    try:
        return [t.detach() for t in run()]
    except Exception as error:
        return type(error), str(error).splitlines()[0]


def gradients(fn, x, order):
    """[fn(x), its gradient, ..., its gradient of that order], each of a function that is not linear."""
    y = fn(x)
    found = [y if isinstance(y, torch.Tensor) else sum(y)]
    for _ in range(order):
        found.append(torch.autograd.grad(found[-1].sin().sum(), x, create_graph=True)[0])
    return found
