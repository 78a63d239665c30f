"""Terms to expressions, on demand: each is computed once, in the scope of its level, and named where that pays.

A value is computed inside the loops that change it, outside all others.
"""

from __future__ import annotations

from collections.abc import Iterable

import sympy

from ...ir.errors import Unfusible
from ...ir.prims import COMPARE
from ...ir.types import LOW_FLOATS, Size
from ..program.axes import REDUCTIONS, SCANS, Program, Sink, Term
from ..program.sizes import tidy
from .access.addresses import Addresses, Indices
from .access.buffers import Buffers
from .access.index_checks import IndexChecks
from .access.levels import Levels
from .access.loads import Loads
from .access.strided_pairs import StridedPairs
from .access.tile_axes import TileAxes
from .context import Context, as_tensor, default_name, name_of
from .mathematics import (
    FLOATING,
    NARROW,
    TL,
    cast,
    divided_by_number,
    exp_below,
    fast_rules,
    first_uniform,
    is_whole_number,
    multiplied_by_reciprocal,
    narrow,
    number,
    of_sizes,
    register_dtype,
    round_to,
    rules,
    rules_for,
    times_reciprocal,
    widen,
)
from .reductions import shares
from .reductions.folding import Folding
from .statements import Expr, Scope, binary, call, literal, method, unary

LONG = 72
"""A single use is written inline up to this many columns."""
LONG_NAMED = 24
"""The same for a value that the user gave a name."""
CONVERTS_F8 = 89
"""The first of NVIDIA's architectures that converts eight-bit floats."""


