"""Counts and places in 32 bits, where sizes are such that these hold them: to torch they are of int64.

    sum over k of cast(x[k] == top, i64)         ->   cast(sum over k of cast(x[k] == top, i32), i64)
    amin over k of where(x[k] == top, k, n)      ->   cast(amin over k of where(x[k] == top, cast(k, i32), n), i64)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import sympy

from ..ir.types import Size, product
from .emit.names import MOST
from .program.axes import Sink, Term, terms_below
from .program.sizes import Hints, evaluate_size, tidy
from .program.terms import TermTable

SHORT = ("b1", "i8", "i16", "i32", "u8", "u16")


def in_short_integers(terms: TermTable, sinks: Sequence[Sink], hints: Hints) -> tuple[list[Sink], list[Size]]:
    """The sinks, and the sizes that must not be larger than MOST for them."""
    short = _Short(terms, hints)
    new: dict[Term, Term] = {}
    for term in terms_below(t for s in sinks for t in s.terms):
        made = terms.again(term, tuple(new[a] for a in term.args))
        new[term] = short.reduced(made) or made
    is_changed = any(old is not made for old, made in new.items())
    return ([s.of_terms(new) for s in sinks] if is_changed else list(sinks)), list(short.sizes)


@dataclass
class _Short:
    terms: TermTable
    hints: Hints
    sizes: dict[Size, None] = field(default_factory=dict)

    def reduced(self, total: Term) -> Term | None:
        """A reduction to 64 bits, in 32; None where its values may need more."""
        if total.dtype != "i64" or total.op not in ("sum", "amax", "amin"):
            return None
        known = dict(self.sizes)
        arg = self._truth(total) if total.op == "sum" else self._place(total.args[0])
        if arg is None:
            self.sizes = known
            return None
        made = self.terms.make(total.op, arg, dtype="i32", param=total.param, node=total.node)
        return self.terms.cast(made, "i64", total.node)

    def _truth(self, total: Term) -> Term | None:
        """What a sum counts, of no more elements than there are numbers."""
        arg = total.args[0].args[0] if total.args[0].op == "cast" else total.args[0]
        is_count = arg.dtype == "b1" and self._holds(product(a.size for a in total.param))
        return self.terms.cast(arg, "i32", arg.node) if is_count else None

    def _place(self, term: Term) -> Term | None:
        """The same in 32 bits."""
        if term.op == "where":
            chosen = [self._place(a) for a in term.args[1:]]
            if None in chosen:
                return None
            return self.terms.make("where", term.args[0], *filter(None, chosen), dtype="i32", node=term.node)
        if term.op == "const":
            return self.terms.const(term.param, "i32") if self._holds(term.param) else None
        if term.op == "index":
            bounds = term.param.bounds()
            fits = bounds is not None and all(map(self._holds, bounds))
        else:
            fits = term.op == "cast" and term.args[0].dtype in SHORT
        return self.terms.cast(term.args[0] if term.op == "cast" else term, "i32", term.node) if fits else None

    def _holds(self, number: Size) -> bool:
        """True of a number that 32 bits hold now; of one made of sizes they have to."""
        number = tidy(number)
        if isinstance(number, sympy.Basic) and not number.is_integer:
            return False
        if abs(evaluate_size(number, self.hints)) > MOST:
            return False
        if not isinstance(number, int):
            self.sizes[number] = None
        return True
