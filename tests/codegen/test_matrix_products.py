"""Products with what surrounds them in one kernel: every layout, dtype and edge, against float64 and the library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from harness import INTERPRET, Input, K, M, N, T, agree, emit, graph_of, inputs_of, named, run, symbol

from fusegrad.codegen import TARGETS, Kernel, generate, module
from fusegrad.ir.errors import Unfusible
from fusegrad.ir.evaluate import evaluate
from fusegrad.runtime.execution.aten import reference

B = symbol("b")
TILED = replace(INTERPRET, units=1000)
"""So many units that the smallest tiles are taken: several of them in every direction."""
SIZES = {M: 70, N: 50, K: 40, B: 3}


def dot(x: T, y: T, labels: str) -> T:
    left, right, out = labels.replace("->", ",").split(",")
    number = {label: i for i, label in enumerate(sorted({*left, *right}))}
    axes = [tuple(number[label] for label in part) for part in (left, right, out)]
    return T(emit("dot", x.v, y.v, x_axes=axes[0], y_axes=axes[1], out_axes=axes[2]))


def linear(x: T, b: T, w: T) -> T:
    with named("h", "h = x @ w + b", 1):
        h = dot(x, w, "ik,kj->ij").to("f32") + b.to("f32")
    with named("y", "return h * torch.sigmoid(h)", 2):
        return (h * h.sigmoid()).to(x.dtype)


def scores(q: T, k: T, mask: T) -> T:
    with named("s", "return torch.bmm(q, k.mT) * scale + mask", 1):
        return (dot(q, k, "bik,bjk->bij").to("f32") * 0.125 + mask.to("f32")).to(q.dtype)


def transposed(x: T, y: T, c: T) -> T:
    """Both operands and the result are read and written the other way round."""
    return (dot(x, y, "ki,jk->ij") + c.t).t


def prologue(x: T, scale: T, y: T) -> tuple[T, T]:
    """exp of what lies beyond the sum's end is one; and two results, one of them the product itself."""
    product = dot((x * scale).exp(), y, "ik,kj->ij")
    return product, product.sigmoid()


def widened(x: T, y: T) -> T:
    return dot(x.to("f32"), y.to("f32"), "ik,kj->ij") + 1.0


def gated(x: T, w: T, v: T) -> T:
    """Both products read x: one loop, two sums."""
    with named("y", "return torch.sigmoid(x @ w) * (x @ v)", 1):
        return dot(x, w, "ik,kj->ij").sigmoid() * dot(x, v, "ik,kj->ij")


def added(x: T, w: T, y: T, v: T) -> T:
    """One sum in float32, which both add to."""
    return dot(x, w, "ik,kj->ij") + dot(y, v, "ek,ej->kj")


def beside_a_scaled_one(x: T, w: T, y: T, v: T) -> tuple[T, T]:
    """The rows of the one are the columns of the other, as it is written; and one of them is a result, too."""
    product = dot(x, w, "ik,kj->ij")
    return product + dot(v, y, "ej,ie->ji").t * 2.0, product


def matrix(dtype: str, *shape: Any, strides: Any = None) -> Input:
    return Input(dtype, shape, strides) if strides else Input(dtype, shape)


CASES: dict[str, tuple[Callable[..., Any], dict[str, Input]]] = {
    **{f"linear {d}": (linear, {"x": matrix(d, M, K), "b": matrix(d, N), "w": matrix(d, K, N)})
       for d in ("f16", "bf16", "f32")},
    "scores": (scores, {"q": matrix("bf16", B, M, 24), "k": matrix("bf16", B, N, 24), "mask": matrix("bf16", M, N)}),
    "transposed": (transposed, {"x": matrix("f32", K, M), "y": matrix("f32", N, K), "c": matrix("f32", N, M)}),
    "prologue": (prologue, {"x": matrix("f32", M, K), "scale": matrix("f32", M, 1), "y": matrix("f32", K, N)}),
    "low prologue": (prologue, {"x": matrix("f16", M, K), "scale": matrix("f16", M, 1), "y": matrix("f16", K, N)}),
    "widened": (widened, {"x": matrix("bf16", M, K), "y": matrix("bf16", K, N)}),
    **{f"gated {d}": (gated, {"x": matrix(d, M, K), "w": matrix(d, K, N), "v": matrix(d, K, N)})
       for d in ("bf16", "f32")},
    **{name: (added, {"x": matrix(d, M, K), "w": matrix(d, K, N), "y": matrix(d, 40, M), "v": matrix(d, 40, N)})
       for name, d in (("added", "f32"), ("added bf16", "bf16"))},
    "beside a scaled one": (beside_a_scaled_one, {"x": matrix("f16", M, K), "w": matrix("f16", K, N),
                                                  "y": matrix("f16", M, B), "v": matrix("f16", B, N)}),
    "padded rows": (linear, {"x": matrix("f32", M, K, strides=(K + 24, 1)), "b": matrix("f32", N, strides=(2,)),
                             "w": matrix("f32", K, N, strides=(1, K + 8))}),
    "padded rows bf16": (linear, {"x": matrix("bf16", M, K, strides=(K + 24, 1)), "b": matrix("bf16", N, strides=(2,)),
                                  "w": matrix("bf16", K, N, strides=(1, K + 8))}),
    "one turn": (linear, {"x": matrix("f32", M, 32), "b": matrix("f32", 17), "w": matrix("f32", 32, 17)}),
    "less than a tile": (linear, {"x": matrix("f32", 5, 3), "b": matrix("f32", 7), "w": matrix("f32", 3, 7)}),
}  # fmt: skip