class Values:
    """`accumulated`: terms that a loop of its own has computed already, by the names of their accumulators.

    `uses`: how often a term is read; `casts`: the dtype of the casts that are all that read a term; `sums`: those that
    are folded together; `silenced`: what lanes beyond the end of a stream hold, behind which mask.
    """

    def __init__(
        self,
        context: Context,
        buffers: Buffers,
        tile: TileAxes,
        levels: Levels,
        addresses: Addresses,
        loads: Loads,
        checks: IndexChecks,
        pairs: StridedPairs,
        folding: Folding,
    ) -> None:
        self.context, self.buffers, self.tile, self.levels = context, buffers, tile, levels
        self.addresses, self.loads, self.checks, self.pairs, self.folding = addresses, loads, checks, pairs, folding
        self.rules = rules_for(context.target.kind, context.target.fast, bool(context.plan.packed))
        self.accumulated: dict[Term, Expr] = {}
        self.silenced: dict[Term, tuple[Expr, str]] = {}
        self.uses = count_uses(context.program)
        self.sums = folding.folded_together()
        self.casts = casts_of_all_users(context.program)
        self.powers = shares.powers_beside_one(context.program)

    # ------------------------------------------------------------------ on demand
    def value(self, term: Term, scope: Scope) -> Expr:
        """The term as an expression, named in the scope of its level where it is used again, is long, or has a name."""
        if term.op == "const":
            return self._constant(term)
        if (computed := scope.find(term)) is not None:
            return computed
        # Where no loop around changes it, it is computed once, before the loops
        home = scope.home(self.levels.of(term))
        if term in self.context.plan.packed:
            return widen(self.read_row(term, home), term.dtype)
        value = self.compute(term, home)
        # Registers hold more digits than the dtype has: eager rounds after each operation
        if term.dtype in NARROW and self.context.needs_rounding(term):
            value = self.rounded(term, value)
        if term in self.silenced:
            mask, nothing = self.silenced[term]
            value = call("tl.where", mask, value, literal(nothing))
        return self._named(term, value, home, scope)

    def compute(self, term: Term, scope: Scope) -> Expr:
        """The term computed out of its arguments, neither rounded nor named."""
        if term in self.accumulated:
            return self.accumulated[term]
        if term.op == "load":
            return loaded(self, term, scope)
        if term.op == "index":
            return self.addresses.number(term.param)
        if term.op in REDUCTIONS:
            return reduced(self, term, scope)
        if term.op == "check_index":
            return self._checked_index(term, scope)
        if (drawn := random_numbers(self, term, scope)) is not None:
            return drawn
        args = [self.value(a, scope) for a in term.args]
        if term.op in SCANS:
            return self.folding.scan(term, args[0], scope)
        if term.op == "spread":
            return self.tile.broadcast(as_tensor(term.args[0], args[0]), term.axes)
        return self._elementwise(term, args, scope)

    def rounded(self, term: Term, value: Expr) -> Expr:
        """The value as its low dtype holds it."""
        return round_to(value, term.dtype)

    def read(self, term: Term, scope: Scope) -> Expr:
        """The content of memory that a load reads, in the dtype that it has there."""
        coefficients = term.param.indirect
        self.loads.count_pass(term, scope)
        indices = self.indices(zip(term.args, coefficients, strict=False), scope)
        guards = [self.value(g, scope) for g in term.args[len(coefficients) :]]
        return self.loads.read(term, indices, guards, scope)

    def indices(self, terms: Iterable[tuple[Term, Size]], scope: Scope) -> Indices:
        """The values that an address depends on."""
        return [(self.value(term, scope), coefficient, term) for term, coefficient in terms]

    def _checked_index(self, term: Term, scope: Scope) -> Expr:
        """The index, behind an assertion that it is in range."""
        guards = [self.value(g, scope) for g in term.args[2:]]
        index = as_tensor(term.args[0], self.value(term.args[0], scope))
        return self.checks.check(term, index, guards, scope)

    def argument_of_reduction(self, term: Term, scope: Scope) -> Expr:
        """The argument of a reduction, neutral in the lanes outside."""
        known = scope.find(("neutral", term.args[0], self.folding.nothing(term)))
        return known or self.folding.neutral(term, self.value(term.args[0], scope))

    def value_to_store(self, sink: Sink, scope: Scope) -> Expr:
        """The value of a sink in the dtype of the memory; the store itself rounds a value computed for it alone."""
        term, is_low = sink.value, sink.dtype in NARROW
        # A value that only this store reads is not rounded twice
        is_free = self.uses.get(term, 0) <= 1 and scope.find(term) is None
        is_alone = is_free and scope.home(self.levels.of(term)) is scope and term.op not in ("load", "const")
        if is_low and term.dtype == sink.dtype and is_alone and self.context.needs_rounding(term):
            value = self.compute(term, scope)
        else:
            value = as_tensor(term, self.value(term, scope))
        return narrow(value, sink.dtype) if is_low else cast(value, term.dtype, sink.dtype)

    # ------------------------------------------------------------------ names
    def _named(self, term: Term, value: Expr, home: Scope, scope: Scope) -> Expr:
        """The value under a name of its own, or inline in its only use."""
        is_name = value.text.isidentifier()
        if is_name and not (term.op == "load" and value.text not in self.buffers.labels.values()):
            home.memo[term] = value
            return value
        user = name_of(term)
        if term in self.accumulated:
            home.memo[term] = self.context.let(home, user or "product", value)
            return home.memo[term]
        # Loads, reductions and random numbers have names even in their only use: a reader looks for these lines
        is_plain = term.op not in ("load", *REDUCTIONS, *SCANS, "random")
        is_inline = is_plain and self.uses.get(term, 0) <= 1 and home is scope
        if is_inline and len(value.text) <= (LONG_NAMED if user else LONG):
            return value
        label = self.context.names.fresh(user, self.default_name(term), home.level)
        home.memo[term] = home.define(label, value, self.context.comment(term))
        return home.memo[term]

    def default_name(self, term: Term) -> str:
        """The name of a value that has none in the user's source."""
        return default_name(term)

    def read_row(self, term: Term, home: Scope) -> Expr:
        """A row as it is in memory."""
        if (tile := home.find(("tile", term))) is None:
            label = self.context.names.fresh(name_of(term), default_name(term), home.level)
            tile = home.memo["tile", term] = home.define(label, self.read(term, home))
        return tile

    # ------------------------------------------------------------------ constants and operations
    def _constant(self, term: Term) -> Expr:
        value = term.param
        if not isinstance(value, sympy.Basic):
            return literal(number(value, term.dtype))
        if value.is_number:
            return literal(number(int(value) if value.is_integer else float(value), term.dtype))
        value = tidy(value)
        is_argument = isinstance(value, int) or is_whole_number(value, term.dtype)
        text = self.context.sizes.text(value) if is_argument else self._of_sizes(value, term)
        text = call("tl.cast", text, literal(TL[register_dtype(term.dtype)]))
        return round_to(text, term.dtype) if term.dtype in NARROW else text

    def _of_sizes(self, value: sympy.Expr, term: Term) -> Expr:
        try:
            return of_sizes(value, lambda s: self.context.sizes.text(s, str(s)))
        except ValueError as error:
            raise Unfusible(term.node or self.context.program.sinks[0].node, str(error)) from error

    def _elementwise(self, term: Term, args: list[Expr], scope: Scope) -> Expr:
        # At least one operand has to be a tensor: of literals alone Triton makes no tensor
        first = 1 if term.op == "where" else 0
        if all(a.op == "const" for a in term.args[first:]):
            args[first] = as_tensor(term.args[first], args[first])
        if term.op == "where":
            args[0] = as_tensor(term.args[0], args[0])
        if term.op == "cast":
            return cast(args[0], term.args[0].dtype, term.dtype)
        if term.op in COMPARE and term.args[0].dtype == "i64":
            args = _as_lanes(self.addresses, term, args)
        if term.op == "div" and (quotient := quotient_by_number(self, term, args[0], scope)) is not None:
            return quotient
        if self._has_few_digits(term):
            return fast_rules[term.op](term.dtype, *args)
        return self._of_share(term, args, scope) or self.rules[term.op](term.args[0].dtype, *args)

    def _has_few_digits(self, term: Term) -> bool:
        """A quotient of two bfloat16 numbers that is rounded to bfloat16: see docs/numerics.md.

        It is nowhere within 2 ** -18 of the middle between two such numbers, and the hardware's is nearer than that.
        """
        is_quotient = term.op in ("div", "reciprocal") and self.casts.get(term, term.dtype) == "bf16"
        return is_quotient and self.context.target.kind == "cuda" and {*map(digits_of, term.args)} == {"bf16"}

    def _of_share(self, term: Term, args: list[Expr], scope: Scope) -> Expr | None:
        """A share of a row, or the power that it is of, where fewer instructions have the same digits."""
        target = self.context.target
        if target.kind not in shares.CONTRACTS or self.rules["div"] is not rules["div"]:
            return None
        if term in self.powers:
            return exp_below(target.kind, target.fast, term.dtype, args[0])
        return call("share", *args, reciprocal_of(self, term.args[1], scope)) if shares.is_share(term) else None


