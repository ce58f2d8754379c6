"""Homes of layers: which slots the layers on NVMe share, which gradients share one, and in what order layers spill.

Pure policy for `placement`; tests of the tier use `homes` to force any mixture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tiers.arena_map import LayerHome
from tiers.layout import LayerKind, LayerLayout, ModelLayout

MOST_MIXED = 8
"""Layers at most whose weights spill before all state has: beyond that many another layer's state takes less."""

GRADIENT_RING = 2
"""RAM gradient slots that layers use in turn, without clipping and for gradients that wait for the norm on the device:
one arrives while another is read by the update, and what else is finished waits on the device."""

SHARED_SLOT_RATIO = 1.25
"""A vocabulary layer shares the decoder layers' staging slots where it is at most this much larger than they are."""


@dataclass(frozen=True, slots=True)
class Spill:
    """What of a model lives on NVMe."""

    state: tuple[int, ...] = ()
    """Layers whose optimizer state does, ascending."""
    weights: tuple[int, ...] = ()
    """Layers whose weights do too."""
    staging_slots: int = 1
    """RAM slots that they share, for weights and for state each."""


def spills(model: ModelLayout, *, staging_slots: int) -> Iterator[Spill]:
    """Ways to put something on NVMe, in order of preference: as little as possible first.

    Args:
        model: The layout.
        staging_slots: The most RAM slots that the layers on NVMe share; fewer are tried too.
    """
    layers = model.layers
    decoders = tuple(layer.index for layer in layers if layer.kind is LayerKind.DECODER)
    vocabulary = tuple(layer.index for layer in layers if _spills(layer, model))
    for slots in range(staging_slots, 0, -1):
        choices = [_spread(decoders, count) for count in range(slots + 1, len(decoders) + 1)]
        choices.append(tuple(sorted(decoders + vocabulary)))
        for state in choices:
            yield Spill(state, (), slots)
        for weights in choices:
            yield Spill(choices[-1], weights, slots)
        if slots == 1:
            # A drive too small for one more layer's state may still take the weights of a few.
            for state in reversed(choices):
                for count in range(1, min(MOST_MIXED, len(state)) + 1):
                    yield Spill(state, _spread(state, count), slots)


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
    state_slot = staging(model, state, staging_slots)
    weight_slot = staging(model, weights, staging_slots)
    slots, spans = _gradient_slots(model, clip, device_gradients)
    first_held = len(model.layers) - device_gradients
    return tuple(
        LayerHome(
            weight_slot.get(layer.index),
            state_slot.get(layer.index),
            slots[layer.index],
            spans[layer.index],
            gradient_on_device=layer.index >= first_held,
        )
        for layer in model.layers
    )


def without_ram_gradients(homes: Sequence[LayerHome], layers: Sequence[int]) -> tuple[LayerHome, ...]:
    """Homes in which the gradients of `layers`, which never leave the device, take no room in RAM."""
    return tuple(
        replace(home, gradient_span=0, gradient_on_device=True) if index in layers else home
        for index, home in enumerate(homes)
    )


def _spills(layer: LayerLayout, model: ModelLayout) -> bool:
    """Whether a layer is a vocabulary matrix: the final norm alone (tied) is too small to bother."""
    return layer.kind is LayerKind.EMBEDDING or (layer.kind is LayerKind.HEAD and not model.tied)


def _spread(indices: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` of `indices`, evenly spread."""
    return tuple(indices[(2 * rank + 1) * len(indices) // (2 * count)] for rank in range(count))


def staging(model: ModelLayout, spilled: Sequence[int], slots: int) -> dict[int, int]:
    """Slot of each layer on NVMe: consecutive ones differ, and no small layer pays for a slot of vocabulary size."""
    decoders = [index for index in spilled if model.layers[index].kind is LayerKind.DECODER]
    largest = max((model.layers[index].numel for index in decoders), default=0)
    ring = [index for index in spilled if model.layers[index].numel <= SHARED_SLOT_RATIO * largest]
    assigned = {index: rank % slots for rank, index in enumerate(ring)}
    return assigned | {index: slots for index in spilled if index not in assigned}


def _gradient_slots(model: ModelLayout, clip: bool, device_gradients: int) -> tuple[list[int], list[int]]:
    """First slot of each layer's gradient, and how many it takes.

    Gradients that wait in RAM have slots of their own. The others take turns in a ring, which each update soon frees;
    one larger than a decoder layer's takes all of it, so that it costs no slot as large as the vocabulary.
    """
    held_in_ram = len(model.layers) - device_gradients if clip else 0
    ring = model.layers[held_in_ram:]
    decoder = max((layer.numel for layer in ring if layer.kind is LayerKind.DECODER), default=0)
    slots, spans, turn = list(range(held_in_ram)), [1] * held_in_ram, 0
    for layer in ring:
        spans.append(GRADIENT_RING if 0 < decoder < layer.numel else 1)
        slots.append(held_in_ram + (turn if spans[-1] == 1 else 0))
        turn = (turn + 1) % GRADIENT_RING if spans[-1] == 1 else turn
    return slots, spans
