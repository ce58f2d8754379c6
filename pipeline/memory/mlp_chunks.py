"""Whether recomputed layers run their feed-forward network in chunks of tokens, and how large ones. Pure policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

CHUNK_TOKENS = (16384, 8192, 4096, 2048)
"""Sizes to choose from. Each chunk adds to the fp32 sums of all the network's weights: of 7B and 32,768 tokens, chunks
of 2,048 lengthen the way back through a layer by a tenth, those of 8,192 by a fiftieth (`device_costs`, on an H200)."""

WORTH_OF_SMALLEST = 2 / 3
"""Share of the boundary activations that the smallest chunk keeps on the device with which a larger one does."""


class DeviceFit(NamedTuple):
    """How a choice fits the device; less is better."""

    short_bytes: int
    """What is missing even where all boundary activations wait in RAM."""
    spilled_boundaries: int


def choose_chunk_tokens(micro_batch_tokens: int, fit: Callable[[int], DeviceFit]) -> int:
    """The largest chunk that does most of what chunks can do for the device, or 0 for whole micro-batches.

    Chunks are for layers that would otherwise not fit, or push boundary activations out. Where all fits, a layer that
    holds less at work would only make room for layers that are not recomputed, and those pass no chunks.

    Args:
        micro_batch_tokens: Tokens that pass a layer at a time.
        fit: By chunk size.
    """
    whole = fit(0)
    sizes = [size for size in CHUNK_TOKENS if size < micro_batch_tokens]
    if whole == (0, 0) or not sizes:
        return 0
    fits = {size: fit(size) for size in sizes}
    least = min(fits.values())
    if least >= whole:
        return 0
    if whole.short_bytes:
        return next(size for size in sizes if fits[size].short_bytes == least.short_bytes)
    wanted = WORTH_OF_SMALLEST * (whole.spilled_boundaries - least.spilled_boundaries)
    return next(size for size in sizes if whole.spilled_boundaries - fits[size].spilled_boundaries >= wanted)
