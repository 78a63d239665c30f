"""A size C / 32 is whole, so C = 32 c for a size c of its own: with c in place of C, all arithmetic is on integers.

So is H / K, the heads of queries that share one of keys: H = K h. And where K - F is a size, K = F + k.

Of C * H * W / 32 that is known of the product alone. Where a reshape divides the axis C by 32 and C is a multiple now,
the kernels are for multiples, by a guard: its axes come apart as whole ones, and no element's index is divided.
The kernels are given back in the symbols of the graph: an argument c becomes C / 32.

Where what a product sums is divided into K / G groups of a number that is whole now, it stays that number, by a guard.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import networkx as nx
import sympy

from ...ir import Graph, Value
from ...ir.types import Size, simplify_size
from ..kernel import Buffer, Kernel, Kernels, Pointer, Scalar
from ..program.sizes import Hints


@dataclass(frozen=True)
class Quotients:
    """`whole`: {C: 32 c}. `parts`: {c: C / 32}. `guards`: what of it no size of the graph says.

    Both sides of {K: 128 G} in `whole` are sizes of the graph.
    """

    whole: Mapping[sympy.Symbol, sympy.Expr]
    parts: Mapping[sympy.Symbol, sympy.Expr]
    guards: tuple[sympy.Basic, ...] = ()

    @staticmethod
    def of(graph: Graph, hints: Hints) -> Quotients:
        """The symbols of which a part is a size in the graph, or an axis after a reshape, as they are now."""
        shapes = [t.shape for v in (*graph.inputs, *graph.order()) for t in v.avals]
        parts = _least_multiples(p for shape in shapes for n in shape if (p := _part(n)) is not None)
        divided = _least_multiples(p for v in graph.order() if v.prim == "reshape" for p in _divided_axes(v))
        new = {s: d for s, d in divided.items() if parts.get(s, 1) % d}
        are_whole = {s: hints[s] % d == 0 for s, d in new.items()}
        whole = _least_multiples([*parts.items(), *((s, d) for s, d in new.items() if are_whole[s])])
        guards = [(sympy.Eq if are_whole[s] else sympy.Ne)(sympy.Mod(s, d), 0) for s, d in new.items()]
        groups = {k: n for k, n in _groups_of_sums(graph, hints) if not {k, *n.free_symbols} & whole.keys()}
        guards += [sympy.Eq(k, n) for k, n in groups.items()]
        taken = {*whole, *groups}.union(*(n.free_symbols for n in groups.values()))
        shares = _shares((n for shape in shapes for n in shape), taken)
        shares = {h: k for h, k in shares.items() if hints[k] and hints[h] % hints[k] == 0}
        guards += [sympy.Eq(sympy.Mod(h, k), 0) for h, k in shares.items()]
        divisors = {**whole, **shares}
        parted = {s: d * sympy.Symbol(f"{s}_{d}", **s.assumptions0) for s, d in divisors.items()}
        of_parts = {sympy.cancel(parted[s] / d): s / d for s, d in divisors.items()}
        differences = _differences((n for shape in shapes for n in shape), {*taken, *shares})
        of_parts |= {_rest(s, b): s - b for s, b in differences}
        summed = {s: b + _rest(s, b) for s, b in differences}
        return Quotients({**parted, **groups, **summed}, of_parts, tuple(guards))

    def hints(self, hints: Hints) -> dict[sympy.Symbol, int]:
        """The current values, those of the parts too; rounded up where they were made up."""
        more = {part: int(sympy.ceiling(quotient.xreplace(dict(hints)))) for part, quotient in self.parts.items()}
        return {**hints, **more}

    def restored(self, kernels: Kernels) -> Kernels:
        """The kernels in the symbols of the graph."""
        back = _Back(self.parts)
        each = map(back.kernel, kernels.kernels) if self.whole else kernels.kernels
        guarded = tuple(replace(k, guards=(*k.guards, *self.guards)) for k in each)
        temporaries = tuple(map(back.buffer, kernels.temporaries)) if self.whole else kernels.temporaries
        return Kernels(guarded, temporaries, kernels.nothing)


def _least_multiples(parts: Iterable[tuple[sympy.Symbol, int]]) -> dict[sympy.Symbol, int]:
    least: dict[sympy.Symbol, int] = {}
    for symbol, divisor in parts:
        least[symbol] = math.lcm(divisor, least.get(symbol, 1))
    return least


def _shares(sizes: Iterable[Size], taken: Collection[sympy.Symbol]) -> dict[sympy.Symbol, sympy.Symbol]:
    """{H: K} of sizes H / K, where H has no other divisor, and K is none that is divided itself."""
    found: dict[sympy.Symbol, set[sympy.Symbol]] = {}
    for n in sizes:
        top, bottom = sympy.fraction(sympy.sympify(n).as_coeff_Mul()[1])
        if top.is_Symbol and bottom.is_Symbol:
            found.setdefault(top, set()).add(bottom)
    single = {h: ks.copy().pop() for h, ks in found.items() if len(ks) == 1 and h not in taken}
    return {h: k for h, k in single.items() if k not in single and k not in taken}


def _rest(whole: sympy.Symbol, part: sympy.Symbol) -> sympy.Symbol:
    return sympy.Symbol(f"{whole}_less_{part}", integer=True, nonnegative=True)


def _differences(sizes: Iterable[Size], taken: Collection[sympy.Symbol]) -> list[tuple[sympy.Symbol, sympy.Symbol]]:
    """(K, F) of sizes n (K - F), where neither is known by another size, nor K the part of a second difference."""
    found: dict[sympy.Symbol, sympy.Symbol] = {}
    for n in sizes:
        terms = sympy.sympify(n).primitive()[1].as_coefficients_dict() if not isinstance(n, int) else {}
        signs = {c: s for s, c in terms.items()}
        if set(signs) == {1, -1} and len(terms) == 2 and all(s.is_Symbol for s in terms) and not {*terms} & {*taken}:
            found.setdefault(signs[1], signs[-1])
    return [(k, f) for k, f in found.items() if f not in found]


def _divided_axes(reshape: Value) -> Iterator[tuple[sympy.Symbol, int]]:
    """[N, C, H, W] -> [N, 32, C * H * W / 32]: (C, 32). Both shapes are walked until their products agree again."""
    (x,) = reshape.args
    before, after = (iter(map(sympy.sympify, shape)) for shape in (x.shape, reshape.shape))
    a, b = next(before, None), next(after, None)
    while a is not None and b is not None:
        yield from (part for n in (a, b) if (part := _part(n)) is not None)
        ratio = _ratio(a, b)
        if ratio == 1:
            a, b = next(before, None), next(after, None)
        elif _is_size(ratio):
            a, b = ratio, next(after, None)
        elif _is_size(1 / ratio):
            a, b = next(before, None), 1 / ratio
        else:
            return


def _groups_of_sums(graph: Graph, hints: Hints) -> Iterator[tuple[sympy.Symbol, sympy.Expr]]:
    """[.., K] -> [.., K / G, G] in front of a product that sums along K: (K, n G), as it is now."""
    for dot in (v for v in graph.order() if v.prim == "dot"):
        for operand, axes in zip(dot.args, (dot.params["x_axes"], dot.params["y_axes"]), strict=True):
            summed = [n for n, label in zip(operand.shape, axes, strict=True) if label not in dot.params["out_axes"]]
            before = nx.ancestors(graph.nx, operand.id)
            types = (t for i in sorted(before) for t in Value(graph, i).avals)
            sizes = dict.fromkeys(n for t in types for n in t.shape if not isinstance(n, int))
            divided = (n for n in sizes if any(_is_size(_ratio(sympy.sympify(k), n)) for k in summed))
            yield from (group for n in divided if (group := _group(n, hints)) is not None)


def _group(size: sympy.Expr, hints: Hints) -> tuple[sympy.Symbol, sympy.Expr] | None:
    """8 K / G, which is 128 now  ->  (K, 16 G)"""
    coefficient, ratio = size.as_coeff_Mul()
    over, under = ratio.as_numer_denom()
    if not (over.is_Symbol and under.is_Symbol):
        return None
    times = sympy.Rational(hints[over], max(1, hints[under]))
    return (over, times * under) if times.is_Integer and (coefficient * times).is_Integer else None


@lru_cache(maxsize=65536)
def _ratio(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    return sympy.cancel(a / b)


def _is_size(ratio: sympy.Expr) -> bool:
    """True of 4, H * W and C / 32, which may be whole; not of 1 / 4 and C / H."""
    return bool(ratio.is_Integer or (not ratio.is_number and sympy.fraction(ratio)[1].is_Integer))


def _part(size: Size) -> tuple[sympy.Symbol, int] | None:
    """s0 / 32 -> (s0, 32)"""
    coefficient, symbol = sympy.sympify(size).as_coeff_Mul()
    divisor = int(coefficient.q) if coefficient.is_Rational else 1
    return (symbol, divisor) if symbol.is_Symbol and divisor > 1 else None


@dataclass(frozen=True)
class _Back:
    """Replaces parts by what they are parts of; what sizes have in common once for all of them."""

    into: Mapping[sympy.Symbol, sympy.Expr]
    known: dict[sympy.Basic, sympy.Basic] = field(default_factory=dict)

    def size(self, size: Any) -> Any:
        return simplify_size(self._replaced(size)) if isinstance(size, sympy.Basic) else size

    def _replaced(self, size: sympy.Basic) -> sympy.Basic:
        if size not in self.known:
            self.known[size] = self._with_parts(size) if size.free_symbols & self.into.keys() else size
        return self.known[size]

    def _with_parts(self, size: sympy.Basic) -> sympy.Basic:
        return self.into[size] if size in self.into else size.func(*map(self._replaced, size.args))

    def buffer(self, buffer: Buffer) -> Buffer:
        return replace(buffer, shape=tuple(map(self.size, buffer.shape)), strides=tuple(map(self.size, buffer.strides)))

    def argument(self, argument: Pointer | Scalar) -> Pointer | Scalar:
        return replace(argument, value=self.size(argument.value)) if isinstance(argument, Scalar) else argument

    def kernel(self, kernel: Kernel) -> Kernel:
        return replace(
            kernel,
            arguments=tuple(map(self.argument, kernel.arguments)),
            grid=self.size(kernel.grid),
            scratch=tuple(map(self.buffer, kernel.scratch)),
            pinned=dict(self._pin(s, n) for s, n in kernel.pinned.items() if not self._is_share(s)),
            guards=(*(g.xreplace(dict(self.into)) for g in kernel.guards), *self._shares(kernel.pinned)),
            reads=self._sizes(kernel.reads),
            writes=self._sizes(kernel.writes),
            cached=self._sizes(kernel.cached),
            operations=self.size(kernel.operations),
            wanted=self.size(kernel.wanted),
            sharing=self.size(kernel.sharing),
            walk=kernel.walk and kernel.walk.at(self.size),
            course=kernel.course and kernel.course.at(self.size),
        )

    def _is_share(self, symbol: sympy.Symbol) -> bool:
        """A part of one symbol by another."""
        return symbol in self.into and len(self.into[symbol].free_symbols) > 1

    def _shares(self, pinned: Mapping[sympy.Symbol, int]) -> Iterator[sympy.Basic]:
        """What pins them says of both."""
        for symbol, value in pinned.items():
            if self._is_share(symbol):
                top, bottom = sympy.fraction(self.into[symbol])
                yield sympy.Eq(top, value * bottom)

    def _pin(self, symbol: sympy.Symbol, value: int) -> tuple[sympy.Symbol, int]:
        if symbol not in self.into:
            return symbol, value
        share, multiple = self.into[symbol].as_coeff_Mul()
        return multiple, int(value / share)

    def _sizes(self, sizes: Mapping[str, Size]) -> dict[str, Size]:
        return {label: self.size(n) for label, n in sizes.items()}
