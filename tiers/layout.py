"""Names, shapes and places of every byte of model state: pure data and arithmetic, no I/O.

A *layer* (the embedding and the head are layers too) is one flat run of elements per buffer; all buffers of a layer
share the element offsets. An *extent* is where one buffer of one layer lies in the arena.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

PAGE_BYTES = 4096
"""O_DIRECT needs addresses, lengths and file offsets in multiples of the block size; 4096 covers every drive seen."""

ELEMENTS_ALIGNMENT = 2048
"""A layer's element count is padded to this, so that its smallest buffer (2 bytes an element) fills whole pages."""

TENSOR_ALIGNMENT = 64
"""Elements; 128 bytes in bf16: the widest vector access of a GPU or a CPU starts aligned in every tensor."""


class Precision(StrEnum):
    """How weights are streamed and computed, and what the master is."""

    BF16 = "bf16"
    """bf16 weights that are the high half of an fp32 master split in two: 12 bytes a parameter."""
    FP32 = "fp32"
    """fp32 weights that are their own master: 12 bytes a parameter at rest, 4-byte gradients: the exact mode."""


class ElementType(StrEnum):
    """Type of a buffer's elements as mathematics sees them; `storage` is what NumPy and zarr see."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    INT16 = "int16"

    @property
    def storage(self) -> str:
        """NumPy dtype name of the stored bits (zarr 3.1 knows no bfloat16)."""
        return "uint16" if self is ElementType.BFLOAT16 else str(self)

    @property
    def bytes(self) -> int:
        """Bytes an element."""
        return 4 if self is ElementType.FLOAT32 else 2


class Buffer(StrEnum):
    """The flat buffers of a layer."""

    WEIGHT = "weight"
    """What the device streams; in bf16 the high half of the master."""
    WEIGHT_LOW = "weight_low"
    """The low half of the master, signed; absent in fp32."""
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    GRADIENT = "gradient"
    """Never stored: lives from `offload` to `update`."""


def buffer_types(precision: Precision, gradient: ElementType | None = None) -> dict[Buffer, ElementType]:
    """Element type of each buffer that exists under `precision`, in arena order."""
    if precision is Precision.FP32:
        return {
            Buffer.WEIGHT: ElementType.FLOAT32,
            Buffer.GRADIENT: gradient or ElementType.FLOAT32,
            Buffer.EXP_AVG: ElementType.FLOAT32,
            Buffer.EXP_AVG_SQ: ElementType.FLOAT32,
        }
    return {
        Buffer.WEIGHT: ElementType.BFLOAT16,
        Buffer.GRADIENT: gradient or ElementType.BFLOAT16,
        Buffer.WEIGHT_LOW: ElementType.INT16,
        Buffer.EXP_AVG: ElementType.FLOAT32,
        Buffer.EXP_AVG_SQ: ElementType.FLOAT32,
    }


def stored_buffers(precision: Precision) -> tuple[Buffer, ...]:
    """Buffers that a store or a checkpoint holds: all but the gradient."""
    return tuple(buffer for buffer in buffer_types(precision) if buffer is not Buffer.GRADIENT)


def state_buffers(precision: Precision) -> tuple[Buffer, ...]:
    """Buffers that only the optimizer touches."""
    return tuple(buffer for buffer in stored_buffers(precision) if buffer is not Buffer.WEIGHT)


class InitKind(StrEnum):
    """How a tensor without a source starts."""

    NORMAL = "normal"
    ONES = "ones"
    ZEROS = "zeros"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a layer."""

    name: str
    """Full Hugging Face name, e.g. `model.layers.3.self_attn.q_proj.weight`."""
    shape: tuple[int, ...]
    offset: int
    """First element in the layer's flat buffers."""
    decay: bool
    """Whether weight decay applies: matrices yes, norms and biases no."""
    init: InitKind
    std: float = 0.0
    """Standard deviation for `InitKind.NORMAL`."""

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)


class LayerKind(StrEnum):
    """What a layer does in a step."""

    EMBEDDING = "embedding"
    DECODER = "decoder"
    HEAD = "head"
    """Final norm and LM head; the final norm alone where the head is tied to the embedding."""


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Place of every tensor in a layer's flat buffers."""

    index: int
    name: str
    """Stable name, also the zarr group: `embedding`, `layer-0003`, `head`."""
    kind: LayerKind
    tensors: tuple[TensorSpec, ...]
    numel: int
    """Elements of each flat buffer: all tensors and their padding, a multiple of ELEMENTS_ALIGNMENT."""

    @property
    def num_parameters(self) -> int:
        """Elements that belong to tensors, padding left out."""
        return sum(tensor.numel for tensor in self.tensors)


def place_tensors(tensors: list[TensorSpec]) -> tuple[tuple[TensorSpec, ...], int]:
    """Give tensors consecutive aligned offsets; return them and the padded element count of the layer."""
    placed: list[TensorSpec] = []
    offset = 0
    for tensor in tensors:
        placed.append(TensorSpec(tensor.name, tensor.shape, offset, tensor.decay, tensor.init, tensor.std))
        offset += round_up(tensor.numel, TENSOR_ALIGNMENT)
    return tuple(placed), round_up(max(offset, 1), ELEMENTS_ALIGNMENT)


@dataclass(frozen=True)
class ModelLayout:
    """All layers of a model, in forward order: embedding, decoder layers, head."""

    layers: tuple[LayerLayout, ...]
    precision: Precision
    tied: bool
    """Whether the LM head is the embedding matrix; then the head layer holds the final norm alone."""

    @cached_property
    def num_parameters(self) -> int:
        """Parameters of the model, tied ones counted once."""
        return sum(layer.num_parameters for layer in self.layers)


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


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
