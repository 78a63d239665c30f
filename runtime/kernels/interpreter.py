"""Run generated Triton text in this process, on CPU tensors, one program after the other.

`triton.language` is exchanged for an interpreting version while a launch runs, under one lock, and restored afterwards:
TRITON_INTERPRET is never set, and ordinary @triton.jit functions keep working. No other thread may trace meanwhile.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...codegen.kernel import Kernel, Pointer
from ...ir.errors import IndexOutOfRangeError, KernelFaultError, UnsupportedBackendError
from ...ir.text.syntax_trees import parse
from ...tracer.locks import KERNEL, lock_of
from .triton_module import TRITON_DTYPE, load

if TYPE_CHECKING:
    from . import triton_private

_LOCK = lock_of(KERNEL)
_MISSING = object()


# -- kernel text -> Python functions -----------------------------------------------------------------------------------


def _assigned_names(nodes: Sequence[ast.AST]) -> set[str]:
    """Names that are assigned somewhere below `nodes`."""
    walked = (n for node in nodes for n in ast.walk(node))
    return {n.id for n in walked if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _carried_names(function: ast.FunctionDef) -> set[str]:
    """Names that a loop or a branch assigns: the compiler makes tensors of them."""
    blocks = [n for n in ast.walk(function) if isinstance(n, (ast.For, ast.While, ast.If))]
    return set().union(*(_assigned_names([*block.body, *block.orelse]) for block in blocks))


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


def _thunk(value: ast.expr) -> ast.Lambda:
    return ast.Lambda(ast.arguments([], [], None, [], [], None, []), value)


class _Rewrite(ast.NodeTransformer):
    """Give Python's control flow its meaning in a kernel.

    if c: / while c:   ->  if _truth(c):          a and b  ->  _both(a, lambda: b)
    acc = 0.0          ->  acc = _carried(0.0)    where a loop or branch assigns acc
    """

    def __init__(self, carried: set[str]) -> None:
        self.carried = carried

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        self.generic_visit(node)
        if isinstance(node.targets[0], ast.Name) and node.targets[0].id in self.carried:
            node.value = _call("_carried", node.value)
        return node

    def _condition(self, node: Any) -> Any:
        self.generic_visit(node)
        node.test = _call("_truth", node.test)
        return node

    visit_If = visit_While = visit_IfExp = _condition

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        name = "_both" if isinstance(node.op, ast.And) else "_either"
        return functools.reduce(lambda left, right: _call(name, left, _thunk(right)), node.values)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        return _call("_opposite", node.operand) if isinstance(node.op, ast.Not) else node


def _rewritten_definition(function: Callable[..., Any]) -> ast.FunctionDef:
    """The definition of a kernel function without decorators and annotations, rewritten, at its own line numbers."""
    lines, first = inspect.getsourcelines(function)
    definition = parse(textwrap.dedent("".join(lines))).body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list.clear()
    for arg in ast.walk(definition.args):
        if isinstance(arg, ast.arg):
            arg.annotation = None
    _Rewrite(_carried_names(definition)).visit(definition)
    return ast.increment_lineno(definition, first - 1)


def _interpreted_function(function: Callable[..., Any], namespace: dict[str, Any]) -> Callable[..., Any]:
    """A kernel function that looks its names up in `namespace`, which is left as it was.

    Inside a factory, so that the extra names are closure variables:

        def _factory(range, ...):
            def kernel(...): ...
            return kernel
    """
    from . import triton_private as private

    # The definition inside a factory whose parameters are the extra names.
    definition = _rewritten_definition(function)
    factory = parse(f"def _factory({', '.join(private.KERNEL_BUILTINS)}):\n    return {definition.name}").body[0]
    assert isinstance(factory, ast.FunctionDef)
    factory.body.insert(0, definition)
    module = ast.fix_missing_locations(ast.Module([factory], []))
    # Defined in the namespace of its module, and called as Triton would: constants are plain values.
    definitions: dict[str, Any] = {}
    exec(compile(module, function.__code__.co_filename, "exec"), namespace, definitions)
    result: Any = definitions["_factory"](**private.KERNEL_BUILTINS)
    result.__defaults__ = result.__defaults__ and tuple(map(private.plain, result.__defaults__))
    result.__qualname__ = result.__name__
    return result  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=256)
def functions(module_text: str) -> Mapping[str, Callable[..., Any]]:
    """Every @triton.jit function of a module as an interpreted one."""
    from . import triton_private as private

    source = load(module_text)
    namespace = {name: private.plain(value) for name, value in vars(source).items()}
    jitted = {name: value.fn for name, value in namespace.items() if private.is_jit(value)}
    interpreted = {name: _interpreted_function(function, namespace) for name, function in jitted.items()}
    namespace.update(interpreted)
    return interpreted


# -- the exchange of triton.language -----------------------------------------------------------------------------------


@functools.cache
def _exchanges() -> list[triton_private.Exchange]:
    from . import triton_private as private

    return private.exchanges(lambda jit: _interpreted_function(jit.fn, jit.fn.__globals__))


@contextmanager
def _interpreting(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Under the lock, triton.language interprets; afterwards every attribute is what it was."""
    from . import triton_private as private

    with _LOCK, np.errstate(all="ignore"):
        undo: list[tuple[Any, str, Any]] = []
        outer, private.builder.memory = private.builder.memory, private.LaunchMemory(tensors)
        try:
            for owner, name, replacement in _exchanges():
                undo.append((owner, name, vars(owner).get(name, _MISSING)))
                setattr(owner, name, replacement)
            yield
        finally:
            private.builder.memory = outer
            for owner, name, original in reversed(undo):  # no call of ours, which might fail as well
                if original is _MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)


