"""`compile(pytree=True)`: dicts, lists, tuples, registered containers of tensors, tracked as arguments and as results.

The class becomes a flat one, `forward(structure, *leaves)`, around the user's methods, which see their own structures.
Capture, guards and transforms meet flat tensors only; a Structure is a constant among the arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.utils._pytree as pytree
from torch.autograd.function import Function, FunctionMeta, once_differentiable

from ...ir.errors import FusegradError, KeywordOnlyError
from ...tracer.gradients import exact_gradients
from ...tracer.locks import INNER, lock_of
from ...tracer.methods import (
    backward_method,
    is_once_differentiable,
    method_place,
    methods,
    takes_boxed_gradients,
    uses_setup_context,
)
from ..dynamo.graph_names import name_in_graphs
from ..dynamo.pytree_forms import function_shown_nested, of_forms, shown_nested
from ..fast_path.argument_forms import MISS, builder, opener
from ..fast_path.guard_codegen import Unchanging
from .metaclass import is_public, joined

Tensor = torch.Tensor
Compile = Callable[[Any], Any]
FLAGS = ("is_traceable", "traceable", "generate_vmap_rule", "clear_saved_tensors_on_access")


class TreeError(FusegradError, TypeError):
    """A structure that a method returned does not fit what it answers to."""

    message = (
        "{function}.{method}: {path} is {got}, expected {expected}\n  at:   {where}\n"
        "  fix:  return {what} in the structure of {model}; None stands for a whole one or for a leaf."
    )


# ------------------------------------------------------------------ structures
_one_by_one = lock_of(INNER)


class Structure(Unchanging):
    """A nested value without its leaves; one object for each structure, so that keys may hold it."""

    known: ClassVar[dict[Any, Structure]] = {}
    numbered: ClassVar[list[Structure]] = []

    def __init__(self, spec: pytree.TreeSpec, several: bool) -> None:
        self.spec, self.several, self.number = spec, several, len(self.numbered)
        model = self._any_structure([LEAF] * spec.num_leaves)
        self.build = builder(model, lambda m: m is LEAF) or self._any_structure

    @classmethod
    def of(cls, spec: pytree.TreeSpec, several: bool) -> Structure:
        """several: the top is the tuple of all arguments or outputs, not a value of its own."""
        with _one_by_one:
            if (spec, several) not in cls.known:
                cls.known[spec, several] = cls(spec, several)
                cls.numbered.append(cls.known[spec, several])
            return cls.known[spec, several]

    def __call__(self, leaves: Sequence[Any]) -> Any:
        return self.build(leaves)

    def _any_structure(self, leaves: Sequence[Any]) -> Any:
        return pytree.tree_unflatten(list(leaves), self.spec)

    def each(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The leaves as one value for each argument or output."""
        whole = self(leaves)
        return tuple(whole) if self.several else (whole,)

    def models(self) -> tuple[Any, ...]:
        """One value for each argument or output, with LEAF in place of its leaves."""
        return self.each([LEAF] * self.spec.num_leaves)


class _Leaf:
    def __repr__(self) -> str:
        return "*"


LEAF = _Leaf()


def flatten(value: Any, several: bool) -> tuple[list[Any], Structure]:
    """A nested value -> its leaves and its structure."""
    leaves, spec = pytree.tree_flatten(value)
    return leaves, Structure.of(spec, several)


def flatten_outputs(output: Any) -> tuple[list[Any], Structure]:
    """A tuple is several outputs; a dict, a list or a named tuple is one."""
    return flatten(output, type(output) is tuple)


class Misfit(Exception):
    """A value without the structure of its model: where, what it is, what it should be."""


def leaves_like(model: Any, value: Any, path: str, whole: Callable[[Any], bool]) -> list[Any]:
    """The leaves of a value in the order of its model's; what is `whole` counts for every leaf under it.

    {"w": *, "b": [*, *]}, {"b": None, "w": g}  ->  [g, None, None]
    """
    if whole(value):
        return [value] * len(pytree.tree_leaves(model))
    if model is LEAF:
        return [value]
    expected, found = one_level(model), one_level(value)
    if not _same_container(model, value) or expected.keys() != found.keys():
        raise Misfit(path, described(value), described(model))
    return [leaf for key in expected for leaf in leaves_like(expected[key], found[key], path + key, whole)]


