"""Generates the source of an inline-cache entry: guards, the captured forward at these sizes, the autograd node.

The node is the class's generated Function but for two things: its forward is straight, and so is its backward once
gradients of one layout came twice. What does not fit them goes the way that serves every call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import Function

from ...tracer.capture.capture import capture_lock
from ...tracer.containers import DEPTH as ARGUMENT_DEPTH
from ...tracer.function import rebind
from ...tracer.methods import backward_method, takes_boxed_gradients
from ...tracer.torch_private import (
    WITHOUT_TANGENTS,
    dict_of_context,
    direct_apply,
    function_modes,
    hooks_are_active,
    no_autocast,
    saved_tensors_of,
    share_memory,
)
from ..autograd.node import make_node, write_context
from ..autograd.saved_lists import kept_by
from ..capture.guards import backward_guard_failure
from ..capture.outputs import is_as_strided, rebuild_output, view_like, view_of, with_aliases
from ..compiled.backward import run_backward
from ..execution.source_writer import SourceWriter, row
from ..fallback.answer import Fault, backward_failed, is_fault, users_backward
from ..fallback.effects import with_effects_noted
from ..settings.config import KERNEL_BACKENDS, handed_over
from ..specialize.compiled_backward import BackwardCall
from ..specialize.residuals import ResidualPlan, executable_key
from ..specialize.specialization import Specialization
from ..values.gradient_layouts import canonical_layout, layout_class
from ..values.sizes import BoundSizes
from .argument_forms import MISS, form_conditions, named_holes
from .guard_codegen import (
    ABSENT,
    DERIVATIVES,
    Unchanging,
    guard_custom_attributes,
    guard_lasting_state,
    guard_methods,
    guard_reads,
    guard_state,
    guard_tensors,
    read_expression,
)
from .inline_cache import Entry
from .plan_codegen import write_run

if TYPE_CHECKING:
    from ..compiled.compiled import Compiled

Tensor = torch.Tensor
LAYOUTS = 4
"""Layouts of gradients that one node's backward is written for."""
TWICE = 2
ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype)


def write_entry(
    compiler: Compiled, spec: Specialization, key: Any, args: tuple[Any, ...], complete: Sequence[Any]
) -> Entry | None:
    """The function for calls like this one, of which there were some; None where there can be none.

    key: of the node that serves them. complete: the arguments with defaults filled in.
    """
    captured = spec.captured
    if captured.opaque or captured.unversioned_inputs or function_modes():
        return None
    # Names for all that is given, then a condition on each; without one that can be written there is no entry.
    text, call = SourceWriter(), EntryCall(compiler, spec, key, complete)
    parameters = [f"a{i}" for i in range(len(args))]
    defaults = [text.constant(a, "default") for a in complete[len(args) : captured.count]]
    names = call.with_contents([*parameters, *defaults])
    if not captured.slots or names is None:
        return None
    alike = guard_tensors(text, _tensors(names, complete), captured.reads)
    if alike is None:
        return None
    conditions = [*call.guard_forms(text, names), *alike, *call.conditions(text, names), *guard_state(text)]
    # A call that misses any of them goes the general way.
    with text.block(f"if len(args) == {len(args)}:"):
        text.add(f"{row(parameters)}= args")
        with _write_guarded(text, conditions, f"return {text.constant(MISS, 'MISS')}"):
            call.write_result(text, names, len(args))
    text.add(f"return {text.constant(MISS, 'MISS')}")
    return text.function("ready", ("args",))


@contextmanager
def _write_guarded(text: SourceWriter, conditions: Sequence[str], otherwise: str) -> Iterator[None]:
    """The lines within run where the conditions hold; `otherwise` where one of them cannot be asked any more."""
    with text.block("try:"):
        text.add(f"fits = ({_BREAK.join(conditions)})")
    with text.block(f"except {ABSENT}:"):
        text.add(otherwise)
    with text.block("if fits:"):
        yield


_BREAK = " and "


def _tensors(names: Sequence[str], values: Sequence[Any]) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in zip(names, values, strict=False) if isinstance(value, Tensor)]


