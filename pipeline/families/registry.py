"""The families that can be trained: one entry a `model_type`, naming the Hugging Face classes that hold its maths.

All of them embed by a plain look-up, share one rotary table between layers, end in one norm and a linear head without
bias, and call the attention function by `config._attn_implementation`. To add a family of that shape, add an entry and
a case to `tests/equivalence/test_layers_equal_transformers.py`; one of another shape also needs a subclass of `Family`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch import nn
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3


def _no_window(config: Any, decoder_index: int) -> int | None:
    return None


def _window_of_every_layer(config: Any, decoder_index: int) -> int | None:
    window: int | None = config.sliding_window
    return window


def _window_by_layer_type(config: Any, decoder_index: int) -> int | None:
    window: int | None = config.sliding_window
    return window if config.layer_types[decoder_index] == "sliding_attention" else None


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """Names of a decoder layer's parts, where it is `m = x + attention(norm(x)); y = m + feed_forward(norm(m))`."""

    attention_norm: str = "input_layernorm"
    attention: str = "self_attn"
    feed_forward_norm: str = "post_attention_layernorm"
    feed_forward: str = "mlp"


@dataclass(frozen=True)
class FamilyEntry:
    """The classes and the fields of one `model_type`."""

    config_class: Any
    decoder_layer: Callable[[Any, int], nn.Module]
    """Called with the configuration and the layer's Hugging Face index."""
    rotary: Callable[[Any], nn.Module]
    final_norm: Callable[..., nn.Module]
    """Called with the hidden size and `eps`."""
    window: Callable[[Any, int], int | None] = _no_window
    """Sliding window of a decoder layer in tokens, the token itself included; None where it sees everything."""
    last_projection: str | None = "mlp.down_proj"
    """Linear layer whose product does nothing but join the residual stream that a decoder layer returns: no backward
    reads it. None where a layer ends otherwise (a norm after the feed-forward network, say)."""
    attention_projection: str | None = "self_attn.o_proj"
    """Linear layer whose input is the attention's output and nothing else; None where there is none."""
    shared_inputs: tuple[tuple[str, ...], ...] = (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
    )
    """Linear layers that are given one and the same tensor."""
    blocks: LayerBlocks | None = LayerBlocks()
    """None where a decoder layer is no such sum: it then cannot run its feed-forward network on some tokens at a time.
    """
    extra_fields: frozenset[str] = frozenset()
    """Fields that the layers read although the configuration class does not declare them."""

    def known_fields(self) -> frozenset[str]:
        """Names that the configuration class or its layers understand."""
        return frozenset(field.name for field in fields(self.config_class)) | self.extra_fields


_MIXTURE = "a mixture of experts can be planned with tasks.plan, not trained yet"
PLANNED_ONLY = dict.fromkeys(("gpt_oss", "mixtral", "qwen3_moe"), _MIXTURE)
"""Families that `planned` knows, and why they cannot be trained."""

FAMILIES: dict[str, FamilyEntry] = {
    "llama": FamilyEntry(
        LlamaConfig,
        modeling_llama.LlamaDecoderLayer,
        modeling_llama.LlamaRotaryEmbedding,
        modeling_llama.LlamaRMSNorm,
    ),
    "mistral": FamilyEntry(
        MistralConfig,
        modeling_mistral.MistralDecoderLayer,
        modeling_mistral.MistralRotaryEmbedding,
        modeling_mistral.MistralRMSNorm,
        window=_window_of_every_layer,
    ),
    "qwen2": FamilyEntry(
        Qwen2Config,
        modeling_qwen2.Qwen2DecoderLayer,
        modeling_qwen2.Qwen2RotaryEmbedding,
        modeling_qwen2.Qwen2RMSNorm,
        window=_window_by_layer_type,
        extra_fields=frozenset({"head_dim"}),
    ),
    "qwen3": FamilyEntry(
        Qwen3Config,
        modeling_qwen3.Qwen3DecoderLayer,
        modeling_qwen3.Qwen3RotaryEmbedding,
        modeling_qwen3.Qwen3RMSNorm,
        window=_window_by_layer_type,
    ),
}
