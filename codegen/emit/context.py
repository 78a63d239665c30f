"""The part of a kernel under construction that all collaborators share: its plan, names, sizes and open scopes."""

from __future__ import annotations

from ...ir.types import LOW_FLOATS
from ..kernel import Target
from ..program.axes import Program, Sink, Term, terms_below
from ..program.sizes import Hints
from ..schedule.schedule import Schedule
from .mathematics import EXACT, TL, register_dtype
from .names import LABELS, Names, SizeArguments, identifier
from .prelude import HELPERS
from .statements import Expr, Scope, call, literal, name

PRECISION, EXACTLY = "PRECISION", "ieee"
"""The constant of kernels that multiply float32, and its value where torch's setting allows no TF32."""
FINISH = 100
"""The level of what the last program computes; 0 is the kernel, 1 the walk, 2 and up a pass over chunks."""
PROGRAM_ID = Expr("tl.program_id(0)", names=frozenset(["tl"]))
VARIABLES = ("pid", "part", "strip", "group", "members", "k", "item", "team", "own", "distance", "piece")
"""Names that the text gives to the same things in all kernels."""


class Context:
    """One kernel under construction. `top` is its outermost scope, `body` the one that all its loops stand in."""

    def __init__(self, program: Program, plan: Schedule, target: Target, hints: Hints, label: str) -> None:
        self.program, self.plan, self.target, self.hints, self.label = program, plan, target, hints, label
        self.names = Names([*HELPERS, *LABELS, label, *VARIABLES])
        self.sizes = SizeArguments(program, hints, self.names)
        self.top = self.body = Scope(0)
        self._quoted: set[str] = set()

    def number_program(self) -> Expr:
        """The number of the program, under its name."""
        return self.top.define("pid", PROGRAM_ID)

    def let(self, scope: Scope, wish: str, value: Expr) -> Expr:
        """The value under a name of its own, unless it is a name."""
        if value.text.isidentifier():
            return value
        return scope.define(self.names.fresh(wish, level=scope.level), value)

    def precision(self, dtype: str) -> dict[str, Expr | str]:
        """The precision of float32 operands; what torch's setting allows is looked up at each launch."""
        if dtype != "f32":
            return {}
        self.sizes.constants[PRECISION] = EXACTLY
        return {"input_precision": name(PRECISION)}

    def comment(self, term: Term | Sink) -> str:
        """`file:line  text` of the user's source, the first time that a line is met."""
        origin = term.node.origin if term.node is not None else None
        is_load = isinstance(term, Term) and term.op == "load"
        if origin is None or not origin.where or origin.where in self._quoted or is_load:
            return ""
        self._quoted.add(origin.where)
        file_and_line = origin.where.rsplit("/", 1)[-1].rsplit("\\", 1)[-1]
        return f"{file_and_line}  {' '.join((origin.line or '').split())}".strip()

    def needs_rounding(self, term: Term) -> bool:
        """True where a low float's operation may leave more digits in float32 than its dtype has."""
        if term.op == "cast":
            return not (term.args[0].dtype == "b1" or term.args[0].dtype == term.dtype)
        return not self.target.fast and term.op not in EXACT

    def round_reduction(self, term: Term, value: Expr) -> Expr:
        """A complete reduction as its dtype can hold it."""
        if term.dtype in LOW_FLOATS and self.needs_rounding(term):
            return call("rounded", value, literal(TL[term.dtype]))
        return value

    def name_of_reduction(self, term: Term) -> str:
        """The name of a reduction: the user's own, or one for its operation."""
        return identifier(name_of(term)) or default_name(term)

    def name_of_final(self, term: Term) -> str:
        """The name of a final reduction: the user's own, or that of the first output that depends on it."""
        outputs = [s for s in self.program.sinks if term in terms_below(s.terms)]
        return identifier(name_of(term) or (name_of(outputs[0]) if outputs else None)) or term.op


def name_of(item: Term | Sink) -> str | None:
    """The user's name for a value or an output."""
    return item.node.origin.name if item.node is not None else None


DEFAULT_NAMES = {
    "load": "x", "index": "i", "amax": "top", "amin": "low", "sum": "total", "cumsum_reverse": "cumsum",
}  # fmt: skip


def default_name(term: Term) -> str:
    """The name of a value that has none in the user's source; of one in memory, what it was when it was made."""
    is_made = term.op == "load" and term.node is not None and term.node.prim in DEFAULT_NAMES
    return DEFAULT_NAMES.get(term.node.prim if is_made and term.node else term.op, f"{term.op}_v")


def as_tensor(term: Term, value: Expr) -> Expr:
    """A value that no tensor stands beside: constants become tensors."""
    is_literal = term.op == "const" and not value.names
    return call("tl.full", literal("[]"), value, literal(TL[register_dtype(term.dtype)])) if is_literal else value
