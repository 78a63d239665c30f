"""The text of a launch function: from tensors to tensors, one call of a kernel or of a library after the other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy

from ....codegen import Kernel, Pointer
from ....ir import Value
from ....ir.passes.fuse import View
from ....ir.types import FLOAT8, Size
from ....tracer.dtypes import TO_TORCH
from ..gather.gathered import Gathered, Part
from ..text.expressions import PYTHON
from ..text.scope import WIDTH, Scope, Symbols, fold_words
from ..text.steps import Memory, Syntax, argument_text, group_of, has_its_strides, step_lines
from .calls import call_text
from .line_folding import tidy

RESERVED = (
    "torch", "laid_out", "expect", "aligned", "counters", "present", "inside", "workspace", "ROUNDING", "CHECKED",
    "ROOMY",
)  # fmt: skip
"""Names that the file has already."""


def dtype_text(dtype: str) -> str:
    """ "bf16" -> "torch.bfloat16" """
    return str(TO_TORCH[dtype])


def launch_scope(exported: Gathered, part: Part, symbols: Symbols) -> Scope:
    """The names of a part's launch function."""
    return Scope(exported, part, symbols, RESERVED, PYTHON)


def launch_function(scope: Scope) -> str:
    """The `def`."""
    body = list(_body(scope))
    parameters = ", ".join([*scope.inputs, *scope.sizes])
    head = f'def {scope.function}({parameters}):\n    """{scope.signature()}"""'
    return "\n".join([head, *(_folded(f"    {line}") for line in body)])


def _folded(line: str) -> str:
    """A count of programs is a long formula where one even wave of them is launched."""
    if not re.match(r" {4,}[A-Z][A-Z_0-9]* = ", line):
        return line
    # Each further fold opens a call within the call.
    folded = tidy(line).split("\n")
    while (again := [line for part in folded for line in _opened(part)]) != folded:
        folded = again
    return "\n".join(folded)


def _opened(line: str) -> list[str]:
    """A line of a folded call, itself folded where it is too long."""
    return f"{tidy(line[:-1])},".split("\n") if line.endswith(",") else [line]


def _body(scope: Scope) -> Iterator[str]:
    # Lines are made in the order in which they give names; what the sizes are called is known when all is written.
    checks = _checks(scope)
    steps = step_lines(PythonSyntax(scope))
    copies = [f"{scope.inputs[i]}.copy_({scope.name_of(v)})" for i, v in scope.part.graph.mutations.items()]
    results = [line for o in scope.outputs for line in _result(scope, o)]
    returned = ", ".join(map(scope.name_of, scope.outputs))
    described = any(k.has_descriptors for vs in scope.part.kernels.values() for v in vs for k in v.kernels.kernels)
    allocator = ["triton.set_allocator(workspace)"] if described else []
    lines = [*allocator, *steps, *results, *copies, f"return {returned}"]
    yield from scope.size_lines([*checks, *lines])
    yield from checks
    yield from lines


# ------------------------------------------------------------------ before the first kernel
def _checks(scope: Scope) -> list[str]:
    lines = []
    for name, value in zip(scope.inputs, scope.part.graph.inputs, strict=True):
        strides = scope.expressions.tuple(value.params["strides"])
        if scope.is_checked:
            shape = scope.expressions.tuple(value.shape)
            lines.append(f'{name} = expect("{name}", {name}, {dtype_text(value.dtype)}, {shape}, {strides})')
        else:
            lines.append(f"{name} = laid_out({name}, {strides})")
    return [*lines, *_conditions(scope)] if scope.is_checked else lines


def _conditions(scope: Scope) -> list[str]:
    """The assumptions of the capture about sizes, refused by name where it does not hold."""
    texts = [scope.expressions.text(c) for c in scope.assumed()]
    limits = [line for name, most in scope.limits for line in _limit(scope, name, most)]
    if not texts:
        return limits
    parts = [t if len(texts) == 1 or not {"and", "or"} & set(t.split()) else f"({t})" for t in texts]
    conjunction = " and ".join(parts)
    words = f"{scope.function} was exported for sizes with"
    if len(conjunction) > 60:
        lines = [f"    {'and ' * bool(i)}{part}" for i, part in enumerate(parts)]
        return [*limits, "if not (", *lines, "):", f'    raise ValueError("{words} the relations above")']
    refusal = [f'    raise ValueError("{words} {conjunction}")']
    if len(refusal[0]) > WIDTH:
        refusal = ["    raise ValueError(", f'        "{words} "', f'        "{conjunction}"', "    )"]
    return [*limits, f"if not ({conjunction}):", *refusal]


