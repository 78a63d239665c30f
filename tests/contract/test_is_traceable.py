"""`is_traceable` and `traceable`, line by line of the contract: how often each body runs, on what, and what comes out.

Bodies are counted from outside, through the profiler: a counter inside would be an effect that makes a method opaque.
"""

from __future__ import annotations

import inspect
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.func import grad, jacrev, jvp, vmap

import fusegrad

Tensor = torch.Tensor
SCALE = 2.0
METHODS = ("forward", "setup_context", "backward", "vjp", "jvp", "vmap")


# ------------------------------------------------------------------ watching bodies run
@dataclass
class Seen:
    """What was seen of the bodies of some classes: calls by name, calls on fakes, and torch's modes at each call."""

    calls: Counter[str] = field(default_factory=Counter)
    on_fakes: Counter[str] = field(default_factory=Counter)
    modes: list[tuple[str, bool, bool, bool]] = field(default_factory=list)


@contextmanager
def watching(*classes: type) -> Iterator[Seen]:
    seen = Seen()
    codes = {inspect.unwrap(getattr(c, n)).__code__: n for c in classes for n in METHODS if n in vars(c)}

    def look(frame: Any, event: str, _: Any) -> None:
        if event != "call" or frame.f_code not in codes:
            return
        name = codes[frame.f_code]
        seen.calls[name] += 1
        flat = torch.utils._pytree.tree_leaves(list(frame.f_locals.values()))
        seen.on_fakes[name] += any(isinstance(v, FakeTensor | torch.SymInt) for v in flat)
        autocast = torch.is_autocast_enabled("cpu")
        seen.modes.append((name, torch.is_grad_enabled(), autocast, torch.is_inference_mode_enabled()))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield seen
    finally:
        sys.setprofile(before)


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return made.requires_grad_()


def outcome(action: Callable[[Any], Any], cls: Any) -> Any:
    """What an action gives, flat and detached, or the error that it raises."""
    torch.manual_seed(0)
    random.seed(0)
    try:
        result = action(cls)
    except Exception as error:
        return type(error), str(error)
    flat = torch.utils._pytree.tree_leaves(result)
    return [v.detach().clone() if isinstance(v, Tensor) else v for v in flat]


def same(mine: Any, theirs: Any) -> None:
    if isinstance(theirs, tuple):
        assert mine == theirs
        return
    assert isinstance(mine, list), mine
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        if isinstance(b, Tensor):
            assert (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a, b)
        else:
            assert type(a) is type(b) and a == b


def record(fast: Any, method: str) -> Any:
    return fast._fusegrad.records[method]


def captures() -> int:
    return fusegrad.stats()["captures"]


def line_of(method: Any, text: str) -> str:
    lines, first = inspect.getsourcelines(inspect.unwrap(method))
    at = next(i for i, line in enumerate(lines) if text in line)
    return f"{inspect.getsourcefile(inspect.unwrap(method))}:{first + at}"


