"""The content of an export for vmap: the graphs of a Function over lanes, which are the first axis of every tensor.

one lane: x [M, N], w [N] -> y [M, N]        many: x [lanes, M, N], w [lanes, N] -> y [lanes, M, N]
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import sympy

from ....ir import Graph, building
from ....ir.errors import LoweringError
from ....ir.transforms.batch import batch, with_batch_axis
from ....ir.transforms.extern import NoRuleError, no_rule_error
from ...execution.graph_to_kernels import optimize
from ...functorch.batching.op_rules import OP_RULES
from .gathered import Gathered, Part, Sizes, Source, export_error, part_of

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


def over_lanes(lane: Gathered) -> Batched:
    """The same over a batch, by the rules of the IR. Raises ExportError for what has none."""
    if (reason := _refusal(lane)) is not None:
        raise export_error(lane.compiler, f"it has no vmap to write down: {reason}")
    try:
        parts = [None if p is None else _batched(lane, p) for p in (lane.forward, lane.backward, lane.jvp)]
    except NoRuleError as error:
        facts = error.facts
        refusal = f"it has no vmap to write down: `{facts['op']}` {facts['why']}"
        raise export_error(lane.compiler, refusal, facts["where"]) from error
    except LoweringError as error:
        raise export_error(lane.compiler, f"its vmap cannot be written in kernels: {error}") from error
    forward, backward, jvp = parts
    facts = {f.name: getattr(lane, f.name) for f in fields(Gathered)}
    batched = Batched(**{**facts, "forward": forward, "backward": backward, "jvp": jvp}, lane=lane)
    _require_any_batch(batched)
    return batched


def _refusal(lane: Gathered) -> str | None:
    """The reason why a Function has no batched class, which takes and returns whole tensors that it may not change."""
    forward = lane.specialization.captured.forward
    if lane.compiler.user.overrides("vmap"):
        return "it has a vmap of its own, which is called as it is written"
    if not lane.slots:
        return "it takes no tensor"
    if forward.dirty or any(p.graph.mutations for p in lane.parts):
        return "it writes into an argument"
    if any(o.kind not in ("tensor", "object") for o in forward.outputs):
        return "an output is an argument, a view of one, or another output"
    if any(kind != "size" for _, kind, _ in lane.sources.values()):
        return "the strides of its arguments vary"
    return None


def _batched(lane: Gathered, part: Part) -> Part:
    graph = _graph(part.graph)
    sizes = {**lane.sizes, LANES: EXPECTED}
    return part_of(
        lane.compiler, graph, part.method, lane.device, sizes, part.passed, part.sizes, lane.lengths, lane.guards
    )


def _graph(lane: Graph) -> Graph:
    """Every input and every output has the lanes in front; what draws random numbers is refused."""
    if (drawn := next((v for v in lane.order() if v.prim == "aten_effect" and v.avals), None)) is not None:
        raise no_rule_error("vmap", drawn, "draws random numbers")
    mapped = batch(lane, [True] * len(lane.inputs), LANES, OP_RULES)
    with building(mapped.graph):
        pairs = zip(mapped.graph.outputs, mapped.mapped, strict=True)
        return optimize(mapped.graph.returning([None if o is None else with_batch_axis(LANES, o, m) for o, m in pairs]))


def _require_any_batch(batched: Batched) -> None:
    """Kernels hold for any batch, and launches over lanes take the numbers that those of one lane take."""
    backward_sizes = () if batched.backward is None else batched.backward.sizes
    for symbol in (s for s in (LANES, *backward_sizes) if s in batched.constants):
        reason = f"{'the batch' if symbol == LANES else 'a size'} is {batched.constants[symbol]}"
        refusal = f"it has no vmap to write down: its kernels over a batch hold where {reason}"
        raise export_error(batched.compiler, refusal)
