"""`export(.., path="name.py")`: one Triton module that needs torch and triton alone, with a test against eager.

With vmap it has beside the class one over lanes, with kernels of its own, which any depth of vmap calls:

    vmap(RMSNorm) -> RMSNormBatched on [lanes, ..]        vmap(vmap(RMSNorm)) -> RMSNormBatched on [A * B, ..]
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from ....codegen import Kernel
from ....codegen.emit.names import Names
from ....codegen.emit.prelude import helpers_in, libraries_in
from ....codegen.kernel import Scalar
from ....ir.text.printable import in_docstring
from ....tracer.methods import method_place
from ...cache.entry_files import versions
from ..gather.batched import LANES, Batched, over_lanes
from ..gather.gathered import Gathered, require_nameable
from ..gather.versions import rows_of
from ..text.function import FunctionScopes
from ..text.scope import WIDTH, Symbols, reachable_versions, snake
from ..text.sizes_by_name import gathered_at, names_of_sizes
from .boilerplate import CHECKED, EXACT_DOT, HELPERS, IMPORTS, INSIDE_VMAP, LIBRARY, ROOMY, ROUNDING, STAND_INS
from .class_text import ClassText, class_lines, output_names
from .launchers import launch_function, launch_scope
from .line_folding import tidy
from .literals import constant_text, indented
from .self_test import self_test

OWNED = {"torch", "triton", "tl", "os", *(name for name, _ in HELPERS)}
"""Names that the file has already."""
DERIVED = ("jvp", "vmap")
"""The derivatives that a file may have besides backward."""
CALLS_INSIDE = "\n\n\ndef inside("
"""The text behind the class `Inside` of a file."""


def module_with(
    target_class: Any, args: Sequence[Any], target: str | None, derivatives: Sequence[str], sizes: Mapping[str, int]
) -> str:
    """The text of the file with these derivatives, and these sizes compiled in."""
    exported = gathered_at(target_class, args, target, derivatives, sizes)
    return module_text(exported, over_lanes(exported) if "vmap" in derivatives else None)


def module_text(exported: Gathered, batched: Batched | None = None) -> str:
    """The text of the file."""
    module = Module(exported, batched)
    # Launch functions first: writing them gives the values their names, by which the class has them.
    launchers = [launch_function(scope) for scopes in module.functions for scope in scopes.all]
    classes, tests = "\n".join(_classes(module)), self_test(module.scopes, batched)
    body = "\n\n\n".join([*_kernels(module), *launchers, classes, _call_by_name(module), *tests])
    return "\n\n\n".join([_head(module, body), *_helpers(module, body), body]) + "\n"


class Module:
    """A file while it is written: its Function, and the one over lanes where it has vmap."""

    def __init__(self, exported: Gathered, batched: Batched | None) -> None:
        self.exported = exported
        self.scopes = _scopes(exported, names_of_sizes(exported))
        self.batched = None if batched is None else _scopes(batched, _with_lanes(batched, self.scopes.symbols))
        self.functions = [self.scopes, *([] if self.batched is None else [self.batched])]

    @property
    def rules(self) -> list[str]:
        """The methods that the file has kernels for."""
        return [*(part.method for part in self.exported.parts), *(["vmap"] if self.batched is not None else [])]

    def argument_types(self) -> list[str]:
        return self.scopes.argument_types(self.scopes.forward)


def _scopes(exported: Gathered, symbols: Symbols) -> FunctionScopes:
    require_nameable(exported.compiler, (exported.name, *exported.names), OWNED)
    return FunctionScopes(exported, symbols, launch_scope)


def _with_lanes(exported: Batched, lane_symbols: Symbols) -> Symbols:
    """The names that sizes have in the class of one lane, and one for how many lanes there are."""
    symbols = {**lane_symbols, **exported.constants}
    names = Names([*exported.names, *map(str, symbols.values())])
    return {**symbols, LANES: names.fresh("lanes")}


# ------------------------------------------------------------------ head
def _head(module: Module, body: str) -> str:
    doc, libraries = in_docstring("\n".join(_provenance(module))), libraries_in([body])
    imports = "\n".join([IMPORTS, *libraries])
    texts = {"**ROUNDING": ROUNDING, "**CHECKED": CHECKED, "**ROOMY": ROOMY}
    options = [text for name, text in texts.items() if name in body]
    products = [EXACT_DOT] if "tl.dot(" in body and "bfloat16" in body else []
    parts = [imports, *([LIBRARY] if libraries else []), *products, *options]
    text = f'"""{doc}\n"""\n\n' + "\n\n\n".join(parts)
    if module.batched is None:
        return text
    return text.replace("import os\n", "import os\nfrom functools import partial\n", 1)


def _provenance(module: Module) -> Iterator[str]:
    exported, version_of = module.exported, versions()
    yield f"{exported.name}: fused Triton kernels, {_listed(module.rules)}."
    yield ""
    called = f"{snake(exported.name)}({', '.join(exported.names)})"
    yield f"Use: {called}, or {exported.name}.apply(..) with the same arguments."
    yield f"Holds for: {', '.join(module.argument_types())}."
    yield from _limits(module.scopes)
    yield from _kernel_counts(exported)
    if module.batched is not None:
        yield f"vmap holds for: {', '.join(module.batched.argument_types(module.batched.forward))}."
        yield from (f"vmap: {line}" for line in _limits(module.batched))
        yield from (f"vmap of {line}" for line in _kernel_counts(module.batched.exported))
    place = Path(method_place(exported.cls.forward)).name  # type: ignore[attr-defined]
    yield f"From {exported.cls.__qualname__} ({place}), by fusegrad {version_of['fusegrad']} on {date.today()},"
    yield f"for {exported.target}, with torch {torch.__version__} and triton {version_of['triton']}."
    missing = ["gradients of gradients", *(m for m in DERIVED if m not in module.rules)]
    yield f"{_listed(missing).capitalize()} are not in this file."


def _limits(scopes: FunctionScopes) -> Iterator[str]:
    """The longest rows that the file serves, and what to do for longer ones."""
    for name, most in scopes.forward.limits:
        yield f"{name} is any up to {most}; for longer rows export it again, with --sizes {name}=.."


def _kernel_counts(exported: Gathered) -> Iterator[str]:
    for part in exported.parts:
        count = sum(len(versions[0].kernels.kernels) for versions in part.kernels.values())
        calls = len(part.steps) - len(part.kernels)
        library = f", {calls} library calls and views" if calls else ""
        texts = {k.name for version in part.versions for k in version.kernels.kernels}
        is_several = len(texts) > count and rows_of(part.versions)
        by_length = f", as {len(texts)} for short rows and long ones" if is_several else ""
        yield f"{part.method}: {count} kernel{'s' * (count != 1)}{by_length}{library}."


def _listed(words: list[str]) -> str:
    """a, b and c"""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _helpers(module: Module, body: str) -> list[str]:
    """The small functions that the file calls."""
    called = [h for h in HELPERS if re.search(rf"\b{h[0]}[()]", body)]
    if any(name == "expect" for name, _ in called):
        called = [h for h in HELPERS if h in called or h[0] == "laid_out"]
    texts = [text.strip("\n") for _, text in called]
    if module.batched is None:
        return texts
    return [t.replace(CALLS_INSIDE, f"\n{INSIDE_VMAP.rstrip()}{CALLS_INSIDE}") for t in texts]


# ------------------------------------------------------------------ kernels
def _kernels(module: Module) -> Iterator[str]:
    """Each kernel once, after the functions that kernels call."""
    launched = [(s, vs) for scopes in module.functions for s in scopes.all for vs in s.part.kernels.values()]
    kernels = [k for scope, vs in launched for v in reachable_versions(scope, vs) for k in v.kernels.kernels]
    helpers = [h.strip("\n") for h in helpers_in([k.source for k in kernels])]
    yield from helpers
    if stand_ins := [line for name, line in STAND_INS.items() if any(f"def {name}(" in h for h in helpers)]:
        yield 'if os.environ.get("TRITON_INTERPRET") == "1":  # it has no assembly\n    ' + "\n    ".join(stand_ins)
    first: dict[str, Kernel] = {}
    for kernel in kernels:
        first.setdefault(kernel.name, kernel)
    yield from (tidy(_unspecialised(kernel)).strip("\n") for kernel in first.values())


def _unspecialised(kernel: Kernel) -> str:
    """Sizes are numbers like any other to Triton: a new batch size compiles nothing."""
    scalars = [a.name for a in kernel.arguments if isinstance(a, Scalar)]
    if not scalars:
        return kernel.source
    words = ", ".join(f'"{s}"' for s in scalars)
    head, body = kernel.source.split(f"def {kernel.name}(", 1)
    return head.replace("@triton.jit", f"@triton.jit(do_not_specialize=[{words}])") + f"def {kernel.name}(" + body


# ------------------------------------------------------------------ the Function
def _classes(module: Module) -> Iterator[str]:
    """The class, and the one over lanes, with the table by which launches inside backward find theirs."""
    scopes, batched = module.scopes, module.batched
    hidden = len(output_names(scopes)) > scopes.visible
    name, doc = f"{'_' * hidden}{module.exported.name}", inspect.getdoc(module.exported.cls)
    if batched is None:
        # torch.func reaches backward, wrapped tensors in hand, where there is a jvp.
        yield from class_lines(ClassText(scopes, name, doc, None, module.exported.jvp is not None))
        return
    many = batched.exported.name
    yield from class_lines(ClassText(scopes, name, doc, f"{many}.apply", True))
    yield from ("", "")
    doc = f"{module.exported.cls.__name__} over lanes, the first axis of every tensor."
    yield from class_lines(ClassText(batched, many, doc, f"lanes_of_lanes({many}.apply)", True))
    pairs = zip(scopes.all[1:], batched.all[1:], strict=True)
    if inner := [f"{one.function}: {over.function}," for one, over in pairs]:
        yield from ("", "", "BATCHED = {", *indented(inner), "}")
        yield '"""Launches inside backward or jvp, with the same over lanes."""'


def _argument_lines(module: Module) -> str:
    """The types of the arguments: behind a sentence, or a line each below it."""
    types = [in_docstring(t) for t in module.argument_types()]
    text = "; ".join(types)
    return f" {text}" if len(text) < WIDTH - 30 else "\n\n    " + "\n    ".join(types) + "\n    "


def _call_by_name(module: Module) -> str:
    """A plain function; arguments that are compiled in have their value as a default, from the last tensor on."""
    exported, name = module.exported, snake(module.exported.name)
    last = max(exported.slots, default=-1)
    pairs = enumerate(zip(exported.names, exported.args, strict=True))
    parameters = ", ".join(n if i <= last else f"{n}={constant_text(a)}" for i, (n, a) in pairs)
    return "\n".join([
        f"def {name}({parameters}):",
        f'    """{exported.name}.apply by name.{_argument_lines(module)}"""',
        f"    return {exported.name}.apply({', '.join(exported.names)})",
    ])  # fmt: skip
