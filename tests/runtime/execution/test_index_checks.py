"""Indices that are data: out of range they raise at every call, as in eager; none is checked that is known to be in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import Function

import fusegrad
from fusegrad.ir.errors import IndexOutOfRangeError
from fusegrad.runtime.settings import config

Tensor = torch.Tensor
ROWS, COLUMNS = 6, 5
LEAST = -(1 << 63)


def reading(read: Callable[[Tensor, Tensor], Tensor]) -> type[Function]:
    """A Function that reads x at an index, times two."""

    class Reads(Function):
        @staticmethod
        def forward(x: Tensor, index: Tensor) -> Tensor:
            return read(x, index) * 2.0

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            x, index = ctx.saved_tensors
            return (read(x, index).sum() * g.sum()).expand(x.shape), None

    return Reads


def rows(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % ROWS


READS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor, str]] = {
    "gather": (lambda x, i: x.gather(0, i), rows(7, COLUMNS), "gather"),
    "one per row": (lambda x, i: x.gather(1, i[:, None])[:, 0], rows(ROWS) % COLUMNS, "gather"),
    "of what is computed": (lambda x, i: x.exp().gather(1, i[:, None])[:, 0], rows(ROWS) % COLUMNS, "gather"),
    "index_select": (lambda x, i: x.index_select(0, i), rows(9), "index_select"),
    "embedding": (lambda x, i: torch.nn.functional.embedding(i, x), rows(3, 4), "embedding"),
    "padded embedding": (lambda x, i: torch.nn.functional.embedding(i, x, padding_idx=2), rows(3, 4), "embedding"),
    "x[i]": (lambda x, i: x[i], rows(8), "index"),
    "x[i, j]": (lambda x, i: x[i, i % 3], rows(2, 3), "index"),
    "x[i, None, j]": (lambda x, i: x[i[:, None], torch.arange(COLUMNS)], rows(4), "index"),
    "x[:, i]": (lambda x, i: x[:, i], rows(4) % COLUMNS, "index"),
    "put": (lambda x, i: x.index_put((i,), x[0] * 2), torch.arange(ROWS), "index_put"),
    "put in place": (lambda x, i: _put(x, i), torch.arange(ROWS), "index_put"),
    "added": (lambda x, i: x.long().index_put((i,), x[0].long(), accumulate=True) * 1.0, rows(9), "index_put"),
    "scatter": (lambda x, i: x.scatter(0, i, 3.0), rows(1, COLUMNS), "scatter"),
    "scatter_add": (lambda x, i: x.long().scatter_add(0, i, x.long()) * 1.0, rows(4, COLUMNS), "scatter_add"),
    "index_add": (lambda x, i: x.long().index_add(0, i, x.long()) * 1.0, torch.arange(ROWS), "index_add"),
    "scatter_add of floats": (lambda x, i: x.scatter_add(0, i, x), rows(4, COLUMNS), "scatter_add"),
    "index_add of floats": (lambda x, i: x.index_add(0, i, x), torch.arange(ROWS), "index_add"),
    "one per row put": (lambda x, i: _one_per_row(x, i), rows(ROWS) % COLUMNS, "index_put"),
    "index_copy": (lambda x, i: x.index_copy(0, i, x * 2), torch.arange(ROWS), "index_copy"),
    "one_hot": (lambda x, i: torch.nn.functional.one_hot(i, COLUMNS) * x, rows(ROWS) % COLUMNS, "one_hot"),
    "index_fill": (lambda x, i: x.index_fill(0, i, 2.0), torch.arange(3), "index_fill"),
}  # fmt: skip
WRAPS = {"x[i]", "x[i, j]", "x[i, None, j]", "x[:, i]", "put", "put in place", "added", "index_fill", "one per row put"}
"""Those for which eager counts negative indices from the end."""
BY_TORCH = {"scatter_add of floats", "index_add of floats"}
"""Those that torch's own operation adds in an order of its own, and checks: the error has no line."""


