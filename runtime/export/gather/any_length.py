"""Kernels of a group for a row of any length: one text for several blocks, the row in chunks beyond the longest block.

    N <= 1024           several rows a program, BLOCK_N = next_power_of_2(N)
    N <= 16384          one row a program
    N % 16 == 0, any    the row in chunks, twice: wide accesses, and any length

Each block's kernels are generated and proved like those of a call, for every length up to the block; those of one text
become one version. Lengths are as free as in a kernel that never held a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import sympy

from ....codegen import Kernel, Kernels, Target
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
"""Blocks are tried up to here; a row that is held whole that far has a limit."""


@dataclass(frozen=True)
class AnyLength:
    """The versions of a group, in the order in which they are tried, and the longest row that they serve, if any."""

    row: Row
    versions: list[Version]
    limit: int | None


@dataclass(frozen=True)
class OfBlock:
    """Kernels for rows up to a block (None: of any length), for multiples and for all others; of one at least."""

    block: int | None
    multiples: Kernels | None
    others: Kernels | None


def versions_of_any_length(
    group: Group, target: Target, sizes: Sizes, name: str, symbol: sympy.Symbol, assumed: Sequence[sympy.Basic]
) -> AnyLength | None:
    """None where the row of this symbol cannot be a parameter."""
    row = Row(symbol, sympy.Symbol(f"block_of_{symbol}", integer=True, positive=True), LEAST)
    found = list(_Blocks(group, target, sizes, name, row, assumed))
    if not found or found[0].others is None:
        return None
    limit = max(b.block for b in found if b.block is not None and b.others is not None)
    is_open = found[-1].block is None and found[-1].others is not None
    # Beyond the last length that every kernel serves nothing is left
    served = [b for b in found if b.others is not None or is_open]
    return AnyLength(row, _renamed(_runs(served, row)), None if is_open else limit)


# ------------------------------------------------------------------ a block after the other
@dataclass(frozen=True)
class _Blocks:
    """Generates the kernels of each block, from the shortest on, until rows are in chunks."""

    group: Group
    target: Target
    sizes: Sizes
    name: str
    row: Row
    assumed: Sequence[sympy.Basic]

    def __iter__(self) -> Iterator[OfBlock]:
        block, multiples, others = LEAST, None, None
        while block <= LONGEST:
            multiples = None if _is_open(multiples) else self._kernels(block, multiple=True)
            others = None if _is_open(others) else self._kernels(block, multiple=False)
            held = [k for k in (multiples, others) if k is not None and not _is_open(k)]
            if not held:
                break
            yield OfBlock(block, *(k if k in held else None for k in (multiples, others)))
            block *= 2
        yield from self._open(block)

    def _open(self, block: int) -> Iterator[OfBlock]:
        """Rows in chunks, as many as there are."""
        multiples, others = (self._kernels(min(block, LONGEST), multiple=m) for m in (True, False))
        found = [k if _is_open(k) else None for k in (multiples, others)]
        if any(found):
            yield OfBlock(None, *found)

    def _kernels(self, block: int, multiple: bool) -> Kernels | None:
        """Kernels that are proved for each length up to the block, or up to any; None where there are none."""
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
                others = {s: n // ALIGNED * ALIGNED + step for s, n in self._scaled(scale).items() if s != length}
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
        """True where they serve each length up to the block, if they are bounded, under no other condition."""
        at_block = {self.row.length: sympy.Integer(block)}
        bounds = [g.xreplace(at_block) for g in _bounds(kernels)]
        conditions = {s for g in multiples_of(kernels) for s in g.free_symbols}
        alone = conditions <= ({self.row.length} if multiple else set())
        return alone and all(b is sympy.true for b in bounds) and not any(k.pinned for k in kernels.kernels)

    def _is_proved(self, kernels: Kernels) -> bool:
        graph = self.group.graph
        return proofs.are_proved(graph, kernels) or proofs.are_proved(graph, kernels, self.assumed)


def _bounds(kernels: Kernels) -> list[sympy.Basic]:
    """Guards by which a row has an end."""
    return [g for k in kernels.kernels for g in k.guards if isinstance(g, sympy.Le)]


def _is_open(kernels: Kernels | None) -> bool:
    return kernels is not None and not _bounds(kernels)


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
    last = run[-1].block
    if last is None and len(run) > 1:
        raise Different
    bound = () if last is None else (sympy.Le(row.length, last, evaluate=False),)
    blocks = [b.block or LEAST for b in run]
    kinds = [(b.multiples is not None, b.others is not None) for b in run]
    if len(set(kinds)) > 1:
        raise Different
    if all(kinds[0]) and (both := [_both(b, row) for b in run]).count(None) == 0:
        return [as_one([k for k in both if k is not None], blocks, row, bound)]
    wide = [b.multiples for b in run if b.multiples is not None]
    others = [b.others for b in run if b.others is not None]
    multiple = sympy.Eq(sympy.Mod(row.length, ALIGNED), 0)
    versions = [as_one(wide, blocks, row, (*bound, multiple))] if wide else []
    return [*versions, as_one(others, blocks, row, bound)] if others else versions


def _both(block: OfBlock, row: Row) -> Kernels | None:
    """One for multiples and others, where a constant says what the length is a multiple of; None where they differ."""
    assert block.multiples is not None and block.others is not None
    pairs = list(zip(block.multiples.kernels, block.others.kernels, strict=False))
    same_count = len(block.multiples.kernels) == len(block.others.kernels)
    if not same_count or any(a.source != b.source or _launch(a) != _launch(b) for a, b in pairs):
        return None
    kernels = tuple(replace(b, constants=_constants(a, b, row)) for a, b in pairs)
    return Kernels(kernels, block.others.temporaries)


def _launch(kernel: Kernel) -> tuple[object, ...]:
    """What a launch of the kernel is made of, beside what the row is a multiple of."""
    constants = {k: v for k, v in kernel.constants.items() if not _is_multiple(k)}
    return (kernel.arguments, constants, kernel.grid, kernel.num_warps, kernel.num_stages, kernel.scratch)


def _constants(multiples: Kernel, others: Kernel, row: Row) -> Mapping[str, object]:
    condition = sympy.Eq(sympy.Mod(row.length, ALIGNED), 0)
    return {
        name: value if value == multiples.constants[name] else
        sympy.Piecewise((multiples.constants[name], condition), (value, True))
        for name, value in others.constants.items()
    }  # fmt: skip


def _is_multiple(constant: str) -> bool:
    return constant.startswith("MULTIPLE_")


# ------------------------------------------------------------------ names
def _renamed(versions: Sequence[Version]) -> list[Version]:
    """A name for each text: those that hold rows by their number, those in chunks by what they are."""
    number = count(2)
    names: dict[str, str] = {}
    renamed = []
    for version in versions:
        source = "\n".join(k.source for k in version.kernels.kernels)
        if source not in names:
            is_long = not any(isinstance(c, sympy.Le) for c in version.conditions)
            is_wide = any(c.has(sympy.Mod) for c in version.conditions)
            new = ("_long" if is_wide else "_long_any_size") if is_long else f"_{next(number)}" if names else ""
            names[source] = new
        renamed.append(_with_suffix(version, names[source]))
    return renamed


def _with_suffix(version: Version, suffix: str) -> Version:
    kernels = tuple(
        replace(k, name=f"{k.name}{suffix}", source=k.source.replace(f"def {k.name}(", f"def {k.name}{suffix}(", 1))
        for k in version.kernels.kernels
    )
    words = {f"{name}{suffix}": own for name, own in version.words.items()}
    return replace(version, kernels=replace(version.kernels, kernels=kernels), words=words)
