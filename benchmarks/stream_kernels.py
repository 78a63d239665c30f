"""Kernels with matmuls inside, cross-compiled: registers, spills, instructions of the tensor cores. Not run.

Beside them on request (`--peer FILE`) kernels that a Python file from outside lists as `KERNELS`, compiled in the same
run; their figures are kept, their text is not.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fusegrad import compile as compiled
from fusegrad import explain
from fusegrad.codegen import Kernel
from fusegrad.runtime.kernels.cross_compile.metrics import measure
from fusegrad.runtime.kernels.cross_compile.pool import Binary
from fusegrad.runtime.kernels.machine_code.counts import Launch, count, parameters, spread
from fusegrad.runtime.kernels.machine_code.hot_loops import hot_loops
from fusegrad.runtime.kernels.machine_code.model import launch_of
from fusegrad.runtime.kernels.machine_code.sass import NoListingError, tools
from fusegrad.runtime.report.explanation import Explanation
from fusegrad.runtime.report.residuals import AGAIN, AS_WRITTEN
from fusegrad.runtime.values.tensor_specs import parse_spec

from .kernels import TARGETS
from .plans import DIRECTIONS, TARGET
from .stream_functions import STREAMS
from .suite import Case

_PRODUCT = re.compile(r"^\s*(?:@\S+\s+)?(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma|v_s?mfma_)", re.M)
"""What the tensor cores are given, of each architecture: a line of PTX, or of AMD's assembly."""


def streams(name: str, targets: Sequence[str] = TARGETS) -> dict[str, Any]:
    """A row of the results: what is planned for a case on sm_90, and what each kernel needs on each target.

    Of `saved`, bytes that forward saves, `asked` is what the class itself would save. `per_32`: warp instructions of
    the launch for 32 elements of the matrix of scores, by the model.
    """
    words, case, scores = STREAMS[name]
    found = {target: explain(case.function, *case.args, target=target) for target in {TARGET, *targets}}
    needs = {target: needs_of(found[target], target, scores) for target in targets}
    about = {"case": name, "what": words, "scores": scores, "width": width_of(case)}
    return {**about, **planned(found[TARGET]), "targets": needs}


def fast(name: str) -> dict[str, Any]:
    """The kernels of a case on sm_90 that round between no operations, as those of others do not."""
    _, case, scores = STREAMS[name]
    found = explain(compiled(case.function, numerics="fast"), *case.args, target=TARGET)
    needs = {TARGET: needs_of(found, TARGET, scores)}
    return {"case": f'{name}, numerics="fast"', "beside": name, "scores": scores, "targets": needs}


def planned(found: Explanation) -> dict[str, Any]:
    """Launches, bytes, and what is saved; forward first."""
    facts = found.to_dict()
    return {
        "launches": [facts["launches"][d] for d in DIRECTIONS],
        "library": [sum(k.kind != "triton" for k in found.kernels if k.direction == d) for d in DIRECTIONS],
        "bytes": [facts["bytes"][d] for d in DIRECTIONS],
        "minimal": [facts["bytes"][f"minimal_{d}"] for d in DIRECTIONS],
        "eager": [facts["eager"].get(d, {}).get("bytes") for d in DIRECTIONS],
        "saved": facts["saved_bytes"],
        "asked": sum(row.bytes for row in found.kept if row.how in (AS_WRITTEN, AGAIN)),
    }


def needs_of(found: Explanation, target: str, scores: int) -> dict[str, Any]:
    """By kernel."""
    binaries = found.binaries(target) if found.kernel_records else {}
    directions = {k.name: k.direction for k in found.kernels}
    return {
        k.name: {"direction": directions[k.name], **_need(binaries[k.name][target]),
                 **_issued(found, k, binaries[k.name][target], target, scores)}
        for k in found.kernel_records
    }  # fmt: skip


def _need(binary: Binary) -> dict[str, Any]:
    figures = {name: getattr(binary, name) for name in ("registers", "spills", "shared", "error")}
    return {**figures, "products": products(binary.asm)}


def products(asm: Mapping[str, str | bytes]) -> int:
    """Instructions for the tensor cores in the text of a kernel, not how often they run."""
    return sum(len(_PRODUCT.findall(str(asm.get(kind, "")))) for kind in ("ptx", "amdgcn"))


