"""Claims about a kernel's accesses, each with the answer: in range and in 32 bits for all sizes that its guards admit.

    0 <= offset < 1 + sum (n - 1) * stride        for every load and store, under its mask and the loops around it
    -2^31 <= value < 2^31                         for every 32-bit value that an address, a mask or a loop is made of

Where what memory holds decides (an index that was loaded), the claim has a condition: the range of that index. Reads of
whole groups of 16 bytes may touch the rest of a group at the end of an aligned tensor, never another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product

from ...ir import Graph
from ...ir.types import ITEMSIZE, Size
from ..kernel import Kernel, Kernels, Pointer, Ref, Scalar
from . import reading
from .bounds import World
from .claims import Answer, Claim, Fault, Memory, Proof, Subject, multiple
from .polynomials import ONE, ZERO, Poly, TooLong
from .reading import Access, Int, Need, Other, Reader, Value, origins, parsed
from .symbols import NoSize, Sizes

NARROW = 2**31 - 1
GROUP = 16
"""Bytes that are read at once, at a multiple of as many."""


def memory_of(shape: Sequence[Size], strides: Sequence[Size], sizes: Sizes) -> Memory:
    dims, steps = tuple(map(sizes.whole, shape)), tuple(map(sizes.whole, strides))
    extent = ONE
    for n, s in zip(dims, steps, strict=True):
        extent = extent + (n - 1) * s
    return Memory(extent, dims, steps)


# ------------------------------------------------------------------ one kernel


def prove(graph: Graph, kernels: Kernels) -> list[Proof]:
    """What can be proved of each kernel."""
    return [prove_kernel(kernel, graph, kernels) for kernel in kernels.kernels]


def prove_kernel(kernel: Kernel, graph: Graph, kernels: Kernels, apart: bool = True) -> Proof:
    """Read its text, then ask for every claim. `apart`: that stores of different programs do not meet, too."""
    from .overlaps import overlaps

    try:
        subject = read_kernel(kernel, graph, kernels)
    except (reading.Unread, NoSize, TooLong) as error:
        return Proof(kernel.name, faults=(Fault("text", 0, str(error)),))
    claims = [_claim(subject, access) for access in subject.read.accesses]
    for claim in claims:
        if claim.answer == "unproved":
            subject.faults.append(Fault("range", claim.line, claim.text))
    narrow = sum(_fits(subject, need) for need in subject.read.needs)
    subject.faults += [Fault("division", line, text) for text, line in subject.read.divisions]
    for hint in subject.read.hints:
        if not multiple(subject.world, hint.value, hint.factor):
            subject.faults.append(Fault("hint", hint.line, hint.text))
    count, shared = overlaps(subject) if apart else (0, [])
    subject.faults += shared
    return Proof(kernel.name, tuple(claims), tuple(dict.fromkeys(subject.faults)), narrow, count)


def read_kernel(kernel: Kernel, graph: Graph, kernels: Kernels) -> Subject:
    world = World()
    dimensions = [n for v in (*graph.inputs, *graph.order()) for t in v.avals for n in t.shape]
    sizes = Sizes(world, kernel.pinned, dimensions, kernel.guards)
    for guard in kernel.guards:
        sizes.assume(guard)
    memory = {
        p.name: _memory(p.buffer, graph, kernels, kernel, sizes) for p in kernel.arguments if isinstance(p, Pointer)
    }
    scalars = {s.name: sizes.whole(s.value) for s in kernel.arguments if isinstance(s, Scalar)}
    programs = sizes(kernel.grid)
    _some(world, programs)
    env: dict[str, Value] = {name: reading.Pointer(name) for name in memory}
    env |= {name: Int(value, 32, frozenset([name])) for name, value in scalars.items()}
    env |= {n: Int(Poly.of(v)) if type(v) is int else Other(v) for n, v in kernel.constants.items()}
    dtypes = {p.name: p.dtype for p in kernel.arguments if isinstance(p, Pointer)}
    reader = Reader(world, env, dtypes, programs, sizes.is_multiple)
    reader.block(parsed(kernel.source.removeprefix("@triton.jit\n")).body)
    return Subject(kernel, world, sizes, memory, scalars, reader)


def _some(world: World, programs: Poly) -> None:
    """There is a program: of a product, every factor is at least one; so is what a ceiling of one is of."""
    world.assume(programs - 1)
    world.assume(Poly.of(NARROW) - programs)  # no device takes more
    if len(programs.terms) == 1:
        for atom in programs.atoms:
            world.bound_below(atom, ONE, ONE)
            for bound in [*world.known.lowers(atom)]:
                if bound.value.number is None and len(bound.value.atoms) == 1:
                    world.assume(bound.value - 1)


def _memory(ref: Ref, graph: Graph, kernels: Kernels, kernel: Kernel, sizes: Sizes) -> Memory:
    if ref.kind == "input":
        value = graph.inputs[ref.index]
        return memory_of(value.shape, value.params["strides"], sizes)
    if ref.kind == "output":
        output, strides = graph.outputs[ref.index], graph.output_strides[ref.index]
        assert output is not None and strides is not None
        return memory_of(output.shape, strides, sizes)
    buffer = (kernels.temporaries if ref.kind == "temporary" else kernel.scratch)[ref.index]
    return memory_of(buffer.shape, buffer.strides, sizes)


# ------------------------------------------------------------------ claims
def _claim(subject: Subject, access: Access) -> Claim:
    memory = subject.memory[access.pointer]
    answer, condition = _answer(subject, access, memory)
    return Claim(access.line, access.text, access.kind, answer, condition)


def _answer(subject: Subject, access: Access, memory: Memory) -> tuple[Answer, str]:
    if is_inside(subject.world, access.offset, memory, access.facts):
        return "proved", ""
    if access.kind == "load" and access.pointer in subject.kernel.aligned and _in_group(subject, access, memory):
        return "group", ""
    condition = _condition(subject, access, memory)
    return ("data", condition) if condition else ("unproved", "")


def is_inside(world: World, offset: Poly, memory: Memory, facts: Sequence[Poly]) -> bool:
    """0 <= offset < extent, and no dimension is empty: or the extent would be nothing, which the offset is below."""
    facts = tuple(facts)
    return (
        world.holds(memory.extent - 1 - offset, facts)
        and world.holds(offset, facts)
        and all(world.holds(n - 1, facts) or _is_nothing(world, memory, n, facts) for n in memory.shape)
    )


def _is_nothing(world: World, memory: Memory, n: Poly, facts: Sequence[Poly]) -> bool:
    """Where a dimension is zero, the extent is, too."""
    if not all(len(m) == 1 and c > 0 and m[0] in world.positive for m, c in n.terms.items()):
        return False
    return world.holds(-memory.extent.replaced(dict.fromkeys(n.atoms, ZERO)), tuple(facts))


def _in_group(subject: Subject, access: Access, memory: Memory) -> bool:
    """The first element of the group of 16 bytes lies inside, and the group begins at a multiple."""
    world = subject.world
    dtype = next(p.dtype for p in subject.kernel.arguments if isinstance(p, Pointer) and p.name == access.pointer)
    for q, division in world.divisions.items():
        number, lane = division.d.number, division.x
        if (
            division.kind != "/"
            or not isinstance(number, int)
            or len(lane.terms) != 1
            or number * ITEMSIZE[dtype] > GROUP
        ):
            continue
        (atom, *others) = lane.atoms
        if not others and atom in access.offset.atoms and lane == Poly.atom(atom):
            first = access.offset.with_atom(atom, Poly.atom(q) * number)
            if multiple(world, first, number) and is_inside(world, first, memory, access.facts):
                return True
    return False


# ------------------------------------------------------------------ where data decides
CHOICES = 256
"""How many ranges are tried for one access: of four numbers there are thousands."""
STEPS_OF_DATA = 6_000
"""How many goals they may lead to together."""


def _condition(subject: Subject, access: Access, memory: Memory) -> str:
    """The ranges of what was loaded under which the access is inside; nothing where there are none."""
    world = subject.world
    atoms = sorted(a for a in origins(world, access.offset) if a in world.data)
    ranges = list(_ranges(memory))
    if not atoms or len(atoms) > 4:
        return ""
    with world.at_most(STEPS_OF_DATA):
        for chosen in islice(product(ranges, repeat=len(atoms)), CHOICES):
            pairs = [*zip(atoms, chosen, strict=True)]
            facts = [f for a, (low, high) in pairs for f in (Poly.atom(a) - low, high - Poly.atom(a))]
            if is_inside(world, access.offset, memory, (*access.facts, *facts)):
                texts = (f"{world.data[a]} in {world.text(low)} .. {world.text(high)}" for a, (low, high) in pairs)
                return ", ".join(dict.fromkeys(texts))
    return ""


def _ranges(memory: Memory) -> Iterator[tuple[Poly, Poly]]:
    """Places along a dimension, counted from its end, too."""
    for n in dict.fromkeys(memory.shape):
        yield -n, n - 1
    for n in dict.fromkeys(memory.shape):
        yield ZERO, n - 1


# ------------------------------------------------------------------ 32 bits
def _fits(subject: Subject, need: Need) -> bool:
    """A value that is computed in 32 bits while these arguments are 32 bits wide."""
    world = subject.world
    passed = [subject.scalars[name] for name in sorted(need.narrow)]
    facts = (*need.facts, *(end for p in passed for end in _ends(p)))
    if all(world.holds(end, need.facts) or world.holds(end, facts) for end in _ends(need.value)):
        return True
    subject.faults.append(Fault("width", need.line, f"{need.text} in 32 bits"))
    return False


def _ends(value: Poly) -> tuple[Poly, Poly]:
    """Not negative where 32 bits hold the value."""
    return -value + NARROW, value + NARROW + 1
