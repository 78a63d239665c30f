"""Which way a call takes: an operator in another graph, a transform, DTensors, the user's class, a generated node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ...ir.switches import should_run, with_slab_bytes
from ...tracer.capture.capture import OpaqueCallError, capture_lock, is_capturing
from ...tracer.opaque.opaque import Why, remember_opaque
from ...tracer.torch_private import dual_level, transforms_active, without_tangents
from ..autograd.graph_breaks import first_call
from ..autograd.graph_breaks import run as run_split
from ..autograd.node import node_of
from ..autograd.opaque_forward import opaque_forward_of
from ..capture.guards import is_closure, is_meta
from ..capture.outputs import restore_passthrough_inputs
from ..compiled.budget import VAIN
from ..compiled.compiled import Compiled
from ..compiled.options import Options
from ..distributed import call as distributed
from ..dynamo.call import trace_call
from ..fallback.answer import recorded_faults
from ..fallback.effects import launching
from ..fallback.records import Attempt
from ..fast_path.inline_cache import InlineCache, shapes_of
from ..functorch.call import call_under_transform
from ..persistence import lookup as find_stored
from ..specialize.specialization import Specialization
from .call import Call, Mode, Outcome


class Dispatcher(Compiled):
    """A class, and the calls of it."""

    inline_cache: InlineCache

    def __init__(self, cls: type, options: Options) -> None:
        self.inline_cache = InlineCache(self)
        super().__init__(cls, options)

    def stored(self, args: Sequence[Any]) -> tuple[Specialization | None, Any]:
        """The capture of another process for such a call, and the keeper of this one's."""
        return find_stored(self, args)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.options.slab_bytes is not None:
            with with_slab_bytes(self.options.slab_bytes):
                return self._route(Call(self, args, kwargs))
        return self._route(Call(self, args, kwargs))

    def _route(self, call: Call) -> Any:
        return ROUTES[call.mode](self, call)

    @launching
    def run(self, specialization: Specialization, given: Any, args: tuple[Any, ...], asked: Any) -> Any:
        """The call itself; where it came often it is written out, as it was given: next time it is not looked up.

        given: the arguments with what is in containers; asked: as they were given, None where no entry is written.
        """
        captured = specialization.captured
        key = self.node_key(specialization, self.options.backend_for(given))
        apply = node_of(self, specialization, key, given)
        kind = (specialization, key, shapes_of(given), torch.is_grad_enabled())
        if captured.passthrough or any(map(is_closure, args)):  # what is written out returns what `apply` does
            asked = None  # and a closure, made for one call, would be looked into at every other
        if asked is not None and self.inline_cache.should_compile(kind) and should_run("ready", captured.name):
            with recorded_faults(self, "forward", args):
                self._write_entry(kind, key, asked, given)
        keeper = specialization.keeper
        if keeper is None:
            return restore_passthrough_inputs(captured, apply(*args), args)
        try:
            result = apply(*args)
            with recorded_faults(self, "forward", args):
                keeper.keep_forward(specialization)
        finally:  # what was computed does not depend on it
            with recorded_faults(self, "forward", args):
                keeper.release()
        return restore_passthrough_inputs(captured, result, args)

    def _write_entry(self, kind: Any, key: Any, asked: Any, given: Any) -> None:
        from ..fast_path.entry_codegen import write_entry

        with capture_lock:
            self.inline_cache.add(kind, asked, write_entry(self, kind[0], key, asked, given))

    def as_written(self, *args: Any, **kwargs: Any) -> Any:
        """forward as the user wrote it; backward is captured by itself, where it may be."""
        if is_capturing() or transforms_active() or dual_level() >= 0 or any(map(is_meta, args)):
            return self.user.run(*args, **kwargs)
        if "forward" in self.ledger.broken:
            return self.user.run(*args, **kwargs)
        cls = self.user.cls  # another one once segments are taken out of its methods
        entry = self.eager_forward
        if entry is None or entry[0] is not cls:
            entry = self.eager_forward = cls, self._make_eager_forward()
        return entry[1](*args, **kwargs)

    def on_parts(self, local: tuple[Any, ...], whole: Specialization | None) -> Any:
        """A call on the parts that this rank has, or by what was captured of it at the whole sizes."""
        return self(local, {}) if whole is None else self.run(whole, local, local, None)

    def _make_eager_forward(self) -> Callable[..., Any]:
        """The class with its forward as it is and a backward that is captured, or just as it is."""
        apply = None
        with recorded_faults(self, "backward"):
            apply = opaque_forward_of(self)
        if apply is None and self.user.plain_function is None:
            self.ledger.note_opaque("backward", self.keys.opaque("backward"))
        return apply or self.user.run


