"""DTensor arguments: each rank runs what was compiled on its parts, where the Function's graphs prove that it may.

    Fast.apply(x: Shard(0), weight: Replicate())  ->  Shard(0);  the gradient of weight is Partial: it has to be summed

Placements that the graphs do not allow are changed before the call, on record; nothing is ever computed on a part as if
it were the whole. What cannot be captured runs as written, operation by operation, by DTensor's own rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

import sympy
import torch

from ...ir.errors import FusegradError, InternalError, users_line
from ...ir.sharding.rules import WHOLE
from ...tracer.methods import as_tuple, method_place, parameter_names
from ...tracer.torch_private import dual_level, transforms_active, unwrap_functorch
from ...tracer.trace import CaptureError
from ..capture.graph_mode import outside_graph
from .partition import ShardingPlan
from .placements import (
    ScaledGradient,
    from_local,
    is_split,
    layout_of,
    local_shape,
    moved_share,
    placement_of,
    placements_of,
    to_local,
    types,
)
from .sharding_rules import ShardingRule, rule_for, stand_in

if TYPE_CHECKING:
    from ..compiled.compiled import Compiled
    from ..specialize.specialization import Specialization

Tensor = torch.Tensor


class MixedTensorsError(FusegradError, RuntimeError):
    """Plain tensors beside DTensors: they may be parts, or the same on every rank."""

    message = (
        "{function}.apply: `{argument}` is a plain tensor, and other arguments are DTensors\n  at:   {where}\n"
        "  fix:  make it a DTensor: distribute_tensor(t, mesh, [Replicate()]), or DTensor.from_local(t, mesh, ...)."
    )


class MeshesDifferError(FusegradError, RuntimeError):
    """DTensors on several meshes in one call."""

    message = (
        "{function}.apply: `{argument}` is on another device mesh than the arguments in front of it\n"
        "  at:   {where}\n  fix:  bring all arguments to one mesh."
    )


class PlacementError(FusegradError, RuntimeError):
    """A placement that the Function's graphs do not allow, with fullgraph=True."""

    message = (
        "{function}.apply: `{argument}` is {placement}, but dim {dim} of it cannot be divided: {why}\n"
        "  at:   {where}\n  fix:  redistribute `{argument}` to {instead} before the call, or compile without fullgraph."
    )


def has_dtensors(args: Sequence[Any]) -> bool:
    """True where some argument is a DTensor, or wraps one within a torch.func transform."""
    if (module := types()) is None:
        return False
    tensors = [a for a in args if isinstance(a, Tensor)]
    return any(isinstance(unwrap_functorch(t) if type(t) is Tensor else t, module.DTensor) for t in tensors)


# ------------------------------------------------------------------ the call
TRANSFORMED = "it is given DTensors, within a transform of torch.func"
Run: TypeAlias = "Callable[[tuple[Any, ...], Specialization | None], Any]"
"""The class on the parts that a rank has of its arguments, or what was captured of it at the whole sizes."""


def call(compiler: Compiled, args: tuple[Any, ...], run: Run) -> Any:
    """`apply` where some argument is a DTensor. run: makes the call on the parts.

    Raises MixedTensorsError, MeshesDifferError, PlacementError.
    """
    if transforms_active() or dual_level() >= 0:
        place = method_place(compiler.user.method("forward"))
        compiler.ledger.refuse("forward", CaptureError(reason=TRANSFORMED, where=place))
        return compiler.user.run(*args)
    mesh = _mesh(compiler, args)
    if mesh.get_coordinate() is None:  # this rank has no part: DTensor's own rules know what that means
        return compiler.user.run(*args)
    rule = rule_for(compiler, args)
    if isinstance(rule, CaptureError):
        compiler.ledger.refuse("forward", rule)
        return compiler.user.run(*args)
    return _Call(compiler, rule, args, mesh, run)()


