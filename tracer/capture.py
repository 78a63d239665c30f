"""Capture: run Python once on fake tensors with symbolic sizes and keep the ATen operations as a graph.

One `Session` (one ShapeEnv, one fake mode) serves forward and backward of a specialisation, so that both speak of the
same symbols. Nothing of torch is patched outside a capture, and a capture restores what it touched even when it fails.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import sys
import threading
import traceback
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch._dynamo.source import ConstantSource, LocalSource  # a second, paid at import and not in the first call
from torch.autograd.function import Function
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode

from ..ir.errors import FusegradError
from .compiled import callees_as_nodes, has_own_autograd, operator_node, stray_node
from .reads import Reads
from .torch_private import (
    FakeTensor,
    FakeTensorMode,
    dispatch_modes,
    enable_python_dispatcher,
    jit_tracing,
    transforms_active,
    without_address,
)

capture_lock = threading.RLock()
"""One capture at a time in a process: make_fx patches module state while it runs."""

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PACKAGE_ROOMS = tuple(_OURS + room + os.sep for room in ("ir", "tracer", "codegen", "runtime"))
_DEMO = os.path.join(_OURS, "runtime", "demo_functions.py")  # written as a user would, and treated as his


class CaptureError(FusegradError):
    """The method cannot be captured. Internal: the runtime turns it into a record or into NotTraceableError."""

    speaks = "inside"
    message = "{reason}\n  at:   {where}"


@dataclass
class Trace:
    """A captured graph: its placeholders are `fakes`, then one per captured tensor, in order."""

    graph_module: torch.fx.GraphModule
    fakes: list[Any]
    lifted: list[torch.Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of `fakes`, in the user's words; empty: the placeholders' own
    output_names: list[str] = field(default_factory=list)  # for outputs that have no name in the user's source


class Session:
    """Where sizes have names. `size_limit`: sizes stay concrete when `dynamic` is False."""

    def __init__(self, dynamic: bool = True) -> None:
        self.dynamic = dynamic
        self.env = ShapeEnv(duck_shape=False)
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.named: list[tuple[str, Any]] = []

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake of `tensor` whose sizes are fresh symbols; reading its memory raises."""
        name = f"t{len(self.named)}"
        sizes = DimDynamic.DYNAMIC if self.dynamic else DimDynamic.STATIC
        context: Any = StatelessSymbolicContext(
            dynamic_sizes=[sizes] * tensor.dim(), dynamic_strides=[DimDynamic.INFER_STRIDE] * tensor.dim()
        )
        with torch.no_grad():
            fake = self.mode.from_tensor(_without_memory(tensor), source=LocalSource(name), symbolic_context=context)
        self.named.append((name, fake))
        return _guarded_memory(fake, tensor.requires_grad)

    def conditions(self, known: Collection[sympy.Symbol], since: int = 0) -> tuple[sympy.Basic, ...]:
        """What the traces assumed about sizes, from guard number `since` on, over the symbols that are `known`."""
        found = (
            g.expr if g.expr.free_symbols <= set(known) else self.env.replace(g.expr) for g in self.env.guards[since:]
        )
        return tuple(dict.fromkeys(c for c in found if c is not sympy.true and c.free_symbols <= set(known)))

    def fake_like(self, like: torch.Tensor, expanded: bool = False) -> torch.Tensor:
        """A fake gradient of a fake output: its shape, row-major, or every stride 0."""
        shape = settled(like.shape)
        with self.mode, torch.no_grad():
            if expanded:
                fake = torch.empty((), dtype=like.dtype, device=like.device).expand(shape)
            else:
                fake = torch.empty(shape, dtype=like.dtype, device=like.device)
        return _guarded_memory(fake, False)

    def fake_again(self, fake: torch.Tensor) -> torch.Tensor:
        """The same metadata as a fresh fake: sizes that an earlier trace made constant are plain ints in it."""
        with self.mode, torch.no_grad():
            again = torch.empty_strided(
                settled(fake.shape), settled(fake.stride()), dtype=fake.dtype, device=fake.device
            )
        return _guarded_memory(again, fake.requires_grad)

    def fake_permuted(self, like: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        """A fake gradient of a fake output: its shape, dense; `order` names its axes from outermost to innermost.

        ~axis: the stride along it is 0.
        """
        strides: list[Any] = [0] * like.dim()
        step: Any = 1
        for axis in (a for a in reversed(order) if a >= 0):
            strides[axis] = step
            step = step * like.shape[axis]
        with self.mode, torch.no_grad():
            fake = torch.empty_strided(settled(like.shape), settled(strides), dtype=like.dtype, device=like.device)
        return _guarded_memory(fake, False)

    def integer(self, value: int) -> Any:
        """A fresh symbolic integer with the hint `value`."""
        source = ConstantSource(f"i{len(self.named)}")
        symint = self.env.create_unspecified_symint_and_symbol(value, source, DimDynamic.DYNAMIC)
        self.named.append((source.source_name if hasattr(source, "source_name") else f"i{len(self.named)}", symint))
        return symint

    def trace(
        self, fn: Callable[..., Any], fakes: Sequence[Any], reads: Reads | None = None, from_source: bool = True
    ) -> Trace:
        """The ATen graph of `fn(*fakes)`. Tensors from outside become extra placeholders, each found in `reads`.

        from_source: every operation has to come from a line of Python; not so where a captured graph is batched.
        """
        cache, before = torch.is_autocast_cache_enabled(), reads.facts() if reads is not None else ()
        callees = list(reads.callees.values()) if reads is not None else []
        with (
            capture_lock, self.mode, torch.no_grad(), _symbolic_python(), _nested_functions_as_calls(), _Provenance(),
            callees_as_nodes(callees, lambda: _origin_of(user_frame())),
        ):  # fmt: skip
            try:
                torch.set_autocast_cache_enabled(False)
                gm = make_fx(fn, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)
            finally:
                torch.set_autocast_cache_enabled(cache)
        _refuse_data_dependence(gm)
        if from_source:
            _refuse_unseen_calls(gm)
        lifted = _lift_captured(gm, reads)
        _refuse_outside_writes(gm, len(lifted))
        if reads is not None and (changed := reads.changed(before)) is not None:
            raise CaptureError(reason=f"it changes the {changed}, which it also reads", where="unknown")
        return Trace(gm, list(fakes), lifted)


def _symbolic_python() -> Any:
    """Python decompositions ahead of the C++ ones, which turn some sizes (of F.pad, say) into constants."""
    return enable_python_dispatcher()


def settled(sizes: Sequence[Any]) -> list[Any]:
    """Sizes as ints where the session has learnt their value, else as the symbols that they are."""
    return [s if isinstance(s, int) or not s.node.expr.is_number else int(s.node.expr) for s in sizes]


def is_capturing() -> bool:
    """Whether Python code runs under a tracer (ours or another), so that no capture may begin."""
    return bool(dispatch_modes()) or bool(jit_tracing())


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The same metadata at storage offset 0: where a view begins must not decide which graph is used."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _guarded_memory(fake: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    without_address(fake)
    return fake.requires_grad_() if requires_grad else fake


# ------------------------------------------------------------------ where something happened
def user_frame() -> types.FrameType | None:
    """The innermost frame outside torch and fusegrad's own rooms."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def is_user_file(filename: str) -> bool:
    return filename == _DEMO or not filename.startswith((_TORCH, *_PACKAGE_ROOMS, "<frozen"))


def where_raised(error: BaseException) -> str:
    """`file:line` of the last user frame that the error passed through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_user_file(f.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown"


class _Provenance(TorchFunctionMode):
    """Marks every node with the user's line that caused it: meta["fusegrad_origin"] = (name, where, line)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        proxy_mode = get_proxy_mode()
        graph = getattr(getattr(proxy_mode, "tracer", None), "graph", None)
        if graph is None:  # what runs by chance before the graph begins: a generator that is finalised, say
            return func(*args, **(kwargs or {}))
        _refuse_real_write(func, args, kwargs or {})
        if not torch.is_grad_enabled() and not transforms_active() and has_own_autograd(func):
            return operator_node(func, args, kwargs or {}, _origin_of(user_frame()))
        last = next(reversed(graph.nodes), graph._root)
        result = func(*args, **(kwargs or {}))
        node = last.next
        if node is not graph._root:
            origin = _origin_of(user_frame())
            while node is not graph._root:
                node.meta.setdefault("fusegrad_origin", origin)
                node = node.next
        return result


def _refuse_real_write(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """A tensor from outside is no fake: a write to it would happen while tracing."""
    written = kwargs.get("out", args[0] if args and _is_in_place(getattr(func, "__name__", "")) else None)
    real = isinstance(written, torch.Tensor) and not isinstance(written, FakeTensor)
    if real and (frame := user_frame()) is not None:
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        raise CaptureError(reason="it writes to a tensor that is no argument", where=place)


def _is_in_place(name: str) -> bool:
    return name in ("__setitem__", "__delitem__") or (name.startswith("__i") and name not in _QUESTIONS) or (
        name.endswith("_") and not name.endswith("__")
    )  # fmt: skip


_QUESTIONS = ("__invert__", "__int__", "__index__", "__iter__", "__init__")
_ASSIGNMENT = re.compile(r"^\s*([A-Za-z_]\w*)\s*(?::[^=]+)?=[^=]")


def _origin_of(frame: types.FrameType | None) -> tuple[str | None, str, str] | None:
    if frame is None:
        return None
    filename, lineno = frame.f_code.co_filename, frame.f_lineno
    line = linecache.getline(filename, lineno).strip()
    assigned = _ASSIGNMENT.match(line)
    return (assigned.group(1) if assigned else None, f"{filename}:{lineno}", line)


# ------------------------------------------------------------------ nested Functions stay one node
_capturing = threading.local()


class _Template:
    """Holds the code that `Function.apply` runs during a capture; it has the same free variable."""

    @classmethod
    def apply(cls, *args, **kwargs):  # type: ignore[no-untyped-def]
        __class__  # type: ignore[name-defined]  # noqa: B018  the free variable that Function.apply's own code has
        import torch as _torch

        return _torch._fusegrad_nested_call(cls, args, kwargs)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _nested_functions_as_calls() -> Iterator[None]:
    """While capturing, `Function.apply` (aliases included) becomes one `call` node instead of its inlined forward.

    Only with grad mode off: where autograd records (derivatives), it records the nested Function's own backward.
    """
    if getattr(_capturing, "depth", 0):
        yield
        return
    original = Function.apply.__func__  # type: ignore[attr-defined]
    code = original.__code__
    plain = types.FunctionType(
        code, original.__globals__, original.__name__, original.__defaults__, original.__closure__
    )
    _capturing.depth = 1
    torch._fusegrad_nested_call = lambda cls, args, kwargs: _nested_call(plain, cls, args, kwargs)  # type: ignore[attr-defined]
    try:
        with contextlib.suppress(ValueError):  # a torch whose apply has other free variables: nested calls are inlined
            original.__code__ = _Template.apply.__func__.__code__  # type: ignore[attr-defined]
        yield
    finally:
        original.__code__ = code
        del torch._fusegrad_nested_call  # type: ignore[attr-defined]
        _capturing.depth = 0


def _nested_call(plain: Callable[..., Any], cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mode = get_proxy_mode() if getattr(_capturing, "depth", 0) else None
    if mode is None or torch.is_grad_enabled() or kwargs or transforms_active():
        return plain(cls, *args, **kwargs)
    cls = getattr(cls, "_fusegrad_user_class", cls)
    with disable_proxy_modes_tracing():
        result = plain(cls, *args)
    proxies = pytree.tree_map_only((torch.Tensor, torch.SymInt, torch.SymFloat), mode.tracer.unwrap_proxy, args)  # type: ignore[union-attr]
    proxy = mode.tracer.create_proxy("call_function", call_of(cls), proxies, {}, name=cls.__name__)
    proxy.node.meta["fusegrad_origin"] = _origin_of(user_frame())
    return track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)


_calls: dict[type, Callable[..., Any]] = {}


def call_of(cls: type) -> Callable[..., Any]:
    """The function that a `call` node runs: the same object for the same class, so that nodes compare equal."""
    if cls not in _calls:

        def call(*args: Any) -> Any:
            return cls.apply(*args)  # type: ignore[attr-defined]

        call.__name__ = call.__qualname__ = f"call_{cls.__name__}"
        call.fusegrad_call = cls  # type: ignore[attr-defined]
        _calls[cls] = call
    return _calls[cls]


# ------------------------------------------------------------------ after the trace
def _lift_captured(gm: torch.fx.GraphModule, reads: Reads | None) -> list[torch.Tensor]:
    """Tensors from outside become placeholders at the end. A tensor made during the trace stays a constant."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    anchor = placeholders[-1] if placeholders else None
    lifted: list[torch.Tensor] = []
    nodes: dict[int, torch.fx.Node] = {}
    for node in [n for n in gm.graph.nodes if n.op == "get_attr"]:
        tensor = getattr(gm, node.target, None)
        if not isinstance(tensor, torch.Tensor) or _made_during_trace(node):
            continue
        if reads is not None and reads.tensor_path(tensor) is None:
            raise CaptureError(
                reason=f"it reads a tensor {tuple(tensor.shape)} that cannot be found again on the next call",
                where="unknown",
            )
        if id(tensor) not in nodes:
            insert = (
                gm.graph.inserting_after(anchor) if anchor else gm.graph.inserting_before(next(iter(gm.graph.nodes)))
            )
            with insert:
                anchor = nodes[id(tensor)] = gm.graph.placeholder(f"captured_{len(lifted)}")
            anchor.meta["val"] = node.meta.get("val")
            lifted.append(tensor)
        node.replace_all_uses_with(nodes[id(tensor)])
        gm.graph.erase_node(node)
    gm.recompile()
    return lifted


def _made_during_trace(node: torch.fx.Node) -> bool:
    return all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)


_DATA_READS = {"aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero"}


def _refuse_data_dependence(gm: torch.fx.GraphModule) -> None:
    """`.item()` used as a number replays right, but a promise of `is_traceable` excludes it: refused with its line."""
    for node in gm.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.name in _DATA_READS:
            origin = node.meta.get("fusegrad_origin")
            raise CaptureError(
                reason=f"it reads the data of a tensor (`{schema.name.split('::')[1]}`)",
                where=origin[1] if origin else "unknown",
            )


def _refuse_unseen_calls(gm: torch.fx.GraphModule) -> None:
    """Operations that compiled code made behind Python's back: a backward that it brings would be lost."""
    stray = stray_node(gm)
    if stray is not None:
        reason = f"it calls compiled code (its `{stray.target}`) in a way that the source does not show"
        raise CaptureError(reason=reason, where="unknown")


def _refuse_outside_writes(gm: torch.fx.GraphModule, lifted: int) -> None:
    """A write to a tensor that is no argument has to happen once a call, in the user's own body."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    write = _first_write(gm, placeholders[len(placeholders) - lifted :])
    if write is not None:
        origin = write.meta.get("fusegrad_origin")
        raise CaptureError(
            reason="it writes to a tensor that is no argument", where=origin[1] if origin else "unknown"
        )


def written_placeholders(gm: torch.fx.GraphModule, count: int) -> list[int]:
    """The first `count` inputs to whose memory the graph writes."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"][:count]
    return [i for i, node in enumerate(placeholders) if _first_write(gm, [node]) is not None]


def _first_write(gm: torch.fx.GraphModule, roots: Sequence[torch.fx.Node]) -> torch.fx.Node | None:
    """The first node that writes to one of `roots`, or to a view of one."""
    watched = set(roots)
    for node in gm.graph.nodes if watched else ():
        touched = [a for a in node.all_input_nodes if a in watched]
        if not touched or (schema := getattr(node.target, "_schema", None)) is None:
            continue
        if any(_writes(schema, node, a) for a in touched):
            return node  # type: ignore[no-any-return]
        if any(r.alias_info is not None for r in schema.returns):
            watched.add(node)
    return None


def _writes(schema: Any, node: torch.fx.Node, operand: torch.fx.Node) -> bool:
    given = [*zip(schema.arguments, node.args, strict=False)]
    given += [(a, node.kwargs[a.name]) for a in schema.arguments if a.name in node.kwargs]
    written = [v for a, v in given if a.alias_info is not None and a.alias_info.is_write]
    return any(operand in (v if isinstance(v, list | tuple) else (v,)) for v in written)
