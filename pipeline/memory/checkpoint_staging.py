"""How much host memory a run may take for copies of what a checkpoint has not written yet. Pure.

A checkpoint must have read all of the state, or copied it, before the next step updates it. Of a state of S bytes at
home in RAM, on a drive that writes W bytes in the length of a step, B bytes of staging memory leave the next step to
wait until S - W - B bytes more are written.
"""

from __future__ import annotations

from dataclasses import replace

from pipeline.memory.host_footprint import staging_terms
from pipeline.memory.placement_request import Placement
from tiers.arena_map import TierPlan
from tiers.layout import buffer_types, stored_buffers
from tiers.staging import BLOCK_BYTES

LARGEST_SHARE = 0.5
"""Of the state in RAM, at most, unless a recipe asks for more: no wait where the drive writes half of the state within
a step, and never near a second copy."""


def with_checkpoint_staging(placement: Placement, asked_bytes: int | None) -> Placement:
    """Add staging memory to a placement.

    Args:
        placement: Of everything else, within its budget.
        asked_bytes: What a recipe asks for, left out of the budget already; None for what the budget has left, up to
            LARGEST_SHARE of the state.
    """
    if asked_bytes is None:
        most = int(LARGEST_SHARE * state_bytes_in_ram(placement.tier))
        asked_bytes = min(most, max(0, placement.budget.ram_bytes - placement.arena_bytes))
    num_bytes = asked_bytes // BLOCK_BYTES * BLOCK_BYTES
    return replace(placement, staging_bytes=num_bytes, terms=(*placement.terms, *staging_terms(num_bytes)))


def state_bytes_in_ram(tier: TierPlan) -> int:
    """Of the state that is captured: that of layers on NVMe is copied from file to file."""
    types = buffer_types(tier.model.precision)
    element = sum(types[buffer].bytes for buffer in stored_buffers(tier.model.precision))
    homes = zip(tier.model.layers, tier.homes, strict=True)
    return sum(layer.numel * element for layer, home in homes if home.state_slot is None)
