"""The class that the user wrote, and the classes that stand for it: captured, in eager, within a capture."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.autograd.function import Function

from ...ir.errors import KeywordOnlyError
from ...ir.lazy_attribute import lazy_attribute
from ...tracer.capture.capture import is_capturing
from ...tracer.containers import open_containers
from ...tracer.methods import backward_method, plain_function, signature_objects, uses_setup_context
from ...tracer.reads.packages import home_of
from ...tracer.reads.value_keys import HOMES
from ...tracer.torch_private import torchs_apply, transforms_active
from ..fallback.answer import hand_over
from .derived_backward import with_derived_backward
from .function_class import with_opaque_backward
from .options import Options
from .traceability import Traceability


class CallCache(Protocol):
    """The inline cache of a class's calls, as it is known here: `fast_path/inline_cache.py` has it."""

    forms: Any

    def forget(self) -> None:
        """Drop what was written out for calls: it no longer holds."""

    def learn_form(self, signature: inspect.Signature, count: int, keywords: Any, method: Any) -> None:
        """Calls with these keywords become calls by position."""


class UserClass:
    """One class by its methods as they are now; segments are taken out of them while captures fail."""

    def __init__(self, cls: type, options: Options, inline_cache: CallCache) -> None:
        HOMES.add(home_of(cls))
        self.methods = Traceability(cls, options.traceable)
        self.original = cls
        """The class that `compile` was given."""
        self.cls = with_derived_backward(cls, self.methods)
        """The class that is captured."""
        self.derives_backward = self.cls is not cls
        self.methods.segmented.allowed &= not (options.fullgraph or self.derives_backward)
        self.setup_style = uses_setup_context(cls)
        self.plain_function = plain_function(cls)
        """The function that the class was made of, where `compile` was given one."""
        self.uncompiled = self._uncompiled()
        """The class that runs where nothing is captured."""
        self._inline_cache = inline_cache
        self._signed: tuple[tuple[Any, ...], inspect.Signature] | None = None

    def _uncompiled(self) -> type:
        """The class itself; with a break of compiled autograd's graph around a backward that is declared opaque."""
        method = backward_method(self.cls)
        is_opaque = method is not None and self.methods.declared["backward"].value is False
        return with_opaque_backward(self.cls, method) if method is not None and is_opaque else self.cls

    def follow_segments(self) -> None:
        """Go on with the rewritten class, where what could not be captured was taken out of the methods."""
        if not self.methods.segmented.allowed or self.methods.cls is self.cls:
            return
        self.cls = self.methods.cls
        self.uncompiled = self._uncompiled()
        vars(self).pop("within_capture", None)

    @lazy_attribute
    def within_capture(self) -> type:
        """The class as a capture around it sees it: opaque as a whole where one of its methods is declared so."""
        if not self.methods.declared_opaque():
            return self.cls
        flags = {"is_traceable": False, "traceable": dict.fromkeys(self.methods.declared, False)}
        names = {"__module__": self.cls.__module__, "__qualname__": self.cls.__qualname__}
        return type(self.cls.__name__, (self.cls,), {**flags, **names})

    # ------------------------------------------------------------------ arguments
    def signature(self) -> inspect.Signature:
        """Of forward, in setup_context style: as it is now, defaults may be assigned."""
        forward = self.cls.forward  # type: ignore[attr-defined]
        now = signature_objects(forward)
        if self._signed is None or not all(map(operator.is_, now, self._signed[0])):
            self._inline_cache.forms.clear()
            self._signed = now, inspect.signature(forward)
        return self._signed[1]

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments by position, defaults filled in."""
        signature = self.signature()
        parameters = signature.parameters
        names = [k for k in kwargs if k in parameters and parameters[k].kind is inspect.Parameter.KEYWORD_ONLY]
        if names:
            self._refuse_keyword_only(names, args, kwargs)
        if kwargs:
            forward = lambda: self.cls.forward  # type: ignore[attr-defined]  # noqa: E731
            self._inline_cache.learn_form(signature, len(args), kwargs, forward)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args

    def _refuse_keyword_only(self, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise as torch.func does where a transform is active; otherwise torch calls unexpected what forward has."""
        if transforms_active():
            self.run(*args, **kwargs)
        raise KeywordOnlyError.of(self.cls.__name__, names)

    def complete(self, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments with defaults filled in, where the class's style fills them in; containers opened."""
        if self.setup_style and len(args) != len(self.signature().parameters):
            args = self.bind(tuple(args), {})
        return open_containers(args)

    # ------------------------------------------------------------------ methods
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The class, or the plain function, in eager."""
        return hand_over(self.eager(), *args, **kwargs)

    def eager(self) -> Callable[..., Any]:
        """The callable of `run`: torch's `apply` of the class, or the plain function."""
        if self.plain_function is not None:
            return self.plain_function
        return torchs_apply(self.within_capture if is_capturing() else self.uncompiled)

    def overrides(self, method: str) -> bool:
        """True if the class has a method of its own where torch has a default."""
        return getattr(self.cls, method) is not getattr(Function, method)

    def method(self, name: str) -> Any:
        """A method by its role: backward may be written as vjp."""
        return backward_method(self.cls) if name == "backward" else getattr(self.cls, name)
