"""What kernels say of themselves: bytes that they move, guards, constants; and where a long graph is cut."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import sympy
from harness import INTERPRET, MANY, Input, M, N, T, agree, graph_of, op

from fusegrad.codegen import TARGETS, Unfusible, generate
from fusegrad.codegen.emit.access.traffic import WORKSPACE
from fusegrad.codegen.kernel import Kernel
from fusegrad.codegen.kernel_partition import DEPTH

SIZES = {M: 500, N: 8}


def test_partial_sums_are_counted_once_written_and_once_read() -> None:
    (kernel,) = agree(lambda x: x.sum(0), SIZES, target=MANY, x=Input("f32", (M, N))).kernels
    partial = next(b for b in kernel.scratch if not b.zeroed)
    moved = 4 * math.prod(sympy.sympify(n).subs(SIZES) for n in partial.shape)
    label = f"{partial.name}_ptr"
    assert sympy.sympify(kernel.writes[label]).subs(SIZES) == moved
    assert sympy.sympify((kernel.cached | kernel.reads)[label]).subs(SIZES) == moved


def test_counts_of_parts_are_guarded_where_they_are_symbols() -> None:
    (kernel,) = agree(lambda x: x.sum(0), SIZES, target=MANY, x=Input("f32", (M, N))).kernels
    assert [g.rhs for g in kernel.guards if isinstance(g, sympy.StrictLessThan) and g.rhs == 1 << 30]
    (kernel,) = agree(lambda x: x.sum(0), target=MANY, x=Input("f32", (500, 8))).kernels
    assert kernel.guards == ()


def test_the_tree_of_arrivals_is_as_wide_as_it_is_deep() -> None:
    (kernel,) = agree(lambda x: x.sum(0), SIZES, target=MANY, x=Input("f32", (M, N))).kernels
    ampere_to_blackwell = [TARGETS[f"cuda:{arch}"].units for arch in (80, 90, 100)]
    assert kernel.constants["FAN"] == round(math.sqrt(sorted(ampere_to_blackwell)[-1]))


def test_second_level_caches_are_those_of_the_makers_data_sheets() -> None:
    """A100: 40 MB, H100: 50 MB, B200: 126 MB, MI300X: 256 MB of Infinity Cache."""
    megabytes = {name: TARGETS[name].l2 / 2**20 for name in ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")}
    assert megabytes == {"cuda:80": 40, "cuda:90": 50, "cuda:100": 126, "hip:gfx942": 256}


def chain(length: int) -> Callable[[T], T]:
    """Every link reads the argument, too: the longest way counts, not the shortest."""

    def body(x: T) -> T:
        y = x
        for _ in range(length):
            y = op("sub", x, y)
        return y

    return body


@pytest.mark.parametrize(("length", "kernels"), [(DEPTH - 2, 1), (DEPTH + 2, 2), (2 * DEPTH + 2, 3)])
def test_a_graph_is_cut_where_it_is_too_deep(length: int, kernels: int) -> None:
    made = agree(chain(length), {M: 3, N: 5}, target=INTERPRET, slack=1000, x=Input("f32", (M, N)))
    assert len(made.kernels) == kernels


def test_a_cut_value_that_is_returned_has_no_memory_beside_the_output() -> None:
    def body(x: T) -> tuple[T, T]:
        middle = chain(DEPTH)(x)
        return middle, op("sub", x, middle)

    made = agree(body, {M: 3, N: 5}, slack=1000, x=Input("f32", (M, N)))
    assert len(made.kernels) == 2 and made.temporaries == ()


def test_a_sum_along_what_does_not_vary_is_a_product() -> None:
    for n in (N, 7):  # which may be 0, or not
        agree(lambda x: x.reshape(M, 1).expand((M, n)).sum(1), {M: 5, N: 7}, x=Input("f32", (M,)))  # noqa: B023
        agree(lambda x: x.reshape(M, 1).expand((M, n)).sum(0, 1), {M: 5, N: 7}, x=Input("f32", (M,)))  # noqa: B023


def test_rows_that_are_stored_at_odd_places_are_aligned_to_the_stores() -> None:
    def body(x: T) -> T:
        y = x[:, :5001]
        return (y - y.amax(1, keep=True)).exp().to("f32")

    graph = graph_of(body, x=Input("bf16", (M, 8192)))
    (kernel,) = generate(graph, target=TARGETS["cuda:90"], hints={M: 4096}, name="body").kernels
    assert "shift" in kernel.source, "5001 floats: the loads are aligned, most of the bytes are not"


def test_partial_sums_that_just_fit_the_second_level_cache_stay_there() -> None:
    (kernel,) = agree(lambda x: x.sum(0), SIZES, target=MANY, x=Input("f32", (M, N))).kernels
    (label,) = kernel.cached
    moved = int(sympy.sympify(kernel.cached[label]).subs(SIZES))
    for l2, stays in ((moved * WORKSPACE, True), (moved * WORKSPACE - 1, False)):
        (kernel,) = agree(lambda x: x.sum(0), SIZES, target=replace(MANY, l2=l2), x=Input("f32", (M, N))).kernels
        assert (label in kernel.cached) == stays and (label in kernel.reads) != stays


def test_lengths_at_the_end_of_what_32_bits_count_are_refused() -> None:
    def kernel(length: int) -> Kernel:
        graph = graph_of(lambda x: x.sum(1), x=Input("f32", (M, N)))
        return generate(graph, target=TARGETS["cuda:90"], hints={M: 4096, N: length}, name="body").kernels[0]

    most = 2**31 - 1
    assert sympy.Lt(N, most - 2**17) in kernel(most - 2**17 - 1).guards
    assert sympy.Gt(N, most) in kernel(most + 1).guards
    for length in (most - 2**17, most):
        with pytest.raises(Unfusible, match="the end of what 32 bits count"):
            kernel(length)


@pytest.mark.parametrize("steps", [4, 8])
def test_one_of_the_places_that_a_tile_holds_is_read_from_memory_once(steps: int) -> None:
    def body(x: T) -> T:
        last = x[:, steps - 1 : steps]
        return x[:, :1] - last.exp() + x * last

    (kernel,) = agree(body, {M: 3, N: 33}, target=INTERPRET, x=Input("f32", (M, steps, N))).kernels
    (label,) = kernel.reads
    assert sympy.sympify(kernel.reads[label] - 4 * M * steps * N) == 0
    assert sympy.sympify(kernel.cached[label] - 4 * M * 2 * N) == 0
