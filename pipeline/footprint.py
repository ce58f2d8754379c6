"""Every byte a run will hold, term by term, before anything is allocated.

`placement` fits these terms into a budget and `tasks.plan` prints them. A term is never below what was measured:
where a figure depends on the allocator it is rounded against us, and says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from tiers.layout import (
    ArenaMap,
    Buffer,
    Extent,
    LayerKind,
    LayerLayout,
    ModelLayout,
    TierPlan,
    buffer_types,
    state_buffers,
)

MIB = 2**20
GIB = 2**30

HEAD_CHUNK_TOKENS = 4096
"""Tokens whose logits exist at a time."""


class Place(StrEnum):
    """Where bytes are held."""

    RAM = "ram"
    DEVICE = "device"
    NVME = "nvme"


@dataclass(frozen=True, slots=True)
class Term:
    """One line of the account."""

    place: Place
    name: str
    num_bytes: int
    why: str
    """How the figure comes about."""


@dataclass(frozen=True, slots=True)
class ComputeShape:
    """What a token passes through: sizes of the activations, which no parameter count tells."""

    hidden_size: int
    intermediate_size: int
    """Width of one feed-forward network (one expert of a mixture)."""
    query_size: int
    """Attention heads x head size."""
    kv_size: int
    """Key-value heads x head size."""
    head_size: int
    vocab_size: int
    num_experts: int = 1
    experts_per_token: int = 1
    attention_window: int | None = None
    """Positions a token attends to at most, averaged over the layers; None means the whole sequence."""

    @classmethod
    def of_config(cls, config: Mapping[str, object]) -> ComputeShape:
        """Read the sizes out of a Hugging Face `config.json`.

        Raises:
            ValueError: A size is missing or no integer.
        """
        heads = _integer(config, "num_attention_heads")
        hidden = _integer(config, "hidden_size")
        head_dim = _integer(config, "head_dim", hidden // heads)
        experts = _integer(config, "num_local_experts", _integer(config, "num_experts", 1))
        intermediate = _integer(config, "intermediate_size", 4 * hidden)
        return cls(
            hidden_size=hidden,
            intermediate_size=_integer(config, "moe_intermediate_size", intermediate) if experts > 1 else intermediate,
            query_size=heads * head_dim,
            kv_size=_integer(config, "num_key_value_heads", heads) * head_dim,
            head_size=head_dim,
            vocab_size=_integer(config, "vocab_size"),
            num_experts=experts,
            experts_per_token=_integer(config, "num_experts_per_tok", 1) if experts > 1 else 1,
        )

    def active_parameters(self, layer: LayerLayout) -> int:
        """Parameters of `layer` that multiply one token: experts count only where the token is routed to them."""
        active = 0
        for tensor in layer.tensors:
            share = self.experts_per_token / self.num_experts if ".experts." in tensor.name else 1.0
            active += round(tensor.numel * share)
        return active


def _integer(config: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"model config: `{key}` must be a positive integer, got {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class StepShape:
    """How many tokens a step holds and how they pass the device."""

    sequence_length: int
    sequences: int
    """Of a whole step."""
    micro_batch: int
    """Sequences that pass a layer at a time."""

    @property
    def tokens(self) -> int:
        """Positions of a step, padding included."""
        return self.sequence_length * self.sequences

    @property
    def micro_batch_tokens(self) -> int:
        """Positions that pass a layer at a time."""
        return self.sequence_length * min(self.micro_batch, self.sequences)


@dataclass(frozen=True, slots=True)
class ProcessShape:
    """The processes of a run, which hold memory of their own beside the arena."""

    optimizer_actors: int = 4
    cuda: bool = True
    compiled: bool = True
    """Templates are compiled: Inductor's worker processes live beside Compute."""


def arena_terms(tier: TierPlan) -> tuple[Term, ...]:
    """Account of the arena by region; adds up to its exact size."""
    arena = ArenaMap.of(tier)
    homes = tier.homes
    own = [home.weight_slot is None for home in homes]
    state_own = [home.state_slot is None for home in homes]
    terms = [
        _ram("weights", _distinct(arena.weights, own), "what the device streams, of layers at home in RAM"),
        _ram("weight staging slots", _distinct(arena.weights, [not x for x in own]), "NVMe -> RAM -> device, pinned"),
        _ram("gradients", _distinct(arena.gradients), _gradient_reason(tier)),
    ]
    for buffer in state_buffers(tier.model.precision):
        extents = [state[buffer] for state in arena.states]
        terms.append(_ram(_BUFFER_NAMES[buffer], _distinct(extents, state_own), "optimizer state at home in RAM"))
    slots = sum(
        _distinct([state[buffer] for state in arena.states], [not x for x in state_own])
        for buffer in state_buffers(tier.model.precision)
    )
    masters = [state[Buffer.WEIGHT] for state in arena.states]
    slots += _distinct(masters, [not x for x in own])
    activations = arena.activations.num_bytes if arena.activations else 0
    terms += [
        _ram("state staging slots", slots, "NVMe -> RAM -> update -> NVMe"),
        _ram("pinned activations", activations, "boundary activations beyond the device budget"),
    ]
    terms.append(
        _ram("page rounding", arena.total_bytes - sum(term.num_bytes for term in terms), "buffers start pages")
    )
    return tuple(term for term in terms if term.num_bytes)


