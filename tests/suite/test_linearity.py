"""Which backwards of functions.py are linear in their gradients: no class is refused forward mode without a reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import fusegrad
from fusegrad.runtime.specialize.linearity import NonLinearBackward, require_linear

sys.path.insert(0, str(Path(__file__).parent))
from functions import CASES, Case

NOT_LINEAR = {
    "HardSwishLibrary": "`add` adds a term",
    "InPlaceInside": "`masked_fill_` adds a term",
    "ManyMath": "`add` adds a term",
    "AddcOps": "`add` adds a term",
    "NanGuard": "`linalg_vector_norm` multiplies it by itself",
}
"""Each of them adds something that is no gradient, or clips by the norm of the gradient."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_backward_is_linear_unless_it_is_not(case: Case) -> None:
    args = [a.requires_grad_() if _is_float(a) else a for a in case.make(4)]
    fast = fusegrad.compile(case.cls, dynamic=False)  # captured three times as fast
    specialization = fast._fusegrad.specialization(args)
    moving = [i for i, a in enumerate(args) if _is_float(a)]
    if case.name not in NOT_LINEAR:
        require_linear(specialization, moving)
        return
    with pytest.raises(NonLinearBackward, match=NOT_LINEAR[case.name]) as raised:
        require_linear(specialization, moving)
    assert "functions.py:" in str(raised.value)


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
