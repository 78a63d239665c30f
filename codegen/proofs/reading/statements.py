"""Rules for statements: assignments, branches and loops."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..polynomials import ONE, ZERO, Poly
from .reader import Reader
from .values import Int, Opaque, Truth, UnreadableText, integer_result, names_in


def assign(reader: Reader, node: ast.Assign) -> None:
    (target,) = node.targets
    if isinstance(target, ast.Tuple):
        assign_parts(reader, target, node.value)
    elif isinstance(target, ast.Name):
        reader.bind(target.id, node.value)
    else:
        raise UnreadableText(ast.unparse(target), node.lineno)


def assign_parts(reader: Reader, targets: ast.Tuple, node: ast.expr) -> None:
    """a, b, c, d = philox(...): the operands are read, nothing is known of the parts."""
    reader.value(node)
    for target in targets.elts:
        if not isinstance(target, ast.Name):
            raise UnreadableText(ast.unparse(targets), node.lineno)
        reader.variables[target.id] = Opaque()
        reader.made_of.setdefault(target.id, set()).update(names_in(node))


def assign_operation(reader: Reader, node: ast.AugAssign) -> None:
    """a += b  ->  a = a + b"""
    assert isinstance(node.target, ast.Name)
    operation = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
    reader.bind(node.target.id, ast.fix_missing_locations(ast.copy_location(operation, node)))


def assign_annotated(reader: Reader, node: ast.AnnAssign) -> None:
    assert isinstance(node.target, ast.Name)
    reader.variables[node.target.id] = reader.value(node.value) if node.value else Opaque()


def return_value(reader: Reader, node: ast.Return) -> None:
    reader.result = reader.value(node.value) if node.value else Opaque()


def branch(reader: Reader, node: ast.If) -> None:
    test = reader.value(node.test)
    truth = test if isinstance(test, Truth) else Truth()
    reader.require(truth.needs)
    for body, facts, ticket in ((node.body, truth.true, truth.ticket), (node.orelse, truth.false, None)):
        before = dict(reader.variables)
        with reader.assuming(facts, ticket):
            reader.block(body)
        reader.forget(assigned_names(body), before)


def loop(reader: Reader, node: ast.For) -> None:
    assert isinstance(node.target, ast.Name) and isinstance(node.iter, ast.Call)
    name = node.target.id
    start, stop, step = loop_range(reader, node.iter)
    length = stop.poly - start.poly
    # A turn finds what the turns before it assigned: nothing that was known before the loop.
    before, names = dict(reader.variables), [*assigned_names(node.body)]
    reader.forget(names, before)
    # The loop's variable: start + step * the number of the turn.
    turn = reader.arithmetic.turns(f"{name}#" if step != ONE else name, length, step)
    variable = start.poly + turn * step
    reader.read.spans[turn.top], reader.read.steps[turn.top] = (start.poly, stop.poly), step
    both = integer_result(start, stop, variable)
    with reader.assuming((length - 1,)):
        if both.width != 64:  # what ends the loop is computed, too
            reader.require([reader.need(stop.poly + step - 1, both.narrow, node.iter)])
        reader.variables[name] = Int(variable, both.width or 32, both.narrow)
        reader.made_of.setdefault(name, set())
        reader.places.setdefault(name, set()).update(variable.atoms)
        reader.block(node.body)
    # Behind the loop any turn, or none, was the last.
    reader.forget(names, before)


def loop_range(reader: Reader, call: ast.Call) -> tuple[Int, Int, Poly]:
    """(start, stop, step) of a call of range."""
    bounds = [reader.integer(a) for a in call.args]
    if len(bounds) == 1:
        bounds = [Int(ZERO), *bounds]
    start, stop, step = bounds if len(bounds) == 3 else (*bounds, Int(ONE))
    for bound in bounds:
        reader.require(bound.needs)
    if not reader.world.holds(step.poly - 1):
        raise UnreadableText("a step that may not be positive", call.lineno)
    return start, stop, step.poly


def assigned_names(body: Sequence[ast.stmt]) -> Iterator[str]:
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


STATEMENTS: dict[type[ast.stmt], Callable[[Reader, Any], object]] = {
    ast.Assign: assign,
    ast.AugAssign: assign_operation,
    ast.AnnAssign: assign_annotated,
    ast.Expr: lambda reader, node: reader.value(node.value),
    ast.Return: return_value,
    ast.If: branch,
    ast.For: loop,
}
