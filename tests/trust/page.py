"""docs/trust.md out of benchmarks/results/trust: what was promised, what was measured, by which command, when.

    python tests/trust/page.py

A number that no run has written down stands as "not measured".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outcome import RESULTS, ROOT

PAGE = ROOT / "docs" / "trust.md"
Told = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A promise, the command that measures it, the file with its numbers, and these in words."""

    promise: str
    command: str
    file: str
    measured: Callable[[Told], str]


HEAD = """# What is measured, and how

A compiler that is wrong once in a million programs is not trusted. Each row below is a promise, the command that
measures it, and what it measured last. The commands are in the repository and need no GPU; a short slice of each runs
in `make test`. This page is written by `python tests/trust/page.py` from `benchmarks/results/trust/*.json`, which hold
the seeds, the commit and everything else that a run told.

Nothing here ran on a GPU: kernels ran through Triton's interpreter, or were compiled for a GPU and read.
"""


def number(value: int) -> str:
    return f"{value:,}"


def facts(told: Told) -> Told:
    """Commit, date, versions, machine: of a run in pieces, those of its last piece."""
    last = told["runs"][-1] if "runs" in told else told
    versions = last.get("versions") or {n: last[n] for n in ("python", "torch", "triton") if n in last}
    whole = versions if isinstance(versions, str) else ", ".join(f"{n} {v}" for n, v in versions.items())
    return {"commit": last["commit"][:9], "date": last["date"], "where": f"{last['machine']}; {whole}"}


def seeds(told: Told) -> str:
    return ", ".join(f"{first:,} to {end - 1:,}" for first, end in told["total"]["seeds"])


def fuzzed(told: Told) -> str:
    total = told["total"]
    programs, cases = number(total["programs"]), number(total["cases"])
    still = "" if "open" not in total else f" found on the way, {len(total['open'])} of them left"
    return f"{programs} programs (seeds {seeds(told)}), {cases} cases, {total['faults']} faults{still}"


def proved(told: Told) -> str:
    kernels = f"{number(told['kernels_proved'])} of {number(told['kernels'])} kernels"
    by_data = f"{told['accesses_data']} under a condition on the data"
    return f"{kernels}; of {number(told['accesses'])} accesses {told['accesses_unproved']} unproved, {by_data}"


def guarded(told: Told) -> str:
    parts = [f"{number(r['trials'])} {how}: {len(r['failures'])} wrong" for how in ("in one process", "on disk")
             if (r := told.get(how))]  # fmt: skip
    return "sequences of worlds, " + ", ".join(parts)


def damaged(told: Told) -> str:
    kinds = ("wrong", "raised", "executed", "hung", "unhealed")
    return f"{number(told['mutations'])} mutations: " + ", ".join(f"{told[k]} {k}" for k in kinds if k in told)


def killed(told: Told) -> str:
    left = ", ".join(f"{told[name]} {name}" for name in ("wrong", "failed", "orphans", "locked"))
    return f"{told['kills']} kills: {left}; slowest restart {told['seconds_of_the_slowest_restart']} s"


def shared(told: Told) -> str:
    rounds = told["rounds"]
    wrong = sum(r["wrong"] + len(r["failed"]) for r in rounds)
    twice, made = sum(len(r["written_twice"]) for r in rounds), [f"{r['compiled']} of {r['kernels']}" for r in rounds]
    each = f"kernels compiled {', '.join(made)}, {twice} written twice"
    return f"{rounds[0]['processes']} processes, {len(rounds)} rounds: {wrong} wrong, {each}"


def one_job(told: Told) -> str:
    times = sum(told["compiled"].values())
    return f"{told['processes']} ranks: {told['kernels']} kernels, {times} compilations, {told['differ']} ranks differ"


def threaded(told: Told) -> str:
    scenes = told["scenarios"].values()
    rounds, bad = sum(s["rounds"] for s in scenes), sum(s["bad_rounds"] for s in scenes)
    captures = f"{sum(s['captures'] for s in scenes)} captures of {sum(s['expected'] for s in scenes)}"
    return f"{told['threads']} threads, {rounds} rounds of {len(scenes)} kinds: {bad} bad, {captures}"


def in_processes(told: Told) -> str:
    scenes = told["scenarios"]
    bad = [name for name, s in scenes.items() if not s["ok"]]
    return f"{len(scenes) - len(bad)} of {len(scenes)} right" + (f"; not: {', '.join(bad)}" if bad else "")


def surrounded(told: Told) -> str:
    bad = [name for name, said in told["environments"].items() if said != "right"]
    whole = f"{told['right']} of {len(told['environments'])} right"
    return whole + (f"; not: {', '.join(bad)}" if bad else "")


def soaked(told: Told) -> str:
    growth = told["growth_bytes"] / 2**20
    calls = f"{number(told['calls'])} calls, {number(told['shapes'])} shapes"
    return f"{calls}: {growth:+.1f} MB after {number(told['warm_up_calls'])} calls, {len(told['wrong'])} wrong"


def freed(told: Told) -> str:
    blocks = f"{number(told['calls'])} calls, {told['classes']} Functions, {told['ways']} ways"
    return f"{blocks}: {number(told['kept_bytes'])} bytes kept"


