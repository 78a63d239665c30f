"""The user's backward as a unit: its first order runs the kernels, its derivatives are those of the user's own code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...tracer.capture.capture import is_capturing
from ...tracer.torch_private import transforms_active
from ...tracer.trace import CaptureError
from ..capture.activity import sources_of
from ..capture.captured_backward import reduce_to_argument
from ..capture.redraw import draws
from ..capture.user_methods import run_user_backward
from ..compiled.backward import OTHER_SIZES, run_backward
from ..specialize.compiled_backward import BackwardCall, is_for_other_sizes
from ..specialize.specialization import Specialization
from ..values.gradient_layouts import canonical_layout, layout_class
from ..values.sizes import BoundSizes
from .partial_second_order import warn_once
from .results import Executed, ran, without_idle
from .unit import TransformableGraph, report_to, run_within_capture
from .vjp import Needed, is_followed, vjp_of

if TYPE_CHECKING:
    from ..compiled.compiled import Compiled

Tensor = torch.Tensor


class BackwardUnit(TransformableGraph):
    """The user's backward as a unit of (residuals, symbol values, gradients)."""

    def __init__(self, compiler: Compiled, specialization: Specialization, backend: str) -> None:
        captured = specialization.captured
        self.compiler, self.specialization = compiler, specialization
        self.symbols = sorted(captured.symbols, key=str)
        self.split = len(captured.residual_places)
        super().__init__(f"{captured.name}_backward", self._python, backend, captured.reads)
        report_to(compiler, self)

    @classmethod
    def of(cls, compiler: Compiled, specialization: Specialization, backend: str) -> BackwardUnit:
        """The one unit of this specialisation on this backend."""
        key = (backend, "backward")
        if key not in specialization.nodes:
            specialization.nodes.setdefault(key, cls(compiler, specialization, backend))
        return specialization.nodes[key]  # type: ignore[no-any-return]

    def differentiable(self, residuals: Sequence[Any], sizes: BoundSizes, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """Gradients that can be differentiated again, along what they depend on."""
        args = [*residuals, *(sizes[s] for s in self.symbols), *gradients]
        if is_capturing() or transforms_active():
            return tuple(self(*args))
        kinds = tuple(layout_class(canonical_layout(g)) for g in gradients)
        if is_for_other_sizes(self.specialization.backward, kinds, sizes):
            self.compiler.ledger.report_once("backward", OTHER_SIZES)
            return tuple(self.as_written(args))
        results = list(self(*without_idle(self._graph_that_runs(args, sizes, gradients), args)))
        for result, gradient in self._passed_on(sizes, gradients).items():
            results[result] = gradients[gradient]  # itself, and no view of it
        return tuple(results)

    def _passed_on(self, sizes: BoundSizes, gradients: Sequence[Any]) -> dict[int, int]:
        """The results that are a gradient as it came, and its number."""
        entry = self._entry(sizes, gradients)
        return {} if entry is None else entry[1].passed_gradients

    def _entry(self, sizes: BoundSizes, gradients: Sequence[Any]) -> Any:
        """The captured backward that serves these gradients, and whose it is; None where none is known."""
        kinds = tuple(layout_class(canonical_layout(g)) for g in gradients)
        try:
            return self.specialization.backward.entry_at(kinds, sizes)
        except CaptureError:
            return None

    def parts(self, args: Sequence[Any]) -> tuple[Sequence[Any], BoundSizes, Sequence[Any]]:
        """(residuals, sizes, gradients) of the unit's arguments."""
        middle = self.split + len(self.symbols)
        sizes = BoundSizes(zip(self.symbols, args[self.split : middle], strict=True))
        return args[: self.split], sizes, args[middle:]

    def _unwritten(self, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments, copies of those that backward writes to: a derivative needs them as they are, too."""
        entries = [e for e in self.specialization.backward.entries.values() if not isinstance(e, CaptureError)]
        numbers = {i for entry in entries for i in entry.written_inputs}
        return [a.clone() if i in numbers and isinstance(a, Tensor) else a for i, a in enumerate(args)]

    def _python(self, *args: Any) -> Sequence[Any]:
        residuals, sizes, gradients = self.parts(self._unwritten(args))
        results = run_user_backward(self.specialization.captured, residuals, sizes, gradients)
        return [reduce_to_argument(self.specialization.captured, i, g, sizes) for i, g in enumerate(results)]

    def execute(self, args: Sequence[Any]) -> Sequence[Any]:
        if is_capturing():
            return run_within_capture(self, args)
        residuals, sizes, gradients = self.parts(self._unwritten(args))
        call = BackwardCall(self.backend, residuals, sizes, gradients)
        results = run_backward(self.compiler, self.specialization, call)
        return ran(self._graph_that_runs(args, sizes, gradients), results)

    def pullback(self, args: Sequence[Any], cotangents: Sequence[Any], needed: Needed = None) -> Sequence[Any]:
        if needed is not None and not transforms_active() and not is_capturing():
            _, sizes, gradients = self.parts(args)
            trace, live = self._graph_that_runs(args, sizes, gradients) or (None, [])
            sources = frozenset().union(*sources_of(trace)) if trace is not None else ()
            warn_once(self.specialization, args, needed, {live[n] for n in sources if n < len(live)})
        if self.compiler.ledger.is_in_anomaly_mode():  # torch's own autograd runs the derivative's operations
            return vjp_of(self.body, args, cotangents, needed, is_followed())
        return super().pullback(args, cotangents, needed)

    @property
    def may_loop(self) -> bool:
        entries = self.specialization.backward.entries.values()
        return super().may_loop or any(not isinstance(e, CaptureError) and e.trace.has_loop for e in entries)

    @property
    def draws(self) -> bool:
        entries = list(self.specialization.backward.entries.values())
        return not entries or any(isinstance(e, CaptureError) or draws(e.trace) for e in entries)

    def _graph_that_runs(self, args: Sequence[Any], sizes: BoundSizes, gradients: Sequence[Any]) -> Executed:
        """The graph of a backward that runs, and which arguments are its inputs; None where no graph is known."""
        pair = self._entry(sizes, gradients)
        if pair is None or (pair[0].captured.backward_symbols and not self.symbols):
            return None
        owner, entry = pair
        size = [self.split] * len(owner.captured.backward_symbols)  # one for all: none of them has a gradient
        tensors = [i for i in range(len(args)) if not self.split <= i < len(args) - len(gradients)]
        places = [i for i in tensors if args[i] is not None]
        first = sum(i < self.split for i in places)
        return entry.trace, [*places[:first], *size, *places[first:]]
