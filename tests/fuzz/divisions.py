"""`make fuzz-parts N=2000 SEED=0`: random programs computed in parts, as ranks do with DTensors, against the whole.

Each seed is a program; every dim that its graphs allow to be divided is, among two to four ranks, one after the other
in one process: forward, and backward with the gradients that DTensor would give it. --help says more.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "distributed")]

import parts_by_hand as by_hand  # noqa: E402
import torch  # noqa: E402
from fuzz_programs import Written, forget, load, program, source  # noqa: E402
from fuzz_runs import Sum, answer_seeds, run_by_seed  # noqa: E402
from fuzz_trials import near  # noqa: E402

import fusegrad  # noqa: E402
from fusegrad.runtime.check.subject import _seed  # noqa: E402
from fusegrad.runtime.distributed.partition import ShardingPlan  # noqa: E402
from fusegrad.runtime.distributed.sharding_rules import ShardingRule, rule_of  # noqa: E402
from fusegrad.tracer.trace import CaptureError  # noqa: E402

RANKS = (2, 3, 4)
DRAWS = (0, 1, 2)
"""Numbers for the arguments, all of which have to show a difference: at a jump the last bit may decide."""


@dataclass
class Result:
    """What became of a program: how it was divided, what was not, why it ran as written, and the faults."""

    seed: int
    ways: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)
    reason: str = ""
    faults: list[dict[str, str]] = field(default_factory=list)


def tested(seed: int) -> Result:
    """A seed's program, in every way that its rule admits."""
    p, found = program(seed), Result(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _judge(p, found)
        finally:
            forget(p)
    return found


def _judge(p: Written, found: Result) -> None:
    target = load(p)
    fast = fusegrad.compile(target, backend="reference")
    both = [t.apply if isinstance(target, type) else t for t in (fast, target)]
    rule = rule_of(fast._fusegrad, p.tensors(0))
    if isinstance(rule, CaptureError):
        found.others["as written"] += 1
        found.reason = str(rule.facts["reason"])
        return
    found.others["dims that are not divided"] += len(rule.refused)
    held = SimpleNamespace(apply=both[0], _fusegrad=fast._fusegrad)
    counts = random.Random(f"ranks {found.seed}").sample(RANKS, 2)
    for way, count in by_hand.ways(rule, counts):
        found.ways["scaled" if any((*way.scales, *way.gradients)) else "divided"] += 1
        told = [_apart(p, held, both[1], rule, way, count, draw) for draw in DRAWS[:1]]
        told += [_apart(p, held, both[1], rule, way, count, draw) for draw in DRAWS[1:] if told[0]]
        if all(told):
            words = f"{p.name} in {count} parts: {way}\n  {told[0]}\n\n{source(p)}"
            found.faults.append({"kind": f"parts: {told[0][0].partition(':')[0]}", "text": words})
            return


def _apart(
    p: Written, fast: Any, eager: Any, rule: ShardingRule, way: ShardingPlan, count: int, draw: int
) -> Sequence[str]:
    """How the parts differ from the whole; nothing where eager raises."""
    args = p.tensors(draw)
    try:
        _seed(0)
        theirs, given = by_hand.whole(eager, args)
    except Exception:
        return []
    try:
        _seed(0)
        return by_hand.faults(by_hand.divided(fast, rule, way, args, given, count), theirs, near(p).atol)
    except Exception as error:
        return [f"raises {type(error).__name__}: {error}"]


def work(pipe: Connection, options: argparse.Namespace) -> None:
    """Answers each seed, in a process of its own."""
    torch.set_num_threads(1)
    answer_seeds(pipe, _answer)


def _answer(seed: int) -> dict[str, Any]:
    found = tested(seed)
    written = [found.reason] if found.reason else []
    counts = {"modes": found.ways, "results": found.others, "written": written}
    return {"faults": found.faults, "by_backend": {"reference": counts}}


if __name__ == "__main__":
    told = "random programs computed in parts, as ranks do with DTensors, against the whole"
    sys.exit(run_by_seed("tests/fuzz/divisions.py", told, work, Sum()))
