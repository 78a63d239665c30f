"""Whole models trained on the device, swapped beside themselves: Hugging Face's where these are there, the demo's."""

from __future__ import annotations

import importlib.util
import statistics
import time
from typing import Any

import torch
from torch import nn

import fusegrad
from fusegrad.examples.demo.functions import FUNCTIONS
from fusegrad.examples.demo.model import Functions, Sizes, read_text, seeded_model, windows
from fusegrad.examples.models import convergence
from fusegrad.examples.models.hugging_face import replacements

STEPS = {"cuda": 30, "pretended": 1}
LARGER: dict[str, int] = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4,
    "num_attention_heads": 16, "max_position_embeddings": 512,
}  # fmt: skip
TOLERANCE = 1e-3
"""Of the losses, relative: rounding in another order, over tens of steps in float32."""


def model(unit: str, kind: str) -> dict[str, Any]:
    """The losses of some steps, swapped beside themselves, and the median milliseconds of a step."""
    if unit == "demo":
        return _demo(kind)
    if importlib.util.find_spec("transformers") is None:
        return {"skipped": "transformers is not installed"}
    return _hugging_face(unit, kind)


def _told(eager: tuple[list[float], float], swapped: tuple[list[float], float]) -> dict[str, Any]:
    apart = convergence.difference(eager[0], swapped[0])
    wrong = [] if apart <= TOLERANCE else [f"the losses are {apart:.2g} apart"]
    ends = {"first loss": eager[0][0], "last loss": eager[0][-1], "swapped": swapped[0][-1], "apart": apart}
    return {"faults": wrong, **ends, "eager ms": eager[1], "swapped ms": swapped[1]}


# ------------------------------------------------------------------ transformers
def _hugging_face(family: str, kind: str) -> dict[str, Any]:
    given = _batches(family, kind)
    eager = _trained(_model(family, kind), given)
    swapped = _model(family, kind)
    with fusegrad.config.patch(backend="triton"), fusegrad.swap(swapped, replacements(swapped)):
        return _told(eager, _trained(swapped, given))


def _model(family: str, kind: str) -> Any:
    import transformers

    name, config, own = convergence.FAMILIES[family]
    sizes = LARGER if kind == "cuda" else convergence.SIZES
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**{**own, **sizes})).to("cuda")


def _batches(family: str, kind: str) -> list[dict[str, torch.Tensor]]:
    if kind != "cuda":
        texts = convergence.batches(STEPS[kind], family == "bert")
    else:
        numbers = torch.Generator().manual_seed(1)
        ids = torch.randint(0, LARGER["vocab_size"], (STEPS[kind], 4, 512), generator=numbers)
        texts = [{"input_ids": each, "labels": each} for each in ids]
    return [{name: tensor.to("cuda") for name, tensor in batch.items()} for batch in texts]


def _trained(model: nn.Module, given: list[dict[str, torch.Tensor]]) -> tuple[list[float], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False)
    return _steps(lambda batch: model(**batch).loss, optimizer, given)


def _steps(loss_of: Any, optimizer: Any, given: Any) -> tuple[list[float], float]:
    losses, times = [], []
    for batch in given:
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))  # waits for the device
        times.append((time.perf_counter() - began) * 1e3)
    return losses, round(statistics.median(times), 3)


# ------------------------------------------------------------------ the demo's
def _demo(kind: str) -> dict[str, Any]:
    """A byte-level transformer of the examples, over Python's own sources."""
    small = Sizes(width=16, hidden=32, heads=2, layers=1, context=8, batch=2)
    sizes = Sizes(width=1024, hidden=2816, heads=16, layers=4, context=512, batch=8) if kind == "cuda" else small
    fast = Functions(*(fusegrad.compile(f, backend="triton") for f in FUNCTIONS))
    return _told(*(_demo_trained(f, sizes, kind) for f in (Functions(*FUNCTIONS), fast)))


def _demo_trained(functions: Functions, sizes: Sizes, kind: str) -> tuple[list[float], float]:
    model = seeded_model(functions, sizes, 0, torch.device("cuda"))
    batches = windows(read_text(torch.device("cpu")), sizes, 0)
    given = [[t.long().to("cuda") for t in next(batches)] for _ in range(STEPS[kind])]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False)
    return _steps(lambda batch: model(*batch), optimizer, given)
