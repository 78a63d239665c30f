"""The names that a report gives to sizes: M and N, as the kernels and the exported file do, instead of torch's s25."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import sympy

from ...codegen import Kernel, Scalar
from ...ir import Graph

FROM_THE_LAST_AXIS = "NMKLHGFE"


def size_names(kernels: Iterable[Kernel], graphs: Iterable[Graph]) -> dict[sympy.Symbol, str]:
    """A name for each symbol: a kernel's own for it, otherwise by the axis of the input that it is first met at."""
    names: dict[sympy.Symbol, str] = {}
    for kernel in kernels:
        for scalar in (a for a in kernel.arguments if isinstance(a, Scalar)):
            if isinstance(scalar.value, sympy.Symbol) and scalar.name not in names.values():
                names.setdefault(scalar.value, scalar.name)
    for symbol, axis in _input_symbols(graphs):
        if symbol not in names:
            names[symbol] = next(n for n in _wishes(axis) if n not in names.values())
    return names


def renamed(text: str, names: Mapping[sympy.Symbol, str]) -> str:
    """f32[s25, 4096] -> f32[M, 4096]"""
    by_text = {str(symbol): name for symbol, name in names.items()}
    return re.sub(r"\b[a-z]\d+\b", lambda word: by_text.get(word[0], word[0]), text) if by_text else text


def _input_symbols(graphs: Iterable[Graph]) -> Iterator[tuple[sympy.Symbol, int]]:
    """(symbol, its axis, counted from the last) in the order of the inputs."""
    for value in (v for graph in graphs for v in graph.inputs):
        for axis, size in enumerate(reversed(value.shape)):
            if not isinstance(size, int):
                yield from ((s, axis) for s in sorted(size.free_symbols, key=str))


def _wishes(axis: int) -> Iterator[str]:
    yield from FROM_THE_LAST_AXIS[axis:]
    yield from FROM_THE_LAST_AXIS[:axis]
    yield from (f"N{number}" for number in range(2, 1000))
