"""The names of an exported file: of its symbols, and in each launch function of inputs, values and sizes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sympy

from ....codegen import Scalar
from ....codegen.emit.names import Names
from ....ir import Value
from ....ir.lazy_attribute import lazy_attribute
from ...report.size_names import FROM_THE_LAST_AXIS
from ..gather.gathered import Gathered, Part
from ..gather.versions import Row, Version
from .expressions import Dialect, Expressions
from .implied import Facts

WIDTH = 116
Symbols = Mapping[sympy.Symbol, "str | int"]
"""The name, or the number, of each symbol of a capture."""


def snake(name: str) -> str:
    """RMSNorm -> rms_norm"""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def symbol_names(exported: Gathered, names: Names) -> dict[sympy.Symbol, str | int]:
    """The name of each symbol of the capture in the file: its number, a kernel's name for it, or one of its own."""
    symbols: dict[sympy.Symbol, str | int] = dict(exported.pinned)
    kernels = [k for p in exported.parts for version in p.versions for k in version.kernels.kernels]
    for scalar in (a for k in kernels for a in k.arguments if isinstance(a, Scalar)):
        if isinstance(scalar.value, sympy.Symbol) and scalar.value not in symbols:
            symbols[scalar.value] = names.fresh(scalar.name)
    for symbol in exported.specialization.captured.symbols:
        if symbol not in symbols:
            symbols[symbol] = names.fresh(_letter(exported, symbol))
    return symbols


def _letter(exported: Gathered, symbol: sympy.Symbol) -> str:
    """The name of a size that no kernel takes, by its axis as kernels have them; "n" for what is no size."""
    position, kind, axis = exported.sources.get(symbol, (0, "", 0))
    if kind != "size":
        return "n"
    behind = exported.forward.graph.inputs[position].ndim - 1 - axis
    return FROM_THE_LAST_AXIS[behind] if behind < len(FROM_THE_LAST_AXIS) else "n"


