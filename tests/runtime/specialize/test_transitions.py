"""Calls that came often under one circumstance, then a call under another: nothing of the first may show in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch.autograd import Function, forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fusegrad
from fusegrad.runtime.fast_path.inline_cache import FIRST

Tensor = torch.Tensor
OFTEN = FIRST + 3
TAKES_KEYWORDS = hasattr(Function, "boxed_grads_call")
"""Whether `apply` of torch itself takes keywords: not in 2.11."""


class Wrong(Function):
    """Its backward is wrong on purpose (7 for cos), so that a backward of torch's own shows."""

    @staticmethod
    def forward(x, y, k=2):
        return x.sin() * k + y, x.detach() * 0 + k

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.mark_non_differentiable(output[1])
        ctx.k = inputs[2]

    @staticmethod
    def backward(ctx, g, _):
        (x,) = ctx.saved_tensors
        needs = ctx.needs_input_grad
        return (g * 7 * ctx.k + 0 * x if needs[0] else None), (g * 5 if needs[1] else None), None

    @staticmethod
    def jvp(ctx, tx, ty, _):
        return tx * 7 * ctx.k + ty * 5, None

    generate_vmap_rule = False


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.linspace(-1.5, 1.5, max(torch.Size(shape).numel(), 1), dtype=torch.float64)[
        : torch.Size(shape).numel()
    ].reshape(shape).to(dtype)  # fmt: skip


def pair(shape: Any = (3, 4), dtype: torch.dtype = torch.float32, grad: tuple[bool, bool] = (True, True)) -> Any:
    x, y = numbers(*shape, dtype=dtype), numbers(*shape, dtype=dtype) / 3
    return x.requires_grad_(grad[0]), y.requires_grad_(grad[1])


def told(
    apply: Callable[..., Any], *args: Any, create_graph: bool = False, gradient: Any = None, **kwargs: Any
) -> list[Any]:
    """Everything about a call: values, gradients, what autograd says of them."""
    given = (*args, *kwargs.values())
    if kwargs and not TAKES_KEYWORDS and getattr(apply, "__self__", None) is Wrong:
        args, kwargs = (*args, *(kwargs[name] for name in ("x", "y", "k")[len(args) :] if name in kwargs)), {}
    outputs = apply(*args, **kwargs)
    facts: list[Any] = [t.detach().clone() if not t.is_inference() else t for t in outputs]
    facts += [(t.dtype, t.stride(), t.requires_grad, t.is_inference(), t.is_leaf) for t in outputs]
    inputs = [a for a in dict.fromkeys(given) if isinstance(a, Tensor) and a.requires_grad]
    if outputs[0].requires_grad and inputs:
        weight = torch.ones_like(outputs[0]) if gradient is None else gradient(outputs[0])
        found = torch.autograd.grad(outputs[0], inputs, weight, create_graph=create_graph, allow_unused=True)
        facts += [None if g is None else g.detach() for g in found]
        facts += [g is not None and g.requires_grad for g in found]
    return facts


class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Passing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def within(context: Callable[[], Any], *args: Any, **options: Any) -> Callable[[Any], Any]:
    def run(apply: Any) -> Any:
        with context():
            return told(apply, *(args or pair()), **options)

    return run


def dual(apply: Any) -> Any:
    with forward_ad.dual_level():
        x, y = (forward_ad.make_dual(t.detach(), torch.ones_like(t)) for t in pair())
        found = [forward_ad.unpack_dual(o) for o in apply(x, y)]
        return [t for f in found for t in (f.primal, f.tangent) if t is not None]


def hooked(apply: Any) -> Any:
    packed: list[Any] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(tuple(t.shape)) or t, lambda t: t * 1)
    with hooks:
        return [*told(apply, *pair()), packed]


def twice(apply: Any) -> Any:
    x = numbers(3, 4).requires_grad_()
    return told(apply, x, x)


def inference(apply: Any) -> Any:
    with torch.inference_mode():
        x, y = numbers(3, 4), numbers(3, 4)
    return told(apply, x, y)


def after_another(apply: Any) -> Any:
    x, y = pair()
    return told(apply, x * 2, y * 3)


def deterministic() -> Any:
    return _Flag(torch.use_deterministic_algorithms, True, False)


def double() -> Any:
    return _Flag(torch.set_default_dtype, torch.float64, torch.float32)


class _Flag:
    def __init__(self, setter: Any, on: Any, off: Any) -> None:
        self.setter, self.on, self.off = setter, on, off

    def __enter__(self) -> None:
        self.setter(self.on)

    def __exit__(self, *_: Any) -> None:
        self.setter(self.off)


