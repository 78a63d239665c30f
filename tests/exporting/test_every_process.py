"""The text of a Function is the same in every process: nothing in it follows the order of a set, which changes with
PYTHONHASHSEED. The names of nine sizes come in the order of the arguments, one order out of 362,880."""

from __future__ import annotations

from pathlib import Path

from torch.autograd import Function

import fusegrad


class Three(Function):
    @staticmethod
    def forward(ctx, x, y, z):
        ctx.save_for_backward(x, y, z)
        return x.exp()

    @staticmethod
    def backward(ctx, grad):
        x, y, z = ctx.saved_tensors
        return grad * x.exp(), y, z


def test_names_of_sizes_come_in_the_order_of_the_arguments(tmp_path: Path) -> None:
    fast = fusegrad.compile(Three)
    path = tmp_path / "three.py"
    fusegrad.export(fast, "f32[3,4,5]", "f32[6,7,8]", "f32[9,10,11]", path=path)
    assert "Holds for: x: f32[K, M, N], y: f32[K_2, M_2, N_2], z: f32[K_3, M_3, N_3]." in path.read_text()
