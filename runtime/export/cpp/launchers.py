"""The C++ text of one part: a function that launches its kernels, and one that computes it with ATen on any device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....codegen import Kernel
from ....ir import Value
from ....ir.text.printable import in_line_comment
from ....ir.types import Size
from ..gather.gathered import Gathered, Part
from ..text.expressions import CPP
from ..text.scope import Scope, Symbols, fold_words, snake
from ..text.steps import Memory, Syntax, argument_text, has_its_strides, step_lines
from .calls import CppCall, kind, options

WORDS = ("expect", "laid_out", "launch", "counters", "aten", "cdiv", "at", "c10", "std", "torch", "guard", "device",
         "int", "double", "float", "long", "short", "char", "bool", "auto", "class", "struct", "new", "delete", "this",
         "default", "register", "signed", "unsigned", "union", "namespace", "template", "operator", "const", "static",
         "switch", "case", "do", "goto", "private", "public", "protected", "friend", "virtual", "void", "volatile",
         "inline", "extern", "enum", "explicit", "export", "using", "typename", "typedef", "throw", "try", "catch",
         "sizeof", "mutable", "ctx", "gradients", "backward", "forward")  # fmt: skip
"""Names that the file or the language has already."""


def launch_scope(exported: Gathered, part: Part, symbols: Symbols) -> Scope:
    """The names of one of a part's functions."""
    return Scope(exported, part, symbols, WORDS, CPP)


def function_name(exported: Gathered) -> str:
    """The Function's name as a C++ function, a namespace and an operator library."""
    name = snake(exported.name)
    return f"{name}_" if name in WORDS else name


# ------------------------------------------------------------------ types
def result_type(scope: Scope) -> str:
    """The C++ type of what the functions return."""
    return f"std::tuple<{', '.join(['at::Tensor'] * len(scope.outputs))}>"


def schema(scope: Scope) -> str:
    """ "(Tensor x, int n) -> (Tensor, Tensor)" """
    parameters = [*(f"Tensor {n}" for n in scope.inputs), *(f"int {n}" for n in scope.sizes)]
    results = ", ".join(["Tensor"] * len(scope.outputs))
    return f"({', '.join(parameters)}) -> ({results})"


def _function(scope: Scope, suffix: str, lines: Sequence[str], remark: str) -> str:
    parameters = ", ".join([*(f"at::Tensor {n}" for n in scope.inputs), *(f"int64_t {n}" for n in scope.sizes)])
    head = f"{result_type(scope)} {scope.function}_{suffix}({parameters}) {{"
    comment = [f"// {in_line_comment(line.strip())}" for line in remark.splitlines() if line.strip()]
    return "\n".join([*comment, head, *(f"  {line}" for line in lines), "}"])


def _returned(texts: Sequence[str]) -> str:
    return f"return {{{', '.join(texts)}}};"


# ------------------------------------------------------------------ three functions
def with_kernels(scope: Scope) -> str:
    """The function that launches kernels; it names the outputs."""
    syntax = CppSyntax(scope)
    checks = _checks(scope)
    steps = step_lines(syntax)
    results = [line for o in scope.outputs for line in _result(scope, o)]
    lines = [*steps, *results, _returned([scope.name_of(o) for o in scope.outputs])]
    guard = f"c10::OptionalDeviceGuard guard({syntax.device});"
    body = [*scope.size_lines([*checks, *lines]), *checks, guard, *lines]
    return _function(scope, "with_kernels", body, scope.signature())


def with_aten(scope: Scope) -> str | None:
    """The function that computes the same with ATen, operation by operation; None where one has no text."""
    syntax = CppSyntax(scope)
    lines = []
    for value in (v for v in scope.part.graph.order() if v.prim != "pick"):
        if (line := syntax.computed(value)) is None:
            return None
        lines.append(line)
    statements = [*lines, _returned([_owned(scope, o) for o in scope.outputs])]
    checks = _checks(scope)
    body = [*scope.size_lines([*checks, *statements]), *checks, *statements]
    return _function(scope, "with_aten", body, "The same, operation by operation.")


