"""A Function in both forms, the user's and compiled, with the arguments of one call: what `fusegrad.check` runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from ...ir.errors import FusegradError
from ...tracer.methods import as_tuple, uses_setup_context
from ...tracer.torch_private import is_wrapper_subclass
from ..api import compile as compiled
from ..capture.guards import is_float
from ..compiled.compiled import Compiled
from ..dispatch.pytree import bound, call_flat
from ..report.explain import compiler_of
from ..values.tensor_specs import is_spec, parse_spec
from .compare import Outcome, Tolerance, error_text, first_difference
from .modes import MODES, Transforms, weighted_sum
from .variations import copies_of, with_layout

Tensor = torch.Tensor
Apply = Callable[..., Any]
MOST_CAPTURES = 32  # then the class is compiled afresh: a user's class is not called in so many ways


class CheckArgumentError(FusegradError, ValueError):
    """`check` was asked for something that it does not know, or that eager itself cannot run."""

    message = "check({function}): {detail}\n  at:   {where}\n  fix:  {fix}"


@dataclass(frozen=True)
class Weights:
    """The gradients of the outputs: their layout, and the one output that has one (None: all that can)."""

    layout: str = "contiguous"
    only: int | None = None


@dataclass(frozen=True)
class Case:
    """One trial: a mode on tensors."""

    mode: str
    label: str
    xs: tuple[Tensor, ...]
    weights: Weights = Weights()


@dataclass
class Subject:
    """A Function in both forms, with the arguments that are no tensors."""

    name: str
    user: Any
    options: dict[str, Any]
    eager: Apply
    leaves: list[Any]
    spec: pytree.TreeSpec
    tolerance: Tolerance
    seed: int
    cloned: bool = False  # it writes to its arguments: they are clones of what is differentiated
    random: bool = False
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fast, self.compiler = self.compile_again()

    def compile_again(self) -> tuple[Apply, Compiled]:
        """Compile as the user did, without the captures so far."""
        fast = compiled(self.user, **self.options)
        return (fast.apply if isinstance(self.user, type) else fast), compiler_of(fast)

    def renew(self) -> None:
        """A new compilation, once the old one has seen many kinds of calls."""
        if len(self.compiler.table.by_facts) > MOST_CAPTURES:
            self.fast, self.compiler = self.compile_again()

    def on_tensors(self, apply: Apply) -> Apply:
        """The call as a function of its tensors."""

        def call(*xs: Tensor) -> Any:
            supply = iter([x.clone() for x in xs] if self.cloned else xs)
            leaves = [next(supply) if isinstance(a, Tensor) else a for a in self.leaves]
            args, kwargs = pytree.tree_unflatten(leaves, self.spec)
            return apply(*args, **kwargs)

        return call

    def run(
        self, apply: Apply, mode: str, xs: Sequence[Tensor], gs: Sequence[Any], toolkit: Any = Transforms
    ) -> Outcome:
        """One run, seeded, on copies."""
        _seed(self.seed)
        try:
            return Outcome(MODES[mode](toolkit, flat_outputs(self.on_tensors(apply)), copies_of(xs), gs))
        except Exception as error:
            return Outcome({}, error)

    def weighted(self, xs: Sequence[Tensor], gs: Sequence[Any]) -> Tensor:
        """The outputs of the uncompiled forward, weighted and summed: seeded, on copies."""
        _seed(self.seed)
        total: Tensor = weighted_sum(flat_outputs(self.on_tensors(self.eager))(*copies_of(xs)), gs)
        return total

    def gradients(self, xs: Sequence[Tensor], weights: Weights) -> list[Any]:
        """A random gradient for each output that is differentiated; none where eager raises."""
        _seed(self.seed)
        try:
            outputs = as_tuple(flat_outputs(self.on_tensors(self.eager))(*(_track(x) for x in copies_of(xs))))
        except Exception:
            return []
        numbers = torch.Generator().manual_seed(self.seed + 1)
        drawn = [_normal(o, numbers) if isinstance(o, Tensor) and o.requires_grad else None for o in outputs]
        selected = [g if weights.only in (None, i) else None for i, g in enumerate(drawn)]
        return [g if g is None else _weight(g, weights.layout) for g in selected]


def _seed(seed: int) -> None:
    """torch.manual_seed, which keeps a note with a stack for every accelerator that nothing has used yet."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def _weight(g: Tensor, layout: str) -> Tensor:
    weight = with_layout(g, layout)
    return g if weight is None else weight


def _track(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.requires_grad)


def _normal(like: Tensor, numbers: torch.Generator) -> Tensor:
    drawn = torch.randn(like.shape, generator=numbers, dtype=torch.float64)
    if like.is_complex():
        drawn = torch.complex(drawn, torch.randn(like.shape, generator=numbers, dtype=torch.float64))
    return drawn.to(like.dtype).to(like.device)


def flat_outputs(call: Apply) -> Apply:
    """Nested results (of compile(pytree=True)) as a tuple of their leaves."""

    def flat(*xs: Tensor) -> Any:
        result = call(*xs)
        plain = isinstance(result, Tensor) or (type(result) is tuple and all(isinstance(o, Tensor) for o in result))
        return result if plain else tuple(pytree.tree_leaves(result))

    return flat


# ------------------------------------------------------------------ from the arguments of one call
def name_of(target: Any) -> str:
    """The name by which the user calls it."""
    return str(getattr(target, "__name__", type(target).__name__))


