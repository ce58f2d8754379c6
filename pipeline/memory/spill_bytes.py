"""Bytes of every way to put something on NVMe, by arithmetic: laying out the arena for each would take seconds.

A search asks for them thousands of times, with other budgets each time. `ArenaMap` and `drive_bytes` are the
truth; a test holds this to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from pipeline.memory.drive_footprint import GROUP_BYTES, STORE_BYTES, layer_bytes
from pipeline.memory.homes import Spill, spills, staging
from tiers.layout import PAGE_BYTES, Buffer, ModelLayout, buffer_types, round_up, state_buffers


class SpillBytes(NamedTuple):
    """One way."""

    spill: Spill
    saved_bytes: int
    """Of RAM, against a model whose weights and state are all there; below zero where the slots take more."""
    nvme_bytes: int


@lru_cache(maxsize=8)
def all_spill_bytes(model: ModelLayout, staging_slots: int) -> tuple[SpillBytes, ...]:
    """Bytes of all `spills`, in their order."""
    counting = _Counting(model)
    return tuple(counting.of(spill) for spill in spills(model, staging_slots=staging_slots))


class _Counting:
    """Bytes of each layer of a model, rounded as the arena and the files are."""

    def __init__(self, model: ModelLayout) -> None:
        types = buffer_types(model.precision)
        self._model = model
        state = [types[buffer] for buffer in state_buffers(model.precision)]
        self._weight = [round_up(layer.numel * types[Buffer.WEIGHT].bytes, PAGE_BYTES) for layer in model.layers]
        self._state = [sum(round_up(layer.numel * kind.bytes, PAGE_BYTES) for kind in state) for layer in model.layers]
        self._weight_file = [layer_bytes(layer.numel, [types[Buffer.WEIGHT]]) for layer in model.layers]
        # No layer has weights there without its state.
        self._state_file = [layer_bytes(layer.numel, state) + GROUP_BYTES for layer in model.layers]

    def of(self, spill: Spill) -> SpillBytes:
        state_slots = staging(self._model, spill.state, spill.staging_slots)
        weight_slots = staging(self._model, spill.weights, spill.staging_slots)
        left = sum(self._weight[layer] for layer in spill.weights) + sum(self._state[layer] for layer in spill.state)
        slots = _slots(spill.weights, weight_slots, self._weight) + _slots(spill.state, state_slots, self._state)
        # An update finds the master's high half of a layer whose weights are on NVMe in a slot of its own.
        slots += _slots(spill.weights, state_slots, self._weight)
        files = sum(self._weight_file[layer] for layer in spill.weights)
        files += sum(self._state_file[layer] for layer in spill.state)
        return SpillBytes(spill, left - slots, files + STORE_BYTES)


def _slots(layers: Iterable[int], slots: Mapping[int, int], num_bytes: list[int]) -> int:
    """Slots as large as their largest layer."""
    largest: dict[int, int] = {}
    for layer in layers:
        largest[slots[layer]] = max(largest.get(slots[layer], 0), num_bytes[layer])
    return sum(largest.values())