def _one_per_row(x: Tensor, i: Tensor) -> Tensor:
    y = x * 2
    y[torch.arange(ROWS), i] = 0.0
    return y


def _put(x: Tensor, i: Tensor) -> Tensor:
    y = x.clone()
    y[i] = x[1]
    return y


def x_of() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))


def with_one(index: Tensor, wrong: int) -> Tensor:
    """The index with another number in the middle."""
    flat = index.flatten().clone()
    flat[flat.numel() // 2] = wrong
    return flat.reshape(index.shape)


def agree(fast: Any, cls: Any, *args: Any) -> None:
    assert torch.equal(fast.apply(*args), cls.apply(*args))


@pytest.mark.parametrize("name", READS)
def test_every_call_with_an_index_out_of_range_raises(name: str) -> None:
    read, index, operation = READS[name]
    cls = reading(read)
    fast, x = fusegrad.compile(cls, backend="interpret", fullgraph=True), x_of()
    agree(fast, cls, x, index)
    for wrong in (ROWS, 10**6, -ROWS - 1, -(2**40)):
        if name in BY_TORCH:
            with pytest.raises((IndexError, RuntimeError), match=r"index -?\d+ is out of bounds"):
                fast.apply(x, with_one(index, wrong))
            continue
        with pytest.raises(IndexOutOfRangeError, match=rf"Reads_forward.*: {operation}_?: .*out of range") as caught:
            fast.apply(x, with_one(index, wrong))
        assert "test_index_checks.py:" in str(caught.value)
        with pytest.raises((IndexError, RuntimeError)):
            cls.apply(x, with_one(index, wrong))
    agree(fast, cls, x, index)


@pytest.mark.parametrize("name", READS)
def test_negative_indices_are_what_they_are_in_eager(name: str) -> None:
    read, index, _ = READS[name]
    cls = reading(read)
    fast, x = fusegrad.compile(cls, backend="interpret", fullgraph=True), x_of()
    agree(fast, cls, x, index)
    negative = with_one(index, -1)
    if name in WRAPS:
        agree(fast, cls, x, negative)
    else:
        with pytest.raises((IndexError, RuntimeError)):
            cls.apply(x, negative)
        with pytest.raises((IndexError, RuntimeError) if name in BY_TORCH else IndexOutOfRangeError):
            fast.apply(x, negative)


def text_of(fast: Any, *args: Any) -> str:
    return "\n".join(k.source for k in fusegrad.explain(fast, *args).kernels)


# ------------------------------------------------------------------ what is not checked
KNOWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "take_along_dim": lambda x, i: x.take_along_dim(i[:, None], 1),
    "positions": lambda x, i: x[torch.arange(x.shape[0])],
    "positions from the end": lambda x, i: x[x.shape[0] - 1 - torch.arange(x.shape[0])],
    "largest": lambda x, i: x.gather(1, x.argmax(1, keepdim=True)),
    "largest by max": lambda x, i: x.exp().max(1)[0],
    "clamped": lambda x, i: x.index_select(0, i.clamp(0, x.shape[0] - 1)),
    "remainder": lambda x, i: x[i % x.shape[0]],
    "chosen": lambda x, i: x[torch.where(i > 3, torch.arange(i.shape[0]).clamp(max=x.shape[0] - 1), 0)],
    "checked already": lambda x, i: x.gather(1, i[:, None]) + x.exp().gather(1, i[:, None]),
}


@pytest.mark.parametrize("name", KNOWN)
def test_an_index_that_is_known_to_be_in_range_is_not_checked(name: str) -> None:
    cls = reading(KNOWN[name])
    fast, x, i = fusegrad.compile(cls, backend="interpret", fullgraph=True), x_of(), rows(ROWS) % COLUMNS
    torch.testing.assert_close(fast.apply(x, i), cls.apply(x, i))
    text = fusegrad.explain(fast, x, i).kernels[0].source
    assert text.count("tl.device_assert(") == (1 if name == "checked already" else 0), text


