"""CUDA graphs that are recorded and replayed: by hand, and by the trees of torch.compile."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import graphs
import torch
import torch._dynamo
from launches import launches
from scenes import scene
from scenes_of_calls import apart, rms_norm
from torch import Tensor
from written import gradients, pair

import fusegrad
from fusegrad.benchmarks.loop_functions import GatedRecurrence
from fusegrad.runtime.kernels.triton_module import jit_function


@scene
def replayed_without_its_class() -> Iterator[str]:
    """A graph of forward and backward answers for what its inputs are now, also after its class and its kernels."""
    written, (x, w) = rms_norm()[0], pair(dtype=torch.bfloat16, rows=64, width=256)
    graph, found = _recorded(written, x, w)
    for turn in range(4):
        with torch.no_grad():
            x.mul_(-1.5)
        begun = len(launches)
        graph.replay()
        yield from apart(f"replay {turn}", found, gradients(written.apply(x * 2, w, 1e-6), x, w), 1e-2, 1e-3)
        if len(launches) - begun != 2:
            yield f"{len(launches) - begun} launches in a replay"
        _compile_anew()


def _compile_anew() -> None:
    """Another class with the same kernels, in a process that has met a thousand others: none of the first's is left."""
    gc.collect()
    jit_function.cache_clear()
    written, both = rms_norm()
    both(fusegrad.compile(written, backend="triton").apply)
    gc.collect()


def _recorded(written: Any, x: Tensor, w: Tensor) -> tuple[Any, list[Tensor]]:
    fast, graph = fusegrad.compile(written, backend="triton"), torch.cuda.CUDAGraph()

    def both() -> list[Tensor]:
        return gradients(fast.apply(x * 2, w, 1e-6), x, w)

    both()
    with torch.cuda.graph(graph):
        found = both()
    return graph, [each.detach() for each in found]  # a gradient function would keep the class


@scene
def loop_replayed() -> Iterator[str]:
    """A graph for each of two lengths of one loop, captured once; both answer for what their inputs are now."""
    written = GatedRecurrence
    fast, graphs_of = fusegrad.compile(written, backend="triton"), list[tuple[Any, ...]]()
    for steps in (24, 40):
        a, x = (t.requires_grad_() for t in (torch.rand(steps, 8).cuda(), torch.randn(steps, 8).cuda()))
        graph = torch.cuda.CUDAGraph()
        gradients(fast.apply(a, x), a, x)  # the first call of a length, outside of a graph
        with torch.cuda.graph(graph):
            found = gradients(fast.apply(a, x), a, x)
        graphs_of.append((graph, a, x, found))
    for graph, a, x, found in (*graphs_of, *reversed(graphs_of)):
        with torch.no_grad():
            x.mul_(-1.5)
        graph.replay()
        yield from apart(f"{len(x)} steps", found, gradients(written.apply(a, x), a, x), 1e-4, 1e-5)
    if (count := sum(map(len, fast._fusegrad.table.by_facts.values()))) != 1:
        yield f"{count} captures of forward"


@scene
def graph_trees(how: str) -> Iterator[str]:
    """torch.compile with CUDA-graph trees: a call as it is, one that is recorded, then replays with other numbers.

    The trees themselves check that nothing but their outputs stays in their pool.
    """
    written = rms_norm()[0]
    fast, (x, w) = fusegrad.compile(written, backend="triton"), pair(dtype=torch.bfloat16, rows=64, width=256)
    m = pair(dtype=torch.bfloat16, rows=256, width=256)[0].detach() / 16
    torch._dynamo.reset()
    named = {"backend": how} if how == "cudagraphs" else {"mode": how}
    around: Any = torch.compile(lambda a, b: fast.apply(a @ m, b, 1e-6) @ m, fullgraph=True, **named)  # type: ignore[call-overload]
    replays = graphs.CUDAGraph.replayed
    for turn in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        given = (x.detach() * (turn + 1)).requires_grad_()
        ours = gradients(around(given, w), given, w)
        yield from apart(f"step {turn}", ours, gradients(written.apply(given @ m, w, 1e-6) @ m, given, w), 2e-2, 2e-2)
        del ours
    if graphs.CUDAGraph.replayed - replays != 8:
        yield f"{graphs.CUDAGraph.replayed - replays} replays of forward and backward"
