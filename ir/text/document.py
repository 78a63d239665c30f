"""A graph as plain data for JSON, and its way back from a stranger's file: evaluates no code, and bounds its own work.

    {"prim": "mul", "operands": [0, 3], "dtype": "f32", "shape": ["s0", 4096], "parameters": {}, "origin": {..}}

Live nodes only, numbered in an order that runs. Sizes are ints or texts such as "s0*2"; inside parameters an expression
is {"size": text}, a place for an operand {"operand": n}, a number that JSON lacks {"float": "inf"}, {"complex": [..]},
the body of a loop {"body": document}, whose sizes are those of the whole.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sympy

from ..errors import FusegradError, ParseError
from ..graph import Graph, Origin, Value, provenance
from ..infer import sizes_equal
from ..loops.body import Body
from ..prims import PRIMS, Arg
from ..types import Size, TensorType
from ..verify import verify
from .text import FUNCTIONS, KINDS, kind_of, size_from, size_text, symbols_in

Symbols = Mapping[str, sympy.Symbol]
MOST_NODES = 20_000
MOST_SIZE = 1 << 62
LONGEST_TEXT = 1000
LONGEST_SIZE = 400
MOST_TERMS = 64
DEEPEST = 12
DEEPEST_LOOP = 4
MOST_BRACKETS = 24
MOST_FUNCTIONS = 10
MOST_POWER = 4
MOST_SECONDS = 20.0
GROWING = ("exp", "sinh", "cosh", "tan")
"""Functions whose numbers may be too long to write down: no size from a file has them."""
GRAPH_FIELDS = ("name", "symbols", "nodes", "outputs", "mutations")
DERIVED_PARAMETERS = {"avals": "dtype and shape say it", "index": "the order of the inputs says it"}
FAULTS = (ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError, RecursionError, FusegradError)
"""What reading data that is no graph may raise."""


def document_error(detail: str, at: object) -> ParseError:
    """The error for data that is no graph."""
    return ParseError(detail, line=at, text="")


# ---------------------------------------------------------------------------------------------------------- write
def document(graph: Graph) -> dict[str, Any]:
    """The graph as dicts, lists, texts and numbers. Raises ValueError for a parameter that has no such form."""
    nodes = [*graph.inputs, *graph.order()]
    number = {v.id: i for i, v in enumerate(nodes)}
    results = zip(graph.outputs, graph.output_strides, strict=True)
    return {
        "name": graph.name,
        "symbols": symbols_document(symbols_in(graph)),
        "nodes": [_node(v, number) for v in nodes],
        "outputs": [_output(o, s, number) for o, s in results],
        "mutations": [[i, number[v.id]] for i, v in sorted(graph.mutations.items())],
    }


def symbols_document(symbols: Iterable[sympy.Symbol]) -> dict[str, str]:
    """name -> what is known about it, sorted."""
    return {s.name: kind_of(s) for s in sorted(symbols, key=lambda s: s.name)}


def size_document(value: Size) -> int | str:
    """An int, or the text of an expression."""
    return value if isinstance(value, int) else size_text(value)


def sizes_document(values: Iterable[Size]) -> list[int | str]:
    return [size_document(v) for v in values]


def _output(value: Value | None, strides: Iterable[Size] | None, number: Mapping[int, int]) -> dict[str, Any] | None:
    return None if value is None else {"node": number[value.id], "strides": sizes_document(strides or ())}


def _node(value: Value, number: Mapping[int, int]) -> dict[str, Any]:
    derived = ("avals", "index") if value.prim == "input" else ("avals",)
    entry = {
        "prim": value.prim,
        "operands": [number[a.id] for a in value.args],
        "types": list(map(_type, value.avals)),
        "parameters": {k: _parameter(v) for k, v in value.params.items() if k not in derived},
    }
    origin = value.origin
    name = origin.name if (origin.name or "").isidentifier() else None
    origin_texts = {"name": name, "op": origin.op, "where": origin.where, "line": origin.line}
    return {**entry, "origin": {k: one_line(v) for k, v in origin_texts.items() if v is not None}}


def one_line(text: str) -> str:
    """The text on one line, cut where it is long."""
    return "".join(c if c.isprintable() else " " for c in text)[:LONGEST_TEXT]


def _type(aval: TensorType) -> list[Any]:
    return [aval.dtype, sizes_document(aval.shape)]


def _parameter(item: Any) -> Any:
    if isinstance(item, tuple):
        return [_parameter(i) for i in item]
    if isinstance(item, sympy.Basic):
        return {"size": size_text(item)}
    if isinstance(item, Arg):
        return {"operand": item.index}
    if isinstance(item, Body):
        return {"body": document(item.graph) | {"symbols": {}}}
    if isinstance(item, complex):
        return {"complex": [_parameter(item.real), _parameter(item.imag)]}
    if isinstance(item, float) and not math.isfinite(item):
        return {"float": repr(item)}
    if item is None or isinstance(item, bool | int | float | str):
        return item
    raise ValueError(f"a {type(item).__name__} among the parameters cannot be written down")


# ---------------------------------------------------------------------------------------------------------- read
def graph_from(data: Any) -> Graph:
    """The graph that `document` wrote. Raises ParseError, which says where the data is no graph; runs nothing of it."""
    reader = _Reader()
    return reader.read(fields_from(data, *GRAPH_FIELDS, at="graph"))


def fields_from(data: Any, *names: str, at: object) -> dict[str, Any]:
    """The data, which has to be a dict with exactly these fields."""
    if not isinstance(data, dict) or set(data) != set(names):
        raise document_error(f"expected the fields {', '.join(names)}", at)
    return data


def list_from(data: Any, at: object, most: int = MOST_NODES) -> list[Any]:
    """The data, which has to be a list of bounded length."""
    if not isinstance(data, list) or len(data) > most:
        raise document_error(f"expected a list of at most {most}", at)
    return data


def text_from(data: Any, at: object, most: int = LONGEST_TEXT) -> str:
    """The data, which has to be one printable line."""
    if not isinstance(data, str) or len(data) > most or not data.isprintable():
        raise document_error("expected one printable line", at)
    return data


def index_from(data: Any, below: int, at: object) -> int:
    """The data, which has to be a number of what is there."""
    if type(data) is not int or not 0 <= data < below:
        raise document_error(f"expected a number from 0 to {below - 1}", at)
    return data


def symbols_from(data: Any, at: object) -> dict[str, sympy.Symbol]:
    """The symbols that a document declares."""
    if not isinstance(data, dict) or len(data) > MOST_NODES:
        raise document_error("expected symbols by name", at)
    return {_symbol_name(name, at): sympy.Symbol(name, **_kind(kind, at)) for name, kind in data.items()}


def _symbol_name(name: str, at: object) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,31}", name) or name in FUNCTIONS:
        raise document_error(f"{name[:40]!r} cannot be the name of a size", at)
    return name


def _kind(kind: Any, at: object) -> dict[str, bool]:
    if not isinstance(kind, str) or kind not in KINDS:
        raise document_error("a size is of no known kind", at)
    return KINDS[kind]


_TOKEN = re.compile(r"[A-Za-z_]\w*|\d+(?:\.\d+)?(?:e[+-]?\d{1,3})?|\*\*|[-+*/(), ]", re.ASCII)


def size_from_document(data: Any, symbols: Symbols, at: object, signed: bool = False) -> Size:
    """A size: an int (not below 0, if not signed), or an expression that is small enough to compute with."""
    if type(data) is int and (-MOST_SIZE if signed else -1) < data < MOST_SIZE:
        return data
    if not isinstance(data, str) or len(data) > LONGEST_SIZE or not _is_bounded_text(data, symbols):
        raise document_error(f"{str(data)[:60]!r} is no size", at)
    try:
        expr: Size = size_from(data, symbols)
    except FAULTS as error:
        raise document_error(f"{data[:60]!r} is no size: {error}", at) from error
    if not isinstance(expr, sympy.Expr | int | float) or not _is_bounded_expression(sympy.sympify(expr)):
        raise document_error(f"{data[:60]!r} is no size that can be computed with", at)
    return expr


def _is_bounded_text(text: str, symbols: Symbols) -> bool:
    """Made of declared symbols, known functions, numbers of 64 bits and small powers."""
    words = _TOKEN.findall(text)
    if "".join(words) != text or text.count("(") > MOST_BRACKETS:
        return False
    plain = [w for w in words if w != " "]
    powers = [p for w, p in itertools.pairwise(plain) if w == "**"]
    names = all(w in symbols or (w in FUNCTIONS and w not in GROWING) for w in words if w[0].isalpha() or w[0] == "_")
    bounded = all(p in ("(", "-") or (p[0].isdigit() and float(p) <= MOST_POWER) for p in powers)
    return names and bounded and all(len(w) < 25 for w in words)


def _is_bounded_expression(expr: sympy.Basic) -> bool:
    small = all(p.exp.is_number and p.exp.is_real and abs(p.exp) <= MOST_POWER for p in expr.atoms(sympy.Pow))
    rationals = all(abs(n.p) < MOST_SIZE and n.q < MOST_SIZE for n in expr.atoms(sympy.Rational))
    finite = not expr.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan, sympy.I)
    few = len(expr.atoms(sympy.Function)) <= MOST_FUNCTIONS
    return bool(small) and rationals and finite and few and _terms(expr) <= MOST_TERMS


def _terms(expr: sympy.Basic) -> int:
    """The number of terms of the expanded expression, at most."""
    inner = [_terms(a) for a in expr.args]
    if isinstance(expr, sympy.Mul):
        return math.prod(inner)
    if isinstance(expr, sympy.Pow):
        return int(inner[0] ** max(1, abs(int(expr.exp))))
    return max(sum(inner), 1)


def sizes_from(data: Any, symbols: Symbols, at: object) -> tuple[Size, ...]:
    """A shape, or strides."""
    return tuple(size_from_document(s, symbols, at) for s in list_from(data, at, 64))


class _Reader:
    """Builds a graph node by node; every node goes through the type rules."""

    def __init__(self, within: _Reader | None = None) -> None:
        self.graph, self.values = Graph(), list[Value]()
        self.symbols: dict[str, sympy.Symbol] = dict(within.symbols) if within else {}
        self.depth: int = within.depth + 1 if within else 0
        self.latest: float = within.latest if within else time.monotonic() + MOST_SECONDS

    def read(self, data: dict[str, Any]) -> Graph:
        # Names and symbols first: sizes in nodes are read in terms of them.
        self.graph.name = text_from(data["name"], "name", 200)
        self.symbols |= symbols_from(data["symbols"], "symbols")
        for at, node in enumerate(list_from(data["nodes"], "nodes")):
            place = f"node {at}"
            try:
                self.values.append(self._node(node, place))
            except ParseError:
                raise
            except FAULTS as error:
                raise document_error(f"{type(error).__name__}: {error}"[:300], place) from error
            if time.monotonic() > self.latest:
                raise document_error(f"to check it takes longer than {MOST_SECONDS:g} seconds", place)
        # Outputs and mutations last: they refer to nodes by number.
        self._outputs(list_from(data["outputs"], "outputs"))
        for pair in list_from(data["mutations"], "mutations"):
            self._mutation(list_from(pair, "mutations", 2))
        return self.graph

    def _value(self, data: Any, at: object) -> Value:
        return self.values[index_from(data, len(self.values), at)]

    def _node(self, data: Any, at: str) -> Value:
        fields = fields_from(data, "prim", "operands", "types", "parameters", "origin", at=at)
        prim = fields["prim"]
        if not isinstance(prim, str) or prim not in PRIMS or "target" in PRIMS[prim].params:
            raise document_error(f"{str(prim)[:40]!r} is no operation of a file", at)
        operands = [self._value(o, at) for o in list_from(fields["operands"], at)]
        types = tuple(self._type(t, at) for t in list_from(fields["types"], at, 64))
        parameters = {k: self._parameter(v, at) for k, v in self._parameters(fields["parameters"], at)}
        if prim == "input":
            return self._input(types, parameters, at)
        if "avals" in PRIMS[prim].params:
            parameters["avals"] = types
        with provenance(_origin(fields["origin"], at)):
            value = self.graph.emit(prim, operands, parameters)
        return self._check_types(value, types, at)

    def _parameters(self, data: Any, at: str) -> Iterable[tuple[str, Any]]:
        if not isinstance(data, dict) or any(k in DERIVED_PARAMETERS and k != "index" for k in data):
            raise document_error("expected parameters by name", at)
        return data.items()

    def _input(self, types: tuple[TensorType, ...], parameters: dict[str, Any], at: str) -> Value:
        (aval,) = types
        name, strides = text_from(parameters.pop("name"), at, 100), parameters.pop("strides")
        is_top = parameters.pop("is_top", False)
        if parameters or not isinstance(is_top, bool) or not isinstance(strides, tuple) or len(strides) != aval.ndim:
            raise document_error("an input has a name and its strides", at)
        if not name.isidentifier() or len(self.graph.inputs) != len(self.values):
            raise document_error(f"{name[:40]!r} is no name of an input before the first operation", at)
        return self.graph.input(aval, name, strides, is_top)

    def _check_types(self, value: Value, types: tuple[TensorType, ...], at: str) -> Value:
        same = len(types) == len(value.avals) and all(map(_same, types, value.avals))
        if not same:
            raise document_error(f"the type rule says {', '.join(map(str, value.avals))}", at)
        value.attrs["avals"] = types
        return value

    def _type(self, data: Any, at: str) -> TensorType:
        dtype, shape = list_from(data, at, 2)
        return TensorType(sizes_from(shape, self.symbols, at), text_from(dtype, at, 20))

    def _parameter(self, data: Any, at: str, depth: int = DEEPEST) -> Any:
        if isinstance(data, list) and depth:
            return tuple(self._parameter(d, at, depth - 1) for d in list_from(data, at))
        if isinstance(data, dict) and len(data) == 1:
            ((kind, inner),) = data.items()
            return _TAGGED[kind](self, inner, at)
        if isinstance(data, str):
            return text_from(data, at)
        if data is None or isinstance(data, bool | int | float):
            return data
        raise document_error("a parameter is of no known form", at)

    def _outputs(self, data: list[Any]) -> None:
        outputs = [None if o is None else fields_from(o, "node", "strides", at="outputs") for o in data]
        values = [None if o is None else self._value(o["node"], "outputs") for o in outputs]
        strides = [None if o is None else sizes_from(o["strides"], self.symbols, "outputs") for o in outputs]
        for value, layout in zip(values, strides, strict=True):
            if value is not None and layout is not None and (len(value.avals) > 1 or len(layout) != value.ndim):
                raise document_error("an output does not have the strides of its shape", "outputs")
        self.graph.returning(values, strides)

    def _mutation(self, data: list[Any]) -> None:
        at = "mutations"
        index, value = index_from(data[0], len(self.graph.inputs), at), self._value(data[1], at)
        if len(value.avals) != 1 or not _same(value.aval, self.graph.inputs[index].aval):
            raise document_error(f"input {index} is written with another type", at)
        self.graph.mutations[index] = value


def _same(a: TensorType, b: TensorType) -> bool:
    return a.dtype == b.dtype and len(a.shape) == len(b.shape) and all(map(sizes_equal, a.shape, b.shape))


def _origin(data: Any, at: str) -> Origin:
    if not isinstance(data, dict) or not set(data) <= {"name", "op", "where", "line"}:
        raise document_error("an origin has a name, an op, a place and a line", at)
    texts = {k: text_from(v, at) for k, v in data.items()}
    if "name" in texts and not texts["name"].isidentifier():
        raise document_error(f"{texts['name'][:40]!r} is no name", at)
    return Origin(**texts)


def _float(reader: _Reader, data: Any, at: str) -> float:
    if data not in ("inf", "-inf", "nan"):
        raise document_error("a float is no number", at)
    return float(data)


def _complex(reader: _Reader, data: Any, at: str) -> complex:
    real, imaginary = (reader._parameter(d, at, 1) for d in list_from(data, at, 2))
    return complex(real, imaginary)


def _body(reader: _Reader, data: Any, at: str) -> Body:
    """The graph of a step, within the bounds that the whole has; it writes into nothing."""
    if reader.depth >= DEEPEST_LOOP:
        raise document_error(f"loops within loops more than {DEEPEST_LOOP} deep", at)
    fields = fields_from(data, *GRAPH_FIELDS, at=at)
    return Body(verify(_Reader(reader).read(fields)))


_TAGGED: dict[str, Callable[[_Reader, Any, str], Any]] = {
    "size": lambda reader, data, at: size_from_document(data, reader.symbols, at),
    "operand": lambda reader, data, at: Arg(index_from(data, MOST_NODES, at)),
    "float": _float,
    "complex": _complex,
    "body": _body,
}

