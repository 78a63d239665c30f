"""The schema of a bundle, as plain values: one Function, its variants by which arguments need gradients, their graphs.

Every class is written by `data()` and read back by a function that refuses whatever it does not know.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from ....ir import Graph
from ....ir.program import ValueRef
from ....ir.text.document import (
    Symbols,
    document_error,
    fields_from,
    index_from,
    list_from,
    size_document,
    size_from_document,
    sizes_document,
    sizes_from,
    symbols_document,
    symbols_from,
    text_from,
)
from ....ir.text.relations import Condition, relation_document, relation_from
from ....ir.text.text import symbols_in
from ....ir.types import ITEMSIZE, Size
from ...persistence.literals import constant_document, constant_from, places_document

VIEWS = ("view", "part of output", "part of hidden")
KINDS = ("tensor", "input", "same", "object", *VIEWS)
STYLES = ("ctx", "setup_context")
AUTOCAST = (None, "float16", "bfloat16", "float32")
FLAGS = ("once_differentiable", "has_backward", "has_jvp", "has_vmap", "clear_saved_tensors_on_access")
MOST_VARIANTS = 64
MOST_ARGUMENTS = 256


@dataclass(frozen=True)
class Argument:
    """An argument as it was exported: a tensor of a dtype and rank, or a constant."""

    name: str
    dtype: str | None = None
    rank: int = 0
    constant: Any = None

    def data(self) -> dict[str, Any]:
        if self.dtype is None:
            return {"name": self.name, "constant": constant_document(self.constant)}
        return {"name": self.name, "dtype": self.dtype, "rank": self.rank}


@dataclass(frozen=True)
class Output:
    """One return value of forward: see tracer.function.Output. A view has shape, strides, offset, and whether
    autograd knows it as one."""

    kind: str
    index: int = 0
    view: tuple[tuple[Size, ...], tuple[Size, ...], Size, bool] | None = None
    value: Any = None

    def data(self) -> dict[str, Any]:
        document: dict[str, Any] = {"kind": self.kind, "index": self.index}
        if self.view is not None:
            shape, strides, offset, tracked = self.view
            document["view"] = [sizes_document(shape), sizes_document(strides), size_document(offset), tracked]
        return {**document, "value": constant_document(self.value)} if self.kind == "object" else document


@dataclass(frozen=True)
class Entry:
    """backward for gradients that are there or not, one per output, by the file of its graph.

    passed: (argument, output) where the gradient of the argument is that of the output, as it came.
    """

    gradients: tuple[bool, ...]
    graph: str
    passed: tuple[tuple[int, int], ...] = ()

    def data(self) -> dict[str, Any]:
        return {"gradients": list(self.gradients), "graph": self.graph, "passed": [list(p) for p in self.passed]}


Layout = tuple[tuple[Size, ...], tuple[Size, ...]]


@dataclass(frozen=True)
class Variant:
    """The Function where just these tensors need gradients. `tensors`: shape and strides of each tensor argument."""

    needs: tuple[bool, ...]
    graph: str
    tensors: tuple[Layout, ...]
    symbols: Mapping[str, sympy.Symbol]
    ranges: Mapping[str, tuple[int, int | None]]
    assumptions: tuple[Condition, ...]
    outputs: tuple[Output, ...]
    is_tuple: bool
    saved: tuple[ValueRef | None, ...]
    attributes: tuple[ValueRef, ...]
    dirty: tuple[ValueRef, ...]
    non_differentiable: tuple[ValueRef, ...]
    materialize_grads: bool
    entries: tuple[Entry, ...]

    def data(self) -> dict[str, Any]:
        return {
            "needs_input_grad": list(self.needs),
            "forward": self.graph,
            "tensors": [[sizes_document(shape), sizes_document(strides)] for shape, strides in self.tensors],
            "symbols": symbols_document(self.symbols.values()),
            "ranges": {name: list(span) for name, span in self.ranges.items()},
            "assumptions": [relation_document(c) for c in self.assumptions],
            "outputs": [o.data() for o in self.outputs],
            "returns_tuple": self.is_tuple,
            "materialize_grads": self.materialize_grads,
            **{name: places_document(getattr(self, name)) for name in _PLACES},
            "backward": [e.data() for e in self.entries],
        }

    @property
    def tensor_outputs(self) -> list[Output]:
        """The outputs that are tensors, by the numbers that places give them."""
        return [o for o in self.outputs if o.kind != "object"]

    @property
    def residuals(self) -> list[ValueRef | None]:
        """The places that backward's graphs read first."""
        return [*self.saved, *self.attributes]


