"""Rules for expressions: names, comparisons and arithmetic."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...emit.prelude import HELPERS
from ..atoms import Facts
from ..polynomials import ZERO, Poly, divide_terms
from .calls import call
from .reader import Reader
from .values import Int, Opaque, Pointer, Truth, UnreadableText, Value, integer_result, union_of_needs


def variable(reader: Reader, node: ast.Name) -> Value:
    if node.id in HELPERS and node.id not in reader.variables:  # a function that folds lanes
        return Opaque()
    if node.id not in reader.variables:
        raise UnreadableText(f"{node.id} is not defined", node.lineno)
    return reader.variables[node.id]


def subscript(reader: Reader, node: ast.Subscript) -> Value:
    """lanes[None, :]: the same lanes along another dimension are other lanes, wherever they are named again."""
    value = reader.value(node.value)
    if isinstance(value, Opaque):
        return value
    dims = ast.unparse(node.slice)
    if isinstance(value, Truth):
        return Truth(facts_along(reader, dims, value.true), facts_along(reader, dims, value.false), value.needs)
    if not isinstance(value, Int):
        raise UnreadableText(ast.unparse(node), node.lineno)
    poly = reader.along(dims, value.poly)
    return reader.unknown_like(value, ast.unparse(node)) if poly is None else replace(value, poly=poly)


def facts_along(reader: Reader, dims: str, facts: Facts) -> Facts:
    """Those facts that can be said of the lanes along other dimensions."""
    return tuple(along for fact in facts if (along := reader.along(dims, fact)) is not None)


def unary(reader: Reader, node: ast.UnaryOp) -> Value:
    x = reader.value(node.operand)
    if isinstance(node.op, ast.USub) and isinstance(x, Int):
        return reader.checked_result(-x.poly, x, x, node)
    if isinstance(node.op, (ast.Invert, ast.Not)) and isinstance(x, Truth):
        return Truth(x.false, x.true, x.needs)
    return reader.unknown_result(x, node)


def compare(reader: Reader, node: ast.Compare) -> Value:
    a, b = reader.value(node.left), reader.value(node.comparators[0])
    if not (isinstance(a, Int) and isinstance(b, Int)):
        return Truth()
    more, needs = b.poly - a.poly, (*a.needs, *b.needs)
    facts: dict[type[ast.cmpop], tuple[Facts, Facts]] = {
        ast.Lt: ((more - 1,), (-more,)), ast.LtE: ((more,), (-more - 1,)),
        ast.Gt: ((-more - 1,), (more,)), ast.GtE: ((-more,), (more - 1,)),
        ast.Eq: ((more, -more), ()), ast.NotEq: ((), (more, -more)),
    }  # fmt: skip
    return Truth(*facts[type(node.ops[0])], needs)


def binary(reader: Reader, node: ast.BinOp) -> Value:
    a, b = reader.value(node.left), reader.value(node.right)
    if isinstance(a, Pointer) or isinstance(b, Pointer):
        return address(a, b, node)
    if isinstance(a, Truth) and isinstance(b, Truth):
        return conjunction(a, b, node.op)
    if isinstance(a, Int) and isinstance(b, Int):
        return arithmetic(reader, a, b, node)
    return reader.unknown_result(a if isinstance(a, Int) else b if isinstance(b, Int) else Opaque(), node, a, b)


def address(a: Value, b: Value, node: ast.BinOp) -> Pointer:
    """pointer + offset, pointer - offset"""
    pointer, by = (a, b) if isinstance(a, Pointer) else (b, a)
    if not (isinstance(pointer, Pointer) and isinstance(by, Int) and isinstance(node.op, (ast.Add, ast.Sub))):
        raise UnreadableText(ast.unparse(node), node.lineno)
    offset = by.poly if isinstance(node.op, ast.Add) else -by.poly
    return Pointer(pointer.name, pointer.offset + offset, (*pointer.needs, *by.needs))


def conjunction(a: Truth, b: Truth, operator: ast.operator) -> Truth:
    """a & b, a | b; of other operators nothing is known."""
    needs = union_of_needs(a.needs, b.needs)
    if isinstance(operator, ast.BitAnd):
        return Truth(a.true + b.true, (), needs)
    return Truth((), a.false + b.false, needs) if isinstance(operator, ast.BitOr) else Truth(needs=needs)


def arithmetic(reader: Reader, a: Int, b: Int, node: ast.BinOp) -> Value:
    match node.op:
        case ast.Add():
            return reader.checked_result(a.poly + b.poly, a, b, node)
        case ast.Sub():
            return reader.checked_result(a.poly - b.poly, a, b, node)
        case ast.Mult():
            return reader.checked_result(a.poly * b.poly, a, b, node)
        case ast.FloorDiv() | ast.Mod():
            return integer_result(a, b, quotient(reader, a.poly, b.poly, node))
    if a.poly.number is not None and b.poly.number is not None and isinstance(node.op, (ast.LShift, ast.BitAnd)):
        x, y = int(a.poly.number), int(b.poly.number)
        return integer_result(a, b, Poly.of(x << y if isinstance(node.op, ast.LShift) else x & y))
    return reader.unknown_result(a, node, a, b)


def quotient(reader: Reader, a: Poly, b: Poly, node: ast.BinOp) -> Poly:
    """a // b, or a % b"""
    modulo, n = isinstance(node.op, ast.Mod), b.number
    if isinstance(n, int) and n > 0 and reader.is_multiple(a, n):
        return ZERO if modulo else divide_terms(a, n)
    if (results := reader.arithmetic.divide(a, b)) is not None:
        return results[modulo]
    if not reader.is_data(a) and not reader.is_data(b):
        reader.read.divisions.append((ast.unparse(node), node.lineno))
    return reader.datum("quotient")


EXPRESSIONS: dict[type[ast.expr], Callable[[Reader, Any], Value]] = {
    ast.Constant: lambda _, node: Int(Poly.of(node.value)) if type(node.value) is int else Opaque(node.value),
    ast.Name: variable,
    ast.Attribute: lambda _, node: Opaque(node.attr),
    ast.List: lambda _, node: Opaque(),
    ast.Tuple: lambda _, node: Opaque(),
    ast.Subscript: subscript,
    ast.UnaryOp: unary,
    ast.Compare: compare,
    ast.BinOp: binary,
    ast.Call: call,
}
