"""Chooses among placements that fit the one with the least predicted step, by simulating each one's schedule. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from pipeline.memory.footprint import Place
from pipeline.memory.placement_request import MemoryBudget, Placement, PlacementRequest, Shortage
from pipeline.memory.placement_search import solve, variants
from pipeline.prediction.costs import CostModel
from pipeline.prediction.hardware import Hardware
from pipeline.prediction.simulate import least_step_s, simulate

MOST_TOKENS_AT_ONCE = 65_536
"""Larger micro-batches are not tried: the device's rate no longer grows, the layer at work does."""

WORTH_A_LARGER_ONE = 0.99
"""Predicted step, as a share of a smaller micro-batch's, from which a larger one is chosen: less is no prediction."""


def micro_batches_of(sequences: int, sequence_length: int) -> tuple[int, ...]:
    """Micro-batches to choose from, ascending: divisors of a step's sequences, each at least twice the one before."""
    chosen = [1]
    for size in range(2, sequences + 1):
        if sequences % size == 0 and size >= 2 * chosen[-1] and size * sequence_length <= MOST_TOKENS_AT_ONCE:
            chosen.append(size)
    return tuple(chosen)


def choose(
    request: PlacementRequest, budget: MemoryBudget, hardware: Hardware, micro_batches: Iterable[int] = ()
) -> Placement | Shortage:
    """The fastest placement that fits.

    Args:
        request: What is to be placed.
        budget: What it may use.
        hardware: By whose rates steps are predicted.
        micro_batches: To choose from, ascending; none means that of the request.

    Returns:
        The placement; or, where none fits, what the first micro-batch lacks.
    """
    sizes = tuple(micro_batches) or (request.step.micro_batch,)
    requests = [replace(request, step=replace(request.step, micro_batch=size)) for size in sizes]
    found = [solve(each, budget) for each in requests]
    fitting = [(each, fit) for each, fit in zip(requests, found, strict=True) if isinstance(fit, Placement)]
    if not fitting:
        return found[0]
    request, best, best_s = _with_best_chunks(*fitting[0], budget, hardware)
    for larger, placement in fitting[1:]:
        larger, placement, step_s = _with_best_chunks(larger, placement, budget, hardware, best_s)
        if step_s < WORTH_A_LARGER_ONE * best_s:
            request, best, best_s = larger, placement, step_s
    request, best, best_s = _with_best_way(request, budget, hardware, best, best_s)
    return _with_best_extras(request, budget, hardware, best, best_s)


def _with_best_chunks(
    request: PlacementRequest, first: Placement, budget: MemoryBudget, hardware: Hardware, below_s: float = math.inf
) -> tuple[PlacementRequest, Placement, float]:
    """`first`, or the fastest with its boundaries held alike and networks in other chunks; its request is the open one.

    Micro-batches are compared so: with one size of chunks for all, or none, a larger one would lose to what it need
    not do.
    """
    alike = replace(request, boundary_every=first.schedule.boundary_every, waves=first.schedule.waves)
    first_s = _step_s(request, first, hardware, below_s)
    _, best, best_s = _with_best_way(alike, budget, hardware, first, first_s, below_s)
    return request, best, best_s


def _with_best_way(
    request: PlacementRequest,
    budget: MemoryBudget,
    hardware: Hardware,
    best: Placement,
    best_s: float,
    below_s: float = math.inf,
) -> tuple[PlacementRequest, Placement, float]:
    """`best`, or the fastest of the other ways to make activations fit, where the device cannot hold all as they are.

    Args:
        request: That leaves the way open.
        budget: What it may use.
        hardware: By whose rates steps are predicted.
        best: One that fits.
        best_s: Its step; infinity where that is no shorter than `below_s`.
        below_s: What a step must be shorter than to matter.
    """
    if best.holds_every_input and not best.mlp_chunk_tokens:
        return request, best, best_s
    for variant in variants(request, budget):
        placement = solve(variant, budget)
        if isinstance(placement, Placement):
            step_s = _step_s(variant, placement, hardware, min(best_s, below_s))
            # Of ways that are equally fast the one that wears the drive least.
            wears_less = placement.used(Place.NVME) < best.used(Place.NVME)
            if step_s < (1.0 if wears_less else WORTH_A_LARGER_ONE) * best_s * (1 + 1e-9):
                request, best, best_s = variant, placement, step_s
    return request, best, best_s


def _with_best_extras(
    request: PlacementRequest, budget: MemoryBudget, hardware: Hardware, best: Placement, best_s: float
) -> Placement:
    """`best`, or the same with more layers kept in place of updates on the device, where that is faster."""
    if not best.schedule.device_updates:
        return best
    without = solve(replace(request, device_updates=False), budget)
    if isinstance(without, Placement) and _step_s(request, without, hardware, best_s) < best_s:
        return without
    return best


def _step_s(request: PlacementRequest, placement: Placement, hardware: Hardware, below_s: float = math.inf) -> float:
    """Length of the step, or infinity where it cannot be below `below_s`."""
    costs = CostModel(placement, request.compute, placement.step, hardware)
    # A margin for what the sums round.
    return math.inf if least_step_s(costs) > below_s * (1 + 1e-6) else simulate(costs).step_s
