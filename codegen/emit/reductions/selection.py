"""The points of an axis at which a condition holds, one after the other: the turns of a sum over those alone.

    for b_at in tl.range(0, B, BLOCK_B):                     the condition, so many lanes at a time
        chosen = (tl.load(index + first_b + b) == e) & inside
        for turn in tl.range(0, tl.sum(chosen) * parts):     loads of later turns are on their way
            at = where(turn % parts == 0, the next lane that is chosen, at)
"""

from __future__ import annotations

from ...program.axes import Axis, Term
from ...program.sizes import Hints, evaluate_size, power_of_two
from ..access.coordinates import Coord, Coordinates
from ..access.tile_axes import TileAxes
from ..context import Context
from ..statements import Accumulate, Expr, For, Scope, Statement, binary, call, literal, method, name
from ..values import Values

MOST_LANES, LEAST_LANES = 1024, 16
"""Points whose condition is asked at a time."""


def lanes_of(axis: Axis, hints: Hints) -> int:
    """As many as there are, or the most."""
    return min(MOST_LANES, max(LEAST_LANES, power_of_two(evaluate_size(axis.size, hints))))


class Selection:
    """A walk over the points of `axis` where `chosen` is true. `scope`: that of the lanes that are asked together."""

    def __init__(self, context: Context, tile: TileAxes, coords: Coordinates, values: Values) -> None:
        self.context, self.tile, self.coords, self.values = context, tile, coords, values
        self.scope = Scope(1, context.top)

    def ask(self, axis: Axis, chosen: Term) -> None:
        """The condition in its lanes, none of which has had its turn."""
        self.axis, scope, fresh = axis, self.scope, self.context.names.fresh
        self.variable = fresh(f"{axis.name}_at")
        first = call("tl.cast", name(self.variable), literal("tl.int64"))
        self.first = scope.define(fresh(f"first_{axis.name}"), first)
        with self.tile.replaced_by(axis, lanes_of(axis, self.context.hints)):
            self.coords.set_lanes(axis, self.first, scope, 1)
            self.block, asked = self.tile.block(axis), self.coords[axis]
            holds = self.values.value(chosen, scope)
        assert asked.lane is not None
        self.lane = asked.lane
        self.chosen = self.context.let(scope, "chosen", binary("&", holds, asked.mask) if asked.mask else holds)
        self.at = scope.define(fresh("at_lane"), literal(-1))

    def take_turn(self, part: Expr, turn: Scope) -> None:
        """The coordinate of the point of a turn: the next one, where a part of it is the first."""
        ahead = binary("&", self.chosen, binary(">", self.lane, self.at))
        following = call("tl.min", call("tl.where", ahead, self.lane, self.block), literal(0))
        is_first = part.text == "0"
        now = following if is_first else call("tl.where", binary("==", part, literal(0)), following, self.at)
        turn.body.append(Accumulate(self.at.text, "=", now))
        last = binary("-", self.context.sizes.text(self.axis.size), literal(1))
        place = call("tl.maximum", call("tl.minimum", binary("+", self.first, self.at), last), literal(0))
        self.coords[self.axis] = Coord(self.context.let(turn, "point", place), None, None, turn.level)

    def loops(self, parts: Expr, turn: str, body: list[Statement], **options: Expr) -> For:
        """The loop over all points, each of which takes so many parts."""
        count = call("tl.sum", method(self.chosen, "to(tl.int32)"), literal(0))
        # what memory decides has bounds that the proofs can see
        count = call("tl.maximum", call("tl.minimum", count, self.block), literal(0))
        turns = self.context.let(self.scope, "turns", binary("*", count, parts))
        self.scope.body.append(For(turn, call("tl.range", literal(0), turns, **options), body))
        size = self.context.sizes.text(self.axis.size)
        self.context.sizes.require_countable(self.axis.size)
        return For(self.variable, call("tl.range", literal(0), size, self.block), self.scope.body)
