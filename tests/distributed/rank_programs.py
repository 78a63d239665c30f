"""Random programs on DTensors in random placements, against one process: divided, moved, or run as written.

Every fourth is called within torch.compile(fullgraph=True).
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

FUZZ = Path(__file__).parents[1] / "fuzz"
sys.path.append(str(FUZZ))
from fuzz_programs import Written, forget, load, program, source  # noqa: E402
from fuzz_trials import near  # noqa: E402

import fusegrad  # noqa: E402

Tensor = torch.Tensor


def check_program(seed: int, mesh: Any) -> str:
    """What became of a seed's program: "compiled", or why there is nothing to compare. Raises AssertionError."""
    p = program(seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _checked(p, random.Random(f"placements {seed}"), mesh, in_a_graph=seed % 4 == 3)
    finally:
        forget(p)


def check_programs(seeds: Sequence[int], mesh: Any) -> None:
    found = Counter(check_program(seed, mesh) for seed in seeds)
    assert found["compiled"] >= len(seeds) // 2, found


def _checked(p: Written, rng: random.Random, mesh: Any, in_a_graph: bool) -> str:
    target, args = load(p), p.tensors(0)
    fast = fusegrad.compile(target, backend="reference")
    ours, eager = (t.apply if isinstance(target, type) else t for t in (fast, target))
    if in_a_graph:
        torch._dynamo.reset()
        inner, ours = ours, torch.compile(lambda *args: inner(*args), backend="aot_eager", fullgraph=True)
    places = [_placement(a, rng) if isinstance(a, Tensor) else None for a in args]
    try:
        theirs = _results(eager, _leaves(args))
    except Exception:
        return "eager raises"
    try:
        mine = _results(ours, [_placed(a, s, mesh) for a, s in zip(args, places, strict=True)])
    except Exception as error:
        _require_as_written(fast, p, places, error)
        return "torch's own rules refuse"
    if _is_compiled(fast):
        for name, value in theirs.items():
            torch.testing.assert_close(
                mine[name], value, rtol=near(p).rtol, atol=near(p).atol, equal_nan=True,
                msg=lambda m, n=name: f"{p.name} at {places}, {n}: {m}\n{source(p)}",
            )  # fmt: skip
        return "compiled"
    return "as written"


def _is_compiled(fast: Any) -> bool:
    return all(record.status != "opaque" for record in fast._fusegrad.ledger.records.values())


def _require_as_written(fast: Any, p: Written, places: Sequence[Any], error: Exception) -> None:
    if _is_compiled(fast):
        raise AssertionError(f"{p.name} at {places}: {type(error).__name__}: {error}\n{source(p)}") from error


def _placement(value: Tensor, rng: random.Random) -> Any:
    divided = [Shard(i) for i, n in enumerate(value.shape) if n]
    summed = [Partial()] if value.is_floating_point() else []
    return rng.choice([Replicate(), *divided, *divided, *summed])


def _placed(value: Any, placement: Any, mesh: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if placement.is_partial():
        part = value.detach() / mesh.size()
        made = DTensor.from_local(part, mesh, [placement], run_check=False)
    else:
        made = distribute_tensor(value.detach(), mesh, [placement])
    return made.requires_grad_(value.requires_grad)


def _leaves(args: Sequence[Any]) -> list[Any]:
    return [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args]


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _results(f: Any, args: Sequence[Any]) -> dict[str, Tensor]:
    """Outputs and gradients, whole."""
    torch.manual_seed(0)
    made = f(*args)
    outputs = [_whole(o) for o in (made if isinstance(made, tuple) else (made,)) if isinstance(o, Tensor)]
    moving = [(o * _weights(o)).sum() for o in outputs if o.requires_grad]
    if moving:
        sum(moving[1:], moving[0]).backward()
    found = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    leaves = [(i, a) for i, a in enumerate(args) if isinstance(a, Tensor) and a.grad is not None]
    return {**found, **{f"gradient {i}": _whole(a.grad) for i, a in leaves}}


def _weights(output: Tensor) -> Tensor:
    return torch.linspace(-1, 2, output.numel(), dtype=torch.float64).reshape(output.shape).to(output.dtype)
