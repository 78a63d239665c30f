"""A second judge of the proofs: z3 looks for sizes, a program, a turn and a lane that break what was proved.

    python tests/trust/counterexamples.py [--bodies 1] [--graphs 100] [--suite 1] [--sizes 12]

Of each kernel at a few sizes in numbers, small, around its blocks and beyond 32 bits, where all that is open is linear;
and with all sizes open at once, up to SMALL. An answer that takes too long is counted, not taken for one.
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import proofs
import sympy
import z3
from proofs import Subject
from z3_reading import Access, Question, Reading, Unreadable
from z3_terms import Sizes, Term, choice, either, floor_quotient, term_of, truth, variables_in

from fusegrad.codegen import Pointer, Scalar
from fusegrad.codegen.proofs import Proof
from fusegrad.ir.types import ITEMSIZE

SMALL = 70
GROUP = 16  # bytes that are read at once
PATIENT, QUICK = 1_500_000, 60_000
"""z3's steps for one answer, some seconds or a tenth of one: however busy the machine is, the answers are the same."""


@dataclass
class Verdict:
    """What z3 said of one kernel: questions that have an answer, those that have none, and counterexamples."""

    answered: int = 0
    unknown: int = 0
    found: list[str] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    unseen: set[str] = field(default_factory=set)  # accesses about which the proof has no claim
    sizes: int = 0

    def add(self, other: Verdict) -> None:
        self.answered += other.answered
        self.unknown += other.unknown
        self.sizes += other.sizes
        self.found += other.found
        self.kinds |= other.kinds
        self.unseen |= other.unseen


# ------------------------------------------------------------------ a kernel at sizes
def symbols_of(subject: Subject) -> list[sympy.Symbol]:
    """Of all that a launch is made of, but for those whose values were compiled in."""
    kernel = subject.kernel
    lengths = [n for v in subject.graph.inputs for n in (*v.shape, *v.params["strides"])]
    found = set().union(*(sympy.sympify(n).free_symbols for n in (*lengths, *launched(subject), *kernel.guards)))
    return sorted(found - kernel.pinned.keys(), key=str)


def launched(subject: Subject) -> set[Any]:
    """Lengths and strides behind the arguments, numbers that are passed, and how many programs there are."""
    kernel = subject.kernel
    shapes = [shape_of(subject, p) for p in kernel.arguments if isinstance(p, Pointer)]
    lengths = {n for shape, strides in shapes for n in (*shape, *strides)}
    return lengths | {s.value for s in kernel.arguments if isinstance(s, Scalar)} | {kernel.grid}


def shape_of(subject: Subject, pointer: Pointer) -> tuple[Any, Any]:
    """(shape, strides) of the tensor behind an argument."""
    graph, (kind, at) = subject.graph, pointer.buffer
    if kind == "input":
        return graph.inputs[at].shape, graph.inputs[at].params["strides"]
    if kind == "output":
        return graph.outputs[at].shape, graph.output_strides[at]
    buffer = (subject.kernels.temporaries if kind == "temporary" else subject.kernel.scratch)[at]
    return buffer.shape, buffer.strides


def extent(shape: Any, strides: Any, sizes: Sizes) -> Term:
    """Elements from the first to the last, of nothing none."""
    dims = [term_of(n, sizes) for n in shape]
    count = 1 + sum((n - 1) * term_of(s, sizes) for n, s in zip(dims, strides, strict=True))
    return choice(either(*(truth(n == 0) for n in dims)), 0, count)


