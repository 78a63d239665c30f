"""Calls into compiled code: operators with an autograd kernel of their own, and functions of extension modules.

What C++ reads, and the backward that it brings, is out of the tracer's sight: such a call stays one node, so that it is
made as it is at run time and brings its own backward wherever the captured graph is differentiated.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, track_tensor_tree
from torch.utils._python_dispatch import TorchDispatchMode

from ...ir.errors import FusegradError
from ..arithmetic import SYMBOLIC
from ..containers import tensors_in
from ..reads.packages import is_cached
from ..reads.reads import Callee
from ..scoped_state import attribute_within
from ..torch_private import has_kernel, memory_of, operator_name, resolve_overload, transforms_active

Tensor = torch.Tensor
Origin = Callable[[], Any]
OWN_AUTOGRAD = ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd")


class CompiledCallError(FusegradError):
    """A call into compiled code cannot become a node. Internal: it ends as the reason of a record."""

    speaks = "inside"
    message = "{callee} is compiled code and {detail}"


class KeptDrawsError(CompiledCallError):
    """A function whose results Python keeps draws numbers, once for all. Internal."""

    message = "it calls `{callee}`, which keeps random numbers"


# ------------------------------------------------------------------ operators
def has_own_autograd(func: Any) -> bool:
    """True if `func` is an operator, not torch's own, whose C++ may record a backward of its own."""
    if operator_name(func) is None:
        return False
    overloads = [func] if isinstance(func, OpOverload) else [getattr(func, name) for name in func.overloads()]
    return any(has_kernel(_dispatch_name(o), key) for o in overloads for key in OWN_AUTOGRAD)


def _dispatch_name(op: OpOverload) -> str:
    overload = op._schema.overload_name
    return f"{op._schema.name}.{overload}" if overload else str(op._schema.name)


def operator_node(func: Any, args: Sequence[Any], kwargs: dict[str, Any], origin: Any) -> Any:
    """The call of an operator as one node, whatever operators its kernels call."""
    op = func if isinstance(func, OpOverload) else resolve_overload(func, args, kwargs)
    with disable_proxy_modes_tracing():
        result = func(*args, **kwargs)
    return add_call_node(op, args, kwargs, result, op._schema.name.split("::")[1], origin)


def add_call_node(target: Any, args: Any, kwargs: Any, result: Any, name: str, origin: Any) -> Any:
    """The result of a call that one node of the graph being traced stands for."""
    mode = get_proxy_mode()
    assert mode is not None
    traced = (Tensor, *SYMBOLIC)
    proxies, named = pytree.tree_map_only(traced, mode.tracer.unwrap_proxy, (tuple(args), kwargs))  # type: ignore[union-attr]
    proxy = mode.tracer.create_proxy("call_function", target, proxies, named, name=name)
    proxy.node.meta["fusegrad_origin"] = origin
    return track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)


# ------------------------------------------------------------------ functions of extension modules
_recording = threading.local()


@contextlib.contextmanager
def callees_as_nodes(callees: Sequence[Callee], origin: Origin) -> Iterator[None]:
    """Within the block this thread's calls of `callees` are recorded: they stand where the code finds them."""
    with attribute_within(_recording, "origin", origin), contextlib.ExitStack() as stack:
        for callee in callees:
            original = callee.get()
            callee.replace(recorder_of(original, callee.name))
            stack.callback(callee.replace, original)
        yield


