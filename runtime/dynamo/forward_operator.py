"""Rules as operators: a specialisation's forward, and every unit that its derivatives and batches are made of.

    Fast.apply, in another's graph -> fusegrad::swi_glu_forward_3f2a91c0d4
    its backward                   -> fusegrad::swi_glu_backward_77c01b2e9a, and so on, to any order
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...ir.errors import FusegradError, NotTraceableError
from ...ir.lazy_attribute import lazy_attribute
from ...tracer.function import rebind
from ...tracer.methods import backward_method, methods
from ...tracer.reads.fingerprint import code_sum
from ...tracer.torch_private import (
    custom_function_call,
    forward_mode_is_active,
    no_autocast,
    records_above_autograd,
    transforms_active,
)
from ...tracer.trace import CaptureError, Trace
from ..capture.captured_backward import predicted_kinds
from ..capture.graph_mode import outside_graph
from ..capture.guards import is_float, is_tracked
from ..capture.outputs import alias_outputs
from ..capture.redraw import first_draw
from ..functorch.backward_unit import BackwardUnit
from ..functorch.batching.batched_unit import BatchedUnit
from ..functorch.graphs import present
from ..functorch.rules.function import function_of
from ..functorch.rules.functorch_function import FunctorchFunction
from ..functorch.rules.transformable import why_not_transformable
from ..functorch.unit import TransformableGraph, make_operators_by
from ..functorch.unit import function_of as function_of_unit
from ..persistence.stored_specialization import operations
from ..specialize.pipeline import require_equal
from ..values.sizes import Binder, BoundSizes
from .operators import Operator, named, registered

if TYPE_CHECKING:
    from ..compiled.compiled import Compiled
    from ..specialize.specialization import Specialization

Tensor = torch.Tensor


class OuterTransformError(FusegradError, NotImplementedError):
    """torch.func's transforms of a call that a graph holds, which cannot be transformed."""

    message = (
        "{function} cannot be transformed within a graph: {reason}\n  at:   {where}\n"
        "  fix:  transform the call itself, outside of the graph: the class that you wrote then runs."
    )


class UnknownSize(Exception):
    """A size that depends on the data of a tensor (internal: the call is refused)."""


def example(value: Any) -> Any:
    """A plain tensor like one that has no memory, at the sizes that the graph is first made for."""
    if not isinstance(value, Tensor):
        return value
    shape, strides = [_hint(n) for n in value.shape], [_hint(n) for n in value.stride()]
    moves = transforms_active() or torch.compiler.is_exporting()  # who loads a program may differentiate it
    differentiable = value.requires_grad or (moves and is_float(value))
    with outside_graph():
        plain = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device).zero_()
        return plain.requires_grad_(differentiable)


def _hint(size: Any) -> int:
    if isinstance(size, int):
        return size
    if (hint := size.node.hint) is None:
        raise UnknownSize
    return int(hint)


# ------------------------------------------------------------------ forward
@dataclass(frozen=True, eq=False)
class Root:
    """The origin of derived rules; as a text, a digest that is its own in every process."""

    compiler: Compiled
    spec: Specialization
    backend: str
    copies: bool

    def __repr__(self) -> str:
        return self.digest

    @lazy_attribute
    def digest(self) -> str:
        """Of what was captured, and of the code that more may be captured from."""
        spec, compiler = self.spec, self.compiler
        captured = spec.captured
        facts = (
            *(() if not spec.of_whole else ("of the whole",)),
            operations(captured.forward.trace), list(map(_meta, captured.forward.fakes)), repr(captured.arguments),
            captured.forward.needs_input_grad, list(getattr(captured.guard, "conditions", ())), self._backward(),
            repr(compiler.options.derive_jvp), [code_sum(code) for code in self.code], self.backend, self.copies,
        )  # fmt: skip
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def _backward(self) -> str:
        if backward_method(self.compiler.user.cls) is None:
            return ""
        with outside_graph(), no_autocast():
            return operations(self.spec.backward.entry(predicted_kinds(self.spec.captured)).trace)

    @property
    def code(self) -> list[Any]:
        """Of the user's methods."""
        return [m.__code__ for m in methods(self.compiler.user.cls).values() if hasattr(m, "__code__")]

    def agrees(self, other: Root) -> bool:
        """True if the other's rules may serve for this one's, whose digest is the same: it reads the same, too."""
        mine, theirs = self.spec, other.spec
        if mine is theirs:
            return True
        same_outside = mine.captured.outside_at_capture == theirs.captured.outside_at_capture
        return self.code == other.code and same_outside


