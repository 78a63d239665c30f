"""The private corners of torch that fusegrad needs, in one file; each has a public substitute where torch lacks it.

The substitutes are slower or refuse more often, never wrong: they are chosen at import by whether the name is there and
does what it should.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher
from torch._functorch.autograd_function import custom_function_call as custom_function_call
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd.function import Function
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..ir.versions import version_numbers
from .scoped_state import attribute_within

Tensor = torch.Tensor


def _private(path: str) -> Any:
    """torch's object at a dotted path, None where this version has none."""
    member: Any = torch
    for name in path.split("."):
        member = getattr(member, name, None)
    return member


_ENGINE = getattr(torch.autograd.Variable, "_execution_engine", None)


def is_engine(value: Any) -> bool:
    """True if a thing is autograd's engine, which keeps callbacks (`queue_callback`) for the running backward."""
    return _ENGINE is not None and value is _ENGINE


# ------------------------------------------------------------------ what is active around a call
def _transforms_active_by_interpreter() -> bool:
    from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

    return bool(retrieve_all_functorch_interpreters())


_functorch = _private("_C._are_functorch_transforms_active")
transforms_active: Callable[[], bool] = _functorch or _transforms_active_by_interpreter
"""True if a torch.func transform is active."""

begin_transform: Callable[[], Any] = _private("_C._functorch._grad_increment_nesting")
end_transform: Callable[[], Any] = _private("_C._functorch._grad_decrement_nesting")
"""Begin and end a level of torch.func.grad, within which nothing is computed."""

dispatch_modes: Callable[[], int] = _private("_C._len_torch_dispatch_stack") or (lambda: 0)
"""The number of active TorchDispatchModes (tracers, fake tensors)."""

no_modes: Callable[[], Any] = _private("utils._python_dispatch._disable_current_modes") or contextlib.nullcontext
"""Within the block no TorchDispatchMode sees anything."""

_modes: Callable[[], Sequence[Any]] = _private("utils._python_dispatch._get_current_dispatch_mode_stack") or tuple


def observing_mode() -> str | None:
    """The TorchDispatchMode that sees the operations on real tensors; None where there is none, or where one traces."""
    modes = _modes()
    tracing = any(getattr(mode, "_mode_key", None) is not None for mode in modes)
    return None if tracing or not modes else type(modes[-1]).__name__


function_modes: Callable[[], int] = _private("_C._len_torch_function_stack") or (lambda: 1)
"""The number of active TorchFunctionModes; 1 where torch does not say."""

grad_switch: Any = _private("_C._set_grad_enabled")
"""The function that `torch.no_grad()` calls, as a TorchFunctionMode sees it."""

neg_view: Callable[[Any], Any] = _private("_neg_view") or torch.neg
"""A view that shows the negative: the imaginary part of a lazy conjugate is one."""

_DETACH_IS_ALIAS = version_numbers(torch.__version__) >= (2, 14)
DETACHES: tuple[Any, ...] = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
"""The operations by which traces record a detach, of the user's and of autograd's own: up to torch 2.13, and from
2.14 on."""


def split_long_sums(graph: torch.fx.Graph) -> None:
    """Products and sums of two: make_fx writes one of all its terms for a size that it did not see made."""
    for node in [n for n in graph.nodes if n.target in (operator.mul, operator.add)]:
        while len(node.args) > 2:
            first, second, *more_operands = node.args
            with graph.inserting_before(node):
                inner = graph.call_function(node.target, (first, second))
            inner.meta["val"] = node.target(*(a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in inner.args))
            node.args = (inner, *more_operands)


def normalize_detach(graph: torch.fx.Graph) -> None:
    """`alias` makes a view where it is run, `detach` none: what torch 2.14 records for `detach` is put down as that."""
    detach, alias = DETACHES
    if _DETACH_IS_ALIAS:
        for node in graph.nodes:
            if node.target is alias:
                node.target = detach


def torchs_apply(cls: type) -> Callable[..., Any]:
    """torch's own `Function.apply`, as it is now, bound to a class that may have another one.

    A method written in Python up to torch 2.13, in C from 2.14 on.
    """
    return vars(Function)["apply"].__get__(None, cls)  # type: ignore[no-any-return]


