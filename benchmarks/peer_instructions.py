"""Warp instructions that kernels of others issue for the same cases: Inductor's and Liger's, compiled for sm_90.

Inductor emits the text, and compiles each kernel in the configurations that it would choose among on the device: the
one with the fewest instructions counts. Liger's Functions run on fake tensors; what they launch is compiled instead.
Runs in a process of its own: `inductor.pretend_gpu` puts a pretended GPU behind torch.cuda.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusegrad.runtime.execution.aten import random
from fusegrad.runtime.kernels.machine_code.counts import Launch, count, parameters
from fusegrad.runtime.values.tensor_specs import is_spec, parse_spec

from . import inductor, peers
from .inputs import as_list
from .plans import DIRECTIONS
from .suite import Case

TARGET, ARCH = "cuda:90", 90
CALL = re.compile(r"^\s+(triton_\w+)\.run\((.*), stream=\w+\)", re.M)
SOURCE = re.compile(r"^(triton_\w+) = async_compile\.triton\('\w+', '''\n(.*?)'''", re.M | re.S)
PARAMETERS_OF_TRITON = (None, None)
"""Two more pointers, to memory that Triton's runtime may hand a kernel."""


def peer_instructions(case: Case) -> dict[str, Any]:
    """-> {"case", "inductor": {"forward": warp instructions of all launches, ..} or {"error"}, "liger": ..}"""
    counted = {"inductor": _safely(_inductor, case), "liger": _safely(_liger, case)}
    return {"case": case.name, "versions": versions(), **counted}


def versions() -> dict[str, str]:
    """Of what was counted."""
    found = {}
    for name in ("torch", "triton", "liger-kernel"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _safely(count_of: Callable[[Case], dict[str, Any] | None], case: Case) -> dict[str, Any] | None:
    try:
        return count_of(case)
    except Exception as error:  # whatever the peer or the pretended GPU stumbles over is reported as that
        return {"error": f"{type(error).__name__}: {error}"[:300]}


# ------------------------------------------------------------------ Inductor
def _inductor(case: Case) -> dict[str, Any]:
    with mock.patch.object(random, "_op", random._op._init_fn):
        texts = [inductor.lowered(*graph)[0] for graph in inductor.graphs(case)]
    return {d: _instructions_of_text(text) for d, text in zip(DIRECTIONS, texts, strict=True)}


def _instructions_of_text(text: str) -> float:
    return sum(_least(name, source, _numbers(arguments)) for name, source, arguments in launches_of(text))


def launches_of(text: str) -> Iterator[tuple[str, str, str]]:
    """Name, source and arguments of each launch in Inductor's text, in order."""
    sources = dict(SOURCE.findall(text))
    calls = CALL.findall(text[text.index("def call(") :].partition("\nrunner")[0])
    return ((name, sources[name], arguments) for name, arguments in calls)


def _numbers(arguments: str) -> list[int | None]:
    """Arguments of a call as they are written: the numbers among them."""
    call = ast.parse(f"f({arguments})", mode="eval").body
    assert isinstance(call, ast.Call)
    return [a.value if isinstance(a, ast.Constant) and isinstance(a.value, int) else None for a in call.args]


def _least(name: str, source: str, numbers: Sequence[int | None]) -> float:
    """Of one launch, in the best of the kernel's configurations."""
    kernel = compiled_by_inductor(name, source)
    return min(_instructions(kernel, found, numbers) for found in kernel.compile_results)


def compiled_by_inductor(name: str, source: str) -> Any:
    """A kernel of Inductor's out of its text, with a result for each of its configurations."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime.triton_heuristics import StaticTritonCompileResult

    static = mock.patch.object(StaticTritonCompileResult, "can_statically_launch", lambda *args, **meta: None)
    with mock.patch("torch._inductor.runtime.triton_helpers.set_driver_to_gpu"), static:  # it would ask for libcuda
        kernel = getattr(PyCodeCache.load(source), name)
        kernel._precompile_worker()
    return kernel


def _instructions(kernel: Any, found: Any, numbers: Sequence[int | None]) -> float:
    from torch._inductor.runtime.triton_heuristics import GridExpr

    kinds = kernel.triton_meta["signature"]
    sizes = {n: v for n, v in zip(kinds, numbers, strict=False) if v is not None}
    grid = GridExpr.from_meta(kernel.inductor_meta, found.config).eval_slow({**sizes, **found.config.kwargs})
    passed = [v for n, v in zip(kinds, numbers, strict=False) if kinds[n] != "constexpr"]
    launch = Launch(TARGET, tuple(map(int, grid)), found.config.num_warps, parameters([*passed, *PARAMETERS_OF_TRITON]))
    return count(found.kernel.asm["cubin"], launch, kernel.inductor_meta["kernel_name"]).instructions


# ------------------------------------------------------------------ Liger
def _liger(case: Case) -> dict[str, Any] | None:
    """None for a Function that it does not have, or where it is not installed."""
    if case.function not in peers.LIGER or not peers.has_liger():
        return None
    ran: list[tuple[Any, Any, Any]] = []
    with mock.patch.object(peers, "_liger", lambda module, name: _forward_of(module, name, ran)):
        with FakeTensorMode(allow_non_fake_inputs=True), inductor.Indexing(), torch.no_grad(), _answers(case):
            args = [_on_gpu(a) for a in case.args]
            with recorded() as forward:
                peers.LIGER[case.function](*args)
            cls, ctx, outputs = ran[-1]
            gradients = [torch.empty_like(o) if isinstance(o, torch.Tensor) else None for o in as_list(outputs)]
            with recorded() as backward:
                cls.backward(ctx, *gradients)
    return {d: sum(map(_compiled, launches)) for d, launches in zip(DIRECTIONS, (forward, backward), strict=True)}


@contextmanager
def _answers(case: Case) -> Iterator[None]:
    """Within: what Liger asks of tensors without data is answered as a usual call would answer it.

    No target is ignored, all are in range, the gradient of a loss is one; of several configurations the first is run.
    """
    from triton.runtime.autotuner import Autotuner

    rows = parse_spec(case.args[0])[1][0]
    answers = (
        (torch.Tensor, "item", lambda tensor: rows),
        (torch.Tensor, "__bool__", lambda tensor: True),
        (torch, "equal", lambda a, b: True),
        (torch, "tensor", lambda value, device=None, **keywords: torch.empty((), device=device)),
        (Autotuner, "run", lambda self, *args, **words: self.fn.run(*args, **words, **self.configs[0].all_kwargs())),
    )
    with ExitStack() as stack:
        for owner, name, answer in answers:
            stack.enter_context(mock.patch.object(owner, name, answer))
        yield


def _on_gpu(value: Any) -> Any:
    if not is_spec(value):
        return value
    dtype, shape = parse_spec(value)
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=dtype.is_floating_point)


def _forward_of(module: str, name: str, ran: list[tuple[Any, Any, Any]]) -> Callable[..., Any]:
    """forward of a Function of Liger's, called as a plain function; `ran` has the class, ctx and the results then."""
    import importlib

    cls = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), f"Liger{name}Function")

    def forward(*args: Any) -> Any:
        ctx = inductor.Context()
        outputs = cls.forward(ctx, *args)
        ran.append((cls, ctx, outputs))
        return outputs

    return forward


