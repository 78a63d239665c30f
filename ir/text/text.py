"""The text of a graph, and its way back. Canonical: live nodes only, renumbered, so equal text means equal graph.

    graph "scale"
    symbols s0: positive
      %0 = input(name="x") : bf16[s0, 4096]
      %1 = cast(%0, dtype="f32") : f32[s0, 4096]    # scale.py:12 y = x.float()
      return %1

The body of a loop stands before the nodes, under a number, and is indented:

      body @0 "step"
        %0 = input(name="h") : f32[4]
        return %0
      %2 = scan(%0, body=@0, carries=1, length=s0, reverse=False, steps=0) : f32[4]

Strides are written where they are not row-major. A python object that has no literal (the target of a `call`) is
written as `<name>` and read back as `Opaque(name)`. Functions that torch adds to sympy are written as plain sympy ones.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy
from sympy.printing.str import StrPrinter

from ..errors import FusegradError, ParseError
from ..graph import Graph, Origin, Value
from ..infer import sizes_equal
from ..loops.body import Body, bodies_of
from ..prims import Arg
from ..types import ITEMSIZE, Size, TensorType, contiguous_strides, simplify_size


@dataclass(frozen=True, slots=True)
class Opaque:
    """The name of a python object without a literal: it is read back as this."""

    name: str

    def __str__(self) -> str:
        return self.name


KINDS: dict[str, dict[str, bool]] = {
    "positive": {"integer": True, "positive": True},
    "nonnegative": {"integer": True, "nonnegative": True},
    "integer": {"integer": True},
    "real": {"real": True},
    "any": {},
}
"""What the header says about a symbol, strongest first."""

_floor_div: Callable[..., Any] = lambda a, b: sympy.floor(a / b)  # noqa: E731
_truncated: Callable[..., Any] = lambda a: sympy.sign(a) * sympy.floor(sympy.Abs(a))  # noqa: E731


class RoundHalfEven(sympy.Function):  # type: ignore[misc]
    """Python's `round` to a whole number."""

    is_integer = True

    @classmethod
    def eval(cls, x: sympy.Expr) -> sympy.Expr | None:
        """Of a number its value; of sizes nothing is known."""
        return sympy.Integer(round(sympy.Rational(x))) if x.is_Rational or x.is_Float else None


UNARY = ("sqrt", "log", "exp", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan", "asinh")

PLAIN: dict[str, Callable[..., Any]] = {
    "FloorDiv": _floor_div,
    "CleanDiv": _floor_div,
    "ModularIndexing": lambda a, b, n: sympy.Mod(sympy.floor(a / b), n),
    "Mod": sympy.Mod,
    "PythonMod": sympy.Mod,
    "Max": sympy.Max,
    "Min": sympy.Min,
    "CeilToInt": sympy.ceiling,
    "FloorToInt": sympy.floor,
    "ToFloat": lambda a: a,
    "IntTrueDiv": lambda a, b: a / b,
    "FloatTrueDiv": lambda a, b: a / b,
    "PowByNatural": sympy.Pow,
    "FloatPow": sympy.Pow,
    "TruncToInt": _truncated,
    "TruncToFloat": _truncated,
    "RoundToInt": RoundHalfEven,
    "Identity": lambda a: a,
    "OpaqueUnaryFn_log2": lambda a: sympy.log(a) / sympy.log(2),
    **{f"OpaqueUnaryFn_{name}": getattr(sympy, name) for name in UNARY},
}
"""torch.utils._sympy.functions, by class name, in terms of sympy's own."""

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "RoundHalfEven": RoundHalfEven,
    **{name: getattr(sympy, name) for name in ("floor", "ceiling", "Mod", "Max", "Min", "Abs", "sign", *UNARY)},
}


def plain_sympy(expr: Any) -> Any:
    """The expression in sympy's own functions.

    FloorDiv(s0, 2)  ->  floor(s0/2)
    """
    args = tuple(plain_sympy(a) for a in expr.args)
    foreign = not type(expr).__module__.startswith("sympy.")
    if foreign and type(expr).__name__ in PLAIN:
        return PLAIN[type(expr).__name__](*args)
    return expr if args == expr.args else expr.func(*args)


