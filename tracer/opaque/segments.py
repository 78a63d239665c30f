"""Statements that no graph can hold, taken out of a method: a segment is run as written, what is around it is captured.

    y = x * 2                             y = x * 2
    print(y.mean())             ->        left = segment(locals())     # of y
    z = scipy(y.numpy())                  if left.has("z"): z = left["z"]
    return torch.from_numpy(z) + y        ...

A method is rewritten only where its source compiles to the very code that it has. Names, lines, globals and closures
stay those of the user; outside of captures and recordings, the rewritten method does what the method does.
"""

from __future__ import annotations

import ast
import collections
import copy
import dis
import functools
import inspect
import textwrap
import tokenize
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...ir.text.syntax_trees import parse
from ..reads.attributes import cell_content, cells_of, closed_over
from ..reads.value_keys import is_library

MOST = 500
"""Functions that are looked through for a line or for names."""
LOCALS, LEFT, ABSENCE = "__fusegrad_locals", "__fusegrad_left", "__fusegrad_absent"
OF_CTX, ON_IT = "__fusegrad_of_ctx", "__fusegrad_on_it"
ON_CTX = "__fusegrad_ctx_"
Body = list[ast.stmt]


class UnfitError(Exception):
    """The statements cannot be taken out of their method. Internal: the method runs as written."""


class Absent:
    """Stands for a local name that is not bound, or an attribute that ctx lacks, on the way into a segment."""


ABSENT = Absent()


@dataclass
class SegmentResult:
    """The result of a segment: the names that it bound, and the way it was left: "return", "break", "continue", or
    None."""

    names: dict[str, Any]
    exit: str | None = None
    value: Any = None

    def has(self, name: str) -> bool:
        return name in self.names

    def by(self, exit: str) -> bool:
        """True if it was left this way."""
        return self.exit == exit

    def __getitem__(self, name: str) -> Any:
        return self.names[name]


class Segment:
    """Statements of one method: called with the method's locals, it runs them as the user wrote them.

    The watcher of nested calls decides about it as about a nested Function; `why`: the reason why it is no part of a
    graph.
    """

    def __init__(self, name: str, lines: tuple[int, int], location: str, why: Any) -> None:
        self.__name__, self.lines, self.where, self.why = name, lines, location, why
        self.inputs: tuple[str, ...] = ()
        self.outputs: tuple[str, ...] = ()
        self.apart: set[str] = set()
        """Names whose values no graph can hand from one segment to another: found by a capture."""
        self.function: Callable[..., SegmentResult]

    def __call__(self, names: Mapping[str, Any], **of_ctx: Any) -> SegmentResult:
        from .watching import watcher

        present = {**names, **of_ctx}
        values = {name: present[name] for name in self.inputs if present.get(name, ABSENT) is not ABSENT}
        watching = watcher()
        if watching is None:
            return SegmentResult(*self.run(values))
        names, exit, value, filled = watching(self, self.run_and_record, (values,), {})
        for name, content in filled.items():
            _fill(values[name], content)
        return SegmentResult({**names, **{n: values[n] for n in filled if n in names}}, exit, value)

    def run(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], str | None, Any]:
        """The statements themselves."""
        result = self.function(*[values.get(name, ABSENT) for name in self.inputs])
        bound = {n: result.names[n] for n in self.outputs if result.names.get(n, ABSENT) is not ABSENT}
        return bound, result.exit, result.value

    def run_and_record(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], str | None, Any, dict[str, Any]]:
        """The same, and what the lists and dicts hold that were filled: a graph gives it to those of its caller."""
        before = {name: _content(value) for name, value in values.items()}
        names, exit, value = self.run(values)
        filled = {name: value for name, value in values.items() if _content(value) != before[name]}
        return names, exit, value, filled


def _content(value: Any) -> Any:
    """Which objects a container holds; None of what is none."""
    if isinstance(value, dict):
        return [(k, id(v), _content(v)) for k, v in value.items()]
    if isinstance(value, list | tuple | set | collections.deque):
        return [(id(v), _content(v)) for v in value]
    return None


