"""The Function that runs under torch.func: setup_context style, with the values in between as hidden outputs.

What eager refuses there (old-style classes, saved intermediates) becomes whole: a hidden output's gradient flows back
through forward, so that second order is right and not silently partial. Under vmap all three rules are batched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import Function

from ..ir.program import Place
from ..tracer.context import BackwardContext
from ..tracer.function import backward_method, rebind
from .linear import AttachedGradients, NonLinearBackward, why_not_linear
from .unit import BackwardUnit, OutDim, Unit, batchable, lane

if TYPE_CHECKING:
    from .function import Compiler
    from .specialization import Specialization

Tensor = torch.Tensor
Dims = tuple[int | None, ...]


def whole_of(compiler: Compiler, specialization: Specialization, backend: str) -> Any:
    """The one such Function of a specialisation on a backend."""
    key = (backend, "whole")
    if key not in specialization.nodes:
        specialization.nodes[key] = Whole(compiler, specialization, backend).function()
    return specialization.nodes[key]


class Rules:
    """forward, backward and jvp of a Function as units, over the arguments of its specialisation.

    forward_unit: tensor arguments -> (user's tensors, hidden tensors)
    backward_for(gradients): (residuals, sizes, one gradient per user output) -> one gradient per argument
    tangent_unit(mask): (residuals, sizes, outputs, the tangents that are there) -> tangents of the user's tensors
    """

    forward_unit: Unit

    def __init__(self, compiler: Compiler, spec: Specialization) -> None:
        self.compiler, self.spec = compiler, spec
        self.visible = len(spec.forward.tensor_outputs)
        self.symbols = sorted(spec.binder.sources, key=str)
        self.batches: dict[Any, Any] = {}

    def backward_for(self, gradients: Sequence[Any]) -> Unit:
        raise NotImplementedError

    def tangent_unit(self, mask: tuple[bool, ...]) -> Unit:
        raise NotImplementedError

    def run_forward(self, args: Sequence[Any]) -> tuple[Any, ...]:
        raise NotImplementedError

    def sizes_of(self, inputs: Sequence[Any]) -> dict[Any, int]:
        raise NotImplementedError

    def function(self) -> Any:
        names = ("forward", "setup_context", "backward", "jvp", "vmap")
        body: dict[str, Any] = {name: staticmethod(getattr(self, name)) for name in names}
        return type(self.spec.name, (Function,), body)

    # ------------------------------------------------------------------ forward
    def forward(self, *args: Any) -> tuple[Any, ...]:
        return self.run_forward(args)

    def setup_context(self, ctx: Any, inputs: Sequence[Any], output: Sequence[Any]) -> None:
        tensors = self.spec.tensors_of(inputs)
        outputs, hidden = output[: self.visible], output[self.visible :]

        def at(place: Place | None) -> Any:
            return self.spec.at(place, tensors, outputs, hidden)

        ctx.set_materialize_grads(False)
        kept = (*map(at, self.spec.residual_places), *tensors)
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*self.kept_for_jvp(kept, at))
        integers = [o for o in outputs if not o.is_floating_point() and not o.is_complex()]
        if marked := [*map(at, self.spec.forward.non_differentiable), *integers]:
            ctx.mark_non_differentiable(*marked)
        ctx.likes = [(o.shape, o.dtype, o.device) for o in outputs]
        ctx.sizes = self.sizes_of(tensors)

    def kept_for_jvp(self, kept: tuple[Any, ...], at: Any) -> Sequence[Any]:
        return kept

    def split(self, saved: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """(residuals, tensor arguments)."""
        n = len(self.spec.residual_places)
        return saved[:n], saved[n:]

    # ------------------------------------------------------------------ reverse
    def backward(self, ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        residuals, inputs = self.split(ctx.saved_tensors)
        if backward_method(self.compiler.cls) is None:
            return self._derived_backward(inputs, gradients)
        given, hidden = gradients[: self.visible], gradients[self.visible :]
        result: list[Any] = [None] * len(self.spec.arguments)
        if any(g is not None for g in given) or not any(g is not None for g in hidden):
            full = self._per_output(ctx, given)
            result = list(self.backward_for(full)(*residuals, *(ctx.sizes[s] for s in self.symbols), *full))
        if any(g is not None for g in hidden):
            self._add_hidden(result, inputs, hidden)
        return tuple(result)

    def _per_output(self, ctx: Any, given: Sequence[Any]) -> list[Any]:
        """One gradient per user output: zeros where the user's backward expects them, None for plain objects."""
        if self.spec.forward.materialize_grads:
            given = [zeros(s) if g is None else g for g, s in zip(given, ctx.likes, strict=True)]
        supply = iter(given)
        return [None if o.kind == "object" else next(supply) for o in self.spec.forward.outputs]

    def _derived_backward(self, inputs: Sequence[Any], gradients: Sequence[Any]) -> tuple[Any, ...]:
        """The derivative of forward itself, where the user wrote forward alone."""
        if self.compiler.cls.jvp is not Function.jvp:  # type: ignore[attr-defined]
            Function.backward(None, *gradients)  # his jvp may say otherwise: torch's own error
        found = iter(self.forward_unit.pullback(inputs, gradients))
        return tuple(next(found) if i in self.spec.slots else None for i in range(len(self.spec.arguments)))

    def _add_hidden(self, result: list[Any], inputs: Sequence[Any], hidden: Sequence[Any]) -> None:
        """The second-order contribution of values that forward kept: their gradient goes back through forward."""
        extra = self.forward_unit.pullback(inputs, [*[None] * self.visible, *hidden])
        for slot, gradient in zip(self.spec.slots, extra, strict=True):
            if gradient is not None:
                result[slot] = gradient if result[slot] is None else result[slot] + gradient

    # ------------------------------------------------------------------ forward mode
    def jvp(self, ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        """The transpose of backward in its gradients: a custom gradient is honoured in forward mode too."""
        residuals, inputs = self.split(ctx.saved_tensors)
        moving = [t for i, t in enumerate(tangents) if i in self.spec.slots]
        if backward_method(self.compiler.cls) is None:
            return tuple(self.forward_unit.pushforward(inputs, moving))
        sizes = [ctx.sizes[s] for s in self.symbols]
        likes = [torch.empty(s[0], dtype=s[1], device=s[2]) for s in ctx.likes]
        unit = self.tangent_unit(tuple(t is not None for t in tangents))
        visible = unit(*residuals, *sizes, *likes, *[t for t in tangents if t is not None])
        hidden: Sequence[Any] = []
        if self.spec.forward.hidden_count:
            hidden = self.forward_unit.pushforward(inputs, moving)[self.visible :]
        fixed = {p.index for p in self.spec.forward.non_differentiable if p.kind == "output"}
        return (*(None if i in fixed else t for i, t in enumerate(visible)), *hidden)

    # ------------------------------------------------------------------ vmap
    def vmap(self, info: Any, in_dims: Any, *args: Any) -> Any:
        """The same rules over a batch, as a Function again."""
        key = (tuple(in_dims), info.randomness)
        if key not in self.batches:
            self.batches[key] = Batched(self, *key).function()
        outputs = self.batches[key].apply(*args)
        return outputs, tuple(None if o is None else 0 for o in outputs)


class Whole(Rules):
    """The rules of a specialisation itself. The user's own jvp and vmap are used where he wrote them."""

    def __init__(self, compiler: Compiler, spec: Specialization, backend: str) -> None:
        super().__init__(compiler, spec)
        self.backend = backend
        self.forward_unit = Unit(f"{spec.name}_forward", self._forward_body, backend, spec.reads)
        self.tangent_units: dict[tuple[bool, ...], Unit] = {}

    def backward_for(self, gradients: Sequence[Any]) -> Unit:
        return BackwardUnit.of(self.compiler, self.spec, self.backend)

    def run_forward(self, args: Sequence[Any]) -> tuple[Any, ...]:
        outputs, hidden = self.spec.run_forward(args, self.backend)
        return (*outputs, *hidden)

    def sizes_of(self, inputs: Sequence[Any]) -> dict[Any, int]:
        return self.spec.binder(inputs)

    def _forward_body(self, *tensors: Any) -> Sequence[Any]:
        """The captured forward as a body: what derivatives of hidden values are taken of."""
        lifted = [r.get() for r in self.spec.lifted if r is not None]
        return batchable(self.spec.forward.trace.graph_module)(*tensors, *lifted)  # type: ignore[no-any-return]

    def tangent_unit(self, mask: tuple[bool, ...]) -> Unit:
        if mask not in self.tangent_units:
            body = self._tangent_body(mask)
            self.tangent_units[mask] = Unit(f"{self.spec.name}_jvp", body, self.backend, self.spec.reads)
        return self.tangent_units[mask]

    def _tangent_body(self, mask: tuple[bool, ...]) -> Any:
        spec, split, symbols = self.spec, len(self.spec.residual_places), self.symbols

        def body(*args: Any) -> Sequence[Any]:
            residuals, rest = args[:split], args[split:]
            sizes, rest = dict(zip(symbols, rest[: len(symbols)], strict=True)), rest[len(symbols) :]
            outputs, supply = rest[: self.visible], iter(rest[self.visible :])
            tangents = [next(supply) if there else None for there in mask]
            return transposed_backward(spec, residuals, sizes, outputs, tangents)

        return body

    # ------------------------------------------------------------------ the user's own rules
    def _has(self, method: str) -> bool:
        return getattr(self.compiler.cls, method) is not getattr(Function, method)

    def kept_for_jvp(self, kept: tuple[Any, ...], at: Any) -> Sequence[Any]:
        return list(map(at, self.spec.forward.saved_for_forward)) if self._has("jvp") else kept

    def jvp(self, ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        if not self._has("jvp"):
            return super().jvp(ctx, *tangents)
        forward = self.spec.forward
        if forward.materialize_grads:
            tangents = tuple(self._materialized(i, t, ctx.sizes) for i, t in enumerate(tangents))
        own = BackwardContext(ctx.saved_tensors, self.spec.attributes([], ctx.sizes), forward.needs_input_grad)
        result = self.compiler.cls.jvp(own, *tangents)  # type: ignore[attr-defined]
        return self._of_tensors(result if isinstance(result, tuple) else (result,))

    def _of_tensors(self, results: tuple[Any, ...]) -> tuple[Any, ...]:
        """Of what a rule gives for each of the user's outputs, what it gives for tensors."""
        forward = self.spec.forward
        if len(results) != len(forward.outputs):
            return results  # torch counts them
        return tuple(results[i] for i in forward.tensor_outputs)

    def _materialized(self, argument: int, tangent: Any, sizes: Any) -> Any:
        if tangent is not None or argument not in self.spec.slots:
            return tangent
        fake = self.spec.forward.fakes[self.spec.slots.index(argument)]
        shape = rebind(fake.shape, sizes)
        return torch.zeros(shape, dtype=fake.dtype, device=fake.device) if fake.is_floating_point() else None

    def vmap(self, info: Any, in_dims: Any, *args: Any) -> Any:
        if not self._has("vmap"):
            return super().vmap(info, in_dims, *args)
        outputs, out_dims = self.compiler.cls.vmap(info, in_dims, *args)  # type: ignore[attr-defined]
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        dims = (out_dims,) * len(outputs) if isinstance(out_dims, int) or out_dims is None else out_dims
        return self._of_tensors(outputs), self._of_tensors(tuple(dims))


class Batched(Rules):
    """Rules over one more batch axis: every unit of the parent, batched."""

    def __init__(self, parent: Rules, in_dims: Dims, randomness: str) -> None:
        super().__init__(parent.compiler, parent.spec)
        self.parent, self.in_dims, self.randomness = parent, in_dims, randomness
        self.dims = tuple(in_dims[i] for i in self.spec.slots)
        self.forward_unit = parent.forward_unit.batch(self.dims, randomness)
        residual = [self._dim_of(p) for p in self.spec.residual_places]
        self.residual_dims: Dims = tuple(residual)

    def _dim_of(self, place: Place | None) -> int | None:
        if place is None:
            return None
        return self.dims[place.index] if place.kind == "input" else 0

    def run_forward(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(self.forward_unit(*self.spec.tensors_of(args)))

    def sizes_of(self, inputs: Sequence[Any]) -> dict[Any, int]:
        lanes = [lane(t, d) for t, d in zip(inputs, self.dims, strict=True)]
        return self.parent.sizes_of(lanes)

    def backward_for(self, gradients: Sequence[Any]) -> Unit:
        given = [None if g is None else 0 for g in gradients]
        dims = (*self.residual_dims, *[None] * len(self.symbols), *given)
        back: list[OutDim] = ["sum" if d is None else d for d in self.in_dims]
        return self.parent.backward_for(gradients).batch(dims, self.randomness, back)

    def tangent_unit(self, mask: tuple[bool, ...]) -> Unit:
        moving = [d for d, there in zip(self.in_dims, mask, strict=True) if there]
        dims = (*self.residual_dims, *[None] * len(self.symbols), *[0] * self.visible, *moving)
        return self.parent.tangent_unit(mask).batch(dims, self.randomness)


def transposed_backward(
    spec: Specialization, residuals: Sequence[Any], sizes: Any, outputs: Sequence[Any], tangents: Sequence[Any]
) -> Sequence[Any]:
    """backward is linear in its gradients; its transpose takes input tangents to output tangents."""
    with torch.enable_grad():
        probes = [torch.zeros_like(o).requires_grad_(o.is_floating_point()) for o in outputs]
        supply = iter(probes)
        full = [None if o.kind == "object" else next(supply) for o in spec.forward.outputs]
        with AttachedGradients(probes):
            gradients = spec.users_backward(residuals, sizes, full, attached=True)
        gradients = tuple(spec.as_autograd_takes(i, g, sizes) for i, g in enumerate(gradients))
        pairs = [
            (g, t)
            for g, t in zip(gradients, tangents, strict=True)
            if g is not None and t is not None and g.requires_grad
        ]
        wanted = [p for p in probes if p.requires_grad]
        found: Sequence[Any] = [None] * len(wanted)
        if pairs and wanted:
            found = torch.autograd.grad(
                [g for g, _ in pairs], wanted, [t for _, t in pairs], allow_unused=True, create_graph=True
            )
        if (why := why_not_linear([g for g, _ in pairs], found, wanted)) is not None:
            raise NonLinearBackward(function=spec.name, why=why, where=spec.backward_place())
    pushed = iter(found)
    results = [next(pushed) if p.requires_grad else None for p in probes]
    return [
        torch.zeros_like(o) if r is None and o.is_floating_point() else r for r, o in zip(results, outputs, strict=True)
    ]


def zeros(like: tuple[Any, Any, Any]) -> Tensor:
    return torch.zeros(like[0], dtype=like[1], device=like[2])
