"""A result of a kernel may take the memory of one of its operands: each element is read where it is written, and first.

    x = tl.load(x_ptr + at + col)  ..  tl.store(y_ptr + at + col, f(x))      y may be x

One load and one store, at the same place, in the same turn of every loop and the same lane; that place tells program
and turn, so nothing else reads or writes it. Lanes that several threads hold alike store what they have read before.
"""

from __future__ import annotations

from ...ir import Graph
from ..kernel import Kernels, Pointer, Ref
from .accesses import read_kernel
from .claims import Subject
from .overlaps import Varying, longest_step
from .polynomials import ONE, TooLong
from .reading import Access, UnreadableText
from .symbols import NoSize


def may_overwrite(graph: Graph, kernels: Kernels, source: int, result: int) -> bool:
    """True where the result may be computed into the memory of the input; both by their numbers in the graph."""
    if len(kernels.kernels) != 1:  # the first of several that fails would leave the input half written
        return False
    try:
        subject = read_kernel(kernels.kernels[0], graph, kernels)
        return _is_in_place(subject, Ref("input", source), Ref("output", result))
    except (UnreadableText, NoSize, TooLong):
        return False


def _is_in_place(subject: Subject, source: Ref, result: Ref) -> bool:
    loads, stores = _accesses(subject, source), _accesses(subject, result)
    if [a.kind for a in (*loads, *stores)] != ["load", "store"]:
        return False
    (load,), (store,) = loads, stores
    alone = load.offset == store.offset and load.line < store.line and not store.tickets
    return alone and _is_once(subject, store)


def _accesses(subject: Subject, ref: Ref) -> list[Access]:
    names = {a.name for a in subject.kernel.arguments if isinstance(a, Pointer) and a.buffer == ref}
    return [a for a in subject.read.accesses if a.pointer in names]


def _is_once(subject: Subject, store: Access) -> bool:
    """The place tells the program, the turn of every loop that there is, and the lane."""
    turns = set(subject.read.spans)
    varying = Varying(subject)
    number = varying.digits(store)
    if number is None:
        return False
    while (step := longest_step(subject.world, [number])) is not None:
        number.determine(varying, step)
    determined = set(number.determined)
    varying.close(determined)
    program, alone = subject.read.program, subject.reader.programs == ONE
    return not number.open and turns <= determined and (alone if program is None else program in determined)