def _fill(value: Any, content: Any) -> None:
    """Give a container what another of its kind holds."""
    if value is content:
        return
    value.clear()
    value.update(content) if isinstance(value, dict | set) else value.extend(content)


@dataclass(frozen=True)
class Lines:
    """Which lines of a method cannot be captured, why, and how many statements around each go with it.

    confined: names of values that exist in one segment alone, from where they are bound to where they are read last.
    """

    why: dict[int, Any] = field(default_factory=dict)
    up: dict[int, int] = field(default_factory=dict)
    confined: frozenset[str] = frozenset()

    def with_lines(self, more: Mapping[int, Any]) -> Lines:
        """With more of them."""
        return replace(self, why={**more, **self.why})

    def with_confined(self, names: Collection[str]) -> Lines:
        """With every statement that these names are in."""
        return replace(self, confined=self.confined | frozenset(names))

    def with_enclosing(self, span: tuple[int, int]) -> Lines:
        """With what is around the statements of these lines."""
        lines = [line for line in self.why if span[0] <= line <= span[1]]
        return replace(self, up={**self.up, **{line: self.up.get(line, 0) + 1 for line in lines}})


# ------------------------------------------------------------------ a method and its source
def _tree_of(code: types.CodeType) -> ast.FunctionDef:
    """The syntax tree of a function. Raises UnfitError where it is not known to be this function's."""
    return _tree_in(code, code.co_filename)  # codes of two files may be equal


@functools.lru_cache(maxsize=256)
def _tree_in(code: types.CodeType, filename: str) -> ast.FunctionDef:
    try:
        lines, first = inspect.getsourcelines(code)
        (definition,) = parse(textwrap.dedent("".join(lines))).body
    except (OSError, TypeError, SyntaxError, ValueError, tokenize.TokenError) as error:  # a file that changed since
        raise UnfitError("its source is not known") from error
    if not isinstance(definition, ast.FunctionDef):
        raise UnfitError("it is no plain function")
    ast.increment_lineno(definition, first - 1)
    if not _is_same(_compile_definition(definition, [], code), code):
        raise UnfitError("its source is not what it was made of")
    return definition


def _strip_definition(function: ast.FunctionDef) -> ast.FunctionDef:
    """Without what is computed at its definition."""
    bare = copy.deepcopy(function)
    bare.decorator_list, bare.returns = [], None
    arguments = bare.args
    arguments.defaults, arguments.kw_defaults = [], [None] * len(arguments.kwonlyargs)
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    for argument in every:
        if argument is not None:
            argument.annotation = None
    return bare


def _compile_definition(function: ast.FunctionDef, extra: Sequence[str], code: types.CodeType) -> types.CodeType:
    """The code of a function definition, within a scope that has the free variables of `code` and `extra`."""
    names = [ast.arg(name) for name in (*code.co_freevars, *extra)]
    arguments = ast.arguments(posonlyargs=[], args=names, kwonlyargs=[], kw_defaults=[], defaults=[])
    scope = ast.FunctionDef("scope", arguments, [_strip_definition(function)], [])
    scope.type_params = []  # type: ignore[attr-defined]
    module = ast.fix_missing_locations(ast.Module([scope], []))
    flags = code.co_flags & _FUTURE
    compiled = compile(module, code.co_filename, "exec", flags=flags, dont_inherit=True)
    return _nested_code(_nested_code(compiled, "scope"), function.name)


_FUTURE = 0x1000000  # from __future__ import annotations


def _nested_code(code: types.CodeType, name: str) -> types.CodeType:
    return next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)


def _is_same(a: types.CodeType, b: types.CodeType) -> bool:
    """True if two codes do the same. How the method of an imported module is looked up depends on the file around."""
    return (a.co_varnames, a.co_freevars) == (b.co_varnames, b.co_freevars) and _steps(a) == _steps(b)


_SILENT = {"CACHE", "PRECALL", "PUSH_NULL", "NOP", "EXTENDED_ARG", "RESUME", "MAKE_CELL", "COPY_FREE_VARS"}


