"""A GPU that is not there, for this process: import it before torch, and `cuda:0` and `cuda:1` are devices.

PRETENDED_GPU=nvidia (the default: an H100) or amd (an MI300X).

What is pretended: the driver (`driver.c`), tensors (`tensors.cpp`), and what `torch.cuda` answers. Everything else runs
as on a GPU: torch's dispatcher and engine with a thread per device, Triton's compiler, binder and launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

from building import DRIVERS, TENSORS, folder_of, libraries

DEVICES = 2
VENDOR = os.environ.get("PRETENDED_GPU", "nvidia")
_built = libraries()
assert "torch" not in sys.modules, "torch looks for devices as it is imported"
os.environ["TRITON_LIBCUDA_PATH"] = str(_built)
os.environ["TRITON_LIBHIP_PATH"] = str(_built / DRIVERS["amd"])
driver = ctypes.CDLL(str(_built / DRIVERS[VENDOR]), mode=ctypes.RTLD_GLOBAL)
ctypes.CDLL(str(folder_of("torch") / "lib/libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
tensors = ctypes.CDLL(str(_built / TENSORS), mode=ctypes.RTLD_GLOBAL)
tensors.pretended_stream.restype = ctypes.c_uint64
tensors.pretended_set_stream.argtypes = (ctypes.c_int, ctypes.c_int64)
tensors.pretend_memory.argtypes = (ctypes.c_int64,)
tensors.pretended_is_allocated.argtypes = (ctypes.c_void_p,)
tensors.pretend_devices(DEVICES)

import torch  # noqa: E402
import torch._dynamo.guards  # noqa: E402
import torch.cuda.random  # noqa: E402

cuda: Any = torch.cuda
MEMORY = 80 << 30
H100 = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=MEMORY, multi_processor_count=132, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, gcnArchName="",
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20, memory_clock_rate=2619000, memory_bus_width=5120, clock_rate=1980000,
)  # fmt: skip
MI300X = types.SimpleNamespace(**{
    **vars(H100), "name": "AMD Instinct MI300X", "major": 9, "minor": 4, "multi_processor_count": 304, "warp_size": 64,
    "gcnArchName": "gfx942:sramecc+:xnack-", "shared_memory_per_block": 65536,
    "shared_memory_per_block_optin": 65536, "shared_memory_per_multiprocessor": 65536, "L2_cache_size": 4 << 20,
})  # fmt: skip
DEVICE = {"nvidia": H100, "amd": MI300X}[VENDOR]


# ------------------------------------------------------------------ streams, events, captured launches
class Stream:
    """A number that launches carry."""

    count = 0x7000

    def __init__(self, device: Any = None, cuda_stream: int | None = None, **_: Any) -> None:
        Stream.count += 1
        self.device = torch.device("cuda", _index(device))
        self.cuda_stream = Stream.count if cuda_stream is None else cuda_stream

    def synchronize(self) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or Event()


class Event:
    """Milliseconds are always one."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0


@contextlib.contextmanager
def stream(wanted: Stream | None) -> Iterator[None]:
    """torch.cuda.stream."""
    if wanted is None:
        yield
        return
    on, before = wanted.device.index, tensors.pretended_stream(wanted.device.index)
    tensors.pretended_set_stream(on, wanted.cuda_stream)
    try:
        yield
    finally:
        tensors.pretended_set_stream(on, before)


_capturing: set[int] = set()


@contextlib.contextmanager
def captured(device: int = 0) -> Iterator[None]:
    """Within the block launches on a device are told to be captured. They run all the same."""
    _capturing.add(device)
    try:
        yield
    finally:
        _capturing.discard(device)


# ------------------------------------------------------------------ what torch.cuda answers
def _index(device: Any = None) -> int:
    if device is None:
        return int(tensors.pretended_device())
    found = device if isinstance(device, int) else torch.device(device).index
    return int(tensors.pretended_device()) if found is None else found


def _exchange(index: int) -> int:
    return int(tensors.pretended_exchange(int(index)))


def _maybe_exchange(index: int) -> int:  # Dynamo tells the two apart
    return _exchange(index)


_generators = tuple(torch.Generator(f"cuda:{index}") for index in range(DEVICES))
_ANSWERS: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "_lazy_init": lambda: None,
    "init": lambda: None,
    "device_count": lambda: DEVICES,
    "current_device": lambda: _index(),
    "set_device": lambda device: _exchange(_index(device)) and None,
    "_exchange_device": _exchange,
    "_maybe_exchange_device": _maybe_exchange,
    "get_device_properties": lambda device=None: DEVICE,
    "_get_device_properties": lambda index: DEVICE,
    "get_device_capability": lambda device=None: (DEVICE.major, DEVICE.minor),
    "get_device_name": lambda device=None: DEVICE.name,
    "get_arch_list": lambda: ["sm_90" if VENDOR == "nvidia" else "gfx942"],
    "mem_get_info": lambda device=None: (MEMORY, MEMORY),
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "reset_peak_memory_stats": lambda device=None: None,
    "empty_cache": lambda: None,
    "synchronize": lambda device=None: None,
    "is_current_stream_capturing": lambda: _index() in _capturing,
    "is_bf16_supported": lambda *_, **__: True,
    "default_generators": _generators,
    "get_rng_state": lambda device="cuda": _generators[_index(device)].get_state(),
    "set_rng_state": lambda state, device="cuda": _generators[_index(device)].set_state(state) and None,
    "manual_seed": lambda seed: _generators[_index()].manual_seed(seed) and None,
    "manual_seed_all": lambda seed: [g.manual_seed(seed) for g in _generators] and None,
    "current_stream": lambda device=None: Stream(device, tensors.pretended_stream(_index(device))),
    "default_stream": lambda device=None: Stream(device, 0),
    "Stream": Stream,
    "ExternalStream": lambda number, device=None: Stream(device, number),
    "Event": Event,
    "stream": stream,
}
_PRIVATE: dict[str, Any] = {
    "_cuda_getCurrentRawStream": lambda index: tensors.pretended_stream(index),
    "_cuda_getDevice": lambda: _index(),
    "_cuda_setDevice": lambda index: _exchange(index) and None,
    "_cuda_getDeviceCount": lambda: DEVICES,
    "_cuda_exchangeDevice": lambda index: _exchange(index),
    "_cuda_maybeExchangeDevice": lambda index: _exchange(index),
    "_cuda_sleep": lambda cycles: None,
    "_cuda_isCurrentStreamCapturing": lambda: _index() in _capturing,
}


def _pretend() -> None:
    for name, answer in _ANSWERS.items():
        setattr(cuda, name, answer)
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
        setattr(cuda.random, name, _ANSWERS[name])
    for name, answer in _PRIVATE.items():
        setattr(torch._C, name, answer)
    if VENDOR == "nvidia":
        torch.version.cuda = torch.version.cuda or "13.0"
    else:
        torch.version.cuda, torch.version.hip = None, "6.4.43483"

    def empty_strided(size: Any, stride: Any, dtype: Any) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")

    torch._C._dynamo.guards._empty_strided_cuda = empty_strided


_pretend()
