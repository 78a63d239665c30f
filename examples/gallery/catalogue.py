"""Every Function of the gallery with sample arguments: a table to run tests, comparisons and measurements over.

    from fusegrad.examples.gallery.catalogue import CATALOGUE

    for entry in CATALOGUE:
        entry.function.apply(*entry.arguments())              # compiled
        entry.written.apply(*entry.arguments(torch.float64))  # the class as its file has it

Sizes are small and even; the first dimension of what is not a weight is the batch, 8 long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .add_rms_norm import AddRMSNorm
from .attention import Attention
from .burgers_residual import BurgersResidual
from .clipped_policy_loss import ClippedPolicyLoss
from .cross_entropy import CrossEntropy
from .dpo_loss import DPOLoss
from .dynamic_tanh import DynamicTanh
from .entmax15 import Entmax15
from .fake_quantize import FakeQuantize
from .focal_loss import FocalLoss
from .fused_linear_cross_entropy import FusedLinearCrossEntropy
from .gated_rms_norm import GatedRMSNorm
from .geglu import GeGLU
from .gelu import GELU
from .gradient_reversal import GradientReversal
from .group_norm import GroupNorm
from .hard_choice import HardChoice
from .info_nce import InfoNCE
from .int8_rows import Int8Rows
from .js_divergence import JSDivergence
from .kl_divergence import KLDivergence
from .layer_norm import LayerNorm
from .learned_step import LearnedStep
from .masked_softmax import MaskedSoftmax
from .poisson_residual import PoissonResidual
from .poly_norm import PolyNorm
from .reglu import ReGLU
from .rms_norm import RMSNorm
from .rope import RoPE, angles
from .sign import Sign
from .sink_softmax import SinkSoftmax
from .soft_rank import SoftRank
from .soft_sort import SoftSort
from .sparsemax import Sparsemax
from .squared_relu import SquaredReLU
from .straight_through import Quantize
from .swiglu import SwiGLU
from .ternary import Ternary
from .total_variation import TotalVariation
from .tversky_loss import TverskyLoss


@dataclass(frozen=True)
class Entry:
    """One Function: compiled, as it was written, and how to call it."""

    name: str
    """Of its file in this folder."""
    function: Any
    """The compiled class."""
    make: Callable[[Draw], tuple[Any, ...]]
    weights: tuple[int, ...] = ()
    """Which arguments are parameters of a model; of the other tensors the first dimension is the batch."""
    exact: bool = True
    """Whether backward is the derivative of forward; not so for what is straight-through."""
    shared: tuple[int, ...] = ()
    """Tensors that are neither: the same for every sample, as a mask or a table of angles."""

    @property
    def written(self) -> Any:
        """The class as its author wrote it, uncompiled."""
        return self.function.__base__

    def arguments(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Any, ...]:
        """Fresh arguments, the same for the same seed; tensors that a gradient exists for require one."""
        return tuple(_in(a, dtype) for a in self.make(Draw(seed)))


class Draw:
    """Random arguments in float32, by a generator of their own."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        """Normal numbers that want a gradient."""
        return self.fixed(*shape).requires_grad_()

    def fixed(self, *shape: int) -> torch.Tensor:
        """Normal numbers that want none."""
        return torch.randn(shape, generator=self.generator)

    def positive(self, *shape: int) -> torch.Tensor:
        """Numbers from 0.5 to 1.5 that want a gradient."""
        return (torch.rand(shape, generator=self.generator) + 0.5).requires_grad_()

    def classes(self, count: int, *shape: int) -> torch.Tensor:
        """Indices below `count`."""
        return torch.randint(count, shape, generator=self.generator)

    def mask(self, *shape: int) -> torch.Tensor:
        """Truth values, more of them true than false."""
        return torch.rand(shape, generator=self.generator) < 0.7

    def targets(self, count: int, rows: int) -> torch.Tensor:
        """Indices below `count`, one of them -100."""
        return self.classes(count, rows).index_fill_(0, torch.tensor([1]), -100)

    def rows(self, *shape: int) -> torch.Tensor:
        """Rows of probabilities that want a gradient."""
        return self.fixed(*shape).softmax(-1).requires_grad_()

    def log_rows(self, *shape: int) -> torch.Tensor:
        """Rows of log-probabilities that want a gradient."""
        return self.fixed(*shape).log_softmax(-1).requires_grad_()


def _in(value: Any, dtype: torch.dtype) -> Any:
    """A floating-point tensor in the dtype, a leaf as before."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().to(dtype).requires_grad_(value.requires_grad)


def _dpo(draw: Draw) -> tuple[Any, ...]:
    return draw(8), draw(8), draw.fixed(8), draw.fixed(8), 0.1


def _policy(draw: Draw) -> tuple[Any, ...]:
    log_p = draw.log_rows(8, 16)
    return log_p, log_p.detach() + 0.2 * draw.fixed(8, 16), draw.fixed(8, 16), draw.mask(8, 16), 0.2, 0.3


def _fake(draw: Draw) -> tuple[Any, ...]:
    return draw(8, 16), draw.positive(8).detach() / 4, draw.classes(5, 8).float(), -8, 7


