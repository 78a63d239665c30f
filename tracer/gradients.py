"""The gradients that a backward returned: their number, their shapes, and the line that returned them."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ..ir.errors import FusegradError
from .methods import as_tuple, backward_method, method_place, parameter_names, uses_setup_context

RETURNS = ("RETURN_VALUE", "RETURN_CONST")


class GradientCountError(FusegradError):
    """backward returned too few or too many gradients. The sentence begins with torch's own."""

    message = (
        "function {function}Backward returned an incorrect number of gradients (expected {expected}, got {got}): {fact}"
        "\n  at:   {where}\n"
        "  fix:  return one gradient for each argument of forward ({names}), None where there is none."
    )


class GradientShapeError(FusegradError):
    """backward returned a gradient of a shape that is not its argument's. The sentence begins with torch's own."""

    message = (
        "Function {function}Backward returned an invalid gradient at index {index} - got {got} but expected shape "
        "compatible with {expected}: it is the gradient of `{name}`\n  at:   {where}\n"
        "  fix:  return a gradient of the shape of `{name}`, or one that broadcasting makes of it (it is summed)."
    )


class GradientWarning(UserWarning):
    """A method gives no gradient, or a wrong one, by a slip that torch does not tell of."""


def exact_gradients(cls: type, result: Any, count: int) -> tuple[Any, ...]:
    """backward's result as a tuple of `count` gradients; extra trailing Nones are dropped, as torch does."""
    gradients = as_tuple(result)
    if len(gradients) < count or any(g is not None for g in gradients[count:]):
        raise _count_error(cls, result, gradients, count)
    return gradients[:count]


def _count_error(cls: Any, result: Any, gradients: Sequence[Any], count: int) -> GradientCountError:
    names = [f"`{n}`" for n in parameter_names(cls.forward, count, 0 if uses_setup_context(cls) else 1, "argument")]
    method = backward_method(cls) or cls.forward
    fact = f"none for {', '.join(names[len(gradients) :])}" if len(gradients) < count else "more than it has arguments"
    if result is None and lacks_return(method):
        fact = "it has no `return`"
    return GradientCountError(
        function=cls.__name__, expected=count, got=len(gradients), fact=fact, names=", ".join(names),
        where=return_place(method),
    )  # fmt: skip


def shape_error(cls: Any, index: int, name: str, got: Sequence[int], expected: Sequence[int]) -> GradientShapeError:
    """The error for the gradient of one argument."""
    where = return_place(backward_method(cls) or cls.forward)
    return GradientShapeError(
        function=cls.__name__, index=index, name=name, where=where, got=list(got), expected=list(expected)
    )


def is_summable(shape: Sequence[int], gradient: Sequence[int]) -> bool:
    """True if autograd sums a gradient of this shape to the argument's `shape`."""
    pairs = zip(reversed(shape), reversed(gradient), strict=False)
    return len(shape) <= len(gradient) and all(n in (1, m) for n, m in pairs)


# ------------------------------------------------------------------ where a method returns
def return_place(method: Callable[..., Any]) -> str:
    """`file:line` of a method's `return`; of the method where it has several, or none."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    if code is None or lacks_return(method):
        return method_place(method)
    lines = {i.positions.lineno for i in dis.get_instructions(code) if i.opname in RETURNS and i.positions}
    return f"{code.co_filename}:{lines.pop()}" if len(lines) == 1 else method_place(method)


def lacks_return(method: Callable[..., Any]) -> bool:
    """True if the source of a method is known, and has no `return` in it."""
    try:
        return "return" not in inspect.getsource(inspect.unwrap(method))
    except (OSError, TypeError):
        return False
