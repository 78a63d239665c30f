"""Small changes to a module's source, one at a time: what a slip of a programmer would be.

Left out is what no result depends on: annotations, docstrings, messages of exceptions, `__all__`, version checks.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
WORDS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "*": "+", "/": "*",
    "//": "*", "&": "|", "|": "&", "%": "//", "mul": "add", "add": "mul", "sub": "add", "sum": "max", "max": "min",
    "min": "max", "lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq", "and": "or", "or": "and",
    "0.0": "1.0", "1.0": "0.0", "0": "1", "1": "0", "True": "False", "False": "True", "int64": "int32",
}  # fmt: skip
"""Words of emitted text, as whole string constants or between spaces in one."""
EITHER_WAY = {
    "isinstance", "getattr", "min", "max", "zip", "mul", "add", "eq", "ne", "and_", "or_", "maximum", "minimum", "same",
    "same_shape", "Eq", "Ne", "cast", "frozenset",
}  # fmt: skip
"""Calls of two whose order does nothing, or is an error of types at once."""
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}


@dataclass(frozen=True)
class Mutant:
    """One change: where, what it was, what it is, and the module's text with it."""

    path: Path
    line: int
    was: str
    now: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.was}  ->  {self.now}"


@dataclass(frozen=True)
class Site:
    """A node that can be changed, and how: `change` gives what stands in its place."""

    node: ast.AST
    change: Callable[[], ast.AST]


def mutants(path: Path, root: Path) -> list[Mutant]:
    """Every mutant of a module, in the order of its text."""
    text = path.read_text(encoding="utf-8")
    return [made for site in _sites(ast.parse(text)) if (made := _mutant(path.relative_to(root), text, site))]


def _mutant(path: Path, text: str, site: Site) -> Mutant | None:
    start, end = _span(text, site.node)
    was, now = text.encode()[start:end].decode(), ast.unparse(site.change())
    if isinstance(site.node, ast.expr) and not isinstance(site.node, ast.Constant | ast.Name | ast.JoinedStr):
        now = f"({now})"
    changed = (text.encode()[:start] + now.encode() + text.encode()[end:]).decode()
    try:
        compile(changed, str(path), "exec")
    except SyntaxError:  # a constant inside an f-string has no place of its own in Python 3.11
        return None
    return Mutant(path, site.node.lineno, was, now, changed)  # type: ignore[attr-defined]


