"""One node in C++ on ATen: a library call between kernels, and every operation of a graph that runs on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from ....ir.prims import COMPARE, PREDICATES, Arg
from ....ir.types import FLOATS
from ...execution.aten.reference import find_op
from ..python.calls import (
    LOGICAL,
    RENAMED,
    SHARED,
    WORDS,
    Call,
    TextRule,
    checked_operands,
    einsum_letters,
    in_front,
    matrices,
    rule_of,
)

KINDS = {"b1": "kBool", "u8": "kByte", "i8": "kChar", "i16": "kShort", "i32": "kInt", "i64": "kLong", "f16": "kHalf",
         "bf16": "kBFloat16", "f32": "kFloat", "f64": "kDouble", "c64": "kComplexFloat", "c128": "kComplexDouble",
         "f8e4m3fn": "kFloat8_e4m3fn", "f8e5m2": "kFloat8_e5m2"}  # fmt: skip


def kind(dtype: str) -> str:
    """ "bf16" -> "at::kBFloat16" """
    return f"at::{KINDS[dtype]}"


def options(dtype: str, device: str) -> str:
    return f"at::dtype({kind(dtype)}).device({device})"


class CppCall(Call):
    """A node as the rules read it, spelled in C++ on ATen."""

    library, sum_dtype, least = "at::", ", false, {}", "INT64_MIN"

    @property
    def dtype(self) -> str:
        return kind(self.value.dtype)

    def axes(self, axes: Sequence[int]) -> str:
        return f"at::IntArrayRef({{{', '.join(map(str, axes))}}})"

    def text(self) -> str | None:
        """The expression; None for what has none."""
        rule = rule_of(RULES, self.value.prim, _elementwise)
        try:
            return None if rule is None else rule(self)
        except KeyError:
            return None  # a dtype that ATen has no name for here


def _elementwise(call: Call) -> str:
    prim, words = call.value.prim, ", ".join(call.operands)
    if prim in LOGICAL:
        return f"at::{'logical' if call.value.args[0].dtype == 'b1' else 'bitwise'}_{prim}({words})"
    if prim == "floordiv":
        return f'at::div({words}, "floor")'
    text = f"at::{RENAMED.get(prim, prim)}({words})"
    floats = call.value.dtype in FLOATS and {a.dtype for a in call.value.args} == {call.value.dtype}
    settled = floats or prim in COMPARE or prim in PREDICATES
    return text if settled else f"{text}.to({kind(call.value.dtype)})"


def _full(call: Call) -> str | None:
    value = call.value.params["value"]
    if isinstance(value, sympy.Basic) and not value.is_integer:
        return None
    number = call.expressions.text(value) if isinstance(value, sympy.Basic) else literal(value)
    return f"at::full({call.sizes('shape')}, {number}, {options(call.value.dtype, call.device)})"


def literal(value: Any) -> str:
    """A number, a word or nothing in C++."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        limits = "std::numeric_limits<double>::"
        return f"{limits}quiet_NaN()" if value != value else f"{'-' if value < 0 else ''}{limits}infinity()"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if value is None:
        return "c10::IValue()"
    if isinstance(value, int):
        return str(value) if abs(value) < 2**31 else f"INT64_C({value})"
    if isinstance(value, complex):
        raise KeyError("complex")
    return repr(float(value))


def _slice(call: Call) -> str:
    params, text = call.value.params, call.expressions.text
    sliced = call.operands[0]
    for axis, (start, stop, step, size) in enumerate(
        zip(params["start"], params["stop"], params["step"], call.value.args[0].shape, strict=True)
    ):
        if (start, stop, step) != (0, size, 1):
            sliced += f".slice({axis}, {text(start)}, {text(stop)}, {text(step)})"
    return sliced


def _pad(call: Call) -> str | None:
    params = call.value.params
    if any(params["inner"]):
        return None
    pairs = list(zip(params["lo"], params["hi"], strict=True))
    flat = [call.expressions.text(n) for pair in reversed(pairs) for n in pair]
    return f"at::constant_pad_nd({call.operands[0]}, {{{', '.join(flat)}}}, 0)"


def _dot(call: Call) -> str:
    if (pair := matrices(call, ".t()")) is not None:
        return f"at::matmul({', '.join(pair)})"
    return f'at::einsum("{einsum_letters(call)}", {{{", ".join(call.operands)}}})'