def one_level(value: Any) -> dict[str, Any]:
    """The children of a container by their keys, written as in an expression: "['w']", "[1]", ".field"."""
    whole = id(value)  # not the value, which would live as long as torch's tree functions, that refer to themselves

    def is_child(inner: Any) -> bool:
        return id(inner) != whole

    try:
        pairs, _ = pytree.tree_flatten_with_path(value, is_leaf=is_child)
        return {pytree.keystr(path): child for path, child in pairs}
    except ValueError:  # registered without keys
        return {f"[{i}]": child for i, child in enumerate(pytree.tree_leaves(value, is_leaf=is_child))}


def _same_container(model: Any, value: Any) -> bool:
    plain = (list, tuple)
    return type(model) is type(value) or (type(model) in plain and type(value) in plain)


def described(value: Any) -> str:
    """`a dict with keys ['w'], ['b']`"""
    if value is LEAF:
        return "a tensor"
    keys = one_level(value)
    if keys.keys() == {""}:
        return f"a {type(value).__name__}"
    return f"a {type(value).__name__} with {', '.join(keys) or 'nothing in it'}"


def paths_of(model: Any, path: str) -> list[str]:
    """The path of each leaf of a model: `args[0]['w'][1]`."""
    return [path + pytree.keystr(keys) for keys, _ in _with_paths(model)]


def _with_paths(model: Any) -> list[Any]:
    try:
        return pytree.tree_flatten_with_path(model)[0]
    except ValueError:
        return [((pytree.SequenceKey(i),), leaf) for i, leaf in enumerate(pytree.tree_leaves(model))]


# ------------------------------------------------------------------ the flat class
class TreeContext:
    """The ctx that the user's methods see: the real one, with `needs_input_grad` in the structure of the arguments."""

    def __init__(self, ctx: Any, inputs: Structure) -> None:
        self.__dict__.update(_ctx=ctx, _inputs=inputs)

    @property
    def needs_input_grad(self) -> tuple[Any, ...]:
        return self._inputs.each(self._ctx.needs_input_grad[1:])  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._ctx, name)


def _trees(ctx: Any) -> tuple[Structure, Structure]:
    """The structures of arguments and outputs that forward left on ctx, by number: constants for every cache."""
    inputs, outputs = ctx._fusegrad_trees
    return Structure.numbered[inputs], Structure.numbered[outputs]


def flat_class(cls: type) -> type:
    """`forward(structure, *leaves) -> (*leaves, structure)` around the methods of `cls`, and so for each method."""
    makers = {"forward": _forward, "setup_context": _setup_context, "jvp": _jvp, "vmap": _vmap}
    written = methods(cls)
    body: dict[str, Any] = {name: staticmethod(make(cls)) for name, make in makers.items() if name in written}
    body |= {name: staticmethod(_backward(cls)) for name in ("backward", "vjp") if name in written}
    body |= {name: getattr(cls, name) for name in FLAGS if hasattr(cls, name)} | {"_fusegrad_keeps_arguments": True}
    named = {n: getattr(cls, n) for n in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (Function,), {**body, **named})


def _around(method: Any) -> Callable[[Any], Any]:
    """Marks a flat method: errors and reports name the place of the user's own."""

    def mark(flat: Any) -> Any:
        flat.__wrapped__, flat.__signature__ = method, inspect.signature(flat)
        return flat

    return mark


def _forward(cls: Any) -> Any:
    @_around(cls.forward)
    def with_context(ctx: Any, structure: Structure, *leaves: Any) -> Any:
        output = cls.forward(TreeContext(ctx, structure), *structure.each(leaves))
        results, outputs = flatten_outputs(output)
        ctx._fusegrad_trees = (structure.number, outputs.number)
        return (*results, outputs)

    @_around(cls.forward)
    def without_context(structure: Structure, *leaves: Any) -> Any:
        results, outputs = flatten_outputs(cls.forward(*structure.each(leaves)))
        return (*results, outputs)

    return without_context if uses_setup_context(cls) else with_context


def _setup_context(cls: Any) -> Any:
    @_around(cls.setup_context)
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        (structure, *leaves), (*results, outputs) = inputs, output
        ctx._fusegrad_trees = (structure.number, outputs.number)
        cls.setup_context(TreeContext(ctx, structure), structure.each(leaves), outputs(results))

    return setup_context


