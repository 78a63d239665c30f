"""What is done on a GPU's first day, in order of value. A step is a row of the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

HERE = "fusegrad.benchmarks.gpu_day"


@dataclass(frozen=True)
class Step:
    """One kind of work.

    body: module:function that does a unit of it. limit: seconds of a unit, after which its process is ended. budget: of
    all units, before the other steps have had theirs. least: seconds without which no unit begins. jobs: processes at a
    time, where a step compiles more than it launches, and times nothing.
    """

    name: str
    what: str
    body: str
    units: Callable[[], Sequence[str]]
    limit: float
    budget: float
    least: float = 10.0
    jobs: int = 1


TELLING = (
    "RMSNorm[16384,4096]", "SwiGLU[8192,16384]", "CrossEntropy[8192,128256]", "RMSNorm[512,1024]",
    "ColumnSoftmax[16384,4096]", "DropoutBiasResidual[16384,4096]", "LayerNorm[8192,8192]",
    "SmoothedCrossEntropy[8192,32000]", "BiasGELU[16384,4096]", "Softmax[65536,256]",
)  # fmt: skip
"""Cases that decide most: memory, counters, long rows, short ones, columns, random numbers, host time, arithmetic."""


def _functions() -> list[str]:
    """One case of every other Function of the suite."""
    from ..suite import chosen

    told = {name.partition("[")[0] for name in TELLING}
    return [case.name for case in chosen(one_per_function=True) if case.function.__name__ not in told]


def _rest() -> list[str]:
    """The suite's other cases."""
    from ..suite import CASES

    return [case.name for case in CASES if case.name not in (*TELLING, *_functions())]


def _gallery() -> list[str]:
    from fusegrad.examples.gallery.catalogue import CATALOGUE

    return [entry.name for entry in CATALOGUE]


def _streams() -> list[str]:
    """Functions whose matmuls outgrow their operands."""
    from ..stream_functions import STREAMS

    return list(STREAMS)


def _of(*units: str) -> Callable[[], Sequence[str]]:
    return lambda: units


LAUNCHING = ("threads", "streams", "graph", "outlived graph", "reduce-overhead")
STEPS: tuple[Step, ...] = (
    Step("doctor", "what `fusegrad doctor` says", f"{HERE}.tools:doctor", _of("doctor"), 150, 150),
    Step("telling", "the ten most telling cases at their sizes, beside eager and float64",
         f"{HERE}.checks:suite", lambda: TELLING, 90, 240),
    Step("functions", "every other Function of the suite at a size, beside eager and float64",
         f"{HERE}.checks:suite", _functions, 90, 300, jobs=4),
    Step("gallery", "every Function of the gallery over a large batch, forward, backward, twice",
         f"{HERE}.checks:gallery", _gallery, 60, 300, jobs=4),
    Step("launching", "threads, streams, CUDA graphs, graphs that outlive their class, torch.compile around it",
         f"{HERE}.launching:launching", _of(*LAUNCHING), 120, 120),
    Step("tests", "the tests marked gpu", f"{HERE}.tools:tests", _of("marked gpu"), 240, 120, least=20),
    Step("times of ten", "the ten most telling cases timed beside eager, torch.compile, Liger and a copy",
         f"{HERE}.times:bench", lambda: TELLING, 150, 300, least=30),
    Step("sanitizer", "memcheck and racecheck of compute-sanitizer, on kernels with arrival counters",
         f"{HERE}.tools:sanitizer", _of("memcheck", "racecheck"), 180, 150, least=40),
    Step("exports", "a Triton module, a C++ pair, a bundle and its binaries, used on the GPU",
         f"{HERE}.exports:exported", _of("module", "bundle", "binaries", "C++ pair"), 150, 150, least=20),
    Step("models", "a model trained, swapped beside itself", f"{HERE}.models:model",
         _of("llama", "bert", "demo"), 120, 120, least=20),
    Step("tune", "the schedule's own choice beside its neighbours", f"{HERE}.times:tune",
         lambda: TELLING[:1] + TELLING[2:3] + TELLING[4:8], 90, 120, least=20),
    Step("products", "products of matrices with what follows them, beside the library", f"{HERE}.products:products",
         _of("bf16", "f16", "f32"), 90, 60),
    Step("streams", "attention and its kin at their sizes, beside eager and float64", f"{HERE}.checks:suite", _streams,
         120, 150, least=20),
    Step("times of streams", "the same timed beside eager, torch.compile, scaled_dot_product_attention, flex_attention",
         f"{HERE}.times:attention", _streams, 180, 240, least=30),
    Step("profile", "what `fusegrad profile` measures", f"{HERE}.times:profiled", lambda: TELLING[:3], 60, 60),
    Step("times of functions", "every other Function timed, at a size", f"{HERE}.times:bench", _functions, 150, 300,
         least=30),
    Step("rest", "the suite's other cases, beside eager and float64", f"{HERE}.checks:suite", _rest, 90, 480, jobs=3),
    Step("times with autotuning", "the ten beside torch.compile's max-autotune", f"{HERE}.times:autotuned",
         lambda: TELLING, 240, 300, least=60),
    Step("times of the rest", "the suite's other cases timed", f"{HERE}.times:bench", _rest, 150, 600, least=30),
)  # fmt: skip
"""Budgets of what comes before the second timing add up to about twenty minutes."""


def chosen_steps(names: Sequence[str]) -> list[Step]:
    """The steps whose names are asked for, in their order; all where none is. Raises ValueError."""
    known = {step.name: step for step in STEPS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no step {', '.join(unknown)}; there are {', '.join(known)}")
    return [step for step in STEPS if not names or step.name in names]