def _steps(code: types.CodeType) -> list[Any]:
    """The instructions of a code, one by one; the codes within it likewise."""
    steps: list[Any] = []
    for step in dis.get_instructions(code):
        if step.opname in _SILENT:
            continue
        jumps = step.opcode in dis.hasjrel or step.opcode in dis.hasjabs
        value = None if jumps else step.argval
        inner = _steps(value) if isinstance(value, types.CodeType) else repr(value)
        line = step.positions.lineno if step.positions else None
        steps.append((step.opname.replace("LOAD_METHOD", "LOAD_ATTR"), inner, line))
    return steps


# ------------------------------------------------------------------ which statements
_BODIES = ("body", "orelse", "finalbody")
_ARMS = (*_BODIES, "handlers", "cases")


def _bodies(statement: ast.stmt) -> Iterator[Body]:
    """The lists of statements in a statement; those of handlers count as its own line: what they catch is data."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    for name in _BODIES:
        if body := getattr(statement, name, None):
            yield body
    yield from (case.body for case in getattr(statement, "cases", ()))


def _spans_line(statement: ast.stmt, line: int) -> bool:
    return statement.lineno <= line <= (statement.end_lineno or statement.lineno)


def _path(body: Body, line: int) -> list[tuple[Body, int]]:
    """The statements that hold a line, outermost first."""
    for index, statement in enumerate(body):
        if _spans_line(statement, line):
            inner = next((p for b in _bodies(statement) if (p := _path(b, line))), [])
            return [(body, index), *inner]
    return []


def _statement_runs(function: ast.FunctionDef, lines: Lines) -> list[tuple[Body, int, int]]:
    """Runs of statements, (list, first, behind the last), for the lines."""
    marked: dict[int, tuple[Body, set[int]]] = {}
    for line in lines.why:
        path = _path(function.body, line)
        if len(path) <= (up := lines.up.get(line, 0)):
            raise UnfitError("the statement is not found, or it is all of the method")
        body, index = path[len(path) - 1 - up]
        marked.setdefault(id(body), (body, set()))[1].add(index)
    for name in lines.confined:
        body, positions = _lifetime(function.body, name)
        marked.setdefault(id(body), (body, set()))[1].update(positions)
    for body, indices in marked.values():
        _extend(body, indices)
        if lines.confined and body is function.body and len(indices) == len(body):
            raise UnfitError("it is all of the method")
    runs = [run for body, indices in marked.values() for run in _runs(body, indices)]
    inside = {id(n) for body, a, b in runs for s in body[a:b] for inner in _bodies(s) for n in _all_of(inner)}
    return [(body, a, b) for body, a, b in runs if id(body[a]) not in inside]


def _lifetime(body: Body, name: str) -> tuple[Body, range]:
    """The innermost list of statements that has all in which a name is, and the first to the last of them."""
    having = [i for i, statement in enumerate(body) if _mentions(statement, {name})]
    if not having:
        return body, range(0)
    inner = list(_bodies(body[having[0]])) if len(having) == 1 else []
    only = next((candidate for candidate in inner if _count(candidate, name) == _count([body[having[0]]], name)), None)
    return _lifetime(only, name) if only is not None else (body, range(having[0], having[-1] + 1))


def _count(statements: Body, name: str) -> int:
    return sum(isinstance(n, ast.Name) and n.id == name for n in _all_of(statements))


def _all_of(body: Body) -> Iterator[ast.AST]:
    for statement in body:
        yield from ast.walk(statement)


def _runs(body: Body, indices: set[int]) -> Iterator[tuple[Body, int, int]]:
    first = None
    for index in range(len(body) + 1):
        if index in indices and first is None:
            first = index
        if index not in indices and first is not None:
            yield body, first, index
            first = None


# ------------------------------------------------------------------ values that are no tensors
_LEAVES_TORCH = {"numpy", "tolist", "__array__"}
_COMES_BACK = {"from_numpy", "as_tensor", "tensor", "new_tensor", "Tensor", "FloatTensor", "asarray", "frombuffer"}
_STAYS = {"to", "type_as", "cuda", "cpu", "float", "double", "half", "view", "reshape", "type", "contiguous", "long"}


def _extend(body: Body, indices: set[int]) -> None:
    """Further statements that read what the marked ones took out of torch, and all between: until it is back."""
    for index in sorted(indices):
        foreign = _foreign_names(body[index], set())
        last, at = index, index + 1
        while foreign and at < len(body):
            if _mentions(body[at], foreign):
                last = at
                foreign |= _foreign_names(body[at], foreign)
            at += 1
        indices |= set(range(index, last + 1))


def _mentions(statement: ast.stmt, names: Collection[str]) -> bool:
    return any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(statement))


def _foreign_names(statement: ast.stmt, foreign: set[str]) -> set[str]:
    """The names that a statement gives to what is no tensor."""
    names: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                names |= _foreign_target(target, node.value, foreign | names)
    return names


def _foreign_target(target: ast.expr, value: ast.expr, foreign: set[str]) -> set[str]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        pairs = zip(target.elts, value.elts, strict=True)
        return {name for t, v in pairs for name in _foreign_target(t, v, foreign)}
    if not _is_foreign(value, foreign):
        return set()
    return {n.id for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _is_foreign(value: ast.AST, foreign: set[str]) -> bool:
    """True if an expression is likely to be an array or a list: what was taken out of torch and did not come back."""
    if isinstance(value, ast.Name):
        return value.id in foreign
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        name = value.func.attr
        if name in _COMES_BACK or _root(value.func) == "torch":
            return False
        if name in _STAYS:
            return _is_foreign(value.func.value, foreign)
        if name in _LEAVES_TORCH:
            return True
    return any(_is_foreign(child, foreign) for child in ast.iter_child_nodes(value))


def _root(value: ast.expr) -> str | None:
    """The name that a chain of attributes begins with."""
    while isinstance(value, ast.Attribute):
        value = value.value
    return value.id if isinstance(value, ast.Name) else None


# ------------------------------------------------------------------ one segment
class _OfCtx(ast.NodeTransformer):
    """`ctx.a` becomes a name of its own, which the method gives and takes; ctx itself stays with the method."""

    def __init__(self, ctx: str | None) -> None:
        self.ctx = ctx
        self.read: set[str] = set()
        self.stored: set[str] = set()
        self.surely_stored: set[str] = set()

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if not (isinstance(node.value, ast.Name) and node.value.id == self.ctx):
            return self.generic_visit(node)
        name = ast.copy_location(ast.Name(ON_CTX + node.attr, node.ctx), node)
        if isinstance(node.ctx, ast.Store):
            self.stored.add(node.attr)
            self.surely_stored.add(node.attr)
        elif node.attr not in self.surely_stored:
            self.read.add(node.attr)
            return ast.copy_location(_call(ON_IT, name, ast.Constant(node.attr)), node)
        return name

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if isinstance(node.target, ast.Attribute) and getattr(node.target.value, "id", None) == self.ctx:
            raise UnfitError("it changes ctx")
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        node.value = self.visit(node.value)  # read before it is stored
        node.targets = [self.visit(t) for t in node.targets]
        return node

    def _arms(self, node: ast.AST) -> ast.AST:
        """Follows the arms of a statement: a name bound in one is not known to be in another, nor behind them."""
        before = set(self.surely_stored)
        for name, value in ast.iter_fields(node):
            if name in _ARMS:
                setattr(node, name, self._arm(value))
                self.surely_stored = set(before)
            elif isinstance(value, ast.AST):
                setattr(node, name, self.visit(value))
        return node

    visit_If = visit_For = visit_While = visit_Try = visit_TryStar = visit_Match = _arms
    visit_ExceptHandler = visit_match_case = _arms

    def _arm(self, nodes: list[ast.AST]) -> list[ast.AST]:
        return [self.visit(node) for node in nodes]

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id == self.ctx:
            raise UnfitError("it hands ctx on")
        return node


class _Exits(ast.NodeTransformer):
    """Ways out of the statements become results of a function."""

    def __init__(self) -> None:
        self.loops = 0
        self.exits: set[str] = set()

    def _exit(self, node: ast.stmt, name: str, value: ast.expr | None = None) -> ast.AST:
        self.exits.add(name)
        arguments: list[ast.expr] = [_call(LOCALS), ast.Constant(name), value or ast.Constant(None)]
        return ast.copy_location(ast.Return(_call(LEFT, *arguments)), node)

    def visit_Return(self, node: ast.Return) -> ast.AST:
        return self._exit(node, "return", node.value)

    def visit_Break(self, node: ast.Break) -> ast.AST:
        return node if self.loops else self._exit(node, "break")

    def visit_Continue(self, node: ast.Continue) -> ast.AST:
        return node if self.loops else self._exit(node, "continue")

    def _loop(self, node: Any) -> ast.AST:
        self.loops += 1
        node.body = [self.visit(s) for s in node.body]
        self.loops -= 1
        node.orelse = [self.visit(s) for s in node.orelse]
        return node  # type: ignore[no-any-return]

    visit_For = visit_While = _loop

    def _leave_as_is(self, node: ast.AST) -> ast.AST:
        return node

    visit_FunctionDef = visit_Lambda = visit_ClassDef = _leave_as_is


def _call(function: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(function, ast.Load()), list(args), [])


_NEVER = (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith, ast.AsyncFunctionDef, ast.Delete)


def _stored_names(nodes: Sequence[ast.AST]) -> set[str]:
    """The names that statements bind."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            names.add(node.rest)
    return names


