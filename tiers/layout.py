"""Names, types and shapes of all model state: pure data and arithmetic, no I/O.

A *layer* (the embedding and the head are layers too) is one flat run of elements per buffer; all buffers of a layer
share the element offsets. Where they lie in the arena says `arena_map`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

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


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
