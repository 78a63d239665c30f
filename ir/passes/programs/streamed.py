"""The residuals of a program whose kernels stream products: nothing virtual is saved, and rows are.

    saved: q, k, v, p [n, m]   ->   saved: q, k, v, max [n], sum [n]; backward makes p of them again

Where kernels stream them (`passes/streaming`), a virtual value costs little to make again, product and all, and much to
save. What forward sums it to is handed over where backward has a use for it: rows that backward would sum again, and
products that stand for sums of its own (`exchange`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ...graph import Value
from ...program import Program
from ...switches import is_on
from ...types import LOW_FLOATS
from ..cost import Hints
from ..virtual import large_values, sums_of, virtual_values
from .handed_rows import only_divides
from .recompute import Choice, cheapest, hidden_values, made_in_forward, rebased, saved_by_user, with_choice


@dataclass(frozen=True)
class Streamed:
    """Program -> the same program without virtual residuals; itself, where that changes nothing.

    limit: bytes from which on a product counts as one that is made in slabs, though no kernel would stream it. pairs:
    sums over pairs count as products.
    """

    hints: Hints = field(default_factory=dict, hash=False)
    limit: int | None = None
    pairs: bool = False

    def __call__(self, program: Program) -> Program:
        virtual = virtual_values(program.forward, self.hints, self.pairs)
        if self.limit is not None:
            virtual |= large_values(program.forward, self.hints, self.limit)
        if not virtual or not program.backward:
            return program
        captured, users = hidden_values(program), saved_by_user(program)
        saved = cheapest(program, self.hints, virtual)
        sums = sums_of(program.forward.order(), virtual)
        rows = _rows(program, [v for v in sums if v.prim != "dot"], users)
        saved = _with(saved, rows, users)
        products = [_as_saved(v, users) for v in sums if v.prim == "dot" and v.id not in virtual]
        brackets = _brackets(program, saved, rows, products, users) if is_on("exchange") else []
        handed = _with(saved, brackets, users)
        exact = _low_rows(program, handed, virtual)
        choice = Choice(program, tuple(handed), tuple(brackets), tuple(rows), tuple(exact))
        choice = replace(choice, inverted=tuple(self._inverted(choice)))
        return with_choice(program, choice) if set(handed) != set(captured) or brackets or exact else program

    def _inverted(self, choice: Choice) -> list[Value]:
        """The rows that every backward only divides tiles by."""
        rows = [v for v in choice.saved if choice.type_of(v).dtype == "f32" and v.prim != "dot"]
        for backward in choice.captured.backward.values():
            graph, _ = rebased(choice, backward)
            tiles = virtual_values(graph, self.hints, self.pairs)
            rows = [v for v in rows if only_divides(graph.inputs[choice.place_of(v)], tiles)]
        return rows


def _low_rows(program: Program, saved: Sequence[Value], virtual: frozenset[int]) -> list[Value]:
    """Those in a low float that are made of what virtual values sum to, but are no products."""
    made = set(virtual)
    for value in program.forward.order():
        made |= {value.id} if value.prim != "dot" and any(a.id in made for a in value.args) else set()
    return [v for v in saved if v.id in made and v.id not in virtual and v.dtype in LOW_FLOATS]


def _with(saved: Sequence[Value], more: Iterable[Value], users: set[int]) -> list[Value]:
    """These values besides, but for what the user saved."""
    return list(dict.fromkeys([*saved, *(v for v in more if v.id not in users)]))


def _rows(program: Program, sums: Sequence[Value], users: set[int]) -> list[Value]:
    """The sums of forward that a backward computes again."""
    again = {v for b in program.backward.values() for v in made_in_forward(program, b).values()}
    return [v for v in sums if v in again and v.id not in users]


def _brackets(
    program: Program, saved: Sequence[Value], rows: Sequence[Value], products: Sequence[Value], users: set[int]
) -> list[Value]:
    """The products that a backward reads in the place of sums of its own, if it has them."""
    choice = Choice(program, tuple(_with(saved, products, users)), tuple(products), tuple(rows))
    found = [rebased(choice, b)[1] for b in program.backward.values() if products]
    return list(dict.fromkeys(v for used in found for v in used))


def _as_saved(product: Value, users: set[int]) -> Value:
    """The product, or the user's residual that is the same in another shape."""
    views = [u for u in product.users if u.prim == "reshape" and u.id in users]
    return views[0] if views else product