def process_terms(arena_bytes: int, processes: ProcessShape) -> tuple[Term, ...]:
    """Account of what the processes hold beside the arena."""
    actors = processes.optimizer_actors
    terms = [
        _ram(
            "page tables", arena_bytes * PAGE_TABLE_MAPPINGS // 512, "8 bytes a 4 KiB page and process that touches it"
        ),
        _ram("Ray services", RAY_SERVICES_BYTES, "GCS, raylet, dashboard and its agents, object store in use"),
        _ram("driver", DRIVER_BYTES, "coordinator, data loader, tokenizer"),
        _ram("tier actors", TIER_ACTORS_BYTES, "ParameterTier and Prefetcher"),
        _ram("optimizer actors", actors * OPTIMIZER_ACTOR_BYTES, f"{actors} processes with Numba"),
        _ram(
            "compute actor",
            COMPUTE_CUDA_BYTES if processes.cuda else COMPUTE_CPU_BYTES,
            "PyTorch and its CUDA libraries",
        ),
    ]
    if processes.compiled and processes.cuda:
        terms.append(_ram("compiler", COMPILER_BYTES, "Inductor's worker processes"))
    return tuple(terms)


PAGE_TABLE_MAPPINGS = 4
"""ParameterTier, Prefetcher and Compute touch all of the arena, the optimizers together all of it once."""

RUNNING_BEFORE_ALLOCATION = ("Ray services", "driver")
"""Terms whose memory is held already when a run checks what is free."""

# Proportional set sizes, so that shared libraries count once: Ray 2.60 with its dashboard, torch 2.13, measured on a
# 2-core machine without a GPU after every import (Ray 630 MiB, driver 337, tier actors 136, an optimizer 104, Compute
# 320), with room for what they allocate at work. What CUDA adds to Compute is an estimate.
RAY_SERVICES_BYTES = 800 * MIB
DRIVER_BYTES = 600 * MIB
TIER_ACTORS_BYTES = 320 * MIB
OPTIMIZER_ACTOR_BYTES = 220 * MIB
COMPUTE_CPU_BYTES = 600 * MIB
COMPUTE_CUDA_BYTES = 3600 * MIB
COMPILER_BYTES = 2000 * MIB

_BUFFER_NAMES = {
    Buffer.WEIGHT_LOW: "master low half",
    Buffer.EXP_AVG: "first moment",
    Buffer.EXP_AVG_SQ: "second moment",
}


def _ram(name: str, num_bytes: int, why: str) -> Term:
    return Term(Place.RAM, name, num_bytes, why)


def _distinct(extents: Iterable[Extent], chosen: Iterable[bool] | None = None) -> int:
    """Bytes of the chosen extents, those that share a slot counted once, at the largest."""
    sizes: dict[int, int] = {}
    extents = list(extents)
    for extent, counts in zip(extents, chosen or [True] * len(extents), strict=True):
        if counts:
            sizes[extent.offset_bytes] = max(sizes.get(extent.offset_bytes, 0), extent.num_bytes)
    return sum(sizes.values())


def _gradient_reason(tier: TierPlan) -> str:
    slots = len({home.gradient_slot for home in tier.homes})
    if slots == len(tier.homes):
        return "all held until the global norm is known, pinned"
    return f"{slots} slots, each free again after its update, pinned"


