"""The interpreter as an oracle: GPU rounding, NaN, layouts, bounds; and triton.language is left as it was."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton_samples as k

from fusegrad.codegen.emit.prelude import HELPERS, helpers_in
from fusegrad.ir.errors import KernelFaultError, UnsupportedBackendError
from fusegrad.runtime.execution.aten import philox
from fusegrad.runtime.export.python.boilerplate import STAND_INS
from fusegrad.runtime.kernels import interpreter as interpret
from fusegrad.runtime.kernels import launch, triton_module
from fusegrad.runtime.kernels import triton_private as private

INF, NAN = float("inf"), float("nan")


def apply(
    body: str, x: torch.Tensor, out: torch.dtype, *, y_dtype: str, x_dtype: str = "f32", loads: str | None = None
) -> torch.Tensor:
    """Run an elementwise kernel body on a vector."""
    text = k.elementwise(body, loads) if loads else k.elementwise(body)
    record = k.kernel("k", text, {"x_ptr": x_dtype, "y_ptr": y_dtype}, ("n",), BLOCK=64)
    y = torch.zeros(len(x), dtype=out)
    launch.launcher(record, text, "interpret")([x, y, len(x)], -(-len(x) // 64))
    return y


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def awkward_floats() -> torch.Tensor:
    """Random bit patterns, ties, subnormals, the largest finite numbers, infinities, NaN."""
    generator = torch.Generator().manual_seed(7)
    bits = torch.randint(-(2**31), 2**31, (2000,), generator=generator).to(torch.int32)
    ties = (bits & ~0xFFFF) | 0x8000
    special = torch.tensor([0.0, -0.0, INF, -INF, NAN, 3.4028235e38, 65504.0, 65520.0, 6e-8, 1e-45])
    return torch.cat([bits.view(torch.float32), ties.view(torch.float32), special])


@pytest.mark.parametrize(
    ("body", "y_dtype", "dtype"),
    [
        ("y = x.to(tl.bfloat16)", "bf16", torch.bfloat16),
        ("y = x", "bf16", torch.bfloat16),
        ("y = x.to(tl.float16)", "f16", torch.float16),
        ("y = x", "f16", torch.float16),
        ("y = x.to(tl.float64)", "f64", torch.float64),
    ],
)
def test_casts_from_f32_are_torch_s_to_the_bit(body: str, y_dtype: str, dtype: torch.dtype) -> None:
    x = awkward_floats()
    same(apply(body, x, dtype, y_dtype=y_dtype), x.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_floats_load_exactly(dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, 7).to(torch.int16).view(dtype)
    name = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    same(apply("y = x.to(tl.float32)", x, torch.float32, x_dtype=name, y_dtype="f32"), x.float())


@pytest.mark.parametrize(
    ("source", "name"), [(torch.float64, "f64"), (torch.int64, "i64"), (torch.int32, "i32"), (torch.bool, "b1")]
)
def test_other_dtypes_become_bf16(source: torch.dtype, name: str) -> None:
    x = (torch.randn(300, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 1000).to(source)
    loads = "x = tl.load(x_ptr + lane, mask=inside)"
    same(
        apply("y = x.to(tl.bfloat16)", x, torch.bfloat16, x_dtype=name, y_dtype="bf16", loads=loads),
        x.to(torch.bfloat16),
    )


def test_bf16_arithmetic_rounds_after_every_operation() -> None:
    x = torch.randn(500, generator=torch.Generator().manual_seed(3)).bfloat16()
    y = apply("y = tl.abs(x * x - x) + x", x, torch.bfloat16, x_dtype="bf16", y_dtype="bf16")
    same(y, (x * x - x).abs() + x)


def test_bf16_comparison_and_selection() -> None:
    x = torch.tensor([1.0, -1.0, NAN, 0.0, -0.0]).bfloat16()
    y = apply(
        "y = tl.where(x != x, 7.0, tl.where((x > 0) | (x < -0.5), x, 3.0))",
        x,
        torch.bfloat16,
        x_dtype="bf16",
        y_dtype="bf16",
    )
    same(y, torch.tensor([1.0, -1.0, 7.0, 3.0, 3.0]).bfloat16())


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = tl.maximum(x, 0.5)", [1.0, 0.5, 0.5]),
        ("y = tl.maximum(x, 0.5, propagate_nan=tl.PropagateNan.ALL)", [1.0, NAN, 0.5]),
        ("y = tl.minimum(x, 0.5)", [0.5, 0.5, -2.0]),
        ("y = tl.clamp(x, -1.0, 0.5)", [0.5, -1.0, -1.0]),
        ("y = tl.clamp(x, -1.0, 0.5, propagate_nan=tl.PropagateNan.ALL)", [0.5, NAN, -1.0]),
    ],
)
def test_nan_in_elementwise_extrema(body: str, expected: list[float]) -> None:
    same(apply(body, torch.tensor([1.0, NAN, -2.0]), torch.float32, y_dtype="f32"), torch.tensor(expected))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = tl.max(x, 0)", 2.0),
        ("y = tl.min(x, 0)", -3.0),
        ("y = tl.sum(tl.where(x == x, x, 0.0), 0)", -1.0),
        ("y = tl.sum(x, 0)", NAN),
        ("y = tl.reduce(x, 0, larger)", NAN),
        ("y = tl.argmin(x, 0).to(tl.float32)", 2.0),
        ("y = x.sum(0, keep_dims=True)", NAN),
    ],
)
def test_reductions_treat_nan_as_the_gpu_does(body: str, expected: float) -> None:
    text = k.SOFTMAX + k.elementwise(body, "x = tl.load(x_ptr + lane)").removeprefix(k.HEADER)
    record = k.kernel("k", text, {"x_ptr": "f32", "y_ptr": "f32"}, ("n",), BLOCK=4)
    y = torch.zeros(4)
    launch.launcher(record, text, "interpret")([torch.tensor([2.0, NAN, -3.0, 0.0]), y, 4], 1)
    same(y, torch.full((4,), expected))


def test_reduction_keeps_the_order_of_a_non_commutative_combination() -> None:
    text = k.HEADER + (
        "@triton.jit\ndef compose(a, b, c, d):\n    return a * c, b * c + d\n\n\n"
        "@triton.jit\ndef k(x_ptr, y_ptr):\n    i = tl.arange(0, 8)\n    x = tl.load(x_ptr + i)\n"
        "    a, b = tl.reduce((x, x + 1), 0, compose)\n    tl.store(y_ptr + 8, b)\n"
        "    c, d = tl.associative_scan((x, x + 1), 0, compose)\n    tl.store(y_ptr + i, d)\n"
    )
    x, y = torch.randn(8, dtype=torch.float64), torch.zeros(9, dtype=torch.float64)
    launch.launcher(k.kernel("k", text, {"x_ptr": "f64", "y_ptr": "f64"}), text, "interpret")([x, y], 1)
    state, states = torch.zeros((), dtype=torch.float64), []
    for value in x:
        state = value * state + value + 1 if states else value + 1
        states.append(state)
    torch.testing.assert_close(y, torch.stack([*states, state]))


def test_argmax_of_a_matrix_takes_the_first_of_equals() -> None:
    text = k.HEADER + (
        "@triton.jit\ndef k(x_ptr, y_ptr):\n    i, j = tl.arange(0, 4)[:, None], tl.arange(0, 8)[None, :]\n"
        "    tl.store(y_ptr + tl.arange(0, 4), tl.argmax(tl.load(x_ptr + i * 8 + j), 1))\n"
    )
    x, y = (
        torch.randint(0, 3, (4, 8), generator=torch.Generator().manual_seed(0)).float(),
        torch.zeros(4, dtype=torch.int32),
    )
    launch.launcher(k.kernel("k", text, {"x_ptr": "f32", "y_ptr": "i32"}), text, "interpret")([x, y], 1)
    expected = [next(j for j in range(8) if row[j] == row.max()) for row in x]
    assert y.tolist() == expected


@pytest.mark.parametrize(
    ("body", "function"),
    [
        ("y = libdevice.tanh(x)", torch.tanh),
        ("y = libdevice.log1p(tl.abs(x))", lambda x: torch.log1p(x.abs())),
        ("y = tl.erf(x)", torch.erf),
        ("y = tl.sigmoid(x)", torch.sigmoid),
        ("y = libdevice.rint(x)", torch.round),
        ('y = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.float32, True, 1)', lambda x: x),
    ],
)
def test_functions_of_the_device_library(body: str, function: object) -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(5)) * 3
    torch.testing.assert_close(apply(body, x, torch.float32, y_dtype="f32"), function(x))  # type: ignore[operator]


def test_unknown_device_function_is_named() -> None:
    with pytest.raises(KernelFaultError, match="__nv_tgammaf"):
        apply("y = libdevice.tgamma(x)", torch.ones(3), torch.float32, y_dtype="f32")


def test_fused_multiply_add_rounds_once() -> None:
    x = torch.tensor([1.0 + 2**-12])
    expected = (x.double() * x.double() - 1.0).float()
    same(apply("y = tl.fma(x, x, -1.0)", x, torch.float32, y_dtype="f32"), expected)
    assert expected != x * x - 1.0


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x @ y.T as a kernel multiplies tiles."""
    tensors = x, y.T.contiguous(), torch.zeros(len(x), len(y))
    tiles = [private.tensor(t.numpy(), private.tl.float32).handle for t in tensors]
    return torch.from_numpy(private.builder.create_dot(*tiles, None, None).data)


