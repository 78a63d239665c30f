"""The numpy evaluator: the meaning of a graph, without torch.

Every float is float64, so it is an oracle of mathematics, not of rounding; integers keep their width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import sympy

from .errors import InvalidGraphError
from .graph import Graph, Value
from .loops.body import operands_of
from .types import COMPLEX, FLOAT8, FLOATS

Array: TypeAlias = "np.ndarray[Any, Any]"
Extern: TypeAlias = Callable[[Value, Sequence[Any], Mapping[sympy.Symbol, int]], Any]

DTYPES: dict[str, Any] = {
    **dict.fromkeys((*FLOATS, *FLOAT8), np.float64), **dict.fromkeys(COMPLEX, np.complex128), "b1": np.bool_,
    "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
}  # fmt: skip


def evaluate(
    graph: Graph, inputs: Sequence[Any], sizes: Mapping[sympy.Symbol, int], extern: Extern | None = None
) -> list[Array | None]:
    """The outputs of the graph, as new arrays; inputs are read as float64, and never written.

    extern(value, operands, sizes): the result of an aten or call node, a list where there are several.
    """
    results: dict[int, Any] = {
        v.id: np.asarray(a).astype(DTYPES[v.dtype]) for v, a in zip(graph.inputs, inputs, strict=True)
    }
    # NaN and infinities are values here as in torch: no warnings of numpy's.
    with np.errstate(all="ignore"):
        for value in graph.order():
            results[value.id] = _node(value, [results[a.id] for a in value.args], sizes, extern)
    return [None if o is None else np.array(results[o.id]) for o in graph.outputs]


def _node(value: Value, operands: list[Any], sizes: Mapping[sympy.Symbol, int], extern: Extern | None) -> Any:
    if value.prim in table:
        result = table[value.prim](_Node(value, sizes), *operands)
        return result if value.prim == "pick" else np.asarray(result, dtype=DTYPES[value.dtype])
    if value.prim == "scan":
        return _scan(value, operands, sizes, extern)
    if extern is None:
        raise InvalidGraphError("the evaluator has no `extern` to call", node=f"{value!r} = {value.prim}")
    return extern(value, operands, sizes)


def element(value: Value, operands: Sequence[Any]) -> Array:
    """One element of an elementwise node, of single numbers."""
    with np.errstate(all="ignore"):
        return np.asarray(_node(value, [np.asarray(x) for x in operands], {}, None))


class _Node:
    """A node's parameters, with sizes as numbers."""

    def __init__(self, value: Value, sizes: Mapping[sympy.Symbol, int]) -> None:
        self.dtype = DTYPES[value.avals[0].dtype]
        self._params, self._sizes = value.params, sizes

    def __getitem__(self, name: str) -> Any:
        param = self._params[name]
        return tuple(map(self.number, param)) if isinstance(param, tuple) else self.number(param)

    def number(self, expr: Any) -> Any:
        if not isinstance(expr, sympy.Basic):
            return expr
        result = expr.xreplace({s: sympy.Integer(self._sizes[s]) for s in expr.free_symbols}).doit()
        return int(result) if result.is_Integer else float(result)


# ---------------------------------------------------------------------------------------------- the rules
def _broadcast(node: _Node, x: Array) -> Array:
    shape, axes = node["shape"], node["axes"]
    aligned = [x.shape[axes.index(a)] if a in axes else 1 for a in range(len(shape))]
    return np.broadcast_to(x.reshape(aligned), shape)


def _slice(node: _Node, x: Array) -> Array:
    return x[tuple(map(slice, node["start"], node["stop"], node["step"]))]


def _pad(node: _Node, x: Array) -> Array:
    lo, hi, inner = node["lo"], node["hi"], node["inner"]
    spans = [n + max(n - 1, 0) * i for n, i in zip(x.shape, inner, strict=True)]
    out = np.zeros([a + n + b for a, n, b in zip(lo, spans, hi, strict=True)], x.dtype)
    out[tuple(slice(a, a + n, i + 1) for a, n, i in zip(lo, spans, inner, strict=True))] = x
    return out


def _cumsum(node: _Node, x: Array) -> Array:
    axis = node["axis"]
    return np.flip(np.cumsum(np.flip(x, axis), axis), axis) if node["reverse"] else np.cumsum(x, axis)


def _scan(value: Value, operands: list[Any], sizes: Mapping[sympy.Symbol, int], extern: Extern | None) -> Any:
    """The body at each step in turn. Returns an array, or a list where there are several results."""
    node, body = _Node(value, sizes), value.params["body"].graph
    carries, xs, wholes = operands_of(value.params, operands)
    stacked = [np.zeros([node.number(n) for n in t.shape], DTYPES[t.dtype]) for t in value.avals[len(carries) :]]
    steps = range(node["length"])
    for step in reversed(steps) if node["reverse"] else steps:
        results = evaluate(body, [*carries, *(x[step] for x in xs), *wholes], sizes, extern)
        carries = results[: len(carries)]
        for whole, part in zip(stacked, results[len(carries) :], strict=True):
            whole[step] = part
    found = [*carries, *stacked]
    return found if len(found) > 1 else found[0]


def _perm_to_front(axes: Sequence[int], ndim: int) -> list[int]:
    return [*axes, *(a for a in range(ndim) if a not in axes)]


def _gather(node: _Node, x: Array, *index: Array) -> Array:
    return x.transpose(_perm_to_front(node["axes"], x.ndim))[index]


def _check_index(node: _Node, index: Array, size: Array) -> Array:
    outside = index[(index < 0) | (index >= size)]
    if outside.size:
        raise IndexError(f"index {outside[0]} is out of range for a size of {size.flat[0]}")
    return index