def device_terms(
    model: ModelLayout,
    compute: ComputeShape,
    step: StepShape,
    gradient_bytes: int,
    *,
    decoder_slots: int,
    outgoing_buffers: int = 2,
    spilled_boundaries: int = 0,
    compiled: bool = True,
) -> tuple[Term, ...]:
    """Account of device memory at its peak.

    Args:
        model: The layout.
        compute: Sizes of activations.
        step: Tokens of a step and of a micro-batch.
        gradient_bytes: Bytes an element of the outgoing gradient.
        decoder_slots: Weight slots the decoder layers share.
        outgoing_buffers: Buffers of gradients on their way to the host.
        spilled_boundaries: Decoder layers whose inputs wait in pinned RAM.
        compiled: Whether templates and the head are compiled: elementwise work is fused and keeps less.
    """
    weight = buffer_types(model.precision)[Buffer.WEIGHT].bytes
    decoders = [layer.numel for layer in model.layers if layer.kind is LayerKind.DECODER]
    decoder, embedding, head = max(decoders), model.layers[0].numel, model.layers[-1].numel
    vocabulary = embedding + head if model.tied else max(embedding, head)
    summed = embedding + max(decoder, head) if model.tied else max(decoder, embedding, head)
    outgoing = [0] * outgoing_buffers
    for layer in model.layers:
        index = (len(model.layers) - 1 - layer.index) % outgoing_buffers
        outgoing[index] = max(outgoing[index], layer.numel)
    boundary = step.tokens * compute.hidden_size * weight
    # Those in RAM are on the device twice at a time: while one is read the next is on its way.
    held = len(decoders) + 1 - spilled_boundaries + min(2, spilled_boundaries)
    terms = [
        _device("weight slots", decoder_slots * decoder * weight, f"{decoder_slots} of the largest decoder layer"),
        _device("vocabulary slot", vocabulary * weight, "embedding and head" if model.tied else "embedding or head"),
        _device("gradient accumulators", summed * 4, "fp32 sums over micro-batches"),
        _device("outgoing gradients", sum(outgoing) * gradient_bytes, "one fills while one leaves"),
    ]
    # The ids and rotary tables of two steps: the next one's are made while this one computes.
    batch = 2 * step.tokens * (2 * compute.head_size * weight + 3 * 8)
    passing = [
        _device("boundary activations", held * boundary, f"{held} x {step.tokens:,} tokens, then their gradients"),
        _device("batch", batch, "token ids, targets, rotary tables of two steps"),
        _work_term(compute, step.micro_batch_tokens, decoder, weight, compiled),
    ]
    terms += passing
    terms.append(_device("allocator", sum(term.num_bytes for term in passing) // 25, "4 % of what comes and goes"))
    terms.append(_device("CUDA context", CUDA_CONTEXT_BYTES, "context, cuBLAS workspaces, loaded kernels"))
    return tuple(terms)


def _work_term(compute: ComputeShape, tokens: int, decoder: int, weight: int, compiled: bool) -> Term:
    """The larger of what the head and what a decoder layer holds while it works.

    A decoder layer's own gradients leave autograd in the weights' type before they are summed in fp32. A prototype on
    an H200 held 4.8 GiB for both 3B and 7B, compiled, 16,384 tokens at a time: 7.3 bytes a logit, at most 0.8 of what
    the layers hold uncompiled.
    """
    chunk = min(HEAD_CHUNK_TOKENS, tokens)
    logit_bytes = (8 if compiled else 12) * weight // 2
    head = chunk * compute.vocab_size * logit_bytes + 4 * tokens * compute.hidden_size * weight
    activations = tokens * layer_activation_bytes(compute, weight)
    layer = (activations * 4 // 5 if compiled else activations) + decoder * weight
    if head > layer:
        return _device("head chunk", head, f"logits and their gradient, {chunk:,} tokens at a time")
    return _device("layer at work", layer, f"recompute and backward of {tokens:,} tokens")


CUDA_CONTEXT_BYTES = 1200 * MIB


def layer_activation_bytes(compute: ComputeShape, element_bytes: int) -> int:
    """Bytes a token of what a decoder layer keeps between its recomputed forward and its backward, and their gradients.

    Counted on the Hugging Face layers as they are: two RMS norms with fp32 copies, q k v before and after rotation, the
    attention output, gate, up, their activation and product, and the gradient of the widest of them.
    """
    norms = 2 * compute.hidden_size * (2 * 4 + 2 * element_bytes)
    attention = (4 * compute.query_size + 6 * compute.kv_size + 3 * compute.hidden_size) * element_bytes
    routed = compute.experts_per_token
    feed_forward = routed * (6 * compute.intermediate_size + 2 * compute.hidden_size) * element_bytes
    return norms + attention + feed_forward


def _device(name: str, num_bytes: int, why: str) -> Term:
    return Term(Place.DEVICE, name, num_bytes, why)


def total(terms: Iterable[Term]) -> int:
    """Bytes of all terms."""
    return sum(term.num_bytes for term in terms)