@dataclass(frozen=True)
class Function:
    """One exported Function. `flags`: what is true of it, out of FLAGS. `defaults` belong to the last parameters."""

    name: str
    doc: str | None
    style: str
    derive_jvp: str | bool
    autocast: tuple[str | None, str | None]
    flags: frozenset[str]
    arguments: tuple[Argument, ...]
    defaults: tuple[Any, ...]
    variants: tuple[Variant, ...]

    def data(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "doc": self.doc,
            "style": self.style,
            "derive_jvp": self.derive_jvp,
            "autocast": list(self.autocast),
            "flags": sorted(self.flags),
            "arguments": [a.data() for a in self.arguments],
            "defaults": [constant_document(d) for d in self.defaults],
            "variants": [v.data() for v in self.variants],
        }

    @property
    def slots(self) -> list[int]:
        """The positions of tensors among the arguments."""
        return [i for i, a in enumerate(self.arguments) if a.dtype is not None]


_PLACES = ("saved", "attributes", "dirty", "non_differentiable")


# ------------------------------------------------------------------ read
def function_from(data: Any) -> Function:
    """The Function that `Function.data` wrote. Raises ParseError."""
    names = ("name", "doc", "style", "derive_jvp", "autocast", "flags", "arguments", "defaults", "variants")
    values = fields_from(data, *names, at="function")
    arguments = tuple(_argument(a) for a in list_from(values["arguments"], "arguments", MOST_ARGUMENTS))
    name, doc = identifier(values["name"], "name"), values["doc"]
    if doc is not None and (not isinstance(doc, str) or len(doc) > 10_000):
        raise document_error("the docstring is none", "doc")
    return Function(
        name=name, doc=doc, style=one_of(values["style"], STYLES, "style"),
        derive_jvp=one_of(values["derive_jvp"], ("backward", "forward", False), "derive_jvp"),
        autocast=_autocast(values["autocast"]),
        flags=frozenset(one_of(f, FLAGS, "flags") for f in list_from(values["flags"], "flags", len(FLAGS))),
        arguments=arguments,
        defaults=tuple(
            constant_from(d, {}, "defaults") for d in list_from(values["defaults"], "defaults", len(arguments))
        ),
        variants=tuple(_variant(v, arguments) for v in list_from(values["variants"], "variants", MOST_VARIANTS)),
    )  # fmt: skip


def one_of(data: Any, choices: Sequence[Any], at: str) -> Any:
    """The data, which has to be one of these values."""
    if not any(type(data) is type(k) and data == k for k in choices):
        raise document_error(f"{str(data)[:40]!r} is none of {', '.join(map(str, choices))}", at)
    return data


def identifier(data: Any, at: str) -> str:
    """The data, which has to be a name."""
    name = text_from(data, at, 100)
    if not name.isidentifier():
        raise document_error(f"{name[:40]!r} is no name", at)
    return name


def _flag(data: Any, at: str) -> bool:
    return bool(one_of(data, (True, False), at))


def _autocast(data: Any) -> tuple[str | None, str | None]:
    cpu, cuda = (one_of(d, AUTOCAST, "autocast") for d in list_from(data, "autocast", 2))
    return cpu, cuda


def _argument(data: Any) -> Argument:
    if isinstance(data, dict) and "constant" in data:
        values = fields_from(data, "name", "constant", at="arguments")
        name = identifier(values["name"], "arguments")
        return Argument(name, constant=constant_from(values["constant"], {}, "arguments"))
    values = fields_from(data, "name", "dtype", "rank", at="arguments")
    dtype = one_of(values["dtype"], list(ITEMSIZE), "arguments")
    return Argument(identifier(values["name"], "arguments"), dtype, index_from(values["rank"], 65, "arguments"))


