"""The Function that runs when no transform is active: ctx style, over the captured graphs.

It is the real thing: version checks, saved-tensor hooks, `grad_fn` names and errors are autograd's own. Its forward and
backward only execute what was captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.autograd.function import Function, once_differentiable

from ...ir.program import ValueRef
from ...tracer.capture.capture import capture_lock
from ...tracer.containers import open_containers
from ...tracer.function import ForwardCapture
from ...tracer.methods import backward_method, is_once_differentiable, takes_boxed_gradients
from ...tracer.torch_private import direct_apply, saved_tensors_can_be_told_apart, saved_tensors_of
from ..capture.captured import CapturedFunction
from ..capture.ctx_attributes import node_namespace
from ..capture.outputs import rebuild_output
from ..capture.user_methods import ctx_attributes
from ..compiled.function_class import node_class, shown
from ..execution.source_writer import SourceWriter, row
from ..fallback.effects import with_effects_noted
from ..settings.config import handed_over
from ..specialize.residuals import ResidualPlan
from ..specialize.specialization import Specialization
from .backward import backward as backward_of
from .saved_lists import are_listed, users_expression, users_of

if TYPE_CHECKING:
    from ..compiled.compiled import Compiled


def make_node(
    compiler: Compiled,
    spec: Specialization,
    backend: str,
    chosen: ResidualPlan | None,
    own_backward: bool = False,
    forward: Callable[..., Any] | None = None,
) -> Any:
    """A ctx-style Function over the captured graphs. own_backward: the user's, on a ctx as forward leaves it.

    forward: in place of the one that serves any sizes.
    """
    captured = spec.captured
    forward, cls = forward or _forward(spec, backend, chosen, own_backward), compiler.user.cls
    method = backward_method(cls)
    if method is not None and is_once_differentiable(method):
        method = method.__wrapped__  # type: ignore[attr-defined]  # `_body` wraps it again
    if own_backward and method is not None:
        node = node_class(cls, (Function,), _body(cls, forward, shown(_of_the_present(cls))))
        return _showing_what_was_saved(node, captured, None)
    body = _body(cls, forward, _backward(compiler, spec, backend, chosen, method))
    node = node_class(cls, (Function,), body, node_namespace(captured))
    if not captured.forward.tensor_attributes:
        node._backward_cls._fusegrad_tensors = ()  # for all of them, in place of a slot of each
    return _showing_what_was_saved(node, captured, chosen)


def _showing_what_was_saved(node: Any, captured: CapturedFunction, chosen: ResidualPlan | None) -> Any:
    """The node, whose `saved_tensors` are those that the user saved, whatever is kept in their place."""
    forward = captured.forward

    def saved_tensors(ctx: Any) -> tuple[Any, ...]:
        kept = saved_tensors_of(ctx)
        originals = kept if chosen is None else tuple(chosen.originals(kept, ctx)[: len(forward.saved)])
        return users_of(ctx, captured, originals)

    if are_listed(captured):
        node._backward_cls._fusegrad_listed = True
    if saved_tensors_can_be_told_apart and (forward.stacks or chosen is not None):
        node._backward_cls.saved_tensors = property(saved_tensors)
    return node


def _of_the_present(cls: type) -> Callable[..., Any]:
    """The user's backward as it is when it runs: another one may have been put in its place since forward."""

    def backward(ctx: Any, *gradients: Any) -> Any:
        method: Any = backward_method(cls)
        return (method.__wrapped__ if is_once_differentiable(method) else method)(ctx, *gradients)

    return backward


def _forward(spec: Specialization, backend: str, chosen: ResidualPlan | None, own_backward: bool) -> Callable[..., Any]:
    """forward of the generated Function, for any sizes that the specialization admits."""
    captured = spec.captured
    text = SourceWriter()
    at, plan = text.constant(spec, "spec"), text.constant(chosen, "chosen")
    args = "given"
    if len(captured.arguments) > captured.count:  # tensors in containers are arguments, too
        args = text.let("args", f"{text.constant(open_containers, 'opened')}(given)")
    data, rebuild = text.constant(captured, "captured"), text.constant(rebuild_output, "rebuild")
    sizes = text.let("sizes", f"{data}.sizes({args})")
    if not own_backward:  # before forward may write to an argument: a fault of ours is answered by eager until then
        text.add(f"ctx._fusegrad_patch = {text.constant(handed_over, 'handed_over')}()")
    text.add(f"outputs, hidden = {at}.run_forward({args}, {backend!r}, {plan}, {sizes})")
    inputs = [f"{args}[{i}]" for i in captured.slots]
    names: dict[str, Callable[[int], str]]
    names = {"input": inputs.__getitem__, "output": "outputs[{}]".format, "hidden": "hidden[{}]".format}
    saved = captured.forward.saved if chosen is None else chosen.places
    write_context(text, spec, saved, own_backward, lambda p: names[p.kind](p.index), sizes, "given")
    if not own_backward:
        text.add(f"ctx._fusegrad_sizes = {sizes}")
    text.add(f"return {rebuild}({data}, outputs, ({row(inputs)}), hidden, {sizes})")
    return text.function("forward", ("ctx", "*given"))