class _Cutter:
    """Takes segments out of one function definition."""

    def __init__(self, function: types.FunctionType, lines: Lines, ctx: str | None) -> None:
        self.function, self.code, self.lines, self.ctx = function, function.__code__, lines, ctx
        self.tree: ast.FunctionDef = copy.deepcopy(_tree_of(self.code))
        self.locals = {*self.code.co_varnames, *self.code.co_cellvars}
        self.declared = [n for n in ast.walk(self.tree) if isinstance(n, ast.Global | ast.Nonlocal)]
        self.segments: dict[str, Segment] = {}
        self.bodies: dict[str, ast.FunctionDef] = {}

    def cut(self) -> None:
        runs = _statement_runs(self.tree, self.lines)
        # From the end on: what an earlier segment has to hand out depends on what the later ones take in.
        later_first = sorted(runs, key=lambda run: -run[0][run[1]].lineno)
        for body, first, behind in later_first:
            self._take(body, first, behind)

    def _take(self, body: Body, first: int, behind: int) -> None:
        statements = body[first:behind]
        nodes = [n for s in statements for n in ast.walk(s)]
        if any(isinstance(n, _NEVER) for n in nodes):
            raise UnfitError("it yields, waits or deletes")
        # ctx stays with the method, which is asked for its attributes; so do the ways out of the statements.
        of_ctx, exits = _OfCtx(self.ctx), _Exits()
        rewritten = [exits.visit(of_ctx.visit(copy.deepcopy(s))) for s in statements]
        # Every name that is read or bound comes in (it may be bound in one arm alone); what is read later goes out.
        stored = _stored_names(nodes) & self.locals
        read = {n.id for n in nodes if isinstance(n, ast.Name)} & self.locals
        read_later = {n for n in stored if self._is_read_elsewhere(n, {id(n) for n in nodes}, statements)}
        segment = self._segment(statements)
        on_ctx = {ON_CTX + name for name in of_ctx.stored}
        segment.inputs = tuple(sorted((read | stored) - {self.ctx or ""})) + tuple(
            sorted(ON_CTX + name for name in of_ctx.read)
        )
        segment.outputs = tuple(sorted(read_later)) + tuple(sorted(on_ctx))
        if of_ctx.read & of_ctx.stored:
            raise UnfitError("it changes what is on ctx")
        self._define(segment, rewritten)
        body[first:behind] = self._call_of_segment(segment, statements, of_ctx, exits.exits)

    def _is_read_elsewhere(self, name: str, own: set[int], statements: Body) -> bool:
        if any(name in segment.inputs for segment in self.segments.values()):  # its own reads are gone from the tree
            return True
        first, last = statements[0].lineno, statements[-1].end_lineno or 0
        loops = [n for n in ast.walk(self.tree) if isinstance(n, ast.For | ast.While)]
        again = any(loop.lineno < first and last <= (loop.end_lineno or 0) for loop in loops)
        reads = (n for n in ast.walk(self.tree) if isinstance(n, ast.Name) and n.id == name)
        return any(again or id(n) not in own for n in reads if isinstance(n.ctx, ast.Load))

    def _segment(self, statements: Body) -> Segment:
        lines = statements[0].lineno, statements[-1].end_lineno or statements[-1].lineno
        why = next(w for line, w in sorted(self.lines.why.items()) if lines[0] <= line <= lines[1])
        name = f"line_{lines[0]}" if lines[0] == lines[1] else f"lines_{lines[0]}_to_{lines[1]}"
        segment = Segment(name, lines, f"{self.code.co_filename}:{lines[0]}", why)
        self.segments[f"__fusegrad_segment_{lines[0]}"] = segment
        return segment

    def _define(self, segment: Segment, statements: list[Any]) -> None:
        """The statements as a function of their own, of the method's name."""
        arguments = [ast.arg(name) for name in segment.inputs]
        end = ast.Return(_call(LEFT, _call(LOCALS)))
        ast.copy_location(end, statements[-1])
        end.lineno = end.end_lineno = segment.lines[1]
        # A name that the method had not bound is not bound in the segment: reading it raises Python's own error.
        names = [name for name in segment.inputs if not name.startswith(ON_CTX)]
        unbound = _statements([f"if {name} is {ABSENCE}: del {name}" for name in names], statements[0])
        body = [*map(copy.deepcopy, self.declared), *unbound, *statements, end]
        spec = ast.arguments(posonlyargs=[], args=arguments, kwonlyargs=[], kw_defaults=[], defaults=[])
        definition = ast.FunctionDef(self.tree.name, spec, body, [])
        definition.type_params = []  # type: ignore[attr-defined]
        self.bodies[segment.__name__] = ast.copy_location(definition, statements[0])

    def _call_of_segment(self, segment: Segment, statements: Body, of_ctx: _OfCtx, exits: set[str]) -> Body:
        """The statement that replaces the segment in the method."""
        number, ctx = segment.lines[0], self.ctx
        result = f"__fusegrad_left_{number}"
        of_ctx_read = [f"{ON_CTX}{a}={OF_CTX}({ctx}, {a!r}, {ABSENCE})" for a in sorted(of_ctx.read)]
        text = [f"{result} = __fusegrad_segment_{number}({', '.join([f'{LOCALS}()', *of_ctx_read])})"]
        for name in segment.outputs:
            target = f"{ctx}.{name.removeprefix(ON_CTX)}" if name.startswith(ON_CTX) else name
            text.append(f"if {result}.has({name!r}): {target} = {result}[{name!r}]")
        ways = {"return": f"return {result}.value", "break": "break", "continue": "continue"}
        text += [f"if {result}.by({exit!r}): {ways[exit]}" for exit in sorted(exits)]
        return _statements(text, statements[0])


