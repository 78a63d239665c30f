"""The node of a loop as a `scan`: its body as a graph of one step, and what each step reads of the whole as xs.

    loop(body, length, carries, wholes) -> (*last carries, *stacked)
    body(t, *carries, *wholes)          -> (*carries, *one step of each stacked)

    torch.ops.higher_order.scan(body, init, xs, wholes)                 the same; associative_scan begins at xs[0]

    select(whole, axis, a * t + b)      an x: the slice b, b + a, .. of that axis, in front, flipped where a < 0
    whole[.., t : t + n, ..]            n such xs
    t itself                            an x that counts
    select(carry, axis, t)              an index that is data
"""

from __future__ import annotations

import copy
import math
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from ...ir import Graph, Size, Value, emit
from ...ir.errors import LoweringError
from ...ir.loops.body import Body
from ...ir.loops.loop import results_of
from ...ir.types import contiguous_strides, simplify_size
from ..sizes import Sizes, hint_of
from ..torch_private import FakeTensorMode
from .number_overloads import taking_tensors
from .rules import cut, iota, permute, reshape

aten = torch.ops.aten
MOST_IN_A_WINDOW = 16
Lower = Callable[[fx.GraphModule, Sequence[Any], Sequence[str]], Graph]
"""(the graph of a step, a fake for each of its inputs, their names) -> that graph in primitives."""


class StepRead(NamedTuple):
    """The x whose step t is `wholes[whole]` at index `start + t * step` of an axis."""

    whole: int
    axis: int
    start: Size
    step: int


@dataclass(frozen=True)
class LoweredLoop:
    """A body as a graph of (carries, xs, wholes), and what its xs and wholes are of the node's wholes."""

    body: Graph
    carries: int
    reads: tuple[StepRead, ...]
    counts: bool
    wholes: tuple[int, ...]
    length: Size

    def emit(self, carries: Sequence[Value], wholes: Sequence[Any]) -> list[Value]:
        """The results of the loop on these, in the graph being built."""
        xs = [steps_of(wholes[read.whole], read, self.length) for read in self.reads]
        xs += [iota(self.length)] if self.counts else []
        params = {"body": Body(self.body), "carries": self.carries, "steps": len(xs)}
        same = [wholes[i] for i in self.wholes]
        return results_of(emit("scan", *carries, *xs, *same, **params, length=self.length, reverse=False))


def steps_of(x: Value, read: StepRead, length: Size) -> Value:
    """The steps that a loop reads of a whole, along axis 0."""
    front = permute(x, (read.axis, *(a for a in range(x.ndim) if a != read.axis)))
    last = simplify_size(sympy.expand(read.start + (length - 1) * sympy.Integer(read.step)))
    if read.step > 0:
        return cut(front, 0, read.start, last + 1, read.step)
    return emit("flip", cut(front, 0, last, simplify_size(read.start + 1), -read.step), axes=(0,))


@dataclass(frozen=True)
class LoweredAssociative(LoweredLoop):
    """A loop over xs[1:] that begins with xs[0], which is its first result as well."""

    def emit(self, carries: Sequence[Value], wholes: Sequence[Any]) -> list[Value]:
        firsts = [cut(wholes[i], 0, 0, 1) for i in range(self.carries)]
        rest = super().emit([reshape(f, f.shape[1:]) for f in firsts], wholes)[self.carries :]
        return [emit("cat", f, r, axis=0) for f, r in zip(firsts, rest, strict=True)]


# ---------------------------------------------------------------------------------------------- a node of the trace
def is_loop(node: fx.Node) -> bool:
    """True for a node that is a loop of a known number of steps."""
    return hasattr(node.target, "fusegrad_loop") or _higher_order(node) in HIGHER_ORDER


def has_fixed_steps(node: fx.Node) -> bool:
    """True for a loop of our own whose steps can be taken one by one, since it is known how many there are."""
    return hasattr(node.target, "fusegrad_loop") and isinstance(node.args[0], int)


