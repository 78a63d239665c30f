"""Llama, Qwen 2 and 3 and BERT of Hugging Face's transformers, swapped, beside themselves: small and random."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fusegrad

transformers = pytest.importorskip("transformers", reason="pip install 'fusegrad[test]' has it")
from fusegrad.examples.models.convergence import FAMILIES, TOLERANCE, difference, small, trained  # noqa: E402
from fusegrad.examples.models.hugging_face import replacements  # noqa: E402
from fusegrad.runtime.swap.swap import SwapError  # noqa: E402

DECODER = {f"{name}Backward" for name in ("RMSNorm", "SwiGLU", "RoPE", "CrossEntropy", "Attention")}
NAMED = {
    "llama": DECODER,
    "qwen2": DECODER,
    "qwen3": DECODER,
    "bert": {"LayerNormBackward", "GELUBackward", "CrossEntropyBackward"},
}
"""The nodes of the autograd graph that are of Functions of the gallery."""
every = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def nothing_falls_back() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusegrad.FallbackWarning)
        yield


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 96, (3, 20), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(20) < 5, -100)}


def step(model: nn.Module, **more: Any) -> dict[str, torch.Tensor]:
    """The loss, the logits and every gradient."""
    model.zero_grad()
    out = model(**batch(), **more)
    out.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": out.loss.detach(), "logits": out.logits.detach(), **gradients}


def functions(node: Any) -> set[str]:
    """The names of the nodes that are Functions written in Python."""
    seen, todo = set(), [node]
    while todo:
        if (now := todo.pop()) is not None and now not in seen:
            seen.add(now)
            todo += [following for following, _ in now.next_functions]
    return {now.name() for now in seen if isinstance(now, torch.autograd.function.BackwardCFunction)}


@every
@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_loss_logits_and_gradients(family: str, backend: str) -> None:
    model = small(family)
    expected, keys = step(model), list(model.state_dict())
    with fusegrad.config.patch(backend=backend), fusegrad.swap(model, replacements(model)):
        got = step(model)
        assert list(model.state_dict()) == keys and NAMED[family] == functions(model(**batch()).loss.grad_fn)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert functions(model(**batch()).loss.grad_fn) == set()
    torch.testing.assert_close(step(model), expected, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_in_bfloat16_and_under_autocast(family: str) -> None:
    model = small(family)
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(model)
    with fusegrad.swap(model, replacements(model)), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(step(model), expected, rtol=0.1, atol=0.02)
    model.to(torch.bfloat16)
    expected = step(model)
    with fusegrad.swap(model, replacements(model)):
        torch.testing.assert_close(step(model), expected, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_gradient_checkpointing(reentrant: bool) -> None:
    model = small("llama")
    expected = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with fusegrad.swap(model, replacements(model)):
        torch.testing.assert_close(step(model), expected, rtol=1e-4, atol=1e-5)


def test_the_trainers_way_of_counting_tokens() -> None:
    model = small("llama")
    expected = step(model, num_items_in_batch=torch.tensor(40))
    with fusegrad.swap(model, replacements(model)):
        torch.testing.assert_close(step(model, num_items_in_batch=torch.tensor(40)), expected, rtol=1e-4, atol=1e-5)


def test_text_is_generated_as_before() -> None:
    model = small("qwen3").eval()
    ids = batch()["input_ids"][:1, :4]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    # without patience: other tests of the process may have filled the budget of the gallery's classes
    with fusegrad.config.patch(disable="patience"), fusegrad.swap(model, replacements(model)):
        assert torch.equal(model.generate(ids, **options), expected)


def test_save_and_load(tmp_path: Any) -> None:
    model = small("llama")
    with fusegrad.swap(model, replacements(model)):
        model.save_pretrained(tmp_path)
        other = copy.deepcopy(model)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert transformers.LlamaConfig.from_pretrained(tmp_path).architectures == ["LlamaForCausalLM"]
    torch.testing.assert_close(dict(again.named_parameters()), dict(model.named_parameters()))
    assert other.lm_head.weight is other.model.embed_tokens.weight and other.lm_head.weight is not model.lm_head.weight


def test_another_activation_is_refused() -> None:
    model = small("llama", hidden_act="gelu")
    with pytest.raises(SwapError, match=r"model\.layers\.0\.mlp.*activation is GELUActivation"):
        fusegrad.swap(model, replacements(model))


def test_another_model_has_no_set() -> None:
    with pytest.raises(ValueError, match="llama, qwen2, qwen3, bert"):
        replacements(nn.Linear(2, 2))


@every
def test_the_first_steps_of_training(family: str) -> None:
    eager, swapped = trained(family, steps=12)
    assert sum(eager[-4:]) < sum(eager[:4])  # of four texts each; what is masked in them differs
    assert difference(eager, swapped) < TOLERANCE
