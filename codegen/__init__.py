"""A group of fusible primitives to Triton text: named axes, levels, phases. Needs neither torch nor a GPU."""

from ..ir.errors import Unfusible
from .kernel import TARGETS, Buffer, Course, Kernel, Kernels, Pointer, Ref, Scalar, Target, Walk
from .kernel_partition import generate, module
from .scattered_steps import summed_by_steps
from .whole import is_lighter, is_little

__all__ = [
    "TARGETS",
    "Buffer",
    "Course",
    "Kernel",
    "Kernels",
    "Pointer",
    "Ref",
    "Scalar",
    "Target",
    "Unfusible",
    "Walk",
    "generate",
    "is_lighter",
    "is_little",
    "module",
    "summed_by_steps",
]
