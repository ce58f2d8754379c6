"""Whether recomputed layers run their feed-forward network in chunks of tokens, and how large ones. Pure policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

CHUNK_TOKENS = (16384, 8192, 4096, 2048)
"""Sizes to choose from: the matrix products of the smallest still run at nearly full speed."""


class DeviceFit(NamedTuple):
    """How a choice fits the device; less is better."""

    short_bytes: int
    """What is missing even where all boundary activations wait in RAM."""
    spilled_boundaries: int


def choose_chunk_tokens(micro_batch_tokens: int, fit: Callable[[int], DeviceFit]) -> int:
    """The largest chunk with which the device lacks as little as it can, or 0 for whole micro-batches.

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
    best = fit(sizes[-1])
    return next(size for size in sizes if fit(size) == best) if best < whole else 0
