"""The lines of a launch function, step by step: a kernel's launches, or a library call, in any language."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from ....codegen import Kernel, Pointer, Ref, Scalar
from ....codegen.kernel import Buffer
from ....ir import Value
from ....ir.passes.fuse import Extern, Group, View
from ....ir.text.source_names import variable_name
from ....ir.types import Size, contiguous_strides
from ..gather.gathered import ExportError
from ..gather.versions import Version
from .scope import Scope, condition_of, reachable_versions

Memory = Mapping[str, Sequence[str]]
"""The names of a kernel's tensors, by kind: inputs, outputs, temporaries, scratch."""


class Syntax(Protocol):
    """The parts of a launch function; a subclass spells in its language what differs."""

    scope: Scope
    library: ClassVar[str]
    """The prefix of torch's functions."""
    branch_forms: ClassVar[tuple[str, str, str, str]]
    """The first branch by its condition, a further one, the last one, and what ends them all."""
    indent: ClassVar[str]

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    @property
    def device(self) -> str:
        """The device of the arguments."""

    def bound(self, name: str, text: str) -> str:
        """The line that gives a tensor a new name."""

    def adapted(self, name: str, source: str, strides: Sequence[Any]) -> str:
        """The line that lays a tensor out by these strides, under a name, or again under its own."""

    def options(self, dtype: str) -> str:
        """The arguments that say of which dtype new memory is, and on which device."""

    def computed(self, value: Value) -> str | None:
        """The line that computes a node without a kernel of ours; None for what has no text."""

    def launch(self, kernel: Kernel, memory: Memory, words: Mapping[str, Size]) -> Iterator[str]:
        """One launch; words: constants and options that are expressions."""

    def on_device(self, lines: Iterator[str]) -> list[str]:
        """Launches, on the GPU on which the arguments are."""

    def empty(self, dtype: str, shape: Sequence[Any], strides: Sequence[Any]) -> str:
        """New memory."""
        row_major = tuple(strides) == contiguous_strides(shape)
        layout = ", ".join(map(self.scope.expressions.tuple, [shape] if row_major else [shape, strides]))
        return f"{self.library}{'empty' if row_major else 'empty_strided'}({layout}, {self.options(dtype)})"

    def refusal(self, text: str) -> str:
        """The line that raises for sizes that no kernel is for."""

    def branches(self, conditions: Sequence[str], launches: Sequence[list[str]]) -> Iterator[str]:
        """The launches under the first condition that holds, or the last ones."""
        first, further, last, end = self.branch_forms
        if not conditions:
            yield from launches[-1]
            return
        heads = [form.format(c) for form, c in zip([first, *[further] * len(conditions)], conditions, strict=False)]
        for head, lines in zip([*heads, last], launches, strict=True):
            yield from (head, *(f"{self.indent}{line}" for line in lines))
        if end:
            yield end


def step_lines(syntax: Syntax) -> list[str]:
    """The lines of all steps of a part."""
    part = syntax.scope.part
    lines: list[str] = []
    for at, step in enumerate(part.steps):
        if isinstance(step, Group):
            lines += _group(syntax, step, part.kernels[at])
        elif (line := syntax.computed(step.value)) is not None:
            lines.append(line)
        else:
            raise _refused(syntax.scope, step)
    return lines


def _refused(scope: Scope, step: Extern | View) -> ExportError:
    return ExportError(
        function=scope.exported.name, reason=f"{step.value.prim} in {scope.part.method} has no text in plain torch",
        where=step.value.origin.where or scope.part.source, fix="use the class through fusegrad.",
    )  # fmt: skip


def group_of(scope: Scope, value: Value) -> Group | None:
    """The group that makes a value."""
    return next((s for s in scope.part.steps if isinstance(s, Group) and value in s.outputs), None)


def has_its_strides(scope: Scope, output: Value) -> bool:
    """True where a kernel writes an output as it is returned."""
    group = group_of(scope, output)
    if group is None:
        return False
    return group.graph.output_strides[group.outputs.index(output)] == scope.strides_of(output)


