"""The methods of a loaded Function: its graphs, run through torch one operation at a time, with the guards of a call.

They are written as a user would write them, so that the whole of fusegrad stands behind them: `compile` captures them
like any class, and derives what the bundle does not hold. Nothing of the bundle is executed but these operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from ....ir import Graph, Value
from ....ir.errors import FusegradError, users_line
from ....ir.program import ValueRef
from ....tracer.capture.capture import origin_overridden
from ....tracer.dtypes import to_torch
from ....tracer.torch_private import memory_of, no_autocast
from ...execution.aten.reference import call_node, final_values
from ...execution.layouts import same_strides
from ...persistence.literals import same_constant, with_sizes
from ...values.exact_sizes import evaluate_exactly
from .contents import Argument, Entry, Function, Layout, Output, Variant
from .write import autocast_now

Tensor = torch.Tensor
Sizes = Mapping[sympy.Symbol, Any]


class BundleCallError(FusegradError, ValueError):
    """A call that the Function of a bundle was not exported for."""

    message = "{function}: {fact}\n  at:   {where}\n  fix:  {fix}"


EXPORT_AGAIN = "call it as it was exported, or export it for such arguments too."


def run(graph: Graph, inputs: Sequence[Any], sizes: Sizes) -> tuple[list[Any], dict[int, Any]]:
    """(the outputs, the new values of the inputs that are written to)."""
    values = final_values(graph, inputs, sizes, call=_call_as_captured)
    outputs = [None if o is None else values[o.id] for o in graph.outputs]
    return outputs, {i: values[v.id] for i, v in graph.mutations.items()}


def _call_as_captured(value: Value, operands: Sequence[Any], sizes: Sizes, device: torch.device) -> Any:
    """The result of a node; a capture of it has the name and the line of the bundle's source."""
    origin = value.origin
    with origin_overridden((origin.name, origin.where, origin.line or "") if origin.where else None):
        return call_node(value, operands, sizes, device)


@dataclass
class Result:
    """One run of forward: what it was given, its tensor outputs, and what it keeps besides."""

    variant: Variant
    number: int
    sizes: Sizes
    inputs: list[Tensor]
    outputs: list[Tensor]
    hidden: list[Tensor]

    def at(self, place: ValueRef | None) -> Tensor | None:
        """The tensor at a place."""
        if place is None:
            return None
        return {"input": self.inputs, "output": self.outputs, "hidden": self.hidden}[place.kind][place.index]

    def returned(self) -> Any:
        """The user's return value of forward."""
        supply = iter(self.outputs)
        outputs = self.variant.outputs
        full = tuple(with_sizes(o.value, self.sizes) if o.kind == "object" else next(supply) for o in outputs)
        return full if self.variant.is_tuple else full[0]