jit_tracing: Callable[[], Any] = _private("_C._get_tracing_state") or torch.jit.is_tracing  # type: ignore[attr-defined]
"""True if torch.jit.trace runs."""


def dual_level() -> int:
    """The level of forward-mode AD, -1 outside, and where this thread works on plain tensors."""
    return -1 if getattr(_here, "plain", False) else int(getattr(forward_ad, "_current_level", -1))


@contextlib.contextmanager
def sharing_dual_level() -> Iterator[None]:
    """Within the block torch.func.jvp shares a level of forward mode that is open already: torch knows one at a time.

    That is how a jvp within a jvp works; what torch counts is how many there are.
    """
    transforms = _private("_functorch.eager_transforms")
    shares = getattr(forward_ad, "_current_level", -1) >= 0 and getattr(transforms, "JVP_NESTING", 1) == 0
    if shares:
        transforms.JVP_NESTING += 1
    try:
        yield
    finally:
        if shares:
            transforms.JVP_NESTING -= 1


_allow_leaves: Callable[[bool], Any] | None = _private("_C._functorch.set_inplace_requires_grad_allowed")
_leaves_allowed: Callable[[], bool] = _private("_C._functorch.get_inplace_requires_grad_allowed") or (lambda: True)


@contextlib.contextmanager
def own_leaves_allowed() -> Iterator[None]:
    """Within the block a method may have autograd follow a tensor of its own, as it may outside of torch.func."""
    before = _leaves_allowed()
    if _allow_leaves is not None:
        _allow_leaves(True)
    try:
        yield
    finally:
        if _allow_leaves is not None:
            _allow_leaves(before)


_here = threading.local()  # `plain`: whether this thread works on plain tensors; torch's level is one for all threads


@contextlib.contextmanager
def plain_tensors() -> Iterator[None]:
    """Within the block no transform, dual level or mode is active: for capturing, which works on plain tensors."""
    with attribute_within(_here, "plain", True, False), temporarily_clear_interpreter_stack(), no_modes():
        yield


@contextlib.contextmanager
def without_tangents() -> Iterator[None]:
    """Within the block no operation pushes tangents, and no level of forward mode is seen to be open."""
    with attribute_within(_here, "plain", True, False), _tangents_seen(False):
        yield


pushes_tangents: Callable[[], bool] = _private("_C._is_fwd_grad_enabled") or torch.is_grad_enabled
"""True if operations push tangents: not so within the forward of a Function."""


_tangents_seen: Callable[[bool], Any] = getattr(forward_ad, "_set_fwd_grad_enabled", None) or contextlib.nullcontext


def has_tangent(value: Any) -> bool:
    """True if a tensor of no transform is a dual number; seen within the forward of a Function, too."""
    if dual_level() < 0 or transforms_active() or not isinstance(value, Tensor):
        return False
    with _tangents_seen(True):
        pair: Any = forward_ad.unpack_dual(value)  # type: ignore[no-untyped-call]
    return pair.tangent is not None


def is_dual(value: Tensor) -> bool:
    """True if a tensor has a tangent, at the innermost level of forward mode."""
    if not forward_mode_is_active():
        return False
    pair: Any = forward_ad.unpack_dual(value)  # type: ignore[no-untyped-call]
    return pair.tangent is not None


def forward_mode_is_active() -> bool:
    """True if tangents are pushed forward, by torch.func.jvp or by dual numbers."""
    return dual_level() >= 0 or forward_levels() > 0


def derivatives_active() -> bool:
    """True if one of the active transforms differentiates."""
    return bool(levels_active())


def levels_active() -> list[str]:
    """The active transforms that differentiate, outermost first: Grad, Jvp."""
    from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

    return [name for i in retrieve_all_functorch_interpreters() if (name := i.key().name) in ("Grad", "Jvp")]


def forward_levels() -> int:
    """The number of active transforms that push tangents forward."""
    return levels_active().count("Jvp")