# ------------------------------------------------------------------ a group of nodes
def _group(syntax: Syntax, group: Group, versions: Sequence[Version]) -> list[str]:
    # What the kernels read, in the layout that they were generated for.
    scope = syntax.scope
    operands = [_operand(syntax, v, own) for v, own in zip(group.inputs, group.graph.inputs, strict=True)]
    lines = [line for before, _ in operands for line in before]
    # Memory for what they write.
    outputs = []
    for value, own, strides in zip(group.outputs, group.graph.outputs, group.graph.output_strides, strict=True):
        assert own is not None and strides is not None
        outputs.append(scope.bind(value, variable_name(value)))
        lines.append(syntax.bound(outputs[-1], syntax.empty(own.dtype, own.shape, strides)))
    memory = {"input": [text for _, text in operands], "output": outputs}
    versions = reachable_versions(scope, versions)
    if (row := next((v.row for v in versions), None)) is not None:
        lines += scope.block_line(row)
        launches = [_own_launches(syntax, version, memory) for version in versions]
    else:
        # Numbers that several launches read have a name, before any launch is written.
        lines += _variables(scope, versions)
        launches = [_branch(syntax, version, memory) for version in versions]
    conditions = [condition_of(scope, version) for version in versions[:-1]]
    if row is None and (last := condition_of(scope, versions[-1])):
        conditions.append(last)
        launches.append([syntax.refusal(f"{scope.function} was exported for sizes with the relations above")])
    return [*lines, *syntax.on_device(syntax.branches(conditions, launches))]


def _operand(syntax: Syntax, value: Value, own: Value) -> tuple[list[str], str]:
    """Lines that lay an operand out as a kernel reads it, and its name."""
    scope = syntax.scope
    name = source = scope.name_of(value)
    if value.prim == "input" or group_of(scope, value) is not None:
        return [], name
    if not source.isidentifier():  # one of several results
        name = scope.bind(value, value.origin.name)
    return [syntax.adapted(name, source, own.params["strides"])], name


def _branch(syntax: Syntax, version: Version, memory: Memory) -> list[str]:
    """The launches of a version, whose temporaries have the names of the others'."""
    with syntax.scope.branch():
        return list(_launches(syntax, version, memory))


def _own_launches(syntax: Syntax, version: Version, memory: Memory) -> list[str]:
    """The launches of a version with numbers of its own, which depend on how long a row is."""
    scope, row = syntax.scope, version.row
    assert row is not None
    with scope.branch():
        block = scope.expressions.names[row.block]
        lines = []
        for symbol, column in version.columns.items():
            scope.expressions.names[symbol] = name = scope.names.fresh(column.wish)
            lines.append(f"{name} = {dict(column.values)}[{block}]")
        return [*lines, *_variables(scope, [version]), *_launches(syntax, version, memory)]


def _variables(scope: Scope, versions: Sequence[Version]) -> Iterator[str]:
    """Definitions of the numbers that kernels take, the simpler ones first."""
    scalars = [a for v in versions for k in v.kernels.kernels for a in k.arguments if isinstance(a, Scalar)]
    compound = [a for a in scalars if not isinstance(a.value, int)]
    for scalar in sorted(compound, key=lambda a: a.value.count_ops()):  # type: ignore[union-attr]
        if not scope.expressions.is_defined(scalar.value):
            yield scope.expressions.define(scope.names.fresh(scalar.name), scalar.value)


def _launches(syntax: Syntax, version: Version, memory: Memory) -> Iterator[str]:
    names = syntax.scope.names
    temporaries = []
    for buffer in version.kernels.temporaries:
        temporaries.append(names.fresh(buffer.name.rpartition("_")[0]))
        yield syntax.bound(temporaries[-1], syntax.empty(buffer.dtype, buffer.shape, buffer.strides))
    for kernel in version.kernels.kernels:
        scratch = []
        for buffer in kernel.scratch:
            scratch.append(names.fresh(buffer.name))
            yield syntax.bound(scratch[-1], _scratch(syntax, buffer, kernel.name))
        words = version.words.get(kernel.name, {})
        yield from syntax.launch(kernel, {**memory, "temporary": temporaries, "scratch": scratch}, words)


def _scratch(syntax: Syntax, buffer: Buffer, kernel: str) -> str:
    if buffer.zeroed:
        shape = syntax.scope.expressions.text(buffer.shape[0])
        return f'counters("{kernel} {buffer.name}", {shape}, {syntax.device})'
    return syntax.empty(buffer.dtype, buffer.shape, contiguous_strides(buffer.shape))


def argument_text(scope: Scope, argument: Pointer | Scalar, memory: Memory) -> str:
    """A kernel's argument: a tensor by name, or a number."""
    match argument:
        case Pointer(buffer=Ref(kind=kind, index=index)):
            return memory[kind][index]
        case Scalar(value=value):
            return scope.expressions.text(value)
