"""Claims about a kernel's accesses, each with the answer: in range and in 32 bits for all sizes that its guards admit.

    0 <= offset < 1 + sum (n - 1) * stride        for every load and store, under its mask and the loops around it
    -2^31 <= value < 2^31                         for every 32-bit value that an address, a mask or a loop is made of

Where what memory holds decides (an index that was loaded), the claim has a condition: the range of that index. Reads of
whole groups of 16 bytes may touch the rest of a group at the end of an aligned tensor, never another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product

import sympy

from ...ir import Graph
from ...ir.types import ITEMSIZE, Size, simplify_size
from ..kernel import Kernel, Kernels, Pointer, Ref, Scalar
from . import reading
from .arithmetic import Arithmetic, is_multiple
from .bounds import World
from .claims import Answer, Claim, Fault, Memory, Proof, Subject
from .overlaps import overlaps
from .polynomials import ONE, ZERO, Poly, TooLong
from .reading import (
    LARGEST,
    RULES,
    Access,
    Int,
    Need,
    Opaque,
    Reader,
    UnreadableText,
    Value,
    margins,
    parse_function,
)
from .symbols import NoSize, Sizes

GROUP = 16
"""Bytes that are read at once, at a multiple of as many."""


# ------------------------------------------------------------------ one kernel
def prove(graph: Graph, kernels: Kernels) -> list[Proof]:
    """The claims about each kernel, and what of them is not proved."""
    dimensions = dimensions_of(graph)
    return [prove_kernel(kernel, graph, kernels, dimensions=dimensions) for kernel in kernels.kernels]


def dimensions_of(graph: Graph) -> tuple[Size, ...]:
    """The sizes of all tensors in a graph, and of what slices leave behind them, each once: for all of its kernels."""
    values = (*graph.inputs, *graph.order())
    sizes = dict.fromkeys(n for v in values for t in v.avals for n in t.shape)
    sliced = (zip(v.args[0].shape, v.params["stop"], strict=True) for v in values if v.prim == "slice")
    return tuple(sizes | dict.fromkeys(simplify_size(n - stop) for sides in sliced for n, stop in sides if n != stop))


def prove_kernel(
    kernel: Kernel, graph: Graph, kernels: Kernels, apart: bool = True, dimensions: Sequence[Size] | None = None
) -> Proof:
    """Read its text, then ask for every claim. `apart`: that stores of different programs do not meet, too.

    dimensions: of the graph's tensors, where its kernels are many.
    """
    if kernel.grid == 0:  # of an axis that holds nothing: no program runs
        return Proof(kernel.name)
    try:
        subject = read_kernel(kernel, graph, kernels, dimensions)
    except (UnreadableText, NoSize, TooLong) as error:
        return Proof(kernel.name, faults=(Fault("text", 0, str(error)),))
    # In range: without a proof, an access is a fault.
    claims = [_claim(subject, access) for access in subject.read.accesses]
    subject.faults += [Fault("range", claim.line, claim.text) for claim in claims if claim.answer == "unproved"]
    # Arithmetic: 32 bits hold it, and what is divided is not negative.
    narrow = sum(_fits(subject, need) for need in subject.read.needs)
    subject.faults += [Fault("division", line, text) for text, line in subject.read.divisions]
    # Promises to the compiler.
    for hint in subject.read.hints:
        if not is_multiple(subject.world, hint.value, hint.factor):
            subject.faults.append(Fault("hint", hint.line, hint.text))
    # Programs apart: last, since it adds atoms for loops walked in another order.
    count, shared = overlaps(subject) if apart else (0, [])
    subject.faults += shared
    return Proof(kernel.name, tuple(claims), tuple(dict.fromkeys(subject.faults)), narrow, count)


def read_kernel(
    kernel: Kernel, graph: Graph, kernels: Kernels, dimensions: Sequence[Size] | None = None
) -> Subject:  # fmt: skip
    """The kernel's text, and the memory behind its pointers."""
    world = World()
    arithmetic = Arithmetic(world)
    # Sizes, and what the guards say about them; then memory and the number of programs, which are made of sizes.
    dimensions = dimensions_of(graph) if dimensions is None else dimensions
    sizes = Sizes(arithmetic, kernel.pinned, dimensions, kernel.guards)
    for guard in (*kernel.guards, *_of_differences(dimensions)):
        sizes.assume(guard)
    pointers = [p for p in kernel.arguments if isinstance(p, Pointer)]
    memory = {p.name: _memory(p.buffer, graph, kernels, kernel, sizes) for p in pointers}
    scalars = {s.name: sizes.integer(s.value) for s in kernel.arguments if isinstance(s, Scalar)}
    programs = sizes(kernel.grid)
    _assume_programs(world, programs)
    world.atoms.keep_few_samples()
    # The function's arguments as values, and a walk through its body.
    arguments: dict[str, Value] = {name: reading.Pointer(name) for name in memory}
    arguments |= {name: Int(value, 32, frozenset([name])) for name, value in scalars.items()}
    arguments |= {n: Int(Poly.of(v)) if type(v) is int else Opaque(v) for n, v in kernel.constants.items()}
    dtypes = {p.name: p.dtype for p in pointers}
    reader = Reader(RULES, arithmetic, arguments, dtypes, programs, sizes.is_multiple)
    reader.block(parse_function(kernel.source).body)
    return Subject(kernel, world, memory, scalars, reader)


