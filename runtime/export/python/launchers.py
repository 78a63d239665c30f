"""The text of a launch function: from tensors to tensors, one call of a kernel or of a library after the other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy

from ....codegen import Kernel, Kernels, Pointer, Ref, Scalar
from ....codegen.emit.names import Names
from ....codegen.kernel import Buffer
from ....ir import Value
from ....ir.once import once
from ....ir.passes.fuse import Extern, Group, View
from ....ir.types import FLOAT8, contiguous_strides
from ....tracer.dtypes import TO_TORCH
from ..gather.gathered import ExportError, Gathered, Part
from .calls import call_text
from .expressions import Expressions

WIDTH = 116
WORDS = ("torch", "laid_out", "expect", "aligned", "counters", "present", "inside")
"""What the file has names for already."""


def snake(name: str) -> str:
    """RMSNorm -> rms_norm"""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def dtype_text(dtype: str) -> str:
    """ "bf16" -> "torch.bfloat16" """
    return str(TO_TORCH[dtype])


def symbol_names(found: Gathered, names: Names) -> dict[sympy.Symbol, str | int]:
    """What each symbol of the capture is called in the file: its number, a kernel's name for it, or one of its own."""
    known: dict[sympy.Symbol, str | int] = dict(found.pinned)
    kernels = [k for p in found.parts for vs in p.kernels.values() for v in vs for k in v.kernels]
    for scalar in (a for k in kernels for a in k.arguments if isinstance(a, Scalar)):
        if isinstance(scalar.value, sympy.Symbol) and scalar.value not in known:
            known[scalar.value] = names.fresh(scalar.name)
    for symbol in found.specialization.captured.symbols:
        if symbol not in known:
            known[symbol] = names.fresh("n")
    return known


