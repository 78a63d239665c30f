"""Lines 1 to 7 of docs/contract.md: the class, its methods and flags, and what may be an argument."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from side_by_side import TAKES_KEYWORDS, accumulated, both, gradients, leaf, name_of, outcome, plain, same
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import grad, jvp, vmap

import fusegrad
from fusegrad.ir.errors import KeywordOnlyError

Tensor = torch.Tensor


class Scale(Function):
    """Scales by k; its gradient is on purpose not the derivative."""

    @staticmethod
    def forward(ctx, x, k):
        ctx.k = k
        return x * k

    @staticmethod
    def backward(ctx, g):
        return g * ctx.k * 10, None


class Setup(Function):
    @staticmethod
    def forward(x, w, eps=0.5, flag=True):
        return x * w + eps if flag else x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.inputs = len(inputs)
        ctx.eps, ctx.flag = inputs[2:]
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w * ctx.inputs, g * x * ctx.eps, None, None


Fast = fusegrad.compile(Setup)


@fusegrad.compile
class Decorated(Function):
    """Doubles."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 20


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.function = torch.nn.Parameter(torch.ones(3)), Decorated

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x * self.w)


# ------------------------------------------------------------------ 1
@both
def test_1_both_styles(backend) -> None:
    def story(c: Any) -> Any:
        x, w = leaf(3), leaf(3, seed=1)
        y = c.apply(x, w) if c.setup_context is not Function.setup_context else c.apply(x, 2.0)
        return y, gradients(x, w, of=y) if c.setup_context is not Function.setup_context else gradients(x, of=y)

    same(Setup, story, backend)
    same(Scale, story, backend)


def test_1_a_compiled_class_is_a_subclass_with_the_name_of_the_class() -> None:
    assert issubclass(Fast, Setup) and issubclass(Fast, Function)
    for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
        assert getattr(Fast, attribute) == getattr(Setup, attribute)
    for method in ("forward", "setup_context", "backward"):
        assert getattr(Fast, method) is getattr(Setup, method)


def test_1_grad_fn_is_the_classes_own() -> None:
    def story(c: Any) -> Any:
        x, w = leaf(3) * 1, leaf(3)
        y = c.apply(x, w)  # without which there is no node, in torch 2.11
        node = y.grad_fn
        edges = [(name_of(n), i) for n, i in node.next_functions]
        node.metadata["mine"] = 5
        return node.name(), type(node).__name__, edges, dict(node.metadata), node.needs_input_grad

    same(Setup, story)


def test_1_grad_fn_shows_what_is_saved() -> None:
    def story(c: Any) -> Any:
        x, w = leaf(3), leaf(3)
        y = c.apply(x, w)
        node = y.grad_fn
        return [t is own for t, own in zip(node.saved_tensors, (x, w), strict=True)], node.saved_tensors

    same(Setup, story)


def test_1_grad_fn_shows_the_attributes_that_the_user_put_on_ctx() -> None:
    def story(c: Any) -> Any:
        y = c.apply(leaf(3), leaf(3))
        return y.grad_fn.eps, y.grad_fn.flag, y.grad_fn.inputs

    same(Setup, story)


def test_1_a_decorated_class_pickles_by_name_and_so_does_a_module_that_holds_it() -> None:
    assert pickle.loads(pickle.dumps(Decorated)) is Decorated and copy.deepcopy(Decorated) is Decorated
    for made in (pickle.loads(pickle.dumps(Layer())), copy.deepcopy(Layer())):
        x = leaf(3)
        made(x).sum().backward()
        assert made.function is Decorated and x.grad.tolist() == made.w.grad.div(x.detach()).tolist() == [20.0] * 3


