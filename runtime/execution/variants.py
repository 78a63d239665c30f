"""The kernels of a fused group: generated for the sizes that come, each with its counterpart, and proved."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import sympy
import torch

from ...codegen import Kernel, Kernels, Target
from ...ir import Graph
from ...ir.errors import Unfusible
from ...ir.passes.fuse import Group
from ..kernels import launch, proofs
from ..kernels.arrival_counters import ArrivalCounters
from ..settings import logs
from ..values.sizes import Sizes, number
from .bound_group import BoundGroup, bind_group
from .graph_to_kernels import kernels_of, text_of

ALIGNED = 16
"""Kernels for sizes that are multiples of this make wide accesses."""


@dataclass
class Variant:
    """Kernels of one group that hold for the pinned symbols and under the guards."""

    kernels: Kernels
    pinned: dict[sympy.Symbol, int]
    guards: tuple[sympy.Basic, ...]
    text: str
    launchers: list[Callable[..., None]] = field(default_factory=list)
    proved: bool | None = None  # whether all accesses are, for all sizes under `assumed`; None: not tried yet
    assumed: tuple[sympy.Basic, ...] = ()

    @property
    def aligned(self) -> bool:
        """True where it is for sizes that are multiples only."""
        return are_for_multiples(self.kernels)

    def admits(self, sizes: Sizes) -> bool:
        """True where it may run at these sizes, and has about as many programs as they want."""
        is_pinned = all(sizes[s] == v for s, v in self.pinned.items())
        is_right = is_pinned and all(bool(g.xreplace(sizes)) for g in self.guards)
        return is_right and all(k.suits(number(k.wanted, sizes)) for k in self.divided)

    @cached_property
    def divided(self) -> tuple[Kernel, ...]:
        """The kernels that divide a loop into as many parts as sizes want, one included."""
        return tuple(k for k in self.kernels.kernels if not isinstance(k.wanted, int))


def are_for_multiples(kernels: Kernels) -> bool:
    """True where the accesses of some kernel are for sizes that are multiples of ALIGNED only."""
    return any(k.for_multiples for k in kernels.kernels)


def counterpart_sizes(
    sizes: Sizes, pinned: Collection[sympy.Symbol], aligned: bool, graph: Graph, guards: Iterable[sympy.Basic] = ()
) -> dict[sympy.Symbol, int] | None:
    """Sizes to generate the counterpart of some kernels for: odd ones beside multiples, multiples beside the others.

    An axis that a reshape in the graph takes apart stays a multiple of its parts, as the guards of the kernels say; of
    the blocks of a loop it need not be one. None where every size is compiled in, so that there is no counterpart.
    """
    shared = _related(guards)
    free = {s: n for s, n in sizes.items() if s not in pinned and s not in shared and n > 0}
    units = _parts_of_axes(guards, graph)
    hints = {s: _beside(n, units.get(s, 1), aligned) for s, n in free.items()}
    return {**sizes, **hints} if free else None


def _beside(size: int, unit: int, aligned: bool) -> int:
    step = math.lcm(ALIGNED, unit)
    return -(-size // step) * step + (unit if aligned else 0)


def _parts_of_axes(guards: Iterable[sympy.Basic], graph: Graph) -> dict[sympy.Symbol, int]:
    """{C: 32} of Mod(C, 32) == 0 and a size C / 32; what asks for a multiple of ALIGNED is there for wide accesses."""
    numbers = [m for m in _remainders(guards) if m.args[0].is_Symbol and m.args[1].is_Integer]
    parts = {sympy.denom(n) for v in graph.order() for aval in v.avals for n in aval.shape}
    return {m.args[0]: int(m.args[1]) for m in numbers if ALIGNED % int(m.args[1]) and m.args[1] in parts}


def _related(guards: Iterable[sympy.Basic]) -> set[sympy.Symbol]:
    """Sizes of which one is a multiple of the other, whatever that is: K = 2 H, Mod(K, H) == 0."""
    equal = [g for g in guards if isinstance(g, sympy.Eq) and len(g.free_symbols) > 1]
    multiples = [m for m in _remainders(equal) if m.args[1].is_Integer]
    return set().union(*(g.free_symbols for g in equal if g.lhs not in multiples))


def _remainders(guards: Iterable[sympy.Basic]) -> list[sympy.Mod]:
    """Mod(C, 32) of Mod(C, 32) == 0."""
    return [g.lhs for g in guards if isinstance(g, sympy.Eq) and isinstance(g.lhs, sympy.Mod)]


class Variants:
    """The variants of one group's kernels, in the order in which they are tried."""

    def __init__(
        self, group: Group, name: str, backend: str, target: Target, device: torch.device,
        assumed: Sequence[sympy.Basic] = (),
    ) -> None:  # fmt: skip
        self.group, self.name, self.backend, self.target, self.device = group, name, backend, target, device
        self.assumed = tuple(assumed)  # of sizes, by the capture; what a proof takes from it is asked at every size
        self.ordered: list[Variant] = []
        self.counters = ArrivalCounters.on(device)

    def __iter__(self) -> Iterator[Variant]:
        return iter(self.ordered)

    def admitting(self, sizes: Sizes) -> Variant:
        """The first variant that these sizes admit; generated where there is none."""
        return self._first_admitting(sizes) or self._generate(sizes)

    def _first_admitting(self, sizes: Sizes) -> Variant | None:
        return next((v for v in self.ordered if v.admits(sizes)), None)

    def _generate(self, sizes: Sizes) -> Variant:
        log_generated_again(self, sizes)
        self.add(self.generate_kernels(sizes), sizes)
        admitting = self._first_admitting(sizes)
        assert admitting is not None, "kernels generated for these sizes do not admit them"
        return admitting

    def generate_kernels(self, sizes: Sizes, target: Target | None = None) -> Kernels:
        """Kernels of the group for these sizes, on its own target or as for another one."""
        return kernels_of(self.group, target or self.target, dict(sizes), self.name)

    def add(self, kernels: Kernels, sizes: Sizes) -> None:
        """Add kernels generated for these sizes, and their counterpart: wide accesses where sizes allow, any size else.

        All at once, so that neither the order in which sizes come nor a new batch size decides what is compiled. Behind
        kernels that hold only as much as there is are those for more.
        """
        variant = self.with_launchers(kernels)
        self.ordered.append(variant)
        log_admission(self, variant)
        if kernels.divided is not None:
            self.add(kernels.divided, sizes)
            return
        hints = counterpart_sizes(sizes, variant.pinned, variant.aligned, self.group.graph, variant.guards)
        if hints is None:
            return
        try:
            counterpart = self.with_launchers(self.generate_kernels(hints))
        except Unfusible:  # at these sizes a product is not streamed any more
            return
        if counterpart.aligned != variant.aligned and counterpart.pinned == variant.pinned:
            self.ordered.insert(len(self.ordered) - (not variant.aligned), counterpart)
            log_admission(self, counterpart)

    def with_launchers(self, kernels: Kernels) -> Variant:
        """A variant of these kernels, which is not tried yet."""
        text = text_of(kernels)
        pinned = kernels.nothing | {s: v for k in kernels.kernels for s, v in k.pinned.items()}
        guards = tuple(dict.fromkeys(g for k in kernels.kernels for g in k.guards))
        launchers = [launch.launcher(k, text, self.backend, self.device) for k in kernels.kernels]
        return Variant(kernels, pinned, guards, text, launchers)

    def unproved_at(self, variant: Variant, sizes: Sizes) -> str:
        """Say what is proved of these kernels neither for all sizes, which is tried once, nor at those of this call."""
        graph, kernels = self.group.graph, variant.kernels
        if variant.proved is None:
            variant.proved = proofs.are_proved(graph, kernels)
            assumed = tuple(a for a in self.assumed if a.free_symbols <= sizes.keys())  # a step has not all sizes
            if not variant.proved and assumed:
                variant.proved, variant.assumed = proofs.are_proved(graph, kernels, assumed), assumed
        if variant.proved and all(bool(a.xreplace(sizes)) for a in variant.assumed):
            return ""
        return proofs.unproved_at(graph, kernels, sizes)

    def bind(self, variant: Variant, sizes: Sizes) -> BoundGroup:
        """The launches of a variant at these sizes."""
        return bind_group(self.group.graph, variant.kernels, variant.launchers, sizes, self.device, self.counters)