CIRCUMSTANCES: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: told(f, *pair()),
    "no_grad": within(torch.no_grad),
    "enable_grad in no_grad": lambda f: torch.no_grad()(lambda: within(torch.enable_grad)(f))(),
    "inference_mode": within(torch.inference_mode),
    "inference tensors": inference,
    "no leaf needs": lambda f: told(f, *pair(grad=(False, False))),
    "first needs": lambda f: told(f, *pair(grad=(True, False))),
    "second needs": lambda f: told(f, *pair(grad=(False, True))),
    "one tensor twice": twice,
    "with history": after_another,
    "autocast": within(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "float64": lambda f: told(f, *pair(dtype=torch.float64)),
    "transposed": lambda f: told(f, *(t.detach().t().requires_grad_() for t in pair((4, 3)))),
    "expanded": lambda f: told(f, *(t.detach()[:1].expand(3, 4).requires_grad_() for t in pair())),
    "another shape": lambda f: told(f, *pair((2, 5))),
    "empty": lambda f: told(f, *pair((0, 4))),
    "another constant": lambda f: told(f, *pair(), 3),
    "constant of another type": lambda f: told(f, *pair(), 2.0),
    "by keyword": lambda f: (lambda x, y: told(f, x, y=y))(*pair()),
    "constant by keyword": lambda f: told(f, *pair(), k=3),
    "keywords in another order": lambda f: (lambda x, y: told(f, k=2.0, y=y, x=x))(*pair()),
    "zero": lambda f: told(f, *pair(), 0.0),
    "negative zero": lambda f: told(f, *pair(), -0.0),
    "parameters": lambda f: told(f, *(torch.nn.Parameter(t.detach()) for t in pair())),
    "dual numbers": dual,
    "saved tensor hooks": hooked,
    "dispatch mode": within(Counting),
    "function mode": within(Passing),
    "anomaly mode": within(torch.autograd.detect_anomaly),
    "deterministic": within(deterministic),
    "default dtype": within(double),
    "create_graph": lambda f: told(f, *pair(), create_graph=True),
    "expanded gradient": lambda f: told(f, *pair(), gradient=lambda o: o.new_ones(()).expand(o.shape)),
    "transposed gradient": lambda f: told(f, *pair(), gradient=lambda o: torch.ones_like(o).t().contiguous().t()),
    "func.grad": lambda f: torch.func.grad(lambda x, y: f(x, y)[0].sum(), argnums=(0, 1))(*pair(grad=(False, False))),
    "func.vjp": lambda f: torch.func.vjp(lambda x: f(x, numbers(3, 4))[0], numbers(3, 4))[1](numbers(3, 4)),
    "func.jvp": lambda f: torch.func.jvp(lambda x, y: f(x, y)[0], pair(grad=(False, False)), pair(grad=(False, False))),
    "checkpoint": lambda f: told(
        lambda *a: torch.utils.checkpoint.checkpoint(f, *a, use_reentrant=False), *pair()
    ),
}  # fmt: skip


def same(mine: Any, theirs: Any) -> bool:
    if isinstance(theirs, Tensor):
        signs = mine.dtype == theirs.dtype and torch.equal(mine.signbit(), theirs.signbit())
        return isinstance(mine, Tensor) and signs and torch.equal(mine, theirs)
    if isinstance(theirs, list | tuple):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    return bool(mine == theirs)


def parted(found: Any) -> tuple[list[Any], list[Any]]:
    """(tensors, everything else)"""
    return [t for t in found if isinstance(t, Tensor)], [t for t in found if not isinstance(t, Tensor)]


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return {name: run(Wrong.apply) for name, run in CIRCUMSTANCES.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["reference"])
@pytest.mark.parametrize("often", CIRCUMSTANCES)
def test_nothing_of_the_former_calls_shows(often: str, backend: str, expected: dict[str, Any]) -> None:
    differing = []
    fast: Any = fusegrad.compile(type("Wrong", (Wrong,), {}), backend=backend)
    for then, run in CIRCUMSTANCES.items():
        for _ in range(OFTEN):
            assert same(CIRCUMSTANCES[often](fast.apply), expected[often])
        for _ in range(2):
            if not same(run(fast.apply), expected[then]):
                differing.append(then)
    assert not differing


@pytest.mark.filterwarnings("ignore")
def test_on_kernels_too(expected: dict[str, Any]) -> None:
    """Bit for bit is the reference's to promise: here the numbers are close, and the facts are the same."""
    fast: Any = fusegrad.compile(type("Wrong", (Wrong,), {}), backend="interpret")
    for often in ("no_grad", "grad", "inference_mode", "no leaf needs"):
        for _ in range(OFTEN):
            CIRCUMSTANCES[often](fast.apply)
        for then in ("grad", "no_grad", "first needs", "saved tensor hooks", "func.grad", "autocast"):
            mine, theirs = CIRCUMSTANCES[then](fast.apply), expected[then]
            (values, facts), (wanted, known) = parted(mine), parted(theirs)
            torch.testing.assert_close(values, wanted)
            assert facts == known, then