def _statements(lines: Sequence[str], place: ast.AST) -> Body:
    """Statements of ours, all of which stand where a statement of the user's stands."""
    body = parse("\n".join(lines)).body
    for node in _all_of(body):
        ast.copy_location(node, place)
    return body


# ------------------------------------------------------------------ the rewritten method
def cut(
    function: types.FunctionType, lines: Lines, ctx: str | None, node: str
) -> tuple[types.FunctionType, list[Segment]]:
    """The function with segments for the lines. ctx: the name of the parameter whose content stays with the method.

    node: how errors name ctx. Raises UnfitError where that cannot be.
    """
    cutter = _Cutter(function, lines, ctx)
    cutter.cut()
    read = functools.partial(_read_of_ctx, node)
    own = {LOCALS: locals, LEFT: SegmentResult, ABSENCE: ABSENT, OF_CTX: getattr, ON_IT: read}
    objects: dict[str, Any] = {**own, **cutter.segments}
    cells = cells_of(function)
    cells |= {name: types.CellType(value) for name, value in objects.items()}
    for segment in cutter.segments.values():
        body = _compile_definition(cutter.bodies[segment.__name__], list(objects), cutter.code)
        segment.function = _function(body, function, cells)
    rewritten = _function(_compile_definition(cutter.tree, list(objects), cutter.code), function, cells)
    rewritten.__defaults__, rewritten.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    rewritten.__dict__.update(function.__dict__)
    return rewritten, list(cutter.segments.values())


