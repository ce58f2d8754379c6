"""Homes of layers: which slots the layers on NVMe share, which gradients share one, and in what order layers spill.

Pure policy for `placement`; tests of the tier use `homes` to force any mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tiers.layout import LayerHome, LayerKind, LayerLayout, ModelLayout

MOST_MIXED = 8
"""Layers at most whose weights spill before all state has: beyond that many another layer's state takes less."""

GRADIENT_RING = 3
"""RAM gradient slots that layers use in turn, without clipping and for gradients that wait for the norm on the device:
one arrives, one waits, one is read by the update."""

SHARED_SLOT_RATIO = 1.25
"""A vocabulary layer shares the decoder layers' staging slots where it is at most this much larger than they are."""


def candidates(
    model: ModelLayout, *, clip: bool, staging_slots: int, nvme: bool, device_gradients: int = 0
) -> list[tuple[LayerHome, ...]]:
    """Homes of all layers in order of preference: as little as possible on NVMe, then as few gradients on the device.

    Args:
        model: The layout.
        clip: Whether every gradient is held until the norm is known.
        staging_slots: The most RAM slots that the layers on NVMe share; fewer are tried too.
        nvme: Whether there is a drive.
        device_gradients: Layers whose held gradients the device has room for.
    """
    layers = model.layers
    found = [
        homes(model, clip=clip, state=[], weights=[], staging_slots=staging_slots, device_gradients=held)
        for held in range(device_gradients + 1)
    ]
    if not nvme:
        return found
    decoders = [layer.index for layer in layers if layer.kind is LayerKind.DECODER]
    vocabulary = [layer.index for layer in layers if _spills(layer, model)]
    for slots in range(staging_slots, 0, -1):
        choices = [_spread(decoders, count) for count in range(slots + 1, len(decoders) + 1)]
        choices.append(sorted(decoders + vocabulary))
        spilled: list[tuple[list[int], list[int]]] = [(state, []) for state in choices]
        spilled += [(choices[-1], weights) for weights in choices]
        if slots == 1:
            # A drive too small for one more layer's state may still take the weights of a few.
            spilled += [
                (state, _spread(state, weights))
                for state in reversed(choices)
                for weights in range(1, min(MOST_MIXED, len(state)) + 1)
            ]
        found += [
            homes(
                model,
                clip=clip,
                state=state,
                weights=weights,
                staging_slots=slots,
                device_gradients=device_gradients,
            )
            for state, weights in spilled
        ]
    return found


def homes(
    model: ModelLayout,
    *,
    clip: bool,
    state: Sequence[int],
    weights: Sequence[int],
    staging_slots: int,
    device_gradients: int = 0,
) -> tuple[LayerHome, ...]:
    """Homes of all layers, with the state and the weights of the given ones on NVMe.

    Args:
        model: The layout.
        clip: Whether every gradient is held until the norm is known.
        state: Indices of layers whose optimizer state is on NVMe, ascending.
        weights: Likewise for weights; each must be among `state`.
        staging_slots: RAM slots that the decoder layers on NVMe share, for weights and for state each.
        device_gradients: Layers, the last ones, whose gradients wait for the norm on the device: their updates come
            last, so the first updates find their gradients in RAM. Only with clipping.
    """
    assert clip or not device_gradients, "without clipping no gradient waits"
    state_slot = _staging(model, state, staging_slots)
    weight_slot = _staging(model, weights, staging_slots)
    gradient = _gradient_slots(model, clip, device_gradients)
    first_held = len(model.layers) - device_gradients
    return tuple(
        LayerHome(
            weight_slot.get(layer.index),
            state_slot.get(layer.index),
            gradient[layer.index],
            gradient_on_device=layer.index >= first_held,
        )
        for layer in model.layers
    )


def without_ram_gradients(
    model: ModelLayout, homes: Sequence[LayerHome], layers: Sequence[int]
) -> tuple[LayerHome, ...]:
    """Homes in which the gradients of `layers`, which never leave the device, take no room of their own in RAM.

    Every layer has a gradient slot; theirs is that of the largest of the other layers, which alone uses it.
    """
    others = [layer for layer in model.layers if layer.index not in layers]
    slot = homes[max(others, key=lambda layer: layer.numel).index].gradient_slot
    return tuple(
        replace(home, gradient_slot=slot, gradient_on_device=True) if index in layers else home
        for index, home in enumerate(homes)
    )


def _spills(layer: LayerLayout, model: ModelLayout) -> bool:
    """Whether a layer is a vocabulary matrix: the final norm alone (tied) is too small to bother."""
    return layer.kind is LayerKind.EMBEDDING or (layer.kind is LayerKind.HEAD and not model.tied)


def _spread(indices: list[int], count: int) -> list[int]:
    """`count` of `indices`, evenly spread."""
    return [indices[(2 * rank + 1) * len(indices) // (2 * count)] for rank in range(count)]


def _staging(model: ModelLayout, spilled: Sequence[int], slots: int) -> dict[int, int]:
    """Slot of each layer on NVMe: consecutive ones differ, and no small layer pays for a slot of vocabulary size."""
    decoders = [index for index in spilled if model.layers[index].kind is LayerKind.DECODER]
    largest = max((model.layers[index].numel for index in decoders), default=0)
    ring = [index for index in spilled if model.layers[index].numel <= SHARED_SLOT_RATIO * largest]
    assigned = {index: rank % slots for rank, index in enumerate(ring)}
    return assigned | {index: slots for index in spilled if index not in assigned}


def _gradient_slots(model: ModelLayout, clip: bool, device_gradients: int) -> tuple[int, ...]:
    if clip:
        held_in_ram = len(model.layers) - device_gradients
        # Of the ring's slots one is as large as the vocabulary; two suffice where each update follows on its offload.
        ring = _staging(model, range(held_in_ram, len(model.layers)), GRADIENT_RING - 1)
        return (*range(held_in_ram), *(held_in_ram + ring[layer] for layer in sorted(ring)))
    decoders = 0
    slots: list[int] = []
    for layer in model.layers:
        if layer.kind is LayerKind.DECODER:
            slots.append(decoders % GRADIENT_RING)
            decoders += 1
        else:
            slots.append(GRADIENT_RING + (layer.kind is LayerKind.HEAD))
    return tuple(slots)