@dataclass(frozen=True)
class Origin:
    """Where an operator comes from: the steps that derive its unit, and arguments that it was made for."""

    root: Root
    steps: tuple[Any, ...]
    examples: tuple[Any, ...]

    def agrees(self, other: Origin) -> bool:
        """True if both operators are one."""
        return self.root.agrees(other.root)


class OperatorRules(FunctorchFunction):
    """The rules of a specialisation, with forward as an operator.

    An operator writes nothing, and its rules know of no argument that is written: the call copies into those of
    `written_outputs`, (number among the tensor outputs, of the tensor argument), and autograd follows the copy.
    """

    @classmethod
    def of(
        cls, compiler: Compiled, spec: Specialization, backend: str, tensors: Sequence[Tensor], alone: bool
    ) -> OperatorRules:
        """The one of a specialisation on a backend. alone: only autograd differentiates it."""
        copies = bool(spec.captured.skip) and forward_mode_is_active() and not compiler.user.overrides("jvp")
        recorded = torch.is_grad_enabled() and (transforms_active() or any(map(is_tracked, tensors)))
        key = (backend, "outer", copies, recorded, alone)
        if key not in spec.nodes:
            spec.nodes.setdefault(key, cls(compiler, spec, backend, copies, recorded, alone))
        return spec.nodes[key]  # type: ignore[no-any-return]

    def __init__(
        self, compiler: Compiled, spec: Specialization, backend: str, copies: bool, recorded: bool, alone: bool
    ) -> None:
        super().__init__(compiler, spec, backend, copies)
        self.recorded, self.alone, self.hidden_is_constant = recorded, alone, alone
        self.written_outputs, self.outputs.written = self.outputs.written, []
        self.root = Root(compiler, spec, backend, copies)
        self.forward_unit.lineage, self.setup_unit.lineage = (self.root, "forward"), (self.root, "setup")
        self.operator = _operator_of_forward(self)

    def rules_of_operator(self) -> Any:
        """The Function of the operator; torch.func may meet one that was made without it: in what is loaded, say."""
        if self.alone and not (transforms_active() or forward_mode_is_active()):
            return function_of(self)
        if (why := why_not_transformable(self.compiler, self.spec)) is not None:
            captured = self.spec.captured
            raise OuterTransformError(function=captured.name, reason=why, where=captured.forward_place())
        return function_of(OperatorRules.of(self.compiler, self.spec, self.backend, (), alone=False))

    def unit(self, steps: Sequence[Any]) -> tuple[TransformableGraph, Sequence[Any]]:
        """The unit that derivations begin with, by its name, and the steps that are left."""
        kind, rest = steps[0], steps[1:]
        if kind == "jvp":
            return self.tangent_unit(rest[0]), rest[1:]
        if kind == "own jvp":
            return self.captured_jvp(*rest[:2]), rest[2:]
        return {"forward": self.forward_unit, "setup": self.setup_unit, "backward": self.backward_for(())}[kind], rest

    def tangent_unit(self, mask: tuple[bool, ...]) -> TransformableGraph:
        unit = super().tangent_unit(mask)
        unit.lineage = (self.root, "jvp", mask)
        return unit

    def backward_for(self, gradients: Sequence[Any]) -> TransformableGraph:
        unit = super().backward_for(gradients)
        unit.lineage = (self.root, "backward")
        return unit

    def captured_jvp(self, mask: tuple[bool, ...], saved: int) -> TransformableGraph:
        unit = super().captured_jvp(mask, saved)
        unit.lineage = (self.root, "own jvp", mask, saved)
        return unit

    def run_forward(self, args: Sequence[Any]) -> tuple[Any, ...]:
        captured = self.spec.captured
        tensors = captured.tensors_of(args)
        results = self.operator(*tensors)
        if not captured.skip or self.copies or torch.compiler.is_exporting():
            return results
        outputs, hidden = self.outputs.split(results)
        sizes = BoundSizes(captured.binder.read(tensors))
        shown = self.outputs.as_views(alias_outputs(captured, list(outputs), tensors, sizes, hidden), tensors)
        for i in self._with_own_memory(tensors):
            shown[i] = results[i]
        return (*shown, *hidden)

    def _with_own_memory(self, tensors: Sequence[Tensor]) -> list[int]:
        """Outputs that have memory of their own in a graph: arguments that are written to, and parts of shared memory.

        A view of what a graph returns as well torch makes anew, behind the graph, where its gradient passes the
        Function by. It does not where the other is an argument of the graph: then it sees whose view it is.
        """
        copied = [i for i, _ in self.written_outputs]
        if not self.recorded:
            return copied
        kinds = [self.spec.captured.forward.outputs[i] for i in self.spec.captured.forward.tensor_outputs]
        parts = (i for i, o in enumerate(kinds) if o.kind.startswith("part of"))
        views = (i for i, o in enumerate(kinds) if o.kind in ("input", "view") and not _is_given(tensors[o.index]))
        return [*copied, *parts, *views]

    def setup_context(self, ctx: Any, inputs: Sequence[Any], output: Sequence[Any]) -> None:
        full, at = list(inputs), dict(enumerate(self.spec.captured.slots))
        for i, argument in self.written_outputs:  # what is saved of it is what it has become
            full[at[argument]] = output[i]
        super().setup_context(ctx, full, output)


