"""Replacements for models of Hugging Face's transformers: Llama, Qwen 2 and 3, BERT.

    from fusegrad.examples.models.hugging_face import replacements

    with fusegrad.swap(model, replacements(model)):
        train(model)

Norms, the gated MLP, rotary positions, the decoders' attention and the loss become Functions of the gallery; what they
read, save and return is what transformers has. The other matrix products, and BERT's attention, stay.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..gallery.attention import Attention
from ..gallery.cross_entropy import CrossEntropy
from ..gallery.gelu import GELU
from ..gallery.layer_norm import LayerNorm
from ..gallery.rms_norm import RMSNorm
from ..gallery.rope import RoPE
from ..gallery.swiglu import SwiGLU


# ------------------------------------------------------------------ modules
def rms_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """In the place of LlamaRMSNorm.forward."""
    return RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)  # type: ignore[no-any-return]


class GatedMLP:
    """silu(gate(x)) * up(x), projected down."""

    @staticmethod
    def refuses(module: Any) -> str | None:
        name = type(module.act_fn).__name__
        return None if name in ("SiLU", "SiLUActivation") else f"its activation is {name}, not SiLU"

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(SwiGLU.apply(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]


class RowNorm:
    """In the place of torch.nn.LayerNorm over the last dimension."""

    @staticmethod
    def refuses(module: Any) -> str | None:
        if len(module.normalized_shape) != 1:
            return "it normalises over more than the last dimension"
        return None if module.weight is not None and module.bias is not None else "it has no weight, or no bias"

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        return LayerNorm.apply(input, self.weight, self.bias, self.eps)  # type: ignore[no-any-return]


def gelu(self: Any, input: torch.Tensor) -> torch.Tensor:
    """In the place of transformers' GELUActivation.forward."""
    return GELU.apply(input)  # type: ignore[no-any-return]


class CausalAttention:
    """Rotary positions, and softmax attention as one Function; with a mask from memory or dropout, the module's own."""

    @staticmethod
    def refuses(module: Any) -> str | None:
        if getattr(module, "sliding_window", None) is not None:
            return "its window slides"
        kind = module.config._attn_implementation
        return None if kind in ("sdpa", "eager") else f"its implementation is {kind}, not sdpa or eager"

    def heads(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, [batch, heads, length, width]."""
        rows = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in rows)
        return q, k, v

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        drops = self.training and self.attention_dropout > 0
        if attention_mask is not None or drops or kwargs.get("is_causal") is False:
            return super().forward(  # type: ignore[misc, no-any-return]
                hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs
            )
        q, k, v = self.heads(hidden_states)
        q, k = rotary(q, k, *position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        if (length := q.shape[2]) > 1:  # as in sdpa, without a mask what lies behind the queries is room to grow
            k, v = k[:, :, :length], v[:, :, :length]
        mixed = Attention.apply(q, k, v, self.scaling, length > 1)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2)), None


class NormedCausalAttention(CausalAttention):
    """The same, where queries and keys are normalised."""

    def heads(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super().heads(x)
        return self.q_norm(q), self.k_norm(k), v


# ------------------------------------------------------------------ functions
def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """In the place of apply_rotary_pos_emb, whose cos and sin hold every angle twice."""
    half = cos.shape[-1] // 2
    cos, sin = (t[..., :half].unsqueeze(unsqueeze_dim) for t in (cos, sin))
    return RoPE.apply(q, cos, sin), RoPE.apply(k, cos, sin)


def cross_entropy(logits: torch.Tensor, target: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """The mean over the rows that count, without label smoothing or z-loss."""
    return CrossEntropy.apply(logits, target, ignore_index, 0.0, 0.0)  # type: ignore[no-any-return]


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """In the place of transformers' ForCausalLMLoss: each position is to foretell the next."""
    if shift_labels is None:
        assert labels is not None
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.reshape(-1).to(logits.device)
    loss = cross_entropy(logits.reshape(-1, vocab_size), target, ignore_index)
    if num_items_in_batch is None:
        return loss
    counted = (target != ignore_index).sum().clamp_min(1)
    return loss * counted / torch.as_tensor(num_items_in_batch, device=loss.device)


class CausalLM:
    """A model whose loss is compiled; its forward stays."""

    loss_function = staticmethod(causal_lm_loss)

    @staticmethod
    def refuses(module: Any) -> str | None:
        if hasattr(module, "_loss_function"):
            return "a loss function was set on it"
        kind = getattr(module, "loss_type", None)
        return None if kind in (None, "ForCausalLM") else f"its loss is {kind}"


class MeanCrossEntropy(nn.CrossEntropyLoss):
    """In the place of torch.nn.CrossEntropyLoss where a model makes one itself; what it has not, torch computes."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        is_plain = self.weight is None and self.reduction == "mean" and self.label_smoothing == 0
        if not is_plain or input.dim() != 2 or target.is_floating_point():
            return super().forward(input, target)
        loss = cross_entropy(input, target, self.ignore_index)
        return loss if torch.is_autocast_enabled(input.device.type) else loss.to(input.dtype)


# ------------------------------------------------------------------ sets
def replacements(model: nn.Module) -> dict[Any, Any]:
    """What `fusegrad.swap` is given for this model; raises ValueError for a model that is not one of these."""
    family = getattr(getattr(model, "config", None), "model_type", None)
    if family not in FAMILIES:
        raise ValueError(f"no replacements for a model of type {family!r}; there are some for {', '.join(FAMILIES)}")
    source = sys.modules[f"transformers.models.{family}.modeling_{family}"]
    there = {type(module) for module in model.modules()}
    wanted = FAMILIES[family](source)
    return {key: new for key, new in wanted.items() if key in there or _is_named(key, type(model))}


def _is_named(key: Any, cls: Any) -> bool:
    """Whether it is no module of a model, but something that its methods name."""
    if key is nn.CrossEntropyLoss:
        return "CrossEntropyLoss" in inspect.unwrap(cls.forward).__code__.co_names
    return not isinstance(key, type)


def decoder(prefix: str, attention: type = CausalAttention) -> Callable[[Any], dict[Any, Any]]:
    """For the models that are built as Llama is."""

    def of(source: Any) -> dict[Any, Any]:
        return {
            getattr(source, f"{prefix}Attention"): attention,
            getattr(source, f"{prefix}RMSNorm"): rms_norm,
            getattr(source, f"{prefix}MLP"): GatedMLP,
            getattr(source, f"{prefix}ForCausalLM"): CausalLM,
            source.apply_rotary_pos_emb: rotary,
        }

    return of


def encoder(source: Any) -> dict[Any, Any]:
    """For BERT."""
    from transformers.activations import GELUActivation

    return {nn.LayerNorm: RowNorm, GELUActivation: gelu, nn.CrossEntropyLoss: MeanCrossEntropy}


FAMILIES: dict[str, Callable[[Any], dict[Any, Any]]] = {
    "llama": decoder("Llama"),
    "qwen2": decoder("Qwen2"),
    "qwen3": decoder("Qwen3", NormedCausalAttention),
    "bert": encoder,
}
