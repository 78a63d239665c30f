"""Products by weights of few bits, scaled by channel or group, nibbles in bytes or words; and by gathered weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from harness import INTERPRET, Input, K, M, N, T, agree, cat, gather, graph_of, iota, op, symbol
from test_matrix_products import B, dot

from fusegrad.codegen import TARGETS, generate
from fusegrad.codegen.schedule.quotients import Quotients

G = symbol("g")
TILED = replace(INTERPRET, units=1000)
SIZES = {M: 19, N: 35, K: 42, B: 3, G: 5}


def by_group(size: Any) -> Any:
    """w[col, group, k] * scale[col, group]"""

    def body(x: T, w: T, scale: T) -> T:
        w = w.reshape(N, scale.shape[1], size).to(x.dtype) * scale.reshape(N, scale.shape[1], 1)
        return dot(x, w.reshape(N, x.shape[1]), "ik,jk->ij")

    return body


def neighbours(x: T, packed: T, scale: T) -> T:
    """Nibbles of one byte are neighbours."""
    low, high = (n.reshape(*packed.shape, 1) for n in (packed & 15, op("shr", packed, 4)))
    w = cat([low, high], 2).reshape(N, 2 * packed.shape[1]).to(x.dtype) - 8.0
    return dot(x, w * scale, "ik,jk->ij")


def halves(x: T, packed: T, scale: T) -> T:
    """Low nibbles first, then the high ones."""
    w = cat([packed & 15, op("shr", packed, 4)], 1).to(x.dtype) - 8.0
    return dot(x, w * scale, "ik,jk->ij")


def columns(x: T, packed: T, scale: T) -> T:
    """Nibbles of one byte are neighbours along the columns of the result."""
    low, high = (n.reshape(*packed.shape, 1) for n in (packed & 15, op("shr", packed, 4)))
    w = cat([low, high], 2).reshape(packed.shape[0], scale.shape[1]).to(x.dtype) - 8.0
    return dot(x, w * scale, "ik,kj->ij").sigmoid()


def eighths(packed: T) -> T:
    """Eight nibbles of each word: [words, 8, N]."""
    shifts = (iota(8) * 4).to("i32").reshape(1, 8, 1)
    return op("shr", packed.reshape(packed.shape[0], 1, N), shifts) & 15


def words(x: T, packed: T, scale: T) -> T:
    """Eight nibbles of a word, by groups of 32."""
    w = eighths(packed).reshape(scale.shape[0], 32, N).to(x.dtype) * scale.reshape(scale.shape[0], 1, N)
    return dot(x, w.reshape(x.shape[1], N), "ik,kj->ij")


def columns_of_words(x: T, packed: T, scale: T) -> T:
    """Eight nibbles of a word are columns of the result; an index says which scale each has."""
    w = eighths(packed).reshape(8 * packed.shape[0], N).to(x.dtype)
    return dot(x, w * gather(scale, op("shr", iota(w.shape[0]), 5), axes=(0,)), "ij,kj->ik")


def beside(x: T, y: T, w: T) -> T:
    """A concatenation that is multiplied is two products."""
    return dot(cat([x, y.exp()], 1), w, "ik,kj->ij")


def experts(x: T, w: T, expert: T) -> T:
    """The weights of a block of rows are those of its expert."""
    return dot(x, gather(w, expert, axes=(0,)), "bik,bkj->bij").sigmoid()


def scaled_f8(x: T, w: T, scale: T) -> T:
    return dot(x, w.to("bf16").to(x.dtype) * scale, "ik,jk->ij")


def of(dtype: str) -> dict[str, tuple[Any, dict[str, Input]]]:
    i = Input
    return {
        "groups of 64": (by_group(64), {"x": i(dtype, (M, 64 * G)), "w": i("i8", (N, 64 * G)), "s": i(dtype, (N, G))}),
        "groups of 24": (by_group(24), {"x": i(dtype, (M, 24 * G)), "w": i("i8", (N, 24 * G)), "s": i(dtype, (N, G))}),
        "neighbours": (neighbours, {"x": i(dtype, (M, 2 * K)), "packed": i("u8", (N, K)), "scale": i(dtype, (N, 1))}),
        "halves": (halves, {"x": i(dtype, (M, 2 * K)), "packed": i("u8", (N, K)), "scale": i(dtype, (N, 1))}),
        "columns": (columns, {"x": i(dtype, (M, K)), "packed": i("u8", (K, N)), "scale": i(dtype, (1, 2 * N))}),
        "words": (words, {"x": i(dtype, (M, 32 * G)), "packed": i("i32", (4 * G, N)), "scale": i(dtype, (G, N))}),
        "columns of words": (
            columns_of_words,
            {"x": i(dtype, (M, N)), "packed": i("i32", (4 * G, N)), "s": i(dtype, (G, N))},
        ),
        "beside": (beside, {"x": i(dtype, (M, K)), "y": i(dtype, (M, K)), "w": i(dtype, (2 * K, N))}),
        "experts": (experts, {"x": i(dtype, (B, M, K)), "w": i(dtype, (7, K, N)), "expert": i("i64", (B,))}),
        "float8": (scaled_f8, {"x": i(dtype, (M, K)), "w": i("f8e4m3fn", (N, K)), "scale": i(dtype, (N, 1))}),
    }


BYTES = {"packed": torch.randint(0, 256, (35, 42), dtype=torch.uint8)}
WORDS = torch.randint(-(2**31), 2**31, (20, 35), dtype=torch.int32)
WHOLE = {"neighbours": BYTES, "halves": BYTES, "columns": {"packed": BYTES["packed"].reshape(42, 35)},
         "words": {"packed": WORDS}, "columns of words": {"packed": WORDS}}  # fmt: skip


CASES = {f"{case} {dtype}": made for dtype in ("f32", "bf16") for case, made in of(dtype).items()}


@pytest.mark.parametrize("case", CASES)
def test_they_are_one_kernel_that_agrees_with_the_library(case: str) -> None:
    body, inputs = CASES[case]
    (kernel,) = agree(body, SIZES, TILED, slack=40.0, given=WHOLE.get(case.rpartition(" ")[0]), **inputs).kernels
    assert "tl.dot(" in kernel.source and "floor_quotient" not in kernel.source
    assert kernel.source.count("tl.range(") == (2 if "beside" in case else 1)


@pytest.mark.parametrize("case", ["neighbours", "halves", "columns", "words", "columns of words"])
def test_packed_numbers_are_read_once(case: str) -> None:
    body, inputs = of("bf16")[case]
    graph = graph_of(body, **inputs)
    (kernel,) = generate(graph, target=TARGETS["cuda:90"], hints=SIZES, name="body").kernels
    packed = next(v for v in graph.inputs if v.params["name"] == "packed")
    assert sympy.expand(kernel.reads["packed_ptr"] - packed.aval.nbytes) == 0
    assert kernel.source.count("tl.load(packed_ptr") == 1
    assert kernel.source.count("tl.store(") == (8 if case == "columns of words" else 1)
    assert ("tl.interleave(" in kernel.source) is (case == "columns")


def test_a_group_that_is_a_quotient_of_sizes_is_a_number_by_a_guard() -> None:
    """K / G is 14 here: a kernel for groups of 14, and another for others."""
    scale = symbol("groups")
    sizes = {**SIZES, scale: 3}
    inputs = {"x": Input("f32", (M, K)), "w": Input("i8", (N, K)), "s": Input("f32", (N, scale))}
    (kernel,) = agree(by_group(K / scale), sizes, TILED, **inputs).kernels
    assert sympy.Eq(K, 14 * scale) in kernel.guards and "floor_quotient" not in kernel.source
    graph = graph_of(by_group(K / scale), **inputs)
    assert Quotients.of(graph, {**sizes, scale: 4}).whole == {}, "42 elements are no four groups"