class ForwardOnMemory:
    """Forward as an operator runs it, with memory and without."""

    def __init__(self, spec: Specialization, backend: str) -> None:
        self.spec, self.backend, self.compared = spec, backend, spec.of_whole
        self.autocast = _autocast()

    def run(self, tensors: Sequence[Any]) -> Sequence[Tensor]:
        """The captured forward; compared with the user's own at the first time, and where a loop is longer than ever.

        What it writes to is a copy.
        """
        tensors = [t.clone() if i in self.spec.captured.written_inputs else t for i, t in enumerate(tensors)]
        args = self.spec.captured.with_tensors(tensors)
        if not self.compared or self._is_longer(tensors):
            self._compare(args)
        outputs, hidden = self.spec.run_forward(args, self.backend)
        return [*outputs, *hidden]

    def _is_longer(self, tensors: Sequence[Any]) -> bool:
        """True if a loop is longer than all that were compared."""
        captured = self.spec.captured
        return bool(captured.longest.lengths) and captured.longest.are_longer(captured.binder.read(tensors))

    def _compare(self, args: Sequence[Any]) -> None:
        try:
            with ExitStack() as stack:  # a graph is made under autocast, and runs without it
                for (device, enabled, dtype), current in zip(self.autocast, _autocast(), strict=True):
                    if (device, enabled, dtype) != current:
                        stack.enter_context(torch.autocast(device, enabled=enabled, dtype=dtype))
                require_equal(self.spec, args)
        except CaptureError as error:
            facts = {"function": self.spec.captured.name, "method": "forward", **error.facts}
            raise NotTraceableError(**facts) from error
        self.compared = True

    def likes(self, tensors: Sequence[Any]) -> list[Any]:
        """(shape, strides, dtype, device) per result."""
        captured = self.spec.captured
        sizes = captured.binder.read(tensors)
        results = (*captured.forward.fake_outputs, *captured.forward.fake_hidden)
        return [like(fake, sizes, i in captured.skip) for i, fake in enumerate(results)]


def _operator_of_forward(rules: OperatorRules) -> Operator:
    captured = rules.spec.captured
    forward = ForwardOnMemory(rules.spec, rules.backend)

    def spread(values: Sequence[Any]) -> list[Any]:
        """One value per argument, None for the constants."""
        full: list[Any] = [None] * len(captured.arguments)
        for slot, value in zip(captured.slots, values, strict=True):
            full[slot] = value
        return full

    name, takes = named(f"{captured.name}_forward", rules.root), ("Tensor",) * len(captured.slots)
    origin, is_random = Origin(rules.root, (), ()), draws(captured.forward.trace)
    facts = rules.outputs.total, forward.run, forward.likes, rules.rules_of_operator, spread, origin, is_random
    return registered(Operator(name, takes, *facts))


def _autocast() -> list[tuple[str, bool, torch.dtype]]:
    """The state of autocast: on or off, and its dtype, for each kind of device."""
    return [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]


def _is_given(tensor: Tensor) -> bool:
    """True if it surely is an argument of the graph."""
    return tensor.requires_grad and tensor.is_leaf


def like(fake: Tensor, sizes: Any, row_major: bool = False) -> Any:
    """(shape, strides, dtype, device) of a fake at these sizes; row-major where it is no memory of its own."""
    shape = tuple(rebind(fake.shape, sizes))
    if row_major or any(isinstance(step, int) and step == 0 for step in fake.stride()):
        return shape, _row_major(shape), fake.dtype, fake.device
    return shape, rebind(tuple(fake.stride()), sizes), fake.dtype, fake.device


