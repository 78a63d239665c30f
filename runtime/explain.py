"""`fusegrad.explain`: what a compiled Function becomes at given shapes, without running it and without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import Function

from ..codegen import TARGETS, Kernel, Kernels, Target
from ..ir import Graph, Place, Program
from ..ir.cost import minimal_bytes
from ..ir import Graph, Value
from ..ir.errors import FusegradError, LoweringError, SpecError, Unfusible
from ..ir.prims import PRIMS
from ..ir.passes.fuse import Extern, Group, Step
from ..tracer.capture import CaptureError, Trace
from ..tracer.dtypes import TO_TORCH
from ..tracer.function import backward_method, uses_setup_context
from .compile import graph_of, group_names, kernels_of, steps_of, text_of
from .function import Compiler, Record
from .guards import is_plain
from .plan import Binder, has_outer_product, number
from .specialization import Specialization

Tensor = torch.Tensor
DEFAULT_TARGET = "cuda:90"


class UnknownTargetError(FusegradError, ValueError):
    """A target that is neither a GPU known by name nor "cpu"."""

    message = 'there is no target {target!r}\n  fix:  use "cpu" or one of {known}'


@dataclass(frozen=True)
class KernelReport:
    """One launch: a generated kernel, or the call of a library op (`source` is then empty)."""

    name: str
    direction: str
    source: str
    bytes_read: int
    bytes_written: int
    kind: str = "triton"


@dataclass
class DirectionReport:
    """forward or backward: its graph, its launches, and the least that would have to move."""

    graph: Graph
    steps: list[Step]
    launches: list[KernelReport]
    minimal: int
    kernels: list[Kernels] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


@dataclass
class Explanation:
    """What `explain` found. Prints as a report; `to_dict()` for programs."""

    name: str
    target: str
    methods: dict[str, Record]
    directions: dict[str, DirectionReport]
    saved_bytes: int
    residuals: tuple[Place, ...] = ()
    user_outputs: int = 0

    @property
    def kernels(self) -> list[KernelReport]:
        """Every launch, forward first."""
        return [launch for report in self.directions.values() for launch in report.launches]

    @property
    def kernel_records(self) -> list[Kernel]:
        """The generated kernels as codegen made them."""
        return [k for report in self.directions.values() for ks in report.kernels for k in ks.kernels]

    @property
    def module(self) -> str:
        """The Triton module that holds every generated kernel."""
        from .. import codegen

        return codegen.module(self.kernel_records)

    def graph(self, direction: str = "forward") -> Graph:
        """The graph after the passes."""
        return self.directions[direction].graph

    @property
    def program(self) -> Program:
        """Both graphs after the passes, and where backward's residuals come from. Only where forward is compiled."""
        backward = {(True,) * self.user_outputs: self.graph("backward")} if "backward" in self.directions else {}
        return Program(self.name, self.graph(), self.residuals, self.user_outputs, dict(backward))

    def metrics(self, target: str | None = None) -> dict[str, dict[str, Any]]:
        """Registers, spills, shared memory and access widths per kernel, cross-compiled for `target`; needs no GPU."""
        from .workers import compile_for

        where = target or self.target
        binaries = compile_for(self.kernel_records, self.module, [where])
        return {kernel: vars_of(by_target[where]) for kernel, by_target in binaries.items()}

    def to_dict(self) -> dict[str, Any]:
        """The facts as plain values."""
        return {
            "name": self.name,
            "target": self.target,
            "methods": {m: {"status": r.status, "reason": r.reason, "where": r.where} for m, r in self.methods.items()},
            "kernels": [vars(k) | {} for k in self.kernels],
            "launches": {d: len(self._launches(d)) for d in ("forward", "backward")},
            "bytes": self._bytes(),
            "saved_bytes": self.saved_bytes,
        }

    def _launches(self, direction: str) -> list[KernelReport]:
        return self.directions[direction].launches if direction in self.directions else []

    def _bytes(self) -> dict[str, int]:
        moved = {d: sum(k.bytes_read + k.bytes_written for k in self._launches(d)) for d in ("forward", "backward")}
        least = {f"minimal_{d}": self.directions[d].minimal if d in self.directions else 0 for d in moved}
        return {**moved, **least}

    def __str__(self) -> str:
        facts = self.to_dict()
        lines = [f"{self.name} on {self.target}"]
        lines += [_method_line(name, record) for name, record in self.methods.items()]
        for direction in self.directions:
            moved, least = facts["bytes"][direction], facts["bytes"][f"minimal_{direction}"]
            ratio = f", {moved / least:.2f} x the least possible" if least else ""
            lines.append(f"  {direction}: {facts['launches'][direction]} launches, {moved:,} bytes{ratio}")
            lines += [_kernel_line(k) for k in self._launches(direction)]
        lines.append(f"  saved for backward: {self.saved_bytes:,} bytes")
        return "\n".join(lines)

    __repr__ = __str__


