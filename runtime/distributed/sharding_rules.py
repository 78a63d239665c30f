"""The dims of a class that may be divided, for DTensors of some whole sizes: by a capture on tensors without memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import sympy
import torch

from ...ir.errors import LoweringError, users_line
from ...ir.lazy_attribute import lazy_attribute
from ...tracer.capture.capture import capture_lock
from ...tracer.containers import holds_tensors, holes
from ...tracer.function import rebind
from ...tracer.methods import backward_method
from ...tracer.trace import CaptureError
from ..capture.captured_backward import BackwardEntry
from ..capture.guards import unkeyed_state
from ..specialize.randomness import require_none as require_no_draws
from ..specialize.specialization import Specialization
from ..values.sizes import number
from ..values.tensor_specs import fake_tensor
from .partition import ShardingPropagation
from .placements import dense_strides, part_sizes

if TYPE_CHECKING:
    from ..compiled.compiled import Compiled

Tensor = torch.Tensor
Counts = Mapping[sympy.Symbol, tuple[int, ...]]
"""For each dim by how many ranks it is divided, one number per mesh dim."""
MOST_RULES = 256
"""Combinations of sizes, dtypes and constants that a class remembers its rule for."""


class ShardingRule(ShardingPropagation):
    """The dims that may be divided at one combination of whole sizes, dtypes and constants."""

    def __init__(self, spec: Specialization, stand_ins: Sequence[Any], asks_backward: bool) -> None:
        captured = spec.captured
        super().__init__(spec, asks_backward)
        self.tensors = captured.tensors_of(stand_ins)
        self.shapes = [tuple(rebind(fake.shape, captured.sizes(stand_ins))) for fake in captured.forward.fake_outputs]
        pairs = [p for d, t in zip(self.dims, self.tensors, strict=True) for p in zip(d, t.shape, strict=True)]
        self.sizes = {size: int(n) for size, n in pairs if isinstance(size, sympy.Symbol)}
        self.reported: set[str] = set()
        self.admitted: dict[Any, bool] = {}

    def runs_for(self, counts: Counts) -> bool:
        """True where the captured graphs can be run on the parts: none is empty, no 1 means another thing."""
        filled = all(min(part_sizes(self.sizes[s], c)) > 0 for s, c in counts.items())
        return self.holds_for(counts) or (filled and self.keeps_rank)

    def holds_for(self, counts: Counts) -> bool:
        """True where every rank's parts are of sizes for which the Function does what it does at the whole ones.

        counts: for each dim how often it is divided, one number per mesh dim.
        """
        key = tuple(sorted(counts.items(), key=str))
        if key not in self.admitted:
            self.admitted[key] = all(map(self._admits, _combinations(counts, self.sizes)))
        return self.admitted[key]

    def _admits(self, sizes: Mapping[sympy.Symbol, int]) -> bool:
        pairs = zip(self.tensors, self.dims, strict=True)
        return self.guard([_like(t, [number(n, sizes) for n in shape]) for t, shape in pairs])

    @lazy_attribute
    def keeps_rank(self) -> bool:
        """True where no operation, as it was captured, is another one where a size happens to be 1."""
        entries = [e for e in self.spec.backward.entries.values() if isinstance(e, BackwardEntry)]
        traces = [self.spec.captured.forward.trace, *(e.trace for e in entries)]
        called = (str(n.target).replace("unsqueeze", "") for t in traces for n in t.graph_module.graph.nodes)
        return not any("squeeze" in name for name in called)


def _combinations(counts: Counts, sizes: Mapping[sympy.Symbol, int]) -> Iterator[dict[sympy.Symbol, int]]:
    """The sizes of every kind of rank."""
    parts = [sorted(part_sizes(sizes[s], c)) for s, c in counts.items()]
    for combination in itertools.product(*parts):
        yield {**sizes, **dict(zip(counts, combination, strict=True))}


def _like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor without memory of another shape, its axes in the same order."""
    return torch.empty_strided(tuple(shape), dense_strides(shape, tensor.stride()), dtype=tensor.dtype, device="meta")


def rule_for(compiler: Compiled, args: Sequence[Any]) -> ShardingRule | CaptureError:
    """The rule for arguments like these; why there is none."""
    key = compiler.keys.exact(args)
    if (rule := compiler.sharding_rules.get(key)) is not None:
        return rule  # type: ignore[no-any-return]
    with capture_lock:
        compiler.sharding_rules[key] = rule = compiler.sharding_rules.get(key) or rule_of(compiler, args)
        while len(compiler.sharding_rules) > MOST_RULES:
            compiler.sharding_rules.popitem(last=False)
    return rule


def rule_of(compiler: Compiled, args: Sequence[Any]) -> ShardingRule | CaptureError:
    """The rule, made anew; why there is none."""
    try:
        return _captured(compiler, args)
    except CaptureError as error:
        return error.without_frames()
    except LoweringError as error:
        reason = f"it is given DTensors, and no graph tells how they are divided: {error}"
        return CaptureError(reason=reason, where=users_line())


def _captured(compiler: Compiled, args: Sequence[Any]) -> ShardingRule:
    """The rule, from a capture on tensors without memory of the whole sizes. Raises CaptureError, LoweringError."""
    # Refused before the capture, which costs more than to look.
    if any(holds_tensors(a) for a in args):
        raise CaptureError(reason="it is given DTensors, and tensors in a container", where=users_line())
    if (why := unkeyed_state(args) or compiler.keys.why_unkeyed(args)) is not None:
        raise CaptureError(reason=why, where=users_line())
    stand_ins = [stand_in(a) if isinstance(a, Tensor) else a for a in args]
    spec = compiler.captures.only(stand_ins, of_whole=True)
    require_no_draws(spec)
    # Refused after it: what only the captured methods tell.
    asks = any(spec.captured.forward.needs_input_grad) and backward_method(compiler.user.cls) is not None
    for refused, it_is in {
        "calls what is opaque": bool(spec.captured.opaque),
        "writes to one": spec.captured.writes_inputs,
        "reads another tensor": any(t.dim() for t in spec.captured.forward.trace.lifted),
        "returns a container of tensors": any(
            o.kind == "object" and holes(o.value) for o in spec.captured.forward.outputs
        ),
        "its backward is opaque": asks and compiler.keys.opaque("backward") is not None,
    }.items():
        if it_is:
            raise CaptureError(reason=f"it is given DTensors, and {refused}", where=spec.captured.forward_place())
    return ShardingRule(spec, stand_ins, asks)


def stand_in(value: Tensor) -> Tensor:
    """A plain tensor like a DTensor, without memory. In a graph that is traced its sizes become numbers."""
    shape, stride = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
    return fake_tensor(shape, stride, value.dtype, value.device, value.requires_grad)