def repeated(told: Told) -> str:
    different = [told["different on reference"], told["different on interpret"]]
    count = told["digests of results and text in processes"]
    processes = f"{told['processes']} processes with other hash seeds: {count} digest{'s' * (count != 1)}"
    return f"{number(told['repeats'])} repeats: {different} other bits; {processes}"


def rounded(told: Told) -> str:
    tables = {name: told[name] for name in ("primitives", "reductions", "derivatives", "operators")}
    outside = sum(bool(row["over"] or row["odd"]) for rows in tables.values() for row in rows)
    whole = ", ".join(f"{len(rows)} {name}" for name, rows in tables.items())
    return f"rows: {whole}; {outside} outside the bound, each with its reason in [Numerics](numerics.md)"


def injected(told: Told) -> str:
    total, share = told["total"], told["share"]
    taken = "" if share == 1 else f" ({share:.0%} of the functions of each scene)"
    bad = f"{total['wrong']} wrong, {total['raised']} raised, {total['reviewed']} with a reason"
    of = f"{number(told['places'])} functions in {total['scenes']} ways of calling"
    since = told.get("since")
    now = "" if since is None else (
        f"; of those raised, at `{since['commit']}`: {since['right']} right, {since['reviewed']} with a reason, "
        f"{since['raised']} raised"
    )  # fmt: skip
    return f"{of}, {number(total['hits'])} faults{taken}: {bad}{now}"


def noticed(told: Told) -> str:
    return f"{told['killed']} of {told['of']} (seed {told['seed']})"


def table(results: dict[str, Told]) -> str:
    lines = ["| promise | measured | command | when |", "|---|---|---|---|"]
    for row in ROWS:
        told = results.get(row.file)
        found = "not measured" if told is None else row.measured(told)
        when = "" if told is None else "{date}, `{commit}`".format(**facts(told))
        lines.append(f"| {row.promise} | {found} | `{row.command}` | {when} |")
    return "\n".join(lines)


def surroundings(results: dict[str, Told]) -> str:
    """Where all this was measured: each machine and set of versions once."""
    return "Measured on " + "; ".join(sorted({facts(told)["where"] for told in results.values()})) + "."


def page() -> str:
    results = {p.stem: json.loads(p.read_text(encoding="utf-8")) for p in sorted(RESULTS.glob("*.json"))}
    return "\n".join([HEAD, table(results), "", surroundings(results), ""])


def main() -> int:
    PAGE.write_text(page(), encoding="utf-8")
    return 0


ROWS = (
    Row("100,000 random Functions and functions, compiled, are what eager and float64 say", "make fuzz N=100000",
        "fuzz", fuzzed),
    Row("the same within the graphs of torch.compile and torch.export", "make fuzz-graphs", "graphs", fuzzed),
    Row("a Function as people write it (registries, modules, generators, `.data`, print) is as in eager",
        "make fuzz-habits", "habits", fuzzed),
    Row("random Functions whose scores need not be in memory are as exact as eager, NaN in the same places",
        "make fuzz-streams N=2000 SEED=100000", "streams", fuzzed),
    Row("the same divided among ranks, each way that is admitted", "make fuzz-parts N=20000", "parts", fuzzed),
    Row("the same with steps of the compiler left out, other settings", "make fuzz-configurations", "configurations",
        fuzzed),
    Row("every access of every kernel is in range for all sizes that its guard admits, offsets fit", "make proofs",
        "proofs", proved),
    Row("no two specialisations share what is wrong for one of them", "make guards N=2000", "guards", guarded),
    Row("10,000 damaged cache entries: no wrong result, no exception, no foreign byte executed", "make cache-faults",
        "cache_faults", damaged),
    Row("100 processes killed and started again: all right", "make kills", "kills", killed),
    Row("16 processes on one empty cache: all right, each key compiled once", "make sharing", "sharing", shared),
    Row("8 processes of one job on an empty cache: each kernel compiled once", "make job", "job", one_job),
    Row("32 threads on first calls: all right, each key captured once", "make threads", "threads", threaded),
    Row("forks, spawned workers, loaders, killed compilers, ends in the middle", "make processes", "processes",
        in_processes),
    Row("no compiler, no GPU, no triton, odd folders, locales, flags, sources", "make environments", "environments",
        surrounded),
    Row("1,000,000 calls over 1,000 shapes: less than 20 MB, bounded variants", "make soak", "soak", soaked),
    Row("tensors of 100 MB, called in every way, errors too: 0 bytes kept", "python tests/trust/kept.py", "kept",
        freed),
    Row("the same bits in 1,000 repeats, in threads and processes", "python tests/trust/repeats.py 1000", "repeats",
        repeated),
    Row("each function of the package raises, in calls of every kind: the answer is eager's", "make injection",
        "injection", injected),
    Row("errors at most 1.5 x eager's + 1 ulp", "make numerics", "numerics", rounded),
    Row("the tests notice 95 % of 200 changes of the generator and the transforms", "make mutants", "mutants", noticed),
)

if __name__ == "__main__":
    sys.exit(main())