class Launcher:
    """Writes the launch function of one part."""

    def __init__(self, found: Gathered, part: Part, symbols: Mapping[sympy.Symbol, str | int], checked: bool) -> None:
        self.found, self.part, self.checked = found, part, checked
        self.expressions = Expressions(symbols)
        self.symbols = symbols
        self.function = f"{snake(found.name)}_{part.method}"
        self.names = Names([*WORDS, *(str(s) for s in symbols.values())])
        self.values: dict[int, str] = {}
        self.lines: list[str] = []
        self.inputs = [self._named(v, v.params["name"]) for v in part.graph.inputs]
        self.sizes = [str(symbols[s]) for s in part.sizes if isinstance(symbols[s], str)]

    # ------------------------------------------------------------------ the whole
    @property
    def outputs(self) -> list[Value]:
        """What the function returns, in order; each value once."""
        return list(dict.fromkeys(o for o in self.part.graph.outputs if o is not None))

    def text(self) -> str:
        """The `def`."""
        body = list(self._body())
        parameters = ", ".join([*self.inputs, *self.sizes])
        head = f'def {self.function}({parameters}):\n    """{self._signature()}"""'
        return "\n".join([head, *(f"    {line}" for line in body)])

    def _signature(self) -> str:
        given = ", ".join(f"{n}: {self.type_text(v)}" for n, v in zip(self.inputs, self.part.graph.inputs, strict=True))
        made = ", ".join(self.type_text(v) for v in self.outputs)
        text = f"{given} -> {made}"
        return text if len(text) < WIDTH - 10 else text.replace(" -> ", "\n    -> ") + "\n    "

    def type_text(self, value: Value) -> str:
        """ "bf16[M, 1024]" """
        return f"{value.dtype}[{', '.join(map(self.expressions.text, value.shape))}]"

    def _body(self) -> Iterator[str]:
        checks = self._checks()
        steps = [line for at in range(len(self.part.steps)) for line in self._step(at)]
        written = [f"{self.inputs[i]}.copy_({self._value(v)})" for i, v in self.part.graph.mutations.items()]
        results = [line for o in self.outputs for line in self._result(o)]
        returned = ", ".join(self._value(o) for o in self.outputs)
        rest = [*steps, *results, *written, f"return {returned}"]
        yield from self._sizes([*checks, *rest])
        yield from checks
        yield from rest

    # ------------------------------------------------------------------ before the first kernel
    def _sizes(self, rest: Sequence[str]) -> Iterator[str]:
        """A line for each symbol that something below reads."""
        known = set(self.sizes)
        text = "\n".join(rest)
        for symbol, source in self.sources.items():
            name = self.symbols[symbol]
            if isinstance(name, str) and name not in known and re.search(rf"\b{name}\b", text):
                known.add(name)
                yield f"{name} = {source}"

    @once
    def sources(self) -> dict[sympy.Symbol, str]:
        """Where the tensors that are given tell a symbol."""
        if self.checked:
            return self._told_by_arguments()
        found: dict[sympy.Symbol, str] = {}
        pairs = list(zip(self.inputs, self.part.graph.inputs, strict=True))
        told = [(f"{n}.shape[{i}]", s) for n, v in pairs for i, s in enumerate(v.shape)]
        told += [(f"{n}.stride({i})", s) for n, v in pairs for i, s in enumerate(v.params["strides"])]
        for text, size in told:
            if isinstance(size, sympy.Symbol):
                found.setdefault(size, text)
        return found

    def _told_by_arguments(self) -> dict[sympy.Symbol, str]:
        words = {"size": "shape[{}]", "stride": "stride({})"}
        sources = self.found.sources.items()
        return {s: f"{self.inputs[at]}.{words[kind].format(axis)}" for s, (at, kind, axis) in sources}

    def _checks(self) -> list[str]:
        lines = []
        for name, value in zip(self.inputs, self.part.graph.inputs, strict=True):
            strides = self.expressions.tuple(value.params["strides"])
            if self.checked:
                shape = self.expressions.tuple(value.shape)
                lines.append(f'{name} = expect("{name}", {name}, {dtype_text(value.dtype)}, {shape}, {strides})')
            else:
                lines.append(f"{name} = laid_out({name}, {strides})")
        return [*lines, *self._conditions()] if self.checked else lines

    def _conditions(self) -> list[str]:
        """What the capture assumed about sizes, refused by name where it does not hold."""
        texts = [self.expressions.text(c) for c in self._assumed()]
        if not texts:
            return []
        parts = [t if len(texts) == 1 or " and " not in t else f"({t})" for t in texts]
        whole = " and ".join(parts)
        if len(whole) > 60:
            lines = [f"    {'and ' * bool(i)}{part}" for i, part in enumerate(parts)]
            told = f'    raise ValueError("{self.function} was exported for sizes with the relations above")'
            return ["if not (", *lines, "):", told]
        return [
            f"if not ({whole}):",
            f'    raise ValueError("{self.function} was exported for sizes with {whole}")',
        ]

    def _assumed(self) -> list[Any]:
        """The conditions of the capture; a size that is no constant of it is two at least, or one if that is known."""
        settled = [self.expressions.settled(g) for g in self.found.guards]
        sizes = [s for s in self.sources if isinstance(self.symbols[s], str) and self._is_size(s)]
        least = {s: 1 if s in self.found.ones else 2 for s in sizes}
        rest = []
        for guard in dict.fromkeys(g for g in settled if g is not sympy.true):
            bound = _lower_bound(guard)
            if bound is None:
                rest.append(guard)
            else:
                least[bound[0]] = max(least.get(bound[0], 0), bound[1])
        settled_by = {g.lhs for g in rest if isinstance(g, sympy.Eq) and g.lhs.is_Symbol and g.rhs.is_Integer}
        return [*(sympy.Ge(s, n, evaluate=False) for s, n in least.items() if s not in settled_by), *rest]

    def _is_size(self, symbol: sympy.Symbol) -> bool:
        return self.found.sources[symbol][1] == "size"

    # ------------------------------------------------------------------ steps
    def _step(self, at: int) -> list[str]:
        step = self.part.steps[at]
        if isinstance(step, Group):
            return self._group(step, self.part.kernels[at])
        operands = [self._value(a) for a in step.value.args]
        text = call_text(step.value, operands, self.expressions, self._device())
        if text is None:
            raise self._refused(step)
        names = [self._named(step.value, None)]
        return [f"{names[0]} = {text}"]

    def _refused(self, step: Extern | View) -> ExportError:
        return ExportError(
            function=self.found.name, reason=f"{step.value.prim} in {self.part.method} has no text in plain torch",
            where=step.value.origin.where or self.part.where, fix="use the class through fusegrad.",
        )  # fmt: skip

    def _group(self, group: Group, versions: Sequence[Kernels]) -> list[str]:
        given = [self._given(v, own) for v, own in zip(group.inputs, group.graph.inputs, strict=True)]
        lines = [line for before, _ in given for line in before]
        outputs = []
        for whole, own, strides in zip(group.outputs, group.graph.outputs, group.graph.output_strides, strict=True):
            assert own is not None and strides is not None
            outputs.append(self._named(whole, whole.origin.name))
            lines.append(self._bound(outputs[-1], self._empty(own.dtype, own.shape, strides)))
        memory = {"input": [text for _, text in given], "output": outputs}
        versions = self.reached(versions)
        lines += self._variables(versions)
        launches = [list(self._launches(version, memory)) for version in versions]
        return [*lines, *self._on_device(self._branches(versions, launches))]

    def _on_device(self, lines: Iterator[str]) -> list[str]:
        """Launches go to the GPU on which the arguments are."""
        return [f"with torch.cuda.device_of({self.inputs[0]}):", *(f"    {line}" for line in lines)]

    def _bound(self, name: str, text: str) -> str:
        """The line that gives a tensor a new name."""
        return f"{name} = {text}"

    def reached(self, versions: Sequence[Kernels]) -> Sequence[Kernels]:
        """The versions up to the first whose condition always holds."""
        for i, version in enumerate(versions):
            if self._condition(version) in ("", self.expressions.text(sympy.true)):
                return versions[: i + 1]
        return versions

    def _variables(self, versions: Sequence[Kernels]) -> Iterator[str]:
        """What the kernels are given as numbers, the simpler ones first."""
        scalars = [a for v in versions for k in v.kernels for a in k.arguments if isinstance(a, Scalar)]
        compound = [a for a in scalars if not isinstance(a.value, int)]
        for scalar in sorted(compound, key=lambda a: a.value.count_ops()):  # type: ignore[union-attr]
            if not self.expressions.is_defined(scalar.value):
                yield self.expressions.define(self.names.fresh(scalar.name), scalar.value)

    def _branches(self, versions: Sequence[Kernels], launches: Sequence[list[str]]) -> Iterator[str]:
        conditions = [self._condition(v) for v in versions[:-1]]
        for word, condition, lines in zip(["if", *["elif"] * len(versions)], conditions, launches, strict=False):
            yield f"{word} {condition}:"
            yield from (f"    {line}" for line in lines)
        if conditions:
            yield "else:"
        yield from (f"    {line}" if conditions else line for line in launches[-1])

    def _condition(self, version: Kernels) -> str:
        guards = dict.fromkeys(g for k in version.kernels for g in k.guards if g.has(sympy.Mod))
        return " and ".join(map(self.expressions.text, guards))

    def _given(self, value: Value, own: Value) -> tuple[list[str], str]:
        """What a kernel reads, in the layout that it was told."""
        name = self._value(value)
        if value.prim == "input" or self._made_by_group(value):
            return [], name
        if not name.isidentifier():  # one of several results
            name, source = self._named(value, value.origin.name), name
            return [f"{name} = laid_out({source}, {self.expressions.tuple(own.params['strides'])})"], name
        return [f"{name} = laid_out({name}, {self.expressions.tuple(own.params['strides'])})"], name

    def _made_by_group(self, value: Value) -> bool:
        return any(isinstance(s, Group) and value in s.outputs for s in self.part.steps)

    def _launches(self, version: Kernels, memory: Mapping[str, Sequence[str]]) -> Iterator[str]:
        temporaries = []
        for buffer in version.temporaries:
            temporaries.append(self.names.fresh(buffer.name))
            yield self._bound(temporaries[-1], self._empty(buffer.dtype, buffer.shape, buffer.strides))
        for kernel in version.kernels:
            scratch = []
            for buffer in kernel.scratch:
                scratch.append(self.names.fresh(buffer.name))
                yield self._bound(scratch[-1], self._scratch(buffer, kernel.name))
            yield from self._launch(kernel, {**memory, "temporary": temporaries, "scratch": scratch})

    def _launch(self, kernel: Kernel, memory: Mapping[str, Sequence[str]]) -> Iterator[str]:
        texts = {a.name: self._argument(a, memory) for a in kernel.arguments}
        arguments = [f"aligned({text})" if name in kernel.aligned else text for name, text in texts.items()]
        constants = [f"{k}={v!r}" for k, v in kernel.constants.items()]
        constants += [f"num_warps={kernel.num_warps}", f"num_stages={kernel.num_stages}"]
        constants += [] if kernel.fast else ["**ROUNDING"]
        head = f"{kernel.name}[({self.expressions.text(kernel.grid)},)]("
        yield head
        yield from (f"    {line}" for line in folded([*arguments, *constants], WIDTH - 16))
        yield ")"

    def _argument(self, argument: Pointer | Scalar, memory: Mapping[str, Sequence[str]]) -> str:
        match argument:
            case Pointer(buffer=Ref(kind=kind, index=index), dtype=dtype):
                name = memory[kind][index]
                return f"{name}.view(torch.uint8)" if dtype in FLOAT8 else name
            case Scalar(value=value):
                return self.expressions.text(value)

    def _scratch(self, buffer: Buffer, kernel: str) -> str:
        if buffer.zeroed:
            shape = self.expressions.text(buffer.shape[0])
            return f'counters("{kernel} {buffer.name}", {shape}, {self._device()})'
        return self._empty(buffer.dtype, buffer.shape, contiguous_strides(buffer.shape))

    def _empty(self, dtype: str, shape: Sequence[Any], strides: Sequence[Any]) -> str:
        facts = f"dtype={dtype_text(dtype)}, device={self._device()}"
        if tuple(strides) == contiguous_strides(shape):
            return f"torch.empty({self.expressions.tuple(shape)}, {facts})"
        return f"torch.empty_strided({self.expressions.tuple(shape)}, {self.expressions.tuple(strides)}, {facts})"

    def _device(self) -> str:
        return f"{self.inputs[0]}.device" if self.inputs else '"cuda"'

    # ------------------------------------------------------------------ after the last kernel
    def _result(self, value: Value) -> list[str]:
        """An output has memory and strides of its own."""
        graph = self.part.graph
        strides = graph.output_strides[graph.outputs.index(value)]
        assert strides is not None
        if value.prim == "input":
            name = self.values[value.id]
            self.values[value.id] = copied = self.names.fresh(f"{name}_copy")
            return [f"{copied} = {name}.clone()"]
        made = next((s for s in self.part.steps if isinstance(s, Group) and value in s.outputs), None)
        if made is not None:
            own = made.graph.output_strides[made.outputs.index(value)]
            if own == strides:
                return []
        source = self._value(value)
        if 0 in strides:
            return self._expanded(value, source, strides)
        name = source if source.isidentifier() else self._named(value, value.origin.name)
        copied = f"{source}.clone()" if made is None and self._is_view(value) else source
        return [f"{name} = laid_out({copied}, {self.expressions.tuple(strides)})"]

    def _expanded(self, value: Value, source: str, strides: Sequence[Any]) -> list[str]:
        """An output with one element for a whole axis, as in eager."""
        single = ", ".join(":1" if s == 0 else ":" for s in strides)
        name = self._named(value, value.origin.name)
        return [f"{name} = {source}[{single}].clone().expand({self.expressions.tuple(value.shape)})"]

    def _is_view(self, value: Value) -> bool:
        return any(isinstance(s, View) and s.value == value for s in self.part.steps)

    # ------------------------------------------------------------------ names
    def _named(self, value: Value, wish: str | None) -> str:
        self.values[value.id] = self.names.fresh(wish, "value")
        return self.values[value.id]

    def _value(self, value: Value) -> str:
        if value.id in self.values:
            return self.values[value.id]
        if value.prim == "pick":
            return f"{self._value(value.args[0])}[{value.params['index']}]"
        raise KeyError(f"no step computes {value!r} = {value.prim}")


def _lower_bound(guard: Any) -> tuple[sympy.Symbol, int] | None:
    """(s, n) of a condition that says s >= n."""
    if isinstance(guard, sympy.Le | sympy.Lt):
        guard = guard.reversed
    if not isinstance(guard, sympy.Ge | sympy.Gt) or not guard.lhs.is_Symbol or not guard.rhs.is_Integer:
        return None
    return guard.lhs, int(guard.rhs) + isinstance(guard, sympy.Gt)


def folded(words: Iterable[str], width: int) -> Iterator[str]:
    """Words joined by commas, in lines of at most `width`."""
    line = ""
    for word in words:
        if line and len(line) + len(word) + 2 > width:
            yield f"{line},"
            line = word
        else:
            line = f"{line}, {word}" if line else word
    if line:
        yield f"{line},"
