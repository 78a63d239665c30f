"""Results as text: one table over the cases, the host times, the first calls, and the goals. Markdown or aligned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..codegen.devices import DEVICES
from ..runtime.kernels.machine_code.pipes import RATES
from . import loop_report, stream_report
from .goals import GOALS, issued_over, joined, keeps_time, modelled
from .instructions import DEVICE
from .kernels import TARGETS
from .plans import DIRECTIONS, TARGET
from .streams import share

Results = Mapping[str, Any]
Row = Sequence[str]

CASES_HEAD = (
    "case", "launches", "Inductor", "bytes / minimal", "Inductor", "GB moved", "Inductor", "saved, MB", "asked, MB",
    "registers", "spills 80 90 100 942", "shared, kB", "16-byte loads", "stores",
)  # fmt: skip


# ------------------------------------------------------------------ tables
def aligned(head: Row, rows: Sequence[Row]) -> str:
    """Columns by spaces, the first one to the left."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * w for w in widths], *rows]
    return "\n".join("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines)


def markdown(head: Row, rows: Sequence[Row]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---", *["---:"] * (len(head) - 1)], *rows])


# ------------------------------------------------------------------ the cases
def case_rows(results: Results) -> list[Row]:
    """One row a case, from whichever of the parts there are; "-" for what was not measured."""
    parts = {p: {r["case"]: r for r in results.get(p, {}).get("rows", ())} for p in ("plans", "inductor", "kernels")}
    names = dict.fromkeys(name for by_case in parts.values() for name in by_case)
    found = {name: {part: rows.get(name) for part, rows in parts.items()} for name in names}
    return [[n, *_planned(f["plans"], f["inductor"]), *_needed(f["kernels"])] for n, f in found.items()]


def _planned(plan: Mapping[str, Any] | None, peer: Mapping[str, Any] | None) -> Iterator[str]:
    for cell in (_launches, _ratios, _gigabytes):
        yield cell(plan) if plan else "-"
        yield "error" if peer and "error" in peer else cell(peer) if peer else "-"
    yield f"{plan['saved'] / 1e6:.1f}" if plan else "-"
    yield f"{plan['asked'] / 1e6:.1f}" if plan else "-"


def _launches(row: Mapping[str, Any]) -> str:
    return "{} + {}".format(*row["launches"])


def _ratios(row: Mapping[str, Any]) -> str:
    return "  ".join(f"{b / max(1, m):.2f}" for b, m in zip(row["bytes"], row["minimal"], strict=True))


def _gigabytes(row: Mapping[str, Any]) -> str:
    return f"{sum(row['bytes']) / 1e9:.3f}"


def _needed(row: Mapping[str, Any] | None) -> Iterator[str]:
    if row is None:
        yield from "-----"
        return
    here = row["targets"][TARGET]
    yield _pair(here, lambda n: str(n["registers"]))
    yield " ".join(_most(row["targets"].get(t, ()), "spills") for t in TARGETS)
    yield _pair(here, lambda n: f"{n['shared'] / 1024:.1f}")
    for kind in ("load", "store"):
        yield _pair(here, lambda n, kind=kind: _percent(share(n["streams"][kind])))


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _pair(needs: Sequence[Any], text: Any) -> str:
    return "  ".join("-" if n is None else text(n) for n in needs)


def _most(needs: Sequence[Any], name: str) -> str:
    if any(n and n["errors"] for n in needs):
        return "error"
    return str(max((n[name] for n in needs if n), default="-"))


# ------------------------------------------------------------------ the other parts
HOST_HEAD = ("microseconds per call", "forward", "forward+backward", "forward, no grad")
PEER_NAMES = {
    "null": "null Function, straight from C++", "null apply": "null Function", "eager": "eager",
    "compile": "torch.compile", "triton": "fusegrad, launches stubbed", "reference": "fusegrad on reference",
}  # fmt: skip


def host_rows(results: Results) -> list[Row]:
    """The least and, in brackets, the middle half."""
    return [[PEER_NAMES.get(peer, peer), *(_microseconds(t) for t in times.values())]
            for row in results["host"]["rows"] for peer, times in row.get("peers", {}).items()]  # fmt: skip


STYLES_HEAD = ("microseconds per call", "eager", "launches stubbed", "reference", "eager, both", "stubbed", "reference")


def style_rows(results: Results) -> list[Row]:
    """A row per way of writing and calling: forward, then forward and backward."""
    styles = next((row["styles"] for row in results.get("host", {}).get("rows", ()) if "styles" in row), {})
    return [
        [name, *(f"{peers[p][what]:.1f}" for what in ("forward", "both") for p in ("eager", "triton", "reference"))]
        for name, peers in styles.items()
    ]


CPU_HEAD = ("milliseconds", "forward", "recycling", "forward+backward", "recycling", "torch.compile", "inductor")


def cpu_rows(results: Results) -> list[Row]:
    """Eager, then `reference`, of each direction; what goes through Inductor in the last two."""
    return [_cpu_row(row["case"], row["milliseconds"]) for row in results["cpu"]["rows"] if "error" not in row]


def _cpu_row(case: str, peers: Mapping[str, Any]) -> Row:
    def pair(what: str) -> str:
        times = [peers[peer].get(what) for peer in ("eager", "reference")]
        return "-" if None in times else "  ".join(_milliseconds(t) for t in times)

    inductor = [peers[p]["both"] if p in peers else None for p in ("compile", "inductor")]
    directions = ("forward", "forward recycling", "both", "both recycling")
    return [case, *map(pair, directions), *("-" if t is None else _milliseconds(t) for t in inductor)]


def _milliseconds(time: float) -> str:
    return f"{time:.1f}" if time >= 1 else f"{time:.4f}"


def _microseconds(time: Mapping[str, float]) -> str:
    return f"{time['least']:.1f} ({time['lower']:.1f}-{time['upper']:.1f})"


LATENCY_HEAD = (
    "milliseconds", "cold", "warm", "of which on the processor", "torch.compile cold", "warm", "reference",
    "each of 100 batch sizes", "compilations",
)  # fmt: skip


def latency_rows(results: Results) -> list[Row]:
    """The first forward of a fresh process."""
    return [
        [
            row["function"],
            *(_first(row["triton"][s], "forward") for s in ("cold", "warm")),
            "  ".join(_first(row["triton"][s], "processor") for s in ("cold", "warm")),
            *(_first(row["compile"][s], "forward") for s in ("cold", "warm")),
            _first(row["reference"]["cold"], "forward"),
            _first(row["batches"], "milliseconds"),
            _first(row["batches"], "compiles"),
        ]
        for row in results["latency"]["rows"]
    ]


def _first(found: Mapping[str, Any], name: str) -> str:
    return "error" if "error" in found else f"{found[name]:.0f}" if name in found else "-"


MODEL_HEAD = (
    "case", "direction", "instructions / 32", "budget", "share", "fast", "Inductor", "Liger", "programs", "per SM",
    "occupancy", "waves", "kB in flight", "model us", "over a copy's", "bound by", "goals missed",
)  # fmt: skip


def model_rows(results: Results) -> list[Row]:
    """A row for each direction of each case that was modelled."""
    rows = joined(results, "instructions", "peers")
    return [[row["case"], d, *_modelled(row, d), _missed(row, d)] for row in rows for d in DIRECTIONS if row[d]]


def _missed(row: Mapping[str, Any], direction: str) -> str:
    missed = {"time": not keeps_time(row, direction), "instructions": issued_over(row, direction) > 1}
    return ", ".join(name for name, is_missed in missed.items() if is_missed) or "-"


def _modelled(row: Mapping[str, Any], direction: str) -> Iterator[str]:
    m, fast = row[direction], row["fast"][direction]
    yield f"{m['per_32']:.1f}" + ("+" if m["data_dependent"] else "")
    yield f"{m['budget']:.1f}"
    yield f"{m['share']:.2f}"
    yield "-" if fast is None else f"{fast:.1f}"
    for peer in ("inductor", "liger"):
        counted = ((row["peers"] or {}).get(peer) or {}).get(direction)
        yield f"{counted * 32 / m['elements']:.1f}" if counted is not None else "-"
    yield from (f"{m['programs']:,}", str(m["resident"]), f"{m['occupancy']:.0%}", f"{m['waves']:.2f}")
    yield from (f"{m['flight'] / 1024:.0f}", f"{m['microseconds']:,.1f}", f"{m['over_copy']:.2f}", m["bound"])


KEPT_HEAD = (
    "Function", "direction", "time kept", "over a copy's, bound by", "instructions kept", "over the budget, fast",
)  # fmt: skip


def kept_rows(results: Results) -> list[Row]:
    """How many shapes of a Function keep the goals of time and instructions, all together first; which miss."""
    found: dict[tuple[str, str], list[Any]] = {}
    for row, direction in modelled(joined(results, "instructions", "peers")):
        found.setdefault((row["case"].partition("[")[0], direction), []).append(row)
    all_of = {d: [row for (_, of), rows in found.items() for row in rows if of == d] for d in DIRECTIONS}
    totals = [["all", d, _share_kept(rows, d, keeps_time), "", _share_kept(rows, d, _keeps_issue), ""]
              for d, rows in all_of.items()]  # fmt: skip
    return [*totals, *(_kept_row(function, d, rows) for (function, d), rows in found.items())]


def _keeps_issue(row: Mapping[str, Any], direction: str) -> bool:
    return issued_over(row, direction) <= 1


def _share_kept(rows: Sequence[Any], direction: str, keeps: Any) -> str:
    return f"{sum(keeps(row, direction) for row in rows)} of {len(rows)}"


def _kept_row(function: str, direction: str, rows: Sequence[Any]) -> Row:
    late, many = ([r for r in rows if not keeps(r, direction)] for keeps in (keeps_time, _keeps_issue))
    times = [f"{_shape(r)} {r[direction]['over_copy']:.2f} {r[direction]['bound']}" for r in late]
    issued = [f"{_shape(r)} {r[direction]['share']:.2f}, {_fast_share(r, direction)}" for r in many]
    return [function, direction, _share_kept(rows, direction, keeps_time), "; ".join(times) or "-",
            _share_kept(rows, direction, _keeps_issue), "; ".join(issued) or "-"]  # fmt: skip


def _shape(row: Mapping[str, Any]) -> str:
    return "[" + str(row["case"]).partition("[")[2]


def _fast_share(row: Mapping[str, Any], direction: str) -> str:
    fast = row["fast"][direction]
    return "-" if fast is None else f"{fast / row[direction]['budget']:.2f}"


CAUSES_HEAD = ("cause", "time missed", "over a copy's", "instructions missed", "over the budget")
CAUSES: tuple[tuple[str, str], ...] = (
    ("[512,1024]", "512x1024: what a program does before and after its few rows weighs, and memory answers late"),
    (",50257]", "rows of 50257: they begin at odd places, and are read in several strips or passes"),
    ("SmoothedCrossEntropy", "logits that are read once: a tanh, an exponential and three sums of each"),
    ("ColumnSoftmax", "columns: two passes, each with its exponentials"),
    ("16384]", "rows of 16384 and six sums of each: three passes"),
    ("", "others"),
)
"""Of whose cases which part of the name; the first that fits."""


def cause_rows(results: Results) -> list[Row]:
    """Why shapes miss the goals of time and instructions, and by how much at least and at most."""
    found = list(modelled(joined(results, "instructions", "peers")))
    late = _by_cause(found, keeps_time, "over_copy")
    many = _by_cause(found, _keeps_issue, "share")
    return [[text, *_count_and_span(late.get(part)), *_count_and_span(many.get(part))]
            for part, text in CAUSES if part in late or part in many]  # fmt: skip


def _by_cause(found: Iterable[tuple[Any, str]], keeps: Any, figure: str) -> dict[str, list[float]]:
    missed: dict[str, list[float]] = {}
    for row, direction in found:
        if not keeps(row, direction):
            part = next(part for part, _ in CAUSES if part in row["case"])
            missed.setdefault(part, []).append(row[direction][figure])
    return missed


def _count_and_span(values: Sequence[float] | None) -> Row:
    return ["-", "-"] if not values else [str(len(values)), f"{min(values):.2f} to {max(values):.2f}"]


PIPES = ("float", "integer", "memory", "uniform", "control", "special")
ISSUED_HEAD = ("case", "direction", "over a copy's", "budget", "issued", *PIPES, "special unit")


def issued_rows(results: Results) -> list[Row]:
    """What is issued, by pipe, where a goal of time or instructions is missed."""
    found = modelled(joined(results, "instructions", "peers"))
    return [_issued_row(row, d) for row, d in found
            if "pipes" in row[d] and not (keeps_time(row, d) and _keeps_issue(row, d))]  # fmt: skip


def _issued_row(row: Mapping[str, Any], direction: str) -> Row:
    m = row[direction]
    pipes, busy = m["pipes"], m["pipes"].get("special", 0.0) / RATES[DEVICES[DEVICE].target]["special"]
    figures = (m["budget"], m["per_32"], *(pipes.get(pipe, 0.0) for pipe in PIPES), busy)
    return [row["case"], direction, f"{m['over_copy']:.2f}", *(f"{n:.1f}" for n in figures)]


GOALS_HEAD = ("goal", "limit", "worst", "at", "verdict")


def goal_rows(results: Results) -> list[Row]:
    """Every goal whose part was run."""
    return [_goal_row(goal, found) for goal in GOALS if (found := goal.verdict(results)) is not None]


def _goal_row(goal: Any, found: Mapping[str, Any]) -> Row:
    sign = ">=" if goal.lowest else "<="
    verdict = "met" if not found["missed"] else f"missed by {found['missed']} of {found['of']}"
    return [goal.name, f"{sign} {goal.limit:g}", f"{found['worst']:.4g}", found["at"], verdict]


# ------------------------------------------------------------------ everything
SECTIONS = (
    (
        "The goals that need no GPU",
        GOALS_HEAD,
        goal_rows,
        ("plans", "kernels", "instructions", "host", "latency", "cpu"),
    ),
    ("Host time", HOST_HEAD, host_rows, ("host",)),
    ("Ways of writing and calling", STYLES_HEAD, style_rows, ("host",)),
    ("Large tensors on a CPU", CPU_HEAD, cpu_rows, ("cpu",)),
    ("The first call", LATENCY_HEAD, latency_rows, ("latency",)),
    ("The goals of time and instructions, by Function", KEPT_HEAD, kept_rows, ("instructions",)),
    ("What misses them", CAUSES_HEAD, cause_rows, ("instructions",)),
    ("What they issue", ISSUED_HEAD, issued_rows, ("instructions",)),
    *stream_report.SECTIONS,
    *loop_report.SECTIONS,
    ("A model of an H100", MODEL_HEAD, model_rows, ("instructions",)),
    ("The cases", CASES_HEAD, case_rows, ("plans", "inductor", "kernels")),
)
NOTES = {
    **stream_report.NOTES,
    **loop_report.NOTES,
    "The goals that need no GPU": "Where a limit is missed, `worst` says by how much and where.",
    "Host time": "An RMSNorm on 8x16 numbers, one thread. The least of many rounds, in brackets the middle half.",
    "Ways of writing and calling": "Functions on 8x16 numbers (`benchmarks/styles.py`), one thread, the least "
    "processor time of many rounds: forward, then forward and backward. A tree of tensors: eager stands for a Function "
    "that is called with the tensors taken apart by hand.",
    "Large tensors on a CPU": "Processor time of one thread in float32, the least of several rounds: eager and "
    "`reference`, while other processes ran beside it. Recycling: with `GLIBC_TUNABLES=glibc.malloc."
    "mmap_threshold=1073741824:glibc.malloc.trim_threshold=1073741824`, which serves eager as well. The last columns: "
    "forward and backward through torch.compile and through "
    '`backend="inductor"`.',
    "The first call": "The first forward in a fresh process after its imports, 4096x4096. Without a GPU: tracing, "
    "code generation and Triton's compilation for sm_90, without loading the binary; the quickest of three processes. "
    "Cold: every cache empty. Warm: Triton's and fusegrad's disk caches filled. torch.compile and `reference` run on "
    "this CPU, on 64 rows.",
    "The goals of time and instructions, by Function": (
        "Out of the model below. Time: at most 1.1 times that of a copy of as many bytes from 4096x4096 on, 1.25 "
        "times at 512x1024. Instructions: at most the budget, or 1.05 of those of the better peer, where one was "
        "counted (one shape a Function, and what is over its budget). Behind each shape that misses: how much, and "
        "what is waited for; its "
        'instructions over the budget, and those with `numerics="fast"`: what lies between the two is the price of '
        "eager's roundings and exact quotients. Where both are above one the work itself is too much, or is done "
        "twice: rows of 50257 begin at odd places, long rows are read and computed again in a second pass. Strips of "
        "a row share what one of them reduces along it, and it is counted once; what the last program adds up at the "
        "end is not counted. SwiGLU and GeGLU at 512x1024 wait for memory several times: the assembler puts one load "
        "behind the arithmetic of another, behind a barrier too. RMSNormFP8 at 512x1024 has all that it reads on its "
        "way at once; it writes more than it reads."
    ),
    "What misses them": (
        "The same misses, by what their shapes or Functions have in common; the next table has what each of them "
        "issues. Not among them any more: rows as long as two powers of two are together, held whole, are two tiles, "
        "of 4096 and of 1024 columns, where they filled 8192 lanes of one (PolyNorm backward at 4096x5120: 85.5 "
        "instructions, now 47.9; RMSNormFP8 forward: 57.5, now 35.6; the 256 threads of a "
        "backward read 8 bytes each of the second one); where chunks divide a row, a guard says so and "
        "they have no masks (ColumnSoftmax forward at 8192x16384: 37.1, now 33.3), and half of the threads read them "
        "where they are read wide (PolyNorm backward at 8192x16384: 80.0, now 65.1; GroupNorm backward: 39.7, now "
        "32.3). What is left. Logits that are read once: two instructions of "
        "the special unit for a tanh and one for an exponential, at an eighth of an instruction a clock, take 24 "
        "where forward has 17.7 while its two bytes come, in any kernel; its float instructions alone are above the "
        "budget, and of the integer ones the most are maxima (a clamp, and the row's), the choice between both "
        "formulas of the tanh and its sign: what exactness is made of. PolyNorm backward at 16384 columns: six sums "
        "of a row that does not fit in registers, three passes; eager's multiplications and additions in these, each "
        "rounded apart, 44.3, and the conversions of both rows in each pass and of the result, 6.5, are 50.8 of "
        "53.0, before anything is addressed or copied. At 8192 they are 37.9 of 51.6: 20 multiplications and "
        "13 additions of the class's own expression, and 4.9 of the sums between threads; powers are shared with the "
        "sums, x * x * x is (x * x) * x, and what a common factor would save (3 * w * rstd) would round otherwise. "
        "Rows of 50257: weights begin elsewhere than their rows, and are read element by element, two for each "
        "element by LayerNorm forward; backwards of norms divide them into 13 strips, and the rows of each into "
        "eight kinds that begin alike: 104 programs on 132 multiprocessors; rows side by side, as those of a column "
        "are, have no boundary in common: two bytes an access, too few for copies past the registers, 8 kB of 40 on "
        "their way. At 50304 columns, the same vocabulary padded, LayerNorm issues 31.1 and 45.4, ColumnSoftmax 32.5 "
        "and 20.2, BiasGELU 32.1 and 48.9, all in the time of a copy; RMSNormFP8 forward, whose row is read twice, "
        "58.1 of 44.1. At 512x1024 a program has few rows, what it does before and after them is not shared by more, "
        "and memory is waited for once or twice. Where more than the budget is issued, the better peer was counted "
        "for the same shape: of most of these it issues more, and the goal is kept. LayerNorm backward at 4096 rows "
        "has 90 programs: partial sums of "
        "132 would move more than 1.03 of the minimum."
    ),
    "What they issue": (
        "Of each miss the instructions for 32 elements by the pipe that takes them, beside the budget, in which all "
        "of them have to be issued. Float: additions, multiplications and conversions of two bytes to four, in part; "
        "integer: the other conversions, comparisons, maxima, choices and addresses. The last column is the time "
        "that the special unit takes for its own, in instructions: above the budget no kernel meets the goal."
    ),
    "A model of an H100": (
        "A model, not a measurement: no time here is a GPU's. Machine code for sm_90 is read instead of run. "
        "Instructions: those that warps issue for 32 elements of the largest tensor, by following a lane of some "
        "programs through the kernel's control flow; a branch on data is taken both ways, a slow path (of a division)"
        " is not, a loop whose end hangs on data counts once (+), as does what teams do again for late programs. "
        "Budget: what 132 multiprocessors issue, four instructions a clock at 1.75 GHz, while the kernel's bytes move "
        "at 3.35 TB/s: with more, issue is what is "
        'waited for; share: instructions over budget. Fast: with `numerics="fast"`; otherwise eager\'s roundings are '
        "kept. Inductor in the best of its own configurations, Liger with its own launches, for the same case; a "
        "gradient that Liger computes in forward is counted there. Programs, those resident on a multiprocessor (per "
        "SM), occupancy, waves and bytes on their way: of the longest launch. Model us: the longer of bytes by "
        "bandwidth and instructions by issue (of each pipe, too), wave by wave, with what the last wave leaves idle; "
        "where fewer bytes are on their way than memory needs (0.7 us of latency), memory waits. Left out: the L2 "
        "cache, bank conflicts, instructions that wait for one another, what the last program adds up, launches. Over"
        " a copy's: over the time of a copy of as many bytes, which few bytes keep waiting as well."
    ),
    "The cases": "forward and backward (forward + backward for launches; registers, shared memory and accesses on "
    "sm_90, the worst kernel of each). Bytes are those that the plans move, a row that is read again out of L2 counted "
    "once; minimal is every input read once and every output written once. Inductor: torch.compile's own passes, "
    "lowering and count of bytes for the same forward and backward on an H100, each over its own minimum; a row that a "
    "kernel of it loops over twice is counted once, too. 16-byte loads and stores: their share of the bytes of the "
    "access instructions for the tensors that make up a kernel's bytes, without scalars, partial sums and what is "
    "stored of a row that begins or stops inside a group of 16 bytes, at these ends.",
}


def text(results: Results) -> str:
    """For a terminal."""
    return "\n\n".join(f"{title}\n\n{aligned(head, rows(results))}" for title, head, rows, _ in _present(results))


def document(results: Results, picture: str | None) -> str:
    """docs/benchmarks.md."""
    lines = ["# Measured without a GPU", "", "Written by `make bench ARGS=--write-docs`.", ""]
    if picture:
        lines += [f"![bytes, launches, host time and first calls]({picture})", ""]
    for title, head, rows, parts in _present(results):
        lines += [f"## {title}", "", NOTES[title], "", about(results, parts), "", markdown(head, rows(results)), ""]
    return "\n".join(lines)


def _present(results: Results) -> Iterator[tuple[str, Row, Any, tuple[str, ...]]]:
    return (section for section in SECTIONS if any(part in results for part in section[3]))


def about(results: Results, parts: Sequence[str]) -> str:
    """The machines, versions and dates of some parts, each with the parts and the rows that it is of."""
    found: dict[str, list[str]] = {}
    for name in parts:
        part = results.get(name, {"rows": []})
        rows = Counter(label(row.get("measured", part)) for row in part["rows"])
        for text, count in rows.items():
            found.setdefault(text, []).append(name if len(rows) == 1 else f"{name} ({count} row{'s' * (count > 1)})")
    return "Measured on " + "; ".join(f"{text}: {', '.join(names)}" for text, names in found.items()) + "."


def label(measured: Mapping[str, Any]) -> str:
    """A machine, its versions and a date."""
    machine = measured.get("machine", {"processor": "a machine that is not on record", "cores": "?", "versions": {}})
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    facts = [f"{machine['processor']}, {machine['cores']} cores", versions, measured.get("date", "")]
    return ", ".join(filter(None, facts))
