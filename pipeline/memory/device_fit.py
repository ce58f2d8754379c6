"""What of a request the device has room for: pure, for the search behind `placement`."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from pipeline.memory.device_extras import NO_EXTRAS, Extras, choose_extras
from pipeline.memory.device_footprint import device_terms
from pipeline.memory.footprint import Term, total
from pipeline.memory.placement_request import PlacementRequest
from pipeline.step.layer_groups import LayerGroups
from tiers.arena_map import LayerHome
from tiers.layout import LayerKind, ModelLayout


def spilled_boundaries(request: PlacementRequest, gpu_bytes: int) -> int:
    """How many kept inputs of decoder layers spill to pinned RAM: the fewest that fit, all where none do."""
    count = LayerGroups(decoders(request.model), request.boundary_every or 1).count
    # Bytes never grow with the number that spills.
    return bisect_left(range(count), True, key=lambda spilled: total(device_account(request, spilled, 0)) <= gpu_bytes)


def decoders(model: ModelLayout) -> int:
    """Decoder layers of a model."""
    return sum(layer.kind is LayerKind.DECODER for layer in model.layers)


def room_for_gradients(request: PlacementRequest, spilled: int, gpu_bytes: int) -> int:
    """How many layers' gradients can wait for the norm on the device."""
    counts = range(len(request.model.layers) + 1)
    # Bytes grow with the count, save that the outgoing buffers go with the last: bisect finds the last that fits.
    return bisect_right(counts, gpu_bytes, key=lambda held: total(device_account(request, spilled, held))) - 1


def extras_of(
    request: PlacementRequest, homes: tuple[LayerHome, ...], spilled: int, held_gradients: int, gpu_bytes: int
) -> Extras:
    """What the rest of the device is used for; nothing where activations spill for want of room."""
    if spilled:
        return NO_EXTRAS
    return choose_extras(
        homes,
        lambda extras: total(device_account(request, spilled, held_gradients, extras)) <= gpu_bytes,
        decoder_slots=request.decoder_slots,
        updates=request.device_updates and request.clip and request.processes.cuda,
        kept_layers=request.kept_layers,
    )


def device_account(
    request: PlacementRequest, spilled: int, held_gradients: int, extras: Extras = NO_EXTRAS
) -> tuple[Term, ...]:
    """Device memory of a request whose boundary activations have been decided on."""
    return device_terms(
        request.model,
        request.compute,
        request.step,
        request.outgoing_type.bytes,
        decoder_slots=request.decoder_slots,
        spilled_boundaries=spilled,
        boundary_every=request.boundary_every or 1,
        waves=request.waves or 1,
        held_gradients=held_gradients,
        extras=extras,
        compiled=request.processes.compiled,
        cuda=request.processes.cuda,
        mlp_chunk_tokens=request.mlp_chunk_tokens or 0,
    )
