"""The torch::autograd::Function of a C++ file, and the operators that its launch functions are registered as."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..text.scope import Scope
from .calls import literal
from .launchers import WORDS, result_type, schema
from .signature import Signature

FULL = "torch::autograd"


def function_texts(signature: Signature) -> Iterator[str]:
    """forward, backward, and the function that applies them by name."""
    scopes, results = signature.scopes, f"{FULL}::variable_list"
    name = scopes.exported.name
    head = f"{results} {name}::forward({FULL}::AutogradContext* ctx, {signature.declared()}) {{"
    yield "\n".join([head, *(f"  {line}" for line in _forward(signature)), "}"])
    if (backward := scopes.by_method.get("backward")) is not None:
        head = f"{results} {name}::backward({FULL}::AutogradContext* ctx, {results} gradients) {{"
        yield "\n".join([head, *(f"  {line}" for line in _backward(signature, backward)), "}"])
    else:
        head = f"{results} {name}::backward({FULL}::AutogradContext*, {results}) {{"
        yield f'{head}\n  TORCH_CHECK_NOT_IMPLEMENTED(false, "{name} has no backward");\n}}'
    yield "\n".join(_by_name(signature))


def marked(signature: Signature) -> list[str]:
    """The names of what forward marks as not differentiable."""
    outputs = _outputs(signature)
    places = signature.scopes.exported.specialization.captured.forward.non_differentiable
    return list(dict.fromkeys(signature.scopes.place_name(outputs, p) for p in places))


def _outputs(signature: Signature) -> list[str]:
    """forward's tensor outputs, then what it keeps, by name."""
    scope = signature.scopes.forward
    outputs = (o for o in scope.part.graph.outputs if o is not None)
    return [_apart(signature, scope.name_of(o)) for o in outputs]


def _apart(signature: Signature, name: str) -> str:
    """A result under a name that is no argument's."""
    return f"{name}_made" if name in signature.parameters or name in WORDS else name


# ------------------------------------------------------------------ forward and backward
def _forward(signature: Signature) -> Iterator[str]:
    scopes, outputs = signature.scopes, _outputs(signature)
    for name, value in signature.numbers.items():
        prefix = f'"{signature.function} was exported for {name} = {value}, not "'
        yield f"TORCH_CHECK_VALUE({name} == {literal(value)}, {prefix}, {name});"
    yield "at::AutoDispatchBelowADInplaceOrView below;  // what follows is forward itself, not recorded"
    results = [_apart(signature, scopes.forward.name_of(o)) for o in scopes.forward.outputs]
    yield from _launched(signature, scopes.forward, scopes.tensors, results)
    if still := marked(signature):
        yield f"ctx->mark_non_differentiable({{{', '.join(still)}}});"
    if scopes.exported.backward is not None:
        if saved := [scopes.place_name(outputs, p) for p in scopes.exported.residuals]:
            yield f"ctx->save_for_backward({{{', '.join(saved)}}});"
        yield from _saved_sizes(signature)
    yield f"return {{{', '.join(outputs[: scopes.visible])}}};"


def _launched(signature: Signature, scope: Scope, arguments: Sequence[str], results: Sequence[str]) -> list[str]:
    """A call of a part's operator, which is looked up once."""
    operator = f"{signature.function}::{scope.part.method}"
    types = ", ".join([*["at::Tensor"] * len(scope.inputs), *["int64_t"] * len(scope.sizes)])
    return [
        "static const auto run =",
        f'    c10::Dispatcher::singleton().findSchemaOrThrow("{operator}", "")',
        f"        .typed<{result_type(scope)}({types})>();",
        f"auto [{', '.join(results)}] = run.call({', '.join(arguments)});",
    ]


def _saved_sizes(signature: Signature) -> Iterator[str]:
    scopes = signature.scopes
    assert scopes.exported.backward is not None
    for symbol in scopes.exported.backward.sizes:
        if isinstance(name := scopes.symbols[symbol], str):
            at, kind, axis = scopes.exported.sources[symbol]
            yield f'ctx->saved_data["{name}"] = {scopes.tensors[at]}.{kind}({axis});'