def _row_major(shape: Sequence[Any]) -> tuple[Any, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step = step * (n if not isinstance(n, int) else max(n, 1))
    return tuple(reversed(strides))


def draws(trace: Trace) -> bool:
    """True if a graph draws random numbers."""
    return first_draw(trace.graph_module.graph.nodes) is not None


def _meta(fake: Any) -> str:
    if not isinstance(fake, Tensor):
        return str(fake)
    return f"{fake.dtype} {fake.device} {tuple(fake.shape)} {tuple(fake.stride())}"


# ------------------------------------------------------------------ units
def called(unit: TransformableGraph, args: Sequence[Any]) -> Sequence[Any]:
    """A unit in another tracer's graph, differentiable."""
    if records_above_autograd():
        return executed(unit, args)
    if transforms_active():
        return custom_function_call(function_of_unit(unit), *args)  # type: ignore[no-any-return]
    if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
        return function_of_unit(unit).apply(*args)  # type: ignore[no-any-return]
    return executed(unit, args)


def executed(unit: TransformableGraph, args: Sequence[Any]) -> Sequence[Any]:
    """A unit at the bottom: its operator, or its operations where they cannot be captured apart."""
    try:
        pair = unit_operator(unit, args)
    except CaptureError:
        return unit.body(*args)
    operator, mask = pair
    if not any(mask):
        return [None] * len(mask)
    supply = iter(operator(*[args[i] for i in present(args)]))
    return [next(supply) if is_there else None for is_there in mask]


def unit_operator(unit: TransformableGraph, args: Sequence[Any]) -> tuple[Operator, tuple[bool, ...]]:
    """The operator, and which results there are."""
    examples = [example(a) if isinstance(a, Tensor) else None if a is None else _hint(a) for a in args]
    with outside_graph():
        if isinstance(unit, BackwardUnit):
            description = _of_backward(unit, examples)
        else:
            description = _of_graph(unit, examples)
    live = present(args)
    mask, likes, trace, facts = description
    takes = tuple("Tensor" if isinstance(args[i], Tensor) else "SymInt" for i in live)

    def spread(values: Sequence[Any]) -> list[Any]:
        full: list[Any] = [None] * len(args)
        for i, value in zip(live, values, strict=True):
            full[i] = value
        return full

    tracked = [isinstance(a, Tensor) and a.requires_grad for a in examples]

    def run(values: Sequence[Any]) -> list[Any]:
        full = [_tracked(a) if t else a for a, t in zip(spread(values), tracked, strict=True)]
        return [r.detach() for r in unit.execute(full) if r is not None]

    name = named(unit.name, unit.lineage, facts, takes, live, mask)
    origin = Origin(unit.lineage[0], unit.lineage[1:], tuple(examples))
    rules = lambda: function_of_unit(unit)  # noqa: E731
    operator = Operator(name, takes, sum(mask), run, likes, rules, spread, origin, draws(trace))
    return (registered(operator) if any(mask) else operator), mask


def _tracked(value: Tensor) -> Tensor:
    """As the example was that the unit was captured for."""
    return value.detach().requires_grad_()


def _of_backward(unit: BackwardUnit, examples: Sequence[Any]) -> Any:
    spec = unit.specialization
    _, _, gradients = unit.parts(examples)
    entry = spec.backward.entry(tuple(None if g is None else "contiguous" for g in gradients))
    mask = tuple(n is not None for n in _results(entry.trace))
    present_gradients = [i for i, is_there in enumerate(mask) if is_there]
    fakes = [spec.captured.forward.fakes[spec.captured.slots.index(i)] for i in present_gradients]

    def likes(values: Sequence[Any]) -> list[Any]:
        integers = [v for v in values if not isinstance(v, Tensor)]
        sizes = dict(zip(unit.symbols, integers, strict=True))
        return [like(f, sizes, True) for f in fakes]

    return mask, likes, entry.trace, operations(entry.trace)


def _of_graph(unit: TransformableGraph, examples: Sequence[Any]) -> Any:
    if isinstance(unit, BatchedUnit):
        unit.prepare(examples)
    executable, _ = unit.captured(examples)
    trace, binder = executable.trace, Binder(executable.trace.fakes)
    values = [None if n is None else n.meta["val"] for n in _results(trace)]
    fakes = [f for f in values if f is not None]

    def likes(values: Sequence[Any]) -> list[Any]:
        sizes = binder.read(values)
        return [like(f, sizes, True) for f in fakes]

    mask = tuple(f is not None for f in values)
    return mask, likes, trace, (operations(trace), list(map(_meta, trace.fakes)))


def _results(trace: Trace) -> Sequence[Any]:
    (results,) = trace.graph_module.graph.find_nodes(op="output")[0].args
    return results  # type: ignore[no-any-return]


class _Operators:
    """This file, as units know it."""

    called, executed = staticmethod(called), staticmethod(executed)


make_operators_by(_Operators())
