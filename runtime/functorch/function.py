"""The Function that runs under torch.func: setup_context style, with the values in between as hidden outputs.

What eager refuses there (old-style classes, saved intermediates) becomes whole: a hidden output's gradient flows back
through forward, so that second order is right and not silently partial. Under vmap all three rules are batched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch.autograd.function import Function

from ...ir.errors import FusegradError
from ...ir.program import ValueRef
from ...tracer.capture.capture import capture_lock, is_capturing, writes_through_data
from ...tracer.capture.context import BackwardContext
from ...tracer.containers import Hole, closed
from ...tracer.function import rebind
from ...tracer.lowering.functional import without_writes, writes
from ...tracer.methods import as_tuple, backward_method
from ...tracer.torch_private import (
    below_forward_mode,
    can_work_below,
    forward_levels,
    forward_mode_is_active,
    levels_active,
    memory_of,
    no_tracing_functions,
    plain_tensors,
    share_memory,
)
from ...tracer.trace import CaptureError
from ..capture.captured_backward import gradients_per_output, predicted_kinds, reduce_to_argument
from ..capture.guards import is_float
from ..capture.outputs import is_as_strided, rebuild_output, tensor_at, view_of
from ..capture.user_methods import ctx_attributes, hidden_of_user, run_user_backward, run_user_forward
from ..compiled.traceability import switches_grad_mode
from ..execution.aten import reference
from ..fallback.answer import Fault, is_fault
from ..settings.config import KERNEL_BACKENDS
from ..specialize.linearity import (
    CoarsestEps,
    IgnoreDetach,
    NonLinearBackward,
    not_transposed,
    probe_tensor,
    require_linear,
)
from ..specialize.randomness import why_not_differentiated
from ..values.sizes import BoundSizes
from ..values.tensors import zeros
from .batching.ir_rules import Lowered
from .jvp_unit import CallingUnit
from .own_rules import NestedForwardMode, PromisedJvp
from .transposed_jvp import tangents_of
from .unit import VALUES, BackwardUnit, OutDim, TransformableGraph, batchable, lane, own_memory, present_under_vmap

if TYPE_CHECKING:
    from ..capture.captured_backward import BackwardEntry
    from ..compiled.compiled import Compiled
    from ..specialize.specialization import Specialization

Tensor = torch.Tensor
Dims = tuple[int | None, ...]
Lanes = tuple[tuple[int, ...], tuple[int, ...]]
"""How many lanes there are along each batch axis, and how far apart they are in memory."""


def functorch_function_of(compiler: Compiled, specialization: Specialization, backend: str) -> Any:
    """The one such Function of a specialisation on a backend."""
    copies = _has_no_place_for_tangents(specialization) and forward_mode_is_active() and not compiler.writes("jvp")
    key = (backend, "whole", copies)
    if key not in specialization.nodes:
        specialization.nodes.setdefault(key, FunctorchFunction(compiler, specialization, backend, copies).function())
    return specialization.nodes[key]


def _has_no_place_for_tangents(spec: Specialization) -> bool:
    """Whether some output is a view, or repeats elements: a tangent that is derived is no such thing."""
    captured = spec.captured
    made = (*captured.forward.fake_outputs, *captured.forward.fake_hidden)
    return bool(captured.skip) or any(isinstance(step, int) and step == 0 for o in made for step in o.stride())


def why_not_transformable(compiler: Compiled, spec: Specialization) -> str | None:
    """Why torch.func gets the user's own class; None where it gets the compiled one."""
    forward = spec.captured.forward
    if spec.captured.writes_inputs and (forward.hidden_count or backward_method(compiler.cls) is None):
        return "it writes to an argument and saves an intermediate, which torch.func differentiates"
    pushed = compiler.derive_jvp == "forward" and forward_mode_is_active() and not compiler.writes("jvp")
    if (why := why_not_differentiated(spec, pushed or backward_method(compiler.cls) is None)) is not None:
        return why
    if len(levels_active()) > 1 and _backward_writes_through_data(spec):
        return "its backward writes through `.data`, of which torch.func hears at one of its levels alone"
    if forward_mode_is_active() and switches_grad_mode(compiler.cls):
        return "it turns the grad mode off or on, which forward mode does not heed"
    if forward.returns_hidden and compiler.writes("vmap"):
        return "it returns a container with tensors, of which its own vmap tells nothing"
    if not forward.tensor_outputs and compiler.writes("vmap"):
        return "it returns no tensor, and what its own vmap returns is all that there is"
    return None


def _backward_writes_through_data(spec: Specialization) -> bool:
    entry = next((e for e in spec.backward.entries.values() if not isinstance(e, CaptureError)), None)
    return entry is not None and writes_through_data(entry.trace.graph_module)


