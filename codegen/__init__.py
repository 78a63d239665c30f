"""A group of fusible primitives to Triton text: named axes, levels, phases. Knows `ir`; needs neither torch nor a GPU."""

from .kernel import TARGETS, Buffer, Kernel, Kernels, Pointer, Ref, Scalar, Target

__all__ = ["TARGETS", "Buffer", "Kernel", "Kernels", "Pointer", "Ref", "Scalar", "Target"]
