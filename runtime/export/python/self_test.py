"""The test at the end of an exported module: its Function beside the class as it was written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from ....ir.text.printable import printable
from ....ir.types import COMPLEX
from ....tracer.dtypes import TO_TORCH
from ...values.sizes import number
from ..gather.batched import Batched
from ..gather.gathered import Gathered
from ..text.expressions import Expressions
from ..text.function import FunctionScopes
from .boilerplate import LANES_TEST, OWN_JVP, SELF_TEST, TRANSPOSED_JVP
from .launchers import dtype_text
from .literals import constant_text
from .user_source import SourceMissing, as_written

Sizes = dict[Any, int]
INDICES = 4
"""Whole numbers in the test are below it: they may be indices."""
LENGTH = "length"
LENGTHS = (1, 7, 100, 512)
"""Of rows of any length, in the test."""


def self_test(scopes: FunctionScopes, batched: Batched | None) -> list[str]:
    """The sections; a comment where the class has no source."""
    exported = scopes.exported
    try:
        eager = as_written(exported.cls, f"{exported.name}AsWritten")
    except SourceMissing as why:
        return [f"# No self-test against the class as it was written: {printable(str(why))}."]
    head = "# ---- The class as it was written; the test below compares with it."
    return [f"{head}\n{eager}", _comparison(scopes, batched)]


def _comparison(scopes: FunctionScopes, batched: Batched | None) -> str:
    function, tensors = scopes.exported, scopes.tensors
    lines = ["torch.manual_seed(0)", 'device = "cuda" if torch.cuda.is_available() else "cpu"']
    exported, small = _test_sizes(scopes, batched)
    rows = [r.length for r in function.rows if isinstance(scopes.symbols[r.length], str)]
    for symbol, most in ((s, n) for s, n in exported.items() if s not in rows):
        less = small[symbol]
        otherwise = "" if most == less else f' if device == "cuda" else {less}'
        lines.append(f"{scopes.symbols[symbol]} = {most}{otherwise}")
    # Arguments of these sizes; what is no tensor is as it was exported.
    at = Expressions(scopes.symbols)
    needs = [function.specialization.captured.forward.needs_input_grad[i] for i in function.slots]
    for name, value, needed in zip(tensors, function.forward.graph.inputs, needs, strict=False):
        lines.append(f"{name} = {_example(value, at, needed)}")
    pairs = zip(function.names, function.args, strict=True)
    arguments = ", ".join(n if n in tensors else constant_text(a) for n, a in pairs)
    return SELF_TEST.format(
        **_comparisons(scopes, rows, small, batched), name=function.name,
        inputs="\n".join(f"    {line}" for line in lines), arguments=arguments,
        forward_mode=_derivative_tests(function, batched), names=", ".join(tensors),
        written=f"{function.name}AsWritten", tensors=", ".join(tensors) + "," * (len(tensors) == 1),
    ).strip("\n")  # fmt: skip


def _comparisons(
    scopes: FunctionScopes, rows: Sequence[sympy.Symbol], small: Sizes, batched: Batched | None
) -> dict[str, str]:
    """The words of the test about rows of any length: one comparison for each of several lengths."""
    names = [str(scopes.symbols[s]) for s in rows]
    called = f"compare_with_eager({', '.join([LENGTH] * len(rows))})"
    if not rows:
        return {"rows": "", "at_lengths": "", "comparisons": called}
    function = scopes.exported
    # A length that kernels over lanes have compiled in is the only one that the test of vmap can have.
    is_fixed = batched is not None and not set(rows).isdisjoint(batched.constants)
    tried = [function.sizes[rows[0]]] if is_fixed else _lengths(function, rows)
    lengths = [n for n in tried if _holds(function, {**small, **dict.fromkeys(rows, n)})]
    several = f"max({called} for {LENGTH} in {tuple(lengths)})"
    return {"rows": ", ".join(names), "at_lengths": f" for several {' and '.join(names)}", "comparisons": several}


def _derivative_tests(exported: Gathered, batched: Batched | None) -> str:
    """The test of jvp: by the class as written where it has one, else by its transpose; and that of vmap."""
    names = {"name": exported.name, "written": f"{exported.name}AsWritten"}
    jvp = "" if exported.jvp is None else OWN_JVP if exported.compiler.user.overrides("jvp") else TRANSPOSED_JVP
    return jvp.format(**names) + ("" if batched is None else LANES_TEST.format(**names))


def _test_sizes(scopes: FunctionScopes, batched: Batched | None) -> tuple[Sizes, Sizes]:
    """Sizes for a GPU, as exported, and for the interpreter: small where any size will do, and odd."""
    function, sources = scopes.exported, scopes.forward.sources
    free = [s for s, n in scopes.symbols.items() if isinstance(n, str) and sources.get(s, "").count("shape")]
    exported = {s: number(s, function.sizes) for s in free}
    small = {s: min(n, 37) for s, n in exported.items()}
    return exported, small if _holds(function, small) and not (batched and batched.constants) else exported


def _holds(function: Gathered, sizes: Sizes) -> bool:
    """True where these sizes are some that the file is for."""
    assumed = [g.xreplace({**function.pinned, **sizes}) for g in function.guards]
    return all(bool(g) for g in assumed if not g.free_symbols)


def _lengths(function: Gathered, rows: Sequence[sympy.Symbol]) -> list[int]:
    """Row lengths for the test: short ones, odd ones, and the one that was exported with a neighbour."""
    most = min((function.limits.get(s, 0) for s in rows), default=0)
    own = [n for s in rows for n in (function.sizes[s], function.sizes[s] + 1)]
    kinds = [TO_TORCH[v.dtype] for v in function.forward.graph.inputs]
    has_indices = any(not k.is_floating_point and not k.is_complex and k != torch.bool for k in kinds)
    least = INDICES if has_indices else 1 if function.ones >= set(rows) else 2
    return sorted({n for n in (*LENGTHS, *own) if least <= n <= most})


def _example(value: Any, at: Expressions, moving: bool) -> str:
    """A call that makes an argument of the test; one that was exported as an expanded tensor is one."""
    strides = value.params["strides"]
    single = at.tuple([1 if s == 0 else n for n, s in zip(value.shape, strides, strict=True)])
    expand = f".expand({at.tuple(value.shape)})" if 0 in strides else ""
    dtype = dtype_text(value.dtype)
    if value.dtype == "b1":
        return f"(torch.rand({single}, device=device) < 0.5){expand}"
    if not TO_TORCH[value.dtype].is_floating_point and value.dtype not in COMPLEX:
        return f"torch.randint(0, {INDICES}, {single}, device=device, dtype={dtype}){expand}"
    drawn = f"torch.randn({single}, device=device).to({dtype}){expand}"
    return f"{drawn}.requires_grad_()" if moving else drawn