class FunctionRules:
    """forward, backward and jvp of a Function as units, over the arguments of its specialisation.

    forward_unit: tensor arguments -> (user's tensors, hidden tensors, what forward made of arguments that it writes)
    backward_for(gradients): (residuals, sizes, one gradient per user output) -> one gradient per argument
    tangent_unit(mask): (residuals, sizes, outputs, the tangents that are there) -> tangents of the user's tensors
    """

    forward_unit: TransformableGraph
    pushed_unit: TransformableGraph  # the same, of which forward mode is derived
    copies: bool  # whether no result may be a view

    def __init__(self, compiler: Compiled, spec: Specialization) -> None:
        captured = spec.captured
        self.compiler, self.spec = compiler, spec
        self.visible = len(captured.forward.tensor_outputs)
        self.made = self.visible + captured.forward.hidden_count
        self.tracked = sum(i < captured.count for i in captured.slots)  # tensors from inside containers are not
        self.symbols = sorted(captured.binder.sources, key=str)
        self.batches: dict[Any, Batched] = {}
        self._function: Any = None

    def backward_for(self, gradients: Sequence[Any]) -> TransformableGraph:
        raise NotImplementedError

    def tangent_unit(self, mask: tuple[bool, ...]) -> TransformableGraph:
        raise NotImplementedError

    def run_forward(self, args: Sequence[Any]) -> tuple[Any, ...]:
        raise NotImplementedError

    def sizes_of(self, inputs: Sequence[Any]) -> dict[Any, int]:
        raise NotImplementedError

    def lanes_of(self, index: int, tensor: Tensor) -> Lanes | None:
        """Of a tensor argument; None where it is not mapped along every batch axis."""
        return (), ()

    def function(self) -> Any:
        """The Function of these rules, the same at each call."""
        if self._function is None:
            self._function = self._made()
        return self._function

    def _made(self) -> Any:
        names = ("forward", "setup_context", "backward", "jvp", "vmap")
        body: dict[str, Any] = {name: staticmethod(getattr(self, name)) for name in names}
        if self.compiler.writes("vmap"):
            body["generate_vmap_rule"] = self.compiler.cls.generate_vmap_rule  # type: ignore[attr-defined]  # torch raises
        return type(self.spec.captured.name, (Function,), body)

    # ------------------------------------------------------------------ forward
    def forward(self, *args: Any) -> tuple[Any, ...]:
        return self.run_forward(args)

    def setup_context(self, ctx: Any, inputs: Sequence[Any], output: Sequence[Any]) -> None:
        captured = self.spec.captured
        tensors = captured.tensors_of(inputs)
        outputs, hidden = output[: self.visible], output[self.visible :]

        def at(place: ValueRef | None) -> Any:
            return tensor_at(place, tensors, outputs, hidden)

        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*map(at, captured.residual_places), *tensors)
        ctx.save_for_forward(*map(at, self.jvp_places), *tensors)
        if self.dirty_outputs():
            ctx.mark_dirty(*map(at, captured.forward.dirty))
        integers = [o for o in output if not is_float(o)]
        fixed = [*map(at, captured.forward.non_differentiable), *(output[i] for i in self._fixed)]
        if marked := [*fixed, *integers, *self.constants_among(hidden)]:
            ctx.mark_non_differentiable(*marked)
        ctx.likes = [(o.shape, o.dtype, o.device) for o in output]
        ctx.sizes = self.sizes_of(tensors)

    def constants_among(self, hidden: Sequence[Any]) -> Sequence[Any]:
        """What forward kept and nobody differentiates."""
        return ()

    @property
    def jvp_places(self) -> list[ValueRef | None]:
        """What jvp reads: what the user's own asks for, else what his backward does."""
        captured = self.spec.captured
        if not self.compiler.writes("jvp"):
            return captured.residual_places
        return [*captured.forward.saved_for_forward, *captured.forward.tensor_attributes.values()]

    # ------------------------------------------------------------------ reverse
    def backward(self, ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        kept = ctx.saved_tensors
        try:
            return self._backward(ctx, kept, gradients)
        except Exception as error:
            if not is_fault(error):
                raise
            fault = Fault.of(error)
        results = self._backward(ctx, kept, gradients, True)
        self.compiler.derivative_failed(fault, gradients)
        return results

    def _backward(
        self, ctx: Any, kept: Sequence[Any], gradients: Sequence[Any], as_written: bool = False
    ) -> tuple[Any, ...]:
        captured = self.spec.captured
        n = len(captured.residual_places)
        residuals, inputs = kept[:n], kept[n:]
        if not as_written:
            self.compiler.require_backward(self.spec)
        if backward_method(self.compiler.cls) is None:
            return self._derived_backward(inputs, gradients)
        given, hidden = gradients[: self.visible], gradients[self.visible :]
        result: list[Any] = [None] * len(captured.arguments)
        if any(g is not None for g in given) or not any(g is not None for g in hidden):
            full = self._per_output(ctx, given)
            sizes = [ctx.sizes[s] for s in self.symbols]
            run = self.as_written if as_written else self.compiled
            result[: captured.count] = run(residuals, sizes, full)
        if any(g is not None for g in hidden):
            self._add_hidden(result, inputs, hidden)
        return tuple(result)

    def compiled(self, residuals: Sequence[Any], sizes: Sequence[Any], full: Sequence[Any]) -> Sequence[Any]:
        """The user's backward, from kernels."""
        return self.backward_for(full)(*residuals, *sizes, *full)

    def as_written(self, residuals: Sequence[Any], sizes: Sequence[Any], full: Sequence[Any]) -> Sequence[Any]:
        """The user's backward itself."""
        return self.backward_for(full).as_written([*residuals, *sizes, *full])

    def _per_output(self, ctx: Any, given: Sequence[Any]) -> list[Any]:
        """One gradient per user output: zeros where the user's backward expects them, None for plain objects."""
        if self.spec.captured.forward.materialize_grads:
            given = [zeros(s) if g is None else g for g, s in zip(given, ctx.likes, strict=False)]
        return gradients_per_output(self.spec.captured, given)

    def _derived_backward(self, inputs: Sequence[Any], gradients: Sequence[Any]) -> tuple[Any, ...]:
        """The derivative of forward itself, where the user wrote forward alone."""
        if self.compiler.cls.jvp is not Function.jvp:  # type: ignore[attr-defined]
            Function.backward(None, *gradients)  # his jvp may say otherwise: torch's own error
        result: list[Any] = [None] * len(self.spec.captured.arguments)
        self._add(result, self.forward_unit.pullback(inputs, gradients))
        return tuple(result)

    def _add_hidden(self, result: list[Any], inputs: Sequence[Any], hidden: Sequence[Any]) -> None:
        """The second-order contribution of values that forward kept: their gradient goes back through forward."""
        self._add(result, self.forward_unit.pullback(inputs, [*[None] * self.visible, *hidden]))

    def _add(self, result: list[Any], gradients: Sequence[Any]) -> None:
        """Gradients of the tensor arguments, added to what is there."""
        for slot, gradient in zip(self.spec.captured.slots[: self.tracked], gradients, strict=False):
            if gradient is not None:
                result[slot] = gradient if result[slot] is None else result[slot] + gradient

    # ------------------------------------------------------------------ forward mode
    def jvp(self, ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        """The user's own, else the transpose of backward in its gradients: a custom gradient is honoured here too."""
        n = len(self.jvp_places)
        kept, inputs = ctx.saved_tensors[:n], ctx.saved_tensors[n:]
        tangents = tangents[: self.spec.captured.count]
        moving = [tangents[i] for i in self.spec.captured.slots[: self.tracked]]
        moving += [None] * (len(inputs) - self.tracked)
        if self.compiler.writes("jvp"):
            visible = self.of_tensors(self._users_tangents(kept, ctx.sizes, tangents))
        elif self.compiler.derive_jvp is False:
            return tuple(Function.jvp(ctx, *tangents))  # torch's own error
        elif self.compiler.derive_jvp == "forward" or self._has_no_backward_of_its_own:
            return self._pushed(inputs, moving)
        else:
            visible = self._written(self._transposed(ctx, kept, tangents), moving)
        return (*visible, *self._hidden_tangents(ctx, inputs, moving))

    @property
    def _has_no_backward_of_its_own(self) -> bool:
        """Nor has a plain function: its forward mode is torch's, by the jvp of each Function that it calls."""
        return self.spec.captured.is_plain or backward_method(self.compiler.cls) is None

    def _pushed(self, inputs: Sequence[Any], moving: Sequence[Any]) -> tuple[Any, ...]:
        """The derivative of forward itself; what does not move, by the user's mark, has no tangent."""
        pushed = list(self.pushed_unit.pushforward(inputs, moving)[: self.made])
        found = self._written([None if i in self._fixed else t for i, t in enumerate(pushed[: self.visible])], moving)
        return (*found, *pushed[self.visible :])

    @property
    def _fixed(self) -> set[int]:
        """The tensor outputs that the user marked; an argument that he marked is returned as a view, or a copy."""
        captured = self.spec.captured
        marked = {(p.kind, p.index) for p in captured.forward.non_differentiable}
        kinds = [captured.forward.outputs[i] for i in captured.forward.tensor_outputs]
        return {i for i, o in enumerate(kinds) if ("output", i) in marked or (o.kind, o.index) in marked}

    def _hidden_tangents(self, ctx: Any, inputs: Sequence[Any], moving: Sequence[Any]) -> list[Any]:
        """Of what forward kept: zeros where a float does not move, since torch takes no None for it."""
        if not self._has_hidden:
            return []
        pushed = self.pushed_unit.pushforward(inputs, moving)[self.visible : self.made]
        likes = ctx.likes[self.visible : self.made]
        return [zeros(s) if t is None and _moves(s[1]) else t for t, s in zip(pushed, likes, strict=True)]

    @property
    def _has_hidden(self) -> bool:
        return self.made > self.visible

    def _transposed(self, ctx: Any, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        sizes = [ctx.sizes[s] for s in self.symbols]
        likes = [torch.empty(s[0], dtype=s[1], device=s[2]) for s in ctx.likes[: self.visible]]
        unit = self.tangent_unit(tuple(t is not None for t in tangents))
        found = unit(*residuals, *sizes, *likes, *[t for t in tangents if t is not None])
        return [None if i in self._fixed else t for i, t in enumerate(found)]

    def _written(self, found: list[Any], moving: Sequence[Any]) -> list[Any]:
        """autograd wants the tangent of an argument that forward writes to be written as well, and returned."""
        dirty = {i: moving[index] for i, index in self.dirty_outputs() if moving[index] is not None}
        if dirty:  # the tangent of another output may be that tangent, as it was
            found = [t.clone() if isinstance(t, Tensor) else t for t in found]
        for i, tangent in dirty.items():
            found[i] = tangent.copy_(found[i])
        return found

    def dirty_outputs(self) -> list[tuple[int, int]]:
        """(number among the tensor outputs, of the tensor argument) of each output that is an argument written to."""
        captured = self.spec.captured
        kinds = [captured.forward.outputs[p] for p in captured.forward.tensor_outputs]
        dirty = {p.index for p in captured.forward.dirty}
        return [(i, o.index) for i, o in enumerate(kinds) if o.kind == "input" and o.index in dirty]

    def as_views(self, outputs: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
        """Arguments that are returned as they are, as views: torch wants nothing else of what is saved as well."""
        dirty = [tensors[index] for _, index in self.dirty_outputs()]
        given = [t for t in tensors if not _is_one_of(t, dirty)]
        fixed = self._fixed  # a view of what requires grad does, too

        def view(i: int, o: Tensor) -> Tensor:
            return o.detach() if i in fixed else o.view_as(o)

        return [view(i, o) if _is_one_of(o, given) else o for i, o in enumerate(outputs)]

    def _users_tangents(self, kept: Sequence[Any], sizes: Any, tangents: Sequence[Any]) -> tuple[Any, ...]:
        """What the user's jvp says. Under two levels of forward mode torch loses the outer tangent of what it computes:
        there it is captured or, where it cannot be, run one level down."""
        nested = forward_levels() > 1
        if not (nested and self.compiler.pushes_below):
            try:
                return self.own_jvp(kept, sizes, tangents, nested)
            except NestedForwardMode as error:
                calls = error.facts["why"].startswith("it calls")
                if not can_work_below or (calls and len(levels_active()) > 2):  # of what it calls torch loses more
                    raise
                self.compiler.pushes_below = not calls  # then no capture is tried again
        return below_forward_mode(self.own_jvp, kept, sizes, tangents, False)  # type: ignore[no-any-return]

    def own_jvp(
        self, kept: Sequence[Any], sizes: Any, tangents: Sequence[Any], captured: bool
    ) -> tuple[Any, ...]:
        """The user's jvp: one tangent per output of his. captured: as a graph, or NestedForwardMode."""
        raise NotImplementedError

    def of_tensors(self, results: tuple[Any, ...]) -> Sequence[Any]:
        """What the user's rule says about his tensor outputs; all of it where the number is wrong: torch refuses it."""
        outputs = self.spec.captured.forward.outputs
        if len(results) != len(outputs):
            raise TangentCountError(expected=len(outputs), got=len(results))
        return [results[i] for i in self.spec.captured.forward.tensor_outputs]

    # ------------------------------------------------------------------ vmap
    def vmap(self, info: Any, in_dims: Any, *args: Any) -> Any:
        """The same rules over a batch, as a Function again."""
        key = (tuple(in_dims), info.randomness)
        if key not in self.batches:
            self.batches.setdefault(key, Batched(self, *key))
        return self.batches[key].function().apply(*args), tuple(self.batches[key].out_dims())


class TangentCountError(FusegradError):
    """jvp returned too few or too many tangents. The text is torch's own."""

    speaks = "torch"
    message = "Function's jvp returned an invalid number of forward gradients (expected {expected} but got {got})"


class WrittenByEveryLane(FusegradError, RuntimeError):
    """vmap over a Function that writes into an argument which is one for all lanes."""

    message = (
        "vmap({function}): forward writes into `{argument}`, which has no batch axis\n  at:   {where}\n"
        "  fix:  give vmap a batch of it (in_dims), or write into a clone."
    )


class TangentUnit(TransformableGraph):
    """The tangents that a backward gives by transposition: for kernels of its captured graph, in the IR; elsewhere, and
    where that is not of primitives alone, through autograd.
    The first results are compared with backward itself.
    """

    def __init__(self, whole: FunctorchFunction, mask: tuple[bool, ...]) -> None:
        self.whole, self.mask = whole, mask
        self.transposed: dict[int, Lowered | None] = {}  # by the entry
        captured = whole.spec.captured
        super().__init__(f"{captured.name}_jvp", whole.tangent_body(mask), whole.backend, captured.reads)
        self.refused, self.failed = whole.compiler.derivative_refused, whole.compiler.derivative_failed

    def execute(self, args: Sequence[Any]) -> Sequence[Any]:
        if not is_capturing() and self._entry_for(args) is not None:
            found = self.run_in_ir(args)
            if found is not None:
                return found
        return super().execute(args)

    def lowered(self, args: Sequence[Any]) -> tuple[Lowered | None, Sequence[Any]]:
        entry = self._entry_for(args)
        if entry is None:
            return super().lowered(args)
        return self.transposed[id(entry)], [read.get() for read in entry.lifted if read is not None]

    def _entry_for(self, args: Sequence[Any]) -> BackwardEntry | None:
        """The captured backward to transpose for these arguments; None where autograd has to."""
        whole, spec = self.whole, self.whole.spec
        kinds = predicted_kinds(spec.captured)
        if self.backend not in KERNEL_BACKENDS or sum(map(bool, kinds)) != len(spec.captured.forward.tensor_outputs):
            return None
        _, sizes, outputs, tangents = whole.tangent_parts(args)
        entry = spec.backward.entry(kinds)
        if id(entry) not in self.transposed:
            with plain_tensors(), torch.no_grad(), capture_lock:
                self._transpose(args, entry)
        if self.transposed[id(entry)] is None or not all(t.is_contiguous() for t in (*tangents, *outputs)):
            return None
        return entry if entry.admits(BoundSizes(sizes)) else None

    def _transpose(self, args: Sequence[Any], entry: BackwardEntry) -> None:
        if id(entry) in self.transposed:  # another thread was first
            return
        whole = self.whole
        made = tangents_of(whole.spec, entry, self.mask, whole.symbols, self.name, self.backend)
        self.transposed[id(entry)] = made
        if made is not None:
            self._examine(args, made, entry)

    def _examine(self, args: Sequence[Any], made: Lowered, entry: BackwardEntry) -> None:
        """The first results, through torch."""
        lifted = [read.get() for read in entry.lifted if read is not None]
        tensors = [a for a in (*args, *lifted) if isinstance(a, Tensor)]
        sizes = made.sizes([a for a in args if isinstance(a, VALUES)])
        self.whole.refuse_another_map(self.mask, args, reference.run(made.graph, tensors, sizes))

    def _capture(self, args: Sequence[Any], facts: Any) -> Any:
        found = super()._capture(args, facts)
        self.whole.refuse_another_map(self.mask, args, self.body(*args))
        return found


class FunctorchFunction(FunctionRules):
    """The rules of a specialisation itself. The user's own jvp and vmap are used where he wrote them."""

    def __init__(self, compiler: Compiled, spec: Specialization, backend: str, copies: bool) -> None:
        captured = spec.captured
        super().__init__(compiler, spec)
        self.backend, self.copies = backend, copies
        self.written, self.pure = captured.written_inputs, _pure(spec)
        name, reads = captured.name, captured.reads
        self.forward_unit = self.pushed_unit = TransformableGraph(f"{name}_forward", self._forward_body, backend, reads)
        if captured.forward.trace.inlines:  # their own rules are gone from the graph, so that the method runs again
            self.pushed_unit = CallingUnit(f"{captured.name}_forward", self._forward_again, backend, captured.reads)
        self.setup_unit = TransformableGraph(f"{name}_setup_context", self._setup_body, backend, reads)
        for unit in (self.forward_unit, self.pushed_unit, self.setup_unit):
            unit.refused, unit.failed = compiler.derivative_refused, compiler.derivative_failed
        self.tangent_units: dict[tuple[bool, ...], TangentUnit] = {}
        self.promised: dict[tuple[bool, ...], TransformableGraph] = {}
        self.judged: set[Any] = set()

    def backward_for(self, gradients: Sequence[Any]) -> TransformableGraph:
        return BackwardUnit.of(self.compiler, self.spec, self.backend)

    def as_written(self, residuals: Sequence[Any], sizes: Sequence[Any], full: Sequence[Any]) -> Sequence[Any]:
        named = BoundSizes(zip(self.symbols, sizes, strict=True))
        results = run_user_backward(self.spec.captured, residuals, named, full)
        return [reduce_to_argument(self.spec.captured, i, g, named) for i, g in enumerate(results)]

    def run_forward(self, args: Sequence[Any]) -> tuple[Any, ...]:
        captured = self.spec.captured
        tensors = captured.tensors_of(args)
        if captured.writes_inputs and share_memory(tensors):
            return tuple(run_user_forward(captured, args))
        if is_capturing():
            made = self._forward_body(*tensors)[: self.made]
            return tuple(o if o._base is None else o.clone() for o in made)
        outputs, hidden = self.spec.run_forward(args, self.backend)
        outputs = [o if i in captured.skip or o._base is None else o.data for i, o in enumerate(outputs)]
        if self.copies:  # autograd lays out a tangent as its primal is
            dirty = {i for i, _ in self.dirty_outputs()}
            outputs = [o.clone() if i in captured.skip - dirty else o for i, o in enumerate(outputs)]
            outputs = [o if i in dirty else own_memory(o) for i, o in enumerate(outputs)]
            hidden = [own_memory(h) for h in hidden]
        return (*self.as_views(outputs, tensors), *hidden)

    def sizes_of(self, inputs: Sequence[Any]) -> dict[Any, int]:
        return self.spec.captured.binder(inputs)

    def _forward_body(self, *tensors: Any) -> Sequence[Any]:
        """The captured forward as a body: what derivatives of hidden values are taken of."""
        lifted = [r.get() for r in self.spec.captured.lifted if r is not None]
        return tuple(batchable(self.pure)(*tensors, *lifted))

    def _forward_again(self, *tensors: Any) -> Sequence[Any]:
        """The user's forward itself, over the same arguments."""
        given = [t.clone() if i in self.written else t for i, t in enumerate(tensors)]
        results = run_user_forward(self.spec.captured, self.spec.captured.with_tensors(given))
        return (*results, *(given[i] for i in self.written))

    def _setup_body(self, *tensors: Any) -> Sequence[Any]:
        """setup_context alone: what it keeps, of the tensor arguments and the tensors that forward returned."""
        captured = self.spec.captured
        inputs, outputs = tensors[: len(captured.slots)], tensors[len(captured.slots) :]
        output = rebuild_output(captured, outputs, inputs, (), captured.binder(inputs))
        return hidden_of_user(captured, captured.with_tensors(inputs), output)

    def tangent_unit(self, mask: tuple[bool, ...]) -> TransformableGraph:
        self._judge(mask)
        if mask not in self.tangent_units:
            self.tangent_units.setdefault(mask, TangentUnit(self, mask))
        return self.tangent_units[mask]

    def _judge(self, mask: tuple[bool, ...]) -> None:
        """backward has to be linear, with what it reads from outside being what it is now."""
        key = (mask, self.spec.captured.reads.facts())
        if key not in self.judged:
            require_linear(self.spec, [i for i, there in enumerate(mask) if there])
            self.judged.add(key)

    def tangent_parts(self, args: Sequence[Any]) -> tuple[Sequence[Any], dict[Any, Any], Sequence[Any], Sequence[Any]]:
        """(residuals, sizes, outputs, tangents) of a tangent unit's arguments."""
        first = len(self.spec.captured.residual_places)
        second = first + len(self.symbols)
        third = second + self.visible
        return args[:first], dict(zip(self.symbols, args[first:second], strict=True)), args[second:third], args[third:]

    def refuse_another_map(self, mask: tuple[bool, ...], args: Sequence[Any], pushed: Sequence[Any]) -> None:
        """<jvp(t), g> == <t, backward(g)>, by the values of a first call.

        A Function that backward calls may have another derivative than its own, and transposing goes by that.
        """
        residuals, sizes, outputs, tangents = self.tangent_parts(args)
        probes = [probe_tensor(o) if i not in self._fixed else torch.zeros_like(o) for i, o in enumerate(outputs)]
        with torch.no_grad():
            with CoarsestEps() as seen:
                made = self._pulled(residuals, sizes, probes)
            pulled = [g for g, moves in zip(made, mask, strict=True) if moves]
            why = not_transposed(list(pushed), probes, list(tangents), pulled, seen.coarsest)
        if why is not None:
            captured = self.spec.captured
            raise NonLinearBackward(function=captured.name, why=why, where=captured.backward_place())

    def _pulled(self, residuals: Sequence[Any], sizes: dict[Any, Any], gradients: Sequence[Any]) -> list[Any]:
        captured = self.spec.captured
        at = BoundSizes(sizes)
        made = run_user_backward(captured, residuals, at, gradients_per_output(captured, gradients))
        return [reduce_to_argument(captured, i, g, at) for i, g in enumerate(made)]

    def tangent_body(self, mask: tuple[bool, ...]) -> Any:
        def body(*args: Any) -> Sequence[Any]:
            residuals, sizes, outputs, there = self.tangent_parts(args)
            supply = iter(there)
            tangents = [next(supply) if moves else None for moves in mask]
            return transposed_backward(self.spec, residuals, sizes, outputs, tangents)

        return body

    # ------------------------------------------------------------------ the user's own rules
    def own_jvp(
        self, kept: Sequence[Any], sizes: Any, tangents: Sequence[Any], captured: bool
    ) -> tuple[Any, ...]:
        if not (captured or self.compiler.must_capture("jvp")) or self.spec.captured.writes_inputs:
            return self._users_jvp(kept, sizes, tangents)
        mask = tuple(t is not None for t in tangents)
        numbers = [sizes[s] for s in self.symbols]
        return tuple(self._promised_jvp(mask, len(kept))(*kept, *numbers, *[t for t in tangents if t is not None]))

    def _promised_jvp(self, mask: tuple[bool, ...], kept: int) -> TransformableGraph:
        if mask not in self.promised:
            middle = kept + len(self.symbols)

            def body(*args: Any) -> Sequence[Any]:
                supply = iter(args[middle:])
                sizes = dict(zip(self.symbols, args[kept:middle], strict=True))
                return self._users_jvp(args[:kept], sizes, [next(supply) if there else None for there in mask])

            self.promised.setdefault(mask, PromisedJvp(self.compiler, body, self.backend))
        return self.promised[mask]

    def _users_jvp(self, kept: Sequence[Any], sizes: Any, tangents: Sequence[Any]) -> tuple[Any, ...]:
        captured = self.spec.captured
        forward = captured.forward
        if forward.materialize_grads:
            tangents = tuple(self._materialized(i, t, sizes) for i, t in enumerate(tangents))
        n = len(forward.saved_for_forward)
        needs = forward.needs_input_grad[: captured.count]
        own = BackwardContext(kept[:n], ctx_attributes(captured, kept[n:], sizes), needs)
        return as_tuple(self.compiler.cls.jvp(own, *tangents))  # type: ignore[attr-defined]

    def _materialized(self, argument: int, tangent: Any, sizes: Any) -> Any:
        captured = self.spec.captured
        if tangent is not None or argument not in captured.slots:
            return tangent
        fake = captured.forward.fakes[captured.slots.index(argument)]
        shape = rebind(fake.shape, sizes)
        return torch.zeros(shape, dtype=fake.dtype, device=fake.device) if is_float(fake) else None

    def vmap(self, info: Any, in_dims: Any, *args: Any) -> Any:
        captured = self.spec.captured
        if not self.compiler.writes("vmap"):
            return super().vmap(info, in_dims, *args)
        given = closed(captured.with_tensors(captured.tensors_of(args)), captured.count)
        dims = self._closed_dims(in_dims)
        result = self.compiler.cls.vmap(info, dims, *given)  # type: ignore[attr-defined]
        if not isinstance(result, tuple) or len(result) != 2:
            return result  # torch says what is wrong
        several = isinstance(result[0], tuple)
        outputs = result[0] if several else (result[0],)
        outs = result[1] if isinstance(result[1], tuple) and several else (result[1],) * len(outputs)
        if len(outputs) != len(outs) or not all(d is None or isinstance(d, int) for d in outs):
            return result
        outputs, outs = tuple(self.of_tensors(outputs)), tuple(self.of_tensors(outs))
        hidden = self._hidden(info, in_dims, args, outputs, outs) if self._has_hidden else ()
        return (*outputs, *hidden), (*outs, *[0] * len(hidden))

    def _closed_dims(self, in_dims: Sequence[Any]) -> tuple[Any, ...]:
        """The batch dimensions in the form of the user's arguments."""

        captured = self.spec.captured
        def of(leaf: Any) -> Any:
            return in_dims[leaf.key] if isinstance(leaf, Hole) else None

        given = captured.arguments[: captured.count]
        return tuple(in_dims[i] if i in captured.slots else pytree.tree_map(of, a) for i, a in enumerate(given))

    def _hidden(
        self, info: Any, in_dims: Any, args: Sequence[Any], outputs: Sequence[Any], out_dims: Sequence[Any]
    ) -> Sequence[Any]:
        """What setup_context keeps besides, of the outputs that the user's vmap made; old-style forwards run again."""
        tensors = self.spec.captured.tensors_of(args)
        dims = tuple(in_dims[i] for i in self.spec.captured.slots)
        if not self.compiler.setup_style:
            return self.forward_unit.batch(dims, info.randomness)(*tensors)[self.visible : self.made]
        return self.setup_unit.batch((*dims, *out_dims), info.randomness)(*tensors, *outputs)


class Batched(FunctionRules):
    """Rules over one more batch axis: every unit of the parent, batched."""

    def __init__(self, parent: FunctionRules, in_dims: Dims, randomness: str) -> None:
        super().__init__(parent.compiler, parent.spec)
        self.parent, self.in_dims, self.randomness = parent, in_dims, randomness
        self.copies = parent.copies
        self.dims = tuple(in_dims[i] for i in self.spec.captured.slots)
        self.forward_unit = parent.forward_unit.batch(self.dims, randomness)
        self.pushed_unit = parent.pushed_unit.batch(self.dims, randomness)
        self.residual_dims: Dims = tuple(self._dim_of(p) for p in self.spec.captured.residual_places)

    def _dim_of(self, place: ValueRef | None) -> int | None:
        if place is None:
            return None
        return self.dims[place.index] if place.kind == "input" else 0

    def run_forward(self, args: Sequence[Any]) -> tuple[Any, ...]:
        captured = self.spec.captured
        tensors = captured.tensors_of(args)
        results = list(self.forward_unit(*tensors))
        for i, made in zip(captured.written_inputs, results[self.made :], strict=True):
            if self.dims[i] is None:
                raise WrittenByEveryLane(function=captured.name, argument=captured.names[captured.slots[i]])
            tensors[i].copy_(made.movedim(0, self.dims[i] or 0))
        for i, position in enumerate(captured.forward.tensor_outputs):
            described = captured.forward.outputs[position]
            results[i] = results[described.index] if described.kind == "same" else results[i]
        if not (self.copies or is_capturing() or forward_mode_is_active()):
            results = self._aliased(results, tensors)
        results = [own_memory(r) for r in self.as_views(results[: self.made], tensors)]
        for i, index in self.dirty_outputs():
            results[i] = tensors[index]
        return tuple(results)

    def _aliased(self, results: list[Any], tensors: Sequence[Tensor]) -> list[Any]:
        """As `alias_outputs`, in every lane: kernels, and the rules of the IR, give each result its memory."""
        forward, sizes, found = self.spec.captured.forward, self.sizes_of(tensors), list(results)
        pools: dict[str, tuple[Sequence[Any], Sequence[Tensor]]] = {
            "input": (tensors, forward.fakes),
            "view": (tensors, forward.fakes),
            "part of output": (found, forward.fake_outputs),
            "part of hidden": (found[self.visible :], forward.fake_hidden),
        }
        for i, position in enumerate(forward.tensor_outputs):
            kind, index = forward.outputs[position].kind, forward.outputs[position].index
            if kind not in pools:
                continue
            bases, likes = pools[kind]
            base, like, fake = bases[index], likes[index], forward.fake_outputs[i]
            if memory_of(base) == memory_of(found[i]) or not is_as_strided(fake, like):
                continue
            lanes = self.lanes_of(index, base) if bases is tensors else _lanes_in_front(base, like, sizes)
            found[i] = found[i] if lanes is None else self._view(i, fake, base, lanes, sizes)
        return found

    def _view(self, number: int, fake: Tensor, base: Tensor, lanes: Lanes, sizes: Any) -> Tensor:
        """An output of every lane in the memory of its base."""
        shape, strides, offset = view_of(fake, sizes)
        view = base.as_strided((*lanes[0], *shape), (*lanes[1], *strides), base.storage_offset() + offset)
        forward = self.spec.captured.forward
        is_one = forward.outputs[forward.tensor_outputs[number]].value is not False
        return view if is_one and number not in self._fixed else view.detach()

    def lanes_of(self, index: int, tensor: Tensor) -> Lanes | None:
        dim = self.dims[index]
        behind = None if dim is None else self.parent.lanes_of(index, lane(tensor, dim))
        if dim is None or behind is None:
            return None
        return (tensor.shape[dim], *behind[0]), (tensor.stride(dim), *behind[1])

    def out_dims(self) -> list[int | None]:
        written = dict(self.dirty_outputs())
        return [self.dims[written[i]] if i in written else 0 for i in range(self.made)]

    def own_jvp(
        self, kept: Sequence[Any], sizes: Any, tangents: Sequence[Any], captured: bool
    ) -> tuple[Any, ...]:
        live = [i for i, t in enumerate(tangents) if t is not None]

        def one(*values: Any) -> Sequence[Any]:
            supply = iter(values[len(kept) :])
            lanes = [next(supply) if i in live else None for i in range(len(tangents))]
            return self.parent.own_jvp(values[: len(kept)], sizes, lanes, captured)

        dims = (*map(self._dim_of, self.jvp_places), *(self.in_dims[i] for i in live))
        return tuple(present_under_vmap(one, dims, [*kept, *(tangents[i] for i in live)], self.randomness))

    def sizes_of(self, inputs: Sequence[Any]) -> dict[Any, int]:
        lanes = [lane(t, d) for t, d in zip(inputs, self.dims, strict=True)]
        return self.parent.sizes_of(lanes)

    def backward_for(self, gradients: Sequence[Any]) -> TransformableGraph:
        given = [None if g is None else 0 for g in gradients]
        dims = (*self.residual_dims, *[None] * len(self.symbols), *given)
        back: list[OutDim] = ["sum" if d is None else d for d in self.in_dims[: self.spec.captured.count]]
        return self.parent.backward_for(gradients).batch(dims, self.randomness, back)

    def tangent_unit(self, mask: tuple[bool, ...]) -> TransformableGraph:
        moving = [d for d, there in zip(self.in_dims, mask, strict=False) if there]
        dims = (*self.residual_dims, *[None] * len(self.symbols), *[0] * self.visible, *moving)
        return self.parent.tangent_unit(mask).batch(dims, self.randomness)


def _lanes_in_front(result: Tensor, like: Tensor, sizes: Any) -> Lanes | None:
    """Of a result; None where a lane is not laid out as a single one is."""
    depth = result.dim() - like.dim()
    shape, strides = result.shape, result.stride()
    single = rebind(tuple(like.stride()), sizes)
    laid_out = all(n == 1 or a == b for n, a, b in zip(shape[depth:], strides[depth:], single, strict=True))
    return (tuple(shape[:depth]), strides[:depth]) if laid_out else None


def _pure(spec: Specialization) -> torch.fx.GraphModule:
    """The captured forward without writes, and with what it makes of arguments that it writes to."""
    captured = spec.captured
    trace = captured.forward.trace
    if not writes(trace.graph_module):
        return trace.graph_module
    with capture_lock, no_tracing_functions(), plain_tensors(), torch.no_grad():
        return without_writes(captured.forward.session, trace, captured.written_inputs)


def transposed_backward(
    spec: Specialization, residuals: Sequence[Any], sizes: Any, outputs: Sequence[Any], tangents: Sequence[Any]
) -> Sequence[Any]:
    """backward is linear in its gradients; its transpose takes input tangents to output tangents."""
    captured = spec.captured
    with torch.enable_grad():
        probes = [torch.zeros_like(o).requires_grad_(is_float(o)) for o in outputs]
        with IgnoreDetach(probes):
            given = gradients_per_output(captured, probes)
            gradients = run_user_backward(captured, residuals, sizes, given, attached=True)
        gradients = tuple(reduce_to_argument(captured, i, g, sizes) for i, g in enumerate(gradients))
        pairs = [
            (g, t)
            for g, t in zip(gradients, tangents, strict=True)
            if g is not None and t is not None and g.requires_grad
        ]
        wanted = [p for p in probes if p.requires_grad]
        found: Sequence[Any] = [None] * len(wanted)
        if pairs and wanted:
            found = torch.autograd.grad(
                [g for g, _ in pairs], wanted, [t for _, t in pairs], allow_unused=True, create_graph=True
            )
    pushed = iter(found)
    results = [next(pushed) if p.requires_grad else None for p in probes]
    return [torch.zeros_like(o) if r is None and is_float(o) else r for r, o in zip(results, outputs, strict=True)]


def _is_one_of(value: Any, tensors: Sequence[Any]) -> bool:
    return any(value is t for t in tensors)


def _moves(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
