"""Guards of a captured graph: facts compared by equality, and conditions on sizes as one function.

The facts hold everything that can change what a method does: dtypes, devices, requires_grad, constants, what is read
from outside, and torch's global state. Sizes and strides are left to the guard expression of the ShapeEnv.
"""

from __future__ import annotations

import ast
import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import sympy
import torch
from torch._dynamo.source import LocalSource
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

from ...ir.switches import switch_state
from ...ir.text.syntax_trees import parse_expression
from ...tracer.capture.capture import Session
from ...tracer.containers import DEPTH
from ...tracer.reads.reads import ANY, Reads
from ...tracer.reads.value_keys import freeze, why_unfit
from ...tracer.torch_private import function_modes

Guard = Callable[[Sequence[Any]], bool]


def is_float(value: Any) -> bool:
    """True if a value has a derivative: a tensor of real or complex floats."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def is_tracked(value: Any) -> bool:
    """True if autograd follows a value."""
    return isinstance(value, torch.Tensor) and value.requires_grad


def argument_fact(value: Any) -> Any:
    """The part of an argument that must be equal, whatever its sizes."""
    if isinstance(value, torch.Tensor):
        fact = (value.dtype, value.device, value.requires_grad, value.dim(), value.is_conj(), value.is_neg())
        return fact if is_plain(value) else (*fact, type(value))  # what serves plain tensors reads their memory
    return freeze(value, DEPTH)


def is_closure(value: Any) -> bool:
    """True if a value is a closure: the cells that it reads are looked up at every call."""
    return type(value) is types.FunctionType and value.__closure__ is not None


def is_meta(value: Any) -> bool:
    """True if a tensor has no data: such a call asks for shapes alone, which the methods tell in eager."""
    return isinstance(value, torch.Tensor) and value.is_meta


def unkeyed_state(args: Sequence[Any]) -> str | None:
    """The reason why no key can tell two states of an argument apart; None if one can."""
    constants = [a for a in args if not isinstance(a, torch.Tensor)]
    why = next((why for a in constants if (why := why_unfit(a, DEPTH))), None)
    unstable = next((a for a in constants if freeze(a, DEPTH) != freeze(a, DEPTH)), None) if why is None else None
    if unstable is None:
        return why
    return f"an argument holds more than can be compared at every call: a {type(unstable).__qualname__}"


def has_duplicate(args: Sequence[Any]) -> bool:
    """True if two arguments are one tensor."""
    tensors = [id(a) for a in args if isinstance(a, torch.Tensor)]
    return len(set(tensors)) < len(tensors)


def carried_attribute(args: Sequence[Any], names: Collection[str]) -> str | None:
    """The attribute of these names that someone put on a tensor argument, where there is one."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)] if names else ()
    return next((name for t in tensors for name in getattr(t, "__dict__", ()) if name in names or ANY in names), None)


def backward_guard_failure(reads: Reads, saved: Sequence[Any], gradients: Sequence[Any]) -> str | None:
    """A question that backward may ask of one call's tensors, unknown to its capture; None if there is none."""
    if reads.compares_identity:
        distinct = {id(t): t for t in saved if isinstance(t, torch.Tensor)}
        if has_duplicate((*distinct.values(), *gradients)):
            return "it may ask whether two tensors are one, which they are"
    name = carried_attribute((*saved, *gradients), reads.custom_attributes)
    return None if name is None else f"it is given a tensor that carries `{name}`"


def exact_key(args: Sequence[Any]) -> tuple[Any, ...]:
    """Everything about the arguments but their data: with it equal, no guard needs to be asked."""
    return tuple([_exact_tensor_key(a) if isinstance(a, torch.Tensor) else freeze(a, DEPTH) for a in args])


def _exact_tensor_key(t: torch.Tensor) -> tuple[Any, ...]:
    return (t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.is_conj(), t.is_neg(), type(t))


def global_state() -> tuple[Any, ...]:
    """torch's own state that a method may depend on, and which steps are left out."""
    return (
        *lasting_state(),
        torch.is_inference_mode_enabled(),
        function_modes() and str(torch.get_default_device()),
        switch_state(),
    )