class BundleInterpreter:
    """Runs the graphs of one Function."""

    def __init__(self, function: Function, graphs: Mapping[str, Graph]) -> None:
        self.function, self.graphs = function, graphs
        self.slots = function.slots
        self.numbers = {v.needs: at for at, v in enumerate(function.variants)}
        self.symbols = [list(v.symbols.values()) for v in function.variants]

    def call_error(self, fact: str, fix: str = EXPORT_AGAIN) -> BundleCallError:
        """The error for a call outside of what was exported."""
        return BundleCallError(function=self.function.name, fact=fact, fix=fix, where=users_line())

    # ------------------------------------------------------------------ forward
    def forward(self, args: Sequence[Any]) -> Result:
        """Raises BundleCallError where the arguments are not like those of the export."""
        # Kinds before sizes: a size can only be read off a tensor of the exported rank.
        self._require_kinds(args)
        inputs = [args[i] for i in self.slots]
        number = self._number(inputs)
        variant = self.function.variants[number]
        graph = self.graphs[variant.graph]
        sizes = self._sizes(graph, variant, inputs)
        with no_autocast():
            results, writes = run(graph, inputs, sizes)
        for index, value in writes.items():
            inputs[index].copy_(value)
        # Hidden results keep their memory, unless an output is part of one: then its strides have to be eager's.
        visible = variant.tensor_outputs
        hidden = results[len(visible) :]
        if any(o.kind == "part of hidden" for o in visible):
            hidden = self._own_memory(graph, results, sizes, set(), range(len(visible), len(results)))
        # Outputs last: none may share memory with an argument or with another output.
        memory = {memory_of(t) for t in inputs}
        own = self._own_memory(graph, results, sizes, memory, range(len(visible)))
        outputs = _visible_outputs(visible, own, inputs, hidden, sizes)
        return Result(variant, number, sizes, inputs, outputs, hidden)

    def match_outputs(self, args: Sequence[Any], output: Any) -> Result:
        """The run that gave this output, as setup_context sees it: it keeps arguments and results alone."""
        inputs = [args[i] for i in self.slots]
        number = self._number(inputs)
        variant = self.function.variants[number]
        sizes = _bound(variant, inputs)
        outputs = [o for o in (output if variant.is_tuple else (output,)) if isinstance(o, Tensor)]
        return Result(variant, number, sizes, inputs, outputs, [])

    def _require_kinds(self, args: Sequence[Any]) -> None:
        arguments = self.function.arguments
        if len(args) != len(arguments):
            raise self.call_error(
                f"it takes {len(arguments)} arguments ({', '.join(a.name for a in arguments)}), not {len(args)}"
            )
        for argument, value in zip(arguments, args, strict=True):
            if (reason := _kind_difference(argument, value)) is not None:
                raise self.call_error(f"{argument.name} {reason}")
        if (autocast := autocast_now()) != (exported := self.function.autocast):
            fact = f"it was exported under autocast to {exported} (on CPU, on a GPU), and is called under {autocast}"
            raise self.call_error(fact, "call it under torch.autocast as at the export, or export it under this one.")
        devices = {args[i].device for i in self.slots if arguments[i].rank}
        if len(devices) > 1:
            raise self.call_error(f"its arguments are on {' and '.join(sorted(map(str, devices)))}")

    def _number(self, inputs: Sequence[Tensor]) -> int:
        needs = tuple(t.requires_grad for t in inputs)
        if needs not in self.numbers:
            words = [self.function.arguments[i].name for i, need in zip(self.slots, needs, strict=True) if need]
            fact = f"it was not exported for gradients of just {', '.join(words) or 'nothing'}"
            raise self.call_error(fact, "export it with these arguments requiring a gradient, or detach the others.")
        return self.numbers[needs]

    def _sizes(self, graph: Graph, variant: Variant, inputs: Sequence[Tensor]) -> dict[sympy.Symbol, Any]:
        """The sizes at this call, if they are such as the export assumed."""
        sizes = _bound(variant, inputs)
        for slot, layout, value, tensor in zip(self.slots, variant.tensors, graph.inputs, inputs, strict=True):
            name = self.function.arguments[slot].name
            for shape in (layout[0], value.shape):
                self._require_shape(name, shape, tensor, sizes)
            self._require_layout(name, layout, tensor, sizes)
        for name, (low, high) in variant.ranges.items():
            size = sizes[variant.symbols[name]]
            if size < low or (high is not None and size > high):
                limits = f"at least {low}" + ("" if high is None else f" and at most {high}")
                source = self._size_source(variant, variant.symbols[name])
                raise self.call_error(f"{source} is {size}; it was exported for {limits}")
        for condition in variant.assumptions:
            if not condition.holds(lambda s: evaluate_exactly(s, sizes)):
                raise self.call_error(f"it was exported for sizes with {condition}, and here {_values(sizes)}")
        return sizes

    def _size_source(self, variant: Variant, symbol: sympy.Symbol) -> str:
        for slot, layout in zip(self.slots, variant.tensors, strict=True):
            for word, numbers in zip(("shape[{}]", "stride({})"), layout, strict=True):
                if symbol in numbers:
                    return f"{self.function.arguments[slot].name}.{word.format(numbers.index(symbol))}"
        return str(symbol)

    def _require_shape(self, name: str, shape: Sequence[Any], tensor: Tensor, sizes: Sizes) -> None:
        if not all(evaluate_exactly(a, sizes) == b for a, b in zip(shape, tensor.shape, strict=True)):
            actual, exported = _row(tensor.shape), _row(shape)
            raise self.call_error(
                f"{name} has the shape {actual}; it was exported for {exported}, where {_values(sizes)}"
            )

    def _require_layout(self, name: str, layout: Layout, tensor: Tensor, sizes: Sizes) -> None:
        strides = [evaluate_exactly(s, sizes) for s in layout[1]]
        if not same_strides(tensor.shape, tensor.stride(), strides):
            fact = f"{name} has the strides {_row(tensor.stride())}; it was exported for {_row(layout[1])}"
            fact = f"{fact}, its shape being {_row(layout[0])}"
            raise self.call_error(fact, f"give {name}.contiguous(), or export it with {name} in this layout.")

    def _own_memory(
        self, graph: Graph, results: Sequence[Any], sizes: Sizes, memory: set[int], places: range
    ) -> list[Any]:
        """Results with eager's strides, each in memory of its own; None stays None."""
        own: list[Any] = []
        for at in places:
            strides = [evaluate_exactly(s, sizes) for s in graph.output_strides[at] or ()]
            own.append(results[at] if results[at] is None else laid_out(results[at], strides, memory))
            if own[-1] is not None:
                memory.add(memory_of(own[-1]))
        return own

    # ------------------------------------------------------------------ backward
    def backward(self, number: int, values: Sequence[Any], residuals: Sequence[Any], gradients: Sequence[Any]) -> Any:
        """One gradient per argument."""
        variant = self.function.variants[number]
        if not any(variant.needs):  # no gradient is required: no graph was exported
            return tuple(None for _ in self.function.arguments)
        sizes = dict(zip(self.symbols[number], values, strict=True))
        present = [g is not None for g in gradients]
        entry = self._entry(variant, present)
        supplied = [g for g, has_gradient in zip(gradients, entry.gradients, strict=True) if has_gradient]
        inputs = [r for r in residuals if r is not None] + supplied
        graph, memory = self.graphs[entry.graph], {memory_of(t) for t in inputs}
        with no_autocast():
            results, _ = run(graph, inputs, sizes)
        by_argument = [r if r is None else laid_out(r, [evaluate_exactly(n, sizes) for n in s or ()], memory)
                 for r, s in zip(results, graph.output_strides, strict=True)]  # fmt: skip
        for argument, output in entry.passed:
            by_argument[argument] = gradients[output]
        return tuple(by_argument)

    def _entry(self, variant: Variant, present: Sequence[bool]) -> Entry:
        """The backward for these gradients. Zeros for an output that never moves are not asked for."""
        fixed = {p.index for p in variant.non_differentiable if p.kind == "output"}
        tensors = iter(range(len(present)))
        numbers = [None if o.kind == "object" else next(tensors) for o in variant.outputs]
        free = [n is None or n in fixed for n in numbers]
        for entry in variant.entries:
            pairs = zip(entry.gradients, present, free, strict=True)
            if all(expected == is_present or (is_present and loose) for expected, is_present, loose in pairs):
                return entry
        words = ", ".join("one" if p else "none" for p in present)
        raise self.call_error(f"its backward was not exported for these gradients ({words})")