class Contained(Function):
    """Tensors and numbers in containers, which autograd does not track; wrong on purpose."""

    @staticmethod
    def forward(ctx, x, parts, options=None):
        ctx.count, ctx.save = len(parts), x
        out = x * (options or {}).get("scale", 2)
        for part in parts.values() if isinstance(parts, dict) else parts:
            out = out * 2 + (part[0] - part[1] if isinstance(part, tuple) else part)
        return out, type(parts).__name__

    @staticmethod
    def backward(ctx, g, _):
        return g * 7 * ctx.count, None, None


def parts(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    return [(numbers(*s, dtype=dtype) * (i + 1)).requires_grad_(grad) for i, s in enumerate(shapes)]


def contained(*args: Any) -> Callable[[Any], Any]:
    def run(apply: Any) -> Any:
        x = numbers(3, 4).requires_grad_()
        out, kind = apply(x, *args)
        return [out.detach(), out.requires_grad, kind, *torch.autograd.grad(out, x, torch.ones_like(out))]

    return run


TWO = parts((3, 4), (3, 4))
CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "two": contained(TWO),
    "three": contained(parts((3, 4), (3, 4), (3, 4))),
    "none": contained([]),
    "the other way round": contained(TWO[::-1]),
    "one twice": contained([TWO[0], TWO[0]]),
    "a tuple": contained(tuple(TWO)),
    "a dict": contained({"a": TWO[0], "b": TWO[1]}),
    "a dict in another order": contained({"b": TWO[0], "a": TWO[1]}),
    "other keys": contained({"a": TWO[0], "c": TWO[1]}),
    "keys that are no text": contained({1: TWO[0], 2: TWO[1]}),
    "nested": contained([(TWO[0], TWO[1]), TWO[0]]),
    "a number among them": contained([TWO[0], 3.0]),
    "another number among them": contained([TWO[0], 4.0]),
    "an integer among them": contained([TWO[0], 3]),
    "broadcast": contained(parts((4,), (1, 4))),
    "float64": contained(parts((3, 4), (3, 4), dtype=torch.float64)),
    "tracked": contained(parts((3, 4), (3, 4), grad=True)),
    "options": contained(TWO, {"scale": 3}),
    "another option": contained(TWO, {"scale": 4}),
    "no options": contained(TWO, {}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("often", CONTAINERS)
def test_nothing_of_former_containers_shows(often: str) -> None:
    fast: Any = fusegrad.compile(type("Contained", (Contained,), {}), backend="reference")
    expected = {name: run(Contained.apply) for name, run in CONTAINERS.items()}
    for then, run in CONTAINERS.items():
        for _ in range(OFTEN):
            assert same(CONTAINERS[often](fast.apply), expected[often])
        for _ in range(2):
            assert same(run(fast.apply), expected[then]), then


def test_a_list_that_grows_or_changes_between_calls() -> None:
    fast: Any = fusegrad.compile(type("Contained", (Contained,), {}), backend="reference")
    x, held = numbers(3, 4).requires_grad_(), list(TWO)
    for _ in range(OFTEN):
        fast.apply(x, held)
    assert fast._fusegrad.inline_cache.written_count, "no call was written out"
    for change in (lambda: held.append(TWO[0]), lambda: held.__setitem__(0, TWO[1]), held.clear):
        change()
        assert same(fast.apply(x, held)[0].detach(), Contained.apply(x, held)[0].detach())


def test_wrong_keywords_stay_wrong() -> None:
    fast: Any = fusegrad.compile(type("Wrong", (Wrong,), {}), backend="reference")
    x, y = pair()
    for _ in range(OFTEN):
        fast.apply(x, y=y)
    for args, kwargs in [((x, y), {"y": y}), ((x,), {"z": y}), ((), {"y": y}), ((x, y, 2, 3), {"k": 2})]:
        with pytest.raises(TypeError):
            fast.apply(*args, **kwargs)


class Renamed(Wrong):
    """A subclass whose forward calls its arguments otherwise."""

    @staticmethod
    def forward(y, x, k=2):
        return Wrong.forward(y, x, k)


def test_keywords_of_a_subclass_are_its_own() -> None:
    fast: Any = fusegrad.compile(type("Wrong", (Wrong,), {}), backend="reference")
    x, y = pair()
    for _ in range(OFTEN):
        fast.apply(x=x, y=y)
    below: Any = type("Below", (fast,), {"forward": staticmethod(Renamed.forward)})
    theirs = Renamed.apply(x=x, y=y) if TAKES_KEYWORDS else Renamed.apply(y, x)
    assert same(below.apply(x=x, y=y)[0].detach(), theirs[0].detach())