def _read_of_ctx(node: str, value: Any, name: str) -> Any:
    """An attribute of ctx that a segment reads."""
    if value is ABSENT:
        raise AttributeError(f"{node!r} object has no attribute {name!r}")
    return value


def _function(code: types.CodeType, like: types.FunctionType, cells: Mapping[str, Any]) -> types.FunctionType:
    closure = tuple(cells[name] for name in code.co_freevars)
    code = code.replace(co_qualname=like.__code__.co_qualname)
    function = types.FunctionType(code, like.__globals__, like.__name__, None, closure)
    function.__qualname__, function.__module__, function.__doc__ = like.__qualname__, like.__module__, like.__doc__
    return function


def innermost_function(method: Any) -> types.FunctionType | None:
    """The user's function inside decorators that keep it (`once_differentiable`, `custom_bwd`); None where lost."""
    function = inspect.unwrap(getattr(method, "__func__", method))
    return function if isinstance(function, types.FunctionType) else None


def decorate_again(method: Any, inner: types.FunctionType) -> Any:
    """The same decorators around another function. Raises UnfitError where a decorator does not show what it keeps."""
    if (wrapped := getattr(method, "__wrapped__", None)) is None:
        return inner
    cells = getattr(method, "__closure__", None) or ()
    places = [i for i, cell in enumerate(cells) if cell.cell_contents is wrapped]
    if not isinstance(method, types.FunctionType) or not places:
        raise UnfitError("a decorator does not show what it decorates")
    again = types.CellType(decorate_again(wrapped, inner))
    closure = tuple(again if i in places else cell for i, cell in enumerate(cells))
    wrapper = types.FunctionType(method.__code__, method.__globals__, method.__name__, method.__defaults__, closure)
    wrapper.__kwdefaults__ = method.__kwdefaults__
    wrapper.__dict__.update(method.__dict__)
    wrapper.__wrapped__ = again.cell_contents  # type: ignore[attr-defined]
    wrapper.__qualname__, wrapper.__module__, wrapper.__doc__ = method.__qualname__, method.__module__, method.__doc__
    return wrapper


