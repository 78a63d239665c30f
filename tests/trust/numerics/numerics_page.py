"""docs/numerics.md out of benchmarks/results/trust/numerics.json: a pure function of what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

TOP = """# Numerics

<!-- `make numerics` writes this page -->

`@fusegrad.compile(numerics="eager")`, the default, promises of every generated kernel: rounding where your operations
round, and an error against float64 of at most 1.5 times eager's and one unit in the last place (ulp) of the result's
dtype. So float32 and float64 are divided and rooted as IEEE 754 says, functions are those of the device library, which
torch's own GPU kernels call (of `tanh` and `erf` both formulas, and a choice of results instead of a branch; the
quotient in `sigmoid` by the step of Newton's that compilers divide by), products are not contracted with sums, and
subnormal numbers are kept. bfloat16 and float16 are computed in float32 and rounded after each operation, as eager
rounds them. What is free is the order of the terms of a sum; sums of `exp(x - max(x))` along rows in chunks are made in
one pass, relative to the maximum so far, with a shorter `exp` of the same digits whose subnormal results, beside the 1
of the maximum, are zero. So are powers that are summed alone, and those of a softmax that is rounded to 16 bits
(subnormal ones of a softmax in float32 are kept), and what divides them, the sum of their row, is inverted once: the
product with that, and what it leaves of the power times that, are the quotient of IEEE 754, in three instructions. A
quotient by a number, and a mean, is what eager makes of it on the device. torch's kernels for GPUs multiply by the
reciprocal, which is rounded to float32 (of float64: to float64), and so do ours there; a tensor full of one number
counts as that number. On a CPU torch divides, and so does `interpret`, with products where these have the quotient's
bits: for powers of two, and, of what was bfloat16 or float16, where all 65,536 of them were compared. A quotient of two
bfloat16 numbers that is rounded to bfloat16 is the hardware's on NVIDIA GPUs (`div.full`, off by 2 ulp of float32 at
most): with 8 digits each, none is nearer than 2 ** -18 of itself to where rounding changes, and so all bits are those
of the exact one.

`numerics="fast"` gives up rounding between the operations of bfloat16 and float16: values are rounded where they are
stored, and where you convert them; quotients, roots and exponentials are the hardware's approximations (`div.full`,
`sqrt.approx`, `ex2.approx`, of about 2 ulp in float32, `exp` more far from zero), those by numbers products with the
reciprocal, products are contracted with sums, and subnormal numbers may count as zeros.
`config.patch(numerics=...)` and `FUSEGRAD_NUMERICS` choose, too; `explain` says which it is. The backends `reference`
and `inductor` have the numerics of torch and of Inductor whatever is chosen.

## Where matmuls are never in memory

In a kernel that makes a matmul's result tile by tile and sums it again (attention, contrastive losses), what does not
depend on a running sum is rounded where your operations round: scores of bfloat16 are multiplied as bfloat16, summed in
float32, and rounded, as the library's are, and so is each operation on them. What is relative to a maximum that may
still move is float32 until it is multiplied: the exponentials of a softmax are rounded to bfloat16 as operands of the
next matmul, before they are divided, where eager divides first and rounds then. The quotient by the row's sum is made
at the end, of the row's result, in float32: a product with the sum's reciprocal, rounded with it. Backward has the
complete maxima, and sums or their reciprocals, as float32, and rounds where eager does, with one exception: a sum that
is taken off what it is a sum of (`p * (dp - (p * dp).sum(-1))`) stays float32, and so does what stands between it and
the sum that `p` was divided by, since little may be left of such a difference. Exponentials of what was bfloat16 or
float16 are powers of two of `x * log2(e) - m * log2(e)`, those of float32 are of `x - m`. Where `m` is a maximum,
subnormal ones of 16-bit numbers are zero, beside the 1 that the maximum has. float32 is multiplied exactly unless
torch's setting allows TF32; float64 stays with the library. A stream that is divided among programs is summed in
float32 by each, then over them in order: the same bits each time, and others on a device of another size.

Rows in which everything is masked are NaN, and rows with NaN or infinite scores are what they are in eager. One thing
is not: blocks in which a mask excludes everything are skipped, so `0 * v` of eager, which is NaN where a masked `v`
is infinite or NaN, is not seen there; within a block that is partly masked it is.

## Where matmuls run in slabs

Each row is what it is when all rows are there: the library's matmul of fewer rows may differ in the last bit. Sums over
the rows that are walked are added in the order of slabs: a matmul's result in its own dtype, one rounding a slab; all
others in float32 where they are low floats.

## What exactness costs on a GPU

