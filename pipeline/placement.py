"""Decides, before the run, in which tier every layer's weights, optimizer state and gradients live.

Pure policy. RAM first; then the state of as few decoder layers as possible moves to NVMe, spread evenly so that the
drive works all the time; then their weights, which cross twice a step. Nothing here allocates.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.memory.footprint import TIER_NAMES, Place
from pipeline.memory.placement_request import MemoryBudget, Placement, PlacementRequest
from pipeline.memory.placement_search import solve
from pipeline.memory.remedies import refusal
from pipeline.memory.room import Room
from pipeline.prediction.hardware import Hardware
from pipeline.prediction.placement_choice import choose
from tiers.quantities import shown_bytes

__all__ = [
    "MemoryBudget",
    "Placement",
    "PlacementError",
    "PlacementRequest",
    "Room",
    "boundaries_in_words",
    "place",
    "preflight",
    "summary",
]


class PlacementError(ValueError):
    """The model does not fit the memory it may use. The message tells needed, available and what makes it fit."""


def place(
    request: PlacementRequest,
    budget: MemoryBudget,
    hardware: Hardware | None = None,
    micro_batches: Iterable[int] = (),
    room: Room | None = None,
) -> Placement:
    """Place the model within `budget`.

    Args:
        request: What is to be placed.
        budget: What it may use.
        hardware: By whose rates the fastest of several placements is chosen; None takes the first that fits.
        micro_batches: As `choose` has it; only with `hardware`.
        room: Where the budget comes from, so that a refusal tells what can be done; None knows of no machine.

    Raises:
        PlacementError: It does not fit; the message names needed and available bytes of each tier and what to change.
    """
    found = solve(request, budget) if hardware is None else choose(request, budget, hardware, micro_batches)
    if isinstance(found, Placement):
        return found
    raise PlacementError(refusal(request, room or Room.within(budget), found))


def summary(placement: Placement) -> str:
    """Where a run's bytes live, in one line for its log."""
    homes, schedule = placement.tier.homes, placement.schedule
    updated = schedule.device_updates
    held = sum(home.gradient_on_device for layer, home in enumerate(homes) if layer not in updated)
    sequences = placement.step.micro_batch
    which = "{} kept, the others recomputed" if schedule.groups.recomputed else "all {} kept"
    counts = {
        "state of {} on NVMe": sum(home.state_slot is not None for home in homes),
        "weights of {} on NVMe": sum(home.weight_slot is not None for home in homes),
        "gradients of {} held on the device": held,
        "{} updated on the device": len(updated),
        f"activations of {which}": schedule.kept_layers,
    }
    passing = [f"{sequences} sequence{'' if sequences == 1 else 's'} at a time"]
    if placement.mlp_chunk_tokens:
        passing.append(f"feed-forward networks in chunks of {placement.mlp_chunk_tokens:,} tokens")
    used = ", ".join(
        f"{TIER_NAMES[where]} {shown_bytes(placement.used(where))}" for where in Place if placement.used(where)
    )
    chosen = [text.format(f"{count} layer{'' if count == 1 else 's'}") for text, count in counts.items() if count]
    boundaries = [] if placement.holds_every_input else [f"boundary activations: {boundaries_in_words(placement)}"]
    return "; ".join([used, *chosen, *passing, *boundaries])


def boundaries_in_words(placement: Placement) -> str:
    """How a run holds the inputs of layers from forward to backward, e.g. `every 2nd layer, 4 waves`."""
    schedule, spilled = placement.schedule, placement.spilled_boundaries
    every, waves = schedule.boundary_every, schedule.waves
    layers = "every layer" if every == 1 else f"every {every}{ {2: 'nd', 3: 'rd'}.get(every, 'th') } layer"
    where = f", {spilled} of {schedule.groups.count} in pinned RAM" if spilled else ""
    return f"{layers}, {'1 wave' if waves == 1 else f'{waves} waves'}{where}"


def preflight(
    placement: Placement, *, host_available_bytes: int, gpu_free_bytes: int, nvme_free_bytes: int = 0
) -> None:
    """Hold a placement against what the machine has at this moment, before anything is allocated.

    Args:
        placement: What the run is about to allocate.
        host_available_bytes: min(MemAvailable, cgroup headroom): `tiers.host_memory.available_host_bytes()`. What Ray
            and the driver may hold already is asked for all the same: one may not have started yet.
        gpu_free_bytes: Free device memory; the budget's on a machine without a GPU.
        nvme_free_bytes: Free bytes of the NVMe directory's file system.

    Raises:
        PlacementError: A tier has less than the placement needs.
    """
    needed = {where: placement.used(where) for where in Place}
    free = {Place.RAM: host_available_bytes, Place.DEVICE: gpu_free_bytes, Place.NVME: nvme_free_bytes}
    short = [
        f"{TIER_NAMES[where]}: needs {shown_bytes(needed[where])}, free now {shown_bytes(free[where])} (free some, or "
        f"lower {_KNOBS[where]} so that less is placed there)"
        for where in Place
        if needed[where] > free[where]
    ]
    if short:
        raise PlacementError("this machine has less free memory than the run needs: " + "; ".join(short))


_KNOBS = {Place.RAM: "memory.ram_gib", Place.DEVICE: "memory.gpu_gib", Place.NVME: "memory.nvme_gib"}
