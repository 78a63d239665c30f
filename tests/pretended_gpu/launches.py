"""Every launch that reaches the driver: checked against the binary that was loaded, then interpreted, and counted.

The interpreter is given the words that Triton's launcher packed, not the tensors: what it computes from is what a GPU
would have been given.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import graphs
import pretending
import torch
from code_objects import interface_of

from fusegrad.codegen.kernel import Kernel, Pointer
from fusegrad.runtime.kernels import interpreter, launch
from fusegrad.runtime.kernels.triton_module import TRITON_DTYPE

OWN_PARAMETERS = 2
"""Triton's own, at the end: scratch memory for the kernel and for its profiler."""


@dataclass(frozen=True)
class Launch:
    """One that reached the driver."""

    kernel: str
    grid: int
    device: int
    stream: int
    binary: int
    thread: int
    scratch: tuple[int, ...]
    """Where the counters and partial sums are that it was given."""


@dataclass(frozen=True)
class _Memory:
    """Where a tensor is, without keeping it."""

    place: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    itemsize: int

    @staticmethod
    def of(tensor: torch.Tensor) -> _Memory:
        return _Memory(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.element_size())

    def data_ptr(self) -> int:
        return self.place

    def stride(self) -> tuple[int, ...]:
        return self.steps

    def element_size(self) -> int:
        return self.itemsize

    def numel(self) -> int:
        return math.prod(self.shape)


launches: list[Launch] = []
problems: list[str] = []
"""What was wrong with the parameters of a launch."""
interprets = True
refuses: list[int] = []
"""The driver's answers to the next launches, instead of running them."""
_given = threading.local()


# ------------------------------------------------------------------ a launch
class _Config(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_uint64), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    )  # fmt: skip


class _Function(ctypes.Structure):
    _fields_ = (
        ("image", ctypes.c_void_p), ("name", ctypes.c_char * 512), ("max_dynamic", ctypes.c_int),
        ("module", ctypes.c_void_p),
    )  # fmt: skip


_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(_Config), ctypes.POINTER(_Function), ctypes.POINTER(ctypes.c_void_p)
)


@_Callback
def _on_launch(config: Any, function: Any, parameters: Any) -> int:
    if refuses:
        return refuses.pop(0)
    try:
        _launched(config.contents, function.contents, parameters)
    except Exception as error:  # there is nobody above to raise it to
        problems.append(f"{function.contents.name.decode()}: {type(error).__name__}: {error}")
    return 0


def _launched(config: Any, function: Any, parameters: Any) -> None:
    kernel, text, arguments, grid = _given.now
    name = function.name.decode()
    interface = interface_of(function.image, name)
    sizes = interface.sizes
    words = [int.from_bytes(ctypes.string_at(parameters[i], size), "little") for i, size in enumerate(sizes)]
    if interface.threads and config.bx > interface.threads:
        problems.append(f"{name}: {config.bx} threads, compiled for {interface.threads} at most")
    problems.extend(f"{name}: {found}" for found in _wrong(config, name, sizes, words, kernel, arguments, grid))
    scratch = tuple(
        a.data_ptr() for a, d in zip(arguments, kernel.arguments, strict=True)
        if isinstance(d, Pointer) and d.buffer.kind == "scratch"
    )  # fmt: skip
    on = pretending.tensors.pretended_device()
    launch = Launch(name, grid, on, config.stream, function.image, threading.get_ident(), scratch)
    launches.append(launch)
    memory = [_Memory.of(each) for each in arguments if isinstance(each, torch.Tensor)]
    run = partial(_interpret, kernel, text, memory, list(zip(words, sizes, strict=True)), grid)
    if graphs.is_recorded():
        copy = _Function.from_buffer_copy(function)
        graphs.record_launch(lambda: _replayed(launch, copy, memory, run))
    elif interprets:
        run()


def _replayed(launch: Launch, function: _Function, memory: Sequence[_Memory], run: Callable[[], None]) -> None:
    """A launch of a graph's: binary and memory have to be there still."""
    launches.append(launch)
    lost = [each for each in memory if each.numel() and not graphs.is_mapped(each.place)]
    if graphs.is_unloaded(function) or lost:
        problems.append(f"{launch.kernel}, replayed: {'its memory was freed' if lost else 'it was unloaded'}")
        return
    run()


def _wrong(
    config: Any, name: str, sizes: Sequence[int], words: Sequence[int], kernel: Kernel, arguments: Sequence[Any],
    grid: int,
) -> Iterator[str]:  # fmt: skip
    if name != kernel.name:
        yield f"launched in the place of {kernel.name}"
    if (config.gx, config.gy, config.gz) != (grid, 1, 1):
        yield f"grid {config.gx} x {config.gy} x {config.gz}, not {grid}"
    threads = pretending.DEVICE.warp_size * kernel.num_warps
    if (config.bx, config.by, config.bz) != (threads, 1, 1):
        yield f"{config.bx} threads, not {threads}"
    if len(sizes) != len(arguments) + OWN_PARAMETERS:
        yield f"{len(sizes)} parameters in the binary, {len(arguments)} arguments"
        return
    *words, workspace, profile = words
    is_allocated = bool(workspace) and pretending.tensors.pretended_is_allocated(workspace)
    if profile or is_allocated != kernel.has_descriptors or bool(workspace) != is_allocated:
        yield f"Triton's own parameters are {workspace:#x}, {profile:#x}, descriptors: {kernel.has_descriptors}"
    for at, (size, word, given) in enumerate(zip(sizes, words, arguments, strict=False)):
        bits = 8 * size
        expected = given.data_ptr() if isinstance(given, torch.Tensor) else given % (1 << bits)
        if word != expected or (isinstance(given, int) and not -(1 << bits - 1) <= given < 1 << bits - 1):
            yield f"parameter {at}, of {size} bytes: {word:#x}, not {given if isinstance(given, int) else expected:#x}"


def _interpret(
    kernel: Kernel, text: str, memory: Sequence[Any], words: Sequence[tuple[int, int]], grid: int
) -> None:  # fmt: skip
    from fusegrad.runtime.kernels import triton_private as private

    interpreter._self_test()
    bound: dict[str, Any] = dict(kernel.constants)
    for declared, (word, size) in zip(kernel.arguments, words[: len(kernel.arguments)], strict=True):
        if isinstance(declared, Pointer):
            bound[declared.name] = private.pointer(word, TRITON_DTYPE[declared.dtype])
        else:
            bound[declared.name] = private.integer(word - (1 << 8 * size) if word >> 8 * size - 1 else word)
    function = interpreter.functions(text)[kernel.name]
    with interpreter._interpreting(memory):
        private.builder.set_grid_dim(grid, 1, 1)
        for program in range(grid):
            private.builder.set_grid_idx(program, 0, 0)
            function(**bound)


def _watch_launches() -> None:
    """A thread's launch is known by its kernel and arguments when it reaches the driver."""
    on_device = launch._on_device

    def watched(kernel: Kernel, text: str, device: torch.device) -> Any:
        run = on_device(kernel, text, device)

        def launched(arguments: Sequence[Any], grid: int) -> None:
            before = getattr(_given, "now", None)
            _given.now = kernel, text, arguments, grid
            try:
                with interpreter._LOCK:  # while a kernel is interpreted none can be compiled
                    run(arguments, grid)
            finally:
                _given.now = before

        return launched

    launch._on_device = watched


_watch_launches()
pretending.driver.pretend_launch(_on_launch)
