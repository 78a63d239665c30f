"""`fusegrad.load`: a Function class from a bundle, in a process that has never seen the original."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ....ir import Graph
from ....ir.text.document import FAULTS, graph_from
from ...compiled.options import Options
from ...dispatch.compiled_class import compile_class
from .archive import MANIFEST, BundleError, BundleWarning, bundle_error, parse_json, read_bundle
from .contents import Function, function_from, require_fitting
from .interpreter import BundleInterpreter
from .operators import why_not_portable

SECTIONS = ("format", "schema", "key", "versions", "function", "module", "targets", "files", "seal")


def load(path: Any, trust: bool = False) -> type:
    """The Function class of a bundle that `fusegrad.export(.., path="x.zip")` wrote: `load("x.zip").apply(..)`.

    The class runs like any that fusegrad compiled: through torch on a CPU, on a GPU through kernels that the installed
    fusegrad generates from the graphs (binaries in the bundle are for other hosts; they are verified, and not used).
    Forward, backward, gradients of gradients and torch.func work as for the original; where that had a jvp or vmap of
    its own, these raise. The class raises BundleCallError for arguments that it was not exported for.

    Args:
        path: Of the zip file or the directory.
        trust: False executes no code of the bundle: its graphs are data, checked node by node. True imports the Triton
            module in the bundle instead and returns its class: forward and backward alone.

    Returns:
        A Function class.

    Raises:
        BundleError: for whatever is damaged, altered, unknown or hostile.

    Warns:
        BundleWarning: of damaged binaries, which are ignored.
    """
    manifest, files, damaged = read_bundle(path)
    if damaged:
        warnings.warn(f"bundle {path}: ignored, damaged or missing: {', '.join(damaged)}", BundleWarning, stacklevel=2)
    if set(manifest) != set(SECTIONS):
        raise bundle_error(path, MANIFEST, "it does not have the sections of a manifest")
    function, graphs = contents(manifest["function"], files, path)
    return _imported(manifest, files, function, path) if trust else function_class(function, graphs)


def contents(data: Any, files: Mapping[str, bytes], path: Any) -> tuple[Function, dict[str, Graph]]:
    """The Function that a manifest describes, and its graphs by file. Raises BundleError."""
    file = MANIFEST
    try:
        function = function_from(data)
        graphs = {}
        for file in sorted({g for v in function.variants for g in (v.graph, *(e.graph for e in v.entries))}):
            graphs[file] = _graph(files[file], path, file)
        file = MANIFEST
        require_fitting(function, graphs)
    except BundleError:
        raise
    except FAULTS as error:
        detail = str(getattr(error, "facts", {}).get("detail", error))
        place = getattr(error, "facts", {}).get("line", "")
        raise bundle_error(
            path, file, f"{place}: {detail}" if place else f"{type(error).__name__}: {detail}"[:300]
        ) from error
    return function, graphs


def _graph(content: bytes, path: Any, file: str) -> Graph:
    graph = graph_from(parse_json(content, path, file))
    for value in graph:
        if (reason := why_not_portable(value)) is not None:
            raise bundle_error(path, file, f"{value!r}: {reason}")
    return graph


# ------------------------------------------------------------------ the class
def function_class(function: Function, graphs: Mapping[str, Graph]) -> type:
    """A compiled class whose methods run the graphs."""
    player = BundleInterpreter(function, graphs)
    make = _setup_style if function.style == "setup_context" else _ctx_style
    body: dict[str, Any] = {name: staticmethod(rule) for name, rule in make(player).items()}
    if "has_backward" in function.flags:
        body["backward"] = staticmethod(_backward(player))
    body |= {name: staticmethod(_missing(player, name)) for name in ("jvp", "vmap") if f"has_{name}" in function.flags}
    if "clear_saved_tensors_on_access" in function.flags:
        body["clear_saved_tensors_on_access"] = True
    plain = type(function.name, (torch.autograd.Function,), {**body, "__doc__": function.doc, "__module__": __name__})
    return compile_class(plain, Options("auto", derive_jvp=function.derive_jvp))


def _signature(function: Function, first: tuple[str, ...]) -> inspect.Signature:
    """Parameters with the user's names and defaults."""
    names = [*first, *(a.name for a in function.arguments)]
    defaults = [inspect.Parameter.empty] * (len(names) - len(function.defaults)) + [*function.defaults]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(n, kind, default=d) for n, d in zip(names, defaults, strict=True)])


def _keep(ctx: Any, result: Any) -> None:
    """The attributes that forward leaves on ctx."""
    variant = result.variant
    ctx.save_for_backward(*map(result.at, variant.saved))
    for number, place in enumerate(variant.attributes):
        setattr(ctx, f"kept_{number}", result.at(place))
    ctx.variant, ctx.sizes = result.number, tuple(result.sizes[s] for s in variant.symbols.values())
    if variant.dirty:
        ctx.mark_dirty(*map(result.at, variant.dirty))
    if variant.non_differentiable:
        ctx.mark_non_differentiable(*map(result.at, variant.non_differentiable))
    if not variant.materialize_grads:
        ctx.set_materialize_grads(False)


def _ctx_style(player: BundleInterpreter) -> dict[str, Callable[..., Any]]:
    def forward(ctx: Any, *args: Any) -> Any:
        result = player.forward(args)
        _keep(ctx, result)
        return result.returned()

    forward.__signature__ = _signature(player.function, ("ctx",))  # type: ignore[attr-defined]
    return {"forward": forward}


def _setup_style(player: BundleInterpreter) -> dict[str, Callable[..., Any]]:
    def forward(*args: Any) -> Any:
        return player.forward(args).returned()

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _keep(ctx, player.match_outputs(inputs, output))

    forward.__signature__ = _signature(player.function, ())  # type: ignore[attr-defined]
    return {"forward": forward, "setup_context": setup_context}


def _backward(player: BundleInterpreter) -> Callable[..., Any]:
    def backward(ctx: Any, *gradients: Any) -> Any:
        attributes = player.function.variants[ctx.variant].attributes
        residuals = [*ctx.saved_tensors, *(getattr(ctx, f"kept_{n}") for n in range(len(attributes)))]
        return player.backward(ctx.variant, ctx.sizes, residuals, gradients)

    return once_differentiable(backward) if "once_differentiable" in player.function.flags else backward


def _missing(player: BundleInterpreter, name: str) -> Callable[..., Any]:
    def rule(*args: Any) -> Any:
        fix = f"export a class without a {name} of its own, or use the original."
        raise player.call_error(f"the {name} that its author wrote is not in it, and no other may stand in for it", fix)

    return rule


# ------------------------------------------------------------------ with trust
def _imported(manifest: dict[str, Any], files: Mapping[str, bytes], function: Function, path: Any) -> type:
    """The class of the Triton module in the bundle, whose text is executed."""
    from ...kernels.triton_module import load as module_of

    name = "module.py"
    if name not in files:
        raise bundle_error(path, name, f"it is not there: {manifest['module']}", "load it with trust=False.")
    loaded = getattr(module_of(files[name].decode()), function.name, None)
    if not (isinstance(loaded, type) and issubclass(loaded, torch.autograd.Function)):
        raise bundle_error(path, name, f"it defines no Function {function.name}")
    return loaded
