"""One node in plain torch: the text of a library call, of a view, or of an operation that no kernel took."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from string import ascii_lowercase
from typing import Any

import sympy

from ....ir import Value
from ....ir.passes.index_checks import indices_for_torch
from ....ir.prims import PRIMS, Arg
from ....tracer.dtypes import TO_TORCH
from ...execution.aten.reference import find_op
from ..text.expressions import Expressions

RENAMED = {"max": "maximum", "min": "minimum", "rem": "remainder", "shl": "bitwise_left_shift",
           "shr": "bitwise_right_shift", "conj": "conj_physical"}  # fmt: skip
"""Elementwise primitives that torch has by another name."""
LOGICAL = {"and", "or", "xor", "not"}
WORDS = ("dtype", "device", "layout", "memory_format")


class Call:
    """A node as the rules below read it, spelled in Python; `cpp/calls.py` spells the same parts in C++."""

    library, sum_dtype, least = "torch.", ", dtype={}", "-(1 << 63)"

    def __init__(self, value: Value, operands: Sequence[str], expressions: Expressions, device: str) -> None:
        self.value, self.operands, self.expressions, self.device = value, list(operands), expressions, device

    @property
    def dtype(self) -> str:
        return str(TO_TORCH[self.value.dtype])

    def sizes(self, name: str) -> str:
        return self.expressions.tuple(self.value.params[name])

    def number(self, name: str) -> str:
        parameter = self.value.params[name]
        return self.expressions.text(parameter) if isinstance(parameter, sympy.Basic) else _literal(parameter)

    def axes(self, axes: Sequence[int]) -> str:
        return repr(tuple(axes))

    def permuted(self, text: str, order: Sequence[int]) -> str:
        return text if list(order) == sorted(order) else f"{text}.permute({self.axes(order)})"

    def in_order(self, name: str, axes: Sequence[int]) -> str:
        """A tensor dense in memory, with these axes from the outermost inwards."""
        return self.permuted(f"{self.permuted(name, axes)}.contiguous()", [axes.index(a) for a in range(len(axes))])


TextRule = Callable[[Call], "str | None"]


def call_text(value: Value, operands: Sequence[str], expressions: Expressions, device: str) -> str | None:
    """The expression; None for what only fusegrad can compute."""
    rule = rule_of(RULES, value.prim, _elementwise)
    return None if rule is None else rule(Call(value, operands, expressions, device))


def rule_of(rules: Mapping[str, TextRule], prim: str, elementwise: TextRule) -> TextRule | None:
    """A primitive's own rule, or that of its family where torch has the operation by the same name."""
    return rules.get(prim, elementwise if PRIMS[prim].family == "elementwise" else None)


def _elementwise(call: Call) -> str:
    prim = call.value.prim
    if prim in LOGICAL:
        kind = "logical" if call.value.args[0].dtype == "b1" else "bitwise"
        return f"torch.{kind}_{prim}({', '.join(call.operands)})"
    if prim == "floordiv":
        return f'torch.div({", ".join(call.operands)}, rounding_mode="floor")'
    return f"torch.{RENAMED.get(prim, prim)}({', '.join(call.operands)}).to({call.dtype})"


def _broadcast(call: Call) -> str:
    """The operand with axes of size one for those that it lacks, then expanded."""
    (x,), (source,) = call.operands, call.value.args
    aligned: list[Any] = [1] * len(call.value.shape)
    for axis, size in zip(call.value.params["axes"], source.shape, strict=True):
        aligned[axis] = size
    return f"{x}.reshape({call.expressions.tuple(aligned)}).expand({call.sizes('shape')})"


def _slice(call: Call) -> str:
    params = call.value.params
    triples = zip(params["start"], params["stop"], params["step"], call.value.args[0].shape, strict=True)
    return f"{call.operands[0]}[{', '.join(_span(call, *t) for t in triples)}]"


def _span(call: Call, start: Any, stop: Any, step: Any, size: Any) -> str:
    text = call.expressions.text
    first, last = "" if start == 0 else text(start), "" if stop == size else text(stop)
    return f"{first}:{last}" if step == 1 else f"{first}:{last}:{text(step)}"


def matrices(call: Call, transposed: str) -> tuple[str, str] | None:
    """The operands of a dot as two matrices, each as it is or transposed; None where it is no product of matrices."""
    (x, y), (xs, ys, out) = call.operands, _dot_axes(call)
    if not (len(xs) == len(ys) == len(out) == 2 and out[0] in xs and out[1] in ys):
        return None
    return x if xs[0] == out[0] else f"{x}{transposed}", y if ys[1] == out[1] else f"{y}{transposed}"


def einsum_letters(call: Call) -> str:
    """ "ab,bc->ac" """
    x, y, out = ("".join(ascii_lowercase[i] for i in axes) for axes in _dot_axes(call))
    return f"{x},{y}->{out}"


def _dot_axes(call: Call) -> list[tuple[int, ...]]:
    return [tuple(call.value.params[k]) for k in ("x_axes", "y_axes", "out_axes")]


def _dot(call: Call) -> str:
    if (pair := matrices(call, ".T")) is not None:
        return " @ ".join(pair)
    return f'torch.einsum("{einsum_letters(call)}", {", ".join(call.operands)})'


