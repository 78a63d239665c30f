"""Type rules: one line per primitive, operand types and parameters to result types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import sympy

from .errors import TypeRuleError
from .prims import BINARY, COMPARE, PREDICATES, PRIMS, UNARY
from .types import Size, TensorType, product, simplify_size

Types = Sequence[TensorType]


def infer(prim: str, operands: Sequence[tuple[TensorType, ...]], params: dict[str, Any]) -> tuple[TensorType, ...]:
    """The result types of `prim`; raises TypeRuleError where the rule refuses."""
    primitive = PRIMS.get(prim)
    if primitive is None:
        raise TypeRuleError("no such primitive", prim=prim)
    if primitive.arity is not None and len(operands) != primitive.arity:
        raise TypeRuleError(f"takes {primitive.arity} operands, got {len(operands)}", prim=prim)
    if set(params) != set(primitive.params):
        raise TypeRuleError(f"takes parameters {primitive.params}, got {tuple(params)}", prim=prim)
    if prim == "pick":
        return (operands[0][params["index"]],)
    if any(len(o) != 1 for o in operands):
        raise TypeRuleError("an operand has several results; read it through pick", prim=prim)
    result = type_rules[prim](*[o[0] for o in operands], **params)
    return result if isinstance(result, tuple) else (result,)


def require(condition: bool, prim: str, detail: str | Callable[[], str]) -> None:
    """detail: where types are in it, as a function: they take longer to write than to check."""
    if not condition:
        raise TypeRuleError(detail if isinstance(detail, str) else detail(), prim=prim)


def sizes_equal(a: Size, b: Size) -> bool:
    """Provably the same size."""
    return a == b or (not (isinstance(a, int) and isinstance(b, int)) and _vanishes(a, b))


def is_below(a: Size, b: Size) -> bool | None:
    """Whether a < b for symbols that are at least 1; None where it is not known."""
    difference = sympy.expand(sympy.sympify(b) - a)
    signs = {bool(c > 0) for c in difference.as_coefficients_dict().values()}
    return signs.pop() if len(signs) == 1 else None


def is_at_most(a: Size, b: Size) -> bool:
    """Provably a <= b."""
    return sizes_equal(a, b) or bool(is_below(a, b)) or _is_at_most_from_one_on(a, b)


@lru_cache(maxsize=4096)
def _is_at_most_from_one_on(a: Size, b: Size) -> bool:
    """True for M <= 2 * M - 1: of polynomials in what symbols are above 1."""
    difference = sympy.sympify(b) - a
    above = {s: s + 1 for s in difference.free_symbols if s.is_positive}
    shifted = sympy.expand(difference.subs(above, simultaneous=True))
    if len(above) != len(difference.free_symbols) or not shifted.is_polynomial(*above):
        return False
    return all(c >= 0 for c in shifted.as_coefficients_dict().values())


def same_shape(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """True if two shapes are provably equal."""
    return len(a) == len(b) and all(map(sizes_equal, a, b))


@lru_cache(maxsize=4096)
def _vanishes(a: Size, b: Size) -> bool:
    """True if two sizes do not differ. They are whole: where n/2 is one, n is even, and floor(n/2) is the same."""
    if a == sympy.floor(b) or b == sympy.floor(a):
        return True
    difference = sympy.expand(sympy.sympify(a) - sympy.sympify(b))
    if difference.is_polynomial():  # expanded, so that it is zero only if it is written so
        return bool(difference == 0)
    return bool(sympy.simplify(difference) == 0)


def drop_axes(shape: Sequence[Size], axes: Sequence[int]) -> tuple[Size, ...]:
    return tuple(d for i, d in enumerate(shape) if i not in axes)


def ceil_div(n: Size, d: Size) -> Size:
    return simplify_size(sympy.ceiling(sympy.sympify(n) / d)) if d != 1 else n


def _common_type(*xs: TensorType) -> TensorType:
    first = xs[0]
    for x in xs[1:]:
        same_rank = x.dtype == first.dtype and len(x.shape) == len(first.shape)
        if not same_rank or not all(map(sizes_equal, x.shape, first.shape)):
            raise TypeRuleError(f"operands differ: {first} and {x}", prim="elementwise")
    return first


def _check_index(index: TensorType, size: TensorType) -> TensorType:
    require(index.dtype == "i64", "check_index", f"an index of {index.dtype}")
    return _common_type(index, size)


def _where(c: TensorType, x: TensorType, y: TensorType) -> TensorType:
    _common_type(c.with_dtype("f32"), x.with_dtype("f32"))
    return _common_type(x, y)


def _broadcast(x: TensorType, shape: tuple[Size, ...], axes: tuple[int, ...]) -> TensorType:
    is_placed = len(axes) == x.ndim and list(axes) == sorted(set(axes))
    require(is_placed, "broadcast", lambda: f"axes {axes} do not place {x}")
    fits = all(sizes_equal(d, shape[a]) or sizes_equal(d, 1) for d, a in zip(x.shape, axes, strict=True))
    require(fits, "broadcast", lambda: f"{x} to {shape}")
    return x.with_shape(shape)


def _reshape(x: TensorType, shape: tuple[Size, ...]) -> TensorType:
    is_whole = sizes_equal(x.numel, product(shape))
    require(is_whole, "reshape", lambda: f"{x} has not as many elements as {shape}")
    return x.with_shape(shape)


def _slice(x: TensorType, start: tuple[Size, ...], stop: tuple[Size, ...], step: tuple[int, ...]) -> TensorType:
    bounds = zip(start, stop, step, strict=True)
    return x.with_shape(ceil_div(simplify_size(sympy.sympify(b) - a), s) for a, b, s in bounds)


def _pad(x: TensorType, lo: tuple[Size, ...], hi: tuple[Size, ...], inner: tuple[int, ...]) -> TensorType:
    return x.with_shape(n + a + b + (n - 1) * i for n, a, b, i in zip(x.shape, lo, hi, inner, strict=True))


def _cat(*xs: TensorType, axis: int) -> TensorType:
    shape = xs[0].shape
    total = sum((x.shape[axis] for x in xs[1:]), start=sympy.sympify(shape[axis]))
    return xs[0].with_shape((*shape[:axis], simplify_size(total), *shape[axis + 1 :]))


def _dot(
    x: TensorType, y: TensorType, x_axes: tuple[int, ...], y_axes: tuple[int, ...], out_axes: tuple[int, ...]
) -> TensorType:
    require(x.dtype == y.dtype, "dot", lambda: f"{x} and {y} differ in dtype")
    size = dict(zip(y_axes, y.shape, strict=True)) | dict(zip(x_axes, x.shape, strict=True))
    return x.with_shape(size[label] for label in out_axes)


def _gather(x: TensorType, *index: TensorType, axes: tuple[int, ...]) -> TensorType:
    require(len(index) == len(axes) > 0, "gather", f"{len(index)} index tensors for axes {axes}")
    _common_type(*index)
    return x.with_shape((*index[0].shape, *drop_axes(x.shape, axes)))


def _scatter(base: TensorType, src: TensorType, *index: TensorType, axes: tuple[int, ...], mode: str) -> TensorType:
    require(mode in ("add", "set"), "scatter", f"mode {mode!r}")
    _common_type(_gather(base, *index, axes=axes), src)
    return base


def _reduce(x: TensorType, axes: tuple[int, ...]) -> TensorType:
    are_axes = list(axes) == sorted(set(axes)) and all(0 <= a < x.ndim for a in axes)
    require(are_axes, "reduce", lambda: f"axes {axes} of {x}")
    return x.with_shape(drop_axes(x.shape, axes))


def _arg_reduce(x: TensorType, axis: int) -> TensorType:
    return TensorType(drop_axes(x.shape, (axis,)), "i64")


def _scan(
    *xs: TensorType, body: Any, carries: int, steps: int, length: Size, reverse: bool
) -> tuple[TensorType, ...]:
    """The types of the last carries, and of what each step gives, `length` times."""
    outputs = body.output_types
    require(carries + steps <= len(xs) and carries <= len(outputs) > 0, "scan", f"{len(xs)} operands of {body}")
    require(None not in outputs and not body.has_effects, "scan", f"{body} lacks a result, or has effects")
    stacked = xs[carries : carries + steps]
    whole_time = all(x.ndim > 0 and sizes_equal(x.shape[0], length) for x in stacked)
    require(whole_time, "scan", f"axis 0 of {', '.join(map(str, stacked))} is not of {length} steps")
    each = (*xs[:carries], *(x.with_shape(x.shape[1:]) for x in stacked), *xs[carries + steps :])
    _same_types("takes", body.input_types, each)
    _same_types("gives", outputs[:carries], xs[:carries])
    return (*xs[:carries], *(y.with_shape((length, *y.shape)) for y in outputs[carries:]))


def _same_types(what: str, found: Types, expected: Types) -> None:
    same = len(found) == len(expected) and all(
        a.dtype == b.dtype and same_shape(a.shape, b.shape) for a, b in zip(found, expected, strict=True)
    )
    shown = [", ".join(map(str, types)) for types in (found, expected)]
    require(same, "scan", f"the body {what} {shown[0]}, and not {shown[1]}")


type_rules: dict[str, Callable[..., TensorType | tuple[TensorType, ...]]] = {
    **{name: (lambda x: x) for name in UNARY},
    **{name: (lambda x: x.with_dtype("b1")) for name in PREDICATES},
    **{name: _common_type for name in BINARY},
    **{name: (lambda x, y: _common_type(x, y).with_dtype("b1")) for name in COMPARE},
    "where": _where,
    "cast": lambda x, dtype: x.with_dtype(dtype),
    "check_index": _check_index,
    "full": lambda value, shape, dtype: TensorType(shape, dtype),
    "iota": lambda size, dtype: TensorType((size,), dtype),
    "broadcast": _broadcast,
    "reshape": _reshape,
    "permute": lambda x, perm: x.with_shape(x.shape[i] for i in perm),
    "slice": _slice,
    "pad": _pad,
    "flip": lambda x, axes: x,
    "cat": _cat,
    **{name: _reduce for name in ("sum", "prod", "amax", "amin")},
    "argmax": _arg_reduce,
    "argmin": _arg_reduce,
    "cumsum": lambda x, axis, reverse: x,
    "scan": _scan,
    "dot": _dot,
    "gather": _gather,
    "scatter": _scatter,
    "random": lambda seed, offset, shape, dtype, kind: TensorType(shape, dtype),
    "aten": lambda *xs, op, spec, avals: avals,
    "aten_effect": lambda *xs, op, spec, avals: avals,
    "call": lambda *xs, target, spec, avals: avals,
}
