"""`@fusegrad.compile`: a Function class or a plain function in, what stands for it out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from ..tracer.declared import Option
from .compiled.derived_backward import valid_derive_jvp
from .compiled.options import Options
from .dispatch.compiled_class import CompileTargetError, compile_class, module_refused
from .dispatch.plain_function import compile_function
from .dispatch.pytree import compile_tree
from .settings.config import valid_backend, valid_numerics, valid_slab_bytes

C = TypeVar("C", bound=Callable[..., Any])
"""A class or a function: what is compiled keeps its static type."""


@overload
def compile(
    target: C,
    /,
    *,
    backend: str = "auto",
    fullgraph: bool = False,
    dynamic: bool = True,
    traceable: Option | None = None,
    pytree: bool = False,
    derive_jvp: str | bool = "backward",
    numerics: str = "eager",
    slab_bytes: int | None = None,
) -> C: ...


@overload
def compile(
    target: None = None,
    /,
    *,
    backend: str = "auto",
    fullgraph: bool = False,
    dynamic: bool = True,
    traceable: Option | None = None,
    pytree: bool = False,
    derive_jvp: str | bool = "backward",
    numerics: str = "eager",
    slab_bytes: int | None = None,
) -> Callable[[C], C]: ...


def compile(
    target: Any = None,
    /,
    *,
    backend: str = "auto",
    fullgraph: bool = False,
    dynamic: bool = True,
    traceable: Option | None = None,
    pytree: bool = False,
    derive_jvp: str | bool = "backward",
    numerics: str = "eager",
    slab_bytes: int | None = None,
) -> Any:
    """Compile a `torch.autograd.Function` class, or a plain function of tensors.

    The result is used as the original: `Fast.apply(...)`, or `fast(...)`. As a decorator: `@fusegrad.compile`, or
    `@fusegrad.compile(fullgraph=True)`.

    Args:
        target: The class or the function; left out where only options are given.
        backend: "auto" (triton for GPU tensors, the reference for CPU tensors), "triton", "interpret" (the generated
            Triton text under Triton's interpreter, on CPU), "reference" (the traced ATen operations), "inductor".
        fullgraph: Raise NotTraceableError where a method cannot be traced, instead of falling back to eager.
        dynamic: Sizes are symbols, so that one trace serves every batch size.
        traceable: True, False, or a dict of these by method ("forward", "backward", "jvp"), ahead of what the class
            says. A method that is not traceable runs in eager and is never traced; one that is has to be traced, or
            NotTraceableError is raised.
        pytree: Dicts, lists, tuples and registered containers of tensors are tracked, as arguments and as results;
            backward gets gradients in the structure of the output and returns one value in the structure of each
            argument.
        derive_jvp: What forward-mode AD is where the class has no jvp: "backward" (its transpose, so that
            straight-through and scaled gradients are honoured), "forward" (the derivative of forward), False (none:
            torch's own error).
        numerics: Of generated kernels: "eager" rounds where your operations round, with their accuracy; "fast" rounds
            low floats where they are stored alone, and takes the hardware's own quotients, roots and exponentials.
        slab_bytes: The bytes of memory that matmuls larger than their operands, and what is made of them, may hold;
            what would hold more is computed a slab of rows at a time. None: 256 MiB, or what the settings say.

    Returns:
        What stands for the target: a Function class, or a function, with the same static type. A decorator, where no
            target was given.

    Raises:
        CompileTargetError: for what is neither a Function class nor a function.
        ConfigError: for an unknown backend or numerics, or a `slab_bytes` that is no positive whole number.
        DeclarationError: for a `traceable` that is none.
        DeriveJvpError: for another `derive_jvp`.
    """
    valid_backend(backend)
    options = Options(
        backend, fullgraph, dynamic, traceable, valid_derive_jvp(derive_jvp), valid_numerics(numerics),
        None if slab_bytes is None else valid_slab_bytes(slab_bytes),
    )  # fmt: skip
    named = vars(options)
    if target is None:
        return functools.partial(compile, **named, pytree=pytree)
    if pytree:
        return compile_tree(target, functools.partial(compile, **named))
    if isinstance(target, type):
        return compile_class(target, options)
    if isinstance(target, torch.nn.Module) and any(True for _ in target.parameters()):
        raise module_refused(f"a {type(target).__name__}")
    if callable(target):
        return compile_function(target, options)
    raise CompileTargetError(
        what=repr(target)[:60],
        detail="it is neither a Function class nor a function",
        fix="pass the class or the function itself",
    )
