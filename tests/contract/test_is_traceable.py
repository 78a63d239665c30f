"""`is_traceable` and `traceable`: how they are declared, and lines T1, T2, T5, T6, T8, T9 and T10 of the contract."""

from __future__ import annotations

import inspect
import sys
import textwrap
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import Function
from torch.func import hessian, jacfwd, jvp, vmap
from watching import (
    ACTIONS,
    ALL,
    Opaque,
    Sine,
    captures,
    first_of,
    first_order,
    leaf,
    line_of,
    outcome,
    record,
    same,
    second_order,
    through_numpy,
    touching,
    twice_backward,
    under_autocast,
    watching,
)

import fusegrad

Tensor = torch.Tensor
SCALE = 2.0


# ------------------------------------------------------------------ declaring
def declared(cls: type, **options: Any) -> dict[str, bool | None]:
    made = fusegrad.compile(cls, **options)
    return {role: d.value for role, d in made._fusegrad.user.methods.declared.items()}


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


# ------------------------------------------------------------------ T5
def lies(where: str) -> type:
    """A class that promises to be traceable, with an operation in `where` that is not."""

    class Lying(Function):
        is_traceable = True

        @staticmethod
        def forward(ctx, x, flag):
            ctx.save_for_backward(x)
            ctx.flag = flag
            return x * x.sum().item() if where == "forward" and flag else x * 2

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * x.sum().item() if where == "backward" and ctx.flag else g * 2, None

    return Lying


@pytest.mark.parametrize("option", [None, True, {"forward": True, "backward": True}])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_t5_a_lie_raises_at_the_call_each_time_and_names_operation_and_line(where, option) -> None:
    cls = lies(where)
    fast = fusegrad.compile(cls, traceable=option)
    for flag in (True, False, True):
        if not flag:
            same(outcome(lambda c: first_of(c, False), fast), outcome(lambda c: first_of(c, False), cls))
            continue
        with watching(cls) as seen, pytest.raises(fusegrad.NotTraceableError) as found:
            fast.apply(leaf(3), flag)
        text = str(found.value)
        assert text.startswith(f"Lying.{where} cannot be traced: it reads the data of a tensor")
        assert line_of(getattr(cls, where), ".item()") in text and "is_traceable = False" in text
        assert seen.calls[where] == seen.on_fakes[where]


def test_t5_a_lying_backward_behind_an_opaque_forward_raises_when_it_is_called() -> None:
    class Lying(Opaque):
        traceable = {"forward": False, "backward": True}  # noqa: RUF012  as users write it

        @staticmethod
        def backward(ctx, g):
            return g * (2 if g.sum() > 0 else 3)

    fast = fusegrad.compile(Lying)
    for _ in range(2):
        y = fast.apply(leaf(3))
        with pytest.raises(fusegrad.NotTraceableError, match=r"Lying\.backward cannot be traced: its control flow"):
            y.sum().backward()
    assert y.requires_grad and torch.equal(y, leaf(3).sin())


def test_t5_a_promise_with_an_effect_raises_before_the_body_runs() -> None:
    seen: list[int] = []

    class Loud(Sine):
        traceable = {"backward": True}  # noqa: RUF012  as users write it

        @staticmethod
        def backward(ctx, g):
            seen.append(1)
            return g

    fast = fusegrad.compile(Loud)
    for _ in range(2):
        with pytest.raises(fusegrad.NotTraceableError, match=r"Loud\.backward .* it calls `append`"):
            fast.apply(leaf(3))
    assert not seen


def test_false_for_one_method_is_no_fault_under_fullgraph() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = fusegrad.compile(Opaque, fullgraph=True, traceable={"forward": False})
        same(outcome(first_of, fast), outcome(first_of, Opaque))
    assert record(fast, "backward").status == "compiled"
    with pytest.raises(fusegrad.NotTraceableError, match=r"Opaque\.forward"):
        fusegrad.compile(Opaque, fullgraph=True).apply(leaf(3))


