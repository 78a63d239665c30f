"""The C++ text of one part: a function that launches its kernels, and one that computes it with ATen on any device."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy

from ....codegen import Kernel, Kernels
from ....codegen.emit.names import Names
from ....ir import Value
from ....ir.once import once
from ....ir.passes.fuse import Group
from ....ir.text.printable import in_line_comment
from ....ir.types import contiguous_strides
from ..gather.gathered import Gathered, Part
from ..python.calls import Call
from ..python.launchers import Launcher, folded, snake
from .calls import call_text, is_several, kind, options
from .expressions import CppExpressions

WORDS = ("expect", "laid_out", "launch", "counters", "aten", "cdiv", "at", "c10", "std", "torch", "guard", "device",
         "int", "double", "float", "long", "short", "char", "bool", "auto", "class", "struct", "new", "delete", "this",
         "default", "register", "signed", "unsigned", "union", "namespace", "template", "operator", "const", "static",
         "switch", "case", "do", "goto", "private", "public", "protected", "friend", "virtual", "void", "volatile",
         "inline", "extern", "enum", "explicit", "export", "using", "typename", "typedef", "throw", "try", "catch",
         "sizeof", "mutable", "ctx", "gradients", "backward", "forward")  # fmt: skip
"""What the file, or the language, has names for already."""


class CppLauncher(Launcher):
    """Writes both functions of a part. A line of the text is a statement."""

    def __init__(self, found: Gathered, part: Part, symbols: Mapping[sympy.Symbol, str | int], checked: bool) -> None:
        super().__init__(found, part, symbols, checked)
        self.expressions = CppExpressions(symbols)
        self.names = Names([*WORDS, *(str(s) for s in symbols.values())])
        self.inputs = [self._named(v, v.params["name"]) for v in part.graph.inputs]
        self.given = dict(self.values)
        self.made: dict[int, str] = {}

    # ------------------------------------------------------------------ the whole
    @property
    def parameters(self) -> str:
        return ", ".join([*(f"at::Tensor {n}" for n in self.inputs), *(f"int64_t {n}" for n in self.sizes)])

    @property
    def arguments(self) -> list[str]:
        """The parameters by name."""
        return [*self.inputs, *self.sizes]

    @property
    def result(self) -> str:
        """The C++ type of what the functions return."""
        return f"std::tuple<{', '.join(['at::Tensor'] * len(self.outputs))}>"

    @property
    def schema(self) -> str:
        """ "(Tensor x, int n) -> (Tensor, Tensor)" """
        given = [*(f"Tensor {n}" for n in self.inputs), *(f"int {n}" for n in self.sizes)]
        made = ", ".join(["Tensor"] * len(self.outputs))
        return f"({', '.join(given)}) -> ({made})"

    def launching(self) -> str:
        """The function that launches kernels; it names the outputs."""
        text = self._function("with_kernels", list(self._body()), self._signature())
        self.made = {o.id: self._value(o) for o in self.outputs}
        return text

    def in_aten(self) -> str | None:
        """The function that computes the same with ATen, operation by operation; None where one has no text."""
        self._again()
        lines = [line for v in self.part.graph.order() if v.prim != "pick" for line in self._computed(v)]
        if any(line is None for line in lines):
            return None
        results = [self._own(o) for o in self.outputs]
        rest = [line for line in lines if line is not None]
        returned = f"return {{{', '.join(results)}}};"
        checks = self._checks()
        text = [*self._sizes([*checks, *rest, returned]), *checks, *rest, returned]
        return self._function("with_aten", text, "The same, operation by operation.")

    def shapes(self) -> str:
        """The function that makes results without computing them: what tracers ask for."""
        self._again()
        made = [self._empty(o.dtype, o.shape, self._strides(o)) for o in self.outputs]
        returned = f"return {{{', '.join(made)}}};"
        return self._function("shapes", [*self._sizes([returned]), returned], "Results without values, for tracers.")

    def _again(self) -> None:
        self.values = dict(self.given)
        self.expressions = CppExpressions(self.symbols)
        self.names = Names([*WORDS, *(str(s) for s in self.symbols.values()), *self.given.values()])

    def _function(self, suffix: str, lines: Sequence[str], said: str) -> str:
        head = f"{self.result} {self.function}_{suffix}({self.parameters}) {{"
        comment = [f"// {in_line_comment(line.strip())}" for line in said.splitlines() if line.strip()]
        return "\n".join([*comment, head, *(f"  {line}" for line in lines), "}"])

    def _body(self) -> Iterator[str]:
        checks = self._checks()
        steps = [line for at in range(len(self.part.steps)) for line in self._step(at)]
        results = [line for o in self.outputs for line in self._result(o)]
        returned = f"return {{{', '.join(self._value(o) for o in self.outputs)}}};"
        rest = [*steps, *results, returned]
        guard = f"c10::OptionalDeviceGuard guard({self._device()});"
        yield from [*self._sizes([*checks, *rest]), *checks, guard, *rest]

    def _strides(self, value: Value) -> Sequence[Any]:
        graph = self.part.graph
        strides = graph.output_strides[graph.outputs.index(value)]
        assert strides is not None
        return strides

    # ------------------------------------------------------------------ before the first kernel
    def _sizes(self, rest: Sequence[str]) -> Iterator[str]:
        for line in super()._sizes(rest):
            yield f"const int64_t {line};"

    @once
    def sources(self) -> dict[sympy.Symbol, str]:
        found = Launcher.sources.make(self)
        return {s: re.sub(r"\.shape\[(\d+)\]", r".size(\1)", text) for s, text in found.items()}

    def _checks(self) -> list[str]:
        lines = []
        for name, value in zip(self.inputs, self.part.graph.inputs, strict=True):
            shape, strides = (self.expressions.tuple(n) for n in (value.shape, value.params["strides"]))
            facts = f"{self._device()}, {kind(value.dtype)}, {shape}, {strides}"
            lines.append(f'{name} = expect("{name}", {name}, {facts});')
        return [*lines, *self._conditions()] if self.checked else lines

    def _conditions(self) -> list[str]:
        texts = [self.expressions.text(c) for c in self._assumed()]
        if not texts:
            return []
        whole = " && ".join(t if len(texts) == 1 or " || " not in t else f"({t})" for t in texts)
        return [f'TORCH_CHECK_VALUE({whole}, "{self.function} was exported for sizes with {whole}");']

    # ------------------------------------------------------------------ steps
    def _step(self, at: int) -> list[str]:
        step = self.part.steps[at]
        if isinstance(step, Group):
            return self._group(step, self.part.kernels[at])
        (line,) = self._computed(step.value)
        if line is None:
            raise self._refused(step)
        return [line]

    def _computed(self, value: Value) -> list[str | None]:
        operands = [self._value(a) for a in value.args]
        text = call_text(Call(value, operands, self.expressions, self._device()))
        if text is None:
            return [None]
        several = is_several(value)
        name = self._named(value, None if several else value.origin.name)
        return [f"{'auto' if several else 'at::Tensor'} {name} = {text};"]

    def _given(self, value: Value, own: Value) -> tuple[list[str], str]:
        lines, name = super()._given(value, own)
        return [self._declared(line) for line in lines], name

    def _declared(self, line: str) -> str:
        """A line that binds a name, as a statement: the name is new unless a tensor is called so already."""
        name = line.split(" = ")[0]
        return f"{line};" if f" {name} = {name}" in f" {line}" or f"({name}," in line else f"at::Tensor {line};"

    def _on_device(self, lines: Iterator[str]) -> list[str]:
        return list(lines)

    def _bound(self, name: str, text: str) -> str:
        return f"at::Tensor {name} = {text};"

    def _branches(self, versions: Sequence[Kernels], launches: Sequence[list[str]]) -> Iterator[str]:
        conditions = [self._condition(v) for v in versions[:-1]]
        for word, condition, lines in zip(["if", *["} else if"] * len(versions)], conditions, launches, strict=False):
            yield f"{word} ({condition}) {{"
            yield from (f"  {line}" for line in lines)
        if conditions:
            yield "} else {"
        yield from (f"  {line}" if conditions else line for line in launches[-1])
        if conditions:
            yield "}"

    def _condition(self, version: Kernels) -> str:
        guards = dict.fromkeys(g for k in version.kernels for g in k.guards if g.has(sympy.Mod))
        return " && ".join(map(self.expressions.text, guards))

    def _launch(self, kernel: Kernel, memory: Mapping[str, Sequence[str]]) -> Iterator[str]:
        arguments = [self._argument(a, memory).removesuffix(".view(torch.uint8)") for a in kernel.arguments]
        grid, (first, *rest) = self.expressions.text(kernel.grid), folded(arguments, 80)
        head = f"launch({kernel.name}, {grid}, {self._device()}, {{"
        yield head + first.rstrip(",") + ("," if rest else "});")
        for i, line in enumerate(rest):
            yield f"    {line.rstrip(',')}" + ("," if i < len(rest) - 1 else "});")

    def _empty(self, dtype: str, shape: Sequence[Any], strides: Sequence[Any]) -> str:
        sizes, facts = self.expressions.tuple(shape), options(dtype, self._device())
        if tuple(strides) == contiguous_strides(shape):
            return f"at::empty({sizes}, {facts})"
        return f"at::empty_strided({sizes}, {self.expressions.tuple(strides)}, {facts})"

    def _device(self) -> str:
        return f"{self.inputs[0]}.device()"

    # ------------------------------------------------------------------ after the last kernel
    def _result(self, value: Value) -> list[str]:
        made = next((s for s in self.part.steps if isinstance(s, Group) and value in s.outputs), None)
        if made is not None and made.graph.output_strides[made.outputs.index(value)] == self._strides(value):
            return []
        name = self.names.fresh(value.origin.name, "result")
        line = f"at::Tensor {name} = {self._own(value)};"
        self.values[value.id] = name
        return [line]

    def _own(self, value: Value) -> str:
        """A result in memory of its own, with eager's strides."""
        strides = self._strides(value)
        if 0 in strides:
            first = "".join(f".slice({i}, 0, 1)" for i, s in enumerate(strides) if s == 0)
            return f"{self._value(value)}{first}.clone().expand({self.expressions.tuple(value.shape)})"
        return f"owned({self._value(value)}, {self.expressions.tuple(strides)})"


def function_name(found: Gathered) -> str:
    """What the Function is called as a C++ function, a namespace and an operator library."""
    name = snake(found.name)
    return f"{name}_" if name in WORDS else name
