"""ATen operations as functions that torch's vmap follows while sizes are symbols: one capture for every batch size.

Many of torch's own batching rules read sizes as numbers: what they make holds for one batch size. Here such operations
are called on whole batches, the batch axis in front:  cat([x, y], 0)  ->  cat([X, Y], 1)

`IN_LANES` is the table of all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import keyword
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._decomp import decomposition_table
from torch.autograd.function import Function

from ....tracer.sizes import hint_of
from ....tracer.torch_private import is_batched_here, unwrap_functorch
from ...execution.aten.reference import from_the_start

Tensor = torch.Tensor
aten = torch.ops.aten
Rule = Callable[..., Any]


# ------------------------------------------------------------------ ways to make an operation one that vmap follows
def in_lanes(target: Any) -> Callable[..., Any] | None:
    """The operation as a function that vmap follows; None where torch's own rule does."""
    if (function := IN_LANES.get(target)) is None and keyword.iskeyword(getattr(target, "_overloadname", "")):
        return _by_a_name(target)
    return function


@functools.cache
def _by_a_name(op: Any) -> Callable[..., Any]:
    """`aten.random_.from`, which no code can call by that name."""
    return _named(lambda *args, **options: op(*args, **options), op)


def _decomposed(op: Any) -> Callable[..., Any]:
    return _named(lambda *args, **options: decomposition_table[op](*args, **options), op)


def _asserted_of_all(op: Any) -> Callable[..., Any]:
    return _named(lambda value, *message: op(unwrap_functorch(value).all(), *message), op)


def _filled_by(fill: Any) -> Callable[..., Any]:
    return _named(lambda like, *args, **options: fill(torch.empty_like(like), *args, **options), fill)


def _written_back(op: Any) -> Callable[..., Any]:
    function = _by_rule(op)
    return _named(lambda target, *args, **options: target.copy_(function(target, *args, **options)), f"{op}_")


def _by_rule(op: Any) -> Callable[..., Any]:
    """The operation where no argument has a batch axis; else its rule in `RULES`."""
    declared = op._schema.arguments
    names = [a.name for a in declared if a.kwarg_only]

    def call(*args: Any, **options: Any) -> Any:
        if not any(map(is_batched_here, pytree.tree_leaves((args, options)))):
            return op(*args, **options)
        full = [*args, *(options.get(a.name, a.default_value) for a in declared[len(args) :])]
        return _function_of(op, len(names)).apply(*full)

    return _named(call, op)


def _named(call: Callable[..., Any], op: Any) -> Callable[..., Any]:
    call.__name__ = call.__qualname__ = f"in_lanes_{str(op).replace('.', '_')}"
    call.__module__ = __name__  # torch.fx prints it into the code of a graph
    return call


def room_for(like: Tensor, sizes: Sequence[int], strides: Sequence[int], **options: Any) -> Tensor:
    """Memory to be written to, with these strides: torch's own rule for it wants sizes that are no symbols."""
    order = sorted(range(len(sizes)), key=lambda axis: (-hint_of(strides[axis]), axis))
    room = like.new_empty([sizes[axis] for axis in order], **options)
    return room.permute(sorted(range(len(order)), key=order.__getitem__)) if order != sorted(order) else room


