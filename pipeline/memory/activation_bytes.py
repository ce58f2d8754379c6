"""Bytes of activations that a layer holds while it works, and from forward to backward where it is not recomputed."""

from __future__ import annotations

from pipeline.memory.footprint import Place, Term
from pipeline.memory.shapes import ComputeShape, StepShape

HEAD_CHUNK_TOKENS = 4096
"""Tokens whose logits exist at a time."""


def work_term(
    compute: ComputeShape,
    tokens: int,
    decoder_bytes: int,
    element_bytes: int,
    *,
    compiled: bool,
    qk_norms: bool = False,
    mlp_chunk_tokens: int = 0,
    kept: bool = False,
    spare_bytes: int = 0,
) -> Term:
    """The larger of what the head and what a decoder layer holds while it works.

    The head was measured at 4.5 bytes a logit. A layer has most at hand in its own backward; of one that keeps its
    graph, that is accounted elsewhere.

    Args:
        compute: Sizes of activations.
        tokens: Of a micro-batch.
        decoder_bytes: Weights of the largest decoder layer.
        element_bytes: Of weights and activations.
        compiled: Whether templates and the head are compiled.
        qk_norms: Whether queries and keys are normalised.
        mlp_chunk_tokens: Tokens that pass the feed-forward network of a recomputed layer at a time; 0 for all of them.
        kept: Whether any layer is not recomputed.
        spare_bytes: Of kept graphs, what is free again when recomputed layers have their turn.
    """
    chunk = min(HEAD_CHUNK_TOKENS, tokens)
    logit_bytes = (5 if compiled else 12) * element_bytes // 2
    head = chunk * compute.vocab_size * logit_bytes + 4 * tokens * compute.hidden_size * element_bytes
    why = f"recompute and backward of {tokens:,} tokens"
    if 0 < mlp_chunk_tokens < tokens:
        why += f", {mlp_chunk_tokens:,} at a time through the feed-forward network"
    layer = recomputed_bytes(compute, tokens, element_bytes, compiled, qk_norms=qk_norms, chunk_tokens=mlp_chunk_tokens)
    if not compiled:
        # Gradients leave autograd in the weights' type; compiled layers multiply them straight into the fp32 sums.
        layer += decoder_bytes
    if kept:
        whole = recomputed_bytes(compute, tokens, element_bytes, compiled, qk_norms=qk_norms)
        graph = tokens * kept_graph_bytes(compute, element_bytes, compiled, qk_norms=qk_norms)
        layer = max(layer - spare_bytes, max(0, whole - graph) + (0 if compiled else decoder_bytes))
    if head > layer:
        return Term(Place.DEVICE, "head chunk", head, f"logits and their gradient, {chunk:,} tokens at a time")
    return Term(Place.DEVICE, "layer at work", layer, why)


def recomputed_bytes(
    compute: ComputeShape,
    tokens: int,
    element_bytes: int,
    compiled: bool,
    *,
    qk_norms: bool,
    chunk_tokens: int = 0,
) -> int:
    """Bytes that recompute and backward of a decoder layer hold at their peak, beside its input and its weights.

    Compiled, an H200 held these sums to a thousandth, and half a hundredth is added: of Qwen2.5 7B 272,504 bytes a
    token for a layer as a whole, and of 131,072 tokens in chunks of 16,384 83,172 bytes a token.

    Args:
        compute: Sizes of activations.
        tokens: That pass at once.
        element_bytes: Of activations.
        compiled: Whether elementwise work is fused.
        qk_norms: Whether queries and keys are normalised.
        chunk_tokens: Of them pass the feed-forward network at a time; 0 for all.
    """
    chunked = 0 < chunk_tokens < tokens
    if not compiled:
        if not chunked:
            return tokens * layer_activation_bytes(compute, element_bytes)
        halves = tokens * attention_half_bytes(compute, element_bytes)
        return halves + chunk_tokens * feed_forward_half_bytes(compute, element_bytes)
    heads, experts, hidden = compute.query_size // compute.head_size, compute.experts_per_token, compute.hidden_size
    # Kept: rotated queries and keys, values, the output and the logarithm of each head's sum, the residual stream.
    kept = 2 * (compute.query_size + compute.kv_size) + 2 * hidden
    kept += compute.query_size + compute.kv_size if qk_norms else 0
    attention_graph = kept * element_bytes + 4 * (heads + 1)
    gradients = (4 * compute.query_size + 2 * compute.kv_size + 3 * hidden) * element_bytes + 8 * heads
    # What the weight gradients of the network are made of is handed out at the end: its inputs and its gradients.
    handed_out = 0 if chunked else (3 * experts * compute.intermediate_size + hidden) * element_bytes
    in_attention = tokens * (attention_graph + gradients + handed_out)
    # Beside gate and up their gradients, their product and its gradient.
    intermediates, streams = experts * compute.intermediate_size, experts * 3 * hidden
    if chunked:
        in_network = tokens * (attention_graph + hidden * element_bytes)
        in_network += chunk_tokens * (6 * intermediates + streams) * element_bytes
    else:
        graph = kept_graph_bytes(compute, element_bytes, compiled, qk_norms=qk_norms)
        in_network = tokens * (graph + (4 * intermediates + streams) * element_bytes)
    return max(in_attention, in_network) * 201 // 200


def layer_activation_bytes(compute: ComputeShape, element_bytes: int) -> int:
    """Bytes a token of what an uncompiled layer keeps from its recomputed forward to its backward, and their gradients.

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


def mask_bytes(step: StepShape, element_bytes: int, *, kept_layers: int, waves: int, compiled: bool) -> int:
    """Bytes of attention masks, of runs whose attention needs them for packed documents, at their peak.

    A layer at work has its micro-batch's: a truth for each pair of tokens of a sequence, then a number; uncompiled, one
    that is not recomputed keeps the numbers.
    """
    pairs = step.micro_batch_tokens * step.sequence_length
    kept = 0 if compiled else kept_layers * step.largest_wave(waves).tokens * step.sequence_length
    return pairs * (2 + element_bytes) + kept * element_bytes


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
