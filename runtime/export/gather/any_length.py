"""Kernels of a group for a row of any length: what is compiled in is its block, the power of two above the length.

    N <= 1024       several rows a program, BLOCK_N = next_power_of_2(N)
    N <= 16384      one row a program

Each block's kernels are generated and proved like those of a call, for every length up to the block; those of one text
become one version. Rows beyond the longest block are in chunks in other kernels, which hold for any length as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy

from ....codegen import Kernel, Kernels, Target
from ....codegen.emit.names import MULTIPLE
from ....ir.errors import Unfusible
from ....ir.passes.fuse import Group
from ...execution.graph_to_kernels import kernels_of
from ...execution.variants import ALIGNED
from ...kernels import proofs
from .launch_tables import Different, as_one
from .versions import Row, Sizes, Version, multiples_of

LEAST = ALIGNED
"""The shortest block: lengths below it are masked."""
LONGEST = 1 << 18
"""Blocks are tried up to here."""


@dataclass(frozen=True)
class AnyLength:
    """The versions of a group, in the order in which they are tried, and the longest row that they serve."""

    row: Row
    versions: list[Version]
    limit: int


@dataclass(frozen=True)
class OfBlock:
    """Kernels for rows of each length up to a block, and those for multiples, with wide accesses, where there are."""

    block: int
    multiples: Kernels | None
    others: Kernels


def versions_of_any_length(
    group: Group, target: Target, sizes: Sizes, name: str, symbol: sympy.Symbol, assumed: Sequence[sympy.Basic],
    longest: int = LONGEST,
) -> AnyLength | None:  # fmt: skip
    """None where the row of this symbol cannot be a parameter. assumed: conditions that hold; longest: of blocks."""
    row = Row(symbol, sympy.Symbol(f"block_of_{symbol}", integer=True, positive=True), LEAST)
    found = list(_Blocks(group, target, sizes, name, row, assumed).up_to(longest))
    return AnyLength(row, _renamed(_runs(found, row)), found[-1].block) if found else None


# ------------------------------------------------------------------ a block after the other
@dataclass(frozen=True)
class _Blocks:
    """Generates the kernels of each block."""

    group: Group
    target: Target
    sizes: Sizes
    name: str
    row: Row
    assumed: Sequence[sympy.Basic]

    def up_to(self, longest: int) -> Iterator[OfBlock]:
        """From the shortest on, as long as rows are held whole."""
        block = LEAST
        while block <= longest and (others := self._kernels(block, multiple=False)) is not None:
            yield OfBlock(block, self._kernels(block, multiple=True), others)
            block *= 2

    def _kernels(self, block: int, multiple: bool) -> Kernels | None:
        """Kernels that hold a row and are proved for each length up to the block; None where there are none."""
        for hints in self._hints(block, multiple):
            try:
                made = kernels_of(self.group, self.target, hints, self.name, bounded=True)
            except Unfusible:
                continue
            if self._fits(made, block, multiple) and self._is_proved(made):
                return made
        return None

    def _hints(self, block: int, multiple: bool) -> Iterator[Sizes]:
        """Sizes to generate for: a row as long as the block or a little less, as many elements, no other multiples."""
        length = self.row.length
        for less in (0,) if multiple else (1, 2, 4, 8):
            scale = max(1, self.sizes[length] // block)
            for step in (1, 2, 4, 8, 0):
                others = {s: -(-n // ALIGNED) * ALIGNED + step for s, n in self._scaled(scale).items() if s != length}
                hints = {**self.sizes, **(others if step else {}), length: block - less}
                if not any(g.xreplace(hints) is sympy.false for g in self.assumed):
                    yield hints
                    break

    def _scaled(self, by: int) -> Sizes:
        """The sizes, of which the largest that is no row makes up for a shorter one."""
        others = [s for s in self.sizes if s != self.row.length]
        largest = max(others, key=lambda s: self.sizes[s], default=None)
        return {s: n * by if s == largest else n for s, n in self.sizes.items()}

    def _fits(self, kernels: Kernels, block: int, multiple: bool) -> bool:
        """True where they serve each length up to the block, and under no other condition."""
        at_block = {self.row.length: sympy.Integer(block)}
        guards = [g for k in kernels.kernels for g in k.guards]
        bounds = [g.xreplace(at_block) for g in guards if isinstance(g, sympy.Le)]
        conditions = {s for g in multiples_of(kernels) for s in g.free_symbols}
        alone = conditions <= ({self.row.length} if multiple else set())
        is_held = bool(bounds) and all(b is sympy.true for b in bounds)
        return alone and is_held and not any(k.pinned for k in kernels.kernels)

    def _is_proved(self, kernels: Kernels) -> bool:
        graph = self.group.graph
        return proofs.are_proved(graph, kernels) or proofs.are_proved(graph, kernels, self.assumed)


# ------------------------------------------------------------------ blocks of one text
def _runs(blocks: Sequence[OfBlock], row: Row) -> list[Version]:
    """The versions of neighbouring blocks, as few as there are texts and formulas."""
    versions: list[Version] = []
    run: list[OfBlock] = []
    merged: list[Version] = []
    for block in blocks:
        try:
            merged, run = _merged([*run, block], row), [*run, block]
        except Different:
            versions += merged
            merged, run = _merged([block], row), [block]
    return [*versions, *merged]


def _merged(run: Sequence[OfBlock], row: Row) -> list[Version]:
    """The versions of a run: for multiples and others at once, or one after the other. Raises Different."""
    blocks = [b.block for b in run]
    bound = sympy.Le(row.length, blocks[-1], evaluate=False)
    both = [k for b in run if (k := _both(b, row)) is not None]
    if len(both) == len(run):
        return [as_one(both, blocks, row, (bound,))]
    wide = [b.multiples for b in run if b.multiples is not None]
    if both or len(wide) not in (0, len(run)):
        raise Different
    versions = [as_one(wide, blocks, row, (bound, _divides(ALIGNED, row)))] if wide else []
    return [*versions, as_one([b.others for b in run], blocks, row, (bound,))]


def _both(block: OfBlock, row: Row) -> Kernels | None:
    """One for multiples and others, where a constant says what the length is a multiple of; None where they differ."""
    if block.multiples is None or len(block.multiples.kernels) != len(block.others.kernels):
        return None
    pairs = list(zip(block.multiples.kernels, block.others.kernels, strict=True))
    if any(_launch(a) != _launch(b) for a, b in pairs):
        return None
    kernels = tuple(replace(b, constants=_constants(a, b, row)) for a, b in pairs)
    return replace(block.others, kernels=kernels)


def _launch(kernel: Kernel) -> tuple[object, ...]:
    """A kernel and its launch, beside what the length is a multiple of."""
    constants = {k: v for k, v in kernel.constants.items() if not k.startswith(MULTIPLE)}
    return kernel.source, kernel.arguments, constants, kernel.grid, kernel.num_warps, kernel.num_stages, kernel.scratch


def _constants(multiples: Kernel, others: Kernel, row: Row) -> dict[str, Any]:
    """The constants of both, which may be expressions here: 8 if N % 8 == 0 else 1."""
    pairs = {name: (multiples.constants[name], value) for name, value in others.constants.items()}
    return {n: a if a == b else sympy.Piecewise((a, _divides(a, row)), (b, True)) for n, (a, b) in pairs.items()}


def _divides(number: Any, row: Row) -> sympy.Basic:
    return sympy.Eq(sympy.Mod(row.length, number), 0)


# ------------------------------------------------------------------ names
def _renamed(versions: Sequence[Version]) -> list[Version]:
    """A name for each text: the group's, then with a number."""
    texts = list(dict.fromkeys(_text(v) for v in versions))
    suffixes = {text: f"_{number}" if number > 1 else "" for number, text in enumerate(texts, 1)}
    return [_with_suffix(version, suffixes[_text(version)]) for version in versions]


def _text(version: Version) -> str:
    return "\n".join(k.source for k in version.kernels.kernels)


def _with_suffix(version: Version, suffix: str) -> Version:
    kernels = tuple(
        replace(k, name=f"{k.name}{suffix}", source=k.source.replace(f"def {k.name}(", f"def {k.name}{suffix}(", 1))
        for k in version.kernels.kernels
    )
    words = {f"{name}{suffix}": own for name, own in version.words.items()}
    return replace(version, kernels=replace(version.kernels, kernels=kernels), words=words)
