"""The least of one kind of memory with which a placement is found, everything else as it is. Pure."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from pipeline.memory.footprint import MIB, Place
from pipeline.memory.placement_request import MemoryBudget, Placement, PlacementRequest
from pipeline.memory.placement_search import solve
from pipeline.memory.room import UNKNOWN_BYTES


@lru_cache(maxsize=64)
def least_of(request: PlacementRequest, budget: MemoryBudget, place: Place) -> Placement | None:
    """The placement that takes least of `place`, to a 256th; None where no amount of it makes the model fit.

    Args:
        request: What does not fit.
        budget: What it may use; of `place`, what is known to be too little.
        place: Of which there may be more.
    """
    fit = solve(request, _with(budget, place, UNKNOWN_BYTES))
    if not isinstance(fit, Placement):
        return None
    low, high = _of(budget, place), amount(fit, place)
    while high - low > max(MIB // 16, high >> 8):
        found = solve(request, _with(budget, place, (low + high) // 2))
        if isinstance(found, Placement):
            fit, high = found, amount(found, place)
        else:
            low = (low + high) // 2
    # With room to spare the device is used for what nothing needs.
    exact = solve(request, _with(budget, place, high))
    return exact if isinstance(exact, Placement) else fit


def amount(placement: Placement, place: Place) -> int:
    """Bytes of `place` that count against a budget: of host memory the model state, not the processes."""
    return placement.arena_bytes if place is Place.RAM else placement.used(place)


def _of(budget: MemoryBudget, place: Place) -> int:
    return {Place.RAM: budget.ram_bytes, Place.DEVICE: budget.gpu_bytes, Place.NVME: budget.nvme_bytes}[place]


def _with(budget: MemoryBudget, place: Place, num_bytes: int) -> MemoryBudget:
    match place:
        case Place.RAM:
            return replace(budget, ram_bytes=num_bytes)
        case Place.DEVICE:
            return replace(budget, gpu_bytes=num_bytes)
        case Place.NVME:
            return replace(budget, nvme_bytes=num_bytes)
