"""T3: a forward that runs as written keeps every corner of eager, and backward alone is captured."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from side_by_side import TAKES_KEYWORDS
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import grad, jvp
from watching import Opaque, captures, first_of, leaf, outcome, record, same, watching

import fusegrad
from fusegrad.runtime.autograd.opaque_forward import BACKWARDS, OpaqueForward

Tensor = torch.Tensor
SCALE = 2.0


class Kept(Function):
    """forward leaves constants of every kind, an attribute that is a tensor, None among what it saves."""

    traceable = {"forward": False, "backward": True}  # noqa: RUF012  as users write it

    @staticmethod
    def forward(ctx, x, k, table=None):
        y = torch.from_numpy(np.exp(x.detach().numpy()))
        ctx.save_for_backward(x, None, y)
        ctx.k, ctx.table, ctx.twice, ctx.shape = k, table, y * 2, x.shape
        return y * k

    @staticmethod
    def backward(ctx, g):
        x, nothing, y = ctx.saved_tensors
        assert nothing is None
        factor = sum(ctx.table["f"]) if ctx.table else 1
        wanted = 3 if ctx.needs_input_grad[0] else 5
        return g * y * ctx.k * factor + 0 * x * ctx.twice.sum() * wanted * ctx.shape[0], None, None


def kept(x: Tensor, *rest: Any, gradient: Callable[[Tensor], Tensor] = torch.ones_like) -> Callable[[Any], Any]:
    def action(cls: Any) -> Any:
        fresh = x.detach().requires_grad_()
        y = cls.apply(fresh, *rest)
        return y, torch.autograd.grad(y, fresh, gradient(y))

    return action


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_backward_alone_is_captured_for_what_forward_left(backend) -> None:
    fast = fusegrad.compile(Kept, backend=backend)
    calls = [
        kept(leaf(3), 2),
        kept(leaf(5), 2),
        kept(leaf(3), 2.0),
        kept(leaf(3), 3),
        kept(leaf(3), True),
        kept(leaf(3), 2, {"f": [1, 2]}),
        kept(leaf(3), 2, {"f": [1, 4]}),
        kept(leaf(2, 3), 2),
        kept(leaf(3, dtype=torch.float64), 2),
        kept(leaf(4, 3), 2, gradient=lambda y: torch.ones(3, 4).t()),
        kept(leaf(4), 2, gradient=lambda y: torch.arange(8.0)[::2]),
        kept(leaf(4), 2, gradient=lambda y: torch.tensor(2.0).expand(4)),
    ]
    for action in calls * 2:
        same_or_close(outcome(action, fast), outcome(action, Kept), backend)
    before = captures()
    with watching(Kept) as seen:
        for action in calls:
            outcome(action, fast)
    assert seen.calls == Counter(forward=len(calls)) and captures() == before
    assert record(fast, "backward").status == "compiled"


def same_or_close(mine: Any, theirs: Any, backend: str) -> None:
    if backend == "reference":
        same(mine, theirs)
    else:
        torch.testing.assert_close(mine, theirs)


def test_a_helper_and_a_global_of_backward_may_change(monkeypatch) -> None:
    class Reads(Function):
        traceable = {"forward": False}  # noqa: RUF012  as users write it

        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, g):
            return helper(g) * SCALE

    fast = fusegrad.compile(Reads)
    other = {"n": 4.0}
    alone, with_other = (lambda g: g), (lambda g: g * other["n"])
    for scale, function in ((2.0, alone), (3.0, alone), (3.0, with_other), (2.0, alone)):
        monkeypatch.setitem(globals(), "SCALE", scale)
        monkeypatch.setitem(globals(), "helper", function)
        for n in (4.0, 5.0):
            other["n"] = n
            same(outcome(lambda cls: first_of(cls), fast), outcome(lambda cls: first_of(cls), Reads))
    assert record(fast, "backward").status == "compiled"


def helper(g: Tensor) -> Tensor:
    return g


class ListOfTensors(Opaque):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = [x.detach() * 2]
        return Opaque.forward(ctx, x)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.kept[0]


class Array(Opaque):
    @staticmethod
    def forward(ctx, x):
        ctx.array = x.detach().numpy().copy()
        return Opaque.forward(ctx, x)

    @staticmethod
    def backward(ctx, g):
        return g * float(ctx.array.sum())


class WritesCtx(Opaque):
    @staticmethod
    def backward(ctx, g):
        ctx.calls = getattr(ctx, "calls", 0) + 1
        return g * ctx.calls


class WritesATable(Opaque):
    @staticmethod
    def forward(ctx, x):
        ctx.table, ctx.step = [0, [1, 2]], 0
        return Opaque.forward(ctx, x)

    @staticmethod
    def backward(ctx, g):
        ctx.table[1][len(g.shape) - ctx.step] += 2
        return g * ctx.table[1][1]


class AppendsToCtx(Opaque):
    @staticmethod
    def forward(ctx, x):
        ctx.seen = []
        return Opaque.forward(ctx, x)

    @staticmethod
    def backward(ctx, g):
        ctx.seen.append(1)
        return g * len(ctx.seen)


class Lambda(Opaque):
    @staticmethod
    def forward(ctx, x):
        ctx.rule = lambda g: g * SCALE
        return Opaque.forward(ctx, x)

    @staticmethod
    def backward(ctx, g):
        return ctx.rule(g)


class AsksTorchsCtx(Opaque):
    @staticmethod
    def backward(ctx, g):
        return g * len(ctx.next_functions)


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (ListOfTensors, "`ctx.kept` is a container with tensors"),
        (Array, "`ctx.array` holds a ndarray"),
        (WritesCtx, "it changes what is on `ctx`, which its next run reads"),
        (WritesATable, "it changes what is on `ctx`, which its next run reads"),
        (AppendsToCtx, "it changes what is on `ctx`, which its next run reads"),
        (Lambda, "`ctx.rule` holds a function"),
        (AsksTorchsCtx, "next_functions"),
    ],
)
def test_what_cannot_be_a_key_leaves_backward_to_the_user_on_record(cls, why) -> None:
    fast = fusegrad.compile(cls, traceable={"forward": False})

    def action(cls: Any) -> Any:
        x = leaf(3)
        y = cls.apply(x)
        return [torch.autograd.grad(y, x, torch.ones(3), retain_graph=True) for _ in range(3)]

    with pytest.warns(fusegrad.FallbackWarning, match=rf"{cls.__name__}\.backward") as caught:
        for _ in range(2):
            same(outcome(action, fast), outcome(action, cls))
    assert len([w for w in caught if issubclass(w.category, fusegrad.FallbackWarning)]) == 1
    assert record(fast, "backward").status == "opaque" and why in record(fast, "backward").reason
    found = fusegrad.explain(fast, leaf(3)).to_dict()["methods"]
    assert why in found["backward"]["reason"] and found["backward"]["where"].startswith(__file__)
    with watching(cls) as seen:
        outcome(action, fast)
    assert seen.calls["backward"] == 3 and not seen.on_fakes["backward"]


class Once(Opaque):
    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos()


class Dirty(Function):
    @staticmethod
    def forward(ctx, x, y):
        x.detach().numpy()[:] *= 2
        ctx.mark_dirty(x)
        ctx.save_for_backward(y)
        return x, y * 3

    @staticmethod
    def backward(ctx, g, h):
        (y,) = ctx.saved_tensors
        return g * 2 * y, h * 3


class Undefined(Opaque):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return Opaque.forward(ctx, x), x * 2, x.detach().numpy().argsort().tolist(), None

    @staticmethod
    def backward(ctx, g, h, *rest):
        (x,) = ctx.saved_tensors
        return x * 0 + sum(0 if v is None else v * (i + 1) for i, v in enumerate((g, h, *rest)))


class Unmarked(Function):
    @staticmethod
    def forward(ctx, x):
        order = torch.from_numpy(np.argsort(x.detach().numpy()))
        made = x.detach() * 2
        ctx.mark_non_differentiable(made)
        ctx.save_for_backward(order)
        return x[order], made, order

    @staticmethod
    def backward(ctx, g, h, i):
        (order,) = ctx.saved_tensors
        return torch.zeros_like(g).index_add(0, order, g) + h + i


class Keywords(Function):
    @staticmethod
    def forward(x, k=2):
        return torch.from_numpy(np.sin(x.detach().numpy())) * k

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.k = inputs[:2]
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos() * ctx.k, None

    @staticmethod
    def jvp(ctx, t, k):
        (x,) = ctx.saved_tensors
        return t * x.cos() * ctx.k


def on_clone(*which: int) -> Callable[[Any], Any]:
    def action(cls: Any) -> Any:
        x, y = leaf(3), leaf(3, seed=1)
        outputs = cls.apply(x.clone(), y)
        return [o.detach() for o in outputs], torch.autograd.grad([outputs[i].sum() for i in which], [x, y])

    return action


def masked(*which: int) -> Callable[[Any], Any]:
    def action(cls: Any) -> Any:
        x = leaf(3)
        outputs = cls.apply(x)
        return outputs, torch.autograd.grad([outputs[i].sum() for i in which], x)

    return action


def changed_after(cls: Any) -> Any:
    x = leaf(3).clone()
    y = cls.apply(x)
    with torch.no_grad():
        x.add_(1)
    y.sum().backward()


def backward_twice(cls: Any) -> Any:
    y = cls.apply(leaf(3)).sum()
    y.backward()
    y.backward()


def hooked(cls: Any) -> Any:
    seen: list[Any] = []
    x = leaf(3)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: seen.append("pack") or t * 2, lambda t: seen.append("unpack") or t / 2
    ):
        y = cls.apply(x)
    y.grad_fn.register_hook(lambda *gs: seen.append(len(gs)))
    return torch.autograd.grad(y.sum(), x), seen, type(y.grad_fn).__name__


def double(cls: Any) -> Any:
    x = leaf(3)
    (g,) = torch.autograd.grad(cls.apply(x).sum(), x, create_graph=True)
    return torch.autograd.grad(g.sum(), x)


CORNERS: list[tuple[type, Callable[[Any], Any]]] = [
    (Once, first_of),
    (Once, double),
    (Dirty, on_clone(0, 1)),
    (Dirty, on_clone(0)),
    (Dirty, lambda cls: cls.apply(leaf(3), leaf(3))),
    (Undefined, masked(0)),
    (Undefined, masked(1)),
    (Undefined, masked(0, 1)),
    (Unmarked, masked(0)),
    (Unmarked, lambda cls: [o.requires_grad for o in cls.apply(leaf(3))]),
    (Keywords, lambda cls: first_of(cls, 3)),
    *([(Keywords, lambda cls: (cls.apply(x=leaf(3).detach()), cls.apply(leaf(3).detach(), k=5)))] * TAKES_KEYWORDS),
    (Keywords, lambda cls: cls.apply(leaf(3), flag=True)),
    (Keywords, lambda cls: cls.apply()),
    (Keywords, lambda cls: jvp(lambda x: cls.apply(x, 3), (leaf(3).detach(),), (torch.ones(3),))),
    (Opaque, changed_after),
    (Opaque, backward_twice),
    (Opaque, hooked),
    (Opaque, double),
    (Opaque, lambda cls: cls.apply(leaf(3), leaf(3))),
    (Opaque, lambda cls: grad(lambda x: cls.apply(x).sum())(leaf(3).detach())),
    (Opaque, lambda cls: torch.autograd.grad(cls.apply(y := leaf(3)), y, torch.eye(3), is_grads_batched=True)),
]


@pytest.mark.parametrize("options", [{"traceable": {"forward": False}}, {"traceable": False}, {}], ids=str)
@pytest.mark.parametrize(("cls", "action"), CORNERS, ids=lambda v: getattr(v, "__name__", "other"))
def test_an_opaque_forward_keeps_eagers_corners(cls, action, options) -> None:
    fast = fusegrad.compile(cls, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusegrad.FallbackWarning)
        for _ in range(2):
            same(outcome(action, fast), outcome(action, cls))


def test_the_same_tensor_twice_through_an_opaque_forward() -> None:
    class Product(Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return torch.from_numpy(a.detach().numpy() * b.detach().numpy())

        @staticmethod
        def backward(ctx, g):
            a, b = ctx.saved_tensors
            return g * b, g * a * 2

    def twice(cls: Any) -> Any:
        x = leaf(3)
        return torch.autograd.grad(cls.apply(x, x).sum(), x)

    fast = fusegrad.compile(Product, traceable={"forward": False})
    same(outcome(twice, fast), outcome(twice, Product))


def test_many_constants_end_with_the_users_own_backward() -> None:
    fast = fusegrad.compile(Kept, traceable={"backward": True})
    with pytest.raises(fusegrad.NotTraceableError, match="0-d tensor"):
        for k in range(70):
            same(outcome(kept(leaf(3), k), Kept), outcome_of(kept(leaf(3), k), fast))


def outcome_of(action: Callable[[Any], Any], cls: Any) -> Any:
    flat = torch.utils._pytree.tree_leaves(action(cls))
    return [v.detach() if isinstance(v, Tensor) else v for v in flat]


# ------------------------------------------------------------------ kernels that exist already
KERNEL = """
import torch, triton, triton.language as tl, fusegrad
from torch.autograd import Function

