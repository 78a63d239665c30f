"""The tables of kernels with matmuls inside: what is planned for each case, and what each kernel needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .kernels import TARGETS
from .plans import TARGET

Row = Sequence[str]

PLANS = "Matmuls that are never in memory"
PLANS_HEAD = (
    "case", "", "launches", "by the library", "bytes / minimal", "eager", "scores, MB", "saved, MB", "asked, MB",
)  # fmt: skip
KERNELS = "Their kernels"
KERNELS_HEAD = (
    "case", "kernel", "registers 80 90 100 942", "spills", "shared, kB", "for tensor cores", "instructions / 32 scores",
)  # fmt: skip
PEERS = "Attention beside FlexAttention and Triton's tutorial"
PEERS_HEAD = ("case", "whose", "kernel", "registers", "spills", "shared, kB", "tensor cores", "hot loops")
NOTES = {
    PLANS: "Nothing was run or timed: plans for an H100, in bfloat16 (`benchmarks/stream_functions.py`). Such a class "
    "multiplies matrices into one that is larger than either, the scores, and uses it up in the next product or sum; "
    "kernels hold a tile of it at a time. Forward, then backward. Launches of generated kernels, and those by the "
    "library. Bytes that the plan moves, over every input read once and every output written once; a tile that is read "
    "again comes out of the L2 cache and is counted once. Eager: the same for the class's own operations, one by one. "
    "Scores: the size of the matrix of scores in bfloat16, which eager has in memory at least once. Saved: what forward"
    " saves for backward; asked: what the class itself would. The peak of memory was not measured.",
    KERNELS: "Machine code that was compiled, not run, for sm_80, sm_90, sm_100 and gfx942. Registers of a thread, "
    "and the bytes of it that are spilled. Shared memory of a program, in kB. For tensor cores: instructions in the "
    "kernel's text, not how often they run (`mma.sync`, `wgmma`, `tcgen05.mma`, `v_mfma`): one of them does as much as "
    "many of another architecture. A target where the library does some products, as the model has it, "
    "has other kernels and rows of its own. Instructions: those that warps issue on sm_90 for 32 scores, masked ones "
    "included, by the model of an H100 described below, of 16 programs that stand for all; `+` where the end of a loop "
    "hangs on data and it counts once, `-` where the machine code cannot be followed: where a lane seems to enter none "
    "of its loops, and, in rows `by hand`, with descriptors (TMA), as it was when they were counted. No such number is "
    "a time: products that are issued together overlap, and "
    "waiting is not counted. Rows `by hand` are beside them: kernels from a file outside of this repository "
    "(`--peer FILE`), compiled in the same run for sm_90, at the tile (rows x columns of scores) and the warps in "
    "their names; a better one was not searched for.",
    PEERS: "The same figures on sm_90, and the instructions of each hot loop: what a warp issues in one turn of an "
    "innermost loop with products of the tensor cores, for 32 dot products as long as a head is wide. They are read "
    "off the machine code, nothing is followed; where a mask is bounded, whole blocks and masked ones have a loop "
    "each. Forward has two dot products for a score, dq three, dk and dv four. `fusegrad` rounds where eager does; "
    "FlexAttention and the tutorial keep float32 between operations, as does `numerics=\"fast\"`. FlexAttention's "
    "are Inductor's, at the tile that it takes without tuning; its backward is one kernel with a loop for dq and one "
    "for dk and dv, and its row sums are a kernel of their own. The tutorial's (06, fused attention, in bfloat16, "
    "from a file outside of this repository) are, forward, those of its configurations with the fewest instructions "
    "of those that spill nothing and fit, backward the only one that it has; it has neither grouped heads nor masks "
    "but the causal one, and needs lengths that its blocks divide. An instruction more is no time: what is issued "
    "beside products costs as much as it is not hidden behind them.",
}


# ------------------------------------------------------------------ cases
def plan_rows(results: Mapping[str, Any]) -> list[Row]:
    """One a case, without the kernels from outside."""
    return [list(_planned(row)) for row in results["streams"]["rows"] if "launches" in row]


def _planned(row: Mapping[str, Any]) -> Iterator[str]:
    yield from (row["case"], row["what"])
    yield from (" + ".join(map(str, row[name])) for name in ("launches", "library"))
    yield from moved_over_least(row)
    yield from (f"{n / 1e6:.1f}" for n in (2 * row["scores"], row["saved"], row["asked"]))


def moved_over_least(row: Mapping[str, Any]) -> Iterator[str]:
    """What the plan moves over the minimum, forward and backward; then the same of eager."""
    return ("  ".join(map(_over, row[moved], row["minimal"])) for moved in ("bytes", "eager"))


def _over(moved: int | None, minimal: int) -> str:
    return "-" if moved is None else f"{moved / max(1, minimal):.2f}"


# ------------------------------------------------------------------ kernels
def kernel_rows(results: Mapping[str, Any]) -> list[Row]:
    """One for each kernel; targets that have the same ones share their rows, those of sm_90 first."""
    rows = [row for row in results["streams"]["rows"] if "beside" not in row]
    return [line for row in rows for alike in _alike(row["targets"]) for line in _rows(row, alike)]


def _alike(targets: Mapping[str, Any]) -> list[list[str]]:
    """The targets by the names of their kernels, and which of these have products."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for target in sorted(targets, key=lambda target: target != TARGET):
        found.setdefault(tuple((name, bool(n["products"])) for name, n in targets[target].items()), []).append(target)
    return list(found.values())


