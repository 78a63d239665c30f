"""What a launch issues: warp instructions by pipe, counted by following a lane of some programs. No time is in it."""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from .flight import Flight
from .flow import Flow
from .lane import Decisions, Lane, TooLongError, deciding
from .operands import Values
from .pipes import pipe_of
from .sass import Instruction, NoListingError, disassemble

PARAMETERS = {**dict.fromkeys(("cuda:75", "cuda:80", "cuda:86", "cuda:89"), 0x160), "cuda:90": 0x210, "cuda:100": 0x380}
"""Where the constant bank holds a kernel's parameters, by architecture (EIATTR_PARAM_CBANK of its cubins)."""
LAUNCH = {"cuda:100": (0x360, 0x370)}
"""Where it holds the numbers of threads and of programs; 0x0 and 0xc before."""
LANE_ZERO = ("SR_TID.X", "SR_TID.Y", "SR_TID.Z", "SR_LANEID", "SR_LTMASK", "SR_CgaCtaId", "SRZ")
PROGRAMS, MANY = 3, 5000
"""Programs whose lanes are followed; one alone where that one runs through so many blocks."""
NOTHING, SOMETHING = 0, 1
"""Words that a program finds in memory: no other has been there, or one has."""
SPREAD = 16
"""Programs that are followed where masks leave one less to do than another."""


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched. parameters: (bytes, value) in their order; a pointer's value is of no matter.

    followed: the programs that stand for all; () for the middle of each third, where all have the same to do. sharing:
    programs of which one does what the others find done, by a word in memory, each time that they look.
    """

    target: str
    grid: tuple[int, int, int]
    warps: int
    parameters: tuple[tuple[int, int], ...]
    followed: tuple[int, ...] = ()
    sharing: int = 1

    @property
    def programs(self) -> int:
        return math.prod(self.grid)


@dataclass(frozen=True)
class Counts:
    """pipes: warp instructions of the whole launch by pipe, as they are issued, predicated ones too.

    flight: bytes per lane that are on their way at a time, at most, where most of its loads are. data_dependent:
    addresses of loops whose number of turns hangs on data, which count as one turn.
    """

    pipes: dict[str, float]
    flight: int
    data_dependent: tuple[int, ...] = ()

    @property
    def instructions(self) -> float:
        return sum(self.pipes.values())


def count(cubin: bytes, launch: Launch, kernel: str = "a kernel") -> Counts:
    """Follow one lane of each of some programs, and take the others for like them. Raises NoListingError."""
    if launch.target not in PARAMETERS:
        fix = f"one of {', '.join(PARAMETERS)}."
        raise NoListingError(kernel=kernel, reason=f"nothing is known of machine code for {launch.target}", fix=fix)
    try:
        return _count(cubin, launch, kernel)
    except TooLongError:
        fix = "ask at smaller sizes."
        raise NoListingError(kernel=kernel, reason="a lane runs too long to be followed", fix=fix) from None


@functools.lru_cache(maxsize=512)
def _count(cubin: bytes, launch: Launch, kernel: str) -> Counts:
    flow, decisions = _flow(cubin, kernel)
    pipes: dict[str, float] = defaultdict(float)
    flights, dependent = list[tuple[float, int]](), set[int]()
    for word, part in _found(launch):
        lanes, most = _followed(flow, decisions, launch, word)
        share = part * launch.programs * launch.warps / max(1, len(lanes))
        for at, times in sum((lane.visits for lane in lanes), Counter[int]()).items():
            for pipe, number in _pipes(flow.blocks[at].instructions).items():
                pipes[pipe] += number * times * share
        flights.append((part, most))
        dependent |= {at for lane in lanes for at in lane.data_dependent}
    return Counts(dict(pipes), max(flights)[1], tuple(sorted(dependent)))


def _found(launch: Launch) -> list[tuple[int | None, float]]:
    """What a program finds where it looks for others' work, nothing or something, and how often."""
    missing = 1 / launch.sharing
    return [(NOTHING, missing), (SOMETHING, 1 - missing)] if launch.sharing > 1 else [(None, 1.0)]


def _followed(flow: Flow, decisions: Decisions, launch: Launch, word: int | None) -> tuple[list[Lane], int]:
    """A lane of each of some programs that find this word, and the most bytes that one has on their way."""
    lanes, most = list[Lane](), 0
    for program in launch.followed or _sampled(launch.programs):
        lane = Lane(flow, decisions, Values(_constants(launch), _specials(launch, program), word))
        flight = Flight()
        lane.run(flight.watch)
        lanes.append(lane)
        most = max(most, flight.most(lane.visits))
        if lane.visits.total() > MANY:
            break
    return lanes, most


@functools.lru_cache(maxsize=64)
def _flow(cubin: bytes, kernel: str) -> tuple[Flow, Decisions]:
    flow = Flow(disassemble(cubin, kernel))
    return flow, deciding(flow)


@functools.lru_cache(maxsize=4096)
def _pipes(instructions: tuple[Instruction, ...]) -> Counter[str]:
    return Counter(pipe_of(i) for i in instructions if i.base != "NOP")


def _sampled(programs: int) -> list[int]:
    """The middle of each third."""
    return sorted({programs * (2 * i + 1) // (2 * PROGRAMS) for i in range(PROGRAMS)}) if programs else []


def spread(programs: int) -> tuple[int, ...]:
    """Some programs that are as many in the first blocks of a row as in the last: a mask leaves one less than another.

    Numbers of one hexadecimal digit, repeated: whatever power of two the blocks of a row are, all their places occur.
    """
    return tuple(sorted({digit * 0x11111 % max(1, programs) for digit in range(SPREAD)}))


def _specials(launch: Launch, program: int) -> dict[str, int]:
    """The lane 0 of warp 0 of a program."""
    x, y, _ = launch.grid
    place = {"X": program % x, "Y": program // x % y, "Z": program // (x * y)}
    places = {f"SR_CTAID.{axis}": at for axis, at in place.items()}
    return {**places, **dict.fromkeys(LANE_ZERO, 0)}


def _constants(launch: Launch) -> dict[int, int]:
    """The bank by words: threads, programs, and each parameter at a multiple of its size."""
    threads, programs = LAUNCH.get(launch.target, (0x0, 0xC))
    words = {threads + 4 * i: n for i, n in enumerate((32 * launch.warps, 1, 1))}
    words |= {programs + 4 * i: n for i, n in enumerate(launch.grid)}
    at = PARAMETERS[launch.target]
    for size, value in launch.parameters:
        at = -(-at // size) * size
        words |= {at + 4 * i: value >> 32 * i & 0xFFFFFFFF for i in range(max(1, size // 4))}
        at += size
    return words


def parameters(pointers: Sequence[int | None]) -> tuple[tuple[int, int], ...]:
    """Parameters as bytes and values: None is a pointer, which is some address; a number has 4 bytes where it fits."""
    rows = ((8, i + 1 << 36) if value is None else (_bytes(value), value) for i, value in enumerate(pointers))
    return tuple(rows)


def _bytes(value: int) -> int:
    return 4 if -(1 << 31) <= value < 1 << 31 else 8