@pytest.mark.parametrize("depth", [4, 16, 128])
def test_a_product_and_its_transpose_agree_bit_for_bit(depth: int) -> None:
    """Two kernels make the same scores, one of them by columns; exponentials of great scores would tell them apart."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 32, depth, generator=generator)
    same(product(x, y), product(y, x).T)
    assert torch.allclose(product(x, y), x @ y.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["uint32", "int32", "int64"])
def test_umulhi(dtype: str) -> None:
    width, name = int(dtype[-2:]), {"uint32": "u32", "int32": "i32", "int64": "i64"}[dtype]
    x = torch.tensor([-1, 5, 2**31 - 1, -(2**31), 123456789], dtype=torch.int64)
    x = x * (2**31 + 11) if width == 64 else x
    typed = x.to(torch.uint32 if name == "u32" else getattr(torch, dtype))
    loads = "x = tl.load(x_ptr + lane, mask=inside)"
    y = apply("y = tl.umulhi(x, x)", typed, typed.dtype, x_dtype=name, y_dtype=name, loads=loads)
    mask = 2**width - 1
    assert [v & mask for v in y.tolist()] == [((v & mask) ** 2) >> width for v in typed.tolist()]


def test_philox_is_in_the_unit_interval_and_moves() -> None:
    y = apply("y = tl.rand(11, lane)", torch.zeros(256), torch.float32, y_dtype="f32")
    assert 0 <= y.min() and y.max() < 1 and y.unique().numel() > 250 and 0.4 < y.mean() < 0.6


@pytest.mark.parametrize("ptx", [False, True], ids=["portable", "ptx"])
@pytest.mark.parametrize(("start", "place"), [(2**34 - 5, "{} + lane.to(tl.int64)"), (2**34 - 16, "lane, {}")])
@pytest.mark.parametrize(("kind", "draw"), [("uniform", philox.uniform), ("normal", philox.normal)])
def test_helpers_draw_the_numbers_of_philox(
    kind: str, draw: Callable[..., torch.Tensor], start: int, place: str, ptx: bool
) -> None:
    """With NVIDIA's instruction and without, beyond 32 bits of seed and counter, and on to the next high word."""
    seed, place = 2**40 + 3, place.format(f"tl.full([], {start}, tl.int64)")
    drawn = f"(tl.full([], {seed}, tl.int64), {place}, ptx={ptx})"
    body = f"y = uniform(random_word{drawn})" if kind == "uniform" else f"y = normal{drawn}"
    text = k.elementwise(body).replace("@triton.jit", "\n\n".join([*helpers_in([body]), "@triton.jit"]), 1)
    record = k.kernel("k", text, {"x_ptr": "f32", "y_ptr": "f32"}, ("n",), BLOCK=64)
    x, y = torch.zeros(100), torch.zeros(100)
    launch.launcher(record, text, "interpret")([x, y, 100], 2)
    expected = draw(torch.tensor(seed), torch.tensor(start), 100)
    torch.testing.assert_close(y, expected, rtol=0, atol=0 if kind == "uniform" else 1e-6)