def _backward(cls: Any) -> Any:
    method: Any = backward_method(cls)
    once = is_once_differentiable(method)
    body = method.__wrapped__ if once else method
    boxed = takes_boxed_gradients(cls)

    @_around(method)
    def backward(ctx: Any, *gradients: Any) -> Any:
        inputs, outputs = _trees(ctx)
        each = outputs.each(gradients[:-1])
        result = body(TreeContext(ctx, inputs), list(each)) if boxed else body(TreeContext(ctx, inputs), *each)
        models = inputs.models()
        given = exact_gradients(cls, result, len(models))
        flat = [_gradients(cls, method, i, m, g) for i, (m, g) in enumerate(zip(models, given, strict=True))]
        return (None, *(leaf for leaves in flat for leaf in leaves))

    return once_differentiable(backward) if once else backward


def _gradients(cls: Any, method: Any, argument: int, model: Any, value: Any) -> list[Any]:
    """The gradients of one argument, leaf by leaf."""
    path, what = f"args[{argument}]", "the gradient"
    with _named(cls, "backward", method, what, path):
        leaves = leaves_like(model, value, path, lambda v: v is None)
        for leaf, at in zip(leaves, paths_of(model, path), strict=True):
            if leaf is not None and not isinstance(leaf, Tensor):
                raise Misfit(at, described(leaf), "a tensor or None")
    return leaves


class _named:
    """Turns a Misfit into a TreeError that names method, leaf and place."""

    def __init__(self, cls: Any, method: str, body: Any, what: str, model: str) -> None:
        self.facts = {"function": cls.__name__, "method": method, "what": what, "model": model}
        self.body = body

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, Misfit):
            path, got, expected = error.args
            facts = {**self.facts, "path": f"{self.facts['what']} of {path}", "got": got, "expected": expected}
            raise TreeError(where=method_place(self.body), **facts) from None


def _jvp(cls: Any) -> Any:
    @_around(cls.jvp)
    def jvp(ctx: Any, *tangents: Any) -> Any:
        inputs, outputs = _trees(ctx)
        result = cls.jvp(TreeContext(ctx, inputs), *inputs.each(tangents[1:]))
        whole = result if outputs.several else (result,)
        with _named(cls, "jvp", cls.jvp, "the tangent", "output"):
            return (*leaves_like(outputs.models(), whole, "output", lambda v: v is None), None)

    return jvp


def _vmap(cls: Any) -> Any:
    @_around(cls.vmap)
    def vmap(info: Any, in_dims: Any, structure: Structure, *leaves: Any) -> Any:
        output, out_dims = cls.vmap(info, structure.each(in_dims[1:]), *structure.each(leaves))
        results, outputs = flatten_outputs(output)
        model = outputs([LEAF] * len(results))
        with _named(cls, "vmap", cls.vmap, "the batch axis", "output"):
            dims = leaves_like(model, out_dims, "output", lambda v: v is None or isinstance(v, int))
        return (*results, outputs), (*dims, None)

    return vmap


# ------------------------------------------------------------------ what the user gets
def compile_tree(target: Any, compiled: Compile) -> Any:
    """`target` with nested arguments and results; `compiled` is `compile` with the other options given."""
    legacy = torch.autograd.function.NestedIOFunction
    if isinstance(target, type) and issubclass(target, Function) and not issubclass(target, legacy):
        return _tree_class(target.__dict__.get("_fusegrad_user_class", target), compiled)
    if callable(target) and not isinstance(target, type):
        return _tree_function(target, compiled)
    return compiled(target)  # which says what is wrong with it