_levels: Any = _private("_C._functorch")
can_work_below: bool = all(hasattr(_levels, name) for name in ("_unwrap_for_grad", "_wrap_for_grad"))
"""True if `below_forward_mode` works with this torch."""


def below_forward_mode(function: Callable[..., Any], *values: Any) -> Any:
    """The results of a jvp, for the innermost level of forward mode, with the tangents of the levels around it.

    Within the jvp of a Function torch pushes no tangents; one level down, where nothing of the innermost level is
    left of the values, it does.
    """
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
    from torch.utils._pytree import tree_map_only

    interpreter = retrieve_current_functorch_interpreter()
    level = interpreter.level()
    inner = tree_map_only(Tensor, lambda t: _levels._unwrap_for_grad(t, level), values)
    with torch.enable_grad(), _tangents_seen(True), interpreter.lower():
        results = function(*inner)
    return tree_map_only(Tensor, lambda t: _levels._wrap_for_grad(t, level), results)


def hooks_are_active() -> bool:
    """True if saved tensors are packed by hooks: then autograd must see exactly what the user saved."""
    top = _private("_C._autograd._top_saved_tensors_default_hooks")
    return True if top is None else top(False) is not None


def without_hooks() -> contextlib.AbstractContextManager[Any]:
    """Within the block what autograd saves goes through no hooks: those are for the tensors of a call."""
    if not hooks_are_active():
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


_DICT = vars(torch.autograd.function.BackwardCFunction)["__dict__"].__get__


def dict_of_context(ctx: Any) -> dict[str, Any]:
    """The attributes of a node of autograd, past what its class shows; of the real one under compiled autograd."""
    return _DICT(ctx.real if type(ctx).__name__ == "FakeBackwardCFunction" else ctx)  # type: ignore[no-any-return]


# ------------------------------------------------------------------ tensors
def unwrap_functorch(tensor: Tensor) -> Tensor:
    """The tensor behind all functorch wrappers."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def first_of_every_batch(tensor: Tensor) -> Tensor | None:
    """The plain tensor behind all functorch wrappers, the first lane of each vmap: of the tensor's own shape.

    None where a vmap has no lane.
    """
    lanes: list[int] = []
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            lanes.append(torch._C._functorch.maybe_get_bdim(tensor))
        tensor = torch._C._functorch.get_unwrapped(tensor)
    for dim in reversed(lanes):
        if not tensor.shape[dim]:
            return None
        tensor = tensor.select(dim, 0)
    return tensor


def is_differentiated(tensor: Tensor) -> bool:
    """True if autograd follows a tensor, or one of the active transforms differentiates it."""
    from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

    kinds = {i.level(): i.key().name for i in retrieve_all_functorch_interpreters()}
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        kind = "Jvp" if _level_of is None else kinds.get(_level_of(tensor), "Jvp")
        if kind == "Jvp" or (kind == "Grad" and tensor.requires_grad):
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    with temporarily_clear_interpreter_stack():
        return tensor.requires_grad or has_tangent(tensor)


_dispatch_keys: Callable[[Any], Any] | None = _private("_C._dispatch_keys")
_parse = _private("_C._parse_dispatch_key")
_BATCHED = _parse("Batched") if _parse is not None else None


def is_fake(value: Any) -> bool:
    """True if a tensor has no data, behind all functorch wrappers; so has a subclass that is made of such."""
    if not isinstance(value, Tensor):
        return False
    inner = unwrap_functorch(value)
    if not is_wrapper_subclass(inner):
        return isinstance(inner, FakeTensor)
    names, _ = inner.__tensor_flatten__()  # type: ignore[attr-defined]
    return any(is_fake(getattr(inner, name)) for name in names)


def is_traced_by_aot(value: Tensor) -> bool:
    """True if AOTAutograd traces what a tensor subclass is made of, which no other tracer does."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
    return any(isinstance(getattr(value, name), FunctionalTensor) for name in names)


def is_wrapper_subclass(value: Any) -> bool:
    """True if the value is a tensor subclass that torch.compile takes apart: a DTensor, or a quantised tensor of a
    library."""
    return type(value) is not Tensor and is_traceable_wrapper_subclass(value)


