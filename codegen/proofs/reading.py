"""The text of a kernel, read by abstract interpretation: integers are polynomials, comparisons facts, the rest unknown.

Nothing here knows how the text was made. A value is as wide as Triton computes it: 32 bits where all its operands are,
and a size argument is as long as it fits. What is read from memory is an atom of its own, about which nothing is known.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from ..emit.prelude import HELPERS
from .bounds import LANES, Case, World, at
from .bounds import turn as drawn_turn
from .polynomials import ONE, ZERO, Poly

INTEGERS = {"int1": 1, "int8": 8, "int16": 16, "int32": 32, "int64": 64, "uint8": 8, "uint16": 16, "uint32": 32}
WIDTHS = {"b1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "u8": 8, "u16": 16, "u32": 32, "u64": 64}
Facts: TypeAlias = "tuple[Poly, ...]"
Shape: TypeAlias = "tuple[int, ...]"


class Unread(Exception):
    """The text has something that is not understood."""

    def __init__(self, what: str, line: int) -> None:
        super().__init__(f"line {line}: {what}")


@dataclass(frozen=True, slots=True)
class Need:
    """A value that 32 bits have to hold while the size arguments `narrow` are 32 bits wide, under `facts`."""

    value: Poly
    narrow: frozenset[str]
    facts: Facts
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Int:
    """An integer, or a block of them: what it is, how wide (0: known when compiled), and what has to fit on the way."""

    poly: Poly
    width: int = 0
    narrow: frozenset[str] = frozenset()
    needs: tuple[Need, ...] = ()


@dataclass(frozen=True, slots=True)
class Truth:
    """A condition: facts where it is true, facts where it is false."""

    true: Facts = ()
    false: Facts = ()
    needs: tuple[Need, ...] = ()
    ticket: Ticket | None = None


@dataclass(frozen=True, slots=True)
class Pointer:
    """An address: so many elements behind an argument."""

    name: str
    offset: Poly = ZERO
    needs: tuple[Need, ...] = ()


@dataclass(frozen=True, slots=True)
class Other:
    """A float, or anything else that no address is made of."""

    value: Any = None


Value: TypeAlias = "Int | Truth | Pointer | Other"
Kind = Literal["load", "store", "atomic"]


@dataclass(frozen=True, slots=True)
class Ticket:
    """True in one of the programs that meet at a counter: those for which it is the same."""

    pointer: str
    offset: Poly


@dataclass(frozen=True, slots=True)
class Access:
    """One place of the text that touches memory, in every turn of the loops around it."""

    kind: Kind
    pointer: str
    offset: Poly
    facts: Facts  # of the branches and loops around it, and of its mask
    needs: tuple[Need, ...]
    tickets: tuple[Ticket, ...]
    line: int
    text: str
    stored: frozenset[str] = frozenset()  # names that the value is made of


@dataclass(frozen=True, slots=True)
class Hint:
    """`tl.multiple_of(value, factor)`: promised to the compiler."""

    value: Poly
    factor: int
    line: int
    text: str


@dataclass
class Read:
    """All that a text says."""

    accesses: list[Access] = field(default_factory=list)
    hints: list[Hint] = field(default_factory=list)
    needs: dict[Need, None] = field(default_factory=dict)  # of loops, masks and addresses
    divisions: list[tuple[str, int]] = field(default_factory=list)  # of which the sign or a zero is not excluded
    spans: dict[int, tuple[Poly, Poly]] = field(default_factory=dict)  # turn: start, stop of the loop's variable
    steps: dict[int, Poly] = field(default_factory=dict)
    program: int | None = None


@lru_cache(maxsize=512)
def parsed(source: str) -> ast.FunctionDef:
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    return function


class Reader:
    """Walks one function; `arguments` are its values by name."""

    def __init__(
        self, world: World, arguments: Mapping[str, Value], dtypes: Mapping[str, str], programs: Poly,
        is_multiple: Callable[[Poly, int], bool],
    ) -> None:  # fmt: skip
        self.world, self.env, self.dtypes, self.programs = world, dict(arguments), dtypes, programs
        self.is_multiple = is_multiple
        self.read = Read()
        self.facts: Facts = ()
        self.tickets: tuple[Ticket, ...] = ()
        self.result: Value = Other()
        self._lanes: dict[tuple[Any, ...], Poly] = {}
        self.made_of: dict[str, set[str]] = {}  # a name: those that it was made of, ever
        self.places: dict[str, set[int]] = {}  # a name: atoms that are in it, ever

    # ------------------------------------------------------------------ statements
    def block(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            known = getattr(self, f"_at_{type(statement).__name__.lower()}", None)
            if known is None:
                raise Unread(type(statement).__name__, statement.lineno)
            known(statement)

    def _at_assign(self, node: ast.Assign) -> None:
        (target,) = node.targets
        if isinstance(target, ast.Tuple):
            self._take_apart(target, node.value)
            return
        if not isinstance(target, ast.Name):
            raise Unread(ast.unparse(target), node.lineno)
        self._set(target.id, node.value)

    def _take_apart(self, targets: ast.Tuple, node: ast.expr) -> None:
        """a, b, _, _ = tl.philox_impl(...): what is read for it is looked at, nothing is known of the parts."""
        self.value(node)
        for target in targets.elts:
            if not isinstance(target, ast.Name):
                raise Unread(ast.unparse(targets), node.lineno)
            self.env[target.id] = Other()
            self.made_of.setdefault(target.id, set()).update(names_in(node))

    def _set(self, name: str, node: ast.expr) -> None:
        self.env[name] = found = self.value(node)
        self.made_of.setdefault(name, set()).update(names_in(node))
        self.places.setdefault(name, set()).update(_atoms_of(found))

    def _at_augassign(self, node: ast.AugAssign) -> None:
        assert isinstance(node.target, ast.Name)
        both = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        self._set(node.target.id, ast.fix_missing_locations(ast.copy_location(both, node)))

    def _at_annassign(self, node: ast.AnnAssign) -> None:
        assert isinstance(node.target, ast.Name)
        self.env[node.target.id] = self.value(node.value) if node.value else Other()

    def _at_expr(self, node: ast.Expr) -> None:
        self.value(node.value)

    def _at_return(self, node: ast.Return) -> None:
        self.result = self.value(node.value) if node.value else Other()

    def _at_if(self, node: ast.If) -> None:
        test = self.value(node.test)
        facts, tickets = self.facts, self.tickets
        truth = test if isinstance(test, Truth) else Truth()
        self._wanted(truth.needs)
        for body, more in ((node.body, truth.true), (node.orelse, truth.false)):
            self.facts = facts + more
            self.tickets = (*tickets, truth.ticket) if truth.ticket and body is node.body else tickets
            before = dict(self.env)
            self.block(body)
            self._forget(body, before)
        self.facts, self.tickets = facts, tickets

    def _at_for(self, node: ast.For) -> None:
        assert isinstance(node.target, ast.Name) and isinstance(node.iter, ast.Call)
        start, stop, step = self._range(node.iter)
        name = node.target.id
        before = dict(self.env)
        self._forget(node.body, before)
        turn = self.world.turns(f"{name}#" if step != ONE else name, stop.poly - start.poly, step)
        number = turn.top
        place = start.poly + turn * step
        self.read.spans[number], self.read.steps[number] = (start.poly, stop.poly), step
        facts = self.facts
        self.facts = (*facts, stop.poly - start.poly - 1)
        wide = self._both(start, stop)
        if wide.width != 64:  # what ends the loop is computed, too
            self._wanted([Need(stop.poly + step - 1, wide.narrow, self.facts, node.lineno, ast.unparse(node.iter))])
        self.env[name] = replace(wide, poly=place, width=wide.width or 32, needs=())
        self.made_of.setdefault(name, set())
        self.places.setdefault(name, set()).update(place.atoms)
        self.block(node.body)
        self.facts = facts
        self._forget(node.body, before)

    def _range(self, call: ast.Call) -> tuple[Int, Int, Poly]:
        given = [self._int(a) for a in call.args]
        if len(given) == 1:
            given = [Int(ZERO), *given]
        start, stop, step = given if len(given) == 3 else (*given, Int(ONE))
        for bound in given:
            self._wanted(bound.needs)
        if not self.world.holds(step.poly - 1):
            raise Unread("a step that may not be positive", call.lineno)
        return start, stop, step.poly

    def _forget(self, body: Sequence[ast.stmt], before: Mapping[str, Value]) -> None:
        """What a block assigns is unknown around it, but for what it would be anyway."""
        for name in _assigned(body):
            if name in before:
                self.env[name] = self._unlike(before[name], name)
            else:
                self.env.pop(name, None)

    def _unlike(self, value: Value, name: str) -> Value:
        if isinstance(value, Int):
            return Int(self._datum(name), value.width or 32)
        return Truth() if isinstance(value, Truth) else Other()

    # ------------------------------------------------------------------ expressions
    def value(self, node: ast.expr) -> Value:
        known = getattr(self, f"_of_{type(node).__name__.lower()}", None)
        if known is None:
            raise Unread(ast.unparse(node), node.lineno)
        found: Value = known(node)
        return found

    def _int(self, node: ast.expr) -> Int:
        found = self.value(node)
        if not isinstance(found, Int):
            raise Unread(f"{ast.unparse(node)} is no integer", node.lineno)
        return found

    def _of_constant(self, node: ast.Constant) -> Value:
        return Int(Poly.of(node.value)) if type(node.value) is int else Other(node.value)

    def _of_name(self, node: ast.Name) -> Value:
        if node.id not in self.env:
            raise Unread(f"{node.id} is not defined", node.lineno)
        return self.env[node.id]

    def _of_attribute(self, node: ast.Attribute) -> Value:
        return Other(node.attr)

    def _of_list(self, node: ast.List) -> Value:
        return Other()

    _of_tuple = _of_list

    def _of_subscript(self, node: ast.Subscript) -> Value:
        """lanes[None, :]: the same lanes along another dimension are other lanes."""
        found = self.value(node.value)
        if not isinstance(found, Int) or not isinstance(node.value, ast.Call):
            raise Unread(ast.unparse(node), node.lineno)
        return found

    def _of_unaryop(self, node: ast.UnaryOp) -> Value:
        x = self.value(node.operand)
        if isinstance(node.op, ast.USub) and isinstance(x, Int):
            return self._checked(-x.poly, x, x, node)
        if isinstance(node.op, (ast.Invert, ast.Not)) and isinstance(x, Truth):
            return Truth(x.false, x.true, x.needs)
        return self._same_kind(x, node)

    def _of_compare(self, node: ast.Compare) -> Value:
        a, b = self.value(node.left), self.value(node.comparators[0])
        if not (isinstance(a, Int) and isinstance(b, Int)):
            return Truth()
        more, needs = b.poly - a.poly, (*a.needs, *b.needs)
        facts: dict[str, tuple[Facts, Facts]] = {
            "Lt": ((more - 1,), (-more,)), "LtE": ((more,), (-more - 1,)),
            "Gt": ((-more - 1,), (more,)), "GtE": ((-more,), (more - 1,)),
            "Eq": ((more, -more), ()), "NotEq": ((), (more, -more)),
        }  # fmt: skip
        return Truth(*facts[type(node.ops[0]).__name__], needs)

    def _of_binop(self, node: ast.BinOp) -> Value:
        a, b = self.value(node.left), self.value(node.right)
        if isinstance(a, Pointer) or isinstance(b, Pointer):
            return self._moved(a, b, node)
        if isinstance(a, Truth) and isinstance(b, Truth):
            return _joined(a, b, node.op)
        if not (isinstance(a, Int) and isinstance(b, Int)):
            return self._same_kind(a if isinstance(a, Int) else b if isinstance(b, Int) else Other(), node, a, b)
        return self._arithmetic(a, b, node)

    def _moved(self, a: Value, b: Value, node: ast.BinOp) -> Pointer:
        pointer, by = (a, b) if isinstance(a, Pointer) else (b, a)
        if not (isinstance(pointer, Pointer) and isinstance(by, Int) and isinstance(node.op, (ast.Add, ast.Sub))):
            raise Unread(ast.unparse(node), node.lineno)
        offset = by.poly if isinstance(node.op, ast.Add) else -by.poly
        return Pointer(pointer.name, pointer.offset + offset, (*pointer.needs, *by.needs))

    def _arithmetic(self, a: Int, b: Int, node: ast.BinOp) -> Value:
        match node.op:
            case ast.Add():
                return self._checked(a.poly + b.poly, a, b, node)
            case ast.Sub():
                return self._checked(a.poly - b.poly, a, b, node)
            case ast.Mult():
                return self._checked(a.poly * b.poly, a, b, node)
            case ast.FloorDiv() | ast.Mod():
                return self._divided(a, b, node)
        if a.poly.number is not None and b.poly.number is not None and isinstance(node.op, (ast.LShift, ast.BitAnd)):
            x, y = int(a.poly.number), int(b.poly.number)
            return replace(self._both(a, b), poly=Poly.of(x << y if isinstance(node.op, ast.LShift) else x & y))
        return self._same_kind(a, node, a, b)

    def _divided(self, a: Int, b: Int, node: ast.BinOp) -> Int:
        both, modulo = self._both(a, b), isinstance(node.op, ast.Mod)
        n = b.poly.number
        if isinstance(n, int) and n > 0 and self.is_multiple(a.poly, n):
            return replace(both, poly=ZERO if modulo else a.poly.over(n))
        found = self.world.divided(a.poly, b.poly)
        if found is None:
            if not self._is_data(a.poly) and not self._is_data(b.poly):
                self.read.divisions.append((ast.unparse(node), node.lineno))
            return replace(both, poly=self._datum("quotient"))
        return replace(both, poly=found[modulo])

    def _both(self, a: Int, b: Int) -> Int:
        """As wide as Triton makes the result: of two integers the wider, an argument as wide as its value."""
        width = max(a.width, b.width)
        narrow = frozenset[str]() if width == 64 else a.narrow | b.narrow
        return Int(ZERO, width, narrow, tuple(dict.fromkeys((*a.needs, *b.needs))))

    def _checked(self, result: Poly, a: Int, b: Int, node: ast.expr) -> Int:
        """The result of an operation that may not fit into 32 bits."""
        both = self._both(a, b)
        if both.width == 64 or not both.width or self._is_data(result):
            return replace(both, poly=result if both.width != 32 or not self._is_data(result) else self._datum("sum"))
        need = Need(result, both.narrow, self.facts, node.lineno, ast.unparse(node))
        return replace(both, poly=result, needs=(*both.needs, need))

    def _is_data(self, poly: Poly) -> bool:
        """Whether what memory holds decides, so that wrapping around is what was asked for."""
        return any(a in self.world.data for a in self._origins(poly))

    def _origins(self, poly: Poly) -> set[int]:
        return origins(self.world, poly)

    def _datum(self, name: str) -> Poly:
        made = self.world.atom(name, lambda s, r: r.randint(0, 1))
        (number,) = made.atoms
        self.world.data[number] = name
        return made

    def _same_kind(self, found: Value, node: ast.expr, *operands: Value) -> Value:
        """An operation of which only the kind of its result is known."""
        if any(isinstance(o, Other) for o in operands):
            return Other()
        if isinstance(found, Int):
            return Int(self._datum(ast.unparse(node)), found.width or 32)
        return Truth() if isinstance(found, Truth) else Other()

    def _wanted(self, needs: Sequence[Need]) -> None:
        self.read.needs.update(dict.fromkeys(needs))

    # ------------------------------------------------------------------ calls
    def _of_call(self, node: ast.Call) -> Value:
        function = node.func
        if isinstance(function, ast.Attribute):
            if isinstance(function.value, ast.Name) and function.value.id in ("tl", "libdevice"):
                known = getattr(self, f"_{function.value.id}_{function.attr}", None)
                return known(node) if known else self._unknown(node)
            return self._method(node, function)
        assert isinstance(function, ast.Name)
        known = getattr(self, f"_help_{function.id}", None)
        return known(node) if known else self._unknown(node)

    def _unknown(self, node: ast.Call) -> Value:
        """A function of numbers: its operands are looked at for what they read, its result is unknown."""
        given = [self.value(a) for a in node.args]
        if isinstance(node.func, ast.Name) and node.func.id in HELPERS and _are_ints(given):
            return self._inlined(node.func.id, given, node)
        found = [g for g in given if isinstance(g, (Int, Truth))]
        return self._same_kind(found[0], node) if found and len(found) == len(given) else Other()

    def _inlined(self, name: str, given: Sequence[Value], call: ast.Call) -> Value:
        """The body of a helper in place of its call."""
        function = parsed(HELPERS[name].removeprefix("@triton.jit\n"))
        names = [a.arg for a in function.args.args]
        filled = dict(zip(names[len(names) - len(function.args.defaults) :], function.args.defaults, strict=True))
        own = {n: self.value(d) for n, d in filled.items()} | dict(zip(names, given, strict=False))
        own |= {k.arg: self.value(k.value) for k in call.keywords if k.arg}
        outer, self.env, self.result = self.env, own, Other()
        body = [s for s in function.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
        try:
            self.block(body)
        finally:
            self.env = outer
        return self.result

    def _method(self, node: ast.Call, function: ast.Attribute) -> Value:
        x = self.value(function.value)
        if function.attr == "to" and not node.keywords:
            return self._cast(x, node.args[0], node)
        return Other()

    def _cast(self, x: Value, dtype: ast.expr, node: ast.expr) -> Value:
        width = INTEGERS.get(dtype.attr if isinstance(dtype, ast.Attribute) else "", 0)
        if isinstance(x, Truth) and width > 1:
            made = self._datum("condition")
            (number,) = made.atoms
            self.world.bound_below(number, ONE, ZERO)
            self.world.bound_above(number, ONE, ONE)
            return Int(made, width, needs=x.needs)
        if isinstance(x, Other) and width > 1:  # a float that was rounded: as good as read from memory
            return Int(self._datum(ast.unparse(node)), width)
        if not isinstance(x, Int) or not width:
            return Other()
        if width == 64 or x.width == width:
            return replace(x, width=width, narrow=frozenset() if width == 64 else x.narrow)
        if width == 32 and not self._is_data(x.poly):
            need = Need(x.poly, frozenset(), self.facts, node.lineno, ast.unparse(node))
            return Int(x.poly, 32, needs=(*x.needs, need))
        return Truth() if width == 1 else Int(self._datum(ast.unparse(node)), width, needs=x.needs)

    def _tl_cast(self, node: ast.Call) -> Value:
        return self._cast(self.value(node.args[0]), node.args[1], node)

    def _tl_program_id(self, node: ast.Call) -> Value:
        if self.read.program is None:
            made = self.world.atom(
                "pid", lambda s, r: drawn_turn(int(at(self.programs, s)) - 1, r), 0, self.programs - 1
            )
            (self.read.program,) = made.atoms
            self.world.bound_above(self.read.program, ONE, Poly.of(2**31 - 2))
        return Int(Poly.atom(self.read.program), 32)

    def _tl_arange(self, node: ast.Call) -> Value:
        """Lanes: each call has its own, so that what is known of one dimension is not believed of another."""
        low, high = (self._int(a).poly for a in node.args)
        name = f"lane{len(self._lanes)}"
        made = self.world.atom(name, lambda s, r: drawn_turn(int(at(high, s)) - 1, r), None, high - 1, LANES)
        self._lanes[len(self._lanes),] = made
        (number,) = made.atoms
        self.world.bound_below(number, ONE, low)
        return Int(made, 32)

    def _tl_where(self, node: ast.Call) -> Value:
        test, a, b = (self.value(x) for x in node.args)
        if isinstance(a, Truth) and isinstance(b, Truth):
            return Truth()
        if not (isinstance(a, Int) and isinstance(b, Int)):
            return Other()
        truth = test if isinstance(test, Truth) else Truth()
        cases = (Case(a.poly, truth.true), Case(b.poly, truth.false))
        both = self._both(a, b)
        needs = tuple(dict.fromkeys((*both.needs, *truth.needs)))
        return replace(both, poly=self.world.choice(ast.unparse(node), cases), width=both.width or 32, needs=needs)

    def _tl_minimum(self, node: ast.Call) -> Value:
        a, b = (self.value(x) for x in node.args)
        if not (isinstance(a, Int) and isinstance(b, Int)):
            return self._same_kind(a, node, a, b)
        if self._is_data(a.poly) or self._is_data(b.poly):
            return replace(self._both(a, b), poly=self._extremum_of_data(node, a.poly, b.poly))
        kind = "min" if "min" in node.func.attr else "max"  # type: ignore[attr-defined]
        return replace(self._both(a, b), poly=self.world.extremum(kind, a.poly, b.poly))

    _tl_maximum = _tl_minimum

    def _extremum_of_data(self, node: ast.Call, a: Poly, b: Poly) -> Poly:
        sign = 1 if "min" in node.func.attr else -1  # type: ignore[attr-defined]
        return self.world.choice(ast.unparse(node), (Case(a, ((b - a) * sign,)), Case(b, ((a - b) * sign,))))

    def _tl_cdiv(self, node: ast.Call) -> Value:
        a, b = (self._int(x) for x in node.args)
        grown = self._checked(a.poly + b.poly - 1, a, b, node)
        if (found := self.world.ceiling(a.poly, b.poly)) is None:
            self.read.divisions.append((ast.unparse(node), node.lineno))
            return replace(grown, poly=self._datum("quotient"))
        return replace(grown, poly=found)

    def _tl_multiple_of(self, node: ast.Call) -> Value:
        value, factor = self._int(node.args[0]), self._int(node.args[1]).poly.number
        assert isinstance(factor, int)
        self.read.hints.append(Hint(value.poly, factor, node.lineno, ast.unparse(node)))
        return value

    def _tl_zeros(self, node: ast.Call) -> Value:
        """Integers of zero, or floats."""
        width = INTEGERS.get(node.args[1].attr, 0) if isinstance(node.args[1], ast.Attribute) else 0
        return Int(ZERO, width) if width > 1 else Other()

    def _tl_full(self, node: ast.Call) -> Value:
        width = INTEGERS.get(node.args[2].attr, 0) if isinstance(node.args[2], ast.Attribute) else 0
        given = self.value(node.args[1])
        return replace(given, width=width) if isinstance(given, Int) and width > 1 else Other()

    def _tl_broadcast_to(self, node: ast.Call) -> Value:
        return self.value(node.args[0])

    def _help_modulo(self, node: ast.Call) -> Value:
        """Python's remainder and quotient: with a positive divisor right for any sign."""
        return self._floored(node, 1)

    def _help_floor_quotient(self, node: ast.Call) -> Value:
        return self._floored(node, 0)

    def _floored(self, node: ast.Call, which: int) -> Value:
        a, b = (self.value(x) for x in node.args)
        if not (isinstance(a, Int) and isinstance(b, Int)):
            return self._same_kind(a, node, a, b)
        both = self._both(a, b)
        if (found := self.world.divided(a.poly, b.poly)) is not None and not self._is_data(a.poly):
            return replace(both, poly=found[which])
        return replace(both, poly=self._datum(ast.unparse(node)))

    def _help_rounded(self, node: ast.Call) -> Value:
        self.value(node.args[0])
        return Other()

    # ------------------------------------------------------------------ memory
    def _access(self, kind: Kind, node: ast.Call, given: Value, mask: ast.expr | None) -> Pointer:
        if not isinstance(given, Pointer):
            raise Unread(f"{ast.unparse(node)} is no access", node.lineno)
        truth = self.value(mask) if mask is not None else Truth()
        facts, needs = self.facts, given.needs
        if isinstance(truth, Truth):
            facts, needs = (*facts, *truth.true), (*needs, *truth.needs)
        needs = tuple(dict.fromkeys(needs))
        self._wanted(needs)
        stored = frozenset(names_in(node.args[1])) if kind == "store" else frozenset[str]()
        self.read.accesses.append(
            Access(kind, given.name, given.offset, facts, needs, self.tickets, node.lineno, ast.unparse(node), stored)
        )
        return given

    def _tl_load(self, node: ast.Call) -> Value:
        pointer = self._access("load", node, self.value(node.args[0]), _keyword(node, "mask"))
        return self._held(pointer.name)

    def _held(self, pointer: str) -> Value:
        """What memory holds: nothing is known of it but its dtype."""
        width = WIDTHS.get(self.dtypes[pointer], 0)
        if width == 1:
            return Truth()
        return Int(self._datum(pointer.removesuffix("_ptr")), width) if width else Other()

    def _tl_store(self, node: ast.Call) -> Value:
        self.value(node.args[1])
        self._access("store", node, self.value(node.args[0]), _keyword(node, "mask"))
        return Other()

    def _tl_atomic_add(self, node: ast.Call) -> Value:
        self.value(node.args[1])
        pointer = self._access("atomic", node, self.value(node.args[0]), _keyword(node, "mask"))
        return self._held(pointer.name)

    def _help_known(self, node: ast.Call) -> Value:
        return self._held(self._access("atomic", node, self.value(node.args[0]), None).name)

    def _help_last_to_arrive(self, node: ast.Call) -> Value:
        counter = self._access("atomic", node, self.value(node.args[0]), None)
        self._wanted(self._int(node.args[1]).needs)
        return Truth(ticket=Ticket(counter.name, counter.offset))


