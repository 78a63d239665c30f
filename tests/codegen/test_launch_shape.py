"""How many programs are launched, and how many loads a loop has under way: the device filled, once."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import sympy
from bodies import BODIES
from harness import Input, K, M, N, T, full, graph_of, where

from fusegrad.codegen import TARGETS, generate
from fusegrad.codegen.kernel import Kernel
from fusegrad.codegen.schedule.occupancy import evenness
from fusegrad.ir import emit

PERSISTENT = ("rms_backward", "layer_backward", "dyt_backward")
SIZES = ({M: 8192, N: 8192}, {M: 8192, N: 16384}, {M: 4096, N: 5120}, {M: 65536, N: 256}, {M: 16384, N: 4096})


def kernel(body: str, sizes: dict[sympy.Symbol, int], target: str) -> Kernel:
    function, inputs = BODIES[body]
    sizes = {K: 8, **sizes}
    (found,) = generate(graph_of(function, **inputs), target=TARGETS[target], hints=sizes, name=body).kernels
    return found


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "cuda:100"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("body", PERSISTENT)
def test_persistent_programs_are_one_wave_that_leaves_no_unit_without_work(
    body: str, sizes: dict[sympy.Symbol, int], target: str
) -> None:
    found, units = kernel(body, sizes, target), TARGETS[target].units
    programs = int(sympy.sympify(found.grid).subs(sizes))
    # 16 warps fit where a thread takes no more than 128 registers
    slots = units * max(1, 16 // found.num_warps)
    assert 0.6 * units <= programs <= slots


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "cuda:100"])
@pytest.mark.parametrize("body", PERSISTENT)
def test_small_inputs_are_spread_over_the_device(body: str, target: str) -> None:
    sizes, units = {M: 512, N: 1024}, TARGETS[target].units
    assert 0.75 * units <= int(sympy.sympify(kernel(body, sizes, target).grid).subs(sizes)) <= units


@pytest.mark.parametrize(("rows", "columns"), [(512, 8), (16384, 32)])
def test_strips_are_narrow_where_few_of_them_are_all_that_there_is(rows: int, columns: int) -> None:
    """Not where a tensor is large: a strip of whole sectors is read once."""
    assert kernel("column_softmax", {M: rows, N: 1024}, "cuda:90").constants["BLOCK_N"] == columns


def test_small_sums_take_turns_rather_than_a_program_each() -> None:
    """What a program does once costs as much as some turns."""

    def loss(x: T) -> T:
        return x.to("f32").exp().sum()

    sizes = {M: 512, N: 1024}
    graph = graph_of(loss, x=Input("bf16", (M, N)))
    (found,) = generate(graph, target=TARGETS["cuda:90"], hints=sizes, name="loss").kernels
    assert int(sympy.sympify(found.grid).subs(sizes)) <= 132


@pytest.mark.parametrize("body", ["rms_backward", "layer_backward"])
def test_partial_sums_of_large_inputs_weigh_little(body: str) -> None:
    """What does not stay in L2 is moved at most 1.03 times."""
    sizes = {M: 4096, N: 4096}
    found = kernel(body, sizes, "cuda:90")
    partial = sum(int(sympy.sympify(n).subs(sizes)) for name, n in found.writes.items() if "partial" in name)
    assert partial <= 0.03 * 3 * 2 * 4096 * 4096


@pytest.mark.parametrize(("columns", "warps"), [(1024, 4), (4096, 8), (8192, 16)])
@pytest.mark.parametrize("body", ["rms_backward", "layer_backward"])
def test_a_thread_holds_sixteen_elements_of_a_row_that_is_kept(body: str, columns: int, warps: int) -> None:
    """Each reduction costs a warp as many instructions, whatever the elements of a thread."""
    assert kernel(body, {M: 512 if columns == 1024 else 16384, N: columns}, "cuda:90").num_warps == warps


def test_multiprocessors_have_equally_many_programs() -> None:
    """Two of these fit, but the bytes of partial sums are worth 179 programs only."""
    sizes = {M: 4096, N: 4096}
    assert int(sympy.sympify(kernel("rms_backward", sizes, "cuda:90").grid).subs(sizes)) == 128


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("body", [*PERSISTENT, "softmax"])
def test_a_pipelined_loop_has_loads_in_flight_while_it_computes(body: str, sizes: dict[sympy.Symbol, int]) -> None:
    stages = re.findall(r"num_stages=(\d+)", kernel(body, sizes, "cuda:90").source)
    assert all(int(n) > 2 for n in stages)


@pytest.mark.parametrize(
    ("programs", "slots", "share"), [(90, 132, 90 / 132), (132, 264, 1), (200, 264, 200 / 264), (544, 528, 544 / 1056)]
)
def test_evenness(programs: int, slots: int, share: float) -> None:
    assert evenness(programs, slots, 132) == pytest.approx(share)


def test_a_strip_reads_its_rows_before_it_waits_for_what_all_strips_share() -> None:
    sizes = {M: 8192, N: 65536}
    source = kernel("rms_backward", sizes, "cuda:90").source
    turn = source[source.index("for item in") :]
    read, asked, reduced = turn.index("tl.load("), turn.index("known("), turn.index("tl.sum(")
    assert read < asked < reduced


def test_programs_that_want_many_registers_are_fewer() -> None:
    """Rows at odd places, 32 elements a thread: three of these fit where four of the others do."""

    def loss(x: T) -> T:
        x = x.to("f32")
        return (x - x.amax(1, keep=True)).exp().sum(1).log().sum()

    grids = []
    for columns in (50257, 32000):
        sizes = {M: 8192, N: columns}
        graph = graph_of(loss, x=Input("bf16", (M, N)))
        (found,) = generate(graph, target=TARGETS["cuda:90"], hints=sizes, name="loss").kernels
        grids.append(int(sympy.sympify(found.grid).subs(sizes)))
    assert grids == [3 * 132, 4 * 132]


@pytest.mark.parametrize(("columns", "block"), [(5120, (2, 1024)), (4096, (1, 2048)), (50256, (1, 2048))])
def test_blocks_are_narrower_where_the_last_would_be_half_empty(columns: int, block: tuple[int, int]) -> None:
    """5120 columns are five blocks of 1024, of two rows each, and three of 2048, of which one is half outside."""
    inputs = {"x": Input("bf16", (M, N)), "bias": Input("bf16", (N,))}
    graph = graph_of(lambda x, bias: (x + bias).exp(), **inputs)
    (found,) = generate(graph, target=TARGETS["cuda:90"], hints={M: 4096, N: columns}, name="body").kernels
    assert (found.constants.get("BLOCK_M", 1), found.constants["BLOCK_N"]) == block


@pytest.mark.parametrize(
    ("dtype", "rows", "columns", "block"),
    [("bf16", 8192, 8192, 4096), ("f16", 8192, 50257, 4096), ("bf16", 4096, 4096, 2048), ("f32", 8192, 8192, 2048)],
)
def test_a_thread_of_many_programs_has_four_whole_accesses(dtype: str, rows: int, columns: int, block: int) -> None:
    """What a program begins with weighs half; small tensors and wide elements have the blocks that they had."""
    inputs = {"x": Input(dtype, (M, N)), "bias": Input(dtype, (N,))}
    graph = graph_of(lambda x, bias: (x + bias).tanh(), **inputs)
    (found,) = generate(graph, target=TARGETS["cuda:90"], hints={M: rows, N: columns}, name="body").kernels
    assert (found.constants["BLOCK_N"], found.num_warps) == (block, 4)


def flipped(x: T, y: T) -> T:
    return x + y


def dropped(x: T, seed: T) -> T:
    drawn = T(emit("random", seed.v, full(7, (), "i64").v, shape=(M, N), dtype="f32", kind="uniform"))
    return where(drawn >= 0.1, x, x * 0.0)


@pytest.mark.parametrize(
    ("body", "other"), [(flipped, Input("bf16", (M, N), (1, M))), (dropped, Input("i64", ()))], ids=["flip", "random"]
)
def test_transposes_and_random_numbers_keep_shorter_blocks(body: Callable[[T, T], T], other: Input) -> None:
    graph = graph_of(body, x=Input("bf16", (M, N)), **{"y" if body is flipped else "seed": other})
    (found,) = generate(graph, target=TARGETS["cuda:90"], hints={M: 8192, N: 8192}, name="body").kernels
    assert found.constants.get("BLOCK_M", 1) * found.constants["BLOCK_N"] == 2048
