"""Rules of the nodes that are not primitives: `aten` (the rules of one op) and `call` (a nested Function's own).

They come from outside as graphs to inline, in the symbols of the caller, memoised by their supplier. `node` is
the node itself: its `params` say what is called, its `args` and `avals` of what types.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..errors import FusegradError, InvalidGraphError
from ..graph import Graph, Value
from ..types import Size
from .ops import inline, same_type


class Batched(NamedTuple):
    """A graph over a batch, and which of its outputs have the batch axis, in front; the rest is one for all lanes."""

    graph: Graph
    mapped: tuple[bool, ...]


class ExternRules(Protocol):
    """A supplier of rules. Its graphs take operands and results of the node as the node has them."""

    def batch(self, node: Value, mapped: tuple[bool, ...], size: Size, randomness: str) -> Batched:
        """operands, the mapped ones with a leading axis of `size`  ->  one output per result of the node"""

    def jvp(self, node: Value, wrt: tuple[int, ...]) -> Graph:
        """operands, results, tangents of the operands `wrt`  ->  tangents of the results, None for zero"""

    def vjp(self, node: Value, wrt: tuple[int, ...], cotangent_of: tuple[int, ...]) -> Graph:
        """operands, results, cotangents of results `cotangent_of`  ->  cotangents of operands `wrt`, None for zero"""

    def is_linear(self, node: Value, wrt: tuple[int, ...]) -> bool | None:
        """True if the results are linear in the operands `wrt` together; None if unknown.

        Where they are, `vjp` may be given zeros for these operands and for the results.
        """

    def keeps_zero(self, node: Value, wrt: tuple[int, ...]) -> bool:
        """True if the results are certainly zero where the operands `wrt` are: linear in these."""


class NoRuleError(FusegradError):
    """A transform met an operation that it cannot be applied to."""

    message = (
        "{transform}: `{op}` {why}\n  at:   {where}\n"
        "  fix:  write the rule in the Function (`backward`, `jvp` or `vmap`), or keep the operation out of it."
    )


class NoRules:
    """The supplier without rules: graphs of primitives need none."""

    def batch(self, node: Value, mapped: tuple[bool, ...], size: Size, randomness: str) -> Batched:
        raise no_rule_error("vmap", node, NO_SUPPLIER)

    def jvp(self, node: Value, wrt: tuple[int, ...]) -> Graph:
        raise no_rule_error("jvp", node, NO_SUPPLIER)

    def vjp(self, node: Value, wrt: tuple[int, ...], cotangent_of: tuple[int, ...]) -> Graph:
        raise no_rule_error("vjp", node, NO_SUPPLIER)

    def is_linear(self, node: Value, wrt: tuple[int, ...]) -> bool | None:
        return None

    def keeps_zero(self, node: Value, wrt: tuple[int, ...]) -> bool:
        return False


NO_SUPPLIER = "is not a primitive, and no rules are supplied for it"
NO_RULES: ExternRules = NoRules()


def op_name(node: Value) -> str:
    """The name of the user's call: "clamp" for a node that came of aten.clamp.default."""
    op = node.origin.op or str(node.params.get("op", node.params.get("target", node.prim)))
    parts = op.split(".")
    return parts[1] if len(parts) == 3 else op


def source_place(node: Value) -> str:
    place, line = node.origin.where, node.origin.line
    return "unknown" if place is None else place if line is None else f"{place}: {line}"


def no_rule_error(transform: str, node: Value, why: str) -> NoRuleError:
    return NoRuleError(transform=transform, op=op_name(node), why=why, where=source_place(node))


def inline_rule(rule: Graph, node: Value, args: Sequence[Value]) -> list[Value | None]:
    """The rule that was supplied for `node`, inlined."""
    wrong = [f"{a.aval} for {v.aval}" for v, a in zip(rule.inputs, args, strict=True) if not same_type(v.aval, a.aval)]
    if wrong:
        raise InvalidGraphError(f"the rule of `{op_name(node)}` is given {', '.join(wrong)}", node=repr(node))
    return inline(rule, args)
