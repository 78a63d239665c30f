"""Versions of a group's kernels in a file: the sizes that each is for, and numbers of a launch that depend on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import sympy

from ....codegen import Kernels, Target
from ....ir.errors import Unfusible
from ....ir.passes.fuse import Group
from ....ir.types import Size
from ...execution.graph_to_kernels import kernels_of
from ...execution.variants import are_for_multiples, counterpart_sizes

Sizes = dict[sympy.Symbol, int]


@dataclass(frozen=True)
class Column:
    """A number of a launch for each block of a row: {2048: 4, 4096: 8}, under a name like `wish`."""

    wish: str
    values: Mapping[int, int]


@dataclass(frozen=True)
class Row:
    """A row of any length: its symbol, and one for its block, the power of two above it but `least` at least."""

    length: sympy.Symbol
    block: sympy.Symbol
    least: int


@dataclass(frozen=True)
class Version:
    """Kernels of a group for sizes under the conditions.

    row: of any length, up to a bound in the conditions. words: constants and options of kernels, by the kernel's name,
    that are expressions in the row's block; so may be grids, arguments and scratch, in the symbols of the columns.
    """

    kernels: Kernels
    conditions: tuple[sympy.Basic, ...] = ()
    row: Row | None = None
    words: Mapping[str, Mapping[str, Size]] = field(default_factory=dict)
    columns: Mapping[sympy.Symbol, Column] = field(default_factory=dict)


def fixed_versions(group: Group, first: Kernels, target: Target, sizes: Sizes, name: str) -> list[Version]:
    """Kernels for these sizes, and their counterpart: wide accesses where sizes are multiples, any size else."""
    pinned, aligned = {s for k in first.kernels for s in k.pinned}, are_for_multiples(first)
    guards = [g for k in first.kernels for g in k.guards]
    hints = counterpart_sizes(sizes, pinned, aligned, group.graph, guards)
    if hints is None:
        return [_version(first)]
    try:
        counterpart = kernels_of(group, target, hints, f"{name}_{'any_size' if aligned else 'aligned'}")
    except Unfusible:  # at these sizes a product is not streamed any more
        return [_version(first)]
    if are_for_multiples(counterpart) == aligned or any(s not in pinned for k in counterpart.kernels for s in k.pinned):
        return [_version(first)]
    return [_version(k) for k in ((first, counterpart) if aligned else (counterpart, first))]


def _version(kernels: Kernels) -> Version:
    return Version(kernels, multiples_of(kernels))


def multiples_of(kernels: Kernels) -> tuple[sympy.Basic, ...]:
    """The guards that ask for multiples."""
    return tuple(dict.fromkeys(g for k in kernels.kernels for g in k.guards if g.has(sympy.Mod)))


def relations_in(versions: Iterable[Version]) -> Sequence[sympy.Basic]:
    """What kernels assume of sizes among each other: K = 2 H, N >= M. The file has none for other sizes."""
    guards = (g for v in versions for kernel in v.kernels.kernels for g in kernel.guards)
    kinds = (sympy.Eq, sympy.GreaterThan)
    return [g for g in guards if isinstance(g, kinds) and len(g.free_symbols) > 1 and not g.has(sympy.Mod)]


def pinned_by(versions: Iterable[Version]) -> Sizes:
    """Symbols whose values are compiled into some kernel."""
    return {s: n for v in versions for kernel in v.kernels.kernels for s, n in kernel.pinned.items()}


def least_limits(limits: Iterable[tuple[sympy.Symbol, int]]) -> Sizes:
    """The least of the limits of each symbol."""
    least: Sizes = {}
    for symbol, most in limits:
        least[symbol] = min(most, least.get(symbol, most))
    return least


def rows_of(versions: Iterable[Version]) -> Sequence[Row]:
    """The rows of any length."""
    return list(dict.fromkeys(v.row for v in versions if v.row is not None))
