"""Rules for calls: of Triton's functions, by "tl.name", and of the emitted text's helpers, by name."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ...emit.prelude import HELPERS
from ..arithmetic import extremum_cases
from ..atoms import Case
from ..bounds import draw_up_to
from ..polynomials import ONE, ZERO, Poly, value_at
from .memory import MEMORY, load_tile
from .reader import Reader, parse_function
from .values import Hint, Int, Opaque, Tiles, Truth, Value, integer_result, union_of_needs

WIDTHS = {"int1": 1, "int8": 8, "int16": 16, "int32": 32, "int64": 64, "uint8": 8, "uint16": 16, "uint32": 32}


def call(reader: Reader, node: ast.Call) -> Value:
    function = node.func
    if isinstance(function, ast.Attribute):
        if isinstance(function.value, ast.Name) and function.value.id in ("tl", "libdevice"):
            return CALLS.get(f"{function.value.id}.{function.attr}", unknown_function)(reader, node)
        return method(reader, node, function)
    assert isinstance(function, ast.Name)
    return CALLS.get(function.id, unknown_function)(reader, node)


def method(reader: Reader, node: ast.Call, function: ast.Attribute) -> Value:
    x = reader.value(function.value)
    if isinstance(x, Tiles):
        return load_tile(reader, x, node)
    return convert(reader, x, node.args[0], node) if function.attr == "to" and not node.keywords else Opaque()


def unknown_function(reader: Reader, node: ast.Call) -> Value:
    """A function of numbers: its operands are read for the accesses in them, its result is unknown."""
    operands = [reader.value(a) for a in node.args]
    integers = bool(operands) and all(isinstance(o, Int) for o in operands)
    if isinstance(node.func, ast.Name) and node.func.id in HELPERS and integers:
        return inline_helper(reader, node.func.id, operands, node)
    if operands and all(isinstance(o, (Int, Truth)) for o in operands):
        return reader.unknown_result(operands[0], node)
    return Opaque()


def inline_helper(reader: Reader, name: str, operands: Sequence[Value], node: ast.Call) -> Value:
    """The body of a helper in place of its call."""
    function = parse_function(HELPERS[name])
    # The helper's variables: defaults first, then the call's arguments over them.
    names = [a.arg for a in function.args.args]
    defaults = function.args.defaults
    variables = {n: reader.value(d) for n, d in zip(names[len(names) - len(defaults) :], defaults, strict=True)}
    variables |= dict(zip(names, operands, strict=False))
    variables |= {k.arg: reader.value(k.value) for k in node.keywords if k.arg}
    outer, reader.variables, reader.result = reader.variables, variables, Opaque()
    body = [s for s in function.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    try:
        reader.block(body)
    finally:
        reader.variables = outer
    return reader.result


def reduction(reader: Reader, node: ast.Call) -> Value:
    """Of numbers some number, whichever axes are reduced."""
    return reader.unknown_result(reader.value(node.args[0]), node)


# ------------------------------------------------------------------ conversions
def convert(reader: Reader, x: Value, dtype: ast.expr, node: ast.expr) -> Value:
    # Of conditions and floats, an atom of its own; of integers the same value where its new width holds it.
    width = width_of(dtype)
    if isinstance(x, Truth) and width > 1:
        bit = reader.datum("condition")
        reader.world.bound_below(bit.top, ONE, ZERO)
        reader.world.bound_above(bit.top, ONE, ONE)
        return Int(bit, width, needs=x.needs)
    if isinstance(x, Opaque) and width > 1:  # a float that was rounded: as good as read from memory
        return Int(reader.datum(ast.unparse(node)), width)
    if not isinstance(x, Int) or not width:
        return Opaque()
    if width == 64 or x.width == width:
        return replace(x, width=width, narrow=frozenset() if width == 64 else x.narrow)
    if width == 32 and not reader.is_data(x.poly):
        return Int(x.poly, 32, needs=(*x.needs, reader.need(x.poly, frozenset(), node)))
    return Truth() if width == 1 else Int(reader.datum(ast.unparse(node)), width, needs=x.needs)


def width_of(dtype: ast.expr) -> int:
    """Bits of an integer dtype; 0 of any other."""
    return WIDTHS.get(dtype.attr, 0) if isinstance(dtype, ast.Attribute) else 0


def zeros(reader: Reader, node: ast.Call) -> Value:
    """Integers of zero, or floats."""
    width = width_of(node.args[1])
    return Int(ZERO, width) if width > 1 else Opaque()


def full(reader: Reader, node: ast.Call) -> Value:
    width, value = width_of(node.args[2]), reader.value(node.args[1])
    return replace(value, width=width) if isinstance(value, Int) and width > 1 else Opaque()


def round_float(reader: Reader, node: ast.Call) -> Value:
    reader.value(node.args[0])
    return Opaque()


# ------------------------------------------------------------------ programs and lanes
def program_id(reader: Reader, node: ast.Call) -> Value:
    if reader.read.program is None:
        last = reader.programs - 1
        program = reader.world.atom("pid", lambda s, r: draw_up_to(int(value_at(last, s)), r), 0, last)
        reader.read.program = program.top
        reader.world.bound_above(program.top, ONE, Poly.of(2**31 - 2))
    return Int(Poly.atom(reader.read.program), 32)


def arange(reader: Reader, node: ast.Call) -> Value:
    low, high = (reader.integer(a).poly for a in node.args)
    return Int(reader.lanes(low, high), 32)


def multiple_of(reader: Reader, node: ast.Call) -> Value:
    value, factor = reader.integer(node.args[0]), reader.integer(node.args[1]).poly.number
    assert isinstance(factor, int)
    reader.read.hints.append(Hint(value.poly, factor, node.lineno, ast.unparse(node)))
    return value


# ------------------------------------------------------------------ choices and quotients
def where(reader: Reader, node: ast.Call) -> Value:
    test, a, b = (reader.value(x) for x in node.args)
    if isinstance(a, Truth) and isinstance(b, Truth):
        return Truth()
    if not (isinstance(a, Int) and isinstance(b, Int)):
        return Opaque()
    truth = test if isinstance(test, Truth) else Truth()
    choice = reader.arithmetic.choice(ast.unparse(node), (Case(a.poly, truth.true), Case(b.poly, truth.false)))
    both = integer_result(a, b, choice)
    return replace(both, width=both.width or 32, needs=union_of_needs(both.needs, truth.needs))


def extremum(kind: str, reader: Reader, node: ast.Call) -> Value:
    """The smaller or larger operand; where memory decides, either, without a search for which."""
    a, b = (reader.value(x) for x in node.args)
    if not (isinstance(a, Int) and isinstance(b, Int)):
        return reader.unknown_result(a, node, a, b)
    if reader.is_data(a.poly) or reader.is_data(b.poly):
        return integer_result(a, b, extremum_of_data(kind, reader, a.poly, b.poly, ast.unparse(node)))
    return integer_result(a, b, reader.arithmetic.extremum(kind, a.poly, b.poly))


def extremum_of_data(kind: str, reader: Reader, a: Poly, b: Poly, name: str) -> Poly:
    """Either; of what is never negative and at most something else all is known that need be: it is data no more."""
    known, data = (b, a) if reader.is_data(a) else (a, b)
    world = reader.world
    if kind == "min" and not reader.is_data(known) and world.holds(data) and world.holds(known):
        return world.atom(name, lambda s, r: draw_up_to(int(value_at(known, s)), r), 0, known)
    result = reader.arithmetic.choice(name, extremum_cases(kind, a, b))
    if kind == "max" and not reader.is_data(known) and result not in (a, b):
        world.bound_below(result.top, ONE, known)
    return result


def cdiv(reader: Reader, node: ast.Call) -> Value:
    a, b = (reader.integer(x) for x in node.args)
    sum_ = reader.checked_result(a.poly + b.poly - 1, a, b, node)
    if (quotient := reader.arithmetic.ceiling(a.poly, b.poly)) is None:
        reader.read.divisions.append((ast.unparse(node), node.lineno))
        quotient = reader.datum("quotient")
    return replace(sum_, poly=quotient)


def floor_division(part: int, reader: Reader, node: ast.Call) -> Value:
    """Python's quotient (part 0) and remainder (1): with a positive divisor right for any sign."""
    a, b = (reader.value(x) for x in node.args)
    if not (isinstance(a, Int) and isinstance(b, Int)):
        return reader.unknown_result(a, node, a, b)
    of_data = reader.is_data(a.poly) or reader.is_data(b.poly)
    exact = None if of_data else reader.arithmetic.divide(a.poly, b.poly)
    results = exact or reader.arithmetic.floor(a.poly, b.poly)
    return integer_result(a, b, results[part] if results else reader.datum(ast.unparse(node)))


CALLS: dict[str, Callable[[Reader, ast.Call], Value]] = {
    **MEMORY,
    "tl.arange": arange,
    "tl.broadcast_to": lambda reader, node: reader.value(node.args[0]),
    "tl.cast": lambda reader, node: convert(reader, reader.value(node.args[0]), node.args[1], node),
    "tl.cdiv": cdiv,
    "tl.full": full,
    "tl.max": reduction,
    "tl.maximum": partial(extremum, "max"),
    "tl.min": reduction,
    "tl.minimum": partial(extremum, "min"),
    "tl.multiple_of": multiple_of,
    "tl.program_id": program_id,
    "tl.sum": reduction,
    "tl.where": where,
    "tl.zeros": zeros,
    "floor_quotient": partial(floor_division, 0),
    "modulo": partial(floor_division, 1),
    "rounded": round_float,
}
