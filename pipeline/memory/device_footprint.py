"""Terms of device memory at its peak. Never below what was measured: what an allocator decides is rounded up."""

from __future__ import annotations

from pipeline.memory.activation_bytes import kept_graph_bytes, mask_bytes, work_term
from pipeline.memory.device_extras import NO_EXTRAS, Extras
from pipeline.memory.footprint import MIB, Place, Term
from pipeline.memory.lent_room import Activations, lent_bytes
from pipeline.memory.shapes import ComputeShape, StepShape
from pipeline.step.layer_groups import LayerGroups
from tiers.layout import Buffer, LayerKind, ModelLayout, Precision, buffer_types, state_buffers


def device_terms(
    model: ModelLayout,
    compute: ComputeShape,
    step: StepShape,
    gradient_bytes: int,
    *,
    decoder_slots: int,
    outgoing_buffers: int = 2,
    spilled_boundaries: int = 0,
    boundary_every: int = 1,
    waves: int = 1,
    held_gradients: int = 0,
    extras: Extras = NO_EXTRAS,
    compiled: bool = True,
    cuda: bool = True,
    mlp_chunk_tokens: int = 0,
) -> tuple[Term, ...]:
    """Account of device memory at its peak.

    Args:
        model: The layout.
        compute: Sizes of activations.
        step: Tokens of a step and of a micro-batch.
        gradient_bytes: Bytes an element of the outgoing gradient.
        decoder_slots: Weight slots the decoder layers share.
        outgoing_buffers: Buffers of gradients on their way to the host.
        spilled_boundaries: Kept inputs of decoder layers, the first ones, that wait in pinned RAM.
        boundary_every: Recomputed decoder layers of which one keeps its input.
        waves: Parts of the step that pass all layers one after another.
        held_gradients: Layers, the last ones, whose gradients wait on the device for the norm.
        extras: Layers that are updated on the device or not recomputed.
        compiled: Whether templates and the head are compiled: elementwise work is fused and keeps less.
        cuda: Whether the device is a GPU, which holds a context of its own; else the CPU stands in for it.
        mlp_chunk_tokens: Tokens that pass a recomputed layer's feed-forward network at a time; 0 for a micro-batch.
    """
    types = buffer_types(model.precision)
    weight = types[Buffer.WEIGHT].bytes
    decoders = [layer.numel for layer in model.layers if layer.kind is LayerKind.DECODER]
    decoder, embedding, head = max(decoders), model.layers[0].numel, model.layers[-1].numel
    vocabulary = embedding + head if model.tied else max(embedding, head)
    summed = embedding + max(decoder, head) if model.tied else max(decoder, embedding, head)
    # Between waves one layer's sum leaves or comes while the next is made.
    summed += decoder if waves > 1 else 0
    wave = step.largest_wave(waves)
    outgoing = [0] * outgoing_buffers
    waiting = set(range(len(model.layers) - held_gradients, len(model.layers))) - set(extras.device_updates)
    held_elements = sum(model.layers[index].numel for index in waiting)
    state = sum(types[buffer].bytes for buffer in state_buffers(model.precision))
    kept = extras.kept_layers
    graph_bytes = kept_graph_bytes(compute, weight, compiled, qk_norms=_has_qk_norms(model))
    graph = wave.tokens * graph_bytes
    slots = decoder_slots + extras.extra_slots
    for layer in model.layers:
        if layer.index in waiting or layer.index in extras.device_updates:
            continue
        index = (len(model.layers) - 1 - layer.index) % outgoing_buffers
        outgoing[index] = max(outgoing[index], layer.numel)
    boundary = wave.tokens * compute.hidden_size * weight
    groups = LayerGroups(len(decoders) - kept, boundary_every)
    activations = Activations(len(decoders), kept, boundary_every, boundary, graph)
    # Those in RAM are on the device twice at a time: while one is read the next is on its way.
    held = groups.most_inputs + kept + 1 - spilled_boundaries + min(2, spilled_boundaries)
    # Of the waves before, for the embedding's backward.
    earlier = (step.tokens - wave.tokens) * compute.hidden_size * weight
    terms = [
        _device("weight slots", slots * decoder * weight, f"{slots} of the largest decoder layer"),
        _device("vocabulary slot", vocabulary * weight, "embedding and head" if model.tied else "embedding or head"),
        _device("gradient accumulators", summed * 4, "fp32 sums over micro-batches"),
        _device("outgoing gradients", sum(outgoing) * gradient_bytes, "one fills while one leaves"),
        _device("held gradients", held_elements * gradient_bytes, f"of {len(waiting)} layers, until the norm"),
        _device(
            "lent optimizer state",
            lent_bytes(model, extras, activations, state, gradient_bytes),
            f"and gradients of {len(extras.device_updates)} layers that are updated here"
            + (f", partly in the room of {extras.in_lent_room} layers' activations" if extras.in_lent_room else ""),
        ),
        _device(
            "own weight slots",
            extras.own_slots * decoder * weight,
            f"the last {extras.own_slots} layers have one each and are streamed once a step",
        ),
    ]
    # The ids and rotary tables of two steps: the next one's are made while this one computes.
    batch = 2 * step.tokens * (2 * compute.head_size * weight + 3 * 8)
    # The kernel that knows documents computes in 16 bits on a GPU.
    masks = 0
    if not cuda or model.precision is Precision.FP32:
        masks = mask_bytes(step, weight, kept_layers=kept, waves=waves, compiled=compiled)
    passing = [
        _device("boundary activations", held * boundary, f"{held} x {wave.tokens:,} tokens, then their gradients"),
        _device("embedding gradients", earlier, f"of {waves - 1} waves, until the last"),
        _device("batch", batch, "token ids, targets, rotary tables of two steps"),
        _device("attention masks", masks, "of packed documents, for which there is no kernel here"),
        _device(
            "kept activations",
            kept * graph,
            f"the last {kept} layers are not recomputed",
        ),
        work_term(
            compute,
            step.micro_batch_tokens,
            decoder * weight,
            weight,
            compiled=compiled,
            qk_norms=_has_qk_norms(model),
            mlp_chunk_tokens=mlp_chunk_tokens,
            kept=kept > 0,
            spare_bytes=max(0, kept - extras.in_lent_room) * graph,
        ),
    ]
    terms += passing
    terms.append(_device("allocator", sum(term.num_bytes for term in passing) // 80, "1.25 % of what comes and goes"))
    if cuda:
        terms.append(_device("CUDA context", CUDA_CONTEXT_BYTES, "context, cuBLAS workspaces, loaded kernels"))
    return tuple(term for term in terms if term.num_bytes)


CUDA_CONTEXT_BYTES = 1200 * MIB
"""With the allocator's share: an H200 had 2.32 GiB in use beyond torch's peak of 123.2 GiB (7B), and 2.26 GiB beyond
125.9 (3B), with expandable segments."""

NOT_IN_TORCH_PEAK = ("allocator", "CUDA context")
"""Terms that `torch.cuda.max_memory_allocated` does not know; the driver's own figure of memory in use does."""


def _has_qk_norms(model: ModelLayout) -> bool:
    # Decoder layers have the same tensors; a search asks thousands of times.
    return any("q_norm" in tensor.name for tensor in model.layers[1].tensors)


def _device(name: str, num_bytes: int, why: str) -> Term:
    return Term(Place.DEVICE, name, num_bytes, why)
