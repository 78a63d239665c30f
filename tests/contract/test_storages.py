"""Methods, and callers, that resize the storage of a tensor: to free what is needed no more, and to have it again.

Reading such a tensor ends the process, so each row would take the whole test run with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import Function

import fusegrad

Tensor = torch.Tensor
Use = Callable[[Any], list[Any]]
SHAPE = (300, 1000)
"""More than a page of memory: what was freed is given back to the system, not to the next tensor."""
RESIZED = "FG021"

pytestmark = pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning", "ignore:TypedStorage")


def _tensors(n: int) -> list[Tensor]:
    return [torch.rand(SHAPE, requires_grad=True) for _ in range(n)]


def _of_two(apply: Callable[..., Tensor]) -> list[Any]:
    leaf, w = _tensors(2)
    x = leaf * 1.0
    y = apply(x, w)
    held = x.untyped_storage().nbytes()
    y.square().sum().backward()
    return [held, x.untyped_storage().nbytes(), y.detach(), leaf.grad, w.grad]


def _compare(make: Callable[[], type], use: Use = _of_two) -> Any:
    """The class, compiled, after it was used like the class itself, four times."""
    compiled: Any = fusegrad.compile(make())
    for seed in range(4):
        wanted, found = (torch.random.manual_seed(seed) and use(cls.apply) for cls in (make(), compiled))
        assert len(wanted) == len(found)
        for a, b in zip(wanted, found, strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
    return fusegrad.explain(compiled)


def _size(x: Tensor, typed: bool) -> int:
    return int(x.storage().size() if typed else x.untyped_storage().nbytes())


def _resize(x: Tensor, size: int, typed: bool) -> None:
    (x.storage() if typed else x.untyped_storage()).resize_(size)


def _invertible(typed: bool, keep: bool) -> type:
    class Invertible(Function):
        """Frees its input, and computes it from its output again."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            y = x * w
            ctx.size, ctx.given = _size(x, typed), [x]
            if not keep:
                _resize(x, 0, typed)
            ctx.save_for_backward(w, y)
            return y

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            (w, y), (x,) = ctx.saved_tensors, ctx.given
            if not keep:
                _resize(x, ctx.size, typed)
                x.set_(y / w)
            return g * w, g * x

    return Invertible


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("typed", [False, True])
def test_an_input_is_freed_and_made_again(typed: bool, keep: bool) -> None:
    told = _compare(lambda: _invertible(typed, keep))
    assert keep or "resizes the storage" in str(told)


def _with_more_in_its_block() -> type:
    class Block(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            with torch.no_grad():
                y = x * w
                print("freed")
                x.untyped_storage().resize_(0)
                z = y * 2
            ctx.save_for_backward(w, y)
            return z

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            w, y = ctx.saved_tensors
            return g * w * 2, g * y / w * 2

    return Block


def _in_the_line_of_another_effect() -> type:
    class Line(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            y = x * w
            print(x.untyped_storage().resize_(0).nbytes())
            ctx.save_for_backward(w, y)
            return y * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            w, y = ctx.saved_tensors
            return g * w * 2, g * y / w * 2

    return Line


class Frees(Function):
    is_traceable = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        x.untyped_storage().resize_(0)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return g * y  # type: ignore[no-any-return]


def _by_a_nested_call() -> type:
    class Outer(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            y = x * w
            z: Tensor = Frees.apply(y)
            ctx.save_for_backward(w, z)
            return z * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            w, z = ctx.saved_tensors
            return g * w * 2 * z, g * z

    return Outer


def _of_what_it_made() -> type:
    class Made(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            y = x * w
            z = y.sin()
            y.untyped_storage().resize_(0)
            ctx.save_for_backward(w, z)
            return z + 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            w, z = ctx.saved_tensors
            return g * w * z, g * z

    return Made


def _in_backward() -> type:
    class InBackward(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            z = (x * w).sin()
            ctx.save_for_backward(w, z)
            return z + 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            w, z = ctx.saved_tensors
            found = g * w * z, g * z
            z.untyped_storage().resize_(0)
            return found

    return InBackward


def _of_a_tensor_outside() -> type:
    full = torch.empty(SHAPE)
    full.untyped_storage().resize_(0)

    def gathered(w: Tensor) -> Tensor:
        full.untyped_storage().resize_(300 * 1000 * 4)
        return full.copy_(w)

    class Gathered(Function):
        """As sharded parameters are used: gathered, multiplied, freed."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            y = x * gathered(w)
            full.untyped_storage().resize_(0)
            ctx.save_for_backward(x, w)
            return y

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            found = g * gathered(w), g * x
            full.untyped_storage().resize_(0)
            return found

    return Gathered


@pytest.mark.parametrize("make", [
    _with_more_in_its_block, _in_the_line_of_another_effect, _by_a_nested_call, _of_what_it_made, _in_backward,
    _of_a_tensor_outside,
])  # fmt: skip
def test_a_method_that_resizes_a_storage_runs_as_written(make: Callable[[], type]) -> None:
    assert "resizes the storage" in str(_compare(make))


@pytest.mark.parametrize("make", [_of_what_it_made, _of_a_tensor_outside])
def test_it_has_a_code_and_its_line(make: Callable[[], type]) -> None:
    told = str(_compare(make))
    assert RESIZED in told
    assert "test_storages.py:" in told


def test_a_storage_filled_directly() -> None:
    class Filled(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            y = x + w
            y.untyped_storage().fill_(0)
            return y

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            return g, g * 2

    assert "resizes the storage of a tensor, or writes to it" in str(_compare(lambda: Filled))


def test_asking_for_the_size_of_a_storage_is_no_change() -> None:
    class Asks(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(w, x)
            return x * w / (x.untyped_storage().nbytes() // 4)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            w, x = ctx.saved_tensors
            return g * w, g * x / x.untyped_storage().size()

    told = str(_compare(lambda: Asks))
    assert "resizes the storage" not in told
    assert "internal error" not in told


# ------------------------------------------------------------------ callers
def _shape_only() -> type:
    class ShapeOnly(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.n = x.shape[0]
            return w * x.shape[1] + 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
            return None, g * ctx.n

    return ShapeOnly


def test_an_argument_that_was_freed_before_the_call() -> None:
    def use(apply: Any) -> list[Any]:
        x, w = torch.rand(SHAPE), torch.rand(5, requires_grad=True)
        x.untyped_storage().resize_(0)
        y = apply(x, w)
        y.sum().backward()
        return [y.detach(), w.grad]

    assert "opaque" not in str(_compare(_shape_only, use))


def test_an_argument_that_is_freed_after_forward() -> None:
    def make() -> type:
        class Exp(Function):
            """Saves its result, so that its argument may go."""

            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                y = torch.exp(x * 2)
                ctx.save_for_backward(y)
                return y + 1

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> Tensor:
                (y,) = ctx.saved_tensors
                return g * y * 2  # type: ignore[no-any-return]

        return Exp

    def use(apply: Any) -> list[Any]:
        (leaf,) = _tensors(1)
        x = leaf * 1.0
        y = apply(x)
        x.untyped_storage().resize_(0)
        y.sum().backward()
        return [y.detach(), leaf.grad]

    assert "opaque" not in str(_compare(make, use))
