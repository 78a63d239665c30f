"""Forward's results in eager's form: views and aliases of each other, the user's containers, arguments handed back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ...ir.program import ValueRef
from ...tracer.containers import Hole, map_leaves
from ...tracer.function import ForwardCapture, rebind
from ...tracer.methods import as_tuple
from ...tracer.opaque.output_aliasing import span
from ...tracer.torch_private import neg_view
from ...tracer.trace import Trace
from .captured import CapturedFunction

Tensor = torch.Tensor
Sizes = Mapping[Any, Any]
V = TypeVar("V")
VIEWS = frozenset(f"aten::{name}" for name in "t transpose permute view expand unsqueeze squeeze select slice".split())
"""Operations that are views of their argument and nothing else."""


def finish_outputs(
    captured: CapturedFunction, results: list[Any], inputs: Sequence[Tensor], sizes: Sizes
) -> tuple[list[Tensor], list[Tensor]]:
    """(the user's tensor outputs, the hidden ones) from what a graph returned: aliases and views as in eager."""
    # Aliases first: an output that shows another one's memory was not computed.
    n = len(captured.forward.tensor_outputs)
    outputs, hidden = results[:n], results[n:]
    if captured.skip:
        outputs = alias_outputs(captured, outputs, inputs, sizes, hidden)
    if captured.is_plain:  # views of memory that no caller sees: autograd would refuse to write to them
        skip = captured.skip
        return [o.detach() if o._is_view() and i not in skip else o for i, o in enumerate(outputs)], hidden
    # Kernels return fresh memory where eager returns a view that autograd knows as one.
    inner = captured.inner_views
    return [o if o._is_view() or i not in inner else o.view_as(o) for i, o in enumerate(outputs)], hidden


def alias_outputs(
    captured: CapturedFunction,
    outputs: list[Any],
    inputs: Sequence[Tensor],
    sizes: Sizes,
    hidden: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Outputs that are an input, show the memory of one or of another output, or are one object twice."""

    def view(fake: Tensor, base: Tensor, like: Tensor, tracked: bool) -> Tensor:
        result = view_like(fake, base, sizes, like)
        return result if tracked else result.detach()

    return with_aliases(captured.forward, outputs, inputs, hidden, view)


def with_aliases(
    captured: ForwardCapture, outputs: Sequence[V], inputs: Sequence[V], hidden: Sequence[V],
    view: Callable[[Tensor, V, Tensor, bool], V],
) -> list[V]:  # fmt: skip
    """Outputs of which some are an input, show the memory of one or of another output, or are one object twice.

    Over values of any kind: tensors in a call, their names in a text. view: (fake of the view, base, fake of the base,
    whether autograd knows it as a view) -> the view.
    """
    full = list(outputs)
    pools = {
        "view": (inputs, captured.fakes),
        "part of output": (full, captured.fake_outputs),
        "part of hidden": (hidden, captured.fake_hidden),
    }
    for i, position in enumerate(captured.tensor_outputs):
        described = captured.outputs[position]
        kind, index = described.kind, described.index
        if kind == "input":
            full[i] = inputs[index]
        elif kind == "same":
            full[i] = full[index]
        elif kind in pools:
            bases, likes = pools[kind]
            full[i] = view(captured.fake_outputs[i], bases[index], likes[index], bool(described.value))
    return full


def rebuild_output(
    captured: CapturedFunction,
    outputs: Sequence[Tensor],
    inputs: Sequence[Any] = (),
    hidden: Sequence[Any] = (),
    sizes: Any = None,
) -> Any:
    """The user's return value: tensors in their places among plain objects, a tuple where the method returned one."""
    supply = iter(outputs)

    def leaf(value: Any) -> Any:
        return tensor_at(value.key, inputs, outputs, hidden) if isinstance(value, Hole) else rebind(value, sizes)

    full = tuple(
        map_leaves(o.value, leaf) if o.kind == "object" else next(supply) for o in captured.forward.outputs
    )
    return full if captured.forward.is_tuple else full[0]


def from_flat_outputs(
    captured: CapturedFunction, outputs: Sequence[Tensor], inputs: Sequence[Any], sizes: Any, args: Sequence[Any]
) -> Any:
    """The user's return value from a function's outputs: the visible tensors, then the hidden ones, all tracked alike.

    inputs: the tensors among `args`, the arguments by position.
    """
    visible = len(captured.forward.tensor_outputs)
    hidden = [h.detach() for h in outputs[visible:]] if captured.forward.returns_hidden else ()
    result = rebuild_output(captured, outputs[:visible], inputs, hidden, sizes)
    return restore_passthrough_inputs(captured, result, args)


def restore_passthrough_inputs(captured: CapturedFunction, result: Any, args: Sequence[Any]) -> Any:
    """A plain function's return value: its arguments unchanged, which a Function makes views of."""
    if not captured.passthrough:
        return result
    full = list(as_tuple(result))
    for i, argument in captured.passthrough:
        full[i] = args[argument]
    return tuple(full) if captured.forward.is_tuple else full[0]


def tensor_at(
    place: ValueRef | None, inputs: Sequence[Any], outputs: Sequence[Any], hidden: Sequence[Any]
) -> Any:
    """The real tensor at a place."""
    if place is None:
        return None
    return {"input": inputs, "output": outputs, "hidden": hidden}[place.kind][place.index]


def view_like(fake: Tensor, base: Tensor, sizes: Sizes, of: Tensor | None = None) -> Tensor:
    """A view of `base` as the fake is one of the fake `of`: strides, offset, dtype, lazy conjugate."""
    shape, strides, offset = view_of(fake, sizes)
    base = base if fake.dtype == base.dtype else _reinterpret(base, fake.dtype)
    view = base.as_strided(shape, strides, base.storage_offset() + offset)
    view = view.conj() if _differ(Tensor.is_conj, fake, of) else view
    return neg_view(view) if _differ(Tensor.is_neg, fake, of) else view


def is_as_strided(fake: Tensor, of: Tensor | None) -> bool:
    """True if `as_strided` of the base alone is the view."""
    bits = _differ(Tensor.is_conj, fake, of) or _differ(Tensor.is_neg, fake, of)
    return not bits and (of is None or fake.dtype == of.dtype)


def _differ(bit: Callable[[Tensor], bool], fake: Tensor, of: Tensor | None) -> bool:
    return bit(fake) != (of is not None and bit(of))


def view_of(view: Tensor, sizes: Sizes) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape, strides and first element of a view within its base."""
    shape, strides = rebind(tuple(view.shape), sizes), rebind(tuple(view.stride()), sizes)
    return shape, strides, int(rebind(view.storage_offset(), sizes))


def _reinterpret(base: Tensor, dtype: torch.dtype) -> Tensor:
    """The memory that a tensor spans as a vector of another dtype."""
    every = span(tuple(base.shape), base.stride())
    return base.as_strided((every,), (1,), base.storage_offset()).view(dtype)


def passthrough_results(trace: Trace) -> dict[int, int]:
    """Results of a trace that are one of its inputs, untouched: {result: input}."""
    graph = trace.graph_module.graph
    (results,) = graph.find_nodes(op="output")[0].args
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    untouched = {n: i for i, n in enumerate(inputs) if not any(map(_is_write, n.users))}
    return {r: untouched[n] for r, n in enumerate(results) if n in untouched}


def views_of_inputs(trace: Trace) -> dict[int, tuple[int, Tensor]]:
    """Results of a trace that are views of one of its inputs: {result: (input, what the view is like)}."""
    graph = trace.graph_module.graph
    (results,) = graph.find_nodes(op="output")[0].args
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    if any(map(_is_write, graph.nodes)):
        return {}
    bases = {r: (_base_of(n), n) for r, n in enumerate(results) if isinstance(n, torch.fx.Node) and n not in inputs}
    return {r: (inputs.index(base), n.meta["val"]) for r, (base, n) in bases.items() if base in inputs}


def _base_of(node: torch.fx.Node) -> torch.fx.Node:
    """The node that a chain of views begins with."""
    while getattr(getattr(node.target, "_schema", None), "name", None) in VIEWS:
        node = node.all_input_nodes[0]
    return node


def _is_write(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
