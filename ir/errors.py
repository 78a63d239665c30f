"""Every error that fusegrad raises: one class each, its message declared with it (call, fact, place, way out)."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from typing import Any, ClassVar

from .codes import code_of, code_of_error

ENTRANCE = "__place_of_calls__"
"""The global by which a module that calls for the user, as the command line does, says what their place is."""


def users_line() -> str:
    """`file:line` of the innermost call that is neither fusegrad's nor torch's; else what an entrance says."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if ENTRANCE in frame.f_globals:
            return str(frame.f_globals[ENTRANCE])
        if str(frame.f_globals.get("__name__")).split(".")[0] not in _NOT_THE_USERS:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


_NOT_THE_USERS = {__name__.split(".")[0], "torch", "contextlib", "functools"}


class FusegradError(RuntimeError):
    """Base class of every error: the call, the fact, the place, the way out. A place not given is the user's call."""

    message: ClassVar[str] = "{detail}"
    """The template of the message."""
    speaks: ClassVar[str] = "to the user"
    """To whom it speaks: "to the user", "torch" (torch's own words), or "inside" (never leaves fusegrad, or reports a
    mistake of its own)."""
    facts: dict[str, Any]
    """What fills the template, by name: function, method, where, reason .."""

    def __init__(self, detail: str = "", **facts: Any) -> None:
        self.facts = {"detail": detail, **facts}
        if "{where}" in self.message:
            self.facts.setdefault("where", users_line())
        text = self.message.format(**self.facts)
        super().__init__(text.replace("\n  at:", f" [{self.code}]\n  at:", 1) if self.speaks == "to the user" else text)

    @property
    def code(self) -> str:
        """The code of the error, FG012 say, under which troubleshooting has more."""
        return code_of_error(type(self))


class InternalError(FusegradError):
    """A state that cannot be: a mistake of fusegrad, not of the user."""

    message = "internal: {detail}\n  at:   {where}\n  fix:  this is a fusegrad bug; please report it with your call."
    speaks = "inside"


class KeywordOnlyError(FusegradError, TypeError):
    """Arguments that can be given by keyword alone, where autograd takes arguments by position."""

    message = "{function}: autograd takes no keyword-only arguments, and {names} are\n  at:   {where}\n  fix:  {fix}"

    @classmethod
    def of(cls, function: str, names: Iterable[str]) -> KeywordOnlyError:
        """For a function that was given these."""
        fix = "take the `*` out of its parameters, so that they can be given by position."
        return cls(function=function, names=", ".join(names), fix=fix)


class InvalidGraphError(FusegradError):
    """A graph broke a rule of the IR: a mistake of fusegrad, not of the user."""

    speaks = "inside"
    message = (
        "invalid graph: {detail}\n  at:   {node}\n"
        "  fix:  this is a fusegrad bug; please report it with the text of the graph."
    )


class TypeRuleError(FusegradError):
    """A primitive was emitted with operands that its type rule refuses."""

    speaks = "inside"
    message = "{prim}: {detail}"


class ParseError(FusegradError):
    """The text of a graph could not be read back."""

    speaks = "inside"
    message = "line {line}: {detail}\n  at:   {text}"


class NotTraceableError(FusegradError):
    """A method that has to be traced (`fullgraph=True`, or `is_traceable = True`) could not be."""

    message = (
        "{function}.{method} cannot be traced: {reason}\n"
        "  at:   {where}\n"
        "  fix:  keep the operation out of the method, or drop `fullgraph=True` / declare `is_traceable = False` "
        "so that the method falls back to eager."
    )

    @property
    def code(self) -> str:
        """That of the reason."""
        return code_of(self.facts["reason"]) or super().code


class NotLaunchedError(NotTraceableError):
    """A method that has to be compiled (`fullgraph=True`, or `is_traceable = True`) has kernels that may not run."""

    message = (
        "{function}.{method} is traced, and launches no kernel: {reason}\n"
        "  at:   {where}\n"
        "  fix:  please report it. Without `fullgraph=True` / `is_traceable = True` torch runs it, one by one."
    )


class LoweringError(FusegradError):
    """A captured graph cannot be written in primitives; it is run as it was captured."""

    speaks = "inside"
    message = "cannot lower: {detail}"


class UnsupportedBackendError(FusegradError):
    """The backend asked for cannot run here."""

    message = "backend={backend!r} cannot run {what}: {reason}\n  at:   {where}\n  fix:  {fix}"


class KernelCompileError(FusegradError):
    """Triton refused or failed to compile a kernel that fusegrad emitted."""

    speaks = "inside"
    message = "kernel {kernel} does not compile for {target}: {reason}"


class KernelFaultError(FusegradError):
    """A kernel that fusegrad emitted failed while the interpreter ran it: a mistake of fusegrad, not of the user."""

    speaks = "inside"
    message = (
        "kernel {kernel}, program {program}: {reason}\n  at:   {where}\n"
        "  fix:  this is a fusegrad bug; please report it."
    )


class IndexOutOfRangeError(FusegradError, IndexError):
    """An index that is data is outside of what it indexes; eager raises IndexError or RuntimeError, this is both."""

    message = (
        "{kernel}: {operation}: an index is out of range\n"
        "  at:   {where}\n"
        "  fix:  keep every index below the size of the dimension that it is for, and at least 0 "
        "(x[index] also counts from the end, down to -size)."
    )


class SpecError(FusegradError, ValueError):
    """An argument specification such as "bf16[8192,4096]" could not be read."""

    message = (
        "explain(..., {spec!r}): not a tensor specification\n  at:   {where}\n"
        '  fix:  write dtype[size,size,...], for example "bf16[8192,4096]" or "i64[8192]"; names for sizes, as in\n'
        '        "bf16[M,N]", are for explain and export.'
    )


class Unfusible(FusegradError):
    """The code generator cannot emit a value; the runtime calls its operation as it is."""

    speaks = "inside"
    message = "cannot generate code for {value}: {reason}"

    def __init__(self, value: Any, reason: str) -> None:
        super().__init__(value=value, reason=reason)
        self.value, self.reason = value, reason