def errors(case: str, sizes: dict[sympy.Symbol, int], target: Any) -> tuple[float, float, Kernel]:
    """The largest errors of the kernel and of the library against float64, relative to the largest result."""
    body, inputs = CASES[case]
    graph = graph_of(body, **inputs)
    (kernel,) = (kernels := generate(graph, target=target, hints=sizes, name="body")).kernels
    given = [t.mul_(0.5) for t in inputs_of(graph, sizes)]  # in place: as they are laid out
    got = run(kernels, module([kernel]), graph, given, sizes)
    library = reference.run(graph, given, sizes)
    exact = evaluate(graph, [t.double().numpy() for t in given], sizes)
    worst = [0.0, 0.0]
    for place, results in enumerate((got, library)):
        for result, true in zip(results, exact, strict=True):
            assert result is not None and true is not None and result.shape == true.shape
            off = (result.double() - torch.from_numpy(true)).abs().max() / max(1e-30, abs(true).max())
            worst[place] = max(worst[place], float(off))
    return *worst, kernel


EPSILON = {"f16": 2.0**-11, "bf16": 2.0**-8, "f32": 2.0**-24}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sizes", [SIZES, {M: 64, N: 48, K: 96, B: 1}, {M: 1, N: 129, K: 17, B: 2}])
def test_as_exact_as_the_library(case: str, sizes: dict[sympy.Symbol, int]) -> None:
    ours, library, kernel = errors(case, sizes, TILED)
    dtype = next(iter(CASES[case][1].values())).dtype
    assert "tl.dot(" in kernel.source
    assert ours <= 2 * library + 2 * EPSILON["f32" if case == "widened" else dtype]


def test_products_that_share_an_operand_share_a_loop() -> None:
    loops = lambda case: errors(case, {**SIZES, B: 40}, TILED)[2].source.count("tl.range(")  # noqa: E731
    assert loops("gated f32") == 1 and errors("gated f32", SIZES, TILED)[2].source.count("tl.load(x_ptr") == 1
    assert errors("added", SIZES, TILED)[2].source.count("tl.zeros(") == 1
    apart = lambda target: "acc_2 = " in errors("added bf16", SIZES, target)[2].source  # noqa: E731
    assert apart(TILED) and not apart(replace(TILED, fast=True)), "a sum is rounded before it is added to another"
    assert loops("beside a scaled one") == 2


@pytest.mark.parametrize("count", [1, 2, 3])
def test_sums_of_several_products_leave_registers_for_the_rest(count: int) -> None:
    def body(x: T, w: T) -> T:
        return sum((dot(x, w * (n + 1.0), "ik,kj->ij").sigmoid() for n in range(1, count)),
                   start=dot(x, w, "ik,kj->ij").sigmoid())  # fmt: skip

    graph = graph_of(body, x=matrix("bf16", M, K), w=matrix("bf16", K, N))
    (kernel,) = generate(graph, target=TARGETS["cuda:90"], hints={M: 8192, N: 8192, K: 256}, name="b").kernels
    rows, cols = (kernel.constants[c] for c in ("BLOCK_M", "BLOCK_N"))
    assert (rows, cols, kernel.num_warps) == {1: (128, 128, 8), 2: (128, 128, 8), 3: (128, 64, 8)}[count]


@pytest.mark.parametrize("sizes", [{B: 2, M: 20}, {B: 40, M: 3}])
def test_rows_are_rows_of_all_products_whatever_the_sizes(sizes: dict[sympy.Symbol, int]) -> None:
    """Of the first product alone the batch could be its rows."""

    def body(x: T, w: T, y: T, v: T) -> T:
        return dot(x, w, "bik,kj->bij") * dot(y, v, "bik,bkj->bij")

    inputs = {"x": matrix("f32", B, M, K), "w": matrix("f32", K, N), "y": matrix("f32", B, M, 9)}
    agree(body, {K: 24, N: 33, **sizes}, TILED, slack=20.0, **inputs, v=matrix("f32", B, 9, N))