# ------------------------------------------------------------------ logs
def log_admission(variants: Variants, variant: Variant) -> None:
    """Kernels of a group are ready, for these sizes."""
    if logs.guards.isEnabledFor(logging.INFO):
        pinned = [f"{symbol} = {value}" for symbol, value in variant.pinned.items()]
        conditions = ", ".join([*pinned, *map(str, variant.guards)]) or "every size"
        logs.guards.info("%s holds for %s", variants.name, _with_names(variants.group, conditions))


def log_generated_again(variants: Variants, sizes: Sizes) -> None:
    """No kernels of a group admit these sizes."""
    if not variants.ordered or not logs.recompiles.isEnabledFor(logging.INFO):
        return
    last = variants.ordered[-1]
    pinned = [f"{s}: {n} -> {sizes[s]}" for s, n in last.pinned.items() if sizes[s] != n]
    failed = [f"not {g}" for g in last.guards if not bool(g.xreplace(sizes))]
    failed += [f"parts wanted: {number(k.wanted, sizes)}, {k.name} has {k.splits}" for k in last.divided]
    reasons = _with_names(variants.group, "; ".join([*pinned, *failed]))
    logs.recompiles.info("%s is generated again: %s", variants.name, reasons)


def _with_names(group: Group, text: str) -> str:
    """s37 = 16  ->  x.shape[1] = 16"""
    shapes = [(v.params["name"], axis, n) for v in group.graph.inputs for axis, n in enumerate(v.shape)]
    names = {str(n): f"{name}.shape[{axis}]" for name, axis, n in reversed(shapes)}
    return re.sub(r"\bs\d+\b", lambda found: names.get(found[0], found[0]), text)
