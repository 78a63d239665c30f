"""A short trace as a list of steps: what is called, on what; sizes are written out, and items are parts of a list."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ...ir.lazy_attribute import lazy_attribute
from ..arithmetic import SYMBOLIC
from ..trace import Trace
from .affine import ONE, Number, number_of
from .lengths import is_number
from .node import InnerLoop, loop_of
from .reasons import NotRolled

UNBIND, SPLIT = torch.ops.aten.unbind.int, torch.ops.aten.split.Tensor
META = ("fusegrad_origin", "fusegrad_cut", "fusegrad_unversioned", "fusegrad_unrecorded")


@dataclass(frozen=True)
class Ref:
    """A value: an input (`~index`), or a result of a step; `port` says which one of several."""

    step: int
    port: int | None = None


@dataclass(frozen=True)
class Constant:
    """What is no tensor and no whole number; `key` is equal where it is."""

    value: Any = field(compare=False)
    key: Hashable


@dataclass(frozen=True)
class Expression:
    """A number made of sizes that is no whole one."""

    kind: type
    expr: Any


Leaf = Ref | Constant | Expression | Number | list[Ref]
"""What a step is given, in the order of its arguments; a list of tensors is one."""


@dataclass
class Step:
    """One call. form: its arguments with a mark for each leaf; token: equal for steps that do the same thing."""

    target: Any
    form: Any
    leaves: list[Any]
    token: Hashable
    meta: dict[str, Any]
    value: Any

    @property
    def place(self) -> str:
        """`file:line` of the user's."""
        origin = self.meta.get("fusegrad_origin")
        return origin[1] if origin else "unknown"


@dataclass
class Program:
    """The steps of one trace at one length, and its results.

    had_writes: the method writes in place; these do not. memory: what its inputs and results share (`shared_memory`).
    strides: those of its results, before writes were taken out.
    """

    length: int
    inputs: int
    steps: list[Step]
    results: list[Any]
    trace: Trace
    had_writes: bool = False
    memory: Sequence[int | None] = ()
    strides: Sequence[torch.Size | None] = ()


def is_sliced(step: Step) -> bool:
    """True for a step whose results are the slices of a tensor, one for each index."""
    return step.target is UNBIND or (step.target is SPLIT and step.leaves[1] == {ONE: 1})


class Mark:
    """Where a leaf stands."""

    def __repr__(self) -> str:
        return "_"


MARK = Mark()


def with_leaves(form: Any, each: Callable[[], Any]) -> Any:
    """The arguments of a step again, from its form."""
    if form is MARK:
        return each()
    if isinstance(form, dict):
        return {key: with_leaves(v, each) for key, v in form.items()}
    if isinstance(form, list | tuple):
        return type(form)(with_leaves(v, each) for v in form)
    return form


def program_of(trace: Trace, length: int) -> Program:
    """The steps of a trace. Raises NotRolled where it has some that no loop may have."""
    reader = _Reader(trace)
    for node in trace.graph_module.graph.nodes:
        reader.read(node)
    inputs = sum(node.op == "placeholder" for node in trace.graph_module.graph.nodes)
    return with_shared_views(Program(length, inputs, reader.steps, reader.results, trace))


WHOLE_VIEWS = frozenset(
    getattr(torch.ops.aten, name).default for name in ("t", "permute", "view", "expand", "unsqueeze", "detach", "alias")
) | {torch.ops.aten.transpose.int, torch.ops.aten.squeeze.dim}
"""Views of all of a tensor: those of a part are of another part in each step."""
OFTEN = 3
"""Times from which on the same view of an input is taken that it is one of a loop's steps that takes it."""


def with_shared_views(program: Program) -> Program:
    """The same program, a view of inputs that every step of a loop takes anew taken once, before it: `h @ w.T`.

    A loop would hand it on as another one in each step, from a forward to its derived backward.
    """
    return _Sharing(program).program()