def test_nothing_to_sum_is_zero_and_nothing_to_write_is_no_program() -> None:
    assert errors("transposed", {M: 20, N: 18, K: 0}, TILED)[0] == 0.0
    graph = graph_of(CASES["transposed"][0], **CASES["transposed"][1])
    (kernel,) = generate(graph, target=TILED, hints={M: 0, N: 5, K: 4}, name="body").kernels
    assert kernel.grid.subs({M: 0, N: 5, K: 4}) == 0


def test_low_floats_that_are_only_widened_are_multiplied_as_they_are() -> None:
    source = errors("widened", SIZES, TILED)[2].source
    assert "input_precision" not in source and ".to(tl.float32)" not in source
    assert "input_precision=PRECISION" in errors("linear f32", SIZES, TILED)[2].source


@pytest.mark.parametrize(
    "body",
    [
        lambda x, y: dot(x, y, "ik,kj->ij").amax(1, keep=True) + dot(x, y, "ik,kj->ij"),
        lambda x, y: dot(x, y, "ik,kj->ij")[:, :24] * dot(x, y, "ik,kj->ij")[:, 24:],
        lambda x, y: (dot(x, y, "ik,kj->ij"), x * 2.0),
        lambda x, y: -dot(x, y[:, :1].reshape(K), "ik,k->i"),
        lambda x, y: dot(x.reshape(12, M / 12, K), y.reshape(K, 12, 4), "aik,kaj->ij"),
        lambda x, y: dot(x, y, "ik,kj->ij") + dot(x, y, "ik,kj->j").expand((M, 48)),
        lambda x, y: sum((dot(x, y.exp() + n, "ik,kj->ij").sigmoid() for n in range(40)), start=x[:, :1] * 0.0),
    ],
    ids=["beside its maximum", "one half by the other", "something else beside it", "by a vector",
         "along groups of any length", "beside one for all rows", "too many to be held"],
)
def test_what_a_tile_does_not_hold_is_left_to_the_library(body: Any) -> None:
    graph = graph_of(body, x=matrix("f32", M, K), y=matrix("f32", K, 48))
    with pytest.raises(Unfusible, match="left to the library"):
        generate(graph, target=TILED, hints=SIZES, name="body")


@pytest.mark.parametrize(
    "body",
    [
        lambda x, y: dot(x, y, "ik,kj->ij").sum(1),
        lambda x, y: dot(dot(x, y, "ik,kj->ij"), y, "ij,kj->ik").sigmoid(),
    ],
    ids=["summed", "of a product"],
)
def test_what_sums_a_product_walks_it(body: Any) -> None:
    graph = graph_of(body, x=matrix("f32", M, K), y=matrix("f32", K, 48))
    (kernel,) = generate(graph, target=TILED, hints=SIZES, name="body").kernels
    assert "for col_at in" in kernel.source and "tl.dot(" in kernel.source


@pytest.mark.parametrize(
    ("m", "n", "k", "expected"),
    [(4096, 4096, 256, (128, 128, 64)), (512, 1024, 64, (64, 64, 64)), (1, 4096, 4096, (64, 64, 64)),
     (65536, 64, 48, (128, 64, 32)), (4096, 4096, 250, (128, 128, 64))],
)  # fmt: skip
def test_tiles_leave_no_unit_without_work(m: int, n: int, k: int, expected: tuple[int, ...]) -> None:
    graph = graph_of(linear, **CASES["linear bf16"][1])
    (kernel,) = generate(graph, target=TARGETS["cuda:90"], hints={M: m, N: n, K: k}, name="b").kernels
    assert tuple(kernel.constants[c] for c in ("BLOCK_M", "BLOCK_N", "BLOCK_K")) == expected


def test_the_compiler_spills_nothing_for_programs_that_there_are_not() -> None:
    """Many programs run side by side, the more of them the fewer registers each has; few are side by side anyway."""
    graph = graph_of(CASES["transposed"][0], **CASES["transposed"][1])

    def options(size: int, kind: str) -> dict[str, int | bool]:
        hints = {M: size, N: size, K: size}
        return generate(graph, target=TARGETS["cuda:90"], hints=hints, name="b").kernels[0].options(kind)

    assert options(64, "cuda")["maxnreg"] == 170
    assert "maxnreg" not in options(64, "hip") | options(8192, "cuda")