def write_context(
    text: SourceWriter, spec: Specialization, saved: Sequence[ValueRef | None], own_backward: bool,
    name_of: Callable[[ValueRef], str], sizes: str, args: str,
) -> None:  # fmt: skip
    """Write the lines that fill ctx: saved tensors, attributes of the user's, and the marks of calls on ctx.

    name_of: an input, an output or a hidden tensor. sizes, args: the names of these, args as they were given.
    """

    def picked(places: Iterable[ValueRef | None]) -> str:
        return row(["None" if p is None else name_of(p) for p in places])

    captured, sharing = spec.captured.forward, spec.captured.sharing
    if saved:
        text.add(f"ctx.to_save = {users_expression(text, spec.captured, f'({picked(saved)})')}")
    tensors = f"[{picked(captured.tensor_attributes.values())}]"
    # The user's own backward reads ctx as forward left it; a captured one is given its tensors by position.
    if own_backward:
        attributes = text.constant(partial(ctx_attributes, spec.captured), "attributes")
        text.add(f"vars(ctx).update({attributes}({tensors}, {sizes}))")
    elif captured.tensor_attributes:
        text.add(f"ctx._fusegrad_tensors = {tensors}")
    if sharing is not None:
        shared = f"{text.constant(sharing.objects_of, 'shared')}({args})"
        named = f"vars(ctx).update({text.constant(sharing.attributes, 'named')}({shared}))"
        text.add(named if own_backward else f"ctx._fusegrad_shared = {shared}")
    for mark, places in _marks_of(captured):
        if places:
            text.add(f"ctx.{mark}({picked(places)})")
    if not captured.materialize_grads:
        text.add("ctx.set_materialize_grads(False)")
    if not captured.materialize_non_diff_grads:
        text.add("ctx._materialize_non_diff_grads = False")


def _backward(
    compiler: Compiled,
    spec: Specialization,
    backend: str,
    chosen: ResidualPlan | None,
    method: Callable[..., Any] | None,
) -> Callable[..., Any]:
    def backward(ctx: Any, *gradients: Any) -> Any:
        return backward_of(compiler, spec, backend, chosen, ctx, gradients)

    def boxed(ctx: Any, gradients: list[Any]) -> Any:
        arguments = tuple(gradients)
        gradients.clear()
        return backward_of(compiler, spec, backend, chosen, ctx, arguments)

    if takes_boxed_gradients(compiler.user.cls):
        return shown(boxed)
    alone = compiler.fits_a_graph and chosen is None and not spec.captured.forward.tensor_attributes
    return shown(backward, method if alone and not spec.captured.forward.constants else None)


def _body(cls: type, forward: Any, backward: Any) -> dict[str, Any]:
    """The names of a generated class: what runs, and whatever of the user's class torch looks at."""
    body: dict[str, Any] = {
        "forward": staticmethod(forward),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    method = backward_method(cls)
    if method is not None:
        wrap = is_once_differentiable(method) and backward is not method
        body["backward"] = staticmethod(once_differentiable(backward) if wrap else backward)
        if all(getattr(cls, n) is not getattr(Function, n) for n in ("backward", "vjp")):
            body["vjp"] = body["backward"]  # torch refuses the two together, at backward time
    if cls._compiled_autograd_key is not Function._compiled_autograd_key:  # type: ignore[attr-defined]
        users_key = cls._compiled_autograd_key  # type: ignore[attr-defined]
        body["_compiled_autograd_key"] = staticmethod(lambda ctx: (*users_key(ctx), ctx._autograd_function_id))
    flags = ("clear_saved_tensors_on_access", "boxed_grads_call")
    return body | {flag: getattr(cls, flag) for flag in flags if hasattr(cls, flag)}


def _marks_of(forward: ForwardCapture) -> list[tuple[str, list[Any]]]:
    """The calls on ctx that forward made, with the places of what they were given."""
    return [
        ("save_for_forward", forward.saved_for_forward),
        ("mark_dirty", list(forward.dirty)),
        ("mark_non_differentiable", list(forward.non_differentiable)),
    ]


def node_of(
    compiler: Compiled, specialization: Specialization, key: tuple[str, bool, bool], args: Sequence[Any]
) -> Callable[..., Any]:
    """`apply` of the generated Function of a specialisation."""
    if key not in specialization.nodes:
        with capture_lock:
            _add_node(compiler, specialization, key, args)
    apply: Callable[..., Any] = specialization.nodes[key]
    return apply


def _add_node(
    compiler: Compiled, specialization: Specialization, key: tuple[str, bool, bool], args: Sequence[Any]
) -> None:
    if key in specialization.nodes:  # another thread was first
        return
    backend, chosen = compiler.prepare(specialization, key, specialization.captured.sizes(args))
    node = make_node(compiler, specialization, backend, chosen, key[2])
    specialization.nodes[key] = with_effects_noted(direct_apply(node), specialization.captured)
