"""Calls as training code makes them: under checkpoint, in streams and threads, captured, on two devices."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pretending
import torch
import torch.autograd.forward_ad as forward_ad
import triton
from launches import launches
from scenes import scene
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from written import BiasResidual, LargestFirst, Norm, gated, gradients, norm_by_hand, pair

import fusegrad
from fusegrad.benchmarks import functions, gpu
from fusegrad.benchmarks.gpu_day.times import small_flushes
from fusegrad.runtime.settings.config import settings


def apart(what: str, ours: Any, theirs: Any, rtol: float = 1e-5, atol: float = 1e-6) -> Iterator[str]:
    for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.device != b.device or not torch.allclose(a.detach().cpu(), b.detach().cpu(), rtol=rtol, atol=atol):
            yield f"{what} {at}: {a.device} {b.device}, off by {(a.cpu() - b.cpu()).abs().max().item():.3g}"


def rms_norm(device: str = "cuda") -> tuple[Any, Callable[[Any], list[Tensor]]]:
    """A class of its own whose backward has arrival counters, and its forward and backward by some apply."""
    written = type("CountedNorm", (functions.RMSNorm,), {"__module__": __name__})
    x, w = pair(device, torch.bfloat16, 64, 256)
    return written, lambda apply: gradients(apply(x, w, 1e-6), x, w)


# ------------------------------------------------------------------ one thread
@scene
def checkpointed(reentrant: bool) -> Iterator[str]:
    written = gated()
    fast = fusegrad.compile(written, backend="triton")
    found = []
    for apply in (fast.apply, written.apply):
        x, w = pair()
        checkpoint(apply, x, w, use_reentrant=reentrant).sum().backward()
        found.append([x.grad, w.grad])
    yield from apart("checkpoint", *found)


@scene
def saved_on_cpu() -> Iterator[str]:
    written = gated()
    fast, (x, w) = fusegrad.compile(written, backend="triton"), pair()
    with torch.autograd.graph.save_on_cpu():
        y = fast.apply(x, w)
    yield from apart("save_on_cpu", gradients(y, x, w), gradients(written.apply(x, w), x, w))


@scene
def autocast() -> Iterator[str]:
    written = gated()
    fast, (x, w) = fusegrad.compile(written, backend="triton"), pair()
    layer = torch.nn.Linear(32, 32).to("cuda")
    with torch.autocast("cuda", torch.bfloat16):
        found = [gradients(apply(layer(x), w).float(), x, w) for apply in (fast.apply, written.apply)]
    yield from apart("autocast", *found, rtol=1e-2, atol=1e-2)


@scene
def described() -> Iterator[str]:
    """Tiles by descriptors, for which Triton asks for memory; the caller's own allocator is what it was."""
    asked: list[int] = []
    triton.set_allocator(lambda size, *_: asked.append(size))
    fast = fusegrad.compile(BiasResidual, backend="triton")
    shapes = ((192, 128), (64, 128), (64,), (192, 64))
    tensors = [torch.randn(s, device="cuda").to(torch.bfloat16).requires_grad_() for s in shapes]
    for _ in range(2):  # the second launch goes past Triton's look-up
        found = [gradients(apply(*tensors), *tensors) for apply in (fast.apply, BiasResidual.apply)]
        yield from apart("described", *found, rtol=2e-2, atol=2e-2)
    if not any(kernel.has_descriptors for kernel in fusegrad.explain(fast, *tensors).kernel_records):
        yield "no kernel has descriptors"
    if asked:
        yield f"the caller's allocator was asked for {asked}"


@scene
def twice_and_thrice() -> Iterator[str]:
    written = gated()
    fast, (x, w) = fusegrad.compile(written, backend="triton"), pair(dtype=torch.float64)

    def third(apply: Any) -> list[Tensor]:
        (g,) = torch.autograd.grad(apply(x, w).square().sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g.square().sum(), x, create_graph=True)
        return [g, h, *torch.autograd.grad(h.square().sum(), x)]

    yield from apart("third derivative", third(fast.apply), third(written.apply), 1e-9, 1e-9)


@scene
def transformed() -> Iterator[str]:
    fast, (x, w) = fusegrad.compile(Norm, backend="triton"), [t.detach() for t in pair(dtype=torch.float64)]

    def ours(x: Tensor, w: Tensor) -> Tensor:
        return fast.apply(x, w)[0].square().sum()

    def theirs(x: Tensor, w: Tensor) -> Tensor:
        return norm_by_hand(x, w).square().sum()

    func, many = torch.func, torch.stack([x, 2 * x])
    yield from apart("grad", *[func.grad(f, (0, 1))(x, w) for f in (ours, theirs)], 1e-9, 1e-9)
    yield from apart("vmap grad", *[[func.vmap(func.grad(f), (0, None))(many, w)] for f in (ours, theirs)], 1e-9, 1e-9)
    yield from apart("jvp", *[func.jvp(f, (x, w), (x / 10, w / 5)) for f in (ours, theirs)], 1e-9, 1e-9)