# ---------------------------------------------------------------------------------------------------------- show
def show(graph: Graph, *, origins: bool = False) -> str:
    """The canonical text of a graph; with `origins`, each line ends in the place of the user's code it comes from."""
    return "\n".join([*_header(graph), *_lines(graph, "  ", origins), ""])


def _lines(graph: Graph, indent: str, origins: bool) -> Iterator[str]:
    """The nodes and results of a graph, behind the bodies that its nodes have."""
    nodes = [*graph.inputs, *graph.order()]
    number = {v.id: i for i, v in enumerate(nodes)}
    bodies = {body: f"@{i}" for i, body in enumerate(dict.fromkeys(b for v in nodes for b in bodies_of(v.params)))}
    for body, name in bodies.items():
        yield f"{indent}body {name} {json.dumps(body.graph.name)}"
        yield from _lines(body.graph, f"{indent}  ", origins)
    for value in nodes:
        yield indent + _node_text(value, number, bodies) + (_comment(value.origin) if origins else "")
    results = ", ".join(_output_text(graph, i, number) for i in range(len(graph.outputs)))
    yield f"{indent}return {results}".rstrip()
    yield from (f"{indent}mutate {i} = %{number[v.id]}" for i, v in sorted(graph.mutations.items()))


def key(graph: Graph) -> str:
    """sha256 of the canonical text: equal for equal graphs, in every process."""
    return hashlib.sha256(show(graph).encode()).hexdigest()


def _header(graph: Graph) -> Iterator[str]:
    symbols = symbols_in(graph)
    yield f"graph {json.dumps(graph.name)}"
    if symbols:
        yield f"symbols {', '.join(f'{s.name}: {kind_of(s)}' for s in sorted(symbols, key=lambda s: s.name))}"


def symbols_in(graph: Graph) -> set[sympy.Symbol]:
    """The symbols of everything that a graph takes, does and gives."""
    nodes = (*graph.inputs, *graph.order())
    symbols = {s for v in nodes for part in (v.avals, *v.params.values()) for s in symbols_of(part)}
    return symbols | {s for strides in graph.output_strides for s in symbols_of(strides)}


def symbols_of(param: Any) -> set[sympy.Symbol]:
    """The sympy symbols inside a parameter, a type, a body, or nested tuples of them."""
    if isinstance(param, Body):
        return symbols_in(param.graph)
    if isinstance(param, sympy.Basic):
        return set(param.free_symbols)
    if isinstance(param, TensorType):
        return symbols_of(param.shape)
    return {s for p in param for s in symbols_of(p)} if isinstance(param, tuple) else set()


def kind_of(symbol: sympy.Symbol) -> str:
    """The assumptions about a symbol, by their word in KINDS."""
    assumptions = symbol.assumptions0
    return next(kind for kind, facts in KINDS.items() if all(assumptions.get(f) is v for f, v in facts.items()))


def _comment(origin: Origin) -> str:
    words = " ".join((origin.where or "", origin.line or origin.name or "")).split()
    return f"    # {' '.join(words)}" if words else ""


def _node_text(value: Value, number: dict[int, int], bodies: Mapping[Body, str]) -> str:
    params = {k: v for k, v in value.params.items() if _is_shown(value, k, v)}
    inside = [f"%{number[a.id]}" for a in value.args] + [
        f"{k}={bodies[v] if isinstance(v, Body) else _text(v)}" for k, v in sorted(params.items())
    ]
    return f"%{number[value.id]} = {value.prim}({', '.join(inside)}) : {_types_text(value.avals)}"


def _is_shown(value: Value, name: str, param: Any) -> bool:
    if name == "avals":
        return False  # the type of the node says it
    if value.prim == "input":
        return name in ("name", "is_top") or (name == "strides" and param != contiguous_strides(value.shape))
    return True


def _output_text(graph: Graph, index: int, number: dict[int, int]) -> str:
    value, strides = graph.outputs[index], graph.output_strides[index]
    if value is None:
        return "None"
    layout = "" if strides == contiguous_strides(value.shape) else f" strides {_text(strides)}"
    return f"%{number[value.id]}{layout}"