class Base(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x


class Derived(Base):
    """Inherits forward, calls its parent's backward."""

    @staticmethod
    def backward(ctx, g):
        return Base.backward(ctx, g) * 3


class Super(Base):
    """Calls its parent with `super()`; neither method is a staticmethod of the parent's name."""

    @classmethod
    def forward(cls, ctx, x):
        return super().forward(ctx, x) * 2

    @classmethod
    def backward(cls, ctx, g):
        return super().backward(ctx, g) * 5


class OfItsClass(Function):
    """Methods that go on in the base class, which reads what the class that was called has."""

    @classmethod
    def forward(cls, ctx: Any, x: Tensor) -> Tensor:
        return cls.doubled(x) * cls.number

    @classmethod
    def backward(cls, ctx: Any, g: Tensor) -> Any:
        return (2 * cls.number * g, *(None,) * cls.more)


class Given(OfItsClass):
    number, more = 3.0, 0

    @classmethod
    def doubled(cls, x: Tensor) -> Tensor:
        return x * 2

    @classmethod
    def forward(cls, ctx: Any, x: Tensor) -> Tensor:
        return super().forward(ctx, x)


def test_1_attributes_of_the_class_that_a_base_class_reads() -> None:
    def story(c: Any) -> Any:
        seen = []
        for _ in range(4):  # the third call alike is written out
            x = leaf(2, 3)
            seen.append(gradients(x, of=c.apply(x)))
        return seen

    same(Given, story)


@pytest.mark.parametrize("cls", [Base, Derived, Super])
def test_1_inherited_methods_super_and_classmethods(cls) -> None:
    def story(c: Any) -> Any:
        x = leaf(4)
        y = c.apply(x)
        return y, gradients(x, of=y)

    same(cls, story)


def test_1_a_subclass_of_a_compiled_class_is_compiled_with_its_own_methods() -> None:
    class Tripled(Decorated):
        @staticmethod
        def backward(ctx, g):
            return g * 3

    class Sextupled(Tripled):
        @staticmethod
        def backward(ctx, g):
            return super(Sextupled, Sextupled).backward(ctx, g) * 2

    for cls, factor in ((Decorated, 20.0), (Tripled, 3.0), (Sextupled, 6.0), (Decorated, 20.0)):
        x = leaf(3)
        y = cls.apply(x)
        y.sum().backward()
        assert x.grad.tolist() == [factor] * 3 and y.grad_fn.name() == f"{cls.__name__}Backward"


def test_1_classes_made_in_a_loop_differ_in_their_closures() -> None:
    def make(k: float) -> Any:
        class Made(Function):
            @staticmethod
            def forward(ctx, x):
                return x * k

            @staticmethod
            def backward(ctx, g):
                return g * k * 10

        return Made

    eager = [make(k) for k in (2.0, 3.0, 4.0)]
    fast = [fusegrad.compile(c) for c in eager]
    for _ in range(2):
        for mine, theirs in zip(fast, eager, strict=True):
            x = leaf(3)
            assert torch.equal(mine.apply(x), theirs.apply(x))
            assert torch.equal(*gradients(x, of=mine.apply(x)), *gradients(x, of=theirs.apply(x)))


# ------------------------------------------------------------------ 2
class Vjp(Function):
    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def vjp(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x * 100


@both
def test_2_vjp_is_another_name_of_backward(backend) -> None:
    def story(c: Any) -> Any:
        x = leaf(4)
        y = c.apply(x)
        return y, gradients(x, of=y)

    same(Vjp, story, backend)


@both
def test_2_vjp_is_a_backward_under_torch_func_too_where_eager_ignores_it(backend) -> None:
    x, f = plain(4), fusegrad.compile(Vjp, backend=backend).apply
    with pytest.raises(RuntimeError):
        grad(lambda x: Vjp.apply(x).sum())(x)
    torch.testing.assert_close(grad(lambda x: f(x).sum())(x), 100 * x)
    torch.testing.assert_close(vmap(grad(f))(x), 100 * x)
    torch.testing.assert_close(jvp(f, (x,), (torch.ones(4),))[1], 100 * x)


def test_2_vjp_and_backward_together_raise_at_backward_time() -> None:
    class Two(Vjp):
        @staticmethod
        def backward(ctx, g):
            return g

    def story(c: Any) -> Any:
        y = c.apply(leaf(3))
        return outcome(lambda y: y.sum().backward(), y)

    def backward(c: Any) -> Any:
        c.apply(leaf(3)).sum().backward()

    same(Two, lambda c: c.apply(leaf(3)))
    same(Two, backward)


# ------------------------------------------------------------------ 3
def rules(**flags: Any) -> Any:
    class Rules(Function):
        @staticmethod
        def forward(x):
            return x.sin()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * x * 100

    for name, value in flags.items():
        setattr(Rules, name, value)
    return Rules


def own_vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
    return x.movedim(in_dims[0], 0) + 1000, 0


def test_3_a_vmap_rule_beside_generate_vmap_rule_raises_under_vmap_and_nowhere_else() -> None:
    cls = rules(generate_vmap_rule=True, vmap=staticmethod(own_vmap))
    x = plain(4)
    same(cls, lambda c: vmap(c.apply)(x))
    same(cls, lambda c: grad(lambda x: c.apply(x).sum())(x))
    same(cls, lambda c: grad(lambda x: vmap(c.apply)(x).sum())(x))
    same(cls, lambda c: c.apply(x))


@both
def test_3_without_either_eager_refuses_and_ours_derives_the_rule(backend) -> None:
    cls, x = rules(), plain(4)
    f = fusegrad.compile(cls, backend=backend).apply
    with pytest.raises(RuntimeError, match="does not have vmap support"):
        vmap(cls.apply)(x)
    torch.testing.assert_close(vmap(f)(x), x.sin())
    torch.testing.assert_close(vmap(grad(f))(x), 100 * x)


@both
def test_3_either_rule_alone_is_what_runs(backend) -> None:
    x = plain(4)
    same(rules(generate_vmap_rule=True), lambda c: (vmap(c.apply)(x), vmap(grad(c.apply))(x)), backend)
    same(rules(vmap=staticmethod(own_vmap)), lambda c: vmap(c.apply)(x), backend)


# ------------------------------------------------------------------ 4
class Clearing(Function):
    clear_saved_tensors_on_access = True

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x


def test_4_clear_saved_tensors_on_access_lets_go_of_them_in_backward() -> None:
    def story(c: Any) -> Any:
        x = leaf(4)
        y = c.apply(x)
        y.sum().backward(retain_graph=True)
        return accumulated(x), type(outcome(lambda y: y.sum().backward(), y)).__name__

    def second(c: Any) -> Any:
        y = c.apply(leaf(4))
        y.sum().backward(retain_graph=True)
        y.sum().backward(retain_graph=True)

    same(Clearing, story)
    same(Clearing, second)


class Boxed(Function):
    """With boxed_grads_call, backward gets its gradients in one list, which it may empty."""

    boxed_grads_call = True

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx, grads):
        g, h = grads
        grads.clear()
        x, y = ctx.saved_tensors
        return g * y + h * 7, g * x + h


@both
def test_4_boxed_grads_call_hands_backward_one_list(backend) -> None:
    def story(c: Any) -> Any:
        x, y = leaf(4), leaf(4, seed=1)
        outputs = c.apply(x, y)
        return outputs, gradients(x, y, of=outputs)

    same(Boxed, story, backend)


def test_4_compiled_autograd_key_is_the_users() -> None:
    class Keyed(Scale):
        @staticmethod
        def _compiled_autograd_key(ctx):
            return ("mine", ctx.k)

    def story(c: Any) -> Any:
        return c.apply(leaf(3), 2.0).grad_fn._compiled_autograd_key()[:2]

    same(Keyed, story)


@both
def test_4_once_differentiable(backend) -> None:
    class Once(Base):
        @staticmethod
        @once_differentiable
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * x * 2

    def first(c: Any) -> Any:
        x = leaf(4)
        return torch.autograd.grad(c.apply(x).pow(2).sum(), x, create_graph=True)[0], x

    def second(c: Any) -> Any:
        first(c)[0].sum().backward()

    same(Once, lambda c: first(c)[0].detach(), backend)
    same(Once, second, backend)


# ------------------------------------------------------------------ 5
CALLS = {
    "by position": lambda c, x, w: c.apply(x, w, 0.25, False),
    "defaults": lambda c, x, w: c.apply(x, w),
    "one default": lambda c, x, w: c.apply(x, w, 0.25),
    "keywords": lambda c, x, w: c.apply(x, w, flag=False, eps=0.25),
    "all keywords": lambda c, x, w: c.apply(w=w, x=x),
    "missing": lambda c, x, w: c.apply(x),
    "too many": lambda c, x, w: c.apply(x, w, 1.0, True, 5),
    "unknown": lambda c, x, w: c.apply(x, w, epsilon=1.0),
    "twice": lambda c, x, w: c.apply(x, w, x=x),
}


BY_POSITION = {"keywords": CALLS["by position"], "all keywords": CALLS["defaults"]}
"""The same calls, for a torch that takes no keywords."""


@pytest.mark.parametrize("call", CALLS)
def test_5_arguments_are_bound_and_defaults_filled_in(call) -> None:
    def story(c: Any) -> Any:
        x, w = leaf(3), leaf(3, seed=1)
        calls = CALLS if TAKES_KEYWORDS or c is not Setup else {**CALLS, **BY_POSITION}
        y = calls[call](c, x, w)
        return y, gradients(x, w, of=y)

    same(Setup, story)


class OldDefault(Function):
    @staticmethod
    def forward(ctx, x, k=3.0):
        ctx.k = k
        return x * k

    @staticmethod
    def backward(ctx, g):
        return g * ctx.k if len(ctx.needs_input_grad) == 1 else (g * ctx.k, None)


def test_5_old_style_defaults_are_no_arguments() -> None:
    def story(c: Any) -> Any:
        x = leaf(3)
        a, b = c.apply(x), c.apply(x, 2.0)
        return a, b, gradients(x, of=a), gradients(x, of=b), len(a.grad_fn.next_functions)

    same(OldDefault, story)


def test_5_old_style_takes_no_keywords() -> None:
    same(OldDefault, lambda c: c.apply(leaf(3), k=2.0))
    same(OldDefault, lambda c: c.apply(x=leaf(3)))


def test_5_keyword_only_arguments_raise() -> None:
    class KeywordOnly(Function):
        @staticmethod
        def forward(x, *, k):
            return x * k

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, g):
            return g

    for call in (lambda c: c.apply(leaf(2), k=3), lambda c: c.apply(leaf(2))):
        mine, theirs = outcome(call, fusegrad.compile(KeywordOnly)), outcome(call, KeywordOnly)
        assert isinstance(mine, TypeError) and type(theirs) is TypeError and "argument" in str(mine)