A quotient of float32 is about ten instructions, the hardware's two; an exponential eight, the hardware's two; a product
and a sum are two, contracted one; rounding to bfloat16 in between is two. Quotients by numbers are one in both. Random
numbers cost the same, too: Philox has 40 instructions at least for the four numbers of a counter, which are drawn
together where rows begin at multiples of eight elements. Instructions of a warp for 32 elements, counted on 2026-11-25
in the machine code for sm_90, bfloat16 at 16384 x 4096; nothing was timed:

| Function of the benchmarks | forward, "eager" | "fast" | backward, "eager" | "fast" |
| --- | --- | --- | --- | --- |
| BiasGELU | 32 | 33 | 50 | 46 |
| DropoutBiasResidual | 28 | 30 | 29 | 29 |
| DyT | 26 | 25 | 54 | 52 |
| SwiGLU | 21 | 18 | 31 | 27 |
| GeGLU | 27 | 26 | 43 | 39 |
| RMSNorm | 11 | 9 | 23 | 20 |
| AddRMSNorm | 13 | 14 | 26 | 22 |
| LayerNorm | 19 | 17 | 30 | 27 |
| PolyNorm | 25 | 19 | 64 | 51 |

## How it was measured

float16 and bfloat16 on all 65,536 numbers (pairs: a sample); float32 and float64 on special values and all pairs of
them, random bit patterns, and around points where formulas change hands. Special are NaN, infinities, signed zeros,
subnormal numbers, the largest and smallest, halves, and integers as large as the mantissa. "Same" means that NaN,
infinities and signs of zeros are eager's for every operand, and that no error breaks the bound. The bound holds
result by result, against eager's largest error among the {neighbours} results nearest in size.
"""

PRIMITIVES = """
## Kernels: every primitive

Largest error in ulp against float64 (float64: against 80 bits), `eager` and `interpret`: the generated Triton text
under Triton's interpreter, where the device library is torch on a CPU. Large numbers are where a formula, eager's
too, leaves the truth: `sigmoid` near the smallest numbers, say. `own` counts results that are of another class than
eager's because eager is wrong on this CPU and the kernel is right: `fmod` of quotients beyond the mantissa is NaN in
torch's vectorised code. The last columns are about NVIDIA GPUs: what the text calls, the arithmetic that sm_90 gets
for it in float32 (cross-compiled), and the bound that NVIDIA documents for float32 and float64. None of it was run on
one.
"""

WHOLE = """
Integers and booleans are the same to the bit (uint8, int8, int16, int32, int64, bool; all pairs of 8 bits):
arithmetic wraps around, division and remainder round down or towards zero with every combination of signs, a shift by
a negative number or by the width and more is torch's. Conversions are the same between all of these dtypes, too.

| beyond what torch defines | eager | a kernel |
|---|---|---|
| integer division by zero | an error on CPUs, undefined on GPUs | undefined; 0 under the interpreter |
| smallest integer // -1 of 32 or 64 bits | on x86 the process may end | wraps around, or no defined value |
| float to integer, out of range or NaN | as the machine converts | as the machine converts |
| the payload and sign of a NaN that was computed | as the machine has it | as the machine has it |
"""

REDUCTIONS = """
## Kernels: reductions and scans

Rows of 777 and of a million, rows of NaN, infinities and signed zeros, of one element and none; held whole, and in
chunks. The largest error of all rows against eager's largest; where terms cancel, in ulp of the sum of their sizes.
Sums of float16 and bfloat16 are accumulated in float32. `amax`, `amin`, `argmax` and `argmin` give NaN the win and
the first of equals its place.
"""

OPERATORS = """
## Lowering: every ATen operation

What the tracer makes of each operation: a rule in primitives, a formula, or torch's decomposition, run primitive by
primitive, and where it is elementwise as a kernel under the interpreter on dense numbers. {count} overloads of
tensors are lowered; of {shown} torch's own test samples (`op_db`) show the errors, `eager / lowered / interpret`; the
others are listed below. Complex numbers are never lowered: those operations are called as they are, and so is every
operation that is not here. Results that are no elementwise function are measured in ulp of the largest element.
Where eager has zeros of either sign, one by its vector and one by its scalar code (`softshrink` of -0.0), both are
right, and so are both zeros as a maximum or minimum of 0.0 and -0.0: that depends on the processor.
"""

DERIVATIVES = """
## Values and derivatives where it is hard