def test_the_check_can_be_left_out() -> None:
    read, index, _ = READS["embedding"]
    fast, x = fusegrad.compile(reading(read), backend="interpret", fullgraph=True), x_of()
    assert "tl.device_assert(" in text_of(fast, x, index)
    with config.patch(disable="index_checks"):
        assert "tl.device_assert(" not in text_of(fast, x, index)
        agree(fast, reading(read), x, index)
    agree(fast, reading(read), x, index)
    with pytest.raises(IndexOutOfRangeError):
        fast.apply(x, with_one(index, ROWS))


WRAPPING: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "a difference": (lambda x, i: x[(i.clamp(max=x.shape[0] - 1) - 1).clamp(min=0)], LEAST),
    "a sum": (lambda x, i: x[(i.clamp(min=0) + 1).clamp(max=x.shape[0] - 1)], -LEAST - 1),
    "from the end": (lambda x, i: x[(x.shape[0] - 1 - i.clamp(max=x.shape[0] - 1)).clamp(max=x.shape[0] - 1)], LEAST),
    "a product": (lambda x, i: x[(i.clamp(min=0) * 1000003).clamp(max=x.shape[0] - 1)], 1 << 44),
    "of 32 bits": (lambda x, i: x[((i.clamp(min=0) * 1000003).clamp(max=x.shape[0] - 1)).long()], 2148),
}


@pytest.mark.parametrize("name", WRAPPING)
def test_of_numbers_that_wrap_around_nothing_is_taken_for_granted(name: str) -> None:
    read, extreme = WRAPPING[name]
    index = rows(8).to(torch.int32 if name == "of 32 bits" else torch.int64)
    cls, x = reading(read), x_of()
    fast = fusegrad.compile(cls, backend="interpret", fullgraph=True)
    agree(fast, cls, x, index)
    with pytest.raises(IndexOutOfRangeError):
        fast.apply(x, with_one(index, extreme))


class Loss(Function):
    """Cross-entropy over targets of which -100 counts nothing."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        counted = target != -100
        at = torch.where(counted, target, 0)
        ctx.save_for_backward(logits, target)
        return torch.where(counted, logits.logsumexp(1) - logits.gather(1, at[:, None])[:, 0], 0.0).sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        logits, target = ctx.saved_tensors
        counted = target != -100
        at = torch.where(counted, target, 0)[:, None]
        gradient = logits.softmax(1)
        gradient = gradient.scatter(1, at, gradient.gather(1, at) - 1)
        return gradient * counted[:, None] * g, None


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_targets_that_are_ignored_are_not_asserted(dtype: torch.dtype) -> None:
    """Torch's gather takes int64 alone; a cast to it is in range where its operand is."""

    class Cast(Loss):
        @staticmethod
        def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
            return Loss.forward(ctx, logits, target.long())

    fast, x, target = fusegrad.compile(Cast, backend="interpret", fullgraph=True), x_of(), rows(ROWS).to(dtype)
    for wrong in (-100, COLUMNS, -1):
        xs, targets = [x.clone().requires_grad_() for _ in range(2)], with_one(target % COLUMNS, wrong)
        if wrong != -100:
            with pytest.raises(IndexOutOfRangeError, match="Cast_forward"):
                fast.apply(xs[0], targets)
            continue
        for a, cls in zip(xs, (fast, Cast), strict=True):
            cls.apply(a, targets).backward()
        torch.testing.assert_close(xs[0].grad, xs[1].grad)