def _variant(data: Any, arguments: Sequence[Argument]) -> Variant:
    at = "variants"
    values = fields_from(data, "needs_input_grad", "forward", "tensors", "symbols", "ranges", "assumptions", "outputs",
                         "returns_tuple", "materialize_grads", *_PLACES, "backward", at=at)  # fmt: skip
    symbols = symbols_from(values["symbols"], at)
    tensors = sum(a.dtype is not None for a in arguments)
    outputs = tuple(_output(o, symbols, tensors) for o in list_from(values["outputs"], at, MOST_ARGUMENTS))
    needs = tuple(_flag(n, at) for n in list_from(values["needs_input_grad"], at, MOST_ARGUMENTS))
    if len(needs) != tensors:
        raise document_error("not every tensor is said to need a gradient or not", at)
    places = {name: _places_from(values[name], name) for name in _PLACES}
    return Variant(
        needs=needs, graph=text_from(values["forward"], at), symbols=symbols, ranges=_ranges(values["ranges"], symbols),
        assumptions=tuple(relation_from(c, symbols, "assumptions") for c in list_from(values["assumptions"], at, 2000)),
        outputs=outputs, is_tuple=_flag(values["returns_tuple"], at), saved=places["saved"],
        materialize_grads=_flag(values["materialize_grads"], at), **{n: _present(places[n], n) for n in _PLACES[1:]},
        tensors=_tensors(values["tensors"], symbols, [a.rank for a in arguments if a.dtype is not None]),
        entries=tuple(
            _entry(e, len(outputs), len(arguments)) for e in list_from(values["backward"], "backward", MOST_VARIANTS)
        ),
    )  # fmt: skip


def _tensors(data: Any, symbols: Symbols, ranks: Sequence[int]) -> tuple[Layout, ...]:
    at = "tensors"
    pairs = (list_from(pair, at, 2) for pair in list_from(data, at, len(ranks)))
    layouts = tuple((sizes_from(shape, symbols, at), sizes_from(strides, symbols, at)) for shape, strides in pairs)
    if [(len(shape), len(strides)) for shape, strides in layouts] != [(rank, rank) for rank in ranks]:
        raise document_error("not every tensor has a shape and strides of its rank", at)
    return layouts


def _ranges(data: Any, symbols: Symbols) -> dict[str, tuple[int, int | None]]:
    at = "ranges"
    if not isinstance(data, dict) or set(data) != set(symbols):
        raise document_error("not every size has a range", at)
    spans = {name: list_from(span, at, 2) for name, span in data.items()}
    limit = 1 << 62
    return {n: (index_from(low, limit, at), None if high is None else index_from(high, limit, at))
            for n, (low, high) in spans.items()}  # fmt: skip


def _output(data: Any, symbols: Symbols, tensors: int) -> Output:
    at = "outputs"
    kind = one_of(data.get("kind") if isinstance(data, dict) else None, KINDS, at)
    extra = {"object": ("value",), **dict.fromkeys(VIEWS, ("view",))}.get(kind, ())
    values = fields_from(data, "kind", "index", *extra, at=at)
    index = index_from(values["index"], tensors if kind in ("input", "view") else MOST_ARGUMENTS, at)
    if kind == "object":
        return Output(kind, index, value=constant_from(values["value"], symbols, at))
    if kind not in VIEWS:
        return Output(kind, index)
    shape, strides, offset, tracked = list_from(values["view"], at, 4)
    shape, strides = sizes_from(shape, symbols, at), sizes_from(strides, symbols, at)
    if len(shape) != len(strides):
        raise document_error("a view has a stride for each size", at)
    return Output(kind, index, (shape, strides, size_from_document(offset, symbols, at), _flag(tracked, at)))


def _places_from(data: Any, at: str) -> tuple[ValueRef | None, ...]:
    return tuple(None if p is None else _place(list_from(p, at, 2), at) for p in list_from(data, at, 2000))


def _place(data: list[Any], at: str) -> ValueRef:
    kind, index = data
    return ValueRef(one_of(kind, ("input", "output", "hidden"), at), index_from(index, 2000, at))


def _present(places: tuple[ValueRef | None, ...], at: str) -> tuple[ValueRef, ...]:
    present = tuple(p for p in places if p is not None)
    if len(present) != len(places):
        raise document_error("a place is missing", at)
    return present