# ------------------------------------------------------------------ the ways of a call
def _intercepted(dispatcher: Dispatcher, call: Call) -> Any:
    """A call within a method that is traced, or recorded for that: it is the watcher's to decide."""
    assert call.watching is not None
    declared = dispatcher.user.methods.declared["forward"]
    if declared.value is False:
        remember_opaque(dispatcher.user.cls, Why(declared.how.removeprefix("it "), True))
    else:
        call.bind()
    return call.watching(dispatcher.user.cls, lambda *a, **k: dispatcher(a, k), call.args, call.kwargs)


def _eager(dispatcher: Dispatcher, call: Call) -> Any:
    return dispatcher.as_written(*call.args, **call.kwargs)


def _observed(dispatcher: Dispatcher, call: Call) -> Any:
    dispatcher.ledger.note_observed()
    return dispatcher.user.run(*call.args, **call.kwargs)


def _compiled(dispatcher: Dispatcher, call: Call) -> Any:
    assert isinstance(call.known, Specialization)
    return dispatcher.run(call.known, call.opened, call.args, call.as_given)


def _waiting(dispatcher: Dispatcher, call: Call) -> Any:
    assert isinstance(call.known, str)
    dispatcher.ledger.note_waiting(call.known, call.known == VAIN)
    return dispatcher.user.run(*call.args)


def _refused(dispatcher: Dispatcher, call: Call) -> Any:
    assert isinstance(call.known, Attempt)
    return dispatcher.run_refused(call.known, call.args, dispatcher.as_written)


def _first_split(dispatcher: Dispatcher, call: Call) -> Any:
    assert isinstance(call.known, Attempt) and isinstance(call.known.error, OpaqueCallError)
    return first_call(dispatcher, call.known.error, call.args)


def _plain(dispatcher: Dispatcher, call: Call) -> Any:
    with without_tangents() if dual_level() >= 0 else nullcontext():
        return PLAIN_ROUTES[call.outcome](dispatcher, call)


ROUTES: dict[Mode, Callable[[Dispatcher, Call], Any]] = {
    Mode.INTERCEPTED: _intercepted,
    Mode.EAGER: _eager,
    Mode.FOREIGN_GRAPH: lambda dispatcher, call: trace_call(dispatcher, call.args),
    Mode.OBSERVED: _observed,
    Mode.DISTRIBUTED: lambda dispatcher, call: distributed.call(dispatcher, call.args, dispatcher.on_parts),
    Mode.TRANSFORMED: lambda dispatcher, call: call_under_transform(dispatcher, call.args),
    Mode.PLAIN: _plain,
}
"""Every way that a call can take from here; docs/how_it_works.md says where each goes on."""

PLAIN_ROUTES: dict[Outcome, Callable[[Dispatcher, Call], Any]] = {
    Outcome.COMPILED: _compiled,
    Outcome.SPLIT: lambda dispatcher, call: run_split(dispatcher, call.known, call.args),  # type: ignore[arg-type]
    Outcome.FIRST_SPLIT: _first_split,
    Outcome.REFUSED: _refused,
    Outcome.WAITS: _waiting,
    Outcome.EAGER: _eager,
}
"""The same for calls on plain tensors, by what the table of the class has for them."""
