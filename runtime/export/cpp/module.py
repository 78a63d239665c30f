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
from ....ir.program import Place
from ....ir.text.printable import in_line_comment
from ....tracer.methods import method_place
from ...cache.store import versions
from ...execution.pipeline import text_of
from ...kernels.cross_compile.pool import Binary, compile_for
from ..bundle.archive import write_file
from ..gather.gathered import ExportError, Gathered, gathered, require_nameable
from ..python.launchers import folded, symbol_names
from .boilerplate import COUNTERS, DRIVER, HELPERS
from .calls import literal
from .launchers import WORDS, CppLauncher, function_name
from ...capture.captured_backward import predicted_kinds

TYPES = {float: ("double", "float"), int: ("int64_t", "int"), bool: ("bool", "bool"), str: ("std::string", "str")}
"""Arguments that are no tensors: in C++, in the schema of an operator. Any other is compiled in and not asked for."""
FULL = "torch::autograd"


def pair(target_class: Any, args: tuple[Any, ...], target: str | None, stem: str | None = None) -> dict[str, str]:
    """The texts by suffix."""
    found = gathered(target_class, args, target)
    made = Pair(found, stem or function_name(found))
    return {"cpp": made.source(), "h": made.header()}


def as_pair(target_class: Any, args: tuple[Any, ...], target: str | None, path: Path, word: str) -> str:
    """Writes source and header beside each other; the text of the one that was asked for."""
    texts = pair(target_class, args, target, path.stem)
    for suffix, text in texts.items():
        write_file(path.with_suffix(f".{suffix}"), text.encode())
    return texts[word]


