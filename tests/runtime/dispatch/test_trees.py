"""compile(pytree=True): nested arguments, results and gradients, against the flat class that computes the same."""

from __future__ import annotations

import collections
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from function_samples import BACKENDS
from torch.autograd import Function
from torch.autograd import forward_ad as fwd
from torch.autograd.function import NestedIOFunction
from torch.func import grad, jacrev, jvp, vmap

import fusegrad
from fusegrad.runtime.dispatch.compiled_class import CompileTargetError
from fusegrad.runtime.dispatch.pytree import TreeError

Tensor = torch.Tensor
both = pytest.mark.parametrize("backend", BACKENDS)
Affine = namedtuple("Affine", "scale shift")


@dataclass
class Pair:
    left: Tensor
    right: Tensor


pytree.register_dataclass(Pair)


def flat(x: Tensor, w: Tensor, b0: Tensor, b1: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(x * w + b0)
    return h, h * h * b1


class Nested(Function):
    """ctx style: a dict with a list in it -> a dict and a tensor."""

    @staticmethod
    def forward(ctx, x, params, power):
        h = torch.tanh(x * params["w"] + params["b"][0])
        ctx.save_for_backward(x, params["w"], params["b"][1], h)
        ctx.power = power
        return {"h": h, "n": 3}, h**power * params["b"][1]

    @staticmethod
    def backward(ctx, grads, gy):
        x, w, b1, h = ctx.saved_tensors
        assert set(grads) == {"h", "n"} and grads["n"] is None
        gh = (grads["h"] + gy * ctx.power * h ** (ctx.power - 1) * b1) * (1 - h * h)
        gw = (gh * x).sum(0) if ctx.needs_input_grad[1]["w"] else None
        return gh * w, {"b": [gh.sum(0), (gy * h**ctx.power).sum(0)], "w": gw}, None


class NestedSetup(Function):
    """setup_context style; the result is one dict."""

    @staticmethod
    def forward(x, params, power=2):
        h = torch.tanh(x * params["w"] + params["b"][0])
        return {"h": h, "y": [h**power * params["b"][1]]}

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, params, ctx.power = inputs
        ctx.save_for_backward(x, params["w"], params["b"][1], output["h"])

    @staticmethod
    def backward(ctx, grads):
        x, w, b1, h = ctx.saved_tensors
        (gy,) = grads["y"]
        gh = (grads["h"] + gy * ctx.power * h ** (ctx.power - 1) * b1) * (1 - h * h)
        return gh * w, {"w": (gh * x).sum(0), "b": (gh.sum(0), (gy * h**ctx.power).sum(0))}, None


def made(seed: int = 0) -> tuple[Tensor, dict[str, Any]]:
    torch.manual_seed(seed)
    params = {"w": torch.randn(5), "b": [torch.randn(5), torch.randn(5)]}
    return torch.randn(4, 5), params


def tracked(value: Any) -> Any:
    return pytree.tree_map(lambda t: t.detach().requires_grad_(), value)


def called(fast: Any, x: Tensor, params: Any) -> tuple[Tensor, Tensor]:
    result = fast.apply(x, params, 2)
    return (result[0]["h"], result[1]) if isinstance(result, tuple) else (result["h"], result["y"][0])


def expected(x: Tensor, params: Any) -> tuple[Tensor, Tensor]:
    return flat(x, params["w"], *params["b"])


def gradients(fn: Any, x: Tensor, params: Any, order: int = 1) -> list[Tensor]:
    x, params = tracked(x), tracked(params)
    leaves = [x, params["w"], *params["b"]]
    h, y = fn(x, params)
    total = h.sum() + (y * y.detach().cos()).sum()
    for _ in range(order):
        found = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
        total = sum(((g**2).sum() for g in found if g is not None), torch.zeros(()))
    return list(found)


@both
@pytest.mark.parametrize("cls", [Nested, NestedSetup])
@pytest.mark.parametrize("order", [1, 2])
def test_values_and_gradients_of_each_leaf(cls: type, backend: str, order: int) -> None:
    fast = fusegrad.compile(cls, backend=backend, pytree=True)
    x, params = made()
    for mine, theirs in zip(called(fast, x, params), expected(x, params), strict=True):
        torch.testing.assert_close(mine, theirs)
    mine_grads = gradients(lambda a, b: called(fast, a, b), x, params, order)
    for mine, theirs in zip(mine_grads, gradients(expected, x, params, order), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert not [r for r in fast._fusegrad.ledger.records.values() if r.reason]


def test_results_have_the_users_structure() -> None:
    x, params = made()
    first, second = fusegrad.compile(Nested, pytree=True).apply(x, params, 2)
    assert set(first) == {"h", "n"} and first["n"] == 3 and isinstance(second, Tensor)
    result = fusegrad.compile(NestedSetup, pytree=True).apply(x, params=params)  # power by default
    assert isinstance(result["y"], list) and result["h"].shape == (4, 5)


def test_another_structure_is_another_capture_and_the_same_one_is_not() -> None:
    class Total(Function):
        @staticmethod
        def forward(ctx, tree):
            ctx.count = len(tree)
            return sum(tree.values()) if isinstance(tree, dict) else sum(tree)

        @staticmethod
        def backward(ctx, g):
            return ([g] * ctx.count,)

    fast = fusegrad.compile(Total, pytree=True)
    a = torch.ones(3, requires_grad=True)
    assert fast.apply([a, a]).tolist() == [2.0] * 3
    assert fast.apply([a, a, a]).tolist() == [3.0] * 3
    before = fusegrad.stats()["captures"]
    out = fast.apply([a, a, 2 * a])
    assert out.tolist() == [4.0] * 3 and fusegrad.stats()["captures"] == before
    out.sum().backward()
    assert a.grad is not None and a.grad.tolist() == [4.0] * 3
    with pytest.raises(TreeError, match=r"args\[0\] is a list .* expected a dict"):
        fast.apply({"p": a, "q": a}).sum().backward()


@both
def test_transforms_over_a_dict(backend: str) -> None:
    fast = fusegrad.compile(NestedSetup, backend=backend, pytree=True)
    x, params = made()

    def loss(fn: Any, p: Any, a: Tensor) -> Tensor:
        h, y = fn(a, p)
        return h.sum() + (y * y).sum()

    def mine(p: Any, a: Tensor) -> Tensor:
        return loss(lambda a, p: called(fast, a, p), p, a)

    def theirs(p: Any, a: Tensor) -> Tensor:
        return loss(expected, p, a)

    tangents = (pytree.tree_map(torch.cos, params), x.sin())
    for apply in (
        lambda f: grad(f)(params, x),
        lambda f: vmap(f, (None, 0))(params, x[:, None]),
        lambda f: vmap(grad(f), (None, 0))(params, x[:, None]),
        lambda f: jvp(f, (params, x), tangents)[1],
        lambda f: jacrev(grad(f, argnums=1), argnums=1)(params, x),
    ):
        results = [pytree.tree_flatten(apply(f)) for f in (mine, theirs)]
        assert results[0][1] == results[1][1]
        for a, b in zip(results[0][0], results[1][0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_dual_numbers_of_a_leaf() -> None:
    fast = fusegrad.compile(NestedSetup, pytree=True)
    x, params = made()
    with fwd.dual_level():
        w = fwd.make_dual(params["w"], torch.ones(5))
        mine = fwd.unpack_dual(called(fast, x, {**params, "w": w})[1]).tangent
        theirs = fwd.unpack_dual(expected(x, {**params, "w": w})[1]).tangent
    torch.testing.assert_close(mine, theirs)


class OwnRules(Function):
    """The user's jvp and vmap get structures, and mark themselves by a factor."""

    @staticmethod
    def forward(affine, x):
        return Pair(x * affine.scale, x + affine.shift)

    @staticmethod
    def setup_context(ctx, inputs, output):
        affine, x = inputs
        assert isinstance(ctx.needs_input_grad[0], Affine)
        ctx.save_for_backward(affine.scale, x)
        ctx.save_for_forward(affine.scale, x)

    @staticmethod
    def backward(ctx, grads):
        scale, x = ctx.saved_tensors
        assert isinstance(grads, Pair)
        return Affine((grads.left * x).sum(0), grads.right.sum(0)), grads.left * scale + grads.right

    @staticmethod
    def jvp(ctx, t_affine, t_x):
        scale, x = ctx.saved_tensors
        return Pair(10 * (t_affine.scale * x + scale * t_x), t_affine.shift + t_x)

    @staticmethod
    def vmap(info, in_dims, affine, x):
        assert isinstance(in_dims[0], Affine) and info.batch_size == 3
        assert in_dims == (Affine(None, None), 0)
        out = OwnRules.forward(affine, x)
        return Pair(100 * out.left, out.right), Pair(0, 0)


def test_own_jvp_and_vmap_in_named_tuples_and_dataclasses() -> None:
    fast = fusegrad.compile(OwnRules, pytree=True)
    affine, x = Affine(torch.randn(2), torch.randn(2)), torch.randn(3, 2)
    out, tangent = jvp(fast.apply, (affine, x), (Affine(torch.ones(2), torch.zeros(2)), torch.ones(3, 2)))
    assert isinstance(out, Pair)
    torch.testing.assert_close(tangent.left, 10 * (x + affine.scale))
    torch.testing.assert_close(tangent.right, torch.ones(3, 2))
    mapped = vmap(lambda a: fast.apply(affine, a))(x)
    torch.testing.assert_close(mapped.left, 100 * x * affine.scale)
    torch.testing.assert_close(mapped.right, x + affine.shift)
    affine, x = tracked(affine), tracked(x)
    out = fast.apply(affine, x)
    (out.left.sum() + out.right.sum()).backward()
    torch.testing.assert_close(affine.scale.grad, x.sum(0))
    torch.testing.assert_close(affine.shift.grad, torch.full((2,), 3.0))


def returning(result: Any, cls: type = Nested) -> Any:
    class Returns(cls):  # type: ignore[misc, valid-type]
        @staticmethod
        def backward(ctx, *gradients):
            return result

    return fusegrad.compile(Returns, pytree=True)


G = torch.ones(5)
WRONG = {
    "a missing key": ((None, {"w": G}, None), r"the gradient of args\[1\] is a dict with \['w'\], expected a dict"),
    "a list too short": ((None, {"w": G, "b": [G]}, None), r"args\[1\]\['b'\] is a list with \[0\], expected"),
    "a tensor for a dict": ((None, G, None), r"args\[1\] is a Tensor, expected a dict"),
    "a dict for a list": ((None, {"w": G, "b": {"x": G, "y": G}}, None), r"args\[1\]\['b'\] is a dict .* a list"),
    "a float": ((None, {"w": G, "b": [None, 2.0]}, None), r"args\[1\]\['b'\]\[1\] is a float, expected a tensor or N"),
    "a dict for a tensor": (({"x": G}, None, None), r"args\[0\] is a dict with \['x'\], expected a tensor or None"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_misfit_names_the_leaf(name: str) -> None:
    result, text = WRONG[name]
    x, params = tracked(made())
    with pytest.raises(TreeError, match=text) as caught:
        returning(result).apply(x, params, 2)[1].sum().backward()
    assert "test_trees.py:" in str(caught.value) and "fix:" in str(caught.value)


def test_none_for_a_whole_argument_and_for_a_leaf() -> None:
    x, params = tracked(made())
    fast = returning((torch.ones(4, 5), None, None))
    fast.apply(x, params, 2)[1].sum().backward()
    assert x.grad is not None and params["w"].grad is None and params["b"][0].grad is None
    fast = returning((None, OrderedDict(w=None, b=[None, G]), None))
    with pytest.raises(TreeError, match="is a OrderedDict"):
        fast.apply(x, params, 2)[1].sum().backward()
    fast = returning((None, {"w": None, "b": (None, G)}, None, None))
    fast.apply(x, params, 2)[1].sum().backward()
    assert params["b"][1].grad.tolist() == [1.0] * 5 and params["w"].grad is None


def test_the_wrong_number_of_gradients() -> None:
    x, params = tracked(made())
    with pytest.raises(RuntimeError, match=r"incorrect number of gradients \(expected 3, got 2\)"):
        returning((None, None)).apply(x, params, 2)[1].sum().backward()


def test_missing_gradients_arrive_as_none_in_the_structure() -> None:
    seen = []

    class Unmaterialized(Function):  # its backward has an effect, so that it runs as written
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(False)
            return {"a": x * 2, "b": [x * 3]}

        @staticmethod
        def backward(ctx, grads):
            seen.append(grads["b"][0] is None)
            return 2 * grads["a"]

    x = torch.ones(3, requires_grad=True)
    with pytest.warns(fusegrad.FallbackWarning):
        fusegrad.compile(Unmaterialized, pytree=True).apply(x)["a"].sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0] * 3 and all(seen)


def test_a_plain_function() -> None:
    @fusegrad.compile(pytree=True)
    def loss(params: Any, x: Tensor, scale: float = 2.0) -> Any:
        return {"loss": (x * params["w"] * scale).sin(), "parts": (x * 2, [params["w"] + 1])}

    w, x = torch.randn(3, requires_grad=True), torch.randn(2, 3)
    out = loss({"w": w}, x=x)
    torch.testing.assert_close(out["loss"], (x * w * 2).sin())
    torch.testing.assert_close(out["parts"][1][0], w + 1)
    (g,) = torch.autograd.grad(out["loss"].sum(), w)
    torch.testing.assert_close(g, ((x * w * 2).cos() * 2 * x).sum(0))
    mapped = vmap(lambda a: grad(lambda p: loss(p, a)["loss"].sum())({"w": w.detach()})["w"])(x)
    torch.testing.assert_close(mapped, (x * w * 2).cos() * 2 * x)


def test_subclasses_and_isinstance() -> None:
    fast = fusegrad.compile(Nested, pytree=True)
    assert issubclass(fast, Nested) and fast.__qualname__ == "Nested"

    class Doubled(fast):  # type: ignore[misc, valid-type]
        @staticmethod
        def forward(ctx, x, params, power):
            first, second = Nested.forward(ctx, x, params, power)
            return {"h": 2 * first["h"], "n": 3}, second

    x, params = made()
    assert torch.equal(Doubled.apply(x, params, 2)[0]["h"], 2 * fast.apply(x, params, 2)[0]["h"])


def test_in_place_and_once_differentiable() -> None:
    class Scaled(Function):
        @staticmethod
        def forward(ctx, state, x):
            state["count"].add_(1)
            ctx.mark_dirty(state["count"])
            ctx.mark_non_differentiable(state["count"])
            ctx.save_for_backward(x)
            return {"count": state["count"]}, x * x

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, state, g):
            (x,) = ctx.saved_tensors
            return None, 2 * x * g

    fast = fusegrad.compile(Scaled, pytree=True)
    count, x = torch.zeros(()), torch.ones(2, requires_grad=True)
    for expected_count in (1.0, 2.0):
        state, y = fast.apply({"count": count}, x)
        assert state["count"] is count and count.item() == expected_count
    (g,) = torch.autograd.grad(y, x, torch.ones(2, requires_grad=True), create_graph=True)
    assert g.tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


def test_explained_with_structures() -> None:
    fast = fusegrad.compile(Nested, pytree=True)
    found = fusegrad.explain(fast, "f32[64,32]", {"w": "f32[32]", "b": ["f32[32]"] * 2}, 2)
    assert "argument_1_ptr" in found.module and "params_ptr" not in found.module
    assert found.to_dict()["launches"]["forward"] == 1 and found.methods["backward"].status == "compiled"


def test_a_method_that_cannot_be_captured_runs_as_written() -> None:
    class Data(Nested):
        @staticmethod
        def forward(ctx, x, params, power):
            seen.append(len(seen))
            if len(seen) < 0:
                raise ValueError
            return Nested.forward(ctx, x, params, power)

    seen: list[int] = []
    x, params = tracked(made())
    fast = fusegrad.compile(Data, pytree=True)
    with pytest.warns(fusegrad.FallbackWarning, match=r"Data\.forward falls back to eager.*test_trees\.py"):
        second = fast.apply(x, params, 2)[1]
    second.sum().backward()
    torch.testing.assert_close(second, expected(x, params)[1])
    assert params["b"][1].grad is not None


def test_nested_io_functions_are_told_how_to_move() -> None:
    class Legacy(NestedIOFunction):
        pass

    for options in ({}, {"pytree": True}):
        with pytest.raises(CompileTargetError, match=r"pytree=True"):
            fusegrad.compile(Legacy, **options)


# ------------------------------------------------------------------ forms that came before
def test_forms_are_taken_apart_and_built_as_torch_does() -> None:
    import torch.utils._pytree as pytree

    from fusegrad.runtime.dispatch.pytree import Opening, Structure, flatten

    t = torch.ones(2)
    given: list[Any] = [
        (t, {"w": t, "b": [t, (t, 2.0)]}), (t, {"b": t, "w": t}), (t, {"w": t, "b": t}), (t, [t, t]), (t, (t, t)),
        (t, []), (t, {}), (), (t, {1: t}), ([t, None], "text"), (collections.OrderedDict(a=t), t), (t, {"w": [t]}),
    ]  # fmt: skip
    opening = Opening()
    for _ in range(3):
        for args in given:
            structure, *leaves = opening(args)
            expected, spec = flatten(args, True)
            assert structure is spec and len(leaves) == len(expected)
            assert all(a is b for a, b in zip(leaves, expected, strict=True))
            built = structure(range(len(leaves)))
            assert built == pytree.tree_unflatten(list(range(len(leaves))), structure.spec)
            assert isinstance(structure, Structure) and type(built) is tuple
    assert len(opening.openers) == Opening.KEPT


def test_a_container_in_the_place_of_a_leaf_is_another_form() -> None:
    from fusegrad.runtime.dispatch.pytree import Opening

    t, opening = torch.ones(2), Opening()
    first = opening((t, {"w": t}))
    for other in ((t, {"w": [t, t]}), (t, {"w": {"w": t}}), ([t], {"w": t}), (t, {"w": torch.Size((2,))})):
        assert opening(other)[0] is not first[0]
    assert opening((t, {"w": t}))[0] is first[0]


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_an_effect_happens_once_per_call():
    """It was not seen through the flat class, so that a capture had it, too."""
    seen = []

    @fusegrad.compile(pytree=True)
    class Counts(Function):
        @staticmethod
        def forward(ctx, d):
            seen.append(d["x"].sum().item())
            return {"y": d["x"] * 2}

        @staticmethod
        def backward(ctx, g):
            seen.append("backward")
            return {"x": g["y"] * 5}

    for _ in range(2):
        x = torch.ones(2, requires_grad=True)
        Counts.apply({"x": x})["y"].sum().backward()
    assert seen == [2.0, "backward"] * 2


@pytest.mark.parametrize("module", [torch.nn.Linear(2, 2), torch.nn.Linear])
def test_modules_are_refused_with_what_serves_there(module: Any) -> None:
    with pytest.raises(CompileTargetError, match=r"fusegrad\.swap\(model"):
        fusegrad.compile(module)