# ------------------------------------------------------------------ T6
@pytest.mark.parametrize("roles", [("forward",), ("backward",), ("forward", "backward")], ids=str)
def test_t6_what_is_found_untraceable_runs_as_in_eager_between_compiled_segments(roles) -> None:
    cls = touching(through_numpy, roles)
    fast = fusegrad.compile(cls)
    with pytest.warns(fusegrad.FallbackWarning) as caught:
        for _ in range(2):  # the first call of a forward with segments is the class itself, backward as well
            same(outcome(first_order, fast), outcome(first_order, cls))
    texts = sorted(str(w.message) for w in caught if issubclass(w.category, fusegrad.FallbackWarning))
    assert [t.split(" ")[0] for t in texts] == sorted(f"Touching.{role}" for role in roles)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusegrad.FallbackWarning)
        for action in (first_order, twice_backward, under_autocast, second_order):
            outcome(action, fast)  # what is compiled warms up
            found = []
            for version in (cls, fast):
                with watching(through_numpy) as seen:
                    result = outcome(action, version)
                found.append((result, seen.calls))
                assert not seen.on_fakes["through_numpy"]
            same(found[1][0], found[0][0])
            assert found[1][1] == found[0][1]
    told = fusegrad.explain(fast, leaf(3), 2).to_dict()
    assert all(told["methods"][role]["status"] == "compiled" for role in ("forward", "backward"))
    assert {o["method"] for o in told["opaque"]} == set(roles)
    source = inspect.getsourcefile(cls.forward)
    assert all("numpy" in o["reason"] and source in o["where"] for o in told["opaque"])


def without_source(method: Any) -> Any:
    """A method of which no statements can be taken out."""
    code = method.__code__.replace(co_filename="<gone>")
    return staticmethod(types.FunctionType(code, method.__globals__, method.__name__, None, method.__closure__))


def test_t6_a_number_that_changes_does_not_mean_another_trial_each_time() -> None:
    cls = touching(lambda t: 1 + float(t.detach().numpy().sum()), ("forward", "backward"))
    cls.forward, cls.backward = without_source(cls.forward), without_source(cls.backward)
    fast = fusegrad.compile(cls)

    def action(k: float) -> Callable[[Any], Any]:
        def run(c: Any) -> Any:
            x = leaf(3)
            y = c.apply(x, k)
            return y, torch.autograd.grad(y.sum(), x)

        return run

    with warnings.catch_warnings(), watching(cls) as seen:
        warnings.simplefilter("ignore", fusegrad.FallbackWarning)
        for i in range(20):
            mine = outcome(action(i / 3), fast)
            before = seen.on_fakes.copy()
            same(mine, outcome(action(i / 3), cls))
    assert before["forward"] == before["backward"] == 8


def test_a_counter_in_backward_leaves_forward_compiled() -> None:
    seen: list[int] = []

    class Counting(Sine):
        @staticmethod
        def backward(ctx, g):
            seen.append(len(seen))
            return Sine.backward(ctx, g)

    fast = fusegrad.compile(Counting)
    with pytest.warns(fusegrad.FallbackWarning, match=r"Counting\.backward is split: it calls `append`"):
        same(outcome(first_of, fast), outcome(first_of, Sine))
    before = captures()
    for _ in range(3):
        same(outcome(first_of, fast), outcome(first_of, Sine))
    assert captures() == before and len(seen) == 4
    assert record(fast, "forward").status == "compiled"


# ------------------------------------------------------------------ T8, T9, T10
class Marks(Function):
    @staticmethod
    def forward(ctx, x, y):
        x.mul_(2)
        signs = y.sign()
        ctx.mark_dirty(x)
        ctx.mark_non_differentiable(signs)
        ctx.save_for_backward(y)
        return x, y * 3, signs

    @staticmethod
    def backward(ctx, g, h, _):
        (y,) = ctx.saved_tensors
        return g * 2 * y, h * 3