def _backward(signature: Signature, scope: Scope) -> Iterator[str]:
    scopes = signature.scopes
    saved = len(scopes.exported.residuals)
    if saved:
        yield "auto saved = ctx->get_saved_variables();"
    # Of the gradients of forward's tensor outputs those that backward reads.
    outputs = scopes.exported.specialization.captured.forward.outputs
    tensors = [k for k, o in zip(scopes.gradient_kinds, outputs, strict=True) if o.kind != "object"]
    moving = [i for i, k in enumerate(tensors) if k is not None]
    arguments = [f"saved[{i}]" for i in range(saved)] + [f"gradients[{i}]" for i in moving]
    arguments += [f'ctx->saved_data["{n}"].toInt()' for n in scope.sizes]
    gradients = [f"grad_{i}" for i in range(len(scope.outputs))]
    if gradients:
        yield from _launched(signature, scope, arguments, gradients)
    # One gradient for each argument that is asked for: computed, passed through, or none.
    names = dict(zip(scope.outputs, gradients, strict=True))
    positions = [i for i, k in enumerate(scopes.gradient_kinds) if k is not None]
    passed = {r: f"gradients[{moving[positions.index(g)]}]" for r, g in scope.part.passed.items()}
    slots = dict(enumerate(scope.part.graph.outputs))
    positions_asked = [i for i, n in enumerate(scopes.exported.names) if n in signature.parameters]
    results = [passed.get(i, "at::Tensor()" if slots[i] is None else names[slots[i]]) for i in positions_asked]  # type: ignore[index]
    yield f"return {{{', '.join(results)}}};"


def _by_name(signature: Signature) -> Iterator[str]:
    yield f"{signature.result_type()} {signature.function}({signature.declared()}) {{"
    yield f"  auto results = {signature.scopes.exported.name}::apply({', '.join(signature.parameters)});"
    count = signature.scopes.visible
    several = ", ".join(f"results[{i}]" for i in range(count))
    yield f"  return {several if count == 1 else f'{{{several}}}'};"
    yield "}"


# ------------------------------------------------------------------ operators
def operators(signature: Signature, plain: Sequence[str | None]) -> str:
    """The registered operators: the dispatcher chooses by device, and tracers see operators."""
    scopes = signature.scopes.all
    lines = [f"TORCH_LIBRARY({signature.function}, m) {{"]
    lines += [f'  m.def("{s.part.method}{schema(s)}");' for s in scopes]
    lines += [f'  m.def("{signature.schema()}", &{signature.function});', "}", ""]
    lines += [*_registered(signature, "CUDA", "with_kernels", plain), "", "#ifdef KERNELS_ON_CPU_TENSORS"]
    lines += [f"TORCH_LIBRARY_IMPL({signature.function}, CPU, m) {{", '  if (std::getenv("KERNELS_ON_CPU_TENSORS")) {']
    lines += [f"  {line}" for line in _impls(scopes, "with_kernels", plain)]
    lines += ["  } else {", *(f"  {line}" for line in _impls(scopes, "with_aten", plain)), "  }", "}", "#else"]
    lines += [*_registered(signature, "CPU", "with_aten", plain), "#endif", ""]
    lines += [*_registered(signature, "Meta", "shapes", plain), ""]
    lines += [f"TORCH_LIBRARY_IMPL({signature.function}, Autograd, m) {{"]
    lines += [f'  m.impl("{s.part.method}", torch::autograd::autogradNotImplementedFallback());' for s in scopes]
    return "\n".join([*lines, "}", "", "namespace {"])


def _registered(signature: Signature, key: str, suffix: str, plain: Sequence[str | None]) -> Iterator[str]:
    yield f"TORCH_LIBRARY_IMPL({signature.function}, {key}, m) {{"
    yield from _impls(signature.scopes.all, suffix, plain)
    yield "}"


def _impls(scopes: Sequence[Scope], suffix: str, plain: Sequence[str | None]) -> Iterator[str]:
    for scope, text in zip(scopes, plain, strict=True):
        if suffix == "with_aten" and text is None:
            yield f"  // {scope.part.method} has operations that ATen has no function for: it runs on the GPU alone"
        else:
            yield f'  m.impl("{scope.part.method}", &{scope.function}_{suffix});'
