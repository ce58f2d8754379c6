"""Terms of the drive: the working files of layers on NVMe, with what a filesystem takes for each. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.memory.footprint import Place, Term
from tiers.arena_map import TierPlan
from tiers.layout import Buffer, ElementType, buffer_types, round_up, state_buffers
from tiers.scratch import nvme_buffers
from tiers.shards import ShardGeometry

BLOCK_BYTES = 4096
"""What a file or folder takes at least and in multiples of, on ext4 and XFS as they are made."""

STORE_BYTES = 4 * BLOCK_BYTES
"""Of a store: folder and metadata, the lock beside it, and the page that tests the drive."""


def layer_bytes(numel: int, elements: Iterable[ElementType]) -> int:
    """Disk space of buffers of a layer of `numel` elements: each a shard, metadata and two folders around it."""
    files = (ShardGeometry.of(numel, element).file_bytes for element in elements)
    return sum(round_up(num_bytes, BLOCK_BYTES) + 3 * BLOCK_BYTES for num_bytes in files)


GROUP_BYTES = 2 * BLOCK_BYTES
"""Of each layer that has anything there: folder and metadata."""


def drive_bytes(tier: TierPlan) -> int:
    """Disk space of all that a run keeps on the drive."""
    types = buffer_types(tier.model.precision)
    layers = [(layer.numel, buffers) for layer in tier.model.layers if (buffers := nvme_buffers(tier, layer.index))]
    shards = sum(layer_bytes(numel, (types[buffer] for buffer in buffers)) for numel, buffers in layers)
    return shards + len(layers) * GROUP_BYTES + STORE_BYTES if layers else 0


def drive_terms(tier: TierPlan) -> tuple[Term, ...]:
    """Account of the working files."""
    types = buffer_types(tier.model.precision)
    state_bytes = sum(types[buffer].bytes for buffer in state_buffers(tier.model.precision))
    pairs = list(zip(tier.model.layers, tier.homes, strict=True))
    weights = sum(layer.numel for layer, home in pairs if home.weight_slot is not None) * types[Buffer.WEIGHT].bytes
    states = sum(layer.numel for layer, home in pairs if home.state_slot is not None) * state_bytes
    terms = (
        Term(Place.NVME, "weights", weights, "read twice for the device, once for the update, written once a step"),
        Term(Place.NVME, "optimizer state", states, "read and written once a step"),
        Term(Place.NVME, "indexes", drive_bytes(tier) - weights - states, "checksums, metadata, folders, alignment"),
    )
    return tuple(term for term in terms if term.num_bytes)