def loaded(values: Values, term: Term, scope: Scope) -> Expr:
    """What a load reads: of a tile that is there already, one of a pair, or out of memory."""
    if (row := scope.memo.get(("tile", term))) is not None:
        return widen(row, term.dtype)
    paired = values.pairs.load(term, scope)
    return widened(values, term, values.read(term, scope), scope) if paired is None else paired


def reduced(values: Values, term: Term, scope: Scope) -> Expr:
    """A reduction of the lanes of a tile; the first of sums that are folded together emits them all."""
    group = values.sums.get(term, ())
    if len({values.levels.of(t) for t in group}) != 1:
        return values.folding.fold(term, values.argument_of_reduction(term, scope))
    if (sums := scope.find(("sums", group))) is None:
        arguments = [values.argument_of_reduction(t, scope) for t in group]
        sums = values.context.let(scope, "sums", values.folding.fold_together(group, arguments))
        scope.memo["sums", group] = sums
    return Expr(f"{sums}[{group.index(term)}]", names=sums.names)


def _as_lanes(addresses: Addresses, term: Term, args: list[Expr]) -> list[Expr]:
    """A place compared with a number that is the same for all lanes: lanes compared, of 32 bits."""
    for mine, other in ((0, 1), (1, 0)):
        place, number = term.args[mine], term.args[other]
        if place.op == "index" and number.op != "const":
            pair = addresses.lanes_against(place.param, args[other], number.axes)
            if pair is not None:
                return list(pair) if mine == 0 else list(pair[::-1])
    return args


def quotient_by_number(values: Values, term: Term, dividend: Expr, scope: Scope) -> Expr | None:
    """A quotient of floats by a number as a product; None where eager on the device divides.

    On GPUs eager multiplies by the reciprocal; on CPUs, where the interpreter runs, it divides, and a product that
    stands for a quotient has its bits.
    """
    divisor, target = term.args[1], values.context.target
    if divisor.op != "const" or term.dtype not in FLOATING or not dividend.names:
        return None
    is_size = isinstance(divisor.param, sympy.Basic) and not divisor.param.is_number
    if target.kind != "interpret":
        if is_size:
            return binary("*", dividend, reciprocal_of(values, divisor, scope))
        return times_reciprocal(dividend, float(divisor.param), term.dtype)
    if not isinstance(divisor.param, (int, float)):
        return None
    if target.fast:
        return multiplied_by_reciprocal(dividend, divisor.param, term.dtype)
    return divided_by_number(dividend, divisor.param, digits_of(term.args[0]), values.casts.get(term, term.dtype))


