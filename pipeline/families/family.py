"""Builds and runs the parts of a model: embedding, decoder layers, rotary tables and final norm.

The Hugging Face layer classes are used as they are. Modules come on the meta device: whoever asked binds their
parameters to memory of his own. Layers are numbered as in `ModelLayout`: 0 is the embedding, 1..L are decoder layers.

Shapes: B sequences of a micro-batch, S tokens of a sequence, H hidden size, V vocabulary, D head size,
C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.families.attention import AttentionContext
from pipeline.families.registry import FAMILIES, LayerBlocks
from pipeline.families.spec import ModelSpec


class Rotary(Protocol):
    """Makes the rotary tables of a micro-batch."""

    def __call__(self, position_ids_BS: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, [B, S, D] each in `dtype`, on the device of the tables."""
        ...


class Family:
    """A model's parts. Holds no tensors and may be shared."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._entry = FAMILIES[spec.model_type]

    @property
    def windows(self) -> frozenset[int | None]:
        """Every sliding window that some layer of the model has, None for layers that see everything."""
        return frozenset(self.window(index) for index in range(1, self.spec.num_decoder_layers + 1))

    def window(self, layer_index: int) -> int | None:
        """Tokens that a token of decoder layer `layer_index` (1..L) sees, itself included; None for all before it."""
        return self._entry.window(self.spec.config, self._decoder_index(layer_index))

    def signature(self, layer_index: int) -> Hashable:
        """Equal for decoder layers that one template can serve: same shapes, same offsets, same maths."""
        return (self.spec.model_type, self.window(layer_index))

    def parameter_prefix(self, layer_index: int) -> str:
        """What a decoder layer's parameters are called by before their name in the module."""
        return f"model.layers.{self._decoder_index(layer_index)}."

    def build_decoder_layer(self, layer_index: int) -> nn.Module:
        """Build decoder layer `layer_index` (1..L) on the meta device, in evaluation mode: nothing here drops out."""
        with torch.device("meta"):
            return self._entry.decoder_layer(self.spec.config, self._decoder_index(layer_index)).eval()

    @property
    def last_projection(self) -> str | None:
        """Name of the linear layer whose product a recomputed decoder layer can do without, or None."""
        return self._entry.last_projection

    @property
    def attention_projection(self) -> str | None:
        """Name of the linear layer whose input is the attention's output, or None."""
        return self._entry.attention_projection

    @property
    def shared_inputs(self) -> tuple[tuple[str, ...], ...]:
        """Names of a decoder layer's linear layers, in groups that are given the same tensor."""
        return self._entry.shared_inputs

    @property
    def blocks(self) -> LayerBlocks | None:
        """Names of a decoder layer's two residual blocks, or None where it has others."""
        return self._entry.blocks

    def build_final_norm(self) -> nn.Module:
        """Build the norm between the last decoder layer and the LM head, on the meta device."""
        with torch.device("meta"):
            return self._entry.final_norm(self.spec.hidden_size, eps=self.spec.config.rms_norm_eps).eval()

    def build_rotary(self, device: torch.device) -> Rotary:
        """Build the rotary tables' maker; its frequencies are fp32 on `device` whatever the precision."""
        module = self._entry.rotary(self.spec.config).to(device)

        def rotary(position_ids_BS: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            # The module takes only dtype and device from its first argument.
            cos_BSD, sin_BSD = module(torch.empty((), dtype=dtype, device=device), position_ids_BS.to(device))
            return cos_BSD, sin_BSD

        return rotary

    def embed(self, input_ids_BS: Tensor, weight_VH: Tensor) -> Tensor:
        """Look up the tokens: int [B, S] and [V, H] give [B, S, H] in the type of the weight."""
        return F.embedding(input_ids_BS, weight_VH)

    def embed_backward(self, input_ids_BS: Tensor, grad_x_BSH: Tensor, weight_grad_VH: Tensor) -> None:
        """Add the gradient of `embed` to `weight_grad_VH` (fp32), in an order that does not vary between runs.

        The row of `pad_token_id` gets none, as in Hugging Face's `nn.Embedding(padding_idx=...)`.
        """
        ids_T = input_ids_BS.reshape(-1).long()
        grad_TH = grad_x_BSH.reshape(ids_T.shape[0], -1).to(weight_grad_VH.dtype)
        padding = self.spec.config.pad_token_id
        if padding is not None:
            grad_TH = grad_TH.masked_fill((ids_T == padding)[:, None], 0.0)
        # index_add_ uses atomics on CUDA, whose order of summation varies; an accumulating index_put_ sorts instead.
        weight_grad_VH.index_put_((ids_T,), grad_TH, accumulate=True)

    def run_decoder_layer(self, module: nn.Module, x_BSH: Tensor, context: AttentionContext) -> Tensor:
        """Run a decoder layer that `build_decoder_layer` made and that now has real parameters."""
        y_BSH = module(
            x_BSH,
            attention_mask=None,
            position_embeddings=context.position_embeddings,
            attention_context=context,
        )
        assert isinstance(y_BSH, Tensor)
        return y_BSH

    def run_feed_forward(self, module: nn.Module, m_CH: Tensor) -> Tensor:
        """Run the half of a decoder layer that `layer_halves.keep_feed_forward` left, on any C tokens: [C, H]."""
        y_1CH = module(m_CH[None], attention_mask=None, position_embeddings=None, attention_context=None)
        assert isinstance(y_1CH, Tensor)
        return y_1CH[0]

    def _decoder_index(self, layer_index: int) -> int:
        assert 1 <= layer_index <= self.spec.num_decoder_layers, f"layer {layer_index} is not a decoder layer"
        return layer_index - 1


def family_of(spec: ModelSpec) -> Family:
    """The family of a model that `load_model_spec` accepted."""
    return Family(spec)