def _tree_class(cls: Any, compiled: Compile) -> type:
    flat = compiled(flat_class(cls))
    subclasses: dict[type, Any] = {}

    def begin_again(assigned: dict[str, Any]) -> None:
        nonlocal flat
        flat = compiled(flat_class(type(cls.__name__, (cls,), {**assigned, "__module__": cls.__module__})))
        itself[0]._fusegrad, itself[0]._fusegrad_flat = flat._fusegrad, flat  # type: ignore[attr-defined]

    itself: list[type] = []
    opening, setup = Opening(), uses_setup_context(cls)
    count = len(inspect.signature(cls.forward).parameters)

    def run(own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if own is not itself[0]:  # a subclass has methods of its own
            return subclasses.setdefault(own, subclasses.get(own) or _tree_class(own, compiled)).apply(*args, **kwargs)
        if kwargs or (setup and len(args) != count):
            args = bound(cls, args, kwargs)
        *results, outputs = flat.apply(*opening(args))
        return outputs(results)

    def within(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, structure = flatten(bound(cls, args, kwargs), True)
        *results, outputs = flat.apply.__func__._fusegrad_within((structure, *leaves), {})
        return outputs(results)

    in_graphs = of_forms(within)
    body = {n: getattr(cls, n) for n in ("__doc__", "__module__", "__qualname__")}
    body["apply"] = shown_nested(itself, name_in_graphs(cls, in_graphs), run)
    facts = {"_fusegrad": flat._fusegrad, "_fusegrad_flat": flat, "_fusegrad_user_class": cls}
    kept = {"_fusegrad_call": in_graphs, "_fusegrad_begin_again": staticmethod(begin_again)}
    itself.append(joined(TreeMeta, type(cls))(cls.__name__, (cls,), {**facts, **kept, **body}))
    return itself[0]


class TreeMeta(FunctionMeta):
    """FunctionMeta by another name, for Dynamo; a method that is assigned to the compiled class is compiled."""

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        own = vars(cls)
        if is_public(name) and "_fusegrad_begin_again" in own:
            own["_fusegrad_begin_again"].__func__({n: v for n, v in own.items() if is_public(n)})


class Opening:
    """Nested arguments as (structure, *leaves), by functions that were written for the forms that came last."""

    KEPT = 8

    def __init__(self) -> None:
        self.openers: tuple[Callable[[Any], Any], ...] = ()

    def __call__(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        for opened in self.openers:
            if (found := opened(args)) is not MISS:
                return found  # type: ignore[no-any-return]
        leaves, structure = flatten(args, True)
        if (written := opener(args, structure)) is not None:
            self.openers = (written, *self.openers[: self.KEPT - 1])
        return (structure, *leaves)


def call_flat(apply: Callable[..., Any], args: Sequence[Any]) -> Any:
    """A flat `apply` on nested arguments, its result nested again."""
    leaves, structure = flatten(tuple(args), True)
    *results, outputs = apply(structure, *leaves)
    return outputs(results)


def arguments(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of the Function behind `target`: flat where it is compiled with pytree=True."""
    if not hasattr(target, "_fusegrad_flat"):
        return args
    leaves, structure = flatten(args, True)
    return (structure, *leaves)


def bound(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments by position; with keywords, and in setup_context style always, the defaults are filled in."""
    setup = uses_setup_context(cls)
    if not kwargs and not setup:
        return args
    parameters = list(inspect.signature(cls.forward).parameters.values())[0 if setup else 1 :]
    found = inspect.Signature(parameters).bind(*args, **kwargs)
    found.apply_defaults()
    if found.kwargs:
        raise KeywordOnlyError.of(cls.__name__, found.kwargs)
    return found.args


def _tree_function(fn: Callable[..., Any], compiled: Compile) -> Callable[..., Any]:
    def flat(structure: Structure, *leaves: Any) -> Any:
        results, outputs = flatten_outputs(fn(*structure.each(leaves)))
        return (*results, outputs)

    named = {"__name__": getattr(fn, "__name__", "f"), "__module__": fn.__module__, "__doc__": fn.__doc__}
    flat.__dict__.update(__wrapped__=fn, __signature__=inspect.signature(flat))
    for name, value in named.items():
        setattr(flat, name, value)
    fast = compiled(flat)
    signature = inspect.signature(fn)

    def positional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        found = signature.bind(*args, **kwargs)
        found.apply_defaults()
        if found.kwargs:
            raise KeywordOnlyError.of(fn.__name__, found.kwargs)
        return found.args

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call_flat(fast, positional(args, kwargs))

    def within(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call_flat(lambda *given: fast._fusegrad_within(given, {}), positional(args, kwargs))

    in_graphs = of_forms(within)
    nested = function_shown_nested(fn, name_in_graphs(fn, in_graphs), run)
    vars(nested).update(_fusegrad=fast._fusegrad, _fusegrad_flat=fast, _fusegrad_call=in_graphs)
    return nested
