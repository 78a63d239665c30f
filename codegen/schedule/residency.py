"""Residency of a row between the phases that read it: whole in registers, packed there, or read again in chunks.

Phase of a value: how many reductions inside the program lie below it. A row in chunks is read once per phase.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...ir.switches import is_on
from ...ir.types import ITEMSIZE, LOW_FLOATS
from ..program.axes import REDUCTIONS, SCANS, Axis, Materialize, Term
from ..program.sizes import power_of_two
from .roles import AxisRoles, separate
from .separation.online import OnlineSum, online_sums
from .workload import Workload, nodes_of

CROWDED = ((32768, 2), (16384, 4))
"""Lanes of a row held whole, and the most reductions that leave them in registers; with more it goes in chunks."""
PADDED = 1.25
"""Lanes of a row over its columns, beyond which a wide row held whole is more waste than its second read."""
LIGHT = frozenset({
    "const", "cast", "spread", "add", "sub", "mul", "div", "reciprocal", "neg", "abs", "max", "min", "sqrt", "rsqrt",
    "exp", "sigmoid", "where", "eq", "ne", "lt", "le", "gt", "ge",
})  # fmt: skip
"""Operations that take few registers for one element: rows may stay packed beside them."""
DIVISIONS = frozenset({"div", "reciprocal", "sigmoid"})
STREAMS = 2
"""The most rows that stay packed side by side."""
PASSING = 1.5
"""Bytes of packed rows and of the weights beside them, of those of packed rows alone."""


@dataclass(frozen=True)
class Residency:
    """`shared`: strips of the row are programs of their own. `packed`: loads that stay 16 bits wide between phases.

    `online`: sums that ride along in the pass of an extreme. `direct`: final sums with a partial sum per item, and the
    row axes that they keep.
    """

    chunked: bool = False
    shared: bool = False
    packed: frozenset[Term] = frozenset()
    online: dict[Term, OnlineSum] = field(default_factory=dict)
    direct: dict[Term, tuple[Axis, ...]] = field(default_factory=dict)


def choose_residency(w: Workload, roles: AxisRoles) -> Residency:
    """The first that is possible, from the fewest reads on."""
    if not roles.row or _fits(w, roles):
        return Residency()
    if packed := _packed_loads(w, roles):
        return Residency(packed=packed)
    shared = _is_shareable(w, roles)
    direct = {} if shared else _direct_sums(w, roles)
    online = online_sums(roles.inner, roles.row) if is_on("online") else {}
    return Residency(chunked=True, shared=shared, online=online, direct=direct)


def is_hoisted(w: Workload, roles: AxisRoles, lanes: int) -> bool:
    """Rows that no item changes (weights) stay in registers; else every item reads them again, from L2."""
    copies = len(w.row_loads(roles.row)) + len(roles.accumulators)
    return not roles.row or (lanes * copies <= w.budget.resident and is_on("hoist"))


def is_read_lightly(w: Workload, roles: AxisRoles, residency: Residency) -> bool:
    """Of a row in chunks a maximum and its sum are all that is kept, in one pass, and little is computed on the way."""
    row = set(roles.row)
    along = [t for t in w.program.terms if t.axes & row and t.op not in ("load", *REDUCTIONS)]
    return bool(residency.online) and passes_over(w, row, residency.online) == 1 and all(t.op in LIGHT for t in along)


# ------------------------------------------------------------------ phases
def phases_of(w: Workload, inner: Iterable[Term], online: Mapping[Term, OnlineSum]) -> dict[Term, int]:
    inner = set(inner)
    phase: dict[Term, int] = {}
    for term in w.program.terms:
        phase[term] = max((phase[a] for a in term.args), default=0) + (term in inner)
        if term in online:
            phase[term] = phase[online[term].top]
    return phase


def passes_over(w: Workload, row: Iterable[Axis], online: Mapping[Term, OnlineSum]) -> int:
    """The times that a chunked row is read: once per phase in which something walks it."""
    axes, phase = set(row), phases_of(w, w.reductions, online)
    walked = {phase[r.args[0]] for r in w.reductions if r.args[0].axes & axes and r not in online}
    return len(walked | {max(phase[t] for t in s.terms) for s in w.program.sinks if set(s.axes) & axes})


# ------------------------------------------------------------------ whole in registers
def _fits(w: Workload, roles: AxisRoles) -> bool:
    row = roles.row
    if not w.is_pinnable(row) or not is_on("resident"):
        return False
    side_by_side = 1 if row[-1] is w.vector else min(16, power_of_two(w.size[w.vector]))
    width = 2 if any(t.dtype == "f64" for t in w.program.terms) else 1
    items = [t for t in w.row_loads(row) if t.axes - set(row)]
    copies = max(1, len(items) + len(roles.accumulators)) * width
    return w.padded(row) * side_by_side * copies <= w.budget.resident and _is_roomy(w, row)


def _is_roomy(w: Workload, row: tuple[Axis, ...]) -> bool:
    """Few lanes lie outside, and few reductions want registers beside the row."""
    padded = w.padded(row)
    wasteful = padded > 32768 and padded > PADDED * w.elements(row)
    crowded = any(padded >= lanes and len(w.reductions) > most for lanes, most in CROWDED)
    return not wasteful and not (crowded and w.target.kind != "interpret")


# ------------------------------------------------------------------ packed in registers
def _packed_loads(w: Workload, roles: AxisRoles) -> frozenset[Term]:
    """The rows that are read once because they stay packed; none where anything else had to stay, too."""
    row = roles.row
    streams = [t for t in w.loads if t.axes > set(row)]
    narrow = all(t.dtype in LOW_FLOATS and not t.args for t in streams)
    alone = not roles.final and not w.scans and not any(r.axes & set(row) for r in roles.inner)
    plain = w.is_pinnable(row) and w.vector in row and w.slide is None and _is_roomy(w, row)
    pays = narrow and alone and plain and passes_over(w, row, {}) > 1 and is_on("packed")
    return frozenset(streams if pays and _is_packable(w, row, streams) else ())


def _is_packable(w: Workload, row: tuple[Axis, ...], streams: list[Term]) -> bool:
    """The rows fit, beside them the weights that come by, and what is computed from both takes little room."""
    rows = len({t.param for t in streams})
    packed = 2 * rows
    passing = sum(ITEMSIZE[t.dtype] for t in w.row_loads(row) if t not in streams)
    room = 2 * w.budget.packed // w.padded(row)
    fits = packed <= room and packed + passing <= PASSING * room
    return rows <= STREAMS and fits and _is_light_along(w, set(row))


def _is_light_along(w: Workload, row: set[Axis]) -> bool:
    """No term along the row takes many registers, one extreme is looked for at most, one row is written."""
    along = [t for t in w.program.terms if t.axes & row and t.op not in ("load", *REDUCTIONS)]
    extremes = [r for r in w.reductions if r.op != "sum"]
    stores = [s for s in w.program.sinks if set(s.axes) & row]
    return all(_is_light(w, t, row) for t in along) and len(extremes) <= 1 and len(stores) <= 1


def _is_light(w: Workload, term: Term, row: set[Axis]) -> bool:
    """Few registers for one element; AMD divides, and rounds what it computes to 16 bits, in many."""
    divides = term.op in DIVISIONS and bool(term.args[-1].axes & row)
    if w.target.kind == "hip" and (divides or (term.dtype in LOW_FLOATS and term.op != "cast")):
        return False
    return term.op in LIGHT and term.dtype in ("b1", "f32", *LOW_FLOATS)


# ------------------------------------------------------------------ in chunks
def _is_shareable(w: Workload, roles: AxisRoles) -> bool:
    """Strips of the row may be programs of their own: everything but one pass of reductions is along it.

    Programs walk the same rows, each keeps the sums over them of one strip; what is reduced along a row, over chunks of
    all of it, is found by the first of them to come by.
    """
    if list(roles.row) != w.order[-1:] or w.scans or not roles.final or not is_on("strips"):
        return False
    if set(roles.outer) != set(roles.walk):
        return False
    # sinks before the finish write their strip; sums before them need no other pass over the row
    (axis,) = roles.row
    inner, final = set(roles.inner), set(roles.final)
    last = w.sinks_of(final)
    stored = [s for s in w.program.sinks if s not in last]
    along = all(axis in s.axes and s.mode == "store" for s in stored) and all(axis in r.args[0].axes for r in final)
    once = all(r.dtype == "f32" and not w.under[r] & inner for r in inner)
    return along and once and any(axis in r.axes for r in final)


def _direct_sums(w: Workload, roles: AxisRoles) -> dict[Term, tuple[Axis, ...]]:
    """Final sums that keep a part of the row in chunks; what cannot be done in chunks is cut."""
    row = set(roles.row)
    _check_chunks(w, roles, row)
    wide = [r for r in roles.final if r.axes & row]
    if _partials_pay(w, roles, wide):
        return {r: tuple(a for a in roles.row if a in r.axes) for r in wide}
    for r in wide:
        below_r = [i for i in (*roles.inner, *w.scans) if i in w.under[r]]
        if below_r:
            raise Materialize(nodes_of(below_r))
    if wide:
        separate(w, wide)
    return {}


def _check_chunks(w: Workload, roles: AxisRoles, row: set[Axis]) -> None:
    """A reduction that keeps a part of the row would need all of it at once; so would scans along several axes."""
    partial = [r for r in roles.inner if r.axes & row]
    if partial:
        lower = [i for i in (*w.scans, *roles.inner) if any(i in w.under[r] for r in partial)]
        raise Materialize(nodes_of([s for s in lower if s.op in SCANS] or partial), nodes_of(lower))
    if w.scans and (len(row) > 1 or len({s.op for s in w.scans}) > 1):
        lower = [r for s in w.scans for r in w.under[s] if r.op in REDUCTIONS and set(r.param) != set(s.param)]
        raise Materialize(nodes_of(lower or w.scans))


def _partials_pay(w: Workload, roles: AxisRoles, wide: list[Term]) -> bool:
    """A partial sum per item, along the part of the row that is kept: written and read, against reading all again.

    [n, g, c, x] with the row c, x: the gradient of w[g, c] needs one number per n, g and c.
    """
    row = set(roles.row)
    if w.scans or any(row <= r.axes for r in wide) or w.vector not in row or not is_on("partials"):
        return False
    again = sum(ITEMSIZE[t.dtype] for t in w.row_loads(row)) * w.elements(row)
    return sum(8 * w.elements(r.axes & row) for r in wide) < again