# ------------------------------------------------------------------ which lines of a method
def lines_of(method: Any, place: str) -> list[int]:
    """The lines of a method at which `file:line` is reached: its own, or those that call a function that reaches it."""
    function = innermost_function(method)
    filename, _, number = place.rpartition(":")
    if function is None or not number.isdigit():
        return []
    line = int(number)
    if holds(function.__code__, filename, line):
        return [line]
    try:
        tree = _tree_of(function.__code__)
    except UnfitError:
        return []
    names = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute | ast.Name)]
    calls = ((n.lineno, f) for n in names if (f := _function_named(n, function)) is not None)
    return sorted({number for number, f in calls if _reaches(f, filename, line, set())})


def holds(code: types.CodeType, filename: str, line: int) -> bool:
    """True if a line is of a function."""
    if code.co_filename != filename:
        return False
    own = [n for _, _, n in code.co_lines() if n is not None]
    inner = any(holds(c, filename, line) for c in code.co_consts if isinstance(c, types.CodeType))
    return inner or bool(own and min(own) <= line <= max(own))


_BROAD = {"Exception", "BaseException", "RuntimeError", "LinAlgError", "_LinAlgError"}
_RAISES = {"linalg", "cholesky", "inv", "inverse", "solve", "eigh", "eig", "svd", "lstsq", "lu", "lu_solve", "qr",
           "multinomial", "cholesky_inverse", "cholesky_solve"}  # fmt: skip


