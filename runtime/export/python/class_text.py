"""The text of the Function class in an exported module: forward, setup_context, backward, jvp, vmap."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ....tracer.methods import method_place
from ....tracer.torch_private import expression_of
from ..gather.batched import LANES
from ..gather.gathered import ExportError
from ..gather.tangents import moving, output_moves
from ..text.expressions import Expressions
from ..text.function import FunctionScopes
from ..text.scope import Scope, snake
from .launchers import dtype_text
from .literals import assignment, constant_text, docstring, indented, is_literal, unpacking

_PLAIN = re.compile(r"[\w.+ -]*", re.ASCII)
"""Values that an f-string shows as they are."""


@dataclass
class ClassText:
    """A class as it will be written. vmap: the call that its vmap makes; behind_wrappers: backward sees wrappers."""

    scopes: FunctionScopes
    name: str
    doc: str | None
    vmap: str | None
    behind_wrappers: bool

    def __post_init__(self) -> None:
        self.exported, self.tensors = self.scopes.exported, self.scopes.tensors
        self.outputs = output_names(self.scopes)
        self.hidden = self.outputs[self.scopes.visible :]


def output_names(scopes: FunctionScopes) -> list[str]:
    """The names of forward's tensor outputs and of the hidden ones, as they are returned."""
    forward, names = scopes.exported.specialization.captured.forward, list[str]()
    for i, output in enumerate(scopes.exported.forward.graph.outputs):
        if output is not None:
            names.append(scopes.forward.name_of(output))
            continue
        described = forward.outputs[forward.tensor_outputs[i]]
        names.append((names if described.kind == "same" else scopes.tensors)[described.index])
    return names


def class_lines(text: ClassText) -> Iterator[str]:
    """The whole class, and where forward has hidden results a public one that leaves them out."""
    methods = text.scopes.by_method
    yield f"class {text.name}(torch.autograd.Function):"
    if text.doc and text.doc != inspect.getdoc(torch.autograd.Function):
        yield from indented(docstring(text.doc))
        yield ""
    # In the order in which autograd calls them.
    yield from indented(_forward(text))
    yield ""
    yield from indented(_setup_context(text))
    if "backward" in methods:
        yield ""
        yield from indented(_backward(text, methods["backward"]))
    if "jvp" in methods:
        yield ""
        yield from indented(_jvp(text, methods["jvp"]))
    if text.vmap is not None:
        yield from indented(_vmap(text.vmap))
    if text.name != text.exported.name:
        yield from _public_class(text)


# ------------------------------------------------------------------ forward
def _forward(text: ClassText) -> Iterator[str]:
    scope = text.scopes.forward
    yield "@staticmethod"
    yield f"def forward({', '.join(text.exported.names)}):"
    yield from indented(_constants(text))
    call = f"{scope.function}({', '.join(scope.inputs)})"
    yield f"    {assignment([scope.name_of(o) for o in scope.outputs], call)}"
    yield f"    return {', '.join(_returned(text))}"


def _constants(text: ClassText) -> Iterator[str]:
    """Arguments that are no tensors are compiled in."""
    exported = text.exported
    for name, value in zip(exported.names, exported.args, strict=True):
        if isinstance(value, torch.Tensor):
            continue
        if not is_literal(value):
            raise ExportError(
                function=exported.name, reason=f"its argument {name} is a {type(value).__name__}",
                where=method_place(exported.cls.forward), fix="give numbers, strings, dtypes or None.",  # type: ignore[attr-defined]
            )  # fmt: skip
        yield f"if {name} != {constant_text(value)}:"
        prefix = f"{snake(exported.name)} was exported for {name} = {value}, not "
        message = f'f"{prefix}{{{name}}}"' if _PLAIN.fullmatch(str(value)) else f"{prefix!r} + repr({name})"
        yield f"    raise ValueError({message})"


def _returned(text: ClassText) -> list[str]:
    """The values that the user returns, tensors by name, then the hidden tensors."""
    forward = text.exported.specialization.captured.forward
    tensors = [o for o in forward.outputs if o.kind != "object"]
    names = text.outputs[: text.scopes.visible]
    tensor_texts = (_tensor(text, *each) for each in zip(tensors, names, forward.fake_outputs, strict=False))
    users = [constant_text(o.value) if o.kind == "object" else next(tensor_texts) for o in forward.outputs]
    return [*users, *text.hidden]


