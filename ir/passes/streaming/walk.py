"""A region with one dim walked: which of its nodes run once before the slabs, in each of them, or once after all.

    n = mask.sum()        before: no product needs it, and it is made of all rows
    z = x @ w.T           within: z has the rows of a slab
    total = nll.sum()     within: what slabs give is added up
    loss = total / n      after

What a node is on a part of the rows, the rules of `sharding` say: slabs are ranks that come one after the other.
Numbers that are made of the size of the dim stay those of all rows, places along it are counted from the first of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import sympy

from ...graph import Value
from ...prims import PRIMS
from ...rewrite import NOTHING, Replacements, make, nodes_between
from ...sharding.rules import DIVIDED, KEEPS_POSITIONS, PARTIAL, POSITION, WHOLE, State, axis_of, state_of
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
    """The nodes of a region by when they run. Raises NotDivisible, naming a node that needs all rows at once.

    count, first: the number of all rows, and the place of the first one of a slab.
    """

    def __init__(self, region: Region, symbol: sympy.Symbol) -> None:
        self.region, self.symbol = region, symbol
        self.count = sympy.Symbol(f"{symbol}_all", integer=True, positive=True)
        self.first = sympy.Symbol(f"{symbol}_first", integer=True, nonnegative=True)
        self.asking: set[int] = set()  # nodes that ask for places along the dim
        self.nodes = nodes_between([*region.nodes(), *region.outputs()], {v.id for v in region.inputs()})
        self.states = {v.id: _state_by_shape(v, symbol) for v in region.inputs()}
        self.when: dict[int, str] = {}
        self.of_virtual: set[int] = set()
        for node in self.nodes:
            if len(node.avals) > 1:
                raise refusal(node, "has several results")
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
        self._put(node, WITHIN, self._state(node))
        if node.id in virtual and not isinstance(self.states[node.id], int):
            raise refusal(node, "does not have it")

    def _is_ended(self, value: Value) -> bool:
        """It is there when all slabs are done."""
        return self.when.get(value.id) == AFTER or (value.id in self.of_virtual and self.states[value.id] == PARTIAL)

    def _place_outside(self, node: Value) -> None:
        """What no virtual value is needed for: before the slabs where they would have to sum it, or make it again."""
        state = self._state_outside(node)
        again = state == WHOLE and PRIMS[node.prim].family not in ("layout", "source") and node.aval.numel != 1
        if state is None or state == PARTIAL or again:
            self._put(node, BEFORE, _state_by_shape(node, self.symbol))
        else:
            self._put(node, WITHIN, state)

    def _state_outside(self, node: Value) -> State | None:
        """None: of a part of the rows it cannot be computed."""
        try:
            return self._state(node)
        except NotDivisible:
            return None

    def _state(self, node: Value) -> State:
        """The state of a node on a slab; one that asks for places is told them."""
        states = [self.states[a.id] for a in node.args]
        if POSITION not in states or node.prim in KEEPS_POSITIONS:
            return state_of(node, states, self.symbol)
        self.asking.add(node.id)
        return state_of(node, [DIVIDED if s == POSITION else s for s in states], self.symbol)

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
        wanted = [v for v in self.nodes if v in outputs or (v in later and self.when[v.id] == BEFORE)]
        return [v for v in wanted if v.id not in self.of_virtual]

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
        slab = self._part(within, [*known, *before], self._on_parts())
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

    def _part(self, outputs: Sequence[Value], known: Sequence[Value], replacing: Replacements = NOTHING) -> Group:
        """What is between these values, with the inputs that it reads."""
        ids = {v.id for v in known}
        nodes = nodes_between(outputs, ids)
        read = {a.id for v in nodes for a in v.args} | {v.id for v in outputs}
        return self.region.part(outputs, [v for v in known if v.id in read], replacing)

    def _on_parts(self) -> Replacements:
        """Builders of the nodes that are others on a slab: numbers made of the size of the dim, and places along it."""
        found = [v for v in self.nodes if v.prim == "full" and mentions(v.params["value"], self.symbol)]
        numbers = {v.id: partial(_counted, v, {self.symbol: self.count}) for v in found}
        return numbers | {v.id: partial(self._placed, v) for v in self.nodes if v.id in self.asking}

    def _placed(self, node: Value, env: dict[int, Value]) -> Value:
        """The node, with places counted from the first row of all."""
        args = [env[a.id] for a in node.args]
        for at, source in enumerate(node.args):
            if self.states[source.id] == POSITION:
                first = make("full", value=self.first, shape=source.shape, dtype=source.dtype)
                args[at] = make("add", args[at], first)
        return make(node.prim, *args, **node.params)


def _state_by_shape(value: Value, symbol: sympy.Symbol) -> State:
    axis = axis_of(value, symbol)
    return WHOLE if axis is None else axis


def _counted(value: Value, sizes: Mapping[sympy.Symbol, sympy.Symbol], env: dict[int, Value]) -> Value:
    """A number made of sizes, made of others."""
    return make("full", **{**value.params, "value": value.params["value"].xreplace(sizes)})
