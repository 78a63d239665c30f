"""Hand-written Triton modules and their records, for the tests of the runtime's lower half."""

from __future__ import annotations

from collections.abc import Mapping

from fusegrad.codegen.kernel import Kernel, Pointer, Ref, Scalar

HEADER = "import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice\n\n\n"


def kernel(
    name: str,
    text: str,
    pointers: Mapping[str, str],
    scalars: tuple[str, ...] = (),
    *,
    num_warps: int = 4,
    **constants: int,
) -> Kernel:
    """A record whose arguments are the pointers (name -> dtype), then the sizes."""
    arguments = [Pointer(p, Ref("input", i), dtype) for i, (p, dtype) in enumerate(pointers.items())]
    return Kernel(name, text, (*arguments, *(Scalar(s, 1) for s in scalars)), dict(constants), 1, num_warps)


def elementwise(body: str, loads: str = "x = tl.load(x_ptr + lane, mask=inside, other=0.0)") -> str:
    """A module with one kernel `k(x_ptr, y_ptr, n, BLOCK)` that stores the value named `y`."""
    lines = [loads, *body.splitlines(), "tl.store(y_ptr + lane, y, mask=inside)"]
    return HEADER + (
        "@triton.jit\ndef k(x_ptr, y_ptr, n, BLOCK: tl.constexpr):\n"
        "    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n    inside = lane < n\n"
        + "".join(f"    {line}\n" for line in lines)
    )


SOFTMAX = (
    HEADER
    + """\
@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def unused(a):
    return a


@triton.jit
def softmax(x_ptr, y_ptr, rows, N: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * N
        x = tl.load(x_ptr + at + lane, mask=lane < N, other=float("-inf")).to(tl.float32)
        e = tl.exp(x - tl.reduce(x, 0, larger))
        tl.store(y_ptr + at + lane, (e / tl.sum(e, 0)).to(tl.bfloat16), mask=lane < N)
"""
)


def softmax(n: int, block: int) -> Kernel:
    """Rows of `n`, bf16 to bf16."""
    return kernel("softmax", SOFTMAX, {"x_ptr": "bf16", "y_ptr": "bf16"}, ("rows",), N=n, BLOCK=block)