def _of_differences(dimensions: Sequence[Size]) -> Iterator[sympy.Basic]:
    """n - 16 >= 0: a tensor of this length was asked for, so none is shorter than nothing."""
    for size in dimensions:
        if isinstance(size, sympy.Add) and any(part.could_extract_minus_sign() for part in size.args):
            yield sympy.Ge(size, 0)


def _assume_programs(world: World, programs: Poly) -> None:
    """There is a program: of a product, every factor is at least one; so is what a ceiling of one is of."""
    world.atoms.assume(programs - 1)
    world.atoms.assume(Poly.of(LARGEST) - programs)  # no device takes more
    if len(programs.terms) == 1:
        for atom in programs.atoms:
            world.bound_below(atom, ONE, ONE)
            for bound in [*world.atoms.bounds.lowers(atom)]:
                if bound.value.number is None and len(bound.value.atoms) == 1:
                    world.atoms.assume(bound.value - 1)


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


def memory_of(shape: Sequence[Size], strides: Sequence[Size], sizes: Sizes) -> Memory:
    dims, steps = tuple(map(sizes.integer, shape)), tuple(map(sizes.integer, strides))
    extent = ONE
    for n, s in zip(dims, steps, strict=True):
        extent = extent + (n - 1) * s
    return Memory(extent, dims)


# ------------------------------------------------------------------ claims
def _claim(subject: Subject, access: Access) -> Claim:
    memory, condition = subject.memory[access.pointer], ""
    answer: Answer = "unproved"
    if is_inside(subject.world, access.offset, memory, access.facts):
        answer = "proved"
    elif access.kind == "load" and access.pointer in subject.kernel.aligned and _in_group(subject, access, memory):
        answer = "group"
    elif condition := _condition(subject, access, memory):
        answer = "data"
    return Claim(access.line, access.text, access.kind, answer, condition, answer == "proved" and access.asserted)


def is_inside(world: World, offset: Poly, memory: Memory, facts: Sequence[Poly]) -> bool:
    """0 <= offset < extent, and no dimension is empty: or the extent would be nothing, which the offset is below."""
    facts = tuple(facts)
    return (
        world.holds(memory.extent - 1 - offset, facts)
        and world.holds(offset, facts)
        and all(world.holds(n - 1, facts) or _is_empty_without(world, memory, n, facts) for n in memory.shape)
    )


def _is_empty_without(world: World, memory: Memory, n: Poly, facts: Sequence[Poly]) -> bool:
    """Where a dimension is zero, the extent is, too."""
    if not all(len(m) == 1 and c > 0 and m[0] in world.atoms.positive for m, c in n.terms.items()):
        return False
    extent = memory.extent
    for atom in n.atoms:
        extent = extent.with_atom(atom, ZERO)
    return world.holds(-extent, tuple(facts))


def _in_group(subject: Subject, access: Access, memory: Memory) -> bool:
    """The first element of the group of 16 bytes lies inside, and the group begins at a multiple."""
    world = subject.world
    dtype = next(p.dtype for p in subject.kernel.arguments if isinstance(p, Pointer) and p.name == access.pointer)
    for q, division in world.atoms.divisions.items():
        number, lane = division.d.number, division.x
        if (
            division.kind != "/"
            or not isinstance(number, int)
            or len(lane.terms) != 1
            or number * ITEMSIZE[dtype] > GROUP
        ):
            continue
        atom = lane.top
        if lane == Poly.atom(atom) and atom in access.offset.atoms:
            first = access.offset.with_atom(atom, Poly.atom(q) * number)
            if is_multiple(world, first, number) and is_inside(world, first, memory, access.facts):
                return True
    return False


# ------------------------------------------------------------------ where data decides
CHOICES = 256
"""How many ranges are tried for one access: of four numbers there are thousands."""
STEPS_OF_DATA = 6_000
"""How many goals they may lead to together."""


def _condition(subject: Subject, access: Access, memory: Memory) -> str:
    """The ranges of what was loaded under which the access is inside; "" where there are none."""
    world, data = subject.world, subject.world.atoms.data
    atoms = sorted(a for a in world.atoms.origins(access.offset) if a in data)
    ranges = list(_ranges(memory))
    if not atoms or len(atoms) > 4:
        return ""
    with world.budget.at_most(STEPS_OF_DATA):
        for chosen in islice(product(ranges, repeat=len(atoms)), CHOICES):
            pairs = [*zip(atoms, chosen, strict=True)]
            facts = [f for a, (low, high) in pairs for f in (Poly.atom(a) - low, high - Poly.atom(a))]
            if is_inside(world, access.offset, memory, (*access.facts, *facts)):
                text = world.atoms.text
                texts = (f"{data[a]} in {text(low)} .. {text(high)}" for a, (low, high) in pairs)
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
    facts = (*need.facts, *(margin for p in passed for margin in margins(p)))
    if all(world.holds(margin, need.facts) or world.holds(margin, facts) for margin in margins(need.value)):
        return True
    subject.faults.append(Fault("width", need.line, f"{need.text} in 32 bits"))
    return False
