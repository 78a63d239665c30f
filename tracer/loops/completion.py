"""Turns of a loop that lack a few operations of the others, completed, so that they are turns like these.

    g = c @ y[n - 1];     a[n - 1] = g * h[n - 2];  d = g * w        g = -0.0 + c @ y[n - 1];  ..  the first one of all
    g = d + c @ y[t];     a[t] = g * h[t - 1];      d = g * w
    g = d + c @ y[0];     a[0] = g * h0;                             ..  a[0] = g * p[0];  d = g * w, which nothing reads

So autograd's backward of a loop begins and ends: where no gradient comes from a later step, none is added, and what no
earlier step waits for is not made. x + -0.0 is x, bit by bit. What a step read of the one before is kept as it was given,
p[t] = h[t - 1], the first one with what the loop began with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._ops import OpOverload

from ..sizes import hint_of
from .affine import ONE, number_of
from .alignment import repetitions
from .program import MARK, Constant, Program, Ref, Step
from .rolling import handed_on

aten = torch.ops.aten
TURNS, SMALLEST = 3, 6
"""Turns that have to be alike, and operations that they have together."""


class Node:
    """A step that can be moved: what it reads are other nodes. at: where it was in the program, None for a new one."""

    def __init__(self, step: Step, leaves: list[Any], at: int | None) -> None:
        self.step, self.leaves, self.at = step, leaves, at


@dataclass(frozen=True)
class Use:
    """A result of a node."""

    node: Node
    port: int | None = None


@dataclass(frozen=True)
class Earlier:
    """A value at a position of the turn that is being completed, or (None) of one before all turns."""

    position: int | None


class Unknown:
    """What the turns alike do not tell."""


UNKNOWN = Unknown()


class Incomplete(Exception):
    """A turn cannot be completed. Internal."""


def completed(program: Program) -> Program:
    """The same program, with turns completed where they are nearly whole."""
    regions = repetitions([s.token for s in program.steps], SMALLEST, TURNS)
    nodes = _linked(program.steps)
    results = [_linked_leaf(leaf, nodes) for leaf in program.results]
    runs = [run for region in regions if (run := _run(nodes, region, program)) is not None]
    for before, run, behind in zip([None, *runs], runs, [*runs[1:], None], strict=False):
        run.limit(before.stop if before is not None else 0, behind.start if behind is not None else len(nodes))
        run.complete()
    _keep_what_was_given(runs)
    order = _in_order(nodes, runs)
    for run in runs:
        run.rename_readers(order, results)
    return _unlinked(program, order, results) if any(run.is_changed for run in runs) else program


def _in_order(nodes: Sequence[Node], runs: Sequence[Run]) -> list[Node]:
    order, at = list[Node](), 0
    for run in runs:
        order += [*nodes[at : run.start], *run.nodes_in_order()]
        at = run.stop
    return [*order, *nodes[at:]]


# ---------------------------------------------------------------------- nodes and steps
def _linked(steps: Sequence[Step]) -> list[Node]:
    nodes: list[Node] = []
    for at, step in enumerate(steps):
        nodes.append(Node(step, [_linked_leaf(leaf, nodes) for leaf in step.leaves], at))
    return nodes


def _linked_leaf(leaf: Any, nodes: Sequence[Node]) -> Any:
    if isinstance(leaf, list):
        return [_linked_leaf(ref, nodes) for ref in leaf]
    return Use(nodes[leaf.step], leaf.port) if isinstance(leaf, Ref) and leaf.step >= 0 else leaf


def _unlinked(program: Program, order: Sequence[Node], results: Sequence[Any]) -> Program:
    number = {node: n for n, node in enumerate(order)}

    def ref(leaf: Any) -> Any:
        if isinstance(leaf, list):
            return [ref(one) for one in leaf]
        return Ref(number[leaf.node], leaf.port) if isinstance(leaf, Use) else leaf

    steps = [replace(node.step, leaves=[ref(leaf) for leaf in node.leaves]) for node in order]
    return replace(program, steps=steps, results=[ref(leaf) for leaf in results])


# ---------------------------------------------------------------------- a run of turns that are alike
def _run(nodes: Sequence[Node], region: Any, program: Program) -> Run | None:
    """Turns that are alike in what they read as well; None where they are too few."""
    period, stop = region.period, region.stop
    while stop < len(nodes) and nodes[stop].step.token == nodes[stop - period].step.token:
        stop += 1
    begin, end = _longest([_follows(nodes, i, period) for i in range(region.start + 2 * period, stop)])
    if end - begin < period:
        return None
    first, last = begin + region.start, end + region.start + 2 * period
    handed = handed_on(program, first, last, period)
    boundaries = [first + r for r in range(period) if handed[r] == min(handed)]
    return Run(nodes, first, last, period, boundaries)


def _longest(flags: Sequence[bool]) -> tuple[int, int]:
    best, begin = (0, 0), 0
    for i, flag in enumerate([*flags, False]):
        if not flag:
            best, begin = max(best, (begin, i), key=lambda r: r[1] - r[0]), i + 1
    return best


def _follows(nodes: Sequence[Node], i: int, period: int) -> bool:
    """Whether what a step reads follows from what the same of the two turns before it read."""
    a, b, c = nodes[i - 2 * period].leaves, nodes[i - period].leaves, nodes[i].leaves
    return len(a) == len(b) == len(c) and all(_next(p, q, nodes) == r for p, q, r in zip(a, b, c, strict=True))


def _next(a: Any, b: Any, nodes: Sequence[Node]) -> Any:
    """The leaf that follows two, of turns one after the other."""
    if isinstance(a, Use) and isinstance(b, Use):
        return _next_use(a, b, nodes)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        found = [_next(p, q, nodes) for p, q in zip(a, b, strict=True)]
        return UNKNOWN if UNKNOWN in found else found
    if isinstance(a, Ref) and isinstance(b, Ref) and a.step == b.step:
        return Ref(b.step, _next_port(a.port, b.port))
    if isinstance(a, dict) and isinstance(b, dict):
        return {k: n for k in {**a, **b} if (n := 2 * b.get(k, 0) - a.get(k, 0))}
    return b if type(a) is type(b) and a == b else UNKNOWN


def _next_port(a: int | None, b: int | None) -> int | None:
    return b if a is None or b is None else 2 * b - a


def _next_use(a: Use, b: Use, nodes: Sequence[Node]) -> Any:
    if a.node is b.node:
        port = _next_port(a.port, b.port)
        return Use(b.node, port) if port is None or port >= 0 else UNKNOWN
    if a.node.at is None or b.node.at is None or a.port != b.port:
        return UNKNOWN
    at = 2 * b.node.at - a.node.at
    is_there = 0 <= at < len(nodes) and nodes[at].step.token == b.node.step.token
    return Use(nodes[at], b.port) if is_there else UNKNOWN


@dataclass
class Awaited:
    """What readers of the first turn read at a position: a value of the program, and where they read it."""

    value: Use
    readers: list[tuple[Node, int]] = field(default_factory=list)


class Run:
    """Turns by their positions, which go on where turns are completed."""

    def __init__(self, nodes: Sequence[Node], first: int, last: int, period: int, boundaries: Sequence[int]) -> None:
        self.nodes, self.period, self.boundaries = nodes, period, boundaries
        self.first, self.last = first, last
        self.start, self.stop = first, last
        self.at: dict[int, Node] = {i: nodes[i] for i in range(first, last)}
        self.position = {node: i for i, node in self.at.items()}
        self.before: list[Node] = []
        self.inside: dict[Node, list[Node]] = {}
        self.renamed: list[tuple[Use, int]] = []
        self.is_changed = False

    def limit(self, start: int, stop: int) -> None:
        self.lowest, self.highest = start, stop

    def nodes_in_order(self) -> list[Node]:
        turns = (n for i in range(self.first, self.last) for n in (*self.inside.get(self.at[i], ()), self.at[i]))
        return [*self.before, *turns]

    def complete(self) -> None:
        """Turns at the end, and at the beginning, for as long as they are nearly whole."""
        self.boundary = next((b for b in self.boundaries if self._is_done(self._before, b)), self.boundaries[0])
        for side in (self._before, self._behind):
            self._is_done(side, self.boundary)

    def _is_done(self, side: Callable[[], None], boundary: int) -> bool:
        self.boundary = boundary
        try:
            side()
        except Incomplete:
            return False
        return True

    def _put(self, position: int, node: Node) -> None:
        self.at[position], self.position[node] = node, position

    # ------------------------------------------------------------------ what a turn was given
    def is_turn_behind(self, later: Any, earlier: Any) -> bool:
        """Whether two values are the same of two turns, one right behind the other."""
        if not (isinstance(later, Use) and isinstance(earlier, Use) and later.port == earlier.port):
            return False
        places = self.position.get(later.node), self.position.get(earlier.node)
        return None not in places and places[0] - places[1] == self.period  # type: ignore[operator]

    def kept(self, begin: Any, first: Use) -> dict[Any, Use]:
        """Copies of what each turn was given of the one before, by that; the first was given `begin`.

        first: what the first turn handed to the second. Empty where that is not so.
        """
        found = ((q, s) for q in range(self.first, self.first + self.period) for s in self._slots_given(q, begin, first))
        q, slot = next(found, (None, 0))
        if q is None:
            return {}
        kept: dict[Any, Use] = {}
        for reader in (self.at[v] for v in range(q, self.last, self.period)):
            copy = _copy(reader, slot, first)
            self.inside.setdefault(reader, []).append(copy)
            kept[reader.leaves[slot]] = Use(copy)
        self.is_changed = True
        return kept

    def _slots_given(self, q: int, begin: Any, first: Use) -> list[int]:
        pairs = zip(self.at[q].leaves, self.at[q + self.period].leaves, strict=False)
        return [s for s, pair in enumerate(pairs) if pair == (begin, first)]

    # ------------------------------------------------------------------ the last turn
    def _behind(self) -> None:
        end = self.last + self.period - (self.last - self.boundary) % self.period
        found, at = dict[int, Node](), self.stop
        for v in range(self.last, end):
            self.at |= found
            self.position |= {node: i for i, node in found.items()}
            found[v] = node = self._actual_behind(v, at) or self._made_behind(v)
            at += node.at is not None
        self.at |= found
        self.position |= {node: i for i, node in found.items()}
        if 2 * (at - self.stop) < end - self.last:
            self._forget(found)
            raise Incomplete
        self.is_changed = self.is_changed or any(node.at is None for node in found.values())
        self.last, self.stop = end, at

    def _forget(self, found: Mapping[int, Node]) -> None:
        for v, node in found.items():
            self.at.pop(v, None)
            self.position.pop(node, None)

    def _actual_behind(self, v: int, at: int) -> Node | None:
        """The step of the program that is at a position; None where it is another one."""
        if at >= self.highest or self.nodes[at].step.token != self.at[v - self.period].step.token:
            return None
        expected, node = self._following(v), self.nodes[at]
        return node if all(map(_may_be, expected, node.leaves)) else None

    def _following(self, v: int) -> list[Any]:
        a, b = self.at[v - 2 * self.period], self.at[v - self.period]
        return [self._following_leaf(p, q) for p, q in zip(a.leaves, b.leaves, strict=True)]

    def _following_leaf(self, a: Any, b: Any) -> Any:
        if isinstance(a, Use) and isinstance(b, Use) and a.port == b.port and self._is_turn_on(a, b):
            node = self.at.get(self.position[b.node] + self.period)
            return UNKNOWN if node is None else Use(node, b.port)
        return _next(a, b, self.nodes)

    def _is_turn_on(self, a: Use, b: Use) -> bool:
        places = self.position.get(a.node), self.position.get(b.node)
        return None not in places and places[1] - places[0] == self.period  # type: ignore[operator]

    def _made_behind(self, v: int) -> Node:
        """A step that the last turn lacks: what nothing reads."""
        like, leaves = self.at[v - self.period], self._following(v)
        if any(leaf is UNKNOWN or isinstance(leaf, list) for leaf in leaves) or not _is_repeatable(like, leaves):
            raise Incomplete
        return Node(like.step, leaves, None)

    # ------------------------------------------------------------------ the first turn
    def _before(self) -> None:
        begin = self.first - 1 - (self.first - 1 - self.boundary) % self.period
        turn = _FirstTurn(self, begin)
        turn.find()
        for v, node in turn.found.items():
            self._put(v, node)
        for node, slot, made in turn.edits:
            node.leaves[slot] = Use(made)
        self.before = [*turn.neutral, *self.before]
        self.renamed += turn.renamed
        self.is_changed = self.is_changed or bool(turn.neutral)
        self.first, self.start = begin, turn.at + 1

    def rename_readers(self, order: Sequence[Node], results: list[Any]) -> None:
        """Those who read a sum of the first turn, as they read that of the others, read what is added up there now."""
        own = set(self.at.values())
        others = [node for node in order if node not in own]
        for value, position in self.renamed:
            sum_, second = Use(self.at[position]), Use(self.at[position + self.period])
            alike = {(n.step.token, s) for n in others for s, leaf in enumerate(n.leaves) if leaf == second}
            for node in others:
                node.leaves = [
                    _exchanged(leaf, value, sum_, second, (node.step.token, s) in alike) for s, leaf in enumerate(node.leaves)
                ]


def _exchanged(leaf: Any, value: Use, new: Use, second: Use, is_alike: bool) -> Any:
    if isinstance(leaf, list):
        return [new if one == value else one for one in leaf] if second in leaf else leaf
    return new if is_alike and leaf == value else leaf


def _may_be(expected: Any, leaf: Any) -> bool:
    """Whether a leaf is what is expected, or a value where nothing is."""
    return bool(expected == leaf) or (expected is UNKNOWN and isinstance(leaf, Use | Ref))


def _is_repeatable(like: Node, leaves: Sequence[Any]) -> bool:
    """Whether an operation may be done once more: it draws nothing, and reads no place that there is not."""
    target = like.step.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    moved = [s for s, (a, b) in enumerate(zip(like.leaves, leaves, strict=True)) if isinstance(a, dict) and a != b]
    if not moved:
        return True
    if target is not aten.select.int or moved != [2] or not isinstance(leaves[0], Use):
        return False
    dim, index = (leaf.get(ONE, 0) if leaf.keys() <= {ONE} else -1 for leaf in leaves[1:])
    return 0 <= index < hint_of(leaves[0].node.step.value.shape[dim])


class _FirstTurn:
    """The turn before the first one, from its last step backwards."""

    def __init__(self, run: Run, begin: int) -> None:
        self.run, self.begin, self.at = run, begin, run.start - 1
        self.found: dict[int, Node] = {}
        self.awaited: dict[int, Awaited] = {}
        self.neutral: list[Node] = []
        self.renamed: list[tuple[Use, int]] = []
        self.edits: list[tuple[Node, int, Node]] = []

    def find(self) -> None:
        run = self.run
        for v in range(run.first, run.first + run.period):
            self._await(run.at[v], self._leading(v))
        for v in range(run.first - 1, self.begin - 1, -1):
            self.found[v] = self._actual(v) or self._sum(v)
        if 2 * (run.start - 1 - self.at) < run.first - self.begin:
            raise Incomplete

    def _node(self, position: int) -> Node | None:
        return self.run.at.get(position) or self.found.get(position)

    def _leading(self, v: int) -> list[Any]:
        """What a step reads, as the two turns behind it say."""
        a, b = self._node(v + self.run.period), self._node(v + 2 * self.run.period)
        assert a is not None and b is not None
        return [self._leading_leaf(p, q) for p, q in zip(a.leaves, b.leaves, strict=True)]

    def _leading_leaf(self, a: Any, b: Any) -> Any:
        if isinstance(a, Use) and isinstance(b, Use) and a.port == b.port and self._is_turn_on(a, b):
            position = self.run.position[b.node] - 2 * self.run.period
            return Earlier(position if position >= self.begin else None)
        return _next(b, a, self.run.nodes)

    def _is_turn_on(self, a: Use, b: Use) -> bool:
        """By the position of the second alone: the first may be in a turn that lacks something."""
        run = self.run
        if b.node not in run.position:
            return False
        expected = run.position[b.node] - run.period
        node = self._node(expected)
        return a.node is node or (node is None and expected in self.awaited and self.awaited[expected].value == a)

    def _actual(self, v: int) -> Node | None:
        if self.at < self.run.lowest:
            return None
        node, like = self.run.nodes[self.at], self._node(v + self.run.period)
        assert like is not None
        if v in self.awaited and self.awaited[v].value.node is not node:
            return None
        leading = self._leading(v)
        if node.step.token != like.step.token or not all(map(self._may_be, leading, node.leaves)):
            return None
        self._await(node, leading)
        self.at -= 1
        return node

    def _may_be(self, expected: Any, leaf: Any) -> bool:
        if not isinstance(expected, Earlier):
            return _may_be(expected, leaf)
        if expected.position is None:
            return isinstance(leaf, Use | Ref)
        known = self._node(expected.position)
        if known is not None:
            return isinstance(leaf, Use) and leaf.node is known
        awaited = self.awaited.get(expected.position)
        return isinstance(leaf, Use) and (awaited is None or awaited.value == leaf)

    def _await(self, node: Node, expected: Sequence[Any]) -> None:
        for slot, (leaf, value) in enumerate(zip(expected, node.leaves, strict=True)):
            if isinstance(leaf, Earlier) and leaf.position is not None and self._node(leaf.position) is None:
                if not isinstance(value, Use):
                    raise Incomplete
                self.awaited.setdefault(leaf.position, Awaited(value)).readers.append((node, slot))

    def _sum(self, v: int) -> Node:
        """A sum that the first turn lacks: nothing came from a turn before."""
        like, leading = self._node(v + self.run.period), self._leading(v)
        assert like is not None
        if like.step.target is not aten.add.Tensor or len(leading) != 2 or v not in self.awaited:
            raise Incomplete
        carried = [s for s, leaf in enumerate(leading) if isinstance(leaf, Earlier) and leaf.position is None]
        value, readers = self.awaited[v].value, self.awaited[v].readers
        if len(carried) != 1 or not _is_like(value, like):
            raise Incomplete
        self.neutral.append(_nothing(like))
        leaves = [Use(self.neutral[-1]) if s == carried[0] else value for s in range(2)]
        made = Node(like.step, leaves, None)
        if not self._may_be(leading[1 - carried[0]], value):
            raise Incomplete
        self.edits += [(node, slot, made) for node, slot in readers]
        self._await(made, [UNKNOWN if s == carried[0] else leading[s] for s in range(2)])
        self.renamed.append((value, v))
        return made


def _is_like(value: Use, like: Node) -> bool:
    a, b = value.node.step.value, like.step.value
    if value.port is not None or not isinstance(a, torch.Tensor) or not b.dtype.is_floating_point:
        return False
    return a.dtype == b.dtype and [hint_of(n) for n in a.shape] == [hint_of(n) for n in b.shape]


def _nothing(like: Node) -> Node:
    """-0.0 everywhere, which added to x leaves it as it is."""
    value = like.step.value
    leaves = [*map(number_of, value.shape), Constant(-0.0, ("float", "-0.0"))]
    leaves += [Constant(v, (k, repr(v))) for k, v in (("dtype", value.dtype), ("device", value.device))]
    form = (([MARK] * value.ndim, MARK), {"dtype": MARK, "device": MARK})
    return Node(Step(aten.full.default, form, leaves, (aten.full.default, like.step.token), like.step.meta, value), leaves, None)


def _copy(reader: Node, slot: int, like: Use) -> Node:
    """What a step reads, as a step of its own."""
    value = like.node.step.value if like.port is None else like.node.step.value[like.port]
    token = (aten.alias.default, slot, reader.step.token)
    leaves = [reader.leaves[slot]]
    return Node(Step(aten.alias.default, ((MARK,), {}), leaves, token, reader.step.meta, value), leaves, None)


# ---------------------------------------------------------------------- what turns were given
def _keep_what_was_given(runs: Sequence[Run]) -> None:
    """h[t - 1] in the turns of another loop, and in one of them what the loop of h began with: p[t] in all."""
    for run in runs:
        for offset in range(run.first, run.first + run.period):
            column = [run.at[v] for v in range(offset, run.last, run.period)]
            for slot in range(min(len(node.leaves) for node in column)):
                _keep_column(runs, column, slot)


def _keep_column(runs: Sequence[Run], column: Sequence[Node], slot: int) -> None:
    leaves = [node.leaves[slot] for node in column]
    for one, next_, third in (leaves[:3], leaves[:-4:-1]):
        of = next((r for r in runs if isinstance(next_, Use) and next_.node in r.position), None)
        if of is None or column[0] in of.position or not of.is_turn_behind(third, next_) or of.is_turn_behind(next_, one):
            continue
        if (kept := of.kept(one, next_)) and all(_key(leaf) in kept for leaf in leaves):
            for node in column:
                node.leaves[slot] = kept[_key(node.leaves[slot])]


def _key(leaf: Any) -> Any:
    return leaf if isinstance(leaf, Use | Ref) else None
