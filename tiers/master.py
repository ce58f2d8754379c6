"""The fp32 master weight, split so that its upper half is the bf16 weight that the device streams.

With bits the fp32 pattern as an int32: high = (bits + 0x8000) >> 16 and low = bits - (high << 16), in wrap-around
arithmetic; bits = (high << 16) + low gives every pattern back, NaN payloads included. `high` is the bf16 nearest to the
master (ties away from zero). NaN patterns from 0x7FFF8000 on carry into the sign: the master is exact, its bf16 half
reads as minus zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tiers.arena import Arena
from tiers.arena_map import ArenaMap
from tiers.layout import Buffer, LayerLayout, Precision

Float32Array = npt.NDArray[np.float32]
HighArray = npt.NDArray[np.uint16]
LowArray = npt.NDArray[np.int16]


def split_master(values: Float32Array, high_out: HighArray, low_out: LowArray) -> None:
    """Split fp32 `values` into halves of the same shape."""
    bits = values.view(np.int32)
    high = bits + np.int32(0x8000)
    high >>= 16
    high_out.view(np.int16)[...] = high
    high <<= 16
    np.subtract(bits, high, out=high)
    low_out[...] = high


def join_master(high: HighArray, low: LowArray) -> Float32Array:
    """Return the fp32 values, a new array, whose halves these are."""
    bits = high.view(np.int16).astype(np.int32)
    bits <<= 16
    bits += low
    return bits.view(np.float32)


def bfloat16_to_float32(bits: HighArray) -> Float32Array:
    """Return the fp32 values, a new array, of bf16 bits."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


@dataclass(frozen=True, slots=True)
class LayerState:
    """Views of one layer's master and moments in the arena, all of `numel` elements. Valid while the arena is."""

    layer: LayerLayout
    weight: npt.NDArray[Any]
    """uint16 bf16 bits, or the fp32 master itself where `weight_low` is None."""
    weight_low: LowArray | None
    moments: tuple[Float32Array, Float32Array]

    @classmethod
    def of(cls, arena: Arena, arena_map: ArenaMap, layer: LayerLayout) -> LayerState:
        """Return the views of where `layer` is updated: its own place, or its state slot where it lives on NVMe."""
        extents = arena_map.states[layer.index]
        split = arena_map.plan.model.precision is Precision.BF16
        return cls(
            layer,
            arena.view(extents[Buffer.WEIGHT]),
            arena.view(extents[Buffer.WEIGHT_LOW]) if split else None,
            (arena.view(extents[Buffer.EXP_AVG]), arena.view(extents[Buffer.EXP_AVG_SQ])),
        )

    def write_float32(self, offset: int, values: Float32Array) -> None:
        """Make `values` the master of the elements from `offset` on."""
        stop = offset + values.size
        if self.weight_low is None:
            self.weight[offset:stop] = values
        else:
            split_master(values, self.weight[offset:stop], self.weight_low[offset:stop])

    def write_bfloat16(self, offset: int, bits: HighArray) -> None:
        """Make bf16 values, given as their bits, the master of the elements from `offset` on."""
        stop = offset + bits.size
        if self.weight_low is None:
            self.weight[offset:stop] = bfloat16_to_float32(bits)
        else:
            self.weight[offset:stop] = bits
            self.weight_low[offset:stop] = 0

    def clear_padding(self) -> None:
        """Zero the master between and behind the tensors, where a slot may hold what another layer left."""
        starts = [tensor.offset for tensor in self.layer.tensors] + [self.layer.numel]
        ends = [0] + [tensor.offset + tensor.numel for tensor in self.layer.tensors]
        for start, stop in zip(ends, starts, strict=True):
            self.weight[start:stop] = 0
            if self.weight_low is not None:
                self.weight_low[start:stop] = 0

    def clear_moments(self) -> None:
        """Zero both moments, padding included."""
        for moment in self.moments:
            moment.fill(0)