@scene
def forward_mode(derive: str) -> Iterator[str]:
    written = gated()
    fast = fusegrad.compile(written, backend="triton", derive_jvp=derive)
    x, w = (t.detach() for t in pair(dtype=torch.float64))
    with forward_ad.dual_level():
        given = forward_ad.make_dual(x, x * 0.3), forward_ad.make_dual(w, w * 0.7)
        plain = given[0] * torch.sigmoid(given[0]) * given[1]
        both = [forward_ad.unpack_dual(y).tangent for y in (fast.apply(*given), plain)]
    yield from apart("tangent", both[:1], both[1:], 1e-9, 1e-9)


@scene
def asking_data() -> Iterator[str]:
    fast, (x, _) = fusegrad.compile(LargestFirst, backend="triton"), pair()
    gradients(fast.apply(x), x)  # as written: the answers of a first call select the segments
    yield from apart("with a question", gradients(fast.apply(x), x), gradients(LargestFirst.apply(x), x))


@scene
def inside_torch_compile() -> Iterator[str]:
    written = gated()
    fast, (x, w) = fusegrad.compile(written, backend="triton"), pair()
    torch._dynamo.reset()
    around = torch.compile(lambda a, b: fast.apply(a * 2, b) + 1, backend="aot_eager", fullgraph=True)
    yield from apart("torch.compile", gradients(around(x, w), x, w), gradients(written.apply(x * 2, w) + 1, x, w))


@scene
def laid_out(layout: str, rows: int = 16) -> Iterator[str]:
    """Transposed, strided, unaligned, empty: the launcher packs other words."""
    written = gated()
    fast, (x, w) = fusegrad.compile(written, backend="triton"), pair(rows=rows)
    x = LAYOUTS[layout](x.detach()).requires_grad_()
    for _ in range(2):  # found by Triton's look-up, then bound
        yield from apart(layout, gradients(fast.apply(x, w), x, w), gradients(written.apply(x, w), x, w))


def _unaligned(x: Tensor) -> Tensor:
    room = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
    room[1:].view(x.shape).copy_(x)
    return room[1:].view(x.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "step": lambda x: torch.stack([x, x], -1)[..., 0],
    "unaligned": _unaligned,
    "expanded": lambda x: x[:1].expand(x.shape),
}


# ------------------------------------------------------------------ settings
@scene
def settings_in_backward() -> Iterator[str]:
    """What `config.patch` says around forward and backward holds in backward, which runs in another thread."""
    from fusegrad.ir.switches import is_on
    from fusegrad.runtime.autograd import backward as room

    seen: list[Any] = []
    run = room.run_backward

    def asks(*args: Any, **named: Any) -> Any:
        now = settings()
        seen.append((now.check, now.debug, now.tune, is_on("strips"), threading.get_ident()))
        return run(*args, **named)

    room.run_backward = asks
    try:
        fast, (x, w) = fusegrad.compile(gated(), backend="triton"), pair()
        with fusegrad.config.patch(check=False, debug=True, disable=("strips", "patience")):
            gradients(fast.apply(x, w), x, w)
        gradients(fast.apply(x, w), x, w)
    finally:
        room.run_backward = run
    if [s[:4] for s in seen] != [(False, True, False, False), (True, False, False, True)]:
        yield f"settings in backward: {seen}"
    if any(s[4] == threading.get_ident() for s in seen):
        yield "backward ran in the calling thread: nothing was tested"


@scene
def tuned_in_backward() -> Iterator[str]:
    """tune=True around both times configurations of backward's kernels as well."""
    written, both = rms_norm()
    fast = fusegrad.compile(written, backend="triton")
    with fusegrad.config.patch(tune=True):
        ours = both(fast.apply)
    yield from apart("tuned", ours, both(written.apply), 1e-2, 1e-2)
    for direction in ("forward", "backward"):
        if sum(direction in launch.kernel for launch in launches) < 4:
            yield f"{direction} was not timed"


# ------------------------------------------------------------------ streams, captured launches, devices
@scene
def streams() -> Iterator[str]:
    """Launches go to the current stream, and each stream has counters of its own."""
    written, both = rms_norm()
    fast, expected = fusegrad.compile(written, backend="triton"), both(written.apply)
    yield from apart("default stream", both(fast.apply), expected)
    first, second = pretending.Stream(), pretending.Stream()
    counters = {}
    for each in (first, second, first):
        begun = len(launches)
        with torch.cuda.stream(each):
            yield from apart("stream", both(fast.apply), expected)
        wrong = [launch for launch in launches[begun:] if launch.stream != each.cuda_stream]
        yield from (f"{launch.kernel} on stream {launch.stream:#x}" for launch in wrong)
        now = launches[-1].scratch[-1]
        if counters.setdefault(each.cuda_stream, now) != now:
            yield "the counters of a stream changed"
    if len(set(counters.values())) != 2:
        yield "two streams share counters"