def examine(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], backend: str, tolerance: Tolerance, seed: int
) -> tuple[Subject, tuple[Tensor, ...]]:
    """The Function in both forms with the example's tensors.

    Raises CheckArgumentError where eager cannot run them, and for tensor subclasses, DTensor among them.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if (subclass := next((type(a).__name__ for a in leaves if is_wrapper_subclass(a)), None)) is not None:
        detail, fix = (
            f"an argument is a {subclass}",
            "give plain tensors: the part that a rank has, `x.to_local()`, say",
        )
        raise CheckArgumentError(function=name_of(target), detail=detail, fix=fix)
    # Tensors in place of specifications, then both forms of the Function around them.
    leaves = _differentiable(_draw_all(leaves, seed))
    user, options, eager = both_forms(target, backend)
    tolerance = replace(tolerance, strict=isinstance(target, type))  # a function alone has gradients of autograd's form
    subject = Subject(name_of(target), user, options, eager, leaves, spec, tolerance, seed)
    xs = tuple(x for x in leaves if isinstance(x, Tensor))
    subject.names = [n for n, x in zip(_names(target, spec), leaves, strict=True) if isinstance(x, Tensor)]
    # Eager runs before anything is compiled: an example that it refuses is the user's to mend.
    _observe_eager(subject, xs)
    return subject, xs


def _observe_eager(subject: Subject, xs: tuple[Tensor, ...]) -> None:
    """Does it write to its arguments, does it draw random numbers, does it work at all?"""
    outcome = _eager_backward(subject, xs)
    if "leaf Variable" in str(outcome.error):
        subject.cloned = True
        outcome = _eager_backward(subject, xs)
    if outcome.error is not None and _forward(subject, xs).error is not None:
        detail = f"eager itself raises {error_text(outcome)}"
        raise CheckArgumentError(function=subject.name, detail=detail, fix="give arguments that the class works on")
    first = _forward(subject, xs)
    subject.seed += 1
    second = _forward(subject, xs)
    subject.seed -= 1
    exact = Tolerance(0.0, 0.0, strict=False)
    subject.random = first_difference(first, second, None, exact) is not None


def _eager_backward(subject: Subject, xs: tuple[Tensor, ...]) -> Outcome:
    subject_run = subject.run(subject.eager, "backward", xs, [])
    gs = subject.gradients(xs, Weights())
    return subject.run(subject.eager, "backward", xs, gs) if gs else subject_run


def _forward(subject: Subject, xs: tuple[Tensor, ...]) -> Outcome:
    return subject.run(subject.eager, "forward", xs, [])


def both_forms(target: Any, backend: str) -> tuple[Any, dict[str, Any], Apply]:
    """(what the user wrote, the options that it is compiled with, the uncompiled call)."""
    compiler, is_class = compiler_of(target), isinstance(target, type)
    options = {**vars(compiler.options), "backend": backend, "pytree": hasattr(target, "_fusegrad_flat")}
    user = getattr(target, "_fusegrad_user_class" if is_class else "__wrapped__", target)

    apply = compiler.user.cls.apply if compiler.user.derives_backward else compiler.user.run  # type: ignore[attr-defined]

    def call_nested(*args: Any, **kwargs: Any) -> Any:
        return call_flat(apply, bound(user, args, kwargs))

    eager = (call_nested if options["pytree"] else apply) if is_class else user
    return user, options, eager


def _names(target: Any, spec: pytree.TreeSpec) -> list[str]:
    """The name of each argument leaf: `x`, `params['w']`."""
    cls = getattr(target, "_fusegrad_user_class", target)
    method = getattr(cls, "forward", target)
    names = list(inspect.signature(method).parameters) if callable(method) else []
    names = names[1:] if isinstance(cls, type) and not uses_setup_context(cls) else names
    paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(range(spec.num_leaves), spec))
    return [_leaf_name(path, names) for path, _ in paths]


def _leaf_name(path: Any, names: Sequence[str]) -> str:
    (kind, first, *rest) = path
    by_position = kind.idx == 0
    index = first.idx if by_position else -1
    stem = (names[index] if index < len(names) else f"args[{index}]") if by_position else first.key
    return f"{stem}{pytree.keystr(tuple(rest))}"


def _draw_all(leaves: Sequence[Any], seed: int) -> list[Any]:
    """Tensors in place of specifications: normal numbers, and whole numbers that are indices of every axis."""
    numbers = torch.Generator().manual_seed(seed)
    specs = [parse_spec(a) for a in leaves if is_spec(a)]
    sizes = [n for dtype, shape in specs for n in shape if dtype.is_floating_point]
    limit = max(min(sizes, default=2), 1)
    return [_draw(*parse_spec(a), limit, numbers) if is_spec(a) else a for a in leaves]


def _draw(dtype: torch.dtype, shape: tuple[int, ...], limit: int, numbers: torch.Generator) -> Tensor:
    if dtype is torch.bool or not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 2 if dtype is torch.bool else limit, shape, generator=numbers).to(dtype)
    # Of complex numbers both parts: where one is zero, a conjugate that is missing goes unseen.
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, generator=numbers, dtype=wide).to(dtype)


def _differentiable(leaves: Sequence[Any]) -> list[Any]:
    """Let every floating argument require a gradient where none does."""
    tensors = [a for a in leaves if isinstance(a, Tensor)]
    any_requires_grad = any(t.requires_grad for t in tensors)
    fresh = {id(t): t.detach().requires_grad_(t.requires_grad if any_requires_grad else is_float(t)) for t in tensors}
    return [fresh[id(a)] if isinstance(a, Tensor) else a for a in leaves]