# ------------------------------------------------------------------ declaring
class Sine(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos()


def declared(cls: type, **options: Any) -> dict[str, bool | None]:
    made = fusegrad.compile(cls, **options)
    return {role: d.value for role, d in made._fusegrad.methods.declared.items()}


ALL = ("forward", "backward", "jvp")


@pytest.mark.parametrize(
    ("body", "option", "expected"),
    [
        ({}, None, (None, None, None)),
        ({"is_traceable": True}, None, (True, True, True)),
        ({"is_traceable": False}, None, (False, False, False)),
        ({"traceable": {"forward": False}}, None, (False, None, None)),
        ({"traceable": {"vjp": False, "jvp": True}}, None, (None, False, True)),
        ({"is_traceable": False, "traceable": {"backward": True}}, None, (False, True, False)),
        ({"is_traceable": False}, True, (True, True, True)),
        ({"traceable": {"forward": False, "backward": False}}, {"forward": True}, (True, False, None)),
        ({"is_traceable": True, "traceable": {"forward": False}}, {"jvp": False}, (False, True, False)),
        ({}, {}, (None, None, None)),
    ],
)
def test_option_then_dict_then_flag(body, option, expected) -> None:
    cls = type("Marked", (Sine,), body)
    assert declared(cls, traceable=option) == dict(zip(ALL, expected, strict=True))


def test_inheritance_takes_the_nearest_of_each_key() -> None:
    class A(Sine):
        is_traceable = True
        traceable = {"forward": False, "jvp": False}  # noqa: RUF012  as users write it

    class B(A):
        traceable = {"forward": True}  # noqa: RUF012  as users write it

    class C(Sine):
        traceable = {"backward": False, "forward": False}  # noqa: RUF012  as users write it

    class D(B, C):
        pass

    assert declared(B) == {"forward": True, "backward": True, "jvp": False}
    assert declared(D) == {"forward": True, "backward": False, "jvp": False}


@pytest.mark.parametrize("value", [1, 0, None, "no", np.bool_(False), torch.tensor(True)])
def test_what_is_exactly_no_bool_raises(value) -> None:
    for body in ({"is_traceable": value}, {"traceable": {"backward": value}}):
        with pytest.raises(TypeError, match=r"^Marked\..*must be exactly a bool") as found:
            fusegrad.compile(type("Marked", (Sine,), body))
        assert isinstance(found.value, fusegrad.FusegradError) and "fix:" in str(found.value)
    with pytest.raises(TypeError, match=r"compile\(traceable=...\)\['jvp'\] must be exactly a bool") as found:
        fusegrad.compile(Sine, traceable={"jvp": value})
    assert f"{__file__}:" in str(found.value)


@pytest.mark.parametrize("table", [{"forwards": True}, {1: True}, {("forward",): True}])
def test_an_unknown_key_is_named(table) -> None:
    (key,) = table
    with pytest.raises(TypeError, match="has the unknown key") as found:
        fusegrad.compile(type("Marked", (Sine,), {"traceable": table}))
    assert repr(key) in str(found.value) and "'forward', 'backward'" in str(found.value)


def test_a_dict_that_contradicts_itself_and_what_is_no_dict_raise() -> None:
    with pytest.raises(TypeError, match="says two things of 'backward'"):
        fusegrad.compile(Sine, traceable={"backward": True, "vjp": False})
    for thing in (3, [True], "forward"):
        with pytest.raises(TypeError, match="not a dict"):
            fusegrad.compile(Sine, traceable=thing)
    with pytest.raises(TypeError, match="is_traceable"):
        fusegrad.compile(type("Marked", (Sine,), {"traceable": True}))


def test_a_subclass_of_a_compiled_class_has_its_options() -> None:
    fast = fusegrad.compile(Sine, traceable={"forward": False})

    class Child(fast):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.from_numpy(np.sin(x.detach().numpy())) * 3

    with watching(Child) as seen, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            y = Child.apply(leaf(3))
        y.sum().backward()
        explicit = fusegrad.compile(Child, traceable={"forward": False})
        assert torch.equal(explicit.apply(leaf(3)), y)
    assert seen.calls["forward"] == 3 and seen.on_fakes["forward"] == 0


# ------------------------------------------------------------------ T1, T2
class Scaled(Function):
    """Everything that a key may hold: an argument, a closure or global, ctx attributes, a mask of gradients."""

    is_traceable = True

    @staticmethod
    def forward(ctx, x, k, p):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        ctx.k, ctx.shape, ctx.needed = k, x.shape, ctx.needs_input_grad
        return x.sin() * k * SCALE, x * p

    @staticmethod
    def backward(ctx, g, h):
        (x,) = ctx.saved_tensors
        total = torch.zeros_like(x)
        if g is not None:
            total = total + g * x.cos() * ctx.k * SCALE
        if h is not None:
            total = total - h * ctx.shape[0]  # wrong on purpose: it stays
        return total, None, None


def both_gradients(x: Tensor, k: Any, p: Any, mask: tuple[bool, bool] = (True, True)) -> Callable[[Any], Any]:
    def action(cls: Any) -> Any:
        fresh = x.detach().requires_grad_()
        outputs = cls.apply(fresh, k, p)
        used = [o for o, there in zip(outputs, mask, strict=True) if there]
        return outputs, torch.autograd.grad(used, fresh, [torch.ones_like(o) * 2 for o in used])

    return action


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_t1_after_warm_up_no_body_runs(backend) -> None:
    fast = fusegrad.compile(Scaled, backend=backend)
    for n in (3, 4):
        outcome(both_gradients(leaf(n), 2, 3), fast)
    before = captures()
    with watching(Scaled) as seen:
        for n in (3, 4, 5, 7):
            outcome(both_gradients(leaf(n, seed=n), 2, 3), fast)
    assert not seen.calls and captures() == before
    found = fusegrad.explain(fast, leaf(4), 2, 3).to_dict()
    assert {found["methods"][m]["status"] for m in ("forward", "backward")} == {"compiled"}


def test_t2_a_changed_key_is_never_stale_and_the_same_never_recompiles(monkeypatch) -> None:
    fast = fusegrad.compile(Scaled)
    calls = [
        *(both_gradients(leaf(4, seed=s), 2, 3) for s in (0, 1)),
        both_gradients(leaf(9), 2, 3),
        both_gradients(leaf(4), 2.0, 3),
        both_gradients(leaf(4), 5, 3),
        both_gradients(leaf(4), True, 3),
        both_gradients(leaf(4, dtype=torch.float64), 2, 3),
        both_gradients(leaf(4), 2, 3, (True, False)),
        both_gradients(leaf(4), 2, 3, (False, True)),
        both_gradients(leaf(2, 4), 2, 3),
    ]
    for scale in (2.0, 7.0, 2.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        for action in calls:
            same(outcome(action, fast), outcome(action, Scaled))
    before = captures()
    for action in calls:
        same(outcome(action, fast), outcome(action, Scaled))
    assert captures() == before


def test_t2_scalars_from_a_closure() -> None:
    def make() -> tuple[type, Callable[[float], None]]:
        k = 1.0

        def turn(value: float) -> None:
            nonlocal k
            k = value

        class Closed(Function):
            is_traceable = True

            @staticmethod
            def forward(ctx, x):
                return x * k

            @staticmethod
            def backward(ctx, g):
                return g * k

        return Closed, turn

    cls, turn = make()
    fast = fusegrad.compile(cls)
    for value in (1.0, 3.0, 1.0, 1):
        turn(value)
        x = leaf(3)
        y = fast.apply(x)
        (g,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(y, x * value) and torch.equal(g, torch.full((3,), float(value)))


# ------------------------------------------------------------------ T3
def through_numpy(t: Tensor) -> Tensor:
    return torch.from_numpy(np.cos(t.detach().numpy()))


def prints(t: Tensor) -> float:
    print("seen", float(t.sum()))
    return 2.0


TOUCHES: dict[str, Callable[[Tensor], Any]] = {
    "numpy": through_numpy,
    "item": lambda t: 1 + t.detach().sum().item(),
    "data_ptr": lambda t: 2.0 if t.data_ptr() else 3.0,
    "print": prints,
    "torch random": lambda t: torch.rand(t.shape),
    "python random": lambda t: random.random(),
}


def touching(touch: Callable[[Tensor], Any], roles: tuple[str, ...], **body: Any) -> type:
    """A Function that touches what no graph can hold in the methods of `roles`, and nowhere else."""
    inside = {role: touch if role in roles else (lambda t: 1.5) for role in ALL}
    in_forward, in_backward, in_jvp = (inside[role] for role in ALL)

    class Touching(Function):
        @staticmethod
        def forward(x, k):
            return x.sin() * in_forward(x) * k

        @staticmethod
        def setup_context(ctx, inputs, output):
            x, ctx.k = inputs
            ctx.save_for_backward(x)
            ctx.save_for_forward(x)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * x.cos() * in_backward(g) * ctx.k, None

        @staticmethod
        def jvp(ctx, t, _):
            (x,) = ctx.saved_tensors
            return t * x.cos() * in_jvp(t) * ctx.k

        @staticmethod
        def vmap(info, in_dims, x, k):
            return Touching.apply(x, k), in_dims[0]

    for name, value in body.items():
        setattr(Touching, name, value)
    return Touching


def first_order(cls: Any) -> Any:
    x = leaf(3)
    y = cls.apply(x, 2)
    return y, torch.autograd.grad(y.sum(), x)


def second_order(cls: Any) -> Any:
    x = leaf(3)
    (g,) = torch.autograd.grad(cls.apply(x, 2).sum(), x, create_graph=True)
    return g, torch.autograd.grad((g * g).sum(), x)


def twice_backward(cls: Any) -> Any:
    x = leaf(3)
    y = cls.apply(x, 2)
    return [torch.autograd.grad(y, x, torch.full_like(y, k), retain_graph=True) for k in (1.0, 2.0)]


def under_autocast(cls: Any) -> Any:
    x = leaf(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.autograd.grad(cls.apply(x, 2).sum(), x)


def duals(cls: Any) -> Any:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(cls.apply(forward_ad.make_dual(leaf(3), torch.ones(3)), 2)))


ACTIONS: dict[str, Callable[[Any], Any]] = {
    "no grad": lambda cls: cls.apply(leaf(3).detach(), 2),
    "first": first_order,
    "second": second_order,
    "twice": twice_backward,
    "autocast": under_autocast,
    "duals": duals,
    "grad": lambda cls: grad(lambda x: cls.apply(x, 2).sum())(leaf(3).detach()),
    "vmap": lambda cls: vmap(lambda x: cls.apply(x, 2))(leaf(2, 3).detach()),
    "jvp": lambda cls: jvp(lambda x: cls.apply(x, 2), (leaf(3).detach(),), (torch.ones(3),)),
    "jacrev": lambda cls: jacrev(lambda x: cls.apply(x, 2))(leaf(3).detach()),
    "vmap grad": lambda cls: vmap(grad(lambda x: cls.apply(x, 2).sum()))(leaf(2, 3).detach()),
}
DECLARATIONS = {
    "flag": ({"is_traceable": False}, ALL),
    "forward": ({"traceable": {"forward": False}}, ("forward",)),
    "backward": ({"traceable": {"backward": False}}, ("backward",)),
    "jvp": ({"traceable": {"jvp": False}}, ("jvp",)),
}


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
