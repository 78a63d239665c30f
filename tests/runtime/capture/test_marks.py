"""What is put on tensors beside values: attributes, hooks, gradients. Eager's result, and on record."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import Function

import fusegrad


class Tagged(Function):
    """Asks for an attribute of what it saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * (2 if hasattr(x, "tag") else 3)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (5 if getattr(x, "tag", False) else 7)


class OnItself(Function):
    """Saves nothing by `save_for_backward`, keeps it on ctx."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x.sin()
        ctx.given = x
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * ctx.x * (5 if hasattr(ctx.given, "tag") else 7)


class Looks(Function):
    """Looks at what is on a tensor in other ways."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * (2 if "tag" in vars(x) else 3)

    @staticmethod
    def backward(ctx, g):
        return g * (5 if "tag" in ctx.saved_tensors[0].__dict__ else 7)


class OfGradients(Function):
    """Asks for an attribute of a gradient, and whether two are one."""

    @staticmethod
    def forward(ctx, x):
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, g, h):
        return g * (5 if getattr(h, "tag", False) else 7) + h * (1 if g is h else 3)


def tracked(tag: bool = False) -> torch.Tensor:
    x = torch.ones(3, requires_grad=True)
    if tag:
        x.tag = True
    return x


def gradient(f, tag_at: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    x = tracked(tag_at == "call")
    y = f.apply(x)
    if tag_at == "between":
        x.tag = True
    y.backward(torch.ones(3))
    return y.detach(), x.grad


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("written", [Tagged, OnItself, Looks])
@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_backward_sees_attributes_put_on_at_any_time(written, backend):
    fast = fusegrad.compile(written, backend=backend)
    for at in (None, None, None, "call", "between", None, "between", "call"):
        for mine, eagers in zip(gradient(fast, at), gradient(written, at), strict=True):
            torch.testing.assert_close(mine, eagers)


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
@pytest.mark.parametrize("order", [(0, 0, 0, 1, 2, 3, 0), (1, 1, 0, 0, 0, 2), (2, 1, 0, 0, 0, 1), (3, 0, 1)])
def test_backward_sees_what_is_on_gradients(order):
    fast = fusegrad.compile(OfGradients, backend="reference")
    for how in order:
        found = []
        for f in (OfGradients, fast):
            x, g = tracked(), torch.ones(3)
            h = g if how == 1 else torch.ones(3, requires_grad=how == 3)
            if how >= 2:
                h.tag = True
            found.append(torch.autograd.grad(f.apply(x), x, (g, h), create_graph=how == 3)[0])
        torch.testing.assert_close(found[0], found[1])


def test_the_reason_of_an_attribute_in_backward_is_told():
    fast = fusegrad.compile(Tagged, backend="reference")
    gradient(fast, None)
    with pytest.warns(fusegrad.FallbackWarning, match="it is given a tensor that carries `tag`"):
        gradient(fast, "between")


MARKS = {
    "x.seen = True": "assigns `.seen`", "x.__dict__['seen'] = 1": "assigns `.seen`",
    "vars(x).update(seen=2)": "assigns `.seen`", "x.register_hook(lambda g: g * 2)": "registers a hook",
    "x.retain_grad()": "registers a hook", "x.detach_()": "assigns `.requires_grad`",
    "torch.Tensor.detach_(x)": "assigns `.requires_grad`", "y.seen = 3": "assigns `.seen`",
}  # fmt: skip
IN_BACKWARD = {
    "x.seen = getattr(x, 'seen', 0) + 1": "assigns `.seen`", "g.seen = 1": "assigns `.seen`",
    "x.register_hook(lambda g: g)": "registers a hook",
    "getattr(x, 'register_hook')(lambda g: g)": "registers a hook",
}  # fmt: skip
SOURCE = """
from torch.autograd import Function
import torch

class Marks(Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        {in_forward}
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        {in_backward}
        return g * 3
"""


def state(t: torch.Tensor):
    hooks = len(t._backward_hooks or ()) if t.is_leaf or t._backward_hooks else 0
    return dict(vars(t)), t.requires_grad, t.retains_grad, hooks


def leaves_behind(f, on_leaf: bool):
    leaf = torch.ones(3, requires_grad=True)
    x = leaf if on_leaf else leaf * 1
    y = f.apply(x)
    first, g = (state(x), state(y)), torch.ones(3)
    y.backward(g)
    return first, state(x), state(g), leaf.grad if leaf.grad is None else leaf.grad.tolist()


@pytest.mark.parametrize(
    ("in_forward", "in_backward", "reason"),
    [*((m, "pass", why) for m, why in MARKS.items()), *(("pass", m, why) for m, why in IN_BACKWARD.items())],
)  # fmt: skip
@pytest.mark.parametrize("on_leaf", [True, False])
def test_marks_are_eagers_and_told(tmp_path, in_forward, in_backward, reason, on_leaf):
    path = tmp_path / "marks.py"
    path.write_text(SOURCE.format(in_forward=in_forward, in_backward=in_backward))
    found = []
    for compiled in (False, True):
        namespace = {"__name__": "marks"}
        exec(compile(path.read_text(), str(path), "exec"), namespace)
        written = namespace["Marks"]
        if not compiled:
            found.append([leaves_behind(written, on_leaf) for _ in range(3)])
            continue
        with pytest.warns(fusegrad.FallbackWarning, match=reason):
            fast = fusegrad.compile(written, backend="reference")
            found.append([leaves_behind(fast, on_leaf) for _ in range(3)])
    assert found[0] == found[1]


def test_a_plain_function_may_register_hooks_in_between():
    def f(x):
        h = x * 2
        h.register_hook(lambda g: g * 5)
        return h * 3

    fast = fusegrad.compile(f, backend="reference")
    for _ in range(3):
        x = tracked()
        with pytest.warns(fusegrad.FallbackWarning) if _ == 0 else torch.enable_grad():
            fast(x).sum().backward()
        assert x.grad.tolist() == [30.0] * 3


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_explain_tells_that_it_is_of_such_arguments_alone():
    fast = fusegrad.compile(Tagged, backend="reference")
    gradient(fast, None)
    gradient(fast, "between")
    told = str(fusegrad.explain(fast, tracked()))
    assert "it is given a tensor that carries `tag`; for such arguments it runs in eager" in told
    assert "Tagged_backward" in told


class AsksForLayout(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (2 if g.is_contiguous() else 3) * (5 if x.stride(-1) == 1 else 7)


def _stepped(t):
    return torch.stack([t, t], -1)[..., 0]


LAYOUTS = {
    "row-major": torch.clone, "transposed": lambda t: t.mT.clone().mT, "stepped": _stepped,
    "rows of wider ones": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "expanded": lambda t: t[:1, :1].expand_as(t),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_backward_that_asks_for_layouts_gets_eagers_answers(backend):
    """A gradient with gaps is copied for kernels, which are of dense ones; a hook may lay out what was saved anew."""
    fast = fusegrad.compile(AsksForLayout, backend=backend)
    for _ in range(3):
        for of_gradient in LAYOUTS.values():
            for packed, graph in ((torch.clone, False), (torch.clone, True), (LAYOUTS["transposed"], False)):
                found = []
                for f in (AsksForLayout, fast):
                    x, g = torch.ones(3, 4, requires_grad=True), of_gradient(torch.ones(3, 4))
                    with torch.autograd.graph.saved_tensors_hooks(packed, lambda t: t):
                        y = f.apply(x)
                    found.append(torch.autograd.grad(y, x, g, create_graph=graph)[0])
                torch.testing.assert_close(found[1], found[0])


def test_gaps_in_gradients_are_no_reason_where_nobody_asks():
    fast = fusegrad.compile(OnItself, backend="reference", fullgraph=True)
    x = torch.ones(3, 4, requires_grad=True)
    fast.apply(x).backward(_stepped(torch.ones(3, 4)))
    assert fusegrad.explain(fast, x).methods["backward"].status == "compiled"


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_backward_that_is_replaced_after_one_that_cannot_be_captured():
    """The node of a class whose backward failed once kept that backward."""

    class Replaced(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * x

    first, fast = Replaced.__dict__["backward"], fusegrad.compile(Replaced, backend="reference")
    for _ in range(3):
        for later in (first, staticmethod(lambda ctx, g: g * 7)):
            Replaced.backward = first
            x = tracked()
            y = fast.apply(x)
            Replaced.backward = later
            if later is first:
                with pytest.raises(ValueError, match="not enough values"):
                    y.sum().backward()
            else:
                y.sum().backward()
                assert x.grad.tolist() == [7.0] * 3
