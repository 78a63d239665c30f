"""Emitted text -> a Python module -> a function that launches one of its kernels.

The text is executed from memory; the copy in the cache directory is for debuggers and profilers: it is never run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from ...codegen.emit.context import EXACTLY, PRECISION
from ...codegen.kernel import Kernel, Pointer, Scalar
from ...ir.errors import UnsupportedBackendError
from ...ir.text.syntax_trees import undisturbed
from ...ir.types import FLOAT8
from ...tracer.torch_private import current_device, current_stream
from ..settings.config import KERNEL_BACKENDS, is_interpreted
from .launch_metadata import metadata_of
from .triton_module import jit_function, require_triton

Argument: TypeAlias = "torch.Tensor | int"
Launch: TypeAlias = Callable[[Sequence[Argument], int], None]


def _on_device(kernel: Kernel, module_text: str, device: torch.device) -> Launch:
    scalars = tuple(argument.name for argument in kernel.arguments if isinstance(argument, Scalar))
    function = jit_function(module_text, kernel.name, scalars)
    function.launch_metadata = metadata_of(kernel)  # of the same text any kernel's is the same
    launch = _OnDevice(kernel, function, device)
    return _private().with_workspace(launch) if kernel.has_descriptors else launch


class _OnDevice:
    """Launches a kernel on one GPU: by Triton's own look-up the first time, past it for arguments of the same kind.

    Of a kind are arguments for which Triton compiles the same: pointers at multiples of 16 bytes, integers of 32 bits;
    for AMD's GPUs also what lies within 2 GB.
    """

    def __init__(self, kernel: Kernel, function: Any, device: torch.device) -> None:
        self.function, self.device, self.constants = function, device, kernel.constants
        self.facts = {**kernel.constants, **kernel.options("hip" if torch.version.hip else "cuda")}
        self.kind_of = _kind_on_amd if torch.version.hip else _is_usual
        self.bound: dict[tuple[int, ...], Callable[[int, int, Sequence[Argument]], None]] = {}
        self.binds = True

    def __call__(self, arguments: Sequence[Argument], grid: int) -> None:
        if not grid:
            return
        kind = tuple(map(self.kind_of, arguments))
        bound = self.bound.get(kind)
        if bound is None or not self._is_current() or _private().launches_are_watched():
            self._look_up(arguments, grid, kind)
            return
        try:
            bound(grid, current_stream(current_device()), arguments)
        except TypeError:  # refused before anything was launched: this Triton's launcher takes other arguments
            self.binds = False
            self.bound.clear()
            self._look_up(arguments, grid, kind)

    def _is_current(self) -> bool:
        return self.device.index is None or self.device.index == current_device()

    def _look_up(self, arguments: Sequence[Argument], grid: int, kind: tuple[int, ...]) -> None:
        with torch.cuda.device(self.device):
            # Triton parses the kernel's text, where it compiles it, before it launches anything.
            compiled = undisturbed(lambda: self.function[(grid,)](*arguments, **self.facts))
        _private().keep_loaded(compiled)
        if compiled is None or not self.binds or self.device.index is None:
            return
        try:
            self.bound[kind] = _private().launch_of(self.function, compiled, self.constants)
        except AttributeError:
            self.binds = False


def _is_usual(argument: Argument) -> bool:
    if isinstance(argument, int):
        return -(2**31) <= argument < 2**31
    return argument.data_ptr() % 16 == 0


def _kind_on_amd(argument: Argument) -> int:
    """As above, and whether offsets of 32 bits reach all of a tensor's memory: Triton then uses buffer operations."""
    if isinstance(argument, int):
        return _is_usual(argument)
    return _is_usual(argument) + 2 * (argument.untyped_storage().size() < 2**31)


@functools.cache
def _private() -> Any:
    from . import triton_private

    return triton_private


def _interpreting_launch(kernel: Kernel, module_text: str) -> Launch:
    from . import interpreter as interpret

    def launch(arguments: Sequence[Argument], grid: int) -> None:
        if grid:
            interpret.run(kernel, module_text, arguments, grid)

    return launch


def launcher(kernel: Kernel, module_text: str, backend: str, device: torch.device | str | None = None) -> Launch:
    """`f(arguments, grid)`: launch `grid` programs of a kernel on tensors and sizes in the order of `kernel.arguments`.

    "triton" runs on `device` (CUDA or HIP), on its current stream; "interpret" runs on the CPU before it returns.
    """
    require_triton(backend, kernel.name)
    if is_interpreted(backend):
        return _with_aligned_copies(kernel, _with_bytes(kernel, _interpreting_launch(kernel, module_text)))
    place = torch.device("cuda" if device is None else device)
    if PRECISION in kernel.constants and backend in KERNEL_BACKENDS and place.type == "cuda":
        return _with_allowed_precision(kernel, module_text, place)
    if backend not in KERNEL_BACKENDS or place.type != "cuda":
        fix = "use backend='interpret' or 'reference'."
        raise UnsupportedBackendError(backend=backend, what=kernel.name, reason=f"it needs a GPU, not {place}", fix=fix)
    return _with_aligned_copies(kernel, _with_bytes(kernel, _on_device(kernel, module_text, place)))


def _with_allowed_precision(kernel: Kernel, module_text: str, place: torch.device) -> Launch:
    """A product of float32: in TF32 while torch's setting for products allows it, exactly otherwise."""
    launches: dict[str, Launch] = {}

    def launch(arguments: Sequence[Argument], grid: int) -> None:
        allowed = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else EXACTLY
        if allowed not in launches:
            fixed = replace(kernel, constants={**kernel.constants, PRECISION: allowed})
            launches[allowed] = _with_aligned_copies(fixed, _with_bytes(fixed, _on_device(fixed, module_text, place)))
        launches[allowed](arguments, grid)

    return launch


def _with_aligned_copies(kernel: Kernel, launch: Launch) -> Launch:
    """The same launch with copies of what has to begin at a multiple of 16 bytes and does not."""
    places = [i for i, a in enumerate(kernel.arguments) if a.name in kernel.aligned]
    if not places:
        return launch

    def on_aligned(arguments: Sequence[Argument], grid: int) -> None:
        if any(arguments[i].data_ptr() % 16 for i in places):  # type: ignore[union-attr]
            arguments = [_aligned_copy(a) if i in places else a for i, a in enumerate(arguments)]
        launch(arguments, grid)

    return on_aligned


def _aligned_copy(tensor: Argument) -> torch.Tensor:
    """A copy of a tensor's memory from its first to its last element: kernels know the strides."""
    assert isinstance(tensor, torch.Tensor)
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((extent,), (1,)).clone()


def _with_bytes(kernel: Kernel, launch: Launch) -> Launch:
    """The same launch with eight-bit floats handed over as bytes."""
    places = [i for i, a in enumerate(kernel.arguments) if isinstance(a, Pointer) and a.dtype in FLOAT8]
    if not places:
        return launch

    def on_bytes(arguments: Sequence[Argument], grid: int) -> None:
        values = list(arguments)
        for i in places:
            values[i] = values[i].view(torch.uint8)  # type: ignore[union-attr]
        launch(values, grid)

    return on_bytes
