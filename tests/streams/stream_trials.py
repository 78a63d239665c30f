"""`make fuzz-streams N=200 SEED=0`: random Functions whose scores need not be in memory, compiled, beside eager.

Each seed is a program of stream_programs.py: forward and backward on the interpreter, at sizes and on layouts that the
seed decides, then at other sizes. --help says more.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "fuzz")]

import torch  # noqa: E402
from beside_eager import differences, expanded, transposed_heads  # noqa: E402
from fuzz_runs import Sum, answer_seeds, operations, run_by_seed  # noqa: E402
from stream_programs import WIDER_FROM, Written, program, sizes_of  # noqa: E402

import fusegrad  # noqa: E402

DTYPES = (torch.float32, torch.float32, torch.bfloat16)
LAYOUTS = {"contiguous": None, "transposed heads": transposed_heads, "expanded": expanded}
MORE_LAYOUTS = {**LAYOUTS, "one number": lambda g: g.mean().expand(g.shape)}
EXPLAINED = 10
"""One program in so many is explained as well: it takes as long as the calls."""
NEIGHBOURS = 96
"""Calls of eager close by that say how far eager is from float64, where a program is further than twice here.

A number that is what is left of a sum over all rows has one error here and another one there: of few calls the largest
is no bound. In bfloat16 ours are up to twice eager's, as a row's sum is taken from a result that was rounded.
"""


@dataclass
class Found:
    """What became of a program: its faults, how each direction ran, and why not in kernels of its own."""

    faults: list[dict[str, str]] = field(default_factory=list)
    modes: Counter[str] = field(default_factory=Counter)
    results: Counter[str] = field(default_factory=Counter)
    reasons: list[str] = field(default_factory=list)


def tested(seed: int) -> Found:
    """A seed's program."""
    p, found = program(seed), Found()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", ".*internal error")
        try:
            _judge(p, found, random.Random(f"{seed} trial"))
        finally:
            p.forget()
    return found


def _judge(p: Written, found: Found, rng: random.Random) -> None:
    eager, dtype = p.load(), rng.choice(DTYPES)
    fast, of_gradients = fusegrad.compile(eager, backend="interpret"), MORE_LAYOUTS if p.seed >= WIDER_FROM else LAYOUTS
    layouts = rng.choice(("contiguous", "contiguous", "transposed heads")), rng.choice(tuple(of_gradients))
    call, exact = (fast, eager) if p.is_plain else (fast.apply, eager.apply)
    for turn in (0, 0, 1)[: rng.choice((1, 1, 3))]:
        arguments, given = p.tensors(sizes_of(p.seed, turn), dtype), of_gradients[layouts[1]]
        if make := LAYOUTS[layouts[0]]:
            arguments = tuple(make(a) for a in arguments)
        what = f"{dtype}, {', '.join(layouts)}, {sizes_of(p.seed, turn)}"
        found.modes[str(dtype).removeprefix("torch.")] += 1
        try:
            told = differences(call, exact, arguments, layout=given, neighbours=NEIGHBOURS)
        except Exception as error:
            told = [f"raises {type(error).__name__}: {error}"]
        if told:
            text = "\n  ".join([f"{p.name}: {what}", *told, "", p.source])
            found.faults.append({"kind": f"streams: {told[0].split(' ')[0]}", "text": text})
            return
    if p.seed % EXPLAINED:
        return
    try:
        _note_how_it_ran(fusegrad.explain(fast, *arguments), found)
    except Exception as error:
        text = f"{p.name}: {what}\n  {type(error).__name__}: {error}\n\n{p.source}"
        found.faults.append({"kind": f"explain raises {type(error).__name__}", "text": text})


def _note_how_it_ran(explanation: Any, found: Found) -> None:
    for name, report in explanation.directions.items():
        streamed = [": never in memory" in line for line in report.products if line.startswith("stream ")]
        kinds = {launch.kind for launch in report.launches}
        how = "by torch" if kinds & {"torch", "aten"} else "streamed" if any(streamed) else "by the library"
        found.results[f"{name} {how}"] += 1
        found.reasons += [str(r)[:300] for r in report.reasons]
        found.reasons += [r.partition("in memory, ")[2][:100] for r in report.products if "never" not in r]


def work(pipe: Connection, options: argparse.Namespace) -> None:
    """Answers each seed, in a process of its own."""
    torch.set_num_threads(1)
    answer_seeds(pipe, _answer)


def _answer(seed: int) -> dict[str, Any]:
    found = tested(seed)
    counts = {"modes": found.modes, "results": found.results, "written": found.reasons}
    return {"faults": found.faults, "by_backend": {"interpret": counts}, "ops": operations(program(seed).source)}


if __name__ == "__main__":
    told = "random Functions whose scores need not be in memory, compiled, beside eager"
    sys.exit(run_by_seed("tests/streams/stream_trials.py", told, work, Sum()))