class Pair:
    """Writes a header and its source."""

    def __init__(self, found: Gathered, stem: str) -> None:
        self.found, self.stem = found, stem
        self.function = function_name(found)
        self.symbols = symbol_names(found, Names([*WORDS, *found.names]))
        self.forward = CppLauncher(found, found.forward, self.symbols, checked=True)
        self.launchers = [self.forward]
        if found.backward is not None:
            self.backward = CppLauncher(found, found.backward, self.symbols, checked=False)
            self.launchers.append(self.backward)
        self.tensors = [found.names[i] for i in found.slots]
        self._require_plain()

    # ------------------------------------------------------------------ what has no text
    def _refused(self, reason: str, fix: str) -> ExportError:
        place = method_place(self.found.cls.forward)  # type: ignore[attr-defined]
        return ExportError(function=self.found.name, reason=reason, where=place, fix=fix)

    def _require_plain(self) -> None:
        require_nameable(self.found.compiler, [self.found.name], WORDS, ascii_only=True)
        require_nameable(self.found.compiler, self._asked(), (), ascii_only=True)
        forward = self.found.specialization.captured.forward
        if not self.found.target.startswith("cuda:"):
            reason = f"C++ launches through the CUDA driver, not on {self.found.target}"
            raise self._refused(reason, "name a cuda target.")
        apart = all(o.kind in ("tensor", "object") for o in forward.outputs)
        if forward.dirty or self.found.forward.graph.mutations or not apart:
            fix = "return tensors of its own, or export a Triton module (.py)."
            raise self._refused("forward writes to an argument, or returns one or a view of one", fix)

    # ------------------------------------------------------------------ signatures
    def _numbers(self) -> list[tuple[str, Any]]:
        """The arguments that are no tensors and that are asked for, with their values."""
        pairs = zip(self.found.names, self.found.args, strict=True)
        return [(n, a) for n, a in pairs if type(a) in TYPES]

    def _asked(self) -> list[str]:
        """The arguments of the Function, as the user orders them."""
        numbers = dict(self._numbers())
        return [n for n in self.found.names if n in self.tensors or n in numbers]

    def _parameters(self, defaults: bool = False) -> str:
        numbers, last = dict(self._numbers()), self._last_tensor()
        words = []
        for i, name in enumerate(self._asked()):
            value = f" = {literal(numbers[name])}" if defaults and i > last else ""
            kind = TYPES[type(numbers[name])][0] if name in numbers else "const at::Tensor&"
            words.append(f"{kind} {name}{value}")
        return ", ".join(words)

    def _last_tensor(self) -> int:
        return max((i for i, n in enumerate(self._asked()) if n in self.tensors), default=-1)

    def _schema(self) -> str:
        numbers, last = dict(self._numbers()), self._last_tensor()
        words = []
        for i, name in enumerate(self._asked()):
            value = f"={_in_schema(numbers[name])}" if i > last else ""
            words.append(f"{TYPES[type(numbers[name])][1]} {name}{value}" if name in numbers else f"Tensor {name}")
        made = ", ".join(["Tensor"] * self._visible())
        return f"{self.function}({', '.join(words)}) -> {made if self._visible() == 1 else f'({made})'}"

    def _visible(self) -> int:
        return len(self.found.specialization.captured.forward.fake_outputs)

    def _returns(self) -> str:
        count = self._visible()
        return "at::Tensor" if count == 1 else f"std::tuple<{', '.join(['at::Tensor'] * count)}>"

    # ------------------------------------------------------------------ the header
    def header(self) -> str:
        """The text of the header."""
        return "\n".join(self._header()) + "\n"

    def _header(self) -> Iterator[str]:
        name = self.found.name
        yield from (f"// {in_line_comment(line)}".rstrip() for line in self._provenance())
        yield from ("#pragma once", "", "#include <torch/csrc/autograd/custom_function.h>", "")
        yield from ("#include <string>", "#include <tuple>", "", f"namespace {self.function} {{", "")
        yield f"struct {name} : public {FULL}::Function<{name}> {{"
        yield f"  static constexpr bool is_traceable = {'true' if self._traceable() else 'false'};"
        yield f"  static {FULL}::variable_list forward({FULL}::AutogradContext* ctx, {self._parameters()});"
        yield f"  static {FULL}::variable_list backward({FULL}::AutogradContext* ctx, {FULL}::variable_list gradients);"
        yield from ("};", "", f"// {name}::apply by name.")
        yield f"{self._returns()} {self.function}({self._parameters(defaults=True)});"
        yield from ("", f"}}  // namespace {self.function}")

    def _traceable(self) -> bool:
        """As the class declares; marks are more than compiled autograd takes of a C++ node that is traceable."""
        return getattr(self.found.cls, "is_traceable", None) is True and not self._marked()

    def _provenance(self) -> Iterator[str]:
        found, known = self.found, versions()
        yield f"{found.name}: a torch::autograd::Function with fused kernels for {found.target}."
        yield ""
        yield f"Holds for: {', '.join(self._held())}."
        place = Path(method_place(found.cls.forward)).name  # type: ignore[attr-defined]
        yield f"From {found.cls.__qualname__} ({place}), by fusegrad {known['fusegrad']},"
        yield f"with torch {torch.__version__} and triton {known['triton']}."
        yield f"From Python: torch.ops.load_library(..), then torch.ops.{self.function}.{self.function}(..)."
        yield "Gradients of gradients, jvp and vmap are not in it."

    def _held(self) -> list[str]:
        types = dict(zip(self.tensors, map(self.forward.type_text, self.found.forward.graph.inputs), strict=False))
        return [
            f"{n}: {types[n]}" if n in types else f"{n} = {a!r}"
            for n, a in zip(self.found.names, self.found.args, strict=True)
        ]

    # ------------------------------------------------------------------ the source
    def source(self) -> str:
        """The text of the source."""
        kernels = self._kernels()
        launching = "\n\n".join(launcher.launching() for launcher in self.launchers)
        plain = [launcher.in_aten() for launcher in self.launchers]
        shapes = [launcher.shapes() for launcher in self.launchers]
        written = [text for text in plain if text is not None]
        parts = [*(self._kernel(k, b) for k, b in kernels), launching, *written, *shapes]
        used = "\n".join(parts)
        helpers = [text for name, text in HELPERS if re.search(rf"\b{name}\(", used) or name == "laid_out"]
        counters = [COUNTERS] if "counters(" in used else []
        inside = [*helpers, self._capability(), DRIVER, *counters, *parts]
        body = "\n\n".join(
            text.strip("\n") for text in [*inside, "}  // namespace", *self._function(), self._operators(plain)]
        )
        images = "\n\n".join(_image(k, b) for k, b in kernels)
        headers = "\n".join(self._includes(body))
        opening = f"namespace {self.function} {{\nnamespace {{"
        closing = f"}}  // namespace\n}}  // namespace {self.function}"
        return "\n\n".join([headers, opening, body, images, closing]) + "\n"

    def _includes(self, body: str) -> Iterator[str]:
        yield f'#include "{self.stem}.h"'
        yield ""
        yield from ("#include <ATen/core/Tensor.h>", "#include <ATen/core/dispatch/Dispatcher.h>")
        yield from ("#include <c10/core/DeviceGuard.h>", "#include <c10/core/impl/VirtualGuardImpl.h>")
        yield "#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>"
        yield "#include <torch/library.h>"
        yield ""
        known = set(re.findall(r"\bat::([a-z]\w*)\(", body)) - {"dtype"}
        yield from (f"#include <ATen/ops/{name}.h>" for name in sorted(known | {"empty_strided"}))
        yield from ("", "#include <dlfcn.h>", "")
        yield from (f"#include <{name}>" for name in ("cstdlib", "limits", "map", "mutex", "string", "tuple", "vector"))

    def _capability(self) -> str:
        return f"constexpr int CAPABILITY = {self.found.target.partition(':')[2]};"

    # ------------------------------------------------------------------ kernels
    def _kernels(self) -> list[tuple[Kernel, Binary]]:
        pairs = zip(self.launchers, self.found.parts, strict=False)
        found = [k for w, p in pairs for vs in p.kernels.values() for v in w.reached(vs) for k in v.kernels]
        unique = tuple({k.name: k for k in found}.values())
        target = self.found.target
        made = compile_for(unique, text_of(Kernels(unique)), [target]) if unique else {}
        binaries = [(k, made[k.name][target]) for k in unique]
        for kernel, binary in binaries:
            if binary.error:
                reason = f"{kernel.name} does not compile for {target}: {binary.error}"
                raise self._refused(reason, "name another target.")
        return binaries

    def _kernel(self, kernel: Kernel, binary: Binary) -> str:
        threads = 32 * kernel.num_warps
        facts = f'{{"{kernel.name}", {kernel.name}_image, {threads}, {binary.shared}}}'
        return f"extern const unsigned char {kernel.name}_image[];\nKernel {kernel.name}{facts};"

    # ------------------------------------------------------------------ the Function
    def _call(self, launcher: CppLauncher, given: list[str]) -> str:
        operator = f"{self.function}::{_last(launcher)}"
        taken = [*["at::Tensor"] * len(launcher.inputs), *["int64_t"] * len(launcher.sizes)]
        schema = f'c10::Dispatcher::singleton().findSchemaOrThrow("{operator}", "")'
        typed = f"typed<{launcher.result}({', '.join(taken)})>()"
        return f"static const auto run =\n    {schema}\n        .{typed};\nauto [{{}}] = run.call({', '.join(given)});"

    def _function(self) -> Iterator[str]:
        name, results = self.found.name, f"{FULL}::variable_list"
        head = f"{results} {name}::forward({FULL}::AutogradContext* ctx, {self._parameters()}) {{"
        yield "\n".join([head, *(f"  {line}" for line in self._forward()), "}"])
        if self.found.backward is not None:
            head = f"{results} {name}::backward({FULL}::AutogradContext* ctx, {results} gradients) {{"
            yield "\n".join([head, *(f"  {line}" for line in self._backward()), "}"])
        else:
            head = f"{results} {name}::backward({FULL}::AutogradContext*, {results}) {{"
            yield f'{head}\n  TORCH_CHECK_NOT_IMPLEMENTED(false, "{name} has no backward");\n}}'
        yield "\n".join(self._by_name())

    def _made(self) -> list[str]:
        return [self.forward.made[o.id] for o in self.forward.outputs]

    def _outputs(self) -> list[str]:
        """forward's tensor outputs, then what it keeps, by name."""
        return [self._kept_apart(self.forward.made[o.id]) for o in self.found.forward.graph.outputs if o is not None]

    def _kept_apart(self, name: str) -> str:
        """A result under a name that is no argument's."""
        return f"{name}_made" if name in self._asked() or name in WORDS else name

    def _marked(self) -> list[str]:
        forward = self.found.specialization.captured.forward
        return list(dict.fromkeys(self._at(p) for p in forward.non_differentiable))

    def _forward(self) -> Iterator[str]:
        for name, value in self._numbers():
            said = f'"{self.function} was exported for {name} = {value}, not "'
            yield f"TORCH_CHECK_VALUE({name} == {literal(value)}, {said}, {name});"
        call = self._call(self.forward, self.tensors)
        made = map(self._kept_apart, self._made())
        yield "at::AutoDispatchBelowADInplaceOrView below;  // what follows is forward itself, not recorded"
        yield from call.replace("{}", ", ".join(made)).splitlines()
        if marked := self._marked():
            yield f"ctx->mark_non_differentiable({{{', '.join(marked)}}});"
        if self.found.backward is not None:
            if kept := [self._at(p) for p in self.found.residuals]:
                yield f"ctx->save_for_backward({{{', '.join(kept)}}});"
            yield from self._kept_sizes()
        yield f"return {{{', '.join(self._outputs()[: self._visible()])}}};"

    def _kept_sizes(self) -> Iterator[str]:
        assert self.found.backward is not None
        for symbol in self.found.backward.sizes:
            if isinstance(name := self.symbols[symbol], str):
                at, kind, axis = self.found.specialization.captured.binder.sources[symbol]
                yield f'ctx->saved_data["{name}"] = {self.tensors[at]}.{kind}({axis});'

    def _at(self, place: Place) -> str:
        if place.kind == "input":
            return self.tensors[place.index]
        return self._outputs()[place.index + (self._visible() if place.kind == "hidden" else 0)]

    def _backward(self) -> Iterator[str]:
        part, launcher, spec = self.found.backward, self.backward, self.found.specialization
        assert part is not None
        kept = len(self.found.residuals)
        if kept:
            yield "auto saved = ctx->get_saved_variables();"
        moving = self._gradients_given()
        given = [f"saved[{i}]" for i in range(kept)] + [f"gradients[{i}]" for i in moving]
        given += [f'ctx->saved_data["{n}"].toInt()' for n in launcher.sizes]
        made = [f"grad_{i}" for i in range(len(launcher.outputs))]
        if made:
            yield from self._call(launcher, given).replace("{}", ", ".join(made)).splitlines()
        names = dict(zip(launcher.outputs, made, strict=True))
        kinds = [k is not None for k in predicted_kinds(spec.captured)]
        positions = [i for i, k in enumerate(kinds) if k]
        passed = {r: f"gradients[{moving[positions.index(g)]}]" for r, g in part.passed.items()}
        slots = dict(enumerate(part.graph.outputs))
        asked = [i for i, n in enumerate(self.found.names) if n in self._asked()]
        results = [passed.get(i, "at::Tensor()" if slots[i] is None else names[slots[i]]) for i in asked]  # type: ignore[index]
        yield f"return {{{', '.join(results)}}};"

    def _gradients_given(self) -> list[int]:
        """Of the gradients of forward's tensor outputs those that backward reads."""
        kinds, outputs = predicted_kinds(self.found.specialization.captured), self.found.specialization.captured.forward.outputs
        tensors = [k for k, o in zip(kinds, outputs, strict=True) if o.kind != "object"]
        return [i for i, k in enumerate(tensors) if k is not None]

    def _by_name(self) -> Iterator[str]:
        yield f"{self._returns()} {self.function}({self._parameters()}) {{"
        yield f"  auto results = {self.found.name}::apply({', '.join(self._asked())});"
        count = self._visible()
        several = ", ".join(f"results[{i}]" for i in range(count))
        yield f"  return {several if count == 1 else f'{{{several}}}'};"
        yield "}"

    # ------------------------------------------------------------------ operators
    def _operators(self, plain: list[str | None]) -> str:
        """What kernels run behind: the dispatcher chooses by device, and tracers see operators."""
        lines = [f"TORCH_LIBRARY({self.function}, m) {{"]
        lines += [f'  m.def("{_last(w)}{w.schema}");' for w in self.launchers]
        lines += [f'  m.def("{self._schema()}", &{self.function});', "}", ""]
        lines += [*self._registered("CUDA", "with_kernels", plain), "", "#ifdef KERNELS_ON_CPU_TENSORS"]
        lines += [f"TORCH_LIBRARY_IMPL({self.function}, CPU, m) {{", '  if (std::getenv("KERNELS_ON_CPU_TENSORS")) {']
        lines += [f"  {line}" for line in self._impls("with_kernels", plain)]
        lines += ["  } else {", *(f"  {line}" for line in self._impls("with_aten", plain)), "  }", "}", "#else"]
        lines += [*self._registered("CPU", "with_aten", plain), "#endif", ""]
        lines += [*self._registered("Meta", "shapes", plain), ""]
        lines += [f"TORCH_LIBRARY_IMPL({self.function}, Autograd, m) {{"]
        lines += [f'  m.impl("{_last(w)}", torch::autograd::autogradNotImplementedFallback());' for w in self.launchers]
        return "\n".join([*lines, "}", "", "namespace {"])

    def _registered(self, key: str, suffix: str, plain: list[str | None]) -> Iterator[str]:
        yield f"TORCH_LIBRARY_IMPL({self.function}, {key}, m) {{"
        yield from self._impls(suffix, plain)
        yield "}"

    def _impls(self, suffix: str, plain: list[str | None]) -> Iterator[str]:
        for launcher, text in zip(self.launchers, plain, strict=True):
            if suffix == "with_aten" and text is None:
                yield f"  // {_last(launcher)} has operations that ATen has no function for: it runs on the GPU alone"
            else:
                yield f'  m.impl("{_last(launcher)}", &{launcher.function}_{suffix});'


def _last(launcher: CppLauncher) -> str:
    """ "forward" or "backward" """
    return launcher.part.method


def _in_schema(value: Any) -> str:
    return str(value) if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else repr(value)


def _image(kernel: Kernel, binary: Binary) -> str:
    content = binary.asm["cubin"]
    assert isinstance(content, bytes)
    rows = "\n".join(f"    {line}" for line in folded(map(str, content), 112))
    return f"alignas(16) const unsigned char {kernel.name}_image[] = {{\n{rows}\n}};"
