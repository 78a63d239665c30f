"""C++ Functions inside and around compiled ones: their backward, wrong on purpose, is the one that runs."""

import warnings
from contextlib import nullcontext

import classes
import pytest
import torch

import fusegrad
from fusegrad import FallbackWarning
from fusegrad.ir.errors import NotTraceableError

FORMS = [f"{form}-{mark}" for form in ("pybind", "operator") for mark in ("traceable", "opaque")]


def function(extension, form, name="relu_{}"):
    """A C++ Function by form and mark, for example "pybind-opaque"."""
    kind, mark = form.split("-")
    return getattr(extension if kind == "pybind" else torch.ops.fusegrad_cpp, name.format(mark))


def sample():
    torch.manual_seed(0)
    return torch.randn(5, 3, dtype=torch.float64).requires_grad_()


def close(ours, eagers):
    assert isinstance(ours, list) and isinstance(eagers, list), (ours, eagers)
    for mine, theirs in zip(ours, eagers, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("flag", [None, True, False])
@pytest.mark.parametrize("make", classes.CLASSES)
@pytest.mark.parametrize("form", FORMS)
def test_inside_a_method(extension, form, make, flag) -> None:
    cls = make(function(extension, form), flag)
    fast = fusegrad.compile(cls)
    x = sample()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        close(classes.gradients(fast.apply, x, 2), classes.gradients(cls.apply, x, 2))
    if flag is not False:
        assert {r.status for r in fast._fusegrad.ledger.records.values()} == {"compiled"}


@pytest.mark.parametrize("form", [*FORMS, "operator-composite"])
def test_around_a_call(extension, form) -> None:
    relu = function(extension, form)
    cls = classes.in_forward(torch.sin, None)
    fast = fusegrad.compile(cls)
    x = sample()
    ours = classes.gradients(lambda v: relu(fast.apply(relu(v))), x, 2)
    close(ours, classes.gradients(lambda v: relu(cls.apply(relu(v))), x, 2))


@pytest.mark.parametrize("form", [*FORMS, "operator-composite"])
def test_in_a_plain_function(extension, form) -> None:
    relu = function(extension, form)

    def f(x):
        return relu(x.sin()) * x

    fast = fusegrad.compile(f)
    close(classes.gradients(fast, sample(), 3), classes.gradients(f, sample(), 3))


@pytest.mark.parametrize("form", [*FORMS, "operator-composite"])
def test_hidden_outputs_keep_its_backward(extension, form) -> None:
    """Second order under torch.func goes back through forward, where eager refuses the class."""
    ours = fusegrad.compile(classes.saved_result(function(extension, form), None))
    mirror = fusegrad.compile(classes.saved_result(classes.Mirror.apply, None))
    close([second_order(ours.apply)], [second_order(mirror.apply)])


def second_order(fn):
    def first(v):
        return torch.func.grad(lambda u: fn(u).sin().sum())(v).pow(2).sum()

    return torch.func.grad(first)(sample().detach())


@pytest.mark.parametrize("form", [*FORMS, "operator-composite"])
def test_derived_rules_keep_its_backward(extension, form) -> None:
    ours = fusegrad.compile(classes.forward_only(function(extension, form), None)).apply
    mirror = fusegrad.compile(classes.forward_only(classes.Mirror.apply, None)).apply
    x = sample().detach()
    for transform in (
        lambda fn: torch.func.grad(lambda v: fn(v).sum())(x),
        lambda fn: torch.func.jvp(fn, (x,), (x.cos(),))[1],
        lambda fn: torch.vmap(torch.func.grad(lambda v: fn(v).sum()))(x),
        second_order,
    ):
        close([transform(ours)], [transform(mirror)])


@pytest.mark.parametrize("form", FORMS)
def test_torch_func_over_it_is_torchs_own_error(extension, form) -> None:
    relu = function(extension, form)
    fast = fusegrad.compile(classes.in_forward(torch.sin, None))
    with pytest.raises(RuntimeError, match=r"cannot use C\+\+ torch::autograd::Function with functorch"):
        torch.func.grad(lambda v: fast.apply(relu(v)).sum())(sample().detach())


@pytest.mark.parametrize("form", FORMS)
def test_it_is_called_as_it_is_every_time(extension, form) -> None:
    """One node of the captured graph, not the operations that it is made of."""
    fast = fusegrad.compile(classes.in_forward(function(extension, form), True))
    fast.apply(sample())
    (specializations,) = fast._fusegrad.table.by_facts.values()
    targets = [str(n.target) for n in specializations[0].captured.forward.trace.graph_module.graph.nodes]
    assert not any("clamp" in t for t in targets) and any("relu" in t for t in targets), targets


def test_compiled_code_without_a_function(extension) -> None:
    cls = classes.in_forward(extension.twice, True)
    close(classes.gradients(fusegrad.compile(cls).apply, sample(), 2), classes.gradients(cls.apply, sample(), 2))


# ------------------------------------------------------------------ what the scan of the source does not find
def test_a_callee_out_of_sight_is_refused_by_name(extension) -> None:
    table = {"relu": extension.relu_opaque}
    cls = classes.saved_result(lambda x: table["relu"](x), None)
    fast = fusegrad.compile(cls)
    with pytest.warns(FallbackWarning, match="compiled code"):
        close(classes.gradients(fast.apply, sample(), 2), classes.gradients(cls.apply, sample(), 2))
    assert fast._fusegrad.ledger.records["forward"].status == "opaque"
    promised = fusegrad.compile(classes.saved_result(lambda x: table["relu"](x), True))
    with pytest.raises(NotTraceableError, match="compiled code"):
        promised.apply(sample())


# ------------------------------------------------------------------ in place
def scaled(scale, flag):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, n):
            scale(n, x)
            ctx.mark_dirty(x)
            ctx.n = n
            return x

        @staticmethod
        def backward(ctx, g):
            h = g * 1
            scale(ctx.n, h)
            return h * 7, None

    return classes.declared(Scaled, flag)


