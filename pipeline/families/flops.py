"""Counts the arithmetic of a model, for throughput figures and predictions."""

from __future__ import annotations

from pipeline.families.family import family_of
from pipeline.families.layout import model_layout
from pipeline.families.spec import ModelSpec
from tiers.layout import LayerKind, ModelLayout


def matmul_parameters(layout: ModelLayout) -> int:
    """Parameters that every token is multiplied with: all matrices and the LM head, not the embedding's look-up."""
    embedding, *others = layout.layers
    assert embedding.kind is LayerKind.EMBEDDING
    matrices = sum(tensor.numel for layer in others for tensor in layer.tensors if len(tensor.shape) >= 2)
    return matrices + (embedding.num_parameters if layout.tied else 0)


def model_flops_per_token(spec: ModelSpec, sequence_length: int) -> float:
    """Floating-point operations that training on one token takes, forward and backward, recompute not counted.

    6 x matmul parameters, and for each layer 12 x (keys seen on average) x heads x head size for the two products of
    attention: with causal attention over S tokens S/2 keys, so 6 x S x heads x head size. A sliding window of W tokens
    shows W x (1 - W / 2S). Packed documents see less; the figure counts a sequence as one document.
    """
    family = family_of(spec)
    keys = 0.0
    for index in range(1, spec.num_decoder_layers + 1):
        window = min(family.window(index) or sequence_length, sequence_length)
        keys += window * (1.0 - window / (2.0 * sequence_length))
    attention = 12.0 * keys * spec.num_attention_heads * spec.head_dim
    return 6.0 * matmul_parameters(model_layout(spec)) + attention
