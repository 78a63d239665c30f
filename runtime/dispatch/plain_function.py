"""A plain function of tensors, compiled: it becomes a Function whose backward is the derivative of its own body.

What autograd sees of a body is more than a Function can tell it: what it would not tell runs as written.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.function import Function

from ...ir.errors import KeywordOnlyError
from ...tracer.capture.capture import is_capturing
from ...tracer.capture.grad_mode import Switches
from ...tracer.containers import leaves
from ...tracer.declared import DeclarationError
from ...tracer.frames import user_line
from ...tracer.methods import as_tuple, method_place
from ...tracer.opaque.watching import watcher
from ...tracer.trace import CaptureError
from ..capture.guards import is_float, is_tracked
from ..compiled.options import Options
from ..dynamo.graph_names import name_in_graphs
from ..functorch.vjp import vjp_of
from .entry import function_shown

Tensor = torch.Tensor


def compile_function(fn: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """`fn` with its tensors captured; keyword arguments and defaults work as in `fn`.

    options.traceable: True where `fn` must be captured; where it is False, `fn` runs as it is.
    """
    from ..dynamo.call import in_dynamos_graph
    from .compiled_class import compile_class

    require_one_body(fn, options.traceable)
    fast = compile_class(function_class(fn), options)
    signature = signature_of(fn)

    def run(*args: Any, **kwargs: Any) -> Any:
        if options.traceable is False:
            return fn(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.kwargs:
            raise KeywordOnlyError.of(fn.__name__, bound.kwargs)
        return fast.apply(*bound.args)  # type: ignore[attr-defined]

    def within(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return in_dynamos_graph(fast._fusegrad, args, kwargs, run)  # type: ignore[attr-defined]

    compiled = function_shown(fn, name_in_graphs(fast, within), run)
    vars(compiled).update(_fusegrad=fast._fusegrad, _fusegrad_within=within)  # type: ignore[attr-defined]
    return compiled


def require_one_body(fn: Callable[..., Any], traceable: Any) -> None:
    """A function has one body: `traceable` says one thing of it."""
    if traceable is None or type(traceable) is bool:
        return
    raise DeclarationError(
        function=getattr(fn, "__name__", type(fn).__name__),
        what=f"compile(traceable=...) of a plain function must be exactly a bool, not {type(traceable).__name__}",
        where=user_line(),
        fix="write True or False; only the methods of a Function class are told apart",
    )


def signature_of(fn: Callable[..., Any]) -> inspect.Signature:
    """The parameters of `fn`; any number by position for a built-in that does not tell."""
    try:
        return inspect.signature(fn)
    except ValueError:
        return inspect.signature(lambda *args: None)


def watched(fn: Callable[..., Any], args: Sequence[Any], switches: Switches) -> Any:
    """The body, captured in grad mode, as eager runs it: its results tell whether they need a gradient.

    So is what a capture is compared with: a product folds an axis or not by whether an operand needs one.

    Raises CaptureError where something else would need one: autograd does not look into the containers of a Function.
    """
    untracked = [a for a in args if isinstance(a, Tensor) and not a.requires_grad]
    captured = is_capturing()
    mode = torch.set_grad_enabled(captured or torch.is_grad_enabled())
    with mode, switches if captured else nullcontext(), following(watcher()):
        output = fn(*args)
    if captured and (why := _unseen(args, output, untracked)) is not None:
        raise CaptureError(reason=why, where=method_place(fn))
    return output


@contextmanager
def following(watching: Any) -> Iterator[None]:
    """Opaque calls stay nodes of the graph, though grad mode is on."""
    before = getattr(watching, "follows", None)
    if before is None:
        yield
        return
    watching.follows = True
    try:
        yield
    finally:
        watching.follows = before


def _unseen(args: Sequence[Any], output: Any, untracked: Sequence[Tensor]) -> str | None:
    """A value that needs a gradient where autograd would not see it, in words; None where there is none."""
    if any(map(_holds_tracked, args)):
        return "a tensor in a container that it is given requires grad, for which compile has pytree=True"
    if any(map(_holds_tracked, as_tuple(output))):
        return "a tensor in a container that it returns requires grad, for which compile has pytree=True"
    if any(map(is_tracked, untracked)):
        return "it writes what requires grad to an argument that does not"
    return None


def _holds_tracked(value: Any) -> bool:
    return not isinstance(value, Tensor) and any(map(is_tracked, leaves(value)))


def function_class(fn: Callable[..., Any]) -> type:
    """A setup_context-style Function around `fn`: forward is `fn`, backward its vjp, of the inputs alone.

    On kernel backends forward hands over what backward would do again (`ir/passes/programs/overlap.py`).
    """

    switches = Switches()

    def forward(*args: Any) -> Any:
        return watched(fn, args, switches)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        made = (o for o in as_tuple(output) if is_float(o) and not any(o is a for a in inputs))
        ctx.mark_non_differentiable(*[o for o in made if not o.requires_grad])
        ctx.save_for_backward(*[a if isinstance(a, Tensor) else None for a in inputs])
        ctx.others = tuple(None if isinstance(a, Tensor) else a for a in inputs)

    def backward(ctx: Any, *gradients: Any) -> Any:
        args = [t if t is not None else o for t, o in zip(ctx.saved_tensors, ctx.others, strict=True)]
        # Eager keeps for a gradient only what that one needs: what it does not keep may be written to.
        return tuple(vjp_of(lambda *a: as_tuple(fn(*a)), args, gradients, tuple(ctx.needs_input_grad)))

    rules = {"forward": forward, "setup_context": setup_context, "backward": backward}
    body: dict[str, Any] = {name: staticmethod(rule) for name, rule in rules.items()}
    forward.__signature__ = signature_of(fn)  # type: ignore[attr-defined]
    name = getattr(fn, "__name__", type(fn).__name__)
    body |= {"_fusegrad_plain_function": (fn,), "_fusegrad_switches": switches, "_fusegrad_keeps_arguments": True}
    return type(name, (Function,), {**body, "__module__": fn.__module__, "__doc__": fn.__doc__})