def is_traced_elsewhere() -> bool:
    """True if operations are recorded in a graph (proxies), or made free of writes for one (functionalisation)."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

    kinds = (ProxyTorchDispatchMode, FunctionalTensorMode)
    return records_above_autograd() or any(isinstance(mode, kinds) for mode in _modes())


def records_above_autograd() -> bool:
    """True if torch.export records, above autograd and torch.func: there an operator is called as it is."""
    length = _private("_ops._len_torch_dispatch_stack_pre_dispatch")
    return length is not None and length() > 0


DYNAMO_TAKES_ANY_CLOSURE = version_numbers(torch.__version__) >= (2, 12)
"""Before, Dynamo looks into every variable of a closure that it meets as a value (`f = Class.apply`): torch 2.11."""


def guard_in_dynamo(facts: Callable[[], Any], name: str) -> bool:
    """Has what Dynamo is compiling compiled again where these facts are others; False where this torch cannot be told.

    torch 2.13: a guard on the root, with a place for the user's stack as its last argument; others may be without.
    """
    current = facts()
    messages = [f"fusegrad: what {name} reads"]

    def condition(builder: Any, guard: Any) -> None:
        root = builder.guard_manager.root
        try:
            root.add_lambda_guard(lambda _: facts() == current, messages, None)
        except TypeError:
            root.add_lambda_guard(lambda _: facts() == current, messages)

    try:
        from torch._dynamo.source import GlobalStateSource
        from torch._guards import Guard, TracingContext

        guards = TracingContext.try_get().guards_context.dynamo_guards  # type: ignore[union-attr]
        if not any(getattr(g.create_fn, "facts", None) == (name, current) for g in guards):
            condition.facts = name, current  # type: ignore[attr-defined]
            guards.add(Guard(GlobalStateSource(), condition))
    except (ImportError, AttributeError, TypeError):
        return False
    return True


@contextlib.contextmanager
def no_tracing_functions() -> Iterator[None]:
    """Within the block no tracer of torch.fx sees calls of torch's functions: torch.export records grad modes so."""
    pop, push = _private("_C._pop_torch_function_stack"), _private("_C._push_on_torch_function_stack")
    popped = [pop() for _ in range(function_modes())] if pop is not None and push is not None else []
    other_modes = [mode for mode in popped if not type(mode).__module__.startswith("torch.fx.")]
    for mode in reversed(other_modes):
        push(mode)
    try:
        yield
    finally:
        for _ in other_modes:
            pop()
        for mode in reversed(popped):
            push(mode)


def below_autograd(overload: Any, keyset: Any, args: Sequence[Any]) -> Any:
    """Calls the kernels beneath an operator's autograd kernel."""
    with torch._C._AutoDispatchBelowAutograd():
        return overload.redispatch(keyset & torch._C._after_autograd_keyset, *args)


_of_autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
for _name, _key in torch._C.DispatchKey.__members__.items():
    if _name.startswith("Autocast"):
        _of_autocast = _of_autocast.add(_key)


@contextlib.contextmanager
def above_autograd() -> Iterator[None]:
    """Within the block, which a kernel runs, torch is as outside of any operator: derivatives may be captured there,
    views know their bases, functions are made functional. Autocast stays on or off.
    """
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded & _of_autocast):
        yield


def is_batched(tensor: Any) -> bool:
    """True if `autograd.grad(..., is_grads_batched=True)` made the tensor: one that torch.func does not know."""
    if not isinstance(tensor, Tensor) or _dispatch_keys is None or _BATCHED is None:
        return False
    return bool(_dispatch_keys(tensor).has(_BATCHED))


_level_of: Callable[[Any], int] | None = _private("_C._functorch.maybe_get_level")
_current_level: Callable[[], int | None] = _private("_C._functorch.maybe_current_level") or (lambda: None)


def is_batched_here(value: Any) -> bool:
    """True if the innermost transform is a vmap that maps this tensor."""
    if not isinstance(value, Tensor) or not torch._C._functorch.is_batchedtensor(value):
        return False
    return _level_of is None or _level_of(value) == _current_level()


