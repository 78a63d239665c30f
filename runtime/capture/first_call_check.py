"""The first call is compared with the user's own method, bit for bit: what fake tensors hide is found, not trusted.

Where the user's method would fill memory, both run on inputs cut to a few elements per symbolic size instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import sympy
import torch

from ...tracer.loops.lengths import NEAR
from ...tracer.opaque.opaque import Tape
from ...tracer.torch_private import functions_as_written, memory_of, without_hooks
from ...tracer.trace import CaptureError, Trace
from ..execution.aten.replay import step_by_step
from ..execution.intermediates import intermediate_bytes
from ..settings.config import settings
from ..values.bitwise import MemoryFilled, bitwise_difference, cut_small, is_made_up, takes_memory
from ..values.gradient_layouts import order_unlike
from ..values.sizes import Binder, BoundSizes
from .captured import CapturedFunction, output_kinds
from .captured_backward import BackwardEntry, gradient_likes, reduce_to_argument
from .opaque_replay import replay_opaque_calls, replay_opaque_nodes
from .user_methods import run_user_backward, run_user_forward

Tensor = torch.Tensor
Sizes = Mapping[sympy.Symbol, int]


def check_forward(captured: CapturedFunction, args: Sequence[Any], tape: Tape | None = None) -> str | None:
    """The reason why the captured forward is not the user's method; None if it is (or cannot be compared)."""
    if not settings().check:
        return None
    sizes = captured.sizes(args)
    values = shrink(captured, [args[i] for i in captured.slots], captured.forward.fakes, captured.forward.trace, sizes)
    if values is None:
        return None
    supply = iter(values)
    arguments = [next(supply) if i in captured.slots else a for i, a in enumerate(args)]
    cut_down = any(a is not b for a, b in zip(arguments, args, strict=True))
    if cut_down and tape is not None:
        return None
    # Graph and method on the same data, opaque calls played back to both: an effect happens once.
    at = captured.sizes(arguments)
    replay = _RecordedCall(replay_opaque_nodes(partial(replay_forward, captured), tape, at))
    theirs = replay_opaque_calls(partial(_forward_in_its_mode, captured), tape)
    why = compare(captured, replay, theirs, arguments, cut_down, tape or captured.forward.trace)
    if why is None:
        captured.longest.note(sizes)
    # Equal: take eager's strides where fakes had others, and learn what an operator's schema hid.
    if why is None and replay.results:  # empty where cut data was no fit for the method
        captured.returns_input_memory = returns_memory_of(captured, replay.given, replay.results)
        fakes = correct_strides(captured, captured.forward.trace, replay.results, at)
        for fakes_of_part in (captured.forward.fake_outputs, captured.forward.fake_hidden):
            fakes_of_part[:] = [f if f is not None else k for f, k in zip(fakes, fakes_of_part, strict=False)]
            fakes = fakes[len(fakes_of_part) :]
    return why


def _forward_in_its_mode(captured: CapturedFunction, args: Sequence[Any]) -> list[Any]:
    """A class runs without grad mode, a plain function in it, but where it writes to what are leaves here.

    What autograd saves then is nobody's: hooks for it (a checkpoint's) hear of nothing.
    """
    with torch.set_grad_enabled(captured.is_plain and not captured.writes_inputs), without_hooks():
        return run_user_forward(captured, args)


def check_backward(
    captured: CapturedFunction,
    entry: BackwardEntry,
    residuals: Sequence[Any],
    sizes: Any,
    gradients: Sequence[Any],
    tape: Tape | None = None,
) -> None:
    """Raises CaptureError where a captured backward is not the user's method."""
    if not settings().check or ((entry.executables or entry.is_checked) and not entry.longest.are_longer(sizes)):
        return
    fakes = [*(captured.forward.fake_at(p) for p in captured.residual_places), *gradient_likes(captured)]
    values = shrink(captured, [*residuals, *gradients], fakes, entry.trace, sizes)
    if values is None:
        return
    # On cut data sizes are others; a tape recorded at the full ones does not fit.
    at = sizes_of_values(captured, values, fakes, sizes)
    if at is not sizes and tape is not None:
        return
    r = len(residuals)

    def users(inputs: Sequence[Any]) -> Sequence[Any]:
        results = run_user_backward(captured, inputs[:r], at, inputs[r:])
        return [reduce_to_argument(captured, i, g, at) for i, g in enumerate(results)]

    def mine(inputs: Sequence[Any]) -> Sequence[Any]:
        symbols = [at[s] for s in captured.backward_symbols]
        inputs = [v for v in (*inputs[:r], *symbols, *inputs[r:]) if v is not None]
        with captured.without_added_casts():
            lifted = [p.get() for p in entry.lifted if p is not None]
            return step_by_step(entry.trace.graph_module, *inputs, *lifted)  # type: ignore[no-any-return]

    replay = _RecordedCall(replay_opaque_nodes(mine, tape, bound := BoundSizes(at)))
    why = compare(captured, replay, replay_opaque_calls(users, tape), values, at is not sizes, tape or entry.trace)
    if why is not None:
        raise CaptureError(reason=why, where="unknown")
    entry.longest.note(sizes)
    correct_strides(captured, entry.trace, replay.results, bound)