def lasting_state() -> tuple[Any, ...]:
    """The part of it that backward sees, too, at the time when it runs."""
    return (
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """True if a tensor can be captured: strided, and no subclass but Parameter."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and tensor.layout is torch.strided


class LongestLoops:
    """The longest loops with which a graph was compared with the user's method.

    Its loops were recognised in short ones. What a method does only where a loop is long (`if len(x) > 1000`) no graph
    of a short one shows: a longer one than all before is compared again.
    """

    def __init__(self, symbols: Sequence[sympy.Symbol] = ()) -> None:
        self.lengths = dict.fromkeys(symbols, 0)

    def are_longer(self, sizes: Mapping[sympy.Symbol, Any]) -> bool:
        """True if a loop is longer at these sizes than those that were compared."""
        return bool(self.lengths) and any(sizes[s] > n for s, n in self.lengths.items())

    def note(self, sizes: Mapping[sympy.Symbol, Any]) -> None:
        """The graph was compared at these sizes."""
        self.lengths = {s: max(n, int(sizes[s])) for s, n in self.lengths.items()}


def size_guard(session: Session, fakes: Sequence[Any]) -> Guard:
    """The conditions on sizes, strides and symbolic integers under which the session's graphs hold, compiled once.

    Its `conditions` are their texts, over `L['t0']`, `L['t1']`, ...
    What is assumed of the results of opaque nodes is left to those nodes.
    """
    # Results of opaque nodes take part, so that torch can name every symbol.
    everything = [*fakes, *session.returned]
    sources = [LocalSource(f"t{i}") for i in range(len(everything))]
    conditions = session.env.produce_guards(cast(Any, everything), sources, ignore_static=False)
    # Conditions on them are dropped again: those nodes check them themselves.
    returned = tuple(f"L['t{i}']" for i in range(len(fakes), len(everything)))
    conditions = [c for c in conditions if not any(name in c for name in returned)]
    return guard_from([re.sub(r"L\['t\d+'\]\.storage_offset\(\)", "0", c) for c in conditions])


def guard_from(conditions: Sequence[str]) -> Guard:
    """The guard of such conditions."""
    guard: Any = _compile(conditions) if conditions else lambda tensors: True
    guard.conditions = list(conditions)
    return cast(Guard, guard)


def _text(conditions: Sequence[str]) -> str:
    text = " and ".join(f"({c})" for c in conditions)  # a condition may be a disjunction
    return re.sub(r"L\['t(\d+)'\]", r"t[\1]", text)


def _compile(conditions: Sequence[str]) -> Guard:
    text = _text(conditions)
    names: dict[str, Any] = dict(SYMPY_INTERP)
    body = f"def guard(t):\n try: return {text}\n except ZeroDivisionError: return False"  # a size is 0 that was not
    exec(body, names)  # the text is torch's own, over sizes alone
    return cast(Guard, names["guard"])


def compare_sizes_only(conditions: Sequence[str]) -> bool:
    """True if conditions, which may come from a file, only compare sizes and strides."""
    return not conditions or all(map(_is_size_expression, ast.walk(parse_expression(_text(conditions)))))


_OF_SIZES = (
    ast.Expression, ast.BoolOp, ast.boolop, ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop, ast.Compare, ast.cmpop,
    ast.IfExp, ast.Subscript, ast.Call, ast.expr_context,
)  # fmt: skip


def _is_size_expression(node: ast.AST) -> bool:
    """True if a part of an expression only compares and computes with sizes and strides."""
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float, bool)
    if isinstance(node, ast.Name):
        return node.id in _NAMES
    return isinstance(node, _OF_SIZES) or (isinstance(node, ast.Attribute) and node.attr in _ASKED)


_NAMES = ("t", "max", "min", "int", "math", "IsNonOverlappingAndDenseIndicator")
_ASKED = ("size", "stride", "ceil", "floor", "sqrt", "trunc")