class _Sharing:
    def __init__(self, program: Program) -> None:
        self.source = program
        self.first: dict[str, int] = {}
        self.same: dict[int, int] = {}
        for number, step in enumerate(program.steps):
            if self._is_view(step):
                self.same[number] = self.first.setdefault(self._key(step), number)
        counts = Counter(self.same.values())
        self.shared = {n: first for n, first in self.same.items() if counts[first] >= OFTEN}
        early = self._above(set(self.shared.values()))
        self.order = [*early, *(n for n in range(len(program.steps)) if n not in self.shared and n not in early)]

    def program(self) -> Program:
        if not self.shared:
            return self.source
        steps = [replace(self.source.steps[n], leaves=self._renamed(self.source.steps[n].leaves)) for n in self.order]
        return replace(self.source, steps=steps, results=self._renamed(self.source.results))

    def _is_view(self, step: Step) -> bool:
        """True for a view of what there is before all loops, or of such a view."""
        is_early = all(ref.step < 0 or ref.step in self.same for ref in refs_in(step.leaves))
        return step.target in WHOLE_VIEWS and is_early

    def _key(self, step: Step) -> str:
        """The same where steps are; of the views among its operands the first that is the same counts."""
        leaves = [Ref(self.same.get(r.step, r.step), r.port) if isinstance(r, Ref) else r for r in step.leaves]
        return repr((step.target, step.form, leaves))

    def _above(self, steps: set[int]) -> list[int]:
        """These steps with all that they are made of, in order."""
        found = set(steps)
        for number in sorted(steps, reverse=True):
            found |= set(self._above({r.step for r in refs_in(self.source.steps[number].leaves) if r.step >= 0}))
        return sorted(found)

    @lazy_attribute
    def _new(self) -> dict[int, int]:
        place = {old: new for new, old in enumerate(self.order)}
        return place | {n: place[first] for n, first in self.shared.items()}

    def _renamed(self, leaves: Sequence[Any]) -> list[Any]:
        return [self._renamed_leaf(leaf) for leaf in leaves]

    def _renamed_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, list):
            return self._renamed(leaf)
        return Ref(self._new[leaf.step], leaf.port) if isinstance(leaf, Ref) and leaf.step >= 0 else leaf


class _Reader:
    def __init__(self, trace: Trace) -> None:
        self.trace, self.refs = trace, dict[fx.Node, Any]()
        self.steps: list[Step] = []
        self.results: list[Any] = []
        self.inputs = 0

    def read(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.refs[node] = Ref(~self.inputs)
            self.inputs += 1
        elif node.op == "get_attr":
            tensor = getattr(self.trace.graph_module, str(node.target))
            self.refs[node] = Constant(tensor, (str(tensor.dtype), str(tensor.device), repr(tensor.tolist())))
        elif node.op == "output":
            self.results = [self.leaf(value) for value in node.args[0]]  # type: ignore[union-attr]
        elif node.target is operator.getitem and isinstance(self.refs.get(node.args[0]), Ref):  # type: ignore[arg-type]
            self.refs[node] = Ref(self.refs[node.args[0]].step, node.args[1])  # type: ignore[index,arg-type]
        elif not isinstance(node.meta.get("val"), SYMBOLIC):
            self.refs[node] = Ref(len(self.steps))
            self.steps.append(self.step(node))

    def step(self, node: fx.Node) -> Step:
        _require_plain(node)
        leaves: list[Any] = []
        target: Any = node.target
        given: Sequence[Any] = node.args
        if (loop := loop_of(target)) is not None:
            target = InnerLoop(loop)
            given = tuple(target.operands(node.args))
        args = tuple(self.form(arg, leaves) for arg in given)
        form = (args, {key: self.form(arg, leaves) for key, arg in node.kwargs.items()})
        meta = {key: node.meta[key] for key in META if key in node.meta}
        kinds = tuple(map(_kind, leaves))
        token = (target, repr(form), kinds, tuple((k, str(v)) for k, v in meta.items()))
        return Step(target, form, leaves, token, meta, node.meta.get("val"))

    def form(self, value: Any, leaves: list[Any]) -> Any:
        if isinstance(value, list | tuple) and not self._is_list_of_tensors(value):
            return (list if isinstance(value, list) else tuple)(self.form(v, leaves) for v in value)
        if isinstance(value, dict):
            return {key: self.form(v, leaves) for key, v in value.items()}
        leaves.append(self.leaf(value))
        return MARK

    def _is_list_of_tensors(self, value: Sequence[Any]) -> bool:
        return bool(value) and all(isinstance(v, fx.Node) and isinstance(self.refs.get(v), Ref) for v in value)

    def leaf(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self.refs[v] for v in value]
        if isinstance(value, fx.Node) and value in self.refs:
            return self.refs[value]
        if isinstance(value, fx.Node):
            value = value.meta["val"]
        if is_number(value):
            return number_of(value)
        if isinstance(value, SYMBOLIC):
            return Expression(type(value), value.node.expr)
        return constant_of(value)


def constant_of(value: Any) -> Constant:
    """A leaf that is no tensor."""
    return Constant(value, (type(value).__name__, repr(value)))


def _kind(leaf: Any) -> Hashable:
    """What two leaves have in common that may be those of the same call."""
    if isinstance(leaf, Constant | Expression):
        return leaf
    return type(leaf).__name__


def _require_plain(node: fx.Node) -> None:
    """Raises NotRolled for a call that may write, or is no operation of torch's."""
    if loop_of(node.target) is not None:
        return
    schema = getattr(node.target, "_schema", None)
    if not isinstance(node.target, OpOverload) or schema is None:
        raise NotRolled(f"it calls `{getattr(node.target, '__name__', node.target)}`, which stays a call")
    if schema.is_mutable:
        raise NotRolled("it writes to a tensor in place")


def refs_in(leaves: Sequence[Any]) -> Iterator[Ref]:
    """The values that a step reads."""
    for leaf in leaves:
        if isinstance(leaf, Ref):
            yield leaf
        elif isinstance(leaf, list):
            yield from leaf
