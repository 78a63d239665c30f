"""Times every case on a GPU beside eager, torch.compile, Liger and a plain copy. Right first, then fast.

    python -m fusegrad.benchmarks.gpu                          cases for nine minutes; again: the cases that are left
    python -m fusegrad.benchmarks.gpu --part 3/16              the third sixteenth of the cases
    python -m fusegrad.benchmarks.gpu --device cpu --quick     a dry run without a GPU: its times mean nothing

Every case is checked against float64 on fresh inputs, its memory poisoned beforehand. Then each peer is timed in
rounds, in another order each round: forward, and backward of a forward that is kept, on inputs that rotate through
three times the L2; device and wall time apart. The compiled Function takes part twice: what lies between its two times
is noise. The copy moves as many bytes as the case has to move at least. Files hold device, versions and date.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

from . import gpu_report
from .__main__ import add_outputs, machine, placed, today
from .clocks import CALLS_QUEUED, Call, Clock, DryClock, GpuClock
from .correctness import faults, results
from .inputs import as_list, cotangents, differentiable, real, reduced
from .peers import AGAIN, OURS, PEERS, Apply, appliers
from .plans import DIRECTIONS, plan
from .statistics import spread
from .suite import Case, chosen

SEEDS = (11, 12)
ROTATED = 3  # times the L2
MOST_SETS = 256
SHARE_OF_MEMORY = 0.5
ROUNDS = 9


# ------------------------------------------------------------------ right
@contextmanager
def poisoned(device: str, size: int, fill: bool) -> Iterator[None]:
    """Within the block memory that nobody wrote to reads as NaN: a kernel that leaves a place out is found.

    fill: whether torch.empty writes it; torch.compile would compile once more for that.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if fill:
        torch.use_deterministic_algorithms(True, warn_only=True)
    if device == "cuda":
        _poison_cache(size)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _poison_cache(size: int) -> None:
    """What the allocator hands out next, large blocks and small ones, has been full of NaN."""
    torch.cuda.empty_cache()
    sizes = [size, *[1 << n for n in range(9, 21)] * 4]
    with suppress(torch.OutOfMemoryError):
        blocks = [torch.full((n,), 0xFF, dtype=torch.uint8, device="cuda") for n in sizes]
        del blocks


def check(case: Case, apply: Apply, device: str, seed: int, fill: bool) -> dict[str, Any]:
    """What is wrong with a peer's forward and backward, and what judged: float64, or eager where that has no room."""
    args = real(case, seed, device)
    size = 4 * sum(a.nbytes for a in args if isinstance(a, Tensor))
    with poisoned(device, size, fill):
        ours = results(apply, _apart(args), seed)
    eager = results(case.function.apply, _apart(args), seed)  # type: ignore[attr-defined]
    try:
        wide, judge = results(case.function.apply, args, seed, wide=True), "float64"  # type: ignore[attr-defined]
    except torch.OutOfMemoryError:
        wide, judge = [t if t is None else t.float() for t in eager], "eager"
    return {"seed": seed, "judge": judge, "faults": faults(ours, eager, wide)}


def _apart(args: Sequence[Any]) -> list[Any]:
    """Copies, for peers that write to their arguments."""
    return [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args]


