"""What a GPU refuses: launches, memory, threads per block. The call is answered right all the same."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import graphs
import pretending
import torch
from launches import launches, refuses
from scenes import scene
from scenes_of_calls import apart, rms_norm
from written import gated, gradients, pair

import fusegrad


@scene
def refused(code: int) -> Iterator[str]:
    """The driver answers one launch with an error; later calls go on."""
    written, both = rms_norm()
    fast, expected = fusegrad.compile(written, backend="triton"), both(written.apply)
    both(fast.apply)
    refuses.append(code)
    yield from apart(f"error {code}", both(fast.apply), expected)
    if refuses:
        yield "no launch was refused"
    yield from apart(f"after error {code}", both(fast.apply), expected)


@scene
def illegal_address() -> Iterator[str]:
    """An error after which memory may be anything goes to the caller."""
    written, both = rms_norm()
    fast = fusegrad.compile(written, backend="triton")
    both(fast.apply)
    refuses.append(700)
    try:
        both(fast.apply)
    except RuntimeError as error:
        if "illegal memory access" not in str(error):
            yield str(error)
    else:
        yield "nothing was raised"


@scene
def too_many_threads() -> Iterator[str]:
    """The binary needs more registers than so many threads have."""
    written, both = rms_norm()
    fast = fusegrad.compile(written, backend="triton")
    pretending.driver.pretend_threads(128)
    try:
        yield from apart("128 threads per block", both(fast.apply), both(written.apply))
    finally:
        pretending.driver.pretend_threads(1024)


@scene
def out_of_memory() -> Iterator[str]:
    """torch's own error, with eager's class, and right again once there is memory."""
    written, (x, w) = gated(), pair(rows=64, width=256)
    fast = fusegrad.compile(written, backend="triton")
    expected = gradients(written.apply(x, w), x, w)
    yield from apart("with memory", gradients(fast.apply(x, w), x, w), expected)
    pretending.tensors.pretend_memory(1024)
    try:
        fast.apply(x, w)
    except torch.OutOfMemoryError:
        pass
    else:
        yield "nothing was raised"
    finally:
        pretending.tensors.pretend_memory(0)
    yield from apart("with memory again", gradients(fast.apply(x, w), x, w), expected)


@scene
def captured_launch_outlives_its_class() -> Iterator[str]:
    """What a captured launch counts in belongs to the graph, which nobody tells of the class: it is never freed."""
    place = _counters_of_a_captured_launch()
    gc.collect()
    if not pretending.tensors.pretended_is_allocated(place):
        yield "the counters of a captured launch were freed with the class"


def _counters_of_a_captured_launch() -> int:
    written, both = rms_norm()
    fast = fusegrad.compile(written, backend="triton")
    both(fast.apply)
    with pretending.captured():
        both(fast.apply)
    return launches[-1].scratch[-1]


@scene
def first_call_in_a_pool() -> Iterator[str]:
    """CUDA-graph trees warm up with a thread's allocations in a pool of theirs: nothing of ours may stay in it."""
    pool = pretending.tensors.pretend_pool
    fast = fusegrad.compile(rms_norm()[0], backend="triton")
    x, w = pair(dtype=torch.bfloat16, rows=64, width=256)
    y = fast.apply(x, w, 1e-6)
    y.grad_fn.register_prehook(lambda *_: pool(1) and None)  # in the engine's thread, around backward alone
    y.grad_fn.register_hook(lambda *_: pool(0) and None)
    found = torch.autograd.grad(y, (x, w), torch.ones_like(y))
    if not graphs.live_in((0, 1)):
        yield "the gradients are not from the pool: nothing was tested"
    del y, found
    gc.collect()
    until = time.monotonic() + 5
    while graphs.live_in((0, 1)) and time.monotonic() < until:
        time.sleep(0.01)  # the engine's thread lets go of what it handed over, in its own time
    if left := graphs.live_in((0, 1)):
        yield f"{len(left)} allocations stay in the pool"
