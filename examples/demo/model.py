"""The demo's model and text: a byte-level transformer over the sources of Python's standard library.

The Functions are an argument, so that one definition serves the eager classes and the compiled ones.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from fusegrad.runtime.commands.demo import NoTextError

IGNORED = -100
VOCABULARY = 256


class Functions(NamedTuple):
    """The custom Functions that the model calls."""

    rms_norm: type[Function]
    causal_softmax: type[Function]
    swiglu: type[Function]
    cross_entropy: type[Function]


@dataclass(frozen=True)
class Sizes:
    """Small enough for two cores: one step takes some tens of milliseconds."""

    width: int = 128
    hidden: int = 256
    heads: int = 4
    layers: int = 2
    context: int = 128
    batch: int = 8


# ---------------------------------------------------------------------- text
def read_text(device: torch.device) -> list[Tensor]:
    """The bytes of every top-level module of the standard library, one tensor per file."""
    folder = Path(sysconfig.get_path("stdlib"))
    texts = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    if not any(texts):
        raise NoTextError(folder=folder)
    return [torch.tensor(list(text), device=device) for text in texts if text]


def windows(text: list[Tensor], sizes: Sizes, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of (bytes, next bytes) for ever. What lies beyond the end of a file is not learned."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([len(file) for file in text], dtype=torch.float64)
    while True:
        files = torch.multinomial(lengths, sizes.batch, replacement=True, generator=draw).tolist()
        starts = (torch.rand(sizes.batch, generator=draw) * lengths[files]).long().tolist()
        cut = torch.stack([window(text[f], start, sizes.context + 1) for f, start in zip(files, starts, strict=True)])
        yield cut[:, :-1].clamp_min(0), cut[:, 1:]


def window(file: Tensor, start: int, length: int) -> Tensor:
    """`length` bytes from `start`, filled up with IGNORED."""
    piece = file[start : start + length]
    return torch.nn.functional.pad(piece, (0, length - len(piece)), value=IGNORED)


# ---------------------------------------------------------------------- model
def call(function: type[Function], *arguments: Any) -> Tensor:
    """`function.apply`, which torch leaves without types."""
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


class Norm(nn.Module):
    """RMSNorm over the rows of (batch, time, width)."""

    def __init__(self, function: type[Function], width: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        rows = call(self.function, x.flatten(0, 1), self.weight, 1e-6)
        return rows.view_as(x)


class Attention(nn.Module):
    """Causal self-attention; torch multiplies the matrices, the Function is the masked softmax between them."""

    def __init__(self, function: type[Function], sizes: Sizes) -> None:
        super().__init__()
        self.function, self.heads = function, sizes.heads
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = call(self.function, q @ k.mT, q.shape[-1] ** -0.5)
        mixed: Tensor = self.out((weights @ v).transpose(1, 2).flatten(-2))
        return mixed


class MLP(nn.Module):
    """down(swiglu(gate(x), up(x)))"""

    def __init__(self, function: type[Function], sizes: Sizes) -> None:
        super().__init__()
        self.function = function
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(call(self.function, self.gate(x), self.up(x)))
        return y


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))"""

    def __init__(self, functions: Functions, sizes: Sizes) -> None:
        super().__init__()
        self.before_attention = Norm(functions.rms_norm, sizes.width)
        self.attention = Attention(functions.causal_softmax, sizes)
        self.before_mlp = Norm(functions.rms_norm, sizes.width)
        self.mlp = MLP(functions.swiglu, sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))  # type: ignore[no-any-return]


class ByteModel(nn.Module):
    """(bytes, next bytes) -> mean cross-entropy in nats per byte."""

    def __init__(self, functions: Functions, sizes: Sizes) -> None:
        super().__init__()
        self.functions = functions
        self.bytes = nn.Embedding(VOCABULARY, sizes.width)
        self.positions = nn.Parameter(torch.randn(sizes.context, sizes.width) * 0.02)
        self.blocks = nn.ModuleList(Block(functions, sizes) for _ in range(sizes.layers))
        self.norm = Norm(functions.rms_norm, sizes.width)
        self.head = nn.Linear(sizes.width, VOCABULARY, bias=False)

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        x = self.bytes(text) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return call(self.functions.cross_entropy, logits, following.flatten(), IGNORED)


def seeded_model(functions: Functions, sizes: Sizes, seed: int, device: torch.device) -> ByteModel:
    """The model with weights that depend on the seed alone."""
    torch.manual_seed(seed)
    return ByteModel(functions, sizes).to(device)
