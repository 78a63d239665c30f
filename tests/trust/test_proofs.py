"""Kernels are proved, and a fault planted into their text is found: by the proof, which shares nothing with codegen."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import proofs
import pytest
import sympy
import torch
from evaluated import Run, Touched
from harness import Input, M, N, symbol
from proofs import Subject, of_body

import fusegrad
from fusegrad.codegen import Pointer, Scalar
from fusegrad.codegen.proofs import accesses
from fusegrad.codegen.proofs.arithmetic import Arithmetic
from fusegrad.codegen.proofs.bounds import World
from fusegrad.codegen.proofs.claims import Claim
from fusegrad.codegen.proofs.polynomials import ZERO, Poly
from fusegrad.codegen.proofs.search import has_readable_coefficients
from fusegrad.runtime.kernels.proofs import are_proved

WIDE, ODD = proofs.SIZES["wide"], proofs.SIZES["odd"]
ROWS_LEFT = {**WIDE, proofs.M: 4097}
"""Rows that no block divides, so that they are masked as columns are."""


def the(name: str, sizes=WIDE, target: str = "cuda:90") -> Subject:
    function, inputs = proofs.bodies()[name]
    return next(of_body(name, function, inputs, sizes, target))


# ------------------------------------------------------------------ what is there
SAMPLE = ["body rms_backward", "body softmax", "body cross_entropy", "body rope", "layout permute", "layout turned",
          "matrix_products linear bf16", "mixed_axes batch backward"]  # fmt: skip


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.parametrize("size", proofs.SIZES)
def test_kernels_are_proved(name: str, size: str) -> None:
    function, inputs = proofs.bodies()[name]
    for subject in of_body(name, function, inputs, proofs.SIZES[size], "cuda:90"):
        proof = proofs.prove(subject)
        assert proof.proved, proof.faults
        assert proof.claims and proof.apart


def test_an_index_from_memory_is_a_condition() -> None:
    (claim,) = (c for c in proofs.prove(the("body cross_entropy")).claims if c.answer == "data")
    assert claim.text.startswith("tl.load(x_ptr + at") and claim.condition.startswith("labels in 0 .. ")


ASSERTION = (
    "tl.device_assert((0 <= index_2) & (index_2 < size), "
    '"body.py:2 index: index out of range", mask=inside_row)'
)
WITHOUT_PROOF = {
    "no assertion": (ASSERTION, "pass_by = 0"),
    "one too far": ("index_2 < size", "index_2 <= size"),
    "no lower end": ("(0 <= index_2) & ", ""),
    "of something else": (ASSERTION, ASSERTION.replace("index_2", "row")),
    "under another mask": (", mask=inside_row)\n    x", ", mask=inside_row & (index < 5))\n    x"),
    "under a mask that was exchanged": ("    x = ", "    inside_row = row < N\n    x = "),
    "in a branch": (ASSERTION, f"if size > 3:\n        {ASSERTION}"),
    "in a loop": (ASSERTION, f"for turn in range(size):\n        {ASSERTION}"),
    "behind the access": (ASSERTION, "pass_by = 0"),
}


def looked_up(subject: Subject) -> Claim:
    (claim,) = (c for c in proofs.prove(subject).claims if "(x_ptr" in c.text)
    return claim


def test_an_asserted_index_is_proved() -> None:
    subject = the("body lookup", {**WIDE, proofs.N: 24}, "interpret")
    assert ASSERTION in subject.kernel.source
    claim = looked_up(subject)
    assert claim.answer == "proved" and claim.asserted


@pytest.mark.parametrize("fault", WITHOUT_PROOF)
def test_an_assertion_that_does_not_cover_an_access_proves_nothing(fault: str) -> None:
    subject = the("body lookup", {**WIDE, proofs.N: 24}, "interpret")
    old, new = WITHOUT_PROOF[fault]
    source = subject.kernel.source
    assert old in source
    source = source.replace(old, new)
    if fault == "behind the access":
        source += f"    {ASSERTION}\n"
    claim = looked_up(replace(subject, kernel=replace(subject.kernel, source=source)))
    assert claim.answer != "proved" and not claim.asserted


def test_reads_of_long_odd_rows_stay_in_their_groups() -> None:
    proof = proofs.prove(the("body softmax", ODD))
    assert proof.proved and proof.count("group") == 2


def test_explain_says_what_was_proved() -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    found = fusegrad.explain(Scale, "f32[64, 48]")
    assert [p.proved for p in found.proofs] == [True, True]
    assert "proved in range" not in str(found)
    with fusegrad.config.patch(debug=True):
        assert "accesses: 2 proved in range for all sizes, offsets 64-bit where 32 bits are too few" in str(found)


# ------------------------------------------------------------------ what must be found
MUTANTS = {
    "mask of a load dropped": ("body swiglu", ODD, ", mask=inside, other=0.0", "", "range"),
    "mask of a store dropped": (
        "body dyt_backward",
        ROWS_LEFT,
        "bfloat16), mask=inside_row & inside_col)",
        "bfloat16))",
        "range",
    ),
    "one mask of two dropped": (
        "body dyt_backward",
        ROWS_LEFT,
        "alpha).to(tl.bfloat16), mask=inside_row & inside_col",
        "alpha).to(tl.bfloat16), mask=inside_row",
        "range",
    ),
    "one element too far": ("body softmax", WIDE, "at = row * N\n", "at = row * N + 1\n", "range"),
    "one element too early": ("body softmax", WIDE, "at = row * N\n", "at = row * N - 1\n", "range"),
    "mask one too long": ("body dyt_backward", WIDE, "col < N - first_col", "col <= N - first_col", "range"),
    "mask of the row one too long": (
        "body dyt_backward",
        ROWS_LEFT,
        "row < M - first_row",
        "row < M - first_row + 1",
        "range",
    ),
    "wrong stride": ("body rms_forward", WIDE, "at = row * N", "at = row * (N + 1)", "range"),
    "rows for columns": ("body dyt_backward", WIDE, "lanes = row * N + col", "lanes = col * N + row", "range"),
    "a product in 32 bits": (
        "body softmax",
        WIDE,
        "row = tl.cast(tl.program_id(0), tl.int64)",
        "row = tl.program_id(0)",
        "width",
    ),
    "a block number in 32 bits": (
        "body dyt_backward",
        WIDE,
        "tl.cast(item, tl.int64) * BLOCK_M",
        "item * BLOCK_M",
        "width",
    ),
    "one item too many": ("body rms_backward", WIDE, "(pid + 1) * ITEMS, M)", "(pid + 1) * ITEMS, M + 1)", "range"),
    "no end of the items": (
        "body rms_backward",
        WIDE,
        "tl.minimum((pid + 1) * ITEMS, M)",
        "(pid + 1) * ITEMS",
        "range",
    ),
    "items of the next program, too": (
        "body rms_backward",
        WIDE,
        "(pid + 1) * ITEMS, M)",
        "(pid + 2) * ITEMS, M)",
        "overlap",
    ),
    "slots of the next program": (
        "body rms_backward",
        WIDE,
        "tl.cast(pid, tl.int64) * 4096",
        "tl.cast(pid + 1, tl.int64) * 4096",
        "range",
    ),
    "slots too short": (
        "body rms_backward",
        WIDE,
        "tl.cast(pid, tl.int64) * 4096",
        "tl.cast(pid, tl.int64) * 2048",
        "overlap",
    ),
    "one slot for all": (
        "body rms_backward",
        WIDE,
        "dw_partial_ptr + tl.cast(pid, tl.int64) * 4096",
        "dw_partial_ptr",
        "overlap",
    ),
    "a counter beyond the last": (
        "body rms_backward",
        WIDE,
        "arrived_ptr + GROUPS, GROUPS",
        "arrived_ptr + GROUPS + 2, GROUPS",
        "range",
    ),
    "members of the next group": ("body rms_backward", WIDE, "tl.minimum(FAN, PROGRAMS - group * FAN)", "FAN", "range"),
    "floor for ceiling": ("layout turned", WIDE, "pid // tl.cdiv(N, BLOCK_N)", "pid // (N // BLOCK_N)", "division"),
    "a group beyond the row": (
        "body softmax",
        ODD,
        "near = col // 8 * 8 < left",
        "near = col // 8 * 8 <= left",
        "range",
    ),
    "whole groups at the end": (
        "body softmax",
        ODD,
        "(col // 8 * 8 + 8 <= left)",
        "(col // 8 * 8 + 7 <= left)",
        "range",
    ),
    "no shift": ("body softmax", ODD, "tl.cast(col_at, tl.int64) - shift", "tl.cast(col_at, tl.int64)", "range"),
    "a promise of alignment": (
        "body softmax",
        ODD,
        "tl.multiple_of(row * N + first_col, 8)",
        "tl.multiple_of(row * N + first_col, 16)",
        "hint",
    ),
    "columns of a product": (
        "matrix_products linear bf16",
        WIDE,
        "at_3 = first_row * N + first_col",
        "at_3 = first_row * N",
        "overlap",
    ),
    "no mask along the sum": (
        "matrix_products linear bf16",
        {**ODD, "K": 0},
        "first_k = tl.cast(k_at, tl.int64)",
        "first_k = tl.cast(k_at + 1, tl.int64)",
        "range",
    ),
}
MUTANTS |= {
    "a row and its remainder, one too many": (
        "layout shifted", ODD, "pid // tl.cdiv(N + 3, BLOCK_N)", "(pid + 1) // tl.cdiv(N + 3, BLOCK_N)", "range"),
    "a remainder that is not known": ("layout shifted", ODD, "N = N // 4 * 4", "N = (N + 3) // 4 * 4", "range"),
    "blocks before the first of a walk backwards": (
        "layout forth and back", ODD, "(tl.cdiv(N, BLOCK_N) - 1) * BLOCK_N", "(tl.cdiv(N, BLOCK_N) - 2) * BLOCK_N",
        "range"),
    "items of all groups in 32 bits": (
        "mixed_axes group backward", WIDE, "(group * FAN + members) * ITEMS, M", "(group * FAN + members) * C, M",
        "width"),
    "one member too many": (
        "mixed_axes affine backward", WIDE, "tl.minimum(FAN, PROGRAMS - group * FAN)", "FAN", "range"),
    "a flip one too far": ("layout flip after a reduction", ODD, "row * N - first_col + x_offset",
                           "row * N - first_col + x_offset + 1", "range"),
    "parts of a concatenation": ("layout cat", ODD, "mask=inside & (i >= tl.cast(size_2, tl.int64))", "mask=inside",
                                 "range"),
    "an end of two parts": ("layout cat", WIDE, "lt_v = i < tl.cast(size, tl.int64)",
                            "lt_v = i <= tl.cast(size, tl.int64)", "range"),
    "turns of a group": ("dequantised groups of 64 f32", ODD, "k_at % 2 * BLOCK_K", "k_at % 3 * BLOCK_K", "range"),
    "a group too many": ("dequantised groups of 64 f32", ODD, "tl.cast(k_at // 2", "tl.cast((k_at + 1) // 2", "range"),
}  # fmt: skip
"""Remainders of sizes, turns counted from the end, products of sums, empty dimensions: what those proofs rest on."""
GRIDS = {
    "one program too many": ("body softmax", WIDE, lambda n: n + 1),
    "twice the programs": ("body rms_forward", WIDE, lambda n: 2 * n),
    "a program for the last block that is none": ("body rope", WIDE, lambda n: n * 2),
}


def mutant(name: str, sizes, old: str, new: str) -> Subject:
    function, inputs = proofs.bodies()[name]
    made = of_body(name, function, inputs, {k: v for k, v in sizes.items() if k != "K"}, "cuda:90")
    subject = next(s for s in made if old in s.kernel.source)
    return replace(subject, kernel=replace(subject.kernel, source=subject.kernel.source.replace(old, new)))


@pytest.mark.parametrize("fault", MUTANTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    name, sizes, old, new, kind = MUTANTS[fault]
    assert kind in {f.kind for f in proofs.prove(mutant(name, sizes, old, new)).faults}


@pytest.mark.parametrize("fault", GRIDS)
def test_a_wrong_grid_is_found(fault: str) -> None:
    name, sizes, grid = GRIDS[fault]
    subject = the(name, sizes)
    wrong = replace(subject.kernel, grid=grid(subject.kernel.grid))
    assert not proofs.prove(replace(subject, kernel=wrong)).proved


def test_a_guard_that_is_needed_is_missed() -> None:
    subject = the("matrix_products linear bf16")
    bare = replace(subject, kernel=replace(subject.kernel, guards=()))
    assert proofs.prove(subject).proved and not proofs.prove(bare).proved


def test_a_quotient_of_two_sizes_is_a_size() -> None:
    """[M, N] as [G, M / G, N], where neither size is known."""
    groups, inputs = symbol("groups"), {"x": Input("f32", (M, N)), "b": Input("f32", (symbol("groups"), N))}
    body = lambda x, b: x.reshape(groups, M / groups, N) + b.reshape(groups, 1, N)  # noqa: E731
    (subject,) = of_body("quotient", body, inputs, {M: 24, N: 5, groups: 4}, "cuda:90")
    assert proofs.prove(subject).proved
    longer = replace(subject.kernel, grid=subject.kernel.grid * 2)
    assert not proofs.prove(replace(subject, kernel=longer)).proved


def test_what_the_capture_assumed_counts_as_a_guard() -> None:
    subject = the("matrix_products linear bf16")
    bare = replace(subject.kernels, kernels=(replace(subject.kernel, guards=()),))
    assert not are_proved(subject.graph, bare)
    assert are_proved(subject.graph, bare, subject.kernel.guards)


def test_text_that_is_not_understood_is_not_proved() -> None:
    subject = mutant("body softmax", WIDE, "    row = ", "    while True:\n        pass\n    row = ")
    assert [f.kind for f in proofs.prove(subject).faults] == ["text"]


# ------------------------------------------------------------------ the same by numbers
def number(size, sizes) -> int:
    return size if isinstance(size, int) else int(sympy.sympify(size).xreplace(sizes))


def huge(subject: Subject, random: Random):
    """Sizes that the guards admit, some of them beyond what 32 bits hold."""
    shapes = [n for v in subject.graph.inputs for n in v.shape if not isinstance(n, int)]
    symbols = sorted(set().union(*(n.free_symbols for n in shapes)), key=str)
    for _ in range(300):
        unit = random.choice((1, 16, 256, 4096))
        sizes = {s: sympy.Integer(unit * int(2 ** random.uniform(0, 36))) for s in symbols}
        sizes |= {s: sympy.Integer(n) for s, n in subject.kernel.pinned.items()}
        small = max(extents(subject, sizes).values()) < 2**60 and number(subject.kernel.grid, sizes) < 2**31
        if small and all(bool(g.xreplace(sizes)) for g in subject.kernel.guards):
            return sizes
    return None


def extents(subject: Subject, sizes) -> dict[str, int]:
    def extent(shape, strides) -> int:
        return 1 + sum((number(n, sizes) - 1) * number(s, sizes) for n, s in zip(shape, strides, strict=True))

    graph, kernel = subject.graph, subject.kernel
    found = {}
    for p in (a for a in kernel.arguments if isinstance(a, Pointer)):
        kind, at = p.buffer
        if kind == "input":
            found[p.name] = extent(graph.inputs[at].shape, graph.inputs[at].params["strides"])
        elif kind == "output":
            found[p.name] = extent(graph.outputs[at].shape, graph.output_strides[at])
        else:
            buffer = (subject.kernels.temporaries if kind == "temporary" else kernel.scratch)[at]
            found[p.name] = extent(buffer.shape, buffer.strides)
    return found


def outside(subject: Subject, seed: int) -> list[str]:
    """What one program at random huge sizes touches outside its tensors, or at a place that was wrapped around."""
    sizes = huge(subject, Random(seed))
    if sizes is None:
        return []
    kernel, room = subject.kernel, extents(subject, sizes)
    scalars = {a.name: number(a.value, sizes) for a in kernel.arguments if isinstance(a, Scalar)}
    run = Run(kernel, scalars, number(kernel.grid, sizes), seed)
    return [
        f"{t.text} at {t.place} of {room[t.place.pointer]}, {sizes}"
        for t in run.touched
        if t.place.wrapped or not 0 <= t.place.offset < room[t.place.pointer] + spare(subject, t)
    ]


def spare(subject: Subject, touched: Touched) -> int:
    """Elements that a read of whole groups may touch behind an aligned tensor."""
    return 7 if touched.kind == "tl.load" and touched.place.pointer in subject.kernel.aligned else 0


@pytest.mark.parametrize("name", SAMPLE)
def test_huge_sizes_stay_inside(name: str) -> None:
    """Addresses in 32 bits that wrap around as they do on a device, at sizes that no machine here holds."""
    function, inputs = proofs.bodies()[name]
    for sizes in proofs.SIZES.values():
        for subject in of_body(name, function, inputs, sizes, "cuda:90"):
            for seed in range(10):
                assert not outside(subject, seed)


SEEN_IN_NUMBERS = [f for f, m in MUTANTS.items() if m[-1] in ("range", "width") and m[1] in (WIDE, ROWS_LEFT)][:3]


@pytest.mark.parametrize("fault", SEEN_IN_NUMBERS)
def test_the_numbers_find_planted_faults(fault: str) -> None:
    """What the evaluation cannot see it would not see in the kernels above either."""
    subject = mutant(*MUTANTS[fault][:-1])
    assert any(outside(subject, seed) for seed in range(60))


# ------------------------------------------------------------------ no search without an end
def test_of_four_indices_only_some_ranges_are_tried(monkeypatch) -> None:
    """A search through all of them took minutes at a first call."""

    class Picks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *at):
            return x[at] * 2

        @staticmethod
        def backward(ctx, g):
            return None, None, None, None, None

    asked = []
    holds = World.holds
    monkeypatch.setattr(World, "holds", lambda self, *goal: asked.append(goal) or holds(self, *goal))
    fast = fusegrad.compile(Picks, backend="interpret")
    x, at = torch.randn(4, 5, 6, 7), [torch.randint(0, 4, (9,)) for _ in range(4)]
    for _ in range(3):
        assert torch.equal(fast.apply(x, *at), Picks.apply(x, *at))
    assert fast._fusegrad.ledger.records["forward"].status == "compiled"
    assert 0 < len(asked) < 8 * accesses.CHOICES


def row_major() -> tuple[World, Poly]:
    """0 <= i < n and 0 <= j < m: i * m + j < n * m, which takes a search."""
    world = World()
    n, m = (world.atom(name, lambda sample, random: random.randint(1, 9), 1) for name in "nm")
    i, j = (world.atom(name, lambda sample, random: 0, 0, most - 1) for name, most in (("i", n), ("j", m)))
    return world, n * m - 1 - i * m - j


def test_questions_have_steps_in_common() -> None:
    world, goal = row_major()
    with world.budget.at_most(0):
        assert not world.holds(goal)
    world, goal = row_major()
    with world.budget.at_most(50):
        assert world.holds(goal)


def test_long_products_are_not_taken_apart() -> None:
    """2^30 parts: a search that met one did not end."""
    world = World()
    first, *others = (world.atom(f"n{i}", lambda sample, random: 1, 1) for i in range(30))
    product = first
    for other in others:
        product = product * other
    assert not world.atoms.is_plain_from_one(product - first)
    assert world.atoms.is_plain_from_one(first * others[0] - first)


def test_a_turn_leaves_room_for_a_block_below_what_its_length_never_exceeds() -> None:
    """Whole blocks from the last one of `length` on, where N >= length is a multiple of blocks: rows of heads apart."""
    world = World()
    n, heads = (world.atom(name, lambda sample, random: random.randint(1, 9), 1) for name in ("n", "heads"))
    head = world.atom("head", lambda sample, random: 0, 0, heads - 1)
    length = world.atom("length", lambda sample, random: 16 * sample[n.top], 0, n * 16)
    arithmetic = Arithmetic(world)
    whole, _ = arithmetic.divide(length, Poly.of(16)) or (ZERO, ZERO)
    rest = length - whole * 16
    turn = arithmetic.turns("turn", rest, Poly.of(16))
    last = head * 4 + heads * 4 * ((whole + turn) * 16 + 15) + 3
    assert world.holds(heads * n * 64 - 1 - last, [rest - 1 - turn * 16])
    assert not world.holds(heads * n * 64 - 2 - last, [rest - 1 - turn * 16])


def test_what_comes_in_twos_is_whole() -> None:
    """Two pieces by turns, of which a mask says that the place is beyond the first row: then so is the row."""
    world = World()
    size = world.atom("n", lambda sample, random: random.randint(1, 9), 1)
    most = {"piece": 1, "row": 9}
    piece, row = (world.atom(name, lambda sample, random: random.randint(0, 1), 0, n) for name, n in most.items())
    beyond = row * 2 + piece - 2
    assert world.holds(row * size * 5 - size * 5 + piece, [beyond])
    assert not world.holds(row * size * 5 - size * 5 + piece, [beyond + 1])
    assert not world.holds(row * size * 5 - size * 6 + piece, [beyond])
    below = Poly.of(6) - row * 2 - piece
    assert world.holds(size * 3 - size * row, [below]) and not world.holds(size * 2 - size * row, [below])


def test_coefficients_that_grow_end_a_search() -> None:
    assert has_readable_coefficients(Poly.of(2**255)) and not has_readable_coefficients(Poly.of(-(2**257)))