def reciprocal_of(values: Values, divisor: Term, scope: Scope) -> Expr:
    """One over a number that is a divisor many times, once: of one made of sizes, once per program."""
    home = scope.home(values.levels.of(divisor))
    if (reciprocal := home.find(("reciprocal", divisor))) is None:
        value = values.rules["reciprocal"](divisor.dtype, values.value(divisor, home))
        reciprocal = home.memo["reciprocal", divisor] = values.context.let(home, "reciprocal", value)
    return reciprocal


def widened(values: Values, term: Term, bits: Expr, scope: Scope) -> Expr:
    """What a load reads as registers hold it.

    bfloat16 keeps its `.to` where it is computed with: the compiler takes two at once, if it sees what they are. Newer
    processors have a conversion of two eight-bit floats.
    """
    target = values.context.target
    if term.dtype == "f8e4m3fn" and target.kind == "cuda" and int(target.arch) >= CONVERTS_F8:
        return call("from_f8e4m3fn", bits, literal("True"))
    is_plain = values.casts.get(term) != "f32" or not values.tile.lanes(term.axes)
    if term.dtype != "bf16" or is_plain or values.context.target.kind != "cuda":
        return widen(bits, term.dtype)
    return call("pairs_from_bf16" if scope.level else "from_bf16", bits)


# ------------------------------------------------------------------ random numbers
def random_numbers(values: Values, term: Term, scope: Scope) -> Expr | None:
    """uniform(random_word(seed, place)), normal(seed, place), or a comparison; None for any other term."""
    if term.op != "random":
        return uniform_compared(values, term, scope)
    if term.param == "normal":
        numbers = _drawn("normal", values, term, scope)
    else:
        numbers = call("uniform", _drawn("random_word", values, term, scope))
    return method(numbers, "to(tl.float64)") if term.dtype == "f64" else numbers


def uniform_compared(values: Values, term: Term, scope: Scope) -> Expr | None:
    """uniform(word) >= 0.1  ->  uniform_from(word, 214748376), if nothing else reads the numbers."""
    if term.op not in ("ge", "gt", "lt", "le") or term.args[0].op != "random" or term.args[1].op != "const":
        return None
    numbers, limit = term.args[0], term.args[1].param
    is_alone = values.uses.get(numbers, 0) == 1 and numbers.param == "uniform" and numbers.dtype == "f32"
    if not is_alone or not isinstance(limit, (int, float)) or not 0 < limit < 1:
        return None
    word = _drawn("random_word", values, numbers, scope)
    is_above = call("uniform_from", word, literal(first_uniform(term.op, limit)))
    return is_above if term.op in ("ge", "gt") else unary("~", is_above)


def _drawn(function: str, values: Values, term: Term, scope: Scope) -> Expr:
    seed, place = term.args[:2]
    is_index = place.op == "index" and scope.find(place) is None
    lanes = values.addresses.lanes_in_eights(place.param) if is_index else None
    places = lanes or (as_tensor(place, values.value(place, scope)),)
    ptx = {"ptx": literal("True")} if values.context.target.kind == "cuda" else {}
    return call(function, as_tensor(seed, values.value(seed, scope)), *places, **ptx)


# ------------------------------------------------------------------ what is known of terms
def casts_of_all_users(program: Program) -> dict[Term, str]:
    """The dtypes of values that nothing reads but casts to them."""
    reads = set(program.roots)
    casts: dict[Term, set[str]] = {}
    for term in program.terms:
        for arg in term.args:
            casts.setdefault(arg, set()).add(term.dtype if term.op == "cast" else "")
    return {t: dtypes.pop() for t, dtypes in casts.items() if t not in reads and len(dtypes) == 1 and "" not in dtypes}


def digits_of(term: Term) -> str:
    """The narrowest dtype that a value is known to fit: that of what it was cast from."""
    while term.op in ("neg", "abs", "spread") or (term.op == "cast" and term.args[0].dtype in LOW_FLOATS):
        term = term.args[0]
    return term.dtype


def count_uses(program: Program) -> dict[Term, int]:
    """The number of terms and outputs that use each term."""
    uses: dict[Term, int] = {}
    users = (*(t.args for t in program.terms), program.roots)
    for term in (t for terms in users for t in terms):
        uses[term] = uses.get(term, 0) + 1
    return uses