class KeywordOnlyDefault(Function):
    @staticmethod
    def forward(x, *, k=None):
        return x * 2 if k is None else x * k

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g

    @staticmethod
    def vmap(info, in_dims, x):
        return x * 2, in_dims[0]


def test_5_keyword_only_arguments_are_never_dropped() -> None:
    fast = fusegrad.compile(KeywordOnlyDefault)
    with pytest.raises(KeywordOnlyError, match="keyword-only arguments, and k are"):
        fast.apply(leaf(2), k=3.0)
    x = plain(2)
    assert torch.equal(fast.apply(x), x * 2)
    theirs, mine = (outcome(lambda c: vmap(lambda t, k: c.apply(t, k=k))(x, x), c) for c in (KeywordOnlyDefault, fast))
    assert type(mine) is type(theirs) is NotImplementedError and "kwarg-only Tensor args" in str(mine)


class Star(Function):
    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return sum(t * (i + 1) for i, t in enumerate(tensors))

    @staticmethod
    def backward(ctx, g):
        return tuple(g * t * (i + 1) for i, t in enumerate(ctx.saved_tensors))


class StarSetup(Function):
    @staticmethod
    def forward(k, *tensors):
        return k * sum(t * (i + 1) for i, t in enumerate(tensors))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.k = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx, g):
        return (None, *(g * t * ctx.k for t in ctx.saved_tensors))


