"""The interface to the runtime: Triton text, and everything that is needed to launch it, as plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import sympy

from ..ir.types import Size


class Ref(NamedTuple):
    """A buffer: input or output i of the group's graph, temporary i between its kernels, or scratch i of one kernel.

    States, and what they are at first, are carried by a loop of the kernel, in registers.
    What is held is there for one step.
    """

    kind: Literal["input", "output", "temporary", "scratch", "state", "initial", "held"]
    index: int  # type: ignore[assignment]  # shadows tuple.index, which is of no use here


@dataclass(frozen=True)
class Buffer:
    """Memory that the runtime allocates before the launch. `zeroed` memory must hold zeros (arrival counters)."""

    name: str
    dtype: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    zeroed: bool = False


@dataclass(frozen=True)
class Pointer:
    """A pointer argument: its name in the text, the buffer, and an offset in elements that the kernel adds itself."""

    name: str
    buffer: Ref
    dtype: str


@dataclass(frozen=True)
class Scalar:
    """A run-time integer argument, as an expression over the symbols of the capture."""

    name: str
    value: Size


ENDS = MERGED, TOTALS = "_merged", "_totals"
"""Ends of names: of what merges the parts of a kernel, and of what adds up what chunks of time have added up."""
MOST_REGISTERS, ALL_REGISTERS = 255, 1 << 16
"""Of a thread, and of a multiprocessor."""


def most_registers(threads: int) -> int:
    """Of each thread of a program."""
    return min(MOST_REGISTERS, ALL_REGISTERS // threads)


WORTH = 4
"""How many times as many programs have to be of use: another launch, and what it reads, cost as much as some turns."""


@dataclass(frozen=True)
class Walk:
    """What a kernel does with matrices that are never in memory, for reports: it forms a tile of them at a time.

    `rows` are divided among programs and the `stream` is walked, by `blocks` of each; `letters` are their names in the
    text. `elements`: of one matrix. `beside`: lengths of further axes that are walked, one place at a time.
    `keeps_stream`: a program has one tile, and walks these alone. `prologue`: what it makes of its rows first, and
    stores for kernels behind it. `products` are the matrices, by the names in the user's source; `relative_to` what
    sums are rescaled by as it moves; `skips` the blocks in which all is masked, `alive` the share of all that the
    others are, at the sizes that it was generated for. `multiplied`: additions and multiplications in products of
    `dtype`; `exponentials`: what the unit for special functions computes; masked ones included.
    """

    rows: Size
    stream: Size
    elements: Size
    blocks: tuple[int, int]
    letters: tuple[str, str]
    beside: tuple[Size, ...] = ()
    keeps_stream: bool = False
    passes: int = 1
    products: tuple[str, ...] = ()
    relative_to: tuple[str, ...] = ()
    skips: tuple[str, ...] = ()
    alive: float = 1.0
    prologue: tuple[str, ...] = ()
    multiplied: Size = 0
    dtype: str = "f32"
    exponentials: Size = 0

    def at(self, size: Callable[[Size], Size]) -> Walk:
        """The same with each size in other symbols."""
        return replace(
            self, rows=size(self.rows), stream=size(self.stream), elements=size(self.elements),
            beside=tuple(map(size, self.beside)), multiplied=size(self.multiplied),
            exponentials=size(self.exponentials),
        )  # fmt: skip


@dataclass(frozen=True)
class Course:
    """How a loop goes through time, for reports: `block` of its `steps` at once, by so many `programs` in each of the
    `chunks` of time, on a device of so many `units`, in so many `launches`. `whole`: why it would be one chunk on any.
    `passes`: how often each chunk is walked. `parts`: programs that share the sums of a step. `again`: steps of a
    block, of two loops of which the second finds what the first one hands to it made again; 0 where the kernel has one,
    or nothing is."""

    steps: Size
    block: int
    programs: Size
    units: int
    chunks: int = 1
    whole: str = ""
    parts: Size = 1
    launches: int = 1
    again: int = 0
    passes: int = 1

    def at(self, size: Callable[[Size], Size]) -> Course:
        """The same with each size in other symbols."""
        return replace(self, steps=size(self.steps), programs=size(self.programs), parts=size(self.parts))


@dataclass(frozen=True)
class Kernel:
    """One `@triton.jit` function and how to launch it.

    `arguments` are passed in order, `constants` by name. `grid` is the number of programs. `pinned` are the symbols
    whose values were compiled in, `guards` conditions over the others under which the text is right (checked per call).
    `reads` and `writes` are bytes moved to and from device memory per buffer, as expressions; `cached` are bytes that
    it reads once more while they are in L2: partial sums that it wrote itself, rows in flight. `aligned` pointers are
    read by whole groups of 16 bytes: they have to be multiples of 16. `operations`: how many it computes;
    `multiplied`: those of them that tensor cores do. `fast`:
    whether the compiler may contract products with sums and take subnormal numbers for zeros. `for_multiples`: its
    accesses are wide, by guards that hold for sizes which are multiples of a block. `splits`: parts of a loop, one for
    each program, whose sums the next kernel merges; sizes may have a use for more or fewer: `wanted`. `walk`: where it
    was generated in this process, and has matrices that are never in memory. `course`: the same of a loop over time,
    where many steps are taken at once. `roomy`: programs are so few that so many
    on a multiprocessor may have all its registers; by itself the compiler spills some where that lets one more run
    there. `sharing`: programs that walk the same rows, a strip each: what one of them reduces along a row, the others
    find in memory.
    """

    name: str
    source: str
    arguments: tuple[Pointer | Scalar, ...]
    constants: dict[str, int | float | bool | str]
    grid: Size
    num_warps: int
    num_stages: int = 1
    scratch: tuple[Buffer, ...] = ()
    pinned: dict[sympy.Symbol, int] = field(default_factory=dict)
    guards: tuple[sympy.Basic, ...] = ()
    reads: dict[str, Size] = field(default_factory=dict)
    writes: dict[str, Size] = field(default_factory=dict)
    cached: dict[str, Size] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    operations: Size = 0
    fast: bool = False
    for_multiples: bool = False
    splits: int = 1
    wanted: Size = 1
    walk: Walk | None = field(default=None, compare=False)
    course: Course | None = field(default=None, compare=False)
    roomy: int = 0
    sharing: Size = 1
    multiplied: Size = 0

    def suits(self, wanted: int) -> bool:
        """Its parts are not so far from what some sizes want that another kernel would be worth it."""
        return self.splits < WORTH * wanted and wanted < WORTH * self.splits

    def options(self, kind: str) -> dict[str, int | bool]:
        """Options of the compiler for this kind of device: eager's roundings are those of single operations."""
        flushes = {"enable_reflect_ftz": self.fast} if kind == "cuda" else {}
        fused = {"enable_fp_fusion": self.fast}
        held = {"maxnreg": most_registers(32 * self.num_warps * self.roomy)} if kind == "cuda" and self.roomy else {}
        plain = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return {**plain, **fused, **flushes, **held, **self.assertions}

    @property
    def has_descriptors(self) -> bool:
        """Whether each of its programs keeps descriptors in memory, which whoever launches it has to give Triton."""
        return "tl.make_tensor_descriptor(" in self.source

    @property
    def assertions(self) -> dict[str, bool]:
        """The options without which Triton leaves assertions out: it must not add any of its own, of overflow."""
        return {"debug": True, "sanitize_overflow": False} if "tl.device_assert(" in self.source else {}