def marked(cls: Any) -> Any:
    x, y = leaf(3), leaf(3, seed=1)
    given = x.clone()
    out, tripled, signs = cls.apply(given, y)
    facts = (out is given, out._version, tripled.requires_grad, signs.requires_grad)
    return facts, out.detach(), signs, torch.autograd.grad(out.sum() + tripled.sum(), [x, y])


@pytest.mark.parametrize("option", [True, False, {"forward": False}, {"backward": False}, None], ids=str)
def test_t8_marks_are_legal_with_either_value(option) -> None:
    fast = fusegrad.compile(Marks, traceable=option)
    for _ in range(2):
        same(outcome(marked, fast), outcome(marked, Marks))


def test_t9_a_class_redefined_under_its_name_is_another_class() -> None:
    def cell(k: float, opaque: bool) -> Any:
        source = f"""
        @fusegrad.compile
        class Cell(Function):
            is_traceable = {not opaque}
            @staticmethod
            def forward(ctx, x):
                return x * {k}
            @staticmethod
            def backward(ctx, g):
                return g * {k} * 10
        """
        env = {"fusegrad": fusegrad, "Function": Function, "__name__": "notebook"}
        exec(textwrap.dedent(source), env)
        return env["Cell"]

    versions = [(cell(k, opaque), k) for k, opaque in ((2.0, False), (3.0, False), (3.0, True), (2.0, True))]
    for _ in range(2):
        for cls, k in versions:
            x = torch.ones(3, requires_grad=True)
            y = cls.apply(x)
            (g,) = torch.autograd.grad(y.sum(), x)
            assert y.tolist() == [k] * 3 and g.tolist() == [k * 10] * 3


def test_t10_what_is_not_captured_is_refused_by_name() -> None:
    found = fusegrad.explain(fusegrad.compile(Opaque, traceable={"forward": False}), leaf(3))
    for ask in (lambda: found.program, lambda: found.graph("forward")):
        with pytest.raises(fusegrad.FusegradError, match=r"Opaque\.forward .*traceable=\{'forward': False\}") as error:
            ask()
        assert f"{inspect.getsourcefile(Opaque)}:" in str(error.value)
    assert found.kernels == [] and "opaque" in str(found)


# ------------------------------------------------------------------ plain functions
def test_plain_functions_take_one_bool() -> None:
    def f(x, k=2, *, flag=False):
        return x.sin() * k if flag else x.cos() * k

    as_it_is = fusegrad.compile(f, traceable=False)
    must = fusegrad.compile(lambda x: x * x.sum().item(), traceable=True)
    before = captures()
    x = leaf(3)
    assert torch.equal(as_it_is(x, 3, flag=True), f(x, 3, flag=True)) and captures() == before
    assert torch.equal(jacfwd(as_it_is)(x.detach()), jacfwd(f)(x.detach()))
    assert fusegrad.explain(as_it_is, x).to_dict()["methods"]["forward"]["status"] == "opaque"
    for _ in range(2):
        with pytest.raises(fusegrad.NotTraceableError, match="reads the data of a tensor"):
            must(x)
    for thing in ({"forward": False}, 1, "no"):
        with pytest.raises(TypeError, match="plain function must be exactly a bool"):
            fusegrad.compile(f, traceable=thing)


def test_a_plain_function_that_cannot_be_captured_runs_as_often_as_in_eager() -> None:
    def f(x):
        return x * x.sum().item()

    fast, times = fusegrad.compile(f), 0

    def look(frame: Any, event: str, _: Any) -> None:
        nonlocal times
        times += event == "call" and frame.f_code is f.__code__

    with pytest.warns(fusegrad.FallbackWarning, match=r"f\.forward"):
        fast(leaf(3))
    x = leaf(3)
    sys.setprofile(look)
    try:
        (g,) = torch.autograd.grad(fast(x).sum(), x)
    finally:
        sys.setprofile(None)
    assert times == 1 and torch.equal(g, torch.autograd.grad(f(x).sum(), x)[0])


