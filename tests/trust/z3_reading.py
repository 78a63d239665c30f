"""A kernel's text as questions to z3: where does an access leave its tensor, or a value its 32 bits?

Read from Python's syntax tree by rules of its own: it shares nothing with `codegen.proofs` but the language. A program,
a turn of each loop and a lane of each block are free variables; a question is satisfiable if something can go wrong.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import z3
from z3_terms import (
    ALWAYS,
    NEVER,
    Number,
    Place,
    Term,
    Truth,
    Value,
    both,
    choice,
    either,
    fits,
    floor_quotient,
    quotient,
    truth,
    variables_in,
)

from fusegrad.codegen import Kernel, Pointer
from fusegrad.codegen.emit.prelude import HELPERS

BITS = {"int1": 1} | {f"{kind}{n}": n for kind in ("int", "uint", "i", "u") for n in (8, 16, 32, 64)}
"""Integers by their names in Triton's text, and as dtypes of arguments."""
ACCESSES = {"tl.load": "load", "tl.store": "store", "tl.atomic_add": "atomic"}
ACCESSES |= dict.fromkeys(("known", "last_to_arrive", "are_missing", "tell", "in_vain"), "atomic")


Room: TypeAlias = Callable[[str, str, int, str], Term | None]


class Unreadable(Exception):
    """The text has something that is not understood here."""


@dataclass(frozen=True)
class Question:
    """Is there a program, a turn and a lane for which this goes wrong?"""

    kind: str  # "range", "width", "division", "hint", "overlap"
    line: int
    text: str
    wrong: z3.BoolRef


@dataclass(frozen=True)
class Access:
    kind: str
    place: Place
    active: z3.BoolRef
    line: int
    text: str
    counters: tuple[Place, ...]  # of which the program is the last to arrive
    block: tuple[int, ...]  # the conditions around it, by z3's numbers
    made_of: tuple[Any, ...] = ()  # of a store: terms and accesses that decide what is stored


