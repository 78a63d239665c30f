"""`export(.., path="name.py")`: one Triton module that needs torch and triton alone, with a test against eager."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch

from ....codegen import Kernel
from ....codegen.emit.names import Names
from ....codegen.emit.prelude import helpers_in, libraries_in
from ....codegen.kernel import Scalar
from ....ir.program import Place
from ....ir.text.printable import in_docstring, printable
from ....ir.types import COMPLEX
from ....tracer.dtypes import TO_TORCH
from ....tracer.methods import method_place
from ....tracer.torch_private import expression_of
from ...cache.store import versions
from ...values.sizes import number
from ..gather.gathered import ExportError, Gathered, require_nameable
from ..gather.tangents import moving, output_moves
from .boilerplate import HELPERS, IMPORTS, LIBRARY, OWN_JVP, ROUNDING, SELF_TEST, TRANSPOSED_JVP
from .expressions import Expressions
from .launchers import Launcher, dtype_text, snake, symbol_names
from .line_folding import tidy
from .user_source import SourceMissing, as_written

OWNED = {"torch", "triton", "tl", "os", *(name for name, _ in HELPERS)}
"""What the file has names for already."""
_PLAIN = re.compile(r"[\w.+ -]*", re.ASCII)
"""Values that an f-string shows as they are."""
CONSTANTS = (int, float, bool, str, type(None), torch.dtype)


DERIVED = ("jvp", "vmap")


def is_literal(value: Any) -> bool:
    """Whether a constant can be written down."""
    if isinstance(value, dict):
        return all(map(is_literal, value)) and all(map(is_literal, value.values()))
    return all(map(is_literal, value)) if isinstance(value, tuple | list) else isinstance(value, CONSTANTS)


def module_text(found: Gathered) -> str:
    """The text of the file."""
    return Module(found).text()


class Module:
    """Writes the sections of the file, top to bottom."""

    def __init__(self, found: Gathered) -> None:
        self.found = found
        require_nameable(found.compiler, (found.name, *found.names), OWNED)
        self.symbols = self._symbols(Names(["torch", "triton", "tl", *found.names]))
        self.expressions = Expressions(self.symbols)
        self.forward = Launcher(found, found.forward, self.symbols, checked=True)
        parts = [self.forward]
        if found.backward is not None:
            self.backward = Launcher(found, found.backward, self.symbols, checked=False)
            parts.append(self.backward)
        if found.jvp is not None:
            self.jvp = Launcher(found, found.jvp, self.symbols, checked=False)
            parts.append(self.jvp)
        self.launchers = parts
        self.tensors = [found.names[i] for i in found.slots]

    def _symbols(self, names: Names) -> dict[Any, str | int]:
        return symbol_names(self.found, names)

    def text(self) -> str:
        launchers = [launcher.text() for launcher in self.launchers]
        function = "\n".join(self._function())
        body = "\n\n\n".join([*self._kernels(), *launchers, function, self._call(), *self._self_test()])
        return "\n\n\n".join([self._head(body), *self._helpers(body), body]) + "\n"

    def _helpers(self, body: str) -> list[str]:
        """The small functions that the file calls."""
        called = [h for h in HELPERS if re.search(rf"\b{h[0]}\(", body)]
        if any(name == "expect" for name, _ in called):
            called = [h for h in HELPERS if h in called or h[0] == "laid_out"]
        return [text.strip("\n") for _, text in called]

    # ------------------------------------------------------------------ head
    def _head(self, body: str) -> str:
        doc, libraries = in_docstring("\n".join(self._provenance())), libraries_in([body])
        imports = "\n".join([IMPORTS, *libraries])
        parts = [imports, *([LIBRARY] if libraries else []), *([ROUNDING] if "**ROUNDING" in body else [])]
        return f'"""{doc}\n"""\n\n' + "\n\n\n".join(parts)

    def _provenance(self) -> Iterator[str]:

        found, known = self.found, versions()
        yield f"{found.name}: fused Triton kernels, {_listed(self._rules())}."
        yield ""
        yield f"Use: {snake(found.name)}({', '.join(found.names)}), or {found.name}.apply(..) with the same arguments."
        yield f"Holds for: {', '.join(self._argument_types())}."
        yield from self._counts()
        place = Path(method_place(found.cls.forward)).name  # type: ignore[attr-defined]
        yield f"From {found.cls.__qualname__} ({place}), by fusegrad {known['fusegrad']} on {date.today()},"
        yield f"for {found.target}, with torch {torch.__version__} and triton {known['triton']}."
        missing = ["gradients of gradients", *(m for m in DERIVED if m not in self._rules())]
        yield f"{_listed(missing).capitalize()} are not in this file."

    def _rules(self) -> list[str]:
        """The methods that the file has kernels for."""
        return [part.method for part in self.found.parts]

    def _counts(self) -> Iterator[str]:
        for part in self.found.parts:
            count = sum(len(versions[0].kernels) for versions in part.kernels.values())
            calls = len(part.steps) - len(part.kernels)
            rest = f", {calls} library calls and views" if calls else ""
            yield f"{part.method}: {count} kernel{'s' * (count != 1)}{rest}."

    def _argument_types(self) -> list[str]:
        types = dict(zip(self.tensors, map(self.forward.type_text, self.found.forward.graph.inputs), strict=False))
        return [
            f"{n}: {types[n]}" if n in types else f"{n} = {a!r}"
            for n, a in zip(self.found.names, self.found.args, strict=True)
        ]

    # ------------------------------------------------------------------ kernels
    def _all_kernels(self) -> list[Kernel]:
        found = [(w, vs) for w in self.launchers for vs in w.part.kernels.values()]
        return [k for w, vs in found for v in w.reached(vs) for k in v.kernels]

    def _kernels(self) -> Iterator[str]:
        kernels = self._all_kernels()
        yield from (h.strip("\n") for h in helpers_in([k.source for k in kernels]))
        seen: set[str] = set()
        for kernel in kernels:
            if kernel.name not in seen:
                seen.add(kernel.name)
                yield tidy(_unspecialised(kernel)).strip("\n")

    # ------------------------------------------------------------------ the Function
    def _function(self) -> Iterator[str]:
        found, doc = self.found, self._doc()
        yield f"class {self._class()}(torch.autograd.Function):"
        if doc and doc != inspect.getdoc(torch.autograd.Function):
            yield from indented(_docstring(doc), 4)
            yield ""
        yield from indented(self._forward(), 4)
        yield ""
        yield from indented(self._setup_context(), 4)
        if found.backward is not None:
            yield ""
            yield from indented(self._backward(), 4)
        if found.jvp is not None:
            yield ""
            yield from indented(self._jvp(), 4)
        yield from indented(self._vmap(), 4)
        if self._class() != found.name:
            yield from self._public()

    def _doc(self) -> str | None:
        return inspect.getdoc(self.found.cls)

    def _class(self) -> str:
        """What the class is called that has the rules."""
        return f"{'_' * bool(self._hidden())}{self.found.name}"

    def _vmap(self) -> Iterator[str]:
        return iter(())

    def _signature(self) -> str:
        return ", ".join(self.found.names)

    def _outputs(self) -> list[str]:
        """The names of forward's tensor outputs and of the hidden ones, as they are returned."""
        graph = self.found.forward.graph
        names: list[str] = []
        for i, output in enumerate(graph.outputs):
            names.append(self._shown(i, names) if output is None else self.forward._value(output))
        return names

    def _shown(self, output: int, names: list[str]) -> str:
        """The name of an output that is an argument, a view of one, or the same as an output before it."""
        described = self._described(output)
        return str((names if described.kind == "same" else self.tensors)[described.index])

    def _described(self, output: int) -> Any:
        forward = self.found.specialization.forward
        return forward.outputs[forward.tensor_outputs[output]]

    def _visible(self) -> int:
        return len(self.found.specialization.forward.fake_outputs)

    def _hidden(self) -> list[str]:
        return self._outputs()[self._visible() :]

    def _forward(self) -> Iterator[str]:
        yield "@staticmethod"
        yield f"def forward({self._signature()}):"
        yield from (f"    {line}" for line in self._constants())
        made = [self.forward._value(o) for o in self.forward.outputs]
        call = f"{self.forward.function}({', '.join(self.forward.inputs)})"
        yield f"    {', '.join(made)} = {call}" if made else f"    {call}"
        yield f"    return {', '.join(self._returned())}"

    def _returned(self) -> list[str]:
        """What the user returns, tensors by name, then the hidden tensors."""
        forward, names = self.found.specialization.forward, self._outputs()[: self._visible()]
        made = map(self._tensor, self._tensors(), names, forward.fake_outputs)
        users = [_constant(o.value) if o.kind == "object" else next(made) for o in forward.outputs]
        return [*users, *self._hidden()]

    def _tensors(self) -> list[Any]:
        """forward's outputs that are tensors."""
        return [o for o in self.found.specialization.forward.outputs if o.kind != "object"]

    def _tensor(self, output: Any, name: str, fake: torch.Tensor) -> str:
        """An output by name; a view is made of its argument."""
        if output.kind != "view":
            return name
        base = self.found.specialization.forward.fakes[output.index]
        at = [[_expression(n) for n in sizes] for sizes in (fake.shape, fake.stride())]
        if at == [[_expression(n) for n in sizes] for sizes in (base.shape, base.stride())]:
            return f"{name}.view_as({name})"
        sources = self.forward.sources
        told = {s: sources[s] if isinstance(n, str) else n for s, n in self.symbols.items() if s in sources}
        expressions = Expressions(told)
        first = expressions.text(_expression(fake.storage_offset()))
        shape, strides = (expressions.tuple(sizes) for sizes in at)
        return f"{name}.as_strided({shape}, {strides}, {name}.storage_offset() + {first})"

    def _constants(self) -> Iterator[str]:
        """Arguments that are no tensors are compiled in."""
        for name, value in zip(self.found.names, self.found.args, strict=True):
            if isinstance(value, torch.Tensor):
                continue
            if not is_literal(value):
                raise ExportError(
                    function=self.found.name, reason=f"its argument {name} is a {type(value).__name__}",
                    where=method_place(self.found.cls.forward), fix="give numbers, strings, dtypes or None.",  # type: ignore[attr-defined]
                )  # fmt: skip
            yield f"if {name} != {_constant(value)}:"
            said = f"{snake(self.found.name)} was exported for {name} = {value}, not "
            whole = f'f"{said}{{{name}}}"' if _PLAIN.fullmatch(str(value)) else f"{said!r} + repr({name})"
            yield f"    raise ValueError({whole})"

    def _setup_context(self) -> Iterator[str]:
        lines = [*self._marks(), *self._kept()]
        names, made = self.found.names, self._setup_names()
        yield "@staticmethod"
        yield "def setup_context(ctx, inputs, output):"
        read = set(re.findall(r"\w+", "\n".join(lines)))
        if read & set(names):
            yield f"    {', '.join(names)}{',' * (len(names) == 1)} = inputs"
        if read & set(made):
            yield f"    {', '.join(made)} = output"
        yield from (f"    {line}" for line in lines or ["pass"])

    def _marks(self) -> Iterator[str]:
        forward = self.found.specialization.forward
        dirty = [self._at(p) for p in forward.dirty]
        if dirty:
            yield f"ctx.mark_dirty({', '.join(dirty)})"
        still = list(dict.fromkeys([*(self._at(p) for p in forward.non_differentiable), *self._hidden()]))
        if still:
            yield f"ctx.mark_non_differentiable({', '.join(still)})"

    def _kept(self) -> Iterator[str]:
        if self.found.backward is not None:
            yield "ctx.set_materialize_grads(False)"
            if kept := [self._at(p) for p in self.found.residuals]:
                yield f"ctx.save_for_backward({', '.join(kept)})"
            if sizes := self._kept_sizes():
                yield f"ctx.sizes = ({', '.join(sizes.values())},)"
        if self.found.jvp is not None:
            if kept := [self._at(p) for p in self.found.jvp_reads]:
                yield f"ctx.save_for_forward({', '.join(kept)})"
            if len(self._moving()) > 1:
                yield f"ctx.shapes = ({', '.join(f'{self.found.names[i]}.shape' for i in self._moving())})"

    def _setup_names(self) -> list[str]:
        forward, names = self.found.specialization.forward, iter(self._outputs())
        users = ["_" if o.kind == "object" else next(names) for o in forward.outputs]
        return [*users, *names]

    def _at(self, place: Place) -> str:
        if place.kind == "input":
            return self.tensors[place.index]
        return self._outputs()[place.index + (self._visible() if place.kind == "hidden" else 0)]

    def _kept_sizes(self) -> dict[str, str]:
        """Sizes that backward cannot read off its own tensors: name -> where forward's arguments tell it."""
        assert self.found.backward is not None
        symbols = [s for s in self.found.backward.sizes if isinstance(self.symbols[s], str)]
        return {str(self.symbols[s]): self._told(*self.found.sources[s]) for s in symbols}

    def _told(self, position: int, kind: str, axis: int) -> str:
        return f"{self.tensors[position]}.{'shape[{}]' if kind == 'size' else 'stride({})'}".format(axis)

    def _backward(self) -> Iterator[str]:
        launcher, part = self.backward, self.found.backward
        assert part is not None
        gradients = launcher.inputs[len(self.found.residuals) :]
        kinds = self.found.specialization.predicted_kinds()
        supply = iter(gradients)
        named = [next(supply) if k is not None else "_" for k in kinds]
        kept = launcher.inputs[: len(self.found.residuals)]
        yield "@staticmethod"
        yield "@torch.autograd.function.once_differentiable"
        yield f"def backward(ctx, {', '.join([*_distinct(named), *(['*_'] if self._hidden() else [])])}):"
        if kept:
            yield f"    {', '.join(kept)}{',' * (len(kept) == 1)} = ctx.saved_tensors"
        if launcher.sizes:
            yield f"    {', '.join(launcher.sizes)}{',' * (len(launcher.sizes) == 1)} = ctx.sizes"
        yield from (f"    {line}" for line in self._materialized(gradients))
        made = [launcher._value(o) for o in launcher.outputs]
        call = self._called(launcher)
        yield f"    {', '.join(made)} = {call}" if made else f"    {call}"
        yield f"    return {', '.join(self._gradients(gradients))}"

    def _materialized(self, gradients: list[str]) -> Iterator[str]:
        """Zeros for an output that nothing was differentiated through; with a single one that cannot be."""
        if len(gradients) < 2:
            return
        part = self.found.backward
        assert part is not None
        values = part.graph.inputs[len(self.found.residuals) :]
        some = f"next(g for g in ({', '.join(gradients)}) if g is not None)"
        like = self.backward.inputs[0] if self.found.residuals else some
        for name, value in zip(gradients, values, strict=True):
            shape = Expressions(self._by_source()).tuple(value.shape)
            yield f"if {name} is None:"
            yield f"    {name} = torch.zeros({shape}, dtype={dtype_text(value.dtype)}, device={like}.device)"

    def _by_source(self) -> dict[Any, Any]:
        """Symbols as the shapes of what was saved tell them, before any gradient is known to be there."""
        kept = set(self.backward.inputs[: len(self.found.residuals)])
        told = {s: t for s, t in self.backward.sources.items() if t.split(".")[0] in kept}
        return {s: told.get(s, n) if isinstance(n, str) else n for s, n in self.symbols.items()}

    def _gradients(self, gradients: list[str]) -> list[str]:
        part = self.found.backward
        assert part is not None
        entry_outputs = part.graph.outputs
        first = [i for i, k in enumerate(self.found.specialization.predicted_kinds()) if k is not None]
        passed = {r: gradients[first.index(g)] for r, g in part.passed.items()}
        return [
            passed.get(i, "None") if o is None else self.backward._value(o) for i, o in enumerate(entry_outputs)
        ]

    # ------------------------------------------------------------------ forward mode
    def _moving(self) -> list[int]:
        return moving(self.found.specialization)

    def _jvp(self) -> Iterator[str]:
        launcher, reads = self.jvp, len(self.found.jvp_reads)
        kept, tangents = launcher.inputs[:reads], launcher.inputs[reads:]
        given = dict(zip(self._moving(), tangents, strict=True))
        yield "@staticmethod"
        yield f"def jvp(ctx, {', '.join(_distinct([given.get(i, '_') for i in range(len(self.found.names))]))}):"
        if kept:
            yield f"    {', '.join(kept)}{',' * (len(kept) == 1)} = ctx.saved_tensors"
        yield from (f"    {line}" for line in self._still(tangents))
        made = [launcher._value(o) for o in launcher.outputs]
        yield f"    {', '.join(made)} = {self._called(launcher)}" if made else f"    {self._called(launcher)}"
        assert self.found.jvp is not None
        pushed = iter([launcher._value(o) for o in self.found.jvp.graph.outputs if o is not None])
        visible = [next(pushed) if moves else "None" for moves in output_moves(self.found.specialization)]
        results = [*visible, *["None"] * len(self._hidden())]
        yield f"    return {', '.join(results)}"

    def _called(self, launcher: Launcher) -> str:
        """A launch inside backward or jvp."""
        given = [*launcher.inputs, *launcher.sizes]
        if not self._is_behind_wrappers():
            return f"{launcher.function}({', '.join(given)})"
        return f"inside({', '.join([launcher.function, *given])})"

    def _is_behind_wrappers(self) -> bool:
        """Whether torch.func reaches backward."""
        return self.found.jvp is not None

    def _still(self, tangents: list[str]) -> Iterator[str]:
        """Zeros for an argument that does not move; a single one always does."""
        if len(tangents) < 2:
            return
        assert self.found.jvp is not None
        values = self.found.jvp.graph.inputs[len(self.found.jvp_reads) :]
        yield f"device = next(t.device for t in ({', '.join(tangents)}) if t is not None)"
        shapes = [f"{t}_shape" for t in tangents]
        yield f"{', '.join(shapes)} = ctx.shapes"
        for name, shape, value in zip(tangents, shapes, values, strict=True):
            yield f"if {name} is None:"
            yield f"    {name} = torch.zeros({shape}, dtype={dtype_text(value.dtype)}, device=device)"

    def _public(self) -> Iterator[str]:
        """The class by its name, where forward has more results than the user's."""
        name, users = self.found.name, len(self.found.specialization.forward.outputs)
        kept = "0" if not self.found.specialization.forward.is_tuple else f":{users}"
        yield from ("", "", f"class {name}(_{name}):")
        yield '    """As above, without the results that are for backward alone."""'
        yield from ("", "    @classmethod", "    def apply(cls, *args):")
        yield f"        return _{name}.apply(*args)[{kept}]"

    def _call(self) -> str:
        name = snake(self.found.name)
        return "\n".join([
            f"def {name}({self._parameters()}):",
            f'    """{self.found.name}.apply by name. {in_docstring("; ".join(self._argument_types()))}"""',
            f"    return {self.found.name}.apply({self._signature()})",
        ])  # fmt: skip

    def _parameters(self) -> str:
        """Arguments that are compiled in have their value as a default, from the last tensor on."""
        last = max(self.found.slots, default=-1)
        pairs = enumerate(zip(self.found.names, self.found.args, strict=True))
        return ", ".join(n if i <= last else f"{n}={_constant(a)}" for i, (n, a) in pairs)

    # ------------------------------------------------------------------ the test
    def _self_test(self) -> list[str]:
        try:
            eager = as_written(self.found.cls, f"{self.found.name}AsWritten")
        except SourceMissing as why:
            return [f"# No self-test against the class as it was written: {printable(str(why))}."]
        return [f"# ---- The class as it was written; the test below compares with it.\n{eager}", self._main()]

    def _main(self) -> str:
        lines = ["torch.manual_seed(0)", 'device = "cuda" if torch.cuda.is_available() else "cpu"']
        exported, small = self._test_sizes()
        for symbol, most in exported.items():
            name, less = self.symbols[symbol], small[symbol]
            otherwise = "" if most == less else f' if device == "cuda" else {less}'
            lines.append(f"{name} = {most}{otherwise}")
        at = Expressions(self.symbols)
        needs = [self.found.specialization.forward.needs_input_grad[i] for i in self.found.slots]
        for name, value, needed in zip(self.tensors, self.found.forward.graph.inputs, needs, strict=False):
            lines.append(f"{name} = {_example(value, at, needed)}")
        pairs = zip(self.found.names, self.found.args, strict=True)
        arguments = ", ".join(n if n in self.tensors else _constant(a) for n, a in pairs)
        return SELF_TEST.format(
            name=self.found.name, inputs="\n".join(f"    {line}" for line in lines), arguments=arguments,
            forward_mode=self._forward_mode(), names=", ".join(self.tensors),
            written=f"{self.found.name}AsWritten",
            tensors=", ".join(self.tensors) + "," * (len(self.tensors) == 1),
        ).strip("\n")  # fmt: skip

    def _forward_mode(self) -> str:
        """The test of jvp: by the class as written where it has one, else by its transpose."""
        if self.found.jvp is None:
            return ""
        text = OWN_JVP if self.found.compiler.writes("jvp") else TRANSPOSED_JVP
        return text.format(name=self.found.name, written=f"{self.found.name}AsWritten")

    def _test_sizes(self) -> tuple[dict[Any, int], dict[Any, int]]:
        """Sizes for a GPU, as exported, and for the interpreter: small where any size will do, and odd."""
        sources = self.forward.sources
        free = [s for s, n in self.symbols.items() if isinstance(n, str) and sources.get(s, "").count("shape")]
        exported = {s: number(s, self.found.sizes) for s in free}
        small = {s: min(n, 37) for s, n in exported.items()}
        assumed = [g.xreplace({**self.found.pinned, **small}) for g in self.found.guards]
        return exported, small if all(bool(g) for g in assumed if not g.free_symbols) else exported