def _copied(base: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """A write to all of `base`, by operations that torch differentiates and maps, as it does not `copy`."""
    return source.to(base.device, base.dtype).expand(base.shape).clone()


# ------------------------------------------------------------------ operations on whole batches
@functools.cache
def _function_of(op: Any, keywords: int) -> Any:
    """A Function without derivatives, whose vmap is the rule: the graph that it is in is never differentiated."""
    names = [a.name for a in op._schema.arguments]

    def plain(*args: Any) -> Any:
        n = len(args) - keywords
        return op(*args[:n], **dict(zip(names[n:], args[n:], strict=True)))

    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        dims, structure = pytree.tree_leaves(in_dims), pytree.tree_structure(args)
        pairs = zip(pytree.tree_leaves(args), dims, strict=True)
        lanes = [a if d is None else a.movedim(d, 0) for a, d in pairs]
        call = Lanes(plain, info.batch_size, pytree.tree_unflatten([d is not None for d in dims], structure))
        result = RULES[op](call, *pytree.tree_unflatten(lanes, structure))
        return result, pytree.tree_map(lambda r: None if r is None else 0, result)

    body = {"forward": plain, "setup_context": lambda ctx, inputs, output: None, "vmap": vmap}
    return type(f"{op.__name__}_in_lanes", (Function,), {k: staticmethod(v) for k, v in body.items()})


@dataclass(frozen=True)
class Lanes:
    """One call over a batch: the operation, how many lanes, and which arguments have the batch axis (in front)."""

    op: Callable[..., Any]
    size: Any
    mapped: Any

    def lead(self, x: Any, mapped: Any) -> Any:
        """The argument with a batch axis; lists of tensors too."""
        if isinstance(x, list | tuple) and any(isinstance(y, Tensor) for y in x):
            return [self.lead(*pair) for pair in zip(x, mapped, strict=True)]
        return x.expand(self.size, *x.shape) if isinstance(x, Tensor) and not mapped else x

    def all(self, *args: Any) -> list[Any]:
        """Every tensor with a batch axis."""
        return [self.lead(*pair) for pair in zip(args, self.mapped, strict=True)]

    def number(self, like: Tensor) -> Tensor:
        """For every element of an index over the batch the number of its lane."""
        lanes = torch.arange(self.size, device=like.device)
        return lanes.view(-1, *[1] * (like.dim() - 1)).expand(like.shape)


def along(*axes: int) -> Rule:
    """The same call over one more axis in front: the arguments at these places are axes."""

    def rule(lanes: Lanes, *args: Any) -> Any:
        full = lanes.all(*args)
        return lanes.op(*(a + 1 if i in axes and a >= 0 else a for i, a in enumerate(full)))

    return rule


def into_sizes(*axes: int) -> Rule:
    """The same for what takes a gradient apart and the sizes of its result."""
    shifted = along(*axes)
    return lambda lanes, g, sizes, *rest: shifted(lanes, g, [lanes.size, *sizes], *rest)


def images(rank: int) -> Rule:
    """Operations on images of so many axes that take many at once: the lanes are more images."""

    def rule(lanes: Lanes, *args: Any) -> Any:
        full = lanes.all(*args)
        if full[0].dim() <= rank + 1:
            return lanes.op(*full)
        many = lanes.op(*(a.flatten(0, 1) if isinstance(a, Tensor) else a for a in full))
        return pytree.tree_map(lambda r: r.unflatten(0, (lanes.size, -1)), many)

    return rule


def _index_select(lanes: Lanes, x: Tensor, axis: int, index: Tensor) -> Tensor:
    if not lanes.mapped[2]:
        return lanes.op(x, axis + 1 if axis >= 0 else axis, index)  # type: ignore[no-any-return]
    behind = _axis_first(lanes.lead(x, lanes.mapped[0]), axis)
    return behind[lanes.number(index), index].movedim(1, axis + 1 if axis >= 0 else axis)


def _axis_first(x: Tensor, axis: int) -> Tensor:
    return x.movedim(axis + 1 if axis >= 0 else axis, 1)


def _index_written(accumulate: bool, from_end: bool = False) -> Rule:
    """index_add, index_copy, index_fill where every lane has indices of its own; `from_end` if -1 is the last place."""
    by_axis = along(1)

    def rule(lanes: Lanes, x: Tensor, axis: int, index: Tensor, value: Any, *alpha: Any) -> Any:
        if not lanes.mapped[2]:
            alike = dataclasses.replace(lanes, mapped=(*lanes.mapped[:2], True, *lanes.mapped[3:]))
            return by_axis(alike, x, axis, index, value, *alpha)
        x, _, _, value, *_ = lanes.all(x, axis, index, value, *alpha)
        source = _axis_first(value, axis) if isinstance(value, Tensor) else torch.scalar_tensor(value, dtype=x.dtype)
        source = source * alpha[0] if alpha else source
        at = index if from_end else from_the_start(index)
        result = _axis_first(x, axis).index_put((lanes.number(at), at), source.to(x.device), accumulate)
        return result.movedim(1, axis + 1 if axis >= 0 else axis)

    return rule


def _embedding(lanes: Lanes, weight: Tensor, index: Tensor, *rest: Any) -> Tensor:
    if not lanes.mapped[0]:
        return lanes.op(weight, index, *rest)  # type: ignore[no-any-return]
    at = from_the_start(index)
    return weight[lanes.number(at), at] if lanes.mapped[1] else weight[:, at]


def _embedding_backward(lanes: Lanes, g: Tensor, index: Tensor, rows: int, padding: int, by_count: bool) -> Tensor:
    if by_count:
        raise NotImplementedError("embedding_dense_backward with scale_grad_by_freq over a batch")
    g, index, *_ = lanes.all(g, index, rows, padding, by_count)
    counted = (index != padding) & (index >= 0) & (index < rows)
    gradient, at = torch.where(counted.unsqueeze(-1), g, 0.0), torch.where(counted, index, 0)
    return g.new_zeros(lanes.size, rows, g.shape[-1]).index_put((lanes.number(at), at), gradient, accumulate=True)


def _take(lanes: Lanes, x: Tensor, index: Tensor) -> Tensor:
    if not lanes.mapped[0]:
        return lanes.op(x, index)  # type: ignore[no-any-return]
    flat = x.reshape(lanes.size, -1)
    return flat[lanes.number(index), index] if lanes.mapped[1] else flat[:, index]


def _convolution(lanes: Lanes, x: Tensor, w: Tensor, bias: Any, *how: Any) -> Tensor:
    """With one weight the lanes are more images, else more groups."""
    if not lanes.mapped[1] and not lanes.mapped[2]:
        return lanes.op(x.flatten(0, 1), w, bias, *how).unflatten(0, (lanes.size, -1))  # type: ignore[no-any-return]
    x, w, bias, *_ = lanes.all(x, w, bias, *how)
    bias = None if bias is None else bias.flatten(0, 1)
    result = lanes.op(_side_by_side(x), w.flatten(0, 1), bias, *how[:-1], how[-1] * lanes.size)
    return result.unflatten(1, (lanes.size, -1)).movedim(1, 0)  # type: ignore[no-any-return]


def _side_by_side(x: Tensor) -> Tensor:
    """[lanes, images, channels, ...] -> [images, lanes * channels, ...]"""
    return x.movedim(0, 1).flatten(1, 2)


def _convolution_backward(lanes: Lanes, g: Tensor, x: Tensor, w: Tensor, bias: Any, *how: Any) -> tuple[Any, ...]:
    g, x, w, *_ = lanes.all(g, x, w, bias, *how)
    *how, groups, mask = how  # type: ignore[assignment]
    bias = None if bias is None else [bias[0] * lanes.size]
    results = lanes.op(
        _side_by_side(g), _side_by_side(x), w.flatten(0, 1), bias, *how, groups * lanes.size, mask
    )
    gx, gw, gb = (None if not present else t for t, present in zip(results, mask, strict=True))
    gx = None if gx is None else gx.unflatten(1, (lanes.size, -1)).movedim(1, 0)
    return gx, *(None if t is None else t.unflatten(0, (lanes.size, -1)) for t in (gw, gb))


def _solve(lanes: Lanes, a: Tensor, b: Tensor, *how: Any) -> Any:
    a, b, *_ = lanes.all(a, b, *how)
    if b.dim() == a.dim():
        return lanes.op(a, b, *how)
    result, *factors = lanes.op(a, b.unsqueeze(-1), *how)
    return result.squeeze(-1), *factors


def _searchsorted(lanes: Lanes, edges: Tensor, x: Tensor, *how: Any) -> Tensor:
    edges, x, *how = lanes.all(edges, x, *how)  # type: ignore[assignment]
    if edges.dim() == x.dim() or edges.dim() > 2:
        return lanes.op(edges, x, *how)  # type: ignore[no-any-return]
    return lanes.op(edges, x.reshape(lanes.size, -1), *how).view(x.shape)  # type: ignore[no-any-return]


def _bucketize(lanes: Lanes, x: Tensor, edges: Tensor, *how: Any) -> Tensor:
    x, edges, *_ = lanes.all(x, edges, *how)
    names = dict(zip(("out_int32", "right"), how, strict=False))
    return torch.searchsorted(edges, x.reshape(lanes.size, -1), **names).view(x.shape)


RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten.gather.default, aten.cat.default, aten.scatter.src, aten.scatter.value), along(1)),
    **dict.fromkeys((aten.scatter_add.default, aten.scatter_reduce.two), along(1)),
    **dict.fromkeys((aten.select_scatter.default, aten.slice_scatter.default), along(2)),
    aten.diagonal_scatter.default: along(3, 4),
    **dict.fromkeys((aten.select_backward.default, aten.slice_backward.default), into_sizes(2)),
    aten.unfold_backward.default: into_sizes(2),
    aten.diagonal_backward.default: into_sizes(3, 4),
    aten.index_select.default: _index_select,
    aten.index_add.default: _index_written(accumulate=True),
    aten.index_copy.default: _index_written(accumulate=False),
    aten.index_fill.int_Scalar: _index_written(accumulate=False, from_end=True),
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.take.default: _take,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    **dict.fromkeys((aten.im2col.default, aten.pixel_shuffle.default, aten.pixel_unshuffle.default), images(3)),
    **dict.fromkeys((aten.avg_pool2d.default, aten.avg_pool2d_backward.default), images(3)),
    **dict.fromkeys((aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default), images(3)),
    aten.col2im.default: images(2),
    aten._linalg_solve_ex.default: _solve,
    aten.searchsorted.Tensor: _searchsorted,
    aten.bucketize.Tensor: _bucketize,
    aten.linalg_cross.default: along(2),
}  # fmt: skip
"""What is called on whole batches: (the call, arguments with the batch axis in front) -> results with it in front."""