@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)

launches = 0

def launch(x):
    global launches
    launches += 1
    y = torch.empty_like(x)
    double[(triton.cdiv(x.numel(), 8),)](x, y, x.numel(), BLOCK=8)
    return y

class Double(Function):
    {declaration}
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return launch(x)
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 2 + 0 * x.exp()

import warnings
warnings.simplefilter("{warn}", fusegrad.FallbackWarning)
fast = fusegrad.compile(Double)
for n in (5, 20, 5):
    x = torch.randn(n, requires_grad=True)
    y = fast.apply(x)
    (g,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, x * 2) and torch.equal(g, torch.full((n,), 2.0))
assert launches == 3, launches
found = fusegrad.explain(fast, "f32[5]").to_dict()["methods"]
assert (found["forward"]["status"], found["backward"]["status"]) == ("{status}", "compiled"), found
print("fine")
"""


@pytest.mark.parametrize(
    ("declaration", "warn"), [("traceable = dict(forward=False, backward=True)", "error"), ("", "ignore")]
)
def test_an_existing_triton_kernel_under_the_interpreter(declaration, warn, tmp_path) -> None:
    script = tmp_path / "kernel.py"
    status = "opaque" if declaration else "compiled"  # between its segments, where nothing is declared
    script.write_text(KERNEL.format(declaration=declaration, warn=warn, status=status))
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=200)
    assert ran.stdout == "fine\n", ran.stderr


class Numbered(Function):
    traceable = {"forward": False}  # noqa: RUF012  as users write it

    @staticmethod
    def forward(ctx, x, k):
        ctx.k = k
        return x * k

    @staticmethod
    def backward(ctx, g):
        return g * ctx.k * 3, None


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_a_number_that_changes_at_every_call_fills_no_memory() -> None:
    """Found by a million calls: each number that was refused left a unit behind."""
    fast: Any = fusegrad.compile(Numbered)
    x = leaf(3)
    for number in range(300):
        torch.autograd.grad(fast.apply(x, number + 0.5).sum(), x)
    (owner,) = [o for o in gc.get_objects() if type(o) is OpaqueForward and o.compiler is fast._fusegrad]
    assert len(owner.units) == BACKWARDS and len(owner.refused) > BACKWARDS


class Deeper(Function):
    """Its backward, which cannot be captured, runs that of a call of the class itself."""

    apply_to: Any = None

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_() - 1
        return ctx.x.detach()

    @staticmethod
    def backward(ctx, g):
        if ctx.x > 0:
            with torch.enable_grad():
                Deeper.apply_to(ctx.x).sum().backward()
        return g * 2


def test_a_backward_within_itself_is_tried_once(monkeypatch) -> None:
    fast = fusegrad.compile(Deeper)
    monkeypatch.setattr(Deeper, "apply_to", fast.apply)
    x = torch.tensor(30.0, requires_grad=True)
    before = fusegrad.stats()["captures"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusegrad.FallbackWarning)
        fast.apply(x).backward()
    assert x.grad == 2
    assert fusegrad.stats()["captures"] - before < 10  # and not thirty


class WritesWhatItSaved(Function):
    traceable = {"forward": False, "backward": True}  # noqa: RUF012  as users write it

    @staticmethod
    def forward(ctx, x):
        p = x.softmax(-1)
        ctx.save_for_backward(p)
        return p.log().sum(-1)

    @staticmethod
    def backward(ctx, g):
        (p,) = ctx.saved_tensors
        p.mul_(g.unsqueeze(-1))
        return p


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_a_double_backward_of_one_that_writes_what_it_saved_after_it_was_captured() -> None:
    fast = fusegrad.compile(WritesWhatItSaved)
    for recorded in (False, True, True, False):
        found = []
        for cls in (WritesWhatItSaved, fast):
            x, g = torch.linspace(-1, 2, 6).view(2, 3).requires_grad_(), torch.tensor([2.0, 3.0], requires_grad=True)
            (first,) = torch.autograd.grad(cls.apply(x), x, g, create_graph=recorded)
            second = torch.autograd.grad((first * x.detach()).sum(), [g]) if recorded else ()
            found.append([first.detach().clone(), first._is_view(), *second])
        assert found[0][1] == found[1][1]
        torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=0)
        torch.testing.assert_close(found[1][2:], found[0][2:])
    assert fusegrad.explain(fast).methods["backward"].status == "compiled"