Beside torch's own values and derivatives, in ulp of the largest element. Primitives by the rules that forward mode
and double backward use, over special values and random ones; functions at the points named, as kernels under the
interpreter.
"""


def page(found: Mapping[str, Any]) -> str:
    """The whole page."""
    when = f"{found['date']} with {found['versions']} on {found['machine']}"
    machine = f"\nMeasured {when}, commit {found['commit'][:12]}.\n"
    known = [r for r in found["operators"] if r["samples"]]
    count = {"count": len({r["op"] for r in found["operators"]}), "shown": len({r["op"] for r in known})}
    parts = [
        TOP.format(neighbours=found["neighbours"]) + machine, PRIMITIVES, _primitives(found), WHOLE, REDUCTIONS,
        _reductions(found), OPERATORS.format(**count), _operators(known), _unshown(found), DERIVATIVES,
        _derivatives(found),
    ]  # fmt: skip
    return "\n".join(p.strip("\n") + "\n" for p in parts)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def ulps(number: float) -> str:
    return f"{number:.2g}" if number < 1000 else f"{number:.0e}".replace("e+0", "e").replace("e+", "e")


def _pair(rows: Mapping[str, Any], dtype: str) -> str:
    row = rows.get(dtype)
    return "" if row is None else f"{ulps(row['eager'])} / {ulps(row['found'])}"


def _verdict(rows: Iterable[Mapping[str, Any]]) -> str:
    bad = [r for r in rows if r["over"] or r["odd"]]
    if bad and bad[0]["op"] in KNOWN:
        return f"not as on a CPU: {KNOWN[bad[0]['op']]}"
    return f"**no: {', '.join(r['dtype'] for r in bad)}**" if bad else "yes"


def _grouped(rows: Sequence[Mapping[str, Any]], key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, group in groupby(rows, key=lambda r: r[key]):
        yield name, {r["dtype"]: r for r in group}


KNOWN = {
    "cumsum": "torch's CPU kernel adds float32 in float64; its GPU kernels, and these, add in float32",
    "cumsum of 100000": "as `cumsum`",
    **dict.fromkeys(("amax", "amin"), "of zeros of both signs, which one is found depends on the order"),
    **dict.fromkeys(("lerp at a half", "lerp below a half"), "the sign of a zero: torch's CPU kernel contracts"),
    "aten.special_xlog1py.default": "torch's vectorised log1p takes subnormal numbers for zeros",
    "var of a large mean": "torch's CPU kernel computes in float64",
}
"""Rows that are farther from the truth than eager on a CPU, and why."""
FLOATS = ("f16", "bf16", "f32", "f64")


def _primitives(found: Mapping[str, Any]) -> str:
    head = ["primitive", *FLOATS, "same", "own", "calls", "sm_90, float32", "documented"]
    rows = []
    for name, by in _grouped(found["primitives"], "op"):
        device = found["nvidia"].get(name, {})
        own = sum(r["excused"] for r in by.values())
        words = ", ".join(f"`{i}`" for i in device.get("instructions", ()))
        calls = ", ".join(f"`{c}`" for c in device.get("calls", "").split(", ") if c)
        rows.append([f"`{name}`", *(_pair(by, d) for d in FLOATS), _verdict(by.values()), str(own or ""), calls, words,
                     device.get("bound", "")])  # fmt: skip
    return table(head, rows)


def _reductions(found: Mapping[str, Any]) -> str:
    rows = []
    for name, group in groupby(found["reductions"], key=lambda r: r["op"]):
        each = list(group)
        worst: dict[str, Any] = {}
        for row in sorted(each, key=lambda r: r["found"]):
            worst[row["dtype"]] = row
        rows.append([f"`{name}`", *(_pair(worst, d) for d in FLOATS), _verdict(each)])
    return table(["reduction", *FLOATS, "same"], rows)


def _operators(rows: Sequence[Mapping[str, Any]]) -> str:
    dtypes = ("float32", "bfloat16")
    lines = []
    for name, by in _grouped(rows, "op"):
        cells = [_three(by.get(d)) for d in dtypes]
        whole = ", ".join(sorted(by.keys() - set(dtypes)))
        samples = str(sum(r["samples"] for r in by.values()))
        how, same = next(iter(by.values()))["how"], _verdict(by.values())
        lines.append([f"`{name.removeprefix('aten.')}`", how, *cells, whole, same, samples])
    return table(["operation", "by", *dtypes, "others", "same", "samples"], lines)


def _three(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    kernel = f" / {ulps(row['interpret'])}" if row["interpret"] is not None else ""
    return f"{ulps(row['eager'])} / {ulps(row['found'])}{kernel}"


def _unshown(found: Mapping[str, Any]) -> str:
    names = sorted({r["op"] for r in found["operators"] if not r["samples"]})
    return "Lowered, and in no sample: " + ", ".join(f"`{n.removeprefix('aten.')}`" for n in names) + "."


def _derivatives(found: Mapping[str, Any]) -> str:
    each = found["derivatives"]
    rows = [[r["op"], r["kind"], f"{ulps(r['eager'])} / {ulps(r['found'])}", _verdict([r])] for r in each]
    return table(["of", "as", "eager / ours, float32", "same"], rows)
