"""The closed list of primitives. Operands of an elementwise primitive agree exactly in shape and dtype (`cast` and
`broadcast` are explicit), so that every rule about it is one line. Everything else is `aten`: called as it is.

    full(value, shape, dtype)            a constant; value: number or sympy expression over sizes
    iota(size, dtype)                    0, 1, .. size-1
    cast(x, dtype)                       torch's conversion
    broadcast(x, shape, axes)            axis i of x becomes axis axes[i] of the result (axes ascending)
    reshape(x, shape)  permute(x, perm)  flip(x, axes)
    slice(x, start, stop, step)          one triple per axis, 0 <= start, step > 0
    pad(x, lo, hi, inner)                zeros before, after and between the elements of each axis, all >= 0
    cat(*xs, axis)
    sum prod amax amin(x, axes)          the axes go; sum and prod of low floats accumulate in float32
    argmax argmin(x, axis)               i64, the first of equals, NaN wins
    cumsum(x, axis, reverse)
    scan(*init, *xs, *wholes, body, carries, steps, length, reverse)   -> (*last carries, *ys)
                                         a loop: body(*carries, *one step of each x, *wholes) -> (*carries, *one step
                                         of each y), `length` times along axis 0 of xs and ys, which may be 0 times;
                                         reverse: from the last step to the first, ys at the place of their step
    dot(x, y, x_axes, y_axes, out_axes)  a two-operand einsum over integer labels
    gather(x, *index, axes)              index tensors of one shape; result: index.shape + the other axes of x
    scatter(base, src, *index, axes, mode)   its adjoint; src: index.shape + the other axes; mode "add" or "set"
    check_index(index, size)             the index; where not 0 <= index < size, a fault
    random(seed, offset, shape, dtype, kind)   kind "uniform" or "normal"; seed and offset are 0-d i64 values. Place i =
                                         offset + flat index has word i % 4 of Philox4x32-10 at (seed, i // 4)
    aten(*xs, op, spec, avals)           op: "aten.sort.default"; spec: (args, kwargs) with Arg(i) where operand i goes
    call(*xs, target, spec, avals)       a nested autograd Function, with its own rules
    pick(x, index)                       one result of a node that has several
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prim:
    """`family` is what fusion and emission ask about; `effect` means: neither merged nor removed."""

    name: str
    family: str
    arity: int | None  # None: any number of operands
    params: tuple[str, ...] = ()
    effect: bool = False


@dataclass(frozen=True, slots=True, order=True)
class Arg:
    """In the `spec` of an aten or call node: the place where operand `index` goes."""

    index: int

    def __repr__(self) -> str:
        return f"${self.index}"


UNARY = tuple(
    "neg conj abs sign exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh "
    "acosh atanh sigmoid erf lgamma floor ceil round trunc reciprocal not isnan isinf signbit".split()
)
BINARY = tuple("add sub mul div pow max min rem fmod floordiv atan2 hypot and or xor shl shr".split())
COMPARE = tuple("eq ne lt le gt ge".split())
PREDICATES = ("isnan", "isinf", "signbit")

_table = [
    Prim("input", "input", 0, ("index", "name", "strides", "is_top")),
    *(Prim(name, "elementwise", 1) for name in UNARY),
    *(Prim(name, "elementwise", 2) for name in BINARY + COMPARE),
    Prim("where", "elementwise", 3),
    Prim("cast", "elementwise", 1, ("dtype",)),
    Prim("check_index", "elementwise", 2),
    Prim("full", "source", 0, ("value", "shape", "dtype")),
    Prim("iota", "source", 0, ("size", "dtype")),
    Prim("broadcast", "layout", 1, ("shape", "axes")),
    Prim("reshape", "layout", 1, ("shape",)),
    Prim("permute", "layout", 1, ("perm",)),
    Prim("slice", "layout", 1, ("start", "stop", "step")),
    Prim("pad", "layout", 1, ("lo", "hi", "inner")),
    Prim("flip", "layout", 1, ("axes",)),
    Prim("cat", "layout", None, ("axis",)),
    *(Prim(name, "reduce", 1, ("axes",)) for name in ("sum", "prod", "amax", "amin")),
    *(Prim(name, "reduce", 1, ("axis",)) for name in ("argmax", "argmin")),
    Prim("cumsum", "cumulative", 1, ("axis", "reverse")),
    Prim("scan", "scan", None, ("body", "carries", "steps", "length", "reverse")),
    Prim("dot", "contract", 2, ("x_axes", "y_axes", "out_axes")),
    Prim("gather", "gather", None, ("axes",)),
    Prim("scatter", "scatter", None, ("axes", "mode")),
    Prim("random", "random", 2, ("shape", "dtype", "kind")),
    Prim("aten", "extern", None, ("op", "spec", "avals")),
    Prim("aten_effect", "extern", None, ("op", "spec", "avals"), effect=True),
    Prim("call", "extern", None, ("target", "spec", "avals"), effect=True),
    Prim("pick", "pick", 1, ("index",)),
]

PRIMS: dict[str, Prim] = {p.name: p for p in _table}
