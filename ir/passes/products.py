"""Matrix products with their elementwise neighbours as one group, where that beats the library's call between kernels.

    dot(x, w) -> memory -> kernel(dot, bias) -> y      becomes      kernel(x, w, bias) -> y

A product may join a group that has others already, if none of them reads it: silu(x @ wg) * (x @ wu) is one kernel.
So may the addition of a batch of products where an index says: dw[expert[b]] += x[b].T @ g[b].

A kernel of ours reaches at least SHARE of the machine's arithmetic (assumed, not timed). Where even so memory is the
limit, the bytes decide, and fusing never moves more of them; where arithmetic is, a kernel has to be MARGIN times as
fast. Other products stay with the library, unless a clock has the last word (`contest`). The rule, as data: `Estimate`.
Reductions over the product stay kernels of their own.

The last pass over steps: the neighbours of a product have to be groups before they can be joined to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..graph import Graph, Value
from ..prims import PRIMS
from ..rewrite import extract, nodes_between
from ..text.source_names import source_name
from ..types import LOW_FLOATS, Size, contiguous_strides, product
from .cost import Hints, estimate, minimal_bytes
from .fuse import Extern, Group, Step, View
from .node_kinds import is_view

SHARE = 0.5
"""Of the machine's arithmetic that a generated product is taken to reach."""
MARGIN = 2.0
"""What is won where arithmetic is the limit: it would still pay with half of that share."""
DTYPES = ("f16", "bf16", "f32")
ONCE, AGAIN = 2.0, 1.25
"""Bytes that may be read for each byte of an operand: made for one product, or again for each of several."""
AROUND = ("elementwise", "layout", "source", "random", "gather", "input")
"""Families that may be computed on a tile of a product."""


@dataclass(frozen=True)
class Machine:
    """Bytes per second from memory, and arithmetic per second of products by dtype."""

    bandwidth: float
    flops: Mapping[str, float] = field(hash=False)


@dataclass(frozen=True)
class Decision:
    """The fate of one product, and the reason."""

    value: Value
    group: Group | None  # None: the library's call stays
    reason: str

    @property
    def fused(self) -> bool:
        return self.group is not None

    def moved(self, parts: Sequence[Group], whole: Group) -> Decision:
        """The same product where its group became a part of another."""
        return replace(self, group=whole) if any(self.group is p for p in parts) else self

    def refused(self, why: str) -> Decision:
        """The same product where no kernel can be generated."""
        return Decision(self.value, None, why)

    def __str__(self) -> str:
        return f"product {source_name(self.value)}: {'in a kernel' if self.fused else 'by the library'}, {self.reason}"


@dataclass(frozen=True)
class Estimate:
    """Seconds of a product by the library with kernels around it, and of one kernel of ours."""

    operations: int
    called: int  # bytes that the library's call moves
    apart: int  # bytes that call and kernels move
    fused: int  # bytes that one kernel moves
    bandwidth: float
    library_rate: float
    own_rate: float
    beside: int = 0  # operations of the products that the kernel around the call has, at its own rate

    @property
    def library(self) -> float:
        call = max(self.operations / self.library_rate, self.called / self.bandwidth)
        return call + max(self.beside / (SHARE * self.own_rate), (self.apart - self.called) / self.bandwidth)

    @property
    def own(self) -> float:
        return max(self._arithmetic, self.fused / self.bandwidth)

    @property
    def memory_decides(self) -> bool:
        return self._arithmetic <= self.fused / self.bandwidth

    @property
    def _arithmetic(self) -> float:
        return (self.operations + self.beside) / (SHARE * self.own_rate)

    @property
    def pays(self) -> bool:
        is_sure = self.memory_decides or self.own_rate > self.library_rate or MARGIN * self.own <= self.library
        return self.own < self.library and is_sure

    def __str__(self) -> str:
        limit = SHARE * self.own_rate / self.bandwidth
        intensity = (self.operations + self.beside) / max(1, self.fused)
        times = f"; {self.own * 1e6:.1f} us by a kernel, {self.library * 1e6:.1f} us by the library and its neighbours"
        return (
            f"{intensity:.0f} operations per byte where memory decides up to {limit:.0f}; "
            f"fusing moves {self.fused / 1e6:.1f} MB instead of {self.apart / 1e6:.1f}"
            f"{'' if self.memory_decides else times}"
        )


