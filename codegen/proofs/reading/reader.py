"""A walk through one function, by rules for each kind of node.

Nothing here knows how the text was made. A value is as wide as Triton computes it: 32 bits where all its operands are,
and a size argument is as long as it fits. What is read from memory is an atom of its own, about which nothing is known.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ....ir.text.syntax_trees import parse
from ..arithmetic import Arithmetic
from ..atoms import LANES, Facts
from ..bounds import draw_up_to
from ..polynomials import ONE, Poly, value_at
from .values import (
    Assertion,
    Condition,
    Int,
    Need,
    Opaque,
    Read,
    Ticket,
    Truth,
    UnreadableText,
    Value,
    atoms_of,
    integer_result,
    margins,
    names_in,
)

STEPS = 60
"""How many goals it may lead to, whether 32 bits hold what memory decides: mostly no, and it is not needed."""


@dataclass(frozen=True)
class Rules:
    """Rules by the kind of node: a statement changes the reader, an expression has a value."""

    statements: Mapping[type[ast.stmt], Callable[[Reader, Any], object]]
    expressions: Mapping[type[ast.expr], Callable[[Reader, Any], Value]]


@lru_cache(maxsize=512)
def parse_function(source: str) -> ast.FunctionDef:
    """The function of which the text is that, with its decorator."""
    (function,) = parse(source.removeprefix("@triton.jit\n")).body
    assert isinstance(function, ast.FunctionDef)
    return function


class Reader:
    """The state of a walk through one function; `arguments` are its values by name."""

    def __init__(
        self, rules: Rules, arithmetic: Arithmetic, arguments: Mapping[str, Value], dtypes: Mapping[str, str],
        programs: Poly, is_multiple: Callable[[Poly, int], bool],
    ) -> None:  # fmt: skip
        self.rules, self.arithmetic, self.world = rules, arithmetic, arithmetic.world
        self.dtypes, self.programs, self.is_multiple = dtypes, programs, is_multiple
        self.variables = dict(arguments)
        self.made_of: dict[str, set[str]] = {}  # a name: those that it was made of, ever
        self.places: dict[str, set[int]] = {}  # a name: atoms that are in it, ever
        self.facts: Facts = ()
        self.tickets: tuple[Ticket, ...] = ()
        self.assertions: tuple[Assertion, ...] = ()  # that have passed before the text at hand
        self.blocks: dict[int, tuple[Poly, Poly]] = {}  # lanes: the first, and behind the last
        self._lanes: dict[tuple[Poly, Poly], Poly] = {}  # vectors of lanes, by the first and behind the last
        self._along: dict[tuple[int, str], Poly] = {}  # lanes, and what was loaded at them, along other dimensions
        self.result: Value = Opaque()
        self.read = Read()

    # ------------------------------------------------------------------ nodes
    def block(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            if (rule := self.rules.statements.get(type(statement))) is None:
                raise UnreadableText(type(statement).__name__, statement.lineno)
            rule(self, statement)

    def value(self, node: ast.expr) -> Value:
        if (rule := self.rules.expressions.get(type(node))) is None:
            raise UnreadableText(ast.unparse(node), node.lineno)
        return rule(self, node)

    def integer(self, node: ast.expr) -> Int:
        value = self.value(node)
        if not isinstance(value, Int):
            raise UnreadableText(f"{ast.unparse(node)} is no integer", node.lineno)
        return value

    # ------------------------------------------------------------------ variables and facts
    def bind(self, name: str, node: ast.expr) -> None:
        self.variables[name] = value = self.value(node)
        self.made_of.setdefault(name, set()).update(names_in(node))
        self.places.setdefault(name, set()).update(atoms_of(value))

    def forget(self, names: Iterable[str], before: Mapping[str, Value]) -> None:
        """These are unknown around the block that assigns them, but for their kind."""
        for name in names:
            if name in before:
                self.variables[name] = self.unknown_like(before[name], name)
            else:
                self.variables.pop(name, None)

    @contextmanager
    def assuming(self, facts: Facts, ticket: Ticket | None = None) -> Iterator[None]:
        """Within the block of text that runs only where these hold."""
        outer = self.facts, self.tickets, self.assertions
        self.facts += facts
        self.tickets += (ticket,) if ticket else ()
        try:
            yield
        finally:
            self.facts, self.tickets, self.assertions = outer

    def conditions(self, mask: ast.expr | None) -> tuple[Condition, ...]:
        """The conditions that a mask is the conjunction of."""
        if mask is None:
            return ()
        if isinstance(mask, ast.BinOp) and isinstance(mask.op, ast.BitAnd):
            return (*self.conditions(mask.left), *self.conditions(mask.right))
        names = sorted(names_in(mask) & self.variables.keys())
        return (Condition(ast.unparse(mask), tuple(self.variables[n] for n in names)),)

    def asserted(self, mask: ast.expr | None) -> Facts:
        """What has been asserted for every lane of a mask."""
        inside = self.conditions(mask)
        return tuple(f for a in self.assertions if a.holds_under(inside) for f in a.facts)

    # ------------------------------------------------------------------ unknown values
    def datum(self, name: str) -> Poly:
        """A new atom of which nothing is known."""
        poly = self.world.atom(name, lambda s, r: r.randint(0, 1))
        self.world.atoms.data[poly.top] = name
        return poly

    def is_data(self, poly: Poly) -> bool:
        """Memory decides its value, so that wrapping around is what was asked for."""
        return not self.world.atoms.data.keys().isdisjoint(self.world.atoms.origins(poly))

    def unknown_like(self, value: Value, name: str) -> Value:
        """A value of which only the kind is known."""
        if isinstance(value, Int):
            return Int(self.datum(name), value.width or 32)
        return Truth() if isinstance(value, Truth) else Opaque()

    def unknown_result(self, like: Value, node: ast.expr, *operands: Value) -> Value:
        """The result of an operation of which only the kind is known."""
        return Opaque() if any(isinstance(o, Opaque) for o in operands) else self.unknown_like(like, ast.unparse(node))

    # ------------------------------------------------------------------ lanes
    def lanes(self, low: Poly, high: Poly) -> Poly:
        """Lanes low .. high - 1 of a vector: all vectors of these are the same, wherever they meet in one tile."""
        if (low, high) not in self._lanes:
            self._lanes[low, high] = self._block(low, high)
        return self._lanes[low, high]

    def _block(self, low: Poly, high: Poly) -> Poly:
        """A block of its own, so that what is known of one dimension is not believed of another."""
        last, name = high - 1, f"lane{len(self.blocks)}"
        lane = self.world.atom(name, lambda s, r: draw_up_to(int(value_at(last, s)), r), None, last, LANES)
        self.world.bound_below(lane.top, ONE, low)
        self.blocks[lane.top] = low, high
        return lane

    def along(self, dims: str, poly: Poly) -> Poly | None:
        """Of lanes and data along other dimensions; None where what is made of them has no name there."""
        varying = self.blocks.keys() | self.world.atoms.data.keys()
        result = poly
        for atom in poly.atoms:
            if atom in varying:
                result = result.with_atom(atom, self._twin(dims, atom))
            elif not varying.isdisjoint(self.world.atoms.origins(Poly.atom(atom))):
                return None
        return result

    def _twin(self, dims: str, atom: int) -> Poly:
        if (atom, dims) not in self._along:
            block = self.blocks.get(atom)
            self._along[atom, dims] = self._block(*block) if block else self.datum(self.world.atoms.data[atom])
        return self._along[atom, dims]

    # ------------------------------------------------------------------ 32 bits
    def need(self, value: Poly, narrow: frozenset[str], node: ast.expr) -> Need:
        return Need(value, narrow, self.facts, node.lineno, ast.unparse(node))

    def require(self, needs: Iterable[Need]) -> None:
        self.read.needs.update(dict.fromkeys(needs))

    def _is_narrow(self, value: Poly) -> bool:
        """What memory decides within bounds, so that 32 bits hold it whatever is there."""
        with self.world.budget.at_most(STEPS):
            return all(self.world.holds(margin, self.facts) for margin in margins(value))

    def checked_result(self, result: Poly, a: Int, b: Int, node: ast.expr) -> Int:
        """The result of an operation that may not fit into 32 bits."""
        both = integer_result(a, b, result)
        if both.width in (0, 64):
            return both
        if self.is_data(result):
            may_wrap = both.width == 32 and not self._is_narrow(result)
            return Int(self.datum("sum"), 32, both.narrow, both.needs) if may_wrap else both
        return Int(result, both.width, both.narrow, (*both.needs, self.need(result, both.narrow, node)))