def _entry(data: Any, outputs: int, arguments: int) -> Entry:
    values = fields_from(data, "gradients", "graph", "passed", at="backward")
    gradients = tuple(_flag(g, "backward") for g in list_from(values["gradients"], "backward", MOST_ARGUMENTS))
    if len(gradients) != outputs:
        raise document_error("not every output is said to have a gradient or not", "backward")
    pairs = (list_from(p, "backward", 2) for p in list_from(values["passed"], "backward", MOST_ARGUMENTS))
    passed = tuple((index_from(a, arguments, "backward"), index_from(o, outputs, "backward")) for a, o in pairs)
    return Entry(gradients, text_from(values["graph"], "backward"), passed)


# ------------------------------------------------------------------ whether the parts fit each other
def require_fitting(function: Function, graphs: Mapping[str, Graph]) -> None:
    """The graphs take and give what the manifest says. Raises ParseError, or KeyError for a graph that is missing."""
    if not function.variants or len(function.defaults) > len(function.arguments):
        raise document_error("there is nothing to call", "variants")
    for variant in function.variants:
        _require_forward(function, variant, graphs[variant.graph])
        for entry in variant.entries:
            _require_backward(function, variant, entry, graphs[entry.graph])


def _require_forward(function: Function, variant: Variant, graph: Graph) -> None:
    # Inputs: just the tensors, whose layouts tell every size.
    tensors = [function.arguments[i] for i in function.slots]
    inputs = [(v.dtype, v.ndim) for v in graph.inputs]
    if inputs != [(a.dtype, a.rank) for a in tensors]:
        raise document_error("its inputs are not the tensors of the manifest", variant.graph)
    symbols = {s for layout in variant.tensors for part in layout for s in part if isinstance(s, sympy.Symbol)}
    if symbols != set(variant.symbols.values()):
        raise document_error("a size is not told by any argument", variant.graph)
    # Outputs: each is made by the graph, or shows memory of something that is.
    visible = variant.tensor_outputs
    hidden = len(graph.outputs) - len(visible)
    if any(o.kind == "tensor" and v is None for o, v in zip(visible, graph.outputs, strict=False)):
        raise document_error("an output is not computed", variant.graph)
    if any(o.kind == "same" and not o.index < at for at, o in enumerate(visible)):
        raise document_error("an output is the same as one that comes later", variant.graph)
    own = [at for at, o in enumerate(visible) if o.kind == "tensor"]
    limits: dict[str, Collection[int]] = {"part of output": own, "part of hidden": range(hidden)}
    if any(o.index not in limits[o.kind] for o in visible if o.kind in limits):
        raise document_error("an output is part of something that is not made", variant.graph)
    # Places last, since they count among these.
    counts = {"input": len(tensors), "output": len(visible), "hidden": hidden}
    places = [p for name in _PLACES for p in getattr(variant, name) if p is not None]
    if hidden < 0 or any(not p.index < counts[p.kind] for p in places) or None in graph.outputs[len(visible) :]:
        raise document_error("a place is not among what forward makes", variant.graph)
    _require_bound(variant, graph, variant.graph)


def _require_backward(function: Function, variant: Variant, entry: Entry, graph: Graph) -> None:
    expected = len([p for p in variant.residuals if p is not None]) + sum(entry.gradients)
    if len(graph.inputs) != expected or len(graph.outputs) != len(function.arguments):
        raise document_error("it does not take what forward keeps, or gives no gradient per argument", entry.graph)
    moving = {slot for slot, need in zip(function.slots, variant.needs, strict=True) if need}
    computed = [*(i for i, o in enumerate(graph.outputs) if o is not None), *(a for a, _ in entry.passed)]
    if not moving.issuperset(computed) or not all(entry.gradients[o] for _, o in entry.passed) or graph.mutations:
        raise document_error("it gives a gradient that was not asked for", entry.graph)
    if any(g and o.kind == "object" for g, o in zip(entry.gradients, variant.outputs, strict=True)):
        raise document_error("it takes the gradient of something that is no tensor", entry.graph)
    _require_bound(variant, graph, entry.graph)


def _require_bound(variant: Variant, graph: Graph, name: str) -> None:
    if not symbols_in(graph) <= set(variant.symbols.values()):
        raise document_error("it speaks of a size that no argument tells", name)
