"""One small graph per primitive and more, inputs for them, and a supplier of rules for `aten` and `call` nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mpmath
import numpy as np
import sympy

from fusegrad.ir import Graph, TensorType, Value, building, emit
from fusegrad.ir.evaluate import evaluate
from fusegrad.ir.loops.body import Body
from fusegrad.ir.loops.loop import results_of
from fusegrad.ir.prims import Arg
from fusegrad.ir.transforms.extern import Batched

M, N, B = sympy.symbols("M N B", integer=True, positive=True)
SIZES = ({M: 3, N: 4, B: 2}, {M: 1, N: 2, B: 3}, {M: 5, N: 1, B: 1})
Array = np.ndarray[Any, Any]
Build = Callable[..., "Value | Sequence[Value | None]"]


@dataclass(frozen=True)
class Sample:
    """A graph of inputs of these types; floats are drawn from `span`, whole numbers below `below`."""

    name: str
    types: tuple[TensorType, ...]
    build: Build
    span: tuple[float, float] = (-2.0, 2.0)
    below: int = 1
    linear_in: tuple[int, ...] = ()

    def graph(self) -> Graph:
        graph = Graph(self.name.replace(" ", "_"))
        values = [graph.input(t, f"x{i}") for i, t in enumerate(self.types)]
        with building(graph):
            found = self.build(*values)
        return graph.returning([found] if isinstance(found, Value) else list(found))

    @property
    def floats(self) -> tuple[int, ...]:
        return tuple(i for i, t in enumerate(self.types) if t.dtype in ("f32", "f64", "c128"))

    def inputs(self, sizes: Mapping[Any, int], seed: int = 0) -> list[Array]:
        rng = np.random.default_rng(seed)
        return [array(t, sizes, rng, self.span, self.below) for t in self.types]


def shape_of(aval: TensorType, sizes: Mapping[Any, int]) -> tuple[int, ...]:
    return tuple(int(n.subs(sizes)) if isinstance(n, sympy.Basic) else n for n in aval.shape)


def array(
    aval: TensorType,
    sizes: Mapping[Any, int],
    rng: np.random.Generator,
    span: tuple[float, float] = (-2.0, 2.0),
    below: int = 1,
) -> Array:
    shape = shape_of(aval, sizes)
    if aval.dtype == "b1":
        return rng.random(shape) < 0.5
    if aval.dtype in ("i32", "i64"):
        return rng.integers(0, below, shape)
    values = rng.uniform(*span, shape)
    return values + 1j * rng.uniform(*span, shape) if aval.dtype.startswith("c") else values


def f64(*shape: Any) -> TensorType:
    return TensorType(shape, "f64")


def i64(*shape: Any) -> TensorType:
    return TensorType(shape, "i64")


def a_step(x: Value) -> TensorType:
    return x.aval.with_shape(x.shape[1:])


def constant(value: Any, like: Any) -> Value:
    return emit("full", value=value, shape=like.shape, dtype=like.dtype)


def prim(name: str, **params: Any) -> Build:
    return lambda *xs: emit(name, *xs, **params)


# ---------------------------------------------------------------------------------------------- the samples
X, Y = f64(M, N), f64(M, N)
POSITIVE, INSIDE, ABOVE_ONE = (0.2, 3.0), (-0.9, 0.9), (1.1, 3.0)
spans = {
    **dict.fromkeys("log log2 log10 log1p sqrt rsqrt lgamma".split(), POSITIVE),
    **dict.fromkeys("asin acos atanh".split(), INSIDE),
    "acosh": ABOVE_ONE, "reciprocal": POSITIVE, "tan": INSIDE,
}  # fmt: skip
ELEMENTWISE = (
    "neg abs exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh "
    "atanh sigmoid erf lgamma reciprocal"
).split()



def scan(step: Callable[..., Any], carries: int, steps: int, reverse: bool = False) -> Build:
    """A loop along axis 0 of the xs, which are of M steps: step(*inputs of the body) -> its outputs."""

    def build(*xs: Value) -> list[Value]:
        body = Graph("step")
        types = [x.aval.with_shape(x.shape[1:]) if carries <= i < carries + steps else x.aval for i, x in enumerate(xs)]
        inputs = [body.input(t, f"s{i}") for i, t in enumerate(types)]
        with building(body):
            body.returning(step(*inputs))
        params = {"carries": carries, "steps": steps, "length": M, "reverse": reverse}
        return results_of(emit("scan", *xs, body=Body(body), **params))

    return build


def _gated(h: Value, a: Value, x: Value) -> list[Value]:
    new = emit("add", emit("mul", h, a), x)
    return [new, new]


def _rnn(h: Value, x: Value, w: Value) -> list[Value]:
    product = emit("dot", h, w, x_axes=(0, 1), y_axes=(1, 2), out_axes=(0, 2))
    new = emit("tanh", emit("add", product, x))
    return [new, emit("sum", emit("mul", new, new), axes=(1,))]


def _crossed(h: Value, k: Value, x: Value, w: Value) -> list[Value]:
    """Carries that change places, a whole in each step, what was carried before among the results."""
    return [emit("sin", k), emit("add", emit("mul", h, w), x), h, emit("mul", k, x), x]


def _counted(n: Value, h: Value, x: Value) -> list[Value]:
    """A counter beside, and a factor that is made of it."""
    one, scale = constant(1, n), emit("cast", emit("broadcast", n, shape=h.shape, axes=()), dtype="f64")
    return [emit("add", n, one), emit("add", emit("mul", h, emit("sin", scale)), x), n]


def _reset(h: Value, x: Value, keep: Value) -> list[Value]:
    new = emit("max", emit("where", keep, h, constant(-1.0, h)), x)
    return [new, new]


def _of_samples(h: Value, x: Value) -> list[Value]:
    """One op that is no primitive in each step."""
    total, doubled = split_op(emit("mul", h, x))
    return [doubled, total]


def _within(h: Value, x: Value) -> list[Value]:
    """A loop within each step."""
    return [scan(lambda k, y: [emit("sin", emit("add", k, y))], 1, 1)(h, x)[0], h]


def _linear_beside(h: Value, k: Value, x: Value, g: Value) -> list[Value]:
    """h is carried whatever g is, and k is linear in it."""
    new = emit("sin", emit("add", h, x))
    return [new, emit("add", emit("mul", k, new), g), emit("mul", g, h), new]


ROW, ROWS, SQUARE = f64(2, N), f64(M, 2, N), f64(N, N)
loops = [
    Sample("scan gated", (ROW, ROWS, ROWS), scan(_gated, 1, 2)),
    Sample("scan gated reverse", (ROW, ROWS, ROWS), scan(_gated, 1, 2, reverse=True)),
    Sample("scan rnn", (ROW, ROWS, SQUARE), scan(_rnn, 1, 1), (-1.0, 1.0)),
    Sample("scan crossed", (ROW, ROW, ROWS, ROW), scan(_crossed, 2, 1, reverse=True)),
    Sample("scan counted", (i64(), ROW, ROWS), scan(_counted, 2, 1)),
    Sample("scan with reset", (ROW, ROWS, TensorType((M, 2, N), "b1")), scan(_reset, 1, 2)),
    Sample("scan of one result", (ROW, ROWS), scan(lambda h, x: [emit("mul", emit("sin", h), x)], 1, 1)),
    Sample("scan without carries", (ROWS, ROW), scan(lambda x, w: [emit("mul", emit("sin", x), w)], 0, 1)),
    Sample("scan of aten", (ROW, ROWS), scan(_of_samples, 1, 1)),
    Sample("scan within", (ROW, f64(M, M, 2, N)), scan(_within, 1, 1)),
]

samples = [
    *loops,
    *(Sample(name, (X,), prim(name), spans.get(name, (-2.0, 2.0))) for name in ELEMENTWISE),
    *(Sample(name, (X, Y), prim(name)) for name in "add sub mul max min rem fmod atan2 hypot".split()),
    *(Sample(name, (X, Y), prim(name), POSITIVE) for name in ("div", "pow")),
    Sample("conj", (X,), prim("conj")),
    Sample("where", (TensorType((M, N), "b1"), X, Y), prim("where")),
    Sample("cast", (X,), prim("cast", dtype="f32")),
    Sample("broadcast new", (f64(M),), prim("broadcast", shape=(N, M, 2), axes=(1,))),
    Sample("broadcast stretched", (f64(M, 1),), prim("broadcast", shape=(M, N), axes=(0, 1))),
    Sample("reshape", (f64(M, N, 2),), prim("reshape", shape=(M * N, 2))),
    Sample("permute", (f64(M, N, 2),), prim("permute", perm=(2, 0, 1))),
    Sample("flip", (X,), prim("flip", axes=(1,))),
    Sample("slice", (f64(M, 7),), prim("slice", start=(0, 1), stop=(M, 7), step=(1, 3))),
    Sample("slice symbolic", (f64(2 * N + 1, M),), prim("slice", start=(1, 0), stop=(2 * N, M), step=(2, 1))),
    Sample("slice to nothing", (f64(M, 4),), prim("slice", start=(0, 4), stop=(M, 4), step=(1, 2))),
    Sample("pad", (X,), prim("pad", lo=(1, 0), hi=(0, N), inner=(0, 2))),
    Sample("cat", (X, f64(M, 2), Y), prim("cat", axis=1)),
    *(Sample(f"{name} {axes}", (X,), prim(name, axes=axes)) for name in ("sum", "amax", "amin", "prod")
      for axes in ((1,), (0, 1))),
    Sample("cumsum", (X,), prim("cumsum", axis=0, reverse=False)),
    Sample("cumsum reverse", (X,), prim("cumsum", axis=1, reverse=True)),
    Sample("dot", (f64(M, N), f64(N, 3)), prim("dot", x_axes=(0, 1), y_axes=(1, 2), out_axes=(0, 2))),
    Sample("dot batched", (f64(2, M, N), f64(N, 2)), prim("dot", x_axes=(5, 0, 1), y_axes=(1, 5), out_axes=(0, 5))),
    Sample("dot outer", (f64(M), f64(N)), prim("dot", x_axes=(0,), y_axes=(1,), out_axes=(1, 0))),
    Sample("dot sums alone", (f64(M, N), f64(3)), prim("dot", x_axes=(0, 1), y_axes=(2,), out_axes=(2, 0))),
    Sample("gather", (f64(3, M), i64(N)), prim("gather", axes=(0,)), below=3),
    Sample("gather inner", (f64(M, 3, 2), i64(N, 2)), prim("gather", axes=(1,)), below=3),
    Sample("gather two", (f64(3, M, 2), i64(N), i64(N)), prim("gather", axes=(0, 2)), below=2),
    Sample("gather checked", (f64(3, M), i64(N)), lambda x, i: emit("gather", x, _checked(i, 3), axes=(0,)), below=3),
    Sample("scatter add", (f64(3, M), f64(N, M), i64(N)), prim("scatter", axes=(0,), mode="add"), below=3),
    Sample("scatter inner", (f64(M, 3), f64(N, 2, M), i64(N, 2)), prim("scatter", axes=(1,), mode="add"), below=3),
    Sample("scatter two", (f64(3, M, 2), f64(N, M), i64(N), i64(N)), prim("scatter", axes=(0, 2), mode="add"), below=2),
    Sample("pick and aten", (X,), lambda x: split_op(x)),
    Sample("call", (X, Y), lambda x, y: call("halved_product", x, y)),
]  # fmt: skip


def _checked(index: Value, size: int) -> Value:
    return emit("check_index", index, emit("full", value=size, shape=index.shape, dtype="i64"))


def _one_place(base: Value, src: Value) -> Value:
    """scatter in mode "set" with indices that do not repeat."""
    at = emit("iota", size=2, dtype="i64")
    return emit("scatter", base, src, at, axes=(0,), mode="set")


def _softmax(x: Value) -> Value:
    top = emit("broadcast", emit("amax", x, axes=(1,)), shape=x.shape, axes=(0,))
    e = emit("exp", emit("sub", x, top))
    return emit("div", e, emit("broadcast", emit("sum", e, axes=(1,)), shape=x.shape, axes=(0,)))


def _rms_norm(x: Value, w: Value) -> list[Value]:
    mean = emit("div", emit("sum", emit("mul", x, x), axes=(1,)), emit("full", value=N, shape=(M,), dtype=x.dtype))
    r = emit("rsqrt", emit("add", mean, constant(1e-3, mean)))
    y = emit("mul", x, emit("broadcast", r, shape=x.shape, axes=(0,)))
    return [emit("mul", y, emit("broadcast", w, shape=x.shape, axes=(1,))), r]


def _clamp(x: Value) -> Value:
    low, high = constant(-1.0, x), constant(1.0, x)
    x = emit("where", emit("lt", x, low), low, x)
    return emit("where", emit("gt", x, high), high, x)


compositions = [
    Sample("scatter set", (f64(3, M), f64(2, M)), _one_place),
    Sample("softmax", (X,), _softmax),
    Sample("rms norm", (X, f64(N)), _rms_norm),
    Sample("clamp", (X,), _clamp),
    Sample("twice the same", (X,), lambda x: emit("mul", x, emit("add", x, x))),
    Sample("an input as output", (X, Y), lambda x, y: [x, None, emit("sin", y), x]),
    Sample("integers beside", (X,), lambda x: [emit("argmax", x, axis=1), emit("sum", x, axes=(0,))]),
    Sample("nothing differentiable", (X,), lambda x: emit("floor", x)),
]
differentiable = samples + compositions
no_tangent = [
    *(Sample(name, (X,), prim(name)) for name in "sign floor ceil round trunc isnan isinf signbit".split()),
    *(Sample(name, (X, Y), prim(name)) for name in "eq ne lt le gt ge".split()),
    Sample("floordiv", (X, Y), prim("floordiv"), POSITIVE),
    Sample("argmax", (X,), prim("argmax", axis=1)),
    Sample("argmin", (X,), prim("argmin", axis=0)),
]
integer = [
    *(Sample(name, (i64(M, N), i64(M, N)), prim(name), below=5) for name in "and or xor shl shr add max".split()),
    Sample("not", (TensorType((M, N), "b1"),), prim("not")),
    Sample("iota full", (i64(),), lambda x: emit("iota", size=N, dtype="i64"), below=5),
]

# linear in the inputs `linear_in`, constant in the others
linear = [
    Sample("negated sum", (X,), lambda g: emit("neg", emit("sum", g, axes=(0,))), linear_in=(0,)),
    Sample("scaled", (X, Y), prim("mul"), linear_in=(0,)),
    Sample("scaled left", (X, Y), prim("mul"), linear_in=(1,)),
    Sample("divided", (X, Y), prim("div"), POSITIVE, linear_in=(0,)),
    Sample("sum of two", (X, Y), prim("add"), linear_in=(0, 1)),
    Sample("difference", (X, Y), prim("sub"), linear_in=(0, 1)),
    Sample("masked", (X, TensorType((M, N), "b1")), lambda g, m: emit("where", m, g, constant(0.0, g)), linear_in=(0,)),
    Sample("times zero", (X,), lambda g: emit("mul", g, constant(0.0, g)), linear_in=(0,)),
    Sample("rounded", (X,), lambda g: emit("cast", emit("cast", g, dtype="bf16"), dtype="f64"), linear_in=(0,)),
    *(Sample(f"matmul {i}", (f64(M, N), f64(N, 3)), prim("dot", x_axes=(0, 1), y_axes=(1, 2), out_axes=(0, 2)),
             linear_in=(i,)) for i in (0, 1)),
    Sample("loop", (ROW, ROWS, ROWS), scan(_gated, 1, 2), linear_in=(0, 2)),
    Sample("loop backwards", (ROW, ROWS, ROWS), scan(_gated, 1, 2, reverse=True), linear_in=(0, 2)),
    Sample("loop from zeros", (ROWS, ROWS),
           lambda a, g: scan(_gated, 1, 2)(constant(0.0, a_step(a)), a, g), linear_in=(1,)),
    Sample("loop with a matrix", (ROW, ROWS, SQUARE), scan(lambda h, g, w: [emit("add", emit("dot", h, w,
           x_axes=(0, 1), y_axes=(1, 2), out_axes=(0, 2)), g)], 1, 1), linear_in=(0, 1)),
    Sample("whole in a loop", (ROWS, ROW), scan(lambda x, g: [emit("mul", x, g)], 0, 1), linear_in=(1,)),
    Sample("loop beside what is known", (ROW, ROW, ROWS, ROWS),
           lambda *xs: [scan(_linear_beside, 2, 2)(*xs)[i] for i in (1, 2)], linear_in=(1, 3)),
    Sample("scan", (X,), prim("cumsum", axis=1, reverse=False), linear_in=(0,)),
    Sample("index", (f64(3, M), i64(N)), prim("gather", axes=(0,)), below=3, linear_in=(0,)),
    Sample("add at", (f64(3, M), f64(N, M), i64(N)), prim("scatter", axes=(0,), mode="add"), below=3, linear_in=(0, 1)),
    Sample("put", (f64(3, M), f64(2, M)), _one_place, linear_in=(0, 1)),
    Sample("put into zeros", (f64(2, M),), lambda g: _one_place(emit("full", value=0.0, shape=(3, M), dtype="f64"), g),
           linear_in=(0,)),
    Sample("pieces", (X, f64(M, 2)), prim("cat", axis=1), linear_in=(0, 1)),
    Sample("beside zeros", (X,), lambda g: emit("cat", g, constant(0.0, g), axis=0), linear_in=(0,)),
    Sample("strided", (f64(M, 7),), prim("slice", start=(0, 1), stop=(M, 7), step=(1, 3)), linear_in=(0,)),
    Sample("padded", (X,), prim("pad", lo=(1, 0), hi=(0, 2), inner=(0, 2)), linear_in=(0,)),
    Sample("spread", (f64(M, 1),), prim("broadcast", shape=(M, N), axes=(0, 1)), linear_in=(0,)),
    Sample("turned", (f64(M, N, 2),), lambda g: emit("flip", emit("permute", g, perm=(2, 0, 1)), axes=(0,)),
           linear_in=(0,)),
    Sample("two uses", (X, Y), lambda g, w: [emit("mul", emit("add", g, emit("mul", g, w)), w), emit("neg", g)],
           linear_in=(0,)),
    Sample("softmax backward", (X, Y), lambda g, y: emit("mul", y, emit("sub", g, emit("broadcast",
           emit("sum", emit("mul", g, y), axes=(1,)), shape=g.shape, axes=(0,)))), linear_in=(0,)),
    Sample("aten", (X,), lambda g: split_op(g), linear_in=(0,)),
    Sample("aten of one output", (X,), lambda g: split_op(g)[1], linear_in=(0,)),
]  # fmt: skip


# ---------------------------------------------------------------------------------------------- not primitives
def split_op(x: Value) -> list[Value]:
    """An op with two results: the rows added up, and everything doubled."""
    avals = (x.aval.with_shape(x.shape[1:]), x.aval)
    node = emit("aten", x, op="aten.two_results.default", spec=((Arg(0),), ()), avals=avals)
    return [emit("pick", node, index=i) for i in (0, 1)]


def call(target: str, *xs: Value) -> Value:
    return emit("call", *xs, target=target, spec=(tuple(map(Arg, range(len(xs)))), ()), avals=(xs[0].aval,))


def called(node: Value) -> str:
    return str(node.params.get("op", node.params.get("target")))


def run_extern(value: Value, operands: Sequence[Array], sizes: Mapping[sympy.Symbol, int]) -> Any:
    """What an evaluator does for nodes that are not primitives."""
    op, x = called(value), operands[0]
    if op == "aten.two_results.default":
        axis = x.ndim - 2
        return [x.sum(axis), 2 * x]
    if op == "aten.cumprod.default":
        return np.cumprod(x, value.params["spec"][0][1])
    if op == "aten.digamma.default":
        return np.vectorize(lambda v: float(mpmath.digamma(v)), otypes=[float])(x)
    if op == "aten.noise.default":
        return np.random.default_rng(7).random(x.shape)
    if op == "halved_product":
        return x * operands[1] / 2
    raise KeyError(op)


def run(graph: Graph, inputs: Sequence[Array], sizes: Mapping[Any, int]) -> list[Array | None]:
    return evaluate(graph, inputs, sizes, run_extern)


@dataclass
class Rules:
    """Rules for the nodes above, written as graphs, and a record of what was asked for.

    `halved_product` has a gradient of its own, which is not the derivative of what it computes.
    """

    asked: list[tuple[Any, ...]] = field(default_factory=list)

    def batch(self, node: Value, mapped: tuple[bool, ...], size: Any, randomness: str) -> Batched:
        self.asked.append(("batch", called(node), mapped, randomness))
        rule = Graph("rule")
        types = [a.aval.with_shape((size, *a.shape)) if m else a.aval for a, m in zip(node.args, mapped, strict=True)]
        args = [rule.input(t, f"x{i}") for i, t in enumerate(types)]
        with building(rule):
            if called(node) == "aten.noise.default":
                avals = (args[0].aval,) if any(mapped) else (args[0].aval.with_shape((size, *args[0].shape)),)
                return Batched(rule.returning([emit(node.prim, *args, **node.params | {"avals": avals})]), (True,))
            results = _outputs(_lanes(node, args, mapped, size))
        return Batched(rule.returning(results), (True,) * len(results))

    def jvp(self, node: Value, wrt: tuple[int, ...]) -> Graph:
        self.asked.append(("jvp", called(node), wrt))
        rule, args, _, tangents = _rule(node, [node.args[i].aval for i in wrt])
        with building(rule):
            return rule.returning(derivatives[called(node)][0](args, dict(zip(wrt, tangents, strict=True))))

    def vjp(self, node: Value, wrt: tuple[int, ...], given: tuple[int, ...]) -> Graph:
        self.asked.append(("vjp", called(node), wrt, given))
        rule, args, _, bars = _rule(node, [node.avals[i] for i in given])
        with building(rule):
            found = derivatives[called(node)][1](args, dict(zip(given, bars, strict=True)))
            return rule.returning([found[i] for i in wrt])

    def is_linear(self, node: Value, wrt: tuple[int, ...]) -> bool | None:
        return {"aten.two_results.default": True, "aten.cumprod.default": False}.get(called(node))


def _rule(node: Value, more: Sequence[TensorType]) -> tuple[Graph, list[Value], list[Value], list[Value]]:
    rule = Graph("rule")
    args = [rule.input(a.aval, f"x{i}") for i, a in enumerate(node.args)]
    results = [rule.input(t, f"y{i}") for i, t in enumerate(node.avals)]
    return rule, args, results, [rule.input(t, f"t{i}") for i, t in enumerate(more)]


def _outputs(found: Value | list[Value]) -> list[Value]:
    return found if isinstance(found, list) else [found]


def _lanes(node: Value, args: list[Value], mapped: tuple[bool, ...], size: Any) -> Value | list[Value]:
    xs = [a if m else emit("broadcast", a, shape=(size, *a.shape), axes=tuple(range(1, a.ndim + 1)))
          for a, m in zip(args, mapped, strict=True)]  # fmt: skip
    avals = tuple(t.with_shape((size, *t.shape)) for t in node.avals)
    params = node.params | {"avals": avals}
    if called(node) == "aten.cumprod.default":
        params = params | {"spec": ((Arg(0), node.params["spec"][0][1] + 1), ())}
    again = emit(node.prim, *xs, **params)
    return again if len(avals) == 1 else [emit("pick", again, index=i) for i in range(len(avals))]


def _split_jvp(args: list[Value], t: dict[int, Value]) -> list[Value | None]:
    return list(split_like(t[0]))


def split_like(x: Value) -> list[Value]:
    return [emit("sum", x, axes=(x.ndim - 2,)), emit("mul", x, constant(2.0, x))]


def _split_vjp(args: list[Value], c: dict[int, Value]) -> list[Value | None]:
    (x,) = args
    kept = tuple(a for a in range(x.ndim) if a != x.ndim - 2)
    parts = [emit("broadcast", c[0], shape=x.shape, axes=kept)] if 0 in c else []
    parts += [emit("mul", c[1], constant(2.0, x))] if 1 in c else []
    return [parts[0] if len(parts) == 1 else emit("add", *parts)]


def _cumprod_factors(x: Value) -> Value:
    """[.., i, k]: the derivative of result i by element k, along the last axis."""
    *lines, n = x.shape
    cube = (*lines, n, n, n)  # result i, element k, factor j
    count = emit("iota", size=n, dtype="i64")
    i, k, j = (emit("broadcast", count, shape=cube, axes=(len(lines) + a,)) for a in (0, 1, 2))
    factor = emit("broadcast", x, shape=cube, axes=(*range(len(lines)), len(lines) + 2))
    used = emit("and", emit("le", j, i), emit("ne", j, k))
    product = emit("prod", emit("where", used, factor, constant(1.0, factor)), axes=(len(lines) + 2,))
    small = [emit("slice", v, start=(0,) * v.ndim, stop=(*cube[:-1], 1), step=(1,) * v.ndim) for v in (k, i)]
    reached = emit("le", *(emit("reshape", v, shape=cube[:-1]) for v in small))
    return emit("where", reached, product, constant(0.0, product))


def _cumprod(axis_summed: int) -> Callable[[list[Value], dict[int, Value]], list[Value | None]]:
    def derivative(args: list[Value], t: dict[int, Value]) -> list[Value | None]:
        factors = _cumprod_factors(args[0])
        last = factors.ndim - 1
        axis = last if axis_summed == 1 else last - 1
        spread = emit("broadcast", t[0], shape=factors.shape, axes=(*range(last - 1), axis))
        return [emit("sum", emit("mul", factors, spread), axes=(axis,))]

    return derivative


def _own_vjp(args: list[Value], c: dict[int, Value]) -> list[Value | None]:
    """7 times the true gradient, for the first operand alone."""
    return [emit("mul", emit("mul", c[0], args[1]), constant(3.5, args[1])), None]


def _own_jvp(args: list[Value], t: dict[int, Value]) -> list[Value | None]:
    return [emit("mul", emit("mul", t[0], args[1]), constant(3.5, args[1])) if 0 in t else None]


derivatives: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "aten.two_results.default": (_split_jvp, _split_vjp),
    "aten.cumprod.default": (_cumprod(1), _cumprod(0)),
    "halved_product": (_own_jvp, _own_vjp),
    "aten.digamma.default": (lambda args, t: [None], lambda args, c: [None]),
}
