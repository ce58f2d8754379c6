"""Where every byte of model state lies: homes of layers, and offsets in the arena. Pure data and arithmetic, no I/O.

An *extent* is where one buffer of one layer lies in the arena.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiers.layout import (
    PAGE_BYTES,
    Buffer,
    ElementType,
    LayerLayout,
    ModelLayout,
    buffer_types,
    round_up,
    state_buffers,
)


@dataclass(frozen=True, slots=True)
class LayerHome:
    """Where a layer's bytes live between uses. A slot number means NVMe, staged in that RAM slot; None means RAM."""

    weight_slot: int | None = None
    state_slot: int | None = None
    """A layer whose weights are on NVMe has its state there too: an update needs both."""
    gradient_slot: int = 0
    gradient_on_device: bool = False
    """Whether the gradient waits for the global norm in device memory; its RAM slot then is one of a few in turn."""

    def __post_init__(self) -> None:
        assert self.weight_slot is None or self.state_slot is not None


@dataclass(frozen=True)
class TierPlan:
    """The placement as the tier needs it: fixed before the run, equal in every process."""

    model: ModelLayout
    homes: tuple[LayerHome, ...]
    """One a layer."""
    gradient_type: ElementType
    activation_bytes: int = 0
    """Pinned room for spilled boundary activations."""
    gradient_sums: bool = False
    """Whether fp32 sums of gradients wait in the gradient slots, which every layer then has for itself, as wide as
    fp32: of a step in waves."""


class Extent(NamedTuple):
    """A run of elements in the arena, page-aligned."""

    offset_bytes: int
    numel: int
    element: ElementType

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.element.bytes


@dataclass(frozen=True)
class ArenaMap:
    """Byte offsets of every buffer in the arena, computed alike in every process from the plan.

    The regions that the device reads or writes come first: `registered_bytes` is their length.
    """

    plan: TierPlan
    total_bytes: int
    registered_bytes: int
    weights: tuple[Extent, ...]
    """By layer: what `stage` reads; layers that share a slot share the offset."""
    gradients: tuple[Extent, ...]
    states: tuple[dict[Buffer, Extent], ...]
    """By layer: what `update` reads and writes: WEIGHT and every state buffer."""
    activations: Extent | None
    gradient_sums: Mapping[int, Extent]
    """By layer: where its fp32 sum waits, in the place of its gradient; without the embedding, and empty without
    sums."""

    @classmethod
    def of(cls, plan: TierPlan) -> ArenaMap:
        """Lay out the arena for `plan`."""
        types = buffer_types(plan.model.precision, plan.gradient_type)
        layers, homes = plan.model.layers, plan.homes
        assert len(layers) == len(homes)
        cursor = _Cursor()
        weights = _region(cursor, layers, [home.weight_slot for home in homes], types[Buffer.WEIGHT])
        gradient_slots = [home.gradient_slot for home in homes]
        sums: dict[int, Extent] = {}
        if plan.gradient_sums:
            assert len(set(gradient_slots)) == len(layers), "sums need a gradient slot for every layer"
            # The embedding's backward comes once a step.
            embedding = _region(cursor, layers[:1], gradient_slots[:1], types[Buffer.GRADIENT])
            wide = _region(cursor, layers[1:], gradient_slots[1:], ElementType.FLOAT32)
            sums = {layer.index: extent for layer, extent in zip(layers[1:], wide, strict=True)}
            gradients = (*embedding, *(extent._replace(element=types[Buffer.GRADIENT]) for extent in wide))
        else:
            gradients = _region(cursor, layers, gradient_slots, types[Buffer.GRADIENT])
        activations = None
        if plan.activation_bytes:
            numel = round_up(plan.activation_bytes, PAGE_BYTES) // ElementType.BFLOAT16.bytes
            activations = Extent(cursor.take(numel * ElementType.BFLOAT16.bytes), numel, ElementType.BFLOAT16)
        registered_bytes = cursor.offset
        slots = [home.state_slot for home in homes]
        by_buffer = {
            buffer: _region(cursor, layers, slots, types[buffer]) for buffer in state_buffers(plan.model.precision)
        }
        spilled = [layer for layer, home in zip(layers, homes, strict=True) if home.weight_slot is not None]
        # The master's high half of a layer whose weights are on NVMe is updated in a slot of its own: the slot that
        # streams it to the device may already hold another layer.
        masters = _region(cursor, spilled, [homes[layer.index].state_slot for layer in spilled], types[Buffer.WEIGHT])
        master_of = {layer.index: extent for layer, extent in zip(spilled, masters, strict=True)}
        states = tuple(
            {Buffer.WEIGHT: master_of.get(layer.index, weights[layer.index])}
            | {buffer: extents[layer.index] for buffer, extents in by_buffer.items()}
            for layer in layers
        )
        return cls(plan, cursor.offset, registered_bytes, weights, gradients, states, activations, sums)

    def extents(self) -> Iterator[Extent]:
        """Every extent, those that share a slot included more than once."""
        yield from self.weights
        yield from self.gradients
        for state in self.states:
            yield from state.values()


class _Cursor:
    """Hands out page-aligned ranges one after another."""

    def __init__(self) -> None:
        self.offset = 0

    def take(self, num_bytes: int) -> int:
        start = self.offset
        self.offset += round_up(num_bytes, PAGE_BYTES)
        return start


def _region(
    cursor: _Cursor, layers: Sequence[LayerLayout], slots: Sequence[int | None], element: ElementType
) -> tuple[Extent, ...]:
    """Give each layer without a slot a place of its own, and each slot one place as large as its largest layer."""
    slot_numel: dict[int, int] = {}
    for layer, slot in zip(layers, slots, strict=True):
        if slot is not None:
            slot_numel[slot] = max(slot_numel.get(slot, 0), layer.numel)
    starts = {slot: cursor.take(numel * element.bytes) for slot, numel in sorted(slot_numel.items())}
    return tuple(
        Extent(cursor.take(layer.numel * element.bytes) if slot is None else starts[slot], layer.numel, element)
        for layer, slot in zip(layers, slots, strict=True)
    )