@dataclass(frozen=True)
class Products:
    """Steps -> steps. `library`: ids of products that are to stay calls. `contest`: fuse whatever can be."""

    machine: Machine
    hints: Hints = field(default_factory=dict, hash=False)
    library: frozenset[int] = frozenset()
    contest: bool = False

    def __call__(self, graph: Graph, steps: Sequence[Step]) -> tuple[list[Step], list[Decision]]:
        steps, decisions = list(steps), list[Decision]()
        for value in [s.value for s in steps if isinstance(s, Extern) and _is_product(s.value)]:
            around = steps if value.id in self.library else _with_addition(graph, steps, value)
            if value.id not in self.library and (merged := _Merge.of(graph, around, value, self.hints)) is not None:
                costs = self.estimate(merged)
                fused = costs.pays or (self.contest and costs.fused < costs.apart)
                if fused:
                    steps = merged.steps()
                    decisions = [d.moved(merged.groups, merged.group) for d in decisions]
                decisions.append(Decision(value, merged.group if fused else None, str(costs)))
        return steps, decisions

    def estimate(self, merged: _Merge) -> Estimate:
        """The model of both ways, at the hints."""
        value = merged.value
        called = sum(self._number(v.aval.nbytes) for v in (*value.args, value))
        neighbours = sum(self._number(merged.moved(g)) // merged.readers(g) for g in merged.groups)
        library, own = (self.machine.flops[d] for d in (value.dtype, _multiplied_in(value)))
        beside = sum(self._seconds(v) * own for g in merged.groups for v in _products_in(g))
        return Estimate(
            self._number(_operations(value)), called, called + neighbours,
            self._number(minimal_bytes(merged.group.graph)), self.machine.bandwidth, library, own, round(beside),
        )  # fmt: skip

    def _seconds(self, value: Value) -> float:
        """A product at the machine's full rate."""
        return self._number(_operations(value)) / self.machine.flops[_multiplied_in(value)]

    def _number(self, size: Size) -> int:
        return estimate(size, self.hints)


# ------------------------------------------------------------------ products
def _is_product(value: Value) -> bool:
    """A product of matrices that kernels know how to write."""
    if value.prim != "dot" or value.dtype not in DTYPES:
        return False
    x_axes, y_axes, out = (value.params[p] for p in ("x_axes", "y_axes", "out_axes"))
    wide = {label for label, size in _sizes(value).items() if size != 1}
    rows, cols, summed = set(x_axes) - set(y_axes), set(y_axes) - set(x_axes), wide - set(out)
    plain = len(set(x_axes)) == len(x_axes) and len(set(y_axes)) == len(y_axes)
    return plain and bool(rows & wide and cols & wide and summed) and summed <= set(x_axes) & set(y_axes)


def selects_products(value: Value) -> bool:
    """True where a batch of products is added up, each at the place that an index has for it."""
    if value.prim != "scatter" or value.params["mode"] != "add" or len(value.params["axes"]) != 1:
        return False
    _, product_, index = value.args
    return index.ndim == 1 and _is_product(product_) and product_.params["out_axes"][0] in _batch(product_)


def _batch(product_: Value) -> set[int]:
    """The labels that both operands and the result have."""
    x_axes, y_axes, out = (product_.params[p] for p in ("x_axes", "y_axes", "out_axes"))
    return set(x_axes) & set(y_axes) & set(out)


def _with_addition(graph: Graph, steps: list[Step], value: Value) -> list[Step]:
    """The steps, with the addition of the products as a group that may be theirs, where nothing else reads them."""
    readers = [s for s in steps if value in _reads(s)]
    (step,) = readers if len(readers) == 1 and value not in graph.results else (None,)
    if not isinstance(step, Extern) or not selects_products(step.value) or step.value.args[1] != value:
        return steps
    inputs = tuple(sorted({v for v in step.value.args if v.prim != "full"}, key=lambda v: v.id))
    alone = extract([step.value], inputs, name=graph.name, strides=[contiguous_strides(step.value.shape)])
    return [Group(alone, inputs, (step.value,)) if s is step else s for s in steps]


def _sizes(value: Value) -> dict[int, Size]:
    pairs = zip(("x_axes", "y_axes"), value.args, strict=True)
    return {label: n for axes, arg in pairs for label, n in zip(value.params[axes], arg.shape, strict=True)}


def _operations(value: Value) -> Size:
    return 2 * product(_sizes(value).values())


def _multiplied_in(value: Value) -> str:
    """float32 operands that were only widened are multiplied as what they were: nothing is lost."""
    sources = {_narrow(a) for a in value.args}
    return sources.pop() if len(sources) == 1 else value.dtype


def _narrow(value: Value) -> str:
    while is_view(value):
        (value,) = value.args
    widened = value.prim == "cast" and value.dtype == "f32" and value.args[0].dtype in LOW_FLOATS
    return value.args[0].dtype if widened else value.dtype


# ------------------------------------------------------------------ merging
@dataclass(frozen=True)
class _Merge:
    """A product, the groups that would join it (prologues, then the epilogue), and the group of them all."""

    graph: Graph
    before: Sequence[Step]
    value: Value
    prologues: tuple[Group, ...]
    epilogue: Group | None
    group: Group

    @property
    def groups(self) -> tuple[Group, ...]:
        return (*self.prologues, *([self.epilogue] if self.epilogue else []))

    def moved(self, group: Group) -> Size:
        """The bytes that are moved for a group alone, not for what else is computed with it."""
        host = _host(self.before, group)
        others = [o for o in host.outputs if o not in group.outputs]
        return minimal_bytes(host.graph) - (minimal_bytes(_part(host, others, self.before).graph) if others else 0)

    def readers(self, group: Group) -> int:
        """Products among which the cost of making an operand is divided."""
        return max(1, _products_reading(self.graph, self.before, group.outputs[0])) if group in self.prologues else 1

    @staticmethod
    def of(graph: Graph, steps: Sequence[Step], value: Value, hints: Hints) -> _Merge | None:
        """None where nothing elementwise is next to the product."""
        at = next(i for i, s in enumerate(steps) if isinstance(s, Extern) and s.value == value)
        epilogue = _epilogue(steps, at, value)
        end = at if epilogue is None else steps.index(epilogue)
        prologues = tuple(g for g in _prologues(graph, steps, value, hints) if not _effect_between(steps, g, end))
        if not prologues and epilogue is None:
            return None
        joined = _joined(graph, steps, value, prologues, epilogue)
        may_be = all(selects_products(v) for v in joined.graph.order() if v.prim == "scatter")
        return _Merge(graph, steps, value, prologues, epilogue, joined) if may_be else None

    def steps(self) -> list[Step]:
        """The steps with the one group in the place of its last part, and without what nothing reads any more."""
        call = next(s for s in self.before if isinstance(s, Extern) and s.value == self.value)
        last = self.epilogue or call
        remaining = [s for s in self.before if s is last or s is not call]
        return _without_unread(self.graph, [self.group if s is last else s for s in remaining])


def _reads(step: Step) -> tuple[Value, ...]:
    return step.inputs if isinstance(step, Group) else step.value.args


def _epilogue(steps: Sequence[Step], at: int, value: Value) -> Group | None:
    """The first that reads the product, if all of it can be done on a tile: around other products, too."""
    place = next((i for i in range(at + 1, len(steps)) if value in _reads(steps[i])), None)
    step = steps[place] if place is not None else None
    if place is None or not isinstance(step, Group) or _effects(steps[at:place]):
        return None
    return step if _on_a_tile(step, products=True) and not _is_multiplied(step, value) else None


def _on_a_tile(group: Group, products: bool = False) -> bool:
    """Elementwise, but for products, and their addition, where the tile may be theirs."""
    may_be = AROUND if not products else (*AROUND, "contract", "scatter")
    return all(PRIMS[v.prim].family in may_be for v in group.graph.order())


def _is_multiplied(group: Group, value: Value) -> bool:
    """True where an input of the group is an operand of its products, as it is or after operations."""
    depends = {group.graph.inputs[group.inputs.index(value)].id}
    for v in group.graph.order():
        if any(a.id in depends for a in v.args):
            depends.add(v.id)
    return any(v.id in depends for v in _products_in(group))


def _products_in(group: Group) -> list[Value]:
    return [v for v in group.graph.order() if v.prim == "dot"]


def _prologues(graph: Graph, steps: Sequence[Step], value: Value, hints: Hints) -> list[Group]:
    """Groups that make an operand of products and of nothing else: once, of at most twice the bytes that it has, or

    for several products, each of which makes it again, of hardly more bytes than it has.
    """
    bases = [_base(a) for a in value.args]
    groups = [s for s in steps if isinstance(s, Group)]
    makers = [_part(s, [o], steps) for s in groups for o in s.outputs if o in bases]
    return [m for m in makers if _on_a_tile(m) and _may_repeat(graph, steps, m, hints)]


def _part(group: Group, outputs: Sequence[Value], steps: Sequence[Step]) -> Group:
    """The part of a group that computes some of its outputs."""
    if len(outputs) == len(group.outputs):
        return group
    strides = [group.graph.output_strides[group.outputs.index(o)] for o in outputs]
    nodes = nodes_between(outputs, {v.id for v in group.inputs})
    read = {a for v in nodes for a in v.args}
    inputs = tuple(v for v in group.inputs if v in read)
    part = extract(outputs, inputs, name=group.graph.name, strides=strides, layouts=_layouts(steps))
    return Group(part, inputs, tuple(outputs))


def _host(steps: Sequence[Step], group: Group) -> Group:
    """The step that a group is, or is a part of."""
    return next(s for s in steps if isinstance(s, Group) and group.outputs[0] in s.outputs)


def _may_repeat(graph: Graph, steps: Sequence[Step], group: Group, hints: Hints) -> bool:
    readers = _products_reading(graph, steps, group.outputs[0])
    made = estimate(group.outputs[0].aval.nbytes, hints)
    read = estimate(minimal_bytes(group.graph), hints) - made
    return readers > 0 and read <= (ONCE if readers == 1 else AGAIN) * made


def _base(value: Value) -> Value:
    """The value at the end of a chain of views."""
    while is_view(value):
        (value,) = value.args
    return value


def _products_reading(graph: Graph, steps: Sequence[Step], operand: Value) -> int:
    """The number of products that read it, directly or through views; 0 where anything else does."""
    readers = [s for s in steps if not isinstance(s, View) and any(_base(r) == operand for r in _reads(s))]
    products = all(isinstance(s, Extern) and _is_product(s.value) for s in readers)
    return len(readers) if products and not any(_base(r) == operand for r in graph.results) else 0


def _effects(steps: Iterable[Step]) -> bool:
    return any(isinstance(s, Extern) and PRIMS[s.value.prim].effect for s in steps)


def _effect_between(steps: Sequence[Step], group: Group, end: int) -> bool:
    return _effects(steps[steps.index(_host(steps, group)) : end])


def _joined(
    graph: Graph, steps: Sequence[Step], value: Value, prologues: Sequence[Group], epilogue: Group | None
) -> Group:
    """One group for the product and what surrounds it; the product is one of its results where it is read elsewhere."""
    # the product itself is stored only where something besides the epilogue reads it
    readers = [s for s in steps if s is not epilogue and value in _reads(s)]
    outputs = list(epilogue.outputs) if epilogue else []
    strides = list(epilogue.graph.output_strides) if epilogue else []
    if epilogue is None or readers or value in graph.results:
        outputs.append(value)
        strides.append(contiguous_strides(value.shape))
    # operands that a prologue makes are replaced by what the prologue reads
    inside = {g.outputs[0]: g for g in prologues}
    operands = [i for a in value.args for i in (inside[_base(a)].inputs if _base(a) in inside else (_base(a),))]
    inputs = dict.fromkeys([*(i for i in (epilogue.inputs if epilogue else ()) if i != value), *operands])
    ordered = sorted(inputs, key=lambda v: v.id)
    name = (epilogue or prologues[0]).graph.name
    joined = extract(outputs, ordered, name=name, strides=strides, layouts=_layouts(steps))
    return Group(joined, tuple(ordered), tuple(outputs))


def _layouts(steps: Sequence[Step]) -> dict[int, tuple[Size, ...] | None]:
    """The strides of what groups compute."""
    groups = [s for s in steps if isinstance(s, Group)]
    return {v.id: s for g in groups for v, s in zip(g.outputs, g.graph.output_strides, strict=True)}


def _without_unread(graph: Graph, steps: Sequence[Step]) -> list[Step]:
    """Without views, groups and outputs of groups of which nothing is read, and that are no results."""
    needed_steps: list[Step] = []
    needed = set(graph.results)
    for step in reversed(steps):
        results = step.outputs if isinstance(step, Group) else (step.value,)
        read = [o for o in results if o in needed]
        if isinstance(step, Extern) or read:
            step = _part(step, read, steps) if isinstance(step, Group) and not _products_in(step) else step
            needed.update(_reads(step))
            needed_steps.append(step)
    return needed_steps[::-1]