def _reduction(call: Call) -> str:
    x, axes = call.operands[0], tuple(call.value.params["axes"])
    if not axes:
        return x
    if call.value.prim == "prod":
        return x + "".join(f".prod({a})" for a in sorted(axes, reverse=True))
    wide = call.sum_dtype.format(call.dtype) if call.value.prim == "sum" else ""
    return f"{x}.{call.value.prim}({call.axes(axes)}{wide})"


def _cumsum(call: Call) -> str:
    x, axis = call.operands[0], call.value.params["axis"]
    flip = f".flip({axis})" if call.value.params["reverse"] else ""
    return f"{x}{flip}.cumsum({axis}, dtype={x}.dtype){flip}"


def in_front(axes: Sequence[int], ndim: int) -> tuple[int, ...]:
    return (*axes, *(a for a in range(ndim) if a not in axes))


def _gather(call: Call) -> str:
    x, *index = call.operands
    order = in_front(call.value.params["axes"], call.value.args[0].ndim)
    return f"{call.permuted(x, order)}[{', '.join(index)}]"


def _checked(call: Call, index: str) -> str:
    """A negative index as the least there is: torch's indexing checks it, but counts others from the end."""
    return f"{call.library}threshold({index}, -1, {call.least})"


def checked_operands(call: Call) -> list[str]:
    """Those of a scatter, with the indices that nothing else checks."""
    base, source, *index = call.operands
    unchecked = indices_for_torch(call.value)
    return [base, source, *(_checked(call, i) if at in unchecked else i for at, i in enumerate(index))]


def _scatter(call: Call) -> str:
    base, source, *index = checked_operands(call)
    order = in_front(call.value.params["axes"], call.value.args[0].ndim)
    arguments = f"({', '.join(index)},), {source}, accumulate={call.value.params['mode'] == 'add'}"
    text = f"{call.permuted(base, order)}.index_put({arguments})"
    return call.permuted(text, [order.index(a) for a in range(len(order))])


def _pad(call: Call) -> str | None:
    params = call.value.params
    if any(params["inner"]):
        return None
    pairs = reversed(list(zip(params["lo"], params["hi"], strict=True)))
    return f"torch.constant_pad_nd({call.operands[0]}, {call.expressions.tuple([n for pair in pairs for n in pair])})"


def _aten(call: Call) -> str:
    args, named = call.value.params["spec"]
    words = [_argument(a, call) for a in args] + [f"{k}={_argument(v, call)}" for k, v in named]
    name = call.value.params["op"]
    text = f"torch.ops.{name}({', '.join(words)})"
    if len(find_op(name)._schema.returns) < 2:
        return text
    return f"present({text})" + ("[0]" if len(call.value.avals) == 1 else "")


def _argument(spec: Any, call: Call) -> str:
    if isinstance(spec, Arg):
        return call.operands[spec.index]
    if isinstance(spec, sympy.Basic):
        return call.expressions.text(spec)
    if not isinstance(spec, tuple):
        return _literal(spec)
    if len(spec) == 2 and isinstance(spec[0], str) and spec[0] in WORDS:
        return _word(spec[0], spec[1], call)
    if len(spec) == 2 and spec[0] == "axes":
        return call.in_order(call.operands[spec[1][0].index], spec[1][1])
    return f"[{', '.join(_argument(s, call) for s in spec)}]"


def _word(kind: str, word: str, call: Call) -> str:
    if kind == "device":
        return call.device
    return str(TO_TORCH[word]) if kind == "dtype" else f"torch.{word}"


def _literal(value: Any) -> str:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f'float("{value}")'
    return repr(value)


SHARED: dict[str, TextRule] = {
    "where": lambda call: f"{call.library}where({', '.join(call.operands)})",
    "cast": lambda call: f"{call.operands[0]}.to({call.dtype})",
    "check_index": lambda call: _checked(call, call.operands[0]),
    "broadcast": _broadcast,
    "reshape": lambda call: f"{call.operands[0]}.reshape({call.sizes('shape')})",
    "permute": lambda call: f"{call.operands[0]}.permute({call.axes(call.value.params['perm'])})",
    "flip": lambda call: f"{call.operands[0]}.flip({call.axes(call.value.params['axes'])})",
    **dict.fromkeys(("sum", "prod", "amax", "amin"), _reduction),
    **dict.fromkeys(
        ("argmax", "argmin"), lambda call: f"{call.operands[0]}.{call.value.prim}({call.value.params['axis']})"
    ),
}
"""Rules that Python and C++ have in common."""
RULES: dict[str, TextRule] = {
    **SHARED,
    "full": lambda call: (
        f"torch.full({call.sizes('shape')}, {call.number('value')}, dtype={call.dtype}, device={call.device})"
    ),
    "iota": lambda call: f"torch.arange({call.number('size')}, dtype={call.dtype}, device={call.device})",
    "slice": _slice,
    "cat": lambda call: f"torch.cat([{', '.join(call.operands)}], {call.value.params['axis']})",
    "cumsum": _cumsum,
    "dot": _dot,
    "gather": _gather,
    "scatter": _scatter,
    "pad": _pad,
    "aten": _aten,
    "aten_effect": _aten,
}
"""Primitives that are missing (random numbers, padding inside, nested calls) fusegrad's own code computes."""
