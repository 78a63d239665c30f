"""Trains small Hugging Face models with and without `fusegrad.swap`: same weights, same batches, losses side by side.

    python -m fusegrad.examples.models.convergence --steps 200

The exit code is 1 where the losses are further apart than rounding explains.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import nn

import fusegrad

from .hugging_face import replacements

TOLERANCE = 1e-4
"""Of the losses, relative: rounding in another order, in every step, over hundreds of them."""
RATE = 3e-3
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
DECODER: dict[str, Any] = {"num_key_value_heads": 2, "tie_word_embeddings": True}
ENCODER: dict[str, Any] = {
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.1,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", DECODER),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 8}),
    "bert": ("BertForMaskedLM", "BertConfig", ENCODER),
}


def small(family: str, **more: Any) -> Any:
    """A model of the family with random weights, always the same."""
    import transformers

    model, config, own = FAMILIES[family]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**SIZES, **own, **more))


def batches(steps: int, masked: bool) -> list[dict[str, torch.Tensor]]:
    """Texts that count upwards by a step of their own; for BERT with places to be filled in."""
    numbers = torch.Generator().manual_seed(1)
    start, stride = (torch.randint(1, high, (steps, 4, 1), generator=numbers) for high in (96, 4))
    texts = (start + stride * torch.arange(24)) % 96
    if not masked:
        return [{"input_ids": text, "labels": text} for text in texts]
    texts = texts[torch.arange(steps) % 4]  # a masked model of this size learns few texts
    hidden = torch.rand(texts.shape, generator=numbers) < 0.3
    labels = texts.masked_fill(~hidden, -100)
    return [{"input_ids": i, "labels": j} for i, j in zip(texts.masked_fill(hidden, 0), labels, strict=True)]


def losses(model: nn.Module, given: list[dict[str, torch.Tensor]]) -> list[float]:
    """Of every step of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    found = []
    for batch in given:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def trained(family: str, steps: int) -> tuple[list[float], list[float]]:
    """The losses as transformers computes them, and swapped."""
    given = batches(steps, family == "bert")
    eager = losses(small(family), given)
    model = small(family)
    with fusegrad.swap(model, replacements(model)):
        return eager, losses(model, given)


def difference(eager: list[float], swapped: list[float]) -> float:
    """The largest relative one of any step."""
    return max(abs(a - b) / abs(a) for a, b in zip(eager, swapped, strict=True))


def main(argv: list[str] | None = None) -> int:
    """One row a family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--backend", default="auto", help="reference, interpret, triton, inductor")
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    asked = parser.parse_args(argv)
    print(f"{'model':<8} {'steps':>5} {'first loss':>11} {'last loss':>11} {'swapped':>11} {'largest difference':>19}")
    worst = 0.0
    with fusegrad.config.patch(backend=asked.backend):
        for family in asked.families:
            started = time.perf_counter()
            eager, swapped = trained(family, asked.steps)
            worst = max(worst, found := difference(eager, swapped))
            ends = "".join(f" {loss:>11.5f}" for loss in (eager[0], eager[-1], swapped[-1]))
            seconds = time.perf_counter() - started
            print(f"{family:<8} {asked.steps:>5}{ends} {found:>19.1e}   ({seconds:.0f} s)", flush=True)
    print(f"losses {'agree' if worst <= TOLERANCE else 'DIFFER'}: tolerance {TOLERANCE:.0e}, relative")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    raise SystemExit(main())