class Scope:
    """The launch function of one part while it is written: what its inputs, values and sizes are called."""

    def __init__(
        self, exported: Gathered, part: Part, symbols: Symbols, reserved: Iterable[str], dialect: Dialect
    ) -> None:
        self.exported, self.part, self.symbols = exported, part, symbols
        self.expressions = Expressions(symbols, dialect)
        self.function = f"{snake(exported.name)}_{part.method}"
        self.names = Names([*reserved, *(str(s) for s in symbols.values())])
        self.values: dict[int, str] = {}
        self.inputs = [self.bind(v, v.params["name"]) for v in part.graph.inputs]
        self.sizes = [str(symbols[s]) for s in part.sizes if isinstance(symbols[s], str)]

    @property
    def is_checked(self) -> bool:
        """True for forward, whose inputs are the user's and are checked."""
        return self.part is self.exported.forward

    @property
    def outputs(self) -> list[Value]:
        """The values that the function returns, in order, each once."""
        return list(dict.fromkeys(o for o in self.part.graph.outputs if o is not None))

    def strides_of(self, output: Value) -> Sequence[Any]:
        graph = self.part.graph
        strides = graph.output_strides[graph.outputs.index(output)]
        assert strides is not None
        return strides

    def bind(self, value: Value, wish: str | None) -> str:
        """A new name for a value."""
        self.values[value.id] = self.names.fresh(wish, "value")
        return self.values[value.id]

    def name_of(self, value: Value) -> str:
        """A value by its name, or as one of several results."""
        if value.id in self.values:
            return self.values[value.id]
        if value.prim == "pick":
            return f"{self.name_of(value.args[0])}[{value.params['index']}]"
        raise KeyError(f"no step computes {value!r} = {value.prim}")

    @property
    def limits(self) -> list[tuple[str, int]]:
        """The most that row lengths may be, by name."""
        names = ((self.symbols[s], most) for s, most in self.exported.limits.items())
        return [(name, most) for name, most in names if isinstance(name, str)]

    def block_line(self, row: Row) -> Iterator[str]:
        """The definition of a row's block, the first time that it is asked for."""
        if row.block not in self.expressions.names:
            length = self.expressions.text(row.length)
            self.expressions.names[row.block] = name = self.names.fresh(f"BLOCK_{length}")
            yield self.expressions.dialect.definition.format(
                f"{name} = max({row.least}, triton.next_power_of_2({length}))"
            )

    @contextmanager
    def branch(self) -> Iterator[None]:
        """What is defined within is known within alone; its names are free again behind it."""
        before = set(self.names)
        with self.expressions.branch():
            yield
        self.names.release(set(self.names) - before)

    def type_text(self, value: Value) -> str:
        """ "bf16[M, 1024]" """
        return f"{value.dtype}[{', '.join(map(self.expressions.text, value.shape))}]"

    def signature(self) -> str:
        """ "x: f32[M, N] -> f32[M]", in two lines where one is too long."""
        parameters = [f"{n}: {self.type_text(v)}" for n, v in zip(self.inputs, self.part.graph.inputs, strict=True)]
        results = list(map(self.type_text, self.outputs))
        text = f"{', '.join(parameters)} -> {', '.join(results)}"
        if len(text) < WIDTH - 10:
            return text
        return "\n    ".join([*_folded(parameters), *(f"-> {line}" for line in _folded(results))]) + "\n    "

    # ------------------------------------------------------------------ sizes
    @lazy_attribute
    def sources(self) -> dict[sympy.Symbol, str]:
        """The text that reads each symbol off a tensor's shape or strides."""
        places = self.exported.sources.items() if self.is_checked else self._places_in_inputs()
        words = {"size": self.expressions.dialect.extent, "stride": "stride({})"}
        sources: dict[sympy.Symbol, str] = {}
        for symbol, (position, kind, axis) in places:
            sources.setdefault(symbol, f"{self.inputs[position]}.{words[kind].format(axis)}")
        return sources

    def _places_in_inputs(self) -> Iterator[tuple[sympy.Symbol, tuple[int, str, int]]]:
        """Sizes of all inputs before strides."""
        inputs = list(enumerate(self.part.graph.inputs))
        places = [(n, (at, "size", i)) for at, v in inputs for i, n in enumerate(v.shape)]
        places += [(n, (at, "stride", i)) for at, v in inputs for i, n in enumerate(v.params["strides"])]
        return ((n, place) for n, place in places if isinstance(n, sympy.Symbol))

    def size_lines(self, lines: Sequence[str]) -> Iterator[str]:
        """A definition for each symbol that something below reads."""
        defined = set(self.sizes)
        text = "\n".join(lines)
        for symbol, source in self.sources.items():
            name = self.symbols[symbol]
            if isinstance(name, str) and name not in defined and re.search(rf"\b{name}\b", text):
                defined.add(name)
                yield self.expressions.dialect.definition.format(f"{name} = {source}")

    def assumed(self) -> list[Any]:
        """The conditions of the capture; a size that is no constant of it is two at least, or one if that is known."""
        least, conditions = self._least_and_conditions()
        settled_by = {g.lhs for g in conditions if isinstance(g, sympy.Eq) and g.lhs.is_Symbol and g.rhs.is_Integer}
        needed = Facts(least).needed(conditions)
        bounds = [sympy.Ge(s, n, evaluate=False) for s, n in least.items() if s not in settled_by]
        return [*(b for b in bounds if not _follows(b, least, needed)), *needed]

    def left_open(self, conditions: Iterable[Any]) -> list[Any]:
        """Those of these conditions that the capture has not assumed, and that do not follow from the others."""
        return self._facts.copy().needed(c.xreplace(self.expressions.numbers) for c in conditions)

    @lazy_attribute
    def _facts(self) -> Facts:
        """What the capture has assumed."""
        least, assumed = self._least_and_conditions()
        facts = Facts(least)
        facts.needed(assumed)
        return facts

    def _least_and_conditions(self) -> tuple[dict[sympy.Symbol, int], list[Any]]:
        """The least value of each size, and what else was assumed."""
        settled = [g.xreplace(self.expressions.numbers) for g in self.exported.guards]
        places = self.exported.sources.items()
        sizes = [s for s, (_, kind, _) in places if kind == "size" and isinstance(self.symbols[s], str)]
        least = {s: 1 if s in self.exported.ones else 2 for s in sizes}
        conditions = []
        for guard in dict.fromkeys(g for g in settled if g is not sympy.true):
            if (bound := _lower_bound(guard)) is None:
                conditions.append(guard)
            else:
                least[bound[0]] = max(least.get(bound[0], 0), bound[1])
        return least, conditions


def _follows(bound: Any, least: Mapping[sympy.Symbol, int], needed: Sequence[Any]) -> bool:
    """A size that is a multiple of another is as large as that one's least value makes it."""
    facts = Facts({s: n for s, n in least.items() if s != bound.lhs} | {bound.lhs: 1})
    facts.needed(needed)
    return facts.implies(bound) if bound.lhs in facts.instead else False


def _folded(words: Sequence[str]) -> list[str]:
    """Lines of words; the last has no comma."""
    lines = list(fold_words(words, WIDTH - 10))
    return [*lines[:-1], lines[-1].rstrip(",")]


def _lower_bound(guard: Any) -> tuple[sympy.Symbol, int] | None:
    """(s, n) of a condition that says s >= n."""
    if isinstance(guard, sympy.Le | sympy.Lt):
        guard = guard.reversed
    if not isinstance(guard, sympy.Ge | sympy.Gt) or not guard.lhs.is_Symbol or not guard.rhs.is_Integer:
        return None
    return guard.lhs, int(guard.rhs) + isinstance(guard, sympy.Gt)


# ------------------------------------------------------------------ versions of kernels
def condition_of(scope: Scope, version: Version) -> str:
    """What a version of a group's kernels asks of sizes that the capture has not assumed; "" for nothing."""
    return scope.expressions.conjunction(scope.left_open(version.conditions))


def reachable_versions(scope: Scope, versions: Sequence[Version]) -> Sequence[Version]:
    """The versions up to the first whose condition always holds."""
    for i, version in enumerate(versions):
        if condition_of(scope, version) in ("", scope.expressions.text(sympy.true)):
            return versions[: i + 1]
    return versions


def fold_words(words: Iterable[str], width: int) -> Iterator[str]:
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