class At:
    """A kernel read at some sizes, in numbers or open; `domain`: what is known of the open ones."""

    def __init__(self, subject: Subject, proof: Proof, sizes: Sizes, domain: list[z3.BoolRef]) -> None:
        kernel = subject.kernel
        sizes = {**sizes, **kernel.pinned}
        pointers = [p for p in kernel.arguments if isinstance(p, Pointer)]
        self.extents = {p.name: extent(*shape_of(subject, p), sizes) for p in pointers}
        self.grouped = {p.name: GROUP // ITEMSIZE[p.dtype] for p in pointers if p.name in kernel.aligned}
        self.answers = {(c.line, c.text): c.answer for c in proof.claims}
        self.unseen: set[str] = set()
        self.grid = term_of(kernel.grid, sizes)
        scalars = {s.name: term_of(s.value, sizes) for s in kernel.arguments if isinstance(s, Scalar)}
        self.reading = Reading(kernel, scalars, self.room, self.grid)
        self.domain = [*domain, *self.reading.domains]

    def room(self, kind: str, pointer: str, line: int, text: str) -> Term | None:
        """The tensor's elements; loads by groups may touch the rest of the last one, where no more was proved."""
        answer, count = self.answers.get((line, text)), self.extents[pointer]
        if answer is None:
            self.unseen.add(text)
        if answer == "data":
            return None
        if answer == "proved" or kind != "load" or pointer not in self.grouped:
            return count
        group = self.grouped[pointer]
        return -floor_quotient(-count, group) * group

    # ------------------------------------------------------------------ answers
    def verdict(self, meeting: bool, limit: int) -> Verdict:
        questions = [*self.reading.questions, *(self.meetings() if meeting else ())]
        solver = z3.Solver()
        solver.set("rlimit", limit)
        solver.set("timeout", limit // 30)  # milliseconds: not everything that z3 does is a step
        solver.add(*self.domain)
        told = Verdict(sizes=1, unseen=self.unseen, answered=self.reading.plain)
        if questions and solver.check(either(*(q.wrong for q in questions))) == z3.unsat:
            told.answered += len(questions)
            return told
        for question in questions:
            solver.push()
            solver.add(question.wrong)
            answer = solver.check()
            told.answered += answer != z3.unknown
            told.unknown += answer == z3.unknown
            if answer == z3.sat:
                told.kinds.add(question.kind)
                model = _one_line(solver.model())
                told.found.append(f"{question.kind}, line {question.line}: {question.text}: {model}")
            solver.pop()
        return told

    def meetings(self) -> Iterator[Question]:
        """Does another program store something else at the same place? Pieces that many find alike may meet."""
        reading, another = self.reading, Another(self.reading)
        words = {a.place.pointer for a in reading.accesses if a.text.startswith("known(")}
        pieces = {a.block for a in reading.accesses if a.text.startswith("are_missing(")}
        stores = [a for a in reading.accesses if a.kind == "store"]
        stores = [a for a in stores if a.place.pointer not in words and a.block not in pieces]
        for at, store in enumerate(stores):
            for other in stores[at:]:
                if store.place.pointer == other.place.pointer and len(store.counters) == len(other.counters):
                    yield another.meeting(store, other)


class Another:
    """Another program of the same launch, with turns, lanes and data of its own: whatever is free, once more."""

    def __init__(self, reading: Reading) -> None:
        self.program, self.free = reading.program, reading.free
        domain = z3.And([z3.BoolVal(True), *reading.domains])
        self.domain = z3.And(*(z3.substitute(domain, *self.pairs(mark, reading.free)) for mark in ("'", "''")))

    @staticmethod
    def pairs(mark: str, variables: Iterable[z3.ExprRef]) -> list[tuple[z3.ExprRef, z3.ExprRef]]:
        return [(v, z3.Const(f"{v}{mark}", v.sort())) for v in variables]

    def meeting(self, store: Access, other: Access) -> Question:
        """Behind counters, two programs of those that meet at one: of all that do, one goes on."""
        twins = self.pairs("'", self.free)
        pairs = zip(store.counters[-1:], other.counters[-1:], strict=True)
        counters = [truth(c.term != _exchanged(d.term, twins)) for c, d in pairs]
        place = truth(store.place.term == _exchanged(other.place.term, twins))
        differ = [_exchanged(self.program, twins) != self.program, *counters, self.values_differ(store, other)]
        wrong = z3.And(self.domain, *differ, store.active, _exchanged(other.active, twins), place)
        return Question("overlap", store.line, f"{store.text} | {other.text}", wrong)

    def values_differ(self, store: Access, other: Access) -> z3.BoolRef:
        """What the value is made of differs: a number, or where it was loaded.

        Each at its own lanes and turns as far as the place of the store has them; at the others, which are summed up,
        both at the same.
        """
        if store is not other:
            return truth(True)
        placed = [*variables_in(store.place.term), self.program]
        summed = self.pairs("''", [v for v in self.free if not any(z3.eq(v, own) for own in placed)])
        theirs = [*summed, *self.pairs("'", placed)]
        loads = [a for a in store.made_of if isinstance(a, Access)]
        terms = [t for t in store.made_of if not isinstance(t, Access)]
        terms += [t for a in loads for t in (a.place.term, a.active)]
        return either(*(truth(_exchanged(t, summed) != _exchanged(t, theirs)) for t in terms))


def _exchanged(term: Term, pairs: Any) -> Term:
    return z3.substitute(term, *pairs) if isinstance(term, z3.ExprRef) else term


def _one_line(model: z3.ModelRef) -> str:
    return ", ".join(line.strip(" [],") for line in str(model).splitlines())


# ------------------------------------------------------------------ sizes
def conditions(subject: Subject, sizes: Sizes) -> Iterator[z3.BoolRef]:
    """What holds of sizes at which a kernel is launched: its guards, lengths that are whole, and programs to run."""
    kernel, every = subject.kernel, {**sizes, **subject.kernel.pinned}
    yield from (truth(term_of(guard, every)) for guard in kernel.guards)
    for length in launched(subject):
        numerator, denominator = (term_of(part, every) for part in sympy.sympify(length).as_numer_denom())
        yield truth(numerator == denominator * floor_quotient(numerator, denominator))
    grid = term_of(kernel.grid, every)
    yield from (truth(grid > 0), truth(grid < 2**31))


def is_admitted(subject: Subject, sizes: Mapping[sympy.Symbol, int]) -> bool:
    """Also by what 64 bits hold, which the proofs take for granted."""
    if not all(map(z3.is_true, conditions(subject, sizes))):
        return False
    every = {**sizes, **subject.kernel.pinned}
    shapes = (shape_of(subject, p) for p in subject.kernel.arguments if isinstance(p, Pointer))
    return all(extent(*shape, every) < 2**60 for shape in shapes)


def numbers(subject: Subject, random: Random) -> Iterator[dict[sympy.Symbol, int]]:
    """Sizes without end, in turns: small ones, those around blocks, huge ones, and one huge one among small ones."""
    symbols = symbols_of(subject)
    blocks = [v for v in subject.kernel.constants.values() if type(v) is int and v > 1] or [64]
    small = functools.partial(random.randint, 1, SMALL)
    draws = {
        "small": lambda: small(),
        "blocks": lambda: random.choice(blocks) * random.randint(1, 5) + random.randint(-2, 2),
        "huge": lambda: int(2 ** random.uniform(16, 36)),
    }
    for kind in itertools.cycle((*draws, "one")):
        unit = random.choice((1, 1, 2, 8, 16, 64, 256))
        last = random.choice(symbols) if symbols else None
        drawn = {s: draws[kind]() if kind != "one" else draws["huge" if s == last else "small"]() for s in symbols}
        yield {s: max(1, n // unit) * unit for s, n in drawn.items()}


def admitted(subject: Subject, count: int, seed: int = 0) -> list[dict[sympy.Symbol, int]]:
    """So many different sizes, or as many as are found."""
    found: dict[tuple[int, ...], dict[sympy.Symbol, int]] = {}
    for sizes in itertools.islice(numbers(subject, Random(seed)), 60 * count):
        if tuple(sizes.values()) not in found and is_admitted(subject, sizes):
            found[tuple(sizes.values())] = sizes
        if len(found) == count:
            break
    return list(found.values())


def open_sizes(subject: Subject) -> tuple[dict[sympy.Symbol, z3.ArithRef], list[z3.BoolRef]]:
    """All sizes at once, each from nothing to SMALL, as the guards admit them."""
    sizes = {s: z3.Int(str(s)) for s in symbols_of(subject)}
    domain = [z3.And(n >= (1 if s.is_positive else 0), n <= SMALL) for s, n in sizes.items()]
    return sizes, [*domain, *conditions(subject, sizes)]


# ------------------------------------------------------------------ judging
def in_numbers(subject: Subject, proof: Proof, count: int, limit: int, meeting: bool = True) -> Verdict:
    """At so many sizes, one after the other; `meeting`: also whether programs store at one place."""
    told = Verdict()
    for sizes in admitted(subject, count):
        one = At(subject, proof, sizes, []).verdict(meeting, limit)
        one.found = [f"{sizes}: {f}" for f in one.found]
        told.add(one)
    return told


def at_once(subject: Subject, proof: Proof, limit: int) -> Verdict:
    """At all small sizes; none where the guards admit none."""
    sizes, domain = open_sizes(subject)
    solver = z3.Solver()
    solver.set("rlimit", limit)
    solver.add(*domain)
    return At(subject, proof, sizes, domain).verdict(False, limit) if solver.check() != z3.unsat else Verdict()


def judge(subject: Subject, proof: Proof, count: int, limit: int = QUICK) -> Verdict:
    """Both, of a kernel that was proved: of others nothing was said."""
    told = in_numbers(subject, proof, count, limit, meeting=bool(proof.apart))
    told.add(at_once(subject, proof, limit))
    return told


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--bodies", type=int, default=1, help="those of tests/codegen; 0 for none")
    options.add_argument("--graphs", type=int, default=100, help="so many random graphs")
    options.add_argument("--suite", type=int, default=1, help="every so manieth Function of tests/suite; 0 for none")
    options.add_argument("--sizes", type=int, default=8, help="so many sizes of each kernel")
    options.add_argument("--limit", type=int, default=QUICK, help="z3's steps for one answer")
    options.add_argument("--part", default="0/1", help="the i-th of n parts of the kernels")
    chosen = options.parse_args()
    at, parts = map(int, chosen.part.split("/"))
    numbers, broken, times = collections.Counter[str](), 0, list[float]()
    sources = {name: getattr(chosen, name) for name in ("bodies", "graphs", "suite")}
    for subject in itertools.islice(proofs.once(proofs.everything(sources)), at, None, parts):
        proof = proofs.prove(subject)
        if not proof.proved:
            continue
        started = time.perf_counter()
        try:
            told = judge(subject, proof, chosen.sizes, chosen.limit)
        except (Unreadable, NotImplementedError) as error:
            numbers["unreadable"] += 1
            print(f"{subject.origin}: {subject.kernel.name}: {error}", flush=True)
            continue
        times.append(time.perf_counter() - started)
        numbers.update(kernels=1, sizes=told.sizes, answered=told.answered, unknown=told.unknown)
        broken += len(told.found)
        for text in (*told.found, *(f"no claim about {text}" for text in told.unseen)):
            print(f"{subject.origin}: {subject.kernel.name}: {text}", flush=True)
    print({**numbers, "counterexamples": broken, "seconds": round(sum(times)), "most": round(max(times, default=0), 1)})
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