@pytest.mark.parametrize("helper", ["from_bf16", "pairs_from_bf16"])
def test_bits_of_bfloat16_are_its_numbers(helper: str) -> None:
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    body = f"y = {helper}(x)"
    text = k.elementwise(body).replace("@triton.jit", "\n\n".join([*helpers_in([body]), "@triton.jit"]), 1)
    record = k.kernel("k", text, {"x_ptr": "bf16", "y_ptr": "f32"}, ("n",), BLOCK=1 << 16)
    y = torch.zeros(1 << 16)
    launch.launcher(record, text, "interpret")([x, y, 1 << 16], 1)
    assert torch.equal(y.view(torch.int32), x.float().view(torch.int32))


@pytest.mark.parametrize("rows", [1, 5])
def test_softmax_with_nested_functions(rows: int) -> None:
    x = torch.randn(rows, 50, generator=torch.Generator().manual_seed(rows)).bfloat16()
    y = torch.empty_like(x)
    launch.launcher(k.softmax(50, 64), k.SOFTMAX, "interpret")([x, y, rows], 2)
    torch.testing.assert_close(y, x.softmax(-1))


def copy_kernel() -> tuple[str, object]:
    text = k.HEADER + (
        "@triton.jit\ndef k(x_ptr, y_ptr, x_row, x_col, y_row, y_col):\n"
        "    i, j = tl.arange(0, 4)[:, None], tl.arange(0, 8)[None, :]\n"
        "    tl.store(y_ptr + i * y_row + j * y_col, tl.load(x_ptr + i * x_row + j * x_col) + 1)\n"
    )
    return text, k.kernel("k", text, {"x_ptr": "f32", "y_ptr": "f32"}, ("x_row", "x_col", "y_row", "y_col"))