# ------------------------------------------------------------------ what is called
def sets_needed(size: int, l2: int, memory: int) -> int:
    """How many sets of inputs go through three times the L2, as far as memory holds them: `size` is one set's bytes."""
    needed = -(-ROTATED * l2 // max(1, size)) + 1
    return max(1, min(needed, MOST_SETS, int(SHARE_OF_MEMORY * memory) // max(1, 4 * size)))


def free_memory(device: str) -> int:
    return int(torch.cuda.mem_get_info()[0]) if device == "cuda" else 1 << 28


def calls_of(apply: Apply, direction: str, sets: Sequence[Sequence[Any]]) -> list[Call]:
    """A peer's forward on every set, or its backward of graphs that are kept."""
    if direction == "backward":
        return [_backward(apply, args) for args in sets]
    return [lambda args=args: apply(*args) for args in sets]  # type: ignore[misc]


def _backward(apply: Apply, args: Sequence[Any]) -> Call:
    ends = differentiable(as_list(apply(*args)))
    leaves, grads = differentiable(args), cotangents(ends, SEEDS[0])
    return lambda: torch.autograd.grad(ends, leaves, grads, retain_graph=True, allow_unused=True)


def copies(size: int, device: str, sets: int) -> list[Call]:
    """Copies that read half of `size` bytes and write the other half."""
    pairs = [[torch.ones(max(1, size // 2), dtype=torch.uint8, device=device) for _ in range(2)] for _ in range(sets)]
    return [lambda pair=pair: pair[1].copy_(pair[0]) for pair in pairs]


# ------------------------------------------------------------------ fast
def timed(calls: Mapping[str, Sequence[Call]], clock: Clock, rounds: int, order: random.Random) -> dict[str, Any]:
    """{peer: device and wall milliseconds, least and quartiles, whether the host kept up}; peers in any order."""
    turning = {name: itertools.cycle(each) for name, each in calls.items()}
    device: dict[str, list[float]] = {name: [] for name in calls}
    wall: dict[str, list[float]] = {name: [] for name in calls}
    alone = dict.fromkeys(calls, True)
    for _ in range(rounds):
        for name in order.sample(sorted(calls), len(calls)):
            taken = list(itertools.islice(turning[name], CALLS_QUEUED))
            milliseconds, only_device = clock.device(taken)
            device[name].append(milliseconds)
            alone[name] &= only_device
            wall[name].append(clock.wall(taken))
    both = {name: {"device": vars(spread(device[name])), "wall": vars(spread(wall[name]))} for name in calls}
    return {name: {**times, "device alone": alone[name]} for name, times in both.items()}


def measured(case: Case, options: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """One case: the plan's bytes, what was wrong with any peer, the times of those that are right."""
    case = reduced(case) if options.quick else case
    planned = plan(case)
    appliable = appliers(case, options.peers, options.backend)
    row: dict[str, Any] = {"case": case.name, "minimal": planned["minimal"], "checks": {}, "times": {}, "errors": {}}
    ready = [n for n, apply in appliable.items() if n != AGAIN and _is_right(n, case, apply, options, row)]
    ready += [AGAIN] * (OURS in ready and AGAIN in appliable)
    inputs = sum(a.nbytes for a in real(case, SEEDS[0], options.device) if isinstance(a, Tensor))
    sets = sets_needed(inputs, clock.l2, free_memory(options.device))
    for direction, least in zip(DIRECTIONS, planned["minimal"], strict=True):
        copied = copies(least, options.device, sets_needed(least, clock.l2, 1 << 40))
        calls: dict[str, Sequence[Call]] = {gpu_report.COPY: copied}
        given = [real(case, SEEDS[0] + n, options.device) for n in range(sets)]
        calls |= {name: calls_of(appliable[name], direction, _own(name, given)) for name in ready}
        row["times"][direction] = timed(calls, clock, options.rounds, random.Random(case.name + direction))
        del calls, given
        _forget(options.device)
    return row


def _own(name: str, given: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
    """Liger's losses write to their arguments: it has its own."""
    return [_apart(args) for args in given] if name == "liger" else given


def _is_right(name: str, case: Case, apply: Apply, options: argparse.Namespace, row: dict[str, Any]) -> bool:
    """Ours has to be right; a peer is timed if it runs, and its faults are on record (other rounding, other rules)."""
    try:
        found = [check(case, apply, options.device, seed, name.startswith(OURS)) for seed in SEEDS]
    except Exception as error:  # a peer that cannot do a case is reported, not fatal
        row["errors"][name] = f"{type(error).__name__}: {error}"[:300]
        return False
    finally:
        _forget(options.device)
    row["checks"][name] = found
    return not name.startswith(OURS) or not any(f["faults"] for f in found)


def _forget(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


# ------------------------------------------------------------------ which cases
def cost(case: Case) -> float:
    """Seconds that a case is thought to take, for parts of equal length: compilations, and bytes."""
    elements = 1.0
    for size in case.shape.replace("x", ",").split(","):
        elements *= int(size)
    return 40.0 + elements / 2e7


def part_of(cases: Sequence[Case], part: int, parts: int) -> list[Case]:
    """The part's cases, 1 being the first: the longest case goes to the part that has the least to do."""
    loads, taken = [0.0] * parts, [[] for _ in range(parts)]  # type: ignore[var-annotated]
    for case in sorted(cases, key=cost, reverse=True):
        least = loads.index(min(loads))
        loads[least] += cost(case)
        taken[least].append(case)
    return [case for case in cases if case in taken[part - 1]]


def left_over(cases: Sequence[Case], known: Mapping[str, Any], quick: bool) -> list[Case]:
    """Those without a result yet."""
    done = {row["case"] for row in known.get("rows", ())}
    return [case for case in cases if (reduced(case) if quick else case).name not in done]


# ------------------------------------------------------------------ the run
def surroundings(device: str) -> dict[str, Any]:
    """What the times depend on."""
    if device != "cuda":
        return {"device": "none: a dry run, its times mean nothing", **machine(), "date": today()}
    found: Any = GpuClock().properties
    cuda = torch.version.cuda or torch.version.hip
    return {"device": found.name, "units": found.multi_processor_count, "memory": found.total_memory, "cuda": cuda,
            **machine(), "date": today()}  # fmt: skip


def result_file(options: argparse.Namespace) -> Path:
    """By the device, so that results of several lie side by side; gpu-<device>.json is of `make gpu`."""
    name = torch.cuda.get_device_name() if options.device == "cuda" else "dry run"
    return options.out / f"bench-gpu-{name.lower().replace(' ', '-')}.json"


def run(options: argparse.Namespace) -> int:
    """Time cases until the minutes are over, write the file after each. Exit code 1 if one of ours was wrong."""
    torch._functorch.config.donated_buffer = False  # else a compiled backward cannot run twice
    file, began = result_file(options), time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    known = json.loads(file.read_text()) if file.exists() and not options.afresh else {}
    if known.get("surroundings", {}).get("versions") not in (None, machine()["versions"]):
        known = {}  # of other versions
    todo = left_over(part_of(chosen(options.match, options.quick), *options.part), known, options.quick)
    clock = DryClock() if options.device == "cpu" else GpuClock()
    found = {"surroundings": surroundings(options.device), "rows": list(known.get("rows", ()))}
    for at, case in enumerate(todo):
        if time.monotonic() - began > 60 * options.minutes:
            print(f"the time is over: {len(todo) - at} cases are left; the same command goes on", file=sys.stderr)
            break
        print(f"{at + 1}/{len(todo)}  {case.name}  {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        found["rows"].append(measured(case, options, clock))
        torch._dynamo.reset()
        file.write_text(json.dumps(found, indent=1) + "\n")
    print(gpu_report.text(found))
    return int(any(gpu_report.wrong(row) for row in found["rows"]))


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (parts.isdigit() and part.isdigit() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError("a part is written K/N, K from 1 to N")
    return int(part), int(parts)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", default=None, help="of the compiled Functions (triton; on a CPU: interpret)")
    parser.add_argument("--quick", action="store_true", help="one small case per Function")
    parser.add_argument("--match", default="", help="only cases whose names contain this")
    parser.add_argument("--peers", type=lambda t: tuple(t.split(",")), default=PEERS, help=f"some of {','.join(PEERS)}")
    parser.add_argument("--part", type=_part, default=(1, 1), help="K/N")
    parser.add_argument("--minutes", type=float, default=9.0, help="no case begins later (9)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"samples of every time ({ROUNDS})")
    parser.add_argument("--afresh", action="store_true", help="forget the results that there are")
    add_outputs(parser)
    options = placed(parser.parse_args(arguments))
    options.backend = options.backend or ("triton" if options.device == "cuda" else "interpret")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = parsed(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here: --device cpu --quick goes through the harness without one", file=sys.stderr)
        return 2
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
