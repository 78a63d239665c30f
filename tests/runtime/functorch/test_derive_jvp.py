"""compile(derive_jvp=...): forward mode as the transpose of backward, as the derivative of forward, or not at all."""

import pytest
import torch
from torch.autograd import Function
from torch.func import grad, hessian, jacfwd, jvp, vmap

import fusegrad
from fusegrad.runtime.compiled.derived_backward import DeriveJvpError
from fusegrad.runtime.specialize.linearity import NonLinearBackward

OPTIONS = ("backward", "forward", False)
NO_JVP = "You must implement the jvp function"


class RoundThrough(Function):
    """Straight-through: forward has the derivative 0, backward is that of the identity."""

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g


class ClippedByNorm(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        g = g * x.cos()
        return g / g.norm().clamp_min(1)


class Wrong(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.sin()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return 10 * g * y


class CallsRound(Function):
    """A nested Function's own rule is its derivative, of forward, too."""

    @staticmethod
    def forward(x):
        return 3 * RoundThrough.apply(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return 100 * g


class OwnJvp(Wrong):
    @staticmethod
    def jvp(ctx, t):
        return 7 * t


class ForwardAlone(Function):
    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


class Marked(Function):
    @staticmethod
    def forward(x, y):
        return x * y, x + y

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g, _):
        x, y = ctx.saved_tensors
        return 2 * g * y, 2 * g * x


class Doubled(Function):
    """In place, with a backward that says something else."""

    @staticmethod
    def forward(x):
        return x.mul_(2)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_dirty(*inputs)

    @staticmethod
    def backward(ctx, g):
        return 5 * g


X = torch.linspace(-1.2, 1.3, 4, dtype=torch.float64)
T = torch.linspace(1, 2, 4, dtype=torch.float64)


def pushed(cls, option, *, x=X, t=T):
    return jvp(fusegrad.compile(cls, derive_jvp=option).apply, (x,), (t,))[1]


@pytest.mark.parametrize(
    ("cls", "by_backward", "by_forward"),
    [
        (RoundThrough, T, 0 * T),
        (Wrong, 10 * T * X.sin(), T * X.cos()),
        (CallsRound, 100 * T, 3 * T),
        (ForwardAlone, T * X.cos(), T * X.cos()),
        (OwnJvp, 7 * T, 7 * T),
    ],
)
def test_which_derivative_it_is(cls, by_backward, by_forward) -> None:
    torch.testing.assert_close(pushed(cls, "backward"), by_backward)
    torch.testing.assert_close(pushed(cls, "forward"), by_forward)
    torch.testing.assert_close(jvp(fusegrad.compile(cls).apply, (X,), (T,))[1], by_backward)


def test_kernels() -> None:
    x, t = X.float(), T.float()
    fast = fusegrad.compile(Wrong, backend="interpret", derive_jvp="forward")
    torch.testing.assert_close(jvp(fast.apply, (x,), (t,))[1], t * x.cos())


@pytest.mark.parametrize("cls", [RoundThrough, Wrong, ForwardAlone])
@pytest.mark.parametrize(
    "compose",
    [
        lambda f: jvp(f, (X,), (T,)),
        lambda f: jacfwd(f)(X),
        lambda f: vmap(jacfwd(f))(X),
        lambda f: hessian(lambda x: f(x).sum())(X),
    ],
    ids=["jvp", "jacfwd", "vmap(jacfwd)", "hessian"],
)
def test_none_is_derived(cls, compose) -> None:
    with pytest.raises(NotImplementedError, match=NO_JVP):
        compose(fusegrad.compile(cls, derive_jvp=False).apply)


def test_where_it_is_written_false_changes_nothing() -> None:
    torch.testing.assert_close(pushed(OwnJvp, False), 7 * T)


def test_a_backward_that_is_not_linear() -> None:
    with pytest.raises(NonLinearBackward, match="derive_jvp='forward'"):
        pushed(ClippedByNorm, "backward")
    torch.testing.assert_close(pushed(ClippedByNorm, "forward"), T * X.cos())


COMPOSITIONS = {
    "jacfwd": lambda f: jacfwd(f)(X),
    "vmap(jvp)": lambda f: vmap(lambda x, t: jvp(f, (x,), (t,))[1])(X, T),
    "jvp(vmap)": lambda f: jvp(vmap(f), (X,), (T,))[1],
    "vmap(jacfwd)": lambda f: vmap(jacfwd(f))(X.view(2, 2)),
    "jacfwd(jacfwd)": lambda f: jacfwd(jacfwd(f))(X),
    "grad(jvp)": lambda f: grad(lambda x: jvp(f, (x,), (T,))[1].sum())(X),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize("cls", [Wrong, ClippedByNorm])
def test_forward_under_transforms(cls, name) -> None:
    """Forward mode all the way is that of forward, whatever backward says."""
    compose = COMPOSITIONS[name]
    torch.testing.assert_close(compose(fusegrad.compile(cls, derive_jvp="forward").apply), compose(torch.sin))


@pytest.mark.parametrize("option", ["backward", "forward"])
def test_straight_through_under_transforms(option) -> None:
    fast = fusegrad.compile(RoundThrough, derive_jvp=option)
    slope = 1.0 if option == "backward" else 0.0
    torch.testing.assert_close(jacfwd(fast.apply)(X), slope * torch.eye(4, dtype=X.dtype))
    torch.testing.assert_close(vmap(lambda x: jvp(fast.apply, (x,), (x,))[1])(X), slope * X)


@pytest.mark.parametrize("option", ["backward", "forward"])
def test_hessian(option) -> None:
    """The gradient is the user's either way: `10 sin(x) g`; forward mode differentiates that."""
    found = hessian(lambda x: fusegrad.compile(Wrong, derive_jvp=option).apply(x).sum())(X)
    through = fusegrad.compile(Wrong, derive_jvp=option)
    expected = jacfwd(grad(lambda x: through.apply(x).sum()))(X)
    torch.testing.assert_close(found, expected)
    slope = 10 * 10 * X.sin() if option == "backward" else 10 * X.cos()
    torch.testing.assert_close(found, slope.diag())


def test_marks_and_writes() -> None:
    fast = fusegrad.compile(Marked, derive_jvp="forward")
    _, (moves, fixed) = jvp(fast.apply, (X, T), (T, X))
    torch.testing.assert_close(moves, T * T + X * X)
    torch.testing.assert_close(fixed, torch.zeros_like(X))
    written = fusegrad.compile(Doubled, derive_jvp="forward")
    torch.testing.assert_close(jvp(lambda x: written.apply(x.clone()), (X,), (T,))[1], 2 * T)


def test_a_plain_function_and_trees() -> None:
    fast = fusegrad.compile(lambda x: x.sin(), derive_jvp="forward")
    torch.testing.assert_close(jvp(fast, (X,), (T,))[1], T * X.cos())
    for option, expected in (("backward", 10 * T * X.sin()), ("forward", T * X.cos())):
        tree = fusegrad.compile(Wrong, pytree=True, derive_jvp=option)
        torch.testing.assert_close(jvp(tree.apply, (X,), (T,))[1], expected)
    with pytest.raises(NotImplementedError, match=NO_JVP):
        jvp(fusegrad.compile(Wrong, pytree=True, derive_jvp=False).apply, (X,), (T,))


def test_a_subclass_of_a_compiled_class_keeps_the_option() -> None:
    class Sub(fusegrad.compile(RoundThrough, derive_jvp="forward")):
        pass

    torch.testing.assert_close(jvp(Sub.apply, (X,), (T,))[1], 0 * T)


@pytest.mark.parametrize("value", [True, None, "transpose", 0, ["backward"]])
def test_anything_else_is_refused(value) -> None:
    with pytest.raises(DeriveJvpError, match="derive_jvp") as caught:
        fusegrad.compile(RoundThrough, derive_jvp=value)
    assert repr(value) in str(caught.value) and "test_derive_jvp.py" in str(caught.value)


@pytest.mark.parametrize(
    ("cls", "option", "status", "reason"),
    [
        (Wrong, "backward", "derived", "the transpose of backward"),
        (Wrong, "forward", "derived", "the derivative of forward"),
        (Wrong, False, "absent", "derive_jvp=False"),
        (ForwardAlone, "backward", "derived", "the derivative of forward"),
        (OwnJvp, "forward", "opaque", "the user's own rule"),
    ],
)
def test_explain(cls, option, status, reason) -> None:
    record = fusegrad.explain(fusegrad.compile(cls, derive_jvp=option), X).methods["jvp"]
    assert record.status == status and reason in record.reason
