"""The Function of a C++ file as its users see it: parameters, defaults, the schema of its operator, results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....tracer.methods import method_place
from ..gather.gathered import ExportError, Gathered, require_nameable
from ..text.function import FunctionScopes
from .calls import literal
from .launchers import WORDS, function_name

TYPES = {float: ("double", "float"), int: ("int64_t", "int"), bool: ("bool", "bool"), str: ("std::string", "str")}
"""Arguments that are no tensors: in C++, in the schema of an operator. Any other is compiled in and not asked for."""


@dataclass
class Signature:
    """numbers: the values of arguments that are no tensors; parameters: the names of these and of tensors."""

    scopes: FunctionScopes

    def __post_init__(self) -> None:
        exported = self.scopes.exported
        self.function = function_name(exported)
        pairs = zip(exported.names, exported.args, strict=True)
        self.numbers: dict[str, Any] = {n: a for n, a in pairs if type(a) in TYPES}
        self.parameters = [n for n in exported.names if n in self.scopes.tensors or n in self.numbers]
        self.last_tensor = max((i for i, n in enumerate(self.parameters) if n in self.scopes.tensors), default=-1)

    def declared(self, defaults: bool = False) -> str:
        """ "const at::Tensor& x, double eps = 1e-06": defaults from the last tensor on."""
        words = []
        for i, name in enumerate(self.parameters):
            value = f" = {literal(self.numbers[name])}" if defaults and i > self.last_tensor else ""
            kind = TYPES[type(self.numbers[name])][0] if name in self.numbers else "const at::Tensor&"
            words.append(f"{kind} {name}{value}")
        return ", ".join(words)

    def schema(self) -> str:
        """ "rms_norm(Tensor x, float eps=1e-06) -> Tensor" """
        words = []
        for i, name in enumerate(self.parameters):
            if name not in self.numbers:
                words.append(f"Tensor {name}")
                continue
            value = f"={_in_schema(self.numbers[name])}" if i > self.last_tensor else ""
            words.append(f"{TYPES[type(self.numbers[name])][1]} {name}{value}")
        results = ", ".join(["Tensor"] * self.scopes.visible)
        return f"{self.function}({', '.join(words)}) -> {results if self.scopes.visible == 1 else f'({results})'}"

    def result_type(self) -> str:
        count = self.scopes.visible
        return "at::Tensor" if count == 1 else f"std::tuple<{', '.join(['at::Tensor'] * count)}>"


def _in_schema(value: Any) -> str:
    return str(value) if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else repr(value)


# ------------------------------------------------------------------ what has no text
def cpp_refusal(exported: Gathered, reason: str, fix: str) -> ExportError:
    """The error for a Function that a C++ file could not hold."""
    place = method_place(exported.cls.forward)  # type: ignore[attr-defined]
    return ExportError(function=exported.name, reason=reason, where=place, fix=fix)


def require_plain(signature: Signature) -> None:
    """Names that C++ can have, a CUDA target, and outputs that are tensors of their own."""
    exported = signature.scopes.exported
    require_nameable(exported.compiler, [exported.name], WORDS, ascii_only=True)
    require_nameable(exported.compiler, signature.parameters, (), ascii_only=True)
    if not exported.target.startswith("cuda:"):
        reason = f"C++ launches through the CUDA driver, not on {exported.target}"
        raise cpp_refusal(exported, reason, "name a cuda target.")
    forward = exported.specialization.captured.forward
    apart = all(o.kind in ("tensor", "object") for o in forward.outputs)
    if forward.dirty or exported.forward.graph.mutations or not apart:
        fix = "return tensors of its own, or export a Triton module (.py)."
        raise cpp_refusal(exported, "forward writes to an argument, or returns one or a view of one", fix)
