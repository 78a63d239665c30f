"""What an export writes down for vmap: the graphs of a Function over lanes, every tensor with these as its first axis.

one lane: x [M, N], w [N] -> y [M, N]        many: x [lanes, M, N], w [lanes, N] -> y [lanes, M, N]
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import sympy

from ....ir import Graph, building
from ....ir.errors import LoweringError
from ....ir.transforms.batch import batch, with_batch_axis
from ....ir.transforms.extern import NoRuleError, no_rule_error
from ...execution.pipeline import optimize
from ...functorch.batching.op_rules import OP_RULES
from .gathered import Gathered, Part, Sizes, Source, apart, part_of

LANES = sympy.Symbol("lanes", integer=True, positive=True)
EXPECTED = 16
"""How many lanes block sizes are chosen for."""


@dataclass(frozen=True)
class Batched(Gathered):
    """The Function over lanes, whose parts take all that those of `lane` take, in the same order."""

    lane: Gathered = field(kw_only=True)

    @property
    def name(self) -> str:
        return f"{self.lane.name}Batched"

    @property
    def sources(self) -> dict[sympy.Symbol, Source]:
        behind = {s: (at, kind, axis + 1) for s, (at, kind, axis) in self.lane.sources.items()}
        return {**behind, LANES: (0, "size", 0)}

    @property
    def pinned(self) -> Sizes:
        return {**self.lane.pinned, **super().pinned}

    @property
    def constants(self) -> Sizes:
        """Symbols whose values are compiled into a kernel over lanes alone: for others the launch raises."""
        return {s: n for s, n in self.pinned.items() if s not in self.lane.pinned}

    @property
    def ones(self) -> set[sympy.Symbol]:
        return {*self.lane.ones, LANES}


def over_lanes(found: Gathered) -> Batched:
    """The same over a batch, by the rules of the IR. Raises ExportError for what has none."""
    if (reason := _refusal(found)) is not None:
        raise apart(found.compiler, f"it has no vmap to write down: {reason}")
    try:
        parts = [None if p is None else _batched(found, p) for p in (found.forward, found.backward, found.jvp)]
    except NoRuleError as error:
        facts = error.facts
        told = f"it has no vmap to write down: `{facts['op']}` {facts['why']}"
        raise apart(found.compiler, told, facts["where"]) from error
    except LoweringError as error:
        raise apart(found.compiler, f"its vmap cannot be written in kernels: {error}") from error
    forward, backward, jvp = parts
    facts = {f.name: getattr(found, f.name) for f in fields(Gathered)}
    made = Batched(**{**facts, "forward": forward, "backward": backward, "jvp": jvp}, lane=found)
    _require_any_batch(made)
    return made


def _refusal(found: Gathered) -> str | None:
    """Why a Function has no batched class, which takes and returns whole tensors that it may not change."""
    forward = found.specialization.captured.forward
    if found.compiler.user.overrides("vmap"):
        return "it has a vmap of its own, which is called as it is written"
    if not found.slots:
        return "it takes no tensor"
    if forward.dirty or any(p.graph.mutations for p in found.parts):
        return "it writes into an argument"
    if any(o.kind not in ("tensor", "object") for o in forward.outputs):
        return "an output is an argument, a view of one, or another output"
    if any(kind != "size" for _, kind, _ in found.sources.values()):
        return "the strides of its arguments vary"
    return None


def _batched(found: Gathered, part: Part) -> Part:
    graph = _graph(part.graph)
    sizes = {**found.sizes, LANES: EXPECTED}
    return part_of(found.compiler, graph, part.method, found.target, sizes, part.passed, part.sizes)


def _graph(lane: Graph) -> Graph:
    """Every input and every output has the lanes in front; what draws random numbers is refused."""
    if (drawn := next((v for v in lane.order() if v.prim == "aten_effect" and v.avals), None)) is not None:
        raise no_rule_error("vmap", drawn, "draws random numbers")
    found = batch(lane, [True] * len(lane.inputs), LANES, OP_RULES)
    with building(found.graph):
        pairs = zip(found.graph.outputs, found.mapped, strict=True)
        return optimize(found.graph.returning([None if o is None else with_batch_axis(LANES, o, m) for o, m in pairs]))


def _require_any_batch(found: Batched) -> None:
    """Kernels hold for any batch, and launches over lanes take the numbers that those of one lane take."""
    given = () if found.backward is None else found.backward.sizes
    for symbol in (s for s in (LANES, *given) if s in found.constants):
        told = f"{'the batch' if symbol == LANES else 'a size'} is {found.constants[symbol]}"
        raise apart(found.compiler, f"it has no vmap to write down: its kernels over a batch hold where {told}")
