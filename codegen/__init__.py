"""A group of fusible primitives to Triton text: named axes, levels, phases. Needs neither torch nor a GPU."""

from ..ir.errors import Unfusible
from .kernel import TARGETS, Buffer, Course, Kernel, Kernels, Pointer, Ref, Scalar, Target, Walk
from .kernel_partition import generate, module
from .scattered_steps import Addition, additions_of_steps
from .whole import is_lighter, is_little

__all__ = [
    "TARGETS",
    "Addition",
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
    "additions_of_steps",
    "generate",
    "is_lighter",
    "is_little",
    "module",
]