def _types_text(avals: tuple[TensorType, ...]) -> str:
    return _text(avals[0]) if len(avals) == 1 else _text(avals)


def _text(param: Any) -> str:
    """A parameter as text that `_Reader.value` reads back."""
    if isinstance(param, sympy.Basic):
        return size_text(param)
    if isinstance(param, str):
        return json.dumps(param)
    if isinstance(param, tuple):
        return f"({', '.join(map(_text, param))}{',' if len(param) == 1 else ''})"
    if isinstance(param, TensorType):
        return f"{param.dtype}[{', '.join(map(_text, param.shape))}]"
    if isinstance(param, complex):
        return f"complex({param.real!r}, {param.imag!r})"
    if param is None or isinstance(param, (bool, int, float, Arg)):
        return repr(param)
    return f"<{_name_of(param)}>"


def _name_of(item: Any) -> str:
    names = (getattr(item, "__qualname__", None), getattr(item, "name", None), str(item), type(item).__qualname__)
    return next(n for n in names if isinstance(n, str) and " at 0x" not in n).replace(">", "").replace("<", "")


class _Printer(StrPrinter):  # type: ignore[misc]
    def _print_Float(self, expr: sympy.Float) -> str:
        return repr(float(expr))


@lru_cache(maxsize=4096)
def size_text(expr: sympy.Basic) -> str:
    """The text of an expression, in sympy's own functions."""
    return str(_Printer().doprint(plain_sympy(expr)))


# --------------------------------------------------------------------------------------------------------- parse
def parse(text: str) -> Graph:
    """The graph that `show` wrote: show(parse(text)) == text. Raises ParseError, which names the line."""
    reader = _GraphReader()
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            reader.read(line)
        except (ValueError, KeyError, TypeError, IndexError, FusegradError) as error:
            raise ParseError(str(error), line=number, text=line.strip()) from error
    if not reader.finished:
        raise ParseError("the graph has no `return` line", line=len(text.splitlines()), text="")
    return reader.graph


def size_from(text: str, symbols: Mapping[str, sympy.Symbol], settled: bool = False) -> Any:
    """The expression that `size_text` wrote, over these symbols; ValueError or KeyError for any other text.

    settled: its functions are known to be as simple as they get, so that nothing tries, for tens of milliseconds.
    """
    reader = _Reader(text, symbols, settled)
    expr = reader.value()
    reader.finish()
    return expr


_TOKEN = re.compile(
    r"""\s*(?:(?P<comment>\#.*)|(?P<number>(?:\d+\.?\d*(?:e[+-]?\d+)?))|(?P<ref>%\d+)|(?P<operand>\$\d+)|(?P<body>@\d+)|(?P<name>\w[\w.]*)
    |(?P<string>"(?:[^"\\]|\\.)*")|(?P<opaque><[^>]*>)|(?P<punct>\*\*|[-+*/()\[\],=:]))""",
    re.VERBOSE,
)
NONE: Mapping[str, Body] = {}
WORDS: dict[str, Any] = {"None": None, "True": True, "False": False, "inf": float("inf"), "nan": float("nan")}


