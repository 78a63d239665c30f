"""A compiled Function as the files of a bundle: captured for every set of arguments that may need a gradient.

What a method could do differently in another process, or for other arguments, is captured apart, made a condition of
the call, or refused by name here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import sympy
import torch
from torch.autograd.function import Function as TorchFunction

from ....ir import Graph
from ....ir.errors import LoweringError
from ....ir.text.document import document
from ....ir.text.relations import relations
from ....ir.text.text import key
from ....ir.types import contiguous_strides, simplest
from ....tracer.dtypes import from_torch
from ....tracer.methods import backward_method, is_once_differentiable, parameter_names, uses_setup_context
from ....tracer.torch_private import expression_of
from ....tracer.trace import CaptureError
from ...cache.store import versions
from ...capture.views import is_as_strided
from ...execution.pipeline import graph_of
from ...persistence.literals import NoLiteral, constant_document
from ...report.explain import compiler_of
from ...specialize.compiled import Compiled
from ...specialize.specialization import BackwardEntry, Specialization
from ...values.tensor_specs import differentiable, memoryless, stand_in
from ..gather.gathered import apart, refused, require_closed
from .archive import canonical, sha256
from .contents import FLAGS, Argument, Entry, Function, Layout, Output, Variant
from .operators import why_not_portable

Tensor = torch.Tensor
ALL_SUBSETS = 3
"""Up to so many tensors that may need a gradient, every subset of them is captured; beyond, the likely ones."""


@dataclass
class Written:
    """The files with graphs, each graph once, and the Function that speaks of them."""

    function: Function
    graphs: dict[str, bytes] = field(default_factory=dict)

    @property
    def manifest(self) -> dict[str, Any]:
        """What the manifest says of it."""
        content = canonical(self.function.data())
        sums = [f"{name} {sha256(graph)}\n".encode() for name, graph in sorted(self.graphs.items())]
        known = {**versions(), "torch": torch.__version__}
        return {"key": sha256(content + b"".join(sums)), "versions": known, "function": self.function.data()}


def written(target_class: Any, args: Sequence[Any]) -> Written:
    """Capture everything that a bundle holds. Raises ExportError."""
    compiler = compiler_of(target_class)
    if hasattr(target_class, "_fusegrad_flat"):
        raise apart(compiler, "it is compiled with pytree=True, and a bundle holds plain arguments")
    complete = compiler.complete(tuple(args))
    if len(complete) != (len(compiler.parameters()) if compiler.setup_style else len(args)):
        raise apart(compiler, "it takes tensors inside a container; make them arguments")
    given = differentiable([stand_in(a) for a in complete])
    try:
        return _Writer(compiler, given).write()
    except CaptureError as error:
        raise refused(compiler, error) from error
    except LoweringError as error:
        raise apart(compiler, f"it cannot be written as a graph: {error}") from error
    except NoLiteral as error:
        raise apart(compiler, f"it depends on {error}, which cannot be written down") from error


def with_needs(args: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    """Stand-ins like these of which other ones need a gradient."""
    supply = iter(needs)
    return [_asking(a, next(supply)) if isinstance(a, Tensor) else a for a in args]


def _asking(fake: Tensor, need: bool) -> Tensor:
    return memoryless(tuple(fake.shape), fake.stride(), fake.dtype, fake.device, need)


class _Writer:
    """Goes through the variants."""

    def __init__(self, compiler: Compiled, args: Sequence[Any]) -> None:
        compiler.require_capturable()
        self.compiler, self.cls, self.args = compiler, compiler.cls, args
        self.files: dict[str, bytes] = {}
        self.names: dict[bytes, str] = {}

    def write(self) -> Written:
        compiler = self.compiler
        method = backward_method(self.cls)
        if self.cls.backward is not TorchFunction.backward and self.cls.vjp is not TorchFunction.vjp:  # type: ignore[attr-defined]
            raise apart(compiler, "it has both backward and vjp, which autograd refuses")
        arguments = tuple(self.arguments())
        for argument in arguments:
            self._require_literal(argument)
        variants = tuple(self.variant(needs) for needs in self.subsets())
        style = "setup_context" if compiler.setup_style and not any(map(_keeps_more, variants)) else "ctx"
        function = Function(
            name=self.cls.__name__, doc=inspect.getdoc(self.cls) if self.cls.__doc__ else None, style=style,
            derive_jvp=compiler.derive_jvp, autocast=autocast_now(), flags=self.flags(method),
            arguments=arguments, defaults=self.defaults() if style == "setup_context" else (),
            variants=variants,
        )  # fmt: skip
        return Written(function, self.files)

    def flags(self, method: Any) -> frozenset[str]:
        cls: Any = self.compiler.user_class
        true = {
            "once_differentiable": method is not None and is_once_differentiable(method),
            "has_backward": method is not None,
            "has_jvp": cls.jvp is not TorchFunction.jvp,
            "has_vmap": cls.vmap is not TorchFunction.vmap,
            "clear_saved_tensors_on_access": bool(getattr(cls, "clear_saved_tensors_on_access", False)),
        }
        return frozenset(flag for flag in FLAGS if true[flag])

    def arguments(self) -> Iterator[Argument]:
        skip = 0 if uses_setup_context(self.cls) else 1
        names = parameter_names(self.cls.forward, len(self.args), skip, "argument")  # type: ignore[attr-defined]
        for name, value in zip(names, self.args, strict=True):
            if isinstance(value, Tensor):
                yield Argument(name, from_torch(value.dtype), value.dim())
            else:
                yield Argument(name, constant=value)

    def _require_literal(self, argument: Argument) -> None:
        try:
            argument.data()
        except NoLiteral as error:
            raise apart(self.compiler, f"its argument {argument.name} is {error}") from error

    def defaults(self) -> tuple[Any, ...]:
        """The defaults of the last parameters that can be written down."""
        found: list[Any] = []
        for parameter in reversed(self.compiler.parameters().values()):
            if parameter.default is parameter.empty:
                break
            found.insert(0, parameter.default)
        return tuple(found)

    # ------------------------------------------------------------------ variants
    def subsets(self) -> list[tuple[bool, ...]]:
        """Which tensors may need a gradient together: all first. One that was given without never does."""
        asking = [a.requires_grad for a in self.args if isinstance(a, Tensor)]
        moving = [i for i, asks in enumerate(asking) if asks]
        if len(moving) <= ALL_SUBSETS:
            chosen = _subsets(moving)
        else:
            chosen = [set(moving), *({*moving} - {i} for i in moving), *({i} for i in moving), set()]
        return [tuple(i in on for i in range(len(asking))) for on in chosen]

    def variant(self, needs: tuple[bool, ...]) -> Variant:
        args = with_needs(self.args, needs)
        spec = Specialization(self.cls, args, self.compiler.reads_now(), self.compiler.dynamic)
        require_closed(self.compiler, spec)
        entries = dict(self._backwards(spec)) if any(needs) and backward_method(self.cls) is not None else {}
        for _ in range(2):  # lowering one may teach another something about sizes
            forward = self.forward_graph(spec)
            backwards = {kinds: self.backward_graph(spec, entry) for kinds, entry in entries.items()}
        if not self.files:  # the variant where all gradients are asked for
            self._require_indifferent(spec, backwards)
        tensors = tuple((_expressions(f.shape), _expressions(f.stride())) for f in spec.forward.fakes)
        symbols = {s.name: s for s in _told(tensors)}
        captured = spec.forward
        return Variant(
            needs=needs, graph=self.graph("forward", forward), tensors=tensors, symbols=symbols,
            ranges=_ranges(spec, symbols.values()),
            assumptions=tuple(self._assumed(spec, set(symbols.values()))),
            outputs=tuple(self._outputs(spec)), is_tuple=captured.is_tuple,
            saved=tuple(captured.saved), attributes=tuple(captured.tensor_attributes.values()),
            dirty=tuple(captured.dirty), non_differentiable=tuple(captured.non_differentiable),
            materialize_grads=captured.materialize_grads,
            entries=tuple(
                Entry(_present(kinds), self.graph("backward", graph), tuple(entries[kinds].passed.items()))
                for kinds, graph in backwards.items()
            ),
        )  # fmt: skip

    def forward_graph(self, spec: Specialization) -> Graph:
        """forward; what is an argument, or looks at one, is no output of its own."""
        graph = graph_of(spec.forward.trace, f"{spec.name}_forward")
        graph.outputs = [None if i in spec.skip else o for i, o in enumerate(graph.outputs)]
        return graph

    def backward_graph(self, spec: Specialization, entry: BackwardEntry) -> Graph:
        """backward; what is a gradient as it came is no output of its own."""
        graph = graph_of(entry.trace, f"{spec.name}_backward")
        graph.outputs = [None if i in entry.passed else o for i, o in enumerate(graph.outputs)]
        return graph

    def _backwards(self, spec: Specialization) -> Iterator[tuple[tuple[Any, ...], BackwardEntry]]:
        """backward for the gradients that may come together. Those that it cannot be captured for are left out."""
        predicted = spec.predicted_kinds()
        for kinds in self._masks(spec, predicted):
            try:
                entry = spec.entry(kinds)
            except CaptureError:
                if kinds == predicted:
                    raise
                continue
            require_closed(self.compiler, spec, entry)
            yield kinds, entry

    def _masks(self, spec: Specialization, predicted: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        present = [i for i, k in enumerate(predicted) if k is not None]
        if spec.forward.materialize_grads or len(present) < 2:
            return [predicted]
        if len(present) <= ALL_SUBSETS:
            subsets = _subsets(present)
        else:
            subsets = [set(present), *({*present} - {i} for i in present), *({i} for i in present)]
        return [tuple(k if i in on else None for i, k in enumerate(predicted)) for on in subsets if on]

    def _require_indifferent(self, spec: Specialization, backwards: dict[tuple[Any, ...], Graph]) -> None:
        """backward computes the same whatever the layout of its gradients; one that raises for a layout may do so."""
        predicted = spec.predicted_kinds()
        if predicted not in backwards:
            return
        for layout in ("expanded", "reversed"):
            likes = zip(predicted, spec.gradient_likes(), strict=True)
            kinds = tuple(k if k is None else _layout(layout, like) for k, like in likes)
            try:
                other = self.backward_graph(spec, spec.entry(kinds))
            except (CaptureError, LoweringError):
                continue
            if key(_without_strides(other)) != key(_without_strides(backwards[predicted])):
                where = spec.backward_place()
                raise apart(self.compiler, "its backward depends on the layout of its gradients", where)

    def _assumed(self, spec: Specialization, told: set[sympy.Symbol]) -> Iterator[Any]:
        """What was assumed of the sizes that the arguments tell."""
        for condition in spec.session.conditions(spec.symbols):
            settled = condition if condition.free_symbols <= told else spec.session.env.replace(condition)
            if not settled.free_symbols <= told:
                raise apart(self.compiler, f"it assumes {condition}, which its arguments do not tell")
            try:
                yield from relations([settled])
            except ValueError as error:
                raise apart(self.compiler, f"it assumes {condition}: {error}") from error

    def _outputs(self, spec: Specialization) -> Iterator[Output]:
        forward = spec.forward
        tensors = iter(forward.fake_outputs)
        bases = {"view": forward.fakes, "part of output": forward.fake_outputs, "part of hidden": forward.fake_hidden}
        for described in forward.outputs:
            if described.kind == "object":
                yield Output("object", value=self._literal(described.value))
                continue
            fake, view = next(tensors), None
            if described.kind in bases:
                if not is_as_strided(fake, bases[described.kind][described.index]):
                    raise apart(self.compiler, "it returns a view with another dtype, or a lazily conjugated one")
                view = _view(fake, bool(described.value))
            yield Output(described.kind, described.index, view)

    def _literal(self, value: Any) -> Any:
        try:
            constant_document(value)
        except NoLiteral as error:
            raise apart(self.compiler, f"it returns {error}, which cannot be written down") from error
        return value

    # ------------------------------------------------------------------ files
    def graph(self, role: str, graph: Graph) -> str:
        """The name of the file that holds a graph."""
        for value in graph.order():
            if (why := why_not_portable(value)) is not None:
                raise apart(self.compiler, why, value.origin.where)
        try:
            content = canonical(document(graph))
        except ValueError as error:
            raise apart(self.compiler, f"its {role} has no form as JSON: {error}") from error
        if content not in self.names:
            count = sum(name.startswith(f"graphs/{role}") for name in self.files)
            self.names[content] = f"graphs/{role}{f'_{count + 1}' if count else ''}.json"
            self.files[self.names[content]] = content
        return self.names[content]


def _present(kinds: Sequence[Any]) -> tuple[bool, ...]:
    return tuple(k is not None for k in kinds)


def _subsets(items: Sequence[int]) -> list[set[int]]:
    """All of them, the whole first."""
    return [{i for i, on in zip(items, bits, strict=True) if on} for bits in product((1, 0), repeat=len(items))]


def _keeps_more(variant: Variant) -> bool:
    """Whether something is saved that is neither an argument nor a result."""
    return any(p is not None and p.kind == "hidden" for p in variant.residuals)


def _told(tensors: Sequence[Layout]) -> list[sympy.Symbol]:
    """The sizes that the arguments tell, in the order in which they do: by their shapes, then by their strides."""
    told = [s for kind in (0, 1) for layout in tensors for s in layout[kind]]
    return list(dict.fromkeys(s for s in told if isinstance(s, sympy.Symbol)))


def _ranges(spec: Specialization, symbols: Any) -> dict[str, tuple[int, int | None]]:
    found = {}
    for symbol in symbols:
        span = spec.session.env.var_to_range[symbol]
        low, high = (int(e) if e.is_Integer else None for e in (sympy.sympify(span.lower), sympy.sympify(span.upper)))
        found[symbol.name] = (max(low or 0, 0), high if high is not None and high < 1 << 61 else None)
    return found


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


def _view(fake: Tensor, tracked: bool) -> tuple[Any, ...]:
    return _expressions(fake.shape), _expressions(fake.stride()), _expression(fake.storage_offset()), tracked


def _expressions(numbers: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(n if isinstance(n, int) else simplest(n.node.expr) for n in numbers)


def _expression(size: Any) -> Any:
    return size if isinstance(size, int) else simplest(expression_of(size))


def autocast_now() -> tuple[str | None, str | None]:
    """The dtypes that autocast uses at present, on CPU and on a GPU."""
    cpu, cuda = (torch.get_autocast_dtype(k) if torch.is_autocast_enabled(k) else None for k in ("cpu", "cuda"))
    return _word(cpu), _word(cuda)


def _word(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")

