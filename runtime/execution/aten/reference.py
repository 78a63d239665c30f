"""The reference executor: an IR graph through torch, node by node, on any device. One line per primitive.

Values have no strides here: results are whatever layout torch gives them.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from ....ir import Graph, Value
from ....ir.passes.index_checks import indices_for_torch
from ....ir.prims import Arg
from ....tracer.dtypes import to_torch
from ....tracer.torch_private import memory_of
from ...values.sizes import Sizes, evaluate
from . import philox
from .loops import run_loop


# ---------------------------------------------------------------------------------------------- one node
class Node:
    """A node as the rules below read it: parameters as numbers, the dtype as torch's, and where constants are made."""

    def __init__(self, value: Value, sizes: Sizes, device: torch.device | None) -> None:
        self.value, self.params, self.sizes, self.device = value, value.params, sizes, device

    @property
    def dtype(self) -> torch.dtype:
        return to_torch(self.value.dtype)

    def __getitem__(self, name: str) -> Any:
        """The parameter; a tuple of sizes as a list of numbers."""
        param = self.params[name]
        if isinstance(param, tuple):
            return [evaluate(p, self.sizes) for p in param]
        return evaluate(param, self.sizes)


def call_node(value: Value, operands: Sequence[Any], sizes: Sizes, device: torch.device | None = None) -> Any:
    """The result of one node: a tensor, or a list where the node has several results.

    `device`: where a node without operands makes its result; else that of its operands.
    """
    place = device if device is not None else next((o.device for o in operands if isinstance(o, torch.Tensor)), None)
    return table[value.prim](Node(value, sizes, place), *operands)


def _broadcast(node: Node, x: torch.Tensor) -> torch.Tensor:
    shape, axes = node["shape"], node.params["axes"]
    aligned = [1] * len(shape)
    for axis, size in zip(axes, x.shape, strict=True):
        aligned[axis] = size
    return x.reshape(aligned).expand(shape)


def _slice(node: Node, x: torch.Tensor) -> torch.Tensor:
    return x[tuple(map(slice, node["start"], node["stop"], node["step"]))]


def _pad(node: Node, x: torch.Tensor) -> torch.Tensor:
    lo, hi, inner = node["lo"], node["hi"], node["inner"]
    spans = [n + max(n - 1, 0) * i for n, i in zip(x.shape, inner, strict=True)]
    out = x.new_zeros([a + n + b for a, n, b in zip(lo, spans, hi, strict=True)])
    out[tuple(slice(a, a + n, i + 1) for a, n, i in zip(lo, spans, inner, strict=True))] = x
    return out


def _sum(node: Node, x: torch.Tensor) -> torch.Tensor:
    return x.sum(node["axes"], dtype=node.dtype) if node["axes"] else x


def _prod(node: Node, x: torch.Tensor) -> torch.Tensor:
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    for axis in sorted(node["axes"], reverse=True):
        wide = wide.prod(axis, dtype=wide.dtype)
    return wide.to(x.dtype)