def _listed(words: list[str]) -> str:
    """a, b and c"""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _distinct(names: list[str]) -> list[str]:
    return [f"_{i}" if n == "_" else n for i, n in enumerate(names)]


def _expression(size: Any) -> Any:
    return size if isinstance(size, int) else expression_of(size)


def _constant(value: Any) -> str:
    if isinstance(value, tuple | list):
        inner = ", ".join(map(_constant, value)) + "," * (isinstance(value, tuple) and len(value) == 1)
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_constant(k)}: {_constant(v)}" for k, v in value.items()) + "}"
    if isinstance(value, float) and value - value != 0:
        return f'float("{value}")'
    return str(value) if isinstance(value, torch.dtype) else repr(value)


def _docstring(text: str) -> Iterator[str]:
    lines = in_docstring(text).split("\n")
    yield f'"""{lines[0]}' + ('"""' if len(lines) == 1 else "")
    yield from lines[1:]
    if len(lines) > 1:
        yield '"""'


def indented(lines: Iterator[str], by: int) -> Iterator[str]:
    """The lines, `by` columns to the right."""
    yield from (" " * by + line if line else line for line in lines)


def _unspecialised(kernel: Kernel) -> str:
    """Sizes are numbers like any other to Triton: a new batch size compiles nothing."""
    scalars = [a.name for a in kernel.arguments if isinstance(a, Scalar)]
    if not scalars:
        return kernel.source
    words = ", ".join(f'"{s}"' for s in scalars)
    head, body = kernel.source.split(f"def {kernel.name}(", 1)
    return head.replace("@triton.jit", f"@triton.jit(do_not_specialize=[{words}])") + f"def {kernel.name}(" + body


def _example(value: Any, at: Expressions, moving: bool) -> str:
    """A call that makes an argument of the test; one that was exported as an expanded tensor is one."""
    strides = value.params["strides"]
    single = at.tuple([1 if s == 0 else n for n, s in zip(value.shape, strides, strict=True)])
    expand = f".expand({at.tuple(value.shape)})" if 0 in strides else ""
    dtype = dtype_text(value.dtype)
    if value.dtype == "b1":
        return f"(torch.rand({single}, device=device) < 0.5){expand}"
    if not TO_TORCH[value.dtype].is_floating_point and value.dtype not in COMPLEX:
        return f"torch.randint(0, 4, {single}, device=device, dtype={dtype}){expand}"
    drawn = f"torch.randn({single}, device=device).to({dtype}){expand}"
    return f"{drawn}.requires_grad_()" if moving else drawn
