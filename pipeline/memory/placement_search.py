"""The search behind `placement`: the first mixture of homes, from the least to the most on NVMe, that fits. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import lru_cache
from operator import itemgetter

from pipeline.memory.boundary_plans import BoundaryPlan, boundary_plans, streaming_slots
from pipeline.memory.device_extras import Extras
from pipeline.memory.device_fit import (
    decoders,
    device_account,
    extras_of,
    room_for_gradients,
    spilled_boundaries,
)
from pipeline.memory.device_ways import DeviceWay, chunk_sizes, worth_trying
from pipeline.memory.drive_footprint import drive_terms
from pipeline.memory.footprint import Place, total
from pipeline.memory.freed_gradients import FreedGradients
from pipeline.memory.homes import Spill, homes, without_ram_gradients
from pipeline.memory.host_footprint import arena_terms, process_terms, stand_in_terms
from pipeline.memory.placement_request import MemoryBudget, Placement, PlacementRequest, Shortage
from pipeline.memory.spill_bytes import all_spill_bytes
from pipeline.schedule import SchedulePlan
from tiers.arena_map import ArenaMap, LayerHome, TierPlan
from tiers.layout import ElementType, ModelLayout


def solve(request: PlacementRequest, budget: MemoryBudget) -> Placement | Shortage:
    """The first placement that fits, in the order of `variants`; where none does, what the first lacks."""
    shortage: Shortage | None = None
    for variant in variants(request, budget):
        found = _solve(variant, budget)
        if isinstance(found, Placement):
            return found
        shortage = shortage or found
    return shortage or _device_shortage(request)


def variants(request: PlacementRequest, budget: MemoryBudget) -> Iterator[PlacementRequest]:
    """The request with each way to make activations fit that is worth trying, those that fit the device alone."""

    def spilled(way: DeviceWay) -> int | None:
        variant = _with_way(request, way)
        count = spilled_boundaries(variant, budget.gpu_bytes)
        return count if total(device_account(variant, count, 0)) <= budget.gpu_bytes else None

    for way in worth_trying(_boundary_plans(request), _chunk_sizes(request), spilled):
        yield _with_way(request, way)


def _device_shortage(request: PlacementRequest) -> Shortage:
    """The least that the device must hold with the first of the ways to hold boundary activations."""
    plan = next(_boundary_plans(request))
    tried = [_with_way(request, DeviceWay(plan, size)) for size in _chunk_sizes(request)]
    accounts = [device_account(each, spilled_boundaries(each, 0), 0) for each in tried]
    least = min(accounts, key=total)
    return Shortage(Place.DEVICE, total(least), least)


def _boundary_plans(request: PlacementRequest) -> Iterator[BoundaryPlan]:
    return boundary_plans(
        decoders(request.model), request.step.micro_batches, every=request.boundary_every, waves=request.waves
    )


def _chunk_sizes(request: PlacementRequest) -> tuple[int, ...]:
    return chunk_sizes(request.step.micro_batch_tokens, request.mlp_chunk_tokens)


def _with_way(request: PlacementRequest, way: DeviceWay) -> PlacementRequest:
    every, waves = way.boundaries
    slots = streaming_slots(every, request.decoder_slots)
    return replace(request, boundary_every=every, waves=waves, decoder_slots=slots, mlp_chunk_tokens=way.chunk_tokens)


def _solve(request: PlacementRequest, budget: MemoryBudget) -> Placement | Shortage:
    """The best mixture of homes that fits."""
    found = _first_fit(request, budget)
    if isinstance(found, Placement) and request.staging_slots > LEAN_SLOTS and found.used(Place.NVME):
        # Slots are as large as layers: of few layers on NVMe the third slot may put one there itself.
        lean = _first_fit(replace(request, staging_slots=LEAN_SLOTS), budget)
        if isinstance(lean, Placement) and lean.used(Place.NVME) < WORTH_A_SLOT * found.used(Place.NVME):
            return lean
    return found


LEAN_SLOTS = 2
"""One is read or written while the other is updated: most of what a third slot gains."""

WORTH_A_SLOT = 0.9
"""Share of bytes on NVMe, which all move twice a step, below which two slots make the shorter step."""


def _first_fit(request: PlacementRequest, budget: MemoryBudget) -> Placement | Shortage:
    """The first of the candidates, in order of preference, that fits."""
    spilled = spilled_boundaries(request, budget.gpu_bytes)
    device = device_account(request, spilled, 0)
    if total(device) > budget.gpu_bytes:
        return Shortage(Place.DEVICE, total(device), device)
    waves = request.waves or 1
    wave_tokens = request.step.largest_wave(waves).tokens
    pinned_bytes = spilled * wave_tokens * request.compute.hidden_size * request.weight_bytes
    # Sums wait for the next wave where held gradients wait for the norm.
    clip = request.clip or waves > 1
    most_held = room_for_gradients(request, spilled, budget.gpu_bytes) if request.clip and waves == 1 else 0

    def tier_of(spill: Spill, held: int) -> TierPlan:
        return _tier(request.model, spill, clip, held, request.outgoing_type, pinned_bytes, waves > 1)

    def ways() -> Iterator[tuple[Spill, int, int, int]]:
        """What is on NVMe, layers whose gradients wait on the device, bytes of the arena and of the drive."""
        all_in_ram = 0
        for held in range(most_held + 1):
            all_in_ram = _arena_in_ram(request.model, clip, held, request.outgoing_type, pinned_bytes, waves > 1)
            yield Spill(), held, all_in_ram, 0
        for each in all_spill_bytes(request.model, request.staging_slots) if budget.nvme_bytes > 0 else ():
            yield each.spill, most_held, all_in_ram - each.saved_bytes, each.nvme_bytes

    freed = FreedGradients(request, spilled, budget.gpu_bytes)

    def needed_ram(spill: Spill, held: int, arena_bytes: int) -> int:
        """Bytes of the arena once updates on the device have spared theirs; where they cannot be enough, the least."""
        if budget.ram_bytes < arena_bytes <= budget.ram_bytes + freed.most(held):
            return arena_bytes - freed.of(spill, held)
        return arena_bytes if arena_bytes <= budget.ram_bytes else arena_bytes - freed.most(held)

    least: tuple[int, Spill, int] | None = None
    least_drive: tuple[int, Spill, int] | None = None
    for spill, held, arena_bytes, nvme_bytes in ways():
        ram_bytes = needed_ram(spill, held, arena_bytes)
        if ram_bytes > budget.ram_bytes:
            least = min(least or (ram_bytes, spill, held), (ram_bytes, spill, held), key=itemgetter(0))
        elif nvme_bytes > budget.nvme_bytes:
            # Fewer staging slots leave more RAM to layers, so a later way may need less of the drive.
            tried = (nvme_bytes, spill, held)
            least_drive = min(least_drive or tried, tried, key=itemgetter(0))
        else:
            return _placement(request, budget, tier_of(spill, held), spilled, held)
    if least_drive is not None:
        needed, spill, held = least_drive
        return Shortage(Place.NVME, needed, drive_terms(tier_of(spill, held)))
    assert least is not None
    _, spill, held = least
    closest = _placement(request, budget, tier_of(spill, held), spilled, held)
    return Shortage(Place.RAM, closest.arena_bytes, arena_terms(closest.tier))


def _tier(
    model: ModelLayout,
    spill: Spill,
    clip: bool,
    held: int,
    gradient_type: ElementType,
    pinned_bytes: int,
    gradient_sums: bool,
) -> TierPlan:
    placed = homes(model, clip=clip, device_gradients=held, **asdict(spill))
    return TierPlan(model, placed, gradient_type, pinned_bytes, gradient_sums)


@lru_cache(maxsize=1024)
def _arena_in_ram(
    model: ModelLayout, clip: bool, held: int, gradient_type: ElementType, pinned_bytes: int, gradient_sums: bool
) -> int:
    """Bytes of the arena with nothing on NVMe. Searches for what would fit ask again and again."""
    return ArenaMap.of(_tier(model, Spill(), clip, held, gradient_type, pinned_bytes, gradient_sums)).total_bytes


def _placement(request: PlacementRequest, budget: MemoryBudget, tier: TierPlan, spilled: int, held: int) -> Placement:
    """A way that fits, and what the rest of the device is used for."""
    extras = extras_of(request, tier.homes, spilled, held, budget.gpu_bytes)
    if not tier.gradient_sums:
        tier = replace(tier, homes=without_ram_gradients(tier.homes, extras.device_updates))
    device = device_account(request, spilled, held, extras)
    host = (*arena_terms(tier), *process_terms(ArenaMap.of(tier).total_bytes, request.processes))
    if not request.processes.cuda:
        host += stand_in_terms(device)
    return Placement(
        tier,
        _schedule(request, tier.homes, extras),
        spilled,
        budget,
        (*host, *device, *drive_terms(tier)),
        request.step,
        request.mlp_chunk_tokens or 0,
    )


def _schedule(request: PlacementRequest, homes: tuple[LayerHome, ...], extras: Extras) -> SchedulePlan:
    return SchedulePlan(
        kinds=tuple(layer.kind for layer in request.model.layers),
        tied=request.model.tied,
        clip=request.clip,
        decoder_slots=request.decoder_slots + extras.extra_slots,
        weight_slots=tuple(home.weight_slot for home in homes),
        state_slots=tuple(home.state_slot for home in homes),
        gradient_slots=tuple(home.gradient_slot for home in homes),
        gradient_spans=tuple(home.gradient_span for home in homes),
        device_gradients=tuple(home.gradient_on_device for home in homes),
        device_updates=extras.device_updates,
        kept_layers=extras.kept_layers,
        own_slots=extras.own_slots,
        in_lent_room=extras.in_lent_room,
        boundary_every=request.boundary_every or 1,
        waves=request.waves or 1,
    )
