"""Ways to hold a step's boundary activations: all of them, every K-th layer's, or those of a part of the step. Pure.

Whatever a way leaves to be held and the device has no room for spills to pinned RAM. `placement_search` takes the first
that fits, `placement_choice` the one of the shortest step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

EVERY = (1, 2, 3, 5, 8)
"""One kept input for so many recomputed layers. What is held shrinks as 1/K + K/layers and least at their root; a step
grows by K - 1 forward passes of K layers in eight."""

WAVES = (1, 2, 4, 8)
"""Weights cross the link anew in each, and all gradients' fp32 sums twice between two."""


class BoundaryPlan(NamedTuple):
    """One way."""

    every: int = 1
    """Recomputed decoder layers of which one keeps its input."""
    waves: int = 1
    """Parts of the step that pass all layers one after another."""


def boundary_plans(
    decoders: int, micro_batches: int, *, every: int | None = None, waves: int | None = None
) -> Iterator[BoundaryPlan]:
    """All ways to try, in order of preference where no rates are known.

    Spilling takes nothing but RAM and a link that is idle for most of a step, so one wave with all inputs kept comes
    first; then a recompute that lengthens a step by an eighth or less; then waves, which need more RAM for sums than a
    spill of as many tokens as a layer is wide.

    Args:
        decoders: Decoder layers.
        micro_batches: Of a step.
        every: Fixed, or None to try several.
        waves: Likewise.
    """
    for parts in WAVES if waves is None else (waves,):
        if waves is None and parts > micro_batches:
            break
        for one_in in EVERY if every is None else (every,):
            if every is None and one_in > 1 and 2 * one_in > decoders:
                break
            yield BoundaryPlan(one_in, parts)


def streaming_slots(every: int, slots: int) -> int:
    """Decoder slots with which the weights of one group can come while another is at work.

    The first layers of two neighbouring groups must not share a slot: one is read last of its group, the other first.
    """
    while slots > 1 and every > 1 and every % slots == 0:
        slots += 1
    return slots