def returns_memory_of(captured: CapturedFunction, inputs: Sequence[Any], results: Sequence[Any]) -> bool:
    """True if an output that the capture takes for a new tensor shows an argument: an operator's schema hid it."""
    argument_memory = {memory_of(t) for t in inputs if isinstance(t, Tensor) and t.layout is torch.strided}
    pairs = zip(results, output_kinds(captured.forward), strict=False)
    own = [r for r, kind in pairs if kind == "tensor" and isinstance(r, Tensor) and r.layout is torch.strided]
    return any(memory_of(r) in argument_memory for r in own)


def correct_strides(
    captured: CapturedFunction, trace: Trace, results: Sequence[Any], sizes: Sizes
) -> list[Tensor | None]:
    """Per output a fake with eager's strides where the captured one had others; the trace is told as well."""
    (outputs,) = trace.graph_module.graph.find_nodes(op="output")[0].args
    corrected: list[Tensor | None] = []
    for node, result in zip(outputs, results, strict=False):
        order = None if node is None else order_unlike(node.meta.get("val"), result, sizes)
        corrected.append(None if order is None else captured.session.fake_permuted(node.meta["val"], order))
        if corrected[-1] is not None:
            node.meta["val"] = corrected[-1]
            captured.restrided = True
    return corrected


def shrink(
    captured: CapturedFunction, values: Sequence[Any], fakes: Sequence[Any], trace: Trace, sizes: Sizes
) -> list[Any] | None:
    """The values, cut down where the user's method would fill memory; None where no cut is legal.

    Loops stay as long as they are: what a method does in a late step alone few steps do not show.
    """
    if intermediate_bytes(trace.graph_module, sizes) <= settings().check_bytes:
        return list(values)
    return cut_small(values, fakes, sizes, captured.session.conditions(sizes), near(trace.rolled, sizes))


def near(loops: Collection[sympy.Symbol], sizes: Sizes) -> list[sympy.Symbol]:
    """The sizes that are as long as one of these loops, or nearly so."""
    return [s for s, n in sizes.items() if any(abs(n - sizes[loop]) <= NEAR for loop in loops)]


def replay_forward(captured: CapturedFunction, args: Sequence[Any]) -> list[Any]:
    """The captured operations of forward, one by one."""
    with captured.without_added_casts():
        lifted = [r.get() for r in captured.lifted if r is not None]
        return list(step_by_step(captured.forward.trace.graph_module, *captured.tensors_of(args), *lifted))


def sizes_of_values(captured: CapturedFunction, values: Sequence[Any], fakes: Sequence[Any], sizes: Any) -> Any:
    """The sizes at which cut-down values stand; the given ones where nothing was cut."""
    present = [(v, f) for v, f in zip(values, fakes, strict=True) if v is not None and f is not None]
    bound = Binder([f for _, f in present])([v for v, _ in present])
    return sizes if all(sizes.get(s) == n for s, n in bound.items()) else BoundSizes({**sizes, **bound})


def compare(
    captured: CapturedFunction, mine: Any, users: Any, arguments: Sequence[Any], cut_down: bool, of: Trace | Tape
) -> str | None:
    """of: the graph, or the tape of its nested calls, which are not to be run again."""
    try:
        with functions_as_written():
            why = bitwise_difference(mine, users, arguments)
            if why is None or isinstance(of, Tape) or not takes_memory(of.graph_module):
                return why
            with MemoryFilled():  # type: ignore[no-untyped-call]
                return bitwise_difference(mine, users, arguments)
    except Exception:
        if cut_down or is_made_up():  # such data may be illegal for the method where the real data is not
            captured.unchecked = is_made_up()
            return None
        raise


class _RecordedCall:
    """A call that remembers its results."""

    def __init__(self, call: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        self.call, self.given, self.results = call, list[Any](), list[Any]()

    def __call__(self, arguments: Sequence[Any]) -> Sequence[Any]:
        self.given = list(arguments)
        self.results = list(self.call(arguments))
        return list(self.results)