class Reading:
    """One walk through a kernel. Domains hold always; a question carries whatever else has to.

    room: the elements that an access may touch, by its kind, pointer, line and text; None where data decide.
    """

    def __init__(self, kernel: Kernel, scalars: Mapping[str, Term], room: Room, grid: Term) -> None:
        self.room = room
        self.dtypes = {p.name: p.dtype for p in kernel.arguments if isinstance(p, Pointer)}
        self.domains: list[z3.BoolRef] = []
        self.free: list[z3.ExprRef] = []  # what may differ between two programs
        self.data: set[int] = set()  # those of them that memory decides, by z3's numbers
        self.varying: dict[int, Callable[[], z3.ExprRef]] = {}  # of each lane another one, by z3's numbers
        self.twins: dict[tuple[int, str], z3.ExprRef] = {}
        self.vectors: dict[tuple[str, str], z3.ArithRef] = {}  # of lanes, by the first and behind the last
        self.questions: list[Question] = []
        self.plain = 0
        self.assigned: dict[str, list[tuple[ast.expr, Value]]] = {}
        self.accesses: list[Access] = []
        self.path: tuple[z3.BoolRef, ...] = ()
        self.asserted: tuple[z3.BoolRef, ...] = ()
        self.counters: tuple[Place, ...] = ()
        self.program = self.unknown("program", 0, grid)
        # The arguments of the function, then its body.
        self.names: dict[str, Value] = {name: Place(name) for name in self.dtypes}
        self.names |= {name: _argument(value) for name, value in scalars.items()}
        self.names |= {n: Number(v) if type(v) is int else None for n, v in kernel.constants.items()}
        (function,) = ast.parse(kernel.source.removeprefix("@triton.jit\n")).body
        assert isinstance(function, ast.FunctionDef)
        self.result: Value = None
        self.block(function.body)

    # ------------------------------------------------------------------ free variables
    def unknown(self, name: str, low: Term | None = None, high: Term | None = None) -> z3.ArithRef:
        """A new integer in low .. high - 1."""
        made = z3.Int(f"{name}!{len(self.free)}")
        self.free.append(made)
        self.domains += [made >= low] if low is not None else []
        self.domains += [made < high] if high is not None else []
        return made

    def datum(self, name: str, bits: int, signed: bool = True) -> Number:
        made = self.unknown(name)
        self.domains.append(fits(made, bits, signed))
        self.data.add(made.get_id())
        self.varying[made.get_id()] = lambda: self.datum(name, bits, signed).term
        return Number(made, bits, data=True)

    def condition(self) -> Truth:
        made = z3.Bool(f"condition!{len(self.free)}")
        self.free.append(made)
        self.data.add(made.get_id())
        self.varying[made.get_id()] = lambda: self.condition().term
        return Truth(made)

    def like(self, value: Value, name: str) -> Value:
        """Of which the kind alone is known."""
        if isinstance(value, Number):
            return self.datum(name, value.bits or 32)
        return self.condition() if isinstance(value, Truth) else None

    def along(self, dims: str, value: Value) -> Value:
        """Along another dimension, lanes are others, and so is what was loaded at them."""
        if not isinstance(value, Number | Truth):
            return value
        return replace(value, term=self.exchanged(dims, value.term), wraps=self.exchanged(dims, value.wraps))

    def exchanged(self, dims: str, term: Term) -> Term:
        variables = [v for v in variables_in(term) if v.get_id() in self.varying]
        for v in variables:
            if (v.get_id(), dims) not in self.twins:
                self.twins[v.get_id(), dims] = self.varying[v.get_id()]()
        return z3.substitute(term, *((v, self.twins[v.get_id(), dims]) for v in variables)) if variables else term

    # ------------------------------------------------------------------ questions
    def ask(self, kind: str, node: ast.AST, *wrong: z3.BoolRef) -> None:
        """Unless it is plain that nothing can go wrong: those are counted."""
        if any(z3.is_false(w) for w in wrong):
            self.plain += 1
        else:
            line, text = node.lineno, ast.unparse(node)  # type: ignore[attr-defined]
            self.questions.append(Question(kind, line, text, both(*self.path, *self.asserted, *wrong)))

    @contextmanager
    def where(self, *conditions: z3.BoolRef) -> Iterator[None]:
        outer, counters, self.path = self.path, self.counters, (*self.path, *conditions)
        try:
            yield
        finally:
            self.path, self.counters = outer, counters

    # ------------------------------------------------------------------ statements
    def block(self, body: Sequence[ast.stmt]) -> None:
        for node in body:
            match node:
                case ast.Assign(targets=[target]) | ast.AnnAssign(target=target) if node.value:
                    self.assign(target, node.value)
                case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
                    self.bind(name, value, self.binary(node, op, self.names.get(name), self.value(value)))
                case ast.For(target=ast.Name(id=name), iter=ast.Call() as call):
                    self.loop(name, call, node.body)
                case ast.If():
                    self.branch(node)
                case ast.Expr(value=value):
                    self.value(value)
                case ast.Return(value=value):
                    self.result = self.value(value) if value else None
                case _:
                    raise Unreadable(f"line {node.lineno}: {type(node).__name__}")

    def assign(self, target: ast.expr, node: ast.expr) -> None:
        """Of several results at once nothing is known."""
        value, names = self.value(node), target.elts if isinstance(target, ast.Tuple) else [target]
        for name in names:
            self.bind(ast.unparse(name), node, value if name is target else None)

    def bind(self, name: str, node: ast.expr, value: Value) -> None:
        self.names[name] = value
        self.assigned.setdefault(name, []).append((node, value))

    def loop(self, name: str, call: ast.Call, body: list[ast.stmt]) -> None:
        """Any turn: what other turns assign is unknown in it, and behind the loop."""
        bounds = [self.number(a) for a in call.args]
        start, stop, step = (Number(0), *bounds, Number(1)) if len(bounds) == 1 else (*bounds, Number(1))[:3]
        changed = {n.id for s in body for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        before = {n: self.names[n] for n in changed if n in self.names}
        self.names |= {n: self.like(v, n) for n, v in before.items()}
        turn = start.term + self.unknown(name, 0) * step.term
        bits = max(start.bits, stop.bits, step.bits, 32)
        self.ask("width", call, either(start.wraps, stop.wraps, step.wraps))
        self.ask("division", call, truth(step.term <= 0))
        with self.where(truth(turn < stop.term)):
            if bits == 32:  # behind the last turn, the variable is still counted up
                self.ask("width", call, z3.Not(fits(turn + step.term, 32)))
            self.bind(name, call, Number(turn, bits))
            self.block(body)
        self.names = {n: v for n, v in self.names.items() if n not in changed}
        self.names |= {n: self.like(v, n) for n, v in before.items()}

    def branch(self, node: ast.If) -> None:
        test = self.value(node.test)
        test = test if isinstance(test, Truth) else self.condition()
        self.ask("width", node.test, test.wraps)
        outer, ends = self.names, []
        for body, holds in ((node.body, test.term), (node.orelse, z3.Not(test.term))):
            self.names = dict(outer)
            with self.where(holds):
                if body is node.body and _is_call(node.test, "last_to_arrive"):
                    self.counters = (*self.counters, self.accesses[-1].place)
                self.block(body)
            ends.append(self.names)
        yes, no = ends
        known = [n for n in yes if n in no]
        self.names = {n: yes[n] if yes[n] is no[n] else self.chosen(test, yes[n], no[n]) for n in known}

    # ------------------------------------------------------------------ expressions
    def value(self, node: ast.expr) -> Value:
        match node:
            case ast.Constant(value=value):
                return Number(value) if type(value) is int else None
            case ast.Name(id=name):
                if name not in self.names:
                    raise Unreadable(f"line {node.lineno}: {name} is not defined")
                return self.names[name]
            case ast.Subscript(value=value, slice=dims):  # lanes[None, :]
                return self.along(ast.unparse(dims), self.value(value))
            case ast.BinOp(left=left, op=op, right=right):
                return self.binary(node, op, self.value(left), self.value(right))
            case ast.UnaryOp(op=op, operand=x):
                return self.unary(node, op, self.value(x))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self.compare(op, self.value(left), self.value(right))
            case ast.Call():
                return self.call(node)
        return None

    def number(self, node: ast.expr) -> Number:
        found = self.value(node)
        if not isinstance(found, Number):
            raise Unreadable(f"line {node.lineno}: {ast.unparse(node)} is no integer")
        return found

    def unary(self, node: ast.expr, op: ast.unaryop, x: Value) -> Value:
        if isinstance(op, ast.USub) and isinstance(x, Number):
            return self.result_of(-x.term, x)
        if isinstance(op, ast.Invert | ast.Not) and isinstance(x, Truth):
            return Truth(z3.Not(x.term), x.wraps)
        return self.like(x, "unary")

    def compare(self, op: ast.cmpop, a: Value, b: Value) -> Truth:
        if isinstance(a, Truth) and isinstance(b, Truth) and isinstance(op, ast.Eq | ast.NotEq):
            return Truth(COMPARISONS[type(op)](a.term, b.term), either(a.wraps, b.wraps))
        if not (isinstance(a, Number) and isinstance(b, Number)):
            return self.condition()
        return Truth(truth(COMPARISONS[type(op)](a.term, b.term)), either(a.wraps, b.wraps))

    def binary(self, node: Any, op: ast.operator, a: Value, b: Value) -> Value:
        match a, b:
            case (Place(), Number()) | (Number(), Place()):
                pointer, by = (a, b) if isinstance(a, Place) else (b, a)
                moved = pointer.term - by.term if isinstance(op, ast.Sub) else pointer.term + by.term
                return Place(pointer.pointer, moved, either(pointer.wraps, by.wraps))
            case Truth(), Truth():
                return self.connective(op, a, b)
            case Number(), Number():
                return self.arithmetic(node, op, a, b)
        return None if a is None or b is None else self.like(a, "binary")

    def connective(self, op: ast.operator, a: Truth, b: Truth) -> Truth:
        """Right where one side alone decides, however wrong the other is."""
        if isinstance(op, ast.BitAnd):
            open_ = either(both(a.wraps, either(b.term, b.wraps)), both(b.wraps, either(a.term, a.wraps)))
            return Truth(both(a.term, b.term), open_)
        if isinstance(op, ast.BitOr):
            no_a, no_b = z3.Not(a.term), z3.Not(b.term)
            open_ = either(both(a.wraps, either(no_b, b.wraps)), both(b.wraps, either(no_a, a.wraps)))
            return Truth(either(a.term, b.term), open_)
        return replace(self.condition(), wraps=either(a.wraps, b.wraps))

    def arithmetic(self, node: Any, op: ast.operator, a: Number, b: Number) -> Number:
        if (rule := ARITHMETIC.get(type(op))) is not None:
            return self.result_of(rule(a.term, b.term), a, b)
        if isinstance(op, ast.FloorDiv | ast.Mod):
            if not b.data:
                self.ask("division", node, truth(b.term == 0))
            whole = quotient(a.term, b.term)
            return self.result_of(whole if isinstance(op, ast.FloorDiv) else a.term - b.term * whole, a, b)
        if isinstance(a.term, int) and isinstance(b.term, int):
            return self.result_of(BITWISE[type(op)](a.term, b.term), a, b)
        return self.datum("bits", max(a.bits, b.bits) or 32)

    def result_of(self, term: Term, *operands: Number) -> Number:
        """As wide as the widest operand; of 32 bits it wraps around where it does not fit."""
        bits, data = max(o.bits for o in operands), any(o.data for o in operands)
        wraps = either(*(o.wraps for o in operands))
        if bits in (0, 64):
            return Number(term, bits, wraps, data)
        return self.narrowed(term, bits, wraps, data)

    def narrowed(self, term: Term, bits: int, wraps: z3.BoolRef, data: bool, signed: bool = True) -> Number:
        inside = fits(term, bits, signed)
        if data:
            return Number(choice(inside, term, self.datum("wrapped", bits, signed).term), bits, wraps, True)
        return Number(term, bits, either(wraps, z3.simplify(z3.Not(inside))))

    def chosen(self, test: Truth, a: Value, b: Value) -> Value:
        """a where the test holds, else b."""
        if not (isinstance(a, Number | Truth) and type(a) is type(b)):
            return None
        wraps = either(test.wraps, both(test.term, a.wraps), both(z3.Not(test.term), b.wraps))
        if isinstance(a, Truth):
            return Truth(both(z3.Implies(test.term, a.term), either(test.term, b.term)), wraps)
        assert isinstance(b, Number)
        return Number(choice(test.term, a.term, b.term), max(a.bits, b.bits), wraps, a.data or b.data)

    # ------------------------------------------------------------------ what a value is made of
    def ingredients(self, node: ast.AST, seen: set[str]) -> Iterator[Any]:
        """Integers and conditions as terms, and the accesses that what is in memory comes from."""
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ACCESSES:
            yield from (a for a in self.accesses if (a.line, a.text) == (node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.Call) and _is_call(node, "tl.program_id"):
            yield self.program
        elif isinstance(node, ast.Name):
            yield from self.ingredients_of(node.id, seen)
        else:
            for child in ast.iter_child_nodes(node):
                yield from self.ingredients(child, seen)

    def ingredients_of(self, name: str, seen: set[str]) -> Iterator[Any]:
        """Of all that was ever assigned; of an integer that no data is in nothing but its value."""
        if name in seen:
            return
        seen.add(name)
        for node, value in self.assigned.get(name, ()):
            if isinstance(value, Number | Truth):
                yield value.term
            if value is None or self.has_data(value):
                yield from self.ingredients(node, seen)

    def has_data(self, value: Value) -> bool:
        return not isinstance(value, Number | Truth) or any(v.get_id() in self.data for v in variables_in(value.term))

    # ------------------------------------------------------------------ calls
    def call(self, node: ast.Call) -> Value:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            bitcast = any(k.arg == "bitcast" for k in node.keywords)
            x = self.value(node.func.value)
            return self.cast(None if bitcast else x, node.args[0])
        name = ast.unparse(node.func)
        if name in ACCESSES:
            return self.access(ACCESSES[name], name, node)
        if (rule := CALLS.get(name)) is not None:
            return rule(self, node)
        given = [self.value(a) for a in node.args]
        if name in HELPERS and given and all(isinstance(g, Number) for g in given):
            return self.inlined(name, given, node)
        if not given or any(g is None or isinstance(g, Place) for g in given):
            return None
        return self.like(given[0], name)

    def cast(self, x: Value, dtype: ast.expr) -> Value:
        name = getattr(dtype, "attr", "")
        bits, signed = BITS.get(name, 0), not name.startswith("u")
        if not bits:
            return None
        if bits == 1:
            return Truth(truth(x.term != 0), x.wraps) if isinstance(x, Number) else self.condition()
        if isinstance(x, Truth):
            return Number(choice(x.term, 1, 0), bits, x.wraps)
        if not isinstance(x, Number):
            return self.datum("float", bits, signed)
        wider = signed and bits >= (x.bits or 64)
        return replace(x, bits=bits) if wider else self.narrowed(x.term, bits, x.wraps, x.data, signed)

    def inlined(self, name: str, given: Sequence[Value], node: ast.Call) -> Value:
        """The helper's body in place of its call."""
        (function,) = ast.parse(HELPERS[name].removeprefix("@triton.jit\n")).body
        assert isinstance(function, ast.FunctionDef)
        names, defaults = [a.arg for a in function.args.args], function.args.defaults
        own = dict(zip(names[len(names) - len(defaults) :], map(self.value, defaults), strict=True))
        own |= dict(zip(names, given, strict=False)) | {k.arg: self.value(k.value) for k in node.keywords if k.arg}
        outer, self.names, self.result = self.names, own, None
        try:
            self.block([s for s in function.body if not _is_text(s)])
        finally:
            self.names = outer
        return self.result

    def access(self, kind: str, name: str, node: ast.Call) -> Value:
        place = self.value(node.args[0])
        others = [self.value(a) for a in node.args[1:]]
        mask = self.mask(node)
        if not isinstance(place, Place):
            raise Unreadable(f"line {node.lineno}: {ast.unparse(node)} is no access")
        active, extent = mask.term, self.room(kind, place.pointer, node.lineno, ast.unparse(node))
        if extent is not None:
            self.ask("range", node, active, either(truth(place.term < 0), truth(place.term >= extent)))
        self.ask("width", node, either(mask.wraps, both(active, place.wraps)))
        everywhere, block = both(*self.path, *self.asserted, active), tuple(c.get_id() for c in self.path)
        made_of = tuple(self.ingredients(node.args[1], set())) if kind == "store" else ()
        text = ast.unparse(node)
        self.accesses.append(Access(kind, place, everywhere, node.lineno, text, self.counters, block, made_of))
        if name in ("last_to_arrive", "are_missing"):
            self.ask("width", node, either(*(o.wraps for o in others if isinstance(o, Number))))
            return self.condition()
        if name in ("tell", "in_vain"):
            return self.condition() if name == "in_vain" else None
        return self.content(place.pointer) if kind != "store" else None

    def content(self, pointer: str) -> Value:
        dtype = self.dtypes[pointer]
        if dtype == "b1":
            return self.condition()
        return self.datum(pointer, BITS[dtype], dtype[0] == "i") if dtype in BITS else None

    def mask(self, node: ast.Call) -> Truth:
        given = next((k.value for k in node.keywords if k.arg == "mask"), None)
        found = Truth(ALWAYS) if given is None else self.value(given)
        return found if isinstance(found, Truth) else self.condition()

    def device_assert(self, node: ast.Call) -> None:
        """From here on, wherever the mask of the assertion holds."""
        test, mask = self.value(node.args[0]), self.mask(node)
        if isinstance(test, Truth):
            self.ask("width", node, either(mask.wraps, both(mask.term, test.wraps)))
            self.asserted += (z3.Implies(both(*self.path, mask.term), test.term),)

    def extremum(self, node: ast.Call, smaller: bool) -> Value:
        a, b = (self.value(x) for x in node.args)
        if not (isinstance(a, Number) and isinstance(b, Number)):
            return None if a is None or b is None else self.like(a, "extremum")
        term = choice(a.term <= b.term if smaller else a.term >= b.term, a.term, b.term)
        return Number(term, max(a.bits, b.bits), either(a.wraps, b.wraps), a.data or b.data)

    def ceiling(self, node: ast.Call) -> Number:
        a, b = (self.number(x) for x in node.args)
        self.ask("division", node, truth(b.term == 0))
        above = self.result_of(a.term + b.term - 1, a, b)
        return self.result_of(quotient(above.term, b.term), above, b)

    def multiple_of(self, node: ast.Call) -> Number:
        x, factor = (self.number(a) for a in node.args)
        self.ask("hint", node, truth(x.term - factor.term * floor_quotient(x.term, factor.term) != 0))
        return x

    def selected(self, node: ast.Call) -> Value:
        test, a, b = (self.value(x) for x in node.args)
        return self.chosen(test if isinstance(test, Truth) else self.condition(), a, b)

    def lanes(self, node: ast.Call) -> Number:
        """Vectors of the same lanes are one: where they meet, they lie along the same dimension."""
        low, high = (self.number(a).term for a in node.args)
        if (str(low), str(high)) not in self.vectors:
            self.vectors[str(low), str(high)] = self.lane(low, high)
        return Number(self.vectors[str(low), str(high)], 32)

    def lane(self, low: Term, high: Term) -> z3.ArithRef:
        made = self.unknown("lane", low, high)
        self.varying[made.get_id()] = lambda: self.lane(low, high)
        return made


COMPARISONS: dict[type[ast.cmpop], Callable[[Term, Term], Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], Callable[[Term, Term], Term]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
}  # fmt: skip
BITWISE: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.LShift: operator.lshift, ast.RShift: operator.rshift, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}  # fmt: skip
CALLS: dict[str, Callable[[Reading, ast.Call], Value]] = {
    "tl.arange": Reading.lanes,
    "tl.broadcast_to": lambda r, node: r.value(node.args[0]),
    "tl.cast": lambda r, node: r.cast(r.value(node.args[0]), node.args[1]),
    "tl.cdiv": Reading.ceiling,
    "tl.device_assert": Reading.device_assert,
    "tl.full": lambda r, node: r.cast(r.value(node.args[1]), node.args[2]),
    "tl.maximum": lambda r, node: r.extremum(node, smaller=False),
    "tl.minimum": lambda r, node: r.extremum(node, smaller=True),
    "tl.multiple_of": Reading.multiple_of,
    "tl.program_id": lambda r, node: Number(r.program, 32),
    "tl.where": Reading.selected,
    "tl.zeros": lambda r, node: r.cast(Number(0), node.args[1]),
}


def _argument(value: Term) -> Number:
    """A size, passed in 32 bits where they hold it; what is open is small."""
    return Number(value, 32 if not isinstance(value, int) or -(2**31) <= value < 2**31 else 64)


def _is_call(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == name


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


__all__ = ["NEVER", "Access", "Question", "Reading", "Unreadable"]