def call_in_graph(compiler: Compiled, args: tuple[Any, ...], run: Run) -> Any:
    """`apply` on DTensors in a graph of torch.compile or make_fx, where `run` makes the call on the parts.

    Raises CaptureError where it cannot be there, and what `call` raises.
    """
    if transforms_active() or dual_level() >= 0:
        raise CaptureError(reason=TRANSFORMED, where=users_line())
    mesh = _mesh(compiler, args)
    if mesh.get_coordinate() is None:
        raise CaptureError(reason="it is given DTensors of which this rank has no part", where=users_line())
    with outside_graph():
        rule = rule_for(compiler, [stand_in(a) if isinstance(a, Tensor) else a for a in args])
    if isinstance(rule, CaptureError):
        raise rule
    return _Call(compiler, rule, args, mesh, run)()


def _mesh(compiler: Compiled, args: Sequence[Any]) -> Any:
    """The one mesh of all DTensors."""
    kind, mesh = types().DTensor, None
    for at, value in enumerate(args):
        if isinstance(value, kind):
            if mesh is not None and value.device_mesh != mesh:
                raise MeshesDifferError(function=compiler.user.cls.__name__, argument=_name(compiler, args, at))
            mesh = value.device_mesh
        elif isinstance(value, Tensor) and (value.dim() or value.requires_grad):
            raise MixedTensorsError(function=compiler.user.cls.__name__, argument=_name(compiler, args, at))
    return mesh


def _name(compiler: Compiled, args: Sequence[Any], at: int) -> str:
    skip = 0 if compiler.user.setup_style else 1
    return parameter_names(compiler.user.cls.forward, len(args), skip, "argument")[at]  # type: ignore[attr-defined]