def _tensor(text: ClassText, output: Any, name: str, fake: torch.Tensor) -> str:
    """An output by name; a view is made of its argument."""
    if output.kind != "view":
        return name
    base = text.exported.specialization.captured.forward.fakes[output.index]
    at = [[_expression(n) for n in sizes] for sizes in (fake.shape, fake.stride())]
    if at == [[_expression(n) for n in sizes] for sizes in (base.shape, base.stride())]:
        return f"{name}.view_as({name})"
    sources = text.scopes.forward.sources
    by_source = {s: sources[s] if isinstance(n, str) else n for s, n in text.scopes.symbols.items() if s in sources}
    expressions = Expressions(by_source)
    first = expressions.text(_expression(fake.storage_offset()))
    shape, strides = (expressions.tuple(sizes) for sizes in at)
    return f"{name}.as_strided({shape}, {strides}, {name}.storage_offset() + {first})"


def _expression(size: Any) -> Any:
    return size if isinstance(size, int) else expression_of(size)


# ------------------------------------------------------------------ what is saved
def _setup_context(text: ClassText) -> Iterator[str]:
    lines = [*_marks(text), *_saved(text)]
    outputs = iter(text.outputs)
    described = text.exported.specialization.captured.forward.outputs
    users = ["_" if o.kind == "object" else next(outputs) for o in described]
    results = [*users, *outputs]
    yield "@staticmethod"
    yield "def setup_context(ctx, inputs, output):"
    read = set(re.findall(r"\w+", "\n".join(lines)))
    if read & set(text.exported.names):
        yield f"    {unpacking(list(text.exported.names))} = inputs"
    if read & set(results):
        yield f"    {', '.join(results)} = output"
    yield from indented(lines or ["pass"])


def _names_of(text: ClassText, places: Any) -> list[str]:
    return [text.scopes.place_name(text.outputs, p) for p in places]


def _marks(text: ClassText) -> Iterator[str]:
    forward = text.exported.specialization.captured.forward
    if dirty := _names_of(text, forward.dirty):
        yield f"ctx.mark_dirty({', '.join(dirty)})"
    if still := list(dict.fromkeys([*_names_of(text, forward.non_differentiable), *text.hidden])):
        yield f"ctx.mark_non_differentiable({', '.join(still)})"


def _saved(text: ClassText) -> Iterator[str]:
    exported = text.exported
    if exported.backward is not None:
        yield "ctx.set_materialize_grads(False)"
        if saved := _names_of(text, exported.residuals):
            yield f"ctx.save_for_backward({', '.join(saved)})"
        symbols = [s for s in exported.backward.sizes if isinstance(text.scopes.symbols[s], str)]
        if symbols:
            sources = [_source_text(text, *exported.sources[s]) for s in symbols]
            yield f"ctx.sizes = ({', '.join(sources)},)"
    if exported.jvp is not None:
        if saved := _names_of(text, exported.jvp_reads):
            yield f"ctx.save_for_forward({', '.join(saved)})"
        moved = moving(exported.specialization)
        if len(moved) > 1:
            yield f"ctx.shapes = ({', '.join(f'{exported.names[i]}.shape' for i in moved)})"


def _source_text(text: ClassText, position: int, kind: str, axis: int) -> str:
    """The text that reads a size off forward's arguments, for a backward whose tensors do not tell it."""
    return f"{text.tensors[position]}.{'shape[{}]' if kind == 'size' else 'stride({})'}".format(axis)


# ------------------------------------------------------------------ backward
def _backward(text: ClassText, scope: Scope) -> Iterator[str]:
    count = len(text.exported.residuals)
    saved, gradients = scope.inputs[:count], scope.inputs[count:]
    supply = iter(gradients)
    named = [next(supply) if k is not None else "_" for k in text.scopes.gradient_kinds]
    yield "@staticmethod"
    yield "@torch.autograd.function.once_differentiable"
    yield f"def backward(ctx, {', '.join([*_distinct(named), *(['*_'] if text.hidden else [])])}):"
    if saved:
        yield f"    {unpacking(saved)} = ctx.saved_tensors"
    if scope.sizes:
        yield f"    {unpacking(scope.sizes)} = ctx.sizes"
    yield from indented(_materialized(text, scope, gradients))
    yield f"    {assignment([scope.name_of(o) for o in scope.outputs], _launched(text, scope))}"
    yield f"    return {', '.join(_gradients(text, scope, gradients))}"


