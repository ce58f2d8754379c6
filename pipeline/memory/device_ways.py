"""Ways to make a step's activations fit the device: how boundaries are held, and networks in chunks of tokens. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from pipeline.memory.boundary_plans import BoundaryPlan

CHUNK_TOKENS = (16384, 8192, 4096, 2048)
"""Tokens that may pass a recomputed layer's feed-forward network at a time. Each chunk adds to the fp32 sums of all the
network's weights: of 7B and 32,768 tokens, chunks of 2,048 lengthen the way back through a layer by a tenth, those of
8,192 by a fiftieth (`device_costs`, on an H200)."""


class DeviceWay(NamedTuple):
    """One way."""

    boundaries: BoundaryPlan
    chunk_tokens: int
    """0 for whole micro-batches."""


def chunk_sizes(micro_batch_tokens: int, fixed: int | None) -> tuple[int, ...]:
    """Chunks to try, those that cost most time last; 0 stands for whole micro-batches.

    Args:
        micro_batch_tokens: Tokens that pass a layer at a time.
        fixed: What is asked for, or None to try several.
    """
    return (0, *(size for size in CHUNK_TOKENS if size < micro_batch_tokens)) if fixed is None else (fixed,)


def worth_trying(
    plans: Iterable[BoundaryPlan], sizes: Sequence[int], spilled: Callable[[DeviceWay], int | None]
) -> Iterator[DeviceWay]:
    """Leave out ways that do more than another one that needs no spilling, and chunks that let no more inputs stay.

    Where all fits whole, nothing is chunked: a layer that holds less at work would only make room for layers that are
    not recomputed, and those pass no chunks.

    Args:
        plans: As `boundary_plans` has them.
        sizes: As `chunk_sizes` has them.
        spilled: Inputs that a way spills, fewest; None where the device has no room even so.
    """
    enough: list[tuple[BoundaryPlan, int]] = []
    for plan in plans:
        fewest: int | None = None
        for fineness, chunk_tokens in enumerate(sizes):
            if any(
                plan.every >= less.every and plan.waves >= less.waves and fineness >= coarser
                for less, coarser in enough
            ):
                break
            way = DeviceWay(plan, chunk_tokens)
            count = spilled(way)
            if count is None or (fewest is not None and count >= fewest):
                continue
            fewest = count
            yield way
            if count == 0:
                enough.append((plan, fineness))
