"""A compiled Function as the files of a bundle: captured for every set of arguments that may need a gradient.

What a method could do differently in another process, or for other arguments, is captured apart, made a condition of
the call, or refused by name here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch.autograd.function import Function as TorchFunction

from ....ir.errors import LoweringError
from ....tracer.dtypes import from_torch
from ....tracer.methods import backward_method, is_once_differentiable, parameter_names, uses_setup_context
from ....tracer.trace import CaptureError
from ...cache.entry_files import sha256, versions
from ...compiled.compiled import Compiled
from ...persistence.literals import NoLiteral
from ...report.explain import compiler_of
from ...values.tensor_specs import fake_argument, with_gradients_asked
from ..gather.gathered import capture_refusal, export_error
from .archive import canonical
from .contents import FLAGS, Argument, Function
from .variant import GraphFiles, subsets, variant_of

Tensor = torch.Tensor


@dataclass
class CapturedBundle:
    """The files with graphs, each graph once, and the Function that speaks of them."""

    function: Function
    graphs: dict[str, bytes] = field(default_factory=dict)

    @property
    def manifest(self) -> dict[str, Any]:
        """The Function's part of the manifest."""
        content = canonical(self.function.data())
        sums = [f"{name} {sha256(graph)}\n".encode() for name, graph in sorted(self.graphs.items())]
        version_of = {**versions(), "torch": torch.__version__}
        return {"key": sha256(content + b"".join(sums)), "versions": version_of, "function": self.function.data()}


def capture_bundle(target_class: Any, args: Sequence[Any]) -> CapturedBundle:
    """Capture everything that a bundle holds. Raises ExportError."""
    compiler = compiler_of(target_class)
    if hasattr(target_class, "_fusegrad_flat"):
        raise export_error(compiler, "it is compiled with pytree=True, and a bundle holds plain arguments")
    complete = compiler.user.complete(tuple(args))
    if len(complete) != (len(compiler.user.signature().parameters) if compiler.user.setup_style else len(args)):
        raise export_error(compiler, "it takes tensors inside a container; make them arguments")
    stand_ins = with_gradients_asked([fake_argument(a) for a in complete])
    try:
        graphs = GraphFiles(compiler)
        return CapturedBundle(_function(compiler, stand_ins, graphs), graphs.files)
    except CaptureError as error:
        raise capture_refusal(compiler, error) from error
    except LoweringError as error:
        raise export_error(compiler, f"it cannot be written as a graph: {error}") from error
    except NoLiteral as error:
        raise export_error(compiler, f"it depends on {error}, which cannot be written down") from error


# ------------------------------------------------------------------ the Function
def _function(compiler: Compiled, args: Sequence[Any], graphs: GraphFiles) -> Function:
    """The Function of a manifest; its graphs go into the files."""
    compiler.keys.require_capturable()
    cls = compiler.user.cls
    method = backward_method(cls)
    if cls.backward is not TorchFunction.backward and cls.vjp is not TorchFunction.vjp:  # type: ignore[attr-defined]
        raise export_error(compiler, "it has both backward and vjp, which autograd refuses")
    arguments = tuple(_arguments(compiler, args))
    for argument in arguments:
        _require_literal(compiler, argument)
    variants = tuple(variant_of(compiler, args, needs, graphs) for needs in _gradient_subsets(args))
    # setup_context sees arguments and results alone: what is neither can be saved by forward only.
    saves_hidden = any(p is not None and p.kind == "hidden" for v in variants for p in v.residuals)
    style = "setup_context" if compiler.user.setup_style and not saves_hidden else "ctx"
    return Function(
        name=cls.__name__, doc=inspect.getdoc(cls) if cls.__doc__ else None, style=style,
        derive_jvp=compiler.options.derive_jvp, autocast=autocast_now(), flags=_flags(compiler, method),
        arguments=arguments, defaults=_defaults(compiler) if style == "setup_context" else (), variants=variants,
    )  # fmt: skip


def _flags(compiler: Compiled, method: Any) -> frozenset[str]:
    cls: Any = compiler.user.original
    true = {
        "once_differentiable": method is not None and is_once_differentiable(method),
        "has_backward": method is not None,
        "has_jvp": cls.jvp is not TorchFunction.jvp,
        "has_vmap": cls.vmap is not TorchFunction.vmap,
        "clear_saved_tensors_on_access": bool(getattr(cls, "clear_saved_tensors_on_access", False)),
    }
    return frozenset(flag for flag in FLAGS if true[flag])


def _arguments(compiler: Compiled, args: Sequence[Any]) -> Iterator[Argument]:
    skip = 0 if uses_setup_context(compiler.user.cls) else 1
    names = parameter_names(compiler.user.cls.forward, len(args), skip, "argument")  # type: ignore[attr-defined]
    for name, value in zip(names, args, strict=True):
        if isinstance(value, Tensor):
            yield Argument(name, from_torch(value.dtype), value.dim())
        else:
            yield Argument(name, constant=value)


def _require_literal(compiler: Compiled, argument: Argument) -> None:
    try:
        argument.data()
    except NoLiteral as error:
        raise export_error(compiler, f"its argument {argument.name} is {error}") from error


def _defaults(compiler: Compiled) -> tuple[Any, ...]:
    """The defaults of the last parameters that can be written down."""
    parameters = reversed(tuple(compiler.user.signature().parameters.values()))
    last = takewhile(lambda p: p.default is not p.empty, parameters)
    return tuple(p.default for p in last)[::-1]


def _gradient_subsets(args: Sequence[Any]) -> list[tuple[bool, ...]]:
    """The sets of tensors that may need a gradient together: all first. One that was given without never does."""
    asking = [a.requires_grad for a in args if isinstance(a, Tensor)]
    candidates = [*subsets([i for i, asks in enumerate(asking) if asks]), set()]
    return [tuple(i in on for i in range(len(asking))) for on in dict.fromkeys(map(frozenset, candidates))]


def autocast_now() -> tuple[str | None, str | None]:
    """The dtypes that autocast uses at present, on CPU and on a GPU."""
    cpu, cuda = (torch.get_autocast_dtype(k) if torch.is_autocast_enabled(k) else None for k in ("cpu", "cuda"))
    return _word(cpu), _word(cuda)


def _word(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
