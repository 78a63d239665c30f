"""The keys of calls: what has to be equal for a specialization to serve another call, read of arguments and methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...tracer.capture.capture import capture_lock
from ...tracer.function import methods_now
from ...tracer.reads.reads import Reads
from ...tracer.reads.value_keys import possible_effects, shared_allowance
from ...tracer.trace import CaptureError
from ..capture.guards import argument_fact, carried_attribute, exact_key, global_state, has_duplicate
from .options import Options
from .user_class import CallCache, UserClass


class Keys:
    """The keys of one class's calls, and what its methods read besides their arguments."""

    def __init__(self, user: UserClass, inline_cache: CallCache, options: Options) -> None:
        self.user, self._inline_cache, self.options = user, inline_cache, options
        self.reads: Reads | None = None
        """What the methods read, at the last scan; None before the first."""
        self.is_unbounded = False
        """True if what is compared of a call was once more than can be."""
        self._versions: dict[Any, int] = {}

    def exact(self, args: Sequence[Any]) -> Any:
        """The key of calls that are alike in sizes and strides as well."""
        reads = self.reads_now()
        with shared_allowance():
            return (exact_key(args), global_state(), reads.version, reads.facts(), self._beyond(args))

    def facts(self, args: Sequence[Any]) -> Any:
        """The facts that have to be equal for a specialization to be used again, sizes and strides apart."""
        reads = self.reads_now()
        with shared_allowance() as is_spent:
            facts = (*map(argument_fact, args), *global_state(), reads.version, *reads.facts(), self._beyond(args))
            self.is_unbounded = self.is_unbounded or is_spent()
        return facts

    def _beyond(self, args: Sequence[Any]) -> Any:
        """The methods, what of the arguments they may ask for that no graph knows, and whether loops are loops."""
        return methods_now(self.user.original), self.why_unkeyed(args), self.options.rolls_loops(args)

    def why_unkeyed(self, args: Sequence[Any]) -> str | None:
        """A fact about the arguments that the methods may ask for and no graph knows; None where there is none."""
        reads = self.reads_now()
        if reads.compares_identity and has_duplicate(args):
            return "it may ask whether two arguments are one tensor, which they are"
        name = carried_attribute(args, reads.custom_attributes)
        return None if name is None else f"an argument is a tensor that carries `{name}`"

    # ------------------------------------------------------------------ what the methods read
    def reads_now(self) -> Reads:
        """The reads of the methods besides their arguments, scanned once."""
        if self.reads is None:
            with capture_lock:
                self.scan()
            assert self.reads is not None
        return self.reads

    def scan(self) -> bool:
        """Read the methods again, a number may have become a tensor, a helper another; whether anything did."""
        reads = self.user.methods.scan()
        self.user.follow_segments()
        reads.version = self._versions.setdefault(reads.signature(), len(self._versions))
        if self.reads is not None and reads.version == self.reads.version:
            return False
        self.reads = reads
        self._inline_cache.forget()
        return True

    def take_out(self, role: str, error: CaptureError) -> bool:
        """Take out of a method what its capture failed at; whether it is worth another attempt."""
        if not self.user.methods.take_out(role, error):
            return False
        self.reads = None
        self.reads_now()
        return True

    def opaque(self, role: str) -> CaptureError | None:
        """The reason why a role must not be captured, by declaration or by its code; None where it may be tried."""
        self.reads_now()
        return self.user.methods.opaque(role)

    def require_capturable(self) -> None:
        """Raises CaptureError where the class says, or its code shows, that forward must not be captured."""
        if (error := self.opaque("forward")) is not None:
            raise error

    def require_comparable(self, args: Sequence[Any]) -> None:
        """Raises CaptureError where no key would ever be found again; looks at functions that are arguments."""
        reads = self.reads_now()
        if reads.facts() != reads.facts():
            raise CaptureError(reason="what it reads is more than can be compared at every call", where="unknown")
        reads.add_argument_effects(possible_effects(args))
