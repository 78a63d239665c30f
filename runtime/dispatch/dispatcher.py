"""Which way a call takes: an operator in another graph, a transform, DTensors, the user's class, a generated node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...ir.once import once
from ...ir.switches import takes
from ...tracer.capture.capture import OpaqueMet, capture_lock, is_capturing
from ...tracer.containers import opened
from ...tracer.opaque.opaque import Why, remember
from ...tracer.opaque.watching import Watcher, watcher
from ...tracer.torch_private import dual_level, is_fake, transforms_active
from ..autograd.graph_breaks import first_call
from ..autograd.graph_breaks import run as run_split
from ..autograd.node import node_of
from ..autograd.opaque_forward import opaque_forward_of
from ..capture.graph_mode import is_outer
from ..capture.guards import is_closure, is_meta
from ..capture.outputs import restore_passthrough_inputs
from ..distributed import call as distributed
from ..dynamo.call import called_within
from ..fallback.answer import contained
from ..fallback.effects import launching
from ..fallback.records import Attempt, Later, NotCaptured
from ..fast_path.inline_cache import Ready, shapes_of
from ..functorch.call import transformed
from ..persistence import found as found_on_disk
from ..specialize.compiled import Compiled
from ..specialize.specialization import Specialization


class Dispatcher(Compiled):
    """A class, and the calls of it."""

    ready: Ready

    def __init__(self, *options: Any) -> None:
        self.ready = Ready(self)
        super().__init__(*options)

    def found_on_disk(self, args: Sequence[Any]) -> tuple[Specialization | None, Any]:
        """What another process captured for such a call, and what keeps this one's."""
        return found_on_disk(self, args)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (watching := watcher()) is not None:
            return self._watched(watching, args, kwargs)
        if self._is_left_out():
            return self.as_written(*args, **kwargs)
        asked = args if not kwargs else None
        if self.setup_style and (kwargs or len(args) != len(self.parameters())):
            args, kwargs = self.bound(args, kwargs), {}
        if kwargs or (is_capturing() and not _is_linearized(args)):
            return self._followed(args, kwargs)
        if (around := _around(args)) is not None:
            return around(self, args)
        given = opened(args)
        specialization = self._found(given)
        if isinstance(specialization, Attempt | str):
            return self._instead(specialization, args)
        if specialization is not None and specialization.captured.opaque:
            return run_split(self, specialization, args)
        if specialization is None or not self._serves(specialization, given):
            return self.as_written(*args)
        return self._called(specialization, given, args, asked)

    def _followed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that somebody else follows: an operator in his graph, or the class as it is written."""
        if is_outer() and not kwargs:
            return called_within(self, args)
        self.seen_by_a_mode()
        return self.users(*args, **kwargs)

    def _is_left_out(self) -> bool:
        """Whether forward runs as written wherever it is called, but in somebody else's graph, which refuses it."""
        declared = self.methods.declared["forward"].value is False or "forward" in self.broken
        return declared and not (is_capturing() and is_outer())

    @launching
    def _called(self, specialization: Specialization, given: Any, args: tuple[Any, ...], asked: Any) -> Any:
        """The call itself; where it came often it is written out, as it was asked for: next time no one looks it up."""
        captured = specialization.captured
        key = self.node_key(specialization, self.backend_for(given))
        apply = node_of(self, specialization, key, given)
        kind = (specialization, key, shapes_of(given), torch.is_grad_enabled())
        if captured.given or any(map(is_closure, args)):  # what is written out returns what `apply` does
            asked = None  # and a closure, made for one call, would be looked into at every other
        if asked is not None and self.ready.is_due(kind) and takes("ready", captured.name):
            with contained(self, "forward", args):
                self._write_entry(kind, key, asked, given)
        keeper = specialization.keeper
        if keeper is None:
            return restore_passthrough_inputs(captured, apply(*args), args)
        try:
            result = apply(*args)
            with contained(self, "forward", args):
                keeper.keep_forward(specialization)
        finally:
            keeper.let_go()
        return restore_passthrough_inputs(captured, result, args)

    def _write_entry(self, kind: Any, key: Any, asked: Any, given: Any) -> None:
        from ..fast_path.entry_codegen import write_entry

        with capture_lock:
            self.ready.add(kind, asked, write_entry(self, kind[0], key, asked, given))

    def _watched(self, watching: Watcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call within a method that is captured, or recorded for that: it is the watcher's to decide."""
        declared = self.methods.declared["forward"]
        if declared.value is False:
            remember(self.cls, Why(declared.how.removeprefix("it "), True))
        elif self.setup_style and (kwargs or len(args) != len(self.parameters())):
            args, kwargs = self.bound(args, kwargs), {}
        return watching(self.cls, lambda *a, **k: self(a, k), args, kwargs)

    def _found(self, given: Sequence[Any]) -> Specialization | Attempt | str | None:
        """The specialisation for a call, or why there is none: without the error, which has frames of the call."""
        try:
            return self.specialization(given, patient=self.is_patient())
        except Later as later:
            return str(later)
        except NotCaptured as error:
            return error.attempt

    def _instead(self, failed: Attempt | str, args: tuple[Any, ...]) -> Any:
        """The call at which a capture failed, or waits."""
        if isinstance(failed, str):
            self.waits(failed)
            return self.users(*args)
        if isinstance(failed.error, OpaqueMet):
            return first_call(self, failed.error, args)
        return self.run_users(failed, args, self.as_written)

    def as_written(self, *args: Any, **kwargs: Any) -> Any:
        """forward as the user wrote it; backward is captured by itself, where it may be."""
        if is_capturing() or transforms_active() or dual_level() >= 0 or any(map(is_meta, args)):
            return self.users(*args, **kwargs)
        if "forward" in self.broken:
            return self.users(*args, **kwargs)
        return self.beside(*args, **kwargs)

    def on_parts(self, local: tuple[Any, ...], whole: Specialization | None) -> Any:
        """A call on the parts that this rank has, or by what was captured of it at the whole sizes."""
        return self(local, {}) if whole is None else self._called(whole, local, local, None)

    @once
    def beside(self) -> Callable[..., Any]:
        """The class with its forward as it is and a backward that is captured, or just as it is."""
        found = None
        with contained(self, "backward"):
            found = opaque_forward_of(self)
        if found is None and not hasattr(self.cls, "_fusegrad_sources"):
            self._put_on_record("backward")
        return found or self.users


def _around(args: tuple[Any, ...]) -> Callable[[Dispatcher, tuple[Any, ...]], Any] | None:
    """What takes a call with DTensors, or within a transform; None for one on plain tensors."""
    if distributed.has_dtensors(args):
        return lambda dispatcher, given: distributed.call(dispatcher, given, dispatcher.on_parts)
    return transformed if transforms_active() or dual_level() >= 0 else None


def _is_linearized(args: Sequence[Any]) -> bool:
    """Whether a tracer follows the tangents of real tensors (torch.func.linearize): the rules are needed for it."""
    return dual_level() >= 0 and not any(map(is_fake, args))