def _scatter(node: _Node, base: Array, source: Array, *index: Array) -> Array:
    perm = _perm_to_front(node["axes"], base.ndim)
    out = base.transpose(perm).copy()
    if node["mode"] == "add":
        np.add.at(out, index, source)
    else:
        out[index] = source
    return out.transpose(np.argsort(perm))


def _cast(node: _Node, x: Array) -> Array:
    """Conversion to an integer truncates; a value without one (NaN, too large) is as numpy has it."""
    return x.astype(node.dtype)


def _divide(x: Array, y: Array) -> Array:
    return np.divide(x, y).astype(x.dtype)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _sign(x: Array) -> Array:
    """torch's: 0 for NaN."""
    return np.where(np.isnan(x), 0, np.sign(x))


def _shift(f: Callable[..., Array]) -> Callable[..., Array]:
    return lambda node, x, y: f(x, y.astype(x.dtype))


# ---------------------------------------------------------------------------------------------- random numbers
_MASK, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_KEYS, _FACTORS = (0x9E3779B9, 0xBB67AE85), (0xD2511F53, 0xCD9E8D57)


def philox(seed: int, counters: Array) -> tuple[Array, Array, Array, Array]:
    """Philox4x32-10: four 32-bit words, held in uint64, for each counter."""
    wide = counters.astype(np.uint64)
    c = [wide & _MASK, wide >> _HALF, np.zeros_like(wide), np.zeros_like(wide)]
    keys = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    for _ in range(10):
        a, b = np.uint64(_FACTORS[0]) * c[0], np.uint64(_FACTORS[1]) * c[2]
        k0, k1 = map(np.uint64, keys)
        c = [(b >> _HALF) ^ c[1] ^ k0, b & _MASK, (a >> _HALF) ^ c[3] ^ k1, a & _MASK]
        keys = [(k + step) & 0xFFFFFFFF for k, step in zip(keys, _KEYS, strict=True)]
    return c[0], c[1], c[2], c[3]


def _uniform(word: Array) -> Array:
    """Triton's: the signed word folded to [0, 2**31), times 2**-31, in float32."""
    signed = word.astype(np.uint32).view(np.int32)
    return np.where(signed < 0, -signed - 1, signed).astype(np.float32) * np.float32(4.6566127342e-10)


def _random(node: _Node, seed: Array, offset: Array) -> Array:
    shape = node["shape"]
    places = int(offset) + np.arange(math.prod(shape))
    words = philox(int(seed), places >> 2)
    if node["kind"] == "uniform":
        numbers = _uniform(np.choose(places & 3, words))
    else:
        first, second = (_uniform(np.where(places & 2, words[i + 2], words[i])) for i in (0, 1))
        radius, angle = np.sqrt(-2 * np.log(np.maximum(np.float32(1e-7), first))), 2 * np.pi * second
        numbers = radius * np.where(places & 1, np.sin(angle), np.cos(angle))
    return numbers.reshape(shape)


# ---------------------------------------------------------------------------------------------- the table
UNARY: dict[str, Callable[..., Any]] = {
    "neg": np.negative, "conj": np.conj, "abs": np.abs, "sign": _sign, "exp": np.exp, "exp2": np.exp2,
    "expm1": np.expm1, "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p, "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x), "sin": np.sin, "cos": np.cos, "tan": np.tan, "asin": np.arcsin,
    "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh, "asinh": np.arcsinh,
    "acosh": np.arccosh, "atanh": np.arctanh, "sigmoid": _sigmoid, "erf": np.vectorize(math.erf, otypes=[float]),
    "lgamma": np.vectorize(math.lgamma, otypes=[float]), "floor": np.floor, "ceil": np.ceil, "round": np.rint,
    "trunc": np.trunc, "reciprocal": lambda x: 1 / x, "not": np.invert, "isnan": np.isnan, "isinf": np.isinf,
    "signbit": np.signbit,
}  # fmt: skip
BINARY: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": _divide, "pow": np.power, "max": np.maximum,
    "min": np.minimum, "rem": np.remainder, "fmod": np.fmod, "floordiv": np.floor_divide, "atan2": np.arctan2,
    "hypot": np.hypot,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def _elementwise(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda node, *xs: f(*xs)


table: dict[str, Callable[..., Any]] = {
    **{name: _elementwise(f) for name, f in (UNARY | BINARY).items()},
    "shl": _shift(np.left_shift),
    "shr": _shift(np.right_shift),
    "where": lambda node, c, x, y: np.where(c, x, y),
    "cast": _cast,
    "check_index": _check_index,
    "full": lambda node: np.full(node["shape"], node["value"], node.dtype),
    "iota": lambda node: np.arange(node["size"], dtype=node.dtype),
    "broadcast": _broadcast,
    "reshape": lambda node, x: x.reshape(node["shape"]),
    "permute": lambda node, x: x.transpose(node["perm"]),
    "slice": _slice,
    "pad": _pad,
    "flip": lambda node, x: np.flip(x, node["axes"]),
    "cat": lambda node, *xs: np.concatenate(xs, node["axis"]),
    "sum": lambda node, x: np.sum(x, node["axes"], dtype=x.dtype),
    "prod": lambda node, x: np.prod(x, node["axes"], dtype=x.dtype),
    "amax": lambda node, x: np.amax(x, node["axes"]),
    "amin": lambda node, x: np.amin(x, node["axes"]),
    "argmax": lambda node, x: np.argmax(x, node["axis"]),
    "argmin": lambda node, x: np.argmin(x, node["axis"]),
    "cumsum": _cumsum,
    "dot": lambda node, x, y: np.einsum(x, list(node["x_axes"]), y, list(node["y_axes"]), list(node["out_axes"])),
    "gather": _gather,
    "scatter": _scatter,
    "random": _random,
    "pick": lambda node, results: results[node["index"]],
}
