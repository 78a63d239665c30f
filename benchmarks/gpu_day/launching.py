"""What only a GPU does with launches: threads of autograd's, streams side by side, graphs, torch.compile around it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

import fusegrad

from .. import functions
from .machine import captured

SIZES = {"cuda": (4096, 1024), "pretended": (64, 256)}
Call = Callable[[Any], list[Tensor]]


def launching(unit: str, kind: str) -> dict[str, Any]:
    """One of the uses below."""
    return {"faults": list(USES[unit](kind))}


# ------------------------------------------------------------------ what is launched
def counted_norm(kind: str) -> tuple[Any, Any, Call]:
    """(class of its own, compiled, forward and backward by one of them on the same memory): it has arrival counters."""
    written: Any = type("CountedNorm", (functions.RMSNorm,), {"__module__": __name__})
    rows, width = SIZES[kind]
    numbers = torch.Generator().manual_seed(5)
    x, w = (torch.randn(s, generator=numbers).to("cuda", torch.bfloat16) for s in ((rows, width), (width,)))
    x.requires_grad_(), w.requires_grad_()
    weights = torch.randn(rows, width, generator=numbers).to("cuda", torch.bfloat16)

    def both(cls: Any) -> list[Tensor]:
        y = cls.apply(x, w, 1e-6)
        return [y, *torch.autograd.grad(y, (x, w), weights)]

    both.leaves = x, w  # type: ignore[attr-defined]
    return written, fusegrad.compile(written, backend="triton", fullgraph=True), both


def apart(what: str, ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-2) -> Iterator[str]:
    """Of every result: how far it is from what it should be, over the largest of them."""
    for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        error, scale = (a.double() - b.double()).abs().max().item(), b.double().abs().max().item()
        if not error <= tolerance * (1 + scale):
            yield f"{what}, result {at}: off by {error:.3g} of {scale:.3g}"


def gated(scale: float) -> Any:
    """A class of its own each time."""

    class Gated(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x * torch.sigmoid(x * scale) * w

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            x, w = ctx.saved_tensors
            s = torch.sigmoid(x * scale)
            return g * w * s * (1 + scale * x * (1 - s)), (g * x * s).sum(0)

    return Gated


# ------------------------------------------------------------------ uses
def threads(kind: str) -> Iterator[str]:
    """First calls, backwards, second derivatives and forward mode of many classes at once."""
    wrong: list[str] = []
    one_level = threading.Lock()  # of forward mode there is one in a process

    def work(number: int) -> None:
        try:
            wrong.extend(_one_of_many(number, one_level))
        except Exception as error:
            wrong.append(f"thread {number}: {type(error).__name__}: {error}")

    each = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(32 if kind == "cuda" else 6)]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join()
    yield from wrong


def _one_of_many(number: int, one_level: Any) -> Iterator[str]:
    written = gated(1.0 + number)
    fast: Any = fusegrad.compile(written, backend="triton", derive_jvp="forward" if number % 4 else "backward")
    numbers = torch.Generator().manual_seed(number)
    x, w = (torch.randn(s, generator=numbers).cuda().requires_grad_() for s in ((16, 32), (32,)))
    if number % 2:
        with one_level, forward_ad.dual_level():
            fast.apply(forward_ad.make_dual(x.detach(), x.detach()), forward_ad.make_dual(w.detach(), w.detach()))
    found: list[list[Tensor]] = []
    for cls in (fast, written):
        first = torch.autograd.grad(cls.apply(x, w).square().sum(), (x, w), create_graph=number % 3 == 0)
        found.append(list(first if number % 3 else torch.autograd.grad(sum(g.sum() for g in first), (x, w))))  # type: ignore[arg-type]
    yield from apart(f"thread {number}", *found, tolerance=1e-3)


def streams(kind: str) -> Iterator[str]:
    """The same kernels in two streams at once: each has counters of its own."""
    written, fast, both = counted_norm(kind)
    expected = both(written)
    both(fast)
    torch.cuda.synchronize()
    lanes: list[Any] = [torch.cuda.Stream(), torch.cuda.Stream()]
    found = []
    for _ in range(20 if kind == "cuda" else 2):
        for lane in lanes:
            with torch.cuda.stream(lane):
                found.append(both(fast))
    torch.cuda.synchronize()
    for at, each in enumerate(found):
        yield from apart(f"call {at}", each, expected)


def graph(kind: str) -> Iterator[str]:
    """Forward and backward captured once, replayed over other inputs."""
    written, fast, both = counted_norm(kind)
    replay, results = captured(lambda: both(fast))
    for seed in range(3):
        yield from _replayed(f"replay {seed}", seed, replay, results, written, both)


def _replayed(
    what: str, seed: int, replay: Callable[[], Any], results: list[Tensor], written: Any, both: Call
) -> Iterator[str]:
    x, _ = both.leaves  # type: ignore[attr-defined]
    numbers = torch.Generator().manual_seed(seed)
    x.data.copy_(torch.randn(x.shape, generator=numbers).to(x.device, x.dtype))
    replay()
    torch.cuda.synchronize()
    yield from apart(what, results, both(written))


def outlived(kind: str) -> Iterator[str]:
    """A graph that is replayed after its class is gone, and its memory, if it was freed, is somebody else's."""
    written, fast, both = counted_norm(kind)
    state = [fast]
    replay, results = captured(lambda: both(state[0]))
    results = [each.detach() for each in results]  # a gradient function would keep the class
    state.clear()
    del fast
    gc.collect()
    torch.cuda.empty_cache()
    foreign = [torch.full((n,), 7, dtype=torch.int32, device="cuda") for n in (1 << 8, 1 << 10, 1 << 14, 1 << 18) * 16]
    for seed in range(3):
        yield from _replayed(f"replay {seed} after the class", seed, replay, results, written, both)
    if any((t != 7).any().item() for t in foreign):
        yield "a replay wrote to memory that is not its own"


def reduce_overhead(kind: str) -> Iterator[str]:
    """torch.compile(mode="reduce-overhead") around it: CUDA-graph trees, pretended ones without Inductor."""
    written, fast, both = counted_norm(kind)
    given: dict[str, Any] = {"mode": "reduce-overhead"} if kind == "cuda" else {"backend": "cudagraphs"}
    torch._dynamo.reset()

    class Around:
        apply = staticmethod(torch.compile(lambda x, w, eps: fast.apply(x * 2, w, eps) + 1, fullgraph=True, **given))

    class Eager:
        apply = staticmethod(lambda x, w, eps: written.apply(x * 2, w, eps) + 1)

    expected = both(Eager)
    for turn in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        yield from apart(f"turn {turn}", [t.clone() for t in both(Around)], expected)


USES: dict[str, Callable[[str], Iterator[str]]] = {
    "threads": threads, "streams": streams, "graph": graph, "outlived graph": outlived,
    "reduce-overhead": reduce_overhead,
}  # fmt: skip
