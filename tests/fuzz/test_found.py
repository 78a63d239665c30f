"""What random programs found on kernels, made small."""

from __future__ import annotations

import pytest
import torch

import fusegrad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_number_to_the_power_of_a_narrow_float(dtype: torch.dtype) -> None:
    """Program 30017: the number had the narrow type, beside an exponent that is held in float32."""

    def power(x: torch.Tensor) -> torch.Tensor:
        return 2.0 ** x.clamp(-2, 2)

    x = torch.linspace(-3, 3, 9).to(dtype).requires_grad_()
    fast = fusegrad.compile(power, backend="interpret", fullgraph=True)
    torch.testing.assert_close(fast(x), power(x))
    found = [torch.autograd.grad(call(x).sum(), x)[0] for call in (fast, power)]
    torch.testing.assert_close(*found)