LAYOUTS = {
    "contiguous": lambda: torch.zeros(4, 8),
    "transposed": lambda: torch.zeros(8, 4).t(),
    "offset": lambda: torch.zeros(40)[5:37].view(4, 8),
    "step": lambda: torch.zeros(4, 17)[:, 1::2],
    "padded": lambda: torch.zeros(6, 11)[1:5, 2:10],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_are_written_where_they_lie(layout: str) -> None:
    text, record = copy_kernel()
    y, x = LAYOUTS[layout](), torch.arange(8.0).expand(4, 8)
    whole = torch.as_strided(y, (y.untyped_storage().nbytes() // 4,), (1,), 0)
    launch.launcher(record, text, "interpret")([x, y, *x.stride(), *y.stride()], 1)  # type: ignore[arg-type]
    same(y, x + 1)
    assert whole.sum() == y.sum(), "memory beside the view was written"


def test_output_that_needs_grad_and_inference_tensors() -> None:
    text, record = copy_kernel()
    with torch.inference_mode():
        x = torch.ones(4, 8)
    y = torch.zeros(4, 8, requires_grad=True)
    launch.launcher(record, text, "interpret")([x, y, 8, 1, 8, 1], 1)  # type: ignore[arg-type]
    assert y.sum() == 64


@pytest.mark.parametrize(
    ("slip", "message"),
    [("tl.store(y_ptr + lane, y)", "store outside"), ("y = tl.load(x_ptr + lane + 64)", "load outside")],
)
def test_accesses_outside_the_arguments_are_faults(slip: str, message: str) -> None:
    with pytest.raises(KernelFaultError, match=message) as caught:
        apply(f"y = x\n{slip}", torch.ones(10), torch.float32, y_dtype="f32")
    assert slip in str(caught.value)


def test_reads_may_end_in_the_last_aligned_group() -> None:
    loads = "x = tl.load(x_ptr + lane, mask=lane < 12, other=0.0)"
    same(apply("y = x", torch.ones(12)[:10], torch.float32, y_dtype="f32", loads=loads), torch.ones(10))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("y = x if inside else -x", "condition must be a scalar"),
        ("y = x\nif lane < 3:\n    y = -x", "condition must be a scalar"),
        ("at = tl.multiple_of(n + 1, 8)\ny = x", "not a multiple"),
        ("tl.static_assert(BLOCK == 3, 'no such block')\ny = x", "no such block"),
    ],
)
def test_what_does_not_compile_or_hold_is_a_fault(body: str, message: str) -> None:
    with pytest.raises(KernelFaultError, match=message):
        apply(body, torch.ones(8), torch.float32, y_dtype="f32")


def test_control_flow_means_what_it_means_in_a_kernel() -> None:
    body = (
        "total = 0\nfor step in range(3):\n    total += step.to(tl.int32)\n"
        "flag = (x > 0) and (x < 2)\nif n > 2 and not (n == 7):\n    total = total + 1\n"
        "y = tl.where(flag or (x == 5), total.to(tl.float32), 0.0)"
    )
    same(apply(body, torch.tensor([1.0, 3.0, 5.0]), torch.float32, y_dtype="f32"), torch.tensor([4.0, 0.0, 4.0]))


@pytest.mark.parametrize("block", ["for step in range(n - n):", "while n < 0:", "if n < 0:"])
def test_variables_that_a_block_may_change_are_tensors(block: str) -> None:
    body = f"count = 5\n{block}\n    count += 1\ny = x + count.to(tl.float32)"
    same(apply(body, torch.zeros(2), torch.float32, y_dtype="f32"), torch.full((2,), 5.0))


def test_loop_variables_overflow_as_32_bit_integers() -> None:
    body = "far = 0\nfor step in range(1):\n    far = (step + 70000) * 70000\ny = x + (far < 2147483648).to(tl.float32)"
    same(apply(body, torch.zeros(2), torch.float32, y_dtype="f32"), torch.ones(2))


def test_atomics_and_arrival_counters() -> None:
    text = k.HEADER + (
        "@triton.jit\ndef k(count_ptr, y_ptr):\n"
        '    arrived = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu")\n    tl.debug_barrier()\n'
        "    if arrived == tl.num_programs(0) - 1:\n        tl.store(y_ptr, arrived)\n"
    )
    count, y = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    launch.launcher(k.kernel("k", text, {"count_ptr": "i32", "y_ptr": "i32"}), text, "interpret")([count, y], 5)
    assert (count.item(), y.item()) == (5, 4)


def test_threads_take_turns() -> None:
    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    outputs = [torch.zeros_like(x) for _ in range(4)]
    run = launch.launcher(k.softmax(50, 64), k.SOFTMAX, "interpret")
    threads = [threading.Thread(target=run, args=([x, y, 4], 1)) for y in outputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for y in outputs:
        torch.testing.assert_close(y, x.softmax(-1))


def test_language_is_restored_even_after_a_fault() -> None:
    import triton.language as tl

    def snapshot() -> list[dict[str, object]]:
        return [dict(vars(owner)) for owner in (tl, tl.core, tl.math, tl.standard, tl.tensor, tl.dtype)]

    apply("y = x", torch.ones(3), torch.float32, y_dtype="f32")
    before = snapshot()
    apply("y = tl.sum(x, 0) + x", torch.ones(3), torch.float32, y_dtype="f32")
    with pytest.raises(KernelFaultError):
        apply("y = nothing", torch.ones(3), torch.float32, y_dtype="f32")
    assert snapshot() == before
    assert all(vars(e.owner).get(e.name) is not e.replacement for e in interpret._exchanges())


def test_interpretation_then_ordinary_compilation_in_one_process() -> None:
    script = "import test_interpret; test_interpret.interpret_then_compile()"
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_ALWAYS_COMPILE": "1", "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0 and "ld.global" in done.stdout, done.stderr[-2000:]


def interpret_then_compile() -> None:
    """What the subprocess runs: the very function that was interpreted is compiled for sm_90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    test_softmax_with_nested_functions(2)
    function = triton_module.load(k.SOFTMAX).softmax
    types = {"x_ptr": "*bf16", "y_ptr": "*bf16", "rows": "i32", "N": "constexpr", "BLOCK": "constexpr"}
    source = ASTSource(fn=function, signature=types, constexprs={(3,): 50, (4,): 64})
    print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])


def test_failing_self_test_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusegrad.runtime.kernels import triton_private

    interpret._self_test.cache_clear()
    monkeypatch.setattr(triton_private.Builder, "cast_impl", triton_private.InterpreterBuilder.cast_impl)
    with pytest.raises(UnsupportedBackendError, match="wrong values"):
        apply("y = x", torch.ones(3), torch.float32, y_dtype="f32")
    monkeypatch.undo()
    apply("y = x", torch.ones(3), torch.float32, y_dtype="f32")


def test_tensors_elsewhere_are_refused() -> None:
    text, record = copy_kernel()
    with pytest.raises(UnsupportedBackendError, match="meta"):
        launch.launcher(record, text, "interpret")([torch.empty(4, 8, device="meta")] * 2 + [8, 1, 8, 1], 1)  # type: ignore[arg-type]


ASSEMBLY = {name: text for name, text in HELPERS.items() if "inline_asm_elementwise(" in text}


@pytest.mark.parametrize("name", ASSEMBLY)
def test_helpers_in_assembly_are_interpreted_here_and_in_exported_files(name: str) -> None:
    instructions = re.findall(r'"([^"]*\$0[^"]*)"', ASSEMBLY[name])
    assert instructions and name in STAND_INS
    for text in instructions:
        known = private.ASM_OF_HELPERS.get(text) or private._ASM.fullmatch(" ".join(text.split()))
        assert known, text