LiveLaunch = tuple[Any, Sequence[Any], Any, Mapping[str, Any]]


@contextmanager
def recorded() -> Iterator[list[LiveLaunch]]:
    """Within: launches of Triton's functions are listed instead of run."""
    from triton.runtime.jit import JITFunction

    launches: list[LiveLaunch] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append((kernel, args, grid, options))

    with mock.patch.object(JITFunction, "run", run):
        yield launches


DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int64: "i64", torch.float16: "fp16"}
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


def _compiled(launch: LiveLaunch) -> float:
    """The instructions of a launch, whose function is compiled for what it is given."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, args, grid, keywords = launch
    named = {p.name: p.default for p in kernel.params if p.has_default}
    named |= dict(zip(kernel.arg_names, args, strict=False))
    named |= {k: v for k, v in keywords.items() if k in kernel.arg_names}
    kinds = {p.name: _kind(named[p.name], p.is_constexpr) for p in kernel.params}
    places = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    constants = {places[n]: named[n] for n, kind in kinds.items() if kind == "constexpr"}
    whole = {places[n]: [["tt.divisibility", 16]] for n, kind in kinds.items() if _is_whole(named[n], kind)}
    options = {k: v for k, v in keywords.items() if k in OPTIONS}
    source, target = ASTSource(kernel, kinds, constants, whole), GPUTarget("cuda", ARCH, 32)
    found = triton.compile(source, target=target, options=options)
    programs = (*map(int, grid(named) if callable(grid) else grid), 1, 1)[:3]
    numbers = [_number(named[n]) for n in kernel.arg_names if kinds[n] != "constexpr"]
    at = Launch(TARGET, programs, found.metadata.num_warps, parameters([*numbers, *PARAMETERS_OF_TRITON]))
    return count(found.asm["cubin"], at, found.metadata.name).instructions


def _kind(value: Any, is_constant: bool) -> str:
    if is_constant or value is None or value is True or value is False or (isinstance(value, int) and value == 1):
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return "*" + DTYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def _is_whole(value: Any, kind: str) -> bool:
    return kind != "constexpr" and (kind.startswith("*") or (isinstance(value, int) and value % 16 == 0))


def _number(value: Any) -> int | None:
    return None if isinstance(value, torch.Tensor) else 0 if isinstance(value, float) else int(value)
