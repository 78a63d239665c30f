"""`export(.., path="name.cpp")`: a C++ header and source with a torch::autograd::Function that launches the kernels.

The kernels are compiled ahead of time, for one GPU, and are in the source as bytes; it builds and links without CUDA.
On the CPU the captured graph runs operation by operation. It needs libtorch alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ....codegen import Kernel, Kernels
from ....codegen.emit.names import Names
from ....ir.text.printable import in_line_comment
from ....tracer.methods import method_place
from ...cache.entry_files import versions
from ...execution.graph_to_kernels import text_of
from ...kernels.cross_compile.pool import Binary, compile_for
from ..bundle.archive import write_file
from ..gather.gathered import gather_function
from ..text.function import FunctionScopes
from ..text.scope import fold_words, reachable_versions, symbol_names
from .boilerplate import COUNTERS, DRIVER, HELPERS
from .class_text import FULL, function_texts, marked, operators
from .launchers import WORDS, launch_scope, shapes, with_aten, with_kernels
from .signature import Signature, cpp_refusal, require_plain


def pair(target_class: Any, args: tuple[Any, ...], target: str | None, stem: str | None = None) -> dict[str, str]:
    """The texts by suffix."""
    exported = gather_function(target_class, args, target)
    symbols = symbol_names(exported, Names([*WORDS, *exported.names]))
    signature = Signature(FunctionScopes(exported, symbols, launch_scope))
    require_plain(signature)
    source = source_text(signature, stem or signature.function)
    return {"cpp": source, "h": "\n".join(_header(signature)) + "\n"}


def as_pair(target_class: Any, args: tuple[Any, ...], target: str | None, path: Path, word: str) -> str:
    """Writes source and header beside each other; the text of the one that was asked for."""
    texts = pair(target_class, args, target, path.stem)
    for suffix, text in texts.items():
        write_file(path.with_suffix(f".{suffix}"), text.encode())
    return texts[word]


# ------------------------------------------------------------------ the header
def _header(signature: Signature) -> Iterator[str]:
    name = signature.scopes.exported.name
    yield from (f"// {in_line_comment(line)}".rstrip() for line in _provenance(signature))
    yield from ("#pragma once", "", "#include <torch/csrc/autograd/custom_function.h>", "")
    yield from ("#include <string>", "#include <tuple>", "", f"namespace {signature.function} {{", "")
    yield f"struct {name} : public {FULL}::Function<{name}> {{"
    yield f"  static constexpr bool is_traceable = {'true' if _is_traceable(signature) else 'false'};"
    yield f"  static {FULL}::variable_list forward({FULL}::AutogradContext* ctx, {signature.declared()});"
    yield f"  static {FULL}::variable_list backward({FULL}::AutogradContext* ctx, {FULL}::variable_list gradients);"
    yield from ("};", "", f"// {name}::apply by name.")
    yield f"{signature.result_type()} {signature.function}({signature.declared(defaults=True)});"
    yield from ("", f"}}  // namespace {signature.function}")


def _is_traceable(signature: Signature) -> bool:
    """True where the class declares it and marks nothing: compiled autograd takes no marks of a traceable C++ node."""
    return getattr(signature.scopes.exported.cls, "is_traceable", None) is True and not marked(signature)


def _provenance(signature: Signature) -> Iterator[str]:
    exported, version_of = signature.scopes.exported, versions()
    types = signature.scopes.argument_types(launch_scope(exported, exported.forward, signature.scopes.symbols))
    yield f"{exported.name}: a torch::autograd::Function with fused kernels for {exported.target}."
    yield ""
    yield f"Holds for: {', '.join(types)}."
    place = Path(method_place(exported.cls.forward)).name  # type: ignore[attr-defined]
    yield f"From {exported.cls.__qualname__} ({place}), by fusegrad {version_of['fusegrad']},"
    yield f"with torch {torch.__version__} and triton {version_of['triton']}."
    yield f"From Python: torch.ops.load_library(..), then torch.ops.{signature.function}.{signature.function}(..)."
    yield "Gradients of gradients, jvp and vmap are not in it."


# ------------------------------------------------------------------ the source
def source_text(signature: Signature, stem: str) -> str:
    """The text of the source."""
    scopes, exported = signature.scopes.all, signature.scopes.exported
    kernels = _kernels(signature)
    # Each function of a part has names of its own; those of the first, which launches kernels, are the outputs' names.
    launching = "\n\n".join(map(with_kernels, scopes))
    plain = [with_aten(launch_scope(exported, s.part, s.symbols)) for s in scopes]
    traced = [shapes(launch_scope(exported, s.part, s.symbols)) for s in scopes]
    parts = [*(_kernel(k, b) for k, b in kernels), launching, *(t for t in plain if t is not None), *traced]
    # Helpers and headers are those that the text calls.
    rendered = "\n".join(parts)
    helpers = [text for name, text in HELPERS if re.search(rf"\b{name}\(", rendered) or name == "laid_out"]
    capability = f"constexpr int CAPABILITY = {exported.target.partition(':')[2]};"
    inside = [*helpers, capability, DRIVER, *([COUNTERS] if "counters(" in rendered else []), *parts]
    texts = [*inside, "}  // namespace", *function_texts(signature), operators(signature, plain)]
    body = "\n\n".join(text.strip("\n") for text in texts)
    images = "\n\n".join(_image(k, b) for k, b in kernels)
    opening = f"namespace {signature.function} {{\nnamespace {{"
    closing = f"}}  // namespace\n}}  // namespace {signature.function}"
    return "\n\n".join(["\n".join(_includes(stem, body)), opening, body, images, closing]) + "\n"


def _includes(stem: str, body: str) -> Iterator[str]:
    yield f'#include "{stem}.h"'
    yield ""
    yield from ("#include <ATen/core/Tensor.h>", "#include <ATen/core/dispatch/Dispatcher.h>")
    yield from ("#include <c10/core/DeviceGuard.h>", "#include <c10/core/impl/VirtualGuardImpl.h>")
    yield "#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>"
    yield "#include <torch/library.h>"
    yield ""
    functions = set(re.findall(r"\bat::([a-z]\w*)\(", body)) - {"dtype"}
    yield from (f"#include <ATen/ops/{name}.h>" for name in sorted(functions | {"empty_strided"}))
    yield from ("", "#include <dlfcn.h>", "")
    yield from (f"#include <{name}>" for name in ("cstdlib", "limits", "map", "mutex", "string", "tuple", "vector"))


# ------------------------------------------------------------------ kernels
def _kernels(signature: Signature) -> list[tuple[Kernel, Binary]]:
    """The kernels with their machine code. Raises ExportError for one that does not compile."""
    exported = signature.scopes.exported
    launched = [(s, vs) for s in signature.scopes.all for vs in s.part.kernels.values()]
    versions = [version for s, several in launched for version in reachable_versions(s, several)]
    unique = tuple({k.name: k for version in versions for k in version.kernels.kernels}.values())
    compiled = compile_for(unique, text_of(Kernels(unique)), [exported.target]) if unique else {}
    binaries = [(k, compiled[k.name][exported.target]) for k in unique]
    for kernel, binary in binaries:
        if binary.error:
            reason = f"{kernel.name} does not compile for {exported.target}: {binary.error}"
            raise cpp_refusal(exported, reason, "name another target.")
    return binaries


def _kernel(kernel: Kernel, binary: Binary) -> str:
    threads = 32 * kernel.num_warps
    facts = f'{{"{kernel.name}", {kernel.name}_image, {threads}, {binary.shared}, {binary.workspace}}}'
    return f"extern const unsigned char {kernel.name}_image[];\nKernel {kernel.name}{facts};"


def _image(kernel: Kernel, binary: Binary) -> str:
    content = binary.asm["cubin"]
    assert isinstance(content, bytes)
    rows = "\n".join(f"    {line}" for line in fold_words(map(str, content), 112))
    return f"alignas(16) const unsigned char {kernel.name}_image[] = {{\n{rows}\n}};"