def memory_of(tensor: Tensor) -> int:
    """An identity of the memory that a tensor looks at, fake tensors included."""
    return int(tensor.untyped_storage()._cdata)


def share_memory(args: Sequence[Any]) -> bool:
    """True if two tensors look at the same memory, or one does twice, as an expanded one does."""
    tensors = [unwrap_functorch(a) for a in args if isinstance(a, Tensor)]
    return len({*map(memory_of, tensors)}) < len(tensors) or any(map(_repeats_itself, tensors))


def _repeats_itself(tensor: Tensor) -> bool:
    """False if no two elements are known to have one place in memory: each axis steps over all that inner ones do."""
    if tensor.is_contiguous() or tensor.layout is not torch.strided:
        return False
    reached = 0
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1):
        if stride <= reached:
            return True
        reached += stride * (size - 1)
    return False


_throw = _private("_C._set_throw_on_mutable_data_ptr")


def without_address(fake: Tensor) -> Tensor:
    """The fake tensor, on which `data_ptr()` raises instead of giving 0 (torch warns where it cannot be made to)."""
    if _throw is not None:
        _throw(fake)
    return fake


_guards = "_C._dynamo.guards"
empty_on_cpu: Callable[[Any, Any, torch.dtype], Tensor] = _private(f"{_guards}._empty_strided_cpu") or (
    lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)
)
"""`(shape, strides, dtype)` -> memory on the CPU, in a quarter of the time of `torch.empty_strided`."""

_empty_on_gpu = _private(f"{_guards}._empty_strided_cuda")


def allocator(device: torch.device) -> Callable[[Any, Any, torch.dtype], Tensor]:
    """`(shape, strides, dtype)` -> uninitialised memory on a device, by the shortest way there is."""
    if device.type == "cpu":
        return empty_on_cpu
    if device.type == "cuda" and _empty_on_gpu is not None and torch.cuda.device_count() == 1:
        return _empty_on_gpu  # type: ignore[no-any-return]  # which allocates on the current device
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


current_stream: Callable[[int], int] = _private("_C._cuda_getCurrentRawStream") or (
    lambda index: int(torch.cuda.current_stream(index).cuda_stream)
)
"""The handle of the stream that a GPU's work is queued on."""

current_device: Callable[[], int] = _private("_C._cuda_getDevice") or torch.cuda.current_device
"""The number of the GPU in use."""

_TensorGuards = _private(f"{_guards}.TensorGuards")