def vars_of(binary: Any) -> dict[str, Any]:
    """A binary's figures without its machine code."""
    names = ("registers", "spills", "shared", "accesses", "error")
    return {n: getattr(binary, n, None) for n in names}


def _method_line(name: str, record: Record) -> str:
    why = f": {record.reason} ({record.where})" if record.reason else ""
    return f"  {name:<14} {record.status}{why}"


def _kernel_line(kernel: KernelReport) -> str:
    return f"    {kernel.name:<32} {kernel.kind:<7} reads {kernel.bytes_read:,}  writes {kernel.bytes_written:,}"


# ------------------------------------------------------------------ arguments
_SPEC = re.compile(r"^\s*(\w+)\s*\[([\d\s,_]*)\]\s*$")
_ALIASES = {"float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16", "int64": "i64", "int32": "i32",
            "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "b1", "float": "f32", "double": "f64", "half": "f16",
            "long": "i64", "int": "i32"}  # fmt: skip


def parse_spec(spec: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """ "bf16[8192,4096]" -> (torch.bfloat16, (8192, 4096)). Raises SpecError."""
    found = _SPEC.match(spec)
    dtype = _ALIASES.get(found.group(1), found.group(1)) if found else ""
    if found is None or dtype not in TO_TORCH:
        raise SpecError(spec=spec)
    sizes = [s for s in found.group(2).replace("_", "").split(",") if s.strip()]
    return TO_TORCH[dtype], tuple(int(s) for s in sizes)


def _stand_in(value: Any) -> Any:
    """A tensor without memory for a specification, a meta or a real tensor; other arguments as they are."""
    if isinstance(value, str) and "[" in value and value.rstrip().endswith("]"):
        dtype, shape = parse_spec(value)
        return _memoryless(shape, None, dtype, torch.device("cpu"), dtype.is_floating_point)
    if isinstance(value, Tensor):
        device = torch.device("cpu") if value.device.type == "meta" else value.device
        return _memoryless(tuple(value.shape), value.stride(), value.dtype, device, value.requires_grad)
    return value


def _memoryless(shape: Any, strides: Any, dtype: torch.dtype, device: torch.device, grad: bool) -> Tensor:
    with FakeTensorMode():
        fake = (
            torch.empty(shape, dtype=dtype, device=device)
            if strides is None
            else torch.empty_strided(shape, strides, dtype=dtype, device=device)
        )
    return fake.requires_grad_() if grad else fake


def _differentiable(args: Sequence[Any]) -> list[Any]:
    """Where no argument asks for a gradient, every floating one is taken to: backward is to be explained too."""
    if any(isinstance(a, Tensor) and a.requires_grad for a in args):
        return list(args)
    return [a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]


# ------------------------------------------------------------------ the report
def explain(target_class: Any, /, *args: Any, target: str | None = None) -> Explanation:
    """What `target_class` (compiled or not yet) becomes for these arguments.

    args: tensors (real or meta), specifications such as "bf16[8192,4096]", or any other argument of the Function.
    target: "cuda:80", "cuda:90", "cuda:100", "hip:gfx942", "cpu"; by default the GPU generation sm_90.
    Nothing runs but, for real tensors, the comparison of the first call. Raises SpecError, UnknownTargetError.
    """
    compiler = compiler_of(target_class)
    where = target or DEFAULT_TARGET
    if where != "cpu" and where not in TARGETS:
        raise UnknownTargetError(target=where, known=", ".join(TARGETS))
    stand_ins = _differentiable([_stand_in(a) for a in compiler.complete(args)])
    methods = _methods(compiler)
    directions: dict[str, DirectionReport] = {}
    specialization = _forward(compiler, stand_ins, args, methods)
    saved, user_outputs = 0, 0
    residuals: tuple[Place, ...] = ()
    if specialization is not None:
        residuals = tuple(p for p in specialization.residual_places if p is not None)
        user_outputs = len(specialization.forward.fake_outputs)
        sizes = specialization.sizes(stand_ins)
        describe: Callable[..., DirectionReport] = _on_cpu if where == "cpu" else _on_gpu
        options = () if where == "cpu" else (TARGETS[where],)
        name = compiler.cls.__name__
        directions["forward"] = describe(
            specialization.forward.trace, f"{name}_forward", "forward", sizes, specialization.skip, *options
        )
        saved = saved_bytes(specialization, sizes)
        trace = _backward(compiler, specialization, methods)
        if trace is not None:
            own = {**sizes, **_sizes_of(trace, sizes)}
            directions["backward"] = describe(trace, f"{name}_backward", "backward", own, frozenset(), *options)
    for direction, report in directions.items():
        if report.reasons:
            methods[direction] = Record("compiled", "; ".join(report.reasons), methods[direction].where)
    return Explanation(compiler.cls.__name__, where, methods, directions, saved, residuals, user_outputs)


def compiler_of(target: Any) -> Compiler:
    """The compiler behind a compiled class or function; a fresh one for a plain class."""
    known = getattr(target, "_fusegrad", None)
    if isinstance(known, Compiler):
        return known
    from .function import compile as compiled

    return compiled(target)._fusegrad  # type: ignore[no-any-return]


def _methods(compiler: Compiler) -> dict[str, Record]:
    cls = compiler.cls
    absent = Record("absent")
    has_backward = backward_method(cls) is not None
    derived = Record("derived") if has_backward else absent
    own = {n: getattr(cls, n) is not getattr(Function, n) for n in ("jvp", "vmap")}
    return {
        "forward": Record("compiled"),
        "setup_context": Record("compiled") if uses_setup_context(cls) else absent,
        "backward": Record("compiled") if has_backward else absent,
        "jvp": Record("opaque", "the user's own rule runs as it is") if own["jvp"] else derived,
        "vmap": Record("opaque", "the user's own rule runs as it is") if own["vmap"] else Record("derived"),
    } | {n: r for n, r in compiler.records.items() if r.status == "opaque"}


def _forward(
    compiler: Compiler, stand_ins: Sequence[Any], real: Sequence[Any], methods: dict[str, Record]
) -> Specialization | None:
    if methods["forward"].status == "opaque":
        return None
    try:
        compiler.require_capturable()
        specialization = Specialization(compiler.cls, stand_ins, compiler.reads_now(), compiler.dynamic)
        if all(is_plain(a) and a.device.type != "meta" for a in real if isinstance(a, Tensor)) and not any(
            map(_is_spec, real)
        ):
            compiler.compare(specialization, compiler.complete(real))
    except CaptureError as error:
        record = compiler.record_of("forward", error)
        methods["forward"] = record
        if methods["setup_context"].status == "compiled":
            methods["setup_context"] = record
        return None
    return specialization


def _is_spec(value: Any) -> bool:
    return isinstance(value, str) and _SPEC.match(value) is not None


def _backward(compiler: Compiler, specialization: Specialization, methods: dict[str, Record]) -> Trace | None:
    if methods["backward"].status != "compiled":
        return None
    try:
        return specialization.entry(specialization.predicted_kinds()).trace
    except CaptureError as error:
        methods["backward"] = compiler.record_of("backward", error)
        return None


def saved_bytes(specialization: Specialization, sizes: dict[sympy.Symbol, int]) -> int:
    """Bytes of the distinct tensors kept for backward."""
    places = dict.fromkeys(p for p in specialization.residual_places if p is not None)
    fakes = [specialization.forward.fake_at(p) for p in places]
    return sum(_bytes(f, sizes) for f in fakes if f is not None)


def _bytes(fake: Tensor, sizes: dict[sympy.Symbol, int]) -> int:
    total = fake.element_size()
    for size in fake.shape:
        total *= size if isinstance(size, int) else number(size.node.expr, sizes)
    return total


def _sizes_of(trace: Trace, sizes: dict[sympy.Symbol, int]) -> dict[sympy.Symbol, int]:
    """Symbols of the trace's inputs that forward's inputs do not bind, from their hints."""
    unbound = [s for s in Binder(trace.fakes).sources if s not in sizes]
    values = {s: f for s, f in zip(unbound, unbound, strict=True)}
    return {s: int(v) for s, v in values.items() if getattr(v, "is_number", False)}


def _on_gpu(
    trace: Trace, name: str, direction: str, sizes: dict[sympy.Symbol, int], skip: frozenset[int], target: Target
) -> DirectionReport:
    try:
        graph = graph_of(trace, name)
    except LoweringError as error:
        report = _on_cpu(trace, name, direction, sizes, skip)
        report.reasons.append(f"no kernels, the captured ATen operations run one by one: {error}")
        return report
    graph.outputs = [None if i in skip else o for i, o in enumerate(graph.outputs)]
    steps = steps_of(graph)
    launches: list[KernelReport] = []
    generated: list[Kernels] = []
    reasons: list[str] = []
    for step, kernel_name in zip(steps, group_names(name, steps), strict=True):
        if isinstance(step, Group):
            try:
                kernels = kernels_of(step, target, sizes, kernel_name)
            except Unfusible as error:
                reasons.append(str(error))
                launches += [_node_report(v, direction, sizes) for v in step.graph.order()]
                continue
            generated.append(kernels)
            launches += [_kernel_report(k, direction, sizes) for k in kernels.kernels]
        elif isinstance(step, Extern):
            launches.append(_node_report(step.value, direction, sizes))
    return DirectionReport(graph, steps, launches, number(minimal_bytes(graph), sizes), generated, reasons)


def _kernel_report(kernel: Kernel, direction: str, sizes: dict[sympy.Symbol, int]) -> KernelReport:
    read = sum(number(b, sizes) for b in kernel.reads.values())
    written = sum(number(b, sizes) for b in kernel.writes.values())
    text = text_of(Kernels((kernel,)))
    return KernelReport(kernel.name, direction, text, read, written)


def _node_report(value: Value, direction: str, sizes: dict[sympy.Symbol, int]) -> KernelReport:
    name = str(value.params.get("op") or getattr(value.params.get("target"), "__name__", value.prim))
    read = sum(number(t.nbytes, sizes) for a in value.args for t in a.avals)
    written = sum(number(t.nbytes, sizes) for t in value.avals)
    return KernelReport(name, direction, "", read, written, kind="library")


def _on_cpu(
    trace: Trace, name: str, direction: str, sizes: dict[sympy.Symbol, int], skip: frozenset[int]
) -> DirectionReport:
    """The reference backend calls the captured ATen operations one by one."""
    try:
        graph = graph_of(trace, name)
    except LoweringError:
        graph = Graph(name)
    if has_outer_product(trace) and not graph.mutations and len(graph):
        moved = [v for v in graph.order() if PRIMS[v.prim].family not in ("layout", "source", "pick")]
        launches = [_node_report(v, direction, sizes) for v in moved]
        return DirectionReport(graph, [], launches, number(minimal_bytes(graph), sizes))
    launches = []
    for node in trace.graph_module.graph.nodes:
        value = node.meta.get("val")
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or not isinstance(value, Tensor) or schema is None:
            continue
        if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
            continue
        operands = [a.meta["val"] for a in node.all_input_nodes if isinstance(a.meta.get("val"), Tensor)]
        launches.append(
            KernelReport(
                str(node.target), direction, "", sum(_bytes(o, sizes) for o in operands), _bytes(value, sizes), "aten"
            )
        )
    return DirectionReport(graph, [], launches, number(minimal_bytes(graph), sizes))
