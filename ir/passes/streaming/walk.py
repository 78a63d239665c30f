"""A region with one dim walked: which of its nodes run once before the slabs, in each of them, or once after all.

    n = mask.sum()        before: no product needs it, and it is made of all rows
    z = x @ w.T           within: z has the rows of a slab
    total = nll.sum()     within: what slabs give is added up
    loss = total / n      after

What a node is on a part of the rows, the rules of `sharding` say: slabs are ranks that come one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import sympy

from ...graph import Graph, Value
from ...prims import PRIMS
from ...rewrite import make, nodes_between, rebuild
from ...sharding.rules import PARTIAL, POSITION, WHOLE, State, axis_of, state_of
from ...sharding.scaling import NotDivisible, mentions, refusal
from ..cost import estimate
from ..fuse import Group
from .regions import Region

BEFORE, WITHIN, AFTER = "before", "within", "after"
APART = ("elementwise", "layout", "source", "reduce", "gather", "scatter")
"""Families of what may be computed before or after the slabs."""
SHARE_BEFORE = 8
"""What is made for all rows before the slabs is at most one part in so many of what they keep out of memory."""


class Walk:
    """The nodes of a region by when they run. Raises NotDivisible, naming a node that needs all rows at once."""

    def __init__(self, region: Region, symbol: sympy.Symbol) -> None:
        self.region, self.symbol = region, symbol
        self.nodes = region.nodes()
        self.states = {v.id: _state_by_shape(v, symbol) for v in region.inputs()}
        self.when: dict[int, str] = {}
        self.of_virtual: set[int] = set()
        self.of_totals: set[int] = set()  # what is made of a sum over all rows, and of no virtual value
        for node in self.nodes:
            self._place(node)
        self._require_fusible()

    # ------------------------------------------------------------------ one node
    def _place(self, node: Value) -> None:
        if node.id in self.region.virtual or any(a.id in self.of_virtual for a in node.args):
            self.of_virtual.add(node.id)
            self._place_inside(node)
        else:
            self._place_outside(node)

    def _place_inside(self, node: Value) -> None:
        virtual = self.region.virtual
        if any(map(self._is_ended, node.args)):
            if node.id in virtual or any(a.id in virtual for a in node.args):
                raise refusal(node, "needs the sums over all of it")
            self._put(node, AFTER, _state_by_shape(node, self.symbol))
            return
        self._put(node, WITHIN, state_of(node, [self.states[a.id] for a in node.args], self.symbol))
        if node.id in virtual and not isinstance(self.states[node.id], int):
            raise refusal(node, "does not have it")

    def _is_ended(self, value: Value) -> bool:
        """It is there when all slabs are done."""
        return self.when.get(value.id) == AFTER or (value.id in self.of_virtual and self.states[value.id] == PARTIAL)

    def _place_outside(self, node: Value) -> None:
        """What no virtual value is needed for: before the slabs where they would have to sum it, or make it again."""
        state = self._state_outside(node)
        totals = any(a.id in self.of_totals for a in node.args) or state in (None, PARTIAL)
        self.of_totals |= {node.id} if totals else set()
        again = state == WHOLE and PRIMS[node.prim].family not in ("layout", "source") and node.aval.numel != 1
        if totals or again:
            self._put(node, BEFORE, _state_by_shape(node, self.symbol))
        else:
            assert state is not None
            self._put(node, WITHIN, state)

    def _state_outside(self, node: Value) -> State | None:
        """None: of a part of the rows it cannot be computed."""
        try:
            return state_of(node, [self.states[a.id] for a in node.args], self.symbol)
        except NotDivisible:
            return None

    def _put(self, node: Value, when: str, state: State) -> None:
        self.when[node.id], self.states[node.id] = when, state

    # ------------------------------------------------------------------ all of them
    def _require_fusible(self) -> None:
        """Raise NotDivisible for what is to be computed apart, and is more than kernels do, or as large as the rest."""
        for node in self.nodes:
            if self.when[node.id] != WITHIN and PRIMS[node.prim].family not in APART:
                raise refusal(node, "needs all of it, and has no kernel")
        held = min(self._bytes(v) for v in self.region.products)
        made = [v for v in self.before() if isinstance(self.states[v.id], int)]
        if made and SHARE_BEFORE * sum(map(self._bytes, made)) > held:
            raise refusal(made[0], "needs all of it, and is as large as what slabs are to keep out of memory")

    def _bytes(self, value: Value) -> int:
        return estimate(value.aval.nbytes, self.region.hints)

    def before(self) -> list[Value]:
        """What is computed before the slabs and read later."""
        outputs = set(self.region.outputs())
        later = {a for v in self.nodes if self.when[v.id] != BEFORE for a in v.args}
        return [v for v in self.nodes if self._is_ready(v) and (v in outputs or self.when[v.id] == BEFORE and v in later)]

    def _is_ready(self, node: Value) -> bool:
        return node.id not in self.of_virtual

    def within(self) -> list[Value]:
        """What slabs give: rows, and sums over them."""
        wanted = {*self.region.outputs(), *(a for v in self.nodes if self.when[v.id] == AFTER for a in v.args)}
        found = [v for v in self.nodes if v in wanted and v.id in self.of_virtual and self.when[v.id] == WITHIN]
        for value in found:
            if value.id in self.region.virtual or self.states[value.id] in (WHOLE, POSITION):
                raise refusal(value, "is wanted as a whole")
        return found

    def after(self) -> list[Value]:
        """What is computed after the slabs."""
        return [v for v in self.region.outputs() if self.when[v.id] == AFTER]

    # ------------------------------------------------------------------ as groups
    def groups(self) -> tuple[list[Group], Group, list[Group]]:
        """What runs before the slabs, in each of them, and after all."""
        known = self.region.inputs()
        before, within, after = self.before(), self.within(), self.after()
        first = list(self._parts(before, known))
        slab = self._part(within, [*known, *before])
        return first, slab, list(self._parts(after, [*known, *before, *within]))

    def _parts(self, outputs: Sequence[Value], known: Sequence[Value]) -> Iterator[Group]:
        """Groups of what shares nodes, in the order of their first results."""
        left, ids = list(outputs), {v.id for v in known}
        while left:
            found, nodes = [left[0]], {v.id for v in nodes_between(left[:1], ids)}
            for value in left[1:]:
                more = {v.id for v in nodes_between([value], ids)}
                if more & nodes and value.shape == found[0].shape:
                    found.append(value)
                    nodes |= more
            left = [v for v in left if v not in found]
            yield self._part(found, known)

    def _part(self, outputs: Sequence[Value], known: Sequence[Value]) -> Group:
        """What is between these values, with the inputs that it reads."""
        ids = {v.id for v in known}
        nodes = nodes_between(outputs, ids)
        read = {a.id for v in nodes for a in v.args} | {v.id for v in outputs}
        return self.region.part(outputs, [v for v in known if v.id in read])


def _state_by_shape(value: Value, symbol: sympy.Symbol) -> State:
    axis = axis_of(value, symbol)
    return WHOLE if axis is None else axis


def counted_apart(graph: Graph, symbol: sympy.Symbol, count: sympy.Symbol) -> Graph:
    """The graph with numbers that are made of a dim's size made of `count`, which stays when the dim is divided."""
    found = [v for v in graph.order() if v.prim == "full" and mentions(v.params["value"], symbol)]
    replacing = {v.id: _full(v, symbol, count) for v in found}
    return rebuild(graph, {}, replacing) if found else graph


def _full(value: Value, symbol: sympy.Symbol, count: sympy.Symbol):  # type: ignore[no-untyped-def]
    params = {**value.params, "value": value.params["value"].xreplace({symbol: count})}
    return lambda env: make("full", **params)
