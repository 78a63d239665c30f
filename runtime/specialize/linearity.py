"""The user's backward as a linear map of its gradients: what is transposed for forward mode, what is refused by name.

A backward that is not linear in its gradients is no vjp, and no transpose of it would be the jvp. Its captured graph is
judged by the table of linear primitives; a library call that is in no table is tried on small random tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from ...ir import Graph, Value
from ...ir.errors import FusegradError, LoweringError
from ...ir.prims import Arg
from ...ir.transforms.extern import NoRules, op_name, source_place
from ...ir.transforms.linearity import Refusal, why_not_linear
from ...ir.transforms.ops import DIFFERENTIABLE
from ...tracer.capture.capture import capture_lock
from ...tracer.function import rebind
from ...tracer.lowering.aten import lower
from ...tracer.methods import method_place
from ...tracer.torch_private import grad_switch, plain_tensors
from ...tracer.trace import CaptureError, Trace
from ..capture.captured import hint_of
from ..capture.captured_backward import capture_jvp, predicted_kinds
from ..capture.guards import is_float
from ..execution.aten.replay import step_by_step
from ..values.bitwise import same_random_numbers, small_sizes

if TYPE_CHECKING:
    from .specialization import Specialization

Tensor = torch.Tensor
Linear = Callable[[Sequence[Tensor]], Sequence[Any]]


class NonLinearBackward(FusegradError):
    """Forward mode is derived by transposing backward, which has to be linear in its gradients."""

    message = (
        "jvp({function}): backward is not linear in its gradients: {why}\n  at:   {where}\n"
        "  fix:  write a `jvp` staticmethod, keep the operation off the way of the gradients, or take the\n"
        "        derivative of forward instead: compile(derive_jvp='forward')."
    )


class NonLinearJvp(FusegradError):
    """backward is derived by transposing jvp, which has to be linear in its tangents."""

    message = (
        "backward({function}): jvp is not linear in its tangents: {why}\n  at:   {where}\n"
        "  fix:  write a `backward` staticmethod, or keep the operation off the way of the tangents."
    )


@dataclass(frozen=True)
class Captured:
    """A captured method that has to be linear in its last inputs."""

    name: str
    trace: Trace
    lifted: Sequence[Any]  # reads of the tensors that it uses from outside
    inputs: range  # their numbers among the inputs that are tensors
    outputs: Sequence[int]
    place: str


def require_linear(spec: Specialization, moving: Sequence[int]) -> None:
    """Raise NonLinearBackward unless the gradients of the arguments `moving` are linear in those of the outputs."""
    captured = spec.captured
    kinds = predicted_kinds(captured)
    with plain_tensors(), torch.no_grad(), capture_lock:
        try:
            entry = spec.backward.entry(kinds)
        except CaptureError as error:
            raise NonLinearBackward(function=captured.name, why=f"{error}", where=captured.backward_place()) from error
        first = sum(isinstance(captured.forward.fake_at(p), Tensor) for p in captured.residual_places)
        gradients = range(first, first + sum(kind is not None for kind in kinds))
        backward = Captured("backward", entry.trace, entry.lifted, gradients, moving, captured.backward_place())
        refusal = _refusal(spec, backward)
    if refusal is not None:
        raise NonLinearBackward(function=captured.name, why=str(refusal), where=_place(refusal, backward))


def require_linear_jvp(spec: Specialization) -> None:
    """Raise NonLinearJvp unless jvp is linear in its tangents, CaptureError where it cannot be captured."""
    captured = spec.captured
    likes = [captured.forward.fakes[n] for n, i in enumerate(captured.slots) if i < captured.count]
    trace = capture_jvp(captured, [f for f in likes if is_float(f)])
    tensors = sum(isinstance(f, Tensor) for f in trace.fakes)
    tangents = range(tensors - sum(map(is_float, likes)), tensors)
    forward = captured.forward
    fixed = {forward.tensor_outputs[p.index] for p in forward.non_differentiable if p.kind == "output"}
    moving = [i for i in forward.tensor_outputs if i not in fixed]
    lifted = [captured.reads.tensor_path(t) for t in trace.lifted]
    place = method_place(captured.cls.jvp)  # type: ignore[attr-defined]
    jvp = Captured("jvp", trace, lifted, tangents, moving, place)
    if (refusal := _refusal(spec, jvp)) is not None:
        raise NonLinearJvp(function=captured.name, why=str(refusal), where=_place(refusal, jvp))


def _place(refusal: Refusal, method: Captured) -> str:
    return method.place if refusal.where == "unknown" else refusal.where


def _refusal(spec: Specialization, method: Captured) -> Refusal | None:
    """The reason why a captured method is not linear; None where it is."""
    trace, known = method.trace, Library()
    try:
        graph = lower(trace.graph_module, [*trace.fakes, *trace.lifted], name=f"{spec.captured.name}_{method.name}")
        refusal = why_not_linear(graph, _floats(graph, method.inputs), known, method.outputs)
    except LoweringError:
        refusal = None
        known.doubtful.append(Refusal("unknown", method.name, method.place, "as a whole is not linear"))
    if refusal is None and known.doubtful and not _sums_on_small_tensors(spec, method):
        refusal = known.doubtful[0]
    return refusal


def _floats(graph: Graph, positions: Sequence[int]) -> list[int]:
    return [i for i in positions if graph.inputs[i].dtype in DIFFERENTIABLE]


# ---------------------------------------------------------------------------------------------- library calls
LINEAR_IN = {
    **dict.fromkeys((
        "view reshape _unsafe_view expand permute transpose t squeeze unsqueeze select slice unfold diagonal "
        "as_strided flip roll rot90 repeat tril triu sum mean cumsum trace neg conj _conj conj_physical resolve_conj "
        "real imag view_as_real view_as_complex clone alias detach _to_copy index_select gather take index embedding "
        "unfold_backward _fft_r2c _fft_c2r _fft_c2c im2col col2im avg_pool1d avg_pool2d avg_pool3d "
        "_adaptive_avg_pool2d _adaptive_avg_pool3d pixel_shuffle pixel_unshuffle split split_with_sizes unbind "
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
        "upsample_trilinear3d upsample_bicubic2d reflection_pad1d reflection_pad2d reflection_pad3d "
        "replication_pad1d replication_pad2d replication_pad3d"
    ).split(), ("self", "weight")),
    **dict.fromkeys(("add", "sub", "where"), ("self other",)),
    **dict.fromkeys(("cat", "stack"), ("tensors",)),
    **dict.fromkeys(("mm", "bmm"), ("self", "mat2")),
    **dict.fromkeys(("scatter_add", "scatter"), ("self src",)),
    **dict.fromkeys(("index_add", "index_copy"), ("self source",)),
    **dict.fromkeys(("index_put", "_unsafe_index_put"), ("self values",)),
    "mul": ("self", "other"),
    "div": ("self",),
    "mv": ("self", "vec"),
    "dot": ("self", "tensor"),
    "convolution": ("input", "weight"),
    "grid_sampler_2d": ("input",),
    "_linalg_solve_ex": ("B",),
    "linalg_solve_triangular": ("B",),
    "cholesky_solve": ("self",),
}  # fmt: skip
"""ATen name -> the arguments in which it is linear, by their names: in those of one string together."""

ADDED = ("bias",)
"""Arguments that are added: where one is given, a call is not linear in the others alone."""


@dataclass
class Library(NoRules):
    """The rules for library calls. A call without one is taken for linear, and noted as `doubtful`."""

    doubtful: list[Refusal] = field(default_factory=list)

    def is_linear(self, node: Value, wrt: tuple[int, ...]) -> bool | None:
        if node.avals and not _is_known(node, wrt):
            self.doubtful.append(Refusal("unknown", op_name(node), source_place(node), "is not linear in it"))
        return True

    def keeps_zero(self, node: Value, wrt: tuple[int, ...]) -> bool:
        return bool(node.avals) and _is_known(node, wrt)


def _is_known(node: Value, wrt: tuple[int, ...]) -> bool:
    if node.prim != "aten":
        return False
    op = str(node.params["op"])
    names = argument_names(op, node.params["spec"])
    name = op.split(".")[1]
    if "_backward" in name and all(names[i].startswith("grad") for i in wrt):
        return True  # the vjp of a library call
    if any(n in ADDED for i, n in names.items() if i not in wrt):
        return False
    return any(set(wrt) == {i for i, n in names.items() if n in t.split()} for t in LINEAR_IN.get(name, ()))


def argument_names(op: str, spec: Any) -> dict[int, str]:
    """Which argument of the op each operand of the node is, or is in."""
    namespace, name, overload = op.split(".")
    schema = getattr(getattr(getattr(torch.ops, namespace), name), overload)._schema
    positional, keywords = spec
    pairs = [*zip((a.name for a in schema.arguments), positional, strict=False), *keywords]
    return {operand: argument for argument, part in pairs for operand in _operands(part)}


def _operands(part: Any) -> list[int]:
    if isinstance(part, Arg):
        return [part.index]
    return [i for p in part for i in _operands(p)] if isinstance(part, tuple) else []


# ---------------------------------------------------------------------------------------------- trying it
def _sums_on_small_tensors(spec: Specialization, method: Captured) -> bool:
    """`sums` for a captured method, on a few elements per symbolic size."""
    captured = spec.captured
    fakes, symbols = method.trace.fakes, captured.binder.sources
    hints = {s: hint_of(captured.session, s) for s in symbols}
    sizes = small_sizes(hints, captured.session.conditions(symbols))
    if sizes is None or any(n is None for n in method.lifted):
        return False
    lifted = [read.get() for read in method.lifted]
    with same_random_numbers(fakes):  # the user's are his
        values = [_random(f, sizes) if isinstance(f, Tensor) else rebind(f, sizes) for f in fakes]
        return _sums_on(method, values, lifted)


def _sums_on(method: Captured, values: Sequence[Any], lifted: Sequence[Any]) -> bool:
    last = len(method.inputs)

    def run(given: Sequence[Tensor]) -> Sequence[Any]:
        results = step_by_step(method.trace.graph_module, *values[: len(values) - last], *given, *lifted)
        return [results[i] for i in method.outputs]

    try:
        return sums(run, values[len(values) - last :])
    except Exception:  # data made up is no fit for the method
        return False


def _random(fake: Tensor, sizes: Mapping[Any, int]) -> Tensor:
    """Made up: floats around 1, so that roots and logarithms have a value; every index 0."""
    made = torch.empty_strided(
        rebind(fake.shape, sizes), rebind(tuple(fake.stride()), sizes), dtype=fake.dtype, device=fake.device
    )
    return made.uniform_(0.5, 1.5) if fake.is_floating_point() else made.zero_()


def sums(function: Linear, likes: Sequence[Tensor]) -> bool:
    """True if f(2a - 3b) is 2 f(a) - 3 f(b) for random a and b, as far as rounding tells and numbers are finite."""
    with torch.no_grad(), same_random_numbers(likes) as rewind:
        a, b = ([torch.randn_like(t) if is_float(t) else torch.zeros_like(t) for t in likes] for _ in "ab")
        mixed = [2 * x - 3 * y if is_float(x) else x for x, y in zip(a, b, strict=True)]
        found = []
        for gradients in (a, b, mixed):
            rewind()
            found.append([None if r is None else r.detach().clone() for r in function(gradients)])
    return all(_sums(*each) for each in zip(*found, strict=True))


def _sums(a: Tensor | None, b: Tensor | None, mixed: Tensor | None) -> bool:
    if a is None or b is None or mixed is None or not a.numel():
        return a is b is mixed or (a is not None and not a.numel())
    wide = torch.complex128 if a.is_complex() else torch.float64
    parts = [2 * a.to(wide), 3 * b.to(wide), mixed.to(wide)]
    finite = torch.isfinite(parts[0]) & torch.isfinite(parts[1]) & torch.isfinite(parts[2])
    if not finite.any():
        return False
    scale = max(float(p[finite].abs().max()) for p in parts)
    gap = float((parts[0] - parts[1] - parts[2])[finite].abs().max())
    return gap <= scale * math.sqrt(torch.finfo(a.dtype).eps if is_float(a) else 0.0)


# ---------------------------------------------------------------------------------------------- transposing it
def not_transposed(
    pushed: Sequence[Any],
    cotangents: Sequence[Tensor],
    tangents: Sequence[Tensor],
    pulled: Sequence[Any],
    coarsest: float = 0.0,
) -> str | None:
    """The reason why tangents pushed forward are not the transpose of cotangents pulled back; None where they are.

    coarsest: eps of the shortest floats in between.
    """
    left, right = _products(pushed, cotangents), _products(pulled, tangents)
    scale = sum((p.abs().sum() for p in (*left, *right)), torch.zeros((), dtype=torch.float64))
    gap = sum((p.sum() for p in left), -sum((p.sum() for p in right), torch.zeros_like(scale))).abs()
    floats = filter(is_float, (*tangents, *cotangents))
    exact = max([coarsest, *(torch.finfo(t.dtype).eps for t in floats)])
    if not bool(scale.isfinite()) or bool(gap <= max(1e-4, 16 * exact) * scale):
        return None
    return "transposed through what it calls, it is another linear map"


def _products(a: Sequence[Any], b: Sequence[Tensor]) -> list[Tensor]:
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if isinstance(x, Tensor)]
    return [_as_real(x) * _as_real(y) for x, y in pairs]


def _as_real(t: Tensor) -> Tensor:
    """The inner product of autograd is that of the real and imaginary parts."""
    found = torch.view_as_real(t.detach().resolve_conj()) if t.is_complex() else t.detach()
    return found.double().cpu()


class CoarsestEps(TorchFunctionMode):
    """Notes the eps of the coarsest float type that is computed in within the block."""

    coarsest = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_float(result):
            self.coarsest = max(self.coarsest, torch.finfo(result.dtype).eps)
        return result


def probe_tensor(like: Tensor) -> Tensor:
    """Numbers of both signs, drawn from no random state; zeros for what is no float."""
    if not like.is_floating_point():
        return torch.zeros_like(like)
    return torch.arange(1, like.numel() + 1, dtype=torch.float64, device=like.device).cos().reshape(like.shape).to(like)


def depends_on(tensor: Tensor, probes: Sequence[Tensor]) -> bool:
    """True if autograd recorded a way from a probe to the tensor."""
    if any(tensor is p for p in probes):
        return True
    waiting = [tensor.grad_fn] if tensor.grad_fn is not None else []
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if any(getattr(node, "variable", None) is p for p in probes):
            return True
        fresh = [n for n, _ in node.next_functions if n is not None and n not in seen]
        seen.update(fresh)
        waiting += fresh
    return False


class IgnoreDetach(TorchFunctionMode):
    """Within the block `detach` and `no_grad` do not cut the way of a gradient: they stop double differentiation, and
    change nothing about which linear map backward is."""

    def __init__(self, probes: Sequence[Tensor]) -> None:
        super().__init__()
        self.probes = probes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is grad_switch:
            return None
        if func in _CUTS and depends_on(args[0], self.probes):
            return args[0].view_as(args[0])
        if func is torch.autograd.grad:
            return func(**dict(zip(_OF_GRAD, args, strict=False)) | (kwargs or {}) | {"create_graph": True})
        return func(*args, **(kwargs or {}))


_OF_GRAD = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused")
_CUTS = (torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]