def _keyword(node: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in node.keywords if k.arg == name), None)


def _are_ints(values: Sequence[Value]) -> bool:
    return bool(values) and all(isinstance(v, Int) for v in values)


def _joined(a: Truth, b: Truth, operator: ast.operator) -> Truth:
    needs = tuple(dict.fromkeys((*a.needs, *b.needs)))
    if isinstance(operator, ast.BitAnd):
        return Truth(a.true + b.true, (), needs)
    return Truth((), a.false + b.false, needs) if isinstance(operator, ast.BitOr) else Truth(needs=needs)


def names_in(node: ast.expr) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _atoms_of(value: Value) -> set[int]:
    if isinstance(value, Truth):
        return {a for fact in (*value.true, *value.false) for a in fact.atoms}
    poly = value.poly if isinstance(value, Int) else value.offset if isinstance(value, Pointer) else ZERO
    return poly.atoms


def _assigned(body: Sequence[ast.stmt]) -> Iterator[str]:
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def parts_of(world: World, atom: int) -> set[int]:
    """The atoms that an atom was made of."""
    found: set[int] = set()
    for case in world.cases.get(atom, ("", ()))[1]:
        found |= case.value.atoms.union(*(f.atoms for f in case.facts))
    if (division := world.divisions.get(atom)) is not None:
        found |= division.x.atoms | division.d.atoms
    return found


def origins(world: World, poly: Poly) -> set[int]:
    """The atoms of a polynomial, and those that they were made of."""
    found: set[int] = set()
    todo = list(poly.atoms)
    while todo:
        if (atom := todo.pop()) not in found:
            found.add(atom)
            todo += parts_of(world, atom)
    return found