def recorder_of(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function in the place of `function` during a capture: it records in the capturing thread, and calls in any
    other."""

    def call(*args: Any, **kwargs: Any) -> Any:
        origin = _recording_origin()
        if origin is None or _is_seen_through(function, args, kwargs):
            return _call_inline(_uncached(function), args, kwargs)
        return _as_node(function_of_node(function, name), function, name, args, kwargs)

    return call


def _uncached(function: Callable[..., Any]) -> Callable[..., Any]:
    """During a capture what computes a result that Python keeps: no fake may come into a cache, nor be found there."""
    is_capturing = getattr(_recording, "origin", None) is not None or get_proxy_mode() is not None
    return inspect.unwrap(function) if is_cached(function) and is_capturing else function


def _as_node(call: Callable[..., Any], function: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    """The call as a node; of what Python keeps, numbers and names are told as the function's own lines tell them."""
    body, origin = _uncached(function), _recording_origin()
    with disable_proxy_modes_tracing():
        run = _call_cached if is_cached(function) else _without_effects
        result = run(body, name, args, kwargs)
    if is_cached(function) and not all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
        return _call_inline(body, args, kwargs)
    return add_call_node(call, args, kwargs, result, name, None if origin is None else origin())


def _call_cached(body: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    """Calls a cached function for fakes; refused where it is drawn, which happens once for many calls."""
    with _Drawing() as drawing:  # type: ignore[no-untyped-call]
        result = body(*args, **kwargs)
    if drawing.draws:
        raise KeptDrawsError(callee=name)
    return result


class _Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """True if an operation of the block draws random numbers."""

    draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _is_seen_through(function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """True if the operations of a function are recorded, not its call: operators of a script are torch's, and in a
    derivative
    its own backward is recorded with it. What is cached without a tensor has none: the cache's own tensor is met."""
    if isinstance(function, torch.jit.ScriptFunction):
        return True
    is_differentiated = torch.is_grad_enabled() or transforms_active()
    return is_differentiated and (not is_cached(function) or bool(tensors_in((args, kwargs))))


def _recording_origin() -> Origin | None:
    """The function that tells the present line of the source; None where this thread records nothing."""
    return getattr(_recording, "origin", None) if get_proxy_mode() is not None else None


def _call_inline(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The call itself; the nodes that its operators leave, if any, are its line's."""
    origin, mode = _recording_origin(), get_proxy_mode()
    if origin is None or mode is None:
        return function(*args, **kwargs)
    last = newest_node(mode.tracer.graph)
    result = function(*args, **kwargs)
    for node in nodes_after(last, mode.tracer.graph):
        node.meta.setdefault("fusegrad_origin", origin())
    return result


def newest_node(graph: torch.fx.Graph) -> torch.fx.Node:
    """The last node so far; the root of an empty graph."""
    return next(iter(reversed(graph.nodes)), graph._root)  # torch 2.11 reverses to what is no iterator yet


def nodes_after(last: torch.fx.Node, graph: torch.fx.Graph) -> Iterator[torch.fx.Node]:
    """The nodes that were added since `last` was the newest."""
    while (last := last.next) is not graph._root:
        yield last


class RecordedNodes:
    """The nodes that a capture records from now on."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph, self.last = graph, newest_node(graph)

    @classmethod
    def begin(cls) -> RecordedNodes | None:
        """None where nothing is captured."""
        mode = get_proxy_mode()
        return None if mode is None else cls(mode.tracer.graph)

    def names(self) -> set[str]:
        """The operations, as "aten::add"."""
        targets = (n.target for n in nodes_after(self.last, self.graph))
        return {str(t._schema.name) for t in targets if isinstance(t, OpOverload)}

    def undo(self) -> None:
        """Without what was computed since; sizes that it read stay, since others may know of them."""
        _drop(self.graph, nodes_after(self.last, self.graph))


def without_zeros(graph: torch.fx.Graph) -> None:
    """Removes the operations that forward mode leaves idle: products with zeros that have no memory, on the meta
    device; talk of storage."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default):
        if _is_on_meta(node.args[0]) and not _is_on_meta(node):  # such zeros, with memory
            node.target = torch.ops.aten.zeros_like.default
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "non_blocking"}
    _drop(graph, (n for n in graph.nodes if n.target in _ASKED or _is_on_meta(n)))


_ASKED = (
    torch.ops.aten.is_same_size.default, torch.ops.aten._has_same_storage_numel.default,
    torch.ops.aten._efficientzerotensor.default,
)  # fmt: skip


def _is_on_meta(node: Any) -> bool:
    """Of a number, too, which a batching rule hands on in place of the tensor that torch made of it."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return isinstance(value, Tensor) and value.device.type == "meta"


def _drop(graph: torch.fx.Graph, nodes: Iterable[torch.fx.Node]) -> None:
    """Without those that nothing reads but others of them."""
    for node in reversed(list(nodes)):
        if not node.users and _is_pure(node):
            graph.erase_node(node)


def _is_pure(node: torch.fx.Node) -> bool:
    target, value = node.target, node.meta.get("val")
    if not isinstance(target, OpOverload) or isinstance(value, SYMBOLIC):
        return False
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


def _without_effects(function: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    """The function's result for fakes; refused where no node could stand for the call."""
    tensors = tensors_in((args, kwargs))
    versions, memory = [t._version for t in tensors], {memory_of(t) for t in tensors}
    result = function(*args, **kwargs)
    if [t._version for t in tensors] != versions:
        raise CompiledCallError(callee=name, detail="writes to its arguments")
    for leaf in pytree.tree_leaves(result):
        if not isinstance(leaf, Tensor | None):
            raise CompiledCallError(callee=name, detail=f"returns a {type(leaf).__name__}")
        if isinstance(leaf, Tensor) and memory_of(leaf) in memory:
            raise CompiledCallError(callee=name, detail="returns memory of its arguments")
    return result


_calls: dict[int, Callable[..., Any]] = {}


def function_of_node(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function that such a node runs: the same object for the same callee, so that nodes compare equal."""
    if id(function) not in _calls:

        def call(*args: Any, **kwargs: Any) -> Any:
            if get_proxy_mode() is None or not is_cached(function) or tensors_in((args, kwargs)):
                return _call_inline(_uncached(function), args, kwargs)
            return _as_node(call, function, name, args, kwargs)

        call.__name__ = call.__qualname__ = f"call_{name}"
        call.fusegrad_call = function  # type: ignore[attr-defined]
        _calls[id(function)] = call
    return _calls[id(function)]


def stray_node(gm: torch.fx.GraphModule) -> torch.fx.Node | None:
    """The first operation that no line of Python called: compiled code did, which no scan of the source had found.

    What makes a tensor from none brings no backward: types are no functions for torch, `torch.Tensor([2.0])` say. Nor
    does what leads to no result: `once_differentiable` has gradients detached that nothing differentiates.
    """
    calls = (n for n in gm.graph.nodes if isinstance(n.target, OpOverload) and isinstance(n.meta.get("val"), Tensor))
    strays = (n for n in calls if "fusegrad_origin" not in n.meta and not _is_made_from_nothing(n))
    return next((n for n in strays if not _is_idle(n)), None)


def _is_idle(node: torch.fx.Node) -> bool:
    """True if no result depends on it."""
    return _is_pure(node) and all(map(_is_idle, node.users))


def _is_made_from_nothing(node: torch.fx.Node) -> bool:
    """True if an operation reads no tensor, but for the numbers that it copies to a new one."""
    if node.target is torch.ops.aten.lift_fresh_copy.default:
        return True
    return not any(isinstance(n.meta.get("val"), Tensor) or n.op == "get_attr" for n in node.all_input_nodes)