def _limit(scope: Scope, name: str, most: int) -> list[str]:
    """Longer rows are refused, with the way out."""
    fact, way_out = f"{scope.function} is for {name} up to {most}", f"export it again with --sizes {name}={{{name}}}"
    return [f"if {name} > {most}:", "    raise ValueError(", f'        "{fact}: "', f'        f"{way_out}"', "    )"]


# ------------------------------------------------------------------ steps
class PythonSyntax(Syntax):
    """Lines of Python: torch's functions, and Triton's launches."""

    library, branch_forms, indent = "torch.", ("if {}:", "elif {}:", "else:", ""), "    "

    @property
    def device(self) -> str:
        return f"{self.scope.inputs[0]}.device" if self.scope.inputs else '"cuda"'

    def bound(self, name: str, text: str) -> str:
        return f"{name} = {text}"

    def adapted(self, name: str, source: str, strides: Sequence[Any]) -> str:
        return f"{name} = laid_out({source}, {self.scope.expressions.tuple(strides)})"

    def options(self, dtype: str) -> str:
        return f"dtype={dtype_text(dtype)}, device={self.device}"

    def computed(self, value: Value) -> str | None:
        operands = [self.scope.name_of(a) for a in value.args]
        text = call_text(value, operands, self.scope.expressions, self.device)
        return None if text is None else f"{self.scope.bind(value, value.origin.name)} = {text}"

    def refusal(self, text: str) -> str:
        return f'raise ValueError("{text}")'

    def launch(self, kernel: Kernel, memory: Memory, words: Mapping[str, Size]) -> Iterator[str]:
        texts = [(a, argument_text(self.scope, a, memory)) for a in kernel.arguments]
        views = [(a.name, f"{text}.view(torch.uint8)" if _is_float8(a) else text) for a, text in texts]
        arguments = [f"aligned({text})" if name in kernel.aligned else text for name, text in views]
        given = {**kernel.constants, "num_warps": kernel.num_warps, "num_stages": kernel.num_stages, **words}
        constants = [f"{k}={self._word(v)}" for k, v in given.items()]
        constants += [] if kernel.fast else ["**ROUNDING"]
        constants += ["**CHECKED"] if kernel.assertions else []
        constants += ["**ROOMY"] if kernel.roomy else []
        yield f"{kernel.name}[({self.scope.expressions.text(kernel.grid)},)]("
        yield from (f"    {line}" for line in fold_words([*arguments, *constants], WIDTH - 16))
        yield ")"

    def _word(self, value: Any) -> str:
        """A constant of a launch: alone a quotient needs no brackets."""
        if not isinstance(value, sympy.Basic):
            return repr(value)
        text = self.scope.expressions.text(value)
        return text[1:-1] if isinstance(value, sympy.Mul) and text.startswith("(") else text

    def on_device(self, lines: Iterator[str]) -> list[str]:
        return [f"with torch.cuda.device_of({self.scope.inputs[0]}):", *(f"    {line}" for line in lines)]


def _is_float8(argument: Any) -> bool:
    return isinstance(argument, Pointer) and argument.dtype in FLOAT8


# ------------------------------------------------------------------ after the last kernel
def _result(scope: Scope, value: Value) -> list[str]:
    """An output has memory and strides of its own."""
    strides = scope.strides_of(value)
    if value.prim == "input":
        name = scope.values[value.id]
        scope.values[value.id] = copied = scope.names.fresh(f"{name}_copy")
        return [f"{copied} = {name}.clone()"]
    if has_its_strides(scope, value):
        return []
    source = scope.name_of(value)
    if 0 in strides:
        return _expanded(scope, value, source, strides)
    name = source if source.isidentifier() else scope.bind(value, value.origin.name)
    copied = f"{source}.clone()" if _is_shared_view(scope, value) else source
    return [f"{name} = laid_out({copied}, {scope.expressions.tuple(strides)})"]


def _is_shared_view(scope: Scope, value: Value) -> bool:
    """It looks at memory that is not its own: at all but what a kernel wrote for it alone."""
    views = {s.value: s.value.args[0] for s in scope.part.steps if isinstance(s, View) and s.value.args}
    memory = {v: _below(v, views) for v in (*views, *scope.outputs)}
    alone = sum(memory[o] == memory[value] for o in scope.outputs) == 1
    return value in views and not (alone and group_of(scope, memory[value]) is not None)


def _below(value: Value, views: Mapping[Value, Value]) -> Value:
    while value in views:
        value = views[value]
    return value


def _expanded(scope: Scope, value: Value, source: str, strides: Sequence[Any]) -> list[str]:
    """An output with one element for a whole axis, as in eager."""
    single = ", ".join(":1" if s == 0 else ":" for s in strides)
    name = scope.bind(value, value.origin.name)
    return [f"{name} = {source}[{single}].clone().expand({scope.expressions.tuple(value.shape)})"]
