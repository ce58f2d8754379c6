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
    gradient_span: int = 1
    """Gradient slots, from that one on, that its gradient takes: a large one those of several smaller ones; 0 where it
    never leaves the device."""
    gradient_on_device: bool = False
    """Whether the gradient waits for the global norm in device memory; its RAM slot then is one of a few in turn."""

    @property
    def ram_gradient(self) -> range:
        """RAM slots of its gradient."""
        return range(self.gradient_slot, self.gradient_slot + self.gradient_span)

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
            spans = [home.gradient_span for home in homes]
            gradients = _region(cursor, layers, gradient_slots, types[Buffer.GRADIENT], spans)
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


def slot_bytes(
    layers: Sequence[LayerLayout], slots: Sequence[int | None], element: ElementType, spans: Sequence[int] = ()
) -> dict[int, int]:
    """Bytes of each slot, in order: as large as its largest layer; the last of several that a layer takes makes up for
    what they lack together.

    Args:
        layers: That use the slots.
        slots: The first slot of each layer; None where it has a place of its own.
        element: Of the buffers.
        spans: How many slots each layer takes; empty where each takes one.
    """
    found: dict[int, int] = {}
    used = [
        (slot, span, round_up(layer.numel * element.bytes, PAGE_BYTES))
        for layer, slot, span in zip(layers, slots, spans or [1] * len(layers), strict=True)
        if slot is not None
    ]
    for slot, _, num_bytes in (each for each in used if each[1] == 1):
        found[slot] = max(found.get(slot, 0), num_bytes)
    for slot, span, num_bytes in (each for each in used if each[1] > 1):
        others = sum(found.setdefault(taken, 0) for taken in range(slot, slot + span - 1))
        found[slot + span - 1] = max(found.get(slot + span - 1, 0), num_bytes - others)
    return dict(sorted(found.items()))


def _region(
    cursor: _Cursor,
    layers: Sequence[LayerLayout],
    slots: Sequence[int | None],
    element: ElementType,
    spans: Sequence[int] = (),
) -> tuple[Extent, ...]:
    """Give each layer without a slot a place of its own, and each slot one: side by side, in their order."""
    starts = {slot: cursor.take(num_bytes) for slot, num_bytes in slot_bytes(layers, slots, element, spans).items()}
    extents = []
    for layer, slot, span in zip(layers, slots, spans or [1] * len(layers), strict=True):
        numel = layer.numel if span else 0
        start = cursor.take(numel * element.bytes) if slot is None else starts.get(slot, 0)
        extents.append(Extent(start, numel, element))
    return tuple(extents)