def test_backward_checks_its_own_indices() -> None:
    class Late(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
            ctx.save_for_backward(x, index)
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
            x, index = ctx.saved_tensors
            return g * x[index], None

    fast, x, index = fusegrad.compile(Late, backend="interpret", fullgraph=True), x_of().requires_grad_(), rows(ROWS)
    for wrong in (0, ROWS, -ROWS - 1, -1):
        y = fast.apply(x, with_one(index, wrong))
        if wrong in (0, -1):
            y.sum().backward()
        else:
            with pytest.raises(IndexOutOfRangeError, match=r"Late_backward.*: index: "):
                y.sum().backward()


@pytest.mark.parametrize("name", ["gather", "x[i]", "x[i, j]", "embedding", "of what is computed", "one_hot"])
def test_under_transforms(name: str) -> None:
    read, index, _ = READS[name]
    cls = reading(read)
    fast, x = fusegrad.compile(cls, backend="interpret", fullgraph=True), x_of()
    indices = torch.stack([index, index.flip(0), index])
    wrong = torch.stack([index, with_one(index, 10**6), index])

    def batched(i: Tensor) -> Tensor:
        return torch.func.vmap(fast.apply, (None, 0))(x, i)

    torch.testing.assert_close(batched(indices), torch.stack([cls.apply(x, i) for i in indices]))
    for _ in range(2):
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            batched(wrong)

    def pushed(i: Tensor) -> Tensor:
        return torch.func.jvp(lambda v: torch.func.grad(lambda u: fast.apply(u, i).sum())(v), (x,), (x,))[1]

    pushed(index)
    for _ in range(2):
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            pushed(with_one(index, 10**6))


AS_MANY = {
    "put", "put in place", "one per row", "of what is computed", "index_copy", "index_add", "index_add of floats",
    "one per row put", "one_hot",
}  # fmt: skip
"""Those that take as many indices as there are rows."""


@pytest.mark.parametrize("name", ["scatter_add of floats", "index_add of floats", "one per row put", "index_select"])
def test_a_class_is_used_again_after_a_batch_that_was_out_of_range(name: str) -> None:
    """The class as it is written has no rule for vmap here, and could not answer in our place."""
    read, index, _ = READS[name]
    cls = old_style(read)
    fast, x = fusegrad.compile(cls, backend="interpret", fullgraph=True), x_of()
    indices = torch.stack([index, index.flip(0), index])
    for wrong in (None, ROWS, -ROWS - 1, None if name in WRAPS else -1, None):
        given = indices if wrong is None else torch.stack([index, with_one(index, wrong), index])
        if wrong is not None:
            with pytest.raises((IndexError, RuntimeError), match="out of"):
                torch.func.vmap(fast.apply, (None, 0))(x, given)
            continue
        torch.testing.assert_close(
            torch.func.vmap(fast.apply, (None, 0))(x, given), torch.stack([cls.apply(x, i) for i in given])
        )


def test_an_embeddings_backward_leaves_out_what_is_out_of_range() -> None:
    """As torch's does, which relies on its forward; over a batch, too."""

    class Summed(Function):
        @staticmethod
        def forward(g: Tensor, index: Tensor) -> Tensor:
            return torch.ops.aten.embedding_dense_backward(g, index, ROWS, 2, False)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...
        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return g, None

    fast, g = fusegrad.compile(Summed, backend="interpret", fullgraph=True), x_of()
    indices = torch.stack([with_one(rows(ROWS), wrong) for wrong in (1, ROWS, -1, -(2**40), 2)])
    for index in indices:
        torch.testing.assert_close(fast.apply(g, index), Summed.apply(g, index))
    torch.testing.assert_close(
        torch.func.vmap(fast.apply, (None, 0))(g, indices), torch.stack([Summed.apply(g, i) for i in indices])
    )


def old_style(read: Callable[[Tensor, Tensor], Tensor]) -> type[Function]:
    class Reads(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
            return read(x, index)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return g, None

    return Reads


@pytest.mark.parametrize("name", READS)
def test_of_no_indices(name: str) -> None:
    read, index, _ = READS[name]
    if name in AS_MANY:
        return
    cls, x, none = reading(read), x_of(), index[:0]
    fast = fusegrad.compile(cls, backend="interpret", fullgraph=True)
    agree(fast, cls, x, none)
    agree(fast, cls, x, index)


def test_the_first_call_raises_what_eager_raises() -> None:
    read, index, _ = READS["gather"]
    cls, x, wrong = reading(read), x_of(), with_one(index, 99)
    fast = fusegrad.compile(cls, backend="interpret", fullgraph=True)
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        fast.apply(x, wrong)
    agree(fast, cls, x, index)
