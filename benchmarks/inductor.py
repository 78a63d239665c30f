"""What torch.compile makes of the same forward and backward for an H100, without one: launches, and bytes moved.

Inductor lowers both graphs for fake CUDA tensors and emits Triton code that nobody runs. The bytes are its own count
(`GraphLowering.count_bytes`): every buffer once per kernel that touches it, though a kernel may loop over a row twice.
Runs in a process of its own, since it puts a pretended GPU behind torch.cuda. As a program it counts graphs that
`fusegrad.profile` gives it: their text on stdin, the counts on the last line of stdout, both as JSON.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo.device_interface  # before there is a GPU: it imports what only a build for one has
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from fusegrad.runtime.execution.aten import random
from fusegrad.runtime.values.tensor_specs import is_spec, parse_spec

from .inputs import as_list
from .suite import Case

H100 = {
    "name": "NVIDIA H100", "major": 9, "minor": 0, "total_memory": 80 << 30, "multi_processor_count": 132,
    "regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024,
    "warp_size": 32, "shared_memory_per_block": 49152, "shared_memory_per_block_optin": 232448,
    "shared_memory_per_multiprocessor": 233472, "L2_cache_size": 50 << 20, "gcnArchName": "",
}  # fmt: skip
OPTIONS = {
    "compile_threads": 1, "fx_graph_cache": False, "force_disable_caches": True, "benchmark_kernel": False,
    "joint_graph_constant_folding": False,  # it would evaluate constants on the device
}  # fmt: skip
LAUNCH = re.compile(r"^\s+(?:\w+ = )?(?:\w+\.run\(|extern_kernels\.\w+\(|torch\.ops\.\w+\.\w+)", re.M)


# ------------------------------------------------------------------ a GPU that is not there
def pretend_gpu() -> None:
    """torch.cuda, Inductor and Triton see an H100 on which nothing can run. For the rest of the process."""
    props = SimpleNamespace(**H100)
    _replace(torch.cuda, props)
    _replace(torch._dynamo.device_interface.CudaInterface, props, wrap=staticmethod)
    _replace(torch._dynamo.device_interface.CudaInterface.Worker, props, wrap=staticmethod)
    torch._C._cuda_getCurrentRawStream = lambda index=0: 0  # type: ignore[attr-defined]
    torch._C._get_sm_carveout_experimental = lambda: None  # type: ignore[attr-defined]
    torch.version.cuda = "12.8"
    _pretend_triton()
    _forget_patterns()


def _replace(namespace: Any, props: Any, wrap: Callable[[Any], Any] = lambda function: function) -> None:
    answers = {
        "is_available": True, "_is_compiled": True, "device_count": 1, "current_device": 0, "_lazy_init": None,
        "is_initialized": True, "get_device_properties": props, "get_device_capability": (9, 0),
        "get_device_name": props.name, "synchronize": None, "set_device": None, "exchange_device": 0,
        "maybe_exchange_device": 0, "_exchange_device": 0, "_maybe_exchange_device": 0,
        "get_raw_stream": 0, "get_compute_capability": 90,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(namespace, name, wrap(lambda *args, answer=answer, **kwargs: answer))


def _pretend_triton() -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0, is_active=lambda: True,
        get_active_torch_device=lambda: torch.device("cuda", 0), get_current_stream=lambda device=0: 0,
        get_benchmarker=lambda: None,
    )  # fmt: skip
    triton.runtime.driver.set_active(driver)


def _forget_patterns() -> None:
    """Libraries of patterns (attention, padded products) are made by running operations on the device."""
    from torch._inductor.fx_passes import fuse_attention, misc_patterns, pad_mm

    for module in (fuse_attention, misc_patterns, pad_mm):
        for name in ("_sfdp_init", "_misc_patterns_init", "_pad_mm_init"):
            if hasattr(module, name):
                setattr(module, name, lambda *args, **kwargs: None)


class Indexing(TorchFunctionMode):
    """x[:, None, 2:] by operations: indexing itself asks for the device."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__ and not any(isinstance(i, Tensor) for i in as_list(args[1])):
            return _indexed(*args)
        return func(*args, **(kwargs or {}))


def _indexed(tensor: Tensor, index: Any) -> Tensor:
    axis = 0
    for at in as_list(index):
        if at is None:
            tensor = tensor.unsqueeze(axis)
        elif isinstance(at, int):
            tensor, axis = tensor.select(axis, at), axis - 1
        else:
            start, stop, step = at.indices(tensor.shape[axis])
            tensor = torch.ops.aten.slice(tensor, axis, start, stop, step)
        axis += 1
    return tensor


# ------------------------------------------------------------------ the two graphs
class Context:
    """What a forward leaves for backward."""

    saved_tensors: tuple[Any, ...] = ()
    marked: tuple[Any, ...] = ()
    needs_input_grad = (True,) * 16

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.marked = tensors


def inductor(case: Case) -> dict[str, Any]:
    """Launches, bytes and minimal bytes of forward and backward, or the reason why there are none."""
    try:
        with mock.patch.object(random, "_op", random._op._init_fn):  # its operations, not a call
            directions = [_counted(*graph) for graph in graphs(case)]
    except Exception as error:  # whatever Inductor or the pretended GPU stumbles over is reported as that
        return {"case": case.name, "error": f"{type(error).__name__}: {error}"[:300]}
    return {"case": case.name, **{k: [d[k] for d in directions] for k in directions[0]}}