@both
@pytest.mark.parametrize("count", [1, 2, 40])
def test_5_any_number_of_arguments(count, backend) -> None:
    if backend == "interpret" and count == 40:
        pytest.skip("one kernel of 40 pointers is the same kernel, slowly")

    def story(c: Any) -> Any:
        tensors = [leaf(3, seed=i) for i in range(count)]
        y = c.apply(*tensors) if issubclass(c, Star) else c.apply(2.0, *tensors)
        return y, gradients(*tensors, of=y)

    same(Star, story, backend)
    same(StarSetup, story, backend)


def test_5_no_tensor_among_the_arguments() -> None:
    class Made(Function):
        @staticmethod
        def forward(ctx, n, k):
            return torch.full((n,), k)

        @staticmethod
        def backward(ctx, g):
            return None, None

    same(Made, lambda c: (c.apply(3, 2.0), c.apply(4, 2.0), c.apply(3, 5.0)))


# ------------------------------------------------------------------ 6
class Colour(enum.Enum):
    RED = 2.0
    BLUE = 3.0


@dataclasses.dataclass
class Options:
    k: float
    parts: list[float]


@dataclasses.dataclass(frozen=True)
class Frozen:
    k: float


class Pair(NamedTuple):
    k: float
    w: Any


@dataclasses.dataclass
class Holder:
    w: Tensor