def _issued(found: Explanation, kernel: Kernel, binary: Binary, target: str, scores: int) -> dict[str, Any]:
    """{} off sm_90, and for machine code that is not read."""
    if target != TARGET or binary.error:
        return {}
    counted = issued(binary.asm, launch_of(kernel, found.sizes, target), scores, kernel.name)
    return {**counted, "hot": hot(binary.asm["cubin"], kernel.name)}


def issued(asm: Mapping[str, Any], launch: Launch, scores: int, name: str) -> dict[str, Any]:
    """{"per_32", "loops_once": whether a loop's turns hang on data}; {} for machine code that is not read.

    Nor is it where the text has products, and the programs that were followed came past none.
    """
    try:
        counted = count(asm["cubin"], replace(launch, followed=spread(launch.programs)), name)
    except NoListingError:
        return {}
    if products(asm) and not counted.pipes.get("matrix"):
        return {}
    return {"per_32": round(32 * counted.instructions / scores, 2), "loops_once": bool(counted.data_dependent)}


def width_of(case: Case) -> int:
    """The length of the rows of its first argument, of which the products are that make up the scores."""
    return parse_spec(case.args[0])[1][-1]


def hot(cubin: bytes, name: str) -> list[list[float]]:
    """Of each hot loop what a warp issues in a turn, and its multiply-adds; [] for machine code that is not read."""
    try:
        return [[loop.instructions, loop.multiplied] for loop in hot_loops(cubin, name)]
    except NoListingError:
        return []


# ------------------------------------------------------------------ kernels from outside
@dataclass(frozen=True)
class PeerKernel:
    """One of `KERNELS` in a file from outside: a Triton function, how it is compiled for sm_90 and launched."""

    name: str
    """The row's: whose it is, what it computes, its tile."""
    function: Any
    types: Mapping[str, str]
    """{"x": "*bf16", "n": "i32"}; what is missing is a constant."""
    constants: Mapping[str, Any]
    options: Mapping[str, int]
    grid: tuple[int, int, int]
    scores: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The numbers among its arguments."""
    beside: str = ""
    """The case of ours that it stands beside in the table of others."""


def peers(path: Path) -> Iterator[dict[str, Any]]:
    """A row for each kernel that a file lists."""
    return (peer(kernel) for kernel in runpy.run_path(str(path))["KERNELS"])


def peer(kernel: PeerKernel) -> dict[str, Any]:
    """A row like those of `streams`, for sm_90 alone."""
    compiled = _compiled(kernel)
    need = {**need_of(compiled.asm, compiled.metadata), **_issued_by(kernel, compiled)}
    row = {"case": kernel.name, "scores": kernel.scores, "targets": {TARGET: {kernel.function.__name__: need}}}
    return {**row, "beside": kernel.beside} if kernel.beside else row


def need_of(asm: Mapping[str, Any], metadata: Any) -> dict[str, Any]:
    """What a kernel needs that Triton has compiled for sm_90 outside of our own processes; its hot loops."""
    found = measure(asm, TARGET, metadata.shared, tools())
    need = {"registers": found.registers, "spills": found.spills, "shared": found.shared, "error": None}
    return {**need, "products": products(asm), "hot": hot(asm["cubin"], metadata.name)}


def _compiled(kernel: PeerKernel) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    places = {name: (i,) for i, name in enumerate(kernel.function.arg_names)}
    types = {name: kernel.types.get(name, "constexpr") for name in places}
    constants = {places[name]: value for name, value in kernel.constants.items() if name in places}
    whole = {places[n]: [["tt.divisibility", 16]] for n, t in types.items() if _is_whole(kernel, n, t)}
    source = ASTSource(kernel.function, types, constants, whole)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(kernel.options))


def _is_whole(kernel: PeerKernel, name: str, type_: str) -> bool:
    """As a launch at these sizes would find it."""
    return type_.startswith("*") or kernel.sizes.get(name, 1) % 16 == 0


def _issued_by(kernel: PeerKernel, compiled: Any) -> dict[str, Any]:
    passed = [kernel.sizes.get(n) for n in kernel.function.arg_names if n in kernel.types]
    launch = Launch(TARGET, kernel.grid, compiled.metadata.num_warps, parameters([*passed, None, None]))
    return issued(compiled.asm, launch, kernel.scores, compiled.metadata.name)