def operands_of(node: fx.Node, args: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """What it carries at first, and what its steps read, of these arguments."""
    name = _higher_order(node)
    if name not in HIGHER_ORDER:
        return args[1], args[2]
    return (args[1] if name == "scan" else (), [x for part in args[2 if name == "scan" else 1 :] for x in part])


def _higher_order(node: fx.Node) -> str:
    return str(node.target) if isinstance(node.target, HigherOrderOperator) else ""


def lower_loop(node: fx.Node, mode: FakeTensorMode, sizes: Sizes, lower: Lower) -> LoweredLoop:
    """The loop of a node. Raises LoweringError where it is none that a scan can be."""
    target: Any = node.target
    if (own := HIGHER_ORDER.get(_higher_order(node))) is not None:
        return own(node, mode, sizes, lower)
    length, carries, wholes = node.args
    fakes = [[_recorded(v) for v in part] for part in (carries, wholes)]  # type: ignore[union-attr]
    _require_stable(fakes[0], node.meta["val"])
    steps = _Steps(target.fusegrad_loop.body, len(fakes[0]), fakes[1], _recorded(length), sizes)
    with mode:
        inputs = [*map(_packed, fakes[0]), *steps.fakes()]
    body = _plain_body(lower(steps.graph_module(), inputs, steps.names()))
    wholes_read = tuple(i for i in steps.kept if isinstance(fakes[1][i], torch.Tensor))
    return LoweredLoop(body, len(fakes[0]), tuple(steps.reads), steps.counts, wholes_read, sizes(_recorded(length)))


def _lower_scan(node: fx.Node, mode: FakeTensorMode, sizes: Sizes, lower: Lower) -> LoweredLoop:
    """torch.ops.higher_order.scan(body, init, xs, wholes); body(*carries, *one step of each x, *wholes)"""
    init, xs, wholes = ([_recorded(v) for v in part] for part in node.args[1:4])  # type: ignore[union-attr]
    body = _body_of_higher_order(node, mode, lower, init, xs, wholes)
    reads = tuple(StepRead(i, 0, 0, 1) for i in range(len(xs)))
    kept = tuple(len(xs) + i for i, w in enumerate(wholes) if isinstance(w, torch.Tensor))
    return LoweredLoop(body, len(init), reads, False, kept, sizes(xs[0].shape[0]))


def _lower_associative(node: fx.Node, mode: FakeTensorMode, sizes: Sizes, lower: Lower) -> LoweredLoop:
    """torch.ops.higher_order.associative_scan(body, xs, wholes); body(*one, *next, *wholes)"""
    xs, wholes = ([_recorded(v) for v in part] for part in node.args[1:3])  # type: ignore[union-attr]
    body = _body_of_higher_order(node, mode, lower, [x[0] for x in xs], xs, wholes)
    body = body.returning([*body.outputs, *body.outputs])
    reads = tuple(StepRead(i, 0, 1, 1) for i in range(len(xs)))
    kept = tuple(len(xs) + i for i, w in enumerate(wholes) if isinstance(w, torch.Tensor))
    return LoweredAssociative(body, len(xs), reads, False, kept, sizes(xs[0].shape[0] - 1))


def _body_of_higher_order(
    node: fx.Node, mode: FakeTensorMode, lower: Lower, carries: Sequence[Any], xs: Sequence[Any], wholes: Sequence[Any]
) -> Graph:
    body = getattr(node.graph.owning_module, str(node.args[0].target))  # type: ignore[union-attr]
    with mode:
        inputs = [*map(_packed, carries), *(_packed(x[0]) for x in xs)]
        inputs += [_packed(w) if isinstance(w, torch.Tensor) else w for w in wholes]
    return _plain_body(lower(body, inputs, [n.name for n in body.graph.nodes if n.op == "placeholder"]))


HIGHER_ORDER: dict[str, Callable[..., LoweredLoop]] = {"scan": _lower_scan, "associative_scan": _lower_associative}


def _require_stable(carries: Sequence[Any], results: Sequence[Any]) -> None:
    """A carry has the sizes that a step gives it: equal now, and by a guard from now on."""
    for carry, result in zip(carries, results, strict=False):
        for a, b in zip(carry.shape, result.shape, strict=True):
            if not (hint_of(a) == hint_of(b) and a == b):
                raise LoweringError("what a step of a loop hands on has another size than it was given")


def _recorded(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def _packed(fake: Any) -> Any:
    """A tensor of the same kind, row-major."""
    return torch.empty(tuple(fake.shape), dtype=fake.dtype, device=fake.device)


def _plain_body(graph: Graph) -> Graph:
    """The graph with row-major results, which has to be without effects."""
    if Body(graph).has_effects:
        raise LoweringError("a step of a loop draws random numbers, calls another Function, or writes to its arguments")
    return graph.returning(graph.outputs, [None if o is None else contiguous_strides(o.shape) for o in graph.outputs])


# ---------------------------------------------------------------------------------------------- the body, as fx
class _Steps:
    """A body whose reads at t are inputs: (carries, xs, t as a tensor, wholes that are read otherwise)."""

    def __init__(self, body: fx.GraphModule, carries: int, wholes: Sequence[Any], length: Any, sizes: Sizes) -> None:
        self.owner, self.graph = body, copy.deepcopy(body.graph)
        self.wholes, self.length, self.sizes = wholes, length, sizes
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        self.t, self.carry_nodes = placeholders[0], placeholders[1 : 1 + carries]
        self.whole_nodes = {node: i for i, node in enumerate(placeholders[1 + carries :])}
        self.reads: list[StepRead] = []
        self.read_nodes: dict[StepRead, fx.Node] = {}
        self.numbers: set[fx.Node] = {self.t}
        self.tensors: dict[fx.Node, fx.Node] = {}
        self._rewrite()

    # ------------------------------------------------------------------ what is left
    @property
    def kept(self) -> list[int]:
        """The wholes that a step reads as they are."""
        return [i for node, i in self.whole_nodes.items() if node.users]

    def graph_module(self) -> fx.GraphModule:
        return fx.GraphModule(self.owner, self.graph)

    def fakes(self) -> Iterator[Any]:
        """For each input behind the carries."""
        for read in self.reads:
            shape = list(self.wholes[read.whole].shape)
            del shape[read.axis]
            like = self.wholes[read.whole]
            yield torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
        if self.counts:
            yield torch.empty((), dtype=torch.int64, device=next(w.device for w in self._tensors()))
        for i in self.kept:
            yield _packed(self.wholes[i]) if isinstance(self.wholes[i], torch.Tensor) else self.wholes[i]

    def _tensors(self) -> Iterator[torch.Tensor]:
        candidates = [*self.wholes, *(n.meta.get("val") for n in self.graph.nodes), torch.empty(0)]
        return (c for c in candidates if isinstance(c, torch.Tensor))

    def names(self) -> list[str]:
        return [n.name for n in self.graph.nodes if n.op == "placeholder"]

    # ------------------------------------------------------------------ the rewriting
    def _rewrite(self) -> None:
        # first what reads one step of a whole, then what else has a number that t is in
        for node in list(self.graph.nodes):
            if node.op == "call_function" and self.numbers & set(node.all_input_nodes):
                self._rewrite_node(node)
        self.graph.eliminate_dead_code()
        for node in [n for n in self.whole_nodes if not n.users]:
            self.graph.erase_node(node)
        self.counts = self.t in self.tensors and bool(self.tensors[self.t].users)
        self._order_inputs()

    def _rewrite_node(self, node: fx.Node) -> None:
        if _is_python(node.target):
            self.numbers.add(node)
            return
        with self.graph.inserting_before(node):
            steps = self._read_steps(node)
            if steps is None:
                steps = self._with_tensors(node)
        steps.meta.update(node.meta)
        node.replace_all_uses_with(steps)
        self.graph.erase_node(node)

    def _read_steps(self, node: fx.Node) -> fx.Node | None:
        """A select, or a slice of fixed length, of a whole at t; None of anything else."""
        source, axis = _without_whole_slices(node.args[0]), node.args[1] if len(node.args) > 1 else 0
        if source not in self.whole_nodes or node.target not in (aten.select.int, aten.slice.Tensor):
            return None
        first = node.args[2]
        if node.target is aten.select.int:
            return self._input_of(source, axis, first, 0)
        width = self._width_of(node)
        if not isinstance(width, int) or not 0 < width <= MOST_IN_A_WINDOW:
            return None
        parts = [self._input_of(source, axis, first, i) for i in range(width)]
        return self.graph.call_function(aten.stack.default, (parts, axis))

    def _width_of(self, node: fx.Node) -> Any:
        """The number of elements of a slice, where it is the same in all steps; else None."""
        if len(node.args) < 4 or node.args[4:] not in ((), (1,)):
            return None
        width, following = (self._at(node.args[3], t) - self._at(node.args[2], t) for t in (0, 1))
        is_fixed = sympy.expand(self.sizes(width) - self.sizes(following)) == 0
        return width if is_fixed else None

    def _input_of(self, source: Any, axis: Any, index: Any, shift: int) -> fx.Node:
        whole = self.whole_nodes[source]
        fake = self.wholes[whole]
        read = self._step_read(whole, axis % fake.dim(), index, shift)
        if read not in self.read_nodes:
            with self.graph.inserting_before(self.t):
                self.read_nodes[read] = self.graph.placeholder(f"step_{len(self.reads)}")
            self.reads.append(read)
        return self.read_nodes[read]

    def _step_read(self, whole: int, axis: int, index: Any, shift: int) -> StepRead:
        first, second, third, last = (self._at(index, t) + shift for t in (0, 1, 2, self.length - 1))
        step, again = (self.sizes(b) - self.sizes(a) for a, b in ((first, second), (second, third)))
        if sympy.expand(step - again) != 0 or not sympy.sympify(step).is_Integer or step == 0:
            raise LoweringError("a loop reads its steps at places that do not follow each other")
        if (hint_of(first) < 0) != (hint_of(last) < 0):
            raise LoweringError("a loop reads its steps from both ends at once")
        start = self.sizes(first + self.wholes[whole].shape[axis] if hint_of(first) < 0 else first)
        return StepRead(whole, axis, start, int(step))

    def _at(self, number: Any, t: Any) -> Any:
        """The value of a number in step t."""
        if not isinstance(number, fx.Node):
            return number
        if number in self.whole_nodes:
            return self.wholes[self.whole_nodes[number]]
        if number is self.t:
            return t
        if number not in self.numbers:
            return number.meta["val"]
        target: Any = number.target
        return target(*(self._at(a, t) for a in number.args))

    # ------------------------------------------------------------------ t as a tensor
    def _with_tensors(self, node: fx.Node) -> fx.Node:
        """The operation with tensors for the numbers that t is in."""
        if node.target is aten.slice.Tensor and (width := self._width_of(node)) is not None:
            if any(hint_of(self._at(node.args[2], t)) < 0 for t in (0, self.length - 1)):
                raise LoweringError("a step of a loop cuts a piece of a tensor at a place that is counted from its end")
            return self.graph.call_function(_cut_at, (*node.args[:2], self._tensor_of(node.args[2]), width))
        target, args = self._taking_tensors(node)
        if any(self._is_float(n) for n in node.all_input_nodes):
            return self.graph.call_function(_of_floats(target, node.meta["val"].dtype), args, node.kwargs)
        return self.graph.call_function(target, args, node.kwargs)

    def _is_float(self, number: fx.Node) -> bool:
        """Whether a number of t is a float."""
        return number in self.numbers and isinstance(number.meta.get("val"), float | torch.SymFloat)

    def _tensor_of(self, number: Any) -> Any:
        return self._tensor(number) if isinstance(number, fx.Node) and number in self.numbers else number

    def _taking_tensors(self, node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
        target: Any = node.target
        settings: list[fx.Node] = []
        fx.node.map_arg(node.kwargs, settings.append)
        if self.numbers & set(settings):
            raise LoweringError(f"`{target}` has the number of its step among its settings")
        args: Any = fx.node.map_arg(node.args, lambda n: self._tensor(n) if n in self.numbers else n)
        if target in _AT_TENSORS:
            return _AT_TENSORS[target], args
        if not isinstance(target, OpOverload):
            raise LoweringError(f"`{target}` is given the number of a step")
        places = [at for at, n in enumerate(node.args) if isinstance(n, fx.Node) and n in self.numbers]
        with_tensors = taking_tensors(target, places)
        if with_tensors is None:
            raise LoweringError(f"`{target}` works with the number of its step")
        return with_tensors, args

    def _tensor(self, number: fx.Node) -> fx.Node:
        """t, or what is made of it, as a tensor of one number."""
        if number not in self.tensors:
            self.tensors[number] = self._made_tensor(number)
        return self.tensors[number]

    def _made_tensor(self, number: fx.Node) -> fx.Node:
        if number is self.t:
            with self.graph.inserting_before(self.t):
                return self.graph.placeholder("step_number")
        target: Any = number.target
        if self._is_float(number):
            args = [self._tensor(a) if isinstance(a, fx.Node) and a in self.numbers else a for a in number.args]
            return self.graph.call_function(_ON_FLOATS[target], tuple(args))
        if target not in _ON_TENSORS:
            raise LoweringError(f"a step of a loop computes `{target.__name__}` of its number")
        args = [self._tensor(a) if isinstance(a, fx.Node) and a in self.numbers else a for a in number.args]
        if not isinstance(args[0], fx.Node) or args[0] not in self.tensors.values():
            args = [args[1], args[0]]  # both commute
        return self.graph.call_function(_ON_TENSORS[target], tuple(args))

    def _order_inputs(self) -> None:
        """Carries, steps, the number of the step, wholes."""
        number = self.tensors.get(self.t)
        steps = [self.read_nodes[r] for r in self.reads]
        wholes = [n for n in self.whole_nodes if n.users]
        for dead in [self.t, *([number] if number is not None and not number.users else [])]:
            self.graph.erase_node(dead)
        counted = [number] if self.counts and number is not None else []
        anchor = next(n for n in self.graph.nodes if n.op != "placeholder")
        for node in (*self.carry_nodes, *steps, *counted, *wholes):
            anchor.prepend(node)


_ON_TENSORS = {operator.add: aten.add.Tensor, operator.mul: aten.mul.Tensor}
def _in_float64(call: Callable[..., Any]) -> Callable[..., Any]:
    """What Python computes, of tensors of one number; numbers are as they are."""

    def computed(*args: Any) -> Any:
        return call(*(a.to(torch.float64) if isinstance(a, torch.Tensor) else a for a in args))

    return computed


_ON_FLOATS: dict[Any, Callable[..., Any]] = {
    operator.add: _in_float64(torch.add),
    operator.sub: _in_float64(torch.sub),
    operator.mul: _in_float64(torch.mul),
    operator.truediv: _in_float64(torch.true_divide),
    operator.pow: _in_float64(torch.pow),
    math.sqrt: _in_float64(torch.sqrt),
    math.exp: _in_float64(torch.exp),
    math.cos: _in_float64(torch.cos),
}


def _without_whole_slices(source: Any) -> Any:
    """What `x[:]` is of: views of a step have these where they are taken under autograd."""
    while isinstance(source, fx.Node) and source.target is aten.slice.Tensor and source.args[2:] in WHOLE_SLICES:
        source = source.args[0]
    return source


WHOLE_SLICES = ((), *((start, sys.maxsize, *step) for start in (0, None) for step in ((), (1,))))


def _is_python(target: Any) -> bool:
    """Whether a node's target is arithmetic of Python's."""
    name = getattr(target, "__name__", "")
    return any(getattr(module, name, None) is target for module in (operator, math))


def _of_floats(target: Any, dtype: torch.dtype) -> Callable[..., Any]:
    """An operation whose numbers are tensors, as eager has it of Python's floats: low floats meet them in float32."""
    low = (torch.bfloat16, torch.float16)

    def called(*args: Any, **settings: Any) -> Any:
        is_low = [dtype in low and isinstance(a, torch.Tensor) and a.dtype in low for a in args]
        given = (a.float() if wide else a for a, wide in zip(args, is_low, strict=True))
        return target(*given, **settings).to(dtype)

    return called


def _select_at(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    return x.index_select(dim, index.reshape(1)).squeeze(dim)


def _cut_at(x: torch.Tensor, dim: int, start: Any, width: Any) -> torch.Tensor:
    return x.index_select(dim, torch.arange(width, device=x.device) + start)


def _put_at(x: torch.Tensor, source: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    return x.index_copy(dim, index.reshape(1), source.unsqueeze(dim))


_AT_TENSORS: dict[Any, Callable[..., Any]] = {
    aten.select.int: _select_at,
    aten.select_scatter.default: _put_at,
}
"""Operations at an index that is data."""
