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
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
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


def sharded(network: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    for block in network:  # type: ignore[attr-defined]
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(network, mesh=mesh, **options)


def check_fsdp(mesh: Any) -> None:
    compare(trained(sharded(model(True), mesh), on_my_rows(mesh)), mesh)


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
    records = {f"{c.__name__}.{m}": r for c in (Norm, Gated) for m, r in c._fusegrad.ledger.records.items()}
    assert all(r.status == "compiled" and r.reason is None for r in records.values()), records


def check_both(mesh: Any) -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    network = sharded(in_parallel(model(True), grid["model"]), grid["data"])
    compare(trained(network, on_my_rows(grid["data"])), grid["data"])


# ------------------------------------------------------------------ the ways in which people set these up
def checkpointed(network: nn.Module) -> nn.Module:
    apply_activation_checkpointing(network, check_fn=lambda module: isinstance(module, Block))
    return network


def accumulated(network: Any, batch: Tensor) -> Tensor:
    """One backward without the exchange of gradients, and the other by whoever asked for the loss."""
    with network.no_sync():
        network(batch).square().mean().backward()
    return network(batch).square().mean()


def autocast(network: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return network(batch).float().square().mean()


def plainly(network: nn.Module, batch: Tensor) -> Tensor:
    return network(batch).float().square().mean()


LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OPTIONS: dict[str, tuple[Callable[[nn.Module, Any], nn.Module], Any]] = {
    "no_sync": (lambda n, mesh: DistributedDataParallel(n), accumulated),
    "autocast": (lambda n, mesh: DistributedDataParallel(n), autocast),
    "static graph": (lambda n, mesh: DistributedDataParallel(n, static_graph=True), plainly),
    "unused parameters": (lambda n, mesh: DistributedDataParallel(n, find_unused_parameters=True), plainly),
    "views of buckets": (lambda n, mesh: DistributedDataParallel(n, gradient_as_bucket_view=True), plainly),
    "checkpoints": (lambda n, mesh: DistributedDataParallel(checkpointed(n), static_graph=True), plainly),
    "FSDP2 in bfloat16": (lambda n, mesh: sharded(n, mesh, mp_policy=LOW), plainly),
    "FSDP2, not sharded again": (lambda n, mesh: sharded(n, mesh, reshard_after_forward=False), plainly),
    "FSDP2 with checkpoints": (lambda n, mesh: sharded(checkpointed(n), mesh), plainly),
    "FSDP2, offloaded": (lambda n, mesh: sharded(n, mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)), plainly),
}


def check_option(name: str, mesh: Any) -> None:
    """Bit for bit what the classes as written give in the same wrapper."""
    wrap, loss = OPTIONS[name]
    mine, theirs = (
        trained(wrap(model(fast).float(), mesh), lambda network, batch: loss(network, my_rows(batch.float(), mesh)))
        for fast in (True, False)
    )
    assert mine[0] == theirs[0], f"{name}: {mine[0]} and not {theirs[0]}"
    for (path, value), other in zip(mine[1].items(), theirs[1].values(), strict=True):
        assert torch.equal(value, other), f"{name}: {path}"


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
