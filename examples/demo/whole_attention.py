"""The demo's language model with attention as one Function, products and all, beside itself in eager.

    python -m fusegrad.examples.demo.whole_attention --steps 30

The demo's own attention is a masked softmax between two matmuls of torch's; here `fusegrad.swap` puts the gallery's
Attention in its place, whose scores are never in memory where kernels run. The exit code is 2 where the losses part.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

import fusegrad
from fusegrad.runtime.report.terminal import Table, plain

from ..gallery.attention import Attention as Compiled
from .functions import FUNCTIONS
from .model import Attention, Functions, Sizes, call, read_text, windows
from .training import TARGET, Trained, report_training, saved_tensor_bytes, started, train, verdict

WRITTEN: type[Function] = Compiled.__base__  # a compiled class is a subclass of the class as written
HEADER = ("for sm_90", "context", "launches", "eager", "MB moved", "eager", "MB saved", "eager")
CONTEXTS = (128, 1024, 8192)
SMALL = Sizes(width=64, hidden=96, heads=4, layers=2, context=64, batch=4)
"""So small that the generated kernels, too, train in some seconds a step under Triton's interpreter."""


# ---------------------------------------------------------------------- the model
def whole(function: type[Function]) -> type:
    """A replacement of the demo's attention that calls the function for all of it."""

    class WholeAttention:
        def forward(self: Any, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            mixed: Tensor = self.out(call(function, q, k, v, q.shape[-1] ** -0.5, True).transpose(1, 2).flatten(-2))
            return mixed

    return WholeAttention


def both_models(sizes: Sizes, seed: int) -> tuple[Trained, Trained]:
    """The same weights; attention as it is written, and compiled. The other Functions are eager in both."""
    pair = [started(Functions(*FUNCTIONS), sizes, seed, torch.device("cpu")) for _ in range(2)]
    for trained, function in zip(pair, (WRITTEN, Compiled), strict=True):
        fusegrad.swap(trained.model, {Attention: whole(function)})
    return pair[0], pair[1]


# ---------------------------------------------------------------------- what becomes of it
def kernel_rows(sizes: Sizes, contexts: Sequence[int] = CONTEXTS) -> Iterator[tuple[str, ...]]:
    """Forward and backward at growing contexts: launches, bytes moved, bytes saved for backward; and eager's."""
    for context in contexts:
        heads = f"bf16[{sizes.batch},{sizes.heads},{context},{sizes.width // sizes.heads}]"
        found = fusegrad.explain(Compiled, heads, heads, heads, 0.25, True, target=TARGET)
        for direction, report in found.directions.items():
            launches = (str(len(report.launches)), str(report.eager.launches))
            moved = tuple(f"{n / 1e6:.1f}" for n in (report.moved, report.eager.bytes))
            saved = saved_megabytes(found) if direction == "forward" else ("", "")
            yield f"Attention {direction}", str(context), *launches, *moved, *saved


def saved_megabytes(explanation: Any) -> tuple[str, str]:
    """What forward keeps for backward, and what it would keep as the class is written."""
    written = sum(row.bytes for row in explanation.kept if row.how in ("saved as written", "computed again"))
    return f"{explanation.saved_bytes / 1e6:.1f}", f"{written / 1e6:.1f}"


# ---------------------------------------------------------------------- the job
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="reference", help="reference, or interpret: the generated kernels, slowly")
    asked = parser.parse_args(argv)
    sizes = SMALL if asked.backend == "interpret" else Sizes()
    torch.set_num_threads(1)
    pair = both_models(sizes, asked.seed)
    batches = windows(read_text(torch.device("cpu")), sizes, asked.seed)
    with fusegrad.config.patch(backend=asked.backend):
        train(pair, batches, asked.steps)
        kept = [saved_tensor_bytes(trained.model, next(batches)) for trained in pair]
    report_training(pair, kept)
    print("\n" + plain(Table("", HEADER, list(kernel_rows(sizes)))) + "\n")
    return verdict(pair, [])


if __name__ == "__main__":
    raise SystemExit(main())
