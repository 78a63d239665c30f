"""T3 and T7: an opaque method runs as often as in eager, on real tensors, and nothing is derived over it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import Function
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from watching import (
    ACTIONS,
    DECLARATIONS,
    TOUCHES,
    Sine,
    captures,
    first_of,
    first_order,
    leaf,
    line_of,
    outcome,
    same,
    through_numpy,
    touching,
    watching,
)

import fusegrad

Tensor = torch.Tensor


@pytest.mark.parametrize("how", DECLARATIONS)
@pytest.mark.parametrize("touch", TOUCHES)
def test_t3_an_opaque_method_runs_as_often_as_in_eager_and_on_real_tensors(touch, how, capsys) -> None:
    body, roles = DECLARATIONS[how]
    cls = touching(TOUCHES[touch], roles, **body)
    fast = fusegrad.compile(cls)
    names = [n for role in roles for n in ((role, "setup_context") if role == "forward" else (role,))]
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusegrad.FallbackWarning)
        for name, action in ACTIONS.items():
            for _ in range(2):
                found = []
                for version in (cls, fast):
                    with watching(cls) as seen:
                        result = outcome(action, version)
                    calls = {n: seen.calls[n] for n in names}
                    modes = [m for m in seen.modes if m[0] in names]
                    found.append((result, calls, modes, sum(seen.on_fakes[n] for n in names), capsys.readouterr().out))
                same(found[1][0], found[0][0])
                assert found[1][1:] == found[0][1:], name
                assert found[1][3] == 0


def test_t3_the_other_methods_are_compiled() -> None:
    for how, others in {"forward": ["backward"], "backward": ["forward", "setup_context"]}.items():
        body, roles = DECLARATIONS[how]
        cls = touching(through_numpy, roles, **body)
        fast = fusegrad.compile(cls)
        outcome(first_order, fast)
        with watching(cls) as seen:
            for _ in range(3):
                outcome(first_order, fast)
        assert seen.calls[how] == 3 and not any(seen.calls[n] for n in others)
        found = fusegrad.explain(fast, leaf(3), 2).to_dict()["methods"]
        assert found[how]["status"] == "opaque" and f"traceable['{how}'] = False" in found[how]["reason"]
        assert found[how]["where"] == line_of(getattr(cls, how), "@staticmethod")
        assert all(found[name]["status"] == "compiled" for name in others if name != "setup_context")


@pytest.mark.parametrize("how", DECLARATIONS)
@pytest.mark.parametrize("options", [{}, {"fullgraph": True}, {"dynamic": False}, {"backend": "interpret"}], ids=str)
def test_t3_no_option_and_no_question_runs_an_opaque_body_on_anything_else(options, how) -> None:
    body, roles = DECLARATIONS[how]
    cls = touching(through_numpy, roles, **body)
    fast = fusegrad.compile(cls, **options)
    names = [n for role in roles for n in ((role, "setup_context") if role == "forward" else (role,))]
    with watching(cls) as seen:
        text = str(fusegrad.explain(fast, "f32[3]", 2))
    assert "opaque" in text and not any(seen.calls[n] for n in names)
    with watching(cls) as seen:
        mine = outcome(first_order, fast)
    assert not any(seen.on_fakes[n] for n in names) and all(seen.calls[n] == 1 for n in names if n != "jvp")
    torch.testing.assert_close(mine, outcome(first_order, cls))


def test_t3_class_wide_false_compiles_nothing_and_says_so() -> None:
    cls = touching(through_numpy, (), is_traceable=False)
    before = captures()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = fusegrad.compile(cls)
        for action in ACTIONS.values():
            same(outcome(action, fast), outcome(action, cls))
        found = fusegrad.explain(fast, leaf(3), 2).to_dict()["methods"]
    assert captures() == before
    for name in ("forward", "setup_context", "backward", "jvp"):
        assert found[name]["status"] == "opaque" and found[name]["reason"] == "it declares is_traceable = False"


# ------------------------------------------------------------------ T7: the pair of torch's tutorial
def to_numpy(t: Tensor) -> Any:
    return t.cpu().numpy()


class NumpySort(Function):
    @staticmethod
    def forward(x, dim):
        values = to_numpy(x)
        ind = np.argsort(values, axis=dim)
        ind_inv = np.argsort(ind, axis=dim)
        result = np.take_along_axis(values, ind, axis=dim)
        return tuple(torch.tensor(v, device=x.device) for v in (result, ind, ind_inv))

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, dim = inputs
        _, ind, ind_inv = output
        ctx.mark_non_differentiable(ind, ind_inv)
        ctx.save_for_backward(ind, ind_inv)
        ctx.save_for_forward(ind, ind_inv)
        ctx.dim = dim

    @staticmethod
    def backward(ctx, grad_output, _0, _1):
        ind, ind_inv = ctx.saved_tensors
        return NumpyTake.apply(grad_output, ind_inv, ind, ctx.dim), None

    @staticmethod
    def jvp(ctx, tangent, _):
        ind, ind_inv = ctx.saved_tensors
        return NumpyTake.apply(tangent, ind, ind_inv, ctx.dim), None, None

    @staticmethod
    def vmap(info, in_dims, x, dim):
        x = x.movedim(in_dims[0], 0)
        dim = dim if dim >= 0 else dim + x.dim() - 1
        return NumpySort.apply(x, dim + 1), (0, 0, 0)


class NumpyTake(Function):
    @staticmethod
    def forward(x, ind, ind_inv, dim):
        return torch.tensor(np.take_along_axis(to_numpy(x), to_numpy(ind), dim), device=x.device)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ind, ind_inv, dim = inputs
        ctx.save_for_backward(ind, ind_inv)
        ctx.save_for_forward(ind, ind_inv)
        ctx.dim = dim

    @staticmethod
    def backward(ctx, grad_output):
        ind, ind_inv = ctx.saved_tensors
        return NumpyTake.apply(grad_output, ind_inv, ind, ctx.dim), None, None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        ind, ind_inv = ctx.saved_tensors
        return NumpyTake.apply(tangent, ind, ind_inv, ctx.dim)

    @staticmethod
    def vmap(info, in_dims, x, ind, ind_inv, dim):
        x_dim, ind_dim, inv_dim, _ = in_dims
        logical = x.dim() if x_dim is None else x.dim() - 1
        dim = dim if dim >= 0 else dim + logical

        def front(t: Tensor, at: int | None) -> Tensor:
            return t.expand(info.batch_size, *t.shape) if at is None else t.movedim(at, 0)

        return NumpyTake.apply(front(x, x_dim), front(ind, ind_dim), front(ind_inv, inv_dim), dim + 1), 0


W = torch.arange(1.0, 4.0)
TRANSFORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "call": lambda f, x: f(x),
    "grad": lambda f, x: grad(lambda x: (f(x) * W).sum())(x),
    "vmap": lambda f, x: vmap(f)(x),
    "vmap in_dims": lambda f, x: vmap(f, in_dims=1)(x),
    "jacrev": lambda f, x: jacrev(f)(x),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "jvp": lambda f, x: jvp(f, (x,), (x.cos(),)),
    "hessian": lambda f, x: hessian(lambda x: (f(x) ** 3 * W).sum())(x),
    "grad grad": lambda f, x: grad(lambda x: grad(lambda x: (f(x) ** 3).sum())(x).sum())(x),
    "vmap grad": lambda f, x: vmap(grad(lambda r: (f(r) ** 2 * W).sum()))(x),
    "grad vmap": lambda f, x: grad(lambda x: (vmap(f)(x) ** 2 * W).sum())(x),
    "vmap jacrev": lambda f, x: vmap(jacrev(f))(x),
    "vmap hessian": lambda f, x: vmap(hessian(lambda r: (f(r) ** 3 * W).sum()))(x),
    "vmap vmap": lambda f, x: vmap(vmap(f))(torch.stack([x, x.cos()])),
    "jacfwd jacrev": lambda f, x: jacfwd(jacrev(lambda x: f(x) ** 2))(x),
    "vjp": lambda f, x: vjp(f, x)[1](x.sin()),
}


@pytest.mark.parametrize("options", [{}, {"traceable": False}, {"traceable": {"forward": False}}], ids=str)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_t7_the_users_rules_serve_under_every_transform(name, options) -> None:
    fast, compose = fusegrad.compile(NumpySort, **options), TRANSFORMS[name]
    x = leaf(2, 3).detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusegrad.FallbackWarning)
        mine = outcome(lambda cls: compose(lambda x: cls.apply(x, -1)[0], x), fast)
    same(mine, outcome(lambda cls: compose(lambda x: cls.apply(x, -1)[0], x), NumpySort))
    expected = compose(lambda x: x.sort(-1)[0], x)
    torch.testing.assert_close(mine, [t.clone() for t in torch.utils._pytree.tree_leaves(expected)])


class Sorted(Function):
    """Another Function around the pair, in forward and in backward."""

    @staticmethod
    def forward(x):
        return NumpySort.apply(x * 2, -1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, g, *_):
        ind, ind_inv = ctx.saved_tensors
        return NumpyTake.apply(g, ind_inv, ind, -1) * 2

    @staticmethod
    def vmap(info, in_dims, x):
        return Sorted.apply(x.movedim(in_dims[0], 0)), (0, 0, 0)


@pytest.mark.parametrize("name", ["call", "grad", "vmap", "jacrev", "vmap grad", "grad vmap", "grad grad"])
def test_t7_nested_inside_another_compiled_function(name) -> None:
    fast, compose = fusegrad.compile(Sorted), TRANSFORMS[name]
    x = leaf(2, 3).detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusegrad.FallbackWarning)
        for _ in range(2):
            mine = outcome(lambda cls: compose(lambda x: cls.apply(x)[0], x), fast)
            same(mine, outcome(lambda cls: compose(lambda x: cls.apply(x)[0], x), Sorted))
        tracked = outcome(lambda cls: torch.autograd.grad((cls.apply(y := leaf(2, 3))[0] ** 2).sum(), y), fast)
    same(tracked, outcome(lambda cls: torch.autograd.grad((cls.apply(y := leaf(2, 3))[0] ** 2).sum(), y), Sorted))


class NoRules(Function):
    """setup_context style, opaque, without jvp or vmap: there is nothing that could be derived."""

    @staticmethod
    def forward(x, k):
        return x.sin() * k

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.k = inputs[1]

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos() * ctx.k, None


@pytest.mark.parametrize("role", ["forward", "backward"])
@pytest.mark.parametrize("name", ["vmap", "jvp", "duals", "grad", "jacrev"])
def test_t7_over_an_opaque_method_no_rule_is_derived(name, role) -> None:
    fast = fusegrad.compile(NoRules, traceable={role: False})
    with watching(NoRules) as seen:
        mine = outcome(ACTIONS[name], fast)
    same(mine, outcome(ACTIONS[name], NoRules))
    assert isinstance(mine, tuple) == (name in ("vmap", "jvp", "duals")) and not seen.on_fakes.total()
    methods = fusegrad.explain(fast, leaf(3), 2).to_dict()["methods"]
    assert methods["jvp"]["status"] == methods["vmap"]["status"] == "absent"


def test_t7_a_backward_found_untraceable_is_not_transposed() -> None:
    class Reads(NoRules):
        @staticmethod
        def backward(ctx, g):
            return g * g.sum().item() * ctx.k, None

    fast = fusegrad.compile(Reads)
    with pytest.warns(fusegrad.FallbackWarning, match=r"Reads: a derivative is not compiled"):
        assert outcome(ACTIONS["jvp"], fast) == outcome(ACTIONS["jvp"], Reads)
    assert outcome(ACTIONS["vmap"], fast) == outcome(ACTIONS["vmap"], Reads)


@pytest.mark.parametrize("option", [{"forward": False}, False], ids=str)
def test_what_compile_was_told_holds_inside_another_capture(option) -> None:
    inner = fusegrad.compile(Sine, traceable=option)

    class Outer(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return inner.apply(x * 2) + 1

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * inner.apply(x)

    fast = fusegrad.compile(Outer)
    with watching(Sine) as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore", fusegrad.FallbackWarning)
        found = [outcome(lambda cls: first_of(cls), fast) for _ in range(3)]
    assert seen.calls["forward"] == 6 and not seen.on_fakes.total()
    same(found[2], outcome(lambda cls: first_of(cls), Outer))