DECOMPOSED = frozenset(op for op in (
    aten.native_layer_norm.default, aten.native_layer_norm_backward.default, aten.native_group_norm.default,
    aten.reflection_pad1d.default, aten.reflection_pad2d.default,
    aten.replication_pad1d.default, aten.replication_pad2d.default,
    aten.upsample_nearest2d.default, aten.upsample_bilinear2d.default, aten.renorm.default,
) if op in decomposition_table)  # fmt: skip
"""What is said in terms of simpler operations, which vmap follows."""

WRITING: dict[Any, Any] = {
    aten.scatter_.src: aten.scatter.src,
    aten.scatter_.value: aten.scatter.value,
    aten.scatter_add_.default: aten.scatter_add.default,
    aten.scatter_reduce_.two: aten.scatter_reduce.two,
    aten.index_add_.default: aten.index_add.default,
    aten.index_copy_.default: aten.index_copy.default,
    aten.index_fill_.int_Scalar: aten.index_fill.int_Scalar,
}
"""In-place operation -> the one that is written back."""

FILLING: dict[Any, Any] = {
    aten.uniform.default: aten.uniform_.default,
    aten.normal_functional.default: aten.normal_.default,
    aten.exponential.default: aten.exponential_.default,
    aten.cauchy.default: aten.cauchy_.default,
    aten.geometric.default: aten.geometric_.default,
    aten.log_normal.default: aten.log_normal_.default,
    aten.random.default: aten.random_.default,
    aten.random.to: aten.random_.to,
    getattr(aten.random, "from"): getattr(aten.random_, "from"),
}
"""A draw that writes nothing -> the one that fills a tensor: these alone obey vmap's `randomness`."""

IN_PYTHON: dict[Any, Callable[..., Any]] = {
    aten.sym_size.int: lambda t, i: t.shape[i],
    aten.sym_stride.int: lambda t, i: t.stride(i),
    aten.sym_numel.default: lambda t: t.numel(),
    aten.sym_storage_offset.default: lambda t: t.storage_offset(),
}
"""Operations that read a size: they have no batching rule, and Python asks each lane."""
for _read in IN_PYTHON.values():
    _read.__module__ = __name__  # torch.fx prints it into the code of a graph

IN_LANES: dict[Any, Callable[..., Any]] = {
    **IN_PYTHON,
    aten.copy.default: _copied,
    aten.new_empty_strided.default: room_for,
    **{op: _by_rule(op) for op in RULES},
    **{op: _decomposed(op) for op in DECOMPOSED},
    **{op: _written_back(functional) for op, functional in WRITING.items()},
    **{op: _filled_by(fill) for op, fill in FILLING.items()},
    **{op: _asserted_of_all(op) for op in (aten._assert_async.msg, aten._assert_async.default)},
}
"""Every operation that torch's vmap does not follow while sizes are symbols, as a function that it does."""