class _Reader:
    """Recursive descent over the tokens of one line; builds values, evaluates no code."""

    def __init__(
        self, line: str, symbols: Mapping[str, sympy.Symbol], settled: bool = False, bodies: Mapping[str, Body] = NONE
    ) -> None:
        self.symbols, self.settled, self.bodies = symbols, settled, bodies
        self.tokens = list(_tokens(line))
        self.at = 0

    @property
    def kind(self) -> str:
        return self.tokens[self.at][0]

    @property
    def text(self) -> str:
        return self.tokens[self.at][1]

    def next(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1][1]

    def accept(self, text: str) -> bool:
        matches = self.kind in ("punct", "name") and self.text == text
        self.at += matches
        return matches

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise ValueError(f"expected {text!r}, found {self.text!r}")

    def items(self, close: str, item: Callable[[], Any]) -> Iterator[Any]:
        """Items between commas up to `close`; a trailing comma is allowed."""
        while not self.accept(close):
            yield item()
            if not self.accept(","):
                self.expect(close)
                return

    def value(self) -> Any:
        """sum := ['-'] product (('+' | '-') product)*"""
        terms = [self.product()]
        while self.text in ("+", "-") and self.kind == "punct":
            terms.append(self.product())
        return terms[0] if len(terms) == 1 else simplify_size(sympy.Add(*map(_number, terms)))

    def product(self) -> Any:
        """product := ['-' | '+'] power (('*' | '/') power)*"""
        negative = self.accept("-")
        _ = negative or self.accept("+")
        factors = [self.power()]
        while self.text in ("*", "/") and self.kind == "punct":
            divide = self.next() == "/"
            factors.append(sympy.Pow(_number(self.power()), -1) if divide else self.power())
        if len(factors) == 1 and not isinstance(factors[0], sympy.Basic):
            return -_number(factors[0]) if negative else factors[0]
        return simplify_size(sympy.Mul(*([-1] if negative else []), *map(_number, factors)))

    def power(self) -> Any:
        base = self.atom()
        if not self.accept("**"):
            return base
        negative = self.accept("-")
        exponent = _number(self.power())
        return sympy.Pow(_number(base), -exponent if negative else exponent)

    def atom(self) -> Any:
        kind, token = self.kind, self.next()
        if kind == "punct" and token == "(":
            return self.parenthesis()
        if kind not in atoms:
            raise ValueError(f"expected a value, found {token!r}")
        return atoms[kind](self, token)

    def parenthesis(self) -> Any:
        """A tuple, or one expression in parentheses."""
        if self.accept(")"):
            return ()
        first = self.value()
        if self.accept(")"):
            return first
        self.expect(",")
        return (first, *self.items(")", self.value))

    def name(self, token: str) -> Any:
        if token in WORDS:
            return WORDS[token]
        if token in ITEMSIZE and self.accept("["):
            return TensorType(tuple(self.items("]", self.value)), token)
        if self.accept("("):
            return _apply(token, list(self.items(")", self.value)), self.settled)
        return self.symbols[token]

    def finish(self) -> None:
        if self.kind != "end":
            raise ValueError(f"unexpected {self.text!r}")


atoms: dict[str, Callable[[_Reader, str], Any]] = {
    "number": lambda reader, token: int(token) if token.isdigit() else float(token),
    "string": lambda reader, token: json.loads(token),
    "operand": lambda reader, token: Arg(int(token[1:])),
    "body": lambda reader, token: reader.bodies[token],
    "opaque": lambda reader, token: Opaque(token[1:-1]),
    "name": lambda reader, token: reader.name(token),
}


def _tokens(line: str) -> Iterator[tuple[str, str]]:
    at, end = 0, len(line.rstrip())
    while at < end:
        match = _TOKEN.match(line, at)
        if match is None:
            raise ValueError(f"cannot read {line[at:].strip()!r}")
        at = match.end()
        if match.lastgroup != "comment":
            yield str(match.lastgroup), match[str(match.lastgroup)]
    yield "end", "end of line"


def _apply(function: str, args: list[Any], settled: bool = False) -> Any:
    if function == "complex":
        return complex(*args)
    if settled and function in ("floor", "ceiling", "Max", "Min"):
        return FUNCTIONS[function](*map(sympy.sympify, map(_number, args)), evaluate=False)
    return FUNCTIONS.get(function, sympy.Function(function))(*map(_number, args))


def _number(item: Any) -> Any:
    """The item, which must be a number: sympy would evaluate a string."""
    if not isinstance(item, (int, float, complex, sympy.Basic)):
        raise ValueError(f"{item!r} is not a number")
    return item