@dataclass(frozen=True)
class ServedCall:
    """The way in which a call was served, for its backward: facts alone, since this lives as long as the class does."""

    compiler: Compiled
    spec: Specialization
    backend: str
    sizes: BoundSizes
    residual_plan: ResidualPlan | None
    saved: int


class EntryCall:
    """The facts of a call while its text is written: its arguments, what serves it, what is kept for backward."""

    def __init__(self, compiler: Compiled, spec: Specialization, key: Any, arguments: Sequence[Any]) -> None:
        captured = spec.captured
        self.compiler, self.spec, self.key, self.arguments = compiler, spec, key, arguments
        _, self.observed, self.own = key
        self.sizes = captured.sizes(arguments)
        self.backend, self.residual_plan = compiler.prepare(spec, key, self.sizes)
        self.executable = spec.executable(self.backend, self.residual_plan)
        self.saved = captured.forward.saved if self.residual_plan is None else self.residual_plan.places
        self.needs_node = torch.is_grad_enabled() and any(captured.forward.needs_input_grad)

    def with_contents(self, names: Sequence[str]) -> list[str] | None:
        """The names of the user's arguments, then those of the tensors in their containers; None where one has none."""
        count, inner = self.spec.captured.count, dict[int, str]()
        for name, value in zip(names, self.arguments[:count], strict=True):
            if not isinstance(value, Tensor):
                if (pairs := named_holes(name, value)) is None:
                    return None
                inner.update({hole.key: expression for hole, expression in pairs})
        return [*names, *(inner[at] for at in range(count, len(self.arguments)))]

    def guard_forms(self, text: SourceWriter, names: Sequence[str]) -> Iterator[str]:
        """Guard what is no tensor: values are what they were, containers by their form."""
        for name, value in zip(names, self.arguments[: self.spec.captured.count], strict=False):
            if not isinstance(value, Tensor) and not (name.startswith("default") and isinstance(value, ATOMS)):
                yield from form_conditions(text, name, value, ARGUMENT_DEPTH)

    def conditions(self, text: SourceWriter, names: Sequence[str]) -> Iterator[str]:
        """Guard what is read outside, the methods; and whether hooks pack saved tensors, where it matters."""
        captured = self.spec.captured
        yield from guard_reads(text, captured.reads)
        yield from guard_methods(text, self.compiler.user.original)
        yield from guard_custom_attributes(text, [names[i] for i in captured.slots], captured.reads.custom_attributes)
        if self.observed or self.residual_plan is not None or captured.forward.stacks:
            yield f"{'' if self.observed else 'not '}{text.constant(hooks_are_active, 'hooks')}()"
        if not self.own:
            yield f"not {text.constant(self.spec.backward, 'backward')}.failed"
        if any(captured.forward.needs_input_grad):
            yield f"{text.constant(torch.is_grad_enabled, 'grad_mode')}() is {torch.is_grad_enabled()}"
        if captured.writes_inputs:
            yield f"not {text.constant(share_memory, 'share_memory')}(({row(names)}))"

    # ------------------------------------------------------------------ forward
    def write_result(self, text: SourceWriter, names: Sequence[str], count: int) -> None:
        """The last lines: through a node of autograd, or straight where it would have nothing to follow."""
        spec, captured = self.spec, self.spec.captured
        marks = captured.writes_inputs or captured.skip or captured.forward.tensor_attributes or captured.draws
        if self.needs_node or marks or self._is_recorded():
            text.add(f"return {text.constant(self._node(), 'node')}(*args, {row(names[count : spec.captured.count])})")
            return
        outputs, hidden = self._write_forward(text, names)
        text.add(f"return {self._returned(text, names, outputs, hidden)}")

    def _is_recorded(self) -> bool:
        """True where autograd would follow what is read from outside; within a node it does not."""
        lifted = self.spec.captured.lifted
        return torch.is_grad_enabled() and any(r.get().requires_grad for r in lifted if r is not None)

    def _write_forward(self, text: SourceWriter, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """The user's tensor outputs and the hidden ones, as names."""
        spec = self.spec
        inputs = [(names[i], self.arguments[i]) for i in spec.captured.slots]
        with _as_captured(text, spec):
            present = [r for r in spec.captured.lifted if r is not None]
            lifted = [(text.let("lifted", read_expression(text, r)), r.get()) for r in present]
            results = write_run(text, self.executable, inputs, lifted, self.sizes)
            n = len(spec.captured.forward.tensor_outputs)
            outputs, hidden = results[:n], results[n:]
            if spec.captured.skip:
                view = partial(self._write_alias, text)
                outputs = with_aliases(spec.captured.forward, outputs, [n for n, _ in inputs], hidden, view)
        return self._write_inner_views(text, outputs), hidden

    def _write_inner_views(self, text: SourceWriter, outputs: Sequence[str]) -> list[str]:
        """Make views, as autograd has them, of outputs of kernels that are views of values in between."""
        views = self.spec.captured.inner_views if self.executable.backend in KERNEL_BACKENDS else ()
        return [text.let("view", f"{o}.view_as({o})") if i in views else o for i, o in enumerate(outputs)]

    def _write_alias(self, text: SourceWriter, fake: Tensor, base: str, like: Tensor, tracked: bool) -> str:
        view = write_view(text, base, fake, self.sizes, like)
        return text.let("view", view if tracked else f"{view}.detach()")

    def _returned(self, text: SourceWriter, names: Sequence[str], outputs: Sequence[str], hidden: Sequence[str]) -> str:
        """The expression of what the user gets."""
        captured = self.spec.captured.forward
        objects = [rebind(o.value, self.sizes) for o in captured.outputs if o.kind == "object"]
        if not all(type(value) in ATOMS or isinstance(value, Unchanging) for value in objects):
            inputs, sizes = [names[i] for i in self.spec.captured.slots], text.constant(self.sizes, "sizes")
            pools = ", ".join(f"({row(part)})" for part in (outputs, inputs, hidden))
            return f"{text.constant(partial(rebuild_output, self.spec.captured), 'returned')}({pools}, {sizes})"
        tensors, plain = iter(outputs), iter(objects)
        parts = [text.constant(next(plain)) if o.kind == "object" else next(tensors) for o in captured.outputs]
        return f"({row(parts)})" if captured.is_tuple else parts[0]

    def _node(self) -> Callable[..., Any]:
        """`apply` of a generated Function of this call's own."""
        text, own = SourceWriter(), [f"a{i}" for i in range(self.spec.captured.count)]
        names = self.with_contents(own) or own
        outputs, hidden = self._write_forward(text, names)
        pools = {"input": [names[i] for i in self.spec.captured.slots], "output": outputs, "hidden": hidden}
        sizes, arguments = text.constant(self.sizes, "sizes"), f"({row(own)})"
        write_context(text, self.spec, self.saved, self.own, lambda p: pools[p.kind][p.index], sizes, arguments)
        text.add(f"return {self._returned(text, names, outputs, hidden)}")
        forward = text.function("forward", ("ctx", *own))
        node = make_node(self.compiler, self.spec, self.backend, self.residual_plan, self.own, forward)
        self._as_one_of_its_kind(node._backward_cls)
        return with_effects_noted(direct_apply(node), self.spec.captured)

    def _as_one_of_its_kind(self, backward: Any) -> None:
        """Give its nodes the identity of the shared Function's: compiled autograd does not tell them apart."""
        shared = getattr(self.spec.nodes.get(self.key), "__self__", None)
        if shared is not None:
            backward._autograd_function_id = shared._backward_cls._autograd_function_id
        if self.own:
            return
        backward._fusegrad_sizes = self.sizes  # for all of them, in place of a slot of each
        backward._fusegrad_patch = handed_over()  # a guard of the entry
        if not _is_delicate(self.compiler.user.cls):
            plan, count = self.residual_plan, len(self.saved)
            call = ServedCall(self.compiler, self.spec, self.backend, self.sizes, plan, count)
            backward._fusegrad_learns = BackwardLearner(call, backward)


@contextmanager
def _as_captured(text: SourceWriter, spec: Specialization) -> Iterator[None]:
    """Casts are part of the captured graph: within, autocast must not add its own."""
    if not spec.captured.under_autocast:
        yield
        return
    with text.block(f"with {text.constant(no_autocast, 'no_autocast')}():"):
        yield


def _is_delicate(cls: Any) -> bool:
    """True where torch calls the class's backward in another way than by its gradients, or refuses to."""
    both = cls.backward is not Function.backward and cls.vjp is not Function.vjp
    clears = getattr(cls, "clear_saved_tensors_on_access", False)
    return backward_method(cls) is None or both or clears or takes_boxed_gradients(cls)


class BackwardLearner:
    """Writes the backward of one node's class, once per layout of gradients that came twice."""

    def __init__(self, call: ServedCall, backward: Any) -> None:
        self.call, self.backward = call, backward
        self.counts: Counter[Any] = Counter()
        self.written_count = 0

    def __call__(self, residuals: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Sees what the general backward was given, after it ran."""
        if torch.is_grad_enabled() or self.written_count >= LAYOUTS or len(self.counts) > 2 * LAYOUTS:
            return
        layout = tuple(None if g is None else g.stride() for g in gradients)
        self.counts[layout] += 1
        if self.counts[layout] != TWICE:
            return
        with capture_lock:
            function = _write_backward(self.call, self.backward.apply, residuals, gradients)
            if function is not None:
                self.backward.apply = function
                self.written_count += 1


def _write_backward(
    call: ServedCall, otherwise: Callable[..., Any], residuals: Sequence[Any], gradients: Sequence[Any]
) -> Callable[..., Any] | None:
    """`apply` of a node for residuals and gradients like these; whatever does not fit is left to `otherwise`."""
    spec, sizes = call.spec, call.sizes
    entry = next(iter(spec.backward.other_entries(tuple(map(layout_class, gradients)))), None)
    if entry is None or entry.opaque or entry.unversioned_inputs or entry.draws or not entry.admits(sizes):
        return None
    executable = entry.executables.get(executable_key(call.backend, call.residual_plan))
    if executable is None or any(canonical_layout(g) is not g for g in gradients):
        return None
    # Tensors first: what cannot be asked of them leaves nothing to write.
    text = SourceWriter()
    gradient_names, residual_names = [f"g{i}" for i in range(len(gradients))], [f"r{i}" for i in range(len(residuals))]
    alike = guard_tensors(text, _tensors(gradient_names, gradients), spec.captured.reads, tracked=False)
    present = _tensors(residual_names, residuals)
    kept_alike = guard_tensors(text, present, tracked=False) if present else []
    if alike is None or kept_alike is None:
        return None
    # Then what stands around the call, each as it was when the general way served it.
    absent = [f"{name} is None" for name, g in zip(gradient_names, gradients, strict=True) if g is None]
    still = f"{text.constant(entry, 'entry')}.guards is {text.constant(entry.guards, 'guards')}"
    untouched = f"not {text.constant(dict_of_context, 'attributes')}(ctx)"
    off = f"not {text.constant(torch.is_grad_enabled, 'grad_mode')}()"
    plain = WITHOUT_TANGENTS[0].format(text.constant(WITHOUT_TANGENTS[1], "forward_ad"))
    outside = [*guard_reads(text, spec.captured.reads), *guard_methods(text, spec.captured.cls, DERIVATIVES)]
    outside += guard_lasting_state(text)
    # Objects that forward and backward share are looked at anew: the user may have changed them in between.
    if spec.captured.sharing is not None:
        changed = text.constant(spec.captured.sharing.changed_attribute, "changed")
        outside.append(f"{changed}(ctx._fusegrad_shared) is None")
    if spec.captured.reads.custom_attributes or spec.captured.reads.compares_identity:
        unasked = f"{text.constant(backward_guard_failure, 'unasked')}({text.constant(spec.captured.reads, 'reads')}"
        kept_alike.append(f"{unasked}, ({row(residual_names)}), ({row(gradient_names)})) is None")
    # Residuals are unpacked once and for all, since hooks count it: whatever comes after works on those.
    users = f"return {text.constant(otherwise, 'otherwise')}(ctx, {row(gradient_names)})"
    with _write_guarded(text, [off, untouched, plain, *alike, *absent, still, *outside], users):
        _write_unpacked(text, call, residual_names)
        with text.block("try:"):
            with text.block(f"if {_BREAK.join(kept_alike) or 'True'}:"):
                numbers = [(text.constant(sizes[s], "size"), sizes[s]) for s in spec.captured.backward_symbols]
                inputs = [*present, *numbers, *_tensors(gradient_names, gradients)]
                _write_gradients(text, call, entry, executable, inputs, gradient_names)
            # Residuals of another layout, which a hook may have handed back, take the general way.
            again = text.bind(_run_general, call, hint="general")
            text.add(f"return {again}(ctx, [{row(residual_names)}], ({row(gradient_names)}))")
        with text.block("except Exception as error:"):
            text.add(f"fault = {text.constant(_fault_of, 'fault_of')}(error)")
        # Out of the block above, so that the error and the memory that it held are gone.
        recovered = text.bind(_recover, call, hint="recovered")
        text.add(f"return {recovered}(ctx, fault, [{row(residual_names)}], ({row(gradient_names)}))")
    text.add(users)
    return text.function("apply", ("ctx", *gradient_names))


def _write_unpacked(text: SourceWriter, call: ServedCall, residual_names: Sequence[str]) -> None:
    """Names for the saved tensors, unpacked once, and for those among ctx's attributes."""
    saved = call.saved
    saved_tensors = "ctx.saved_tensors"
    if call.spec.captured.forward.stacks:
        saved_tensors = f"{text.constant(kept_by, 'kept')}(ctx, {text.constant(call.spec.captured, 'captured')})"
    elif call.residual_plan is not None:
        saved_tensors = f"{text.constant(saved_tensors_of, 'unpacked')}(ctx)"
    if saved:
        text.add(f"{row(residual_names[:saved])}= {saved_tensors}")
    if residual_names[saved:]:
        text.add(f"{row(residual_names[saved:])}= ctx._fusegrad_tensors")


def _write_gradients(
    text: SourceWriter,
    call: ServedCall,
    entry: Any,
    executable: Any,
    inputs: Sequence[tuple[str, Any]],
    gradient_names: Sequence[str],
) -> None:
    present = [r for r in entry.lifted if r is not None]
    with _as_captured(text, call.spec):
        lifted = [(text.let("lifted", read_expression(text, r)), r.get()) for r in present]
        results = write_run(text, executable, inputs, lifted, call.sizes)
    view = lambda fake, gradient: write_view(text, gradient, fake, call.sizes)  # noqa: E731
    text.add(f"return ({row(entry.with_passed_gradients(results, gradient_names, executable.backend, view))})")


def write_view(text: SourceWriter, name: str, view: Tensor, sizes: Any, of: Tensor | None = None) -> str:
    """The expression of a view of the tensor of this name; `view` is a fake of it, and `of` one of that tensor."""
    if not is_as_strided(view, of):
        return f"{text.constant(partial(view_like, view, sizes=sizes, of=of), 'view')}({name})"
    shape, strides, offset = view_of(view, sizes)
    parts = text.constant(shape, "shape"), text.constant(strides, "strides")
    start = f"{name}.storage_offset()" + (f" + {offset}" if offset else "")
    return f"{name}.as_strided({', '.join(parts)}, {start})"


def _run_general(call: ServedCall, ctx: Any, residuals: Sequence[Any], gradients: Sequence[Any]) -> Any:
    """The general way for gradients whose residuals are not as forward left them (a hook's, or changed since)."""
    run = BackwardCall(call.backend, residuals, call.sizes, gradients, call.residual_plan, ctx)
    return run_backward(call.compiler, call.spec, run)


def _fault_of(error: Exception) -> Fault:
    """Return what is kept of a fault of ours; raises the error where it is none."""
    if not is_fault(error):
        raise error
    return Fault.of(error)


def _recover(call: ServedCall, ctx: Any, fault: Fault, residuals: Sequence[Any], gradients: Sequence[Any]) -> Any:
    """The user's own backward, on residuals that are unpacked already, after a fault of ours."""
    results = users_backward(call.compiler, call.spec, call.residual_plan, ctx, residuals, gradients)
    backward_failed(call.compiler, call.spec, fault, gradients)
    return results