def shapes(scope: Scope) -> str:
    """The function that makes results without computing them: what tracers ask for."""
    syntax = CppSyntax(scope)
    returned = _returned([syntax.empty(o.dtype, o.shape, scope.strides_of(o)) for o in scope.outputs])
    return _function(scope, "shapes", [*scope.size_lines([returned]), returned], "Results without values, for tracers.")


# ------------------------------------------------------------------ before the first kernel
def _checks(scope: Scope) -> list[str]:
    lines = []
    for name, value in zip(scope.inputs, scope.part.graph.inputs, strict=True):
        shape, strides = (scope.expressions.tuple(n) for n in (value.shape, value.params["strides"]))
        facts = f"{CppSyntax(scope).device}, {kind(value.dtype)}, {shape}, {strides}"
        lines.append(f'{name} = expect("{name}", {name}, {facts});')
    return [*lines, *_conditions(scope)] if scope.is_checked else lines


def _conditions(scope: Scope) -> list[str]:
    texts = [scope.expressions.text(c) for c in scope.assumed()]
    if not texts:
        return []
    conjunction = " && ".join(t if len(texts) == 1 or " || " not in t else f"({t})" for t in texts)
    return [f'TORCH_CHECK_VALUE({conjunction}, "{scope.function} was exported for sizes with {conjunction}");']


# ------------------------------------------------------------------ steps
class CppSyntax(Syntax):
    """Statements of C++ on ATen and the file's own helpers."""

    library, branch_forms, indent = "at::", ("if ({}) {{", "}} else if ({}) {{", "} else {", "}"), "  "

    @property
    def device(self) -> str:
        return f"{self.scope.inputs[0]}.device()"

    def bound(self, name: str, text: str) -> str:
        return f"at::Tensor {name} = {text};"

    def adapted(self, name: str, source: str, strides: Sequence[Any]) -> str:
        text = f"laid_out({source}, {self.scope.expressions.tuple(strides)})"
        return f"{name} = {text};" if name == source else self.bound(name, text)

    def options(self, dtype: str) -> str:
        return options(dtype, self.device)

    def computed(self, value: Value) -> str | None:
        operands = [self.scope.name_of(a) for a in value.args]
        text = CppCall(value, operands, self.scope.expressions, self.device).text()
        if text is None:
            return None
        if len(value.avals) > 1:
            return f"auto {self.scope.bind(value, None)} = {text};"
        return self.bound(self.scope.bind(value, value.origin.name), text)

    def refusal(self, text: str) -> str:
        return f'TORCH_CHECK_VALUE(false, "{text}");'

    def launch(self, kernel: Kernel, memory: Memory, words: Mapping[str, Size]) -> Iterator[str]:
        arguments = [argument_text(self.scope, a, memory) for a in kernel.arguments]
        grid, (first, *further) = self.scope.expressions.text(kernel.grid), fold_words(arguments, 80)
        head = f"launch({kernel.name}, {grid}, {self.device}, {{"
        yield head + first.rstrip(",") + ("," if further else "});")
        for i, line in enumerate(further):
            yield f"    {line.rstrip(',')}" + ("," if i < len(further) - 1 else "});")

    def on_device(self, lines: Iterator[str]) -> list[str]:
        return list(lines)


# ------------------------------------------------------------------ after the last kernel
def _result(scope: Scope, value: Value) -> list[str]:
    if has_its_strides(scope, value):
        return []
    name = scope.names.fresh(value.origin.name, "result")
    line = f"at::Tensor {name} = {_owned(scope, value)};"
    scope.values[value.id] = name
    return [line]


def _owned(scope: Scope, value: Value) -> str:
    """A result in memory of its own, with eager's strides."""
    strides = scope.strides_of(value)
    if 0 in strides:
        first = "".join(f".slice({i}, 0, 1)" for i, s in enumerate(strides) if s == 0)
        return f"{scope.name_of(value)}{first}.clone().expand({scope.expressions.tuple(value.shape)})"
    return f"owned({scope.name_of(value)}, {scope.expressions.tuple(strides)})"
