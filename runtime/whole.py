"""The Function that runs under torch.func: setup_context style, with the values in between as hidden outputs.

What eager refuses there (old-style classes, saved intermediates) becomes whole: a hidden output's gradient flows back
through forward, so that second order is right and not silently partial.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import Function

from ..tracer.context import BackwardContext
from .unit import BackwardUnit, Unit, batchable, functorch_off, present_under_vmap

if TYPE_CHECKING:
    from .function import Compiler
    from .specialization import Specialization

Tensor = torch.Tensor


def whole_of(compiler: Compiler, specialization: Specialization, backend: str) -> Any:
    """The one such Function of a specialisation on a backend."""
    key = (id(specialization), backend, "whole")
    if key not in compiler.nodes:
        compiler.nodes[key] = Whole(compiler, specialization, backend).function()  # type: ignore[index]
    return compiler.nodes[key]  # type: ignore[index]


class Whole:
    """Rules of the hidden-output Function; outputs are (user's tensors, hidden tensors)."""

    def __init__(self, compiler: Compiler, specialization: Specialization, backend: str) -> None:
        self.compiler, self.spec, self.backend = compiler, specialization, backend
        self.visible = len(specialization.forward.tensor_outputs)
        self.symbols = sorted(specialization.binder.sources, key=str)
        self.forward_unit = Unit(f"{specialization.name}_forward", self._forward_body, backend)
        self.tangent_units: dict[tuple[bool, ...], Unit] = {}

    def function(self) -> Any:
        rules = {
            "forward": self.forward,
            "setup_context": self.setup_context,
            "backward": self.backward,
            "jvp": self.users_jvp if self._has("jvp") else self.jvp,
            "vmap": self.users_vmap if self._has("vmap") else self.vmap,
        }
        return type(self.spec.name, (Function,), {n: staticmethod(r) for n, r in rules.items()})

    def _has(self, method: str) -> bool:
        return getattr(self.compiler.cls, method) is not getattr(Function, method)

    # ------------------------------------------------------------------ forward
    def forward(self, *args: Any) -> tuple[Any, ...]:
        outputs, hidden = self.spec.run_forward(args, self.backend)
        return (*outputs, *hidden)

    def setup_context(self, ctx: Any, inputs: Sequence[Any], output: Sequence[Any]) -> None:
        spec, tensors = self.spec, self.spec.tensors_of(inputs)
        outputs, hidden = output[: self.visible], output[self.visible :]

        def at(place: Any) -> Any:
            return spec.at(place, tensors, outputs, hidden)

        ctx.set_materialize_grads(False)
        residuals = [at(p) for p in spec.residual_places]
        ctx.save_for_backward(*residuals, *tensors)
        if self._has("jvp"):
            ctx.save_for_forward(*map(at, spec.forward.saved_for_forward))
        else:
            ctx.save_for_forward(*residuals, *tensors)
        integers = [o for o in outputs if not o.is_floating_point() and not o.is_complex()]
        if marked := [*map(at, spec.forward.non_differentiable), *integers]:
            ctx.mark_non_differentiable(*marked)
        ctx.shapes = [(o.shape, o.dtype, o.device) for o in outputs]
        ctx.sizes = spec.sizes(inputs)

    # ------------------------------------------------------------------ reverse
    def backward(self, ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        split = len(self.spec.residual_places)
        residuals, inputs = ctx.saved_tensors[:split], ctx.saved_tensors[split:]
        given, hidden = gradients[: self.visible], gradients[self.visible :]
        result: list[Any] = [None] * len(self.spec.arguments)
        if any(g is not None for g in given) or not any(g is not None for g in hidden):
            result = list(self._users_gradients(ctx, residuals, given))
        if any(g is not None for g in hidden):
            self._add_hidden(result, inputs, hidden)
        return tuple(result)

    def _users_gradients(self, ctx: Any, residuals: Sequence[Any], given: Sequence[Any]) -> Sequence[Any]:
        if self.spec.forward.materialize_grads:
            given = [_zeros(s) if g is None else g for g, s in zip(given, ctx.shapes, strict=True)]
        supply = iter(given)
        full = [None if o.kind == "object" else next(supply) for o in self.spec.forward.outputs]
        unit = BackwardUnit.of(self.compiler, self.spec, self.backend)
        return unit(*residuals, *(ctx.sizes[s] for s in unit.symbols), *full)

    def _add_hidden(self, result: list[Any], inputs: Sequence[Any], hidden: Sequence[Any]) -> None:
        """The second-order contribution of values that forward kept: their gradient goes back through forward."""
        cotangents = [*[None] * self.visible, *hidden]
        extra = self.forward_unit.vjp(len(inputs))(*inputs, *cotangents)
        for slot, gradient in zip(self.spec.slots, extra, strict=True):
            if gradient is not None:
                result[slot] = gradient if result[slot] is None else result[slot] + gradient

    def _forward_body(self, *tensors: Any) -> Sequence[Any]:
        """The captured forward as a body: what derivatives of hidden values are taken of."""
        lifted = [r.get() for r in self.spec.lifted if r is not None]
        return batchable(self.spec.forward.trace.graph_module)(*tensors, *lifted)  # type: ignore[no-any-return]

    # ------------------------------------------------------------------ forward mode
    def jvp(self, ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        """The transpose of backward in its gradients: a custom gradient is honoured in forward mode too."""
        split = len(self.spec.residual_places)
        residuals, inputs = ctx.saved_tensors[:split], ctx.saved_tensors[split:]
        moving = [t for i, t in enumerate(tangents) if i in self.spec.slots]
        mask = tuple(t is not None for t in tangents)
        if mask not in self.tangent_units:
            body = self._tangent_body(mask, len(residuals))
            self.tangent_units[mask] = Unit(f"{self.spec.name}_jvp", body, self.backend)
        sizes = [ctx.sizes[s] for s in self.symbols]
        shapes = [torch.empty(s[0], dtype=s[1], device=s[2]) for s in ctx.shapes]
        visible = self.tangent_units[mask](*residuals, *sizes, *shapes, *[t for t in tangents if t is not None])
        hidden: Sequence[Any] = [None] * self.spec.forward.hidden_count
        if self.spec.forward.hidden_count:
            hidden = self.forward_unit.jvp(len(inputs))(*inputs, *moving)[self.visible :]
        return (*visible, *hidden)

    def _tangent_body(self, mask: tuple[bool, ...], split: int) -> Any:
        spec, symbols = self.spec, self.symbols

        def body(*args: Any) -> Sequence[Any]:
            residuals, rest = args[:split], args[split:]
            sizes, rest = dict(zip(symbols, rest[: len(symbols)], strict=True)), rest[len(symbols) :]
            outputs, supply = rest[: self.visible], iter(rest[self.visible :])
            tangents = [next(supply) if there else None for there in mask]
            return transposed_backward(spec, residuals, sizes, outputs, tangents)

        return body

    def users_jvp(self, ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        """The user's own jvp, on what he saved for it."""
        forward = self.spec.forward
        attributes = self.spec.attributes([], ctx.sizes)
        if forward.materialize_grads:
            tangents = self._materialized(ctx, tangents)
        own = BackwardContext(ctx.saved_tensors, attributes, forward.needs_input_grad)
        result = self.compiler.cls.jvp(own, *tangents)  # type: ignore[attr-defined]
        return result if isinstance(result, tuple) else (result,)

    def _materialized(self, ctx: Any, tangents: Sequence[Any]) -> tuple[Any, ...]:
        shapes = {slot: self.spec.forward.fakes[i] for i, slot in enumerate(self.spec.slots)}
        from ..tracer.function import rebind

        return tuple(
            torch.zeros(rebind(shapes[i].shape, ctx.sizes), dtype=shapes[i].dtype, device=shapes[i].device)
            if t is None and i in shapes and shapes[i].is_floating_point()
            else t
            for i, t in enumerate(tangents)
        )

    # ------------------------------------------------------------------ vmap
    def users_vmap(self, info: Any, in_dims: Any, *args: Any) -> Any:
        """The user's own vmap rule."""
        outputs, out_dims = self.compiler.cls.vmap(info, in_dims, *args)  # type: ignore[attr-defined]
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if isinstance(out_dims, int) or out_dims is None:
            out_dims = (out_dims,) * len(outputs)
        return outputs, out_dims

    def vmap(self, info: Any, in_dims: Any, *args: Any) -> Any:
        """The captured forward and backward, batched, as a compiled Function of its own."""
        batched = batched_class(self, tuple(in_dims), info)
        outputs = batched.apply(*args)
        return outputs, tuple(0 for _ in outputs)


def transposed_backward(
    spec: Specialization, residuals: Sequence[Any], sizes: Any, outputs: Sequence[Any], tangents: Sequence[Any]
) -> Sequence[Any]:
    """backward is linear in its gradients; its transpose takes input tangents to output tangents."""
    with torch.enable_grad():
        probes = [torch.zeros_like(o).requires_grad_() if o.is_floating_point() else torch.zeros_like(o) for o in outputs]
        supply = iter(probes)
        full = [None if o.kind == "object" else next(supply) for o in spec.forward.outputs]
        gradients = spec.users_backward(residuals, sizes, full)
        gradients = tuple(spec.as_autograd_takes(i, g, sizes) for i, g in enumerate(gradients))
        pairs = [(g, t) for g, t in zip(gradients, tangents, strict=True) if g is not None and t is not None and g.requires_grad]
        wanted = [p for p in probes if p.requires_grad]
        found: Sequence[Any] = [None] * len(wanted)
        if pairs and wanted:
            found = torch.autograd.grad([g for g, _ in pairs], wanted, [t for _, t in pairs], allow_unused=True, create_graph=True)
    pushed = iter(found)
    results = [next(pushed) if p.requires_grad else None for p in probes]
    return [torch.zeros_like(o) if r is None and o.is_floating_point() else r for r, o in zip(results, outputs, strict=True)]


def _zeros(spec: tuple[Any, Any, Any]) -> Tensor:
    return torch.zeros(spec[0], dtype=spec[1], device=spec[2])


def batched_class(whole: Whole, in_dims: tuple[int | None, ...], info: Any) -> Any:
    """A Function over the batch: forward and backward are the captured graphs under vmap; compiled again."""
    from .function import compile_class

    spec, visible = whole.spec, whole.visible
    randomness = info.randomness
    slots = spec.slots
    dims = tuple(in_dims[i] for i in slots)
    forward_graph = batchable(spec.forward.trace.graph_module)
    residual_places = spec.residual_places

    def forward(*args: Any) -> tuple[Any, ...]:
        lifted = [r.get() for r in spec.lifted if r is not None]
        tensors = [args[i] for i in slots]
        return tuple(present_under_vmap(lambda *t: forward_graph(*t, *lifted), dims, tensors, randomness))

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        tensors = [inputs[i] for i in slots]
        at = [spec.at(p, tensors, output[:visible], output[visible:]) for p in residual_places]
        ctx.residual_dims = tuple(None if p is None else dims[p.index] if p.kind == "input" else 0 for p in residual_places)
        ctx.save_for_backward(*at, *tensors)
        ctx.set_materialize_grads(False)
        marked = [spec.at(p, tensors, output[:visible], output[visible:]) for p in spec.forward.non_differentiable]
        if marked:
            ctx.mark_non_differentiable(*marked)
        ctx.shapes = [(o.shape, o.dtype, o.device) for o in output]

    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return _batched_gradients(whole, ctx, gradients, in_dims, randomness)

    rules = {"forward": forward, "setup_context": setup_context, "backward": backward}
    cls = type(spec.name, (Function,), {n: staticmethod(r) for n, r in rules.items()})
    return compile_class(cls, whole.compiler.backend, False, whole.compiler.dynamic)


def _batched_gradients(whole: Whole, ctx: Any, gradients: Sequence[Any], in_dims: Sequence[Any], randomness: str) -> tuple[Any, ...]:
    spec, visible = whole.spec, whole.visible
    split = len(spec.residual_places)
    residuals, inputs = ctx.saved_tensors[:split], ctx.saved_tensors[split:]
    given, hidden = list(gradients[:visible]), list(gradients[visible:])
    if spec.forward.materialize_grads:
        given = [_zeros(s) if g is None else g for g, s in zip(given, ctx.shapes, strict=False)]
    dims = tuple(in_dims[i] for i in spec.slots)

    def one(*lane: Any) -> Sequence[Any]:
        kept, rest = list(lane[:split]), lane[split:]
        values, rest = rest[: len(inputs)], rest[len(inputs) :]
        return _lane_gradients(whole, kept, values, rest[:visible], rest[visible:])

    lane_dims = (*ctx.residual_dims, *dims, *(None if g is None else 0 for g in (*given, *hidden)))
    everything = [*residuals, *inputs, *given, *hidden]
    present = [i for i, v in enumerate(everything) if v is not None]

    def flat(*values: Any) -> Sequence[Any]:
        full: list[Any] = [None] * len(everything)
        for i, v in zip(present, values, strict=True):
            full[i] = v
        return one(*full)

    results = present_under_vmap(flat, tuple(lane_dims[i] for i in present), [everything[i] for i in present], randomness)
    return tuple(None if r is None else _unbatched(r, d) for r, d in zip(results, in_dims, strict=True))


def _lane_gradients(whole: Whole, residuals: Sequence[Any], inputs: Sequence[Any], given: Sequence[Any], hidden: Sequence[Any]) -> Sequence[Any]:
    """One lane: the user's backward, and the hidden gradients through forward."""
    spec = whole.spec
    sizes = spec.binder(inputs)
    supply = iter(given)
    full = [None if o.kind == "object" else next(supply) for o in spec.forward.outputs]
    result: list[Any] = [None] * len(spec.arguments)
    if any(g is not None for g in given):
        gradients = spec.users_backward(residuals, sizes, full)
        result = [spec.as_autograd_takes(i, g, sizes) for i, g in enumerate(gradients)]
    if any(g is not None for g in hidden):
        whole._add_hidden(result, inputs, hidden)
    return result


def _unbatched(gradient: Tensor, dim: int | None) -> Tensor:
    return gradient.sum(0) if dim is None else gradient.movedim(0, dim)


__all__ = ["Whole", "batched_class", "functorch_off", "transposed_backward", "whole_of"]