# -- launching ---------------------------------------------------------------------------------------------------------


def _bind(kernel: Kernel, arguments: Sequence[torch.Tensor | int]) -> dict[str, Any]:
    """Arguments as Triton values, constants as plain Python values, by name."""
    from . import triton_private as private

    bound: dict[str, Any] = dict(kernel.constants)
    for declared, argument in zip(kernel.arguments, arguments, strict=True):
        if isinstance(argument, torch.Tensor):
            assert isinstance(declared, Pointer)
            bound[declared.name] = private.pointer(argument.data_ptr(), TRITON_DTYPE[declared.dtype])
        else:
            bound[declared.name] = private.integer(argument)
    return bound


def run(kernel: Kernel, module_text: str, arguments: Sequence[torch.Tensor | int], grid: int) -> None:
    """Interpret `grid` programs of a kernel. The tensors' own memory is read and written: any strides, any offset."""
    tensors = [tensor for tensor in arguments if isinstance(tensor, torch.Tensor)]
    for tensor in tensors:
        if tensor.device.type != "cpu":
            reason = f"an argument is on {tensor.device}"
            raise UnsupportedBackendError(
                backend="interpret", what=kernel.name, reason=reason, fix="move the tensors to the CPU."
            )
    # One launch at a time: Triton's language is exchanged for the whole process.
    with _LOCK:
        _self_test()
        run_programs(kernel, module_text, arguments, grid, range(grid))


def run_programs(kernel: Kernel, text: str, arguments: Sequence[Any], grid: int, programs: Iterable[int]) -> None:
    """Interpret some of `grid` programs, in this order."""
    from . import triton_private as private

    function, bound = functions(text)[kernel.name], _bind(kernel, arguments)
    with _interpreting([a for a in arguments if isinstance(a, torch.Tensor)]):
        private.builder.set_grid_dim(grid, 1, 1)
        for program in programs:
            private.builder.set_grid_idx(program, 0, 0)
            try:
                function(**bound)
            except private.DeviceAssertion as assertion:
                raise _index_error(kernel, str(assertion)) from None
            except Exception as error:
                raise KernelFaultError(
                    kernel=kernel.name, program=program, reason=f"{type(error).__name__}: {error}", where=_line(error)
                ) from error


def _index_error(kernel: Kernel, message: str) -> IndexOutOfRangeError:
    """The assertion "file.py:12 gather: index out of range" of a kernel, as an error of the call."""
    place, _, operation = message.rpartition(":")[0].rpartition(" ")
    return IndexOutOfRangeError(kernel=kernel.name, operation=operation, where=place or "unknown line")


def _line(error: Exception) -> str:
    """The innermost line of generated text in a traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "fusegrad_kernels_" in f.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}  {frames[-1].line}" if frames else "unknown line"


# -- the self-test -----------------------------------------------------------------------------------------------------

_SELF_TEST_TEXT = """\
import triton
import triton.language as tl


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def self_test(x_ptr, y_ptr, top_ptr, n, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lane, mask=lane < n, other=0.0)
    tl.store(y_ptr + lane, x.to(tl.bfloat16), mask=lane < n)
    tl.store(top_ptr, tl.reduce(x, 0, larger))
    tl.store(top_ptr + 1, tl.sum(x, 0))
"""


@functools.cache
def _self_test() -> None:
    """Prove once, on a kernel of six lines, that this version of Triton can be interpreted as this file assumes."""
    problem = _problem()
    if problem:
        raise UnsupportedBackendError(
            backend="interpret", what="kernels", reason=problem, fix="use backend='reference', or Triton 3.6 or 3.7."
        )


def _problem() -> str | None:
    try:
        from . import triton_private as private
    except ImportError as error:
        return f"triton cannot be imported or has other internals than expected ({error})"
    try:
        passes = _self_test_passes()
    except (AttributeError, TypeError, KernelFaultError) as error:
        return f"Triton {private.VERSION} has other internals than expected ({error})"
    return None if passes else f"Triton {private.VERSION} computes wrong values in the interpreter's self-test"


def _self_test_passes() -> bool:
    from ...codegen.kernel import Ref, Scalar

    x = torch.tensor([1.00390625, 1.01171875, -3.4028e38, float("inf")], dtype=torch.float32)  # ties to even, both ways
    y, top = torch.zeros(4, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float32)
    names = (("x_ptr", "f32"), ("y_ptr", "bf16"), ("top_ptr", "f32"))
    pointers = tuple(Pointer(name, Ref("input", i), dtype) for i, (name, dtype) in enumerate(names))
    kernel = Kernel("self_test", _SELF_TEST_TEXT, (*pointers, Scalar("n", 4)), {"BLOCK": 8}, 1, 1)
    run_programs(kernel, _SELF_TEST_TEXT, (x, y, top, 4), 1, range(1))
    return bool(torch.equal(y, x.bfloat16()) and torch.equal(top, torch.full_like(top, float("inf"))))