def _cumsum(call: Call) -> str:
    x, axis = call.operands[0], call.value.params["axis"]
    flip = f".flip({{{axis}}})" if call.value.params["reverse"] else ""
    return f"{x}{flip}.cumsum({axis}, {kind(call.value.dtype)}){flip}"


def _places(index: Sequence[str]) -> str:
    return f"c10::List<std::optional<at::Tensor>>({{{', '.join(index)}}})"


def _gather(call: Call) -> str:
    x, *index = call.operands
    order = in_front(call.value.params["axes"], call.value.args[0].ndim)
    return f"at::index({call.permuted(x, order)}, {_places(index)})"


def _scatter(call: Call) -> str:
    base, source, *index = checked_operands(call)
    order = in_front(call.value.params["axes"], call.value.args[0].ndim)
    adds = "true" if call.value.params["mode"] == "add" else "false"
    text = f"at::index_put({call.permuted(base, order)}, {_places(index)}, {source}, {adds})"
    return call.permuted(text, [order.index(a) for a in range(len(order))])


def _aten(call: Call) -> str | None:
    args, named = call.value.params["spec"]
    op = find_op(call.value.params["op"])
    by_name = {a.name: spec for a, spec in zip(op._schema.arguments, args, strict=False)} | dict(named)
    words = []
    for argument in op._schema.arguments:
        is_passed = argument.name in by_name
        if not is_passed and not argument.has_default_value():
            return None
        word = _argument(by_name[argument.name], call, str(argument.type)) if is_passed else _default(argument)
        if word is None:
            return None
        words.append(word)
    many = "" if len(op._schema.returns) > 1 and len(call.value.avals) > 1 else "[0]"
    return f'aten("{op._schema.name}", "{op._schema.overload_name}", {{{", ".join(words)}}}){many}'


def _default(argument: Any) -> str | None:
    value = argument.default_value
    if isinstance(value, list | tuple):
        return f"std::vector<int64_t>{{{', '.join(map(str, value))}}}" if all(type(v) is int for v in value) else None
    return _typed(literal(value)) if isinstance(value, bool | int | float | str | None) else None


def _typed(word: str) -> str:
    return f"int64_t({word})" if word.lstrip("-").isdigit() else word


def _argument(spec: Any, call: Call, type_name: str) -> str | None:
    if isinstance(spec, Arg):
        return call.operands[spec.index]
    if isinstance(spec, sympy.Basic):
        return f"int64_t({call.expressions.text(spec)})"
    if not isinstance(spec, tuple):
        if isinstance(spec, int) and not isinstance(spec, bool) and type_name.startswith(("float", "Optional[float]")):
            spec = float(spec)
        return None if isinstance(spec, complex) else _typed(literal(spec))
    if len(spec) == 2 and spec[0] in WORDS:
        return _word(spec[0], spec[1], call)
    if len(spec) == 2 and spec[0] == "axes":
        return call.in_order(call.operands[spec[1][0].index], spec[1][1])
    return _list(spec, call, type_name)


def _word(name: str, word: str, call: Call) -> str | None:
    if name == "dtype":
        return f"int64_t(static_cast<int>({kind(word)}))"
    return f"c10::IValue({call.device})" if name == "device" else None


def _list(spec: Sequence[Any], call: Call, type_name: str) -> str | None:
    words = [_argument(s, call, "") for s in spec]
    if None in words:
        return None
    if "Optional[Tensor]" in type_name or "Tensor?" in type_name:
        wrapped = ["std::nullopt" if w == "c10::IValue()" else str(w) for w in words]
        return f"c10::IValue(c10::List<std::optional<at::Tensor>>({{{', '.join(wrapped)}}}))"
    inner = "at::Tensor" if "Tensor" in type_name else "double" if "float" in type_name else "int64_t"
    return f"std::vector<{inner}>{{{', '.join(map(str, words))}}}"


RULES: dict[str, TextRule] = {
    **SHARED,
    "full": _full,
    "iota": lambda call: f"at::arange({call.number('size')}, {options(call.value.dtype, call.device)})",
    "slice": _slice,
    "pad": _pad,
    "cat": lambda call: f"at::cat({{{', '.join(call.operands)}}}, {call.value.params['axis']})",
    "cumsum": _cumsum,
    "dot": _dot,
    "gather": _gather,
    "scatter": _scatter,
    "aten": _aten,
}
"""Primitives that are missing (random numbers from a seed, nested calls, effects) only fusegrad's own code computes."""
