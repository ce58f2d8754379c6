"""Bytes of activations that a layer holds while it works, and from forward to backward where it is not recomputed."""

from __future__ import annotations

from pipeline.memory.footprint import Place, Term
from pipeline.memory.shapes import ComputeShape

HEAD_CHUNK_TOKENS = 4096
"""Tokens whose logits exist at a time."""


def work_term(
    compute: ComputeShape,
    tokens: int,
    decoder_bytes: int,
    element_bytes: int,
    *,
    compiled: bool,
    mlp_chunk_tokens: int = 0,
    kept_bytes: int = 0,
) -> Term:
    """The larger of what the head and what a decoder layer holds while it works.

    A decoder layer's own gradients leave autograd in the weights' type before they are summed in fp32. Of 7B on an
    H200, compiled, 16,384 tokens at a time, 3.3 GiB of the peak were either of the two: `head` measured 4.5 bytes a
    logit, and the layer then holds at most 0.52 of what it does uncompiled: 0.55 here.

    Args:
        compute: Sizes of activations.
        tokens: Of a micro-batch.
        decoder_bytes: Weights of the largest decoder layer.
        element_bytes: Of weights and activations.
        compiled: Whether templates and the head are compiled.
        mlp_chunk_tokens: Tokens that pass the feed-forward network at a time; 0 for all of them.
        kept_bytes: What a layer that is not recomputed keeps for its backward, a micro-batch; 0 where there is none.
            Such a layer passes no chunks, and what it keeps is accounted elsewhere.
    """
    chunk = min(HEAD_CHUNK_TOKENS, tokens)
    logit_bytes = (5 if compiled else 12) * element_bytes // 2
    head = chunk * compute.vocab_size * logit_bytes + 4 * tokens * compute.hidden_size * element_bytes
    layer = tokens * layer_activation_bytes(compute, element_bytes)
    layer = layer * 11 // 20 if compiled else layer
    why = f"recompute and backward of {tokens:,} tokens"
    if 0 < mlp_chunk_tokens < tokens:
        # Not measured compiled: the halves are taken as they are uncompiled.
        halves = tokens * attention_half_bytes(compute, element_bytes)
        halves += mlp_chunk_tokens * feed_forward_half_bytes(compute, element_bytes)
        layer = max(halves, layer - kept_bytes) if kept_bytes else halves
        why += f", {mlp_chunk_tokens:,} at a time through the feed-forward network"
    layer += decoder_bytes
    if head > layer:
        return Term(Place.DEVICE, "head chunk", head, f"logits and their gradient, {chunk:,} tokens at a time")
    return Term(Place.DEVICE, "layer at work", layer, why)


def layer_activation_bytes(compute: ComputeShape, element_bytes: int) -> int:
    """Bytes a token of what a decoder layer keeps between its recomputed forward and its backward, and their gradients.

    Counted on the Hugging Face layers as they are: two RMS norms with fp32 copies, q k v before and after rotation, the
    attention output, gate, up, their activation and product, and the gradient of the widest of them.
    """
    return _attention_bytes(compute, element_bytes) + feed_forward_half_bytes(compute, element_bytes)


def attention_half_bytes(compute: ComputeShape, element_bytes: int) -> int:
    """Bytes a token of the half of a decoder layer that mixes tokens.

    Besides its own, the middle of the residual stream, which the other half's chunks are cut from, and its gradient.
    """
    return _attention_bytes(compute, element_bytes) + 2 * compute.hidden_size * element_bytes


def feed_forward_half_bytes(compute: ComputeShape, element_bytes: int) -> int:
    """Bytes a token of the half of a decoder layer that may run in chunks of tokens."""
    network = compute.experts_per_token * (6 * compute.intermediate_size + 2 * compute.hidden_size) * element_bytes
    return _norm_bytes(compute, element_bytes) + network


def _attention_bytes(compute: ComputeShape, element_bytes: int) -> int:
    elements = 4 * compute.query_size + 6 * compute.kv_size + 3 * compute.hidden_size
    return _norm_bytes(compute, element_bytes) + elements * element_bytes


def _norm_bytes(compute: ComputeShape, element_bytes: int) -> int:
    return compute.hidden_size * (2 * 4 + 2 * element_bytes)


def kept_graph_bytes(compute: ComputeShape, element_bytes: int, compiled: bool, *, qk_norms: bool) -> int:
    """Bytes a token of what a decoder layer that is not recomputed keeps from forward to backward, its input left out.

    Compiled within the budget of KEPT_SHARE it is gate and up, rotated queries and keys, values, the attention output
    and the middle of the residual stream, and in fp32 the logarithm of each head's sum and the scale of each norm:
    what is dear to compute again. Qwen2.5 7B on an H200 kept 99,448 bytes, which is exactly this sum; it is rounded up
    by half a hundredth. `qk_norms` adds queries and keys before their norms.
    """
    if not compiled:
        return layer_activation_bytes(compute, element_bytes)
    heads, kv_heads = compute.query_size // compute.head_size, compute.kv_size // compute.head_size
    feed_forward = 2 * compute.experts_per_token * compute.intermediate_size
    elements = feed_forward + 2 * (compute.query_size + compute.kv_size) + compute.hidden_size
    scales = heads + 2
    if qk_norms:
        elements += compute.query_size + compute.kv_size
        scales += heads + kv_heads
    return (elements * element_bytes + 4 * scales) * 201 // 200