@scene
def captured_launches() -> Iterator[str]:
    """Each captured launch has counters of its own."""
    written, both = rms_norm()
    fast, expected = fusegrad.compile(written, backend="triton"), both(written.apply)
    both(fast.apply)
    begun = len(launches)
    with pretending.captured():
        for _ in range(3):
            yield from apart("captured", both(fast.apply), expected)
    counters = [launch.scratch[-1] for launch in launches[begun:] if launch.scratch]
    if len(set(counters)) != 3:
        yield f"three captured launches have counters at {counters}"


@scene
def two_devices() -> Iterator[str]:
    """Tensors decide on the device, whichever is current; each has its binaries."""
    binaries: dict[int, set[int]] = {0: set(), 1: set()}
    written, _ = rms_norm()
    fast = fusegrad.compile(written, backend="triton")
    for current, used in ((0, 0), (0, 1), (1, 1), (1, 0), (0, 1)):
        begun = len(launches)
        with torch.cuda.device(current):
            x, w = pair(f"cuda:{used}", torch.bfloat16, 64, 256)
            found = [gradients(apply(x, w, 1e-6), x, w) for apply in (fast.apply, written.apply)]
            if torch.cuda.current_device() != current:
                yield f"cuda:{torch.cuda.current_device()} is current afterwards, not cuda:{current}"
        yield from apart(f"cuda:{used}, current {current}", *found)
        yield from (f"launched on cuda:{k.device}, not cuda:{used}" for k in launches[begun:] if k.device != used)
        binaries[used] |= {k.binary for k in launches[begun:]}
        if len(launches) - begun != 2:
            yield f"{len(launches) - begun} launches"


@scene
def captured_on_the_other_device() -> Iterator[str]:
    """A launch is captured where it runs, whichever device is current."""
    written, _ = rms_norm()
    fast = fusegrad.compile(written, backend="triton")
    x, w = pair("cuda:1", torch.bfloat16, 64, 256)
    gradients(fast.apply(x, w, 1e-6), x, w)
    counters = []
    for captures in (1, 0):
        begun = len(launches)
        with torch.cuda.device(0), pretending.captured(captures):
            for _ in range(2):
                gradients(fast.apply(x, w, 1e-6), x, w)
        counters.append({launch.scratch[-1] for launch in launches[begun:] if launch.scratch})
    if [len(each) for each in counters] != [2, 1]:
        yield f"counters of launches on cuda:1, captured and while cuda:0 captures: {counters}"


@scene
def beyond_two_gigabytes() -> Iterator[str]:
    """For AMD's GPUs Triton compiles apart what lies within 2 GB: each launch has the binary that fits its tensors."""
    written, (x, w) = gated(), pair(rows=64, width=256)
    fast, expected = fusegrad.compile(written, backend="triton"), gradients(written.apply(x, w), x, w)
    room = torch.empty(2**31 // x.element_size() + x.numel(), device="cuda")  # of which the end alone is touched
    far = room[-x.numel() :].view(x.shape).copy_(x.detach()).requires_grad_()
    binaries: list[set[int]] = []
    for _ in range(2):
        for given in (x, far):
            for _ in range(2):  # by Triton's look-up, then past it
                begun = len(launches)
                yield from apart("beyond 2 GB", gradients(fast.apply(given, w), given, w), expected)
            binaries.append({launch.binary for launch in launches[begun:]})
    if binaries[:2] != binaries[2:] or binaries[0] & binaries[1]:
        yield f"binaries for small and large tensors, in turn: {binaries}"


# ------------------------------------------------------------------ commands
@scene
def profiled() -> Iterator[str]:
    x, w = pair(dtype=torch.bfloat16, rows=4, width=64)
    fast = fusegrad.compile(functions.RMSNorm, backend="triton")
    with small_flushes():
        text = str(fusegrad.profile(fast, x.detach(), w.detach(), 1e-6, seconds=0.005))
    if "RMSNorm" not in text:
        yield text


@scene
def benchmark(match: str) -> Iterator[str]:
    """`python -m fusegrad.benchmarks.gpu --quick`; its own comparison judges."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--quick", "--match", match, "--rounds", "1", "--peers", "fusegrad,eager", "--out", folder]
        code = gpu.main(options)
        (file,) = Path(folder).glob("*.json")
        rows = json.loads(file.read_text())["rows"]
    if code or not rows:
        yield f"exit code {code}, {len(rows)} cases"
    yield from (f"{row['case']}: {row['errors']}" for row in rows if row["errors"])
