"""ATen -> IR: a captured graph is replayed on its fakes, functionalised, under a mode that writes it as primitives.

    functionalize(replay(gm))  ->  ops that write nothing  ->  a rule, a formula, a decomposition, an `aten` node

Nothing is unknown: an op without a rule becomes an `aten` node (`aten_effect` where it draws random numbers).
LoweringError is left for graphs that are not about tensor values alone: sizes read from data, memory read by strides,
several devices.

The arguments of an `aten` or `call` node are its `spec`, (args, kwargs): Arg(i) for operand i, tuples for lists,
((name, value), ..) for keywords, numbers and expressions as they are, and for torch's own words ("dtype", "f32"),
("device", ""), ("layout", "strided"), ("memory_format", "contiguous_format"). The device "" is that of the graph.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from ...ir import Graph, TensorType, Value, building, emit, provenance
from ...ir.errors import LoweringError, TypeRuleError
from ...ir.graph import Origin
from ...ir.infer import same_shape, sizes_equal
from ...ir.prims import Arg
from ..arithmetic import SYMBOLIC
from ..capture.data import reads_data
from ..containers import tensors_in
from ..dtypes import from_torch
from ..sizes import Sizes, agree_on_factors, hint_of
from ..torch_private import FakeTensor, FakeTensorMode, enable_python_dispatcher, no_autocast
from . import rules_composite, rules_index, rules_layout, rules_pointwise, rules_reduce  # noqa: F401  they fill the tables
from .boolean_masks import rewrite_masks
from .loops import LoweredLoop, has_fixed_steps, is_loop, lower_loop, operands_of
from .numbers import numbers_as_tensors
from .rules import Call, cast, composites, expand, full, iota, reshape, rules
from .rules_composite import decompositions

if TYPE_CHECKING:
    from ..trace import Trace

MOST_CONSTANT_ELEMENTS = 256
_MOST_ATTEMPTS = 3


def lower(
    gm: fx.GraphModule, fakes: Sequence[Any], *, name: str = "graph", input_names: Sequence[str] | None = None
) -> Graph:
    """The IR graph of a captured ATen graph. Raises LoweringError where the graph has to run as it was captured.

    fakes: one per placeholder, tensors and SymInts of one FakeTensorMode. Only tensors become inputs of the graph, in
    order; sizes are expressions over the symbols of the mode, which the caller binds from shapes, strides and SymInts.
    Outputs that are no tensors are None. A guard that lowering adds may rename symbols: then it starts again.
    """
    gm = rewrite_masks(gm)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    inputs = [
        _fake_of(f, n) for f, n in zip([*fakes, *[None] * (len(placeholders) - len(fakes))], placeholders, strict=True)
    ]
    mode = _fake_mode(gm, inputs)
    names = list(input_names or (str(n.target) for n in placeholders))
    # A guard that a rule asks for may make two sizes one: then what was written before has the old name.
    for attempt in range(_MOST_ATTEMPTS):
        known = _equalities(mode)
        try:
            graph = _lower_once(gm, inputs, mode, name, names)
        except LoweringError:
            if attempt + 1 == _MOST_ATTEMPTS or _equalities(mode) == known:
                raise
            continue
        if not _products_are_proved(graph):
            agree_on_factors(mode.shape_env)
        if _equalities(mode) == known:
            break
    return numbers_as_tensors(graph)


def _products_are_proved(graph: Graph) -> bool:
    """False where the axes of two operands are equal by a guard alone: no pass could write that product as a sum."""
    return all(_is_proved(v) for v in graph.order() if v.prim == "dot")


def _is_proved(dot: Value) -> bool:
    axes = zip(dot.params["x_axes"], dot.args[0].shape, strict=True)
    sizes = dict(zip(dot.params["y_axes"], dot.args[1].shape, strict=True))
    return all(sizes_equal(n, sizes[a]) for a, n in axes if a in sizes)


def _lower_once(
    gm: fx.GraphModule, inputs: Sequence[Any], mode: FakeTensorMode, name: str, names: Sequence[str]
) -> Graph:
    graph = Graph(name)
    lowering = Lowering(graph, inputs, names)
    replay = _Replay(gm, lowering, _loops_of(gm, mode, lowering.sizes, f"{name}_step"))
    with mode, torch.no_grad(), no_autocast(), enable_python_dispatcher(), building(graph), lowering:
        outputs = torch.func.functionalize(lambda *args: replay.run(*args), remove="mutations")(*inputs)
    flat = pytree.tree_leaves(outputs, is_leaf=lambda x: x is None)
    _one_device([o for o in flat if isinstance(o, torch.Tensor)], lowering.device)
    with building(graph):
        values = [lowering.value(o) if isinstance(o, torch.Tensor) else None for o in flat]
    return graph.returning(values, _output_strides(gm, values, lowering.sizes))


def _loops_of(gm: fx.GraphModule, mode: FakeTensorMode, sizes: Sizes, name: str) -> dict[fx.Node, LoweredLoop]:
    """The loops of a graph, lowered before it: no mode of the graph's own may see what is in their bodies."""

    def lower_step(step: fx.GraphModule, inputs: Sequence[Any], names: Sequence[str]) -> Graph:
        return _lower_once(rewrite_masks(step), inputs, mode, name, names)

    return {n: lower_loop(n, mode, sizes, lower_step) for n in gm.graph.nodes if is_loop(n)}