class _Call:
    """One call: where its arguments are, where they go, and what comes back. run: makes it on the parts."""

    def __init__(
        self, compiler: Compiled, rule: ShardingRule, args: tuple[Any, ...], mesh: Any, run: Run
    ) -> None:
        self.compiler, self.rule, self.args, self.mesh, self.run = compiler, rule, args, mesh, run
        self.slots = rule.spec.captured.slots
        self.placements = [placements_of(args[i], mesh.ndim) for i in self.slots]
        self.ways: list[ShardingPlan | None] = []
        for at in range(mesh.ndim):
            self.ways.append(self._cheapest(at))
        if not rule.runs_for(self._counts()):
            self.ways = [None] * mesh.ndim
        self._tell()

    def __call__(self) -> Any:
        local = list(self.args)
        for at, slot in enumerate(self.slots):
            states = [WHOLE if w is None else w.inputs[at] for w in self.ways]
            part = to_local(self.args[slot], layout_of(self.mesh, states, self.ways))
            factor = self._factor([None if w is None else w.gradients[at] for w in self.ways])
            local[slot] = part if factor == 1 else ScaledGradient.apply(part, factor)  # type: ignore[no-untyped-call]
        result = self._run(tuple(local))
        supply = iter(range(len(self.rule.shapes)))
        by_part: dict[int, Any] = {}
        full = [self._as_dtensor(v, next(supply), by_part) if isinstance(v, Tensor) else v for v in as_tuple(result)]
        return tuple(full) if isinstance(result, tuple) else full[0]

    def _run(self, local: tuple[Any, ...]) -> Any:
        """The parts through the class as for plain tensors; through the capture of the whole where that is another."""
        fits = self.rule.holds_for(self._counts())
        if not fits:
            self.compiler.ledger.note_compiled("forward")
        return self.run(local, None if fits else self.rule.spec)

    def _as_dtensor(self, part: Tensor, number: int, by_part: dict[int, Any]) -> Any:
        if id(part) in by_part:
            part = part.clone()  # AOTAutograd (torch 2.13) takes no two DTensors of one memory
        states = [WHOLE if w is None else w.outputs[number] for w in self.ways]
        shape = self.rule.shapes[number]
        expected = local_shape(shape, states, self.mesh)
        if tuple(part.shape) != expected:
            raise InternalError(f"a rank's part of result {number} is {tuple(part.shape)} and not {expected}")
        factor = self._factor([None if w is None else w.scales[number] for w in self.ways])
        scaled = part if factor == 1 else part * factor
        by_part[id(part)] = from_local(scaled, layout_of(self.mesh, states, self.ways), shape)
        return by_part[id(part)]

    def _factor(self, degrees: Sequence[Fraction | None]) -> float:
        """The factor for a rank's part, given the power of its share for each mesh dim."""
        powers = {w.symbol: d for w, d in zip(self.ways, degrees, strict=True) if w is not None and d}
        return math.prod(float(self._share(symbol) ** float(degree)) for symbol, degree in powers.items())

    def _share(self, symbol: sympy.Symbol) -> float:
        """The share of a dim that this rank has."""
        states = [0 if w is not None and w.symbol == symbol else WHOLE for w in self.ways]
        size = self.rule.sizes[symbol]
        return local_shape((size,), states, self.mesh)[0] / size

    # -------------------------------------------------------------- which way
    def _cheapest(self, at: int) -> ShardingPlan | None:
        """The plan for one mesh dim that moves the least; of what is divided now, it keeps as much as possible."""
        split_axes = [(n, p[at].dim) for n, p in enumerate(self.placements) if is_split(p[at])]
        usable = [w for w in self.rule.ways.values() if any(w.inputs[n] == axis for n, axis in split_axes)]
        even = [w for w in usable if not w.even or self._is_even(w.symbol, at)]
        return min([*even, None], key=lambda way: (self._cost(at, way), way is None))

    def _is_even(self, symbol: sympy.Symbol, at: int) -> bool:
        counts = [self.mesh.size(i) for i, w in enumerate(self.ways) if w is not None and w.symbol == symbol]
        return bool(self.rule.sizes[symbol] % math.prod([*counts, self.mesh.size(at)]) == 0)

    def _cost(self, at: int, way: ShardingPlan | None) -> float:
        states = [WHOLE] * len(self.slots) if way is None else way.inputs
        parts = [moved_share(p[at], s, self.mesh.size(at)) for p, s in zip(self.placements, states, strict=True)]
        return sum(t.nbytes * part for t, part in zip(self.rule.tensors, parts, strict=True))

    def _counts(self) -> dict[sympy.Symbol, tuple[int, ...]]:
        """The numbers of ranks by which each dim is divided."""
        counts: dict[sympy.Symbol, tuple[int, ...]] = {}
        for at, way in enumerate(self.ways):
            if way is not None:
                counts[way.symbol] = (*counts.get(way.symbol, ()), self.mesh.size(at))
        return counts

    # -------------------------------------------------------------- the record
    def _tell(self) -> None:
        """Put on record which divided arguments are gathered, and why; with fullgraph=True an error."""
        for number, placements in enumerate(self.placements):
            for at, placement in enumerate(placements):
                way = self.ways[at]
                if not is_split(placement) or (way is not None and way.inputs[number] == placement.dim):
                    continue
                self._moves(number, placement, way)

    def _moves(self, at: int, placement: Any, way: ShardingPlan | None) -> None:
        name, axis = self.rule.spec.captured.names[self.slots[at]], placement.dim
        why = self.rule.why_not(at, axis) or "its parts do not fit those of the other arguments, or are too small"
        instead = placement_of(WHOLE if way is None else way.inputs[at])
        if self.compiler.options.fullgraph:
            raise PlacementError(function=self.compiler.user.cls.__name__, argument=name, placement=placement, dim=axis,
                                 why=why, instead=instead)  # fmt: skip
        reason = f"`{name}`, a DTensor, is moved from {placement} to {instead}: dim {axis} cannot stay divided: {why}"
        if reason not in self.rule.reported:
            self.rule.reported.add(reason)
            self.compiler.ledger.report("forward", reason)
