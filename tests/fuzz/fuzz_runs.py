"""The runs of `make fuzz`: random programs, each in a process that may crash or hang without ending the run.

Faults are printed as they come and made smaller; --json adds the seeds to what other runs have done. The exit code is 1
where there is a fault.
"""

from __future__ import annotations

import argparse
import ast
import json
import logging
import multiprocessing
import os
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "trust"))

import outcome  # noqa: E402

Work = Callable[[Connection, argparse.Namespace], None]
PROGRAMS_PER_PROCESS = 400
MEMORY = 3_000_000  # kB; then a fresh process
TOLD_EACH = 30.0
PATIENCE = 10
"""How often the limit in seconds of processor time may pass on the clock."""
SHRINK_SECONDS = 60.0
DEFAULT = ("reference", "interpret:10")
NAMES = {
    "Add": "add", "Sub": "sub", "Mult": "mul", "Div": "div", "Pow": "pow", "MatMult": "matmul", "Mod": "remainder",
    "FloorDiv": "floor_divide", "BitAnd": "bitwise_and", "BitOr": "bitwise_or", "BitXor": "bitwise_xor",
    "LShift": "lshift", "RShift": "rshift", "USub": "neg", "Invert": "bitwise_not", "Gt": "gt", "Lt": "lt",
    "LtE": "le", "GtE": "ge",
}  # fmt: skip
NO_OPERATIONS = {"dim", "save_for_backward", "mark_dirty", "mark_non_differentiable", "set_materialize_grads"}
PYTHONS = {"tuple", "range", "reversed", "zip", "enable_grad", "tensor"}


# ------------------------------------------------------------------ in a process of its own
def work(pipe: Connection, options: argparse.Namespace) -> None:
    """Answers each seed with what became of its program."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # of calls that raise in eager too
    kinds: Counter[str] = Counter()
    for seed in iter(pipe.recv, None):
        try:
            answer = one(seed, options, kinds)
        except Exception:
            answer = {"seed": seed, "faults": [{"kind": "the fuzzer raises", "text": traceback.format_exc()}]}
        pipe.send({**answer, "memory": memory()})


def one(seed: int, options: argparse.Namespace, kinds: Counter[str]) -> dict[str, Any]:
    """A program on each backend."""
    from fuzz_programs import forget, program, source
    from fuzz_trials import CheckArgumentError, tested

    start = time.process_time()
    p = program(seed)
    answer: dict[str, Any] = {"seed": seed, "ops": operations(source(p)), "faults": [], "by_backend": {}}
    for backend, one_in in map(share, options.backend):
        if seed % one_in:
            continue
        try:
            found = tested(p, backend, seed, options.cases)
        except CheckArgumentError:
            continue
        answer["by_backend"][backend] = {
            "modes": Counter(found.modes), "results": Counter(found.results), "written": list(found.written),
        }  # fmt: skip
        for fault in found.faults:
            kinds[fault.kind] += 1
            answer["faults"].append(told(fault, options, shrink=kinds[fault.kind] == 1))
    forget(p)
    return {**answer, "seconds": time.process_time() - start}


def told(fault: Any, options: argparse.Namespace, shrink: bool) -> dict[str, str]:
    """A fault in words, with a script where it is the first of its kind."""
    from fuzz_shrinking import script, shrunk

    told = {"kind": fault.kind, "text": str(fault), "backend": fault.backend}
    if shrink and options.out is not None:
        small = shrunk(fault, SHRINK_SECONDS)
        path = options.out / f"{fault.program.name.lower()}_{fault.backend}.py"
        path.write_text(script(small, f"tests/fuzz/run.py, seed {fault.program.name[7:]}"), encoding="utf-8")
        told |= {"text": str(small), "script": str(path)}
    return told


def share(backend: str) -> tuple[str, int]:
    """"interpret:10" is every tenth program on interpret."""
    name, _, one_in = backend.partition(":")
    return name, int(one_in or 1)


def operations(text: str) -> list[str]:
    """The operations that a program writes, by name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            found.add(node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", ""))
        elif isinstance(node, ast.BinOp | ast.UnaryOp):
            found.add(NAMES.get(type(node.op).__name__, ""))
        elif isinstance(node, ast.Compare):
            found.add(NAMES.get(type(node.ops[0]).__name__, ""))
        elif isinstance(node, ast.Subscript):
            found.add("getitem")
    return sorted(found - NO_OPERATIONS - PYTHONS - {""})


# ------------------------------------------------------------------ the processes
@dataclass
class Worker:
    """A process, and the seed that it is at."""

    options: argparse.Namespace
    seed: int | None = None
    began: float = 0.0
    used: float = 0.0
    done: int = 0

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=self.options.work, args=(theirs, self.options), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, seed: int) -> None:
        self.seed, self.began, self.used = seed, time.monotonic(), cpu_seconds(self.process.pid)
        self.pipe.send(seed)

    def take(self) -> dict[str, Any] | None:
        """The answer; a fault where the process died, or takes too long; None where it is still at it."""
        limit = self.options.timeout
        took, used = time.monotonic() - self.began, cpu_seconds(self.process.pid) - self.used
        if self.pipe.poll():
            try:
                answer: dict[str, Any] = self.pipe.recv()
                self.done, self.seed = self.done + 1, None
                return answer
            except EOFError:
                self.process.join()
                return self.lost(f"the process died, exit code {self.process.exitcode}")
        return self.lost(f"no answer in {limit:g} s") if used > limit or took > PATIENCE * limit else None

    def lost(self, what: str) -> dict[str, Any]:
        answer = {"seed": self.seed, "faults": [{"kind": what, "text": f"Program{self.seed}: {what}"}], "dead": True}
        self.seed = None
        self.stop()
        return answer

    def stop(self) -> None:
        if self.seed is None and self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()


