"""How kernels walk, in words: matrices that are never in memory, and which are made again; steps of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...codegen import Course, Walk
from ...codegen.schedule.loops.look_back import Estimate
from ..values.sizes import Sizes, number


def walk_text(walk: Walk, sizes: Sizes) -> str:
    """rows M = 4096 by 128, walks N = 4096 by 64; rescaled as the maximum moves; skips blocks above the diagonal"""
    (rows, stream), beside = walk.blocks, [f"{number(n, sizes):,}" for n in walk.beside]
    lengths = zip(walk.letters, (walk.rows, walk.stream), strict=True)
    first, second = (f"{letter} = {number(n, sizes):,}" for letter, n in lengths)
    text = f"rows {first} by {rows}, walks {second} by {stream}"
    if walk.keeps_stream:
        text = f"tiles of {first} by {rows} and {second} by {stream}"
    parts = [text, *([f"sums over {' x '.join(beside)} besides"] if beside else [])]
    parts += [f"makes {listed(walk.prologue)} of them first"] if walk.prologue else []
    parts += [f"walks them {walk.passes} times"] if walk.passes > 1 else []
    moves = "moves" if len(walk.relative_to) == 1 else "move"
    parts += [f"rescaled as {listed(walk.relative_to)} {moves}"] if walk.relative_to else []
    parts += [f"skips blocks {listed(walk.skips)}"] if walk.skips else []
    return "; ".join(parts)


def course_text(course: Course, sizes: Sizes) -> str:
    """4,096 steps by 64, in 32 chunks: 1 program for 132 multiprocessors; modelled 10 us, 67 as one chunk"""
    steps, programs = number(course.steps, sizes), number(course.programs, sizes)
    text = f"{steps:,} steps by {course.block}"
    if (parts := number(course.parts, sizes)) > 1:
        text = f"{text}, {parts:,} programs share their sums"
    if course.again:
        text = f"{text}, there and back, made again by {course.again}"
    if course.chunks == 1:
        return "; ".join([text, *([f"never in chunks: {course.whole}"] if course.whole else [])])
    estimate = Estimate.of(-(-steps // course.block), course.chunks, course.launches, course.passes)
    of_device = f"{programs:,} program{'s' * (programs > 1)} for {course.units} multiprocessors"
    launches = f" in {course.launches} launches" * (course.launches > 1)
    modelled = f"modelled {estimate.in_chunks:.0f} us{launches}, {estimate.whole:.0f} as one chunk"
    return f"{text}, in {course.chunks} chunks: {of_device}; {modelled}"


def made_again(before: Sequence[tuple[str, Walk]], own: Sequence[tuple[str, Walk]]) -> Iterator[str]:
    """A line for each matrix that kernels of one direction form again, after those before: by name, and where."""
    first = {product for _, walk in before for product in walk.products}
    names = dict.fromkeys(product for _, walk in own for product in walk.products)
    for product in names:
        makers = [kernel for kernel, walk in own if product in walk.products]
        again = makers if product in first else makers[1:]
        if again:
            yield f"{product}: computed again in {listed(again)}, not saved"


def listed(words: Sequence[str]) -> str:
    """a, b and c"""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last