def _extreme(of: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(node: Node, x: torch.Tensor) -> torch.Tensor:
        if all(x.shape[a] for a in node["axes"]):
            return of(x, node["axes"]) if node["axes"] else x
        shape = [n for a, n in enumerate(x.shape) if a not in node["axes"]]
        return x.new_full(shape, _identity_of(x.dtype, of is torch.amax))

    return run


def _identity_of(dtype: torch.dtype, largest: bool) -> float:
    """torch has no such number, but `any` and `all` do."""
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def _cumsum(node: Node, x: torch.Tensor) -> torch.Tensor:
    axis = node["axis"]
    if not node["reverse"]:
        return x.cumsum(axis, dtype=x.dtype)
    return x.flip(axis).cumsum(axis, dtype=x.dtype).flip(axis)


def _scan(node: Node, *operands: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
    body = node.params["body"].graph

    def step(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [r for r in run(body, inputs, node.sizes, node.device) if r is not None]

    return run_loop(node.value, operands, node.sizes, node.device, step)


def _dot(node: Node, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.einsum(x, list(node["x_axes"]), y, list(node["y_axes"]), list(node["out_axes"]))


def _in_front(axes: Sequence[int], ndim: int) -> list[int]:
    return [*axes, *(a for a in range(ndim) if a not in axes)]


def from_the_start(index: torch.Tensor) -> torch.Tensor:
    """The index, a negative one as the least there is: torch's indexing checks it, but counts others from the end."""
    return torch.threshold(index, -1, torch.iinfo(index.dtype).min)


def _check_index(node: Node, index: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """Torch's own indexing checks what it is given; what no indexing reads is asserted."""
    if any(user.prim not in ("gather", "scatter") for user in node.value.users):
        torch._assert_async(((0 <= index) & (index < size)).all(), f"{node.value.origin.op}: index out of range")
    return from_the_start(index)


def _gather(node: Node, x: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
    return x.permute(_in_front(node["axes"], x.ndim))[index]


def _scatter(node: Node, base: torch.Tensor, source: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
    perm = _in_front(node["axes"], base.ndim)
    unchecked = indices_for_torch(node.value)
    index = tuple(from_the_start(i) if at in unchecked else i for at, i in enumerate(index))
    moved = base.permute(perm).index_put(index, source, accumulate=node["mode"] == "add")
    return moved.permute([perm.index(a) for a in range(base.ndim)])


def _random(node: Node, seed: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    shape = node["shape"]
    draw = philox.uniform if node["kind"] == "uniform" else philox.normal
    return draw(seed, offset, torch.Size(shape).numel()).reshape(shape).to(node.dtype)


def _logical(
    on_bits: Callable[..., torch.Tensor], on_bools: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    return lambda node, *xs: (on_bools if xs[0].dtype == torch.bool else on_bits)(*xs)


def _low(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An elementwise function of torch, its result in the node's dtype."""
    return lambda node, *xs: f(*xs).to(node.dtype)


# ---------------------------------------------------------------------------------------------- nodes that call torch
def find_op(name: str) -> Any:
    """ "aten.sort.default" -> torch.ops.aten.sort.default"""
    target: Any = torch.ops
    for part in name.split("."):
        target = getattr(target, part)
    return target


_WORDS: dict[str, Callable[[str, torch.device | None], Any]] = {
    "dtype": lambda word, device: to_torch(word),
    "device": lambda word, device: device,
    "layout": lambda word, device: getattr(torch, word),
    "memory_format": lambda word, device: getattr(torch, word),
}


def _argument(spec: Any, operands: Sequence[Any], node: Node) -> Any:
    """The argument that a spec writes down: operands in their places, words of torch, lists, numbers."""
    if isinstance(spec, Arg):
        return operands[spec.index]
    if not isinstance(spec, tuple):
        return evaluate(spec, node.sizes)
    if len(spec) == 2 and spec[0] == "axes":
        return _in_order(operands[spec[1][0].index], spec[1][1])
    if len(spec) == 2 and isinstance(spec[0], str) and spec[0] in _WORDS:
        return _WORDS[spec[0]](spec[1], node.device or torch.device("cpu"))
    return [_argument(s, operands, node) for s in spec]


def _in_order(x: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """The numbers of x, dense, in memory with these axes from the outermost inwards."""
    if list(axes) == sorted(axes):
        return x.contiguous()
    back = [axes.index(a) for a in range(len(axes))]
    return x.permute(*axes).contiguous().permute(*back)


def _extern(node: Node, *operands: Any) -> Any:
    """The call that a node writes down. A view of memory gets row-major memory: values have no strides."""
    args, named = node.params["spec"]
    function = node.params["target"] if "target" in node.params else find_op(node.params["op"])
    if getattr(function, "is_view", False):
        operands = tuple(o.contiguous() for o in operands)
    positional = [_argument(a, operands, node) for a in args]
    result = function(*positional, **{k: _argument(v, operands, node) for k, v in named})
    tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    return tensors[0] if len(node.value.avals) == 1 else tensors


UNARY = {name: getattr(torch, name) for name in (
    "neg abs sign exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh "
    "atanh sigmoid erf lgamma floor ceil round trunc reciprocal isnan isinf signbit".split()
)}  # fmt: skip
BINARY = {
    **{name: getattr(torch, name) for name in "add sub mul div pow fmod atan2 hypot eq ne lt le gt ge".split()},
    "max": torch.maximum, "min": torch.minimum, "rem": torch.remainder,
    "floordiv": functools.partial(torch.div, rounding_mode="floor"),
    "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift,
}  # fmt: skip

table: dict[str, Callable[..., Any]] = {
    **{name: _low(f) for name, f in (UNARY | BINARY).items()},
    "conj": lambda node, x: torch.conj_physical(x),
    "not": _logical(torch.bitwise_not, torch.logical_not),
    "and": _logical(torch.bitwise_and, torch.logical_and),
    "or": _logical(torch.bitwise_or, torch.logical_or),
    "xor": _logical(torch.bitwise_xor, torch.logical_xor),
    "where": lambda node, c, x, y: torch.where(c, x, y),
    "cast": lambda node, x: x.to(node.dtype),
    "check_index": _check_index,
    "full": lambda node: torch.full(node["shape"], node["value"], dtype=node.dtype, device=node.device),
    "iota": lambda node: torch.arange(node["size"], dtype=node.dtype, device=node.device),
    "broadcast": _broadcast,
    "reshape": lambda node, x: x.reshape(node["shape"]),
    "permute": lambda node, x: x.permute(node["perm"]),
    "slice": _slice,
    "pad": _pad,
    "flip": lambda node, x: x.flip(node["axes"]),
    "cat": lambda node, *xs: torch.cat(xs, node["axis"]),
    "sum": _sum,
    "prod": _prod,
    "amax": _extreme(torch.amax),
    "amin": _extreme(torch.amin),
    "argmax": lambda node, x: torch.argmax(x, node["axis"]),
    "argmin": lambda node, x: torch.argmin(x, node["axis"]),
    "cumsum": _cumsum,
    "scan": _scan,
    "dot": _dot,
    "gather": _gather,
    "scatter": _scatter,
    "random": _random,
    "aten": _extern,
    "aten_effect": _extern,
    "call": _extern,
    "pick": lambda node, results: results[node["index"]],
}


# ---------------------------------------------------------------------------------------------- a whole graph
class Order:
    """The nodes of a graph in order, each with the ids of the values that no node reads after it."""

    def __init__(self, graph: Graph) -> None:
        self.steps: list[tuple[Value, tuple[int, ...], tuple[int, ...]]] = []
        living = {v.id for v in graph.results}
        for value in reversed(graph.order()):
            args = tuple(a.id for a in value.args)
            dead = tuple({a for a in args if a not in living})
            living.update(args)
            self.steps.append((value, args, dead))
        self.steps.reverse()


_orders: weakref.WeakKeyDictionary[Graph, tuple[Any, Order]] = weakref.WeakKeyDictionary()


def order_of(graph: Graph) -> Order:
    """Memoised; a graph that has grown, or has other results, is ordered again."""
    state = (len(graph), tuple(v.id for v in graph.results))
    memo = _orders.get(graph)
    if memo is None or memo[0] != state:
        memo = _orders[graph] = (state, Order(graph))
    return memo[1]


def run(
    graph: Graph, inputs: Sequence[torch.Tensor], sizes: Sizes, device: torch.device | None = None
) -> list[torch.Tensor | None]:
    """The outputs of the graph, then its mutated inputs are written back.

    sizes: the value of every symbol. `device`: where constants are made, the device of the first input if not given.
    """
    values = final_values(graph, inputs, sizes, device)
    outputs = [None if o is None else values[o.id] for o in graph.outputs]
    return _memory_written(outputs, {inputs[i]: values[v.id] for i, v in graph.mutations.items()})


def final_values(
    graph: Graph, inputs: Sequence[Any], sizes: Sizes, device: torch.device | None = None, call: Any = call_node
) -> dict[int, Any]:
    """The results of a graph and what it writes to its inputs, by the ids of values. call: runs one node."""
    place = device if device is not None else next((t.device for t in inputs), torch.device("cpu"))
    values: dict[int, Any] = {v.id: t for v, t in zip(graph.inputs, inputs, strict=True)}
    for value, args, dead in order_of(graph).steps:
        values[value.id] = call(value, [values[a] for a in args], sizes, place)
        for unread in dead:
            del values[unread]
    return values


def _memory_written(
    outputs: list[torch.Tensor | None], writes: Mapping[torch.Tensor, torch.Tensor]
) -> list[torch.Tensor | None]:
    """Write the new values into the mutated inputs; an output or new value that shares their memory is copied first."""
    memory = set(map(memory_of, writes))
    outputs, sources = [_apart(o, memory) for o in outputs], [_apart(v, memory) for v in writes.values()]
    for target, source in zip(writes, sources, strict=True):
        target.copy_(source)
    return outputs


def _apart(tensor: Any, memory: set[int]) -> Any:
    shared = tensor is not None and memory_of(tensor) in memory
    return tensor.clone() if shared else tensor