@dataclass(frozen=True)
class Kernels:
    """The kernels of one group, in launch order, and the temporaries between them.

    nothing: the sizes at which there is nothing to compute, where there are no kernels for that.
    divided: those for other sizes as well, where these hold no more than there is to sum now.
    """

    kernels: tuple[Kernel, ...]
    temporaries: tuple[Buffer, ...] = ()
    nothing: dict[sympy.Symbol, int] = field(default_factory=dict)
    divided: Kernels | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Leaning:
    """Departure of a schedule from its own choice: lanes, warps, elements held in powers of two, stages in ones.

    Of a tile that walks a stream, its rows and the columns of a turn in powers of two; `accelerated`: 1 reads tiles by
    descriptors of the tensor memory accelerator, -1 through pointers.
    """

    lanes: int = 0
    warps: int = 0
    stages: int = 0
    held: int = 0
    rows: int = 0
    walk: int = 0
    accelerated: int = 0


@dataclass(frozen=True)
class Target:
    """A device to generate for: `shared` and `l2` in bytes, `warp` in threads.

    A program may keep `packed` elements of 16 bits in registers, and still compute with them. `fast`: low floats are
    rounded where they are stored and nowhere else, and quotients, roots and exponentials are the hardware's own.
    """

    kind: Literal["cuda", "hip", "interpret"]
    arch: str
    units: int
    l2: int
    shared: int
    warp: int = 32
    packed: int = 1 << 16
    leaning: Leaning = Leaning()
    fast: bool = False

    def __str__(self) -> str:
        return f"{self.kind}:{self.arch}" if self.arch else self.kind


TARGETS = {
    "cuda:75": Target("cuda", "75", units=40, l2=4 << 20, shared=64 << 10),
    "cuda:80": Target("cuda", "80", units=108, l2=40 << 20, shared=163 << 10),
    "cuda:86": Target("cuda", "86", units=82, l2=6 << 20, shared=99 << 10),
    "cuda:89": Target("cuda", "89", units=128, l2=72 << 20, shared=99 << 10),
    "cuda:90": Target("cuda", "90", units=132, l2=50 << 20, shared=227 << 10),
    "cuda:100": Target("cuda", "100", units=148, l2=126 << 20, shared=227 << 10),
    "hip:gfx942": Target("hip", "gfx942", units=304, l2=256 << 20, shared=64 << 10, warp=64),
    # the interpreter pays per program, whatever the block: few programs, large blocks; it has no registers
    "interpret": Target("interpret", "", units=4, l2=50 << 20, shared=227 << 10, packed=0),
}