def _causal(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


CATALOGUE: tuple[Entry, ...] = (
    # norms
    Entry("rms_norm", RMSNorm, lambda draw: (draw(8, 16), draw(16), 1e-6), weights=(1,)),
    Entry("layer_norm", LayerNorm, lambda draw: (draw(8, 16), draw(16), draw(16), 1e-5), weights=(1, 2)),
    Entry("group_norm", GroupNorm, lambda draw: (draw(8, 4, 3, 2), draw(4), draw(4), 2, 1e-5), weights=(1, 2)),
    Entry("add_rms_norm", AddRMSNorm, lambda draw: (draw(8, 16), draw(8, 16), draw(16), 1e-6), weights=(2,)),
    Entry("gated_rms_norm", GatedRMSNorm, lambda draw: (draw(8, 16), draw(8, 16), draw(16), 1e-6), weights=(2,)),
    Entry("dynamic_tanh", DynamicTanh, lambda draw: (draw(8, 16), draw(1), draw(16), draw(16)), weights=(1, 2, 3)),
    Entry("poly_norm", PolyNorm, lambda draw: (draw(8, 16), draw(3), draw(), 1e-6), weights=(1, 2)),
    # gated activations
    Entry("swiglu", SwiGLU, lambda draw: (draw(8, 16), draw(8, 16))),
    Entry("geglu", GeGLU, lambda draw: (draw(8, 16), draw(8, 16))),
    Entry("gelu", GELU, lambda draw: (draw(8, 16),)),
    Entry("reglu", ReGLU, lambda draw: (draw(8, 16), draw(8, 16))),
    Entry("squared_relu", SquaredReLU, lambda draw: (draw(8, 16),)),
    # losses
    Entry("cross_entropy", CrossEntropy, lambda draw: (draw(8, 16), draw.targets(16, 8), -100, 0.1, 1e-2)),
    Entry(
        "fused_linear_cross_entropy",
        FusedLinearCrossEntropy,
        lambda draw: (draw(8, 4), draw(16, 4), draw.targets(16, 8), -100),
        weights=(1,),
    ),
    Entry("kl_divergence", KLDivergence, lambda draw: (draw.log_rows(8, 16), draw.rows(8, 16).detach())),
    Entry("js_divergence", JSDivergence, lambda draw: (draw.log_rows(8, 16), draw.log_rows(8, 16), 0.3)),
    Entry("total_variation", TotalVariation, lambda draw: (draw.rows(8, 16), draw.rows(8, 16))),
    Entry("focal_loss", FocalLoss, lambda draw: (draw(8, 16), draw.mask(8, 16), 0.25, 2.0)),
    Entry("dpo_loss", DPOLoss, _dpo),
    Entry("clipped_policy_loss", ClippedPolicyLoss, _policy),
    Entry("tversky_loss", TverskyLoss, lambda draw: (draw(8, 16), draw.mask(8, 16).float(), 0.3, 0.7, 1.0)),
    Entry("info_nce", InfoNCE, lambda draw: (draw(8, 16), draw(8, 16), 0.5)),
    # attention
    Entry("attention", Attention, lambda draw: (draw(8, 4, 6, 16), draw(8, 2, 6, 16), draw(8, 2, 6, 16), 0.25, True)),
    Entry("rope", RoPE, lambda draw: (draw(8, 2, 4, 16), *angles(4, 16)), shared=(1, 2)),
    Entry("masked_softmax", MaskedSoftmax, lambda draw: (draw(8, 2, 6, 6), _causal(6)), shared=(1,)),
    Entry("sink_softmax", SinkSoftmax, lambda draw: (draw(8, 2, 4, 6), draw(2)), weights=(1,)),
    # sparse and sorted
    Entry("sparsemax", Sparsemax, lambda draw: (draw(8, 16),)),
    Entry("entmax15", Entmax15, lambda draw: (draw(8, 16),)),
    Entry("soft_sort", SoftSort, lambda draw: (draw(8, 6), 0.5)),
    Entry("soft_rank", SoftRank, lambda draw: (draw(8, 6), 0.5)),
    # quantisers and straight-through
    Entry("learned_step", LearnedStep, lambda draw: (draw(8, 16), draw.positive(), 3), weights=(0, 1), exact=False),
    Entry("fake_quantize", FakeQuantize, _fake, exact=False),
    Entry("int8_rows", Int8Rows, lambda draw: (draw(8, 16),), exact=False),
    Entry("ternary", Ternary, lambda draw: (draw(8, 16),), weights=(0,), exact=False),
    Entry("straight_through", Quantize, lambda draw: (draw(8, 16), 0.25, 4), exact=False),
    Entry("sign", Sign, lambda draw: (draw(8, 16),), exact=False),
    Entry("hard_choice", HardChoice, lambda draw: (draw(8, 16), draw.fixed(8, 16), 0.7), exact=False),
    Entry("gradient_reversal", GradientReversal, lambda draw: (draw(8, 16), 0.3), exact=False),
    # physics
    Entry("poisson_residual", PoissonResidual, lambda draw: (draw(8, 6, 5), draw(8, 6, 5), 0.5)),
    Entry("burgers_residual", BurgersResidual, lambda draw: (draw(8, 6, 7), 0.1, 0.5, 0.2)),
)
