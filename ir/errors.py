"""Every error that fusegrad raises: one class each, its message declared with it (call, fact, place, way out)."""

from __future__ import annotations

from typing import Any, ClassVar


class FusegradError(RuntimeError):
    """Base class. `message` is a template; the keyword arguments that fill it stay readable as attributes."""

    message: ClassVar[str] = "{detail}"

    def __init__(self, detail: str = "", **facts: Any) -> None:
        self.facts = {"detail": detail, **facts}
        super().__init__(self.message.format(**self.facts))


class InvalidGraphError(FusegradError):
    """A graph broke a rule of the IR: a mistake of fusegrad, not of the user."""

    message = (
        "invalid graph: {detail}\n  at:   {node}\n"
        "  fix:  this is a fusegrad bug; please report it with the text of the graph."
    )


class TypeRuleError(FusegradError):
    """A primitive was emitted with operands that its type rule refuses."""

    message = "{prim}: {detail}"


class ParseError(FusegradError):
    """The text of a graph could not be read back."""

    message = "line {line}: {detail}\n  at:   {text}"


class NotTraceableError(FusegradError):
    """A method that has to be captured (`fullgraph=True`, or `is_traceable = True`) could not be."""

    message = (
        "{function}.{method} cannot be captured: {reason}\n"
        "  at:   {where}\n"
        "  fix:  keep the operation out of the method, or drop `fullgraph=True` / declare `is_traceable = False` "
        "so that the method runs as you wrote it."
    )


class LoweringError(FusegradError):
    """A captured graph cannot be written in primitives; it is run as it was captured."""

    message = "cannot lower: {detail}"


class UnsupportedBackendError(FusegradError):
    """The backend asked for cannot run here."""

    message = "backend={backend!r} cannot run {what}: {reason}\n  fix:  {fix}"


class KernelCompileError(FusegradError):
    """Triton refused or failed to compile a kernel that fusegrad emitted."""

    message = "kernel {kernel} does not compile for {target}: {reason}"


class KernelFaultError(FusegradError):
    """A kernel that fusegrad emitted failed while the interpreter ran it: a mistake of fusegrad, not of the user."""

    message = (
        "kernel {kernel}, program {program}: {reason}\n  at:   {where}\n"
        "  fix:  this is a fusegrad bug; please report it."
    )


class SpecError(FusegradError, ValueError):
    """An argument specification such as "bf16[8192,4096]" could not be read."""

    message = (
        "cannot read {spec!r} as a tensor specification\n"
        '  fix:  write dtype[size,size,...], for example "bf16[8192,4096]" or "i64[8192]".'
    )


class Unfusible(FusegradError):
    """The code generator cannot emit a value; the runtime calls its operation as it is."""

    message = "cannot generate code for {value}: {reason}"

    def __init__(self, value: Any, reason: str) -> None:
        super().__init__(value=value, reason=reason)
        self.value, self.reason = value, reason
