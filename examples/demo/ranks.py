"""`fusegrad demo --nproc N`: the demo's model on N processes, data parallel, fully sharded and tensor parallel.

Every rank trains on whole batches alone, too, with the eager classes: the losses have to be those, whatever is divided.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fusegrad
from fusegrad.runtime.commands.demo import RanksFailedError
from fusegrad.runtime.report.terminal import Table, plain

from .functions import FUNCTIONS
from .judgement import JUDGED_STEPS, LEARNING_RATE, TOLERANCE, divergence
from .model import IGNORED, ByteModel, Functions, Sizes, read_text, seeded_model, windows

SIZES = Sizes(width=64, hidden=128, context=64)
PROCESSES = (1, 2, 4)
"""Heads and batches are divided evenly."""
Batch = tuple[Tensor, Tensor]
Step = Callable[[Any, Batch], tuple[Tensor, Tensor]]
"""(model, batch) -> the loss to go back from, and this rank's share of the loss of the whole batch, or all of it."""


def run(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Start the processes, wait for them, and print what they found; returns the facts and the exit code."""
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        told = [str(found), str(options.steps), str(options.seed), options.backend]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.nproc)]
        command = [sys.executable, *launcher, "-m", __name__, *told]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True)
        if ran.returncode:
            raise RanksFailedError(count=options.nproc, said=ran.stderr.strip()[-2000:])
        facts = json.loads(found.read_text(encoding="utf-8"))
    (options.output / "losses_of_ranks.json").write_text(json.dumps(facts["losses"]), encoding="utf-8")
    return facts, report(facts, options.nproc)


def report(facts: dict[str, Any], count: int) -> int:
    """The table, the verdict, and the exit code for it."""
    losses = facts["losses"]
    alone = losses["one process, eager"]
    shown = sorted({round(i * (len(alone) - 1) / 5) for i in range(6)})
    judged = slice(JUDGED_STEPS)
    differences = {n: divergence(alone[judged], each[judged]) for n, each in losses.items()}
    rows = [(n, *(f"{each[i]:.5f}" for i in shown), f"{differences[n]:.1e}") for n, each in losses.items()]
    print(f"{count} processes, {facts['device']}, backend {facts['backend']}: the loss of each batch\n")
    print(plain(Table("", ("", *(f"step {i + 1}" for i in shown), "difference"), rows)))
    notes = [f"{c['function']}.{m}: {r}" for c in facts["compiled"] for m, r in c["reasons"].items()]
    print("\nrunning other than compiled, or moved: " + ("; ".join(notes) or "nothing"))
    parted = not all(d <= TOLERANCE for d in differences.values())
    print(f"losses {'DIVERGE' if parted else 'agree'}: tolerance {TOLERANCE:.0e}")
    return 2 if parted or notes else 0


# ---------------------------------------------------------------------- on each rank
def on_rank(found: Path, steps: int, seed: int, backend: str) -> None:
    device = _device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    facts = trained_each_way(mesh, device, SIZES, steps, seed, backend)
    if dist.get_rank() == 0:
        found.write_text(json.dumps(facts), encoding="utf-8")
    dist.destroy_process_group()


def trained_each_way(
    mesh: Any, device: torch.device, sizes: Sizes, steps: int, seed: int, backend: str
) -> dict[str, Any]:
    """The losses of one process with the eager classes, and of each way to divide the work with the compiled ones."""
    ways: dict[str, tuple[Callable[[ByteModel, Any], Any], Step]] = {
        "data parallel (DDP)": (lambda model, mesh: DistributedDataParallel(model), _on_rows(mesh)),
        "fully sharded (FSDP2)": (sharded, _on_rows(mesh)),
        "tensor parallel": (in_parallel, whole_batch),
    }
    eager, fast = Functions(*FUNCTIONS), Functions(*map(fusegrad.compile, FUNCTIONS))
    batches = list(islice(windows(read_text(device), sizes, seed), steps))
    losses = {"one process, eager": trained(seeded_model(eager, sizes, seed, device), whole_batch, batches)}
    with fusegrad.config.patch(backend=backend):
        for name, (divided, step) in ways.items():
            model = divided(seeded_model(fast, sizes, seed, device), mesh)
            losses[name] = trained(model, step, batches, None if step is whole_batch else mesh)
    return {"losses": losses, "device": device.type, "backend": backend, "compiled": [_records(f) for f in fast]}


def _device() -> torch.device:
    """A GPU each where there are enough of them, else the CPU."""
    if torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def _records(function: Any) -> dict[str, Any]:
    """A Function's name, and of its methods those that do not run compiled, or with arguments moved."""
    records = function._fusegrad.ledger.records
    return {"function": function.__name__, "reasons": {m: r.reason for m, r in records.items() if r.reason}}


def trained(model: Any, step: Step, batches: Sequence[Batch], mesh: Any = None) -> list[float]:
    """The loss of each whole batch. `foreach` would mix DTensors with plain tensors."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss, share = step(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(_summed(share.detach(), mesh))
    return losses


def _summed(share: Tensor, mesh: Any) -> float:
    """The ranks' shares of a loss, added."""
    if mesh is not None:
        dist.all_reduce(share, group=mesh.get_group())
    return share.item()


def whole_batch(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Every rank has the whole loss."""
    loss = model(*batch)
    return loss, loss.detach().clone()


def _on_rows(mesh: Any) -> Step:
    """The rows of this rank. Gradients are averaged over ranks, so each is weighted by how many bytes it predicts."""

    def step(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        text, following = (t.chunk(mesh.size())[mesh.get_local_rank()] for t in batch)
        counts = [int((t != IGNORED).sum()) for t in (following, batch[1])]
        share = model(text, following) * (counts[0] / counts[1])
        return share * mesh.size(), share.detach().clone()

    return step


def sharded(model: ByteModel, mesh: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def in_parallel(model: ByteModel, mesh: Any) -> ByteModel:
    """Heads, and the columns and rows of the products around SwiGLU, divided; SwiGLU itself is given DTensors."""
    plan = {
        "attention.qkv": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "mlp.gate": ColwiseParallel(use_local_output=False),
        "mlp.up": ColwiseParallel(use_local_output=False),
        "mlp.down": RowwiseParallel(),
    }
    for block in model.blocks:
        by_heads(block.attention, mesh.size())
        parallelize_module(block, mesh, plan)
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
    return model


def by_heads(attention: Any, count: int) -> None:
    """The rows of q, k and v in the order in which ranks have their heads: a rank's rows are next to each other."""
    weight = attention.qkv.weight
    with torch.no_grad():
        rows = weight.view(3, count, -1, weight.shape[-1]).transpose(0, 1).reshape(weight.shape)
        weight.copy_(rows.clone())
    attention.heads //= count


if __name__ == "__main__":
    on_rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
