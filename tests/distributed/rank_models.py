"""A small model whose Functions are compiled, under DDP, FSDP2 and tensor parallelism, beside one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gallery_layers
import rank_functions as functions
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import fusegrad
from fusegrad.examples.gallery.catalogue import Entry

WIDTH, HIDDEN, BATCH, TIME, STEPS = 8, 12, 4, 6, 3
Norm: Any = fusegrad.compile(functions.Norm)
Gated: Any = fusegrad.compile(functions.Gated)


class NormLayer(nn.Module):
    def __init__(self, width: int, norm: Any) -> None:
        super().__init__()
        self.norm, self.weight = norm, nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm.apply(x, self.weight, 1e-6)  # type: ignore[no-any-return]


class Block(nn.Module):
    """x + down(gated(gate(norm(x)), up(norm(x))))"""

    def __init__(self, norm: Any, gated: Any) -> None:
        super().__init__()
        self.norm, self.gated = NormLayer(WIDTH, norm), gated
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(self.gated.apply(self.gate(y), self.up(y)))  # type: ignore[no-any-return]


def model(compiled: bool) -> nn.Module:
    torch.manual_seed(11)
    pair = (Norm, Gated) if compiled else (functions.Norm, functions.Gated)
    return nn.Sequential(*(Block(*pair) for _ in range(2))).double()


def batches() -> list[Tensor]:
    torch.manual_seed(12)
    return [torch.randn(BATCH, TIME, WIDTH, dtype=torch.float64) for _ in range(STEPS)]


def trained(network: nn.Module, step: Callable[[nn.Module, Tensor], Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of some steps, and the parameters in the end."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        loss = step(network, batch)
        loss.backward()
        optimizer.step()
        losses.append(whole(loss).item())
    parameters = {n.removeprefix("module."): whole(p).detach() for n, p in network.named_parameters()}
    return losses, parameters


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def alone() -> tuple[list[float], dict[str, Tensor]]:
    """One process, the classes as written."""
    return trained(model(False), lambda network, batch: network(batch).square().mean())


def my_rows(batch: Tensor, mesh: Any) -> Tensor:
    return batch.chunk(mesh.size())[mesh.get_local_rank()]


def compare(mine: tuple[list[float], dict[str, Tensor]], mean_over: Any = None) -> None:
    losses, parameters = mine
    if mean_over is not None:
        total = torch.tensor(losses, dtype=torch.float64)
        dist.all_reduce(total, group=mean_over.get_group())
        losses = (total / mean_over.size()).tolist()
    expected, theirs = alone()
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0.0)
    for name, value in theirs.items():
        told = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(parameters[name], value.detach(), rtol=1e-6, atol=1e-8, msg=told)


def on_my_rows(mesh: Any) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda network, batch: network(my_rows(batch, mesh)).square().mean()


def check_ddp(mesh: Any) -> None:
    compare(trained(DistributedDataParallel(model(True)), on_my_rows(mesh)), mesh)


def check_fsdp(mesh: Any) -> None:
    network = model(True)
    for block in network:
        fully_shard(block, mesh=mesh)
    compare(trained(fully_shard(network, mesh=mesh), on_my_rows(mesh)), mesh)


def in_parallel(network: nn.Module, mesh: Any) -> nn.Module:
    """Sequence parallel around the norms, columns and rows of the products divided between them."""
    plan = {
        "norm": SequenceParallel(),
        "gate": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    for block in network:  # type: ignore[attr-defined]
        parallelize_module(block, mesh, plan)
    first = PrepareModuleInput(
        input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=False
    )
    parallelize_module(network, mesh, {"0": first})
    return network


def check_tp(mesh: Any) -> None:
    compare(trained(in_parallel(model(True), mesh), lambda network, batch: network(batch).square().mean()))
    records = {f"{c.__name__}.{m}": r for c in (Norm, Gated) for m, r in c._fusegrad.records.items()}
    assert all(r.status == "compiled" and r.reason is None for r in records.values()), records


def check_both(mesh: Any) -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    network = in_parallel(model(True), grid["model"])
    for block in network:  # type: ignore[attr-defined]
        fully_shard(block, mesh=grid["data"])
    step = on_my_rows(grid["data"])
    compare(trained(fully_shard(network, mesh=grid["data"]), step), grid["data"])


# ------------------------------------------------------------------ within torch.compile
def compiled(network: nn.Module, **options: Any) -> nn.Module:
    torch._dynamo.reset()
    network.compile(backend="aot_eager", **options)
    return network


def check_compiled_ddp(mesh: Any) -> None:
    compare(trained(DistributedDataParallel(compiled(model(True), fullgraph=True)), on_my_rows(mesh)), mesh)


def check_compiled_fsdp(mesh: Any) -> None:
    network = model(True)
    for block in network:
        fully_shard(compiled(block), mesh=mesh)
    compare(trained(fully_shard(network, mesh=mesh), on_my_rows(mesh)), mesh)


def check_compiled_tp(mesh: Any) -> None:
    network = compiled(in_parallel(model(True), mesh), fullgraph=True)
    compare(trained(network, lambda network, batch: network(batch).square().mean()))


# ------------------------------------------------------------------ layers of the gallery
def check_layer(entry: Entry, mesh: Any) -> None:
    """On this rank's rows, under DDP and FSDP2: outputs and gradients as written, those of parameters averaged."""
    theirs = gallery_layers.Layer(entry, False, torch.float64)
    expected = gallery_layers.results(theirs, rows_of(entry, mesh))
    for name, gradient in gallery_layers.gradients(theirs).items():
        dist.all_reduce(gradient, group=mesh.get_group())
        expected[name] = gradient / mesh.size()
    for wrapped in (DistributedDataParallel, functools.partial(fully_shard, mesh=mesh)):
        layer = wrapped(gallery_layers.Layer(entry, True, torch.float64))
        found = {n: whole(t) for n, t in gallery_layers.results(layer, rows_of(entry, mesh)).items()}
        told = functools.partial("{} under {}: {}".format, entry.name, wrapped)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, msg=told)


def rows_of(entry: Entry, mesh: Any) -> list[Tensor]:
    """The inputs of a layer, with this rank's part of the batch."""
    args = entry.arguments(torch.float64)
    tensors = [(i, a) for i, a in enumerate(args) if isinstance(a, Tensor) and i not in entry.weights]
    return [a if i in entry.shared or not a.dim() else leaf_of(my_rows(a, mesh), a) for i, a in tensors]


def leaf_of(part: Tensor, like: Tensor) -> Tensor:
    return part.detach().clone().requires_grad_(like.requires_grad)