def _materialized(text: ClassText, scope: Scope, gradients: list[str]) -> Iterator[str]:
    """Zeros for an output that nothing was differentiated through; with a single one that cannot be."""
    if len(gradients) < 2:
        return
    values = scope.part.graph.inputs[len(text.exported.residuals) :]
    first_present = f"next(g for g in ({', '.join(gradients)}) if g is not None)"
    like = scope.inputs[0] if text.exported.residuals else first_present
    for name, value in zip(gradients, values, strict=True):
        shape = Expressions(_sizes_without_gradients(text, scope)).tuple(value.shape)
        yield f"if {name} is None:"
        yield f"    {name} = torch.zeros({shape}, dtype={dtype_text(value.dtype)}, device={like}.device)"


def _sizes_without_gradients(text: ClassText, scope: Scope) -> dict[Any, Any]:
    """Symbols as the shapes of what was saved tell them, before any gradient is known to be there."""
    count, symbols = len(text.exported.residuals), text.scopes.symbols
    saved = set(scope.inputs[:count])
    sources = {s: t for s, t in scope.sources.items() if t.split(".")[0] in saved}
    by_source = {s: sources.get(s, n) if isinstance(n, str) else n for s, n in symbols.items()}
    if (
        LANES in by_source and by_source[LANES] == symbols[LANES]
    ):  # nothing saved: a gradient tells how many lanes there are
        by_source[LANES] = f"next(g for g in ({', '.join(scope.inputs)}) if g is not None).shape[0]"
    return by_source


def _gradients(text: ClassText, scope: Scope, gradients: list[str]) -> list[str]:
    first = [i for i, k in enumerate(text.scopes.gradient_kinds) if k is not None]
    passed = {r: gradients[first.index(g)] for r, g in scope.part.passed.items()}
    return [passed.get(i, "None") if o is None else scope.name_of(o) for i, o in enumerate(scope.part.graph.outputs)]


def _launched(text: ClassText, scope: Scope) -> str:
    """A launch inside backward or jvp."""
    arguments = [*scope.inputs, *scope.sizes]
    if not text.behind_wrappers:
        return f"{scope.function}({', '.join(arguments)})"
    return f"inside({', '.join([scope.function, *arguments])})"


def _distinct(names: list[str]) -> list[str]:
    return [f"_{i}" if n == "_" else n for i, n in enumerate(names)]


# ------------------------------------------------------------------ jvp and vmap
def _jvp(text: ClassText, scope: Scope) -> Iterator[str]:
    exported, reads = text.exported, len(text.exported.jvp_reads)
    saved, tangents = scope.inputs[:reads], scope.inputs[reads:]
    by_argument = dict(zip(moving(exported.specialization), tangents, strict=True))
    yield "@staticmethod"
    yield f"def jvp(ctx, {', '.join(_distinct([by_argument.get(i, '_') for i in range(len(exported.names))]))}):"
    if saved:
        yield f"    {unpacking(saved)} = ctx.saved_tensors"
    yield from indented(_zero_tangents(scope, reads, tangents))
    yield f"    {assignment([scope.name_of(o) for o in scope.outputs], _launched(text, scope))}"
    pushed = iter([scope.name_of(o) for o in scope.part.graph.outputs if o is not None])
    visible = [next(pushed) if moves else "None" for moves in output_moves(exported.specialization)]
    yield f"    return {', '.join([*visible, *['None'] * len(text.hidden)])}"


def _zero_tangents(scope: Scope, reads: int, tangents: list[str]) -> Iterator[str]:
    """Zeros for an argument that does not move; a single one always does."""
    if len(tangents) < 2:
        return
    yield f"device = next(t.device for t in ({', '.join(tangents)}) if t is not None)"
    shapes = [f"{t}_shape" for t in tangents]
    yield f"{', '.join(shapes)} = ctx.shapes"
    for name, shape, value in zip(tangents, shapes, scope.part.graph.inputs[reads:], strict=True):
        yield f"if {name} is None:"
        yield f"    {name} = torch.zeros({shape}, dtype={dtype_text(value.dtype)}, device=device)"


def _vmap(call: str) -> Iterator[str]:
    yield from ("", "@staticmethod", "def vmap(info, in_dims, *args):")
    yield f"    return over_lanes({call}, info.batch_size, in_dims, args)"


def _public_class(text: ClassText) -> Iterator[str]:
    """The class by its name, where forward has more results than the user's."""
    name, forward = text.exported.name, text.exported.specialization.captured.forward
    selection = f":{len(forward.outputs)}" if forward.is_tuple else "0"
    yield from ("", "", f"class {name}(_{name}):")
    yield '    """As above, without the results that are for backward alone."""'
    yield from ("", "    @classmethod", "    def apply(cls, *args):")
    yield f"        return _{name}.apply(*args)[{selection}]"