class Slotted:
    __slots__ = ("k",)

    def __init__(self, k: float) -> None:
        self.k = k


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, k: float) -> None:
        self.k = k

    def __eq__(self, other: object) -> bool:
        raise TypeError("not comparable")


def adding(t: Tensor, k: float) -> Tensor:
    return t + k


ARGUMENTS: dict[str, tuple[Any, Any]] = {
    "dtype": (lambda x, o: x.to(o), [torch.float64, torch.bfloat16]),
    "device": (lambda x, o: x + torch.ones(3, device=o), [torch.device("cpu")]),
    "size": (lambda x, o: x + torch.ones(o), [torch.Size([3]), torch.Size([2, 3])]),
    "slice": (lambda x, o: x[o], [slice(0, 2), slice(1, 3), slice(None)]),
    "ellipsis": (lambda x, o: x[o], [Ellipsis, slice(1, 2)]),
    "enum": (lambda x, o: x * o.value, [Colour.RED, Colour.BLUE]),
    "range": (lambda x, o: x * sum(o), [range(3), range(5)]),
    "set": (lambda x, o: x * len(o), [{1, 2}, {3}]),
    "frozenset": (lambda x, o: x * sum(o), [frozenset({1, 2}), frozenset({3})]),
    "bytes": (lambda x, o: x * len(o), [b"ab", b"abc"]),
    "complex": (lambda x, o: x * o.imag, [1 + 2j, 1 + 3j]),
    "type": (lambda x, o: x * o(2.7), [int, float]),
    "function": (lambda x, o: o(x), [torch.sin, torch.cos]),
    "lambda": (lambda x, o: o(x), [lambda t: t * 2, lambda t: t * 3]),
    "partial": (lambda x, o: o(x), [functools.partial(adding, k=1.0), functools.partial(adding, k=2.0)]),
    "dataclass": (lambda x, o: x * o.k + sum(o.parts), [Options(2.0, [1.0]), Options(3.0, [1.0, 2.0])]),
    "frozen dataclass": (lambda x, o: x * o.k, [Frozen(2.0), Frozen(3.0)]),
    "slots": (lambda x, o: x * o.k, [Slotted(2.0), Slotted(3.0)]),
    "unhashable": (lambda x, o: x * o.k, [Unhashable(2.0), Unhashable(3.0)]),
    "ordered dict": (lambda x, o: x * o["k"], [collections.OrderedDict(k=2.0), collections.OrderedDict(k=3.0)]),
    "default dict": (lambda x, o: x * o["k"], [collections.defaultdict(float, k=2.0)]),
    "deque": (lambda x, o: x * o[0], [collections.deque([2.0]), collections.deque([3.0])]),
    "nested": (lambda x, o: x * o["a"][0][1]["b"], [{"a": [(1, {"b": 2.0})]}, {"a": [(1, {"b": 3.0})]}]),
    "deep": (lambda x, o: x * o[0][0][0][0][0][0], [[[[[[[2.0]]]]]], [[[[[[3.0]]]]]]]),
    "generator": (lambda x, o: x * torch.rand(3, generator=o), [torch.Generator().manual_seed(3)]),
    "module": (lambda x, o: o(x), [torch.nn.Identity()]),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_6_any_python_object_is_an_argument(kind) -> None:
    body, values = ARGUMENTS[kind]

    class Takes(Function):
        @staticmethod
        def forward(ctx, x, option):
            return body(x, option)

        @staticmethod
        def backward(ctx, g):
            return (g.abs().sum() * 3).expand(3), None

    def story(c: Any) -> Any:
        seen = []
        for value in (*values, *values):
            x = leaf(3)
            y = c.apply(x, value)
            seen.append((y, gradients(x, of=y) if y.requires_grad else None))
            if isinstance(value, torch.Generator):
                value.manual_seed(3)
        return seen

    same(Takes, story)


CONTAINERS: dict[str, tuple[Any, Any]] = {
    "list": (lambda o: o[0], lambda t: [t, 1]),
    "tuple": (lambda o: o[1], lambda t: (1, t)),
    "dict": (lambda o: o["w"], lambda t: {"w": t}),
    "nested": (lambda o: o[0]["w"][0], lambda t: [{"w": (t,)}]),
    "named tuple": (lambda o: o.w * o.k, lambda t: Pair(2.0, t)),
    "dataclass": (lambda o: o.w, lambda t: Holder(t)),
    "partial": (lambda o: o(k=1.0), lambda t: functools.partial(adding, t)),
    "deque": (lambda o: o[0], lambda t: collections.deque([t])),
    "closure": (lambda o: o(), lambda t: lambda: t * 2),
}


@both
@pytest.mark.parametrize("kind", CONTAINERS)
def test_6_tensors_inside_containers_are_read_and_not_tracked(kind, backend) -> None:
    pick, wrap = CONTAINERS[kind]

    class Takes(Function):
        @staticmethod
        def forward(ctx, x, option):
            ctx.save_for_backward(x)
            return x * pick(option)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * x * 10, None

    def story(c: Any) -> Any:
        seen = []
        for i in range(4):
            x, w = leaf(3), leaf(3, seed=i) * 1
            y = c.apply(x, wrap(w))
            y.sum().backward()
            seen.append((y, accumulated(x), len(y.grad_fn.next_functions)))
        return seen

    same(Takes, story, backend, opaque=["forward"] if kind == "closure" else ())


@both
def test_6_a_container_of_tensors_may_be_kept_on_ctx(backend) -> None:
    class Keeps(Function):
        @staticmethod
        def forward(ctx, x, weights):
            ctx.items = [x * 2, {"w": weights[0], "n": x.shape[0]}]
            ctx.weights = weights
            return x * weights[0]

        @staticmethod
        def backward(ctx, g):
            twice, rest = ctx.items
            return g * twice * rest["w"] * rest["n"] + ctx.weights[0], None

    def story(c: Any) -> Any:
        seen = []
        for n in (3, 3, 5):
            x = leaf(n)
            y = c.apply(x, [torch.full((n,), 2.0)])
            seen.append((y, gradients(x, of=y)))
        return seen

    same(Keeps, story, backend)


def count_up(option: Any) -> None:
    option.k = option.k + 1


@both
def test_6_a_plain_function_that_is_a_partial_over_tensors(backend) -> None:
    w = torch.full((3,), 2.0)
    fast = fusegrad.compile(functools.partial(torch.lerp, w, weight=0.25), backend=backend)
    for _ in range(3):
        x = leaf(3)
        y = fast(x)
        y.sum().backward()
        torch.testing.assert_close(y.detach(), w + 0.25 * (x.detach() - w))
        assert x.grad.tolist() == [0.25] * 3
        w.mul_(2)
    assert all(r.status == "compiled" for r in fast._fusegrad.ledger.records.values())


CHANGES: dict[str, tuple[Any, Any]] = {
    "append": (lambda o: o.append(1), list),
    "assign": (lambda o: o.__setitem__("n", o.get("n", 0) + 1), dict),
    "attribute": (count_up, lambda: Options(2.0, [])),
    "slot": (count_up, lambda: Slotted(2.0)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_6_an_argument_that_forward_changes_is_changed_once_a_call(kind) -> None:
    change, make = CHANGES[kind]

    class Changes(Function):
        @staticmethod
        def forward(ctx, x, option):
            change(option)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g, None

    def story(c: Any) -> Any:
        option = make()
        for _ in range(3):
            c.apply(leaf(3), option)
        return option.k if hasattr(option, "k") else option

    same(Changes, story, opaque=["forward"])


def test_6_an_argument_that_is_changed_between_calls_is_read_again() -> None:
    class Takes(Function):
        @staticmethod
        def forward(ctx, x, option, rule):
            ctx.option = option
            return rule(x * option.k)

        @staticmethod
        def backward(ctx, g):
            return g * ctx.option.k, None, None

    def story(c: Any) -> Any:
        seen = []
        for option in (Options(1.0, []), Slotted(1.0)):
            factor = 1.0

            def rule(t: Tensor) -> Tensor:
                return t * factor  # noqa: B023

            for k in (1.0, 2.0, 3.0):
                option.k, x = k, leaf(3)
                y = c.apply(x, option, rule)
                seen.append((y, gradients(x, of=y)))
                factor += 1
        return seen

    same(Takes, story)


# ------------------------------------------------------------------ 7
class Product(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g * b, 3 * g * a


TWICE = {
    "the same": lambda c, a: c.apply(a, a),
    "a view": lambda c, a: c.apply(a, a.view(-1).view(2, 3)),
    "both views": lambda c, a: c.apply(a[0], a[1]),
    "overlapping": lambda c, a: c.apply(a.view(-1)[:4], a.view(-1)[2:]),
    "transposed": lambda c, a: c.apply(a[:, :2], a[:, 1:].t()),
}


@both
@pytest.mark.parametrize("how", TWICE)
def test_7_gradients_of_a_tensor_given_twice_add_up(how, backend) -> None:
    def story(c: Any) -> Any:
        a = leaf(2, 3)
        y = TWICE[how](c, a)
        y.sum().backward()
        return y, accumulated(a)

    same(Product, story, backend)


def test_01_grad_fn_is_an_instance_of_the_users_backward_class() -> None:
    """What code that looks for a node in the autograd graph goes by."""
    fast = fusegrad.compile(Scale)
    assert fast._backward_cls is Scale._backward_cls
    out = fast.apply(torch.ones(3, requires_grad=True), 2.0)
    assert isinstance(out.grad_fn, Scale._backward_cls) and type(out.grad_fn).__name__ == "ScaleBackward"


class Gate(Function):
    """Has an `apply` of its own, which may not call torch's."""

    @classmethod
    def apply(cls, x, factor=2.0):
        return super().apply(x, factor) if torch.is_grad_enabled() and x.requires_grad else x

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor * 5, None


class Doubled(Gate):
    @classmethod
    def apply(cls, x):
        return super().apply(x, 4.0)


@both
@pytest.mark.parametrize("cls", [Gate, Doubled])
def test_1_an_apply_of_the_users_own_decides_what_is_called(cls, backend):
    def story(cls: Any) -> Any:
        x, without = leaf(3), plain(3)
        assert cls.apply(without) is without
        y = cls.apply(x)
        tangents = jvp(cls.apply, (without,), (without,))
        return y, y.grad_fn.name(), torch.autograd.grad(y.sum(), x), tangents, vmap(cls.apply)(without)

    fast = same(cls, story, backend)
    assert fast._fusegrad.ledger.records["forward"].status == "compiled"


def test_1_a_subclass_of_a_compiled_class_may_have_an_apply_of_its_own():
    class More(fusegrad.compile(Gate, backend="reference")):
        @classmethod
        def apply(cls, x):
            return super().apply(x, 3.0)

    x = leaf(3)
    y = More.apply(x)
    assert torch.equal(y, x * 3) and torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full((3,), 15.0))


def test_1_torch_compile_breaks_the_graph_around_an_apply_of_the_users_own():
    fast = fusegrad.compile(Gate, backend="reference")
    x = leaf(3)
    y = torch.compile(lambda x: fast.apply(x) * 2, backend="eager")(x)
    assert torch.equal(y, x * 4) and torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full((3,), 20.0))


class WithClassMethods(Function):
    """What its methods read, they read by way of class methods."""

    k = 3.0

    @staticmethod
    def forward(ctx, x):
        return WithClassMethods.scaled(x)

    @staticmethod
    def backward(ctx, g):
        return WithClassMethods.scaled(g)

    @classmethod
    def scaled(cls, x):
        return x * cls.table()["k"] * OUTSIDE

    @classmethod
    def table(cls):
        return {"k": cls.k}


OUTSIDE = 1.0


@both
def test_1_what_class_methods_of_the_class_read_is_read_at_every_call(backend, monkeypatch) -> None:
    def story(c: Any) -> Any:
        seen = []
        for k, outside in [(3.0, 1.0)] * 4 + [(10.0, 1.0), (10.0, 2.0), (3.0, 1.0)]:
            monkeypatch.setattr(WithClassMethods, "k", k)
            monkeypatch.setitem(globals(), "OUTSIDE", outside)
            x = leaf(3)
            y = c.apply(x)
            seen += [y, gradients(x, of=y)]
        return seen

    same(WithClassMethods, story, backend)