def cpu_seconds(pid: int | None) -> float:
    """What a process has used of the processor, where Linux tells: on a busy machine a program takes long."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def answers(seeds: Iterable[int], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What became of each seed, as it comes."""
    left = iter(seeds)
    workers = [Worker(options) for _ in range(options.jobs)]
    for worker in list(workers):
        if not _next(worker, left):
            workers.remove(worker)
            worker.stop()
    while workers:
        wait([w.pipe for w in workers], timeout=1.0)
        for i, worker in reversed(list(enumerate(workers))):
            answer = worker.take()
            if answer is None:
                continue
            yield answer
            if answer.get("dead"):
                workers[i] = worker = Worker(options)
            elif worker.done >= PROGRAMS_PER_PROCESS or answer["memory"] > MEMORY:
                worker.stop()
                workers[i] = worker = Worker(options)
            if not _next(worker, left):
                workers.remove(worker)
                worker.stop()


def _next(worker: Worker, left: Iterator[int]) -> bool:
    seed = next(left, None)
    if seed is not None:
        worker.give(seed)
    return seed is not None


# ------------------------------------------------------------------ what a run adds up to
@dataclass
class Sum:
    """Counts over programs."""

    seeds: list[int] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    ops: Counter[str] = field(default_factory=Counter)
    backends: dict[str, dict[str, Counter[str]]] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, answer: dict[str, Any]) -> None:
        self.seeds.append(answer["seed"])
        self.faults += [{"seed": answer["seed"], **f} for f in answer["faults"]]
        self.ops.update(answer.get("ops", ()))
        self.seconds += answer.get("seconds", 0.0)
        for backend, found in answer.get("by_backend", {}).items():
            into = self.backends.setdefault(backend, {n: Counter() for n in ("runs", "modes", "results", "reasons")})
            into["runs"]["as written, in part" if found["written"] else "compiled"] += 1
            into["modes"].update(found["modes"])
            into["results"].update(found["results"])
            into["reasons"].update(found["written"])

    def to_dict(self) -> dict[str, Any]:
        faults = [{"seed": f["seed"], "kind": f["kind"]} for f in self.faults]
        backends = {
            name: {"cases": sum(found["modes"].values()), **{n: dict(c.most_common()) for n, c in found.items()}}
            for name, found in self.backends.items()
        }
        return {
            "seeds": ranges(self.seeds), "programs": len(self.seeds), "faults": faults, "backends": backends,
            "ops": dict(self.ops.most_common()),
            "seconds_per_program": round(self.seconds / max(len(self.seeds), 1), 4),
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [f"{len(self.seeds)} programs, {self.seconds / max(len(self.seeds), 1):.3f} s of one core each"]
        for name, found in self.backends.items():
            lines += [f"{name}: {sum(found['modes'].values())} cases; programs {_counts(found['runs'])}"]
            lines += [f"  modes: {_counts(found['modes'])}", f"  results: {_counts(found['results'])}"]
            lines += [f"  {n} {reason}" for reason, n in found["reasons"].most_common(12)]
        lines += [f"{len(self.ops)} operations: {_counts(self.ops)}"]
        kinds = Counter(f["kind"] for f in self.faults)
        return "\n".join([*lines, f"{len(self.faults)} faults" + (f": {_counts(kinds)}" if kinds else "")])


def _counts(found: Counter[str]) -> str:
    return ", ".join(f"{name} {n}" for name, n in found.most_common())


def ranges(seeds: Iterable[int]) -> list[list[int]]:
    """[3, 1, 2, 7] -> [[1, 4], [7, 8]]"""
    found: list[list[int]] = []
    for seed in sorted(set(seeds)):
        if found and found[-1][1] == seed:
            found[-1][1] += 1
        else:
            found.append([seed, seed + 1])
    return found


def covered(found: Sequence[Sequence[int]]) -> set[int]:
    return {seed for a, b in found for seed in range(a, b)}


def still_wrong(runs: Sequence[dict[str, Any]]) -> set[int]:
    """The seeds whose last run, in the order of the runs, told of a fault."""
    found: set[int] = set()
    for run in runs:
        found = (found - covered(run["seeds"])) | {f["seed"] for f in run["faults"]}
    return found


# ------------------------------------------------------------------ runs in pieces
def saved(path: Path) -> dict[str, Any]:
    empty: dict[str, Any] = {"what": "tests/fuzz/run.py", "runs": []}
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else empty


def keep(path: Path, whole: dict[str, Any], total: Sum) -> None:
    """The file with this run as its last."""
    runs = [*whole["runs"], {**outcome.surroundings(), **total.to_dict()}]
    seeds = [s for run in runs for s in covered(run["seeds"])]
    ops: Counter[str] = Counter()
    for run in runs:
        ops.update(run["ops"])
    summed = {
        "programs": len(set(seeds)), "seeds": ranges(seeds), "operations": len(ops),
        "cases": sum(b["cases"] for run in runs for b in run["backends"].values()),
        "faults": sum(len(run["faults"]) for run in runs), "open": sorted(still_wrong(runs)),
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**whole, "total": summed, "runs": runs}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def memory() -> int:
    """The most that this process had, for `answers` to end it by."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def answer_seeds(pipe: Connection, answer: Callable[[int], dict[str, Any]]) -> None:
    """Sends what is found for each seed that comes, with the time and the memory that it took."""
    for seed in iter(pipe.recv, None):
        start = time.process_time()
        try:
            told = answer(seed)
        except Exception:
            told = {"faults": [{"kind": "the fuzzer raises", "text": traceback.format_exc()}]}
        pipe.send({"seed": seed, **told, "seconds": time.process_time() - start, "memory": memory()})


def run_by_seed(what: str, description: str, work: Work, total: Sum, argv: Sequence[str] | None = None) -> int:
    """A fuzzer of one program for each seed: prints faults as they come, then a sum, and adds it to a file.

    what: the script, by which the file tells whose it is. work: answers each seed, in a process of its own.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("n", type=int, nargs="?", default=200, help="how many seeds")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one seed")
    parser.add_argument("--json", type=Path, help="a file that the run is added to")
    options = parser.parse_args(argv)
    options.work = work
    for answer in answers(range(options.seed, options.seed + options.n), options):
        total.add(answer)
        for fault in answer["faults"]:
            print(f"FAULT seed {answer['seed']}: {fault['kind']}\n{fault['text']}", flush=True)
    if options.json is not None:
        keep(options.json, {**saved(options.json), "what": what}, total)
    print(total)
    return 1 if total.faults else 0


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="random programs, compiled, against eager")
    parser.add_argument("n", type=int, nargs="?", default=1000, help="how many programs")
    parser.add_argument("--seed", type=int, default=0, help="the first program")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--cases", type=int, default=4, help="cases for each program")
    parser.add_argument("--backend", action="append", help="NAME or NAME:ONE_IN; reference and interpret:10 by default")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of processor time for one program")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz-faults"), help="where scripts of faults go")
    parser.add_argument("--json", type=Path, help="a file that the run is added to")
    parser.add_argument("--resume", action="store_true", help="without the seeds that the --json file has as right")
    options = parser.parse_args(argv)
    options.work = work
    options.backend = [word for given in options.backend or DEFAULT for word in given.split()]
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parsed(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    whole = saved(options.json) if options.json else {}
    runs = whole.get("runs", []) if options.resume else []
    done = covered([r for run in runs for r in run["seeds"]]) - still_wrong(runs)
    seeds = [s for s in range(options.seed, options.seed + options.n) if s not in done]
    total, told_at = Sum(), time.monotonic()
    for answer in answers(seeds, options):
        total.add(answer)
        for fault in answer["faults"]:
            print(f"FAULT seed {answer['seed']}: {fault['kind']}\n{fault['text']}", fault.get("script", ""), flush=True)
        if time.monotonic() - told_at > TOLD_EACH:
            told_at = time.monotonic()
            done_so_far = f"{len(total.seeds)} of {len(seeds)} programs, {len(total.faults)} faults"
            print(done_so_far, file=sys.stderr, flush=True)
            if options.json:
                keep(options.json, whole, total)
    if options.json and total.seeds:
        keep(options.json, whole, total)
    print(total)
    return 1 if total.faults else 0