def tensor_check(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """`check(*others)`: whether they are like these but for their data. None where torch cannot tell, or not at once.

    It sees types, dtypes, devices, sizes, strides, `requires_grad` under the present grad mode, and through dispatch
    keys all that stands between a call and its kernel: transforms, modes, autocast, inference mode, tracing. The same
    tensor twice fits nothing.
    """
    if _TensorGuards is None or not tensors:
        return None
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    check = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check if check(*tensors) else None


deterministic: Callable[[], bool] = (
    _private("_C._get_deterministic_algorithms") or torch.are_deterministic_algorithms_enabled
)
"""True if `torch.use_deterministic_algorithms` is on."""

WITHOUT_TANGENTS = ("{}._current_level < 0", forward_ad)
"""No level of dual numbers is open, as a condition; `{}` is the object."""
UNSEEN = (WITHOUT_TANGENTS, ("not {}()", function_modes))
"""The states around a call that no `tensor_check` sees, as conditions that none is active; `{}` is the object."""


def is_cache(name: str) -> bool:
    """True if an attribute of a fake tensor is where torch's bindings keep its symbolic sizes and strides."""
    return name.startswith(("_sizes_capsule", "_strides_capsule", "_sym_sizes_capsule", "_sym_strides_capsule"))


# ------------------------------------------------------------------ running things
def direct_apply(node: type) -> Callable[..., Any]:
    """`apply` of a ctx-style Function without the Python one in between, which looks for transforms."""
    raw = getattr(super(Function, node), "apply", None)
    return raw if raw is not None else node.apply  # type: ignore[attr-defined,no-any-return]


boxes_gradients = hasattr(Function, "boxed_grads_call")
"""True if `boxed_grads_call` means anything: not in torch 2.11, which hands every backward its gradients one by one."""


def no_autocast() -> Any:
    """Within the block autocast adds no casts."""
    guard = _private("_C._DisableAutocast")
    return guard() if guard is not None else torch.autocast("cpu", enabled=False)


_SHRINKS = [op for n in ("hardshrink", "softshrink") if (op := _private(f"ops.aten.{n}.default")) is not None]


@contextlib.contextmanager
def symbolic_python() -> Iterator[None]:
    """Python decompositions ahead of the C++ ones, which turn some sizes (of F.pad, say) into constants.

    But not where an operation has a derivative of its own: that of its decomposition multiplies by zeros, which makes
    infinities NaN, and lays its result out in another way.
    """
    tables = [(op, op.py_kernels, op._dispatch_cache) for op in _SHRINKS if hasattr(op, "py_kernels")]
    removed = [(kernels, kernels.pop(torch._C.DispatchKey.Autograd, None)) for _, kernels, _ in tables]
    for _, _, cache in tables:
        cache.clear()
    try:
        with enable_python_dispatcher():
            yield
    finally:
        for kernels, kernel in removed:
            if kernel is not None:
                kernels[torch._C.DispatchKey.Autograd] = kernel
        for _, _, cache in tables:
            cache.clear()


_hash_of_size = torch.SymInt.__hash__


def _hash_by_value(size: torch.SymInt) -> int:
    """Torch's own, and where it has none that of the number, which the capture then holds for alone."""
    return hash(int(size)) if getattr(_here, "hashes", False) else _hash_of_size(size)


@contextlib.contextmanager
def sizes_as_keys() -> Iterator[None]:
    """Within the block a size can be looked up in a dict. Not always: einops takes a way of its own where it cannot."""
    before, _here.hashes = getattr(_here, "hashes", False), True
    torch.SymInt.__hash__ = _hash_by_value  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        _here.hashes = before
        if not before:
            torch.SymInt.__hash__ = _hash_of_size  # type: ignore[method-assign]


_float_of: Callable[[torch.SymInt], Any] = torch.sym_float


def _known_first(method: Callable[..., Any], divide: Callable[[float, float], float]) -> Callable[..., Any]:
    """The division of a size; of one that is a number by now, too, which torch has no division by floats of."""

    def divided(size: torch.SymInt, other: Any) -> Any:
        if isinstance(other, float) and isinstance(number := _float_of(size), float):
            return divide(number, other)
        return method(size, other)

    return divided


@contextlib.contextmanager
def sizes_divided_by_floats() -> Iterator[None]:
    """Within the block `0.1 / n` of a size that something has turned into a constant (F.one_hot, say)."""
    true, reverse = torch.SymInt.__truediv__, torch.SymInt.__rtruediv__
    with (
        attribute_within(torch.SymInt, "__truediv__", _known_first(true, operator.truediv)),
        attribute_within(torch.SymInt, "__rtruediv__", _known_first(reverse, lambda n, x: x / n)),
    ):
        yield


def through_compiled_functions() -> contextlib.AbstractContextManager[None]:
    """Within the block what torch.compile made of a function is the function itself: Dynamo refuses to be recorded."""
    config, switch = _private("_dynamo.config"), "error_on_nested_fx_trace"
    is_there = getattr(config, switch, None) is not None
    return attribute_within(config, switch, False) if is_there else contextlib.nullcontext()


_Legacy = type(torch.autograd.Variable)
_LEGACY_CALL = vars(_Legacy).get("__call__")


def _variable(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`Variable(t, requires_grad)`: what it is, in words that a capture hears of."""
    names = dict(zip(("data", "requires_grad"), args, strict=False)) | kwargs
    data = names.pop("data", None)
    if len(args) > 2 or names.keys() - {"requires_grad"} or not is_fake(data):
        return type.__call__(cls, *args, **kwargs)
    detached = data.detach()
    return detached.requires_grad_() if names.get("requires_grad") else detached


@contextlib.contextmanager
def variables_as_detached() -> Iterator[None]:
    """Within the block `torch.autograd.Variable` of a fake tensor is its `detach()`, which is all that it does."""
    if _LEGACY_CALL is not None or "__call__" in vars(_Legacy):
        yield
        return
    type.__setattr__(_Legacy, "__call__", _variable)
    try:
        yield
    finally:
        type.__delattr__(_Legacy, "__call__")


def functions_as_written() -> Any:
    """A block within which what torch.compile made of a function runs the function: Inductor rounds in its own way."""
    set_stance = _private("compiler.set_stance")
    return contextlib.nullcontext() if set_stance is None else set_stance("force_eager")


_within_kernel = _private("_subclasses.fake_tensor.in_kernel_invocation_manager")
_without_python = _private("_dispatch.python.no_python_dispatcher")
views_take_symbols = _within_kernel is not None and _without_python is not None
"""True if a kernel in C++ can be called on fake tensors."""


@contextlib.contextmanager
def within_kernel(mode: FakeTensorMode) -> Iterator[None]:
    """Within the block operations on the mode's fake tensors are kernels in C++, on tensors without data."""
    with _without_python(), _within_kernel(mode):
        yield


_lazy_modules = _private("fx._lazy_graph_module._use_lazy_graph_module")


def without_text() -> contextlib.AbstractContextManager[Any]:
    """Within the block graph modules are made without the text of their forward, which comes when one is called."""
    return contextlib.nullcontext() if _lazy_modules is None else _lazy_modules(True)


memory_like: Callable[[Tensor], Tensor] | None = _private("_lazy_clone")
"""Memory of its own for a tensor without data, its sizes taken over as they are; None where torch cannot."""


ASKS_DEVICE = torch.ops.prim.device.default
"""By which autograd, in C++ that lets no error through, asks a fake tensor: an error there ends the process."""


_proxies = _private("fx.experimental.proxy_tensor")
_slot = getattr(_proxies, "_ProxyTensor", None)
_of_symbol = getattr(_proxies, "fetch_sym_proxy", None)
extract_val: Callable[[Any], Any] = getattr(_proxies, "extract_val", lambda value: value.detach())
"""The facts that make_fx keeps of a tensor in the meta of its node."""
_complete = _slot is not None and _of_symbol is not None
ProxyMode: Any = getattr(_proxies, "ProxyTorchDispatchMode", object) if _complete else object
"""The dispatch mode by which make_fx records; `object` where this torch has another."""


def tracked_proxy(tracer: Any, tensor: Tensor) -> tuple[Any, Any]:
    """The proxy of a tensor in make_fx's tracer, and its value where that is a constant; None where it has none."""
    slot = tracer.tensor_tracker.get(tensor)
    return (None, None) if slot is None else (slot.proxy, slot.constant)


def remember_tensor(tracer: Any, tensor: Tensor, proxy: Any) -> None:
    """From now on the proxy stands for the tensor."""
    tracer.tensor_tracker[tensor] = _slot(proxy, None)  # type: ignore[misc]


def has_proxy(tracer: Any, symbol: Any) -> bool:
    """True if make_fx's tracer has a proxy for this very SymInt."""
    return symbol in getattr(tracer, "symnode_tracker", ())


def symbol_node(tracer: Any, symbol: Any) -> Any:
    """The node that computes a SymInt, or the number that it is."""
    proxy = _of_symbol(tracer)(symbol)  # type: ignore[misc]
    return proxy.node if isinstance(proxy, torch.fx.Proxy) else proxy


functions_of_torch: tuple[Any, ...] = (torch, _private("_C._nn"))
"""Where torch keeps functions that parse their arguments in C."""


def has_kernel(operator: str, key: str) -> bool:
    """True if a kernel is registered for `operator` ("namespace::name.overload") at a dispatch key or alias."""
    query = _private("_C._dispatch_has_kernel_for_dispatch_key")
    return True if query is None else bool(query(operator, key))


def resolve_overload(packet: Any, args: Any, kwargs: Any) -> Any:
    """The overload of an operator that takes these arguments."""
    if len(packet.overloads()) == 1:
        return getattr(packet, packet.overloads()[0])
    return getattr(packet, torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs) or "default")


_saved = _private("_C._FunctionBase.saved_tensors")
saved_tensors_can_be_told_apart = _saved is not None


def saved_tensors_of(node: Any) -> tuple[Any, ...]:
    """The tensors that a node saved, whatever its class shows as `saved_tensors`."""
    real = _saved is not None and isinstance(node, torch._C._FunctionBase)  # compiled autograd has a stand-in
    return _saved.__get__(node) if real else node.saved_tensors  # type: ignore[no-any-return]


def hide_from_dynamo(files: Iterable[str]) -> None:
    """Dynamo compiles no code of these files; where torch has no such list it may, which is slower."""
    listed = _private("_dynamo.trace_rules.FORCE_SKIP_FILES")
    if isinstance(listed, set):
        listed.update(files)


_TORCHS_OWN = {"aten", "prims", "prim", "profiler", "inductor", "higher_order", "c10d", "_c10d_functional", "rngprims"}


def operator_name(func: Any) -> str | None:
    """ "namespace::name" of a custom operator that is called; None for torch's own and for anything else."""
    if isinstance(func, torch._ops.OpOverload):
        name = func._schema.name
    elif isinstance(func, torch._ops.OpOverloadPacket):
        name = func._qualified_op_name
    else:
        return None
    return None if name.split("::")[0] in _TORCHS_OWN else name


def operation(target: Any) -> Any:
    """The C function behind an ATen operation, where torch shows it; the operation itself otherwise."""
    return getattr(target, "_op", target) if isinstance(target, torch._ops.OpOverload) else target


def expression_of(symbol: Any) -> Any:
    """The expression of a SymInt as it was made: `node.expr` puts in what its ShapeEnv has learnt since."""
    return getattr(symbol.node, "_expr", symbol.node.expr)


def torch_namespaces() -> list[tuple[str, dict[str, Any]]]:
    """Where a method finds torch's functions, by name: if any is not torch's own, user code put it there."""
    own = ("", "Tensor", "functional", "nn.functional", "special", "linalg", "fft")
    names = (*own, "_C.TensorBase", "_C._nn", "_C._special", "_C._linalg", "_C._fft")
    places = [(f"torch.{name}".rstrip("."), _private(name) if name else torch) for name in names]
    return [(name, dict(vars(place))) for name, place in places if place is not None]


def is_operator(function: Any) -> bool:
    """True if a compiled function is one of torch's operators: `torch.exp`, `torch.nn.functional.gelu`."""
    owner = function.__self__
    module = owner.__name__ if isinstance(owner, types.ModuleType) else ""
    return owner is _private("_C._VariableFunctions") or owner is _OPERATORS or module.startswith("torch._C._")


_OPERATORS = getattr(torch.sigmoid, "__self__", None)


def is_binding(function: Any) -> bool:
    """True if a compiled function is one of torch's bindings, which may tell of anything."""
    return function.__self__ is torch._C


def bindings_file() -> str | None:
    """The library that holds torch's bindings."""
    return torch._C.__file__


def python_implementations() -> list[str]:
    """ATen operations for which a library in Python brought an implementation; those that vmap brings late apart."""
    registered = map(str, getattr(torch.library, "_impls", ()))
    return [name for name in registered if name.startswith("aten/") and not name.endswith("/FuncTorchBatched")]


def graph_break(reason: str) -> Exception | None:
    """The error that breaks the graph which Dynamo makes right now, and says why; None where it makes none."""
    translator = _private("_dynamo.symbolic_convert.InstructionTranslator.current_tx")
    broken: Any = _private("_dynamo.exc.Unsupported")
    try:
        translator()
    except Exception:  # no frame is followed, or this torch tells of none
        return None
    return None if broken is None else broken(reason, "a call that fusegrad cannot put into a graph")
