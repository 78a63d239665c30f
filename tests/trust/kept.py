"""Calls with tensors of 100 MB, in every way: how many bytes are alive after each block of them?

    python tests/trust/kept.py --json

Python's collector is off: what only a cycle holds counts as kept, as it would on a GPU. Counted are the storages of all
tensors that Python knows, and malloc's large blocks, among which is what only C++ holds.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import odd_functions as odd
import outcome
import torch
import trust_functions as functions
import ways_of_calling as ways

import fusegrad

EACH = 100 << 20
"""Bytes of a large tensor."""
CALLS = 4
"""Of a block; at the third a call is written out."""
COLUMNS = 1024
WAYS: tuple[ways.Way, ...] = tuple(way for way in ways.WAYS if way is not ways.hessian)  # whose results are squares
CLASSES: tuple[Any, ...] = (
    functions.RMSNorm, functions.SwiGLU, functions.Scale, functions.StraightThrough, functions.Opaque, odd.Split,
    odd.OpaqueBackward, odd.OnContext, odd.ErrorInForward, odd.ErrorInBackward, odd.ErrorInDoubleBackward,
)  # fmt: skip


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`; `hblkhd` are the bytes of large blocks, which are mappings of their own."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def in_large_blocks() -> int:
    """Bytes that malloc handed out in large blocks, whoever holds them."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _Mallinfo
    return int(ask().hblkhd)


def in_storages(each: int) -> int:
    """Bytes in storages of at least a quarter of a large tensor, each counted once."""
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    storages = [t.untyped_storage() for t in tensors if t.device.type == "cpu" and t.layout is torch.strided]
    sizes = {s._cdata: s.nbytes() for s in storages}
    return sum(n for n in sizes.values() if type(n) is int and n >= each // 4)


def kept_by(apply: Any, way: ways.Way, cls: Any, each: int, calls: int) -> int:
    """Bytes that a block of calls leaves, by either count; then Python collects, so that the next begins with none."""
    before = in_storages(each), in_large_blocks()
    for _ in range(calls):
        ways.census(apply, way, lambda: arguments(cls, each))
    storages, blocks = in_storages(each) - before[0], in_large_blocks() - before[1]
    gc.collect()
    return max(storages, blocks if blocks >= each // 2 else 0)  # Python's own tables are large blocks, too


def arguments(cls: Any, each: int) -> tuple[Any, ...]:
    """Arguments of so many bytes."""
    rows = each // 4 // COLUMNS
    if cls in functions.ALL:
        return functions.arguments(cls, rows, COLUMNS)
    x = torch.rand(rows, COLUMNS, requires_grad=True)
    return (x, 2.0) if cls is odd.OnContext else (x,)


def measure(
    classes: Sequence[Any], each: int, several: Sequence[ways.Way] = WAYS, calls: int = CALLS
) -> dict[str, Any]:
    """The outcome of every class in every way. eager: what torch itself keeps, which is its own fault."""
    kept, eager, started = dict[str, int](), dict[str, int](), time.perf_counter()
    with ways.uncollected(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for cls in classes:
            fast = fusegrad.compile(cls)
            for way in several:
                name = f"{cls.__name__} {way.__name__}"
                eager[name] = kept_by(cls.apply, way, cls, each, 1)
                kept[name] = 0 if eager[name] else kept_by(fast.apply, way, cls, each, calls)
    return {
        "bytes_each": each, "classes": len(classes), "ways": len(several), "calls": len(kept) * calls,
        "kept_bytes": sum(kept.values()), "kept": {name: n for name, n in kept.items() if n},
        "kept_by_eager": sorted(name for name, n in eager.items() if n),
        "seconds": round(time.perf_counter() - started, 1),
    }  # fmt: skip


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--megabytes", type=int, default=EACH >> 20)
    options.add_argument("--json", action="store_true", help="write benchmarks/results/trust/kept.json")
    chosen = options.parse_args()
    found = measure(CLASSES, chosen.megabytes << 20)
    print(f"{found['calls']} calls with tensors of {chosen.megabytes} MB: {found['kept_bytes']} bytes {found['kept']}")
    print(f"torch itself keeps: {found['kept_by_eager']}")
    if chosen.json:
        outcome.write("kept", found)
    return 1 if found["kept"] else 0


if __name__ == "__main__":
    sys.exit(main())