def _kind_difference(argument: Argument, value: Any) -> str | None:
    """The difference of a value from the exported argument, or None."""
    if argument.dtype is None:
        if not isinstance(value, Tensor) and same_constant(argument.constant, value):
            return None
        return f"was exported as the constant {argument.constant!r}, not as {_type_text(value)}"
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return f"was exported as a tensor, not as {_type_text(value)}"
    if value.dtype != to_torch(argument.dtype) or value.dim() != argument.rank:
        return f"is {value.dtype} with {value.dim()} axes; it was exported for {argument.dtype} with {argument.rank}"
    return "is a lazily conjugated or negated view" if value.is_conj() or value.is_neg() else None


def _type_text(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]


def _bound(variant: Variant, inputs: Sequence[Tensor]) -> dict[sympy.Symbol, Any]:
    """The sizes as the arguments tell them: by their shapes, then by their strides."""
    sizes: dict[sympy.Symbol, Any] = {}
    for kind in (0, 1):
        for layout, tensor in zip(variant.tensors, inputs, strict=True):
            for expr, number in zip(layout[kind], (tensor.shape, tensor.stride())[kind], strict=True):
                if isinstance(expr, sympy.Symbol):
                    sizes.setdefault(expr, number)
    return sizes


def _row(numbers: Sequence[Any]) -> str:
    return f"({', '.join(map(str, numbers))})"


def _values(sizes: Sizes) -> str:
    return ", ".join(f"{s} = {v}" for s, v in sizes.items()) or "there are none"


def _visible_outputs(
    described: Sequence[Output], own: list[Any], inputs: Sequence[Tensor], hidden: Sequence[Tensor], sizes: Sizes
) -> list[Tensor]:
    """Tensors that forward returns: its own, arguments, what shows the memory of these, the same one twice."""
    outputs = list(own)
    pools = {"input": inputs, "view": inputs, "same": outputs, "part of output": own, "part of hidden": hidden}
    for at, output in enumerate(described):
        if output.kind != "tensor":
            outputs[at] = _view_of(output, pools[output.kind][output.index], sizes)
    return outputs


def _view_of(output: Output, base: Tensor, sizes: Sizes) -> Tensor:
    if output.view is None:
        return base
    shape, strides, offset, tracked = output.view
    size, step = ([evaluate_exactly(n, sizes) for n in numbers] for numbers in (shape, strides))
    view = base.as_strided(size, step, base.storage_offset() + evaluate_exactly(offset, sizes))
    return view if tracked else view.detach()


def laid_out(tensor: Tensor, strides: Sequence[Any], memory: set[int]) -> Tensor:
    """The tensor with these strides, in memory of its own, and no view where nothing is differentiated."""
    own = _own(tensor, strides, memory)
    return own.detach() if own._is_view() and not torch.is_grad_enabled() else own


def _own(tensor: Tensor, strides: Sequence[Any], memory: set[int]) -> Tensor:
    if memory_of(tensor) not in memory and same_strides(tensor.shape, tensor.stride(), strides):
        return tensor
    still = [isinstance(s, int) and s == 0 for s in strides]
    single = tensor[tuple(slice(0, 1) if s else slice(None) for s in still)] if any(still) else tensor
    row_major = torch.empty(single.shape, device="meta").stride() if not any(still) else None
    if row_major is not None and same_strides(tensor.shape, row_major, strides):
        return tensor.clone(memory_format=torch.contiguous_format)
    own = torch.empty_strided(single.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(single)
    return own.expand(tensor.shape) if any(still) else own