def lines_that_catch(function: types.FunctionType) -> list[int]:
    """The first lines of `try` statements that catch what torch raises for some data (of a matrix, say)."""
    try:
        tree = _tree_of(function.__code__)
    except UnfitError:
        return []
    tries = [n for n in ast.walk(tree) if isinstance(n, ast.Try) and any(map(_is_broad, n.handlers))]
    return [n.lineno for n in tries if _names_in(n.body, function) & _RAISES]


def _is_broad(handler: ast.ExceptHandler) -> bool:
    names = [n for n in ast.walk(handler.type)] if handler.type is not None else []
    return handler.type is None or any(getattr(n, "attr", getattr(n, "id", None)) in _BROAD for n in names)


def _names_in(body: Body, function: types.FunctionType) -> set[str]:
    nodes = list(_all_of(body))
    names = {n.attr if isinstance(n, ast.Attribute) else n.id for n in nodes if isinstance(n, ast.Attribute | ast.Name)}
    called = (_function_named(n, function) for n in nodes)
    users = (f for f in called if isinstance(f, types.FunctionType) and not is_library(f))
    return names.union(*map(names_reached, users))


def _function_named(node: ast.AST, function: types.FunctionType) -> Any:
    """The Python function that a name, or a chain of names, leads to."""
    value = _value(node, function)
    value = getattr(value, "__func__", value)
    if isinstance(value, type):
        return value
    return inspect.unwrap(value) if isinstance(value, types.FunctionType) else None


def _value(node: ast.AST, function: types.FunctionType) -> Any:
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, function)
        return vars(owner).get(node.attr) if isinstance(owner, types.ModuleType | type) else None
    if not isinstance(node, ast.Name):
        return None
    cell = cells_of(function).get(node.id)
    return function.__globals__.get(node.id) if cell is None else cell_content(cell)


def _reaches(function: Any, filename: str, line: int, visited: set[int]) -> bool:
    """True if a function, or a method of a class, has the line or calls what reaches it."""
    if id(function) in visited or len(visited) > MOST:
        return False
    visited.add(id(function))
    if isinstance(function, type):
        members = [getattr(m, "__func__", m) for m in vars(function).values()]
        return any(_reaches(m, filename, line, visited) for m in members if isinstance(m, types.FunctionType))
    code = function.__code__
    if holds(code, filename, line):
        return True
    return any(_reaches(f, filename, line, visited) for f in _callees_of(function))


def _callees_of(function: types.FunctionType) -> list[Any]:
    """The functions and classes that a function may call by a name that it knows."""
    env, names = function.__globals__, _all_names(function.__code__)
    modules = [v for n in names if isinstance(v := env.get(n), types.ModuleType)]
    direct = [*closed_over(function), *(env.get(n) for n in names), *(vars(m).get(n) for m in modules for n in names)]
    functions = [inspect.unwrap(f) if isinstance(f, types.FunctionType) else f for f in direct]
    return [f for f in functions if isinstance(f, types.FunctionType | type)]


def names_reached(function: Any) -> set[str]:
    """The names that a function uses, and those that the functions use which it calls, libraries apart."""
    waiting, visited, names = [function], set[int](), set[str]()
    while waiting and len(visited) < MOST:
        current = waiting.pop()
        if id(current) in visited or not isinstance(current, types.FunctionType) or (visited and is_library(current)):
            continue
        visited.add(id(current))
        names |= {*_all_names(current.__code__), *current.__code__.co_freevars}
        waiting += _callees_of(current)
    return names


def stores_items(code: types.CodeType) -> bool:
    """True if code assigns to parts of something: `a[i] = ..`."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return any(i.opname == "STORE_SUBSCR" for i in dis.get_instructions(code)) or any(map(stores_items, inner))


def _all_names(code: types.CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return {*code.co_names, *(n for c in inner for n in _all_names(c))}