def _output_strides(gm: fx.GraphModule, values: Sequence[Value | None], sizes: Sizes) -> list[Any]:
    """The strides that the captured graph's own outputs have."""
    result = next(n for n in gm.graph.nodes if n.op == "output").args[0]
    nodes = pytree.tree_leaves(result, is_leaf=lambda x: x is None)
    recorded = [None if v is None else n.meta.get("val") for v, n in zip(values, nodes, strict=True)]
    return [None if r is None else sizes.tree(r.stride()) for r in recorded]


def _fake_of(fake: Any, placeholder: fx.Node) -> Any:
    """The fake of an input: the caller's, or, where it gave none, the one that the capture recorded."""
    if fake is None or (isinstance(fake, torch.Tensor) and not isinstance(fake, FakeTensor)):
        return placeholder.meta.get("val", fake)
    return fake


def _fake_mode(gm: fx.GraphModule, inputs: Sequence[Any]) -> FakeTensorMode:
    metas = (n.meta.get("val") for n in gm.graph.nodes)
    for item in pytree.tree_leaves([list(inputs), list(metas)]):
        if isinstance(item, FakeTensor):
            return item.fake_mode
    raise LoweringError("the graph has no tensors")


def lowering_key(trace: Trace) -> tuple[Any, ...]:
    """The state that a graph depends on besides the trace: what is known of sizes, the layouts of its results."""
    mode = next((f.fake_mode for f in trace.fakes if isinstance(f, FakeTensor)), None)
    results = trace.graph_module.graph.output_node().all_input_nodes
    return 0 if mode is None else _equalities(mode), tuple(id(n.meta.get("val")) for n in results)


def _equalities(mode: FakeTensorMode) -> int:
    """How much is known by now of which sizes are equal."""
    env = mode.shape_env
    return 0 if env is None else len(env.replacements) + sum(isinstance(g.expr, sympy.Eq) for g in env.guards)


