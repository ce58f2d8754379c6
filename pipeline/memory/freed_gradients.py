"""What updates on the device spare of the arena: their gradients never leave it. Pure arithmetic, for the search."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import lru_cache

from pipeline.memory.device_extras import EXTRA_SLOTS
from pipeline.memory.device_fit import decoders, extras_of
from pipeline.memory.homes import Spill, homes, without_ram_gradients
from pipeline.memory.placement_request import PlacementRequest
from tiers.arena_map import slot_bytes
from tiers.layout import ElementType, ModelLayout


class FreedGradients:
    """Bytes that the arena of a way is smaller by than with every layer's update on the host."""

    def __init__(self, request: PlacementRequest, spilled: int, gpu_bytes: int) -> None:
        """Prepare for the ways of a request.

        Args:
            request: With its way to make activations fit chosen.
            spilled: Kept inputs that spill.
            gpu_bytes: The device's budget.
        """
        # Layers are kept in what the updates leave.
        self._request, self._spilled, self._gpu_bytes = replace(request, kept_layers=0), spilled, gpu_bytes
        updates = request.device_updates and request.processes.cuda and request.clip
        # Where activations spill the device has no room; of waves every layer's sum waits in RAM.
        possible = updates and not spilled and (request.waves or 1) == 1
        last = min(request.decoder_slots + EXTRA_SLOTS, decoders(request.model)) if possible else -1
        self._candidates = tuple(range(last + 1))
        self._most: dict[int, int] = {}
        self._freed: dict[tuple[int, tuple[int, ...]], int] = {}

    def most(self, held: int) -> int:
        """No way spares more with the gradients of `held` layers on the device: cheap to ask."""
        if held not in self._most:
            self._most[held] = self._bytes(held, self._candidates)
        return self._most[held]

    def of(self, spill: Spill, held: int) -> int:
        """What one way spares, with the updates on the device that it has room for."""
        # Only state at home in RAM is lent to the device.
        key = held, tuple(layer for layer in self._candidates if layer not in spill.state)
        if key not in self._freed:
            placed = homes(self._request.model, clip=True, device_gradients=held, **asdict(spill))
            extras = extras_of(self._request, placed, self._spilled, held, self._gpu_bytes)
            self._freed[key] = self._bytes(held, extras.device_updates)
        return self._freed[key]

    def _bytes(self, held: int, layers: tuple[int, ...]) -> int:
        return _freed_bytes(self._request.model, self._request.outgoing_type, held, layers) if layers else 0


@lru_cache(maxsize=1024)
def _freed_bytes(model: ModelLayout, gradient_type: ElementType, held: int, layers: tuple[int, ...]) -> int:
    """Difference of the arena's gradient slots; that on NVMe there is something changes none of them."""
    every = homes(model, clip=True, state=(), weights=(), staging_slots=1, device_gradients=held)
    sizes = []
    for placed in (every, without_ram_gradients(every, layers)):
        slots, spans = [home.gradient_slot for home in placed], [home.gradient_span for home in placed]
        sizes.append(sum(slot_bytes(model.layers, slots, gradient_type, spans).values()))
    return sizes[0] - sizes[1]
