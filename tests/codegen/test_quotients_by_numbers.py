"""Quotients by numbers are eager's on the device: products on GPUs, on CPUs those that have the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from harness import INTERPRET, Input, M, N, T, graph_of, run
from harness import text_of as module_text

import fusegrad
from fusegrad.codegen import TARGETS, generate, module
from fusegrad.codegen.emit.mathematics import exact_reciprocal, split_reciprocal

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
DIVISORS = (0.9, 0.3, 3.0, -7.0, 30.0, 448.0, 12345.0, 1e-3, math.sqrt(2), math.sqrt(2 * math.pi), 0.125)


def all_numbers(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)


def text_of(body: Callable[..., T], dtype: str) -> str:
    (kernel,) = generate(graph_of(body, x=Input(dtype, (M,))), target=INTERPRET, hints={M: 1 << 16}, name="k").kernels
    return kernel.source


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integer = torch.int16 if a.itemsize == 2 else torch.int32
    return bool(((a.view(integer) == b.view(integer)) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("divisor", DIVISORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_numbers_have_the_bits_of_eager(dtype: str, divisor: float) -> None:
    """In the dtype itself, in float32, and there with a result that is rounded again."""
    x = all_numbers(DTYPES[dtype])

    def divided(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = x.float() / divisor
        return x / divisor, x.float() / -divisor, wide.half(), wide.bfloat16(), (-x.abs()).float() / divisor

    for mine, theirs in zip(fusegrad.compile(divided, backend="interpret")(x), divided(x), strict=True):
        assert same_bits(mine, theirs)


@pytest.mark.parametrize(
    ("dtype", "body", "text"),
    [
        ("f32", lambda x: x / 4096.0, "x * 0.000244140625"),
        ("f64", lambda x: x / 0.5, "x * 2.0"),
        ("bf16", lambda x: (x.to("f32") / 0.9).to("bf16"), "x * 1.1111111640930176"),
        ("bf16", lambda x: x.to("f32") / 3.0, "tl.fma(x, 8.138021075865254e-05, x * 0.333251953125)"),
        ("f32", lambda x: x / 3.0, "tl.div_rn(x, 3.0)"),
        ("f32", lambda x: (x / 0.9).to("bf16"), "tl.div_rn(x, 0.9)"),
        ("f64", lambda x: x / 3.0, "x / 3.0"),
        ("f32", lambda x: x / 0.0, "tl.div_rn(x, 0.0)"),
    ],
)
def test_only_where_the_bits_are_the_same(dtype: str, body: Callable[..., T], text: str) -> None:
    assert text in text_of(body, dtype)


def test_a_product_is_refused_that_differs_for_one_number() -> None:
    """0.3 in bfloat16, the square root of two in float16: some products are rounded to a neighbour of the quotient."""
    for divisor, dtype in ((0.3, "bf16"), (math.sqrt(2), "f16")):
        assert exact_reciprocal(divisor, dtype, dtype) is None
        x = all_numbers(DTYPES[dtype])
        assert not same_bits((x.float() * (1 / torch.tensor(divisor))).to(x.dtype), x / divisor)
    assert exact_reciprocal(2.0**-126, "f32", "f32") is None and exact_reciprocal(0.0, "f32", "f32") is None
    assert split_reciprocal(math.inf, "bf16") is None


def test_powers_of_two_are_exact_for_subnormal_numbers_too() -> None:
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=torch.Generator().manual_seed(3)).to(torch.int32)
    for scale in (0, 0x807FFFFF):  # any, and subnormal ones
        x = (bits & (scale - (1 << 32)) if scale else bits).to(torch.int32).view(torch.float32)
        for divisor in (2.0**12, 2.0**-12, 2.0**90, -(2.0**-90)):
            divided = fusegrad.compile(lambda x, by: x / by, backend="interpret")
            assert same_bits(divided(x, divisor), x / divisor)


def test_fast_multiplies_by_the_nearest_reciprocal() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    fast = fusegrad.compile(lambda x: x / 3.0, backend="interpret", numerics="fast")
    torch.testing.assert_close(fast(x), x / 3.0, rtol=2**-22, atol=0)
    assert not torch.equal(fast(x), x / 3.0)


# ------------------------------------------------------------------ as GPUs have them
GPUS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize(
    ("dtype", "body", "text"),
    [
        ("f32", lambda x: x / 3.0, "x * 0.3333333432674408"),
        ("f32", lambda x: (x / 0.9).to("bf16"), "x * 1.1111111640930176"),
        ("bf16", lambda x: x.to("f32") / 3.0, "x * 0.3333333432674408"),
        ("f64", lambda x: x / 3.0, "x * 0.3333333333333333"),
        ("f32", lambda x: x / 0.0, 'x * float("inf")'),
        ("f32", lambda x: x / -math.inf, "x * (tl.full([], 0.0, tl.float32) * -1.0)"),
        ("f32", lambda x: x / 1e38, "x * 1.0000000751754868e-38"),
        ("f32", lambda x: x / M, "reciprocal = tl.div_rn(1.0, tl.cast(N, tl.float32))"),
        ("f64", lambda x: x / M, "reciprocal = 1.0 / tl.cast(N, tl.float64)"),
    ],
)
def test_gpus_multiply_by_the_reciprocal(target: str, dtype: str, body: Callable[..., T], text: str) -> None:
    kernel = module_text(body, {M: 1 << 16}, target, x=Input(dtype, (M,)))
    assert text in kernel and "tl.div_rn(x" not in kernel


@pytest.mark.parametrize("target", GPUS)
def test_what_is_a_tensor_divides(target: str) -> None:
    vector = Input("f32", (M,))
    assert "tl.div_rn(x, y)" in module_text(lambda x, y: x / y, {M: 1 << 16}, target, x=vector, y=vector)


@pytest.mark.parametrize("divisor", [*DIVISORS, 0.0, -0.0, math.inf, 1e-39, 3e38, 1e39])
@pytest.mark.parametrize("dtype", [*DTYPES, "f32", "f64"])
def test_gpus_text_has_the_bits_of_torch_there(dtype: str, divisor: float) -> None:
    """a * inv_b, inv_b of float32 or float64: ATen/native/cuda/BinaryDivTrueKernel.cu; no GPU is asked."""
    wide = torch.float64 if dtype == "f64" else torch.float32
    x = torch.randn(999, generator=torch.Generator().manual_seed(1)).to(wide)
    x = all_numbers(DTYPES[dtype]) if dtype in DTYPES else torch.cat([x, torch.tensor([0.0, -0.0, math.inf, math.nan])])
    graph = graph_of(
        lambda x: (x.to("f32") / divisor).to(dtype) if dtype in DTYPES else x / divisor, x=Input(dtype, (M,))
    )
    sizes = {M: x.numel()}
    kernels = generate(graph, target=TARGETS["hip:gfx942"], hints=sizes, name="body")
    (y,) = run(kernels, module(kernels.kernels), graph, [x], sizes)
    expected = (x.to(wide) * (1 / torch.tensor(divisor, dtype=wide))).to(x.dtype)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(y.signbit()[~y.isnan()], expected.signbit()[~y.isnan()])


def test_a_mean_on_gpus_is_a_product_with_one_reciprocal() -> None:
    """acc * factor: ATen/native/cuda/ReduceMomentKernel.cu. Rows that a program walks share it."""
    body = lambda x: x.sum(1) / N  # noqa: E731
    weighted = lambda x: (x * (x.sum(1, keep=True) / M)).sum(0)  # noqa: E731
    before, loop = module_text(weighted, {M: 1 << 16, N: 1024}, x=Input("f32", (M, N))).split("for item in")
    assert "reciprocal = tl.div_rn(1.0, tl.cast(M, tl.float32))" in before and "* reciprocal)" in loop
    graph, sizes = graph_of(body, x=Input("f32", (M, N))), {M: 7, N: 49}
    kernels = generate(graph, target=TARGETS["hip:gfx942"], hints=sizes, name="body")
    x = torch.randint(-99, 99, (7, 49), generator=torch.Generator().manual_seed(2)).float()
    (y,) = run(kernels, module(kernels.kernels), graph, [x], sizes)
    assert torch.equal(y, x.sum(1) * (1 / torch.tensor(49.0))) and not torch.equal(y, x.sum(1) / 49)


def test_lanes_outside_are_neutral_where_a_reciprocal_is_infinite() -> None:
    """0 / 1e-40 is 0, 0 * inf is NaN: in lanes outside it counts for nothing."""
    graph, sizes = graph_of(lambda x: (x / 1e-40).sum(1), x=Input("f32", (M, N))), {M: 3, N: 50}
    kernels = generate(graph, target=TARGETS["hip:gfx942"], hints=sizes, name="body")
    (y,) = run(kernels, module(kernels.kernels), graph, [torch.ones(3, 50)], sizes)
    assert torch.equal(y, torch.full((3,), math.inf))


# ------------------------------------------------------------------ quotients of few digits
def test_a_quotient_of_few_digits_has_one_rounding_however_near_it_is_computed() -> None:
    """All pairs of bfloat16's 128 significands; `div.full.f32` is off by 2 units of float32 at most."""
    significands = (1 + torch.arange(128) / 128).float()
    exact = significands[:, None].double() / significands.double()
    for units in (-4, 0, 4):
        near = ((significands[:, None] / significands).view(torch.int32) + units).view(torch.float32)
        assert torch.equal(near.bfloat16(), exact.float().bfloat16())


@pytest.mark.parametrize(
    ("dtype", "body", "short"),
    [
        ("bf16", lambda x, y: x / y, True),
        ("bf16", lambda x, y: (x.to("f32") / y.to("f32")).to("bf16"), True),
        ("bf16", lambda x, y: x.to("f32") / y.to("f32"), False),
        ("bf16", lambda x, y: (x.to("f32") / (y.to("f32") + 1.0)).to("bf16"), False),
        ("f16", lambda x, y: x / y, False),
        ("f32", lambda x, y: (x / y).to("bf16"), False),
    ],
)
@pytest.mark.parametrize("target", ["cuda:90", "hip:gfx942"])
def test_the_hardware_divides_where_all_quotients_are_rounded_alike(
    target: str, dtype: str, body: Callable[..., T], short: bool
) -> None:
    vector = Input(dtype, (M,))
    text = module_text(body, {M: 1 << 16}, target, x=vector, y=vector)
    assert ("tl.div_rn(" not in text) == (short and target == "cuda:90")
