"""The ranks of a mesh one after the other in one process: arguments split, the compiled class run on each part, merged.

No process group and no DTensor: what is checked is the rule alone, against the class as written on the whole arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusegrad.ir.sharding.rules import PARTIAL, State
from fusegrad.runtime.distributed.partition import ShardingPlan, dual
from fusegrad.runtime.distributed.placements import part_size
from fusegrad.runtime.distributed.sharding_rules import ShardingRule

Tensor = torch.Tensor
SEED = 7


@dataclass(frozen=True)
class Results:
    """Outputs, then gradients by tensor argument (None where there is none)."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]


def fresh(args: Sequence[Any]) -> list[Any]:
    return [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args]


def tensors(values: Any) -> list[Any]:
    return [v for v in (values if isinstance(values, tuple) else (values,)) if isinstance(v, Tensor)]


def whole(apply: Any, args: Sequence[Any]) -> tuple[Results, list[Tensor]]:
    """The class on the whole arguments, and the gradients of the results that were given."""
    args = fresh(args)
    outputs = tensors(apply(*args))
    torch.manual_seed(SEED)
    given = [torch.randn(o.shape).to(o.dtype) for o in outputs]
    return run(outputs, given, args), given


def run(outputs: list[Any], given: Sequence[Tensor], args: Sequence[Any]) -> Results:
    moving = [(o, g) for o, g in zip(outputs, given, strict=True) if o.requires_grad]
    if moving:
        torch.autograd.backward([o for o, _ in moving], [g for _, g in moving])
    return Results([o.detach() for o in outputs], [a.grad for a in args if isinstance(a, Tensor)])


def part(value: Tensor, state: State, count: int, rank: int) -> Tensor:
    if not isinstance(state, int):
        return value.detach().clone()
    start = sum(part_size(value.shape[state], count, r) for r in range(rank))
    return value.detach().narrow(state, start, part_size(value.shape[state], count, rank)).clone()


def merged(parts: Sequence[Tensor], state: State) -> Tensor:
    """What the ranks' parts are together; what is whole has to be the same on each."""
    if isinstance(state, int):
        return torch.cat(list(parts), state)
    if state == PARTIAL:
        return torch.stack([p.double() if p.is_floating_point() else p for p in parts]).sum(0)
    assert all(torch.equal(p, parts[0]) for p in parts), "ranks disagree on what is whole"
    return parts[0]


def divided(
    fast: Any, rule: ShardingRule, way: ShardingPlan, args: Sequence[Any], given: Sequence[Tensor], count: int
) -> Results:
    """The same results from `count` ranks."""
    per_rank = [_on_rank(fast, rule, way, args, given, count, r) for r in range(count)]
    outputs = [merged([r.outputs[i] for r in per_rank], s) for i, s in enumerate(way.outputs)]
    gradients: list[Tensor | None] = []
    for i, state in enumerate(way.inputs):
        found = [r.gradients[i] for r in per_rank]
        gradients.append(None if found[0] is None else merged(found, dual(state)))  # type: ignore[arg-type]
    return Results(outputs, gradients)


def _on_rank(
    fast: Any,
    rule: ShardingRule,
    way: ShardingPlan,
    args: Sequence[Any],
    given: Sequence[Tensor],
    count: int,
    rank: int,
) -> Results:
    local, compiler = list(args), fast._fusegrad
    for slot, state in zip(rule.spec.captured.slots, way.inputs, strict=True):
        local[slot] = part(args[slot], state, count, rank).requires_grad_(args[slot].requires_grad)
    same = rule.holds_for({way.symbol: (count,)})
    made = fast.apply(*local) if same else compiler.run(rule.spec, tuple(local), tuple(local), None)
    gradients = [part(g, dual(s), count, rank) for g, s in zip(given, way.outputs, strict=True)]
    share = part_size(rule.sizes[way.symbol], count, rank) / rule.sizes[way.symbol]
    found = run(scaled(tensors(made), way.scales, share), gradients, local)
    return Results(found.outputs, scaled(found.gradients, way.gradients, share))


def scaled(parts: Sequence[Any], degrees: Sequence[Any], share: float) -> list[Any]:
    """Each part times the power of the rank's share; None stays."""
    return [p if p is None or not d else p * share ** float(d) for p, d in zip(parts, degrees, strict=True)]


def ways(rule: ShardingRule, counts: Sequence[int]) -> Iterator[tuple[ShardingPlan, int]]:
    """Every way of dividing that the rule admits, among so many ranks."""
    for symbol, way in rule.ways.items():
        for count in counts:
            if not (way.even and rule.sizes[symbol] % count) and rule.runs_for({symbol: (count,)}):
                yield way, count


def faults(mine: Results, theirs: Results, tolerance: float) -> list[str]:
    found = []
    pairs = [("output", mine.outputs, theirs.outputs), ("gradient", mine.gradients, theirs.gradients)]
    for name, ours, others in pairs:
        for i, (a, b) in enumerate(zip(ours, others, strict=True)):
            if (a is None) != (b is None):
                found.append(f"{name} {i}: one is missing")
            elif a is not None and b is not None and not _close(a, b, tolerance):
                found.append(f"{name} {i}: {a.flatten()[:4]} and not {b.flatten()[:4]}")
    return found


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return a.shape == b.shape and torch.allclose(
        a.double() if not a.is_complex() else a, b.double() if not b.is_complex() else b,
        rtol=tolerance, atol=tolerance, equal_nan=True,
    )  # fmt: skip
