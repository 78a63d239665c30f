"""Loads with their masks, the values of lanes outside, and hints to the cache."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from ....ir.types import FLOAT8
from ...program.axes import REDUCTIONS, SCANS, Program, Term
from ...schedule.schedule import Schedule
from ..context import FINISH, Context
from ..mathematics import FLOATING, number
from ..statements import Expr, Scope, call, literal, total
from .addresses import Addresses, Indices
from .buffers import Buffers
from .coordinates import Coordinates
from .tile_axes import TileAxes

Keywords = dict[str, "Expr | str"]


def padding_of(program: Program, is_copied: bool) -> dict[Term, float]:
    """{load: what its lanes outside should hold} for loads that feed a maximum or minimum.

    Copies into shared memory put zeros there at no cost, and anything else at that of a choice for each element.
    """
    padding: dict[Term, float] = {}
    if is_copied:
        return padding
    for reduction in program.terms:
        if reduction.op in ("amax", "amin"):
            source = reduction.args[0]
            while source.op == "cast" and source.dtype in FLOATING:
                source = source.args[0]
            if source.op == "load" and source.dtype in FLOATING:
                padding.setdefault(source, float("-inf") if reduction.op == "amax" else float("inf"))
    return padding


def row_vectors(program: Program, plan: Schedule) -> frozenset[Term]:
    """Vectors along the last axis of a tile of several rows, the same for all, that meet nothing but whole tiles.

    Read as one row, such a vector gets another layout of lanes than the rows that it meets, and Triton computes what
    follows from both in both layouts; read in every row of the tile it gets theirs. One sum over rows alone is brought
    from one layout to the other for less.
    """
    whole, last = frozenset(plan.tile), next(reversed(plan.order), None)
    folds = [t for t in program.terms if t.op in (*REDUCTIONS, *SCANS)]
    is_one_sum = plan.programs is not None and len(folds) == 1 and last not in folds[0].param
    if any(axis.turn for axis in plan.order):  # what a loop carries has shapes of its own
        return frozenset()
    if last is None or plan.tile.get(last) in (None, math.prod(plan.tile.values())) or is_one_sum:
        return frozenset()
    ends = [*(t for sink in program.sinks for t in sink.terms), *(t for fold in folds for t in fold.args)]
    ends += [online.scale for online in plan.online.values()]
    alone = [t for t in ends if not whole <= t.axes]
    exposed: set[Term] = set()
    while alone:
        term = alone.pop()
        if term not in exposed:
            exposed.add(term)
            alone += [a for a in term.args if not whole <= a.axes]
    loads = (t for t in program.terms if t.op == "load" and not t.args and t not in exposed)
    return frozenset(t for t in loads if set(t.param.place.walked) == {last})


@dataclass(eq=False)
class Loads:
    """`passes`: how often a load is emitted in passes over chunks; `evict`: the hint that its pass gives the cache.

    vectors: those that are read in every row of the tile. silent: rows from a boundary on hold their padding outside.
    """

    context: Context
    buffers: Buffers
    tile: TileAxes
    coords: Coordinates
    addresses: Addresses
    padding: dict[Term, float]
    passes: dict[Term, int] = field(default_factory=dict)
    evict: Literal["", "evict_first", "evict_last"] = ""
    vectors: frozenset[Term] = frozenset()
    silent: bool = False

    def read(self, term: Term, indices: Indices, guards: list[Expr], scope: Scope) -> Expr:
        """The content of memory, in the dtype that it has there."""
        place, ref = term.param.place, term.param.ref
        groups = self.coords.groups_of(place, not term.args)
        pointer = self.addresses.pointer(ref, place, indices, scope, term.axes, groups)
        masks = self.coords.masks(term.axes) + guards
        # Whole groups of 16 bytes, neighbours of the row included: their lanes are masked where they count
        if groups is not None:
            self.buffers.aligned.add(self.buffers.labels[ref])
            masks = [groups.near]
        elif term in self.vectors and len(self.tile.dims) > 1:
            pointer = self.tile.broadcast(pointer, self.tile.dims)
        hinted = bool(self.tile.lanes(term.axes)) and not indices
        return self.load(term, pointer, masks, scope, hinted)

    def load(self, term: Term, pointer: Expr, masks: list[Expr], scope: Scope, hinted: bool) -> Expr:
        """The load itself."""
        keywords = self._mask_keywords(term, masks)
        if hinted and (policy := self._policy(term, scope)):
            keywords["eviction_policy"] = literal(f'"{policy}"')
        return call("tl.load", pointer, **keywords)

    def count_pass(self, term: Term, scope: Scope) -> None:
        """A load is emitted in this scope."""
        self.passes[term] = self.passes.get(term, 0) + (1 < scope.level < FINISH)

    def pad(self, term: Term) -> float:
        """The value of lanes outside."""
        return self.padding.get(term, 0.0)

    def fill_alike(self, *pair: Term) -> None:
        """Two loads become one: their lanes outside hold the same."""
        if len({self.padding.get(load) for load in pair}) > 1:
            for load in pair:
                self.padding.pop(load, None)

    def _mask_keywords(self, term: Term, masks: list[Expr]) -> Keywords:
        mask = total("&", masks)
        if mask is None:
            return {}
        fill = self.padding.get(term, 0.0 if term.dtype in FLOATING else 0)
        dtype = "i8" if term.dtype in ("b1", *FLOAT8) else term.dtype
        return {"mask": mask, "other": literal(number(fill, dtype))}

    def _policy(self, term: Term, scope: Scope) -> str:
        """Rows that come by once leave the cache first; a row that is read again stays until its last pass."""
        if 1 < scope.level < FINISH:
            return self.evict
        is_walked = set(self.context.plan.walk) & set(term.param.place.walked)
        return "evict_first" if is_walked and scope.level == 1 else ""