# ------------------------------------------------------------------ jvp
class Promised(Function):
    """A jvp that is deliberately not the derivative: it has to be seen, compiled or not."""

    is_traceable = True

    @staticmethod
    def forward(x, k):
        return x.sin() * k

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.k = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos() * ctx.k, None

    @staticmethod
    def jvp(ctx, t, _):
        (x,) = ctx.saved_tensors
        return t * x.cos() * ctx.k * x.shape[0] * SCALE


class PromisedVmap(Promised):
    generate_vmap_rule = True


FORWARD_MODE: dict[str, Callable[[Any], Any]] = {
    "jvp": lambda cls: jvp(lambda x: cls.apply(x, 3), (leaf(4).detach(),), (torch.ones(4),)),
    "duals": lambda cls: ACTIONS["duals"](cls),
    "jacfwd": lambda cls: jacfwd(lambda x: cls.apply(x, 3))(leaf(3).detach()),
    "hessian": lambda cls: hessian(lambda x: cls.apply(x, 3).sum())(leaf(3).detach()),
    "vmap jvp": lambda cls: vmap(lambda x: jvp(lambda y: cls.apply(y, 3), (x,), (torch.ones(4),)))(leaf(2, 4).detach()),
}


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("name", FORWARD_MODE)
def test_t1_a_promised_jvp_is_compiled_and_stays_what_it_says(name, backend) -> None:
    fast, action = fusegrad.compile(PromisedVmap, backend=backend), FORWARD_MODE[name]
    for _ in range(2):
        mine, theirs = outcome(action, fast), outcome(action, PromisedVmap)
        assert not isinstance(theirs, tuple)
        torch.testing.assert_close(mine, theirs)
    before = captures()
    with watching(Promised) as seen:
        outcome(action, fast)
    assert not seen.calls and captures() == before
    assert record(fast, "jvp").status == "compiled"
    assert fusegrad.explain(fast, leaf(3), 3).to_dict()["methods"]["jvp"]["status"] == "compiled"


def test_a_promised_jvp_has_a_second_order_where_eager_gives_zeros() -> None:
    """A defect of torch 2.13: forward mode over a custom jvp, twice, loses what it saved and says 0."""
    fast, x = fusegrad.compile(PromisedVmap), leaf(4).detach()

    def twice(cls: Any) -> Tensor:
        def once(x: Tensor) -> Tensor:
            return jvp(lambda y: cls.apply(y, 3), (x,), (torch.ones(4),))[1]

        return jvp(once, (x,), (torch.ones(4),))[1]

    assert not twice(PromisedVmap).any()
    torch.testing.assert_close(twice(fast), -x.sin() * 3 * 4 * SCALE)


def test_t2_a_promised_jvp_follows_what_it_reads(monkeypatch) -> None:
    fast = fusegrad.compile(PromisedVmap)
    for scale in (2.0, 5.0, 2.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        for action in (FORWARD_MODE["jvp"], FORWARD_MODE["duals"]):
            same(outcome(action, fast), outcome(action, PromisedVmap))


def test_t5_a_lying_jvp_raises_each_time() -> None:
    class Lying(Promised):
        traceable = {"jvp": True}  # noqa: RUF012  as users write it

        @staticmethod
        def jvp(ctx, t, _):
            return t * t.sum().item()

    fast = fusegrad.compile(Lying)
    for _ in range(2):
        with pytest.raises(fusegrad.NotTraceableError, match=r"Lying\.jvp cannot be traced") as found:
            FORWARD_MODE["jvp"](fast)
        assert line_of(Lying.jvp, ".item()") in str(found.value)
    same(outcome(lambda cls: first_of(cls, 2), fast), outcome(lambda cls: first_of(cls, 2), Promised))
