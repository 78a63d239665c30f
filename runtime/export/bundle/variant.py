"""One variant of an exported Function: captured where just these tensors need gradients, with its graphs as files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import sympy
import torch

from ....ir import Graph
from ....ir.errors import LoweringError
from ....ir.text.document import document
from ....ir.text.relations import relations
from ....ir.text.text import key
from ....ir.types import contiguous_strides, simplify_size
from ....tracer.methods import backward_method
from ....tracer.torch_private import expression_of
from ....tracer.trace import CaptureError
from ...capture.captured_backward import BackwardEntry, gradient_likes, predicted_kinds
from ...capture.outputs import is_as_strided
from ...compiled.compiled import Compiled
from ...execution.graph_to_kernels import graph_of
from ...persistence.literals import NoLiteral, constant_document
from ...specialize.specialization import Specialization
from ...values.tensor_specs import fake_tensor
from ..gather.gathered import export_error, require_closed
from ..gather.loop_lengths import assume_compared
from .archive import canonical
from .contents import Entry, Layout, Output, Variant
from .operators import why_not_portable

Tensor = torch.Tensor
Kinds = tuple[Any, ...]
"""Of each output the layout of its gradient; None for no gradient."""
ALL_SUBSETS = 3
"""Up to so many tensors that may need a gradient, every subset of them is captured; beyond, the likely ones."""


class GraphFiles:
    """Files with graphs, each graph once."""

    def __init__(self, compiler: Compiled) -> None:
        self.compiler = compiler
        self.files: dict[str, bytes] = {}
        self.names: dict[bytes, str] = {}

    def add(self, role: str, graph: Graph) -> str:
        """The name of the file that holds a graph."""
        for value in graph.order():
            if (reason := why_not_portable(value)) is not None:
                raise export_error(self.compiler, reason, value.origin.where)
        try:
            content = canonical(document(graph))
        except ValueError as error:
            raise export_error(self.compiler, f"its {role} has no form as JSON: {error}") from error
        if content not in self.names:
            count = sum(name.startswith(f"graphs/{role}") for name in self.files)
            self.names[content] = f"graphs/{role}{f'_{count + 1}' if count else ''}.json"
            self.files[self.names[content]] = content
        return self.names[content]


def subsets(items: Sequence[int]) -> list[set[int]]:
    """All subsets of a few, the whole first; of many the whole, the whole but one, and each alone."""
    if len(items) <= ALL_SUBSETS:
        return [{i for i, on in zip(items, bits, strict=True) if on} for bits in product((1, 0), repeat=len(items))]
    return [set(items), *({*items} - {i} for i in items), *({i} for i in items)]


def with_needs(args: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    """Stand-ins like these of which other ones need a gradient."""
    supply = iter(needs)
    return [_like(a, next(supply)) if isinstance(a, Tensor) else a for a in args]


def _like(fake: Tensor, need: bool) -> Tensor:
    return fake_tensor(tuple(fake.shape), fake.stride(), fake.dtype, fake.device, need)


# ------------------------------------------------------------------ the variant
def variant_of(compiler: Compiled, args: Sequence[Any], needs: tuple[bool, ...], graphs: GraphFiles) -> Variant:
    """Capture forward, and backward for the gradients that may come together."""
    is_first = not graphs.files  # where all gradients are asked for
    # Captured as a call with these gradients would be; nothing that another process could not have may be in it.
    spec = compiler.captures.only(with_needs(args, needs))
    require_closed(compiler, spec)
    entries = dict(_backwards(compiler, spec)) if any(needs) and backward_method(compiler.user.cls) is not None else {}
    assume_compared(spec, entries)
    # Lowering one graph may teach another something about sizes: the second round sees all of it.
    for _ in range(2):
        forward = _forward_graph(spec)
        backwards = {kinds: _backward_graph(spec, entry) for kinds, entry in entries.items()}
    if is_first:
        _require_indifferent(compiler, spec, backwards)
    # Sizes are told by shapes and strides of the arguments alone: whatever is assumed of others is refused.
    tensors = tuple((_expressions(f.shape), _expressions(f.stride())) for f in spec.captured.forward.fakes)
    symbols = {s.name: s for s in _symbols_of(tensors)}
    captured = spec.captured.forward
    return Variant(
        needs=needs, graph=graphs.add("forward", forward), tensors=tensors, symbols=symbols,
        ranges=_ranges(spec, symbols.values()),
        assumptions=tuple(_assumptions(compiler, spec, set(symbols.values()))),
        outputs=tuple(_outputs(compiler, spec)), is_tuple=captured.is_tuple,
        saved=tuple(captured.saved), attributes=tuple(captured.tensor_attributes.values()),
        dirty=tuple(captured.dirty), non_differentiable=tuple(captured.non_differentiable),
        materialize_grads=captured.materialize_grads,
        entries=tuple(
            Entry(
                tuple(k is not None for k in kinds),
                graphs.add("backward", g),
                tuple(entries[kinds].passed_gradients.items()),
            )
            for kinds, g in backwards.items()
        ),
    )  # fmt: skip


def _forward_graph(spec: Specialization) -> Graph:
    """forward; what is an argument, or looks at one, is no output of its own."""
    captured = spec.captured
    graph = graph_of(captured.forward.trace, f"{captured.name}_forward")
    graph.outputs = [None if i in captured.skip else o for i, o in enumerate(graph.outputs)]
    return graph


def _backward_graph(spec: Specialization, entry: BackwardEntry) -> Graph:
    """backward; what is a gradient as it came is no output of its own."""
    graph = graph_of(entry.trace, f"{spec.captured.name}_backward")
    graph.outputs = [None if i in entry.passed_gradients else o for i, o in enumerate(graph.outputs)]
    return graph


# ------------------------------------------------------------------ backward
def _backwards(compiler: Compiled, spec: Specialization) -> Iterator[tuple[Kinds, BackwardEntry]]:
    """backward for the gradients that may come together. Those that it cannot be captured for are left out."""
    predicted = predicted_kinds(spec.captured)
    for kinds in _gradient_kinds(spec, predicted):
        try:
            entry = spec.backward.entry(kinds)
        except CaptureError:
            if kinds == predicted:
                raise
            continue
        require_closed(compiler, spec, entry)
        yield kinds, entry


def _gradient_kinds(spec: Specialization, predicted: Kinds) -> list[Kinds]:
    """The predicted gradients, and where missing ones are None subsets of them."""
    present = [i for i, k in enumerate(predicted) if k is not None]
    if spec.captured.forward.materialize_grads or len(present) < 2:
        return [predicted]
    return [tuple(k if i in on else None for i, k in enumerate(predicted)) for on in subsets(present) if on]


def _require_indifferent(compiler: Compiled, spec: Specialization, backwards: dict[Kinds, Graph]) -> None:
    """backward computes the same whatever the layout of its gradients; one that raises for a layout may do so."""
    captured = spec.captured
    predicted = predicted_kinds(captured)
    if predicted not in backwards:
        return
    for layout in ("expanded", "reversed"):
        likes = zip(predicted, gradient_likes(captured), strict=True)
        kinds = tuple(k if k is None else _layout(layout, like) for k, like in likes)
        try:
            for_layout = _backward_graph(spec, spec.backward.entry(kinds))
        except (CaptureError, LoweringError):
            continue
        if key(_without_strides(for_layout)) != key(_without_strides(backwards[predicted])):
            refusal = "its backward depends on the layout of its gradients"
            raise export_error(compiler, refusal, captured.backward_place())


def _layout(layout: str, like: Any) -> Any:
    if layout == "expanded":
        return layout
    return tuple(reversed(range(like.dim()))) if like.dim() > 1 else "contiguous"


def _without_strides(graph: Graph) -> Graph:
    """The graph, where everything is row-major."""
    plain = graph.copy()
    for value in plain.inputs:
        value.attrs["params"] = {**value.params, "strides": contiguous_strides(value.shape)}
    return plain.returning(plain.outputs)


# ------------------------------------------------------------------ sizes and outputs
def _symbols_of(tensors: Sequence[Layout]) -> list[sympy.Symbol]:
    """The sizes that the arguments tell, in the order in which they do: by their shapes, then by their strides."""
    sizes = [s for kind in (0, 1) for layout in tensors for s in layout[kind]]
    return list(dict.fromkeys(s for s in sizes if isinstance(s, sympy.Symbol)))


def _ranges(spec: Specialization, symbols: Any) -> dict[str, tuple[int, int | None]]:
    ranges = {}
    for symbol in symbols:
        span = spec.captured.session.env.var_to_range[symbol]
        low, high = (int(e) if e.is_Integer else None for e in (sympy.sympify(span.lower), sympy.sympify(span.upper)))
        ranges[symbol.name] = (max(low or 0, 0), high if high is not None and high < 1 << 61 else None)
    return ranges


def _assumptions(compiler: Compiled, spec: Specialization, symbols: set[sympy.Symbol]) -> Iterator[Any]:
    """Assumptions about the sizes that the arguments tell."""
    captured = spec.captured
    for condition in captured.session.conditions(captured.symbols):
        settled = condition if condition.free_symbols <= symbols else captured.session.env.replace(condition)
        if not settled.free_symbols <= symbols:
            raise export_error(compiler, f"it assumes {condition}, which its arguments do not tell")
        try:
            yield from relations([settled])
        except ValueError as error:
            raise export_error(compiler, f"it assumes {condition}: {error}") from error


def _outputs(compiler: Compiled, spec: Specialization) -> Iterator[Output]:
    forward = spec.captured.forward
    tensors = iter(forward.fake_outputs)
    bases = {"view": forward.fakes, "part of output": forward.fake_outputs, "part of hidden": forward.fake_hidden}
    for described in forward.outputs:
        if described.kind == "object":
            yield Output("object", value=_literal(compiler, described.value))
            continue
        fake, view = next(tensors), None
        if described.kind in bases:
            if not is_as_strided(fake, bases[described.kind][described.index]):
                raise export_error(compiler, "it returns a view with another dtype, or a lazily conjugated one")
            view = (*map(_expressions, (fake.shape, fake.stride())), _offset(fake), bool(described.value))
        yield Output(described.kind, described.index, view)


def _literal(compiler: Compiled, value: Any) -> Any:
    try:
        constant_document(value)
    except NoLiteral as error:
        raise export_error(compiler, f"it returns {error}, which cannot be written down") from error
    return value


def _expressions(numbers: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(n if isinstance(n, int) else simplify_size(n.node.expr) for n in numbers)


def _offset(fake: Tensor) -> Any:
    offset = fake.storage_offset()
    return offset if isinstance(offset, int) else simplify_size(expression_of(offset))