def _span(text: str, node: ast.AST) -> tuple[int, int]:
    """The bytes of a node."""
    lines = text.encode().split(b"\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    first, last = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
    return starts[first[0] - 1] + first[1], starts[last[0] - 1] + last[1]


def _sites(tree: ast.Module) -> Iterator[Site]:
    """In statements of functions and in tables of modules."""
    for node in _reached(tree):
        yield from _changes(node)


def _reached(node: ast.AST) -> Iterator[ast.AST]:
    for child in _children(node):
        yield child
        yield from _reached(child)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """What a result depends on."""
    if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: an assertion
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params", "bases", "ctx", "args") and not (
            name == "args" and isinstance(node, ast.Call)
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_text(child):
                yield child


def _is_text(node: ast.AST) -> bool:
    """A docstring, or an assignment that is about the module's reader alone."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)


def _changes(node: ast.AST) -> Iterator[Site]:
    for kind, change in CHANGES:
        if isinstance(node, kind):
            yield from change(node)


def _comparison(node: ast.Compare) -> Iterator[Site]:
    other = COMPARISONS.get(type(node.ops[0]))
    if other is not None and len(node.ops) == 1:
        yield Site(node, lambda: ast.Compare(node.left, [other()], node.comparators))


def _operation(node: ast.BinOp) -> Iterator[Site]:
    other = OPERATORS.get(type(node.op))
    if other is not None and not _is_type(node):
        yield Site(node, lambda: ast.BinOp(node.left, other(), node.right))


def _is_type(node: ast.BinOp) -> bool:
    """`int | None` outside annotations."""
    return isinstance(node.op, ast.BitOr) and any(
        (isinstance(n, ast.Constant) and n.value is None) or (isinstance(n, ast.Name) and n.id[0].isupper())
        for n in ast.walk(node)
    )


def _logic(node: ast.BoolOp) -> Iterator[Site]:
    other = ast.Or if isinstance(node.op, ast.And) else ast.And
    yield Site(node, lambda: ast.BoolOp(other(), node.values))
    if len(node.values) > 1:
        yield Site(node, lambda: ast.BoolOp(node.op, node.values[:-1]) if len(node.values) > 2 else node.values[0])


def _negation(node: ast.UnaryOp) -> Iterator[Site]:
    if isinstance(node.op, ast.Not | ast.USub):
        yield Site(node, lambda: node.operand)


def _constant(node: ast.Constant) -> Iterator[Site]:
    if isinstance(node.value, bool):
        yield Site(node, lambda: ast.Constant(not node.value))
    elif isinstance(node.value, int):
        yield Site(node, lambda: ast.Constant(node.value + 1))  # type: ignore[operator]
    elif isinstance(node.value, str) and (changed := _word(node.value)) is not None:
        yield Site(node, lambda: ast.Constant(changed))


def _word(text: str) -> str | None:
    words = text.split(" ")
    for i, word in enumerate(words):
        if word in WORDS and (len(words) == 1 or not word.isalpha()):
            return " ".join([*words[:i], WORDS[word], *words[i + 1 :]])
    return None


def _choice(node: ast.IfExp) -> Iterator[Site]:
    yield Site(node, lambda: ast.IfExp(node.test, node.orelse, node.body))


def _branch(node: ast.If | ast.While) -> Iterator[Site]:
    yield Site(node.test, lambda: ast.UnaryOp(ast.Not(), node.test))


def _call(node: ast.Call) -> Iterator[Site]:
    if isinstance(node.func, ast.Name) and node.func.id in CALLS:
        yield Site(node.func, lambda: ast.Name(CALLS[node.func.id]))  # type: ignore[attr-defined]
    if len(node.args) == 2 and not any(isinstance(a, ast.Starred) for a in node.args) and _may_swap(node):
        yield Site(node, lambda: ast.Call(node.func, node.args[::-1], node.keywords))


def _may_swap(node: ast.Call) -> bool:
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    return name not in EITHER_WAY


def _subscript(node: ast.Subscript) -> Iterator[Site]:
    if isinstance(node.slice, ast.Slice) and node.slice.step is None and node.slice.lower and not node.slice.upper:
        yield Site(node, lambda: node.value)


def _dropped(node: ast.Expr) -> Iterator[Site]:
    if isinstance(node.value, ast.Call):
        yield Site(node, ast.Pass)


def _emptied(node: ast.Return) -> Iterator[Site]:
    if isinstance(node.value, ast.Call | ast.ListComp | ast.BoolOp | ast.Compare):
        yield Site(node, lambda: ast.Return(ast.Constant(None)))


def _kept_all(node: ast.comprehension) -> Iterator[Site]:
    for test in node.ifs:
        yield Site(test, lambda: ast.Constant(True))


def _left(node: ast.Continue | ast.Break) -> Iterator[Site]:
    yield Site(node, ast.Pass)


CHANGES: list[tuple[type[ast.AST] | tuple[type[ast.AST], ...], Callable[..., Iterator[Site]]]] = [
    (ast.Compare, _comparison), (ast.BinOp, _operation), (ast.BoolOp, _logic), (ast.UnaryOp, _negation),
    (ast.Constant, _constant), (ast.IfExp, _choice), ((ast.If, ast.While), _branch), (ast.Call, _call),
    (ast.Subscript, _subscript), (ast.Expr, _dropped), (ast.Return, _emptied), (ast.comprehension, _kept_all),
    ((ast.Continue, ast.Break), _left),
]  # fmt: skip