def _rows(row: Mapping[str, Any], alike: Sequence[str]) -> Iterator[Row]:
    for name in row["targets"][alike[0]]:
        found = [row["targets"][target][name] if target in alike else {} for target in TARGETS]
        yield [row["case"], name, *_needed(found)]


def _needed(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Of one kernel on each target, {} where it has none."""
    for name, text in (("registers", str), ("spills", str), ("shared", _kilobytes), ("products", str)):
        yield " ".join(_cell(need, name, text) for need in found)
    yield _issued(found[TARGETS.index(TARGET)])


def _cell(need: Mapping[str, Any], name: str, text: Any) -> str:
    return "-" if not need else "error" if need["error"] else text(need[name])


def _kilobytes(size: int) -> str:
    return f"{size / 1024:.0f}"


def _issued(need: Mapping[str, Any]) -> str:
    found = need.get("per_32")
    return "-" if found is None else f"{found:.1f}" + "+" * need["loops_once"]


# ------------------------------------------------------------------ beside others
def peer_rows(results: Mapping[str, Any]) -> list[Row]:
    """The kernels with hot loops of each case that others have kernels for: ours, then theirs."""
    rows = results["streams"]["rows"]
    cases = {row["case"]: row for row in rows if "beside" not in row}
    beside = {name: [row for row in rows if row.get("beside") == name] for name in cases}
    return [
        [name, whose if number == 0 else "", *cells]
        for name, others in beside.items() if others
        for whose, row in [("fusegrad", cases[name]), *((_whose(other, name), other) for other in others)]
        for number, cells in enumerate(_hot_kernels(row, cases[name]["width"]))
    ]  # fmt: skip


def _whose(row: Mapping[str, Any], case: str) -> str:
    """The row's name without the case's: whose kernels, and how they are configured."""
    parts = (part.strip(" ,") for part in str(row["case"]).replace(case, "").split(":"))
    return ", ".join(part for part in parts if part)


def _hot_kernels(row: Mapping[str, Any], width: int) -> Iterator[Row]:
    if "error" in row:
        yield ["-", "-", "-", "-", "-", row["error"]]
    for name, need in row["targets"].get(TARGET, {}).items():
        if loops := need.get("hot"):
            figures = (str(need["registers"]), str(need["spills"]), _kilobytes(need["shared"]), str(need["products"]))
            yield [name, *figures, " ".join(f"{32 * width * issued / done:.1f}" for issued, done in loops)]


SECTIONS = (
    (PLANS, PLANS_HEAD, plan_rows, ("streams",)),
    (KERNELS, KERNELS_HEAD, kernel_rows, ("streams",)),
    (PEERS, PEERS_HEAD, peer_rows, ("streams",)),
)