Graph = tuple[Callable[..., Any], list[Tensor], FakeTensorMode]


def graphs(case: Case) -> Iterator[Graph]:
    """forward with what it saves among its results; backward of what was saved and the gradients."""
    mode, ctx = FakeTensorMode(allow_non_fake_inputs=True), Context()
    with mode, Indexing():
        args = [_on_gpu(*parse_spec(a)) if is_spec(a) else a for a in case.args]
        outputs = as_list(case.function.forward(ctx, *args))  # type: ignore[attr-defined]
        wanted = [not any(o is m for m in ctx.marked) for o in outputs]
        gradients = [_on_gpu(o.dtype, tuple(o.shape)) for o, w in zip(outputs, wanted, strict=True) if w]
    yield partial(_forward, case, args), [a for a in args if isinstance(a, Tensor)], mode
    saved = len(ctx.saved_tensors)
    yield partial(_backward, case, args, ctx, saved, wanted), [*ctx.saved_tensors, *gradients], mode


def _forward(case: Case, args: Sequence[Any], *given: Tensor) -> list[Tensor]:
    ctx, rest = Context(), iter(given)
    results = case.function.forward(ctx, *(next(rest) if isinstance(a, Tensor) else a for a in args))  # type: ignore[attr-defined]
    made = (t for t in (*as_list(results), *ctx.saved_tensors) if not any(t is g for g in given))
    return list({id(t): t for t in made}.values())


def _backward(
    case: Case, args: Sequence[Any], ctx: Context, saved: int, wanted: Sequence[bool], *given: Tensor
) -> list[Tensor]:
    ctx.saved_tensors, gradients = given[:saved], iter(given[saved:])
    found = case.function.backward(ctx, *(next(gradients) if w else None for w in wanted))  # type: ignore[attr-defined]
    pairs = zip(as_list(found), args, strict=True)
    return [g.sum_to_size(a.shape).to(a.dtype) for g, a in pairs if isinstance(g, Tensor)]  # as autograd does


def _on_gpu(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


# ------------------------------------------------------------------ Inductor
def _counted(function: Callable[..., Any], args: Sequence[Tensor], mode: FakeTensorMode) -> dict[str, int]:
    text, moved, least = lowered(function, args, mode)
    return {"launches": _launches(text), "bytes": moved, "minimal": least}


def lowered(function: Callable[..., Any], args: Sequence[Tensor], mode: FakeTensorMode) -> tuple[str, int, int]:
    """The passes and the lowering of `compile_fx`: the text, the bytes that it moves, and the least."""
    import torch._inductor.config as config
    from torch._inductor.compile_fx import fake_tensor_prop
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    with config.patch(OPTIONS), mode:
        with Indexing():
            graph = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*args)
        joint_graph_passes(graph)
        view_to_reshape(graph)
        with V.set_fake_mode(mode):
            post_grad_passes(graph, False)
            fake_tensor_prop(graph, list(args), force_allow_non_fake_inputs=True)
        least = _minimal(graph)
        lowering = GraphLowering(graph, example_inputs=list(args), shape_env=None, is_inference=True)
        with V.set_graph_handler(lowering), V.set_fake_mode(mode), DebugContext():
            lowering.run(*args)
            text = lowering.codegen()[0]
            moved = lowering.count_bytes()[0]
    return str(getattr(text, "value", text)), int(moved), least


def given(text: str, arguments: Sequence[Any]) -> dict[str, int]:
    """The counts of a graph of ATen operations, which is given as torch.fx writes it.

    Arguments: an integer, or [dtype, shape, strides] of a tensor.
    """
    mode, forward = FakeTensorMode(allow_non_fake_inputs=True), _function(text)
    with mode:
        values = [a if isinstance(a, int) else _strided(*a) for a in arguments]

    def function(*now: Tensor) -> list[Tensor]:
        rest = iter(now)
        results = forward(None, *(next(rest) if isinstance(v, Tensor) else v for v in values))
        made = (t for t in as_list(results) if isinstance(t, Tensor) and not any(t is n for n in now))
        return list({id(t): t for t in made}.values())

    return _counted(function, [v for v in values if isinstance(v, Tensor)], mode)


def _function(text: str) -> Callable[..., Any]:
    """What it makes on the CPU for which it was traced is made on the GPU."""
    names = {"torch": torch, "inf": math.inf, "nan": math.nan, "device": lambda **_: torch.device("cuda")}
    exec(text, names)
    return names["forward"]  # type: ignore[return-value]


def _strided(dtype: str, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device="cuda")


def _minimal(graph: torch.fx.GraphModule) -> int:
    """Every input that is used and every result once."""
    read = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder") if n.users]
    made = {n: n.meta["val"] for n in graph.graph.output_node().all_input_nodes if n.op != "placeholder"}
    return sum(t.numel() * t.element_size() for t in (*read, *made.values()))


def _launches(text: str) -> int:
    """Kernels run and library calls made by the emitted `call`."""
    return len(LAUNCH.findall(text[text.index("def call(") :].partition("\nrunner")[0]))


def main() -> None:
    """{name: [text, arguments]} on stdin  ->  {name: counts} on stdout."""
    asked = json.load(sys.stdin)
    pretend_gpu()
    print(json.dumps({name: given(*graph) for name, graph in asked.items()}))


if __name__ == "__main__":
    main()