@pytest.mark.parametrize("form", FORMS)
def test_in_place_with_mark_dirty(extension, form) -> None:
    """saved_data of the C++ node changes from call to call; the version counter moves once as in eager."""
    cls = scaled(function(extension, form, "scale_{}_"), None)
    fast = fusegrad.compile(cls)

    def results(apply, n):
        x = sample()
        z = x * 1
        before = z._version
        y = apply(z, n)
        assert y is z
        return [*classes.gradients(lambda v: y, x, 2), torch.tensor(z._version - before)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for n in (2, 3, 2):
            close(results(fast.apply, n), results(cls.apply, n))
    record = fast._fusegrad.ledger.records["forward"]
    if form.startswith("pybind"):  # it says nowhere that it writes
        assert record.status == "opaque" and "writes to its arguments" in record.reason
        assert record.where.startswith(f"{__file__}:")
    else:
        assert record.status == "compiled"


# ------------------------------------------------------------------ scalars in saved_data, redispatch below autograd
def aligned(align, flag):
    class Aligned(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, rois, scale, bins, half):
            ctx.save_for_backward(rois, x)
            ctx.rest = scale, bins, half
            return align(x.sin(), rois, scale, bins, bins, 2, half)

        @staticmethod
        def backward(ctx, g):
            rois, x = ctx.saved_tensors
            scale, bins, half = ctx.rest
            with torch.enable_grad():
                v = x.detach().requires_grad_()
                y = align(v, rois, scale, bins, bins, 2, half)
                return torch.autograd.grad(y, v, g)[0], None, None, None, None

    return classes.declared(Aligned, flag)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_roi_align(extension, form, plain) -> None:
    align = function(extension, form, "roi_align_{}")
    cls = aligned(align, None)

    def f(x, rois, scale, bins, half):
        return align(x.sin(), rois, scale, bins, bins, 2, half) * 3

    ours, eagers = (fusegrad.compile(f), f) if plain else (fusegrad.compile(cls).apply, cls.apply)
    rois = torch.tensor([[0.0, 0, 0, 4, 4], [0.0, 1, 1, 6, 5]])

    def results(fn, *scalars):
        torch.manual_seed(0)
        x = torch.randn(1, 2, 8, 8).requires_grad_()
        y = fn(x, rois, *scalars)
        return [y, *torch.autograd.grad(y.sin().sum(), x)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for scalars in ((1.0, 2, True), (0.5, 3, False), (1.0, 2, True)):
            close(results(ours, *scalars), results(eagers, *scalars))


# ------------------------------------------------------------------ compiled autograd
@pytest.mark.parametrize("flag", [None, True, False])
@pytest.mark.parametrize("form", ["pybind-traceable", "operator-opaque"])
def test_under_compiled_autograd(extension, form, flag) -> None:
    """The C++ nodes and the compiled one in one backward."""
    relu = function(extension, form)
    cls = classes.in_backward(relu, flag)
    fast = fusegrad.compile(cls)

    def gradient(apply, around):
        x = sample()
        loss = relu(apply(relu(x))).sum()
        with around:
            loss.backward()
        return [x.grad]

    torch._dynamo.reset()
    for _ in range(2):
        compiled = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
        close(gradient(fast.apply, compiled), gradient(cls.apply, nullcontext()))