# ---------------------------------------------------------------------------------------------- the mode
class Lowering(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every functional op on fakes and adds what it computes to the graph. `latest` is the newest result."""

    def __init__(self, graph: Graph, inputs: Sequence[Any], names: Sequence[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.sizes = graph, Sizes()
        self.device = _one_device([g for g in inputs if isinstance(g, torch.Tensor)])
        self.latest: Value | None = None
        self.read_by: Callable[[OpOverload, int], bool] = lambda op, index: True
        self._values: dict[int, Value] = {}
        self._alive: list[torch.Tensor] = []
        self._inputs: dict[int, int] = {}
        for tensor, name in zip(inputs, names, strict=True):
            if isinstance(tensor, torch.Tensor):
                self._add_input(tensor, name)

    def _add_input(self, tensor: torch.Tensor, name: str) -> None:
        self._inputs[id(tensor)] = len(self.graph.inputs)
        self.bind(tensor, self.graph.input(self.aval(tensor), name, self.sizes.tree(tensor.stride())))

    # ------------------------------------------------------------------ tensors and values
    def aval(self, tensor: torch.Tensor) -> TensorType:
        return TensorType(self.sizes.tree(tuple(tensor.shape)), from_torch(tensor.dtype))

    def bind(self, tensor: torch.Tensor, value: Value) -> None:
        self._values[id(tensor)] = value
        self._alive.append(tensor)
        self.latest = value

    def value(self, tensor: torch.Tensor) -> Value:
        """The value of a tensor that an op made, else of a constant."""
        if id(tensor) not in self._values:
            self.bind(tensor, _constant_value(tensor, self.aval(tensor)))
        return self._values[id(tensor)]

    def _arguments(self, item: Any) -> Any:
        """The arguments of a call as rules take them: values and expressions."""
        return pytree.tree_map(lambda x: self.value(x) if isinstance(x, torch.Tensor) else self.sizes(x), item)

    # ------------------------------------------------------------------ the ladder
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim" or not _has_tensors(func):
            return func(*args, **kwargs)
        # A write to an input is the one write that functionalisation leaves: it becomes a mutation of the graph.
        if func is torch.ops.aten.copy_.default and id(args[0]) in self._inputs:
            return self._write_input(args[0], args[1])
        # By our own rule where there is one, which knows how eager rounds; torch's decompositions know less of that.
        _refuse(func, args)
        for step in (self._by_rule, self._by_formula, self._by_decomposition):
            result = step(func, args, kwargs)
            if result is not NotImplemented:
                return result
        return self._extern(func, args, kwargs)

    def _write_input(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        index = self._inputs[id(target)]
        aval = self.graph.inputs[index].aval
        value = cast(self.value(source), aval.dtype)
        first = len(aval.shape) - value.ndim
        own = (n if m == 1 else m for m, n in zip(value.shape, aval.shape[first:], strict=True))  # 3 where it was s25
        self.graph.mutations[index] = expand(value, (*aval.shape[:first], *own))
        return target

    def _by_rule(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        rule = rules.get(func)
        if rule is None or _is_complex((args, kwargs)):
            return NotImplemented
        result = func(*args, **kwargs)
        if _is_complex(result):
            return NotImplemented
        tensors = tensors_in(result)
        call = Call(func, args, tuple(map(self.aval, tensors)), self.sizes, lambda i: self.read_by(func, i))
        try:
            values = rule(call, *self._arguments(args), **self._arguments(kwargs))
        except TypeRuleError:  # sizes that cannot be proved equal
            return self._without_proof(result)
        # A rule may give up late: nothing is bound before its values are known to fit.
        values = values if isinstance(values, tuple) else (values,)
        if len(values) != len(tensors) or values == (None,):
            return NotImplemented
        if not all(map(_fits, values, call.outs)):
            return self._without_proof(result)
        for tensor, value in zip(tensors, values, strict=True):
            if value is not None:
                self.bind(tensor, value)
        return result

    def _without_proof(self, result: Any) -> Any:
        """No rule applies; where equal products have equal factors now, a guard says so, and lowering starts again."""
        for tensor in tensors_in(result)[:1]:
            if isinstance(tensor, FakeTensor) and tensor.fake_mode.shape_env is not None:
                agree_on_factors(tensor.fake_mode.shape_env)
        return NotImplemented

    def _by_formula(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        formula = composites.get(func)
        return NotImplemented if formula is None or _is_complex((args, kwargs)) else self._run(formula, args, kwargs)

    def _by_decomposition(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        table = decompositions()
        if func in table and not _is_complex((args, kwargs)):
            result = self._run(table[func], args, kwargs)
            if result is not NotImplemented:
                return result
        return self._run(func.decompose, args, kwargs)

    def _run(self, formula: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A formula in torch, under this mode; NotImplemented where it writes in place or asks for data."""
        try:
            with self:
                return formula(*args, **kwargs)
        except (LoweringError, NotImplementedError):
            return NotImplemented

    # ------------------------------------------------------------------ nodes that call torch
    def _extern(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        effect = torch.Tag.nondeterministic_seeded in func.tags or not tensors_in(result)
        self._emit_extern("aten_effect" if effect else "aten", "op", str(func), (args, kwargs), result)
        return result

    def call(self, target: Callable[..., Any], arguments: Any, result: Any) -> None:
        """One `call` node; `result` are the fakes that stand for what it returns."""
        self._emit_extern("call", "target", target, arguments, result)

    def loop(self, loop: LoweredLoop, operands: Sequence[Any], results: Sequence[Any]) -> None:
        """A `scan`; `results` are the fakes that stand for what it returns."""
        carries, wholes = ([self.value(o) if isinstance(o, torch.Tensor) else o for o in part] for part in operands)
        try:
            values = loop.emit(carries, wholes)
        except TypeRuleError as error:
            raise LoweringError(f"a step of a loop does not fit the next: {error}") from error
        for tensor, value in zip(results, values, strict=True):
            self.bind(tensor, value)

    def _emit_extern(self, prim: str, key: str, target: Any, arguments: Any, result: Any) -> None:
        tensors, arguments_spec = tensors_in(result), _ArgumentSpec(self)
        if any(t.layout is not torch.strided for t in (*tensors_in(arguments), *tensors)):
            raise LoweringError(f"`{target}` works on a tensor that is not strided")
        axis_order = _with_axis_order if prim == "aten_effect" else None
        layout = _with_dense_order if _reads_memory(prim, target) else axis_order
        spec = arguments_spec.of(arguments if layout is None else pytree.tree_map(layout, arguments))
        avals = tuple(map(self.aval, tensors))
        self.device = _one_device(tensors, self.device)
        node = emit(prim, *arguments_spec.operands, spec=spec, avals=avals, **{key: target})
        for index, tensor in enumerate(tensors):
            self.bind(tensor, emit("pick", node, index=index) if len(tensors) > 1 else node)


class _ArgumentSpec:
    """Writes the arguments of one node as its `spec`; the tensors among them become its `operands`, in order."""

    def __init__(self, lowering: Lowering) -> None:
        self.lowering = lowering
        self.operands: list[Value] = []

    def of(self, item: Any) -> Any:
        lowering = self.lowering
        if isinstance(item, LaidOut):
            return ("axes", (self.of(item.tensor), item.axes))
        if isinstance(item, torch.Tensor):
            lowering.device = _one_device([item] if item.dim() else [], lowering.device)
            self.operands.append(lowering.value(item))
            return Arg(len(self.operands) - 1)
        if isinstance(item, dict):
            return tuple((k, self.of(v)) for k, v in item.items())
        if isinstance(item, (list, tuple)):
            return tuple(map(self.of, item))
        return lowering.sizes(item) if isinstance(item, SYMBOLIC) else self._torch_word(item)

    def _torch_word(self, item: Any) -> Any:
        if isinstance(item, torch.device):
            return self._same_device(item)
        if isinstance(item, torch.dtype):
            return ("dtype", from_torch(item))
        if isinstance(item, (torch.layout, torch.memory_format)):
            return (type(item).__name__, str(item).removeprefix("torch."))
        if not isinstance(item, Hashable):
            raise LoweringError(f"an argument of type {type(item).__name__} cannot be written down")
        return item

    def _same_device(self, device: torch.device) -> tuple[str, str]:
        graph_device = self.lowering.device or device
        if device.type != graph_device.type or device.index not in (None, graph_device.index):
            raise LoweringError(f"it works on {graph_device} and on {device}")
        return ("device", "")


@dataclass(frozen=True)
class LaidOut:
    """A tensor whose layout matters: random numbers are drawn in the order of memory, and code that is called may read
    memory as it lies there. axes: outermost first."""

    tensor: torch.Tensor
    axes: tuple[int, ...]


def _reads_memory(prim: str, target: Any) -> bool:
    """True if other code than torch's own operations is called: values have no strides, what it is given has to."""
    if prim == "call":
        return not hasattr(target, "opaque")  # which lays out its arguments itself
    return not str(target).startswith(("aten.", "prims.", "prim."))


def _with_dense_order(item: Any) -> Any:
    """A tensor dense in memory, with the order of axes that it has here."""
    laid = _with_axis_order(item)
    return LaidOut(item, tuple(range(item.dim()))) if laid is item and isinstance(item, torch.Tensor) else laid


def _with_axis_order(item: Any) -> Any:
    """Where it is a tensor that is not row-major, with the order of its axes; expanded ones stay where they are."""
    if not isinstance(item, torch.Tensor):
        return item
    steps = [hint_of(n) for n in item.stride()]
    moving = [i for i, step in enumerate(steps) if step and hint_of(item.shape[i]) != 1]
    supply = iter(sorted(moving, key=lambda i: (-steps[i], i)))
    axes = tuple(next(supply) if i in moving else i for i in range(item.dim()))
    return item if axes == tuple(range(item.dim())) else LaidOut(item, axes)


def _has_tensors(func: OpOverload) -> bool:
    return any("Tensor" in str(part.type) for part in (*func._schema.arguments, *func._schema.returns))


def _is_complex(item: Any) -> bool:
    return any(t.is_complex() for t in tensors_in(item))


def _fits(value: Value | None, aval: TensorType) -> bool:
    return value is None or (value.dtype == aval.dtype and same_shape(value.shape, aval.shape))


def _one_device(tensors: Sequence[torch.Tensor], device: torch.device | None = None) -> torch.device | None:
    for tensor in tensors:
        if device is not None and tensor.device != device:
            raise LoweringError(f"it works on {device} and on {tensor.device}")
        device = tensor.device
    return device


def _refuse(func: OpOverload, args: Any) -> None:
    """Ops that are about more than tensor values."""
    if reads_data(func, args):
        raise LoweringError(f"`{func}` reads the values of a tensor")
    if func._schema.is_mutable:
        raise LoweringError(f"`{func}` writes in place")


def _constant_value(tensor: torch.Tensor, aval: TensorType) -> Value:
    """The value of a tensor that no op of the graph made: its numbers are known, or it comes from outside."""
    real = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    if real is None:
        raise LoweringError(f"a tensor {tuple(tensor.shape)} comes from outside the graph")
    with no_dispatch():
        numbers = real.detach().reshape(-1).tolist()
    return constant(numbers, aval)


def constant(numbers: Sequence[Any], aval: TensorType) -> Value:
    """A tensor made during the capture: one number everywhere, a count, or its elements side by side."""
    if len(set(map(repr, numbers))) <= 1:
        return full(numbers[0] if numbers else 0, aval)
    if aval.dtype == "i64" and list(numbers) == list(range(len(numbers))):
        return reshape(iota(len(numbers)), aval.shape)
    if len(numbers) > MOST_CONSTANT_ELEMENTS or any(isinstance(n, complex) for n in numbers):
        raise LoweringError(f"a constant of {len(numbers)} elements is made inside")
    return reshape(emit("cat", *[full(n, TensorType((1,), aval.dtype)) for n in numbers], axis=0), aval.shape)


def _as_in_memory(x: torch.Tensor) -> torch.Tensor:
    """A view whose rows lie in memory as rows."""
    laid = _with_axis_order(x)
    return x.permute(laid.axes) if isinstance(laid, LaidOut) else x


# ---------------------------------------------------------------------------------------------- the replay
_RESPELLED = {"__iand__": "bitwise_and_", "__ior__": "bitwise_or_", "__ixor__": "bitwise_xor_",
              "__ilshift__": "bitwise_left_shift_", "__irshift__": "bitwise_right_shift_"}  # fmt: skip
"""In-place spellings that functionalisation does not know."""


class _Replay(fx.Interpreter):
    """Runs the captured graph on functional tensors; sizes are taken as they were recorded."""

    def __init__(self, gm: fx.GraphModule, lowering: Lowering, loops: Mapping[fx.Node, LoweredLoop]) -> None:
        super().__init__(gm)
        self.loops = loops
        self.extra_traceback = False
        self.lowering, self.origins = lowering, dict(_origins(gm))
        self.lowering.read_by = self._is_read
        self.node: fx.Node | None = None

    def run_node(self, node: fx.Node) -> Any:
        recorded = node.meta.get("val")
        if node.op == "call_function" and _is_number(recorded) and not hasattr(node.target, "fusegrad_call"):
            if free_unbacked_symbols(recorded):
                raise LoweringError(f"`{node.target}` reads the values of a tensor")
            return recorded
        self.node, (origin, variable) = node, self.origins[node]
        self.lowering.latest = None
        with provenance(origin):
            result = super().run_node(node)
        _name(self.lowering.latest, variable)
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if hasattr(target, "fusegrad_call"):
            return self._call(target, args, kwargs)
        if self.node is not None and self.node in self.loops and (results := self._loop(args)) is not None:
            return results
        if isinstance(target, HigherOrderOperator):
            raise LoweringError(f"`{target}` holds graphs of its own")
        packet = target._schema.name.split("::")[1] if isinstance(target, OpOverload) else ""
        if packet in _RESPELLED:
            target = getattr(getattr(torch.ops.aten, _RESPELLED[packet]), target._overloadname)
        if target is torch.ops.aten._assert_scalar.default:
            return None
        if target is torch.ops.aten.bernoulli_.float:  # in the order of memory; `bernoulli.p` makes a tensor row by row
            super().call_function(target, (_as_in_memory(args[0]), *args[1:]), kwargs)
            return args[0]
        if target in _DRAWN_LIKE and args[0].is_contiguous():
            target, args, kwargs = _drawn(target, args[0], kwargs)
        try:
            return super().call_function(target, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if isinstance(error, LoweringError) or not isinstance(target, OpOverload):
                raise
            raise LoweringError(f"`{target}` cannot be replayed: {error}") from error

    def _call(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A nested autograd Function, or compiled code: one node, and fresh fakes like the ones that were recorded."""
        assert self.node is not None
        inner = pytree.tree_map_only(torch.Tensor, from_functional, (tuple(args), dict(kwargs)))
        fresh = pytree.tree_map_only(torch.Tensor, empty_like_fake, self.node.meta["val"])
        self.lowering.call(target, inner, pytree.tree_map_only(torch.Tensor, from_functional, fresh))
        return fresh

    def _loop(self, args: Any) -> Any:
        """The node of a loop: one `scan`, and fresh fakes like the ones that were recorded.

        None where its steps do not fit each other, and can be taken one by one.
        """
        assert self.node is not None
        operands = pytree.tree_map_only(torch.Tensor, from_functional, tuple(map(list, operands_of(self.node, args))))
        fresh = pytree.tree_map_only(torch.Tensor, empty_like_fake, self.node.meta["val"])
        try:
            self.lowering.loop(
                self.loops[self.node], operands, pytree.tree_map_only(torch.Tensor, from_functional, fresh)
            )
        except LoweringError:
            if not has_fixed_steps(self.node):
                raise
            return None
        return fresh

    def _is_read(self, op: OpOverload, index: int) -> bool:
        """True if result `index` of the captured op has a reader. Ops inside a formula: yes."""
        if self.node is None or self.node.target is not op:
            return True
        picks = [u for u in self.node.users if u.target is operator.getitem]
        return len(picks) < len(self.node.users) or any(u.args[1] == index and u.users for u in picks)


_DRAWN_LIKE = {
    torch.ops.aten.rand_like.default: torch.ops.aten.rand.default,
    torch.ops.aten.randn_like.default: torch.ops.aten.randn.default,
}


def _drawn(target: Any, like: torch.Tensor, kwargs: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The same numbers by shape: what they are drawn like is not read, so that it need not be in memory."""
    given = {name: kwargs.get(name) or getattr(like, name) for name in ("dtype", "device")}
    return _DRAWN_LIKE[target], ([*like.shape],), given


def _is_number(recorded: Any) -> bool:
    """True if a node computes a size or another number, or a list of them."""
    if isinstance(recorded, (list, tuple)):
        return bool(recorded) and all(map(_is_number, recorded))
    return isinstance(recorded, (*SYMBOLIC, int, float, bool))


def empty_like_fake(fake: torch.Tensor) -> torch.Tensor:
    """A tensor of the layout of a fake that a capture recorded."""
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)


def from_functional(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a functional tensor stands for at present."""
    if not torch._is_functional_tensor(tensor):
        return tensor
    torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]
    return torch._from_functional_tensor(tensor)


# ---------------------------------------------------------------------------------------------- provenance
_FRAME = re.compile(r'File "([^"]+)", line (\d+)[^\n]*\n\s*([^\n]*)')
_ASSIGNED = re.compile(r"^\s*([A-Za-z_]\w*)\s*(?::[^=]+)?[-+*/@&|^]?=[^=]")


def _origins(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, tuple[Origin, str | None]]]:
    """Each node's origin, and the user's name for its value on the last node of a line."""
    nodes = list(gm.graph.nodes)
    places = [_place(n) for n in nodes]
    for node, place, following in zip(nodes, places, [*places[1:], None], strict=True):
        variable, location, line = place or (None, None, None)
        op = str(node.target) if node.op == "call_function" else None
        yield node, (Origin(op=op, where=location, line=line), None if following == place else variable)


def _place(node: fx.Node) -> tuple[str | None, str | None, str | None] | None:
    """(name, file:line, text): from the tracer, else from a recorded stack."""
    if "fusegrad_origin" in node.meta:
        return node.meta["fusegrad_origin"]  # type: ignore[no-any-return]
    frames = _FRAME.findall(node.stack_trace or "")
    if not frames:
        return None
    filename, number, line = frames[-1]
    assigned = _ASSIGNED.match(line)
    return assigned.group(1) if assigned else None, f"{filename}:{number}", line.strip()


def _name(value: Value | None, variable: str | None) -> None:
    """The user's name for the newest value, unless it has one."""
    if value is not None and variable is not None and value.prim != "input" and value.origin.name is None:
        value.attrs["origin"] = replace(value.origin, name=variable)