class _GraphReader:
    """Reads line by line; what a line begins with says what it is."""

    def __init__(self, name: str = "graph", symbols: dict[str, sympy.Symbol] | None = None) -> None:
        self.graph = Graph(name)
        self.symbols: dict[str, sympy.Symbol] = {} if symbols is None else symbols
        self.values: dict[str, Value] = {}
        self.bodies: dict[str, Body] = {}
        self.within: tuple[str, _GraphReader] | None = None
        self.finished = False

    def read(self, line: str) -> None:
        if self.within is not None:
            return self.read_body(*self.within, line)
        reader = _Reader(line, self.symbols, bodies=self.bodies)
        if reader.kind == "end":
            return
        if reader.kind == "ref":
            self.node(reader)
        else:
            statements[reader.next()](self, reader)
        reader.finish()

    def body(self, reader: _Reader) -> None:
        """From here on lines are those of a body, up to its `return`."""
        name = reader.next()
        self.within = (name, _GraphReader(json.loads(reader.next()), self.symbols))

    def read_body(self, name: str, inner: _GraphReader, line: str) -> None:
        inner.read(line)
        if inner.finished:
            self.bodies[name], self.within = Body(inner.graph), None

    def graph_name(self, reader: _Reader) -> None:
        self.graph.name = json.loads(reader.next())

    def declare(self, reader: _Reader) -> None:
        while True:
            name = reader.next()
            reader.expect(":")
            self.symbols[name] = sympy.Symbol(name, **KINDS[reader.next()])
            if not reader.accept(","):
                return

    def node(self, reader: _Reader) -> None:
        name = reader.next()
        if name in self.values:
            raise ValueError(f"{name} is defined twice")
        reader.expect("=")
        prim = reader.next()
        args, params = self.operands(reader)
        reader.expect(":")
        declared = reader.value()
        avals = declared if isinstance(declared, tuple) else (declared,)
        self.values[name] = self.emit(prim, args, params, avals)

    def operands(self, reader: _Reader) -> tuple[list[Value], dict[str, Any]]:
        args: list[Value] = []
        params: dict[str, Any] = {}
        reader.expect("(")
        for name, item in reader.items(")", lambda: self.operand(reader)):
            if name is None:
                args.append(item)
            else:
                params[name] = item
        return args, params

    def operand(self, reader: _Reader) -> tuple[str | None, Any]:
        if reader.kind == "ref":
            return None, self.values[reader.next()]
        name = reader.next()
        reader.expect("=")
        return name, reader.value()

    def emit(self, prim: str, args: list[Value], params: dict[str, Any], avals: tuple[TensorType, ...]) -> Value:
        if prim == "input":
            return self.graph.input(avals[0], **params)
        if prim in ("aten", "aten_effect", "call"):
            params["avals"] = avals
        value = self.graph.emit(prim, args, params)
        if len(value.avals) != len(avals) or not all(map(_same, value.avals, avals)):
            raise ValueError(f"the type rule says {_types_text(value.avals)}")
        value.attrs["avals"] = avals
        return value

    def outputs(self, reader: _Reader) -> None:
        outputs: list[Value | None] = []
        strides: list[tuple[Size, ...] | None] = []
        while reader.kind != "end":
            output = None if reader.accept("None") else self.values[reader.next()]
            outputs.append(output)
            strides.append(self.layout(reader, output))
            if not reader.accept(","):
                break
        self.graph.returning(outputs, strides)
        self.finished = True

    def layout(self, reader: _Reader, output: Value | None) -> tuple[Size, ...] | None:
        if output is None:
            return None
        if not reader.accept("strides"):
            return contiguous_strides(output.shape)
        strides: tuple[Size, ...] | None = reader.value()
        return strides

    def mutation(self, reader: _Reader) -> None:
        index = int(reader.next())
        reader.expect("=")
        self.graph.mutations[index] = self.values[reader.next()]


statements: dict[str, Callable[[_GraphReader, _Reader], None]] = {
    "graph": _GraphReader.graph_name,
    "symbols": _GraphReader.declare,
    "body": _GraphReader.body,
    "return": _GraphReader.outputs,
    "mutate": _GraphReader.mutation,
}


def _same(a: TensorType, b: TensorType) -> bool:
    return a.dtype == b.dtype and len(a.shape) == len(b.shape) and all(map(sizes_equal, a.shape, b.shape))
